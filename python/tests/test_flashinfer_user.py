# SPDX-License-Identifier: Apache-2.0
"""What scripts written for FlashInfer do around attention: the imports they begin with, arguments by position, caches that are views, index tensors of either
width, the JIT argument for sinks. Torch tensors of the CPU, or of a GPU with --device cuda."""

import functools
import importlib
import math

import numpy as np
import pytest

import foveal.flashinfer as flashinfer
from reference import Pages, TorchLib, attend, close, lse_close, numbers

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("by_default")

IMPORTS = {
    "": "single_decode_with_kv_cache single_prefill_with_kv_cache BatchPrefillWithRaggedKVCacheWrapper MultiLevelCascadeAttentionWrapper merge_state",
    "decode": "BatchDecodeWithPagedKVCacheWrapper CUDAGraphBatchDecodeWithPagedKVCacheWrapper fast_decode_plan get_seq_lens _get_range_buf "
              "trtllm_batch_decode_with_kv_cache xqa_batch_decode_with_kv_cache cudnn_batch_decode_with_kv_cache",
    "prefill": "BatchPrefillWithPagedKVCacheWrapper single_prefill_with_kv_cache_return_lse "
               "trtllm_batch_context_with_kv_cache trtllm_ragged_attention_deepseek cudnn_batch_prefill_with_kv_cache",
    "cascade": "merge_state merge_states merge_state_in_place",
    "page": "append_paged_kv_cache get_batch_indices_positions get_seq_lens append_paged_mla_kv_cache",
    "quantization": "packbits segment_packbits gen_quantization_module",
    "sparse": "BlockSparseAttentionWrapper VariableBlockSparseAttentionWrapper convert_bsr_mask_layout",
    "mla": "BatchMLAPagedAttentionWrapper trtllm_batch_decode_with_kv_cache_mla",
    "pod": "PODWithPagedKVCacheWrapper",
    "attention": "BatchAttention BatchAttentionWithAttentionSinkWrapper",
    "jit": "build_jit_specs gen_batch_prefill_module JitSpec MissingJITCacheError parallel_load_modules env",
    "testing": "bench_gpu_time bench_gpu_time_with_cuda_event set_seed attention_tflops_per_sec_with_actual_seq_lens attention_tb_per_sec",
    "testing.utils": "bench_gpu_time set_seed",
    "cudnn": "cudnn_batch_decode_with_kv_cache cudnn_batch_prefill_with_kv_cache",
    "rope": "apply_rope apply_rope_with_cos_sin_cache_inplace gen_rope_module mla_rope_quantize_fp8",
    "sampling": "softmax top_k_top_p_sampling_from_logits chain_speculative_sampling gen_sampling_module",
    "norm": "rmsnorm fused_add_rmsnorm gemma_rmsnorm gemma_fused_add_rmsnorm layernorm gen_norm_module rmsnorm_quant",
    "activation": "silu_and_mul gelu_and_mul gelu_tanh_and_mul gen_act_and_mul_module",
    "jit.utils": "filename_safe_dtype_map",
    "jit.attention": "gen_batch_prefill_attention_sink_module",
    "jit.attention.variants": "attention_sink_decl",
    "utils": "PosEncodingMode MaskMode TensorLayout get_alibi_slopes is_sm90a_supported is_sm100a_supported is_sm120a_supported get_compute_capability "
             "get_device_sm_count determine_attention_backend has_flashinfer_jit_cache canonicalize_torch_dtype ceil_div round_up is_float8 get_indptr "
             "register_custom_op register_fake_op _check_kv_layout _unpack_paged_kv_cache next_positive_power_of_2 "
             "last_positive_power_of_2 version_at_least is_fa3_backend_supported is_sm12x_supported LibraryError _get_cache_buf _get_cache_alibi_slopes_buf FP4Tensor",
}


@pytest.mark.parametrize("module", IMPORTS)
def test_imports(module):
    found = importlib.import_module("foveal.flashinfer" + ("." + module if module else ""))
    assert [name for name in IMPORTS[module].split() if not hasattr(found, name)] == []


