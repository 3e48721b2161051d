# SPDX-License-Identifier: Apache-2.0
"""Decode attention: one row (or a few) a request."""

import functools

import numpy as np

from . import _arrays as arrays
from . import _core as core
from .page import get_seq_lens  # noqa: F401  engines import it from here
from .prefill import _CachedModule, _check_axes, _check_token_head, _jit_sink, _offsets, _PagedWrapper, _single
from .utils import check_arrays, check_kv_layout, check_pos_encoding_mode, check_sizes, fixed_batch_size, unpack_paged_kv_cache


def single_decode_with_kv_cache(q, k, v, kv_layout="NHD", pos_encoding_mode="NONE", use_tensor_cores=False, q_scale=None, k_scale=None, v_scale=None,
                                window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, return_lse=False):
    """Attention of one row: q [heads, dim], k and v [kv_len, kv_heads, dim] (NHD) or [kv_heads, kv_len, dim] (HND). Returns o [heads, dim_v], and lse
    [heads] float32 in base 2 with return_lse."""
    check_kv_layout(kv_layout)
    check_pos_encoding_mode(pos_encoding_mode)
    check_arrays(q=q, k=k, v=v)
    if kv_layout == "HND":
        k, v = arrays.permute(k, (1, 0, 2)), arrays.permute(v, (1, 0, 2))
    if core.is_compiled(q):
        scales = [core.as_tensor(x, q) for x in (q_scale, k_scale, v_scale)]
        made = arrays.torch_of(q).ops.foveal.single_attention(q, k, v, None, None, *scales, True, return_lse, False, kv_layout, pos_encoding_mode, sm_scale,
                                                              window_left, logits_soft_cap, rope_scale, rope_theta, arrays.dtype_of(q))
        return made if return_lse else made[0]
    if len(q.shape) != 2:
        raise ValueError(f"q has {len(q.shape)} axes; expected 2: heads, dim")
    _check_axes(k=k, v=v)
    q = arrays.index(q, (None,))
    check_sizes(q.shape[1], k.shape[1], head_dim=q.shape[2])
    name = arrays.dtype_of(q)
    spec = core.make_spec(name, arrays.dtype_of(k), name, q.shape[1], k.shape[1], q.shape[2], v.shape[2], sm_scale=sm_scale, window_left=window_left,
                          logits_soft_cap=logits_soft_cap, pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta)
    made = core.run(_single(q, spec, 1, k.shape[0]), q, k, v, return_lse=return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
                    lse_offset=float(k.shape[0] - 1))
    return (arrays.index(made[0], 0), made[1][0]) if return_lse else arrays.index(made, 0)


def single_decode_with_kv_cache_with_jit_module(*args, **kwargs):
    raise NotImplementedError("single_decode_with_kv_cache_with_jit_module: CUDA C++ variants are not taken; see foveal.Variant")


