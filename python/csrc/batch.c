/* SPDX-License-Identifier: Apache-2.0 */
/* batch.c -- foveal.Batch: the requests of one step. It holds every array that it was made from. */
#include "types.h"

#include <string.h>

PyTypeObject *batch_type, *pages_type;

batch_object *as_batch(PyObject *object)
{
    if (object && Py_TYPE(object) == batch_type) return (batch_object *)object;
    PyErr_SetString(PyExc_TypeError, "batch must be a foveal.Batch");
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------- segments */

enum { ROW_FIRST, NUM_ROWS, KV_HEAD_FIRST, NUM_KV_HEADS, FIRST_PAGE, NUM_PAGES, NUM_KEYS, FIRST_POSITION, NUM_COLUMNS };
static const char *const columns[] = { "row_first", "num_rows", "kv_head_first", "num_kv_heads", "first_page", "num_pages", "num_keys", "first_position" };
static const char *const lists[] = { "rows", "page_positions", "rows_indptr", "page_positions_indptr" };

static int set_column(fv_segment *s, int column, int64_t value)
{
    switch (column) {
    case ROW_FIRST: s->row_first = value; break;
    case NUM_ROWS: s->num_rows = value; break;
    case KV_HEAD_FIRST: s->kv_head_first = (int32_t)value; return value == (int32_t)value;
    case NUM_KV_HEADS: s->num_kv_heads = (int32_t)value; return value == (int32_t)value;
    case FIRST_PAGE: s->first_page = value; break;
    case NUM_PAGES: s->num_pages = value; break;
    case NUM_KEYS: s->num_keys = value; break;
    case FIRST_POSITION: s->first_position = value; break;
    }
    return 1;
}

static int known_key(PyObject *key, const char *const *names, int count)
{
    for (int i = 0; i < count; i++)
        if (PyUnicode_CompareWithASCIIString(key, names[i]) == 0) return 1;
    return 0;
}

static int check_keys(PyObject *dict, int num_lists)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(dict, &at, &key, &value))
        if (!PyUnicode_Check(key) || !(known_key(key, columns, NUM_COLUMNS) || known_key(key, lists, num_lists))) {
            PyErr_Format(PyExc_ValueError, "segments have no %R", key);
            return -1;
        }
    return 0;
}

static int rows_of_dict(PyObject *dict, fv_segment *s, holder *h)
{
    int64_t num_rows, num_positions;
    if (to_int32(PyDict_GetItemString(dict, "rows"), "segments[].rows", &s->rows, &num_rows, h) != 0 ||
        to_int32(PyDict_GetItemString(dict, "page_positions"), "segments[].page_positions", &s->page_positions, &num_positions, h) != 0)
        return -1;
    if (s->rows) s->num_rows = num_rows;
    if (s->page_positions && num_positions < s->num_pages) {
        PyErr_Format(PyExc_ValueError, "segments[].page_positions has %lld entries for %lld pages", (long long)num_positions, (long long)s->num_pages);
        return -1;
    }
    return 0;
}

/* [{"row_first": 0, "num_rows": 4, ...}, ...] */
static int segments_of_list(PyObject *list, fv_segment *out, holder *h)
{
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++) {
        PyObject *dict = PyList_GetItem(list, i);
        if (!PyDict_Check(dict)) {
            PyErr_SetString(PyExc_TypeError, "a segment is a dict");
            return -1;
        }
        if (check_keys(dict, 2) != 0) return -1;
        for (int c = 0; c < NUM_COLUMNS; c++) {
            int64_t value = 0;
            if (take_i64(PyDict_GetItemString(dict, columns[c]), columns[c], &value) != 0) return -1;
            if (!set_column(&out[i], c, value)) {
                PyErr_Format(PyExc_ValueError, "segments[%zd].%s does not fit in 32 bits", i, columns[c]);
                return -1;
            }
        }
        if (rows_of_dict(dict, &out[i], h) != 0) return -1;
    }
    return 0;
}

