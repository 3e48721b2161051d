/* SPDX-License-Identifier: Apache-2.0 */
/* peer_ggml.c -- llama.cpp's attention for CPUs: ggml_flash_attn_ext on ggml's CPU backend, with K
 * and V in f16, its fastest type, or in q8_0.
 *
 * Builds differ in what is one library and in which versions for which CPU there are: the
 * registry of backends (ggml_backend_load_all_from_path) hides that. All that crosses is opaque but
 * ggml_init_params, which has not changed since it was introduced; numbers of types are checked by
 * their names. Queries are f32 and a prompt's mask is a tensor of 0 and -inf, as llama.cpp does it;
 * a decode has no mask. The first way lays keys as llama.cpp's cache does, heads within keys; the
 * second each head's keys in one piece.
 */
#include "peer.h"
#include "cli.h"
#include "element.h"

#include <stdlib.h>
#include <string.h>

enum { TYPE_F32 = 0, TYPE_F16 = 1, TYPE_Q8_0 = 8, DEVICE_CPU = 0 };

typedef struct init_params {
    size_t mem_size;
    void *mem_buffer;
    bool no_alloc;
} init_params;

typedef struct context context;         /* ggml_context and so on */
typedef struct tensor tensor;
typedef struct graph graph;
typedef struct backend backend;
typedef struct buffer buffer;

typedef struct ggml {
    context *(*init)(init_params params);
    void (*free)(context *c);
    tensor *(*new_tensor)(context *c, int type, int64_t n0, int64_t n1, int64_t n2, int64_t n3);
    tensor *(*permute)(context *c, tensor *t, int a0, int a1, int a2, int a3);
    tensor *(*attend)(context *c, tensor *q, tensor *k, tensor *v, tensor *mask, float scale,
                      float max_bias, float softcap);
    graph *(*new_graph)(context *c);
    void (*expand)(graph *g, tensor *t);
    size_t (*tensor_overhead)(void);
    size_t (*graph_overhead)(void);
    const char *(*type_name)(int type);
    size_t (*row_size)(int type, int64_t n);
    void *(*data)(const tensor *t);
    size_t (*quantize)(int type, const float *from, void *to, int64_t start, int64_t rows,
                       int64_t row_elements, const float *matrix);
    void (*log_set)(void (*log)(int level, const char *text, void *user), void *user);
    void (*load_all)(const char *folder);
    backend *(*backend_init)(int device_type, const char *params);
    void (*backend_free)(backend *b);
    void *(*device_of)(backend *b);
    void *(*registry_of)(void *device);
    void *(*address)(void *registry, const char *name);
    buffer *(*allocate)(context *c, backend *b);
    void (*buffer_free)(buffer *b);
    int (*compute)(backend *b, graph *g);
    backend *cpu;                       /* not a function: behind them */
} ggml;

static const char *const names[] = {
    "ggml_init", "ggml_free", "ggml_new_tensor_4d", "ggml_permute", "ggml_flash_attn_ext",
    "ggml_new_graph", "ggml_build_forward_expand", "ggml_tensor_overhead", "ggml_graph_overhead",
    "ggml_type_name", "ggml_row_size", "ggml_get_data", "ggml_quantize_chunk", "ggml_log_set",
    "ggml_backend_load_all_from_path", "ggml_backend_init_by_type", "ggml_backend_free",
    "ggml_backend_get_device", "ggml_backend_dev_backend_reg", "ggml_backend_reg_get_proc_address",
    "ggml_backend_alloc_ctx_tensors", "ggml_backend_buffer_free", "ggml_backend_graph_compute",
    NULL
};

/* ---- the library ---- */

static void say_nothing(int level, const char *text, void *user)
{
    (void)level, (void)text, (void)user;
}

static bool start_cpu(ggml *g, void *library, int threads)
{
    char folder[1024];
    void (*set_threads)(backend *b, int threads);
    peer_folder(library, folder, sizeof folder);
    g->log_set(say_nothing, NULL);
    g->load_all(folder);
    if (!(g->cpu = g->backend_init(DEVICE_CPU, NULL))) {
        g->load_all(NULL);              /* where it was built to look */
        g->cpu = g->backend_init(DEVICE_CPU, NULL);
    }
    if (!g->cpu)
        return false;
    void *address = g->address(g->registry_of(g->device_of(g->cpu)), "ggml_backend_set_n_threads");
    memcpy(&set_threads, &address, sizeof address);
    if (address)
        set_threads(g->cpu, threads);
    return address != NULL;
}

static void *open_ggml(void *library, int threads, peer *p)
{
    static const char *const late[] = { "ggml_version", NULL };
    const char *(*version)(void);
    ggml *g = need(1, sizeof *g);
    if (peer_functions(library, late, &version, NULL))
        snprintf(p->name, sizeof p->name, "ggml %s%s", version(), strchr(p->kind->name, ' '));
    if (peer_functions(library, names, g, p)) {
        if (strcmp(g->type_name(TYPE_F16), "f16") || strcmp(g->type_name(TYPE_Q8_0), "q8_0"))
            snprintf(p->why, sizeof p->why, "its types have other numbers");
        else if (start_cpu(g, library, threads))
            return g;
        else
            snprintf(p->why, sizeof p->why, "it has no CPU backend");
    }
    free(g);
    return NULL;
}

static void shut_ggml(void *functions)
{
    ggml *g = functions;
    g->backend_free(g->cpu);
    free(g);
}

/* ---- a problem ---- */

