/* SPDX-License-Identifier: Apache-2.0 */
/* attend_sm80.cu -- attention for every GPU from sm_80 on: mma.sync, ldmatrix, cp.async. One block is one worker of the plan: it walks the pieces
 * [worker_first[w], worker_first[w + 1]); the grid stays as it is for the life of a plan.
 *
 * Nouns
 *   packed row   row i of a piece and head g of its unit: u = i * unit_heads + g. K and V are read once for all of them
 *   tile         T keys of K (or V) in one slot of a ring of NS slots in shared memory
 *   kind         <MT, WR, WV>: how a block's warps share one tile. WR warps along the rows, 16 MT packed rows each, times WV along the columns of V. Warps
 *                that differ in WV compute the same scores. A piece takes the first kind that holds its packed rows. A row's bits do not depend on
 *                the kind: each of its sums is made by the same instructions in the same order
 *   step         wait for the oldest slot, one barrier, refill the slot just freed, compute
 *
 *   time      ring (NS = 3)                    block
 *   2 i       K(i+1) is asked for              S = Q K(i)'; mask; P = exp2(S - m)
 *   2 i + 1   V(i+1) is asked for              O = O a + P V(i); places of tile i + 2 from page ids, ids of tile i + 3 are asked for
 *
 * Addresses: a key's page and place in it are looked up once a tile by one thread, two tiles ahead, from page ids that were asked for a tile before
 * that; ragged memory is the case of one page. A bad id is reported and its keys are absent. Absent keys (past the end, outside of what the
 * variants' bounds leave, in bad pages) are filled with zeros and masked. Keys that are present but that no row of the tile sees may hold NaN in V:
 * where that can be, their rows of V are cleared before use.
 *
 * Cost of one tile of 64 keys, dims 128, 16 bit, a cycle count for one SM (one mma of 16x8x16: 6.5 cycles of a quarter):
 *   decode, 16 packed rows, <1, 1, 4>   64 mma of scores in each warp + 16 of output: 520; 32 KB at 20 bytes a cycle: 1640. Bytes rule, also for one
 *                                       head alone and for 8-bit caches (820); so rows are padded to 16 and heads never move to the other side
 *   prefill, 128 rows, <2, 4, 1>        256 mma in each warp: 1660; shared memory 4 (32 KB + 8 KB of Q) at 128 bytes a cycle: 1280
 *
 * Constants, by -D (cuda.c chooses; FV_SMEM is what it will ask for): FV_DK FV_DV dims, FV_TAIL of Q and K in a second tensor, FV_VINK V is K's prefix;
 * FV_QT FV_KT FV_VT FV_OT element types (element.cuh); FV_CT FV_PT what S and O are multiplied in; FV_KS FV_VS what K and V are in shared memory
 * (KT, VT, or the multiplication's type: converted on the way in, which hooks on keys and values need); FV_T, FV_NS, FV_WARPS, FV_CTAS (blocks that
 * should fit one SM), FV_ROWS (packed rows of the largest kind), FV_OUT_ROWS
 * (the most of 16 WR), FV_KINDS; FV_KSCALE FV_VSCALE 1: a scale per token and head; FV_SCALED 1: scores
 * are scaled before exp2, not in it; FV_INVARIANT chunks. */
#ifdef __CUDACC_RTC__                   /* the host half is ../attend.c */
#include "uses.cuh"
#include "plan.cuh"
#include "tile.cuh"

#define NT (32 * FV_WARPS)
#define EPT (FV_VINK ? 1 : 2)                                           /* ring slots that a tile takes */
#define LEAD (FV_VINK ? FV_NS : 1 + FV_NS / 2)                          /* tiles whose places are known before the loop */
#define PLACES (LEAD + FV_VINK <= 1 ? 1 : LEAD + FV_VINK <= 2 ? 2 : 4)  /* ring of places */
#define ABSENT (-0x7fffffff - 1)
#define NO_ROW ((int64_t)1 << 63)
#define PAGES_KEPT (FV_KSCALE || FV_VSCALE || FV_CONVERT_K || FV_CONVERT_V || FV_KS == FV_E2M1 || FV_VS == FV_E2M1)
#define LOG2E 1.44269504088896341f
#define ALL_LANES 0xffffffffu
#define K_WEIGHED (FV_KSCALE && !FV_CONVERT_K)       /* scales that scores and weights are multiplied with */
#define V_WEIGHED (FV_VSCALE && !FV_CONVERT_V)
#define V_SCALE (FV_CONVERT_V ? 1.0f : W.v_scale)
/* Rare or once a piece: compiled once, not into every kind. */
#define COLD static __device__ __noinline__

enum {
    K_UNITS = fv_units(FV_KS, FV_DK), V_UNITS = fv_units(FV_VS, FV_DV),
    Q_ELEMENTS = K_UNITS * fv_unit_elements(FV_KS),
    Q_UNITS = fv_units(FV_CT, Q_ELEMENTS),
    K_STEPS = FV_CT == FV_F32 ? 1 : fv_fields(FV_KS),                   /* product steps of a unit of K */
    V_TILES = fv_unit_tiles(FV_VS), V_FIELDS = fv_fields(FV_VS),
    S_TILES = FV_T / 8,
};
typedef fv_rows<K_UNITS> k_rows;
typedef fv_rows<(FV_VINK ? K_UNITS : V_UNITS)> v_rows;
typedef fv_rows<Q_UNITS> q_rows;

/* ------------------------------------------------------------------------------------------------- shared memory */

/* A slot of the ring: rows of K or V, then their e4m3 scales (BLOCKS a row). In K's slot then one f32 scale a key for K, and one for V. */
enum {
    K_BLOCKS = FV_KS == FV_E2M1 ? 4 * K_UNITS : 0, V_BLOCKS = FV_VS == FV_E2M1 ? 4 * (FV_VINK ? K_UNITS : V_UNITS) : 0,
    K_BYTES = FV_T * k_rows::stride, V_BYTES = FV_T * v_rows::stride,
    K_SCALES = K_BYTES + FV_T * K_BLOCKS, V_SCALES = K_SCALES + (K_WEIGHED ? 4 * FV_T : 0),
    K_SLOT = V_SCALES + (V_WEIGHED ? 4 * FV_T : 0), V_SLOT = V_BYTES + FV_T * V_BLOCKS,
    SLOT = K_SLOT > V_SLOT ? K_SLOT : V_SLOT,
    Q_BYTES = FV_ROWS * q_rows::stride,
    /* rows of O on their way out, f32: columns in groups of 8, turned by the row where there are 8 groups or a multiple */
    O_TURNED = FV_DV % 64 == 0, O_STRIDE = O_TURNED ? FV_DV : fv_div_up(FV_DV, 8) * 8 + 8,
    O_BYTES = 4 * O_STRIDE * FV_OUT_ROWS,
    RING_BYTES = FV_NS * SLOT + Q_BYTES,
    O_AT = FV_INVARIANT ? RING_BYTES : 0,               /* chunks are written while the ring is in use */
    BULK = O_AT + O_BYTES > RING_BYTES ? O_AT + O_BYTES : RING_BYTES,
};

struct row_info { int pos, row, request, head; };       /* of a packed row; row -1: none */

