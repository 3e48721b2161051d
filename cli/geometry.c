/* SPDX-License-Identifier: Apache-2.0 */
/* geometry.c -- the table of models. Numbers from the models' published configurations. */
#include "geometry.h"
#include "cli.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LLAMA_ROPE                                                                                \
    { .rotary_dim = 128, .base = 500000, .factor = 8, .low_freq_factor = 1, .high_freq_factor = 4,\
      .original_context = 8192 }

static const geometry models[] = {
    { .name = "llama-3.1-8b", .layers = 32, .q_heads = 32, .kv_heads = 8, .dim_qk = 128,
      .dim_v = 128, .num_kinds = 1, .kinds = { { "full", -1, LLAMA_ROPE } } },
    { .name = "llama-3.1-70b", .layers = 80, .q_heads = 64, .kv_heads = 8, .dim_qk = 128,
      .dim_v = 128, .num_kinds = 1, .kinds = { { "full", -1, LLAMA_ROPE } } },
    { .name = "qwen3-30b-a3b", .layers = 48, .q_heads = 32, .kv_heads = 4, .dim_qk = 128,
      .dim_v = 128, .num_kinds = 1,
      .kinds = { { "full", -1, { .rotary_dim = 128, .base = 1e6 } } } },
    /* A window of 512 keys counts the row's own: 511 before it. Every sixth layer sees all. */
    { .name = "gemma-3-270m", .layers = 18, .q_heads = 4, .kv_heads = 1, .dim_qk = 256,
      .dim_v = 256, .num_kinds = 2, .full_every = 6,
      .kinds = { { "window", 511, { .rotary_dim = 256, .base = 1e4 } },
                 { "full", -1, { .rotary_dim = 256, .base = 1e6 } } } },
    { .name = "smollm2-135m", .layers = 30, .q_heads = 9, .kv_heads = 3, .dim_qk = 64, .dim_v = 64,
      .num_kinds = 1, .kinds = { { "full", -1, { .rotary_dim = 64, .base = 1e5 } } } },
    /* Latent attention with the up-projections absorbed: one KV head of 512 + 64, V is its first
     * 512. */
    { .name = "deepseek-v3-mla", .layers = 61, .q_heads = 128, .kv_heads = 1, .dim_qk = 576,
      .dim_v = 512, .tail = 64, .v_in_k = true, .num_kinds = 1,
      .kinds = { { "latent", -1, { .rotary_dim = 64, .interleaved = true } } } },
};

/* DeepSeek-V3's stretched frequencies (YaRN: factor 40, original context 4096, beta 32 and 1, base
 * 10000). Pairs that turn more than beta_fast times within the original context stay, those below
 * beta_slow are divided by the factor, in between they blend. */
static void yarn(float *out, int pairs)
{
    const double base = 1e4, factor = 40, context = 4096, pi = acos(-1);
    const double low = floor(pairs * log(context / (32 * 2 * pi)) / log(base));
    const double high = ceil(pairs * log(context / (1 * 2 * pi)) / log(base));
    for (int i = 0; i < pairs; i++) {
        const double f = pow(base, -(double)i / pairs),
                     blend = fmin(1, fmax(0, (i - low) / (high - low)));
        out[i] = (float)(f * (1 - blend) + f / factor * blend);
    }
}

bool geometry_find(const char *name, geometry *out)
{
    static float frequencies[32];               /* the same values whenever they are written */
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        if (strcmp(models[i].name, name))
            continue;
        *out = models[i];
        if (out->v_in_k) {
            /* Its attention temperature, squared into the scale of a head of 128 + 64. */
            const double stretch = 0.1 * log(40) + 1;
            yarn(frequencies, 32);
            out->kinds[0].rope.frequencies = frequencies;
            out->scale = stretch * stretch / sqrt(128 + 64);
        }
        return true;
    }
    return false;
}

bool geometry_by_hand(const char *heads, int64_t dim, int64_t dim_v, int64_t window, geometry *out,
                      const char **why)
{
    char q[16];
    const char *slash = strchr(heads, '/');
    int64_t num_q, num_kv;
    *why = "heads to be like 32/8: query heads / KV heads, each 1 to 1024";
    if (!slash || slash - heads >= (int)sizeof q)
        return false;
    memcpy(q, heads, (size_t)(slash - heads));
    q[slash - heads] = 0;
    if (!cli_int(q, 1, 1024, &num_q) || !cli_int(slash + 1, 1, 1024, &num_kv))
        return false;
    *why = "the query heads to be a multiple of the KV heads";
    if (num_q % num_kv)
        return false;
    *out = (geometry){ .name = "by hand", .q_heads = (int32_t)num_q,
                       .kv_heads = (int32_t)num_kv, .dim_qk = (int32_t)dim,
                       .dim_v = (int32_t)(dim_v ? dim_v : dim), .num_kinds = 1,
                       .kinds = { { window >= 0 ? "window" : "full",
                                    window,
                                    { .rotary_dim = (int32_t)(dim - dim % 2), .base = 1e4 } } } };
    return true;
}

int geometry_kind(const geometry *g, int layer)
{
    return g->num_kinds == 2 && (layer + 1) % g->full_every == 0;
}

int geometry_default_layers(const geometry *g)
{
    return g->num_kinds == 2 ? g->full_every : 2;
}

int64_t geometry_token_elements(const geometry *g)
{
    return (int64_t)g->kv_heads * (g->dim_qk + (g->v_in_k ? 0 : g->dim_v));
}
