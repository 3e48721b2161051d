/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_shape.c -- the GPU kernel's configuration without a GPU: for devices with 48, 99 and 227 KB of shared memory a block, every width in every
 * storage type gets a configuration that fits, or is refused with the number of bytes that are missing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cuda/attend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct { int block, sm; } devices[] = { { 48 << 10, 64 << 10 }, { 99 << 10, 100 << 10 }, { 227 << 10, 228 << 10 } };
static const struct { int dk, dv, heads, kv_heads; bool latent; } widths[] = {
    { 64, 64, 32, 8, false }, { 128, 128, 32, 8, false }, { 256, 256, 16, 8, false }, { 512, 512, 8, 4, false }, { 576, 512, 128, 1, true },
    { 192, 128, 16, 16, false }, { 80, 80, 5, 1, false }, { 72, 33, 4, 2, false }, { 1, 1, 1, 1, false },
};
static const char *const q_types[] = { "f16", "bf16", "f32" };
static const char *const kv_types[] = { "f16", "bf16", "f32", "fp8_e4m3", "fp8_e5m2", "int8", "fp4_e2m1" };

static int fits, refusals;

static fv__attend_device device_of(int i)
{
    return (fv__attend_device){ .shared_per_block = devices[i].block, .shared_per_sm = devices[i].sm, .shared_reserved = 1024, .registers_per_sm = 65536,
                                .num_sms = 132 };
}

/* A refusal says how many bytes are missing, and the kernel would really be that much too large. */
static void check_refusal(const fv_error *err, const fv__attend_device *d, const char *what)
{
    int need = 0, missing = 0;
    const char *at = strstr(err->text, "need ");
    refusals++;
    if (!at || sscanf(at, "need %d bytes", &need) != 1 || !(at = strchr(at, ';')) || sscanf(at, "; %d bytes are missing", &missing) != 1) {
        print_error("%s: %s\n", what, err->text);
        fail();
    }
    if (missing <= 0) {
        print_error("%s: %s\n", what, err->text);
        fail();
    }
    assert_true(need - missing <= d->shared_per_block && need - missing <= d->shared_per_sm - d->shared_reserved);
}

static void check_config(const fv__problem *p, const fv_plan_desc *limits, const fv__attend_config *c, const fv__attend_device *d, const char *what)
{
    fv__kernel_shape shape = { 0 };
    fits++;
    if (c->shared_bytes > d->shared_per_block || c->blocks_per_sm * (c->shared_bytes + d->shared_reserved) > d->shared_per_sm) {
        print_error("%s: %d bytes a block, %d blocks an SM\n", what, c->shared_bytes, c->blocks_per_sm);
        fail();
    }
    assert_true(c->stages >= 1 && c->tile >= 16 && c->tile % 16 == 0 && c->warps >= 1 && c->blocks_per_sm >= 1);
    assert_true(c->num_kinds >= 1 && c->num_kinds <= FV__ATTEND_KINDS);
    for (int i = 0; i < c->num_kinds; i++) assert_true(c->kinds[i].m_tiles >= 1 && c->kinds[i].warps_rows * c->kinds[i].warps_values <= c->warps);
    assert_int_equal(c->unit_heads * c->units_per_kv_head, p->group);
    assert_true(c->unit_heads <= c->rows);
    fv__attend_shape(p, limits, c, d, &shape);
    assert_true(shape.workers == c->blocks_per_sm * d->num_sms && shape.max_packed == c->rows && shape.num_tiles == c->num_kinds);
    char *text = fv__attend_text(p, c);
    assert_non_null(text);
    free(text);
}

