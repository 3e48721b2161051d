/* SPDX-License-Identifier: Apache-2.0 */
/* memory.c -- see memory.h. */
#include "memory.h"

#include <sys/mman.h>

static char *reserve(int64_t bytes)
{
    void *data = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return data == MAP_FAILED ? NULL : data;
}

bool memory_allocate(gpu *where, int64_t bytes, memory *out)
{
    const int64_t huge = 2 << 20;
    *out = (memory){ .bytes = div_up(max_i64(bytes, 1), huge) * huge, .where = where };
    out->data = reserve(out->bytes);
    if (out->data && !where) {
        madvise(out->data, (size_t)out->bytes, MADV_HUGEPAGE);  /* a hint: its failure costs time
                                                                   only */
        out->device = out->data;
    } else if (out->data) {
        out->device = gpu_allocate(where, out->bytes);
    }
    if (!out->device) {
        cli_fail("out of memory%s: %lld bytes for a tensor", where ? " on the GPU" : "",
                 (long long)bytes);
        memory_release(out);
        return false;
    }
    if (where)
        gpu_clear(where, out->device, out->bytes);
    return true;
}

void memory_release(memory *m)
{
    if (m->where)
        gpu_release(m->where, m->device);
    if (m->data)
        munmap(m->data, (size_t)m->bytes);
    *m = (memory){ 0 };
}

void memory_put(const memory *m, int64_t offset, int64_t bytes)
{
    if (m->where && bytes > 0)
        gpu_put(m->where, m->device + offset, m->data + offset, bytes);
}

void memory_get(const memory *m, int64_t offset, int64_t bytes)
{
    if (m->where && bytes > 0)
        gpu_get(m->where, m->data + offset, m->device + offset, bytes);
}

void memory_forget(const memory *m)
{
    if (m->where && m->data)
        madvise(m->data, (size_t)m->bytes, MADV_DONTNEED);
}
