/* SPDX-License-Identifier: Apache-2.0 */
/* workload.c -- see workload.h. */
#include "workload.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const element_type *cache_type(const workload_desc *d)
{
    return element_find(d->kv_dtype ? d->kv_dtype : "bf16");
}

static int32_t dim_v(const workload_desc *d) { return d->dim_v ? d->dim_v : d->dim; }

/* Bytes of a row of K or V; int4: its codes. */
static int64_t code_bytes(const workload_desc *d, int64_t dim)
{
    return cache_type(d)->bytes ? dim * cache_type(d)->bytes : dim / 2;
}

/* Those of its scales and zeros: a pair of f16 for 64 elements. */
enum { GROUP = 64, PAIR_BYTES = 4 };
static int64_t pair_bytes(const workload_desc *d, int64_t dim)
{
    return cache_type(d)->bytes ? 0 : dim / GROUP * PAIR_BYTES;
}

static int64_t row_bytes(const workload_desc *d, int64_t dim)
{
    return code_bytes(d, dim) + pair_bytes(d, dim);
}

/* Bytes of K and V that a token and KV head has. */
static int64_t token_bytes(const workload_desc *d)
{
    return row_bytes(d, d->dim) + (d->latent ? 0 : row_bytes(d, dim_v(d)));
}

/* ---- the batch ---- */

static void count(workload *w)
{
    const workload_desc *d = &w->desc;
    const int64_t share = d->share ? d->share : d->num_requests;
    int64_t keys = d->prefix * div_up(d->num_requests, share), seen = 0;
    for (int64_t i = 0; i < d->num_requests; i++) {
        const int64_t rows = d->rows[i],
                      length = d->window ? min_i64(d->lengths[i], d->window + rows)
                                         : d->lengths[i];
        w->total_rows += rows;
        w->total_keys += d->lengths[i];
        seen += length;
        keys += length - d->prefix;
        w->flops +=
            2.0 * (d->dim + dim_v(d)) * d->q_heads *
            ((double)rows * (double)(length - rows) + (double)rows * (double)(rows + 1) / 2);
        if (d->page_size)
            w->total_pages += div_up(d->lengths[i], d->page_size);
    }
    const double token = (double)d->kv_heads * (double)token_bytes(d);
    w->bytes = token * (double)keys;
    w->asked_bytes = token * (double)seen;
}

static void shuffle(int32_t *x, int64_t n, uint64_t seed)
{
    for (int64_t i = n - 1; i > 0; i--) {
        const int64_t j = (int64_t)(mix64(seed, (uint64_t)i) % (uint64_t)(i + 1));
        const int32_t t = x[i];
        x[i] = x[j];
        x[j] = t;
    }
}

/* Page ids in the order of use are a shuffled 0..num_pages-1; of each group that shares a prefix,
 * requests after the first begin with the first one's. */
static void lay_pages(workload *w)
{
    const workload_desc *d = &w->desc;
    const int64_t shared = d->prefix / d->page_size,
                  share = d->share ? d->share : d->num_requests,
                  groups = div_up(d->num_requests, share);
    w->num_pages = max_i64(w->total_pages - shared * (d->num_requests - groups),
                           d->num_requests * div_up(d->pool_keys, d->page_size));
    int32_t *order = need((size_t)w->num_pages, sizeof *order);
    for (int64_t i = 0; i < w->num_pages; i++)
        order[i] = (int32_t)i;
    shuffle(order, w->num_pages, 7);
    int64_t next = shared * groups, entry = 0;
    for (int64_t r = 0; r < d->num_requests; r++) {
        const int64_t pages = div_up(d->lengths[r], d->page_size);
        for (int64_t p = 0; p < pages; p++)
            w->page_ids[entry++] = p < shared ? order[r / share * shared + p] : order[next++];
        w->page_indptr[r + 1] = (int32_t)entry;
    }
    free(order);
}

static void make_batch(workload *w)
{
    const workload_desc *d = &w->desc;
    const size_t n = (size_t)d->num_requests;
    count(w);
    w->row_indptr = need(n + 1, sizeof(int32_t));
    w->lengths = need(n, sizeof(int32_t));
    w->page_indptr = need(n + 1, sizeof(int32_t));
    w->page_ids = need((size_t)w->total_pages, sizeof(int32_t));
    memcpy(w->lengths, d->lengths, n * sizeof(int32_t));
    for (size_t i = 0; i < n; i++)
        w->row_indptr[i + 1] = w->row_indptr[i] + d->rows[i];
    if (d->page_size) {
        lay_pages(w);
        return;
    }
    for (size_t i = 0; i < n; i++)          /* ragged: token offsets */
        w->page_indptr[i + 1] = w->page_indptr[i] + d->lengths[i];
}

