/* SPDX-License-Identifier: Apache-2.0 */
/* attend_sm80.cu -- attention for every GPU from sm_80 on: mma.sync, ldmatrix, cp.async. One block is one worker of the plan: it walks the pieces
 * [worker_first[w], worker_first[w + 1]); the grid stays as it is for the life of a plan.
 *
 * Nouns
 *   packed row   row i of a piece and head g of its unit: u = i * unit_heads + g. K and V are read once for all of them
 *   tile         T keys of K (or V) in one slot of a ring of NS slots in shared memory
 *   kind         <MT, WR, WV, WK>: how a block's warps share one tile. WR warps along the rows, 16 MT packed rows each, times WV along the columns of V,
 *                times WK along the keys. Warps that differ in WV compute the same scores. Warps that differ in WK have a softmax of their own, and
 *                join at the end of the piece. A piece takes the first kind that holds its packed rows. In the invariant mode WK is 1, and then a
 *                row's bits do not depend on the kind: each of its sums is made by the same instructions in the same order
 *   step         wait for the oldest entry of the ring (K or V of a tile, or with FV_PAIRED both), one barrier, refill the entry just freed, compute
 *
 *   time      ring (NS = 3)                    block
 *   2 i       K(i+1) is asked for              S = Q K(i)'; mask; P = exp2(S - m)
 *   2 i + 1   V(i+1) is asked for              O = O a + P V(i); places of tile i + 2 from page ids, ids of tile i + 3 are asked for
 *
 * m is a row's maximum in base 2, or up to 2^SLACK below it, or above: only what grows by more rescales O, so nearly no tile does.
 *
 * Addresses: a key's page and place in it are looked up once a tile by one thread, two tiles ahead, from page ids that were asked for a tile before
 * that (FV_LOOK 2: of two tiles by twice the threads, every second tile); ragged memory is the case of one page. What it writes to shared memory is
 * the address itself, so that a load of 16 bytes costs four instructions. A bad id is reported and its keys are absent. Absent keys (past the end,
 * outside of what the variants' bounds leave, in bad pages) are loaded from a row of zeros and masked. Keys that are present but that no row of the tile
 * sees may hold NaN in V: where that can be, their rows of V are cleared before use.
 *
 * Key sums (FV_KEY_SUM) are a second kernel of the same text, ../attend_sums.cuh: S once more, by the code here.
 *
 * Masks, by tile: none where all rows see all keys; two comparisons a score where the variants' bounds say it all; else their hooks.
 *
 * Cycles of one SM for a tile of 64 keys, dims 128, 16 bit (an mma of 16x8x16: 6.1 a quarter; ldmatrix.x4: 4 of the SM; exp2: 8 a quarter):
 *   decode, 16 packed rows, <1, 1, 1, 4>, 4 blocks   a warp: 32 mma 195, 8 exp2 64, 24 ldmatrix, 16 cp.async; about 350 instructions. 4 blocks, so 4
 *                                       warps a quarter: 1400 for 4 tiles, 128 KB, that take 6600 to come at 20 bytes a cycle
 *   prefill, 128 rows, <2, 4, 1, 1>, 2 blocks        a warp: 256 mma 1560, 64 exp2 512, 80 ldmatrix, some 900 instructions in all; 2 warps a quarter:
 *                                       3120 for 2 tiles if all else hides behind mma; ldmatrix and cp.async 3070 of the SM
 *
 * Constants, by -D (attend.c chooses; FV_SMEM is what it will ask for): FV_DK FV_DV dims, FV_TAIL of Q and K in a second tensor, FV_VINK V is K's prefix;
 * FV_QT FV_KT FV_VT FV_OT element types (element.cuh); FV_CT FV_PT what S and O are multiplied in; FV_KS FV_VS what K and V are in shared memory
 * (KT, VT, or the multiplication's type: converted on the way in, which hooks on keys and values need); FV_T, FV_NS, FV_WARPS, FV_CTAS (blocks that
 * should fit one SM), FV_ROWS (packed rows of the largest kind), FV_OUT_ROWS (rows staged at once on their way out), FV_KINDS; FV_KSCALE
 * FV_VSCALE 1: a scale per token and head; FV_KEYS_IN_PLACE 1: K comes as it is stored, and is hooked in shared memory,
 * FV_KEYS_TURNED 1: by turning it; FV_SCALED 1: scores are scaled
 * before exp2, not in it; FV_INVARIANT chunks; FV_PAIRED 1: K and V of a tile are one entry of the ring; FV_LOOK tiles looked up at once;
 * FV_SUM_LINES warps of the largest kind along the rows (key sums); FV_KIND_n each kind, FV_COPIES the numbers of warps along the keys that kinds
 * have, FV_PART: see KIND_CODE. */
#ifdef __CUDACC_RTC__                   /* the host half is ../attend.c */
#include "uses.cuh"
#include "plan.cuh"
#include "tile.cuh"

#define NT (32 * FV_WARPS)
#define STEPS (FV_VINK || FV_PAIRED ? 1 : 2)                            /* of a tile; each has an entry of the ring */
#define ENTRY_SLOTS (FV_PAIRED ? 2 : 1)
#define RING (FV_NS / ENTRY_SLOTS)                                      /* entries */
#define LEAD (STEPS == 1 ? RING : 1 + RING / 2)                         /* tiles whose places are known before the loop */
#define FIRST_LOOK ((LEAD + FV_LOOK - 1) / FV_LOOK * FV_LOOK)              /* the first tile that is looked up in the loop */
#define PLACES_NEEDED (FIRST_LOOK + FV_LOOK)
#define PLACES (PLACES_NEEDED <= 1 ? 1 : PLACES_NEEDED <= 2 ? 2 : PLACES_NEEDED <= 4 ? 4 : 8)   /* ring of places */
#define ABSENT (-0x7fffffff - 1)
#define PAGES_KEPT (FV_KSCALE || FV_VSCALE || FV_CONVERT_K || FV_CONVERT_V || FV_KS == FV_E2M1 || FV_VS == FV_E2M1)
#define LOG2E 1.44269504088896341f
#define ALL_LANES 0xffffffffu
/* By how much, in base 2, a maximum may outgrow what exponentials are taken of: 2^8 fits f16 well, but not times a scale of any size; and where it is
 * asked for (FV_ROW_MAX), m is the maximum. */
#ifdef FV_HAS_ROW_MAX
#define SLACK 0.0f
#else
#define SLACK (V_WEIGHED ? 0.0f : 8.0f)
#endif
/* What has risen once may rise with each tile (a penalty by distance): m then goes so far above, where weights have the exponents for it. */
#define LIFT (SLACK == 0 || V_RAW > 8 ? 0.0f : FV_PT == FV_F16 ? 4.0f : 40.0f)
#define K_AS_STORED (!FV_CONVERT_K || FV_KEYS_IN_PLACE)     /* how K's rows come to shared memory */
#define K_WEIGHED (FV_KSCALE && !FV_CONVERT_K)       /* scales that scores and weights are multiplied with */
#define V_WEIGHED (FV_VSCALE && !FV_CONVERT_V)
/* Blocks of many rows, at most two to an SM, on GPUs whose compiler has the registers for it: what costs a warp its own time is kept off its path. */
#define ROOMY (STEPS == 2 && FV_CTAS <= 2 && __CUDA_ARCH__ >= 900)
/* P is made between the products of P V, when V's entry has come and K's slot is no longer K's. Beside hooks on scores a warp with 32 rows of 128
 * columns has no registers for that. */
#ifdef FV_HAS_WEIGHT
#define SOFT false
#else
#define SOFT (ROOMY && !(FV_SCALED && FV_DV > 64 && FV_DV != 256) && !K_WEIGHED && !V_WEIGHED)
#endif
/* Then m follows 16 keys at a time, between those products: where there are enough of them. Not in the invariant mode, whose bits are those of
 * kernels without. */
#define LATE (SOFT && !FV_SCALED && FV_DV == 128 && !FV_INVARIANT)
#define V_SCALE ((FV_CONVERT_V ? 1.0f : W.v_scale) * V_UNIT)
/* Narrow fields come too small by a power of two (tile.cuh): Q brings what f32 scores may not lack, scales and the weights of V's scales the rest. */
#define K_RAW fv_raw_exponent(FV_KS, FV_CT)
#define V_RAW fv_raw_exponent(FV_VS, FV_PT)
#define Q_UNIT (K_RAW > 60 ? 0x1p60f : 1.0f)
#define K_UNIT (K_RAW == 120 ? 0x1p60f : K_RAW == 112 ? 0x1p52f : K_RAW == 8 ? 256.0f : 1.0f)
#define V_UNIT (V_RAW == 8 ? 256.0f : V_RAW > 60 ? 0x1p60f : 1.0f)
#define P_UNIT (V_RAW == 120 ? 0x1p60f : V_RAW == 112 ? 0x1p52f : 1.0f)
/* A function of its own, compiled once: what is done once a piece, and each kind, whose registers the compiler then counts alone. Not called where sums
 * are held in registers. */
#define COLD static __device__ __noinline__
/* Kinds, and what they call once a piece. A text of several kinds may be compiled in parts at the same time (FV_JIT_PARTS): FV_PART 0 is the kernel and
 * what is done once a piece, FV_PART n is kind n alone; not defined, it is all of them. */
#ifdef FV_PART
#define KIND_CODE __device__ __noinline__
#define PIECE_CODE __device__ __noinline__
#define MAIN_PART (FV_PART == 0)
#else
#define KIND_CODE COLD
#define PIECE_CODE COLD
#define MAIN_PART 1
#endif

enum {
    K_UNITS = fv_units(FV_KS, FV_DK), V_UNITS = fv_units(FV_VS, FV_DV),
    Q_ELEMENTS = K_UNITS * fv_unit_elements(FV_KS),
    Q_UNITS = fv_units(FV_CT, Q_ELEMENTS),
    K_STEPS = FV_CT == FV_F32 ? 1 : fv_fields(FV_KS),                   /* product steps of a unit of K */
    V_TILES = fv_unit_tiles(FV_VS), V_FIELDS = fv_fields(FV_VS),
    TILE_WORDS = fv_div_up(FV_T, 32),
};
typedef fv_rows<K_UNITS> k_rows;
typedef fv_rows<(FV_VINK ? K_UNITS : V_UNITS)> v_rows;
typedef fv_rows<Q_UNITS> q_rows;

/* What absent keys are read from: as long as the longest row. Several, as one lies in one part of L2, at which all blocks would queue. */
enum { ZERO_ROWS = 32 };
static __device__ uint4 zero_rows[ZERO_ROWS][2 * (K_UNITS > V_UNITS ? K_UNITS : V_UNITS)];
FV_DEVICE const char *zero_row(int t) { return (const char *)zero_rows[t % ZERO_ROWS]; }

/* ------------------------------------------------------------------------------------------------- shared memory */

