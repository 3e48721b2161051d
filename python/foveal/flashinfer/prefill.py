# SPDX-License-Identifier: Apache-2.0
"""Prefill and append attention: single requests, paged and ragged batches."""

import collections
import functools
import math
import threading

import numpy as np

from .. import Batch, InvalidError, NotReadyError
from . import _arrays as arrays
from . import _core as core
from .quantization import packbits, segment_packbits
from .utils import (
    check_arrays,
    check_kv_layout,
    check_lse_base,
    check_lse_layout,
    check_pos_encoding_mode,
    check_shape_dtype_device,
    check_sizes,
    unpack_paged_kv_cache,
)

# ---- single requests ----

_local = threading.local()
_MAX_SINGLES = 16


def _single(q, spec, qo_len, kv_len, bits=None):
    """An Attention that holds the step of one request. The last few kinds of a thread are kept; a step that is there already is not planned again. What a captured
    stream uses stays as it is from then on: its graph reads it."""
    if not hasattr(_local, "kept"):
        _local.kept, _local.captured = collections.OrderedDict(), {}
    device, decode = arrays.device_of(q), qo_len == 1
    stream, capturing = core.capture_of(q)
    kind, step = (device, core._kind(spec, None), decode), (spec, qo_len, kv_len)
    if capturing:
        return _captured_single(kind, step, bits)
    attention = _local.kept.get(kind)
    if attention is None:
        attention = _local.kept[kind] = core.Attention(device)
        if len(_local.kept) > _MAX_SINGLES:
            _local.kept.popitem(last=False)
    _local.kept.move_to_end(kind)
    if bits is not None or attention.single != (step, stream):
        attention.single = None
        batch = Batch(rows=[0, qo_len], kv_indptr=[0, kv_len], args=None if bits is None else {"bits": arrays.to_device(bits, q)})
        attention.update(spec, batch, core.Need(1, qo_len, kv_len, 0), core.Mode(decode=decode), core.stream_of(q))
        attention.single = None if bits is not None else (step, stream)
    return attention


def _captured_single(kind, step, bits):
    attention = _local.captured.get((kind, step))
    if attention is None:
        attention = _local.kept.get(kind)
        if bits is not None or attention is None or attention.single is None or attention.single[0] != step:
            raise NotReadyError("the stream is being captured: the last call of this kind before it must have had the same shapes and options, and no mask")
        _local.captured[kind, step] = _local.kept.pop(kind)
    return attention


def _upcast_query(q, scale_q, o_dtype):
    """Queries in 8 bits become 16-bit ones: exact, as every fp8 value has a place in f16. Returns (q, what is left of scale_q)."""
    name = arrays.dtype_of(q)
    if name not in ("fp8_e4m3", "fp8_e5m2"):
        return q, scale_q
    scale_q = arrays.number_or_vector(scale_q)
    wide = arrays.cast(q, o_dtype)
    if scale_q is None or isinstance(scale_q, float) or arrays.size_of(scale_q) == 1:
        return wide, scale_q
    scale = arrays.f32_vector(scale_q, wide)
    return arrays.cast(wide * scale[None, :, None], o_dtype), None


def _fp4_scales(kv_cache_sf, layout):
    """Block scales of an NVFP4 cache, (k, v) as [pages, page, heads, dim / 16]."""
    k, v = unpack_paged_kv_cache(kv_cache_sf, layout)
    for x in (k, v):
        if arrays.strides_of(x)[-1] != 1 and x.shape[-1] > 1:
            raise ValueError("kv_cache_sf: the innermost stride must be 1")
    return arrays.retype(k, "fp8_e4m3"), arrays.retype(v, "fp8_e4m3")


def _heads_last(x, layout):
    """Scales of a token and head, [.., tokens, heads], whatever the layout."""
    return x if layout == "NHD" else arrays.permute(x, tuple(range(len(x.shape) - 2)) + (len(x.shape) - 1, len(x.shape) - 2))


def _token_head_scales(kv_cache_sf, layout):
    """The scales of an 8-bit cache that has one for each token and head: float32 with the axes of K (V) but the last, as core.PerToken."""
    if not isinstance(kv_cache_sf, (tuple, list)) or len(kv_cache_sf) != 2:
        raise ValueError("use_token_head_sf requires kv_cache_sf to be a (k_sf, v_sf) tuple of float32 tensors")
    for name, x in zip(("k_sf", "v_sf"), kv_cache_sf):
        if x is None:
            raise ValueError("use_token_head_sf requires both k_sf and v_sf in kv_cache_sf")
        if arrays.dtype_of(x) != "f32":
            raise ValueError(f"{name} must be float32, got {x.dtype}")
    return tuple(core.PerToken(_heads_last(x, layout)) for x in kv_cache_sf)


def _check_token_head(wrapper, wanted):
    if wanted and not wrapper._kv_dtype.startswith("fp8"):
        raise ValueError(f"use_token_head_sf requires an fp8 (e4m3/e5m2) KV cache, got {wrapper._kv_dtype}")
    if wanted and wrapper._q_dtype not in ("f16", "bf16", "f32"):
        raise ValueError(f"use_token_head_sf requires an fp16/bf16 query, got {wrapper._q_dtype}")
    wrapper._use_token_head_sf = wanted


def _finished_lse(made, lse, lse_base, lse_layout, return_lse):
    """What a run returns, with the lse in the base and layout asked for. lse: where to, in the layout "HN"."""
    if not isinstance(made, tuple):
        return made
    out, found = made
    if lse_base == "ln":
        found.__imul__(math.log(2))
    if lse_layout == "HN":
        turned = arrays.permute(found, (1, 0))
        if lse is None:
            found = turned.contiguous() if arrays.torch_of(found) is not None else np.ascontiguousarray(turned)
        else:
            check_shape_dtype_device(lse, tuple(turned.shape), "f32", arrays.device_of(found), "lse")
            lse[:] = turned
            found = lse
    return (out, found) if return_lse else out