/* What all threads know of the piece at hand. */
struct work {
    int unit, kv_head, first_head, num_rows, packed, num_tiles;
    int slot, record, row_first;
    int key0;                           /* first key of tile 0 */
    int key_begin, key_end;             /* keys that are present */
    int pos_min, pos_max;               /* over its rows */
    int first_position, page_positions, request;
    int origin;                         /* what tiles and chunks of the invariant mode count keys from */
    int exact;                          /* all rows together see no gaps between the first and the last key that one of them sees */
    int64_t table;
    int64_t k_base, k_tail_base, v_base;        /* bytes (fp4: elements) */
    float k_scale, v_scale;
};

struct shared {
    unsigned char bulk[BULK];           /* ring of NS slots, then Q; at the end of a piece, rows of O */
    int64_t k_row[PLACES][FV_T];        /* where a key's row lies from the head's first, bytes (fp4: elements); or NO_ROW */
    int64_t v_row[FV_VINK ? 1 : PLACES][FV_T];
#if FV_TAIL
    int64_t tail_row[PLACES][FV_T];
#endif
#if PAGES_KEPT
    int page[PLACES][FV_T], v_page[PLACES][FV_T], in_page[PLACES][FV_T];
#endif
    int position[PLACES][FV_T];         /* of the key, or ABSENT */
    row_info rows[FV_ROWS];
    float2 sums[FV_ROWS];               /* m in base 2, and l, of rows on their way out */
    uint32_t seen[2][2];                /* bits: some row of the tile sees the key */
    int absent[PLACES][2];              /* each warp of lookups: some of its keys are absent */
    int last[FV_ROWS];                  /* record that this block merges for row i, -1: none */
    work w;
#ifdef FV_USES
    fv_uses uses;
#endif
};
static_assert(sizeof(shared) <= FV_SMEM, "the launch asks for too little shared memory");

extern __shared__ __align__(128) unsigned char memory[];
#define S (*(shared *)memory)
#define W (S.w)
#define SLOT_AT(i) (fv_smem(memory) + (i) * SLOT)
#define Q_AT (fv_smem(memory) + FV_NS * SLOT)

typedef const d_attend &args;

template <class T> FV_DEVICE const T *plan_array(args p, int64_t offset) { return (const T *)(p.plan + offset); }
FV_DEVICE const d_plan_head &plan_of(args p) { return *(const d_plan_head *)p.plan; }

/* ------------------------------------------------------------------------------------------------------- the hooks */

#ifdef FV_USES
#define USES S.uses
#endif

FV_DEVICE v_at at_row(args p, const row_info &r)
{
    const d_request *q = plan_array<d_request>(p, plan_of(p).requests) + r.request;
    v_at at;
    at.request = r.request;
    at.batch_row = r.row < 0 ? q->row_first : r.row;    /* packed rows past the last look like request 0's first row */
    at.row = at.batch_row - q->row_first;
    at.num_rows = q->num_rows;
    at.num_keys = q->num_keys;
    at.head = r.head;
    at.q_pos = r.pos;
    at.key = at.k_pos = at.index = 0;
    at.num_q_heads = p.num_q_heads;
    return at;
}

FV_DEVICE void at_key(args p, v_at &at, int position)
{
    at.k_pos = position;
    at.key = position - plan_array<d_request>(p, plan_of(p).requests)[at.request].first_position;
}

COLD void fault(args p, int what, int request, int64_t slot, int64_t value)
{
    const int64_t before = (int64_t)atomicAdd((unsigned long long *)&p.faults->count, 1ull);
    volatile d_faults *host = p.faults_host;
    if (before == 0) {
        host->request = request;
        host->slot = slot;
        host->value = value;
        __threadfence_system();
        host->what = what;
    }
    host->count = before + 1;
}

/* ---------------------------------------------------------------------------------------------------- lookup of keys */

FV_DEVICE int64_t load_index(const void *p, int64_t i, int is64) { return is64 ? ((const int64_t *)p)[i] : ((const int32_t *)p)[i]; }

struct page_ids { int64_t k, v; };

/* Asks for the page ids of this thread's key of a tile. */
FV_DEVICE page_ids fetch_ids(args p, int tile)
{
    page_ids ids = { -1, -1 };
    const int key = W.key0 + tile * FV_T + (int)threadIdx.x;
    const int page_size = plan_of(p).page_size;
    if (threadIdx.x >= FV_T || tile >= W.num_tiles || key < W.key_begin || key >= W.key_end || !page_size) return ids;
    const int64_t e = W.table + (unsigned)key / (unsigned)page_size;
    if (e >= plan_of(p).table_entries) return ids;
    ids.k = load_index(p.step->ids, e * p.step->ids_stride, p.step->ids_64);
    ids.v = ids.k;
    if (!FV_VINK && p.step->v_ids) ids.v = load_index(p.step->v_ids, e * p.step->v_ids_stride, p.step->v_ids_64);
    return ids;
}

/* Writes where this thread's key of a tile lies. */
FV_DEVICE void publish(args p, int tile, page_ids ids)
{
    if (threadIdx.x >= FV_T || tile >= W.num_tiles) return;
    const int r = tile % PLACES, t = threadIdx.x, key = W.key0 + tile * FV_T + t;
    const int page_size = plan_of(p).page_size;
    bool ok = key >= W.key_begin && key < W.key_end;
    int page = key, in_page = 0, v_page = key, position = W.first_position + key;
    if (ok && page_size) {
        const int entry = (unsigned)key / (unsigned)page_size;
        in_page = key - entry * page_size;
        const int64_t num_pages = plan_of(p).num_pages;
        ok = (uint64_t)ids.k < (uint64_t)num_pages && (uint64_t)ids.v < (uint64_t)num_pages;
        if (!ok && (in_page == 0 || key == W.key_begin)) fault(p, 1, W.request, entry, (uint64_t)ids.k < (uint64_t)num_pages ? ids.v : ids.k);
        page = (int)ids.k;
        v_page = (int)ids.v;
        if (W.page_positions >= 0) position = plan_array<int>(p, plan_of(p).page_positions)[W.page_positions + entry] + in_page;
    }
    S.k_row[r][t] = ok ? page * p.k.stride[0] + in_page * p.k.stride[1] : NO_ROW;
    if (!FV_VINK) S.v_row[r][t] = ok ? v_page * p.v.stride[0] + in_page * p.v.stride[1] : NO_ROW;
#if FV_TAIL
    S.tail_row[r][t] = page * p.k_tail.stride[0] + in_page * p.k_tail.stride[1];
#endif
#if PAGES_KEPT
    S.page[r][t] = page;
    S.v_page[r][t] = v_page;
    S.in_page[r][t] = in_page;
#endif
    S.position[r][t] = ok ? position : ABSENT;
    const bool any = __any_sync(FV_T < 32 ? (1u << (FV_T & 31)) - 1 : ALL_LANES, !ok);
    if (t % 32 == 0) S.absent[r][t / 32] = any;
}

/* ------------------------------------------------------------------------------------------------------------ loaders */