/* ---- tensors ---- */

/* A block of random numbers, again and again: filling a gigabyte with fresh ones takes longer than
 * measuring it. */
static void fill(const element_type *type, const memory *m, int64_t bytes, uint64_t seed)
{
    const int64_t block = min_i64(bytes, 8 << 20);
    if (type->store)
        element_fill(type, m->data, block / type->bytes, 1, seed);
    for (int64_t i = 0; !type->store && i < block; i++) {
        const uint64_t r = mix64(seed, (uint64_t)i);    /* 8-bit floats: below 2, no NaN */
        m->data[i] = (char)(!type->bytes ? r : strcmp(type->name, "int8") ? r & 0xbf : r % 255 - 127);
    }
    memory_put(m, 0, block);
    for (int64_t done = block; done < bytes; done += block) {
        const int64_t n = min_i64(block, bytes - done);
        if (m->where)
            gpu_copy(m->where, m->device + done, m->device, n);
        else
            memcpy(m->data + done, m->data, (size_t)n);
    }
    gpu_wait(m->where);
}

/* Scales of 1/4 and zeros of 7.5, behind the codes. */
static void fill_pairs(const workload_desc *d, int64_t tokens, int64_t dim, char *cache)
{
    static const uint16_t pair[2] = { 0x3400, 0x4780 };
    char *at = cache + tokens * d->kv_heads * code_bytes(d, dim);
    for (int64_t n = tokens * d->kv_heads * pair_bytes(d, dim); n > 0; n -= PAIR_BYTES, at += PAIR_BYTES)
        memcpy(at, pair, PAIR_BYTES);
}

/* What one copy's last run has left in the GPU's cache is gone before that copy's next turn: the
 * others are six times the cache. At most as many as fit into two thirds of what is free. */
static int choose_copies(const workload *w)
{
    enum { MOST = 256 };
    const int64_t one = max_i64(w->k_bytes + w->v_bytes, 1);
    if (!w->gpu)
        return 1;
    const int64_t wanted = max_i64(2, div_up(6 * gpu_cache_bytes(w->gpu), one) + 1),
                  room = gpu_free_bytes(w->gpu) / 3 * 2 / one;
    return (int)max_i64(1, min_i64(min_i64(wanted, room), MOST));
}

/* Where fv_rope puts the keys of pages, and which positions they have. */
static bool make_turned(workload *w, int64_t tokens)
{
    const int32_t page = w->desc.page_size;
    const int64_t bytes = tokens * (int64_t)sizeof(int32_t);
    if (!memory_allocate(w->gpu, w->k_bytes, &w->turned) ||
        !memory_allocate(w->gpu, bytes, &w->positions))
        return false;
    int32_t *position = (int32_t *)(void *)w->positions.data;
    for (int64_t r = 0; r < w->desc.num_requests; r++)
        for (int32_t e = w->page_indptr[r]; e < w->page_indptr[r + 1]; e++)
            for (int32_t i = 0; i < page; i++)
                position[(int64_t)w->page_ids[e] * page + i] = (e - w->page_indptr[r]) * page + i;
    memory_put(&w->positions, 0, bytes);
    return true;
}

static bool make_tensors(workload *w)
{
    const workload_desc *d = &w->desc;
    const element_type *type = cache_type(d), *bf16 = element_find("bf16");
    const int64_t tokens = d->page_size ? w->num_pages * d->page_size : w->total_keys,
                  heads = w->total_rows * d->q_heads * bf16->bytes;
    w->k_bytes = div_up(tokens * d->kv_heads * row_bytes(d, d->dim), 256) * 256;
    w->v_bytes = d->latent ? 0
                           : div_up(tokens * d->kv_heads * row_bytes(d, dim_v(d)), 256) * 256;
    w->copies = choose_copies(w);
    if (!memory_allocate(w->gpu, heads * d->dim, &w->q) ||
        !memory_allocate(w->gpu, heads * dim_v(d), &w->o) ||
        !memory_allocate(w->gpu, w->k_bytes * w->copies, &w->k) ||
        (w->v_bytes && !memory_allocate(w->gpu, w->v_bytes * w->copies, &w->v)))
        return false;
    fill(bf16, &w->q, heads * d->dim, 1);
    fill(type, &w->k, w->k_bytes * w->copies, 2);
    if (w->v_bytes)
        fill(type, &w->v, w->v_bytes * w->copies, 3);
    if (d->rope_before && !make_turned(w, tokens))
        return false;
    if (!type->bytes) {                         /* the CPU's */
        fill_pairs(d, tokens, d->dim, w->k.data);
        fill_pairs(d, tokens, dim_v(d), w->v.data);
    }
    return true;
}

