/* SPDX-License-Identifier: Apache-2.0 */
/* jit_cc.c -- two programs are started, one after the other: the compiler, source to object, and the linker that it names, object to library. The
 * compiler's own way to the linker would put files into the temporary directory.
 *
 *   (1) every descriptor that a program gets is a memory file or /dev/null, and it gets no other;
 *   (2) no program is left running or unwaited for when a call returns;
 *   (3) none outlives the host for long. It is of the host's process group, so that a terminal's Ctrl-C ends both; and a host that is killed leaves
 *       programs that may use as much processor time as a call may last, no more. */
#include "jit/jit_cc.h"

#include "os.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

int fv__cc_seconds = 60;

enum { MAX_LOG = 1 << 16, MAX_ARGS = 64 };

/* What a program finds at these numbers. */
enum { IN, OUT, LOG, OBJECT, LIBRARY, NUM_FDS };
#define OBJECT_PATH "/proc/self/fd/3"
#define LIBRARY_PATH "/proc/self/fd/4"
_Static_assert(OBJECT == 3 && LIBRARY == 4, "the paths above");

#if defined __x86_64__
#define MACHINE EM_X86_64
#elif defined __aarch64__
#define MACHINE EM_AARCH64
#else
#define MACHINE EM_NONE
#endif

/* ------------------------------------------------------------------------------------------------------------- finding */

static bool is_program(const char *path)
{
    struct stat st;
    return !stat(path, &st) && S_ISREG(st.st_mode) && !access(path, X_OK);
}

/* `name` as PATH finds it; a name with a slash is a path. */
static bool find_program(const char *name, char path[1024])
{
    if (strchr(name, '/')) return snprintf(path, 1024, "%s", name) < 1024 && is_program(path);
    const char *list = fv__os_env("PATH");
    for (const char *at = list; at; ) {
        const size_t n = strcspn(at, ":");
        const int length = snprintf(path, 1024, "%.*s/%s", n ? (int)n : 1, n ? at : ".", name);
        if (length > 0 && length < 1024 && is_program(path)) return true;
        at = at[n] ? at + n + 1 : NULL;
    }
    return false;
}

static bool cut_words(fv__cc *cc, const char *text)
{
    char *rest = cc->words, *word;
    cc->num_words = 0;
    if (snprintf(cc->words, sizeof cc->words, "%s", text) >= (int)sizeof cc->words) return false;
    while ((word = strsep(&rest, " \t"))) {
        if (!*word) continue;
        if (cc->num_words == FV__CC_WORDS) return false;
        cc->argv[cc->num_words++] = word;
    }
    cc->argv[cc->num_words] = NULL;
    return cc->num_words > 0;
}

/* A compiler that is replaced is another one. Words that are programs too (what a compiler cache starts) count with their size and date. */
static void set_name(fv__cc *cc)
{
    char path[1024], whole[PATH_MAX];
    size_t at = 0;
    for (int i = 0; i < cc->num_words && at < sizeof cc->name; i++) {
        struct stat st;
        const bool found = *cc->argv[i] != '-' && find_program(cc->argv[i], path) && realpath(path, whole) && !stat(whole, &st);
        if (found)
            at += (size_t)snprintf(cc->name + at, sizeof cc->name - at, "%s%s %lld %lld", i ? " " : "", whole, (long long)st.st_size,
                                   (long long)st.st_mtime);
        else
            at += (size_t)snprintf(cc->name + at, sizeof cc->name - at, "%s%s", i ? " " : "", cc->argv[i]);
    }
}

fv_status fv__cc_find(fv__cc *cc, fv_error *err)
{
    static const char *const usual[] = { "cc", "gcc", "clang" };
    const char *named = fv__os_env("FV_CC");
    memset(cc, 0, sizeof *cc);
    for (int i = 0; i < (named ? 1 : FV__COUNT(usual)); i++) {
        if (!cut_words(cc, named ? named : usual[i]) || !find_program(cc->argv[0], cc->path)) continue;
        set_name(cc);
        return FV_OK;
    }
    cc->path[0] = 0;
    if (named)
        return fv__fail(err, FV_E_COMPILE, "FV_CC", 0, 0,
                        "a variant's text needs a C compiler, and FV_CC=%.200s is no program; name gcc or clang, with "
                        "flags behind blanks. Built-in variants need none",
                        named);
    return fv__fail(err, FV_E_COMPILE, "FV_CC", 0, 0,
                    "a variant's text needs a C compiler, and PATH has no cc, gcc or clang: install one (Debian, Ubuntu: "
                    "gcc; Fedora: gcc; Alpine: gcc binutils) or name one in FV_CC. Built-in variants need none");
}

