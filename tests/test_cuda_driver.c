/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_driver.c -- the driver layer and the CUDA compiler without a GPU: against tests/fake/cuda.c, which this test builds first. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "cuda/jit.h"

#include <dlfcn.h>
#include <ftw.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[] = "/tmp/test_cuda_XXXXXX";

static struct {
    void (*fake_devices)(int);
    void (*fake_version)(int);
    void (*fake_fail)(const char *, int);
    void (*fake_capture)(void *);
    int (*fake_calls)(void), (*fake_loads)(void), (*fake_unloads)(void), (*fake_live)(void), (*fake_unsafe)(void), (*fake_depth)(void),
        (*fake_mode)(void), (*fake_retains)(int);
    void *(*fake_current)(void), *(*fake_context)(int);
    const char *(*fake_launch)(void);
    CUresult (*cuCtxPushCurrent_v2)(void *), (*cuCtxPopCurrent_v2)(void **);
} fake;

/* ------------------------------------------------------------------------------------------------------------ helpers */

static int build_driver(const char *name, const char *options)
{
    char command[400];
    snprintf(command, sizeof command, "cc -std=c11 -D_GNU_SOURCE -shared -fPIC -w %s -o %s/%s tests/fake/cuda.c -ldl", options, folder, name);
    return system(command);
}

static int set_up(void **state)
{
    char path[100];
    (void)state;
    if (!mkdtemp(folder) || build_driver("libcuda.so.1", "") || build_driver("old.so", "-DFAKE_OLD")) return -1;
    snprintf(path, sizeof path, "%s/libcuda.so.1", folder);
    setenv("FV_CUDA_DRIVER_PATH", path, 1);
    void *library = dlopen(path, RTLD_NOW);
    if (!library) return -1;
#define GET(name) *(void **)&fake.name = dlsym(library, #name)
    GET(fake_devices), GET(fake_version), GET(fake_fail), GET(fake_capture), GET(fake_calls), GET(fake_loads), GET(fake_unloads), GET(fake_live);
    GET(fake_unsafe), GET(fake_depth), GET(fake_mode), GET(fake_retains), GET(fake_current), GET(fake_context), GET(fake_launch);
    GET(cuCtxPushCurrent_v2), GET(cuCtxPopCurrent_v2);
    return 0;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *where)
{
    (void)st, (void)type, (void)where;
    return remove(path);
}

