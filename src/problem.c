/* SPDX-License-Identifier: Apache-2.0 */
/* problem.c -- checks an fv_problem and fills in its defaults. The arguments of its variants are
 * bind.c's. */
#include "problem.h"
#include "os.h"
#include "rope.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define MAX_HEADS 65536

static const char *const scale_kind_names[] = { "none", "tensor", "head", "token_head" };

/* -------------------------------------------------------------------------------- element types */

static fv_status read_dtype(const char *name, const char *field, bool narrow, fv__dtype *out,
                            fv_error *err)
{
    char list[200];
    size_t n = 0;
    for (int i = 0; i < FV__NUM_DTYPES; i++)
        if (narrow || fv__dtypes[i].bits >= 16)
            n += (size_t)snprintf(list + n, sizeof list - n, "%s%s", n ? ", " : "",
                                  fv__dtypes[i].name);
    *out = fv__dtype_find(name);
    if (!name)
        return fv__fail(err, FV_E_INVALID, field, 0, 0,
                        "%s is NULL; it must name an element type: %s", field, list);
    if (*out == FV__DTYPE_NONE || (!narrow && fv__dtypes[*out].bits < 16))
        return fv__fail(err, FV_E_INVALID, field, 0, 0, "%s is \"%.32s\"; it must be one of %s",
                        field, name, list);
    return FV_OK;
}

static fv_status read_dtypes(const fv_problem *given, fv__problem *p, fv_error *err)
{
    FV_TRY(read_dtype(given->q, "problem.q", false, &p->q, err));
    FV_TRY(read_dtype(given->k, "problem.k", true, &p->k, err));
    FV_TRY(read_dtype(given->o, "problem.o", false, &p->o, err));
    p->v = p->k;
    if (!given->v && given->v_in_k) return FV_OK;
    FV_TRY(read_dtype(given->v, "problem.v", true, &p->v, err));
    if (given->v_in_k && p->v != p->k)
        return fv__fail(
            err, FV_E_INVALID, "problem.v", 0, 0,
            "problem.v is \"%s\" and problem.k \"%s\"; with v_in_k they are the same memory",
            given->v, given->k);
    return FV_OK;
}

static fv_status read_scale_kind(const char *name, const char *field, fv__scale_kind *out,
                                 fv_error *err)
{
    *out = FV__SCALE_NONE;
    for (int i = 0; name && i < FV__COUNT(scale_kind_names); i++)
        if (!strcmp(name, scale_kind_names[i])) {
            *out = (fv__scale_kind)i;
            return FV_OK;
        }
    if (!name) return FV_OK;
    return fv__fail(err, FV_E_INVALID, field, 0, 0,
                    "%s is \"%.32s\"; it must be none, tensor, head or token_head", field, name);
}

/* ---------------------------------------------------------------------------------- heads, dims */

static fv_status in_range(const char *field, int64_t value, int64_t low, int64_t high,
                          fv_error *err)
{
    if (value >= low && value <= high) return FV_OK;
    return fv__fail(err, FV_E_INVALID, field, value, value < low ? low : high,
                    "%s is %lld; it must be %lld to %lld", field, (long long)value, (long long)low,
                    (long long)high);
}

static fv_status read_heads(const fv_problem *given, fv__problem *p, fv_error *err)
{
    p->num_q_heads = given->num_q_heads;
    p->num_kv_heads = given->num_kv_heads ? given->num_kv_heads : given->num_q_heads;
    FV_TRY(in_range("problem.num_q_heads", p->num_q_heads, 1, MAX_HEADS, err));
    FV_TRY(in_range("problem.num_kv_heads", p->num_kv_heads, 1, MAX_HEADS, err));
    if (p->num_q_heads % p->num_kv_heads)
        return fv__fail(err, FV_E_INVALID, "problem.num_kv_heads", p->num_kv_heads, p->num_q_heads,
                        "problem.num_kv_heads is %d and problem.num_q_heads %d; the first must "
                        "divide the second",
                        p->num_kv_heads, p->num_q_heads);
    p->group = p->num_q_heads / p->num_kv_heads;
    return FV_OK;
}