def test_small_utils():
    u = flashinfer.utils
    assert (u.ceil_div(7, 4), u.round_up(7, 4), u.get_indptr(torch.tensor([2, 0, 3])).tolist()) == (2, 8, [0, 2, 2, 5])
    assert u.canonicalize_torch_dtype("bfloat16") is torch.bfloat16 and u.canonicalize_torch_dtype(torch.half) is torch.half
    assert u.is_float8(torch.zeros(1).to(torch.float8_e5m2)) and not u.is_float8(torch.zeros(1))
    assert not u.is_sm90a_supported("cpu") and flashinfer.jit.build_jit_specs([]) is None
    with pytest.raises(TypeError, match="floatt"):
        u.canonicalize_torch_dtype("floatt")
    with pytest.raises(ValueError, match="no CUDA device"):
        u.get_compute_capability("cpu")
    assert u.version_at_least("2.11.0+cu130", "2.8") and not u.version_at_least("2.8.1", "2.11") and u.last_positive_power_of_2(37) == 32
    assert [u._get_cache_buf("x", n, "cpu").numel() for n in (4, 8, 2)] == [4, 8, 8] and len(u._get_cache_alibi_slopes_buf(6, "cpu")) == 6
    specs = [flashinfer.jit.gen_single_decode_module(torch.float16), flashinfer.jit.attention.gen_batch_prefill_module("fa2"), flashinfer.norm.gen_norm_module()]
    assert flashinfer.jit.build_jit_specs(specs, verbose=False) is None and specs[0].name == "single_decode_module"
    with pytest.raises(NotImplementedError, match="single_decode_module cannot be loaded"):
        specs[0].build_and_load()
    with pytest.raises(NotImplementedError, match="gen_customize_batch_prefill_module"):
        flashinfer.jit.gen_customize_batch_prefill_module("fa2")

    @u.register_custom_op("foveal_test::twice", mutates_args=("x",))
    def twice(x):
        return 2 * x

    assert twice(3) == 6
    cache = torch.zeros(5, 2, 3, 4, 8)
    assert [tuple(x.shape) for x in u._unpack_paged_kv_cache(cache, "HND")] == [(5, 3, 4, 8)] * 2


def strided(x):
    """The same values in every other place of each axis but the last."""
    shape = [x.shape[0]]
    for n in x.shape[1:]:
        shape += [2, n]
    wide = torch.full(shape, float("nan"), dtype=x.dtype)
    view = wide[(slice(None),) + (1, slice(None)) * (x.dim() - 1)]
    view.copy_(x)
    return view


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["combined", "pair", "strided", "strided pair"])
@pytest.mark.parametrize("width", [torch.int32, torch.int64])
def test_decode_caches_and_indices(device, rng, layout, form, width):
    """float16 by the default data type; outputs into given tensors; int8 workspaces."""
    pages = Pages(rng, [17, 0, 5, 33], 2, 64, 8, layout=layout, combined="pair" not in form, word="float16", lib=TorchLib(device.type))
    cache = pages.cache
    if "strided" in form:
        cache = tuple(strided(x) for x in cache) if "pair" in form else strided(cache)
    table = [torch.tensor(x).to(width) for x in (pages.indptr, pages.ids, pages.last)]
    q = torch.randn(4, 4, 64).half()
    for tensor_cores in (False, True):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 10, dtype=torch.int8), layout, use_tensor_cores=tensor_cores)
        wrapper.plan(*table, 4, 2, 64, 8, logits_soft_cap=0.0, pos_encoding_mode="NONE", data_type=torch.float16, q_data_type=torch.float16)
        out, lse = torch.empty(4, 4, 64).half(), torch.empty(4, 4)
        made = wrapper.run(q, cache, out=out, lse=lse, return_lse=True, enable_pdl=False)
        assert made[0] is out and made[1] is lse
        for r in range(4):
            want, want_lse = attend(q[r:r + 1].float(), pages.k[r], pages.v[r])
            close(out[r], want[0], "float16")
            lse_close(lse[r], want_lse[0])


