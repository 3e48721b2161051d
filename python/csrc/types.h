/* SPDX-License-Identifier: Apache-2.0 */
/* types.h -- the module's types and what they lend each other.
 *
 * Ownership: Plan, Cache and Variant hold a reference to their Context, a Plan to its Problem (which holds its Variants and argument arrays) and to
 * the Batch of its step (which holds every array it was made from). So nothing that the library keeps a pointer to is freed before it. */
#ifndef FVPY_TYPES_H
#define FVPY_TYPES_H

#include "args.h"
#include "convert.h"

typedef struct context_object {
    PyObject_HEAD
    fv_ctx *ctx;                        /* NULL: closed */
    device where;
    PyObject *device_name;              /* as given, or "cpu" */
    PyObject *log;                      /* called with (level, line); NULL: none */
} context_object;

typedef struct variant_object {
    PyObject_HEAD
    context_object *context;
    fv_variant *variant;
    PyObject *name;
} variant_object;

enum { MAX_USES = 16, MAX_USE_ARGS = 16 };

typedef struct problem_object {
    PyObject_HEAD
    fv_problem problem;
    fv_variant_use uses[MAX_USES];
    fv_arg args[MAX_USE_ARGS];          /* of all uses */
    fv_tensor tensors[MAX_USE_ARGS];
    int num_args;
    holder holds;
} problem_object;

typedef struct batch_object {
    PyObject_HEAD
    fv_batch batch;
    fv_arg args[MAX_USE_ARGS];
    fv_tensor tensors[MAX_USE_ARGS];
    holder holds;
} batch_object;

/* What Cache.pages gives: a page table that the cache keeps. */
typedef struct pages_object {
    PyObject_HEAD
    fv_pages pages;
    int64_t count;                      /* sequences */
    holder holds;
} pages_object;

extern PyTypeObject *context_type, *variant_type, *problem_type, *batch_type, *plan_type, *cache_type, *pages_type, *tensor_type;

extern PyType_Spec context_spec, variant_spec, problem_spec, batch_spec, plan_spec, cache_spec, pages_spec, tensor_spec;

/* Allocates an object of the type; everything behind its head is zero. */
void *new_object(PyTypeObject *type);
void free_object(void *object);         /* also gives the type back */

/* `object` as a Context that is open, etc.; NULL with a TypeError or ValueError set. */
context_object *as_context(PyObject *object);
problem_object *as_problem(PyObject *object);
batch_object *as_batch(PyObject *object);

/* foveal.Tensor(array, dtype): true and its parts (borrowed, constant) when `object` is one. */
bool tensor_unwrap(PyObject *object, PyObject **inner, const char **dtype);

/* Raises the exception of a status (attributes status, field, value, limit, request). Returns NULL. */
PyObject *raise_status(fv_status status, const fv_error *err);
int add_errors(PyObject *module);

/* A text that a library call writes: asks for its size, then for the text. */
typedef fv_status text_fn(void *of, const char *format, char *buffer, size_t size, size_t *needed, fv_error *err);
PyObject *text_of(text_fn *write, void *of, const char *format);

/* The arguments of a plan's maxima, from `first` on in a signature: see LIMIT_NAMES. */
#define LIMIT_NAMES                                                                                                    \
    "!max_requests", "!max_rows", "!max_kv_tokens", "max_pages", "max_segments", "max_segment_rows", "max_levels", "splits", "workers",    \
        "chunk", "invariant", "checked", "sharing", "workspace"
enum { NUM_LIMITS = 14 };
int take_limits(PyObject *const *given, const device *where, fv_plan_desc *out, holder *h);

/* plan.c for torch.c, both with the GIL: the plan, which is the caller's alone until plan_leave, and its device. NULL: an exception says why. */
bool is_plan(PyObject *object);
fv_plan *plan_enter(PyObject *plan, device *where);
void plan_leave(PyObject *plan);

/* Module functions: ops.c, companions.c, torch.c. */
extern PyMethodDef op_methods[], companion_methods[], torch_methods[];

#define KEYWORDS METH_FASTCALL | METH_KEYWORDS
#define CALL(f) (PyCFunction)(void (*)(void))(f)
#define FUNCTION(name) static PyObject *op_##name(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)

/* ops.c: an array that lies on `where`; None: data NULL. 0, or -1 with an exception set. */
int take_array(PyObject *object, const char *name, const device *where, bool written, fv_tensor *out, holder *h);
/* Lets go of what the call held; NULL where an exception is set (bad) or the status is one, else None. */
PyObject *finish_call(holder *h, int bad, fv_status s, const fv_error *err);
PyObject *copy_pair(const fv_copy *copy);       /* (src, dst), or None for (-1, -1) */

/* With the GIL released where `where` is the CPU: there a call computes, elsewhere it only launches. */
#define RELEASING_ON_CPU(where, statement)                                                                             \
    do {                                                                                                               \
        PyThreadState *releasing_state = (where)->type == DL_CPU ? PyEval_SaveThread() : NULL;                         \
        statement;                                                                                                     \
        if (releasing_state) PyEval_RestoreThread(releasing_state);                                                    \
    } while (0)

#endif
