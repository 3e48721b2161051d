/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_plan.c -- foveal plan FILE: how a batch is cut into pieces and shared out, in words and as a
 * picture. */
#include "batch_text.h"
#include "cli.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK_STEP = 64 };

typedef struct plan_options {
    cli_device device;
    const char *svg, *sharing;
    int64_t workers, splits, chunk;
    bool invariant;
} plan_options;

/* ---- text -> limits, plan ---- */

static fv_plan_desc limits_of(const batch_arrays *a, const plan_options *o)
{
    return (fv_plan_desc){ .max_requests = a->num_requests, .max_rows = a->total_rows,
                           .max_kv_tokens = a->total_keys, .max_pages = max_i64(a->total_pages, 1),
                           .splits = (int32_t)o->splits, .workers = (int32_t)o->workers,
                           .chunk = (int32_t)o->chunk, .invariant = o->invariant, .sharing =
                               strcmp(o->sharing, "find") ? FV_SHARING_OFF : FV_SHARING_FIND };
}

static fv_status make_plan(fv_ctx *ctx, const batch_text *b, const batch_arrays *a,
                           const plan_options *o, fv_plan **plan, fv_error *err)
{
    batch_uses uses;
    const fv_problem problem = batch_text_problem(b, &uses);
    const fv_plan_desc limits = limits_of(a, o);
    const fv_batch batch = {
        .num_requests = a->num_requests, .rows = fv_i32(a->rows, a->num_requests + 1),
        .lengths = fv_i32(a->lengths, a->num_requests),
        .pages = { .page_size = (int32_t)b->page_size, .num_pages = a->num_pages,
                   .indptr = fv_i32(a->page_indptr, a->num_requests + 1),
                   .ids = fv_i32(a->page_ids, a->total_pages) },
    };
    const fv_status status = fv_plan_create(ctx, &problem, &limits, plan, err);
    return status == FV_OK ? fv_plan_update(*plan, NULL, &batch, NULL, err) : status;
}

/* ---- output ---- */

static int describe(const fv_plan *plan, const char *format, const char *path)
{
    fv_error err = { 0 };
    size_t size = 0;
    if (fv_plan_describe(plan, format, NULL, 0, &size, &err) != FV_OK)
        return cli_failed("cannot describe the plan", &err);
    char *text = need(size, 1);
    FILE *out = NULL;
    int code = CLI_OK;
    if (fv_plan_describe(plan, format, text, size, NULL, &err) != FV_OK)
        code = cli_failed("cannot describe the plan", &err);
    else if (!(out = cli_create(path)))
        code = cli_fail("%s: %s", path, strerror(errno));
    else if (fputs(text, out) == EOF || !cli_close(out))
        code = cli_unwritten(path);
    free(text);
    return code;
}

/* Which variant asks for what the batch does not give? The first with which no plan is made. */
static int64_t line_of_variant(fv_ctx *ctx, const batch_text *b, const batch_arrays *a,
                               const plan_options *o)
{
    for (int n = 0; n <= b->num_variants; n++) {
        batch_text fewer = *b;
        fv_error err = { 0 };
        fv_plan *plan = NULL;
        fewer.num_variants = n;
        const fv_status status = make_plan(ctx, &fewer, a, o, &plan, &err);
        fv_plan_destroy(&plan);
        if (status != FV_OK)
            return n ? b->variants[n - 1].line : 0;
    }
    return 0;
}

static int show(fv_ctx *ctx, const char *path, const batch_text *b, const plan_options *o)
{
    fv_error err = { 0 };
    fv_plan *plan = NULL;
    batch_arrays arrays;
    batch_text_unfold(b, &arrays);
    int code = CLI_OK;
    const fv_status status = make_plan(ctx, b, &arrays, o, &plan, &err);
    if (status != FV_OK) {
        const int64_t line = batch_text_line(b, err.field);
        code = batch_text_refused(path, line ? line : line_of_variant(ctx, b, &arrays, o), &err);
    }
    if (code == CLI_OK && !(o->svg && !strcmp(o->svg, "-")))
        code = describe(plan, "text", "-");
    if (code == CLI_OK && o->svg)
        code = describe(plan, "svg", o->svg);
    fv_plan_destroy(&plan);
    batch_arrays_free(&arrays);
    return code;
}

int cmd_plan(int argc, char **argv)
{
    plan_options o = { .sharing = "off" };
    int first;
    const cli_option options[] = {
        { "svg", "FILE", "also draw it: time down, workers across (-: standard output, no text)",
          CLI_TEXT, &o.svg, 0, 0, NULL },
        { "workers", "N", "use at most N workers", CLI_INT, &o.workers, 1, 65536, NULL },
        { "splits", "N", "cut the keys of each row tile into N parts (as the balance needs)",
          CLI_INT, &o.splits, 1, 4096, NULL },
        { "sharing", "off|find", "find prefixes that requests share (off)",
          CLI_CHOICE, &o.sharing, 0, 0, "off find" },
        { "invariant", NULL, "cut at fixed places, so that neighbours change no bits",
          CLI_FLAG, &o.invariant, 0, 0, NULL },
        { "chunk", "N", "with --invariant: keys of such a part, a multiple of 64 (1024)",
          CLI_INT, &o.chunk, CHUNK_STEP, 1 << 20, NULL },
        CLI_DEVICE_OPTIONS(o.device),
        { 0 },
    };
    int code = cli_parse("plan [OPTIONS] FILE\n\nFILE: a batch in words (-: standard input); "
                         "docs/cli.md describes the format",
                         options, argc, argv, &first);
    if (code != CLI_GO_ON)
        return code;
    if (argc - first != 1)
        return cli_misuse("plan needs one file (see foveal plan --help)");
    if (o.chunk % CHUNK_STEP)
        return cli_misuse("--chunk %lld: expected a multiple of %d", (long long)o.chunk,
                          CHUNK_STEP);
    if (o.chunk && !o.invariant)
        return cli_misuse("--chunk goes with --invariant");
    const cli_file files[] = { { "the batch", argv[first], false }, { "--svg", o.svg, true } };
    if ((code = cli_distinct(files, 2)) != CLI_OK)
        return code;
    batch_text batch;
    if ((code = batch_text_load(argv[first], &batch)) != CLI_OK)
        return code;
    fv_ctx *ctx = NULL;
    if ((code = cli_open(&o.device, &ctx)) == CLI_OK) {
        code = show(ctx, argv[first], &batch, &o);
        fv_close(&ctx);
    }
    batch_text_free(&batch);
    return code;
}