template <int TYPE> FV_DEVICE int64_t unit_bytes(int64_t offset) { return TYPE == FV_E2M1 ? offset >> 1 : offset; }

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
        CONVERTED = IS_V ? FV_CONVERT_V : FV_CONVERT_K,
    };
    typedef fv_rows<UNITS> rows;
    static FV_DEVICE_INLINE const d_view &view(args p) { return IS_V ? p.v : p.k; }
    static FV_DEVICE_INLINE int64_t base() { return IS_V ? W.v_base : W.k_base; }
    static FV_DEVICE_INLINE int64_t row(int r, int t) { return IS_V ? S.v_row[FV_VINK ? 0 : r][t] : S.k_row[r][t]; }
#if FV_TAIL
    static FV_DEVICE_INLINE int64_t tail_row(int r, int t) { return W.k_tail_base + S.tail_row[r][t]; }
#else
    static FV_DEVICE_INLINE int64_t tail_row(int, int) { return 0; }
#endif
#if PAGES_KEPT
    /* The scale of one key, of one block: where they lie. */
    static FV_DEVICE_INLINE const float *scale(args p, int r, int t)
    {
        const d_scale &s = IS_V ? p.v_scale : p.k_scale;
        return s.data + (IS_V ? S.v_page[r][t] : S.page[r][t]) * s.stride[0] + S.in_page[r][t] * s.stride[1] + W.kv_head * s.stride[2];
    }
    static FV_DEVICE_INLINE const uint8_t *blocks(args p, int r, int t)
    {
        const d_view &s = IS_V ? p.v_block_scale : p.k_block_scale;
        return (const uint8_t *)s.data + (IS_V ? S.v_page[r][t] : S.page[r][t]) * s.stride[0] + S.in_page[r][t] * s.stride[1] + W.kv_head * s.stride[2];
    }
#endif
};

#if FV_CONVERT_K || FV_CONVERT_V
/* One element of K or V of key t as f32, its scales applied. */
template <bool IS_V> FV_DEVICE float load_element(args p, int r, int t, int d)
{
    typedef source<IS_V> src;
    const bool tail = d >= src::MAIN;
    float x = fv_decode<src::FROM>(load_bits<src::FROM>(tail ? p.k_tail.data : src::view(p).data, tail ? src::tail_row(r, t) : src::base() + src::row(r, t),
                                                        tail ? d - src::MAIN : d));
    if (src::FROM == FV_E2M1) x *= fv_decode<FV_E4M3>(src::blocks(p, r, t)[d / 16]);
    return x * (src::SCALED ? *src::scale(p, r, t) : IS_V ? W.v_scale : W.k_scale);
}

/* The same with the hooks on keys or values. */
template <bool IS_V> FV_DEVICE float load_hooked(args p, int r, int t, int d)
{
    const auto get = [&](int e) { return load_element<IS_V>(p, r, t, e); };
    v_at at;
    at.request = W.request < 0 ? 0 : W.request;
    at.head = W.kv_head * plan_of(p).units_per_kv_head * plan_of(p).unit_heads;
    at.row = at.batch_row = at.num_rows = at.num_keys = at.q_pos = 0;
    at.index = d;
    at.num_q_heads = p.num_q_heads;
    at_key(p, at, S.position[r][t]);
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
template <bool IS_V> COLD void load_narrow(args p, int slot, int tile)
{
    typedef source<IS_V> src;
    const uint32_t to = SLOT_AT(slot);
    const int r = tile % PLACES;
#pragma unroll 1
    for (int i = threadIdx.x; i < FV_T * src::CHUNKS; i += NT) {
        const int t = i / src::CHUNKS, chunk = i % src::CHUNKS;
        const int64_t row = src::row(r, t);
        uint4 x = make_uint4(0, 0, 0, 0);
        const int n = row == NO_ROW ? 0 : fv_min(src::DIM - chunk * src::N, src::N);
#pragma unroll 1
        for (int k = 0; k < n; k++) {
            const int d = chunk * src::N + k, bit = k * fv_bits(src::TYPE);
            uint32_t bits;
#if FV_CONVERT_K || FV_CONVERT_V
            if (src::CONVERTED) {
                const float v = load_hooked<IS_V>(p, r, t, d);
                bits = src::TYPE == FV_F32 ? __float_as_uint(v) : fv_pack<src::TYPE>(v, 0.0f) & 0xffffu;
            } else
#endif
            {
                const bool tail = d >= src::MAIN;
                bits = load_bits<src::TYPE>(tail ? p.k_tail.data : src::view(p).data, tail ? src::tail_row(r, t) : src::base() + row,
                                            tail ? d - src::MAIN : d);
            }
            bits <<= bit & 31;
            if (bit < 32) x.x |= bits;
            else if (bit < 64) x.y |= bits;
            else if (bit < 96) x.z |= bits;
            else x.w |= bits;
        }
        st_shared_v4(to + src::rows::at(t, chunk), x.x, x.y, x.z, x.w);
    }
}

#if PAGES_KEPT
/* Scales of a tile's keys: one e4m3 for each 16 elements, one f32 a key. */
template <bool IS_V> COLD void load_scales(args p, int slot, int tile)
{
    typedef source<IS_V> src;
    enum { WORDS = src::BLOCKS / 4 };
    const uint32_t to = SLOT_AT(slot) + src::BYTES;
    const int r = tile % PLACES;
    for (int i = threadIdx.x; i < FV_T * WORDS; i += NT) {
        const int t = i / (WORDS + !WORDS), first = i % (WORDS + !WORDS) * 4;
        const bool ok = S.k_row[r][t] != NO_ROW;
        const uint8_t *from = src::blocks(p, r, t);
        uint32_t word = 0;
        for (int k = 0; k < 4; k++)
            if (ok && first + k < src::DIM / 16) word |= (uint32_t)from[first + k] << (8 * k);
        asm volatile("st.shared.b32 [%0], %1;" :: "r"(to + t * src::BLOCKS + first), "r"(word) : "memory");
    }
    if (!IS_V && threadIdx.x < FV_T) {
        const int t = threadIdx.x, bytes = S.k_row[r][t] != NO_ROW ? 4 : 0;
        if (K_WEIGHED) cp_async_ca_4(SLOT_AT(slot) + K_SCALES + 4 * t, bytes ? source<false>::scale(p, r, t) : p.k_scale.data, bytes);
        if (V_WEIGHED) cp_async_ca_4(SLOT_AT(slot) + V_SCALES + 4 * t, bytes ? source<true>::scale(p, r, t) : p.v_scale.data, bytes);
    }
}
#endif

/* Rows of K or V of a tile into a slot of the ring: 16 bytes a thread and turn. */
template <bool IS_V> FV_DEVICE void load_tile(args p, int slot, int tile)
{
    typedef source<IS_V> src;
    if (src::CONVERTED || !(p.wide & (IS_V ? 2 : 1))) {
        load_narrow<IS_V>(p, slot, tile);
    } else {
        const uint32_t to = SLOT_AT(slot);
        const int r = tile % PLACES;
        const char *const base = src::view(p).data + unit_bytes<src::TYPE>(src::base());
        enum { TURNS = fv_div_up(FV_T * src::CHUNKS, NT), WHOLE = src::DIM == src::CHUNKS * src::N };
#pragma unroll (TURNS <= 16 ? 16 : 4)
        for (int n = 0; n < TURNS; n++) {
            const int i = n * NT + threadIdx.x;
            if (FV_T * src::CHUNKS % NT && i >= FV_T * src::CHUNKS) break;
            const int t = i / src::CHUNKS, chunk = i % src::CHUNKS;
            const int64_t row = src::row(r, t);
            const char *from = base + unit_bytes<src::TYPE>(row) + 16 * chunk;
            if (src::MAIN < src::DIM && chunk * src::N >= src::MAIN)
                from = p.k_tail.data + unit_bytes<src::TYPE>(src::tail_row(r, t)) + 16 * (chunk - src::MAIN / src::N);
            /* where no byte is read, the address does not matter */
            cp_async_cg_16(to + src::rows::at(t, chunk), from, (int)(row >> 32) != ABSENT && (WHOLE || chunk * src::N < src::DIM) ? 16 : 0);
        }
    }
#if PAGES_KEPT
    if (src::BLOCKS || (!IS_V && (K_WEIGHED || V_WEIGHED))) load_scales<IS_V>(p, slot, tile);
#endif
}

/* Asks for entry e of the ring (K and V by turns); the group is committed even where nothing is left to load. */
template <bool IS_V> FV_DEVICE void load_entry(args p, int slot, int e)
{
    if (e / EPT < W.num_tiles) load_tile<IS_V>(p, slot, e / EPT);
    cp_async_commit_group();
}

/* One element of a packed row's query, hooks applied. */
FV_DEVICE float load_query(args p, const row_info &r, int d)
{
    const auto get = [&](int e) {
        const bool tail = e >= FV_DK - FV_TAIL;
        const d_view &v = tail ? p.q_tail : p.q;
        return fv_decode<FV_QT>(load_bits<FV_QT>(v.data, r.row * v.stride[0] + r.head * v.stride[1], tail ? e - (FV_DK - FV_TAIL) : e));
    };
#ifdef FV_HAS_QUERY
    return fv_query(get, USES, at_row(p, r), d, FV_DK);
#else
    return get(d);
#endif
}

#ifdef FV_HAS_QUERY
#define PLAIN_Q 0
#else
#define PLAIN_Q (FV_QT == FV_CT && (FV_CT == FV_F32 || fv_fields(FV_KS) == 1))
#endif

COLD void load_q(args p, int rows)
{
    enum { CHUNKS = 2 * Q_UNITS, N = 128 / fv_bits(FV_CT), MAIN = FV_DK - FV_TAIL };
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * CHUNKS; i += NT) {
        const int u = i / CHUNKS, chunk = i % CHUNKS;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (u < W.packed) {
            const row_info r = S.rows[u];
            if (PLAIN_Q && (p.wide & 4)) {
                const bool tail = FV_TAIL && chunk * N >= MAIN;
                const d_view &v = tail ? p.q_tail : p.q;
                if (chunk * N < FV_DK)
                    x = *(const uint4 *)(v.data + r.row * v.stride[0] + r.head * v.stride[1] + 16 * (tail ? chunk - MAIN / N : chunk));
            } else {
#pragma unroll 1
                for (int k = 0; k < N; k++) {
                    const int d = fv_q_element<FV_KS>(chunk * N + k), bit = k * fv_bits(FV_CT);
                    const float f = d < FV_DK ? load_query(p, r, d) : 0.0f;
                    const uint32_t bits = FV_CT == FV_F32 ? __float_as_uint(f) : (fv_pack<FV_CT>(f, 0.0f) & 0xffffu) << (bit & 31);
                    if (bit < 32) x.x |= bits;
                    else if (bit < 64) x.y |= bits;
                    else if (bit < 96) x.z |= bits;
                    else x.w |= bits;
                }
            }
        }
        st_shared_v4(Q_AT + q_rows::at(u, chunk), x.x, x.y, x.z, x.w);
    }
}

