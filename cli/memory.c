/* SPDX-License-Identifier: Apache-2.0 */
/* memory.c -- see memory.h. */
#include "memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

bool memory_supported(const cli_device *device)
{
    const char *name = device->device ? device->device : getenv("FV_DEVICE");
    if (!name || !*name || !strncmp(name, "cpu", 3))
        return true;
    cli_fail("device %s: this command places its tensors in host memory and so runs on cpu only",
             name);
    return false;
}

bool memory_allocate(int64_t bytes, memory *out)
{
    const int64_t huge = 2 << 20;
    *out = (memory){ .bytes = div_up(max_i64(bytes, 1), huge) * huge };
    void *data = mmap(NULL, (size_t)out->bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) {
        cli_fail("out of memory: %lld bytes for a tensor", (long long)bytes);
        *out = (memory){ 0 };
        return false;
    }
    madvise(data, (size_t)out->bytes, MADV_HUGEPAGE); /* a hint: its failure costs time only */
    out->data = data;
    return true;
}

void memory_release(memory *m)
{
    if (m->data)
        munmap(m->data, (size_t)m->bytes);
    *m = (memory){ 0 };
}
