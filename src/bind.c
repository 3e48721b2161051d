/* SPDX-License-Identifier: Apache-2.0 */
/* bind.c -- arguments of variants: found by name, checked, written into the argument structs that
 * kernels read.
 *
 * Nouns
 *   due        the binding that a parameter declares: the last list in which it may come
 *   early      given before it is due; the value is the default from then on, and what planning
 *              counts with
 *   qualified  "window.left" instead of "left": needed where two variants of a problem have a
 *              parameter of that name
 *
 * Invariants
 *   (1) a list that is refused may leave some of its arguments bound: the caller binds into a copy
 *   (2) a number that states a bound (FV_FIRST_KEY, FV_LAST_KEY) is never replaced by one that lets
 *       more keys be seen
 *   (3) memory of tensors is not read: it may be a device's. fv__problem_check_ranges does, for
 *       those who know that it is the host's */
#include "problem.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const char *const list_names[] = { "problem.variants[].args", "batch.args", "tensors.args" };

typedef struct binder {
    fv__problem *problem;
    const char *where;                  /* the list, for messages */
    fv__binding when;
    const fv__bind_shape *shape;        /* NULL: not known yet */
    fv_error *err;
    uint64_t seen[FV__MAX_VARIANTS];    /* by this list: bit 2p: parameter p, bit 2p + 1: its offsets */
} binder;

/* An argument on its way: which parameter takes it. */
typedef struct target {
    int use, param;
    bool offsets;                       /* NAME_indptr of a FV_RANGES parameter */
} target;

static fv_status refuse(const binder *b, const char *name, int64_t value, int64_t limit,
                        const char *what)
{
    char field[48];
    snprintf(field, sizeof field, "%s.%s", b->where, name);
    return fv__fail(b->err, FV_E_INVALID, field, value, limit, "%s: %s", field, what);
}

#define REFUSE(b, name, value, limit, ...)                                                         \
    do {                                                                                           \
        char refuse_words[320];                                                                    \
        snprintf(refuse_words, sizeof refuse_words, __VA_ARGS__);                                  \
        return refuse(b, name, value, limit, refuse_words);                                        \
    } while (0)

/* ---------------------------------------------------------------------------------------- names */

static bool takes(const fv__param *param, const char *name, bool *offsets)
{
    const size_t n = strlen(param->name);
    *offsets = false;
    if (!strcmp(name, param->name)) return true;
    if (param->kind != FV__RANGES || strncmp(name, param->name, n) || strcmp(name + n, "_indptr"))
        return false;
    *offsets = true;
    return true;
}

/* The part of a qualified name behind "variant.", if it is this variant's; else the whole name. */
static const char *own_part(const fv__use *use, const char *name)
{
    const size_t n = strlen(use->variant->meta.name);
    return !strncmp(name, use->variant->meta.name, n) && name[n] == '.' ? name + n + 1 : name;
}

/* How many uses (from `first` up to `last`) take this name; *out is the first. */
static int find_target(const binder *b, int first, int last, const char *name, target *out)
{
    int found = 0;
    for (int i = first; i < last; i++) {
        const fv__variant_meta *meta = &b->problem->uses[i].variant->meta;
        const char *own = own_part(&b->problem->uses[i], name);
        for (int k = 0; k < meta->num_params; k++) {
            bool offsets;
            if (!takes(&meta->params[k], own, &offsets)) continue;
            if (!found++) *out = (target){ i, k, offsets };
        }
    }
    return found;
}

/* -------------------------------------------------------------------------------------- numbers */

static void store_number(fv__use *use, int k, double x)
{
    const fv__param *param = &use->variant->meta.params[k];
    unsigned char *at = use->args + param->offset;
    if (param->kind == FV__NUMBER)
        *(float *)at = (float)x;
    else
        *(int32_t *)at = (int32_t)x;
}

/* "inf" is the largest whole number; other numbers beyond it are refused. */
static double bounded(double x)
{
    return isfinite(x) ? x : x > 0 ? FV__NO_BOUND : -FV__NO_BOUND;
}