def _check_axes(**three):
    for name, x in three.items():
        if len(x.shape) != 3:
            raise ValueError(f"{name} has {len(x.shape)} axes; expected 3: tokens, heads, dim")


def single_prefill_with_kv_cache(q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None, packed_custom_mask=None, causal=False,
                                 kv_layout="NHD", pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1,
                                 logits_soft_cap=None, rope_scale=None, rope_theta=None, backend="auto", return_lse=False, kv_cache_sf=None, k_scale=None,
                                 v_scale=None):
    """Attention of one request: q [qo_len, heads, dim], k and v [kv_len, kv_heads, dim] (NHD) or [kv_heads, kv_len, dim] (HND). Returns o [qo_len, heads,
    dim_v], and lse [qo_len, heads] float32 in base 2 with return_lse. custom_mask: bool [qo_len, kv_len], True keeps; packed: bits, low first; replaces
    `causal`. window_left: keys kept to the left of a row's own, -1: all."""
    check_kv_layout(kv_layout)
    check_pos_encoding_mode(pos_encoding_mode)
    check_arrays(q=q, k=k, v=v)
    if core.is_compiled(q) and kv_cache_sf is None:
        scales = [core.as_tensor(x, q) for x in (scale_q, core._product(scale_k, k_scale), core._product(scale_v, v_scale))]
        made = arrays.torch_of(q).ops.foveal.single_attention(
            q, k, v, custom_mask, packed_custom_mask, *scales, False, return_lse, causal, kv_layout, pos_encoding_mode, sm_scale, window_left, logits_soft_cap,
            rope_scale, rope_theta, arrays.dtype_name(o_dtype) or arrays.dtype_of(q))
        return made if return_lse else made[0]
    args = None
    fp4 = kv_cache_sf is not None and arrays.dtype_of(k) in ("u8", "fp4_e2m1")
    if kv_cache_sf is not None and not fp4:
        scale_k, scale_v = (core.PerToken(_heads_last(x, kv_layout)) for x in kv_cache_sf)
    if fp4:
        k, v = arrays.retype(k, "fp4_e2m1"), arrays.retype(v, "fp4_e2m1")
    if kv_layout == "HND":
        k, v = arrays.permute(k, (1, 0, 2)), arrays.permute(v, (1, 0, 2))
    o_name = arrays.dtype_name(o_dtype) or arrays.dtype_of(q)
    if o_name.startswith("fp8"):
        raise ValueError("o_dtype must be given with 8-bit queries: float16 or bfloat16")
    q, scale_q = _upcast_query(q, scale_q, o_name)
    _check_axes(q=q, k=k, v=v)
    num_q_heads, dim_qk = q.shape[1], q.shape[2]
    num_kv_heads, dim_v = v.shape[1], v.shape[2]
    qo_len, kv_len = q.shape[0], k.shape[0]
    check_sizes(num_q_heads, num_kv_heads, head_dim_qk=dim_qk, head_dim_vo=dim_v)
    if packed_custom_mask is None and custom_mask is not None:
        if tuple(custom_mask.shape) not in ((qo_len, kv_len), (qo_len * kv_len,)):
            raise ValueError(f"custom_mask has the shape {tuple(custom_mask.shape)}; expected {(qo_len, kv_len)}")
        packed_custom_mask = packbits(custom_mask.reshape(-1), bitorder="little")
    spec = core.make_spec(arrays.dtype_of(q), arrays.dtype_of(k), o_name, num_q_heads, num_kv_heads, dim_qk, dim_v, sm_scale=sm_scale, causal=causal,
                          window_left=window_left, logits_soft_cap=logits_soft_cap, pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale,
                          rope_theta=rope_theta, custom_mask=packed_custom_mask is not None)
    if arrays.dtype_of(v) != spec.v:
        spec = spec._replace(v=arrays.dtype_of(v))
    attention = _single(q, spec, qo_len, kv_len, packed_custom_mask)
    if fp4:
        k_sf, v_sf = kv_cache_sf
        if kv_layout == "HND":
            k_sf, v_sf = arrays.permute(k_sf, (1, 0, 2)), arrays.permute(v_sf, (1, 0, 2))
        args = {"k_block_scale": arrays.retype(k_sf, "fp8_e4m3"), "v_block_scale": arrays.retype(v_sf, "fp8_e4m3")}
    return core.run(attention, q, k, v, return_lse=return_lse, q_scale=scale_q, k_scale=core._product(scale_k, k_scale),
                    v_scale=core._product(scale_v, v_scale), args=args, lse_offset=float(kv_len - qo_len))


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


def single_prefill_with_kv_cache_with_jit_module(*args, **kwargs):
    raise NotImplementedError("single_prefill_with_kv_cache_with_jit_module: CUDA C++ variants are not taken; see foveal.Variant")


# ---- offsets and masks of a batch ----


def _offsets(x, name):
    """Offsets of a batch's requests on the host."""
    a = arrays.host_ints(x, name)
    if a.ndim != 1 or len(a) < 1:
        raise ValueError(f"{name} has the shape {tuple(a.shape)}; it has batch_size + 1 entries, the first of them 0")
    return a


