/* SPDX-License-Identifier: Apache-2.0 */
/* status.c -- the one way in which a call fails. */
#include "status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void fill(fv_error *err, fv_status status, const char *field, int64_t request, int64_t value,
                 int64_t limit)
{
    memset(err, 0, sizeof *err);
    err->status = status;
    err->request = request;
    err->value = value;
    err->limit = limit;
    snprintf(err->field, sizeof err->field, "%s", field ? field : "");
}

fv_status fv__fail(fv_error *err, fv_status status, const char *field, int64_t value, int64_t limit,
                   const char *format, ...)
{
    if (!err) return status;
    fill(err, status, field, -1, value, limit);
    va_list list;
    va_start(list, format);
    vsnprintf(err->text, sizeof err->text, format, list);
    va_end(list);
    return status;
}

fv_status fv__fail_request(fv_error *err, fv_status status, const char *field, int64_t request,
                           int64_t value, int64_t limit, const char *format, ...)
{
    if (!err) return status;
    fill(err, status, field, request, value, limit);
    va_list list;
    va_start(list, format);
    vsnprintf(err->text, sizeof err->text, format, list);
    va_end(list);
    return status;
}

fv_status fv__check_reserved(const uint64_t *words, int count, const char *field, fv_error *err)
{
    for (int i = 0; i < count; i++)
        if (words[i])
            return fv__fail(err, FV_E_INVALID, field, (int64_t)words[i], 0,
                            "%s: word %d is %llu and must be 0: zero-initialise the descriptor",
                            field, i, (unsigned long long)words[i]);
    return FV_OK;
}

fv_status fv__check_reserved0(int32_t word, const char *field, fv_error *err)
{
    if (!word) return FV_OK;
    return fv__fail(err, FV_E_INVALID, field, word, 0,
                    "%s is %d and must be 0: zero-initialise the descriptor", field, (int)word);
}
