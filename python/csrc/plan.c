/* SPDX-License-Identifier: Apache-2.0 */
/* plan.c -- foveal.Plan: made once, updated every step, run every layer. The last two are what a serving loop waits for: they take no tuple, no dict
 * and no lock, and give the GIL away only where the library computes (CPU) or may wait (update). */
#include "types.h"

#include <string.h>

PyTypeObject *plan_type;

typedef struct plan_object {
    PyObject_HEAD
    context_object *context;
    fv_plan *plan;                      /* NULL: closed */
    problem_object *problem;
    batch_object *batch;                /* of the last update */
    holder holds;                       /* the workspace */
    bool busy;                          /* another thread is in a call that released the GIL */
} plan_object;

static plan_object *enter(PyObject *self)
{
    plan_object *p = (plan_object *)self;
    if (!p->plan) {
        PyErr_SetString(PyExc_ValueError, "the plan is closed");
        return NULL;
    }
    if (p->busy) {
        const fv_error err = { .status = FV_E_BUSY, .field = "plan", .request = -1, .text = "another thread is using the plan; a plan is one thread's at a time" };
        raise_status(FV_E_BUSY, &err);
        return NULL;
    }
    return p;
}

bool is_plan(PyObject *object) { return Py_TYPE(object) == plan_type; }

fv_plan *plan_enter(PyObject *plan, device *where)
{
    plan_object *p = enter(plan);
    if (!p) return NULL;
    p->busy = true;
    *where = p->context->where;
    return p->plan;
}

void plan_leave(PyObject *plan) { ((plan_object *)plan)->busy = false; }

/* ------------------------------------------------------------------------------------------------------- creation */

static int take_sharing(PyObject *value, fv_sharing *out)
{
    const char *text = "off";
    if (take_text(value, "sharing", &text) != 0) return -1;
    *out = !strcmp(text, "find") ? FV_SHARING_FIND : FV_SHARING_OFF;
    if (*out == FV_SHARING_FIND || !strcmp(text, "off")) return 0;
    PyErr_Format(PyExc_ValueError, "sharing is \"%s\"; it is \"off\" or \"find\"", text);
    return -1;
}

static int take_workspace(PyObject *value, const device *where, fv_plan_desc *out, holder *h)
{
    array_view a;
    int64_t elements = 1;
    if (to_array(value, "workspace", &a, h) != 0 || check_device(&a, "workspace", where) != 0 || check_writable(&a, "workspace") != 0) return -1;
    if (!a.tensor.data) return 0;
    const bool bytes = !strcmp(a.tensor.dtype, "u8") || !strcmp(a.tensor.dtype, "int8");
    for (int i = 0; i < a.tensor.ndim; i++) elements *= a.tensor.shape[i];
    if (!bytes || a.tensor.ndim != 1 || (elements > 1 && a.tensor.stride[0] != 1)) {
        PyErr_SetString(PyExc_ValueError, "workspace must be a contiguous array of bytes with one axis");
        return -1;
    }
    out->workspace = a.tensor.data;
    out->workspace_bytes = (size_t)elements;
    return 0;
}

int take_limits(PyObject *const *given, const device *where, fv_plan_desc *out, holder *h)
{
    int64_t *const wide[] = { &out->max_requests, &out->max_rows, &out->max_kv_tokens, &out->max_pages, &out->max_segments, &out->max_segment_rows };
    int32_t *const narrow[] = { &out->max_levels, &out->splits, &out->workers, &out->chunk };
    static const char *const names[] = { LIMIT_NAMES };
    for (int i = 0; i < 6; i++)
        if (take_i64(given[i], names[i], wide[i]) != 0) return -1;
    for (int i = 0; i < 4; i++)
        if (take_i32(given[6 + i], names[6 + i], narrow[i]) != 0) return -1;
    if (take_bool(given[10], "invariant", &out->invariant) != 0 || take_bool(given[11], "checked", &out->checked) != 0 ||
        take_sharing(given[12], &out->sharing) != 0)
        return -1;
    return take_workspace(given[13], where, out, h);
}

