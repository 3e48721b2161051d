# SPDX-License-Identifier: Apache-2.0
"""Operators behind the functions of foveal.flashinfer that plan or draw by themselves: torch.compile puts them into its graph, and they call the function when the
graph runs. Imported by foveal.torch; nothing here is called by users."""

import typing

import torch as _torch

_T, _OptT, _Number, _Int = _torch.Tensor, typing.Optional[_torch.Tensor], typing.Optional[float], typing.Optional[int]
_TYPES = {"f32": _torch.float32, "f16": _torch.float16, "bf16": _torch.bfloat16}
_op = _torch.library.custom_op

# ---- attention of one request ----


@_op("foveal::single_attention", mutates_args=())
def _single(q: _T, k: _T, v: _T, mask: _OptT, packed_mask: _OptT, q_scale: _OptT, k_scale: _OptT, v_scale: _OptT, decode: bool, return_lse: bool, causal: bool,
            kv_layout: str, pos_encoding_mode: str, sm_scale: _Number, window_left: int, logits_soft_cap: _Number, rope_scale: _Number, rope_theta: _Number,
            o_dtype: str) -> typing.Tuple[_T, _T]:
    from . import flashinfer

    options = dict(kv_layout=kv_layout, pos_encoding_mode=pos_encoding_mode, sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap,
                   rope_scale=rope_scale, rope_theta=rope_theta, return_lse=return_lse)
    if decode:
        made = flashinfer.single_decode_with_kv_cache(q, k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, **options)
    else:
        made = flashinfer.single_prefill_with_kv_cache(q, k, v, q_scale, k_scale, v_scale, o_dtype, mask, packed_mask, causal, **options)
    return made if return_lse else (made, q.new_empty(0, dtype=_torch.float32))


@_single.register_fake
def _(q, k, v, mask, packed_mask, q_scale, k_scale, v_scale, decode, return_lse, causal, kv_layout, pos_encoding_mode, sm_scale, window_left, logits_soft_cap,
      rope_scale, rope_theta, o_dtype):
    _torch._check(q.dim() == (2 if decode else 3) and v.dim() == 3, lambda: "foveal::single_attention: k and v have 3 axes, q 3, of a decode 2")
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=_TYPES.get(o_dtype, q.dtype)), q.new_empty(q.shape[:-1] if return_lse else 0, dtype=_torch.float32)


# ---- norms and activations ----


@_op("foveal::rmsnorm", mutates_args=("out",))
def _rmsnorm(x: _T, weight: _T, out: _T, eps: float, plus_one: bool) -> None:
    from .flashinfer import norm

    norm._norm(x, weight, eps, out, plus_one)


@_op("foveal::add_rmsnorm", mutates_args=("x", "residual"))
def _add_rmsnorm(x: _T, residual: _T, weight: _T, eps: float, plus_one: bool) -> None:
    from .flashinfer import norm

    norm._norm(x, weight, eps, x, plus_one, residual)


@_op("foveal::act_and_mul", mutates_args=("out",))
def _act_and_mul(name: str, x: _T, out: _T) -> None:
    from .flashinfer import activation

    activation._gated(name, x, out)


@_op("foveal::layernorm", mutates_args=("out",))
def _layernorm(x: _T, weight: _T, bias: _OptT, out: _T, eps: float) -> None:
    from .flashinfer import norm

    norm._layer(x, weight, bias, eps, out)


# ---- states, rows into pages, positions ----


@_op("foveal::merge_states", mutates_args=())
def _merge_states(v: _T, s: _T) -> typing.Tuple[_T, _T]:
    from .flashinfer import cascade

    return cascade.merge_states(v, s)


@_merge_states.register_fake
def _(v, s):
    return v.new_empty((v.shape[0], v.shape[2], v.shape[3])), s.new_empty((s.shape[0], s.shape[2]), dtype=_torch.float32)


@_op("foveal::append_paged", mutates_args=("k", "v"))
def _append_paged(key: _T, value: _T, batch_indices: _T, positions: _T, k: _T, v: _T, indices: _T, indptr: _T) -> None:
    from .flashinfer import page

    page._append(key, value, batch_indices, positions, k, v, indices, indptr)


