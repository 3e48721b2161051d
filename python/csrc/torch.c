/* SPDX-License-Identifier: Apache-2.0 */
/* torch.c -- kernels of the torch operators of foveal.torch, registered through torch's stable C shim.
 *
 * The shim is plain C that torch keeps stable from release to release; its functions are found in the libtorch that the process has loaded, so the module
 * neither links torch nor is built against it. foveal/torch.py defines the schemas and the fake kernels; here are the real ones, for CPU and CUDA.
 *
 * Nouns
 *   stack      the call's arguments, 8 bytes each: a tensor is a handle that the kernel owns and must delete, an optional one a pointer to such a word
 *              (also the kernel's) or 0, numbers are their bits
 *   handle     the integer by which an operator names a plan: place in a table and how often the place was used, so that a stale one is refused. Graphs keep
 *              the integer; the plan behind it may be updated between their runs
 *
 * torch calls without the GIL. A kernel takes it for the table and gives it away while the CPU computes. Errors leave as torch's own (RuntimeError). */
#include "types.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef uint64_t word;
typedef struct at_tensor at_tensor;
typedef void kernel_fn(word *stack, uint64_t inputs, uint64_t outputs);

/* ------------------------------------------------------------------------------------------------------------ the shim */

static struct {
    int32_t (*get_data_ptr)(at_tensor *, void **);
    int32_t (*get_dim)(at_tensor *, int64_t *);
    int32_t (*get_sizes)(at_tensor *, int64_t **);
    int32_t (*get_strides)(at_tensor *, int64_t **);
    int32_t (*get_dtype)(at_tensor *, int32_t *);
    int32_t (*get_device_type)(at_tensor *, int32_t *);
    int32_t (*get_device_index)(at_tensor *, int32_t *);
    int32_t (*delete_tensor)(at_tensor *);
    int32_t (*init_impl)(const char *ns, const char *key, const char *file, uint32_t line, void **library);
    int32_t (*impl)(void *library, const char *name, kernel_fn *);
    void (*check)(bool, const char *function, const char *file, uint32_t line, const char *message);
    int32_t (*cuda_stream)(int32_t device, void **stream);      /* NULL: this torch has no CUDA */
    int32_t (*delete_word)(word *);                             /* torch >= 2.13 */
    void (*operator_delete)(void *);                            /* before: they come from C++'s new */
} shim;

static struct { int32_t code; const char *name; } dtypes[9];
static int32_t cuda_device;             /* torch's number of it; the CPU is 0 */
static bool registered;
static PyObject *context_of;            /* called with ("cuda", 0): the context for operators without a plan */

static int find(void *library, const char *name, void *at)
{
    void *symbol = dlsym(library, name);
    memcpy(at, &symbol, sizeof symbol);
    if (symbol) return 0;
    PyErr_Format(PyExc_ImportError, "this torch has no %s: foveal.torch needs its stable C shim (torch 2.10 or later)", name);
    return -1;
}

static int find_types(void *library)
{
    static const char *const types[][2] = {
        { "float32", "f32" }, { "float16", "f16" }, { "bfloat16", "bf16" }, { "float8_e4m3fn", "fp8_e4m3" }, { "float8_e5m2", "fp8_e5m2" },
        { "int8", "int8" }, { "uint8", "u8" }, { "int32", "i32" }, { "int64", "i64" },
    };
    int32_t (*code)(void);
    char name[64];
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        snprintf(name, sizeof name, "aoti_torch_dtype_%s", types[i][0]);
        if (find(library, name, &code) != 0) return -1;
        dtypes[i].code = code();
        dtypes[i].name = types[i][1];
    }
    if (find(library, "aoti_torch_device_type_cuda", &code) != 0) return -1;
    cuda_device = code();
    return 0;
}

static void find_optional(void *library, const char *name, void *at)
{
    void *symbol = library ? dlsym(library, name) : NULL;
    memcpy(at, &symbol, sizeof symbol);
}

static int find_shim(void)
{
    void *cpu = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD), *cuda = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    if (!cpu) {
        PyErr_SetString(PyExc_ImportError, "no libtorch_cpu.so is loaded: import torch first");
        return -1;
    }
