/* SPDX-License-Identifier: Apache-2.0 */
/* peer.c -- see peer.h: how a library is found. */
#include "peer.h"

#include "os.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { PYTHON_SECONDS = 10, MAX_ANSWER = 1 << 16 };

void peer_folder(void *library, char *out, size_t size)
{
    struct link_map *map = NULL;
    out[0] = 0;
    if (dlinfo(library, RTLD_DI_LINKMAP, &map) || !map)
        return;
    snprintf(out, size, "%s", map->l_name);
    char *slash = strrchr(out, '/');
    if (slash)
        *slash = 0;
}

bool peer_functions(void *library, const char *const *names, void *slots, peer *p)
{
    char *slot = slots;
    for (; *names; names++, slot += sizeof(void *)) {
        void *symbol = dlsym(library, *names);
        if (!symbol && p)
            snprintf(p->why, sizeof p->why, "%s has no %s", p->kind->file, *names);
        if (!symbol)
            return false;
        memcpy(slot, &symbol, sizeof symbol);
    }
    return true;
}

/* ---- where libraries lie ---- */

/* Half of a library: the loader would map it, and the first look at the rest would kill us. */
static bool is_cut_off(peer *p, const char *path)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const bool cut = fd >= 0 && fv__os_is_cut_off(fd);
    if (fd >= 0)
        close(fd);
    if (cut && !p->why[0])
        snprintf(p->why, sizeof p->why, "%.400s is cut off", path);
    return cut;
}

/* Not every build has told its loader to look beside the file: a library that is loaded already is
 * found by its name. One that is not there is not needed. */
static bool load_needed(peer *p, const char *folder)
{
    for (const char *const *file = p->kind->needs; *file; file++) {
        char path[1200];
        snprintf(path, sizeof path, "%s/%s", folder, *file);
        if (is_cut_off(p, path))
            return false;
        dlopen(path, RTLD_LAZY | RTLD_GLOBAL);
    }
    return true;
}

/* Remembers the first file that is there and cannot be loaded. */
static void *load_in(peer *p, const char *folder)
{
    char path[1200];
    snprintf(path, sizeof path, "%s/%s", folder, p->kind->file);
    if (access(path, R_OK) || is_cut_off(p, path) || !load_needed(p, folder))
        return NULL;
    void *library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    const char *reason = library ? NULL : dlerror();
    if (reason && !p->why[0])
        snprintf(p->why, sizeof p->why, "%s", reason);
    return library;
}

/* `folders` is "a:b", or NULL; `root` stands in front of each. */
static void *load_of_folders(peer *p, const char *root, const char *folders)
{
    void *library = NULL;
    while (folders && *folders && !library) {
        char folder[1100];
        const int length = (int)strcspn(folders, ":");
        snprintf(folder, sizeof folder, "%s%.*s", root, length, folders);
        library = load_in(p, folder);
        folders += length + (folders[length] == ':');
    }
    return library;
}

/* Where the loader looks first, so that what is wrong with a file there is told. The rest it looks
 * through by itself, if there is nothing here that it must not touch. */
static void *load_of_loader(peer *p)
{
    char folders[4096], told[sizeof p->why];
    const char *list = getenv("LD_LIBRARY_PATH");
    snprintf(folders, sizeof folders, "%s", list ? list : "");
    for (char *c = folders; (c = strchr(c, ';')); )
        *c = ':';
    memcpy(told, p->why, sizeof told);
    p->why[0] = 0;
    void *library = load_of_folders(p, "", folders);
    const bool bad = p->why[0];
    if (told[0])
        memcpy(p->why, told, sizeof told);
    return library || bad ? library : dlopen(p->kind->file, RTLD_LAZY | RTLD_LOCAL);
}

/* Starts the python3 of PATH, in a process group of its own; where its answer comes from, -1: there
 * is none. */
static int start_python(pid_t *pid)
{
    static const char *const argv[] = {
        "python3", "-c", "import sys\nfor x in sys.path[1:]: print(x + \"/\")", NULL,
    };
    int ends[2];
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attr;
    if (pipe2(ends, O_CLOEXEC))
        return -1;
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attr);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETPGROUP);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
    posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
    const int error = posix_spawnp(pid, argv[0], &actions, &attr, (char *const *)argv, environ);
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    if (!error)
        return ends[0];
    close(ends[0]);
    return -1;
}

/* Reads until the end, or as long as there is time; false: it had to be ended. */
static bool read_answer(int fd, char *answer, size_t size)
{
    const int64_t until = fv__os_now_ns() + PYTHON_SECONDS * INT64_C(1000000000);
    size_t n = 0;
    for (;;) {
        const int64_t left = (until - fv__os_now_ns()) / 1000000;
        struct pollfd end = { .fd = fd, .events = POLLIN };
        answer[n] = 0;
        if (left <= 0 || n + 1 == size)
            return false;
        if (poll(&end, 1, (int)left) <= 0)
            continue;
        const ssize_t got = read(fd, answer + n, size - n - 1);
        if (got == 0 || (got < 0 && errno != EINTR))
            return true;
        n += got > 0 ? (size_t)got : 0;
    }
}

/* What python3 looks through, a folder a line: false: there is no python3, or none that answers. */
static bool ask_python(peer *p, char *answer, size_t size)
{
    pid_t pid;
    const int fd = start_python(&pid);
    if (fd < 0)
        return false;
    const bool whole = read_answer(fd, answer, size);
    close(fd);
    kill(-pid, SIGKILL);                /* and what it started */
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) { }
    if (!whole && !p->why[0])
        snprintf(p->why, sizeof p->why, "no %s, and python3 gave no answer within %d s",
                 p->kind->file, PYTHON_SECONDS);
    return whole;
}

static void *load_of_python(peer *p)
{
    void *library = NULL;
    char *answer = malloc(MAX_ANSWER), *rest = answer, *site;
    if (answer && ask_python(p, answer, MAX_ANSWER))
        while (!library && (site = strsep(&rest, "\n")))
            if (*site)
                library = load_of_folders(p, site, p->kind->package);
    free(answer);
    return library;
}

/* Both torch and ggml ask OpenMP, which reads this once, when it is loaded. */
static void set_threads(int threads)
{
    char count[16];
    snprintf(count, sizeof count, "%d", threads);
    setenv("OMP_NUM_THREADS", count, 1);
    setenv("MKL_NUM_THREADS", count, 1);
}

bool peer_open(const peer_kind *kind, const char *folders, int threads, peer *out)
{
    *out = (peer){ .kind = kind };
    snprintf(out->name, sizeof out->name, "%s", kind->name);
    set_threads(threads);
    void *library = load_of_folders(out, "", folders);
    if (!library)
        library = load_of_loader(out);
    if (!library)
        library = load_of_python(out);
    if (library)
        out->functions = kind->open(library, threads, out);
    else if (!out->why[0])
        snprintf(out->why, sizeof out->why, "no %s", kind->file);
    return out->functions != NULL;
}

void peer_close(peer *p)
{
    if (p->functions)
        p->kind->shut(p->functions);
    *p = (peer){ 0 };
}