/* Page ids where kernels read them. */
static bool put_ids(workload *w)
{
    const int64_t bytes = w->total_pages * (int64_t)sizeof *w->page_ids;
    if (!w->gpu || !bytes)
        return true;
    if (!memory_allocate(w->gpu, bytes, &w->ids))
        return false;
    memcpy(w->ids.data, w->page_ids, (size_t)bytes);
    memory_put(&w->ids, 0, bytes);
    return true;
}

int64_t workload_bytes(const workload_desc *d)
{
    workload w = { .desc = *d };
    count(&w);
    const int64_t pool = max_i64(w.total_keys, d->num_requests * d->pool_keys);
    const double bytes = d->prefix ? w.bytes
                                   : (double)pool * d->kv_heads * (double)token_bytes(d);
    return (int64_t)bytes + w.total_rows * d->q_heads * d->dim * 4;
}

/* ---- plan ---- */

static bool make_plan(fv_ctx *ctx, workload *w)
{
    const workload_desc *d = &w->desc;
    const fv_arg left = { .name = "left", .number = d->window },
                 rotary = { .name = "rotary_dim", .number = d->dim };
    fv_variant_use uses[3] = { { .name = "causal" } };
    int num_uses = 1;
    if (d->window)
        uses[num_uses++] = (fv_variant_use){ .name = "window", .args = &left, .num_args = 1 };
    if (d->rope)
        uses[num_uses++] = (fv_variant_use){ .name = "rope", .args = &rotary, .num_args = 1 };
    const char *dtype = cache_type(d)->name, *scale = cache_type(d)->bytes == 1 ? "tensor" : NULL;
    const fv_problem problem = { .q = "bf16", .k = dtype, .v = d->latent ? NULL : dtype,
                                 .o = "bf16", .num_q_heads = d->q_heads,
                                 .num_kv_heads = d->kv_heads, .dim_qk = d->dim, .dim_v = d->dim_v,
                                 .v_in_k = d->latent, .variants = uses, .num_variants = num_uses,
                                 .k_scale = scale, .v_scale = d->latent ? NULL : scale,
                                 .page_order = d->tiled ? "tiles" : NULL };
    const fv_plan_desc limits = { .max_requests = d->num_requests, .max_rows = w->total_rows,
                                  .max_kv_tokens = w->total_keys, .max_pages = w->total_pages,
                                  .invariant = d->invariant,
                                  .sharing = d->sharing ? FV_SHARING_FIND : FV_SHARING_OFF };
    fv_error err = { 0 };
    if (fv_plan_create(ctx, &problem, &limits, &w->plan, &err) == FV_OK &&
        workload_update(w, &err) == FV_OK)
        return true;
    cli_failed("cannot plan", &err);
    return false;
}

bool workload_open(fv_ctx *ctx, gpu *where, const workload_desc *desc, workload *out)
{
    *out = (workload){ .ctx = ctx, .desc = *desc, .gpu = where, .copies = 1 };
    make_batch(out);
    return (desc->no_tensors || make_tensors(out)) &&
           ((desc->no_tensors && !desc->ids_on_device) || put_ids(out)) && make_plan(ctx, out);
}

void workload_close(workload *w)
{
    gpu_wait(w->gpu);
    gpu_graph_free(w->gpu, w->graph);
    fv_plan_destroy(&w->plan);
    memory_release(&w->q);
    memory_release(&w->k);
    memory_release(&w->v);
    memory_release(&w->o);
    memory_release(&w->ids);
    memory_release(&w->turned);
    memory_release(&w->positions);
    free(w->row_indptr);
    free(w->lengths);
    free(w->page_indptr);
    free(w->page_ids);
    *w = (workload){ 0 };
}

/* On a GPU the page ids lie there too, as a serving engine keeps them. */
fv_status workload_update(workload *w, fv_error *err)
{
    const workload_desc *d = &w->desc;
    const int64_t n = d->num_requests;
    fv_batch batch = { .num_requests = n, .rows = fv_i32(w->row_indptr, n + 1),
                       .lengths = fv_i32(w->lengths, n) };
    if (d->page_size)
        batch.pages = (fv_pages){ .page_size = d->page_size, .num_pages = w->num_pages,
                                  .indptr = fv_i32(w->page_indptr, n + 1),
                                  .ids = fv_i32(w->page_ids, w->total_pages) };
    else
        batch.kv_indptr = fv_i32(w->page_indptr, n + 1);
    if (w->gpu)
        batch.pages.ids.device = w->ids.device;
    return fv_plan_update(w->plan, NULL, &batch, gpu_stream(w->gpu), err);
}

/* ---- runs ---- */

