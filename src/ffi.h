/* SPDX-License-Identifier: Apache-2.0 */
/* ffi.h -- the part of the tvm-ffi calling convention that ffi.c speaks, as its published C ABI lays it out: one function type, a 16-byte tagged value,
 * DLPack's tensor. Written here so that the library depends on nothing. */
#ifndef FV__FFI_H
#define FV__FFI_H

#include "core.h"

enum {                                  /* fv__ffi_any.type */
    FV__FFI_NONE = 0, FV__FFI_INT = 1, FV__FFI_BOOL = 2, FV__FFI_FLOAT = 3, FV__FFI_DLTENSOR = 7, FV__FFI_RAW_STR = 8, FV__FFI_SMALL_STR = 11,
    FV__FFI_STR = 65, FV__FFI_TENSOR = 70
};

typedef struct fv__ffi_any {
    int32_t type;
    uint32_t small_length;              /* FV__FFI_SMALL_STR: bytes used of `small`; else 0 */
    union {
        int64_t i;
        double f;
        void *pointer;
        const char *text;               /* FV__FFI_RAW_STR */
        char small[8];
    } v;
} fv__ffi_any;

/* An object starts with 24 bytes of its own; behind them lies what its type says. */
enum { FV__FFI_OBJECT_HEAD = 24 };

typedef struct fv__ffi_bytes { const char *data; size_t size; } fv__ffi_bytes;      /* behind the head of FV__FFI_STR */

typedef struct fv__dl_tensor {          /* FV__FFI_DLTENSOR; behind the head of FV__FFI_TENSOR */
    void *data;
    struct { int32_t type, id; } device;        /* 1 CPU, 2 CUDA, 3 CUDA's page-locked host memory, 13 managed */
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    const int64_t *shape, *strides;     /* strides NULL: row-major */
    uint64_t byte_offset;
} fv__dl_tensor;

_Static_assert(sizeof(fv__ffi_any) == 16, "the value of the tvm-ffi ABI");
_Static_assert(sizeof(fv__dl_tensor) == 48, "DLPack's tensor");

#define FV__FFI_EXPORT __attribute__((visibility("default")))

#endif
