/* SPDX-License-Identifier: Apache-2.0 */
/* checkplan -- the planner against its promises, without any kernel: random batches of every
 * kind, each plan checked from scratch.
 *
 *     checkplan [--seed N] [--count N] [--golden DIR] [--update-golden] [--only SEED] [--time]
 *
 * A scene is a function of its seed: `--only SEED` repeats one that failed. --time prints how
 * long plans take and checks nothing. */
#include "checkplan.h"

#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GUARD_WORDS 16
#define GUARD 0x5AFEC0DE5AFEC0DEu

/* ---- guarded memory ---- */

static char *guarded(size_t bytes)
{
    char *memory = aligned_alloc(64, (bytes + GUARD_WORDS * 8 + 63) / 64 * 64);
    if (!memory) exit(2);
    return memory;
}

static void set_guard(char *at)
{
    const uint64_t word = GUARD;
    for (int i = 0; i < GUARD_WORDS; i++) memcpy(at + 8 * i, &word, 8);
}

static bool guard_holds(const char *at)
{
    const uint64_t word = GUARD;
    for (int i = 0; i < GUARD_WORDS; i++)
        if (memcmp(at + 8 * i, &word, 8)) return false;
    return true;
}

bool guards_hold(const made *m)
{
    return guard_holds(m->blob + m->capacity.blob_bytes) &&
           guard_holds(m->temp + m->capacity.temp_bytes);
}

fv_status make_plan(made *m, const scene *s, uint8_t poison)
{
    const fv_status status =
        fv__plan_capacity_of(&s->shape, &s->limits, s->bits, &m->capacity, &m->err);
    if (status != FV_OK) return status;
    const size_t blob = (size_t)m->capacity.blob_bytes, temp = (size_t)m->capacity.temp_bytes;
    if (blob > m->blob_size || !m->blob) {
        free(m->blob);
        m->blob = guarded(m->blob_size = blob + blob / 2);
    }
    if (temp > m->temp_size || !m->temp) {
        free(m->temp);
        m->temp = guarded(m->temp_size = temp + temp / 2);
    }
    memset(m->blob, poison, blob < 200000 ? blob : 200000);
    memset(m->temp, poison, temp < 200000 ? temp : 200000);
    set_guard(m->blob + blob);
    set_guard(m->temp + temp);
    m->plan = (fv__plan_head *)m->blob;
    const fv__planner planner = { &s->shape, &s->limits, &m->capacity, m->temp };
    memset(&m->err, 0, sizeof m->err);
    return fv__plan_make(&planner, &s->batch, &s->bounds, m->plan, &m->report, &m->err);
}

void made_free(made *m)
{
    free(m->blob);
    free(m->temp);
    memset(m, 0, sizeof *m);
}

/* ---- totals ---- */

bool expect(totals *t, bool good, const char *format, ...)
{
    if (good) {
        t->passed++;
        return true;
    }
    t->failed++;
    if (t->shown++ >= 20) return false;
    va_list list;
    va_start(list, format);
    printf("FAILED seed %llu (%s): ", (unsigned long long)t->seed, t->scene ? t->scene : "");
    vprintf(format, list);
    printf("\n");
    va_end(list);
    return false;
}

/* ---- one random scene ---- */

static bool same_bytes(const made *a, const made *b)
{
    return a->plan->bytes == b->plan->bytes && !memcmp(a->blob, b->blob, (size_t)a->plan->bytes);
}

/* Every maximum a bit larger: no size may shrink. */
static void check_monotone(totals *t, const scene *s, const made *m, rng *r)
{
    fv__plan_capacity more;
    fv_plan_desc l = s->limits;
    switch (rng_below(r, 6)) {
    case 0: l.max_requests += rng_between(r, 1, 100); break;
    case 1: l.max_rows += rng_between(r, 1, 100); break;
    case 2: l.max_kv_tokens += rng_between(r, 1, 100000); break;
    case 3: l.max_pages += rng_between(r, 1, 1000); break;
    case 4: l.max_segments += rng_between(r, 1, 100); break;
    default: l.max_levels = fv__min32(FV__MAX_LEVELS, l.max_levels ? l.max_levels + 1 : 3); break;
    }
    if (fv__plan_capacity_of(&s->shape, &l, s->bits, &more, NULL) != FV_OK) return;
    const fv__plan_capacity *a = &m->capacity;
    expect(t,
           more.blob_bytes >= a->blob_bytes && more.temp_bytes >= a->temp_bytes &&
               more.max_slots >= a->max_slots && more.max_pieces >= a->max_pieces &&
               more.max_records >= a->max_records && more.max_segments >= a->max_segments &&
               more.max_listed_rows >= a->max_listed_rows,
           "a larger maximum gives a smaller size");
}

