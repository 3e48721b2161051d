/* SPDX-License-Identifier: Apache-2.0 */
/* jit_bundle.h -- many entries in one file, made once and read for ever: kernels for machines that do not compile.
 *
 *       0        32             32 + 40 * count
 *       +--------+--------------+---------+---------+---
 *       | header | index, sorted| entry 0 | entry 1 | ...     each entry starts at a multiple of 16
 *       +--------+--------------+---------+---------+---
 *
 * The index has a checksum of its own, so that one damaged entry costs one entry. */
#ifndef FV__JIT_BUNDLE_H
#define FV__JIT_BUNDLE_H

#include "jit/jit_disk.h"

typedef struct fv__jit_bundle fv__jit_bundle;

/* Writes the entries of `blobs` to `path`, by rename: the same blobs in any order give the same bytes. */
fv_status fv__jit_bundle_write(const char *path, const fv__jit_blob *const *blobs, int count, fv_error *err);

/* Opens a bundle and reads its index; NULL: why. It may be read by many threads at once. */
fv__jit_bundle *fv__jit_bundle_open(const char *path, char why[FV__JIT_WHY_CHARS]);
void fv__jit_bundle_close(fv__jit_bundle *bundle);              /* NULL is fine */

/* The entry made by the key's compiler or, where there is none, by any other. Never FV__JIT_REFUSED. */
fv__jit_found fv__jit_bundle_read(const fv__jit_bundle *bundle, const fv__jit_key *key, fv__jit_blob **blob, char why[FV__JIT_WHY_CHARS]);

int64_t fv__jit_bundle_count(const fv__jit_bundle *bundle);
/* Entry i of [0, count) in the index's order, for lists of what a bundle holds. */
fv__jit_found fv__jit_bundle_entry(const fv__jit_bundle *bundle, int64_t i, fv__jit_blob **blob, char why[FV__JIT_WHY_CHARS]);

#endif
