/* SPDX-License-Identifier: Apache-2.0 */
/* progress.c -- see progress.h. */
#include "progress.h"
#include "cli.h"

#include <math.h>
#include <unistd.h>

progress progress_begin(void)
{
    return (progress){ .shown = isatty(STDERR_FILENO), .start = cli_now() };
}

void progress_show(progress *p, double share, const char *about)
{
    enum { WIDTH = 28 };
    const double now = cli_now();
    if (!p->shown || now - p->last < 0.1)
        return;
    p->last = now;
    share = fmin(1, fmax(0, share));
    const int full = (int)(share * WIDTH);
    const double left = share > 0.01 ? (now - p->start) * (1 - share) / share : 0;
    fprintf(stderr, "\r[%.*s%.*s] %3.0f %%  %s", full, "############################", WIDTH - full,
            "............................", 100 * share, about);
    if (left > 0)
        fprintf(stderr, ", %.0f s left", left);
    fputs("\033[K", stderr);
    fflush(stderr);
}

void progress_end(progress *p)
{
    if (p->shown)
        fputs("\r\033[K", stderr);
    p->shown = false;
}
