/* SPDX-License-Identifier: Apache-2.0 */
/* test_threads.c -- threads as a host sees them, through the public functions: a host that owns the threads runs all of the work, a child of fork()
 * runs plans that its parent made, a context that has nothing to do uses no CPU, a worker's scratch is first touched by whoever runs it, and what
 * two workers write shares no cache line. test_pool.c has the pool's own invariants. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "cpu/cpu.h"
#include "foveal/foveal.h"
#include "idle.h"

#include <dirent.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { ROWS = 4, HEADS = 8, DIM = 64, KEYS_EACH = 1500, KEYS_ALL = ROWS * KEYS_EACH };

static const fv_problem problem = { .q = "f32", .k = "f32", .v = "f32", .o = "f32", .num_q_heads = HEADS, .dim_qk = DIM };
static const fv_plan_desc limits = { .max_requests = ROWS, .max_rows = ROWS, .max_kv_tokens = KEYS_ALL };

/* One decode step of ROWS requests. */
typedef struct step {
    fv_ctx *ctx;
    fv_plan *plan;
    float *q, *k, *v, *o;
} step;

static float *random_floats(int64_t n, uint32_t seed)
{
    float *x = malloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525 + 1013904223;
        x[i] = (float)(int32_t)seed * 0x1p-31f;
    }
    return x;
}

static void update(step *s)
{
    static const int32_t rows[ROWS + 1] = { 0, 1, 2, 3, 4 };
    int32_t indptr[ROWS + 1];
    fv_error err;
    for (int i = 0; i <= ROWS; i++) indptr[i] = i * KEYS_EACH;
    const fv_batch batch = { .num_requests = ROWS, .rows = fv_i32(rows, ROWS + 1), .kv_indptr = fv_i32(indptr, ROWS + 1) };
    if (fv_plan_update(s->plan, NULL, &batch, NULL, &err) != FV_OK) fail_msg("%s", err.text);
}

static void open_step(const fv_open_desc *desc, step *s)
{
    fv_error err;
    if (fv_open(desc, &s->ctx, &err) != FV_OK || fv_plan_create(s->ctx, &problem, &limits, &s->plan, &err) != FV_OK) fail_msg("%s", err.text);
    update(s);
    s->q = random_floats(ROWS * HEADS * DIM, 1);
    s->k = random_floats((int64_t)KEYS_ALL * HEADS * DIM, 2);
    s->v = random_floats((int64_t)KEYS_ALL * HEADS * DIM, 3);
    s->o = malloc(ROWS * HEADS * DIM * sizeof *s->o);
}

static void close_step(step *s)
{
    fv_plan_destroy(&s->plan);
    assert_int_equal(fv_close(&s->ctx), FV_OK);
    free(s->q);
    free(s->k);
    free(s->v);
    free(s->o);
}

static fv_tensor rows_of(float *data, int64_t rows)
{
    return (fv_tensor){ .data = data, .ndim = 3, .shape = { rows, HEADS, DIM }, .stride = { HEADS * DIM, DIM, 1 } };
}

static fv_status run(step *s)
{
    const fv_tensors t = { .q = rows_of(s->q, ROWS), .k = rows_of(s->k, KEYS_ALL), .v = rows_of(s->v, KEYS_ALL), .o = rows_of(s->o, ROWS) };
    memset(s->o, 0xFF, ROWS * HEADS * DIM * sizeof *s->o);
    return fv_run(s->plan, &t, NULL, NULL);
}

static int tasks(void)
{
    int n = 0;
    DIR *folder = opendir("/proc/self/task");
    while (folder && readdir(folder)) n++;
    if (folder) closedir(folder);
    return n;
}

/* ------------------------------------------------------------------------------------------------- a host's own threads */

enum { HOST_THREADS = 3 };

typedef struct host {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t threads[HOST_THREADS];
    void (*fn)(void *arg, int i);
    void *arg;
    int next, count, done;
    bool stop;
    int items, calls;                   /* that were run */
} host;

