/* SPDX-License-Identifier: Apache-2.0 */
/* plan.h -- the central structure: pieces in order, per worker, and the merges they owe. Plain data, the same bytes on host and device.
 *
 * Nouns
 *   head unit  the q heads that a piece handles together: a kv head's whole group, or `unit_heads` of it where the group is larger than the largest tile.
 *              Unit u belongs to kv head u / units_per_kv_head and begins at q head u * unit_heads (ranges never cross a kv head).
 *   row tile   up to tile_rows consecutive rows of a segment (by place in the segment); tile_rows * unit_heads packed rows fit the kernel's largest tile
 *   piece      a row tile of a segment x a range of its keys x a head unit. Cut at multiples of FV__KEY_BLOCK keys from the segment's first key
 *   worker     does pieces [worker_first[w], worker_first[w + 1]) in order
 *   slot       the partial result (m, l, o unnormalised, all f32) of one row x head unit. A piece that owes a merge writes its rows to slots
 *              slot + c * num_rows + i, i = row in the piece, c = chunk of the piece (0 outside of the invariant mode)
 *   record     one merge: a row x head unit, the slots of all its parts in order, and how many pieces must arrive. Whoever arrives last
 *              merges the parts left to right, writes o and lse, and sets the ticket back to 0
 *
 * Invariants (plan_is_valid checks them by number)
 *   (1) every (row, head unit) that lies in a segment is covered by pieces: each visible key of each of its segments exactly once; blocks of keys
 *       that the variants' bounds exclude for the whole tile are in no piece (but for keys before the bound where live lengths may be shorter)
 *   (2) every (row, head unit) of the batch is in at least one piece (rows that see nothing get a piece of 0 keys), so every o and lse is written
 *   (3) a piece whose rows are in no other piece has record -1 and no slot (invariant mode: however many chunks). Where some rows of a piece are in
 *       others too, all of them have records; a record may have one part
 *   (4) a row's parts are in the order of its segments' levels, then keys; slots are used once
 *   (5) pieces <= row tiles x head units + workers - 1 (workers x together, where heads go together); with given splits: row tiles x head units x
 *       splits
 *   (6) longest worker <= 1.1 x total / workers (those that are kept busy, where several share a core) + one block (a piece of one block of the largest tile, three parts to merge). Invariant mode:
 *       + one chunk, and the total counts a merge for each chunk, as cut items owe it. Where items may not be cut, + the dearest piece: with
 *       given splits, and in the invariant mode where a batch of several rows a request would need more partials than there is room for
 *   (7) the same input gives the same bytes; costs are 64-bit integers
 *   (8) every index lies in its array
 *
 * Layout: one blob; head.* are byte offsets from its start; arrays are 16-byte aligned.
 */
#ifndef FV__PLAN_H
#define FV__PLAN_H

#include "core.h"

typedef struct fv__request {            /* 16 bytes */
    int32_t row_first, num_rows;
    int32_t num_keys;                   /* its length */
    int32_t first_position;
} fv__request;

typedef struct fv__segment {            /* 64 bytes */
    int64_t table;                      /* paged: place of its first page in the id array, in entries; ragged: its first token */
    int32_t row_first, num_rows;        /* rows of the batch, or (request < 0) entries of the row list */
    int32_t request;                    /* of all its rows; -1: of many, see the row list */
    int32_t unit_first, num_units;      /* head units */
    int32_t num_keys;
    int32_t first_position;
    int32_t page_positions;             /* first entry in the page position array; -1: positions follow one another */
    int32_t live;                       /* 1: the batch has device lengths, and the request's live one bounds num_keys: keys there are
                                           live - (first_position - the request's first_position) */
    int32_t level;
    int32_t reserved[2];
} fv__segment;

typedef struct fv__listed_row {         /* 8 bytes: a row of a segment with rows of many requests */
    int32_t row, request;
} fv__listed_row;

typedef struct fv__piece {              /* 32 bytes */
    int32_t segment;
    int32_t row_first, num_rows;        /* within the segment */
    int32_t unit;                       /* head unit */
    int32_t key_first, num_keys;        /* within the segment */
    int32_t slot;                       /* first slot, -1: writes o and lse itself */
    int32_t record;                     /* -1: none; >= 0: row i's record is record + i; -2: row_record[row] + unit */
} fv__piece;

