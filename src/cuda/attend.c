/* SPDX-License-Identifier: Apache-2.0 */
/* attend.c -- host half of kernels/attend_sm80.cu (see attend.h). The device half asserts that the shared memory counted here is enough. */
#include "attend.h"

#include "texts.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------------------------------------------------- types */

static int bits_of(fv__code t) { return t == FV__F32 ? 32 : t <= FV__BF16 ? 16 : t == FV__E2M1 ? 4 : 8; }

static fv__code code_of(fv__dtype t)
{
    switch (t) {
    case FV__DTYPE_f16: return FV__F16;
    case FV__DTYPE_bf16: return FV__BF16;
    case FV__DTYPE_fp8_e4m3: return FV__E4M3;
    case FV__DTYPE_fp8_e5m2: return FV__E5M2;
    case FV__DTYPE_int8: return FV__INT8;
    case FV__DTYPE_fp4_e2m1: return FV__E2M1;
    default: return FV__F32;
    }
}

static bool has_hook(const fv__problem *p, fv__hook hook) { return p->hooks >> hook & 1; }
static bool use_has(const fv__problem *p, int i, fv__hook hook) { return p->uses[i].variant->meta.hooks >> hook & 1; }

static int key_hooks(const fv__problem *p)
{
    int n = 0;
    for (int i = 0; i < p->num_uses; i++) n += use_has(p, i, FV__HOOK_KEY);
    return n;
}

/* The first use that has a hook. */
static int first_use(const fv__problem *p, fv__hook hook)
{
    int i = 0;
    while (!use_has(p, i, hook)) i++;
    return i;
}

/* Narrow keys are widened in registers to q's type, narrow values to f16, which holds each of them, and weights better than bf16 does (but for weights
 * times a scale per token, whose range is not known). Anything else that differs, and what hooks look at, is converted on the way in. */
static void choose_types(const fv__problem *p, fv__attend_config *c)
{
    c->q = code_of(p->q);
    c->k = code_of(p->k);
    c->v = code_of(p->v);
    c->o = code_of(p->o);
    c->score = c->q == FV__F32 || (bits_of(c->k) >= 16 && c->k != c->q) ? FV__F32 : c->q;
    const bool v_weighed = p->v_scale == FV__SCALE_TOKEN_HEAD || (p->v_in_k && p->k_scale == FV__SCALE_TOKEN_HEAD);
    c->value = c->q == FV__F32 || c->v == FV__F32 ? FV__F32 : bits_of(c->v) == 16 ? c->v : v_weighed ? c->q : FV__F16;
    const bool k_fits = c->k == c->score || (c->score != FV__F32 && bits_of(c->k) < 16);
    const bool v_fits = c->v == c->value || (c->value != FV__F32 && bits_of(c->v) < 16);
    c->convert_k = !k_fits || has_hook(p, FV__HOOK_KEY);
    c->convert_v = !v_fits || has_hook(p, FV__HOOK_VALUE);
    c->keys_in_place = key_hooks(p) == 1 && c->k == c->score && bits_of(c->k) == 16;
    c->keys_turned = c->keys_in_place && p->uses[first_use(p, FV__HOOK_KEY)].variant->meta.turns >= 0;
    c->k_stored = c->convert_k ? c->score : c->k;
    c->v_stored = c->convert_v ? c->value : c->v;
    c->v_in_k = p->v_in_k && !c->convert_k && !c->convert_v;
    c->k_token_scale = p->k_scale == FV__SCALE_TOKEN_HEAD;
    c->v_token_scale = v_weighed;
    c->scaled = has_hook(p, FV__HOOK_SCORE) || has_hook(p, FV__HOOK_WEIGHT) || (c->k_token_scale && !c->convert_k) || !(p->scale > 0);
}

/* ----------------------------------------------------------------------------------------------------- shared memory */

static int units_of(fv__code t, int dim) { return (dim * bits_of(t) + 255) / 256; }
static int row_bytes(int units) { return 16 * (2 * units % 8 == 0 ? 2 * units : (2 * units) | 1); }
static int align_up(int x, int to) { return (x + to - 1) / to * to; }

