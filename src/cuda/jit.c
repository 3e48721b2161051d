/* SPDX-License-Identifier: Apache-2.0 */
/* jit.c -- programs, their texts, and the functions that are loaded on one device.
 *
 *   (1) a request holds every text that its source can reach by a quoted include, so its key changes when any of them does. An include that
 *       nobody knows becomes a text that refuses to compile: NVRTC would look for it in the working directory;
 *   (2) a function is in the list only when its module is loaded for good, so what is found there may be launched, also into a capture. */
#include "cuda/jit.h"

#include "os.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda_texts.inc"

const fv__jit_text fv__cuda_sources[] = {
#include "cuda_table.inc"
    { NULL, NULL },
};

const char *const fv__cuda_archs[] = { "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", NULL };

enum { MAX_TEXTS = 64, MAX_OPTIONS = 48, MAX_NAME = 64, FLAGS_CHARS = 1024 };

/* -default-device: texts that are C on the host need no marks on their functions. ptxas options one by one: NVRTC refuses lists. */
static const char *const fixed_options[] = { "--std=c++17", "-default-device", "--ptxas-options=-v" };

typedef struct loaded {
    struct loaded *next;
    fv__jit_key key;
    char arch[16];
    char entry[MAX_NAME];
    CUmodule module;
    CUfunction function;
    bool owner;                     /* unloads the module */
} loaded;

struct fv__cuda_jit {
    const fv__cuda_device *device;
    fv__jit_cache *cache;
    fv__nvrtc *nvrtc;               /* NULL: none */
    fv_error no_nvrtc;              /* why */
    char arch[16];                  /* of the device */
    char flags[FLAGS_CHARS];        /* FV_NVRTC_FLAGS, cut into words by NULs */
    int num_flags;
    bool in_parts;
    pthread_mutex_t mutex;          /* guards what follows; held while a module loads */
    loaded *list;
    fv__cuda_jit_stats stats;
};

/* Everything that a request points to. */
typedef struct workbench {
    fv__jit_text texts[MAX_TEXTS];
    char names[MAX_TEXTS][MAX_NAME];
    const char *options[MAX_OPTIONS];
    int num_texts, num_options;
} workbench;

void fv__cuda_arch(int cc_major, int cc_minor, char arch[16])
{
    snprintf(arch, 16, "sm_%d%d%s", cc_major, cc_minor, cc_major >= 9 ? "a" : "");
}

/* -------------------------------------------------------------------------------------------------------------- texts */

static const char *find_text(const fv__cuda_program *p, const char *name)
{
    for (int i = 0; i < p->num_extra; i++)
        if (!strcmp(p->extra[i].name, name)) return p->extra[i].text;
    for (const fv__jit_text *t = fv__cuda_sources; t->name; t++)
        if (!strcmp(t->name, name)) return t->text;
    return NULL;
}

/* The name in `#include "name"`, if the line that starts at `line` is one; it may be under an #if that is false, which does no harm. */
static bool read_include(const char *line, char name[MAX_NAME])
{
    line += strspn(line, " \t");
    if (*line++ != '#') return false;
    line += strspn(line, " \t");
    if (strncmp(line, "include", 7)) return false;
    line += 7;
    line += strspn(line, " \t");
    const size_t length = *line == '"' ? strcspn(line + 1, "\"\n") : 0;
    if (!length || line[1 + length] != '"' || length >= MAX_NAME) return false;
    memcpy(name, line + 1, length);
    name[length] = 0;
    return true;
}

static bool is_taken(const workbench *w, const char *name)
{
    for (int i = 0; i < w->num_texts; i++)
        if (!strcmp(w->texts[i].name, name)) return true;
    return false;
}

