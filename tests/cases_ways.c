/* SPDX-License-Identifier: Apache-2.0 */
/* cases_ways.c -- a row spread over its axes.
 *
 * A way gives one value to every axis. Some pairs of values exclude each other (a ragged way has no
 * pages): the rules are all in goes(). An axis that the others leave without meaning gets
 * CASE_VOID.
 */
#include "cases.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const case_table_names[] = { "csr", "csr-last", "2d", "2d-rows", "tight", "slack" };
const char *const case_base_names[] = { "ln", "log2" };
const char *const case_mask_names[] = { "own", "bits" };
const char *const case_poison_names[] = { "nan", "inf", "big" };
const char *const case_sharing_names[] = { "off", "find", "given" };
const char *const case_property_names[] = { "", "batch", "decode" };
const int64_t case_pad_ids[] = { -1, 0, 1 << 30, INT32_MAX };
const char *const case_axis_names[] = {
    "mem",        "view", "layout", "page",   "splits",    "placement", "table",  "pad_id",
    "lse_layout", "base", "mask",   "poison", "invariant", "room",      "sharing"
};

enum { UNSET = -2 };
enum { MAX_VALUES = 256 };             /* of one axis; a row with more page sizes than that loses
                                          the rest */

static bool has_rules(const case_row *row)
{
    return row->causal || row->window_left >= 0 || row->window_right >= 0 || row->diag
           || row->key_ranges.at || row->items.n || row->block_map.n || row->x.tree.n;
}

int64_t case_common_prefix(const case_row *row)
{
    if (!row->share || row->num_requests < 2 || row->block_map.n || row->x.v_ids)
        return 0;
    for (int r = 1; r < row->num_requests; r++)
        if (row->share[r].from != 0 || row->share[r].keys != row->share[1].keys
            || case_first_position(row, r) != case_first_position(row, 0))
            return 0;
    return row->share[1].keys;
}

bool case_has_mask(const case_row *row)
{
    return has_rules(row) || row->bits.n;
}

/* ----------------------------------------------------------------------------- the axes' values */

typedef struct values {
    int *at;
    int n;
} values;

static void add_value(values *v, int x)
{
    for (int i = 0; i < v->n; i++)
        if (v->at[i] == x)
            return;
    if (v->n < MAX_VALUES)
        v->at[v->n++] = x;
}

static void add_set(values *v, unsigned set, int n)
{
    for (int i = 0; i < n; i++)
        if (set >> i & 1)
            add_value(v, i);
}

static void add_list(values *v, const case_ints *list)
{
    for (int64_t i = 0; i < list->n; i++)
        add_value(v, list->at[i]);
}

static bool needs_invariant(const case_row *row)
{
    return row->same_bits & (CASE_SAME_REQUEST | CASE_SAME_SPLIT)
           || (row->same_bits & CASE_SAME_PAGE && row->share);
}

static bool axis_values(const case_row *row, int axis, values *v)
{
    v->n = 0;
    v->at = malloc((size_t)(row->page.n + row->splits.n + 16) * sizeof *v->at);
    if (!v->at)
        return false;
    switch (axis) {
    case CASE_AXIS_MEM: add_set(v, row->mem, CASE_MEMS); break;
    case CASE_AXIS_VIEW: add_set(v, row->view, CASE_VIEWS); break;
    case CASE_AXIS_LAYOUT: add_set(v, row->layout, CASE_LAYOUTS); break;
    case CASE_AXIS_PAGE: add_list(v, &row->page); break;
    case CASE_AXIS_SPLITS: add_list(v, &row->splits); break;
    case CASE_AXIS_PLACE: add_set(v, row->placement, CASE_PLACES); break;
    case CASE_AXIS_TABLE: add_set(v, (1u << CASE_TABLES) - 1, CASE_TABLES); break;
    case CASE_AXIS_PAD:
        add_set(v, row->has_pad_id ? 1u << CASE_PADS : (1u << CASE_PADS) - 1, CASE_PADS + 1);
        break;
    case CASE_AXIS_LSE: add_set(v, row->lse_layout, CASE_LSES); break;
    case CASE_AXIS_BASE: add_set(v, 3, CASE_BASES); break;
    case CASE_AXIS_MASK: add_set(v, has_rules(row) ? 3 : 1, CASE_MASKS); break;
    case CASE_AXIS_POISON: add_set(v, 7, CASE_POISONS); break;
    case CASE_AXIS_INVARIANT: add_set(v, row->heavy && !needs_invariant(row) ? 1 : 3, 2); break;
    case CASE_AXIS_ROOM: add_set(v, 3, 2); break;
    case CASE_AXIS_SHARING:
        add_set(v,
                !row->share || row->block_map.n ? 1
                : case_common_prefix(row)       ? 7
                                                : 3,
                CASE_SHARINGS);
        break;
    }
    return true;
}

