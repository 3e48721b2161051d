# SPDX-License-Identifier: Apache-2.0
"""Softmax, filters of probabilities, samples, verification of drafts.

Every call is deterministic, whatever `deterministic=` says: the same seed and offset give the same ids on any CPU and any GPU. Ids are not those that upstream
draws from the same seed; their distribution is. Values that tie with the last one that a filter keeps are kept, too. A sample of nothing (a row of zeros or
NaN) is 0, and not valid. Of a p that is NaN nothing is told upstream; here, as a number or in a tensor, NaN as top_p keeps the largest value only, and as min_p
everything: one bad request is no reason to fail a batch. Row numbers (indices) outside of the rows are refused on the CPU; on a GPU such a row has nothing to draw.

Random numbers: seed and offset, both given, are integers or int64 tensors of 1 or batch_size entries (for CUDA graphs), and a call uses up one offset. Else
they come from `generator`, or the default one of the tensors' device; for NumPy arrays a numpy.random.Generator, or NumPy's global state."""

from numbers import Real

import numpy as np

from .. import sample as _sample
from .. import softmax as _softmax
from .. import top_k_mask as _top_k_mask
from .. import top_k_renorm as _top_k_renorm
from .. import top_p_renorm as _top_p_renorm
from .. import verify as _verify
from . import _arrays as arrays
from . import _core as core

_OFFSETS = 4        # that a CUDA generator moves on: it counts in fours


def _is_array(x):
    return arrays.torch_of(x) is not None or isinstance(x, np.ndarray)


def _rows(x):
    """Rows that the library reads: 16 or 32 bits, dense."""
    if arrays.dtype_of(x) not in ("f32", "f16", "bf16"):
        x = arrays.cast(x, "f32")
    if x.shape[-1] > 1 and arrays.strides_of(x)[-1] != 1:
        x = x.contiguous() if arrays.torch_of(x) is not None else np.ascontiguousarray(x)
    return x


def _check_number(x, like, indices=None):
    """A sampling parameter is a number, or has an entry a row or (with indices) a sample."""
    if arrays.torch_of(x) is None and not (isinstance(x, np.ndarray) and x.ndim):
        return
    if x.ndim == 0:
        raise ValueError(f"Expected a 1D tensor of shape (batch_size,) or scalar for the sampling parameter: got a 0-dimensional tensor with shape {x.shape}")
    if x.ndim > 1:
        raise ValueError(f"Expected a 1D tensor or scalar for the sampling parameter: got a {x.ndim}D tensor with shape {x.shape}")
    if x.shape[0] not in (like.shape[0], like.shape[0] if indices is None else indices.shape[0]):
        raise ValueError(f"Sampling parameter tensor batch size mismatch: expected length {like.shape[0]}, the rows there are, got length {x.shape[0]} "
                         f"with shape {x.shape}")


def _per_row(x, name, like):
    """A number, or a vector of the type where `like` lies."""
    if not _is_array(x) or x.ndim == 0:
        return x
    x = arrays.to_device(x, like)
    good = ("i32", "i64") if name == "i32" else (name,)
    return x if arrays.dtype_of(x) in good else arrays.cast(x, name)


def _share(x, like, indices=None):
    """A p: numbers are brought into [0, 1] as the entries of tensors are."""
    _check_number(x, like, indices)
    x = _per_row(x, "f32", like)
    return x if _is_array(x) and x.ndim else min(max(float(x), 0.0), 1.0) if x == x else 0.0


def _count(x, like, indices=None):
    _check_number(x, like, indices)
    x = _per_row(x, "i32", like)
    return x if _is_array(x) and x.ndim else min(int(x), 2**31 - 1)


# ---- random numbers ----


def _from_generator(generator, like):
    """(seed, offset) that nobody has used; moves the generator on."""
    torch = arrays.torch_of(like)
    if torch is None:
        source = np.random if generator is None else generator
        draw = source.randint if generator is None else source.integers
        return int(draw(0, 2**63 - 1, dtype=np.int64)), 0
    if like.device.type == "cuda":
        if generator is None:
            torch.cuda.init()
            generator = torch.cuda.default_generators[like.device.index or 0]
        if generator.device.type == "cuda":
            seed, offset = generator.get_state().view(torch.int64).tolist()
            generator.set_state(torch.tensor([seed, offset + _OFFSETS], dtype=torch.int64, device="cpu").view(torch.uint8))
            return seed, offset
    return int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64, generator=generator, device=generator.device if generator else "cpu")), 0


