# SPDX-License-Identifier: Apache-2.0
"""Merging of attention states, and batches that share prefixes."""

import math

import numpy as np

from .. import Batch, merge
from . import _arrays as arrays
from . import _core as core
from .prefill import BatchPrefillWithPagedKVCacheWrapper, _Wrapper, single_prefill_with_kv_cache
from .utils import check_kv_layout, unpack_paged_kv_cache


def _f32(x):
    return x if arrays.dtype_of(x) == "f32" else arrays.cast(x, "f32")


def merge_state(v_a, s_a, v_b, s_b):
    """Merges two states of the same rows over disjoint keys: v [rows, heads, dim], s [rows, heads] in base 2. Returns (v, s)."""
    v, s = arrays.empty(tuple(v_a.shape), arrays.dtype_of(v_a), v_a), arrays.empty(tuple(s_a.shape), "f32", s_a)
    if core.is_compiled(v_a):
        arrays.torch_of(v_a).ops.foveal.merge_state.default(v_a, _f32(s_a), v_b, _f32(s_b), v, s, True)
        return v, s
    merge(core.context_for(arrays.device_of(v_a)), [v_a, v_b], [_f32(s_a), _f32(s_b)], v, s, lse_base2=True)
    return v, s


def merge_state_in_place(v, s, v_other, s_other, mask=None):
    """Merges the other state into (v, s). mask [rows]: rows where it is False stay as they are."""
    if mask is None and core.is_compiled(v):
        for x, new in zip((v, s), merge_state(v, s, v_other, s_other)):
            x.copy_(new)
        return
    if mask is None:
        merge(core.context_for(arrays.device_of(v)), [v, v_other], [s, _f32(s_other)], v, s, lse_base2=True)
        return
    if tuple(mask.shape) != (v.shape[0],):
        raise ValueError(f"mask has the shape {tuple(mask.shape)}; expected {(v.shape[0],)}")
    new_v, new_s = merge_state(v, s, v_other, s_other)
    torch = arrays.torch_of(v)
    if torch is not None:
        keep = arrays.to_device(mask, v) != 0
        v.copy_(torch.where(keep[:, None, None], new_v, v))
        s.copy_(torch.where(keep[:, None], new_s, s))
        return
    keep = np.asarray(mask) != 0
    inner, new = (v.array, new_v.array) if hasattr(v, "array") else (v, new_v)
    inner[keep] = new[keep]
    s[keep] = new_s[keep]


def merge_states(v, s):
    """Merges states v [rows, states, heads, dim], s [rows, states, heads] in base 2. Returns (v [rows, heads, dim], s [rows, heads]):
    of no states 0 and -inf."""
    if core.is_compiled(v):
        return arrays.torch_of(v).ops.foveal.merge_states(v, s)
    rows, states, heads, dim = v.shape
    out, lse = arrays.empty((rows, heads, dim), arrays.dtype_of(v), v), arrays.empty((rows, heads), "f32", v)
    if states == 0:
        out[:], lse[:] = 0, -math.inf
        return out, lse
    s = _f32(s)
    merge(core.context_for(arrays.device_of(v)), [arrays.index(v, (slice(None), i)) for i in range(states)], [s[:, i] for i in range(states)], out, lse,
          lse_base2=True)
    return out, lse


# ---- several levels in one plan ----