static fv_status read_dims(const fv_problem *given, fv__problem *p, fv_error *err)
{
    p->dim_qk = given->dim_qk;
    p->dim_v = given->dim_v ? given->dim_v : given->dim_qk;
    p->qk_tail = given->qk_tail;
    p->v_in_k = given->v_in_k;
    FV_TRY(in_range("problem.dim_qk", p->dim_qk, 1, FV__MAX_DIM, err));
    FV_TRY(in_range("problem.dim_v", p->dim_v, 1, FV__MAX_DIM, err));
    FV_TRY(in_range("problem.qk_tail", p->qk_tail, 0, p->dim_qk - 1, err));
    if (p->v_in_k && p->dim_v > p->dim_qk - p->qk_tail)
        return fv__fail(
            err, FV_E_INVALID, "problem.dim_v", p->dim_v, p->dim_qk - p->qk_tail,
            "problem.dim_v is %d; with v_in_k it is at most the width of k without its tail, %d",
            p->dim_v, p->dim_qk - p->qk_tail);
    return FV_OK;
}

/* Elements narrower than a byte share bytes and scales: whole groups. */
static fv_status check_groups(fv__dtype dtype, const char *field, const char *what, int32_t dim, fv_error *err)
{
    const int group = dtype == FV__DTYPE_int4 ? 32 : 16;
    if (!fv__dtype_has_blocks(dtype) || dim % group == 0) return FV_OK;
    return fv__fail(err, FV_E_INVALID, field, dim, group,
                    "%s is %d; %s %s have a scale per %d elements%s: a multiple of %d", field, dim,
                    fv__dtypes[dtype].name, what, group, dtype == FV__DTYPE_int4 ? " or 64" : "", group);
}

static fv_status check_blocks(const fv__problem *p, fv_error *err)
{
    if (fv__dtype_has_blocks(p->k) && p->qk_tail)
        return fv__fail(err, FV_E_UNSUPPORTED, "problem.qk_tail", p->qk_tail, 0,
                        "problem.qk_tail is %d; %s keys have no tail", p->qk_tail,
                        fv__dtypes[p->k].name);
    FV_TRY(check_groups(p->k, "problem.dim_qk", "keys", p->dim_qk, err));
    return check_groups(p->v, "problem.dim_v", "values", p->dim_v, err);
}

static fv_status read_numbers(const fv_problem *given, fv__problem *p, fv_error *err)
{
    p->scale = given->scale != 0 ? (float)given->scale : (float)(1 / sqrt((double)p->dim_qk));
    if (!isfinite(p->scale) || p->scale == 0)
        return fv__fail(err, FV_E_INVALID, "problem.scale", 0, 0,
                        "problem.scale is %g; as a 32-bit float it must be finite and not 0",
                        given->scale);
    p->lse_base2 = given->lse_base2;
    p->alignment = given->alignment ? given->alignment : 16;
    if (p->alignment < 1 || p->alignment > 4096 || (p->alignment & (p->alignment - 1)))
        return fv__fail(err, FV_E_INVALID, "problem.alignment", p->alignment, 4096,
                        "problem.alignment is %d; it must be a power of two up to 4096",
                        p->alignment);
    FV_TRY(read_scale_kind(given->k_scale, "problem.k_scale", &p->k_scale, err));
    FV_TRY(read_scale_kind(given->v_scale, "problem.v_scale", &p->v_scale, err));
    if (p->v_in_k && p->v_scale != FV__SCALE_NONE)
        return fv__fail(
            err, FV_E_INVALID, "problem.v_scale", p->v_scale, 0,
            "problem.v_scale is \"%s\"; with v_in_k the values are K as it is read, with k_scale",
            given->v_scale);
    return FV_OK;
}

