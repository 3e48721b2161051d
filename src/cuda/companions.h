/* SPDX-License-Identifier: Apache-2.0 */
/* companions.h -- the jobs of foveal/ops.h on a GPU: one launch each, nothing allocated, nothing copied. The first call of each kind compiles or
 * loads its kernel (fv_ops_warm does it before): FV_E_NOT_READY on a stream that is being captured. */
#ifndef FV__CUDA_COMPANIONS_H
#define FV__CUDA_COMPANIONS_H

#include "../cpu/cpu_companions.h"
#include "../ctx.h"

fv_status fv__cuda_norm_rows(fv_ctx *ctx, const fv__norm_job *job, int64_t items, fv_stream stream, fv_error *err);
fv_status fv__cuda_act_rows(fv_ctx *ctx, const fv__act_job *job, int64_t rows, fv_stream stream, fv_error *err);
fv_status fv__cuda_filter_rows(fv_ctx *ctx, const fv__filter_job *job, int64_t rows, fv_stream stream, fv_error *err);
fv_status fv__cuda_sample_rows(fv_ctx *ctx, const fv__sample_job *job, int64_t samples, fv_stream stream, fv_error *err);
fv_status fv__cuda_verify_rows(fv_ctx *ctx, const fv__verify_job *job, int64_t requests, fv_stream stream, fv_error *err);

/* Compiles or loads all of them. */
fv_status fv__cuda_companions_warm(fv_ctx *ctx, fv_error *err);

#endif
