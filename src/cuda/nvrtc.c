/* SPDX-License-Identifier: Apache-2.0 */
/* nvrtc.c -- finding libnvrtc and compiling with it.
 *
 * What was learnt about it (13.0), each found out by trying:
 *   - ptxas options go one by one: "--ptxas-options=-v,-O3" is refused;
 *   - "--ptxas-options=-v" puts registers and spills into the program's log, which is where we read them;
 *   - after a complaint of ptxas the PTX can still be had; with line information its lines say which text's they come from;
 *   - a quoted include that is not among the given headers is looked for in the folder of the program's name, so a stray file in the
 *     working directory could get into a kernel. A program named below /dev/null has no such folder. For includes of includes see jit.c. */
#include "cuda/nvrtc.h"

#include "cuda/linker.h"
#include "os.h"

#include <dirent.h>
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NOWHERE "/dev/null/"

enum { NEWEST_MAJOR = 15, OLDEST_MAJOR = 12, MAX_COMPILES = 8, MAX_OPTIONS = 64, MAX_TEXTS = 96, MAX_PARTS = 8 };

typedef struct nvrtcProgram_st *program;

typedef struct functions {
    int (*nvrtcVersion)(int *major, int *minor);
    const char *(*nvrtcGetErrorString)(int result);
    int (*nvrtcGetNumSupportedArchs)(int *count);
    int (*nvrtcGetSupportedArchs)(int *archs);
    int (*nvrtcCreateProgram)(program *p, const char *text, const char *name, int num_headers, const char *const *headers,
                              const char *const *include_names);
    int (*nvrtcDestroyProgram)(program *p);
    int (*nvrtcCompileProgram)(program p, int num_options, const char *const *options);
    int (*nvrtcGetProgramLogSize)(program p, size_t *size);
    int (*nvrtcGetProgramLog)(program p, char *log);
    int (*nvrtcGetCUBINSize)(program p, size_t *size);
    int (*nvrtcGetCUBIN)(program p, char *cubin);
    int (*nvrtcGetPTXSize)(program p, size_t *size);
    int (*nvrtcGetPTX)(program p, char *ptx);
} functions;

struct fv__nvrtc {
    pthread_mutex_t loading;
    functions call;                 /* valid once library is set */
    void *library;                  /* NULL: found, not loaded yet */
    fv__linker linker;              /* valid once `linkable` is looked at under `loading` */
    enum { NOT_LOOKED, LINKS, DOES_NOT } linkable;
    char path[PATH_MAX];
    char name[24];
    int max_major, major, minor;
    bool newer;                     /* one was passed over because the driver is older */
    fv__log log;
};

/* ------------------------------------------------------------------------------------------------------------ finding */

static bool load_functions(void *library, functions *f)
{
#define LOAD(name) *(void **)&f->name = dlsym(library, #name); if (!f->name) return false;
    LOAD(nvrtcVersion) LOAD(nvrtcGetErrorString) LOAD(nvrtcGetNumSupportedArchs) LOAD(nvrtcGetSupportedArchs) LOAD(nvrtcCreateProgram)
    LOAD(nvrtcDestroyProgram) LOAD(nvrtcCompileProgram) LOAD(nvrtcGetProgramLogSize) LOAD(nvrtcGetProgramLog) LOAD(nvrtcGetCUBINSize)
    LOAD(nvrtcGetCUBIN) LOAD(nvrtcGetPTXSize) LOAD(nvrtcGetPTX)
#undef LOAD
    return true;
}

/* Takes the version if the driver can load what it makes. */
static bool accept_version(fv__nvrtc *n, int major, int minor)
{
    if (major < OLDEST_MAJOR) return false;
    if (n->max_major && major > n->max_major) {
        n->newer = true;
        return false;
    }
    n->major = major;
    n->minor = minor;
    return true;
}

/* By path or by a name that the loader resolves. mode: RTLD_NOLOAD to take only what is in the process. */
static bool take_library(fv__nvrtc *n, const char *name, int mode)
{
    int major = 0, minor = 0;
    void *library = dlopen(name, RTLD_LAZY | RTLD_LOCAL | mode);
    if (!library) return false;
    if (!load_functions(library, &n->call) || n->call.nvrtcVersion(&major, &minor) || !accept_version(n, major, minor)) return false;
    n->library = library;
    snprintf(n->path, sizeof n->path, "%s", name);
    return true;
}

