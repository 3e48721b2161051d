/* SPDX-License-Identifier: Apache-2.0 */
/* test_ref.c -- does the definition (ref.c) reproduce every anchor of the case rows?
 *
 * The anchors were computed elsewhere, so this is two independent readings of one page. Also here:
 * the samples of the generator's table, and that the parser refuses what the page does not list.
 *
 *     test_ref [--cases FILE] [--id PREFIX] [--threads N] [--verbose]
 */
#include "cases.h"

#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int passed, failed;
static bool verbose;

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void check(const char *id, const char *what, bool ok, double got, double want)
{
    if (ok)
        passed++;
    else
        failed++;
    if (!ok || verbose)
        printf("%s  %-22s %-12s %.9g, anchor %.9g\n", ok ? "ok  " : "FAIL", id, what, got, want);
}

static bool near(double got, double want)
{
    return got == want || fabs(got - want) <= 1e-5 * fabs(want) + 1e-9;
}

static void check_near(const char *id, const char *what, double got, double want)
{
    check(id, what, near(got, want), got, want);
}

/* ------------------------------------------------------------------------------------- the rows */

static void check_fault(const case_row *row, int i, int threads)
{
    char message[512], what[64];
    case_row changed;
    case_answer answer;

    snprintf(what, sizeof what, "fault %d", i);
    if (!case_apply_fault(row, i, &changed, message, sizeof message)) {
        printf("%s\n", message);
        check(row->id, what, false, NAN, row->faults[i].mo);
    } else if (!case_solve(&changed, NULL, threads, &answer)) {
        check(row->id, "memory", false, NAN, NAN);
    } else {
        check_near(row->id, what, answer.mo, row->faults[i].mo);
        case_answer_free(&answer);
    }
}

static void check_row(const case_row *row, int threads)
{
    const double start = now();
    case_answer a;

    if (!case_solve(row, NULL, threads, &a)) {
        check(row->id, "memory", false, NAN, NAN);
        return;
    }
    check(row->id, "has anchors", row->has_mo && row->has_o && row->has_l, NAN, NAN);
    check_near(row->id, "mO", a.mo, row->mo);
    check_near(row->id, "o", a.last_o, row->o);
    check_near(row->id, "L", a.last_l, row->l);
    check(row->id, "n_empty", a.n_empty == row->n_empty, (double)a.n_empty, (double)row->n_empty);
    for (int i = 0; i < row->num_part_l; i++)
        check_near(row->id, "part_L", a.part_l[i], row->part_l[i]);
    case_answer_free(&a);
    for (int i = 0; i < row->num_faults; i++)
        check_fault(row, i, threads);
    if (verbose || now() - start > 5)
        printf("      %-22s %.2f s\n", row->id, now() - start);
}

/* -------------------------------------------------------------------------------- the generator */

static void check_generator(void)
{
    static const struct { uint32_t seed, i; int grid; uint32_t hash; double g; } table[] = {
        { 1, 0, 64, 0x92CA2F0E, 0.1875 },   { 1, 1, 64, 0x96A0F96B, 0.265625 },
        { 2, 0, 64, 0x3CD6E3F3, -0.4375 },  { 2, 12345, 8, 0x30C2CBD5, 0.5 },
        { 3, 7, 4, 0xFF839133, -0.25 },     { 3, 4294967295u, 64, 0x2994C1B5, -0.078125 },
    };
    case_row row = {
        .hk = 1, .dk = 16, .dv = 16, .kv_dtype = CASE_KV_FP4G16, .k_scale = 1, .v_scale = 1
    };

    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        const uint32_t hash = case_hash(table[i].seed, table[i].i);
        check("generator", "hash", hash == table[i].hash, hash, table[i].hash);
        check("generator", "G", case_g(table[i].seed, table[i].i, table[i].grid) == table[i].g,
              case_g(table[i].seed, table[i].i, table[i].grid), table[i].g);
    }
    check("generator", "fp4 K[0]", case_k(&row, 0, 0, 0) == 0.515625, case_k(&row, 0, 0, 0),
          0.515625);
    check("generator", "fp4 K[16]", case_k(&row, 1, 0, 0) == -0.375, case_k(&row, 1, 0, 0), -0.375);
    check("generator", "fp4 V[5]", case_v(&row, 0, 0, 5) == -0.40625, case_v(&row, 0, 0, 5),
          -0.40625);
    row.dk = row.dv = 64;
    row.kv_dtype = CASE_KV_INT4G32;
    check("generator", "int4 K[0]", case_k(&row, 0, 0, 0) == -1.203125, case_k(&row, 0, 0, 0), -1.203125);
    check("generator", "int4 K[33]", case_k(&row, 0, 0, 33) == 1.5, case_k(&row, 0, 0, 33), 1.5);
    row.kv_dtype = CASE_KV_INT4G64;
    check("generator", "int4 V[5]", case_v(&row, 0, 0, 5) == 0.8125, case_v(&row, 0, 0, 5), 0.8125);
}

