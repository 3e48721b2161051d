/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_update.c -- what an update brings to the device and what a run launches, without a GPU: on the driver of tests/fake, whose memory is the
 * host's, so that a test can read what kernels would. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "cuda/state.h"
#include "plan.h"

#include <dlfcn.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 4, DIM = 64, PAGE = 16, WIDTH = 100, MAX_REQUESTS = 5 };

static char folder[] = "/tmp/test_cuda_update_XXXXXX";
static fv_ctx *ctx;
static fv_error err;

static struct {
    void (*fake_watch)(void (*fn)(const char *name, const void *parameter));
    int (*fake_calls)(void), (*fake_depth)(void);
    void *(*fake_context)(int);
    CUresult (*cuCtxPushCurrent_v2)(void *), (*cuCtxPopCurrent_v2)(void **);
} fake;

static const fv__plan_head *plan_there;         /* of the last launch of the attention kernel */
static const d_step *step_there;
static int attention_launches, stale_launches[2];

static void watch(const char *name, const void *parameter)
{
    if (!strcmp(name, "attend_sm80")) {
        const d_attend *a = parameter;
        plan_there = (const fv__plan_head *)(const void *)a->plan;
        step_there = a->step;
        attention_launches++;
    } else if (!strcmp(name, "stale")) {
        stale_launches[((const d_stale *)parameter)->write != 0]++;
    }
}

static int set_up(void **state)
{
    char command[400], path[100];
    (void)state;
    if (!mkdtemp(folder)) return -1;
    snprintf(command, sizeof command, "cc -std=c11 -D_GNU_SOURCE -shared -fPIC -w -o %s/libcuda.so.1 tests/fake/cuda.c tests/fake/watch.c -ldl",
             folder);
    if (system(command)) return -1;
    snprintf(command, sizeof command, "cc -std=c11 -shared -fPIC -w -o %s/libnvrtc.so.13 tests/fake/no_nvrtc.c", folder);
    if (system(command)) return -1;
    snprintf(path, sizeof path, "%s/libcuda.so.1", folder);
    setenv("FV_CUDA_DRIVER_PATH", path, 1);
    void *library = dlopen(path, RTLD_NOW);
    snprintf(path, sizeof path, "%s/libnvrtc.so.13", folder);
    setenv("FV_NVRTC_PATH", path, 1);
    snprintf(path, sizeof path, "%s/cache", folder);
    setenv("FV_CACHE_DIR", path, 1);
    if (!library) return -1;
#define GET(name) *(void **)&fake.name = dlsym(library, #name)
    GET(fake_watch), GET(fake_calls), GET(fake_depth), GET(fake_context), GET(cuCtxPushCurrent_v2), GET(cuCtxPopCurrent_v2);
    fake.fake_watch(watch);
    const fv_status status = fv_open(&(fv_open_desc){ .device = "cuda:0" }, &ctx, &err);
    if (status != FV_OK) print_error("%s\n", err.text);
    return status == FV_OK ? 0 : -1;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *where)
{
    (void)st, (void)type, (void)where;
    return remove(path);
}

