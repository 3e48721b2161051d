/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_jit.c -- foveal jit: kernels for GPUs that need not be there: compiled ahead, looked at, put
 * into bundles for machines that do not compile. See docs/jit.md.
 *
 *   want     a program for an arch: compiled, or found in the cache
 *   holding  an entry of a bundle or of a cache folder
 */
#include "batch_text.h"
#include "cli.h"
#include "cuda/jit.h"
#include "jit/jit_bundle.h"
#include "os.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_ARCHS = 16, MAX_THREADS = 16 };

typedef struct want {
    fv__cuda_program program;           /* a copy of its own */
    const char *arch;
    const fv__jit_blob *blob;           /* the cache's */
    fv_status status;
    fv_error error;
    bool done;
} want;

typedef struct jit_run {
    const char *bundle, *match, *from;
    char *archs[MAX_ARCHS];
    int num_archs;
    int64_t jobs;
    bool fresh, list;
    want *wants;
    int num_wants, room;
    const fv__jit_blob **blobs;         /* what goes into the bundle, or is listed */
    int num_blobs, blob_room, failures;
    fv__jit_cache *cache;
    fv__cuda_jit *jit;
    atomic_int next;
    pthread_mutex_t mutex;              /* of wants[i].done */
    pthread_cond_t one_done;
} jit_run;

/* ---- one line a kernel ---- */

static void print_head(void)
{
    printf("%-8s %8s %5s %6s %6s %7s  %-12s %s\n", "arch", "seconds", "regs", "spills", "shared",
           "bytes", "compiler", "program: kernel");
}

/* Registers, bytes spilled (stores and loads), shared memory that the compiler knows of. */
static void print_blob(const fv__jit_blob *b)
{
    fv__nvrtc_kernel_info k;
    char seconds[16] = "-";
    if (b->origin == FV__JIT_COMPILED && b->build_ms > 0)
        snprintf(seconds, sizeof seconds, "%.2f", b->build_ms / 1e3);
    for (int i = 0; fv__nvrtc_kernel(b->info, i, &k); i++)
        printf("%-8s %8s %5d %6d %6d %7zu  %-12s %s: %s\n", b->arch, i ? "" : seconds, k.registers,
               k.spill_stores + k.spill_loads, k.shared, i ? (size_t)0 : b->size, b->compiler,
               b->name, k.name);
    if (!fv__nvrtc_kernel(b->info, 0, &k))
        printf("%-8s %8s %5s %6s %6s %7zu  %-12s %s\n", b->arch, seconds, "", "", "", b->size,
               b->compiler, b->name);
    fflush(stdout);
}

static void keep(jit_run *r, const fv__jit_blob *blob)
{
    if (r->num_blobs == r->blob_room) {
        r->blob_room = r->blob_room ? 2 * r->blob_room : 64;
        r->blobs = need_more(r->blobs, (size_t)r->blob_room, sizeof *r->blobs);
    }
    r->blobs[r->num_blobs++] = blob;
}

/* ---- what is wanted ---- */

static char *copy_text(const char *text)
{
    const size_t size = strlen(text) + 1;
    return memcpy(need(size, 1), text, size);
}

typedef struct visit {
    jit_run *run;
    const char *arch;
} visit;

static void add_want(void *user, const fv__cuda_program *p, int oldest, bool quick)
{
    const visit *v = user;
    jit_run *r = v->run;
    (void)quick;
    if (fv__cuda_arch_number(v->arch) < oldest || (r->match && !strstr(p->name, r->match)))
        return;
    if (r->num_wants == r->room) {
        r->room = r->room ? 2 * r->room : 64;
        r->wants = need_more(r->wants, (size_t)r->room, sizeof *r->wants);
    }
    fv__jit_text *extra = need((size_t)p->num_extra, sizeof *extra);
    const char **options = need((size_t)p->num_options, sizeof *options);
    for (int i = 0; i < p->num_extra; i++)
        extra[i] = (fv__jit_text){ copy_text(p->extra[i].name), copy_text(p->extra[i].text) };
    for (int i = 0; i < p->num_options; i++)
        options[i] = copy_text(p->options[i]);
    want *w = &r->wants[r->num_wants++];
    *w = (want){ .program = *p, .arch = v->arch };
    w->program.name = copy_text(p->name);
    w->program.source = copy_text(p->source);
    w->program.extra = extra;
    w->program.options = options;
}

