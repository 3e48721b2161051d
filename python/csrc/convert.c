/* SPDX-License-Identifier: Apache-2.0 */
#include "convert.h"

#include <limits.h>
#include <string.h>

#include "types.h"

enum { HELD_OBJECT, HELD_BUFFER, HELD_MANAGED, HELD_VERSIONED, HELD_MEMORY };

/* --------------------------------------------------------------------------------------------------- the holder */

void holder_init(holder *h)
{
    h->count = 0;
    h->room = (int)(sizeof h->first / sizeof h->first[0]);
    h->items = h->first;
    h->stream = NULL;
    h->has_stream = false;
}

static held *hold(holder *h, int kind)
{
    if (h->count == h->room) {
        held *more = PyMem_Malloc((size_t)h->room * 2 * sizeof *more);
        if (!more) {
            PyErr_NoMemory();
            return NULL;
        }
        memcpy(more, h->items, (size_t)h->count * sizeof *more);
        if (h->items != h->first) PyMem_Free(h->items);
        h->items = more;
        h->room *= 2;
    }
    h->items[h->count].kind = kind;
    return &h->items[h->count++];
}

static void release_one(held *it)
{
    switch (it->kind) {
    case HELD_OBJECT: Py_DECREF(it->what.object); break;
    case HELD_BUFFER:
        PyBuffer_Release(it->what.buffer);
        PyMem_Free(it->what.buffer);
        break;
    case HELD_MANAGED:
        if (it->what.managed->deleter) it->what.managed->deleter(it->what.managed);
        break;
    case HELD_VERSIONED:
        if (it->what.versioned->deleter) it->what.versioned->deleter(it->what.versioned);
        break;
    case HELD_MEMORY: PyMem_Free(it->what.memory); break;
    }
}

void holder_release(holder *h)
{
    const int count = h->count;
    h->count = 0;                       /* releasing may run Python code that looks at the owner */
    for (int i = count - 1; i >= 0; i--) release_one(&h->items[i]);
    if (h->items != h->first) PyMem_Free(h->items);
    holder_init(h);
}

void holder_move(holder *to, holder *from)
{
    *to = *from;
    if (from->items == from->first) to->items = to->first;
    holder_init(from);
}

int holder_object(holder *h, PyObject *object)
{
    held *it = hold(h, HELD_OBJECT);
    if (!it) return -1;
    Py_INCREF(object);
    it->what.object = object;
    return 0;
}

void *holder_memory(holder *h, size_t bytes)
{
    void *memory = PyMem_Calloc(1, bytes ? bytes : 1);
    held *it = memory ? hold(h, HELD_MEMORY) : NULL;
    if (it) {
        it->what.memory = memory;
        return memory;
    }
    PyMem_Free(memory);
    return PyErr_NoMemory();
}

/* ------------------------------------------------------------------------------------------------- element types */

typedef struct type_name { uint8_t code, bits; const char *name; } type_name;

static const type_name dl_types[] = {
    { DL_FLOAT, 32, "f32" }, { DL_FLOAT, 16, "f16" }, { DL_BFLOAT, 16, "bf16" }, { DL_FP8_E4M3FN, 8, "fp8_e4m3" },
    { DL_FP8_E5M2, 8, "fp8_e5m2" }, { DL_INT, 8, "int8" }, { DL_FP4_E2M1FN, 4, "fp4_e2m1" }, { DL_UINT, 4, "int4" }, { DL_INT, 32, "i32" },
    { DL_INT, 64, "i64" }, { DL_UINT, 8, "u8" }, { DL_BOOL, 8, "u8" }, { DL_INT, 16, "u16" }, { DL_UINT, 16, "u16" },
};

static const char *dl_name(DLDataType t)
{
    if (t.lanes != 1) return NULL;
    for (size_t i = 0; i < sizeof dl_types / sizeof dl_types[0]; i++)
        if (dl_types[i].code == t.code && dl_types[i].bits == t.bits) return dl_types[i].name;
    return NULL;
}

