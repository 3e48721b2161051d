/* SPDX-License-Identifier: Apache-2.0 */
/* checkattn.c -- every case row on the engine, in every way that the row asks for, against the
 * definition (ref.c).
 *
 *     checkattn [--cases FILE] [--id PREFIX] [--class NAME] [--isa NAME] [--device cpu|cuda:N]
 *               [--full | --fast] ...
 *
 * For each row: the answer and the bytes are made once, here; then a child process for each element
 * type and CPU level opens a context, runs the ways and reports each through a pipe. A child that
 * dies or hangs costs one way: that way has failed, and the next child goes on behind it. On a GPU
 * a child runs row after row, for the driver takes long to start: there such an end costs a row.
 * What passed can be timed (--time).
 *
 * Output: one line per row and level (--verbose: and per way), each failure, totals. Exit 0 only if
 * everything passed; 2 for a wrong call or an unreadable file.
 */
#include "checkattn.h"
#include "checkattn_gpu.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef FV_TEST_CASES
#define FV_TEST_CASES "tests/cases/numeric.txt"
#endif

enum { MAX_LEVELS = 16, SHOWN_FAILURES = 4, HEAVY_WAYS = 2, RANDOM_WAYS = 4 };

typedef struct options {
    const char *cases, *id, *cls, *isa, *device, *csv_path;
    bool full, fast, list, verbose, timed, no_fork, no_limit, properties, extended;
    unsigned seed;
    int threads, count, jobs;
    FILE *csv;
} options;

typedef struct totals {
    int64_t pass, fail, refused, allowed, not_run;      /* ways; allowed: refusals that the page
                                                           permits */
} totals;

static options opt = { .cases = FV_TEST_CASES, .id = "", .seed = 1, .count = 200 };
static char levels[MAX_LEVELS][32];     /* CPU levels to run, or the device's name */
static int num_levels;
static totals all;

/* What a worker process tells its parent while it runs. */
typedef struct progress {
    totals all;
    int row;                            /* that it is at, -1: none */
    double beat;                        /* when it last ended something */
} progress;

enum { MAX_JOBS = 64 };

typedef struct board {                  /* shared by the parent and its workers */
    _Atomic int next;                   /* first row that nobody took */
    progress of[MAX_JOBS];
} board;

static progress *live;                  /* this worker's; NULL: there are no workers */
static fv_ctx *gpu_ctx;                 /* the worker's */
static bool device_broken;

/* ------------------------------------------------------------------------------------- messages */

/* From child to parent, smaller than PIPE_BUF: whole or not at all. */
typedef struct message {
    enum { BEGINS, ENDS, OPENED, COMPLETE } kind;
    int way;                            /* index */
    result r;
} message;

typedef struct work {
    const shared *sh;
    const stored *st;                   /* NULL: a merge row */
    const case_ways *ways;
    const char *level;
    int fd;                             /* to report to; -1: to the report itself */
    struct report *report;
} work;

/* What has been heard about one row, type and level. */
typedef struct report {
    const case_row *row;
    const case_ways *ways;
    const char *level;
    int next;                           /* first way not yet ended */
    bool complete, opened;
    totals t;
    double worst, us;
    double shown;
    const char *dtype;
} report;

static double limit_seconds(const case_row *row)
{
    return row->heavy ? 600 : 60;
}

/* ------------------------------------------------------------------------------------ same bits */

/* One entry per group of ways that must agree. */
typedef struct bits_seen {
    int key[7];
    int way;
    uint64_t o, lse;
} bits_seen;

/* What the bits may depend on: see "Same bits" of the page. In the invariant mode a request's
 * bits depend on nothing but its data and the problem. -3 stands for "anything". */
static void bits_key(const case_row *row, const case_way *way, bool lse, int *key)
{
    const int *a = way->axis;
    const bool invariant = a[CASE_AXIS_INVARIANT] == 1;

    key[0] = a[CASE_AXIS_INVARIANT];
    key[1] = a[CASE_AXIS_MASK];
    key[2] = lse ? a[CASE_AXIS_BASE] : -3;
    key[3] = invariant ? -3 : a[CASE_AXIS_SPLITS];
    key[4] = invariant || row->same_bits & CASE_SAME_PAGE ? (invariant ? -3 : a[CASE_AXIS_MEM])
                                                          : a[CASE_AXIS_PAGE];
    key[5] = invariant ? -3 : a[CASE_AXIS_ROOM];
    key[6] = invariant && a[CASE_AXIS_SHARING] == CASE_SHARING_FIND ? CASE_SHARING_OFF
                                                                    : a[CASE_AXIS_SHARING];
}

/* The entry of this key, made if there is none (then ->way is -1). */
static bits_seen *find_bits(bits_seen *seen, int *n, const int *key)
{
    for (int i = 0; i < *n; i++)
        if (!memcmp(seen[i].key, key, sizeof seen[i].key))
            return &seen[i];
    bits_seen *b = &seen[(*n)++];
    memcpy(b->key, key, sizeof b->key);
    b->way = -1;
    return b;
}

