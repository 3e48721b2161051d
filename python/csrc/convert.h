/* SPDX-License-Identifier: Apache-2.0 */
/* convert.h -- Python objects to fv_tensor, fv_index and fv_arg without copying.
 *
 * An array may come as (in this order, the first that the object speaks): DLPack's C exchange API (torch: ~70 ns, owns nothing), the buffer
 * protocol (NumPy, array.array, memoryview), `__array_interface__` with a dtype that has a name (ml_dtypes on NumPy), `__dlpack__` (everything
 * else). A foveal.Tensor wraps any of them under another element type, for arrays whose library has no name for it (NumPy's uint16 as bf16).
 * What keeps the memory alive is put into a `holder`: released after the call, or kept by a batch for as long as the plan needs it. */
#ifndef FVPY_CONVERT_H
#define FVPY_CONVERT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "dlpack.h"
#include "foveal/foveal.h"

/* Things to release later. Starts in place, grows on the heap. */
typedef struct held {
    int kind;
    union {
        PyObject *object;               /* a reference */
        Py_buffer *buffer;
        DLManagedTensor *managed;
        DLManagedTensorVersioned *versioned;
        void *memory;                   /* of PyMem_Malloc */
    } what;
} held;

typedef struct holder {
    int count, room;
    held *items, first[12];
    fv_stream stream;                   /* told to producers that order their work before it (__dlpack__) */
    bool has_stream;
} holder;

void holder_init(holder *h);
void holder_release(holder *h);         /* needs the GIL */
int holder_object(holder *h, PyObject *object);         /* takes a new reference; -1: error set */
void *holder_memory(holder *h, size_t bytes);           /* zeroed; NULL: error set */
void holder_move(holder *to, holder *from);             /* `to` is overwritten, `from` is empty afterwards */

/* An array with its device. */
typedef struct array_view {
    fv_tensor tensor;                   /* dtype: a constant; "u16" where the library has no name for the elements */
    int32_t device_type, device_id;     /* DL_* */
    bool read_only;
} array_view;

/* None: data NULL. `name` is for messages. 0, or -1 with an exception set. */
int to_array(PyObject *object, const char *name, array_view *out, holder *h);

/* Integers: a 1-D array of int32 or int64 (any stride), or a sequence (copied). A pair (host, device) gives both. With `width`, a 2-D table is taken, too:
 * *width and *stride are those of its rows (untouched for one axis). */
int to_index(PyObject *object, const char *name, fv_index *out, holder *h, int64_t *width, int64_t *stride);

/* An array or a sequence of integers as dense int32 on the host, copied where it must be. None: *out NULL. */
int to_int32(PyObject *object, const char *name, const int32_t **out, int64_t *count, holder *h);

/* An array or a sequence of integers as dense uint64 (keys of pages). */
int to_keys(PyObject *object, const char *name, const uint64_t **out, int64_t *count, holder *h);

/* {"name": number | array}: `out` and `tensors` have room for `room`. `device` NULL: arrays may lie anywhere. Returns the count or -1. */
typedef struct device { int32_t type, id; } device;
int to_args(PyObject *mapping, const char *name, const device *where, fv_arg *out, fv_tensor *tensors, int room, holder *h);

/* The array lies on the device (host memory of any kind on the CPU): else an exception. An absent one does. */
int check_device(const array_view *a, const char *name, const device *where);
int check_writable(const array_view *a, const char *name);

/* The library's constant for an element type, NULL with an exception set: unknown. */
const char *to_dtype(const char *dtype);

/* The stream of a call on `where`: an int, an object with __cuda_stream__(), an array (the current stream of its library), or None: as for the array `like`, 0
 * where its library does not tell. */
int to_stream(PyObject *stream, PyObject *like, const device *where, fv_stream *out);

#endif