typedef struct prepared {
    const ggml *g;
    const peer_problem *p;
    context *c;
    buffer *b;
    graph *graph;
    tensor *o;
} prepared;

/* K or V, as the tensor's type; `spread`: its heads lie within keys. */
static void store(const ggml *g, tensor *t, int type, const peer_problem *p, const uint16_t *from,
                  bool spread)
{
    const element_type *bf16 = element_find("bf16");
    const int64_t pieces = p->requests * p->kv_heads, dim = p->dim;
    const size_t row = g->row_size(type, dim);
    float *block = need((size_t)(p->keys * dim), sizeof *block);
    for (int64_t i = 0; i < pieces; i++, from += p->keys * dim) {
        const int64_t first = i / p->kv_heads * p->kv_heads * p->keys;  /* of its request */
        const int64_t at = spread ? first + i % p->kv_heads : i * p->keys;
        char *to = (char *)g->data(t) + (size_t)at * row;
        for (int64_t j = 0; j < p->keys * dim; j++)
            block[j] = (float)bf16->load(from + j);
        for (int64_t key = 0; key < p->keys; key++)
            g->quantize(type, block + key * dim,
                        to + (size_t)(key * (spread ? p->kv_heads : 1)) * row, 0, 1, dim, NULL);
    }
    free(block);
}

/* K or V without its numbers. *as_seen: [requests][heads][keys][dim] in ggml's axes. */
static tensor *make_cache(const ggml *g, context *c, int type, const peer_problem *p, bool spread,
                          tensor **as_seen)
{
    tensor *t = spread ? g->new_tensor(c, type, p->dim, p->kv_heads, p->keys, p->requests)
                       : g->new_tensor(c, type, p->dim, p->keys, p->kv_heads, p->requests);
    *as_seen = spread ? g->permute(c, t, 0, 2, 1, 3) : t;
    return t;
}

static void store_queries(const peer_problem *p, float *to)
{
    const element_type *bf16 = element_find("bf16");
    for (int64_t i = 0; i < p->requests * p->q_heads * p->rows * p->dim; i++)
        to[i] = (float)bf16->load(p->q + i);
}

static void store_mask(const peer_problem *p, uint16_t *to)
{
    const uint16_t minus_infinity = 0xfc00;     /* binary16 */
    for (int64_t row = 0; row < p->rows; row++)
        for (int64_t key = 0; key < p->keys; key++)
            *to++ = key > row ? minus_infinity : 0;
}

static void close_ggml(void *state)
{
    prepared *s = state;
    if (s->b)
        s->g->buffer_free(s->b);
    if (s->c)
        s->g->free(s->c);
    free(s);
}

static void *prepare_ggml(const ggml *g, const peer_problem *p, int type, bool spread)
{
    enum { TENSORS = 16 };
    prepared *s = need(1, sizeof *s);
    *s = (prepared){ .g = g, .p = p };
    s->c = g->init((init_params){ .mem_size = TENSORS * g->tensor_overhead() + g->graph_overhead(),
                                  .no_alloc = true });
    tensor *keys, *values, *k = make_cache(g, s->c, type, p, spread, &keys),
                           *v = make_cache(g, s->c, type, p, spread, &values),
                           *q = g->new_tensor(s->c, TYPE_F32, p->dim, p->rows, p->q_heads,
                                               p->requests),
                           *mask = p->causal
                                       ? g->new_tensor(s->c, TYPE_F16, p->keys, p->rows, 1, 1)
                                       : NULL;
    s->o = g->attend(s->c, q, keys, values, mask, p->scale, 0, 0);
    s->graph = g->new_graph(s->c);
    g->expand(s->graph, s->o);
    if (!(s->b = g->allocate(s->c, g->cpu))) {
        close_ggml(s);
        return NULL;
    }
    store_queries(p, g->data(q));
    store(g, k, type, p, p->k, spread);
    store(g, v, type, p, p->v, spread);
    if (mask)
        store_mask(p, g->data(mask));
    return s;
}

static void *prepare_f16(void *functions, const peer_problem *p, int way)
{
    return prepare_ggml(functions, p, TYPE_F16, way == 0);
}

static void *prepare_q8(void *functions, const peer_problem *p, int way)
{
    return prepare_ggml(functions, p, TYPE_Q8_0, way == 0);
}

static bool run_ggml(void *state)
{
    const prepared *s = state;
    return s->g->compute(s->g->cpu, s->graph) == 0;
}

/* The output is f32 [requests][rows][heads][dim]. */
static void row_ggml(void *state, int64_t request, int64_t head, int64_t row, double *out)
{
    const prepared *s = state;
    const peer_problem *p = s->p;
    const float *at = s->g->data(s->o);
    at += ((request * p->rows + row) * p->q_heads + head) * p->dim;
    for (int64_t i = 0; i < p->dim; i++)
        out[i] = (double)at[i];
}

#define GGML(title, type, prepare_type)                                                           \
    { .name = title, .kv_dtype = type, .file = "libggml.so",                                      \
      .needs = { "libggml-base.so", "libggml-cpu.so" },                                           \
      .package = "llama_cpp/lib:libggml/lib64:libggml/lib", .ways = { "", " by heads" },          \
      .open = open_ggml, .shut = shut_ggml, .prepare = prepare_type, .run = run_ggml,             \
      .row = row_ggml, .close = close_ggml }

const peer_kind peer_ggml_f16 = GGML("ggml f16", "bf16", prepare_f16);
const peer_kind peer_ggml_q8 = GGML("ggml q8_0", "int8", prepare_q8);