/* Field by field the struct `shared` of the kernel. */
static int count_shared(const fv__attend_config *c)
{
    const int ku = units_of(c->k_stored, c->dim_qk), vu = c->v_in_k ? ku : units_of(c->v_stored, c->dim_v), t = c->tile;
    const int q_units = units_of(c->score, ku * (256 / bits_of(c->k_stored)));
    const int k_blocks = c->k_stored == FV__E2M1 ? 4 * ku : 0, v_blocks = c->v_stored == FV__E2M1 ? 4 * vu : 0;
    const bool k_scales = c->k_token_scale && !c->convert_k, v_scales = c->v_token_scale && !c->convert_v;
    const int k_slot = t * (row_bytes(ku) + k_blocks + (k_scales ? 4 : 0) + (v_scales ? 4 : 0)), v_slot = t * (row_bytes(vu) + v_blocks);
    const int slot = align_up(k_slot > v_slot ? k_slot : v_slot, 128);
    const int ring = c->stages * slot + c->rows * row_bytes(q_units);
    const int o_stride = c->dim_v % 64 == 0 ? c->dim_v : align_up(c->dim_v, 8) + 8;
    const int o_at = c->invariant ? ring : 0, o_end = o_at + (4 * o_stride + 8) * c->out_rows;
    const bool one_step = c->v_in_k || c->paired;
    const int ring_entries = c->paired ? c->stages / 2 : c->stages, lead = one_step ? ring_entries : 1 + ring_entries / 2;
    const int needed = (lead + c->look - 1) / c->look * c->look + c->look;
    const int places = needed <= 1 ? 1 : needed <= 2 ? 2 : needed <= 4 ? 4 : 8;
    const int sum_tiles = fv__min32(c->stages, places / c->look * c->look), sum_keys = c->key_sums ? sum_tiles * t : 0;
    const bool pages = c->k_token_scale || c->v_token_scale || c->convert_k || c->convert_v || c->k_stored == FV__E2M1 || c->v_stored == FV__E2M1;
    int bytes = align_up(ring > o_end ? ring : o_end, 16);
    bytes += places * t * (8 + 4 + (c->tail ? 8 : 0) + (pages ? 12 : 0)) + (c->v_in_k ? 1 : places) * t * 8;
    bytes += c->rows * (16 + 4);                        /* rows, last */
    bytes += (16 + places * 4) * ((t + 31) / 32);        /* seen, bad */
    bytes += c->keys_turned ? 32 * (c->dim_qk / 2) + 16 : 0;    /* turns */
    bytes += c->key_sums ? 48 + 4 * c->warps + 4 * sum_keys * (1 + c->sum_lines) : 0;
    bytes += 16 + 160 + 144 + 168 + 80 + c->uses_bytes + 64;     /* piece, work, lookup, plan, step, uses, what alignment may take */
    return align_up(bytes, 128);
}

/* ------------------------------------------------------------------------------------------------- the configuration */

static void set_kinds(fv__attend_config *c, int warps, int n, const fv__attend_kind *kinds)
{
    c->warps = warps;
    c->num_kinds = n;
    c->rows = c->out_rows = c->sum_lines = 0;
    for (int i = 0; i < n; i++) {
        c->kinds[i] = kinds[i];
        const int rows = 16 * kinds[i].warps_rows;
        c->rows = fv__max32(c->rows, rows * kinds[i].m_tiles);
        c->sum_lines = fv__max32(c->sum_lines, kinds[i].warps_rows);
        c->out_rows = fv__max32(c->out_rows, c->invariant ? rows : rows * kinds[i].m_tiles * kinds[i].warps_keys);
    }
}

/* 16 rows: the warps share the keys, 16 each or more, then the columns; in the invariant mode the columns alone. */
static fv__attend_kind narrow_kind(const fv__attend_config *c, int warps)
{
    const int keys = c->invariant ? 1 : fv__min32(warps, c->tile / 16);
    return (fv__attend_kind){ 1, 1, warps / keys, keys };
}

/* Accumulators decide: a warp holds 16 m_tiles rows of its part of V's columns, 128 registers a thread at most. `size` 2: the largest tiles, 1: medium
 * ones, 0: 16 rows. */