/* -------------------------------------------------------------------------------------------------------------- output */

/* Writes elements d .. d + 3 of a finished row. */
FV_DEVICE void write_four(args p, const row_info &r, int d, float (&x)[4], float lse)
{
    char *o = p.o.data + r.row * p.o.stride[0] + r.head * p.o.stride[1];
#ifdef FV_HAS_OUTPUT
    v_at at = at_row(p, r);
    for (int i = 0; i < 4; i++) {
        at.index = d + i;
        x[i] = fv_output(x[i], lse, USES, at);
    }
#endif
    if (FV_DV % 4 == 0 && (p.wide & 8)) {
        if (FV_OT == FV_F32) *(float4 *)(o + 4 * d) = make_float4(x[0], x[1], x[2], x[3]);
        else *(uint2 *)(o + 2 * d) = make_uint2(fv_pack<FV_OT>(x[0], x[1]), fv_pack<FV_OT>(x[2], x[3]));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) if (d + i < FV_DV) fv_store<FV_OT>(o, d + i, x[i]);
}

/* (m, l): a maximum in base 2, and the sum of exp2(score - m). */
struct fv_sum {
    float m, l, factor;                 /* factor: what sums made for another m are multiplied with */
    /* One more score in natural units joins the sum. */
    FV_DEVICE_INLINE void add(float score)
    {
        const float x = score * LOG2E, top = fmaxf(m, x), base = top == -fv_inf() ? 0.0f : top, f = ex2_approx(m - base);
        l = l * f + ex2_approx(x - base);
        factor *= f;
        m = top;
    }
};

/* What the sums of a row are multiplied with, and its lse in the wanted base. Sinks join here, once. */
FV_DEVICE float finish_row(args p, const row_info &r, float m, float l, float &lse)
{
#ifdef FV_HAS_WEIGHT
    lse = 0;
    return 1;
#else
    fv_sum sum = { m, l, 1 };
#ifdef FV_HAS_SINK
    fv_sinks(USES, at_row(p, r), sum);
#endif
    lse = sum.l > 0 ? (sum.m + lg2_approx(sum.l)) * p.lse_factor : -fv_inf();
    return sum.l > 0 ? sum.factor / sum.l : 0.0f;
#endif
}

FV_DEVICE void write_lse(args p, const row_info &r, float lse)
{
    if (p.lse) p.lse[r.row * p.lse_stride[0] + r.head * p.lse_stride[1]] = lse;
}

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

FV_DEVICE float *slot_o(args p, int slot, int g) { return p.partials + (int64_t)slot * p.slot_floats + g * O_FLOATS; }
FV_DEVICE float *slot_ml(args p, int slot, int g)
{
    return p.partials + (int64_t)slot * p.slot_floats + plan_of(p).unit_heads * O_FLOATS + 2 * g;
}

FV_DEVICE int o_place(int row, int d) { return row * O_STRIDE + (O_TURNED ? d ^ (row & 7) << 3 : d); }

