/* SPDX-License-Identifier: Apache-2.0 */
/* ops.cuh -- what appends, rotations, merges and page copies are launched with; and, for device code, rows of any element type. Valid C too.
 *
 * One build of each kernel serves every type, width, layout and page size: types are looked at four elements at a time, which costs nothing beside the
 * memory that is moved. Launch parameters hold everything that is small (strides, frequencies, the lists of a copy), so a call needs no memory of
 * its own and may be captured.
 *
 * What is stored has the bytes that the CPU stores: programs are compiled without contraction (--fmad=false), conversions are the integer steps of
 * src/dtypes, angles are reduced in double by the steps of cpu/ops_tmpl.c, and a scale divides. */
#ifndef FV_OPS_CUH
#define FV_OPS_CUH

enum { D_F16, D_BF16, D_F32, D_E4M3, D_E5M2, D_INT8, D_E2M1 };
enum { D_MAX_DIM = 576, D_WARPS = 8, D_STATES = 56, D_COPIES = 128 };
enum { D_APPEND_WARPS = 4, D_WIDE_K = 1, D_WIDE_V = 2, D_WIDE_Q = 4 };
enum { D_SCALE_NONE, D_SCALE_TENSOR, D_SCALE_HEAD, D_SCALE_TOKEN_HEAD };

/* Element [i, j, k, d]; strides in elements. Ragged caches are pages of one token. data null: absent. */
typedef struct d_tensor { char *data; int64_t stride[3]; int32_t type, width; } d_tensor;
typedef struct d_index { const void *data; int64_t stride; int32_t is64, reserved; } d_index;          /* data null: not given */
typedef struct d_row_scale { float *data; int64_t stride[3]; float number; int32_t kind; } d_row_scale;
typedef struct d_rotary { int32_t dim, interleaved; float frequencies[D_MAX_DIM / 2]; } d_rotary;

typedef struct d_append {
    d_tensor new_k, new_k_tail, new_v, k, k_tail, v, k_blocks, v_blocks, q, q_out, no_tail;
    d_row_scale k_scale, v_scale;
    d_index slots, v_slots;             /* given: where each row goes; nothing below but row_positions is looked at */
    d_index rows, lengths, first_positions, row_positions;
    d_index indptr, ids, v_ids, table_rows, kv_indptr;
    int64_t num_requests, row_first, num_rows;          /* of all rows num_rows, this launch begins at row_first */
    int64_t num_pages, num_slots, num_ids, table_width, table_stride;
    struct d_faults *faults, *faults_host;
    int64_t row_end;                    /* ... of which it does [row_first, row_end) */
    int32_t page_size;                  /* 0: ragged */
    int32_t num_kv_heads, num_q_heads, checked;
    int32_t parts;                      /* warps of a row */
    int32_t wide;                       /* which of K, V, Q are (rows.cuh) and are stored as they are, turned at most */
    d_rotary rotary;
} d_append;

typedef struct d_rope {
    d_tensor x, y;                      /* [row, head] */
    d_index positions;
    int64_t row_first, num_rows;
    int32_t num_heads;
    int32_t wide;                       /* one type of 16 bits, rows and pairs in vectors of 16 bytes */
    d_rotary rotary;
} d_rope;

typedef struct d_state { char *o; const float *lse; int64_t o_stride[2], lse_stride[2]; int32_t type, reserved; } d_state;

typedef struct d_merge {
    d_tensor o;
    float *lse;                         /* or null */
    int64_t lse_stride[2], num_rows;
    const d_state *many;                /* more states than fit below; or null */
    int32_t num_states, num_heads, base2, reserved;
    d_state states[D_STATES];
} d_merge;

/* Bytes. A page is tokens x extent[0] x extent[1] runs of `run` units. */
typedef struct d_pages { char *data; int64_t page, token, stride[2], tokens, extent[2], run; } d_pages;
typedef struct d_copy { int32_t src, dst; } d_copy;

typedef struct d_copies {
    d_pages pages[2];                   /* of K, of V */
    int32_t num_copies, unit;           /* bytes that a thread moves at a time: 1, 2, 4, 8, 16 */
    d_copy copies[D_COPIES];
} d_copies;