def test_arguments_by_position(device, rng):
    """The order in which vLLM and older scripts give them."""
    pages = Pages(rng, [17, 5, 33], 2, 64, 8, word="bfloat16", lib=TorchLib(device.type))
    table = [torch.tensor(x) for x in (pages.indptr, pages.ids, pages.last)]
    q = torch.randn(3, 4, 64).bfloat16()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(64, dtype=torch.uint8), "NHD", False, True)
    wrapper.plan(*table, 4, 2, 64, 8, "NONE", 7, 30.0, torch.bfloat16, torch.bfloat16, None, None, 0.1, None, None, True, None, None, None, False)
    out = wrapper.run(q, pages.cache, k_scale=1.0, v_scale=1.0)
    for r in range(3):
        close(out[r], attend(q[r:r + 1].float(), pages.k[r], pages.v[r], window_left=7, cap=30.0, scale=0.1)[0][0], "bfloat16")
    rows = torch.tensor([0, 4, 6, 13], dtype=torch.int32)
    q = torch.randn(13, 4, 64).bfloat16()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(64, dtype=torch.uint8), "NHD", False)
    wrapper.plan(rows, *table, 4, 2, 64, 8, 64, None, None, True, "NONE", False, 0.2, -1, 0.0, 1.0, 1e4, "bfloat16", "bfloat16", "bfloat16", True)
    out = wrapper.run(q, pages.cache)
    single = [flashinfer.single_prefill_with_kv_cache(q[a:b], torch.tensor(pages.k[r]).bfloat16(), torch.tensor(pages.v[r]).bfloat16(), None, None, None,
                                                      torch.bfloat16, None, None, True, "NHD", "NONE", False, 0.2, -1, 0.0, 1.0, 1e4, "fa2")
              for r, (a, b) in enumerate(zip(rows, rows[1:]))]
    for r, (a, b) in enumerate(zip(rows, rows[1:])):
        want = attend(q[a:b].float(), pages.k[r], pages.v[r], causal=True, scale=0.2)[0]
        close(out[a:b], want, "bfloat16")
        close(single[r], want, "bfloat16")


def test_fast_plan_of_engines(device, rng):
    """SGLang's way: begin_forward is replaced, buffers are filled by the engine, offsets come from the host."""
    pages = Pages(rng, [17, 5, 33], 2, 64, 1, word="float16", lib=TorchLib(device.type))
    table = [torch.tensor(x) for x in (pages.indptr, pages.ids, pages.last)]
    buffers = torch.empty(4, dtype=torch.int32), torch.empty(80, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(torch.empty(64, dtype=torch.uint8), *buffers, "NHD", True)
    wrapper.begin_forward(*table, 4, 2, 64, 1, data_type="float16")
    q = torch.randn(3, 4, 64).half()
    first = wrapper.forward(q, pages.cache)
    wrapper.begin_forward = functools.partial(flashinfer.decode.fast_decode_plan, wrapper)
    wrapper.begin_forward(*table, 4, 2, 64, 1, "NONE", data_type=torch.float16, q_data_type=torch.float16, non_blocking=True,
                          global_override_indptr_cpu=table[0].cpu().clone())
    assert (wrapper.forward(q, pages.cache) == first).all() and wrapper.is_cuda_graph_enabled
    close(first[2], attend(q[2:].float(), pages.k[2], pages.v[2])[0][0], "float16")


def sink_arguments(dtype):
    from foveal.flashinfer.jit.attention.variants import attention_sink_decl
    from foveal.flashinfer.jit.utils import filename_safe_dtype_map

    return ("attention_sink_" + filename_safe_dtype_map[dtype], dtype, dtype, dtype, torch.int32, 64, 64, ["sink"], ["float"], ["sm_scale"], ["double"],
            "AttentionSink", attention_sink_decl["fa2"])


@pytest.mark.parametrize("window", [-1, 3])
def test_sinks_by_jit_arguments(rng, window):
    """The module with sinks: run() takes (sink, sm_scale) by position."""
    q, k, v, sink = torch.randn(6, 4, 64).half(), torch.randn(12, 2, 64).half(), torch.randn(12, 2, 64).half(), torch.rand(4) * 5
    rows, keys = torch.tensor([0, 4, 6], dtype=torch.int32), torch.tensor([0, 7, 12], dtype=torch.int32)
    options = dict(jit_args=sink_arguments(torch.float16), jit_kwargs={"use_sliding_window": window >= 0})
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(64, dtype=torch.uint8), kv_layout="NHD", backend="fa3", **options)
    ragged.plan(rows, keys, 4, 2, 64, causal=True, window_left=window, q_data_type=torch.float16, kv_data_type=torch.float16)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(64, dtype=torch.uint8), **options)
    paged.plan(rows, keys, torch.arange(12, dtype=torch.int32), torch.ones(2, dtype=torch.int32), 4, 2, 64, 1, causal=True, window_left=window)
    for scale in (0.1, 0.2):
        made = ragged.run(q, k, v, sink, scale), paged.run(q, (k, v), sink, scale)
        for r, (a, b) in enumerate(zip(rows, rows[1:])):
            mine = slice(keys[r], keys[r + 1])
            want = attend(q[a:b].float(), k[mine].float(), v[mine].float(), causal=True, window_left=window, sinks=sink, scale=scale)[0]
            for out in made:
                close(out[a:b], want, "float16")
    with pytest.raises(NotImplementedError, match="FlashSigmoid"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(64, dtype=torch.uint8), jit_args=("x",) * 11 + ("FlashSigmoid", "..."))