/* --------------------------------------------------------------------- which values go together */

static int element_bytes(const case_row *row, int dtype)
{
    const int q = dtype == CASE_DTYPE_F32 ? 4 : 2;

    return row->kv_dtype == CASE_KV_SAME ? q : 1;       /* the smallest of the row's tensors
                                                           decides */
}

/* NULL, or why the row has no way at all with this view. */
static const char *view_refused(const case_row *row, int dtype, int view)
{
    const int offset = view == CASE_VIEW_OFF2 ? 2 : view == CASE_VIEW_OFF4 ? 4 : 8;

    switch (view) {
    case CASE_VIEW_OFF2: case CASE_VIEW_OFF4: case CASE_VIEW_OFF8:
        return offset % element_bytes(row, dtype) ? "the element size does not divide the offset"
                                                  : NULL;
    case CASE_VIEW_HS0: case CASE_VIEW_HS1: case CASE_VIEW_HSBIG:
        return row->hk != 1 ? "this view is for one KV head" : NULL;
    case CASE_VIEW_KVPAGE: case CASE_VIEW_KVTOKEN: case CASE_VIEW_MIXED:
        return row->mla ? "a latent cache has no V beside K" : NULL;
    }
    return NULL;
}

static bool paged_only(int view)
{
    return view == CASE_VIEW_KVPAGE || view == CASE_VIEW_LAYERS32;
}

/* Block rows as segments: pages are whole, so every block border has to be a page border (the
 * end excepted). */
static bool blocks_fit_pages(const case_row *row, int page)
{
    int64_t at = 0;

    for (int64_t i = 0; i + 1 < row->block_cols.n; i++)
        if ((at += row->block_cols.at[i]) % page)
            return false;
    return true;
}

static bool set_and(int x, int y)
{
    return x != UNSET && x == y;
}

/* Do the values that are set go together? UNSET goes with everything. */
static bool goes(const case_row *row, const case_way *way)
{
    const int *a = way->axis;
    const int view = a[CASE_AXIS_VIEW], table = a[CASE_AXIS_TABLE], page = a[CASE_AXIS_PAGE];
    const bool ragged = set_and(a[CASE_AXIS_MEM], CASE_MEM_RAGGED);

    if (view != UNSET && view_refused(row, way->dtype, view))
        return false;
    if (ragged && view != UNSET && paged_only(view))
        return false;
    if (set_and(view, CASE_VIEW_KVTOKEN) && set_and(a[CASE_AXIS_LAYOUT], CASE_LAYOUT_HND))
        return false;
    if (table != UNSET && a[CASE_AXIS_MEM] != UNSET && ragged != (table >= CASE_TABLE_TIGHT))
        return false;
    if (row->block_map.n && set_and(a[CASE_AXIS_MASK], CASE_MASK_OWN) && !ragged && page > 0
        && !blocks_fit_pages(row, page))
        return false;
    if (set_and(a[CASE_AXIS_SHARING], CASE_SHARING_GIVEN) && page > 0
        && case_common_prefix(row) % page)
        return false;
    return true;
}

