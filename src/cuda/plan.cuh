/* SPDX-License-Identifier: Apache-2.0 */
/* plan.cuh -- the plan's blob as kernels see it: the structs of src/plan.h, field by field (cuda.c asserts that the layouts agree), and what the CUDA
 * backend adds: the step (pointers and values that an update may change under a captured launch) and a launch's arguments. Valid C too. */
#ifndef FV_PLAN_CUH
#define FV_PLAN_CUH

typedef struct d_request { int32_t row_first, num_rows, num_keys, first_position; } d_request;

typedef struct d_segment {
    int64_t table;
    int32_t row_first, num_rows, request, unit_first, num_units, num_keys, first_position, page_positions, live, level, reserved[2];
} d_segment;

typedef struct d_listed_row { int32_t row, request; } d_listed_row;
typedef struct d_piece { int32_t segment, row_first, num_rows, unit, key_first, num_keys, slot, record; } d_piece;
typedef struct d_record { int32_t row, unit, part_first, num_parts, arrivals, reserved; } d_record;

typedef struct d_plan_head {
    int32_t num_workers, num_pieces, num_segments, num_requests, num_records, num_parts, num_slots, num_listed_rows;
    int32_t total_rows, num_units, unit_heads, units_per_kv_head, page_size, invariant, chunk, num_page_positions;
    int64_t num_pages, table_entries;
    int64_t worker_first, pieces, segments, requests, listed_rows, records, parts, row_record, page_positions, bits_offsets, bytes;
    int32_t splits, row_positions, has_live_first, queue;
} d_plan_head;

typedef struct d_faults { int32_t what, request; int64_t slot, value, count; } d_faults;

enum { FV_MAX_USES = 8 };

/* Room for the argument structs of all uses. They are last in what holds them, so a kernel that knows its own (uses.cuh) takes just those: a launch
 * copies its arguments into the driver's queue, and less is faster. */
#if defined __CUDACC_RTC__ && defined FV_USES
#define FV_USES_BYTES sizeof(fv_uses)
#elif defined __CUDACC_RTC__
#define FV_USES_BYTES 16
#else
#define FV_USES_BYTES 1024
#endif

/* What an update writes beside the plan: the launch's own arguments are frozen in a captured graph, these are not. 64-byte aligned. */
typedef struct d_step {
    const void *ids, *v_ids;            /* page ids on the device */
    int64_t ids_stride, v_ids_stride;
    const void *lengths;                /* live lengths, or null */
    int64_t lengths_stride;
    const int32_t *row_positions;       /* [total_rows], or null */
    int32_t ids_64, v_ids_64, lengths_64, reserved;
    int64_t reserved2;
    unsigned char uses[FV_USES_BYTES] __attribute__((aligned(16)));     /* struct fv_uses: argument structs as bound up to the batch */
} d_step;

/* strides of K, V, Q, O in bytes (fp4: in elements) */
typedef struct d_view { char *data; int64_t stride[3]; } d_view;
typedef struct d_scale { const float *data; int64_t stride[3]; float number; int32_t reserved; } d_scale;

typedef struct d_attend {
    const char *plan;                   /* d_plan_head */
    const d_step *step;
    d_view q, q_tail, k, k_tail, v, o;
    d_view k_block_scale, v_block_scale;
    d_scale k_scale, v_scale;
    float *lse;                         /* or null */
    int64_t lse_stride[2];
    float *partials, *scratch;
    int32_t *tickets;
    int32_t *queue;                     /* pieces taken, workers done; 0 before and after a run */
    d_faults *faults, *faults_host;     /* the device's word, and the copy that the host reads */
    float scale;
    float lse_factor;                   /* what brings a base 2 lse to the wanted base */
    int32_t num_q_heads;
    int32_t wide;                       /* bits: 1 K, 2 V, 4 Q may be read 16 bytes at a time; 8: O written in pairs */
    int32_t slot_floats;                /* of one slot */
    int32_t scratch_floats;             /* of one worker */
    uint32_t from_run[FV_MAX_USES];     /* bit i: parameter i of the use is in `uses` below, not in the step */
    unsigned char uses[FV_USES_BYTES] __attribute__((aligned(16)));     /* struct fv_uses as bound by this run */
} d_attend;

/* What kernels/stale.cu is launched with. */
typedef struct d_stale {
    const char *plan;
    const d_step *step;
    uint64_t *stamps;                   /* [max_requests + segments] */
    d_faults *faults, *faults_host;
    int64_t max_requests;
    int32_t write, reserved;            /* write: stamp, else compare */
} d_stale;

#ifdef __CUDACC__
/* The first fault is described, all are counted. The host's copy of the count is stored until it holds what the device counted: of several blocks
 * that store at once, the last one to look sees its own number gone and stores the newer one. */
static __device__ __noinline__ void d_fault(d_faults *faults, d_faults *to_host, int what, int64_t request, int64_t slot, int64_t value,
                                            int64_t number)
{
    volatile d_faults *host = to_host;
    volatile int64_t *count = &faults->count;
    if (atomicAdd((unsigned long long *)&faults->count, (unsigned long long)number) == 0) {
        host->request = (int32_t)request;
        host->slot = slot;
        host->value = value;
        __threadfence_system();
        host->what = what;
    }
    int64_t seen;
    do {
        seen = *count;
        host->count = seen;
        __threadfence_system();
    } while (*count != seen);
}
#endif

#endif
