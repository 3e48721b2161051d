/* SPDX-License-Identifier: Apache-2.0 */
/* driver.h -- the NVIDIA driver, opened at run time: its functions, one device of it, and calls that leave no trace in the caller's thread.
 *
 *   api      the driver's functions as of CUDA 12.0, found by dlopen; the handful of types that they need are declared here
 *   device   a GPU with its primary context (the one that the CUDA runtime, PyTorch and everybody else uses)
 *
 * Every fv__cuda_* call makes the device's context current, does its work and leaves: the caller's current device and context are as before, whatever
 * happened. Calls that allocate or load also switch the thread to the relaxed capture mode meanwhile, so that they do not break a graph that some
 * thread is capturing. A process that was forked after its parent opened the device gets a status, not a crash.
 *
 * A device is immutable after fv__cuda_device_open: any number of threads may use it, and any number of devices. Nothing here is global. */
#ifndef FV__CUDA_DRIVER_H
#define FV__CUDA_DRIVER_H

#include "status.h"

#include <sys/types.h>

/* ------------------------------------------------------------------------------------- the driver's types (its ABI) */

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;

enum {
    CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_OUT_OF_MEMORY = 2, CUDA_ERROR_NOT_INITIALIZED = 3, CUDA_ERROR_DEINITIALIZED = 4,
    CUDA_ERROR_STUB_LIBRARY = 34, CUDA_ERROR_NO_DEVICE = 100, CUDA_ERROR_INVALID_IMAGE = 200, CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209, CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222, CUDA_ERROR_NOT_FOUND = 500, CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900, CUDA_ERROR_CAPTURED_EVENT = 907, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
};

enum {
    CU_STREAM_NON_BLOCKING = 1, CU_EVENT_DISABLE_TIMING = 2, CU_MEMHOSTALLOC_PORTABLE = 1, CU_MEMHOSTALLOC_DEVICEMAP = 2,
    CU_STREAM_CAPTURE_STATUS_NONE = 0, CU_STREAM_CAPTURE_STATUS_ACTIVE = 1, CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2,
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1, CU_STREAM_CAPTURE_MODE_RELAXED = 2,
};

enum {                                  /* CUfunction_attribute */
    CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3,
    CU_FUNC_ATTRIBUTE_NUM_REGS = 4, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
    CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14,
};

enum {                                  /* CUpointer_attribute */
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2, CU_POINTER_ATTRIBUTE_IS_MANAGED = 8, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
    CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2,
};

enum {                                  /* CUlaunchAttributeID */
    CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
    CU_LAUNCH_ATTRIBUTE_PRIORITY = 8,
};

typedef struct CUlaunchAttribute {
    int id;
    char pad[4];
    union {
        char bytes[64];
        unsigned long long align;
        int cooperative;
        int programmatic_stream_serialization;
        int priority;
        struct { unsigned x, y, z; } cluster;
    } value;
} CUlaunchAttribute;

typedef struct CUlaunchConfig {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    CUstream stream;
    CUlaunchAttribute *attributes;
    unsigned num_attributes;
} CUlaunchConfig;

_Static_assert(sizeof(CUlaunchAttribute) == 72 && sizeof(CUlaunchConfig) == 56, "as the driver lays them out");

typedef struct CUtensorMap {
    _Alignas(128) uint64_t opaque[16];
} CUtensorMap;

enum {                                  /* CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion */
    CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0, CU_TENSOR_MAP_DATA_TYPE_UINT16 = 1, CU_TENSOR_MAP_DATA_TYPE_UINT32 = 2, CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9,
    CU_TENSOR_MAP_SWIZZLE_NONE = 0, CU_TENSOR_MAP_SWIZZLE_32B = 1, CU_TENSOR_MAP_SWIZZLE_64B = 2, CU_TENSOR_MAP_SWIZZLE_128B = 3,
    CU_TENSOR_MAP_L2_PROMOTION_NONE = 0, CU_TENSOR_MAP_L2_PROMOTION_128B = 2, CU_TENSOR_MAP_L2_PROMOTION_256B = 3,
};