/* Marks what has no meaning in a complete way. */
static void clean(case_way *way)
{
    int *a = way->axis;

    if (a[CASE_AXIS_MEM] == CASE_MEM_RAGGED)
        a[CASE_AXIS_PAGE] = a[CASE_AXIS_PLACE] = a[CASE_AXIS_PAD] = CASE_VOID;
    if (a[CASE_AXIS_VIEW] == CASE_VIEW_MIXED)
        a[CASE_AXIS_LAYOUT] = CASE_VOID;
}

/* ---------------------------------------------------------------------------------- the product */

static bool push(case_ways *ways, const case_way *way)
{
    for (int i = 0; i < ways->n; i++)
        if (!memcmp(&ways->at[i], way, sizeof *way))
            return true;
    if (ways->n == ways->room) {
        const int room = ways->room ? 2 * ways->room : 64;
        case_way *bigger = realloc(ways->at, (size_t)room * sizeof *bigger);
        if (!bigger)
            return false;
        ways->at = bigger;
        ways->room = room;
    }
    ways->at[ways->n++] = *way;
    return true;
}

/* Is `value` the first of the axis, for an axis that the way makes void? Keeps the product free
 * of twins. */
static bool needless(const case_way *way, int axis, bool first)
{
    case_way cleaned = *way;

    clean(&cleaned);
    return cleaned.axis[axis] == CASE_VOID && way->axis[axis] != CASE_VOID && !first;
}

static bool product(const case_row *row, const values *v, int axis, case_way *way, case_ways *out)
{
    if (axis == CASE_AXES) {
        case_way done = *way;
        clean(&done);
        if (out->n == out->room)
            return push(out, &done);
        out->at[out->n++] = done;
        return true;
    }
    for (int i = 0; i < v[axis].n; i++) {
        way->axis[axis] = v[axis].at[i];
        if (goes(row, way) && !needless(way, axis, i == 0) && !product(row, v, axis + 1, way, out))
            return false;
    }
    way->axis[axis] = UNSET;
    return true;
}

/* ------------------------------------------------------------------------------------ the turns */

typedef struct turns {
    const case_row *row;
    const values *v;
    int *used[CASE_AXES];               /* how often each value of each axis occurs so far */
    unsigned turn;
} turns;

static int place_of(const values *v, int x)
{
    for (int i = 0; i < v->n; i++)
        if (v->at[i] == x)
            return i;
    return -1;
}

/* The value of an axis that was used least so far, of those not yet tried; ties are broken by a
 * hash of the turn, so that axes of two values do not march in step. -1: none left. */
static int least_used(const turns *t, int axis, const bool *tried)
{
    const int n = t->v[axis].n;
    const unsigned start = case_hash((uint32_t)axis + 101, t->turn) % (unsigned)(n ? n : 1);
    int best = -1;

    for (int i = 0; i < n; i++) {
        const int k = (int)(((unsigned)i + start) % (unsigned)n);
        if (!tried[k] && (best < 0 || t->used[axis][k] < t->used[axis][best]))
            best = k;
    }
    return best;
}

/* Sets the axes from `axis` on that are not set. False: nothing goes, and the way is as before. */
static bool search(const turns *t, int axis, case_way *way)
{
    bool tried[MAX_VALUES] = { false };

    while (axis < CASE_AXES && way->axis[axis] != UNSET)
        axis++;
    if (axis == CASE_AXES)
        return true;
    for (int k; (k = least_used(t, axis, tried)) >= 0; tried[k] = true) {
        way->axis[axis] = t->v[axis].at[k];
        if (goes(t->row, way) && search(t, axis + 1, way))
            return true;
    }
    way->axis[axis] = UNSET;
    return false;
}

/* Completes a way in which some axes are set, and adds it. Skips it (true) where the set values
 * do not go. */
static bool complete(turns *t, case_way *way, case_ways *out)
{
    if (!goes(t->row, way) || !search(t, 0, way))
        return true;
    clean(way);
    for (int axis = 0; axis < CASE_AXES; axis++)
        if (way->axis[axis] != CASE_VOID)
            t->used[axis][place_of(&t->v[axis], way->axis[axis])]++;
    t->turn++;
    return push(out, way);
}

