/* SPDX-License-Identifier: Apache-2.0 */
/* texts.h -- a variant's text on its way into a kernel, and a fault in it on its way back to the user's line. */
#ifndef FV__CUDA_TEXTS_H
#define FV__CUDA_TEXTS_H

#include "../ctx.h"
#include "../variant.h"

/* What stands in a kernel's text for the variant that is use i: its own names in a namespace, its lines under its name, its macros gone at the end.
 * malloc'ed; NULL: no memory. */
char *fv__cuda_variant_text(int i, const fv_variant *variant);

/* A source of its own with nothing but that. */
char *fv__cuda_probe_text(const fv_variant *variant);

/* Turns NVRTC's complaint about a kernel (FV_E_COMPILE) into one about the variant that it is about: field, line, words. */
void fv__cuda_blame(const fv_variant *const *variants, int num_variants, fv_error *err);

/* Compiles the text alone for the context's device, so that its faults are told when it is created. Where there is no NVRTC, or compiling is
 * forbidden, nothing is found: plans may have their kernels from bundles. */
fv_status fv__cuda_check_variant(fv_ctx *ctx, const fv_variant *variant, fv_error *err);

#endif
