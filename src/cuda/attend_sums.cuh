/* SPDX-License-Identifier: Apache-2.0 */
/* attend_sums.cuh -- the second pass of FV_KEY_SUM: how much weight each key got, from scores made once more and the lse that the first pass wrote.
 *
 * Nouns
 *   column       a key as its request counts it, at the place that the output has for it: the keys of all requests, one request after another
 *   item         up to SUM_KEYS columns of one request x a kv head. One block makes an item from beginning to end; blocks take them by turns
 *   tile of rows rows of one segment and one head unit, as many as the largest kind holds; rows of other requests count for none
 *
 * An item's keys of a segment stay in the ring's slots while tiles of rows go by: S = Q K' by the first pass's code (scores, hooks, masks of
 * attend_sm80.cu), p = exp2(S - lse), the hook, then a sum over the tile's rows: in a thread, over the warp's eight lanes of a column, and into sums[] in
 * shared memory, where each place is one warp's.
 *
 *   (1) the order of a column's sum is that of segments, head units, tiles of rows, then of rows in a tile, whoever makes it: no atomics, the same
 *       bits in each run
 *   (2) every column of every kv head is in exactly one item, so all are written, zeros too
 *
 * Floors: K once for each tile of rows that shares it (decode: K once, half of the first pass's bytes; requests that share a prefix read it from L2);
 * 2 dim_qk FLOPs a score, half of the first pass's, and one exp2. SUM_KEYS = 192 keys x 128 rows, dims 128: 6.3 MFLOP for 32 KB of Q.
 *
 * Part of attend_sm80.cu. */
#ifndef FV_ATTEND_SUMS_CUH
#define FV_ATTEND_SUMS_CUH

/* The next item of a block is looked for from here: requests before are done with. In warp 0. */
struct sum_cursor {
    int request;
    int64_t ranges, columns;            /* of all requests before */
};

/* The block's item into S.sum, by warp 0. */
FV_DEVICE void find_item(args p, sum_cursor &c, int64_t item)
{
    const int lane = threadIdx.x, heads = PLAN.num_units / PLAN.units_per_kv_head;
    const int64_t range = item / heads;
    if (lane == 0) S.sum.count = 0;
    for (; c.request < PLAN.num_requests; c.request += 32) {
        const int r = c.request + lane, mine = r < PLAN.num_requests ? plan_array<d_request>(p, PLAN.requests)[r].num_keys : 0;
        int ranges = fv_div_up(mine, SUM_KEYS);
        int64_t columns = mine;
        for (int k = 1; k < 32; k *= 2) {
            const int more = __shfl_up_sync(ALL_LANES, ranges, k);
            const int64_t more_columns = __shfl_up_sync(ALL_LANES, columns, k);
            if (lane >= k) ranges += more, columns += more_columns;
        }
        const uint32_t past = __ballot_sync(ALL_LANES, c.ranges + ranges > range);
        if (past) {
            if (lane == __ffs(past) - 1) {
                S.sum.request = r;
                S.sum.first = (int)(range - c.ranges - (ranges - fv_div_up(mine, SUM_KEYS))) * SUM_KEYS;
                S.sum.count = fv_min(mine - S.sum.first, SUM_KEYS);
                S.sum.column = c.columns + columns - mine + S.sum.first;
                S.sum.kv_head = (int)(item % heads);
            }
            return;
        }
        c.ranges += __shfl_sync(ALL_LANES, ranges, 31);
        c.columns += __shfl_sync(ALL_LANES, columns, 31);
    }
}

/* The position of the item's first key. */
FV_DEVICE int sum_position(args p) { return plan_array<d_request>(p, PLAN.requests)[S.sum.request].first_position + S.sum.first; }

/* May the segment have rows of the item's request and head, and keys of its range? */
FV_DEVICE bool concerns(args p, const d_segment &g)
{
    const int unit = S.sum.kv_head * PLAN.units_per_kv_head, position = sum_position(p);
    if (g.request >= 0 && g.request != S.sum.request) return false;
    if (g.unit_first >= unit + PLAN.units_per_kv_head || g.unit_first + g.num_units <= unit) return false;
    if (PLAN.page_size && g.page_positions >= 0) return true;
    return g.first_position < position + S.sum.count && g.first_position + g.num_keys > position;
}