static void choose_kinds(fv__attend_config *c, int size)
{
    const int dim = fv__max32(c->dim_v, c->dim_qk * 2 / 3), warps = dim <= 128 && !(c->invariant && size == 2) ? 4 : 8;
    const fv__attend_kind narrow = narrow_kind(c, warps);
    if (c->value == FV__F32 || c->score == FV__F32) {
        const int rows = dim <= 256 ? 4 : 2;
        const fv__attend_kind wide = { 1, rows, warps / rows, 1 };
        set_kinds(c, warps, size ? 2 : 1, (fv__attend_kind[]){ narrow, wide });
    } else if (warps == 4) {
        set_kinds(c, warps, 1 + size, (fv__attend_kind[]){ narrow, { 1, 4, 1, 1 }, { 2, 4, 1, 1 } });
    } else if (dim <= 256) {
        set_kinds(c, warps, 1 + size, (fv__attend_kind[]){ narrow, { 1, 4, 2, 1 }, { 1, 8, 1, 1 } });
    } else {
        set_kinds(c, warps, size ? 2 : 1, (fv__attend_kind[]){ narrow, { 1, 4, 2, 1 } });
    }
}

/* Head units: a kv head's whole group where it fits the largest tile, else equal parts of it. */
static void choose_units(const fv__problem *p, fv__attend_config *c)
{
    int heads = p->group;
    if (heads > c->rows) {
        heads = c->rows;
        while (p->group % heads) heads--;
    }
    c->unit_heads = heads;
    c->units_per_kv_head = p->group / heads;
}

/* Blocks an SM that registers and shared memory allow, at most `most`. */
static int fit_blocks(const fv__attend_config *c, const fv__attend_device *d, int most)
{
    const int by_shared = d->shared_per_sm / (c->shared_bytes + d->shared_reserved);
    int n = fv__min32(most, by_shared);
    if (c->shared_bytes > d->shared_per_block) n = 0;
    return n;
}

/* Where tiles are long, two are looked up at once: all threads are busy then, and it takes as long as one. */
static void choose_look(fv__attend_config *c) { c->look = c->rows > 16 && 32 * c->warps >= 2 * c->tile ? 2 : 1; }

static bool in_bytes(const fv__attend_config *c) { return bits_of(c->k_stored) == 8 && bits_of(c->v_stored) == 8; }

/* Stages and blocks for the kinds and the tile: as many bytes on their way as an SM holds. Several blocks an SM need registers: 3 x 128 threads of
 * 168 registers for 16 rows, 4 of 128 where K and V are bytes; 2 of 255 else, 1 of 256 threads. On an H200 3 blocks read 16-bit K and V as fast as 4
 * (b256 4.24 TB/s, 4.22) and leave less to merge (b16 2.61 TB/s, 2.43; one request of 4096 keys 0.58, 0.50). Where keys are turned on their way, warps wait
 * for themselves rather than for memory: 4 blocks of two stages (40/40 heads, 32 requests of 252 keys: 79 us, 84; of 4092 keys 8 requests 192, 193). */
static bool choose_stages(fv__attend_config *c, const fv__attend_device *d)
{
    const bool busy = c->rows <= 16 && c->warps == 4 && c->keys_turned;
    const int most = c->warps == 8 ? 1 + (c->rows <= 16 && c->dim_v <= 256) : c->rows <= 16 ? (in_bytes(c) || busy ? 4 : 3) : 2;
    int best = 0, stages = 0, shared = 0, blocks = 0;
    choose_look(c);
    for (int s = c->tile > 64 || busy ? 2 : 3; s >= 1; s--) {
        c->stages = s;
        c->shared_bytes = count_shared(c);
        const int n = fit_blocks(c, d, most), score = n * (4 * (s - 1) + 1);
        if (n > 0 && score > best) {
            best = score;
            stages = s;
            shared = c->shared_bytes;
            blocks = n;
        }
    }
    if (!best) return false;
    c->stages = stages;
    c->shared_bytes = shared;
    c->blocks_per_sm = blocks;
    return true;
}

int fv__attend_use_offset(const fv__problem *problem, int i)
{
    int at = 0;
    for (int k = 0; k < i; k++) at += align_up(problem->uses[k].variant->meta.args_bytes, 16);
    return at;
}

static fv_status refuse(fv_error *err, const char *field, int64_t value, int64_t limit, const char *what)
{
    return fv__fail(err, FV_E_UNSUPPORTED, field, value, limit, "attend_sm80: %s", what);
}

