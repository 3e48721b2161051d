/* SPDX-License-Identifier: Apache-2.0 */
/* foveal.h -- the whole public API of Foveal, written as its manual.
 *
 * Foveal computes attention for LLM serving. Once per step it is told who asks (query rows of many
 * requests) and where every token's keys and values live (pages, shared prefixes, sparse blocks);
 * it plans the work so that all workers finish at the same moment; then it runs the plan once per layer.
 *
 *     fv_ctx *ctx;  fv_plan *plan;  fv_error err;
 *     fv_open(&(fv_open_desc){ .device = "cpu" }, &ctx, &err);
 *
 *     fv_variant_use causal = { .name = "causal" };
 *     fv_problem problem = { .q = "bf16", .k = "bf16", .v = "bf16", .o = "bf16",
 *                            .num_q_heads = 32, .num_kv_heads = 8, .dim_qk = 128,
 *                            .variants = &causal, .num_variants = 1 };
 *     fv_plan_desc limits = { .max_requests = 256, .max_rows = 4096, .max_kv_tokens = 1 << 20,
 *                             .max_pages = 1 << 16 };
 *     fv_plan_create(ctx, &problem, &limits, &plan, &err);          once per kind of layer
 *
 *     fv_batch batch = { .num_requests = n, .rows = fv_i32(row_indptr, n + 1), .lengths = fv_i32(lengths, n),
 *                        .pages = { .page_size = 16, .num_pages = pool, .indptr = fv_i32(page_indptr, n + 1),
 *                                   .ids = fv_i32(page_ids, page_indptr[n]) } };
 *     fv_plan_update(plan, NULL, &batch, stream, &err);             once per step
 *     for (int layer = 0; layer < num_layers; layer++)              once per layer
 *         fv_run(plan, &(fv_tensors){ .q = q[layer], .k = k[layer], .v = v[layer], .o = o }, stream, &err);
 *
 * Nouns
 *   request    one sequence being served
 *   row        one query token with all its heads. A batch is `total_rows` rows, request after request
 *   key        one token of K and V. Key j of a request sits at position first_position + j
 *   page       `page_size` consecutive keys. Any size >= 1. Ragged K/V is one long page per request
 *   segment    a set of rows x a list of keys they read x a visibility rule
 *   variant    what changes a score, a key, a query or the softmax on the way ("causal", "window", yours)
 *   plan       the step's work cut into pieces, piece by worker
 *
 * The formula. Row i of a request with `rows` rows and `length` keys sits at position
 * p = first_position + length - rows + i unless row positions are given. For every q head h and its kv head
 * h / (num_q_heads / num_kv_heads):
 *   s_j = scale * dot(q, k_j), then through the score hooks of the variants in the order given (how large: docs/numerics.md);
 *   o   = sum over visible j of exp(s_j - lse) * v_j,   lse = ln(sum over visible j of exp(s_j)) (+ sinks).
 * A row that sees nothing has o = 0 and lse = -inf. What is not visible is never read into a result.
 *
 * Conventions
 *   - A zero-initialised descriptor is a valid start. Counts are literal: 0 requests is a batch of none. A field
 *     where 0 means a default says so. `reserved` must be zero; anything else is refused.
 *   - Lists are pointer + count. Everything a call is given is borrowed until it returns, unless the field says
 *     "kept": then it must stay valid and unchanged until the plan's next update or destruction.
 *   - Every function that can fail returns an fv_status and, where `err` is not NULL, fills it on failure (only then).
 *     A call that fails has written nothing to its outputs (fv_supports its reasons).
 *   - Threads: a context may be used by many threads at once; a plan or a cache by one thread at a time.
 *   - Blocking is stated as: *never blocks*, *blocks* (until done) or *launches* (queued on the stream).
 *     On the CPU every call is done when it returns and `stream` is ignored.
 *   - The library never aborts, exits, prints or raises. See fv_log_fn.
 */
#ifndef FOVEAL_H
#define FOVEAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FV_VERSION_MAJOR 0
#define FV_VERSION_MINOR 1
#define FV_VERSION_PATCH 0
#define FV_ABI_VERSION   1          /* raised when a struct or a function changes in an incompatible way */

#if defined FV_STATIC
#define FV_API
#elif defined __GNUC__
#define FV_API __attribute__((visibility("default")))
#else
#define FV_API
#endif

/* ---------------------------------------------------------------------------------------------- status and errors */

/* One list makes the enum, the names and the sentences. Numbers never change. */
#define FV_STATUS_MAP(X)                                                                                      \
    X(OK,            0, "success")                                                                            \
    X(E_INVALID,     1, "an argument is wrong: see the field, the value and the limit")                      \
    X(E_UNSUPPORTED, 2, "no kernel does this: see the reasons")                                              \
    X(E_NO_MEMORY,   3, "out of memory")                                                                      \
    X(E_CAPACITY,    4, "a plan's maximum or a cache's pool is too small")                                   \
    X(E_NOT_READY,   5, "not possible while a stream is captured, or not compiled yet")                      \
    X(E_DEVICE,      6, "the device or its driver reported an error")                                        \
    X(E_COMPILE,     7, "a variant's text does not compile")                                                  \
    X(E_VERSION,     8, "the caller was built against another ABI version")                                  \
    X(E_IO,          9, "a file could not be read or written")                                                \
    X(E_BUSY,       10, "the object is in use")

