# SPDX-License-Identifier: Apache-2.0
"""Gated activations: f(first half of the last axis) times the second half. `enable_pdl` is accepted and means nothing."""

import numpy as np

from .. import act_and_mul as _act_and_mul
from . import _arrays as arrays
from . import _core as core
from .utils import check_shape_dtype_device


def _flat(x, name, written):
    """[..., n] as [rows, n]; what is written must not become a copy."""
    shape = (int(np.prod(x.shape[:-1])), x.shape[-1])
    if len(x.shape) == 2:
        return x
    if not written:
        return arrays.reshape(x, shape)
    if arrays.torch_of(x) is not None:
        return x.view(shape)
    flat = arrays.reshape(x, shape)
    inner, outer = getattr(flat, "array", flat), getattr(x, "array", x)
    if inner.size and not np.shares_memory(inner, outer):
        raise ValueError(f"{name} must be contiguous in its last axes")
    return flat


def _gated(name, x, out):
    if x.shape[-1] % 2:
        raise ValueError(f"the last axis of input has {x.shape[-1]} elements; it must be two halves")
    shape = tuple(x.shape[:-1]) + (x.shape[-1] // 2,)
    if out is None:
        out = arrays.empty(shape, arrays.dtype_of(x), x)
    else:
        check_shape_dtype_device(out, shape, None, arrays.device_of(x), "out")
    if core.is_compiled(x):
        arrays.torch_of(x).ops.foveal.act_and_mul(name, x, out)
        return out
    _act_and_mul(core.context_for(arrays.device_of(x)), name, _flat(x, "input", False), _flat(out, "out", True))
    return out


def silu_and_mul(input, out=None, enable_pdl=None):
    """silu(input[..., :n]) * input[..., n:] of input [..., 2 n]; silu(x) = x / (1 + exp(-x))."""
    return _gated("silu", input, out)


def gelu_and_mul(input, out=None, enable_pdl=None):
    """gelu(input[..., :n]) * input[..., n:], with the error function."""
    return _gated("gelu", input, out)


def gelu_tanh_and_mul(input, out=None, enable_pdl=None):
    """gelu(input[..., :n]) * input[..., n:], by its approximation with tanh."""
    return _gated("gelu_tanh", input, out)


__all__ = ["gelu_and_mul", "gelu_tanh_and_mul", "silu_and_mul"]
