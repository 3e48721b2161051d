/* SPDX-License-Identifier: Apache-2.0 */
/* ffi.c -- Foveal for hosts that speak tvm-ffi: `tvm_ffi.load_module("libfoveal.so")` finds the functions below as module.fv_open and so on, and
 * passes tensors of torch, JAX, CuPy or NumPy without a copy.
 *
 * Nouns
 *   value      fv__ffi_any: a tag and eight bytes. Strings and tensors come in two forms each
 *   handle     an integer that stands for a context or a plan: place in a table and how often the place was used before, so that a stale or invented
 *              one is refused instead of followed
 *
 * The host's two functions (raise an error, the current stream) are weak references: nothing is linked, and without a host they are never called. A
 * library that was loaded before its host finds them by name at the first call.
 *
 * Functions (trailing arguments may be left out, None is "absent"):
 *   fv_abi() -> int                                        FV_ABI_VERSION
 *   fv_open(device) -> context                             "cpu", "cuda:0"
 *   fv_close(context)
 *   fv_plan_create(context, q, k, v, o, num_q_heads, num_kv_heads, dim_qk, dim_v, scale, variants, max_requests, max_rows, max_kv_tokens,
 *                  max_pages) -> plan
 *                                                          q .. o: element types; variants: "causal window(left=4095) softcap(cap=30)"
 *   fv_plan_update(plan, rows, lengths, kv_indptr, page_size, num_pages, page_indptr, page_ids)
 *                                                          as fv_batch; page_ids of two axes: a table. Arrays are kept until the next update
 *   fv_run(plan, q, k, v, o, lse, [name, value]...)        lse natural; names and values are run arguments: "k_scale", "sinks", ...
 *   fv_plan_destroy(plan)
 *   fv_append(context, new_k, new_v, k, v, slots)          slots [rows]: page * page_size + offset, -1 skips
 *   fv_merge(context, o_a, lse_a, o_b, lse_b, o, lse)      lse natural; lse may be None
 *   fv_rope(context, x, positions, y, rotary_dim, interleaved, base)
 * A GPU's work goes to the host's current stream of the device. */
#include "ffi.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "status.h"

typedef fv__ffi_any any;

/* ----------------------------------------------------------------------------------------------------- the host's side */

extern void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message) __attribute__((weak));
extern void *TVMFFIEnvGetStream(int32_t device_type, int32_t device_id) __attribute__((weak));

typedef void raise_fn(const char *kind, const char *message);
typedef void *stream_fn(int32_t device_type, int32_t device_id);

/* A function of the host: where it is, or how many libraries had been loaded when it was in none of them. A search through all libraries of a large
 * process takes longer than a launch, so it is made again only when there are more. */
typedef struct sought {
    _Atomic(void *) at;
    atomic_ullong loads;
} sought;

static int count_loads(struct dl_phdr_info *info, size_t size, void *loads)
{
    (void)size;
    *(unsigned long long *)loads = info->dlpi_adds;
    return 1;
}

static void *find(sought *x, const char *name)
{
    void *at = atomic_load_explicit(&x->at, memory_order_relaxed);
    if (at) return at;
    unsigned long long loads = 0;
    dl_iterate_phdr(count_loads, &loads);
    if (loads == atomic_load_explicit(&x->loads, memory_order_relaxed)) return NULL;
    at = dlsym(RTLD_DEFAULT, name);
    void *host = at ? NULL : dlopen("libtvm_ffi.so", RTLD_NOW | RTLD_NOLOAD);
    if (host) at = dlsym(host, name);           /* stays open: the host does, too */
    atomic_store_explicit(&x->at, at, memory_order_relaxed);
    atomic_store_explicit(&x->loads, loads, memory_order_relaxed);
    return at;
}

static raise_fn *host_raise(void)
{
    static sought found;
    union { void *p; raise_fn *f; } u = { NULL };
    if (TVMFFIErrorSetRaisedFromCStr) return TVMFFIErrorSetRaisedFromCStr;
    u.p = find(&found, "TVMFFIErrorSetRaisedFromCStr");
    return u.f;
}

static fv_stream current_stream(int32_t type, int32_t id)
{
    static sought found;
    union { void *p; stream_fn *f; } u = { NULL };
    if (type == 1) return NULL;
    if (TVMFFIEnvGetStream) return TVMFFIEnvGetStream(type, id);
    u.p = find(&found, "TVMFFIEnvGetStream");
    return u.f ? u.f(type, id) : NULL;
}