/* Widening narrow types, three products for one, and hooks on scores or keys need registers that the scores of 64 keys leave no room for beside many
 * rows; but for scores' hooks, where an SM's shared memory keeps it to two blocks of 64 keys (soft cap 227 -> 263, ALiBi 252 -> 308 TFLOP/s on an H200;
 * on sm_86 it spills). Of bytes 16 rows take 128 keys in two stages: 3.61 TB/s of e4m3 on an H200, 3.03 with 64 in three. In the invariant mode the tile is a
 * function of problem and device alone, so that a request has the same bits in the decode build. */
static int largest_tile(const fv__attend_config *c, const fv__attend_device *d, int size)
{
    const bool hooked = c->convert_k || c->convert_v, half = c->k_stored <= FV__BF16 && c->v_stored <= FV__BF16;
    const bool plain = half && !hooked && (!c->scaled || d->shared_per_sm >= 160 << 10);
    if ((c->score == FV__F32 || c->value == FV__F32) && (size > 0 || c->invariant)) return 16;
    if (c->invariant) return hooked ? 32 : 64;
    if (size == 0 && in_bytes(c) && !hooked && c->dim_qk <= 128 && c->dim_v <= 128) return 128;
    return plain || size == 0 ? 64 : 32;
}

/* Tile and kinds. */
static bool choose_shape(fv__attend_config *c, const fv__attend_device *d, int size)
{
    for (int tile = largest_tile(c, d, size); tile >= 16; tile /= 2) {
        if (tile < 32 && (c->k_stored > FV__F32 || c->v_stored > FV__F32)) break;
        c->tile = tile;
        for (int s = 2; s >= 0; s--) {
            choose_kinds(c, s);
            if (!choose_stages(c, d) || (c->stages < 2 && s > 0)) continue;
            if (c->stages < 2 && tile > 16) break;      /* a smaller tile in two stages rather */
            if (s > size) {                             /* the same tile, fewer rows */
                choose_kinds(c, size);
                choose_stages(c, d);
            }
            return true;
        }
    }
    return false;
}

void (*fv__attend_tune)(fv__attend_config *config);

fv_status fv__attend_configure(const fv__problem *p, const fv_plan_desc *limits, const fv__attend_device *device, fv__attend_config *c,
                               fv_error *err)
{
    memset(c, 0, sizeof *c);
    if (p->k == FV__DTYPE_int4 || p->v == FV__DTYPE_int4)
        return refuse(err, p->k == FV__DTYPE_int4 ? "problem.k" : "problem.v", 4, 8, "int4 is read by CPUs alone; here are fp4_e2m1 and 8-bit types");
    if (p->tiled) return refuse(err, "problem.page_order", 1, 0, "pages of tiles are read by CPUs alone; here pages lie in rows");
    choose_types(p, c);
    c->dim_qk = p->dim_qk;
    c->dim_v = p->dim_v;
    c->tail = p->qk_tail;
    c->invariant = limits->invariant;
    c->key_sums = has_hook(p, FV__HOOK_KEY_SUM);
    c->decode = limits->max_rows == limits->max_requests && !limits->max_segments && limits->sharing == FV_SHARING_OFF;
    c->uses_bytes = fv__attend_use_offset(p, p->num_uses);
    if (c->uses_bytes > 1024) return refuse(err, "problem.variants", c->uses_bytes, 1024, "the variants' arguments need more than 1024 bytes");
    if (c->k_stored == FV__E2M1 && p->dim_qk % 16) return refuse(err, "problem.dim_qk", p->dim_qk, 16, "4-bit keys need a multiple of 16");
    const int size = c->decode && p->group <= 16 ? 0 : 2;       /* decode of larger groups takes the build that mixed batches have */
    if (!choose_shape(c, device, size)) {
        c->tile = c->k_stored > FV__F32 || c->v_stored > FV__F32 ? 32 : 16;
        choose_kinds(c, 0);
        c->stages = 1;
        const int need = count_shared(c), lacking = need - fv__min32(device->shared_per_block, device->shared_per_sm - device->shared_reserved);
        return fv__fail(err, FV_E_UNSUPPORTED, "problem.dim_qk", need, device->shared_per_block,
                        "attend_sm80: dims %d and %d need %d bytes of shared memory a block; %d bytes are missing", p->dim_qk, p->dim_v, need, lacking);
    }
    if (fv__attend_tune) {
        fv__attend_tune(c);
        set_kinds(c, c->warps, c->num_kinds, c->kinds);
        c->shared_bytes = count_shared(c);
        c->blocks_per_sm = fit_blocks(c, device, c->blocks_per_sm);
        if (!c->blocks_per_sm) return refuse(err, "problem.dim_qk", c->shared_bytes, device->shared_per_block, "the tuned configuration does not fit");
    }
    choose_units(p, c);
    const int o_floats = align_up(c->dim_v, 4);
    c->slot_floats = align_up(c->unit_heads * (o_floats + 2), 4);
    if (c->invariant) {
        int most = 0;
        const int vu = units_of(c->v_stored, c->dim_v), tiles = c->v_stored == FV__F32 ? 1 : 2 * (16 / bits_of(c->v_stored));
        for (int i = 0; i < c->num_kinds; i++)
            most = fv__max32(most, c->kinds[i].m_tiles * ((vu + c->kinds[i].warps_values - 1) / c->kinds[i].warps_values) * tiles * 4);
        c->scratch_floats = most * 32 * c->warps;
    }
    return FV_OK;
}