/* Packed rows first .. of the piece, staged in shared memory, go to slot + i, or (slot < 0) out. A warp a row, four elements a lane. */
COLD void write_rows(args p, int first, int count, int slot)
{
    const int lane = threadIdx.x % 32;
    for (int i = threadIdx.x / 32; i < count; i += FV_WARPS) {
        const int u = first + i;
        if (u >= W.packed) break;
        const row_info r = S.rows[u];
        const float2 ml = S.sums[u];
        float lse = 0, scale = 1;
        float *o = 0;
        if (slot >= 0) {
            const int row = u / plan_of(p).unit_heads, g = u - row * plan_of(p).unit_heads;
            o = slot_o(p, slot + row, g);
            if (lane == 0) *(float2 *)slot_ml(p, slot + row, g) = ml;
        } else {
            scale = finish_row(p, r, ml.x, ml.y, lse) * V_SCALE;
            if (lane == 0) write_lse(p, r, lse);
        }
#pragma unroll 1
        for (int d = 4 * lane; d < FV_DV; d += 128) {
            const float4 x = *(const float4 *)((float *)(memory + O_AT) + o_place(i, d));
            float y[4] = { x.x * scale, x.y * scale, x.z * scale, x.w * scale };
            if (slot < 0) write_four(p, r, d, y, lse);
            else *(float4 *)(o + d) = make_float4(y[0], y[1], y[2], y[3]);
        }
    }
}

/* All partials of this piece are written: counts the piece in at each of its rows, and merges the rows whose last piece it is. */
COLD void arrive_and_merge(args p)
{
    const d_plan_head &plan = plan_of(p);
    __threadfence();
    __syncthreads();
    const d_record *records = plan_array<d_record>(p, plan.records);
    if ((int)threadIdx.x < W.num_rows) {
        const int i = threadIdx.x;
        const int rec = W.record >= 0 ? W.record + i : plan_array<int>(p, plan.row_record)[S.rows[i * plan.unit_heads].row] + W.unit;
        const bool last = atomicAdd(&p.tickets[rec], 1) == records[rec].arrivals - 1;
        if (last) p.tickets[rec] = 0;
        S.last[i] = last ? rec : -1;
    }
    __syncthreads();
    __threadfence();
    const int lane = threadIdx.x % 32;
    for (int u = threadIdx.x / 32; u < W.packed; u += FV_WARPS) {
        const int rec = S.last[u / plan.unit_heads], g = u % plan.unit_heads;
        if (rec < 0) continue;
        const row_info r = S.rows[u];
        const int *parts = plan_array<int>(p, plan.parts) + records[rec].part_first;
        const int num_parts = records[rec].num_parts;
#pragma unroll 1
        for (int d0 = 0; d0 < FV_DV; d0 += 128) {
            const int d = d0 + 4 * lane, from = fv_min(d, O_FLOATS - 4);
            float m = -fv_inf(), l = 0, o[4] = { 0, 0, 0, 0 };
#pragma unroll 4
            for (int i = 0; i < num_parts; i++) {
                const float2 ml = __ldcg((const float2 *)slot_ml(p, parts[i], g));
                const float4 x = __ldcg((const float4 *)(slot_o(p, parts[i], g) + from));
                const fold f = fold_states(m, l, ml.x, ml.y);
                o[0] = fold_value(f, o[0], x.x);
                o[1] = fold_value(f, o[1], x.y);
                o[2] = fold_value(f, o[2], x.z);
                o[3] = fold_value(f, o[3], x.w);
            }
            float lse;
            const float scale = finish_row(p, r, m, l, lse) * V_SCALE;
            if (lane == 0 && d == 0) write_lse(p, r, lse);
            for (int i = 0; i < 4; i++) o[i] *= scale;
            if (d < FV_DV) write_four(p, r, d, o, lse);
        }
    }
}

/* ---------------------------------------------------------------------------------------------------------- a piece */

/* Piece `index` into W; its rows and their positions. */
COLD void open_piece(args p, int index)
{
    const d_plan_head &plan = plan_of(p);
    __syncthreads();                    /* the piece before is done with shared memory */
    if (threadIdx.x == 0) {
        const d_piece c = plan_array<d_piece>(p, plan.pieces)[index];
        const d_segment g = plan_array<d_segment>(p, plan.segments)[c.segment];
        int end = c.key_first + c.num_keys;
        if (g.live && p.step->lengths) {
            const int64_t live = load_index(p.step->lengths, g.request * p.step->lengths_stride, p.step->lengths_64);
            const d_request q = plan_array<d_request>(p, plan.requests)[g.request];
            if (live < 0 || live > q.num_keys) fault(p, 2, g.request, 0, live);
            const int64_t there = live - (g.first_position - q.first_position);
            if (there < end) end = there < 0 ? 0 : (int)there;
        }
        W.unit = c.unit;
        W.kv_head = c.unit / plan.units_per_kv_head;
        W.first_head = c.unit * plan.unit_heads;
        W.num_rows = c.num_rows;
        W.packed = c.num_rows * plan.unit_heads;
        W.slot = c.slot;
        W.record = c.record;
        W.row_first = g.row_first + c.row_first;
        W.key_begin = c.key_first;
        W.key_end = end;
        W.num_tiles = c.num_keys;       /* for now */
        W.pos_min = 0x7fffffff;
        W.pos_max = -0x7fffffff;
        W.first_position = g.first_position;
        W.page_positions = plan.page_size ? g.page_positions : -1;
        W.origin = W.page_positions < 0 ? g.first_position : 0;
        W.request = g.request;
        W.exact = p.step->row_positions == 0 && g.request >= 0;
        W.table = g.table;
        const int64_t token = plan.page_size ? 0 : g.table;
        W.k_base = token * p.k.stride[0] + W.kv_head * p.k.stride[2];
        W.k_tail_base = token * p.k_tail.stride[0] + W.kv_head * p.k_tail.stride[2];
        W.v_base = token * p.v.stride[0] + W.kv_head * p.v.stride[2];
        W.k_scale = FV_KSCALE ? 1.0f : p.k_scale.data ? p.k_scale.data[W.kv_head * p.k_scale.stride[0]] : p.k_scale.number;
        W.v_scale = FV_VSCALE ? 1.0f : p.v_scale.data ? p.v_scale.data[W.kv_head * p.v_scale.stride[0]] : p.v_scale.number;
    }
    __syncthreads();
#pragma unroll 1
    for (int u = threadIdx.x; u < FV_ROWS; u += NT) {
        row_info r = { 0, -1, 0, 0 };
        if (u < W.packed) {
            const int i = u / plan.unit_heads;
            r.row = W.row_first + i;
            r.request = W.request;
            if (W.request < 0) {
                const d_listed_row listed = plan_array<d_listed_row>(p, plan.listed_rows)[r.row];
                r.row = listed.row;
                r.request = listed.request;
            }
            r.head = W.first_head + u - i * plan.unit_heads;
            if (p.step->row_positions) {
                r.pos = p.step->row_positions[r.row];
            } else {
                const d_request q = plan_array<d_request>(p, plan.requests)[r.request];
                int64_t keys = q.num_keys;
                if (p.step->lengths) {
                    keys = load_index(p.step->lengths, r.request * p.step->lengths_stride, p.step->lengths_64);
                    keys = keys < 0 ? 0 : keys > q.num_keys ? q.num_keys : keys;
                }
                r.pos = q.first_position + (int)keys - q.num_rows + (r.row - q.row_first);
            }
            atomicMin(&W.pos_min, r.pos);
            atomicMax(&W.pos_max, r.pos);
        }
        S.rows[u] = r;
    }
    if (threadIdx.x < 4) S.seen[threadIdx.x / 2][threadIdx.x % 2] = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        const int first = W.key_begin, count = W.num_tiles;
        int begin = first, end = W.key_end;
#ifdef FV_HAS_VISIBLE
        if (!fv_lifted(USES) && W.page_positions < 0) {
            begin = fv_max(begin, fv_first_key(USES, W.pos_min) - W.first_position);
            end = fv_min(end, fv_last_key(USES, W.pos_max) - W.first_position + 1);
        }
        W.exact = W.exact && FV_ALL_EXACT && !fv_lifted(USES);
#endif
        if (FV_INVARIANT) {             /* tiles count from position 0; chunks that hold nothing still have a slot */
            const int over = (unsigned)(W.origin + first) % FV_T;
            W.key0 = first - over;
            W.num_tiles = count > 0 ? (over + count + FV_T - 1) / FV_T : 0;
        } else {
            W.key0 = begin;
            W.num_tiles = end > begin ? (end - begin + FV_T - 1) / FV_T : 0;
        }
        W.key_begin = begin;
        W.key_end = end;
    }
    __syncthreads();
    if (W.num_tiles == 0) return;
