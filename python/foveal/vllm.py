# SPDX-License-Identifier: Apache-2.0
"""EXPERIMENTAL: Foveal as an attention backend of vLLM (0.14 to 0.33). Written against the published interfaces and tested on stubs of them; registration, the
choice of a backend and steps over caches of every layout ran with vLLM 0.33's own classes, not yet a served model.

    vllm serve MODEL --attention-backend CUSTOM                       on a GPU
    FOVEAL_VLLM_CPU=1 vllm serve MODEL                                on the CPU, in the place of CPU_ATTN

The entry point vllm.general_plugins calls register() in every worker. Decoder attention with 16-bit or 32-bit caches: grouped heads, sliding windows, soft cap,
ALiBi, sinks. Eager mode (piecewise CUDA graphs leave attention outside): a plan is made in the first layer of each kind of a step."""

import dataclasses
import logging
import os

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder

from ._engine import Layers, Step, append_slots

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class FovealMetadata:
    """A step for all layers of a cache group."""

    step: Step
    num_actual_tokens: int
    slot_mapping: torch.Tensor


class FovealMetadataBuilder(AttentionMetadataBuilder):
    """Reads a step's offsets, lengths and block table."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
        """NEVER: plans are made on the host, outside of captured code."""
        from vllm.v1.attention.backend import AttentionCGSupport

        return AttentionCGSupport.NEVER

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        m = common_attn_metadata
        n = m.num_reqs
        lengths = m.seq_lens[:n]
        if lengths.device.type != "cpu":
            lengths = lengths.cpu()
        rows = m.query_start_loc_cpu[:n + 1].numpy()
        if isinstance(m.causal, torch.Tensor):
            raise NotImplementedError("causal given per request")
        step = Step(rows, lengths.numpy(), m.block_table_tensor[:n], causal=bool(m.causal))
        return FovealMetadata(step, m.num_actual_tokens, m.slot_mapping)

    def use_cascade_attention(self, *args, **kwargs):
        return False


def _keys_and_values(kv_cache, head_size):
    """(k, v) [blocks, block_size, kv_heads, dim] of a layer's cache: [blocks, kv_heads, block_size, 2 * dim] in any order of memory, or, before vLLM had orders,
    [2, blocks, block_size, kv_heads, dim]."""
    if kv_cache.dim() == 5:
        return kv_cache.unbind(0)
    return kv_cache.transpose(1, 2).split(head_size, dim=-1)


class FovealImpl(AttentionImpl):
    """One layer."""

    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=None,
                 attn_type="decoder", kv_sharing_target_layer_name=None, sinks=None, **kwargs):
        if getattr(attn_type, "value", attn_type) != "decoder":
            raise NotImplementedError(f"attn_type {attn_type}: decoder attention only")
        if kv_cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
            raise NotImplementedError(f"kv_cache_dtype {kv_cache_dtype}: caches of 16 or 32 bits")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.as_tensor(alibi_slopes, dtype=torch.float32)
        self.sliding_window, self.logits_soft_cap, self.sinks = sliding_window, logits_soft_cap, sinks
        self.kv_cache_dtype, self.kv_sharing_target_layer_name = kv_cache_dtype, kv_sharing_target_layer_name

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output=None, output_scale=None, output_block_scale=None):
        """query [tokens, heads, dim], kv_cache as _keys_and_values takes it. Writes the rows of output that requests have and returns it; without metadata
        (profiling) it does nothing."""
        if output is None:
            output = torch.empty_like(query)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("quantised outputs")
        if attn_metadata is None:
            return output
        n, total = attn_metadata.num_actual_tokens, int(attn_metadata.step.rows[-1])        # the former may count padding
        k, v = _keys_and_values(kv_cache, self.head_size)
        if self.kv_sharing_target_layer_name is None and key is not None:
            append_slots(key[:n], value[:n], k, v, attn_metadata.slot_mapping[:n])
        shape = (-1, self.num_heads, self.head_size)
        _layers.run(attn_metadata.step, query[:total].view(shape), k, v, output[:total].view(shape), scale=self.scale, window=self.sliding_window,
                    soft_cap=self.logits_soft_cap, sinks=self.sinks, slopes=self.alibi_slopes)
        return output


_layers = Layers()


class FovealBackend(AttentionBackend):
    """What vLLM asks about the backend."""

    accept_output_buffer = True
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name():
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return FovealImpl

    @staticmethod
    def get_metadata_cls():
        return FovealMetadata

    @staticmethod
    def get_builder_cls():
        return FovealMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def get_supported_head_sizes(cls):
        return []                       # any

    @classmethod
    def supports_sink(cls):
        return True

    @classmethod
    def supports_sliding_window(cls):
        return True

    @classmethod
    def supports_non_causal(cls):
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls):
        """False: plans are made of the host's row offsets."""
        return False

    @staticmethod
    def use_cascade_attention(*args, **kwargs):
        return False


class FovealCpuBackend(FovealBackend):
    """The same under the name that vLLM's CPU platform looks for."""

    @staticmethod
    def get_name():
        return "CPU_ATTN"


def register():
    """The entry point: makes the backend known as CUSTOM; with FOVEAL_VLLM_CPU=1 also as CPU_ATTN. May be called again. Where this vLLM has no such registry, a
    warning says so and the engine goes on with its own."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        _log.warning("foveal: this vLLM has no registry of attention backends: %s", error)
        return
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.FovealBackend")
    if os.environ.get("FOVEAL_VLLM_CPU") == "1":
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.FovealCpuBackend")


__all__ = ["FovealBackend", "FovealCpuBackend", "FovealImpl", "FovealMetadata", "FovealMetadataBuilder", "register"]