static case_way blank(int dtype)
{
    case_way way = { .dtype = dtype };

    for (int axis = 0; axis < CASE_AXES; axis++)
        way.axis[axis] = UNSET;
    return way;
}

/* Every (page, splits) pair, then every value that has not occurred by then. */
static bool take_turns(turns *t, int dtype, case_ways *out)
{
    const values *pages = &t->v[CASE_AXIS_PAGE], *splits = &t->v[CASE_AXIS_SPLITS];

    for (int p = 0; t->row->mem & 1u << CASE_MEM_PAGED && p < pages->n; p++)
        for (int s = 0; s < splits->n; s++) {
            case_way way = blank(dtype);
            way.axis[CASE_AXIS_MEM] = CASE_MEM_PAGED;
            way.axis[CASE_AXIS_PAGE] = pages->at[p];
            way.axis[CASE_AXIS_SPLITS] = splits->at[s];
            if (!complete(t, &way, out))
                return false;
        }
    for (int axis = 0; axis < CASE_AXES; axis++)
        for (int i = 0; i < t->v[axis].n; i++) {
            case_way way = blank(dtype);
            way.axis[axis] = t->v[axis].at[i];
            if (!t->used[axis][i] && !complete(t, &way, out))
                return false;
        }
    return true;
}

/* `n` ways, with whatever the least used values are. */
static bool take_few(turns *t, int dtype, int n, case_ways *out)
{
    for (int i = 0; i < n; i++) {
        case_way way = blank(dtype);
        if (!complete(t, &way, out))
            return false;
    }
    return true;
}

/* same_bits compares ways with each other, in the invariant mode where the page says so: make
 * sure they exist. */
static bool add_same_bits(turns *t, int dtype, case_ways *out)
{
    const case_row *row = t->row;
    const int axis = row->same_bits & CASE_SAME_SPLIT ? CASE_AXIS_SPLITS : CASE_AXIS_PAGE;
    const int invariant = needs_invariant(row);

    for (int i = 0; row->same_bits && i < t->v[axis].n; i++)
        for (int mem = 0; mem < CASE_MEMS; mem++) {
            case_way way = blank(dtype);
            if (!(row->mem >> mem & 1))
                continue;
            way.axis[CASE_AXIS_MEM] = mem;
            way.axis[CASE_AXIS_INVARIANT] = invariant;
            way.axis[CASE_AXIS_MASK] = CASE_MASK_OWN;
            way.axis[CASE_AXIS_SHARING] = CASE_SHARING_OFF;
            way.axis[axis] = t->v[axis].at[i];
            if (axis == CASE_AXIS_PAGE && !invariant)
                way.axis[CASE_AXIS_SPLITS] = t->v[CASE_AXIS_SPLITS].at[0];
            if (!complete(t, &way, out))
                return false;
        }
    return true;
}

static void free_values(values *v, turns *t)
{
    for (int axis = 0; axis < CASE_AXES; axis++) {
        free(v[axis].at);
        free(t->used[axis]);
    }
}

static bool make_values(const case_row *row, values *v, turns *t)
{
    bool ok = true;

    for (int axis = 0; axis < CASE_AXES && ok; axis++) {
        ok = axis_values(row, axis, &v[axis]);
        t->used[axis] = calloc(ok ? (size_t)v[axis].n + 1 : 1, sizeof **t->used);
        ok = ok && t->used[axis];
    }
    return ok;
}

bool case_ways_add_properties(const case_row *row, int dtype, unsigned turn, case_ways *ways)
{
    values v[CASE_AXES] = { { 0 } };
    turns t = { .row = row, .v = v, .turn = turn };
    bool ok = make_values(row, v, &t);

    for (int property = 1; ok && property < CASE_PROPERTIES; property++) {
        case_way way = blank(dtype);
        way.property = property;
        way.axis[CASE_AXIS_INVARIANT] = 1;
        if (case_common_prefix(row))
            way.axis[CASE_AXIS_SHARING] = CASE_SHARING_OFF;
        ok = complete(&t, &way, ways);
    }
    free_values(v, &t);
    return ok;
}

