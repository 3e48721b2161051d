/* SPDX-License-Identifier: Apache-2.0 */
/* driver.c -- libcuda by dlopen: finding it, one device of it, and the calls that the backend makes.
 *
 *   (1) whatever a call does, it pops what it pushed and restores the capture mode that it found; what is current already is not pushed by the calls
 *       of every step;
 *   (2) no call reaches the driver from a process other than the one that opened the device;
 *   (3) no result of the driver is dropped, except by the functions that release things. [tests: a driver of our own that counts]
 */
#include "cuda/driver.h"

#include "os.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OLDEST_DRIVER = 12000, LEGACY_STREAM = 1 };

/* ------------------------------------------------------------------------------------------------ finding the driver */

typedef CUresult get_proc_address(const char *name, void **function, int version, uint64_t flags, int *found);

/* NULL: *reason is why the first place that was tried does not do. */
static void *open_driver(char tried[160], char reason[200])
{
    static const char *const usual[] = {
        "libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1", "/usr/local/nvidia/lib/libcuda.so.1",
    };
    const char *named = fv__os_env("FV_CUDA_DRIVER_PATH");
    void *library = NULL;
    snprintf(tried, 160, named ? "FV_CUDA_DRIVER_PATH=%s" : "%s", named ? named : usual[0]);
    for (int i = 0; !library && i < (named ? 1 : FV__COUNT(usual)); i++) {
        library = dlopen(named ? named : usual[i], RTLD_NOW | RTLD_LOCAL);
        const char *words = library ? NULL : dlerror();
        if (!i) snprintf(reason, 200, "%s", words ? words : "no reason given");
    }
    return library;
}

/* The signature of a function is fixed by the version it is asked for in; a plain symbol may have become another function since. */
static void *find_function(void *library, get_proc_address *ask, const char *name, int version, const char *symbol)
{
    void *function = NULL;
    int found = 1;
    if (ask && ask(name, &function, version, LEGACY_STREAM, &found) == CUDA_SUCCESS && found == 0 && function) return function;
    return dlsym(library, symbol);
}

/* Fills all fields; returns the name of a function that is needed and missing. */
static const char *find_functions(fv__cuda_api *api)
{
    const char *missing = NULL;
    get_proc_address *ask;
    *(void **)&ask = dlsym(api->library, "cuGetProcAddress_v2");
#define FIND(name, version, symbol, parameters) *(void **)&api->name = find_function(api->library, ask, #name, version, symbol);
#define NEED(name, version, symbol, parameters) FIND(name, version, symbol, parameters) if (!api->name && !missing) missing = #name;
    FV__CUDA_API(NEED, FIND)
#undef NEED
#undef FIND
    return missing;
}

/* The driver's words; its own functions for that may be called before cuInit. */
static void describe(const fv__cuda_api *api, CUresult result, const char **name, const char **text)
{
    *name = *text = NULL;
    api->cuGetErrorName(result, name);
    api->cuGetErrorString(result, text);
    if (!*name) *name = "an unknown error";
    if (!*text) *text = "no description";
}

static const char *advice(CUresult result)
{
    switch (result) {
    case CUDA_ERROR_NO_DEVICE: return "; no GPU is visible (CUDA_VISIBLE_DEVICES?); device \"cpu\" needs none";
    case CUDA_ERROR_STUB_LIBRARY: return "; this is the stub for linking, not the driver";
    case CUDA_ERROR_NOT_INITIALIZED: return "; a process that was forked after CUDA was initialised cannot use it: spawn it instead, or fork before";
    default: return "";
    }
}

static fv_status api_status(const fv__cuda_api *api, CUresult result, const char *what, const char *where, fv_error *err)
{
    const char *name, *text;
    if (result == CUDA_SUCCESS) return FV_OK;
    describe(api, result, &name, &text);
    const bool capture = result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && result <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    const fv_status status = result == CUDA_ERROR_OUT_OF_MEMORY ? FV_E_NO_MEMORY : capture ? FV_E_NOT_READY : FV_E_DEVICE;
    return fv__fail(err, status, "device", result, 0, "%s on %s: %s (%s)%s", what, where, name, text, advice(result));
}

