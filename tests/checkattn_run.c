/* SPDX-License-Identifier: Apache-2.0 */
/* checkattn_run.c -- one way of a row on the engine, element by element against the reference.
 *
 * Order of judgement: set up (not run), plan and run (refused: outputs untouched), what must not be
 * written, what must be, then values. The first thing wrong is the verdict's text.
 */
#include "checkattn.h"
#include "checkattn_gpu.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

const char *const verdict_names[] = { "pass", "FAIL", "refused", "not run" };

double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

__attribute__((format(printf, 3, 4)))
static bool judge(result *r, verdict v, const char *format, ...)
{
    va_list args;

    r->verdict = v;
    va_start(args, format);
    vsnprintf(r->text, sizeof r->text, format, args);
    va_end(args);
    return false;
}

/* ------------------------------------------------------------------------------------ comparing */

typedef struct tolerance {
    double relative, absolute, mo;
} tolerance;

static const tolerance tolerances[CASE_DTYPES] = {
    [CASE_DTYPE_F32] = { 1e-5, 4e-6, 1e-4 },
    [CASE_DTYPE_F16] = { 2e-3, 1e-3, 1e-3 },
    [CASE_DTYPE_BF16] = { 1.6e-2, 8e-3, 4e-3 },
};

/* The largest error seen and where. */
typedef struct worst {
    double share;                       /* error / allowed */
    double got, want;
    int64_t row, element;
    int head;
} worst;

static void note(worst *w, double share, double got, double want, int64_t row, int head,
                 int64_t element)
{
    if (!(share > w->share))
        return;
    *w = (worst){ share, got, want, row, element, head };
}

/* What f32 on the way costs beyond the page's tolerances, which are calibrated for its own rows:
 * angles of rotary embedding are position * frequency, biases slope * distance, and 2^-24 of a
 * large number is an absolute error of the score. */
static double f32_allowance(const case_row *row)
{
    double last = 0;

    if (!row->file->extended || !(row->x.rope_dim || row->alibi))
        return 0;
    for (int r = 0; r < row->num_requests; r++)
        last = fmax(last,
                    (double)(row->kv.at[r] + (row->x.rope_dim ? case_first_position(row, r) : 0)));
    return (row->x.rope_dim ? 1e-6 : 2.5e-7) * last;
}

/* Error of an O element as a share of what is allowed. */
static double o_share(const case_row *row, int type, uint32_t code, double want)
{
    const double got = num_load(type, &code, 0);
    const int ulp = row->ulp + (type == NUM_F32 ? 4 : 0);
    uint32_t rounded = 0;

    if (!isfinite(got))
        return INFINITY;
    if (row->ulp < 0)
        return fabs(got - want)
               / (tolerances[type].relative * fabs(want) + tolerances[type].absolute
                  + f32_allowance(row));
    num_store(type, &rounded, 0, want);
    const int64_t apart = num_ulps(type, code, rounded);
    return apart == 0 ? 0 : ulp ? (double)apart / ulp : 1 + (double)apart;
}

static double f32_ulp(double x)
{
    const float f = (float)fabs(x);

    return isfinite(f) ? (double)(nextafterf(f, INFINITY) - f) : 0;
}

/* LSE, natural on both sides. */
static double lse_share(double got, double want)
{
    if (want == -INFINITY || got == -INFINITY)
        return got == want ? 0 : INFINITY;
    if (!isfinite(got))
        return INFINITY;
    return fabs(got - want) / (2e-3 + 2 * f32_ulp(want));
}

static double lse_at(const setup *s, int64_t row, int head)
{
    const double x = num_load(NUM_F32, s->lse.base, row * s->lse_row + head * s->lse_head);

    return s->problem.lse_base2 ? x * log(2) : x;
}

static uint32_t o_code(const setup *s, int64_t row, int head, int d)
{
    return num_code(s->st->q_type, s->o.base, row * s->o_stride + (int64_t)head * s->row->dv + d);
}

