/* SPDX-License-Identifier: Apache-2.0 */
#include "args.h"

#include <limits.h>
#include <string.h>

static const char *plain(const char *name) { return name[0] == '!' ? name + 1 : name; }

static int prepare(signature *sig)
{
    int n = 0;
    for (; n < MAX_ARGS && sig->names[n]; n++) {
        sig->interned[n] = PyUnicode_InternFromString(plain(sig->names[n]));
        if (!sig->interned[n]) return -1;
    }
    sig->count = n;
    return 0;
}

static int begin(signature *sig, Py_ssize_t nargs, PyObject **out)
{
    if (!sig->count && prepare(sig) != 0) return -1;
    if (nargs > sig->positional) {
        PyErr_Format(PyExc_TypeError, "%s() takes %d positional arguments; %zd were given", sig->function, sig->positional, nargs);
        return -1;
    }
    for (int i = 0; i < sig->count; i++) out[i] = NULL;
    return 0;
}

static int find(const signature *sig, PyObject *name)
{
    for (int i = 0; i < sig->count; i++)
        if (sig->interned[i] == name) return i;
    for (int i = 0; i < sig->count; i++)                /* a name that was made at run time */
        if (PyUnicode_Compare(sig->interned[i], name) == 0) return i;
    PyErr_Format(PyExc_TypeError, "%s() has no argument '%U'", sig->function, name);
    return -1;
}

static int put(const signature *sig, PyObject *name, PyObject *value, PyObject **out)
{
    const int i = find(sig, name);
    if (i < 0) return -1;
    if (out[i]) {
        PyErr_Format(PyExc_TypeError, "%s() was given '%s' twice", sig->function, plain(sig->names[i]));
        return -1;
    }
    out[i] = value;
    return 0;
}

static int end(const signature *sig, PyObject **out)
{
    for (int i = 0; i < sig->count; i++)
        if (!out[i] && sig->names[i][0] == '!') {
            PyErr_Format(PyExc_TypeError, "%s() needs '%s'", sig->function, plain(sig->names[i]));
            return -1;
        }
    return 0;
}

int read_fast(signature *sig, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, PyObject **out)
{
    if (begin(sig, nargs, out) != 0) return -1;
    for (Py_ssize_t i = 0; i < nargs; i++) out[i] = args[i];
    const Py_ssize_t named = kwnames ? PyTuple_Size(kwnames) : 0;
    for (Py_ssize_t i = 0; i < named; i++)
        if (put(sig, PyTuple_GetItem(kwnames, i), args[nargs + i], out) != 0) return -1;
    return end(sig, out);
}

int read_call(signature *sig, PyObject *args, PyObject *kwargs, PyObject **out)
{
    const Py_ssize_t nargs = PyTuple_Size(args);
    if (begin(sig, nargs, out) != 0) return -1;
    for (Py_ssize_t i = 0; i < nargs; i++) out[i] = PyTuple_GetItem(args, i);
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (kwargs && PyDict_Next(kwargs, &at, &key, &value))
        if (put(sig, key, value, out) != 0) return -1;
    return end(sig, out);
}

/* -------------------------------------------------------------------------------------------------------- values */

static bool absent(PyObject *value) { return !value || value == Py_None; }

int take_i64(PyObject *value, const char *name, int64_t *out)
{
    if (absent(value)) return 0;
    PyObject *index = PyNumber_Index(value);            /* also numpy's integers; a float is refused */
    if (!index) {
        PyErr_Format(PyExc_TypeError, "%s must be an integer", plain(name));
        return -1;
    }
    *out = PyLong_AsLongLong(index);
    Py_DECREF(index);
    if (*out == -1 && PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError, "%s does not fit in 64 bits", plain(name));
        return -1;
    }
    return 0;
}

int take_i32(PyObject *value, const char *name, int32_t *out)
{
    int64_t wide = *out;
    if (take_i64(value, name, &wide) != 0) return -1;
    if (wide < INT32_MIN || wide > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s is %lld; it must fit in 32 bits", plain(name), (long long)wide);
        return -1;
    }
    *out = (int32_t)wide;
    return 0;
}

int take_double(PyObject *value, const char *name, double *out)
{
    if (absent(value)) return 0;
    PyObject *number = PyNumber_Float(value);
    if (!number) {
        PyErr_Format(PyExc_TypeError, "%s must be a number", plain(name));
        return -1;
    }
    *out = PyFloat_AsDouble(number);
    Py_DECREF(number);
    return 0;
}

int take_bool(PyObject *value, const char *name, bool *out)
{
    if (absent(value)) return 0;
    const int truth = PyObject_IsTrue(value);
    if (truth < 0) {
        PyErr_Format(PyExc_TypeError, "%s must be true or false", plain(name));
        return -1;
    }
    *out = truth;
    return 0;
}

int take_text(PyObject *value, const char *name, const char **out)
{
    if (absent(value)) return 0;
    if (!PyUnicode_Check(value)) {
        PyErr_Format(PyExc_TypeError, "%s must be a str", plain(name));
        return -1;
    }
    Py_ssize_t size;
    *out = PyUnicode_AsUTF8AndSize(value, &size);
    if (!*out) return -1;
    if (size == 0 || memchr(*out, 0, (size_t)size)) {
        PyErr_Format(PyExc_ValueError, size ? "%s holds a NUL character: %R" : "%s is an empty str", plain(name), value);
        return -1;
    }
    return 0;
}
