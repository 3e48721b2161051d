/* SPDX-License-Identifier: Apache-2.0 */
/* batch_text.h -- a batch as a small text file, for foveal plan (docs/cli.md describes the format).
 *
 *     heads 32/8                      query heads / KV heads
 *     dim 128                         width of a head; "dim 192 v=128" where values differ
 *     dtype bf16                      of q and o, and of K and V unless kv-dtype is given
 *     kv-dtype int8
 *     page-size 16
 *     variant window left=4095        any number of variants, in order, each with its numbers
 *     run system keys=4096            a named run of pages that requests may begin with
 *     request rows=1 keys=4160 begins=system count=16
 *
 * One statement a line; what follows # is a comment. Strict: what is not known is refused with
 * its line.
 */
#ifndef BATCH_TEXT_H
#define BATCH_TEXT_H

#include "foveal/foveal.h"

enum {
    BATCH_MAX_VARIANTS = 8,
    BATCH_MAX_ARGS = 8,
    BATCH_MAX_RUNS = 256,
    BATCH_MAX_REQUESTS = 65536,         /* counts included */
    BATCH_MAX_ROWS = 1 << 22,
    BATCH_MAX_KEYS = 1 << 24,           /* of a request, and of a run */
    BATCH_MAX_PAGES = 1 << 22,          /* page table entries, and pages */
    BATCH_NAME = 32,
};

typedef struct batch_variant {
    char name[BATCH_NAME];
    char arg_names[BATCH_MAX_ARGS][BATCH_NAME];
    double numbers[BATCH_MAX_ARGS];
    int num_args;
    int64_t line;
} batch_variant;

typedef struct batch_run {
    char name[BATCH_NAME];
    int64_t keys, line;
} batch_run;

typedef struct batch_request {
    int64_t rows, keys, count, line;
    int run;                            /* -1: none */
} batch_request;

typedef struct batch_text {
    int64_t q_heads, kv_heads, dim_qk, dim_v, page_size;
    int64_t heads_line, dim_line, dtype_line, kv_dtype_line;    /* 0: not said in the text */
    char dtype[BATCH_NAME], kv_dtype[BATCH_NAME];
    batch_variant variants[BATCH_MAX_VARIANTS];
    int num_variants;
    batch_run runs[BATCH_MAX_RUNS];
    int num_runs;
    batch_request *requests;            /* as written, counts not unfolded */
    int64_t num_requests, room;
} batch_text;

typedef struct batch_text_error {
    int64_t line;
    char text[200];                     /* what was expected */
} batch_text_error;

/* The arrays of an fv_batch, unfolded. */
typedef struct batch_arrays {
    int64_t num_requests, total_rows, total_keys, total_pages, num_pages;
    int32_t *rows, *lengths, *page_indptr, *page_ids;
} batch_arrays;

bool batch_text_read(const char *text, size_t size, batch_text *out, batch_text_error *err);
void batch_text_free(batch_text *b);

/* Reads a file ("-": standard input): CLI_OK, or prints and returns the exit code. */
int batch_text_load(const char *path, batch_text *out);

/* The line that says what the library's field ("problem.variants[0]...") holds; 0: none does. */
int64_t batch_text_line(const batch_text *b, const char *field);

/* The library refused what the text says; prints its words behind FILE:LINE (line 0: behind FILE).
 * Returns the exit code. */
int batch_text_refused(const char *path, int64_t line, const fv_error *err);

/* What a problem made of a text points to, beside the text itself. */
typedef struct batch_uses {
    fv_variant_use uses[BATCH_MAX_VARIANTS];
    fv_arg args[BATCH_MAX_VARIANTS][BATCH_MAX_ARGS];
} batch_uses;

fv_problem batch_text_problem(const batch_text *b, batch_uses *uses);

void batch_text_unfold(const batch_text *b, batch_arrays *out);
void batch_arrays_free(batch_arrays *a);

#endif
