/* SPDX-License-Identifier: Apache-2.0 */
/* attend_piece.cuh -- what attend_sm80.cu does once a piece: it is opened (its rows, its tiles, Q and the first keys asked for), its rows of O go out or to
 * a slot of partials, and whoever is the last to arrive merges them. None of it is called where sums are held in registers.
 *
 * Part of attend_sm80.cu. */
#ifndef FV_ATTEND_PIECE_CUH
#define FV_ATTEND_PIECE_CUH

/* ----------------------------------------------------------------------------------------------------------------- Q */

/* One element of a packed row's query, hooks applied. */
FV_DEVICE float load_query(args p, const row_info &r, int d)
{
    const auto get = [&](int e) {
        const bool tail = e >= FV_DK - FV_TAIL;
        const d_view &v = tail ? p.q_tail : p.q;
        return fv_decode<FV_QT>(load_bits<FV_QT>(v.data, r.row * v.stride[0] + r.head * v.stride[1], tail ? e - (FV_DK - FV_TAIL) : e));
    };
#ifdef FV_HAS_QUERY
    return fv_query(get, USES, at_row(p, r), d, FV_DK);
#else
    return get(d);
#endif
}

#ifdef FV_HAS_QUERY
#define PLAIN_Q 0
#define Q_BATCH 1
#else
#define PLAIN_Q (FV_QT == FV_CT && (FV_CT == FV_F32 || fv_fields(FV_KS) == 1))
/* Words of Q asked for before the first is waited for. 1 where hardly any Q comes here; but beside so small a load_q, ptxas leaves begin_piece of wide
 * rows too few registers. */
#define Q_BATCH (PLAIN_Q && Q_UNITS <= 16 ? 1 : 8)
#endif

/* Word i of Q in the order that K's type wants. */
FV_DEVICE uint32_t query_word(args p, int i)
{
    enum { WORDS = 8 * Q_UNITS, N = FV_CT == FV_F32 ? 1 : 2 };
    const int u = i / WORDS, word = i % WORDS;
    float x[2] = { 0, 0 };
    if (u >= W.packed) return 0;
#pragma unroll
    for (int k = 0; k < N; k++) {
        const int d = fv_q_element<FV_KS>(word * N + k);
        if (d < FV_DK) x[k] = load_query(p, S.rows[u], d) * Q_UNIT;
    }
    return FV_CT == FV_F32 ? __float_as_uint(x[0]) : fv_pack<FV_CT>(x[0], x[1]);
}

/* Q of the piece's rows, and zeros up to `rows`, into shared memory: by cp.async (the caller commits) where it lies as it is wanted. */
COLD void load_q(args p, int rows)
{
    enum { CHUNKS = 2 * Q_UNITS, N = 128 / fv_bits(FV_CT), MAIN = FV_DK - FV_TAIL, WORDS = 4 * CHUNKS };
    if (PLAIN_Q && (p.wide & 4)) {
        enum { AT_ONCE = CHUNKS < 8 ? 2 : CHUNKS < 16 ? 4 : 8 };    /* rows of the block's shared memory are read before copies are asked for */
        const d_view q = p.q, q_tail = p.q_tail;
#pragma unroll 1
        for (int i0 = threadIdx.x; i0 < rows * CHUNKS; i0 += NT * AT_ONCE) {
            const char *from[AT_ONCE];
#pragma unroll
            for (int b = 0; b < AT_ONCE; b++) {
                const int i = fv_min(i0 + b * NT, rows * CHUNKS - 1), chunk = i % CHUNKS;
                const bool tail = FV_TAIL && chunk * N >= MAIN;
                const d_view &v = tail ? q_tail : q;
                const row_info r = S.rows[i / CHUNKS];
                from[b] = v.data + r.row * v.stride[0] + r.head * v.stride[1] + 16 * (tail ? chunk - MAIN / N : chunk);
                if (r.row < 0 || chunk * N >= FV_DK) from[b] = nullptr;
            }
#pragma unroll
            for (int b = 0; b < AT_ONCE; b++) {
                const int i = i0 + b * NT;
                const uint32_t to = Q_AT + q_rows::at(i / CHUNKS, i % CHUNKS);
                if (i >= rows * CHUNKS) break;
                if (from[b]) cp_async_cg_16(to, from[b]);
                else st_shared_v4(to, 0, 0, 0, 0);
            }
        }
        return;
    }
#pragma unroll 1
    for (int i0 = threadIdx.x; i0 < rows * WORDS; i0 += NT * Q_BATCH) {
        uint32_t x[Q_BATCH];
#pragma unroll
        for (int b = 0; b < Q_BATCH; b++) x[b] = i0 + b * NT < rows * WORDS ? query_word(p, i0 + b * NT) : 0;
#pragma unroll
        for (int b = 0; b < Q_BATCH; b++) {
            const int i = i0 + b * NT;
            if (i < rows * WORDS) st_shared_b32(Q_AT + q_rows::at(i / WORDS, i % WORDS / 4) + 4 * (i & 3), x[b]);
        }
    }
}

