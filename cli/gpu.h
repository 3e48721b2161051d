/* SPDX-License-Identifier: Apache-2.0 */
/* gpu.h -- a GPU as the command needs it beside the engine: memory, copies, graphs and their times,
 * ceilings. Everything goes through one stream, in order.
 *
 * The driver is the one that the library has opened for the context; so this part, alone with
 * cmd_jit.c, sees the library's own headers. A call of the driver that fails ends the process with
 * a message, as memory that runs out does (cli.h): a command has nothing to save. What only a
 * user's request can be too large for (gpu_allocate) is answered with NULL.
 */
#ifndef GPU_H
#define GPU_H

#include "cli.h"

typedef struct gpu gpu;
typedef struct gpu_graph gpu_graph;

/* *out is NULL for a context on the CPU; every function below takes that NULL and does nothing. */
void gpu_open(fv_ctx *ctx, gpu **out);
void gpu_close(gpu **g);

fv_stream gpu_stream(const gpu *g);
const char *gpu_name(const gpu *g);     /* "NVIDIA H200" */
int64_t gpu_cache_bytes(const gpu *g);  /* its level 2 */
int64_t gpu_free_bytes(const gpu *g);

char *gpu_allocate(gpu *g, int64_t bytes);      /* NULL: it has not so much left */
void gpu_release(gpu *g, char *memory);
void gpu_clear(gpu *g, char *to, int64_t bytes);
void gpu_put(gpu *g, char *to, const char *from, int64_t bytes);        /* host to device */
void gpu_get(gpu *g, char *to, const char *from, int64_t bytes);        /* device to host; queued */
void gpu_copy(gpu *g, char *to, const char *from, int64_t bytes);       /* within the device */
void gpu_wait(gpu *g);

/* What is called between the two becomes a graph; NULL: something that was called cannot be
 * captured. */
void gpu_capture(gpu *g);
gpu_graph *gpu_captured(gpu *g);
double gpu_time(gpu *g, gpu_graph *graph);      /* launches it and waits: seconds on the device */
void gpu_graph_free(gpu *g, gpu_graph *graph);

/* Seconds of the host for one launch of a kernel that has nothing to do. */
double gpu_time_launch(gpu *g);

/* ---- ceilings. false: message printed (a kernel for them could not be compiled) ---- */

typedef struct gpu_multiplier {
    const char *name;
    double rate;                        /* flop/s */
} gpu_multiplier;

/* Seconds of a streaming read of [at, at + bytes), launched `times` times in one graph, the i-th
 * from at + i * step: steps that are far apart are read cold. Per launch. */
bool gpu_time_read(gpu *g, const char *at, int64_t bytes, int64_t step, int times, double *seconds);
/* Tensor cores fed from registers. `narrow`: 16-bit numbers; else f32 by way of tf32. */
bool gpu_multiply_rate(gpu *g, bool narrow, gpu_multiplier *out);

#endif