/* ------------------------------------------------------------------------------------------- the driver's functions
 * X(name, CUDA version whose signature this is, name in the library for drivers that cannot be asked by version, parameters).
 * NEED: without it there is no backend. MAY: NULL in drivers that lack it. */
#define FV__CUDA_API(NEED, MAY)                                                                                                    \
    NEED(cuInit, 2000, "cuInit", (unsigned flags))                                                                                 \
    NEED(cuDriverGetVersion, 2020, "cuDriverGetVersion", (int *version))                                                           \
    NEED(cuGetErrorName, 6000, "cuGetErrorName", (CUresult error, const char **name))                                              \
    NEED(cuGetErrorString, 6000, "cuGetErrorString", (CUresult error, const char **text))                                          \
    NEED(cuDeviceGetCount, 2000, "cuDeviceGetCount", (int *count))                                                                 \
    NEED(cuDeviceGet, 2000, "cuDeviceGet", (CUdevice *device, int ordinal))                                                        \
    NEED(cuDeviceGetName, 2000, "cuDeviceGetName", (char *name, int length, CUdevice device))                                      \
    NEED(cuDeviceGetAttribute, 2000, "cuDeviceGetAttribute", (int *value, int attribute, CUdevice device))                         \
    NEED(cuDeviceTotalMem, 3020, "cuDeviceTotalMem_v2", (size_t *bytes, CUdevice device))                                          \
    NEED(cuDevicePrimaryCtxRetain, 7000, "cuDevicePrimaryCtxRetain", (CUcontext *context, CUdevice device))                        \
    NEED(cuDevicePrimaryCtxRelease, 11000, "cuDevicePrimaryCtxRelease_v2", (CUdevice device))                                      \
    NEED(cuCtxPushCurrent, 4000, "cuCtxPushCurrent_v2", (CUcontext context))                                                       \
    NEED(cuCtxPopCurrent, 4000, "cuCtxPopCurrent_v2", (CUcontext *context))                                                        \
    NEED(cuCtxGetCurrent, 4000, "cuCtxGetCurrent", (CUcontext *context))                                                           \
    NEED(cuCtxSynchronize, 2000, "cuCtxSynchronize", (void))                                                                       \
    NEED(cuMemAlloc, 3020, "cuMemAlloc_v2", (CUdeviceptr *pointer, size_t bytes))                                                  \
    NEED(cuMemFree, 3020, "cuMemFree_v2", (CUdeviceptr pointer))                                                                   \
    NEED(cuMemGetInfo, 3020, "cuMemGetInfo_v2", (size_t *free_bytes, size_t *total_bytes))                                         \
    NEED(cuMemHostAlloc, 2020, "cuMemHostAlloc", (void **pointer, size_t bytes, unsigned flags))                                   \
    NEED(cuMemFreeHost, 2000, "cuMemFreeHost", (void *pointer))                                                                    \
    NEED(cuMemHostGetDevicePointer, 3020, "cuMemHostGetDevicePointer_v2", (CUdeviceptr *device, void *host, unsigned flags))       \
    NEED(cuMemcpyHtoDAsync, 3020, "cuMemcpyHtoDAsync_v2", (CUdeviceptr to, const void *from, size_t bytes, CUstream stream))       \
    NEED(cuMemcpyDtoHAsync, 3020, "cuMemcpyDtoHAsync_v2", (void *to, CUdeviceptr from, size_t bytes, CUstream stream))             \
    NEED(cuMemcpyDtoDAsync, 3020, "cuMemcpyDtoDAsync_v2", (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))       \
    NEED(cuMemsetD8Async, 3020, "cuMemsetD8Async", (CUdeviceptr to, unsigned char value, size_t count, CUstream stream))           \
    NEED(cuMemsetD32Async, 3020, "cuMemsetD32Async", (CUdeviceptr to, unsigned value, size_t count, CUstream stream))              \
    NEED(cuPointerGetAttribute, 4000, "cuPointerGetAttribute", (void *value, int attribute, CUdeviceptr pointer))                  \
    NEED(cuStreamCreate, 2000, "cuStreamCreate", (CUstream *stream, unsigned flags))                                               \
    NEED(cuStreamDestroy, 4000, "cuStreamDestroy_v2", (CUstream stream))                                                           \
    NEED(cuStreamSynchronize, 2000, "cuStreamSynchronize", (CUstream stream))                                                      \
    NEED(cuStreamQuery, 2000, "cuStreamQuery", (CUstream stream))                                                                  \
    NEED(cuStreamWaitEvent, 3020, "cuStreamWaitEvent", (CUstream stream, CUevent event, unsigned flags))                           \
    NEED(cuStreamIsCapturing, 10000, "cuStreamIsCapturing", (CUstream stream, int *status))                                        \
    NEED(cuStreamBeginCapture, 10010, "cuStreamBeginCapture_v2", (CUstream stream, int mode))                                      \
    NEED(cuStreamEndCapture, 10000, "cuStreamEndCapture", (CUstream stream, CUgraph *graph))                                       \
    NEED(cuThreadExchangeStreamCaptureMode, 10010, "cuThreadExchangeStreamCaptureMode", (int *mode))                               \
    NEED(cuGraphInstantiateWithFlags, 11040, "cuGraphInstantiateWithFlags", (CUgraphExec *exec, CUgraph graph, unsigned long long flags)) \
    NEED(cuGraphUpload, 11010, "cuGraphUpload", (CUgraphExec exec, CUstream stream))                                               \
    NEED(cuGraphLaunch, 10000, "cuGraphLaunch", (CUgraphExec exec, CUstream stream))                                               \
    NEED(cuGraphExecDestroy, 10000, "cuGraphExecDestroy", (CUgraphExec exec))                                                      \
    NEED(cuGraphDestroy, 10000, "cuGraphDestroy", (CUgraph graph))                                                                 \
    NEED(cuEventCreate, 2000, "cuEventCreate", (CUevent *event, unsigned flags))                                                   \
    NEED(cuEventDestroy, 4000, "cuEventDestroy_v2", (CUevent event))                                                               \
    NEED(cuEventRecord, 2000, "cuEventRecord", (CUevent event, CUstream stream))                                                   \
    NEED(cuEventQuery, 2000, "cuEventQuery", (CUevent event))                                                                      \
    NEED(cuEventSynchronize, 2000, "cuEventSynchronize", (CUevent event))                                                          \
    NEED(cuEventElapsedTime, 2000, "cuEventElapsedTime", (float *ms, CUevent start, CUevent end))                                  \
    NEED(cuModuleLoadData, 2000, "cuModuleLoadData", (CUmodule *module, const void *image))                                        \
    NEED(cuModuleUnload, 2000, "cuModuleUnload", (CUmodule module))                                                                \
    NEED(cuModuleGetFunction, 2000, "cuModuleGetFunction", (CUfunction *function, CUmodule module, const char *name))              \
    NEED(cuModuleGetGlobal, 3020, "cuModuleGetGlobal_v2", (CUdeviceptr *pointer, size_t *bytes, CUmodule module, const char *name)) \
    NEED(cuFuncGetAttribute, 2020, "cuFuncGetAttribute", (int *value, int attribute, CUfunction function))                         \
    NEED(cuFuncSetAttribute, 9000, "cuFuncSetAttribute", (CUfunction function, int attribute, int value))                          \
    NEED(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050, "cuOccupancyMaxActiveBlocksPerMultiprocessor",                         \
         (int *blocks, CUfunction function, int block_size, size_t dynamic_shared))                                               \
    NEED(cuLaunchKernelEx, 11060, "cuLaunchKernelEx", (const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra)) \
    MAY(cuFuncLoad, 12040, "cuFuncLoad", (CUfunction function))                                                                    \
    MAY(cuTensorMapEncodeTiled, 12000, "cuTensorMapEncodeTiled",                                                                   \
        (CUtensorMap *map, int data_type, uint32_t rank, void *address, const uint64_t *dims, const uint64_t *strides,            \
         const uint32_t *box, const uint32_t *element_strides, int interleave, int swizzle, int l2_promotion, int oob_fill))