typedef enum fv_status {
#define FV_STATUS_ENUM(name, number, text) FV_##name = number,
    FV_STATUS_MAP(FV_STATUS_ENUM)
#undef FV_STATUS_ENUM
} fv_status;

/* Filled on failure only. */
typedef struct fv_error {
    fv_status status;
    char field[48];                 /* e.g. "batch.lengths[3]" */
    int64_t value;                  /* what was given */
    int64_t limit;                  /* what it was compared with */
    int64_t request;                /* which request, -1: none */
    char text[400];                 /* one sentence with the numbers in it and what would work */
} fv_error;

FV_API const char *fv_status_name(fv_status status);        /* "FV_E_INVALID"; never NULL; static */
FV_API const char *fv_status_text(fv_status status);        /* the sentence of FV_STATUS_MAP; static */
FV_API const char *fv_version(void);                        /* "0.1.0"; static */

/* ----------------------------------------------------------------------------------------------------- the context */

typedef struct fv_ctx fv_ctx;
typedef struct fv_plan fv_plan;
typedef struct fv_cache fv_cache;
typedef struct fv_variant fv_variant;
typedef void *fv_stream;            /* CUstream / cudaStream_t; ignored on the CPU */

typedef enum fv_log_level { FV_LOG_ERROR = 1, FV_LOG_WARN = 2, FV_LOG_INFO = 3, FV_LOG_DEBUG = 4 } fv_log_level;

/* One line without a newline. Called from any thread of the library, never while a lock of the library is held. */
typedef void fv_log_fn(void *user, fv_log_level level, const char *line);

/* Calls fn(arg, i) once for every i in [0, count), in any order, on any threads, and returns when all are done.
 * A host that owns its threads gives this in fv_open_desc. Several calls may run at once; fn never blocks on another i. */
typedef void fv_parallel_for_fn(void *user, void (*fn)(void *arg, int i), void *arg, int count);

/* All of the library's host allocations that can be large go here. alignment is a power of two; free takes what allocate gave. */
typedef struct fv_allocator {
    void *(*allocate)(void *user, size_t bytes, size_t alignment);      /* NULL: out of memory */
    void (*release)(void *user, void *memory, size_t bytes);
    void *user;
} fv_allocator;

typedef struct fv_open_desc {
    const char *device;             /* "cpu", "cuda:N"; NULL: FV_DEVICE of the environment, else "cpu" */
    const char *cpu_isa;            /* highest CPU level to use: "scalar", "avx2", "avx512", ...; NULL: FV_CPU of the environment,
                                       else the best that the machine has. A level it lacks is refused */
    int32_t num_threads;            /* CPU workers, the caller's included. 0: FV_NUM_THREADS, else the CPUs this process may use */
    fv_parallel_for_fn *parallel_for;   /* called until fv_close. NULL: a small pool of the library's own */
    void *parallel_for_user;
    const fv_allocator *allocator;  /* copied; called until fv_close. NULL: malloc */
    fv_log_fn *log;                 /* called until fv_close. NULL: standard error, warnings and errors only (FV_LOG of the environment: off, error .. debug) */
    void *log_user;
    const char *cache_dir;          /* compiled kernels. NULL: FV_CACHE_DIR, else $XDG_CACHE_HOME/foveal, ~/.cache/foveal, ... */
    uint64_t reserved[8];
} fv_open_desc;

/* Opens a context on one device; desc NULL: all defaults. Blocks: may start threads, load the driver. The caller's current CUDA device stays.
 * On success *ctx is the caller's, to be closed by fv_close. FV_E_DEVICE: the device does not exist (the text says what was looked for). */
FV_API fv_status fv_open_abi(uint32_t abi_version, const fv_open_desc *desc, fv_ctx **ctx, fv_error *err);
static inline fv_status fv_open(const fv_open_desc *desc, fv_ctx **ctx, fv_error *err)
{
    return fv_open_abi(FV_ABI_VERSION, desc, ctx, err);         /* inline: passes the version that the caller was built with */
}

/* Closes *ctx and sets it to NULL; NULL is fine. Plans, caches and variants of the context must be destroyed first:
 * FV_E_BUSY otherwise, and nothing happens. Blocks until threads have ended. */
FV_API fv_status fv_close(fv_ctx **ctx);

/* The context's error word: the first bad thing that a kernel met in the data of the device or of the host tables it reads while
 * running (those never fail a run: what is bad is treated as absent). */
