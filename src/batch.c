/* SPDX-License-Identifier: Apache-2.0 */
/* batch.c -- fv__batch_read: an fv_batch to requests and table places. O(requests), plus O(rows) where row positions are given.
 *
 * What is checked here is what a wrong caller gets wrong: counts, order, lengths against the pages that are there. Page ids are not read
 * here (except to find one that a given segment lists twice); kernels compare each with num_pages where they load it. */
#include "batch.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

typedef struct reader {
    const fv_batch *b;
    const fv_plan_desc *limits;
    const fv__batch_memory *m;
    fv__batch *out;
    fv__tables *tables;
    fv_error *err;
} reader;

static fv_status refuse_request(reader *r, const char *array, int64_t request, int64_t value, int64_t limit, const char *what)
{
    char field[48];
    snprintf(field, sizeof field, "%s[%lld]", array, (long long)request);
    return fv__fail_request(r->err, FV_E_INVALID, field, request, value, limit, "%s is %lld for request %lld; %s %lld", array, (long long)value,
                            (long long)request, what, (long long)limit);
}

static fv_status over_maximum(reader *r, const char *field, const char *maximum, int64_t value, int64_t limit)
{
    return fv__fail(r->err, FV_E_CAPACITY, field, value, limit, "%s is %lld; the plan was created with %s = %lld", field, (long long)value,
                    maximum, (long long)limit);
}

/* ---- rows ---- */

static fv_status read_rows(reader *r)
{
    const int64_t n = r->b->num_requests;
    r->out->decode = !fv__index_given(&r->b->rows);
    if (!r->out->decode) FV_TRY(fv__index_check(&r->b->rows, "batch.rows", n + 1, true, true, r->err));

    int64_t first = 0;
    if (r->out->decode) {               /* row i is request i's */
        if (n > r->limits->max_rows) return over_maximum(r, "batch.rows", "max_rows", r->limits->max_rows + 1, r->limits->max_rows);
        for (int64_t i = 0; i < n; i++) r->m->requests[i] = (fv__request){ .row_first = (int32_t)i, .num_rows = 1 };
        first = n;
    }
    for (int64_t i = 0; i < n && !r->out->decode; i++) {
        if (i == 0 && fv__index_at(&r->b->rows, 0) != 0)
            return refuse_request(r, "batch.rows", 0, fv__index_at(&r->b->rows, 0), 0, "row offsets begin at");
        const int64_t next = fv__index_at(&r->b->rows, i + 1);
        if (next < first) return refuse_request(r, "batch.rows", i + 1, next, first, "row offsets never fall; the one before is");
        if (next > r->limits->max_rows) return over_maximum(r, "batch.rows", "max_rows", next, r->limits->max_rows);
        r->m->requests[i] = (fv__request){ .row_first = (int32_t)first, .num_rows = (int32_t)(next - first) };
        first = next;
    }
    r->out->total_rows = first;
    return FV_OK;
}

/* ---- keys ---- */

static bool paged(const fv_batch *b) { return b->pages.page_size != 0; }

/* Arrays that lie dense in 32 bits are the usual ones: read_keys has a copy of the loop that knows. */
static bool is_dense(const fv_index *x) { return !fv__index_given(x) || (x->type == FV_INDEX_I32 && x->stride == 1); }

static inline int64_t entry(const fv_index *x, int64_t i, bool dense) { return dense ? ((const int32_t *)x->host)[i] : fv__index_at(x, i); }

/* Pages that request i owns in CSR form; its first entry in *place. */
static inline fv_status csr_pages(reader *r, int64_t i, int64_t *place, int64_t *pages, bool dense)
{
    const fv_pages *p = &r->b->pages;
    *place = entry(&p->indptr, i, dense);
    const int64_t end = entry(&p->indptr, i + 1, dense);
    if (*place < 0) return refuse_request(r, "batch.pages.indptr", i, *place, 0, "page offsets are at least");
    if (end < *place) return refuse_request(r, "batch.pages.indptr", i + 1, end, *place, "page offsets never fall; the one before is");
    if (end > p->ids.count) return refuse_request(r, "batch.pages.indptr", i + 1, end, p->ids.count, "the number of page ids given is");
    *pages = end - *place;
    return FV_OK;
}