typedef struct fv__cuda_api {
#define FV__CUDA_FIELD(name, version, symbol, parameters) CUresult (*name) parameters;
    FV__CUDA_API(FV__CUDA_FIELD, FV__CUDA_FIELD)
#undef FV__CUDA_FIELD
    void *library;                  /* never closed: other parts of the process may hold what it gave them */
    int version;                    /* of the driver: 13000 is CUDA 13.0 */
} fv__cuda_api;

/* Finds the driver (FV_CUDA_DRIVER_PATH, else libcuda.so.1 as the loader knows it, else the usual places) and its functions, and initialises it.
 * FV_E_DEVICE with a sentence where there is none. May be called any number of times. */
fv_status fv__cuda_api_load(fv__cuda_api *api, fv_error *err);

/* ------------------------------------------------------------------------------------------------------- one device */

typedef struct fv__cuda_facts {
    char name[96];
    int cc_major, cc_minor;         /* 9, 0 */
    int num_sms;
    int warp_size, max_threads_per_sm, max_threads_per_block, max_blocks_per_sm;
    int registers_per_sm;
    int shared_per_sm, shared_per_block, shared_per_block_optin, shared_reserved;       /* bytes */
    int l2_bytes;
    int clock_khz, memory_clock_khz, memory_bus_bits;
    int pci_bus;
    bool cooperative, clusters, tensor_maps, integrated;
    size_t memory_bytes;
} fv__cuda_facts;

