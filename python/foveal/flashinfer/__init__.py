# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's attention surface on Foveal, and the norms, activations and samplers beside it: the same names, arguments, layouts
and conventions (log-sum-exp in base 2, causal masks aligned bottom-right, window_left). Torch tensors on the CPU or a GPU, or NumPy arrays; outputs are of
the kind of the inputs.

    import foveal.flashinfer as flashinfer          or   foveal.flashinfer.install(); import flashinfer

`backend=` and workspaces are accepted and leave the choice to the engine. What is not covered raises NotImplementedError with its name; `python -m foveal
coverage` prints the list."""

import importlib as _importlib
import sys as _sys
import types as _types

try:
    import numpy as _numpy      # noqa: F401
except ImportError as e:
    raise ImportError("foveal.flashinfer needs NumPy (foveal itself does not): pip install numpy") from e

from . import coverage, jit, testing
from ._core import errors
from .activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from .attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper, BatchDecodeWithAttentionSinkWrapper
from .cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from .decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
    single_decode_with_kv_cache,
)
from .mla import BatchDecodeMlaWithPagedKVCacheWrapper, BatchMLAPagedAttentionWrapper
from .norm import fused_add_rmsnorm, fused_add_rmsnorm_quant, gemma_fused_add_rmsnorm, gemma_rmsnorm, layernorm, rmsnorm, rmsnorm_quant
from .page import append_paged_kv_cache, append_paged_mla_kv_cache, get_batch_indices_positions, get_seq_lens
from .pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
from .prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from .quantization import packbits, segment_packbits
from .rope import (
    apply_llama31_rope,
    apply_llama31_rope_inplace,
    apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace,
    apply_rope,
    apply_rope_inplace,
    apply_rope_pos_ids,
    apply_rope_pos_ids_inplace,
    apply_rope_with_cos_sin_cache,
    apply_rope_with_cos_sin_cache_inplace,
)
from .sampling import (
    chain_speculative_sampling,
    min_p_sampling_from_probs,
    sampling_from_logits,
    sampling_from_probs,
    softmax,
    top_k_mask_logits,
    top_k_renorm_prob,
    top_k_renorm_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_logits,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_prob,
    top_p_renorm_probs,
    top_p_sampling_from_probs,
)
from .sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper
from .stateless import (
    cudnn_batch_decode_with_kv_cache,
    cudnn_batch_prefill_with_kv_cache,
    fmha_varlen,
    trtllm_batch_context_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
    trtllm_batch_decode_with_kv_cache_mla,
    trtllm_fmha_v2_prefill,
    trtllm_ragged_attention_deepseek,
    xqa,
    xqa_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache_mla,
)
from .utils import next_positive_power_of_2

__version__ = __git_version__ = "0.6.18"        # of the surface that this follows

# where upstream has what lies in .stateless, and the modules whose kernels a script may ask to build ahead
_ALSO = {
    "decode": ("BatchDecodeMlaWithPagedKVCacheWrapper", "cudnn_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache",
               "trtllm_batch_decode_with_kv_cache_mla", "xqa_batch_decode_with_kv_cache", "xqa_batch_decode_with_kv_cache_mla"),
    "prefill": ("cudnn_batch_prefill_with_kv_cache", "fmha_varlen", "trtllm_batch_context_with_kv_cache", "trtllm_fmha_v2_prefill", "trtllm_ragged_attention_deepseek"),
    "mla": ("trtllm_batch_decode_with_kv_cache_mla", "xqa_batch_decode_with_kv_cache_mla"),
    "cudnn": ("cudnn_batch_decode_with_kv_cache", "cudnn_batch_prefill_with_kv_cache"),
    "xqa": ("xqa",),
    "version": ("__version__", "__git_version__"),
}
_BUILT = {"activation": "gen_act_and_mul_module", "cascade": "gen_cascade_module", "norm": "gen_norm_module", "page": "gen_page_module",
          "quantization": "gen_quantization_module", "rope": "gen_rope_module", "sampling": "gen_sampling_module"}
_MODULES = ("activation", "attention", "cascade", "decode", "jit", "mla", "norm", "page", "pod", "prefill", "quantization", "rope", "sampling", "sparse", "testing", "utils")
# upstream's modules within modules that are one here
_PARTS = {"attention": ("_core",), "cudnn": ("decode", "prefill"), "cute_dsl": ("utils",), "cutile": ("cutile_common",), "jit.attention": ("modules",),
          "mla": ("_core",), "quantization": ("packbits",),
          "jit": ("activation", "cascade", "core", "mla", "norm", "page", "quantization", "rope", "sampling", "xqa")}


def _module(where):
    """A module of this package; made where upstream has one and this package has none."""
    full = f"{__name__}.{where}"
    if full not in _sys.modules:
        _sys.modules[full] = _types.ModuleType(full, f"Names of flashinfer.{where}.")
        setattr(_sys.modules[__name__], where, _sys.modules[full])
    return _sys.modules[full]


def _add_names():
    """Names where callers import them from."""
    here = _sys.modules[__name__]
    for where, names in _ALSO.items():
        found = {name: globals()[name] for name in names}
        vars(_module(where)).update(found)
    for where, name in _BUILT.items():
        setattr(_module(where), name, jit.generator(f"{__name__}.{where}", name))
    jit.attention.modules = jit.attention
    here.cudnn.CUDNN_AVAILABLE = True       # what callers ask before they want an lse or float16
    for where, word in (("cutile", "is_cuda_tile_available"), ("cute_dsl", "is_cute_dsl_available")):
        setattr(_module(where), word, lambda: False)        # no kernels of those: callers choose others
    for where, parts in _PARTS.items():
        for part in parts:
            _sys.modules[f"{__name__}.{where}.{part}"] = _sys.modules[f"{__name__}.{where}"]
    here.xqa = here.xqa.xqa                 # flashinfer.xqa is the function, as upstream
    _add_refusers()


def _add_refusers():
    """Names that are not covered: importable from where callers import them, and refusing when called."""
    here = _sys.modules[__name__]
    for name, (where, _) in coverage.UNCOVERED.items():
        module = _module(where)
        if not hasattr(module, name):
            setattr(module, name, coverage.refuser(name))
        if not hasattr(here, name):
            setattr(here, name, getattr(module, name))


_add_names()


def install():
    """Makes `import flashinfer` mean this package, for modules imported from now on. RuntimeError when another flashinfer is imported already."""
    here = _sys.modules[__name__]
    if _sys.modules.get("flashinfer", here) is not here:
        raise RuntimeError("another flashinfer is imported already: call install() before it is")
    for name in _MODULES:
        _importlib.import_module(f"{__name__}.{name}")
    prefix = __name__ + "."
    for full, module in list(_sys.modules.items()):
        if full.startswith(prefix) and not full[len(prefix):].startswith("_"):
            _sys.modules["flashinfer." + full[len(prefix):]] = module
    _sys.modules["flashinfer"] = here


__all__ = [name for name, _ in coverage.COVERED] + ["coverage", "errors", "install"]