static const struct { const char *name; int bits; } known[] = {
    { "f32", 32 }, { "f16", 16 }, { "bf16", 16 }, { "fp8_e4m3", 8 }, { "fp8_e5m2", 8 }, { "int8", 8 }, { "fp4_e2m1", 4 }, { "int4", 4 },
    { "i32", 32 }, { "i64", 64 }, { "u8", 8 }, { "b1", 1 }, { "u16", 16 },
};

static const char *constant_name(const char *name, int *bits)
{
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (!strcmp(name, known[i].name)) {
            *bits = known[i].bits;
            return known[i].name;
        }
    return NULL;
}

const char *to_dtype(const char *dtype)
{
    int bits;
    const char *name = constant_name(dtype, &bits);
    if (!name) PyErr_Format(PyExc_ValueError, "there is no element type \"%s\"", dtype);
    return name;
}

/* Formats of the struct module, native order. */
static const char *format_name(const char *format, Py_ssize_t itemsize)
{
    if (!format) return itemsize == 1 ? "u8" : NULL;
    if (*format == '@' || *format == '=' || *format == '<') format++;
    if (format[0] == 0 || format[1] != 0) return NULL;
    switch (format[0]) {
    case 'f': return "f32";
    case 'e': return "f16";
    case 'b': return "int8";
    case 'B': case '?': case 'c': return "u8";
    case 'i': case 'l': case 'q': return itemsize == 4 ? "i32" : itemsize == 8 ? "i64" : NULL;
    case 'h': case 'H': return "u16";   /* no meaning of its own: a foveal.Tensor says which */
    default: return NULL;
    }
}

/* Names of NumPy dtypes that the buffer protocol has no format for. */
static const char *numpy_name(const char *name)
{
    static const char *const names[][2] = { { "bfloat16", "bf16" }, { "float8_e4m3fn", "fp8_e4m3" }, { "float8_e5m2", "fp8_e5m2" } };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (!strcmp(name, names[i][0])) return names[i][1];
    return NULL;
}

static int unknown_type(const char *name)
{
    PyErr_Format(PyExc_TypeError, "%s has an element type that Foveal does not know (float64?)", name);
    return -1;
}

/* --------------------------------------------------------------------------------------------------------- shapes */

/* What an array without elements points at: some libraries give NULL, which would mean absent. */
static _Alignas(64) char nothing[64];

static int take_shape(const char *name, int ndim, const int64_t *shape, const int64_t *strides, array_view *out)
{
    if (ndim > FV_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%s has %d axes; at most %d", name, ndim, FV_MAX_DIMS);
        return -1;
    }
    bool empty = false;
    for (int i = 0; i < ndim; i++) empty = empty || shape[i] == 0;
    int64_t dense = 1;
    out->tensor.ndim = ndim;
    for (int i = ndim - 1; i >= 0; i--) {
        out->tensor.shape[i] = shape[i];
        out->tensor.stride[i] = strides && !empty ? strides[i] : dense;         /* strides of nothing are anything (0, with torch) */
        dense *= shape[i] > 0 ? shape[i] : 1;
    }
    if (empty && !out->tensor.data) out->tensor.data = nothing;
    return 0;
}

static int take_dltensor(const DLTensor *t, const char *name, bool read_only, array_view *out)
{
    const char *dtype = dl_name(t->dtype);
    if (!dtype) return unknown_type(name);
    out->tensor.data = t->data ? (char *)t->data + t->byte_offset : NULL;
    out->tensor.dtype = dtype;
    out->device_type = t->device.device_type;
    out->device_id = t->device.device_id;
    out->read_only = read_only;
    return take_shape(name, t->ndim, t->shape, t->strides, out);
}

/* ---------------------------------------------------------------------------- the exchange API, found once per type */

enum { CACHED_TYPES = 64 };
static struct { PyTypeObject *type; const DLPackExchangeAPI *api; } cached[CACHED_TYPES];
static int num_cached;

static const DLPackExchangeAPI *look_up(PyTypeObject *type)
{
    PyObject *capsule = PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
    if (!capsule) {
        PyErr_Clear();
        return NULL;
    }
    const DLPackExchangeAPI *api = NULL;
    if (PyCapsule_IsValid(capsule, "dlpack_exchange_api")) api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    return api && api->header.version.major == 1 ? api : NULL;
}