/* NVRTC only works with builtins of its own version beside it, whose file's name says which: libnvrtc-builtins.so.13.0. */
static bool version_beside(const char *folder, int major, int *minor)
{
    DIR *d = opendir(folder);
    int matches = 0, seen_major, seen_minor;
    if (!d) return false;
    for (struct dirent *e; (e = readdir(d)); ) {
        char rest;
        if (sscanf(e->d_name, "libnvrtc-builtins.so.%d.%d%c", &seen_major, &seen_minor, &rest) != 2 || seen_major != major) continue;
        matches++;
        *minor = seen_minor;
    }
    closedir(d);
    return matches == 1;
}

static bool take_file(fv__nvrtc *n, const char *folder, const char *file, int major)
{
    char path[PATH_MAX];
    int minor = 0;
    if (snprintf(path, sizeof path, "%s/%s", folder, file) >= (int)sizeof path || access(path, R_OK)) return false;
    if (!major || !version_beside(folder, major, &minor)) return take_library(n, path, 0);
    if (!accept_version(n, major, minor)) return false;
    memcpy(n->path, path, sizeof path);
    return true;
}

static bool take_folder(fv__nvrtc *n, const char *folder)
{
    char file[32];
    for (int major = NEWEST_MAJOR; major >= OLDEST_MAJOR; major--) {
        snprintf(file, sizeof file, "libnvrtc.so.%d", major);
        if (take_file(n, folder, file, major)) return true;
    }
    return take_file(n, folder, "libnvrtc.so", 0);
}

static bool take_below(fv__nvrtc *n, const char *base, const char *const *folders, int count)
{
    char path[PATH_MAX];
    for (int i = 0; i < count; i++)
        if (snprintf(path, sizeof path, "%s/%s", base, folders[i]) < (int)sizeof path && take_folder(n, path)) return true;
    return false;
}

