/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_replay.c -- foveal replay: a real trace, served at the attention level.
 *
 * read the trace -> choose shapes and pool -> measure the machine's bounds -> step until all
 * requests are served -> table, JSON, page.
 * A step: the scheduler gives out rows; their inputs are gathered; one plan for each kind of layer;
 * then append and attention layer by layer; drawn rows are compared with the definition; the
 * serving clock moves on by the time of plan, append and attention.
 */
#include "progress.h"
#include "replay.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct replay_options {
    cli_device device;
    const char *model, *heads, *dtype, *kv_dtype, *sharing, *prefix, *bounds, *json, *report;
    int64_t dim, dim_v, window, layers, requests, max_length, token_budget, max_requests, page_size,
        pages, seed, check;
    double speed;
    bool invariant, digest;
} replay_options;

static const replay_options defaults = {
    .dtype = "bf16", .sharing = "off", .prefix = "on", .bounds = "on",
    .window = -1, .requests = 64, .max_length = 1 << 25, .token_budget = 2048,
    .max_requests = 256, .page_size = 16, .seed = 1, .check = 2,
};

/* ---- options ---- */

static int parse(int argc, char **argv, replay_options *o, int *first)
{
    const cli_option options[] = {
        { "model", "NAME", "geometry (llama-3.1-8b): " GEOMETRY_NAMES,
          CLI_CHOICE, &o->model, 0, 0, GEOMETRY_NAMES },
        { "heads", "Q/KV", "instead of --model: query heads / KV heads",
          CLI_TEXT, &o->heads, 0, 0, NULL },
        { "dim", "N", "with --heads: width of a head (128)", CLI_INT, &o->dim, 1, 576, NULL },
        { "dim-v", "N", "with --heads: width of a value (as --dim)",
          CLI_INT, &o->dim_v, 1, 576, NULL },
        { "window", "N", "with --heads: keys that a row sees before itself (all)",
          CLI_INT, &o->window, 0, 1 << 24, NULL },
        { "layers", "N", "layers to serve (2, or as many as show every kind)",
          CLI_INT, &o->layers, 1, 1024, NULL },
        { "requests", "N", "take the first N of the trace (64; 0: all)",
          CLI_INT, &o->requests, 0, 1e9, NULL },
        { "max-length", "N", "leave out requests of more than N tokens (none)",
          CLI_INT, &o->max_length, 1, 1 << 25, NULL },
        { "speed", "X", "honour arrival times, X times as fast (0: all are there at once)",
          CLI_REAL, &o->speed, 0, 1e9, NULL },
        { "token-budget", "N", "tokens computed in a step at most (2048)",
          CLI_INT, &o->token_budget, 1, 1 << 20, NULL },
        { "max-requests", "N", "requests that run at once at most (256)",
          CLI_INT, &o->max_requests, 1, 1 << 16, NULL },
        { "page-size", "N", "tokens in a page (16)", CLI_INT, &o->page_size, 1, 1 << 20, NULL },
        { "pages", "N", "pages in the pool (as the requests need, at most half of free memory)",
          CLI_INT, &o->pages, 1, 1 << 30, NULL },
        { "dtype", "TYPE", "of queries, outputs, new keys and values: " ELEMENT_NAMES " (bf16)",
          CLI_CHOICE, &o->dtype, 0, 0, ELEMENT_NAMES },
        { "kv-dtype", "TYPE", "of the cache: " ELEMENT_CACHE_NAMES " (as --dtype)",
          CLI_CHOICE, &o->kv_dtype, 0, 0, ELEMENT_CACHE_NAMES },
        { "sharing", "off|find", "read a prefix that requests share once for all of them (off)",
          CLI_CHOICE, &o->sharing, 0, 0, "off find" },
        { "prefix", "on|off", "keep and find prefixes by the trace's block hashes (on)",
          CLI_CHOICE, &o->prefix, 0, 0, "on off" },
        { "invariant", NULL, "the same bits for a request whatever runs beside it",
          CLI_FLAG, &o->invariant, 0, 0, NULL },
        { "digest", NULL, "sum up the bits of all outputs that hand out a token",
          CLI_FLAG, &o->digest, 0, 0, NULL },
        { "check", "N", "rows compared with the definition in each step (2)",
          CLI_INT, &o->check, 0, 1000, NULL },
        { "bounds", "on|off", "measure what this machine can do at most, beside it (on)",
          CLI_CHOICE, &o->bounds, 0, 0, "on off" },
        { "seed", "N", "of the random numbers (1)", CLI_INT, &o->seed, 0, 1e15, NULL },
        { "json", "FILE", "one JSON object a line: steps, then a summary (-: standard output)",
          CLI_TEXT, &o->json, 0, 0, NULL },
        { "report", "FILE", "write a page with charts", CLI_TEXT, &o->report, 0, 0, NULL },
        CLI_DEVICE_OPTIONS(o->device),
        { 0 },
    };
    return cli_parse("replay [OPTIONS] TRACE\n\nTRACE: Azure CSV "
                     "(TIMESTAMP,ContextTokens,GeneratedTokens) or Mooncake JSONL; "
                     "-: standard input",
                     options, argc, argv, first);
}

