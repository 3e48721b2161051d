/* SPDX-License-Identifier: Apache-2.0 */
/* os.h -- the whole operating system surface of the core: CPUs, clock, whole files, page-aligned memory. Preconditions: none of these may be given NULL unless it says so. */
#ifndef FV__OS_H
#define FV__OS_H

#include "core.h"

int fv__os_num_cpus(void);              /* CPUs this process may use: affinity mask and cgroup quota, >= 1 */
int64_t fv__os_now_ns(void);            /* monotonic */
const char *fv__os_env(const char *name);       /* NULL: not set or empty */

/* An ELF file that ends before what its segments say is in it: the loader maps it all the same, and whoever touches the rest is killed. False for
 * what is no such file: the loader says so. */
bool fv__os_is_cut_off(int fd);

/* Memory through the caller's allocator (NULL: malloc), aligned to 64 bytes, not cleared. NULL: out of memory. Freed with the same size. */
void *fv__os_alloc(const fv_allocator *allocator, size_t bytes);
void fv__os_free(const fv_allocator *allocator, void *memory, size_t bytes);

/* For tests: the n-th allocation from now on fails (0: never). */
extern long fv__os_fail_at;

#endif