typedef enum fv_fault {
    FV_FAULT_NONE = 0,
    FV_FAULT_PAGE_ID = 1,           /* a page id outside [0, num_pages): its keys were skipped */
    FV_FAULT_LENGTH = 2,            /* a live length above what the plan was made for, or negative: clamped */
    FV_FAULT_ROWS = 3,              /* row offsets that run backwards or past the capacity: clamped */
    FV_FAULT_VALUE = 4,             /* NaN met by a quantising append (checked mode) */
    FV_FAULT_STALE = 5,             /* checked mode: the plan was not made from this data */
    FV_FAULT_SLOT = 6,              /* an append slot outside the cache: the row was not written */
} fv_fault;

typedef struct fv_errors {
    fv_fault what;                  /* of the first one */
    int32_t request;                /* request (of several that share what is bad, one), or row for FV_FAULT_VALUE and FV_FAULT_SLOT */
    int64_t slot;                   /* FV_FAULT_PAGE_ID: entry of the page list, from the request's first; where there are segments, from the segment's */
    int64_t value;                  /* the bad value */
    int64_t count;                  /* how many were met since the word was last cleared */
} fv_errors;

/* Copies the error word; clear != 0 resets it. Never blocks: on a GPU it shows what finished launches have met. */
FV_API fv_status fv_ctx_errors(fv_ctx *ctx, fv_errors *out, int clear);

/* Describes the library, the machine and the context (NULL: without one): devices, CPU levels, kernels, element types, variants
 * with their parameters, environment variables. format: "text", "markdown" or "json". Writes at most `size` bytes with a
 * final NUL, more is cut off; *needed (may be NULL) gets the full size with NUL. buffer may be NULL when size is 0. Never blocks. */
FV_API fv_status fv_info(fv_ctx *ctx, const char *format, char *buffer, size_t size, size_t *needed, fv_error *err);

/* ---------------------------------------------------------------------------------------- tensors and index arrays */

#define FV_MAX_DIMS 5

/* A view of memory: element [i0, i1, ...] is at data + sum(i * stride) elements. An axis of extent 1 has no stride that matters. The last
 * axis must be contiguous (stride 1). Element types narrower than a byte count strides in elements, two per byte, low half first.
 * data is aligned to its element (4 bytes for "f32"; FV_E_INVALID else), and so is every array of numbers that a call takes.
 * dtype: "f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "fp4_e2m1", "int4"; for arguments also "i32", "i64", "u8", "b1" (bits, low first).
 * dtype NULL: the one that the problem names. data NULL: absent. ndim counts literally. */
typedef struct fv_tensor {
    void *data;
    const char *dtype;
    int32_t ndim;
    int32_t reserved;
    int64_t shape[FV_MAX_DIMS];
    int64_t stride[FV_MAX_DIMS];    /* in elements; any but of the last axis, negative ones too. Rows of what is written may not
                                       overlap each other, nor (not looked at) what the call reads, unless the function says so */
} fv_tensor;

typedef enum fv_index_type { FV_INDEX_NONE = 0, FV_INDEX_I32 = 1, FV_INDEX_I64 = 2 } fv_index_type;

/* An array of integers on the host, on the device, or on both. On the CPU only `host` counts. On a GPU, `host` values plan the work
 * (they may be upper bounds of the device's lengths) and `device` values, where given, are what kernels read. Both are aligned to
 * their entries, 4 or 8 bytes (FV_E_INVALID else). */
typedef struct fv_index {
    const void *host;
    const void *device;
    int64_t count;                  /* entries */
    int64_t stride;                 /* from one entry to the next, in entries; >= 1 */
    fv_index_type type;
    int32_t reserved;
} fv_index;

static inline fv_index fv_i32(const int32_t *host, int64_t count)
{
    fv_index x = { host, NULL, count, 1, FV_INDEX_I32, 0 };
    return x;
}

static inline fv_index fv_i64(const int64_t *host, int64_t count)
{
    fv_index x = { host, NULL, count, 1, FV_INDEX_I64, 0 };
    return x;
}

/* --------------------------------------------------------------------------------------------------------- variants */

/* An argument is a number or a tensor, by name. tensor != NULL: the tensor (its memory is kept when given to a batch, borrowed by a run). */
typedef struct fv_arg {
    const char *name;
    double number;
    const fv_tensor *tensor;
    uint64_t reserved;
} fv_arg;

/* One variant of a problem, by name or by handle (fv_variant_create), with the arguments that are known now. Each parameter says when it
 * must be known at the latest: problem (compiled in or fixed), batch (fv_batch.args) or run (fv_tensors.args). It may be given earlier;
 * a number given early is the default and, for window bounds, the largest that a run may ask for. A parameter that is never
 * given takes its default (fv_info lists them) or is refused by name. An argument that nobody takes is refused by name.
 *
 * Built in (fv_info has the full list; formulas there): causal, window, softcap, alibi, rope, sink, mask, ranges, items, tree, key_sums,
 * row_max. */
typedef struct fv_variant_use {
    const char *name;
    const fv_variant *variant;      /* or a handle; then name may be NULL */
    const fv_arg *args;
    int32_t num_args;
    int32_t reserved;
} fv_variant_use;

