# SPDX-License-Identifier: Apache-2.0
"""What newer versions of FlashInfer added to the surface, and where scripts import it from. Torch tensors of the CPU, or of a GPU with --device cuda."""

import math
import subprocess
import sys

import numpy as np
import pytest

import foveal.flashinfer as flashinfer
from reference import attend, close, lse_close, numbers

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("by_default")

LENGTHS, PAGE, KV_HEADS, HEADS, DIM = [37, 5, 64], 16, 2, 8, 64


def ints(*x):
    return torch.tensor(x, dtype=torch.int32)


def workspace():
    return torch.zeros(64, dtype=torch.uint8)


def made(layout="NHD", dtype=torch.float16):
    """(page table as three tensors, cache, keys and values of each request)."""
    pages = [-(-n // PAGE) for n in LENGTHS]
    indptr = [0, pages[0], pages[0] + pages[1], sum(pages)]
    ids = torch.randperm(20)[:sum(pages)].to(torch.int32)
    cache = torch.randn((20, 2, PAGE, KV_HEADS, DIM) if layout == "NHD" else (20, 2, KV_HEADS, PAGE, DIM)).to(dtype)
    plain = cache if layout == "NHD" else cache.transpose(2, 3)
    k, v = ([plain[ids[indptr[r]:indptr[r + 1]].long(), i].reshape(-1, KV_HEADS, DIM)[:n] for r, n in enumerate(LENGTHS)] for i in (0, 1))
    return (ints(*indptr), ids, ints(*((n - 1) % PAGE + 1 for n in LENGTHS))), cache, k, v


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_scales_of_tokens_and_heads(device, layout):
    """An fp8 cache with a float32 scale for each token and head."""
    table, cache, k, v = made(layout, torch.float8_e4m3fn)
    scales = torch.rand(cache.shape[:-1]) + 0.5
    sf = (scales[:, 0], scales[:, 1])
    wide = made_wide(layout, table, cache.float() * scales[..., None])
    q = torch.randn(3, HEADS, DIM).half()
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), layout, use_tensor_cores=True, backend="fa2")
    decode.plan(*table, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float16, kv_data_type=torch.float8_e4m3fn, use_token_head_sf=True)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), layout, backend="fa2")
    prefill.plan(ints(0, 1, 2, 3), *table, HEADS, KV_HEADS, DIM, PAGE, causal=True, q_data_type=torch.float16, kv_data_type=torch.float8_e4m3fn, use_token_head_sf=True)
    for wrapper in (decode, prefill):
        out = wrapper.run(q, cache, kv_cache_sf=sf, v_scale=2.0)
        for r, (key, value) in enumerate(wide):
            close(out[r:r + 1], attend(q[r:r + 1], key, value)[0] * 2, "float16")
        with pytest.raises(ValueError, match=r"a \(k_sf, v_sf\) tuple"):
            wrapper.run(q, cache)
        with pytest.raises(ValueError, match="k_sf must be float32"):
            wrapper.run(q, cache, kv_cache_sf=(sf[0].half(), sf[1]))
    with pytest.raises(ValueError, match="use_token_head_sf requires an fp8"):
        prefill.plan(ints(0, 1, 2, 3), *table, HEADS, KV_HEADS, DIM, PAGE, use_token_head_sf=True)
    decode.plan(*table, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float16, kv_data_type=torch.float8_e4m3fn)        # and back
    out = decode.run(q, cache)
    for r in range(3):
        close(out[r:r + 1], attend(q[r:r + 1], k[r].float(), v[r].float())[0], "float16")


def made_wide(layout, table, cache):
    """(keys, values) of each request from another cache."""
    indptr, ids, _ = table
    plain = cache if layout == "NHD" else cache.transpose(2, 3)
    return [tuple(plain[ids[indptr[r]:indptr[r + 1]].long(), i].reshape(-1, KV_HEADS, DIM)[:n] for i in (0, 1)) for r, n in enumerate(LENGTHS)]


def test_scales_of_packed_tokens(device):
    k, v = (torch.randn(30, KV_HEADS, DIM).to(torch.float8_e4m3fn) for _ in range(2))
    k_sf, v_sf, q = torch.rand(30, KV_HEADS) + 0.5, torch.rand(30, KV_HEADS) + 0.5, torch.randn(9, HEADS, DIM).half()
    wide = k.float() * k_sf[..., None], v.float() * v_sf[..., None]
    close(flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, kv_cache_sf=(k_sf, v_sf), backend="fa2"), attend(q, *wide, causal=True)[0], "float16")
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend="fa2")
    ragged.plan(ints(0, 4, 9), ints(0, 12, 30), HEADS, KV_HEADS, DIM, causal=True, q_data_type=torch.float16, kv_data_type=torch.float8_e4m3fn, use_token_head_sf=True)
    out = ragged.run(q, k, v, kv_cache_sf=(k_sf, v_sf))
    close(out[:4], attend(q[:4], *(x[:12] for x in wide), causal=True)[0], "float16")
    close(out[4:], attend(q[4:], *(x[12:] for x in wide), causal=True)[0], "float16")


