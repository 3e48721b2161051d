/* SPDX-License-Identifier: Apache-2.0 */
/* serve.h -- the tensors and plans of the layers that are served, and one step of all of them.
 *
 * Nouns
 *   plane    one of the inputs of a step (q, q's tail, k, k's tail, v): a source of random rows
 *            made once, and the rows of the step gathered from it
 *   step     which requests compute which rows
 *
 * A token's row is chosen by what the token is (trace_token), so equal prefixes have equal keys and
 * values, and a request's numbers do not depend on how it was scheduled. Layer l sees each row from
 * element LAYER_SHIFT * l on, so layers differ and one gather serves all. Gathering stands for the
 * projections of a real model and is not timed.
 */
#ifndef SERVE_H
#define SERVE_H

#include "element.h"
#include "geometry.h"
#include "memory.h"
#include "scheduler.h"

#define LAYER_SHIFT 8                   /* elements: keeps 16-byte alignment for 16-bit types */
#define CACHE_AMPLITUDE 5.0             /* no key or value is larger; what an 8-bit cache's scale is
                                           made for */

typedef struct serve_config {
    geometry geometry;
    int layers;
    const element_type *type;           /* of q, o, and of new keys and values */
    const element_type *cache_type;
    int64_t page_size, num_pages, max_requests, token_budget;
    int64_t max_length;                 /* keys of one request */
    int64_t max_kv_tokens;              /* keys of all running requests together, shared ones
                                           counted for each */
    bool sharing, invariant;
    uint64_t seed;
} serve_config;

/* Lists of a step that kernels read, on a GPU. */
enum { LIST_ROWS, LIST_LENGTHS, LIST_TABLE_ROWS, LIST_PAGES, NUM_LISTS };

enum { PLANE_Q, PLANE_Q_TAIL, PLANE_K, PLANE_K_TAIL, PLANE_V, NUM_PLANES };

typedef struct serve_plane {
    int64_t heads, dim, stride;         /* dim 0: absent. Elements from row to row */
    memory source, step;
} serve_plane;

typedef struct serve_step {
    int64_t num_requests, num_rows;
    int32_t *rows, *lengths, *sequences;        /* [max_requests + 1], [max_requests],
                                                   [max_requests] */
    const live_request **requests;      /* [max_requests] */
    uint64_t *tokens;                   /* [token_budget] what each row's token is */
    int64_t *positions;                 /* [token_budget] */
    int64_t *row_request;               /* [token_budget] place in requests */
    fv_pages pages;
    fv_index row_list, length_list;     /* rows and lengths as the engine takes them */
} serve_step;

typedef struct serve {
    serve_config config;
    fv_ctx *ctx;
    gpu *gpu;                           /* NULL: the CPU */
    fv_plan *plans[GEOMETRY_MAX_KINDS];
    float *frequencies[GEOMETRY_MAX_KINDS];     /* as the library makes them */
    memory *k, *k_tail, *v;             /* [layers] */
    serve_plane planes[NUM_PLANES];
    memory lists[NUM_LISTS];
    memory q_turned, o, lse;            /* q_turned: of q, or of its tail where there is one */
    int64_t source_rows;
    double scale;                       /* of q.k */
    double cache_scale;                 /* stored keys and values times this are the values; 1 for
                                           types of 16 bits and more */
    serve_step step;
    int64_t *page_seen, tag;            /* [num_pages] for counting pages once */
} serve;

/* What a step did. Seconds: of the plan by the host's clock; of append and attention by the clock
 * of what computes them, on a GPU in a graph of all layers. Bytes and operations are those that the
 * step cannot do without, over all layers. */
typedef struct serve_result {
    double plan, append, attention;
    double bytes;                       /* keys and values seen, each once, + q + o */
    double flops;                     /* 2 (dim_qk + dim_v) for each row, query head and key seen */
} serve_result;

/* Called after layer `layer` has run, outside of the timed parts; what it wants to see it asks
 * for by serve_look_at_*. */
typedef void serve_watch(void *user, serve *s, int layer);

/* false: message printed; serve_close takes what there is either way. */
bool serve_open(fv_ctx *ctx, gpu *where, const serve_config *config, serve *out);
void serve_close(serve *s);

int64_t serve_page_bytes(const serve_config *config);       /* of one page in all layers */

/* Takes the rows that the scheduler gave out, gathers their inputs. */
fv_status serve_prepare(serve *s, const scheduler *from, fv_error *err);
fv_status serve_run(serve *s, serve_watch *watch, void *user, serve_result *out, fv_error *err);

/* What a watcher needs, on the host's side of tensors: rows of q_turned, o and lse; keys [first,
 * last] of a request and their values. Then the mirror of a layer's cache may go. */
void serve_look_at_rows(const serve *s, int64_t first, int64_t count);
void serve_look_at_keys(const serve *s, int layer, int64_t request, int64_t first, int64_t last);
void serve_look_away(const serve *s, int layer);

/* And without asking: the page list of request i of the step; a row of a plane as layer `layer`
 * sees it. */
const int32_t *serve_page_list(const serve *s, int64_t i);
static inline const char *serve_plane_row(const serve *s, int plane, int layer, int64_t row)
{
    const serve_plane *p = &s->planes[plane];
    return p->step.data + (row * p->stride + (int64_t)layer * LAYER_SHIFT) * s->config.type->bytes;
}

#endif
