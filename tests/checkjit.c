/* SPDX-License-Identifier: Apache-2.0 */
/* checkjit.c -- compiles every CUDA kernel for every arch, without a GPU, and fails on errors and on spills.
 *
 *     checkjit [--arch sm_80,sm_90a] [--quick] [--match WORD] [--jobs N] [--cached] [--list] [--parts] [FILE.cu ...]
 *
 * What is compiled: the programs that the backend names (fv__cuda_programs), and for each embedded text, or each FILE, the lines in it like
 *
 *     checkjit: -DDIM=128 -DTILE=64            options of one build
 *     checkjit: full sm>=90 -DDIM=256          only without --quick; only from that arch on
 *
 * A text of neither kind is compiled once without options. An arch that this NVRTC is too old for becomes PTX, of which no registers are known:
 * that it compiles is all that is checked. --parts compiles those that can be in parts, as on a machine with a GPU, and links them: spills are not told
 * from registers that functions save, so the whole is what they are counted in. --cached takes what the cache folder has (times read 0 then).
 * Exit status: 0 all passed, 1 some failed or nothing matched, 77 there is no NVRTC on this machine. */
#include "cuda/jit.h"
#include "os.h"

#include <getopt.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_ARCHS = 16 };

typedef struct job {
    fv__cuda_program program;       /* a copy of its own */
    const char *arch;
    const fv__jit_blob *blob;
    fv_status status;
    fv_error error;
    bool done;
} job;

static struct {
    const char *archs[MAX_ARCHS];
    int num_archs;
    bool quick, cached, list, parts;
    const char *match;
    int num_jobs_at_once;
    job *jobs;
    int num_jobs, room;
    fv__cuda_jit *jit;
    atomic_int next;
    pthread_mutex_t mutex;
    pthread_cond_t one_done;
} g = { .mutex = PTHREAD_MUTEX_INITIALIZER, .one_done = PTHREAD_COND_INITIALIZER };

/* --------------------------------------------------------------------------------------------------- what to compile */

static job *new_job(void)
{
    if (g.num_jobs == g.room) {
        g.room = g.room ? 2 * g.room : 64;
        g.jobs = realloc(g.jobs, (size_t)g.room * sizeof *g.jobs);
        if (!g.jobs) exit(2);
    }
    return memset(&g.jobs[g.num_jobs++], 0, sizeof(job));
}

static bool wanted(const char *name, int oldest, bool quick, const char *arch)
{
    return fv__cuda_arch_number(arch) >= oldest && (quick || !g.quick) && (!g.match || strstr(name, g.match));
}

/* `user` is the arch; a copy, as it is the caller's only while it visits. */
static void add_program(void *user, const fv__cuda_program *p, int oldest, bool quick)
{
    const char *arch = user;
    if (!wanted(p->name, oldest, quick, arch) || (g.parts && !p->num_parts)) return;
    job *j = new_job();
    j->program = *p;
    j->program.name = strdup(p->name);
    j->program.source = strdup(p->source);
    j->arch = arch;
    fv__jit_text *extra = calloc((size_t)p->num_extra + 1, sizeof *extra);
    for (int i = 0; i < p->num_extra; i++) extra[i] = (fv__jit_text){ strdup(p->extra[i].name), strdup(p->extra[i].text) };
    j->program.extra = extra;
    const char **options = calloc((size_t)p->num_options + 1, sizeof *options);
    for (int i = 0; i < p->num_options; i++) options[i] = strdup(p->options[i]);
    j->program.options = options;
}

static char *read_text(const char *path)
{
    char *text = NULL;
    size_t size = 0;
    FILE *f = fopen(path, "r");
    if (!f || getdelim(&text, &size, 0, f) < 0) {
        fprintf(stderr, "checkjit: %s cannot be read\n", path);
        exit(2);
    }
    fclose(f);
    return text;
}

static void gather(char **files, int num_files)
{
    for (int a = 0; a < g.num_archs; a++) {
        void *arch = (void *)(uintptr_t)g.archs[a];
        for (int i = 0; i < num_files; i++) {
            const char *slash = strrchr(files[i], '/');
            fv__cuda_text_programs(slash ? slash + 1 : files[i], read_text(files[i]), false, add_program, arch);
        }
        if (!num_files) fv__cuda_programs(g.archs[a], add_program, arch);
    }
}

/* ---------------------------------------------------------------------------------------------------------- compiling */

static void *work(void *arg)
{
    (void)arg;
    for (int i; (i = atomic_fetch_add(&g.next, 1)) < g.num_jobs; ) {
        job *j = &g.jobs[i];
        const fv_status status = fv__cuda_jit_compile(g.jit, &j->program, j->arch, &j->blob, &j->error);
        pthread_mutex_lock(&g.mutex);
        j->status = status;
        j->done = true;
        pthread_cond_signal(&g.one_done);
        pthread_mutex_unlock(&g.mutex);
    }
    return NULL;
}

static bool print_kernels(const job *j)
{
    bool fine = true;
    fv__nvrtc_kernel_info k;
    for (int i = 0; fv__nvrtc_kernel(j->blob->info, i, &k); i++) {
        const bool spills = k.spill_stores || k.spill_loads;
        fine = fine && !spills;
        printf("%-8s %7.0f %5d %6d %6d %6d %7zu  %s: %s%s\n", j->arch, i ? 0 : j->blob->build_ms, k.registers, k.stack, k.spill_stores + k.spill_loads,
               k.shared, i ? 0 : j->blob->size, j->program.name, k.name, spills ? "  FAILED: spills" : "");
    }
    return fine;
}