static bool take_packages(fv__nvrtc *n, const char *site)
{
    static const char *const folders[] = { "nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "nvidia/cu12/lib" };
    return take_below(n, site, folders, FV__COUNT(folders));
}

/* A Python below `prefix`: <prefix>/lib/python3.x/site-packages. */
static bool take_python(fv__nvrtc *n, const char *prefix)
{
    static const char *const libs[] = { "lib", "lib64" }, *const sites[] = { "site-packages", "dist-packages" };
    char path[PATH_MAX];
    for (int i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/%s", prefix, libs[i / 2]);
        DIR *d = opendir(path);
        if (!d) continue;
        bool found = false;
        for (struct dirent *e; !found && (e = readdir(d)); )
            if (!strncmp(e->d_name, "python3", 7)
                && snprintf(path, sizeof path, "%s/%s/%s/%s", prefix, libs[i / 2], e->d_name, sites[i % 2]) < (int)sizeof path)
                found = take_packages(n, path);
        closedir(d);
        if (found) return true;
    }
    return false;
}

/* The folder above the one that holds the file `path`: the prefix of a Python whose program it is. */
static bool take_prefix_of(fv__nvrtc *n, char *path)
{
    for (int up = 0; up < 2; up++) {
        char *slash = strrchr(path, '/');
        if (!slash) return false;
        *slash = 0;
    }
    return *path && take_python(n, path);
}

/* The Pythons on PATH: as they are called (a virtual environment) and where that leads (what it was made from). None is started. */
static bool take_path(fv__nvrtc *n)
{
    const char *path = fv__os_env("PATH");
    char *copy = path ? strdup(path) : NULL, *rest = copy;
    bool found = false;
    for (char *folder; copy && !found && (folder = strsep(&rest, ":")); ) {
        char file[PATH_MAX], real[PATH_MAX];
        if (snprintf(file, sizeof file, "%s/python3", folder) >= (int)sizeof file || access(file, X_OK)) continue;
        const bool leads = realpath(file, real);
        found = take_prefix_of(n, file) || (leads && take_prefix_of(n, real));
    }
    free(copy);
    return found;
}

/* Installed as a part of a Python package, its neighbours are nearer than any PATH. */
static bool take_neighbours(fv__nvrtc *n)
{
    Dl_info info;
    char path[PATH_MAX];
    if (!dladdr((void *)(uintptr_t)&fv__nvrtc_open, &info) || !info.dli_fname || !realpath(info.dli_fname, path)) return false;
    char *end = strstr(path, "-packages/");
    if (!end) return false;
    end[strlen("-packages")] = 0;
    return take_packages(n, path);
}

static bool take_variable(fv__nvrtc *n, const char *name)
{
    static const char *const folders[] = { "lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib" };
    const char *base = fv__os_env(name);
    return base && take_below(n, base, folders, FV__COUNT(folders));
}

static bool take_by_loader(fv__nvrtc *n, int mode)
{
    char file[32];
    for (int major = NEWEST_MAJOR; major >= OLDEST_MAJOR; major--) {
        snprintf(file, sizeof file, "libnvrtc.so.%d", major);
        if (take_library(n, file, mode)) return true;
    }
    return take_library(n, "libnvrtc.so", mode);
}

/* ---- where the system's loader looks, without loading: opening a libnvrtc takes 10 to 30 ms, and a process that finds all its kernels in the cache
 * only needs its version, which stands in the name of the file beside it */

typedef struct folder_list {
    char *paths[64];
    int count;
} folder_list;

static void add_folder(folder_list *list, const char *path, size_t length)
{
    if (!length || *path != '/' || list->count == FV__COUNT(list->paths)) return;
    char *copy = strndup(path, length);
    if (copy) list->paths[list->count++] = copy;
}

/* One path a line; comments, includes and hardware lines do not begin with a slash. */
static void add_config(folder_list *list, const char *file)
{
    char line[PATH_MAX];
    FILE *f = fopen(file, "re");
    while (f && fgets(line, sizeof line, f)) add_folder(list, line, strcspn(line, " \t\r\n"));
    if (f) fclose(f);
}

static void loader_folders(folder_list *list)
{
    static const char configs[] = "/etc/ld.so.conf.d";
    char file[PATH_MAX];
    for (const char *at = fv__os_env("LD_LIBRARY_PATH"); at && *at; at += strspn(at, ":;")) {
        const size_t length = strcspn(at, ":;");
        add_folder(list, at, length);
        at += length;
    }
    add_config(list, "/etc/ld.so.conf");
    DIR *d = opendir(configs);
    for (struct dirent *e; d && (e = readdir(d)); )
        if (strstr(e->d_name, ".conf") && snprintf(file, sizeof file, "%s/%s", configs, e->d_name) < (int)sizeof file) add_config(list, file);
    if (d) closedir(d);
}

/* The newest that the driver can do with, as take_by_loader would find it; only files whose version their neighbours tell. */
static bool take_unloaded(fv__nvrtc *n)
{
    folder_list list = { .count = 0 };
    char file[32], path[PATH_MAX];
    int minor;
    bool found = false;
    loader_folders(&list);
    for (int major = NEWEST_MAJOR; major >= OLDEST_MAJOR && !found; major--) {
        snprintf(file, sizeof file, "libnvrtc.so.%d", major);
        for (int i = 0; i < list.count && !found; i++)
            found = snprintf(path, sizeof path, "%s/%s", list.paths[i], file) < (int)sizeof path && !access(path, R_OK)
                 && version_beside(list.paths[i], major, &minor) && take_file(n, list.paths[i], file, major);
    }
    for (int i = 0; i < list.count; i++) free(list.paths[i]);
    return found;
}

static bool search(fv__nvrtc *n)
{
    static const char *const toolkit[] = { "lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib" };
    const char *environment = fv__os_env("VIRTUAL_ENV");
    return take_by_loader(n, RTLD_NOLOAD) || take_neighbours(n) || (environment && take_python(n, environment)) || take_path(n)
        || take_variable(n, "CONDA_PREFIX") || take_unloaded(n) || take_by_loader(n, 0) || take_variable(n, "CUDA_HOME")
        || take_variable(n, "CUDA_PATH") || take_below(n, "/usr/local/cuda", toolkit, FV__COUNT(toolkit));
}

static bool take_named(fv__nvrtc *n, const char *named)
{
    DIR *folder = opendir(named);
    if (!folder) return take_library(n, named, 0);
    closedir(folder);
    return take_folder(n, named);
}

static fv_status not_found(const fv__nvrtc *n, const char *named, fv_error *err)
{
    if (n->newer)
        return fv__fail(err, FV_E_COMPILE, "nvrtc", 0, n->max_major,
                        "every NVRTC found is newer than the driver, which is for CUDA %d: update the driver, or install NVRTC %d (pip install "
                        "nvidia-cuda-nvrtc-cu%d)", n->max_major, n->max_major, n->max_major);
    if (named)
        return fv__fail(err, FV_E_COMPILE, "nvrtc", 0, 0, "FV_NVRTC_PATH=%s is no libnvrtc of version %d or later, nor a folder with one", named,
                        OLDEST_MAJOR);
    return fv__fail(err, FV_E_COMPILE, "nvrtc", 0, 0,
                    "no NVRTC: no libnvrtc.so.13 or .12 in this process, the Pythons on PATH, CONDA_PREFIX, the loader's folders, CUDA_HOME, CUDA_PATH or "
                    "/usr/local/cuda; `pip install nvidia-cuda-nvrtc` brings one, FV_NVRTC_PATH names one, FV_KERNEL_PATH does without");
}

fv_status fv__nvrtc_open(int max_major, const fv__log *log, fv__nvrtc **nvrtc, fv_error *err)
{
    const char *named = fv__os_env("FV_NVRTC_PATH");
    *nvrtc = NULL;
    fv__nvrtc *n = calloc(1, sizeof *n);
    if (!n) return fv__fail(err, FV_E_NO_MEMORY, "nvrtc", (int64_t)sizeof *n, 0, "no memory for the compiler's handle");
    n->max_major = max_major;
    if (log) n->log = *log;
    if (!(named ? take_named(n, named) : search(n))) {
        const fv_status status = not_found(n, named, err);
        free(n);
        return status;
    }
    snprintf(n->name, sizeof n->name, "nvrtc %d.%d", n->major, n->minor);
    pthread_mutex_init(&n->loading, NULL);
    *nvrtc = n;
    return FV_OK;
}

void fv__nvrtc_close(fv__nvrtc **nvrtc)
{
    if (*nvrtc) pthread_mutex_destroy(&(*nvrtc)->loading);
    free(*nvrtc);
    *nvrtc = NULL;
}

const char *fv__nvrtc_name(const fv__nvrtc *n) { return n->name; }
const char *fv__nvrtc_path(const fv__nvrtc *n) { return n->path; }

/* Loads what was found. The path was readable and its folder said which version it is; a library that then does not load is broken. */
static fv_status load(fv__nvrtc *n, fv_error *err)
{
    int major = 0, minor = 0;
    pthread_mutex_lock(&n->loading);
    if (!n->library) {
        void *library = dlopen(n->path, RTLD_LAZY | RTLD_LOCAL);
        if (library && load_functions(library, &n->call) && !n->call.nvrtcVersion(&major, &minor)) n->library = library;
    }
    const bool loaded = n->library != NULL;
    pthread_mutex_unlock(&n->loading);
    if (!loaded) {
        const char *reason = dlerror();
        return fv__fail(err, FV_E_COMPILE, "nvrtc", 0, 0, "%s cannot be loaded (%s); FV_NVRTC_PATH can name another", n->path,
                        reason ? reason : "functions are missing");
    }
    if (major && (major != n->major || minor != n->minor))
        fv__log_line(&n->log, FV_LOG_WARN, "%s is NVRTC %d.%d, though the files beside it are of %d.%d", n->path, major, minor, n->major, n->minor);
    return FV_OK;
}

/* ---------------------------------------------------------------------------------------------- not too many at once */

/* The one thing that contexts share: a compiler takes some hundred MB, and there are only so many CPUs. */
static struct {
    pthread_mutex_t mutex;
    pthread_cond_t freed;
    int running;
    _Atomic pid_t process;          /* whose compilations these are: a fork's child has none */
} gate = { .mutex = PTHREAD_MUTEX_INITIALIZER, .freed = PTHREAD_COND_INITIALIZER };

static void enter_gate(void)
{
    const int limit = fv__min32(fv__os_num_cpus(), MAX_COMPILES);
    pid_t owner = atomic_load(&gate.process);
    const pid_t self = getpid();
    if (owner != self && atomic_compare_exchange_strong(&gate.process, &owner, self) && owner) {
        pthread_mutex_init(&gate.mutex, NULL);      /* of the parent's threads none came along */
        pthread_cond_init(&gate.freed, NULL);
        gate.running = 0;
    }
    pthread_mutex_lock(&gate.mutex);
    while (gate.running >= limit) pthread_cond_wait(&gate.freed, &gate.mutex);
    gate.running++;
    pthread_mutex_unlock(&gate.mutex);
}

static void leave_gate(void)
{
    pthread_mutex_lock(&gate.mutex);
    gate.running--;
    pthread_cond_signal(&gate.freed);
    pthread_mutex_unlock(&gate.mutex);
}

/* ---------------------------------------------------------------------------------------------- what the compiler says */

/* Lines of the log (ptxas -v):
 *     ptxas info    : Compiling entry function 'k' for 'sm_90a'
 *     ptxas         .     160 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
 *     ptxas info    : Used 40 registers, used 1 barriers, 160 bytes cumulative stack size, 1024 bytes smem
 * Functions that were not inlined have a second line of their own; their spills are the kernel's. */
static int number_before(const char *line, const char *words)
{
    const char *at = strstr(line, words);
    if (!at) return 0;
    while (at > line && at[-1] == ' ') at--;
    while (at > line && at[-1] >= '0' && at[-1] <= '9') at--;
    return (int)strtol(at, NULL, 10);
}

static int number_after(const char *line, const char *words)
{
    const char *at = strstr(line, words);
    return at ? (int)strtol(at + strlen(words), NULL, 10) : 0;
}

static void add_kernel(FILE *out, const fv__nvrtc_kernel_info *k)
{
    if (*k->name)
        fprintf(out, "kernel %s registers %d stack %d spill_stores %d spill_loads %d barriers %d shared %d\n", k->name, k->registers, k->stack,
                k->spill_stores, k->spill_loads, k->barriers, k->shared);
}

static void read_line(FILE *out, const char *line, fv__nvrtc_kernel_info *k)
{
    const char *entry = strstr(line, "Compiling entry function '");
    if (entry) {
        add_kernel(out, k);
        *k = (fv__nvrtc_kernel_info){ 0 };
        sscanf(entry, "Compiling entry function '%95[^']", k->name);
    } else if (strstr(line, "bytes stack frame")) {
        k->stack += number_before(line, "bytes stack frame");
        k->spill_stores += number_before(line, "bytes spill stores");
        k->spill_loads += number_before(line, "bytes spill loads");
    } else if (strstr(line, "Used ") && strstr(line, " registers")) {
        k->registers = number_before(line, "registers");
        k->barriers = number_after(line, ", used ");
        k->shared = number_before(line, "bytes smem");
    }
}

/* The log as lines about kernels, malloc'ed. Cuts the log into lines. */
static char *report(char *log, const char *target)
{
    char *text = NULL;
    size_t size = 0;
    fv__nvrtc_kernel_info k = { 0 };
    FILE *out = open_memstream(&text, &size);
    if (!out) return NULL;
    fprintf(out, "target %s\n", target);
    for (char *rest = log, *line; (line = strsep(&rest, "\n")); ) read_line(out, line, &k);
    add_kernel(out, &k);
    return fclose(out) ? NULL : text;
}

bool fv__nvrtc_kernel(const char *info, int i, fv__nvrtc_kernel_info *k)
{
    for (const char *line = info; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, "kernel ", 7) || i--) continue;
        return sscanf(line, "kernel %95s registers %d stack %d spill_stores %d spill_loads %d barriers %d shared %d", k->name, &k->registers,
                      &k->stack, &k->spill_stores, &k->spill_loads, &k->barriers, &k->shared) == 7;
    }
    return false;
}