/* NULL: the type has none. Types are kept alive by the cache, so an address is never another type. */
static const DLPackExchangeAPI *exchange_api(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    for (int i = 0; i < num_cached; i++)
        if (cached[i].type == type) return cached[i].api;
    const DLPackExchangeAPI *api = look_up(type);
    if (num_cached < CACHED_TYPES) {
        Py_INCREF((PyObject *)type);
        cached[num_cached].type = type;
        cached[num_cached++].api = api;
    }
    return api;
}

/* Each of these: 1: done, 0: the object does not speak it, -1: error set. */

static int from_exchange(PyObject *object, const char *name, array_view *out, holder *h)
{
    const DLPackExchangeAPI *api = exchange_api(object);
    if (!api) return 0;
    if (api->dltensor_from_py_object_no_sync) {
        DLTensor t;
        if (api->dltensor_from_py_object_no_sync(object, &t) != 0) return -1;
        if (holder_object(h, object) != 0) return -1;           /* shape and strides are copied; the memory is the object's */
        return take_dltensor(&t, name, false, out) == 0 ? 1 : -1;
    }
    DLManagedTensorVersioned *m;
    if (api->managed_tensor_from_py_object_no_sync(object, &m) != 0) return -1;
    held *it = hold(h, HELD_VERSIONED);
    if (!it) return -1;
    it->what.versioned = m;
    return take_dltensor(&m->dl_tensor, name, m->flags & 1, out) == 0 ? 1 : -1;
}

/* ------------------------------------------------------------------------------------------------ buffers and NumPy */

static int byte_strides(const char *name, int ndim, const int64_t *shape, int64_t *strides, int64_t itemsize)
{
    for (int i = 0; i < ndim; i++) {
        if (shape[i] > 1 && strides[i] % itemsize != 0) {
            PyErr_Format(PyExc_ValueError, "axis %d of %s has a stride that is no multiple of the element", i, name);
            return -1;
        }
        strides[i] /= itemsize;
    }
    return 0;
}