static fv_status table_pages(reader *r, int64_t i, int64_t *place, int64_t *pages)
{
    const fv_pages *p = &r->b->pages;
    const int64_t row = fv__index_given(&p->table_rows) ? fv__index_at(&p->table_rows, i) : i;
    if (row < 0) return refuse_request(r, "batch.pages.table_rows", i, row, 0, "table rows are at least");
    if (row > (p->ids.count - p->table_width) / (p->table_stride > 0 ? p->table_stride : 1) || p->ids.count < p->table_width)
        return refuse_request(r, "batch.pages.table_rows", i, row, p->ids.count, "the row ends past the page ids given, which are");
    *place = row * p->table_stride;
    *pages = p->table_width;
    return FV_OK;
}

static inline fv_status last_page_length(reader *r, int64_t i, int64_t pages, int64_t *length, bool dense)
{
    const int64_t last = entry(&r->b->last_page_lengths, i, dense);
    const int32_t size = r->b->pages.page_size;
    const int64_t low = pages > 0 ? 1 : 0;
    const int64_t high = pages > 0 ? size : 0;
    if (last < low) return refuse_request(r, "batch.last_page_lengths", i, last, low, "the fill of a request's last page is at least");
    if (last > high) return refuse_request(r, "batch.last_page_lengths", i, last, high, "the fill of a request's last page is at most");
    *length = pages > 0 ? (pages - 1) * size + last : 0;
    return FV_OK;
}

static fv_status over_pages(reader *r, int64_t i, int64_t length, int64_t pages)
{
    const int64_t room = pages * r->b->pages.page_size;
    char field[48];
    snprintf(field, sizeof field, "batch.lengths[%lld]", (long long)i);
    return fv__fail_request(r->err, FV_E_INVALID, field, i, length, room,
                            "request %lld has %lld keys, but its %lld pages of %d hold only %lld", (long long)i, (long long)length,
                            (long long)pages, r->b->pages.page_size, (long long)room);
}

static inline fv_status paged_length(reader *r, int64_t i, int64_t *place, int64_t *length, bool dense)
{
    int64_t pages = 0;
    const bool csr = fv__index_given(&r->b->pages.indptr);
    FV_TRY(csr ? csr_pages(r, i, place, &pages, dense) : table_pages(r, i, place, &pages));
    if (fv__index_given(&r->b->last_page_lengths)) return last_page_length(r, i, pages, length, dense);
    *length = entry(&r->b->lengths, i, dense);
    return *length <= pages * r->b->pages.page_size ? FV_OK : over_pages(r, i, *length, pages);
}

static fv_status ragged_length(reader *r, int64_t i, int64_t *place, int64_t *length)
{
    *place = fv__index_at(&r->b->kv_indptr, i);
    const int64_t end = fv__index_at(&r->b->kv_indptr, i + 1);
    if (*place < 0) return refuse_request(r, "batch.kv_indptr", i, *place, 0, "token offsets are at least");
    if (end < *place) return refuse_request(r, "batch.kv_indptr", i + 1, end, *place, "token offsets never fall; the one before is");
    *length = fv__index_given(&r->b->lengths) ? fv__index_at(&r->b->lengths, i) : end - *place;
    if (*length > end - *place)
        return refuse_request(r, "batch.lengths", i, *length, end - *place, "its token offsets leave room for");
    r->tables->num_tokens = fv__max64(r->tables->num_tokens, *place + *length);
    return FV_OK;
}

static fv_status segment_length(reader *r, int64_t i, int64_t *place, int64_t *length)
{
    *place = 0;
    *length = fv__index_given(&r->b->lengths) ? fv__index_at(&r->b->lengths, i) : 0;
    return FV_OK;
}

static inline fv_status read_lengths(reader *r, bool dense_pages)
{
    const int64_t n = r->b->num_requests;
    int64_t total = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t place = 0, length = 0;
        if (dense_pages)          FV_TRY(paged_length(r, i, &place, &length, true));
        else if (r->b->segments)  FV_TRY(segment_length(r, i, &place, &length));
        else if (r->tables->paged) FV_TRY(paged_length(r, i, &place, &length, false));
        else                      FV_TRY(ragged_length(r, i, &place, &length));
        if (length < 0) return refuse_request(r, "batch.lengths", i, length, 0, "lengths are at least");
        if (length >= FV__NO_BOUND) return refuse_request(r, "batch.lengths", i, length, FV__NO_BOUND - 1, "lengths are at most");
        total += length;
        r->m->tables[i] = place;
        r->m->requests[i].num_keys = (int32_t)length;
    }
    r->out->total_keys = total;
    return FV_OK;
}