/* ----------------------------------------------------------------------------------- the parser */

#define ROW "id=a\nkv=3\nhq=4\ndk=8\n"

static void check_refusals(void)
{
    static const struct { const char *text, *why; } bad[] = {
        { ROW "colour=red\n", "unknown key" },
        { ROW "x_rope=4\n", "unknown key" },
        { ROW "kv\n", "neither key=value" },
        { "kv=3\n" ROW, "before the first id" },
        { ROW ROW, "already that of line 1" },
        { "id=a b\n", "holds blanks" },
        { ROW "=3\n", "without a key" },
        { ROW "hk=3\n", "cannot share 3 KV heads" },
        { ROW "q=1,2\n", "lists 2 requests" },
        { ROW "causal=2\n", "fault lines only" },
        { ROW "causal=yes\n", "not a whole number" },
        { ROW "window_left=-2\n", "outside of -1" },
        { ROW "hq=4294967296\n", "outside of" },
        { ROW "dtype=f16,f64\n", "none of the words" },
        { ROW "bits=011\nbits=011\n", "2 lines of bits for 1 rows" },
        { ROW "bits=0110\n", "4 digits for 3 keys" },
        { ROW "bits=012\n", "only the digits" },
        { ROW "items=1,1\n", "add up to 2" },
        { ROW "key_ranges=3\n", "not a range" },
        { ROW "key_ranges=3:1\n", "ends before it begins" },
        { ROW "share=-,-\n", "2 entries for 1" },
        { ROW "share=0:3\n", "not earlier" },
        { ROW "block_rows=1\n", "without block_map" },
        { ROW "kset=1,2,3\n", "not T,H,D,C" },
        { ROW "qdata=const\n", "none of gen" },
        { ROW "cut=4\n", "behind the last key" },
        { ROW "sink=1\n", "not A,B" },
        { ROW "softcap=nan\n", "not finite" },
        { ROW "fault=0.5 words\n", "a fault is" },
        { "id=a\nhq=4\ndk=8\n", "kv is required" },
        { "id=a\nop=merge\nhq=4\ndv=8\ntokens=2\n", "a merge needs" },
    };
    char message[512];

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        *message = 0;
        case_file *file =
            case_parse("text", bad[i].text, strlen(bad[i].text), false, message, sizeof message);
        const bool ok = !file && strstr(message, bad[i].why) && !strncmp(message, "text:", 5);
        if (!ok)
            printf("parser: wanted '%s', got '%s'\n", bad[i].why, file ? "accepted" : message);
        check("parser", bad[i].why, ok, NAN, NAN);
        case_free(file);
    }
}

static void check_long_line(void)
{
    char text[4200], message[512];

    for (int extra = 0; extra < 2; extra++) {
        const size_t head = (size_t)snprintf(text, sizeof text, "%s", ROW);
        memset(text + head, 'n', 4000 + (size_t)extra);
        memcpy(text + head, "note=", 5);
        case_file *file =
            case_parse("text", text, head + 4000 + (size_t)extra, false, message, sizeof message);
        check("parser", "long line", (file != NULL) == (extra == 0), NAN, NAN);
        case_free(file);
    }
}

/* What a row may say, all in one: blanks, order, repeats, AxN, none, later lines win. */
static void check_reading(void)
{
    static const char text[] =
        "  # remark\n\n id = a \n dk=8\n hq=4\n hq = 6 \r\nkv=2,5x2,0\nhk=2\nnote=a=b # c\n"
        "qset=*,1,2,-4\nqset=0,*,*,3\nsplits=auto,3,1x2\nshare=-,0:2,1:5,-\nkey_ranges=none\n"
        "view=hs0,contig\npad_id=-1\nL=-inf\nsame_bits=page,split\n"
        "fault=hq=4;causal=2 0.5 two words\n";
    char message[512] = "";
    case_file *file = case_parse("text", text, sizeof text - 1, false, message, sizeof message);

    check("parser", "reads", file != NULL, NAN, NAN);
    if (!file) {
        printf("%s\n", message);
        return;
    }
    const case_row *r = file->rows;
    check("parser", "hq", r->hq == 6, r->hq, 6);
    check("parser", "requests", r->num_requests == 4 && r->kv.at[2] == 5 && r->kv.at[3] == 0, NAN,
          NAN);
    check("parser", "dv", r->dv == 8 && r->total_kv == 12, r->dv, 8);
    check("parser", "note", !strcmp(r->note, "a=b # c"), NAN, NAN);
    check("parser", "qset", case_q(r, 0, 1, 2) == 3 && case_q(r, 2, 1, 2) == -4, case_q(r, 0, 1, 2),
          3);
    check("parser", "splits", r->splits.n == 4 && r->splits.at[0] == CASE_SPLITS_AUTO, NAN, NAN);
    check("parser", "share", case_kv_token(r, 2, 1) == 1 && case_kv_token(r, 2, 3) == 5, NAN, NAN);
    check("parser", "implied mem", r->mem == 1u << CASE_MEM_PAGED, NAN, NAN);
    check("parser", "view", r->view == (1u << CASE_VIEW_HS0 | 1u << CASE_VIEW_CONTIG), NAN, NAN);
    check("parser", "L", r->l == -INFINITY, r->l, -INFINITY);
    check("parser", "same_bits", r->same_bits == (CASE_SAME_PAGE | CASE_SAME_SPLIT), NAN, NAN);
    case_row changed;
    check("parser", "fault", r->num_faults == 1 && r->faults[0].mo == 0.5
          && !strcmp(r->faults[0].words, "two words"), NAN, NAN);
    check("parser", "fault is made", case_apply_fault(r, 0, &changed, message, sizeof message)
          && changed.hq == 4 && changed.causal == 2 && changed.qset.n == 2 && r->hq == 6, NAN, NAN);
    case_free(file);
}