/* -------------------------------------------------------------------------------------------------------------- output */

FV_DEVICE char *output_row(const d_view &o, const row_info &r) { return o.data + r.row * o.stride[0] + r.head * o.stride[1]; }

/* Writes elements d .. d + 3 of a finished row, which lies at o. */
FV_DEVICE void write_four(args p, char *o, bool wide, const row_info &r, int d, float (&x)[4], float lse)
{
#ifdef FV_HAS_OUTPUT
    v_at at = at_row(p, r);
    const float natural = lse * (0.693147180559945309f / p.lse_factor);
    for (int i = 0; i < 4; i++) {
        at.index = d + i;
        x[i] = fv_output(x[i], natural, USES, at);
    }
#endif
    if (FV_DV % 4 == 0 && wide) {
        if (FV_OT == FV_F32) *(float4 *)(o + 4 * d) = make_float4(x[0], x[1], x[2], x[3]);
        else *(uint2 *)(o + 2 * d) = make_uint2(fv_pack<FV_OT>(x[0], x[1]), fv_pack<FV_OT>(x[2], x[3]));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) if (d + i < FV_DV) fv_store<FV_OT>(o, d + i, x[i]);
}

/* (m, l): a maximum in base 2, and the sum of exp2(score - m). */
struct fv_sum {
    float m, l, factor;                 /* factor: what sums made for another m are multiplied with */
    /* One more score in natural units joins the sum. */
    FV_DEVICE_INLINE void add(float score)
    {
        const float x = score * LOG2E, top = fmaxf(m, x), base = top == -fv_inf() ? 0.0f : top, f = ex2_approx(m - base);
        l = l * f + ex2_approx(x - base);
        factor *= f;
        m = top;
    }
};

/* What the sums of a row are multiplied with, and its lse in the wanted base. Sinks join here, once. */
FV_DEVICE float finish_row(args p, const row_info &r, float m, float l, float &lse)
{
#ifdef FV_HAS_WEIGHT
    lse = 0;
    return 1;
#else
    fv_sum sum = { m, l, 1 };
#ifdef FV_HAS_SINK
    fv_sinks(USES, at_row(p, r), sum);
#endif
    lse = sum.l > 0 ? (sum.m + lg2_approx(sum.l)) * p.lse_factor : -fv_inf();
    return sum.l > 0 ? sum.factor * rcp_approx(sum.l) : 0.0f;
#endif
}

/* m: the row's maximum in base 2, before sinks joined. */
FV_DEVICE void write_lse(args p, const row_info &r, float m, float lse)
{
#ifdef FV_HAS_ROW_MAX
    fv_row_max(m * 0.693147180559945309f, USES, at_row(p, r));
#endif
#ifndef FV_STAMPS
    if (p.lse) p.lse[r.row * p.lse_stride[0] + r.head * p.lse_stride[1]] = lse;
#endif
}