/* A slot of the ring: rows of K or V, then their e4m3 scales (BLOCKS a row). In K's slot then one f32 scale a key for K, and one for V. */
enum {
    K_BLOCKS = FV_KS == FV_E2M1 ? 4 * K_UNITS : 0, V_BLOCKS = FV_VS == FV_E2M1 ? 4 * (FV_VINK ? K_UNITS : V_UNITS) : 0,
    K_BYTES = FV_T * k_rows::stride, V_BYTES = FV_T * v_rows::stride,
    K_SCALES = K_BYTES + FV_T * K_BLOCKS, V_SCALES = K_SCALES + (K_WEIGHED ? 4 * FV_T : 0),
    K_SLOT = V_SCALES + (V_WEIGHED ? 4 * FV_T : 0), V_SLOT = V_BYTES + FV_T * V_BLOCKS,
    SLOT = fv_div_up(K_SLOT > V_SLOT ? K_SLOT : V_SLOT, 128) * 128,
    Q_BYTES = FV_ROWS * q_rows::stride,
    /* rows of O on their way out, f32: columns in groups of 8, turned by the row where there are 8 groups or a multiple */
    O_TURNED = FV_DV % 64 == 0, O_STRIDE = O_TURNED ? FV_DV : fv_div_up(FV_DV, 8) * 8 + 8,
    O_BYTES = 4 * O_STRIDE * FV_OUT_ROWS, SUMS_BYTES = 8 * FV_OUT_ROWS,
    RING_BYTES = FV_NS * SLOT + Q_BYTES,
    O_AT = FV_INVARIANT ? RING_BYTES : 0,               /* chunks are written while the ring is in use */
    OUT_END = O_AT + O_BYTES + SUMS_BYTES,
    BULK = OUT_END > RING_BYTES ? OUT_END : RING_BYTES,
};

/* How a pair turns from one position to the next: as a part of a turn (simt.cuh), and its sine and cosine; those of AT_ONCE positions. */
enum { KEY_RUN = FV_T / FV_WARPS };                         /* keys of a warp whose hooks are in place ... */
enum { KEYS_AT_ONCE = FV_CTAS * FV_WARPS >= 16 ? 2 : KEY_RUN < 4 ? KEY_RUN : 4 };       /* ... of them at once: as many as there are registers for */
struct alignas(16) pair_turn { v_step step; float s, c, far_s, far_c, reserved[2]; };

struct row_info { int pos, row, request, head; };       /* of a packed row; row -1: none */

/* Which tiles a piece has: read once a step, in one load. */
struct __align__(16) tile_range {
    int count;
    int clear_first, clear_end;         /* tiles of which each row sees each key; publish() ends them at the first that has keys in a bad page */
    int flags;                          /* d_attend.wide */
};

/* Nothing of the tile has to be masked. All warps say the same, though some look while others publish tiles to come: that moves clear_end to one of
 * those. */
FV_DEVICE bool is_clear(const tile_range &x, int tile) { return tile >= x.clear_first && tile < x.clear_end; }

/* Its keys, of the segment: the first of tile 0, those that are present, and the position of key 0. */
struct __align__(16) key_range { int zero, begin, end, position; };

/* What all threads know of the piece at hand. */
struct work {
    tile_range tiles;
    key_range keys;
    int64_t k_from, v_from;             /* where the head's row of page 0 (ragged: of the segment's first token) lies, see k_row */
    int64_t table;
    int page_positions;                 /* or -1 */
    int unit, kv_head, first_head, num_rows, packed;
    int slot, record, row_first;
    int pos_min, pos_max;               /* over its rows */
    int bounded;                        /* in the others, bounds and key_begin, key_end say it all, but for bad pages */
    int request;
    int origin;                         /* what tiles and chunks of the invariant mode count keys from */
    int exact;                          /* all rows together see no gaps between the first and the last key that one of them sees */
#if FV_TAIL
    int64_t tail_from;
#endif
    float k_scale, v_scale;
};

/* What lookups need, the same for all pieces: near at hand, and read 16 bytes at a time. */
struct __align__(16) lookup {
    const void *ids, *v_ids;
    int64_t ids_stride, v_ids_stride, num_pages, table_entries;
    int64_t k_page, k_key, v_page, v_key;       /* from page to page and from key to key, see k_row */
#if FV_TAIL
    int64_t tail_page, tail_key;
#endif
    uint32_t page_factor, page_shift;   /* key / page_size = key * factor >> shift */
    int page_size;                      /* 0: ragged */
    int ids_64, v_ids_64;
    int unit_heads, chunk;
};

enum { STEP_WORDS = (sizeof(d_step) - FV_USES_BYTES) / 8, PLAN_WORDS = sizeof(d_plan_head) / 8 };

#ifdef FV_HAS_KEY_SUM
enum { SUM_TILES = FV_NS < PLACES / FV_LOOK * FV_LOOK ? FV_NS : PLACES / FV_LOOK * FV_LOOK, SUM_KEYS = SUM_TILES * FV_T };     /* of K, in the ring's slots */

/* The second pass (attend_sums.cuh): its block's item, and what is under way of it. */
struct summing {
    int request, kv_head, first, count; /* keys [first, first + count) of the request; count 0: there is no item */
    int64_t column;                     /* of the first */
    int over;                           /* keys of tile 0 that lie before those of W's segment */
    int seen_begin, seen_end;           /* keys that W's rows may see */
    int row, row_end;                   /* rows of the segment that are to come */
    int any;
    uint32_t found[FV_WARPS];           /* bits: segments that concern the item */
    float columns[SUM_KEYS];            /* of segments that are done with */
    float sums[FV_SUM_LINES][SUM_KEYS]; /* of the segment at hand, by warps along the rows */
};
#endif

struct shared {
    unsigned char bulk[BULK];           /* ring of NS slots, then Q; at the end of a piece, rows of O, then their sums */
    /* where a key's row of its head lies: the address (of zeros where it is absent); for the narrow loader bytes (fp4: elements) from the tensor's
     * first */
    int64_t k_row[PLACES][FV_T];
    int64_t v_row[FV_VINK ? 1 : PLACES][FV_T];
#if FV_TAIL
    int64_t tail_row[PLACES][FV_T];
#endif
#if PAGES_KEPT
    int page[PLACES][FV_T], v_page[PLACES][FV_T], in_page[PLACES][FV_T];
#endif
    int position[PLACES][FV_T];         /* of the key, or ABSENT */
    row_info rows[FV_ROWS];
    uint32_t seen[4][TILE_WORDS];       /* of tile i, at i % 4: bits: some row sees the key */
    int bad[PLACES][TILE_WORDS];        /* each warp of lookups: some of its keys are in bad pages */
    int last[FV_ROWS];                  /* record that this block merges for row i, -1: none */
    int piece, piece_end;               /* the next one, and what ends this block's; the next one of the queue, or -1 */
    int bad_pages, bad_entry;           /* of the piece at hand: how many, one of them */
#ifdef FV_STAMPS
    int stamped;
#endif
#ifdef FV_HAS_KEY_SUM
    summing sum;
#endif
#if FV_KEYS_TURNED
    pair_turn turns[FV_DK / 2];
#endif
    work w;
    lookup look;
    d_plan_head plan;                   /* as it lies in device memory, and what of the step comes before `uses` */
    __align__(alignof(d_step)) int64_t step[STEP_WORDS];
#ifdef FV_USES
    fv_uses uses;
#endif
};
static_assert(PLAN_WORDS + STEP_WORDS <= 64 && sizeof(d_plan_head) % 8 == 0, "copied by the first 64 threads");
static_assert(sizeof(shared) <= FV_SMEM, "the launch asks for too little shared memory");

extern __shared__ __align__(128) unsigned char memory[];
#define S (*(shared *)memory)
#define W (S.w)
#define PLAN (S.plan)
#define STEP_HEAD (*(const d_step *)S.step)
#define SLOT_AT(i) (fv_smem(memory) + (i) * SLOT)
#define SUMS ((float2 *)(memory + O_AT + O_BYTES))                      /* m in base 2, and l, of rows on their way out */
#define Q_AT (fv_smem(memory) + FV_NS * SLOT)

typedef const d_attend &args;

/* What the inner loop uses takes the block's shared memory as a parameter of the same name: from sm_90 on, its address is read from a special register,
 * which takes 30 cycles, wherever the compiler does not know that it has it. A number that a function was called with it does not ask for again. */
typedef unsigned char *shared_memory;
#if ROOMY
FV_DEVICE shared_memory shared_at(uint32_t address) { return (unsigned char *)__cvta_shared_to_generic(address); }
#else
FV_DEVICE shared_memory shared_at(uint32_t) { return memory; }
#endif

/* The thread, from scratch: what follows from it is not kept in registers over the loop, where sums need them. */
FV_DEVICE int this_thread()
{
    int t = threadIdx.x;
    asm volatile("" : "+r"(t));
    return t & (NT - 1);
}

template <class T> FV_DEVICE const T *plan_array(args p, int64_t offset) { return (const T *)(p.plan + offset); }

/* FV_STAMPS, for measurements: in place of lse, 16 numbers a block: clocks at places below, of its first two pieces; the timer first and last. */
#ifdef FV_STAMPS
FV_DEVICE void stamp(args p, int i, bool timer)
{
    if (threadIdx.x != 0) return;
    int64_t t;
    if (timer) asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t) :: "memory");
    else asm volatile("mov.u64 %0, %clock64;" : "=l"(t) :: "memory");
    ((int64_t *)p.lse)[blockIdx.x * 16 + i] = t;
}
#define STAMP(i) do { if (S.stamped + (i) < 14) stamp(p, S.stamped + (i), false); } while (0)
#else
#define STAMP(i)
#endif

/* ------------------------------------------------------------------------------------------------------- the hooks */

#ifdef FV_USES
#define USES S.uses
#endif

/* `key` is minus the position of the request's first key until at_key fills it in. */
FV_DEVICE v_at at_row(args p, const row_info &r)
{
    const d_request *q = plan_array<d_request>(p, PLAN.requests) + r.request;
    v_at at;
    at.request = r.request;
    at.batch_row = r.row < 0 ? q->row_first : r.row;    /* packed rows past the last look like request 0's first row */
    at.row = at.batch_row - q->row_first;
    at.num_rows = q->num_rows;
    at.num_keys = q->num_keys;
    at.head = r.head;
    at.q_pos = r.pos;
    at.key = -q->first_position;
    at.k_pos = at.index = 0;
    at.num_q_heads = p.num_q_heads;
    return at;
}

FV_DEVICE v_at at_key(v_at at, int position)
{
    at.k_pos = position;
    at.key += position;
    return at;
}

/* ---------------------------------------------------------------------------------------------------- lookup of keys */

FV_DEVICE int64_t load_index(const void *p, int64_t i, int is64) { return is64 ? ((const int64_t *)p)[i] : ((const int32_t *)p)[i]; }

/* key / page_size for 0 <= key < 2^31: factor = ceil(2^(31 + n) / page_size), shift = 31 + n, 2^n >= page_size. */
FV_DEVICE int page_entry(const lookup &l, int key) { return (int)((uint64_t)(uint32_t)key * l.page_factor >> l.page_shift); }

/* Bytes (fp4: elements) into what the loader of such rows counts in: addresses are bytes. */
#define K_WIDE(flags) (K_AS_STORED && (flags) & 1)
#define V_WIDE(flags) (!FV_CONVERT_V && (flags) & 2)
template <int TYPE> FV_DEVICE int64_t row_units(int64_t offset, bool wide) { return TYPE == FV_E2M1 && wide ? offset >> 1 : offset; }
template <int TYPE> FV_DEVICE int64_t rows_from(const d_view &v, int64_t token, bool wide)
{
    return row_units<TYPE>(token * v.stride[0] + W.kv_head * v.stride[2], wide) + (wide ? (int64_t)v.data : 0);
}