static void differ(const work *w, const bits_seen *b, const char *what, result *r)
{
    char other[300];

    case_way_print(&w->ways->at[b->way], other, sizeof other);
    r->verdict = FAIL;
    snprintf(r->text, sizeof r->text, "%s has other bits than in the way: %s", what, other);
}

/* Compares with the ways before that must give the same; `seen` has room for two entries per
 * way. */
static void check_bits(const work *w, int way, bits_seen *seen, int *n, result *r)
{
    const case_row *row = w->sh->row;
    int key[7];

    if (r->verdict != PASS || w->ways->at[way].property)
        return;
    if (row->same_bits & CASE_SAME_REQUEST && w->ways->at[way].axis[CASE_AXIS_INVARIANT] == 1
        && !r->requests_agree) {
        r->verdict = FAIL;
        snprintf(r->text, sizeof r->text, "the requests of the row have different bits");
        return;
    }
    for (int lse = 0; lse < 2; lse++) {
        bits_key(row, &w->ways->at[way], lse, key);
        key[2] = lse ? key[2] + 100 : key[2];           /* O and LSE in one table */
        bits_seen *b = find_bits(seen, n, key);
        const uint64_t bits = lse ? r->lse_bits : r->o_bits;
        if (b->way < 0) {
            b->way = way;
            b->o = bits;
        } else if (b->o != bits) {
            differ(w, b, lse ? "LSE" : "O", r);
            return;
        }
    }
}

/* ------------------------------------------------------------------------------------ the child */

static fv_ctx *open_context(const char *level, result *r)
{
    const bool cpu = !opt.device || !strcmp(opt.device, "cpu");
    const fv_open_desc desc = { .device = cpu ? "cpu" : opt.device, .cpu_isa = cpu ? level : NULL,
                                .num_threads = opt.threads };
    fv_ctx *ctx = gpu_ctx;
    fv_error err = { 0 };
    const fv_status status = ctx ? FV_OK : fv_open(&desc, &ctx, &err);

    if (gpu_on())
        gpu_ctx = ctx;
    if (status == FV_OK)
        return ctx;
    *r = (result){ .verdict = FAIL };
    snprintf(r->text, sizeof r->text, "fv_open: %s: %s", fv_status_name(status), err.text);
    return NULL;
}

static void hear(report *rep, const message *m);

static void tell(const work *w, const message *m)
{
    if (w->fd < 0)
        hear(w->report, m);
    else if (write(w->fd, m, sizeof *m) != (ssize_t)sizeof *m)
        _exit(3);
}

static void check_time(const case_row *row, result *r)
{
    if (opt.no_limit || r->verdict != PASS || r->us <= 1e6 * limit_seconds(row))
        return;
    r->verdict = FAIL;
    snprintf(r->text, sizeof r->text, "took %.1f s; more than %g s is a hang", r->us / 1e6,
             limit_seconds(row));
}

/* All ways from `first` on. */
static void run_ways(const work *w, int first)
{
    message m = { .kind = OPENED };
    fv_ctx *ctx = open_context(w->level, &m.r);
    bits_seen *seen = calloc(2 * (size_t)w->ways->n + 2, sizeof *seen);
    int num_seen = 0, timed = 0;

    tell(w, &m);
    for (int i = first; i < w->ways->n && !device_broken; i++) {
        m.way = i;
        m.kind = BEGINS;
        tell(w, &m);
        if (ctx && seen) {
            if (w->st)
                run_way(ctx, w->sh, w->st, &w->ways->at[i], opt.timed && !timed ? 0.1 : 0, &m.r);
            else
                run_merge(ctx, w->sh, &w->ways->at[i], &m.r);
            check_time(w->sh->row, &m.r);
            if (w->st)
                check_bits(w, i, seen, &num_seen, &m.r);
            timed |= m.r.verdict == PASS;
            device_broken |= m.r.broken;
        }
        m.kind = ENDS;
        tell(w, &m);
    }
    free(seen);
    if (ctx && ctx != gpu_ctx)
        fv_close(&ctx);
    m.kind = COMPLETE;
    tell(w, &m);
}

/* ----------------------------------------------------------------------------------- the parent */

static void csv_line(const report *rep, int way, const result *r)
{
    char words[300];

    if (!opt.csv)
        return;
    case_way_print(&rep->ways->at[way], words, sizeof words);
    fprintf(opt.csv, "%s,%s,%s,%s,%s,%s,%.4g,%.9g,%.3f,%.4g,%.4g,%s\n", rep->row->id, rep->row->cls,
            rep->level, rep->dtype, words, verdict_names[r->verdict], r->worst, r->mo, r->us,
            r->us > 0 ? r->bytes / r->us / 1e3 : 0, r->us > 0 ? r->flops / r->us / 1e6 : 0,
            r->kernel);
}

/* f32 and int4 on a GPU and the mixed view may be refused; nothing else. */
static bool may_refuse(const case_row *row, const case_way *way)
{
    const bool gpu = opt.device && strncmp(opt.device, "cpu", 3);

    return way->axis[CASE_AXIS_VIEW] == CASE_VIEW_MIXED
        || (gpu && (way->dtype == CASE_DTYPE_F32 || case_int4_group(row) || row->x.tiled));
}

