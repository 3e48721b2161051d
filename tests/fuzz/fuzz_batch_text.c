/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_batch_text.c -- any bytes as a batch in words: refused with a line and words, or arrays that
 * hold together. */
#include "batch_text.h"
#include "cli.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool holds)
{
    if (!holds)
        abort();
}

static void use_arrays(const batch_text *b, const batch_arrays *a)
{
    require(a->num_requests >= 1 && a->num_requests <= BATCH_MAX_REQUESTS);
    require(a->rows[0] == 0 && a->rows[a->num_requests] == a->total_rows &&
            a->total_rows <= BATCH_MAX_ROWS);
    require(a->page_indptr[0] == 0 && a->page_indptr[a->num_requests] == a->total_pages &&
            a->total_pages <= BATCH_MAX_PAGES);
    for (int64_t i = 0; i < a->num_requests; i++) {
        require(a->rows[i] <= a->rows[i + 1]);
        require((a->page_indptr[i + 1] - a->page_indptr[i]) == div_up(a->lengths[i], b->page_size));
    }
    for (int64_t i = 0; i < a->total_pages; i++)
        require(a->page_ids[i] >= 0 && a->page_ids[i] < a->num_pages);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = need(size + 1, 1);
    batch_text b;
    batch_arrays a;
    batch_text_error err = { 0 };
    if (size)
        memcpy(text, data, size);
    if (batch_text_read(text, size, &b, &err)) {
        batch_text_unfold(&b, &a);
        use_arrays(&b, &a);
        batch_arrays_free(&a);
        batch_text_free(&b);
    } else {
        require(err.line >= 1 && !strncmp(err.text, "expected ", 9) && b.requests == NULL);
    }
    free(text);
    return 0;
}
