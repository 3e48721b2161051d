/* SPDX-License-Identifier: Apache-2.0 */
/* problem.c -- foveal.Problem: one kind of layer. */
#include "types.h"

#include <string.h>

PyTypeObject *problem_type;

problem_object *as_problem(PyObject *object)
{
    if (object && Py_TYPE(object) == problem_type) return (problem_object *)object;
    PyErr_SetString(PyExc_TypeError, "problem must be a foveal.Problem");
    return NULL;
}

/* A name that lives as long as the problem. */
static int keep_text(problem_object *self, PyObject *value, const char *name, const char **out)
{
    if (!value || value == Py_None) return 0;
    if (take_text(value, name, out) != 0) return -1;
    return holder_object(&self->holds, value);
}

/* "causal" | Variant */
static int read_name(problem_object *self, PyObject *item, fv_variant_use *use)
{
    if (PyUnicode_Check(item)) return keep_text(self, item, "variants", &use->name);
    if (Py_TYPE(item) == variant_type) {
        use->variant = ((variant_object *)item)->variant;
        return holder_object(&self->holds, item);
    }
    PyErr_SetString(PyExc_TypeError, "a variant is a name, a foveal.Variant, or a pair of one of these and a dict of its arguments");
    return -1;
}

static int read_use(problem_object *self, PyObject *item, fv_variant_use *use)
{
    if (!PyTuple_Check(item)) return read_name(self, item, use);
    if (PyTuple_Size(item) != 2) {
        PyErr_SetString(PyExc_ValueError, "a variant with arguments is a pair (name, {argument: value})");
        return -1;
    }
    if (read_name(self, PyTuple_GetItem(item, 0), use) != 0) return -1;
    const int at = self->num_args;
    const int n = to_args(PyTuple_GetItem(item, 1), "variants", NULL, self->args + at, self->tensors + at, MAX_USE_ARGS - at, &self->holds);
    if (n < 0) return -1;
    use->args = n ? self->args + at : NULL;
    use->num_args = n;
    self->num_args += n;
    return 0;
}

static int read_uses(problem_object *self, PyObject *variants)
{
    if (!variants || variants == Py_None) return 0;
    if (PyUnicode_Check(variants)) {                    /* one name: a list of one */
        self->problem.num_variants = 1;
        return read_use(self, variants, &self->uses[0]);
    }
    PyObject *list = PyDict_Check(variants) ? NULL : PySequence_List(variants);
    if (!list) {
        PyErr_SetString(PyExc_TypeError, "variants is a name, or a list of names, foveal.Variants and pairs (name, {argument: value})");
        return -1;
    }
    const Py_ssize_t n = PyList_Size(list);
    int bad = 0;
    if (n > MAX_USES) {
        PyErr_Format(PyExc_ValueError, "%zd variants; at most %d", n, (int)MAX_USES);
        bad = 1;
    }
    for (Py_ssize_t i = 0; i < n && !bad; i++) bad = read_use(self, PyList_GetItem(list, i), &self->uses[i]) != 0;
    Py_DECREF(list);
    self->problem.num_variants = (int32_t)n;
    return bad ? -1 : 0;
}

enum { Q, K, V, O, NUM_Q_HEADS, NUM_KV_HEADS, DIM_QK, DIM_V, SCALE, VARIANTS, ALIGNMENT, K_SCALE, V_SCALE, QK_TAIL, V_IN_K, LSE_BASE2, PAGE_ORDER };

static int read_types(problem_object *self, PyObject *const *given)
{
    fv_problem *p = &self->problem;
    if (keep_text(self, given[Q], "q", &p->q) != 0 || keep_text(self, given[K], "k", &p->k) != 0 || keep_text(self, given[V], "v", &p->v) != 0 ||
        keep_text(self, given[O], "o", &p->o) != 0 || keep_text(self, given[K_SCALE], "k_scale", &p->k_scale) != 0 ||
        keep_text(self, given[V_SCALE], "v_scale", &p->v_scale) != 0 || keep_text(self, given[PAGE_ORDER], "page_order", &p->page_order) != 0)
        return -1;
    if (!p->k) p->k = p->q;
    if (!p->v && !p->v_in_k) p->v = p->k;
    if (!p->o) p->o = p->q;
    return 0;
}

static int read_problem(problem_object *self, PyObject *const *given)
{
    fv_problem *p = &self->problem;
    if (take_i32(given[NUM_Q_HEADS], "num_q_heads", &p->num_q_heads) != 0 || take_i32(given[NUM_KV_HEADS], "num_kv_heads", &p->num_kv_heads) != 0 ||
        take_i32(given[DIM_QK], "dim_qk", &p->dim_qk) != 0 || take_i32(given[DIM_V], "dim_v", &p->dim_v) != 0 ||
        take_double(given[SCALE], "scale", &p->scale) != 0 || take_i32(given[ALIGNMENT], "alignment", &p->alignment) != 0 ||
        take_i32(given[QK_TAIL], "qk_tail", &p->qk_tail) != 0 || take_bool(given[V_IN_K], "v_in_k", &p->v_in_k) != 0 ||
        take_bool(given[LSE_BASE2], "lse_base2", &p->lse_base2) != 0)
        return -1;
    p->variants = self->uses;
    if (read_types(self, given) != 0 || read_uses(self, given[VARIANTS]) != 0) return -1;
    if (p->num_variants == 0) p->variants = NULL;
    return 0;
}