static const char *exception_of(fv_status s)
{
    switch (s) {
    case FV_E_INVALID: case FV_E_CAPACITY: return "ValueError";
    case FV_E_UNSUPPORTED: return "NotImplementedError";
    case FV_E_NO_MEMORY: return "MemoryError";
    case FV_E_IO: return "OSError";
    default: return "RuntimeError";
    }
}

static int finish(fv_status s, const fv_error *err)
{
    if (s == FV_OK) return 0;
    raise_fn *raise = host_raise();
    if (raise) raise(exception_of(s), err->text);
    return -1;
}

static void give_int(any *result, int64_t value)
{
    result->type = FV__FFI_INT;
    result->small_length = 0;
    result->v.i = value;
}

/* ------------------------------------------------------------------------------------------------------------ handles */

typedef enum { FREE, CONTEXT, PLAN } handle_kind;
typedef struct entry {
    handle_kind kind;
    uint32_t uses;                      /* of this place so far */
    bool busy;                          /* a plan in a call */
    void *object;
    int32_t device_type, device_id;     /* DLPack's */
} entry;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static entry *entries;
static uint32_t num_entries;

static fv_status enter(handle_kind kind, void *object, int32_t type, int32_t id, int64_t *handle, fv_error *err)
{
    pthread_mutex_lock(&lock);
    uint32_t at = 0;
    while (at < num_entries && entries[at].kind != FREE) at++;
    if (at == num_entries) {
        const uint32_t more = num_entries ? 2 * num_entries : 16;
        entry *grown = realloc(entries, more * sizeof *grown);
        if (grown) {
            memset(grown + num_entries, 0, (more - num_entries) * sizeof *grown);
            entries = grown;
            num_entries = more;
        }
    }
    const bool fits = at < num_entries;
    if (fits) {
        const uint32_t uses = (entries[at].uses + 1) & 0x7fffffff;
        entries[at] = (entry){ kind, uses, false, object, type, id };
        *handle = (int64_t)uses << 32 | at;
    }
    pthread_mutex_unlock(&lock);
    return fits ? FV_OK : fv__fail(err, FV_E_NO_MEMORY, "handle", 0, 0, "no memory for another handle");
}

static entry *entry_at(int64_t handle, handle_kind kind)        /* locked */
{
    const uint64_t at = (uint64_t)handle & 0xffffffff;
    return at < num_entries && entries[at].kind == kind && entries[at].uses == (uint64_t)handle >> 32 ? &entries[at] : NULL;
}

/* A copy of the entry. A plan is busy until `leave`. */
static fv_status look_up(int64_t handle, handle_kind kind, entry *out, fv_error *err)
{
    const char *what = kind == PLAN ? "plan" : "context";
    pthread_mutex_lock(&lock);
    entry *e = entry_at(handle, kind);
    const bool busy = e && e->busy;
    if (e && !busy) {
        e->busy = kind == PLAN;
        *out = *e;
    }
    pthread_mutex_unlock(&lock);
    if (!e) return fv__fail(err, FV_E_INVALID, what, handle, 0, "%lld is no handle of a %s that is open", (long long)handle, what);
    if (busy) return fv__fail(err, FV_E_BUSY, what, handle, 0, "another thread is using the plan; a plan is one thread's at a time");
    return FV_OK;
}

static void leave(int64_t handle, handle_kind kind, bool gone)
{
    pthread_mutex_lock(&lock);
    entry *e = entry_at(handle, kind);
    if (e) {
        e->busy = false;
        if (gone) e->kind = FREE;
    }
    pthread_mutex_unlock(&lock);
}

/* ---------------------------------------------------------------------------------------------------------- arguments */

typedef struct call {
    const char *function;
    const any *args;
    int32_t count;
    fv_error err;
} call;

static const any absent = { 0 };
static const any *value_of(const call *c, int i) { return i < c->count ? &c->args[i] : &absent; }

static fv_status wrong(call *c, int i, const char *name, const char *wanted)
{
    return fv__fail(&c->err, FV_E_INVALID, name, value_of(c, i)->type, 0, "%s: argument %d, %s, must be %s", c->function, i, name, wanted);
}

