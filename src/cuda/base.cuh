/* SPDX-License-Identifier: Apache-2.0 */
/* base.cuh -- integer names and small helpers for device code. NVRTC compiles without any system header, so the names that C programs take from
 * stdint.h are made here; they are the 64-bit Linux ones. */
#ifndef FV_BASE_CUH
#define FV_BASE_CUH

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
#endif

#define FV_DEVICE static __device__ __forceinline__
#define FV_DEVICE_INLINE __device__ __forceinline__

/* The real infinity, not a large finite number: visibility never depends on a score's value. */
FV_DEVICE float fv_inf() { return __int_as_float(0x7f800000); }

FV_DEVICE int fv_min(int a, int b) { return a < b ? a : b; }
FV_DEVICE int fv_max(int a, int b) { return a > b ? a : b; }
static __device__ constexpr int fv_div_up(int a, int b) { return (a + b - 1) / b; }

/* The address in the shared window, as ldmatrix and cp.async want it. */
FV_DEVICE uint32_t fv_smem(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

#endif
