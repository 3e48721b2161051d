/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_variant.c -- foveal variant FILE: compiles a variant's text, compares every kernel with the
 * text's own definition, and times it beside the same kernel without it. */
#include "cli.h"
#include "spec.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_WITH = SPEC_MAX_USES - 1 };

typedef struct variant_options {
    cli_device device;
    const char *name, *with;
    double seconds;
} variant_options;

typedef struct subject {
    const char *path;
    char name[32];
    char *text;
    char with[200];                     /* cut by NULs */
    fv_variant_use uses[SPEC_MAX_USES]; /* those before it, then it */
    int num_with;
    double seconds;
    bool described;
    int checks, failures, unseen;
} subject;

/* What clocks look at: a step of decode, and a prompt. Keys are many times more on a GPU. */
static const spec_shape decode_shape = {
    .name = "decode", .type = "bf16", .q_heads = 32, .kv_heads = 8, .dim_qk = 128, .dim_v = 128,
    .num_requests = 8, .rows = { 1, 1, 1, 1, 1, 1, 1, 1 },
    .keys = { 2048, 2048, 2048, 2048, 2048, 2048, 2048, 2048 }, .page = 16,
};
static const spec_shape prefill_shape = {
    .name = "prefill", .type = "bf16", .q_heads = 8, .kv_heads = 8, .dim_qk = 128, .dim_v = 128,
    .num_requests = 1, .rows = { 512 }, .keys = { 512 }, .page = 16,
};

/* ---- what is to be checked ---- */

/* The file's name without folder and suffix, as far as it can name a variant. */
static void name_of(const char *path, char name[32])
{
    const char *slash = strrchr(path, '/');
    int n = 0;
    for (const char *c = slash ? slash + 1 : path; *c && *c != '.' && n < 24; c++)
        name[n++] = isalnum((unsigned char)*c) ? *c : '_';
    name[n] = 0;
    if (!n || isdigit((unsigned char)*name) || spec_is_builtin(name)) {
        memmove(name + 3, name, (size_t)n + 1);
        memcpy(name, "my_", 3);
    }
}

static int read_with(subject *s, const char *with)
{
    char *rest = s->with, *word;
    if (!strcmp(with, "none"))
        return CLI_OK;
    if (snprintf(s->with, sizeof s->with, "%s", with) >= (int)sizeof s->with)
        return cli_misuse("--with is too long");
    while ((word = strsep(&rest, ","))) {
        if (!spec_is_builtin(word))
            return cli_misuse("--with: there is no variant \"%s\"; foveal info lists them", word);
        for (int i = 0; i < s->num_with; i++)
            if (!strcmp(s->uses[i].name, word))
                return cli_misuse("--with names %s twice", word);
        if (s->num_with == MAX_WITH)
            return cli_misuse("--with takes at most %d variants", MAX_WITH);
        s->uses[s->num_with++].name = word;
    }
    return CLI_OK;
}

static int read_subject(subject *s, const variant_options *o, const char *path)
{
    size_t size;
    s->path = cli_input_name(path);
    s->seconds = o->seconds;
    s->text = cli_read_file(path, 1, &size);
    if (!s->text)
        return CLI_USAGE;
    const size_t mark = cli_mark_size(s->text, size);
    memmove(s->text, s->text + mark, size + 1 - mark);
    size -= mark;
    if (strlen(s->text) != size)
        return cli_misuse("%s holds a zero byte; it is no text", s->path);
    if (!o->name)
        name_of(strcmp(path, "-") ? path : "mine", s->name);
    else if (snprintf(s->name, sizeof s->name, "%s", o->name) >= (int)sizeof s->name)
        return cli_misuse("--name is longer than %zu letters", sizeof s->name - 1);
    return read_with(s, o->with);
}

