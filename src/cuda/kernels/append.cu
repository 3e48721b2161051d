/* SPDX-License-Identifier: Apache-2.0 */
/* append.cu -- new keys and values into the cache in one launch: rotate, quantise, scatter; rows of Q may turn along. Any sm_80 or later.
 *
 * A warp has one row, or one part of it where rows are few. It finds the row's request in the row offsets, 32 candidates at a time, and its slots in the
 * page table, both as they are on the device now, and makes the row's sines once for all heads. K, V and Q that are wide (rows.cuh) go in pieces through
 * registers; else their heads go one by one as floats through the warp's shared memory. What the tables say wrong (an id or a slot outside of the pool, a
 * length below the rows that it counts) goes to the error word, and the row is left out.
 *
 * A row of 8 heads of 128 in 16 bits moves 8 KB, behind a chain of three or four loads: it is the number of rows under way that decides. With a row a
 * block, 16 bits went at 1.1 TB/s, turned at 0.6, where a copy goes at 4.2 (H200). A hundred double operations for each pair of the rotation are, on 1/64
 * rate hardware too, below the memory's time.
 *
 * checkjit: --fmad=false */
#ifdef __CUDACC_RTC__                   /* the host half is ../ops.c */
#include "base.cuh"
#include "plan.cuh"
#include "ops.cuh"
#include "rows.cuh"

struct place { int64_t page, token; int ok; };

/* A warp's. */
struct shared {
    d_turns turns;
    float row[2 * D_MAX_DIM];
    place k, v;
    int position, live, part;
};

typedef const d_append &args;

FV_DEVICE void fault(args p, const shared &s, int what, int64_t request, int64_t slot, int64_t value, int64_t count)
{
    if (s.part == 0) d_fault(p.faults, p.faults_host, what, request, slot, value, count);
}

/* ------------------------------------------------------------------------------------------------------ where a row goes */

/* The last request whose rows begin at or before `row`; a warp's work. Offsets that do not ascend give some request in [0, n). */
FV_DEVICE int64_t find_request(args p, int64_t row, int lane)
{
    int64_t lo = 0, hi = p.num_requests;
    while (hi - lo > 1) {
        const int64_t step = (hi - lo + 31) / 32, r = lo + step * (lane + 1);
        const bool below = r < hi && d_read(p.rows, r) <= row;
        lo += step * __popc(__ballot_sync(D_ALL, below));
        hi = lo + step < hi ? lo + step : hi;
        if (lo >= p.num_requests) return p.num_requests - 1;
    }
    return lo;
}

FV_DEVICE place slot_place(args p, const shared &s, int64_t row, int64_t slot)
{
    place x = { 0, 0, slot >= 0 && slot < p.num_slots };
    if (!x.ok && slot != -1) fault(p, s, 6, row, 0, slot, 1);
    if (x.ok) {
        x.page = p.page_size ? slot / p.page_size : slot;
        x.token = p.page_size ? slot - x.page * p.page_size : 0;
    }
    return x;
}

/* Key `key` of request r by the id at entry `entry` of its list. */
FV_DEVICE place page_place(args p, const shared &s, const d_index &ids, int64_t row, int64_t r, int64_t table, int64_t room, int64_t key)
{
    const int64_t entry = key / p.page_size;
    place x = { 0, key - entry * p.page_size, 0 };
    if (entry >= room || table + entry < 0 || table + entry >= p.num_ids) {
        fault(p, s, 6, row, entry, key, 1);
        return x;
    }
    x.page = d_read(ids, table + entry);
    x.ok = x.page >= 0 && x.page < p.num_pages;
    if (!x.ok) fault(p, s, 1, r, entry, x.page, 1);
    return x;
}

/* First entry (ragged: token) of request r and how many it has. */
FV_DEVICE void table_of(args p, int64_t r, int64_t &first, int64_t &room)
{
    const d_index &ends = p.page_size ? p.indptr : p.kv_indptr;
    if (ends.data) {
        first = d_read(ends, r);
        room = d_read(ends, r + 1) - first;
        return;
    }
    first = (p.table_rows.data ? d_read(p.table_rows, r) : r) * p.table_stride;
    room = p.table_width;
}

FV_DEVICE void locate_by_table(args p, shared &s, int64_t row, int64_t r)
{
    const int64_t first_row = p.rows.data ? d_read(p.rows, r) : r, end_row = p.rows.data ? d_read(p.rows, r + 1) : r + 1;
    int64_t table, room;
    if (row < first_row || row >= end_row) {            /* past the last live row, or offsets that do not ascend */
        if (r < p.num_requests - 1 || row < first_row) fault(p, s, 3, r, 0, end_row, 1);
        return;
    }
    table_of(p, r, table, room);
    const int64_t length = p.lengths.data ? d_read(p.lengths, r) : room, key = length - (end_row - row);
    if (length < end_row - first_row || length >= 1 << 30) {
        fault(p, s, 2, r, 0, length, 1);
        return;
    }
    s.live = 1;
    s.position = (int)((p.first_positions.data ? d_read(p.first_positions, r) : 0) + key);
    if (p.page_size) {
        s.k = page_place(p, s, p.ids, row, r, table, room, key);
        s.v = p.v_ids.data ? page_place(p, s, p.v_ids, row, r, table, room, key) : s.k;
    } else {
        s.k = { table + key, 0, key < room && table >= 0 && table + key < p.num_slots };
        s.v = s.k;
        if (!s.k.ok) fault(p, s, 6, row, 0, table + key, 1);
    }
}