static fv_status check_number(const binder *b, const fv__param *p, double *x)
{
    if (isnan(*x)) REFUSE(b, p->name, 0, 0, "NaN is no value of '%s'", p->name);
    if (p->kind == FV__INT) {
        *x = bounded(*x);
        if (fabs(*x) > FV__NO_BOUND)
            REFUSE(b, p->name, fabs(*x) < 1e18 ? (int64_t)*x : 0, FV__NO_BOUND,
                   "'%s' is %.17g; whole numbers are at most 2^30 = %d, and inf is that one",
                   p->name, *x, FV__NO_BOUND);
        if (*x != floor(*x))
            REFUSE(b, p->name, (int64_t)*x, 0, "'%s' is %g; it must be a whole number", p->name,
                   *x);
    } else if (!isfinite((float)*x) && !(p->dflt == FV__DEFAULT_VALUE && *x == p->value)) {
        REFUSE(b, p->name, 0, 0, "'%s' is %g; as a 32-bit float it must be finite", p->name, *x);
    }
    const int64_t value = fabs(*x) < 1e18 ? (int64_t)*x : 0;
    if (p->has_min && (p->min_open ? !(*x > p->min) : !(*x >= p->min)))
        REFUSE(b, p->name, value, (int64_t)p->min, "'%s' is %g; it must be %s %g", p->name, *x,
               p->min_open ? ">" : ">=", p->min);
    if (p->has_max && (p->max_open ? !(*x < p->max) : !(*x <= p->max)))
        REFUSE(b, p->name, value, (int64_t)p->max, "'%s' is %g; it must be %s %g", p->name, *x,
               p->max_open ? "<" : "<=", p->max);
    return FV_OK;
}

/* Would x instead of `planned` move the bound outwards? */
static bool widens(const fv__bound *bound, bool first, int k, double x, double planned)
{
    if (!bound->present || !bound->sign || bound->param != k) return false;
    return first ? bound->sign * x < bound->sign * planned
                 : bound->sign * x > bound->sign * planned;
}

static fv_status bind_number(const binder *b, fv__use *use, int k, const fv_arg *arg)
{
    const fv__variant_meta *meta = &use->variant->meta;
    const fv__param *p = &meta->params[k];
    double x = arg->number;
    if (arg->tensor)
        REFUSE(b, p->name, 0, 0, "'%s' of %s is a number, not a tensor", p->name, meta->name);
    FV_TRY(check_number(b, p, &x));
    const double planned = use->planned[k];
    if (b->when != FV__BIND_PROBLEM && (use->given[k] || b->when == FV__BIND_RUN) &&
        (widens(&meta->first, true, k, x, planned) || widens(&meta->last, false, k, x, planned)))
        REFUSE(b, p->name, (int64_t)x, (int64_t)planned,
               "'%s' is %g; the plan was made for %g, and a run may see fewer keys, never more",
               p->name, x, planned);
    /* A bound that comes in time to plan with is what the planner counts with; at run time the plan
     * stays as it is. */
    if (b->when != FV__BIND_RUN) use->planned[k] = x;
    store_number(use, k, x);
    return FV_OK;
}

/* --------------------------------------------------------------------------------------- arrays */

static void shape_words(const fv_tensor *t, char *out, size_t size)
{
    size_t n = (size_t)snprintf(out, size, "%s [", t->dtype ? t->dtype : "");
    for (int i = 0; i < t->ndim && i < FV_MAX_DIMS && n < size; i++)
        n += (size_t)snprintf(out + n, size - n, "%s%lld", i ? ", " : "", (long long)t->shape[i]);
    if (n < size) snprintf(out + n, size - n, "]");
}