static int choose_geometry(const replay_options *o, geometry *out)
{
    const char *why, *model = o->model ? o->model : "llama-3.1-8b";
    const char *alone =
        o->dim ? "--dim" : o->dim_v ? "--dim-v" : o->window >= 0 ? "--window" : NULL;
    if (o->heads && o->model)
        return cli_misuse("--heads and --model: only one of them");
    if (!o->heads && alone)
        return cli_misuse("%s goes with --heads; a model has its own", alone);
    if (!o->heads)
        return geometry_find(model, out)
                   ? CLI_OK
                   : cli_misuse("--model %s: expected one of: %s", model, GEOMETRY_NAMES);
    if (geometry_by_hand(o->heads, o->dim ? o->dim : 128, o->dim_v, o->window, out, &why))
        return CLI_OK;
    return cli_misuse("--heads %s: expected %s", o->heads, why);
}

static int configure(replay *r, const replay_options *o)
{
    serve_config *c = &r->config;
    const int code = choose_geometry(o, &c->geometry);
    if (code != CLI_OK)
        return code;
    if (c->geometry.layers && o->layers > c->geometry.layers)
        return cli_misuse("--layers %lld: %s has %d", (long long)o->layers, c->geometry.name,
                          c->geometry.layers);
    c->layers = o->layers ? (int)o->layers : geometry_default_layers(&c->geometry);
    c->type = element_find(o->dtype);
    c->cache_type = element_find(o->kv_dtype ? o->kv_dtype : o->dtype);
    c->page_size = o->page_size;
    c->token_budget = o->token_budget;
    c->max_requests = min_i64(o->max_requests, o->token_budget);    /* all that run get a row */
    c->sharing = strcmp(o->sharing, "find") == 0;
    c->invariant = o->invariant;
    c->seed = (uint64_t)o->seed;
    r->no_prefix = strcmp(o->prefix, "off") == 0;
    r->scheduling.speed = o->speed;
    r->where = o->device;
    return CLI_OK;
}

static int read_trace(replay *r, const replay_options *o)
{
    trace_error problem = { 0 };
    size_t size;
    char *text = cli_read_file(r->path, 4096, &size);
    if (!text)
        return CLI_USAGE;
    const bool good = trace_read(text, size, o->requests ? o->requests : INT64_MAX, o->max_length,
                                 &r->trace, &problem);
    free(text);
    if (!good)
        return (problem.too_long ? cli_fail : cli_misuse)(
            "%s:%lld: %s", cli_input_name(r->path), (long long)problem.line, problem.text);
    const char *slash = strrchr(r->path, '/');
    r->file_name = slash ? slash + 1 : cli_input_name(r->path);
    return CLI_OK;
}

/* ---- sizes ---- */