static void print_way(const report *rep, int way, const result *r)
{
    char words[300];

    case_way_print(&rep->ways->at[way], words, sizeof words);
    printf("  %-7s %s [%s] %s\n", verdict_names[r->verdict], rep->row->id, rep->level, words);
    if (r->text[0])
        printf("          %s\n", r->text);
    if (opt.verbose && r->verdict == PASS)
        printf("          worst %.3f of the tolerance, mO %.9g, %.1f us\n", r->worst, r->mo, r->us);
}

static void count_verdict(totals *t, const case_row *row, const case_way *way, verdict v)
{
    switch (v) {
    case PASS: t->pass++; break;
    case REFUSED: *(may_refuse(row, way) ? &t->allowed : &t->refused) += 1; break;
    case NOT_RUN: t->not_run++; break;
    default: t->fail++;
    }
}

static void print_timing(const report *rep, const result *r)
{
    printf("  time    %s [%s] %s: %.1f us, %.2f GB/s, %.3f TFLOP/s, %s\n", rep->row->id, rep->level,
           rep->dtype, r->us, r->bytes / r->us / 1e3, r->flops / r->us / 1e6, r->kernel);
}

static void hear(report *rep, const message *m)
{
    const result *r = &m->r;

    rep->opened |= m->kind == OPENED;
    rep->complete |= m->kind == COMPLETE;
    if (live)
        live->beat = now();
    if (m->kind != ENDS)
        return;
    rep->next = m->way + 1;
    count_verdict(&rep->t, rep->row, &rep->ways->at[m->way], r->verdict);
    rep->worst = r->worst > rep->worst ? r->worst : rep->worst;
    if (opt.timed && r->verdict == PASS && rep->t.pass == 1)
        print_timing(rep, r);
    if (opt.verbose || (r->verdict != PASS && rep->shown++ < SHOWN_FAILURES))
        print_way(rep, m->way, r);
    csv_line(rep, m->way, r);
}

/* Reads messages until the child is done, dead, or silent for too long. True: too long. */
static bool listen_to(int fd, report *rep)
{
    const double patience =
        opt.no_limit ? 1e6
                     : 1.5 * limit_seconds(rep->row) + 30; /* setting up is not the engine's time */
    message m;

    for (;;) {
        struct pollfd p = { .fd = fd, .events = POLLIN };
        const int n = poll(&p, 1, (int)(1000 * patience));
        if (n == 0)
            return true;
        if (n < 0 && errno == EINTR)
            continue;
        if (read(fd, &m, sizeof m) != (ssize_t)sizeof m)
            return false;
        hear(rep, &m);
    }
}

static void blame(report *rep, bool hung, int status)
{
    message m = { .kind = ENDS, .way = rep->next, .r = { .verdict = FAIL } };

    if (hung)
        snprintf(m.r.text, sizeof m.r.text, "hangs: nothing for over %g s",
                 limit_seconds(rep->row));
    else if (WIFSIGNALED(status))
        snprintf(m.r.text, sizeof m.r.text, "the process was killed by signal %d (%s)",
                 WTERMSIG(status), strsignal(WTERMSIG(status)));
    else
        snprintf(m.r.text, sizeof m.r.text, "the process ended with status %d",
                 WEXITSTATUS(status));
    hear(rep, &m);
}

/* Runs the ways in children until all have ended. */
static void run_children(work *w, report *rep)
{
    while (!rep->complete && rep->next < rep->ways->n) {
        int fd[2], status = 0;
        fflush(NULL);
        if (pipe(fd)) {
            blame(rep, false, 0);
            continue;
        }
        const pid_t child = fork();
        if (child == 0) {
            close(fd[0]);
            w->fd = fd[1];
            run_ways(w, rep->next);
            _exit(0);
        }
        close(fd[1]);
        const bool hung = child > 0 && listen_to(fd[0], rep);
        if (hung)
            kill(child, SIGKILL);
        close(fd[0]);
        if (child > 0)
            waitpid(child, &status, 0);
        if (!rep->complete && rep->next < rep->ways->n)
            blame(rep, hung, status);
    }
}

/* ----------------------------------------------------------------- what all ways of a row share */

typedef struct bit_job {
    const shared *sh;
    const case_rules *rules;
    ref_request r;
    uint8_t *out;                       /* the request's first byte */
    _Atomic int64_t next;               /* next 8 rows */
} bit_job;

/* Eight rows are whole bytes, whatever the number of keys. */
static void *make_bits(void *arg)
{
    bit_job *b = arg;

    for (int64_t first; (first = 8 * atomic_fetch_add(&b->next, 1)) < b->r.rows; )
        for (int64_t i = first; i < first + 8 && i < b->r.rows; i++)
            for (int64_t j = 0; j < b->r.keys; j++) {
                const int64_t at = i * b->r.keys + j;
                if (ref_visible(&b->rules->problem, &b->r, i, j, 0))
                    b->out[at / 8] |= (uint8_t)(1 << at % 8);
            }
    return NULL;
}

