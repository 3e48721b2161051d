/* SPDX-License-Identifier: Apache-2.0 */
/* jit_cache.c -- one table in memory in front of a folder, some bundles and a compiler.
 *
 *                 first to ask                      found or compiled
 *      EMPTY  -------------------->  BUILDING  ---------------------------->  READY   (for ever)
 *        ^                              |
 *        +------------------------------+   failed: those who waited get the error, the next to ask tries again
 *
 *   (1) slots are pushed in front of their chain when complete and never removed: the table can be walked at any moment, also by the child
 *       of a fork that happened in the middle of a push;
 *   (2) BUILDING names the process that builds. In a child its builder does not exist, so there it counts as EMPTY;
 *   (3) nothing is read, written, compiled or logged under the lock.
 */
#include "jit/jit_cache.h"
#include "os.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NUM_CHAINS = 256, MAX_SOURCES = 64 };

typedef enum state { EMPTY, BUILDING, READY } state;

typedef struct slot {
    struct slot *next;
    fv__jit_key key;
    state state;
    pid_t builder;
    fv_error error;                 /* of the last attempt that failed */
    fv__jit_blob *blob;             /* READY: never changes again */
} slot;

/* One element of the kernel path: a bundle or a folder. */
typedef struct source {
    fv__jit_bundle *bundle;
    fv__jit_disk folder;
} source;

struct fv__jit_cache {
    pthread_mutex_t mutex;          /* guards slots and stats */
    pthread_cond_t changed;         /* some slot left BUILDING */
    _Atomic pid_t process;          /* whose mutex this is; 0: being made anew after a fork */
    slot *_Atomic chains[NUM_CHAINS];
    fv__jit_stats stats;

    fv__jit_disk disk;              /* root "" : none */
    bool no_home;                   /* the folder is the last resort in the temporary directory */
    bool disable_jit;
    source sources[MAX_SOURCES];
    int num_sources;

    atomic_flag swept;
    atomic_flag complained;         /* about the folder: once */
    fv__log log;
};

/* ---------------------------------------------------------------------------------------------------------- furniture */

/* The child of a fork has one thread and a mutex that a thread of its parent may have held: it makes a new one. (1) keeps the table whole. */
static void adopt(fv__jit_cache *c, pid_t owner, pid_t self)
{
    if (!atomic_compare_exchange_strong(&c->process, &owner, 0)) {
        while (atomic_load(&c->process) != self) sched_yield();
        return;
    }
    pthread_mutex_init(&c->mutex, NULL);
    pthread_cond_init(&c->changed, NULL);
    atomic_store(&c->process, self);
}

static void lock(fv__jit_cache *c)
{
    const pid_t self = getpid(), owner = atomic_load(&c->process);
    if (owner != self) adopt(c, owner, self);
    pthread_mutex_lock(&c->mutex);
}

static void unlock(fv__jit_cache *c)
{
    pthread_mutex_unlock(&c->mutex);
}

static void count(fv__jit_cache *c, int64_t *counter, int64_t by)
{
    lock(c);
    *counter += by;
    unlock(c);
}

/* ------------------------------------------------------------------------------------------------------- environment */

/* The folder failed us. Said once: everything still works, only slower at the next start. */
static void complain(fv__jit_cache *c, const char *why)
{
    if (!atomic_flag_test_and_set(&c->complained))
        fv__log_line(&c->log, FV_LOG_WARN, "kernel cache: %s; kernels are compiled in memory and not kept", why);
}

/* base + rest as an absolute path, of which the first `keep` bytes are not ours to create. */
static void set_root(fv__jit_disk *disk, const char *base, const char *rest, bool keep_base)
{
    char path[PATH_MAX], here[PATH_MAX];
    const bool relative = *base != '/';
    if (relative && !getcwd(here, sizeof here)) return;
    const int n = snprintf(path, sizeof path, "%s%s%s%s", relative ? here : "", relative ? "/" : "", base, rest);
    if (n < 0 || n >= (int)sizeof path) return;
    disk->root = strdup(path);
    disk->must_exist = keep_base ? (size_t)n - strlen(rest) : 0;
}

/* Where compiled kernels are kept; the root stays NULL when a path is longer than paths can be. */
static void choose_root(fv__jit_cache *c, const char *dir)
{
    const char *named = dir ? dir : fv__os_env("FV_CACHE_DIR");
    const char *cache_home = fv__os_env("XDG_CACHE_HOME"), *home = fv__os_env("HOME"), *tmp = fv__os_env("TMPDIR");
    char rest[48];
    if (named) {
        if (*named) set_root(&c->disk, named, "", false);
    } else if (cache_home && *cache_home == '/') {          /* the standard says to ignore a relative one */
        set_root(&c->disk, cache_home, "/foveal", false);
    } else if (home && *home == '/') {
        set_root(&c->disk, home, "/.cache/foveal", true);
    } else {
        snprintf(rest, sizeof rest, "/foveal-%lu", (unsigned long)geteuid());
        set_root(&c->disk, tmp && *tmp == '/' ? tmp : "/tmp", rest, true);
        c->disk.no_link = c->no_home = true;
    }
}

