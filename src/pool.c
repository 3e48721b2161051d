/* SPDX-License-Identifier: Apache-2.0 */
/* pool.c -- parallel_for on threads of our own.
 *
 * Nouns
 *   job      fn, arg and a count of items; one at a time, its caller holds `turn`
 *   head     generation << 32 | items left. Whoever lowers it by one, from a value with items left,
 *            owns one item
 *   done     items finished; the caller leaves when it equals the count
 *
 * Invariants
 *   (1) fn, arg and count change only while `turn` is held and head has no items left. Whoever
 *       takes an item of a generation has therefore read the fields of that generation: had they
 *       changed, head would have, and the exchange would have failed
 *   (2) nobody sleeps while there is something to do: a sleeper announces itself (sleepers,
 *       waiting) before it looks a last time, and whoever makes work (or ends it) looks for
 *       announcements after it has been published; both in one total order
 *   (3) a child of fork() finds no threads, whatever they were doing: `forks` differs, and the
 *       first call there makes the pool anew
 * Sizes: threads start on the first job of more than one item; a nested call runs its items where
 * it is. */
#include "pool.h"
#include "os.h"

#include <pthread.h>
#include <signal.h>

/* How long an idle worker looks before it sleeps, from the end of the job on: LEAST_SPIN_NS, or twice
 * as long as it had to wait the last time, if that was MOST_GAP_NS at most. To wake sleepers takes 40
 * to 80 us on a guest, and who looks for longer takes time from threads of the host. While others
 * work, MOST_SPIN_NS: a job's threads end at different times, and a caller has nothing else to do. */
#define LEAST_SPIN_NS 30000
#define MOST_GAP_NS 200000
#define MOST_SPIN_NS 500000

struct fv__pool {
    pthread_mutex_t turn;           /* held by the caller of the job */
    pthread_mutex_t lock;           /* for the two conditions only */
    pthread_cond_t work, finished;
    const fv_allocator *allocator;
    fv_allocator copy;
    pthread_t *threads;             /* [num_threads - 1] */
    int num_threads, started;
    bool tried;                     /* threads have been started, as many as the system gave */
    bool spin;
    unsigned forks;                 /* that this pool has seen; atomic */

    int64_t ended;                  /* when the last job did; under `turn` */

    _Alignas(64) uint64_t head;     /* atomics from here on */
    void (*fn)(void *arg, int i);
    void *arg;
    int count;
    int64_t spin_ns;                /* of workers that find nothing more to do */
    _Alignas(64) int done;
    int sleepers, waiting, stop;
};

/* How many fork() calls lie between this process and the first; atomic. */
static unsigned forks;
static pthread_mutex_t renewal = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Thread_local bool inside;   /* this thread is in some pool's item */

static void in_child(void)
{
    pthread_mutex_init(&renewal, NULL);
    __atomic_add_fetch(&forks, 1, __ATOMIC_RELEASE);
}

static void install(void)
{
    pthread_atfork(NULL, NULL, in_child);
}

static void relax(void)
{
#if defined __x86_64__ || defined __i386__
    __builtin_ia32_pause();
#elif defined __aarch64__
    __asm__ volatile("yield");
#endif
}

static void make_empty(fv__pool *pool)
{
    pthread_mutex_init(&pool->turn, NULL);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->finished, NULL);
    pool->started = 0;
    pool->tried = false;
    pool->head = 0;
    pool->ended = 0;
    pool->spin_ns = LEAST_SPIN_NS;
    pool->done = pool->sleepers = pool->waiting = pool->stop = 0;
}

fv__pool *fv__pool_create(int num_threads, const fv_allocator *allocator)
{
    pthread_once(&once, install);
    if (num_threads < 1) num_threads = 1;
    fv__pool *pool = fv__os_alloc(allocator, sizeof *pool);
    if (!pool) return NULL;
    *pool = (fv__pool){ .num_threads = num_threads, .spin = num_threads <= fv__os_num_cpus() };
    if (allocator) {
        pool->copy = *allocator;
        pool->allocator = &pool->copy;
    }
    pool->threads = fv__os_alloc(allocator, (size_t)num_threads * sizeof *pool->threads);
    if (!pool->threads) {
        fv__os_free(allocator, pool, sizeof *pool);
        return NULL;
    }
    make_empty(pool);
    pool->forks = __atomic_load_n(&forks, __ATOMIC_ACQUIRE);
    return pool;
}

