/* SPDX-License-Identifier: Apache-2.0 */
/* verify.cu -- one chain of drafts a block: every thread looks at each draft (they are few), all of them draw the token behind the chain.
 *
 * checkjit: --fmad=false */
#ifdef __CUDACC_RTC__                   /* the host half is ../companions.c */
#include "base.cuh"
#include "plan.cuh"
#include "ops.cuh"
#include "companions.cuh"
#include "sample.cuh"

FV_DEVICE float element(const d_tensor &t, int64_t request, int64_t step, int64_t id)
{
    const int bits = d_bits(t.type);
    const char *at = d_at(t, request * t.stride[0] + step * t.stride[1] + id);
    return d_decode(t.type, bits == 32 ? *(const uint32_t *)at : *(const uint16_t *)at);
}

FV_DEVICE bool accepts(const d_verify &p, int64_t request, int step)
{
    const int64_t id = s_read(p.draft_ids, request, step);
    const float u = (float)(uint32_t)(s_draw(p.random, request, (uint32_t)step) >> 40) * 5.9604644775390625e-8f;
    if (id < 0 || id >= p.draft.width) return false;
    return u * element(p.draft, request, step, id) < element(p.target, request, step, id);
}

FV_DEVICE int continuation(const d_verify &p, int64_t request, int step, s_room &room)
{
    s_source s;
    float ignored;
    s.x = d_row_of(p.target, request * p.target.stride[0] + step * p.target.stride[1]);
    s.minus = d_row_of(p.draft, request * p.draft.stride[0] + step * p.draft.stride[1]);
    s.kind = S_DIFFERENCE;
    s.most = s.inverse = s.scale = 0.0f;
    s.top = step < p.num_drafts ? s_largest(s, room) : 0.0f;
    if (!(s.top > 0.0f)) {
        s.kind = S_PROBABILITIES;
        s.top = s_largest(s, room);
    }
    if (!(s.top > 0.0f)) return 0;
    s_set_scale(s);
    const uint64_t total = s_survey<true, false>(s, S_LEAST, room).sum;
    return s_find(s, S_LEAST, __umul64hi(s_draw(p.random, request, (uint32_t)p.num_drafts), total), room, ignored);
}

extern "C" __global__ void __launch_bounds__(D_SAMPLE_THREADS, 1) verify(const __grid_constant__ d_verify p)
{
    __shared__ s_room room;
    const int64_t r = blockIdx.x;
    int accepted = 0, emitted = 0;
    for (int step = 0; step < p.num_drafts; step++) {
        const bool good = accepts(p, r, step);
        emitted += good && emitted == step;
        accepted += good;
    }
    const int next = continuation(p, r, emitted, room);
    for (int step = threadIdx.x; step <= p.num_drafts; step += D_SAMPLE_THREADS)
        s_write(p.ids, r, step, step < emitted ? s_read(p.draft_ids, r, step) : step == emitted ? next : -1);
    if (threadIdx.x) return;
    if (p.num_accepted.data) s_write(p.num_accepted, r, 0, s_read(p.num_accepted, r, 0) + accepted);
    if (p.num_emitted.data) s_write(p.num_emitted, r, 0, s_read(p.num_emitted, r, 0) + emitted);
}
#else
typedef int fv__verify_has_no_host_code;
#endif