#pragma unroll 1
    for (int i = 0; i < LEAD; i++) publish(p, i, fetch_ids(p, i));
    __syncthreads();
#pragma unroll 1
    for (int e = 0; e < FV_NS - 1; e++) {
        if (EPT == 2 && (e & 1)) load_entry<EPT == 2>(p, e, e);
        else load_entry<false>(p, e, e);
    }
}

/* The state of a warp's rows: accumulators of O, and per row (of 2 MT in a thread) the maximum in score units and this lane's part of the sum. */
template <int MT, int NU> struct state {
    float o[MT][NU * V_TILES][4];
    float m[MT][2], l[MT][2];
};

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
            x.m[mt][h] = -fv_inf();
#endif
            x.l[mt][h] = 0;
        }
    }
}

/* S = Q K' for a warp's rows and all keys of the tile. */
template <int MT, int WR> FV_DEVICE void scores(float (&s)[MT][S_TILES][4], uint32_t slot, int row0)
{
    const int lane = threadIdx.x % 32, krow = (lane & 7) + (lane >> 4 << 3), khalf = lane >> 3 & 1, qhalf = lane >> 4, low = lane & 7;
    const uint32_t q = Q_AT + (row0 + lane % 16) * q_rows::stride, k = slot + krow * k_rows::stride;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int n = 0; n < S_TILES; n++)
            for (int i = 0; i < 4; i++) s[mt][n][i] = 0;
#pragma unroll (K_UNITS * K_STEPS <= 16 ? 16 : 4)
    for (int unit = 0; unit < K_UNITS; unit++) {
        uint32_t a[MT][K_STEPS][4];
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int r = 0; r < K_STEPS; r++)
                ldmatrix_x4(a[mt][r], q + mt * 16 * WR * q_rows::stride + q_rows::in_row(low, qhalf, unit * K_STEPS + r));
#pragma unroll
        for (int n = 0; n < S_TILES / 2; n++) {
            uint32_t w[4];
            ldmatrix_x4(w, k + n * 16 * k_rows::stride + k_rows::in_row(low, khalf, unit));
#pragma unroll
            for (int g = 0; g < 2; g++)
#pragma unroll
                for (int r = 0; r < K_STEPS; r++) {
                    uint32_t b0, b1;
                    fv_k_operand<FV_KS, FV_CT>(w, g, r, b0, b1);
                    if (FV_KS == FV_E2M1) {
                        const uint32_t code = ld_shared_u8(slot + K_BYTES + (n * 16 + g * 8 + lane / 4) * K_BLOCKS + 4 * unit + 2 * (r >> 1) +
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

/* Masks the scores of keys that are absent or not visible. The hooks are evaluated in a loop that is not unrolled, to bits: their code may be long. */
template <int MT, int WR> FV_DEVICE void mask(args p, float (&s)[MT][S_TILES][4], int tile, int row0)
{
    const int lane = threadIdx.x % 32, j = lane & 3, r = tile % PLACES;
    const bool mark = !W.exact;
    uint32_t seen[MT];                                  /* bit 4 n + 2 e + h */
    v_at at[MT][2];
    bool there[MT][2];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        seen[mt] = 0;
        for (int h = 0; h < 2; h++) {
            const row_info info = S.rows[row0 + mt * 16 * WR + h * 8 + lane / 4];
            at[mt][h] = at_row(p, info);
            there[mt][h] = info.row >= 0;
        }
    }
#pragma unroll 1
    for (int c = 0; c < 2 * S_TILES; c++) {
        const int key = c / 2 * 8 + 2 * j + c % 2, position = S.position[r][key];
        bool any = false;
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                bool ok = there[mt][h] && position != ABSENT;
#ifdef FV_HAS_VISIBLE
                at_key(p, at[mt][h], position);
                ok = ok && fv_visible(USES, at[mt][h]);
#endif
                seen[mt] |= (uint32_t)ok << (2 * c + h);
                any = any || ok;
            }
        if (mark) {
            const uint32_t lanes = __ballot_sync(ALL_LANES, any);
            if (lane < 4 && (lanes & 0x11111111u << lane)) atomicOr(&S.seen[tile & 1][key >> 5], 1u << (key & 31));
        }
    }
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int n = 0; n < S_TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (!(seen[mt] >> (4 * n + 2 * (i & 1) + (i >> 1)) & 1)) s[mt][n][i] = -fv_inf();
}

#if FV_SCALED
/* Scores in natural units, then the score hooks. */
template <int MT, int WR> FV_DEVICE void refine(args p, float (&s)[MT][S_TILES][4], uint32_t slot, int tile, int row0)
{
    const int lane = threadIdx.x % 32, j = lane & 3, r = tile % PLACES;
    const float scale = p.scale * (FV_CONVERT_K ? 1.0f : W.k_scale);
    v_at at[MT][2];
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
        for (int h = 0; h < 2; h++) at[mt][h] = at_row(p, S.rows[row0 + mt * 16 * WR + h * 8 + lane / 4]);
#pragma unroll
    for (int n = 0; n < S_TILES; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int key = n * 8 + 2 * j + e, position = S.position[r][key];
            float factor = scale;
            if (K_WEIGHED) factor *= ld_shared_f32(slot + K_SCALES + 4 * key);
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float &x = s[mt][n][2 * h + e];
                    x *= factor;
#ifdef FV_HAS_SCORE
                    at_key(p, at[mt][h], position);
                    x = fv_score(x, USES, at[mt][h]);
#endif
                }
        }
}
#endif

/* Whether each row of the piece sees each key of the tile. The same in all threads. */
FV_DEVICE bool all_visible(int tile)
{
    if (S.absent[tile % PLACES][0] || (FV_T > 32 && S.absent[tile % PLACES][1])) return false;
#ifdef FV_HAS_VISIBLE
    if (!FV_ALL_EXACT || W.page_positions >= 0 || fv_lifted(USES)) return false;
    const int first = W.first_position + W.key0 + tile * FV_T, last = first + FV_T - 1;
    return first >= fv_first_key(USES, W.pos_max) && last <= fv_last_key(USES, W.pos_min);
#else
    return true;
#endif
}

/* S becomes P = exp2(S - m) in f32; O and l are brought to the new maximum. */
template <int MT, int NU> FV_DEVICE void soften(float (&s)[MT][S_TILES][4], state<MT, NU> &x, float factor)
{
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        float alpha[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = x.m[mt][h];
#pragma unroll
            for (int n = 0; n < S_TILES; n++) top = fmaxf(top, fmaxf(s[mt][n][2 * h], s[mt][n][2 * h + 1]));
            top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
            top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
            const float base = top == -fv_inf() ? 0.0f : top * factor;
            alpha[h] = ex2_approx(fmaf(x.m[mt][h], factor, -base));
            x.m[mt][h] = top;
            float sum = 0;
#pragma unroll
            for (int n = 0; n < S_TILES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &v = s[mt][n][2 * h + e];
                    v = ex2_approx(fmaf(v, factor, -base));
                    sum += v;
                }
            x.l[mt][h] = fmaf(x.l[mt][h], alpha[h], sum);
        }
        if (__any_sync(ALL_LANES, alpha[0] != 1.0f || alpha[1] != 1.0f))        /* times 1 changes no bit: whether it is skipped does not matter */
#pragma unroll
            for (int n = 0; n < NU * V_TILES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) x.o[mt][n][i] *= alpha[i / 2];
    }
}

