/* SPDX-License-Identifier: Apache-2.0 */
/* jit_entry.c -- keys and the entry format (drawing in jit_entry.h).
 *
 *   (1) every byte of an entry is under its checksum, the checksum itself aside;
 *   (2) an entry names its key: a file that was moved or copied to another name is not taken for something else;
 *   (3) parsing trusts nothing before the checksum holds, and no length even then.        [test_jit_cache: flips, cuts]
 */
#include "jit/jit_entry.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

typedef struct header {
    char magic[8];
    uint32_t header_bytes;          /* 64 */
    uint32_t meta_bytes;            /* a multiple of 16: the payload stays aligned */
    uint64_t payload_bytes;
    uint64_t key_hi, key_lo, key_compiler;
    uint64_t sum_hi, sum_lo;        /* XXH3-128 of the whole entry with these two zero */
} header;
_Static_assert(sizeof(header) == 64, "an entry's header is 64 bytes on every machine");

static const char entry_magic[8] = { 'F', 'V', 'K', 'E', 'R', 'N', '1', '\n' };

enum { NUM_META = 5 };              /* kind, name, arch, compiler, info: each with its NUL */

/* --------------------------------------------------------------------------------------------------------------- keys */

static bool is_file_name(const char *s)
{
    if (!s || !*s || *s == '.' || strlen(s) > 31) return false;
    for (; *s; s++) {
        const bool fine = (*s >= 'a' && *s <= 'z') || (*s >= 'A' && *s <= 'Z') || (*s >= '0' && *s <= '9') || strchr("_.+-", *s);
        if (!fine) return false;
    }
    return true;
}

/* The length goes first, so that no two lists of strings run together into the same bytes. */
static void hash_string(XXH3_state_t *state, const char *s)
{
    const uint64_t length = strlen(s);
    XXH3_128bits_update(state, &length, sizeof length);
    XXH3_128bits_update(state, s, (size_t)length);
}

static void hash_number(XXH3_state_t *state, int64_t number)
{
    XXH3_128bits_update(state, &number, sizeof number);
}

fv_status fv__jit_key_of(const fv__jit_request *r, fv__jit_key *key, fv_error *err)
{
    if (!is_file_name(r->kind) || !is_file_name(r->arch))
        return fv__fail(err, FV_E_INVALID, "jit.arch", 0, 0, "\"%s\" for \"%s\" cannot name a compiled kernel: letters, digits and _.+- only",
                        r->kind ? r->kind : "", r->arch ? r->arch : "");
    XXH3_state_t state;
    XXH3_128bits_reset(&state);
    hash_number(&state, FV__JIT_GENERATOR);
    hash_string(&state, r->kind);
    hash_string(&state, r->arch);
    hash_number(&state, r->num_options);
    for (int i = 0; i < r->num_options; i++) hash_string(&state, r->options[i]);
    hash_number(&state, r->num_texts);
    for (int i = 0; i < r->num_texts; i++) {
        hash_string(&state, r->texts[i].name);
        hash_string(&state, r->texts[i].text);
    }
    const XXH128_hash_t sum = XXH3_128bits_digest(&state);
    *key = (fv__jit_key){ .hi = sum.high64, .lo = sum.low64 };
    if (r->compiler) key->compiler = XXH3_64bits(r->compiler, strlen(r->compiler)) | 1;         /* never "any" */
    return FV_OK;
}

bool fv__jit_same(const fv__jit_key *a, const fv__jit_key *b)
{
    return a->hi == b->hi && a->lo == b->lo && (a->compiler == b->compiler || !a->compiler || !b->compiler);
}

void fv__jit_file_name(const fv__jit_key *key, const char *kind, char name[FV__JIT_NAME_CHARS])
{
    int n = snprintf(name, FV__JIT_NAME_CHARS, "%016llx%016llx-", (unsigned long long)key->hi, (unsigned long long)key->lo);
    if (key->compiler) snprintf(name + n, (size_t)(FV__JIT_NAME_CHARS - n), "%016llx.%s", (unsigned long long)key->compiler, kind);
}

/* ------------------------------------------------------------------------------------------------------------ entries */

static XXH128_hash_t entry_sum(const void *bytes, size_t size)
{
    header h;
    memcpy(&h, bytes, sizeof h);
    h.sum_hi = h.sum_lo = 0;
    XXH3_state_t state;
    XXH3_128bits_reset(&state);
    XXH3_128bits_update(&state, &h, sizeof h);
    XXH3_128bits_update(&state, (const char *)bytes + sizeof h, size - sizeof h);
    return XXH3_128bits_digest(&state);
}