static bool report_worst(result *r, const worst *w, const char *what)
{
    r->worst = w->share > r->worst ? w->share : r->worst;
    if (w->share <= 1)
        return true;
    return judge(
        r, FAIL,
        "%s row %lld head %d element %lld: %.9g, reference %.9g (%.3g times the tolerance)", what,
        (long long)w->row, w->head, (long long)w->element, w->got, w->want, w->share);
}

/* What is owed where several answers are right: what is nearest to `got`. */
static double owed(double got, double want, const double *end0, const double *end1, int64_t i)
{
    if (!end0 || isnan(got))
        return want;
    const double low = fmin(want, fmin(end0[i], end1[i])), high = fmax(want, fmax(end0[i], end1[i]));
    return got < low ? low : got > high ? high : got;
}

static bool compare_o(const setup *s, const case_answer *a, result *r)
{
    const case_row *row = s->row;
    worst w = { 0 };
    double sum = 0;

    for (int64_t i = 0; i < a->n; i++)
        for (int h = 0; h < row->hq; h++)
            for (int d = 0; d < row->dv; d++) {
                const uint32_t code = o_code(s, a->rows[i], h, d);
                const int64_t at = (i * row->hq + h) * row->dv + d;
                const double got = num_load(s->st->q_type, &code, 0);
                const double want = owed(got, a->o[at], a->ends ? a->ends[0].o : NULL,
                                         a->ends ? a->ends[1].o : NULL, at);
                sum += fabs(got);
                note(&w, o_share(row, s->st->q_type, code, want), got, want, a->rows[i], h, d);
            }
    r->mo = a->n ? sum / (double)(a->n * row->hq * row->dv) : 0;
    return report_worst(r, &w, "O");
}

static bool compare_lse(const setup *s, const case_answer *a, result *r)
{
    worst w = { 0 };

    for (int64_t i = 0; i < a->n; i++)
        for (int h = 0; h < s->row->hq; h++) {
            const int64_t at = i * s->row->hq + h;
            const double got = lse_at(s, a->rows[i], h);
            const double want = owed(got, a->lse[at], a->ends ? a->ends[0].lse : NULL,
                                     a->ends ? a->ends[1].lse : NULL, at);
            note(&w, lse_share(got, want), got, want, a->rows[i], h, 0);
        }
    return report_worst(r, &w, "LSE");
}

/* Sums of up to rows x group weights in f32. */
static bool compare_sums(const setup *s, const case_answer *a, result *r)
{
    worst w = { 0 };

    for (int64_t j = 0; a->key_sums && j < s->total_keys; j++)
        for (int h = 0; h < s->row->hk; h++) {
            const double got = num_load(NUM_F32, s->sums.base, h * s->sums_stride + j);
            const double want = a->key_sums[j * s->row->hk + h];
            note(&w,
                 isfinite(got)
                     ? fabs(got - want) / (1e-3 * fabs(want) + 1e-4 + f32_allowance(s->row))
                     : INFINITY,
                 got, want, j, h, 0);
        }
    return report_worst(r, &w, "key sums, key");
}

/* What each fault line says about this mean, if one fits. */
static const char *likely_fault(const case_row *row, double mo, double allowed)
{
    for (int i = 0; i < row->num_faults; i++)
        if (fabs(mo - row->faults[i].mo) <= allowed)
            return row->faults[i].words;
    return NULL;
}

static bool compare_mean(const setup *s, const case_answer *a, result *r)
{
    const double allowed = tolerances[s->st->q_type].mo * fabs(a->mo) + 1e-6;

    if (fabs(r->mo - a->mo) <= allowed)
        return true;
    return judge(r, FAIL, "mean of abs(O) %.9g, reference %.9g", r->mo, a->mo);
}

/* Says in words what an engine with this mean forgot. */
static void explain(const setup *s, result *r)
{
    const char *words =
        r->verdict == FAIL
            ? likely_fault(s->row, r->mo, tolerances[s->st->q_type].mo * fabs(r->mo) + 1e-6)
            : NULL;
    const size_t n = strlen(r->text);

    if (words)
        snprintf(r->text + n, sizeof r->text - n, "; the mean is that of: %s", words);
}