static int create(plan_object *self, PyObject *const *given)
{
    fv_plan_desc limits = { 0 };
    fv_error err;
    if (take_limits(given, &self->context->where, &limits, &self->holds) != 0) return -1;
    fv_status s;
    Py_BEGIN_ALLOW_THREADS
    s = fv_plan_create(self->context->ctx, &self->problem->problem, &limits, &self->plan, &err);
    Py_END_ALLOW_THREADS
    if (s != FV_OK) raise_status(s, &err);
    return s == FV_OK ? 0 : -1;
}

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static signature sig = { "Plan", 2, { "!context", "!problem", LIMIT_NAMES }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    if (read_call(&sig, args, kwargs, given) != 0) return NULL;
    context_object *context = as_context(given[0]);
    problem_object *problem = context ? as_problem(given[1]) : NULL;
    plan_object *self = problem ? new_object(type) : NULL;
    if (!self) return NULL;
    holder_init(&self->holds);
    Py_INCREF((PyObject *)context);
    Py_INCREF((PyObject *)problem);
    self->context = context;
    self->problem = problem;
    if (create(self, given + 2) == 0) return (PyObject *)self;
    Py_DECREF((PyObject *)self);
    return NULL;
}

static void destroy(plan_object *self)
{
    if (self->plan) {
        fv_plan *plan = self->plan;
        self->plan = NULL;
        Py_BEGIN_ALLOW_THREADS
        fv_plan_destroy(&plan);
        Py_END_ALLOW_THREADS
    }
    Py_CLEAR(self->batch);
    Py_CLEAR(self->problem);
    holder_release(&self->holds);
}

static void plan_dealloc(PyObject *self)
{
    plan_object *p = (plan_object *)self;
    destroy(p);
    Py_XDECREF((PyObject *)p->context);
    free_object(self);
}

static PyObject *plan_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    if (!((plan_object *)self)->plan) Py_RETURN_NONE;
    plan_object *p = enter(self);
    if (!p) return NULL;
    destroy(p);
    Py_RETURN_NONE;
}

/* --------------------------------------------------------------------------------------------------------- update */