static void add_source(fv__jit_cache *c, const char *path)
{
    char why[FV__JIT_WHY_CHARS] = "";
    struct stat st;
    source *s = &c->sources[c->num_sources];
    if (c->num_sources == MAX_SOURCES) {
        fv__log_line(&c->log, FV_LOG_WARN, "kernel path: %s is ignored, there are %d before it", path, MAX_SOURCES);
        return;
    }
    if (!stat(path, &st) && S_ISDIR(st.st_mode)) {
        set_root(&s->folder, path, "", true);
        s->folder.shared = true;
        if (s->folder.root) c->num_sources++;
        return;
    }
    s->bundle = fv__jit_bundle_open(path, why);
    if (s->bundle) c->num_sources++;
    else fv__log_line(&c->log, FV_LOG_WARN, "kernel path: %s", why);
}

static void add_sources(fv__jit_cache *c, const char *kernel_path)
{
    const char *list = kernel_path ? kernel_path : fv__os_env("FV_KERNEL_PATH");
    char *copy = list ? strdup(list) : NULL, *rest = copy;
    for (char *path; copy && (path = strsep(&rest, ":")); )
        if (*path) add_source(c, path);
    free(copy);
}

static bool is_set(const char *value)
{
    return value && strcmp(value, "0") && strcmp(value, "off") && strcmp(value, "no") && strcmp(value, "false");
}

fv_status fv__jit_cache_open(const fv__jit_cache_desc *desc, fv__jit_cache **cache, fv_error *err)
{
    fv__jit_cache *c = calloc(1, sizeof *c);
    *cache = NULL;
    if (!c) return fv__fail(err, FV_E_NO_MEMORY, "jit_cache", (int64_t)sizeof *c, 0, "no memory for the table of compiled kernels");
    pthread_mutex_init(&c->mutex, NULL);
    pthread_cond_init(&c->changed, NULL);
    atomic_store(&c->process, getpid());
    if (desc->log) c->log = *desc->log;
    c->disable_jit = desc->disable_jit < 0 ? is_set(fv__os_env("FV_DISABLE_JIT")) : desc->disable_jit != 0;
    choose_root(c, desc->dir);
    const char *named = desc->dir ? desc->dir : fv__os_env("FV_CACHE_DIR");
    if (!c->disk.root && !(named && !*named)) complain(c, "the path of its folder is too long");
    add_sources(c, desc->kernel_path);
    *cache = c;
    return FV_OK;
}

void fv__jit_cache_close(fv__jit_cache **cache)
{
    fv__jit_cache *c = *cache;
    *cache = NULL;
    if (!c) return;
    for (int i = 0; i < NUM_CHAINS; i++)
        for (slot *s = atomic_load(&c->chains[i]), *next; s; s = next) {
            next = s->next;
            fv__jit_blob_free(s->blob);
            free(s);
        }
    for (int i = 0; i < c->num_sources; i++) {
        fv__jit_bundle_close(c->sources[i].bundle);
        free(c->sources[i].folder.root);
    }
    free(c->disk.root);
    pthread_mutex_destroy(&c->mutex);
    pthread_cond_destroy(&c->changed);
    free(c);
}

const char *fv__jit_cache_folder(const fv__jit_cache *c)
{
    return c->disk.root ? c->disk.root : "";
}

void fv__jit_cache_stats(fv__jit_cache *c, fv__jit_stats *stats)
{
    lock(c);
    *stats = c->stats;
    unlock(c);
}

/* -------------------------------------------------------------------------------------------- what to find, and where */

static fv__jit_blob *from_disk(fv__jit_cache *c, const fv__jit_request *r, const fv__jit_key *key, bool *may_write)
{
    char why[FV__JIT_WHY_CHARS] = "";
    fv__jit_blob *blob = NULL;
    *may_write = c->disk.root != NULL;
    if (!c->disk.root) return NULL;
    if (!atomic_flag_test_and_set(&c->swept)) fv__jit_disk_sweep(&c->disk);

    switch (fv__jit_disk_read(&c->disk, key, r->kind, r->arch, &blob, why)) {
    case FV__JIT_HIT:
        blob->origin = FV__JIT_DISK;
        count(c, &c->stats.disk_hits, 1);
        break;
    case FV__JIT_MISS:
        break;
    case FV__JIT_DAMAGED:
        count(c, &c->stats.damaged, 1);
        fv__log_line(&c->log, FV_LOG_WARN, "kernel cache: %s: in %s, %s; it is compiled again", r->name, c->disk.root, why);
        break;
    case FV__JIT_REFUSED:
        *may_write = false;
        complain(c, why);
        break;
    }
    return blob;
}