static void remove_all(char *text, const char *what)
{
    const size_t length = strlen(what);
    for (char *at = text; (at = strstr(at, what)); ) memmove(at, at + length, strlen(at + length) + 1);
}

/* The whole log to the log, the first complaint to the error: "attend.cu(12): error: ..." */
static fv_status refuse(const fv__nvrtc *n, const fv__jit_request *r, const char *result, char *log, fv_error *err)
{
    char *first = NULL;
    int line_number = 0;
    remove_all(log, NOWHERE);
    for (char *rest = log, *line; (line = strsep(&rest, "\n")); ) {
        if (*line) fv__log_line(&n->log, FV_LOG_INFO, "%s: %s", r->name, line);
        const bool bad = strstr(line, "error") || strstr(line, "fatal");
        if (bad && !first) first = line;
    }
    const char *paren = first ? strchr(first, '(') : NULL;
    if (paren) line_number = (int)strtol(paren + 1, NULL, 10);
    return fv__fail(err, FV_E_COMPILE, "text", line_number, 0, "%s for %s: %s: %s", r->name, r->arch, result, first ? first : "no reason given");
}

/* ---------------------------------------------------------------------------------------------------------- compiling */

/* The target for `arch` ("sm_90a"): itself; else the nearest older one of its generation, whose machine code runs there; else PTX. */
static fv_status choose_target(const fv__nvrtc *n, const char *arch, char target[32], bool *ptx, fv_error *err)
{
    int count = 0, archs[64], same = 0, older = 0;
    const int want = !strncmp(arch, "sm_", 3) ? (int)strtol(arch + 3, NULL, 10) : 0;
    if (n->call.nvrtcGetNumSupportedArchs(&count) || count <= 0 || count > 64 || n->call.nvrtcGetSupportedArchs(archs)) count = 0;
    *ptx = false;
    snprintf(target, 32, "%s", arch);
    for (int i = 0; i < count; i++) {
        if (archs[i] == want) return FV_OK;
        if (archs[i] < want && archs[i] > older) older = archs[i];
        if (archs[i] < want && archs[i] / 10 == want / 10 && archs[i] > same) same = archs[i];
    }
    if (!want || !older)
        return fv__fail(err, FV_E_COMPILE, "arch", want, 80, "%s does not compile for %s", n->name, arch);
    *ptx = !same;
    snprintf(target, 32, same ? "sm_%d" : "compute_%d", same ? same : older);
    fv__log_line(&n->log, FV_LOG_INFO, "%s does not know %s; %s is compiled instead", n->name, arch, target);
    return FV_OK;
}

