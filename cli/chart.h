/* SPDX-License-Identifier: Apache-2.0 */
/* chart.h -- charts as inline SVG: values over intervals, stacked or alone. No script, no network;
 * the page's style sheet gives colours by class (s1..s4, grid, axis, hit), so that light and dark
 * are the page's affair. */
#ifndef CHART_H
#define CHART_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#define CHART_MAX_SERIES 4

typedef enum chart_unit { CHART_NUMBER, CHART_BYTES } chart_unit;

/* Where there are more intervals than columns, a column shows ... */
typedef enum chart_fold {
    CHART_MEAN,                         /* the mean over the time that its intervals cover */
    CHART_HIGHEST,                      /* the interval whose series add up to the most */
} chart_fold;

typedef struct chart {
    const char *title, *about;          /* about: a sentence under the title */
    const char *x_label, *y_label;      /* with units */
    const char *x_unit, *y_unit;        /* behind numbers in hover texts; y_unit is not used with
                                           CHART_BYTES */
    const double *begin, *end;          /* [count] intervals, ascending */
    int64_t count;
    int num_series;
    struct {
        const char *name;
        const double *y;                /* [count], >= 0 */
    } series[CHART_MAX_SERIES];         /* stacked, the first at the bottom */
    chart_unit unit;
    chart_fold fold;
} chart;

/* A <figure>. */
void chart_write(FILE *out, const chart *c);

/* "1.5 GiB", "12.3k", "0.012" */
void chart_number(double x, chart_unit unit, char *out, size_t size);

#endif
