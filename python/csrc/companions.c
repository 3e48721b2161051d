/* SPDX-License-Identifier: Apache-2.0 */
/* companions.c -- the module's functions of foveal/ops.h: norms, activations, softmax, filters, samples, verification. */
#include "types.h"

#include "foveal/ops.h"

typedef struct call {                   /* what each of them starts with: the context, the stream, and what is held meanwhile */
    context_object *context;
    fv_stream stream;
    fv_error err;
    holder h;
} call;

/* 0, or -1 with an exception set; then nothing is held. */
static int open_call(call *c, PyObject *context, PyObject *stream, PyObject *like)
{
    c->stream = NULL;
    c->context = as_context(context);
    if (!c->context) return -1;
    holder_init(&c->h);
    if (to_stream(stream, like, &c->context->where, &c->stream) != 0) {
        holder_release(&c->h);
        return -1;
    }
    c->h.stream = c->stream;
    return 0;
}

typedef struct array_arg {
    PyObject *object;                   /* NULL: absent */
    const char *name;
    fv_tensor *out;
    bool written;
} array_arg;

static int take_arrays(call *c, const array_arg *list, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (list[i].object && take_array(list[i].object, list[i].name, &c->context->where, list[i].written, list[i].out, &c->h) != 0) return -1;
    return 0;
}

#define TAKE_ARRAYS(c, list) take_arrays(c, list, sizeof(list) / sizeof(list)[0])

/* A number, or an array with an entry a row. `tensor` lives as long as the call. */
static int take_number(call *c, PyObject *object, const char *name, fv_arg *out, fv_tensor *tensor)
{
    if (!object || object == Py_None) return 0;
    if (PyFloat_Check(object) || PyLong_Check(object)) return take_double(object, name, &out->number);
    out->tensor = tensor;
    return take_array(object, name, &c->context->where, false, tensor, &c->h);
}

/* Integers of any size, by their low 64 bits. */
static int take_word(PyObject *object, const char *name, uint64_t *out)
{
    if (!object || object == Py_None) return 0;
    PyObject *index = PyNumber_Index(object);
    if (!index) {
        PyErr_Format(PyExc_TypeError, "%s must be an integer or an array of int64", name);
        return -1;
    }
    *out = PyLong_AsUnsignedLongLongMask(index);
    Py_DECREF(index);
    return PyErr_Occurred() ? -1 : 0;
}

static int take_state(call *c, PyObject *object, const char *name, uint64_t *number, fv_tensor *tensor)
{
    if (!object || object == Py_None || PyLong_Check(object)) return take_word(object, name, number);
    return take_array(object, name, &c->context->where, false, tensor, &c->h);
}

/* -------------------------------------------------------------------------------------------------- norms, activations */

static int read_norm(call *c, PyObject *const *given, fv_norm_desc *d)
{
    const array_arg arrays[] = { { given[1], "x", &d->x, false }, { given[2], "weight", &d->weight, false }, { given[3], "y", &d->y, true } };
    return TAKE_ARRAYS(c, arrays);
}

