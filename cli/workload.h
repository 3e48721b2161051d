/* SPDX-License-Identifier: Apache-2.0 */
/* workload.h -- one layer's tensors and its plan for a batch given by numbers: what foveal bench
 * times. Pages are shuffled in memory.
 *
 * On a GPU there are several copies of K and V, more than its cache holds, and runs take them in
 * turn, so that each finds its own cold; a graph of such runs is what is timed, by the GPU's
 * clock. */
#ifndef WORKLOAD_H
#define WORKLOAD_H

#include "element.h"
#include "memory.h"

#define WORKLOAD_SCALE (1.0 / 32)         /* what stored values of 8 bits stand for, times this */

typedef struct workload_desc {
    int32_t q_heads, kv_heads, dim;
    int32_t dim_v;                      /* 0: dim */
    bool latent;                        /* V is the first dim_v elements of K */
    const char *kv_dtype;               /* NULL: bf16, as q and o */
    int32_t page_size;                  /* 0: ragged, one long page a request */
    int64_t num_requests;
    const int32_t *rows, *lengths;      /* [num_requests] each */
    int64_t prefix;                     /* keys that requests share, a multiple of page_size ... */
    int64_t share;                      /* ... so many requests each of them. 0: all */
    int64_t pool_keys;                  /* keys that each request has room for: its pages are drawn
                                           from as many. 0: as long as it is */
    int32_t window;                     /* keys seen before a row's own; 0: all */
    bool tiled;                         /* pages are in the order "tiles" */
    bool rope;                          /* keys are stored unturned, and turned as they are read ... */
    bool rope_before;                   /* ... or by fv_rope before each run, all that lie in pages */
    bool sharing, invariant, no_tensors;        /* no_tensors: for planning alone ... */
    bool ids_on_device;                 /* ... with page ids on the GPU too, as with tensors */
} workload_desc;

typedef struct workload {
    fv_ctx *ctx;
    fv_plan *plan;
    gpu *gpu;                           /* NULL: the CPU */
    workload_desc desc;
    int64_t total_rows, total_keys, num_pages, total_pages;
    int32_t *row_indptr, *lengths, *page_indptr, *page_ids;
    memory q, k, v, o, ids;             /* ids: the page ids where kernels read them */
    memory turned, positions;           /* rope_before: K after it, of one copy; int32 of each token */
    int64_t k_bytes, v_bytes;           /* of one copy of K, of V */
    int copies, runs;                   /* of K and V; in the graph */
    gpu_graph *graph;                   /* made by the first workload_time */
    double bytes;                       /* of K and V that have to be read, shared ones once */
    double asked_bytes;                 /* the same, shared ones once for each request */
    double flops;
} workload;

/* false: message printed. */
bool workload_open(fv_ctx *ctx, gpu *where, const workload_desc *desc, workload *out);
void workload_close(workload *w);
fv_status workload_update(workload *w, fv_error *err);
fv_status workload_run(workload *w, int copy, fv_error *err);
fv_status workload_turn(workload *w, int copy, fv_error *err);      /* rope_before: fv_rope alone */
fv_status workload_time(workload *w, double *seconds, fv_error *err);       /* of a run, done */
int64_t workload_bytes(const workload_desc *desc);          /* memory that it will take, about; on a
                                                               GPU once for each copy */

#endif
