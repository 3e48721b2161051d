# SPDX-License-Identifier: Apache-2.0
"""Latent attention (DeepSeek's MLA) over two cache tensors, without a copy: keys are ckv | kpe, values are ckv."""

import functools
import math

import numpy as np

from .. import Batch
from . import _arrays as arrays
from . import _core as core
from .prefill import _offsets, _Wrapper
from .utils import check_arrays, check_sizes, fixed_batch_size, refuse_given


class BatchMLAPagedAttentionWrapper(_Wrapper):
    """MLA over pages: all query heads share one latent head."""

    def __init__(self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None, kv_len_arr=None, backend="auto"):
        super().__init__(float_workspace_buffer, "NHD", backend)
        self._use_cuda_graph = use_cuda_graph
        self._qo_indptr_buf, self._kv_indptr_buf, self._kv_indices_buf, self._kv_len_arr_buf = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        if use_cuda_graph:
            if any(x is None for x in (qo_indptr, kv_indptr, kv_indices, kv_len_arr)):
                raise ValueError("qo_indptr, kv_indptr, kv_indices and kv_len_arr should be tensors in CUDA graph mode")
            self._fixed_batch_size = len(kv_len_arr)

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_data_type,
             kv_data_type, use_profiler=False, *, lse_mode="none", query_layout=None, kv_cache_layout=None, output_dtype=None, max_q_len=None, **others):
        """Plans a step: row offsets qo_indptr, page table kv_indptr and kv_indices, keys of each request kv_len_arr. lse_mode changes nothing: a run says what
        it wants."""
        if lse_mode not in ("none", "base2", "basee"):
            raise ValueError(f"unsupported lse_mode {lse_mode!r}.")
        if "packed" in (query_layout, kv_cache_layout):
            raise NotImplementedError("packed queries and caches: trtllm_batch_decode_with_kv_cache_mla takes them")
        if output_dtype is not None and arrays.dtype_name(output_dtype) != arrays.dtype_name(q_data_type):
            raise NotImplementedError(f"output_dtype {output_dtype}: outputs have the queries' type")
        refuse_given(**others)
        q, kv = arrays.dtype_name(q_data_type), arrays.dtype_name(kv_data_type)
        if kv in ("fp8_e4m3", "fp8_e5m2") and q != "bf16":
            raise ValueError("an fp8 cache needs q_data_type=torch.bfloat16")
        check_sizes(num_heads, 1, head_dim_ckv=head_dim_ckv, page_size=page_size)
        rows, indptr, lengths = _offsets(qo_indptr, "qo_indptr"), _offsets(kv_indptr, "kv_indptr"), arrays.host_ints(kv_len_arr, "kv_len_arr")
        tables = ((self._qo_indptr_buf, qo_indptr), (self._kv_indptr_buf, kv_indptr), (self._kv_len_arr_buf, kv_len_arr))
        spec = self._spec(q, kv, num_heads, head_dim_ckv, head_dim_kpe, sm_scale=sm_scale, causal=bool(causal))
        self._plan_step(spec, rows, indptr, lengths, kv_indices, page_size, tables)

    def _spec(self, q, kv, num_heads, head_dim_ckv, head_dim_kpe, **words):
        self._q_dtype, self._kv_dtype, self._head_dim_ckv, self._head_dim_kpe = q, kv, head_dim_ckv, head_dim_kpe
        spec = core.make_spec(q, kv, q, num_heads, 1, head_dim_ckv + head_dim_kpe, head_dim_ckv, **words)
        return spec._replace(qk_tail=head_dim_kpe, v_in_k=True)

    def _plan_step(self, spec, rows, indptr, lengths, kv_indices, page_size, tables):
        """tables: what a graph's buffers are filled with, in pairs."""
        n, total, used = len(rows) - 1, int(rows[-1]), int(indptr[-1])
        if self._use_cuda_graph:
            self._fill_buffers(tables, kv_indices, n, total, page_size)
            kv_indices = self._kv_indices_buf
        self._rows_total = total
        batch = dict(rows=rows, lengths=lengths, page_size=page_size, page_indptr=indptr, page_ids=self._page_ids(kv_indices))
        self._again = batch
        need = core.Need(n, total, int(lengths.sum()), used)
        self._attention.update(spec, Batch(num_pages=self._pool.plan(kv_indices, used), **batch), need, core.Mode(), core.stream_of(self._float_workspace_buffer))

    def _page_ids(self, indices):
        if self._device == "cpu":
            return arrays.to_numpy(indices) if arrays.device_of(indices) != "cpu" else indices
        return (None, indices) if arrays.device_of(indices) == self._device else (indices, arrays.to_device(indices, self._float_workspace_buffer))

    def _fill_buffers(self, tables, kv_indices, n, total, page_size):
        if n != self._fixed_batch_size:
            raise ValueError(f"The batch size should be fixed in cudagraph mode, the runtime batch size {n} mismatches the batch size "
                             f"{self._fixed_batch_size} set during initialization")
        for buffer, x in tables:
            buffer[:] = arrays.to_device(x, buffer)
        if kv_indices is not self._kv_indices_buf:
            self._kv_indices_buf[:len(kv_indices)] = arrays.to_device(kv_indices, self._kv_indices_buf)
        if self._attention.frozen is None:
            room = len(self._kv_indices_buf)
            self._attention.frozen = core.Need(n, max(total, 1), max(room * page_size, 1), max(room, 1))

    def _check_types(self, q_nope, q_pe, ckv_cache, kpe_cache, has_kpe):
        wanted = [("q_nope", q_nope, self._q_dtype), ("ckv_cache", ckv_cache, self._kv_dtype)]
        if has_kpe:
            wanted += [("q_pe", q_pe, self._q_dtype), ("kpe_cache", kpe_cache, self._kv_dtype)]
        for name, x, dtype in wanted:
            check_arrays(**{name: x})
            if arrays.dtype_of(x) != dtype:
                raise ValueError(f"{name}.dtype is {arrays.dtype_of(x)}; plan() was told {dtype}")

    def _scales(self, q_pe, ckv_scale, ckv_scale_arr, kpe_scale, has_kpe):
        """One scale for the keys of both tensors: what kpe's differs by goes to its queries."""
        fp8 = self._kv_dtype.startswith("fp8")
        if fp8 and (ckv_scale is None) == (ckv_scale_arr is None):
            raise ValueError("Exactly one of ckv_scale or ckv_scale_arr must be given with an fp8 cache")
        if ckv_scale_arr is not None:
            if len(ckv_scale_arr.shape) != 3 or ckv_scale_arr.shape[2] * 128 != self._head_dim_ckv:
                raise ValueError(f"Invalid shape of ckv_scale_arr {tuple(ckv_scale_arr.shape)}; it is [pages, page_size, head_dim_ckv / 128]")
            raise NotImplementedError("ckv_scale_arr: scales per token and group of 128 elements")
        if fp8 and has_kpe and kpe_scale is None:
            raise ValueError("kpe_scale must be given with an fp8 cache")
        if not fp8:
            return q_pe, None
        ckv_scale = arrays.as_float(ckv_scale)
        if has_kpe:
            ratio = arrays.as_float(kpe_scale) / ckv_scale
            if ratio != 1:
                q_pe = arrays.cast(q_pe * ratio, self._q_dtype)
        return q_pe, ckv_scale

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False, profiler_buffer=None, kv_len=None, page_table=None,
            return_lse_base_on_e=False, o_scale=None, *, ckv_scale=None, ckv_scale_arr=None, kpe_scale=None, skip_softmax_threshold_scale_factor=None, **others):
        """One layer: q_nope [rows, heads, ckv], q_pe [rows, heads, kpe], ckv_cache [pages, page, ckv], kpe_cache [pages, page, kpe]. Returns out [rows, heads,
        ckv], and lse [rows, heads] with return_lse, in base 2 or natural."""
        self._planned()
        refuse_given(**others)
        if o_scale is not None and arrays.as_float(o_scale) != 1:
            raise NotImplementedError("o_scale: outputs are not quantised")
        if core.rows_differ(q_nope, self):
            raise ValueError(f"q_nope.shape[0] ({q_nope.shape[0]}) does not match qo_indptr[-1] ({self._rows_total})")
        has_kpe = self._head_dim_kpe > 0
        self._check_types(q_nope, q_pe, ckv_cache, kpe_cache, has_kpe)
        q_pe, k_scale = self._scales(q_pe, ckv_scale, ckv_scale_arr, kpe_scale, has_kpe)
        if self._pool.differs(ckv_cache.shape[0]):
            a = self._attention
            a.update(a.spec, Batch(num_pages=ckv_cache.shape[0], **self._again), a.need, a.mode, a.stream)
        one_head = (slice(None), slice(None), None)
        tails = {"q_tail": q_pe, "k_tail": arrays.index(kpe_cache, one_head)} if has_kpe else {}
        made = core.run(self._attention, q_nope, arrays.index(ckv_cache, one_head), None, out=out, lse=lse, return_lse=return_lse, k_scale=k_scale, **tails)
        if return_lse_base_on_e and (return_lse or lse is not None):
            (made[1] if return_lse else lse).__imul__(math.log(2))
        return made

    @property
    def resolved_backend(self):
        """The name of a backend, as upstream has them."""
        return "fa2" if self._backend == "auto" else self._backend


