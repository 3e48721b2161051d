/* SPDX-License-Identifier: Apache-2.0 */
/* checkops.c -- append, rope, merge, page copies and the companions (foveal/ops.h) on a GPU against the same calls on the CPU, whose bytes they must
 * store (norms, activations and merges: whose numbers they must come near).
 *
 *     checkops [--device cuda:0] [--count N] [--seed N] [--only N] [--verbose]
 *
 * Each round draws shapes, types, layouts, tables and where the arrays lie (host, device, some of each), runs both, and compares all memory that the
 * call could have written, byte for byte. Rounds whose arrays all lie on the device run once more from a captured graph. Needs libc, the driver
 * and NVRTC. Last line "N passed, N failed". Exit status 77: no GPU. */
#include "cuda/state.h"
#include "ctx.h"
#include "foveal/ops.h"
#include "os.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_REQUESTS = 64, MAX_BUFFERS = 200, NUM_ARRAYS = 10 };

static fv_ctx *cpu, *gpu;
static fv__cuda_device *device;
static CUstream stream;
static int passed, failed;
static bool verbose;

static void stop(const char *what, const fv_error *err)
{
    printf("%s: %s\n", what, err->text);
    exit(1);
}

#define MUST(call) do { fv_error e_ = { 0 }; if ((call) != FV_OK) stop(#call, &e_); } while (0)
#define ERR (&e_)

/* -------------------------------------------------------------------------------------------------------- random things */

static uint64_t state;

static uint32_t draw(uint32_t below)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % below;
}

static bool chance(int percent) { return (int)draw(100) < percent; }
static double real(void) { return (double)draw(1 << 24) / (1 << 23) - 1; }

#define ONE_OF(...) (((const int[]){ __VA_ARGS__ })[draw(sizeof((int[]){ __VA_ARGS__ }) / sizeof(int))])

/* --------------------------------------------------------------------------------------------------------------- memory */

typedef struct buffer {                 /* what the CPU works on, and its twin */
    char *host;
    CUdeviceptr device;
    size_t bytes;
    bool output;
    char *before;                       /* outputs: as they were */
} buffer;

static buffer buffers[MAX_BUFFERS];
static int num_buffers;

static buffer *make(int64_t bytes, bool output)
{
    buffer *b = &buffers[num_buffers++];
    *b = (buffer){ .host = malloc((size_t)bytes + 64), .bytes = (size_t)bytes + 64, .output = output };
    memset(b->host, 0xa5, b->bytes);
    MUST(fv__cuda_alloc(device, b->bytes, &b->device, ERR));
    return b;
}

static void upload(const buffer *b)
{
    MUST(fv__cuda_to_device(device, b->device, b->host, b->bytes, stream, ERR));
    MUST(fv__cuda_stream_sync(device, stream, ERR));
}

static void upload_all(void)
{
    for (int i = 0; i < num_buffers; i++) {
        upload(&buffers[i]);
        if (!buffers[i].output) continue;
        buffers[i].before = malloc(buffers[i].bytes);
        memcpy(buffers[i].before, buffers[i].host, buffers[i].bytes);
    }
}

static void reset_outputs(void)
{
    for (int i = 0; i < num_buffers; i++) {
        const buffer *b = &buffers[i];
        if (!b->output) continue;
        MUST(fv__cuda_to_device(device, b->device, b->before, b->bytes, stream, ERR));
    }
    MUST(fv__cuda_stream_sync(device, stream, ERR));
}

/* Which output differs first, and where; -1: none. */
static int differing(size_t *where)
{
    for (int i = 0; i < num_buffers; i++) {
        const buffer *b = &buffers[i];
        if (!b->output) continue;
        char *got = malloc(b->bytes);
        MUST(fv__cuda_to_host(device, got, b->device, b->bytes, stream, ERR));
        MUST(fv__cuda_stream_sync(device, stream, ERR));
        for (*where = 0; *where < b->bytes && got[*where] == b->host[*where];) ++*where;
        if (*where < b->bytes && verbose) {
            printf("    buffer %d of %zu bytes, from byte %zu:\n    cpu", i, b->bytes, *where);
            for (size_t k = *where; k < *where + 16 && k < b->bytes; k++) printf(" %02x", (unsigned char)b->host[k]);
            printf("\n    gpu");
            for (size_t k = *where; k < *where + 16 && k < b->bytes; k++) printf(" %02x", (unsigned char)got[k]);
            printf("\n");
        }
        free(got);
        if (*where < b->bytes) return i;
    }
    return -1;
}

static void drop_all(void)
{
    for (int i = 0; i < num_buffers; i++) {
        free(buffers[i].host);
        free(buffers[i].before);
        fv__cuda_free(device, buffers[i].device);
    }
    num_buffers = 0;
}

/* The same descriptor for the GPU: pointers into buffers become those of their twins. */
static void *twin(const void *host)
{
    for (int i = 0; i < num_buffers; i++) {
        const buffer *b = &buffers[i];
        if ((const char *)host >= b->host && (const char *)host < b->host + b->bytes)
            return (void *)(uintptr_t)(b->device + (CUdeviceptr)((const char *)host - b->host));
    }
    return NULL;
}

static void move(fv_tensor *t)
{
    if (t->data) t->data = twin(t->data);
}

/* ----------------------------------------------------------------------------------------------------------- the inputs */

static const char *const wide_types[] = { "f16", "bf16", "f32" };
static const char *const all_types[] = { "f16", "bf16", "f32", "fp8_e4m3", "fp8_e5m2", "int8", "fp4_e2m1" };

static int bits_of(const char *type) { return fv__dtypes[fv__dtype_find(type)].bits; }

/* [rows, heads, width] with strides that may leave gaps; special: NaN and infinities too. */
static fv_tensor new_rows(const char *type, int64_t rows, int heads, int width, bool output, bool special, double amplitude)
{
    const fv__dtype dtype = fv__dtype_find(type);
    const int64_t head = width + (chance(20) ? 3 : 0), row = heads * head + (chance(30) ? 8 : 0), shift = chance(20) ? 1 : 0;
    buffer *b = make((rows * row + shift) * bits_of(type) / 8, output);
    for (int64_t i = 0; i < rows * row + shift; i++) {
        double x = amplitude * real() * (chance(5) ? 100 : 1);
        if (special && chance(2)) x = chance(50) ? NAN : chance(50) ? INFINITY : -INFINITY;
        if (chance(3)) x = chance(50) ? 0.0 : -0.0;
        if (!output) fv__dtype_store(dtype, b->host, i, x);
    }
    return (fv_tensor){ .data = b->host + shift * bits_of(type) / 8, .dtype = type, .ndim = 3, .shape = { rows, heads, width },
                        .stride = { row, head, 1 } };
}