typedef struct fv__cuda_device {
    fv__cuda_api api;
    fv__cuda_facts facts;
    CUdevice handle;
    CUcontext context;              /* primary, retained */
    int ordinal;
    pid_t process;                  /* that opened it */
    char label[16];                 /* "cuda:0" */
} fv__cuda_device;

/* How many devices there are; 0 with FV_OK never happens: no device is FV_E_DEVICE. */
fv_status fv__cuda_count(int *count, fv_error *err);

fv_status fv__cuda_device_open(int ordinal, fv__cuda_device **device, fv_error *err);
void fv__cuda_device_close(fv__cuda_device **device);           /* NULL is fine */

/* The context of `device` becomes the thread's current one until fv__cuda_leave; may be nested. */
fv_status fv__cuda_enter(const fv__cuda_device *device, fv_error *err);
void fv__cuda_leave(const fv__cuda_device *device);

/* FV_OK for CUDA_SUCCESS; otherwise the driver's name and sentence for what `what` answered. */
fv_status fv__cuda_status(const fv__cuda_device *device, CUresult result, const char *what, fv_error *err);

/* ---- memory. Allocation and release work in relaxed capture mode; release of 0 or NULL is fine and never fails. */
fv_status fv__cuda_alloc(const fv__cuda_device *device, size_t bytes, CUdeviceptr *pointer, fv_error *err);
void fv__cuda_free(const fv__cuda_device *device, CUdeviceptr pointer);
fv_status fv__cuda_alloc_pinned(const fv__cuda_device *device, size_t bytes, void **pointer, fv_error *err);
void fv__cuda_free_pinned(const fv__cuda_device *device, void *pointer);
fv_status fv__cuda_mapped_address(const fv__cuda_device *device, void *pinned, CUdeviceptr *pointer, fv_error *err);
fv_status fv__cuda_to_device(const fv__cuda_device *device, CUdeviceptr to, const void *from, size_t bytes, CUstream stream, fv_error *err);
fv_status fv__cuda_to_host(const fv__cuda_device *device, void *to, CUdeviceptr from, size_t bytes, CUstream stream, fv_error *err);
fv_status fv__cuda_copy(const fv__cuda_device *device, CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream, fv_error *err);
fv_status fv__cuda_fill_bytes(const fv__cuda_device *device, CUdeviceptr to, int value, size_t count, CUstream stream, fv_error *err);
fv_status fv__cuda_fill_words(const fv__cuda_device *device, CUdeviceptr to, uint32_t value, size_t count, CUstream stream, fv_error *err);

