/* SPDX-License-Identifier: Apache-2.0 */
/* cases.h -- case rows: situations in which an attention engine went wrong, as text
 * (cases/README.md).
 *
 * A case_file owns its rows and everything they point to. cases.c parses (strictly: what the page
 * does not list is an error with file and line), cases_gen.c makes the numbers and asks ref.c for
 * the answer, cases_ways.c spreads a row over its axes: a way is one point of them.
 */
#ifndef FOVEAL_TESTS_CASES_H
#define FOVEAL_TESTS_CASES_H

#include "ref.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CASE_DTYPE_F16, CASE_DTYPE_BF16, CASE_DTYPE_F32, CASE_DTYPES };
enum { CASE_KV_SAME, CASE_KV_E4M3, CASE_KV_E5M2, CASE_KV_FP4G16, CASE_KV_INT4G32, CASE_KV_INT4G64, CASE_KVS };
enum { CASE_MEM_PAGED, CASE_MEM_RAGGED, CASE_MEMS };
enum { CASE_LAYOUT_NHD, CASE_LAYOUT_HND, CASE_LAYOUTS };
enum {
    CASE_PLACE_IDENTITY,
    CASE_PLACE_REVERSED,
    CASE_PLACE_RANDOM,
    CASE_PLACE_SCATTERED,
    CASE_PLACES
};
enum {
    CASE_VIEW_CONTIG,
    CASE_VIEW_KVPAGE,
    CASE_VIEW_KVTOKEN,
    CASE_VIEW_QSLICE,
    CASE_VIEW_OPAD,
    CASE_VIEW_LAYERS32,
    CASE_VIEW_OFF2,
    CASE_VIEW_OFF4,
    CASE_VIEW_OFF8,
    CASE_VIEW_HS0,
    CASE_VIEW_HS1,
    CASE_VIEW_HSBIG,
    CASE_VIEW_MIXED,
    CASE_VIEWS
};
enum { CASE_LSE_TH, CASE_LSE_HT, CASE_LSES };
enum { CASE_DATA_GEN, CASE_DATA_ZERO, CASE_DATA_CONST };
enum { CASE_SAME_PAGE = 1, CASE_SAME_REQUEST = 2, CASE_SAME_SPLIT = 4 };
enum { CASE_SPLITS_AUTO = 0 };

extern const char *const case_dtype_names[CASE_DTYPES], *const case_kv_names[CASE_KVS];
extern const char *const case_mem_names[CASE_MEMS], *const case_layout_names[CASE_LAYOUTS];
extern const char *const case_place_names[CASE_PLACES], *const case_view_names[CASE_VIEWS];
extern const char *const case_lse_names[CASE_LSES];

typedef struct case_ints {
    int32_t *at;
    int64_t n;
} case_ints;

typedef struct case_ranges {
    ref_range *at;
    int n;
} case_ranges;

/* Element (token, head, dim) becomes `value`; -1 stands for every one. */
typedef struct case_set {
    int32_t token, head, dim;
    double value;
} case_set;

typedef struct case_sets {
    case_set *at;
    int n;
} case_sets;

typedef struct case_data {
    int kind;                           /* CASE_DATA_ */
    double value;                       /* of CASE_DATA_CONST */
} case_data;

typedef struct case_lines {             /* bits, block_map, state_empty: digits as they stand */
    char **at;
    int64_t n;
} case_lines;

typedef struct case_share {
    int from;                           /* earlier request, -1: nothing shared */
    int32_t keys;
} case_share;

typedef struct case_fault {
    char *changes;                      /* KEY=VALUE[;KEY=VALUE...] */
    double mo;
    char *words;
} case_fault;

/* What the engine can do beyond the page; keys x_NAME, read only when the caller of case_parse
 * allows them. */