/* ----------------------------------------------------------------- what may and must be written */

/* Rows that are not compared by value (check=K) must still be written with finite numbers. */
static bool all_written(const setup *s, result *r)
{
    for (int64_t i = 0; i < s->total_rows; i++)
        for (int h = 0; h < s->row->hq; h++) {
            for (int d = 0; d < s->row->dv; d++) {
                const uint32_t code = o_code(s, i, h, d);
                if (!isfinite(num_load(s->st->q_type, &code, 0)))
                    return judge(r, FAIL, "O row %lld head %d element %d is %g", (long long)i, h, d,
                                 num_load(s->st->q_type, &code, 0));
            }
            const double lse = lse_at(s, i, h);
            if (isnan(lse) || lse == INFINITY)
                return judge(r, FAIL, "LSE row %lld head %d is %g", (long long)i, h, lse);
        }
    return true;
}

static bool still(const area *a, int type, int64_t first, int64_t last, int64_t *where)
{
    for (int64_t i = first; i < last; i++)
        if (num_code(type, a->base, i) != a->pattern) {
            *where = i;
            return false;
        }
    return true;
}

/* Gaps between and behind rows of O, spare rows and columns of LSE, and the surroundings of
 * both. */
static bool rest_untouched(const setup *s, result *r)
{
    const case_row *row = s->row;
    const int64_t rows = s->total_rows + row->pad_rows, width = (int64_t)row->hq * row->dv;
    int64_t at;

    for (int64_t i = 0; i < rows; i++) {
        const int64_t first = i * s->o_stride + (i < s->total_rows ? width : 0);
        const int64_t last = i + 1 < rows ? (i + 1) * s->o_stride : i * s->o_stride + width;
        if (!still(&s->o, s->st->q_type, first, last, &at))
            return judge(r, FAIL, "O element %lld (row %lld) is not the call's to write",
                         (long long)at, (long long)i);
    }
    const bool by_head = s->way.axis[CASE_AXIS_LSE] == CASE_LSE_HT;
    const int64_t used = by_head ? s->total_rows : row->hq;
    for (int64_t i = 0; i < s->lse_lines; i++) {
        const bool spare = !by_head && i >= s->total_rows;
        if (!still(&s->lse, NUM_F32, i * s->lse_line + (spare ? 0 : used), (i + 1) * s->lse_line,
                   &at))
            return judge(r, FAIL, "LSE element %lld (line %lld) is not the call's to write",
                         (long long)at, (long long)i);
    }
    for (int h = 0; s->sums.map && h < row->hk; h++)
        if (!still(&s->sums, NUM_F32, h * s->sums_stride + s->total_keys, (h + 1) * s->sums_stride,
                   &at))
            return judge(r, FAIL, "key sum element %lld is not the call's to write", (long long)at);
    if (!area_slack_is_clean(&s->o) || !area_slack_is_clean(&s->lse)
        || !area_slack_is_clean(&s->sums))
        return judge(r, FAIL, "memory around %s was written",
                     area_slack_is_clean(&s->o) ? "LSE or key sums" : "O");
    if (s->work.map && !area_slack_is_clean(&s->work))
        return judge(r, FAIL, "memory around the workspace was written");
    return true;
}

/* After a refusal: both outputs as setup_reset left them. */
static bool outputs_untouched(const setup *s)
{
    for (int64_t i = 0; i < s->total_rows; i++)
        for (int h = 0; h < s->row->hq; h++) {
            for (int d = 0; d < s->row->dv; d++)
                if (o_code(s, i, h, d) != num_poison(s->st->q_type, CASE_POISON_NAN))
                    return false;
            if (num_code(NUM_F32, s->lse.base, i * s->lse_row + h * s->lse_head)
                != num_poison(NUM_F32, CASE_POISON_NAN))
                return false;
        }
    return true;
}