static int tear_down(void **state)
{
    (void)state;
    return nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static fv__cuda_device *open_device(int ordinal)
{
    fv__cuda_device *d = NULL;
    fv_error err = { 0 };
    if (fv__cuda_device_open(ordinal, &d, &err) != FV_OK) print_error("%s\n", err.text);
    assert_non_null(d);
    return d;
}

/* ------------------------------------------------------------------------------------------------------ without a GPU */

static void no_driver_is_a_sentence(void **state)
{
    (void)state;
    char *before = strdup(getenv("FV_CUDA_DRIVER_PATH"));
    fv__cuda_device *d;
    fv_error err = { 0 };
    setenv("FV_CUDA_DRIVER_PATH", "/nowhere/libcuda.so.1", 1);
    assert_int_equal(fv__cuda_device_open(0, &d, &err), FV_E_DEVICE);
    assert_null(d);
    assert_non_null(strstr(err.text, "/nowhere/libcuda.so.1"));
    setenv("FV_CUDA_DRIVER_PATH", "libm.so.6", 1);              /* a library, but not that one */
    assert_int_equal(fv__cuda_device_open(0, &d, &err), FV_E_DEVICE);
    assert_non_null(strstr(err.text, "cuInit"));
    setenv("FV_CUDA_DRIVER_PATH", before, 1);
    free(before);
}

static void no_device_is_a_sentence(void **state)
{
    (void)state;
    fv__cuda_device *d;
    fv_error err = { 0 };
    int count = -1;
    assert_int_equal(fv__cuda_count(&count, &err), FV_OK);
    assert_int_equal(count, 2);
    assert_int_equal(fv__cuda_device_open(2, &d, &err), FV_E_DEVICE);
    assert_int_equal(err.value, 2);
    assert_int_equal(err.limit, 2);
    assert_int_equal(fv__cuda_device_open(-1, &d, &err), FV_E_DEVICE);
    fake.fake_devices(3);
    assert_int_equal(fv__cuda_device_open(2, &d, &err), FV_E_DEVICE);
    assert_non_null(strstr(err.text, "7.5"));
    fake.fake_devices(0);
    assert_int_equal(fv__cuda_device_open(0, &d, &err), FV_E_DEVICE);
    assert_non_null(strstr(err.text, "CUDA_ERROR_NO_DEVICE"));
    fake.fake_devices(2);
    fake.fake_fail("cuInit", 3);
    assert_int_equal(fv__cuda_device_open(0, &d, &err), FV_E_DEVICE);
    assert_non_null(strstr(err.text, "forked"));
    fake.fake_fail("cuInit", 999);
    assert_int_equal(fv__cuda_count(&count, &err), FV_E_DEVICE);
    assert_non_null(strstr(err.text, "unknown"));
    fake.fake_fail(NULL, 0);
}

static void drivers_that_cannot_be_asked_by_version(void **state)
{
    (void)state;
    char path[100], *before = strdup(getenv("FV_CUDA_DRIVER_PATH"));
    snprintf(path, sizeof path, "%s/old.so", folder);
    setenv("FV_CUDA_DRIVER_PATH", path, 1);
    fv__cuda_device *d = open_device(0);
    CUdeviceptr p;
    assert_int_equal(fv__cuda_alloc(d, 64, &p, NULL), FV_OK);
    fv__cuda_free(d, p);
    fv__cuda_device_close(&d);
    setenv("FV_CUDA_DRIVER_PATH", before, 1);
    free(before);
}

/* ----------------------------------------------------------------------------------------------- leaving no trace */

static void facts_are_read(void **state)
{
    (void)state;
    char arch[16];
    fv__cuda_device *a = open_device(0), *b = open_device(1);
    assert_int_equal(fake.fake_retains(0), 1);
    assert_string_equal(a->label, "cuda:0");
    assert_string_equal(b->facts.name, "Fake 1");
    assert_int_equal(a->facts.num_sms, 132);
    assert_int_equal(a->facts.l2_bytes, 60 << 20);
    assert_int_equal(a->facts.shared_per_block_optin, 227 << 10);
    assert_true(a->facts.tensor_maps && !b->facts.tensor_maps);
    assert_true(b->facts.memory_bytes == (size_t)2 << 36);
    fv__cuda_arch(a->facts.cc_major, a->facts.cc_minor, arch);
    assert_string_equal(arch, "sm_90a");
    fv__cuda_arch(b->facts.cc_major, b->facts.cc_minor, arch);
    assert_string_equal(arch, "sm_86");
    fv__cuda_device_close(&a);
    fv__cuda_device_close(&b);
    assert_null(a);
    assert_int_equal(fake.fake_retains(0) + fake.fake_retains(1), 0);
    fv__cuda_device_close(&a);
}

/* Every call of the layer once; counts those that failed. */
static int every_call(fv__cuda_device *d)
{
    static const unsigned char image[16] = "\177ELF";
    CUdeviceptr p = 0, g = 0;
    void *pinned = NULL;
    CUstream stream = NULL;
    CUevent e = NULL;
    CUmodule m = NULL;
    CUfunction f = NULL;
    CUtensorMap map;
    fv__cuda_kernel_facts facts;
    bool flag;
    float ms;
    size_t bytes;
    int failed = 0, blocks, parameter = 7;
    char host[64] = { 1 };
    const uint64_t dims[2] = { 64, 8 }, strides[1] = { 128 };
    const uint32_t box[2] = { 64, 8 };
    failed += fv__cuda_alloc(d, 64, &p, NULL) != FV_OK;
    if (p) {
        failed += fv__cuda_to_device(d, p, host, 64, NULL, NULL) != FV_OK;
        failed += fv__cuda_to_host(d, host, p, 64, NULL, NULL) != FV_OK;
        failed += fv__cuda_copy(d, p + 32, p, 32, NULL, NULL) != FV_OK;
        failed += fv__cuda_fill_bytes(d, p, 3, 64, NULL, NULL) != FV_OK;
        failed += fv__cuda_fill_words(d, p, 3, 16, NULL, NULL) != FV_OK;
    }
    failed += fv__cuda_alloc_pinned(d, 64, &pinned, NULL) != FV_OK;
    failed += fv__cuda_mapped_address(d, pinned, &g, NULL) != FV_OK;
    failed += fv__cuda_pointer_device(d, host) != 1;                /* where the fake says that everything lies */
    failed += fv__cuda_stream_create(d, &stream, NULL) != FV_OK;
    failed += fv__cuda_event_create(d, true, &e, NULL) != FV_OK;
    failed += fv__cuda_event_record(d, e, stream, NULL) != FV_OK;
    failed += fv__cuda_event_done(d, e, &flag, NULL) != FV_OK;
    failed += fv__cuda_event_sync(d, e, NULL) != FV_OK;
    failed += fv__cuda_event_ms(d, e, e, &ms, NULL) != FV_OK;
    failed += fv__cuda_stream_wait(d, stream, e, NULL) != FV_OK;
    failed += fv__cuda_stream_capturing(d, stream ? stream : (CUstream)(uintptr_t)64, &flag, NULL) != FV_OK;
    failed += fv__cuda_stream_sync(d, stream, NULL) != FV_OK;
    failed += fv__cuda_module_load(d, image, &m, NULL) != FV_OK;
    if (m) {
        failed += fv__cuda_module_function(d, m, "kernel", &f, NULL) != FV_OK;
        failed += fv__cuda_module_global(d, m, "global", &g, &bytes, NULL) != FV_OK;
    }
    failed += fv__cuda_kernel_inspect(d, f, &facts, NULL) != FV_OK;
    failed += fv__cuda_kernel_shared(d, f, 100 << 10, NULL) != FV_OK;
    failed += fv__cuda_kernel_occupancy(d, f, 128, 0, &blocks, NULL) != FV_OK;
    failed += fv__cuda_launch_kernel(d, &(fv__cuda_launch){ .function = f, .grid = { 3 }, .block = { 32 } }, (void *[]){ &parameter }, NULL) != FV_OK;
    failed += fv__cuda_tensor_map(d, &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, p, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_128B, NULL) != FV_OK;
    fv__cuda_module_unload(d, m);
    fv__cuda_event_destroy(d, e);
    fv__cuda_stream_destroy(d, stream);
    fv__cuda_free_pinned(d, pinned);
    fv__cuda_free(d, p);
    return failed;
}

/* The thread's context and capture mode are as before, after every call, whichever of them fails. */
static void calls_leave_no_trace(void **state)
{
    (void)state;
    static const char *const names[] = {
        "cuMemAlloc_v2", "cuMemHostAlloc", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoDAsync_v2", "cuMemsetD8Async",
        "cuMemsetD32Async", "cuMemHostGetDevicePointer_v2", "cuPointerGetAttribute", "cuStreamCreate", "cuEventCreate", "cuEventRecord",
        "cuEventQuery", "cuEventSynchronize", "cuEventElapsedTime", "cuStreamWaitEvent", "cuStreamIsCapturing", "cuStreamSynchronize",
        "cuModuleLoadData", "cuModuleGetFunction", "cuFuncLoad", "cuModuleGetGlobal_v2", "cuFuncGetAttribute", "cuFuncSetAttribute",
        "cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuLaunchKernelEx", "cuTensorMapEncodeTiled",
    };
    fv__cuda_device *d = open_device(0);
    void *mine = fake.fake_context(1), *popped;
    fake.cuCtxPushCurrent_v2(mine);                     /* the caller works on the other device */
    assert_int_equal(every_call(d), 0);
    for (int i = 0; i < FV__COUNT(names); i++) {
        fake.fake_fail(names[i], 700);
        const int failed = every_call(d);
        if (!failed) print_error("a failure of %s was dropped\n", names[i]);
        assert_true(failed >= 1);
        assert_ptr_equal(fake.fake_current(), mine);
        assert_int_equal(fake.fake_depth(), 1);
        assert_int_equal(fake.fake_mode(), 0);
    }
    fake.fake_fail(NULL, 0);
    assert_int_equal(fake.fake_live(), 0);
    fake.cuCtxPopCurrent_v2(&popped);
    fv__cuda_device_close(&d);
}

static void failures_are_told_in_words(void **state)
{
    (void)state;
    fv__cuda_device *d = open_device(0), *b = open_device(1);
    fv_error err = { 0 };
    CUdeviceptr p = 1;
    CUtensorMap map;
    assert_int_equal(fv__cuda_alloc(d, (size_t)1 << 50, &p, &err), FV_E_NO_MEMORY);
    assert_true(p == 0 && strstr(err.text, "1125899906842624") && strstr(err.text, "CUDA_ERROR_OUT_OF_MEMORY") && strstr(err.text, "cuda:0"));
    fake.fake_fail("cuLaunchKernelEx", 700);
    assert_int_equal(fv__cuda_launch_kernel(b, &(fv__cuda_launch){ .grid = { 1 }, .block = { 1 } }, NULL, &err), FV_E_DEVICE);
    assert_true(strstr(err.text, "CUDA_ERROR_ILLEGAL_ADDRESS") && strstr(err.text, "cuda:1"));
    fake.fake_fail(NULL, 0);
    assert_int_equal(fv__cuda_kernel_shared(d, NULL, 300 << 10, &err), FV_E_UNSUPPORTED);
    assert_int_equal(err.limit, 227 << 10);
    assert_int_equal(fv__cuda_tensor_map(b, &map, 0, 1, 0, NULL, NULL, NULL, 0, &err), FV_E_UNSUPPORTED);
    fv__cuda_device_close(&d);
    fv__cuda_device_close(&b);
}

static void launches_carry_their_attributes(void **state)
{
    (void)state;
    fv__cuda_device *d = open_device(0);
    int parameter = 42;
    void *parameters[] = { &parameter };
    fv__cuda_launch l = { .grid = { 132, 0, 2 }, .block = { 128 }, .shared_bytes = 4096, .overlap = true, .cluster_x = 2 };
    assert_int_equal(fv__cuda_launch_kernel(d, &l, parameters, NULL), FV_OK);
    assert_string_equal(fake.fake_launch(), "grid 132 1 2 block 128 1 1 shared 4096 parameter 42 attribute 4=2 attribute 6=1");
    l = (fv__cuda_launch){ .grid = { 0 }, .block = { 128 } };
    const int calls = fake.fake_calls();
    assert_int_equal(fv__cuda_launch_kernel(d, &l, parameters, NULL), FV_OK);
    assert_int_equal(fake.fake_calls(), calls);         /* nothing to launch */
    fv__cuda_device_close(&d);
}

static fv__cuda_device *both[2];

static void *work_on_both(void *arg)
{
    void *popped, *mine = fake.fake_context((int)(intptr_t)arg % 2);
    bool fine = true;
    fake.cuCtxPushCurrent_v2(mine);
    for (int i = 0; i < 200; i++) {
        CUdeviceptr p = 0;
        fine = fine && fv__cuda_alloc(both[i % 2], 256, &p, NULL) == FV_OK && fake.fake_current() == mine;
        fine = fine && fv__cuda_enter(both[i % 2], NULL) == FV_OK && fake.fake_current() == both[i % 2]->context;
        fv__cuda_leave(both[i % 2]);
        fv__cuda_free(both[i % 2], p);
        fine = fine && fake.fake_current() == mine && fake.fake_depth() == 1;
    }
    fake.cuCtxPopCurrent_v2(&popped);
    return fine ? both : NULL;
}

static void several_devices_from_several_threads(void **state)
{
    (void)state;
    pthread_t threads[4];
    for (int i = 0; i < 2; i++) both[i] = open_device(i);
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, work_on_both, (void *)(intptr_t)i);
    for (int i = 0; i < 4; i++) {
        void *fine = NULL;
        pthread_join(threads[i], &fine);
        assert_non_null(fine);
    }
    assert_int_equal(fake.fake_live(), 0);
    for (int i = 0; i < 2; i++) fv__cuda_device_close(&both[i]);
}

