# SPDX-License-Identifier: Apache-2.0
"""Functions that are given a whole batch and no plan: upstream's doors to TensorRT-LLM, XQA and cuDNN. Here they are the same engine behind other arguments.

A call plans its step. On a GPU lengths and block tables are read where they lie, at every run, and the host plans with max_seq_len: a step of the same sizes over
the same tensors is not planned again, and may be captured once it has run. Row offsets (cum_seq_lens_q) are needed on the host: from a GPU that waits.

bmm1_scale multiplies scores (1/sqrt(dim) is a part of it), bmm2_scale multiplies outputs: numbers, or float32 tensors of one entry. Workspaces are not used."""

import collections
import threading

import numpy as np

from .. import Batch, NotReadyError
from . import _arrays as arrays
from . import _core as core
from .prefill import _upcast_query
from .utils import check_kv_layout, unpack_paged_kv_cache

_local = threading.local()
_MAX_KEPT = 16


def _refuse(**options):
    """Options that are not covered must be at what means nothing."""
    for name, (value, nothing) in options.items():
        if value is not None and value != nothing:
            raise NotImplementedError(f"{name}={value!r} is not covered; leave it {nothing!r}")


def _attention(q, spec, decode, step, make):
    """An Attention that holds the step. step: what it is known by, None: planned anew each time; make: its (Batch, Need)."""
    if not hasattr(_local, "kept"):
        _local.kept, _local.captured = collections.OrderedDict(), {}
    device = arrays.device_of(q)
    stream, capturing = core.capture_of(q)
    kind = device, core._kind(spec, None), decode
    if capturing and (kind, step) in _local.captured:
        return _local.captured[kind, step]
    attention = _local.kept.get(kind)
    if capturing:
        if attention is None or attention.single is None or attention.single[0] != step:
            raise NotReadyError("the stream is being captured: the last call of this kind before it must have had the same sizes, options and tables")
        return _local.captured.setdefault((kind, step), _local.kept.pop(kind))
    if attention is None:
        attention = _local.kept[kind] = core.Attention(device)
        if len(_local.kept) > _MAX_KEPT:
            _local.kept.popitem(last=False)
    _local.kept.move_to_end(kind)
    if step is None or attention.single != (step, stream):
        attention.single = None
        batch, need = make()
        attention.update(spec, batch, need, core.Mode(decode=decode), core.stream_of(q))
        attention.single = None if step is None else (step, stream)
    return attention


def _number(x):
    """(a number, None), or (1, what lies on a GPU)."""
    x = arrays.number_or_vector(1.0 if x is None else x)
    return (float(x), None) if isinstance(x, (float, int)) else (1.0, x)


def _type_of_output(query, out, out_dtype):
    name = arrays.dtype_of(out) if out is not None else arrays.dtype_name(out_dtype) or arrays.dtype_of(query)
    if name not in ("f32", "f16", "bf16"):
        raise NotImplementedError(f"outputs in {name}: give out_dtype (or out) as float32, float16 or bfloat16")
    return name


def _one(x):
    return x[0] if isinstance(x, (list, tuple)) and x else x


def _run(query, k, v, spec, decode, step, make, *, bmm1, bmm2, **options):
    query, _ = _upcast_query(query, None, spec.o)
    return core.run(_attention(query, spec, decode, step, make), query, k, v, k_scale=bmm1, v_scale=None if spec.v_in_k else bmm2, **options)