/* Chooses tiles of keys for W's rows; which of them the rows may see goes to S.sum, W keeps what is present. By one thread. */
FV_DEVICE void choose_sum_tiles()
{
    const int begin = W.keys.begin, end = W.keys.end;
    choose_tiles(S.sum.over);
    S.sum.seen_begin = W.keys.begin;
    S.sum.seen_end = W.keys.end;
    W.keys.begin = begin;
    W.keys.end = end;
}

/* The next tile of rows that may see one of the keys into W and S.rows. False: there is none. */
COLD bool open_sum_rows(args p, int segment, int unit, int key0)
{
    __syncthreads();                    /* the tile before is done with W and S.rows */
    if (threadIdx.x == 0) {
        const d_segment &g = plan_array<d_segment>(p, PLAN.segments)[segment];
        const int first = fv_max(key0, 0), end = fv_min(key0 + SUM_KEYS, g.num_keys), most = FV_ROWS / PLAN.unit_heads;
        S.sum.over = first - key0;
        W.packed = 0;
        while (W.packed == 0 && S.sum.row < S.sum.row_end) {
            const d_piece c = { segment, S.sum.row, fv_min(most, S.sum.row_end - S.sum.row), unit, first, end - first, -1, -1 };
            set_work(p, c, false);
            S.sum.row += most;
            if (!W.exact) {
                W.bounded = -1;
            } else {
                choose_sum_tiles();
                if (S.sum.seen_begin >= S.sum.seen_end) W.packed = 0;
            }
        }
    }
    __syncthreads();
    if (W.packed == 0) return false;
    open_rows(p, [](const row_info &r) { return r.request == S.sum.request; }, [] { choose_sum_tiles(); });
    return true;
}

/* The item's keys of W's segment, into the slots of the ring. */
COLD void load_sum_keys(args p)
{
    enum { GROUPS = fv_div_up(SUM_TILES, FV_LOOK) };
    page_ids ids[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; i++) ids[i] = fetch_ids(memory, i * FV_LOOK);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) publish(p, memory, i * FV_LOOK, ids[i]);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < SUM_TILES; i++) load_tile<false>(p, memory, W.tiles, i, i);
#if FV_KEYS_IN_PLACE
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < fv_min(SUM_TILES, W.tiles.count); i++) hook_keys(p, i, i);
#endif
}

/* The base 2 lse of a packed row; +inf where there is no row or it saw nothing: then every weight is 0. */
FV_DEVICE float row_lse(args p, const row_info &r)
{
    if (r.row < 0) return fv_inf();
    const float lse = p.lse[r.row * p.lse_stride[0] + r.head * p.lse_stride[1]];
    return lse == -fv_inf() ? fv_inf() : p.lse_factor == 1.0f ? lse : lse * LOG2E;
}

/* Sums of N values each over the eight lanes that are alike modulo 4, in halves: sums [first, first + N / 8) are left in x[0] ..; of four values pairs
 * of lanes have the same one. */
template <int N> FV_DEVICE void sum_lanes(float (&x)[N], int &first)
{
    const int lane = this_thread() % 32;
    first = 0;
#pragma unroll
    for (int k = 16, n = N; k >= 4; k /= 2) {
        const bool high = lane & k;
        if (n == 1) {
            x[0] += __shfl_xor_sync(ALL_LANES, x[0], k);
            continue;
        }
        n /= 2;
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            if (i >= n) break;
            const float theirs = __shfl_xor_sync(ALL_LANES, high ? x[i] : x[i + n], k);
            x[i] = (high ? x[i + n] : x[i]) + theirs;
        }
        if (high) first += n;
    }
}