static fv_status take_int(call *c, int i, const char *name, int64_t low, int64_t high, int64_t *out)
{
    const any *a = value_of(c, i);
    if (a->type == FV__FFI_NONE) return FV_OK;
    if (a->type != FV__FFI_INT && a->type != FV__FFI_BOOL) return wrong(c, i, name, "an integer");
    if (a->v.i < low || a->v.i > high)
        return fv__fail(&c->err, FV_E_INVALID, name, a->v.i, a->v.i < low ? low : high, "%s: %s is %lld; it is %lld to %lld", c->function, name,
                        (long long)a->v.i, (long long)low, (long long)high);
    *out = a->v.i;
    return FV_OK;
}

static fv_status take_int32(call *c, int i, const char *name, int32_t *out)
{
    int64_t wide = *out;
    FV_TRY(take_int(c, i, name, INT32_MIN, INT32_MAX, &wide));
    *out = (int32_t)wide;
    return FV_OK;
}

static fv_status take_number(call *c, int i, const char *name, double *out)
{
    const any *a = value_of(c, i);
    if (a->type == FV__FFI_NONE) return FV_OK;
    if (a->type == FV__FFI_FLOAT) *out = a->v.f;
    else if (a->type == FV__FFI_INT) *out = (double)a->v.i;
    else return wrong(c, i, name, "a number");
    return FV_OK;
}

/* Copied with a final NUL; "" where absent. */
static fv_status take_text(call *c, int i, const char *name, char *out, size_t room)
{
    const any *a = value_of(c, i);
    fv__ffi_bytes bytes = { "", 0 };
    if (a->type == FV__FFI_RAW_STR) bytes = (fv__ffi_bytes){ a->v.text, strlen(a->v.text) };
    else if (a->type == FV__FFI_SMALL_STR) bytes = (fv__ffi_bytes){ a->v.small, a->small_length };
    else if (a->type == FV__FFI_STR) memcpy(&bytes, (const char *)a->v.pointer + FV__FFI_OBJECT_HEAD, sizeof bytes);
    else if (a->type != FV__FFI_NONE) return wrong(c, i, name, "a string");
    if (bytes.size >= room || memchr(bytes.data, 0, bytes.size))
        return fv__fail(&c->err, FV_E_INVALID, name, (int64_t)bytes.size, (int64_t)room - 1, "%s: %s has %zu bytes; at most %zu, none of them 0",
                        c->function, name, bytes.size, room - 1);
    memcpy(out, bytes.data, bytes.size);
    out[bytes.size] = 0;
    return FV_OK;
}

static const char *dtype_name(const fv__dl_tensor *t)
{
    static const struct { uint8_t code, bits; const char *name; } names[] = {
        { 2, 32, "f32" }, { 2, 16, "f16" }, { 4, 16, "bf16" }, { 10, 8, "fp8_e4m3" }, { 12, 8, "fp8_e5m2" }, { 17, 4, "fp4_e2m1" }, { 1, 4, "int4" },
        { 0, 8, "int8" },
        { 0, 32, "i32" }, { 0, 64, "i64" }, { 1, 8, "u8" }, { 6, 8, "u8" },
    };
    for (int i = 0; i < FV__COUNT(names); i++)
        if (t->dtype.lanes == 1 && names[i].code == t->dtype.code && names[i].bits == t->dtype.bits) return names[i].name;
    return NULL;
}

static const fv__dl_tensor *tensor_in(const any *a)
{
    if (a->type == FV__FFI_DLTENSOR) return a->v.pointer;
    if (a->type == FV__FFI_TENSOR) return (const void *)((const char *)a->v.pointer + FV__FFI_OBJECT_HEAD);
    return NULL;
}

static bool on_host(const fv__dl_tensor *t) { return t->device.type == 1 || t->device.type == 3; }