FV_DEVICE void locate(args p, shared &s, int64_t row, int lane)
{
    const int64_t r = p.slots.data || !p.rows.data ? row : find_request(p, row, lane);
    if (lane) return;
    s.live = 0;
    if (p.slots.data) {
        s.live = 1;
        s.position = 0;
        s.k = slot_place(p, s, row, d_read(p.slots, row));
        s.v = p.v_slots.data ? slot_place(p, s, row, d_read(p.v_slots, row)) : s.k;
        if (p.row_positions.data) s.position = (int)d_read(p.row_positions, row);
        return;
    }
    if (r >= p.num_requests) return;
    if (row == p.num_rows - 1 && p.rows.data && d_read(p.rows, p.num_requests) > p.num_rows)
        fault(p, s, 3, p.num_requests, 0, d_read(p.rows, p.num_requests), 1);
    locate_by_table(p, s, row, r);
    if (p.row_positions.data) s.position = (int)d_read(p.row_positions, row);
}

/* -------------------------------------------------------------------------------------------------------------- one head */

FV_DEVICE float largest_in_warp(float x)
{
    for (int by = 16; by > 0; by /= 2) x = fmaxf(x, __shfl_xor_sync(D_ALL, x, by));
    return x;
}

FV_DEVICE float finite(float x) { return fabsf(x) <= 3.402823466e38f ? fabsf(x) : 0.0f; }

/* fp4_e2m1: each 16 elements, those of four lanes, have a scale in e4m3 that makes their largest 6. */
D_SHARED_CODE void write_blocks(const d_tensor &t, int64_t element, const d_tensor &scales, int64_t scale_element, const float *in, float by, int lane)
{
    char *row = d_at(t, element);
    uint8_t *out = (uint8_t *)d_at(scales, scale_element);
    const bool aligned = d_aligned(row, 4);
#pragma unroll 1
    for (int first = 0; first < t.width; first += 128) {
        const int i = first + 4 * lane;
        float x[4], most = 0.0f;
        for (int k = 0; k < 4; k++) {
            x[k] = i < t.width ? in[i + k] : 0.0f;
            if (by != 1.0f) x[k] = __fdiv_rn(x[k], by);
            most = fmaxf(most, finite(x[k]));
        }
        most = fmaxf(most, __shfl_xor_sync(D_ALL, most, 1));
        most = fmaxf(most, __shfl_xor_sync(D_ALL, most, 2));
        const uint32_t code = d_encode_e4m3(__fdiv_rn(most, 6.0f));
        const float scale = d_decode_e4m3(code);
        for (int k = 0; k < 4; k++) x[k] = scale > 0.0f ? __fdiv_rn(x[k], scale) : 0.0f;
        if (i >= t.width) continue;
        d_store_quad(D_E2M1, row + i / 2, 4, aligned, x);
        if (lane % 4 == 0) out[i / 16] = (uint8_t)code;
    }
}

FV_DEVICE float reach_of(int type)
{
    return type == D_E4M3 ? 448.0f : type == D_E5M2 ? 57344.0f : type == D_INT8 ? 127.0f : 6.0f * 448.0f;
}

/* What a (token, head) is divided by; never 0, so that reading is safe. */
FV_DEVICE float token_scale(int type, float most)
{
    const float scale = __fdiv_rn(most, reach_of(type));
    return most == 0.0f ? 1.0f : scale < 1.175494351e-38f ? 1.175494351e-38f : scale;
}

FV_DEVICE int64_t element_of(const int64_t *stride, const place &at, int head) { return at.page * stride[0] + at.token * stride[1] + head * stride[2]; }

/* A part of a head (K, its tail, or V) as floats in the warp's memory; returns its largest finite magnitude, this lane's share. */
FV_DEVICE float bring(args p, const shared &s, const d_tensor &from, int to_type, bool turn, int64_t row, int head, float *x, int lane)
{
    d_read_row(from, row * from.stride[0] + head * from.stride[1], x, lane);
    __syncwarp();
    if (turn) d_rotate(p.rotary, s.turns, x, lane);
    __syncwarp();
    float most = 0.0f;
    int nans = 0;
    for (int i = lane; i < from.width; i += 32) {
        most = fmaxf(most, finite(x[i]));
        nans += x[i] != x[i];
    }
    if (p.checked && d_bits(to_type) <= 8) {
        nans = __reduce_add_sync(D_ALL, nans);
        if (nans && lane == 0) d_fault(p.faults, p.faults_host, 4, row, 0, 0, nans);
    }
    return most;
}

FV_DEVICE void put(const d_tensor &to, const d_tensor &blocks, const place &at, int head, const float *x, float by, int lane)
{
    const int64_t element = element_of(to.stride, at, head);
    if (to.type == D_E2M1) write_blocks(to, element, blocks, element_of(blocks.stride, at, head), x, by, lane);
    else d_write_row(to, element, x, by, lane);
}