FV_DEVICE float *slot_o(args p, int slot, int g) { return p.partials + (int64_t)slot * p.slot_floats + g * O_FLOATS; }
FV_DEVICE float *slot_ml(args p, int slot, int g)
{
    return p.partials + (int64_t)slot * p.slot_floats + S.look.unit_heads * O_FLOATS + 2 * g;
}

/* What the staged copies of row i are multiplied with, and its lse, into SUMS; the sums themselves to where they are wanted. A thread a row. */
template <int COPIES> FV_DEVICE void weigh_row(args p, int first, int count, int slot, int i)
{
    const int u = first + i;
    float m = -fv_inf(), l = 0, lse = 0, w[COPIES], scale = 1;
#ifdef FV_HAS_WEIGHT
    m = 0;
    for (int c = 0; c < COPIES; c++) w[c] = 1;
#else
    for (int c = 0; c < COPIES; c++) m = fmaxf(m, SUMS[c * count + i].x);
    const float base = m == -fv_inf() ? 0.0f : m;
    for (int c = 0; c < COPIES; c++) {
        const float2 ml = SUMS[c * count + i];
        w[c] = ex2_approx(ml.x - base);
        l = fmaf(ml.y, w[c], l);
    }
#endif
    if (slot >= 0) {
        const int row = u / S.look.unit_heads, g = u - row * S.look.unit_heads;
        *(float2 *)slot_ml(p, slot + row, g) = make_float2(m, l);
    } else {
        scale = finish_row(p, S.rows[u], m, l, lse) * V_SCALE;
        write_lse(p, S.rows[u], m, lse);
    }
    for (int c = 0; c < COPIES; c++) SUMS[c * count + i] = make_float2(w[c] * scale, lse);
}

/* Packed rows first .. of the piece, staged in shared memory, go to slot + i, or (slot < 0) out. Row i is the sum of the staged rows i, i + count,
 * .. i + (COPIES - 1) count. Eight lanes a row, four elements each: several rows are read, then written, as the compiler must think that one may change
 * the other. */
template <int COPIES> PIECE_CODE void write_rows(args p, int first, int count, int slot)
{
    enum { ROWS = COPIES == 1 ? 4 : 1, COLUMNS = COPIES == 1 ? 4 : 2 };
    const d_view out = p.o;
    const bool wide = p.wide & 8;
    const int lane = threadIdx.x % 8, rows = fv_min(count, W.packed - first);
    const float *o_staged = (const float *)(memory + O_AT);
#pragma unroll 1
    for (int i = threadIdx.x; i < rows; i += NT) weigh_row<COPIES>(p, first, count, slot, i);
    __syncthreads();
#pragma unroll 1
    for (int i0 = threadIdx.x / 8; i0 < rows; i0 += NT / 8 * ROWS) {
        row_info r[ROWS];
        char *to[ROWS];
#pragma unroll
        for (int b = 0; b < ROWS; b++) {
            const int u = first + fv_min(i0 + NT / 8 * b, rows - 1), row = u / S.look.unit_heads;
            r[b] = S.rows[u];
            to[b] = slot < 0 ? output_row(out, r[b]) : (char *)slot_o(p, slot + row, u - row * S.look.unit_heads);
        }
#pragma unroll 1
        for (int d0 = 4 * lane; d0 < FV_DV; d0 += 32 * COLUMNS) {
            float y[ROWS][COLUMNS][4], lse[ROWS];
#pragma unroll
            for (int b = 0; b < ROWS; b++) {
                const int i = fv_min(i0 + NT / 8 * b, rows - 1);
                lse[b] = SUMS[i].y;
#pragma unroll
                for (int c = 0; c < COPIES; c++) {
                    const float w = SUMS[c * count + i].x;
#pragma unroll
                    for (int k = 0; k < COLUMNS; k++) {
                        const float4 x = *(const float4 *)(o_staged + o_place(c * count + i, fv_min(d0 + 32 * k, O_FLOATS - 4)));
                        y[b][k][0] = c == 0 ? x.x * w : fmaf(x.x, w, y[b][k][0]);
                        y[b][k][1] = c == 0 ? x.y * w : fmaf(x.y, w, y[b][k][1]);
                        y[b][k][2] = c == 0 ? x.z * w : fmaf(x.z, w, y[b][k][2]);
                        y[b][k][3] = c == 0 ? x.w * w : fmaf(x.w, w, y[b][k][3]);
                    }
                }
            }
#pragma unroll
            for (int b = 0; b < ROWS; b++) {
                if (i0 + NT / 8 * b >= rows) break;
#pragma unroll
                for (int k = 0; k < COLUMNS; k++) {
                    const int d = d0 + 32 * k;
                    if (d >= FV_DV) break;
                    if (slot < 0) write_four(p, to[b], wide, r[b], d, y[b][k], lse[b]);
                    else *(float4 *)(to[b] + 4 * d) = make_float4(y[b][k][0], y[b][k][1], y[b][k][2], y[b][k][3]);
                }
            }
        }
    }
}