static void free_wants(jit_run *r)
{
    for (int i = 0; i < r->num_wants; i++) {
        fv__cuda_program *p = &r->wants[i].program;
        for (int k = 0; k < p->num_extra; k++) {
            free((void *)(uintptr_t)p->extra[k].name);
            free((void *)(uintptr_t)p->extra[k].text);
        }
        for (int k = 0; k < p->num_options; k++)
            free((void *)(uintptr_t)p->options[k]);
        free((void *)(uintptr_t)p->extra);
        free((void *)(uintptr_t)p->options);
        free((void *)(uintptr_t)p->name);
        free((void *)(uintptr_t)p->source);
    }
    free(r->wants);
}

/* The problem of a batch file; 8-bit K and V with a scale a tensor (or head), and one a token. */
static int add_file(jit_run *r, const char *path)
{
    batch_text b = { 0 };
    batch_uses uses;
    fv_error err = { 0 };
    int code = batch_text_load(path, &b);
    if (code != CLI_OK)
        return code;
    fv_problem problem = batch_text_problem(&b, &uses);
    const bool narrow = !strncmp(b.kv_dtype, "fp8", 3) || !strcmp(b.kv_dtype, "int8");
    for (int a = 0; a < r->num_archs && code == CLI_OK; a++)
        for (int scaled = 0; scaled <= narrow && code == CLI_OK; scaled++) {
            visit v = { r, r->archs[a] };
            problem.k_scale = problem.v_scale =
                !narrow ? NULL : scaled ? "token_head" : "tensor";
            if (fv__cuda_problem_programs(&problem, r->archs[a], add_want, &v, &err) != FV_OK)
                code = batch_text_refused(path, batch_text_line(&b, err.field), &err);
        }
    batch_text_free(&b);
    return code;
}

static int gather(jit_run *r, char **files, int num_files)
{
    int code = CLI_OK;
    for (int a = 0; a < r->num_archs; a++) {
        visit v = { r, r->archs[a] };
        if (num_files)
            fv__cuda_plain_programs(add_want, &v);
        else
            fv__cuda_programs(r->archs[a], add_want, &v);
    }
    for (int i = 0; i < num_files && code == CLI_OK; i++)
        code = add_file(r, files[i]);
    if (code == CLI_OK && r->num_wants == 0)
        code = cli_misuse("no kernel's name holds \"%s\"", r->match ? r->match : "");
    return code;
}

/* ---- compiling, several at once; told in their order ---- */

static void *work(void *arg)
{
    jit_run *r = arg;
    for (int i; (i = atomic_fetch_add(&r->next, 1)) < r->num_wants;) {
        want *w = &r->wants[i];
        const fv__jit_blob *blob = NULL;
        const fv_status status =
            fv__cuda_jit_compile(r->jit, &w->program, w->arch, &blob, &w->error);
        pthread_mutex_lock(&r->mutex);
        w->status = status;
        w->blob = blob;
        w->done = true;
        pthread_cond_signal(&r->one_done);
        pthread_mutex_unlock(&r->mutex);
    }
    return NULL;
}

static void report(jit_run *r, want *w)
{
    pthread_mutex_lock(&r->mutex);
    while (!w->done)
        pthread_cond_wait(&r->one_done, &r->mutex);
    pthread_mutex_unlock(&r->mutex);
    if (w->status == FV_OK) {
        print_blob(w->blob);
        keep(r, w->blob);
        return;
    }
    r->failures++;
    cli_print(stderr, "foveal: %s for %s: %s\n", w->program.name, w->arch, w->error.text);
}

/* On standard error: the lines of standard output are the kernels'. */
static void announce(const jit_run *r, int at_once)
{
    fprintf(stderr, "foveal: compiling %d program%s for", r->num_wants,
            r->num_wants == 1 ? "" : "s");
    for (int a = 0; a < r->num_archs; a++)
        cli_print(stderr, "%s %s", a ? "," : "", r->archs[a]);
    fprintf(stderr, ", %d at once%s\n", at_once,
            r->fresh ? "" : "; what the cache folder holds is taken from there");
}

static int compile_all(jit_run *r)
{
    pthread_t threads[MAX_THREADS];
    const int n = (int)min_i64(r->jobs, min_i64(MAX_THREADS, r->num_wants));
    int started = 0;
    announce(r, n);
    while (started < n && !pthread_create(&threads[started], NULL, work, r))
        started++;
    if (started == 0)
        work(r);
    print_head();
    for (int i = 0; i < r->num_wants; i++)
        report(r, &r->wants[i]);
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    return r->failures ? cli_fail("%d of %d kernels do not compile", r->failures, r->num_wants)
                       : CLI_OK;
}

/* ---- what there is: bundles and folders ---- */

