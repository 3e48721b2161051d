/* SPDX-License-Identifier: Apache-2.0 */
/* progress.h -- a bar on standard error while something takes long; nothing when that is not a
 * terminal. */
#ifndef PROGRESS_H
#define PROGRESS_H

#include <stdbool.h>

typedef struct progress {
    bool shown;
    double start, last;                 /* cli_now */
} progress;

progress progress_begin(void);
void progress_show(progress *p, double share, const char *about);   /* at most ten times a second */
void progress_end(progress *p);         /* wipes it */

#endif
