/* SPDX-License-Identifier: Apache-2.0 */
/* args.h -- reading a call's arguments: by position and by interned keyword, without a tuple, a dict or a format string.
 *
 *     static signature sig = { "run", 4, { "!q", "!k", "!v", "!o", "lse", "stream" } };
 *     PyObject *given[NUM_ARGS];  read_fast(&sig, args, nargs, kwnames, given)
 *
 * The first `positional` may be given by position; "!" marks the ones that must be given. What is not given is NULL. References are borrowed. */
#ifndef FVPY_ARGS_H
#define FVPY_ARGS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

enum { MAX_ARGS = 32 };

typedef struct signature {
    const char *function;
    int positional;
    const char *names[MAX_ARGS];
    PyObject *interned[MAX_ARGS];       /* made at the first call */
    int count;
} signature;

/* 0, or -1 with a TypeError set. `out` has room for MAX_ARGS. */
int read_fast(signature *sig, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, PyObject **out);
int read_call(signature *sig, PyObject *args, PyObject *kwargs, PyObject **out);        /* for tp_new */

/* Values. NULL and None leave *out as it is. 0, or -1 with an exception that has the name. */
int take_i64(PyObject *value, const char *name, int64_t *out);
int take_i32(PyObject *value, const char *name, int32_t *out);
int take_double(PyObject *value, const char *name, double *out);
int take_bool(PyObject *value, const char *name, bool *out);
int take_text(PyObject *value, const char *name, const char **out);     /* UTF-8 that belongs to the object */

#endif
