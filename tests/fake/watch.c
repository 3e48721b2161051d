/* SPDX-License-Identifier: Apache-2.0 */
/* watch.c -- linked with cuda.c into a driver that shows each launch to a test, while it runs. */
#include <stddef.h>

static void (*watcher)(const char *name, const void *parameter);

void fake_watch(void (*fn)(const char *name, const void *parameter)) { watcher = fn; }

void fake_play(const char *name, const unsigned *grid, const unsigned *block, void **parameters)
{
    (void)grid, (void)block;
    if (watcher) watcher(name, parameters[0]);
}