/* The parts of one row and head, merged by a warp: (m, l), and elements d .. d + 3 in each lane. */
FV_DEVICE void merge_parts(args p, const int *parts, int num_parts, int g, int d, float &m, float &l, float (&o)[4])
{
    const int lane = threadIdx.x % 32, from = fv_min(d, O_FLOATS - 4);
#if FV_INVARIANT || defined(FV_HAS_WEIGHT)
    /* left to right, as fold_chunk does it */
#pragma unroll 8
    for (int i = 0; i < num_parts; i++) {
        const float2 ml = __ldcg((const float2 *)slot_ml(p, parts[i], g));
        const float4 x = __ldcg((const float4 *)(slot_o(p, parts[i], g) + from));
        const fold f = fold_states(m, l, ml.x, ml.y);
        o[0] = fold_value(f, o[0], x.x);
        o[1] = fold_value(f, o[1], x.y);
        o[2] = fold_value(f, o[2], x.z);
        o[3] = fold_value(f, o[3], x.w);
    }
#else
    /* 32 parts at a time: a lane has the (m, l) of one of them. No load waits for anything but the list */
    enum { AT_ONCE = FV_CTAS >= 4 ? 8 : 16 };           /* as many as there are registers for */
#pragma unroll 1
    for (int i0 = 0; i0 < num_parts; i0 += 32) {
        const bool mine = i0 + lane < num_parts;
        const int part = parts[mine ? i0 + lane : i0];
        const float2 ml = __ldcg((const float2 *)slot_ml(p, part, g));
        float weight = 0;
#pragma unroll 1
        for (int k0 = 0; k0 < 32 && i0 + k0 < num_parts; k0 += AT_ONCE) {
            float4 x[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {      /* past the last: nothing, 0 times */
                const int from_slot = __shfl_sync(ALL_LANES, part, k0 + k);
                x[k] = make_float4(0, 0, 0, 0);
                if (i0 + k0 + k < num_parts) x[k] = __ldcg((const float4 *)(slot_o(p, from_slot, g) + from));
            }
            if (k0 == 0) {
                float top = mine ? fmaxf(m, ml.x) : m;
                for (int k = 16; k > 0; k /= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, k));
                const float base = top == -fv_inf() ? 0.0f : top, alpha = ex2_approx(m - base);
                weight = mine ? ex2_approx(ml.x - base) : 0.0f;
                l = fmaf(l, alpha, ml.y * weight);
                m = top;
#pragma unroll
                for (int i = 0; i < 4; i++) o[i] *= alpha;
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                const float w = __shfl_sync(ALL_LANES, weight, k0 + k);
                o[0] = fmaf(x[k].x, w, o[0]);
                o[1] = fmaf(x[k].y, w, o[1]);
                o[2] = fmaf(x[k].z, w, o[2]);
                o[3] = fmaf(x[k].w, w, o[3]);
            }
        }
    }
    for (int k = 16; k > 0; k /= 2) l += __shfl_xor_sync(ALL_LANES, l, k);
#endif
}

