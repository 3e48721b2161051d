/* SPDX-License-Identifier: Apache-2.0 */
/* sample.cuh -- a row of values and a block of threads: the largest, tallies, thresholds, draws. The nouns and all steps that round are those of
 * cpu/sample_tmpl.c, so the bits are the CPU's (programs are compiled with --fmad=false).
 *
 * Every function here is called by all threads of the block and gives all of them the same. Warps take chunks of S_CHUNK elements in turn; a
 * pass that adds weights leaves the sum of each chunk in shared memory, so that a draw looks at one chunk only. After the first pass rows come
 * from the caches. */
#ifndef FV_SAMPLE_CUH
#define FV_SAMPLE_CUH

enum { S_WARPS = D_SAMPLE_THREADS / 32, S_CHUNK = 1024, S_CHUNKS = D_MAX_VOCAB / S_CHUNK, S_FEW = S_CHUNKS };
enum { S_RAW, S_PROBABILITIES, S_LOGITS, S_DIFFERENCE };

#define S_LEAST 1.17549435e-38f         /* the smallest normal number */
#define S_LARGEST 3.40282347e+38f

struct s_room {                         /* shared memory of a block */
    uint64_t part[S_CHUNKS];            /* weights of each chunk, of the last pass that added them */
    uint64_t sums[S_WARPS];
    int counts[S_WARPS];
    float low[S_WARPS], high[S_WARPS];
    float value;
    int id;
};

struct s_source {
    d_row x, minus;
    int kind;
    float most, inverse, top, scale;        /* logits: the largest, 1 / temperature (0: only the largest count) */
};

struct s_tally { int count; uint64_t sum; float least, below; };

/* ------------------------------------------------------------------------------------------------------------- values */

FV_DEVICE float s_exp(float x)
{
    if (!(x >= -87.0f)) return 0.0f;
    const float magic = 12583039.0f;
    const float t = x * 1.44269504088896341f + magic, whole = t - magic;
    float r = x - whole * 0.693145751953125f;
    r = r - whole * 1.42860682030941723e-6f;
    float p = 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * __uint_as_float(__float_as_uint(t) << 23);
}

FV_DEVICE float s_clean(float x) { return x >= S_LEAST ? (x <= S_LARGEST ? x : S_LARGEST) : 0.0f; }

/* What is seldom or long is one piece of code, not one a pass: other types and ends of rows, exponentials. */
static __device__ __noinline__ float4 s_load(const d_row &row, int i)
{
    float x[4];
    d_get(row, i, x);
    const float4 all = { x[0], x[1], x[2], x[3] };
    return all;
}

FV_DEVICE float s_logit(float x, float most, float inverse) { return x == most ? 1.0f : inverse > 0.0f ? s_exp((x - most) * inverse) : 0.0f; }

static __device__ __noinline__ float4 s_logits(float4 x, float most, float inverse)
{
    x.x = s_logit(x.x, most, inverse), x.y = s_logit(x.y, most, inverse);
    x.z = s_logit(x.z, most, inverse), x.w = s_logit(x.w, most, inverse);
    return x;
}

FV_DEVICE float4 s_four(const d_row &row, int i)
{
    return row.type == D_F32 && row.aligned && i + 4 <= row.width ? *(const float4 *)(row.at + 4 * (int64_t)i) : s_load(row, i);
}

/* Four values from i on; behind the end 0, raw NaN. */
FV_DEVICE void s_get(const s_source &s, int i, float (&x)[4])
{
    float4 v = s_four(s.x, i);
    if (s.kind == S_DIFFERENCE) {
        const float4 other = s_four(s.minus, i);
        v.x = v.x - other.x, v.y = v.y - other.y, v.z = v.z - other.z, v.w = v.w - other.w;
    }
    if (s.kind == S_LOGITS) v = s_logits(v, s.most, s.inverse);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    const bool raw = s.kind == S_RAW;
    for (int k = 0; k < 4; k++) {
        if (!raw) x[k] = s_clean(x[k]);
        if (i + k >= s.x.width) x[k] = raw ? __uint_as_float(0x7fc00000u) : 0.0f;
    }
}