enum { MAX_HELPERS = 32 };

/* Threads of the reference: all CPUs, and not those that the engine is told to use. */
static int reference_threads(void)
{
    const long n = sysconf(_SC_NPROCESSORS_ONLN);

    return n < 1 ? 1 : n > MAX_HELPERS ? MAX_HELPERS : (int)n;
}

/* The dense mask of all requests, each from a byte border. */
static bool dense_bits(const case_row *row, uint8_t **bits, int64_t **bits_at)
{
    case_rules rules;
    int64_t *at = calloc((size_t)row->num_requests + 1, sizeof *at);
    bool ok = at && case_rules_make(row, &rules);

    for (int r = 0; ok && r < row->num_requests; r++)
        at[r + 1] = (at[r] + (int64_t)row->q.at[r] * row->kv.at[r] + 7) / 8 * 8;
    *bits = ok ? calloc((size_t)at[row->num_requests] / 8 + 1, 1) : NULL;
    *bits_at = at;
    ok = ok && *bits;
    for (int r = 0; ok && r < row->num_requests; r++) {
        bit_job job = { .rules = &rules, .out = *bits + at[r] / 8 };
        case_request request;
        pthread_t helper[MAX_HELPERS];
        int helpers = 0;
        ok = case_request_make(row, &rules, r, 0, row->kv.at[r], &request);
        if (!ok)
            break;
        job.r = request.r;
        job.r.absent = NULL;            /* a mask knows nothing of pages */
        while (job.r.rows > 1000 && helpers < reference_threads() - 1
               && !pthread_create(&helper[helpers], NULL, make_bits, &job))
            helpers++;
        make_bits(&job);
        while (helpers > 0)
            pthread_join(helper[--helpers], NULL);
        case_request_free(&request);
    }
    if (at)
        case_rules_free(&rules);
    return ok;
}

static bool needs_bits(const case_row *row)
{
    return case_has_mask(row);
}

static bool is_gpu(void)
{
    return opt.device && !strncmp(opt.device, "cuda:", 5);
}

typedef struct prepared {
    shared sh;
    case_answer answer;
    case_answer rounded[CASE_DTYPES];   /* where turned rows are kept in the type of q; else empty */
    uint8_t *seen, *bits;
    int64_t *bits_at;
} prepared;

static bool prepare(const case_row *row, prepared *p)
{
    *p = (prepared){ 0 };
    if (!case_solve(row, NULL, reference_threads(), &p->answer))
        return false;
    if (!row->merge && !(p->seen = case_seen(row)))
        return false;
    if (!row->merge && needs_bits(row) && !dense_bits(row, &p->bits, &p->bits_at))
        return false;
    p->sh = (shared){
        .row = row, .answer = &p->answer, .seen = p->seen, .bits = p->bits, .bits_at = p->bits_at
    };
    return true;
}

static void unprepare(prepared *p)
{
    case_answer_free(&p->answer);
    for (int dtype = 0; dtype < CASE_DTYPES; dtype++)
        case_answer_free(&p->rounded[dtype]);
    free(p->seen);
    free(p->bits);
    free(p->bits_at);
}

/* Matrix units of GPUs take 16-bit operands: what hooks make of queries and keys is rounded to them
 * (docs/numerics.md), so the definition is asked for the scores of what was rounded. */

static double to_type(int type, double x)
{
    uint32_t code = 0;

    num_store(type, &code, 0, x);
    return num_load(type, &code, 0);
}

static double to_f16(double x) { return to_type(NUM_F16, x); }
static double to_bf16(double x) { return to_type(NUM_BF16, x); }

/* What lies between two 16-bit numbers, as far as f32 can tell, may become either. */
enum { AS_IT_IS, OUTWARD, INWARD };
static const double tie = 0x1p-21;
static double to_f16_outward(double x) { return to_f16(x * (1 + tie)); }
static double to_f16_inward(double x) { return to_f16(x * (1 - tie)); }
static double to_bf16_outward(double x) { return to_bf16(x * (1 + tie)); }
static double to_bf16_inward(double x) { return to_bf16(x * (1 - tie)); }
static double (*const kept[2][3])(double) = {
    { to_f16, to_f16_outward, to_f16_inward },
    { to_bf16, to_bf16_outward, to_bf16_inward },
};

static bool solve_rounded(const case_row *row, int dtype, case_answer *a)
{
    double (*const *how)(double) = kept[dtype != CASE_DTYPE_F16];

    if (!case_solve(row, how[AS_IT_IS], reference_threads(), a))
        return false;
    a->ends = calloc(2, sizeof *a->ends);
    return a->ends && case_solve(row, how[OUTWARD], reference_threads(), &a->ends[0])
           && case_solve(row, how[INWARD], reference_threads(), &a->ends[1]);
}

