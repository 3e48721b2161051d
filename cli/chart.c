/* SPDX-License-Identifier: Apache-2.0 */
/* chart.c -- see chart.h. Coordinates are those of a 960 x 260 box; the page scales it. */
#include "chart.h"
#include "cli.h"

#include <math.h>
#include <stdlib.h>

enum { WIDTH = 960, HEIGHT = 260, LEFT = 84, RIGHT = 12, TOP = 12, BOTTOM = 44, COLUMNS = 200 };

#define PLOT_WIDTH (WIDTH - LEFT - RIGHT)
#define PLOT_HEIGHT (HEIGHT - TOP - BOTTOM)

typedef struct column {
    double begin, end;                  /* of the x axis */
    double y[CHART_MAX_SERIES];
    double covered; /* time that its intervals cover (CHART_MEAN), highest sum (CHART_HIGHEST) */
} column;

typedef struct plot {
    const chart *chart;
    column *columns;
    int64_t count;
    double x_first, x_last, y_top, y_step;
} plot;

void chart_number(double x, chart_unit unit, char *out, size_t size)
{
    static const char *const bytes[] = { "B", "KiB", "MiB", "GiB", "TiB" };
    static const char *const plain[] = { "", "k", "M", "G", "T" };
    const double base = unit == CHART_BYTES ? 1024 : 1000;
    int i = 0;
    for (; fabs(x) >= base * 0.99995 && i < 4; i++)
        x /= base;
    const int places = fabs(x) >= 100 ? 0 : fabs(x) >= 10 ? 1 : fabs(x) >= 1 ? 2 : 3;
    char digits[24];
    int n = (int)min_i64((int64_t)sizeof digits - 1,
                         snprintf(digits, sizeof digits, "%.*f", places, x));
    while (places && digits[n - 1] == '0')
        digits[--n] = 0;
    if (digits[n - 1] == '.')
        digits[--n] = 0;
    snprintf(out, size, "%s%s%s", digits, unit == CHART_BYTES ? " " : "",
             unit == CHART_BYTES ? bytes[i] : plain[i]);
}

/* 1, 2 or 5 times a power of the base's step, so that about four of them reach `top`. */
static double nice_step(double top, chart_unit unit)
{
    const double base = unit == CHART_BYTES ? 2 : 10;
    const double rough = top / 4, power = pow(base, floor(log(rough) / log(base)));
    if (unit == CHART_BYTES)
        return rough / power > 1.25 ? 2 * power : power;
    return rough / power > 5   ? 10 * power
           : rough / power > 2 ? 5 * power
           : rough / power > 1 ? 2 * power
                               : power;
}

/* ---- folding intervals into columns ---- */

static double sum_at(const chart *c, int64_t i)
{
    double sum = 0;
    for (int s = 0; s < c->num_series; s++)
        sum += c->series[s].y[i];
    return sum;
}

static void fold_into(column *to, const chart *c, int64_t i, double overlap)
{
    if (c->fold == CHART_MEAN) {
        for (int s = 0; s < c->num_series; s++)
            to->y[s] += overlap * c->series[s].y[i];
        to->covered += overlap;
    } else if (sum_at(c, i) >= to->covered) {
        for (int s = 0; s < c->num_series; s++)
            to->y[s] = c->series[s].y[i];
        to->covered = sum_at(c, i);
    }
}

static void fold(plot *p)
{
    const chart *c = p->chart;
    const double width = (p->x_last - p->x_first) / COLUMNS;
    p->count = COLUMNS;
    for (int i = 0; i < COLUMNS; i++) {
        p->columns[i].begin = p->x_first + i * width;
        p->columns[i].end = p->x_first + (i + 1) * width;
    }
    for (int64_t i = 0; i < c->count; i++)
        for (int64_t j = (int64_t)((c->begin[i] - p->x_first) / width); j < COLUMNS; j++) {
            column *to = &p->columns[j];
            if (to->begin >= c->end[i])
                break;
            const double overlap = fmin(to->end, c->end[i]) - fmax(to->begin, c->begin[i]);
            if (overlap > 0)
                fold_into(to, c, i, overlap);
        }
    for (int i = 0; i < COLUMNS && c->fold == CHART_MEAN; i++)
        for (int s = 0; s < c->num_series && p->columns[i].covered > 0; s++)
            p->columns[i].y[s] /= p->columns[i].covered;
}

static void keep(plot *p)
{
    p->count = p->chart->count;
    for (int64_t i = 0; i < p->count; i++) {
        p->columns[i] = (column){ .begin = p->chart->begin[i], .end = p->chart->end[i] };
        for (int s = 0; s < p->chart->num_series; s++)
            p->columns[i].y[s] = p->chart->series[s].y[i];
    }
}

static void prepare(plot *p)
{
    const chart *c = p->chart;
    p->columns = need(COLUMNS, sizeof *p->columns);
    p->x_first = c->count ? c->begin[0] : 0;
    p->x_last = c->count ? c->end[c->count - 1] : 1;
    if (!(p->x_last > p->x_first))
        p->x_last = p->x_first + 1;
    if (c->count > COLUMNS)
        fold(p);
    else
        keep(p);
    double top = 0;
    for (int64_t i = 0; i < p->count; i++) {
        double sum = 0;
        for (int s = 0; s < c->num_series; s++)
            sum += p->columns[i].y[s];
        top = fmax(top, sum);
    }
    p->y_step = nice_step(top > 0 ? top : 1, c->unit);
    p->y_top = p->y_step * fmax(1, ceil(top / p->y_step * 0.9999));
}

