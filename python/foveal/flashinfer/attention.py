# SPDX-License-Identifier: Apache-2.0
"""The unified wrapper, and paged attention with sinks."""

import functools

import numpy as np

from . import _arrays as arrays
from . import _core as core
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .prefill import BatchPrefillWithPagedKVCacheWrapper, _offsets, _PagedWrapper
from .utils import check_sizes


def _has_gpu():
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _bytes_on(device):
    if str(device) == "cpu":
        return np.empty(16, np.uint8)
    import torch

    return torch.empty(16, dtype=torch.uint8, device=device)


class BatchAttention(_PagedWrapper):
    """Prefill and decode of one batch in one plan."""

    def __init__(self, kv_layout="NHD", device="cuda"):
        place = np.empty(16, np.uint8)
        if str(device) != "cuda" or _has_gpu():         # the default, where there is no GPU, is the CPU
            place = _bytes_on(device)
        super().__init__(place, kv_layout, "auto")

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size, causal=False, sm_scale=None,
             logits_soft_cap=None, q_data_type="bfloat16", kv_data_type="bfloat16", use_profiler=False):
        """Plans a step: row offsets, page table, keys of each request."""
        check_sizes(num_qo_heads, num_kv_heads, head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo, page_size=page_size)
        rows, indptr, lengths = _offsets(qo_indptr, "qo_indptr"), _offsets(kv_indptr, "kv_indptr"), arrays.host_ints(kv_len_arr, "kv_len_arr")
        self._types = self._set_dtypes(q_data_type, kv_data_type, None)
        spec = self._plan_spec(num_q_heads=num_qo_heads, num_kv_heads=num_kv_heads, dim_qk=head_dim_qk, dim_v=head_dim_vo, sm_scale=sm_scale, causal=causal,
                               logits_soft_cap=logits_soft_cap)
        self._update(spec, rows, indptr, lengths, kv_indices, page_size, core.Mode())

    def run(self, q, kv_cache, out=None, lse=None, k_scale=None, v_scale=None, logits_soft_cap=0.0, profiler_buffer=None, kv_cache_sf=None):
        """One layer. Returns (out, lse), lse in base 2. logits_soft_cap: of this run, 0 takes the planned one."""
        self._planned()
        own = {"logits_soft_cap": float(logits_soft_cap)} if logits_soft_cap and logits_soft_cap > 0 else None
        return self._run_paged(q, kv_cache, own, kv_cache_sf=kv_cache_sf, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, return_lse=True)


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Paged attention with a learned score per head in the denominator."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None, paged_kv_indptr_buf=None, paged_kv_indices_buf=None,
                 paged_kv_last_page_len_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend="auto", pos_encoding_mode="NONE",
                 use_fp16_qk_reduction=False, q_data_type="bfloat16", kv_data_type="bfloat16", head_dim_qk=128, head_dim_vo=128, window_left=-1):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf,
                         custom_mask_buf, mask_indptr_buf, backend)
        self._jit_sink = True

    def run(self, q, paged_kv_cache, sink=None, sm_scale=None, *, sinks=None, **options):
        """One layer: sink [heads] float32, in score units; sm_scale of this run, None takes the planned one. Options are the prefill wrapper's."""
        return super().run(q, paged_kv_cache, sink, sm_scale, sinks=sinks, **options)

    run_return_lse = functools.partialmethod(run, return_lse=True)


class BatchDecodeWithAttentionSinkWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """Decode with a learned score per head in the denominator."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", backend="auto", q_data_type="bfloat16", kv_data_type="bfloat16", head_dim_qk=128, head_dim_vo=128,
                 window_left=-1, **options):
        super().__init__(float_workspace_buffer, kv_layout, use_tensor_cores=True, backend=backend, **options)
        self._jit_sink = True

    def plan(self, *args, **options):
        """As the decode wrapper's, without an encoding of positions."""
        super().plan(*args, **options)
        if self._told["pos_encoding_mode"] != "NONE":
            raise NotImplementedError("Attention-sink decode applies no position encoding; pos_encoding_mode must be 'NONE'.")

    begin_forward = plan

    def run(self, q, paged_kv_cache, sink=None, sm_scale=None, *, sinks=None, **options):
        """One layer: sink [heads] float32, in score units; sm_scale of this run, None takes the planned one. Options are the decode wrapper's."""
        return super().run(q, paged_kv_cache, sink, sm_scale, sinks=sinks, **options)

    run_return_lse = functools.partialmethod(run, return_lse=True)


__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper", "BatchDecodeWithAttentionSinkWrapper"]