/* All partials of this piece are written: counts the piece in at each of its rows, and merges the rows whose last piece it is. */
PIECE_CODE void arrive_and_merge(args p)
{
    const d_plan_head &plan = PLAN;
    const int unit_heads = S.look.unit_heads;
    __threadfence();
    __syncthreads();
    const d_record *records = plan_array<d_record>(p, plan.records);
    if ((int)threadIdx.x < W.num_rows) {
        const int i = threadIdx.x;
        const int rec = W.record >= 0 ? W.record + i : plan_array<int>(p, plan.row_record)[S.rows[i * unit_heads].row] + W.unit;
        const bool last = atomicAdd(&p.tickets[rec], 1) == records[rec].arrivals - 1;
        if (last) p.tickets[rec] = 0;
        S.last[i] = last ? rec : -1;
    }
    __syncthreads();
    __threadfence();
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int u = threadIdx.x / 32; u < W.packed; u += FV_WARPS) {
        const int rec = S.last[u / unit_heads], g = u % unit_heads;
        if (rec < 0) continue;
        const row_info r = S.rows[u];
        const int *parts = plan_array<int>(p, plan.parts) + records[rec].part_first;
#pragma unroll 1
        for (int d0 = 0; d0 < FV_DV; d0 += 128) {
            const int d = d0 + 4 * lane;
            float m = -fv_inf(), l = 0, o[4] = { 0, 0, 0, 0 }, lse;
            merge_parts(p, parts, records[rec].num_parts, g, d, m, l, o);
            const float scale = finish_row(p, r, m, l, lse) * V_SCALE;
            if (lane == 0 && d == 0) write_lse(p, r, m, lse);
            for (int i = 0; i < 4; i++) o[i] *= scale;
            if (d < FV_DV) write_four(p, output_row(p.o, r), p.wide & 8, r, d, o, lse);
        }
    }
}

/* ---------------------------------------------------------------------------------------------------------- a piece */

FV_DEVICE int64_t live_keys(args p, const d_request &q, int request)
{
    if (!STEP_HEAD.lengths) return q.num_keys;
    const int64_t live = load_index(STEP_HEAD.lengths, request * STEP_HEAD.lengths_stride, STEP_HEAD.lengths_64);
    return live < 0 ? 0 : live > q.num_keys ? q.num_keys : live;
}

/* The bad page ids of the piece that is done, whose rows are still there; by one thread. */
FV_DEVICE void report_bad_pages(args p)
{
    const lookup &l = S.look;
    const int64_t e = W.table + S.bad_entry, k = e < l.table_entries ? load_index(l.ids, e * l.ids_stride, l.ids_64) : -1;
    const bool of_v = (uint64_t)k < (uint64_t)l.num_pages;
    d_fault(p.faults, p.faults_host, 1, S.rows[0].request, S.bad_entry, of_v ? load_index(l.v_ids, e * l.v_ids_stride, l.v_ids_64) : k, S.bad_pages);
    S.bad_pages = 0;
}