bool case_ways_make(const case_row *row, int dtype, bool full, unsigned turn, int few,
                    case_ways *out)
{
    values v[CASE_AXES] = { { 0 } };
    turns t = { .row = row, .v = v, .turn = turn };
    bool ok = make_values(row, v, &t);

    *out = (case_ways){ 0 };
    if (ok && full) {
        case_way way = blank(dtype);
        ok = product(row, v, 0, &way, out);
    } else if (ok) {
        ok = (few > 0 ? take_few(&t, dtype, few, out) : take_turns(&t, dtype, out))
            && add_same_bits(&t, dtype, out);
    }
    free_values(v, &t);
    if (!ok)
        case_ways_free(out);
    return ok;
}

void case_ways_free(case_ways *ways)
{
    free(ways->at);
    *ways = (case_ways){ 0 };
}

/* ----------------------------------------------------------------------------------- for people */

bool case_next_void(const case_row *row, int dtype, int *axis, int *value, char *why, size_t size)
{
    int view = *axis < 0 ? 0 : *value + 1;

    *axis = CASE_AXIS_VIEW;             /* the one axis whose values a row can name in vain */
    for (; view < CASE_VIEWS; view++) {
        const char *reason = view_refused(row, dtype, view);
        if (!reason && paged_only(view) && !(row->mem & 1u << CASE_MEM_PAGED))
            reason = "this view is for pages";
        if (!(row->view >> view & 1) || !reason)
            continue;
        *value = view;
        snprintf(why, size, "view=%s with %s: %s", case_view_names[view], case_dtype_names[dtype],
                 reason);
        return true;
    }
    return false;
}

int64_t case_pad_id(const case_row *row, const case_way *way)
{
    const int pad = way->axis[CASE_AXIS_PAD];

    return pad == CASE_PADS ? row->pad_id : case_pad_ids[pad < 0 ? 0 : pad];
}

static const char *name_of(const char *const *names, int x)
{
    return x < 0 ? "-" : names[x];
}

void case_way_print(const case_way *way, char *out, size_t size)
{
    const int *a = way->axis;
    char page[24] = "", splits[24] = "auto";

    if (a[CASE_AXIS_PAGE] >= 0)
        snprintf(page, sizeof page, " page=%d", a[CASE_AXIS_PAGE]);
    if (a[CASE_AXIS_SPLITS] != CASE_SPLITS_AUTO)
        snprintf(splits, sizeof splits, "%d", a[CASE_AXIS_SPLITS]);
    snprintf(
        out, size,
        "%s %s%s splits=%s %s %s %s table=%s pad=%d lse=%s/%s mask=%s poison=%s%s%s%s%s%s%s",
        case_dtype_names[way->dtype], name_of(case_mem_names, a[CASE_AXIS_MEM]), page, splits,
        name_of(case_layout_names, a[CASE_AXIS_LAYOUT]),
        name_of(case_view_names, a[CASE_AXIS_VIEW]), name_of(case_place_names, a[CASE_AXIS_PLACE]),
        name_of(case_table_names, a[CASE_AXIS_TABLE]), a[CASE_AXIS_PAD],
        name_of(case_lse_names, a[CASE_AXIS_LSE]), name_of(case_base_names, a[CASE_AXIS_BASE]),
        name_of(case_mask_names, a[CASE_AXIS_MASK]),
        name_of(case_poison_names, a[CASE_AXIS_POISON]), a[CASE_AXIS_INVARIANT] ? " invariant" : "",
        a[CASE_AXIS_ROOM] ? " room" : "", a[CASE_AXIS_SHARING] > 0 ? " sharing=" : "",
        a[CASE_AXIS_SHARING] > 0 ? case_sharing_names[a[CASE_AXIS_SHARING]] : "",
        way->property ? " property=" : "", case_property_names[way->property]);
}