#define NEED(name, field) find(cpu, "aoti_torch_" name, &shim.field) != 0
    if (NEED("get_data_ptr", get_data_ptr) || NEED("get_dim", get_dim) || NEED("get_sizes", get_sizes) || NEED("get_strides", get_strides) ||
        NEED("get_dtype", get_dtype) || NEED("get_device_type", get_device_type) || NEED("get_device_index", get_device_index) ||
        NEED("delete_tensor_object", delete_tensor) || NEED("library_init_impl", init_impl) || NEED("library_impl", impl) || NEED("check", check))
        return -1;
#undef NEED
    find_optional(cpu, "torch_delete_stable_ivalue", &shim.delete_word);
    if (!shim.delete_word && find(cpu, "_ZdlPv", &shim.operator_delete) != 0) return -1;       /* looked up in what libtorch itself is linked with */
    find_optional(cuda, "aoti_torch_get_current_cuda_stream", &shim.cuda_stream);
    return find_types(cpu);
}

/* ------------------------------------------------------------------------------------------------------------ the plans */

static struct place { PyObject *plan; uint32_t uses; } *places;
static uint32_t num_places;

static PyObject *remember(PyObject *module, PyObject *plan)
{
    (void)module;
    uint32_t at = 0;
    if (!is_plan(plan)) {
        PyErr_SetString(PyExc_TypeError, "plan must be a foveal.Plan");
        return NULL;
    }
    while (at < num_places && places[at].plan) at++;
    if (at == num_places) {
        const uint32_t more = num_places ? 2 * num_places : 16;
        struct place *grown = PyMem_Realloc(places, more * sizeof *grown);
        if (!grown) return PyErr_NoMemory();
        memset(grown + num_places, 0, (more - num_places) * sizeof *grown);
        places = grown;
        num_places = more;
    }
    Py_INCREF(plan);
    places[at].plan = plan;
    places[at].uses = (places[at].uses + 1) & 0x7fffffff;
    return PyLong_FromLongLong((int64_t)places[at].uses << 32 | at);
}

static PyObject **place_of(int64_t handle)
{
    const uint64_t at = (uint64_t)handle & 0xffffffff;
    return at < num_places && places[at].plan && places[at].uses == (uint64_t)handle >> 32 ? &places[at].plan : NULL;
}