typedef struct case_extra {
    int rope_dim;                       /* x_rope: rotary elements; 0: none */
    bool interleaved;                   /* x_interleaved: pairs (2i, 2i+1) */
    case_ints tree;                     /* x_tree: parent of each row (row of its request, -1),
                                           all requests */
    case_ints first;                    /* x_first: position of key 0 of each request */
    int tail;                           /* x_tail: last elements of dk that lie in tensors of
                                           their own */
    bool int8;                          /* x_int8: K and V are int8; stored element = kv_grid * G */
    bool key_sums;                      /* x_key_sums: the second output */
    bool head_scales;                   /* x_head_scales: stored elements of KV head h times 2^(h
                                           mod 3 - 1) */
    bool v_ids;                         /* x_v_ids: V's pages have other ids than K's */
    bool tiled;                         /* x_tiled: pages are in the order "tiles"; mem=paged, and
                                           pages, dims and types that have it */
    case_ranges bad;                    /* x_bad: tokens (over all requests) on pages whose ids name no page; of V's
                                           ids alone in each second entry of a table, with x_v_ids */
} case_extra;

typedef struct case_pair {              /* one line of the file */
    char *key, *value;
    int line;
} case_pair;

typedef struct case_row {
    char *id, *cls, *pain, *ref, *note;
    int line;

    bool merge;                         /* op=merge: only tokens, hq, dv, states and the anchors
                                           count */
    case_ints q, kv;
    int num_requests;
    int hq, hk, dk, dv;
    bool mla;
    double sm_scale;
    int causal;
    int window_left, window_right;
    double softcap;
    bool alibi, has_sink;
    double sink_a, sink_b;
    case_lines bits;
    bool diag;
    case_ranges key_ranges, bidir;      /* at NULL: none */
    case_ints items;
    case_lines block_map;
    case_ints block_rows, block_cols;

    double q_amp;
    int kv_grid;
    case_data qdata, kdata, vdata;
    case_sets qset, kset, vset;
    bool q_same;
    case_share *share;                  /* [num_requests] or NULL */

    unsigned dtype, mem, layout, placement, view, lse_layout;   /* sets of 1 << CASE_... */
    int kv_dtype;
    double k_scale, v_scale;
    bool token_head_scales;
    case_ints page, pages, splits;      /* splits: CASE_SPLITS_AUTO for auto */
    int64_t first_page, page_stride;    /* -1: not given */
    int table_width;                    /* -1: need + 1 */
    int64_t pad_id;                     /* valid if has_pad_id */
    bool has_pad_id;
    int pad_rows, lse_pad;

    int repeat, check;
    unsigned same_bits;                 /* set of CASE_SAME_ */
    int ulp;                            /* -1: use the tolerance */
    bool poison_left, heavy;
    case_ints cut;

    int tokens, states;
    case_lines state_empty;
    bool inplace;

    double mo, o, l;                    /* anchors; valid if has_ */
    bool has_mo, has_o, has_l;
    int64_t n_empty;
    double *part_l;
    int num_part_l;
    case_fault *faults;
    int num_faults;

    case_extra x;

    int64_t total_q, total_kv;          /* sums of q and kv */
    int64_t *q_base, *kv_base;          /* [num_requests + 1] first row and first token of each
                                           request */

    case_pair *pairs;                   /* the row's lines, for case_apply_fault */
    int num_pairs;
    struct case_file *file;
} case_row;

typedef struct case_file {
    char *name;
    bool extended;
    case_row *rows;
    int num_rows;
    void *blocks;                       /* everything the rows own, freed at once */
} case_file;

/* Reads and checks a file. extended: keys x_NAME are legal. NULL: `message` (of `size` bytes)
 * says where and why. */
case_file *case_read(const char *path, bool extended, char *message, size_t size);

/* The same from memory; `name` is used in messages. */
case_file *case_parse(const char *name, const char *text, size_t length, bool extended,
                      char *message, size_t size);

void case_free(case_file *file);

/* The row with the changes of fault `i`; its memory belongs to the row's file. False: `message`
 * says why. */
bool case_apply_fault(const case_row *row, int i, case_row *out, char *message, size_t size);

/* ---- cases_gen.c: the numbers of a row, as the page defines them ---- */

uint32_t case_hash(uint32_t seed, uint32_t i);
double case_g(uint32_t seed, uint32_t i, int grid);

/* Elements as stored (before scales). `token` counts over all requests: case_q_token and
 * case_kv_token find it. */
double case_q(const case_row *row, int64_t token, int head, int dim);
double case_k(const case_row *row, int64_t token, int head, int dim);
double case_v(const case_row *row, int64_t token, int head, int dim);     /* not for mla */