FV_DEVICE void fill_lookup(args p)
{
    const d_step &step = STEP_HEAD;
    lookup &l = S.look;
    l.ids = step.ids;
    l.v_ids = step.v_ids ? step.v_ids : step.ids;
    l.ids_stride = step.ids_stride;
    l.v_ids_stride = step.v_ids ? step.v_ids_stride : step.ids_stride;
    l.ids_64 = step.ids_64;
    l.v_ids_64 = step.v_ids ? step.v_ids_64 : step.ids_64;
    l.num_pages = PLAN.num_pages;
    l.table_entries = PLAN.table_entries;
    l.k_page = row_units<FV_KS>(p.k.stride[0], K_WIDE(p.wide));
    l.k_key = row_units<FV_KS>(p.k.stride[1], K_WIDE(p.wide));
    l.v_page = row_units<FV_VS>(p.v.stride[0], V_WIDE(p.wide));
    l.v_key = row_units<FV_VS>(p.v.stride[1], V_WIDE(p.wide));
#if FV_TAIL
    l.tail_page = row_units<FV_KS>(p.k_tail.stride[0], K_WIDE(p.wide));
    l.tail_key = row_units<FV_KS>(p.k_tail.stride[1], K_WIDE(p.wide));
#endif
    l.page_size = PLAN.page_size;
    l.unit_heads = PLAN.unit_heads;
    l.chunk = PLAN.chunk;
    const uint32_t size = PLAN.page_size > 0 ? PLAN.page_size : 1;
    const int n = 32 - __clz(size - 1);
    l.page_shift = 31 + n;
    l.page_factor = (uint32_t)(((1ull << (31 + n)) + size - 1) / size);
}

/* 32 bits are enough for what is good; what does not fit is some negative number here. Nothing looks at an id of 32 bits until it is published: what
 * would, waits for it to come. */
struct page_ids { int k, v; };

FV_DEVICE void load_id(int &id, const void *p, int64_t i, int is64)
{
    if (is64) {
        const int64_t wide = ((const int64_t *)p)[i];
        id = (uint64_t)wide >> 31 ? -1 : (int)wide;
    } else {
        id = ((const int *)p)[i];
    }
}

/* Asks for the page id of this thread's key of tiles `tile` and on: FV_LOOK of them. */
FV_DEVICE page_ids fetch_ids(shared_memory memory, int tile)
{
    page_ids ids = { -1, -1 };
    const lookup &l = S.look;
    const key_range keys = W.keys;
    const int t = this_thread(), key = keys.zero + tile * FV_T + t;
    if (t >= FV_LOOK * FV_T || key < keys.begin || key >= keys.end || !l.page_size) return ids;
    const int64_t e = W.table + page_entry(l, key);
    if (e >= l.table_entries) return ids;
    load_id(ids.k, l.ids, e * l.ids_stride, l.ids_64);
    if (!FV_VINK) load_id(ids.v, l.v_ids, e * l.v_ids_stride, l.v_ids_64);
    return ids;
}

/* Writes where this thread's key of tiles `tile` and on lies. All that is read for that is read first. */
FV_DEVICE void publish(args p, shared_memory memory, int tile, page_ids ids)
{
    enum { THREADS = FV_LOOK * FV_T };
    const lookup read_first = S.look, &l = ROOMY ? read_first : S.look;
    const key_range keys_first = W.keys, &keys = ROOMY ? keys_first : W.keys;
    const int64_t k_from = W.k_from, v_from = W.v_from;
    const int page_positions = W.page_positions, thread = this_thread(), key = keys.zero + tile * FV_T + thread;
    if (thread >= THREADS) return;
    tile += thread / FV_T;
    const int r = tile & (PLACES - 1), t = thread % FV_T;
    bool ok = key >= keys.begin && key < keys.end, bad = false;
    int page = key, in_page = 0, v_page = key, position = keys.position + key;
    if (ok && l.page_size) {
        const int entry = page_entry(l, key);
        in_page = key - entry * l.page_size;
        bad = (uint64_t)ids.k >= (uint64_t)l.num_pages || (!FV_VINK && (uint64_t)ids.v >= (uint64_t)l.num_pages);
        if (bad && (in_page == 0 || key == keys.begin)) {
            atomicMin(&W.tiles.clear_end, tile);
            if (atomicAdd(&S.bad_pages, 1) == 0) S.bad_entry = entry;
        }
        ok = !bad;
        page = ids.k;
        v_page = FV_VINK ? ids.k : ids.v;
        if (page_positions >= 0) position = plan_array<int>(p, PLAN.page_positions)[page_positions + entry] + in_page;
    }
    const bool absent_k = !ok && K_WIDE(W.tiles.flags), absent_v = !ok && V_WIDE(W.tiles.flags);
    S.k_row[r][t] = absent_k ? (int64_t)zero_row(t) : k_from + page * l.k_page + in_page * l.k_key;
    if (!FV_VINK) S.v_row[r][t] = absent_v ? (int64_t)zero_row(t) : v_from + v_page * l.v_page + in_page * l.v_key;
#if FV_TAIL
    S.tail_row[r][t] = absent_k ? (int64_t)zero_row(t) : W.tail_from + page * l.tail_page + in_page * l.tail_key;
#endif
#if PAGES_KEPT
    S.page[r][t] = page;
    S.v_page[r][t] = v_page;
    S.in_page[r][t] = in_page;
#endif
    S.position[r][t] = ok ? position : ABSENT;
    uint32_t any = __ballot_sync(THREADS < 32 ? (1u << (THREADS & 31)) - 1 : ALL_LANES, bad);
    if (FV_T < 32) any = any >> (thread % 32 & ~(FV_T - 1)) & ((1u << (FV_T & 31)) - 1);
    if (t % 32 == 0) S.bad[r][t / 32] = any != 0;
}

/* ------------------------------------------------------------------------------------------------------------ loaders */

/* The bits of element e of the row that begins `row` bytes (fp4: elements) from data. */
template <int TYPE> FV_DEVICE uint32_t load_bits(const char *data, int64_t row, int e)
{
    if (TYPE == FV_E2M1) return ((const uint8_t *)data)[(row + e) >> 1] >> (4 * ((row + e) & 1)) & 15;
    if (fv_bits(TYPE) == 8) return ((const uint8_t *)data)[row + e];
    if (fv_bits(TYPE) == 16) return *(const uint16_t *)(data + row + 2 * e);
    return *(const uint32_t *)(data + row + 4 * e);
}

/* What is needed to find the keys of a tile in K or V. */
template <bool IS_V> struct source {
    enum {
        FROM = IS_V ? FV_VT : FV_KT, TYPE = IS_V ? FV_VS : FV_KS, DIM = IS_V ? FV_DV : FV_DK, MAIN = IS_V ? FV_DV : FV_DK - FV_TAIL,
        UNITS = IS_V ? V_UNITS : K_UNITS, CHUNKS = 2 * UNITS, N = 128 / fv_bits(TYPE),
        BLOCKS = IS_V ? V_BLOCKS : K_BLOCKS, BYTES = IS_V ? V_BYTES : K_BYTES, SCALED = IS_V ? FV_VSCALE : FV_KSCALE,
        CONVERTED = IS_V ? FV_CONVERT_V : FV_CONVERT_K && !FV_KEYS_IN_PLACE,
    };
    typedef fv_rows<UNITS> rows;
    static FV_DEVICE_INLINE const d_view &view(args p) { return IS_V ? p.v : p.k; }
    static FV_DEVICE_INLINE int64_t row(shared_memory memory, int r, int t) { return IS_V ? S.v_row[FV_VINK ? 0 : r][t] : S.k_row[r][t]; }
#if FV_TAIL
    static FV_DEVICE_INLINE int64_t tail_row(shared_memory memory, int r, int t) { return S.tail_row[r][t]; }
#else
    static FV_DEVICE_INLINE int64_t tail_row(shared_memory, int, int) { return 0; }
#endif
    /* The bits of element d. */
    template <int T> static FV_DEVICE_INLINE uint32_t bits(args p, int r, int t, int d)
    {
        const bool tail = d >= MAIN;
        return load_bits<T>(tail ? p.k_tail.data : view(p).data, tail ? tail_row(memory, r, t) : row(memory, r, t), tail ? d - MAIN : d);
    }
#if PAGES_KEPT
    /* Where key t lies in a tensor of pages, of tokens (which are pages of one key, counted from the segment's first). */
    static FV_DEVICE_INLINE int64_t place(int r, int t, const int64_t *stride)
    {
        const int64_t page = (IS_V ? S.v_page[r][t] : S.page[r][t]) + (S.look.page_size ? 0 : W.table);
        return page * stride[0] + S.in_page[r][t] * stride[1] + W.kv_head * stride[2];
    }
    /* The scale of one key, of one block: where they lie. */
    static FV_DEVICE_INLINE const float *scale(args p, int r, int t)
    {
        const d_scale &s = IS_V ? p.v_scale : p.k_scale;
        return s.data + place(r, t, s.stride);
    }
    static FV_DEVICE_INLINE const uint8_t *blocks(args p, int r, int t)
    {
        const d_view &s = IS_V ? p.v_block_scale : p.k_block_scale;
        return (const uint8_t *)s.data + place(r, t, s.stride);
    }
#endif
};

#if FV_CONVERT_K || FV_CONVERT_V
/* Where hooks on keys and values stand: in the request and its heads, at no row. */
FV_DEVICE v_at at_no_row(args p)
{
    const row_info info = { 0, 0, W.request < 0 ? 0 : W.request, W.kv_head * PLAN.units_per_kv_head * PLAN.unit_heads };
    v_at at = at_row(p, info);
    at.row = at.batch_row = at.num_rows = at.num_keys = at.q_pos = 0;
    return at;
}

/* One element of K or V of key t as f32, its scales applied. */
template <bool IS_V> FV_DEVICE float load_element(args p, int r, int t, int d)
{
    typedef source<IS_V> src;
    float x = fv_decode<src::FROM>(src::template bits<src::FROM>(p, r, t, d));
    if (src::FROM == FV_E2M1) x *= fv_decode<FV_E4M3>(src::blocks(p, r, t)[d / 16]);
    return x * (src::SCALED ? *src::scale(p, r, t) : IS_V ? W.v_scale : W.k_scale);
}

/* The same with the hooks on keys or values. */
template <bool IS_V> FV_DEVICE float load_hooked(args p, int r, int t, int d)
{
    const auto get = [&](int e) { return load_element<IS_V>(p, r, t, e); };
    v_at at = at_key(at_no_row(p), S.position[r][t]);
    at.index = d;
#ifdef FV_HAS_KEY
    if (!IS_V) return fv_key(get, USES, at, d, FV_DK);
#endif
#ifdef FV_HAS_VALUE
    if (IS_V) return fv_value(get(d), USES, at);
#endif
    return get(d);
}
#endif

