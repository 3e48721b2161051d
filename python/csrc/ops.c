/* SPDX-License-Identifier: Apache-2.0 */
/* ops.c -- the module's functions: append, merge, rope, copy_pages, supports, plan_sizes, warm, info. */
#include "types.h"

#include <stdlib.h>
#include <string.h>

int take_array(PyObject *object, const char *name, const device *where, bool written, fv_tensor *out, holder *h)
{
    array_view a;
    if (to_array(object, name, &a, h) != 0 || check_device(&a, name, where) != 0 || (written && check_writable(&a, name) != 0)) return -1;
    *out = a.tensor;
    return 0;
}

PyObject *finish_call(holder *h, int bad, fv_status s, const fv_error *err)
{
    holder_release(h);
    if (bad) return NULL;
    if (s != FV_OK) return raise_status(s, err);
    Py_RETURN_NONE;
}

/* ----------------------------------------------------------------------------------------------------------- text */

PyObject *text_of(text_fn *write, void *of, const char *format)
{
    size_t needed = 0;
    fv_error err;
    fv_status s = write(of, format, NULL, 0, &needed, &err);
    if (s != FV_OK) return raise_status(s, &err);
    char *text = PyMem_Malloc(needed + 1);
    if (!text) return PyErr_NoMemory();
    s = write(of, format, text, needed, &needed, &err);
    PyObject *out = s == FV_OK ? PyUnicode_FromString(text) : raise_status(s, &err);
    PyMem_Free(text);
    return out;
}

static fv_status info_text(void *of, const char *format, char *buffer, size_t size, size_t *needed, fv_error *err)
{
    return fv_info(of, format, buffer, size, needed, err);
}