static fv_tensor rows_of(char *at, int64_t rows, int64_t heads, int64_t dim)
{
    return (fv_tensor){
        .data = at, .ndim = 3, .shape = { rows, heads, dim }, .stride = { heads * dim, dim, 1 }
    };
}

static fv_tensor cache_of(const workload *w, char *at, int64_t dim)
{
    const workload_desc *d = &w->desc;
    const int64_t token = d->kv_heads * dim;
    if (!d->page_size)
        return rows_of(at, w->total_keys, d->kv_heads, dim);
    return (fv_tensor){ .data = at, .ndim = 4,
                        .shape = { w->num_pages, d->page_size, d->kv_heads, dim },
                        .stride = { d->page_size * token, token, dim, 1 } };
}

/* The pairs of a cache at `at`, which lie behind its codes. */
static fv_tensor pairs_of(const workload *w, char *at, int64_t dim)
{
    const workload_desc *d = &w->desc;
    const int64_t tokens = d->page_size ? w->num_pages * d->page_size : w->total_keys;
    fv_tensor t = cache_of(w, at + tokens * d->kv_heads * code_bytes(d, dim), dim / GROUP * 2);
    t.dtype = "f16";
    return t;
}

fv_status workload_turn(workload *w, int copy, fv_error *err)
{
    const workload_desc *d = &w->desc;
    const int64_t tokens = w->num_pages * d->page_size;
    const fv_rope_desc desc = { .rotary_dim = d->dim };
    fv_tensor from = rows_of(w->k.device + copy * w->k_bytes, tokens, d->kv_heads, d->dim),
              to = rows_of(w->turned.device, tokens, d->kv_heads, d->dim);
    from.dtype = to.dtype = cache_type(d)->name;
    fv_index positions = fv_i32(w->gpu ? NULL : (int32_t *)(void *)w->positions.data, tokens);
    positions.device = w->gpu ? w->positions.device : NULL;
    return fv_rope(w->ctx, &desc, &from, positions, &to, gpu_stream(w->gpu), err);
}

fv_status workload_run(workload *w, int copy, fv_error *err)
{
    const workload_desc *d = &w->desc;
    char *keys = w->k.device + copy * w->k_bytes;
    if (d->rope_before) {
        const fv_status status = workload_turn(w, copy, err);
        if (status != FV_OK)
            return status;
        keys = w->turned.device;
    }
    const bool pairs = !cache_type(d)->bytes;
    const fv_tensor k_pairs = pairs_of(w, w->k.device, d->dim), v_pairs = pairs_of(w, w->v.device, dim_v(d));
    const fv_arg numbers[] = { { .name = "k_scale", .number = WORKLOAD_SCALE },
                               { .name = "v_scale", .number = WORKLOAD_SCALE } };
    const fv_arg tensors[] = { { .name = "k_block_scale", .tensor = &k_pairs },
                               { .name = "v_block_scale", .tensor = &v_pairs } };
    fv_tensors t = { .q = rows_of(w->q.device, w->total_rows, d->q_heads, d->dim),
                     .k = cache_of(w, keys, d->dim),
                     .o = rows_of(w->o.device, w->total_rows, d->q_heads, dim_v(d)),
                     .args = pairs ? tensors : numbers,
                     .num_args = cache_type(d)->bytes > 1  ? 0
                                 : d->latent               ? 1
                                                           : 2 };
    if (!d->latent)
        t.v = cache_of(w, w->v.device + copy * w->v_bytes, dim_v(d));
    return fv_run(w->plan, &t, gpu_stream(w->gpu), err);
}

/* At least so many runs that what a graph's launch costs does not count. */
static fv_status make_graph(workload *w, fv_error *err)
{
    enum { LEAST = 4 };
    fv_status status = w->desc.rope_before ? workload_turn(w, 0, err) : FV_OK;  /* loads the kernel, which a capture may not */
    w->runs = w->copies * (int)div_up(LEAST, w->copies);
    gpu_capture(w->gpu);
    for (int i = 0; i < w->runs && status == FV_OK; i++)
        status = workload_run(w, i % w->copies, err);
    w->graph = gpu_captured(w->gpu);
    if (status == FV_OK && !w->graph) {
        snprintf(err->text, sizeof err->text, "runs could not be captured in a graph");
        status = err->status = FV_E_DEVICE;
    }
    return status;
}

fv_status workload_time(workload *w, double *seconds, fv_error *err)
{
    const double start = cli_now();
    fv_status status = FV_OK;
    if (!w->gpu) {
        status = workload_run(w, 0, err);
        *seconds = cli_now() - start;
        return status;
    }
    if (!w->graph)
        status = make_graph(w, err);
    *seconds = status == FV_OK ? gpu_time(w->gpu, w->graph) / w->runs : 0;
    return status;
}