/* ----------------------------------------- what the definition says beyond the rows of the file */

/* One head of one dim with K = 0: every visible key weighs the same, so that O is the mean of
 * the visible V. */
static double mean_seen(const ref_problem *more, const ref_request *request, int64_t row,
                        double *lse)
{
    static const double k[8], q[8], v[8] = { 1, 2, 4, 8, 16, 32, 64, 128 };
    ref_problem p = *more;
    ref_request r = *request;
    double o[8], l[8];

    p.hq = p.hk = p.dk = p.dv = 1;
    p.scale = 1;
    r.q = q;
    r.k = k;
    r.v = v;
    if (!ref_attend(&p, &r, NULL, r.rows, 1, o, l))
        return NAN;
    *lse = l[row];
    return o[row];
}

static void check_mask(const char *what, const ref_problem *p, const ref_request *r, int64_t row,
                       double sum, int n)
{
    double lse;
    const double o = mean_seen(p, r, row, &lse);

    check_near("definition", what, o, n ? sum / n : 0);
    check_near("definition", what, lse, n ? log(n) : -INFINITY);
}

static void check_masks(void)
{
    static const int32_t parent[] = { -1, 0, 0, 1 };
    static const int64_t at[] = { 5, 100 };
    static const ref_range ranges[] = { { 0, 1 }, { 6, 8 } };
    const ref_problem none = { .window_left = -1, .window_right = -1 };
    const ref_problem causal = { .causal = 1, .window_left = -1, .window_right = -1 };
    const ref_problem window = { .causal = 1, .window_left = 1, .window_right = -1 };

    /* tree: context of 4 keys (sum 15), rows are keys 4..7; row 3 sees 3, 1, 0 */
    check_mask("tree", &none, &(ref_request){ .rows = 4, .keys = 8, .parent = parent }, 3,
               15 + 128 + 32 + 16, 7);
    check_mask("tree", &none, &(ref_request){ .rows = 4, .keys = 8, .parent = parent }, 2,
               15 + 64 + 16, 6);
    check_mask("ranges", &none,
               &(ref_request){ .rows = 1, .keys = 8, .ranges = ranges, .num_ranges = 2 }, 0,
               1 + 64 + 128, 3);
    /* keys at 3..6, row at 5: sees keys 0, 1, 2 */
    const ref_request moved = { .rows = 2, .keys = 4, .first_position = 3, .row_position = at };
    check_mask("positions", &causal, &moved, 0, 1 + 2 + 4, 3);
    check_mask("positions", &window, &moved, 0, 2 + 4, 2);
    check_mask("positions", &window, &moved, 1, 0, 0);
    check_mask("first", &window, &(ref_request){ .rows = 1, .keys = 4, .first_position = 9 }, 0,
               4 + 8, 2);
}

static void check_rope(void)
{
    const float freq[2] = { 0.5f, 0.25f };
    double halves[5] = { 1, 2, 3, 4, 5 }, pairs[5] = { 1, 2, 3, 4, 5 };

    ref_turn(&(ref_rope){ .rotary_dim = 4, .freq = freq }, 3, halves);
    check_near("definition", "rope halves", halves[0], cos(1.5) - 3 * sin(1.5));
    check_near("definition", "rope halves", halves[3], 4 * cos(0.75) + 2 * sin(0.75));
    check_near("definition", "rope halves", halves[4], 5);
    ref_turn(&(ref_rope){ .rotary_dim = 4, .interleaved = true, .freq = freq }, 3, pairs);
    check_near("definition", "rope pairs", pairs[1], 2 * cos(1.5) + sin(1.5));
    check_near("definition", "rope pairs", pairs[2], 3 * cos(0.75) - 4 * sin(0.75));
}