/* ------------------------------------------------------------------------------------------------------------- running */

/* Variables that make compilers write files, look for headers elsewhere, or speak another language. */
static bool is_passed(const char *variable)
{
    static const char *const dropped[] = {
        "DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES", "CPATH", "C_INCLUDE_PATH", "LANG", "LANGUAGE", "LD_PRELOAD"
    };
    const size_t n = strcspn(variable, "=");
    if (!strncmp(variable, "LC_", 3)) return false;
    for (int i = 0; i < FV__COUNT(dropped); i++)
        if (strlen(dropped[i]) == n && !strncmp(variable, dropped[i], n)) return false;
    return true;
}

/* The list alone is ours to free. */
static char **make_environment(void)
{
    static char english[] = "LC_ALL=C";
    size_t n = 0, used = 0;
    while (environ && environ[n]) n++;
    char **list = malloc((n + 2) * sizeof *list);
    if (!list) return NULL;
    for (size_t i = 0; i < n; i++)
        if (is_passed(environ[i])) list[used++] = environ[i];
    list[used++] = english;
    list[used] = NULL;
    return list;
}

/* Of what the program starts, too. */
static void limit_time(pid_t pid)
{
    struct rlimit is;
    const rlim_t most = (rlim_t)fv__cc_seconds;
    if (prlimit(pid, RLIMIT_CPU, NULL, &is)) return;
    if (is.rlim_cur > most) is.rlim_cur = most;
    if (is.rlim_max > most + 1) is.rlim_max = most + 1;
    prlimit(pid, RLIMIT_CPU, &is, NULL);
}

static int start(const char *path, char *const *argv, const int fds[NUM_FDS], pid_t *pid)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attr;
    sigset_t all, none;
    char **environment = make_environment();
    if (!environment) return ENOMEM;
    sigfillset(&all);
    sigdelset(&all, SIGINT);            /* whoever ignores the terminal does it for the compiler, too */
    sigdelset(&all, SIGQUIT);
    sigdelset(&all, SIGHUP);
    sigemptyset(&none);
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attr);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
    posix_spawnattr_setsigdefault(&attr, &all);
    posix_spawnattr_setsigmask(&attr, &none);
    int error = 0;
    for (int i = 0; i < NUM_FDS && !error; i++) error = posix_spawn_file_actions_adddup2(&actions, fds[i], i);
#if defined __GLIBC__ && (__GLIBC__ > 2 || __GLIBC_MINOR__ >= 34)
    if (!error) error = posix_spawn_file_actions_addclosefrom_np(&actions, NUM_FDS);
#endif
    if (!error) error = posix_spawn(pid, path, &actions, &attr, argv, environment);
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&actions);
    free(environment);
    if (!error) limit_time(*pid);
    return error;
}

/* Ends a program and all that it started. It is stopped first, so that it starts no more and nobody takes its children's numbers. */
static void end_all(pid_t pid)
{
    char path[64];
    long child;
    kill(pid, SIGSTOP);
    snprintf(path, sizeof path, "/proc/%ld/task/%ld/children", (long)pid, (long)pid);
    FILE *children = fopen(path, "re");
    while (children && fscanf(children, "%ld", &child) == 1) end_all((pid_t)child);
    if (children) fclose(children);
    kill(pid, SIGKILL);
}

enum { TOO_LONG = -1, UNSEEN = -2 };

/* The exit status. UNSEEN: the host lets nobody have it (SIGCHLD ignored, or somebody else who waits for every child). */
static int wait_for(pid_t pid)
{
    const int64_t begin = fv__os_now_ns();
    for (;;) {
        int status = 0;
        const pid_t ended = waitpid(pid, &status, WNOHANG);
        if (ended == pid) return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        if (ended < 0 && errno != EINTR) return UNSEEN;
        const int64_t took = fv__os_now_ns() - begin;
        if (took > fv__cc_seconds * INT64_C(1000000000)) {
            end_all(pid);
            while (waitpid(pid, &status, 0) < 0 && errno == EINTR) { }
            return TOO_LONG;
        }
        nanosleep(&(struct timespec){ .tv_nsec = took < 1000000000 ? 500000 : 10000000 }, NULL);
    }
}

/* --------------------------------------------------------------------------------------------------------- memory files */

/* Above the numbers that programs get, so that none of these is overwritten on the way. */
static int make_file(const char *name)
{
    const int low = memfd_create(name, MFD_CLOEXEC);
    if (low < 0) return -1;
    const int fd = fcntl(low, F_DUPFD_CLOEXEC, 2 * NUM_FDS);
    const int error = fd < 0 && errno == EINVAL ? EMFILE : errno;      /* a process that may not have so high a number */
    close(low);
    errno = error;
    return fd;
}

