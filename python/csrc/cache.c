/* SPDX-License-Identifier: Apache-2.0 */
/* cache.c -- foveal.Cache: pages of a pool, sequences as paths in a prefix tree. */
#include "types.h"

PyTypeObject *cache_type;

typedef struct cache_object {
    PyObject_HEAD
    context_object *context;
    fv_cache *cache;
} cache_object;

static fv_cache *cache_of(PyObject *self) { return ((cache_object *)self)->cache; }

PyObject *copy_pair(const fv_copy *copy)
{
    if (copy->src < 0) Py_RETURN_NONE;
    return Py_BuildValue("(ii)", (int)copy->src, (int)copy->dst);
}

static PyObject *cache_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static signature sig = { "Cache", 1, { "!context", "!page_size", "!num_pages", "!max_sequences", "!max_pages_per_sequence", "first_id", "no_prefix" },
                             { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    fv_cache_desc desc = { 0 };
    fv_error err;
    if (read_call(&sig, args, kwargs, given) != 0) return NULL;
    context_object *context = as_context(given[0]);
    if (!context || take_i32(given[1], "page_size", &desc.page_size) != 0 || take_i64(given[2], "num_pages", &desc.num_pages) != 0 ||
        take_i32(given[3], "max_sequences", &desc.max_sequences) != 0 ||
        take_i64(given[4], "max_pages_per_sequence", &desc.max_pages_per_sequence) != 0 || take_i64(given[5], "first_id", &desc.first_id) != 0 ||
        take_bool(given[6], "no_prefix", &desc.no_prefix) != 0)
        return NULL;
    cache_object *self = new_object(type);
    if (!self) return NULL;
    const fv_status s = fv_cache_create(context->ctx, &desc, &self->cache, &err);
    if (s == FV_OK) {
        Py_INCREF((PyObject *)context);
        self->context = context;
        return (PyObject *)self;
    }
    Py_DECREF((PyObject *)self);
    return raise_status(s, &err);
}

static void cache_dealloc(PyObject *self)
{
    cache_object *c = (cache_object *)self;
    fv_cache_destroy(&c->cache);
    Py_XDECREF((PyObject *)c->context);
    free_object(self);
}

#define METHOD(name) static PyObject *cache_##name(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)

METHOD(match)
{
    static signature sig = { "match", 1, { "!page_keys" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    const uint64_t *keys;
    int64_t n, tokens = 0;
    holder h;
    fv_error err;
    if (read_fast(&sig, args, nargs, kwnames, given) != 0) return NULL;
    holder_init(&h);
    fv_status s = FV_OK;
    const int bad = to_keys(given[0], "page_keys", &keys, &n, &h);
    if (!bad) s = fv_cache_match(cache_of(self), keys, n, &tokens, &err);
    holder_release(&h);
    if (bad) return NULL;
    return s == FV_OK ? PyLong_FromLongLong(tokens) : raise_status(s, &err);
}

METHOD(open)
{
    static signature sig = { "open", 2, { "page_keys", "max_tokens" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    const uint64_t *keys;
    int64_t n, tokens = 0, max_tokens = INT64_MAX;
    int32_t sequence = -1;
    holder h;
    fv_error err;
    if (read_fast(&sig, args, nargs, kwnames, given) != 0 || take_i64(given[1], "max_tokens", &max_tokens) != 0) return NULL;
    holder_init(&h);
    fv_status s = FV_OK;
    const int bad = to_keys(given[0], "page_keys", &keys, &n, &h);
    if (!bad) s = fv_cache_open(cache_of(self), keys, n, max_tokens, &sequence, &tokens, &err);
    holder_release(&h);
    if (bad) return NULL;
    return s == FV_OK ? Py_BuildValue("(iL)", (int)sequence, (long long)tokens) : raise_status(s, &err);
}

/* Two integers of a call: a sequence and a count. */
static int read_pair(signature *sig, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, PyObject **given, int32_t *sequence, int64_t *count)
{
    if (read_fast(sig, args, nargs, kwnames, given) != 0 || take_i32(given[0], "sequence", sequence) != 0) return -1;
    return sig->count > 1 ? take_i64(given[1], sig->names[1] + 1, count) : 0;
}

static PyObject *none_or_raise(fv_status s, const fv_error *err)
{
    if (s != FV_OK) return raise_status(s, err);
    Py_RETURN_NONE;
}

METHOD(extend)
{
    static signature sig = { "extend", 2, { "!sequence", "!tokens" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    int32_t sequence = 0;
    int64_t tokens = 0;
    fv_error err;
    if (read_pair(&sig, args, nargs, kwnames, given, &sequence, &tokens) != 0) return NULL;
    return none_or_raise(fv_cache_extend(cache_of(self), sequence, tokens, &err), &err);
}

METHOD(commit)
{
    static signature sig = { "commit", 3, { "!sequence", "!tokens", "page_keys" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    int32_t sequence = 0;
    int64_t tokens = 0, n;
    const uint64_t *keys;
    holder h;
    fv_error err;
    if (read_pair(&sig, args, nargs, kwnames, given, &sequence, &tokens) != 0) return NULL;
    holder_init(&h);
    fv_status s = FV_OK;
    const int bad = to_keys(given[2], "page_keys", &keys, &n, &h);
    if (!bad) s = fv_cache_commit(cache_of(self), sequence, tokens, keys, n, &err);
    holder_release(&h);
    return bad ? NULL : none_or_raise(s, &err);
}

METHOD(fork)
{
    static signature sig = { "fork", 1, { "!sequence" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    int32_t sequence = 0, child = -1;
    int64_t unused = 0;
    fv_copy copy;
    fv_error err;
    if (read_pair(&sig, args, nargs, kwnames, given, &sequence, &unused) != 0) return NULL;
    const fv_status s = fv_cache_fork(cache_of(self), sequence, &child, &copy, &err);
    return s == FV_OK ? Py_BuildValue("(iN)", (int)child, copy_pair(&copy)) : raise_status(s, &err);
}

METHOD(slide)
{
    static signature sig = { "slide", 2, { "!sequence", "!first" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    int32_t sequence = 0;
    int64_t first = 0;
    fv_error err;
    if (read_pair(&sig, args, nargs, kwnames, given, &sequence, &first) != 0) return NULL;
    return none_or_raise(fv_cache_slide(cache_of(self), sequence, first, &err), &err);
}

METHOD(truncate)
{
    static signature sig = { "truncate", 2, { "!sequence", "!tokens" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    int32_t sequence = 0;
    int64_t tokens = 0;
    fv_copy copy;
    fv_error err;
    if (read_pair(&sig, args, nargs, kwnames, given, &sequence, &tokens) != 0) return NULL;
    const fv_status s = fv_cache_truncate(cache_of(self), sequence, tokens, &copy, &err);
    return s == FV_OK ? copy_pair(&copy) : raise_status(s, &err);
}

METHOD(release)
{
    static signature sig = { "release", 1, { "!sequence" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    int32_t sequence = 0;
    int64_t unused = 0;
    fv_error err;
    if (read_pair(&sig, args, nargs, kwnames, given, &sequence, &unused) != 0) return NULL;
    return none_or_raise(fv_cache_release(cache_of(self), sequence, &err), &err);
}

METHOD(length)
{
    static signature sig = { "length", 1, { "!sequence" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    int32_t sequence = 0;
    int64_t tokens = 0;
    fv_error err;
    if (read_pair(&sig, args, nargs, kwnames, given, &sequence, &tokens) != 0) return NULL;
    const fv_status s = fv_cache_length(cache_of(self), sequence, &tokens, &err);
    return s == FV_OK ? PyLong_FromLongLong(tokens) : raise_status(s, &err);
}

METHOD(evict)
{
    static signature sig = { "evict", 1, { "!pages" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    int64_t pages = 0, freed = 0;
    fv_error err;
    if (read_fast(&sig, args, nargs, kwnames, given) != 0 || take_i64(given[0], "pages", &pages) != 0) return NULL;
    const fv_status s = fv_cache_evict(cache_of(self), pages, &freed, &err);
    return s == FV_OK ? PyLong_FromLongLong(freed) : raise_status(s, &err);
}

METHOD(pages)
{
    static signature sig = { "pages", 1, { "!sequences" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    const int32_t *sequences;
    fv_error err;
    if (read_fast(&sig, args, nargs, kwnames, given) != 0) return NULL;
    pages_object *out = new_object(pages_type);
    if (!out) return NULL;
    holder_init(&out->holds);
    fv_status s = FV_OK;
    int bad = holder_object(&out->holds, self) != 0 || to_int32(given[0], "sequences", &sequences, &out->count, &out->holds) != 0;
    if (!bad) s = fv_cache_pages(cache_of(self), sequences, out->count, &out->pages, &err);
    if (!bad && s == FV_OK) return (PyObject *)out;
    Py_DECREF((PyObject *)out);
    return bad ? NULL : raise_status(s, &err);
}

static PyObject *cache_stats(PyObject *self, PyObject *unused)
{
    (void)unused;
    fv_cache_stats q;
    fv_error err;
    const fv_status s = fv_cache_query(cache_of(self), &q, &err);
    if (s != FV_OK) return raise_status(s, &err);
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L}", "num_pages", (long long)q.num_pages, "free_pages", (long long)q.free_pages, "used_pages",
                         (long long)q.used_pages, "cached_pages", (long long)q.cached_pages, "num_sequences", (long long)q.num_sequences, "hit_tokens",
                         (long long)q.hit_tokens, "asked_tokens", (long long)q.asked_tokens, "evicted_pages", (long long)q.evicted_pages,
                         "peak_used_pages", (long long)q.peak_used_pages);
}

static PyMethodDef cache_methods[] = {
    { "match", CALL(cache_match), KEYWORDS, "match($self, page_keys)\n--\n\nHow many tokens (a multiple of page_size) of a sequence with these page keys are cached. Changes nothing." },
    { "open", CALL(cache_open), KEYWORDS, "open($self, page_keys=None, max_tokens=None)\n--\n\nOpens a sequence that starts with the longest cached prefix, at most max_tokens of it. "
      "Returns (sequence, tokens it holds already). CapacityError: no free sequence." },
    { "extend", CALL(cache_extend), KEYWORDS, "extend($self, sequence, tokens)\n--\n\nRoom for so many more tokens. CapacityError: nothing changed, value is the number of pages missing." },
    { "commit", CALL(cache_commit), KEYWORDS, "commit($self, sequence, tokens, page_keys=None)\n--\n\nThe first `tokens` tokens are written: full pages with keys can be found by others from now on." },
    { "fork", CALL(cache_fork), KEYWORDS, "fork($self, sequence)\n--\n\nA copy that shares all full pages. Returns (child, (src, dst) to copy with copy_pages, or None)." },
    { "slide", CALL(cache_slide), KEYWORDS, "slide($self, sequence, first)\n--\n\nGives back pages that lie wholly before token `first`." },
    { "truncate", CALL(cache_truncate), KEYWORDS, "truncate($self, sequence, tokens)\n--\n\nCuts the sequence. Returns (src, dst) to copy, or None." },
    { "release", CALL(cache_release), KEYWORDS, "release($self, sequence)\n--\n\nEnds a sequence. Its findable pages stay cached." },
    { "evict", CALL(cache_evict), KEYWORDS, "evict($self, pages)\n--\n\nFrees at least so many cached pages, if there are. Returns how many." },
    { "length", CALL(cache_length), KEYWORDS, "length($self, sequence)\n--\n\nTokens of the sequence." },
    { "pages", CALL(cache_pages), KEYWORDS, "pages($self, sequences)\n--\n\nTheir page table, for Batch(pages=...). Costs nothing per page." },
    { "stats", cache_stats, METH_NOARGS, "stats($self)\n--\n\nCounters: num_pages, free_pages, used_pages, cached_pages, num_sequences, hit_tokens, asked_tokens, evicted_pages, peak_used_pages." },
    { NULL, NULL, 0, NULL },
};

static PyType_Slot cache_slots[] = {
    { Py_tp_new, cache_new },
    { Py_tp_dealloc, cache_dealloc },
    { Py_tp_methods, cache_methods },
    { Py_tp_doc, "Cache(context, *, page_size, num_pages, max_sequences, max_pages_per_sequence, first_id=0, no_prefix=False)\n--\n\n"
                 "Hands out page ids of a pool; holds no tensor. Sequences are paths in a prefix tree: full pages with a key (a 64-bit hash of all tokens up to their end) are "
                 "found again by later sequences, and stay after release until they are evicted, least recently used first. One thread at a time." },
    { 0, NULL },
};

PyType_Spec cache_spec = { "foveal.Cache", sizeof(cache_object), 0, Py_TPFLAGS_DEFAULT, cache_slots };