/* The rows of a tile one element at a time: as they are, or with hooks and scales in the multiplication's type. Nothing is overlapped. */
template <bool IS_V> FV_DEVICE void load_narrow(args p, int slot, int tile)
{
    typedef source<IS_V> src;
    enum { WORDS = 4 * src::CHUNKS, BITS = fv_bits(src::TYPE), N = 32 / BITS };
    const int r = tile & (PLACES - 1);
#pragma unroll 1
    for (int i = this_thread(); i < FV_T * WORDS; i += NT) {
        const int t = i / WORDS, word = i % WORDS;
        uint32_t x = 0;
        if (S.position[r][t] != ABSENT)
#pragma unroll (N == 2 ? 2 : 1)
            for (int k = 0; k < N; k++) {
                const int d = word * N + k;
                if (d >= src::DIM) break;
#if FV_CONVERT_K || FV_CONVERT_V
                if (src::CONVERTED) {
                    const float v = load_hooked<IS_V>(p, r, t, d);
                    x |= src::TYPE == FV_F32 ? __float_as_uint(v) : (fv_pack<src::TYPE>(v, 0.0f) & 0xffffu) << (k * BITS);
                    continue;
                }
#endif
                x |= src::template bits<src::TYPE>(p, r, t, d) << (k * BITS);
            }
        st_shared_b32(SLOT_AT(slot) + src::rows::at(t, word / 4) + 4 * (word & 3), x);
    }
}

#if FV_KEYS_IN_PLACE
/* What key t of a tile is multiplied with before its hook sees it. */
FV_DEVICE float key_scale(args p, int r, int t)
{
    if (!FV_KSCALE) return W.k_scale;
    return S.position[r][t] == ABSENT ? 0.0f : *source<false>::scale(p, r, t);
}

/* Byte `place` of row t, from the first row's first on. */
FV_DEVICE int key_place(int t, int place) { return t * k_rows::stride + (k_rows::swizzled ? place ^ (t & 7) << 4 : place); }

#if FV_KEYS_TURNED
/* Two words of a key, which hold two pairs, turned. */
template <bool INTERLEAVED> FV_DEVICE void turn_words(const float (&s)[2], const float (&c)[2], float scale, uint32_t &x, uint32_t &y)
{
    float lo[2] = { fv_decode<FV_KS>(x & 0xffffu), fv_decode<FV_KS>(INTERLEAVED ? y & 0xffffu : x >> 16) };
    float hi[2] = { fv_decode<FV_KS>(INTERLEAVED ? x >> 16 : y & 0xffffu), fv_decode<FV_KS>(y >> 16) };
    float a[2], b[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (FV_KSCALE) lo[i] *= scale, hi[i] *= scale;
        a[i] = fmaf(lo[i], c[i], -hi[i] * s[i]);
        b[i] = fmaf(hi[i], c[i], lo[i] * s[i]);
    }
    x = fv_pack<FV_KS>(a[0], INTERLEAVED ? b[0] : a[1]);
    y = fv_pack<FV_KS>(INTERLEAVED ? a[1] : b[0], b[1]);
}

/* (s, c) turned further. */
FV_DEVICE void turn_by(float s, float c, float by_s, float by_c, float &to_s, float &to_c)
{
    to_s = fmaf(s, by_c, c * by_s);
    to_c = fmaf(c, by_c, -s * by_s);
}

/* Sines and cosines at positions that follow one another, from the first: one turned, the others by f(x + t) = 2 cos t f(x) - f(x - t). */
template <int N> FV_DEVICE void turn_on(const pair_turn &turn, float (&s)[N], float (&c)[N])
{
    if (N > 1) turn_by(s[0], c[0], turn.s, turn.c, s[1], c[1]);
#pragma unroll
    for (int k = 2; k < N; k++) {
        s[k] = fmaf(2 * turn.c, s[k - 1], -s[k - 2]);
        c[k] = fmaf(2 * turn.c, c[k - 1], -c[k - 2]);
    }
}

/* The keys of a tile whose rows hold 2 `half` turned elements, half even: in words, word w and word w + half / 2 hold two pairs either way. A lane keeps its
 * two words and goes through keys of its warp, N at a time. Where positions follow one another, the first key of the warp has an angle of its own, absent
 * or not, so that a key's bits do not depend on who else is there; 2^-20 is what 16 keys further are off at most. */
template <bool INTERLEAVED> FV_DEVICE void hook_rows(args p, int slot, int tile, int half)
{
    enum { N = KEYS_AT_ONCE, SWAP = k_rows::swizzled ? 16 : 0 };
    const int r = tile & (PLACES - 1), lane = threadIdx.x % 32, words = half / 2;
    const bool consecutive = W.page_positions < 0;
    int width = 32;                                                     /* lanes beside each other in a row: where words are few, more rows at once */
    while (width > 1 && width / 2 >= words && 32 / width < KEY_RUN / N) width /= 2;
    const int run = KEY_RUN * width / 32, first = threadIdx.x / 32 * KEY_RUN + lane / width * run;
    const int position = W.keys.position + W.keys.zero + tile * FV_T + first;
#pragma unroll 1
    for (int w = lane & (width - 1); w < words; w += width) {
        const pair_turn turn[2] = { S.turns[INTERLEAVED ? w : 2 * w], S.turns[INTERLEAVED ? w + words : 2 * w + 1] };
        uint32_t x_at = SLOT_AT(slot) + key_place(first, 4 * w), y_at = SLOT_AT(slot) + key_place(first, 4 * (w + words));
        float s[2][N], c[2][N];
#pragma unroll
        for (int i = 0; i < 2; i++) v_sincos_fine(v_angle(position, turn[i].step), &s[i][0], &c[i][0]);
#pragma unroll 1
        for (int t = first; t < first + run; t += N) {
            uint32_t x[N], y[N];
            float next_s[2], next_c[2];
#pragma unroll
            for (int n = 0; n < N; n++) {
                x[n] = ld_shared_b32((x_at ^ SWAP * n) + n * k_rows::stride);
                y[n] = ld_shared_b32((y_at ^ SWAP * n) + n * k_rows::stride);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                turn_by(s[i][0], c[i][0], turn[i].far_s, turn[i].far_c, next_s[i], next_c[i]);
                turn_on<N>(turn[i], s[i], c[i]);
            }
            if (!consecutive) {
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++) v_sincos_rough(v_angle(S.position[r][t + n], turn[i].step), &s[i][n], &c[i][n]);
            }
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float s_n[2] = { s[0][n], s[1][n] }, c_n[2] = { c[0][n], c[1][n] };
                turn_words<INTERLEAVED>(s_n, c_n, FV_KSCALE ? key_scale(p, r, t + n) : 1.0f, x[n], y[n]);
                st_shared_b32((x_at ^ SWAP * n) + n * k_rows::stride, x[n]);
                st_shared_b32((y_at ^ SWAP * n) + n * k_rows::stride, y[n]);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                s[i][0] = next_s[i];
                c[i][0] = next_c[i];
            }
            const int swap = SWAP * (N == 4 ? 4 : (t ^ (t + N)) & 7);
            x_at = (x_at ^ swap) + N * k_rows::stride;
            y_at = (y_at ^ swap) + N * k_rows::stride;
        }
    }
}
#else
/* Two words of a key, which hold two pairs: what the hook makes of them. */
template <bool INTERLEAVED> FV_DEVICE void hook_words(const fv_uses &uses, v_at at, int first, int second, float scale, uint32_t &x, uint32_t &y)
{
    const v_f32 a = fv_decode<FV_KS>(x & 0xffffu) * scale, b = fv_decode<FV_KS>(x >> 16) * scale;
    const v_f32 c = fv_decode<FV_KS>(y & 0xffffu) * scale, d = fv_decode<FV_KS>(y >> 16) * scale;
    at.index = first;
    const v_pair one = { a, INTERLEAVED ? b : c }, f = fv_key_pair(uses, at, one);
    at.index = second;
    const v_pair two = { INTERLEAVED ? c : b, d }, g = fv_key_pair(uses, at, two);
    x = fv_pack<FV_KS>(f.lo, INTERLEAVED ? f.hi : g.lo);
    y = fv_pack<FV_KS>(INTERLEAVED ? g.lo : f.hi, g.hi);
}

/* The keys of a tile whose rows hold 2 `half` elements in pairs, half even: word w and word w + half / 2 hold two pairs either way. A lane keeps its two
 * words and goes through keys of its warp, N at a time: what a hook makes of at.index alone (all that is costly about an angle) is made once. Absent keys
 * are zeros, at some position. */
template <bool INTERLEAVED> FV_DEVICE void hook_rows(args p, int slot, int tile, int half)
{
    enum { RUN = KEY_RUN, N = KEYS_AT_ONCE };
    const int r = tile & (PLACES - 1), lane = threadIdx.x % 32, words = half / 2;
    const fv_uses uses = USES;                                          /* which no store to shared memory changes */
    const v_at of_request = at_no_row(p);
    int width = 32;                                                     /* lanes beside each other in a row: where words are few, more rows at once */
    while (width > 1 && width / 2 >= words && 32 / width < RUN / N) width /= 2;
    const int run = RUN * width / 32, first = threadIdx.x / 32 * RUN + lane / width * run;
#pragma unroll 1
    for (int w = lane & (width - 1); w < words; w += width) {
        int x_at[N], y_at[N];
#pragma unroll
        for (int n = 0; n < N; n++) {
            x_at[n] = slot * SLOT + key_place(first + n, 4 * w);
            y_at[n] = slot * SLOT + key_place(first + n, 4 * (w + words));
        }
        /* N rows on, bit 6 of a place is another */
        int x_way = k_rows::swizzled ? 64 - (key_place(first, 4 * w) & 64) * 2 : 0, y_way = k_rows::swizzled ? 64 - (key_place(first, 4 * (w + words)) & 64) * 2 : 0;
#pragma unroll 1
        for (int t = first; t < first + run; t += N) {
            uint32_t x[N], y[N];
            int position[N];
#pragma unroll
            for (int n = 0; n < N; n++) {
                x[n] = *(const uint32_t *)(memory + x_at[n]);
                y[n] = *(const uint32_t *)(memory + y_at[n]);
                position[n] = fv_max(S.position[r][t + n], -0x40000000);
            }
#pragma unroll
            for (int n = 0; n < N; n++)
                hook_words<INTERLEAVED>(uses, at_key(of_request, position[n]), INTERLEAVED ? w : 2 * w, INTERLEAVED ? w + words : 2 * w + 1,
                                        FV_KSCALE ? key_scale(p, r, t + n) : 1.0f, x[n], y[n]);
#pragma unroll
            for (int n = 0; n < N; n++) {
                *(uint32_t *)(memory + x_at[n]) = x[n];
                *(uint32_t *)(memory + y_at[n]) = y[n];
                x_at[n] += N * k_rows::stride + x_way;
                y_at[n] += N * k_rows::stride + y_way;
            }
            x_way = -x_way;
            y_way = -y_way;
        }
    }
}
#endif

