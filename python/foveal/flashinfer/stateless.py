# SPDX-License-Identifier: Apache-2.0
"""Functions that are given a whole batch and no plan: upstream's doors to TensorRT-LLM, XQA, CUTLASS and cuDNN. Here they are the same engine behind other
arguments.

A call plans its step. On a GPU lengths and block tables are read where they lie, at every run, and the host plans with max_seq_len: a step of the same sizes over
the same tensors is not planned again, and may be captured once it has run. Row offsets (cum_seq_lens_q) are needed on the host: from a GPU that waits.

bmm1_scale multiplies scores (1/sqrt(dim) is a part of it), bmm2_scale multiplies outputs: numbers, or float32 tensors of one entry. Log-sum-exps are in base 2
where no argument says otherwise. Workspaces are not used."""

import collections
import math
import threading

import numpy as np

from .. import Batch, NotReadyError
from . import _arrays as arrays
from . import _core as core
from .prefill import _upcast_query
from .quantization import segment_packbits
from .utils import check_kv_layout, check_lse_base, unpack_paged_kv_cache

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


def _flat(x, shape):
    """A view in another shape, to be written through."""
    return None if x is None else x.view(shape) if arrays.torch_of(x) is not None else arrays.reshape(x, shape)


def _one(x):
    return x[0] if isinstance(x, (list, tuple)) and x else x


def _run(query, k, v, spec, decode, step, make, *, bmm1, bmm2, sinks=None, lse=None, return_lse=False, lse_base="log2", **options):
    """Returns out, or (out, lse) with return_lse. A given lse is filled, asked for or not."""
    query, _ = _upcast_query(query, None, spec.o)
    wanted = return_lse or lse is not None
    made = core.run(_attention(query, spec, decode, step, make), query, k, v, k_scale=bmm1, v_scale=None if spec.v_in_k else bmm2, sinks=_one(sinks), lse=lse,
                    return_lse=wanted, **options)
    if wanted and lse_base == "ln":
        made[1].__imul__(math.log(2))
    return made if return_lse or not wanted else made[0]


def _signed(x):
    """uint32 as int32: torch can do little with the former."""
    torch = arrays.torch_of(x)
    return x.view(torch.int32) if torch is not None and x.dtype == torch.uint32 else x