/* A tensor argument's make: type, axes, dense last axis, alignment. */
static fv_status check_tensor(const binder *b, const char *name, const fv_arg *arg,
                              const char *dtype, int ndim, int align)
{
    const fv_tensor *t = arg->tensor;
    if (!t) REFUSE(b, name, 0, 0, "'%s' is a tensor of %s, not a number", name, dtype);
    if (arg->number != 0)
        REFUSE(b, name, 0, 0, "'%s' is given as a tensor and as the number %g", name, arg->number);
    if (t->reserved) REFUSE(b, name, t->reserved, 0, "the reserved word of '%s' is not 0", name);
    if (t->dtype && strcmp(t->dtype, dtype))
        REFUSE(b, name, 0, 0, "'%s' has the element type %.24s; expected %s", name, t->dtype,
               dtype);
    if (t->ndim != ndim)
        REFUSE(b, name, t->ndim, ndim, "'%s' has %d axes; expected %d", name, t->ndim, ndim);
    int64_t count = 1;
    for (int i = 0; i < ndim; i++) {
        if (t->shape[i] < 0)
            REFUSE(b, name, t->shape[i], 0, "axis %d of '%s' has the extent %lld", i, name,
                   (long long)t->shape[i]);
        if (t->shape[i] > 0 && count > INT64_MAX / 64 / t->shape[i])
            REFUSE(b, name, t->shape[i], 0, "'%s' is too large", name);
        count *= t->shape[i];
    }
    if (t->shape[ndim - 1] > 1 && t->stride[ndim - 1] != 1)
        REFUSE(b, name, t->stride[ndim - 1], 1,
               "the last axis of '%s' has the stride %lld; it must be 1", name,
               (long long)t->stride[ndim - 1]);
    if (count && !t->data) REFUSE(b, name, 0, 0, "the data of '%s' is NULL", name);
    if ((uintptr_t)t->data % (uintptr_t)align)
        REFUSE(b, name, (int64_t)((uintptr_t)t->data % (uintptr_t)align), align,
               "'%s' is not aligned to %d bytes", name, align);
    return FV_OK;
}

/* Two axes without gaps. */
static fv_status check_dense_rows(const binder *b, const char *name, const fv_tensor *t)
{
    if (t->shape[0] > 1 && t->stride[0] != t->shape[1])
        REFUSE(b, name, t->stride[0], t->shape[1],
               "the rows of '%s' lie %lld elements apart; they must be dense, %lld apart", name,
               (long long)t->stride[0], (long long)t->shape[1]);
    return FV_OK;
}

/* How many entries an array must have, -1: any or not known yet. */
static int64_t expected_count(const binder *b, const fv__use *use, const fv__param *p)
{
    switch (p->count_of) {
    case FV__COUNT_ANY: break;
    case FV__COUNT_HEADS: return b->problem->num_q_heads;
    case FV__COUNT_REQUESTS: return b->shape ? b->shape->num_requests : -1;
    case FV__COUNT_ROWS: return b->shape ? b->shape->total_rows : -1;
    case FV__COUNT_NUMBER: return p->count;
    case FV__COUNT_HALF:
        return *(const int32_t *)(use->args + use->variant->meta.params[p->count].offset) / 2;
    }
    return -1;
}

/* ... and what is counted, in words. */
static void count_words(const fv__use *use, const fv__param *p, char words[48])
{
    static const char *const names[] = {
        [FV__COUNT_ANY] = "", [FV__COUNT_HEADS] = "one per q head",
        [FV__COUNT_REQUESTS] = "one per request", [FV__COUNT_ROWS] = "one per row",
        [FV__COUNT_NUMBER] = "a fixed number", [FV__COUNT_HALF] = "half of ",
    };
    snprintf(words, 48, "%s%s", names[p->count_of],
             p->count_of == FV__COUNT_HALF ? use->variant->meta.params[p->count].name : "");
}