static void close_files(int fds[NUM_FDS])
{
    for (int i = 0; i < NUM_FDS; i++)
        if (fds[i] >= 0) close(fds[i]);
}

static bool make_files(int fds[NUM_FDS])
{
    static const char *const names[NUM_FDS] = { "source", "answer", "diagnostics", "object", "library" };
    for (int i = 0; i < NUM_FDS; i++) fds[i] = -1;
    for (int i = 0; i < NUM_FDS; i++)
        if ((fds[i] = make_file(names[i])) < 0) return false;
    return true;
}

/* All of a file, with a NUL behind it; NULL: no memory. */
static char *read_file(int fd, size_t most, size_t *size)
{
    struct stat st;
    if (fstat(fd, &st)) return NULL;
    *size = (size_t)st.st_size < most ? (size_t)st.st_size : most;
    return fv__jit_read_at(fd, 0, *size);
}

/* ------------------------------------------------------------------------------------------------------------ complaints */

/* The number in "NAME:LINE:..." about the source; 0: the line is about something else. */
static long line_of(const char *line, const char *name)
{
    const size_t n = strlen(name);
    return strncmp(line, name, n) || line[n] != ':' ? 0 : strtol(line + n + 1, NULL, 10);
}

/* Compilers say "error: ", GNU's assembler "Error: ". */
static const char *words_of(const char *line)
{
    const char *words = strstr(line, "rror: ");
    return words && words > line && (words[-1] == 'e' || words[-1] == 'E') ? words + strlen("rror: ") : NULL;
}

/* The first complaint that is about the source, or whose note is: what a macro of ours made of the source is reported where the macro stands. */
static fv_status complain(const fv__jit_request *r, const char *program, int status, char *log, fv_error *err)
{
    const char *name = r->texts[0].name, *other = NULL, *last = NULL;
    for (char *rest = log, *line; (line = strsep(&rest, "\n")); ) {
        const long number = line_of(line, name);
        const char *words = words_of(line);
        if (words) last = words;
        if (number && last && (words || strstr(line, "note: ")))
            return fv__fail(err, FV_E_COMPILE, name, number, 0, "%s, line %ld: %s", name, number, last);
        if (*line && (!other || (words && !words_of(other)))) other = line;
    }
    if (status == TOO_LONG) return fv__fail(err, FV_E_COMPILE, name, 0, 0, "%s: %s took longer than %d s and was ended", name, program, fv__cc_seconds);
    return fv__fail(err, FV_E_COMPILE, name, 0, 0, "%s: %s failed (%d): %s", name, program, status, other ? other : "it gave no reason");
}

/* Is the file what the programs should have made of it? Exit codes alone do not say: FV_CC may be anything. */
static bool is_elf(int fd, int type)
{
    Elf64_Ehdr head;
    return pread(fd, &head, sizeof head, 0) == (ssize_t)sizeof head && !memcmp(head.e_ident, ELFMAG, SELFMAG) &&
           head.e_ident[EI_CLASS] == ELFCLASS64 && head.e_type == type && (MACHINE == EM_NONE || head.e_machine == MACHINE) &&
           (type == ET_REL || head.e_phnum > 0);
}

static fv_status not_made(const fv__cc *cc, const char *what, fv_error *err)
{
    return fv__fail(err, FV_E_COMPILE, "FV_CC", 0, MACHINE, "%s made no %s for this process: FV_CC must name a C compiler for %s", cc->path, what,
                    MACHINE == EM_AARCH64 ? "64-bit ARM" : MACHINE == EM_X86_64 ? "x86-64" : "this machine");
}

/* Runs one program; its diagnostics are those of this run alone. */
static fv_status run(const fv__jit_request *r, const char *path, char *const *argv, const int fds[NUM_FDS], fv_error *err)
{
    pid_t pid;
    size_t size;
    if (ftruncate(fds[LOG], 0) || lseek(fds[LOG], 0, SEEK_SET) || lseek(fds[IN], 0, SEEK_SET))
        return fv__fail(err, FV_E_IO, "text", errno, 0, "%s: a memory file for the compiler cannot be used: %s", r->name, strerror(errno));
    const int error = start(path, argv, fds, &pid);
    if (error) return fv__fail(err, FV_E_COMPILE, "FV_CC", error, 0, "%s cannot be started: %s", path, strerror(error));
    const int status = wait_for(pid);
    if (!status) return FV_OK;
    char *log = read_file(fds[LOG], MAX_LOG, &size);
    const bool silent = !log || !words_of(log);         /* then an unseen end was a good one, if what it made is right */
    const fv_status s = status == UNSEEN && silent ? FV_OK : complain(r, path, status, log ? log : (char[]){ "" }, err);
    free(log);
    return s;
}