@pytest.mark.parametrize("paged", [True, False])
def test_bases_and_layouts_of_the_lse(device, paged):
    table, cache, k, v = made()
    rows, q = ints(0, 4, 5, 12), torch.randn(12, HEADS, DIM).half()
    if paged:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
        wrapper.plan(rows, *table, HEADS, KV_HEADS, DIM, PAGE, causal=True, uniform_q_len=None)
        given = (q, cache)
    else:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
        keys = ints(0, 37, 42, 106)
        wrapper.plan(rows, keys, HEADS, KV_HEADS, DIM, causal=True, qo_indptr_cpu=rows.cpu(), kv_indptr_cpu=keys.cpu())
        given = (q, torch.cat(k), torch.cat(v))
    want = np.concatenate([attend(q[rows[r]:rows[r + 1]], k[r], v[r], causal=True)[1] for r in range(3)])
    for base, factor in (("log2", 1.0), ("ln", math.log(2))):
        lse = wrapper.run_return_lse(*given, lse_base=base)[1]
        lse_close(lse / factor, want)
        turned = wrapper.run(*given, return_lse=True, lse_base=base, lse_layout="HN")[1]
        assert turned.is_contiguous()
        lse_close(turned.T / factor, want)
        buffer = torch.empty(HEADS, 12)
        assert wrapper.run(*given, return_lse=True, lse_base=base, lse_layout="HN", lse=buffer)[1] is buffer
        lse_close(buffer.T / factor, want)
    assert torch.equal(wrapper.run(*given, lse_base="ln"), wrapper.run(*given))
    for bad in (dict(lse_base="e"), dict(lse_layout="HND")):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must be one of"):
            wrapper.run(*given, return_lse=True, **bad)


@pytest.mark.parametrize("packed", [False, True])
def test_masks_of_decode_rows_in_pods(device, packed):
    table, cache, k, v = made()
    q_p, k_p, v_p, q_d = torch.randn(7, HEADS, DIM).half(), torch.randn(9, KV_HEADS, DIM).half(), torch.randn(9, KV_HEADS, DIM).half(), torch.randn(3, HEADS, DIM).half()
    masks = [torch.rand(n) < 0.5 for n in LENGTHS]
    flat = torch.cat(masks)
    bits = flashinfer.segment_packbits(flat, ints(0, 37, 42, 106), bitorder="little")[0]
    pod = flashinfer.PODWithPagedKVCacheWrapper(workspace())
    pod.plan(*table, HEADS, KV_HEADS, DIM, PAGE)
    plain = pod.run(q_p, k_p, v_p, q_d, cache, causal_p=True)[1]
    mask = dict(packed_custom_mask_d=bits) if packed else dict(custom_mask_d=flat)
    first, (out, lse) = pod.run(q_p, k_p, v_p, q_d, cache, causal_p=True, return_lse_d=True, sm_scale_d=0.2, **mask)
    close(first, attend(q_p, k_p, v_p, causal=True)[0], "float16")
    for r in range(3):
        want, want_lse = attend(q_d[r:r + 1], k[r], v[r], mask=masks[r][None], scale=0.2)
        close(out[r:r + 1], want, "float16")
        lse_close(lse[r:r + 1], want_lse)
    assert torch.equal(pod.run(q_p, k_p, v_p, q_d, cache, causal_p=True)[1], plain)      # the next run has none


def test_sinks_of_decode(device):
    table, cache, k, v = made(dtype=torch.bfloat16)
    q, sink = torch.randn(3, HEADS, DIM).bfloat16(), torch.randn(HEADS)
    wrapper = flashinfer.BatchDecodeWithAttentionSinkWrapper(workspace(), q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, head_dim_qk=DIM, head_dim_vo=DIM)
    wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    out, lse = wrapper.run_return_lse(q, cache, sink, 0.2)
    plain = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), jit_args=[None] * 11 + ["AttentionSink", "text"], jit_kwargs={})
    plain.plan(*table, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    same = plain.run(q, cache, sink, 0.2)
    for r in range(3):
        want, want_lse = attend(q[r:r + 1], k[r], v[r], sinks=sink, scale=0.2)
        close(out[r:r + 1], want, "bfloat16")
        close(same[r:r + 1], want, "bfloat16")
        lse_close(lse[r:r + 1], want_lse)
    with pytest.raises(NotImplementedError, match="no position encoding"):
        wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, pos_encoding_mode="ROPE_LLAMA")