static fv__jit_blob *from_sources(fv__jit_cache *c, const fv__jit_request *r, const fv__jit_key *key)
{
    for (int i = 0; i < c->num_sources; i++) {
        char why[FV__JIT_WHY_CHARS] = "";
        fv__jit_blob *blob = NULL;
        const source *s = &c->sources[i];
        const fv__jit_found found = s->bundle ? fv__jit_bundle_read(s->bundle, key, &blob, why)
                                              : fv__jit_disk_read(&s->folder, key, r->kind, r->arch, &blob, why);
        if (found == FV__JIT_HIT) {
            blob->origin = FV__JIT_BUNDLE;
            count(c, &c->stats.bundle_hits, 1);
            return blob;
        }
        if (found == FV__JIT_MISS) continue;
        count(c, &c->stats.damaged, found == FV__JIT_DAMAGED);
        fv__log_line(&c->log, FV_LOG_WARN, "kernel path: %s: %s", r->name, why);
    }
    return NULL;
}

static void to_disk(fv__jit_cache *c, const fv__jit_request *r, const fv__jit_blob *blob)
{
    char why[FV__JIT_WHY_CHARS] = "";
    const bool done = fv__jit_disk_write(&c->disk, &blob->key, r->kind, r->arch, blob->entry, blob->entry_size, why);
    count(c, done ? &c->stats.writes : &c->stats.write_failures, 1);
    if (!done) complain(c, why);
    else if (c->no_home && !atomic_flag_test_and_set(&c->complained))
        fv__log_line(&c->log, FV_LOG_WARN, "kernel cache: FV_CACHE_DIR, XDG_CACHE_HOME and HOME are not set; kernels are compiled in memory, copies are kept in %s",
            c->disk.root);
}

static fv_status forbidden(const fv__jit_request *r, bool disabled, fv_error *err)
{
    if (disabled && !strcmp(r->kind, "so"))
        return fv__fail(err, FV_E_NOT_READY, "FV_DISABLE_JIT", 1, 0,
                        "%s for %s is in no cache folder, and FV_DISABLE_JIT forbids to compile it; the cache folder of a machine that has compiled it "
                        "can stand in FV_KERNEL_PATH", r->name, r->arch);
    if (disabled)
        return fv__fail(err, FV_E_NOT_READY, "FV_DISABLE_JIT", 1, 0,
                        "%s for %s is in no cache folder and no bundle, and FV_DISABLE_JIT forbids to compile it; `foveal jit --bundle` makes one for "
                        "FV_KERNEL_PATH", r->name, r->arch);
    return fv__fail(err, FV_E_NOT_READY, "jit", 0, 0, "%s for %s has not been compiled", r->name, r->arch);
}

static fv_status compiled(fv__jit_cache *c, const fv__jit_request *r, const fv__jit_key *key, fv__jit_compile_fn *compile, void *user,
                          fv__jit_blob **blob, fv_error *err)
{
    fv__jit_output out = { 0 };
    const int64_t before = fv__os_now_ns();
    fv_status status = compile(user, r, &out, err);
    const int64_t took = fv__os_now_ns() - before;
    count(c, status == FV_OK ? &c->stats.compiles : &c->stats.compile_failures, 1);
    count(c, &c->stats.compile_ns, took);
    if (status != FV_OK) return status;

    void *bytes = NULL;
    size_t size = 0;
    const char *fault = NULL;
    status = fv__jit_entry_make(r, key, out.data, out.size, out.info, &bytes, &size, err);
    free(out.data);
    free(out.info);
    if (status != FV_OK) return status;
    *blob = fv__jit_entry_read(bytes, size, &fault);
    if (!*blob) {
        free(bytes);
        return fv__fail(err, FV_E_NO_MEMORY, "jit", (int64_t)size, 0, "%s was compiled, but %s", r->name, fault);
    }
    (*blob)->origin = FV__JIT_COMPILED;
    (*blob)->build_ms = (double)took * 1e-6;
    return FV_OK;
}

/* Folder, bundles, compiler. */
static fv_status build(fv__jit_cache *c, const fv__jit_request *r, const fv__jit_key *key, fv__jit_compile_fn *compile, void *user,
                       fv__jit_blob **blob, fv_error *err)
{
    bool may_write = false;
    const int64_t before = fv__os_now_ns();
    *blob = from_disk(c, r, key, &may_write);
    if (!*blob) *blob = from_sources(c, r, key);
    count(c, &c->stats.load_ns, fv__os_now_ns() - before);
    if (*blob) return FV_OK;
    if (!compile || c->disable_jit) return forbidden(r, compile != NULL, err);
    FV_TRY(compiled(c, r, key, compile, user, blob, err));
    if (may_write) to_disk(c, r, *blob);
    return FV_OK;
}