static fv_status add_text(workbench *w, const fv__cuda_program *p, const char *name, fv_error *err)
{
    if (is_taken(w, name)) return FV_OK;
    if (w->num_texts == MAX_TEXTS)
        return fv__fail(err, FV_E_COMPILE, "text", MAX_TEXTS + 1, MAX_TEXTS, "%s includes more than %d texts", p->name, MAX_TEXTS);
    const char *text = find_text(p, name);
    snprintf(w->names[w->num_texts], MAX_NAME, "%s", name);
    w->texts[w->num_texts] = (fv__jit_text){ w->names[w->num_texts], text ? text : "#error this include is not a part of the kernel\n" };
    w->num_texts++;
    return FV_OK;
}

/* (1), breadth first: the list is its own queue. */
static fv_status gather_texts(workbench *w, const fv__cuda_program *p, fv_error *err)
{
    char name[MAX_NAME];
    if (!find_text(p, p->source) || strlen(p->source) >= MAX_NAME)
        return fv__fail(err, FV_E_INVALID, "program.source", 0, 0, "there is no text called %s", p->source);
    FV_TRY(add_text(w, p, p->source, err));
    for (int i = 0; i < w->num_texts; i++)
        for (const char *line = w->texts[i].text; line; line = strchr(line, '\n')) {
            line += *line == '\n';
            if (read_include(line, name)) FV_TRY(add_text(w, p, name, err));
        }
    return FV_OK;
}

static bool in_parts(const fv__cuda_jit *jit, const fv__cuda_program *p) { return jit->in_parts && p->num_parts > 0; }

static fv_status gather_options(const fv__cuda_jit *jit, workbench *w, const fv__cuda_program *p, fv_error *err)
{
    const int total = FV__COUNT(fixed_options) + p->num_options + jit->num_flags + in_parts(jit, p);
    if (total > MAX_OPTIONS)
        return fv__fail(err, FV_E_INVALID, "program.options", total, MAX_OPTIONS, "%s has %d options; at most %d", p->name, total, MAX_OPTIONS);
    for (int i = 0; i < FV__COUNT(fixed_options); i++) w->options[w->num_options++] = fixed_options[i];
    for (int i = 0; i < p->num_options; i++) w->options[w->num_options++] = p->options[i];
    const char *flag = jit->flags;
    for (int i = 0; i < jit->num_flags; i++, flag += strlen(flag) + 1) w->options[w->num_options++] = flag;
    if (in_parts(jit, p)) w->options[w->num_options++] = "-DFV_IN_PARTS";      /* another build, so another key */
    return FV_OK;
}

static fv_status make_request(const fv__cuda_jit *jit, workbench *w, const fv__cuda_program *p, const char *arch, fv__jit_request *r, fv_error *err)
{
    FV_TRY(gather_texts(w, p, err));
    FV_TRY(gather_options(jit, w, p, err));
    *r = (fv__jit_request){ .kind = "cubin", .name = p->name, .arch = arch, .compiler = jit->nvrtc ? fv__nvrtc_name(jit->nvrtc) : NULL,
                            .texts = w->texts, .options = w->options, .num_texts = w->num_texts, .num_options = w->num_options,
                            .num_parts = in_parts(jit, p) ? p->num_parts : 0, .max_registers = p->max_registers };
    return FV_OK;
}

/* ---------------------------------------------------------------------------------------------------- open and close */

static void read_flags(fv__cuda_jit *jit)
{
    const char *flags = fv__os_env("FV_NVRTC_FLAGS");
    size_t at = 0;
    while (flags && *flags) {
        flags += strspn(flags, " \t");
        const size_t length = strcspn(flags, " \t");
        if (!length || at + length + 1 > sizeof jit->flags) break;
        memcpy(jit->flags + at, flags, length);
        at += length + 1;
        flags += length;
        jit->num_flags++;
    }
}

