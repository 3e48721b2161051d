/* SPDX-License-Identifier: Apache-2.0 */
/* probe.h -- the v_* words of one CPU level as functions over arrays, for checksimd. */
#ifndef FOVEAL_TESTS_PROBE_H
#define FOVEAL_TESTS_PROBE_H

#include <stdint.h>

enum { PROBE_BLOCK = 1024 };            /* elements of a call: a multiple of every level's lanes */

typedef void probe_fn(const float *x, float *y);                        /* PROBE_BLOCK values */
typedef struct probe_unary {
    const char *name;
    probe_fn *fn;
} probe_unary;

typedef struct probe {
    const char *name;
    int lanes;
    const probe_unary *unary;           /* the last has no name */
    void (*rotate)(const int32_t *position, float frequency, float *s, float *c);
    void (*fma)(const float *a, const float *b, const float *c, float *y);
    void (*dot_bytes)(const int32_t *a, const int32_t *b, const int32_t *c, int32_t *y);
    void (*dot)(const uint16_t *a, const uint16_t *b, const float *c, float *y);       /* 2 * PROBE_BLOCK of bf16 */
    void (*join)(const float *x, uint16_t *y);                          /* PROBE_BLOCK values to bf16 */
    void (*max)(const float *a, const float *b, float *y);
    void (*min)(const float *a, const float *b, float *y);
    uint32_t (*compare)(const float *a, const float *b, int op);        /* lanes of a `op` b: < <= > >= == != */
    void (*load)(int dtype, const void *base, int64_t first, float *y); /* PROBE_BLOCK elements */
    void (*store)(int dtype, void *base, int64_t first, const float *x);
} probe;

#endif