class BatchDecodeWithPagedKVCacheWrapper(_PagedWrapper):
    """Decode attention for a batch of requests over pages.

    plan() once a step, run() once a layer. float_workspace_buffer says which device is meant; its memory is not used. In CUDA-graph mode the three index buffers
    must be given and the batch size is theirs."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False, paged_kv_indptr_buffer=None,
                 paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend="auto", jit_args=None, jit_kwargs=None):
        super().__init__(float_workspace_buffer, kv_layout, backend)
        self._jit_sink = _jit_sink(jit_args)
        self._use_cuda_graph = use_cuda_graph
        self._use_tensor_cores = use_tensor_cores
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer
        self._q_len = None
        self._cached_module = _CachedModule(self)
        self._jit_module = None
        if use_cuda_graph:
            self._fixed_batch_size = fixed_batch_size(paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)

    @property
    def use_tensor_cores(self):
        return self._use_tensor_cores

    @property
    def resolved_backend(self):
        """The name of a backend, as upstream has them."""
        return "fa2" if self._backend == "auto" else self._backend

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode="NONE", window_left=-1,
             logits_soft_cap=None, q_data_type="float16", kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None, rope_scale=None,
             rope_theta=None, non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False, q_len_per_req=1,
             window_right=0, is_causal=None, use_token_head_sf=False):
        """Plans a step: indptr [batch + 1], indices and last_page_len [batch] are the page table. q_len_per_req rows a request, the last of its keys, causal.
        use_token_head_sf as for the prefill wrapper."""
        if is_causal is not None and bool(is_causal) != (q_len_per_req > 1):
            raise NotImplementedError("is_causal: the mask follows from q_len_per_req")
        self._check_q_len(q_len_per_req)
        self._plan(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode, window_left, logits_soft_cap, q_data_type,
                   kv_data_type, o_data_type, data_type, sm_scale, rope_scale, rope_theta, fixed_split_size, disable_split_kv, q_len_per_req, window_right,
                   None, self._use_cuda_graph)
        if use_token_head_sf or self._use_token_head_sf:
            _check_token_head(self, use_token_head_sf)

    begin_forward = plan

    def _check_q_len(self, q_len):
        if q_len < 1:
            raise ValueError(f"q_len_per_req must be >= 1, got {q_len}")
        if self._use_cuda_graph and self._q_len is not None and q_len != self._q_len:
            raise ValueError(f"q_len_per_req {q_len}: it is frozen at {self._q_len} in CUDA graph mode")
        if q_len == 1:
            return
        if not self._use_tensor_cores:
            raise ValueError(f"q_len_per_req {q_len} > 1 requires use_tensor_cores=True")
        if self._backend not in ("auto", "fa2"):
            raise NotImplementedError(f"q_len_per_req > 1 is of the fa2 backend, not of {self._backend}")

    def _plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode, window_left, logits_soft_cap,
              q_data_type, kv_data_type, o_data_type, data_type, sm_scale, rope_scale, rope_theta, fixed_split_size, disable_split_kv, q_len, window_right,
              indptr_host, copy):
        choice = (num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode, window_left, logits_soft_cap, q_data_type, kv_data_type, o_data_type,
                  data_type, sm_scale, rope_scale, rope_theta, fixed_split_size, disable_split_kv, q_len, window_right)
        spec, mode = self._decide(choice)
        host = _offsets(indptr if indptr_host is None else indptr_host, "indptr")
        n = len(host) - 1
        lengths, last = None, None
        if page_size == 1:
            lengths = host[1:] - host[:-1]
        else:
            last = arrays.host_ints(last_page_len, "last_page_len")
            if len(last) != n:
                raise ValueError(f"last_page_len has {len(last)} entries; indptr speaks of {n} requests")
            if q_len > 1 or spec.alibi:
                lengths, last = core.paged_lengths(host, last, page_size), None
        if q_len > 1 and n and int(lengths.min()) < q_len:
            raise ValueError(f"q_len_per_req is {q_len} but a request has {int(lengths.min())} keys: its first rows would have an empty KV range")
        if copy:
            self._copy_tables(indptr, indices, last_page_len)
        if self._use_cuda_graph:
            self._check_batch_size(n)
            indices = self._paged_kv_indices_buf
        self._batch_size, self._q_len = n, q_len
        rows = None if q_len == 1 else np.arange(n + 1, dtype=np.int32) * q_len
        self._keep_lse_offset(spec, lengths, rows)
        self._update(spec, rows, host, lengths, indices, page_size, mode, last=last)
        self._plan_info = [n, n * q_len, 0, 16] + [0] * 11

    def _choose(self, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode, window_left, logits_soft_cap, q_data_type, kv_data_type, o_data_type,
                data_type, sm_scale, rope_scale, rope_theta, fixed_split_size, disable_split_kv, q_len, window_right):
        """Checks what plan() is told beside the page table, and makes the spec and the mode of it."""
        check_pos_encoding_mode(pos_encoding_mode)
        check_sizes(num_qo_heads, num_kv_heads, head_dim=head_dim, page_size=page_size)
        if window_right not in (0, -1):
            raise NotImplementedError("window_right")
        if fixed_split_size is not None and fixed_split_size > 0 and not self._use_tensor_cores:
            raise ValueError("fixed_split_size is only supported by tensor core decode for now.")
        if data_type is not None:
            q_data_type = data_type if q_data_type is None else q_data_type
            kv_data_type = data_type if kv_data_type is None else kv_data_type
        self._types = self._set_dtypes(q_data_type, kv_data_type, o_data_type)
        self._window_left, self._sm_scale, self._logits_soft_cap = window_left, sm_scale, logits_soft_cap
        spec = self._plan_spec(
            num_q_heads=num_qo_heads, num_kv_heads=num_kv_heads, dim_qk=head_dim, dim_v=head_dim, sm_scale=sm_scale, causal=q_len > 1, window_left=window_left,
            logits_soft_cap=logits_soft_cap, pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta)
        return spec, core.split_mode(q_len == 1, fixed_split_size, disable_split_kv, page_size)

    def _plan_from_module(self, *args):
        """What an engine's own fast plan calls on the module: offsets on the host; the data already lies in the buffers."""
        again = self._again
        host = arrays.host_ints(args[4] if len(args) >= 16 else args[3])
        if len(args) >= 16:
            lengths = arrays.host_ints(args[5])
        else:
            page_size = args[7]
            lengths = core.paged_lengths(host, 1 if page_size == 1 else arrays.host_ints(self._paged_kv_last_page_len_buf), page_size)
        spec = self._make_spec(self._told)
        rows = None if self._q_len == 1 else np.arange(len(host), dtype=np.int32) * self._q_len
        self._batch_size = len(host) - 1
        self._update(spec, rows, host, lengths, self._paged_kv_indices_buf, again[5], again[6])
        return self._plan_info

    def _wrong_rows(self, q):
        return f"q has {q.shape[0]} rows; expected batch_size * q_len_per_req = {self._batch_size} * {self._q_len}"

    def run(self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False, enable_pdl=None, window_left=None,
            sinks=None, q_len_per_req=None, skip_softmax_threshold_scale_factor=None, kv_cache_sf=None):
        """One layer: q [batch * q_len_per_req, heads, dim]; the cache as for the prefill wrapper. Returns out, and lse in base 2 with return_lse."""
        self._planned()
        if window_left is not None and window_left != self._window_left:
            raise ValueError(f"window_left {window_left} differs from the planned one, {self._window_left}")
        if not self._use_tensor_cores and isinstance(paged_kv_cache, (tuple, list)):
            k, v = unpack_paged_kv_cache(paged_kv_cache, self._kv_layout)
            if arrays.strides_of(k) != arrays.strides_of(v) and k.shape == v.shape:
                raise ValueError("k and v must have identical strides with use_tensor_cores=False")
        own = None
        if self._jit_sink and args:
            (sinks, own), args = self._sink_arguments(args, sinks), ()
        if args:
            q_scale, k_scale, v_scale = (core._product(a, b) for a, b in zip(tuple(args) + (None,) * 3, (q_scale, k_scale, v_scale)))
        return self._run_paged(q, paged_kv_cache, own, kv_cache_sf=kv_cache_sf, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
                               return_lse=return_lse, sinks=sinks)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(self, q, paged_kv_cache, pos_encoding_mode="NONE", q_scale=None, k_scale=None, v_scale=None, window_left=-1, logits_soft_cap=None,
                sm_scale=None, rope_scale=None, rope_theta=None):
        """Deprecated: run() with the options of plan() said again. As upstream's, they stay for later runs, until the next plan()."""
        self._planned()
        self._respec(pos_encoding_mode=pos_encoding_mode, window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale,
                     rope_theta=rope_theta)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    def forward_return_lse(self, q, paged_kv_cache, pos_encoding_mode="NONE", q_scale=None, k_scale=None, v_scale=None, window_left=-1, logits_soft_cap=None,
                           sm_scale=None, rope_scale=None, rope_theta=None):
        """Deprecated: run_return_lse() with the options of plan() said again, which stay as forward()'s do."""
        self._planned()
        self._respec(pos_encoding_mode=pos_encoding_mode, window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale,
                     rope_theta=rope_theta)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The decode wrapper in CUDA-graph mode."""

    def __init__(self, workspace_buffer, indptr_buffer, indices_buffer, last_page_len_buffer, kv_layout="NHD", use_tensor_cores=False):
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer)


def fast_decode_plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode="NONE", window_left=-1,
                     logits_soft_cap=None, q_data_type=None, kv_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None,
                     non_blocking=True, fixed_split_size=None, disable_split_kv=False, q_len_per_req=1, global_override_indptr_cpu=None):
    """plan() of the decode wrapper for engines that keep its buffers filled themselves: nothing is copied into them, and with global_override_indptr_cpu
    (and pages of one token) nothing is read from the device."""
    if q_len_per_req > 1 and self._q_len is None and self._backend == "auto":
        raise ValueError("fast_decode_plan with q_len_per_req > 1 needs a prior plan() that chose the backend")
    self._check_q_len(q_len_per_req)
    if data_type is None and q_data_type is None:
        q_data_type = getattr(self, "_cached_q_data_type", None) or "float16"
        if kv_data_type is None:
            kv_data_type = getattr(self, "_cached_kv_data_type", None)
    if disable_split_kv is None:
        disable_split_kv = False
    self._plan(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode, window_left, logits_soft_cap, q_data_type,
               kv_data_type, None, data_type, sm_scale, rope_scale, rope_theta, fixed_split_size, disable_split_kv, q_len_per_req, 0,
               global_override_indptr_cpu, False)


_range_bufs = {}


def _get_range_buf(seq_len, device):
    """int32 0 .. seq_len - 1 on a torch device, kept."""
    import torch

    key = str(device)
    have = _range_bufs.get(key)
    if have is None or have.shape[0] < seq_len:
        have = _range_bufs[key] = torch.arange(max(seq_len, 1024), dtype=torch.int32, device=device)
    return have[:seq_len]


__all__ = ["BatchDecodeWithPagedKVCacheWrapper", "CUDAGraphBatchDecodeWithPagedKVCacheWrapper", "fast_decode_plan", "single_decode_with_kv_cache",
           "single_decode_with_kv_cache_with_jit_module"]
