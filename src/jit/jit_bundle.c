/* SPDX-License-Identifier: Apache-2.0 */
/* jit_bundle.c -- bundles (drawing in jit_bundle.h): sorted index, binary search, pread. */
#include "jit/jit_bundle.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

typedef struct header {
    char magic[8];
    uint64_t count;
    uint64_t sum_hi, sum_lo;        /* XXH3-128 of the index */
} header;

typedef struct item {
    fv__jit_key key;
    uint64_t offset, size;          /* bytes of the file */
} item;
_Static_assert(sizeof(header) == 32 && sizeof(item) == 40, "a bundle is the same on every machine");

struct fv__jit_bundle {
    int fd;
    int64_t count;
    item *items;                    /* [count], by key */
};

static const char bundle_magic[8] = { 'F', 'V', 'B', 'N', 'D', 'L', '1', '\n' };

enum { MAX_ITEMS = 1 << 20 };

static int compare_u64(uint64_t a, uint64_t b)
{
    return a < b ? -1 : a > b;
}

static int compare_keys(const fv__jit_key *a, const fv__jit_key *b)
{
    const int hi = compare_u64(a->hi, b->hi), lo = compare_u64(a->lo, b->lo);
    return hi ? hi : lo ? lo : compare_u64(a->compiler, b->compiler);
}

/* ------------------------------------------------------------------------------------------------------------ writing */

static int by_key(const void *a, const void *b)
{
    return compare_keys(&(*(const fv__jit_blob *const *)a)->key, &(*(const fv__jit_blob *const *)b)->key);
}

/* Sorted, each key once. */
static int sort_blobs(const fv__jit_blob **sorted, const fv__jit_blob *const *blobs, int count)
{
    int kept = 0;
    for (int i = 0; i < count; i++) sorted[i] = blobs[i];
    qsort(sorted, (size_t)count, sizeof *sorted, by_key);
    for (int i = 0; i < count; i++)
        if (!kept || by_key(&sorted[kept - 1], &sorted[i])) sorted[kept++] = sorted[i];
    return kept;
}

static uint64_t padded(uint64_t bytes)
{
    return (bytes + 15) & ~(uint64_t)15;
}

static bool write_entries(int fd, const fv__jit_blob *const *blobs, const item *items, int count)
{
    static const char zeros[16];
    const size_t index_bytes = (size_t)count * sizeof *items;
    const XXH128_hash_t sum = XXH3_128bits(items, index_bytes);
    header h = { .count = (uint64_t)count, .sum_hi = sum.high64, .sum_lo = sum.low64 };
    memcpy(h.magic, bundle_magic, sizeof h.magic);
    bool fine = fv__jit_write_all(fd, &h, sizeof h) && fv__jit_write_all(fd, items, index_bytes)
             && fv__jit_write_all(fd, zeros, (size_t)(padded(sizeof h + index_bytes) - sizeof h - index_bytes));
    for (int i = 0; fine && i < count; i++)
        fine = fv__jit_write_all(fd, blobs[i]->entry, blobs[i]->entry_size)
            && fv__jit_write_all(fd, zeros, (size_t)(padded(items[i].size) - items[i].size));
    return fine && !fsync(fd);
}

static fv_status write_file(const char *path, const fv__jit_blob *const *blobs, const item *items, int count, fv_error *err)
{
    char temporary[PATH_MAX];
    if (snprintf(temporary, sizeof temporary, "%s.tmp.%ld", path, (long)getpid()) >= (int)sizeof temporary)
        return fv__fail(err, FV_E_INVALID, "bundle", (int64_t)strlen(path), PATH_MAX, "the bundle's path is too long");
    const int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
    const bool fine = fd >= 0 && write_entries(fd, blobs, items, count) && !rename(temporary, path);
    const int error = errno;
    if (fd >= 0) close(fd);
    if (fine) return FV_OK;
    if (fd >= 0) unlink(temporary);
    return fv__fail(err, FV_E_IO, "bundle", error, 0, "the bundle %.200s cannot be written: %s", path, strerror(error));
}

fv_status fv__jit_bundle_write(const char *path, const fv__jit_blob *const *blobs, int count, fv_error *err)
{
    if (count < 0 || count > MAX_ITEMS)
        return fv__fail(err, FV_E_INVALID, "bundle", count, MAX_ITEMS, "a bundle holds up to %d kernels, not %d", MAX_ITEMS, count);
    const fv__jit_blob **sorted = calloc((size_t)count + 1, sizeof *sorted);
    item *items = calloc((size_t)count + 1, sizeof *items);
    fv_status status = FV_E_NO_MEMORY;
    if (sorted && items) {
        const int kept = sort_blobs(sorted, blobs, count);
        uint64_t offset = padded(sizeof(header) + (uint64_t)kept * sizeof *items);
        for (int i = 0; i < kept; i++) {
            items[i] = (item){ sorted[i]->key, offset, sorted[i]->entry_size };
            offset += padded(items[i].size);
        }
        status = write_file(path, sorted, items, kept, err);
    } else {
        fv__fail(err, FV_E_NO_MEMORY, "bundle", count, 0, "no memory for the index of %d kernels", count);
    }
    free(items);
    free(sorted);
    return status;
}