static PyObject *problem_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static signature sig = { "Problem", 4, { "!q", "k", "v", "o", "!num_q_heads", "num_kv_heads", "!dim_qk", "dim_v", "scale", "variants", "alignment",
                                             "k_scale", "v_scale", "qk_tail", "v_in_k", "lse_base2", "page_order" }, { NULL }, 0 };
    PyObject *given[MAX_ARGS];
    if (read_call(&sig, args, kwargs, given) != 0) return NULL;
    problem_object *self = new_object(type);
    if (!self) return NULL;
    holder_init(&self->holds);
    if (read_problem(self, given) == 0) return (PyObject *)self;
    Py_DECREF((PyObject *)self);
    return NULL;
}

static void problem_dealloc(PyObject *self)
{
    holder_release(&((problem_object *)self)->holds);
    free_object(self);
}

static PyObject *problem_field(PyObject *self, void *which)
{
    const fv_problem *p = &((problem_object *)self)->problem;
    switch ((int)(intptr_t)which) {
    case Q: return PyUnicode_FromString(p->q);
    case K: return PyUnicode_FromString(p->k);
    case V: return PyUnicode_FromString(p->v ? p->v : p->k);
    case O: return PyUnicode_FromString(p->o);
    case NUM_Q_HEADS: return PyLong_FromLong(p->num_q_heads);
    case NUM_KV_HEADS: return PyLong_FromLong(p->num_kv_heads ? p->num_kv_heads : p->num_q_heads);
    case DIM_QK: return PyLong_FromLong(p->dim_qk);
    case DIM_V: return PyLong_FromLong(p->dim_v ? p->dim_v : p->dim_qk);
    default: return PyBool_FromLong(p->lse_base2);
    }
}

#define FIELD(name, which, doc) { name, problem_field, NULL, doc, (void *)(intptr_t)(which) }
static PyGetSetDef problem_fields[] = {
    FIELD("q", Q, "element type of Q"), FIELD("k", K, "element type of K"), FIELD("v", V, "element type of V"), FIELD("o", O, "element type of O"),
    FIELD("num_q_heads", NUM_Q_HEADS, "query heads"), FIELD("num_kv_heads", NUM_KV_HEADS, "key and value heads"),
    FIELD("dim_qk", DIM_QK, "width of Q and K"), FIELD("dim_v", DIM_V, "width of V and O"), FIELD("lse_base2", LSE_BASE2, "lse in base 2?"),
    { NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot problem_slots[] = {
    { Py_tp_new, problem_new },
    { Py_tp_dealloc, problem_dealloc },
    { Py_tp_getset, problem_fields },
    { Py_tp_doc, "Problem(q, k=None, v=None, o=None, *, num_q_heads, num_kv_heads=0, dim_qk, dim_v=0, scale=0.0, variants=(), alignment=0,\n"
                 "        k_scale=None, v_scale=None, qk_tail=0, v_in_k=False, lse_base2=False, page_order=None)\n--\n\n"
                 "One kind of layer: element types, heads, dims, variants. Fixed for the life of a plan; shapes and lengths are not here.\n\n"
                 "q, o: \"f32\", \"f16\", \"bf16\". k, v: also \"fp8_e4m3\", \"fp8_e5m2\", \"int8\", \"fp4_e2m1\", \"int4\". None: as q (v: as k).\n"
                 "num_kv_heads 0: num_q_heads. dim_v 0: dim_qk. scale 0: 1/sqrt(dim_qk).\n"
                 "variants: applied in this order; each a name, a Variant, or a pair (name or Variant, {argument: number or array}).\n"
                 "k_scale, v_scale: granularity of the run arguments of that name: \"none\", \"tensor\", \"head\", \"token_head\".\n"
                 "qk_tail: the last so many elements of dim_qk lie in q_tail and k_tail. v_in_k: V is the first dim_v elements of K.\n"
                 "lse_base2: log-sum-exp in base 2 instead of natural.\n"
                 "page_order: how elements lie in pages of K and V: \"rows\" (None), or \"tiles\", as append(page_order=\"tiles\") "
                 "writes them; CPU only.\n\nChecked when a plan is made from it." },
    { 0, NULL },
};

PyType_Spec problem_spec = { "foveal.Problem", sizeof(problem_object), 0, Py_TPFLAGS_DEFAULT, problem_slots };