FV_DEVICE uint64_t s_weight(float x, float scale)
{
    const float a = x * scale;
    const uint32_t u = __float_as_uint(a);
    if (a < 8388608.0f) return __float_as_uint(a + 8388608.0f) - 0x4b000000u;
    return (uint64_t)((u & 0x7fffff) | 0x800000) << ((u >> 23) - 150);
}

/* ------------------------------------------------------------------------------------------------- over warp and block */

FV_DEVICE uint64_t s_warp_sum(uint64_t x)
{
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(D_ALL, x, by);
    return x;
}

/* The sum of lanes 0 .. lane. */
FV_DEVICE uint64_t s_scan(uint64_t x, int lane)
{
    for (int by = 1; by < 32; by *= 2) {
        const uint64_t left = __shfl_up_sync(D_ALL, x, by);
        if (lane >= by) x += left;
    }
    return x;
}

FV_DEVICE float s_least(float a, float b) { return b < a ? b : a; }
FV_DEVICE float s_most(float a, float b) { return b > a ? b : a; }

FV_DEVICE void s_warp_join(s_tally &t)
{
    t.count = __reduce_add_sync(D_ALL, t.count);
    for (int by = 16; by > 0; by /= 2) {
        t.least = s_least(t.least, __shfl_xor_sync(D_ALL, t.least, by));
        t.below = s_most(t.below, __shfl_xor_sync(D_ALL, t.below, by));
    }
}

/* `t.sum` is the warp's already. */
FV_DEVICE s_tally s_join(s_tally t, s_room &room)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    s_warp_join(t);
    if (lane == 0) room.counts[warp] = t.count, room.sums[warp] = t.sum, room.low[warp] = t.least, room.high[warp] = t.below;
    __syncthreads();
    t.count = room.counts[lane];
    t.least = room.low[lane];
    t.below = room.high[lane];
    t.sum = s_warp_sum(room.sums[lane]);
    s_warp_join(t);
    __syncthreads();
    return t;
}

/* ------------------------------------------------------------------------------------------------------------- passes */

template <bool SUMS, bool NEAR> static __device__ __noinline__ s_tally s_survey(const s_source &s, float at_least, s_room &room)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = s.x.width;
    s_tally t = { 0, 0, fv_inf(), -fv_inf() };
    for (int chunk = warp; chunk * S_CHUNK < n; chunk += S_WARPS) {
        uint64_t sum = 0;
#pragma unroll 1
        for (int i = chunk * S_CHUNK + 4 * lane; i < fv_min((chunk + 1) * S_CHUNK, n); i += 128) {
            float x[4];
            s_get(s, i, x);
            for (int k = 0; k < 4; k++) {
                const bool in = x[k] >= at_least;
                t.count += in;
                if (SUMS && in) sum += s_weight(x[k], s.scale);
                if (NEAR && in) t.least = s_least(t.least, x[k]);
                if (NEAR && x[k] < at_least) t.below = s_most(t.below, x[k]);
            }
        }
        if (!SUMS) continue;
        sum = s_warp_sum(sum);
        if (lane == 0) room.part[chunk] = sum;
        t.sum += sum;
    }
    return s_join(t, room);
}

/* The largest value that is not NaN. */
static __device__ __noinline__ float s_largest(const s_source &s, s_room &room)
{
    s_tally t = { 0, 0, fv_inf(), -fv_inf() };
    for (int i = 4 * threadIdx.x; i < s.x.width; i += 4 * D_SAMPLE_THREADS) {
        float x[4];
        s_get(s, i, x);
        for (int k = 0; k < 4; k++) t.below = s_most(t.below, x[k]);
    }
    return s_join(t, room).below;
}

FV_DEVICE void s_set_scale(s_source &s)
{
    const int shift = fv_min(40 - ((int)(__float_as_uint(s.top) >> 23 & 255) - 127), 126);
    s.scale = __uint_as_float((uint32_t)(shift + 127) << 23);
}