/* ------------------------------------------------------------------------------------- the bits */

static uint64_t mix(uint64_t hash, uint32_t code)
{
    hash = (hash ^ code) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 29;
}

void hash_rows(const setup *s, int64_t first, int64_t last, uint64_t *o, uint64_t *lse)
{
    *o = *lse = 1;
    for (int64_t i = first; i < last; i++)
        for (int h = 0; h < s->row->hq; h++) {
            for (int d = 0; d < s->row->dv; d++)
                *o = mix(*o, o_code(s, i, h, d));
            *lse = mix(*lse, num_code(NUM_F32, s->lse.base, i * s->lse_row + h * s->lse_head));
        }
}

static bool requests_agree(const setup *s)
{
    uint64_t o0 = 0, l0 = 0, o, l;
    int64_t at = 0;

    for (int i = 0; i < s->num_slices; i++) {
        const int64_t rows = s->slices[i].row_hi - s->slices[i].row_lo;
        hash_rows(s, at, at + rows, &o, &l);
        if (i == 0) {
            o0 = o;
            l0 = l;
        }
        if (o != o0 || l != l0)
            return false;
        at += rows;
    }
    return true;
}

/* -------------------------------------------------------------------------------------- running */

static bool refused(setup *s, result *r, const char *call, fv_status status, const fv_error *err)
{
    r->broken |= status == FV_E_DEVICE;
    if (s->o.map && setup_fetch(s) && !outputs_untouched(s))
        return judge(r, FAIL, "%s failed (%s: %s) but had written outputs", call,
                     fv_status_name(status), err->text);
    if (status == FV_E_INVALID || status == FV_E_UNSUPPORTED)
        return judge(r, REFUSED, "%s: %s: %s", call, fv_status_name(status), err->text);
    return judge(r, FAIL, "%s: %s: %s: %s", call, fv_status_name(status), err->field, err->text);
}

/* The caller's workspace, exactly as large as the plan says, between guards. */
static bool make_workspace(fv_ctx *ctx, setup *s, result *r)
{
    fv_error err = { 0 };
    fv_sizes sizes = { 0 };
    const fv_status status = fv_plan_sizes(ctx, &s->problem, &s->limits, &sizes, &err);

    if (status != FV_OK)
        return refused(s, r, "fv_plan_sizes", status, &err);
    if (sizes.workspace_bytes == 0)
        return true;
    if (!area_make(&s->work, (int64_t)sizes.workspace_bytes, 0, NUM_F32, 0, false))
        return judge(r, NOT_RUN, "no memory for a workspace of %zu bytes", sizes.workspace_bytes);
    s->limits.workspace = area_address(&s->work, 0);
    s->limits.workspace_bytes = sizes.workspace_bytes;
    return true;
}

static bool make_plan(fv_ctx *ctx, setup *s, fv_plan **plan, result *r)
{
    fv_error err = { 0 };
    fv_status status = fv_plan_create(ctx, &s->problem, &s->limits, plan, &err);

    if (status != FV_OK)
        return refused(s, r, "fv_plan_create", status, &err);
    status = fv_plan_update(*plan, NULL, &s->batch, gpu_stream(), &err);
    if (status != FV_OK)
        return refused(s, r, "fv_plan_update", status, &err);
    return true;
}

/* The device failed between calls of the engine. */
static bool device_failed(result *r)
{
    r->broken = true;
    return judge(r, FAIL, "the device failed");
}

static bool run_once(fv_plan *plan, setup *s, result *r)
{
    fv_error err = { 0 };

    if (!setup_reset(s))
        return device_failed(r);
    const double start = now();
    const fv_status status = fv_run(plan, &s->tensors, gpu_stream(), &err);
    if (status != FV_OK)
        return refused(s, r, "fv_run", status, &err);
    if (gpu_on() && !gpu_sync())
        return device_failed(r);
    r->us = 1e6 * (now() - start);
    return setup_fetch(s) || device_failed(r);
}

