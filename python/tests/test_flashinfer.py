# SPDX-License-Identifier: Apache-2.0
"""foveal.flashinfer against float64 references, on NumPy arrays and torch tensors of the CPU, or of a GPU with --device cuda."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import foveal
import foveal.flashinfer as fi
from reference import LN2, Pages, attend, attend_batch, close, lse_close, merged, numbers, rotate, rows_of


# ------------------------------------------------------------------------------------------------------ single requests


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"causal": True, "window_left": 5}, {"window_left": 0}, {"logits_soft_cap": 8.0}, {"sm_scale": 0.3, "causal": True},
    {"pos_encoding_mode": "ROPE_LLAMA", "causal": True}, {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 4.0, "rope_theta": 5e5},
    {"pos_encoding_mode": "ALIBI", "causal": True}], ids=str)
def test_single_prefill(lib, rng, layout, options):
    q, k, v = rng.standard_normal((9, 6, 64)), rng.standard_normal((31, 2, 64)), rng.standard_normal((31, 2, 64))
    kk, vv = (k, v) if layout == "NHD" else (k.transpose(1, 0, 2), v.transpose(1, 0, 2))
    o, lse = fi.single_prefill_with_kv_cache(lib.array(q), lib.array(kk), lib.array(vv), kv_layout=layout, return_lse=True, **options)
    assert lib.is_mine(o) and lib.is_mine(lse)
    rope = (options.get("rope_theta", 1e4), options.get("rope_scale", 1.0)) if options.get("pos_encoding_mode") == "ROPE_LLAMA" else None
    slopes = numbers(fi.utils.get_alibi_slopes(6)) if options.get("pos_encoding_mode") == "ALIBI" else None
    wanted = attend(q.astype(np.float32), k.astype(np.float32), v.astype(np.float32), causal=options.get("causal", False), window_left=options.get("window_left", -1),
                    cap=options.get("logits_soft_cap", 0), scale=options.get("sm_scale"), rope=rope, slopes=slopes)
    close(o, wanted[0])
    lse_close(lse, wanted[1])


@pytest.mark.parametrize("word", ["float16", "bfloat16"])
def test_single_prefill_sixteen_bits(lib, rng, word):
    q, k, v = (lib.array(rng.standard_normal(s), word) for s in ((17, 8, 128), (50, 2, 128), (50, 2, 128)))
    o, lse = fi.single_prefill_with_kv_cache_return_lse(q, k, v, causal=True)
    assert o.dtype == q.dtype
    wanted = attend(numbers(q), numbers(k), numbers(v), causal=True)
    close(o, wanted[0], word)
    close(lse, wanted[1], word)


def test_single_prefill_more_rows_than_keys(lib, rng):
    """Bottom-right: the first rows see nothing and give zeros and -inf."""
    q, k, v = rng.standard_normal((7, 2, 32)), rng.standard_normal((3, 2, 32)), rng.standard_normal((3, 2, 32))
    o, lse = fi.single_prefill_with_kv_cache(lib.array(q), lib.array(k), lib.array(v), causal=True, return_lse=True)
    assert (numbers(o)[:4] == 0).all() and np.isneginf(numbers(lse)[:4]).all()
    wanted = attend(q, k, v, causal=True)
    close(o, wanted[0])
    lse_close(lse, wanted[1])


@pytest.mark.parametrize("packed", [False, True])
def test_single_prefill_custom_mask(lib, rng, packed):
    """A mask replaces causal and joins the window."""
    q, k, v = rng.standard_normal((5, 4, 64)), rng.standard_normal((13, 4, 64)), rng.standard_normal((13, 4, 64))
    mask = rng.random((5, 13)) < 0.5
    mask[2] = False
    given = {"packed_custom_mask": fi.packbits(lib.bools(mask.reshape(-1)), bitorder="little")} if packed else {"custom_mask": lib.bools(mask)}
    o, lse = fi.single_prefill_with_kv_cache(lib.array(q), lib.array(k), lib.array(v), causal=True, window_left=9, return_lse=True, **given)
    wanted = attend(q, k, v, mask=mask, window_left=9)
    close(o, wanted[0])
    lse_close(lse, wanted[1])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA", "ALIBI"])
def test_single_decode(lib, rng, layout, mode):
    q, k, v = rng.standard_normal((8, 64)), rng.standard_normal((45, 4, 64)), rng.standard_normal((45, 4, 64))
    kk, vv = (k, v) if layout == "NHD" else (k.transpose(1, 0, 2), v.transpose(1, 0, 2))
    o, lse = fi.single_decode_with_kv_cache(lib.array(q), lib.array(kk), lib.array(vv), kv_layout=layout, pos_encoding_mode=mode, window_left=20, logits_soft_cap=0.0,
                                            return_lse=True)
    wanted = attend(q[None], k, v, window_left=20, rope=(1e4, 1.0) if mode == "ROPE_LLAMA" else None,
                    slopes=numbers(fi.utils.get_alibi_slopes(8)) if mode == "ALIBI" else None)
    assert tuple(o.shape) == (8, 64) and tuple(lse.shape) == (8,)
    close(o, wanted[0][0])
    lse_close(lse, wanted[1][0])


def test_single_dims_differ(lib, rng):
    q, k, v = rng.standard_normal((4, 4, 192)), rng.standard_normal((20, 4, 192)), rng.standard_normal((20, 4, 128))
    close(fi.single_prefill_with_kv_cache(lib.array(q), lib.array(k), lib.array(v), causal=True), attend(q, k, v, causal=True)[0])


def test_single_fp8(lib, rng):
    """8-bit keys and values with scales; 8-bit queries with a scale per head."""
    word = "float8_e4m3fn"
    k, v = (lib.array(rng.standard_normal((23, 2, 64)), word) for _ in range(2))
    q = lib.array(rng.standard_normal((6, 4, 64)), "bfloat16")
    o = fi.single_prefill_with_kv_cache(q, k, v, causal=True, k_scale=0.5, v_scale=2.0)
    close(o, attend(numbers(q), numbers(k) * 0.5, numbers(v) * 2, causal=True)[0], "bfloat16")
    q8, scale = lib.array(rng.standard_normal((6, 4, 64)), word), lib.array([0.5, 1, 2, 1.5])
    o = fi.single_prefill_with_kv_cache(q8, k, v, scale, lib.array([0.5, 0.25]), lib.array([2.0, 1.0]), o_dtype=lib.dtype("float16"))
    assert o.dtype == lib.dtype("float16")
    wanted = attend(numbers(q8) * numbers(scale)[:, None], numbers(k) * np.array([0.5, 0.25])[:, None], numbers(v) * np.array([2.0, 1.0])[:, None])
    close(o, wanted[0], "float16")


# ---------------------------------------------------------------------------------------------------------- paged decode


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("page_size,layout,combined", [(1, "NHD", True), (5, "HND", True), (16, "NHD", False), (16, "HND", False)])
def test_batch_decode(lib, rng, tensor_cores, page_size, layout, combined):
    lengths = [54, 0, 1, 97, 33]
    pages = Pages(rng, lengths, 2, 64, page_size, layout=layout, combined=combined, lib=lib)
    q = rng.standard_normal((5, 8, 64)).astype(np.float32)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(lib.workspace(), layout, use_tensor_cores=tensor_cores)
    wrapper.plan(lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 8, 2, 64, page_size, q_data_type=lib.dtype("float32"))
    o, lse = wrapper.run(lib.array(q), pages.cache, return_lse=True)
    wanted = attend_batch(q, np.arange(6), pages.k, pages.v)
    close(o, wanted[0])
    lse_close(lse, wanted[1])
    again, lse_again = wrapper.run_return_lse(lib.array(q), pages.cache)
    assert (numbers(again) == numbers(o)).all() and (numbers(lse_again) == numbers(lse)).all()


@pytest.mark.parametrize("options", [{"window_left": 7}, {"logits_soft_cap": 5.0}, {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 1e5},
                                     {"pos_encoding_mode": "ALIBI"}, {"sm_scale": 0.2}, {"fixed_split_size": 2}, {"disable_split_kv": True}], ids=str)
def test_batch_decode_options(lib, rng, options):
    pages = Pages(rng, [100, 9, 200], 2, 64, 8, lib=lib)
    q = rng.standard_normal((3, 4, 64)).astype(np.float32)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(lib.workspace(), use_tensor_cores=True)
    wrapper.plan(lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 64, 8, q_data_type="float32", **options)
    o, lse = wrapper.run(lib.array(q), pages.cache, return_lse=True)
    mode = options.get("pos_encoding_mode")
    wanted = attend_batch(q, np.arange(4), pages.k, pages.v, window_left=options.get("window_left", -1), cap=options.get("logits_soft_cap", 0),
                             scale=options.get("sm_scale"), rope=(1e5, 1.0) if mode == "ROPE_LLAMA" else None,
                             slopes=numbers(fi.utils.get_alibi_slopes(4)) if mode == "ALIBI" else None)
    close(o, wanted[0])
    lse_close(lse, wanted[1])


def test_batch_decode_one_after_another(lib, rng):
    """A wrapper that is planned for growing and shrinking batches, with positional arguments in the order engines use."""
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(lib.workspace())
    for lengths in ([3], [5000, 2], [1] * 40, [], [17, 0]):
        pages = Pages(rng, lengths, 2, 32, 16, lib=lib)
        q = rng.standard_normal((len(lengths), 4, 32)).astype(np.float32)
        wrapper.begin_forward(lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 32, 16, "NONE", -1, None, "float32")
        o = wrapper.forward(lib.array(q), pages.cache)
        wrapper.end_forward()
        if lengths:
            close(o, attend_batch(q, np.arange(len(lengths) + 1), pages.k, pages.v)[0])
        else:
            assert tuple(o.shape) == (0, 4, 32)


def test_batch_decode_forward_options(lib, rng):
    """forward() says options again that plan() was not told."""
    pages = Pages(rng, [40, 3], 2, 64, 4, lib=lib)
    q = rng.standard_normal((2, 4, 64)).astype(np.float32)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(lib.workspace())
    wrapper.plan(lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 64, 4, q_data_type="float32")
    for options in ({}, {"sm_scale": 0.5}, {"sm_scale": 0.5, "logits_soft_cap": 3.0}, {"sm_scale": 64 ** -0.5}):
        o, lse = wrapper.forward_return_lse(lib.array(q), pages.cache, **options)
        wanted = attend_batch(q, np.arange(3), pages.k, pages.v, scale=options.get("sm_scale"), cap=options.get("logits_soft_cap", 0))
        close(o, wanted[0])
        lse_close(lse, wanted[1])


def test_batch_decode_several_rows(lib, rng):
    """q_len_per_req: the last rows of each request, causal."""
    pages = Pages(rng, [30, 4, 77], 2, 64, 8, lib=lib)
    q = rng.standard_normal((9, 4, 64)).astype(np.float32)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(lib.workspace(), use_tensor_cores=True)
    wrapper.plan(lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 64, 8, q_data_type="float32", q_len_per_req=3)
    close(wrapper.run(lib.array(q), pages.cache), attend_batch(q, np.arange(4) * 3, pages.k, pages.v, causal=True)[0])
    with pytest.raises(ValueError, match="q_len_per_req"):
        wrapper.run(lib.array(q[:8]), pages.cache)


@pytest.mark.parametrize("word", ["float8_e4m3fn", "float8_e5m2"])
def test_batch_decode_fp8(lib, rng, word):
    pages = Pages(rng, [30, 4], 2, 64, 8, word=word, lib=lib)
    q = lib.array(rng.standard_normal((2, 4, 64)), "float16")
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(lib.workspace(), use_tensor_cores=True)
    wrapper.plan(lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 64, 8, q_data_type=lib.dtype("float16"), kv_data_type=lib.dtype(word))
    for scales in ({}, {"k_scale": 0.7, "v_scale": 1.5}, {"q_scale": 2.0, "k_scale": 0.25}):
        o, lse = wrapper.run(q, pages.cache, return_lse=True, **scales)
        k = [x * scales.get("k_scale", 1) * scales.get("q_scale", 1) for x in pages.k]
        wanted = attend_batch(q, np.arange(3), k, [x * scales.get("v_scale", 1) for x in pages.v])
        close(o, wanted[0], "float16")
        close(lse, wanted[1], "float16")


def test_batch_decode_scales_without_fp8(lib, rng):
    pages = Pages(rng, [30, 4], 2, 64, 8, lib=lib)
    q = rng.standard_normal((2, 4, 64)).astype(np.float32)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(lib.workspace())
    wrapper.plan(lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 64, 8, q_data_type="float32")
    for k_scale, v_scale in ((0.5, 3.0), (None, None), (1.0, 2.0)):
        o = wrapper.run(lib.array(q), pages.cache, k_scale=k_scale, v_scale=v_scale)
        close(o, attend_batch(q, np.arange(3), [x * (k_scale or 1) for x in pages.k], [x * (v_scale or 1) for x in pages.v])[0])


@pytest.mark.parametrize("fast", [False, True])
def test_batch_decode_graph_buffers(lib, rng, fast):
    """Graph mode: fixed buffers, plans of changing contents, the maxima never move."""
    buffers = lib.ints(np.zeros(4)), lib.ints(np.zeros(64)), lib.ints(np.zeros(3))
    wrapper = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(lib.workspace(), *buffers)
    assert wrapper.is_cuda_graph_enabled
    plans = set()
    for step, lengths in enumerate(([1, 1, 1], [100, 5, 60], [0, 250, 3])):
        pages = Pages(rng, lengths, 2, 64, 8, lib=lib, spare=50 - sum(-(-n // 8) for n in lengths))
        q = rng.standard_normal((3, 4, 64)).astype(np.float32)
        if fast and step:
            buffers[0][:] = lib.ints(pages.indptr)
            buffers[1][:len(pages.ids)] = lib.ints(pages.ids)
            buffers[2][:] = lib.ints(pages.last)
            fi.fast_decode_plan(wrapper, lib.ints(pages.indptr), buffers[1], lib.ints(pages.last), 4, 2, 64, 8, q_data_type="float32",
                                global_override_indptr_cpu=lib.host_ints(pages.indptr))
        else:
            wrapper.plan(lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 64, 8, q_data_type="float32")
        close(wrapper.run(lib.array(q), pages.cache), attend_batch(q, np.arange(4), pages.k, pages.v)[0])
        assert (numbers(buffers[0]) == pages.indptr).all() and (numbers(buffers[1])[:len(pages.ids)] == pages.ids).all()
        plans.add(id(wrapper._attention.plan))
    assert len(plans) == 1
    with pytest.raises(ValueError, match="batch size should be fixed"):
        wrapper.plan(lib.ints([0, 1]), lib.ints([1]), lib.ints([1]), 4, 2, 64, 8, q_data_type="float32")
    with pytest.raises(ValueError, match="less than or equal to the allocated buffer"):
        wrapper.plan(lib.ints([0, 30, 60, 90]), lib.ints(np.ones(90)), lib.ints([1, 1, 1]), 4, 2, 64, 8, q_data_type="float32")


def test_batch_decode_module_plan(lib, rng):
    """An engine that fills the buffers and calls the module's plan itself."""
    buffers = lib.ints(np.zeros(3)), lib.ints(np.zeros(64)), lib.ints(np.zeros(2))
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(lib.workspace(), "NHD", True, False, *buffers)
    pages = Pages(rng, [20, 9], 2, 64, 8, lib=lib)
    wrapper.plan(lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 64, 8, q_data_type="float32")
    pages = Pages(rng, [3, 70], 2, 64, 8, lib=lib)
    for buffer, x in zip(buffers, (pages.indptr, pages.ids, pages.last)):
        buffer[:len(x)] = lib.ints(x)
    q = rng.standard_normal((2, 4, 64)).astype(np.float32)
    info = wrapper._cached_module.plan(None, None, None, lib.host_ints(pages.indptr), 2, 4, 2, 8, True, -1, 0.0, 64, 64, None, None)
    assert len(info) == 15
    close(wrapper.run(lib.array(q), pages.cache), attend_batch(q, np.arange(3), pages.k, pages.v)[0])


