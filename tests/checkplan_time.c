/* SPDX-License-Identifier: Apache-2.0 */
/* checkplan_time.c -- `checkplan --time`: how long fv__plan_make takes on shapes of real steps.
 * Prints, judges nothing. Best and median of many makes into warm memory; 32/8 heads, pages of
 * 16. */
#include "checkplan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

#define REPEATS 400

static void time_scene(const char *name, scene *s)
{
    made m = { 0 };
    static int64_t ns[REPEATS];
    scene_limits(s);
    if (make_plan(&m, s, 0) != FV_OK) {
        printf("%-34s %s\n", name, m.err.text);
        return;
    }
    const fv__planner planner = { &s->shape, &s->limits, &m.capacity, m.temp };
    for (int i = 0; i < REPEATS; i++) {
        const int64_t start = now_ns();
        fv__plan_make(&planner, &s->batch, &s->bounds, m.plan, &m.report, NULL);
        ns[i] = now_ns() - start;
    }
    qsort(ns, REPEATS, sizeof ns[0], by_value);
    int64_t total;
    const int64_t longest = longest_worker(m.plan, &s->shape, &total);
    printf("%-34s %4d workers  %8.1f us best  %8.1f us median  %7d pieces  balance %.3f\n", name,
           m.plan->num_workers, (double)ns[0] / 1000, (double)ns[REPEATS / 2] / 1000,
           m.plan->num_pieces, total ? (double)longest * m.plan->num_workers / (double)total : 1);
    made_free(&m);
}

static void fill(scene *s, int64_t n, int32_t rows, int32_t low, int32_t high, bool prefill,
                 int32_t workers, int32_t packed)
{
    rng r = { 7 };
    int32_t *q = malloc((size_t)n * sizeof *q), *k = malloc((size_t)n * sizeof *k);
    for (int64_t i = 0; i < n; i++) {
        k[i] = (int32_t)rng_between(&r, low, high);
        q[i] = prefill ? k[i] : rows;
    }
    scene_clear(s);
    scene_requests(s, n, q, k, 16);
    scene_shape(s, 8, 4, packed, workers, workers > 16 ? &fv__cost_sm80 : &fv__cost_cpu_amx);
    s->bounds = (fv__bounds){ .has_last = true };
    free(q);
    free(k);
}

/* The requests' first `pages` pages are those of request 0. */
static void share_pages(scene *s, int64_t pages)
{
    int32_t *ids = (int32_t *)s->given.pages.ids.host;
    for (int64_t r = 1; r < s->batch.num_requests; r++)
        memcpy(ids + s->batch.tables[r], ids + s->batch.tables[0], (size_t)pages * sizeof *ids);
    s->limits.sharing = FV_SHARING_FIND;
}

void time_plans(void)
{
    scene s = { 0 };
    for (int32_t workers = 2; workers <= 132; workers += 130) {
        fill(&s, 256, 1, 100, 8000, false, workers, 256);
        time_scene("256 decodes", &s);
        fill(&s, 4096, 1, 1, 4000, false, workers, 256);
        time_scene("4096 ragged requests", &s);
        fill(&s, 4096, 1, 1, 4000, true, workers, 256);
        time_scene("4096 ragged prefills", &s);
        fill(&s, 32, 1, 8192, 8192, true, workers, 256);
        time_scene("32 x 8k prefill, tiles of 256", &s);
        fill(&s, 32, 1, 8192, 8192, true, workers, 128);
        time_scene("32 x 8k prefill, tiles of 128", &s);
        fill(&s, 256, 1, 5000, 8000, false, workers, 256);
        share_pages(&s, 256);
        time_scene("256 decodes, 4k found prefix", &s);
        fill(&s, 4096, 1, 1, 4000, false, workers, 256);
        s.limits.sharing = FV_SHARING_FIND;
        time_scene("4096 ragged, nothing to share", &s);
        fill(&s, 256, 1, 100, 8000, false, workers, 256);
        s.limits.invariant = true;
        time_scene("256 decodes, invariant", &s);
    }
    free(s.memory.base);
}
