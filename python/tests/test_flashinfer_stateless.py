# SPDX-License-Identifier: Apache-2.0
"""Functions that are given a batch and no plan (trtllm_..., xqa_..., cudnn_...) against float64. Torch tensors of the CPU, or of a GPU with --device cuda, where a
call is captured, too."""

import math

import numpy as np
import pytest

import foveal.flashinfer as flashinfer
from reference import attend, close, lse_close, numbers

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("by_default")

LENGTHS, PAGE, KV_HEADS, HEADS, DIM = [37, 5, 64], 16, 2, 8, 64


def ints(*x):
    return torch.tensor(x, dtype=torch.int32)


def made(layout, pair=False):
    """(lengths, block table, cache, keys and values of each request)."""
    table = torch.randperm(20)[:15].reshape(3, 5).to(torch.int32)
    cache = torch.randn((20, 2, PAGE, KV_HEADS, DIM) if layout == "NHD" else (20, 2, KV_HEADS, PAGE, DIM)).half()
    plain = cache if layout == "NHD" else cache.transpose(2, 3)
    k, v = ([plain[table[r].long(), i].reshape(-1, KV_HEADS, DIM)[:n] for r, n in enumerate(LENGTHS)] for i in (0, 1))
    return ints(*LENGTHS), table, (cache[:, 0], cache[:, 1]) if pair else cache, k, v


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("pair", [False, True])
def test_decode(device, layout, q_len, pair):
    lengths, table, cache, k, v = made(layout, pair)
    q, sinks = torch.randn(3 * q_len, HEADS, DIM).half(), torch.randn(HEADS)
    for options in (dict(window_left=7), dict(sinks=sinks), dict(sinks=[sinks]), dict(out=torch.empty_like(q))):
        out = flashinfer.trtllm_batch_decode_with_kv_cache(q, cache, None, table, lengths, 64, 0.1, 2.0, kv_layout=layout, q_len_per_req=q_len, **options)
        given = sinks if "sinks" in options else None
        for r in range(3):
            rows = slice(r * q_len, (r + 1) * q_len)
            close(out[rows], attend(q[rows], k[r], v[r], causal=True, scale=0.1, window_left=options.get("window_left", -1), sinks=given)[0] * 2, "float16")
    assert out is options["out"]
    want_lse = torch.empty(3 * q_len, HEADS)
    filled = flashinfer.trtllm_batch_decode_with_kv_cache(q, cache, None, table, lengths, 64, 0.1, 2.0, kv_layout=layout, q_len_per_req=q_len, lse=want_lse)
    both = flashinfer.trtllm_batch_decode_with_kv_cache(q, cache, None, table, lengths, 64, 0.1, 2.0, kv_layout=layout, q_len_per_req=q_len, return_lse=True)
    close(filled, numbers(out), "float16")
    for r in range(3):
        rows = slice(r * q_len, (r + 1) * q_len)
        for lse in (want_lse, both[1]):
            lse_close(lse[rows], attend(q[rows], k[r], v[r], causal=True, scale=0.1)[1])
    xqa = flashinfer.xqa_batch_decode_with_kv_cache(q, cache, None, table, lengths, 64, torch.tensor(0.1), torch.tensor([2.0]), kv_layout=layout, q_len_per_req=q_len)
    close(xqa, numbers(out), "float16")
    if layout == "HND":
        k_cache, v_cache = cache if pair else (cache[:, 0], cache[:, 1])
        cudnn, lse = flashinfer.cudnn.cudnn_batch_decode_with_kv_cache(q, k_cache, v_cache, 0.1, None, max_sequence_kv=64, block_tables=table, q_len_per_req=q_len,
                                                                       actual_seq_lens_kv=lengths.view(3, 1, 1, 1), return_lse=True)
        close(cudnn * 2, numbers(out), "float16")
        lse_close(lse, numbers(want_lse))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_xqa(device, layout, q_len):
    """The raw function: its scales, window and sinks, into the tensor that is given; with and without drafts."""
    lengths, table, cache, k, v = made(layout)
    sinks = torch.randn(KV_HEADS, HEADS // KV_HEADS)
    q = torch.randn(3, 1, q_len, HEADS, DIM).half()
    q = q[:, :, 0] if q_len == 1 else q
    out = torch.empty_like(q)
    for window, given in ((0, None), (9, sinks)):
        result = flashinfer.xqa(q, cache[:, 0], cache[:, 1], table, lengths[:, None].to(torch.uint32), out, None, None, KV_HEADS, PAGE, sinks=given, q_scale=0.5,
                                kv_scale=2.0, sliding_win_size=window, kv_layout=layout, q_seq_len=q_len)
        assert result is None
        for r in range(3):
            want = attend(q[r].reshape(q_len, HEADS, DIM), k[r], v[r], causal=True, scale=DIM**-0.5, window_left=window - 1 if window else -1,
                          sinks=None if given is None else given.reshape(-1))[0]
            close(out[r].reshape(q_len, HEADS, DIM), want * 2, "float16")
        if layout == "NHD":             # caches as rows of tokens and heads
            flat, words = torch.empty_like(out), table.to(torch.uint32)
            flashinfer.xqa(q, *(cache[:, i].reshape(-1, DIM) for i in (0, 1)), words, lengths[:, None], flat, None, None, KV_HEADS, PAGE, sinks=given, q_scale=0.5,
                           kv_scale=2.0, sliding_win_size=window, kv_layout="HND", q_seq_len=q_len)
            assert torch.equal(flat, out)


@pytest.mark.parametrize("ragged", [False, True])
def test_draft_masks(device, ragged):
    """Rows that are drafts see every key before them and of each other what the mask says."""
    lengths, table, cache, k, v = made("NHD")
    counts = [3, 1, 5] if ragged else [5, 5, 5]
    rows = np.concatenate(([0], np.cumsum(counts)))
    q = torch.randn(int(rows[-1]), HEADS, DIM).half()
    flags = torch.rand(int(rows[-1]), 32) < 0.5
    bits = (flags.to(torch.int64) << torch.arange(32)).sum(1)
    words = torch.stack((bits & 0xffff, bits >> 16), 1).to(torch.uint16)
    if ragged:
        out = torch.empty_like(q)
        flashinfer.xqa(q, cache[:, 0], cache[:, 1], table, lengths[:, None], out, None, None, KV_HEADS, PAGE, q_seq_len=5, mask=words, q_cu_seq_lens=ints(*rows))
    else:
        out = flashinfer.xqa_batch_decode_with_kv_cache(q, cache, None, table, lengths, 64, DIM**-0.5, mask=words.view(3, 5, 2), q_len_per_req=5)
    for r, n in enumerate(LENGTHS):
        mine = slice(rows[r], rows[r + 1])
        seen = torch.ones(counts[r], n, dtype=torch.bool)
        seen[:, n - counts[r]:] = flags[mine, :counts[r]]
        close(out[mine], attend(q[mine], k[r], v[r], mask=seen)[0], "float16")


def test_steps_that_change(device):
    """Lengths and tables are those of the call, whatever was there before; wherever they lie."""
    lengths, table, cache, k, v = made("HND")
    q = torch.randn(3, HEADS, DIM).half()
    for shift in (0, 3, 1):
        lengths[:] = torch.tensor(LENGTHS) - shift
        table[0, 0] = (table[0, 0] + shift) % 20
        k[0], v[0] = (cache[table[0].long(), i].transpose(1, 2).reshape(-1, KV_HEADS, DIM) for i in (0, 1))
        for here in (lengths, lengths.cpu().long()):
            out = flashinfer.trtllm_batch_decode_with_kv_cache(q, cache, None, table, here, 64, 0.1)
            for r, n in enumerate(lengths.tolist()):
                close(out[r:r + 1], attend(q[r:r + 1], k[r][:n], v[r][:n], scale=0.1)[0], "float16")


def test_captured(device):
    if device.type != "cuda":
        pytest.skip("graphs are a GPU's")
    lengths, table, cache, k, v = made("HND")
    q, out = torch.randn(3, HEADS, DIM).half(), torch.empty(3, HEADS, DIM).half()
    call = lambda: flashinfer.trtllm_batch_decode_with_kv_cache(q, cache, None, table, lengths, 64, 0.1, out=out)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    lengths -= 2
    graph.replay()
    for r, n in enumerate(LENGTHS):
        close(out[r:r + 1], attend(q[r:r + 1], k[r][:n - 2], v[r][:n - 2], scale=0.1)[0], "float16")


def test_context(device):
    lengths, table, cache, k, v = made("HND")
    rows, q = ints(0, 4, 9, 12), torch.randn(12, HEADS, DIM).half()
    out = flashinfer.prefill.trtllm_batch_context_with_kv_cache(q, cache, None, table, lengths, 5, 64, torch.tensor(0.1), torch.tensor([2.0]), 3, rows, None)
    four = lambda x: x.view(-1, 1, 1, 1)
    cudnn, nothing = flashinfer.prefill.cudnn_batch_prefill_with_kv_cache(q, cache[:, 0], cache[:, 1], 0.1, None, max_token_per_sequence=5, max_sequence_kv=64, causal=True,
                                                                 actual_seq_lens_q=four(rows[1:] - rows[:-1]), actual_seq_lens_kv=four(lengths), block_tables=table,
                                                                 return_lse=False)
    assert nothing is None
    padded = torch.full((3, 5, HEADS), 7.0)
    flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache(q, cache[:, 0], cache[:, 1], 0.1, None, max_token_per_sequence=5, max_sequence_kv=64, causal=True, lse=padded,
                                                       actual_seq_lens_q=rows[1:] - rows[:-1], actual_seq_lens_kv=lengths, block_tables=table, return_lse=True)
    windowed = flashinfer.trtllm_fmha_v2_prefill((q, cache), "Q_PAGED_KV_HND", None, lengths, 5, 64, 0.1, 2.0, 3, rows, ints(0, 37, 42, 106), block_tables=table,
                                                 mask_mode="sliding_window", window_left=7, logits_soft_cap_scale=3.0)
    free, lse = flashinfer.trtllm_batch_context_with_kv_cache(q, cache, None, table, lengths, 5, 64, 0.1, 1.0, 3, rows, None, causal=False, return_lse=True)
    for r in range(3):
        mine = slice(rows[r], rows[r + 1])
        want = attend(q[mine], k[r], v[r], causal=True, scale=0.1)[0]
        close(out[mine], want * 2, "float16")
        close(cudnn[mine], want, "float16")
        lse_close(padded[r, :rows[r + 1] - rows[r]], attend(q[mine], k[r], v[r], causal=True, scale=0.1)[1])
        assert (padded[r, rows[r + 1] - rows[r]:] == 7).all()
        close(windowed[mine], attend(q[mine], k[r], v[r], causal=True, scale=0.1, window_left=7, cap=3.0)[0] * 2, "float16")
        want, want_lse = attend(q[mine], k[r], v[r], scale=0.1)
        close(free[mine], want, "float16")
        lse_close(lse[mine], want_lse)


@pytest.mark.parametrize("causal", [False, True])
def test_ragged(device, causal):
    q, k, v = torch.randn(9, 8, 192).half(), torch.randn(30, 8, 192).half(), torch.randn(30, 8, 128).half()
    rows, keys = ints(0, 4, 9), ints(0, 12, 30)
    out, lse = flashinfer.prefill.trtllm_ragged_attention_deepseek(
        query=q, key=k, value=v, workspace_buffer=None, seq_lens=keys[1:] - keys[:-1], max_q_len=5, max_kv_len=18, bmm1_scale=0.1, bmm2_scale=1.0, o_sf_scale=1.0,
        batch_size=2, window_left=-1, cum_seq_lens_q=rows, cum_seq_lens_kv=keys, enable_pdl=False, is_causal=causal, return_lse=True)
    cudnn, cudnn_lse = flashinfer.cudnn_batch_prefill_with_kv_cache(q, k, v, 0.1, None, max_token_per_sequence=5, max_sequence_kv=18, actual_seq_lens_q=ints(4, 5),
                                                         actual_seq_lens_kv=ints(12, 18), causal=causal, return_lse=True, lse_base="ln")
    by_offsets, _ = flashinfer.cudnn_batch_prefill_with_kv_cache(q, k, v, 0.1, None, max_token_per_sequence=5, max_sequence_kv=18, batch_offsets_q=rows,
                                                                 batch_offsets_k=keys, batch_offsets_units="tokens", causal=causal)
    varlen, varlen_lse = flashinfer.prefill.fmha_varlen(q, k, v, rows, keys, causal=causal, sm_scale=0.1, return_lse=True)
    assert flashinfer.fmha_varlen(q, k, v, rows, keys, causal=causal)[1] is None
    mask = "causal" if causal else "padding"
    apart = flashinfer.trtllm_fmha_v2_prefill((q, k, v), "SEPARATE_Q_K_V", None, keys[1:] - keys[:-1], 5, 18, 0.1, 1.0, 2, rows, keys, mask_mode=mask)
    for r in range(2):
        mine, theirs = slice(rows[r], rows[r + 1]), slice(keys[r], keys[r + 1])
        want, want_lse = attend(q[mine], k[theirs], v[theirs], causal=causal, scale=0.1)
        close(out[mine], want, "float16")
        for x in (cudnn, by_offsets, varlen, apart):
            close(x[mine], want, "float16")
        for x in (lse, varlen_lse, cudnn_lse / math.log(2)):
            lse_close(x[mine], want_lse)


def test_packed(device):
    """Queries, keys and values in one tensor, and keys beside values."""
    qkv, rows = torch.randn(9, 3, 8, 64).half(), ints(0, 4, 9)
    one = flashinfer.trtllm_fmha_v2_prefill(qkv, "PACKED_QKV", None, ints(4, 5), 5, 5, 0.1, 1.0, 2, rows, rows)
    two = flashinfer.trtllm_fmha_v2_prefill((qkv[:, 0], qkv[:, 1:]), "CONTIGUOUS_Q_KV", None, ints(4, 5), 5, 5, 0.1, 1.0, 2, rows, rows)
    for r in range(2):
        mine = slice(rows[r], rows[r + 1])
        want = attend(qkv[mine, 0], qkv[mine, 1], qkv[mine, 2], causal=True, scale=0.1)[0]
        close(one[mine], want, "float16")
        close(two[mine], want, "float16")


@pytest.mark.parametrize("axes", [3, 4])
def test_latent(device, axes):
    lengths, table = ints(37, 5), torch.randperm(8)[:6].reshape(2, 3).to(torch.int32)
    cache, q = torch.randn(8, 32, 576).bfloat16(), torch.randn(2, 2, 16, 576).bfloat16()
    out = flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(
        query=q, kv_cache=cache if axes == 3 else cache[:, None], workspace_buffer=None, qk_nope_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64,
        block_tables=table, seq_lens=lengths, max_seq_len=64, bmm1_scale=0.05, bmm2_scale=0.5)
    same, lse = flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(q, cache, None, 128, 512, 64, table, lengths, 64, bmm1_scale=0.05, bmm2_scale=0.5, return_lse=True,
                                                                     return_lse_base="basee")
    assert torch.equal(same, out) and tuple(lse.shape) == (4, 16)
    single = torch.empty(2, 16, 512).bfloat16()
    flashinfer.mla.xqa_batch_decode_with_kv_cache_mla(q[:, 1:], cache, None, 128, 512, 64, table, lengths, 64, out=single, bmm1_scale=0.05, bmm2_scale=0.5)
    close(single, numbers(out[:, 1]), "bfloat16")
    for r, n in enumerate(lengths.tolist()):
        k = cache[table[r].long()].reshape(-1, 1, 576)[:n]
        want, want_lse = attend(q[r], k, k[..., :512], causal=True, scale=0.05)
        close(out[r], want / 2, "bfloat16")
        lse_close(lse[2 * r:2 * r + 2] / math.log(2), want_lse)


def test_refusals(device):
    lengths, table, cache, *_ = made("HND")
    q = torch.randn(3, HEADS, DIM).half()
    for options in (dict(kv_cache_sf=(cache, cache)), dict(o_scale=2.0), dict(cp_world=2), dict(some_option=3), dict(out_dtype="float8_e4m3fn")):
        with pytest.raises(NotImplementedError):
            flashinfer.trtllm_batch_decode_with_kv_cache(q, cache, None, table, lengths, 64, **options)
    with pytest.raises(ValueError, match="mask is 1 rows of 2 bytes; expected 3 rows of at least 1 bits"):
        flashinfer.trtllm_batch_decode_with_kv_cache(q, cache, None, table, lengths, 64, mask=torch.zeros(1, 1, 1, dtype=torch.uint16))
    with pytest.raises(ValueError, match="lse_base must be one of"):
        flashinfer.cudnn_batch_prefill_with_kv_cache(q, q, q, 0.1, None, max_token_per_sequence=1, max_sequence_kv=1, causal=True, return_lse=True, lse_base="e")
    with pytest.raises(ValueError, match="may be left out only where batch_offsets_units is 'tokens'"):
        flashinfer.cudnn_batch_prefill_with_kv_cache(q, q, q, 0.1, None, max_token_per_sequence=1, max_sequence_kv=1, causal=True, return_lse=True)
    with pytest.raises(ValueError, match="Unsupported input_layout: 'QKV'"):
        flashinfer.prefill.trtllm_fmha_v2_prefill(q, "QKV", None, lengths, 1, 64, 1.0, 1.0, 3, lengths, lengths)
    with pytest.raises(ValueError, match="output has the shape"):
        flashinfer.xqa(q[:, None], cache[:, 0], cache[:, 1], table, lengths, q, None, None, KV_HEADS, PAGE, kv_layout="HND")
    for bad in ((q[:2], table, lengths), (q, table[0], lengths), (q, table, lengths[:2])):
        with pytest.raises(ValueError, match="expected"):
            flashinfer.trtllm_batch_decode_with_kv_cache(bad[0], cache, None, bad[1], bad[2], 64)