void fv__attend_shape(const fv__problem *p, const fv_plan_desc *limits, const fv__attend_config *c, const fv__attend_device *device,
                      fv__kernel_shape *out)
{
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "attend_sm80_%s_%s_d%d%s", fv__dtypes[p->q].name, fv__dtypes[p->k].name, p->dim_qk, c->decode ? "_decode" : "");
    out->max_packed = c->rows;
    out->unit_heads = c->unit_heads;
    out->units_per_kv_head = c->units_per_kv_head;
    out->num_units = p->num_kv_heads * c->units_per_kv_head;
    out->workers = c->blocks_per_sm * device->num_sms;
    if (limits->workers > 0) out->workers = fv__min32(out->workers, limits->workers);
    if (c->decode) out->num_cores = device->num_sms;
    out->queue = 1;
    out->num_tiles = c->num_kinds;
    for (int i = 0; i < c->num_kinds; i++) out->tiles[i] = 16 * c->kinds[i].m_tiles * c->kinds[i].warps_rows;
    out->partial_bytes = (int64_t)c->slot_floats * (int64_t)sizeof(float);
    out->cost = &fv__cost_sm80;
}

void fv__attend_parts(const fv__attend_config *c, const fv__attend_device *device, int32_t *num_parts, int32_t *max_registers)
{
    *num_parts = c->num_kinds > 1 ? 1 + c->num_kinds : 0;
    *max_registers = fv__min32(255, device->registers_per_sm / (32 * c->warps * c->blocks_per_sm) / 8 * 8);
}

/* ---------------------------------------------------------------------------------------------------------- the text */

typedef struct writer {
    char *text;
    size_t size, room;
    bool failed;
} writer;

static void put_bytes(writer *w, const char *text, size_t n)
{
    if (w->failed) return;
    if (w->size + n + 1 > w->room) {
        const size_t room = 2 * w->room + n + 1;
        char *grown = realloc(w->text, room);
        if (!grown) {
            w->failed = true;
            return;
        }
        w->text = grown;
        w->room = room;
    }
    memcpy(w->text + w->size, text, n);
    w->size += n;
    w->text[w->size] = 0;
}

__attribute__((format(printf, 2, 3))) static void put(writer *w, const char *format, ...)
{
    char line[512];
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (n < 0 || n >= (int)sizeof line) w->failed = true;
    else put_bytes(w, line, (size_t)n);
}