fv_status fv__cuda_api_load(fv__cuda_api *api, fv_error *err)
{
    char tried[160], reason[200];
    memset(api, 0, sizeof *api);
    api->library = open_driver(tried, reason);
    if (!api->library)
        return fv__fail(err, FV_E_DEVICE, "device", 0, 0, "no NVIDIA driver: %s cannot be opened (%s); device \"cpu\" needs none", tried, reason);
    const char *missing = find_functions(api);
    if (missing)
        return fv__fail(err, FV_E_DEVICE, "device", 0, OLDEST_DRIVER, "the driver %s has no %s: it is older than CUDA %d.%d (driver 525), which is needed",
                        tried, missing, OLDEST_DRIVER / 1000, OLDEST_DRIVER % 1000 / 10);
    api->cuDriverGetVersion(&api->version);
    return api_status(api, api->cuInit(0), "cuInit", "this machine", err);
}

fv_status fv__cuda_count(int *count, fv_error *err)
{
    fv__cuda_api api;
    *count = 0;
    FV_TRY(fv__cuda_api_load(&api, err));
    FV_TRY(api_status(&api, api.cuDeviceGetCount(count), "cuDeviceGetCount", "this machine", err));
    return *count ? FV_OK : api_status(&api, CUDA_ERROR_NO_DEVICE, "cuDeviceGetCount", "this machine", err);
}

/* ------------------------------------------------------------------------------------------------- opening a device */

/* Attributes by number, as in the driver's ABI. One that a driver does not know counts as 0. */
static int attribute(const fv__cuda_device *d, int number)
{
    int value = 0;
    return d->api.cuDeviceGetAttribute(&value, number, d->handle) == CUDA_SUCCESS ? value : 0;
}

static void read_facts(fv__cuda_device *d)
{
    fv__cuda_facts *f = &d->facts;
    d->api.cuDeviceGetName(f->name, sizeof f->name, d->handle);
    f->name[sizeof f->name - 1] = 0;
    d->api.cuDeviceTotalMem(&f->memory_bytes, d->handle);
    const struct { int number; int *field; } table[] = {
        { 1, &f->max_threads_per_block }, { 8, &f->shared_per_block }, { 10, &f->warp_size }, { 13, &f->clock_khz }, { 16, &f->num_sms },
        { 33, &f->pci_bus }, { 36, &f->memory_clock_khz }, { 37, &f->memory_bus_bits }, { 38, &f->l2_bytes }, { 39, &f->max_threads_per_sm },
        { 75, &f->cc_major }, { 76, &f->cc_minor }, { 81, &f->shared_per_sm }, { 82, &f->registers_per_sm }, { 97, &f->shared_per_block_optin },
        { 106, &f->max_blocks_per_sm }, { 111, &f->shared_reserved },
    };
    for (int i = 0; i < FV__COUNT(table); i++) *table[i].field = attribute(d, table[i].number);
    f->integrated = attribute(d, 18);
    f->cooperative = attribute(d, 95);
    f->clusters = attribute(d, 120);
    f->tensor_maps = attribute(d, 127) && d->api.cuTensorMapEncodeTiled;
}

