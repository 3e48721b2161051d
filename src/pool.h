/* SPDX-License-Identifier: Apache-2.0 */
/* pool.h -- worker threads: parallel_for with the caller taking part, short spin then sleep, no CPU used when idle, safe to fork (the child starts
 * its own threads on first use), several callers at once take turns. */
#ifndef FV__POOL_H
#define FV__POOL_H

#include "core.h"

typedef struct fv__pool fv__pool;

fv__pool *fv__pool_create(int num_threads, const fv_allocator *allocator);      /* threads start on first use; NULL: out of memory */
void fv__pool_destroy(fv__pool *pool);
void fv__pool_run(fv__pool *pool, void (*fn)(void *arg, int i), void *arg, int count);

#endif
