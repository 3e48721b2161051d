# SPDX-License-Identifier: Apache-2.0
"""Norms of rows. float32, float16 and bfloat16; sums and products in float32. `enable_pdl` is accepted and means nothing."""

from .. import layernorm as _layernorm
from .. import rmsnorm as _rmsnorm
from . import _arrays as arrays
from . import _core as core
from .utils import check_shape_dtype_device


def _output(x, out):
    if out is None:
        return arrays.empty(tuple(x.shape), arrays.dtype_of(x), x)
    check_shape_dtype_device(out, tuple(x.shape), None, arrays.device_of(x), "out")
    return out


def _norm(x, weight, eps, out, plus_one=False, residual=None):
    if core.is_compiled(x):
        ops = arrays.torch_of(x).ops.foveal
        return ops.rmsnorm(x, weight, out, eps, plus_one) if residual is None else ops.add_rmsnorm(x, residual, weight, eps, plus_one)
    _rmsnorm(core.context_for(arrays.device_of(x)), x, weight, out, eps=eps, plus_one=plus_one, residual=residual)


def _layer(x, weight, bias, eps, out):
    if core.is_compiled(x):
        arrays.torch_of(x).ops.foveal.layernorm(x, weight, bias, out, eps)
    else:
        _layernorm(core.context_for(arrays.device_of(x)), x, weight, out, bias=bias, eps=eps)


def rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
    """input / sqrt(mean(input^2) + eps) * weight, over the last axis of input [rows, hidden] or [rows, heads, head_dim]; weight [hidden]."""
    out = _output(input, out)
    _norm(input, weight, eps, out)
    return out


def gemma_rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
    """rmsnorm with 1 + weight."""
    out = _output(input, out)
    _norm(input, weight, eps, out, plus_one=True)
    return out


def fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None):
    """residual += input, then input = rmsnorm(residual): both in place. The sum that is normed has not been rounded."""
    _norm(input, weight, eps, input, residual=residual)


def gemma_fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None):
    """fused_add_rmsnorm with 1 + weight."""
    _norm(input, weight, eps, input, plus_one=True, residual=residual)


def _into_8_bits(out, wide, scale):
    torch = arrays.torch_of(out)
    if arrays.torch_of(scale) is not None:
        if scale.numel() != 1 or scale.ndim > 1:
            raise ValueError(f"scale must be a scalar tensor or shape (1,), got shape {tuple(scale.shape)}")
        scale = arrays.to_device(scale, wide).float()
    most = torch.finfo(out.dtype).max
    out.copy_((wide / scale).clamp_(-most, most))


def _wide(input, out):
    """float32 of the shape, once it is clear that out may take them."""
    if arrays.torch_of(input) is None:
        raise NotImplementedError("tensors of torch only")
    if not (arrays.dtype_of(out) or "").startswith("fp8_e"):
        raise ValueError(f"out is of {out.dtype}; it is float8_e4m3fn or float8_e5m2")
    check_shape_dtype_device(out, tuple(input.shape), None, arrays.device_of(input), "out")
    return arrays.empty(tuple(input.shape), "f32", input)


def rmsnorm_quant(out, input, weight, scale, eps=1e-6, enable_pdl=None):
    """out = rmsnorm(input) / scale in fp8, the largest number where that is more. scale: a number or a tensor of one."""
    wide = _wide(input, out)
    _norm(input, weight, eps, wide)
    _into_8_bits(out, wide, scale)


def fused_add_rmsnorm_quant(out, input, residual, weight, scale, eps=1e-6, enable_pdl=None):
    """residual += input, then out = rmsnorm(residual) / scale as of rmsnorm_quant. input stays."""
    wide = _wide(input, out)
    if core.is_compiled(input):         # the operator works in place, and rounds
        total = input.float() + residual.float()
        residual.copy_(total)
        _norm(total, weight, eps, wide)
    else:
        _norm(input, weight, eps, wide, residual=residual)
    _into_8_bits(out, wide, scale)


def layernorm(input, gemma, beta, eps=1e-6):
    """(input - mean) / sqrt(variance + eps) * gemma + beta, over the last axis of input [rows, hidden]. gemma is upstream's name of the weight."""
    out = _output(input, None)
    _layer(input, gemma, beta, eps, out)
    return out


__all__ = ["fused_add_rmsnorm", "fused_add_rmsnorm_quant", "gemma_fused_add_rmsnorm", "gemma_rmsnorm", "layernorm", "rmsnorm", "rmsnorm_quant"]
