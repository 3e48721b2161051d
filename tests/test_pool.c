/* SPDX-License-Identifier: Apache-2.0 */
/* test_pool.c -- worker threads: each item once, callers that take turns, nested calls, fork, and no CPU time when idle. Runs under
 * ThreadSanitizer too (without fork: it does not know threads that a child starts). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "idle.h"
#include "os.h"
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 5000 };

typedef struct tally {
    atomic_int seen[MOST];
    int plain[MOST];                    /* written without atomics: the caller must see it */
    fv__pool *pool;                     /* of nested calls */
} tally;

static void count_item(void *arg, int i)
{
    tally *t = arg;
    atomic_fetch_add(&t->seen[i], 1);
    t->plain[i] = i + 1;
}

static void clear(tally *t)
{
    for (int i = 0; i < MOST; i++) {
        atomic_store(&t->seen[i], 0);
        t->plain[i] = 0;
    }
}

static void check_tally(tally *t, int count)
{
    for (int i = 0; i < MOST; i++) {
        assert_int_equal(atomic_load(&t->seen[i]), i < count);
        assert_int_equal(t->plain[i], i < count ? i + 1 : 0);
    }
}

static void every_item_is_done_once(void **state)
{
    (void)state;
    static tally t;
    for (int threads = 1; threads <= 8; threads++) {
        fv__pool *pool = fv__pool_create(threads, NULL);
        assert_non_null(pool);
        static const int counts[] = { 0, 1, 2, 3, 7, 8, 64, 1000, MOST };
        for (int c = 0; c < FV__COUNT(counts); c++) {
            clear(&t);
            fv__pool_run(pool, count_item, &t, counts[c]);
            check_tally(&t, counts[c]);
        }
        fv__pool_destroy(pool);
    }
}

/* Thousands of tiny jobs in a row: workers are caught awake, falling asleep and asleep. */
static void jobs_in_a_row(void **state)
{
    (void)state;
    fv__pool *pool = fv__pool_create(3, NULL);
    for (int job = 0; job < 3000; job++) {
        tally *t = test_calloc(1, sizeof *t);
        const int count = 2 + job % 7;
        fv__pool_run(pool, count_item, t, count);       /* t lives no longer than the job */
        for (int i = 0; i < count; i++) assert_int_equal(t->plain[i], i + 1);
        test_free(t);
        if (job % 500 == 0) nanosleep(&(struct timespec){ .tv_nsec = 300000 }, NULL);
    }
    fv__pool_destroy(pool);
}

typedef struct caller {
    fv__pool *pool;
    tally t;
    int bad;
} caller;

static void *call_often(void *arg)
{
    caller *c = arg;
    for (int round = 0; round < 200; round++) {
        const int count = 1 + (round * 37) % 300;
        clear(&c->t);
        fv__pool_run(c->pool, count_item, &c->t, count);
        for (int i = 0; i < MOST; i++) c->bad += atomic_load(&c->t.seen[i]) != (i < count);
    }
    return NULL;
}

static void several_callers_take_turns(void **state)
{
    (void)state;
    static caller callers[4];
    pthread_t threads[4];
    fv__pool *pool = fv__pool_create(3, NULL);
    for (int i = 0; i < 4; i++) {
        callers[i].pool = pool;
        assert_int_equal(pthread_create(&threads[i], NULL, call_often, &callers[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(callers[i].bad, 0);
    }
    fv__pool_destroy(pool);
}

static void count_nested(void *arg, int i)
{
    tally *t = arg;
    fv__pool_run(t->pool, count_item, &t[1 + i], 100);
}

static void an_item_may_call_again(void **state)
{
    (void)state;
    static tally t[1 + 6];
    t[0].pool = fv__pool_create(4, NULL);
    fv__pool_run(t[0].pool, count_nested, t, 6);
    for (int i = 1; i <= 6; i++) check_tally(&t[i], 100);
    fv__pool_destroy(t[0].pool);
}

/* Two items that wait for each other: they can only end if a second thread is really there. */
static void meet(void *arg, int i)
{
    (void)i;
    atomic_int *arrived = arg;
    atomic_fetch_add(arrived, 1);
    for (const int64_t end = fv__os_now_ns() + 20000000000; atomic_load(arrived) < 2 && fv__os_now_ns() < end;) { }
}

static void items_run_at_the_same_time(void **state)
{
    (void)state;
    fv__pool *pool = fv__pool_create(2, NULL);
    for (int round = 0; round < 50; round++) {
        atomic_int arrived = 0;
        fv__pool_run(pool, meet, &arrived, 2);
        assert_int_equal(atomic_load(&arrived), 2);
    }
    fv__pool_destroy(pool);
}

static void idle_workers_sleep(void **state)
{
    (void)state;
    static tally t;
    fv__pool *pool = fv__pool_create(4, NULL);
    fv__pool_run(pool, count_item, &t, 100);
    assert_true(becomes_idle());
    fv__pool_destroy(pool);
}

#ifndef __SANITIZE_THREAD__
/* In the child: 0 all is well. */
static int use_in_child(fv__pool *pool)
{
    static tally t;
    alarm(60);                          /* a child that hangs is a failure */
    memset(&t, 0, sizeof t);
    fv__pool_run(pool, count_item, &t, 1000);
    for (int i = 0; i < 1000; i++)
        if (t.plain[i] != i + 1) return 1;
    atomic_int arrived = 0;
    fv__pool_run(pool, meet, &arrived, 2);              /* it has threads of its own */
    if (atomic_load(&arrived) != 2) return 2;
    fv__pool_destroy(pool);
    return 0;
}

static atomic_bool keep_going;

static void *keep_busy(void *arg)
{
    static tally t;
    while (atomic_load(&keep_going)) fv__pool_run(arg, count_item, &t, 50);
    return NULL;
}

static void a_child_has_its_own_threads(void **state)
{
    (void)state;
    static tally t;
    pthread_t busy;
    fv__pool *pool = fv__pool_create(3, NULL);
    fv__pool_run(pool, count_item, &t, 100);
    atomic_store(&keep_going, true);
    assert_int_equal(pthread_create(&busy, NULL, keep_busy, pool), 0);     /* forks meet jobs in every state */
    for (int round = 0; round < 30; round++) {
        const pid_t child = fork();
        if (child == 0) _exit(use_in_child(pool));
        int status = -1;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
    }
    atomic_store(&keep_going, false);
    pthread_join(busy, NULL);
    clear(&t);
    fv__pool_run(pool, count_item, &t, 100);            /* and the parent kept its own */
    check_tally(&t, 100);
    fv__pool_destroy(pool);
}
#endif

static void no_memory_is_answered(void **state)
{
    (void)state;
    for (long n = 1; n <= 2; n++) {
        fv__os_fail_at = n;
        assert_null(fv__pool_create(2, NULL));
        fv__os_fail_at = 0;
    }
    fv__pool_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_item_is_done_once),
        cmocka_unit_test(jobs_in_a_row),
        cmocka_unit_test(several_callers_take_turns),
        cmocka_unit_test(an_item_may_call_again),
        cmocka_unit_test(items_run_at_the_same_time),
        cmocka_unit_test(idle_workers_sleep),
#ifndef __SANITIZE_THREAD__
        cmocka_unit_test(a_child_has_its_own_threads),
#endif
        cmocka_unit_test(no_memory_is_answered),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