static void check_one(int device, int width, const char *q, const char *kv, bool decode, bool invariant, const char *scale,
                      bool sums)
{
    const fv__attend_device d = device_of(device);
    const fv_variant_use uses[] = { { .name = "causal" }, { .name = "key_sums" } };
    const fv_problem given = { .q = q, .k = kv, .v = widths[width].latent ? NULL : kv, .o = q, .num_q_heads = widths[width].heads,
                               .num_kv_heads = widths[width].kv_heads, .dim_qk = widths[width].dk, .dim_v = widths[width].dv, .variants = uses,
                               .num_variants = 1 + sums, .v_in_k = widths[width].latent, .k_scale = scale,
                               .v_scale = widths[width].latent ? NULL : scale };
    const fv_plan_desc limits = { .max_requests = 64, .max_rows = decode ? 64 : 4096, .max_kv_tokens = 1 << 20, .max_pages = 1 << 16, .chunk = 1024,
                                  .invariant = invariant };
    fv__problem p;
    fv__attend_config c;
    fv_error err = { 0 };
    char what[160];
    snprintf(what, sizeof what, "%d KB, dims %d %d, %s %s%s%s%s", devices[device].block >> 10, widths[width].dk, widths[width].dv, q, kv,
             decode ? " decode" : "", invariant ? " invariant" : "", sums ? " sums" : "");
    if (fv__problem_init(&given, &p, &err) != FV_OK) return;    /* e.g. 4-bit rows that are no multiple of 16 */
    const fv_status status = fv__attend_configure(&p, &limits, &d, &c, &err);
    if (status == FV_OK) check_config(&p, &limits, &c, &d, what);
    else if (strstr(err.text, "4-bit keys")) assert_true(widths[width].dk % 16 != 0);
    else check_refusal(&err, &d, what);
    fv__problem_free(&p);
}

static void test_every_choice_fits(void **state)
{
    static const char *const scales[] = { NULL, "token_head" };
    (void)state;
    for (int d = 0; d < FV__COUNT(devices); d++)
        for (int w = 0; w < FV__COUNT(widths); w++)
            for (int q = 0; q < FV__COUNT(q_types); q++)
                for (int k = 0; k < FV__COUNT(kv_types); k++)
                    for (int way = 0; way < 16; way++)
                        check_one(d, w, q_types[q], kv_types[k], way & 1, way >> 1 & 1, scales[way >> 2 & 1], way >> 3);
    print_message("%d configurations fit, %d are refused with the bytes that are missing\n", fits, refusals);
    assert_true(fits > 1000);
}

/* What the large device must take: all of it in 16 bits and fewer. */
static void test_the_large_device_takes_all(void **state)
{
    (void)state;
    for (int w = 0; w < FV__COUNT(widths); w++)
        for (int q = 0; q < 2; q++)
            for (int k = 0; k < FV__COUNT(kv_types); k++) {
                if (k == 2 || k == (q ? 0 : 1)) continue;
                const int before = refusals;
                check_one(2, w, q_types[q], kv_types[k], true, false, NULL, true);
                check_one(2, w, q_types[q], kv_types[k], false, false, NULL, true);
                check_one(2, w, q_types[q], kv_types[k], true, false, NULL, false);
                check_one(2, w, q_types[q], kv_types[k], false, false, NULL, false);
                assert_int_equal(refusals, before);
            }
}

/* What only CPUs read is refused by name. */
static void check_refused(const fv_problem *given, const char *field, const char *word)
{
    const fv__attend_device d = device_of(2);
    const fv_plan_desc limits = { .max_requests = 4, .max_rows = 4, .max_kv_tokens = 1 << 20, .max_pages = 1 << 16 };
    fv__problem p;
    fv__attend_config c;
    fv_error err = { 0 };
    assert_int_equal(fv__problem_init(given, &p, NULL), FV_OK);
    assert_int_equal(fv__attend_configure(&p, &limits, &d, &c, &err), FV_E_UNSUPPORTED);
    assert_string_equal(err.field, field);
    assert_non_null(strstr(err.text, word));
    fv__problem_free(&p);
}

static void test_what_cpus_read_is_refused(void **state)
{
    (void)state;
    fv_problem given = { .q = "bf16", .k = "int4", .v = "int4", .o = "bf16", .num_q_heads = 32, .num_kv_heads = 8, .dim_qk = 128 };
    check_refused(&given, "problem.k", "int4");
    given.k = "bf16";
    check_refused(&given, "problem.v", "int4");
    given.v = "bf16";
    given.page_order = "tiles";
    check_refused(&given, "problem.page_order", "rows");
}