/* A stray allocation of ours on any thread must not break a capture that somebody runs in the global mode. */
static void allocations_do_not_break_captures(void **state)
{
    (void)state;
    fv__cuda_device *d = open_device(0), *late = NULL;
    int stream;
    fake.fake_capture(&stream);
    CUdeviceptr p = 0;
    void *pinned = NULL;
    assert_int_equal(fv__cuda_alloc(d, 64, &p, NULL), FV_OK);
    assert_int_equal(fv__cuda_alloc_pinned(d, 64, &pinned, NULL), FV_OK);
    assert_int_equal(fv__cuda_device_open(1, &late, NULL), FV_OK);
    fv__cuda_free_pinned(d, pinned);
    fv__cuda_free(d, p);
    bool capturing = false;
    assert_int_equal(fv__cuda_stream_capturing(d, (CUstream)(void *)&stream, &capturing, NULL), FV_OK);
    assert_true(capturing);
    assert_int_equal(fv__cuda_stream_capturing(d, NULL, &capturing, NULL), FV_OK);
    assert_false(capturing);
    fake.fake_capture(NULL);
    assert_int_equal(fake.fake_unsafe(), 0);
    assert_int_equal(fake.fake_live(), 0);
    fv__cuda_device_close(&late);
    fv__cuda_device_close(&d);
}