/* One head of K (with its tail, which shares the scale) or of V. */
FV_DEVICE void append_head(args p, const shared &s, const d_tensor &from, const d_tensor &from_tail, const d_tensor &to, const d_tensor &to_tail,
                           const d_tensor &blocks, const d_row_scale &scale, const place &at, bool turn, int64_t row, int head, float *room, int lane)
{
    const bool tail = from_tail.data != nullptr;
    if (scale.kind == D_SCALE_NONE && !tail && !turn && from.type == to.type) {
        d_copy_row(from, row * from.stride[0] + head * from.stride[1], to, element_of(to.stride, at, head), lane);
        return;
    }
    float *x = room, *x_tail = room + D_MAX_DIM, by = scale.number;
    float most = bring(p, s, from, to.type, turn && !tail, row, head, x, lane);
    if (tail) most = fmaxf(most, bring(p, s, from_tail, to_tail.type, turn, row, head, x_tail, lane));
    if (scale.kind == D_SCALE_TENSOR && scale.data) by = scale.data[0];
    if (scale.kind == D_SCALE_HEAD) by = scale.data[head * scale.stride[0]];
    if (scale.kind == D_SCALE_TOKEN_HEAD) {
        by = token_scale(to.type, largest_in_warp(most));
        if (lane == 0) scale.data[element_of(scale.stride, at, head)] = by;
    }
    put(to, blocks, at, head, x, by, lane);
    if (tail) put(to_tail, blocks, at, head, x_tail, by, lane);
    __syncwarp();
}

FV_DEVICE d_heads cache_heads(const d_tensor &t, const place &at)
{
    return { t.data + 2 * (at.page * t.stride[0] + at.token * t.stride[1]), 2 * t.stride[2] };
}

/* This warp's part of a row's wide heads. */
D_SHARED_CODE void move_wide(args p, const shared &s, const d_tensor &t, const d_heads &from, const d_heads &to, int heads, int turned, int lane)
{
    d_move_row(t.type, p.rotary, turned, s.turns, t.width, from, to, heads, s.part * 32 + lane, p.parts * 32, [] {});
}

/* The row's heads that are wide: all of K, all of V, all of Q, or none of each. */
FV_DEVICE void move_row(args p, const shared &s, int64_t row, int lane)
{
    const int turned = p.rotary.dim;
    if (p.wide & D_WIDE_K && s.k.ok) move_wide(p, s, p.new_k, d_heads_of(p.new_k, row), cache_heads(p.k, s.k), p.num_kv_heads, turned, lane);
    if (p.wide & D_WIDE_V && s.v.ok) move_wide(p, s, p.new_v, d_heads_of(p.new_v, row), cache_heads(p.v, s.v), p.num_kv_heads, 0, lane);
    if (p.wide & D_WIDE_Q) move_wide(p, s, p.q, d_heads_of(p.q, row), d_heads_of(p.q_out, row), p.num_q_heads, turned, lane);
}

/* The others, head by head. */
FV_DEVICE void convert_row(args p, shared &s, int64_t row, int lane)
{
    const int heads = p.num_kv_heads, values = p.new_v.data ? heads : 0, items = heads + values + p.num_q_heads;
#pragma unroll 1
    for (int i = s.part; i < items; i += p.parts) {
        const bool is_k = i < heads, is_q = i >= heads + values;
        if (p.wide & (is_k ? D_WIDE_K : is_q ? D_WIDE_Q : D_WIDE_V)) continue;
        const place &at = is_k ? s.k : s.v;
        if (is_q) d_turn_head(p.rotary, s.turns, p.q, p.q_out, row, i - heads - values, s.row, lane);
        else if (at.ok)
            append_head(p, s, is_k ? p.new_k : p.new_v, is_k ? p.new_k_tail : p.no_tail, is_k ? p.k : p.v, p.k_tail, is_k ? p.k_blocks : p.v_blocks,
                        is_k ? p.k_scale : p.v_scale, at, is_k && p.rotary.dim > 0, row, is_k ? i : i - heads, s.row, lane);
    }
}

extern "C" __global__ void __launch_bounds__(32 * D_APPEND_WARPS, 7) append(const __grid_constant__ d_append p)
{
    __shared__ shared warps[D_APPEND_WARPS];
    shared &s = warps[threadIdx.x / 32];
    const int64_t item = (int64_t)blockIdx.x * D_APPEND_WARPS + threadIdx.x / 32, row = p.row_first + item / p.parts;
    const int lane = threadIdx.x % 32;
    if (row >= p.row_end) return;
    if (lane == 0) s.part = (int)(item % p.parts);
    __syncwarp();
    locate(p, s, row, lane);
    __syncwarp();
    if (!s.live) return;
    if (p.rotary.dim) d_make_turns(p.rotary, s.position, s.turns, lane, 32);
    __syncwarp();
    move_row(p, s, row, lane);
    convert_row(p, s, row, lane);
}
#else
typedef int fv__append_has_no_host_code;
#endif