typedef struct fv__record {             /* 24 bytes */
    int32_t row, unit;
    int32_t part_first, num_parts;      /* entries of parts[] */
    int32_t arrivals;                   /* pieces that must arrive */
    int32_t reserved;
} fv__record;

typedef struct fv__plan_head {
    int32_t num_workers, num_pieces, num_segments, num_requests;
    int32_t num_records, num_parts, num_slots, num_listed_rows;
    int32_t total_rows, num_units, unit_heads, units_per_kv_head;
    int32_t page_size;                  /* 0: ragged */
    int32_t invariant, chunk;
    int32_t num_page_positions;
    int64_t num_pages;                  /* of the pool */
    int64_t table_entries;              /* entries of the id array: what a table place is compared with */
    /* byte offsets */
    int64_t worker_first;               /* int32 [num_workers + 1] */
    int64_t pieces, segments, requests, listed_rows, records;
    int64_t parts;                      /* int32: slots */
    int64_t row_record;                 /* int32 [total_rows], only where a piece has record -2 */
    int64_t page_positions;             /* int32 */
    int64_t bits_offsets;               /* int64 [num_requests + 1]; only with FV_BITS parameters */
    int64_t bytes;                      /* of the blob in use */
    int32_t splits;                     /* given splits, 0: as the balance needs */
    int32_t row_positions;              /* 1: the batch gives them, the plan does not know them */
    int32_t has_live_first;             /* 1: live segments are covered from key 0, though ... */
    /* 1: the pieces are one queue, the last first, from which a worker takes the next when it is free; worker_first then says who would do what if all
     * were equally fast. Where the pieces end in many small ones, that balances better than any shares can: of the blocks of an SM, the older is some
     * 10 % faster, and SMs differ as much; threads of a CPU share cores with others. */
    int32_t queue;
    int64_t live_first;                 /* ... no row sees keys before its position + live_first: kernels skip those by the live position */
} fv__plan_head;

#define FV__PLAN_ARRAY(head, type, field) ((type *)((char *)(head) + (head)->field))

/* The invariant mode counts chunks (and kernels count tiles of FV__KEY_BLOCK keys) from position 0: key j of the segment lies in chunk
 * (origin + j) / chunk. Where positions do not follow one another, from the segment's first key. Outside of the invariant mode from the first key. */
static inline int64_t fv__plan_origin(const fv__plan_head *head, const fv__segment *s)
{
    return head->invariant && s->page_positions < 0 ? s->first_position : 0;
}

/* Parts (slots per row) that a piece with a slot gives: one a chunk; a piece without keys gives one, the identity. */
static inline int32_t fv__plan_parts(const fv__plan_head *head, const fv__segment *s, const fv__piece *p)
{
    if (!head->invariant || p->num_keys == 0) return 1;
    const int64_t first = fv__plan_origin(head, s) + p->key_first;
    return (int32_t)((first + p->num_keys - 1) / head->chunk - first / head->chunk + 1);
}

/* ---- what the planner is told ---- */

/* The kernel's side: fixed by problem and maxima. */
typedef struct fv__kernel_shape {
    char name[64];
    int32_t max_packed;                 /* largest tile: rows x unit_heads */
    int32_t unit_heads, units_per_kv_head, num_units;
    int32_t workers;
    int32_t num_cores;                  /* what workers share: worker w is on core w % num_cores. 0: each has its own */
    int32_t together, together_rows;    /* a worker does so many units of the same rows (up to so many packed ones) and keys in less time than one by
                                           one: few items are cut so that it has some. 0: it does not */
    int32_t queue;                      /* workers can take pieces as they come (fv__plan_head.queue), of this many packed rows or more; 0: none */
    int32_t num_tiles;                  /* tile sizes in packed rows, ascending: a segment's tile is the smallest that holds all its rows, or the last */
    int32_t tiles[6];
    int64_t partial_bytes;              /* of one slot */
    const struct fv__cost_model *cost;
} fv__kernel_shape;

/* Integer costs, committed per kind of device, never measured at run time (plan_cost.c). A piece of r packed rows over b > 0 key blocks costs
 * piece + b * (block + r * block_row) + r * row, and a part in a merge costs `part` per packed row. A piece without keys costs nothing. */
typedef struct fv__cost_model {
    const char *name;
    int64_t piece, block, block_row, row, part;
    int64_t second, third;              /* line a core from which on a second, a third worker of it makes plans faster */
} fv__cost_model;