static fv_status check_count(const binder *b, const fv__use *use, const fv__param *p, int64_t count)
{
    char words[48];
    const int64_t expected = expected_count(b, use, p);
    if (expected < 0 || count == expected) return FV_OK;
    if (p->count_of == FV__COUNT_ROWS && b->shape->max_rows > expected &&
        count == b->shape->max_rows)
        return FV_OK;
    count_words(use, p, words);
    REFUSE(b, p->name, count, expected, "'%s' has %lld entries; expected %lld (%s)", p->name,
           (long long)count, (long long)expected, words);
}

static fv_status bind_array(const binder *b, fv__use *use, const fv__param *p, const fv_arg *arg)
{
    const bool floats = p->kind == FV__FLOATS;
    FV_TRY(check_tensor(b, p->name, arg, floats ? "f32" : "i32", 1, 4));
    const fv_tensor *t = arg->tensor;
    /* half of an argument that a later entry of the same list may set: fv__use_bind and
     * fv__problem_bind count again at the end */
    if (p->count_of != FV__COUNT_HALF) FV_TRY(check_count(b, use, p, t->shape[0]));
    if (floats)
        *(fv_floats *)(use->args + p->offset) = (fv_floats){ t->data, t->shape[0] };
    else
        *(fv_ints *)(use->args + p->offset) = (fv_ints){ t->data, t->shape[0] };
    return FV_OK;
}

/* A dense mask: [rows, keys] bits of the only request, or all requests' bits one after another,
 * each from a byte border. */
static fv_status check_bits(const binder *b, const fv__param *p, const fv_tensor *t,
                            const fv_arg *arg)
{
    const fv__bind_shape *s = b->shape;
    char given[96];
    shape_words(t, given, sizeof given);
    if (t->ndim == 2) {
        FV_TRY(check_tensor(b, p->name, arg, "b1", 2, 1));
        if (s->num_requests != 1)
            REFUSE(b, p->name, s->num_requests, 1,
                   "'%s' is %s; with %lld requests it is one axis of %lld bits, each request from "
                   "a byte border",
                   p->name, given, (long long)s->num_requests,
                   (long long)s->bits_offsets[s->num_requests]);
        if (s->mask_rows >= 0 && (t->shape[0] != s->mask_rows || t->shape[1] != s->mask_keys))
            REFUSE(b, p->name, t->shape[0] != s->mask_rows ? t->shape[0] : t->shape[1],
                   t->shape[0] != s->mask_rows ? s->mask_rows : s->mask_keys,
                   "'%s' is %lld x %lld bits; expected %lld x %lld (rows x keys)", p->name,
                   (long long)t->shape[0], (long long)t->shape[1], (long long)s->mask_rows,
                   (long long)s->mask_keys);
        return check_dense_rows(b, p->name, t);
    }
    const bool bytes = t->dtype && !strcmp(t->dtype, "u8");
    FV_TRY(check_tensor(b, p->name, arg, bytes ? "u8" : "b1", 1, 1));
    const int64_t expected = s->bits_offsets[s->num_requests],
                  count = bytes ? t->shape[0] * 8 : t->shape[0];
    const int64_t exact = s->mask_rows >= 0 ? s->mask_rows * s->mask_keys : -1;
    if (fv__round_up(count, 8) == fv__round_up(expected, 8) &&
        (exact < 0 || bytes || count == exact || count == fv__round_up(exact, 8)))
        return FV_OK;
    if (s->mask_rows >= 0)
        REFUSE(b, p->name, count, exact,
               "'%s' has %lld bits; expected %lld (%lld rows x %lld keys)", p->name,
               (long long)count, (long long)exact, (long long)s->mask_rows,
               (long long)s->mask_keys);
    REFUSE(
        b, p->name, count, expected,
        "'%s' has %lld bits; expected %lld (rows x keys of %lld requests, each from a byte border)",
        p->name, (long long)count, (long long)expected, (long long)s->num_requests);
}