FV_DEVICE void s_open(s_source &s, const d_row &x, int kind, float temperature, s_room &room)
{
    s.x = s.minus = x;
    s.kind = kind == S_LOGITS ? (int)S_RAW : kind;
    s.inverse = temperature > 0.0f ? __fdiv_rn(1.0f, temperature) : 0.0f;
    s.scale = 0.0f;
    s.top = s.most = s_largest(s, room);
    s.kind = kind;
    if (kind == S_LOGITS) s.top = s.most > -fv_inf() ? 1.0f : 0.0f;
    if (kind != S_RAW && s.top > 0.0f) s_set_scale(s);
}

/* --------------------------------------------------------------------------------------------------------- thresholds */

FV_DEVICE uint32_t s_key(float x)
{
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

FV_DEVICE float s_float(uint32_t key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

/* Where a search is: values >= lo are enough, those > hi are not. base: of values that the source lacks, all of them > hi. */
struct s_search { uint32_t lo, hi; int from_lo, above, base; uint64_t above_sum, base_sum; };

/* One pass; false: a set of exactly the size that is asked for has been met. */
template <bool BY_SUM> FV_DEVICE bool s_step(const s_source &s, int count, double sum, s_search &at, s_room &room)
{
    const float t = s_float(at.lo + (at.hi - at.lo + 1) / 2);
    const s_tally r = s_survey<BY_SUM, true>(s, t, room);
    const int all = at.base + r.count;
    const uint64_t all_sum = at.base_sum + r.sum;
    if (BY_SUM ? (double)all_sum >= sum : all >= count) {
        at.lo = s_key(r.least);
        at.from_lo = all;
        return BY_SUM || all != count;
    }
    const uint32_t next = s_key(r.below);
    at.hi = next > at.lo ? next : at.lo;
    at.above = all;
    at.above_sum = all_sum;
    return true;
}

/* Values between the ends, to `out` in shared memory, in any order. */
static __device__ __noinline__ int s_gather(const s_source &s, float lo, float hi, float *out, s_room &room)
{
    if (threadIdx.x == 0) room.id = 0;
    __syncthreads();
    for (int i = 4 * threadIdx.x; i < s.x.width; i += 4 * D_SAMPLE_THREADS) {
        float x[4];
        s_get(s, i, x);
        for (int k = 0; k < 4; k++)
            if (x[k] >= lo && x[k] <= hi) out[atomicAdd(&room.id, 1)] = x[k];
    }
    __syncthreads();
    const int count = room.id;
    __syncthreads();
    return count;
}

/* BY_SUM: at least `sum` in weight, else at least `count` values. Sums of chunks that were there are lost. */
template <bool BY_SUM> FV_DEVICE float s_threshold(const s_source &s, int count, double sum, float lowest, s_room &room)
{
    float *few = (float *)(room.part + S_CHUNKS / 2);   /* the chunks of so few values are in the other half */
    s_search at = { s_key(lowest), s_key(s.top), s.x.width, 0, 0, 0, 0 };
    while (at.lo < at.hi && at.from_lo - at.above > S_FEW)
        if (!s_step<BY_SUM>(s, count, sum, at, room)) return s_float(at.lo);
    if (at.lo >= at.hi) return s_float(at.lo);
    s_source rest = s;
    rest.x.width = s_gather(s, s_float(at.lo), s_float(at.hi), few, room);
    rest.x.at = (char *)few;
    rest.x.type = D_F32;
    rest.x.aligned = true;
    rest.kind = S_RAW;
    at.base = at.above;
    at.base_sum = at.above_sum;
    while (at.lo < at.hi && s_step<BY_SUM>(rest, count, sum, at, room)) { }
    return s_float(at.lo);
}

FV_DEVICE int64_t s_read(const d_ints &x, int64_t i, int64_t j)
{
    const int64_t at = i * x.stride[0] + j * x.stride[1];
    return x.is64 ? ((const int64_t *)x.data)[at] : ((const int32_t *)x.data)[at];
}

FV_DEVICE void s_write(const d_ints &x, int64_t i, int64_t j, int64_t value)
{
    const int64_t at = i * x.stride[0] + j * x.stride[1];
    if (x.is64) ((int64_t *)x.data)[at] = value;
    else ((int32_t *)x.data)[at] = (int32_t)value;
}

FV_DEVICE float s_number(const d_param &p, int64_t i) { return p.kind == D_FLOATS ? ((const float *)p.data)[i * p.stride] : p.number; }

/* 1 .. 2^31 - 1; a number comes as an entry of its own, behind the parameter (companions.c). */
FV_DEVICE int s_count(const d_param &p, int64_t i)
{
    int64_t k = p.stride;
    if (p.kind == D_INTS) k = ((const int32_t *)p.data)[i * p.stride];
    if (p.kind == D_LONGS) k = ((const int64_t *)p.data)[i * p.stride];
    return k < 1 ? 1 : k > 0x7fffffff ? 0x7fffffff : (int)k;
}

FV_DEVICE float s_share(const d_param &p, int64_t i)
{
    const float x = s_number(p, i);
    return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;
}

FV_DEVICE float s_top_k(const s_source &s, int k, float lowest, s_room &room)
{
    return k < s.x.width ? s_threshold<false>(s, k, 0.0, lowest, room) : lowest;
}

/* -------------------------------------------------------------------------------------------------------------- draws */

FV_DEVICE uint64_t s_draw(const d_random &random, int64_t index, uint32_t number)
{
    const uint64_t seed = random.seeds.data ? (uint64_t)s_read(random.seeds, index, 0) : random.seed;
    const uint64_t offset = random.offsets.data ? (uint64_t)s_read(random.offsets, index, 0) : random.offset;
    uint32_t c0 = (uint32_t)offset, c1 = (uint32_t)(offset >> 32), c2 = (uint32_t)index, c3 = number;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)c0 * 0xd2511f53u, b = (uint64_t)c2 * 0xcd9e8d57u;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return (uint64_t)c1 << 32 | c0;
}

/* The chunk in which the running sum exceeds r; r becomes what is left of it there. */
FV_DEVICE int s_find_chunk(int n, uint64_t &r, const s_room &room, int lane)
{
    const int chunks = fv_div_up(n, S_CHUNK);
    for (int first = 0; first < chunks; first += 32) {
        const uint64_t mine = first + lane < chunks ? room.part[first + lane] : 0;
        const uint64_t up = s_scan(mine, lane), all = __shfl_sync(D_ALL, up, 31);
        if (r < all) {
            const int at = __ffs((int)__ballot_sync(D_ALL, r < up)) - 1;
            r -= __shfl_sync(D_ALL, up - mine, at);
            return first + at;
        }
        r -= all;
    }
    return 0;                           /* r is below the row's sum: never reached */
}

/* The first id at which the running sum of values >= t exceeds r, which is below their sum. The last pass that added weights had the same t. */
static __device__ __noinline__ int s_find(const s_source &s, float t, uint64_t r, s_room &room, float &value)
{
    const int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        const int chunk = s_find_chunk(s.x.width, r, room, lane);
        for (int first = chunk * S_CHUNK; first < fv_min((chunk + 1) * S_CHUNK, s.x.width); first += 128) {
            const int i = first + 4 * lane;
            float x[4] = {};
            uint64_t w[4], mine = 0;
            if (i < s.x.width) s_get(s, i, x);
            for (int k = 0; k < 4; k++) mine += w[k] = x[k] >= t ? s_weight(x[k], s.scale) : 0;
            const uint64_t up = s_scan(mine, lane), all = __shfl_sync(D_ALL, up, 31);
            if (r >= all) {
                r -= all;
                continue;
            }
            if (r < up && r >= up - mine) {
                r -= up - mine;
                int k = 0;
                for (; k < 3 && r >= w[k]; k++) r -= w[k];
                room.id = i + k;
                room.value = k == 0 ? x[0] : k == 1 ? x[1] : k == 2 ? x[2] : x[3];
            }
            break;
        }
    }
    __syncthreads();
    const int id = room.id;
    value = room.value;
    __syncthreads();
    return id;
}

#endif
