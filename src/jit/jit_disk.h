/* SPDX-License-Identifier: Apache-2.0 */
/* jit_disk.h -- a folder of entries: <root>/<version>/<arch>/<xx>/<32 hex>-<16 hex>.<kind>
 *
 * A folder is code that this process will run, so it is read only where nobody but its owner can have written: see jit_disk.c.
 * Nothing is kept open and nothing is remembered between calls: a folder may be emptied, removed or repaired at any time. */
#ifndef FV__JIT_DISK_H
#define FV__JIT_DISK_H

#include "jit/jit_entry.h"

typedef enum fv__jit_found {
    FV__JIT_HIT,
    FV__JIT_MISS,
    FV__JIT_DAMAGED,                /* an entry is there and must not be loaded */
    FV__JIT_REFUSED,                /* the folder cannot be used or trusted */
} fv__jit_found;

typedef struct fv__jit_disk {
    char *root;                     /* absolute; owned by whoever made this */
    size_t must_exist;              /* leading bytes of root that are never created: the home, the temporary directory */
    bool shared;                    /* a read-only folder that an administrator shipped: any owner, but not writable by all */
    bool no_link;                   /* root must not be a symbolic link: it lies in a directory that everybody can write */
} fv__jit_disk;

enum { FV__JIT_WHY_CHARS = 320 };

/* Reads the entry of `key` (of any compiler where key->compiler is 0 or, in a shared folder, where its own is missing). */
fv__jit_found fv__jit_disk_read(const fv__jit_disk *disk, const fv__jit_key *key, const char *kind, const char *arch,
                                fv__jit_blob **blob, char why[FV__JIT_WHY_CHARS]);

/* Writes an entry so that a reader sees all of it or nothing, whoever else reads, writes or dies meanwhile. */
bool fv__jit_disk_write(const fv__jit_disk *disk, const fv__jit_key *key, const char *kind, const char *arch,
                        const void *bytes, size_t size, char why[FV__JIT_WHY_CHARS]);

/* Removes what writers that died have left. */
void fv__jit_disk_sweep(const fv__jit_disk *disk);

#endif