static fv_status bind_bits(const binder *b, fv__use *use, const fv__param *p, const fv_arg *arg)
{
    if (!b->shape || !b->shape->bits_offsets)
        REFUSE(b, p->name, 0, 0,
               "'%s' is a mask of the batch's rows and keys: give it in batch.args", p->name);
    if (!arg->tensor) REFUSE(b, p->name, 0, 0, "'%s' is a tensor of bits, not a number", p->name);
    FV_TRY(check_bits(b, p, arg->tensor, arg));
    *(fv_bits *)(use->args + p->offset) = (fv_bits){ arg->tensor->data, b->shape->bits_offsets };
    return FV_OK;
}

static fv_status check_indptr_count(const binder *b, const fv__param *p, const fv_ranges *ranges)
{
    if (!ranges->indptr || !b->shape || ranges->reserved == b->shape->num_requests + 1)
        return FV_OK;
    REFUSE(b, p->name, ranges->reserved, b->shape->num_requests + 1,
           "'%s_indptr' has %lld entries; expected %lld (one per request and one)", p->name,
           (long long)ranges->reserved, (long long)b->shape->num_requests + 1);
}

static fv_status bind_ranges(const binder *b, fv__use *use, const fv__param *p, const fv_arg *arg,
                             bool offsets)
{
    fv_ranges *ranges = (fv_ranges *)(use->args + p->offset);
    FV_TRY(check_tensor(b, arg->name, arg, "i32", offsets ? 1 : 2, 4));
    const fv_tensor *t = arg->tensor;
    if (offsets) {
        ranges->indptr = t->data;
        ranges->reserved = t->shape[0];
        return check_indptr_count(b, p, ranges);
    }
    if (t->shape[1] != 2)
        REFUSE(b, p->name, t->shape[1], 2,
               "'%s' has %lld columns; expected 2 (first position, position behind the last)",
               p->name, (long long)t->shape[1]);
    if (t->shape[0] > INT32_MAX)
        REFUSE(b, p->name, t->shape[0], INT32_MAX, "'%s' has too many ranges", p->name);
    FV_TRY(check_dense_rows(b, p->name, t));
    static const int32_t none[2]; /* a list of no ranges is a list: not the same as an absent one */
    ranges->ranges = t->data ? t->data : none;
    ranges->count = t->shape[0];
    return FV_OK;
}

/* What is written has rows that do not overlap. */
static fv_status check_apart(const binder *b, const fv__param *p, const fv_tensor *t)
{
    if (t->shape[0] <= 1 || t->stride[0] >= t->shape[1]) return FV_OK;
    REFUSE(b, p->name, t->stride[0], t->shape[1],
           "the rows of '%s' lie %lld elements apart; they would overlap", p->name,
           (long long)t->stride[0]);
}

/* An f32 matrix that a run writes. */
static fv_status check_output(const binder *b, const fv__param *p, const fv_arg *arg)
{
    if (!b->shape)
        REFUSE(b, p->name, 0, 0, "'%s' is an output of the run: give it in tensors.args", p->name);
    return check_tensor(b, p->name, arg, "f32", 2, 4);
}

static fv_status bind_sums(const binder *b, fv__use *use, const fv__param *p, const fv_arg *arg)
{
    const fv__bind_shape *s = b->shape;
    FV_TRY(check_output(b, p, arg));
    const fv_tensor *t = arg->tensor;
    if (t->shape[0] != b->problem->num_kv_heads || t->shape[1] != s->total_keys)
        REFUSE(b, p->name, t->shape[1], s->total_keys,
               "'%s' is [%lld, %lld]; expected [%d, %lld] (kv heads, keys of all requests)",
               p->name, (long long)t->shape[0], (long long)t->shape[1], b->problem->num_kv_heads,
               (long long)s->total_keys);
    FV_TRY(check_apart(b, p, t));
    *(fv_sums *)(use->args + p->offset) =
        (fv_sums){ t->data, t->shape[0] > 1 ? t->stride[0] : t->shape[1] };
    return FV_OK;
}