@pytest.mark.parametrize("appended,lengths", [([1, 2, 3, 4], [5, 5, 5, 5]), ([0, 3, 0, 5, 1], [7, 10, 2, 8, 6]), ([0, 0], [3, 4]), ([], [])], ids=str)
def test_raw_page_module(device, appended, lengths):
    module = flashinfer.page.get_page_module()
    indptr, n = ints(0, *np.cumsum(appended).astype(int).tolist()), sum(appended)
    request, place = torch.full((n,), -1, dtype=torch.int32), torch.full((n,), -2, dtype=torch.int32)
    assert module.get_batch_indices_positions_cuda(indptr, ints(*lengths), request, place) is None
    assert request.tolist() == [r for r, count in enumerate(appended) for _ in range(count)]
    assert place.tolist() == [length - count + i for count, length in zip(appended, lengths) for i in range(count)]
    with pytest.raises(ValueError, match="seq_lens is of torch.int64"):
        module.get_batch_indices_positions_cuda(indptr, ints(*lengths).long(), request, place)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("tensor", [False, True])
def test_norms_into_8_bits(device, dtype, tensor):
    x, r, w = torch.randn(9, 520).half(), torch.randn(9, 520).half(), torch.rand(520).half()
    most, before = torch.finfo(dtype).max, x.clone()

    def wanted(x, scale):
        x = x.double()
        x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double() / scale
        return x.clamp(-most, most)

    for scale in (0.5, 0.5 / most):         # much of the second is beyond what the type has
        given = torch.tensor([scale]) if tensor else scale
        out, residual = torch.empty(9, 520, dtype=dtype), r.clone()
        assert flashinfer.norm.rmsnorm_quant(out, x, w, given) is None
        half_a_step = (torch.finfo(dtype).eps / 2 * 1.01) * wanted(x, scale).abs() + torch.finfo(dtype).smallest_normal
        assert ((out.double() - wanted(x, scale)).abs() <= half_a_step).all()
        assert flashinfer.norm.fused_add_rmsnorm_quant(out, x, residual, w, given, enable_pdl=True) is None
        total = x.float() + r.float()
        assert torch.equal(x, before) and torch.equal(residual, total.half())
        half_a_step = (torch.finfo(dtype).eps / 2 * 1.01) * wanted(total, scale).abs() + torch.finfo(dtype).smallest_normal
        assert ((out.double() - wanted(total, scale)).abs() <= half_a_step).all()
    with pytest.raises(ValueError, match=r"scale must be a scalar tensor or shape \(1,\)"):
        flashinfer.rmsnorm_quant(out, x, w, torch.ones(2))
    with pytest.raises(ValueError, match="float8_e4m3fn or float8_e5m2"):
        flashinfer.rmsnorm_quant(x, x, w, 1.0)
    with pytest.raises(ValueError, match="out"):
        flashinfer.fused_add_rmsnorm_quant(out[:3], x, r, w, 1.0)
    with pytest.raises(NotImplementedError, match="tensors of torch only"):
        flashinfer.rmsnorm_quant(np.zeros((2, 4)), np.zeros((2, 4), np.float32), np.ones(4, np.float32), 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_states_of_nothing(device, dtype):
    v, s = flashinfer.merge_states(torch.empty(4, 0, 2, 64, dtype=dtype), torch.empty(4, 0, 2))
    assert v.dtype == dtype and torch.equal(v, torch.zeros_like(v)) and v.shape == (4, 2, 64)
    assert s.shape == (4, 2) and torch.isneginf(s).all()
    values, scores = flashinfer.merge_states(np.empty((4, 0, 2, 64), np.float32), np.empty((4, 0, 2), np.float32))
    assert (values == 0).all() and (scores == -math.inf).all()


def test_versions():
    at_least = flashinfer.utils.version_at_least
    at_least.cache_clear()
    for version, base, want in (("12.3", "12.1", True), ("12.1", "12.3", False), ("13", "13.0", True), ("13.0", "12.9", True), ("2.11.0+cu130", "2.8", True),
                                (None, "12.1", False), ("12.3", None, False), (None, None, False)):
        assert at_least(version, base) is want
    assert at_least("12.3", "12.1") and at_least.cache_info().hits == 1


def test_rows_of_graphs(device):
    """max_total_num_rows says what later plans may have, whatever the first one has."""
    table, cache, k, v = made()
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (4, 4, 20, 3)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", True, *buffers, max_total_num_rows=12)
    for rows in ([0, 1, 2, 3], [0, 4, 5, 12]):
        q = torch.randn(rows[-1], HEADS, DIM).half()
        wrapper.plan(ints(*rows), *table, HEADS, KV_HEADS, DIM, PAGE, causal=True)
        out = wrapper.run(q, cache)
        for r in range(3):
            close(out[rows[r]:rows[r + 1]], attend(q[rows[r]:rows[r + 1]], k[r], v[r], causal=True)[0], "float16")
    with pytest.raises(ValueError, match="in cuda graph mode cannot exceed the number of rows set during initialization 12"):
        wrapper.plan(ints(0, 5, 10, 13), *table, HEADS, KV_HEADS, DIM, PAGE)
    with pytest.raises(ValueError, match="max_total_num_rows requires use_cuda_graph=True"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), max_total_num_rows=3)
    with pytest.raises(ValueError, match="qo_indptr_buf should be a torch.Tensor in CUDA graph mode"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), use_cuda_graph=True)
    with pytest.raises(ValueError, match="kv_indptr_buf should be a torch.Tensor in cuda graph mode"):
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", True, buffers[0])
    with pytest.raises(ValueError, match="paged_kv_indices_buffer should be a torch.Tensor in cudagraph mode"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_cuda_graph=True, paged_kv_indptr_buffer=buffers[0])


