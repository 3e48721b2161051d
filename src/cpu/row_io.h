/* SPDX-License-Identifier: Apache-2.0 */
/* row_io.h -- rows of elements of any type to floats and back, for the templates that bring rows through buffers of floats.
 *
 * Whole vectors straight from memory; the rest by way of a copy, so that nothing behind the row is touched. Buffers hold n floats rounded up to whole
 * vectors. */
#ifndef FV__ROW_IO_H
#define FV__ROW_IO_H

#include "vocabulary.h"

#include <string.h>

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF            /* gcc has it off in ISO C */
#endif

#define FV_DTYPE_CPU
#include "dtype_files.inc"
#undef FV_DTYPE_CPU

#define ROW_IO static __attribute__((unused))

#define FV_DTYPE_META
#define FV_DTYPE_INFO(name, bits, largest, has_inf, has_nan)                                       \
    ROW_IO void load_##name(const char *base, int64_t at, int n, float *out)                       \
    {                                                                                              \
        int i = 0;                                                                                 \
        for (; i + V_LANES <= n; i += V_LANES) v_store(out + i, v_load_##name(base, at + i));      \
        if (V_LANES == 1 || i >= n) return;                                                        \
        char rest[4 * V_LANES] = { 0 };                                                            \
        memcpy(rest, base + (at + i) * bits / 8, (size_t)((n - i) * bits + 7) / 8);                \
        v_store(out + i, v_load_##name(rest, 0));                                                  \
    }                                                                                              \
                                                                                                   \
    ROW_IO void store_##name(char *base, int64_t at, int n, const float *x)                        \
    {                                                                                              \
        int i = 0;                                                                                 \
        for (; i + V_LANES <= n; i += V_LANES) v_store_##name(base, at + i, v_load(x + i));        \
        if (V_LANES == 1 || i >= n) return;                                                        \
        char rest[4 * V_LANES] = { 0 };                                                            \
        v_store_##name(rest, 0, v_load(x + i));                                                    \
        memcpy(base + (at + i) * bits / 8, rest, (size_t)((n - i) * bits + 7) / 8);                \
    }
#include "dtype_files.inc"
#undef FV_DTYPE_INFO
#undef FV_DTYPE_META

ROW_IO void load_row(const fv__view *view, int64_t at, int n, float *out)
{
    switch ((int)view->dtype) {
#define FV_DTYPE(name) case FV__DTYPE_##name: load_##name(view->data, at, n, out); break;
#include "dtypes.inc"
#undef FV_DTYPE
    }
}

ROW_IO void store_row(const fv__view *view, int64_t at, int n, const float *x)
{
    switch ((int)view->dtype) {
#define FV_DTYPE(name) case FV__DTYPE_##name: store_##name(view->data, at, n, x); break;
#include "dtypes.inc"
#undef FV_DTYPE
    }
}

#endif
