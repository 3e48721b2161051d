# SPDX-License-Identifier: Apache-2.0
"""Attention for Hugging Face transformers 5: "foveal" for plain forward passes and generate(), "paged|foveal" for continuous batching (generate_batch).

    import foveal.transformers
    foveal.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="foveal")            model.generate(...)
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="paged|foveal")      model.generate_batch(...)

Grouped heads, scaling, soft cap, sliding windows, sinks, padding and any boolean mask, on the CPU and on CUDA; inference only.

Nouns
  mask       what `foveal_mask` hands to every layer: None (causal, rows are the last keys), a 2-D padding mask [batch, keys] (the same, and only these keys
             count), or a dense 4-D one where a model asks for something else
  step       one forward pass. A plan is made once a step for each kind of layer and reused by all layers of the kind
  group      layers of a paged cache that share slots: full attention, or one sliding window

The paged function reads the cache in place: `read_index` is a page table with pages of one token. Only sliding layers whose chunk has more than one new token
take a copy of the keys, as the new tokens may overwrite old ones that the first rows still see."""

import threading
import weakref

import numpy as np
import torch

from . import Batch, append
from .flashinfer import _arrays as arrays
from .flashinfer import _core as core
from .flashinfer.quantization import segment_packbits

NAME = "foveal"

# ---- masks ----


def foveal_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, local_size=None, allow_is_causal_skip=True,
                allow_is_bidirectional_skip=False, config=None, **kwargs):
    """transformers' mask function: None or a 2-D padding mask where rows are causal and the last of the keys (a sliding window goes along as its attribute
    `foveal_window`), else sdpa's dense mask."""
    from transformers.masking_utils import prepare_padding_mask, sdpa_mask

    aligned = isinstance(q_offset, int) and kv_offset + kv_length == q_offset + q_length
    chunked = local_size is not None and getattr(config, "attention_chunk_size", None) == local_size
    if not allow_is_causal_skip or allow_is_bidirectional_skip or not aligned or (chunked and kv_offset + kv_length > local_size):
        return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function,
                         attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=False,
                         allow_is_bidirectional_skip=allow_is_bidirectional_skip, config=config, **kwargs)
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset:kv_offset + kv_length] if padding.shape[1] != kv_length else padding
        if bool(padding.all()):
            padding = None
    window = local_size if local_size is not None and not chunked and kv_length > local_size else None
    if window is not None:
        if padding is None:
            padding = torch.ones((batch_size, kv_length), dtype=torch.bool, device=kwargs.get("device", "cpu"))
        padding.foveal_window = window
    return padding


