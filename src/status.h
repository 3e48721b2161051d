/* SPDX-License-Identifier: Apache-2.0 */
/* status.h -- how a call fails: one line at the place that found out. */
#ifndef FV__STATUS_H
#define FV__STATUS_H

#include "core.h"

/* Fills *err (may be NULL) and returns `status`. `field` as the caller knows it ("batch.lengths[3]"). */
fv_status fv__fail(fv_error *err, fv_status status, const char *field, int64_t value, int64_t limit, const char *format, ...)
    __attribute__((format(printf, 6, 7)));

/* The same about one request. */
fv_status fv__fail_request(fv_error *err, fv_status status, const char *field, int64_t request, int64_t value, int64_t limit,
                           const char *format, ...) __attribute__((format(printf, 7, 8)));

#define FV_TRY(call)                                                                                                   \
    do {                                                                                                               \
        const fv_status fv__try_status = (call);                                                                       \
        if (fv__try_status != FV_OK) return fv__try_status;                                                            \
    } while (0)

/* Reserved words must be zero. */
fv_status fv__check_reserved0(int32_t word, const char *field, fv_error *err);
fv_status fv__check_reserved(const uint64_t *words, int count, const char *field, fv_error *err);

#endif
