/* SPDX-License-Identifier: Apache-2.0 */
/* batch.h -- who asks and where keys live: an fv_batch checked against the plan's maxima and turned into fv__request and table places.
 * The only reader of the batch's index arrays besides the kernels, which read page ids. */
#ifndef FV__BATCH_H
#define FV__BATCH_H

#include "plan.h"
#include "problem.h"
#include "tensor.h"

/* Memory that fv__batch_read writes, owned by the plan, sized for its maxima. */
typedef struct fv__batch_memory {
    fv__request *requests;              /* [max_requests] */
    int64_t *tables;                    /* [max_requests] */
    int32_t *min_position, *max_position;       /* [max_requests] */
    int64_t *bits_offsets;              /* [max_requests + 1], in bits */
    uint32_t *page_set;                 /* page_set_size entries, a power of two: to find a page that a segment lists twice */
    int64_t page_set_size;
    bool host_ids;                      /* kernels read page ids on the host: they must be there */
} fv__batch_memory;

/* Entries of the id array that the batch may reach, and the form of its ids. */
typedef struct fv__tables {
    int64_t entries;
    int64_t num_tokens;                 /* ragged: tokens that K and V must have */
    bool paged;
} fv__tables;

/* Checks everything that the host can see. `host`: the plan is made from host values (always on the CPU). */
fv_status fv__batch_read(const fv_batch *given, const fv_plan_desc *limits, bool has_bits, const fv__batch_memory *memory, fv__batch *out,
                         fv__tables *tables, fv_error *err);

#endif
