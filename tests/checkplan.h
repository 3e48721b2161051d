/* SPDX-License-Identifier: Apache-2.0 */
/* checkplan.h -- what the parts of checkplan share.
 *
 * scene    a kernel shape, maxima, a batch with all its arrays, bounds: everything that
 *          fv__plan_make is told, owned by an arena that is cleared between scenes
 * made     a plan in guarded memory: every byte in front of a make is poison, words behind blob
 *          and temp must survive */
#ifndef CHECKPLAN_H
#define CHECKPLAN_H

#include "plan.h"
#include "tensor.h"
#include "variant.h"

/* ---- random numbers and memory ---- */

typedef struct rng { uint64_t state; } rng;

uint64_t rng_next(rng *r);
int64_t rng_below(rng *r, int64_t n);                   /* [0, n), 0 for n <= 1 */
int64_t rng_between(rng *r, int64_t low, int64_t high); /* both ends included */
bool rng_chance(rng *r, int percent);

typedef struct arena { char *base; size_t used, size; } arena;

void *arena_take(arena *a, int64_t count, size_t size); /* zeroed; exits when the arena is full */

/* ---- scenes ---- */

typedef struct scene {
    arena memory;
    fv__kernel_shape shape;
    fv__cost_model cost;                /* where the shape has a random one */
    fv_plan_desc limits;
    fv__batch batch;
    fv_batch given;
    fv__bounds bounds;
    fv_ranges lists[2];
    int32_t *row_positions;
    bool bits;
    char name[80];                      /* what kind */
} scene;

void scene_clear(scene *s);
void scene_random(scene *s, rng *r);
/* By hand: requests with `rows` rows and `keys` keys each, pages of page_size (0: ragged) placed
 * one after another. Shape, limits and bounds are to be filled in by the caller; scene_limits
 * fills limits in that just hold the batch. */
void scene_requests(scene *s, int64_t n, const int32_t *rows, const int32_t *keys,
                    int32_t page_size);
void scene_limits(scene *s);
void scene_shape(scene *s, int32_t num_kv_heads, int32_t group, int32_t max_packed, int32_t workers,
                 const fv__cost_model *cost);
void scene_shuffle_segments(scene *s, rng *r);

/* ---- making ---- */

typedef struct made {
    fv__plan_capacity capacity;
    char *blob, *temp;                  /* of these sizes, guard words behind */
    size_t blob_size, temp_size;
    fv__plan_head *plan;
    fv__plan_report report;
    fv_error err;
} made;

fv_status make_plan(made *m, const scene *s, uint8_t poison);
bool guards_hold(const made *m);
void made_free(made *m);

/* ---- checks ---- */

/* Counts and reports: a failed check prints the scene's seed and name. */
typedef struct totals {
    int64_t passed, failed;
    uint64_t seed;                      /* of the scene at hand */
    const char *scene;
    int shown;
} totals;

bool expect(totals *t, bool good, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Checks one plan against its scene, from scratch. Returns false after the first thing that is
 * wrong (text in why). */
bool check_plan(const scene *s, const made *m, char *why, size_t size);

/* The chunks (invariant mode) in which row `row` of head unit 0 is summed up: chunk number and
 * the keys of it that the row may see, in merging order. Returns how many; at most `max` are
 * written. */
typedef struct chunk_part { int64_t chunk, first, num; } chunk_part;
int row_chunks(const scene *s, const fv__plan_head *plan, int32_t row, chunk_part *out, int max);

int64_t longest_worker(const fv__plan_head *plan, const fv__kernel_shape *shape, int64_t *total);

void check_refusals(totals *t);
void check_scenarios(totals *t, rng *r);
void check_golden(totals *t, const char *folder, bool update);
void time_plans(void);

#endif