def test_batch_attention_by_default(device, rng):
    """The default device is "cuda"; where there is none, the CPU."""
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("the default device is a GPU here")
    pages = Pages(rng, [9, 4], 2, 64, 4, word="bfloat16", lib=TorchLib(device.type))
    wrapper = flashinfer.BatchAttention(kv_layout="NHD")
    rows = torch.tensor([0, 2, 5], dtype=torch.int32)
    wrapper.plan(rows, *[torch.tensor(x) for x in (pages.indptr, pages.ids)], torch.tensor([9, 4], dtype=torch.int32), 4, 2, 64, 64, 4, causal=True)
    q = torch.randn(5, 4, 64).bfloat16()
    out, lse = wrapper.run(q, pages.cache)
    for r, (a, b) in enumerate(zip(rows, rows[1:])):
        want, want_lse = attend(q[a:b].float(), pages.k[r], pages.v[r], causal=True)
        close(out[a:b], want, "bfloat16")
        lse_close(lse[a:b], want_lse)


def test_float_workspace_and_keywords(rng):
    """VariableBlockSparse with a float32 workspace and keywords only, rows and columns of different sizes per head."""
    rows, cols = torch.tensor([[5, 3, 8], [8, 4, 4]]), torch.tensor([[7, 9], [4, 12]])
    blocks = torch.tensor([[[1, 0], [1, 1], [0, 1]], [[1, 1], [0, 1], [1, 0]]], dtype=torch.bool)
    q, k, v = torch.randn(4, 16, 64).half(), torch.randn(2, 16, 64).half(), torch.randn(2, 16, 64).half()
    wrapper = flashinfer.sparse.VariableBlockSparseAttentionWrapper(torch.empty(1 << 8), backend="auto")
    wrapper.plan(block_mask_map=blocks, block_row_sz=rows, block_col_sz=cols, num_qo_heads=4, num_kv_heads=2, head_dim=64, q_data_type=torch.float16)
    out = wrapper.run(q, k, v)
    for h in range(2):
        mask = blocks[h].repeat_interleave(rows[h], 0).repeat_interleave(cols[h], 1)
        want = attend(*(x.transpose(0, 1).float() for x in (q[2 * h:2 * h + 2], k[h:h + 1], v[h:h + 1])), mask=mask)[0]
        close(out[2 * h:2 * h + 2].transpose(0, 1), want, "float16")


def test_rope_forms_agree(rng):
    """Offsets, position ids of either width, and a table of cosines and sines say the same; inputs are views of one tensor."""
    qkv = torch.randn(6, 8 * 64)
    q, k, _ = qkv.split([256, 128, 128], -1)
    rows, offsets, at = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([3, 10], dtype=torch.int32), torch.tensor([3, 4, 10, 11, 12, 13])
    angles = torch.outer(torch.arange(32).float(), 1e4 ** (-torch.arange(0, 64, 2).float() / 64))
    table = torch.cat([angles.cos(), angles.sin()], -1)
    heads = q.unflatten(-1, (4, 64)), k.unflatten(-1, (2, 64))
    for neox in (True, False):
        made = [flashinfer.apply_rope(*heads, rows, offsets, interleave=not neox), flashinfer.apply_rope_pos_ids(*heads, at.int(), interleave=not neox),
                flashinfer.apply_rope_pos_ids(*heads, at, interleave=not neox), flashinfer.apply_rope_with_cos_sin_cache(at, q, k, 64, table, neox)]
        for other in made[1:]:
            for a, b in zip(made[0], other):
                np.testing.assert_allclose(numbers(a).reshape(6, -1), numbers(b).reshape(6, -1), atol=1e-5)
    assert math.isclose(float(made[0][0].norm()), float(q.norm()), rel_tol=1e-5)


