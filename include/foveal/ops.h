/* SPDX-License-Identifier: Apache-2.0 */
/* ops.h -- what an engine calls beside attention: norms, gated activations, softmax, filters of probabilities, sampling, verification of drafts.
 *
 *     #include <foveal/ops.h>
 *     fv_norm_desc norm = { .x = x, .weight = w, .residual = residual, .y = x, .eps = 1e-6 };
 *     fv_rmsnorm(ctx, &norm, stream, &err);
 *     fv_sample_desc s = { .x = probs, .filters = FV_TOP_K | FV_TOP_P | FV_TOP_K_FIRST, .top_k = { .number = 50 }, .top_p = { .number = 0.9 },
 *                          .seed = seed, .offset = step, .ids = ids };
 *     fv_sample(ctx, &s, stream, &err);
 *
 * The conventions are those of foveal.h. Tensors lie on the context's device, arrays of integers too (dtype "i32" or "i64"). On the CPU a call
 * blocks; on a GPU it launches, allocates nothing and may be captured, once its kernel is there (fv_ops_warm, or an earlier call). "16 or 32 bits"
 * means f32, f16 or bf16. A "row" is the last axis of a tensor; other strides are free.
 *
 * Arithmetic is in f32 and rounded once to the output's type.
 *
 * What is promised about bits. Everything below the line "probabilities" -- softmax, filters, samples, verification -- gives the same bytes on
 * every CPU level, for every number of threads, on every GPU, and in every batch: a row's result depends on that row, its parameters, the seed, the
 * offset and the row's index alone. It holds because no sum of floating-point numbers is formed. With E the exponent of a row's largest value (2^E
 * <= largest < 2^(E+1)), a value v has the integer weight
 *     w(v) = v * 2^min(40 - E, 126), rounded to the nearest integer (even on ties),
 * sums are sums of such integers, of 64 bits, which have no order; and exponentials are made by the same sequence of additions and multiplications
 * everywhere. So a value below 2^-42 of the row's largest is never sampled and counts nothing in a sum. Norms and activations are right to the
 * rounding of their types, with sums in the order that suits the machine; norms also where f32 cannot hold the squares of the elements.
 *
 * Random numbers: Philox 4x32 with 10 rounds. Key: the seed's low and high word. Counter: { offset low, offset high, index of the sample, number
 * of the draw }. A draw is words 0 (low) and 1 (high) of the result, 64 bits, and divided by 2^64 a number r of [0, 1). A call never needs more
 * than its own offset: add one for the next call. */
#ifndef FOVEAL_OPS_H
#define FOVEAL_OPS_H

#include "foveal.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Compiles what the functions of this header need on a GPU, now. Blocks. On the CPU there is nothing to do. */
FV_API fv_status fv_ops_warm(fv_ctx *ctx, fv_error *err);

/* ------------------------------------------------------------------------------------------------ norms, activations */

/* Rows of x [rows, width] or [rows, heads, width]. y has x's shape and may be x itself. */
typedef struct fv_norm_desc {
    fv_tensor x;                    /* 16 or 32 bits */
    fv_tensor weight;               /* [width], 16 or 32 bits */
    fv_tensor bias;                 /* [width], 16 or 32 bits; fv_layernorm only, absent: 0 */
    fv_tensor residual;             /* fv_rmsnorm only: absent, or x's shape and type. z = x + residual takes the place of x below (unrounded) and of
                                       residual in memory */
    fv_tensor y;                    /* 16 or 32 bits */
    double eps;                     /* literal: 0 is 0 */
    bool plus_one;                  /* the weight is 1 + weight (Gemma) */
    uint64_t reserved[4];
} fv_norm_desc;

/* y = x / sqrt(mean(x^2) + eps) * weight. */
FV_API fv_status fv_rmsnorm(fv_ctx *ctx, const fv_norm_desc *desc, fv_stream stream, fv_error *err);

/* y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias. */
FV_API fv_status fv_layernorm(fv_ctx *ctx, const fv_norm_desc *desc, fv_stream stream, fv_error *err);

/* y [rows, width] = f(x [rows, :width]) * x [rows, width:]. f: "silu" z / (1 + exp(-z)); "gelu" z Phi(z), Phi the normal distribution; "gelu_tanh"
 * z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2. y may be the first half of x. */
FV_API fv_status fv_act_and_mul(fv_ctx *ctx, const char *f, const fv_tensor *x, const fv_tensor *y, fv_stream stream, fv_error *err);

/* ----------------------------------------------------------------------------------------------------- probabilities */

/* Rows of up to FV_MAX_VOCAB values. A probability counts as 0 when it is NaN, negative or below the smallest normal f32, and as the largest
 * finite f32 when it is infinite; a row need not sum to 1 anywhere below. A logit that is NaN counts as -inf. */
#define FV_MAX_VOCAB (1 << 22)