static fv_status find_device(fv__cuda_device *d, fv_error *err)
{
    int count = 0;
    FV_TRY(fv__cuda_api_load(&d->api, err));
    FV_TRY(fv__cuda_status(d, d->api.cuDeviceGetCount(&count), "cuDeviceGetCount", err));
    if (!count) return fv__cuda_status(d, CUDA_ERROR_NO_DEVICE, "cuDeviceGetCount", err);
    if (d->ordinal < 0 || d->ordinal >= count)
        return fv__fail(err, FV_E_DEVICE, "device", d->ordinal, count, "%s does not exist: there are %d devices, from cuda:0", d->label, count);
    FV_TRY(fv__cuda_status(d, d->api.cuDeviceGet(&d->handle, d->ordinal), "cuDeviceGet", err));
    read_facts(d);
    if (d->facts.cc_major < 8)
        return fv__fail(err, FV_E_DEVICE, "device", d->facts.cc_major * 10 + d->facts.cc_minor, 80,
                        "%s (%s) has compute capability %d.%d; 8.0 is the oldest that kernels exist for", d->label, d->facts.name,
                        d->facts.cc_major, d->facts.cc_minor);
    return FV_OK;
}

/* Relaxed: a stray allocation on this thread does not break a capture on any other. Returns the mode to go back to. */
static int relax(const fv__cuda_device *d)
{
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    d->api.cuThreadExchangeStreamCaptureMode(&mode);
    return mode;
}

static void restore(const fv__cuda_device *d, int mode)
{
    d->api.cuThreadExchangeStreamCaptureMode(&mode);
}

fv_status fv__cuda_device_open(int ordinal, fv__cuda_device **device, fv_error *err)
{
    *device = NULL;
    fv__cuda_device *d = calloc(1, sizeof *d);
    if (!d) return fv__fail(err, FV_E_NO_MEMORY, "device", (int64_t)sizeof *d, 0, "no memory for a device");
    d->ordinal = ordinal;
    d->process = getpid();
    snprintf(d->label, sizeof d->label, "cuda:%d", ordinal);
    fv_status status = find_device(d, err);
    if (status == FV_OK) {
        const int mode = relax(d);
        status = fv__cuda_status(d, d->api.cuDevicePrimaryCtxRetain(&d->context, d->handle), "cuDevicePrimaryCtxRetain", err);
        restore(d, mode);
    }
    if (status == FV_OK) *device = d;
    else free(d);
    return status;
}

void fv__cuda_device_close(fv__cuda_device **device)
{
    fv__cuda_device *d = *device;
    *device = NULL;
    if (!d) return;
    if (d->process == getpid()) d->api.cuDevicePrimaryCtxRelease(d->handle);
    free(d);
}

/* -------------------------------------------------------------------------------------------- entering and leaving */

fv_status fv__cuda_status(const fv__cuda_device *d, CUresult result, const char *what, fv_error *err)
{
    return api_status(&d->api, result, what, d->label, err);
}

static fv_status check_process(const fv__cuda_device *d, fv_error *err)
{
    const pid_t now = getpid();
    if (d->process == now) return FV_OK;
    return fv__fail(err, FV_E_DEVICE, "device", (int64_t)now, (int64_t)d->process,
                    "%s was opened by process %ld before this one was forked, and CUDA does not survive a fork: spawn processes, or fork before "
                    "the first context is opened", d->label, (long)d->process);
}

fv_status fv__cuda_enter(const fv__cuda_device *d, fv_error *err)
{
    FV_TRY(check_process(d, err));
    return fv__cuda_status(d, d->api.cuCtxPushCurrent(d->context), "cuCtxPushCurrent", err);
}

void fv__cuda_leave(const fv__cuda_device *d)
{
    CUcontext popped;
    d->api.cuCtxPopCurrent(&popped);
}

/* The calls of every run and update: most callers have the context current already, and asking costs less than a push and a pop. */
static fv_status step_in(const fv__cuda_device *d, bool *pushed, fv_error *err)
{
    CUcontext now = NULL;
    *pushed = false;
    FV_TRY(check_process(d, err));
    if (d->api.cuCtxGetCurrent(&now) == CUDA_SUCCESS && now == d->context) return FV_OK;
    *pushed = true;
    return fv__cuda_status(d, d->api.cuCtxPushCurrent(d->context), "cuCtxPushCurrent", err);
}

