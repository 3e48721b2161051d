/* SPDX-License-Identifier: Apache-2.0 */
/* append.c -- fv_append: where each new row goes (its token slot) and what it turns by, then one
 * pass that rotates, quantises and scatters: over the context's threads, or on the GPU
 * (cuda/ops.c). There, arrays that the caller has on the device are read by the kernel, which then
 * finds the slots; with host arrays alone, slots are made here as on the CPU.
 *
 * Slots come from the requests' page tables, read as a batch is, or from the caller. What is wrong
 * with the call is refused before a byte is written; what is wrong in data (a page id or a slot
 * outside of the pool) goes to the error word, and the row is left out. */
#include "batch.h"
#include "cuda/ops.h"
#include "ops.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct appender {
    fv_ctx *ctx;
    const fv_append_desc *d;
    fv_error *err;
    fv__append_job job;
    int64_t rows;
    int64_t tokens;                     /* that the cache must have; ragged only */
    bool found_there;                   /* some array lies on the device: kernels find the slots */

    /* one block of memory */
    void *memory;
    size_t bytes;
    int64_t *slots, *v_slots;           /* [rows] */
    int32_t *positions;                 /* [rows] */
    fv__request *requests;              /* [num_requests] */
    int64_t *tables;
} appender;

static const char *const kinds[] = { "none", "tensor", "head", "token_head" };

/* ------------------------------------------------------------------------ which rows, and where */

/* The batch reader speaks of "batch.*"; the caller knows the same fields as "desc.*". */
static void rename_fields(fv_error *err)
{
    static const char from[] = "batch.", to[] = "desc.";
    char *texts[2] = { err->field, err->text };
    for (int i = 0; i < 2; i++)
        for (char *at = texts[i]; (at = strstr(at, from)); at += sizeof to - 1) {
            memcpy(at, to, sizeof to - 1);
            memmove(at + sizeof to - 1, at + sizeof from - 1, strlen(at + sizeof from - 1) + 1);
        }
}

static fv_batch batch_of(const fv_append_desc *d)
{
    return (fv_batch){ .num_requests = d->num_requests,
                       .rows = d->rows,
                       .lengths = d->lengths,
                       .pages = d->pages,
                       .kv_indptr = d->kv_indptr,
                       .first_positions = d->first_positions };
}

/* Every index array that says where rows go. */
enum { NUM_ARRAYS = 10 };

static void list_arrays(const fv_append_desc *d, const fv_index *list[NUM_ARRAYS])
{
    const fv_index *const all[NUM_ARRAYS] = {
        &d->rows,      &d->lengths,          &d->first_positions, &d->kv_indptr, &d->pages.indptr,
        &d->pages.ids, &d->pages.table_rows, &d->pages.v_ids,     &d->slots,     &d->row_positions,
    };
    memcpy(list, all, sizeof all);
}

static bool any_on_device(const appender *a)
{
    const fv_index *list[NUM_ARRAYS];
    list_arrays(a->d, list);
    for (int i = 0; i < NUM_ARRAYS; i++)
        if (fv__index_given(list[i]) && fv__ops_on_device(a->ctx, list[i])) return true;
    return false;
}

/* Can the requests be read on the host? (Page ids need not be.) */
static bool all_on_host(const appender *a)
{
    const fv_index *list[NUM_ARRAYS];
    list_arrays(a->d, list);
    for (int i = 0; i < NUM_ARRAYS; i++)
        if (fv__index_given(list[i]) && !list[i]->host && list[i] != &a->d->pages.ids &&
            list[i] != &a->d->pages.v_ids && list[i] != &a->d->row_positions)
            return false;
    return true;
}

/* Rows that the requests have, so that memory can be had before the tables are read. Offsets that
 * only the device knows: as many as there are new rows; the kernel leaves out what is past the last
 * of them. */