def _pack_masks(custom_mask, packed_custom_mask, rows, lengths):
    """The bits of all requests, each from a byte border, and where each begins: int32 [batch + 1]."""
    counts = (rows[1:] - rows[:-1]).astype(np.int64) * lengths
    starts = np.concatenate(([0], np.cumsum((counts + 7) // 8)))
    if packed_custom_mask is not None:
        wanted = int(starts[-1])
        if packed_custom_mask.shape[0] != wanted:
            raise ValueError(f"packed_custom_mask length {packed_custom_mask.shape[0]} differs from the {wanted} bytes of the requests (rows x keys of each, "
                             "each from a byte border)")
        return packed_custom_mask, starts.astype(np.int32)
    indptr = np.concatenate(([0], np.cumsum(counts)))
    flat = custom_mask.reshape(-1)
    if flat.shape[0] != indptr[-1]:
        raise ValueError(f"custom_mask length {flat.shape[0]} differs from the {int(indptr[-1])} entries of the requests (rows x keys of each)")
    return segment_packbits(flat, indptr, bitorder="little")


def _item_ranges(prefix_len, token_pos, stride, lengths):
    """Multi-item scoring as the ranges of the engine's "items": what lies between two delimiters. The empty range at the prefix's end makes the first
    delimiter no part of the prefix. A row's token position counts from its delimiter (0)."""
    if token_pos is None:
        raise ValueError("prefix_len_ptr needs token_pos_in_items_ptr and token_pos_in_items_len")
    stride, ranges, indptr = int(stride), [], [0]
    for r, prefix in enumerate(prefix_len):
        prefix, length = int(prefix), int(lengths[r])
        behind = max(length - prefix, 0)
        mine = token_pos[r * stride: (r + 1) * stride][:behind].astype(np.int64)
        if len(mine) < behind:
            raise ValueError(f"token_pos_in_items of request {r} has {len(mine)} entries; it has {behind} tokens behind its prefix")
        steps = np.diff(mine)
        if mine.size and (mine[0] != 0 or not ((steps == 1) | (mine[1:] == 0)).all()):
            raise ValueError(f"token_pos_in_items of request {r} must count 0, 1, 2, ... from each delimiter")
        ranges.append((prefix, prefix))
        starts = np.flatnonzero(mine == 0)
        ends = np.append(starts[1:], mine.size)
        ranges += [(prefix + int(a) + 1, prefix + int(b)) for a, b in zip(starts, ends) if b > a + 1]
        indptr.append(len(ranges))
    return {"items": np.array(ranges, np.int32).reshape(-1, 2), "items_indptr": np.array(indptr, np.int32)}


# ---- the wrappers ----


def _jit_sink(jit_args, variant_owns_mask=False):
    """Whether jit_args ask for attention with sinks, the one module that is known by its name: run() then takes (sink, sm_scale) by position."""
    if variant_owns_mask:
        raise NotImplementedError("variant_owns_mask: CUDA C++ variants are not taken; see foveal.Variant")
    if jit_args is None:
        return False
    name = jit_args[11] if len(jit_args) > 11 else None
    if name != "AttentionSink":
        raise NotImplementedError(f"jit_args of the variant {name!r}: CUDA C++ variants are not taken; see foveal.Variant")
    return True


class _CachedModule:
    """What engines poke as wrapper._cached_module."""

    def __init__(self, wrapper):
        self._wrapper = wrapper

    def plan(self, *args):
        return self._wrapper._plan_from_module(*args)


def _fa2_tile(rows, num_requests, group, dim_v):
    packed = rows * group / max(num_requests, 1)
    return 128 if packed > 64 and dim_v < 256 else 64 if packed > 16 else 16


_QUERY_TYPES = ("f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2")


class _Wrapper:
    """What the batch wrappers share: the plan, its data types, the names that engines read."""

    def __init__(self, float_workspace_buffer, kv_layout, backend):
        check_kv_layout(kv_layout)
        core.check_workspace(float_workspace_buffer, "float_workspace_buffer")
        self._kv_layout = kv_layout
        self._backend = backend
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = None
        self._pin_memory_int_workspace_buffer = None
        self.device = getattr(float_workspace_buffer, "device", "cpu")
        self._device = arrays.device_of(float_workspace_buffer)
        self._attention = core.Attention(self._device)
        self._use_cuda_graph = False
        self._fixed_batch_size = None
        self._plan_info = None
        self._cached_module = None
        self._pool = core.Pool()
        self._lse_offset = None
        self._use_token_head_sf = False
        self._choice = None         # what the last plan() was told, where the next one is likely to be told the same
        self._own = (None, None, None)      # what plan() was told, options of a run, and the spec under them

    @property
    def is_cuda_graph_enabled(self):
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer=None):
        """Checks and keeps other workspaces; the engine has its own."""
        core.check_workspace(float_workspace_buffer, "float_workspace_buffer")
        core.check_workspace(int_workspace_buffer, "int_workspace_buffer")
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer

    def workspace_size(self, *args, **kwargs):
        """(0, 0): the workspaces that callers pass are not used."""
        return 0, 0

    def end_forward(self):
        """Deprecated: does nothing."""

    def _planned(self):
        if self._attention.planned is None:
            raise ValueError("call plan() before run()")
        return self._attention.planned

    def _check_query(self, q, k=None):
        spec = self._planned()
        name = arrays.dtype_of(q)
        if name != self._q_dtype:
            raise ValueError(f"The dtype of q {q.dtype} does not match the q_data_type {self._q_dtype} that plan() was given")
        if k is not None and arrays.dtype_of(k) != spec.k:
            raise ValueError(f"The dtype of k {k.dtype} does not match the kv_data_type {spec.k} that plan() was given")

    def _set_dtypes(self, q_data_type, kv_data_type, o_data_type):
        self._q_dtype = arrays.dtype_name(q_data_type)
        if self._q_dtype not in _QUERY_TYPES:
            raise ValueError(f"q_data_type is {q_data_type}; it is float32, float16, bfloat16, float8_e4m3fn or float8_e5m2")
        kv = arrays.dtype_name(kv_data_type) or self._q_dtype
        self._kv_dtype = "fp4_e2m1" if kv == "u8" else kv
        o = arrays.dtype_name(o_data_type) or self._q_dtype
        if o.startswith("fp8"):
            o = "f16" if self._q_dtype.startswith("fp8") and o_data_type is None else o
        if o not in ("f32", "f16", "bf16"):
            raise NotImplementedError(f"o_data_type {o_data_type}: outputs are float32, float16 or bfloat16")
        self._o_dtype = o
        self._cached_q_data_type, self._cached_kv_data_type, self._cached_o_data_type = q_data_type, kv_data_type, o_data_type
        return (o if self._q_dtype.startswith("fp8") else self._q_dtype), self._kv_dtype, o

    @staticmethod
    def _sink_arguments(args, sinks=None):
        """The arguments by position of a module with sinks, (sink, sm_scale), as the sinks and the options of a run."""
        sink, sm_scale = (tuple(args) + (None, None))[:2]
        return sinks if sink is None else sink, None if sm_scale is None else {"sm_scale": float(sm_scale)}

    def _take_options(self, own=None):
        """Plans the step under the options that a run has of its own, or under the planned ones. They hold for that run alone, whether it succeeds or not: each run
        says what it wants. Going back waits for a run that wants something else, so that equal runs, a captured one among them, plan nothing."""
        spec = self._spec_under(own) if own else self._attention.planned
        if spec is not self._attention.spec:
            self._turn_to(spec)

    def _turn_to(self, spec):
        self._attention.with_spec(spec)
        if spec.alibi and self._lse_offset is None:         # plan() was not told of ALiBi
            self._keep_lse_offset(spec, *self._step_sizes())

    def _spec_under(self, own):
        """The planned spec with options of a run instead (Python's numbers); the last such spec is kept."""
        if self._own[0] is not self._told or self._own[1] != own:
            self._own = self._told, own, self._make_spec(self._told_with(own))
        return self._own[2]

    def _told_with(self, changes):
        """What plan() was told, with changes. A scale that is the planned one is none."""
        told = {**self._told, **changes}
        if told["sm_scale"] is not None and core.same_scale(float(told["sm_scale"]), self._attention.planned.scale):
            told["sm_scale"] = self._told["sm_scale"]
        return told

    def _step_sizes(self):
        """The keys of each request of the step, and its row offsets."""
        return self._sizes

    def _keep_lse_offset(self, spec, lengths, rows):
        """alibi_offset's, where runs read it. It lies still while it has room, for graphs that have captured a run."""
        self._sizes, offset = (lengths, rows), core.alibi_offset(spec, lengths, rows)
        if offset is None:
            self._lse_offset = None
            return
        offset, old = arrays.to_device(offset, self._float_workspace_buffer), self._lse_offset
        if old is not None and len(offset) <= len(old):
            old[:len(offset)] = offset
        else:
            self._lse_offset = offset

    def _respec(self, **changes):
        """A deprecated forward() call says again what plan() was told: from then on that is the plan."""
        told = self._told_with(changes)
        spec = self._make_spec(told)
        self._turn_to(spec)
        self._told, self._choice, self._attention.planned = told, None, spec

    def _decide(self, choice):
        """What _choose makes of what plan() is told beside its tables: again only where that is something else."""
        if self._choice is None or choice != self._choice:
            self._choice = None
            self._chosen = self._choose(*choice)
            self._choice = None if any(hasattr(x, "item") for x in choice) else choice      # arrays may hold another number the next time
        return self._chosen

    def _plan_spec(self, **told):
        """The spec of a plan(); what it was told is kept."""
        self._told = told
        return self._make_spec(told)

    def _make_spec(self, told):
        return core.make_spec(*self._types, **told)


class _PagedWrapper(_Wrapper):
    """A batch over pages: what the prefill and the decode wrapper share."""

    _TOO_MANY_PAGES = "The size of indices should be less than or equal to the allocated buffer"

    def _check_batch_size(self, n):
        if n != self._fixed_batch_size:
            raise ValueError(f"The batch size should be fixed in cudagraph mode, the runtime batch size {n}  mismatches the batch size set during initialization "
                             f"{self._fixed_batch_size}")

    def _copy_tables(self, indptr, indices, last_page_len, qo_indptr=None):
        """In graph mode: into the buffers whose addresses were captured."""
        n = len(indptr) - 1
        self._check_batch_size(n)
        if len(indices) > len(self._paged_kv_indices_buf):
            raise ValueError(self._TOO_MANY_PAGES)
        self._paged_kv_indptr_buf[:] = arrays.to_device(indptr, self._paged_kv_indptr_buf)
        self._paged_kv_last_page_len_buf[:] = arrays.to_device(last_page_len, self._paged_kv_last_page_len_buf)
        if indices is not self._paged_kv_indices_buf:
            self._paged_kv_indices_buf[:len(indices)] = arrays.to_device(indices, self._paged_kv_indices_buf)
        if qo_indptr is not None:
            self._qo_indptr_buf[:] = arrays.to_device(qo_indptr, self._qo_indptr_buf)

    def _wrong_rows(self, q):
        return f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1] ({self._rows_total}). The number of rows of q must be the one planned."

    def _page_ids(self, indices):
        """Where kernels read page ids: on the wrapper's device, or on the host: an update takes those along."""
        where = arrays.device_of(indices)
        if where == "cpu":
            return indices
        if where == self._device:
            return (None, indices)
        return arrays.to_numpy(indices) if self._device == "cpu" else (None, arrays.to_device(indices, self._float_workspace_buffer))

    def _max_rows(self):
        """Rows that a plan in graph mode must have room for, beside its own."""
        return getattr(self, "_max_total_num_rows", None) or 0

    def _update(self, spec, rows, indptr, lengths, indices, page_size, mode, args=None, pages=None, last=None):
        """rows None: one row a request. pages: of the cache, where it is known. last: what the last pages hold, where lengths is None."""
        n, used = len(indptr) - 1, int(indptr[-1])
        pool = self._pool.plan(indices, used) if pages is None else pages
        batch = Batch(rows=rows, lengths=lengths, last_page_lengths=last, page_size=page_size, num_pages=pool, page_indptr=indptr,
                      page_ids=self._page_ids(indices), args=args)
        total = n if rows is None else int(rows[-1])
        self._rows_total = total
        self._again = (spec, rows, indptr, lengths, indices, page_size, mode, args)
        self._again_last = last
        if self._use_cuda_graph and self._attention.frozen is None:
            room = len(self._paged_kv_indices_buf)
            self._attention.frozen = core.Need(self._fixed_batch_size, max(total, self._max_rows(), 1), max(room * page_size, 1), max(room, 1))
        try:
            self._attention.update(spec, batch, core.Need(n, total, used * page_size, used), mode, core.stream_of(self._float_workspace_buffer))
        except InvalidError as e:
            if last is None or not e.field.startswith("batch.last_page_lengths"):
                raise
            # what is no fill of a last page: of requests without pages it does not matter
            self._update(spec, rows, indptr, core.paged_lengths(indptr, last, page_size), indices, page_size, mode, args, pages)

    def _cudnn_layout(self, paged_kv_cache):
        """The layout of a pair of caches for upstream's cuDNN, which takes [pages, kv_heads, page, dim] whatever the wrapper was told."""
        spec, page_size = self._planned(), self._again[5]
        if isinstance(paged_kv_cache, (tuple, list)) and tuple(paged_kv_cache[0].shape[1:3]) == (spec.num_kv_heads, page_size):
            return "HND"
        return self._kv_layout

    def _step_sizes(self):
        rows, indptr, lengths, page_size = *self._again[1:4], self._again[5]
        return core.paged_lengths(indptr, self._again_last, page_size) if lengths is None else lengths, rows

    def _run_paged(self, q, paged_kv_cache, own=None, *, kv_cache_sf=None, **options):
        """own: options of this run instead of the planned ones, Python's numbers by the names of _told."""
        if core.rows_differ(q, self):
            raise ValueError(self._wrong_rows(q))
        k, v = unpack_paged_kv_cache(paged_kv_cache, self._kv_layout if self._backend != "cudnn" else self._cudnn_layout(paged_kv_cache))
        args = None
        if self._use_token_head_sf:
            k_sf, v_sf = _token_head_scales(kv_cache_sf, self._kv_layout)
            options["k_scale"], options["v_scale"] = k_sf * options.get("k_scale"), v_sf * options.get("v_scale")
        elif self._kv_dtype == "fp4_e2m1":
            if kv_cache_sf is None:
                raise ValueError("kv_cache_sf must be provided for NVFP4 KV cache.")
            k, v = arrays.retype(k, "fp4_e2m1"), arrays.retype(v, "fp4_e2m1")
            k_sf, v_sf = _fp4_scales(kv_cache_sf, self._kv_layout)
            args = {"k_block_scale": k_sf, "v_block_scale": v_sf}
        self._check_query(q, k)
        if self._pool.differs(k.shape[0]):
            self._update(self._attention.planned, *self._again[1:], pages=k.shape[0], last=self._again_last)
        if self._q_dtype.startswith("fp8"):
            q, options["q_scale"] = _upcast_query(q, options.get("q_scale"), self._o_dtype)
        if own or self._attention.spec is not self._attention.planned:
            self._take_options(own)
        return core.run(self._attention, q, k, v, args=args, lse_offset=self._lse_offset, **options)


class BatchPrefillWithPagedKVCacheWrapper(_PagedWrapper):
    """Prefill and append attention for a batch of requests over pages.

    plan() once a step, run() once a layer. float_workspace_buffer says which device is meant; its memory is not used. In CUDA-graph mode the index buffers
    must be given, and later plans may not have more rows than max_total_num_rows, or the first."""

    _TOO_MANY_PAGES = "The length of paged_kv_indices exceeds the allocated buffer size."

    def _check_batch_size(self, n):
        if n != self._fixed_batch_size:
            raise ValueError(f"The batch size should be fixed during the lifecycle of the wrapper in cuda graph mode, the runtime batch size {n} mismatches the "
                             f"batch size {self._fixed_batch_size}  set during initialization.")

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None, paged_kv_indptr_buf=None, paged_kv_indices_buf=None,
                 paged_kv_last_page_len_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
                 variant_owns_mask=False, max_total_num_rows=None):
        super().__init__(float_workspace_buffer, kv_layout, backend)
        self._jit_sink = _jit_sink(jit_args, variant_owns_mask)
        self._use_cuda_graph = use_cuda_graph
        self._qo_indptr_buf, self._paged_kv_indptr_buf = qo_indptr_buf, paged_kv_indptr_buf
        self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = paged_kv_indices_buf, paged_kv_last_page_len_buf
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf
        self._max_total_num_rows = max_total_num_rows
        self._causal = False
        if max_total_num_rows is not None:
            if not use_cuda_graph:
                raise ValueError("max_total_num_rows requires use_cuda_graph=True")
            if not isinstance(max_total_num_rows, int) or max_total_num_rows < 0:
                raise ValueError("max_total_num_rows must be a nonnegative integer")
        if use_cuda_graph:
            for name in ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf"):
                if getattr(self, "_" + name) is None:
                    raise ValueError(f"{name} should be a torch.Tensor in CUDA graph mode")
            self._fixed_batch_size = len(qo_indptr_buf) - 1
            if len(paged_kv_indptr_buf) != self._fixed_batch_size + 1:
                raise ValueError("The length of paged_kv_indptr_buf should be batch_size + 1.")
            if len(paged_kv_last_page_len_buf) != self._fixed_batch_size:
                raise ValueError("The length of paged_kv_last_page_len_buf should be batch_size.")

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk, page_size,
             head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None,
             window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
             non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None, seq_lens=None,
             seq_lens_q=None, block_tables=None, max_token_per_sequence=None, max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False,
             uniform_q_len=None, use_token_head_sf=False):
        """Plans a step. qo_indptr [batch + 1]: row offsets; paged_kv_indptr [batch + 1], paged_kv_indices, paged_kv_last_page_len [batch]: the page table.
        custom_mask: bool, per request [rows, keys] one after another; packed_custom_mask: its bits, low first, each request from a byte border.
        use_token_head_sf: runs bring kv_cache_sf, a float32 scale for each token and head of an fp8 cache."""
        masked = custom_mask is not None or packed_custom_mask is not None
        items = prefix_len_ptr is not None and not masked
        head_dim_vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        spec, mode = self._decide((num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size, causal, masked, items, pos_encoding_mode, sm_scale, window_left,
                                   logits_soft_cap, rope_scale, rope_theta, q_data_type, kv_data_type, o_data_type, fixed_split_size, disable_split_kv))
        if use_token_head_sf or self._use_token_head_sf:
            _check_token_head(self, use_token_head_sf)
        if self._backend == "cudnn" and seq_lens_q is not None:     # its offsets may count elements
            qo_indptr = core.running_sum(seq_lens_q, "seq_lens_q")
        rows, indptr = _offsets(qo_indptr, "qo_indptr"), _offsets(paged_kv_indptr, "paged_kv_indptr")
        last, lengths = arrays.host_ints(paged_kv_last_page_len, "paged_kv_last_page_len"), None
        if len(rows) != len(indptr):
            raise ValueError(f"qo_indptr has {len(rows)} entries and paged_kv_indptr {len(indptr)}; both have batch_size + 1")
        if len(last) != len(indptr) - 1:
            raise ValueError(f"paged_kv_last_page_len has {len(last)} entries; paged_kv_indptr speaks of {len(indptr) - 1} requests")
        if masked or items or spec.alibi:
            lengths, last = core.paged_lengths(indptr, last, page_size), None
        total = int(rows[-1])
        if self._use_cuda_graph:
            if self._max_total_num_rows is None:
                self._max_total_num_rows = total
            elif total > self._max_total_num_rows:
                raise ValueError(f"The total number of rows in qo_indptr {total} in cuda graph mode cannot exceed the number of rows set during "
                                 f"initialization {self._max_total_num_rows}.")
            self._copy_tables(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, qo_indptr)
            paged_kv_indices = self._paged_kv_indices_buf
        args = None
        if masked:
            args = {"bits": self._mask_bits(*_pack_masks(custom_mask, packed_custom_mask, rows, lengths))}
        elif items:
            args = _item_ranges(arrays.to_numpy(prefix_len_ptr), arrays.to_numpy(token_pos_in_items_ptr), token_pos_in_items_len, lengths)
            if self._device != "cpu":
                args = {name: arrays.to_device(x, self._float_workspace_buffer) for name, x in args.items()}
        self._keep_lse_offset(spec, lengths, rows)
        self._update(spec, rows, indptr, lengths, paged_kv_indices, page_size, mode, args, last=last)
        tile = _fa2_tile(total, len(rows) - 1, num_qo_heads // num_kv_heads, head_dim_vo)
        self._plan_info = [len(rows) - 1, total, 0, tile] + [0] * 11

    begin_forward = plan

    def _choose(self, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size, causal, masked, items, pos_encoding_mode, sm_scale, window_left,
                logits_soft_cap, rope_scale, rope_theta, q_data_type, kv_data_type, o_data_type, fixed_split_size, disable_split_kv):
        """Checks what plan() is told beside its tables, and makes the spec and the mode of it. page_size None: keys are packed."""
        check_pos_encoding_mode(pos_encoding_mode)
        check_sizes(num_qo_heads, num_kv_heads, head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo, page_size=1 if page_size is None else page_size)
        self._types = self._set_dtypes(q_data_type, kv_data_type, o_data_type)
        self._causal, self._window_left, self._sm_scale, self._logits_soft_cap = causal, window_left, sm_scale, logits_soft_cap
        spec = self._plan_spec(
            num_q_heads=num_qo_heads, num_kv_heads=num_kv_heads, dim_qk=head_dim_qk, dim_v=head_dim_vo, sm_scale=sm_scale, causal=causal, window_left=window_left,
            logits_soft_cap=logits_soft_cap, pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta, custom_mask=masked, items=items)
        return spec, core.split_mode(False, fixed_split_size, disable_split_kv, page_size or 1)

    def _mask_bits(self, bits, starts):
        """In graph mode the bits, and the bytes at which requests begin, lie in the caller's buffers."""
        if not self._use_cuda_graph:
            return arrays.to_device(bits, self._float_workspace_buffer)
        for name, x in (("custom_mask_buf", self._custom_mask_buf), ("mask_indptr_buf", self._mask_indptr_buf)):
            if x is None:
                raise ValueError(f"{name} must be initialized with a tensor in cuda graph mode if we use custom mask in attention computation.")
        if len(self._mask_indptr_buf) != len(starts):
            raise ValueError(f"mask_indptr_buf has {len(self._mask_indptr_buf)} entries; expected batch_size + 1 = {len(starts)}")
        self._mask_indptr_buf[:] = arrays.to_device(starts, self._mask_indptr_buf)
        n = bits.shape[0]
        if n > len(self._custom_mask_buf):
            raise ValueError(f"custom_mask_buf has {len(self._custom_mask_buf)} bytes; the mask needs {n}")
        self._custom_mask_buf[:n] = arrays.to_device(bits, self._custom_mask_buf)
        return self._custom_mask_buf[:n]

    def run(self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False, lse_base="log2", lse_layout="NH",
            enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, uses_spcompress=None):
        """One layer: q [rows, heads, dim_qk]; the cache [pages, 2, page, kv_heads, dim] (NHD), [pages, 2, kv_heads, page, dim] (HND) or a pair of 4-D tensors.
        Returns out [rows, heads, dim_v], and lse [rows, heads] in base 2 with return_lse; [heads, rows] with lse_layout "HN", natural with lse_base "ln". With 8-bit
        queries the positional arguments are scale_q, scale_k, scale_v."""
        if lse_base != "log2" or lse_layout != "NH":
            check_lse_base(lse_base)
            check_lse_layout(lse_layout)
            made = self.run(q, paged_kv_cache, *args, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse if lse_layout == "NH" else None,
                            return_lse=return_lse or lse is not None, window_left=window_left, sinks=sinks, kv_cache_sf=kv_cache_sf)
            return _finished_lse(made, lse, lse_base, lse_layout, return_lse)
        self._planned()
        if window_left is not None and window_left != self._window_left:
            raise ValueError(f"window_left {window_left} differs from the planned one, {self._window_left}")
        own = None
        if self._jit_sink and args:
            (sinks, own), args = self._sink_arguments(args, sinks), ()
        if args:
            q_scale, k_scale, v_scale = (core._product(a, b) for a, b in zip(tuple(args) + (None,) * 3, (q_scale, k_scale, v_scale)))
        return self._run_paged(q, paged_kv_cache, own, kv_cache_sf=kv_cache_sf, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
                               return_lse=return_lse, sinks=sinks)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(self, q, paged_kv_cache, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, k_scale=None, v_scale=None, window_left=-1,
                logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None):
        """Deprecated: run() with the options of plan() said again. As upstream's, they stay for later runs, `causal` among them, until the next plan()."""
        self._planned()
        self._respec(causal=causal, pos_encoding_mode=pos_encoding_mode, window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
                     rope_scale=rope_scale, rope_theta=rope_theta)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)

    def forward_return_lse(self, q, paged_kv_cache, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, k_scale=None, v_scale=None,
                           window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None):
        """Deprecated: run_return_lse() with the options of plan() said again, which stay as forward()'s do."""
        self._planned()
        self._respec(causal=causal, pos_encoding_mode=pos_encoding_mode, window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
                     rope_scale=rope_scale, rope_theta=rope_theta)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    """Prefill attention for a batch whose keys and values lie packed, one request after another."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None, kv_indptr_buf=None, custom_mask_buf=None,
                 mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None, variant_owns_mask=False):
        super().__init__(float_workspace_buffer, kv_layout, backend)
        self._jit_sink = _jit_sink(jit_args, variant_owns_mask)
        self._use_cuda_graph = use_cuda_graph
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr_buf, kv_indptr_buf
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf
        self._max_total_num_rows = None
        self._causal = False
        if use_cuda_graph:
            for name, x in (("qo_indptr_buf", qo_indptr_buf), ("kv_indptr_buf", kv_indptr_buf)):
                if x is None:
                    raise ValueError(f"{name} should be a torch.Tensor in cuda graph mode")
            self._fixed_batch_size = len(qo_indptr_buf) - 1
            if len(kv_indptr_buf) != self._fixed_batch_size + 1:
                raise ValueError(f"The length of kv_indptr_buf ({len(kv_indptr_buf)}) should be the same as qo_indptr_buf ({len(qo_indptr_buf)}).")

    _mask_bits, _choose = BatchPrefillWithPagedKVCacheWrapper._mask_bits, BatchPrefillWithPagedKVCacheWrapper._choose

    def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
             pos_encoding_mode="NONE", use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
             q_data_type="float16", kv_data_type=None, o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None,
             token_pos_in_items_len=0, max_item_len_ptr=None, fixed_split_size=None, disable_split_kv=False, seq_lens=None, seq_lens_q=None,
             max_token_per_sequence=None, max_sequence_kv=None, v_indptr=None, o_indptr=None, qo_indptr_cpu=None, kv_indptr_cpu=None, uniform_q_len=None,
             use_token_head_sf=False):
        """Plans a step: row offsets qo_indptr [batch + 1] and token offsets kv_indptr [batch + 1]; qo_indptr_cpu and kv_indptr_cpu: copies on the host, which spare
        a wait for the GPU. The rest as for the paged wrapper."""
        masked = custom_mask is not None or packed_custom_mask is not None
        items = prefix_len_ptr is not None and not masked
        head_dim_vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        spec, mode = self._decide((num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, None, causal, masked, items, pos_encoding_mode, sm_scale, window_left,
                                   logits_soft_cap, rope_scale, rope_theta, q_data_type, kv_data_type, o_data_type, fixed_split_size, disable_split_kv))
        if use_token_head_sf or self._use_token_head_sf:
            _check_token_head(self, use_token_head_sf)
        if self._backend == "cudnn" and seq_lens is not None and seq_lens_q is not None:     # its offsets may count elements
            qo_indptr, kv_indptr = (core.running_sum(x, name) for x, name in ((seq_lens_q, "seq_lens_q"), (seq_lens, "seq_lens")))
            qo_indptr_cpu = kv_indptr_cpu = None
        rows = _offsets(qo_indptr if qo_indptr_cpu is None else qo_indptr_cpu, "qo_indptr")
        indptr = _offsets(kv_indptr if kv_indptr_cpu is None else kv_indptr_cpu, "kv_indptr")
        if len(rows) != len(indptr):
            raise ValueError(f"The kv_indptr length should be equal to the qo_indptr length: {len(indptr)} and {len(rows)}")
        lengths, total = indptr[1:] - indptr[:-1], int(rows[-1])
        if self._use_cuda_graph:
            self._check_graph(len(rows) - 1, total)
            self._qo_indptr_buf[:] = arrays.to_device(qo_indptr, self._qo_indptr_buf)
            self._kv_indptr_buf[:] = arrays.to_device(kv_indptr, self._kv_indptr_buf)
        args = None
        if masked:
            args = {"bits": self._mask_bits(*_pack_masks(custom_mask, packed_custom_mask, rows, lengths))}
        elif items:
            args = _item_ranges(arrays.to_numpy(prefix_len_ptr), arrays.to_numpy(token_pos_in_items_ptr), token_pos_in_items_len, lengths)
            if self._device != "cpu":
                args = {name: arrays.to_device(x, self._float_workspace_buffer) for name, x in args.items()}
        self._keep_lse_offset(spec, lengths, rows)
        self._rows_total = total
        keys = int(lengths.sum())
        batch = Batch(rows=rows, kv_indptr=indptr, args=args)
        need = core.Need(len(rows) - 1, total, keys, 0)
        if self._use_cuda_graph:
            frozen = self._attention.frozen or core.Need(self._fixed_batch_size, max(total, 1), 0, 0)
            if keys > frozen.tokens and not self._attention.entries:
                frozen = frozen._replace(tokens=core.next_positive_power_of_2(max(keys, 1 << 16)))
            self._attention.frozen = frozen
        self._attention.update(spec, batch, need, mode, core.stream_of(self._float_workspace_buffer))
        tile = _fa2_tile(total, len(rows) - 1, num_qo_heads // num_kv_heads, head_dim_vo)
        self._plan_info = [len(rows) - 1, total, 0, tile] + [0] * 11

    begin_forward = plan

    def _check_graph(self, n, total):
        if n != self._fixed_batch_size:
            raise ValueError(f"The batch size should be fixed in cudagraph mode, the runtime batch size {n} mismatches the batch size "
                             f"{self._fixed_batch_size} set during initialization")
        if self._max_total_num_rows is None:
            self._max_total_num_rows = total
        elif total > self._max_total_num_rows:
            raise ValueError(f"The total number of rows in qo_indptr {total} in cuda graph mode cannot exceed the number of rows set during "
                             f"initialization {self._max_total_num_rows}.")

    def run(self, q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None, lse=None, return_lse=False, lse_base="log2", lse_layout="NH",
            enable_pdl=None, kv_cache_sf=None):
        """One layer: q [rows, heads, dim_qk], k [tokens, kv_heads, dim_qk], v [tokens, kv_heads, dim_v] (HND: [kv_heads, tokens, dim]). Returns as the paged wrapper's."""
        if lse_base != "log2" or lse_layout != "NH":
            check_lse_base(lse_base)
            check_lse_layout(lse_layout)
            made = self.run(q, k, v, *args, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, o_scale=o_scale, out=out, lse=lse if lse_layout == "NH" else None,
                            return_lse=return_lse or lse is not None, kv_cache_sf=kv_cache_sf)
            return _finished_lse(made, lse, lse_base, lse_layout, return_lse)
        self._planned()
        if o_scale is not None and arrays.as_float(o_scale) != 1:
            raise NotImplementedError("o_scale: outputs are not quantised")
        if core.rows_differ(q, self):
            raise ValueError(f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1] ({self._rows_total}). The number of rows of q must be the one planned.")
        block = None
        if self._use_token_head_sf:
            k_sf, v_sf = _token_head_scales(kv_cache_sf, self._kv_layout)
            k_scale, v_scale = k_sf * k_scale, v_sf * v_scale
        elif self._kv_dtype == "fp4_e2m1":
            if kv_cache_sf is None:
                raise ValueError("kv_cache_sf must be provided for NVFP4 KV cache.")
            k, v = arrays.retype(k, "fp4_e2m1"), arrays.retype(v, "fp4_e2m1")
            block = tuple(arrays.retype(x, "fp8_e4m3") for x in kv_cache_sf)
        if self._kv_layout == "HND":
            k, v = arrays.permute(k, (1, 0, 2)), arrays.permute(v, (1, 0, 2))
            block = block and tuple(arrays.permute(x, (1, 0, 2)) for x in block)
        self._check_query(q, k)
        sinks = own = None
        if self._jit_sink and args:
            (sinks, own), args = self._sink_arguments(args, sinks), ()
        if args:
            q_scale, k_scale, v_scale = (core._product(a, b) for a, b in zip(tuple(args) + (None,) * 3, (q_scale, k_scale, v_scale)))
        if self._q_dtype.startswith("fp8"):
            q, q_scale = _upcast_query(q, q_scale, self._o_dtype)
        self._take_options(own)
        return core.run(self._attention, q, k, v, sinks=sinks, out=out, lse=lse, return_lse=return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
                        args=block and {"k_block_scale": block[0], "v_block_scale": block[1]}, lse_offset=self._lse_offset)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(self, q, k, v, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, sm_scale=None,
                rope_scale=None, rope_theta=None):
        """Deprecated: run() with the options of plan() said again. As upstream's, they stay for later runs, `causal` among them, until the next plan()."""
        self._planned()
        self._respec(causal=causal, pos_encoding_mode=pos_encoding_mode, window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
                     rope_scale=rope_scale, rope_theta=rope_theta)
        return self.run(q, k, v)

    def forward_return_lse(self, q, k, v, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None,
                           sm_scale=None, rope_scale=None, rope_theta=None):
        """Deprecated: run_return_lse() with the options of plan() said again, which stay as forward()'s do."""
        self._planned()
        self._respec(causal=causal, pos_encoding_mode=pos_encoding_mode, window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
                     rope_scale=rope_scale, rope_theta=rope_theta)
        return self.run(q, k, v, return_lse=True)


__all__ = ["BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper", "single_prefill_with_kv_cache",
           "single_prefill_with_kv_cache_return_lse", "single_prefill_with_kv_cache_with_jit_module"]