/* ------------------------------------------------------------------------------------------------------------ reading */

static bool items_are_sound(const item *items, int64_t count, uint64_t file_size)
{
    for (int64_t i = 0; i < count; i++) {
        if (items[i].size > FV__JIT_MAX_ENTRY || items[i].offset > file_size || items[i].size > file_size - items[i].offset) return false;
        if (i && compare_keys(&items[i - 1].key, &items[i].key) >= 0) return false;
    }
    return true;
}

/* NULL: *items [*count] is the index. */
static const char *read_index(int fd, item **items, int64_t *count)
{
    struct stat st;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode)) return "it is not a file";
    if (st.st_mode & S_IWOTH) return "it can be written by everybody (chmod o-w makes it usable)";
    header *h = fv__jit_read_at(fd, 0, sizeof *h);
    if (!h) return "it is cut short";
    const header head = *h;
    free(h);
    if (memcmp(head.magic, bundle_magic, sizeof head.magic)) return "it does not begin like a bundle";
    if (head.count > MAX_ITEMS) return "its index is damaged";
    const size_t bytes = (size_t)head.count * sizeof(item);
    *items = fv__jit_read_at(fd, sizeof head, bytes);
    if (!*items) return "it is cut short";
    const XXH128_hash_t sum = XXH3_128bits(*items, bytes);
    *count = (int64_t)head.count;
    if (sum.high64 == head.sum_hi && sum.low64 == head.sum_lo && items_are_sound(*items, *count, (uint64_t)st.st_size)) return NULL;
    free(*items);
    *items = NULL;
    return "its index is damaged";
}

fv__jit_bundle *fv__jit_bundle_open(const char *path, char why[FV__JIT_WHY_CHARS])
{
    fv__jit_bundle b = { .fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC) };
    const char *fault = b.fd < 0 ? strerror(errno) : read_index(b.fd, &b.items, &b.count);
    fv__jit_bundle *bundle = fault ? NULL : malloc(sizeof *bundle);
    if (bundle) {
        *bundle = b;
        return bundle;
    }
    snprintf(why, FV__JIT_WHY_CHARS, "the bundle %.200s cannot be used: %s", path, fault ? fault : "no memory");
    if (b.fd >= 0) close(b.fd);
    free(b.items);
    return NULL;
}

void fv__jit_bundle_close(fv__jit_bundle *bundle)
{
    if (!bundle) return;
    close(bundle->fd);
    free(bundle->items);
    free(bundle);
}

int64_t fv__jit_bundle_count(const fv__jit_bundle *bundle)
{
    return bundle->count;
}

fv__jit_found fv__jit_bundle_entry(const fv__jit_bundle *bundle, int64_t i, fv__jit_blob **blob, char why[FV__JIT_WHY_CHARS])
{
    const item *it = &bundle->items[i];
    const char *fault = "it cannot be read";
    void *bytes = fv__jit_read_at(bundle->fd, (int64_t)it->offset, (size_t)it->size);
    *blob = bytes ? fv__jit_entry_read(bytes, (size_t)it->size, &fault) : NULL;
    if (*blob && !compare_keys(&(*blob)->key, &it->key)) return FV__JIT_HIT;
    if (*blob) {
        fault = "it is the entry of something else";
        fv__jit_blob_free(*blob);
        bytes = *blob = NULL;
    }
    free(bytes);
    snprintf(why, FV__JIT_WHY_CHARS, "entry %lld of a bundle is damaged: %s", (long long)i, fault);
    return FV__JIT_DAMAGED;
}

/* The first entry that is not below `key`. */
static int64_t lower_bound(const fv__jit_bundle *bundle, const fv__jit_key *key)
{
    int64_t first = 0, last = bundle->count;
    while (first < last) {
        const int64_t middle = first + (last - first) / 2;
        if (compare_keys(&bundle->items[middle].key, key) < 0) first = middle + 1;
        else last = middle;
    }
    return first;
}

fv__jit_found fv__jit_bundle_read(const fv__jit_bundle *bundle, const fv__jit_key *key, fv__jit_blob **blob, char why[FV__JIT_WHY_CHARS])
{
    *blob = NULL;
    const fv__jit_key any = { key->hi, key->lo, 0 };
    const int64_t first = lower_bound(bundle, &any);
    int64_t take = -1;
    for (int64_t i = first; i < bundle->count && fv__jit_same(&bundle->items[i].key, &any); i++)
        if (take < 0 || bundle->items[i].key.compiler == key->compiler) take = i;
    return take < 0 ? FV__JIT_MISS : fv__jit_bundle_entry(bundle, take, blob, why);
}