static int64_t index_at(const fv_index *x, int64_t i)
{
    return x->type == FV_INDEX_I32 ? ((const int32_t *)x->host)[i * x->stride] : ((const int64_t *)x->host)[i * x->stride];
}

static int host_column(PyObject *value, const char *name, int64_t count, fv_index *out, holder *h)
{
    if (to_index(value, name, out, h, NULL, NULL) != 0) return -1;
    if (out->type == FV_INDEX_NONE || (out->host && out->count == count)) return 0;
    PyErr_Format(PyExc_ValueError, "segments[\"%s\"] must be %lld integers on the host", name, (long long)count);
    return -1;
}

/* Lists of all segments one after another, cut at offsets. */
static int flat_lists(PyObject *dict, const char *name, const char *indptr_name, int64_t n, fv_segment *out, holder *h)
{
    const int32_t *flat;
    int64_t count;
    fv_index indptr;
    if (to_int32(PyDict_GetItemString(dict, name), name, &flat, &count, h) != 0) return -1;
    if (!flat) return 0;
    if (host_column(PyDict_GetItemString(dict, indptr_name), indptr_name, n + 1, &indptr, h) != 0) return -1;
    if (!indptr.host) {
        PyErr_Format(PyExc_ValueError, "segments[\"%s\"] needs \"%s\"", name, indptr_name);
        return -1;
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t from = index_at(&indptr, i), to = index_at(&indptr, i + 1);
        if (from < 0 || to < from || to > count || (name[0] == 'p' && to - from < out[i].num_pages)) {
            PyErr_Format(PyExc_ValueError, "segments[\"%s\"] gives segment %lld the entries [%lld, %lld) of %lld", indptr_name, (long long)i, (long long)from,
                         (long long)to, (long long)count);
            return -1;
        }
        if (name[0] == 'p') out[i].page_positions = flat + from;
        else out[i].rows = flat + from, out[i].num_rows = to - from;
    }
    return 0;
}

/* {"num_keys": array, ...}: one array per member, all of the same length */
static int segments_of_dict(PyObject *dict, int64_t n, fv_segment *out, holder *h)
{
    for (int c = 0; c < NUM_COLUMNS; c++) {
        fv_index x;
        if (host_column(PyDict_GetItemString(dict, columns[c]), columns[c], n, &x, h) != 0) return -1;
        for (int64_t i = 0; x.host && i < n; i++)
            if (!set_column(&out[i], c, index_at(&x, i))) {
                PyErr_Format(PyExc_ValueError, "segments[\"%s\"][%lld] does not fit in 32 bits", columns[c], (long long)i);
                return -1;
            }
    }
    return flat_lists(dict, "rows", "rows_indptr", n, out, h) == 0 ? flat_lists(dict, "page_positions", "page_positions_indptr", n, out, h) : -1;
}

static int64_t count_segments(PyObject *segments, holder *h)
{
    fv_index x;
    if (!PyDict_Check(segments)) return PyList_Size(segments);
    if (check_keys(segments, 4) != 0 || to_index(PyDict_GetItemString(segments, "num_keys"), "num_keys", &x, h, NULL, NULL) != 0) return -1;
    if (x.host) return x.count;
    PyErr_SetString(PyExc_ValueError, "segments need \"num_keys\" on the host");
    return -1;
}

static int read_segments(batch_object *self, PyObject *segments)
{
    if (!segments || segments == Py_None) return 0;
    PyObject *list = NULL;
    if (!PyDict_Check(segments)) {
        list = segments = PySequence_List(segments);
        if (!list) return -1;
    }
    const int64_t n = count_segments(segments, &self->holds);
    fv_segment *out = n >= 0 ? holder_memory(&self->holds, (size_t)n * sizeof *out) : NULL;
    int s = -1;
    if (out) s = list ? segments_of_list(list, out, &self->holds) : segments_of_dict(segments, n, out, &self->holds);
    Py_XDECREF(list);
    self->batch.segments = out;
    self->batch.num_segments = n;
    return s;
}