def test_zero_scale_is_a_scale():
    """sm_scale=0 is no default: every key weighs the same."""
    q, k, v = torch.randn(3, 2, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    made = flashinfer.single_prefill_with_kv_cache(q, k, v, sm_scale=0.0)
    assert (made - v.mean(0)).abs().max() < 1e-4


def test_run_after_a_refused_plan():
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(64, dtype=torch.uint8))
    ints = lambda *x: torch.tensor(x, dtype=torch.int32)
    wrapper.plan(ints(0, 1), ints(0), ints(4), 2, 2, 16, 16, q_data_type=torch.float32)
    with pytest.raises((ValueError, NotImplementedError)):
        wrapper.plan(ints(0, 1), ints(0), ints(4), 2, 2, 1024, 16, q_data_type=torch.float32)
    with pytest.raises(ValueError, match="needs a plan"):
        wrapper.run(torch.zeros(1, 2, 16), torch.zeros(1, 2, 16, 2, 16))


def test_filters_of_rows_with_indices():
    """A tensor of p or k has an entry a row of the probabilities; sample i takes that of row indices[i]."""
    probs = torch.tensor([[0.6, 0.4]] * 2)
    indices = torch.tensor([1, 0, 1] * 100, dtype=torch.int32)
    ids = flashinfer.top_p_sampling_from_probs(probs, torch.tensor([0.1, 1.0]), indices=indices, seed=7, offset=0)
    assert (ids[1::3] == 0).all() and (ids[0::3] == 1).any() and (ids[2::3] == 1).any()
    ids = flashinfer.top_k_top_p_sampling_from_probs(probs, torch.tensor([2, 1], dtype=torch.int32), 1.0, indices=indices, seed=7, offset=0)
    assert (ids[0::3] == 0).all() and (ids[1::3] == 1).any()


def ints(*x, kind=torch.int32):
    return torch.tensor(x, dtype=kind)


PLANS = [
    (dict(page_size=0), ValueError, "page_size is 0"), (dict(page_size=4.0), TypeError, "page_size"), (dict(head_dim=0), ValueError, "head_dim is 0"),
    (dict(num_kv_heads=0), ValueError, "num_kv_heads is 0"), (dict(num_qo_heads=3), ValueError, "num_qo_heads 3"),
    (dict(q_data_type=torch.float64), ValueError, "unsupported dtype torch.float64"), (dict(q_data_type=torch.int32), ValueError, "q_data_type is torch.int32"),
    (dict(indptr=torch.zeros(2)), TypeError, "indptr has elements of type float32"), (dict(indptr=ints()), ValueError, r"indptr has the shape \(0,\)"),
    (dict(last_page_len=ints(2, 2)), ValueError, "last_page_len has 2 entries"), (dict(indices=ints(0, kind=torch.int16)), TypeError, "page_ids has elements of type int16"),
]


@pytest.mark.parametrize("change, error, text", PLANS)
def test_refused_plans(device, change, error, text):
    """By the name of what is wrong; the plan after it is like any other, the same one twice in a row included."""
    good = dict(indptr=ints(0, 1), indices=ints(0), last_page_len=ints(2), num_qo_heads=2, num_kv_heads=2, head_dim=16, page_size=4, q_data_type=torch.float32)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(64, dtype=torch.uint8))
    cache = torch.ones(1, 2, 4, 2, 16)
    for told in (good, good, change, good):
        if told is change:
            with pytest.raises(error, match=text):
                wrapper.plan(**(good | change))
        else:
            wrapper.plan(**told)
            assert (wrapper.run(torch.ones(1, 2, 16), cache) == 1).all()


