/* SPDX-License-Identifier: Apache-2.0 */
/* log.h -- one-line records to the context's callback, or to standard error at the level that FV_LOG names (default warn). */
#ifndef FV__LOG_H
#define FV__LOG_H

#include "core.h"

typedef struct fv__log {
    fv_log_fn *fn;                      /* NULL: standard error */
    void *user;
    fv_log_level level;                 /* 0: silent */
} fv__log;

void fv__log_init(fv__log *log, fv_log_fn *fn, void *user);
void fv__log_line(const fv__log *log, fv_log_level level, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