static fv_status read_keys(reader *r)
{
    const fv_batch *b = r->b;
    const bool dense = !b->segments && r->tables->paged && fv__index_given(&b->pages.indptr) && is_dense(&b->pages.indptr) && is_dense(&b->lengths) &&
                       is_dense(&b->last_page_lengths);
    if (dense) FV_TRY(read_lengths(r, true));
    else FV_TRY(read_lengths(r, false));
    if (!r->b->segments && r->out->total_keys > r->limits->max_kv_tokens)
        return over_maximum(r, "batch.lengths", "max_kv_tokens", r->out->total_keys, r->limits->max_kv_tokens);
    return FV_OK;
}

/* ---- which arrays must be there ---- */

static fv_status check_page_arrays(reader *r)
{
    const fv_pages *p = &r->b->pages;
    const int64_t n = r->b->num_requests;
    if (p->page_size < 0) return fv__fail(r->err, FV_E_INVALID, "batch.pages.page_size", p->page_size, 1, "batch.pages.page_size is %d; at least 1", p->page_size);
    if (p->num_pages < 0 || p->num_pages > INT32_MAX)
        return fv__fail(r->err, FV_E_INVALID, "batch.pages.num_pages", p->num_pages, INT32_MAX, "batch.pages.num_pages is %lld; 0 to %d",
                        (long long)p->num_pages, INT32_MAX);
    FV_TRY(fv__check_reserved(p->reserved, FV__COUNT(p->reserved), "batch.pages.reserved", r->err));
    FV_TRY(fv__index_check(&p->ids, "batch.pages.ids", p->ids.count, false, r->m->host_ids, r->err));
    if (fv__index_given(&p->v_ids)) {
        FV_TRY(fv__index_check(&p->v_ids, "batch.pages.v_ids", p->ids.count, true, r->m->host_ids, r->err));
        if (p->v_ids.type != p->ids.type || p->v_ids.stride != p->ids.stride)
            return fv__fail(r->err, FV_E_INVALID, "batch.pages.v_ids", p->v_ids.stride, p->ids.stride,
                            "batch.pages.v_ids must have the type and the stride of batch.pages.ids");
    }
    if (fv__index_given(&r->b->kv_indptr))
        return fv__fail(r->err, FV_E_INVALID, "batch.kv_indptr", 0, 0, "batch.kv_indptr is for ragged keys; with pages it must be absent");
    r->tables->entries = p->ids.count;
    if (r->b->segments) return FV_OK;

    if (fv__index_given(&p->indptr)) {
        FV_TRY(fv__index_check(&p->indptr, "batch.pages.indptr", n + 1, true, true, r->err));
        if (fv__index_given(&p->table_rows))
            return fv__fail(r->err, FV_E_INVALID, "batch.pages.table_rows", 0, 0, "batch.pages.table_rows goes with a 2-D table, not with indptr");
        if (n > 0 && fv__index_at(&p->indptr, n) - fv__index_at(&p->indptr, 0) > r->limits->max_pages)
            return over_maximum(r, "batch.pages.indptr", "max_pages", fv__index_at(&p->indptr, n), r->limits->max_pages);
        return FV_OK;
    }
    if (p->table_width < 0 || p->table_stride < p->table_width)
        return fv__fail(r->err, FV_E_INVALID, "batch.pages.table_stride", p->table_stride, p->table_width,
                        "a page table of width %lld needs table_stride >= its width; given %lld", (long long)p->table_width,
                        (long long)p->table_stride);
    if (fv__index_given(&p->table_rows))
        FV_TRY(fv__index_check(&p->table_rows, "batch.pages.table_rows", n, false, true, r->err));
    return FV_OK;
}

