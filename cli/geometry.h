/* SPDX-License-Identifier: Apache-2.0 */
/* geometry.h -- the attention layers of models, by name or by hand: heads, widths, windows, rotary
 * embedding. */
#ifndef GEOMETRY_H
#define GEOMETRY_H

#include "foveal/foveal.h"

#define GEOMETRY_MAX_KINDS 2

/* Layers that differ in nothing that a plan is made from. */
typedef struct layer_kind {
    const char *name;
    int64_t window;                     /* keys that a row sees before itself; -1: all */
    fv_rope_desc rope;                  /* of K (of its tail where there is one) and of Q */
} layer_kind;

typedef struct geometry {
    const char *name;
    int32_t layers;                     /* of the whole model; 0: by hand, as many as one likes */
    int32_t q_heads, kv_heads;
    int32_t dim_qk, dim_v;              /* dim_qk includes the tail */
    int32_t tail;                       /* last elements of q and k that lie in tensors of their own
                                           and are rotated; 0: none */
    bool v_in_k;                        /* V is the first dim_v elements of K */
    double scale;                       /* 0: 1/sqrt(dim_qk) */
    int32_t num_kinds;
    int32_t full_every;                 /* two kinds: layer i is of kind 1 when i + 1 is a multiple
                                           of this, else of kind 0 */
    layer_kind kinds[GEOMETRY_MAX_KINDS];
} geometry;

#define GEOMETRY_NAMES \
    "llama-3.1-8b llama-3.1-70b qwen3-30b-a3b gemma-3-270m smollm2-135m deepseek-v3-mla"

bool geometry_find(const char *name, geometry *out);

/* "32/8" query and KV heads; dim_v 0: dim; window -1: none. false: *why says what was expected. */
bool geometry_by_hand(const char *heads, int64_t dim, int64_t dim_v, int64_t window, geometry *out,
                      const char **why);

int geometry_kind(const geometry *g, int layer);
int geometry_default_layers(const geometry *g);             /* the fewest that hold every kind, at
                                                               least two */
int64_t geometry_token_elements(const geometry *g);       /* of K and V of one token in one layer */

#endif