/* The request side: a batch that has been checked (batch.c), with host values. */
typedef struct fv__batch {
    int64_t num_requests, total_rows, total_keys;
    const fv_batch *given;
    const fv__request *requests;        /* [num_requests] */
    const int64_t *tables;              /* [num_requests] place of each request's first page (first token) */
    bool decode;                        /* one row each */
    const int32_t *min_position, *max_position;         /* NULL, or per request over its rows, where row positions are given */
} fv__batch;

/* What the variants' bounds say, resolved for planning. */
typedef struct fv__bounds {
    bool has_first, has_last;
    int64_t first, last;                /* first visible key position >= p + first, last <= p + last */
    bool lifted;                        /* FV_LIFTED lists are given: tile bounds are widened by them */
    const struct fv_ranges *lists[FV__MAX_VARIANTS];      /* variant.h */
    int num_lists;
} fv__bounds;

/* ---- the planner (plan.c; sizes: plan_room.c; segments: segment.c; found prefixes: plan_share.c; arithmetic: plan_cut.h; constants: plan_cost.c;
 * the invariants: plan_valid.c; words and pictures: plan_describe.c) ---- */

/* What maxima need: exact, monotone in every maximum. All sizes 64-bit, checked against overflow. */
typedef struct fv__plan_capacity {
    int64_t max_segments, max_listed_rows, max_page_positions, max_pieces, max_records, max_parts, max_slots, max_requests, max_rows;
    int64_t blob_bytes;                 /* the plan itself */
    int64_t temp_bytes;                 /* host memory that fv__plan_make works in */
    bool bits;                          /* a FV_BITS parameter: bits_offsets are kept */
    bool row_records;                   /* max_levels > 1 */
} fv__plan_capacity;

fv_status fv__plan_capacity_of(const fv__kernel_shape *shape, const fv_plan_desc *limits, bool bits, fv__plan_capacity *out,
                               fv_error *err);

/* What a plan came out as, for fv_plan_query. */
typedef struct fv__plan_report {
    int64_t total_cost, max_worker_cost, kv_tokens_read;        /* keys x kv heads read, once per piece */
    int64_t score_pairs;                /* (row, q head, key) by the bounds */
    int64_t num_shared_segments;
} fv__plan_report;

typedef struct fv__planner {
    const fv__kernel_shape *shape;
    const fv_plan_desc *limits;
    const fv__plan_capacity *capacity;
    void *temp;                         /* capacity->temp_bytes, 64-byte aligned */
} fv__planner;

/* Makes segments (short form, given, found prefixes), cuts them, shares them out, lays out merges. Allocates nothing; writes into `blob`
 * (capacity->blob_bytes, 64-byte aligned). FV_E_CAPACITY and FV_E_INVALID name the field of fv_batch or fv_plan_desc. */
fv_status fv__plan_make(const fv__planner *planner, const fv__batch *batch, const fv__bounds *bounds, fv__plan_head *blob,
                        fv__plan_report *report, fv_error *err);

/* The invariants by number; 0: valid, else the number of the first that is broken (reason in words in `why`), -1: no memory to tell. bounds NULL, or row
 * positions or lists that lift bounds given: visibility is not checked. Allocates: for tests and debug builds. */
int fv__plan_is_valid(const fv__plan_head *plan, const fv__kernel_shape *shape, const fv__bounds *bounds, char *why, size_t size);

/* Cost of a piece, and of each worker, from the same model. */
int64_t fv__plan_piece_cost(const fv__plan_head *plan, const fv__kernel_shape *shape, const fv__piece *piece);
void fv__plan_worker_costs(const fv__plan_head *plan, const fv__kernel_shape *shape, int64_t *out);

/* Text or SVG. Returns the bytes needed with NUL, writes at most `size`. */
size_t fv__plan_describe(const fv__plan_head *plan, const fv__kernel_shape *shape, const fv__plan_report *report, bool svg, char *buffer,
                         size_t size);

extern const fv__cost_model fv__cost_cpu;           /* one per kind of device: vector units */
extern const fv__cost_model fv__cost_cpu_amx;       /* matrix tiles for bf16 and int8 */
extern const fv__cost_model fv__cost_sm80;
extern const fv__cost_model fv__cost_sm90;

#endif