/* ---- the same from a captured graph ---- */

typedef struct graph_run {
    fv_plan *plan;
    setup *s;
    result *r;
} graph_run;

static bool queue_run(void *arg)
{
    graph_run *g = arg;
    fv_error err = { 0 };
    const fv_status status = fv_run(g->plan, &g->s->tensors, gpu_stream(), &err);

    return status == FV_OK
           || judge(g->r, FAIL, "fv_run while capturing: %s: %s", fv_status_name(status), err.text);
}

static bool check_graph(fv_plan *plan, setup *s, result *r)
{
    graph_run g = { plan, s, r };
    uint64_t o, lse;

    if (!gpu_on() || s->total_rows == 0)
        return true;
    gpu_graph *graph = gpu_capture(queue_run, &g);
    if (!graph)
        return r->verdict == PASS ? judge(r, FAIL, "the run cannot be captured") : false;
    const bool ran = setup_reset(s) && gpu_graph_launch(graph) && setup_fetch(s);
    gpu_graph_free(graph);
    if (!ran)
        return device_failed(r);
    hash_rows(s, 0, s->total_rows, &o, &lse);
    if (o == r->o_bits && lse == r->lse_bits)
        return rest_untouched(s, r);
    return judge(r, FAIL, "a replayed graph has other bits than the direct run");
}

static bool has_bad_pages(const setup *s, int32_t request)
{
    if (request < 0 || request >= s->num_slices)
        return false;
    const slice *one = &s->slices[request];
    for (int64_t j = one->lo; j < one->hi; j++)
        if (case_bad(s->row, one->request, j))
            return true;
    return false;
}

/* Bad page ids are reported, of a request that has some, and nothing else. */
static bool faults_are_told(fv_ctx *ctx, const setup *s, result *r)
{
    fv_errors e = { 0 };

    fv_ctx_errors(ctx, &e, 1);
    if (s->bad_entries && e.count == 0)
        return judge(r, FAIL, "the context reports none of %lld bad page ids", (long long)s->bad_entries);
    const bool bad_id = e.what == FV_FAULT_PAGE_ID && (e.value < 0 || e.value >= s->num_pages);
    if (e.count == 0 || (s->bad_entries && bad_id && has_bad_pages(s, e.request)))
        return true;
    return judge(r, FAIL,
                 "the context reports fault %d: request %d slot %lld value %lld, %lld of them",
                 (int)e.what, e.request, (long long)e.slot, (long long)e.value, (long long)e.count);
}

