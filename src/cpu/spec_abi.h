/* SPDX-License-Identifier: Apache-2.0 */
/* spec_abi.h -- what the definition half of a variant's text (#ifdef FV_SPEC) looks like to whoever checks kernels with it: its hooks one key and one
 * element at a time, in double. Includes nothing but integers, as hooks_abi.h. */
#ifndef FV__SPEC_ABI_H
#define FV__SPEC_ABI_H

#include <stdbool.h>
#include <stdint.h>

typedef struct fv__spec_at {
    int32_t request, row, batch_row, head, key, k_pos, q_pos, num_rows, num_keys, num_q_heads, index;
} fv__spec_at;

/* NULL: the variant has no such hook. `args` is the argument struct that kernels read. */
typedef struct fv__spec_hooks {
    int32_t (*pairs)(const void *args, bool *interleaved);      /* how many elements turn */
    double (*score)(const void *args, const fv__spec_at *at, double s);
    bool (*visible)(const void *args, const fv__spec_at *at);
    double (*sink)(const void *args, const fv__spec_at *at);
    void (*query)(const void *args, const fv__spec_at *at, double *lo, double *hi);
    void (*key)(const void *args, const fv__spec_at *at, double *lo, double *hi);
    double (*value)(const void *args, const fv__spec_at *at, double v);
    double (*output)(const void *args, const fv__spec_at *at, double o, double lse);
    double (*weight)(const void *args, const fv__spec_at *at, double s);
    double (*key_sum)(const void *args, const fv__spec_at *at, double p);
    double (*row_max)(const void *args, const fv__spec_at *at, double m);
} fv__spec_hooks;

/* The functions of <math.h> that a definition may call. They are handed in: a text that is compiled alone is linked with nothing. */
#define FV__MATH_OF_ONE(X)                                                                                                                       \
    X(exp) X(exp2) X(expm1) X(log) X(log2) X(log10) X(log1p) X(sqrt) X(cbrt) X(sin) X(cos) X(tan) X(asin) X(acos) X(atan) X(sinh) X(cosh) X(tanh) \
    X(erf) X(fabs) X(floor) X(ceil) X(round) X(trunc)
#define FV__MATH_OF_TWO(X) X(pow) X(atan2) X(hypot) X(fmod) X(fmin) X(fmax)

typedef struct fv__spec_math {
#define FV__ONE(name) double (*name##_)(double);
#define FV__TWO(name) double (*name##_)(double, double);
    FV__MATH_OF_ONE(FV__ONE)
    FV__MATH_OF_TWO(FV__TWO)
#undef FV__ONE
#undef FV__TWO
} fv__spec_math;

#endif