static int from_buffer(PyObject *object, const char *name, array_view *out, holder *h)
{
    if (!PyObject_CheckBuffer(object)) return 0;
    Py_buffer *view = PyMem_Malloc(sizeof *view);
    if (!view) {
        PyErr_NoMemory();
        return -1;
    }
    if (PyObject_GetBuffer(object, view, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {          /* ml_dtypes have no format */
        PyErr_Clear();
        PyMem_Free(view);
        return 0;
    }
    held *it = hold(h, HELD_BUFFER);
    if (!it) {
        PyBuffer_Release(view);
        PyMem_Free(view);
        return -1;
    }
    it->what.buffer = view;
    const char *dtype = format_name(view->format, view->itemsize);
    if (!dtype) return unknown_type(name);
    int64_t shape[FV_MAX_DIMS], strides[FV_MAX_DIMS];
    const int axes = view->ndim < FV_MAX_DIMS ? view->ndim : FV_MAX_DIMS;
    for (int i = 0; i < axes; i++) {
        shape[i] = view->shape[i];
        strides[i] = view->strides[i];
    }
    if (byte_strides(name, axes, shape, strides, view->itemsize) != 0) return -1;
    out->tensor.data = view->buf;
    out->tensor.dtype = dtype;
    out->read_only = view->readonly;
    return take_shape(name, view->ndim, shape, strides, out) == 0 ? 1 : -1;
}

static int read_axes(PyObject *tuple, int64_t *out)
{
    const Py_ssize_t n = PyTuple_Size(tuple);
    if (n < 0 || n > FV_MAX_DIMS) return PyErr_Occurred() ? -1 : (int)n;
    for (Py_ssize_t i = 0; i < n; i++) out[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    return PyErr_Occurred() ? -1 : (int)n;
}

/* The parts of a NumPy array whose dtype has a name of numpy_name's. New references in *parts; 0: it is not one. */
static const char *named_dtype(PyObject *object)
{
    PyObject *dtype = PyObject_GetAttrString(object, "dtype");
    PyObject *text = dtype ? PyObject_GetAttrString(dtype, "name") : NULL;
    const char *utf8 = text && PyUnicode_Check(text) ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    const char *name = utf8 ? numpy_name(utf8) : NULL;
    Py_XDECREF(dtype);
    Py_XDECREF(text);
    PyErr_Clear();
    return name;
}

static int take_interface(PyObject *interface, const char *name, const char *dtype, array_view *out)
{
    PyObject *shape_tuple = PyDict_GetItemString(interface, "shape"), *data = PyDict_GetItemString(interface, "data");
    PyObject *stride_tuple = PyDict_GetItemString(interface, "strides");
    unsigned long long pointer = 0;
    int read_only = 0, bits = 0;
    int64_t shape[FV_MAX_DIMS], strides[FV_MAX_DIMS];
    if (!shape_tuple || !data || !PyArg_ParseTuple(data, "Kp", &pointer, &read_only)) return -1;
    const int ndim = read_axes(shape_tuple, shape);
    if (ndim < 0) return -1;
    out->tensor.data = (void *)(uintptr_t)pointer;
    out->tensor.dtype = constant_name(dtype, &bits);
    out->read_only = read_only != 0;
    if (ndim > FV_MAX_DIMS || !stride_tuple || stride_tuple == Py_None) return take_shape(name, ndim, shape, NULL, out);
    if (read_axes(stride_tuple, strides) != ndim || byte_strides(name, ndim, shape, strides, bits / 8) != 0) return -1;
    return take_shape(name, ndim, shape, strides, out);
}

static int from_interface(PyObject *object, const char *name, array_view *out, holder *h)
{
    const char *dtype = named_dtype(object);
    PyObject *interface = dtype ? PyObject_GetAttrString(object, "__array_interface__") : NULL;
    if (!interface) {
        PyErr_Clear();
        return 0;
    }
    int done = PyDict_Check(interface) && holder_object(h, object) == 0 ? take_interface(interface, name, dtype, out) : -1;
    Py_DECREF(interface);
    if (done != 0 && !PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "%s has an array interface that cannot be read", name);
    return done == 0 ? 1 : -1;
}

/* --------------------------------------------------------------------------------------------------- __dlpack__ */

static int from_capsule(PyObject *capsule, const char *name, array_view *out, holder *h)
{
    const bool versioned = PyCapsule_IsValid(capsule, "dltensor_versioned");
    if (!versioned && !PyCapsule_IsValid(capsule, "dltensor")) {
        PyErr_Format(PyExc_TypeError, "__dlpack__ of %s gave no DLPack capsule", name);
        return -1;
    }
    held *it = hold(h, versioned ? HELD_VERSIONED : HELD_MANAGED);
    if (!it) return -1;
    it->what.memory = PyCapsule_GetPointer(capsule, versioned ? "dltensor_versioned" : "dltensor");
    PyCapsule_SetName(capsule, versioned ? "used_dltensor_versioned" : "used_dltensor");
    if (!versioned) return take_dltensor(&it->what.managed->dl_tensor, name, false, out) == 0 ? 1 : -1;
    const DLManagedTensorVersioned *m = it->what.versioned;
    if (m->version.major != 1) {
        PyErr_Format(PyExc_BufferError, "%s speaks DLPack %u; 1 is known", name, m->version.major);
        return -1;
    }
    return take_dltensor(&m->dl_tensor, name, m->flags & 1, out) == 0 ? 1 : -1;
}

/* Is the object on a GPU? Then its producer wants to know the stream. */
static bool on_gpu(PyObject *object)
{
    PyObject *pair = PyObject_CallMethod(object, "__dlpack_device__", NULL);
    int type = 0, id = 0;
    if (!pair || !PyTuple_Check(pair) || !PyArg_ParseTuple(pair, "ii", &type, &id)) PyErr_Clear();
    Py_XDECREF(pair);
    return type == DL_CUDA || type == DL_CUDA_MANAGED;
}

/* Stream numbers of the protocol: 1 is the legacy default stream. */
static PyObject *call_dlpack(PyObject *method, PyObject *object, const holder *h, bool with_version)
{
    PyObject *kwargs = PyDict_New(), *none = PyTuple_New(0), *capsule = NULL;
    PyObject *version = with_version ? Py_BuildValue("(ii)", 1, 3) : NULL;
    PyObject *stream = on_gpu(object) ? PyLong_FromUnsignedLongLong(h->stream ? (uintptr_t)h->stream : 1) : NULL;
    if (kwargs && none && (!version || PyDict_SetItemString(kwargs, "max_version", version) == 0) &&
        (!stream || PyDict_SetItemString(kwargs, "stream", stream) == 0))
        capsule = PyObject_Call(method, none, kwargs);
    Py_XDECREF(kwargs);
    Py_XDECREF(none);
    Py_XDECREF(version);
    Py_XDECREF(stream);
    return capsule;
}

static int from_dlpack(PyObject *object, const char *name, array_view *out, holder *h)
{
    PyObject *method = PyObject_GetAttrString(object, "__dlpack__");
    if (!method) {
        PyErr_Clear();
        return 0;
    }
    PyObject *capsule = call_dlpack(method, object, h, true);
    if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) {          /* a producer older than 1.0 */
        PyErr_Clear();
        capsule = call_dlpack(method, object, h, false);
    }
    Py_DECREF(method);
    if (!capsule) return -1;
    const int done = from_capsule(capsule, name, out, h);
    Py_DECREF(capsule);
    return done;
}

/* --------------------------------------------- a foveal.Tensor: another array seen under an element type */

static int retype(array_view *out, const char *name, const char *dtype)
{
    int bits = 0, have = 0;
    const char *constant = constant_name(dtype, &bits);
    constant_name(out->tensor.dtype, &have);
    out->tensor.dtype = constant;
    if (bits == have) return 0;
    const int last = out->tensor.ndim - 1;
    if (have % bits != 0 || have != 8 || last < 0 || (out->tensor.shape[last] > 1 && out->tensor.stride[last] != 1)) {
        PyErr_Format(PyExc_ValueError, "%s has elements of %d bits; they cannot be read as %s", name, have, constant);
        return -1;
    }
    const int ratio = have / bits;      /* bytes to 4-bit elements or bits */
    for (int i = 0; i < last; i++) out->tensor.stride[i] *= ratio;
    out->tensor.shape[last] *= ratio;
    return 0;
}

static int take_any(PyObject *object, const char *name, array_view *out, holder *h)
{
    int done = from_exchange(object, name, out, h);
    if (done == 0) done = from_buffer(object, name, out, h);
    if (done == 0) done = from_interface(object, name, out, h);
    if (done == 0) done = from_dlpack(object, name, out, h);
    if (done == 0) PyErr_Format(PyExc_TypeError, "%s is no array: it speaks neither DLPack nor the buffer protocol", name);
    return done == 1 ? 0 : -1;
}

int to_array(PyObject *object, const char *name, array_view *out, holder *h)
{
    memset(out, 0, sizeof *out);
    out->device_type = DL_CPU;
    if (!object || object == Py_None) return 0;
    PyObject *inner;
    const char *dtype;
    if (!tensor_unwrap(object, &inner, &dtype)) return take_any(object, name, out, h);
    return take_any(inner, name, out, h) == 0 ? retype(out, name, dtype) : -1;
}

/* ------------------------------------------------------------------------------------------------------- devices */

static bool on_device(const array_view *a) { return a->device_type == DL_CUDA || a->device_type == DL_CUDA_MANAGED; }

int check_device(const array_view *a, const char *name, const device *where)
{
    if (!a->tensor.data) return 0;
    const bool gpu = a->device_type == DL_CUDA;
    if (a->device_type == DL_CUDA_MANAGED) return 0;
    if (where->type == DL_CUDA ? gpu && a->device_id == where->id : !gpu) return 0;
    if (gpu && where->type == DL_CUDA)
        PyErr_Format(PyExc_ValueError, "%s lies on cuda:%d; the context is on cuda:%d", name, a->device_id, where->id);
    else
        PyErr_Format(PyExc_ValueError, "%s lies on %s; the context is on %s", name, gpu ? "a GPU" : "the CPU", gpu ? "the CPU" : "a GPU");
    return -1;
}

int check_writable(const array_view *a, const char *name)
{
    if (!a->tensor.data || !a->read_only) return 0;
    PyErr_Format(PyExc_ValueError, "%s is read-only; the call writes it", name);
    return -1;
}

/* -------------------------------------------------------------------------------------------------------- indices */

static int copy_sequence(PyObject *object, const char *name, fv_index *out, holder *h)
{
    PyObject *list = PySequence_List(object);
    if (!list) {
        PyErr_Format(PyExc_TypeError, "%s is neither an array of int32 or int64 nor a sequence of integers", name);
        return -1;
    }
    const Py_ssize_t n = PyList_Size(list);
    int64_t *values = holder_memory(h, (size_t)n * sizeof *values);
    bool ok = values != NULL;
    for (Py_ssize_t i = 0; ok && i < n; i++) {
        PyObject *index = PyNumber_Index(PyList_GetItem(list, i));
        values[i] = index ? PyLong_AsLongLong(index) : -1;
        Py_XDECREF(index);
        ok = !(values[i] == -1 && PyErr_Occurred());
        if (!ok) PyErr_Format(PyExc_TypeError, "%s[%zd] is %R; it must be an integer of 64 bits", name, i, PyList_GetItem(list, i));
    }
    Py_DECREF(list);
    if (ok) *out = fv_i64(values, n);
    return ok ? 0 : -1;
}

static int table_of(const fv_tensor *t, const char *name, int64_t *count, int64_t *entry, int64_t *width, int64_t *stride)
{
    *width = t->shape[1];
    *entry = t->shape[1] > 1 ? t->stride[1] : 1;
    *stride = t->shape[0] > 1 && *entry > 0 ? t->stride[0] / *entry : t->shape[1];
    if (*entry < 1 || (t->shape[0] > 1 && t->stride[0] % *entry)) {
        PyErr_Format(PyExc_ValueError, "the rows of %s must lie a whole number of entries apart", name);
        return -1;
    }
    *count = t->shape[0] > 0 ? (t->shape[0] - 1) * *stride + t->shape[1] : 0;
    return 0;
}

static int index_of_array(const array_view *a, const char *name, fv_index *out, int64_t *width, int64_t *stride)
{
    const fv_tensor *t = &a->tensor;
    const bool i32 = !strcmp(t->dtype, "i32"), table = t->ndim == 2 && width;
    if (!i32 && strcmp(t->dtype, "i64") != 0) {
        const bool short_ones = !strcmp(t->dtype, "u16");       /* the word for both kinds of 16-bit integers */
        PyErr_Format(PyExc_TypeError, "%s has elements of type %s; int32 or int64 are read", name, short_ones ? "int16 or uint16" : t->dtype);
        return -1;
    }
    if (t->ndim != 1 && !table) {
        PyErr_Format(PyExc_ValueError, "%s has %d axes; expected %s", name, t->ndim, width ? "1 or 2" : "1");
        return -1;
    }
    int64_t count = t->shape[0], entry = t->shape[0] > 1 ? t->stride[0] : 1;
    if (table && table_of(t, name, &count, &entry, width, stride) != 0) return -1;
    if (entry < 1) {
        PyErr_Format(PyExc_ValueError, "%s runs backwards or repeats an entry (stride %lld)", name, (long long)entry);
        return -1;
    }
    *out = (fv_index){ .count = count, .stride = entry, .type = i32 ? FV_INDEX_I32 : FV_INDEX_I64 };
    if (on_device(a)) out->device = t->data;
    else out->host = t->data;
    return 0;
}

/* (host, device): either may be None. */
static int index_of_pair(PyObject *pair, const char *name, fv_index *out, holder *h, int64_t *width, int64_t *stride)
{
    for (Py_ssize_t i = 0; i < 2; i++) {
        PyObject *item = PyTuple_GetItem(pair, i);
        array_view a;
        fv_index next;
        if (item == Py_None) continue;
        if (to_array(item, name, &a, h) != 0 || index_of_array(&a, name, &next, width, stride) != 0) return -1;
        if (out->type == FV_INDEX_NONE) {
            *out = next;
            continue;
        }
        if (out->type != next.type || out->stride != next.stride || (out->host && next.host) || (out->device && next.device)) {
            PyErr_Format(PyExc_ValueError, "%s: of the two arrays one lies on the host and one on the device, of the same type and stride", name);
            return -1;
        }
        if (next.host) out->host = next.host, out->count = next.count;
        else out->device = next.device;
    }
    return 0;
}

static bool is_pair_of_arrays(PyObject *object)
{
    if (!PyTuple_Check(object) || PyTuple_Size(object) != 2) return false;
    return !PyLong_Check(PyTuple_GetItem(object, 0)) && !PyLong_Check(PyTuple_GetItem(object, 1));
}

int to_index(PyObject *object, const char *name, fv_index *out, holder *h, int64_t *width, int64_t *stride)
{
    *out = (fv_index){ 0 };
    if (!object || object == Py_None) return 0;
    if (is_pair_of_arrays(object)) return index_of_pair(object, name, out, h, width, stride);
    if (PyList_Check(object) || PyTuple_Check(object)) return copy_sequence(object, name, out, h);
    array_view a;
    return to_array(object, name, &a, h) == 0 ? index_of_array(&a, name, out, width, stride) : -1;
}

int to_int32(PyObject *object, const char *name, const int32_t **out, int64_t *count, holder *h)
{
    fv_index x;
    *out = NULL;
    *count = 0;
    if (to_index(object, name, &x, h, NULL, NULL) != 0) return -1;
    if (x.type == FV_INDEX_NONE) return 0;
    if (!x.host) {
        PyErr_Format(PyExc_ValueError, "%s must lie on the host", name);
        return -1;
    }
    *count = x.count;
    if (x.type == FV_INDEX_I32 && (x.stride == 1 || x.count < 2)) {
        *out = x.host;
        return 0;
    }
    int32_t *copy = holder_memory(h, (size_t)x.count * sizeof *copy);
    if (!copy) return -1;
    for (int64_t i = 0; i < x.count; i++) {
        const int64_t v = x.type == FV_INDEX_I32 ? ((const int32_t *)x.host)[i * x.stride] : ((const int64_t *)x.host)[i * x.stride];
        if (v < INT32_MIN || v > INT32_MAX) {
            PyErr_Format(PyExc_ValueError, "%s[%lld] is %lld; it must fit in 32 bits", name, (long long)i, (long long)v);
            return -1;
        }
        copy[i] = (int32_t)v;
    }
    *out = copy;
    return 0;
}

static int copy_keys(PyObject *object, const char *name, const uint64_t **out, int64_t *count, holder *h)
{
    PyObject *list = PySequence_List(object);
    if (!list) {
        PyErr_Format(PyExc_TypeError, "%s is neither an array of 64-bit integers nor a sequence of integers", name);
        return -1;
    }
    const Py_ssize_t n = PyList_Size(list);
    uint64_t *keys = holder_memory(h, (size_t)n * sizeof *keys);
    for (Py_ssize_t i = 0; keys && i < n; i++) keys[i] = PyLong_AsUnsignedLongLongMask(PyList_GetItem(list, i));
    Py_DECREF(list);
    *out = keys;
    *count = n;
    return keys && !PyErr_Occurred() ? 0 : -1;
}

int to_keys(PyObject *object, const char *name, const uint64_t **out, int64_t *count, holder *h)
{
    *out = NULL;
    *count = 0;
    if (!object || object == Py_None) return 0;
    if (!PyObject_CheckBuffer(object)) return copy_keys(object, name, out, count, h);
    Py_buffer *view = PyMem_Malloc(sizeof *view);
    if (!view || PyObject_GetBuffer(object, view, PyBUF_ND | PyBUF_C_CONTIGUOUS) != 0) {
        PyMem_Free(view);
        return view ? -1 : (PyErr_NoMemory(), -1);
    }
    held *it = hold(h, HELD_BUFFER);
    if (!it) {
        PyBuffer_Release(view);
        PyMem_Free(view);
        return -1;
    }
    it->what.buffer = view;
    if (view->ndim != 1 || view->itemsize != 8) {
        PyErr_Format(PyExc_ValueError, "%s must have one axis of 64-bit integers", name);
        return -1;
    }
    *out = view->buf;
    *count = view->shape[0];
    return 0;
}

/* ------------------------------------------------------------------------------------------------------ arguments */

static const char *keep_text(PyObject *text, holder *h)
{
    const char *s = PyUnicode_AsUTF8AndSize(text, NULL);
    return s && holder_object(h, text) == 0 ? s : NULL;
}

static int to_arg(PyObject *value, const device *where, fv_arg *out, fv_tensor *tensor, holder *h)
{
    array_view a;
    if (PyFloat_Check(value) || PyLong_Check(value)) {
        out->number = PyFloat_AsDouble(value);
        return out->number == -1 && PyErr_Occurred() ? -1 : 0;
    }
    if (to_array(value, out->name, &a, h) != 0) return -1;
    if (a.tensor.ndim == 0 && a.tensor.data && !on_device(&a)) {        /* numpy.float32(1) */
        PyObject *number = PyNumber_Float(value);
        if (!number) return -1;
        out->number = PyFloat_AsDouble(number);
        Py_DECREF(number);
        return 0;
    }
    if (where && check_device(&a, out->name, where) != 0) return -1;
    *tensor = a.tensor;
    out->tensor = tensor;
    return 0;
}

int to_args(PyObject *mapping, const char *name, const device *where, fv_arg *out, fv_tensor *tensors, int room, holder *h)
{
    if (!mapping || mapping == Py_None) return 0;
    if (!PyDict_Check(mapping)) {
        PyErr_Format(PyExc_TypeError, "%s must be a dict of name: number or array", name);
        return -1;
    }
    PyObject *key, *value;
    Py_ssize_t at = 0;
    int n = 0;
    while (PyDict_Next(mapping, &at, &key, &value)) {
        if (value == Py_None) continue;
        if (n == room) {
            PyErr_Format(PyExc_ValueError, "%s has more than %d entries", name, room);
            return -1;
        }
        if (!PyUnicode_Check(key)) {
            PyErr_Format(PyExc_TypeError, "the keys of %s are names", name);
            return -1;
        }
        out[n] = (fv_arg){ .name = keep_text(key, h) };
        if (!out[n].name || to_arg(value, where, &out[n], &tensors[n], h) != 0) return -1;
        n++;
    }
    return n;
}

/* -------------------------------------------------------------------------------------------------------- streams */

static int stream_of_object(PyObject *stream, fv_stream *out)
{
    static const char *const attributes[] = { "cuda_stream", "ptr", "handle" };
    PyObject *pair = PyObject_CallMethod(stream, "__cuda_stream__", NULL);       /* (version, handle) */
    unsigned long long version = 0, handle = 0;
    if (pair) {
        const int ok = PyArg_ParseTuple(pair, "KK", &version, &handle);
        Py_DECREF(pair);
        *out = (fv_stream)(uintptr_t)handle;
        return ok ? 0 : -1;
    }
    PyErr_Clear();
    for (size_t i = 0; i < sizeof attributes / sizeof attributes[0]; i++) {
        PyObject *value = PyObject_GetAttrString(stream, attributes[i]);
        if (value && PyLong_Check(value)) {
            *out = (fv_stream)(uintptr_t)PyLong_AsUnsignedLongLong(value);
            Py_DECREF(value);
            return PyErr_Occurred() ? -1 : 0;
        }
        Py_XDECREF(value);
        PyErr_Clear();
    }
    PyErr_SetString(PyExc_TypeError, "stream is an int, an object with __cuda_stream__(), an array whose library tells its current stream, or None");
    return -1;
}

int to_stream(PyObject *stream, PyObject *like, const device *where, fv_stream *out)
{
    *out = NULL;
    if (where->type != DL_CUDA) return 0;
    PyObject *inner;
    const char *dtype;
    const bool given = stream && stream != Py_None;
    if (given && PyLong_Check(stream)) {
        *out = (fv_stream)(uintptr_t)PyLong_AsUnsignedLongLong(stream);
        return PyErr_Occurred() ? -1 : 0;
    }
    if (given) like = stream;
    if (!like || like == Py_None) return 0;
    const DLPackExchangeAPI *api = exchange_api(tensor_unwrap(like, &inner, &dtype) ? inner : like);
    if (api && api->current_work_stream) return api->current_work_stream(DL_CUDA, where->id, out) == 0 ? 0 : -1;
    return given ? stream_of_object(stream, out) : 0;
}
