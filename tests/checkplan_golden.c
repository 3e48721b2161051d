/* SPDX-License-Identifier: Apache-2.0 */
/* checkplan_golden.c -- small plans in words (and one as a picture) against tests/golden/plan_*:
 * a change of the planner is a diff to look at. `checkplan --update-golden` writes them anew.
 * The folder is found beside this source file, or by --golden. */
#include "checkplan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *folder_of_source(char *buffer, size_t size)
{
    snprintf(buffer, size, "%s", __FILE__);
    char *end = strrchr(buffer, '/');
    snprintf(end ? end + 1 : buffer, size - (size_t)(end ? end + 1 - buffer : 0), "golden");
    return buffer;
}

static char *describe(const scene *s, const made *m, bool svg)
{
    const size_t size = fv__plan_describe(m->plan, &s->shape, &m->report, svg, NULL, 0);
    char *text = malloc(size);
    fv__plan_describe(m->plan, &s->shape, &m->report, svg, text, size);
    return text;
}

static char *read_text(const char *path)
{
    FILE *f = fopen(path, "rb");
    if (!f) return NULL;
    char *text = calloc(1, 1 << 20);
    text[fread(text, 1, (1 << 20) - 1, f)] = 0;
    fclose(f);
    return text;
}

static void compare(totals *t, const char *folder, const char *name, const char *suffix,
                    const char *text, bool update)
{
    char path[600];
    snprintf(path, sizeof path, "%s/plan_%s.%s", folder, name, suffix);
    if (update) {
        FILE *f = fopen(path, "wb");
        if (!expect(t, f != NULL, "cannot write %s", path)) return;
        fputs(text, f);
        fclose(f);
        return;
    }
    char *want = read_text(path);
    if (!expect(t, want != NULL, "cannot read %s: say where with --golden DIR", path)) return;
    size_t same = 0;
    int line = 1;
    for (; text[same] && text[same] == want[same]; same++) line += text[same] == '\n';
    expect(t, text[same] == want[same], "%s differs from line %d on: \"%.40s\"", path, line,
           text + same);
    free(want);
}

typedef void build_fn(scene *s);

static void decode(scene *s)
{
    const int32_t rows[] = { 1, 1, 1, 1 }, keys[] = { 300, 64, 0, 1000 };
    scene_requests(s, 4, rows, keys, 16);
    scene_shape(s, 2, 4, 64, 3, &fv__cost_cpu);
    s->bounds.has_last = true;
    scene_limits(s);
}

static void mixed(scene *s)
{
    const int32_t rows[] = { 1, 100, 1, 30 }, keys[] = { 500, 100, 2000, 400 };
    scene_requests(s, 4, rows, keys, 0);
    scene_shape(s, 2, 4, 128, 4, &fv__cost_sm90);
    s->bounds.has_last = true;
    scene_limits(s);
}

static void window(scene *s)
{
    const int32_t rows[] = { 40, 1 }, keys[] = { 1000, 3000 };
    scene_requests(s, 2, rows, keys, 64);
    scene_shape(s, 1, 8, 64, 4, &fv__cost_sm80);
    s->bounds = (fv__bounds){ .has_first = true, .has_last = true, .first = -255 };
    scene_limits(s);
}

static void found(scene *s)
{
    const int32_t rows[] = { 1, 1, 2, 1, 1 }, keys[] = { 2100, 2060, 2062, 150, 2500 };
    scene_requests(s, 5, rows, keys, 16);
    int32_t *ids = (int32_t *)s->given.pages.ids.host;
    for (int r = 1; r < 5; r++)
        if (r != 3) memcpy(ids + s->batch.tables[r], ids + s->batch.tables[0], 128 * sizeof *ids);
    scene_shape(s, 2, 4, 64, 3, &fv__cost_cpu);
    s->bounds.has_last = true;
    scene_limits(s);
    s->limits.sharing = FV_SHARING_FIND;
}

