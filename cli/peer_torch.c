/* SPDX-License-Identifier: Apache-2.0 */
/* peer_torch.c -- PyTorch's flash attention for CPUs, through libtorch's C functions for compiled
 * models (torch/csrc/inductor/aoti_torch/c/shim.h), which need no Python.
 *
 * It is what scaled_dot_product_attention dispatches to on a CPU. It is given grouped heads as they
 * are, as enable_gqa does; to releases that refuse them, K and V repeated beforehand. The second
 * way is for a decode and costs no copy: the query heads of a group are given as rows of one head,
 * which spares the kernel's slow path for single rows.
 */
#include "peer.h"
#include "cli.h"
#include "element.h"

#include <stdlib.h>
#include <string.h>

typedef struct tensor tensor;           /* AtenTensorOpaque */

typedef struct torch {
    int32_t (*from_blob)(void *data, int64_t ndim, const int64_t *shape, const int64_t *stride,
                         int64_t offset, int32_t dtype, int32_t device_type, int32_t device,
                         tensor **out);
    int32_t (*destroy)(tensor *t);
    int32_t (*data)(tensor *t, void **out);
    int32_t (*stride)(tensor *t, int64_t axis, int64_t *out);
    int32_t (*bf16)(void);
    int32_t (*cpu)(void);
    int32_t (*attend)(tensor *q, tensor *k, tensor *v, double dropout, int32_t causal,
                      tensor **mask, double *scale, tensor **out, tensor **lse);
} torch;

static const char *const names[] = {
    "aoti_torch_create_tensor_from_blob", "aoti_torch_delete_tensor_object",
    "aoti_torch_get_data_ptr", "aoti_torch_get_stride", "aoti_torch_dtype_bfloat16",
    "aoti_torch_device_type_cpu", "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu",
    NULL
};

/* These two came later than those above. false: torch has another number of threads. */
static bool ask_late(void *library, int threads, peer *p)
{
    static const char *const version[] = { "aoti_torch_abi_version", NULL },
                             *const count[] = { "torch_get_num_threads", NULL };
    uint64_t (*get_version)(void);
    int32_t (*get_count)(uint32_t *);
    uint32_t has = (uint32_t)threads;
    if (peer_functions(library, version, &get_version, NULL)) {
        const uint64_t v = get_version();       /* major, minor, patch: the three top bytes */
        snprintf(p->name, sizeof p->name, "torch %d.%d.%d bf16", (int)(v >> 56),
                 (int)(v >> 48 & 255), (int)(v >> 40 & 255));
    }
    if (peer_functions(library, count, &get_count, NULL))
        get_count(&has);
    if (has != (uint32_t)threads)
        snprintf(p->why, sizeof p->why, "it has %u threads instead of %d", has, threads);
    return has == (uint32_t)threads;
}

static void *open_torch(void *library, int threads, peer *p)
{
    torch *t = need(1, sizeof *t);
    if (peer_functions(library, names, t, p) && ask_late(library, threads, p))
        return t;
    free(t);
    return NULL;
}

typedef struct prepared {
    const torch *torch;
    const peer_problem *p;
    int64_t heads, rows;                /* of q as torch sees it */
    bool causal;
    uint16_t *repeated[2];              /* K and V, or NULL */
    tensor *q, *k, *v, *o, *lse;
} prepared;

static tensor *make(const torch *t, void *data, int64_t requests, int64_t heads, int64_t rows,
                    int64_t dim)
{
    tensor *out = NULL;
    const int64_t shape[] = { requests, heads, rows, dim },
                  stride[] = { heads * rows * dim, rows * dim, dim, 1 };
    return t->from_blob(data, 4, shape, stride, 0, t->bf16(), t->cpu(), 0, &out) ? NULL : out;
}

/* Each of `heads` pieces so often that there are q_heads. */
static uint16_t *repeat(const peer_problem *p, const uint16_t *from)
{
    const int64_t piece = p->keys * p->dim, group = p->q_heads / p->kv_heads,
                  pieces = p->requests * p->q_heads;
    uint16_t *out = need((size_t)(pieces * piece), sizeof *out);
    for (int64_t i = 0; i < pieces; i++)
        memcpy(out + i * piece, from + i / group * piece, (size_t)piece * sizeof *out);
    return out;
}

static void drop_output(prepared *s)
{
    if (s->o)
        s->torch->destroy(s->o);
    if (s->lse)
        s->torch->destroy(s->lse);
    s->o = s->lse = NULL;
}

static void close_torch(void *state)
{
    prepared *s = state;
    tensor *const inputs[] = { s->q, s->k, s->v };
    drop_output(s);
    for (int i = 0; i < 3; i++)
        if (inputs[i])
            s->torch->destroy(inputs[i]);
    free(s->repeated[0]);
    free(s->repeated[1]);
    free(s);
}

static bool run_torch(void *state)
{
    prepared *s = state;
    double scale = (double)s->p->scale;
    drop_output(s);
    return !s->torch->attend(s->q, s->k, s->v, 0, s->causal, NULL, &scale, &s->o, &s->lse);
}

static void *prepare_as(const torch *t, const peer_problem *p, bool fold, bool expand)
{
    prepared *s = need(1, sizeof *s);
    const int64_t kv_heads = expand ? p->q_heads : p->kv_heads;
    *s = (prepared){ .torch = t, .p = p, .causal = p->causal,
                     .heads = fold ? p->kv_heads : p->q_heads,
                     .rows = fold ? p->q_heads / p->kv_heads : p->rows };
    if (expand) {
        s->repeated[0] = repeat(p, p->k);
        s->repeated[1] = repeat(p, p->v);
    }
    s->q = make(t, p->q, p->requests, s->heads, s->rows, p->dim);
    s->k = make(t, expand ? s->repeated[0] : p->k, p->requests, kv_heads, p->keys, p->dim);
    s->v = make(t, expand ? s->repeated[1] : p->v, p->requests, kv_heads, p->keys, p->dim);
    if (s->q && s->k && s->v && run_torch(s))
        return s;
    close_torch(s);
    return NULL;
}

static void *prepare_torch(void *functions, const peer_problem *p, int way)
{
    if (way)
        return p->rows == 1 ? prepare_as(functions, p, true, false) : NULL;
    void *grouped = prepare_as(functions, p, false, false);
    return grouped ? grouped : prepare_as(functions, p, false, true);
}

/* A row of the output, which torch lays as it likes. */
static void row_torch(void *state, int64_t request, int64_t head, int64_t row, double *out)
{
    const prepared *s = state;
    const element_type *bf16 = element_find("bf16");
    const int64_t place = head * s->p->rows + row,      /* heads of a group may have become rows */
                  index[] = { request, place / s->rows, place % s->rows };
    void *data = NULL;
    int64_t at = 0, stride = 0;
    s->torch->data(s->o, &data);
    for (int axis = 0; axis < 3; axis++) {
        s->torch->stride(s->o, axis, &stride);
        at += index[axis] * stride;
    }
    for (int64_t i = 0; i < s->p->dim; i++)
        out[i] = bf16->load((const uint16_t *)data + at + i);
}

const peer_kind peer_torch = {
    .name = "torch bf16", .kv_dtype = "bf16", .file = "libtorch_cpu.so",
    .package = "torch/lib", .ways = { "", " folded" }, .open = open_torch, .shut = free,
    .prepare = prepare_torch, .run = run_torch, .row = row_torch, .close = close_torch,
};