fv_status fv__jit_entry_make(const fv__jit_request *r, const fv__jit_key *key, const void *payload, size_t payload_size,
                             const char *info, void **bytes, size_t *size, fv_error *err)
{
    const char *meta[NUM_META] = { r->kind, r->name, r->arch, r->compiler ? r->compiler : "", info ? info : "" };
    size_t meta_bytes = 0;
    for (int i = 0; i < NUM_META; i++) meta_bytes += strlen(meta[i]) + 1;
    meta_bytes = (meta_bytes + 15) & ~(size_t)15;

    if (meta_bytes > FV__JIT_MAX_ENTRY / 4 || payload_size > FV__JIT_MAX_ENTRY / 2)
        return fv__fail(err, FV_E_COMPILE, "jit.size", (int64_t)payload_size, (int64_t)(FV__JIT_MAX_ENTRY / 2),
                        "%s compiled into %zu bytes, which is more than a kernel can be", r->name, payload_size);
    const size_t total = sizeof(header) + meta_bytes + payload_size;
    char *entry = calloc(1, total + 1);
    if (!entry) return fv__fail(err, FV_E_NO_MEMORY, "jit", (int64_t)total, 0, "no memory for a compiled kernel of %zu bytes", total);

    header h = { .header_bytes = sizeof(header), .meta_bytes = (uint32_t)meta_bytes, .payload_bytes = payload_size,
                 .key_hi = key->hi, .key_lo = key->lo, .key_compiler = key->compiler };
    memcpy(h.magic, entry_magic, sizeof h.magic);
    char *at = entry + sizeof h;
    for (int i = 0; i < NUM_META; i++) at = stpcpy(at, meta[i]) + 1;
    if (payload_size) memcpy(entry + sizeof h + meta_bytes, payload, payload_size);
    memcpy(entry, &h, sizeof h);
    const XXH128_hash_t sum = entry_sum(entry, total);
    h.sum_hi = sum.high64;
    h.sum_lo = sum.low64;
    memcpy(entry, &h, sizeof h);
    *bytes = entry;
    *size = total;
    return FV_OK;
}

/* The five strings of the meta block; false when they do not end inside of it. */
static bool read_meta(const char *meta, size_t meta_bytes, const char *strings[NUM_META])
{
    size_t at = 0;
    for (int i = 0; i < NUM_META; i++) {
        const char *end = at < meta_bytes ? memchr(meta + at, 0, meta_bytes - at) : NULL;
        if (!end) return false;
        strings[i] = meta + at;
        at = (size_t)(end - meta) + 1;
    }
    return true;
}

/* NULL: nothing wrong up to the checksum. */
static const char *header_fault(const header *h, size_t size)
{
    if (memcmp(h->magic, entry_magic, sizeof h->magic) || h->header_bytes != sizeof *h) return "it does not begin like an entry";
    if (h->payload_bytes > FV__JIT_MAX_ENTRY || h->meta_bytes % 16) return "its lengths are impossible";
    if (sizeof *h + h->meta_bytes + h->payload_bytes != size) return "its length is not the one that it states";
    return NULL;
}

fv__jit_blob *fv__jit_entry_read(void *bytes, size_t size, const char **why)
{
    header h;
    const char *strings[NUM_META];
    if (size < sizeof h) {
        *why = size ? "it is cut short" : "it is empty";
        return NULL;
    }
    memcpy(&h, bytes, sizeof h);
    if ((*why = header_fault(&h, size))) return NULL;
    const XXH128_hash_t sum = entry_sum(bytes, size);
    if (sum.high64 != h.sum_hi || sum.low64 != h.sum_lo) {
        *why = "its checksum is wrong";
        return NULL;
    }
    if (!read_meta((const char *)bytes + sizeof h, h.meta_bytes, strings)) {
        *why = "its description does not end";
        return NULL;
    }
    fv__jit_blob *blob = malloc(sizeof *blob);
    if (!blob) {
        *why = "there is no memory to load it";
        return NULL;
    }
    *blob = (fv__jit_blob){
        .data = (const char *)bytes + sizeof h + h.meta_bytes, .size = (size_t)h.payload_bytes,
        .kind = strings[0], .name = strings[1], .arch = strings[2], .compiler = strings[3], .info = strings[4],
        .key = { h.key_hi, h.key_lo, h.key_compiler }, .entry = bytes, .entry_size = size,
    };
    return blob;
}

void fv__jit_blob_free(fv__jit_blob *blob)
{
    if (!blob) return;
    free(blob->entry);
    free(blob);
}

/* -------------------------------------------------------------------------------------------------------------- bytes */

void *fv__jit_read_at(int fd, int64_t offset, size_t size)
{
    char *bytes = malloc(size + 1);
    size_t done = 0;
    while (bytes && done < size) {
        const ssize_t n = pread(fd, bytes + done, size - done, (off_t)(offset + (int64_t)done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            if (n == 0) errno = 0;
            free(bytes);
            return NULL;
        }
        done += (size_t)n;
    }
    if (bytes) bytes[size] = 0;
    return bytes;
}

static bool write_plain(int fd, const char *bytes, size_t size)
{
    while (size) {
        const ssize_t n = write(fd, bytes, size);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        bytes += n;
        size -= (size_t)n;
    }
    return true;
}

/* Beyond RLIMIT_FSIZE the kernel sends SIGXFSZ, which would end the host's process for the sake of a cache. It is sent to the
 * writing thread: blocked and taken back here, it is seen by nobody. One that was pending before stays pending. */
bool fv__jit_write_all(int fd, const void *bytes, size_t size)
{
    sigset_t limit, before, pending;
    sigemptyset(&limit);
    sigaddset(&limit, SIGXFSZ);
    sigpending(&pending);
    pthread_sigmask(SIG_BLOCK, &limit, &before);
    const bool fine = write_plain(fd, bytes, size);
    const int error = errno;
    if (!fine && error == EFBIG && !sigismember(&pending, SIGXFSZ))
        while (sigtimedwait(&limit, NULL, &(struct timespec){ 0 }) < 0 && errno == EINTR) { }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = error;
    return fine;
}
