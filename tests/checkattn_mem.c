/* SPDX-License-Identifier: Apache-2.0 */
/* checkattn_mem.c -- areas: memory with inaccessible stretches on both sides.
 *
 *   map                                    base            base + bytes
 *   | guard | slack (filled) ............. | payload ..... | slack < 256 | guard |
 *
 * A read or write that leaves the mapped pages faults; a write into the slack is found by
 * area_slack_is_clean. For a GPU all that lies between the guards has a twin in device memory, the
 * guards have none.
 */
#include "checkattn.h"
#include "checkattn_gpu.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { GUARD = 1 << 16, PAGE = 4096, ALIGN = 256 };

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* Repeats the pattern in [first, last); phase counts from the base, so that elements keep their
 * borders. */
static void put_pattern(area *a, uint8_t *first, uint8_t *last)
{
    const size_t n = (size_t)a->pattern_bytes;

    while (first < last && (size_t)(first - a->map) % n != (size_t)(a->base - a->map) % n)
        *first++ = 0;
    if (first >= last)
        return;
    const size_t bytes = (size_t)(last - first);
    size_t done = n < bytes ? n : bytes;
    memcpy(first, &a->pattern, done);
    for (; done < bytes; done = done * 2 < bytes ? done * 2 : bytes)
        memcpy(first + done, first, done * 2 < bytes ? done : bytes - done);
}

bool area_make(area *a, int64_t bytes, int offset, int num_type, uint32_t pattern, bool sparse)
{
    const int bits = num_types[num_type].bits;
    const size_t payload = round_up((size_t)bytes + ALIGN + (size_t)offset, PAGE);

    *a = (area){ .bytes = bytes, .sparse = sparse, .pattern = bits == 4 ? pattern * 0x11 : pattern,
                 .pattern_bytes = bits < 8 ? 1 : bits / 8, .map_bytes = payload + 2 * GUARD };
    a->map =
        mmap(NULL, a->map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (a->map == MAP_FAILED) {
        a->map = NULL;
        return false;
    }
    uint8_t *end = a->map + a->map_bytes - GUARD;
    a->base = end - bytes - offset;
    a->base -= (uintptr_t)a->base % ALIGN;
    a->base += offset;
    if (gpu_on() && !(a->device = sparse ? gpu_reserve(payload) : gpu_alloc(payload)))
        return false;
    if (sparse)
        return true;
    if (mprotect(a->map + GUARD, payload, PROT_READ | PROT_WRITE))
        return false;
    put_pattern(a, a->map + GUARD, end);
    return true;
}

static bool end_of_map(const area *a, uint8_t *hi)
{
    return hi > a->map + a->map_bytes - GUARD;
}

/* Granules of the device are larger than pages: what they have more holds the pattern on both
 * sides. */
static bool back_twin(area *a, size_t first, size_t last)
{
    size_t lo, hi, *more = realloc(a->real, (size_t)(a->num_real + 2) * sizeof *more);

    if (!more || !gpu_back(a->device, first, last, &lo, &hi))
        return false;
    a->real = more;
    uint8_t *from = a->map + GUARD + lo, *to = a->map + GUARD + hi;
    if (end_of_map(a, to))
        to = a->map + a->map_bytes - GUARD;
    if (mprotect(from, (size_t)(to - from), PROT_READ | PROT_WRITE))
        return false;
    put_pattern(a, from, to);
    a->real[a->num_real++] = lo;
    a->real[a->num_real++] = (size_t)(to - a->map) - GUARD;
    return true;
}

bool area_back(area *a, int64_t first, int64_t bytes)
{
    uint8_t *lo = a->base + first, *hi = lo + bytes;

    lo -= (size_t)(lo - a->map) % PAGE;
    hi = a->map + round_up((size_t)(hi - a->map), PAGE);
    if (mprotect(lo, (size_t)(hi - lo), PROT_READ | PROT_WRITE))
        return false;
    put_pattern(a, lo, hi);
    return !a->device || back_twin(a, (size_t)(lo - a->map) - GUARD, (size_t)(hi - a->map) - GUARD);
}

void area_fill(area *a, uint32_t pattern)
{
    a->pattern = pattern;
    put_pattern(a, a->map + GUARD, a->map + a->map_bytes - GUARD);
}

bool area_freeze(area *a)
{
    return !a->map || a->sparse || !mprotect(a->map + GUARD, a->map_bytes - 2 * GUARD, PROT_READ);
}

static bool holds_pattern(const area *a, const uint8_t *first, const uint8_t *last)
{
    const size_t n = (size_t)a->pattern_bytes;

    while (first < last && (size_t)(first - a->map) % n != (size_t)(a->base - a->map) % n)
        if (*first++)
            return false;
    for (; first < last; first += n)
        if (memcmp(first, &a->pattern, (size_t)(last - first) < n ? (size_t)(last - first) : n))
            return false;
    return true;
}

bool area_slack_is_clean(const area *a)
{
    if (!a->map || a->sparse)
        return true;
    return holds_pattern(a, a->map + GUARD, a->base)
        && holds_pattern(a, a->base + a->bytes, a->map + a->map_bytes - GUARD);
}

void *area_address(const area *a, int64_t first)
{
    if (!a->base)
        return NULL;
    return a->device ? a->device + (a->base - (a->map + GUARD)) + first : a->base + first;
}

bool area_push(area *a)
{
    if (!a->device)
        return true;
    if (!a->sparse)
        return gpu_upload(a->device, a->map + GUARD, a->map_bytes - 2 * GUARD);
    for (int i = 0; i < a->num_real; i += 2)
        if (!gpu_upload(a->device + a->real[i], a->map + GUARD + a->real[i],
                        a->real[i + 1] - a->real[i]))
            return false;
    return true;
}

bool area_pull(area *a)
{
    return !a->device || a->sparse
           || gpu_download(a->map + GUARD, a->device, a->map_bytes - 2 * GUARD);
}

void area_free(area *a)
{
    if (a->device && a->sparse)
        gpu_unreserve(a->device);
    else if (a->device)
        gpu_free(a->device);
    free(a->real);
    if (a->map)
        munmap(a->map, a->map_bytes);
    *a = (area){ 0 };
}