#ifdef __CUDACC__

#define D_THREADS (32 * D_WARPS)
#define D_ALL 0xffffffffu
/* Rows are read and written from many places: one copy of the code, not one for each. */
#define D_SHARED_CODE static __device__ __noinline__

FV_DEVICE int d_bits(int type) { return type == D_F32 ? 32 : type <= D_BF16 ? 16 : type == D_E2M1 ? 4 : 8; }
FV_DEVICE char *d_at(const d_tensor &t, int64_t element) { return t.data + (element * d_bits(t.type) >> 3); }
FV_DEVICE int64_t d_read(const d_index &x, int64_t i)
{
    return x.is64 ? ((const int64_t *)x.data)[i * x.stride] : ((const int32_t *)x.data)[i * x.stride];
}

/* ------------------------------------------------------------------------------------ one element, from and to its bits */

FV_DEVICE float d_decode(int type, uint32_t code)
{
    if (type == D_F32) return __uint_as_float(code);
    if (type == D_BF16) return __uint_as_float(code << 16);
    const uint32_t u = (code & 0x7fff) << 13;
    uint32_t r = u + (112u << 23);
    if (u < 1u << 23) r = __float_as_uint(__uint_as_float(u + (113u << 23)) - 6.103515625e-05f);
    if (u >= 31u << 23) r = u + (224u << 23);
    return __uint_as_float(r | (code & 0x8000) << 16);
}

FV_DEVICE uint32_t d_encode_f16(float x)
{
    const uint32_t all = __float_as_uint(x), u = all & 0x7fffffff;
    uint32_t r = (u - (112u << 23) + 0xfff + (u >> 13 & 1)) >> 13;
    if (u < 0x38800000) r = __float_as_uint(fabsf(x) + 0.5f) - 0x3f000000;
    if (u >= 0x477ff000) r = 0x7c00;
    if (u > 0x7f800000) r = 0x7e00 | (u >> 13 & 0x3ff);
    return r | (all >> 16 & 0x8000);
}