/* Rotary scores depend on the distance only: moving all positions changes nothing. */
static void check_rope_moves(void)
{
    const float freq[2] = { 1, 0.01f };
    const ref_rope rope = { .rotary_dim = 4, .freq = freq };
    const ref_problem p = { .hq = 2,
                            .hk = 1,
                            .dk = 4,
                            .dv = 4,
                            .scale = 1,
                            .causal = 1,
                            .window_left = -1,
                            .window_right = -1,
                            .rope = &rope };
    double q[16], kv[20], o[2][16], lse[2][4], sums[5], total = 0;

    for (int i = 0; i < 16; i++)
        q[i] = case_g(1, (uint32_t)i, 64);
    for (int i = 0; i < 20; i++)
        kv[i] = case_g(2, (uint32_t)i, 64);
    ref_request r = { .rows = 2, .keys = 5, .q = q, .k = kv, .v = kv };
    bool ok = ref_attend(&p, &r, NULL, 2, 1, o[0], lse[0]);
    r.first_position = 12345;
    ok = ok && ref_attend(&p, &r, NULL, 2, 3, o[1], lse[1]);
    for (int i = 0; ok && i < 16; i++)
        check_near("definition", "rope moves", o[1][i], o[0][i]);
    for (int i = 0; ok && i < 4; i++)
        check_near("definition", "rope moves", lse[1][i], lse[0][i]);
    ok = ok && ref_key_sums(&p, &r, sums);
    for (int i = 0; ok && i < 5; i++)
        total += sums[i];
    check("definition", "rope runs", ok, NAN, NAN);
    check_near("definition", "key sums", total, 4);             /* 2 rows x 2 heads, each row of
                                                                   weights adds to 1 */
}

/* Any cut of the keys merges to the whole. */
static void check_merge(void)
{
    const ref_problem p = {
        .hq = 1, .hk = 1, .dk = 4, .dv = 4, .scale = 3, .window_left = -1, .window_right = -1
    };
    double q[4], kv[40], whole[4], lse, part[3][4], part_l[3], merged[4], merged_l;
    static const int cut[] = { 0, 0, 7, 10 };

    for (int i = 0; i < 40; i++)
        kv[i] = case_g(2, (uint32_t)i, 64);
    for (int i = 0; i < 4; i++)
        q[i] = case_g(1, (uint32_t)i, 64);
    ref_request r = { .rows = 1, .keys = 10, .q = q, .k = kv, .v = kv };
    bool ok = ref_attend(&p, &r, NULL, 1, 1, whole, &lse);
    for (int s = 0; s < 3; s++) {
        r.keys = cut[s + 1] - cut[s];
        r.k = r.v = kv + 4 * cut[s];
        ok = ok && ref_attend(&p, &r, NULL, 1, 1, part[s], &part_l[s]);
    }
    ref_merge(3, 4, (const double *const[]){ part[0], part[1], part[2] }, part_l, merged,
              &merged_l);
    check("definition", "merge runs", ok && part_l[0] == -INFINITY, part_l[0], -INFINITY);
    check_near("definition", "merge lse", merged_l, lse);
    for (int i = 0; i < 4; i++)
        check_near("definition", "merge o", merged[i], whole[i]);
}

/* ----------------------------------------------------------------------------------------- main */

static int usage(void)
{
    fprintf(stderr, "usage: test_ref [--cases FILE] [--id PREFIX] [--threads N] [--verbose]\n");
    return 2;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        { "cases", required_argument, NULL, 'c' }, { "id", required_argument, NULL, 'i' },
        { "threads", required_argument, NULL, 't' }, { "verbose", no_argument, NULL, 'v' }, { 0 },
    };
#ifdef FV_TEST_CASES
    const char *path = FV_TEST_CASES;
#else
    const char *path = "tests/cases/numeric.txt";
#endif
    const char *prefix = "";
    int threads = 2;
    char message[512];

    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1; )
        switch (c) {
        case 'c': path = optarg; break;
        case 'i': prefix = optarg; break;
        case 't': threads = atoi(optarg); break;
        case 'v': verbose = true; break;
        default: return usage();
        }
    if (optind != argc)
        return usage();

    case_file *file = case_read(path, false, message, sizeof message);
    if (!file) {
        fprintf(stderr, "test_ref: %s\n", message);
        return 2;
    }
    check_generator();
    check_refusals();
    check_long_line();
    check_reading();
    check_masks();
    check_rope();
    check_rope_moves();
    check_merge();
    for (int i = 0; i < file->num_rows; i++)
        if (!strncmp(file->rows[i].id, prefix, strlen(prefix)))
            check_row(&file->rows[i], threads);
    case_free(file);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
