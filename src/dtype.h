/* SPDX-License-Identifier: Apache-2.0 */
/* dtype.h -- element types. ONE FILE IN src/dtypes/ = ONE TYPE; the build lists the folder in gen/dtypes.inc as FV_DTYPE(name) lines,
 * sorted by name, and everything below grows from that list. The enum is internal and may be renumbered: the API uses names.
 *
 * A file src/dtypes/NAME.h has sections, chosen by the macro that is defined when it is included:
 *   FV_DTYPE_META   FV_DTYPE_INFO(name, bits, largest finite value, has_inf, has_nan)   (one line)
 *   FV_DTYPE_SPEC   static double NAME_decode(uint32_t code) and static uint32_t NAME_encode(double x): the definition, integer arithmetic,
 *                   round to nearest even, saturating for types of 8 bits and fewer
 *   FV_DTYPE_CPU    v_f32 loads and stores in the v_* vocabulary (src/cpu/vocabulary.h says which)
 *   FV_DTYPE_CUDA   device conversions
 */
#ifndef FV__DTYPE_H
#define FV__DTYPE_H

#include "core.h"

typedef enum fv__dtype {
#define FV_DTYPE(name) FV__DTYPE_##name,
#include "dtypes.inc"
#undef FV_DTYPE
    FV__NUM_DTYPES,
    FV__DTYPE_NONE = -1,
} fv__dtype;

typedef struct fv__dtype_info {
    const char *name;
    int bits;                           /* 32, 16, 8 or 4 */
    double largest;                     /* largest finite value */
    bool has_inf, has_nan;
    double (*decode)(uint32_t code);
    uint32_t (*encode)(double x);       /* nearest even; 8 and 4 bits saturate; NaN: NaN where there is one, else 0 */
} fv__dtype_info;

extern const fv__dtype_info fv__dtypes[FV__NUM_DTYPES];

fv__dtype fv__dtype_find(const char *name);             /* FV__DTYPE_NONE: unknown or NULL */

/* Element `index` of packed memory, in double. */
double fv__dtype_load(fv__dtype type, const void *base, int64_t index);
void fv__dtype_store(fv__dtype type, void *base, int64_t index, double x);

/* Types whose elements mean nothing without scales of their groups ("block scales"): fp4_e2m1 has an fp8_e4m3 for 16 elements, int4 a pair
 * (scale, zero) in f16 for 32 or 64. */
static inline bool fv__dtype_has_blocks(fv__dtype type) { return type == FV__DTYPE_fp4_e2m1 || type == FV__DTYPE_int4; }

static inline int64_t fv__dtype_bytes(fv__dtype type, int64_t elements) { return (elements * fv__dtypes[type].bits + 7) / 8; }

#endif
