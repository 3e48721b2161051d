/* SPDX-License-Identifier: Apache-2.0 */
/* idle.h -- does a process that has nothing to do use no CPU? */
#ifndef FOVEAL_TESTS_IDLE_H
#define FOVEAL_TESTS_IDLE_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

static inline int64_t idle_cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* Over 200 ms, less than a hundredth of one CPU; a thread that spins uses all of it. Asked until it is so, for ten seconds, so that a slow machine does
 * not fail. */
static inline bool becomes_idle(void)
{
    for (int tries = 0; tries < 50; tries++) {
        const int64_t before = idle_cpu_ns();
        nanosleep(&(struct timespec){ .tv_nsec = 200000000 }, NULL);
        if (idle_cpu_ns() - before < 2000000) return true;
    }
    return false;
}

#endif