/* ---------------------------------------------------------------------------------- page order */

enum { TILE_TOKENS = 16, TILE_DIMS = 32 };

fv_status fv__page_order_read(const char *name, const char *field, bool *tiled, fv_error *err)
{
    *tiled = name && !strcmp(name, "tiles");
    if (!name || *tiled || !strcmp(name, "rows")) return FV_OK;
    return fv__fail(err, FV_E_INVALID, field, 0, 0, "%s is \"%.32s\"; it must be rows or tiles", field,
                    name);
}

static fv_status check_tiled(const char *field, const char *what, fv__dtype dtype, int32_t dim,
                             fv_error *err)
{
    const int32_t bits = fv__dtypes[dtype].bits;
    if (bits != 16)
        return fv__fail(err, FV_E_UNSUPPORTED, field, bits, 16,
                        "%s is \"tiles\" and %s %s; pages of tiles hold f16 or bf16", field, what,
                        fv__dtypes[dtype].name);
    if (dim % TILE_DIMS)
        return fv__fail(err, FV_E_UNSUPPORTED, field, dim, TILE_DIMS,
                        "%s is \"tiles\" and %s %d wide; tiles need a multiple of %d", field, what,
                        dim, TILE_DIMS);
    return FV_OK;
}

fv_status fv__page_order_types(const char *field, fv__dtype k, int32_t dim_k, fv__dtype v,
                               int32_t dim_v, fv_error *err)
{
    FV_TRY(check_tiled(field, "K is", k, dim_k, err));
    return dim_v ? check_tiled(field, "V is", v, dim_v, err) : FV_OK;
}

fv_status fv__page_order_size(const char *field, int32_t page_size, fv_error *err)
{
    if (page_size && page_size % TILE_TOKENS == 0) return FV_OK;
    return fv__fail(err, FV_E_INVALID, field, page_size, TILE_TOKENS,
                    "%s is %d and page_order \"tiles\": such pages hold a multiple of %d tokens%s",
                    field, page_size, TILE_TOKENS,
                    page_size ? "" : "; keys that are not in pages lie in rows");
}

static fv_status read_page_order(const fv_problem *given, fv__problem *p, fv_error *err)
{
    FV_TRY(fv__page_order_read(given->page_order, "problem.page_order", &p->tiled, err));
    if (!p->tiled) return FV_OK;
    if (p->qk_tail || p->v_in_k)
        return fv__fail(err, FV_E_UNSUPPORTED, "problem.page_order", 1, 0,
                        "problem.page_order is \"tiles\"; K with %s lies in rows",
                        p->qk_tail ? "a tail" : "V in it");
    return fv__page_order_types("problem.page_order", p->k, p->dim_qk, p->v, p->dim_v, err);
}

/* ------------------------------------------------------------------------------------- variants */

static fv_status unknown_variant(const char *name, const char *field, fv_error *err)
{
    char list[256];
    size_t n = 0;
    list[0] = 0;
    for (int i = 0; i < fv__variant_count() && n < sizeof list; i++)
        n += (size_t)snprintf(list + n, sizeof list - n, "%s%s", n ? ", " : "",
                              fv__variant_builtin(i)->meta.name);
    return fv__fail(err, FV_E_INVALID, field, 0, 0,
                    "%s: there is no variant \"%.32s\"; built in are %s", field, name ? name : "",
                    list);
}

static fv_status find_variant(const fv_variant_use *given, const char *field,
                              const fv_variant **out, fv_error *err)
{
    if (given->reserved)
        return fv__fail(err, FV_E_INVALID, field, given->reserved, 0,
                        "%s.reserved is %d and must be 0", field, given->reserved);
    *out = given->variant ? given->variant : fv__variant_find(given->name);
    if (!*out) return unknown_variant(given->name, field, err);
    if (given->name && strcmp(given->name, (*out)->meta.name))
        return fv__fail(err, FV_E_INVALID, field, 0, 0,
                        "%s has the name \"%.32s\" and the handle of \"%s\"", field, given->name,
                        (*out)->meta.name);
    return FV_OK;
}