def test_lse_that_is_given(device):
    """An lse is filled where it is given, whether it is returned or not."""
    table, cache, k, v = made()
    rows, q = ints(0, 1, 2, 3), torch.randn(3, HEADS, DIM).half()
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    decode.plan(*table, HEADS, KV_HEADS, DIM, PAGE)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    paged.plan(rows, *table, HEADS, KV_HEADS, DIM, PAGE)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    ragged.plan(rows, ints(0, 37, 42, 106), HEADS, KV_HEADS, DIM)
    packed = torch.cat(k), torch.cat(v)
    want = np.concatenate([attend(q[r:r + 1], k[r], v[r])[1] for r in range(3)])
    for wrapper, given in ((decode, (q, cache)), (paged, (q, cache)), (ragged, (q, *packed))):
        lse = torch.full((3, HEADS), math.nan)
        out = wrapper.run(*given, lse=lse)
        assert torch.is_tensor(out)
        lse_close(lse, want)
        assert torch.equal(out, wrapper.run(*given))
    for wrapper, given in ((paged, (q, cache)), (ragged, (q, *packed))):
        for layout, shape in (("NH", (3, HEADS)), ("HN", (HEADS, 3))):
            lse = torch.full(shape, math.nan)
            assert torch.is_tensor(wrapper.run(*given, lse=lse, lse_base="ln", lse_layout=layout))
            lse_close((lse if layout == "NH" else lse.T) / math.log(2), want)
    blocks, one = flashinfer.VariableBlockSparseAttentionWrapper(workspace()), torch.ones(KV_HEADS, 1, 1, dtype=torch.bool)
    blocks.plan(one, torch.full((KV_HEADS, 1), 3, dtype=torch.int32), torch.full((KV_HEADS, 1), 37, dtype=torch.int32), HEADS, KV_HEADS, DIM)
    lse = torch.full((HEADS, 3), math.nan)
    assert torch.is_tensor(blocks.run(*(x.transpose(0, 1).contiguous() for x in (q, k[0], v[0])), lse=lse))
    lse_close(lse.T, attend(q, k[0], v[0])[1])


def test_latent_lse(device):
    """Of latent attention: an lse that is only given, in either base; what plan() may be told; the name of a backend."""
    q_nope, q_pe, ckv, kpe = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((2, 4, 512), (2, 4, 64), (3, 16, 512), (3, 16, 64)))
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace())
    assert wrapper.resolved_backend == "fa2" and flashinfer.BatchMLAPagedAttentionWrapper(workspace(), backend="fa3").resolved_backend == "fa3"
    step = ints(0, 1, 2), ints(0, 2, 3), ints(2, 0, 1), ints(20, 9), 4, 512, 64, 16, False, 0.05, torch.bfloat16, torch.bfloat16
    wrapper.plan(*step, lse_mode="basee", query_layout="split", kv_cache_layout="split", output_dtype=torch.bfloat16, max_q_len=1)
    lse = torch.full((2, 4), math.nan)
    assert torch.is_tensor(wrapper.run(q_nope, q_pe, ckv, kpe, lse=lse, return_lse_base_on_e=True))
    dense = ckv[[2, 0, 1]].reshape(48, 1, 512), kpe[[2, 0, 1]].reshape(48, 1, 64)
    for r, keys in enumerate((slice(0, 20), slice(32, 41))):
        want = attend(torch.cat((q_nope[r:r + 1], q_pe[r:r + 1]), 2), torch.cat([x[keys] for x in dense], 2), dense[0][keys], scale=0.05)
        lse_close(lse[r:r + 1] / math.log(2), want[1])
    with pytest.raises(ValueError, match="unsupported lse_mode 'base10'"):
        wrapper.plan(*step, lse_mode="base10")
    for refused in (dict(query_layout="packed"), dict(output_dtype=torch.float32), dict(sinks=lse)):
        with pytest.raises(NotImplementedError):
            wrapper.plan(*step, **refused)
    with pytest.raises(NotImplementedError):
        wrapper.run(q_nope, q_pe, ckv, kpe, sinks=lse)


