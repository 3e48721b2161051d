/* SPDX-License-Identifier: Apache-2.0 */
/* cuda.h -- the CUDA backend as the rest of the library sees it; fv__cuda_backend (engine.h) does the work. */
#ifndef FV__CUDA_H
#define FV__CUDA_H

#include "../ctx.h"

/* Opens device `ordinal` for this context (ctx->cuda). Blocks. FV_E_DEVICE: no driver, no such device; the text says what was looked for. */
fv_status fv__cuda_open(fv_ctx *ctx, int ordinal, fv_error *err);
void fv__cuda_close(fv_ctx *ctx);

/* The error word of the context's device; never blocks. */
void fv__cuda_faults(fv_ctx *ctx, fv__faults *out, int clear);

/* Devices of this machine for fv_info, one line each: name, compute capability, SMs, memory. Returns how many lines there are; 0 with the reason in
 * `why` (driver not found, no device). */
int fv__cuda_list(char (*lines)[160], int max_lines, char *why, size_t why_size);

/* What kernels are compiled with and where they are kept: "nvrtc 13.0, /usr/local/cuda/lib64/libnvrtc.so.13" or why there is none; the cache folder,
 * or that they stay in memory. ctx NULL: as a context opened now would have it. */
void fv__cuda_tools(const fv_ctx *ctx, char *compiler, size_t compiler_size, char *folder, size_t folder_size);

#endif