/* The answer that this device owes to a row; NULL: no memory. */
static const case_answer *answer_of(prepared *p, int dtype)
{
    case_answer *a = &p->rounded[dtype];

    if (!is_gpu() || !p->sh.row->x.rope_dim || dtype == CASE_DTYPE_F32)
        return &p->answer;
    if (!a->rows && !solve_rounded(p->sh.row, dtype, a)) {
        case_answer_free(a);
        return NULL;
    }
    return a;
}

/* ------------------------------------------------------------------------------------- the rows */

static double row_flops(const case_row *row)
{
    double pairs = 0;

    for (int r = 0; r < row->num_requests; r++)
        pairs += (double)row->q.at[r] * row->kv.at[r];
    return row->merge ? 0 : 2 * pairs * row->hq * (row->dk + row->dv);
}

static bool selected(const case_row *row)
{
    if (strncmp(row->id, opt.id, strlen(opt.id)) || (opt.cls && strcmp(row->cls, opt.cls)))
        return false;
    return !opt.fast || (!row->heavy && row_flops(row) < 3e8 && row->repeat < 50);
}

/* Ways of a merge row: both bases and LSE layouts. */
static bool merge_ways(const case_row *row, int dtype, case_ways *out)
{
    *out = (case_ways){ .at = calloc(4, sizeof *out->at) };
    for (int i = 0; out->at && i < 4; i++) {
        case_way *way = &out->at[out->n];
        for (int a = 0; a < CASE_AXES; a++)
            way->axis[a] = CASE_VOID;
        way->dtype = dtype;
        way->axis[CASE_AXIS_BASE] = i % 2;
        way->axis[CASE_AXIS_LSE] = i / 2;
        way->axis[CASE_AXIS_ROOM] = way->axis[CASE_AXIS_INVARIANT] = 0;
        way->axis[CASE_AXIS_SPLITS] = 1;
        out->n += row->lse_layout >> (i / 2) & 1;
    }
    return out->at != NULL;
}

static void add_totals(totals *to, const totals *t)
{
    to->pass += t->pass;
    to->fail += t->fail;
    to->refused += t->refused;
    to->allowed += t->allowed;
    to->not_run += t->not_run;
}

/* One type on one level. */
static void run_level(const shared *sh, const stored *st, int dtype, const case_ways *ways,
                      const char *level, totals *row_totals, double *worst)
{
    report rep = {
        .row = sh->row, .ways = ways, .level = level, .dtype = case_dtype_names[dtype]
    };
    work w = { .sh = sh, .st = st, .ways = ways, .level = level, .fd = -1, .report = &rep };

    if (opt.no_fork)
        run_ways(&w, 0);
    else
        run_children(&w, &rep);
    if (rep.shown > SHOWN_FAILURES && !opt.verbose)
        printf("          ... and %.0f more ways of %s\n", rep.shown - SHOWN_FAILURES, rep.dtype);
    add_totals(row_totals, &rep.t);
    *worst = rep.worst > *worst ? rep.worst : *worst;
}

static void not_run(const case_row *row, int dtype, const char *why, totals *t)
{
    printf("  not run %s %s: %s\n", row->id, case_dtype_names[dtype], why);
    t->not_run++;
}

/* Views that the row names but that cannot be: the page lets offsets go that the element size
 * does not divide. */
static void list_void(const case_row *row, int dtype, totals *t)
{
    int axis = -1, value = -1;
    char why[200];

    while (!row->merge && case_next_void(row, dtype, &axis, &value, why, sizeof why)) {
        if (value < CASE_VIEW_OFF2 || value > CASE_VIEW_OFF8)
            not_run(row, dtype, why, t);
        else if (opt.verbose)
            printf("  left out %s: %s\n", row->id, why);
    }
}

/* How many ways instead of all turns; 0: all. */
static int few_ways(const case_row *row)
{
    return opt.properties ? RANDOM_WAYS : !row->heavy ? 0 : row_flops(row) > 5e10 ? 1 : HEAVY_WAYS;
}

/* Random rows also check what holds between runs. A tree or a block map is about whole requests. */
static bool has_properties(const case_row *row)
{
    return opt.properties && !row->x.tree.n && !row->block_map.n;
}

static void run_dtype(prepared *p, int dtype, totals *t, double *worst)
{
    const case_row *row = p->sh.row;
    stored st = { 0 };
    char why[200];

    list_void(row, dtype, &t[0]);
    if (!row->merge && !stored_make(row, dtype, &st, why, sizeof why)) {
        not_run(row, dtype, why, &t[0]);
        return;
    }
    for (int i = 0; i < num_levels; i++) {
        const unsigned turn =
            opt.seed * 1000003u + (unsigned)row->line * 31 + (unsigned)(i * CASE_DTYPES + dtype);
        shared sh = p->sh;
        case_ways ways = { 0 };
        sh.answer = answer_of(p, dtype);
        const bool ok = !sh.answer ? false
                        : row->merge
                            ? merge_ways(row, dtype, &ways)
                            : case_ways_make(row, dtype, opt.full, turn, few_ways(row), &ways)
                                  && (!has_properties(row)
                                      || case_ways_add_properties(row, dtype, turn, &ways));
        if (!ok || ways.n == 0)
            not_run(row, dtype, ok ? "no way fits this type" : "no memory", &t[i]);
        else
            run_level(&sh, row->merge ? NULL : &st, dtype, &ways, levels[i], &t[i], &worst[i]);
        case_ways_free(&ways);
    }
    stored_free(&st);
}