static void put_constants(writer *w, const fv__attend_config *c)
{
    put(w, "#define FV_DK %d\n#define FV_DV %d\n#define FV_TAIL %d\n#define FV_VINK %d\n", c->dim_qk, c->dim_v, c->tail, c->v_in_k);
    put(w, "#define FV_QT %d\n#define FV_KT %d\n#define FV_VT %d\n#define FV_OT %d\n", c->q, c->k, c->v, c->o);
    put(w, "#define FV_CT %d\n#define FV_PT %d\n#define FV_KS %d\n#define FV_VS %d\n", c->score, c->value, c->k_stored, c->v_stored);
    put(w, "#define FV_CONVERT_K %d\n#define FV_CONVERT_V %d\n#define FV_SCALED %d\n", c->convert_k, c->convert_v, c->scaled);
    put(w, "#define FV_KEYS_IN_PLACE %d\n#define FV_KEYS_TURNED %d\n#define FV_ROUGH_TURNS %d\n", c->keys_in_place, c->keys_turned, c->score != FV__F32);
    put(w, "#define FV_KSCALE %d\n#define FV_VSCALE %d\n#define FV_INVARIANT %d\n", c->k_token_scale, c->v_token_scale, c->invariant);
    put(w, "#define FV_PAIRED %d\n#define FV_LOOK %d\n", c->paired, c->look);
    put(w, "#define FV_T %d\n#define FV_NS %d\n#define FV_WARPS %d\n#define FV_CTAS %d\n", c->tile, c->stages, c->warps, c->blocks_per_sm);
    if (c->key_sums) put(w, "#define FV_SUM_LINES %d\n", c->sum_lines);
    if (c->stamps) put(w, "#define FV_STAMPS\n");
    put(w, "#define FV_ROWS %d\n#define FV_OUT_ROWS %d\n#define FV_SMEM %d\n#define FV_NUM_KINDS %d\n", c->rows, c->out_rows, c->shared_bytes,
        c->num_kinds);
    for (int i = 0; i < c->num_kinds; i++) {
        const fv__attend_kind *k = &c->kinds[i];
        put(w, "#define FV_KIND_%d KIND(%d, %d, %d, %d)\n", i + 1, k->m_tiles, k->warps_rows, k->warps_values, k->warps_keys);
    }
    put(w, "#define FV_KINDS");
    for (int i = 1; i <= c->num_kinds; i++) put(w, " FV_KIND_%d", i);
    put(w, "\n#define FV_COPIES");
    for (int i = 0; i < c->num_kinds; i++) {
        bool before = false;
        for (int k = 0; k < i; k++) before = before || c->kinds[k].warps_keys == c->kinds[i].warps_keys;
        if (!before) put(w, " COPIES(%d)", c->kinds[i].warps_keys);
    }
    put(w, "\n");
}

static const char *const hook_names[FV__NUM_HOOKS] = { "SCORE", "VISIBLE", "SINK", "QUERY", "KEY", "VALUE", "OUTPUT", "WEIGHT", "KEY_SUM",
                                                         "ROW_MAX" };

static bool has_args(const fv__problem *p, int i) { return p->uses[i].variant->meta.args_bytes > 0; }

/* The address of a use's arguments in generated code. */
static const char *args_of(const fv__problem *p, int i, char buffer[24])
{
    snprintf(buffer, 24, has_args(p, i) ? "&u.u%d" : "(fv_args_u%d_s *)0", i);
    return buffer;
}

/* struct fv_uses, and fv_bind: what the step holds, but for the run's own parameters that this launch has brought. */
static void put_uses(writer *w, const fv__problem *p)
{
    bool any = false;
    for (int i = 0; i < p->num_uses; i++) any = any || has_args(p, i);
    if (!any) {
        put(w, "struct fv_uses { };\n#define USES fv_uses()\n");
        return;
    }
    put(w, "#define FV_USES\nstruct fv_uses {");
    for (int i = 0; i < p->num_uses; i++) if (has_args(p, i)) put(w, " fv_args_u%d_s u%d;", i, i);
    put(w, " };\nstatic_assert(sizeof(fv_uses) == %d, \"argument structs\");\n", fv__attend_use_offset(p, p->num_uses));
    put(w, "VFN void fv_bind(fv_uses &to, const fv_uses &step, const fv_uses &run, const uint32_t *from)\n{\n    to = step;\n");
    for (int i = 0; i < p->num_uses; i++) {
        const fv__variant_meta *meta = &p->uses[i].variant->meta;
        for (int k = 0; k < meta->num_params; k++)
            if (meta->params[k].binding == FV__BIND_RUN)
                put(w, "    if (from[%d] >> %d & 1) to.u%d.%s = run.u%d.%s;\n", i, k, i, meta->params[k].name, i, meta->params[k].name);
    }
    put(w, "}\n");
}

