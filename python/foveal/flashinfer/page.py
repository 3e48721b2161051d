# SPDX-License-Identifier: Apache-2.0
"""Writing into paged caches."""

import types

import numpy as np

from .. import append
from . import _arrays as arrays
from . import _core as core
from .utils import check_kv_layout, unpack_paged_kv_cache


def get_seq_lens(kv_indptr, kv_last_page_len, page_size):
    """int32 [batch]: keys of each request, (pages - 1) * page_size + last_page_len, where no pages count as one less than none: last_page_len."""
    pages = kv_indptr[1:] - kv_indptr[:-1]
    torch = arrays.torch_of(kv_indptr)
    if torch is not None:
        return torch.clamp(pages - 1, min=0) * page_size + kv_last_page_len
    return (np.maximum(np.asarray(pages) - 1, 0) * page_size + np.asarray(kv_last_page_len)).astype(np.asarray(kv_last_page_len).dtype)


def get_batch_indices_positions(append_indptr, seq_lens, nnz, batch_indices=None, positions=None):
    """Request and position of every appended row: int32 [nnz] each. Row i of a request that gets n rows sits at seq_len - n + i. Entries past
    append_indptr[-1] are -1."""
    torch = arrays.torch_of(append_indptr)
    if torch is not None:
        indptr = append_indptr.to(torch.int64)
        row = torch.arange(nnz, device=append_indptr.device)
        request = torch.searchsorted(indptr, row, right=True) - 1
        inside = row < indptr[-1]
        safe = request.clamp(0, max(len(append_indptr) - 2, 0))
        place = row - indptr[safe + 1] + seq_lens.to(torch.int64)[safe] if len(append_indptr) > 1 else row
        made = [torch.where(inside, x, -1).to(torch.int32) for x in (request, place)]
    else:
        indptr = np.asarray(append_indptr, np.int64)
        counts = np.diff(indptr)
        made = [np.full(nnz, -1, np.int32) for _ in range(2)]
        total = min(int(indptr[-1]), nnz)
        request = np.repeat(np.arange(len(counts)), counts)[:total]
        made[0][:total] = request
        made[1][:total] = np.arange(total) - indptr[request + 1] + np.asarray(seq_lens, np.int64)[request]
    for given, x in ((batch_indices, made[0]), (positions, made[1])):
        if given is not None:
            given[:] = x
    return batch_indices if batch_indices is not None else made[0], positions if positions is not None else made[1]


def _fill_batch_indices_positions(append_indptr, seq_lens, batch_indices, positions):
    given = dict(append_indptr=append_indptr, seq_lens=seq_lens, batch_indices=batch_indices, positions=positions)
    for name, x in given.items():
        if arrays.dtype_of(x) != "i32":
            raise ValueError(f"{name} is of {x.dtype}; it is of int32")
    get_batch_indices_positions(append_indptr, seq_lens, len(positions), batch_indices, positions)


def get_page_module(nvfp4_4over6=False):
    """The functions of upstream's compiled module that scripts call by themselves; nothing is compiled."""
    return types.SimpleNamespace(get_batch_indices_positions_cuda=_fill_batch_indices_positions)


_NOWHERE = 1 << 62          # a slot outside of every cache: the row is not written, and the context's error word says so


