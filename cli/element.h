/* SPDX-License-Identifier: Apache-2.0 */
/* element.h -- element types as the command sees them: the bytes of a tensor in double, and random
 * values for it.
 *
 * Written apart from the library's own conversions on purpose: what checks the engine shares
 * nothing with it.
 */
#ifndef ELEMENT_H
#define ELEMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct element_type {
    const char *name;
    int bytes;                          /* 0: two to a byte, with scales and zeros of groups */
    double rounding;                    /* largest relative error of rounding to it */
    double largest;                     /* largest finite value */
    double step;                        /* distance of the numbers next to 0 */
    double (*load)(const void *at);     /* one element; NULL: int4, which is only timed */
    void (*store)(void *at, double x);  /* NULL: only the library writes it (8-bit caches) */
} element_type;

#define ELEMENT_NAMES "f32 f16 bf16"
#define ELEMENT_CACHE_NAMES "f32 f16 bf16 fp8_e4m3 fp8_e5m2 int8"

const element_type *element_find(const char *name);     /* NULL: unknown */

/* Fills `count` elements with values close to the normal distribution (mean 0, deviation `spread`),
 * from `seed` alone. */
void element_fill(const element_type *type, void *memory, int64_t count, double spread,
                  uint64_t seed);

#endif