/* Takes one item; its index, or -1 when there is none. *fn and *arg belong to it: see invariant
 * (1). */
static int take(fv__pool *pool, void (**fn)(void *, int), void **arg)
{
    uint64_t head = __atomic_load_n(&pool->head, __ATOMIC_ACQUIRE);
    while ((uint32_t)head) {
        *fn = __atomic_load_n(&pool->fn, __ATOMIC_RELAXED);
        *arg = __atomic_load_n(&pool->arg, __ATOMIC_RELAXED);
        const int count = __atomic_load_n(&pool->count, __ATOMIC_RELAXED);
        if (__atomic_compare_exchange_n(&pool->head, &head, head - 1, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE))
            return count - (int)(uint32_t)head;
    }
    return -1;
}

/* Does items until there are none left. */
static void work_off(fv__pool *pool)
{
    void (*fn)(void *, int);
    void *arg;
    for (int i; (i = take(pool, &fn, &arg)) >= 0; ) {
        const int count = __atomic_load_n(&pool->count, __ATOMIC_RELAXED);
        fn(arg, i);
        if (__atomic_add_fetch(&pool->done, 1, __ATOMIC_SEQ_CST) != count) continue;
        if (!__atomic_load_n(&pool->waiting, __ATOMIC_SEQ_CST)) continue;
        pthread_mutex_lock(&pool->lock);
        pthread_cond_signal(&pool->finished);
        pthread_mutex_unlock(&pool->lock);
    }
}

static bool has_work(fv__pool *pool, int order)
{
    const uint64_t head = order == __ATOMIC_SEQ_CST
                              ? __atomic_load_n(&pool->head, __ATOMIC_SEQ_CST)
                              : __atomic_load_n(&pool->head, __ATOMIC_ACQUIRE);
    return (uint32_t)head || __atomic_load_n(&pool->stop, __ATOMIC_SEQ_CST);
}

static bool is_done(fv__pool *pool, int count)
{
    return __atomic_load_n(&pool->done, __ATOMIC_SEQ_CST) == count;
}

/* Looks for work for a while; true: there is some. */
static bool spin_for_work(fv__pool *pool)
{
    const int64_t begin = fv__os_now_ns(),
                  spin = __atomic_load_n(&pool->spin_ns, __ATOMIC_RELAXED);
    for (int64_t now = begin, end = begin + spin; now < end; now = fv__os_now_ns()) {
        for (int i = 0; i < 32; i++) {
            if (has_work(pool, __ATOMIC_ACQUIRE)) return true;
            relax();
        }
        const bool busy = !is_done(pool, __atomic_load_n(&pool->count, __ATOMIC_RELAXED));
        if (busy && now < begin + MOST_SPIN_NS) end = now + spin;
    }
    return false;
}

static void wait_for_work(fv__pool *pool)
{
    if (pool->spin && spin_for_work(pool)) return;
    pthread_mutex_lock(&pool->lock);
    __atomic_add_fetch(&pool->sleepers, 1, __ATOMIC_SEQ_CST);
    while (!has_work(pool, __ATOMIC_SEQ_CST)) pthread_cond_wait(&pool->work, &pool->lock);
    __atomic_sub_fetch(&pool->sleepers, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&pool->lock);
}

static void wait_for_end(fv__pool *pool, int count)
{
    for (int64_t end = pool->spin ? fv__os_now_ns() + MOST_SPIN_NS : 0;
         pool->spin && fv__os_now_ns() < end;)
        for (int i = 0; i < 32; i++) {
            if (is_done(pool, count)) return;
            relax();
        }
    pthread_mutex_lock(&pool->lock);
    __atomic_store_n(&pool->waiting, 1, __ATOMIC_SEQ_CST);
    while (!is_done(pool, count)) pthread_cond_wait(&pool->finished, &pool->lock);
    __atomic_store_n(&pool->waiting, 0, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&pool->lock);
}