class MultiLevelCascadeAttentionWrapper(_Wrapper):
    """Rows that read several page lists: level 0 is shared by most, the last one is each request's own. All levels are segments of one plan: one launch and no
    merging in between. Masks and positions that count within a level (windows, RoPE, ALiBi) take a plan per level instead, and merges."""

    def __init__(self, num_levels, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf_arr=None, paged_kv_indptr_buf_arr=None,
                 paged_kv_indices_buf_arr=None, paged_kv_last_page_len_buf_arr=None):
        super().__init__(float_workspace_buffer, kv_layout, "auto")
        self._num_levels = num_levels
        self._use_cuda_graph = use_cuda_graph
        self._buffers = [qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr]
        if use_cuda_graph and any(x is None or len(x) != num_levels for x in self._buffers):
            raise ValueError(f"CUDA graph mode needs the buffers of all {num_levels} levels")
        self._levels = None
        self._segmented = False

    def plan(self, qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
             causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None, rope_scale=None,
             rope_theta=None, q_data_type="float16", kv_data_type=None):
        """Plans a step. Per level: row offsets (the rows of each page list), page table. `causal` is the last level's."""
        if any(len(x) != self._num_levels for x in (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)):
            raise ValueError(f"the wrapper was made for {self._num_levels} levels")
        self._segmented = not self._use_cuda_graph and pos_encoding_mode == "NONE" and window_left < 0 and self._num_levels <= 8
        options = dict(pos_encoding_mode=pos_encoding_mode, sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap, rope_scale=rope_scale,
                       rope_theta=rope_theta, q_data_type=q_data_type, kv_data_type=kv_data_type)
        if self._segmented:
            self._plan_segments(qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
                                causal, sm_scale, logits_soft_cap, q_data_type, kv_data_type)
            return
        if self._levels is None:
            self._levels = [self._level(i) for i in range(self._num_levels)]
        for i, wrapper in enumerate(self._levels):
            wrapper.plan(qo_indptr_arr[i], paged_kv_indptr_arr[i], paged_kv_indices_arr[i], paged_kv_last_page_len[i], num_qo_heads, num_kv_heads, head_dim,
                         page_size, causal=causal and i == self._num_levels - 1, **options)

    begin_forward = plan

    def _level(self, i):
        buffers = [x[i] for x in self._buffers] if self._use_cuda_graph else [None] * 4
        return BatchPrefillWithPagedKVCacheWrapper(self._float_workspace_buffer, self._kv_layout, self._use_cuda_graph, *buffers)

    def _plan_segments(self, qo_arr, indptr_arr, indices_arr, last_arr, num_qo_heads, num_kv_heads, head_dim, page_size, causal, sm_scale, cap, q_type, kv_type):
        """Levels lie one behind the other on the line of positions. Rows sit behind all keys of earlier levels, however few keys the last one has."""
        rows = arrays.host_ints(qo_arr[-1])
        total = int(rows[-1])
        columns = {name: [] for name in ("row_first", "num_rows", "first_page", "num_pages", "num_keys", "first_position")}
        base, entries, tokens = 0, 0, 0
        for i in range(self._num_levels):
            qo, indptr = arrays.host_ints(qo_arr[i]), arrays.host_ints(indptr_arr[i])
            if int(qo[-1]) != total:
                raise ValueError(f"level {i} has {int(qo[-1])} rows; the last level has {total}")
            lengths = core.paged_lengths(indptr, arrays.host_ints(last_arr[i]), page_size)
            last_level = i == self._num_levels - 1
            if last_level:
                base += int((rows[1:] - rows[:-1]).max()) if len(rows) > 1 else 0
                positions = np.repeat(base + lengths - rows[1:], rows[1:] - rows[:-1]) + np.arange(total)
            columns["row_first"].append(qo[:-1])
            columns["num_rows"].append(qo[1:] - qo[:-1])
            columns["first_page"].append(indptr[:-1] + entries)
            columns["num_pages"].append(indptr[1:] - indptr[:-1])
            columns["num_keys"].append(lengths)
            columns["first_position"].append(np.full(len(lengths), base))
            entries += int(indptr[-1])
            tokens += int(lengths.sum())
            base += int(lengths.max()) if len(lengths) else 0
        segments = {name: np.concatenate(x).astype(np.int64) for name, x in columns.items()}
        ids = self._one_list([arrays.index(x, slice(int(arrays.host_ints(p)[-1]))) for x, p in zip(indices_arr, indptr_arr)])
        self._types = self._set_dtypes(q_type, kv_type, None)
        spec = self._plan_spec(num_q_heads=num_qo_heads, num_kv_heads=num_kv_heads, dim_qk=head_dim, dim_v=head_dim, sm_scale=sm_scale, causal=causal,
                               logits_soft_cap=cap)
        batch = dict(rows=[0, total], row_positions=positions.astype(np.int32), page_size=page_size,
                     page_ids=ids if self._device == "cpu" else (None, ids), segments=segments)
        need = core.Need(1, total, max(tokens, 1), max(entries, 1), len(segments["num_keys"]), total * self._num_levels, self._num_levels)
        self._rows_total = total
        self._again = batch
        stream = core.stream_of(self._float_workspace_buffer)
        self._attention.update(spec, Batch(num_pages=self._pool.plan(ids, entries), **batch), need, core.Mode(), stream)

    def _one_list(self, lists):
        """The page ids of all levels, one behind the other, where kernels read them."""
        if self._device == "cpu":
            return np.concatenate([arrays.host_ints(x) for x in lists])
        lists = [arrays.to_device(x, self._float_workspace_buffer) for x in lists]
        return arrays.torch_of(lists[0]).cat(lists)

    def run(self, q, paged_kv_cache, return_lse=False):
        """One layer. All levels lie in one cache."""
        if self._segmented:
            self._check_query(q)
            k, v = unpack_paged_kv_cache(paged_kv_cache, self._kv_layout)
            if core.rows_differ(q, self):
                raise ValueError(f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1] ({self._rows_total})")
            if self._pool.differs(k.shape[0]):
                a = self._attention
                a.update(a.spec, Batch(num_pages=k.shape[0], **self._again), a.need, a.mode, a.stream)
            return core.run(self._attention, q, k, v, return_lse=return_lse)
        if self._levels is None:
            raise ValueError("call plan() before run()")
        out, lse = self._levels[-1].run(q, paged_kv_cache, return_lse=True)
        for wrapper in self._levels[:-1]:
            merge_state_in_place(out, lse, *wrapper.run(q, paged_kv_cache, return_lse=True))
        return (out, lse) if return_lse else out

    forward = run

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffers=None):
        core.check_workspace(float_workspace_buffer, "float_workspace_buffer")
        self._float_workspace_buffer = float_workspace_buffer