/* The cache's axes, [page][token][head][width] or [page][head][token][width] in memory; or ragged. */
static fv_tensor cache(const char *type, int64_t pages, int page_size, int64_t tokens, int heads, int width, bool hnd)
{
    if (!page_size) {
        buffer *b = make(tokens * heads * width * bits_of(type) / 8, true);
        return (fv_tensor){ .data = b->host, .dtype = type, .ndim = 3, .shape = { tokens, heads, width }, .stride = { (int64_t)heads * width, width, 1 } };
    }
    const int64_t page = (int64_t)page_size * heads * width + (chance(30) ? 32 : 0);
    buffer *b = make(pages * page * bits_of(type) / 8, true);
    return (fv_tensor){ .data = b->host, .dtype = type, .ndim = 4, .shape = { pages, page_size, heads, width },
                        .stride = { page, hnd ? width : heads * width, hnd ? page_size * width : width, 1 } };
}

/* Integers as 32 or 64 bits, dense or every second. */
static fv_index integers(const int64_t *x, int64_t n)
{
    const bool wide = chance(40);
    const int64_t stride = chance(30) ? 2 : 1, size = wide ? 8 : 4;
    buffer *b = make(n * stride * size, false);
    for (int64_t i = 0; i < n; i++) {
        const int32_t narrow = (int32_t)x[i];
        memcpy(b->host + i * stride * size, wide ? (const void *)&x[i] : (const void *)&narrow, (size_t)size);
    }
    return (fv_index){ b->host, NULL, n, stride, wide ? FV_INDEX_I64 : FV_INDEX_I32, 0 };
}

static fv_rope_desc draw_rope(int width)
{
    fv_rope_desc r = { .rotary_dim = chance(60) ? width / 2 * 2 : width / 4 * 2, .interleaved = chance(40), .base = ONE_OF(10000, 500000) };
    if (chance(30)) {
        r.factor = 8;
        r.low_freq_factor = 1;
        r.high_freq_factor = 4;
        r.original_context = 8192;
    }
    return r;
}

/* ---------------------------------------------------------------------------------------------------------------- append */

typedef struct trial {
    fv_append_desc d;
    fv_rope_desc rope;
    int64_t rows, tokens, pages;
    int n, page_size, hk;
    bool bad;                           /* some ids or slots are wrong */
    char words[200];
} trial;

static int64_t lengths[MAX_REQUESTS], row_at[MAX_REQUESTS + 1], page_at[MAX_REQUESTS + 1], token_at[MAX_REQUESTS + 1];

static void draw_requests(trial *t)
{
    const bool decode = chance(40);
    t->n = 1 + (int)draw(chance(50) ? 5 : MAX_REQUESTS);
    t->page_size = ONE_OF(0, 1, 3, 16, 16, 64);
    for (int i = 0; i < t->n; i++) {
        const int64_t rows = decode ? 1 : draw(chance(10) ? 200 : 12), used = draw(200);
        lengths[i] = rows + used;
        row_at[i + 1] = row_at[i] + rows;
        page_at[i + 1] = page_at[i] + (t->page_size ? (lengths[i] + t->page_size - 1) / t->page_size + (chance(20) ? 1 : 0) : 0);
        token_at[i + 1] = token_at[i] + lengths[i] + (chance(20) ? 3 : 0);
    }
    t->rows = row_at[t->n];
    t->tokens = token_at[t->n];
    t->pages = page_at[t->n] + 2;
    t->d.num_requests = t->n;
    t->d.lengths = integers(lengths, t->n);
    if (!decode || chance(50)) t->d.rows = integers(row_at, t->n + 1);
    if (chance(30)) {
        int64_t first[MAX_REQUESTS];
        for (int i = 0; i < t->n; i++) first[i] = draw(chance(50) ? 1000 : 1 << 20);
        t->d.first_positions = integers(first, t->n);
    }
}

static void draw_tables(trial *t)
{
    fv_pages *p = &t->d.pages;
    if (!t->page_size) {
        t->d.kv_indptr = integers(token_at, t->n + 1);
        return;
    }
    const bool csr = chance(50), named = !csr && chance(50);
    int64_t width = 0, *ids, line[MAX_REQUESTS];
    for (int i = 0; i < t->n; i++) width = page_at[i + 1] - page_at[i] > width ? page_at[i + 1] - page_at[i] : width;
    const int64_t stride = width + (chance(30) ? 2 : 0), total = csr ? page_at[t->n] : (named ? t->n + 2 : t->n) * stride;
    int64_t *order = malloc(sizeof *order * (size_t)(t->pages + 1));
    ids = malloc(sizeof *ids * (size_t)(total + 1));
    for (int64_t i = 0; i < t->pages; i++) order[i] = i;
    for (int64_t i = t->pages - 1; i > 0; i--) {
        const int64_t j = draw((uint32_t)i + 1), x = order[i];
        order[i] = order[j];
        order[j] = x;
    }
    for (int64_t i = 0; i < total; i++) ids[i] = -7;
    for (int i = 0; i < t->n; i++) {
        line[i] = named ? t->n + 1 - i : i;
        for (int64_t k = page_at[i]; k < page_at[i + 1]; k++) ids[csr ? k : line[i] * stride + k - page_at[i]] = order[k];
    }
    for (int64_t i = 0; t->bad && i < total; i++) if (chance(10)) ids[i] = chance(50) ? t->pages : -1;
    *p = (fv_pages){ .page_size = t->page_size, .num_pages = t->pages, .ids = integers(ids, total) };
    if (csr) p->indptr = integers(page_at, t->n + 1);
    else p->table_width = width, p->table_stride = stride;
    if (named) p->table_rows = integers(line, t->n);
    if (chance(15)) {                   /* V's pages are others */
        fv_index k = p->ids;
        for (int64_t i = 0; i < total; i++) if (ids[i] >= 0 && ids[i] < t->pages) ids[i] = t->pages - 1 - ids[i];
        do p->v_ids = integers(ids, total); while (p->v_ids.type != k.type || p->v_ids.stride != k.stride);
    }
    free(order);
    free(ids);
}

static void draw_slots(trial *t)
{
    int64_t *slots = malloc(sizeof *slots * (size_t)(t->rows + 1)), *positions = malloc(sizeof *positions * (size_t)(t->rows + 1));
    const int64_t room = t->page_size ? t->pages * t->page_size : t->tokens;
    for (int64_t i = 0; i < t->rows; i++) {
        slots[i] = (i * 7919 + 13) % room;              /* distinct where 7919 and room have no common factor */
        if (room % 7919 == 0) slots[i] = i % room;
        if (chance(5)) slots[i] = -1;
        if (t->bad && chance(5)) slots[i] = chance(50) ? room : -5;
        positions[i] = (int64_t)draw(1 << 20) - 1000;
    }
    t->d.slots = integers(slots, t->rows);
    if (t->d.rope) t->d.row_positions = integers(positions, t->rows);
    t->d.rows = t->d.lengths = t->d.first_positions = (fv_index){ 0 };
    t->d.pages.page_size = t->page_size;
    t->d.pages.num_pages = t->page_size ? t->pages : 0;
    free(slots);
    free(positions);
}