/* ------------------------------------------------------------------------------------------------------ the batch */

enum { ROWS, LENGTHS, LAST_PAGE_LENGTHS, KV_INDPTR, PAGE_SIZE, POOL_PAGES, PAGE_INDPTR, PAGE_IDS, V_PAGE_IDS, TABLE_ROWS, PAGES, FIRST_POSITIONS,
       ROW_POSITIONS, SEGMENTS, ARGS, NUM_REQUESTS };

static int read_pages(batch_object *self, PyObject *const *given)
{
    fv_pages *p = &self->batch.pages;
    holder *h = &self->holds;
    if (given[PAGES] && given[PAGES] != Py_None) {
        if (Py_TYPE(given[PAGES]) != pages_type) {
            PyErr_SetString(PyExc_TypeError, "pages must come from Cache.pages");
            return -1;
        }
        *p = ((pages_object *)given[PAGES])->pages;
        return holder_object(h, given[PAGES]);
    }
    int64_t v_width = 0, v_stride = 0;
    if (take_i32(given[PAGE_SIZE], "page_size", &p->page_size) != 0 || take_i64(given[POOL_PAGES], "num_pages", &p->num_pages) != 0 ||
        to_index(given[PAGE_INDPTR], "page_indptr", &p->indptr, h, NULL, NULL) != 0 ||
        to_index(given[PAGE_IDS], "page_ids", &p->ids, h, &p->table_width, &p->table_stride) != 0 ||
        to_index(given[V_PAGE_IDS], "v_page_ids", &p->v_ids, h, &v_width, &v_stride) != 0 ||
        to_index(given[TABLE_ROWS], "table_rows", &p->table_rows, h, NULL, NULL) != 0)
        return -1;
    if (v_width != p->table_width && p->v_ids.type != FV_INDEX_NONE) {
        PyErr_SetString(PyExc_ValueError, "v_page_ids must have the form of page_ids");
        return -1;
    }
    return 0;
}

/* The request count that the arrays tell. */
static int64_t count_requests(const fv_batch *b)
{
    if (b->rows.type != FV_INDEX_NONE) return b->rows.count - 1;
    if (b->lengths.type != FV_INDEX_NONE) return b->lengths.count;
    if (b->last_page_lengths.type != FV_INDEX_NONE) return b->last_page_lengths.count;
    if (b->kv_indptr.type != FV_INDEX_NONE) return b->kv_indptr.count - 1;
    return b->pages.indptr.type != FV_INDEX_NONE ? b->pages.indptr.count - 1 : 0;
}

static int read_batch(batch_object *self, PyObject *const *given)
{
    fv_batch *b = &self->batch;
    holder *h = &self->holds;
    if (to_index(given[ROWS], "rows", &b->rows, h, NULL, NULL) != 0 || to_index(given[LENGTHS], "lengths", &b->lengths, h, NULL, NULL) != 0 ||
        to_index(given[LAST_PAGE_LENGTHS], "last_page_lengths", &b->last_page_lengths, h, NULL, NULL) != 0 ||
        to_index(given[KV_INDPTR], "kv_indptr", &b->kv_indptr, h, NULL, NULL) != 0 ||
        to_index(given[FIRST_POSITIONS], "first_positions", &b->first_positions, h, NULL, NULL) != 0 ||
        to_index(given[ROW_POSITIONS], "row_positions", &b->row_positions, h, NULL, NULL) != 0)
        return -1;
    if (read_pages(self, given) != 0 || read_segments(self, given[SEGMENTS]) != 0) return -1;
    b->num_args = to_args(given[ARGS], "args", NULL, self->args, self->tensors, MAX_USE_ARGS, h);
    if (b->num_args < 0) return -1;
    b->args = b->num_args ? self->args : NULL;
    b->num_requests = count_requests(b);
    if (given[PAGES] && given[PAGES] != Py_None && given[NUM_REQUESTS] == NULL && b->rows.type == FV_INDEX_NONE && b->lengths.type == FV_INDEX_NONE)
        b->num_requests = ((pages_object *)given[PAGES])->count;
    return take_i64(given[NUM_REQUESTS], "num_requests", &b->num_requests);
}