@pytest.mark.parametrize("graph", [False, True])
def test_older_latent_decode(device, graph):
    q_nope, q_pe, ckv, kpe = (torch.randn(*shape, dtype=torch.float16) for shape in ((2, 4, 512), (2, 4, 64), (3, 16, 512), (3, 16, 64)))
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (3, 4, 2)]
    make = flashinfer.decode.BatchDecodeMlaWithPagedKVCacheWrapper
    wrapper = make(workspace(), True, False, *buffers) if graph else make(workspace())
    dense = ckv[[2, 0, 1]].reshape(48, 1, 512), kpe[[2, 0, 1]].reshape(48, 1, 64)
    for words, known in ((dict(), {}), (dict(window_left=6, logits_soft_cap=3.0), dict(window_left=6, cap=3.0))):
        wrapper.plan(ints(0, 2, 3), ints(2, 0, 1), ints(4, 9), 4, 512, 16, 0.05, data_type=torch.float16, **words)
        if graph:
            assert [x.tolist() for x in buffers] == [[0, 2, 3], [2, 0, 1, 0], [4, 9]]
        for scales, scale, times in (({}, 0.05, 1), (dict(q_scale=2.0, k_scale=0.5, v_scale=2.0), 0.05, 2), (dict(k_scale=torch.tensor([3.0])), 0.15, 1)):
            out, lse = wrapper.run_return_lse(q_nope, q_pe, ckv, kpe, **scales)
            assert torch.equal(wrapper.run(q_nope, q_pe, ckv, kpe, **scales), out)
            for r, keys in enumerate((slice(0, 20), slice(32, 41))):
                q = torch.cat((q_nope[r:r + 1], q_pe[r:r + 1]), 2)
                want = attend(q, torch.cat([x[keys] for x in dense], 2), dense[0][keys], scale=scale, **known)
                close(out[r:r + 1], want[0] * times, "float16")
                lse_close(lse[r:r + 1], want[1])
    with pytest.raises(ValueError, match="last_page_len has 1 entries"):
        wrapper.plan(ints(0, 2, 3), ints(2, 0, 1), ints(4), 4, 512, 16, 0.05)
    with pytest.raises(NotImplementedError, match="caches of 8 bits"):
        wrapper.plan(ints(0, 2, 3), ints(2, 0, 1), ints(4, 9), 4, 512, 16, 0.05, data_type=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="paged_kv_indptr_buffer should be a torch.Tensor in cudagraph mode"):
        make(workspace(), True)
    if graph:
        with pytest.raises(ValueError, match="The size of indices should be less than or equal to the allocated buffer"):
            wrapper.plan(ints(0, 2, 5), ints(2, 0, 1, 1, 1), ints(4, 9), 4, 512, 16, 0.05)


def test_caches_of_cudnn(device):
    """What upstream's cuDNN takes: pages with the heads first whatever the layout told, and offsets in elements beside lengths."""
    table, cache, k, v = made("HND")
    rows, q = ints(0, 4, 5, 12), torch.randn(12, HEADS, DIM).half()
    assert flashinfer.cudnn.CUDNN_AVAILABLE
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", backend="cudnn")
    counts, lengths = ints(4, 1, 7), ints(*LENGTHS)
    paged.plan(rows * HEADS * DIM, *table, HEADS, KV_HEADS, DIM, PAGE, causal=True, seq_lens=lengths[:, None, None, None], seq_lens_q=counts[:, None, None, None])
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend="cudnn")
    ragged.plan(rows * HEADS * DIM, ints(0, 37, 42, 106) * KV_HEADS * DIM, HEADS, KV_HEADS, DIM, causal=True, seq_lens=lengths, seq_lens_q=counts)
    outs = [paged.run(q, x) for x in ((cache[:, 0], cache[:, 1]), tuple(cache.transpose(2, 3)[:, i].contiguous() for i in (0, 1)))]
    for out in (*outs, ragged.run(q, torch.cat(k), torch.cat(v))):
        for r in range(3):
            mine = slice(int(rows[r]), int(rows[r + 1]))
            close(out[mine], attend(q[mine], k[r], v[r], causal=True)[0], "float16")


def capped_alibi(q, k, v, mask, scale, cap):
    """(o, lse in base 2) in float64: the bias counts from a row's index, and all of it is scaled once more."""
    q, (k, v), heads = q.double(), (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)), q.shape[1]
    slopes = flashinfer.utils.get_alibi_slopes(heads).to(q.device).double()
    distance = torch.arange(k.shape[0])[None] - torch.arange(q.shape[0])[:, None]
    s = torch.einsum("ihd,jhd->hij", q, k) * scale + slopes[:, None, None] * distance
    s = (cap * torch.tanh(s * scale / cap)).masked_fill(~mask, -math.inf)
    return torch.einsum("hij,jhd->ihd", s.softmax(-1), v), torch.logsumexp(s, -1).T / math.log(2)