def _slots(batch_indices, positions, kv_indices, kv_indptr, page_size, like):
    """Token slots page * page_size + offset; -1 where a row is padding (a request or position below 0). A row outside of its request's pages is refused where
    the host sees it, else given a slot that kernels report."""
    rows, torch = like.shape[0], arrays.torch_of(like)
    for name, x in (("batch_indices", batch_indices), ("positions", positions)):
        if x.shape[0] != rows:
            raise ValueError(f"{name} has {x.shape[0]} entries for {rows} rows")
    if torch is None or like.is_cpu:
        slots = _host_slots(*(np.asarray(arrays.to_numpy(x), np.int64) for x in (batch_indices, positions, kv_indices, kv_indptr)), page_size)
        return slots if torch is None else torch.from_numpy(slots)
    request, place, ids, indptr = (arrays.to_device(x, like).to(torch.int64) for x in (batch_indices, positions, kv_indices, kv_indptr))
    real, last = (request >= 0) & (place >= 0), indptr.numel() - 2
    if rows == 0 or ids.numel() == 0 or last < 0:
        return torch.where(real, _NOWHERE, -1)
    safe = request.clamp(0, last)
    entry = indptr[safe] + torch.div(place.clamp(min=0), page_size, rounding_mode="floor")
    inside = (request <= last) & (entry < indptr[safe + 1]) & (entry < ids.numel())
    page = ids[entry.clamp(0, ids.numel() - 1)]
    return torch.where(real, torch.where(inside & (page >= 0), page * page_size + place % page_size, _NOWHERE), -1)


def _host_slots(request, place, ids, indptr, page_size):
    real = (request >= 0) & (place >= 0)
    if request.size and request.max() >= len(indptr) - 1:
        raise ValueError(f"batch_indices[{int(request.argmax())}] is {int(request.max())}; kv_indptr speaks of {len(indptr) - 1} requests")
    slots = np.full(request.shape, -1, np.int64)
    first, end = indptr[request[real]], indptr[request[real] + 1]
    entry = first + place[real] // page_size
    outside = (entry >= end) | (entry >= ids.size)
    if outside.any():
        i = int(outside.argmax())
        row = int(np.flatnonzero(real)[i])
        raise ValueError(f"positions[{row}] is {int(place[row])}; request {int(request[row])} has {int(min(end[i], ids.size) - first[i])} pages of {page_size}")
    slots[real] = np.where(ids[entry] < 0, _NOWHERE, ids[entry] * page_size + place[real] % page_size)
    return slots


def append_paged_kv_cache(append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len, kv_layout="NHD"):
    """Writes rows append_key, append_value [nnz, kv_heads, dim] into the cache: row i at position positions[i] of request batch_indices[i]. Padding
    (-1) is skipped."""
    check_kv_layout(kv_layout)
    k, v = unpack_paged_kv_cache(paged_kv_cache, kv_layout)
    _append(append_key, append_value, batch_indices, positions, k, v, kv_indices, kv_indptr)


def _append(key, value, batch_indices, positions, k, v, indices, indptr):
    """k, v: [pages, page, kv_heads, dim]."""
    if core.is_compiled(key):
        arrays.torch_of(key).ops.foveal.append_paged(key, value, batch_indices, positions, k, v, indices, indptr)
        return
    slots = _slots(batch_indices, positions, indices, indptr, k.shape[1], key)
    append(core.context_for(arrays.device_of(key)), key, value, k, v, slots=slots)


def append_paged_mla_kv_cache(append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, kv_last_page_len):
    """Writes append_ckv [nnz, ckv] and append_kpe [nnz, kpe] into ckv_cache [pages, page, ckv] and kpe_cache [pages, page, kpe]."""
    _append_mla(append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr)


def _append_mla(new_ckv, new_kpe, batch_indices, positions, ckv, kpe, indices, indptr):
    if core.is_compiled(new_ckv):
        arrays.torch_of(new_ckv).ops.foveal.append_paged_mla(new_ckv, new_kpe, batch_indices, positions, ckv, kpe, indices, indptr)
        return
    slots = _slots(batch_indices, positions, indices, indptr, ckv.shape[1], new_ckv)
    one_head = (slice(None), slice(None), None)
    append(core.context_for(arrays.device_of(new_ckv)), arrays.index(new_ckv, (slice(None), None)), None, arrays.index(ckv, one_head), None,
           slots=slots, new_k_tail=arrays.index(new_kpe, (slice(None), None)), k_tail=arrays.index(kpe, one_head))


__all__ = ["append_paged_kv_cache", "append_paged_mla_kv_cache", "get_batch_indices_positions", "get_seq_lens"]