static void draw_scale(trial *t, const char *type, const fv_tensor *like, const char **kind, fv_arg *arg, fv_tensor *room)
{
    const int which = (int)draw(4);
    if (which == 1) {
        *kind = "tensor";
        arg->number = 0.37;
    } else if (which == 2) {
        buffer *b = make(4 * t->hk, false);
        for (int h = 0; h < t->hk; h++) ((float *)b->host)[h] = 0.1f * (float)(h + 1);
        *kind = "head";
        *room = (fv_tensor){ .data = b->host, .dtype = "f32", .ndim = 1, .shape = { t->hk }, .stride = { 1 } };
        arg->tensor = room;
    } else if (which == 3 && bits_of(type) <= 8) {
        fv_tensor x = cache("f32", t->pages, t->page_size, t->tokens, t->hk, 1, false);
        *kind = "token_head";
        *room = x;
        room->ndim = like->ndim - 1;
        arg->tensor = room;
    }
}

static void draw_tensors(trial *t)
{
    fv_append_desc *d = &t->d;
    const char *from = wide_types[draw(3)], *to = all_types[draw(7)], *v_from = chance(80) ? from : wide_types[draw(3)];
    const char *v_to = chance(70) ? to : all_types[draw(7)];
    const bool fp4 = !strcmp(to, "fp4_e2m1"), v_fp4 = !strcmp(v_to, "fp4_e2m1"), hnd = chance(40);
    const int dk = fp4 ? ONE_OF(16, 64, 128, 192) : ONE_OF(8, 33, 64, 80, 128, 128, 512), dv = v_fp4 ? ONE_OF(16, 64, 128) : ONE_OF(1, 8, 40, 64, 128);
    const int tail = !fp4 && chance(20) ? ONE_OF(8, 64) : 0, hq = t->hk * ONE_OF(1, 4);
    const bool turns = d->rope, special = bits_of(to) <= 8;         /* NaN comes out of arithmetic as each machine likes */
    const int64_t more = t->rows + (chance(20) ? 2 : 0);
    static fv_tensor k_scale, v_scale;
    d->new_k = new_rows(from, more, t->hk, dk, false, special, 4);
    d->k = cache(to, t->pages, t->page_size, t->tokens, t->hk, dk, hnd);
    if (tail) {
        d->new_k_tail = new_rows(wide_types[draw(3)], more, t->hk, tail, false, special, 4);
        d->k_tail = cache(to, t->pages, t->page_size, t->tokens, t->hk, tail, hnd);
    }
    if (chance(80)) {
        d->new_v = new_rows(v_from, more, t->hk, dv, false, bits_of(v_to) <= 8, 4);
        d->v = cache(v_to, t->pages, t->page_size, t->tokens, t->hk, dv, chance(50));
        if (v_fp4) d->v_block_scale = cache("fp8_e4m3", t->pages, t->page_size, t->tokens, t->hk, dv / 16, false);
        draw_scale(t, v_to, &d->v, &d->v_scale_kind, &d->v_scale, &v_scale);
    }
    if (fp4) d->k_block_scale = cache("fp8_e4m3", t->pages, t->page_size, t->tokens, t->hk, dk / 16, false);
    draw_scale(t, to, &d->k, &d->k_scale_kind, &d->k_scale, &k_scale);
    if (turns) {
        const int width = tail ? tail : dk;
        t->rope = draw_rope(width);
        if (chance(50)) {
            const char *q_type = wide_types[draw(3)];
            d->q = new_rows(q_type, more, hq, width + (chance(20) ? 6 : 0), false, false, 4);
            d->q_out = new_rows(chance(80) ? q_type : wide_types[draw(3)], more, hq, (int)d->q.shape[2], true, false, 4);
        }
    }
    d->checked = chance(50);
    snprintf(t->words, sizeof t->words, "%s -> %s %s, v %s -> %s %s, dims %d + %d, %d; heads %d/%d page %d %s, rope %d%s, %d requests, %lld rows", from, to,
             d->k_scale_kind ? d->k_scale_kind : "-", v_from, v_to, d->v_scale_kind ? d->v_scale_kind : "-", dk, tail, d->new_v.data ? dv : 0, hq, t->hk,
             t->page_size, hnd ? "hnd" : "nhd", turns ? t->rope.rotary_dim : 0, t->rope.interleaved ? "i" : "", t->n, (long long)t->rows);
}

static fv_index *const *arrays_of(fv_append_desc *d)
{
    static fv_index *list[NUM_ARRAYS];
    fv_index *const all[NUM_ARRAYS] = { &d->rows, &d->lengths, &d->first_positions, &d->row_positions, &d->pages.indptr, &d->pages.ids, &d->pages.v_ids,
                                        &d->pages.table_rows, &d->kv_indptr, &d->slots };
    memcpy(list, all, sizeof all);
    return list;
}

/* where: 0 host, 1 device, 2 both, 3 some of each. */
static void place_arrays(fv_append_desc *d, int where)
{
    fv_index *const *list = arrays_of(d);
    for (int i = 0; i < NUM_ARRAYS; i++) {
        fv_index *x = list[i];
        const int w = where == 3 ? (int)draw(3) : where;
        if (x->type == FV_INDEX_NONE) continue;
        if (w > 0) x->device = twin(x->host);
        if (w == 1) x->host = NULL;
    }
}

static void move_all(fv_append_desc *d, fv_tensor scales[2])
{
    fv_tensor *const list[] = { &d->new_k, &d->new_v, &d->new_k_tail, &d->k, &d->v, &d->k_tail, &d->k_block_scale, &d->v_block_scale, &d->q, &d->q_out };
    for (int i = 0; i < FV__COUNT(list); i++) move(list[i]);
    fv_arg *const args[] = { &d->k_scale, &d->v_scale };
    for (int i = 0; i < 2; i++)
        if (args[i]->tensor) {
            scales[i] = *args[i]->tensor;
            move(&scales[i]);
            args[i]->tensor = &scales[i];
        }
}

typedef struct call { bool (*fn)(void *arg, fv_error *err); void *arg; } call;