static char *program_log(const fv__nvrtc *n, program p)
{
    size_t size = 0;
    if (n->call.nvrtcGetProgramLogSize(p, &size)) size = 0;
    char *log = calloc(1, size + 1);
    if (log && size && n->call.nvrtcGetProgramLog(p, log)) *log = 0;
    return log;
}

static int program_code(const fv__nvrtc *n, program p, bool ptx, fv__jit_output *out)
{
    int result = ptx ? n->call.nvrtcGetPTXSize(p, &out->size) : n->call.nvrtcGetCUBINSize(p, &out->size);
    if (result) return result;
    out->data = malloc(out->size + 1);
    if (!out->data) return 1;                       /* NVRTC_ERROR_OUT_OF_MEMORY */
    result = ptx ? n->call.nvrtcGetPTX(p, out->data) : n->call.nvrtcGetCUBIN(p, out->data);
    if (!result && !out->size) result = 11;         /* NVRTC_ERROR_INTERNAL_ERROR */
    if (!result) return 0;
    free(out->data);
    out->data = NULL;
    return result;
}

static int create_program(const fv__nvrtc *n, const fv__jit_request *r, program *p)
{
    const char *texts[MAX_TEXTS], *names[MAX_TEXTS];
    char name[128];
    for (int i = 1; i < r->num_texts; i++) {
        texts[i - 1] = r->texts[i].text;
        names[i - 1] = r->texts[i].name;
    }
    snprintf(name, sizeof name, NOWHERE "%s", r->texts[0].name);
    return n->call.nvrtcCreateProgram(p, r->texts[0].text, name, r->num_texts - 1, texts, names);
}