/* ---- drawing ---- */

static double at_x(const plot *p, double x)
{
    return LEFT + PLOT_WIDTH * (x - p->x_first) / (p->x_last - p->x_first);
}
static double at_y(const plot *p, double y) { return TOP + PLOT_HEIGHT * (1 - y / p->y_top); }

static void write_axes(FILE *out, const plot *p)
{
    char text[32];
    const double x_step = nice_step((p->x_last - p->x_first) * 0.7, CHART_NUMBER);
    for (int i = 0; i * p->y_step <= p->y_top * 1.0001; i++) {
        const double y = at_y(p, i * p->y_step);
        chart_number(i * p->y_step, p->chart->unit, text, sizeof text);
        fprintf(out, "<line class=\"grid\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>", LEFT,
                WIDTH - RIGHT, y, y);
        fprintf(out, "<text class=\"axis\" x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n",
                LEFT - 8, y + 4, text);
    }
    for (double x = ceil(p->x_first / x_step) * x_step; x <= p->x_last + 1e-9 * x_step;
         x += x_step) {
        chart_number(fabs(x) < 1e-9 * x_step ? 0 : x, CHART_NUMBER, text, sizeof text);
        fprintf(out, "<text class=\"axis\" x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>\n",
                at_x(p, x), HEIGHT - BOTTOM + 17, text);
    }
    fprintf(out, "<text class=\"axis name\" x=\"%d\" y=\"%d\" text-anchor=\"middle\">%s</text>\n",
            LEFT + PLOT_WIDTH / 2, HEIGHT - 8, p->chart->x_label);
    fprintf(out,
            "<text class=\"axis name\" transform=\"translate(14 %d) rotate(-90)\" "
            "text-anchor=\"middle\">%s</text>\n",
            TOP + PLOT_HEIGHT / 2, p->chart->y_label);
}

static double stacked(const column *c, int series)
{
    double sum = 0;
    for (int s = 0; s <= series; s++)
        sum += c->y[s];
    return sum;
}

/* The band between the sums of series 0..s-1 and 0..s, as steps: along the top, back along the
 * bottom. */
static void write_band(FILE *out, const plot *p, int s)
{
    fprintf(out, "<path class=\"s%d\" d=\"M", s + 1);
    for (int64_t i = 0; i < p->count; i++) {
        const double y = at_y(p, stacked(&p->columns[i], s));
        fprintf(out, "%.1f %.1f %.1f %.1f ", at_x(p, p->columns[i].begin), y,
                at_x(p, p->columns[i].end), y);
    }
    for (int64_t i = p->count; i-- > 0;) {
        const double y = at_y(p, stacked(&p->columns[i], s - 1));
        fprintf(out, "%.1f %.1f %.1f %.1f ", at_x(p, p->columns[i].end), y,
                at_x(p, p->columns[i].begin), y);
    }
    fprintf(out, "Z\"/>\n");
}

static void write_hover(FILE *out, const plot *p)
{
    char from[32], to[32], text[32];
    const chart *c = p->chart;
    for (int64_t i = 0; i < p->count; i++) {
        const column *k = &p->columns[i];
        const double x = at_x(p, k->begin);
        chart_number(k->begin, CHART_NUMBER, from, sizeof from);
        chart_number(k->end, CHART_NUMBER, to, sizeof to);
        fprintf(out,
                "<rect class=\"hit\" x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\"><title>%s to "
                "%s %s",
                x, TOP, fmax(at_x(p, k->end) - x, 0.5), PLOT_HEIGHT, from, to, c->x_unit);
        for (int s = c->num_series; s-- > 0;) {
            chart_number(k->y[s], c->unit, text, sizeof text);
            fprintf(out, "\n%s: %s%s%s", c->series[s].name, text, c->unit == CHART_BYTES ? "" : " ",
                    c->unit == CHART_BYTES ? "" : c->y_unit);
        }
        fputs("</title></rect>\n", out);
    }
}

void chart_write(FILE *out, const chart *c)
{
    plot p = { .chart = c };
    prepare(&p);
    fprintf(out, "<figure><figcaption><h3>%s</h3><p>%s</p>", c->title, c->about);
    if (c->num_series > 1) {
        fputs("<p class=\"legend\">", out);
        for (int s = 0; s < c->num_series; s++)
            fprintf(out, "<span><i class=\"s%d\"></i>%s</span>", s + 1, c->series[s].name);
        fputs("</p>", out);
    }
    fprintf(out, "</figcaption>\n<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"%s\">\n",
            WIDTH, HEIGHT, c->title);
    write_axes(out, &p);
    for (int s = 0; s < c->num_series && p.count; s++)
        write_band(out, &p, s);
    write_hover(out, &p);
    fputs("</svg></figure>\n", out);
    free(p.columns);
}