@pytest.mark.parametrize("custom", [False, True])
def test_alibi_under_a_cap(device, custom):
    table, cache, k, v = made()
    rows, q, cap = ints(0, 4, 5, 12), torch.randn(12, HEADS, DIM).half(), 5.0
    parts = [slice(int(rows[r]), int(rows[r + 1])) for r in range(3)]
    masks = [torch.ones(len(q[part]), n, dtype=torch.bool).tril(n - len(q[part])) for part, n in zip(parts, LENGTHS)]
    if custom:
        masks = [x & (torch.rand(x.shape) < 0.8) for x in masks]
    told = dict(custom_mask=torch.cat([x.flatten() for x in masks])) if custom else dict(causal=True)
    words = dict(pos_encoding_mode="ALIBI", logits_soft_cap=cap)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    paged.plan(rows, *table, HEADS, KV_HEADS, DIM, PAGE, sm_scale=0.2, **told, **words)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    ragged.plan(rows, ints(0, 37, 42, 106), HEADS, KV_HEADS, DIM, sm_scale=0.2, **told, **words)
    results = [paged.run(q, cache, return_lse=True), ragged.run(q, torch.cat(k), torch.cat(v), return_lse=True)]
    told = [dict(custom_mask=x) for x in masks] if custom else [dict(causal=True)] * 3
    single = [flashinfer.single_prefill_with_kv_cache(q[parts[r]], k[r], v[r], sm_scale=0.2, return_lse=True, **told[r], **words) for r in range(3)]
    results.append([torch.cat([x[i] for x in single]) for i in (0, 1)])
    for r, part in enumerate(parts):
        want, want_lse = capped_alibi(q[part], k[r], v[r], masks[r], 0.2, cap)
        for out, lse in results:
            close(out[part], numbers(want), "float16")
            lse_close(lse[part], numbers(want_lse))


def test_decode_with_alibi_under_a_cap(device):
    table, cache, k, v = made()
    q, words = torch.randn(3, HEADS, DIM).half(), dict(pos_encoding_mode="ALIBI", logits_soft_cap=5.0)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    for scale in (0.2, 0.1):                # of the bias, too
        wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, sm_scale=scale, **words)
        out, lse = wrapper.run(q, cache, return_lse=True)
        for r, n in enumerate(LENGTHS):
            want, want_lse = capped_alibi(q[r:r + 1], k[r], v[r], torch.ones(1, n, dtype=torch.bool), scale, 5.0)
            close(out[r:r + 1], numbers(want), "float16")
            lse_close(lse[r:r + 1], numbers(want_lse))
            close(flashinfer.single_decode_with_kv_cache(q[r], k[r], v[r], sm_scale=scale, **words), numbers(want)[0], "float16")
    wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, pos_encoding_mode="ALIBI")         # and without one, whose lse has an offset
    for r, lse in enumerate(wrapper.run(q, cache, return_lse=True)[1]):
        lse_close(lse[None], attend(q[r:r + 1], k[r], v[r], slopes=numbers(flashinfer.utils.get_alibi_slopes(HEADS)))[1])


def test_refused(device):
    for call in (lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), variant_owns_mask=True), lambda: flashinfer.gemm.SegmentGEMMWrapper(workspace()),
                 lambda: flashinfer.gemm.SegmentGEMMWrapper.run(1), lambda: flashinfer.attention.BatchPrefillWithCausalBidirectionalRangesWrapper(workspace())):
        with pytest.raises(NotImplementedError):
            call()
    blocks = flashinfer.BlockSparseAttentionWrapper(workspace())
    with pytest.raises(ValueError, match="indices out of bound"):
        blocks.plan(ints(0, 1), ints(4), 4, 16, 4, 4, HEADS, KV_HEADS, DIM)
    with pytest.raises(ValueError, match="indptr and indices are required"):
        blocks.plan(None, None, 4, 16, 4, 4, HEADS, KV_HEADS, DIM)


def test_imports():
    """Modules and names where scripts look for them; in a process of its own, as install() is for good."""
    lines = ("from flashinfer.attention._core import BatchAttention", "from flashinfer.mla._core import BatchMLAPagedAttentionWrapper",
             "from flashinfer.quantization.packbits import packbits, segment_packbits", "from flashinfer.cudnn.prefill import cudnn_batch_prefill_with_kv_cache",
             "from flashinfer.cudnn.decode import cudnn_batch_decode_with_kv_cache", "from flashinfer.xqa import xqa, xqa_mla", "from flashinfer import xqa",
             "assert callable(xqa)", "from flashinfer.version import __version__", "from flashinfer.jit.attention.modules import gen_batch_prefill_module",
             "from flashinfer.jit.core import JitSpec, gen_jit_spec", "from flashinfer.jit.xqa import gen_xqa_module", "import flashinfer.prefill, flashinfer.decode",
             "from flashinfer.prefill import fmha_varlen, trtllm_fmha_v2_prefill", "from flashinfer.mla import xqa_batch_decode_with_kv_cache_mla",
             "from flashinfer.testing import bench_gpu_time_with_cupti, bench_gpu_time_with_cudagraph", "from flashinfer.utils import check_lse_base, check_lse_layout",
             "from flashinfer.cutile.cutile_common import is_cuda_tile_available", "from flashinfer.cute_dsl.utils import is_cute_dsl_available",
             "assert not is_cuda_tile_available() and not is_cute_dsl_available()")
    subprocess.run([sys.executable, "-c", "import foveal.flashinfer as f; f.install()\n" + "\n".join(lines)], check=True)


# ---- options of a run ----


def pod_run(table, cache, q):
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, rope_theta=5e3)
    k = torch.randn(9, KV_HEADS, DIM).half()
    return wrapper, lambda q=q, **options: wrapper.run(q[:2], k, k, q, cache, return_lse_d=True, **options)[1]