/* -------------------------------------------------------------------------------------------------------------- slots */

/* The slot of a key; under the lock. NULL: no memory. */
static slot *find_slot(fv__jit_cache *c, const fv__jit_key *key)
{
    slot *_Atomic *chain = &c->chains[key->lo % NUM_CHAINS];
    for (slot *s = atomic_load(chain); s; s = s->next)
        if (s->key.hi == key->hi && s->key.lo == key->lo && s->key.compiler == key->compiler) return s;
    slot *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->key = *key;
    s->next = atomic_load(chain);
    atomic_store(chain, s);
    return s;
}

static bool being_built(const slot *s)
{
    return s->state == BUILDING && s->builder == getpid();          /* (2) */
}

/* Waits until nobody of this process builds `s`; under the lock. Says whether it had to. */
static bool wait_for(fv__jit_cache *c, const slot *s)
{
    const bool waited = being_built(s);
    c->stats.waits += waited;
    while (being_built(s)) pthread_cond_wait(&c->changed, &c->mutex);
    return waited;
}

static fv_status copy_error(const fv_error *from, fv_error *to)
{
    if (to) *to = *from;
    return from->status;
}

static fv_status build_slot(fv__jit_cache *c, slot *s, const fv__jit_request *r, fv__jit_compile_fn *compile, void *user, fv_error *err)
{
    fv__jit_blob *blob = NULL;
    fv_error error = { 0 };
    const fv_status status = build(c, r, &s->key, compile, user, &blob, &error);
    error.status = status;
    lock(c);
    s->blob = blob;
    s->state = blob ? READY : EMPTY;
    if (!blob) s->error = error;
    pthread_cond_broadcast(&c->changed);
    unlock(c);
    return blob ? FV_OK : copy_error(&error, err);
}

fv_status fv__jit_cache_get(fv__jit_cache *c, const fv__jit_request *r, fv__jit_compile_fn *compile, void *user,
                            const fv__jit_blob **blob, fv_error *err)
{
    fv__jit_key key;
    fv_error error = { 0 };
    *blob = NULL;
    FV_TRY(fv__jit_key_of(r, &key, err));

    lock(c);
    slot *s = find_slot(c, &key);
    const bool waited = s && wait_for(c, s);
    const bool ready = s && s->state == READY;
    const bool told = waited && !ready && !(compile && s->error.status == FV_E_NOT_READY);  /* who only looked did not try */
    const bool mine = s && !ready && !told;
    if (ready) c->stats.memory_hits++;
    if (told) error = s->error;
    if (mine) {
        s->state = BUILDING;
        s->builder = getpid();
    }
    unlock(c);

    if (!s) return fv__fail(err, FV_E_NO_MEMORY, "jit_cache", (int64_t)sizeof *s, 0, "no memory for a slot of the kernel table");
    if (told) return copy_error(&error, err);
    if (mine) FV_TRY(build_slot(c, s, r, compile, user, err));
    *blob = s->blob;
    return FV_OK;
}

/* ---------------------------------------------------------------------------------------------------------- libraries */

/* The loader takes two libraries of one path for the same, and the path of a memfd is its number: the number must not be given out again
 * while the library is loaded. So the file stays open as long. */
fv_status fv__jit_library_open(const fv__jit_blob *blob, fv__jit_library *library, fv_error *err)
{
    char path[64];
    *library = (fv__jit_library){ .fd = memfd_create(blob->name, MFD_CLOEXEC) };
    if (library->fd < 0 || !fv__jit_write_all(library->fd, blob->data, blob->size)) {
        const int error = errno;
        fv__jit_library_close(library);
        return fv__fail(err, FV_E_IO, "jit", error, 0, "%s cannot be put into memory as a library: %s", blob->name, strerror(error));
    }
    if (fv__os_is_cut_off(library->fd)) {
        fv__jit_library_close(library);
        return fv__fail(err, FV_E_COMPILE, "jit", (int64_t)blob->size, 0, "%s was compiled to a library that is cut off after %zu bytes", blob->name,
                        blob->size);
    }
    snprintf(path, sizeof path, "/proc/self/fd/%d", library->fd);
    library->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library->handle) return FV_OK;
    const char *text = dlerror();
    fv__jit_library_close(library);
    return fv__fail(err, FV_E_COMPILE, "jit", 0, 0, "%s was compiled and cannot be loaded: %s", blob->name, text ? text : "no reason given");
}

void fv__jit_library_close(fv__jit_library *library)
{
    if (library->handle) dlclose(library->handle);
    if (library->fd >= 0) close(library->fd);
    *library = (fv__jit_library){ .fd = -1 };
}
