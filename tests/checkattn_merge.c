/* SPDX-License-Identifier: Apache-2.0 */
/* checkattn_merge.c -- merge rows: partial states of the page's generator through the public merge.
 *
 * Beyond the values: a state that alone is not empty comes out bit for bit, gaps of outputs stay
 * untouched, and a merge over state 0 gives the bits of the ordinary one. States lie between
 * guards, and are read-only unless they are also the output.
 */
#include "checkattn.h"
#include "checkattn_gpu.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct merge {
    const shared *sh;
    const case_row *row;
    const case_way *way;
    int type;
    area *o, *lse;                      /* [states + 1]: the last is the output */
    fv_tensor *o_tensor, *lse_tensor;
    int64_t lse_row, lse_head;
    result *r;
} merge;

__attribute__((format(printf, 2, 3)))
static bool judge(merge *m, const char *format, ...)
{
    va_list args;

    m->r->verdict = FAIL;
    va_start(args, format);
    vsnprintf(m->r->text, sizeof m->r->text, format, args);
    va_end(args);
    return false;
}

static bool base2(const merge *m)
{
    return m->way->axis[CASE_AXIS_BASE] == CASE_BASE_2;
}

static int64_t o_at(const merge *m, int64_t token, int head, int d)
{
    return (token * m->row->hq + head) * m->row->dv + d;
}

static int64_t lse_at(const merge *m, int64_t token, int head)
{
    return token * m->lse_row + head * m->lse_head;
}

static bool make_area(merge *m, int i)
{
    const case_row *row = m->row;
    const int64_t elements = (int64_t)row->tokens * row->hq * row->dv;
    const bool by_head = m->way->axis[CASE_AXIS_LSE] == CASE_LSE_HT;
    const int64_t line = by_head ? row->tokens : row->hq, lines = by_head ? row->hq : row->tokens;

    if (!area_make(&m->o[i], num_bytes(m->type, elements), 0, m->type, num_encode(m->type, 12345),
                   false)
        || !area_make(&m->lse[i], 4 * lines * (line + row->lse_pad), 0, NUM_F32,
                      num_encode(NUM_F32, 12345), false))
        return false;
    m->o_tensor[i] = (fv_tensor){ .data = area_address(&m->o[i], 0),
                                  .dtype = num_types[m->type].name,
                                  .ndim = 3,
                                  .shape = { row->tokens, row->hq, row->dv },
                                  .stride = { (int64_t)row->hq * row->dv, row->dv, 1 } };
    m->lse_tensor[i] = (fv_tensor){ .data = area_address(&m->lse[i], 0),
                                    .dtype = "f32",
                                    .ndim = 2,
                                    .shape = { row->tokens, row->hq },
                                    .stride = { m->lse_row, m->lse_head } };
    return true;
}

static void put_state(merge *m, int s)
{
    const case_row *row = m->row;

    for (int64_t t = 0; t < row->tokens; t++)
        for (int h = 0; h < row->hq; h++) {
            const int64_t item = t * row->hq + h;
            const double lse = case_state_lse(row, s, item);
            num_store(NUM_F32, m->lse[s].base, lse_at(m, t, h), base2(m) ? lse / log(2) : lse);
            for (int d = 0; d < row->dv; d++)
                num_store(m->type, m->o[s].base, o_at(m, t, h, d), case_state_o(row, s, item, d));
        }
}

static void poison_output(merge *m)
{
    const case_row *row = m->row;
    const int out = row->states;

    area_fill(&m->o[out], num_poison(m->type, CASE_POISON_NAN));
    area_fill(&m->lse[out], num_encode(NUM_F32, 12345));
    for (int64_t t = 0; t < row->tokens; t++)
        for (int h = 0; h < row->hq; h++)
            num_put(NUM_F32, m->lse[out].base, lse_at(m, t, h),
                    num_poison(NUM_F32, CASE_POISON_NAN));
}