enum { WHOLE = -1 };

/* Creates a program, or a part of it, and compiles it; *p may be there after a failure, too. lines: PTX tells where each instruction comes from. */
static int build_program(const fv__nvrtc *n, const fv__jit_request *r, const char *target, int part, bool lines, program *p)
{
    const char *options[MAX_OPTIONS + 5];
    char arch[64], number[32], registers[32];
    int count = 0;
    snprintf(arch, sizeof arch, "--gpu-architecture=%s", target);
    options[count++] = arch;
    for (int i = 0; i < r->num_options; i++) options[count++] = r->options[i];
    if (lines) options[count++] = "--generate-line-info";
    if (part != WHOLE) {
        snprintf(number, sizeof number, "-DFV_PART=%d", part);
        snprintf(registers, sizeof registers, "--maxrregcount=%d", r->max_registers);
        options[count++] = number;
        options[count++] = registers;
        options[count++] = "--relocatable-device-code=true";
    }
    const int result = create_program(n, r, p);
    return result ? result : n->call.nvrtcCompileProgram(*p, count, options);
}

/* ---- what ptxas finds in inline assembly ---- */

/* "ptxas application ptx input, line 28; error   : WORDS": the line of the PTX and the words; 0: ptxas has no complaint. */
static long ptxas_complaint(const char *log, char words[200])
{
    const char *at = strstr(log, "ptx input, line "), *colon = at ? strstr(at, ": ") : NULL;
    if (!colon) return 0;
    snprintf(words, 200, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
    return strtol(at + strlen("ptx input, line "), NULL, 10);
}

/* The source of line `line` of a PTX: what the last .loc before it says. False: none does. */
static bool ptx_source(const char *ptx, long line, char name[64], long *number)
{
    long file = 0;
    char start[32];
    for (const char *at = ptx; at && line-- > 0; at = strchr(at, '\n')) {
        at += *at == '\n';
        const char *loc = at + strspn(at, " \t");
        if (!strncmp(loc, ".loc", 4)) sscanf(loc + 4, "%ld %ld", &file, number);
    }
    snprintf(start, sizeof start, "\t.file\t%ld \"", file);
    const char *path = file ? strstr(ptx, start) : NULL;
    if (!path) return false;
    path += strlen(start);
    const size_t length = strcspn(path, "\"\n");
    snprintf(name, 64, "%.*s", (int)length, path);
    for (const char *slash = path; (slash = memchr(slash, '/', length - (size_t)(slash - path))); ) {
        slash++;
        snprintf(name, 64, "%.*s", (int)(length - (size_t)(slash - path)), slash);
    }
    return *name;
}

/* A log in which ptxas complains, as a complaint about the source: "NAME(LINE): error: WORDS", malloc'ed. The program is compiled once more for that, with
 * the lines of its source in the PTX. NULL: ptxas does not complain, or nobody knows where. */
static char *locate(const fv__nvrtc *n, const fv__jit_request *r, const char *target, const char *log)
{
    char words[200], name[64], *found = NULL;
    fv__jit_output ptx = { 0 };
    program p = NULL;
    long number = 0;
    if (!ptxas_complaint(log, words)) return NULL;
    char *again = build_program(n, r, target, WHOLE, true, &p) && p ? program_log(n, p) : NULL;
    const long line = again ? ptxas_complaint(again, words) : 0;
    if (line && !program_code(n, p, true, &ptx)) {
        ((char *)ptx.data)[ptx.size] = 0;
        if (ptx_source(ptx.data, line, name, &number) && asprintf(&found, "%s(%ld): error: %s", name, number, words) < 0) found = NULL;
    }
    free(ptx.data);
    free(again);
    if (p) n->call.nvrtcDestroyProgram(&p);
    return found;
}

static fv_status compile_program(const fv__nvrtc *n, const fv__jit_request *r, const char *target, bool ptx, fv__jit_output *out, fv_error *err)
{
    program p = NULL;
    int result = build_program(n, r, target, WHOLE, false, &p);
    char *log = p ? program_log(n, p) : NULL, *located = result && log ? locate(n, r, target, log) : NULL;
    if (!result) result = program_code(n, p, ptx, out);
    if (!result && log) out->info = report(log, target);
    fv_status status = FV_OK;
    if (result) status = refuse(n, r, n->call.nvrtcGetErrorString(result), located ? located : log ? log : (char[]){ "" }, err);
    free(located);
    free(log);
    if (p) n->call.nvrtcDestroyProgram(&p);
    return status;
}

/* ---- in parts ----
 * The attention kernel's tiles take 0.3 to 0.7 s of a CPU each: as parts they take as long as the longest of them, and a link. What goes wrong is told by
 * compiling the whole, which then is the one way that there is. */
typedef struct part {
    const fv__nvrtc *nvrtc;
    const fv__jit_request *request;
    const char *target;
    int number;
    fv__jit_output *out;
} part;

static void *compile_part(void *arg)
{
    const part *a = arg;
    program p = NULL;
    enter_gate();
    if (!build_program(a->nvrtc, a->request, a->target, a->number, false, &p)) program_code(a->nvrtc, p, false, a->out);
    if (p) a->nvrtc->call.nvrtcDestroyProgram(&p);
    leave_gate();
    return NULL;
}

/* Where the compiler lies that is loaded; "": nobody knows. */
static void library_folder(const fv__nvrtc *n, char folder[PATH_MAX])
{
    Dl_info info;
    void *function;
    memcpy(&function, &n->call.nvrtcVersion, sizeof function);
    *folder = 0;
    if (!dladdr(function, &info) || !info.dli_fname || !realpath(info.dli_fname, folder)) return;
    char *slash = strrchr(folder, '/');
    if (slash) *slash = 0;
}

static bool open_linker(fv__nvrtc *n, const char *folder)
{
    pthread_mutex_lock(&n->loading);
    if (n->linkable == NOT_LOOKED) n->linkable = fv__linker_open(folder, n->major, n->minor, &n->linker) ? LINKS : DOES_NOT;
    pthread_mutex_unlock(&n->loading);
    return n->linkable == LINKS;
}

bool fv__nvrtc_links(fv__nvrtc *n)
{
    char folder[PATH_MAX];
    if (load(n, NULL) != FV_OK || fv__os_num_cpus() < 2) return false;
    library_folder(n, folder);
    return open_linker(n, folder);
}

/* False: it cannot be done in parts. The linker is loaded while parts are compiled. */
static bool compile_parts(fv__nvrtc *n, const fv__jit_request *r, const char *target, fv__jit_output *out)
{
    char folder[PATH_MAX];
    fv__jit_output cubins[MAX_PARTS] = { 0 };
    part parts[MAX_PARTS];
    pthread_t threads[MAX_PARTS];
    bool started[MAX_PARTS] = { false }, good = true;
    const int count = r->num_parts;
    if (count < 2 || count > MAX_PARTS || fv__os_num_cpus() < 2) return false;
    library_folder(n, folder);
    if (!fv__linker_is_there(folder, n->major)) return false;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);        /* signals are for the caller's threads */
    for (int i = 0; i < count; i++) {
        parts[i] = (part){ n, r, target, i, &cubins[i] };
        started[i] = !pthread_create(&threads[i], NULL, compile_part, &parts[i]);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    good = open_linker(n, folder);
    for (int i = 0; i < count; i++) {
        if (started[i]) pthread_join(threads[i], NULL);
        good = good && cubins[i].data;
    }
    good = good && fv__linker_link(&n->linker, target, cubins, count, &n->log, out);
    for (int i = 0; i < count; i++) free(cubins[i].data);
    if (good && asprintf(&out->info, "target %s\nparts %d\n", target, count) < 0) out->info = NULL;
    return good;
}

fv_status fv__nvrtc_compile(void *nvrtc, const fv__jit_request *r, fv__jit_output *out, fv_error *err)
{
    fv__nvrtc *n = nvrtc;
    char target[32];
    bool ptx;
    if (r->num_options > MAX_OPTIONS || r->num_texts < 1 || r->num_texts > MAX_TEXTS)
        return fv__fail(err, FV_E_INVALID, "nvrtc", r->num_options, MAX_OPTIONS, "%s has %d options and %d texts; at most %d and %d", r->name,
                        r->num_options, r->num_texts, MAX_OPTIONS, MAX_TEXTS);
    FV_TRY(load(n, err));
    FV_TRY(choose_target(n, r->arch, target, &ptx, err));
    if (!ptx && compile_parts(n, r, target, out)) return FV_OK;
    enter_gate();
    const fv_status status = compile_program(n, r, target, ptx, out, err);
    leave_gate();
    return status;
}
