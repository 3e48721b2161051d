/* SPDX-License-Identifier: Apache-2.0 */
/* trace.h -- requests of a real service: when each came, how many tokens it brought, how many it
 * was given.
 *
 * Two formats, told apart by their first character (behind the mark of UTF-8, where there is one):
 *   Azure     CSV, header TIMESTAMP,ContextTokens,GeneratedTokens, then lines like
 *             2023-11-16 18:15:46.6805900,374,44
 *   Mooncake  one JSON object a line: {"timestamp": ms, "input_length": n, "output_length": m,
 *             "hash_ids": [...]}, one hash id for every 512 tokens of input. Equal ids mean equal
 *             tokens (and equal tokens before them)
 *
 * Readers are strict: a line that is not exactly this is refused with its number and what was
 * expected there.
 */
#ifndef TRACE_H
#define TRACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TRACE_BLOCK 512                 /* tokens for each hash id */
#define TRACE_MAX_TOKENS (1 << 24)      /* of a request's input, and of its output */

typedef struct trace_request {
    double arrival;                     /* seconds since the first request */
    int64_t input, output;              /* tokens; input >= 1, output >= 0 */
    int64_t block_first, num_blocks;    /* its entries of trace.blocks; none without hash ids */
    int64_t line;                       /* of the file, from 1 */
} trace_request;

typedef struct trace {
    const char *format;                 /* "Azure CSV", "Mooncake JSONL"; static */
    trace_request *requests;
    int64_t count;
    uint64_t *blocks;                   /* chained: a block's value stands for all tokens up to its
                                           end */
    int64_t num_blocks;
    int64_t left_out;                   /* requests that were read but are longer than asked for */
} trace;

typedef struct trace_error {
    int64_t line;                       /* from 1 */
    char text[240];                     /* what was expected */
    bool too_long;                      /* every request was read, and left out for its length: the file is not malformed */
} trace_error;

/* Reads a file's text (NUL behind its end) until max_requests requests of at most max_tokens (input
 * and output) are found; longer ones are left out. On failure *out is empty. */
bool trace_read(const char *text, size_t size, int64_t max_requests, int64_t max_tokens, trace *out,
                trace_error *err);
void trace_free(trace *t);

/* What stands at token `position` of request r, as a number: equal for two requests whose tokens
 * are equal by their hash ids up to there. Tokens that the trace says nothing about (no hash ids,
 * generated ones) are the request's own. */
uint64_t trace_token(const trace *t, int64_t r, int64_t position);

/* Keys of the full pages of r's input, for fv_cache: hashes of all tokens up to each page's end.
 * Writes input / page_size of them, or none where the trace has no hash ids; returns how many. */
int64_t trace_page_keys(const trace *t, int64_t r, int64_t page_size, uint64_t *keys);

#endif
