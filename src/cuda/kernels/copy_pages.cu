/* SPDX-License-Identifier: Apache-2.0 */
/* copy_pages.cu -- whole pages of K and V. blockIdx.y is a copy; the copies of one launch do not depend on each other (ops.c cuts the list where one
 * reads or writes what another writes). Threads take units of 1 to 16 bytes of a page in turn. */
#ifdef __CUDACC_RTC__                   /* the host half is ../ops.c */
#include "base.cuh"
#include "plan.cuh"
#include "ops.cuh"

template <class UNIT> FV_DEVICE void copy_page(const d_pages &p, int64_t src, int64_t dst)
{
    const int64_t total = p.tokens * p.extent[0] * p.extent[1] * p.run;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t x = i / p.run, at = (i - x * p.run) * (int64_t)sizeof(UNIT);
        at += x % p.extent[1] * p.stride[1];
        x /= p.extent[1];
        at += x % p.extent[0] * p.stride[0] + x / p.extent[0] * p.token;
        *(UNIT *)(p.data + dst * p.page + at) = *(const UNIT *)(p.data + src * p.page + at);
    }
}

extern "C" __global__ void __launch_bounds__(D_THREADS) copy_pages(const __grid_constant__ d_copies p)
{
    const d_copy c = p.copies[blockIdx.y];
    for (int i = 0; i < 2; i++) {
        if (!p.pages[i].data) continue;
        switch (p.unit) {
        case 16: copy_page<uint4>(p.pages[i], c.src, c.dst); break;
        case 8: copy_page<uint2>(p.pages[i], c.src, c.dst); break;
        case 4: copy_page<uint32_t>(p.pages[i], c.src, c.dst); break;
        case 2: copy_page<uint16_t>(p.pages[i], c.src, c.dst); break;
        default: copy_page<uint8_t>(p.pages[i], c.src, c.dst);
        }
    }
}
#else
typedef int fv__copy_pages_has_no_host_code;
#endif