static fv_status bind_maxes(const binder *b, fv__use *use, const fv__param *p, const fv_arg *arg)
{
    const fv__bind_shape *s = b->shape;
    FV_TRY(check_output(b, p, arg));
    const fv_tensor *t = arg->tensor;
    const int32_t heads = b->problem->num_q_heads;
    if (t->shape[0] < s->total_rows || t->shape[1] != heads)
        REFUSE(b, p->name, t->shape[0], s->total_rows,
               "'%s' is [%lld, %lld]; expected [%lld, %d] (rows of all requests, q heads)", p->name,
               (long long)t->shape[0], (long long)t->shape[1], (long long)s->total_rows, heads);
    FV_TRY(check_apart(b, p, t));
    *(fv_maxes *)(use->args + p->offset) =
        (fv_maxes){ t->data, t->shape[0] > 1 ? t->stride[0] : heads };
    return FV_OK;
}

/* ---------------------------------------------------------------------------------------- lists */

static fv_status bind_to(const binder *b, const fv_arg *arg, target to)
{
    fv__use *use = &b->problem->uses[to.use];
    const fv__param *p = &use->variant->meta.params[to.param];
    if (p->binding < b->when)
        REFUSE(b, p->name, 0, 0, "'%s' of %s belongs to %s, not to this list", p->name,
               use->variant->meta.name, list_names[p->binding]);
    switch (p->kind) {
    case FV__NUMBER:
    case FV__INT: FV_TRY(bind_number(b, use, to.param, arg)); break;
    case FV__FLOATS:
    case FV__INTS: FV_TRY(bind_array(b, use, p, arg)); break;
    case FV__BITS: FV_TRY(bind_bits(b, use, p, arg)); break;
    case FV__RANGES: FV_TRY(bind_ranges(b, use, p, arg, to.offsets)); break;
    case FV__SUMS: FV_TRY(bind_sums(b, use, p, arg)); break;
    case FV__MAXES: FV_TRY(bind_maxes(b, use, p, arg)); break;
    }
    if (!to.offsets) use->given[to.param] = true;
    return FV_OK;
}

static bool is_other(const char *name, const char *const *others, int num_others)
{
    for (int i = 0; i < num_others; i++)
        if (!strcmp(name, others[i])) return true;
    return false;
}

static fv_status bind_list(binder *b, int first, int last, const fv_arg *args, int num_args,
                           const char *const *others, int num_others)
{
    if (num_args < 0 || (num_args && !args))
        return fv__fail(b->err, FV_E_INVALID, b->where, num_args, 0,
                        "%s: a list of %d arguments at %s", b->where, num_args,
                        args ? "an address" : "NULL");
    for (int i = 0; i < num_args; i++) {
        const char *name = args[i].name;
        target to = { 0, 0, false };
        if (!name || !*name)
            return fv__fail(b->err, FV_E_INVALID, b->where, i, 0, "%s: argument %d has no name",
                            b->where, i);
        if (args[i].reserved)
            REFUSE(b, name, (int64_t)args[i].reserved, 0, "the reserved word of '%.40s' is not 0",
                   name);
        if (is_other(name, others, num_others)) continue;
        const int found = find_target(b, first, last, name, &to);
        if (!found)
            REFUSE(b, name, 0, 0, "no variant of the problem has a parameter '%.40s'", name);
        if (found > 1 && strchr(name, '.'))
            REFUSE(b, name, found, 1,
                   "%d variants of the problem have that name and a parameter '%.40s': give it in "
                   "the fv_variant_use.args of the one that is meant",
                   found, name);
        if (found > 1)
            REFUSE(b, name, found, 1,
                   "%d variants of the problem have a parameter '%.40s': say \"variant.parameter\"",
                   found, name);
        uint64_t *seen = &b->seen[to.use];
        const uint64_t bit = (uint64_t)1 << (2 * to.param + to.offsets);
        if (*seen & bit) REFUSE(b, name, 2, 1, "'%.40s' is given twice", name);
        *seen |= bit;
        FV_TRY(bind_to(b, &args[i], to));
    }
    return FV_OK;
}

