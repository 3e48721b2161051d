# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of queries and keys [rows, heads, dim]."""

import math

import numpy as np

from .. import rope as _rope
from . import _arrays as arrays
from . import _core as core


def _positions(indptr, offsets, like):
    """Position of each row: offsets[request] + its index in the request. Rows behind the last request are at 0, which turns nothing."""
    if len(offsets) != len(indptr) - 1:
        raise ValueError(f"offsets has {len(offsets)} entries and indptr {len(indptr)}; expected one, and one more, a request")
    torch = arrays.torch_of(indptr)
    if torch is not None:
        row = torch.arange(like.shape[0], device=indptr.device)
        if len(offsets) == 0:
            return torch.zeros_like(row, dtype=torch.int32)
        request = (torch.searchsorted(indptr.to(torch.int64), row, right=True) - 1).clamp(0, len(offsets) - 1)
        return torch.where(row < indptr[-1], row + (offsets - indptr[:-1])[request], 0).to(torch.int32)
    indptr, offsets = arrays.host_ints(indptr), arrays.host_ints(offsets)
    counts = np.diff(indptr)
    positions = np.zeros(max(like.shape[0], int(counts.sum())), np.int32)
    positions[:int(counts.sum())] = np.repeat(offsets - indptr[:-1], counts) + np.arange(int(counts.sum()))
    return positions


def _turn(x, positions, y, rotary_dim, interleave, **numbers):
    context = core.context_for(arrays.device_of(x))
    if arrays.device_of(x) == "cpu":
        positions = arrays.to_numpy(positions)
    rows = positions.shape[0]
    if rows < x.shape[0]:
        raise ValueError(f"{rows} positions for {x.shape[0]} rows")
    _rope(context, x, positions, y, rotary_dim=x.shape[-1] if rotary_dim is None else rotary_dim, interleaved=interleave, **numbers)


def _both(q, k, positions, outs, rotary_dim, interleave, **numbers):
    for x, y in zip((q, k), outs):
        if core.is_compiled(x):
            y.copy_(_traced(x, positions, rotary_dim, interleave, **numbers))
        else:
            _turn(x, positions, y, rotary_dim, interleave, **numbers)


def _traced(x, positions, rotary_dim, interleave, base, factor, low_freq_factor=0, high_freq_factor=0, original_context=0):
    return arrays.torch_of(x).ops.foveal.turned(x, positions, rotary_dim, interleave, float(base), float(factor), float(low_freq_factor), float(high_freq_factor),
                                                int(original_context))


def _like(x):
    return arrays.empty(tuple(x.shape), arrays.dtype_of(x), x)


def apply_rope(q, k, indptr, offsets, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4):
    """Turned copies of q and k [rows, heads, dim]. Row i of request r, rows indptr[r] to indptr[r + 1], sits at offsets[r] + i. Pairs are (i, i + rotary_dim / 2),
    or (2i, 2i + 1) with interleave. Frequencies are divided by rope_scale."""
    outs = (_like(q), _like(k))
    _both(q, k, _positions(indptr, offsets, q), outs, rotary_dim, interleave, base=rope_theta, factor=rope_scale)
    return outs


def apply_rope_inplace(q, k, indptr, offsets, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4):
    """apply_rope, in place."""
    _both(q, k, _positions(indptr, offsets, q), (q, k), rotary_dim, interleave, base=rope_theta, factor=rope_scale)


def apply_rope_pos_ids(q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4):
    """apply_rope with the position of every row."""
    outs = (_like(q), _like(k))
    _both(q, k, pos_ids, outs, rotary_dim, interleave, base=rope_theta, factor=rope_scale)
    return outs


def apply_rope_pos_ids_inplace(q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4):
    """apply_rope_pos_ids, in place."""
    _both(q, k, pos_ids, (q, k), rotary_dim, interleave, base=rope_theta, factor=rope_scale)


def _llama31(rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len):
    return dict(base=rope_theta, factor=rope_scale, low_freq_factor=low_freq_factor, high_freq_factor=high_freq_factor, original_context=old_context_len)


def apply_llama31_rope(q, k, indptr, offsets, rotary_dim=None, interleave=False, rope_scale=8, rope_theta=5e5, low_freq_factor=1, high_freq_factor=4,
                       old_context_len=8192):
    """apply_rope with Llama 3.1's frequencies."""
    outs = (_like(q), _like(k))
    _both(q, k, _positions(indptr, offsets, q), outs, rotary_dim, interleave, **_llama31(rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len))
    return outs


def apply_llama31_rope_inplace(q, k, indptr, offsets, rotary_dim=None, interleave=False, rope_scale=8, rope_theta=5e5, low_freq_factor=1, high_freq_factor=4,
                               old_context_len=8192):
    """apply_llama31_rope, in place."""
    _both(q, k, _positions(indptr, offsets, q), (q, k), rotary_dim, interleave, **_llama31(rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len))


