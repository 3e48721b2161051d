/* SPDX-License-Identifier: Apache-2.0 */
/* checkattn_gpu.h -- the little of the CUDA driver that the tool needs, found at run time: memory,
 * copies, one stream, graphs.
 *
 * The primary context of the device is current on the calling thread from gpu_open on. Failures
 * after that print to standard error and return false or NULL: the way that met them fails.
 */
#ifndef FOVEAL_TESTS_CHECKATTN_GPU_H
#define FOVEAL_TESTS_CHECKATTN_GPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

bool gpu_open(int ordinal, char *why, size_t size);
bool gpu_on(void);                      /* gpu_open was called and succeeded */
void *gpu_stream(void);

void *gpu_alloc(size_t bytes);          /* 256-aligned; 0 bytes: a pointer that nobody may use */
void gpu_free(void *memory);
bool gpu_upload(void *to, const void *from, size_t bytes);
bool gpu_download(void *to, const void *from, size_t bytes);
bool gpu_sync(void);                    /* waits for the stream */

/* An address range without memory, and memory for a part of it (whole granules: *lo and *hi say
 * which became real). */
void *gpu_reserve(size_t bytes);
bool gpu_back(void *range, size_t first, size_t last, size_t *lo, size_t *hi);
void gpu_unreserve(void *range);

/* Captures what `fn` queues on the stream into a graph; then gpu_graph_launch queues it. NULL:
 * capture failed (`fn` too). */
typedef struct gpu_graph gpu_graph;
gpu_graph *gpu_capture(bool (*fn)(void *arg), void *arg);
bool gpu_graph_launch(gpu_graph *graph);
void gpu_graph_free(gpu_graph *graph);

#endif