static int descending(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

/* Sets max_length and max_kv_tokens; returns the pages that hold the requests that may run at
 * once. */
static int64_t measure_requests(replay *r)
{
    serve_config *c = &r->config;
    int64_t *tokens = need((size_t)r->trace.count, sizeof *tokens), pages = 0;
    for (int64_t i = 0; i < r->trace.count; i++)
        tokens[i] = r->trace.requests[i].input + max_i64(r->trace.requests[i].output, 1) - 1;
    qsort(tokens, (size_t)r->trace.count, sizeof *tokens, descending);
    c->max_length = tokens[0];
    for (int64_t i = 0; i < min_i64(c->max_requests, r->trace.count); i++) {
        c->max_kv_tokens += tokens[i];
        pages += div_up(tokens[i], c->page_size);
    }
    free(tokens);
    return pages;
}

static int choose_pool(replay *r, int64_t given)
{
    serve_config *c = &r->config;
    const int64_t wanted = measure_requests(r),
                  affordable = (r->gpu ? gpu_free_bytes(r->gpu) : cli_available_memory()) / 2 /
                               serve_page_bytes(c);
    const int64_t longest = div_up(c->max_length, c->page_size);
    c->max_requests = min_i64(c->max_requests, r->trace.count);
    c->num_pages = given ? given : min_i64(wanted, max_i64(affordable, 1));
    if (c->num_pages < longest)
        fprintf(stderr,
                "foveal: the longest request needs %lld pages, the pool has %lld%s: such requests "
                "will be rejected\n",
                (long long)longest, (long long)c->num_pages,
                given ? "" : " (half of the free memory; --layers makes pages smaller)");
    r->scheduling = (scheduler_config){ .token_budget = c->token_budget,
                                        .max_requests = c->max_requests, .page_size = c->page_size,
                                        .num_pages = c->num_pages, .speed = r->scheduling.speed,
                                        .slide = -1 };
    if (c->geometry.num_kinds == 1 && c->geometry.kinds[0].window >= 0)
        r->scheduling.slide = c->geometry.kinds[0].window;
    return CLI_OK;
}

/* ---- steps ---- */

static replay_step *add_step(replay *r)
{
    if (r->num_steps == r->step_room) {
        r->step_room = r->step_room ? 2 * r->step_room : 1024;
        r->steps = need_more(r->steps, (size_t)r->step_room, sizeof *r->steps);
    }
    replay_step *s = &r->steps[r->num_steps++];
    *s = (replay_step){ .start = r->clock };
    return s;
}

static void record_load(replay *r, const serve *engine, const scheduler *q, replay_step *s)
{
    for (int64_t i = 0; i < engine->step.num_requests; i++) {
        const live_request *l = engine->step.requests[i];
        const bool decodes = l->known - l->done == 1 && l->generated > 0;
        *(decodes ? &s->decode_rows : &s->prefill_rows) += l->rows;
        r->longest = max_i64(r->longest, l->done + l->rows);
    }
    s->requests = engine->step.num_requests;
    s->waiting = q->queue_last - q->queue_first;
    r->rows += engine->step.num_rows;
}

static fv_status record_pool(replay *r, const fv_cache *cache, replay_step *s, fv_error *err)
{
    fv_cache_stats stats;
    const fv_status status = fv_cache_query(cache, &stats, err);
    if (status != FV_OK)
        return status;
    s->used_pages = stats.used_pages;
    s->cached_pages = stats.cached_pages;
    s->free_pages = stats.free_pages;
    r->peak_used = max_i64(r->peak_used, stats.used_pages);
    r->peak_held = max_i64(r->peak_held, stats.used_pages + stats.cached_pages);
    r->evicted_pages = stats.evicted_pages;
    return FV_OK;
}

/* The picture of the step that took longest so far. */
static void keep_plan(replay *r, const serve *engine, const replay_step *s)
{
    const bool heavier = r->num_steps == 1 || s->attention > r->steps[r->heaviest_step].attention;
    size_t size = 0;
    if (!heavier || fv_plan_describe(engine->plans[0], "svg", NULL, 0, &size, NULL) != FV_OK)
        return;
    free(r->heaviest_plan);
    r->heaviest_plan = need(size, 1);
    r->heaviest_step = r->num_steps - 1;
    fv_plan_describe(engine->plans[0], "svg", r->heaviest_plan, size, NULL, NULL);
}

static fv_status one_step(replay *r, serve *engine, fv_cache *cache, bool want_picture,
                          fv_error *err)
{
    scheduler *q = &r->scheduler;
    serve_result did;
    replay_step *s = add_step(r);
    fv_status status = serve_prepare(engine, q, err);
    if (status != FV_OK)
        return status;
    check_begin(&r->checker, engine);
    status = serve_run(engine, check_layer, &r->checker, &did, err);
    if (status != FV_OK)
        return status;
    record_load(r, engine, q, s);
    s->plan = did.plan;
    s->append = did.append;
    s->attention = did.attention;
    s->bytes = did.bytes;
    s->flops = did.flops;
    s->bound = bounds_time(&r->bounds, did.bytes, did.flops);
    s->error = r->checker.step_error;
    r->clock += did.plan + did.append + did.attention;
    if (want_picture)
        keep_plan(r, engine, s);
    status = record_pool(r, cache, s, err);
    return status == FV_OK ? scheduler_advance(q, r->clock, err) : status;
}

static void show(progress *p, const replay *r)
{
    char about[96];
    const scheduler *q = &r->scheduler;
    int64_t input = 0, output = 0;
    for (int64_t i = 0; i < r->trace.count && p->shown; i++) {
        input += r->trace.requests[i].input;
        output += r->trace.requests[i].output;
    }
    snprintf(about, sizeof about, "%lld of %lld requests, %lld steps, %.0f tokens/s",
             (long long)q->finished, (long long)r->trace.count, (long long)r->num_steps,
             r->clock > 0 ? (double)r->rows / r->clock : 0);
    /* A token of output costs more than one of input: both parts count alike. */
    const double share =
        (double)(r->rows - q->generated + q->hit_tokens) / (double)max_i64(input, 1);
    const double out = (double)q->generated / (double)max_i64(output, 1);
    progress_show(p, (share < 1 ? share : 1) / 2 + out / 2, about);
}

static fv_status serve_all(replay *r, serve *engine, fv_cache *cache, FILE *json, bool want_picture,
                           fv_error *err)
{
    progress bar = progress_begin();
    fv_status status = FV_OK;
    while (status == FV_OK && !scheduler_is_done(&r->scheduler)) {
        int64_t rows = 0;
        status = scheduler_plan(&r->scheduler, r->clock, &rows, err);
        if (status != FV_OK)
            break;
        if (rows == 0) {                /* nobody is there: the clock jumps to the next arrival */
            const double next = scheduler_next_arrival(&r->scheduler);
            if (!isfinite(next) && r->scheduler.num_running == 0 &&
                r->scheduler.queue_first == r->scheduler.queue_last)
                continue;                       /* the last ones were rejected */
            if (!isfinite(next) || next <= r->clock) {
                snprintf(err->text, sizeof err->text, "no request can go on: %lld run, %lld wait",
                         (long long)r->scheduler.num_running,
                         (long long)(r->scheduler.queue_last - r->scheduler.queue_first));
                status = err->status = FV_E_CAPACITY;
            } else {
                r->clock = next;
            }
            continue;
        }
        status = one_step(r, engine, cache, want_picture, err);
        if (status == FV_OK && json && !json_step(json, r, r->num_steps - 1))
            json = NULL;                        /* cli_close reports it */
        show(&bar, r);
    }
    progress_end(&bar);
    return status;
}

/* ---- the whole run ---- */

/* The kernel's name and the plans' memory. */
static void ask_plans(replay *r, const serve *engine)
{
    fv_plan_stats stats;
    if (engine->plans[0] && fv_plan_query(engine->plans[0], &stats, NULL) == FV_OK)
        snprintf(r->kernel, sizeof r->kernel, "%s", stats.kernel);
}

static int serve_trace(replay *r, fv_ctx *ctx, serve *engine, fv_cache *cache, FILE *json,
                       bool want_picture)
{
    fv_error err = { 0 };
    fv_errors faults = { 0 };
    scheduler_init(&r->scheduler, &r->scheduling, &r->trace, cache);
    if (serve_all(r, engine, cache, json, want_picture, &err) != FV_OK)
        return cli_failed("the replay stopped", &err);
    ask_plans(r, engine);
    if (fv_ctx_errors(ctx, &faults, 1) == FV_OK && faults.count)
        return cli_fail("a kernel met bad data: fault %d of request %d, value %lld, %lld in all",
                        (int)faults.what, faults.request, (long long)faults.value,
                        (long long)faults.count);
    return CLI_OK;
}

static int with_cache(replay *r, fv_ctx *ctx, FILE *json, bool want_picture)
{
    fv_error err = { 0 };
    fv_cache *cache = NULL;
    serve engine;
    const serve_config *c = &r->config;
    const fv_cache_desc desc = { .page_size = (int32_t)c->page_size,
                                 .max_sequences = (int32_t)c->max_requests + 1,
                                 .num_pages = c->num_pages, .max_pages_per_sequence =
                                     min_i64(div_up(c->max_length, c->page_size), c->num_pages),
                                 .no_prefix = r->no_prefix };
    if (fv_cache_create(ctx, &desc, &cache, &err) != FV_OK)
        return cli_failed("cannot make the cache", &err);
    int code = CLI_FAILED;
    if (serve_open(ctx, r->gpu, c, &engine))
        code = serve_trace(r, ctx, &engine, cache, json, want_picture);
    serve_close(&engine);
    fv_cache_destroy(&cache);
    return code;
}

static int write_report(replay *r, const summary *s, const char *path)
{
    FILE *out = cli_create(path);
    if (!out)
        return cli_fail("%s: %s", path, strerror(errno));
    report_write(out, r, s);
    return cli_close(out) ? CLI_OK : cli_unwritten(path);
}

static int write_results(replay *r, const replay_options *o, FILE *json)
{
    summary s;
    int code = CLI_OK;
    summary_make(r, &s);
    summary_print(json == stdout ? stderr : stdout, r, &s);
    if (json && (!json_summary(json, r, &s) || fflush(json)))
        code = cli_unwritten(o->json);
    if (o->report && code == CLI_OK)
        code = write_report(r, &s, o->report);
    if (r->checker.failures)
        code = cli_fail("%lld comparisons failed; the first: %s", (long long)r->checker.failures,
                        r->checker.failure);
    else if (code == CLI_OK && r->scheduler.finished == 0)
        code = cli_fail("no request was served: each is larger than the pool, %lld x %lld tokens",
                        (long long)r->config.num_pages, (long long)r->config.page_size);
    return code;
}

/* "cpu, 8 threads" or "cuda:0, NVIDIA H200". */
static void name_device(replay *r)
{
    const char *name = r->where.device ? r->where.device : getenv("FV_DEVICE");
    r->device = name && *name ? name : "cpu";
    if (r->gpu)
        snprintf(r->device_text, sizeof r->device_text, "%s, %s", r->device, gpu_name(r->gpu));
    else
        snprintf(r->device_text, sizeof r->device_text, "%s, %d thread%s", r->device,
                 r->bounds.threads, r->bounds.threads == 1 ? "" : "s");
}

static int on_device(replay *r, const replay_options *o, fv_ctx *ctx, FILE *json)
{
    r->bounds.threads = cli_threads(&r->where);
    name_device(r);
    const int code = choose_pool(r, o->pages);
    if (code != CLI_OK)
        return code;
    if (strcmp(o->bounds, "on") == 0 &&
        !bounds_measure(r->gpu, r->bounds.threads, r->config.type->bytes == 2, &r->bounds))
        return CLI_FAILED;
    return with_cache(r, ctx, json, o->report != NULL);
}

static int run(replay *r, const replay_options *o)
{
    fv_ctx *ctx = NULL;
    FILE *json = NULL;
    if ((o->report && cli_writable(o->report) != CLI_OK) || (o->json && cli_writable(o->json) != CLI_OK))
        return CLI_FAILED;
    int code = cli_open(&r->where, &ctx);
    if (code != CLI_OK)
        return code;
    if (o->json && !(json = cli_create(o->json))) {
        code = cli_fail("%s: %s", o->json, strerror(errno));
    } else {
        gpu_open(ctx, &r->gpu);
        code = on_device(r, o, ctx, json);
        gpu_close(&r->gpu);
    }
    fv_close(&ctx);
    if (code == CLI_OK)
        code = write_results(r, o, json);
    if (json && !cli_close(json) && code == CLI_OK)
        code = cli_unwritten(o->json);
    return code;
}

static void release(replay *r)
{
    if (r->scheduler.requests)
        scheduler_free(&r->scheduler);
    trace_free(&r->trace);
    free(r->steps);
    free(r->heaviest_plan);
}

int cmd_replay(int argc, char **argv)
{
    replay_options o = defaults;
    replay r = { 0 };
    int first;
    int code = parse(argc, argv, &o, &first);
    if (code != CLI_GO_ON)
        return code;
    if (argc - first != 1)
        return cli_misuse("replay needs one trace file (see foveal replay --help)");
    r.path = argv[first];
    const cli_file files[] = { { "the trace", r.path, false }, { "--json", o.json, true },
                               { "--report", o.report, true } };
    if ((code = cli_distinct(files, 3)) != CLI_OK)
        return code;
    if ((code = configure(&r, &o)) != CLI_OK)
        return code;
    if ((code = read_trace(&r, &o)) == CLI_OK) {
        r.checker = (checker){ .trace = &r.trace, .rows_per_step = o.check, .digesting = o.digest,
                               .random = r.config.seed };
        code = run(&r, &o);
    }
    release(&r);
    return code;
}