/* A prefix of all rows, two branches, block positions of its own for one head, and a row that is
 * in no segment. */
static void given(scene *s)
{
    static const int32_t every[] = { 0, 2, 4 }, positions[] = { 256, 384 };
    const int32_t rows[] = { 1, 1, 2, 1, 1 }, keys[] = { 400, 400, 400, 400, 400 };
    scene_requests(s, 5, rows, keys, 16);
    fv_segment *x = arena_take(&s->memory, 4, sizeof *x);
    x[0] = (fv_segment){ .num_rows = 5, .num_pages = 16, .num_keys = 256 };
    x[1] = (fv_segment){ .rows = every,
                         .num_rows = 3,
                         .num_kv_heads = 1,
                         .first_page = 16,
                         .num_pages = 2,
                         .num_keys = 30,
                         .page_positions = positions };
    x[2] = (fv_segment){ .num_rows = 2,
                         .kv_head_first = 1,
                         .num_kv_heads = 1,
                         .first_page = 18,
                         .num_pages = 9,
                         .num_keys = 144,
                         .first_position = 256 };
    x[3] = (fv_segment){ .row_first = 2,
                         .num_rows = 2,
                         .kv_head_first = 1,
                         .num_kv_heads = 1,
                         .first_page = 27,
                         .num_pages = 9,
                         .num_keys = 144,
                         .first_position = 256 };
    s->given.segments = x;
    s->given.num_segments = 4;
    scene_shape(s, 2, 4, 64, 2, &fv__cost_cpu);
    s->bounds.has_last = true;
    scene_limits(s);
    s->limits.max_levels = 2;
}

static void invariant(scene *s)
{
    const int32_t rows[] = { 1, 20 }, keys[] = { 1000, 300 };
    scene_requests(s, 2, rows, keys, 16);
    ((fv__request *)s->batch.requests)[1].first_position = 96;
    scene_shape(s, 1, 4, 64, 3, &fv__cost_cpu);
    s->bounds.has_last = true;
    scene_limits(s);
    s->limits.invariant = true;
    s->limits.chunk = 128;
}

static void splits(scene *s)
{
    const int32_t rows[] = { 1, 3, 1 }, keys[] = { 500, 70, 0 };
    scene_requests(s, 3, rows, keys, 16);
    scene_shape(s, 1, 2, 64, 2, &fv__cost_cpu);
    s->bounds.has_last = true;
    scene_limits(s);
    s->limits.splits = 3;
}

static const struct { const char *name; build_fn *build; bool svg;
} goldens[] = {
    { "decode", decode, false }, { "mixed", mixed, false }, { "window", window, false },
    { "found", found, true },    { "given", given, false }, { "invariant", invariant, false },
    { "splits", splits, false },
};

void check_golden(totals *t, const char *folder, bool update)
{
    char own[500], why[400];
    scene s = { 0 };
    made m = { 0 };
    if (!folder) folder = folder_of_source(own, sizeof own);
    for (int i = 0; i < FV__COUNT(goldens); i++) {
        scene_clear(&s);
        goldens[i].build(&s);
        if (!expect(t, make_plan(&m, &s, 0x42) == FV_OK, "%s: %s", goldens[i].name, m.err.text))
            continue;
        expect(t, check_plan(&s, &m, why, sizeof why), "%s: %s", goldens[i].name, why);
        for (int svg = 0; svg <= goldens[i].svg; svg++) {
            char *text = describe(&s, &m, svg);
            compare(t, folder, goldens[i].name, svg ? "svg" : "txt", text, update);
            char small[50];
            const size_t need =
                fv__plan_describe(m.plan, &s.shape, &m.report, svg, small, sizeof small);
            expect(t,
                   need == strlen(text) + 1 && strlen(small) == sizeof small - 1 &&
                       !memcmp(small, text, sizeof small - 1),
                   "%s: a small buffer", goldens[i].name);
            free(text);
        }
    }
    made_free(&m);
    free(s.memory.base);
}
