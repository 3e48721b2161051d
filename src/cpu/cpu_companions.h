/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_companions.h -- the jobs of foveal/ops.h: checked, ready to be split over threads by row. The GPU's host half (cuda/companions.c) takes
 * the same. */
#ifndef FV__CPU_COMPANIONS_H
#define FV__CPU_COMPANIONS_H

#include "../tensor.h"

typedef enum fv__act { FV__ACT_SILU, FV__ACT_GELU, FV__ACT_GELU_TANH } fv__act;

typedef struct fv__norm_job {           /* item i is head i % num_heads of row i / num_heads */
    fv__view x, residual, y;            /* stride[0] row, stride[1] head; residual.data NULL: absent */
    fv__view weight, bias;              /* [width]; bias.data NULL: absent */
    int32_t num_heads;
    float eps;
    bool plus_one, centred;             /* centred: layernorm */
} fv__norm_job;

typedef struct fv__act_job {
    fv__view x, y;                      /* x.width = 2 y.width */
    fv__act act;
} fv__act_job;

/* A parameter of a row: a number, or an entry of an array. */
typedef enum fv__setting_kind { FV__SETTING_NUMBER, FV__SETTING_F32, FV__SETTING_I32, FV__SETTING_I64 } fv__setting_kind;

typedef struct fv__setting {
    const void *data;                   /* a number: unused */
    int64_t stride;                     /* in entries; 0: all rows have entry 0 */
    double number;
    fv__setting_kind kind;
} fv__setting;

static inline double fv__setting_at(const fv__setting *p, int64_t i)
{
    switch (p->kind) {
    case FV__SETTING_F32: return (double)((const float *)p->data)[i * p->stride];
    case FV__SETTING_I32: return ((const int32_t *)p->data)[i * p->stride];
    case FV__SETTING_I64: return (double)((const int64_t *)p->data)[i * p->stride];
    default: return p->number;
    }
}

typedef struct fv__ints {               /* an array of integers that a call reads or writes; data NULL: absent */
    void *data;
    int64_t stride[2];
    bool wide;                          /* int64_t, else int32_t */
} fv__ints;

static inline int64_t fv__ints_get(const fv__ints *x, int64_t i, int64_t j)
{
    const int64_t at = i * x->stride[0] + j * x->stride[1];
    return x->wide ? ((const int64_t *)x->data)[at] : ((const int32_t *)x->data)[at];
}

static inline void fv__ints_set(const fv__ints *x, int64_t i, int64_t j, int64_t value)
{
    const int64_t at = i * x->stride[0] + j * x->stride[1];
    if (x->wide) ((int64_t *)x->data)[at] = value;
    else ((int32_t *)x->data)[at] = (int32_t)value;
}

typedef struct fv__random {
    fv__ints seeds, offsets;            /* data NULL: the numbers below; stride 0: entry 0 for all */
    uint64_t seed, offset;
} fv__random;

typedef enum fv__filter { FV__SOFTMAX, FV__TOP_K_RENORM, FV__TOP_P_RENORM, FV__TOP_K_MASK } fv__filter;

typedef struct fv__filter_job {
    fv__view x, y;                      /* [rows, vocab] */
    fv__setting param;                    /* temperature, k, p */
    fv__filter what;
} fv__filter_job;

typedef struct fv__sample_job {
    fv__view x;
    fv__setting top_k, top_p, min_p;
    fv__ints rows, ids;
    uint8_t *valid;                     /* NULL: absent */
    int64_t valid_stride;
    fv__random random;
    uint32_t filters;
    bool logits;
} fv__sample_job;

typedef struct fv__verify_job {
    fv__view draft, target;             /* [requests, drafts, vocab] */
    fv__ints draft_ids, ids, num_accepted, num_emitted;
    fv__random random;
    int32_t num_drafts;
} fv__verify_job;

/* ---------------------------------------------------------------------------------------------------- random numbers */

/* Philox 4x32, 10 rounds: draw number `draw` of sample `index` (foveal/ops.h says what is key and counter). */
static inline uint64_t fv__draw(uint64_t seed, uint64_t offset, uint32_t index, uint32_t draw)
{
    uint32_t c[4] = { (uint32_t)offset, (uint32_t)(offset >> 32), index, draw }, k[2] = { (uint32_t)seed, (uint32_t)(seed >> 32) };
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)c[0] * 0xD2511F53u, b = (uint64_t)c[2] * 0xCD9E8D57u;
        const uint32_t next[4] = { (uint32_t)(b >> 32) ^ c[1] ^ k[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k[1], (uint32_t)a };
        for (int i = 0; i < 4; i++) c[i] = next[i];
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    return (uint64_t)c[1] << 32 | c[0];
}

#endif