static PyObject *plan_update(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static signature sig = { "update", 1, { "!batch", "problem", "stream" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    fv_stream stream;
    fv_error err;
    if (read_fast(&sig, args, nargs, kwnames, given) != 0) return NULL;
    plan_object *p = enter(self);
    batch_object *batch = p ? as_batch(given[0]) : NULL;
    if (!batch || to_stream(given[2], NULL, &p->context->where, &stream) != 0) return NULL;
    problem_object *problem = NULL;
    if (given[1] && given[1] != Py_None && !(problem = as_problem(given[1]))) return NULL;
    if (problem == p->problem) problem = NULL;

    Py_INCREF((PyObject *)batch);
    Py_XINCREF((PyObject *)problem);
    fv_status s;
    p->busy = true;
    Py_BEGIN_ALLOW_THREADS
    s = fv_plan_update(p->plan, problem ? &problem->problem : NULL, &batch->batch, stream, &err);
    Py_END_ALLOW_THREADS
    p->busy = false;

    /* A call that was not ready has touched nothing: what the plan points to stays alive. Any other may have taken the new ones. */
    batch_object *old_batch = batch;
    problem_object *old_problem = problem;
    if (s != FV_E_NOT_READY) {
        old_batch = p->batch;
        p->batch = batch;
        if (problem) {
            old_problem = p->problem;
            p->problem = problem;
        }
    }
    /* A refused problem leaves the plan with the one before: keep both until the plan is destroyed or given another. */
    if (s != FV_OK && old_problem && holder_object(&p->holds, (PyObject *)old_problem) != 0) PyErr_Clear();
    Py_XDECREF((PyObject *)old_batch);
    Py_XDECREF((PyObject *)old_problem);
    if (s != FV_OK) return raise_status(s, &err);
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------------------------------------------------ run */

enum { RQ, RK, RV, RO, RLSE, RQ_TAIL, RK_TAIL, RARGS, RSTREAM };

typedef struct run_call {
    fv_tensors tensors;
    fv_arg args[MAX_USE_ARGS];
    fv_tensor arg_tensors[MAX_USE_ARGS];
    holder holds;
} run_call;

static int run_array(run_call *c, PyObject *object, const char *name, const device *where, bool written, fv_tensor *out)
{
    array_view a;
    if (to_array(object, name, &a, &c->holds) != 0 || check_device(&a, name, where) != 0) return -1;
    if (written && check_writable(&a, name) != 0) return -1;
    *out = a.tensor;
    return 0;
}

static int read_run(run_call *c, PyObject *const *given, const device *where, fv_stream *stream)
{
    fv_tensors *t = &c->tensors;
    if (to_stream(given[RSTREAM], given[RQ], where, stream) != 0) return -1;
    c->holds.stream = *stream;
    if (run_array(c, given[RQ], "q", where, false, &t->q) != 0 || run_array(c, given[RK], "k", where, false, &t->k) != 0 ||
        run_array(c, given[RV], "v", where, false, &t->v) != 0 || run_array(c, given[RO], "o", where, true, &t->o) != 0)
        return -1;
    if (given[RLSE] && run_array(c, given[RLSE], "lse", where, true, &t->lse) != 0) return -1;
    if (given[RQ_TAIL] && run_array(c, given[RQ_TAIL], "q_tail", where, false, &t->q_tail) != 0) return -1;
    if (given[RK_TAIL] && run_array(c, given[RK_TAIL], "k_tail", where, false, &t->k_tail) != 0) return -1;
    t->num_args = to_args(given[RARGS], "args", where, c->args, c->arg_tensors, MAX_USE_ARGS, &c->holds);
    t->args = t->num_args > 0 ? c->args : NULL;
    return t->num_args < 0 ? -1 : 0;
}

static PyObject *plan_run(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static signature sig = { "run", 5, { "!q", "!k", "!v", "!o", "lse", "q_tail", "k_tail", "args", "stream" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    run_call call;
    fv_stream stream;
    fv_error err;
    if (read_fast(&sig, args, nargs, kwnames, given) != 0) return NULL;
    plan_object *p = enter(self);
    if (!p) return NULL;
    memset(&call.tensors, 0, sizeof call.tensors);
    holder_init(&call.holds);
    fv_status s = FV_OK;
    if (read_run(&call, given, &p->context->where, &stream) == 0) {
        p->busy = true;
        RELEASING_ON_CPU(&p->context->where, s = fv_run(p->plan, &call.tensors, stream, &err));
        p->busy = false;
    }
    holder_release(&call.holds);
    if (s != FV_OK) return raise_status(s, &err);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------------------------------------------------- views */

static PyObject *plan_stats(PyObject *self, PyObject *unused)
{
    (void)unused;
    fv_plan_stats q;
    fv_error err;
    plan_object *p = enter(self);
    if (!p) return NULL;
    const fv_status s = fv_plan_query(p->plan, &q, &err);
    if (s != FV_OK) return raise_status(s, &err);
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:i,s:s}", "num_pieces", (long long)q.num_pieces, "num_partials", (long long)q.num_partials,
                         "num_segments", (long long)q.num_segments, "num_shared_segments", (long long)q.num_shared_segments, "num_rows",
                         (long long)q.num_rows, "num_kv_tokens", (long long)q.num_kv_tokens, "total_cost", (long long)q.total_cost, "max_worker_cost",
                         (long long)q.max_worker_cost, "kv_bytes", (long long)q.kv_bytes, "flops", (long long)q.flops, "workers", (int)q.workers,
                         "kernel", q.kernel);
}

static PyObject *plan_worker_costs(PyObject *self, PyObject *unused)
{
    (void)unused;
    fv_plan_stats q;
    fv_error err;
    plan_object *p = enter(self);
    if (!p) return NULL;
    fv_status s = fv_plan_query(p->plan, &q, &err);
    if (s != FV_OK) return raise_status(s, &err);
    int64_t *costs = PyMem_Malloc((size_t)(q.workers > 0 ? q.workers : 1) * sizeof *costs);
    if (!costs) return PyErr_NoMemory();
    s = fv_plan_worker_costs(p->plan, costs, q.workers, &err);
    PyObject *list = s == FV_OK ? PyList_New(q.workers) : raise_status(s, &err);
    for (int32_t i = 0; list && i < q.workers; i++) PyList_SetItem(list, i, PyLong_FromLongLong(costs[i]));
    PyMem_Free(costs);
    return list;
}

static fv_status describe(void *of, const char *format, char *buffer, size_t size, size_t *needed, fv_error *err)
{
    return fv_plan_describe(of, format, buffer, size, needed, err);
}

static PyObject *plan_describe(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static signature sig = { "describe", 1, { "format" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    const char *format = "text";
    if (read_fast(&sig, args, nargs, kwnames, given) != 0 || take_text(given[0], "format", &format) != 0) return NULL;
    plan_object *p = enter(self);
    return p ? text_of(describe, p->plan, format) : NULL;
}

static PyObject *plan_context(PyObject *self, void *unused)
{
    (void)unused;
    PyObject *context = (PyObject *)((plan_object *)self)->context;
    Py_INCREF(context);
    return context;
}

static PyObject *plan_problem(PyObject *self, void *unused)
{
    (void)unused;
    PyObject *problem = (PyObject *)((plan_object *)self)->problem;
    if (!problem) Py_RETURN_NONE;
    Py_INCREF(problem);
    return problem;
}

static PyMethodDef plan_methods[] = {
    { "update", CALL(plan_update), KEYWORDS,
      "update($self, batch, *, problem=None, stream=None)\n--\n\nMakes the plan of this step. Allocates nothing. problem: another one of the same class. The batch is kept until the next "
      "update. GPU: copies are queued on the stream (an int, an object with __cuda_stream__(), a tensor for the current stream of its library; None: the legacy default\n"
      "stream); NotReadyError, and nothing happens, while it is captured.\n\n"
      "Raises InvalidError, CapacityError (a maximum is too small: field and limit say which); then the plan holds no step." },
    { "run", CALL(plan_run), KEYWORDS,
      "run($self, q, k, v, o, lse=None, *, q_tail=None, k_tail=None, args=None, stream=None)\n--\n\nRuns the plan on one layer and writes o (and lse).\n\n"
      "q [rows, num_q_heads, dim_qk - qk_tail], q_tail [rows, num_q_heads, qk_tail], o [rows, num_q_heads, dim_v], lse [rows, num_q_heads] float32.\n"
      "k [num_pages, page_size, num_kv_heads, dim_qk - qk_tail] or [tokens, num_kv_heads, ...]; k_tail, v alike. v None: with v_in_k.\n"
      "Any strides, the last axis contiguous. args: {name: number or array} of parameters bound per run (\"k_scale\", \"sinks\", ...).\n\n"
      "CPU: done when it returns, the GIL is released meanwhile. GPU: launches on `stream`: an int, an object with __cuda_stream__(), or None for the current "
      "stream of q's library (the legacy default stream where it does not tell). May be captured." },
    { "stats", plan_stats, METH_NOARGS, "stats($self)\n--\n\nWhat the step's plan is: a dict of num_pieces, num_partials, num_segments, num_shared_segments, num_rows, num_kv_tokens, "
      "total_cost, max_worker_cost (cost units), kv_bytes, flops, workers, kernel." },
    { "worker_costs", plan_worker_costs, METH_NOARGS, "worker_costs($self)\n--\n\nCost of each worker's share, in cost units." },
    { "describe", CALL(plan_describe), KEYWORDS, "describe($self, format=\"text\")\n--\n\nThe plan in words (\"text\") or as a picture (\"svg\")." },
    { "close", plan_close, METH_NOARGS, "close($self)\n--\n\nFrees the plan. Blocks until its launches are done." },
    { NULL, NULL, 0, NULL },
};

static PyGetSetDef plan_fields[] = {
    { "context", plan_context, NULL, "its Context", NULL },
    { "problem", plan_problem, NULL, "its Problem", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot plan_slots[] = {
    { Py_tp_new, plan_new },
    { Py_tp_dealloc, plan_dealloc },
    { Py_tp_methods, plan_methods },
    { Py_tp_getset, plan_fields },
    { Py_tp_doc, "Plan(context, problem, *, max_requests, max_rows, max_kv_tokens, max_pages=0, max_segments=0, max_segment_rows=0, max_levels=0, splits=0, workers=0,\n"
                 "     chunk=0, invariant=False, checked=False, sharing=\"off\", workspace=None)\n--\n\n"
                 "Allocates everything that the plan will ever need, chooses the kernel, compiles. One thread at a time may use it.\n\n"
                 "max_requests, max_rows, max_kv_tokens, max_pages: of all requests of a step together; max_rows == max_requests chooses the decode build.\n"
                 "max_segments, max_segment_rows, max_levels: for given segments. splits: parts each row tile's keys are cut into, 0: as the balance needs.\n"
                 "invariant: a request has the same bits whatever its neighbours (chunk keys each; 0: 1024). sharing: \"off\", or \"find\" common prefixes.\n"
                 "workspace: bytes on the device, at least plan_sizes(...)[\"workspace_bytes\"], kept; None: allocated.\n\n"
                 "Raises UnsupportedError with each kernel's reason, InvalidError, NoMemoryError, CompileError." },
    { 0, NULL },
};

PyType_Spec plan_spec = { "foveal.Plan", sizeof(plan_object), 0, Py_TPFLAGS_DEFAULT, plan_slots };