static jit_run *listing;                /* nftw has no argument to give */

/* A file of a folder; what is no whole entry is left out, as the cache leaves it out. */
static int hold_file(const char *path, const struct stat *st, int type, struct FTW *where)
{
    const char *why = NULL;
    (void)where;
    if (type != FTW_F || st->st_size <= 0 || (uint64_t)st->st_size > FV__JIT_MAX_ENTRY)
        return 0;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    void *bytes = fd < 0 ? NULL : fv__jit_read_at(fd, 0, (size_t)st->st_size);
    if (fd >= 0)
        close(fd);
    fv__jit_blob *blob = bytes ? fv__jit_entry_read(bytes, (size_t)st->st_size, &why) : NULL;
    if (!blob)
        free(bytes);
    else if (strcmp(blob->kind, "cubin") && strcmp(blob->kind, "ptx"))
        fv__jit_blob_free(blob);        /* of the CPU's compiler */
    else if (listing->match && !strstr(blob->name, listing->match))
        fv__jit_blob_free(blob);
    else
        keep(listing, blob);
    return 0;
}

static int hold_bundle(jit_run *r, const char *path)
{
    char why[FV__JIT_WHY_CHARS];
    fv__jit_bundle *bundle = fv__jit_bundle_open(path, why);
    if (!bundle)
        return cli_misuse("%s", why);
    for (int64_t i = 0; i < fv__jit_bundle_count(bundle); i++) {
        fv__jit_blob *blob = NULL;
        if (fv__jit_bundle_entry(bundle, i, &blob, why) != FV__JIT_HIT) {
            r->failures++;
            cli_print(stderr, "foveal: %s: %s\n", path, why);
        } else if (r->match && !strstr(blob->name, r->match)) {
            fv__jit_blob_free(blob);
        } else {
            keep(r, blob);
        }
    }
    fv__jit_bundle_close(bundle);
    return CLI_OK;
}

static int hold(jit_run *r, const char *path)
{
    struct stat st;
    if (stat(path, &st))
        return cli_misuse("%s: %s", path, strerror(errno));
    if (!S_ISDIR(st.st_mode))
        return hold_bundle(r, path);
    listing = r;
    nftw(path, hold_file, 16, FTW_PHYS);
    return CLI_OK;
}

static void free_holdings(jit_run *r)
{
    for (int i = 0; i < r->num_blobs; i++)
        fv__jit_blob_free((fv__jit_blob *)(uintptr_t)r->blobs[i]);
}

static int list_holdings(jit_run *r, char **paths, int num_paths)
{
    const char *folder = fv__jit_cache_folder(r->cache);
    int code = CLI_OK;
    if (num_paths == 0 && !folder[0])
        return cli_fail("there is no cache folder");
    if (num_paths == 0)
        printf("%s\n", folder);
    for (int i = 0; i < num_paths && code == CLI_OK; i++)
        code = hold(r, paths[i]);
    struct stat st;
    if (num_paths == 0 && !stat(folder, &st))
        code = hold(r, folder);
    if (code == CLI_OK) {
        print_head();
        for (int i = 0; i < r->num_blobs; i++)
            print_blob(r->blobs[i]);
        printf("%d entries\n", r->num_blobs);
    }
    free_holdings(r);
    if (code == CLI_OK && r->failures)
        code = cli_fail("%d entries are damaged", r->failures);
    return code;
}

/* ---- bundles ---- */

static int write_bundle(const jit_run *r)
{
    fv_error err = { 0 };
    struct stat st;
    if (fv__jit_bundle_write(r->bundle, r->blobs, r->num_blobs, &err) != FV_OK)
        return cli_failed("no bundle", &err);
    const int64_t bytes = stat(r->bundle, &st) ? 0 : (int64_t)st.st_size;
    printf("%s: %d kernels, %.1f MB\n", r->bundle, r->num_blobs, (double)bytes / 1e6);
    return CLI_OK;
}

static int bundle_folder(jit_run *r)
{
    int code = hold(r, r->from);
    if (code == CLI_OK && r->num_blobs == 0)
        code = cli_fail("%s holds no kernel of a GPU; variants of the CPU are in no bundle: name "
                        "the folder itself in FV_KERNEL_PATH", r->from);
    if (code == CLI_OK)
        code = write_bundle(r);
    free_holdings(r);
    return code;
}

/* ---- the command ---- */