/* P in the type of the second product: for each 16 keys the left operand, f32 as it is. */
template <int MT> struct weights {
    uint32_t a[MT][FV_PT == FV_F32 ? S_TILES : S_TILES / 2][4];
};

template <int MT> FV_DEVICE void pack_weights(float (&s)[MT][S_TILES][4], weights<MT> &w, uint32_t k_slot)
{
    if (V_WEIGHED) {
#pragma unroll
        for (int n = 0; n < S_TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float scale = ld_shared_f32(k_slot + V_SCALES + 4 * (n * 8 + 2 * (threadIdx.x & 3) + e));
#pragma unroll
                for (int mt = 0; mt < MT; mt++)
                    for (int h = 0; h < 2; h++) {
                        float &x = s[mt][n][2 * h + e];
                        x = x == 0.0f ? 0.0f : x * scale;           /* an unseen key's scale may be NaN */
                    }
            }
    }
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
#if FV_PT == FV_F32
        /* columns j, j + 4 of the left operand are elements 2 j, 2 j + 1 of a row of P: so are the rows of V (outputs) */
#pragma unroll
        for (int n = 0; n < S_TILES; n++) {
            w.a[mt][n][0] = __float_as_uint(s[mt][n][0]);
            w.a[mt][n][1] = __float_as_uint(s[mt][n][2]);
            w.a[mt][n][2] = __float_as_uint(s[mt][n][1]);
            w.a[mt][n][3] = __float_as_uint(s[mt][n][3]);
        }
#else
#pragma unroll
        for (int n = 0; n < S_TILES / 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) w.a[mt][n][i] = fv_pack<FV_PT>(s[mt][2 * n + i / 2][i % 2 * 2], s[mt][2 * n + i / 2][i % 2 * 2 + 1]);
#endif
    }
}

#ifdef FV_HAS_WEIGHT
/* P by the variant's own formula; O only adds up. */
template <int MT, int WR> FV_DEVICE void weigh(args p, float (&s)[MT][S_TILES][4], int tile, int row0)
{
    const int lane = threadIdx.x % 32, j = lane & 3;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            v_at at = at_row(p, S.rows[row0 + mt * 16 * WR + h * 8 + lane / 4]);
#pragma unroll
            for (int n = 0; n < S_TILES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &x = s[mt][n][2 * h + e];
                    at_key(p, at, S.position[tile % PLACES][n * 8 + 2 * j + e]);
                    x = x == -fv_inf() ? 0.0f : fv_weight(x, USES, at);
                }
        }
}
#endif

/* O += P V. */
template <int MT, int NU> FV_DEVICE void outputs(const weights<MT> &p, state<MT, NU> &x, uint32_t slot, int unit0)
{
    const int lane = threadIdx.x % 32;
#if FV_PT == FV_F32
#pragma unroll
    for (int u = 0; u < NU; u++) {
        const int unit = fv_min(unit0 + u, V_UNITS - 1), n = lane / 4;
#pragma unroll
        for (int ks = 0; ks < S_TILES; ks++) {
            const int key = 8 * ks + 2 * (lane & 3);
            const uint32_t b0 = __float_as_uint(ld_shared_f32(slot + v_rows::at(key, 2 * unit + n / 4) + 4 * (n & 3)));
            const uint32_t b1 = __float_as_uint(ld_shared_f32(slot + v_rows::at(key + 1, 2 * unit + n / 4) + 4 * (n & 3)));
#pragma unroll
            for (int mt = 0; mt < MT; mt++) fv_mma<FV_F32>::step(x.o[mt][u], p.a[mt][ks], b0, b1);
        }
    }
#else
    const uint32_t v = slot + (lane % 16) * v_rows::stride;
#pragma unroll
    for (int ks = 0; ks < FV_T / 16; ks++)
#pragma unroll
        for (int u = 0; u < NU; u++) {
            const int unit = NU == V_UNITS ? u : fv_min(unit0 + u, V_UNITS - 1);
            uint32_t w[4];
            ldmatrix_x4_trans(w, v + ks * 16 * v_rows::stride + v_rows::in_row(lane & 7, lane >> 4, unit));
#pragma unroll
            for (int t = 0; t < V_TILES; t++) {
                uint32_t b0, b1;
                fv_v_operand<FV_VS, FV_PT>(w, t, b0, b1);
                if (FV_VS == FV_E2M1) {
                    const uint32_t at = slot + V_BYTES + (16 * ks + 2 * (lane & 3)) * V_BLOCKS + 4 * unit + 2 * (t / 4) + lane / 16;
                    b0 = fv_mul2<FV_PT>(b0, fv_scale_pair<FV_PT>(ld_shared_u8(at), ld_shared_u8(at + V_BLOCKS)));
                    b1 = fv_mul2<FV_PT>(b1, fv_scale_pair<FV_PT>(ld_shared_u8(at + 8 * V_BLOCKS), ld_shared_u8(at + 9 * V_BLOCKS)));
                }
#pragma unroll
                for (int mt = 0; mt < MT; mt++) fv_mma<FV_PT>::step(x.o[mt][u * V_TILES + t], p.a[mt][ks], b0, b1);
            }
        }
#endif
}