static fv_status count_rows(appender *a)
{
    const fv_append_desc *d = a->d;
    if (d->num_requests < 0 || d->num_requests > INT32_MAX / 2)
        return fv__fail(a->err, FV_E_INVALID, "desc.num_requests", d->num_requests, INT32_MAX / 2,
                        "desc.num_requests is %lld", (long long)d->num_requests);
    if (fv__index_given(&d->slots)) {
        FV_TRY(fv__index_check(&d->slots, "desc.slots", d->slots.count, true,
                               !fv__ops_on_device(a->ctx, &d->slots), a->err));
        a->rows = d->slots.count;
    } else if (fv__index_given(&d->rows)) {
        FV_TRY(fv__index_check(&d->rows, "desc.rows", d->num_requests + 1, true,
                               !fv__ops_on_device(a->ctx, &d->rows), a->err));
        a->rows = d->rows.host ? fv__index_at(&d->rows, d->num_requests) : d->new_k.shape[0];
    } else {
        a->rows = d->num_requests;
    }
    if (a->rows < 0 || a->rows > INT32_MAX / 2)
        return fv__fail(a->err, FV_E_INVALID, "desc.rows", a->rows, INT32_MAX / 2,
                        "there are %lld rows; 0 to %d", (long long)a->rows, INT32_MAX / 2);
    return FV_OK;
}

static fv_status allocate(appender *a)
{
    const size_t rows = (size_t)a->rows, requests = (size_t)a->d->num_requests;
    a->bytes = rows * (2 * sizeof *a->slots + sizeof *a->positions) +
               requests * (sizeof *a->tables + sizeof *a->requests) + 64;
    a->memory = fv__ctx_alloc(a->ctx, a->bytes);
    if (!a->memory)
        return fv__fail(a->err, FV_E_NO_MEMORY, "desc.rows", a->rows, 0, "no memory for %lld rows",
                        (long long)a->rows);
    a->slots = a->memory;
    a->v_slots = a->slots + rows;
    a->tables = a->v_slots + rows;
    a->requests = (fv__request *)(a->tables + requests);
    a->positions = (int32_t *)(a->requests + requests);
    return FV_OK;
}

/* Slot of key `key` of the request whose page list begins at entry `table`; -1 with a fault when
 * the id is none of the pool. */
static int64_t slot_in_page(appender *a, const fv_index *ids, int64_t request, int64_t table,
                            int64_t key)
{
    const fv_pages *p = &a->d->pages;
    const int64_t entry = key / p->page_size, id = fv__index_at(ids, table + entry);
    if (id >= 0 && id < p->num_pages) return id * p->page_size + key % p->page_size;
    fv__fault_add(&a->ctx->faults, FV_FAULT_PAGE_ID, request, entry, id, 1);
    return -1;
}

static void place_request(appender *a, int64_t i)
{
    const fv__request *r = &a->requests[i];
    const fv_pages *p = &a->d->pages;
    for (int32_t n = 0; n < r->num_rows; n++) {
        const int64_t row = r->row_first + n, key = r->num_keys - r->num_rows + n;
        a->positions[row] = (int32_t)(r->first_position + key);
        a->slots[row] =
            p->page_size ? slot_in_page(a, &p->ids, i, a->tables[i], key) : a->tables[i] + key;
        if (fv__index_given(&p->v_ids))
            a->v_slots[row] = slot_in_page(a, &p->v_ids, i, a->tables[i], key);
    }
}

static fv_status check_request(appender *a, int64_t i)
{
    const fv__request *r = &a->requests[i];
    char field[48];
    snprintf(field, sizeof field, "desc.lengths[%lld]", (long long)i);
    if (r->num_rows > r->num_keys)
        return fv__fail_request(
            a->err, FV_E_INVALID, field, i, r->num_keys, r->num_rows,
            "request %lld has %d keys, its %d new rows included: lengths count the new rows",
            (long long)i, r->num_keys, r->num_rows);
    if ((int64_t)r->first_position + r->num_keys > FV__NO_BOUND)
        return fv__fail_request(a->err, FV_E_INVALID, field, i, r->num_keys,
                                FV__NO_BOUND - r->first_position,
                                "request %lld reaches position %lld; positions lie below 2^30",
                                (long long)i, (long long)r->first_position + r->num_keys - 1);
    return FV_OK;
}

/* The ids are read on the host, unless they lie on the device. */
static fv_status check_ids(appender *a)
{
    const fv_pages *p = &a->d->pages;
    if (!p->page_size) return FV_OK;
    FV_TRY(fv__index_check(&p->ids, "desc.pages.ids", p->ids.count, true,
                           !fv__ops_on_device(a->ctx, &p->ids), a->err));
    if (!fv__index_given(&p->v_ids)) return FV_OK;
    return fv__index_check(&p->v_ids, "desc.pages.v_ids", p->ids.count, true,
                           !fv__ops_on_device(a->ctx, &p->v_ids), a->err);
}