/* Where a pointer lies: its device's ordinal, or -1 for memory that the driver does not know or that is the host's. Never fails. */
int fv__cuda_pointer_device(const fv__cuda_device *device, const void *pointer);

/* ---- streams and events */
fv_status fv__cuda_stream_create(const fv__cuda_device *device, CUstream *stream, fv_error *err);          /* non-blocking */
void fv__cuda_stream_destroy(const fv__cuda_device *device, CUstream stream);
fv_status fv__cuda_stream_wait(const fv__cuda_device *device, CUstream stream, CUevent event, fv_error *err);
fv_status fv__cuda_stream_sync(const fv__cuda_device *device, CUstream stream, fv_error *err);
/* *capturing is also true of a capture that was broken: nothing may be launched but the end of it. */
fv_status fv__cuda_stream_capturing(const fv__cuda_device *device, CUstream stream, bool *capturing, fv_error *err);
fv_status fv__cuda_event_create(const fv__cuda_device *device, bool timing, CUevent *event, fv_error *err);
void fv__cuda_event_destroy(const fv__cuda_device *device, CUevent event);
fv_status fv__cuda_event_record(const fv__cuda_device *device, CUevent event, CUstream stream, fv_error *err);
fv_status fv__cuda_event_done(const fv__cuda_device *device, CUevent event, bool *done, fv_error *err);
fv_status fv__cuda_event_sync(const fv__cuda_device *device, CUevent event, fv_error *err);
fv_status fv__cuda_event_ms(const fv__cuda_device *device, CUevent start, CUevent end, float *ms, fv_error *err);

/* ---- code. Loading works in relaxed capture mode, and makes sure that nothing is left to load at the first launch. */
typedef struct fv__cuda_kernel_facts {
    int registers, local_bytes, static_shared, max_threads_per_block;
} fv__cuda_kernel_facts;

fv_status fv__cuda_module_load(const fv__cuda_device *device, const void *image, CUmodule *module, fv_error *err);
void fv__cuda_module_unload(const fv__cuda_device *device, CUmodule module);
fv_status fv__cuda_module_function(const fv__cuda_device *device, CUmodule module, const char *name, CUfunction *function, fv_error *err);
fv_status fv__cuda_module_global(const fv__cuda_device *device, CUmodule module, const char *name, CUdeviceptr *pointer, size_t *bytes,
                                 fv_error *err);
fv_status fv__cuda_kernel_inspect(const fv__cuda_device *device, CUfunction function, fv__cuda_kernel_facts *facts, fv_error *err);
/* Lets launches of `function` ask for up to `bytes` of dynamic shared memory. */
fv_status fv__cuda_kernel_shared(const fv__cuda_device *device, CUfunction function, int bytes, fv_error *err);
fv_status fv__cuda_kernel_occupancy(const fv__cuda_device *device, CUfunction function, int threads, size_t dynamic_shared, int *blocks_per_sm,
                                    fv_error *err);

typedef struct fv__cuda_launch {
    CUfunction function;
    CUstream stream;
    unsigned grid[3], block[3];     /* 0 counts as 1 in y and z */
    unsigned shared_bytes;          /* dynamic */
    unsigned cluster_x;             /* 0: no clusters */
    bool overlap;                   /* programmatic dependent launch: may start before the kernel in front of it has ended, and waits
                                       for it by griddepcontrol.wait */
} fv__cuda_launch;

/* parameters: an address for each of the kernel's parameters. A grid of 0 blocks launches nothing and is fine. */
fv_status fv__cuda_launch_kernel(const fv__cuda_device *device, const fv__cuda_launch *launch, void **parameters, fv_error *err);

/* A tensor map of a tiled tensor for the bulk copy engine; no interleave, zeros outside.
 * dims [rank] and box [rank] innermost first, in elements; strides [rank - 1] in bytes, of the axes behind the innermost. */
fv_status fv__cuda_tensor_map(const fv__cuda_device *device, CUtensorMap *map, int data_type, int rank, CUdeviceptr address,
                              const uint64_t *dims, const uint64_t *strides, const uint32_t *box, int swizzle, fv_error *err);

#endif