FV_DEVICE uint32_t d_encode_bf16(float x)
{
    const uint32_t u = __float_as_uint(x);
    return x != x ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

/* Floats of EXPONENT bias and FRACTION bits: saturating at `largest`; below `least_normal`, adding `magic` leaves multiples of the smallest. */
FV_DEVICE uint32_t d_encode_small(float x, float largest, float least_normal, float magic, int fraction, uint32_t rebias)
{
    const float y = fminf(fabsf(x), largest);
    const uint32_t u = __float_as_uint(y);
    const int drop = 23 - fraction;
    const uint32_t normal = (u - (rebias << 23) + ((1u << (drop - 1)) - 1) + (u >> drop & 1)) >> drop;
    return y < least_normal ? __float_as_uint(y + magic) - __float_as_uint(magic) : normal;
}

FV_DEVICE uint32_t d_encode_e4m3(float x)
{
    if (x != x) return 0x7f;
    return d_encode_small(x, 448.0f, 0.015625f, 16384.0f, 3, 120) | (__float_as_uint(x) >> 24 & 0x80);
}

FV_DEVICE float d_decode_e4m3(uint32_t code)            /* of a scale: positive, finite */
{
    const uint32_t u = (code & 0x7f) << 20;
    return u < 1u << 23 ? __uint_as_float(u + (121u << 23)) - 0.015625f : __uint_as_float(u + (120u << 23));
}

FV_DEVICE uint32_t d_encode(int type, float x)
{
    switch (type) {
    case D_F32: return __float_as_uint(x);
    case D_F16: return d_encode_f16(x);
    case D_BF16: return d_encode_bf16(x);
    case D_E4M3: return d_encode_e4m3(x);
    case D_E5M2: return x != x ? 0x7f : d_encode_small(x, 57344.0f, 6.103515625e-05f, 128.0f, 2, 112) | (__float_as_uint(x) >> 24 & 0x80);
    case D_INT8: return x != x ? 0 : __float_as_uint(fminf(fmaxf(x, -128.0f), 127.0f) + 12582912.0f) & 0xff;
    default: return x != x ? 0 : d_encode_small(x, 6.0f, 1.0f, 4194304.0f, 1, 126) | (__float_as_uint(x) >> 28 & 8);
    }
}

/* ---------------------------------------------------------------------------------------------- four elements, and rows */

/* Up to four elements of f32, f16 or bf16 from `at`; what is missing is 0. `whole`: all four, at an address that is a multiple of their size. */
FV_DEVICE void d_load_quad(int type, const char *at, int count, bool whole, float (&x)[4])
{
    if (whole && type == D_F32) {
        const float4 v = *(const float4 *)at;
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else if (whole) {
        const uint2 v = *(const uint2 *)at;
        x[0] = d_decode(type, v.x & 0xffff), x[1] = d_decode(type, v.x >> 16);
        x[2] = d_decode(type, v.y & 0xffff), x[3] = d_decode(type, v.y >> 16);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = 0.0f;
            if (i < count) x[i] = d_decode(type, type == D_F32 ? ((const uint32_t *)at)[i] : ((const uint16_t *)at)[i]);
        }
    }
}

FV_DEVICE void d_store_quad(int type, char *at, int count, bool whole, const float (&x)[4])
{
    uint32_t c[4];
#pragma unroll
    for (int i = 0; i < 4; i++) c[i] = d_encode(type, x[i]);
    const int bits = d_bits(type);
    if (whole) {
        if (bits == 32) *(uint4 *)at = make_uint4(c[0], c[1], c[2], c[3]);
        else if (bits == 16) *(uint2 *)at = make_uint2(c[0] | c[1] << 16, c[2] | c[3] << 16);
        else if (bits == 8) *(uint32_t *)at = c[0] | c[1] << 8 | c[2] << 16 | c[3] << 24;
        else *(uint16_t *)at = (uint16_t)(c[0] | c[1] << 4 | c[2] << 8 | c[3] << 12);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (i >= count) break;
        if (bits == 32) ((uint32_t *)at)[i] = c[i];
        else if (bits == 16) ((uint16_t *)at)[i] = (uint16_t)c[i];
        else if (bits == 8) ((uint8_t *)at)[i] = (uint8_t)c[i];
        else if (i % 2 == 0) ((uint8_t *)at)[i / 2] = (uint8_t)(c[i] | c[i + 1] << 4);
    }
}

FV_DEVICE bool d_aligned(const char *p, int bits) { return (uint64_t)p % (uint64_t)(bits / 2) == 0; }

/* A row into a warp's shared memory, as floats. */
D_SHARED_CODE void d_read_row(const d_tensor &t, int64_t element, float *out, int lane)
{
    const int bits = d_bits(t.type);
    const char *row = d_at(t, element);
    const bool aligned = d_aligned(row, bits);
#pragma unroll 1
    for (int i = 4 * lane; i < t.width; i += 128) {
        float x[4];
        d_load_quad(t.type, row + i * bits / 8, t.width - i, aligned && i + 4 <= t.width, x);
        for (int k = 0; k < 4; k++) if (i + k < t.width) out[i + k] = x[k];
    }
}

D_SHARED_CODE void d_write_row(const d_tensor &t, int64_t element, const float *in, float by, int lane)
{
    const int bits = d_bits(t.type);
    char *row = d_at(t, element);
    const bool aligned = d_aligned(row, bits);
#pragma unroll 1
    for (int i = 4 * lane; i < t.width; i += 128) {
        float x[4];
        for (int k = 0; k < 4; k++) {
            x[k] = i + k < t.width ? in[i + k] : 0.0f;
            if (by != 1.0f) x[k] = __fdiv_rn(x[k], by);
        }
        d_store_quad(t.type, row + i * bits / 8, t.width - i, aligned && i + 4 <= t.width, x);
    }
}

/* The bytes as they are. A row may be copied onto itself. */
FV_DEVICE void d_copy_row(const d_tensor &from, int64_t element, const d_tensor &to, int64_t to_element, int lane)
{
    const char *a = d_at(from, element);
    char *b = d_at(to, to_element);
    const int bytes = from.width * d_bits(from.type) / 8;
    if (a == b) return;
    if (((uint64_t)a | (uint64_t)b | (uint64_t)bytes) % 16 == 0)
        for (int i = 16 * lane; i < bytes; i += 512) *(uint4 *)(b + i) = *(const uint4 *)(a + i);
    else if (((uint64_t)a | (uint64_t)b | (uint64_t)bytes) % 4 == 0)
        for (int i = 4 * lane; i < bytes; i += 128) *(uint32_t *)(b + i) = *(const uint32_t *)(a + i);
    else
        for (int i = 2 * lane; i < bytes; i += 64) *(uint16_t *)(b + i) = *(const uint16_t *)(a + i);
}

/* ---------------------------------------------------------------------------------------------------------- rotation */

/* cos and sin of position * frequency, by the steps of the CPU. */
FV_DEVICE void d_turn(int position, float frequency, float &c, float &s)
{
    const double magic = 6755399441055744.0;
    const double angle = (double)position * (double)frequency;
    const double quarters = (angle * 0x1.45f306dc9c883p-1 + magic) - magic;
    const double r = ((angle - quarters * 0x1.921fbp+0) - quarters * 0x1.5110bp-22) - quarters * 0x1.18469898cc517p-44;
    const double z = r * r;
    double ps = z * (-1.0 / 39916800) + 1.0 / 362880;
    ps = ps * z + -1.0 / 5040;
    ps = ps * z + 1.0 / 120;
    ps = ps * z + -1.0 / 6;
    ps = ps * z * r + r;
    double pc = z * (1.0 / 479001600) + -1.0 / 3628800;
    pc = pc * z + 1.0 / 40320;
    pc = pc * z + -1.0 / 720;
    pc = pc * z + 1.0 / 24;
    pc = pc * z + -0.5;
    pc = pc * z + 1.0;
    const double fours = (quarters * 0.25 + magic) - magic;
    const uint32_t q = (uint32_t)(int32_t)(quarters - fours * 4.0);
    const float fs = (float)ps, fc = (float)pc;
    s = __uint_as_float(__float_as_uint(q & 1 ? fc : fs) ^ (q & 2) << 30);
    c = __uint_as_float(__float_as_uint(q & 1 ? fs : fc) ^ ((q + 1) & 2) << 30);
}

struct alignas(16) d_turns { float c[D_MAX_DIM / 2], s[D_MAX_DIM / 2]; };       /* of each pair at one position */

FV_DEVICE void d_make_turns(const d_rotary &rotary, int position, d_turns &t, int thread, int threads)
{
    for (int i = thread; i < rotary.dim / 2; i += threads) d_turn(position, rotary.frequencies[i], t.c[i], t.s[i]);
}

/* The first rotary.dim elements of a row in shared memory; each pair is one lane's. */
FV_DEVICE void d_rotate(const d_rotary &rotary, const d_turns &t, float *x, int lane)
{
    const int half = rotary.dim / 2;
    for (int i = lane; i < half; i += 32) {
        const int a = rotary.interleaved ? 2 * i : i, b = rotary.interleaved ? a + 1 : i + half;
        const float lo = x[a], hi = x[b], c = t.c[i], s = t.s[i];
        x[a] = lo * c - hi * s;
        x[b] = hi * c + lo * s;
    }
}

/* Head `head` of row `row` of x into y, turned where the rotary has a width. `room` is the warp's. */
FV_DEVICE void d_turn_head(const d_rotary &rotary, const d_turns &t, const d_tensor &x, const d_tensor &y, int64_t row, int head, float *room, int lane)
{
    const int64_t from = row * x.stride[0] + head * x.stride[1], to = row * y.stride[0] + head * y.stride[1];
    if (!rotary.dim && x.type == y.type) {
        d_copy_row(x, from, y, to, lane);
        return;
    }
    d_read_row(x, from, room, lane);
    __syncwarp();
    if (rotary.dim) d_rotate(rotary, t, room, lane);
    __syncwarp();
    d_write_row(y, to, room, 1.0f, lane);
    __syncwarp();
}

#endif
#endif