/* The same question has the same answer. */
static void test_choices_are_a_function(void **state)
{
    const fv__attend_device d = device_of(1);
    const fv_problem given = { .q = "bf16", .k = "bf16", .v = "bf16", .o = "bf16", .num_q_heads = 32, .num_kv_heads = 8, .dim_qk = 128 };
    const fv_plan_desc limits = { .max_requests = 64, .max_rows = 4096, .max_kv_tokens = 1 << 20, .max_pages = 1 << 16, .chunk = 1024 };
    fv__problem p;
    fv__attend_config a, b;
    (void)state;
    assert_int_equal(fv__problem_init(&given, &p, NULL), FV_OK);
    memset(&a, 1, sizeof a);
    memset(&b, 2, sizeof b);
    assert_int_equal(fv__attend_configure(&p, &limits, &d, &a, NULL), FV_OK);
    assert_int_equal(fv__attend_configure(&p, &limits, &d, &b, NULL), FV_OK);
    assert_memory_equal(&a, &b, sizeof a);
    fv__problem_free(&p);
}

/* The text of shape i of bf16 and dims 128 under causal, softcap and window: heads, groups, maxima and sharing differ from shape to shape. */
static char *text_of_shape(int i, const fv__attend_device *d)
{
    static const int groups[] = { 1, 2, 3, 4, 7, 8, 12, 16, 20, 32, 48, 64, 71, 96, 128 };
    const fv_arg left = { .name = "left", .number = 64 + i }, cap = { .name = "cap", .number = 20 + i % 11 };
    const fv_variant_use uses[] = { { .name = "causal" }, { .name = "softcap", .args = &cap, .num_args = 1 },
                                    { .name = "window", .args = &left, .num_args = 1 } };
    const int group = groups[i % FV__COUNT(groups)], kv_heads = 1 + i / FV__COUNT(groups) % 9, requests = 1 + 5 * i;
    const fv_problem given = { .q = "bf16", .k = "bf16", .v = "bf16", .o = "bf16", .num_q_heads = group * kv_heads, .num_kv_heads = kv_heads, .dim_qk = 128,
                               .variants = uses, .num_variants = FV__COUNT(uses) };
    const fv_plan_desc limits = { .max_requests = requests, .max_rows = requests * (i % 2 ? 1 : 1 + i), .max_kv_tokens = 1000 * (1 + i),
                                  .max_pages = 1 + i * i, .workers = i % 7, .checked = i % 3 == 0,
                                  .sharing = i % 5 ? FV_SHARING_OFF : FV_SHARING_FIND };
    fv__problem p;
    fv__attend_config c;
    assert_int_equal(fv__problem_init(&given, &p, NULL), FV_OK);
    assert_int_equal(fv__attend_configure(&p, &limits, d, &c, NULL), FV_OK);
    char *text = fv__attend_text(&p, &c);
    assert_non_null(text);
    fv__problem_free(&p);
    return text;
}

/* A build is known by its text (and by options and an arch that are the same for all): 1,000 shapes ask for two. */
static void test_a_thousand_shapes_are_two_builds(void **state)
{
    (void)state;
    for (int device = 1; device < FV__COUNT(devices); device++) {
        const fv__attend_device d = device_of(device);
        char *builds[2] = { NULL };
        int n = 0;
        for (int i = 0; i < 1000; i++) {
            char *text = text_of_shape(i, &d);
            bool known = false;
            for (int k = 0; k < n; k++) known = known || !strcmp(builds[k], text);
            if (known) {
                free(text);
            } else {
                assert_true(n < 2);
                builds[n++] = text;
            }
        }
        assert_int_equal(n, 2);
        for (int k = 0; k < n; k++) free(builds[k]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_choice_fits),
        cmocka_unit_test(test_the_large_device_takes_all),
        cmocka_unit_test(test_what_cpus_read_is_refused),
        cmocka_unit_test(test_choices_are_a_function),
        cmocka_unit_test(test_a_thousand_shapes_are_two_builds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
