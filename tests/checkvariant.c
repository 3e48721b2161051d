/* SPDX-License-Identifier: Apache-2.0 */
/* checkvariant.c -- variants' texts against their own definitions, on a GPU or on the CPU levels of this machine; also where there is no cmocka.
 *
 *     checkvariant [--device cuda:0] [--cpu ISA] [FILE ...]        default: every built-in, tests/variants/ and examples/variants/
 *
 * Each alone and behind causal, on every shape of spec.c. What a device refuses by name is counted apart. Exit status: 0 all passed, 1 something
 * failed, 77 there is no such device. */
#include "spec.h"
#include "variant.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
    fv_ctx *ctx;
    const char *label;
    int passed, failed, refused;
    double share;
    const char *shape;
} g;

/* *why: the first refusal or fault. */
static void check_shape(const fv_variant_use *uses, int n, const spec_shape *shape, char why[400])
{
    spec_result r;
    fv_error err = { 0 };
    const fv_status s = spec_compare(g.ctx, uses, n, shape, &r, &err);
    if (s == FV_OK && r.share <= 1) {
        g.passed++;
        g.share = r.share > g.share ? r.share : g.share;
        return;
    }
    if (s == FV_E_UNSUPPORTED) g.refused++;
    else g.failed++;
    if (!*why) snprintf(why, 400, "%s %.20s: %.300s", s == FV_E_UNSUPPORTED ? "refused" : "FAIL", shape->name, s == FV_OK ? r.worst : err.text);
}

static void check_uses(const char *name, const fv_variant_use *uses, int n)
{
    char why[400] = "";
    g.share = 0;
    for (const spec_shape *shape = spec_shapes; shape->name; shape++) check_shape(uses, n, shape, why);
    printf("%-10s %-24s %5.2f  %s\n", g.label, name, g.share, why);
}

static void check_variant(const fv_variant *v)
{
    char name[48];
    snprintf(name, sizeof name, "causal, %s", v->meta.name);
    check_uses(v->meta.name, &(fv_variant_use){ .variant = v }, 1);
    if (strcmp(v->meta.name, "causal")) check_uses(name, (fv_variant_use[]){ { .name = "causal" }, { .variant = v } }, 2);
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
        else break;
    }
    if (first < argc && argv[first][0] == '-') {
        fprintf(stderr, "usage: checkvariant [--device NAME] [--cpu ISA] [FILE ...]\n");
        return 2;
    }
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
