/* SPDX-License-Identifier: Apache-2.0 */
/* ops.h -- append, rope, merge and page copies on a GPU: jobs that were checked by the public calls, launched on a stream. Nothing is allocated. The
 * first call of each kind compiles or loads its kernel (fv_warm does it before): FV_E_NOT_READY on a stream that is being captured.
 *
 * What lies on the host alone (index arrays, many states) goes through a ring of small buffers of the context; also FV_E_NOT_READY while
 * captured, because a replay would read what the ring holds by then. */
#ifndef FV__CUDA_OPS_H
#define FV__CUDA_OPS_H

#include "../cpu/cpu_ops.h"
#include "../ctx.h"
#include "driver.h"

typedef struct fv__cuda_append {
    const fv__append_job *job;          /* slots, v_slots, positions: host arrays, used when `placed` */
    const fv_append_desc *desc;         /* index arrays, used unless `placed` */
    int64_t rows;                       /* at most */
    bool placed;
} fv__cuda_append;

typedef struct fv__cuda_pages {         /* of K or V, in bits; data NULL: absent */
    char *data;
    int64_t page_stride, num_tokens, token_stride;
    int64_t extent[2], stride[2];       /* axes between the token and the last one */
    int64_t width;                      /* of the last axis */
} fv__cuda_pages;

fv_status fv__cuda_append_rows(fv_ctx *ctx, const fv__cuda_append *call, fv_stream stream, fv_error *err);
fv_status fv__cuda_rope_rows(fv_ctx *ctx, const fv__rope_job *job, int64_t rows, fv_stream stream, fv_error *err);
fv_status fv__cuda_merge_rows(fv_ctx *ctx, const fv__merge_job *job, int64_t rows, fv_stream stream, fv_error *err);
fv_status fv__cuda_copy_pages(fv_ctx *ctx, const fv__cuda_pages pages[2], const fv_copy *copies, int64_t num_copies, fv_stream stream,
                              fv_error *err);

/* Compiles or loads all of them. */
fv_status fv__cuda_ops_warm(fv_ctx *ctx, fv_error *err);

/* The simple kernels, and the function of each. */
enum { FV__CUDA_APPEND, FV__CUDA_ROPE, FV__CUDA_MERGE, FV__CUDA_COPY_PAGES, FV__CUDA_NORM, FV__CUDA_ACT, FV__CUDA_FILTER, FV__CUDA_SAMPLE, FV__CUDA_VERIFY,
       FV__CUDA_NUM_OPS };

struct fv__cuda;
struct fv__cuda_ops;
fv_status fv__cuda_ops_function(struct fv__cuda *c, int which, CUstream stream, CUfunction *function, fv_error *err);
struct d_tensor fv__cuda_tensor(const fv__view *v);     /* ops.cuh */
fv_status fv__cuda_ops_open(struct fv__cuda *c, fv_error *err);
void fv__cuda_ops_close(struct fv__cuda *c);

#endif
