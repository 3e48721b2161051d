/* SPDX-License-Identifier: Apache-2.0 */
/* segment.h -- the planner's working state, and the box that turns a batch into segments: the
 * short form (one a request), given segments, and (plan_share.c) found prefixes.
 *
 * Order of segments: a row's segments come in the order in which its parts are merged. Given
 * segments are put into an order of their own (position, place, rows, heads), so the plan does
 * not depend on the order in which the caller lists them. */
#ifndef FV__SEGMENT_H
#define FV__SEGMENT_H

#include "plan.h"
#include "plan_cut.h"
#include "status.h"
#include "tensor.h"
#include "variant.h"

/* What the planner knows about a segment besides what kernels read. */
typedef struct fv__segment_info {
    const int32_t *page_positions;      /* the caller's; NULL: consecutive */
    int32_t num_pages;                  /* entries of page_positions */
    int32_t tile_rows;
    bool joined;                        /* rows of it lie in other segments too (with cells: some) */
    bool ascending;                     /* page_positions ascend */
} fv__segment_info;

/* Rows of a segment with the keys that any of them may see. */
typedef struct fv__tile {
    int64_t start, cost;                /* on the line; of one head unit */
    int32_t segment;
    int32_t row_first, num_rows;        /* within the segment */
    int32_t key_first, key_end;         /* equal: nothing is visible */
    int32_t free_keys;                  /* in front, of the first piece too: for live lengths */
    int32_t parts;                      /* of one item: chunks, or pieces of given splits, or 1 */
    int32_t pieces;                     /* of one item before the line is cut */
    bool joined;
} fv__tile;

/* (row, head unit) of the batch, where segments are given. */
typedef struct fv__cell {
    int32_t level;                      /* of the last segment that holds it, + 1; 0: none does */
    int32_t count;                      /* segments that hold it */
    int32_t end;                        /* positions of their keys end here */
} fv__cell;

/* A set of requests whose page lists begin alike: a node of the prefix tree. */
typedef struct fv__share_node {
    int32_t parent, first_child, next_child;    /* -1: none */
    int32_t member_first, num_members;  /* entries of `members` */
    int32_t begin, end;                 /* keys that all members share: parent's end, own end */
    int32_t num_rows;
    int32_t tiles_saved;                /* row tiles of the members' own less the shared one's */
    int32_t depth;
    bool chosen;
} fv__share_node;

typedef struct fv__share_memory {
    int32_t *slots;                     /* hash table, `num_slots` (a power of two) */
    int64_t num_slots;
    int32_t *heads, *tail, *next;       /* [max_requests] chains of requests */
    int32_t *members, *common;          /* [max_requests] */
    int32_t *begin, *level;             /* [max_requests] what own segments begin with */
    fv__share_node *nodes;              /* [max_requests] */
} fv__share_memory;

typedef struct fv__cut {                /* where the next worker begins */
    int32_t tile, unit;
    int32_t at;                         /* key (or given split) in the item; -1: the item itself */
} fv__cut;

/* One fv__plan_make under way. */
typedef struct fv__maker {
    const fv__planner *planner;
    const fv__kernel_shape *shape;
    const fv__plan_capacity *capacity;
    const fv__batch *batch;
    const fv__bounds *bounds;
    fv_error *err;

    int32_t workers, levels, splits, chunk;     /* splits 0: auto; chunk 0: not invariant */
    int64_t max_segment_rows;
    bool live;                          /* the batch has device lengths */

    fv__plan_head *head;
    fv__segment *segments;              /* in the blob */
    int32_t num_segments;

    /* in temp */
    fv__segment_info *infos;
    fv__listed_row *listed;
    int32_t num_listed;
    fv__tile *tiles;                    /* with keys from the front, without from the back */
    int32_t max_tiles, num_tiles, num_empty;
    fv__cut *cuts;
    int32_t *order, *order2;            /* [max_segments] */
    int32_t *row_request;               /* [max_rows] */
    fv__cell *cells;                    /* [max_rows][cell_units] */
    int32_t cell_units;                 /* 0: no cells; 1: every segment has all heads */
    int32_t *page_slots;                /* hash set of page ids: listed by two segments of a row? */
    int64_t num_page_slots;             /* a power of two */
    fv__share_memory share;
    int32_t bundle, bundle_parts;       /* units that go together, parts that each is cut into; 0: none do */
    int64_t saved;                      /* found prefixes: what the line is shorter than the flat one. 0: nothing is shared */
} fv__maker;

/* What follows from a shape and maxima (plan_room.c): how much of everything there can be. */
typedef struct fv__room {
    int64_t requests, rows, segments, segment_rows, listed, tiles, pieces, records, slots;
    int64_t page_positions, cells, page_slots, hash_slots;
    int64_t given_rows;                 /* rows of all given segments together */
    int32_t workers, levels, splits, chunk, units, together;
    bool share, given;
} fv__room;

fv__room fv__room_of(const fv__kernel_shape *shape, const fv_plan_desc *limits);
/* Places the maker's arrays in `temp`; NULL: only measures. Returns the bytes. */
int64_t fv__room_carve(const fv__room *r, void *temp, fv__maker *m);

/* Writes m->segments, infos and listed rows. */
fv_status fv__segments_make(fv__maker *m);
/* The short form: each request from key 0; or, with NULL for neither, from begin[r] at level[r]. */
void fv__segments_plain(fv__maker *m, const int32_t *begin, const int32_t *level);
/* Found prefixes and what is left of each request. false: nothing to share, nothing written. */
bool fv__segments_share(fv__maker *m);

/* Lays `tile` (segment, row_first, num_rows given) over the keys that the bounds leave. */
void fv__tile_reach(const fv__maker *m, const fv__segment *s, const fv__segment_info *info,
                    fv__tile *tile);
/* (row, key) pairs of the tile that are visible by the bounds. */
int64_t fv__tile_pairs(const fv__maker *m, const fv__segment *s, const fv__segment_info *info,
                       const fv__tile *tile);
int32_t fv__tile_rows(const fv__kernel_shape *shape, int64_t num_rows);

/* What pieces of a tile of so many rows cost. */
static inline fv__cut_cost fv__tile_cost(const fv__maker *m, int32_t num_rows)
{
    const fv__cost_model *c = m->shape->cost;
    const int64_t packed = (int64_t)num_rows * m->shape->unit_heads;
    return (fv__cut_cost){ c->piece + packed * c->row, c->block + packed * c->block_row,
                           packed * c->part };
}

static inline int64_t fv__row_position(const fv__maker *m, int64_t row, int32_t request)
{
    if (m->batch->min_position) return fv__index_at(&m->batch->given->row_positions, row);
    const fv__request *q = &m->batch->requests[request];
    return (int64_t)q->first_position + q->num_keys - q->num_rows + row - q->row_first;
}

static inline int64_t fv__maker_origin(const fv__maker *m, const fv__segment *s,
                                       const fv__segment_info *info)
{
    return m->chunk && !info->page_positions ? s->first_position : 0;
}

static inline fv__listed_row fv__segment_row(const fv__maker *m, const fv__segment *s, int64_t i)
{
    if (s->request < 0) return m->listed[s->row_first + i];
    return (fv__listed_row){ s->row_first + (int32_t)i, s->request };
}

#endif