/* The keys of a tile, which lie in shared memory as they are stored, become what the hook makes of them: T / WARPS of them by each warp. */
COLD void hook_keys(args p, int slot, int tile)
{
    enum { RUN = KEY_RUN };
    bool interleaved;
    const int half = fv_max(fv_min(fv_key_pairs(USES, &interleaved), FV_DK), 0) / 2, lane = threadIdx.x % 32, r = tile & (PLACES - 1);
    const bool whole = half % 2 == 0 && (FV_KSCALE || W.k_scale == 1.0f);
    if (whole && interleaved) hook_rows<true>(p, slot, tile, half);
    else if (whole) hook_rows<false>(p, slot, tile, half);
    if (whole && (!FV_KSCALE || 2 * half == FV_DK)) return;
    /* the rest one by one: pairs that fill no words, a scale of the tensor, and what is in no pair */
#pragma unroll 1
    for (int t = threadIdx.x / 32 * RUN; t < (threadIdx.x / 32 + 1) * RUN; t++) {
        const float scale = key_scale(p, r, t);
        const auto at = [&](int d) -> uint16_t & { return *(uint16_t *)(memory + slot * SLOT + key_place(t, 2 * d)); };
        const auto put = [&](int d, float x) { at(d) = (uint16_t)fv_pack<FV_KS>(x, 0.0f); };
        v_at key = at_key(at_no_row(p), fv_max(S.position[r][t], -0x40000000));
#pragma unroll 1
        for (int i = lane; i < half && !whole; i += 32) {
            const int lo = interleaved ? 2 * i : i, hi = interleaved ? 2 * i + 1 : i + half;
            const v_pair x = { fv_decode<FV_KS>(at(lo)) * scale, fv_decode<FV_KS>(at(hi)) * scale };
            key.index = i;
            const v_pair y = fv_key_pair(USES, key, x);
            put(lo, y.lo);
            put(hi, y.hi);
        }
#pragma unroll 1
        for (int d = 2 * half + lane; d < FV_DK; d += 32) put(d, fv_decode<FV_KS>(at(d)) * scale);
    }
}
#endif

#if PAGES_KEPT
/* Scales of a tile's keys: one e4m3 for each 16 elements, one f32 a key. */
template <bool IS_V> FV_DEVICE void load_scales(args p, int slot, int tile)
{
    typedef source<IS_V> src;
    enum { WORDS = src::BLOCKS / 4 };
    const uint32_t to = SLOT_AT(slot) + src::BYTES;
    const int r = tile & (PLACES - 1);
#pragma unroll 1
    for (int i = this_thread(); i < FV_T * WORDS; i += NT) {
        const int t = i / (WORDS + !WORDS), first = i % (WORDS + !WORDS) * 4;
        uint32_t word = 0;
        if (S.position[r][t] != ABSENT) {
            const uint8_t *from = src::blocks(p, r, t);
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (first + k < src::DIM / 16) word |= (uint32_t)from[first + k] << (8 * k);
        }
        st_shared_b32(to + t * src::BLOCKS + first, word);
    }
    if (!IS_V && threadIdx.x < FV_T) {
        const int t = threadIdx.x, bytes = S.position[r][t] != ABSENT ? 4 : 0;
        if (K_WEIGHED) cp_async_ca_4(SLOT_AT(slot) + K_SCALES + 4 * t, bytes ? source<false>::scale(p, r, t) : p.k_scale.data, bytes);
        if (V_WEIGHED) cp_async_ca_4(SLOT_AT(slot) + V_SCALES + 4 * t, bytes ? source<true>::scale(p, r, t) : p.v_scale.data, bytes);
    }
}
#endif

/* The address of a chunk of key t's row. */
template <bool IS_V> FV_DEVICE const char *chunk_at(shared_memory memory, int r, int t, int chunk)
{
    typedef source<IS_V> src;
    if (src::DIM < src::CHUNKS * src::N && chunk * src::N >= src::DIM) return zero_row(t);
    if (src::MAIN < src::DIM && chunk * src::N >= src::MAIN) return (const char *)src::tail_row(memory, r, t) + 16 * (chunk - src::MAIN / src::N);
    return (const char *)src::row(memory, r, t) + 16 * chunk;
}

/* Rows of K or V of a tile into a slot of the ring: 16 bytes a thread and turn, all addresses of BATCH turns before the first load. */
template <bool IS_V> FV_DEVICE void load_wide(shared_memory memory, int slot, int tile)
{
    typedef source<IS_V> src;
    enum { ALL = FV_T * src::CHUNKS, TURNS = fv_div_up(ALL, NT), BATCH = TURNS < 8 ? TURNS : 8, EVEN = NT % src::CHUNKS == 0, STEP_ROWS = NT / src::CHUNKS };
    const uint32_t to = SLOT_AT(slot);
    const int r = tile & (PLACES - 1), i = this_thread();
#pragma unroll (TURNS <= 16 ? 2 : 1)
    for (int n0 = 0; n0 < TURNS; n0 += BATCH) {
        const char *from[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int at = (n0 + b) * NT + i, t = EVEN ? (n0 + b) * STEP_ROWS + i / src::CHUNKS : at / src::CHUNKS;
            if ((ALL % NT == 0 && TURNS % BATCH == 0) || at < ALL) from[b] = chunk_at<IS_V>(memory, r, t, EVEN ? i % src::CHUNKS : at % src::CHUNKS);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int at = (n0 + b) * NT + i, t = EVEN ? (n0 + b) * STEP_ROWS + i / src::CHUNKS : at / src::CHUNKS;
            if ((ALL % NT == 0 && TURNS % BATCH == 0) || at < ALL) cp_async_cg_16(to + src::rows::at(t, EVEN ? i % src::CHUNKS : at % src::CHUNKS), from[b]);
        }
    }
}

template <bool IS_V> FV_DEVICE void load_tile(args p, shared_memory memory, const tile_range &tiles, int slot, int tile)
{
    typedef source<IS_V> src;
    if (tile >= tiles.count) return;
    if (src::CONVERTED || !(tiles.flags & (IS_V ? 2 : 1))) load_narrow<IS_V>(p, slot, tile);
    else load_wide<IS_V>(memory, slot, tile);
#if PAGES_KEPT
    if (src::BLOCKS || (!IS_V && (K_WEIGHED || V_WEIGHED))) load_scales<IS_V>(p, slot, tile);
#endif
}

/* The first slot of entry e of the ring, and of entry e + RING - 1. Where the address of shared memory takes a register, a remainder is cheaper than a
 * counter beside e; elsewhere it is not. */
#if ROOMY
struct cursor {
    FV_DEVICE_INLINE int slot(int e) const { return (unsigned)e % RING * ENTRY_SLOTS; }
    FV_DEVICE_INLINE int last(int e) const { return slot(e + RING - 1); }
    FV_DEVICE_INLINE void advance() {}
};
#else
struct cursor {
    int i = 0;
    FV_DEVICE_INLINE int slot(int) const { return i * ENTRY_SLOTS; }
    FV_DEVICE_INLINE int last(int) const { return (i == 0 ? RING - 1 : i - 1) * ENTRY_SLOTS; }
    FV_DEVICE_INLINE void advance() { i = i + 1 == RING ? 0 : i + 1; }
};
#endif

/* Asks for entry e: K and V by turns, or (FV_PAIRED) together; the group is committed even where nothing is left to load. */
template <bool IS_V> FV_DEVICE void load_entry(args p, shared_memory memory, const tile_range &tiles, int slot, int e)
{
    load_tile<IS_V>(p, memory, tiles, slot, e / STEPS);
    if (FV_PAIRED) load_tile<FV_PAIRED>(p, memory, tiles, slot + 1, e / STEPS);
    cp_async_commit_group();
}

/* Entry e has arrived and the one before it is done with; entry e + RING - 1 is asked for. */
template <bool IS_V> FV_DEVICE void step(args p, shared_memory memory, const tile_range &tiles, const cursor &at, int e)
{
    if (RING > 1) {
        cp_async_wait_group<(RING > 1 ? RING - 2 : 0)>();
        __syncthreads();
        load_entry<STEPS == 2 && (IS_V + RING - 1) % 2 == 1>(p, memory, tiles, at.last(e), e + RING - 1);
    } else {
        __syncthreads();
        load_entry<IS_V>(p, memory, tiles, at.slot(e), e);
        cp_async_wait_group<0>();
        __syncthreads();
    }
}

/* -------------------------------------------------------------------------------------------------- states and pieces */

/* (m, l, o) = (m, l, o) + (m2, l2, o2), left to right; (-inf, 0, 0) is neutral. */
struct fold { float a, b; };
FV_DEVICE fold fold_states(float &m, float &l, float m2, float l2)
{
#ifdef FV_HAS_WEIGHT
    const fold f = { 1, 1 };
#else
    const float top = fmaxf(m, m2), base = top == -fv_inf() ? 0.0f : top;
    const fold f = { ex2_approx(m - base), ex2_approx(m2 - base) };
    m = top;
    l = __fmaf_rn(l2, f.b, __fmul_rn(l, f.a));
#endif
    return f;
}
FV_DEVICE float fold_value(fold f, float o, float o2) { return __fmaf_rn(o2, f.b, __fmul_rn(o, f.a)); }

enum { O_FLOATS = fv_div_up(FV_DV, 4) * 4 };        /* of one head in a slot; behind all heads' follow their m, l */

/* Column d of a staged row with row % 8 == low: of places that are constants but for `low`, eight differ by more than a constant. */
FV_DEVICE int o_column(int low, int d) { return O_TURNED ? (d & ~56) + (d & 56 ^ low << 3) : d; }
FV_DEVICE int o_place(int row, int d) { return row * O_STRIDE + o_column(row & 7, d); }

/* The queue's next piece, by one thread: asked for when the one at hand is all but done, as it takes as long as a read of memory. */
FV_DEVICE void take_piece(args p)
{
    const int i = atomicAdd(p.queue, 1);
    S.piece = i < PLAN.num_pieces ? PLAN.num_pieces - 1 - i : -1;
}

/* Once a piece (attend_piece.cuh): Q and the first entries of the ring are asked for; packed rows first .. first + count - 1, staged in COPIES copies, go
 * out or (slot >= 0) to slot + i; all partials of the piece are written. */
PIECE_CODE void begin_piece(args p, int rows);
template <int COPIES> PIECE_CODE void write_rows(args p, int first, int count, int slot);
PIECE_CODE void arrive_and_merge(args p);

#if MAIN_PART
#include "attend_piece.cuh"
#endif

/* ------------------------------------------------------------------------------------------------------------ a kind */

/* The state of a warp's rows: accumulators of O, and per row (of 2 MT in a thread) the maximum in base 2 and this lane's part of the sum. */
template <int MT, int NU> struct state {
    float o[MT][NU * V_TILES][4];
    float m[MT][2], l[MT][2];
};

/* The maximum of a row that has seen nothing: finite, so that no difference is NaN. */
#define NO_MAX (-3e38f)
FV_DEVICE float seen_max(float m) { return m == NO_MAX ? -fv_inf() : m; }

template <int MT, int NU> FV_DEVICE void clear(state<MT, NU> &x)
{
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
#pragma unroll
        for (int n = 0; n < NU * V_TILES; n++)
            for (int i = 0; i < 4; i++) x.o[mt][n][i] = 0;
        for (int h = 0; h < 2; h++) {
#ifdef FV_HAS_WEIGHT
            x.m[mt][h] = 0;
#else
            x.m[mt][h] = NO_MAX;
#endif
            x.l[mt][h] = 0;
        }
    }
}

/* Where a warp stands in its block: row of its first m-tile (they are 16 WR apart), first unit of V, first key in a tile. */
struct part { int row, unit, key; };
template <int WR, int WV, int WK> FV_DEVICE part this_part()
{
    const int warp = this_thread() / 32;
    const part at = { WR == 1 ? 0 : warp % WR * 16, WV == 1 ? 0 : warp / WR % WV * fv_div_up(V_UNITS, WV), WK == 1 ? 0 : warp / (WR * WV) * (FV_T / WK) };
    return at;
}