def _paged(query, k, v, table, lengths, max_len, *, bmm1_scale, bmm2_scale=1.0, rows=None, q_len=1, causal=True, window_left=-1, sinks=None, out=None,
           out_dtype=None, latent=0, **options):
    """Attention of query [rows, heads, dim] over pages k, v [pages, page, kv_heads, dim] by table [batch, width]. rows: offsets on the host, else q_len a request.
    latent: elements of a key that are the value, where v is None."""
    n, pages = table.shape[0], k.shape[0]
    if len(table.shape) != 2 or arrays.size_of(lengths) != n:
        raise ValueError(f"block_tables is {tuple(table.shape)} and there are {arrays.size_of(lengths)} lengths; expected [batch, pages] and [batch]")
    if rows is None and query.shape[0] != n * q_len:
        raise ValueError(f"query has {query.shape[0]} rows; expected {n} requests x {q_len}")
    decode = rows is None and q_len == 1
    scale, k_scale = _number(bmm1_scale)
    v_number, v_scale = _number(bmm2_scale)
    o = _type_of_output(query, out, out_dtype)
    q_name = o if arrays.dtype_of(query).startswith("fp8") else arrays.dtype_of(query)
    told = dict(sm_scale=scale, causal=causal and not decode, window_left=window_left)
    spec = core.make_spec(q_name, arrays.dtype_of(k), o, query.shape[1], k.shape[2], query.shape[2], latent or v.shape[3], **told)._replace(v_in_k=bool(latent))
    here = arrays.device_of(query)
    step = None
    if here == "cpu":
        lengths, table = arrays.host_ints(lengths, "seq_lens").reshape(-1), arrays.host_ints(table, "block_tables")
        keys, ids = lengths, table
    else:
        lengths, table = arrays.to_device(lengths, query).reshape(-1).contiguous(), arrays.to_device(table, query)
        if arrays.dtype_of(lengths) not in ("i32", "i64"):
            lengths = arrays.cast(lengths, "i32")
        step = (spec, n, q_len, None if rows is None else rows.tobytes(), int(max_len), tuple(k.shape), tuple(table.shape), table.stride(), table.data_ptr(),
                lengths.data_ptr(), lengths.dtype)
        most = min(int(max_len), table.shape[1] * k.shape[1])
        keys, ids = (np.full(n, most, np.int64 if arrays.dtype_of(lengths) == "i64" else np.int32), lengths), (None, table)

    def make():
        offsets = rows if rows is not None else None if decode else np.arange(n + 1, dtype=np.int32) * q_len
        tokens = int(np.sum(keys if here == "cpu" else keys[0]))
        batch = Batch(rows=offsets, lengths=keys, page_size=k.shape[1], num_pages=pages, page_ids=ids, num_requests=n)
        return batch, core.Need(n, query.shape[0], tokens, n * table.shape[1])

    made = _run(query, k, v, spec, decode, step, make, bmm1=k_scale, bmm2=v_scale if v_scale is not None else v_number, sinks=_one(sinks), out=out, **options)
    if latent and (v_scale is not None or v_number != 1):
        made *= v_number if v_scale is None else v_scale
    return made