def unified_run(table, cache, q):
    wrapper = flashinfer.BatchAttention(device=q.device)
    wrapper.plan(ints(0, 1, 2, 3), *table[:2], ints(*LENGTHS), HEADS, KV_HEADS, DIM, DIM, PAGE, causal=True, q_data_type=torch.float16, kv_data_type=torch.float16)
    return wrapper, lambda q=q, **options: wrapper.run(q, cache, **options)


def sink_run(make, *rows):
    def made_run(table, cache, q):
        wrapper = make(workspace())
        wrapper.plan(*rows, *table, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float16)
        return wrapper, lambda q=q, sm_scale=None, **options: wrapper.run(q, cache, torch.zeros(HEADS), sm_scale, return_lse=True, **options)
    return made_run


def ragged_sink_run(table, cache, q):
    indptr, ids, last = table
    k, v = ([torch.cat([cache[ids[a:b].long(), i].reshape(-1, KV_HEADS, DIM)[:n] for a, b, n in zip(indptr, indptr[1:], LENGTHS)]) for i in (0, 1)])
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), **JIT_SINK)
    wrapper.plan(ints(0, 1, 2, 3), ints(0, 37, 42, 106), HEADS, KV_HEADS, DIM, causal=True)
    return wrapper, lambda q=q, sm_scale=None, **options: wrapper.run(q, k, v, torch.zeros(HEADS), sm_scale, return_lse=True, **options)


JIT_SINK = dict(jit_args=[None] * 11 + ["AttentionSink", "text"], jit_kwargs={})
ROWS = ints(0, 1, 2, 3)
RUNS_WITH_OPTIONS = {
    "pod": (pod_run, [(dict(sm_scale_d=0.3), dict(scale=0.3)), (dict(sm_scale_d=torch.tensor(0.4)), dict(scale=0.4)), (dict(window_left_d=3), dict(window_left=3)),
                      (dict(pos_encoding_mode_d="ALIBI"), None), (dict(pos_encoding_mode_d="ROPE_LLAMA", rope_scale_d=2.0), None)]),
    "unified": (unified_run, [(dict(logits_soft_cap=3.0), dict(cap=3.0)), (dict(logits_soft_cap=0.5), dict(cap=0.5))]),
    "sink prefill": (sink_run(flashinfer.BatchAttentionWithAttentionSinkWrapper, ROWS), [(dict(sm_scale=1.0), dict(scale=1.0)), (dict(sm_scale=0.2), dict(scale=0.2))]),
    "sink decode": (sink_run(flashinfer.BatchDecodeWithAttentionSinkWrapper), [(dict(sm_scale=1.0), dict(scale=1.0))]),
    "jit prefill": (sink_run(lambda x: flashinfer.BatchPrefillWithPagedKVCacheWrapper(x, **JIT_SINK), ROWS), [(dict(sm_scale=1.0), dict(scale=1.0))]),
    "jit decode": (sink_run(lambda x: flashinfer.BatchDecodeWithPagedKVCacheWrapper(x, **JIT_SINK)), [(dict(sm_scale=1.0), dict(scale=1.0))]),
    "jit ragged": (ragged_sink_run, [(dict(sm_scale=1.0), dict(scale=1.0))]),
}


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("kind", RUNS_WITH_OPTIONS)
def test_options_of_a_run_are_of_that_run(device, kind):
    """They hold for one run, whether it succeeds or not; the ones after it have what was planned."""
    make, cases = RUNS_WITH_OPTIONS[kind]
    table, cache, k, v = made()
    q = torch.randn(3, HEADS, DIM).half()
    _, run = make(table, cache, q)
    plain = run()
    for options, words in cases:
        out, lse = run(**options)
        assert not torch.equal(lse, plain[1])
        assert equal(run(), plain)
        for r in range(3 if words else 0):
            want, want_lse = attend(q[r:r + 1], k[r], v[r], sinks=None if kind in ("pod", "unified") else torch.zeros(HEADS), **words)
            close(out[r:r + 1], want, "float16")
            lse_close(lse[r:r + 1], want_lse)
        with pytest.raises(ValueError):
            run(q=q[:, :2], **options)
        assert equal(run(), plain)
        assert equal(run(**options), (out, lse))


@pytest.mark.parametrize("mode", ["ALIBI", "ROPE_LLAMA"])
def test_positions_told_by_a_run_are_as_if_planned(device, mode):
    """The log-sum-exp included, which counts ALiBi from a row's index."""
    table, cache, _, _ = made()
    q = torch.randn(3, HEADS, DIM).half()
    made_by_run = pod_run(table, cache, q)[1](pos_encoding_mode_d=mode)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)
    wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, pos_encoding_mode=mode, rope_theta=5e3)
    assert equal(made_by_run, wrapper.run(q, cache, return_lse=True))


