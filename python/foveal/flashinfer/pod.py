# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode at the same time (POD)."""

import numpy as np

from . import _arrays as arrays
from . import _core as core
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache


class PODWithPagedKVCacheWrapper:
    """One prefill request, keys ragged, beside a batch of decode requests over pages."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None,
                 paged_kv_last_page_len_buffer=None, jit_args=None):
        self._decode = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, True, paged_kv_indptr_buffer, paged_kv_indices_buffer,
                                                          paged_kv_last_page_len_buffer, jit_args=jit_args)
        self._kv_layout = kv_layout
        self._masked = None             # of decode rows with masks: made by the first of them
        self._told = None

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer=None):
        self._decode.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    @property
    def is_cuda_graph_enabled(self):
        return self._decode.is_cuda_graph_enabled

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode="NONE", window_left=-1,
             q_data_type="float16", kv_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True):
        """Plans the decode requests."""
        options = dict(pos_encoding_mode=pos_encoding_mode, window_left=window_left, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta)
        heads = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._decode.plan(indptr, indices, last_page_len, *heads, q_data_type=q_data_type, kv_data_type=kv_data_type, data_type=data_type, **options)
        self._told = (indptr, indices, last_page_len), heads, options

    begin_forward = plan

    def _run_masked(self, q, cache, changes, masks, **options):
        """The decode rows under masks of theirs: prefill requests of one row each, planned in each run."""
        tables, heads, told = self._told
        if self._decode.is_cuda_graph_enabled:
            raise NotImplementedError("custom_mask_d in CUDA graph mode: a mask belongs to a plan")
        if self._masked is None:
            self._masked = BatchPrefillWithPagedKVCacheWrapper(self._decode._float_workspace_buffer, self._kv_layout)
        rows = np.arange(arrays.size_of(tables[0]), dtype=np.int32)
        self._masked.plan(rows, *tables, *heads, q_data_type=self._decode._cached_q_data_type, kv_data_type=self._decode._cached_kv_data_type, **masks,
                          **{**told, **changes})
        return self._masked.run(q, cache, **options)

    def run(self, q_p, k_p, v_p, q_d, paged_kv_cache_d, custom_mask_p=None, packed_custom_mask_p=None, causal_p=False, kv_layout_p="NHD",
            pos_encoding_mode_p="NONE", sm_scale_p=None, window_left_p=-1, rope_scale_p=None, rope_theta_p=None, return_lse_p=False, custom_mask_d=None,
            packed_custom_mask_d=None, causal_d=False, kv_layout_d="NHD", pos_encoding_mode_d="NONE", sm_scale_d=None, window_left_d=-1, rope_scale_d=None,
            rope_theta_d=None, q_scale=None, k_scale=None, v_scale=None, return_lse_d=False, use_fp16_qk_reduction=False, enable_pdl=None, *args):
        """One layer of both. Options that end in _d are the decode part's in this run, instead of the planned ones. custom_mask_d: bool, the keys of each decode
        request one after another; packed_custom_mask_d: its bits, low first, each request from a byte border. Returns (out of the prefill, out of the decode),
        each with its lse where asked for."""
        prefill = single_prefill_with_kv_cache(
            q_p, k_p, v_p, custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p, causal=causal_p, kv_layout=kv_layout_p,
            pos_encoding_mode=pos_encoding_mode_p, sm_scale=sm_scale_p, window_left=window_left_p, rope_scale=rope_scale_p, rope_theta=rope_theta_p,
            return_lse=return_lse_p)
        changes = {}
        if pos_encoding_mode_d != "NONE":
            changes["pos_encoding_mode"] = pos_encoding_mode_d
        if sm_scale_d is not None:
            changes["sm_scale"] = sm_scale_d
        if window_left_d >= 0:
            changes["window_left"] = window_left_d
        if rope_scale_d is not None:
            changes["rope_scale"] = rope_scale_d
        if rope_theta_d is not None:
            changes["rope_theta"] = rope_theta_d
        options = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse_d)
        self._decode._planned()
        if custom_mask_d is not None or packed_custom_mask_d is not None:
            masks = dict(custom_mask=custom_mask_d, packed_custom_mask=packed_custom_mask_d)
            return prefill, self._run_masked(q_d, paged_kv_cache_d, changes, masks, **options)
        return prefill, self._decode._run_paged(q_d, paged_kv_cache_d, core.plain_words(changes), **options)

    forward = run

    def end_forward(self):
        """Deprecated: does nothing."""


class BatchPODWithPagedKVCacheWrapper:
    """A batch of prefill requests beside a batch of decode requests, both over pages."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._decode = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._causal = False            # of the prefill part: run() says it, later plans expect it

    is_cuda_graph_enabled = False       # there is no such mode here

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer=None):
        for wrapper in (self._prefill, self._decode):
            wrapper.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def plan(self, qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p, qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d, num_qo_heads, num_kv_heads,
             head_dim, page_size, pos_encoding_mode="NONE", window_left=-1, q_data_type="float16", kv_data_type=None, data_type=None, sm_scale=None,
             rope_scale=None, rope_theta=None, non_blocking=True):
        """Plans both batches."""
        if data_type is not None:
            q_data_type = data_type if q_data_type is None else q_data_type
            kv_data_type = data_type if kv_data_type is None else kv_data_type
        options = dict(pos_encoding_mode=pos_encoding_mode, window_left=window_left, q_data_type=q_data_type, kv_data_type=kv_data_type, sm_scale=sm_scale,
                       rope_scale=rope_scale, rope_theta=rope_theta)
        heads = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._told = (qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p, *heads), options
        self._masked = False
        self._plan_prefill()
        self._decode.plan(qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d, *heads, **options)

    begin_forward = plan

    def _plan_prefill(self, **mask):
        where, options = self._told
        self._prefill.plan(*where, causal=self._causal, **options, **mask)

    def run(self, q_p, paged_kv_cache_p, q_d, paged_kv_cache_d, custom_mask_p=None, packed_custom_mask_p=None, causal_p=False, q_scale=None, k_scale=None,
            v_scale=None, return_lse=False, use_fp16_qk_reduction=False, enable_pdl=None):
        """One layer of both. A mask of the prefill part, as for BatchPrefillWithPagedKVCacheWrapper, is planned with in each run. Returns (out of the prefill, out
        of the decode), or a pair of (out, lse)."""
        self._prefill._planned()
        masked = custom_mask_p is not None or packed_custom_mask_p is not None
        self._causal = causal_p
        if masked or self._masked:              # a mask belongs to a plan; the run after it goes back
            self._masked = masked
            self._plan_prefill(custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p)
        own = None if causal_p == self._prefill._causal else {"causal": causal_p}
        scales = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)
        return self._prefill._run_paged(q_p, paged_kv_cache_p, own, **scales), self._decode.run(q_d, paged_kv_cache_d, **scales)

    forward = run

    def end_forward(self):
        """Deprecated: does nothing."""


__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]
