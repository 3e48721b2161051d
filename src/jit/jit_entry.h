/* SPDX-License-Identifier: Apache-2.0 */
/* jit_entry.h -- what a compiled kernel is called and how it lies in a file.
 *
 *   request   what is to be compiled: every text, every option, for whom, by whom
 *   key       128 bits over the request without its compiler, and 64 bits over the compiler's name
 *   blob      the compiled bytes with what the compiler said about them
 *   entry     a blob as bytes: the same in a cache folder and in a bundle
 *
 *       0        64            64 + meta_bytes          64 + meta_bytes + payload_bytes
 *       +--------+-------------+------------------------+
 *       | header | meta, padded| payload                |      the header holds a checksum over all three
 *       +--------+-------------+------------------------+
 *
 * The compiler is a part of its own in the key because a machine without any compiler must still find what another one made.
 */
#ifndef FV__JIT_ENTRY_H
#define FV__JIT_ENTRY_H

#include "status.h"

/* Raised when the same text no longer means the same to the host code that launches it. */
#define FV__JIT_GENERATOR 1

#define FV__JIT_MAX_ENTRY ((size_t)256 << 20)       /* bytes; a longer file is not one of ours */

typedef struct fv__jit_text {
    const char *name;               /* "attend_sm80.cu" */
    const char *text;
} fv__jit_text;

typedef struct fv__jit_request {
    const char *kind;               /* "cubin", "ptx", "so": also the file's suffix */
    const char *name;               /* what lines of the log call it; not in the key */
    const char *arch;               /* "sm_90a", "x86-64-avx512": also the folder's name */
    const char *compiler;           /* "nvrtc 13.0"; NULL: there is none here, anybody's output will do */
    const fv__jit_text *texts;      /* [num_texts] the source and all that it includes */
    const char *const *options;     /* [num_options] */
    int32_t num_texts;
    int32_t num_options;
    int32_t num_parts, max_registers;   /* CUDA: how it may be compiled in parts (cuda/jit.h); 0: whole. An option says which */
} fv__jit_request;

typedef struct fv__jit_key {
    uint64_t hi, lo;                /* XXH3-128 of generator version, kind, arch, options, texts */
    uint64_t compiler;              /* XXH3-64 of the compiler's name, 0: any */
} fv__jit_key;

typedef enum fv__jit_origin { FV__JIT_COMPILED, FV__JIT_DISK, FV__JIT_BUNDLE } fv__jit_origin;

typedef struct fv__jit_blob {
    const void *data;               /* [size], aligned to 16, a NUL behind the last byte */
    size_t size;
    const char *kind, *name, *arch, *compiler;
    const char *info;               /* what the compiler reported: lines of text, maybe empty */
    fv__jit_key key;
    fv__jit_origin origin;
    double build_ms;                /* compiling it, here and now; 0 when it was loaded */
    void *entry;                    /* [entry_size] the bytes that all of the above points into; owned */
    size_t entry_size;
} fv__jit_blob;

enum { FV__JIT_NAME_CHARS = 80 };   /* of "<32 hex digits>-<16 hex digits>.<kind>" with its NUL */

/* FV_E_INVALID when kind or arch could not be names of a file and a folder. */
fv_status fv__jit_key_of(const fv__jit_request *request, fv__jit_key *key, fv_error *err);
bool fv__jit_same(const fv__jit_key *a, const fv__jit_key *b);      /* the compilers compare equal when either is 0 */

/* The file's name of a key; with a key of any compiler, the part that all names of it begin with. */
void fv__jit_file_name(const fv__jit_key *key, const char *kind, char name[FV__JIT_NAME_CHARS]);

/* Makes an entry of a payload; *bytes is the caller's to free. */
fv_status fv__jit_entry_make(const fv__jit_request *request, const fv__jit_key *key, const void *payload, size_t payload_size,
                             const char *info, void **bytes, size_t *size, fv_error *err);

/* Checks `bytes` ([size], malloc'ed with at least one byte more) from its magic to its checksum and makes a blob that owns them.
 * NULL: *why says what is wrong, and the bytes stay the caller's. No input can make it read outside. */
fv__jit_blob *fv__jit_entry_read(void *bytes, size_t size, const char **why);

void fv__jit_blob_free(fv__jit_blob *blob);         /* NULL is fine */

/* Reads exactly [offset, offset + size) of an open file into malloc'ed memory with a NUL behind it. NULL: errno; 0 when the file is shorter. */
void *fv__jit_read_at(int fd, int64_t offset, size_t size);

/* Writes all of it at the file's position. A full disk, a quota, a file size limit: false and errno, never a signal. */
bool fv__jit_write_all(int fd, const void *bytes, size_t size);

#endif