def _draft_bits(mask, rows, lengths):
    """The bits of a custom mask of rows that are the last keys of their requests: they see every key before, and of themselves what mask says: words of bits, low ones
    first, [batch, q_len, words] or [rows, words]."""
    torch = arrays.torch_of(mask)
    if torch is not None:
        mask = mask.cpu().contiguous().view(torch.uint8)        # torch can do little with uint16
    words = np.ascontiguousarray(arrays.to_numpy(mask)).view(np.uint8)
    most = int((rows[1:] - rows[:-1]).max()) if len(rows) > 1 else 0
    if words.size and (words.size // words.shape[-1] != rows[-1] or words.shape[-1] * 8 < most):
        raise ValueError(f"mask is {words.size // words.shape[-1]} rows of {words.shape[-1]} bytes; expected {int(rows[-1])} rows of at least {most} bits")
    drafts = np.unpackbits(words.reshape(int(rows[-1]), -1), axis=1, bitorder="little").astype(bool)
    flags, counts = [], []
    for first, end, length in zip(rows[:-1], rows[1:], lengths):
        n = min(int(end - first), int(length))
        seen = np.ones((int(end - first), int(length)), bool)
        seen[:, int(length) - n:] = drafts[first:end, :n]
        flags.append(seen.reshape(-1))
        counts.append(seen.size)
    return segment_packbits(np.concatenate(flags), np.concatenate(([0], np.cumsum(counts))), bitorder="little")[0]


def _paged(query, k, v, table, lengths, max_len, *, bmm1_scale, bmm2_scale=1.0, rows=None, q_len=1, causal=True, window_left=-1, logits_soft_cap=None, mask=None,
           out=None, out_dtype=None, latent=0, **options):
    """Attention of query [rows, heads, dim] over pages k, v [pages, page, kv_heads, dim] by table [batch, width]. rows: offsets on the host, else q_len a request.
    latent: elements of a key that are the value, where v is None. mask: as _draft_bits takes it; lengths and it are read on the host."""
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
    told = dict(sm_scale=scale, causal=causal and not decode, window_left=window_left, logits_soft_cap=logits_soft_cap, custom_mask=mask is not None)
    spec = core.make_spec(q_name, arrays.dtype_of(k), o, query.shape[1], k.shape[2], query.shape[2], latent or v.shape[3], **told)._replace(v_in_k=bool(latent))
    here, lengths, table = arrays.device_of(query), _signed(lengths), _signed(table)
    offsets = rows if rows is not None else None if decode else np.arange(n + 1, dtype=np.int32) * q_len
    step, args = None, None
    if here == "cpu" or mask is not None:
        lengths = arrays.host_ints(lengths, "seq_lens").reshape(-1)
        keys, ids = lengths, arrays.host_ints(table, "block_tables") if here == "cpu" else (None, arrays.to_device(table, query))
    else:
        lengths, table = arrays.to_device(lengths, query).reshape(-1).contiguous(), arrays.to_device(table, query)
        if arrays.dtype_of(lengths) not in ("i32", "i64"):
            lengths = arrays.cast(lengths, "i32")
        step = (spec, n, q_len, None if rows is None else rows.tobytes(), int(max_len), tuple(k.shape), tuple(table.shape), table.stride(), table.data_ptr(),
                lengths.data_ptr(), lengths.dtype)
        most = min(int(max_len), table.shape[1] * k.shape[1])
        keys, ids = (np.full(n, most, np.int64 if arrays.dtype_of(lengths) == "i64" else np.int32), lengths), (None, table)
    if mask is not None:
        args = {"bits": arrays.to_device(_draft_bits(mask, np.arange(n + 1) if decode else offsets, lengths), query)}

    def make():
        tokens = int(np.sum(keys[0] if isinstance(keys, tuple) else keys))
        batch = Batch(rows=offsets, lengths=keys, page_size=k.shape[1], num_pages=pages, page_ids=ids, num_requests=n, args=args)
        return batch, core.Need(n, query.shape[0], tokens, n * table.shape[1])

    made = _run(query, k, v, spec, decode, step, make, bmm1=k_scale, bmm2=v_scale if v_scale is not None else v_number, out=out, **options)
    if latent and (v_scale is not None or v_number != 1):
        attended = made[0] if isinstance(made, tuple) else made
        attended *= v_number if v_scale is None else v_scale
    return made


def _uniform(query, seq_lens, q_len, cum_seq_lens_q):
    """(row offsets on the host or None, rows a request)."""
    if cum_seq_lens_q is not None:
        return arrays.host_ints(cum_seq_lens_q, "cum_seq_lens_q"), 0
    n = max(arrays.size_of(seq_lens), 1)
    return None, (query.shape[0] // n or 1) if q_len is None else q_len


# What these take and what changes nothing here: hints of how kernels are to run.
_HINTS = ("skip_softmax_threshold_scale_factor", "enable_pdl", "backend", "is_var_seq", "max_q_len", "kv_layout", "multi_ctas_kv_counter_buffer", "use_fp16_softmax",
          "uses_spcompress", "cute_dsl_impl", "length_aware_schedule", "bf16q_fp8kv_transform_mode", "skip_all_rows_active_check", "q_seq_lens_cpu", "kv_seq_lens_cpu")
_NOTHING = {"uses_shared_paged_kv_idx": True, "enable_block_sparse_attention": False, "cp_world": 1, "cp_rank": 0, "sparse_top_k": 0, "enable_dcp": False,
            "kv_scale_format": "auto", "num_elts_per_sage_attn_blk": (0, 0, 0, 0), "sage_attn_sfs": (None, None, None, None)}


def _check_others(others):
    """Arguments that newer versions have: hints, and options that must be at what means nothing."""
    _refuse(**{name: (tuple(x) if isinstance(x, list) else x, _NOTHING.get(name)) for name, x in others.items() if name not in _HINTS})


def trtllm_batch_decode_with_kv_cache(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1,
                                      out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, sinks=None, kv_layout="HND", enable_pdl=None,
                                      backend="auto", q_len_per_req=1, o_scale=1.0, mask=None, max_q_len=None, cum_seq_lens_q=None,
                                      skip_softmax_threshold_scale_factor=None, kv_cache_sf=None, uses_shared_paged_kv_idx=True, lse=None, return_lse=False, **others):
    """Decode: query [batch * q_len_per_req, heads, dim], causal; kv_cache [pages, 2, kv_heads, page, dim] (HND; NHD: page before kv_heads) or a pair of 4-D
    tensors; block_tables [batch, pages], seq_lens [batch]. mask: in the place of causal between the last q_len_per_req keys, uint16 words [batch, q_len, words] of
    bits, low ones first. Returns out [rows, heads, dim], and lse [rows, heads] with return_lse."""
    check_kv_layout(kv_layout)
    _refuse(o_sf_scale=(o_sf_scale, None), o_sf_vec_size=(o_sf_vec_size, None), o_scale=(o_scale, 1.0), uses_shared_paged_kv_idx=(uses_shared_paged_kv_idx, True))
    _check_others(others)
    if kv_cache_sf is not None:
        raise NotImplementedError("kv_cache_sf is not covered: the prefill and decode wrappers take it")
    k, v = unpack_paged_kv_cache(kv_cache, kv_layout)
    rows, q_len = _uniform(query, seq_lens, q_len_per_req, cum_seq_lens_q)
    return _paged(query, k, v, block_tables, seq_lens, max_seq_len, bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale, rows=rows, q_len=q_len, window_left=window_left,
                  sinks=sinks, mask=mask, out=out, out_dtype=out_dtype, lse=lse, return_lse=return_lse)


def xqa_batch_decode_with_kv_cache(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1, out=None,
                                   sinks=None, kv_layout="NHD", enable_pdl=None, q_len_per_req=1, o_scale=1.0, mask=None, kv_cache_sf=None, q_cu_seq_lens=None):
    """trtllm_batch_decode_with_kv_cache, NHD by default."""
    return trtllm_batch_decode_with_kv_cache(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale, window_left, out,
                                             sinks=sinks, kv_layout=kv_layout, q_len_per_req=q_len_per_req, o_scale=o_scale, mask=mask, cum_seq_lens_q=q_cu_seq_lens,
                                             kv_cache_sf=kv_cache_sf)


def xqa(q, k_cache, v_cache, page_table, seq_lens, output, workspace_buffer, semaphores, num_kv_heads, page_size, sinks=None, q_scale=1.0, kv_scale=1.0,
        sliding_win_size=0, kv_layout="NHD", sm_count=None, enable_pdl=None, rcp_out_scale=1.0, q_seq_len=1, mask=None, *, q_cu_seq_lens=None, k_sf_cache=None,
        v_sf_cache=None):
    """Decode into output: q [batch, 1, heads, dim], or [batch, 1, q_seq_len, heads, dim] (causal, or mask as for trtllm_batch_decode_with_kv_cache), or [rows, heads,
    dim] with the row offsets q_cu_seq_lens; caches of pages, or of rows [pages * page_size * kv_heads, dim]; page_table [batch, pages], seq_lens [batch, 1]. Scores
    are multiplied by q_scale * kv_scale / sqrt(dim), values by kv_scale. sliding_win_size: keys that a row sees, its own included; 0: all."""
    check_kv_layout(kv_layout)
    if len(k_cache.shape) == 2:         # of rows, one a token and KV head
        k_cache, v_cache = (arrays.reshape(x, (x.shape[0] // (page_size * num_kv_heads), page_size, num_kv_heads, x.shape[1])) for x in (k_cache, v_cache))
        kv_layout = "NHD"
    if k_sf_cache is not None or v_sf_cache is not None:
        raise NotImplementedError("k_sf_cache and v_sf_cache are not covered: the prefill and decode wrappers take kv_cache_sf")
    k, v = unpack_paged_kv_cache((k_cache, v_cache), kv_layout)
    if (k.shape[1], k.shape[2]) != (page_size, num_kv_heads):
        raise ValueError(f"k_cache has pages of {k.shape[1]} tokens with {k.shape[2]} KV heads; told were page_size = {page_size} and num_kv_heads = {num_kv_heads}")
    if tuple(output.shape) != tuple(q.shape):
        raise ValueError(f"output has the shape {tuple(output.shape)}; expected that of q, {tuple(q.shape)}")
    heads, dim = q.shape[-2:]
    flat = (math.prod(q.shape[:-2]), heads, dim)
    rows = None if q_cu_seq_lens is None else arrays.host_ints(_signed(q_cu_seq_lens), "q_cu_seq_lens")
    _paged(arrays.reshape(q, flat), k, v, page_table, seq_lens, page_table.shape[1] * page_size, bmm1_scale=core._product(core._product(q_scale, kv_scale), dim**-0.5),
           bmm2_scale=core._product(kv_scale, rcp_out_scale), rows=rows, q_len=q_seq_len, window_left=sliding_win_size - 1 if sliding_win_size else -1,
           sinks=sinks, mask=mask, out=_flat(output, flat))


def trtllm_batch_context_with_kv_cache(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, batch_size,
                                       cum_seq_lens_q, cum_seq_lens_kv, window_left=-1, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None,
                                       kv_layout="HND", enable_pdl=None, sinks=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor=None,
                                       uses_shared_paged_kv_idx=True, causal=True, lse=None, return_lse=False, **others):
    """Prefill over pages: query [rows, heads, dim] with row offsets cum_seq_lens_q [batch + 1]. The rest as for decode."""
    check_kv_layout(kv_layout)
    _refuse(o_sf_scale=(o_sf_scale, None), o_sf_vec_size=(o_sf_vec_size, None), uses_shared_paged_kv_idx=(uses_shared_paged_kv_idx, True),
            window_right=(others.pop("window_right", -1), -1))
    _check_others(others)
    if kv_cache_sf is not None:
        raise NotImplementedError("kv_cache_sf is not covered: the prefill and decode wrappers take it")
    k, v = unpack_paged_kv_cache(kv_cache, kv_layout)
    return _paged(query, k, v, block_tables, seq_lens, max_kv_len, bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale, causal=causal,
                  rows=arrays.host_ints(cum_seq_lens_q, "cum_seq_lens_q"), window_left=window_left, sinks=sinks, out=out, out_dtype=out_dtype, lse=lse,
                  return_lse=return_lse)


def trtllm_batch_decode_with_kv_cache_mla(query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, max_seq_len,
                                          sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None, skip_softmax_threshold_scale_factor=None,
                                          enable_pdl=None, backend="auto", is_var_seq=True, uses_shared_paged_kv_idx=True, lse=None, return_lse=False,
                                          return_lse_base=None, **others):
    """Latent attention: query [batch, q_len, heads, kv_lora_rank + qk_rope_head_dim], causal; kv_cache [pages, page, the same] (or [pages, 1, page, the same]).
    Returns out [batch, q_len, heads, kv_lora_rank], and lse [batch * q_len, heads] with return_lse, natural with return_lse_base="basee"."""
    _refuse(sparse_mla_top_k=(sparse_mla_top_k, 0), uses_shared_paged_kv_idx=(uses_shared_paged_kv_idx, True))
    _check_others(others)
    if return_lse_base not in (None, "basee", "base2"):
        raise ValueError(f"return_lse_base must be 'basee', 'base2', or None; got {return_lse_base!r}")
    if len(query.shape) != 4:
        raise ValueError(f"query has {len(query.shape)} axes; expected 4: batch, rows of a request, heads, dim")
    kv = kv_cache if len(kv_cache.shape) == 3 else arrays.index(kv_cache, (slice(None), 0))
    batch, q_len, heads, dim = query.shape
    if dim != kv_lora_rank + qk_rope_head_dim or kv.shape[2] != dim:
        raise ValueError(f"query has {dim} elements a head and kv_cache {kv.shape[2]}; expected kv_lora_rank + qk_rope_head_dim = {kv_lora_rank + qk_rope_head_dim}")
    made = _paged(arrays.reshape(query, (batch * q_len, heads, dim)), arrays.index(kv, (slice(None), slice(None), None)), None, block_tables, seq_lens, max_seq_len,
                  bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale, q_len=q_len, sinks=sinks, latent=kv_lora_rank,
                  out=_flat(out, (batch * q_len, heads, kv_lora_rank)), lse=_flat(lse, (batch * q_len, heads)), return_lse=return_lse,
                  lse_base="ln" if return_lse_base == "basee" else "log2")
    attended = made[0] if return_lse else made
    attended = out if out is not None else arrays.reshape(attended, (batch, q_len, heads, kv_lora_rank))
    return (attended, made[1] if lse is None else lse) if return_lse else attended


def xqa_batch_decode_with_kv_cache_mla(query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
                                       max_seq_len, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None, enable_pdl=None):
    """trtllm_batch_decode_with_kv_cache_mla; out may be [batch, heads, kv_lora_rank] where q_len is 1."""
    return trtllm_batch_decode_with_kv_cache_mla(query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
                                                 max_seq_len, out=out, bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale, sinks=sinks)


# ---- packed keys ----


def _ragged(query, key, value, rows, keys, *, scale, bmm2_scale=1.0, causal=True, window_left=-1, logits_soft_cap=None, out=None, out_dtype=None, **options):
    """Attention of packed rows over packed keys, offsets on the host."""
    scale, k_scale = _number(scale)
    v_number, v_scale = _number(bmm2_scale)
    o = _type_of_output(query, out, out_dtype)
    q_name = o if arrays.dtype_of(query).startswith("fp8") else arrays.dtype_of(query)
    spec = core.make_spec(q_name, arrays.dtype_of(key), o, query.shape[1], key.shape[1], query.shape[2], value.shape[2], sm_scale=scale,
                          causal=causal, window_left=window_left, logits_soft_cap=logits_soft_cap)
    if query.shape[0] != rows[-1]:
        raise ValueError(f"query has {query.shape[0]} rows; the offsets speak of {int(rows[-1])}")
    step = None if arrays.device_of(query) == "cpu" else (spec, rows.tobytes(), keys.tobytes())

    def make():
        return Batch(rows=rows, kv_indptr=keys), core.Need(len(rows) - 1, int(rows[-1]), int(keys[-1]), 0)

    return _run(query, key, value, spec, False, step, make, bmm1=k_scale, bmm2=v_scale if v_scale is not None else v_number, out=out, **options)


def trtllm_ragged_attention_deepseek(query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, o_sf_scale, batch_size,
                                     window_left, cum_seq_lens_q, cum_seq_lens_kv, enable_pdl, is_causal, return_lse, attention_sinks=None,
                                     skip_softmax_threshold_scale_factor=None, out=None, lse=None, **others):
    """Prefill over packed keys: query [rows, heads, dim_qk], key [tokens, kv_heads, dim_qk], value [tokens, kv_heads, dim_v]; offsets [batch + 1]. Returns out, and
    lse in base 2 with return_lse."""
    _check_others(others)
    return _ragged(query, key, value, arrays.host_ints(cum_seq_lens_q, "cum_seq_lens_q"), arrays.host_ints(cum_seq_lens_kv, "cum_seq_lens_kv"), scale=bmm1_scale,
                   bmm2_scale=bmm2_scale, causal=is_causal, window_left=window_left, sinks=attention_sinks, out=out, lse=lse, return_lse=return_lse)


def fmha_varlen(q, k, v, qo_segment_offsets, kv_segment_offsets, plan_info=None, max_qo_len=None, out=None, lse=None, causal=False, sm_scale=None, q_scale=None,
                k_scale=None, v_scale=None, o_scale=None, return_lse=False):
    """Prefill over packed keys: q [rows, heads, dim_qk], k [tokens, kv_heads, dim_qk], v [tokens, kv_heads, dim_v]; offsets [batch + 1]. Returns (out, lse), lse in
    base 2 and None where nobody asked for it. Of 8-bit queries out is bfloat16."""
    if o_scale is not None and arrays.as_float(o_scale) != 1:
        raise NotImplementedError("o_scale: outputs are not quantised")
    scale = core._product(core._product(q_scale, k_scale), q.shape[2] ** -0.5 if sm_scale is None else sm_scale)
    o_dtype = "bf16" if out is None and arrays.dtype_of(q).startswith("fp8") else None
    made = _ragged(q, k, v, arrays.host_ints(qo_segment_offsets, "qo_segment_offsets"), arrays.host_ints(kv_segment_offsets, "kv_segment_offsets"), scale=scale,
                   bmm2_scale=1.0 if v_scale is None else v_scale, causal=causal, out=out, out_dtype=o_dtype, lse=lse, return_lse=return_lse or lse is not None)
    return made if return_lse or lse is not None else (made, None)


def _split_qkv(qkv, input_layout):
    """(q, k, v) of trtllm_fmha_v2_prefill's layouts; k and v of pages as [pages, page, kv_heads, dim]."""
    if input_layout == "PACKED_QKV":
        if len(qkv.shape) != 4 or qkv.shape[1] != 3:
            raise ValueError(f"PACKED_QKV expects shape [tokens, 3, num_heads, head_dim], got {tuple(qkv.shape)}")
        return tuple(arrays.index(qkv, (slice(None), i)) for i in range(3))
    if input_layout == "CONTIGUOUS_Q_KV":
        q, kv = qkv
        if len(kv.shape) != 4 or kv.shape[1] != 2:
            raise ValueError(f"CONTIGUOUS_Q_KV expects KV shape [tokens, 2, num_kv_heads, head_dim], got {tuple(kv.shape)}")
        return (q,) + tuple(arrays.index(kv, (slice(None), i)) for i in range(2))
    if input_layout in ("Q_PAGED_KV_NHD", "Q_PAGED_KV_HND"):
        return (qkv[0],) + tuple(unpack_paged_kv_cache(qkv[1], input_layout[-3:]))
    if input_layout == "SEPARATE_Q_K_V":
        return tuple(qkv)
    raise ValueError(f"Unsupported input_layout: {input_layout!r}. Expected one of: PACKED_QKV, CONTIGUOUS_Q_KV, Q_PAGED_KV_HND, Q_PAGED_KV_NHD, SEPARATE_Q_K_V.")


def trtllm_fmha_v2_prefill(qkv, input_layout, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, batch_size, cum_seq_lens_q, cum_seq_lens_kv,
                           block_tables=None, out=None, out_dtype=None, sinks=None, pos_encoding_mode=None, logits_soft_cap_scale=None, mask_mode="causal",
                           window_left=-1, chunked_attention_size=0, save_softmax_stats=False, skip_softmax_threshold_scale_factor=0):
    """Prefill of one of five layouts: PACKED_QKV [tokens, 3, heads, dim]; CONTIGUOUS_Q_KV (q, [tokens, 2, kv_heads, dim]); SEPARATE_Q_K_V (q, k, v); Q_PAGED_KV_NHD
    and Q_PAGED_KV_HND (q, cache) with block_tables [batch, pages]. mask_mode: causal, sliding_window (with window_left), or padding: none. Returns out."""
    _refuse(pos_encoding_mode=(pos_encoding_mode, None), chunked_attention_size=(chunked_attention_size, 0), save_softmax_stats=(save_softmax_stats, False))
    mask_mode, windowed = mask_mode.lower(), window_left is not None and window_left >= 0
    if mask_mode not in ("causal", "sliding_window", "padding"):
        raise NotImplementedError(f"mask_mode {mask_mode!r}: causal, sliding_window and padding are covered")
    if windowed and mask_mode == "padding":
        raise ValueError("Sliding window attention requires causal masking.")
    q, k, v = _split_qkv(qkv, input_layout)
    told = dict(bmm2_scale=bmm2_scale, causal=mask_mode != "padding", window_left=window_left if windowed else -1, logits_soft_cap=logits_soft_cap_scale, sinks=sinks,
                out=out, out_dtype=out_dtype)
    rows = arrays.host_ints(cum_seq_lens_q, "cum_seq_lens_q")
    if not input_layout.startswith("Q_PAGED"):
        return _ragged(q, k, v, rows, arrays.host_ints(cum_seq_lens_kv, "cum_seq_lens_kv"), scale=bmm1_scale, **told)
    if block_tables is None:
        raise ValueError(f"block_tables is required for the {input_layout} input layout.")
    if block_tables.shape[0] != batch_size:
        raise ValueError(f"block_tables batch dimension ({block_tables.shape[0]}) does not match batch_size ({batch_size}).")
    return _paged(q, k, v, block_tables, seq_lens, max_kv_len, bmm1_scale=bmm1_scale, rows=rows, **told)


def cudnn_batch_decode_with_kv_cache(q, k_cache, v_cache, scale, workspace_buffer, *, max_sequence_kv, actual_seq_lens_kv=None, block_tables=None,
                                     is_cuda_graph_compatible=False, batch_offsets_q=None, batch_offsets_o=None, batch_offsets_k=None, batch_offsets_v=None, out=None,
                                     return_lse=False, lse=None, q_len_per_req=1, window_left=-1, sinks=None):
    """Decode: q [batch * q_len_per_req, heads, dim], causal; k_cache, v_cache [pages, kv_heads, page, dim]; block_tables [batch, pages], actual_seq_lens_kv [batch]
    or [batch, 1, 1, 1]. Returns out, and lse [rows, heads] with return_lse."""
    if block_tables is None or actual_seq_lens_kv is None:
        raise NotImplementedError("block_tables and actual_seq_lens_kv must be given")
    k, v = unpack_paged_kv_cache((k_cache, v_cache), "HND")
    return _paged(q, k, v, block_tables, actual_seq_lens_kv, max_sequence_kv, bmm1_scale=scale, q_len=q_len_per_req, window_left=window_left, sinks=sinks, out=out,
                  lse=lse, return_lse=return_lse)


def _row_offsets(lengths, starts, units, name):
    """Row (or token) offsets on the host: of lengths, else of starts in tokens."""
    if lengths is not None:
        return core.running_sum(lengths, f"actual_seq_lens_{name}")
    if units != "tokens" or starts is None:
        raise ValueError(f"actual_seq_lens_{name} may be left out only where batch_offsets_units is 'tokens' and the offsets are given")
    return arrays.host_ints(starts, "batch_offsets").astype(np.int64)


def _into_padded(lse, packed, rows):
    """Rows of packed [rows, heads] into lse [batch, most, heads]."""
    for r, (first, end) in enumerate(zip(rows[:-1], rows[1:])):
        lse[r, :int(end - first)] = packed[int(first):int(end)]


def cudnn_batch_prefill_with_kv_cache(q, k_cache, v_cache, scale, workspace_buffer, *, max_token_per_sequence, max_sequence_kv, actual_seq_lens_q=None,
                                      actual_seq_lens_kv=None, block_tables=None, causal, return_lse=False, q_scale=None, k_scale=None, v_scale=None,
                                      batch_offsets_q=None, batch_offsets_o=None, batch_offsets_k=None, batch_offsets_v=None, batch_offsets_stats=None,
                                      batch_offsets_units="elements", out=None, lse=None, is_cuda_graph_compatible=False, backend=None, o_data_type=None, lse_base="log2",
                                      window_left=None, sinks=None):
    """Prefill: q [rows, heads, dim], requests one behind the other; k_cache, v_cache pages [pages, kv_heads, page, dim] with block_tables, else packed [tokens,
    kv_heads, dim]. Returns (out, lse): lse [rows, heads], or the one given, which may be [batch, max_token_per_sequence, heads]; None where nobody asked for it."""
    check_lse_base(lse_base)
    if batch_offsets_units not in ("elements", "tokens"):
        raise ValueError(f"batch_offsets_units must be 'elements' or 'tokens', got {batch_offsets_units!r}")
    rows = _row_offsets(actual_seq_lens_q, batch_offsets_q, batch_offsets_units, "q")
    if q.shape[0] != rows[-1]:
        raise NotImplementedError(f"q has {q.shape[0]} rows and the requests have {int(rows[-1])}: rows that do not lie one behind the other are not covered")
    padded = lse if lse is not None and len(lse.shape) == 3 else None
    wanted = return_lse or lse is not None
    told = dict(bmm2_scale=1.0 if v_scale is None else v_scale, causal=causal, window_left=-1 if window_left is None else window_left, sinks=sinks, out=out,
                out_dtype=o_data_type, lse=None if padded is not None else lse, return_lse=wanted, lse_base=lse_base)
    first = core._product(core._product(q_scale, k_scale), scale)
    if block_tables is None:
        made = _ragged(q, k_cache, v_cache, rows, _row_offsets(actual_seq_lens_kv, batch_offsets_k, batch_offsets_units, "kv"), scale=first, **told)
    else:
        k, v = unpack_paged_kv_cache((k_cache, v_cache), "HND")
        made = _paged(q, k, v, block_tables, actual_seq_lens_kv, max_sequence_kv, bmm1_scale=first, rows=rows, **told)
    if padded is not None:
        _into_padded(padded, made[1], rows)
        made = made[0], padded
    return made if wanted else (made, None)


__all__ = ["cudnn_batch_decode_with_kv_cache", "cudnn_batch_prefill_with_kv_cache", "fmha_varlen", "trtllm_batch_context_with_kv_cache",
           "trtllm_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache_mla", "trtllm_fmha_v2_prefill", "trtllm_ragged_attention_deepseek", "xqa",
           "xqa_batch_decode_with_kv_cache", "xqa_batch_decode_with_kv_cache_mla"]
