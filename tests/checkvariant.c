/* SPDX-License-Identifier: Apache-2.0 */
/* checkvariant.c -- variants' texts against their own definitions, on a GPU or on the CPU levels of this machine; also where there is no cmocka.
 *
 *     checkvariant [--device cuda:0] [--cpu ISA] [--jobs N] [--shapes WORD,...] [--alone 1] [FILE ...]
 *
 * FILE: a text; default: every built-in, tests/variants/ and examples/variants/.
 *
 * Each alone and behind causal, on every shape of spec.c (whose name holds one of the words), N of them at once (a GPU's kernels take seconds to
 * compile: 8 there, else 1). What a device refuses by name is counted apart. Exit status: 0 all passed, 1 something failed, 77 there is no such
 * device. */
#include "spec.h"
#include "variant.h"

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
    fv_ctx *ctx;
    const char *label, *shapes;
    bool alone;
    int jobs;
    int passed, failed, refused;
    pthread_mutex_t mutex;
} g = { .jobs = 0, .mutex = PTHREAD_MUTEX_INITIALIZER };

/* One list of variants on all shapes. */
typedef struct task {
    const fv_variant_use *uses;
    int n, next;                        /* next: shape to take */
    double share;
    char why[400];                      /* the first refusal or fault */
} task;

static void count(task *t, const spec_shape *shape, fv_status s, const spec_result *r, const fv_error *err)
{
    const bool fine = s == FV_OK && r->share <= 1, refused = s == FV_E_UNSUPPORTED;
    g.passed += fine;
    g.refused += refused;
    g.failed += !fine && !refused;
    if (fine && r->share > t->share) t->share = r->share;
    if (!fine && !*t->why)
        snprintf(t->why, sizeof t->why, "%s %.20s: %.300s", refused ? "refused" : "FAIL", shape->name, s == FV_OK ? r->worst : err->text);
}

static bool is_wanted(const spec_shape *shape)
{
    for (const char *at = g.shapes; at && *at; at += strcspn(at, ","), at += *at == ',') {
        char word[32];
        snprintf(word, sizeof word, "%.*s", (int)strcspn(at, ","), at);
        if (strstr(shape->name, word)) return true;
    }
    return !g.shapes;
}

static void *take_shapes(void *arg)
{
    task *t = arg;
    pthread_mutex_lock(&g.mutex);
    while (spec_shapes[t->next].name) {
        const spec_shape *shape = &spec_shapes[t->next++];
        spec_result r;
        fv_error err = { 0 };
        if (!is_wanted(shape)) continue;
        pthread_mutex_unlock(&g.mutex);
        const fv_status s = spec_compare(g.ctx, t->uses, t->n, shape, &r, &err);
        pthread_mutex_lock(&g.mutex);
        count(t, shape, s, &r, &err);
    }
    pthread_mutex_unlock(&g.mutex);
    return NULL;
}

static void check_uses(const char *name, const fv_variant_use *uses, int n)
{
    pthread_t threads[64];
    int started = 0;
    task t = { .uses = uses, .n = n };
    while (started < g.jobs - 1 && !pthread_create(&threads[started], NULL, take_shapes, &t)) started++;
    take_shapes(&t);
    while (started > 0) pthread_join(threads[--started], NULL);
    printf("%-10s %-24s %5.2f  %s\n", g.label, name, t.share, t.why);
}

static void check_variant(const fv_variant *v)
{
    char name[48];
    snprintf(name, sizeof name, "causal, %s", v->meta.name);
    check_uses(v->meta.name, &(fv_variant_use){ .variant = v }, 1);
    if (!g.alone && strcmp(v->meta.name, "causal")) check_uses(name, (fv_variant_use[]){ { .name = "causal" }, { .variant = v } }, 2);
}

static void check_file(const char *path)
{
    char name[32], *text = NULL;
    size_t size = 0;
    fv_error err;
    fv_variant *v = NULL;
    FILE *f = fopen(path, "r");
    if (!f || getdelim(&text, &size, 0, f) < 0) {
        fprintf(stderr, "checkvariant: %s cannot be read\n", path);
        exit(1);
    }
    fclose(f);
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
    snprintf(name, sizeof name, "my_%.*s", (int)strcspn(base, "."), base);
    if (fv_variant_create(g.ctx, name, text, &v, &err) != FV_OK) {
        printf("%-10s %-24s        FAIL %s\n", g.label, name, err.text);
        g.failed++;
    } else {
        check_variant(v);
        fv_variant_destroy(&v);
    }
    free(text);
}

static int is_text(const struct dirent *e)
{
    const char *dot = strrchr(e->d_name, '.');
    return dot && !strcmp(dot, ".c");
}

static void check_folder(const char *folder)
{
    struct dirent **list;
    const int n = scandir(folder, &list, is_text, alphasort);
    if (n < 0) {
        fprintf(stderr, "checkvariant: %s cannot be read; run this in the root of the source tree\n", folder);
        exit(1);
    }
    for (int i = 0; i < n; i++) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", folder, list[i]->d_name);
        check_file(path);
        free(list[i]);
    }
    free(list);
}

static void check_all(char **files, int n)
{
    for (int i = 0; i < n; i++) check_file(files[i]);
    if (n) return;
    for (int i = 0; i < fv__variant_count(); i++) check_variant(fv__variant_builtin(i));
    check_folder("tests/variants");
    check_folder("examples/variants");
}

/* The exit status of a context that cannot be opened. */
static int open_context(const char *device, const char *isa)
{
    fv_error err;
    const fv_open_desc desc = { .device = device, .cpu_isa = isa, .num_threads = 2 };
    if (fv_open(&desc, &g.ctx, &err) == FV_OK) return 0;
    printf("not run: %s\n", err.text);
    return 77;
}

int main(int argc, char **argv)
{
    const char *device = "cpu", *isa = NULL, *level;
    int first = 1;
    bool available;
    for (; first + 1 < argc && argv[first][0] == '-'; first += 2) {
        if (!strcmp(argv[first], "--device")) device = argv[first + 1];
        else if (!strcmp(argv[first], "--cpu")) isa = argv[first + 1];
        else if (!strcmp(argv[first], "--shapes")) g.shapes = argv[first + 1];
        else if (!strcmp(argv[first], "--alone")) g.alone = atoi(argv[first + 1]) != 0;
        else if (!strcmp(argv[first], "--jobs")) g.jobs = atoi(argv[first + 1]);
        else break;
    }
    if (first < argc && argv[first][0] == '-') {
        fprintf(stderr, "usage: checkvariant [--device NAME] [--cpu ISA] [--jobs N] [--shapes WORD,...] [--alone 1] [FILE ...]\n");
        return 2;
    }
    if (g.jobs < 1 || g.jobs > 64) g.jobs = strcmp(device, "cpu") ? 8 : 1;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 0; (level = spec_level(i, &available)); i++) {
        const bool cpu = !strcmp(device, "cpu");
        if (cpu && (!available || (isa && strcmp(isa, level)))) continue;
        g.label = cpu ? level : device;
        const int code = open_context(device, cpu ? level : NULL);
        if (code) return code;
        check_all(argv + first, argc - first);
        fv_close(&g.ctx);
        if (!cpu) break;
    }
    if (g.refused) printf("%d refused by name\n", g.refused);
    printf("%d passed, %d failed\n", g.passed, g.failed);
    return g.failed > 0 || !g.passed;
}