def apply_llama31_rope_pos_ids(q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=8, rope_theta=5e5, low_freq_factor=1, high_freq_factor=4,
                               old_context_len=8192):
    """apply_llama31_rope with the position of every row."""
    outs = (_like(q), _like(k))
    _both(q, k, pos_ids, outs, rotary_dim, interleave, **_llama31(rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len))
    return outs


def apply_llama31_rope_pos_ids_inplace(q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=8, rope_theta=5e5, low_freq_factor=1, high_freq_factor=4,
                                       old_context_len=8192):
    """apply_llama31_rope_pos_ids, in place."""
    _both(q, k, pos_ids, (q, k), rotary_dim, interleave, **_llama31(rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len))


# ---- angles from a table ----


def _turn_by_table(x, cos, sin, is_neox):
    """x [rows, heads, head_size] with the first 2 * cos.shape[-1] elements turned; f32 arithmetic, in place."""
    half = cos.shape[-1]
    torch = arrays.torch_of(x)
    part = x[..., :2 * half]
    a, b = (part[..., :half], part[..., half:]) if is_neox else (part[..., 0::2], part[..., 1::2])
    cos, sin = cos[:, None, :], sin[:, None, :]
    wide = (lambda t: t.to(torch.float32)) if torch is not None else (lambda t: t.astype(np.float32))
    a32, b32 = wide(a), wide(b)
    turned = a32 * cos - b32 * sin, b32 * cos + a32 * sin
    for target, value in zip((a, b), turned):
        if torch is not None:
            target.copy_(value)
        else:
            target[...] = value


def _rows_of_table(table, positions):
    """table[positions], every position inside."""
    torch = arrays.torch_of(table)
    if torch is not None:
        positions = arrays.to_device(positions, table)
    whole = not (positions.is_floating_point() or positions.dtype == torch.bool) if torch is not None else positions.dtype.kind in "iu"
    if not whole or len(positions.shape) != 1:
        raise TypeError(f"positions is {tuple(positions.shape)} of {positions.dtype}; it must be [rows] of int32 or int64")
    if torch is not None and (not table.is_cpu or torch.compiler.is_compiling()):
        inside = (positions >= 0) & (positions < table.shape[0])
        return torch.where(inside[:, None], table[torch.where(inside, positions, 0)], float("nan"))
    at = arrays.to_numpy(positions)
    if at.size and (at.min() < 0 or at.max() >= table.shape[0]):
        row = int(((at < 0) | (at >= table.shape[0])).argmax())
        raise ValueError(f"positions[{row}] is {int(at[row])}; cos_sin_cache has {table.shape[0]} positions")
    return table[positions]


def apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox=True):
    """Turns query [rows, heads * head_size] and key [rows, kv_heads * head_size] in place by the table's angles: cos_sin_cache [positions, rotary_dim] float32
    holds the cosines, then the sines. A position outside of the table is refused; one that only the GPU sees turns its row to NaN."""
    if arrays.dtype_of(cos_sin_cache) != "f32":
        raise ValueError("cos_sin_cache should be float32")
    table = _rows_of_table(cos_sin_cache, positions)
    half = table.shape[-1] // 2
    if 2 * half > head_size:
        raise ValueError(f"cos_sin_cache turns {2 * half} elements of a head; head_size is {head_size}")
    cos, sin = table[:, :half], table[:, half:]
    for name, x in (("query", query), ("key", key)):
        if x.shape[0] != table.shape[0]:
            raise ValueError(f"positions has {table.shape[0]} entries for the {x.shape[0]} rows of {name}")
        if math.prod(x.shape[1:]) % head_size:
            raise ValueError(f"a row of {name} has {math.prod(x.shape[1:])} elements; that is no multiple of head_size = {head_size}")
        view = x.view(x.shape[0], -1, head_size) if arrays.torch_of(x) is not None else x.reshape(x.shape[0], -1, head_size)
        if arrays.torch_of(x) is None and not np.shares_memory(view, x):
            raise ValueError("query and key must be contiguous in their last axis")
        _turn_by_table(view, cos, sin, is_neox)


def apply_rope_with_cos_sin_cache(positions, query, key, head_size, cos_sin_cache, is_neox=True):
    """apply_rope_with_cos_sin_cache_inplace on copies, which are returned."""
    torch = arrays.torch_of(query)
    query, key = (query.clone(), key.clone()) if torch is not None else (query.copy(), key.copy())
    apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox)
    return query, key


__all__ = [name for name in dir() if name.startswith("apply_")]