static bool replay(call c, fv_error *err)
{
    const fv__cuda_api *api = &device->api;
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    fv__cuda_enter(device, err);
    api->cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    const bool queued = c.fn(c.arg, err);
    bool ok = api->cuStreamEndCapture(stream, &graph) == CUDA_SUCCESS && queued && api->cuGraphInstantiateWithFlags(&exec, graph, 0) == CUDA_SUCCESS;
    ok = ok && api->cuGraphLaunch(exec, stream) == CUDA_SUCCESS && api->cuStreamSynchronize(stream) == CUDA_SUCCESS;
    if (exec) api->cuGraphExecDestroy(exec);
    if (graph) api->cuGraphDestroy(graph);
    fv__cuda_leave(device);
    return ok;
}

/* Runs on the GPU, directly and (where `capturable`) from a graph; both must leave what the CPU has left. */
static const char *compare(call c, bool capturable, fv_error *err)
{
    size_t where;
    if (!c.fn(c.arg, err)) return "refused";
    if (fv__cuda_stream_sync(device, stream, err) != FV_OK) return "the device failed";
    if (differing(&where) >= 0) return "other bytes";
    if (!capturable) return NULL;
    reset_outputs();
    if (!replay(c, err)) return "no graph";
    return differing(&where) >= 0 ? "other bytes from a graph" : NULL;
}

static void verdict(const char *what, const char *wrong, const char *words, const fv_error *err)
{
    if (wrong) failed++;
    else passed++;
    if (wrong || verbose) printf("%s %s: %s%s%s%s\n", wrong ? "FAIL" : "ok  ", what, words, wrong ? ": " : "", wrong ? wrong : "", wrong ? err->text : "");
    fflush(stdout);
}

static bool call_append(void *arg, fv_error *err) { return fv_append(gpu, arg, stream, err) == FV_OK; }

static void check_append(bool large)
{
    trial t = { .hk = ONE_OF(1, 2, 3, 8) };
    fv_error err = { 0 };
    fv_errors a, b;
    fv_tensor scales[2];
    t.bad = chance(15);
    draw_requests(&t);
    if (chance(60)) t.d.rope = &t.rope;
    const bool slots = chance(25);
    if (large) {                        /* more rows than one part of the ring takes */
        t.n = 1, t.rows = 30000, t.page_size = 16, t.pages = 1900, t.hk = 1;
        row_at[1] = lengths[0] = t.rows, page_at[1] = 1875;
        t.d = (fv_append_desc){ .num_requests = 1, .rows = integers(row_at, 2), .lengths = integers(lengths, 1), .rope = t.d.rope };
    }
    if (slots && !large) draw_slots(&t);
    else draw_tables(&t);
    draw_tensors(&t);
    upload_all();
    fv_ctx_errors(cpu, &a, 1);
    fv_ctx_errors(gpu, &b, 1);
    const char *wrong = NULL;
    if (fv_append(cpu, &t.d, NULL, &err) != FV_OK) {
        wrong = "refused by the CPU: ";
    } else {
        const int where = large ? 0 : (int)draw(4);
        fv_append_desc d = t.d;
        const bool whole = d.new_k.shape[0] == t.rows || fv__index_given(&d.slots) || !fv__index_given(&d.rows);
        place_arrays(&d, where == 1 && !whole ? 2 : where);
        move_all(&d, scales);
        wrong = compare((call){ call_append, &d }, where == 1 || where == 2, &err);
        fv_ctx_errors(cpu, &a, 1);
        fv_ctx_errors(gpu, &b, 1);
        if (!wrong && !t.bad && !d.checked && (a.count || b.count)) wrong = "a fault in good data";
        if (!wrong && t.bad && !a.count != !b.count) wrong = "faults of one of the two alone";
    }
    verdict("append", wrong, t.words, &err);
    drop_all();
}

/* ------------------------------------------------------------------------------------------------------------------ rope */

typedef struct rope_call { fv_rope_desc rope; fv_tensor x, y; fv_index positions; } rope_call;

static bool call_rope(void *arg, fv_error *err)
{
    rope_call *c = arg;
    return fv_rope(gpu, &c->rope, &c->x, c->positions, &c->y, stream, err) == FV_OK;
}

static void check_rope(void)
{
    const int64_t rows = draw(40);
    const int heads = ONE_OF(1, 3, 8, 32), width = ONE_OF(2, 33, 64, 80, 128, 256, 576);
    const bool in_place = chance(30);
    fv_error err = { 0 };
    char words[100];
    int64_t positions[40];
    rope_call c = { .rope = draw_rope(width) };
    if (chance(10)) c.rope = (fv_rope_desc){ 0 };
    const char *type = wide_types[draw(3)];
    c.x = new_rows(type, rows, heads, width, false, false, 4);
    if (in_place) buffers[num_buffers - 1].output = true;
    c.y = in_place ? c.x : new_rows(chance(70) ? type : wide_types[draw(3)], rows, heads, width, true, false, 4);
    for (int i = 0; i < rows; i++) positions[i] = (int64_t)draw(1 << 30) >> draw(30);
    c.positions = integers(positions, rows);
    upload_all();
    snprintf(words, sizeof words, "%s -> %s, %lld rows of %d x %d, rotary %d%s%s", type, c.y.dtype, (long long)rows, heads, width, c.rope.rotary_dim,
             c.rope.interleaved ? "i" : "", in_place ? ", in place" : "");
    const char *wrong = "refused by the CPU: ";
    if (fv_rope(cpu, &c.rope, &c.x, c.positions, &c.y, NULL, &err) == FV_OK) {
        const bool there = chance(50);
        if (there) c.positions.device = twin(c.positions.host);
        if (there && chance(50)) c.positions.host = NULL;
        move(&c.x);
        move(&c.y);
        wrong = compare((call){ call_rope, &c }, there, &err);
    }
    verdict("rope", wrong, words, &err);
    drop_all();
}

/* ----------------------------------------------------------------------------------------------------------------- merge */

typedef struct merge_call { fv_tensor o[200], lse[200], out, out_lse; int n; bool base2; } merge_call;

static bool call_merge(void *arg, fv_error *err)
{
    merge_call *c = arg;
    return fv_merge(gpu, c->o, c->lse, c->n, c->base2, &c->out, &c->out_lse, stream, err) == FV_OK;
}

/* What the definition says of an output element, in double, and how far rounding may take the kernel from it. */
typedef struct expected {
    int count, last;                    /* states that count, the last of them */
    double lse;
    double o[FV__MAX_DIM], near[FV__MAX_DIM];
} expected;

/* Of n values, weighted by exponentials and added up in f32: each weight is off by the rounding of its argument and of the exponential, each sum by
 * a rounding a term; all of it relative to the values that went in, not to what they come to. Then the output is rounded to its type. */