fv_status fv__cuda_jit_open(const fv__cuda_device *device, fv__jit_cache *cache, const fv__log *log, fv__cuda_jit **jit, fv_error *err)
{
    *jit = NULL;
    fv__cuda_jit *j = calloc(1, sizeof *j);
    if (!j) return fv__fail(err, FV_E_NO_MEMORY, "jit", (int64_t)sizeof *j, 0, "no memory for the compiler's state");
    j->device = device;
    j->cache = cache;
    const char *parts = fv__os_env("FV_JIT_PARTS");
    j->in_parts = device && parts && !strcmp(parts, "1");
    if (device) fv__cuda_arch(device->facts.cc_major, device->facts.cc_minor, j->arch);
    read_flags(j);
    pthread_mutex_init(&j->mutex, NULL);
    fv__nvrtc_open(device ? device->api.version / 1000 : 0, log, &j->nvrtc, &j->no_nvrtc);      /* why not is told when it is needed */
    *jit = j;
    return FV_OK;
}

void fv__cuda_jit_close(fv__cuda_jit **jit)
{
    fv__cuda_jit *j = *jit;
    *jit = NULL;
    if (!j) return;
    for (loaded *l = j->list, *next; l; l = next) {
        next = l->next;
        if (l->owner) fv__cuda_module_unload(j->device, l->module);
        free(l);
    }
    fv__nvrtc_close(&j->nvrtc);
    pthread_mutex_destroy(&j->mutex);
    free(j);
}

void fv__cuda_jit_in_parts(fv__cuda_jit *jit, bool in_parts) { jit->in_parts = in_parts; }

const char *fv__cuda_jit_compiler(const fv__cuda_jit *jit) { return jit->nvrtc ? fv__nvrtc_name(jit->nvrtc) : ""; }
const char *fv__cuda_jit_compiler_path(const fv__cuda_jit *jit) { return jit->nvrtc ? fv__nvrtc_path(jit->nvrtc) : ""; }

void fv__cuda_jit_stats_of(fv__cuda_jit *jit, fv__cuda_jit_stats *stats)
{
    pthread_mutex_lock(&jit->mutex);
    *stats = jit->stats;
    pthread_mutex_unlock(&jit->mutex);
}

/* ---------------------------------------------------------------------------------------------------------- compiling */

static fv_status find_blob(fv__cuda_jit *jit, const fv__jit_request *r, const fv__jit_blob **blob, fv_error *err)
{
    const fv_status status = fv__jit_cache_get(jit->cache, r, jit->nvrtc ? fv__nvrtc_compile : NULL, jit->nvrtc, blob, err);
    if (status != FV_E_NOT_READY || jit->nvrtc) return status;
    if (err) *err = jit->no_nvrtc;                  /* it is nowhere, and this is why it cannot be made */
    return jit->no_nvrtc.status;
}

fv_status fv__cuda_jit_compile(fv__cuda_jit *jit, const fv__cuda_program *p, const char *arch, const fv__jit_blob **blob, fv_error *err)
{
    fv__jit_request r;
    *blob = NULL;
    if (!arch && !jit->device) return fv__fail(err, FV_E_INVALID, "arch", 0, 0, "which arch %s is for must be said where there is no device", p->name);
    workbench *w = calloc(1, sizeof *w);
    if (!w) return fv__fail(err, FV_E_NO_MEMORY, "jit", (int64_t)sizeof *w, 0, "no memory to compile %s", p->name);
    fv_status status = make_request(jit, w, p, arch ? arch : jit->arch, &r, err);
    if (status == FV_OK) status = find_blob(jit, &r, blob, err);
    free(w);
    return status;
}

/* ------------------------------------------------------------------------------------------------------------ loading */

/* Under the mutex. With an entry: that function; without: any function of the module. */
static const loaded *find_loaded(const fv__cuda_jit *jit, const fv__jit_key *key, const char *entry)
{
    for (const loaded *l = jit->list; l; l = l->next)
        if (fv__jit_same(&l->key, key) && (!entry || !strcmp(l->entry, entry))) return l;
    return NULL;
}