/* Arrays of which the host sees some: all that can be checked is that they are there. */
static fv_status check_arrays(appender *a)
{
    const fv_append_desc *d = a->d;
    const fv_pages *p = &d->pages;
    const int64_t n = d->num_requests;
    const bool csr = fv__index_given(&p->indptr);
    const struct {
        const fv_index *x;
        const char *field;
        int64_t count;
        bool needed;
    } list[] = {
        { &d->lengths, "desc.lengths", n, p->page_size != 0 },
        { &d->first_positions, "desc.first_positions", n, false },
        { &d->kv_indptr, "desc.kv_indptr", n + 1, p->page_size == 0 },
        { &p->indptr, "desc.pages.indptr", n + 1, false },
        { &p->table_rows, "desc.pages.table_rows", n, false },
    };
    FV_TRY(check_ids(a));
    for (int i = 0; i < FV__COUNT(list); i++)
        if (list[i].needed || fv__index_given(list[i].x))
            FV_TRY(fv__index_check(list[i].x, list[i].field, list[i].count, false,
                                   !fv__ops_on_device(a->ctx, list[i].x), a->err));
    if (p->page_size && !csr && (p->table_width < 0 || p->table_stride < p->table_width))
        return fv__fail(a->err, FV_E_INVALID, "desc.pages.table_stride", p->table_stride,
                        p->table_width,
                        "a page table of width %lld needs table_stride >= its width; given %lld",
                        (long long)p->table_width, (long long)p->table_stride);
    return FV_OK;
}

static fv_status read_requests(appender *a)
{
    FV_TRY(check_ids(a));
    const fv_batch batch = batch_of(a->d);
    const fv_plan_desc limits = { .max_requests = INT32_MAX,
                                  .max_rows = INT32_MAX,
                                  .max_kv_tokens = INT64_MAX,
                                  .max_pages = INT64_MAX };
    const fv__batch_memory memory = { .requests = a->requests,
                                      .tables = a->tables,
                                      .host_ids = false };
    fv__batch read;
    fv__tables tables;
    const fv_status status =
        fv__batch_read(&batch, &limits, false, &memory, &read, &tables, a->err);
    if (status != FV_OK && a->err) rename_fields(a->err);
    FV_TRY(status);
    for (int64_t i = 0; i < a->d->num_requests; i++) FV_TRY(check_request(a, i));
    a->tokens = tables.num_tokens;
    return FV_OK;
}

static fv_status check_pool(appender *a)
{
    const fv_pages *p = &a->d->pages;
    if (p->page_size < 0 || p->num_pages < 0 || p->num_pages > INT32_MAX)
        return fv__fail(a->err, FV_E_INVALID, "desc.pages.num_pages", p->num_pages, INT32_MAX,
                        "desc.pages has %lld pages of %d tokens", (long long)p->num_pages,
                        p->page_size);
    return FV_OK;
}

/* After everything has been checked: the slots themselves. Faults in tables are told here. */
static void place_rows(appender *a)
{
    if (!fv__index_given(&a->d->slots)) {
        for (int64_t i = 0; i < a->d->num_requests; i++) place_request(a, i);
    } else {
        for (int64_t row = 0; row < a->rows; row++) a->slots[row] = fv__index_at(&a->d->slots, row);
    }
    if (!fv__index_given(&a->d->row_positions)) return;
    for (int64_t row = 0; row < a->rows; row++)
        a->positions[row] = (int32_t)fv__index_at(&a->d->row_positions, row);
}

/* -------------------------------------------------------------------------------------- tensors */

/* New rows: as many as there are, or more. */
static fv_status new_rows(appender *a, const fv_tensor *t, const char *field, int64_t heads,
                          fv__view *out)
{
    FV_TRY(fv__ops_rows(t, field, heads, FV__ANY, out, a->err));
    if (t->shape[0] < a->rows)
        return fv__fail(a->err, FV_E_INVALID, field, t->shape[0], a->rows,
                        "%s has %lld rows; there are %lld new ones", field, (long long)t->shape[0],
                        (long long)a->rows);
    return FV_OK;
}

