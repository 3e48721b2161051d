/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_trace.c -- any bytes as a trace: refused with a line and words, or a trace whose numbers
 * hold together. */
#include "cli.h"
#include "trace.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool holds)
{
    if (!holds)
        abort();
}

static void use_request(const trace *t, int64_t r)
{
    static const int64_t page_sizes[] = { 16, 48, 512, 1000 };
    const trace_request *q = &t->requests[r];
    require(q->input >= 1 && q->input <= TRACE_MAX_TOKENS && q->output >= 0 &&
            q->output <= TRACE_MAX_TOKENS);
    require(q->arrival >= 0 && (r == 0 || q->arrival >= t->requests[r - 1].arrival));
    require(q->num_blocks == 0 || q->num_blocks == div_up(q->input, TRACE_BLOCK));
    require(q->block_first >= 0 && q->block_first + q->num_blocks <= t->num_blocks);
    (void)trace_token(t, r, 0);
    (void)trace_token(t, r, q->input - 1);
    (void)trace_token(t, r, q->input);
    for (size_t i = 0; i < sizeof page_sizes / sizeof page_sizes[0]; i++) {
        uint64_t *keys = need((size_t)(q->input / page_sizes[i]), sizeof *keys);
        const int64_t n = trace_page_keys(t, r, page_sizes[i], keys);
        require(n == 0 || n == q->input / page_sizes[i]);
        free(keys);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = need(size + 1, 1);
    trace t;
    trace_error err = { 0 };
    if (size)
        memcpy(text, data, size);
    if (trace_read(text, size, INT64_MAX, size % 2 ? INT64_MAX : 1000, &t, &err)) {
        require(t.count > 0);
        for (int64_t r = 0; r < t.count && r < 64; r++)
            use_request(&t, r);
        trace_free(&t);
    } else {
        require(err.line >= 1 && !strncmp(err.text, "expected ", 9) && t.requests == NULL &&
                t.blocks == NULL);
    }
    free(text);
    return 0;
}