static void a_forked_child_is_told(void **state)
{
    (void)state;
    fv__cuda_device *d = open_device(0);
    int status = -1;
    fflush(NULL);
    const pid_t pid = fork();
    if (!pid) {
        fv_error err = { 0 };
        CUdeviceptr p;
        const int calls = fake.fake_calls();
        bool fine = fv__cuda_alloc(d, 64, &p, &err) == FV_E_DEVICE && strstr(err.text, "fork");
        fv__cuda_free(d, 4096);
        fv__cuda_device_close(&d);
        fine = fine && fake.fake_calls() == calls;      /* the driver was never asked */
        _exit(fine ? 0 : 1);
    }
    waitpid(pid, &status, 0);
    assert_int_equal(status, 0);
    fv__cuda_device_close(&d);
    assert_int_equal(fake.fake_retains(0), 0);
}

/* ---------------------------------------------------------------------------------------------------------- compiling */

static const char scale_text[] =
    "#include \"factor.cuh\"\n"
    "static int twice(int x) { return 2 * x; }\n"
    "extern \"C\" __global__ void scale(float *p) { p[threadIdx.x] *= FACTOR + twice(N); }\n"
    "extern \"C\" __global__ void other(float *p) { p[threadIdx.x] += 1; }\n";

static const fv__jit_text scale_texts[] = { { "scale.cu", scale_text }, { "factor.cuh", "#include \"deeper.cuh\"\n" }, { "deeper.cuh", "#define FACTOR 3\n" } };
static const char *const scale_options[] = { "-DN=4" };
static const fv__cuda_program scale_program = { .name = "scale_n4", .source = "scale.cu", .extra = scale_texts, .num_extra = 3,
                                                .options = scale_options, .num_options = 1 };