FUNCTION(info)
{
    (void)module;
    static signature sig = { "info", 2, { "format", "context" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    const char *format = "text";
    context_object *context = NULL;
    if (read_fast(&sig, args, nargs, kwnames, given) != 0 || take_text(given[0], "format", &format) != 0) return NULL;
    if (given[1] && given[1] != Py_None && !(context = as_context(given[1]))) return NULL;
    return text_of(info_text, context ? context->ctx : NULL, format);
}

/* ----------------------------------------------------------------------------------------------------------- rope */

enum { ROTARY_DIM, INTERLEAVED, FREQUENCIES, BASE, FACTOR, LOW, HIGH, CONTEXT_LENGTH, NUM_ROPE };
#define ROPE_NAMES "rotary_dim", "interleaved", "frequencies", "base", "factor", "low_freq_factor", "high_freq_factor", "original_context"

static int take_rope(PyObject *const *given, fv_rope_desc *out, holder *h)
{
    if (take_i32(given[ROTARY_DIM], "rotary_dim", &out->rotary_dim) != 0 || take_bool(given[INTERLEAVED], "interleaved", &out->interleaved) != 0 ||
        take_double(given[BASE], "base", &out->base) != 0 || take_double(given[FACTOR], "factor", &out->factor) != 0 ||
        take_double(given[LOW], "low_freq_factor", &out->low_freq_factor) != 0 || take_double(given[HIGH], "high_freq_factor", &out->high_freq_factor) != 0 ||
        take_double(given[CONTEXT_LENGTH], "original_context", &out->original_context) != 0)
        return -1;
    static const device host = { DL_CPU, 0 };
    fv_tensor t = { 0 };
    if (given[FREQUENCIES] && take_array(given[FREQUENCIES], "frequencies", &host, false, &t, h) != 0) return -1;
    if (!t.data) return 0;
    if (t.ndim != 1 || strcmp(t.dtype, "f32") != 0 || t.shape[0] != out->rotary_dim / 2 || (t.shape[0] > 1 && t.stride[0] != 1)) {
        PyErr_Format(PyExc_ValueError, "frequencies must be %d contiguous float32 (rotary_dim / 2)", (int)out->rotary_dim / 2);
        return -1;
    }
    out->frequencies = t.data;
    return 0;
}

/* {"rotary_dim": 64, ...} */
static int rope_of_dict(PyObject *dict, fv_rope_desc *out, holder *h)
{
    static const char *const names[] = { ROPE_NAMES };
    PyObject *given[NUM_ROPE];
    Py_ssize_t found = 0;
    if (!PyDict_Check(dict)) {
        PyErr_SetString(PyExc_TypeError, "rope must be a dict of rotary_dim, interleaved, base, ...");
        return -1;
    }
    for (int i = 0; i < NUM_ROPE; i++) {
        given[i] = PyDict_GetItemString(dict, names[i]);
        found += given[i] != NULL;
    }
    if (found == PyDict_Size(dict)) return take_rope(given, out, h);
    PyErr_SetString(PyExc_ValueError, "rope has a key that is none of rotary_dim, interleaved, frequencies, base, factor, low_freq_factor, high_freq_factor, original_context");
    return -1;
}

FUNCTION(rope_frequencies)
{
    (void)module;
    static signature sig = { "rope_frequencies", 1, { "!rotary_dim", "interleaved", "frequencies", "base", "factor", "low_freq_factor", "high_freq_factor",
                                                      "original_context" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS], *list = NULL;
    fv_rope_desc desc = { 0 };
    fv_error err;
    holder h;
    if (read_fast(&sig, args, nargs, kwnames, given) != 0) return NULL;
    holder_init(&h);
    int bad = take_rope(given, &desc, &h) != 0;
    float *out = bad ? NULL : holder_memory(&h, (size_t)(desc.rotary_dim > 0 ? desc.rotary_dim : 0) / 2 * sizeof *out);
    const fv_status s = out ? fv_rope_frequencies(&desc, out, &err) : FV_OK;
    if (out && s == FV_OK) list = PyList_New(desc.rotary_dim / 2);
    for (int i = 0; list && i < desc.rotary_dim / 2; i++) PyList_SetItem(list, i, PyFloat_FromDouble(out[i]));
    holder_release(&h);
    return s == FV_OK ? list : raise_status(s, &err);
}

FUNCTION(rope)
{
    (void)module;
    static signature sig = { "rope", 4, { "!context", "!x", "!positions", "!y", ROPE_NAMES, "stream" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    fv_rope_desc desc = { 0 };
    fv_tensor x, y;
    fv_index positions;
    fv_stream stream = NULL;
    fv_error err;
    holder h;
    if (read_fast(&sig, args, nargs, kwnames, given) != 0) return NULL;
    context_object *c = as_context(given[0]);
    if (!c) return NULL;
    holder_init(&h);
    const int bad = to_stream(given[4 + NUM_ROPE], given[1], &c->where, &stream) != 0 || (h.stream = stream, false) ||
                    take_array(given[1], "x", &c->where, false, &x, &h) != 0 || to_index(given[2], "positions", &positions, &h, NULL, NULL) != 0 ||
                    take_array(given[3], "y", &c->where, true, &y, &h) != 0 || take_rope(given + 4, &desc, &h) != 0;
    fv_status s = FV_OK;
    if (!bad) RELEASING_ON_CPU(&c->where, s = fv_rope(c->ctx, &desc, &x, positions, &y, stream, &err));
    return finish_call(&h, bad, s, &err);
}

/* --------------------------------------------------------------------------------------------------------- append */

enum { A_CONTEXT, A_NEW_K, A_NEW_V, A_K, A_V, A_BATCH, A_SLOTS, A_ROW_POSITIONS, A_PAGE_SIZE, A_NUM_PAGES, A_NEW_K_TAIL, A_K_TAIL, A_K_SCALE_KIND,
       A_V_SCALE_KIND, A_K_SCALE, A_V_SCALE, A_K_BLOCK_SCALE, A_V_BLOCK_SCALE, A_ROPE, A_Q, A_Q_OUT, A_CHECKED, A_PAGE_ORDER, A_STREAM };

static int append_place(PyObject *const *given, fv_append_desc *d, holder *h)
{
    if (given[A_BATCH] && given[A_BATCH] != Py_None) {
        const batch_object *batch = as_batch(given[A_BATCH]);
        if (!batch) return -1;
        const fv_batch *b = &batch->batch;
        d->num_requests = b->num_requests;
        d->rows = b->rows;
        d->lengths = b->lengths;
        d->first_positions = b->first_positions;
        d->row_positions = b->row_positions;
        d->pages = b->pages;
        d->kv_indptr = b->kv_indptr;
    }
    if (to_index(given[A_SLOTS], "slots", &d->slots, h, NULL, NULL) != 0 || take_i32(given[A_PAGE_SIZE], "page_size", &d->pages.page_size) != 0 ||
        take_i64(given[A_NUM_PAGES], "num_pages", &d->pages.num_pages) != 0)
        return -1;
    if (!given[A_ROW_POSITIONS] || given[A_ROW_POSITIONS] == Py_None) return 0;
    return to_index(given[A_ROW_POSITIONS], "row_positions", &d->row_positions, h, NULL, NULL);
}

/* An array in the form (pages, page_size, ...): with slots, the cache's own shape says what the pool is. */
static void pool_of_cache(fv_append_desc *d)
{
    if (d->slots.type == FV_INDEX_NONE || d->pages.page_size || d->k.ndim != 4) return;
    d->pages.page_size = (int32_t)d->k.shape[1];
    d->pages.num_pages = d->k.shape[0];
}

static int scale_arg(PyObject *value, const char *name, const device *where, fv_arg *out, fv_tensor *tensor, holder *h)
{
    PyObject *dict = value && value != Py_None ? PyDict_New() : NULL;
    if (!dict) return value && value != Py_None ? -1 : 0;
    const int n = PyDict_SetItemString(dict, name, value) == 0 ? to_args(dict, name, where, out, tensor, 1, h) : -1;
    out->name = NULL;
    Py_DECREF(dict);
    return n < 0 ? -1 : 0;
}

static int append_arrays(PyObject *const *given, const device *where, fv_append_desc *d, fv_tensor *scales, holder *h)
{
    const struct { int arg; const char *name; bool written; fv_tensor *out; } rows[] = {
        { A_NEW_K, "new_k", false, &d->new_k }, { A_NEW_V, "new_v", false, &d->new_v }, { A_NEW_K_TAIL, "new_k_tail", false, &d->new_k_tail },
        { A_K, "k", true, &d->k }, { A_V, "v", true, &d->v }, { A_K_TAIL, "k_tail", true, &d->k_tail },
        { A_K_BLOCK_SCALE, "k_block_scale", true, &d->k_block_scale }, { A_V_BLOCK_SCALE, "v_block_scale", true, &d->v_block_scale },
        { A_Q, "q", false, &d->q }, { A_Q_OUT, "q_out", true, &d->q_out },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (given[rows[i].arg] && take_array(given[rows[i].arg], rows[i].name, where, rows[i].written, rows[i].out, h) != 0) return -1;
    return scale_arg(given[A_K_SCALE], "k_scale", where, &d->k_scale, &scales[0], h) == 0
               ? scale_arg(given[A_V_SCALE], "v_scale", where, &d->v_scale, &scales[1], h) : -1;
}

static int append_read(PyObject *const *given, const context_object *c, fv_append_desc *d, fv_tensor *scales, fv_rope_desc *rope, fv_stream *stream,
                       holder *h)
{
    if (to_stream(given[A_STREAM], given[A_NEW_K], &c->where, stream) != 0) return -1;
    h->stream = *stream;
    if (append_arrays(given, &c->where, d, scales, h) != 0 || append_place(given, d, h) != 0 ||
        take_text(given[A_K_SCALE_KIND], "k_scale_kind", &d->k_scale_kind) != 0 || take_text(given[A_V_SCALE_KIND], "v_scale_kind", &d->v_scale_kind) != 0 ||
        take_bool(given[A_CHECKED], "checked", &d->checked) != 0 || take_text(given[A_PAGE_ORDER], "page_order", &d->page_order) != 0)
        return -1;
    pool_of_cache(d);
    if (!given[A_ROPE] || given[A_ROPE] == Py_None) return 0;
    d->rope = rope;
    return rope_of_dict(given[A_ROPE], rope, h);
}

FUNCTION(append)
{
    (void)module;
    static signature sig = { "append", 5, { "!context", "!new_k", "!new_v", "!k", "!v", "batch", "slots", "row_positions", "page_size", "num_pages", "new_k_tail",
                                            "k_tail", "k_scale_kind", "v_scale_kind", "k_scale", "v_scale", "k_block_scale", "v_block_scale", "rope", "q",
                                            "q_out", "checked", "page_order", "stream" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    fv_append_desc desc = { 0 };
    fv_rope_desc rope = { 0 };
    fv_tensor scales[2];
    fv_stream stream = NULL;
    fv_error err;
    holder h;
    if (read_fast(&sig, args, nargs, kwnames, given) != 0) return NULL;
    context_object *c = as_context(given[A_CONTEXT]);
    if (!c) return NULL;
    holder_init(&h);
    const int bad = append_read(given, c, &desc, scales, &rope, &stream, &h);
    fv_status s = FV_OK;
    if (!bad) RELEASING_ON_CPU(&c->where, s = fv_append(c->ctx, &desc, stream, &err));
    return finish_call(&h, bad, s, &err);
}

/* ---------------------------------------------------------------------------------------------------------- merge */

static int take_states(PyObject *sequence, const char *name, const device *where, fv_tensor **out, int64_t *count, holder *h)
{
    PyObject *list = PySequence_List(sequence);
    if (!list) return -1;
    *count = PyList_Size(list);
    *out = holder_memory(h, (size_t)*count * sizeof **out);
    int bad = !*out || holder_object(h, list) != 0;
    for (int64_t i = 0; !bad && i < *count; i++) bad = take_array(PyList_GetItem(list, i), name, where, false, &(*out)[i], h) != 0;
    Py_DECREF(list);
    return bad ? -1 : 0;
}

FUNCTION(merge)
{
    (void)module;
    static signature sig = { "merge", 5, { "!context", "!o_states", "!lse_states", "!o", "lse", "lse_base2", "stream" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    fv_tensor *o_states, *lse_states, o, lse = { 0 };
    int64_t n, num_lse;
    bool base2 = false;
    fv_stream stream = NULL;
    fv_error err;
    holder h;
    if (read_fast(&sig, args, nargs, kwnames, given) != 0) return NULL;
    context_object *c = as_context(given[0]);
    if (!c) return NULL;
    holder_init(&h);
    int bad = to_stream(given[6], given[3], &c->where, &stream) != 0 || (h.stream = stream, false) ||
              take_states(given[1], "o_states", &c->where, &o_states, &n, &h) != 0 ||
              take_states(given[2], "lse_states", &c->where, &lse_states, &num_lse, &h) != 0 ||
              take_array(given[3], "o", &c->where, true, &o, &h) != 0 ||
              (given[4] && take_array(given[4], "lse", &c->where, true, &lse, &h) != 0) || take_bool(given[5], "lse_base2", &base2) != 0;
    if (!bad && n != num_lse) {
        PyErr_Format(PyExc_ValueError, "%lld o_states and %lld lse_states", (long long)n, (long long)num_lse);
        bad = 1;
    }
    fv_status s = FV_OK;
    if (!bad) RELEASING_ON_CPU(&c->where, s = fv_merge(c->ctx, o_states, lse_states, n, base2, &o, lse.data ? &lse : NULL, stream, &err));
    return finish_call(&h, bad, s, &err);
}

/* ----------------------------------------------------------------------------------------------------- copy pages */

static int take_copies(PyObject *sequence, fv_copy **out, int64_t *count, holder *h)
{
    PyObject *list = PySequence_List(sequence);
    if (!list) return -1;
    const Py_ssize_t n = PyList_Size(list);
    *out = holder_memory(h, (size_t)n * sizeof **out);
    *count = 0;
    int bad = !*out;
    for (Py_ssize_t i = 0; !bad && i < n; i++) {
        PyObject *item = PyList_GetItem(list, i);
        int src, dst;
        if (item == Py_None) continue;                  /* what Cache.fork answers when there is nothing to copy */
        bad = !PyTuple_Check(item) || !PyArg_ParseTuple(item, "ii", &src, &dst);
        if (!bad) (*out)[(*count)++] = (fv_copy){ src, dst };
    }
    Py_DECREF(list);
    if (bad && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "copies is a sequence of pairs (src, dst)");
    return bad ? -1 : 0;
}

FUNCTION(copy_pages)
{
    (void)module;
    static signature sig = { "copy_pages", 4, { "!context", "!k", "!v", "!copies", "stream" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    fv_tensor k, v;
    fv_copy *copies;
    int64_t n;
    fv_stream stream = NULL;
    fv_error err;
    holder h;
    if (read_fast(&sig, args, nargs, kwnames, given) != 0) return NULL;
    context_object *c = as_context(given[0]);
    if (!c) return NULL;
    holder_init(&h);
    const int bad = to_stream(given[4], given[1], &c->where, &stream) != 0 || (h.stream = stream, false) ||
                    take_array(given[1], "k", &c->where, true, &k, &h) != 0 || take_array(given[2], "v", &c->where, true, &v, &h) != 0 ||
                    take_copies(given[3], &copies, &n, &h) != 0;
    fv_status s = FV_OK;
    if (!bad) RELEASING_ON_CPU(&c->where, s = fv_copy_pages(c->ctx, k.data ? &k : NULL, v.data ? &v : NULL, copies, n, stream, &err));
    return finish_call(&h, bad, s, &err);
}

/* --------------------------------------------------------------------------------------------- questions about plans */

typedef struct question {
    context_object *context;
    problem_object *problem;
    fv_plan_desc limits;
    holder holds;
} question;

static signature supports_sig = { "supports", 2, { "!context", "!problem", LIMIT_NAMES }, { NULL }, 0 };
static signature sizes_sig = { "plan_sizes", 2, { "!context", "!problem", LIMIT_NAMES }, { NULL }, 0 };
static signature warm_sig = { "warm", 2, { "!context", "!problems", LIMIT_NAMES }, { NULL }, 0 };

static int read_question(question *q, signature *sig, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, PyObject **given)
{
    memset(&q->limits, 0, sizeof q->limits);
    holder_init(&q->holds);
    if (read_fast(sig, args, nargs, kwnames, given) != 0) return -1;
    q->context = as_context(given[0]);
    if (!q->context || take_limits(given + 2, &q->context->where, &q->limits, &q->holds) != 0) return -1;
    if (sig == &warm_sig) return 0;
    q->problem = as_problem(given[1]);
    return q->problem ? 0 : -1;
}

FUNCTION(supports)
{
    (void)module;
    PyObject *given[MAX_ARGS];
    question q;
    fv_support support;
    fv_error err;
    fv_status s = FV_OK;
    const int bad = read_question(&q, &supports_sig, args, nargs, kwnames, given);
    if (!bad) s = fv_supports(q.context->ctx, &q.problem->problem, &q.limits, &support, &err);
    holder_release(&q.holds);
    if (bad) return NULL;
    return s == FV_OK ? PyUnicode_FromString(support.kernel) : raise_status(s, &err);
}

FUNCTION(plan_sizes)
{
    (void)module;
    PyObject *given[MAX_ARGS];
    question q;
    fv_sizes z;
    fv_error err;
    fv_status s = FV_OK;
    const int bad = read_question(&q, &sizes_sig, args, nargs, kwnames, given);
    if (!bad) s = fv_plan_sizes(q.context->ctx, &q.problem->problem, &q.limits, &z, &err);
    holder_release(&q.holds);
    if (bad) return NULL;
    if (s != FV_OK) return raise_status(s, &err);
    return Py_BuildValue("{s:K,s:K,s:K,s:L,s:L,s:i}", "host_bytes", (unsigned long long)z.host_bytes, "device_bytes", (unsigned long long)z.device_bytes,
                         "workspace_bytes", (unsigned long long)z.workspace_bytes, "max_pieces", (long long)z.max_pieces, "max_partials",
                         (long long)z.max_partials, "workers", (int)z.workers);
}

static int take_problems(PyObject *sequence, const fv_problem ***out, int64_t *count, holder *h)
{
    PyObject *list = PySequence_List(sequence);
    if (!list || holder_object(h, list) != 0) {
        Py_XDECREF(list);
        return -1;
    }
    *count = PyList_Size(list);
    *out = holder_memory(h, (size_t)*count * sizeof **out);
    int bad = !*out;
    for (int64_t i = 0; !bad && i < *count; i++) {
        const problem_object *p = as_problem(PyList_GetItem(list, i));
        if (p) (*out)[i] = &p->problem;
        bad = !p;
    }
    Py_DECREF(list);
    return bad ? -1 : 0;
}

FUNCTION(warm)
{
    (void)module;
    PyObject *given[MAX_ARGS];
    question q;
    const fv_problem **problems;
    int64_t n;
    fv_error err;
    fv_status s = FV_OK;
    int bad = read_question(&q, &warm_sig, args, nargs, kwnames, given) != 0 || take_problems(given[1], &problems, &n, &q.holds) != 0;
    if (!bad) {
        Py_BEGIN_ALLOW_THREADS
        s = fv_warm(q.context->ctx, problems, n, &q.limits, &err);
        Py_END_ALLOW_THREADS
    }
    return finish_call(&q.holds, bad, s, &err);
}

PyMethodDef op_methods[] = {
    { "info", CALL(op_info), KEYWORDS,
      "info(format=\"text\", context=None)\n--\n\nThe library, the machine and the context in words: devices, CPU levels, kernels, element types, variants with their parameters, "
      "environment variables. format: \"text\", \"markdown\" or \"json\"." },
    { "append", CALL(op_append), KEYWORDS,
      "append(context, new_k, new_v, k, v, *, batch=None, slots=None, row_positions=None, page_size=0, num_pages=0, new_k_tail=None, k_tail=None,\n"
      "       k_scale_kind=None, v_scale_kind=None, k_scale=None, v_scale=None, k_block_scale=None, v_block_scale=None, rope=None, q=None, q_out=None,\n"
      "       checked=False, page_order=None, stream=None)\n--\n\n"
      "New keys and values into the cache: rotate, quantise, scatter, in one go.\n\n"
      "new_k, new_v [rows, num_kv_heads, dim] (new_v, v None: K only). k, v: the cache, [num_pages, page_size, num_kv_heads, dim] or [tokens, num_kv_heads, dim].\n"
      "batch: row i of a request becomes key length - rows + i (lengths count the new rows); or slots [rows]: page * page_size + offset, -1 skips the row.\n"
      "k_scale_kind: \"tensor\", \"head\" (k_scale is read), \"token_head\" (k_scale is written). rope: dict of rotary_dim, interleaved, frequencies, base, factor, "
      "low_freq_factor, high_freq_factor, original_context; turns new_k (new_k_tail where given) and q [rows, heads, dim] into q_out.\n"
      "page_order: \"rows\" (None) or \"tiles\": how pages of 16-bit K and V are written, as the Problem that reads them says; CPU only.\n"
      "Values beyond an 8-bit type's range saturate. Bad page ids and slots are skipped and reported by Context.errors()." },
    { "merge", CALL(op_merge), KEYWORDS,
      "merge(context, o_states, lse_states, o, lse=None, *, lse_base2=False, stream=None)\n--\n\nMerges partial states of the same rows over disjoint keys.\n\n"
      "o_states: sequence of [rows, heads, dim]; lse_states: of [rows, heads] float32, all in one base. o and lse are written; they may be state 0 itself. "
      "States with lse = -inf are skipped." },
    { "rope", CALL(op_rope), KEYWORDS,
      "rope(context, x, positions, y, *, rotary_dim=0, interleaved=False, frequencies=None, base=0.0, factor=0.0, low_freq_factor=0.0, high_freq_factor=0.0,\n"
      "     original_context=0.0, stream=None)\n--\n\nRotates rows of x [rows, heads, dim] at positions [rows] into y (may be x).\n\n"
      "Pair i of the first rotary_dim elements is (i, i + rotary_dim/2), or (2i, 2i+1) with interleaved; it turns by position * frequency[i]. base 0: 10000." },
    { "rope_frequencies", CALL(op_rope_frequencies), KEYWORDS,
      "rope_frequencies(rotary_dim, *, base=0.0, factor=0.0, low_freq_factor=0.0, high_freq_factor=0.0, original_context=0.0)\n--\n\nrotary_dim / 2 frequencies, as floats." },
    { "copy_pages", CALL(op_copy_pages), KEYWORDS,
      "copy_pages(context, k, v, copies, *, stream=None)\n--\n\nCopies whole pages of k and v (either may be None): copies is a sequence of (src, dst), as Cache.fork answers." },
    { "supports", CALL(op_supports), KEYWORDS,
      "supports(context, problem, *, max_requests, max_rows, max_kv_tokens, max_pages=0, max_segments=0, max_segment_rows=0, max_levels=0, splits=0, workers=0, chunk=0,\n"
      "        invariant=False, checked=False, sharing=\"off\", workspace=None)\n--\n\nThe name of the kernel that would serve this problem with these maxima (those of Plan). "
      "UnsupportedError has each kernel's reason." },
    { "plan_sizes", CALL(op_plan_sizes), KEYWORDS,
      "plan_sizes(context, problem, *, max_requests, max_rows, max_kv_tokens, max_pages=0, max_segments=0, max_segment_rows=0, max_levels=0, splits=0, workers=0, chunk=0,\n"
      "        invariant=False, checked=False, sharing=\"off\", workspace=None)\n--\n\nExact bytes of a plan: host_bytes, device_bytes, workspace_bytes, max_pieces, max_partials, workers." },
    { "warm", CALL(op_warm), KEYWORDS,
      "warm(context, problems, *, max_requests, max_rows, max_kv_tokens, max_pages=0, max_segments=0, max_segment_rows=0, max_levels=0, splits=0, workers=0, chunk=0,\n"
      "        invariant=False, checked=False, sharing=\"off\", workspace=None)\n--\n\nCompiles what these problems need, now. Blocks." },
    { NULL, NULL, 0, NULL },
};