/* Counts of arrays that came before what they are counted by. */
static fv_status check_counts(const binder *b, int first, int last)
{
    for (int i = first; i < last; i++) {
        fv__use *use = &b->problem->uses[i];
        const fv__variant_meta *meta = &use->variant->meta;
        for (int k = 0; k < meta->num_params; k++) {
            const fv__param *p = &meta->params[k];
            const unsigned char *at = use->args + p->offset;
            if (p->kind == FV__RANGES) {
                const fv_ranges *ranges = (const fv_ranges *)at;
                FV_TRY(check_indptr_count(b, p, ranges));
                if (ranges->indptr && !ranges->ranges)
                    REFUSE(b, p->name, 0, 0, "'%s_indptr' is given without '%s'", p->name, p->name);
            }
            if (!use->given[k]) continue;
            if (p->kind == FV__FLOATS)
                FV_TRY(check_count(b, use, p, ((const fv_floats *)at)->count));
            if (p->kind == FV__INTS) FV_TRY(check_count(b, use, p, ((const fv_ints *)at)->count));
        }
    }
    return FV_OK;
}

/* Is parameter k in a bound, so that not knowing it means the widest? */
static double widest(const fv__variant_meta *meta, int k)
{
    if (meta->first.present && meta->first.param == k)
        return meta->first.sign < 0 ? FV__NO_BOUND : -FV__NO_BOUND;
    if (meta->last.present && meta->last.param == k)
        return meta->last.sign > 0 ? FV__NO_BOUND : -FV__NO_BOUND;
    return 0;
}

void fv__use_defaults(fv__use *use)
{
    const fv__variant_meta *meta = &use->variant->meta;
    for (int k = 0; k < meta->num_params; k++) {
        const fv__param *p = &meta->params[k];
        if (p->kind != FV__NUMBER && p->kind != FV__INT) continue;
        use->planned[k] = p->dflt == FV__DEFAULT_VALUE ? p->value : widest(meta, k);
        store_number(use, k, use->planned[k]);
    }
}

fv_status fv__use_bind(fv__problem *problem, int use, const char *where, const fv_arg *args,
                       int num_args, fv_error *err)
{
    binder b = { .problem = problem, .where = where, .when = FV__BIND_PROBLEM, .err = err };
    FV_TRY(bind_list(&b, use, use + 1, args, num_args, NULL, 0));
    return check_counts(&b, use, use + 1);
}

fv_status fv__problem_bind(fv__problem *problem, fv__binding when, const char *where,
                           const fv_arg *args, int num_args, const char *const *others,
                           int num_others, const fv__bind_shape *shape, fv_error *err)
{
    binder b = { .problem = problem, .where = where, .when = when, .shape = shape, .err = err };
    FV_TRY(bind_list(&b, 0, problem->num_uses, args, num_args, others, num_others));
    return check_counts(&b, 0, problem->num_uses);
}

static const char *kind_words(const fv__param *p)
{
    switch (p->kind) {
    case FV__NUMBER: return "a number";
    case FV__INT: return "a whole number";
    case FV__FLOATS: return p->count_of == FV__COUNT_HEADS ? "f32, one per q head" : "an f32 array";
    case FV__INTS: return p->count_of == FV__COUNT_ROWS ? "i32, one per row" : "an i32 array";
    case FV__BITS: return "bits, rows x keys";
    case FV__RANGES: return "i32 [n, 2]";
    case FV__SUMS: return "f32 [kv heads, keys], written";
    case FV__MAXES: return "f32 [rows, q heads], written";
    }
    return "";
}

fv_status fv__problem_bound(const fv__problem *problem, fv__binding when, fv_error *err)
{
    for (int i = 0; i < problem->num_uses; i++) {
        const fv__use *use = &problem->uses[i];
        const fv__variant_meta *meta = &use->variant->meta;
        for (int k = 0; k < meta->num_params; k++) {
            const fv__param *p = &meta->params[k];
            if (p->binding > when || use->given[k] || p->dflt != FV__DEFAULT_REQUIRED) continue;
            char field[48];
            snprintf(field, sizeof field, "%s.%s", list_names[p->binding], p->name);
            return fv__fail(err, FV_E_INVALID, field, 0, 0, "%s needs '%s' (%s) in %s, or earlier",
                            meta->name, p->name, kind_words(p), list_names[p->binding]);
        }
    }
    return FV_OK;
}

