/* SPDX-License-Identifier: Apache-2.0 */
/* test_jit_cache.c -- the table of compiled kernels under races, kills, damage and hostile folders, with a compiler that is a function here.
 *
 * What that compiler makes of a source can be told from the source alone, so that every blob that is handed out is compared byte for byte. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "jit/jit_cache.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define STRING_(x) #x
#define STRING(x) STRING_(x)
#define VERSION STRING(FV_VERSION_MAJOR) "." STRING(FV_VERSION_MINOR) "." STRING(FV_VERSION_PATCH)

enum { NOBODY = 65534 };

/* ------------------------------------------------------------------------------------------------- the fake compiler */

static atomic_int compilations;         /* of this process */
static int compile_us;                  /* how long one takes */

static size_t expected_size(const char *source)
{
    return 1000 + strlen(source) * 37;
}

static unsigned char expected_byte(const char *source, size_t i)
{
    return (unsigned char)((size_t)source[i % strlen(source)] * 31 + i * 7 + (i >> 8));
}

static fv_status fake_compiler(void *user, const fv__jit_request *r, fv__jit_output *out, fv_error *err)
{
    atomic_fetch_add(&compilations, 1);
    if (compile_us) usleep((useconds_t)compile_us);
    if (user) return fv__fail(err, FV_E_COMPILE, "text", 7, 0, "line 7: %s", (const char *)user);
    const char *source = r->texts[0].text;
    out->size = expected_size(source);
    unsigned char *bytes = malloc(out->size);
    if (!bytes) return FV_E_NO_MEMORY;
    for (size_t i = 0; i < out->size; i++) bytes[i] = expected_byte(source, i);
    out->data = bytes;
    out->info = strdup("registers 40\n");
    return FV_OK;
}

static bool is_right(const fv__jit_blob *blob, const char *source)
{
    if (!blob || blob->size != expected_size(source)) return false;
    for (size_t i = 0; i < blob->size; i++)
        if (((const unsigned char *)blob->data)[i] != expected_byte(source, i)) return false;
    return !strcmp(blob->info, "registers 40\n") && !strcmp(blob->compiler, "fake 1.0") && (uintptr_t)blob->data % 16 == 0;
}

/* ------------------------------------------------------------------------------------------------------------ helpers */

typedef struct lines {
    atomic_int count;
    char last[1024];
} lines;

static void take_line(void *user, fv_log_level level, const char *line)
{
    lines *l = user;
    (void)level;
    l->count++;
    snprintf(l->last, sizeof l->last, "%s", line);
}

static fv__jit_cache *open_cache(const char *dir, const char *kernel_path, int disable, lines *l)
{
    fv__jit_cache *c = NULL;
    const fv__log log = { .fn = take_line, .user = l, .level = FV_LOG_WARN };
    const fv__jit_cache_desc desc = { .dir = dir, .kernel_path = kernel_path, .disable_jit = disable, .log = l ? &log : NULL };
    return fv__jit_cache_open(&desc, &c, NULL) == FV_OK ? c : NULL;
}

static fv__jit_text text_of;            /* single-threaded uses only */

static fv__jit_request request_of(const char *source, fv__jit_text *text)
{
    static const char *const options[] = { "-DDIM=128", "-O3" };
    *text = (fv__jit_text){ "kernel.cu", source };
    return (fv__jit_request){ .kind = "cubin", .name = "kernel", .arch = "sm_90a", .compiler = "fake 1.0",
                              .texts = text, .num_texts = 1, .options = options, .num_options = 2 };
}

static const fv__jit_blob *get(fv__jit_cache *c, const char *source)
{
    const fv__jit_blob *blob = NULL;
    fv__jit_text text;
    const fv__jit_request r = request_of(source, &text);
    return fv__jit_cache_get(c, &r, fake_compiler, NULL, &blob, NULL) == FV_OK ? blob : NULL;
}

static fv__jit_stats stats_of(fv__jit_cache *c)
{
    fv__jit_stats s;
    fv__jit_cache_stats(c, &s);
    return s;
}

/* One process's life: open, get, close. Returns what was counted; the blob is checked. */
static fv__jit_stats once(const char *dir, const char *source, lines *l)
{
    fv__jit_cache *c = open_cache(dir, "", 0, l);
    const bool right = is_right(get(c, source), source);
    const fv__jit_stats s = stats_of(c);
    fv__jit_cache_close(&c);
    assert_true(right);
    return s;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *where)
{
    (void)st, (void)type, (void)where;
    return remove(path);
}

static int num_entries, num_others;
static char last_entry[512];

static int see_one(const char *path, const struct stat *st, int type, struct FTW *where)
{
    if (type == FTW_D) return 0;
    const char *name = path + where->base;
    if (strstr(name, ".cubin") && S_ISREG(st->st_mode)) {
        num_entries++;
        snprintf(last_entry, sizeof last_entry, "%s", path);
    } else {
        num_others++;
    }
    return 0;
}

/* Counts entries and everything that is neither entry nor folder; remembers one entry's path. */
static void look_around(const char *dir)
{
    num_entries = num_others = 0;
    nftw(dir, see_one, 16, FTW_PHYS);
}

static int make_dir(void **state)
{
    char pattern[] = "/tmp/test_jit_XXXXXX";
    *state = mkdtemp(pattern) ? strdup(pattern) : NULL;
    return *state ? 0 : -1;
}

