/* SPDX-License-Identifier: Apache-2.0 */
/* stats.h -- a growing list of measurements, and its percentiles. */
#ifndef STATS_H
#define STATS_H

#include <stdint.h>

typedef struct sample {
    double *x;
    int64_t count, room;
} sample;

void sample_add(sample *s, double x);
void sample_free(sample *s);

/* The value below which `percent` of 100 lie, between its two neighbours in proportion; 0 for no
 * measurement. Sorts the sample. */
double sample_percentile(sample *s, double percent);
double sample_sum(const sample *s);

#endif