/* Makes a variant from its text (the text of a file like those in src/variants/; docs/variants.md). The text is code: it runs with the rights of this
 * process. Name (up to 31 letters) and text (up to 1 MiB) are copied; *variant is the caller's, to be destroyed after the plans that use it.
 * Blocks: may start a compiler and a linker, for 60 s at most each time. FV_E_COMPILE: err->field is the name, err->value the line (0: none of
 * the text's), err->text the compiler's words. */
FV_API fv_status fv_variant_create(fv_ctx *ctx, const char *name, const char *text, fv_variant **variant, fv_error *err);
FV_API fv_status fv_variant_destroy(fv_variant **variant);      /* FV_E_BUSY while a plan uses it; NULL is fine */

/* ------------------------------------------------------------------------------------------------------ the problem */

/* One kind of layer. Everything here is fixed for the life of a plan; shapes and lengths are not here. */
typedef struct fv_problem {
    const char *q, *k, *v, *o;      /* element types. q, o: f32, f16, bf16. k, v: any */
    int32_t num_q_heads;            /* >= 1 */
    int32_t num_kv_heads;           /* divides num_q_heads. 0: num_q_heads */
    int32_t dim_qk;                 /* 1..576, tails included */
    int32_t dim_v;                  /* 1..576. 0: dim_qk */
    double scale;                   /* on q.k. 0: 1/sqrt(dim_qk) */
    const fv_variant_use *variants; /* applied in this order */
    int32_t num_variants;
    int32_t alignment;              /* bytes that bases and strides of q, k, v, o are promised to be multiples of; a hint for kernels that
                                       need it, views that break it still run. 0: 16 */
    const char *k_scale;            /* granularity of the run argument "k_scale" (stored K times it is K): NULL or "none", "tensor" (a number or
                                       [1] f32), "head" ([num_kv_heads] f32), "token_head" (f32, the axes of K without the last) */
    const char *v_scale;            /* the same for V. Types of 4 bits also take "k_block_scale", "v_block_scale", with K's (V's) axes but the last:
                                         fp4_e2m1   fp8_e4m3, one per 16 elements: the last axis is dim / 16
                                         int4       f16, pairs (scale, zero) per 32 or 64 elements: the last axis is dim / 16 or dim / 32.
                                                    Codes are 0 to 15, an element is (code - zero) * scale. CPU only
                                       Strides are theirs: they may lie apart, or behind the row that they belong to */
    int32_t qk_tail;                /* the last so many elements of dim_qk lie in .q_tail / .k_tail instead of .q / .k; 0: none.
                                       Not what a variant turns (rope): its pairs begin with .q and .k. Turn a tail before, by fv_rope and fv_append */
    bool v_in_k;                    /* V is the first dim_v elements of K (latent attention); .v must be absent */
    bool lse_base2;                 /* lse in base 2 instead of natural */
    const char *page_order;         /* how elements lie within a page of K and V: NULL or "rows": every token's row by itself; "tiles": see below */
    uint64_t reserved[7];
} fv_problem;

/* Pages in the order "tiles", the one that matrix tiles and products of pairs want. Shapes and strides are those of rows, and every page holds its
 * own elements in its own places, so pools, page tables and fv_copy_pages know nothing of it; but what lies in the rows of a page is
 *   K   for every 16 tokens: element d of token t is in the row of token 16 (t / 16) + d % 32 / 2, at 32 (d / 32) + 2 (t % 16) + d % 2:
 *       each square of 16 tokens x 16 pairs of d is turned
 *   V   for every 2 tokens: the pairs (element d of token t, element d of token t + 1), d ascending, fill the row of t and then that of t + 1
 * For K and V of 16 bits, dims that are multiples of 32, page sizes that are multiples of 16; without qk_tail and v_in_k. CPU only. fv_append
 * writes it where its descriptor says so, too. */

/* --------------------------------------------------------------------------------------------------- the batch */

/* Where keys live in pages. Two forms:
 *   CSR   indptr [num_requests + 1] and ids: request r owns ids[indptr[r] .. indptr[r + 1])
 *   2-D   indptr absent: ids is a table of `table_width` entries a row, `table_stride` from row to row; request r owns row r, or row
 *         table_rows[r] where given
 * Entries behind those that a request's length needs are never followed. The host and device memory of ids and table_rows is kept. */
typedef struct fv_pages {
    int32_t page_size;              /* keys per page, >= 1 */
    int32_t reserved0;
    int64_t num_pages;              /* in the pool: an id is in [0, num_pages) */
    fv_index indptr;
    fv_index ids;
    fv_index v_ids;                 /* V's pages where they differ from K's; same indptr, same form; absent: the same ids */
    fv_index table_rows;
    int64_t table_width;
    int64_t table_stride;           /* >= table_width */
    uint64_t reserved[4];
} fv_pages;

/* A set of rows x a list of keys. Given instead of the short form (one segment a request) for shared prefixes and trees (rows of
 * many requests on the same pages), block-sparse masks (a segment per block row) and per-head patterns.
 * A row may lie in up to max_levels segments for the same head; their keys must not overlap. Rows that lie in none see nothing. */
