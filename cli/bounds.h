/* SPDX-License-Identifier: Apache-2.0 */
/* bounds.h -- what this machine can do at most, measured now: how fast memory is read, how fast it
 * multiplies. */
#ifndef BOUNDS_H
#define BOUNDS_H

#include "memory.h"

typedef struct bounds {
    int threads;
    double read;                        /* bytes/s, 0: not measured. A streaming read by all threads
                                           of a set larger than the last-level cache */
    int64_t read_set;                   /* bytes of that set */
    double flops;                       /* flop/s of the multiplier below, all threads */
    const char *multiplier;             /* "AMX bf16 tiles", "AVX-512 f32 FMA",
                                           "mma.sync bf16", ... */
} bounds;

/* Measures both, of the GPU where there is one. `tiles`: matrix tiles may be used for the types at
 * hand (16-bit and 8-bit K and V). About a second. */
bool bounds_measure(gpu *g, int threads, bool tiles, bounds *out);

/* A streaming read of [data, data + bytes) by `threads` threads, in seconds; small sets are read
 * several times in a row. Starting the threads is not counted. */
double bounds_read_time(const void *data, int64_t bytes, int threads);

/* Operations per second of the multiplier, measured for about 20 ms. */
double bounds_multiply_rate(int threads, bool tiles);

/* The same of a product of two matrices of random numbers in bf16 on AMX tiles, each thread's in
 * its second-level cache: loads and stores beside products. Without tiles: the multiplier's. */
double bounds_gemm_rate(int threads);

/* The larger of the two floors, in seconds; 0 if they were not measured. */
double bounds_time(const bounds *b, double bytes, double flops);

#endif