# ---- the older wrappers: one prefix for all, not in pages ----


class _SharedPrefix:
    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        check_kv_layout(kv_layout)
        self._kv_layout = kv_layout
        self._wrapper = self._make(float_workspace_buffer, kv_layout)

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer=None):
        self._wrapper.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def end_forward(self):
        """Deprecated: does nothing."""

    def _shared(self, q, k_shared, v_shared, **options):
        return single_prefill_with_kv_cache(q, k_shared, v_shared, causal=False, kv_layout=self._kv_layout, return_lse=True, **options)


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Decode with a prefix that all requests share, k_shared and v_shared [keys, kv_heads, dim], and pages of their own."""

    @staticmethod
    def _make(workspace, layout):
        from .decode import BatchDecodeWithPagedKVCacheWrapper

        return BatchDecodeWithPagedKVCacheWrapper(workspace, layout)

    def begin_forward(self, unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, data_type="float16"):
        """Plans the requests' own pages."""
        self._wrapper.plan(unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type=data_type,
                           kv_data_type=data_type)

    plan = begin_forward

    def forward(self, q, k_shared, v_shared, unique_kv_cache, allow_fp16_qk_reduction=False, sm_scale=None, rope_scale=None, rope_theta=None):
        """One layer: q [batch, heads, dim]."""
        options = dict(sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta)
        out, lse = self._shared(q, k_shared, v_shared, **options)
        merge_state_in_place(out, lse, *self._wrapper.forward_return_lse(q, unique_kv_cache, pos_encoding_mode="NONE", **options))
        return out

    run = forward


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Prefill with a prefix that all requests share, k_shared and v_shared [keys, kv_heads, dim], and pages of their own."""

    _make = staticmethod(BatchPrefillWithPagedKVCacheWrapper)
    _causal = False                     # forward() says it, later plans expect it

    def begin_forward(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
                      q_data_type="float16", kv_data_type=None):
        """Plans the requests' own pages."""
        self._wrapper.plan(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
                           causal=self._causal, q_data_type=q_data_type, kv_data_type=kv_data_type)

    plan = begin_forward

    def forward(self, q, k_shared, v_shared, unique_kv_cache, causal=False, use_fp16_qk_reduction=False, sm_scale=None, rope_scale=None, rope_theta=None):
        """One layer: q [rows, heads, dim]. `causal` is that of the requests' own keys."""
        self._causal = causal
        options = dict(sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta)
        out, lse = self._shared(q, k_shared, v_shared, **options)
        merge_state_in_place(out, lse, *self._wrapper.forward_return_lse(q, unique_kv_cache, causal=causal, pos_encoding_mode="NONE", **options))
        return out

    run = forward


__all__ = ["BatchDecodeWithSharedPrefixPagedKVCacheWrapper", "BatchPrefillWithSharedPrefixPagedKVCacheWrapper", "MultiLevelCascadeAttentionWrapper",
           "merge_state", "merge_state_in_place", "merge_states"]
