# SPDX-License-Identifier: Apache-2.0
"""Foveal: attention for LLM serving, in C.

    import foveal
    context = foveal.Context("cpu")
    problem = foveal.Problem("bf16", num_q_heads=32, num_kv_heads=8, dim_qk=128, variants=["causal"])
    plan = foveal.Plan(context, problem, max_requests=256, max_rows=4096, max_kv_tokens=1 << 20, max_pages=1 << 16)
    plan.update(foveal.Batch(rows=row_indptr, lengths=lengths, page_size=16, num_pages=pool, page_indptr=indptr, page_ids=ids))
    for layer in range(layers):
        plan.run(q[layer], k[layer], v[layer], o)

The classes are the nouns of the C library (include/foveal/foveal.h is its manual), one to one. Arrays are whatever speaks DLPack or the
buffer protocol; nothing is copied. `foveal.flashinfer` has FlashInfer's names, `foveal.torch` torch operators, `foveal.transformers` the
attention functions of Hugging Face transformers.
"""

import os as _os

from . import _foveal
from ._foveal import (
    ABI_VERSION,
    Batch,
    BusyError,
    Cache,
    CapacityError,
    CompileError,
    Context,
    DeviceError,
    Error,
    FileError,
    InvalidError,
    NoMemoryError,
    NotReadyError,
    Pages,
    Plan,
    Problem,
    Tensor,
    UnsupportedError,
    Variant,
    VersionError,
    __version__,
    act_and_mul,
    append,
    copy_pages,
    info,
    layernorm,
    merge,
    plan_sizes,
    rmsnorm,
    rope,
    rope_frequencies,
    sample,
    softmax,
    supports,
    top_k_mask,
    top_k_renorm,
    top_p_renorm,
    verify,
    warm,
    warm_ops,
)

__all__ = [
    "ABI_VERSION", "Batch", "BusyError", "Cache", "CapacityError", "CompileError", "Context", "DeviceError", "Error", "FileError", "InvalidError",
    "NoMemoryError", "NotReadyError", "Pages", "Plan", "Problem", "Tensor", "UnsupportedError", "Variant", "VersionError", "act_and_mul", "append",
    "copy_pages", "get_include", "get_library", "info", "layernorm", "merge", "plan_sizes", "rmsnorm", "rope", "rope_frequencies", "sample",
    "softmax", "supports", "top_k_mask", "top_k_renorm", "top_p_renorm", "verify", "warm", "warm_ops",
]


def get_include() -> str:
    """The folder to give a C compiler so that it finds "foveal/foveal.h"."""
    return _os.path.join(_os.path.dirname(__file__), "include")


def get_library() -> str:
    """The shared library whose `__tvm_ffi_fv_*` functions tvm-ffi hosts load: tvm_ffi.load_module(foveal.get_library())."""
    return _foveal.__file__
