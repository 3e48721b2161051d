/* SPDX-License-Identifier: Apache-2.0 */
/* error.c -- statuses as exceptions: foveal.Error, and one class per status that is also the builtin a Python programmer would catch. */
#include "types.h"

static PyObject *base;
static PyObject *classes[FV_E_BUSY + 1];

typedef struct class_row { fv_status status; const char *name, *doc; PyObject **builtin; } class_row;

static const class_row rows[] = {
    { FV_E_INVALID, "InvalidError", "An argument is wrong: see field, value and limit.", &PyExc_ValueError },
    { FV_E_UNSUPPORTED, "UnsupportedError", "No kernel does this: the text has each kernel's reason.", &PyExc_NotImplementedError },
    { FV_E_NO_MEMORY, "NoMemoryError", "Out of memory.", &PyExc_MemoryError },
    { FV_E_CAPACITY, "CapacityError", "A plan's maximum or a cache's pool is too small: limit says what there is.", &PyExc_ValueError },
    { FV_E_NOT_READY, "NotReadyError", "Not possible while a stream is captured, or not compiled yet.", &PyExc_RuntimeError },
    { FV_E_DEVICE, "DeviceError", "The device or its driver reported an error.", &PyExc_RuntimeError },
    { FV_E_COMPILE, "CompileError", "A variant's text does not compile: value is the line.", &PyExc_RuntimeError },
    { FV_E_VERSION, "VersionError", "Built against another ABI version.", &PyExc_RuntimeError },
    { FV_E_IO, "FileError", "A file could not be read or written.", &PyExc_OSError },
    { FV_E_BUSY, "BusyError", "The object is in use.", &PyExc_RuntimeError },
};

static PyObject *make_class(const char *name, const char *doc, PyObject *bases)
{
    char full[64];
    PyOS_snprintf(full, sizeof full, "foveal.%s", name);
    return PyErr_NewExceptionWithDoc(full, doc, bases, NULL);
}

int add_errors(PyObject *module)
{
    base = make_class("Error", "What every error of Foveal is.\n\nAttributes: status (\"FV_E_INVALID\"), field (\"batch.lengths[3]\"), value (what was given), "
                      "limit (what it was compared with), request (which request, -1: none).", NULL);
    if (!base || PyModule_AddObjectRef(module, "Error", base) != 0) return -1;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        PyObject *bases = PyTuple_Pack(2, base, *rows[i].builtin);
        PyObject *class = bases ? make_class(rows[i].name, rows[i].doc, bases) : NULL;
        Py_XDECREF(bases);
        if (!class || PyModule_AddObjectRef(module, rows[i].name, class) != 0) return -1;
        classes[rows[i].status] = class;
    }
    return 0;
}

static int set_text(PyObject *e, const char *name, const char *text)
{
    PyObject *value = PyUnicode_FromString(text);
    const int s = value ? PyObject_SetAttrString(e, name, value) : -1;
    Py_XDECREF(value);
    return s;
}

static int set_number(PyObject *e, const char *name, int64_t number)
{
    PyObject *value = PyLong_FromLongLong(number);
    const int s = value ? PyObject_SetAttrString(e, name, value) : -1;
    Py_XDECREF(value);
    return s;
}

PyObject *raise_status(fv_status status, const fv_error *err)
{
    const bool filled = err && err->status == status;
    const char *text = filled && err->text[0] ? err->text : fv_status_text(status);
    PyObject *class = status > FV_OK && status <= FV_E_BUSY && classes[status] ? classes[status] : base;
    PyObject *e = PyObject_CallFunction(class, "s", text);
    if (e && set_text(e, "status", fv_status_name(status)) == 0 && set_text(e, "field", filled ? err->field : "") == 0 &&
        set_number(e, "value", filled ? err->value : 0) == 0 && set_number(e, "limit", filled ? err->limit : 0) == 0 &&
        set_number(e, "request", filled ? err->request : -1) == 0)
        PyErr_SetObject(class, e);
    Py_XDECREF(e);
    return NULL;
}