def _state_vector(x, name, batch_size, like):
    if arrays.device_of(x) != arrays.device_of(like):
        raise ValueError(f"{name} tensor must be on {arrays.device_of(like)}")
    if str(x.dtype).split(".")[-1] not in ("int64", "uint64"):
        raise ValueError(f"{name} tensor must be int64/uint64")
    if x.ndim != 1:
        raise ValueError(f"{name} tensor must be 1D")
    if x.shape[0] not in (1, batch_size):
        raise ValueError(f"{name} tensor length must be 1 or {batch_size}")
    torch = arrays.torch_of(x)
    return x.view(torch.int64 if torch is not None else np.int64)


def _random(seed, offset, generator, batch_size, like):
    """The arguments seed= and offset= of the library."""
    if seed is None or offset is None:
        seed, offset = _from_generator(generator, like)
    if _is_array(seed) != _is_array(offset):
        raise ValueError("seed and offset must both be tensors or both be scalars")
    if _is_array(seed):
        seed, offset = _state_vector(seed, "seed", batch_size, like), _state_vector(offset, "offset", batch_size, like)
    return {"seed": seed, "offset": offset}


# ---- samples ----


def _check_nan(x, what, check):
    if check and bool((x != x).any()):
        raise ValueError(f"Input {what} contains NaN.")


def _of_samples(x, rows, indices):
    """A filter's numbers, one a row of the probabilities, as one a sample."""
    if indices is None or not (_is_array(x) and x.ndim) or x.shape[0] != rows:
        return x
    torch = arrays.torch_of(indices)
    return x[indices.long().clamp(0, rows - 1) if torch is not None else np.clip(indices, 0, rows - 1)]


def _check_rows(indices, rows):
    """Rows that are there: refused where the host sees the indices; a GPU takes others for rows of zeros."""
    if indices is None or arrays.device_of(indices) != "cpu" or arrays.size_of(indices) == 0:
        return
    at = arrays.to_numpy(indices)
    bad = (at < 0) | (at >= rows)
    if bad.any():
        first = int(bad.reshape(-1).argmax())
        raise ValueError(f"indices[{first}] is {int(at.reshape(-1)[first])}; there are {rows} rows")


def _split(x):
    """(tensor or None, number or None) of an operator's argument."""
    return (x, None) if _is_array(x) else (None, x)


def _draw_traced(x, indices, seed, offset, return_valid, top_k=None, top_p=None, min_p=None, top_k_first=None, logits=False):
    (ks, k), (ps, p), (ms, m), (seeds, seed), (offsets, offset) = (_split(number) for number in (top_k, top_p, min_p, seed, offset))
    ids, valid = arrays.torch_of(x).ops.foveal.sample.default(x, indices, ks, ps, ms, k, p, m, top_k_first, logits, return_valid, seeds, offsets, seed, offset)
    return (ids, valid) if return_valid else ids


def _draw(x, indices, generator, seed, offset, return_valid=False, **filters):
    if generator is None and core.is_compiled(x):
        return _draw_traced(x, indices, seed, offset, return_valid, **filters)
    x = _rows(x)
    _check_rows(indices, x.shape[0])
    if "top_p" in filters or (indices is not None and indices.shape[0] != x.shape[0]):  # top_k or min_p alone, as many as there are rows: of samples
        filters.update({name: _of_samples(filters[name], x.shape[0], indices) for name in ("top_k", "top_p", "min_p") if name in filters})
    n = x.shape[0] if indices is None else indices.shape[0]
    ids = arrays.empty((n,), "i32" if indices is None else arrays.dtype_of(indices), x)
    valid = arrays.empty((n,), "u8", x) if return_valid else None
    _sample(core.context_for(arrays.device_of(x)), x, ids, rows=indices, valid=valid, **filters, **_random(seed, offset, generator, n, x))
    if not return_valid:
        return ids
    torch = arrays.torch_of(valid)
    return ids, valid.view(torch.bool if torch is not None else np.bool_)