static fv_status load_function(fv__cuda_jit *jit, const fv__jit_blob *blob, const char *entry, loaded *l, fv_error *err)
{
    const loaded *sibling = find_loaded(jit, &l->key, NULL);
    const int64_t before = fv__os_now_ns();
    l->owner = !sibling;
    l->module = sibling ? sibling->module : NULL;
    if (!sibling) FV_TRY(fv__cuda_module_load(jit->device, blob->data, &l->module, err));
    const fv_status status = fv__cuda_module_function(jit->device, l->module, entry, &l->function, err);
    if (status != FV_OK) {
        if (l->owner) fv__cuda_module_unload(jit->device, l->module);
        return status;
    }
    jit->stats.modules += l->owner;
    jit->stats.load_ns += fv__os_now_ns() - before;
    return FV_OK;
}

/* Loads unless another thread has done it meanwhile. */
static fv_status load_once(fv__cuda_jit *jit, const fv__jit_key *key, const fv__jit_blob *blob, const char *entry, CUfunction *function,
                           fv_error *err)
{
    fv_status status = FV_OK;
    pthread_mutex_lock(&jit->mutex);
    const loaded *known = find_loaded(jit, key, entry);
    loaded *l = known ? NULL : calloc(1, sizeof *l);
    if (l) {
        l->key = *key;
        snprintf(l->entry, sizeof l->entry, "%s", entry);
        status = load_function(jit, blob, entry, l, err);
        if (status == FV_OK) {
            l->next = jit->list;
            jit->list = l;
            known = l;
        } else {
            free(l);
        }
    } else if (!known) {
        status = fv__fail(err, FV_E_NO_MEMORY, "jit", (int64_t)sizeof *l, 0, "no memory to load %s", entry);
    }
    if (known) *function = known->function;
    pthread_mutex_unlock(&jit->mutex);
    return status;
}

static bool is_loaded(fv__cuda_jit *jit, const fv__jit_key *key, const char *entry, CUfunction *function)
{
    pthread_mutex_lock(&jit->mutex);
    const loaded *l = find_loaded(jit, key, entry);
    if (l) *function = l->function;
    pthread_mutex_unlock(&jit->mutex);
    return l;
}

static fv_status make_function(fv__cuda_jit *jit, const fv__jit_request *r, const char *entry, CUstream stream, CUfunction *function, fv_error *err)
{
    fv__jit_key key;
    bool capturing = false;
    const fv__jit_blob *blob;
    FV_TRY(fv__jit_key_of(r, &key, err));
    if (is_loaded(jit, &key, entry, function)) return FV_OK;
    FV_TRY(fv__cuda_stream_capturing(jit->device, stream, &capturing, err));
    if (capturing)
        return fv__fail(err, FV_E_NOT_READY, "stream", 0, 0, "%s is not loaded, and nothing is compiled or loaded while a stream is captured: create "
                        "the plan or call fv_warm before", r->name);
    FV_TRY(find_blob(jit, r, &blob, err));
    return load_once(jit, &key, blob, entry, function, err);
}

fv_status fv__cuda_jit_function(fv__cuda_jit *jit, const fv__cuda_program *p, const char *entry, CUstream stream, CUfunction *function, fv_error *err)
{
    fv__jit_request r;
    *function = NULL;
    if (!jit->device || strlen(entry) >= MAX_NAME)
        return fv__fail(err, FV_E_INVALID, "jit", (int64_t)strlen(entry), MAX_NAME, "%s cannot be loaded: no device, or a name too long", entry);
    FV_TRY(fv__cuda_enter(jit->device, err));           /* also: not in a forked child, whose mutex nobody would unlock */
    workbench *w = calloc(1, sizeof *w);
    fv_status status = w ? make_request(jit, w, p, jit->arch, &r, err)
                         : fv__fail(err, FV_E_NO_MEMORY, "jit", (int64_t)sizeof *w, 0, "no memory to find %s", p->name);
    if (status == FV_OK) status = make_function(jit, &r, entry, stream, function, err);
    free(w);
    fv__cuda_leave(jit->device);
    return status;
}