# --------------------------------------------------------------------------------------------------------- paged prefill


@pytest.mark.parametrize("page_size,layout", [(1, "NHD"), (5, "HND"), (16, "NHD")])
@pytest.mark.parametrize("causal", [False, True])
def test_batch_prefill_paged(lib, rng, page_size, layout, causal):
    lengths, qo = [54, 0, 7, 97], np.array([0, 11, 13, 20, 60])
    pages = Pages(rng, lengths, 2, 64, page_size, layout=layout, lib=lib)
    q = rng.standard_normal((60, 8, 64)).astype(np.float32)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(lib.workspace(), layout)
    wrapper.plan(qo_indptr=lib.ints(qo), paged_kv_indptr=lib.ints(pages.indptr), paged_kv_indices=lib.ints(pages.ids), paged_kv_last_page_len=lib.ints(pages.last),
                 num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, page_size=page_size, causal=causal, q_data_type="float32")
    o, lse = wrapper.run_return_lse(lib.array(q), pages.cache)
    wanted = attend_batch(q, qo, pages.k, pages.v, causal=causal)
    close(o, wanted[0])
    lse_close(lse, wanted[1])
    assert len(wrapper._plan_info) == 15


@pytest.mark.parametrize("options", [
    {"window_left": 6}, {"logits_soft_cap": 4.0}, {"pos_encoding_mode": "ROPE_LLAMA"}, {"pos_encoding_mode": "ALIBI"}, {"sm_scale": 0.25}, {"fixed_split_size": 4},
    {"disable_split_kv": True}, {"window_left": 3, "logits_soft_cap": 4.0, "pos_encoding_mode": "ROPE_LLAMA"}], ids=str)