static void define_merge(const merge_call *c, int64_t row, int head, expected *e)
{
    static const double u = 0x1p-24;
    const int width = (int)c->out.shape[2];
    const double rounding = !strcmp(c->out.dtype, "f32") ? u : !strcmp(c->out.dtype, "f16") ? 0x1p-11 : 0x1p-8;
    double most = -INFINITY, sum = 0, off = 0;
    memset(e, 0, sizeof *e);
    for (int pass = 0; pass < 2; pass++)
        for (int s = 0; s < c->n; s++) {
            const fv_tensor *o = &c->o[s], *l = &c->lse[s];
            const double lse = ((const float *)l->data)[row * l->stride[0] + head * l->stride[1]];
            if (lse == -INFINITY) continue;
            if (!pass) {
                e->count++;
                e->last = s;
                most = fmax(most, lse);
                continue;
            }
            const double w = c->base2 ? exp2(lse - most) : exp(lse - most), wrong = w * u * (4 + 2 * fabs(lse - most));
            sum += w;
            off += wrong;
            for (int i = 0; i < width; i++) {
                const double x = fv__dtype_load(fv__dtype_find(o->dtype), o->data, row * o->stride[0] + head * o->stride[1] + i);
                e->o[i] += w * x;
                e->near[i] += fabs(x) * (wrong + w * u * (2 + c->n));
            }
        }
    for (int i = 0; i < width && e->count; i++) {
        const double x = e->o[i] / sum, slack = (e->near[i] + fabs(x) * (off + sum * u * (2 + c->n))) / sum;
        e->o[i] = x;
        e->near[i] = slack + rounding * (fabs(x) + slack) * 1.001 + 0x1p-25;    /* the last: half the smallest step of f16 */
    }
    e->lse = e->count ? most + (c->base2 ? log2(sum) : log(sum)) : -INFINITY;
}

static expected *defined;               /* [rows][heads] */

static void define_all(const merge_call *c)
{
    const int64_t rows = c->out.shape[0], heads = c->out.shape[1];
    defined = realloc(defined, sizeof *defined * (size_t)(rows * heads));
    for (int64_t i = 0; i < rows * heads; i++) define_merge(c, i / heads, (int)(i % heads), &defined[i]);
}

/* The element of the output that lies at place i of its buffer: -1, it is none. */
static int64_t element_at(const fv_tensor *t, int64_t i)
{
    if (i < 0) return -1;
    const int64_t row = i / t->stride[0], head = i % t->stride[0] / t->stride[1], d = i % t->stride[0] % t->stride[1];
    if (row >= t->shape[0] || head >= t->shape[1] || d >= t->shape[2]) return -1;
    return (row * t->shape[1] + head) * t->shape[2] + d;
}

/* The CPU's result and the GPU's, each against the definition. What one state alone has, and what is no part of the output, has the CPU's bits. */
static const char *near(const merge_call *c, const buffer *o, const buffer *lse, int64_t shift)
{
    const fv__dtype type = fv__dtype_find(c->out.dtype);
    const int64_t n = (int64_t)o->bytes * 8 / fv__dtypes[type].bits, width = c->out.shape[2];
    char *got = malloc(o->bytes), *got_lse = malloc(lse->bytes);
    const char *wrong = NULL;
    MUST(fv__cuda_to_host(device, got, o->device, o->bytes, stream, ERR));
    MUST(fv__cuda_to_host(device, got_lse, lse->device, lse->bytes, stream, ERR));
    MUST(fv__cuda_stream_sync(device, stream, ERR));
    for (int64_t i = 0; i < n && !wrong; i++) {
        const int64_t at = element_at(&c->out, i - shift);
        const double x = fv__dtype_load(type, o->host, i), y = fv__dtype_load(type, got, i);
        const expected *e = at < 0 ? NULL : &defined[at / width];
        if (!e || e->count == 0 || (e->count == 1 && !strcmp(c->o[e->last].dtype, c->out.dtype))) {
            if (memcmp(&x, &y, sizeof x)) wrong = e ? "O has other bits" : "bytes beside O";
            continue;
        }
        const double want = e->o[at % width], slack = e->near[at % width];
        if (!(fabs(x - want) <= slack)) wrong = "O of the CPU is elsewhere";
        else if (!(fabs(y - want) <= slack)) wrong = "O is elsewhere";
        if (wrong) printf("      row and head %lld, element %lld of %d states: %.9g, the CPU's %.9g; defined %.9g +- %.3g\n", (long long)(at / width),
                          (long long)(at % width), e->count, y, x, want, slack);
    }
    for (int64_t i = 0; i < (int64_t)lse->bytes / 4 && !wrong; i++) {
        const float x = ((float *)lse->host)[i], y = ((float *)got_lse)[i];
        const expected *e = i < c->out.shape[0] * c->out.shape[1] ? &defined[i] : NULL;
        if (!e || e->count < 2) wrong = memcmp(&x, &y, sizeof x) ? "lse has other bits" : NULL;
        else if (!(fabs(y - e->lse) <= 0x1p-24 * (8 + 2 * e->count + 2 * fabs(e->lse)))) wrong = "lse is elsewhere";
    }
    free(got);
    free(got_lse);
    return wrong;
}

static void check_merge(void)
{
    static merge_call c;
    const int64_t rows = 1 + draw(20);
    const int heads = ONE_OF(1, 2, 8, 32), width = ONE_OF(1, 33, 64, 128, 512, 576);
    fv_error err = { 0 };
    char words[100];
    c = (merge_call){ .n = ONE_OF(1, 2, 3, 5, 8, 60, 200), .base2 = chance(50) };
    const char *type = wide_types[draw(3)];
    for (int s = 0; s < c.n; s++) {
        if (s < (int)(MAX_BUFFERS - 8) / 2) {
            c.o[s] = new_rows(s && chance(20) ? wide_types[draw(3)] : type, rows, heads, width, false, false, 1);
            buffer *b = make(4 * rows * heads, false);
            for (int64_t i = 0; i < rows * heads; i++) ((float *)b->host)[i] = chance(30) ? -INFINITY : (float)(20 * real());
            c.lse[s] = (fv_tensor){ .data = b->host, .dtype = "f32", .ndim = 2, .shape = { rows, heads }, .stride = { heads, 1 } };
        } else {
            c.o[s] = c.o[s % 5];
            c.lse[s] = c.lse[s % 5];
        }
    }
    c.out = new_rows(type, rows, heads, width, true, false, 1);
    buffer *o = &buffers[num_buffers - 1], *lse = make(4 * rows * heads, true);
    c.out_lse = (fv_tensor){ .data = lse->host, .dtype = "f32", .ndim = 2, .shape = { rows, heads }, .stride = { heads, 1 } };
    upload_all();
    snprintf(words, sizeof words, "%s, %d states, %lld rows of %d x %d", type, c.n, (long long)rows, heads, width);
    const char *wrong = "refused by the CPU: ";
    const int64_t shift = ((char *)c.out.data - o->host) * 8 / bits_of(type);
    define_all(&c);
    if (fv_merge(cpu, c.o, c.lse, c.n, c.base2, &c.out, &c.out_lse, NULL, &err) == FV_OK) {
        for (int s = 0; s < c.n; s++) {
            move(&c.o[s]);
            move(&c.lse[s]);
        }
        move(&c.out);
        move(&c.out_lse);
        wrong = call_merge(&c, &err) ? near(&c, o, lse, shift) : "refused";
        if (!wrong && c.n <= 50) {
            reset_outputs();
            wrong = replay((call){ call_merge, &c }, &err) ? near(&c, o, lse, shift) : "no graph";
        }
    }
    verdict("merge", wrong, words, &err);
    drop_all();
}