static void print_row(const case_row *row, int level, const totals *t, double worst, double seconds)
{
    const bool ok = !t->fail && !t->refused && !t->not_run;

    printf("%-7s %-24s %-12s %4lld ways pass",
           ok           ? "ok"
           : t->fail    ? "FAIL"
           : t->refused ? "REFUSED"
                        : "NOT RUN",
           row->id, levels[level], (long long)t->pass);
    if (t->fail)
        printf(", %lld fail", (long long)t->fail);
    if (t->refused + t->allowed)
        printf(", %lld refused", (long long)(t->refused + t->allowed));
    if (t->not_run)
        printf(", %lld not run", (long long)t->not_run);
    printf("; worst error %.3f of the tolerance; %.2f s\n", worst, seconds);
    fflush(stdout);
}

static void run_row(const case_row *row)
{
    totals t[MAX_LEVELS] = { { 0 } };
    double worst[MAX_LEVELS] = { 0 };
    const double start = now();
    prepared p;

    if (!prepare(row, &p)) {
        printf("NOT RUN %-24s no memory for the reference\n", row->id);
        all.not_run++;
    } else {
        for (int dtype = 0; dtype < CASE_DTYPES; dtype++)
            if (row->dtype >> dtype & 1)
                run_dtype(&p, dtype, t, worst);
        for (int i = 0; i < num_levels; i++) {
            print_row(row, i, &t[i], worst[i], now() - start);
            add_totals(&all, &t[i]);
        }
    }
    unprepare(&p);
}

/* ---------------------------------------------------------------------------------- the machine */

/* fv_info of a child process, so that this one never meets a driver. */
static void ask_info(char *text, size_t size)
{
    int fd[2];
    size_t n = 0;

    *text = 0;
    fflush(NULL);
    if (pipe(fd))
        return;
    const pid_t child = fork();
    if (child == 0) {
        if (fv_info(NULL, "json", text, size, NULL, NULL) != FV_OK)
            *text = 0;
        _exit(write(fd[1], text, strlen(text)) < 0);
    }
    close(fd[1]);
    for (ssize_t got; n + 1 < size && (got = read(fd[0], text + n, size - 1 - n)) > 0; )
        n += (size_t)got;
    text[n] = 0;
    close(fd[0]);
    if (child > 0)
        waitpid(child, NULL, 0);
}

/* The names in "cpu levels" of the machine's, in their order: {"name":"X","on this
 * machine":"yes"}. */
static void find_levels(void)
{
    static char text[1 << 18];
    char *at, *end;

    ask_info(text, sizeof text);
    at = strstr(text, "\"cpu levels\":[");
    end = at ? strchr(at, ']') : NULL;
    if (!at || !end)
        return;
    *end = 0;
    while (num_levels < MAX_LEVELS && (at = strstr(at, "{\"name\":\""))) {
        char *name = at + 9, *stop = strchr(name, '"'), *close_ = strchr(name, '}');
        if (!stop || !close_)
            return;
        const bool here = strstr(stop, ":\"yes\"") && strstr(stop, ":\"yes\"") < close_;
        if (here)
            snprintf(levels[num_levels++], sizeof levels[0], "%.*s", (int)(stop - name), name);
        at = close_;
    }
}

static bool choose_levels(void)
{
    if (opt.device && strncmp(opt.device, "cpu", 3)) {
        snprintf(levels[num_levels++], sizeof levels[0], "%s", opt.device);
        return true;
    }
    if (opt.isa)
        snprintf(levels[num_levels++], sizeof levels[0], "%s", opt.isa);
    else
        find_levels();
    if (!num_levels)
        fprintf(stderr, "checkattn: fv_info names no CPU level of this machine\n");
    return num_levels > 0;
}

/* ----------------------------------------------------------------------------------------- main */

static int usage(void)
{
    fprintf(stderr,
            "usage: checkattn [options]\n"
            "  --cases FILE     case rows (default %s)\n"
            "  --id PREFIX      rows whose id begins so\n"
            "  --class NAME     rows of one class\n"
            "  --isa NAME       one CPU level (default: each that the machine has)\n"
            "  --device NAME    cpu (default) or cuda:N\n"
            "  --full           the product of all axes instead of turns\n"
            "  --fast           the small list: no heavy or large rows\n"
            "  --extended       FILE may hold keys x_NAME (see cases.h: case_extra)\n"
            "  --properties     random rows and invariances instead of a file (--seed, --count)\n"
            "  --count N        random rows of --properties (default 200)\n"
            "  --seed N         where turns and random rows start (default 1)\n"
            "  --threads N      CPU workers of the engine\n"
            "  --jobs N         rows side by side (a GPU's kernels compile in parallel)\n"
            "  --time           times what passed: us, GB/s, TFLOP/s\n"
            "  --csv FILE       one line per way\n"
            "  --list           ids and numbers of ways, nothing is run\n"
            "  --no-fork        all in this process (debuggers, sanitizers)\n"
            "  --no-limit       slow is no failure (sanitizers)\n"
            "  --verbose        one line per way\n",
            FV_TEST_CASES);
    return 2;
}

