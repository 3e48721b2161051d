/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda.h"

#include "../engine.h"

#include <stdio.h>

fv_status fv__cuda_open(fv_ctx *ctx, int ordinal, fv_error *err)
{
    (void)ctx;
    return fv__fail(err, FV_E_DEVICE, "desc.device", ordinal, 0, "this build has no CUDA backend");
}

void fv__cuda_close(fv_ctx *ctx) { (void)ctx; }

void fv__cuda_faults(fv_ctx *ctx, fv__faults *out, int clear)
{
    (void)ctx; (void)clear;
    *out = (fv__faults){ 0 };
}

int fv__cuda_list(char (*lines)[160], int max_lines, char *why, size_t why_size)
{
    (void)lines; (void)max_lines;
    snprintf(why, why_size, "this build has no CUDA backend");
    return 0;
}

const fv__backend fv__cuda_backend = { .name = "cuda" };