def sampling_from_probs(probs, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None, return_valid=False):
    """One id a row of probs [rows, vocab]: int32 [rows]; with indices [batch] sample i is of row indices[i], and ids have the dtype of indices. With
    return_valid also bool [batch]: the row had something to draw."""
    _check_nan(probs, "probs", check_nan)
    return _draw(probs, indices, generator, seed, offset, return_valid)


def sampling_from_logits(logits, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None):
    """sampling_from_probs of softmax(logits)."""
    _check_nan(logits, "logits", check_nan)
    return _draw(logits, indices, generator, seed, offset, logits=True)


def top_p_sampling_from_probs(probs, top_p, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None, return_valid=False):
    """sampling_from_probs of the smallest set of the largest probabilities that has a share of top_p (a float or [batch])."""
    _check_nan(probs, "probs", check_nan)
    return _draw(probs, indices, generator, seed, offset, return_valid, top_p=_share(top_p, probs, indices))


def top_k_sampling_from_probs(probs, top_k, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None, return_valid=False):
    """sampling_from_probs of the top_k largest probabilities (an int or [batch])."""
    _check_nan(probs, "probs", check_nan)
    return _draw(probs, indices, generator, seed, offset, return_valid, top_k=_count(top_k, probs, indices))


def min_p_sampling_from_probs(probs, min_p, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None, return_valid=False):
    """sampling_from_probs of the probabilities that are at least min_p (a float or [batch]) times the largest."""
    _check_nan(probs, "probs", check_nan)
    return _draw(probs, indices, generator, seed, offset, return_valid, min_p=_share(min_p, probs, indices))


def _in_order(filter_apply_order):
    if filter_apply_order not in ("top_k_first", "joint"):
        raise ValueError(f"Invalid filter_apply_order: {filter_apply_order}")
    return filter_apply_order == "top_k_first"


def top_k_top_p_sampling_from_probs(probs, top_k, top_p, indices=None, filter_apply_order="top_k_first", deterministic=True, generator=None, check_nan=False,
                                    seed=None, offset=None, return_valid=False, top_k_max=None):
    """Both filters. "top_k_first": top_p is a share of what top_k leaves; "joint": of the whole row."""
    first = _in_order(filter_apply_order)
    _check_nan(probs, "probs", check_nan)
    return _draw(probs, indices, generator, seed, offset, return_valid, top_k=_count(top_k, probs, indices), top_p=_share(top_p, probs, indices), top_k_first=first)


def top_k_top_p_sampling_from_logits(logits, top_k, top_p, indices=None, filter_apply_order="top_k_first", deterministic=True, generator=None, check_nan=False,
                                     seed=None, offset=None, top_k_max=None):
    """top_k_top_p_sampling_from_probs of softmax(logits), in one pass over them more."""
    first = _in_order(filter_apply_order)
    _check_nan(logits, "probs", check_nan)
    return _draw(logits, indices, generator, seed, offset, logits=True, top_k=_count(top_k, logits, indices), top_p=_share(top_p, logits, indices), top_k_first=first)


# ---- rows to rows ----


def softmax(logits, temperature=None, enable_pdl=None):
    """float32 [rows, vocab]: softmax(logits / temperature), temperature a number or a vector [rows]; 0 leaves the largest logits."""
    if temperature is not None:
        if isinstance(temperature, bool) or not (_is_array(temperature) or isinstance(temperature, Real)):
            raise TypeError("temperature must be None, a real scalar, or a 1D floating-point tensor with one value per logits row")
        if _is_array(temperature):
            _check_temperature(temperature, logits)
            temperature = _per_row(temperature, "f32", logits)
    if core.is_compiled(logits):
        temperatures, number = _split(temperature)
        return arrays.torch_of(logits).ops.foveal.softmax(logits, temperatures, 1.0 if number is None else float(number))
    logits = _rows(logits)
    probs = arrays.empty(tuple(logits.shape), "f32", logits)
    _softmax(core.context_for(arrays.device_of(logits)), logits, 1.0 if temperature is None else temperature, probs)
    return probs