int64_t case_q_token(const case_row *row, int request, int64_t i);
int64_t case_kv_token(const case_row *row, int request, int64_t key);

/* Is the key on a page that x_bad takes away? */
bool case_bad(const case_row *row, int request, int64_t key);

/* Position of key 0 of a request: 0 unless x_first says otherwise. */
int64_t case_first_position(const case_row *row, int request);

/* The f32 frequency of a rotary pair: 10000^(-2 pair / dim). */
float case_frequency(int dim, int pair);

/* What the stored element times: tensor scale and, if the row has them, scale per token and
 * head. */
double case_k_factor(const case_row *row, int64_t token, int head);
double case_v_factor(const case_row *row, int64_t token, int head);
double case_head_scale(int head);
double case_k_token_scale(int64_t token, int head);
double case_v_token_scale(int64_t token, int head);

/* The generated 4-bit code and group scale of K (seed 2) or V (seed 3). */
int case_fp4_code(uint32_t seed, uint32_t i);
double case_fp4_scale(uint32_t seed, uint32_t group);
extern const double case_fp4_magnitudes[8];
int case_int4_group(const case_row *row);               /* 32 or 64; 0: other types */
double case_int4_scale(uint32_t seed, uint32_t group);
double case_int4_zero(uint32_t seed, uint32_t group);

/* Merge rows: state s at item (token * hq + head). */
bool case_state_empty(const case_row *row, int state, int64_t item);
double case_state_o(const case_row *row, int state, int64_t item, int dim);
double case_state_lse(const case_row *row, int state, int64_t item);

double case_alibi_slope(const case_row *row, int head);
double case_sink(const case_row *row, int head);

/* The rules of a row for ref.c. case_rules_free releases what `case_rules_make` allocated. */
typedef struct case_rules {
    ref_problem problem;
    double *slope, *sink;
    int64_t *items, *block_rows, *block_cols;
    uint8_t *block_map;
    float *freq;                        /* of rope */
    ref_rope rope;
} case_rules;

bool case_rules_make(const case_row *row, case_rules *out);
void case_rules_free(case_rules *rules);

/* One request for ref.c, keys [lo, hi) of it only. Owns k, v, bits and absent: case_request_free. */
typedef struct case_request {
    ref_request r;
    const case_row *row;
    int index;
    double *k, *v;
    uint8_t *bits, *absent;
} case_request;

bool case_request_make(const case_row *row, const case_rules *rules, int index, int64_t lo,
                       int64_t hi, case_request *out);
void case_request_free(case_request *request);

/* The answer to a row: O and LSE of the compared rows (all, or the first and last `check` of
 * each request). */
typedef struct case_answer {
    int64_t n;                          /* compared rows; for a merge: tokens */
    int64_t *rows;                      /* [n] global row numbers, ascending */
    double *o;                          /* [n][hq][dv] */
    double *lse;                        /* [n][hq], natural */
    double mo;                          /* mean of abs(O) */
    double last_o, last_l;              /* last row, last head: element 0 and LSE */
    int64_t n_empty;
    double *part_l;                     /* [cut.n + 1], NULL without cut */
    double *key_sums;                   /* [total_kv][hk], NULL without x_key_sums */
    struct case_answer *ends;           /* [2] or NULL: o and lse may lie anywhere between these; owned */
} case_answer;

/* kept: how turned queries and keys are stored before they are multiplied (ref_rope); NULL: exactly. */
bool case_solve(const case_row *row, double (*kept)(double), int threads, case_answer *out);
void case_answer_free(case_answer *answer);

/* seen[total_kv]: 1 where a row of the key's own request sees it (by token of the request, not
 * of a shared source). */
uint8_t *case_seen(const case_row *row);

/* ---- cases_ways.c: a row spread over its axes ---- */

/* Paged: CSR with lengths and a spare entry per request; CSR with last-page lengths, i64, every
 * second entry of a longer array; 2-D; 2-D whose rows are named by table_rows. Ragged: offsets
 * alone; offsets with room behind each request, and lengths. */
