/* SPDX-License-Identifier: Apache-2.0 */
/* context.c -- foveal.Context and foveal.Variant. */
#include "types.h"

#include <stdlib.h>
#include <string.h>

PyTypeObject *context_type, *variant_type;

context_object *as_context(PyObject *object)
{
    if (!object || Py_TYPE(object) != context_type) {
        PyErr_SetString(PyExc_TypeError, "context must be a foveal.Context");
        return NULL;
    }
    context_object *c = (context_object *)object;
    if (c->ctx) return c;
    PyErr_SetString(PyExc_ValueError, "the context is closed");
    return NULL;
}

/* The library calls this from any thread, with or without the GIL. */
static void log_line(void *user, fv_log_level level, const char *line)
{
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *raised_type, *raised, *trace;
    PyErr_Fetch(&raised_type, &raised, &trace);         /* a call may be about to raise */
    PyObject *result = PyObject_CallFunction(((context_object *)user)->log, "is", (int)level, line);
    if (!result) PyErr_WriteUnraisable(((context_object *)user)->log);
    Py_XDECREF(result);
    PyErr_Restore(raised_type, raised, trace);
    PyGILState_Release(state);
}

/* "cuda:1" -> 1 */
static device device_of(const char *name)
{
    if (!name || strncmp(name, "cuda", 4) != 0) return (device){ DL_CPU, 0 };
    return (device){ DL_CUDA, name[4] == ':' ? atoi(name + 5) : 0 };
}

static int open_context(context_object *self, PyObject *const *given)
{
    fv_open_desc desc = { 0 };
    fv_error err;
    if (take_text(given[0], "device", &desc.device) != 0 || take_text(given[1], "cpu_isa", &desc.cpu_isa) != 0 ||
        take_i32(given[2], "num_threads", &desc.num_threads) != 0 || take_text(given[3], "cache_dir", &desc.cache_dir) != 0)
        return -1;
    if (given[4] && given[4] != Py_None) {
        if (!PyCallable_Check(given[4])) {
            PyErr_SetString(PyExc_TypeError, "log must be callable: log(level, line)");
            return -1;
        }
        Py_INCREF(given[4]);
        self->log = given[4];
        desc.log = log_line;
        desc.log_user = self;
    }
    if (!desc.device) {
        desc.device = getenv("FV_DEVICE");
        if (!desc.device || !desc.device[0]) desc.device = "cpu";
    }
    if (!strcmp(desc.device, "cuda")) desc.device = "cuda:0";           /* as torch writes the first one */
    self->where = device_of(desc.device);
    self->device_name = PyUnicode_FromString(desc.device);
    if (!self->device_name) return -1;
    fv_status s;
    Py_BEGIN_ALLOW_THREADS
    s = fv_open(&desc, &self->ctx, &err);
    Py_END_ALLOW_THREADS
    if (s != FV_OK) raise_status(s, &err);
    return s == FV_OK ? 0 : -1;
}

static PyObject *context_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static signature sig = { "Context", 1, { "device", "cpu_isa", "num_threads", "cache_dir", "log" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    if (read_call(&sig, args, kwargs, given) != 0) return NULL;
    context_object *self = new_object(type);
    if (self && open_context(self, given) != 0) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static fv_status close_context(context_object *self)
{
    fv_status s;
    Py_BEGIN_ALLOW_THREADS
    s = fv_close(&self->ctx);
    Py_END_ALLOW_THREADS
    return s;
}

static void context_dealloc(PyObject *self)
{
    context_object *c = (context_object *)self;
    if (c->ctx) close_context(c);       /* plans, caches and variants hold a reference, so there are none */
    Py_XDECREF(c->device_name);
    Py_XDECREF(c->log);
    free_object(self);
}

static PyObject *context_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    context_object *c = (context_object *)self;
    const fv_status s = c->ctx ? close_context(c) : FV_OK;
    if (s == FV_OK) Py_RETURN_NONE;
    const fv_error err = { .status = s, .field = "context", .request = -1, .text = "plans, caches or variants of the context are still open" };
    return raise_status(s, &err);
}

static PyObject *context_enter(PyObject *self, PyObject *unused)
{
    (void)unused;
    Py_INCREF(self);
    return self;
}

static PyObject *context_exit(PyObject *self, PyObject *args)
{
    (void)args;
    return context_close(self, NULL);
}

static PyObject *context_errors(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static signature sig = { "errors", 1, { "clear" }, { NULL }, 0 };
    static const char *const names[] = { "", "page_id", "length", "rows", "value", "stale", "slot" };
    PyObject *given[MAX_ARGS];
    fv_errors e;
    bool clear = false;
    context_object *c = as_context(self);
    if (!c || read_fast(&sig, args, nargs, kwnames, given) != 0 || take_bool(given[0], "clear", &clear) != 0) return NULL;
    const fv_status s = fv_ctx_errors(c->ctx, &e, clear);
    if (s != FV_OK) return raise_status(s, NULL);
    if (e.what == FV_FAULT_NONE) Py_RETURN_NONE;
    const bool named = (size_t)e.what < sizeof names / sizeof names[0];
    return Py_BuildValue("{s:s,s:i,s:L,s:L,s:L}", "what", named ? names[e.what] : "unknown", "request", (int)e.request, "slot", (long long)e.slot,
                         "value", (long long)e.value, "count", (long long)e.count);
}

static PyObject *context_device(PyObject *self, void *unused)
{
    (void)unused;
    PyObject *name = ((context_object *)self)->device_name;
    Py_INCREF(name);
    return name;
}

static PyObject *context_closed(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((context_object *)self)->ctx == NULL);
}