/* A hook whose value goes through all variants: NAME(x, ...). */
static void put_chain(writer *w, const fv__problem *p, fv__hook hook, const char *head, const char *value, const char *more)
{
    char args[24];
    if (!has_hook(p, hook)) return;
    put(w, "VFN float %s\n{\n", head);
    for (int i = 0; i < p->num_uses; i++)
        if (use_has(p, i, hook)) put(w, "    %s = fv_do_u%d_%s(%s, at, %s%s);\n", value, i, hook_names[hook], args_of(p, i, args), value, more);
    put(w, "    return %s;\n}\n", value);
}

static void put_bound(writer *w, const fv__problem *p, bool first)
{
    put(w, "VFN int fv_%s_key(const fv_uses &u, int position)\n{\n    int k = %s0x40000000;\n", first ? "first" : "last", first ? "-" : "");
    for (int i = 0; i < p->num_uses; i++) {
        const fv__variant_meta *meta = &p->uses[i].variant->meta;
        const fv__bound *b = first ? &meta->first : &meta->last;
        if (!b->present) continue;
        put(w, "    k = fv_%s(k, position", first ? "max" : "min");
        if (b->sign) put(w, " %c u.u%d.%s", b->sign < 0 ? '-' : '+', i, meta->params[b->param].name);
        put(w, ");\n");
    }
    put(w, "    return k;\n}\n");
}

static void put_visible(writer *w, const fv__problem *p)
{
    char args[24];
    bool exact = true;
    if (!has_hook(p, FV__HOOK_VISIBLE)) return;
    put(w, "VFN bool fv_visible(const fv_uses &u, const v_at &at)\n{\n    return true");
    for (int i = 0; i < p->num_uses; i++) {
        if (!use_has(p, i, FV__HOOK_VISIBLE)) continue;
        put(w, "\n        && fv_do_u%d_VISIBLE(%s, at)", i, args_of(p, i, args));
        exact = exact && p->uses[i].variant->meta.exact;
    }
    put(w, ";\n}\n#define FV_ALL_EXACT %d\n", exact);
    put_bound(w, p, true);
    put_bound(w, p, false);
    put(w, "VFN bool fv_lifted(const fv_uses &u)\n{\n    return false");
    for (int i = 0; i < p->num_uses; i++) {
        const fv__variant_meta *meta = &p->uses[i].variant->meta;
        if (meta->lifted >= 0) put(w, " || u.u%d.%s.ranges", i, meta->params[meta->lifted].name);
    }
    put(w, ";\n}\n");
}

static void put_sinks(writer *w, const fv__problem *p)
{
    char args[24];
    if (!has_hook(p, FV__HOOK_SINK)) return;
    put(w, "template <class SUM> VFN void fv_sinks(const fv_uses &u, const v_at &at, SUM &sum)\n{\n");
    for (int i = 0; i < p->num_uses; i++)
        if (use_has(p, i, FV__HOOK_SINK)) put(w, "    sum.add(fv_do_u%d_SINK(%s, at));\n", i, args_of(p, i, args));
    put(w, "}\n");
}

/* Where key sums go: the one FV_SUMS parameter. */
static void put_sums(writer *w, const fv__problem *p)
{
    for (int i = 0; i < p->num_uses; i++) {
        const fv__variant_meta *meta = &p->uses[i].variant->meta;
        for (int k = 0; k < meta->num_params && use_has(p, i, FV__HOOK_KEY_SUM); k++)
            if (meta->params[k].kind == FV__SUMS)
                put(w, "VFN fv_sums fv_sums_of(const fv_uses &u) { return u.u%d.%s; }\n", i, meta->params[k].name);
    }
}

/* The maximum of a row, through each variant that asks for it, to its FV_MAXES parameters. */
static void put_maxes(writer *w, const fv__problem *p)
{
    char args[24];
    if (!has_hook(p, FV__HOOK_ROW_MAX)) return;
    put(w, "VFN void fv_row_max(float m, const fv_uses &u, const v_at &at)\n{\n");
    for (int i = 0; i < p->num_uses; i++) {
        const fv__variant_meta *meta = &p->uses[i].variant->meta;
        for (int k = 0; k < meta->num_params && use_has(p, i, FV__HOOK_ROW_MAX); k++) {
            if (meta->params[k].kind != FV__MAXES) continue;
            put(w, "    const fv_maxes o%d_%d = u.u%d.%s;\n", i, k, i, meta->params[k].name);
            put(w, "    if (o%d_%d.data) o%d_%d.data[at.batch_row * o%d_%d.stride + at.head] = fv_do_u%d_ROW_MAX(%s, at, m);\n", i, k, i, k, i, k, i,
                args_of(p, i, args));
        }
    }
    put(w, "}\n");
}