def _ranges(padding):
    """A padding mask [requests, keys] as the ranges that count: ({"ranges": [n, 2], "ranges_indptr": [requests + 1]}), None where all keys do."""
    kept = arrays.to_numpy(padding).astype(bool)
    if kept.all():
        return None
    edges = np.diff(np.pad(kept.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    request, first = np.nonzero(edges == 1)
    last = np.nonzero(edges == -1)[1]
    indptr = np.concatenate(([0], np.cumsum(np.bincount(request, minlength=len(kept)))))
    return {"ranges": np.stack((first, last), 1).astype(np.int32), "ranges_indptr": indptr.astype(np.int32)}


def _dense_bits(mask, batch, rows, keys):
    """A 4-D mask as bits, each request from a byte border. Boolean, or a float one of zeros and very negative numbers."""
    if mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if bool((hidden | (mask == 0)).logical_not().any()):
            raise NotImplementedError("attention_mask: biases added to the scores; boolean masks and float masks of 0 and -inf are taken")
        mask = hidden.logical_not()
    mask = mask[..., :keys]
    if mask.shape[1] != 1:
        if bool((mask != mask[:, :1]).any()):
            raise NotImplementedError("attention_mask: a mask that differs from head to head")
        mask = mask[:, :1]
    mask = mask.expand(batch, 1, rows, keys).reshape(-1)
    return segment_packbits(mask, np.arange(batch + 1, dtype=np.int64) * rows * keys, bitorder="little")[0]


# ---- plain attention ----

_local = threading.local()
_MAX_KEPT = 16


class _Plain:
    """Plans of one kind of layer on one thread, with what the last step was made from."""

    __slots__ = ("attention", "shape", "mask")

    def __init__(self, device):
        self.attention, self.shape, self.mask = core.Attention(device), None, None


def _plain_for(device, spec):
    """Of this thread; the last few kinds are kept."""
    table = getattr(_local, "table", None)
    if table is None:
        table = _local.table = {}
    plain = table.pop((device, spec), None) or _Plain(device)
    table[device, spec] = plain
    while len(table) > _MAX_KEPT:
        table.pop(next(iter(table)))
    return plain


def _check(module, dropout):
    if dropout and getattr(module, "training", False):
        raise NotImplementedError(f"dropout {dropout}: {NAME} is for inference; call model.eval()")


class _InferenceOnly(torch.autograd.Function):
    """Lets a forward pass run where gradients are on, and refuses the backward pass."""

    @staticmethod
    def forward(ctx, run, query, key, value):
        return run(query, key, value)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(f"{NAME} has no backward pass: train under \"sdpa\"")


def _guarded(run, query, key, value):
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return _InferenceOnly.apply(run, query, key, value)
    return run(query, key, value)


@torch.compiler.disable
def foveal_attention(module, query, key, value, attention_mask=None, dropout=0.0, scaling=None, sliding_window=None, softcap=None, s_aux=None, is_causal=None,
                     position_bias=None, **kwargs):
    """query [batch, heads, rows, dim], key and value [batch, kv_heads, keys, dim]. attention_mask: see the module's nouns. sliding_window: keys that a row sees,
    its own included. s_aux [heads]: sinks. Returns (out [batch, rows, heads, dim_v], None)."""
    if kwargs.get("cache") is not None:         # a transformers that has one name for both
        return foveal_paged_attention(module, query, key, value, attention_mask, dropout, scaling, sliding_window, softcap, s_aux, **kwargs)
    _check(module, dropout)
    if position_bias is not None:
        raise NotImplementedError("position_bias: biases added to the scores")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = getattr(attention_mask, "foveal_window", None) or sliding_window

    def run(query, key, value):
        return _attend(query, key, value, attention_mask, bool(causal), window, scaling, softcap, s_aux)

    return _guarded(run, query, key, value), None


def _attend(query, key, value, mask, causal, window, scaling, softcap, sinks):
    batch, heads, rows, dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    dense = mask is not None and mask.dim() == 4
    if mask is not None and mask.dim() not in (2, 4):
        raise ValueError(f"attention_mask has {mask.dim()} axes; 2 or 4")
    spec = core.make_spec(
        arrays.dtype_of(query), arrays.dtype_of(key), arrays.dtype_of(query), heads, kv_heads, dim, value.shape[3], sm_scale=scaling, custom_mask=dense,
        causal=causal and rows > 1 and not dense, window_left=window - 1 if window and causal and not dense else -1, logits_soft_cap=softcap,
        ranges=mask is not None and not dense)
    device = arrays.device_of(query)
    plain = _plain_for(device, spec)
    shape = (batch, rows, keys, None if mask is None or mask.is_inference() else mask._version)
    if plain.shape != shape or plain.mask is not mask:
        plain.shape = None              # an update that fails leaves no step
        _plan_plain(plain.attention, spec, batch, rows, keys, mask, dense, query)
        plain.shape, plain.mask = shape, mask
    q = query.transpose(1, 2).reshape(batch * rows, heads, dim)
    out = core.run(plain.attention, q, key.transpose(1, 2), value.transpose(1, 2), sinks=sinks)
    return out.view(batch, rows, heads, value.shape[3])


def _plan_plain(attention, spec, batch, rows, keys, mask, dense, like):
    """A request's keys are one page of the pool [batch, keys, kv_heads, dim]."""
    args = None
    if dense:
        args = {"bits": _dense_bits(mask, batch, rows, keys)}
    elif mask is not None:
        args = _ranges(mask[:, :keys]) or {"ranges": np.array([[0, keys]] * batch, np.int32), "ranges_indptr": np.arange(batch + 1, dtype=np.int32)}
        if like.device.type != "cpu":
            args = {name: arrays.to_device(x, like) for name, x in args.items()}
    ids = np.arange(batch, dtype=np.int32)
    page_ids = ids if like.device.type == "cpu" else (ids, arrays.to_device(ids, like))
    made = Batch(rows=None if rows == 1 else np.arange(batch + 1, dtype=np.int64) * rows, lengths=np.full(batch, keys, np.int64), page_size=max(keys, 1),
                 num_pages=batch, page_indptr=np.arange(batch + 1, dtype=np.int32), page_ids=page_ids, args=args)
    attention.update(spec, made, core.Need(batch, batch * rows, max(batch * keys, 1), batch), core.Mode(decode=rows == 1), core.stream_of(like))


# ---- paged attention ----


class _Offsets:
    """Offsets of a step on the host: rows, and keys by kind of layer."""

    def __init__(self, cu_q, cu_k):
        named = cu_k if isinstance(cu_k, dict) else {None: cu_k}
        parts = [cu_q, *named.values()]
        host = arrays.to_numpy(torch.cat(parts) if cu_q.device.type != "cpu" else torch.cat(parts).clone())
        cuts = np.cumsum([len(x) for x in parts])[:-1]
        self.rows, *keys = np.split(host, cuts)
        self._keys = dict(zip(named, keys))
        self.one_each = bool((np.diff(self.rows) == 1).all())

    def keys(self, kind):
        """kind: the layer type that the engine names."""
        return self._keys[None] if None in self._keys else self._keys[kind]


class _Paged:
    """What a cache's layers share within a step. Layers run in order, so an index that does not grow begins a new step."""

    def __init__(self, device):
        self.device = device
        self.attentions = {}
        self.last_layer = None
        self.offsets = None
        self.planned = {}

    def enter(self, layer, cu_q, cu_k):
        if self.last_layer is None or layer <= self.last_layer:
            self.planned = {}
            self.offsets = _Offsets(cu_q, cu_k)
        self.last_layer = layer

    def attention(self, key):
        attention = self.attentions.get(key)
        if attention is None:
            attention = self.attentions[key] = core.Attention(self.device)
        return attention


_states = weakref.WeakKeyDictionary()


def _state_of(cache, device):
    state = _states.get(cache)
    if state is None or state.device != device:
        state = _states[cache] = _Paged(device)
    return state


@torch.compiler.disable
def foveal_paged_attention(module, query, key, value, attention_mask=None, dropout=0.0, scaling=None, sliding_window=None, softcap=None, s_aux=None, *,
                           cache=None, cu_seq_lens_q=None, cu_seq_lens_k=None, read_index=None, write_index=None, **kwargs):
    """query [1, heads, rows, dim], key and value [1, kv_heads, rows, dim] of all requests; writes the new keys into the cache and attends. Returns (out [1, rows,
    heads, dim_v], None)."""
    if cache is None:
        raise ValueError(f"\"paged|{NAME}\" was called without a paged cache; it is for generate_batch: use \"{NAME}\" elsewhere")
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"\"paged|{NAME}\" plans on the host and cannot be captured: ContinuousBatchingConfig(use_cuda_graph=False)")
    _check(module, dropout)
    state = _state_of(cache, arrays.device_of(query))
    state.enter(module.layer_idx, cu_seq_lens_q, cu_seq_lens_k)
    layer = _Layer(cache, module.layer_idx)
    q = query.squeeze(0).transpose(0, 1)
    spec = core.make_spec(
        arrays.dtype_of(q), arrays.dtype_of(layer.k), arrays.dtype_of(q), q.shape[1], key.shape[1], q.shape[2], value.shape[3], sm_scale=scaling,
        causal=True, window_left=-1 if layer.window is None else layer.window - 1, logits_soft_cap=softcap)
    keys = _write(state, layer, (key, value), read_index, write_index)
    attention = _plan_paged(state, (layer.group, spec), spec, keys, q, layer)
    out = torch.empty((q.shape[0], q.shape[1], value.shape[3]), dtype=query.dtype, device=query.device)
    total = int(state.offsets.rows[-1])
    if total < q.shape[0]:
        out[total:].zero_()
    core.run(attention, q, keys.k, keys.v, out=out, sinks=s_aux)
    return out.unsqueeze(0), None


class _Layer:
    """A layer of a paged cache, in the words of whichever transformers it is.

    group      its entry in read_index and write_index         kind     "full_attention", "sliding_attention"
    k, v       token slots [slots, kv_heads, dim]              window   tokens that a row sees, None: all"""

    __slots__ = ("group", "kind", "k", "v", "window", "gather")

    def __init__(self, cache, index):
        allocators = getattr(cache, "layer_to_allocator", None)
        if allocators is not None:                          # 5.20 and later: an allocator for each group
            owner = allocators[index]
            self.group, self.kind, self.window = owner.index, owner.layer_type, getattr(owner, "sliding_window", None)
            k, v = owner._kv_token_views[index]
            n = min(k.shape[0], v.shape[0])                 # they begin at different places of one tensor
            self.k, self.v = k[:n], v[:n]

            def gather(key, value, reads, writes):
                rows = [x.squeeze(0).transpose(0, 1) for x in (key, value)]
                return owner.update(*rows, index, reads[self.group], writes[self.group])

        else:
            self.group, slot = cache.layer_index_to_group_indices[index]
            window = cache.sliding_windows[index]
            self.window = None if window in (None, 0, 1) else window
            self.kind = "full_attention" if self.window is None else "sliding_attention"
            self.k, self.v = cache.key_cache[slot], cache.value_cache[slot]

            def gather(key, value, reads, writes):
                return cache.update(key_states=key, value_states=value, layer_idx=index, read_index=reads, write_index=writes)

        self.gather = gather


class _Keys:
    """Where a layer's keys lie: `ids` into a pool of pages of one token, or None: packed, request after request."""

    __slots__ = ("k", "v", "ids")

    def __init__(self, k, v, ids=None):
        self.k, self.v, self.ids = k, v, ids


def _write(state, layer, new, reads, writes):
    """Puts the new keys [1, kv_heads, rows, dim] into the cache and says where all keys of the step can be read."""
    read, write = reads[layer.group], writes[layer.group]
    n = len(state.offsets.rows) - 1
    in_place = layer.window is None or (state.offsets.one_each and write.numel() == n)
    if read.numel() and not in_place:
        return _Keys(*layer.gather(*new, reads, writes))
    rows = [x.squeeze(0).transpose(0, 1) for x in new]
    pages = [x.unsqueeze(1) for x in (layer.k, layer.v)]
    append(core.context_for(state.device), *rows, *pages, slots=write)
    if not read.numel():
        return _Keys(*rows)
    return _Keys(*pages, read if layer.window is None else _with_new(state, layer, read, write, n))


def _with_new(state, layer, read, write, n):
    """A decode step of a sliding group: each request's last entry stands for its new token, which by now lies at its write slot."""
    ids = state.planned.get(("ids", layer.group))
    if ids is None:
        last = torch.from_numpy(state.offsets.keys(layer.kind)[1:n + 1].astype(np.int64) - 1)
        ids = state.planned["ids", layer.group] = read.index_copy(0, last.to(read.device), write[:n].to(read.dtype))
    return ids


def _plan_paged(state, name, spec, keys, q, layer):
    """Once a step and group, as the first of its layers comes."""
    form = (keys.ids is None, keys.k.shape[0])
    attention = state.attention(name)
    if state.planned.get(name) == form:
        return attention
    rows = state.offsets.rows
    n, total, decode = len(rows) - 1, int(rows[-1]), state.offsets.one_each
    offsets = rows if keys.ids is None and keys.k.shape[0] == q.shape[0] else state.offsets.keys(layer.kind)
    used = int(offsets[-1])
    if keys.ids is None:
        batch = Batch(rows=None if decode else rows, kv_indptr=offsets)
    else:
        batch = Batch(rows=None if decode else rows, lengths=np.diff(offsets), page_size=1, num_pages=keys.k.shape[0], page_indptr=offsets,
                      page_ids=keys.ids if state.device == "cpu" else (None, keys.ids))
    need = core.Need(n, max(total, 1), max(used, 1), 0 if keys.ids is None else max(used, 1))
    attention.update(spec, batch, need, core.Mode(decode=decode), core.stream_of(q))
    state.planned[name] = form
    return attention


# ---- registration ----


def register(name=NAME, *, replace_sdpa=False):
    """Makes attn_implementation=NAME and "paged|NAME" known to transformers. May be called again. `name` must not contain "flash", which transformers takes for
    FlashAttention. replace_sdpa: also in the place of "sdpa", for releases whose continuous batching takes no other names (5.20 and later). Raises ImportError
    without transformers 5."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if "flash" in name or "|" in name:
        raise ValueError(f"name is {name!r}; it may contain neither \"flash\" nor \"|\"")
    AttentionInterface.register(name, foveal_attention)
    AttentionMaskInterface.register(name, foveal_mask)
    # No mask function for the paged name: transformers would build a dense one that does not know the packed layout.
    AttentionInterface.register(f"paged|{name}", foveal_paged_attention)
    if replace_sdpa:
        AttentionInterface.register("sdpa", foveal_attention)


__all__ = ["NAME", "foveal_attention", "foveal_mask", "foveal_paged_attention", "register"]