/* "sm_80,sm_90a" into words; without it all that the library is made for. */
static int choose_archs(jit_run *r, char *names)
{
    for (const char *const *a = fv__cuda_archs; !names && *a; a++)
        r->archs[r->num_archs++] = (char *)(uintptr_t)*a;
    for (char *word; names && (word = strsep(&names, ","));) {
        if (!fv__cuda_arch_known(word))
            return cli_misuse("--arch: expected names like sm_80, sm_86, sm_89, sm_90a, sm_100a, "
                              "sm_120a, with commas between them, not \"%s\"",
                              word);
        if (r->num_archs == MAX_ARCHS)
            return cli_misuse("--arch: at most %d names", MAX_ARCHS);
        r->archs[r->num_archs++] = word;
    }
    return CLI_OK;
}

/* The bundle can be written, and is none of the files that are read. */
static int check_bundle(const jit_run *r, char **files, int num_files)
{
    for (int i = 0; r->bundle && i < num_files; i++) {
        const cli_file pair[] = { { "the batch", files[i], false },
                                  { "--bundle", r->bundle, true } };
        const int code = cli_distinct(pair, 2);
        if (code != CLI_OK)
            return code;
    }
    return r->bundle ? cli_writable(r->bundle) : CLI_OK;
}

static int open_jit(jit_run *r)
{
    const fv__jit_cache_desc desc = { .dir = r->fresh ? "" : NULL, .kernel_path = "",
                                      .disable_jit = 0 };
    fv_error err = { 0 };
    if (fv__jit_cache_open(&desc, &r->cache, &err) == FV_OK &&
        fv__cuda_jit_open(NULL, r->cache, NULL, &r->jit, &err) == FV_OK)
        return CLI_OK;
    return cli_failed("jit", &err);
}

static int run(jit_run *r, char **files, int num_files)
{
    if (r->list)
        return list_holdings(r, files, num_files);
    if (r->from)
        return bundle_folder(r);
    int code = gather(r, files, num_files);
    if (code == CLI_OK)
        code = compile_all(r);
    return code == CLI_OK && r->bundle ? write_bundle(r) : code;
}

int cmd_jit(int argc, char **argv)
{
    jit_run r = { .jobs = min_i64(fv__os_num_cpus(), 8), .mutex = PTHREAD_MUTEX_INITIALIZER,
                  .one_done = PTHREAD_COND_INITIALIZER };
    const char *archs = NULL;
    int first;
    const cli_option options[] = {
        { "arch", "LIST", "for these GPUs, as sm_90a,sm_86 (all that are known)",
          CLI_TEXT, &archs, 0, 0, NULL },
        { "bundle", "FILE", "put what was compiled into FILE, for FV_KERNEL_PATH",
          CLI_TEXT, &r.bundle, 0, 0, NULL },
        { "from", "FOLDER", "with --bundle: take what this cache folder holds, compile nothing",
          CLI_TEXT, &r.from, 0, 0, NULL },
        { "list", NULL, "list what bundles or cache folders hold (default: the cache folder)",
          CLI_FLAG, &r.list, 0, 0, NULL },
        { "match", "TEXT", "only kernels whose name holds TEXT", CLI_TEXT, &r.match, 0, 0, NULL },
        { "fresh", NULL, "compile all anew: nothing is taken from the cache folder or put there",
          CLI_FLAG, &r.fresh, 0, 0, NULL },
        { "jobs", "N", "compile so many at once", CLI_INT, &r.jobs, 1, MAX_THREADS, NULL },
        { 0 },
    };
    int code = cli_parse("jit [OPTIONS] [BATCH...]\n"
                         "       jit --list [BUNDLE or FOLDER...]\n\n"
                         "Without BATCH: all of the usual kernels for all GPUs of --arch, which "
                         "takes minutes on few cores.\n"
                         "BATCH: a file as foveal plan reads them; its problem's kernels are "
                         "compiled instead of the usual ones",
                         options, argc, argv, &first);
    if (code != CLI_GO_ON)
        return code;
    if (r.from && (!r.bundle || r.list || first < argc))
        return cli_misuse("--from goes with --bundle alone");
    if (r.list && r.bundle)
        return cli_misuse("--list and --bundle: only one of them");
    char *names = archs ? copy_text(archs) : NULL;
    code = choose_archs(&r, names);
    if (code == CLI_OK)
        code = check_bundle(&r, argv + first, argc - first);
    if (code == CLI_OK)
        code = open_jit(&r);
    if (code == CLI_OK)
        code = run(&r, argv + first, argc - first);
    free_wants(&r);
    free(r.blobs);
    if (r.jit)
        fv__cuda_jit_close(&r.jit);
    if (r.cache)
        fv__jit_cache_close(&r.cache);
    free(names);
    return code;
}