/* Pair hooks, as functions of elements: g0 is the row before any of them. */
static void put_turns(writer *w, const fv__problem *p, fv__hook hook, const char *name)
{
    char args[24];
    int n = 0;
    if (!has_hook(p, hook)) return;
    put(w, "template <class GET> VFN float %s(const GET &g0, const fv_uses &u, const v_at &at, int d, int dim)\n{\n", name);
    for (int i = 0; i < p->num_uses; i++) {
        if (!use_has(p, i, hook)) continue;
        args_of(p, i, args);
        put(w, "    bool i%d;\n    const int n%d = fv_do_u%d_pairs(%s, &i%d);\n", i, i, i, args, i);
        put(w, "    const auto h%d = [&](const v_at &a, v_pair x) { return fv_do_u%d_%s(%s, a, x); };\n", i, i, hook_names[hook], args);
        put(w, "    const auto g%d = [&](int e) { return fv_turn(h%d, g%d, at, n%d, i%d, e, dim); };\n", n + 1, i, n, i, i);
        n++;
    }
    put(w, "    return g%d(d);\n}\n", n);
}

/* The only hook on keys, a pair at a time. */
static void put_key_pair(writer *w, const fv__problem *p)
{
    char args[24];
    const int i = first_use(p, FV__HOOK_KEY), turns = p->uses[i].variant->meta.turns;
    args_of(p, i, args);
    put(w, "VFN int fv_key_pairs(const fv_uses &u, bool *interleaved) { return fv_do_u%d_pairs(%s, interleaved); }\n", i, args);
    put(w, "VFN v_pair fv_key_pair(const fv_uses &u, const v_at &at, v_pair x) { return fv_do_u%d_KEY(%s, at, x); }\n", i, args);
    if (turns >= 0)
        put(w, "VFN v_f32 fv_key_frequency(const fv_uses &u, int pair) { return v_read(u.u%d.%s, pair); }\n", i, p->uses[i].variant->meta.params[turns].name);
}

char *fv__attend_text(const fv__problem *p, const fv__attend_config *c)
{
    writer w = { 0 };
    put(&w, "/* made for one problem */\n");
    put_constants(&w, c);
    put(&w, "#include \"hooks.cuh\"\n");
    for (int i = 0; i < p->num_uses; i++) {
        char *text = fv__cuda_variant_text(i, p->uses[i].variant);
        if (text) put_bytes(&w, text, strlen(text));
        else w.failed = true;
        free(text);
    }
    put_uses(&w, p);
    for (int h = 0; h < FV__NUM_HOOKS; h++) if (has_hook(p, h)) put(&w, "#define FV_HAS_%s\n", hook_names[h]);
    put_chain(&w, p, FV__HOOK_SCORE, "fv_score(float s, const fv_uses &u, const v_at &at, v_way &way)", "s", ", way");
    put_visible(&w, p);
    put_sinks(&w, p);
    put_turns(&w, p, FV__HOOK_QUERY, "fv_query");
    put_turns(&w, p, FV__HOOK_KEY, "fv_key");
    if (c->keys_in_place) put_key_pair(&w, p);
    put_chain(&w, p, FV__HOOK_VALUE, "fv_value(float v, const fv_uses &u, const v_at &at)", "v", "");
    put_chain(&w, p, FV__HOOK_OUTPUT, "fv_output(float o, float lse, const fv_uses &u, const v_at &at)", "o", ", lse");
    put_chain(&w, p, FV__HOOK_WEIGHT, "fv_weight(float s, const fv_uses &u, const v_at &at)", "s", "");
    put_chain(&w, p, FV__HOOK_KEY_SUM, "fv_key_sum(float p, const fv_uses &u, const v_at &at)", "p", "");
    put_sums(&w, p);
    put_maxes(&w, p);
    if (!w.failed) return w.text;
    free(w.text);
    return NULL;
}
