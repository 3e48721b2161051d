# SPDX-License-Identifier: Apache-2.0
"""What is covered of FlashInfer's surface, and what is not: the one list that makes the table of the docs and the functions that refuse."""

_ALL = "eager and CUDA-graph mode; CPU and CUDA arrays"

COVERED = [
    ("single_decode_with_kv_cache", ""),
    ("single_prefill_with_kv_cache", "8-bit queries are read as o_dtype; NVFP4 with kv_cache_sf"),
    ("single_prefill_with_kv_cache_return_lse", ""),
    ("BatchDecodeWithPagedKVCacheWrapper", _ALL + "; jit_args: AttentionSink only; no window_right"),
    ("CUDAGraphBatchDecodeWithPagedKVCacheWrapper", ""),
    ("fast_decode_plan", ""),
    ("BatchPrefillWithPagedKVCacheWrapper", _ALL + "; sinks= is obeyed; jit_args: AttentionSink only; skip_softmax, fp16 softmax and spcompress options change nothing"),
    ("BatchPrefillWithRaggedKVCacheWrapper", _ALL + "; q_scale, k_scale, v_scale and multi-item scoring are obeyed; jit_args: AttentionSink only; no o_scale"),
    ("BatchAttention", "any number of KV heads; returns (out, lse)"),
    ("BatchAttentionWithAttentionSinkWrapper", ""),
    ("BatchDecodeWithAttentionSinkWrapper", ""),
    ("PODWithPagedKVCacheWrapper", "masks of either part are planned with in each run"),
    ("BatchPODWithPagedKVCacheWrapper", ""),
    ("BatchMLAPagedAttentionWrapper", "ckv and kpe caches stay two tensors; no ckv_scale_arr, no o_scale"),
    ("BatchDecodeMlaWithPagedKVCacheWrapper", "of 0.6; caches of 16 and 32 bits"),
    ("MultiLevelCascadeAttentionWrapper", "one plan over all levels where masks allow"),
    ("BatchDecodeWithSharedPrefixPagedKVCacheWrapper", ""),
    ("BatchPrefillWithSharedPrefixPagedKVCacheWrapper", ""),
    ("BlockSparseAttentionWrapper", "no block_mask"),
    ("VariableBlockSparseAttentionWrapper", "no ALIBI"),
    ("merge_state", "any number of heads"),
    ("merge_state_in_place", ""),
    ("merge_states", ""),
    ("append_paged_kv_cache", "padding rows (-1) are skipped"),
    ("append_paged_mla_kv_cache", ""),
    ("get_batch_indices_positions", ""),
    ("get_seq_lens", ""),
    ("packbits", ""),
    ("segment_packbits", ""),
    ("apply_rope", ""),
    ("apply_rope_inplace", ""),
    ("apply_rope_pos_ids", ""),
    ("apply_rope_pos_ids_inplace", ""),
    ("apply_llama31_rope", ""),
    ("apply_llama31_rope_inplace", ""),
    ("apply_llama31_rope_pos_ids", ""),
    ("apply_llama31_rope_pos_ids_inplace", ""),
    ("apply_rope_with_cos_sin_cache", ""),
    ("apply_rope_with_cos_sin_cache_inplace", ""),
    ("rmsnorm", "2-D and 3-D; float32 weights, too"),
    ("fused_add_rmsnorm", ""),
    ("gemma_rmsnorm", ""),
    ("gemma_fused_add_rmsnorm", ""),
    ("rmsnorm_quant", "tensors of torch; the division is an operation of its own"),
    ("fused_add_rmsnorm_quant", ""),
    ("layernorm", ""),
    ("silu_and_mul", ""),
    ("gelu_and_mul", ""),
    ("gelu_tanh_and_mul", ""),
    ("softmax", "temperature 0 leaves the largest"),
    ("sampling_from_probs", "other ids than upstream's from the same seed; the same on every device"),
    ("sampling_from_logits", ""),
    ("top_k_sampling_from_probs", "ties with the last one stay"),
    ("top_p_sampling_from_probs", ""),
    ("min_p_sampling_from_probs", ""),
    ("top_k_top_p_sampling_from_probs", "both orders"),
    ("top_k_top_p_sampling_from_logits", "both orders"),
    ("top_k_renorm_probs", "also as top_k_renorm_prob"),
    ("top_p_renorm_probs", "also as top_p_renorm_prob"),
    ("top_k_mask_logits", ""),
    ("chain_speculative_sampling", ""),
    ("trtllm_batch_decode_with_kv_cache", "a mask is read on the host; no kv_cache_sf, no 8-bit outputs"),
    ("trtllm_batch_context_with_kv_cache", "no kv_cache_sf, no 8-bit outputs"),
    ("trtllm_batch_decode_with_kv_cache_mla", "dense"),
    ("trtllm_ragged_attention_deepseek", "log-sum-exp in base 2"),
    ("trtllm_fmha_v2_prefill", "no ALiBi, chunks or statistics"),
    ("fmha_varlen", "returns (out, lse)"),
    ("xqa", "a mask is read on the host; no k_sf_cache, no 8-bit outputs"),
    ("xqa_batch_decode_with_kv_cache", "a mask is read on the host; no kv_cache_sf"),
    ("xqa_batch_decode_with_kv_cache_mla", ""),
    ("cudnn_batch_decode_with_kv_cache", "over pages"),
    ("cudnn_batch_prefill_with_kv_cache", "rows packed; returns (out, lse)"),
    ("next_positive_power_of_2", ""),
]