static fv_status check_key_arrays(reader *r)
{
    const fv_batch *b = r->b;
    const int64_t n = b->num_requests;
    r->tables->paged = paged(b);
    if (r->tables->paged) FV_TRY(check_page_arrays(r));
    else if (fv__index_given(&b->pages.indptr) || fv__index_given(&b->pages.ids))
        return fv__fail(r->err, FV_E_INVALID, "batch.pages.page_size", 0, 1, "batch.pages.page_size is 0, but %s given; at least 1",
                        fv__index_given(&b->pages.indptr) ? "batch.pages.indptr is" : "batch.pages.ids are");
    else if (!b->segments) FV_TRY(fv__index_check(&b->kv_indptr, "batch.kv_indptr", n + 1, true, true, r->err));

    if (fv__index_given(&b->last_page_lengths)) {
        if (fv__index_given(&b->lengths) || !r->tables->paged || !fv__index_given(&b->pages.indptr) || b->segments)
            return fv__fail(r->err, FV_E_INVALID, "batch.last_page_lengths", 0, 0,
                            "batch.last_page_lengths goes with CSR pages and instead of batch.lengths");
        return fv__index_check(&b->last_page_lengths, "batch.last_page_lengths", n, true, true, r->err);
    }
    if (fv__index_given(&b->lengths)) return fv__index_check(&b->lengths, "batch.lengths", n, true, true, r->err);
    if (r->tables->paged && !(b->segments && fv__index_given(&b->row_positions)))
        return fv__fail(r->err, FV_E_INVALID, "batch.lengths", 0, n, "batch.lengths is missing; it has an entry for each of the %lld requests",
                        (long long)n);
    return FV_OK;
}

/* ---- positions and masks ---- */

static fv_status read_positions(reader *r)
{
    const fv_batch *b = r->b;
    if (fv__index_given(&b->first_positions)) {
        FV_TRY(fv__index_check(&b->first_positions, "batch.first_positions", b->num_requests, true, true, r->err));
        for (int64_t i = 0; i < b->num_requests; i++) {
            const int64_t p = fv__index_at(&b->first_positions, i);
            if (p < 0 || p >= FV__NO_BOUND)
                return refuse_request(r, "batch.first_positions", i, p, p < 0 ? 0 : FV__NO_BOUND - 1, "positions lie between 0 and 2^30; the limit is");
            r->m->requests[i].first_position = (int32_t)p;
        }
    }
    if (!fv__index_given(&b->row_positions)) return FV_OK;
    FV_TRY(fv__index_check(&b->row_positions, "batch.row_positions", r->out->total_rows, false, true, r->err));
    for (int64_t i = 0; i < b->num_requests; i++) {
        const fv__request *q = &r->m->requests[i];
        int64_t low = INT32_MAX, high = INT32_MIN;
        for (int64_t row = q->row_first; row < q->row_first + q->num_rows; row++) {
            const int64_t p = fv__index_at(&b->row_positions, row);
            low = fv__min64(low, p);
            high = fv__max64(high, p);
            if (p <= -FV__NO_BOUND || p >= FV__NO_BOUND)
                return refuse_request(r, "batch.row_positions", i, p, FV__NO_BOUND - 1, "positions lie within +-2^30; the limit is");
        }
        r->m->min_position[i] = (int32_t)low;
        r->m->max_position[i] = (int32_t)high;
    }
    r->out->min_position = r->m->min_position;
    r->out->max_position = r->m->max_position;
    return FV_OK;
}

static void place_bits(reader *r)
{
    int64_t at = 0;
    for (int64_t i = 0; i < r->b->num_requests; i++) {
        const fv__request *q = &r->m->requests[i];
        r->m->bits_offsets[i] = at;
        at = fv__round_up(at + (int64_t)q->num_rows * q->num_keys, 8);
    }
    r->m->bits_offsets[r->b->num_requests] = at;
}

/* ---- a page that a given segment lists twice would count twice in its softmax ---- */