enum {
    OPT_FULL = 256,
    OPT_FAST,
    OPT_PROPERTIES,
    OPT_COUNT,
    OPT_SEED,
    OPT_THREADS,
    OPT_TIME,
    OPT_CSV,
    OPT_LIST,
    OPT_NO_FORK,
    OPT_NO_LIMIT,
    OPT_EXTENDED,
    OPT_JOBS
};

static bool read_options(int argc, char **argv)
{
    static const struct option list[] = {
        { "cases", required_argument, NULL, 'c' },
        { "id", required_argument, NULL, 'i' },
        { "class", required_argument, NULL, 'C' },
        { "isa", required_argument, NULL, 'I' },
        { "device", required_argument, NULL, 'd' },
        { "full", no_argument, NULL, OPT_FULL },
        { "fast", no_argument, NULL, OPT_FAST },
        { "properties", no_argument, NULL, OPT_PROPERTIES },
        { "count", required_argument, NULL, OPT_COUNT },
        { "seed", required_argument, NULL, OPT_SEED },
        { "threads", required_argument, NULL, OPT_THREADS },
        { "time", no_argument, NULL, OPT_TIME },
        { "csv", required_argument, NULL, OPT_CSV },
        { "list", no_argument, NULL, OPT_LIST },
        { "no-fork", no_argument, NULL, OPT_NO_FORK },
        { "no-limit", no_argument, NULL, OPT_NO_LIMIT },
        { "jobs", required_argument, NULL, OPT_JOBS },
        { "extended", no_argument, NULL, OPT_EXTENDED },
        { "verbose", no_argument, NULL, 'v' },
        { 0 },
    };

    for (int c; (c = getopt_long(argc, argv, "v", list, NULL)) != -1; )
        switch (c) {
        case 'c': opt.cases = optarg; break;
        case 'i': opt.id = optarg; break;
        case 'C': opt.cls = optarg; break;
        case 'I': opt.isa = optarg; break;
        case 'd': opt.device = optarg; break;
        case OPT_FULL: opt.full = true; break;
        case OPT_FAST: opt.fast = true; break;
        case OPT_PROPERTIES: opt.properties = true; break;
        case OPT_COUNT: opt.count = atoi(optarg); break;
        case OPT_SEED: opt.seed = (unsigned)strtoul(optarg, NULL, 10); break;
        case OPT_THREADS: opt.threads = atoi(optarg); break;
        case OPT_TIME: opt.timed = true; break;
        case OPT_CSV: opt.csv_path = optarg; break;
        case OPT_JOBS: opt.jobs = atoi(optarg); break;
        case OPT_EXTENDED: opt.extended = true; break;
        case OPT_LIST: opt.list = true; break;
        case OPT_NO_FORK: opt.no_fork = true; break;
        case OPT_NO_LIMIT: opt.no_limit = true; break;
        case 'v': opt.verbose = true; break;
        default: return false;
        }
    return optind == argc && !(opt.full && opt.fast);
}

static void list_row(const case_row *row)
{
    printf("%-24s %-9s %s%.3g GFLOP", row->id, row->cls, row->heavy ? "heavy " : "",
           row_flops(row) / 1e9);
    for (int dtype = 0; dtype < CASE_DTYPES; dtype++) {
        case_ways ways = { 0 };
        if (!(row->dtype >> dtype & 1))
            continue;
        if (row->merge
                ? merge_ways(row, dtype, &ways)
                : case_ways_make(row, dtype, opt.full, (unsigned)row->line, few_ways(row), &ways))
            printf("  %s %d", case_dtype_names[dtype], ways.n);
        case_ways_free(&ways);
    }
    printf("\n");
}

static int summary(void)
{
    const int64_t failed = all.fail + all.refused, skipped = all.allowed + all.not_run;

    if (all.refused)
        printf("%lld of the failures are refusals\n", (long long)all.refused);
    if (skipped)
        printf("skipped: %lld refused as the page permits, %lld not run\n", (long long)all.allowed,
               (long long)all.not_run);
    printf("%lld passed, %lld failed", (long long)all.pass, (long long)failed);
    if (skipped)
        printf(", %lld skipped", (long long)skipped);
    printf("\n");
    return failed || all.not_run || !all.pass;
}

/* ------------------------------------------------------------------------ one row after another */

static case_file *the_file;             /* of rows; NULL: random ones */

static bool run_item(int i)
{
    static char text[1 << 20];
    char why[512];

    if (the_file) {
        if (selected(&the_file->rows[i]))
            run_row(&the_file->rows[i]);
        return true;
    }
    random_row(opt.seed, i, text, sizeof text);
    case_file *file = case_parse("random", text, strlen(text), true, why, sizeof why);
    if (!file) {
        fprintf(stderr, "checkattn: %s\n%s", why, text);
        return false;
    }
    const totals before = all;
    if (selected(file->rows))
        run_row(file->rows);
    if (all.fail + all.refused + all.not_run > before.fail + before.refused + before.not_run)
        printf("# to run it again: checkattn --extended --cases FILE\n%s\n", text);
    case_free(file);
    return true;
}