static fv_status step_out(const fv__cuda_device *d, bool pushed, CUresult result, const char *what, fv_error *err)
{
    if (pushed) fv__cuda_leave(d);
    return result == CUDA_SUCCESS ? FV_OK : fv__cuda_status(d, result, what, err);
}

/* The tail of nearly every call below: leaves, then says what happened. */
static fv_status left(const fv__cuda_device *d, CUresult result, const char *what, fv_error *err)
{
    fv__cuda_leave(d);
    return fv__cuda_status(d, result, what, err);
}

static fv_status enter_relaxed(const fv__cuda_device *d, int *mode, fv_error *err)
{
    FV_TRY(fv__cuda_enter(d, err));
    *mode = relax(d);
    return FV_OK;
}

static fv_status left_relaxed(const fv__cuda_device *d, int mode, CUresult result, const char *what, fv_error *err)
{
    restore(d, mode);
    return left(d, result, what, err);
}

/* ------------------------------------------------------------------------------------------------------------- memory */

fv_status fv__cuda_alloc(const fv__cuda_device *d, size_t bytes, CUdeviceptr *pointer, fv_error *err)
{
    int mode;
    char what[64];
    *pointer = 0;
    if (!bytes) return FV_OK;
    FV_TRY(enter_relaxed(d, &mode, err));
    snprintf(what, sizeof what, "cuMemAlloc of %zu bytes", bytes);
    return left_relaxed(d, mode, d->api.cuMemAlloc(pointer, bytes), what, err);
}

void fv__cuda_free(const fv__cuda_device *d, CUdeviceptr pointer)
{
    int mode;
    if (!pointer || enter_relaxed(d, &mode, NULL) != FV_OK) return;
    left_relaxed(d, mode, d->api.cuMemFree(pointer), "cuMemFree", NULL);
}

/* Portable: a plan's staging may be filled by a thread that works on another device. Mapped: kernels report into it. */
fv_status fv__cuda_alloc_pinned(const fv__cuda_device *d, size_t bytes, void **pointer, fv_error *err)
{
    int mode;
    char what[64];
    *pointer = NULL;
    if (!bytes) return FV_OK;
    FV_TRY(enter_relaxed(d, &mode, err));
    snprintf(what, sizeof what, "cuMemHostAlloc of %zu bytes", bytes);
    return left_relaxed(d, mode, d->api.cuMemHostAlloc(pointer, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP), what, err);
}

void fv__cuda_free_pinned(const fv__cuda_device *d, void *pointer)
{
    int mode;
    if (!pointer || enter_relaxed(d, &mode, NULL) != FV_OK) return;
    left_relaxed(d, mode, d->api.cuMemFreeHost(pointer), "cuMemFreeHost", NULL);
}

fv_status fv__cuda_mapped_address(const fv__cuda_device *d, void *pinned, CUdeviceptr *pointer, fv_error *err)
{
    *pointer = 0;
    FV_TRY(fv__cuda_enter(d, err));
    return left(d, d->api.cuMemHostGetDevicePointer(pointer, pinned, 0), "cuMemHostGetDevicePointer", err);
}

fv_status fv__cuda_to_device(const fv__cuda_device *d, CUdeviceptr to, const void *from, size_t bytes, CUstream stream, fv_error *err)
{
    bool pushed;
    if (!bytes) return FV_OK;
    FV_TRY(step_in(d, &pushed, err));
    return step_out(d, pushed, d->api.cuMemcpyHtoDAsync(to, from, bytes, stream), "cuMemcpyHtoDAsync", err);
}

fv_status fv__cuda_to_host(const fv__cuda_device *d, void *to, CUdeviceptr from, size_t bytes, CUstream stream, fv_error *err)
{
    if (!bytes) return FV_OK;
    FV_TRY(fv__cuda_enter(d, err));
    return left(d, d->api.cuMemcpyDtoHAsync(to, from, bytes, stream), "cuMemcpyDtoHAsync", err);
}