typedef struct fv_segment {
    int64_t row_first;              /* rows [row_first, row_first + num_rows) of the batch, or ... */
    int64_t num_rows;
    const int32_t *rows;            /* ... these rows (num_rows of them, ascending). NULL: the range */
    int32_t kv_head_first;          /* kv heads [kv_head_first, kv_head_first + num_kv_heads) */
    int32_t num_kv_heads;           /* 0: all */
    int64_t first_page;             /* paged: its pages are entries [first_page, first_page + num_pages) of fv_pages.ids;
                                       ragged: its keys are tokens [first_page, first_page + num_keys) of K and V */
    int64_t num_pages;              /* paged only */
    int64_t num_keys;               /* keys it has; paged: at most num_pages * page_size */
    int64_t first_position;         /* position of its first key; the others follow. See page_positions */
    const int32_t *page_positions;  /* [num_pages] position of the first key of each page; NULL: they follow one another */
    uint64_t reserved[4];
} fv_segment;

/* One step's requests. Either pages or kv_indptr (ragged) says where keys live. */
typedef struct fv_batch {
    int64_t num_requests;
    fv_index rows;                  /* [num_requests + 1] row offsets, from 0. Absent: one row a request */
    fv_index lengths;               /* [num_requests] keys of each request, the step's own rows included */
    fv_index last_page_lengths;     /* [num_requests] instead of lengths, CSR only: keys in the last page, 1..page_size (0 with no page) */
    fv_pages pages;                 /* page_size 0: ragged */
    fv_index kv_indptr;             /* ragged: [num_requests + 1] token offsets into K and V. lengths may be absent (all of it) or shorter */
    fv_index first_positions;       /* [num_requests] position of key 0; absent: 0 */
    fv_index row_positions;         /* [total_rows] position of each row; absent: see the formula. Kept */
    const fv_segment *segments;     /* absent: one a request. pages.indptr/table_rows are not used with segments; lengths still place the rows */
    int64_t num_segments;           /* at most limits.max_segments, which is at least 1 where segments are given, even if there are none of them */
    const fv_arg *args;             /* of parameters bound per batch: mask bits, ranges, trees. Tensor memory is kept */
    int32_t num_args;
    int32_t reserved0;
    uint64_t reserved[8];
} fv_batch;

/* ------------------------------------------------------------------------------------------------------------ plans */

typedef enum fv_sharing {
    FV_SHARING_OFF = 0,             /* each request reads its own list */
    FV_SHARING_FIND = 1,            /* requests whose page lists begin with the same ids share that prefix where the cost model says it pays.
                                       Needs host page ids that stay fixed until the next update */
} fv_sharing;

/* The maxima of a plan and how to plan. Kernel, configuration, number of workers and memory are functions of the problem and of this alone, so
 * a captured launch stays right whatever the batches. */
typedef struct fv_plan_desc {
    int64_t max_requests;
    int64_t max_rows;               /* rows of all requests together. == max_requests: one row each, and the decode build is chosen */
    int64_t max_kv_tokens;          /* keys of all requests together (of all segments, where segments are given) */
    int64_t max_pages;              /* page table entries of all requests together; 0: ragged only */
    int64_t max_segments;           /* given segments; 0: none will be given */
    int64_t max_segment_rows;       /* rows of all given segments together; 0: max_rows * max_levels */
    int32_t max_levels;             /* segments that a row may lie in. 0: 1, or 2 with FV_SHARING_FIND */
    int32_t splits;                 /* parts each row tile's keys are cut into. 0: as the balance needs */
    int32_t workers;                /* at most so many CPU threads or CTAs. 0: all */
    int32_t chunk;                  /* invariant: keys per chunk, a multiple of 64. 0: 1024 */
    bool invariant;                 /* a request has the same bits whatever its neighbours, pages, splits, prefill or decode */
    bool checked;                   /* verify on the way that plan and data belong together, count NaN; slower */
    fv_sharing sharing;
    void *workspace;                /* memory for partial results, on the context's device, on a multiple of 64 bytes, used by the plan until it is
                                       destroyed. NULL: the library allocates at creation */
    size_t workspace_bytes;         /* of it: at least fv_sizes.workspace_bytes */
    uint64_t reserved[8];
} fv_plan_desc;

typedef struct fv_sizes {
    size_t host_bytes;              /* host memory of the plan */
    size_t device_bytes;            /* device memory of the plan's data; 0 on the CPU */
    size_t workspace_bytes;         /* partial results: device memory on a GPU, host memory on the CPU */
    int64_t max_pieces;
    int64_t max_partials;           /* rows x heads of partial results */
    int32_t workers;
    int32_t reserved;
} fv_sizes;

typedef struct fv_support {
    char kernel[64];                /* name of the kernel that would run */
    char reasons[400];              /* FV_E_UNSUPPORTED: why each kernel declined */
} fv_support;

/* Which kernel would serve this problem with these maxima: FV_OK and its name, or FV_E_UNSUPPORTED and the reasons. Never blocks. */
FV_API fv_status fv_supports(fv_ctx *ctx, const fv_problem *problem, const fv_plan_desc *limits, fv_support *out, fv_error *err);