/* ---------------------------------------------------------------------------------------------------------------- copies */

typedef struct copy_call { fv_tensor k, v; fv_copy copies[400]; int n; } copy_call;

static bool call_copy(void *arg, fv_error *err)
{
    copy_call *c = arg;
    return fv_copy_pages(gpu, &c->k, &c->v, c->copies, c->n, stream, err) == FV_OK;
}

static void check_copies(void)
{
    static copy_call c;
    const int64_t pages = 2 + draw(chance(50) ? 6 : 300);
    const int size = ONE_OF(1, 3, 16), heads = ONE_OF(1, 2, 8);
    fv_error err = { 0 };
    char words[100];
    c = (copy_call){ .n = (int)draw(chance(50) ? 5 : 400) };
    const char *type = all_types[draw(7)];
    c.k = cache(type, pages, size, 0, heads, ONE_OF(2, 64, 128), chance(50));
    if (chance(70)) c.v = cache(all_types[draw(7)], pages, size, 0, heads, ONE_OF(2, 40, 128), chance(50));
    for (int i = 0; i < num_buffers; i++)
        for (size_t k = 0; k < buffers[i].bytes; k++) buffers[i].host[k] = (char)draw(256);
    for (int i = 0; i < c.n; i++) {
        c.copies[i] = (fv_copy){ (int32_t)draw((uint32_t)pages), (int32_t)draw((uint32_t)pages) };
        if (chance(3)) c.copies[i] = (fv_copy){ -1, -1 };
    }
    upload_all();
    snprintf(words, sizeof words, "%d copies of %lld pages of %d x %d x %lld %s", c.n, (long long)pages, size, heads, (long long)c.k.shape[3], type);
    const char *wrong = "refused by the CPU: ";
    if (fv_copy_pages(cpu, &c.k, &c.v, c.copies, c.n, NULL, &err) == FV_OK) {
        move(&c.k);
        move(&c.v);
        wrong = compare((call){ call_copy, &c }, c.n > 0, &err);
    }
    verdict("copy", wrong, words, &err);
    drop_all();
}

/* ------------------------------------------------------------------------------------------------------------ companions */

/* [rows, width]; hard: ties, zeros, NaN, infinities, tiny and huge values. */
static fv_tensor new_matrix(const char *type, int64_t rows, int width, bool output, bool hard)
{
    const fv__dtype dtype = fv__dtype_find(type);
    const int64_t stride = width + (chance(40) ? ONE_OF(1, 4, 8) : 0), shift = chance(20) ? 1 : 0;
    buffer *b = make((rows * stride + shift) * bits_of(type) / 8, output);
    for (int64_t i = 0; i < rows * stride + shift; i++) {
        double x = 4 * real();
        if (hard && chance(30)) x = (double)draw(4) / 16;
        if (hard && chance(20)) x = chance(30) ? NAN : chance(30) ? INFINITY : chance(50) ? -INFINITY : ldexp(1 + real() / 2, -(int)draw(150));
        fv__dtype_store(dtype, b->host, i, x);
    }
    return (fv_tensor){ .data = b->host + shift * bits_of(type) / 8, .dtype = type, .ndim = 2, .shape = { rows, width }, .stride = { stride, 1 } };
}

static fv_tensor vector(const char *type, int64_t n, bool output)
{
    buffer *b = make(n * 8, output);
    for (int64_t i = 0; i < n; i++) {
        if (!strcmp(type, "f32")) ((float *)b->host)[i] = (float)real();
        if (!strcmp(type, "i32")) ((int32_t *)b->host)[i] = (int32_t)draw(9) - 1;
        if (!strcmp(type, "i64")) ((int64_t *)b->host)[i] = (int64_t)draw(400) - 1;
    }
    return (fv_tensor){ .data = b->host, .dtype = type, .ndim = 1, .shape = { n }, .stride = { 1 } };
}

/* All outputs within so many roundings of their types; `plus` absolute. */
static const char *all_near(const fv_tensor *const *outputs, int n, double plus)
{
    for (int t = 0; t < n; t++) {
        const buffer *b = NULL;
        for (int i = 0; i < num_buffers; i++) {
            const CUdeviceptr first = buffers[i].device, at = (CUdeviceptr)(uintptr_t)outputs[t]->data;
            if (at >= first && at < first + buffers[i].bytes) b = &buffers[i];
        }
        if (!b) return "an output is nowhere";
        const fv__dtype type = fv__dtype_find(outputs[t]->dtype);
        const double rel = type == FV__DTYPE_f32 ? 4e-6 : type == FV__DTYPE_f16 ? 1e-3 : 8e-3;
        char *got = malloc(b->bytes);
        const char *wrong = NULL;
        MUST(fv__cuda_to_host(device, got, b->device, b->bytes, stream, ERR));
        MUST(fv__cuda_stream_sync(device, stream, ERR));
        for (int64_t i = 0; i < (int64_t)b->bytes * 8 / fv__dtypes[type].bits && !wrong; i++) {
            const double x = fv__dtype_load(type, b->host, i), y = fv__dtype_load(type, got, i);
            if (memcmp(&x, &y, sizeof x) && !(fabs(x - y) <= rel * fabs(x) + plus) && !(isnan(x) && isnan(y))) wrong = "elsewhere";
            if (wrong && verbose) printf("    element %lld: cpu %g, gpu %g\n", (long long)i, x, y);
        }
        free(got);
        if (wrong) return wrong;
    }
    return NULL;
}

typedef struct norm_call { fv_norm_desc d; bool centred; } norm_call;

static fv_status do_norm(fv_ctx *ctx, const norm_call *c, CUstream on, fv_error *err)
{
    return c->centred ? fv_layernorm(ctx, &c->d, on, err) : fv_rmsnorm(ctx, &c->d, on, err);
}