/* `where` NULL: any memory. Absent: data NULL. */
static fv_status take_tensor(call *c, int i, const char *name, const entry *where, fv_tensor *out)
{
    static _Alignas(64) char nothing[64];       /* an array without elements may come as NULL, which would be absent */
    const any *a = value_of(c, i);
    memset(out, 0, sizeof *out);
    if (a->type == FV__FFI_NONE) return FV_OK;
    const fv__dl_tensor *t = tensor_in(a);
    if (!t) return wrong(c, i, name, "a tensor or None");
    out->dtype = dtype_name(t);
    if (!out->dtype) return wrong(c, i, name, "of an element type that the library knows");
    if (t->ndim < 0 || t->ndim > FV_MAX_DIMS)
        return fv__fail(&c->err, FV_E_INVALID, name, t->ndim, FV_MAX_DIMS, "%s: %s has %d axes; at most %d", c->function, name, t->ndim, FV_MAX_DIMS);
    const bool here = !where || (where->device_type == 1 ? on_host(t) : t->device.type != 1 && t->device.id == where->device_id);
    if (!here)
        return fv__fail(&c->err, FV_E_INVALID, name, t->device.type, where->device_type, "%s: %s lies on device %d:%d; the context's is %d:%d",
                        c->function, name, t->device.type, t->device.id, where->device_type, where->device_id);
    int64_t dense = 1;
    for (int d = t->ndim - 1; d >= 0; d--) {
        out->shape[d] = t->shape[d];
        out->stride[d] = t->strides ? t->strides[d] : dense;
        dense *= t->shape[d];
    }
    out->ndim = t->ndim;
    out->data = t->data ? (char *)t->data + t->byte_offset : dense == 0 ? nothing : NULL;
    return FV_OK;
}

/* Integers with one axis; with `pages`, two axes are a table. */
static fv_status take_index(call *c, int i, const char *name, const entry *where, fv_index *out, fv_pages *pages)
{
    fv_tensor t;
    FV_TRY(take_tensor(c, i, name, NULL, &t));
    if (!t.data) return FV_OK;
    const bool wide = !strcmp(t.dtype, "i64");
    if ((!wide && strcmp(t.dtype, "i32")) || t.ndim < 1 || t.ndim > (pages ? 2 : 1))
        return wrong(c, i, name, pages ? "int32 or int64 with one or two axes" : "int32 or int64 with one axis");
    const fv__dl_tensor *given = tensor_in(value_of(c, i));
    if (!on_host(given) && (where->device_type == 1 || given->device.id != where->device_id))
        return wrong(c, i, name, "on the host or on the context's device");
    *out = (fv_index){ .count = t.shape[0], .stride = t.stride[0], .type = wide ? FV_INDEX_I64 : FV_INDEX_I32 };
    if (t.ndim == 2) {
        if (t.shape[1] > 1 && t.stride[1] != 1) return wrong(c, i, name, "contiguous in its last axis");
        *out = (fv_index){ .count = t.shape[0] * t.shape[1], .stride = 1, .type = out->type };
        pages->table_width = t.shape[1];
        pages->table_stride = t.shape[0] > 1 ? t.stride[0] : t.shape[1];
    }
    if (out->stride < 1) out->stride = 1;       /* of one entry */
    if (on_host(given)) out->host = t.data;
    else out->device = t.data;
    return FV_OK;
}

static call begin(const char *function, const any *args, int32_t count)
{
    return (call){ .function = function, .args = args, .count = count, .err = { .request = -1 } };
}

static fv_status take_entry(call *c, handle_kind kind, int64_t *handle, entry *out)
{
    const char *name = kind == PLAN ? "plan" : "context";
    if (value_of(c, 0)->type != FV__FFI_INT) return wrong(c, 0, name, "a handle");
    *handle = value_of(c, 0)->v.i;
    return look_up(*handle, kind, out, &c->err);
}