enum {
    CASE_TABLE_CSR,
    CASE_TABLE_CSR_LAST,
    CASE_TABLE_2D,
    CASE_TABLE_2D_ROWS,
    CASE_TABLE_TIGHT,
    CASE_TABLE_SLACK,
    CASE_TABLES
};
enum { CASE_BASE_E, CASE_BASE_2, CASE_BASES };
enum { CASE_MASK_OWN, CASE_MASK_BITS, CASE_MASKS };
enum { CASE_POISON_NAN, CASE_POISON_INF, CASE_POISON_BIG, CASE_POISONS };
/* How a common prefix is used: not at all, found by the planner, given as segments. */
enum { CASE_SHARING_OFF, CASE_SHARING_FIND, CASE_SHARING_GIVEN, CASE_SHARINGS };
enum { CASE_PADS = 4 };
extern const char *const case_table_names[CASE_TABLES], *const case_base_names[CASE_BASES];
extern const char *const case_mask_names[CASE_MASKS], *const case_poison_names[CASE_POISONS];
extern const char *const case_sharing_names[CASE_SHARINGS];
extern const int64_t case_pad_ids[CASE_PADS];

/* ROOM: a plan's maxima are exactly those of the batch, or larger. */
enum {
    CASE_AXIS_MEM,
    CASE_AXIS_VIEW,
    CASE_AXIS_LAYOUT,
    CASE_AXIS_PAGE,
    CASE_AXIS_SPLITS,
    CASE_AXIS_PLACE,
    CASE_AXIS_TABLE,
    CASE_AXIS_PAD,
    CASE_AXIS_LSE,
    CASE_AXIS_BASE,
    CASE_AXIS_MASK,
    CASE_AXIS_POISON,
    CASE_AXIS_INVARIANT,
    CASE_AXIS_ROOM,
    CASE_AXIS_SHARING,
    CASE_AXES
};
extern const char *const case_axis_names[CASE_AXES];

enum { CASE_VOID = -1 };                /* the value of an axis that the other values leave
                                           without meaning */

/* One way to run a row. Values: CASE_ constants; PAGE and SPLITS: the number itself
 * (CASE_SPLITS_AUTO); PAD: an index of case_pad_ids, or CASE_PADS for the row's own; INVARIANT
 * and ROOM: 0 or 1. */
typedef struct case_way {
    int dtype;
    int property;                       /* CASE_PROPERTY_ that is checked instead of the values */
    int axis[CASE_AXES];
} case_way;

/* In the invariant mode: a request alone, in another order, on other pages and splits; a row
 * decoded alone. */
enum { CASE_PROPERTY_NONE, CASE_PROPERTY_BATCH, CASE_PROPERTY_DECODE, CASE_PROPERTIES };
extern const char *const case_property_names[CASE_PROPERTIES];

typedef struct case_ways {
    case_way *at;
    int n;
    int room;
} case_ways;

/* The ways of a row for one element type. full: the product. Else turns are taken through the
 * axes until every value of each axis and every (page, splits) pair has occurred, or until there
 * are `few` ways, if that is not 0; `turn` says where they start. Free with case_ways_free.
 * False: no memory. */
bool case_ways_make(const case_row *row, int dtype, bool full, unsigned turn, int few,
                    case_ways *out);

/* Adds the ways in which properties of the invariant mode are checked. */
bool case_ways_add_properties(const case_row *row, int dtype, unsigned turn, case_ways *ways);
void case_ways_free(case_ways *ways);

/* A value that the row names but that no way of this type can have; `why` gets the reason. Call
 * with *axis = *value = -1 first, then with what the last call left; false: there is no more. */
bool case_next_void(const case_row *row, int dtype, int *axis, int *value, char *why, size_t size);

/* "f16 paged page=16 splits=8 nhd ..." for people. */
void case_way_print(const case_way *way, char *out, size_t size);

/* The keys that every request has in common with request 0, if all share alike (and may be given
 * as one segment). */
int64_t case_common_prefix(const case_row *row);

/* Does anything but the number of keys decide what a row sees? Then dense bits can say it too. */
bool case_has_mask(const case_row *row);

int64_t case_pad_id(const case_row *row, const case_way *way);

#endif
