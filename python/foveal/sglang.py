# SPDX-License-Identifier: Apache-2.0
"""EXPERIMENTAL: Foveal as an attention backend of SGLang. Written against the published interface (to 0.5.23) and tested on stubs of it; registration and steps ran
with SGLang's own classes, not yet a served model.

    python -m sglang.launch_server --model-path MODEL --attention-backend foveal --disable-cuda-graph

The entry point sglang.srt.plugins calls register(). SGLang addresses keys by token slots: its req_to_token table is a page table with pages of one token, read in
place. Decoder attention: grouped heads, sliding windows, soft cap, sinks, dims of K and V that differ."""

import logging

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from ._engine import Layers, Step

_log = logging.getLogger(__name__)

NAME = "foveal"


def _host(x):
    """A NumPy array of a tensor, a list or None."""
    if isinstance(x, torch.Tensor):
        return x.detach().cpu().numpy()
    return np.asarray(x)


class FovealAttnBackend(AttentionBackend):
    """One per model runner. A forward pass begins with init_forward_metadata; the first layer of each kind plans."""

    def __init__(self, model_runner):
        super().__init__()
        self._table = model_runner.req_to_token_pool.req_to_token
        self._pool = getattr(model_runner, "token_to_kv_pool", None)        # a batch had it until SGLang 0.5.20 or so
        if getattr(self._pool, "swa_layer_nums", 0):
            raise NotImplementedError("a pool of its own for layers with sliding windows: start the server with --disable-hybrid-swa-memory")
        self._layers = Layers()
        self._step = None

    def init_forward_metadata(self, forward_batch):
        mode = forward_batch.forward_mode
        lengths = _host(forward_batch.seq_lens if forward_batch.seq_lens_cpu is None else forward_batch.seq_lens_cpu).astype(np.int64)
        if mode.is_decode() or mode.is_idle():
            counts = np.ones(len(lengths), np.int64)
        else:
            counts = _host(forward_batch.extend_seq_lens if forward_batch.extend_seq_lens_cpu is None else forward_batch.extend_seq_lens_cpu).astype(np.int64)
        if getattr(forward_batch, "spec_info", None) is not None:
            raise NotImplementedError("speculative decoding: trees of drafts")
        rows = np.concatenate(([0], np.cumsum(counts)))
        self._step = Step(rows, lengths, self._table, table_rows=_host(forward_batch.req_pool_indices))

    # Captured decode steps would need a plan before each replay; both generations of SGLang's interface ask here first.
    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        raise NotImplementedError("foveal plans on the host: start the server with --disable-cuda-graph")

    def get_cuda_graph_seq_len_fill_value(self):
        return 1

    def support_triton(self):
        return False

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def _forward(self, q, k, v, layer, batch, save_kv_cache, sinks=None, **kwargs):
        """q [rows, heads * dim] (or 3-D). Returns [rows, heads * dim_v]."""
        kind = getattr(layer, "attn_type", "decoder")
        if layer.is_cross_attention or getattr(kind, "value", kind) not in ("decoder", None):
            raise NotImplementedError(f"attention of the type {kind}: decoder attention only")
        pool = batch.token_to_kv_pool if self._pool is None else self._pool
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = torch.empty((q.shape[0], layer.tp_q_head_num, layer.v_head_dim), dtype=q.dtype, device=q.device)
        total = int(self._step.rows[-1])
        if total < q.shape[0]:
            out[total:].zero_()
        keys, values = (x.view(x.shape[0], 1, -1, dim) for x, dim in ((pool.get_key_buffer(layer.layer_id), layer.qk_head_dim),
                                                                     (pool.get_value_buffer(layer.layer_id), layer.v_head_dim)))
        window = getattr(layer, "sliding_window_size", -1)
        # SGLang's window counts keys beside a row's own.
        self._layers.run(self._step, q, keys, values, out, scale=layer.scaling, window=window + 1 if window is not None and window >= 0 else None,
                         soft_cap=layer.logit_cap, sinks=sinks)
        return out.flatten(1)


def register():
    """The entry point: adds "foveal" to SGLang's backends and to the choices of --attention-backend. May be called again. Where this SGLang has no such registry, a
    warning says so."""
    try:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
    except ImportError as error:
        _log.warning("foveal: this SGLang has no registry of attention backends: %s", error)
        return
    register_attention_backend(NAME)(FovealAttnBackend)
    try:
        from sglang.srt.server_args import add_attention_backend_choices
    except ImportError:
        return                          # an SGLang that does not check the name
    add_attention_backend_choices([NAME])


__all__ = ["FovealAttnBackend", "NAME", "register"]