static int tear_down(void **state)
{
    (void)state;
    if (fv_close(&ctx) != FV_OK) return -1;
    return nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

#define CALL(call) do { if ((call) != FV_OK) { print_error("%s: %s\n", #call, err.text); fail(); } } while (0)

static fv_plan *make_plan(bool checked, fv_sharing sharing)
{
    const fv_variant_use causal = { .name = "causal" };
    const fv_problem p = { .q = "bf16", .k = "bf16", .v = "bf16", .o = "bf16", .num_q_heads = HEADS, .dim_qk = DIM, .variants = &causal,
                           .num_variants = 1 };
    const fv_plan_desc limits = { .max_requests = MAX_REQUESTS, .max_rows = 2 * MAX_REQUESTS, .max_kv_tokens = MAX_REQUESTS * WIDTH * PAGE,
                                  .max_pages = MAX_REQUESTS * WIDTH, .checked = checked, .sharing = sharing };
    fv_plan *plan = NULL;
    CALL(fv_plan_create(ctx, &p, &limits, &plan, &err));
    return plan;
}

/* The memory of tensors is never touched: nothing runs. */
static void run(fv_plan *plan, int rows)
{
    static char memory[64];
    const int64_t pages = MAX_REQUESTS * WIDTH, token = HEADS * DIM;
    const fv_tensor q = { .data = memory, .ndim = 3, .shape = { rows, HEADS, DIM }, .stride = { token, DIM, 1 } };
    const fv_tensor k = { .data = memory, .ndim = 4, .shape = { pages, PAGE, HEADS, DIM }, .stride = { PAGE * token, token, DIM, 1 } };
    const fv_tensors t = { .q = q, .k = k, .v = k, .o = q };
    CALL(fv_run(plan, &t, (fv_stream)memory, &err));
}

/* Page tables of MAX_REQUESTS x WIDTH entries, of 32 or 64 bits, dense or every second. */
typedef struct tables {
    char ids[16 * MAX_REQUESTS * WIDTH], v_ids[16 * MAX_REQUESTS * WIDTH];
    int64_t values[2][MAX_REQUESTS * WIDTH];
    fv_batch batch;
    int32_t lengths[MAX_REQUESTS];
} tables;

static void put(char *list, int i, bool wide, int64_t x)
{
    const int32_t narrow = (int32_t)x;
    if (wide) memcpy(list + 8 * i, &x, 8);
    else memcpy(list + 4 * i, &narrow, 4);
}

static void make_tables(tables *t, int n, const int32_t *lengths, bool wide, int stride, bool v_too, int seed)
{
    memset(t, 0x7f, sizeof *t);
    for (int i = 0; i < MAX_REQUESTS * WIDTH; i++) {
        t->values[0][i] = (i * 7 + seed) % (MAX_REQUESTS * WIDTH);
        t->values[1][i] = (i * 11 + seed + 3) % (MAX_REQUESTS * WIDTH);
        put(t->ids, i * stride, wide, t->values[0][i]);
        put(t->v_ids, i * stride, wide, t->values[1][i]);
    }
    memcpy(t->lengths, lengths, sizeof *lengths * (size_t)n);
    const fv_index ids = { .host = t->ids, .count = n * WIDTH, .stride = stride, .type = wide ? FV_INDEX_I64 : FV_INDEX_I32 };
    t->batch = (fv_batch){ .num_requests = n, .lengths = fv_i32(t->lengths, n),
                           .pages = { .page_size = PAGE, .num_pages = MAX_REQUESTS * WIDTH, .ids = ids, .table_width = WIDTH,
                                      .table_stride = WIDTH } };
    if (!v_too) return;
    t->batch.pages.v_ids = ids;
    t->batch.pages.v_ids.host = t->v_ids;
}

static int64_t entry(const void *list, int64_t i, int64_t stride, int is64)
{
    return is64 ? ((const int64_t *)list)[i * stride] : ((const int32_t *)list)[i * stride];
}

/* Every segment on the device reads the pages of its request, in order, and nothing behind the array. */
static void check_segments(const tables *t)
{
    const fv__segment *segments = FV__PLAN_ARRAY(plan_there, fv__segment, segments);
    int seen = 0;
    for (int s = 0; s < plan_there->num_segments; s++) {
        const int64_t pages = (segments[s].num_keys + PAGE - 1) / PAGE;
        const int request = segments[s].request;
        assert_true(request >= 0 && segments[s].table + pages <= plan_there->table_entries);
        seen += segments[s].num_keys;
        for (int64_t p = 0; p < pages; p++) {
            assert_int_equal(entry(step_there->ids, segments[s].table + p, step_there->ids_stride, step_there->ids_64),
                             t->values[0][request * WIDTH + p]);
            if (!t->batch.pages.v_ids.host) continue;
            assert_int_equal(entry(step_there->v_ids, segments[s].table + p, step_there->v_ids_stride, step_there->v_ids_64),
                             t->values[1][request * WIDTH + p]);
        }
    }
    int total = 0;
    for (int64_t r = 0; r < t->batch.num_requests; r++) total += t->lengths[r];
    assert_int_equal(seen, total);
}

static void tables_arrive(void **state)
{
    static tables t;
    static const int32_t few[MAX_REQUESTS] = { 33, 0, 17, 16, 1 }, many[MAX_REQUESTS] = { 1600, 1500, 1599, 0, 1600 };
    (void)state;
    fv_plan *plan = make_plan(false, FV_SHARING_OFF);
    for (int wide = 0; wide < 2; wide++)
        for (int stride = 1; stride < 3; stride++)
            for (int v_too = 0; v_too < 2; v_too++)
                for (int full = 0; full < 2; full++) {
                    make_tables(&t, MAX_REQUESTS, full ? many : few, wide, stride, v_too, 10 * stride + full);
                    CALL(fv_plan_update(plan, NULL, &t.batch, NULL, &err));
                    run(plan, MAX_REQUESTS);
                    /* what a table has beside the pages in use stays behind where it is much, or more than max_pages have room for */
                    const int in_use = full ? 100 + 94 + 100 + 0 + 100 : 3 + 2 + 1 + 1;
                    assert_int_equal(plan_there->table_entries, full && !(wide && stride == 2) ? MAX_REQUESTS * WIDTH : in_use);
                    check_segments(&t);
                }
    static const int32_t none[MAX_REQUESTS];
    make_tables(&t, MAX_REQUESTS, none, true, 2, true, 1);          /* more bytes than there is room for, and none of them in use */
    CALL(fv_plan_update(plan, NULL, &t.batch, NULL, &err));
    run(plan, MAX_REQUESTS);
    assert_int_equal(plan_there->table_entries, 0);
    CALL(fv_plan_destroy(&plan));
}

/* More updates than there are buffers; lists of several kinds beside each other. */
static void updates_follow_one_another(void **state)
{
    static tables t[7];
    int32_t lengths[2] = { 100, 40 }, positions[2];
    (void)state;
    fv_plan *plan = make_plan(false, FV_SHARING_OFF);
    for (int i = 0; i < 7; i++) {
        lengths[0] += 90;
        make_tables(&t[i], 2, lengths, i % 2, 1, i % 3 == 0, i);
        positions[0] = 1000 + i;
        positions[1] = 2000 + i;
        t[i].batch.row_positions = fv_i32(positions, 2);
        CALL(fv_plan_update(plan, NULL, &t[i].batch, NULL, &err));
        run(plan, 2);
        check_segments(&t[i]);
        assert_int_equal(step_there->row_positions[0], 1000 + i);
        assert_int_equal(step_there->row_positions[1], 2000 + i);
        assert_int_equal(((uintptr_t)step_there->ids - (uintptr_t)step_there) % 64, 0);
    }
    CALL(fv_plan_destroy(&plan));
}

static void steps_are_few_calls(void **state)
{
    static tables t;
    static const int32_t lengths[2] = { 100, 40 };
    (void)state;
    fv_plan *plan = make_plan(false, FV_SHARING_OFF);
    make_tables(&t, 2, lengths, false, 1, false, 1);
    for (int i = 0; i < 5; i++) CALL(fv_plan_update(plan, NULL, &t.batch, NULL, &err));
    int before = fake.fake_calls();
    run(plan, 2);
    assert_int_equal(fake.fake_calls() - before, 4);                /* which context, push, launch, pop */
    assert_int_equal(fake.fake_depth(), 0);
    fake.cuCtxPushCurrent_v2(fake.fake_context(0));
    before = fake.fake_calls();
    run(plan, 2);
    assert_int_equal(fake.fake_calls() - before, 2);                /* it is current already: which context, launch */
    before = fake.fake_calls();
    CALL(fv_plan_update(plan, NULL, &t.batch, NULL, &err));
    assert_in_range(fake.fake_calls() - before, 4, 9);              /* a free buffer, one copy, one event */
    assert_int_equal(fake.fake_depth(), 1);
    void *popped;
    fake.cuCtxPopCurrent_v2(&popped);
    CALL(fv_plan_destroy(&plan));
}

static void checked_plans_stamp_and_compare(void **state)
{
    static tables t;
    static const int32_t lengths[2] = { 100, 40 };
    (void)state;
    fv_plan *plan = make_plan(true, FV_SHARING_OFF);
    make_tables(&t, 2, lengths, false, 1, false, 1);
    stale_launches[0] = stale_launches[1] = 0;
    CALL(fv_plan_update(plan, NULL, &t.batch, NULL, &err));
    assert_int_equal(stale_launches[1], 1);
    const int before = attention_launches;
    run(plan, 2);
    run(plan, 2);
    assert_int_equal(stale_launches[0], 2);
    assert_int_equal(attention_launches - before, 2);
    CALL(fv_plan_destroy(&plan));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_arrive), cmocka_unit_test(updates_follow_one_another), cmocka_unit_test(steps_are_few_calls),
        cmocka_unit_test(checked_plans_stamp_and_compare),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