/* [pages, page_size, kv heads, width], or [tokens, kv heads, width]. */
static fv_status cache_view(appender *a, const fv_tensor *t, const char *field, fv__dtype dtype,
                            int64_t width, fv__view *out)
{
    const fv_pages *p = &a->d->pages;
    const int64_t heads = a->job.num_kv_heads;
    if (!p->page_size) {
        FV_TRY(
            fv__tensor_view(t, field, dtype, 3, (int64_t[]){ FV__ANY, heads, width }, out, a->err));
        FV_TRY(fv__tensor_written(t, field, a->err));
        a->job.num_slots = fv__min64(a->job.num_slots, out->extent);
        if (out->extent >= a->tokens) return FV_OK;
        return fv__fail(a->err, FV_E_INVALID, field, out->extent, a->tokens,
                        "%s has %lld tokens; the requests reach token %lld", field,
                        (long long)out->extent, (long long)a->tokens);
    }
    FV_TRY(fv__tensor_view(t, field, dtype, 4, (int64_t[]){ FV__ANY, p->page_size, heads, width },
                           out, a->err));
    FV_TRY(fv__tensor_written(t, field, a->err));
    if (out->extent >= p->num_pages) return FV_OK;
    return fv__fail(a->err, FV_E_INVALID, field, out->extent, p->num_pages,
                    "%s has %lld pages; desc.pages.num_pages is %lld", field,
                    (long long)out->extent, (long long)p->num_pages);
}

static fv_status refuse_given(appender *a, const fv_tensor *t, const char *field, const char *why)
{
    if (!t->data) return FV_OK;
    return fv__fail(a->err, FV_E_INVALID, field, 1, 0, "%s is given, but %s", field, why);
}

/* One of K, tail and V: the new rows and the cache. */
static fv_status pair_views(appender *a, const fv_tensor *fresh, const char *fresh_field,
                            fv__view *from, const fv_tensor *cache, const char *field, fv__view *to)
{
    fv__dtype dtype;
    FV_TRY(new_rows(a, fresh, fresh_field, a->job.num_kv_heads, from));
    FV_TRY(fv__ops_dtype(cache, field, true, &dtype, a->err));
    if (dtype == FV__DTYPE_int4 && a->ctx->cuda)
        return fv__fail(a->err, FV_E_UNSUPPORTED, field, 4, 8,
                        "%s is int4, which GPUs do not write; they write fp4_e2m1 and 8-bit types",
                        field);
    return cache_view(a, cache, field, dtype, from->width, to);
}

static fv_status block_scales(appender *a, const fv_tensor *t, const char *field,
                              const fv__view *cache, fv__view *out)
{
    fv__dtype type;
    int32_t width;
    if (!cache->data || !fv__dtype_has_blocks(cache->dtype))
        return refuse_given(a, t, field, "only fp4_e2m1 and int4 have block scales");
    const int group = cache->dtype == FV__DTYPE_int4 ? 32 : 16;
    if (cache->width % group)
        return fv__fail(a->err, FV_E_INVALID, field, cache->width, group,
                        "%s: %s rows are %d wide; a multiple of %d is needed", field,
                        fv__dtypes[cache->dtype].name, cache->width, group);
    FV_TRY(fv__block_scale_shape(t, field, cache->dtype, cache->width, &type, &width, a->err));
    return cache_view(a, t, field, type, width, out);
}

static fv_status key_views(appender *a)
{
    const fv_append_desc *d = a->d;
    fv__append_job *job = &a->job;
    if (d->new_k.ndim == 3)
        job->num_kv_heads = (int32_t)fv__min64(fv__max64(d->new_k.shape[1], 0), INT32_MAX);
    FV_TRY(pair_views(a, &d->new_k, "desc.new_k", &job->new_k, &d->k, "desc.k", &job->k));
    if (!d->new_k_tail.data) {
        FV_TRY(refuse_given(a, &d->k_tail, "desc.k_tail", "desc.new_k_tail is absent"));
    } else {
        FV_TRY(pair_views(a, &d->new_k_tail, "desc.new_k_tail", &job->new_k_tail, &d->k_tail,
                          "desc.k_tail", &job->k_tail));
        if (job->k_tail.dtype != job->k.dtype || fv__dtype_has_blocks(job->k.dtype))
            return fv__fail(a->err, FV_E_INVALID, "desc.k_tail", 0, 0,
                            "desc.k_tail is %s and desc.k %s; they must be one type, of 8 bits or more",
                            d->k_tail.dtype, d->k.dtype);
    }
    return block_scales(a, &d->k_block_scale, "desc.k_block_scale", &job->k, &job->k_block_scale);
}