static PyObject *batch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static signature sig = { "Batch", 0, { "rows", "lengths", "last_page_lengths", "kv_indptr", "page_size", "num_pages", "page_indptr", "page_ids",
                                           "v_page_ids", "table_rows", "pages", "first_positions", "row_positions", "segments", "args", "num_requests" },
                             { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    if (read_call(&sig, args, kwargs, given) != 0) return NULL;
    batch_object *self = new_object(type);
    if (!self) return NULL;
    holder_init(&self->holds);
    if (read_batch(self, given) == 0) return (PyObject *)self;
    Py_DECREF((PyObject *)self);
    return NULL;
}

static void batch_dealloc(PyObject *self)
{
    holder_release(&((batch_object *)self)->holds);
    free_object(self);
}

static PyObject *batch_num_requests(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(((batch_object *)self)->batch.num_requests);
}

static PyGetSetDef batch_fields[] = {
    { "num_requests", batch_num_requests, NULL, "requests of the step", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot batch_slots[] = {
    { Py_tp_new, batch_new },
    { Py_tp_dealloc, batch_dealloc },
    { Py_tp_getset, batch_fields },
    { Py_tp_doc,
      "Batch(*, rows=None, lengths=None, last_page_lengths=None, kv_indptr=None, page_size=0, num_pages=0, page_indptr=None, page_ids=None,\n"
      "      v_page_ids=None, table_rows=None, pages=None, first_positions=None, row_positions=None, segments=None, args=None, num_requests=None)\n--\n\n"
      "One step's requests: who asks, and where their keys live. Integers are int32 or int64 arrays of any stride, sequences (copied), or pairs (host, device).\n\n"
      "rows [n + 1]: row offsets from 0; None: one row a request. lengths [n]: keys of each request, the step's own rows included.\n"
      "Ragged keys: kv_indptr [n + 1], token offsets. Paged keys: page_size, num_pages (of the pool) and page_indptr [n + 1] with page_ids, or page_ids as a "
      "2-D table (table_rows [n]: its row per request), or pages=Cache.pages(...). last_page_lengths [n] may stand for lengths.\n"
      "first_positions [n]: position of key 0. row_positions [total rows]: position of each row.\n"
      "segments: instead of one a request, a list of dicts or a dict of arrays with row_first, num_rows, rows (with rows_indptr), kv_head_first, num_kv_heads, "
      "first_page, num_pages, num_keys, first_position, page_positions (with page_positions_indptr).\n"
      "args: {name: number or array} of variant parameters bound per batch.\n\n"
      "The arrays are kept, not copied: leave them unchanged until the plan's next update. Checked by Plan.update." },
    { 0, NULL },
};

PyType_Spec batch_spec = { "foveal.Batch", sizeof(batch_object), 0, Py_TPFLAGS_DEFAULT, batch_slots };

/* ---------------------------------------------------------------------------------------------------------- Pages */

static void pages_dealloc(PyObject *self)
{
    holder_release(&((pages_object *)self)->holds);
    free_object(self);
}

static PyType_Slot pages_slots[] = {
    { Py_tp_dealloc, pages_dealloc },
    { Py_tp_doc, "The page table of some sequences, kept up to date by their Cache (Cache.pages)." },
    { 0, NULL },
};

PyType_Spec pages_spec = { "foveal.Pages", sizeof(pages_object), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, pages_slots };