/* Rows of V that no row of the tile sees become zero. */
COLD void clear_unseen(uint32_t slot, int tile)
{
    enum { CHUNKS = v_rows::chunks };
#pragma unroll 1
    for (int i = threadIdx.x; i < FV_T * CHUNKS; i += NT)
        if (!(S.seen[tile & 1][i / CHUNKS >> 5] >> (i / CHUNKS & 31) & 1)) st_shared_v4(slot + v_rows::at(i / CHUNKS, i % CHUNKS), 0, 0, 0, 0);
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

/* Writes the block's rows: to slot + i, or (slot < 0) finished; 16 WR rows at a time through shared memory. The ring must hold nothing that is still
 * needed, but in the invariant mode. m is in score units; factor brings it to base 2. */
template <int MT, int WR, int NU> FV_DEVICE void write_state(args p, const state<MT, NU> &x, int slot, int row0, int unit0, float factor)
{
    const int lane = threadIdx.x % 32, j = lane & 3;
    static_assert(16 * WR <= FV_OUT_ROWS, "rows of O must fit");
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = row0 + h * 8 + lane / 4;
            if (j == 0 && unit0 == 0) S.sums[mt * 16 * WR + row] = make_float2(x.m[mt][h] * factor, x.l[mt][h]);
#pragma unroll
            for (int n = 0; n < NU * V_TILES; n += V_FIELDS) {
                const int unit = unit0 + n / V_TILES;
                if (NU != V_UNITS && unit >= V_UNITS) continue;
#pragma unroll
                for (int k = 0; k < 2 * V_FIELDS; k += 2) {
                    const int d = unit * fv_unit_elements(FV_VS) + fv_v_column<FV_VS>(n % V_TILES, j, 0) + k;
                    if (FV_DV % fv_unit_elements(FV_VS) && d >= O_STRIDE) continue;
                    *(float2 *)((float *)(memory + O_AT) + o_place(row, d)) = make_float2(x.o[mt][n + k % V_FIELDS][2 * h + k / V_FIELDS],
                                                                                 x.o[mt][n + (k + 1) % V_FIELDS][2 * h + (k + 1) / V_FIELDS]);
                }
            }
        }
        __syncthreads();
        write_rows(p, mt * 16 * WR, 16 * WR, slot);
    }
}

#if FV_INVARIANT
/* The chunks of an unsplit piece merge through this worker's scratch, each thread its own numbers, as arrive_and_merge would do it. */
template <int MT, int NU> FV_DEVICE void fold_chunk(args p, state<MT, NU> &x, float (&m)[MT][2], float (&l)[MT][2], float factor, bool first, bool last)
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
            f[h] = fold_states(m[mt][h], l[mt][h], x.m[mt][h] * factor, x.l[mt][h]);
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

/* All tiles of the piece, by one kind. m-tile k of warp row w covers packed rows 16 (k WR + w) and on. */
template <int MT, int WR, int WV> FV_DEVICE void attend(args p)
{
    static_assert(WR * WV == FV_WARPS && 16 * MT * WR <= FV_ROWS, "a kind must fit the block");
    enum { NU = fv_div_up(V_UNITS, WV), LAST = FV_NS - 1 };
    const int warp = threadIdx.x / 32, row0 = WR == 1 ? 0 : warp % WR * 16, unit0 = WV == 1 ? 0 : warp / WR * NU;
    const int num_tiles = W.num_tiles;
    const float factor = FV_SCALED ? LOG2E : p.scale * (FV_CONVERT_K ? 1.0f : W.k_scale) * LOG2E;
    page_ids next = fetch_ids(p, LEAD);
    load_q(p, 16 * MT * WR);

    state<MT, NU> x;
    clear(x);
#if FV_INVARIANT
    float m[MT][2], l[MT][2];
    bool first_chunk = true;
    int chunk = 0;
#endif
    int slot = 0, refill = LAST;                        /* of entry e, of entry e + NS - 1 */
#define ADVANCE(i) (i) = (i) + 1 == FV_NS ? 0 : (i) + 1
    /* Entry e has arrived and the one before it is done with; entry e + NS - 1 is asked for. */
#define STEP(e, parity)                                                                             \
    do {                                                                                            \
        if (FV_NS > 1) {                                                                            \
            cp_async_wait_group<(FV_NS > 1 ? FV_NS - 2 : 0)>();                                     \
            __syncthreads();                                                                        \
            load_entry<(EPT == 2 && ((parity) + LAST) % 2 == 1)>(p, refill, (e) + LAST);            \
            ADVANCE(refill);                                                                        \
        } else {                                                                                    \
            __syncthreads();                                                                        \
            load_entry<(EPT == 2 && (parity) == 1)>(p, 0, (e));                                     \
            cp_async_wait_group<0>();                                                               \
            __syncthreads();                                                                        \
        }                                                                                           \
    } while (0)

#pragma unroll 1
    for (int tile = 0; tile < num_tiles; tile++) {
        STEP(EPT * tile, 0);
        const bool masked = !all_visible(tile), clean = masked && !W.exact;
        weights<MT> w;
        {
            float s[MT][S_TILES][4];
            if (threadIdx.x < 2) S.seen[~tile & 1][threadIdx.x] = 0;
            scores<MT, WR>(s, SLOT_AT(slot), row0);
#if FV_SCALED
            refine<MT, WR>(p, s, SLOT_AT(slot), tile, row0);
#endif
            if (masked) mask<MT, WR>(p, s, tile, row0);
#ifdef FV_HAS_WEIGHT
            weigh<MT, WR>(p, s, tile, row0);
#else
            soften<MT, NU>(s, x, factor);
#endif
            pack_weights<MT>(s, w, SLOT_AT(slot));
        }
        if (EPT == 2) {
            ADVANCE(slot);
            STEP(2 * tile + 1, 1);
        } else if (clean) {
            __syncthreads();
        }
        publish(p, tile + LEAD, next);
        next = fetch_ids(p, tile + LEAD + 1);
        if (clean) clear_unseen(SLOT_AT(slot), tile);
        outputs<MT, NU>(w, x, SLOT_AT(slot), unit0);
        ADVANCE(slot);
#if FV_INVARIANT
        const int past = W.origin + W.key0 + (tile + 1) * FV_T;
        if (past % plan_of(p).chunk == 0 || tile + 1 == num_tiles) {
            join_sums(x);
            if (W.slot >= 0) {
                write_state<MT, WR, NU>(p, x, W.slot + chunk * W.num_rows, row0, unit0, factor);
                clear(x);
            } else {
                const bool last = tile + 1 == num_tiles;
                fold_chunk<MT, NU>(p, x, m, l, factor, first_chunk, last);
                if (!last) clear(x);
                first_chunk = false;
            }
            chunk++;
        }
#endif
    }
    cp_async_wait_group<0>();
#if FV_INVARIANT
    if (W.slot < 0 && num_tiles > 0)
        for (int mt = 0; mt < MT; mt++)
            for (int h = 0; h < 2; h++) {
                x.m[mt][h] = m[mt][h];
                x.l[mt][h] = l[mt][h];
            }
    if (W.slot < 0 || num_tiles == 0) write_state<MT, WR, NU>(p, x, W.slot, row0, unit0, num_tiles > 0 ? 1.0f : factor);
#else
    join_sums(x);
    write_state<MT, WR, NU>(p, x, W.slot, row0, unit0, factor);
#endif
    if (W.slot >= 0) arrive_and_merge(p);
}

extern "C" __global__ void __launch_bounds__(NT, FV_CTAS) attend_sm80(const __grid_constant__ d_attend p)
{
    if ((int)blockIdx.x >= plan_of(p).num_workers) return;
#ifdef FV_USES
    if (threadIdx.x == 0) fv_bind(S.uses, *(const fv_uses *)p.step->uses, *(const fv_uses *)p.uses, p.from_run);
#endif
    const int *first = plan_array<int>(p, plan_of(p).worker_first) + blockIdx.x;
    const int last = first[1];
#pragma unroll 1
    for (int i = first[0]; i < last; i++) {
        open_piece(p, i);
#define KIND(MT, WR, WV) if (W.packed <= 16 * MT * WR) { attend<MT, WR, WV>(p); continue; }
        FV_KINDS
#undef KIND
    }
}
#else
typedef int fv__attend_sm80_has_no_host_code;
#endif