static fv_status value_views(appender *a)
{
    const fv_append_desc *d = a->d;
    if (d->new_v.data)
        FV_TRY(pair_views(a, &d->new_v, "desc.new_v", &a->job.new_v, &d->v, "desc.v", &a->job.v));
    else
        FV_TRY(refuse_given(a, &d->v, "desc.v", "desc.new_v is absent"));
    return block_scales(a, &d->v_block_scale, "desc.v_block_scale", &a->job.v,
                        &a->job.v_block_scale);
}

static fv_status read_order(appender *a)
{
    const fv_append_desc *d = a->d;
    const fv__append_job *job = &a->job;
    FV_TRY(fv__page_order_read(d->page_order, "desc.page_order", &a->job.tiled, a->err));
    if (!job->tiled) return FV_OK;
    if (a->ctx->cuda || job->k_tail.data)
        return fv__fail(a->err, FV_E_UNSUPPORTED, "desc.page_order", 1, 0,
                        "desc.page_order is \"tiles\"; %s",
                        a->ctx->cuda ? "GPUs write rows" : "K with a tail lies in rows");
    FV_TRY(fv__page_order_types("desc.page_order", job->k.dtype, job->k.width, job->v.dtype,
                                job->v.data ? job->v.width : 0, a->err));
    return fv__page_order_size("desc.pages.page_size", d->pages.page_size, a->err);
}

/* --------------------------------------------------------------------------------------- scales */

static fv_status check_scale(appender *a, const char *field, double x)
{
    const float f = (float)x;
    if (isfinite(f) && f > 0) return FV_OK;
    return fv__fail(a->err, FV_E_INVALID, field, isfinite(x) && fabs(x) < 1e18 ? (int64_t)x : 0, 0,
                    "%s is %g; a scale must be finite and positive as a 32-bit float", field, x);
}

static fv_status number_scale(appender *a, const fv_arg *arg, const char *field, fv__scale *out)
{
    fv__view view;
    double x = arg->number;
    if (arg->tensor) {
        FV_TRY(
            fv__tensor_view(arg->tensor, field, FV__DTYPE_f32, 1, (int64_t[]){ 1 }, &view, a->err));
        if (a->ctx->cuda) {
            out->data = (const float *)view.data;
            return FV_OK;
        }
        x = *(const float *)view.data;
    }
    out->number = (float)x;
    return check_scale(a, field, x);
}

/* [kv heads], any stride: seen as [kv heads, 1]. */
static fv_status head_scale(appender *a, const fv_arg *arg, const char *field, fv__scale *out)
{
    fv__view view;
    fv_tensor wide = *arg->tensor;
    if (wide.ndim != 1)
        return fv__fail(a->err, FV_E_INVALID, field, wide.ndim, 1,
                        "%s has %d axes; expected 1 (kv heads)", field, wide.ndim);
    wide.ndim = 2;
    wide.shape[1] = wide.stride[1] = 1;
    FV_TRY(fv__tensor_view(&wide, field, FV__DTYPE_f32, 2, (int64_t[]){ a->job.num_kv_heads, 1 },
                           &view, a->err));
    out->data = (const float *)view.data;
    out->stride[0] = view.stride[0];
    if (a->ctx->cuda) return FV_OK;
    for (int h = 0; h < a->job.num_kv_heads; h++)
        FV_TRY(check_scale(a, field, out->data[h * out->stride[0]]));
    return FV_OK;
}

