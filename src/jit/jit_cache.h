/* SPDX-License-Identifier: Apache-2.0 */
/* jit_cache.h -- compiled kernels by what they were compiled from, for the GPU and for the CPU's run-time compiler alike.
 *
 * fv__jit_cache_get looks in memory, in the cache folder, in the bundles and folders of FV_KERNEL_PATH, and then compiles. One compilation
 * per process and request: other threads that ask meanwhile wait for it. Between processes nobody waits for anybody.
 *
 * A folder that is read-only, missing, full or not to be trusted costs nothing but time: what is compiled stays in memory, and one line
 * in the log says so. */
#ifndef FV__JIT_CACHE_H
#define FV__JIT_CACHE_H

#include "jit/jit_bundle.h"
#include "log.h"

typedef struct fv__jit_cache fv__jit_cache;

/* Fields that are NULL (or -1) come from the environment; the strings are copied. */
typedef struct fv__jit_cache_desc {
    const char *dir;                /* FV_CACHE_DIR, $XDG_CACHE_HOME/foveal, $HOME/.cache/foveal, foveal-<uid> in TMPDIR or /tmp;
                                       "" keeps everything in memory */
    const char *kernel_path;        /* FV_KERNEL_PATH: bundles and cache folders, with colons between; never written */
    int disable_jit;                /* FV_DISABLE_JIT: 1 forbids to compile, 0 allows it, -1 asks the environment */
    const fv__log *log;             /* NULL: silent. Copied */
} fv__jit_cache_desc;

/* What a compiler makes: malloc'ed, the cache takes both. */
typedef struct fv__jit_output {
    void *data;
    size_t size;
    char *info;                     /* lines of text about it; may be NULL */
} fv__jit_output;

/* Compiles `request`. Runs on the thread that asked, under no lock. On failure *out stays empty. */
typedef fv_status fv__jit_compile_fn(void *user, const fv__jit_request *request, fv__jit_output *out, fv_error *err);

typedef struct fv__jit_stats {
    int64_t compiles, compile_failures;
    int64_t memory_hits, disk_hits, bundle_hits;
    int64_t waits;                  /* threads that waited for another one's compilation */
    int64_t damaged;                /* entries that were there and were not loaded */
    int64_t writes, write_failures;
    int64_t compile_ns, load_ns;    /* in the compiler; in reading folders and bundles */
} fv__jit_stats;

/* Never fails for the sake of a folder: only FV_E_NO_MEMORY. */
fv_status fv__jit_cache_open(const fv__jit_cache_desc *desc, fv__jit_cache **cache, fv_error *err);
void fv__jit_cache_close(fv__jit_cache **cache);                /* all blobs with it; no thread may be inside */

/* *blob is the cache's and stays valid until it is closed. `compile` may be NULL: look, do not compile.
 * FV_E_NOT_READY: it is nowhere and may not be compiled. FV_E_COMPILE and others: what `compile` said, told to all who waited.
 * Blocks. May be called by many threads; after a fork the child goes on with what the parent had. */
fv_status fv__jit_cache_get(fv__jit_cache *cache, const fv__jit_request *request, fv__jit_compile_fn *compile, void *user,
                            const fv__jit_blob **blob, fv_error *err);

void fv__jit_cache_stats(fv__jit_cache *cache, fv__jit_stats *stats);
const char *fv__jit_cache_folder(const fv__jit_cache *cache);   /* the root; "": memory only */

/* A blob of kind "so" as a library of this process, without a file that could be swapped or a folder that forbids execution. */
typedef struct fv__jit_library {
    void *handle;                   /* for dlsym */
    int fd;                         /* stays open: the loader knows the library by this number's path */
} fv__jit_library;

fv_status fv__jit_library_open(const fv__jit_blob *blob, fv__jit_library *library, fv_error *err);
void fv__jit_library_close(fv__jit_library *library);

#endif