def test_batch_prefill_options(lib, rng, options):
    lengths, qo = [54, 20], np.array([0, 11, 31])
    pages = Pages(rng, lengths, 2, 64, 8, lib=lib)
    q = rng.standard_normal((31, 4, 64)).astype(np.float32)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(lib.workspace())
    wrapper.plan(lib.ints(qo), lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 64, 8, causal=True, q_data_type="float32", **options)
    o, lse = wrapper.run(lib.array(q), pages.cache, return_lse=True)
    mode = options.get("pos_encoding_mode")
    wanted = attend_batch(q, qo, pages.k, pages.v, causal=True, window_left=options.get("window_left", -1), cap=options.get("logits_soft_cap", 0),
                             scale=options.get("sm_scale"), rope=(1e4, 1.0) if mode == "ROPE_LLAMA" else None,
                             slopes=numbers(fi.utils.get_alibi_slopes(4)) if mode == "ALIBI" else None)
    close(o, wanted[0])
    lse_close(lse, wanted[1])


@pytest.mark.parametrize("packed", [False, True])
def test_batch_prefill_custom_mask(lib, rng, packed):
    lengths, qo = [19, 33, 8], np.array([0, 3, 10, 14])
    pages = Pages(rng, lengths, 2, 64, 4, lib=lib)
    q = rng.standard_normal((14, 4, 64)).astype(np.float32)
    masks = [rng.random((qo[r + 1] - qo[r], n)) < 0.6 for r, n in enumerate(lengths)]
    masks[1][3] = False
    flat = np.concatenate([m.reshape(-1) for m in masks])
    given = {"custom_mask": lib.bools(flat)}
    if packed:
        indptr = np.concatenate(([0], np.cumsum([m.size for m in masks]))).astype(np.int32)
        given = {"packed_custom_mask": fi.segment_packbits(lib.bools(flat), lib.ints(indptr), bitorder="little")[0]}
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(lib.workspace())
    wrapper.plan(lib.ints(qo), lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 64, 4, causal=True, window_left=12, q_data_type="float32", **given)
    o, lse = wrapper.run(lib.array(q), pages.cache, return_lse=True)
    wanted = attend_batch(q, qo, pages.k, pages.v, mask=masks, window_left=12)
    close(o, wanted[0])
    lse_close(lse, wanted[1])
    for wrong, match in (({"custom_mask": lib.bools(flat[:-1])}, "custom_mask length"), ({"packed_custom_mask": lib.workspace()[:3]}, "packed_custom_mask length")):
        with pytest.raises(ValueError, match=match):
            wrapper.plan(lib.ints(qo), lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 64, 4, q_data_type="float32", **wrong)


def test_batch_prefill_multi_item(lib, rng):
    """The prefix, then items behind delimiters: each sees the prefix and itself, a delimiter the prefix alone."""
    prefix, items = [5, 3], [[3, 2, 4], [1, 6]]
    stride = 16
    token_pos, lengths, masks = np.zeros(2 * stride, np.uint16), [], []
    for r in range(2):
        mine = np.concatenate([np.arange(n + 1) for n in items[r]] + [[0]])
        token_pos[r * stride: r * stride + len(mine)] = mine
        length = prefix[r] + len(mine)
        lengths.append(length)
        mask = np.zeros((length, length), bool)
        for p in range(length):
            for j in range(p + 1):
                mask[p, j] = p < prefix[r] or j < prefix[r] or p < j + int(mine[p - prefix[r]])
        masks.append(mask)
    qo = np.concatenate(([0], np.cumsum(lengths)))
    pages = Pages(rng, lengths, 2, 64, 4, lib=lib)
    q = rng.standard_normal((qo[-1], 4, 64)).astype(np.float32)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(lib.workspace())
    ptrs = [lib.same(x) for x in (np.array(prefix, np.uint32), token_pos, np.array([4, 6], np.uint16))]
    wrapper.plan(lib.ints(qo), lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 64, 4, causal=True, q_data_type="float32",
                 prefix_len_ptr=ptrs[0], token_pos_in_items_ptr=ptrs[1], token_pos_in_items_len=stride, max_item_len_ptr=ptrs[2])
    close(wrapper.run(lib.array(q), pages.cache), attend_batch(q, qo, pages.k, pages.v, mask=masks)[0])


def test_batch_prefill_sinks(lib, rng):
    lengths, qo = [30, 6], np.array([0, 5, 11])
    pages = Pages(rng, lengths, 2, 64, 8, lib=lib)
    q, sinks = rng.standard_normal((11, 4, 64)).astype(np.float32), rng.standard_normal(4).astype(np.float32)
    wanted = attend_batch(q, qo, pages.k, pages.v, causal=True, window_left=10, sinks=sinks)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(lib.workspace())
    wrapper.plan(lib.ints(qo), lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 64, 8, causal=True, window_left=10, q_data_type="float32")
    o, lse = wrapper.run(lib.array(q), pages.cache, sinks=lib.array(sinks), return_lse=True)
    close(o, wanted[0])
    lse_close(lse, wanted[1])
    close(wrapper.run(lib.array(q), pages.cache), attend_batch(q, qo, pages.k, pages.v, causal=True, window_left=10)[0])
    sink = fi.BatchAttentionWithAttentionSinkWrapper(lib.workspace(), q_data_type="float32", kv_data_type="float32", head_dim_qk=64, head_dim_vo=64, window_left=10)
    sink.plan(lib.ints(qo), lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 64, 8, causal=True, window_left=10, q_data_type="float32",
              kv_data_type="float32")
    close(sink.run(lib.array(q), pages.cache, lib.array(sinks), 64 ** -0.5), wanted[0])