static fv_status find_twice(reader *r, const fv_segment *s, int64_t index)
{
    const int64_t mask = r->m->page_set_size - 1;
    memset(r->m->page_set, 0xFF, (size_t)r->m->page_set_size * sizeof(uint32_t));
    for (int64_t i = 0; i < s->num_pages; i++) {
        const int64_t id = fv__index_at(&r->b->pages.ids, s->first_page + i);
        if (id < 0 || id >= r->b->pages.num_pages) continue;                  /* the kernel reports it */
        int64_t at = (int64_t)(((uint64_t)id * 0x9E3779B97F4A7C15u) >> 32) & mask;
        while (r->m->page_set[at] != UINT32_MAX && r->m->page_set[at] != (uint32_t)id) at = (at + 1) & mask;
        if (r->m->page_set[at] == (uint32_t)id) {
            char field[48];
            snprintf(field, sizeof field, "batch.segments[%lld]", (long long)index);
            return fv__fail(r->err, FV_E_INVALID, field, id, i, "segment %lld lists page %lld twice (again as its page %lld)",
                            (long long)index, (long long)id, (long long)i);
        }
        r->m->page_set[at] = (uint32_t)id;
    }
    return FV_OK;
}

static fv_status check_segment_pages(reader *r)
{
    if (!r->tables->paged) {
        for (int64_t i = 0; i < r->b->num_segments; i++) {
            const fv_segment *s = &r->b->segments[i];
            if (s->first_page < 0 || s->num_keys < 0) continue;                     /* segment.c refuses it, and what is too large */
            r->tables->num_tokens = fv__max64(r->tables->num_tokens, s->num_keys + fv__min64(s->first_page, INT64_MAX - s->num_keys));
        }
        return FV_OK;
    }
    int64_t total = 0;
    for (int64_t i = 0; i < r->b->num_segments; i++) {
        const fv_segment *s = &r->b->segments[i];
        if (s->first_page < 0 || s->num_pages < 0 || s->first_page > r->b->pages.ids.count - s->num_pages)
            return fv__fail(r->err, FV_E_INVALID, "batch.segments", s->first_page, r->b->pages.ids.count,
                            "segment %lld has %lld pages from entry %lld on; there are %lld page ids", (long long)i, (long long)s->num_pages,
                            (long long)s->first_page, (long long)r->b->pages.ids.count);
        total += s->num_pages;
        if (total > r->limits->max_pages) return over_maximum(r, "batch.segments.num_pages", "max_pages", total, r->limits->max_pages);
        if (r->b->pages.ids.host) FV_TRY(find_twice(r, s, i));
    }
    return FV_OK;
}

fv_status fv__batch_read(const fv_batch *given, const fv_plan_desc *limits, bool has_bits, const fv__batch_memory *memory, fv__batch *out,
                         fv__tables *tables, fv_error *err)
{
    reader r = { given, limits, memory, out, tables, err };
    *out = (fv__batch){ .num_requests = given->num_requests, .given = given, .requests = memory->requests, .tables = memory->tables };
    *tables = (fv__tables){ 0 };

    FV_TRY(fv__check_reserved(given->reserved, FV__COUNT(given->reserved), "batch.reserved", err));
    FV_TRY(fv__check_reserved0(given->reserved0, "batch.reserved0", err));
    FV_TRY(fv__check_reserved0(given->pages.reserved0, "batch.pages.reserved0", err));
    if (given->num_requests < 0)
        return fv__fail(err, FV_E_INVALID, "batch.num_requests", given->num_requests, 0, "batch.num_requests is %lld; at least 0",
                        (long long)given->num_requests);
    if (given->num_requests > limits->max_requests)
        return over_maximum(&r, "batch.num_requests", "max_requests", given->num_requests, limits->max_requests);
    if (given->num_segments < 0 || (given->num_segments > 0 && !given->segments))
        return fv__fail(err, FV_E_INVALID, "batch.num_segments", given->num_segments, 0, "batch.num_segments is %lld, but batch.segments is %s",
                        (long long)given->num_segments, given->segments ? "given" : "NULL");
    if (given->segments && given->num_segments > limits->max_segments)
        return over_maximum(&r, "batch.num_segments", "max_segments", given->num_segments, limits->max_segments);

    FV_TRY(read_rows(&r));
    FV_TRY(check_key_arrays(&r));
    FV_TRY(read_keys(&r));
    FV_TRY(read_positions(&r));
    if (given->segments) FV_TRY(check_segment_pages(&r));
    if (has_bits) place_bits(&r);
    return FV_OK;
}
