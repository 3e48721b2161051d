/* SPDX-License-Identifier: Apache-2.0 */
/* stats.c -- see stats.h. */
#include "stats.h"
#include "cli.h"

#include <stdlib.h>

void sample_add(sample *s, double x)
{
    if (s->count == s->room) {
        s->room = s->room ? 2 * s->room : 64;
        s->x = need_more(s->x, (size_t)s->room, sizeof *s->x);
    }
    s->x[s->count++] = x;
}

void sample_free(sample *s)
{
    free(s->x);
    *s = (sample){ 0 };
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double sample_percentile(sample *s, double percent)
{
    if (s->count == 0)
        return 0;
    qsort(s->x, (size_t)s->count, sizeof *s->x, compare);
    const double place = percent / 100 * (double)(s->count - 1);
    const int64_t i = (int64_t)place;
    const double next = s->x[min_i64(i + 1, s->count - 1)];
    return s->x[i] + (place - (double)i) * (next - s->x[i]);
}

double sample_sum(const sample *s)
{
    double sum = 0;
    for (int64_t i = 0; i < s->count; i++)
        sum += s->x[i];
    return sum;
}
