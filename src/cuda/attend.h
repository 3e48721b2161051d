/* SPDX-License-Identifier: Apache-2.0 */
/* attend.h -- host half of kernels/attend_sm80.cu: what it accepts, how a problem and its maxima become a configuration, and the text that is
 * compiled. Pure functions: no GPU, no driver, nothing that could fail at a launch. */
#ifndef FV__CUDA_ATTEND_H
#define FV__CUDA_ATTEND_H

#include "../plan.h"
#include "../problem.h"

/* What a device has, bytes and counts. */
typedef struct fv__attend_device {
    int shared_per_block, shared_per_sm, shared_reserved;      /* shared_reserved: of each block, for the system */
    int registers_per_sm, num_sms;
} fv__attend_device;

/* Codes of element.cuh; the same numbers as its FV_F16 .. FV_E2M1. */
typedef enum fv__code { FV__F16, FV__BF16, FV__F32, FV__E4M3, FV__E5M2, FV__INT8, FV__E2M1 } fv__code;

/* How the warps of a block share a tile: 16 m_tiles x warps_rows packed rows, warps_values parts of V's columns, warps_keys parts of the keys. */
typedef struct fv__attend_kind { int m_tiles, warps_rows, warps_values, warps_keys; } fv__attend_kind;

enum { FV__ATTEND_KINDS = 3 };

typedef struct fv__attend_config {
    fv__code q, k, v, o;                /* as the caller has them */
    fv__code score, value;              /* what S and O are multiplied in */
    fv__code k_stored, v_stored;        /* K and V in shared memory */
    bool convert_k, convert_v;          /* they get there element by element */
    bool keys_in_place;                 /* but K as it is: its hook works on pairs in shared memory */
    bool keys_turned;                   /* and turns them by frequencies (FV_TURNS) */
    bool paired;                        /* K and V of a tile are waited for together */
    int look;                           /* tiles whose page ids are looked up at once */
    bool v_in_k, scaled, k_token_scale, v_token_scale, invariant, decode;
    bool key_sums;                      /* a second kernel makes them, from the same text */
    int dim_qk, dim_v, tail;
    int tile, stages, warps, blocks_per_sm;
    int rows, out_rows;                 /* packed rows of the largest kind; rows staged at once on the way out */
    int sum_lines;                      /* warps along the rows, of the kind with the most of them */
    int num_kinds;
    fv__attend_kind kinds[FV__ATTEND_KINDS];
    int unit_heads, units_per_kv_head;
    int slot_floats, scratch_floats;    /* of one slot of partials; of one worker (invariant mode) */
    bool stamps;                        /* clocks in place of lse, for measurements */
    int uses_bytes;                     /* argument structs of all variants, each rounded up to 16 bytes */
    int shared_bytes;                   /* dynamic shared memory of a block */
} fv__attend_config;

/* FV_E_UNSUPPORTED: why not, e.g. how many bytes of shared memory are missing. */
fv_status fv__attend_configure(const fv__problem *problem, const fv_plan_desc *limits, const fv__attend_device *device, fv__attend_config *out,
                               fv_error *err);

/* For measurements: called at the end of fv__attend_configure, may change tile, look, stages, paired, kinds, warps, stamps, and the blocks that are
 * wanted. NULL. */
extern void (*fv__attend_tune)(fv__attend_config *config);

/* What the planner is told. */
void fv__attend_shape(const fv__problem *problem, const fv_plan_desc *limits, const fv__attend_config *config, const fv__attend_device *device,
                      fv__kernel_shape *out);

/* The generated text "uses.cuh": constants, the variants' texts, their hooks composed. malloc'ed; NULL: out of memory. */
char *fv__attend_text(const fv__problem *problem, const fv__attend_config *config);

/* In how many parts it can be compiled at once (0: whole), and the most registers that a thread of it may have: fv__cuda_program. */
void fv__attend_parts(const fv__attend_config *config, const fv__attend_device *device, int32_t *num_parts, int32_t *max_registers);

/* Where the argument struct of use i lies among all of them. */
int fv__attend_use_offset(const fv__problem *problem, int i);

#endif