def _uniform(query, seq_lens, q_len, cum_seq_lens_q):
    """(row offsets on the host or None, rows a request)."""
    if cum_seq_lens_q is not None:
        return arrays.host_ints(cum_seq_lens_q, "cum_seq_lens_q"), 0
    n = max(arrays.size_of(seq_lens), 1)
    return None, (query.shape[0] // n or 1) if q_len is None else q_len


def trtllm_batch_decode_with_kv_cache(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1,
                                      out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, sinks=None, kv_layout="HND", enable_pdl=None,
                                      backend="auto", q_len_per_req=1, o_scale=1.0, mask=None, max_q_len=None, cum_seq_lens_q=None,
                                      skip_softmax_threshold_scale_factor=None, kv_cache_sf=None, uses_shared_paged_kv_idx=True, lse=None, return_lse=False, **other):
    """Decode: query [batch * q_len_per_req, heads, dim], causal; kv_cache [pages, 2, kv_heads, page, dim] (HND; NHD: page before kv_heads) or a pair of 4-D
    tensors; block_tables [batch, pages], seq_lens [batch]. Returns out [rows, heads, dim]."""
    check_kv_layout(kv_layout)
    _refuse(o_sf_scale=(o_sf_scale, None), o_sf_vec_size=(o_sf_vec_size, None), o_scale=(o_scale, 1.0), uses_shared_paged_kv_idx=(uses_shared_paged_kv_idx, True),
            return_lse=(return_lse, False), **{name: (x, None) for name, x in other.items()})
    if mask is not None or kv_cache_sf is not None or lse is not None:
        raise NotImplementedError("mask, kv_cache_sf and lse are not covered")
    k, v = unpack_paged_kv_cache(kv_cache, kv_layout)
    rows, q_len = _uniform(query, seq_lens, q_len_per_req, cum_seq_lens_q)
    return _paged(query, k, v, block_tables, seq_lens, max_seq_len, bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale, rows=rows, q_len=q_len, window_left=window_left,
                  sinks=sinks, out=out, out_dtype=out_dtype)


def xqa_batch_decode_with_kv_cache(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1, out=None,
                                   sinks=None, kv_layout="NHD", enable_pdl=None, q_len_per_req=1, o_scale=1.0, mask=None, kv_cache_sf=None, q_cu_seq_lens=None):
    """trtllm_batch_decode_with_kv_cache, NHD by default."""
    return trtllm_batch_decode_with_kv_cache(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale, window_left, out,
                                             sinks=sinks, kv_layout=kv_layout, q_len_per_req=q_len_per_req, o_scale=o_scale, mask=mask, cum_seq_lens_q=q_cu_seq_lens,
                                             kv_cache_sf=kv_cache_sf)


def trtllm_batch_context_with_kv_cache(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, batch_size,
                                       cum_seq_lens_q, cum_seq_lens_kv, window_left=-1, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None,
                                       kv_layout="HND", enable_pdl=None, sinks=None, **other):
    """Causal prefill over pages: query [rows, heads, dim] with row offsets cum_seq_lens_q [batch + 1]. The rest as for decode."""
    check_kv_layout(kv_layout)
    _refuse(o_sf_scale=(o_sf_scale, None), o_sf_vec_size=(o_sf_vec_size, None), **{name: (x, None) for name, x in other.items()})
    k, v = unpack_paged_kv_cache(kv_cache, kv_layout)
    return _paged(query, k, v, block_tables, seq_lens, max_kv_len, bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale,
                  rows=arrays.host_ints(cum_seq_lens_q, "cum_seq_lens_q"), window_left=window_left, sinks=sinks, out=out, out_dtype=out_dtype)


def trtllm_batch_decode_with_kv_cache_mla(query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, max_seq_len,
                                          sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None, **other):
    """Latent attention: query [batch, q_len, heads, kv_lora_rank + qk_rope_head_dim], causal; kv_cache [pages, page, the same] (or [pages, 1, page, the same]).
    Returns out [batch, q_len, heads, kv_lora_rank]."""
    allowed = ("skip_softmax_threshold_scale_factor", "enable_pdl", "backend", "is_var_seq", "uses_shared_paged_kv_idx", "max_q_len", "kv_layout")
    _refuse(sparse_mla_top_k=(sparse_mla_top_k, 0), return_lse=(other.pop("return_lse", False), False),
            **{name: (x, None) for name, x in other.items() if name not in allowed})
    if len(query.shape) != 4:
        raise ValueError(f"query has {len(query.shape)} axes; expected 4: batch, rows of a request, heads, dim")
    kv = kv_cache if len(kv_cache.shape) == 3 else arrays.index(kv_cache, (slice(None), 0))
    batch, q_len, heads, dim = query.shape
    if dim != kv_lora_rank + qk_rope_head_dim or kv.shape[2] != dim:
        raise ValueError(f"query has {dim} elements a head and kv_cache {kv.shape[2]}; expected kv_lora_rank + qk_rope_head_dim = {kv_lora_rank + qk_rope_head_dim}")
    flat = None if out is None else arrays.reshape(out, (batch * q_len, heads, kv_lora_rank))
    made = _paged(arrays.reshape(query, (batch * q_len, heads, dim)), arrays.index(kv, (slice(None), slice(None), None)), None, block_tables, seq_lens, max_seq_len,
                  bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale, q_len=q_len, sinks=sinks, out=flat, latent=kv_lora_rank)
    return out if out is not None else arrays.reshape(made, (batch, q_len, heads, kv_lora_rank))


# ---- packed keys ----


def _ragged(query, key, value, rows, keys, *, scale, bmm2_scale=1.0, causal=True, window_left=-1, sinks=None, out=None, lse=None, return_lse=False):
    scale, k_scale = _number(scale)
    v_number, v_scale = _number(bmm2_scale)
    o = _type_of_output(query, out, None)
    spec = core.make_spec(arrays.dtype_of(query), arrays.dtype_of(key), o, query.shape[1], key.shape[1], query.shape[2], value.shape[2], sm_scale=scale,
                          causal=causal, window_left=window_left)
    if query.shape[0] != rows[-1]:
        raise ValueError(f"query has {query.shape[0]} rows; the offsets speak of {int(rows[-1])}")
    step = None if arrays.device_of(query) == "cpu" else (spec, rows.tobytes(), keys.tobytes())

    def make():
        return Batch(rows=rows, kv_indptr=keys), core.Need(len(rows) - 1, int(rows[-1]), int(keys[-1]), 0)

    return _run(query, key, value, spec, False, step, make, bmm1=k_scale, bmm2=v_scale if v_scale is not None else v_number, sinks=_one(sinks), out=out, lse=lse,
                return_lse=return_lse)


def trtllm_ragged_attention_deepseek(query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, o_sf_scale, batch_size,
                                     window_left, cum_seq_lens_q, cum_seq_lens_kv, enable_pdl, is_causal, return_lse, attention_sinks=None,
                                     skip_softmax_threshold_scale_factor=None, out=None, lse=None):
    """Prefill over packed keys: query [rows, heads, dim_qk], key [tokens, kv_heads, dim_qk], value [tokens, kv_heads, dim_v]; offsets [batch + 1]. Returns out, and
    lse in base 2 with return_lse."""
    return _ragged(query, key, value, arrays.host_ints(cum_seq_lens_q, "cum_seq_lens_q"), arrays.host_ints(cum_seq_lens_kv, "cum_seq_lens_kv"), scale=bmm1_scale,
                   bmm2_scale=bmm2_scale, causal=is_causal, window_left=window_left, sinks=attention_sinks, out=out, lse=lse, return_lse=return_lse)


def _offsets_of(lengths, name):
    return np.concatenate(([0], np.cumsum(arrays.host_ints(lengths, name).reshape(-1)))).astype(np.int64)


def cudnn_batch_decode_with_kv_cache(q, k_cache, v_cache, scale, workspace_buffer, *, max_sequence_kv, actual_seq_lens_kv=None, block_tables=None,
                                     is_cuda_graph_compatible=False, batch_offsets_q=None, batch_offsets_o=None, batch_offsets_k=None, batch_offsets_v=None, out=None):
    """Decode: q [batch, heads, dim]; k_cache, v_cache [pages, kv_heads, page, dim]; block_tables [batch, pages], actual_seq_lens_kv [batch] or [batch, 1, 1, 1]."""
    if block_tables is None or actual_seq_lens_kv is None:
        raise NotImplementedError("block_tables and actual_seq_lens_kv must be given")
    k, v = unpack_paged_kv_cache((k_cache, v_cache), "HND")
    return _paged(q, k, v, block_tables, actual_seq_lens_kv, max_sequence_kv, bmm1_scale=scale, out=out)


def cudnn_batch_prefill_with_kv_cache(q, k_cache, v_cache, scale, workspace_buffer, *, max_token_per_sequence, max_sequence_kv, actual_seq_lens_q,
                                      actual_seq_lens_kv, block_tables=None, causal, return_lse=False, q_scale=None, k_scale=None, v_scale=None,
                                      batch_offsets_q=None, batch_offsets_o=None, batch_offsets_k=None, batch_offsets_v=None, batch_offsets_stats=None, out=None,
                                      lse=None, is_cuda_graph_compatible=False, backend=None, o_data_type=None):
    """Prefill: q [rows, heads, dim], requests one behind the other; k_cache, v_cache pages [pages, kv_heads, page, dim] with block_tables, else packed [tokens,
    kv_heads, dim]. Returns out."""
    if return_lse or lse is not None:
        raise NotImplementedError("return_lse: BatchPrefillWithPagedKVCacheWrapper returns it")
    rows = _offsets_of(actual_seq_lens_q, "actual_seq_lens_q")
    if q.shape[0] != rows[-1]:
        raise NotImplementedError(f"q has {q.shape[0]} rows and the requests have {int(rows[-1])}: rows that do not lie one behind the other are not covered")
    scales = {"bmm2_scale": 1.0 if v_scale is None else v_scale}
    first = core._product(core._product(q_scale, k_scale), scale)
    if block_tables is None:
        return _ragged(q, k_cache, v_cache, rows, _offsets_of(actual_seq_lens_kv, "actual_seq_lens_kv"), scale=first, causal=causal, out=out, **scales)
    k, v = unpack_paged_kv_cache((k_cache, v_cache), "HND")
    return _paged(q, k, v, block_tables, actual_seq_lens_kv, max_sequence_kv, bmm1_scale=first, rows=rows, causal=causal, out=out, out_dtype=o_data_type, **scales)


__all__ = ["cudnn_batch_decode_with_kv_cache", "cudnn_batch_prefill_with_kv_cache", "trtllm_batch_context_with_kv_cache", "trtllm_batch_decode_with_kv_cache",
           "trtllm_batch_decode_with_kv_cache_mla", "trtllm_ragged_attention_deepseek", "xqa_batch_decode_with_kv_cache"]