static void check_norm(void)
{
    const int64_t rows = 1 + draw(20);
    const int width = ONE_OF(1, 7, 64, 128, 1000, 1024, 1028, 4096, 5121);
    norm_call c = { .centred = chance(30) };
    const bool far = chance(40);                    /* squares, or sums, that f32 cannot hold; a mean far from 0 */
    const bool added = !far && !c.centred && chance(50), in_place = chance(50), heads = chance(40);
    const char *type = far ? "f32" : wide_types[draw(3)], *output = far ? "f32" : wide_types[draw(3)];
    fv_error err = { 0 };
    char words[120];
    c.d = (fv_norm_desc){ .eps = 1e-6, .plus_one = chance(30) };
    c.d.x = heads ? new_rows(type, rows, 3, width, false, false, 2) : new_matrix(type, rows, width, false, false);
    if (in_place) buffers[num_buffers - 1].output = true;
    c.d.y = in_place ? c.d.x : heads ? new_rows(output, rows, 3, width, true, false, 2) : new_matrix(output, rows, width, true, false);
    if (added) c.d.residual = heads ? new_rows(type, rows, 3, width, false, false, 2) : new_matrix(type, rows, width, false, false);
    if (added) buffers[num_buffers - 1].output = true;
    if (far) {
        const double by = chance(50) ? 1e19 : 1e36, off = c.centred && chance(50) ? 1e5 : 0;
        float *x = c.d.x.data;
        for (int64_t i = 0; i < rows * c.d.x.stride[0]; i++) x[i] = (float)(off ? off + x[i] : x[i] * by);
    }
    c.d.weight = vector("f32", width, false);
    if (c.centred && chance(60)) c.d.bias = vector("f32", width, false);
    upload_all();
    snprintf(words, sizeof words, "%s -> %s, %lld rows%s of %d%s%s%s", type, c.d.y.dtype, (long long)rows, heads ? " of 3" : "", width,
             c.centred ? ", centred" : "", added ? ", added" : far ? ", far from 1" : "", in_place ? ", in place" : "");
    const char *wrong = "refused by the CPU: ";
    if (do_norm(cpu, &c, NULL, &err) == FV_OK) {
        fv_tensor *const list[] = { &c.d.x, &c.d.y, &c.d.residual, &c.d.weight, &c.d.bias };
        for (int i = 0; i < FV__COUNT(list); i++) move(list[i]);
        const fv_tensor *const outputs[] = { &c.d.y, &c.d.residual };
        wrong = do_norm(gpu, &c, stream, &err) == FV_OK ? all_near(outputs, added ? 2 : 1, 1e-5) : "refused: ";
    }
    verdict("norm", wrong, words, &err);
    drop_all();
}

static void check_act(void)
{
    static const char *const names[] = { "silu", "gelu", "gelu_tanh" };
    const int64_t rows = 1 + draw(30);
    const int width = ONE_OF(1, 5, 64, 1000, 4096, 11008);
    const char *name = names[draw(3)], *type = wide_types[draw(3)];
    fv_error err = { 0 };
    char words[100];
    fv_tensor x = new_matrix(type, rows, 2 * width, false, chance(30)), y = new_matrix(wide_types[draw(3)], rows, width, true, false);
    upload_all();
    snprintf(words, sizeof words, "%s, %s -> %s, %lld rows of %d", name, type, y.dtype, (long long)rows, width);
    const char *wrong = "refused by the CPU: ";
    if (fv_act_and_mul(cpu, name, &x, &y, NULL, &err) == FV_OK) {
        move(&x);
        move(&y);
        const fv_tensor *const outputs[] = { &y };
        wrong = fv_act_and_mul(gpu, name, &x, &y, stream, &err) == FV_OK ? all_near(outputs, 1, 3e-6) : "refused: ";
    }
    verdict("act", wrong, words, &err);
    drop_all();
}

typedef struct filter_call { int what; fv_tensor x, y, array; fv_arg arg; } filter_call;

static bool do_filter(fv_ctx *ctx, filter_call *c, CUstream on, fv_error *err)
{
    if (c->arg.tensor) c->arg.tensor = &c->array;
    switch (c->what) {
    case 0: return fv_softmax(ctx, &c->x, &c->arg, &c->y, on, err) == FV_OK;
    case 1: return fv_top_k_renorm(ctx, &c->x, &c->arg, &c->y, on, err) == FV_OK;
    case 2: return fv_top_p_renorm(ctx, &c->x, &c->arg, &c->y, on, err) == FV_OK;
    default: return fv_top_k_mask(ctx, &c->x, &c->arg, &c->y, on, err) == FV_OK;
    }
}

static bool call_filter(void *arg, fv_error *err) { return do_filter(gpu, arg, stream, err); }

static void check_filter(void)
{
    static const char *const names[] = { "softmax", "top k renorm", "top p renorm", "top k mask" };
    const int64_t rows = 1 + draw(4);
    const int width = ONE_OF(1, 3, 100, 1024, 1025, 4100, 9000);
    const char *type = wide_types[chance(50) ? 2 : draw(3)];
    const bool in_place = chance(30);
    filter_call c = { .what = (int)draw(4) };
    fv_error err = { 0 };
    char words[100];
    c.x = new_matrix(type, rows, width, in_place, chance(60));
    c.y = in_place ? c.x : new_matrix(chance(70) ? type : wide_types[draw(3)], rows, width, true, false);
    c.array = vector(c.what % 2 ? (chance(50) ? "i32" : "i64") : "f32", rows, false);
    c.arg = (fv_arg){ .number = c.what % 2 ? 1 + draw((uint32_t)width + 1) : (double)draw(101) / 100, .tensor = chance(50) ? &c.array : NULL };
    upload_all();
    snprintf(words, sizeof words, "%s %s, %lld rows of %d%s, %g%s", names[c.what], type, (long long)rows, width, in_place ? ", in place" : "",
             c.arg.number, c.arg.tensor ? " (each)" : "");
    const char *wrong = "refused by the CPU: ";
    if (do_filter(cpu, &c, NULL, &err)) {
        move(&c.x);
        move(&c.y);
        move(&c.array);
        wrong = compare((call){ call_filter, &c }, true, &err);
    }
    verdict("filter", wrong, words, &err);
    drop_all();
}

typedef struct sample_call { fv_sample_desc d; fv_tensor arrays[3]; } sample_call;

static bool call_sample(void *arg, fv_error *err) { return fv_sample(gpu, &((sample_call *)arg)->d, stream, err) == FV_OK; }