/* Found sharing on one worker, where cuts cost nothing: never dearer than the flat plan. */
static void check_never_loses(totals *t, scene *s, made *a, made *b)
{
    const fv_plan_desc keep = s->limits;
    s->limits.workers = 1;
    const fv_status shared = make_plan(a, s, 0x11);
    s->limits.sharing = FV_SHARING_OFF;
    const fv_status flat = make_plan(b, s, 0x11);
    if (expect(t, shared == FV_OK && flat == FV_OK, "one worker: %s %s", a->err.text, b->err.text))
        expect(t, a->report.total_cost <= b->report.total_cost, "sharing costs %lld, flat %lld",
               (long long)a->report.total_cost, (long long)b->report.total_cost);
    s->limits = keep;
}

static int64_t refused_chunks, shared_plans, cut_plans;

static void check_scene(totals *t, scene *s, rng *r, made *a, made *b)
{
    char why[400];
    const fv_status status = make_plan(a, s, 0xA5);
    if (status == FV_E_CAPACITY && s->limits.invariant && s->given.segments &&
        !strcmp(a->err.field, "limits.chunk")) {
        refused_chunks++;               /* more chunks than there are partials: said, not done */
        expect(t, guards_hold(a), "guard words are gone");
        return;
    }
    if (!expect(t, status == FV_OK, "%s: %s", a->err.field, a->err.text)) return;
    if (!expect(t, guards_hold(a), "guard words are gone")) return;
    expect(t, check_plan(s, a, why, sizeof why), "%s", why);
    shared_plans += a->report.num_shared_segments > 0 && !s->given.segments;
    cut_plans += a->plan->num_records > 0;

    if (rng_chance(r, 30)) {
        if (s->given.segments) scene_shuffle_segments(s, r);
        if (expect(t, make_plan(b, s, 0x3C) == FV_OK, "the second time: %s", b->err.text))
            expect(t, same_bytes(a, b), "the same input gives other bytes");
    }
    if (rng_chance(r, 10)) check_monotone(t, s, a, r);
    if (s->limits.sharing == FV_SHARING_FIND && s->limits.splits == 0 && rng_chance(r, 50))
        check_never_loses(t, s, a, b);
}

static void check_random(totals *t, uint64_t seed, int64_t count)
{
    scene s = { 0 };
    made a = { 0 }, b = { 0 };
    for (int64_t i = 0; i < count; i++) {
        rng r = { seed + (uint64_t)i };
        t->seed = r.state;
        scene_random(&s, &r);
        t->scene = s.name;
        check_scene(t, &s, &r, &a, &b);
    }
    printf("random scenes: %lld, of which %lld with cuts, %lld with found prefixes, %lld refused "
           "for chunks\n",
           (long long)count, (long long)cut_plans, (long long)shared_plans,
           (long long)refused_chunks);
    made_free(&a);
    made_free(&b);
    free(s.memory.base);
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        { "seed", required_argument, NULL, 's' },
        { "count", required_argument, NULL, 'c' },
        { "golden", required_argument, NULL, 'g' },
        { "update-golden", no_argument, NULL, 'u' },
        { "only", required_argument, NULL, 'o' },
        { "time", no_argument, NULL, 't' },
        { 0 },
    };
    uint64_t seed = 1;
    int64_t count = 100000;
    bool update = false, only = false;
    const char *golden = NULL;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) >= 0; ) {
        if (c == 's' || c == 'o') seed = strtoull(optarg, NULL, 0);
        else if (c == 'c') count = strtoll(optarg, NULL, 0);
        else if (c == 'g') golden = optarg;
        else if (c == 'u') update = true;
        else if (c == 't') {
            time_plans();
            return 0;
        } else {
            fprintf(stderr, "usage: checkplan [--seed N] [--count N] [--golden DIR] "
                            "[--update-golden] [--only SEED] [--time]\n");
            return 2;
        }
        only = only || c == 'o';
    }
    totals t = { 0 };
    rng r = { seed };
    check_random(&t, seed, only ? 1 : count);
    if (!only) {
        t.seed = seed;
        t.scene = "scenarios";
        check_scenarios(&t, &r);
        t.scene = "refusals";
        check_refusals(&t);
        t.scene = "golden";
        check_golden(&t, golden, update);
    }
    printf("%lld passed, %lld failed\n", (long long)t.passed, (long long)t.failed);
    return t.failed ? 1 : 0;
}