FUNCTION(rmsnorm)
{
    (void)module;
    static signature sig = { "rmsnorm", 4, { "!context", "!x", "!weight", "!y", "residual", "eps", "plus_one", "stream" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    fv_norm_desc d = { .eps = 1e-6 };
    fv_status s = FV_OK;
    call c;
    if (read_fast(&sig, args, nargs, kwnames, given) != 0 || open_call(&c, given[0], given[7], given[1]) != 0) return NULL;
    const array_arg residual[] = { { given[4], "residual", &d.residual, true } };
    const int bad = read_norm(&c, given, &d) != 0 || TAKE_ARRAYS(&c, residual) != 0 || take_double(given[5], "eps", &d.eps) != 0 ||
                    take_bool(given[6], "plus_one", &d.plus_one) != 0;
    if (!bad) RELEASING_ON_CPU(&c.context->where, s = fv_rmsnorm(c.context->ctx, &d, c.stream, &c.err));
    return finish_call(&c.h, bad, s, &c.err);
}

FUNCTION(layernorm)
{
    (void)module;
    static signature sig = { "layernorm", 4, { "!context", "!x", "!weight", "!y", "bias", "eps", "stream" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    fv_norm_desc d = { .eps = 1e-6 };
    fv_status s = FV_OK;
    call c;
    if (read_fast(&sig, args, nargs, kwnames, given) != 0 || open_call(&c, given[0], given[6], given[1]) != 0) return NULL;
    const array_arg bias[] = { { given[4], "bias", &d.bias, false } };
    const int bad = read_norm(&c, given, &d) != 0 || TAKE_ARRAYS(&c, bias) != 0 || take_double(given[5], "eps", &d.eps) != 0;
    if (!bad) RELEASING_ON_CPU(&c.context->where, s = fv_layernorm(c.context->ctx, &d, c.stream, &c.err));
    return finish_call(&c.h, bad, s, &c.err);
}

FUNCTION(act_and_mul)
{
    (void)module;
    static signature sig = { "act_and_mul", 4, { "!context", "!f", "!x", "!y", "stream" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    fv_tensor x, y;
    const char *f = NULL;
    fv_status s = FV_OK;
    call c;
    if (read_fast(&sig, args, nargs, kwnames, given) != 0 || open_call(&c, given[0], given[4], given[2]) != 0) return NULL;
    const array_arg arrays[] = { { given[2], "x", &x, false }, { given[3], "y", &y, true } };
    const int bad = take_text(given[1], "f", &f) != 0 || TAKE_ARRAYS(&c, arrays) != 0;
    if (!bad) RELEASING_ON_CPU(&c.context->where, s = fv_act_and_mul(c.context->ctx, f, &x, &y, c.stream, &c.err));
    return finish_call(&c.h, bad, s, &c.err);
}

FUNCTION(warm_ops)
{
    (void)module;
    static signature sig = { "warm_ops", 1, { "!context" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    fv_error err;
    if (read_fast(&sig, args, nargs, kwnames, given) != 0) return NULL;
    const context_object *context = as_context(given[0]);
    if (!context) return NULL;
    fv_status s;
    Py_BEGIN_ALLOW_THREADS
    s = fv_ops_warm(context->ctx, &err);
    Py_END_ALLOW_THREADS
    if (s != FV_OK) return raise_status(s, &err);
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------------------------------------------------- filters */

typedef fv_status filter_fn(fv_ctx *ctx, const fv_tensor *x, const fv_arg *param, const fv_tensor *y, fv_stream stream, fv_error *err);

static PyObject *filter(signature *sig, filter_fn *f, const char *const *names, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *given[MAX_ARGS];
    fv_tensor x, y, tensor;
    fv_arg param = { .number = 1 };
    fv_status s = FV_OK;
    call c;
    if (read_fast(sig, args, nargs, kwnames, given) != 0 || open_call(&c, given[0], given[4], given[1]) != 0) return NULL;
    const array_arg arrays[] = { { given[1], names[0], &x, false }, { given[3], names[2], &y, true } };
    const bool missing = given[2] == Py_None && f != fv_softmax;        /* a temperature of None is 1 */
    if (missing) PyErr_Format(PyExc_TypeError, "%s must be a number or an array", names[1]);
    const int bad = missing || TAKE_ARRAYS(&c, arrays) != 0 || take_number(&c, given[2], names[1], &param, &tensor) != 0;
    if (!bad) RELEASING_ON_CPU(&c.context->where, s = f(c.context->ctx, &x, &param, &y, c.stream, &c.err));
    return finish_call(&c.h, bad, s, &c.err);
}

#define FILTER(name, x, param, y)                                                                                      \
    FUNCTION(name)                                                                                                     \
    {                                                                                                                  \
        (void)module;                                                                                                  \
        static signature sig = { #name, 4, { "!context", "!" x, "!" param, "!" y, "stream" }, { NULL }, 0 };           \
        static const char *const names[] = { x, param, y };                                                            \
        return filter(&sig, fv_##name, names, args, nargs, kwnames);                                                   \
    }

FILTER(softmax, "logits", "temperature", "probs")
FILTER(top_k_renorm, "x", "k", "y")
FILTER(top_p_renorm, "x", "p", "y")
FILTER(top_k_mask, "x", "k", "y")

/* ------------------------------------------------------------------------------------------------------------- samples */

enum { S_CONTEXT, S_X, S_IDS, S_LOGITS, S_TOP_K, S_TOP_P, S_MIN_P, S_TOP_K_FIRST, S_ROWS, S_SEED, S_OFFSET, S_VALID, S_STREAM };

static int read_filters(call *c, PyObject *const *given, fv_sample_desc *d, fv_tensor tensors[3])
{
    const struct { int arg; const char *name; fv_arg *out; uint32_t bit; } list[] = {
        { S_TOP_K, "top_k", &d->top_k, FV_TOP_K }, { S_TOP_P, "top_p", &d->top_p, FV_TOP_P }, { S_MIN_P, "min_p", &d->min_p, FV_MIN_P },
    };
    bool first = false;
    for (int i = 0; i < 3; i++) {
        PyObject *object = given[list[i].arg];
        if (!object || object == Py_None) continue;
        d->filters |= list[i].bit;
        if (take_number(c, object, list[i].name, list[i].out, &tensors[i]) != 0) return -1;
    }
    if (take_bool(given[S_TOP_K_FIRST], "top_k_first", &first) != 0) return -1;
    if (first) d->filters |= FV_TOP_K_FIRST;
    return 0;
}

FUNCTION(sample)
{
    (void)module;
    static signature sig = { "sample", 3, { "!context", "!x", "!ids", "logits", "top_k", "top_p", "min_p", "top_k_first", "rows", "seed", "offset", "valid",
                                            "stream" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    fv_sample_desc d = { .seed = 0 };
    fv_tensor tensors[3];
    fv_status s = FV_OK;
    call c;
    if (read_fast(&sig, args, nargs, kwnames, given) != 0 || open_call(&c, given[S_CONTEXT], given[S_STREAM], given[S_X]) != 0) return NULL;
    const array_arg arrays[] = { { given[S_X], "x", &d.x, false }, { given[S_IDS], "ids", &d.ids, true }, { given[S_ROWS], "rows", &d.rows, false },
                                 { given[S_VALID], "valid", &d.valid, true } };
    const int bad = TAKE_ARRAYS(&c, arrays) != 0 || take_bool(given[S_LOGITS], "logits", &d.logits) != 0 || read_filters(&c, given, &d, tensors) != 0 ||
                    take_state(&c, given[S_SEED], "seed", &d.seed, &d.seeds) != 0 || take_state(&c, given[S_OFFSET], "offset", &d.offset, &d.offsets) != 0;
    if (!bad) RELEASING_ON_CPU(&c.context->where, s = fv_sample(c.context->ctx, &d, c.stream, &c.err));
    return finish_call(&c.h, bad, s, &c.err);
}

enum { V_CONTEXT, V_DRAFT, V_DRAFT_IDS, V_TARGET, V_IDS, V_ACCEPTED, V_EMITTED, V_SEED, V_OFFSET, V_STREAM };

FUNCTION(verify)
{
    (void)module;
    static signature sig = { "verify", 5, { "!context", "!draft_probs", "!draft_ids", "!target_probs", "!ids", "num_accepted", "num_emitted", "seed", "offset",
                                            "stream" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    fv_verify_desc d = { .seed = 0 };
    fv_status s = FV_OK;
    call c;
    if (read_fast(&sig, args, nargs, kwnames, given) != 0 || open_call(&c, given[V_CONTEXT], given[V_STREAM], given[V_TARGET]) != 0) return NULL;
    const array_arg arrays[] = { { given[V_DRAFT], "draft_probs", &d.draft_probs, false }, { given[V_DRAFT_IDS], "draft_ids", &d.draft_ids, false },
                                 { given[V_TARGET], "target_probs", &d.target_probs, false }, { given[V_IDS], "ids", &d.ids, true },
                                 { given[V_ACCEPTED], "num_accepted", &d.num_accepted, true }, { given[V_EMITTED], "num_emitted", &d.num_emitted, true } };
    const int bad = TAKE_ARRAYS(&c, arrays) != 0 || take_state(&c, given[V_SEED], "seed", &d.seed, &d.seeds) != 0 ||
                    take_state(&c, given[V_OFFSET], "offset", &d.offset, &d.offsets) != 0;
    if (!bad) RELEASING_ON_CPU(&c.context->where, s = fv_verify(c.context->ctx, &d, c.stream, &c.err));
    return finish_call(&c.h, bad, s, &c.err);
}

PyMethodDef companion_methods[] = {
    { "rmsnorm", CALL(op_rmsnorm), KEYWORDS,
      "rmsnorm(context, x, weight, y, *, residual=None, eps=1e-06, plus_one=False, stream=None)\n--\n\n"
      "y = x / sqrt(mean(x^2) + eps) * weight, rows of x [rows, width] or [rows, heads, width]; y may be x. residual (x's shape and type): x + residual takes "
      "the place of x, and of residual in memory. plus_one: the weight is 1 + weight." },
    { "layernorm", CALL(op_layernorm), KEYWORDS,
      "layernorm(context, x, weight, y, *, bias=None, eps=1e-06, stream=None)\n--\n\ny = (x - mean) / sqrt(variance + eps) * weight + bias; y may be x." },
    { "act_and_mul", CALL(op_act_and_mul), KEYWORDS,
      "act_and_mul(context, f, x, y, *, stream=None)\n--\n\ny [rows, width] = f(x [rows, :width]) * x [rows, width:]. f: \"silu\", \"gelu\", \"gelu_tanh\"." },
    { "warm_ops", CALL(op_warm_ops), KEYWORDS,
      "warm_ops(context)\n--\n\nCompiles what norms, activations, filters and samples need on a GPU, now. Blocks." },
    { "softmax", CALL(op_softmax), KEYWORDS,
      "softmax(context, logits, temperature, probs, *, stream=None)\n--\n\nprobs [rows, vocab] = softmax(logits / temperature). temperature: a number, float32 [rows], "
      "or None for 1; 0 leaves the largest." },
    { "top_k_renorm", CALL(op_top_k_renorm), KEYWORDS,
      "top_k_renorm(context, x, k, y, *, stream=None)\n--\n\ny = the k largest of each row of x (and what equals the last of them) divided by their sum, 0 elsewhere. k: an int, or "
      "int32 or int64 [rows]." },
    { "top_p_renorm", CALL(op_top_p_renorm), KEYWORDS,
      "top_p_renorm(context, x, p, y, *, stream=None)\n--\n\ny = the smallest set of largest values of each row of x that weighs p of it, divided by its sum, 0 elsewhere. p: a number, "
      "or float32 [rows]." },
    { "top_k_mask", CALL(op_top_k_mask), KEYWORDS,
      "top_k_mask(context, x, k, y, *, stream=None)\n--\n\ny = the k largest logits of each row of x, -inf elsewhere." },
    { "sample", CALL(op_sample), KEYWORDS,
      "sample(context, x, ids, *, logits=False, top_k=None, top_p=None, min_p=None, top_k_first=False, rows=None, seed=0, offset=0, valid=None, stream=None)\n--\n\n"
      "One sample a row of x [rows, vocab], probabilities or logits, into ids [n] (int32 or int64); rows [n]: which row each is of. Filters are numbers or arrays [n]; top_k_first: top_p is "
      "of what top_k leaves. seed, offset: integers, or int64 arrays [1] or [n]; a call uses up one offset. valid [n] uint8: 0 where a row has nothing to "
      "draw from (its id is 0). The same ids on every CPU and GPU." },
    { "verify", CALL(op_verify), KEYWORDS,
      "verify(context, draft_probs, draft_ids, target_probs, ids, *, num_accepted=None, num_emitted=None, seed=0, offset=0, stream=None)\n--\n\n"
      "Verifies chains of drafted tokens: draft_probs [requests, n, vocab], draft_ids [requests, n], target_probs [requests, n + 1, vocab]. ids [requests, n + 1]: accepted drafts, one more "
      "token, -1 behind. num_accepted, num_emitted [requests] are added to." },
    { NULL, NULL, 0, NULL },
};