/* Every exported function is a body over a `call` and this frame around it. */
#define FUNCTION(name)                                                                                                 \
    FV__FFI_EXPORT int __tvm_ffi_##name(void *self, const any *args, int32_t count, any *result);                      \
    static fv_status do_##name(call *c, any *result);                                                                  \
    int __tvm_ffi_##name(void *self, const any *args, int32_t count, any *result)                                      \
    {                                                                                                                  \
        (void)self;                                                                                                    \
        call c = begin(#name, args, count);                                                                            \
        return finish(do_##name(&c, result), &c.err);                                                                  \
    }                                                                                                                  \
    static fv_status do_##name(call *c, any *result)

/* ---------------------------------------------------------------------------------------------------------- contexts */

FUNCTION(fv_abi)
{
    (void)c;
    give_int(result, FV_ABI_VERSION);
    return FV_OK;
}

FUNCTION(fv_open)
{
    char device[32];
    fv_ctx *ctx;
    int64_t handle = 0;
    int id = 0;
    FV_TRY(take_text(c, 0, "device", device, sizeof device));
    FV_TRY(fv_open(&(fv_open_desc){ .device = device[0] ? device : "cpu" }, &ctx, &c->err));
    const bool gpu = sscanf(device, "cuda:%d", &id) == 1 || !strncmp(device, "cuda", 4);
    const fv_status s = enter(CONTEXT, ctx, gpu ? 2 : 1, gpu ? id : 0, &handle, &c->err);
    if (s != FV_OK) fv_close(&ctx);
    else give_int(result, handle);
    return s;
}

FUNCTION(fv_close)
{
    int64_t handle = 0;
    entry e = { .kind = FREE };
    (void)result;
    FV_TRY(take_entry(c, CONTEXT, &handle, &e));
    fv_ctx *ctx = e.object;
    const fv_status s = fv_close(&ctx);
    leave(handle, CONTEXT, s == FV_OK);
    return s == FV_OK ? s : fv__fail(&c->err, s, "context", handle, 0, "the context still has plans: destroy them first");
}

/* ---------------------------------------------------------------------------------------------------------- variants */

/* "causal window(left=4095, right=0)" in place: names and numbers. */
typedef struct variants {
    char text[512];
    fv_variant_use uses[FV__MAX_VARIANTS];
    fv_arg args[FV__MAX_VARIANTS * FV__MAX_PARAMS];
    int num_uses, num_args;
} variants;

static fv_status bad_variants(call *c, const char *at)
{
    return fv__fail(&c->err, FV_E_INVALID, "variants", 0, 0, "%s: variants are like \"causal window(left=4095)\"; \"%s\" is not", c->function, at);
}

/* "left=4095, right=0": cuts the text up. */
static fv_status read_arguments(call *c, variants *v, fv_variant_use *use, char *text)
{
    char *rest = NULL;
    use->args = v->args + v->num_args;
    for (char *word = strtok_r(text, ", ", &rest); word; word = strtok_r(NULL, ", ", &rest)) {
        char *equals = strchr(word, '='), *end = NULL;
        if (!equals || equals == word || v->num_args == FV__COUNT(v->args)) return bad_variants(c, word);
        *equals = 0;
        const double number = strtod(equals + 1, &end);
        if (end == equals + 1 || *end) return bad_variants(c, equals + 1);
        v->args[v->num_args++] = (fv_arg){ .name = word, .number = number };
        use->num_args++;
    }
    return FV_OK;
}

static fv_status read_variants(call *c, variants *v)
{
    char *at = v->text;
    for (;;) {
        at += strspn(at, " ,");
        if (!*at) return FV_OK;
        if (v->num_uses == FV__MAX_VARIANTS) return bad_variants(c, at);
        fv_variant_use *use = &v->uses[v->num_uses++];
        char *end = at + strcspn(at, " ,(");
        if (end == at) return bad_variants(c, at);
        use->name = at;
        at = end;
        if (*end == '(') {
            char *close = strchr(end, ')');
            if (!close) return bad_variants(c, end);
            *end = *close = 0;
            FV_TRY(read_arguments(c, v, use, end + 1));
            at = close + 1;
        } else if (*end) {
            *end = 0;
            at = end + 1;
        }
    }
}

/* -------------------------------------------------------------------------------------------------------------- plans */

static fv_status create_plan(call *c, fv_ctx *ctx, fv_plan **plan)
{
    char types[4][16];
    static const char *const names[] = { "q", "k", "v", "o" };
    variants v = { .num_uses = 0 };
    for (int i = 0; i < 4; i++) FV_TRY(take_text(c, 1 + i, names[i], types[i], sizeof types[i]));
    fv_problem p = { .q = types[0], .k = types[1][0] ? types[1] : types[0], .o = types[3][0] ? types[3] : types[0] };
    p.v = types[2][0] ? types[2] : p.k;
    fv_plan_desc limits = { 0 };
    FV_TRY(take_int32(c, 5, "num_q_heads", &p.num_q_heads));
    FV_TRY(take_int32(c, 6, "num_kv_heads", &p.num_kv_heads));
    FV_TRY(take_int32(c, 7, "dim_qk", &p.dim_qk));
    FV_TRY(take_int32(c, 8, "dim_v", &p.dim_v));
    FV_TRY(take_number(c, 9, "scale", &p.scale));
    FV_TRY(take_text(c, 10, "variants", v.text, sizeof v.text));
    FV_TRY(read_variants(c, &v));
    p.variants = v.uses;
    p.num_variants = v.num_uses;
    FV_TRY(take_int(c, 11, "max_requests", 0, INT64_MAX, &limits.max_requests));
    FV_TRY(take_int(c, 12, "max_rows", 0, INT64_MAX, &limits.max_rows));
    FV_TRY(take_int(c, 13, "max_kv_tokens", 0, INT64_MAX, &limits.max_kv_tokens));
    FV_TRY(take_int(c, 14, "max_pages", 0, INT64_MAX, &limits.max_pages));
    return fv_plan_create(ctx, &p, &limits, plan, &c->err);
}

FUNCTION(fv_plan_create)
{
    int64_t handle = 0;
    entry e = { .kind = FREE };
    fv_plan *plan;
    FV_TRY(take_entry(c, CONTEXT, &handle, &e));
    FV_TRY(create_plan(c, e.object, &plan));
    const fv_status s = enter(PLAN, plan, e.device_type, e.device_id, &handle, &c->err);
    if (s != FV_OK) fv_plan_destroy(&plan);
    else give_int(result, handle);
    return s;
}

FUNCTION(fv_plan_destroy)
{
    int64_t handle = 0;
    entry e = { .kind = FREE };
    (void)result;
    FV_TRY(take_entry(c, PLAN, &handle, &e));
    fv_plan *plan = e.object;
    const fv_status s = fv_plan_destroy(&plan);
    leave(handle, PLAN, s == FV_OK);
    return s;
}

static int64_t count_requests(const fv_batch *b)
{
    if (b->rows.type != FV_INDEX_NONE) return b->rows.count - 1;
    if (b->lengths.type != FV_INDEX_NONE) return b->lengths.count;
    return b->kv_indptr.type != FV_INDEX_NONE ? b->kv_indptr.count - 1 : b->pages.indptr.count - 1;
}

static fv_status take_batch(call *c, const entry *e, fv_batch *b)
{
    FV_TRY(take_index(c, 1, "rows", e, &b->rows, NULL));
    FV_TRY(take_index(c, 2, "lengths", e, &b->lengths, NULL));
    FV_TRY(take_index(c, 3, "kv_indptr", e, &b->kv_indptr, NULL));
    FV_TRY(take_int32(c, 4, "page_size", &b->pages.page_size));
    FV_TRY(take_int(c, 5, "num_pages", 0, INT64_MAX, &b->pages.num_pages));
    FV_TRY(take_index(c, 6, "page_indptr", e, &b->pages.indptr, NULL));
    FV_TRY(take_index(c, 7, "page_ids", e, &b->pages.ids, &b->pages));
    b->num_requests = count_requests(b);
    return FV_OK;
}

static fv_status update_plan(call *c, const entry *e)
{
    fv_batch b = { 0 };
    const fv_status taken = take_batch(c, e, &b);
    if (taken != FV_OK) {
        fv_plan_update(e->object, NULL, NULL, NULL, NULL);      /* whatever fails, the plan holds no step then */
        return taken;
    }
    return fv_plan_update(e->object, NULL, &b, current_stream(e->device_type, e->device_id), &c->err);
}

FUNCTION(fv_plan_update)
{
    int64_t handle = 0;
    entry e = { .kind = FREE };
    (void)result;
    FV_TRY(take_entry(c, PLAN, &handle, &e));
    const fv_status s = update_plan(c, &e);
    leave(handle, PLAN, false);
    return s;
}

static fv_status run_plan(call *c, const entry *e)
{
    enum { FIRST_ARG = 6, ROOM = 12 };
    fv_tensors t = { 0 };
    char names[ROOM][24];
    fv_tensor tensors[ROOM];
    fv_arg args[ROOM];
    FV_TRY(take_tensor(c, 1, "q", e, &t.q));
    FV_TRY(take_tensor(c, 2, "k", e, &t.k));
    FV_TRY(take_tensor(c, 3, "v", e, &t.v));
    FV_TRY(take_tensor(c, 4, "o", e, &t.o));
    FV_TRY(take_tensor(c, 5, "lse", e, &t.lse));
    const int more = c->count > FIRST_ARG ? c->count - FIRST_ARG : 0;
    if (more % 2 || more > 2 * ROOM)
        return fv__fail(&c->err, FV_E_INVALID, "args", more, 2 * ROOM, "fv_run: behind lse come names and values, at most %d of each", ROOM);
    for (int n = 0; n < more / 2; n++) {
        const int at = FIRST_ARG + 2 * n;
        FV_TRY(take_text(c, at, "name", names[n], sizeof names[n]));
        args[n] = (fv_arg){ .name = names[n] };
        if (tensor_in(value_of(c, at + 1))) {
            FV_TRY(take_tensor(c, at + 1, names[n], e, &tensors[n]));
            args[n].tensor = &tensors[n];
        } else {
            FV_TRY(take_number(c, at + 1, names[n], &args[n].number));
        }
    }
    t.args = more ? args : NULL;
    t.num_args = more / 2;
    return fv_run(e->object, &t, current_stream(e->device_type, e->device_id), &c->err);
}

FUNCTION(fv_run)
{
    int64_t handle = 0;
    entry e = { .kind = FREE };
    (void)result;
    FV_TRY(take_entry(c, PLAN, &handle, &e));
    const fv_status s = run_plan(c, &e);
    leave(handle, PLAN, false);
    return s;
}

/* ---------------------------------------------------------------------------------------------- append, merge, rope */

FUNCTION(fv_append)
{
    int64_t handle = 0;
    entry e = { .kind = FREE };
    fv_append_desc d = { 0 };
    (void)result;
    FV_TRY(take_entry(c, CONTEXT, &handle, &e));
    FV_TRY(take_tensor(c, 1, "new_k", &e, &d.new_k));
    FV_TRY(take_tensor(c, 2, "new_v", &e, &d.new_v));
    FV_TRY(take_tensor(c, 3, "k", &e, &d.k));
    FV_TRY(take_tensor(c, 4, "v", &e, &d.v));
    FV_TRY(take_index(c, 5, "slots", &e, &d.slots, NULL));
    if (d.k.ndim == 4) {
        if (d.k.shape[1] > INT32_MAX) return wrong(c, 3, "k", "of pages that fit in 32 bits");
        d.pages.num_pages = d.k.shape[0];
        d.pages.page_size = (int32_t)d.k.shape[1];
    }
    return fv_append(e.object, &d, current_stream(e.device_type, e.device_id), &c->err);
}

FUNCTION(fv_merge)
{
    int64_t handle = 0;
    entry e = { .kind = FREE };
    fv_tensor o_states[2], lse_states[2], o, lse;
    (void)result;
    FV_TRY(take_entry(c, CONTEXT, &handle, &e));
    for (int i = 0; i < 2; i++) {
        FV_TRY(take_tensor(c, 1 + 2 * i, i ? "o_b" : "o_a", &e, &o_states[i]));
        FV_TRY(take_tensor(c, 2 + 2 * i, i ? "lse_b" : "lse_a", &e, &lse_states[i]));
    }
    FV_TRY(take_tensor(c, 5, "o", &e, &o));
    FV_TRY(take_tensor(c, 6, "lse", &e, &lse));
    return fv_merge(e.object, o_states, lse_states, 2, false, &o, &lse, current_stream(e.device_type, e.device_id), &c->err);
}

FUNCTION(fv_rope)
{
    int64_t handle = 0, interleaved = 0;
    entry e = { .kind = FREE };
    fv_rope_desc d = { 0 };
    fv_tensor x, y;
    fv_index positions = { 0 };
    (void)result;
    FV_TRY(take_entry(c, CONTEXT, &handle, &e));
    FV_TRY(take_tensor(c, 1, "x", &e, &x));
    FV_TRY(take_index(c, 2, "positions", &e, &positions, NULL));
    FV_TRY(take_tensor(c, 3, "y", &e, &y));
    FV_TRY(take_int32(c, 4, "rotary_dim", &d.rotary_dim));
    FV_TRY(take_int(c, 5, "interleaved", 0, 1, &interleaved));
    FV_TRY(take_number(c, 6, "base", &d.base));
    d.interleaved = interleaved != 0;
    return fv_rope(e.object, &d, &x, positions, &y, current_stream(e.device_type, e.device_id), &c->err);
}