/* Prints job i when it is done; false: it failed. */
static bool report(int i)
{
    job *j = &g.jobs[i];
    pthread_mutex_lock(&g.mutex);
    while (!j->done) pthread_cond_wait(&g.one_done, &g.mutex);
    pthread_mutex_unlock(&g.mutex);
    fv__nvrtc_kernel_info k;
    if (j->status == FV_OK && g.parts && strstr(j->blob->info, "\nparts ")) {
        printf("%-8s %7.0f %27s %7zu  %s: %d parts\n", j->arch, j->blob->build_ms, "", j->blob->size, j->program.name, j->program.num_parts);
        return true;
    }
    if (g.parts && j->status == FV_OK) {
        printf("%-8s %43s  %s  FAILED: not compiled in parts\n", j->arch, "", j->program.name);
        return false;
    }
    if (j->status == FV_OK && fv__nvrtc_kernel(j->blob->info, 0, &k)) return print_kernels(j);
    if (j->status == FV_OK && strstr(j->blob->info, "target compute_")) {
        printf("%-8s %7.0f %27s %7zu  %s: PTX only\n", j->arch, j->blob->build_ms, "", j->blob->size, j->program.name);
        return true;
    }
    printf("%-8s %43s  %s  FAILED: %s\n", j->arch, "", j->program.name, j->status == FV_OK ? "it has no kernel" : j->error.text);
    return false;
}

static int run(void)
{
    pthread_t threads[16];
    int failed = 0;
    for (int t = 0; t < g.num_jobs_at_once; t++) pthread_create(&threads[t], NULL, work, NULL);
    printf("%-8s %7s %5s %6s %6s %6s %7s  %s\n", "arch", "ms", "regs", "stack", "spill", "shared", "bytes", "program: kernel");
    for (int i = 0; i < g.num_jobs; i++) {
        failed += !report(i);
        fflush(stdout);
    }
    for (int t = 0; t < g.num_jobs_at_once; t++) pthread_join(threads[t], NULL);
    printf("%d passed, %d failed\n", g.num_jobs - failed, failed);
    return failed || !g.num_jobs ? 1 : 0;
}

static int list(void)
{
    for (int i = 0; i < g.num_jobs; i++) printf("%-8s %s\n", g.jobs[i].arch, g.jobs[i].program.name);
    return 0;
}

/* ------------------------------------------------------------------------------------------------------------ options */

static void choose_archs(char *names)
{
    for (const char *const *a = fv__cuda_archs; !names && *a; a++) g.archs[g.num_archs++] = *a;
    for (char *word; names && (word = strsep(&names, ",")); )
        if (*word && g.num_archs < MAX_ARCHS) g.archs[g.num_archs++] = word;
}

static int usage(void)
{
    fprintf(stderr, "usage: checkjit [--arch sm_80,sm_90a] [--quick] [--match WORD] [--jobs N] [--cached] [--list] [--parts] [FILE.cu ...]\n");
    return 2;
}

static int check(void)
{
    const fv__log log = { .level = FV_LOG_INFO };
    const fv__jit_cache_desc desc = { .dir = g.cached ? NULL : "", .kernel_path = "", .log = &log };
    fv__jit_cache *cache = NULL;
    fv__nvrtc *nvrtc = NULL;
    fv_error err;
    if (fv__nvrtc_open(0, NULL, &nvrtc, &err) != FV_OK) {
        printf("not run: %s\n", err.text);
        return 77;
    }
    printf("%s, %s\n", fv__nvrtc_name(nvrtc), fv__nvrtc_path(nvrtc));
    const bool links = fv__nvrtc_links(nvrtc);
    fv__nvrtc_close(&nvrtc);
    if (g.parts && !links) {
        printf("not run: no nvJitLink of its version beside it\n");
        return 77;
    }
    if (fv__jit_cache_open(&desc, &cache, &err) != FV_OK || fv__cuda_jit_open(NULL, cache, &log, &g.jit, &err) != FV_OK) {
        fprintf(stderr, "checkjit: %s\n", err.text);
        return 2;
    }
    fv__cuda_jit_in_parts(g.jit, g.parts);
    const int result = run();
    fv__cuda_jit_close(&g.jit);
    fv__jit_cache_close(&cache);
    return result;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        { "arch", required_argument, NULL, 'a' }, { "quick", no_argument, NULL, 'q' }, { "match", required_argument, NULL, 'm' },
        { "jobs", required_argument, NULL, 'j' }, { "cached", no_argument, NULL, 'c' }, { "list", no_argument, NULL, 'l' }, { "parts", no_argument, NULL, 'p' }, { 0 },
    };
    char *archs = NULL;
    g.num_jobs_at_once = fv__min32(fv__os_num_cpus(), 8);
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1; )
        switch (c) {
        case 'a': archs = optarg; break;
        case 'q': g.quick = true; break;
        case 'm': g.match = optarg; break;
        case 'j': g.num_jobs_at_once = fv__max32(1, fv__min32(atoi(optarg), 16)); break;
        case 'c': g.cached = true; break;
        case 'l': g.list = true; break;
        case 'p': g.parts = true; break;
        default: return usage();
        }
    choose_archs(archs);
    gather(argv + optind, argc - optind);
    return g.list ? list() : check();
}