/* A worker. Exit status 4: the device is in an error state, a fresh process has to go on. */
static void take_rows(board *b, int job, int last)
{
    char why[200];
    int status = 0;

    setvbuf(stdout, NULL, _IOFBF, 1 << 20);             /* a row's lines stay together */
    live = &b->of[job];
    if (is_gpu() && !gpu_open(atoi(opt.device + strlen("cuda:")), why, sizeof why)) {
        fprintf(stderr, "checkattn: %s: %s\n", opt.device, why);
        _exit(2);
    }
    opt.no_fork |= is_gpu();
    all = live->all;
    for (int i; status == 0 && (i = atomic_fetch_add(&b->next, 1)) < last; ) {
        live->row = i;
        live->beat = now();
        if (!run_item(i))
            status = 2;
        else if (device_broken)
            status = 4;
        live->all = all;
        live->row = -1;
        fflush(NULL);
    }
    _exit(status);
}

static pid_t start_worker(board *b, int job, int last)
{
    b->of[job].row = -1;
    b->of[job].beat = now();
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0)
        take_rows(b, job, last);
    return child;
}

/* A worker that does nothing for so long is killed. Its limit is that of the slowest row. */
static bool is_stuck(const progress *p)
{
    return !opt.no_limit && now() - p->beat > 900;
}

/* A worker has ended in the middle of a row. */
static void blame_worker(progress *p, bool hung, int status)
{
    printf("FAIL    row %d (%s): the worker %s\n", p->row,
           the_file ? the_file->rows[p->row].id : "random",
           hung                  ? "hangs"
           : WIFSIGNALED(status) ? strsignal(WTERMSIG(status))
                                 : "ended");
    p->all.fail++;
}

/* Looks after one worker. True: it is done, for good (*ok false: in vain). */
static bool look_after(board *b, int job, int last, pid_t *child, bool *ok)
{
    progress *p = &b->of[job];
    const bool hung = is_stuck(p);
    int status = 0;

    if (hung)
        kill(*child, SIGKILL);
    if (waitpid(*child, &status, hung ? 0 : WNOHANG) == 0)
        return false;
    const int code = !hung && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (code == 0 || code == 2 || (code != 4 && p->row < 0)) {
        *ok = *ok && code == 0;
        return true;
    }
    if (code != 4)
        blame_worker(p, hung, status);
    *child = start_worker(b, job, last);
    return false;
}

/* All rows, by worker processes that take one after another. */
static bool supervise(int last)
{
    board *b = mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    const int jobs = opt.jobs < 1 ? 1 : opt.jobs > MAX_JOBS ? MAX_JOBS : opt.jobs;
    pid_t child[MAX_JOBS];
    bool done[MAX_JOBS] = { false }, ok = true;

    if (b == MAP_FAILED)
        return false;
    for (int j = 0; j < jobs; j++)
        child[j] = start_worker(b, j, last);
    for (int left = jobs; left > 0; usleep(10000))
        for (int j = 0; j < jobs; j++)
            if (!done[j] && look_after(b, j, last, &child[j], &ok)) {
                done[j] = true;
                left--;
            }
    for (int j = 0; j < jobs; j++)
        add_totals(&all, &b->of[j].all);
    return ok;
}

static bool run_all(void)
{
    const int last = the_file ? the_file->num_rows : opt.count;

    if (is_gpu() || opt.jobs > 1)
        return supervise(last);
    for (int i = 0; i < last; i++)
        if (!run_item(i))
            return false;
    return true;
}

static bool open_rows(void)
{
    char why[512];

    if (opt.properties) {
        printf("seed %u\n", opt.seed);
        return true;
    }
    the_file = case_read(opt.cases, opt.extended, why, sizeof why);
    if (!the_file)
        fprintf(stderr, "checkattn: %s\n", why);
    return the_file;
}

static int list_all(void)
{
    for (int i = 0; the_file && i < the_file->num_rows; i++)
        if (selected(&the_file->rows[i]))
            list_row(&the_file->rows[i]);
    case_free(the_file);
    return 0;
}

int main(int argc, char **argv)
{
    if (!read_options(argc, argv))
        return usage();
    if (!open_rows())
        return 2;
    if (opt.list)
        return list_all();
    if (opt.csv_path && !(opt.csv = fopen(opt.csv_path, "w"))) {
        fprintf(stderr, "checkattn: %s: %s\n", opt.csv_path, strerror(errno));
        return 2;
    }
    if (opt.csv)
        fprintf(opt.csv, "row,class,level,dtype,way,verdict,worst,mO,us,GB/s,TFLOP/s,kernel\n");
    if (!choose_levels() || !run_all())
        return 2;
    if (opt.csv)
        fclose(opt.csv);
    case_free(the_file);
    return summary();
}