/* "NAME, line 7: WORDS" as "FILE:7: WORDS": the text is malformed. All else is the machine's. */
static int fault_of(const subject *s, const fv_error *err)
{
    char lead[80];
    snprintf(lead, sizeof lead, "%s, line %lld: ", s->name, (long long)err->value);
    if (err->status != FV_E_COMPILE || strncmp(err->text, lead, strlen(lead))) {
        cli_failed(s->path, err);
        return err->status == FV_E_INVALID ? CLI_USAGE : CLI_FAILED;
    }
    cli_print(stderr, "%s:%lld: %s\n", s->path, (long long)err->value, err->text + strlen(lead));
    return CLI_USAGE;
}

/* ---- errors ---- */

static void compare_shape(subject *s, fv_ctx *ctx, const spec_shape *shape)
{
    fv_error err = { 0 };
    spec_result r;
    const bool alone = spec_compare(ctx, &s->uses[s->num_with], 1, shape, &r, &err) == FV_OK;
    spec_result both = { 0 };
    const bool beside = !alone || !s->num_with ||
                        spec_compare(ctx, s->uses, s->num_with + 1, shape, &both, &err) == FV_OK;
    s->checks++;
    if (!alone || !beside) {
        s->failures++;
        cli_print(stdout, "  %-15s REFUSED: %s\n", shape->name, err.text);
        return;
    }
    const bool fine = r.share <= 1 && both.share <= 1;
    s->failures += !fine;
    printf("  %-15s %-34s %8.1e %8.2f", shape->name, r.kernel, r.error, r.share);
    if (s->num_with)
        printf(" %8.2f", both.share);
    const bool unseen = fine && (!r.seen || (s->num_with && !both.seen));
    s->unseen += unseen;
    printf("  %s\n", !fine ? "FAIL" : unseen ? "no row sees a key" : "ok");
    if (!fine)
        printf("      %s\n", r.share <= 1 ? both.worst : r.worst);
}

static void compare(subject *s, fv_ctx *ctx)
{
    printf("  %-15s %-34s %8s %8s", "shape", "kernel", "error", "share");
    printf(s->num_with ? " %8s\n" : "\n", "beside");
    for (const spec_shape *shape = spec_shapes; shape->name; shape++)
        compare_shape(s, ctx, shape);
}

/* ---- speed ---- */

static int time_shape(subject *s, fv_ctx *ctx, const spec_shape *shape)
{
    fv_error err = { 0 };
    double plain = 0, with_it = 0, again = 0;
    fv_status status = spec_time(ctx, s->uses, s->num_with, shape, s->seconds, &plain, &err);
    if (status == FV_OK)
        status = spec_time(ctx, s->uses, s->num_with + 1, shape, 2 * s->seconds, &with_it, &err);
    if (status == FV_OK)
        status = spec_time(ctx, s->uses, s->num_with, shape, s->seconds, &again, &err);
    if (status != FV_OK)
        return cli_failed(shape->name, &err);
    plain = (plain + again) / 2;
    printf("  %-15s %9.3f ms, plain %9.3f ms: x %.2f\n", shape->name, with_it, plain,
           with_it / plain);
    return CLI_OK;
}

static int time_all(subject *s, fv_ctx *ctx, bool gpu)
{
    spec_shape decode = decode_shape, prefill = prefill_shape;
    for (int i = 0; gpu && i < decode.num_requests; i++)
        decode.keys[i] *= 8;
    if (gpu)
        prefill.rows[0] = prefill.keys[0] = 8192;
    const int code = time_shape(s, ctx, &decode);
    return code == CLI_OK ? time_shape(s, ctx, &prefill) : code;
}

/* ---- one device or level ---- */

static void describe(subject *s, const fv_variant *variant)
{
    char hooks[128];
    if (s->described)
        return;
    s->described = true;
    spec_hooks(variant, hooks, sizeof hooks);
    cli_print(stdout, "%s: %s\n  hooks: %s", s->name, spec_formula(variant), hooks);
    for (int i = 0; i < s->num_with; i++)
        printf("%s%s", i ? ", " : "; beside: ", s->uses[i].name);
    printf("\n");
}