/* Piece c into W, by one thread. */
FV_DEVICE void set_work(args p, const d_piece c, bool report)
{
    const d_plan_head &plan = PLAN;
    const d_segment g = plan_array<d_segment>(p, plan.segments)[c.segment];
    const d_request q = plan_array<d_request>(p, plan.requests)[g.request < 0 ? 0 : g.request];
    int end = c.key_first + c.num_keys;
    if (g.live && STEP_HEAD.lengths) {
        const int64_t live = load_index(STEP_HEAD.lengths, g.request * STEP_HEAD.lengths_stride, STEP_HEAD.lengths_64);
        if (report && (live < 0 || live > q.num_keys)) d_fault(p.faults, p.faults_host, 2, g.request, 0, live, 1);
        const int64_t there = live - (g.first_position - q.first_position);
        if (there < end) end = there < 0 ? 0 : (int)there;
    }
    W.unit = c.unit;
    W.kv_head = c.unit / plan.units_per_kv_head;
    W.first_head = c.unit * plan.unit_heads;
    W.num_rows = c.num_rows;
    W.packed = c.num_rows * plan.unit_heads;
    W.slot = c.slot;
    W.record = c.record;
    W.row_first = g.row_first + c.row_first;
    W.keys.begin = c.key_first;
    W.keys.end = end;
    W.tiles.count = c.num_keys;           /* for now */
    W.keys.position = g.first_position;
    W.page_positions = plan.page_size ? g.page_positions : -1;
    W.origin = W.page_positions < 0 ? g.first_position : 0;
    W.request = g.request;
    W.exact = STEP_HEAD.row_positions == 0 && g.request >= 0;
    W.pos_min = 0x7fffffff;
    W.pos_max = -0x7fffffff;
    if (W.exact) {
        W.pos_min = q.first_position + (int)live_keys(p, q, g.request) - q.num_rows + (W.row_first - q.row_first);
        W.pos_max = W.pos_min + c.num_rows - 1;
    }
    W.tiles.flags = p.wide;
    W.table = g.table;
    const int64_t token = plan.page_size ? 0 : g.table;
    W.k_from = rows_from<FV_KS>(p.k, token, K_WIDE(p.wide));
    W.v_from = rows_from<FV_VS>(p.v, token, V_WIDE(p.wide));
#if FV_TAIL
    W.tail_from = rows_from<FV_KS>(p.k_tail, token, K_WIDE(p.wide));
#endif
    W.k_scale = FV_KSCALE ? 1.0f : p.k_scale.data ? p.k_scale.data[W.kv_head * p.k_scale.stride[0]] : p.k_scale.number;
    W.v_scale = FV_VSCALE ? 1.0f : p.v_scale.data ? p.v_scale.data[W.kv_head * p.v_scale.stride[0]] : p.v_scale.number;
}

/* Packed row u: where positions follow one another from W's; else from what the plan and the step say. */
FV_DEVICE row_info read_row(args p, int u, bool consecutive)
{
    row_info r = { 0, -1, 0, 0 };
    if (u >= W.packed) return r;
    const int i = u / S.look.unit_heads;
    r.row = W.row_first + i;
    r.request = W.request;
    r.head = W.first_head + u - i * S.look.unit_heads;
    r.pos = W.pos_min + i;
    if (consecutive) return r;
    if (W.request < 0) {
        const d_listed_row listed = plan_array<d_listed_row>(p, PLAN.listed_rows)[r.row];
        r.row = listed.row;
        r.request = listed.request;
    }
    if (STEP_HEAD.row_positions) {
        r.pos = STEP_HEAD.row_positions[r.row];
    } else {
        const d_request q = plan_array<d_request>(p, PLAN.requests)[r.request];
        r.pos = q.first_position + (int)live_keys(p, q, r.request) - q.num_rows + (r.row - q.row_first);
    }
    return r;
}

/* Keys that a piece's first tile has before the piece's own: in the invariant mode tiles count from position 0; -1: it begins where bounds leave keys. */
#define FIRST_OVER (FV_INVARIANT ? (int)((unsigned)(W.origin + W.keys.begin) % FV_T) : -1)