static int find_param(const fv__variant_meta *meta, const char *name)
{
    for (int i = 0; i < meta->num_params; i++)
        if (!strcmp(meta->params[i].name, name)) return i;
    return -1;
}

static double number_of(const fv__use *use, const char *name)
{
    const int i = find_param(&use->variant->meta, name);
    return i < 0 || use->variant->meta.params[i].kind > FV__INT ? 0 : use->planned[i];
}

/* Which pairs turn: an even width within the head; without a bound (inf): all of it. */
static fv_status settle_pairs(const fv__problem *p, fv__use *use, const char *where, fv_error *err)
{
    const int at = use->variant->meta.pairs_dim;
    if (at < 0) return FV_OK;
    const fv__param *param = &use->variant->meta.params[at];
    int32_t *dim = (int32_t *)(use->args + param->offset);
    if (*dim == FV__NO_BOUND) *dim = p->dim_qk & ~1;
    use->planned[at] = *dim;
    if (*dim >= 0 && *dim <= p->dim_qk && *dim % 2 == 0) return FV_OK;
    return fv__fail(err, FV_E_INVALID, where, *dim, p->dim_qk,
                    "%s: %s is %d; it must be even and at most dim_qk, %d", where, param->name,
                    *dim, p->dim_qk);
}

/* room: NULL, or where the frequencies go. */
static fv_status settle_frequencies(fv__use *use, float *room, const char *where, fv_error *err)
{
    const fv__variant_meta *meta = &use->variant->meta;
    for (int i = 0; i < meta->num_params; i++) {
        const fv__param *param = &meta->params[i];
        if (param->dflt != FV__DEFAULT_FREQUENCIES || use->given[i]) continue;
        const int32_t dim = *(const int32_t *)(use->args + meta->params[param->count].offset);
        if (dim < 0 || dim > FV__MAX_DIM || dim % 2)
            return fv__fail(err, FV_E_INVALID, where, dim, FV__MAX_DIM,
                            "%s: rotary_dim is %d; it must be even and at most %d", where, dim,
                            FV__MAX_DIM);
        const fv__rope_numbers numbers = {
            number_of(use, "base"),
            number_of(use, "factor"),
            number_of(use, "low_freq_factor"),
            number_of(use, "high_freq_factor"),
            number_of(use, "original_context"),
        };
        if (!room) room = use->owned = fv__os_alloc(NULL, FV__MAX_DIM / 2 * sizeof(float));
        if (!room)
            return fv__fail(err, FV_E_NO_MEMORY, where, 0, 0, "%s: no memory for its frequencies",
                            where);
        FV_TRY(fv__rope_frequencies(&numbers, dim, where, room, err));
        *(fv_floats *)(use->args + param->offset) = (fv_floats){ room, dim / 2 };
    }
    return FV_OK;
}

static fv_status read_use(const fv_problem *given, int i, float *room, fv__problem *p,
                          fv_error *err)
{
    const fv_variant_use *from = &given->variants[i];
    fv__use *use = &p->uses[i];
    char field[48], where[48];
    snprintf(field, sizeof field, "problem.variants[%d]", i);
    snprintf(where, sizeof where, "problem.variants[%d].args", i);
    FV_TRY(find_variant(from, field, &use->variant, err));
    p->hooks |= use->variant->meta.hooks;
    fv__use_defaults(use);
    FV_TRY(fv__use_bind(p, i, where, from->args, from->num_args, err));
    FV_TRY(settle_pairs(p, use, field, err));
    return settle_frequencies(use, room, field, err);
}