template <int MT, int WR> FV_DEVICE void load_queries(shared_memory memory, uint32_t (&a)[MT][K_STEPS][4], int row0, int unit)
{
    const int lane = this_thread() % 32;
    const uint32_t q = Q_AT + (row0 + lane % 16) * q_rows::stride;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int r = 0; r < K_STEPS; r++)
            ldmatrix_x4(a[mt][r], q + mt * 16 * WR * q_rows::stride + q_rows::in_row(lane & 7, lane >> 4, unit * K_STEPS + r));
}

/* S = Q K' for a warp's rows and 8 ST keys from key0 on. */
template <int MT, int WR, int ST> FV_DEVICE void scores(shared_memory memory, float (&s)[MT][ST][4], uint32_t slot, int row0, int key0)
{
    const int lane = this_thread() % 32, krow = key0 + (lane & 7) + (lane >> 4 << 3), khalf = lane >> 3 & 1, low = lane & 7;
    const uint32_t k = slot + krow * k_rows::stride;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int n = 0; n < ST; n++)
            for (int i = 0; i < 4; i++) s[mt][n][i] = 0;
#pragma unroll (FV_CT == FV_F32 ? 2 : K_UNITS * K_STEPS <= 8 ? 8 : 4)
    for (int unit = 0; unit < K_UNITS; unit++) {
        uint32_t a[MT][K_STEPS][4];
        load_queries<MT, WR>(memory, a, row0, unit);
#pragma unroll
        for (int n = 0; n < ST / 2; n++) {
            uint32_t w[4];
            ldmatrix_x4(w, k + n * 16 * k_rows::stride + k_rows::in_row(low, khalf, unit));
#pragma unroll
            for (int g = 0; g < 2; g++)
#pragma unroll
                for (int r = 0; r < K_STEPS; r++) {
                    uint32_t b0, b1;
                    fv_k_operand<FV_KS, FV_CT>(w, g, r, b0, b1);
                    if (FV_KS == FV_E2M1) {
                        const uint32_t code = ld_shared_u8(slot + K_BYTES + (key0 + n * 16 + g * 8 + lane / 4) * K_BLOCKS + 4 * unit + 2 * (r >> 1) +
                                                           (lane & 3) / 2);
                        const uint32_t scale = fv_scale_pair<FV_CT>(code, code);
                        b0 = fv_mul2<FV_CT>(b0, scale);
                        b1 = fv_mul2<FV_CT>(b1, scale);
                    }
#pragma unroll
                    for (int mt = 0; mt < MT; mt++) fv_mma<FV_CT>::step(s[mt][2 * n + g], a[mt][r], b0, b1);
                }
        }
    }
}

/* Masks by the variants' bounds and the first and last present key: two comparisons a score. */
template <int MT, int WR, int ST> FV_DEVICE void mask_bounds(float (&s)[MT][ST][4], int tile, const part &at)
{
    const int lane = this_thread() % 32, key = W.keys.zero + tile * FV_T + at.key + 2 * (lane & 3);    /* of this thread's first score */
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int first = W.keys.begin, last = W.keys.end - 1;
#ifdef FV_HAS_VISIBLE
            const int pos = S.rows[at.row + mt * 16 * WR + h * 8 + lane / 4].pos;
            first = fv_max(first, fv_first_key(USES, pos) - W.keys.position);
            last = fv_min(last, fv_last_key(USES, pos) - W.keys.position);
#endif
            first -= key;
            last -= key;
#pragma unroll
            for (int n = 0; n < ST; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (8 * n + e < first || 8 * n + e > last) s[mt][n][2 * h + e] = -fv_inf();
        }
}

/* Masks the scores of keys that are absent or not visible. The hooks are evaluated in a loop that is not unrolled, to bits: their code may be long. */
template <int MT, int WR, int ST> FV_DEVICE void mask_hooks(args p, float (&s)[MT][ST][4], int tile, const part &at, bool mark)
{
    enum { N = 2 * ST };                                /* scores of a row in a thread */
    static_assert(2 * MT * N <= 64, "bits of a thread's scores");
    const int lane = this_thread() % 32, j = lane & 3, r = tile & (PLACES - 1);
    uint64_t seen = 0;                                  /* bit N (2 mt + h) + 2 n + e */
#pragma unroll 1
    for (int i = 0; i < 2 * MT * N; i++) {
        const int q = i / N, c = i % N, thread = this_thread() % 32, key = at.key + c / 2 * 8 + 2 * (thread & 3) + c % 2;
        const row_info info = S.rows[at.row + (q >> 1) * 16 * WR + (q & 1) * 8 + thread / 4];
        const int position = S.position[r][key];
        bool ok = info.row >= 0 && position != ABSENT;
#ifdef FV_HAS_VISIBLE
        ok = ok && fv_visible(USES, at_key(at_row(p, info), position));
#endif
        seen |= (uint64_t)ok << i;
    }
    if (mark) {
        uint32_t any = 0;
#pragma unroll
        for (int q = 0; q < 2 * MT; q++) any |= (uint32_t)(seen >> (N * q));
#pragma unroll 1
        for (int c = 0; c < N; c++) {
            const int key = at.key + c / 2 * 8 + 2 * j + c % 2;
            const uint32_t lanes = __ballot_sync(ALL_LANES, any >> c & 1);
            if (lane < 4 && (lanes & 0x11111111u << lane)) atomicOr(&S.seen[tile & 3][key >> 5], 1u << (key & 31));
        }
    }
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int n = 0; n < ST; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (!(seen >> (N * (2 * mt + (i >> 1)) + 2 * n + (i & 1)) & 1)) s[mt][n][i] = -fv_inf();
}

/* What hooks on scores are told of a thread's rows, and their arguments: read once a tile, so that what follows from them alone is done once for all
 * keys. */
template <int MT> struct hooked {
#ifdef FV_HAS_SCORE
    fv_uses uses;
    v_at rows[2 * MT];
#endif
};

#if FV_SCALED
template <int MT, int WR> FV_DEVICE void find_hooked(args p, hooked<MT> &h, const part &at)
{
#ifdef FV_HAS_SCORE
    h.uses = USES;
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) h.rows[i] = at_row(p, S.rows[at.row + i / 2 * 16 * WR + i % 2 * 8 + this_thread() % 32 / 4]);
#endif
}

/* Scores in natural units, then the hooks on scores: near (simt.cuh), and once more where that was not enough for some lane. 16 keys at a time: a
 * vote for each score would cost more than it saves, and all of them at once more registers than there are. */
template <int MT, int WR, int ST> FV_DEVICE void refine(args p, float (&s)[MT][ST][4], uint32_t slot, int tile, const part &at, const hooked<MT> &h)
{
    const int j = this_thread() & 3, r = tile & (PLACES - 1);
    const float scale = p.scale * (FV_CONVERT_K ? 1.0f : W.k_scale * K_UNIT);
#pragma unroll
    for (int n = 0; n < ST; n += 2) {
        enum { SIZE = 8 * MT };         /* score i is that of row i / 4, key 8 (i / 2 % 2) + i % 2 from 8 n + 2 j on */
        float y[SIZE];
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            const int row = i / 4, key = at.key + 8 * n + 2 * j + i / 2 % 2 * 8 + i % 2;
            const float factor = K_WEIGHED ? scale * ld_shared_f32(slot + K_SCALES + 4 * key) : scale;
            s[row / 2][n + i / 2 % 2][row % 2 * 2 + i % 2] *= factor;
        }
#ifdef FV_HAS_SCORE
        v_way way = { true, false, 0 };
        const auto hook_all = [&] {
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                const int row = i / 4, position = S.position[r][at.key + 8 * n + 2 * j + i / 2 % 2 * 8 + i % 2];
                y[i] = fv_score(s[row / 2][n + i / 2 % 2][row % 2 * 2 + i % 2], h.uses, at_key(h.rows[row], position), way);
            }
        };
        hook_all();
        if (way.asked && __any_sync(ALL_LANES, way.beyond & V_BEYOND)) {
            way.near = false;
            hook_all();
        }
#pragma unroll
        for (int i = 0; i < SIZE; i++) s[i / 8][n + i / 2 % 2][i / 4 % 2 * 2 + i % 2] = y[i];
#endif
    }
}
#endif

/* n-tiles of P that are the left operand of one product. */
enum { P_TILES = FV_PT == FV_F32 ? 1 : 2 };

/* m where some lane has a score more than 2^SLACK above it: rows follow their maximum, by whole powers of two where it is only a reference, and O, l
 * and the weights on their way to O (a) are brought to it. All rows at once: they do not wait for one another. Times 1 changes no bit. */
template <int MT, int NU> FV_DEVICE void raise(float (&top)[MT][2], state<MT, NU> &x, uint32_t (&a)[MT][4], bool between, float factor)
{
    __syncwarp();
#pragma unroll
    for (int k = 1; k <= 2; k *= 2)
#pragma unroll
        for (int i = 0; i < 2 * MT; i++) top[i / 2][i % 2] = fmaxf(top[i / 2][i % 2], __shfl_xor_sync(ALL_LANES, top[i / 2][i % 2], k));
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        const int mt = i / 2, h = i % 2;
        const float old = x.m[mt][h], above = fmaf(top[mt][h], factor, -old);
        const float next = old == NO_MAX || SLACK == 0 ? top[mt][h] * factor : old + ceilf(above) + LIFT;
        x.m[mt][h] = above > SLACK ? next : old;
        const float alpha = ex2_approx(old - x.m[mt][h]);
        x.l[mt][h] *= alpha;
#pragma unroll
        for (int n = 0; n < NU * V_TILES; n++) {
            x.o[mt][n][2 * h] *= alpha;
            x.o[mt][n][2 * h + 1] *= alpha;
        }
        if (between)
#pragma unroll
            for (int k = h; k < 4; k += 2)
                a[mt][k] = FV_PT == FV_F32 ? __float_as_uint(__uint_as_float(a[mt][k]) * alpha) : fv_mul2<FV_PT>(a[mt][k], fv_pack<FV_PT>(alpha, alpha));
    }
}

/* The largest scores of n-tiles first .. first + count - 1. */
template <int MT, int ST> FV_DEVICE void find_tops(const float (&s)[MT][ST][4], int first, int count, float (&top)[MT][2])
{
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float a = fmaxf(s[mt][first][2 * h], s[mt][first][2 * h + 1]), b = -fv_inf();
            if (count > 1) b = fmaxf(s[mt][first + 1][2 * h], s[mt][first + 1][2 * h + 1]);
#pragma unroll
            for (int n = first + 2; n < first + count; n += 2) {
                a = fmaxf(a, fmaxf(s[mt][n][2 * h], s[mt][n][2 * h + 1]));
                b = fmaxf(b, fmaxf(s[mt][n + 1][2 * h], s[mt][n + 1][2 * h + 1]));
            }
            top[mt][h] = fmaxf(a, b);
        }
}

/* Some row of this thread has a score more than 2^SLACK above its m. */
template <int MT, int NU> FV_DEVICE bool rises(const float (&top)[MT][2], const state<MT, NU> &x, float factor)
{
    bool any = false;
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) any = any || fmaf(top[i / 2][i % 2], factor, -x.m[i / 2][i % 2]) > SLACK;
    return any;
}

/* m follows the scores of n-tiles first .. first + count - 1; between: while weights in a are multiplied. */
template <int MT, int NU, int ST>
FV_DEVICE void follow(const float (&s)[MT][ST][4], int first, int count, state<MT, NU> &x, uint32_t (&a)[MT][4], bool between, float factor)
{
    float top[MT][2];
    find_tops(s, first, count, top);
    if (__any_sync(ALL_LANES, rises(top, x, factor))) raise(top, x, a, between, factor);
}

