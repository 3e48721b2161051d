/* SPDX-License-Identifier: Apache-2.0 */
/* levels.h -- for cmocka tests of calls that every CPU level must do alike: a context for each level that the machine has, what a call must say, and
 * numbers that are the same in each run. Included behind <cmocka.h>. */
#ifndef LEVELS_H
#define LEVELS_H

#include "cpu/cpu.h"

#include <string.h>

enum { MAX_LEVELS = 8 };

/* One context per level of the machine, by rank; they differ in their threads, too. */
static fv_ctx *levels[MAX_LEVELS];
static int num_levels;
static fv_error err;

static int open_levels(void **state)
{
    (void)state;
    for (int i = 0; i < fv__cpu_isa_count(); i++) {
        const fv__cpu_isa *isa = fv__cpu_isa_at(i);
        if (!isa->available()) continue;
        if (fv_open(&(fv_open_desc){ .device = "cpu",
                                     .cpu_isa = isa->name,
                                     .num_threads = 1 + num_levels },
                    &levels[num_levels], &err) != FV_OK)
            return 1;
        num_levels++;
    }
    return num_levels == 0;
}

static int close_levels(void **state)
{
    (void)state;
    for (int i = 0; i < num_levels; i++)
        if (fv_close(&levels[i]) != FV_OK) return 1;
    return 0;
}

#include "asked.h"

static uint32_t seed = 1;

static uint32_t draw(void)
{
    seed = seed * 1664525 + 1013904223;
    return seed >> 4;
}

static int below(int n) { return (int)(draw() % (uint32_t)n); }

static double noise(void) { return (double)((int)(draw() % 4097) - 2048) / 1024; }

#endif