/* What cannot stand together. */
static fv_status check_hooks(const fv__problem *p, fv_error *err)
{
    int count[FV__NUM_HOOKS] = { 0 };
    for (int i = 0; i < p->num_uses; i++)
        for (int hook = 0; hook < FV__NUM_HOOKS; hook++)
            count[hook] += (int)(p->uses[i].variant->meta.hooks >> hook & 1);
    if (count[FV__HOOK_WEIGHT] > 1)
        return fv__fail(err, FV_E_INVALID, "problem.variants", count[FV__HOOK_WEIGHT], 1,
                        "%d variants replace the softmax (FV_WEIGHT); one may",
                        count[FV__HOOK_WEIGHT]);
    if (count[FV__HOOK_KEY_SUM] > 1)
        return fv__fail(err, FV_E_INVALID, "problem.variants", count[FV__HOOK_KEY_SUM], 1,
                        "%d variants sum over keys (FV_KEY_SUM); one may", count[FV__HOOK_KEY_SUM]);
    if (count[FV__HOOK_WEIGHT] &&
        (count[FV__HOOK_SINK] || count[FV__HOOK_KEY_SUM] || count[FV__HOOK_ROW_MAX]))
        return fv__fail(err, FV_E_INVALID, "problem.variants", 1, 0,
                        "a variant replaces the softmax (FV_WEIGHT), so there is no denominator "
                        "that a sink or key sums could use, and no maximum of a row");
    return FV_OK;
}

/* The end is reached only with every problem-bound parameter known. */
static fv_status read_uses(const fv_problem *given, fv__frequencies *room, fv__problem *p,
                           fv_error *err)
{
    FV_TRY(in_range("problem.num_variants", given->num_variants, 0, FV__MAX_VARIANTS, err));
    if (given->num_variants && !given->variants)
        return fv__fail(err, FV_E_INVALID, "problem.variants", 0, given->num_variants,
                        "problem.variants is NULL and num_variants %d", given->num_variants);
    p->num_uses = given->num_variants;
    for (int i = 0; i < p->num_uses; i++)
        FV_TRY(read_use(given, i, room ? (*room)[i] : NULL, p, err));
    FV_TRY(check_hooks(p, err));
    return fv__problem_bound(p, FV__BIND_PROBLEM, err);
}

/* ---------------------------------------------------------------------------------------------- */

fv_status fv__problem_init_in(const fv_problem *given, fv__frequencies *room, fv__problem *out,
                              fv_error *err)
{
    memset(out, 0, sizeof *out);
    if (!given) return fv__fail(err, FV_E_INVALID, "problem", 0, 0, "problem is NULL");
    FV_TRY(
        fv__check_reserved(given->reserved, FV__COUNT(given->reserved), "problem.reserved", err));
    FV_TRY(read_dtypes(given, out, err));
    FV_TRY(read_heads(given, out, err));
    FV_TRY(read_dims(given, out, err));
    FV_TRY(check_blocks(out, err));
    FV_TRY(read_numbers(given, out, err));
    FV_TRY(read_page_order(given, out, err));
    const fv_status status = read_uses(given, room, out, err);
    if (status != FV_OK) fv__problem_free(out);
    return status;
}

fv_status fv__problem_init(const fv_problem *given, fv__problem *out, fv_error *err)
{
    return fv__problem_init_in(given, NULL, out, err);
}

void fv__problem_free(fv__problem *problem)
{
    for (int i = 0; i < FV__MAX_VARIANTS; i++) {
        fv__os_free(NULL, problem->uses[i].owned, FV__MAX_DIM / 2 * sizeof(float));
        problem->uses[i].owned = NULL;
    }
}

bool fv__problem_has_bits(const fv__problem *problem)
{
    for (int i = 0; i < problem->num_uses; i++) {
        const fv__variant_meta *meta = &problem->uses[i].variant->meta;
        for (int k = 0; k < meta->num_params; k++)
            if (meta->params[k].kind == FV__BITS) return true;
    }
    return false;
}