fv_status fv__cuda_copy(const fv__cuda_device *d, CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream, fv_error *err)
{
    if (!bytes) return FV_OK;
    FV_TRY(fv__cuda_enter(d, err));
    return left(d, d->api.cuMemcpyDtoDAsync(to, from, bytes, stream), "cuMemcpyDtoDAsync", err);
}

fv_status fv__cuda_fill_bytes(const fv__cuda_device *d, CUdeviceptr to, int value, size_t count, CUstream stream, fv_error *err)
{
    if (!count) return FV_OK;
    FV_TRY(fv__cuda_enter(d, err));
    return left(d, d->api.cuMemsetD8Async(to, (unsigned char)value, count, stream), "cuMemsetD8Async", err);
}

fv_status fv__cuda_fill_words(const fv__cuda_device *d, CUdeviceptr to, uint32_t value, size_t count, CUstream stream, fv_error *err)
{
    if (!count) return FV_OK;
    FV_TRY(fv__cuda_enter(d, err));
    return left(d, d->api.cuMemsetD32Async(to, value, count, stream), "cuMemsetD32Async", err);
}

int fv__cuda_pointer_device(const fv__cuda_device *d, const void *pointer)
{
    unsigned type = 0;
    int ordinal = -1;
    if (!pointer || fv__cuda_enter(d, NULL) != FV_OK) return -1;
    const CUdeviceptr address = (CUdeviceptr)(uintptr_t)pointer;
    const bool known = d->api.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) == CUDA_SUCCESS
                    && type == CU_MEMORYTYPE_DEVICE
                    && d->api.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address) == CUDA_SUCCESS;
    fv__cuda_leave(d);
    return known ? ordinal : -1;
}

/* ------------------------------------------------------------------------------------------------- streams and events */