static bool make(merge *m)
{
    const case_row *row = m->row;
    const size_t n = (size_t)row->states + 1;

    m->o = calloc(n, sizeof *m->o);
    m->lse = calloc(n, sizeof *m->lse);
    m->o_tensor = calloc(n, sizeof *m->o_tensor);
    m->lse_tensor = calloc(n, sizeof *m->lse_tensor);
    if (!m->o || !m->lse || !m->o_tensor || !m->lse_tensor)
        return false;
    const bool ht = m->way->axis[CASE_AXIS_LSE] == CASE_LSE_HT;
    m->lse_row = ht ? 1 : row->hq + row->lse_pad;
    m->lse_head = ht ? row->tokens + row->lse_pad : 1;
    for (int i = 0; i <= row->states; i++)
        if (!make_area(m, i))
            return false;
    for (int s = 0; s < row->states; s++) {
        put_state(m, s);
        if (!area_push(&m->o[s]) || !area_push(&m->lse[s]) || !area_freeze(&m->o[s])
            || !area_freeze(&m->lse[s]))
            return false;
    }
    poison_output(m);
    return area_push(&m->o[row->states]) && area_push(&m->lse[row->states]);
}

static void unmake(merge *m)
{
    for (int i = 0; i <= m->row->states; i++) {
        if (m->o)
            area_free(&m->o[i]);
        if (m->lse)
            area_free(&m->lse[i]);
    }
    free(m->o);
    free(m->lse);
    free(m->o_tensor);
    free(m->lse_tensor);
}

/* -------------------------------------------------------------------------------------- judging */

/* The only state of an item that is not empty, -1: none, -2: several. */
static int lone_state(const case_row *row, int64_t item)
{
    int lone = -1;

    for (int s = 0; s < row->states; s++)
        if (!case_state_empty(row, s, item)) {
            if (lone >= 0)
                return -2;
            lone = s;
        }
    return lone;
}

static bool same_as_state(merge *m, int64_t t, int h, int s)
{
    const int out = m->row->states;

    if (num_code(NUM_F32, m->lse[out].base, lse_at(m, t, h))
        != num_code(NUM_F32, m->lse[s].base, lse_at(m, t, h)))
        return judge(m, "token %lld head %d: only state %d counts, but its LSE was not copied",
                     (long long)t, h, s);
    for (int d = 0; d < m->row->dv; d++)
        if (num_code(m->type, m->o[out].base, o_at(m, t, h, d))
            != num_code(m->type, m->o[s].base, o_at(m, t, h, d)))
            return judge(
                m,
                "token %lld head %d element %d: only state %d counts, but was not copied",
                (long long)t, h, d, s);
    return true;
}

static bool is_empty(merge *m, int64_t t, int h)
{
    const int out = m->row->states;

    if (num_load(NUM_F32, m->lse[out].base, lse_at(m, t, h)) != -INFINITY)
        return judge(m, "token %lld head %d: all states are empty, LSE is not -inf", (long long)t,
                     h);
    for (int d = 0; d < m->row->dv; d++)
        if (num_load(m->type, m->o[out].base, o_at(m, t, h, d)) != 0)
            return judge(m, "token %lld head %d element %d: all states are empty, O is not 0",
                         (long long)t, h, d);
    return true;
}

static bool near_item(merge *m, int64_t t, int h, double *sum)
{
    static const double relative[] = { 2e-3, 1.6e-2, 1e-5 }, absolute[] = { 1e-3, 8e-3, 4e-6 };
    const int64_t item = t * m->row->hq + h;
    const double want_lse = m->sh->answer->lse[item];
    double lse = num_load(NUM_F32, m->lse[m->row->states].base, lse_at(m, t, h));

    lse = base2(m) ? lse * log(2) : lse;
    for (int d = 0; d < m->row->dv; d++) {
        const double got = num_load(m->type, m->o[m->row->states].base, o_at(m, t, h, d));
        const double want = m->sh->answer->o[item * m->row->dv + d];
        const double share =
            fabs(got - want) / (relative[m->type] * fabs(want) + absolute[m->type]);
        *sum += fabs(got);
        m->r->worst = share > m->r->worst ? share : m->r->worst;
        if (!(share <= 1))
            return judge(m, "O token %lld head %d element %d: %.9g, reference %.9g", (long long)t,
                         h, d, got, want);
    }
    if (want_lse != lse && !(fabs(lse - want_lse) <= 2e-3))
        return judge(m, "LSE token %lld head %d: %.9g, reference %.9g", (long long)t, h, lse,
                     want_lse);
    return true;
}