/* probs = exp((x - max x) / temperature), divided by their sum. temperature NULL: 1; a number >= 0, or f32 [rows]. Temperature 0 (in an array
 * also: NaN, negative) leaves the largest logits, in equal parts. A row of -inf gives zeros. logits, probs [rows, vocab], 16 or 32 bits; probs
 * may be logits. */
FV_API fv_status fv_softmax(fv_ctx *ctx, const fv_tensor *logits, const fv_arg *temperature, const fv_tensor *probs, fv_stream stream, fv_error *err);

/* Filters. Which values of a row stay:
 *   top k   those that fewer than k values of the row are larger than: the k largest, and what equals the smallest of them
 *   top p   those whose larger values together weigh less than p of the row's sum: the smallest such set, and what equals the smallest of it
 *   min p   those that are at least p times the largest
 * The largest value always stays. k: a number >= 1, or i32 or i64 [rows] (below 1 counts as 1). p: a number in [0, 1], or f32 [rows] (above 1 counts
 * as 1, NaN and negative as 0). y has x's shape and may be x; 16 or 32 bits. */

/* y = x where x stays, divided by the sum of what stays; else 0. A row without positive values gives zeros. */
FV_API fv_status fv_top_k_renorm(fv_ctx *ctx, const fv_tensor *x, const fv_arg *k, const fv_tensor *y, fv_stream stream, fv_error *err);
FV_API fv_status fv_top_p_renorm(fv_ctx *ctx, const fv_tensor *x, const fv_arg *p, const fv_tensor *y, fv_stream stream, fv_error *err);

/* y = x (logits) where x is one of the k largest, else -inf; NaN becomes -inf. */
FV_API fv_status fv_top_k_mask(fv_ctx *ctx, const fv_tensor *x, const fv_arg *k, const fv_tensor *y, fv_stream stream, fv_error *err);

/* Bits of fv_sample_desc.filters. */
#define FV_TOP_K        1u
#define FV_TOP_P        2u
#define FV_MIN_P        4u
#define FV_TOP_K_FIRST  8u              /* with both: p is of the sum of what top k leaves; else of the row's sum */

typedef struct fv_sample_desc {
    fv_tensor x;                    /* [rows, vocab] probabilities or logits, 16 or 32 bits */
    bool logits;                    /* exp(x - max x) are the probabilities, filters see those */
    uint32_t filters;               /* FV_TOP_K | ...; a value must pass each */
    fv_arg top_k, top_p, min_p;     /* numbers, or tensors [n]; as above; names ignored. Without its bit a filter is not looked at */
    fv_tensor rows;                 /* absent: sample i is of row i; or i32 or i64 [n] (outside of x: as a row of zeros) */
    fv_tensor seeds, offsets;       /* absent, or i64 [1] or [n]: take the place of `seed` and `offset`, read by the kernel */
    uint64_t seed, offset;
    fv_tensor ids;                  /* i32 or i64 [n]: written */
    fv_tensor valid;                /* absent, or u8 [n]: 1, or 0 where the row has no positive value: its id is 0 */
    uint64_t reserved[4];
} fv_sample_desc;

/* One sample a row, with the probabilities of what the filters leave. With r draw number 0 of sample i, the id is the first one at which the
 * running sum of the row's weights, in the order of ids, exceeds r times their sum, rounded down. Where top k or top p refuses that id, its
 * value and all smaller ones leave the sum and the next draw decides; with FV_TOP_K_FIRST, what top k refuses is not in the sum of draw 0 either. */
FV_API fv_status fv_sample(fv_ctx *ctx, const fv_sample_desc *desc, fv_stream stream, fv_error *err);

/* Verifies chains of drafted tokens. Draft i of a request is accepted with probability min(1, target / draft) of its token, u draft < target in
 * f32 with u the upper 24 bits of draw i; the first one that is not ends the chain. Then one more token is drawn (draw n): from the positive
 * part of target - draft there (from target, if there is none), or after n accepted drafts from target [n]. */
typedef struct fv_verify_desc {
    fv_tensor draft_probs;          /* [requests, n, vocab], 16 or 32 bits */
    fv_tensor draft_ids;            /* [requests, n] i32 or i64; an id outside of the vocabulary is not accepted */
    fv_tensor target_probs;         /* [requests, n + 1, vocab] */
    fv_tensor seeds, offsets;       /* as in fv_sample_desc */
    uint64_t seed, offset;
    fv_tensor ids;                  /* [requests, n + 1] i32 or i64: accepted drafts, the drawn token, -1 behind */
    fv_tensor num_accepted;         /* absent, or i32 or i64 [requests]: the number of drafts that pass when each is looked at alone is added */
    fv_tensor num_emitted;          /* absent, or i32 or i64 [requests]: the length of the accepted chain is added */
    uint64_t reserved[4];
} fv_verify_desc;

FV_API fv_status fv_verify(fv_ctx *ctx, const fv_verify_desc *desc, fv_stream stream, fv_error *err);

#ifdef __cplusplus
}
#endif
#endif