static void *host_thread(void *arg)
{
    host *h = arg;
    pthread_mutex_lock(&h->lock);
    while (!h->stop) {
        if (h->next >= h->count) {
            pthread_cond_wait(&h->changed, &h->lock);
            continue;
        }
        const int i = h->next++;
        pthread_mutex_unlock(&h->lock);
        h->fn(h->arg, i);                       /* neither changes before the item is done */
        pthread_mutex_lock(&h->lock);
        h->done++;
        pthread_cond_broadcast(&h->changed);
    }
    pthread_mutex_unlock(&h->lock);
    return NULL;
}

/* The caller only waits. */
static void on_hosts_threads(void *user, void (*fn)(void *arg, int i), void *arg, int count)
{
    host *h = user;
    pthread_mutex_lock(&h->lock);
    h->fn = fn;
    h->arg = arg;
    h->next = h->done = 0;
    h->count = count;
    h->calls++;
    h->items += count;
    pthread_cond_broadcast(&h->changed);
    while (h->done < count) pthread_cond_wait(&h->changed, &h->lock);
    h->count = h->next = 0;
    pthread_mutex_unlock(&h->lock);
}

static int64_t cpu_ns(clockid_t whose)
{
    struct timespec t;
    clock_gettime(whose, &t);
    return t.tv_sec * (int64_t)1000000000 + t.tv_nsec;
}

static void a_host_runs_all_of_it(void **state)
{
    int64_t all = 0, own = 0;
    (void)state;
    step ours = { 0 }, theirs = { 0 };
    host h = { .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER };
    open_step(&(fv_open_desc){ .device = "cpu", .num_threads = HOST_THREADS }, &ours);
    assert_int_equal(run(&ours), FV_OK);
    for (int i = 0; i < HOST_THREADS; i++) assert_int_equal(pthread_create(&h.threads[i], NULL, host_thread, &h), 0);
    const int before = tasks();
    open_step(&(fv_open_desc){ .device = "cpu", .num_threads = HOST_THREADS, .parallel_for = on_hosts_threads, .parallel_for_user = &h }, &theirs);
    for (int round = 0; round < 5; round++) {
        update(&theirs);
        const int64_t all_before = cpu_ns(CLOCK_PROCESS_CPUTIME_ID), own_before = cpu_ns(CLOCK_THREAD_CPUTIME_ID);
        assert_int_equal(run(&theirs), FV_OK);
        own += cpu_ns(CLOCK_THREAD_CPUTIME_ID) - own_before;
        all += cpu_ns(CLOCK_PROCESS_CPUTIME_ID) - all_before;
        assert_memory_equal(theirs.o, ours.o, ROWS * HEADS * DIM * sizeof *ours.o);
    }
    assert_int_equal(tasks(), before);                  /* none were started */
    assert_true(h.calls >= 5 && h.items >= 5 * 2);      /* the work was split, and went through the hook */
    assert_true(own < all / 4);                         /* the caller did next to nothing */
    close_step(&theirs);
    pthread_mutex_lock(&h.lock);
    h.stop = true;
    pthread_cond_broadcast(&h.changed);
    pthread_mutex_unlock(&h.lock);
    for (int i = 0; i < HOST_THREADS; i++) pthread_join(h.threads[i], NULL);
    close_step(&ours);
}

/* ---------------------------------------------------------------------------------------------------------- fork, idle */

#ifndef __SANITIZE_THREAD__             /* it does not know threads that a child starts */
static void a_child_runs_its_parents_plan(void **state)
{
    (void)state;
    step s = { 0 };
    open_step(&(fv_open_desc){ .device = "cpu", .num_threads = 4 }, &s);
    assert_int_equal(run(&s), FV_OK);
    float expected[ROWS * HEADS * DIM];
    memcpy(expected, s.o, sizeof expected);
    for (int round = 0; round < 10; round++) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(60);                  /* a child that hangs is a failure */
            update(&s);
            if (run(&s) != FV_OK || memcmp(s.o, expected, sizeof expected)) _exit(1);
            if (tasks() <= 3) _exit(2);         /* ".", ".." and more than one thread: it has its own */
            fv_plan_destroy(&s.plan);
            _exit(fv_close(&s.ctx) != FV_OK);
        }
        int status = -1;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
        assert_int_equal(run(&s), FV_OK);       /* and the parent kept its own */
        assert_memory_equal(s.o, expected, sizeof expected);
    }
    close_step(&s);
}
#endif

