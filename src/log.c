/* SPDX-License-Identifier: Apache-2.0 */
/* log.c -- one line at a time, to the caller's function or to standard error. A callback gets every
 * level and chooses for itself. */
#include "log.h"
#include "os.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const char *const level_names[] = { "off", "error", "warn", "info", "debug" };

static fv_log_level level_from_environment(void)
{
    const char *name = fv__os_env("FV_LOG");
    for (int i = 0; name && i < FV__COUNT(level_names); i++)
        if (!strcmp(name, level_names[i])) return (fv_log_level)i;
    return FV_LOG_WARN;
}

void fv__log_init(fv__log *log, fv_log_fn *fn, void *user)
{
    log->fn = fn;
    log->user = user;
    log->level = fn ? FV_LOG_DEBUG : level_from_environment();
}

void fv__log_line(const fv__log *log, fv_log_level level, const char *format, ...)
{
    if (level > log->level) return;
    char line[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(line, sizeof line, format, list);
    va_end(list);
    if (log->fn)
        log->fn(log->user, level, line);
    else
        fprintf(stderr, "foveal: %s: %s\n", level_names[level],
                line); /* one call, so that lines of threads do not mix */
}