typedef struct setting {
    fv__cuda_device *device;
    fv__jit_cache *cache;
    fv__cuda_jit *jit;
} setting;

static setting open_setting(const char *dir)
{
    setting s = { .device = open_device(0) };
    const fv__jit_cache_desc desc = { .dir = dir, .kernel_path = "", .disable_jit = 0 };
    assert_int_equal(fv__jit_cache_open(&desc, &s.cache, NULL), FV_OK);
    assert_int_equal(fv__cuda_jit_open(s.device, s.cache, NULL, &s.jit, NULL), FV_OK);
    return s;
}

static void close_setting(setting *s)
{
    fv__cuda_jit_close(&s->jit);
    fv__jit_cache_close(&s->cache);
    fv__cuda_device_close(&s->device);
}

static void need_nvrtc(void)
{
    fv__nvrtc *n = NULL;
    fv_error err = { 0 };
    if (fv__nvrtc_open(13, NULL, &n, &err) != FV_OK) {
        print_message("not run: %s\n", err.text);
        skip();
    }
    fv__nvrtc_close(&n);
}

static fv__jit_stats stats_of(fv__jit_cache *cache)
{
    fv__jit_stats s;
    fv__jit_cache_stats(cache, &s);
    return s;
}

static void texts_become_functions(void **state)
{
    (void)state;
    need_nvrtc();
    CUfunction f = NULL, again = NULL, other = NULL;
    fv_error err = { 0 };
    const int before = fake.fake_loads(), gone = fake.fake_unloads();
    setting s = open_setting("");
    assert_int_equal(fv__cuda_jit_function(s.jit, &scale_program, "scale", NULL, &f, &err), FV_OK);
    assert_int_equal(fv__cuda_jit_function(s.jit, &scale_program, "scale", NULL, &again, &err), FV_OK);
    assert_int_equal(fv__cuda_jit_function(s.jit, &scale_program, "other", NULL, &other, &err), FV_OK);
    assert_ptr_equal(f, again);
    assert_int_equal(fake.fake_loads() - before, 1);
    assert_int_equal(stats_of(s.cache).compiles, 1);
    assert_int_equal(fv__cuda_jit_function(s.jit, &scale_program, "absent", NULL, &other, &err), FV_E_DEVICE);
    assert_int_equal(fake.fake_unloads(), gone);           /* its siblings stay */
    assert_int_equal(fake.fake_depth(), 0);
    close_setting(&s);
    assert_int_equal(fake.fake_unloads(), gone + 1);
}