fv_status fv__cuda_stream_create(const fv__cuda_device *d, CUstream *stream, fv_error *err)
{
    int mode;
    *stream = NULL;
    FV_TRY(enter_relaxed(d, &mode, err));
    return left_relaxed(d, mode, d->api.cuStreamCreate(stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate", err);
}

void fv__cuda_stream_destroy(const fv__cuda_device *d, CUstream stream)
{
    int mode;
    if (!stream || enter_relaxed(d, &mode, NULL) != FV_OK) return;
    left_relaxed(d, mode, d->api.cuStreamDestroy(stream), "cuStreamDestroy", NULL);
}

fv_status fv__cuda_stream_wait(const fv__cuda_device *d, CUstream stream, CUevent event, fv_error *err)
{
    FV_TRY(fv__cuda_enter(d, err));
    return left(d, d->api.cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent", err);
}

fv_status fv__cuda_stream_sync(const fv__cuda_device *d, CUstream stream, fv_error *err)
{
    FV_TRY(fv__cuda_enter(d, err));
    return left(d, d->api.cuStreamSynchronize(stream), "cuStreamSynchronize", err);
}

/* The legacy stream cannot be captured, and asking about it while some other stream is captured is an error that would break that capture. */
fv_status fv__cuda_stream_capturing(const fv__cuda_device *d, CUstream stream, bool *capturing, fv_error *err)
{
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    *capturing = false;
    if (!stream || (uintptr_t)stream == 1) return FV_OK;
    bool pushed;
    FV_TRY(step_in(d, &pushed, err));
    const fv_status s = step_out(d, pushed, d->api.cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing", err);
    *capturing = status != CU_STREAM_CAPTURE_STATUS_NONE;
    return s;
}

fv_status fv__cuda_event_create(const fv__cuda_device *d, bool timing, CUevent *event, fv_error *err)
{
    int mode;
    *event = NULL;
    FV_TRY(enter_relaxed(d, &mode, err));
    return left_relaxed(d, mode, d->api.cuEventCreate(event, timing ? 0 : CU_EVENT_DISABLE_TIMING), "cuEventCreate", err);
}

void fv__cuda_event_destroy(const fv__cuda_device *d, CUevent event)
{
    int mode;
    if (!event || enter_relaxed(d, &mode, NULL) != FV_OK) return;
    left_relaxed(d, mode, d->api.cuEventDestroy(event), "cuEventDestroy", NULL);
}

fv_status fv__cuda_event_record(const fv__cuda_device *d, CUevent event, CUstream stream, fv_error *err)
{
    bool pushed;
    FV_TRY(step_in(d, &pushed, err));
    return step_out(d, pushed, d->api.cuEventRecord(event, stream), "cuEventRecord", err);
}

/* Asking and waiting are forbidden on a thread while any thread captures in the global mode, unless it is relaxed. */
fv_status fv__cuda_event_done(const fv__cuda_device *d, CUevent event, bool *done, fv_error *err)
{
    int mode;
    *done = false;
    FV_TRY(enter_relaxed(d, &mode, err));
    const CUresult result = d->api.cuEventQuery(event);
    *done = result == CUDA_SUCCESS;
    return left_relaxed(d, mode, result == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : result, "cuEventQuery", err);
}

fv_status fv__cuda_event_sync(const fv__cuda_device *d, CUevent event, fv_error *err)
{
    int mode;
    FV_TRY(enter_relaxed(d, &mode, err));
    return left_relaxed(d, mode, d->api.cuEventSynchronize(event), "cuEventSynchronize", err);
}

fv_status fv__cuda_event_ms(const fv__cuda_device *d, CUevent start, CUevent end, float *ms, fv_error *err)
{
    *ms = 0;
    FV_TRY(fv__cuda_enter(d, err));
    return left(d, d->api.cuEventElapsedTime(ms, start, end), "cuEventElapsedTime", err);
}

/* --------------------------------------------------------------------------------------------------------------- code */

fv_status fv__cuda_module_load(const fv__cuda_device *d, const void *image, CUmodule *module, fv_error *err)
{
    int mode;
    *module = NULL;
    FV_TRY(enter_relaxed(d, &mode, err));
    return left_relaxed(d, mode, d->api.cuModuleLoadData(module, image), "cuModuleLoadData", err);
}

void fv__cuda_module_unload(const fv__cuda_device *d, CUmodule module)
{
    int mode;
    if (!module || enter_relaxed(d, &mode, NULL) != FV_OK) return;
    left_relaxed(d, mode, d->api.cuModuleUnload(module), "cuModuleUnload", NULL);
}

/* Since CUDA 12.2 a driver puts off loading a kernel until it must, which would be a first launch inside a capture. cuFuncLoad ends that; in
 * drivers without it, asking for an attribute does. */
fv_status fv__cuda_module_function(const fv__cuda_device *d, CUmodule module, const char *name, CUfunction *function, fv_error *err)
{
    int mode, registers;
    *function = NULL;
    FV_TRY(enter_relaxed(d, &mode, err));
    CUresult result = d->api.cuModuleGetFunction(function, module, name);
    if (result == CUDA_SUCCESS)
        result = d->api.cuFuncLoad ? d->api.cuFuncLoad(*function) : d->api.cuFuncGetAttribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, *function);
    return left_relaxed(d, mode, result, name, err);
}

fv_status fv__cuda_module_global(const fv__cuda_device *d, CUmodule module, const char *name, CUdeviceptr *pointer, size_t *bytes, fv_error *err)
{
    int mode;
    *pointer = 0;
    *bytes = 0;
    FV_TRY(enter_relaxed(d, &mode, err));
    return left_relaxed(d, mode, d->api.cuModuleGetGlobal(pointer, bytes, module, name), name, err);
}

fv_status fv__cuda_kernel_inspect(const fv__cuda_device *d, CUfunction function, fv__cuda_kernel_facts *facts, fv_error *err)
{
    const struct { int number; int *field; } table[] = {
        { CU_FUNC_ATTRIBUTE_NUM_REGS, &facts->registers }, { CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, &facts->local_bytes },
        { CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, &facts->static_shared },
        { CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, &facts->max_threads_per_block },
    };
    FV_TRY(fv__cuda_enter(d, err));
    CUresult result = CUDA_SUCCESS;
    for (int i = 0; i < FV__COUNT(table) && result == CUDA_SUCCESS; i++)
        result = d->api.cuFuncGetAttribute(table[i].field, table[i].number, function);
    return left(d, result, "cuFuncGetAttribute", err);
}

fv_status fv__cuda_kernel_shared(const fv__cuda_device *d, CUfunction function, int bytes, fv_error *err)
{
    if (bytes > d->facts.shared_per_block_optin)
        return fv__fail(err, FV_E_UNSUPPORTED, "shared memory", bytes, d->facts.shared_per_block_optin,
                        "a kernel needs %d bytes of shared memory; a block of %s has at most %d", bytes, d->label, d->facts.shared_per_block_optin);
    FV_TRY(fv__cuda_enter(d, err));
    return left(d, d->api.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes), "cuFuncSetAttribute", err);
}

fv_status fv__cuda_kernel_occupancy(const fv__cuda_device *d, CUfunction function, int threads, size_t dynamic_shared, int *blocks_per_sm,
                                    fv_error *err)
{
    *blocks_per_sm = 0;
    FV_TRY(fv__cuda_enter(d, err));
    return left(d, d->api.cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks_per_sm, function, threads, dynamic_shared),
                "cuOccupancyMaxActiveBlocksPerMultiprocessor", err);
}

fv_status fv__cuda_launch_kernel(const fv__cuda_device *d, const fv__cuda_launch *l, void **parameters, fv_error *err)
{
    CUlaunchAttribute attributes[2];
    unsigned n = 0;
    if (!l->grid[0]) return FV_OK;
    if (l->cluster_x || l->overlap) memset(attributes, 0, sizeof attributes);
    if (l->cluster_x) {
        attributes[n].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attributes[n].value.cluster.x = l->cluster_x;
        attributes[n].value.cluster.y = attributes[n].value.cluster.z = 1;
        n++;
    }
    if (l->overlap) {
        attributes[n].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[n++].value.programmatic_stream_serialization = 1;
    }
    const CUlaunchConfig config = {
        .grid_x = l->grid[0], .grid_y = l->grid[1] ? l->grid[1] : 1, .grid_z = l->grid[2] ? l->grid[2] : 1,
        .block_x = l->block[0], .block_y = l->block[1] ? l->block[1] : 1, .block_z = l->block[2] ? l->block[2] : 1,
        .shared_bytes = l->shared_bytes, .stream = l->stream, .attributes = attributes, .num_attributes = n,
    };
    bool pushed;
    FV_TRY(step_in(d, &pushed, err));
    return step_out(d, pushed, d->api.cuLaunchKernelEx(&config, l->function, parameters, NULL), "cuLaunchKernelEx", err);
}

fv_status fv__cuda_tensor_map(const fv__cuda_device *d, CUtensorMap *map, int data_type, int rank, CUdeviceptr address, const uint64_t *dims,
                              const uint64_t *strides, const uint32_t *box, int swizzle, fv_error *err)
{
    static const uint32_t ones[5] = { 1, 1, 1, 1, 1 };
    if (!d->facts.tensor_maps)
        return fv__fail(err, FV_E_UNSUPPORTED, "device", d->facts.cc_major, 9, "%s has no tensor maps", d->label);
    FV_TRY(fv__cuda_enter(d, err));
    return left(d, d->api.cuTensorMapEncodeTiled(map, data_type, (uint32_t)rank, (void *)(uintptr_t)address, dims, strides, box, ones, 0, swizzle,
                                                 CU_TENSOR_MAP_L2_PROMOTION_256B, 0), "cuTensorMapEncodeTiled", err);
}