static PyObject *forget(PyObject *module, PyObject *number)
{
    (void)module;
    const int64_t handle = PyLong_AsLongLong(number);
    if (handle == -1 && PyErr_Occurred()) return NULL;
    PyObject **place = place_of(handle);
    if (place) Py_CLEAR(*place);
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------------------------------------------------- a call */

enum { MAX_OWNED = 12, TEXT = 512 };

typedef struct call {
    const char *name;
    at_tensor *owned[MAX_OWNED];        /* to delete */
    int num_owned;
    bool failed;
    char text[TEXT];                    /* what went wrong */
    device where;
} call;

static bool fail(call *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
static bool fail(call *c, const char *format, ...)
{
    if (c->failed) return false;
    const int used = snprintf(c->text, sizeof c->text, "foveal::%s: ", c->name);
    va_list list;
    va_start(list, format);
    vsnprintf(c->text + used, sizeof c->text - (size_t)used, format, list);
    va_end(list);
    c->failed = true;
    return false;
}

/* The Python exception becomes the call's. */
static bool fail_python(call *c)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *words = value ? PyObject_Str(value) : NULL;
    const char *text = words ? PyUnicode_AsUTF8AndSize(words, NULL) : NULL;
    fail(c, "%s", text ? text : "unknown error");
    Py_XDECREF(words);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    PyErr_Clear();
    return false;
}

/* Lets go of the arguments, then raises where something failed: through C frames, which hold nothing. */
static void leave(call *c)
{
    for (int i = 0; i < c->num_owned; i++) shim.delete_tensor(c->owned[i]);
    if (c->failed) shim.check(false, c->name, "foveal/torch.c", 0, c->text);
}

static at_tensor *own(call *c, word w)
{
    at_tensor *t;
    memcpy(&t, &w, sizeof t);
    c->owned[c->num_owned++] = t;
    return t;
}

/* NULL: none. */
static at_tensor *own_optional(call *c, word w)
{
    if (!w) return NULL;
    word *inner;
    memcpy(&inner, &w, sizeof inner);
    at_tensor *t = own(c, *inner);
    if (shim.delete_word) shim.delete_word(inner);
    else shim.operator_delete(inner);
    return t;
}

static double number_of(word w)
{
    double x;
    memcpy(&x, &w, sizeof x);
    return x;
}

static bool type_of(call *c, at_tensor *t, const char *name, const char **out)
{
    int32_t code = -1;
    shim.get_dtype(t, &code);
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (dtypes[i].code == code) {
            *out = dtypes[i].name;
            return true;
        }
    return fail(c, "%s has an element type that Foveal does not know", name);
}

static bool is_here(call *c, at_tensor *t, const char *name)
{
    int32_t type = -1, id = 0;
    shim.get_device_type(t, &type);
    shim.get_device_index(t, &id);
    if (c->where.type == DL_CUDA ? type == cuda_device && id == c->where.id : type == 0) return true;
    return fail(c, "%s does not lie on the device of the %s", name, strcmp(c->name, "attention") ? "first tensor" : "plan");
}

/* t NULL: absent. */
static bool view_of(call *c, at_tensor *t, const char *name, fv_tensor *out)
{
    static _Alignas(64) char nothing[64];
    int64_t dim = 0, elements = 1, *sizes = NULL, *strides = NULL;
    memset(out, 0, sizeof *out);
    if (!t) return true;
    if (c->failed || !is_here(c, t, name) || !type_of(c, t, name, &out->dtype)) return false;
    shim.get_dim(t, &dim);
    shim.get_sizes(t, &sizes);
    shim.get_strides(t, &strides);
    shim.get_data_ptr(t, &out->data);
    if (dim > FV_MAX_DIMS) return fail(c, "%s has %lld axes; at most %d", name, (long long)dim, FV_MAX_DIMS);
    out->ndim = (int32_t)dim;
    for (int i = 0; i < dim; i++) {
        out->shape[i] = sizes[i];
        out->stride[i] = strides[i];
        elements *= sizes[i];
    }
    if (elements == 0) {                /* strides of nothing are anything */
        int64_t dense = 1;
        for (int i = (int)dim - 1; i >= 0; i--) {
            out->stride[i] = dense;
            dense *= sizes[i] > 0 ? sizes[i] : 1;
        }
        if (!out->data) out->data = nothing;
    }
    return true;
}

static bool index_of(call *c, at_tensor *t, const char *name, fv_index *out)
{
    fv_tensor view;
    if (!view_of(c, t, name, &view)) return false;
    const bool wide = !strcmp(view.dtype, "i64");
    if (view.ndim != 1 || (!wide && strcmp(view.dtype, "i32"))) return fail(c, "%s must be int32 or int64 with one axis", name);
    *out = (fv_index){ .count = view.shape[0], .stride = view.stride[0] > 0 ? view.stride[0] : 1, .type = wide ? FV_INDEX_I64 : FV_INDEX_I32 };
    if (c->where.type == DL_CUDA) out->device = view.data;
    else out->host = view.data;
    return true;
}

static fv_stream stream_here(const call *c)
{
    void *stream = NULL;
    if (c->where.type == DL_CUDA && shim.cuda_stream) shim.cuda_stream(c->where.id, &stream);
    return stream;
}

/* The device of the first tensor, and its context: asked of Python at the first call. */
static fv_ctx *context_here(call *c, at_tensor *t)
{
    int32_t type = 0, id = 0;
    shim.get_device_type(t, &type);
    shim.get_device_index(t, &id);
    c->where.type = type == cuda_device ? DL_CUDA : DL_CPU;
    c->where.id = type == cuda_device ? id : 0;
    PyObject *made = PyObject_CallFunction(context_of, "si", type == cuda_device ? "cuda" : "cpu", (int)id);
    context_object *context = made ? as_context(made) : NULL;
    fv_ctx *ctx = context ? context->ctx : NULL;
    if (!ctx) fail_python(c);
    Py_XDECREF(made);                   /* foveal.torch keeps it */
    return ctx;
}

static void finish(call *c, fv_status s, const fv_error *err)
{
    if (s != FV_OK) fail(c, "%s", err->text);
}

/* ----------------------------------------------------------------------------------------------------------- attention */

static const char *const run_args[] = { "k_scale", "v_scale", "sinks", "slopes" };
enum { PLAN, Q, K, V, O, LSE, Q_TAIL, K_TAIL, FIRST_RUN_ARG, NUM_RUN_ARGS = 4 };

static bool run_args_of(call *c, at_tensor *const *given, fv_tensor *tensors, fv_arg *args, fv_tensors *out)
{
    int n = 0;
    for (int i = 0; i < NUM_RUN_ARGS; i++) {
        if (!given[i]) continue;
        if (!view_of(c, given[i], run_args[i], &tensors[n])) return false;
        args[n] = (fv_arg){ .name = run_args[i], .tensor = &tensors[n] };
        n++;
    }
    out->args = n ? args : NULL;
    out->num_args = n;
    return true;
}

static void attend(call *c, int64_t handle, at_tensor *const *t)
{
    PyObject **place = place_of(handle);
    if (!place) {
        fail(c, "%lld is no handle of a plan: it was closed, or is not one of foveal.torch.Plan", (long long)handle);
        return;
    }
    PyObject *plan = *place;
    Py_INCREF(plan);
    fv_plan *p = plan_enter(plan, &c->where);
    if (!p) {
        fail_python(c);
        Py_DECREF(plan);
        return;
    }
    fv_tensors x = { 0 };
    fv_tensor tensors[NUM_RUN_ARGS];
    fv_arg args[NUM_RUN_ARGS];
    fv_error err;
    if (view_of(c, t[Q], "q", &x.q) && view_of(c, t[K], "k", &x.k) && view_of(c, t[V], "v", &x.v) && view_of(c, t[O], "o", &x.o) &&
        view_of(c, t[LSE], "lse", &x.lse) && view_of(c, t[Q_TAIL], "q_tail", &x.q_tail) && view_of(c, t[K_TAIL], "k_tail", &x.k_tail) &&
        run_args_of(c, t + FIRST_RUN_ARG, tensors, args, &x)) {
        fv_status s;
        fv_stream stream = stream_here(c);
        RELEASING_ON_CPU(&c->where, s = fv_run(p, &x, stream, &err));
        finish(c, s, &err);
    }
    plan_leave(plan);
    Py_DECREF(plan);
}

static void attention_kernel(word *stack, uint64_t inputs, uint64_t outputs)
{
    call c = { .name = "attention", .num_owned = 0 };
    at_tensor *t[FIRST_RUN_ARG + NUM_RUN_ARGS] = { NULL };
    (void)outputs;
    for (int i = Q; i < (int)inputs && i < FIRST_RUN_ARG + NUM_RUN_ARGS; i++)
        t[i] = i == V || i >= LSE ? own_optional(&c, stack[i]) : own(&c, stack[i]);
    const PyGILState_STATE gil = PyGILState_Ensure();
    attend(&c, (int64_t)stack[PLAN], t);
    PyGILState_Release(gil);
    leave(&c);
}

/* ---------------------------------------------------------------------------------------------------- append, merge, rope */

static void append(call *c, at_tensor *const *t)
{
    fv_append_desc d = { 0 };
    fv_error err;
    fv_ctx *ctx = context_here(c, t[0]);
    if (!ctx || !view_of(c, t[0], "new_k", &d.new_k) || !view_of(c, t[1], "new_v", &d.new_v) || !view_of(c, t[2], "k", &d.k) ||
        !view_of(c, t[3], "v", &d.v) || !index_of(c, t[4], "slots", &d.slots))
        return;
    if (d.k.ndim == 4) {
        d.pages.num_pages = d.k.shape[0];
        d.pages.page_size = (int32_t)d.k.shape[1];
    }
    fv_status s;
    fv_stream stream = stream_here(c);
    RELEASING_ON_CPU(&c->where, s = fv_append(ctx, &d, stream, &err));
    finish(c, s, &err);
}

static void append_kernel(word *stack, uint64_t inputs, uint64_t outputs)
{
    call c = { .name = "append_kv", .num_owned = 0 };
    at_tensor *t[5];
    (void)inputs, (void)outputs;
    for (int i = 0; i < 5; i++) t[i] = own(&c, stack[i]);
    const PyGILState_STATE gil = PyGILState_Ensure();
    append(&c, t);
    PyGILState_Release(gil);
    leave(&c);
}

static void merge(call *c, at_tensor *const *t, bool base2)
{
    fv_tensor o_states[2], lse_states[2], o, lse;
    fv_error err;
    fv_ctx *ctx = context_here(c, t[0]);
    if (!ctx || !view_of(c, t[0], "o_a", &o_states[0]) || !view_of(c, t[1], "lse_a", &lse_states[0]) || !view_of(c, t[2], "o_b", &o_states[1]) ||
        !view_of(c, t[3], "lse_b", &lse_states[1]) || !view_of(c, t[4], "o", &o) || !view_of(c, t[5], "lse", &lse))
        return;
    fv_status s;
    fv_stream stream = stream_here(c);
    RELEASING_ON_CPU(&c->where, s = fv_merge(ctx, o_states, lse_states, 2, base2, &o, lse.data ? &lse : NULL, stream, &err));
    finish(c, s, &err);
}

static void merge_kernel(word *stack, uint64_t inputs, uint64_t outputs)
{
    call c = { .name = "merge_state", .num_owned = 0 };
    at_tensor *t[6];
    (void)inputs, (void)outputs;
    for (int i = 0; i < 5; i++) t[i] = own(&c, stack[i]);
    t[5] = own_optional(&c, stack[5]);
    const PyGILState_STATE gil = PyGILState_Ensure();
    merge(&c, t, (stack[6] & 0xff) != 0);
    PyGILState_Release(gil);
    leave(&c);
}

static void turn(call *c, at_tensor *const *t, const word *numbers)
{
    fv_rope_desc d = { .rotary_dim = (int32_t)numbers[0], .interleaved = (numbers[1] & 0xff) != 0, .base = number_of(numbers[2]) };
    fv_tensor x, y;
    fv_index positions;
    fv_error err;
    fv_ctx *ctx = context_here(c, t[0]);
    if (!ctx || !view_of(c, t[0], "x", &x) || !index_of(c, t[1], "positions", &positions) || !view_of(c, t[2], "y", &y)) return;
    fv_status s;
    fv_stream stream = stream_here(c);
    RELEASING_ON_CPU(&c->where, s = fv_rope(ctx, &d, &x, positions, &y, stream, &err));
    finish(c, s, &err);
}

static void rope_kernel(word *stack, uint64_t inputs, uint64_t outputs)
{
    call c = { .name = "rope", .num_owned = 0 };
    at_tensor *t[3];
    (void)inputs, (void)outputs;
    for (int i = 0; i < 3; i++) t[i] = own(&c, stack[i]);
    const PyGILState_STATE gil = PyGILState_Ensure();
    turn(&c, t, stack + 3);
    PyGILState_Release(gil);
    leave(&c);
}

/* -------------------------------------------------------------------------------------------------------- registration */

static PyObject *register_kernels(PyObject *module, PyObject *callable)
{
    static const struct { const char *name; kernel_fn *kernel; } kernels[] = {
        { "attention", attention_kernel }, { "append_kv", append_kernel }, { "merge_state", merge_kernel }, { "rope", rope_kernel },
    };
    static const char *const keys[] = { "CPU", "CUDA" };
    (void)module;
    if (registered) Py_RETURN_NONE;
    if (find_shim() != 0) return NULL;
    Py_INCREF(callable);
    context_of = callable;
    for (size_t k = 0; k < sizeof keys / sizeof keys[0]; k++) {
        void *library;                  /* torch keeps kernels only while it lives: for the process */
        int32_t bad = shim.init_impl("foveal", keys[k], "foveal/torch.c", 0, &library);
        for (size_t i = 0; !bad && i < sizeof kernels / sizeof kernels[0]; i++) bad = shim.impl(library, kernels[i].name, kernels[i].kernel);
        if (bad) {
            PyErr_Format(PyExc_RuntimeError, "torch refused the kernels of foveal for %s", keys[k]);
            return NULL;
        }
    }
    registered = true;
    Py_RETURN_NONE;
}

PyMethodDef torch_methods[] = {
    { "_torch_register", register_kernels, METH_O, "_torch_register(context_of)\n--\n\nRegisters the kernels of foveal.torch with the torch that is loaded." },
    { "_torch_handle", remember, METH_O, "_torch_handle(plan)\n--\n\nAn integer by which torch operators name a plan, until _torch_forget." },
    { "_torch_forget", forget, METH_O, "_torch_forget(handle)\n--\n\nThe handle is refused from now on." },
    { NULL, NULL, 0, NULL },
};
