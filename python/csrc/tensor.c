/* SPDX-License-Identifier: Apache-2.0 */
/* tensor.c -- foveal.Tensor: an array under another element type. */
#include "types.h"

PyTypeObject *tensor_type;

typedef struct tensor_object {
    PyObject_HEAD
    PyObject *array;
    const char *dtype;
} tensor_object;

bool tensor_unwrap(PyObject *object, PyObject **inner, const char **dtype)
{
    if (Py_TYPE(object) != tensor_type) return false;
    *inner = ((tensor_object *)object)->array;
    *dtype = ((tensor_object *)object)->dtype;
    return true;
}

static PyObject *tensor_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static signature sig = { "Tensor", 2, { "!array", "!dtype" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    const char *text = NULL;
    if (read_call(&sig, args, kwargs, given) != 0 || take_text(given[1], "dtype", &text) != 0) return NULL;
    const char *dtype = text ? to_dtype(text) : NULL;
    if (!dtype) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "dtype must be a str");
        return NULL;
    }
    PyObject *array = given[0], *inner;
    const char *old;
    if (tensor_unwrap(array, &inner, &old)) array = inner;
    tensor_object *self = new_object(type);
    if (!self) return NULL;
    Py_INCREF(array);
    self->array = array;
    self->dtype = dtype;
    return (PyObject *)self;
}

static void tensor_dealloc(PyObject *self)
{
    Py_XDECREF(((tensor_object *)self)->array);
    free_object(self);
}

static PyObject *tensor_array(PyObject *self, void *unused)
{
    (void)unused;
    PyObject *array = ((tensor_object *)self)->array;
    Py_INCREF(array);
    return array;
}

static PyObject *tensor_dtype(PyObject *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(((tensor_object *)self)->dtype);
}

static PyObject *tensor_shape(PyObject *self, void *unused)
{
    (void)unused;
    holder h;
    array_view a;
    holder_init(&h);
    const int bad = to_array(self, "array", &a, &h);
    holder_release(&h);
    if (bad) return NULL;
    PyObject *shape = PyTuple_New(a.tensor.ndim);
    for (int i = 0; shape && i < a.tensor.ndim; i++) PyTuple_SetItem(shape, i, PyLong_FromLongLong(a.tensor.shape[i]));
    return shape;
}

static PyObject *tensor_repr(PyObject *self)
{
    const tensor_object *t = (tensor_object *)self;
    return PyUnicode_FromFormat("foveal.Tensor(%R, \"%s\")", t->array, t->dtype);
}

static PyGetSetDef tensor_fields[] = {
    { "array", tensor_array, NULL, "the wrapped array", NULL },
    { "dtype", tensor_dtype, NULL, "the element type that it is read as", NULL },
    { "shape", tensor_shape, NULL, "in elements of dtype", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot tensor_slots[] = {
    { Py_tp_new, tensor_new },
    { Py_tp_dealloc, tensor_dealloc },
    { Py_tp_repr, tensor_repr },
    { Py_tp_getset, tensor_fields },
    { Py_tp_doc, "Tensor(array, dtype)\n--\n\nThe memory of `array` read as another element type, for libraries without a name for it: NumPy's uint16 as \"bf16\", uint8 as "
                 "\"fp8_e4m3\", \"fp8_e5m2\", \"fp4_e2m1\", \"int4\" (two elements a byte, low half first) or \"b1\" (bits, low first).\n\n"
                 "With fp4_e2m1, int4 and b1 the last axis counts elements, not bytes, and must be contiguous. Nothing is copied." },
    { 0, NULL },
};

PyType_Spec tensor_spec = { "foveal.Tensor", sizeof(tensor_object), 0, Py_TPFLAGS_DEFAULT, tensor_slots };
