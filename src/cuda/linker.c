/* SPDX-License-Identifier: Apache-2.0 */
/* linker.c -- finding nvJitLink and linking with it. Its functions carry the version of the header they were compiled against in their names; a library has
 * those of all versions up to its own, so the name with NVRTC's version is there exactly if what NVRTC makes can be linked. */
#include "cuda/linker.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { INPUT_CUBIN = 1 };

/* Path i that it may lie at; false: there are no more. */
static bool place(int i, const char *folder, int major, char path[PATH_MAX])
{
    static const char *const below[] = { "", "/../../nvjitlink/lib" };     /* the same folder; the package beside NVRTC's */
    if (!*folder) snprintf(path, PATH_MAX, "libnvJitLink.so.%d", major);
    else if (i < FV__COUNT(below)) snprintf(path, PATH_MAX, "%s%s/libnvJitLink.so.%d", folder, below[i], major);
    return i < (*folder ? FV__COUNT(below) : 1);
}

bool fv__linker_is_there(const char *folder, int major)
{
    char path[PATH_MAX];
    for (int i = 0; place(i, folder, major, path); i++)
        if (!*folder || !access(path, R_OK)) return true;
    return false;
}

static bool load(void *library, int major, int minor, fv__linker *l)
{
    char name[64];
    const struct { void *to; const char *name; } functions[] = {
        { &l->create, "Create" }, { &l->add, "AddData" }, { &l->complete, "Complete" }, { &l->destroy, "Destroy" },
        { &l->error_size, "GetErrorLogSize" }, { &l->error, "GetErrorLog" }, { &l->size, "GetLinkedCubinSize" }, { &l->cubin, "GetLinkedCubin" },
    };
    for (int i = 0; i < FV__COUNT(functions); i++) {
        snprintf(name, sizeof name, "__nvJitLink%s_%d_%d", functions[i].name, major, minor);
        void *f = dlsym(library, name);
        if (!f) return false;
        memcpy(functions[i].to, &f, sizeof f);
    }
    l->library = library;
    return true;
}

bool fv__linker_open(const char *folder, int major, int minor, fv__linker *linker)
{
    char path[PATH_MAX];
    *linker = (fv__linker){ 0 };
    for (int i = 0; place(i, folder, major, path); i++) {
        void *library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
        if (library && load(library, major, minor, linker)) return true;
        if (library) dlclose(library);
    }
    return false;
}

static void complain(const fv__linker *l, void *link, int result, const fv__log *log)
{
    size_t size = 0;
    if (!link || l->error_size(link, &size)) size = 0;
    char *text = calloc(1, size + 1);
    if (text && size && l->error(link, text)) *text = 0;
    fv__log_line(log, FV_LOG_WARN, "nvJitLink: error %d: %s", result, text && *text ? text : "no reason given");
    free(text);
}

bool fv__linker_link(const fv__linker *l, const char *target, const fv__jit_output *parts, int num_parts, const fv__log *log, fv__jit_output *out)
{
    char arch[64], name[16];
    const char *options[] = { arch };
    void *link = NULL;
    snprintf(arch, sizeof arch, "-arch=%s", target);
    int result = l->create(&link, 1, options);
    for (int i = 0; i < num_parts && !result; i++) {
        snprintf(name, sizeof name, "part %d", i);
        result = l->add(link, INPUT_CUBIN, parts[i].data, parts[i].size, name);
    }
    if (!result) result = l->complete(link);
    if (!result) result = l->size(link, &out->size);
    if (!result) {
        out->data = malloc(out->size + 1);
        result = out->data ? l->cubin(link, out->data) : -1;
    }
    if (result) {
        complain(l, link, result, log);
        free(out->data);
        *out = (fv__jit_output){ 0 };
    }
    if (link) l->destroy(&link);
    return !result;
}