/* Two of a row's scores become exp2(S - m), and join l: those of n-tile n. */
template <int MT, int NU, int ST> FV_DEVICE void soften(float (&s)[MT][ST][4], int n, int mt, int h, state<MT, NU> &x, float factor)
{
    float &v = s[mt][n][2 * h], &w = s[mt][n][2 * h + 1];
    v = ex2_approx(fmaf(v, factor, -x.m[mt][h]));
    w = ex2_approx(fmaf(w, factor, -x.m[mt][h]));
    x.l[mt][h] += v + w;
}

/* P times the scales of its keys' V, which lie beside K. */
template <int MT, int ST> FV_DEVICE void scale_weights(float (&s)[MT][ST][4], uint32_t k_slot, int key0)
{
#pragma unroll
    for (int n = 0; n < ST; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float scale = ld_shared_f32(k_slot + V_SCALES + 4 * (key0 + n * 8 + 2 * (this_thread() & 3) + e)) * P_UNIT;
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
                for (int h = 0; h < 2; h++) {
                    float &x = s[mt][n][2 * h + e];
                    x = x == 0.0f ? 0.0f : x * scale;           /* an unseen key's scale may be NaN */
                }
        }
}

/* All of P as such operands: half as many registers as P itself. */
template <int MT, int ST> struct weights { uint32_t a[ST / P_TILES][MT][4]; };

/* One operand, from n-tile n on. f32: columns j, j + 4 of it are elements 2 j, 2 j + 1 of a row of P: so are the rows of V (outputs). */
template <int MT, int ST> FV_DEVICE void pack_weights(const float (&s)[MT][ST][4], int n, uint32_t (&a)[MT][4])
{
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[mt][i] = FV_PT == FV_F32 ? __float_as_uint(s[mt][n][i % 2 * 2 + i / 2])
                                       : fv_pack<FV_PT>(s[mt][n + i / 2 % P_TILES][i % 2 * 2], s[mt][n + i / 2 % P_TILES][i % 2 * 2 + 1]);
}

#ifdef FV_HAS_WEIGHT
/* P by the variant's own formula; O only adds up. */
template <int MT, int WR, int ST> FV_DEVICE void weigh(args p, float (&s)[MT][ST][4], int tile, const part &at)
{
    const int lane = this_thread() % 32, j = lane & 3;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const v_at row = at_row(p, S.rows[at.row + mt * 16 * WR + h * 8 + lane / 4]);
#pragma unroll
            for (int n = 0; n < ST; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &x = s[mt][n][2 * h + e];
                    x = x == -fv_inf() ? 0.0f : fv_weight(x, USES, at_key(row, S.position[tile & (PLACES - 1)][at.key + n * 8 + 2 * j + e]));
                }
        }
}
#endif

/* The right operands of unit u of V (columns) and the keys of n-tile n, and O += P V. */
template <int MT, int NU> FV_DEVICE void multiply_unit(const uint32_t (&a)[MT][4], state<MT, NU> &x, uint32_t slot, int n, int u, const part &at)
{
    const int lane = this_thread() % 32, unit = NU == V_UNITS ? u : fv_min(at.unit + u, V_UNITS - 1);
#if FV_PT == FV_F32
    const int key = at.key + 8 * n + 2 * (lane & 3), column = lane / 4;
    const uint32_t b0 = __float_as_uint(ld_shared_f32(slot + v_rows::at(key, 2 * unit + column / 4) + 4 * (column & 3)));
    const uint32_t b1 = __float_as_uint(ld_shared_f32(slot + v_rows::at(key + 1, 2 * unit + column / 4) + 4 * (column & 3)));
#pragma unroll
    for (int mt = 0; mt < MT; mt++) fv_mma<FV_F32>::step(x.o[mt][u], a[mt], b0, b1);
#else
    uint32_t w[4];
    ldmatrix_x4_trans(w, slot + (at.key + lane % 16 + 8 * n) * v_rows::stride + v_rows::in_row(lane & 7, lane >> 4, unit));
#pragma unroll
    for (int t = 0; t < V_TILES; t++) {
        uint32_t b0, b1;
        fv_v_operand<FV_VS, FV_PT>(w, t, b0, b1);
        if (FV_VS == FV_E2M1) {
            const uint32_t code = slot + V_BYTES + (at.key + 8 * n + 2 * (lane & 3)) * V_BLOCKS + 4 * unit + 2 * (t / 4) + lane / 16;
            b0 = fv_mul2<FV_PT>(b0, fv_scale_pair<FV_PT>(ld_shared_u8(code), ld_shared_u8(code + V_BLOCKS)));
            b1 = fv_mul2<FV_PT>(b1, fv_scale_pair<FV_PT>(ld_shared_u8(code + 8 * V_BLOCKS), ld_shared_u8(code + 9 * V_BLOCKS)));
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++) fv_mma<FV_PT>::step(x.o[mt][u * V_TILES + t], a[mt], b0, b1);
    }
#endif
}

/* O += P V, where P is in w, or (SOFT) is to be made of s: the exponentials of one step's keys go between the products of the step before, as a warp that
 * waits for one of them could have asked for eight products. LATE: behind its maxima, which are looked at behind the first products. */
template <int MT, int NU, int ST>
FV_DEVICE void outputs(float (&s)[MT][ST][4], const weights<MT, ST> &w, state<MT, NU> &x, float factor, uint32_t slot, const part &at)
{
    enum { PAIRS = 2 * MT * P_TILES };                  /* of exponentials, of a step */
    uint32_t a[MT][4];
    if (LATE) follow(s, 0, P_TILES, x, a, false, factor);
    if (SOFT)
#pragma unroll
        for (int i = 0; i < PAIRS; i++) soften(s, i / (2 * MT), i / 2 % MT, i % 2, x, factor);
#pragma unroll
    for (int n = 0; n < ST; n += P_TILES) {
        const int next = n + P_TILES;
        if (SOFT) pack_weights(s, n, a);
#pragma unroll
        for (int i = 0; !SOFT && i < 4 * MT; i++) a[i / 4][i % 4] = w.a[n / P_TILES][i / 4][i % 4];
#pragma unroll
        for (int u = 0; u < NU; u++) {
            multiply_unit(a, x, slot, n, u, at);
            if (!SOFT || next >= ST) continue;
            if (LATE && u == 0) follow(s, next, P_TILES, x, a, true, factor);
#pragma unroll
            for (int i = u * PAIRS / NU; i < (u + 1) * PAIRS / NU; i++) soften(s, next + i / (2 * MT), i / 2 % MT, i % 2, x, factor);
        }
    }
}

/* Rows of V that no row of the tile sees become zero. */
FV_DEVICE void clear_unseen(uint32_t slot, int tile)
{
    enum { CHUNKS = v_rows::chunks };
#pragma unroll 1
    for (int i = this_thread(); i < FV_T * CHUNKS; i += NT)
        if (!(S.seen[tile & 3][i / CHUNKS >> 5] >> (i / CHUNKS & 31) & 1)) st_shared_v4(slot + v_rows::at(i / CHUNKS, i % CHUNKS), 0, 0, 0, 0);
    __syncthreads();
}

/* Sums of a row that its four lanes hold parts of. */
template <int MT, int NU> FV_DEVICE void join_sums(state<MT, NU> &x)
{
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
        for (int h = 0; h < 2; h++) {
            x.l[mt][h] += __shfl_xor_sync(ALL_LANES, x.l[mt][h], 1);
            x.l[mt][h] += __shfl_xor_sync(ALL_LANES, x.l[mt][h], 2);
        }
}

/* Stages m-tiles mt0 .. of a warp: row i of the block's 16 WR per m-tile, of this warp's part of the keys. */
template <int MT, int WR, int WK, int NU, int MTS> FV_DEVICE void stage_rows(const state<MT, NU> &x, int mt0, const part &at)
{
    const int lane = threadIdx.x % 32, j = lane & 3;
    enum { COUNT = 16 * WR * MTS };
    const int copy = WK == 1 ? 0 : at.key / (FV_T / WK) * COUNT;
    const int row0 = copy + at.row + lane / 4;          /* the thread's first; the others are the same modulo 8, so a column lies alike in all */
    float *o = (float *)(memory + O_AT) + row0 * O_STRIDE;
    if (j == 0 && at.unit == 0)
#pragma unroll
        for (int i = 0; i < 2 * MTS; i++)
            SUMS[row0 + i / 2 * 16 * WR + i % 2 * 8] = make_float2(seen_max(x.m[mt0 + i / 2][i % 2]), x.l[mt0 + i / 2][i % 2]);
#pragma unroll
    for (int n = 0; n < NU * V_TILES; n += V_FIELDS) {
        const int unit = at.unit + n / V_TILES;
        if (unit >= V_UNITS) continue;
#pragma unroll
        for (int c = 0; c < 2 * V_FIELDS; c += 2) {
            const int d = unit * fv_unit_elements(FV_VS) + fv_v_column<FV_VS>(n % V_TILES, 0, 0) + 2 * V_FIELDS * j + c;
            if (FV_DV % fv_unit_elements(FV_VS) && d >= O_STRIDE) continue;
            float *to = o + (V_FIELDS == 1 ? o_column(lane / 4, d - 2 * j) + 2 * j : o_column(lane / 4, d));
#pragma unroll
            for (int i = 0; i < 2 * MTS; i++) {
                const float(&from)[NU * V_TILES][4] = x.o[mt0 + i / 2];
                *(float2 *)(to + (i / 2 * 16 * WR + i % 2 * 8) * O_STRIDE) =
                    make_float2(from[n + c % V_FIELDS][2 * (i % 2) + c / V_FIELDS], from[n + (c + 1) % V_FIELDS][2 * (i % 2) + (c + 1) / V_FIELDS]);
            }
        }
    }
}

/* Writes the block's rows: to slot + i, or (slot < 0) finished. The ring must hold nothing that is still needed, but in the invariant mode, where 16 WR
 * rows go at a time. */
template <int MT, int WR, int WK, int NU> FV_DEVICE void write_state(args p, const state<MT, NU> &x, int slot, const part &at)
{
    enum { MTS = FV_INVARIANT ? 1 : MT, COUNT = 16 * WR * MTS };
    static_assert(COUNT * WK <= FV_OUT_ROWS, "rows of O must fit");
#pragma unroll
    for (int mt = 0; mt < MT; mt += MTS) {
        __syncthreads();
        stage_rows<MT, WR, WK, NU, MTS>(x, mt, at);
        __syncthreads();
        write_rows<WK>(p, mt * 16 * WR, COUNT, slot);
    }
}

#if FV_INVARIANT
/* The chunks of an unsplit piece merge through this worker's scratch, each thread its own numbers, as arrive_and_merge would do it. */
template <int MT, int NU> FV_DEVICE void fold_chunk(args p, state<MT, NU> &x, float (&m)[MT][2], float (&l)[MT][2], bool first, bool last)
{
    float *scratch = p.scratch + (int64_t)blockIdx.x * p.scratch_floats + threadIdx.x;
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        fold f[2];
        for (int h = 0; h < 2; h++) {
            if (first) {
                m[mt][h] = -fv_inf();
                l[mt][h] = 0;
            }
            f[h] = fold_states(m[mt][h], l[mt][h], seen_max(x.m[mt][h]), x.l[mt][h]);
        }
#pragma unroll
        for (int n = 0; n < NU * V_TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float *at = scratch + ((mt * NU * V_TILES + n) * 4 + i) * NT;
                const float o = fold_value(f[i / 2], first ? 0.0f : *at, x.o[mt][n][i]);
                if (last) x.o[mt][n][i] = o;
                else *at = o;
            }
    }
}
#endif