/* Exact bytes of a plan with these maxima; monotone in each. Never blocks. */
FV_API fv_status fv_plan_sizes(fv_ctx *ctx, const fv_problem *problem, const fv_plan_desc *limits, fv_sizes *out, fv_error *err);

/* Compiles what these problems need, now; the next fv_plan_create finds it ready. On a GPU also what fv_append, fv_rope, fv_merge and fv_copy_pages need:
 * else the first call of each compiles. Blocks. */
FV_API fv_status fv_warm(fv_ctx *ctx, const fv_problem *const *problems, int64_t num_problems, const fv_plan_desc *limits, fv_error *err);

/* Allocates everything that the plan will ever need, chooses kernel and grid, compiles. Blocks. The problem is copied (argument tensors are kept).
 * On success *plan is the caller's. */
FV_API fv_status fv_plan_create(fv_ctx *ctx, const fv_problem *problem, const fv_plan_desc *limits, fv_plan **plan, fv_error *err);
FV_API fv_status fv_plan_destroy(fv_plan **plan);       /* NULL is fine; blocks until the plan's launches are done */

/* Makes the plan of this step. No allocation. `problem` NULL: as before; else another one of the same class (element types, heads, dims, scales),
 * whose variants were compiled. GPU: copies are queued on the stream from a ring of staging buffers; blocks only while that ring is full;
 * on a capturing stream FV_E_NOT_READY, and nothing happens. On failure the plan holds no step and fv_run refuses it. */
FV_API fv_status fv_plan_update(fv_plan *plan, const fv_problem *problem, const fv_batch *batch, fv_stream stream, fv_error *err);

typedef struct fv_plan_stats {
    int64_t num_pieces, num_partials, num_segments, num_shared_segments, num_rows, num_kv_tokens;
    int64_t total_cost, max_worker_cost;        /* in the cost model's units, about ns of one worker at dims 128; balance = max * workers / total. On a GPU a
                                                   short step leaves workers without work: several on an SM would slow each other down */
    int64_t kv_bytes;               /* bytes of K and V that the pieces read, scales apart; what several pieces read counts for each */
    int64_t flops;                  /* 2 (dim_qk + dim_v) per visible (row, head, key), by the bounds that the planner knows */
    int32_t workers;
    int32_t reserved;
    char kernel[64];
} fv_plan_stats;

/* Of the step that the plan holds; FV_E_INVALID where it holds none, here and in the next two. Never blocks. */
FV_API fv_status fv_plan_query(const fv_plan *plan, fv_plan_stats *out, fv_error *err);

/* Cost of each worker's share, in order, in the units of fv_plan_stats; count must be fv_plan_stats.workers. */
FV_API fv_status fv_plan_worker_costs(const fv_plan *plan, int64_t *out, int32_t count, fv_error *err);

/* The plan in words ("text") or as a picture ("svg": time down, workers across, one colour a request, from the cost model). As fv_info. */
FV_API fv_status fv_plan_describe(const fv_plan *plan, const char *format, char *buffer, size_t size, size_t *needed, fv_error *err);

/* What a run reads and writes. Shapes:
 *   q       [rows, num_q_heads, dim_qk - qk_tail]        q_tail [rows, num_q_heads, qk_tail]
 *   k       paged [num_pages, page_size, num_kv_heads, dim_qk - qk_tail], ragged [tokens, num_kv_heads, dim_qk - qk_tail]
 *   k_tail  as k, qk_tail wide          v  as k, dim_v wide (absent with v_in_k)
 *   o       [rows, num_q_heads, dim_v]                   lse [rows, num_q_heads] f32, or absent
 * rows may exceed the batch's; the surplus is neither read nor written. NHD, HND, interleaved, sliced and cross-layer memory are strides. */
typedef struct fv_tensors {
    fv_tensor q, q_tail, k, k_tail, v, o, lse;
    const fv_arg *args;             /* of parameters bound per run: "k_scale", "v_scale", "slopes", "sinks", "key_sums", ... */
    int32_t num_args;
    int32_t reserved0;
    uint64_t reserved[4];
} fv_tensors;

/* Runs the plan on one layer. Allocates nothing, compiles nothing, never synchronises. CPU: blocks until done. GPU: launches; may be captured.
 * One run of a plan at a time. */
FV_API fv_status fv_run(fv_plan *plan, const fv_tensors *tensors, fv_stream stream, fv_error *err);

/* -------------------------------------------------------------------------------------- append, rope, merge, copies */

/* Rotary embedding. Pair i of the first rotary_dim elements is (i, i + rotary_dim/2), or (2i, 2i+1) with interleaved; it turns by
 * position * frequency[i]. */