/* The weights of a tile's scores through the hook, summed over this warp's rows, into its line of sums. */
template <int MT, int WR, int ST> FV_DEVICE void add_weights(args p, float (&s)[MT][ST][4], const float (&lse)[MT][2], float factor, int tile,
                                                             const part &at)
{
    enum { N = 2 * ST };
    const int lane = this_thread() % 32, j = lane & 3;
    float x[N];
    v_at rows[MT][2];
    int first;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
        for (int h = 0; h < 2; h++) rows[mt][h] = at_row(p, S.rows[at.row + mt * 16 * WR + h * 8 + lane / 4]);
#pragma unroll
    for (int c = 0; c < N; c++) {
        const int position = S.position[tile & (PLACES - 1)][at.key + c / 2 * 8 + 2 * j + c % 2];
        x[c] = 0;
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float score = s[mt][c / 2][2 * h + c % 2], weight = ex2_approx(fmaf(score, factor, -lse[mt][h]));
                const bool seen = score != -fv_inf() && lse[mt][h] != fv_inf();
                x[c] += seen ? fv_key_sum(weight, USES, at_key(rows[mt][h], position)) : 0.0f;
            }
    }
    sum_lanes<N>(x, first);
    if (N < 8 && lane & 4) return;
#pragma unroll
    for (int i = 0; i < (N < 8 ? 1 : N / 8); i++) {
        const int c = first + i;
        S.sum.sums[at.row / 16][tile * FV_T + at.key + c / 2 * 8 + 2 * j + c % 2] += x[i];
    }
}

/* One tile of rows against the keys in the slots. Warps that the kind sets on different columns of V take the tiles of keys by turns. */
template <int MT, int WR, int WV, int WK> KIND_CODE void sum_rows(args p)
{
    enum { ST = FV_T / 8 / WK };
    const float factor = score_factor(p);
    const part me = this_part<WR, WV, WK>();
    const int lane = this_thread() % 32;
    float lse[MT][2];
    load_q(p, 16 * MT * WR);
    cp_async_commit_group();
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
        for (int h = 0; h < 2; h++) lse[mt][h] = row_lse(p, S.rows[me.row + mt * 16 * WR + h * 8 + lane / 4]);
    cp_async_wait_group<0>();
    __syncthreads();
#pragma unroll 1
    for (int tile = this_thread() / 32 / WR % WV; tile < W.tiles.count; tile += WV) {
        const int key = W.keys.zero + tile * FV_T;
        if (key >= S.sum.seen_end || key + FV_T <= S.sum.seen_begin) continue;
        float s[MT][ST][4];
        scores<MT, WR, ST>(memory, s, SLOT_AT(tile), me.row, me.key);
        /* keys stay while W goes from rows to rows, so what W says of bad pages is of other keys */
        hooked<MT> hooks;
#if FV_SCALED
        find_hooked<MT, WR>(p, hooks, me);
#endif
        see<MT, WR, ST>(p, s, is_clear(W.tiles, tile) && !has_bad(tile), SLOT_AT(tile), tile, me, hooks);
        add_weights<MT, WR, ST>(p, s, lse, factor, tile, me);
    }
}

/* The sums of all warps' rows join their columns. Where pages have positions of their own, a column looks for its keys. */
COLD void join_columns(args p)
{
    __syncthreads();
    const int position = sum_position(p);
    for (int c = threadIdx.x; c < S.sum.count; c += NT) {
        float x = S.sum.columns[c];
        const bool apart = W.page_positions >= 0;
#pragma unroll 1
        for (int key = apart ? 0 : c; key < (apart ? W.tiles.count * FV_T : c + 1); key++) {
            if (apart && S.position[key / FV_T & (PLACES - 1)][key % FV_T] != position + c) continue;
            for (int k = 0; k < FV_SUM_LINES; k++) x += S.sum.sums[k][key];
        }
        S.sum.columns[c] = x;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < FV_SUM_LINES * SUM_KEYS; i += NT) S.sum.sums[i / SUM_KEYS][i % SUM_KEYS] = 0;
}

/* The segment's keys [key0, key0 + SUM_KEYS), and all rows [first, end) of it that are the item's. */
COLD void sum_keys(args p, int segment, int key0, int first, int end)
{
    const d_segment &g = plan_array<d_segment>(p, PLAN.segments)[segment];
    const int units = PLAN.units_per_kv_head, unit = S.sum.kv_head * units;
    bool loaded = false;
#pragma unroll 1
    for (int u = fv_max(unit, g.unit_first); u < fv_min(unit + units, g.unit_first + g.num_units); u++) {
        if (threadIdx.x == 0) {
            S.sum.row = first;
            S.sum.row_end = end;
        }
#pragma unroll 1
        while (open_sum_rows(p, segment, u, key0)) {
            if (!loaded) load_sum_keys(p);
            loaded = true;
#define KIND(MT, WR, WV, WK) if (W.packed <= 16 * MT * WR) sum_rows<MT, WR, WV, WK>(p); else
            FV_KINDS { }
#undef KIND
        }
    }
    if (loaded) join_columns(p);
}