def test_batch_prefill_graph_buffers(lib, rng):
    buffers = [lib.ints(np.zeros(n)) for n in (4, 4, 64, 3)]
    masks = lib.workspace(), lib.ints(np.zeros(4))
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(lib.workspace(), "NHD", True, *buffers, *masks)
    plans = set()
    for qo, lengths in (([0, 4, 8, 20], [10, 20, 30]), ([0, 1, 2, 3], [100, 1, 5]), ([0, 0, 20, 20], [0, 60, 0])):
        qo = np.array(qo)
        pages = Pages(rng, lengths, 2, 64, 8, lib=lib, spare=40 - sum(-(-n // 8) for n in lengths))
        q = rng.standard_normal((qo[-1], 4, 64)).astype(np.float32)
        wrapper.plan(lib.ints(qo), lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 64, 8, causal=True, q_data_type="float32")
        close(wrapper.run(lib.array(q), pages.cache), attend_batch(q, qo, pages.k, pages.v, causal=True)[0])
        plans.add(id(wrapper._attention.plan))
    assert len(plans) == 1
    with pytest.raises(ValueError, match="cannot exceed the number of rows"):
        wrapper.plan(lib.ints([0, 7, 14, 21]), lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 64, 8, q_data_type="float32")
    with pytest.raises(ValueError, match="qo_indptr_buf"):
        fi.BatchPrefillWithPagedKVCacheWrapper(lib.workspace(), use_cuda_graph=True)


def test_batch_invariant_bits(lib, rng):
    """With a fixed split a request's bits do not depend on its neighbours."""
    pages = Pages(rng, [300, 40, 77], 2, 64, 8, lib=lib)
    q = rng.standard_normal((30, 4, 64)).astype(np.float32)
    qo = np.array([0, 10, 20, 30])
    for options in ({"fixed_split_size": 8}, {"disable_split_kv": True}):
        together = fi.BatchPrefillWithPagedKVCacheWrapper(lib.workspace())
        together.plan(lib.ints(qo), lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 64, 8, causal=True, q_data_type="float32", **options)
        o, lse = together.run(lib.array(q), pages.cache, return_lse=True)
        alone = fi.BatchPrefillWithPagedKVCacheWrapper(lib.workspace())
        first = pages.indptr[1]
        alone.plan(lib.ints([0, 10]), lib.ints([0, first]), lib.ints(pages.ids[:first]), lib.ints(pages.last[:1]), 4, 2, 64, 8, causal=True, q_data_type="float32", **options)
        o1, lse1 = alone.run(lib.array(q[:10]), pages.cache, return_lse=True)
        assert (numbers(o)[:10] == numbers(o1)).all() and (numbers(lse)[:10] == numbers(lse1)).all()


def test_nvfp4(lib, rng):
    """Two 4-bit elements a byte, one e4m3 scale per 16 elements."""
    values = np.array([0, .5, 1, 1.5, 2, 3, 4, 6])
    codes = rng.integers(0, 256, (2, 7, 4, 2, 32), dtype=np.uint8)
    scales = lib.array(rng.integers(1, 8, (2, 7, 4, 2, 4)) / 8, "float8_e4m3fn")
    nibbles = np.stack((codes & 15, codes >> 4), -1).reshape(2, 7, 4, 2, 64)
    dense = np.where(nibbles & 8, -1, 1) * values[nibbles & 7] * np.repeat(numbers(scales), 16, -1)
    q = lib.array(rng.standard_normal((3, 4, 64)), "bfloat16")
    (k, v), (k_sf, v_sf) = [lib.same(x) for x in codes], scales
    indptr, ids, last = np.array([0, 2, 3, 6]), np.array([4, 1, 0, 2, 5, 3]), np.array([3, 4, 1])
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(lib.workspace())
    wrapper.plan(lib.ints([0, 1, 2, 3]), lib.ints(indptr), lib.ints(ids), lib.ints(last), 4, 2, 64, 4, q_data_type="bfloat16", kv_data_type="uint8")
    o = wrapper.run(q, (k, v), kv_cache_sf=(k_sf, v_sf), k_scale=0.5, v_scale=2.0)
    lengths = [7, 4, 9]
    pick = [[dense[i, ids[indptr[r]:indptr[r + 1]]].reshape(-1, 2, 64)[:n] for r, n in enumerate(lengths)] for i in range(2)]
    close(o, attend_batch(q, np.arange(4), [x * 0.5 for x in pick[0]], [x * 2 for x in pick[1]])[0], "bfloat16")


# ----------------------------------------------------------------------------------------------------------------- ragged


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window_left": 4}, {"logits_soft_cap": 3.0}, {"pos_encoding_mode": "ROPE_LLAMA"}], ids=str)
def test_batch_prefill_ragged(lib, rng, layout, options):
    lengths, qo = [20, 0, 9, 41], np.array([0, 5, 8, 17, 30])
    kv = np.concatenate(([0], np.cumsum(lengths)))
    k, v, q = rng.standard_normal((kv[-1], 2, 64)), rng.standard_normal((kv[-1], 2, 64)), rng.standard_normal((30, 4, 64)).astype(np.float32)
    kk, vv = (k, v) if layout == "NHD" else (k.transpose(1, 0, 2), v.transpose(1, 0, 2))
    wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(lib.workspace(), layout)
    wrapper.plan(lib.ints(qo), lib.ints(kv), 4, 2, 64, q_data_type="float32", **options)
    o, lse = wrapper.run_return_lse(lib.array(q), lib.array(kk), lib.array(vv))
    wanted = attend_batch(q, qo, rows_of(kv, k), rows_of(kv, v), causal=options.get("causal", False), window_left=options.get("window_left", -1),
                             cap=options.get("logits_soft_cap", 0), rope=(1e4, 1.0) if "pos_encoding_mode" in options else None)
    close(o, wanted[0])
    lse_close(lse, wanted[1])


def test_batch_prefill_ragged_dims_and_mask(lib, rng):
    lengths, qo = [20, 9], np.array([0, 5, 14])
    kv = np.concatenate(([0], np.cumsum(lengths)))
    k, v, q = rng.standard_normal((29, 4, 192)), rng.standard_normal((29, 4, 128)), rng.standard_normal((14, 4, 192)).astype(np.float32)
    masks = [rng.random((5, 20)) < 0.5, rng.random((9, 9)) < 0.5]
    wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(lib.workspace())
    wrapper.begin_forward(lib.ints(qo), lib.ints(kv), 4, 4, 192, 128, custom_mask=lib.bools(np.concatenate([m.reshape(-1) for m in masks])), q_data_type="float32")
    close(wrapper.run(lib.array(q), lib.array(k), lib.array(v)), attend_batch(q, qo, rows_of(kv, k), rows_of(kv, v), mask=masks)[0])
    wrapper.plan(lib.ints(qo), lib.ints(kv), 4, 4, 192, 128, causal=True, q_data_type="float32")
    close(wrapper.forward(lib.array(q), lib.array(k), lib.array(v), causal=True, sm_scale=0.1),
          attend_batch(q, qo, rows_of(kv, k), rows_of(kv, v), causal=True, scale=0.1)[0])


def test_packed_qkv_views(lib, rng):
    """q, k and v as slices of one tensor."""
    qkv = rng.standard_normal((12, 8, 64))
    packed = lib.array(qkv)
    wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(lib.workspace())
    wrapper.plan(lib.ints([0, 12]), lib.ints([0, 12]), 4, 2, 64, causal=True, q_data_type="float32")
    o = wrapper.run(packed[:, :4], packed[:, 4:6], packed[:, 6:])
    close(o, attend(qkv[:, :4], qkv[:, 4:6], qkv[:, 6:], causal=True)[0])


# --------------------------------------------------------------------------------------------------- merging and cascades


def test_merge(lib, rng):
    states = [(rng.standard_normal((6, 70, 64)).astype(np.float32), (rng.standard_normal((6, 70)) * 5).astype(np.float32)) for _ in range(3)]
    for o, s in states[:2]:
        o[1, 3], s[1, 3] = 0, -np.inf
    states[0][0][2], states[0][1][2] = 0, -np.inf
    (a, sa), (b, sb) = ((lib.array(o), lib.array(s)) for o, s in states[:2])
    wanted = merged(states[:2])
    v, s = fi.merge_state(a, sa, b, sb)
    close(v, wanted[0])
    lse_close(s, wanted[1])
    assert (numbers(v)[2] == states[1][0][2]).all()
    mask = np.array([True, False, True, True, False, True])
    va, s_a = lib.array(states[0][0]), lib.array(states[0][1])
    fi.merge_state_in_place(va, s_a, b, sb, mask=lib.bools(mask))
    close(va, np.where(mask[:, None, None], wanted[0], states[0][0]))
    lse_close(s_a, np.where(mask[:, None], wanted[1], states[0][1]))
    fi.merge_state_in_place(a, sa, b, sb)
    close(a, wanted[0])
    v, s = fi.merge_states(lib.array(np.stack([o for o, _ in states], 1)), lib.array(np.stack([x for _, x in states], 1)))
    wanted = merged(states)
    close(v, wanted[0])
    lse_close(s, wanted[1])


@pytest.mark.parametrize("causal,options", [(False, {}), (True, {}), (True, {"logits_soft_cap": 5.0}), (True, {"window_left": 6}), (False, {"pos_encoding_mode": "ALIBI"})])
def test_multi_level_cascade(lib, rng, causal, options):
    """Three levels: all rows, groups, requests."""
    qo = [np.array([0, 12]), np.array([0, 7, 12]), np.array([0, 3, 7, 8, 12])]
    lengths = [[50], [20, 9], [5, 11, 2, 0]]
    flat = [n for level in lengths for n in level]
    pages = Pages(rng, flat, 2, 64, 4, lib=lib)
    q = rng.standard_normal((12, 4, 64)).astype(np.float32)
    first, indptr, ids, last, state = 0, [], [], [], []
    for level, n in enumerate(len(x) for x in lengths):
        a, b = pages.indptr[first], pages.indptr[first + n]
        indptr.append(lib.ints(pages.indptr[first:first + n + 1] - a))
        ids.append(lib.ints(pages.ids[a:b]))
        last.append(lib.ints(pages.last[first:first + n]))
        state.append(attend_batch(q, qo[level], pages.k[first:first + n], pages.v[first:first + n], causal=causal and level == 2,
                                     cap=options.get("logits_soft_cap", 0), window_left=options.get("window_left", -1),
                                     slopes=numbers(fi.utils.get_alibi_slopes(4)) if "pos_encoding_mode" in options else None))
        first += n
    wrapper = fi.MultiLevelCascadeAttentionWrapper(3, lib.workspace())
    wrapper.plan([lib.ints(x) for x in qo], indptr, ids, last, 4, 2, 64, 4, causal=causal, q_data_type="float32", **options)
    close(wrapper.run(lib.array(q), pages.cache), merged(state)[0])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_shared_prefix(lib, rng, layout):
    pages = Pages(rng, [13, 4, 1], 2, 64, 4, layout=layout, lib=lib)
    k, v = rng.standard_normal((30, 2, 64)), rng.standard_normal((30, 2, 64))
    kk, vv = (k, v) if layout == "NHD" else (k.transpose(1, 0, 2), v.transpose(1, 0, 2))
    both = [np.concatenate((k.astype(np.float32), x)) for x in pages.k], [np.concatenate((v.astype(np.float32), x)) for x in pages.v]
    q = rng.standard_normal((3, 4, 64)).astype(np.float32)
    decode = fi.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(lib.workspace(), layout)
    decode.begin_forward(lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 64, 4, data_type="float32")
    close(decode.forward(lib.array(q), lib.array(kk), lib.array(vv), pages.cache), attend_batch(q, np.arange(4), *both)[0])
    decode.end_forward()
    qo = np.array([0, 3, 7, 8])
    q = rng.standard_normal((8, 4, 64)).astype(np.float32)
    prefill = fi.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(lib.workspace(), layout)
    prefill.begin_forward(lib.ints(qo), lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 64, 4, q_data_type="float32")
    close(prefill.forward(lib.array(q), lib.array(kk), lib.array(vv), pages.cache, causal=True), attend_batch(q, qo, *both, causal=True)[0])


# ------------------------------------------------------------------------------------------- unified, latent, POD, sparse


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_batch_attention(lib, rng, layout):
    lengths, qo = [90, 7, 33], np.array([0, 1, 5, 38])
    pages = Pages(rng, lengths, 12, 64, 16, layout=layout, lib=lib)
    q = rng.standard_normal((38, 12, 64)).astype(np.float32)
    wrapper = fi.BatchAttention(layout, device=lib.device)
    wrapper.plan(lib.ints(qo), lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(lengths), 12, 12, 64, 64, 16, causal=True, logits_soft_cap=5.0,
                 q_data_type=lib.dtype("float32"), kv_data_type=lib.dtype("float32"))
    o, lse = wrapper.run(lib.array(q), pages.cache, logits_soft_cap=5.0)
    wanted = attend_batch(q, qo, pages.k, pages.v, causal=True, cap=5.0)
    close(o, wanted[0])
    lse_close(lse, wanted[1])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kpe", [64, 0])
def test_mla(lib, rng, page_size, kpe):
    lengths, qo, heads = [70, 0, 5], np.array([0, 2, 3, 8]), 6
    ckv = Pages(rng, lengths, 1, 512, page_size, combined=False, lib=lib)
    pe = np.full((ckv.pool, page_size, max(kpe, 1)), np.nan)
    parts = [rng.standard_normal((n, max(kpe, 1))).astype(np.float32) for n in lengths]
    for r, n in enumerate(lengths):
        for t in range(n):
            pe[ckv.ids[ckv.indptr[r] + t // page_size], t % page_size] = parts[r][t]
    q_nope, q_pe = rng.standard_normal((8, heads, 512)).astype(np.float32), rng.standard_normal((8, heads, max(kpe, 1))).astype(np.float32)
    wrapper = fi.BatchMLAPagedAttentionWrapper(lib.workspace())
    wrapper.plan(lib.ints(qo), lib.ints(ckv.indptr), lib.ints(ckv.ids), lib.ints(lengths), heads, 512, kpe, page_size, True, 0.07, lib.dtype("float32"), lib.dtype("float32"))
    cache = ckv.cache[0].reshape(ckv.pool, page_size, 512)
    args = (lib.array(q_nope), lib.array(q_pe), cache, lib.array(pe)) if kpe else (lib.array(q_nope), None, cache, None)
    o, lse = wrapper.run(*args, return_lse=True)
    _, natural = wrapper.run(*args, return_lse=True, return_lse_base_on_e=True)
    q = np.concatenate((q_nope, q_pe), 2) if kpe else q_nope
    k = [np.concatenate((x, p[:, None]), 2) if kpe else x for x, p in zip(ckv.k, parts)]
    wanted = attend_batch(q, qo, k, ckv.k, causal=True, scale=0.07)
    close(o, wanted[0])
    lse_close(lse, wanted[1])
    lse_close(natural, wanted[1] * LN2)


def test_mla_fp8(lib, rng):
    lengths, heads = [70, 5], 4
    ckv = Pages(rng, lengths, 1, 512, 16, combined=False, word="float8_e4m3fn", lib=lib)
    kpe = lib.array(rng.standard_normal((ckv.pool, 16, 64)), "float8_e4m3fn")
    q_nope, q_pe = (lib.array(rng.standard_normal((2, heads, d)), "bfloat16") for d in (512, 64))
    wrapper = fi.BatchMLAPagedAttentionWrapper(lib.workspace())
    plan = (lib.ints([0, 1, 2]), lib.ints(ckv.indptr), lib.ints(ckv.ids), lib.ints(lengths), heads, 512, 64, 16, False, 0.05)
    with pytest.raises(ValueError, match="q_data_type=torch.bfloat16"):
        wrapper.plan(*plan, "float16", lib.dtype("float8_e4m3fn"))
    wrapper.plan(*plan, lib.dtype("bfloat16"), lib.dtype("float8_e4m3fn"))
    cache = ckv.cache[0].reshape(ckv.pool, 16, 512)
    o = wrapper.run(q_nope, q_pe, cache, kpe, ckv_scale=0.5, kpe_scale=2.0)
    dense = [numbers(kpe)[ckv.ids[ckv.indptr[r]:ckv.indptr[r + 1]]].reshape(-1, 1, 64)[:n] * 2 for r, n in enumerate(lengths)]
    q = np.concatenate((numbers(q_nope), numbers(q_pe)), 2)
    k = [np.concatenate((x * 0.5, p), 2) for x, p in zip(ckv.k, dense)]
    close(o, attend_batch(q, np.arange(3), k, [x * 0.5 for x in ckv.k], scale=0.05)[0], "bfloat16")
    with pytest.raises(ValueError, match="Exactly one of ckv_scale or ckv_scale_arr"):
        wrapper.run(q_nope, q_pe, cache, kpe)
    with pytest.raises(ValueError, match="Invalid shape of ckv_scale_arr"):
        wrapper.run(q_nope, q_pe, cache, kpe, ckv_scale_arr=lib.array(np.ones(4)), kpe_scale=1.0)
    half = lib.array(np.zeros((2, heads, 512)), "float16")
    for match, args in (("q_nope.dtype", (half, q_pe, cache, kpe)), ("q_pe.dtype", (q_nope, half, cache, kpe)), ("ckv_cache.dtype", (q_nope, q_pe, half, kpe)),
                        ("kpe_cache.dtype", (q_nope, q_pe, cache, half))):
        with pytest.raises(ValueError, match=match):
            wrapper.run(*args, ckv_scale=1.0, kpe_scale=1.0)


def test_pod(lib, rng):
    pages = Pages(rng, [40, 9], 2, 64, 8, lib=lib)
    q_p, k_p, v_p = rng.standard_normal((11, 4, 64)), rng.standard_normal((25, 2, 64)), rng.standard_normal((25, 2, 64))
    q_d = rng.standard_normal((2, 4, 64)).astype(np.float32)
    wrapper = fi.PODWithPagedKVCacheWrapper(lib.workspace())
    wrapper.plan(lib.ints(pages.indptr), lib.ints(pages.ids), lib.ints(pages.last), 4, 2, 64, 8, q_data_type="float32")
    o_p, o_d = wrapper.run(lib.array(q_p), lib.array(k_p), lib.array(v_p), lib.array(q_d), pages.cache, causal_p=True)
    close(o_p, attend(q_p, k_p, v_p, causal=True)[0])
    close(o_d, attend_batch(q_d, np.arange(3), pages.k, pages.v)[0])


def test_batch_pod(lib, rng):
    a, b = Pages(rng, [40, 19], 2, 64, 8, lib=lib), Pages(rng, [3, 50, 8], 2, 64, 8, lib=lib)
    qo = np.array([0, 7, 20])
    q_p, q_d = rng.standard_normal((20, 4, 64)).astype(np.float32), rng.standard_normal((3, 4, 64)).astype(np.float32)
    wrapper = fi.BatchPODWithPagedKVCacheWrapper(lib.workspace())
    wrapper.plan(lib.ints(qo), lib.ints(a.indptr), lib.ints(a.ids), lib.ints(a.last), lib.ints(np.arange(4)), lib.ints(b.indptr), lib.ints(b.ids), lib.ints(b.last),
                 4, 2, 64, 8, q_data_type="float32")
    (o_p, s_p), (o_d, s_d) = wrapper.run(lib.array(q_p), a.cache, lib.array(q_d), b.cache, causal_p=True, return_lse=True)
    for made, wanted in (((o_p, s_p), attend_batch(q_p, qo, a.k, a.v, causal=True)), ((o_d, s_d), attend_batch(q_d, np.arange(4), b.k, b.v))):
        close(made[0], wanted[0])
        lse_close(made[1], wanted[1])
    masks = [rng.random((n, k)) < 0.6 for n, k in ((7, 40), (13, 19))]
    for mask, causal in ((masks, True), (None, True), (masks, False), (None, False)):
        given = None if mask is None else lib.bools(np.concatenate([x.reshape(-1) for x in mask]))
        out = wrapper.run(lib.array(q_p), a.cache, lib.array(q_d), b.cache, custom_mask_p=given, causal_p=causal)
        close(out[0], attend_batch(q_p, qo, a.k, a.v, causal=causal, mask=mask)[0])


@pytest.mark.parametrize("R,C", [(1, 1), (4, 16), (16, 4), (1, 8)])
@pytest.mark.parametrize("inside", [None, "mask", "packed"])
def test_block_sparse(lib, rng, R, C, inside):
    M, N = 16 * R, 12 * C
    blocks = rng.random((16, 12)) < 0.4
    blocks[3] = False
    indptr = np.concatenate(([0], np.cumsum(blocks.sum(1))))
    indices = np.concatenate([np.flatnonzero(row) for row in blocks])
    dense, given = np.kron(blocks, np.ones((R, C), bool)).astype(bool), {}
    if inside:
        bits = rng.random((indptr[-1], R, C)) < 0.7
        dense = np.zeros((M, N), bool)
        at = 0
        for i in range(16):
            for j in np.flatnonzero(blocks[i]):
                dense[i * R:(i + 1) * R, j * C:(j + 1) * C] = bits[at]
                at += 1
        given = {"mask": lib.bools(bits)}
        if inside == "packed":
            flat = fi.sparse.convert_bsr_mask_layout(bits, indptr)
            given = {"packed_mask": fi.segment_packbits(lib.bools(flat), lib.ints(indptr * R * C), bitorder="little")[0]}
    q, k, v = rng.standard_normal((M, 4, 64)), rng.standard_normal((N, 2, 64)), rng.standard_normal((N, 2, 64))
    wrapper = fi.BlockSparseAttentionWrapper(lib.workspace())
    wrapper.plan(lib.ints(indptr), lib.ints(indices), M, N, R, C, 4, 2, 64, q_data_type="float32", o_data_type="float32", **given)
    o, lse = wrapper.run(lib.array(q), lib.array(k), lib.array(v), return_lse=True)
    wanted = attend(q, k, v, mask=dense)
    close(o, wanted[0])
    lse_close(lse, wanted[1])


@pytest.mark.parametrize("group", [1, 3])
def test_variable_block_sparse(lib, rng, group):
    heads, rows, keys = 2, [[3, 5, 4], [1, 9, 2]], [[6, 10, 8, 0], [4, 4, 12, 4]]
    kept = rng.random((heads, 3, 4)) < 0.5
    kept[0, 1] = False
    q, k, v = rng.standard_normal((heads * group, 12, 64)), rng.standard_normal((heads, 24, 64)), rng.standard_normal((heads, 24, 64))
    wrapper = fi.VariableBlockSparseAttentionWrapper(lib.workspace())
    wrapper.plan(lib.bools(kept), lib.ints(rows), lib.ints(keys), heads * group, heads, 64, q_data_type="float32")
    o, lse = wrapper.run(lib.array(q), lib.array(k), lib.array(v), return_lse=True)
    for h in range(heads):
        mask = np.repeat(np.repeat(kept[h], rows[h], 0), keys[h], 1)
        for g in range(group):
            n = h * group + g
            wanted = attend(q[n][:, None], k[h][:, None], v[h][:, None], mask=mask)
            close(o[n], wanted[0][:, 0])
            lse_close(lse[n], wanted[1][:, 0])


# ------------------------------------------------------------------------------------------------ appending, masks, rope


@pytest.mark.parametrize("layout,combined", [("NHD", True), ("HND", True), ("HND", False)])
def test_append(lib, rng, layout, combined):
    page_size, before, new = 4, [5, 0, 9], [3, 6, 1]
    lengths = [a + b for a, b in zip(before, new)]
    pages = Pages(rng, lengths, 2, 32, page_size, layout=layout, combined=combined, lib=lib)
    indptr = np.concatenate(([0], np.cumsum(new)))
    key, value = rng.standard_normal((12, 2, 32)), rng.standard_normal((12, 2, 32))
    batch, positions = fi.get_batch_indices_positions(lib.ints(indptr), fi.get_seq_lens(lib.ints(pages.indptr), lib.ints(pages.last), page_size), 12)
    assert numbers(batch).tolist() == [0] * 3 + [1] * 6 + [2] + [-1, -1]
    assert numbers(positions).tolist() == [5, 6, 7, 0, 1, 2, 3, 4, 5, 9, -1, -1]
    fi.append_paged_kv_cache(lib.array(key), lib.array(value), batch, positions, pages.cache, lib.ints(pages.ids), lib.ints(pages.indptr), lib.ints(pages.last), layout)
    k, v = (numbers(x) for x in (pages.cache if isinstance(pages.cache, tuple) else (pages.cache[:, 0], pages.cache[:, 1])))
    if layout == "HND":
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    for i in range(10):
        r, p = int(numbers(batch)[i]), int(numbers(positions)[i])
        slot = pages.ids[pages.indptr[r] + p // page_size], p % page_size
        assert (k[slot] == key[i].astype(np.float32)).all() and (v[slot] == value[i].astype(np.float32)).all()
        pages.k[r][p], pages.v[r][p] = key[i].astype(np.float32), value[i].astype(np.float32)
    for r, n in enumerate(lengths):
        for p in range(n):
            slot = pages.ids[pages.indptr[r] + p // page_size], p % page_size
            assert (k[slot] == pages.k[r][p]).all() and (v[slot] == pages.v[r][p]).all()
    assert np.isnan(k).sum() == np.isnan(v).sum() == (pages.pool * page_size - sum(lengths)) * 2 * 32


def test_append_mla(lib, rng):
    ckv, kpe = lib.array(np.zeros((6, 4, 512))), lib.array(np.zeros((6, 4, 64)))
    a, b = rng.standard_normal((5, 512)), rng.standard_normal((5, 64))
    indptr, ids, last = [0, 2, 3], [3, 1, 5], [3, 2]
    batch, positions = lib.ints([0, 0, 0, 1, 1]), lib.ints([4, 5, 6, 0, 1])
    fi.append_paged_mla_kv_cache(lib.array(a), lib.array(b), batch, positions, ckv, kpe, lib.ints(ids), lib.ints(indptr), lib.ints(last))
    for i, slot in enumerate([(1, 0), (1, 1), (1, 2), (5, 0), (5, 1)]):
        assert (numbers(ckv)[slot] == a[i].astype(np.float32)).all() and (numbers(kpe)[slot] == b[i].astype(np.float32)).all()
    assert (numbers(ckv) != 0).sum() == 5 * 512


@pytest.mark.parametrize("bitorder", ["little", "big"])
def test_packbits(lib, rng, bitorder):
    x = rng.random(77) < 0.5
    assert (numbers(fi.packbits(lib.bools(x), bitorder=bitorder)) == np.packbits(x, bitorder=bitorder)).all()
    indptr = [0, 5, 5, 13, 40, 77]
    packed, new_indptr = fi.segment_packbits(lib.bools(x), lib.ints(indptr), bitorder=bitorder)
    assert numbers(new_indptr).tolist() == [0, 1, 1, 2, 6, 11]
    wanted = np.concatenate([np.packbits(x[a:b], bitorder=bitorder) for a, b in zip(indptr[:-1], indptr[1:])])
    assert (numbers(packed) == wanted).all()
    assert (numbers(fi.packbits(lib.bools(x))) == np.packbits(x)).all()


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 32])
def test_rope(lib, rng, interleave, rotary_dim):
    q, k = rng.standard_normal((9, 4, 64)).astype(np.float32), rng.standard_normal((9, 2, 64)).astype(np.float32)
    positions = np.array([7, 8, 9, 100, 101, 102, 103, 0, 1])
    indptr, offsets = lib.ints([0, 3, 7, 9]), lib.ints([7, 100, 0])
    options = dict(rotary_dim=rotary_dim, interleave=interleave, rope_scale=2.0, rope_theta=1e5)
    wanted = [rotate(x, positions, 1e5, 2.0, interleave, rotary_dim) for x in (q, k)]
    for made in (fi.apply_rope(lib.array(q), lib.array(k), indptr, offsets, **options), fi.apply_rope_pos_ids(lib.array(q), lib.array(k), lib.ints(positions), **options)):
        for x, y in zip(made, wanted):
            close(x, y)
    for call, where in ((fi.apply_rope_inplace, (indptr, offsets)), (fi.apply_rope_pos_ids_inplace, (lib.ints(positions),))):
        qq, kk = lib.array(q), lib.array(k)
        call(qq, kk, *where, **options)
        close(qq, wanted[0])
        close(kk, wanted[1])
    angle = np.arange(128)[:, None] * 1e5 ** (-2 * np.arange((rotary_dim or 64) // 2) / (rotary_dim or 64)) / 2
    table = lib.array(np.concatenate((np.cos(angle), np.sin(angle)), 1))
    made = fi.apply_rope_with_cos_sin_cache(lib.ints(positions), lib.array(q).reshape(9, 256), lib.array(k).reshape(9, 128), 64, table, is_neox=not interleave)
    close(made[0].reshape(9, 4, 64), wanted[0])
    close(made[1].reshape(9, 2, 64), wanted[1])


def test_llama31_rope(lib, rng):
    q, k = rng.standard_normal((5, 2, 128)).astype(np.float32), rng.standard_normal((5, 1, 128)).astype(np.float32)
    positions = np.array([0, 1, 500, 9000, 70000])
    frequency = 5e5 ** (-2 * np.arange(64) / 128)
    wave = 2 * np.pi / frequency
    smooth = (8192 / wave - 1) / 3
    mixed = (1 - smooth) * frequency / 8 + smooth * frequency
    frequency = np.where(wave > 8192, frequency / 8, np.where(wave < 2048, frequency, mixed)).astype(np.float32).astype(np.float64)
    angle = positions[:, None] * frequency
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    made = fi.apply_llama31_rope_pos_ids(lib.array(q), lib.array(k), lib.ints(positions))
    for x, y in zip(made, (q, k)):
        a, b = y[..., :64], y[..., 64:]
        close(x, np.concatenate((a * cos - b * sin, b * cos + a * sin), -1))
    qq, kk = lib.array(q), lib.array(k)
    fi.apply_llama31_rope_inplace(qq, kk, lib.ints([0, 5]), lib.ints([3]))
    close(qq, numbers(fi.apply_llama31_rope(lib.array(q), lib.array(k), lib.ints([0, 5]), lib.ints([3]))[0]))


# -------------------------------------------------------------------------------------------------------------- refusals


def test_refusals(lib, rng):
    ws = lib.workspace()
    q = lib.array(np.zeros((2, 4, 64)), "float16")
    cache = lib.array(np.zeros((4, 2, 8, 2, 64)), "float16")
    table = lib.ints([0, 1, 2]), lib.ints([0, 1]), lib.ints([2, 2])
    with pytest.raises(KeyError, match="Invalid kv_layout"):
        fi.BatchDecodeWithPagedKVCacheWrapper(ws, "XYZ")
    with pytest.raises(KeyError, match="Invalid pos_encoding_mode"):
        fi.single_decode_with_kv_cache(q[0], cache[:, 0, 0], cache[:, 1, 0], pos_encoding_mode="SPIRAL")
    for kind in (fi.BatchDecodeWithPagedKVCacheWrapper, fi.BatchPrefillWithPagedKVCacheWrapper, fi.BatchPrefillWithRaggedKVCacheWrapper):
        with pytest.raises(ValueError, match="float_workspace_buffer must be 16-byte aligned"):
            kind(ws[1:])
        with pytest.raises(ValueError, match="int_workspace_buffer must be 16-byte aligned"):
            kind(ws).reset_workspace_buffer(ws, ws[1:])
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(ws)
    with pytest.raises(ValueError, match="plan"):
        wrapper.run(q, cache)
    with pytest.raises(ValueError, match="use_tensor_cores"):
        wrapper.plan(*table, 4, 2, 64, 8, q_len_per_req=2)
    with pytest.raises(NotImplementedError, match="fa2"):
        fi.BatchDecodeWithPagedKVCacheWrapper(ws, use_tensor_cores=True, backend="fa3").plan(*table, 4, 2, 64, 8, q_len_per_req=2)
    cores = fi.BatchDecodeWithPagedKVCacheWrapper(ws, use_tensor_cores=True)
    with pytest.raises(ValueError, match="empty KV range"):
        cores.plan(*table, 4, 2, 64, 8, q_len_per_req=3)
    with pytest.raises(ValueError, match="prior plan"):
        fi.fast_decode_plan(cores, *table, 4, 2, 64, 8, q_len_per_req=2)
    graph = fi.BatchDecodeWithPagedKVCacheWrapper(ws, "NHD", True, True, lib.ints([0, 0, 0]), lib.ints(np.zeros(8)), lib.ints([0, 0]))
    graph.plan(*table, 4, 2, 64, 8, q_len_per_req=2)
    with pytest.raises(ValueError, match="frozen"):
        graph.plan(*table, 4, 2, 64, 8, q_len_per_req=1)
    wrapper.plan(*table, 4, 2, 64, 8)
    with pytest.raises(ValueError, match="dtype of q"):
        wrapper.run(lib.array(np.zeros((2, 4, 64))), cache)
    with pytest.raises(ValueError, match="dtype of k"):
        wrapper.run(q, lib.array(np.zeros((4, 2, 8, 2, 64))))
    with pytest.raises(ValueError, match="q_len_per_req"):
        wrapper.run(q[:1], cache)
    with pytest.raises(ValueError, match="identical strides"):
        wrapper.run(q, (cache[:, 0], lib.array(np.zeros((4, 8, 2, 64)), "float16")))
    with pytest.raises(ValueError, match="Invalid shape of out"):
        wrapper.run(q, cache, out=q[:1])
    with pytest.raises(ValueError, match="Invalid dtype of out"):
        wrapper.run(q, cache, out=lib.array(np.zeros((2, 4, 64))))
    with pytest.raises(ValueError, match="window_left"):
        wrapper.run(q, cache, window_left=3)
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(ws)
    prefill.plan(lib.ints([0, 1, 2]), *table, 4, 2, 64, 8)
    with pytest.raises(ValueError, match="qo_indptr"):
        prefill.run(q[:1], cache)
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        prefill.plan(lib.ints([0, 1, 2]), *table, 5, 2, 64, 8)
    with pytest.raises(foveal.Error):
        prefill.plan(lib.ints([0, 2, 1]), *table, 4, 2, 64, 8)


def test_nvfp4_scale_stride(lib):
    k = lib.array(np.zeros((4, 8, 2, 64)), "float32")
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(lib.workspace())
    wrapper.plan(lib.ints([0, 1]), lib.ints([0, 1]), lib.ints([0]), lib.ints([2]), 4, 2, 64, 8, q_data_type="float32", kv_data_type="uint8")
    codes = lib.workspace()[:4 * 8 * 2 * 32].reshape(4, 8, 2, 32)
    sf = lib.workspace()[:4 * 8 * 2 * 8].reshape(4, 8, 2, 8)[..., ::2]
    with pytest.raises(Exception, match="innermost stride must be 1"):
        wrapper.run(lib.array(np.zeros((1, 4, 64))), (codes, codes), kv_cache_sf=(sf, sf))
    del k


def test_bad_page_ids_are_skipped(lib, rng):
    """A page id outside of the cache is treated as absent, never followed."""
    pages = Pages(rng, [16], 2, 64, 8, lib=lib)
    ids = pages.ids.copy()
    ids[1] = 1 << 30
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(lib.workspace())
    wrapper.plan(lib.ints(pages.indptr), lib.ints(ids), lib.ints(pages.last), 4, 2, 64, 8, q_data_type="float32")
    q = rng.standard_normal((1, 4, 64)).astype(np.float32)
    close(wrapper.run(lib.array(q), pages.cache), attend(q, pages.k[0][:8], pages.v[0][:8])[0])
    errors = wrapper._attention.context.errors(clear=True)
    assert errors["what"] == "page_id" and errors["value"] == 1 << 30


def test_uncovered_names():
    for name, (where, _) in fi.coverage.UNCOVERED.items():
        with pytest.raises(NotImplementedError, match=name):
            getattr(fi, name)()
        assert getattr(sys.modules[f"foveal.flashinfer.{where}"], name) is getattr(fi, name)
    for name, _ in fi.coverage.COVERED:
        assert callable(getattr(fi, name))
        assert name not in fi.coverage.UNCOVERED


def test_coverage_table():
    """The docs hold what the program prints."""
    printed = subprocess.run([sys.executable, "-m", "foveal", "coverage"], check=True, capture_output=True, text=True).stdout
    assert printed == fi.coverage.table()
    docs = (Path(__file__).parents[2] / "docs" / "flashinfer.md").read_text()
    assert docs.split("<!-- coverage -->\n")[1].split("<!-- /coverage -->")[0] == printed


def test_install():
    code = ("import foveal.flashinfer as f; f.install(); import flashinfer; assert flashinfer is f; from flashinfer.decode import fast_decode_plan; "
            "import flashinfer.utils; assert flashinfer.prefill.single_prefill_with_kv_cache is f.single_prefill_with_kv_cache; "
            "from flashinfer.norm import rmsnorm; from flashinfer import BatchMLAPagedAttentionWrapper; f.install()")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_alibi_slopes():
    for n in (1, 4, 6, 12, 40):
        slopes = numbers(fi.utils.get_alibi_slopes(n))
        base = 2 ** int(np.log2(n))
        assert slopes.shape == (n,)
        np.testing.assert_allclose(slopes[:base], [2 ** (-8 * (i + 1) / base) for i in range(base)], rtol=1e-6)
        np.testing.assert_allclose(slopes[base:], [2 ** (-4 * (2 * i + 1) / base) for i in range(n - base)], rtol=1e-6)
