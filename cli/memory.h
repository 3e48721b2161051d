/* SPDX-License-Identifier: Apache-2.0 */
/* memory.h -- the command's tensors: what it fills and looks at on the host, and where the engine
 * finds them. On the CPU these are one and the same. On a GPU the host's side is a mirror:
 * reserved, not committed until something is put through it, and only as good as the last put or
 * get. */
#ifndef MEMORY_H
#define MEMORY_H

#include "gpu.h"

typedef struct memory {
    char *data;                         /* the host's side, 64-byte aligned; NULL: none */
    char *device;                       /* what the engine is given */
    int64_t bytes;
    gpu *where;                         /* NULL: host memory */
} memory;

/* All zero. Host memory comes in huge pages where the system has them. false: message printed. */
bool memory_allocate(gpu *where, int64_t bytes, memory *out);
void memory_release(memory *m);

/* [offset, offset + bytes) of the host's side to the device's, or back. A get is complete after
 * gpu_wait. Nothing to do in host memory. */
void memory_put(const memory *m, int64_t offset, int64_t bytes);
void memory_get(const memory *m, int64_t offset, int64_t bytes);
/* The mirror gives its pages back to the system. */
void memory_forget(const memory *m);

#endif
