/* SPDX-License-Identifier: Apache-2.0 */
/* memory.h -- where the command's tensors lie. All of them come from here, so that a device's
 * allocator has one place to go. So far that place is host memory: huge pages where the system has
 * them, zero, committed when it is written. */
#ifndef MEMORY_H
#define MEMORY_H

#include "cli.h"

typedef struct memory {
    char *data;                         /* 64-byte aligned; NULL: none */
    int64_t bytes;
} memory;

/* Can this command place tensors on the device that `device` names? Prints why not. */
bool memory_supported(const cli_device *device);

bool memory_allocate(int64_t bytes, memory *out);       /* false: message printed */
void memory_release(memory *m);

#endif