def test_plans_told_otherwise(device):
    """What a plan was told before is forgotten, whichever word changes, and by forward()."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(64, dtype=torch.uint8))
    q, cache = torch.randn(1, 2, 16), torch.randn(1, 2, 4, 2, 16)
    k, v = cache[0, 0, :3], cache[0, 1, :3]
    scale = torch.tensor(0.1)
    for told in ({}, {}, dict(window_left=0), dict(logits_soft_cap=1.0), {}, dict(sm_scale=0.5), dict(sm_scale=scale), "forward", dict(sm_scale=scale), {}):
        if told == "forward":
            made, want = wrapper.forward(q, cache, sm_scale=0.7), attend(q, k, v, scale=0.7)[0]
            scale += 0.3                # the same tensor says another number now
        else:
            wrapper.plan(ints(0, 1), ints(0), ints(3), 2, 2, 16, 4, q_data_type=torch.float32, **told)
            made = wrapper.run(q, cache)
            want = attend(q, k, v, window_left=told.get("window_left", -1), cap=told.get("logits_soft_cap", 0), scale=told.get("sm_scale") and float(told["sm_scale"]))[0]
        close(made, want)


def test_last_page_len_of_any_kind(device):
    """Of a request without pages it does not matter; 0 with pages means that the last one holds nothing."""
    q, cache = torch.randn(3, 2, 16), torch.randn(2, 2, 4, 2, 16)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(64, dtype=torch.uint8))
    for last in (ints(0, 3, 0), ints(7, 3, 0), ints(-1, 3, 0)):
        wrapper.plan(ints(0, 0, 1, 2), ints(1, 0), last, 2, 2, 16, 4, q_data_type=torch.float32)
        out = wrapper.run(q, cache)
        close(out[1:2], attend(q[1:2], cache[1, 0, :3], cache[1, 1, :3])[0])
        assert (out[[0, 2]] == 0).all()
    with pytest.raises(ValueError, match="its 1 pages of 4 hold only 4"):
        wrapper.plan(ints(0, 1), ints(0), ints(5), 2, 2, 16, 4, q_data_type=torch.float32)


def test_graph_mode_fills_both_mask_buffers(device):
    rows, keys, pages = ints(0, 2, 5), [4, 7], ints(0, 1, 3)
    masks = [torch.rand(n, k) > 0.4 for n, k in zip((2, 3), keys)]
    flat = torch.cat([x.reshape(-1) for x in masks])
    q, cache = torch.randn(5, 2, 16), torch.randn(3, 2, 4, 2, 16)
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (3, 3, 8, 2)]
    bits, starts = torch.zeros(64, dtype=torch.uint8), torch.full((3,), -1, dtype=torch.int32)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(64, dtype=torch.uint8), "NHD", True, *buffers, custom_mask_buf=bits, mask_indptr_buf=starts)
    wrapper.plan(rows, pages, ints(0, 1, 2), ints(4, 3), 2, 2, 16, 4, custom_mask=flat, q_data_type=torch.float32)
    assert starts.tolist() == [0, 1, 4] and bits[0] == flashinfer.packbits(masks[0].reshape(-1), "little")[0]
    out = wrapper.run(q, cache)
    k, v = cache[:, 0].reshape(12, 2, 16), cache[:, 1].reshape(12, 2, 16)
    close(out[2:], attend(q[2:], k[4:11], v[4:11], mask=masks[1])[0])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(64, dtype=torch.uint8), "NHD", True, *buffers, custom_mask_buf=bits)
    with pytest.raises(ValueError, match="mask_indptr_buf must be initialized"):
        wrapper.plan(rows, pages, ints(0, 1, 2), ints(4, 3), 2, 2, 16, 4, custom_mask=flat, q_data_type=torch.float32)


def test_positions_outside(device):
    """Refused where the host sees them; on a GPU rows become NaN, and rows that would be written elsewhere are reported."""
    query, key, table = torch.ones(2, 32), torch.ones(2, 32), torch.ones(8, 16)
    rows, cache = torch.ones(2, 2, 16), torch.zeros(4, 2, 4, 2, 16)
    turn = lambda at: flashinfer.apply_rope_with_cos_sin_cache(at, query, key, 16, table)
    write = lambda request, at, ids=ints(2): flashinfer.append_paged_kv_cache(rows, rows, request, at, cache, ids, ints(0, 1), ints(2))
    for bad in (ints(0, 8), ints(-1, 0)):
        if device.type == "cpu":
            with pytest.raises(ValueError, match=r"positions\[[01]\] is (8|-1); cos_sin_cache has 8 positions"):
                turn(bad)
        else:
            assert turn(bad)[0].isnan().any(1).tolist() == [x < 0 or x > 7 for x in bad.tolist()]
    for request, at, text in ((ints(0, 1), ints(0, 1), r"batch_indices\[1\] is 1"), (ints(0, 0), ints(3, 4), r"positions\[1\] is 4; request 0 has 1 pages of 4")):
        if device.type == "cpu":
            with pytest.raises(ValueError, match=text):
                write(request, at)
        else:
            flashinfer.errors(device, clear=True)
            write(request, at)
            torch.cuda.synchronize()
            assert flashinfer.errors(device, clear=True)["what"] == "slot"
    assert (cache[[0, 1, 3]] == 0).all()
    flashinfer.errors(device, clear=True)
    for page in (4, -1):                # outside of the cache: skipped and reported
        write(ints(0, 0), ints(0, 3), ints(page))
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert flashinfer.errors(device, clear=True)["what"] == "slot" and flashinfer.errors(device) is None
    for call, error, text in ((lambda: turn(ints(0)), ValueError, "positions has 1 entries for the 2 rows"), (lambda: turn(torch.ones(2)), TypeError, "positions is"),
                              (lambda: write(ints(0), ints(0, 1)), ValueError, "batch_indices has 1 entries for 2 rows")):
        with pytest.raises(error, match=text):
            call()


def test_times_and_work(device):
    t = flashinfer.testing
    times = t.bench_gpu_time(lambda x: x + 1, dry_run_iters=1, repeat_iters=3, input_args=(torch.zeros(4),), l2_flush=True)
    assert len(times) == 3 and min(times) > 0
    rows, keys = ints(3, 1, 4), ints(5, 2, 2)
    pairs = sum(sum(max(0, min(k, k - n + i + 1)) for i in range(n)) for n, k in zip(rows.tolist(), keys.tolist()))
    assert t.attention_flops_with_actual_seq_lens(rows, keys, 64, 32, 8, True) == pairs * 8 * 2 * 96
    assert t.attention_flops(2, 3, 5, 64, 64, 8, False) == 2 * 15 * 8 * 2 * 128
    assert math.isclose(t.attention_tflops_per_sec(2, 3, 5, 64, 64, 8, False, 1e-3), 2 * 15 * 8 * 256 / 1e6)
    assert math.isclose(t.attention_tb_per_sec(1, 1, 10, 64, 64, 8, 2, 1e-3, torch.float16, torch.float8_e4m3fn, torch.float16), (8 * 256 + 10 * 2 * 128) / 1e6)


def test_sampling_parameters_of_no_use():
    """What a filter's number may be, in the words that scripts look for."""
    probs = torch.full((3, 5), 0.2)
    calls = [lambda x: flashinfer.sampling.min_p_sampling_from_probs(probs, x), lambda x: flashinfer.sampling.top_p_sampling_from_probs(probs, x),
             lambda x: flashinfer.sampling.top_k_top_p_sampling_from_probs(probs, x, 0.5), lambda x: flashinfer.sampling.top_k_top_p_sampling_from_logits(probs, 2, x),
             lambda x: flashinfer.sampling.top_k_renorm_probs(probs, x), lambda x: flashinfer.sampling.top_k_mask_logits(probs, x)]
    for call in calls:
        for x, text in ((torch.ones(3, 1), r"Expected a 1D tensor or scalar.*got a 2D tensor.*\[3, 1\]"),
                        (torch.tensor(1), r"Expected a 1D tensor of shape \(batch_size,\) or scalar.*got a 0-dimensional tensor"),
                        (torch.ones(4), r"Sampling parameter tensor batch size mismatch: expected length 3.*got length 4")):
            with pytest.raises(ValueError, match=text):
                call(x)
        call(torch.ones(3, dtype=torch.int32))
        call(1)