static void *worker(void *argument)
{
    fv__pool *pool = argument;
    inside = true;
    while (!__atomic_load_n(&pool->stop, __ATOMIC_SEQ_CST)) {
        work_off(pool);
        wait_for_work(pool);
    }
    return NULL;
}

/* Signals of the process stay with the host's threads. Fewer threads than asked for is not an
 * error: the caller takes part in any case. */
static void start_threads(fv__pool *pool)
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (pool->started < pool->num_threads - 1) {
        if (pthread_create(&pool->threads[pool->started], NULL, worker, pool)) break;
        pthread_setname_np(pool->threads[pool->started], "foveal");
        pool->started++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pool->tried = true;
}

/* In a child, the first to come makes the pool anew. */
static void renew_after_fork(fv__pool *pool)
{
    const unsigned now = __atomic_load_n(&forks, __ATOMIC_ACQUIRE);
    if (__atomic_load_n(&pool->forks, __ATOMIC_ACQUIRE) == now) return;
    pthread_mutex_lock(&renewal);
    if (pool->forks != now) {
        make_empty(pool);
        __atomic_store_n(&pool->forks, now, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&renewal);
}

static void wake(fv__pool *pool, int items)
{
    int sleepers = __atomic_load_n(&pool->sleepers, __ATOMIC_SEQ_CST);
    if (!sleepers) return;
    pthread_mutex_lock(&pool->lock);
    if (items >= sleepers)
        pthread_cond_broadcast(&pool->work);
    else
        while (items-- > 0) pthread_cond_signal(&pool->work);
    pthread_mutex_unlock(&pool->lock);
}

/* What was waited for once is likely to be waited for again. */
static int64_t next_spin(const fv__pool *pool, int64_t now)
{
    const int64_t gap = now - pool->ended;
    if (gap > MOST_GAP_NS || 2 * gap < LEAST_SPIN_NS) return LEAST_SPIN_NS;
    return 2 * gap;
}

static void run_shared(fv__pool *pool, void (*fn)(void *arg, int i), void *arg, int count)
{
    __atomic_store_n(&pool->spin_ns, next_spin(pool, fv__os_now_ns()), __ATOMIC_RELAXED);
    __atomic_store_n(&pool->fn, fn, __ATOMIC_RELAXED);
    __atomic_store_n(&pool->arg, arg, __ATOMIC_RELAXED);
    __atomic_store_n(&pool->count, count, __ATOMIC_RELAXED);
    __atomic_store_n(&pool->done, 0, __ATOMIC_RELAXED);
    const uint64_t generation = (__atomic_load_n(&pool->head, __ATOMIC_RELAXED) >> 32) + 1;
    __atomic_store_n(&pool->head, generation << 32 | (uint32_t)count, __ATOMIC_SEQ_CST);
    wake(pool, count - 1);
    inside = true;
    work_off(pool);
    inside = false;
    wait_for_end(pool, count);
    pool->ended = fv__os_now_ns();
}

void fv__pool_run(fv__pool *pool, void (*fn)(void *arg, int i), void *arg, int count)
{
    if (inside || count <= 1 || pool->num_threads == 1) {
        for (int i = 0; i < count; i++) fn(arg, i);
        return;
    }
    renew_after_fork(pool);
    pthread_mutex_lock(&pool->turn);
    if (!pool->tried) start_threads(pool);
    run_shared(pool, fn, arg, count);
    pthread_mutex_unlock(&pool->turn);
}

static void stop_threads(fv__pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    __atomic_store_n(&pool->stop, 1, __ATOMIC_SEQ_CST);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->started; i++) pthread_join(pool->threads[i], NULL);
}

void fv__pool_destroy(fv__pool *pool)
{
    if (!pool) return;
    renew_after_fork(pool);
    stop_threads(pool);
    pthread_mutex_destroy(&pool->turn);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->finished);
    const fv_allocator copy = pool->copy;
    const fv_allocator *allocator = pool->allocator ? &copy : NULL;
    fv__os_free(allocator, pool->threads, (size_t)pool->num_threads * sizeof *pool->threads);
    fv__os_free(allocator, pool, sizeof *pool);
}