/* The cache's axes without the last; written. */
static fv_status token_scale(appender *a, const fv_arg *arg, const char *field,
                             const fv__view *cache, fv__scale *out)
{
    const int axes = a->d->pages.page_size ? 3 : 2;
    fv__view view;
    fv_tensor wide = *arg->tensor;
    if (fv__dtypes[cache->dtype].bits > 8)
        return fv__fail(
            a->err, FV_E_UNSUPPORTED, field, fv__dtypes[cache->dtype].bits, 8,
            "%s: scales per token and head are written for types of 8 bits and fewer, not for %s",
            field, fv__dtypes[cache->dtype].name);
    if (wide.ndim != axes)
        return fv__fail(a->err, FV_E_INVALID, field, wide.ndim, axes,
                        "%s has %d axes; expected %d, the cache's without the last", field,
                        wide.ndim, axes);
    wide.ndim = axes + 1;
    wide.shape[axes] = wide.stride[axes] = 1;
    FV_TRY(cache_view(a, &wide, field, FV__DTYPE_f32, 1, &view));
    out->data = (const float *)view.data;
    memcpy(out->stride, view.stride, sizeof out->stride);
    return FV_OK;
}

static fv_status read_kind(appender *a, const char *name, const char *field, fv__scale_kind *out)
{
    *out = FV__SCALE_NONE;
    for (int i = 0; name && i < FV__COUNT(kinds); i++)
        if (!strcmp(name, kinds[i])) {
            *out = (fv__scale_kind)i;
            return FV_OK;
        }
    if (!name) return FV_OK;
    return fv__fail(a->err, FV_E_INVALID, field, 0, 0,
                    "%s is \"%.24s\"; it must be none, tensor, head or token_head", field, name);
}

static fv_status read_scale(appender *a, const char *kind, const char *kind_field,
                            const fv_arg *arg, const char *field, const fv__view *cache,
                            fv__scale *out)
{
    *out = (fv__scale){ .number = 1 };
    FV_TRY(read_kind(a, kind, kind_field, &out->kind));
    if (arg->reserved)
        return fv__fail(a->err, FV_E_INVALID, field, (int64_t)arg->reserved, 0,
                        "the reserved word of %s must be 0", field);
    if (out->kind == FV__SCALE_NONE || !cache->data) {
        if (arg->number == 0 && !arg->tensor && (cache->data || out->kind == FV__SCALE_NONE))
            return FV_OK;
        return fv__fail(a->err, FV_E_INVALID, field, 0, 0, "%s is given, but %s", field,
                        cache->data ? "its kind is none" : "there is nothing that it could scale");
    }
    if (arg->tensor && arg->number != 0)
        return fv__fail(a->err, FV_E_INVALID, field, 2, 1,
                        "%s is given as a tensor and as the number %g", field, arg->number);
    if (out->kind == FV__SCALE_TENSOR) return number_scale(a, arg, field, out);
    if (!arg->tensor)
        return fv__fail(a->err, FV_E_INVALID, field, 0, 0, "%s must be a tensor: its kind is %s",
                        field, kind);
    return out->kind == FV__SCALE_HEAD ? head_scale(a, arg, field, out)
                                       : token_scale(a, arg, field, cache, out);
}

/* ------------------------------------------------------------------------------------- rotation */

static fv_status read_rope(appender *a)
{
    const fv_append_desc *d = a->d;
    fv__append_job *job = &a->job;
    const bool tail = job->new_k_tail.data != NULL, turns = d->rope && d->rope->rotary_dim;
    FV_TRY(fv__rotary_init(d->rope, "desc.rope", tail ? job->new_k_tail.width : job->new_k.width,
                           &job->rotary, a->err));
    if (fv__index_given(&d->row_positions)) {
        if (!d->rope)
            return fv__fail(a->err, FV_E_INVALID, "desc.row_positions", 0, 0,
                            "desc.row_positions is given, but desc.rope is NULL: nothing turns");
        return fv__positions_check(a->ctx, &d->row_positions, "desc.row_positions", a->rows,
                                   a->err);
    }
    if (turns && fv__index_given(&d->slots))
        return fv__fail(
            a->err, FV_E_INVALID, "desc.row_positions", 0, a->rows,
            "desc.row_positions is missing: with slots, rope has no other positions to turn by");
    return FV_OK;
}