static bool compare(merge *m)
{
    const case_row *row = m->row;
    double sum = 0;

    for (int64_t t = 0; t < row->tokens; t++)
        for (int h = 0; h < row->hq; h++) {
            const int lone = lone_state(row, t * row->hq + h);
            if (!near_item(m, t, h, &sum) || (lone >= 0 && !same_as_state(m, t, h, lone))
                || (lone == -1 && !is_empty(m, t, h)))
                return false;
        }
    m->r->mo = row->tokens ? sum / ((double)row->tokens * row->hq * row->dv) : 0;
    for (int i = 0; i <= row->states; i++)
        if (!area_slack_is_clean(&m->o[i]) || !area_slack_is_clean(&m->lse[i]))
            return judge(m, "memory around state %d was written", i);
    return true;
}

static uint64_t hash_item(const merge *m, const area *o, const area *lse)
{
    uint64_t hash = 1;

    for (int64_t t = 0; t < m->row->tokens; t++)
        for (int h = 0; h < m->row->hq; h++) {
            hash = (hash ^ num_code(NUM_F32, lse->base, lse_at(m, t, h))) * 0x9E3779B97F4A7C15u;
            for (int d = 0; d < m->row->dv; d++)
                hash = (hash ^ hash >> 31 ^ num_code(m->type, o->base, o_at(m, t, h, d)))
                       * 0x9E3779B97F4A7C15u;
        }
    return hash;
}

static bool call(merge *m, fv_ctx *ctx, const fv_tensor *o, const fv_tensor *lse)
{
    fv_error err = { 0 };
    const double start = now();
    const fv_status status = fv_merge(ctx, m->o_tensor, m->lse_tensor, m->row->states, base2(m), o,
                                      lse, gpu_stream(), &err);
    const int out = m->row->states;

    m->r->us = 1e6 * (now() - start);
    if (status == FV_OK) {
        m->r->broken =
            gpu_on() && !(gpu_sync() && area_pull(&m->o[out]) && area_pull(&m->lse[out]));
        return !m->r->broken || judge(m, "the device failed");
    }
    judge(m, "fv_merge: %s: %s", fv_status_name(status), err.text);
    if (status == FV_E_INVALID || status == FV_E_UNSUPPORTED)
        m->r->verdict = REFUSED;
    return false;
}

/* Once more, over a writable copy of state 0. */
static bool merge_in_place(merge *m, fv_ctx *ctx)
{
    const int out = m->row->states;
    const uint64_t want = hash_item(m, &m->o[out], &m->lse[out]);
    const fv_tensor o = m->o_tensor[0], lse = m->lse_tensor[0];

    memcpy(m->o[out].base, m->o[0].base, (size_t)m->o[0].bytes);
    memcpy(m->lse[out].base, m->lse[0].base, (size_t)m->lse[0].bytes);
    if (!area_push(&m->o[out]) || !area_push(&m->lse[out]))
        return judge(m, "the device failed");
    m->o_tensor[0] = m->o_tensor[out];
    m->lse_tensor[0] = m->lse_tensor[out];
    const bool ok = call(m, ctx, &m->o_tensor[0], &m->lse_tensor[0]);
    m->o_tensor[0] = o;
    m->lse_tensor[0] = lse;
    if (!ok)
        return false;
    return hash_item(m, &m->o[out], &m->lse[out]) == want || judge(m, "in place gives other bits");
}

void run_merge(fv_ctx *ctx, const shared *sh, const case_way *way, result *out)
{
    merge m = { .sh = sh, .row = sh->row, .way = way, .type = way->dtype, .r = out };

    *out = (result){ .verdict = PASS };
    if (!make(&m)) {
        judge(&m, "no memory");
        out->verdict = NOT_RUN;
    } else if (call(&m, ctx, &m.o_tensor[sh->row->states], &m.lse_tensor[sh->row->states])
               && compare(&m) && sh->row->inplace) {
        merge_in_place(&m, ctx);
    }
    unmake(&m);
}
