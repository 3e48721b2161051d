/* SPDX-License-Identifier: Apache-2.0 */
/* plan_cost.c -- what work costs, per kind of device: integers, committed, never measured at run
 * time, so that every planner cuts alike.
 *
 * The unit is about a nanosecond of one worker (a thread; a CTA that has an SM to itself) at dim
 * 128, 16-bit K and V. Only ratios matter: a uniform error moves no cut. One key block is 64
 * keys x 128 x 2 bytes x (K and V) = 32 KB and 64 x 4 x 128 = 32768 flops a packed row. The
 * model adds what overlaps in truth (bytes and arithmetic); that is right at both ends, where
 * one of the two is small. */
#include "plan.h"

/* Fitted on one thread of a Zen 4 server beside other work, levels avx512 and avx512bf16 (AVX2: 1.2
 * to 1.3 times as much of all), ns of processor time. Decode of 4 packed rows from memory, pages of
 * 16 shuffled: 2,400 to 2,900 a block (1,330 from the third-level cache), a piece's first 3,000 to
 * 3,700 more; 8 packed rows 3,700. Prefill: 330 to 360 a row's block, 80 a row beside its keys. Of
 * 17 to 64 packed rows (AVX2: 9 to 64) a block costs up to 7,300 more than said here: K and V
 * become floats first, for few rows. */
const fv__cost_model fv__cost_cpu = {
    .name = "cpu", .piece = 3000, .block = 1400, .block_row = 330, .row = 80, .part = 150
};

/* block: 32 KB at the 13 GB/s that one core streams. block_row: on a Xeon with all threads at work 64 packed rows take 6.3 us a block, 512 rows 30 to
 * 37 (docs/kernels/cpu.md). */
const fv__cost_model fv__cost_cpu_amx = {
    .name = "cpu_amx", .piece = 2000, .block = 2500, .block_row = 55, .row = 100, .part = 150
};

/* second, third: decode on an H200 by given splits, 8 kv heads. Launch, pieces and merges take some 14 us with one block an SM, 20 with two, 31 with
 * three, whatever the keys; a key block of each SM 1.5, 1.0 and 0.95 us. So b 1, L 4096 takes 21.7 us as 128 pieces and 31.5 as 384; b 4, L 4096 38.0 as
 * 256, 40.6 as 128, 44.1 as 408; b 16, L 1024 37.6 as 256, 44.2 as 448; b 16, L 16384 268 us either way. Where K and V come from L2, three are better
 * from some 60 us on: 64 requests that share 1024 keys unfound, 76 us and 95 with two.
 *
 * Fitted on an H200 (132 SMs, 4.5 TB/s) from the clocks of all workers, two of them an SM
 * (checkgpu --stamps): prefill of 128 packed rows at dims 128: 2.9 us a block, 8.1 us a piece,
 * 0.27 us a row in a part; decode, three an SM: 3.2 us a block, 8 to 9 us a piece. */
const fv__cost_model fv__cost_sm80 = {
    .name = "sm80", .piece = 4900, .block = 1940, .block_row = 8, .row = 25, .part = 250,
    .second = 24000, .third = 60000
};

/* wgmma: 5.4 TFLOP/s an SM, 6 ns a row's block, half of it hidden. Tiles of many rows read K and
 * V from L2 (8.4 TB/s), so block is a bit below the streaming cost. */
const fv__cost_model fv__cost_sm90 = {
    .name = "sm90", .piece = 1200, .block = 900, .block_row = 3, .row = 12, .part = 30
};