static int check_in(subject *s, fv_ctx *ctx, const char *label, bool timed, bool gpu)
{
    fv_error err = { 0 };
    fv_variant *variant = NULL;
    const double begin = cli_now();
    if (fv_variant_create(ctx, s->name, s->text, &variant, &err) != FV_OK)
        return fault_of(s, &err);
    const double took = cli_now() - begin;
    s->uses[s->num_with] = (fv_variant_use){ .variant = variant };
    int code = CLI_OK;
    if (spec_compile(ctx, variant, &err) != FV_OK) {
        code = fault_of(s, &err);
    } else {
        describe(s, variant);
        printf("%s: ready in %.0f ms\n", label, took * 1e3);
        compare(s, ctx);
        if (timed && s->seconds > 0)
            code = time_all(s, ctx, gpu);
    }
    fv_variant_destroy(&variant);
    return code;
}

/* The device that was named, or every CPU level of the machine; clocks run on the best one. */
static int check_device(subject *s, const variant_options *o)
{
    fv_ctx *ctx = NULL;
    int code = cli_open(&o->device, &ctx);
    if (code != CLI_OK)
        return code;
    const char *device = o->device.device ? o->device.device : getenv("FV_DEVICE");
    const bool gpu = device && !strncmp(device, "cuda", 4);
    code = check_in(s, ctx, gpu ? device : o->device.cpu ? o->device.cpu : "cpu", true, gpu);
    fv_close(&ctx);
    return code;
}

static int check_levels(subject *s, const variant_options *o)
{
    int best = 0, code = CLI_OK;
    bool available;
    for (int i = 0; spec_level(i, &available); i++)
        if (available)
            best = i;
    for (int i = 0; code == CLI_OK && spec_level(i, &available); i++) {
        variant_options own = *o;
        fv_ctx *ctx = NULL;
        own.device.cpu = spec_level(i, &available);
        if (!available) {
            printf("%s: not on this machine\n", own.device.cpu);
            continue;
        }
        if ((code = cli_open(&own.device, &ctx)) != CLI_OK)
            return code;
        code = check_in(s, ctx, own.device.cpu, i == best, false);
        fv_close(&ctx);
    }
    return code;
}

static int check(subject *s, const variant_options *o)
{
    const bool named = o->device.device || o->device.cpu || getenv("FV_DEVICE") || getenv("FV_CPU");
    const int code = named ? check_device(s, o) : check_levels(s, o);
    const int passed = s->checks - s->failures - s->unseen;
    if (s->checks)
        printf("%d passed, %d failed", passed, s->failures);
    if (s->unseen)
        printf(", %d in which no row sees a key", s->unseen);
    if (s->checks)
        printf("\n");
    return code == CLI_OK && (s->failures || (s->checks && !passed)) ? CLI_FAILED : code;
}

int cmd_variant(int argc, char **argv)
{
    variant_options o = { .with = "causal", .seconds = 0.3 };
    subject s = { 0 };
    int first;
    const cli_option options[] = {
        { "name", "NAME", "what the variant is called (default: the file's name)",
          CLI_TEXT, &o.name, 0, 0, NULL },
        { "with", "NAMES", "also behind these variants, a,b,c or none (default: causal)",
          CLI_TEXT, &o.with, 0, 0, NULL },
        { "seconds", "X", "for each clock; 0: no speed (default: 0.3)",
          CLI_REAL, &o.seconds, 0, 3600, NULL },
        CLI_DEVICE_OPTIONS(o.device),
        { 0 },
    };
    const char *usage = "variant FILE [OPTIONS]\n\nFILE: the text; -: standard input\n\n"
                        "Compiles the text of a variant (docs/variants.md), compares the kernels of "
                        "every CPU level with its\ndefinition on a list of shapes, and times it "
                        "beside the kernel without it. The text is code: it runs\nwith your rights.";
    int code = cli_parse(usage, options, argc, argv, &first);
    if (code != CLI_GO_ON)
        return code;
    if (argc - first != 1)
        return cli_misuse("variant takes one file, the text of a variant");
    code = read_subject(&s, &o, argv[first]);
    if (code == CLI_OK)
        code = check(&s, &o);
    free(s.text);
    return code;
}