static void what_is_included_is_in_the_key(void **state)
{
    (void)state;
    need_nvrtc();
    CUfunction f;
    setting s = open_setting("");
    fv__jit_text texts[3];
    fv__cuda_program changed = scale_program;
    memcpy(texts, scale_texts, sizeof texts);
    changed.extra = texts;
    assert_int_equal(fv__cuda_jit_function(s.jit, &scale_program, "scale", NULL, &f, NULL), FV_OK);
    assert_int_equal(fv__cuda_jit_function(s.jit, &changed, "scale", NULL, &f, NULL), FV_OK);
    assert_int_equal(stats_of(s.cache).compiles, 1);
    texts[2].text = "#define FACTOR 4\n";
    assert_int_equal(fv__cuda_jit_function(s.jit, &changed, "scale", NULL, &f, NULL), FV_OK);
    assert_int_equal(stats_of(s.cache).compiles, 2);
    close_setting(&s);
}

/* A file that happens to lie in the working directory is no part of a kernel, neither by the source's include nor by an include's. */
static void stray_files_are_not_included(void **state)
{
    (void)state;
    need_nvrtc();
    char before[512];
    fv_error err = { 0 };
    const fv__jit_blob *blob;
    assert_non_null(getcwd(before, sizeof before));
    assert_int_equal(chdir(folder), 0);
    assert_int_equal(system("echo '#define FACTOR 5' > deeper.cuh; echo '#define FACTOR 5' > factor.cuh"), 0);
    setting s = open_setting("");
    for (int n = 1; n <= 2; n++) {
        fv__cuda_program p = scale_program;
        p.num_extra = n;                                /* without factor.cuh, then without deeper.cuh */
        assert_int_equal(fv__cuda_jit_compile(s.jit, &p, NULL, &blob, &err), FV_E_COMPILE);
        assert_non_null(strstr(err.text, "not a part of the kernel"));
    }
    close_setting(&s);
    assert_int_equal(chdir(before), 0);
}

static void errors_carry_the_line(void **state)
{
    (void)state;
    need_nvrtc();
    const fv__jit_text text = { "wrong.cu", "\n\nextern \"C\" __global__ void k(float *p) { p[0] = nonsense; }\n" };
    const fv__cuda_program p = { .name = "wrong", .source = "wrong.cu", .extra = &text, .num_extra = 1 };
    const fv__jit_blob *blob;
    fv_error err = { 0 };
    setting s = open_setting("");
    assert_int_equal(fv__cuda_jit_compile(s.jit, &p, NULL, &blob, &err), FV_E_COMPILE);
    assert_int_equal(err.value, 3);
    assert_non_null(strstr(err.text, "wrong.cu(3): error: identifier \"nonsense\" is undefined"));
    close_setting(&s);
}

static void every_arch_has_registers(void **state)
{
    (void)state;
    need_nvrtc();
    setting s = open_setting("");
    fv__nvrtc_kernel_info k;
    const fv__jit_blob *blob;
    for (const char *const *arch = fv__cuda_archs; *arch; arch++) {
        assert_int_equal(fv__cuda_jit_compile(s.jit, &scale_program, *arch, &blob, NULL), FV_OK);
        if (strstr(blob->info, "target compute_")) continue;        /* an NVRTC of before that arch: PTX */
        assert_memory_equal(blob->data, "\177ELF", 4);
        assert_true(fv__nvrtc_kernel(blob->info, 0, &k) && k.registers > 0 && !k.spill_stores);
        assert_true(fv__nvrtc_kernel(blob->info, 1, &k) && k.registers > 0);
        assert_false(fv__nvrtc_kernel(blob->info, 2, &k));
    }
    /* Archs that this NVRTC does not know: machine code of the same generation, else PTX. */
    assert_int_equal(fv__cuda_jit_compile(s.jit, &scale_program, "sm_91", &blob, NULL), FV_OK);
    assert_true(strstr(blob->info, "target sm_90\n") && !memcmp(blob->data, "\177ELF", 4));
    assert_int_equal(fv__cuda_jit_compile(s.jit, &scale_program, "sm_990a", &blob, NULL), FV_OK);
    assert_true(strstr(blob->info, "target compute_") && strstr(blob->data, ".version"));
    close_setting(&s);
}