class BatchDecodeMlaWithPagedKVCacheWrapper(BatchMLAPagedAttentionWrapper):
    """The older form, of one row a request; head_dim_kpe is an eighth of head_dim_ckv, and q_pe and kpe have been turned. Deprecated, and gone in 0.7."""

    def __init__(self, float_workspace_buffer, use_cuda_graph=False, use_tensor_cores=False, paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None,
                 paged_kv_last_page_len_buffer=None):
        super().__init__(float_workspace_buffer)
        self._use_cuda_graph, self._use_tensor_cores = use_cuda_graph, use_tensor_cores
        self._kv_indptr_buf, self._kv_indices_buf, self._last_page_len_buf = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        if use_cuda_graph:
            self._fixed_batch_size = fixed_batch_size(paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)

    @property
    def use_tensor_cores(self):
        return self._use_tensor_cores

    def plan(self, indptr, indices, last_page_len, num_qo_heads, head_dim_compressed_kv, page_size, sm_scale, window_left=-1, logits_soft_cap=None,
             data_type="float16", q_data_type=None, rope_scale=None, rope_theta=None):
        """Plans a step: indptr [batch + 1], indices and last_page_len [batch] are the page table. rope_scale and rope_theta change nothing."""
        kv = arrays.dtype_name(data_type)
        q = arrays.dtype_name(q_data_type) or kv
        if kv not in ("f32", "f16", "bf16"):
            raise NotImplementedError(f"data_type {data_type}: BatchMLAPagedAttentionWrapper has caches of 8 bits")
        check_sizes(num_qo_heads, 1, head_dim_compressed_kv=head_dim_compressed_kv, page_size=page_size)
        host, last = _offsets(indptr, "indptr"), arrays.host_ints(last_page_len, "last_page_len")
        if len(last) != len(host) - 1:
            raise ValueError(f"last_page_len has {len(last)} entries; indptr speaks of {len(host) - 1} requests")
        if self._use_cuda_graph and len(indices) > len(self._kv_indices_buf):
            raise ValueError("The size of indices should be less than or equal to the allocated buffer")
        spec = self._spec(q, kv, num_qo_heads, head_dim_compressed_kv, head_dim_compressed_kv // 8, sm_scale=sm_scale, window_left=window_left,
                          logits_soft_cap=logits_soft_cap)
        self._sm_scale = spec.scale
        self._plan_step(spec, np.arange(len(host), dtype=np.int32), host, core.paged_lengths(host, last, page_size), indices, page_size,
                        ((self._kv_indptr_buf, indptr), (self._last_page_len_buf, last_page_len)))

    def run(self, q_nope, q_pe, paged_ckv_cache, paged_kpe_cache, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
            enable_pdl=False):
        """One layer: q_nope [batch, heads, ckv], q_pe [batch, heads, kpe], caches [pages, page, ckv] and [pages, page, kpe]. Scores are multiplied by q_scale *
        k_scale, the rounded outputs by v_scale. Returns out, and lse [batch, heads] with return_lse."""
        spec, scale = self._planned(), self._sm_scale
        for x in (q_scale, k_scale):
            if x is not None:
                scale *= arrays.as_float(x)
        self._attention.with_spec(spec._replace(scale=scale))
        made = super().run(q_nope, q_pe, paged_ckv_cache, paged_kpe_cache, out=out, lse=lse, return_lse=return_lse)
        if v_scale is not None:
            (made[0] if return_lse else made).__imul__(v_scale)
        return made

    run_return_lse = functools.partialmethod(run, return_lse=True)


__all__ = ["BatchDecodeMlaWithPagedKVCacheWrapper", "BatchMLAPagedAttentionWrapper"]