def _check_temperature(temperature, logits):
    if temperature.ndim != 1:
        raise ValueError(f"temperature tensor must be 1D with one value per logits row, got shape {tuple(temperature.shape)}")
    if temperature.shape[0] != logits.shape[0]:
        raise ValueError(f"temperature tensor length must equal logits.size(0) ({logits.shape[0]}), got {temperature.shape[0]}")
    if arrays.device_of(temperature) != arrays.device_of(logits):
        raise ValueError(f"temperature tensor must be on the same device as logits ({arrays.device_of(logits)}), got {arrays.device_of(temperature)}")
    if arrays.dtype_of(temperature) not in ("f16", "bf16", "f32", "f64", "torch.float64"):
        raise ValueError(f"temperature tensor must have dtype float16, bfloat16, float32, or float64, got {temperature.dtype}")


_FILTERS = {"top_p_renorm": _top_p_renorm, "top_k_renorm": _top_k_renorm, "top_k_mask": _top_k_mask}


def _filtered(name, x, number):
    if core.is_compiled(x):
        numbers, number = _split(number)
        return arrays.torch_of(x).ops.foveal.filtered(name, x, numbers, 0.0 if number is None else float(number))
    x, function = _rows(x), _FILTERS[name]
    y = arrays.empty(tuple(x.shape), arrays.dtype_of(x), x)
    function(core.context_for(arrays.device_of(x)), x, number, y)
    return y


def top_p_renorm_probs(probs, top_p, is_deterministic=False):
    """probs [rows, vocab] with the smallest set of largest values that has a share of top_p, divided by its sum; 0 elsewhere."""
    return _filtered("top_p_renorm", probs, _share(top_p, probs))


def top_k_renorm_probs(probs, top_k, is_deterministic=False):
    """probs [rows, vocab] with the top_k largest values, divided by their sum; 0 elsewhere."""
    return _filtered("top_k_renorm", probs, _count(top_k, probs))


def top_k_mask_logits(logits, top_k):
    """logits [rows, vocab] with the top_k largest; -inf elsewhere."""
    return _filtered("top_k_mask", logits, _count(top_k, logits))


top_p_renorm_prob = top_p_renorm_probs
top_k_renorm_prob = top_k_renorm_probs


# ---- drafts ----


def chain_speculative_sampling(draft_probs, draft_token_ids, target_probs, maybe_output_accepted_token_num=None, maybe_output_emitted_draft_token_num=None,
                               deterministic=True, generator=None, seed=None, offset=None):
    """Verifies chains of drafted tokens: draft_probs [batch, n, vocab], draft_token_ids [batch, n], target_probs [batch, n + 1, vocab]. Returns (ids, accepted,
    emitted): int32 [batch, n + 1] with the accepted drafts, one token drawn behind them, and -1; how many drafts pass when looked at alone; how many the chain
    has. The last two are added to the tensors that are given."""
    if generator is None and core.is_compiled(target_probs):
        given = (maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num)
        counts = [arrays.zeros((draft_token_ids.shape[0],), "i32", target_probs) if x is None else x for x in given]
        (seeds, seed), (offsets, offset) = _split(seed), _split(offset)
        ids = arrays.torch_of(target_probs).ops.foveal.verify.default(draft_probs, draft_token_ids, target_probs, *counts, seeds, offsets, seed, offset)
        return ids, counts[0], counts[1]
    draft_probs, target_probs = _rows(draft_probs), _rows(target_probs)
    if arrays.dtype_of(draft_token_ids) not in ("i32", "i64"):
        draft_token_ids = arrays.cast(draft_token_ids, "i32")
    batch, n = draft_token_ids.shape
    ids = arrays.empty((batch, n + 1), "i32", target_probs)
    counts = [arrays.zeros((batch,), "i32", target_probs) if x is None else x
              for x in (maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num)]
    _verify(core.context_for(arrays.device_of(target_probs)), draft_probs, draft_token_ids, target_probs, ids, num_accepted=counts[0], num_emitted=counts[1],
            **_random(seed, offset, generator, batch, target_probs))
    return ids, counts[0], counts[1]


__all__ = [
    "chain_speculative_sampling", "min_p_sampling_from_probs", "sampling_from_logits", "sampling_from_probs", "softmax", "top_k_mask_logits", "top_k_renorm_prob",
    "top_k_renorm_probs", "top_k_sampling_from_probs", "top_k_top_p_sampling_from_logits", "top_k_top_p_sampling_from_probs", "top_p_renorm_prob",
    "top_p_renorm_probs", "top_p_sampling_from_probs",
]