static void nothing_is_loaded_during_capture(void **state)
{
    (void)state;
    need_nvrtc();
    int stream, another;
    CUfunction f = NULL;
    fv_error err = { 0 };
    setting s = open_setting("");
    fake.fake_capture(&stream);
    const int loads = fake.fake_loads(), live = fake.fake_live();
    assert_int_equal(fv__cuda_jit_function(s.jit, &scale_program, "scale", (CUstream)(void *)&stream, &f, &err), FV_E_NOT_READY);
    assert_null(f);
    assert_true(fake.fake_loads() == loads && fake.fake_live() == live && fake.fake_unsafe() == 0);
    assert_int_equal(stats_of(s.cache).compiles, 0);
    /* Another stream, meanwhile: that may, and does not break the capture. */
    assert_int_equal(fv__cuda_jit_function(s.jit, &scale_program, "scale", (CUstream)(void *)&another, &f, &err), FV_OK);
    assert_int_equal(fake.fake_unsafe(), 0);
    CUfunction now = NULL;
    assert_int_equal(fv__cuda_jit_function(s.jit, &scale_program, "scale", (CUstream)(void *)&stream, &now, &err), FV_OK);
    assert_ptr_equal(now, f);
    fake.fake_capture(NULL);
    close_setting(&s);
}

static void *ask(void *arg)
{
    CUfunction f = NULL;
    return fv__cuda_jit_function(((setting *)arg)->jit, &scale_program, "scale", NULL, &f, NULL) == FV_OK ? f : NULL;
}

static void many_threads_load_once(void **state)
{
    (void)state;
    need_nvrtc();
    pthread_t threads[6];
    const int before = fake.fake_loads();
    setting s = open_setting("");
    void *first = NULL, *f = NULL;
    for (int i = 0; i < 6; i++) pthread_create(&threads[i], NULL, ask, &s);
    for (int i = 0; i < 6; i++) {
        pthread_join(threads[i], &f);
        assert_non_null(f);
        if (!first) first = f;
        assert_ptr_equal(f, first);
    }
    assert_int_equal(fake.fake_loads() - before, 1);
    assert_int_equal(stats_of(s.cache).compiles, 1);
    close_setting(&s);
}

/* A start from the cache loads no compiler where the folder tells which version it would be. */
static int warm_start(const char *dir)
{
    char line[512];
    CUfunction f = NULL;
    setting s = open_setting(dir);
    const bool found = fv__cuda_jit_function(s.jit, &scale_program, "scale", NULL, &f, NULL) == FV_OK && stats_of(s.cache).disk_hits == 1;
    const bool by_name = !strchr(fv__cuda_jit_compiler_path(s.jit), '/');           /* the loader had to be asked */
    FILE *maps = fopen("/proc/self/maps", "r");
    bool loaded = false;
    while (fgets(line, sizeof line, maps)) loaded = loaded || strstr(line, "libnvrtc");
    fclose(maps);
    close_setting(&s);
    return !found ? 1 : loaded && !by_name ? 2 : 0;
}

