/* SPDX-License-Identifier: Apache-2.0 */
/* plan_describe.c -- a plan in words, for people and for golden files, and as a picture: time
 * down, workers across, one colour a request, shared segments hatched. Both are drawn from the
 * plan's data and the cost model; nothing is measured. Neither allocates.
 *
 * Size: words stop after MAX_LINES lines a section; the picture merges neighbours in a column so
 * that it has at most about MAX_BOXES boxes. */
#include "plan.h"

#include <stdarg.h>
#include <stdio.h>

#define MAX_LINES 2000
#define MAX_BOXES 2400
#define MAX_LEGEND 12

typedef struct drawing {
    const fv__plan_head *plan;
    const fv__kernel_shape *shape;
    const fv__plan_report *report;
    const fv__piece *pieces;
    const fv__segment *segments;
    const fv__request *requests;
    const int32_t *worker_first;
    char *buffer;
    size_t size, used;                  /* used: what would have been written */
} drawing;

static void put(drawing *d, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void put(drawing *d, const char *format, ...)
{
    const size_t room = d->used < d->size ? d->size - d->used : 0;
    va_list list;
    va_start(list, format);
    const int n = vsnprintf(room ? d->buffer + d->used : NULL, room, format, list);
    va_end(list);
    if (n > 0) d->used += (size_t)n;
}

static const char *plural(int64_t n) { return n == 1 ? "" : "s"; }

/* A number in thousandths as "1.234". */
static void put_milli(drawing *d, int64_t x)
{
    put(d, "%lld.%03lld", (long long)(x / 1000), (long long)(x % 1000));
}

static int64_t balance_milli(const drawing *d)
{
    const int64_t total = d->report->total_cost;
    return total > 0 ? (int64_t)((double)d->report->max_worker_cost * d->plan->num_workers /
                                     (double)total * 1000 +
                                 0.5)
                     : 1000;
}

static int64_t piece_cost(const drawing *d, const fv__piece *p)
{
    return fv__plan_piece_cost(d->plan, d->shape, p);
}

/* ---- words ---- */

static void put_head(drawing *d)
{
    const fv__plan_head *p = d->plan;
    put(d,
        "plan    %d worker%s, %d piece%s of %d segment%s; %d request%s, %d row%s, %d head unit%s "
        "of %d q head%s\n",
        p->num_workers, plural(p->num_workers), p->num_pieces, plural(p->num_pieces),
        p->num_segments, plural(p->num_segments), p->num_requests, plural(p->num_requests),
        p->total_rows, plural(p->total_rows), p->num_units, plural(p->num_units), p->unit_heads,
        plural(p->unit_heads));
    if (p->page_size)
        put(d, "keys    pages of %d, %lld in the pool\n", p->page_size, (long long)p->num_pages);
    else put(d, "keys    ragged\n");
    put(d, "mode    ");
    if (p->splits) put(d, "%d given split%s", p->splits, plural(p->splits));
    else put(d, p->queue ? "a queue, from the last piece to the first; workers as if all were equally fast" : "balanced");
    if (p->invariant) put(d, ", invariant with chunks of %d keys", p->chunk);
    put(d, "\ncost    total %lld, longest worker %lld, balance ", (long long)d->report->total_cost,
        (long long)d->report->max_worker_cost);
    put_milli(d, balance_milli(d));
    put(d, " (cost model %s)\nreads   %lld keys x kv heads, %lld scores\n", d->shape->cost->name,
        (long long)d->report->kv_tokens_read, (long long)d->report->score_pairs);
    put(d, "merges  %d record%s of %d part%s in %d slot%s\n", p->num_records,
        plural(p->num_records), p->num_parts, plural(p->num_parts), p->num_slots,
        plural(p->num_slots));
}

static void put_range(drawing *d, const char *name, int64_t first, int64_t num)
{
    if (num == 1) put(d, "  %s %lld", name, (long long)first);
    else if (num == 0) put(d, "  no %s", name);
    else put(d, "  %s %lld-%lld", name, (long long)first, (long long)(first + num - 1));
}

static void put_segments(drawing *d)
{
    const fv__plan_head *p = d->plan;
    const fv__listed_row *listed = FV__PLAN_ARRAY(p, fv__listed_row, listed_rows);
    put(d, "\nsegments\n");
    for (int32_t i = 0; i < p->num_segments && i < MAX_LINES; i++) {
        const fv__segment *s = &d->segments[i];
        put(d, "  %d  level %d", i, s->level);
        if (s->request >= 0) {
            put(d, "  request %d", s->request);
            put_range(d, "row", s->row_first, s->num_rows);
        } else {
            put(d, "  %d row%s", s->num_rows, plural(s->num_rows));
            for (int32_t k = 0; k < s->num_rows && k < 8; k++)
                put(d, "%s%d", k ? "," : " ", listed[s->row_first + k].row);
            if (s->num_rows > 8) put(d, ",..");
        }
        put_range(d, "unit", s->unit_first, s->num_units);
        put(d, "  %d keys", s->num_keys);
        if (s->num_keys)
            put(d, " from %s %lld at %s%d%s", p->page_size ? "page entry" : "token",
                (long long)s->table, s->page_positions < 0 ? "position " : "page positions ",
                s->page_positions < 0 ? s->first_position : s->page_positions,
                s->live ? ", live length" : "");
        put(d, "\n");
    }
    if (p->num_segments > MAX_LINES) put(d, "  ... %d more\n", p->num_segments - MAX_LINES);
}

/* Pieces from `i` on that differ in their head unit alone. */
static int32_t alike(const drawing *d, int32_t i, int32_t end)
{
    const fv__piece *a = &d->pieces[i];
    int32_t n = 1;
    for (; i + n < end && a->record == -1; n++) {
        const fv__piece *b = &d->pieces[i + n];
        if (b->record != -1 || b->segment != a->segment || b->row_first != a->row_first ||
            b->unit != a->unit + n || b->key_first != a->key_first || b->num_keys != a->num_keys)
            break;
    }
    return n;
}

static void put_pieces(drawing *d, int32_t i, int32_t n)
{
    const fv__piece *p = &d->pieces[i];
    put(d, "     segment %d", p->segment);
    put_range(d, "row", p->row_first, p->num_rows);
    put_range(d, "unit", p->unit, n);
    put_range(d, "keys", p->key_first, p->num_keys);
    if (p->slot >= 0)
        put_range(d, "-> slot", p->slot,
                  (int64_t)p->num_rows * fv__plan_parts(d->plan, &d->segments[p->segment], p));
    if (p->record >= 0) put_range(d, "record", p->record, p->num_rows);
    if (p->record == -2) put(d, "  records of the rows");
    put(d, "\n");
}

static void put_workers(drawing *d)
{
    int32_t lines = 0;
    put(d, "\nworkers\n");
    for (int32_t w = 0; w < d->plan->num_workers && lines < MAX_LINES; w++) {
        int64_t cost = 0;
        for (int32_t i = d->worker_first[w]; i < d->worker_first[w + 1]; i++)
            cost += piece_cost(d, &d->pieces[i]);
        put(d, "  %d  cost %lld, %d pieces\n", w, (long long)cost,
            d->worker_first[w + 1] - d->worker_first[w]);
        for (int32_t i = d->worker_first[w], n; i < d->worker_first[w + 1]; i += n, lines++) {
            n = alike(d, i, d->worker_first[w + 1]);
            if (lines < MAX_LINES) put_pieces(d, i, n);
        }
    }
    if (lines >= MAX_LINES) put(d, "  ... and so on\n");
}

static void put_merges(drawing *d)
{
    const fv__record *records = FV__PLAN_ARRAY(d->plan, fv__record, records);
    const int32_t *parts = FV__PLAN_ARRAY(d->plan, int32_t, parts);
    if (d->plan->num_records) put(d, "\nmerges\n");
    for (int32_t i = 0; i < d->plan->num_records && i < MAX_LINES; i++) {
        const fv__record *r = &records[i];
        if (r->arrivals == 0) continue;
        put(d, "  %d  row %d  unit %d  %d piece%s, slots", i, r->row, r->unit, r->arrivals,
            plural(r->arrivals));
        for (int32_t k = 0; k < r->num_parts && k < 16; k++)
            put(d, " %d", parts[r->part_first + k]);
        put(d, "%s\n", r->num_parts > 16 ? " .." : "");
    }
    if (d->plan->num_records > MAX_LINES)
        put(d, "  ... %d more\n", d->plan->num_records - MAX_LINES);
}

/* ---- picture ---- */

typedef struct frame {                  /* in tenths of a pixel */
    int64_t left, top, column, gap, height, width;
    int64_t longest;                    /* cost at the bottom */
    int64_t least;                      /* cost of the thinnest box */
} frame;

/* A length in tenths. */
static void put_tenths(drawing *d, int64_t x)
{
    if (x % 10)
        put(d, "%s%lld.%lld", x < 0 ? "-" : "", (long long)(x < 0 ? -x : x) / 10,
            (long long)(x < 0 ? -x : x) % 10);
    else put(d, "%lld", (long long)x / 10);
}

static int64_t down(const frame *f, int64_t cost)
{
    return f->longest ? (int64_t)((double)cost / (double)f->longest * (double)f->height + 0.5) : 0;
}

/* What decides a box's colour: the request, -1: a shared segment. */
static int32_t colour_of(const drawing *d, const fv__piece *p)
{
    return d->segments[p->segment].request;
}

static void put_fill(drawing *d, int32_t request)
{
    if (request < 0) put(d, "fill=\"url(#shared)\"");
    else
        put(d, "fill=\"hsl(%d,%d%%,%d%%)\"", (int)((int64_t)request * 137 % 360),
            52 + request / 3 % 3 * 12, 50 + request % 3 * 8);
}

static void put_box(drawing *d, const frame *f, int32_t worker, int64_t from, int64_t to,
                    int32_t request, bool mixed)
{
    const int64_t y = down(f, from), height = down(f, to) - y;
    if (height <= 0) return;
    put(d, "<path ");
    put_fill(d, request);
    put(d, " d=\"M");
    put_tenths(d, f->left + worker * f->column);
    put(d, " ");
    put_tenths(d, f->top + y);
    put(d, "h");
    put_tenths(d, f->column - f->gap);
    put(d, "v");
    put_tenths(d, height);
    put(d, "h");
    put_tenths(d, f->gap - f->column);
    put(d, "z\"");
    if (!mixed && f->least == 0) {
        if (request < 0) put(d, "><title>shared, worker %d</title></path>\n", worker);
        else put(d, "><title>request %d, worker %d</title></path>\n", request, worker);
        return;
    }
    put(d, "/>\n");
}

/* One worker's boxes: neighbours of one colour are one; those thinner than `least` join the next
 * and the dearest gives the colour. */
static void put_column(drawing *d, const frame *f, int32_t worker)
{
    int64_t from = 0, to = 0, dearest = -1, run = 0;
    int32_t colour = -1, last = INT32_MIN;
    bool mixed = false;
    for (int32_t i = d->worker_first[worker]; i < d->worker_first[worker + 1]; i++) {
        const fv__piece *p = &d->pieces[i];
        const int64_t cost = piece_cost(d, p);
        const bool same = colour_of(d, p) == last;
        if (!same && last != INT32_MIN && to - from > f->least) {
            put_box(d, f, worker, from, to, colour, mixed);
            from = to;
            dearest = -1;
            mixed = false;
        } else if (!same && last != INT32_MIN) {
            mixed = true;
        }
        run = same ? run + cost : cost;
        to += cost;
        last = colour_of(d, p);
        if (run > dearest) {
            dearest = run;
            colour = last;
        }
    }
    put_box(d, f, worker, from, to, colour, mixed);
}

/* Lower edges of pieces that owe a merge, as far as they can be told apart. */
static void put_merge_marks(drawing *d, const frame *f)
{
    int32_t marks = 0;
    put(d, "<path class=\"m\" d=\"");
    for (int32_t w = 0; w < d->plan->num_workers; w++) {
        int64_t cost = 0, last = -100;
        for (int32_t i = d->worker_first[w]; i < d->worker_first[w + 1] && marks < MAX_BOXES; i++) {
            cost += piece_cost(d, &d->pieces[i]);
            const int64_t y = f->top + down(f, cost) - 8;
            if (d->pieces[i].slot < 0 || d->pieces[i].num_keys == 0 || y < last + 30) continue;
            put(d, "M");
            put_tenths(d, f->left + w * f->column);
            put(d, " ");
            put_tenths(d, y);
            put(d, "h");
            put_tenths(d, f->column - f->gap);
            last = y;
            marks++;
        }
    }
    put(d, "\"/>\n");
}

static int32_t count_colour_changes(const drawing *d)
{
    int32_t n = 0;
    for (int32_t w = 0; w < d->plan->num_workers; w++)
        for (int32_t i = d->worker_first[w]; i < d->worker_first[w + 1]; i++)
            n += i == d->worker_first[w] ||
                 colour_of(d, &d->pieces[i]) != colour_of(d, &d->pieces[i - 1]);
    return n;
}

static void put_axis(drawing *d, const frame *f)
{
    const int64_t bottom = f->top + f->height, right = f->left + d->plan->num_workers * f->column;
    const int64_t mean = f->longest ? d->report->total_cost / d->plan->num_workers : 0;
    for (int quarter = 0; quarter <= 4; quarter++) {
        const int64_t y = f->top + f->height * quarter / 4;
        put(d,
            "<path class=\"g\" d=\"M%lld %lldH%lld\"/><text x=\"%lld\" y=\"%lld\" "
            "text-anchor=\"end\">%d%%</text>\n",
            (long long)(f->left / 10 - 4), (long long)(y / 10), (long long)(right / 10),
            (long long)(f->left / 10 - 8), (long long)(y / 10 + 4), quarter * 25);
    }
    const int64_t y = f->top + down(f, mean);
    put(d, "<path class=\"a\" d=\"M%lld ", (long long)(f->left / 10 - 4));
    put_tenths(d, y);
    put(d, "H%lld\"/><text x=\"%lld\" y=\"", (long long)(right / 10 + 4),
        (long long)(right / 10 + 8));
    put_tenths(d, y + 40);
    put(d, "\">mean</text>\n");
    const int32_t step = d->plan->num_workers <= 16 ? 1 : (d->plan->num_workers + 15) / 16;
    for (int32_t w = 0; w < d->plan->num_workers; w += step) {
        put(d, "<text text-anchor=\"middle\" x=\"");
        put_tenths(d, f->left + w * f->column + (f->column - f->gap) / 2);
        put(d, "\" y=\"%lld\">%d</text>\n", (long long)(bottom / 10 + 16), w);
    }
    put(d,
        "<text x=\"%lld\" y=\"%lld\">workers; time runs down, 100%% is the longest worker</text>\n",
        (long long)(f->left / 10), (long long)(bottom / 10 + 34));
}

/* The request with the most keys among those after `last` in that order; -1: none. */
static int32_t next_largest(const drawing *d, int32_t last)
{
    int32_t best = -1;
    for (int32_t r = 0; r < d->plan->num_requests; r++) {
        const int32_t keys = d->requests[r].num_keys;
        if (d->requests[r].num_rows == 0 || keys == 0) continue;
        if (last >= 0 && (keys > d->requests[last].num_keys ||
                          (keys == d->requests[last].num_keys && r <= last)))
            continue;
        if (best < 0 || keys > d->requests[best].num_keys) best = r;
    }
    return best;
}

/* Swatches from `y` on. */
static void put_legend(drawing *d, const frame *f, int64_t y)
{
    const int64_t left = f->left / 10;
    int entry = 0;
    int32_t r = -1;
    if (d->report->num_shared_segments) {
        put(d,
            "<rect x=\"%lld\" y=\"%lld\" width=\"12\" height=\"12\" fill=\"url(#shared)\"/><text "
            "x=\"%lld\" y=\"%lld\">shared by several requests</text>\n",
            (long long)left, (long long)y, (long long)left + 18, (long long)y + 10);
        entry++;
    }
    while (entry < MAX_LEGEND && (r = next_largest(d, r)) >= 0) {
        const int64_t x = left + entry % 3 * 225, line = y + entry / 3 * 18;
        put(d, "<rect x=\"%lld\" y=\"%lld\" width=\"12\" height=\"12\" ", (long long)x,
            (long long)line);
        put_fill(d, r);
        put(d, "/><text x=\"%lld\" y=\"%lld\">request %d: %d key%s, %d row%s</text>\n",
            (long long)x + 18, (long long)line + 10, r, d->requests[r].num_keys,
            plural(d->requests[r].num_keys), d->requests[r].num_rows,
            plural(d->requests[r].num_rows));
        entry++;
    }
    if (r >= 0 && next_largest(d, r) >= 0)
        put(d,
            "<text x=\"%lld\" y=\"%lld\">the largest requests; the others have colours of their "
            "own</text>\n",
            (long long)left, (long long)y + MAX_LEGEND / 3 * 18 + 10);
}

static void put_picture(drawing *d)
{
    const int32_t workers = d->plan->num_workers;
    frame f = { .left = 560, .top = 560, .height = 4200, .longest = d->report->max_worker_cost };
    f.column = fv__max64(30, fv__min64(480, 9600 / workers));
    f.gap = f.column >= 80 ? 20 : 5;
    f.width = fv__max64(7200, f.left + workers * f.column + 600);
    const int32_t changes = count_colour_changes(d);
    f.least = changes > MAX_BOXES ? f.longest / fv__max64(1, MAX_BOXES / workers) : 0;
    const int64_t legend = (f.top + f.height) / 10 + 52,
                  height = legend + (MAX_LEGEND / 3 + 1) * 18 + 8;

    put(d,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %lld %lld\" width=\"%lld\" "
        "height=\"%lld\" role=\"img\" aria-label=\"plan\">\n",
        (long long)(f.width / 10), (long long)height, (long long)(f.width / 10), (long long)height);
    put(d, "<style>svg{--ink:#1c2128;--soft:#8b949e;--back:#fff;--accent:#c2255c;background:var(--"
           "back);font:12px system-ui,sans-serif}"
           "@media(prefers-color-scheme:dark){svg{--ink:#e6edf3;--soft:#6e7681;--back:#0d1117;--"
           "accent:#ff7aa8}}"
           "text{fill:var(--ink)}.t{font-size:15px;font-weight:600}.g{stroke:var(--soft);stroke-"
           "width:.5;fill:none}"
           ".a{stroke:var(--accent);stroke-dasharray:4 "
           "3;fill:none}.m{stroke:var(--ink);stroke-opacity:.6;fill:none}"
           ".h{stroke:var(--back);stroke-width:2}.b{fill:var(--soft)}.p "
           "path{stroke:var(--back);stroke-width:.5}</style>\n"
           "<defs><pattern id=\"shared\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" "
           "patternTransform=\"rotate(45)\">"
           "<rect class=\"b\" width=\"6\" height=\"6\"/><path class=\"h\" d=\"M0 "
           "0V6\"/></pattern></defs>\n");
    put(d, "<text class=\"t\" x=\"%lld\" y=\"22\">%d pieces on %d worker%s, balance ",
        (long long)(f.left / 10), d->plan->num_pieces, workers, plural(workers));
    put_milli(d, balance_milli(d));
    put(d,
        "</text>\n<text x=\"%lld\" y=\"42\">%d request%s, %d row%s, %lld shared segment%s, %d "
        "merge%s (marked); cost model %s</text>\n",
        (long long)(f.left / 10), d->plan->num_requests, plural(d->plan->num_requests),
        d->plan->total_rows, plural(d->plan->total_rows), (long long)d->report->num_shared_segments,
        plural(d->report->num_shared_segments), d->plan->num_records, plural(d->plan->num_records),
        d->shape->cost->name);
    put(d, "<g class=\"p\">\n");
    for (int32_t w = 0; w < workers; w++) put_column(d, &f, w);
    put(d, "</g>\n");
    put_merge_marks(d, &f);
    put_axis(d, &f);
    put_legend(d, &f, legend);
    put(d, "</svg>\n");
}

size_t fv__plan_describe(const fv__plan_head *plan, const fv__kernel_shape *shape,
                         const fv__plan_report *report, bool svg, char *buffer, size_t size)
{
    drawing d = { .plan = plan, .shape = shape, .report = report, .buffer = buffer, .size = size };
    d.pieces = FV__PLAN_ARRAY(plan, fv__piece, pieces);
    d.segments = FV__PLAN_ARRAY(plan, fv__segment, segments);
    d.requests = FV__PLAN_ARRAY(plan, fv__request, requests);
    d.worker_first = FV__PLAN_ARRAY(plan, int32_t, worker_first);
    if (svg) {
        put_picture(&d);
    } else {
        put_head(&d);
        put_segments(&d);
        put_workers(&d);
        put_merges(&d);
    }
    if (size) buffer[fv__min64((int64_t)d.used, (int64_t)size - 1)] = 0;
    return d.used + 1;
}
