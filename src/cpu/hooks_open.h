/* SPDX-License-Identifier: Apache-2.0 */
/* hooks_open.h -- goes before a variant's text: its declarations become an argument struct, its hooks inline functions fv_do_NAME_hook.
 * FV_VARIANT_NAME is the variant; hooks_close.h goes behind. Includes vocabulary.h's words and hooks_abi.h's structs. */
#ifndef FV__HOOKS_OPEN_H
#define FV__HOOKS_OPEN_H

#define FV_CAT_(a, b, c) a##_##b##_##c
#define FV_CAT(a, b, c) FV_CAT_(a, b, c)
#define FV_DO(hook) FV_CAT(fv_do, FV_VARIANT_NAME, hook)
#define FV_CALL(hook) FV_CAT(fv_call, FV_VARIANT_NAME, hook)
#define FV_ARGS FV_CAT(fv_args, FV_VARIANT_NAME, s)

#include "hooks_declare.h"

/* `at` for keys i and on; for elements i and on of one key. */
VFN struct v_at v_at_keys(const fv__at *at, int i)
{
    return (struct v_at){ .request = v_seti(at->request), .row = v_seti(at->row), .batch_row = v_seti(at->batch_row), .head = v_seti(at->head),
                          .key = v_loadi(at->key + i), .k_pos = v_loadi(at->k_pos + i), .q_pos = v_seti(at->q_pos),
                          .num_rows = v_seti(at->num_rows), .num_keys = v_seti(at->num_keys), .num_q_heads = v_seti(at->num_q_heads),
                          .index = v_seti(0), .consecutive = at->consecutive };
}

VFN struct v_at v_at_elements(const fv__at *at, int i)
{
    return (struct v_at){ .request = v_seti(at->request), .row = v_seti(at->row), .batch_row = v_seti(at->batch_row), .head = v_seti(at->head),
                          .key = v_seti(at->key ? at->key[0] : 0), .k_pos = v_seti(at->k_pos ? at->k_pos[0] : 0), .q_pos = v_seti(at->q_pos),
                          .num_rows = v_seti(at->num_rows), .num_keys = v_seti(at->num_keys), .num_q_heads = v_seti(at->num_q_heads),
                          .index = v_iota() + i, .consecutive = false };
}

/* Pairs i and on of x: pair j is (x[j], x[j + half]), or (x[2j], x[2j + 1]). n of them are there. */
VFN v_pair v_load_pairs(const float *x, int i, int n, int half, bool interleaved)
{
    float lo[V_LANES] = { 0 }, hi[V_LANES] = { 0 };
    for (int l = 0; l < n; l++) {
        lo[l] = interleaved ? x[2 * (i + l)] : x[i + l];
        hi[l] = interleaved ? x[2 * (i + l) + 1] : x[i + l + half];
    }
    return (v_pair){ v_load(lo), v_load(hi) };
}

VFN void v_store_pairs(float *x, int i, int n, int half, bool interleaved, v_pair pair)
{
    float lo[V_LANES], hi[V_LANES];
    v_store(lo, pair.lo);
    v_store(hi, pair.hi);
    for (int l = 0; l < n; l++) {
        x[interleaved ? 2 * (i + l) : i + l] = lo[l];
        x[interleaved ? 2 * (i + l) + 1 : i + l + half] = hi[l];
    }
}

#endif

struct FV_ARGS;