@pytest.mark.parametrize("kind", ["prefill", "ragged", "blocks"])
def test_alibi_told_by_forward_is_as_if_planned(device, kind):
    """The log-sum-exp included; what forward() says stays, as upstream's."""
    table, cache, _, _ = made()
    q, k = torch.randn(32, HEADS, DIM).half(), torch.randn(64, KV_HEADS, DIM).half()
    if kind == "prefill":
        wrapper, given, plan = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace()), (q, cache), (ints(0, 20, 21, 32), *table, HEADS, KV_HEADS, DIM, PAGE)
    elif kind == "ragged":
        wrapper, given, plan = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace()), (q, k, k), (ints(0, 10, 32), ints(0, 24, 64), HEADS, KV_HEADS, DIM)
    else:
        wrapper, given, plan = flashinfer.BlockSparseAttentionWrapper(workspace()), (q, k, k), (ints(0, 2, 3), ints(0, 3, 1), 32, 64, 16, 16, HEADS, KV_HEADS, DIM)
    wrapper.plan(*plan)
    wrapper.forward(*given, pos_encoding_mode="ALIBI")
    told = wrapper.run(*given, return_lse=True)
    wrapper.plan(*plan, pos_encoding_mode="ALIBI")
    assert equal(told, wrapper.run(*given, return_lse=True))


def test_forward_of_variable_blocks_refuses_alibi(device):
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace())
    wrapper.plan(torch.ones(1, 1, 1, dtype=torch.bool), ints(4)[None], ints(4)[None], 1, 1, DIM)
    q = torch.randn(1, 4, DIM).half()
    before = wrapper.run(q, q, q)
    with pytest.raises(NotImplementedError, match="ALIBI"):
        wrapper.forward(q, q, q, pos_encoding_mode="ALIBI")
    assert torch.equal(wrapper.run(q, q, q), before)


def test_causal_of_batch_pods_is_of_that_run(device):
    table, cache, k, v = made()
    q = torch.randn(6, HEADS, DIM).half()
    pod = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace())
    pod.plan(ints(0, 2, 4, 6), *table, ints(0, 1, 2, 3), *table, HEADS, KV_HEADS, DIM, PAGE)
    for causal in (True, False, True):
        with pytest.raises(ValueError):
            pod.run(q[:5], cache, q[:3], cache, causal_p=causal)
        out = pod.run(q, cache, q[:3], cache, causal_p=causal)[0]
        for r in range(3):
            close(out[2 * r:2 * r + 2], attend(q[2 * r:2 * r + 2], k[r], v[r], causal=causal)[0], "float16")


@pytest.mark.parametrize("base, layout", [("ln", "NH"), ("log2", "HN")])
def test_scale_of_a_run_with_another_lse(device, base, layout):
    """A run that goes through another one keeps its options."""
    table, cache, k, v = made()
    q, sink = torch.randn(3, HEADS, DIM).half(), torch.randn(HEADS)
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace())
    wrapper.plan(ROWS, *table, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float16)
    out, lse = wrapper.run(q, cache, sink, 0.3, return_lse=True, lse_base=base, lse_layout=layout)
    for r in range(3):
        want, want_lse = attend(q[r:r + 1], k[r], v[r], sinks=sink, scale=0.3)
        close(out[r:r + 1], want, "float16")
        lse_close((lse if layout == "NH" else lse.T)[r:r + 1] / (math.log(2) if base == "ln" else 1), want_lse)


@pytest.mark.parametrize("kind", RUNS_WITH_OPTIONS)
def test_equal_runs_plan_nothing(device, kind, monkeypatch):
    """Runs of a plan plan again only where they say something else than the one before; a scale that is the planned one is nothing else."""
    make, cases = RUNS_WITH_OPTIONS[kind]
    table, cache, _, _ = made()
    wrapper, run = make(table, cache, torch.randn(3, HEADS, DIM).half())
    attention, planned = getattr(wrapper, "_decode", wrapper)._attention, []
    apply = attention._apply
    monkeypatch.setattr(attention, "_apply", lambda: (planned.append(1), apply()))
    run()
    del planned[:]
    name = next(iter(cases[0][0]))
    for options in ({}, {name: DIM ** -0.5} if "scale" in name else {}, *(case[0] for case in cases), {}):
        before = len(planned)
        run(**options)
        assert len(planned) - before <= 1
        before = len(planned)
        run(**options)
        run(**options)
        assert len(planned) == before
    assert len(planned) == len(cases) + 1       # each of the cases, and back


def test_options_that_were_refused(device, monkeypatch):
    """What cannot be planned is refused each time, and leaves the plan as it was."""
    table, cache, _, _ = made()
    wrapper, run = unified_run(table, cache, torch.randn(3, HEADS, DIM).half())
    plain, make = run(), wrapper._attention._make

    def refuse(*args):
        raise NotImplementedError("no such plan")

    monkeypatch.setattr(wrapper._attention, "_make", refuse)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="no such plan"):
            run(logits_soft_cap=3.0)
        with pytest.raises(NotImplementedError, match="no such plan"):
            run(logits_soft_cap=3.0)
        assert equal(run(), plain)
    monkeypatch.setattr(wrapper._attention, "_make", make)
    assert not equal(run(logits_soft_cap=3.0), plain)