static void warm_starts_load_no_compiler(void **state)
{
    (void)state;
    need_nvrtc();
    char dir[100];
    int status = -1;
    CUfunction f;
    snprintf(dir, sizeof dir, "%s/warm", folder);
    setting s = open_setting(dir);
    assert_int_equal(fv__cuda_jit_function(s.jit, &scale_program, "scale", NULL, &f, NULL), FV_OK);
    /* The child must be a fresh process: this one has the compiler in it. */
    char command[1200], self[512];
    const ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(n > 0);
    self[n] = 0;
    Dl_info info = { 0 };
    void *library = dlopen("libnvrtc.so.13", RTLD_LAZY | RTLD_NOLOAD);
    if (library && dladdr(dlsym(library, "nvrtcVersion"), &info) && info.dli_fname && *info.dli_fname == '/') {
        char *slash = strrchr(strncpy(command, info.dli_fname, sizeof command - 1), '/');
        *slash = 0;
        setenv("FV_NVRTC_PATH", command, 1);            /* a folder: no need to ask the loader */
    }
    snprintf(command, sizeof command, "%s --warm %s", self, dir);
    status = system(command);
    unsetenv("FV_NVRTC_PATH");
    assert_int_equal(status, 0);
    close_setting(&s);
}

static void a_newer_compiler_than_the_driver_is_passed_over(void **state)
{
    (void)state;
    need_nvrtc();
    fv__nvrtc *n = NULL;
    fv_error err = { 0 };
    if (fv__nvrtc_open(12, NULL, &n, &err) == FV_OK) {
        assert_memory_equal(fv__nvrtc_name(n), "nvrtc 12.", 9);
        fv__nvrtc_close(&n);
        return;
    }
    assert_int_equal(err.status, FV_E_COMPILE);
    assert_non_null(strstr(err.text, "newer than the driver"));
}

static void a_missing_compiler_is_a_sentence_and_bundles_do_without(void **state)
{
    (void)state;
    need_nvrtc();
    char path[100];
    const fv__jit_blob *blob;
    fv_error err = { 0 };
    CUfunction f;
    snprintf(path, sizeof path, "%s/kernels.bundle", folder);
    setting s = open_setting("");
    assert_int_equal(fv__cuda_jit_compile(s.jit, &scale_program, NULL, &blob, NULL), FV_OK);
    assert_int_equal(fv__jit_bundle_write(path, &blob, 1, NULL), FV_OK);
    close_setting(&s);

    setenv("FV_NVRTC_PATH", folder, 1);
    s = open_setting("");
    assert_int_equal(fv__cuda_jit_function(s.jit, &scale_program, "scale", NULL, &f, &err), FV_E_COMPILE);
    assert_non_null(strstr(err.text, "FV_NVRTC_PATH"));
    close_setting(&s);

    s = (setting){ .device = open_device(0) };
    const fv__jit_cache_desc desc = { .dir = "", .kernel_path = path, .disable_jit = 1 };
    assert_int_equal(fv__jit_cache_open(&desc, &s.cache, NULL), FV_OK);
    assert_int_equal(fv__cuda_jit_open(s.device, s.cache, NULL, &s.jit, NULL), FV_OK);
    assert_int_equal(fv__cuda_jit_function(s.jit, &scale_program, "scale", NULL, &f, &err), FV_OK);
    assert_int_equal(stats_of(s.cache).bundle_hits, 1);
    close_setting(&s);
    unsetenv("FV_NVRTC_PATH");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_driver_is_a_sentence),
        cmocka_unit_test(no_device_is_a_sentence),
        cmocka_unit_test(drivers_that_cannot_be_asked_by_version),
        cmocka_unit_test(facts_are_read),
        cmocka_unit_test(calls_leave_no_trace),
        cmocka_unit_test(failures_are_told_in_words),
        cmocka_unit_test(launches_carry_their_attributes),
        cmocka_unit_test(several_devices_from_several_threads),
        cmocka_unit_test(allocations_do_not_break_captures),
        cmocka_unit_test(a_forked_child_is_told),
        cmocka_unit_test(texts_become_functions),
        cmocka_unit_test(what_is_included_is_in_the_key),
        cmocka_unit_test(stray_files_are_not_included),
        cmocka_unit_test(errors_carry_the_line),
        cmocka_unit_test(every_arch_has_registers),
        cmocka_unit_test(nothing_is_loaded_during_capture),
        cmocka_unit_test(many_threads_load_once),
        cmocka_unit_test(warm_starts_load_no_compiler),
        cmocka_unit_test(a_newer_compiler_than_the_driver_is_passed_over),
        cmocka_unit_test(a_missing_compiler_is_a_sentence_and_bundles_do_without),
    };
    if (argc == 3 && !strcmp(argv[1], "--warm")) return warm_start(argv[2]);
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