static void check_sample(void)
{
    static const uint32_t all[] = { 0, FV_TOP_K, FV_TOP_P, FV_MIN_P, FV_TOP_K | FV_TOP_P, FV_TOP_K | FV_TOP_P | FV_TOP_K_FIRST,
                                    FV_TOP_K | FV_TOP_P | FV_MIN_P | FV_TOP_K_FIRST };
    const int64_t rows = 1 + draw(4), n = chance(40) ? 1 + draw(6) : rows;
    const int width = ONE_OF(1, 3, 100, 1024, 1025, 4100, 9000);
    static sample_call c;
    fv_error err = { 0 };
    char words[100];
    c = (sample_call){ .d = { .filters = all[draw(7)], .logits = chance(30), .seed = draw(1 << 30), .offset = (uint64_t)draw(1 << 30) << 20 } };
    c.d.x = new_matrix(wide_types[chance(50) ? 2 : draw(3)], rows, width, false, chance(60));
    fv_arg *const args[] = { &c.d.top_k, &c.d.top_p, &c.d.min_p };
    for (int i = 0; i < 3; i++) {
        c.arrays[i] = vector(i ? "f32" : "i64", n, false);
        *args[i] = (fv_arg){ .number = i ? (double)draw(101) / 100 : 1 + draw((uint32_t)width + 1), .tensor = chance(50) ? &c.arrays[i] : NULL };
    }
    if (n != rows) c.d.rows = vector("i32", n, false);
    if (chance(30)) c.d.seeds = vector("i64", chance(50) ? 1 : n, false);
    if (chance(30)) c.d.offsets = vector("i64", chance(50) ? 1 : n, false);
    c.d.ids = vector(chance(50) ? "i32" : "i64", n, true);
    buffer *valid = make(n, true);
    if (chance(50)) c.d.valid = (fv_tensor){ .data = valid->host, .dtype = "u8", .ndim = 1, .shape = { n }, .stride = { 1 } };
    upload_all();
    snprintf(words, sizeof words, "%lld of %lld %s rows of %d, filters %u%s", (long long)n, (long long)rows, c.d.x.dtype, width, c.d.filters,
             c.d.logits ? ", logits" : "");
    const char *wrong = "refused by the CPU: ";
    if (fv_sample(cpu, &c.d, NULL, &err) == FV_OK) {
        fv_tensor *const list[] = { &c.d.x, &c.d.rows, &c.d.seeds, &c.d.offsets, &c.d.ids, &c.d.valid, &c.arrays[0], &c.arrays[1], &c.arrays[2] };
        for (int i = 0; i < FV__COUNT(list); i++) move(list[i]);
        wrong = compare((call){ call_sample, &c }, true, &err);
    }
    verdict("sample", wrong, words, &err);
    drop_all();
}

static bool call_verify(void *arg, fv_error *err) { return fv_verify(gpu, arg, stream, err) == FV_OK; }

static void check_verify(void)
{
    const int64_t requests = 1 + draw(4), drafts = draw(4);
    const int width = ONE_OF(2, 50, 1025, 5000);
    fv_error err = { 0 };
    char words[100];
    fv_verify_desc d = { .seed = draw(1 << 30), .offset = draw(1 << 30) };
    const char *type = wide_types[chance(70) ? 2 : draw(3)];
    d.target_probs = new_rows(type, requests, (int)drafts + 1, width, false, chance(30), 1);
    if (drafts) d.draft_probs = new_rows(type, requests, (int)drafts, width, false, chance(30), 1);
    for (int i = 0; i < num_buffers && chance(70); i++)                 /* probabilities have no sign */
        for (int64_t k = 0; k < (int64_t)buffers[i].bytes * 8 / bits_of(type); k++)
            fv__dtype_store(fv__dtype_find(type), buffers[i].host, k, fabs(fv__dtype_load(fv__dtype_find(type), buffers[i].host, k)));
    fv_tensor ids = vector("i32", requests * drafts + 1, false), out = vector("i64", requests * (drafts + 1), true);
    for (int64_t i = 0; i < requests * drafts; i++) ((int32_t *)ids.data)[i] = (int32_t)draw((uint32_t)width + 1);
    d.draft_ids = (fv_tensor){ .data = ids.data, .dtype = "i32", .ndim = 2, .shape = { requests, drafts }, .stride = { drafts, 1 } };
    d.ids = (fv_tensor){ .data = out.data, .dtype = "i64", .ndim = 2, .shape = { requests, drafts + 1 }, .stride = { drafts + 1, 1 } };
    if (chance(60)) d.num_accepted = vector("i32", requests, true);
    if (chance(60)) d.num_emitted = vector("i64", requests, true);
    upload_all();
    snprintf(words, sizeof words, "%lld requests, %lld drafts, %d %s", (long long)requests, (long long)drafts, width, type);
    const char *wrong = "refused by the CPU: ";
    if (fv_verify(cpu, &d, NULL, &err) == FV_OK) {
        fv_tensor *const list[] = { &d.draft_probs, &d.draft_ids, &d.target_probs, &d.ids, &d.num_accepted, &d.num_emitted };
        for (int i = 0; i < FV__COUNT(list); i++) move(list[i]);
        wrong = compare((call){ call_verify, &d }, true, &err);
    }
    verdict("verify", wrong, words, &err);
    drop_all();
}

/* ------------------------------------------------------------------------------------------------------------------ main */

int main(int argc, char **argv)
{
    const char *name = "cuda:0";
    int count = 300, only = -1;
    uint64_t seed = 1;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--device") && i + 1 < argc) name = argv[++i];
        else if (!strcmp(argv[i], "--count") && i + 1 < argc) count = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--seed") && i + 1 < argc) seed = strtoull(argv[++i], NULL, 10);
        else if (!strcmp(argv[i], "--only") && i + 1 < argc) only = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--verbose")) verbose = true;
        else {
            printf("checkops [--device cuda:0] [--count N] [--seed N] [--only N] [--verbose]\n");
            return 2;
        }
    }
    fv_error err = { 0 };
    const fv_open_desc on_cpu = { .device = "cpu" }, on_gpu = { .device = name };
    if (fv_open(&on_gpu, &gpu, &err) != FV_OK) {
        printf("not run: %s\n", err.text);
        return 77;
    }
    MUST(fv_open(&on_cpu, &cpu, ERR));
    device = gpu->cuda->device;
    MUST(fv__cuda_stream_create(device, &stream, ERR));
    const fv_plan_desc limits = { .max_requests = 1 };
    MUST(fv_warm(gpu, NULL, 0, &limits, ERR));
    MUST(fv_ops_warm(gpu, ERR));
    for (int i = only >= 0 ? only : 0; i < (only >= 0 ? only + 1 : count); i++) {
        state = seed * 1000003u + (uint64_t)i * 0x9E3779B97F4A7C15u;
        draw(2);
        const int which = (int)draw(18);
        if (verbose) printf("round %d\n", i);
        if (which < 6) check_append(i % 100 == 7);
        else if (which < 8) check_rope();
        else if (which < 9) check_merge();
        else if (which < 10) check_copies();
        else if (which < 12) check_norm();
        else if (which < 13) check_act();
        else if (which < 15) check_filter();
        else if (which < 17) check_sample();
        else check_verify();
    }
    fv__cuda_stream_destroy(device, stream);
    fv_close(&cpu);
    fv_close(&gpu);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
