/* SPDX-License-Identifier: Apache-2.0 */
/* companions.cuh -- what norms, activations, filters, samples and verification are launched with. Valid C too; after ops.cuh. */
#ifndef FV_COMPANIONS_CUH
#define FV_COMPANIONS_CUH

enum { D_SAMPLE_THREADS = 1024, D_MAX_VOCAB = 1 << 22 };
enum { D_SILU, D_GELU, D_GELU_TANH };
enum { D_SOFTMAX, D_TOP_K_RENORM, D_TOP_P_RENORM, D_TOP_K_MASK };
enum { D_TOP_K = 1, D_TOP_P = 2, D_MIN_P = 4, D_TOP_K_FIRST = 8 };
enum { D_NUMBER, D_FLOATS, D_INTS, D_LONGS };

typedef struct d_norm {
    d_tensor x, residual, y;            /* [row, head] */
    d_tensor weight, bias;
    int64_t num_items;                  /* rows x heads */
    float eps;
    int32_t num_heads, plus_one, centred, warps, reserved;      /* warps: of an item, 1 or all of a block */
} d_norm;

typedef struct d_act {
    d_tensor x, y;                      /* x.width = 2 y.width */
    int64_t num_rows;
    int32_t act, reserved;
} d_act;

typedef struct d_param { const void *data; int64_t stride; float number; int32_t kind; } d_param;
typedef struct d_ints { void *data; int64_t stride[2]; int32_t is64, reserved; } d_ints;       /* data null: absent */
typedef struct d_random { d_ints seeds, offsets; uint64_t seed, offset; } d_random;

typedef struct d_filter {
    d_tensor x, y;
    d_param param;
    int32_t what, reserved;
} d_filter;

typedef struct d_sample {
    d_tensor x;
    d_param top_k, top_p, min_p;
    d_ints rows, ids;
    uint8_t *valid;
    int64_t valid_stride, num_rows;     /* rows of x */
    d_random random;
    int32_t filters, logits;
} d_sample;

typedef struct d_verify {
    d_tensor draft, target;             /* [request, step] */
    d_ints draft_ids, ids, num_accepted, num_emitted;
    d_random random;
    int32_t num_drafts, reserved;
} d_verify;

#ifdef __CUDACC__

/* A row of a tensor, in quads of elements. */
typedef struct d_row { char *at; int type, width; bool aligned; } d_row;

FV_DEVICE d_row d_row_of(const d_tensor &t, int64_t element)
{
    char *at = d_at(t, element);
    const d_row r = { at, t.type, t.width, d_aligned(at, d_bits(t.type)) };
    return r;
}

FV_DEVICE void d_get(const d_row &r, int i, float (&x)[4])
{
    d_load_quad(r.type, r.at + (int64_t)i * d_bits(r.type) / 8, r.width - i, r.aligned && i + 4 <= r.width, x);
}

FV_DEVICE void d_put(const d_row &r, int i, const float (&x)[4])
{
    d_store_quad(r.type, r.at + (int64_t)i * d_bits(r.type) / 8, r.width - i, r.aligned && i + 4 <= r.width, x);
}

#endif
#endif