static void nothing_to_do_costs_nothing(void **state)
{
    (void)state;
    step s = { 0 };
    open_step(&(fv_open_desc){ .device = "cpu", .num_threads = 4 }, &s);
    assert_int_equal(run(&s), FV_OK);
    assert_true(becomes_idle());
    close_step(&s);
}

/* ------------------------------------------------------------------------------------------------------------- memory */

typedef struct largest {
    char *block;
    size_t bytes;
} largest;

static void *take(void *user, size_t bytes, size_t alignment)
{
    (void)alignment;                    /* pages are aligned enough */
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    largest *l = user;
    if (memory == MAP_FAILED) return NULL;
    madvise(memory, bytes, MADV_NOHUGEPAGE);
    if (bytes > l->bytes) *l = (largest){ memory, bytes };
    return memory;
}

static void give(void *user, void *memory, size_t bytes)
{
    (void)user;
    munmap(memory, bytes);
}

static int64_t resident(const largest *l)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), n = (l->bytes + page - 1) / page;
    unsigned char *in = malloc(n);
    int64_t bytes = 0;
    assert_int_equal(mincore(l->block, l->bytes, in), 0);
    for (size_t i = 0; i < n; i++) bytes += in[i] & 1 ? (int64_t)page : 0;
    free(in);
    return bytes;
}

/* The largest block is the plan's: all workers' scratch and the partials. Whoever makes a plan leaves it alone, so its pages come to lie where the
 * threads are that work in it. */
static void scratch_is_first_touched_by_its_worker(void **state)
{
    (void)state;
    largest l = { 0 };
    const fv_allocator allocator = { take, give, &l };
    step s = { 0 };
    open_step(&(fv_open_desc){ .device = "cpu", .num_threads = 4, .allocator = &allocator }, &s);
    assert_true(l.bytes > 1 << 20);
    assert_in_range(resident(&l), 0, 128 << 10);
    const int64_t before = resident(&l);
    assert_int_equal(run(&s), FV_OK);
    assert_true(resident(&l) > before);
    close_step(&s);
}

static void partials_share_no_line(void **state)
{
    (void)state;
    static const int dims[] = { 1, 8, 40, 64, 80, 96, 128, 192, 512 }, groups[] = { 1, 2, 3, 4, 7, 8, 16, 71 };
    for (int level = 0; level < fv__cpu_isa_count(); level++)
        for (int d = 0; d < FV__COUNT(dims); d++)
            for (int g = 0; g < FV__COUNT(groups); g++) {
                const fv__cpu_isa *isa = fv__cpu_isa_at(level);
                fv__problem p;
                fv__kernel_shape shape;
                const fv_problem given = { .q = "bf16", .k = "bf16", .v = "bf16", .o = "bf16", .num_q_heads = groups[g], .num_kv_heads = 1,
                                           .dim_qk = dims[d] };
                if (!isa->available()) continue;
                assert_int_equal(fv__problem_init(&given, &p, NULL), FV_OK);
                assert_int_equal(isa->shape(&p, &limits, 4, &shape, NULL), FV_OK);
                assert_int_equal(shape.partial_bytes % 64, 0);
                fv__problem_free(&p);
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_host_runs_all_of_it),
#ifndef __SANITIZE_THREAD__
        cmocka_unit_test(a_child_runs_its_parents_plan),
#endif
        cmocka_unit_test(nothing_to_do_costs_nothing),
        cmocka_unit_test(scratch_is_first_touched_by_its_worker),
        cmocka_unit_test(partials_share_no_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