@_op("foveal::append_paged_mla", mutates_args=("ckv", "kpe"))
def _append_paged_mla(new_ckv: _T, new_kpe: _T, batch_indices: _T, positions: _T, ckv: _T, kpe: _T, indices: _T, indptr: _T) -> None:
    from .flashinfer import page

    page._append_mla(new_ckv, new_kpe, batch_indices, positions, ckv, kpe, indices, indptr)


@_op("foveal::turned", mutates_args=())
def _turned(x: _T, positions: _T, rotary_dim: _Int, interleave: bool, base: float, factor: float, low_freq_factor: float, high_freq_factor: float,
            original_context: int) -> _T:
    from .flashinfer import rope

    y = _torch.empty_like(x, memory_format=_torch.contiguous_format)
    rope._turn(x, positions, y, rotary_dim, interleave, base=base, factor=factor, low_freq_factor=low_freq_factor, high_freq_factor=high_freq_factor,
               original_context=original_context)
    return y


@_turned.register_fake
def _(x, *_):
    return _torch.empty_like(x, memory_format=_torch.contiguous_format)


# ---- probabilities ----


@_op("foveal::softmax", mutates_args=())
def _softmax(logits: _T, temperature: _OptT, number: float) -> _T:
    from .flashinfer import sampling

    return sampling.softmax(logits, number if temperature is None else temperature)


@_softmax.register_fake
def _(logits, temperature, number):
    return logits.new_empty(logits.shape, dtype=_torch.float32)


@_op("foveal::filtered", mutates_args=())
def _filtered(name: str, x: _T, numbers: _OptT, number: float) -> _T:
    from .flashinfer import sampling

    given = numbers if numbers is not None else number if name == "top_p_renorm" else int(number)
    return sampling._filtered(name, x, given)


@_filtered.register_fake
def _(name, x, numbers, number):
    return x.new_empty(x.shape, dtype=x.dtype if x.dtype in _TYPES.values() else _torch.float32)


# Samples differ from call to call: equal calls must not become one.
_library = _torch.library.Library("foveal", "FRAGMENT")
_random = (_torch.Tag.pt2_compliant_tag, _torch.Tag.nondeterministic_seeded)
_SEEDS = "Tensor? seed, Tensor? offset, int? seed_number, int? offset_number"
_library.define("sample(Tensor x, Tensor? rows, Tensor? top_k, Tensor? top_p, Tensor? min_p, int? top_k_number, float? top_p_number, float? min_p_number, "
                f"bool? top_k_first, bool logits, bool return_valid, {_SEEDS}) -> (Tensor, Tensor)", tags=_random)
_library.define(f"verify(Tensor draft_probs, Tensor draft_ids, Tensor target_probs, Tensor(a!) accepted, Tensor(b!) emitted, {_SEEDS}) -> Tensor", tags=_random)


def _either(x, number):
    return number if x is None else x


def _sample(x, rows, top_k, top_p, min_p, top_k_number, top_p_number, min_p_number, top_k_first, logits, return_valid, seed, offset, seed_number, offset_number):
    from .flashinfer import sampling

    filters = {"top_k": _either(top_k, top_k_number), "top_p": _either(top_p, top_p_number), "min_p": _either(min_p, min_p_number), "top_k_first": top_k_first,
               "logits": logits or None}
    made = sampling._draw(x, rows, None, _either(seed, seed_number), _either(offset, offset_number), return_valid,
                          **{name: number for name, number in filters.items() if number is not None})
    return made if return_valid else (made, x.new_empty(0, dtype=_torch.bool))


def _fake_sample(x, rows, *others):
    n, return_valid = (x if rows is None else rows).shape[0], others[8]
    return x.new_empty(n, dtype=_torch.int32 if rows is None else rows.dtype), x.new_empty(n if return_valid else 0, dtype=_torch.bool)


def _verify(draft_probs, draft_ids, target_probs, accepted, emitted, seed, offset, seed_number, offset_number):
    from .flashinfer import sampling

    return sampling.chain_speculative_sampling(draft_probs, draft_ids, target_probs, accepted, emitted, seed=_either(seed, seed_number),
                                               offset=_either(offset, offset_number))[0]


def _fake_verify(draft_probs, draft_ids, target_probs, *others):
    return target_probs.new_empty((draft_ids.shape[0], draft_ids.shape[1] + 1), dtype=_torch.int32)


for _name, _function, _fake in (("sample", _sample, _fake_sample), ("verify", _verify, _fake_verify)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    _torch.library.register_fake(f"foveal::{_name}", _fake)
