/* SPDX-License-Identifier: Apache-2.0 */
/* peer.c -- see peer.h: how a library is found. */
#include "peer.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

/* Not every build has told its loader to look beside the file: a library that is loaded already is
 * found by its name. One that is not there is not needed. */
static void load_needed(const peer_kind *kind, const char *folder)
{
    for (const char *const *file = kind->needs; *file; file++) {
        char path[1200];
        snprintf(path, sizeof path, "%s/%s", folder, *file);
        dlopen(path, RTLD_LAZY | RTLD_GLOBAL);
    }
}

/* Remembers the first file that is there and cannot be loaded. */
static void *load_in(peer *p, const char *folder)
{
    char path[1200];
    snprintf(path, sizeof path, "%s/%s", folder, p->kind->file);
    if (access(path, R_OK))
        return NULL;
    load_needed(p->kind, folder);
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

static void *load_of_python(peer *p)
{
    char site[1024];
    void *library = NULL;
    const char *ask = "python3 -c 'import sys\nfor x in sys.path[1:]: print(x + \"/\")' "
                      "2>/dev/null";
    FILE *python = popen(ask, "r");
    while (python && !library && fgets(site, sizeof site, python)) {
        site[strcspn(site, "\n")] = 0;
        library = load_of_folders(p, site, p->kind->package);
    }
    if (python)
        pclose(python);
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
        library = dlopen(kind->file, RTLD_LAZY | RTLD_LOCAL);
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