/* --------------------------------------------------------------------------- values on the host */

static fv_status check_range_list(const fv__param *p, const fv_ranges *r, int64_t request,
                                  int64_t first, int64_t last, fv_error *err)
{
    for (int64_t i = first; i < last; i++) {
        const int32_t lo = r->ranges[2 * i], hi = r->ranges[2 * i + 1];
        if (lo > hi)
            return fv__fail_request(err, FV_E_INVALID, p->name, request, hi, lo,
                                    "'%s': range %lld is [%d, %d); it ends before it begins",
                                    p->name, (long long)i, lo, hi);
        if (i > first && lo < r->ranges[2 * i - 1])
            return fv__fail_request(err, FV_E_INVALID, p->name, request, lo, r->ranges[2 * i - 1],
                                    "'%s': range %lld begins at %d, before the one in front of it "
                                    "ends (%d); ranges are ascending",
                                    p->name, (long long)i, lo, r->ranges[2 * i - 1]);
    }
    return FV_OK;
}

static fv_status check_ranges(const fv__param *p, const fv_ranges *r, int64_t num_requests,
                              fv_error *err)
{
    if (!r->ranges) return FV_OK;
    if (!r->indptr) return check_range_list(p, r, -1, 0, r->count, err);
    for (int64_t i = 0; i < num_requests; i++) {
        const int32_t first = r->indptr[i], last = r->indptr[i + 1];
        if (first < 0 || last < first || last > r->count)
            return fv__fail_request(err, FV_E_INVALID, p->name, i, last, r->count,
                                    "'%s_indptr' gives request %lld the ranges [%d, %d) of %lld",
                                    p->name, (long long)i, first, last, (long long)r->count);
        FV_TRY(check_range_list(p, r, i, first, last, err));
    }
    return FV_OK;
}

fv_status fv__problem_check_ranges(const fv__problem *problem, int64_t num_requests, fv_error *err)
{
    for (int i = 0; i < problem->num_uses; i++) {
        const fv__use *use = &problem->uses[i];
        const fv__variant_meta *meta = &use->variant->meta;
        for (int k = 0; k < meta->num_params; k++)
            if (meta->params[k].kind == FV__RANGES)
                FV_TRY(check_ranges(&meta->params[k],
                                    (const fv_ranges *)(use->args + meta->params[k].offset),
                                    num_requests, err));
    }
    return FV_OK;
}

static fv_status check_parents(const char *name, const fv_ints *parents, int64_t request,
                               int64_t first_row, int64_t num_rows, fv_error *err)
{
    for (int64_t row = 0; row < num_rows && first_row + row < parents->count; row++) {
        const int32_t parent = parents->data[first_row + row];
        if (parent >= -1 && parent < row) continue;
        return fv__fail_request(err, FV_E_INVALID, name, request, parent, row - 1,
                                "'%s': the parent of row %lld of %lld is %d; it must be a row of "
                                "the request before it, or -1: none",
                                name, (long long)row, (long long)num_rows, parent);
    }
    return FV_OK;
}

fv_status fv__problem_check_parents(const fv__problem *problem, int64_t request, int64_t first_row,
                                    int64_t num_rows, fv_error *err)
{
    for (int i = 0; i < problem->num_uses; i++) {
        const fv__use *use = &problem->uses[i];
        const fv__param *p = use->variant->meta.params;
        if (use->variant != fv__variant_find("tree")) continue;
        FV_TRY(check_parents(p->name, (const fv_ints *)(use->args + p->offset), request, first_row,
                             num_rows, err));
    }
    return FV_OK;
}