def test_items_by_tensors(device, rng):
    """Multi-item scoring with every number in a tensor of its unsigned type."""
    pages = Pages(rng, [20], 2, 64, 5, word="float16", lib=TorchLib(device.type))
    table = [torch.tensor(x) for x in (pages.indptr, pages.ids, pages.last)]
    q = torch.randn(12, 2, 64).half()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(64, dtype=torch.uint8))
    tokens = torch.tensor([0, 1, 2, 0, 1, 2, 3, 0])
    wrapper.plan(ints(0, 12), *table, 2, 2, 64, 5, causal=True, prefix_len_ptr=torch.tensor([12]).to(torch.uint32),
                 token_pos_in_items_ptr=tokens.to(torch.uint16), token_pos_in_items_len=torch.tensor(8).to(torch.uint32),
                 max_item_len_ptr=torch.tensor([3]).to(torch.uint16))
    out = wrapper.run(q, pages.cache)
    place = np.arange(8, 20)[:, None]
    key = np.arange(20)[None, :]
    own = np.where(place < 12, 20, tokens.cpu().numpy()[np.maximum(place - 12, 0)])
    mask = (key <= place) & ((key < 12) | (place < key + own))
    close(out, attend(q, pages.k[0], pages.v[0], mask=mask)[0], "float16")


def test_alibi_and_sinks():
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(64, dtype=torch.uint8))
    wrapper.plan(ints(0, 1), ints(0), ints(3), 2, 2, 16, 4, "ALIBI", q_data_type=torch.float32)
    with pytest.raises(NotImplementedError, match="ALIBI together with sinks"):
        wrapper.run(torch.zeros(1, 2, 16), torch.zeros(1, 2, 4, 2, 16), sinks=torch.zeros(2))


