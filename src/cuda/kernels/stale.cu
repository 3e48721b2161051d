/* SPDX-License-Identifier: Apache-2.0 */
/* stale.cu -- checked mode: does a plan still belong to the data that it was made for? An update stamps what kernels will read of the caller's device
 * memory (live lengths, page ids), in the order of the stream; each run compares first, so also a graph that is replayed after somebody has
 * changed that memory without planning again.
 *
 *   stamp of a request    its live length
 *   stamp of a segment    a sum over its page ids, each mixed with its place: over the pages that its live keys lie in
 *
 * A warp for each. Bytes decide: every page id once. */
#ifdef __CUDACC_RTC__                   /* the host half is ../backend.c */
#include "base.cuh"
#include "plan.cuh"
#include "ops.cuh"

FV_DEVICE int64_t read_list(const void *list, int64_t i, int32_t is64)
{
    return is64 ? ((const int64_t *)list)[i] : (int64_t)((const int32_t *)list)[i];
}

FV_DEVICE uint64_t mix(uint64_t x)
{
    x *= 0x9e3779b97f4a7c15ull;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9ull;
    return x ^ x >> 32;
}

FV_DEVICE int64_t live_length(const d_step &s, int request) { return read_list(s.lengths, request * s.lengths_stride, s.lengths_64); }

/* Keys of the segment that kernels may read. */
FV_DEVICE int64_t keys_of(const d_step &s, const d_segment &g, const d_request *requests)
{
    if (!g.live || !s.lengths) return g.num_keys;
    const int64_t keys = live_length(s, g.request) - (g.first_position - requests[g.request].first_position);
    return keys < 0 ? 0 : keys > g.num_keys ? g.num_keys : keys;
}

FV_DEVICE uint64_t stamp_of_ids(const d_plan_head &h, const d_step &s, const d_segment &g, int64_t keys, int lane)
{
    const int64_t pages = (keys + h.page_size - 1) / h.page_size;
    uint64_t sum = 0;
    for (int64_t i = lane; i < pages && g.table + i < h.table_entries; i += 32) {
        sum += mix((uint64_t)read_list(s.ids, (g.table + i) * s.ids_stride, s.ids_64) + mix((uint64_t)i));
        if (s.v_ids) sum += mix((uint64_t)read_list(s.v_ids, (g.table + i) * s.v_ids_stride, s.v_ids_64) + mix(~(uint64_t)i));
    }
    for (int by = 16; by; by /= 2) sum += __shfl_xor_sync(D_ALL, sum, by);
    return sum;
}

extern "C" __global__ void __launch_bounds__(D_THREADS) stale(const __grid_constant__ d_stale p)
{
    const d_plan_head &h = *(const d_plan_head *)p.plan;
    const d_step &s = *p.step;
    const d_request *requests = (const d_request *)(p.plan + h.requests);
    const d_segment *segments = (const d_segment *)(p.plan + h.segments);
    const int lane = threadIdx.x % 32, count = h.num_requests + h.num_segments;
    int bad = 0, first_bad = -1;
    for (int i = (int)(blockIdx.x * D_WARPS + threadIdx.x / 32); i < count; i += (int)gridDim.x * D_WARPS) {
        const bool is_request = i < h.num_requests;
        const d_segment *g = is_request ? nullptr : &segments[i - h.num_requests];
        uint64_t now = 0;
        if (is_request && s.lengths) now = (uint64_t)live_length(s, i);
        if (!is_request && s.ids && h.page_size) now = stamp_of_ids(h, s, *g, keys_of(s, *g, requests), lane);
        uint64_t *stamp = &p.stamps[is_request ? i : p.max_requests + i - h.num_requests];
        if (lane) continue;
        if (p.write) *stamp = now;
        else if (*stamp != now && bad++ == 0) first_bad = is_request ? i : g->request;
    }
    if (bad) d_fault(p.faults, p.faults_host, 5, first_bad, 0, s.lengths && first_bad >= 0 ? live_length(s, first_bad) : 0, bad);
}
#else
typedef int fv__stale_has_no_host_code;
#endif