# name -> (module, why)
UNCOVERED = {
    "BatchPrefillWithCausalBidirectionalRangesWrapper": ("attention", "BatchPrefillWithPagedKVCacheWrapper with a custom mask"),
    "xqa_mla": ("xqa", "another library's kernels: BatchMLAPagedAttentionWrapper"),
    "nvfp4_quantize_append_paged_kv_cache": ("page", "foveal.append writes fp4_e2m1"),
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": ("page", "foveal.append writes fp4_e2m1"),
    "mla_rope_quantize_fp8": ("rope", "foveal.append turns, quantises and writes"),
    "rope_quantize_fp8": ("rope", "foveal.append turns, quantises and writes"),
    "rope_quantize_fp8_append_paged_kv_cache": ("rope", "foveal.append turns, quantises and writes"),
    "top_k": ("topk", "not attention"),
    "top_k_page_table_transform": ("topk", "not attention"),
    "top_k_ragged_transform": ("topk", "not attention"),
    "SegmentGEMMWrapper": ("gemm", "not attention"),
    "bmm_fp8": ("gemm", "not attention"),
    "mm_fp4": ("gemm", "not attention"),
    "mm_fp8": ("gemm", "not attention"),
    "fp4_quantize": ("fp4_quantization", "not attention"),
    "cutlass_fused_moe": ("fused_moe", "not attention"),
    "LogitsPipe": ("logits_processor", "the samplers by themselves: softmax, top_k_top_p_sampling_from_logits"),
    "silu_and_mul_scaled_nvfp4_experts_quantize": ("activation", "outputs are not quantised"),
    "concat_mla_k": ("concat_ops", "BatchMLAPagedAttentionWrapper reads two tensors"),
    "autotune": ("autotuner", "plans are made by a cost model: nothing is tuned"),
}


def refuser(name):
    """What stands for a name that is not covered: callable, and it says so."""
    where, why = UNCOVERED[name]

    def refuse(*args, **kwargs):
        raise NotImplementedError(f"flashinfer.{where}.{name} is not covered by foveal.flashinfer: {why}")

    words = {"__name__": name, "__qualname__": name, "__doc__": f"Not covered: {why}."}
    if name[0].isupper():           # a class, whose methods callers may name before they have one
        return type(name, (), {"__init__": refuse, **{method: refuse for method in ("plan", "run", "forward", "begin_forward")}, "__doc__": words["__doc__"]})
    for word, x in words.items():
        setattr(refuse, word, x)
    return refuse


def table():
    """The table of docs/flashinfer.md, in markdown."""
    lines = ["| name | covered | remark |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | yes | {remark} |" for name, remark in COVERED]
    lines += [f"| `{name}` | no | {why} |" for name, (_, why) in UNCOVERED.items()]
    return "\n".join(line.replace("|  |", "| |") for line in lines) + "\n"