typedef struct fv_rope_desc {
    int32_t rotary_dim;             /* even, <= the head's width. 0: no rotation */
    bool interleaved;
    const float *frequencies;       /* [rotary_dim / 2] on the host; copied. NULL: from the fields below (fv_rope_frequencies) */
    double base;                    /* 0: 10000 */
    double factor;                  /* divides frequencies (linear scaling), or Llama-3.1's factor. 0: 1 */
    double low_freq_factor, high_freq_factor;       /* Llama-3.1: 1, 4. Both 0: linear scaling */
    double original_context;        /* Llama-3.1: 8192 */
    uint64_t reserved[4];
} fv_rope_desc;

/* Writes desc->rotary_dim / 2 frequencies. */
FV_API fv_status fv_rope_frequencies(const fv_rope_desc *desc, float *frequencies, fv_error *err);

/* Rotates rows of x [rows, heads, dim] into y (same shape; may be x itself) at positions [rows]. Elements past rotary_dim are copied. f32, f16 or
 * bf16. CPU: blocks. GPU: launches; positions as the arrays of fv_append. */
FV_API fv_status fv_rope(fv_ctx *ctx, const fv_rope_desc *desc, const fv_tensor *x, fv_index positions, const fv_tensor *y,
                         fv_stream stream, fv_error *err);

/* New keys and values into the cache: rotate, quantise, scatter, in one go. Row i of request r becomes key length - rows + i of that request
 * (lengths count the new rows already), or goes to token slot slots[row] = page * page_size + offset where `slots` is given (-1: skip the row). */
typedef struct fv_append_desc {
    const char *k_scale_kind;       /* as fv_problem.k_scale: how k_scale is read ("tensor", "head"), or written ("token_head": each (token, head) gets
                                       max|x| / largest value of the type (int8: 127, though -128 is stored too), 1 where all
                                       are 0, stored through k_scale) */
    const char *v_scale_kind;
    fv_tensor new_k, new_v;         /* [rows, num_kv_heads, dim]; new_v absent: K only (latent) */
    fv_tensor new_k_tail;           /* absent, or [rows, num_kv_heads, tail] */
    fv_tensor k, v, k_tail;         /* the cache, shapes as in fv_tensors */
    fv_arg k_scale, v_scale;        /* number or tensor; name ignored */
    fv_tensor k_block_scale, v_block_scale;     /* written for fp4_e2m1 and int4, shapes as for fv_run */
    const fv_rope_desc *rope;       /* NULL: no rotation. Turns new_k (the tail where there is one) */
    fv_tensor q, q_out;             /* optional: also turn these rows [rows, heads, dim]; q_out may be q */
    int64_t num_requests;
    fv_index rows, lengths;         /* as in fv_batch */
    fv_index first_positions;       /* as in fv_batch */
    fv_index row_positions;         /* positions to turn by; absent: the key's position */
    fv_pages pages;                 /* page_size 0: ragged, with kv_indptr */
    fv_index kv_indptr;
    fv_index slots;                 /* [rows]; then rows, lengths and tables are not used (row_positions is needed with rope) */
    bool checked;                   /* report NaN */
    const char *page_order;         /* as fv_problem.page_order: how k and v are written */
    uint64_t reserved[7];
} fv_append_desc;

/* Values beyond the range of an 8-bit type saturate; NaN stays NaN where the type has one. CPU: blocks. GPU: launches, allocates nothing there. Index
 * arrays that have a `device` pointer are read by the kernel, in the order of the stream, so a captured call follows them; host values beside
 * them are upper bounds that are checked now. Host arrays alone are taken along by the call (FV_E_NOT_READY while the stream is captured).
 * Rows past the last live row offset are left out. */
FV_API fv_status fv_append(fv_ctx *ctx, const fv_append_desc *desc, fv_stream stream, fv_error *err);

/* Merges partial states (o_s [rows, heads, dim], lse_s [rows, heads] f32) of the same rows over disjoint keys:
 * lse = ln(sum exp(lse_s)), o = sum exp(lse_s - lse) o_s. States with lse = -inf are skipped; where one state alone counts, the result is that
 * state bit for bit. The output may be state 0 itself. All lse are in the same base. States: f32, f16 or bf16, of one type and shape. CPU: blocks. GPU:
 * launches. */
FV_API fv_status fv_merge(fv_ctx *ctx, const fv_tensor *o_states, const fv_tensor *lse_states, int64_t num_states, bool lse_base2,
                          const fv_tensor *o, const fv_tensor *lse, fv_stream stream, fv_error *err);

typedef struct fv_copy {
    int32_t src, dst;               /* page ids */
} fv_copy;

/* Copies whole pages of k and v (either may be absent) as fv_cache_fork asks: of any element type, and of "u8", "u16" and "i32". In the order given, so
 * a page that was a destination may be a source later; { -1, -1 } copies nothing. Tensors beside them that are paged alike (scales of tokens or
 * blocks, the pairs of int4) want a call of their own, with them as k and v. CPU: blocks. GPU: launches. */
FV_API fv_status fv_copy_pages(fv_ctx *ctx, const fv_tensor *k, const fv_tensor *v, const fv_copy *copies, int64_t num_copies,
                               fv_stream stream, fv_error *err);