def test_what_is_no_array():
    """None and the like have the name of the argument, whichever call they are given to."""
    q, table, place = torch.zeros(1, 4, 16), (ints(0, 1), ints(0), ints(3)), torch.zeros(64, dtype=torch.uint8)
    decode, prefill, latent = (x(place) for x in (flashinfer.BatchDecodeWithPagedKVCacheWrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper,
                                                  flashinfer.BatchMLAPagedAttentionWrapper))
    decode.plan(*table, 4, 2, 16, 8, q_data_type=torch.float32)
    prefill.plan(ints(0, 1), *table, 4, 2, 16, 8, q_data_type=torch.float32)
    latent.plan(ints(0, 1), *table, 4, 64, 16, 8, False, 0.1, torch.float32, torch.float32)
    cache = torch.zeros(1, 2, 8, 2, 16)
    cases = [(lambda: decode.run(q, None), "paged_kv_cache is None"), (lambda: prefill.run(q, None), "paged_kv_cache is None"),
             (lambda: prefill.run(q, (cache[:, 0], None)), r"paged_kv_cache\[1\] is None"), (lambda: decode.run(None, cache), "q is None"),
             (lambda: decode.run(q, "cache"), "paged_kv_cache is a str"), (lambda: flashinfer.single_prefill_with_kv_cache(q, None, None), "k is None"),
             (lambda: flashinfer.single_decode_with_kv_cache(q[0], cache[0, 0], None), "v is None"),
             (lambda: latent.run(torch.zeros(1, 4, 64), q, None, None), "ckv_cache is None"),
             (lambda: flashinfer.append_paged_kv_cache(q, q, ints(0), ints(0), None, *table), "paged_kv_cache is None")]
    for call, text in cases:
        with pytest.raises(TypeError, match=text + "; it must be an array" if "str" not in text else text):
            call()
    with pytest.raises(ValueError, match="paged_kv_cache has 3 entries"):
        decode.run(q, (cache, cache, cache))


def test_refused_arguments():
    """What would be cut, stretched or rounded without a word."""
    q, k = torch.ones(4, 2, 16), torch.ones(9, 2, 16)
    single = functools.partial(flashinfer.single_prefill_with_kv_cache, q, k, k)
    flags, place = torch.ones(4, dtype=torch.bool), torch.zeros(64, dtype=torch.uint8)
    blocks = flashinfer.BlockSparseAttentionWrapper(place)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(place)
    items = lambda *given: paged.plan(ints(0, 3), ints(0, 1), ints(0), ints(3), 2, 2, 16, 4, causal=True, q_data_type=torch.float32, prefix_len_ptr=ints(1),
                                      token_pos_in_items_ptr=given[0], token_pos_in_items_len=given[1])
    cases = [(lambda: single(window_left=3.5), "window_left is 3.5"), (lambda: single(logits_soft_cap=math.nan), "logits_soft_cap is nan"),
             (lambda: single(k_scale=torch.ones(3)), "a scale has 3 entries"), (lambda: single(custom_mask=flags.expand(9, 4)), r"custom_mask has the shape \(9, 4\)"),
             (lambda: flashinfer.merge_state_in_place(q.clone(), torch.zeros(4, 2), q, torch.zeros(4, 2), mask=flags[:3]), "mask has the shape"),
             (lambda: flashinfer.segment_packbits(flags, ints(0, 9)), "indptr must rise"), (lambda: flashinfer.segment_packbits(flags, ints(0, 3, 1)), "indptr must rise"),
             (lambda: items(None, 0), "prefix_len_ptr needs"), (lambda: items(ints(0), 1), "token_pos_in_items of request 0 has 1 entries"),
             (lambda: flashinfer.apply_rope(q, q, ints(0, 2, 4), ints(0)), "offsets has 1 entries and indptr 3"),
             (lambda: flashinfer.silu_and_mul(torch.ones(3, 8, dtype=torch.float64)), "unsupported dtype torch.float64"),
             (lambda: blocks.plan(ints(0, 1), ints(0), 4, 8, 4, 4, 2, 2, 16, mask=torch.ones(1, 3, 4, dtype=torch.bool)), "mask has the shape"),
             (lambda: flashinfer.VariableBlockSparseAttentionWrapper(place).plan(torch.ones(2, 1, 2, dtype=torch.bool), ints(4, 4).view(2, 1),
                                                                                 ints(9, -1, 4, 4).view(2, 2), 2, 2, 16), "none may be below 0")]
    for call, text in cases:
        with pytest.raises(ValueError, match=text):
            call()