/* ------------------------------------------------------------------------------------------------------------ compiling */

typedef struct arguments {
    const char *list[MAX_ARGS + 1];
    int n;
} arguments;

static void add(arguments *a, const char *word)
{
    if (a->n < MAX_ARGS) a->list[a->n++] = word;
    a->list[a->n] = NULL;
}

static void add_compiler(arguments *a, const fv__cc *cc)
{
    for (int i = 0; i < cc->num_words; i++) add(a, cc->argv[i]);
}

static fv_status make_object(const fv__cc *cc, const fv__jit_request *r, const int fds[NUM_FDS], fv_error *err)
{
    arguments a = { .n = 0 };
    if (cc->num_words + r->num_options + 8 > MAX_ARGS)
        return fv__fail(err, FV_E_INVALID, "FV_CC", cc->num_words, MAX_ARGS, "%s has too many options", r->name);
    if (!fv__jit_write_all(fds[IN], r->texts[0].text, strlen(r->texts[0].text)))
        return fv__fail(err, FV_E_IO, "text", errno, 0, "%s cannot be handed to the compiler: %s", r->name, strerror(errno));
    add_compiler(&a, cc);
    for (int i = 0; i < r->num_options; i++) add(&a, r->options[i]);
    static const char *const rest[] = { "-c", "-pipe", "-o", OBJECT_PATH, "-x", "c", "-" };
    for (int i = 0; i < FV__COUNT(rest); i++) add(&a, rest[i]);
    FV_TRY(run(r, cc->path, (char *const *)a.list, fds, err));
    return is_elf(fds[OBJECT], ET_REL) ? FV_OK : not_made(cc, "object", err);
}

/* The linker that the compiler would take: it may be a cross compiler's. */
static fv_status find_linker(const fv__cc *cc, const fv__jit_request *r, const int fds[NUM_FDS], char path[1024], fv_error *err)
{
    arguments a = { .n = 0 };
    size_t size;
    add_compiler(&a, cc);
    add(&a, "-print-prog-name=ld");
    FV_TRY(run(r, cc->path, (char *const *)a.list, fds, err));
    char *answer = read_file(fds[OUT], 1023, &size);
    if (answer) answer[strcspn(answer, "\n")] = 0;
    const bool found = answer && *answer && find_program(answer, path);
    free(answer);
    if (found || find_program("ld", path) || find_program("ld.lld", path)) return FV_OK;
    return fv__fail(err, FV_E_COMPILE, "FV_CC", 0, 0, "%s has no linker: install binutils (or lld)", cc->path);
}

static fv_status make_library(const fv__cc *cc, const fv__jit_request *r, const int fds[NUM_FDS], fv_error *err)
{
    static const char *const words[] = { "ld", "-shared", "-z", "noexecstack", "-z", "relro", "-z", "now", "-s", "-o", LIBRARY_PATH, OBJECT_PATH };
    char path[1024];
    arguments a = { .n = 0 };
    FV_TRY(find_linker(cc, r, fds, path, err));
    for (int i = 0; i < FV__COUNT(words); i++) add(&a, words[i]);
    return run(r, path, (char *const *)a.list, fds, err);
}

static fv_status take_library(const fv__cc *cc, const fv__jit_request *r, int fd, fv__jit_output *out, fv_error *err)
{
    if (!is_elf(fd, ET_DYN)) return not_made(cc, "library", err);
    if (fv__os_is_cut_off(fd))
        return fv__fail(err, FV_E_COMPILE, "FV_CC", 0, 0, "%s: its linker's library is cut off; is there room in memory?", cc->path);
    out->data = read_file(fd, FV__JIT_MAX_ENTRY, &out->size);
    return out->data ? FV_OK : fv__fail(err, FV_E_NO_MEMORY, "text", 0, 0, "no memory for the compiled %s", r->name);
}

fv_status fv__cc_compile(void *user, const fv__jit_request *r, fv__jit_output *out, fv_error *err)
{
    const fv__cc *cc = user;
    int fds[NUM_FDS];
    fv_status s = make_files(fds) ? FV_OK
                                  : fv__fail(err, FV_E_IO, "text", errno, 0, "%s: no memory file for the compiler: %s", r->name, strerror(errno));
    if (s == FV_OK) s = make_object(cc, r, fds, err);
    if (s == FV_OK) s = make_library(cc, r, fds, err);
    if (s == FV_OK) s = take_library(cc, r, fds[LIBRARY], out, err);
    close_files(fds);
    return s;
}