static int remove_dir(void **state)
{
    nftw(*state, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(*state);
    return 0;
}

static void join(char *out, size_t size, const char *dir, const char *name)
{
    if ((size_t)snprintf(out, size, "%s/%s", dir, name) >= size) abort();
}

/* Runs fn(arg) in a child; its result is the exit status. */
static int in_child(int (*fn)(const char *), const char *arg)
{
    int status = 0;
    fflush(NULL);
    const pid_t pid = fork();
    if (!pid) _exit(fn(arg));
    if (pid < 0 || waitpid(pid, &status, 0) != pid) return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void write_byte(const char *path, off_t at)
{
    unsigned char byte;
    const int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

/* --------------------------------------------------------------------------------------------------- keys and entries */

static fv__jit_key key_of(const fv__jit_request *r)
{
    fv__jit_key key = { 0 };
    assert_int_equal(fv__jit_key_of(r, &key, NULL), FV_OK);
    return key;
}

static void keys_see_everything(void **state)
{
    (void)state;
    static const char *const joined[] = { "-DDIM=12", "8-O3" }, *const fewer[] = { "-DDIM=128-O3" };
    fv__jit_text text, two[2] = { { "kernel.cu", "abc" }, { "more.cuh", "" } };
    const fv__jit_request r = request_of("abc", &text);
    const fv__jit_key key = key_of(&r);
    fv__jit_request other[] = { r, r, r, r, r, r, r };
    const fv__jit_text changed = { "kernel.cu", "abd" }, renamed = { "kernel.cuh", "abc" };
    other[0].texts = &changed;
    other[1].texts = &renamed;
    other[2].options = joined;
    other[3].options = fewer, other[3].num_options = 1;
    other[4].kind = "ptx";
    other[5].arch = "sm_90";
    other[6].texts = two, other[6].num_texts = 2;
    for (int i = 0; i < 7; i++) {
        const fv__jit_key k = key_of(&other[i]);
        assert_false(fv__jit_same(&key, &k));
    }
    fv__jit_request called = r, newer = r, none = r;
    called.name = "what the log calls it";
    newer.compiler = "fake 1.1";
    none.compiler = NULL;
    const fv__jit_key a = key_of(&called), b = key_of(&newer), c = key_of(&none);
    assert_memory_equal(&a, &key, sizeof key);
    assert_false(fv__jit_same(&b, &key));
    assert_true(fv__jit_same(&c, &key) && fv__jit_same(&c, &b));

    fv_error err;
    fv__jit_request bad = r;
    bad.arch = "../sm_90";
    assert_int_equal(fv__jit_key_of(&bad, &(fv__jit_key){ 0 }, &err), FV_E_INVALID);
    assert_non_null(strstr(err.text, "../sm_90"));
}

static fv__jit_blob *read_copy(const void *bytes, size_t size, const char **why)
{
    char *copy = malloc(size + 1);
    memcpy(copy, bytes, size);
    copy[size] = 0;
    fv__jit_blob *blob = fv__jit_entry_read(copy, size, why);
    if (!blob) free(copy);
    return blob;
}

/* Every flip of a bit and every cut of a whole entry is noticed. */
static void entries_notice_any_damage(void **state)
{
    (void)state;
    const char *why = NULL;
    char payload[300];
    for (int i = 0; i < 300; i++) payload[i] = (char)(i * 5);
    const fv__jit_request r = request_of("abc", &text_of);
    const fv__jit_key key = key_of(&r);
    void *entry = NULL;
    size_t size = 0;
    assert_int_equal(fv__jit_entry_make(&r, &key, payload, sizeof payload, NULL, &entry, &size, NULL), FV_OK);
    fv__jit_blob *blob = read_copy(entry, size, &why);
    assert_non_null(blob);
    assert_int_equal(blob->size, sizeof payload);
    assert_memory_equal(blob->data, payload, sizeof payload);
    assert_string_equal(blob->arch, "sm_90a");
    assert_string_equal(blob->info, "");
    fv__jit_blob_free(blob);

    for (size_t i = 0; i < size * 8; i++) {
        ((unsigned char *)entry)[i / 8] ^= (unsigned char)(1 << i % 8);
        why = NULL;
        assert_null(read_copy(entry, size, &why));
        assert_non_null(why);
        ((unsigned char *)entry)[i / 8] ^= (unsigned char)(1 << i % 8);
    }
    for (size_t cut = 0; cut < size; cut++) assert_null(read_copy(entry, cut, &why));
    free(entry);
}

/* ---------------------------------------------------------------------------------------------------- the usual way */

static void memory_then_disk(void **state)
{
    lines l = { 0 };
    fv__jit_cache *c = open_cache(*state, "", 0, &l);
    const fv__jit_blob *first = get(c, "one"), *again = get(c, "one"), *other = get(c, "two");
    assert_true(is_right(first, "one") && is_right(other, "two"));
    assert_ptr_equal(first, again);
    assert_int_equal(first->origin, FV__JIT_COMPILED);
    fv__jit_stats s = stats_of(c);
    assert_int_equal(s.compiles, 2);
    assert_int_equal(s.memory_hits, 1);
    assert_int_equal(s.writes, 2);
    fv__jit_cache_close(&c);
    assert_null(c);

    s = once(*state, "two", &l);
    assert_int_equal(s.compiles, 0);
    assert_int_equal(s.disk_hits, 1);
    assert_int_equal(l.count, 0);
    look_around(*state);
    assert_int_equal(num_entries, 2);
    assert_int_equal(num_others, 0);
}

static void failures_are_told_and_forgotten(void **state)
{
    fv__jit_cache *c = open_cache(*state, "", 0, NULL);
    const fv__jit_request r = request_of("broken", &text_of);
    const fv__jit_blob *blob = NULL;
    fv_error err = { 0 };
    assert_int_equal(fv__jit_cache_get(c, &r, fake_compiler, "expected ;", &blob, &err), FV_E_COMPILE);
    assert_null(blob);
    assert_int_equal(err.value, 7);
    assert_string_equal(err.text, "line 7: expected ;");
    assert_int_equal(fv__jit_cache_get(c, &r, NULL, NULL, &blob, &err), FV_E_NOT_READY);
    assert_true(is_right(get(c, "broken"), "broken"));
    assert_int_equal(fv__jit_cache_get(c, &r, NULL, NULL, &blob, &err), FV_OK);
    assert_int_equal(stats_of(c).compile_failures, 1);
    fv__jit_cache_close(&c);
}

/* ------------------------------------------------------------------------------------------------------- many at once */

typedef struct racer {
    fv__jit_cache *cache;
    const char *failure;                /* handed to the compiler */
    bool right;
    fv_status status;
    fv_error error;
} racer;

static const char *const sources[] = { "alpha", "beta", "gamma" };

static void *race(void *arg)
{
    racer *r = arg;
    r->right = true;
    for (int i = 0; i < 3; i++) r->right = r->right && is_right(get(r->cache, sources[i]), sources[i]);
    return NULL;
}

static int race_with_four(const char *dir)
{
    pthread_t threads[4];
    racer racers[4];
    compile_us = 3000;
    atomic_store(&compilations, 0);
    fv__jit_cache *c = open_cache(dir, "", 0, NULL);
    for (int i = 0; i < 4; i++) {
        racers[i] = (racer){ .cache = c };
        pthread_create(&threads[i], NULL, race, &racers[i]);
    }
    bool right = true;
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        right = right && racers[i].right;
    }
    const fv__jit_stats s = stats_of(c);
    fv__jit_cache_close(&c);
    /* At most one compilation of each kernel by this process; nothing compiled twice, nothing found damaged. */
    return right && atomic_load(&compilations) <= 3 && s.compiles + s.disk_hits == 3 && !s.damaged && !s.write_failures ? 0 : 1;
}

/* S105: 16 processes of 4 threads on one empty folder. */
static void sixteen_processes_race(void **state)
{
    pid_t pids[16];
    fflush(NULL);
    for (int i = 0; i < 16; i++) {
        pids[i] = fork();
        if (!pids[i]) _exit(race_with_four(*state));
    }
    for (int i = 0; i < 16; i++) {
        int status = -1;
        waitpid(pids[i], &status, 0);
        assert_int_equal(status, 0);
    }
    look_around(*state);
    assert_int_equal(num_entries, 3);
    assert_int_equal(num_others, 0);
    assert_int_equal(once(*state, "beta", NULL).disk_hits, 1);
}

static void *ask(void *arg)
{
    racer *r = arg;
    fv__jit_text text;
    const fv__jit_blob *blob = NULL;
    const fv__jit_request request = request_of("shared", &text);
    r->status = fv__jit_cache_get(r->cache, &request, fake_compiler, (void *)(uintptr_t)r->failure, &blob, &r->error);
    r->right = is_right(blob, "shared");
    return NULL;
}

static void ask_with_eight(fv__jit_cache *c, const char *failure, racer racers[8])
{
    pthread_t threads[8];
    for (int i = 0; i < 8; i++) {
        racers[i] = (racer){ .cache = c, .failure = failure };
        pthread_create(&threads[i], NULL, ask, &racers[i]);
    }
    for (int i = 0; i < 8; i++) pthread_join(threads[i], NULL);
}

static void one_compilation_serves_all_who_wait(void **state)
{
    racer racers[8];
    fv__jit_cache *c = open_cache(*state, "", 0, NULL);
    compile_us = 200000;
    atomic_store(&compilations, 0);
    ask_with_eight(c, "all of you hear this", racers);
    assert_int_equal(atomic_load(&compilations), 1);
    for (int i = 0; i < 8; i++) {
        assert_int_equal(racers[i].status, FV_E_COMPILE);
        assert_string_equal(racers[i].error.text, "line 7: all of you hear this");
    }
    ask_with_eight(c, NULL, racers);
    compile_us = 0;
    assert_int_equal(atomic_load(&compilations), 2);
    for (int i = 0; i < 8; i++) assert_true(racers[i].status == FV_OK && racers[i].right);
    assert_int_equal(stats_of(c).waits, 14);
    fv__jit_cache_close(&c);
}

static fv__jit_cache *forked_cache;

static int ask_in_child(const char *source)
{
    alarm(20);
    compile_us = 0;
    return is_right(get(forked_cache, source), source) ? 0 : 1;
}

/* A child that is born while its parent compiles has no thread that will finish it: it must not wait for one. */
static void a_fork_does_not_wait_for_its_parent(void **state)
{
    pthread_t thread;
    racer r = { .cache = open_cache(*state, "", 0, NULL) };
    forked_cache = r.cache;
    compile_us = 400000;
    atomic_store(&compilations, 0);
    pthread_create(&thread, NULL, ask, &r);
    while (!atomic_load(&compilations)) usleep(1000);
    assert_int_equal(in_child(ask_in_child, "shared"), 0);
    assert_int_equal(in_child(ask_in_child, "another"), 0);
    pthread_join(thread, NULL);
    compile_us = 0;
    assert_true(r.status == FV_OK && r.right);
    fv__jit_cache_close(&r.cache);
}

/* -------------------------------------------------------------------------------------------------- killed, damaged */

static int compile_for_ever(const char *dir)
{
    compile_us = 500;
    fv__jit_cache *c = open_cache(dir, "", 0, NULL);
    char source[32];
    for (int i = 0; ; i++) {
        snprintf(source, sizeof source, "kernel %d", i % 40);
        if (i % 40 == 0) {
            fv__jit_cache_close(&c);
            c = open_cache(dir, "", 0, NULL);
            nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
        }
        get(c, source);
    }
    return 0;
}

/* S106: SIGKILL at a random moment, 50 times. The next one is right, and what the dead one left is gone. */
static void killed_at_random_moments(void **state)
{
    unsigned seed = 12345;
    char inside[300];
    join(inside, sizeof inside, *state, "cache");
    for (int i = 0; i < 50; i++) {
        fflush(NULL);
        const pid_t pid = fork();
        if (!pid) _exit(compile_for_ever(inside));
        seed = seed * 1103515245 + 12345;
        usleep(500 + (seed >> 8) % 12000);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        const fv__jit_stats s = once(inside, "kernel 3", NULL);
        assert_int_equal(s.compiles + s.disk_hits, 1);
        assert_int_equal(s.damaged, 0);
        look_around(inside);
        assert_int_equal(num_others, 0);
    }
}

/* What a writer that died in the middle of writing leaves, and one that is alive. */
static void sweeps_only_what_is_dead(void **state)
{
    char dead[600], alive[600];
    once(*state, "one", NULL);
    join(dead, sizeof dead, *state, VERSION "/tmp.4194999.0");
    join(alive, sizeof alive, *state, VERSION "/tmp.4194998.0");
    int fd = open(dead, O_CREAT | O_WRONLY, 0600);
    assert_true(fd >= 0 && write(fd, "half", 4) == 4);
    close(fd);
    fd = open(alive, O_CREAT | O_WRONLY, 0600);
    assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
    once(*state, "one", NULL);
    assert_int_equal(access(dead, F_OK), -1);
    assert_int_equal(access(alive, F_OK), 0);
    close(fd);
    once(*state, "one", NULL);
    assert_int_equal(access(alive, F_OK), -1);
}

/* S107: flips and cuts in the file; each is noticed, compiled again, repaired. */
static void damage_is_repaired(void **state)
{
    struct stat st;
    once(*state, "one", NULL);
    look_around(*state);
    assert_int_equal(stat(last_entry, &st), 0);
    const off_t spots[] = { 0, 9, 17, 26, 41, 50, 63, 64, 90, st.st_size / 2, st.st_size - 1 };
    const off_t cuts[] = { 0, 1, 63, 64, 100, st.st_size - 1 };
    for (int i = 0; i < 11 + 6; i++) {
        lines l = { 0 };
        if (i < 11) write_byte(last_entry, spots[i]);
        else assert_int_equal(truncate(last_entry, cuts[i - 11]), 0);
        fv__jit_stats s = once(*state, "one", &l);
        assert_int_equal(s.damaged, 1);
        assert_int_equal(s.compiles, 1);
        assert_int_equal(s.writes, 1);
        assert_int_equal(l.count, 1);
        s = once(*state, "one", &l);
        assert_int_equal(s.disk_hits, 1);
        assert_int_equal(l.count, 1);
    }
}

static void path_of(const char *dir, const char *source, char path[600])
{
    char name[FV__JIT_NAME_CHARS];
    fv__jit_text text;
    const fv__jit_request r = request_of(source, &text);
    const fv__jit_key key = key_of(&r);
    fv__jit_file_name(&key, "cubin", name);
    snprintf(path, 600, "%s/" VERSION "/sm_90a/%.2s/%s", dir, name, name);
}

static void an_entry_under_another_name_is_not_taken(void **state)
{
    char one[600], two[600];
    once(*state, "one", NULL);
    once(*state, "two", NULL);
    path_of(*state, "one", one);
    path_of(*state, "two", two);
    assert_int_equal(rename(two, one), 0);
    const fv__jit_stats s = once(*state, "one", NULL);
    assert_int_equal(s.damaged, 1);
    assert_int_equal(s.compiles, 1);
}

/* S109: neither 1970 nor the future matters. */
static time_t test_time;

static int set_time(const char *path, const struct stat *st, int type, struct FTW *where)
{
    (void)st, (void)type, (void)where;
    const struct timespec times[2] = { { .tv_sec = test_time }, { .tv_sec = test_time } };
    return utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW);
}

static void times_do_not_matter(void **state)
{
    once(*state, "one", NULL);
    const time_t times[] = { 0, 4102444800 };
    for (int i = 0; i < 2; i++) {
        test_time = times[i];
        assert_int_equal(nftw(*state, set_time, 16, FTW_PHYS), 0);
        assert_int_equal(once(*state, "one", NULL).disk_hits, 1);
    }
}

/* ------------------------------------------------------------------------------------------- folders that do not work */

/* The work of a process whose folder fails: everything right, compiled once each, one line. */
static bool works_in_memory(const char *dir, lines *l)
{
    fv__jit_cache *c = open_cache(dir, "", 0, l);
    bool right = is_right(get(c, "one"), "one") && is_right(get(c, "two"), "two") && is_right(get(c, "one"), "one");
    const fv__jit_stats s = stats_of(c);
    right = right && s.compiles == 2 && s.memory_hits == 1 && s.writes == 0;
    fv__jit_cache_close(&c);
    return right;
}

static bool works_in_memory_with_one_line(const char *dir, const char *word)
{
    lines l = { 0 };
    const bool fine = works_in_memory(dir, &l) && l.count == 1 && strstr(l.last, "compiled in memory") && strstr(l.last, word);
    if (!fine) print_error("%s: %d lines, last: %s\n", dir, (int)l.count, l.last);
    return fine;
}

static int read_only(const char *dir)
{
    if (geteuid() == 0 && setresuid(NOBODY, NOBODY, NOBODY)) return 2;      /* root may write everywhere */
    return works_in_memory_with_one_line(dir, "Permission denied") ? 0 : 1;
}

static int read_only_filled(const char *dir)
{
    if (geteuid() == 0 && setresuid(NOBODY, NOBODY, NOBODY)) return 2;
    lines l = { 0 };
    fv__jit_cache *c = open_cache(dir, "", 0, &l);
    const bool right = is_right(get(c, "one"), "one") && stats_of(c).disk_hits == 1 && l.count == 0;
    return right && is_right(get(c, "new"), "new") && is_right(get(c, "newer"), "newer") && l.count == 1 ? 0 : 1;
}

static int give_away(const char *path, const struct stat *st, int type, struct FTW *where)
{
    (void)st, (void)type, (void)where;
    return geteuid() == 0 ? lchown(path, NOBODY, NOBODY) : 0;
}

static int close_for_writing(const char *path, const struct stat *st, int type, struct FTW *where)
{
    (void)st, (void)where;
    return type == FTW_DP || type == FTW_D ? chmod(path, 0500) : 0;
}

static int open_for_writing(const char *path, const struct stat *st, int type, struct FTW *where)
{
    (void)st, (void)where;
    return type == FTW_D ? chmod(path, 0700) : 0;
}

/* S104, first half. */
static void read_only_folder(void **state)
{
    char inside[300];
    join(inside, sizeof inside, *state, "cache");
    assert_int_equal(chmod(*state, 0755), 0);
    assert_int_equal(mkdir(inside, 0500), 0);
    assert_int_equal(nftw(inside, give_away, 16, FTW_PHYS), 0);
    assert_int_equal(in_child(read_only, inside), 0);

    assert_int_equal(chmod(inside, 0700), 0);
    if (geteuid() == 0) assert_int_equal(chown(inside, 0, 0), 0);
    once(inside, "one", NULL);
    assert_int_equal(nftw(inside, give_away, 16, FTW_PHYS), 0);
    assert_int_equal(nftw(inside, close_for_writing, 16, FTW_DEPTH | FTW_PHYS), 0);
    assert_int_equal(in_child(read_only_filled, inside), 0);
    nftw(inside, open_for_writing, 16, FTW_PHYS);
}

static void no_folder_can_be_made(void **state)
{
    char file[300], below[400];
    join(file, sizeof file, *state, "file");
    close(open(file, O_CREAT | O_WRONLY, 0600));
    assert_true(works_in_memory_with_one_line(file, "Not a directory"));
    join(below, sizeof below, file, "cache");
    assert_true(works_in_memory_with_one_line(below, "Not a directory"));
    lines l = { 0 };
    assert_true(works_in_memory("", &l));
    assert_int_equal(l.count, 0);               /* as asked for: nothing to say */
}

static int limited(const char *dir)
{
    const struct rlimit limit = { 512, 512 };
    setrlimit(RLIMIT_FSIZE, &limit);
    return works_in_memory_with_one_line(dir, "File too large") ? 0 : 1;
}

static void files_may_not_grow(void **state)
{
    assert_int_equal(in_child(limited, *state), 0);
    look_around(*state);
    assert_int_equal(num_entries + num_others, 0);
    assert_int_equal(once(*state, "one", NULL).writes, 1);
}

/* A small file system of its own, where this machine lets us have one. */
static void full_disk(void **state)
{
    char file[300];
    if (mount("tmpfs", *state, "tmpfs", 0, "size=32k,mode=0700")) {
        print_message("not run: no small file system can be mounted here (%s)\n", strerror(errno));
        skip();
    }
    join(file, sizeof file, *state, "filler");
    const int fd = open(file, O_CREAT | O_WRONLY, 0600);
    char block[4096] = { 1 };
    while (write(fd, block, sizeof block) > 0) { }
    close(fd);
    const bool fine = works_in_memory_with_one_line(*state, "No space left");
    look_around(*state);
    const int left = num_entries, others = num_others;
    unlink(file);
    const bool recovered = once(*state, "one", NULL).writes == 1;
    umount(*state);
    assert_true(fine && recovered);
    assert_int_equal(left, 0);
    assert_int_equal(others, 1);                /* the filler */
}

/* ------------------------------------------------------------------------------------------------------------ hostile */

static void folders_that_others_can_write(void **state)
{
    char inside[300];
    join(inside, sizeof inside, *state, "cache");
    once(inside, "one", NULL);
    assert_int_equal(chmod(inside, 0777), 0);
    assert_true(works_in_memory_with_one_line(inside, "everybody"));
    assert_int_equal(chmod(inside, 0770), 0);
    assert_true(works_in_memory_with_one_line(inside, "group"));
    assert_int_equal(chmod(inside, 0755), 0);
    assert_int_equal(once(inside, "one", NULL).disk_hits, 1);

    char arch[400];
    join(arch, sizeof arch, inside, VERSION "/sm_90a");
    assert_int_equal(chmod(arch, 0777), 0);
    assert_true(works_in_memory_with_one_line(inside, "everybody"));
}

static void folders_of_others(void **state)
{
    char inside[300];
    if (geteuid()) skip();                      /* only root can give a folder away */
    join(inside, sizeof inside, *state, "cache");
    once(inside, "one", NULL);
    assert_int_equal(nftw(inside, give_away, 16, FTW_PHYS), 0);
    assert_true(works_in_memory_with_one_line(inside, "somebody else"));
    assert_int_equal(chown(inside, 0, 0), 0);
    assert_true(works_in_memory_with_one_line(inside, "somebody else"));        /* the version's folder is still theirs */
}

static void links_and_pipes(void **state)
{
    char real[300], link[300], arch[400], moved[400];
    join(real, sizeof real, *state, "real");
    join(link, sizeof link, *state, "link");
    once(real, "one", NULL);
    assert_int_equal(symlink(real, link), 0);
    assert_int_equal(once(link, "one", NULL).disk_hits, 1);     /* the user's own link to the user's own folder is fine */
    if (geteuid() == 0) {
        assert_int_equal(lchown(link, NOBODY, NOBODY), 0);
        assert_true(works_in_memory_with_one_line(link, "symbolic link"));
    }
    /* An entry that is a link, a pipe or writable by others is not opened as one, and is replaced. */
    look_around(real);
    join(moved, sizeof moved, *state, "moved");
    assert_int_equal(rename(last_entry, moved), 0);
    assert_int_equal(symlink(moved, last_entry), 0);
    fv__jit_stats s = once(real, "one", NULL);
    assert_true(s.damaged == 1 && s.compiles == 1 && s.writes == 1);
    unlink(last_entry);
    assert_int_equal(mkfifo(last_entry, 0600), 0);
    s = once(real, "one", NULL);
    assert_true(s.damaged == 1 && s.compiles == 1 && s.writes == 1);
    assert_int_equal(chmod(last_entry, 0666), 0);
    s = once(real, "one", NULL);
    assert_true(s.damaged == 1 && s.writes == 1);
    assert_int_equal(once(real, "one", NULL).disk_hits, 1);
    /* A folder inside that is a link. */
    join(arch, sizeof arch, real, VERSION "/sm_90a");
    unlink(moved);
    assert_int_equal(rename(arch, moved), 0);
    assert_int_equal(symlink(moved, arch), 0);
    assert_true(works_in_memory_with_one_line(real, "sm_90a"));
}

/* ---------------------------------------------------------------------------------------------- where the folder is */

static void clear_environment(void)
{
    static const char *const names[] = { "FV_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "TMPDIR", "FV_KERNEL_PATH", "FV_DISABLE_JIT" };
    for (int i = 0; i < 6; i++) unsetenv(names[i]);
}

static bool folder_is(const char *base, const char *rest)
{
    char want[400];
    fv__jit_cache *c = open_cache(NULL, NULL, -1, NULL);
    snprintf(want, sizeof want, "%s%s", base, rest);
    const bool same = !strcmp(fv__jit_cache_folder(c), want);
    if (!same) print_error("%s instead of %s\n", fv__jit_cache_folder(c), want);
    fv__jit_cache_close(&c);
    return same;
}

static int ladder(const char *dir)
{
    char last[64];
    clear_environment();
    snprintf(last, sizeof last, "/foveal-%lu", (unsigned long)geteuid());
    bool fine = folder_is("/tmp", last);
    setenv("TMPDIR", dir, 1);
    fine = fine && folder_is(dir, last);
    setenv("HOME", dir, 1);
    fine = fine && folder_is(dir, "/.cache/foveal");
    setenv("XDG_CACHE_HOME", "relative", 1);
    fine = fine && folder_is(dir, "/.cache/foveal");
    setenv("XDG_CACHE_HOME", "/xdg", 1);
    fine = fine && folder_is("/xdg", "/foveal");
    setenv("FV_CACHE_DIR", "", 1);
    fine = fine && folder_is("/xdg", "/foveal");
    setenv("FV_CACHE_DIR", "/chosen", 1);
    return fine && folder_is("/chosen", "") ? 0 : 1;
}

static void the_folder_is_found(void **state)
{
    assert_int_equal(in_child(ladder, *state), 0);
}

/* S104, second half: no HOME. The last resort is a folder of this user in the temporary directory; one line says so. */
static int homeless(const char *dir)
{
    char last[400];
    lines l = { 0 };
    clear_environment();
    setenv("TMPDIR", dir, 1);
    fv__jit_cache *c = open_cache(NULL, NULL, -1, &l);
    bool fine = is_right(get(c, "one"), "one") && is_right(get(c, "two"), "two") && l.count == 1 && strstr(l.last, "compiled in memory");
    fv__jit_cache_close(&c);
    snprintf(last, sizeof last, "%s/foveal-%lu", dir, (unsigned long)geteuid());
    struct stat st;
    fine = fine && !stat(last, &st) && (st.st_mode & 07777) == 0700;
    /* Somebody else was there first: a link is not followed. */
    char elsewhere[400];
    snprintf(elsewhere, sizeof elsewhere, "%s/elsewhere", dir);
    fine = fine && !rename(last, elsewhere) && !symlink(elsewhere, last);
    c = open_cache(NULL, NULL, -1, &l);
    fine = fine && is_right(get(c, "one"), "one") && stats_of(c).compiles == 1 && l.count == 2 && strstr(l.last, "symbolic link");
    fv__jit_cache_close(&c);
    return fine ? 0 : 1;
}

static int home_is_missing(const char *dir)
{
    char home[400];
    lines l = { 0 };
    clear_environment();
    snprintf(home, sizeof home, "%s/nobody", dir);
    setenv("HOME", home, 1);
    fv__jit_cache *c = open_cache(NULL, NULL, -1, &l);
    const bool fine = is_right(get(c, "one"), "one") && l.count == 1 && access(home, F_OK);    /* and the home is not made up */
    fv__jit_cache_close(&c);
    return fine ? 0 : 1;
}

static void without_a_home(void **state)
{
    assert_int_equal(in_child(homeless, *state), 0);
    assert_int_equal(in_child(home_is_missing, *state), 0);
}

/* ------------------------------------------------------------------------------------------------------------ bundles */

static void fill_bundle(const char *path, const char *const *what, int n)
{
    const fv__jit_blob *blobs[16];
    fv__jit_cache *c = open_cache("", "", 0, NULL);
    for (int i = 0; i < n; i++) blobs[i] = get(c, what[i]);
    blobs[n] = blobs[0];                        /* twice: kept once */
    assert_int_equal(fv__jit_bundle_write(path, blobs, n + 1, NULL), FV_OK);
    fv__jit_cache_close(&c);
}

static void bundles_serve_machines_that_do_not_compile(void **state)
{
    char path[300], both[700], why[FV__JIT_WHY_CHARS];
    static const char *const what[] = { "one", "two", "three", "four" };
    join(path, sizeof path, *state, "kernels.bundle");
    fill_bundle(path, what, 4);
    fv__jit_bundle *b = fv__jit_bundle_open(path, why);
    assert_non_null(b);
    assert_int_equal(fv__jit_bundle_count(b), 4);
    fv__jit_bundle_close(b);

    lines l = { 0 };
    snprintf(both, sizeof both, "%s/absent:%s", (char *)*state, path);
    fv__jit_cache *c = open_cache("", both, 1, &l);
    assert_int_equal(l.count, 1);               /* the absent one */
    for (int i = 0; i < 4; i++) {
        const fv__jit_blob *blob = get(c, what[i]);
        assert_true(is_right(blob, what[i]) && blob->origin == FV__JIT_BUNDLE);
    }
    fv_error err = { 0 };
    const fv__jit_blob *blob = NULL;
    const fv__jit_request unknown = request_of("five", &text_of);
    assert_int_equal(fv__jit_cache_get(c, &unknown, fake_compiler, NULL, &blob, &err), FV_E_NOT_READY);
    assert_non_null(strstr(err.text, "FV_DISABLE_JIT"));
    assert_int_equal(stats_of(c).compiles, 0);
    assert_int_equal(stats_of(c).bundle_hits, 4);
    fv__jit_cache_close(&c);

    /* No compiler here at all, and another version of one: what the bundle has will do. */
    c = open_cache("", path, 0, NULL);
    fv__jit_request r = request_of("two", &text_of);
    r.compiler = NULL;
    assert_int_equal(fv__jit_cache_get(c, &r, NULL, NULL, &blob, NULL), FV_OK);
    assert_true(is_right(blob, "two"));
    r.compiler = "fake 2.0";
    assert_int_equal(fv__jit_cache_get(c, &r, fake_compiler, NULL, &blob, NULL), FV_OK);
    assert_true(is_right(blob, "two"));
    fv__jit_cache_close(&c);
}

static void bundles_are_the_same_bytes(void **state)
{
    static const char *const one[] = { "one", "two", "three" }, *const other[] = { "three", "one", "two" };
    char a[300], b[300], command[700];
    join(a, sizeof a, *state, "a");
    join(b, sizeof b, *state, "b");
    fill_bundle(a, one, 3);
    fill_bundle(b, other, 3);
    snprintf(command, sizeof command, "cmp -s %s %s", a, b);
    assert_int_equal(system(command), 0);
}

static void damaged_bundles_cost_what_is_damaged(void **state)
{
    static const char *const what[] = { "one", "two", "three" };
    char path[300], why[FV__JIT_WHY_CHARS];
    struct stat st;
    join(path, sizeof path, *state, "kernels.bundle");
    fill_bundle(path, what, 3);
    assert_int_equal(stat(path, &st), 0);
    write_byte(path, st.st_size - 100);         /* in the payload of the last entry */
    fv__jit_cache *c = open_cache("", path, 0, NULL);
    for (int i = 0; i < 3; i++) assert_true(is_right(get(c, what[i]), what[i]));
    fv__jit_stats s = stats_of(c);
    assert_int_equal(s.bundle_hits, 2);
    assert_int_equal(s.damaged, 1);
    assert_int_equal(s.compiles, 1);
    fv__jit_cache_close(&c);

    for (off_t at = 0; at < 32 + 3 * 40; at++) {        /* any byte of the header and the index */
        write_byte(path, at);
        assert_null(fv__jit_bundle_open(path, why));
        write_byte(path, at);
    }
    for (off_t cut = 0; cut < st.st_size; cut += 13) {
        fill_bundle(path, what, 3);
        assert_int_equal(truncate(path, cut), 0);
        fv__jit_bundle *b = fv__jit_bundle_open(path, why);
        assert_null(b);
    }
    assert_int_equal(mkfifo(strcat(path, ".pipe"), 0600), 0);
    assert_null(fv__jit_bundle_open(path, why));        /* and it did not hang */
}

static void a_filled_folder_is_a_kernel_path(void **state)
{
    char shipped[300];
    join(shipped, sizeof shipped, *state, "shipped");
    once(shipped, "one", NULL);
    assert_int_equal(nftw(shipped, give_away, 16, FTW_PHYS), 0);        /* whoever owns it */
    fv__jit_cache *c = open_cache("", shipped, 1, NULL);
    const fv__jit_blob *blob = get(c, "one");
    assert_true(is_right(blob, "one") && blob->origin == FV__JIT_BUNDLE);
    fv__jit_cache_close(&c);

    fv__jit_request r = request_of("one", &text_of);
    r.compiler = NULL;
    c = open_cache("", shipped, 0, NULL);
    assert_int_equal(fv__jit_cache_get(c, &r, NULL, NULL, &blob, NULL), FV_OK);
    fv__jit_cache_close(&c);
    assert_int_equal(chmod(shipped, 0777), 0);
    c = open_cache("", shipped, 1, NULL);
    assert_null(get(c, "one"));
    fv__jit_cache_close(&c);
}

/* ---------------------------------------------------------------------------------------------------------- libraries */

/* Compiles a C function that returns `answer` with the machine's compiler. */
static fv_status c_compiler(void *user, const fv__jit_request *r, fv__jit_output *out, fv_error *err)
{
    char path[300], command[700];
    join(path, sizeof path, user, "answer.so");
    snprintf(command, sizeof command, "printf '%%s' '%s' | cc -x c -shared -fPIC -o %s - 2>/dev/null", r->texts[0].text, path);
    if (system(command)) return fv__fail(err, FV_E_COMPILE, "cc", 0, 0, "no C compiler");
    struct stat st;
    const int fd = open(path, O_RDONLY);
    fstat(fd, &st);
    out->size = (size_t)st.st_size;
    out->data = fv__jit_read_at(fd, 0, out->size);
    close(fd);
    unlink(path);
    return out->data ? FV_OK : FV_E_IO;
}

static void libraries_load_from_memory(void **state)
{
    fv__jit_library libraries[3];
    static const char *const texts[] = { "int answer(void) { return 1; }", "int answer(void) { return 2; }", "int answer(void) { return 3; }" };
    fv__jit_cache *c = open_cache("", "", 0, NULL);
    for (int i = 0; i < 3; i++) {
        const fv__jit_text text = { "answer.c", texts[i] };
        const fv__jit_request r = { .kind = "so", .name = "answer", .arch = "host", .compiler = "cc", .texts = &text, .num_texts = 1 };
        const fv__jit_blob *blob = NULL;
        if (fv__jit_cache_get(c, &r, c_compiler, *state, &blob, NULL) != FV_OK) {
            print_message("not run: no C compiler here\n");
            skip();
        }
        assert_int_equal(fv__jit_library_open(blob, &libraries[i], NULL), FV_OK);
    }
    for (int i = 0; i < 3; i++) {
        int (*answer)(void);
        *(void **)&answer = dlsym(libraries[i].handle, "answer");
        assert_int_equal(answer(), i + 1);
        fv__jit_library_close(&libraries[i]);
    }
    const fv__jit_request r = request_of("not a library", &text_of);
    const fv__jit_blob *blob = NULL;
    fv_error err = { 0 };
    assert_int_equal(fv__jit_cache_get(c, &r, fake_compiler, NULL, &blob, NULL), FV_OK);
    assert_int_equal(fv__jit_library_open(blob, &libraries[0], &err), FV_E_COMPILE);
    assert_true(err.text[0]);
    fv__jit_cache_close(&c);
}

#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, make_dir, remove_dir)

int main(void)
{
    umask(022);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_see_everything),
        cmocka_unit_test(entries_notice_any_damage),
        IN_FOLDER(memory_then_disk),
        IN_FOLDER(failures_are_told_and_forgotten),
        IN_FOLDER(sixteen_processes_race),
        IN_FOLDER(one_compilation_serves_all_who_wait),
        IN_FOLDER(a_fork_does_not_wait_for_its_parent),
        IN_FOLDER(killed_at_random_moments),
        IN_FOLDER(sweeps_only_what_is_dead),
        IN_FOLDER(damage_is_repaired),
        IN_FOLDER(an_entry_under_another_name_is_not_taken),
        IN_FOLDER(times_do_not_matter),
        IN_FOLDER(read_only_folder),
        IN_FOLDER(no_folder_can_be_made),
        IN_FOLDER(files_may_not_grow),
        IN_FOLDER(full_disk),
        IN_FOLDER(folders_that_others_can_write),
        IN_FOLDER(folders_of_others),
        IN_FOLDER(links_and_pipes),
        IN_FOLDER(the_folder_is_found),
        IN_FOLDER(without_a_home),
        IN_FOLDER(bundles_serve_machines_that_do_not_compile),
        IN_FOLDER(bundles_are_the_same_bytes),
        IN_FOLDER(damaged_bundles_cost_what_is_damaged),
        IN_FOLDER(a_filled_folder_is_a_kernel_path),
        IN_FOLDER(libraries_load_from_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