static fv_status read_q(appender *a)
{
    const fv_append_desc *d = a->d;
    fv__append_job *job = &a->job;
    if (!d->q.data) return refuse_given(a, &d->q_out, "desc.q_out", "desc.q is absent");
    if (!d->rope)
        return fv__fail(a->err, FV_E_INVALID, "desc.q", 1, 0,
                        "desc.q is given, but desc.rope is NULL: nothing turns");
    FV_TRY(new_rows(a, &d->q, "desc.q", FV__ANY, &job->q));
    FV_TRY(new_rows(a, &d->q_out, "desc.q_out", d->q.shape[1], &job->q_out));
    job->num_q_heads = (int32_t)d->q.shape[1];
    if (job->q_out.width != job->q.width)
        return fv__fail(a->err, FV_E_INVALID, "desc.q_out", job->q_out.width, job->q.width,
                        "desc.q_out is %d elements wide and desc.q %d", job->q_out.width,
                        job->q.width);
    if (job->rotary.dim > job->q.width)
        return fv__fail(a->err, FV_E_INVALID, "desc.q", job->q.width, job->rotary.dim,
                        "desc.q is %d elements wide; desc.rope turns %d", job->q.width,
                        job->rotary.dim);
    return FV_OK;
}

/* ---------------------------------------------------------------------------------------------- */

static fv_status check_all(appender *a)
{
    const fv_append_desc *d = a->d;
    a->job.num_slots = d->pages.page_size ? d->pages.num_pages * d->pages.page_size : INT64_MAX;
    FV_TRY(key_views(a));
    FV_TRY(value_views(a));
    FV_TRY(read_order(a));
    FV_TRY(read_scale(a, d->k_scale_kind, "desc.k_scale_kind", &d->k_scale, "desc.k_scale",
                      &a->job.k, &a->job.k_scale));
    FV_TRY(read_scale(a, d->v_scale_kind, "desc.v_scale_kind", &d->v_scale, "desc.v_scale",
                      &a->job.v, &a->job.v_scale));
    FV_TRY(read_rope(a));
    return read_q(a);
}

static void append_rows(const void *argument, int64_t first, int64_t last)
{
    const appender *a = argument;
    a->ctx->isa->append_rows(&a->job, first, last);
}

static int64_t row_bytes(const fv__append_job *job)
{
    int64_t elements =
        (int64_t)job->num_kv_heads * (job->new_k.width + job->new_k_tail.width + job->new_v.width);
    if (job->q.data) elements += (int64_t)job->num_q_heads * job->q.width;
    return elements * 4;
}

static fv_status append(appender *a, fv_stream stream)
{
    const bool slots = fv__index_given(&a->d->slots);
    a->found_there = any_on_device(a);
    if (!slots && all_on_host(a)) FV_TRY(read_requests(a));
    else FV_TRY(check_pool(a));
    if (!slots && !all_on_host(a)) FV_TRY(check_arrays(a));
    if (a->rows == 0) return FV_OK;
    FV_TRY(check_all(a));
    if (!a->found_there) place_rows(a);
    a->job.slots = a->slots;
    a->job.v_slots = !slots && fv__index_given(&a->d->pages.v_ids) ? a->v_slots : NULL;
    a->job.positions = a->positions;
    a->job.page_size = a->d->pages.page_size;
    a->job.checked = a->d->checked;
    a->job.faults = &a->ctx->faults;
    if (a->ctx->cuda) {
        const fv__cuda_append call = { &a->job, a->d, a->rows, !a->found_there };
        return fv__cuda_append_rows(a->ctx, &call, stream, a->err);
    }
    fv__ops_split(a->ctx, append_rows, a, a->rows, row_bytes(&a->job));
    return FV_OK;
}

fv_status fv_append(fv_ctx *ctx, const fv_append_desc *desc, fv_stream stream, fv_error *err)
{
    if (!ctx) return fv__fail(err, FV_E_INVALID, "ctx", 0, 0, "ctx is NULL");
    if (!desc) return fv__fail(err, FV_E_INVALID, "desc", 0, 0, "desc is NULL");
    FV_TRY(fv__check_reserved(desc->reserved, FV__COUNT(desc->reserved), "desc.reserved", err));
    appender a = { .ctx = ctx, .d = desc, .err = err };
    FV_TRY(count_rows(&a));
    FV_TRY(allocate(&a));
    const fv_status status = append(&a, stream);
    fv__ctx_free(ctx, a.memory, a.bytes);
    return status;
}