/* What brings scores to base 2. A head's scale may be 0; minus infinity times 0 is no mask. */
FV_DEVICE float score_factor(args p)
{
    return FV_SCALED ? LOG2E : fmaxf(p.scale * (FV_CONVERT_K ? 1.0f : W.k_scale * K_UNIT) * LOG2E, 1.1754944e-38f);
}

/* Some of the tile's keys are in bad pages. */
FV_DEVICE bool has_bad(int tile)
{
    int bad = 0;
#pragma unroll
    for (int i = 0; i < TILE_WORDS; i++) bad |= S.bad[tile & (PLACES - 1)][i];
    return bad != 0;
}

/* A thread's scores of a tile, masked, as softmax wants them. True: the tile's rows of V that nobody sees must be cleared. */
template <int MT, int WR, int ST>
FV_DEVICE bool see(args p, float (&s)[MT][ST][4], bool clear, uint32_t k_slot, int tile, const part &at, const hooked<MT> &h)
{
#if FV_SCALED
    refine<MT, WR, ST>(p, s, k_slot, tile, at, h);
#endif
    if (!clear) {
        if (W.bounded && !has_bad(tile)) mask_bounds<MT, WR, ST>(s, tile, at);
        else mask_hooks<MT, WR, ST>(p, s, tile, at, !W.exact);
    }
#ifdef FV_HAS_WEIGHT
    weigh<MT, WR, ST>(p, s, tile, at);
#endif
    return !clear && !W.exact;
}

/* All tiles of the piece, by one kind. m-tile k of warp row w covers packed rows 16 (k WR + w) and on. */
template <int MT, int WR, int WV, int WK> FV_DEVICE_INLINE void attend_tiles(args p, uint32_t address)
{
    const shared_memory memory = shared_at(address);
    static_assert(WR * WV * WK == FV_WARPS && 16 * MT * WR <= FV_ROWS && FV_T / WK >= 16, "a kind must fit the block");
    static_assert(WK == 1 || !FV_INVARIANT, "bits must not depend on the kind");
    enum { NU = fv_div_up(V_UNITS, WV), ST = FV_T / 8 / WK };
    const float factor = score_factor(p);
    state<MT, NU> x;
    page_ids next = { -1, -1 };
    if (W.tiles.count > 0) {
        begin_piece(p, 16 * MT * WR);
        next = fetch_ids(memory, FIRST_LOOK);
        STAMP(3);
    }
    clear(x);
#if FV_INVARIANT
    float m[MT][2], l[MT][2];
    bool first_chunk = true;
    int chunk = 0;
#endif
    cursor at;
#pragma unroll 1
    for (int tile = 0; tile < W.tiles.count; tile++) {
        const tile_range tiles = W.tiles;
        step<false>(p, memory, tiles, at, STEPS * tile);
#ifdef FV_STAMPS
        if (tile == 0) STAMP(4);
#endif
#if FV_KEYS_IN_PLACE
        hook_keys(p, at.slot(STEPS * tile), tile);
        if (WK == FV_WARPS) __syncwarp();               /* each warp reads the keys that it has hooked */
        else __syncthreads();
#endif
        const bool clear_tile = is_clear(FIRST_LOOK > 1 ? tiles : W.tiles, tile);    /* else the tile was published just before */
        const part me = this_part<WR, WV, WK>();
        const uint32_t k_slot = SLOT_AT(at.slot(STEPS * tile));
        float s[MT][ST][4];
        if (threadIdx.x < TILE_WORDS) S.seen[(tile + 2) & 3][threadIdx.x] = 0;
        scores<MT, WR, ST>(memory, s, k_slot, me.row, me.key);
        if (STEPS == 2 && SOFT && !FV_SCALED) {
            at.advance();
            step<STEPS == 2>(p, memory, tiles, at, 2 * tile + 1);
        }
        hooked<MT> hooks;
#if FV_SCALED
        find_hooked<MT, WR>(p, hooks, me);
#endif
        const bool clean = see<MT, WR, ST>(p, s, clear_tile, k_slot, tile, me, hooks);
        if (STEPS == 2 && SOFT && FV_SCALED) {          /* hooks and what this step needs do not fit into registers together */
            at.advance();
            step<STEPS == 2>(p, memory, tiles, at, 2 * tile + 1);
        }
        weights<MT, ST> w;
#ifndef FV_HAS_WEIGHT
        if (!LATE) follow(s, 0, ST, x, w.a[0], false, factor);
#endif
        if (!SOFT) {
#ifndef FV_HAS_WEIGHT
#pragma unroll
            for (int i = 0; i < 2 * MT * ST; i++) soften(s, i / (2 * MT), i / 2 % MT, i % 2, x, factor);
#endif
            if (V_WEIGHED) scale_weights<MT, ST>(s, k_slot, me.key);
#pragma unroll
            for (int n = 0; n < ST; n += P_TILES) pack_weights(s, n, w.a[n / P_TILES]);
            if (STEPS == 2) {
                at.advance();
                step<STEPS == 2>(p, memory, tiles, at, 2 * tile + 1);
            }
        }
        if (STEPS == 1 && tile % FV_LOOK == 0) {
            publish(p, memory, tile + FIRST_LOOK, next);
            next = fetch_ids(memory, tile + FIRST_LOOK + FV_LOOK);
        }
        const uint32_t v_slot = SLOT_AT(at.slot(STEPS * tile + STEPS - 1) + FV_PAIRED);
        if (clean) {
            if (STEPS == 1 || SOFT) __syncthreads();
            clear_unseen(v_slot, tile);
        }
        outputs<MT, NU, ST>(s, w, x, factor, v_slot, this_part<WR, WV, WK>());
        if (STEPS == 2 && tile % FV_LOOK == 0) {
            publish(p, memory, tile + FIRST_LOOK, next);
            next = fetch_ids(memory, tile + FIRST_LOOK + FV_LOOK);
        }
        at.advance();
#if FV_INVARIANT
        const int past = W.origin + W.keys.zero + (tile + 1) * FV_T;
        if (past % S.look.chunk == 0 || tile + 1 == W.tiles.count) {
            join_sums(x);
            if (W.slot >= 0) {
                write_state<MT, WR, WK, NU>(p, x, W.slot + chunk * W.num_rows, this_part<WR, WV, WK>());
                clear(x);
            } else {
                const bool last = tile + 1 == W.tiles.count;
                fold_chunk<MT, NU>(p, x, m, l, first_chunk, last);
                if (!last) clear(x);
                first_chunk = false;
            }
            chunk++;
        }
#endif
    }
    cp_async_wait_group<0>();
    STAMP(5);
    if (PLAN.queue && threadIdx.x == 0) take_piece(p);
#if FV_INVARIANT
    if (W.slot < 0 && W.tiles.count > 0)
        for (int mt = 0; mt < MT; mt++)
            for (int h = 0; h < 2; h++) {
                x.m[mt][h] = m[mt][h];
                x.l[mt][h] = l[mt][h];
            }
    if (W.slot < 0 || W.tiles.count == 0) write_state<MT, WR, WK, NU>(p, x, W.slot, this_part<WR, WV, WK>());
#else
    join_sums(x);
    write_state<MT, WR, WK, NU>(p, x, W.slot, this_part<WR, WV, WK>());
#endif
    STAMP(6);
    if (W.slot >= 0) arrive_and_merge(p);
    STAMP(7);
}

/* The same as a function of its own, whose registers the compiler counts alone. */
template <int MT, int WR, int WV, int WK> KIND_CODE void attend(args p, uint32_t address) { attend_tiles<MT, WR, WV, WK>(p, address); }

#ifdef FV_PART                          /* what this part is made for, and what others are */
#if MAIN_PART
#define KIND(...) extern template __device__ void attend<__VA_ARGS__>(args, uint32_t);
#define COPIES(N) template __device__ void write_rows<N>(args, int, int, int);
FV_KINDS
FV_COPIES
#else
#define KIND(...) template __device__ void attend<__VA_ARGS__>(args, uint32_t);
#define KIND_OF_(n) FV_KIND_##n
#define KIND_OF(n) KIND_OF_(n)
KIND_OF(FV_PART)
#endif
#undef KIND
#endif

#if MAIN_PART
/* The plan's head, the step and the hooks' arguments into shared memory. */
FV_DEVICE void open_plan(args p)
{
    const int t = threadIdx.x;
    if (t < PLAN_WORDS) ((int64_t *)&S.plan)[t] = ((const int64_t *)p.plan)[t];
    else if (t - PLAN_WORDS < STEP_WORDS) S.step[t - PLAN_WORDS] = ((const int64_t *)p.step)[t - PLAN_WORDS];
#ifdef FV_USES
    if (t == 64) fv_bind(S.uses, *(const fv_uses *)p.step->uses, *(const fv_uses *)p.uses, p.from_run);
#endif
    __syncthreads();
#if FV_KEYS_TURNED
#pragma unroll 1
    for (int i = t; i < FV_DK / 2; i += NT) {
        pair_turn &turn = S.turns[i];
        turn.step = v_step_of(fv_key_frequency(USES, i));
        v_sincos_fine(v_angle(1, turn.step), &turn.s, &turn.c);
        v_sincos_fine(v_angle(KEYS_AT_ONCE, turn.step), &turn.far_s, &turn.far_c);
    }
    __syncthreads();
#endif
}

extern "C" __global__ void __launch_bounds__(NT, FV_CTAS) attend_sm80(const __grid_constant__ d_attend p)
{
    const int t = threadIdx.x;
#ifdef FV_STAMPS
    if (t == 0) S.stamped = 0;
    stamp(p, 0, true);
    STAMP(1);
#endif
    open_plan(p);
    if ((int)blockIdx.x >= PLAN.num_workers) return;
    if (t == 0) {
        const int *first = plan_array<int>(p, PLAN.worker_first) + blockIdx.x;
        S.piece = first[0];
        S.piece_end = first[1];
        if (PLAN.queue) take_piece(p);
        S.bad_pages = 0;
    }
    if (t == 32) fill_lookup(p);
#pragma unroll 1
    while (open_piece(p)) {
        STAMP(2);
#if FV_NUM_KINDS > 1
#define KIND(MT, WR, WV, WK) if (W.packed <= 16 * MT * WR) attend<MT, WR, WV, WK>(p, fv_smem(memory)); else
#else
#define KIND(MT, WR, WV, WK) if (W.packed <= 16 * MT * WR) attend_tiles<MT, WR, WV, WK>(p, fv_smem(memory)); else
#endif
        FV_KINDS { }
#undef KIND
#ifdef FV_STAMPS
        if (t == 0) S.stamped += 6;
#endif
    }
    if (PLAN.queue && this_thread() == 0) leave_queue(p);
#ifdef FV_STAMPS
    if (t == 0) S.stamped = 0;
    stamp(p, 14, false);
    stamp(p, 15, true);
#endif
}

#ifdef FV_HAS_KEY_SUM
#include "attend_sums.cuh"
#endif
#endif
#else
typedef int fv__attend_sm80_has_no_host_code;
#endif