static PyObject *context_repr(PyObject *self)
{
    const context_object *c = (context_object *)self;
    return PyUnicode_FromFormat("<foveal.Context on %U%s>", c->device_name, c->ctx ? "" : ", closed");
}

static PyMethodDef context_methods[] = {
    { "close", context_close, METH_NOARGS, "close($self)\n--\n\nCloses the context. Blocks until its threads have ended. BusyError while plans, caches or variants are open." },
    { "errors", (PyCFunction)(void (*)(void))context_errors, METH_FASTCALL | METH_KEYWORDS,
      "errors($self, clear=False)\n--\n\nThe first bad thing that a kernel met in page tables, lengths or slots since the word was last cleared: None, or a dict of what "
      "(\"page_id\", \"length\", \"rows\", \"value\", \"stale\", \"slot\"), request, slot, value, count. Never blocks." },
    { "__enter__", context_enter, METH_NOARGS, NULL },
    { "__exit__", context_exit, METH_VARARGS, NULL },
    { NULL, NULL, 0, NULL },
};

static PyGetSetDef context_fields[] = {
    { "device", context_device, NULL, "\"cpu\" or \"cuda:N\"", NULL },
    { "closed", context_closed, NULL, "was close() called?", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot context_slots[] = {
    { Py_tp_new, context_new },
    { Py_tp_dealloc, context_dealloc },
    { Py_tp_repr, context_repr },
    { Py_tp_methods, context_methods },
    { Py_tp_getset, context_fields },
    { Py_tp_doc, "Context(device=None, *, cpu_isa=None, num_threads=0, cache_dir=None, log=None)\n--\n\n"
                 "One device. Threads may share it.\n\n"
                 "device: \"cpu\" or \"cuda:N\" (\"cuda\": \"cuda:0\"); None: FV_DEVICE of the environment, else \"cpu\".\n"
                 "cpu_isa: highest CPU level to use (\"scalar\", \"avx2\", \"avx512\", ...); None: FV_CPU, else the best there is.\n"
                 "num_threads: CPU workers; 0: FV_NUM_THREADS, else the CPUs this process may use.\n"
                 "cache_dir: where compiled kernels are kept.\n"
                 "log: called as log(level, line), level 1 (error) to 4 (debug), from any thread.\n\n"
                 "Raises DeviceError where the device does not exist. A context manager: closes at the end." },
    { 0, NULL },
};

PyType_Spec context_spec = { "foveal.Context", sizeof(context_object), 0, Py_TPFLAGS_DEFAULT, context_slots };

/* -------------------------------------------------------------------------------------------------------- variants */

static PyObject *variant_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static signature sig = { "Variant", 3, { "!context", "!name", "!text" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    const char *name = NULL, *text = NULL;
    fv_error err;
    if (read_call(&sig, args, kwargs, given) != 0) return NULL;
    context_object *context = as_context(given[0]);
    if (!context || take_text(given[1], "name", &name) != 0 || take_text(given[2], "text", &text) != 0) return NULL;
    variant_object *self = new_object(type);
    if (!self) return NULL;
    Py_INCREF((PyObject *)context);
    self->context = context;
    Py_INCREF(given[1]);
    self->name = given[1];
    fv_status s;
    Py_BEGIN_ALLOW_THREADS
    s = fv_variant_create(context->ctx, name, text, &self->variant, &err);
    Py_END_ALLOW_THREADS
    if (s == FV_OK) return (PyObject *)self;
    Py_DECREF((PyObject *)self);
    return raise_status(s, &err);
}

static void variant_dealloc(PyObject *self)
{
    variant_object *v = (variant_object *)self;
    fv_variant_destroy(&v->variant);    /* problems hold a reference, and plans to these: nothing uses it */
    Py_XDECREF((PyObject *)v->context);
    Py_XDECREF(v->name);
    free_object(self);
}

static PyObject *variant_name(PyObject *self, void *unused)
{
    (void)unused;
    PyObject *name = ((variant_object *)self)->name;
    Py_INCREF(name);
    return name;
}

static PyGetSetDef variant_fields[] = {
    { "name", variant_name, NULL, "the name it was given", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot variant_slots[] = {
    { Py_tp_new, variant_new },
    { Py_tp_dealloc, variant_dealloc },
    { Py_tp_getset, variant_fields },
    { Py_tp_doc, "Variant(context, name, text)\n--\n\nA variant of your own from its text (docs/variants.md): what changes a score, a key, a query or the softmax on the way. "
                 "The text is code and runs with the rights of this process.\n\nBlocks: may start a compiler. Raises CompileError; value is the line." },
    { 0, NULL },
};

PyType_Spec variant_spec = { "foveal.Variant", sizeof(variant_object), 0, Py_TPFLAGS_DEFAULT, variant_slots };