/* Which tiles the piece has, and what must be masked in them; by one thread. */
COLD void choose_tiles(int over)
{
    const int first = W.keys.begin, count = W.tiles.count;
    int begin = first, end = W.keys.end, clear_begin, clear_end;
    W.bounded = W.exact;
#ifdef FV_HAS_VISIBLE
    const bool told = FV_ALL_EXACT && !fv_lifted(USES) && W.page_positions < 0;
    if (!fv_lifted(USES) && W.page_positions < 0) {
        begin = fv_max(begin, fv_first_key(USES, W.pos_min) - W.keys.position);
        end = fv_min(end, fv_last_key(USES, W.pos_max) - W.keys.position + 1);
    }
    W.exact = W.exact && FV_ALL_EXACT && !fv_lifted(USES);
    W.bounded = W.exact && told;
    clear_begin = told ? fv_max(begin, fv_first_key(USES, W.pos_max) - W.keys.position) : 1;
    clear_end = told ? fv_min(end, fv_last_key(USES, W.pos_min) - W.keys.position + 1) : 0;
#else
    clear_begin = begin;
    clear_end = end;
#endif
    if (over >= 0) {                    /* chunks that hold nothing still have a slot */
        W.keys.zero = first - over;
        W.tiles.count = count > 0 ? (over + count + FV_T - 1) / FV_T : 0;
    } else {
        W.keys.zero = begin;
        W.tiles.count = end > begin ? (end - begin + FV_T - 1) / FV_T : 0;
    }
    W.keys.begin = begin;
    W.keys.end = end;
    W.tiles.clear_first = clear_end > clear_begin ? (clear_begin - W.keys.zero + FV_T - 1) / FV_T : 0;
    W.tiles.clear_end = clear_end > clear_begin ? (clear_end - W.keys.zero) / FV_T : 0;
}

/* The rows of W that are taken, and their positions. Where these do not follow one another, tiles are chosen by them. */
template <class TAKES, class CHOOSE> FV_DEVICE void open_rows(args p, const TAKES &takes, const CHOOSE &choose)
{
    const bool consecutive = W.bounded >= 0;
#pragma unroll 1
    for (int u = threadIdx.x; u < FV_ROWS; u += NT) {
        row_info r = read_row(p, u, consecutive);
        if (!takes(r)) r.row = -1;
        if (!consecutive && r.row >= 0) {
            atomicMin(&W.pos_min, r.pos);
            atomicMax(&W.pos_max, r.pos);
        }
        S.rows[u] = r;
    }
    if (threadIdx.x < 4 * TILE_WORDS) S.seen[threadIdx.x / TILE_WORDS][threadIdx.x % TILE_WORDS] = 0;
    __syncthreads();
    if (consecutive) return;
    if (threadIdx.x == 0) choose();
    __syncthreads();
}

/* The block is done; the last one to be leaves the queue as it was. By one thread. */
FV_DEVICE void leave_queue(args p)
{
    if (atomicAdd(p.queue + 1, 1) + 1 < PLAN.num_workers) return;
    p.queue[0] = 0;
    p.queue[1] = 0;
}

/* The block's next piece into W; its rows and their positions. False: there is none. */
COLD bool open_piece(args p)
{
    __syncthreads();                    /* the piece before is done with shared memory */
    if (threadIdx.x == 0) {
        if (S.bad_pages) report_bad_pages(p);
        W.packed = 0;
        const bool more = PLAN.queue ? S.piece >= 0 : S.piece < S.piece_end;
        if (more) set_work(p, plan_array<d_piece>(p, PLAN.pieces)[S.piece], true);
        S.piece++;
        if (W.exact) choose_tiles(FIRST_OVER);
        else W.bounded = -1;            /* not chosen yet */
    }
    __syncthreads();
    if (W.packed == 0) return false;
    open_rows(p, [](const row_info &) { return true; }, [] { choose_tiles(FIRST_OVER); });
    return true;
}

/* Q and the first entries of the ring are asked for. */
PIECE_CODE void begin_piece(args p, int rows)
{
    enum { GROUPS = fv_div_up(LEAD, FV_LOOK) };
    page_ids ids[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; i++) ids[i] = fetch_ids(memory, i * FV_LOOK);
    load_q(p, rows);
#pragma unroll 1
    for (int i = 0; i < GROUPS; i++) {
        publish(p, memory, i * FV_LOOK, ids[0]);
#pragma unroll
        for (int k = 1; k < GROUPS; k++) ids[k - 1] = ids[k];
    }
    __syncthreads();
#pragma unroll 1
    for (int e = 0; e < RING - 1; e++) {
        if (STEPS == 2 && (e & 1)) load_entry<STEPS == 2>(p, memory, W.tiles, e * ENTRY_SLOTS, e);
        else load_entry<false>(p, memory, W.tiles, e * ENTRY_SLOTS, e);
    }
}

#endif