/* Does one of the pages of the segment's keys [key0, key0 + SUM_KEYS) have a key at one of the item's positions? */
FV_DEVICE bool touches(args p, const d_segment &g, int key0)
{
    const int size = PLAN.page_size, position = sum_position(p), end = fv_min(key0 + SUM_KEYS, g.num_keys);
    const int *positions = plan_array<int>(p, PLAN.page_positions) + g.page_positions;
    __syncthreads();
    if (threadIdx.x == 0) S.sum.any = 0;
    __syncthreads();
    for (int e = key0 / size + threadIdx.x; e * (int64_t)size < end; e += NT)
        if (positions[e] < position + S.sum.count && positions[e] + size > position) S.sum.any = 1;
    __syncthreads();
    return S.sum.any;
}

COLD void sum_segment(args p, int segment)
{
    const d_segment &g = plan_array<d_segment>(p, PLAN.segments)[segment];
    int first = 0, end = g.num_rows;
    if (g.request < 0) {                /* from the first to the last of the request's rows */
        __syncthreads();
        if (threadIdx.x == 0) {
            S.sum.row = g.num_rows;
            S.sum.row_end = 0;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < g.num_rows; i += NT)
            if (plan_array<d_listed_row>(p, PLAN.listed_rows)[g.row_first + i].request == S.sum.request) {
                atomicMin(&S.sum.row, i);
                atomicMax(&S.sum.row_end, i + 1);
            }
        __syncthreads();
        first = S.sum.row;
        end = S.sum.row_end;
        __syncthreads();
    }
    if (first >= end) return;
    if (!PLAN.page_size || g.page_positions < 0) {
        sum_keys(p, segment, sum_position(p) - g.first_position, first, end);
        return;
    }
#pragma unroll 1
    for (int key0 = 0; key0 < g.num_keys; key0 += SUM_KEYS)
        if (touches(p, g, key0)) sum_keys(p, segment, key0, first, end);
}

/* All segments that concern the item, in order; then its columns are written. */
FV_DEVICE void sum_item(args p, fv_sums out)
{
    const int t = threadIdx.x;
    for (int i = t; i < SUM_KEYS; i += NT) S.sum.columns[i] = 0;
#pragma unroll 1
    for (int first = 0; first < PLAN.num_segments; first += NT) {
        const bool mine = first + t < PLAN.num_segments && concerns(p, plan_array<d_segment>(p, PLAN.segments)[first + t]);
        const uint32_t found = __ballot_sync(ALL_LANES, mine);
        if (t % 32 == 0) S.sum.found[t / 32] = found;
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < NT; i++) {
            const uint32_t left = S.sum.found[i / 32] >> i % 32;
            if (left == 0) i |= 31;
            else if (left & 1) sum_segment(p, first + i);
        }
        __syncthreads();
    }
    for (int i = t; i < S.sum.count; i += NT) out.data[S.sum.kv_head * out.stride + S.sum.column + i] = S.sum.columns[i];
}

extern "C" __global__ void __launch_bounds__(NT, FV_CTAS) key_sums_sm80(const __grid_constant__ d_attend p)
{
    sum_cursor cursor = { 0, 0, 0 };
    open_plan(p);
    const fv_sums out = fv_sums_of(USES);
    if (!out.data) return;
    if (threadIdx.x == 32) fill_lookup(p);
    for (int i = threadIdx.x; i < FV_SUM_LINES * SUM_KEYS; i += NT) S.sum.sums[i / SUM_KEYS][i % SUM_KEYS] = 0;
#pragma unroll 1
    for (int64_t item = blockIdx.x;; item += gridDim.x) {
        __syncthreads();
        if (threadIdx.x < 32) find_item(p, cursor, item);
        __syncthreads();
        if (S.sum.count == 0) return;
        sum_item(p, out);
    }
}

#endif