static bool repeat_run(fv_plan *plan, setup *s, result *r)
{
    uint64_t o, lse;

    for (int i = 1; i < s->row->repeat; i++) {
        if (!run_once(plan, s, r))
            return false;
        hash_rows(s, 0, s->total_rows, &o, &lse);
        if (o != r->o_bits || lse != r->lse_bits)
            return judge(r, FAIL, "run %d of %d has other bits than the first", i + 1,
                         s->row->repeat);
    }
    return true;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

enum { BATCH = 20 };                    /* runs queued at once on a GPU: one alone would time the
                                           launch */

static bool run_batch(fv_plan *plan, setup *s)
{
    for (int i = 0; i < (gpu_on() ? BATCH : 1); i++)
        if (fv_run(plan, &s->tensors, gpu_stream(), NULL) != FV_OK)
            return false;
    return !gpu_on() || gpu_sync();
}

/* Median of the runs that fit into `seconds`, at least 5 and at most 1000. */
static void time_runs(fv_plan *plan, setup *s, double seconds, result *r)
{
    double times[1000];
    int n = 0;

    for (const double stop = now() + seconds; n < 5 || (n < 1000 && now() < stop); n++) {
        const double start = now();
        if (!run_batch(plan, s))
            return;
        times[n] = 1e6 * (now() - start) / (gpu_on() ? BATCH : 1);
    }
    qsort(times, (size_t)n, sizeof *times, by_value);
    r->us = times[n / 2];
}

static void query_plan(const fv_plan *plan, result *r)
{
    fv_plan_stats stats = { 0 };

    if (fv_plan_query(plan, &stats, NULL) != FV_OK)
        return;
    r->bytes = (double)stats.kv_bytes;
    r->flops = (double)stats.flops;
    snprintf(r->kernel, sizeof r->kernel, "%s", stats.kernel);
}

/* Plan, run, and everything that can be said without a reference. Destroys the plan. */
bool run_setup(fv_ctx *ctx, setup *s, double seconds, result *r)
{
    fv_plan *plan = NULL;

    fv_ctx_errors(ctx, &(fv_errors){ 0 }, 1);
    if (!setup_reset(s))
        return device_failed(r);
    bool ok = make_workspace(ctx, s, r) && make_plan(ctx, s, &plan, r);
    if (ok)
        query_plan(plan, r);
    ok = ok && run_once(plan, s, r) && faults_are_told(ctx, s, r) && rest_untouched(s, r)
         && all_written(s, r);
    if (ok) {
        hash_rows(s, 0, s->total_rows, &r->o_bits, &r->lse_bits);
        r->requests_agree = requests_agree(s);
        ok = repeat_run(plan, s, r) && check_graph(plan, s, r);
    }
    if (ok && seconds > 0)
        time_runs(plan, s, seconds, r);
    fv_plan_destroy(&plan);
    return ok;
}

static bool compare_all(const setup *s, const case_answer *a, result *r)
{
    const bool o = compare_o(s, a, r);
    const bool ok = o && compare_lse(s, a, r) && compare_mean(s, a, r) && compare_sums(s, a, r);

    if (!ok)
        explain(s, r);
    return ok;
}

/* ------------------------------------------------------------------- cut: parts and their merge */

/* Memory of a cut row's parts: O [parts][hq][dv] of the row's type, LSE [parts][hq]; and where
 * the engine sees it. */
typedef struct parts {
    size_t n;
    uint8_t *o, *o_there;
    float *lse, *lse_there;
    int64_t o_bytes;                    /* of one part */
} parts;

static bool run_part(fv_ctx *ctx, const shared *sh, const stored *st, const case_way *way,
                     int64_t lo, int64_t hi, int64_t index, parts *p, result *r)
{
    const slice one = { 0, lo, hi, 0, 1 };
    const int hq = sh->row->hq;
    setup s;
    bool ok = setup_make(&s, sh, st, way, &one, 1) || judge(r, NOT_RUN, "%s", s.why);

    ok = ok && run_setup(ctx, &s, 0, r);
    for (int h = 0; ok && h < hq; h++) {
        for (int d = 0; d < sh->row->dv; d++)
            num_put(st->q_type, p->o + index * p->o_bytes, h * sh->row->dv + d,
                    o_code(&s, 0, h, d));
        memcpy(&p->lse[index * hq + h], s.lse.base + 4 * h * s.lse_head, 4);
    }
    if (ok) {
        const double got = lse_at(&s, 0, hq - 1), want = sh->answer->part_l[index];
        if (lse_share(got, want) > 1)
            ok = judge(r, FAIL, "LSE of part %lld: %.9g, reference %.9g", (long long)index, got,
                       want);
    }
    setup_free(&s);
    return ok;
}

static fv_tensor state_o(const parts *p, const case_row *row, int type, int64_t i)
{
    return (fv_tensor){ .data = p->o_there + i * p->o_bytes,
                        .dtype = num_types[type].name,
                        .ndim = 3,
                        .shape = { 1, row->hq, row->dv },
                        .stride = { (int64_t)row->hq * row->dv, row->dv, 1 } };
}

static fv_tensor state_lse(const parts *p, const case_row *row, int64_t i)
{
    return (fv_tensor){ .data = p->lse_there + i * row->hq,
                        .dtype = "f32",
                        .ndim = 2,
                        .shape = { 1, row->hq },
                        .stride = { row->hq, 1 } };
}

/* Merges the parts into the set-up's own outputs, so that the ordinary comparison applies. */
static bool merge_parts(fv_ctx *ctx, setup *s, parts *p, result *r)
{
    fv_tensor *o = calloc(p->n, sizeof *o), *lse = calloc(p->n, sizeof *lse);
    fv_error err = { 0 };
    fv_status status = FV_E_NO_MEMORY;

    p->o_there = setup_twin(s, p->o, p->n * (size_t)p->o_bytes);
    p->lse_there = setup_twin(s, p->lse, p->n * (size_t)s->row->hq * sizeof *p->lse);
    if (!setup_reset(s) || !p->o_there || !p->lse_there) {
        free(o);
        free(lse);
        return device_failed(r);
    }
    for (size_t i = 0; o && lse && i < p->n; i++) {
        o[i] = state_o(p, s->row, s->st->q_type, (int64_t)i);
        lse[i] = state_lse(p, s->row, (int64_t)i);
    }
    if (o && lse) {
        fv_tensor to = s->tensors.o, tl = s->tensors.lse;
        to.shape[0] = tl.shape[0] = 1;
        status = fv_merge(ctx, o, lse, (int64_t)p->n, s->problem.lse_base2, &to, &tl, gpu_stream(),
                          &err);
    }
    free(o);
    free(lse);
    if (status != FV_OK)
        return refused(s, r, "fv_merge", status, &err);
    return (setup_fetch(s) || device_failed(r)) && rest_untouched(s, r) && all_written(s, r);
}

static bool run_cut(fv_ctx *ctx, setup *s, result *r)
{
    const case_row *row = s->row;
    parts p = { .n = (size_t)row->cut.n + 1,
                .o_bytes = num_bytes(s->st->q_type, (int64_t)row->hq * row->dv) };
    int64_t lo = 0;

    p.o = malloc(p.n * (size_t)p.o_bytes);
    p.lse = malloc(p.n * (size_t)row->hq * sizeof *p.lse);
    bool ok = (p.o && p.lse) || judge(r, NOT_RUN, "no memory for the parts");
    for (int64_t i = 0; ok && i <= row->cut.n; i++) {
        const int64_t hi = i < row->cut.n ? row->cut.at[i] : row->kv.at[0];
        ok = run_part(ctx, s->sh, s->st, &s->way, lo, hi, i, &p, r);
        lo = hi;
    }
    ok = ok && merge_parts(ctx, s, &p, r) && compare_all(s, s->sh->answer, r);
    if (!ok && r->verdict == FAIL) {
        char text[sizeof r->text];
        snprintf(text, sizeof text, "cut: %.680s", r->text);
        memcpy(r->text, text, sizeof text);
    }
    free(p.o);
    free(p.lse);
    return ok;
}

void run_way(fv_ctx *ctx, const shared *sh, const stored *st, const case_way *way, double seconds,
             result *out)
{
    const int n = sh->row->num_requests;
    slice *slices = calloc((size_t)n + 1, sizeof *slices);
    setup s = { 0 };

    if (way->property) {
        run_property(ctx, sh, st, way, out);
        free(slices);
        return;
    }
    *out = (result){ .verdict = PASS };
    for (int i = 0; slices && i < n; i++)
        slices[i] = whole_slice(sh->row, i);
    if (!slices)
        judge(out, NOT_RUN, "no memory");
    else if (!setup_make(&s, sh, st, way, slices, n))
        judge(out, NOT_RUN, "%s", s.why);
    else if (run_setup(ctx, &s, seconds, out) && compare_all(&s, sh->answer, out)
             && sh->row->cut.n) {
        result whole = *out;
        if (run_cut(ctx, &s, out)) {    /* keep what was said about the ordinary run */
            whole.worst = out->worst > whole.worst ? out->worst : whole.worst;
            *out = whole;
        }
    }
    setup_free(&s);
    free(slices);
}
