/* SPDX-License-Identifier: Apache-2.0 */
/* module.c -- foveal._foveal: the library for Python, in the limited API of CPython 3.11, so that one build serves that and every later version. */
#include "types.h"

#include <string.h>

void *new_object(PyTypeObject *type)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return allocate(type, 0);           /* zeroed behind the head */
}

void free_object(void *object)
{
    PyTypeObject *type = Py_TYPE((PyObject *)object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF((PyObject *)type);
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "foveal._foveal", .m_doc = "Attention for LLM serving, in C. Use it as `import foveal`.", .m_size = -1, .m_methods = op_methods,
};

static const struct { PyTypeObject **type; PyType_Spec *spec; const char *name; } types[] = {
    { &tensor_type, &tensor_spec, "Tensor" }, { &context_type, &context_spec, "Context" }, { &variant_type, &variant_spec, "Variant" },
    { &problem_type, &problem_spec, "Problem" }, { &batch_type, &batch_spec, "Batch" }, { &plan_type, &plan_spec, "Plan" },
    { &cache_type, &cache_spec, "Cache" }, { &pages_type, &pages_spec, "Pages" },
};

static int add_types(PyObject *module)
{
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        PyObject *type = PyType_FromSpec(types[i].spec);
        if (!type || PyModule_AddObjectRef(module, types[i].name, type) != 0) return -1;
        *types[i].type = (PyTypeObject *)type;          /* for the life of the process */
    }
    return 0;
}

PyMODINIT_FUNC PyInit__foveal(void);
PyMODINIT_FUNC PyInit__foveal(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    if (add_errors(module) != 0 || add_types(module) != 0 || PyModule_AddStringConstant(module, "__version__", fv_version()) != 0 ||
        PyModule_AddIntConstant(module, "ABI_VERSION", FV_ABI_VERSION) != 0 || PyModule_AddFunctions(module, torch_methods) != 0 ||
        PyModule_AddFunctions(module, companion_methods) != 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