/* ------------------------------------------------------------------------------------------------------- the KV cache */

/* Hands out page ids of a pool; holds no tensor. Sequences are paths in a prefix tree: pages that are full and have a key (a hash of all tokens
 * up to their end, the caller's) are found again by later sequences and stay after release until they are evicted, least recently used first. */
typedef struct fv_cache_desc {
    int32_t page_size;
    int32_t max_sequences;
    int64_t num_pages;              /* ids are [first_id, first_id + num_pages) */
    int64_t first_id;
    int64_t max_pages_per_sequence; /* width of the page table */
    bool no_prefix;                 /* do not keep or find prefixes */
    uint64_t reserved[4];
} fv_cache_desc;

/* All memory is taken here: nothing below allocates or blocks. *cache is the caller's. Destroying it ends its sequences; the page tables that it gave
 * out must not be used any more. NULL is fine. */
FV_API fv_status fv_cache_create(fv_ctx *ctx, const fv_cache_desc *desc, fv_cache **cache, fv_error *err);
FV_API fv_status fv_cache_destroy(fv_cache **cache);

/* How many tokens (a multiple of page_size) of a sequence with these page keys are in the cache now. Changes nothing. */
FV_API fv_status fv_cache_match(const fv_cache *cache, const uint64_t *page_keys, int64_t num_keys, int64_t *tokens, fv_error *err);

/* Opens a sequence that starts with the longest cached prefix of page_keys, at most max_tokens of it (0 keys: empty). *sequence is its id, also
 * its row of the page table; *tokens what it holds already. FV_E_CAPACITY: no free sequence. */
FV_API fv_status fv_cache_open(fv_cache *cache, const uint64_t *page_keys, int64_t num_keys, int64_t max_tokens, int32_t *sequence,
                               int64_t *tokens, fv_error *err);

/* Room for `tokens` more tokens at the end of the sequence. Takes free pages, then evicts unused cached ones. FV_E_CAPACITY: nothing changed,
 * err->value is the number of pages missing. Full pages become findable when fv_cache_commit gives their keys and says that their data is written. */
FV_API fv_status fv_cache_extend(fv_cache *cache, int32_t sequence, int64_t tokens, fv_error *err);

/* The first `tokens` tokens of the sequence are written: its full pages with keys can be found by others from now on. */
FV_API fv_status fv_cache_commit(fv_cache *cache, int32_t sequence, int64_t tokens, const uint64_t *page_keys, int64_t num_keys, fv_error *err);

/* A copy of the sequence, *child, that shares all its full pages; its last, partly filled page is a new one and *copy says which page to copy
 * (src == dst == -1: none), by fv_copy_pages, before either is written. FV_E_CAPACITY: no free sequence, or no free page. */
FV_API fv_status fv_cache_fork(fv_cache *cache, int32_t sequence, int32_t *child, fv_copy *copy, fv_error *err);

/* Gives back pages that lie wholly before token `first` (a sliding window has passed them); their table entries become -1. */
FV_API fv_status fv_cache_slide(fv_cache *cache, int32_t sequence, int64_t first, fv_error *err);

/* Cuts the sequence to `tokens` tokens (rejected speculation). Shared pages are not changed: *copy as in fv_cache_fork. Pages that fv_cache_slide has
 * given back stay away: a window that reaches them again finds bad page ids there. */
FV_API fv_status fv_cache_truncate(fv_cache *cache, int32_t sequence, int64_t tokens, fv_copy *copy, fv_error *err);

/* Ends a sequence. Its findable pages stay cached, the others become free. */
FV_API fv_status fv_cache_release(fv_cache *cache, int32_t sequence, fv_error *err);

/* Frees at least `pages` cached pages that no sequence uses, if there are so many; *freed says how many. */
FV_API fv_status fv_cache_evict(fv_cache *cache, int64_t pages, int64_t *freed, fv_error *err);

/* Tokens of the sequence. */
FV_API fv_status fv_cache_length(const fv_cache *cache, int32_t sequence, int64_t *tokens, fv_error *err);

/* The page table of these sequences, in this order, as the pages of a batch (page_size, num_pages, 2-D ids, table_rows). Costs nothing per page: the
 * cache keeps the table up to date, on the host. `sequences` is kept as long as `pages` is used. The table belongs to the cache: it stays where it is
 * until the cache is destroyed, and changes with the sequences. */
FV_API fv_status fv_cache_pages(const fv_cache *cache, const int32_t *sequences, int64_t count, fv_pages *pages, fv_error *err);

typedef struct fv_cache_stats {
    int64_t num_pages, free_pages, used_pages, cached_pages;    /* used: held by sequences; cached: held by the tree alone */
    int64_t num_sequences;
    int64_t hit_tokens, asked_tokens;           /* since creation, by fv_cache_open */
    int64_t evicted_pages;
    int64_t peak_used_pages;
} fv_cache_stats;

FV_API fv_status fv_cache_query(const fv_cache *cache, fv_cache_stats *out, fv_error *err);

#ifdef __cplusplus
}
#endif
#endif
