# SPDX-License-Identifier: Apache-2.0
"""The extension module: every type and function, arrays of every kind, errors, lifetimes, threads."""

import ast
import gc
import inspect
import os
import subprocess
import sys
import threading
import weakref
from array import array
from pathlib import Path

import numpy as np
import pytest

import foveal
from foveal.flashinfer._core import context_for
from reference import LN2, Pages, attend, close, merged, numbers, rotate

HEADS, KV_HEADS, DIM = 4, 2, 64


@pytest.fixture(scope="module")
def context():
    return foveal.Context("cpu")


@pytest.fixture
def place(lib):
    """A context where the lib's arrays lie."""
    return context_for(lib.device)


@pytest.fixture
def numpy_lib():
    from reference import NumpyLib

    return NumpyLib()


def problem(**options):
    return foveal.Problem(options.pop("dtype", "f32"), num_q_heads=HEADS, num_kv_heads=KV_HEADS, dim_qk=DIM, **options)


def decode_plan(context, p, lengths, pages):
    plan = foveal.Plan(context, p, max_requests=len(lengths), max_rows=len(lengths), max_kv_tokens=1 << 14, max_pages=1 << 12)
    plan.update(foveal.Batch(lengths=lengths, page_size=pages.page_size, num_pages=pages.pool, page_indptr=pages.indptr, page_ids=pages.ids))
    return plan


def decode_reference(q, pages, **options):
    parts = [attend(numbers(q)[r:r + 1], pages.k[r], pages.v[r], **options) for r in range(len(pages.lengths))]
    return np.concatenate([o for o, _ in parts]), np.concatenate([s for _, s in parts]) * LN2


# ----------------------------------------------------------------------------------------------------------- computing


@pytest.mark.parametrize("word,dtype", [("float32", "f32"), ("float16", "f16"), ("bfloat16", "bf16")])
def test_decode(place, lib, rng, word, dtype):
    lengths = [33, 0, 1, 200]
    pages = Pages(rng, lengths, KV_HEADS, DIM, 16, lib=lib, word=word)
    q = lib.array(rng.standard_normal((4, HEADS, DIM)), word)
    o, lse = lib.array(np.full((4, HEADS, DIM), np.nan), word), lib.array(np.full((4, HEADS), np.nan))
    decode_plan(place, problem(dtype=dtype), lengths, pages).run(q, pages.cache[:, 0], pages.cache[:, 1], o, lse)
    wanted = decode_reference(q, pages)
    close(o, wanted[0], word)
    close(lse, wanted[1], word)


@pytest.mark.parametrize("form", ["csr32", "csr64", "table", "table_rows", "strided", "lists", "pair", "last_page"])
def test_index_forms(context, numpy_lib, rng, form):
    lengths = [33, 7, 48]
    pages = Pages(rng, lengths, KV_HEADS, DIM, 16, lib=numpy_lib)
    width = 5
    table = np.full((3, width + 2), 1 << 30, np.int32)
    for r in range(3):
        table[r, :pages.indptr[r + 1] - pages.indptr[r]] = pages.ids[pages.indptr[r]:pages.indptr[r + 1]]
    common = dict(page_size=16, num_pages=pages.pool)
    batches = {
        "csr32": dict(lengths=np.array(lengths, np.int32), page_indptr=pages.indptr, page_ids=pages.ids),
        "csr64": dict(lengths=np.array(lengths), page_indptr=pages.indptr.astype(np.int64), page_ids=pages.ids.astype(np.int64)),
        "table": dict(lengths=lengths, page_ids=table[:, :width]),
        "table_rows": dict(lengths=lengths, page_ids=table[::-1].copy(), table_rows=[2, 1, 0]),
        "strided": dict(lengths=np.repeat(np.array(lengths, np.int32), 3)[::3], page_indptr=np.repeat(pages.indptr, 2)[::2], page_ids=pages.ids),
        "lists": dict(lengths=tuple(lengths), page_indptr=pages.indptr.tolist(), page_ids=array("i", pages.ids.tolist())),
        "pair": dict(lengths=(np.array(lengths, np.int32), None), page_indptr=pages.indptr, page_ids=(pages.ids, None)),
        "last_page": dict(last_page_lengths=pages.last, page_indptr=pages.indptr, page_ids=pages.ids),
    }
    batch = foveal.Batch(**batches[form], **common)
    assert batch.num_requests == 3
    plan = foveal.Plan(context, problem(), max_requests=3, max_rows=3, max_kv_tokens=1000, max_pages=100)
    plan.update(batch)
    q, o = rng.standard_normal((3, HEADS, DIM)).astype(np.float32), np.empty((3, HEADS, DIM), np.float32)
    plan.run(q, pages.cache[:, 0], pages.cache[:, 1], o)
    close(o, decode_reference(q, pages)[0])


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("behind", [False, True], ids=["apart", "behind the rows"])
def test_int4(context, rng, group, behind):
    """append quantises, decode dequantises: codes of 4 bits, an f16 scale and zero per group, in arrays of their own or behind each row."""
    lengths, page, pool = [40, 7], 16, 6
    row = DIM // 2 + DIM // group * 4
    memory = np.zeros((2, pool, page, KV_HEADS, row), np.uint8)
    pairs = memory[..., DIM // 2:].view(np.float16) if behind else np.zeros((2, pool, page, KV_HEADS, DIM // group * 2), np.float16)
    codes = [foveal.Tensor(m[..., :DIM // 2], "int4") for m in memory]
    assert codes[0].shape == (pool, page, KV_HEADS, DIM)
    q, k, v = (rng.standard_normal((n, h, DIM)).astype("f4") for n, h in ((2, HEADS), (47, KV_HEADS), (47, KV_HEADS)))
    table = dict(lengths=lengths, page_size=page, num_pages=pool, page_indptr=[0, 3, 4], page_ids=[4, 0, 3, 5])
    foveal.append(context, k, v, *codes, batch=foveal.Batch(rows=[0, 40, 47], **table), k_block_scale=pairs[0], v_block_scale=pairs[1])
    stored = memory[..., :DIM // 2]
    plain = np.stack((stored & 15, stored >> 4), -1).reshape(*stored.shape[:-1], DIM).astype("f4")
    zero, scale = (np.repeat(pairs[..., i::2].astype("f4"), group, -1) for i in (1, 0))
    k4, v4 = ((plain - zero) * scale)[:, [4, 0, 3, 5]].reshape(2, 64, KV_HEADS, DIM)
    for given, got in ((k, k4), (v, v4)):
        step = np.ptp(given.reshape(47, KV_HEADS, -1, group), -1).max() / 15
        assert abs(given - np.concatenate((got[:40], got[48:55]))).max() < 0.6 * step
    plan = foveal.Plan(context, problem(k="int4", v="int4"), max_requests=2, max_rows=2, max_kv_tokens=64, max_pages=8)
    plan.update(foveal.Batch(**table))
    o = np.empty_like(q)
    plan.run(q, *codes, o, args={"k_block_scale": pairs[0], "v_block_scale": pairs[1]})
    close(o, np.concatenate([attend(q[r:r + 1], k4[a:b], v4[a:b])[0] for r, (a, b) in enumerate(((0, 40), (48, 55)))]))
    with pytest.raises(foveal.Error) as e:
        plan.run(q, *codes, o, args={"k_block_scale": pairs[0][..., :1], "v_block_scale": pairs[1]})
    assert e.value.field == "k_block_scale" and "groups of 32" in str(e.value)


@pytest.mark.parametrize("variants,options", [
    (["causal"], {"causal": True}), ([("window", {"left": 3}), "causal"], {"causal": True, "window_left": 3}), ([("softcap", {"cap": 2.5})], {"cap": 2.5}),
    ([("rope", {"rotary_dim": DIM, "base": 5e4, "factor": 2})], {"rope": (5e4, 2.0)}), ("causal", {"causal": True})], ids=str)
def test_variants(context, rng, variants, options):
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((9, HEADS, DIM), (20, KV_HEADS, DIM), (20, KV_HEADS, DIM)))
    plan = foveal.Plan(context, problem(variants=variants), max_requests=1, max_rows=16, max_kv_tokens=64)
    plan.update(foveal.Batch(rows=[0, 9], kv_indptr=[0, 20]))
    o, lse = np.empty_like(q), np.empty((9, HEADS), np.float32)
    plan.run(q, k, v, o, lse)
    wanted = attend(q, k, v, **options)
    close(o, wanted[0])
    close(lse, wanted[1] * LN2)


def test_variant_text(tmp_path, numpy_lib, rng):
    context = foveal.Context("cpu", cache_dir=str(tmp_path))
    text = """FV_META("a softer softmax")
FV_PARAMS(
    FV_NUMBER(heat, run, 1, 2)
)
FV_SCORE { return s * (1.0f / a->heat); }
"""
    try:
        soft = foveal.Variant(context, "soft", text)
    except foveal.CompileError as e:
        if e.field == "FV_CC":
            pytest.skip(str(e))
        raise
    lengths = [5, 40]
    pages = Pages(rng, lengths, KV_HEADS, DIM, 16, lib=numpy_lib)
    q = rng.standard_normal((2, HEADS, DIM)).astype("f4")
    o, lse = np.empty((2, HEADS, DIM), "f4"), np.empty((2, HEADS), "f4")
    decode_plan(context, problem(variants=["causal", soft]), lengths, pages).run(q, pages.cache[:, 0], pages.cache[:, 1], o, lse, args={"heat": 4.0})
    wanted = decode_reference(q / 4, pages)
    close(o, wanted[0], "float32")
    close(lse, wanted[1], "float32")
    with pytest.raises(foveal.CompileError) as e:
        foveal.Variant(context, "bad", text.replace("a->heat", "a->cold"))
    assert (e.value.field, e.value.value) == ("bad", 5) and "cold" in str(e.value)


def test_run_arguments(context, rng):
    """Parameters bound per run: numbers, 0-d arrays and vectors; and what is refused by name."""
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((4, HEADS, DIM), (20, KV_HEADS, DIM), (20, KV_HEADS, DIM)))
    plan = foveal.Plan(context, problem(variants=["softcap", "sink", ("window", {"left": 10}), "causal"]), max_requests=1, max_rows=8, max_kv_tokens=64)
    plan.update(foveal.Batch(rows=[0, 4], kv_indptr=[0, 20]))
    o, sinks = np.empty_like(q), rng.standard_normal(HEADS).astype(np.float32)
    for cap in (2.0, np.float32(3.0), np.array(4.0, np.float32)):
        plan.run(q, k, v, o, args={"cap": cap, "sinks": sinks, "left": 5})
        close(o, attend(q, k, v, causal=True, cap=float(cap), sinks=sinks, window_left=5)[0])
    for args, match in (({"cap": 1.0}, "sinks"), ({"cap": 1.0, "sinks": sinks, "bias": 1}, "bias"), ({"cap": 0, "sinks": sinks}, "cap"),
                        ({"cap": 1.0, "sinks": sinks[:2]}, "sinks"), ({"cap": 1.0, "sinks": sinks, "left": 11}, "left")):
        with pytest.raises(ValueError, match=match):
            plan.run(q, k, v, o, args=args)


@pytest.mark.parametrize("kind", ["tensor", "head", "token_head"])
def test_scales(place, lib, rng, kind):
    k, v = (lib.array(rng.standard_normal((20, KV_HEADS, DIM)), "float8_e4m3fn") for _ in range(2))
    q = lib.array(rng.standard_normal((3, HEADS, DIM)), "float16")
    scale = {"tensor": 0.5, "head": np.array([0.5, 2.0]), "token_head": rng.random((20, KV_HEADS)) + 0.5}[kind]
    dense = numbers(k) * (scale if kind == "tensor" else scale[..., None])
    plan = foveal.Plan(place, foveal.Problem("f16", "fp8_e4m3", num_q_heads=HEADS, num_kv_heads=KV_HEADS, dim_qk=DIM, k_scale=kind), max_requests=1, max_rows=8,
                       max_kv_tokens=64)
    plan.update(foveal.Batch(rows=[0, 3], kv_indptr=[0, 20]))
    o = lib.array(np.zeros((3, HEADS, DIM)), "float16")
    plan.run(q, k, v, o, args={"k_scale": scale if kind == "tensor" else lib.array(scale)})
    close(o, attend(numbers(q), dense, numbers(v))[0], "float16")


@pytest.mark.parametrize("as_arrays", [False, True])
def test_segments(context, numpy_lib, rng, as_arrays):
    """Two requests behind one shared list of pages."""
    pages = Pages(rng, [32, 9, 5], KV_HEADS, DIM, 8, lib=numpy_lib)
    rows = [{"row_first": 0, "num_rows": 2, "first_page": 0, "num_pages": 4, "num_keys": 32, "first_position": 0},
            {"row_first": 0, "num_rows": 1, "first_page": 4, "num_pages": 2, "num_keys": 9, "first_position": 32},
            {"rows": [1], "first_page": 6, "num_pages": 1, "num_keys": 5, "first_position": 32}]
    if as_arrays:
        keys = ("row_first", "first_page", "num_pages", "num_keys", "first_position")
        rows = {name: np.array([s.get(name, 0) for s in rows]) for name in keys}
        rows.update(rows=np.array([0, 1, 0, 1], np.int32), rows_indptr=[0, 2, 3, 4])
    plan = foveal.Plan(context, problem(), max_requests=2, max_rows=2, max_kv_tokens=64, max_pages=16, max_segments=3, max_levels=2)
    plan.update(foveal.Batch(lengths=[41, 37], page_size=8, num_pages=pages.pool, page_ids=pages.ids, segments=rows))
    q, o = rng.standard_normal((2, HEADS, DIM)).astype(np.float32), np.empty((2, HEADS, DIM), np.float32)
    plan.run(q, pages.cache[:, 0], pages.cache[:, 1], o)
    for r in range(2):
        close(o[r:r + 1], attend(q[r:r + 1], np.concatenate((pages.k[0], pages.k[r + 1])), np.concatenate((pages.v[0], pages.v[r + 1])))[0])
    with pytest.raises(ValueError, match="colour"):
        foveal.Batch(lengths=[1], segments=[{"colour": 1}])


def test_bits(context, rng):
    """A dense mask given as bits, as bytes of bits and as a 2-D view."""
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((5, HEADS, DIM), (16, KV_HEADS, DIM), (16, KV_HEADS, DIM)))
    mask = rng.random((5, 16)) < 0.5
    packed = np.packbits(mask, bitorder="little")
    plan = foveal.Plan(context, problem(variants=["mask"]), max_requests=1, max_rows=8, max_kv_tokens=64)
    o = np.empty_like(q)
    for bits in (packed, foveal.Tensor(packed, "b1"), foveal.Tensor(packed.reshape(5, 2), "b1")):
        plan.update(foveal.Batch(rows=[0, 5], kv_indptr=[0, 16], args={"bits": bits}))
        plan.run(q, k, v, o)
        close(o, attend(q, k, v, mask=mask)[0])


def test_tails(context, rng):
    """Latent attention over two tensors, values inside the keys."""
    q, qt, k, kt = (rng.standard_normal(s).astype(np.float32) for s in ((3, 4, 128), (3, 4, 32), (20, 1, 128), (20, 1, 32)))
    p = foveal.Problem("f32", num_q_heads=4, num_kv_heads=1, dim_qk=160, dim_v=128, qk_tail=32, v_in_k=True, variants=["causal"], lse_base2=True)
    assert (p.dim_v, p.num_kv_heads, p.lse_base2, p.v) == (128, 1, True, "f32")
    plan = foveal.Plan(context, p, max_requests=1, max_rows=8, max_kv_tokens=64)
    plan.update(foveal.Batch(rows=[0, 3], kv_indptr=[0, 20]))
    o, lse = np.empty((3, 4, 128), np.float32), np.empty((3, 4), np.float32)
    plan.run(q, k, None, o, lse, q_tail=qt, k_tail=kt)
    wanted = attend(np.concatenate((q, qt), 2), np.concatenate((k, kt), 2), k, causal=True)
    close(o, wanted[0])
    close(lse, wanted[1])


def test_problem_change(context, rng):
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((5, HEADS, DIM), (16, KV_HEADS, DIM), (16, KV_HEADS, DIM)))
    plan, o = foveal.Plan(context, problem(variants=["causal"]), max_requests=1, max_rows=8, max_kv_tokens=64), np.empty((5, HEADS, DIM), np.float32)
    batch = foveal.Batch(rows=[0, 5], kv_indptr=[0, 16])
    for p, options in ((problem(scale=0.5), {"scale": 0.5}), (problem(variants=["causal"]), {"causal": True})):
        plan.update(batch, problem=p)
        assert plan.problem is p
        plan.run(q, k, v, o)
        close(o, attend(q, k, v, **options)[0])
    with pytest.raises(foveal.InvalidError, match="heads"):
        plan.update(batch, problem=foveal.Problem("f32", num_q_heads=8, num_kv_heads=2, dim_qk=DIM))
    plan.update(batch)
    plan.run(q, k, v, o)


# ---------------------------------------------------------------------------------------------------------- operations


def test_append_by_batch_and_slots(place, lib, rng):
    new_k, new_v = (rng.standard_normal((3, KV_HEADS, DIM)) for _ in range(2))
    by_batch, by_slots = [[lib.array(np.zeros((4, 4, KV_HEADS, DIM))) for _ in range(2)] for _ in range(2)]
    batch = foveal.Batch(rows=lib.ints([0, 2, 3]), lengths=lib.ints([5, 1]), page_size=4, num_pages=4, page_indptr=lib.ints([0, 2, 3]), page_ids=lib.ints([2, 0, 3]))
    foveal.append(place, lib.array(new_k), lib.array(new_v), *by_batch, batch=batch)
    foveal.append(place, lib.array(new_k), lib.array(new_v), *by_slots, slots=lib.ints([2 * 4 + 3, 0, 3 * 4]))
    for a, b, new in zip(by_batch, by_slots, (new_k, new_v)):
        assert (numbers(a) == numbers(b)).all()
        assert (numbers(a)[2, 3] == new[0].astype(np.float32)).all() and (numbers(a)[0, 0] == new[1].astype(np.float32)).all()
        assert (numbers(a) != 0).any(-1).sum() == 3 * KV_HEADS


def test_pages_in_tiles(context, rng):
    """The same attention from pages in both orders; where an element of "tiles" lies, by hand."""
    length, page, pages = 41, 16, 5
    new_k, new_v, q = (rng.standard_normal((n, h, DIM)).astype(np.float16) for n, h in ((length, KV_HEADS), (length, KV_HEADS), (2, HEADS)))
    batch = dict(lengths=[length], page_size=page, num_pages=pages, page_indptr=[0, 3], page_ids=[3, 0, 2])
    caches, outputs = {}, {}
    for order in ("rows", "tiles"):
        k, v = caches[order] = [np.zeros((pages, page, KV_HEADS, DIM), np.float16) for _ in range(2)]
        foveal.append(context, new_k, new_v, k, v, batch=foveal.Batch(rows=[0, length], **batch), page_order=order)
        plan = foveal.Plan(context, problem(dtype="f16", page_order=order), max_requests=1, max_rows=2, max_kv_tokens=64, max_pages=8)
        plan.update(foveal.Batch(rows=[0, 2], **batch))
        outputs[order] = np.empty_like(q)
        plan.run(q, k, v, outputs[order])
    assert np.abs(outputs["rows"].astype(np.float32) - outputs["tiles"].astype(np.float32)).max() < 2e-3
    squares = caches["rows"][0].reshape(pages, 16, KV_HEADS, DIM // 32, 16, 2).transpose(0, 4, 2, 3, 1, 5).reshape(pages, page, KV_HEADS, DIM)
    pairs = caches["rows"][1].reshape(pages, 8, 2, KV_HEADS, DIM).transpose(0, 1, 3, 4, 2).reshape(pages, 8, KV_HEADS, 2, DIM)
    pairs = pairs.transpose(0, 1, 3, 2, 4)
    assert (caches["tiles"][0] == squares).all() and (caches["tiles"][1] == pairs.reshape(pages, page, KV_HEADS, DIM)).all()
    with pytest.raises(foveal.Error, match="rows or tiles"):
        foveal.append(context, new_k, new_v, *caches["rows"], batch=foveal.Batch(rows=[0, length], **batch), page_order="turned")
    with pytest.raises(foveal.Error) as e:
        foveal.Plan(context, problem(page_order="tiles"), max_requests=1, max_rows=2, max_kv_tokens=64, max_pages=8)
    assert e.value.field == "problem.page_order" and "f32" in str(e.value)


def test_append_rope_and_scales(place, lib, rng):
    new_k, new_v, q = (rng.standard_normal((4, h, DIM)).astype(np.float32) for h in (KV_HEADS, KV_HEADS, HEADS))
    k, v = (lib.array(np.zeros((8, KV_HEADS, DIM)), "float8_e4m3fn") for _ in range(2))
    scales, q_out = lib.array(np.zeros((8, KV_HEADS))), lib.array(np.zeros_like(q))
    positions = [7, 9, 100, 3]
    foveal.append(place, lib.array(new_k), lib.array(new_v), k, v, slots=[6, 1, 0, -1], row_positions=positions, k_scale_kind="token_head", k_scale=scales,
                  v_scale_kind="tensor", v_scale=0.5, rope={"rotary_dim": DIM, "base": 1e4}, q=lib.array(q), q_out=q_out)
    turned = rotate(new_k, positions)
    close(q_out, rotate(q, positions))
    for row, slot in enumerate([6, 1, 0]):
        dense = numbers(k)[slot] * numbers(scales)[slot][:, None]
        assert np.abs(dense - turned[row]).max() <= np.abs(turned[row]).max() / 16
        assert np.abs(numbers(v)[slot] * 0.5 - new_v[row]).max() <= np.abs(new_v[row]).max() / 14
    assert (numbers(k)[[2, 3, 4, 5, 7]] == 0).all()
    with pytest.raises(ValueError, match="rope has a key"):
        foveal.append(place, lib.array(new_k), None, lib.array(np.zeros((8, KV_HEADS, DIM))), None, slots=[0, 1, 2, 3], rope={"angle": 1})


def test_merge(place, lib, rng):
    states = [(rng.standard_normal((5, 3, 32)).astype(np.float32), rng.standard_normal((5, 3)).astype(np.float32)) for _ in range(3)]
    states[1][1][2] = -np.inf
    o, lse = lib.array(np.zeros((5, 3, 32))), lib.array(np.zeros((5, 3)))
    foveal.merge(place, [lib.array(x) for x, _ in states], [lib.array(s) for _, s in states], o, lse, lse_base2=True)
    wanted = merged(states)
    close(o, wanted[0])
    close(lse, wanted[1])
    with pytest.raises(ValueError, match="lse_states"):
        foveal.merge(place, [o], [lse, lse], o)


def test_rope(place, lib, rng):
    x, positions = rng.standard_normal((4, 3, 64)).astype(np.float32), [0, 5, 1000, 17]
    y = lib.array(np.zeros_like(x))
    foveal.rope(place, lib.array(x), positions, y, rotary_dim=32, interleaved=True, base=1e5)
    close(y, rotate(x, positions, 1e5, 1.0, True, 32))
    frequencies = foveal.rope_frequencies(32, base=1e5)
    np.testing.assert_allclose(frequencies, 1e5 ** (-2 * np.arange(16) / 32), rtol=1e-6)
    z = lib.array(np.zeros_like(x))
    foveal.rope(place, lib.array(x), lib.ints(positions), z, rotary_dim=32, interleaved=True, frequencies=np.array(frequencies, np.float32))
    assert (numbers(y) == numbers(z)).all()
    assert foveal.rope_frequencies(4, factor=8, low_freq_factor=1, high_freq_factor=4, original_context=8192)[0] == 1.0


def test_copy_pages(place, lib, rng):
    k, v = (rng.standard_normal((6, 4, 2, 8)).astype(np.float32) for _ in range(2))
    kk, vv = lib.array(k), lib.array(v)
    foveal.copy_pages(place, kk, vv, [(0, 3), None, (5, 1)])
    for made, old in ((kk, k), (vv, v)):
        wanted = old.copy()
        wanted[3], wanted[1] = old[0], old[5]
        assert (numbers(made) == wanted).all()
    with pytest.raises(foveal.InvalidError, match="pages"):
        foveal.copy_pages(place, kk, None, [(0, 6)])


@pytest.mark.parametrize("word", ["uint8", "int32"])
def test_copy_pages_of_integers(place, lib, word):
    """Packed codes and words are copied as they are."""
    k = np.arange(6 * 4 * 2 * 20).reshape(6, 4, 2, 20).astype(word)
    made = lib.same(k.copy())
    foveal.copy_pages(place, None, made, [(0, 3), (5, 1)])
    k[3], k[1] = k[0], k[5]
    assert (numbers(made) == k).all()


def test_cache(context, numpy_lib, rng):
    cache = foveal.Cache(context, page_size=4, num_pages=16, max_sequences=4, max_pages_per_sequence=8)
    keys = np.array([11, 12, 13], np.uint64)
    a, have = cache.open(keys)
    assert have == 0
    cache.extend(a, 10)
    cache.commit(a, 10, [11, 12])
    assert cache.match(keys) == 8 and cache.length(a) == 10
    child, copy = cache.fork(a)
    assert copy is not None and copy[0] != copy[1]
    b, have = cache.open([11, 12, 99])
    assert have == 8
    cache.extend(b, 3)
    k, v = (rng.standard_normal((16, 4, KV_HEADS, DIM)).astype(np.float32) for _ in range(2))
    foveal.copy_pages(context, k, v, [copy])
    plan = foveal.Plan(context, problem(), max_requests=4, max_rows=4, max_kv_tokens=256, max_pages=64)
    q, o = rng.standard_normal((3, HEADS, DIM)).astype(np.float32), np.empty((3, HEADS, DIM), np.float32)
    q[1] = q[0]
    plan.update(foveal.Batch(lengths=[10, 10, 11], pages=cache.pages([a, child, b])))
    plan.run(q, k, v, o)
    assert (o[0] == o[1]).all() and np.isfinite(o).all()
    assert cache.truncate(child, 8) is None
    for sequence in (a, b, child):
        cache.release(sequence)
    stats = cache.stats()
    assert stats["num_sequences"] == 0 and stats["cached_pages"] == 2 and stats["hit_tokens"] == 8
    assert cache.evict(2) == 2
    assert cache.match(keys) == 0
    c, _ = cache.open()
    with pytest.raises(foveal.CapacityError) as caught:
        cache.extend(c, 17 * 4)
    assert caught.value.value > 0 and isinstance(caught.value, ValueError)
    cache.extend(c, 8)
    cache.slide(c, 4)


# -------------------------------------------------------------------------------------------------------------- views


def test_views(context, numpy_lib, rng):
    lengths = [300, 2]
    pages = Pages(rng, lengths, KV_HEADS, DIM, 16, lib=numpy_lib)
    plan = decode_plan(context, problem(), lengths, pages)
    stats = plan.stats()
    assert stats["num_rows"] == 2 and stats["num_kv_tokens"] == 302 and stats["kernel"].startswith("attend")
    costs = plan.worker_costs()
    assert len(costs) == stats["workers"] and max(costs) == stats["max_worker_cost"]
    assert "workers" in plan.describe() and plan.describe("svg").lstrip().startswith("<")
    with pytest.raises(foveal.InvalidError, match="format"):
        plan.describe("gif")
    limits = dict(max_requests=2, max_rows=2, max_kv_tokens=1 << 14, max_pages=1 << 12)
    assert foveal.supports(context, problem(), **limits) == stats["kernel"]
    sizes = foveal.plan_sizes(context, problem(), **limits)
    assert sizes["workspace_bytes"] > 0
    foveal.warm(context, [problem(), problem(variants=["causal"])], **limits)
    workspace = np.zeros(sizes["workspace_bytes"] + 64, np.uint8)
    aligned = workspace[-workspace.ctypes.data % 64:][:sizes["workspace_bytes"]]
    own = foveal.Plan(context, problem(), workspace=aligned, **limits)
    with pytest.raises(foveal.CapacityError, match="workspace"):
        foveal.Plan(context, problem(), workspace=aligned[:8], **limits)
    q, o, o2 = rng.standard_normal((2, HEADS, DIM)).astype(np.float32), *np.empty((2, 2, HEADS, DIM), np.float32)
    own.update(foveal.Batch(lengths=lengths, page_size=16, num_pages=pages.pool, page_indptr=pages.indptr, page_ids=pages.ids))
    plan.run(q, pages.cache[:, 0], pages.cache[:, 1], o)
    own.run(q, pages.cache[:, 0], pages.cache[:, 1], o2)
    assert (o == o2).all()


def test_info(context):
    assert "avx2" in foveal.info() or "neon" in foveal.info() or "scalar" in foveal.info()
    import json

    sections = json.loads(foveal.info("json", context))
    assert any(row.get("name") == "causal" for row in sections["variants"])
    made = subprocess.run([sys.executable, "-m", "foveal", "info", "--device", "cpu"], check=True, capture_output=True, text=True).stdout
    assert "variants" in made and "context" in made
    assert foveal.__version__ in subprocess.run([sys.executable, "-m", "foveal", "env"], check=True, capture_output=True, text=True).stdout


# ------------------------------------------------------------------------------------------------------ array protocols


class OnlyDlpack:
    """Speaks __dlpack__ and nothing else."""

    def __init__(self, x, old=False):
        self.x, self.old = x, old

    def __dlpack__(self, **kwargs):
        if self.old and "max_version" in kwargs:
            raise TypeError("max_version")
        return self.x.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


def ragged_run(context, q, k, v, o, rows=2, keys=5, dtype="f32"):
    plan = foveal.Plan(context, foveal.Problem(dtype, num_q_heads=HEADS, num_kv_heads=KV_HEADS, dim_qk=DIM), max_requests=1, max_rows=8, max_kv_tokens=64)
    plan.update(foveal.Batch(rows=[0, rows], kv_indptr=[0, keys]))
    plan.run(q, k, v, o)


def test_array_protocols(context, rng):
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((2, HEADS, DIM), (5, KV_HEADS, DIM), (5, KV_HEADS, DIM)))
    wanted = attend(q, k, v)[0]
    for wrap in (lambda x: x, OnlyDlpack, lambda x: OnlyDlpack(x, True), memoryview):
        o = np.zeros_like(q)
        ragged_run(context, wrap(q), wrap(k), wrap(v), wrap(o))
        close(o, wanted)


def test_bf16_by_tensor(context, rng):
    """NumPy has no bf16: uint16 under the name."""
    def bf16(x):
        return foveal.Tensor((np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16), "bf16")

    def back(t):
        return (t.array.astype(np.uint32) << 16).view(np.float32)

    q, k, v = (bf16(rng.standard_normal(s)) for s in ((2, HEADS, DIM), (5, KV_HEADS, DIM), (5, KV_HEADS, DIM)))
    o = bf16(np.zeros((2, HEADS, DIM)))
    assert q.dtype == "bf16" and q.shape == (2, HEADS, DIM) and "bf16" in repr(q)
    ragged_run(context, q, k, v, o, dtype="bf16")
    close(back(o), attend(back(q), back(k), back(v))[0], "bfloat16")


def test_strided_views(context, rng):
    big = rng.standard_normal((3, 4, 10, DIM)).astype(np.float32)
    q, o = big[0].transpose(1, 0, 2)[:2], np.zeros((4, HEADS, DIM), np.float32)
    k, v = big[1, :KV_HEADS].transpose(1, 0, 2)[:5], big[2, :KV_HEADS].transpose(1, 0, 2)[:5]
    ragged_run(context, q, k, v, o[::2])
    close(o[::2], attend(q, k, v)[0])
    assert (o[1::2] == 0).all()


def test_array_refusals(context, rng):
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((2, HEADS, DIM), (5, KV_HEADS, DIM), (5, KV_HEADS, DIM)))
    frozen = np.zeros_like(q)
    frozen.setflags(write=False)
    cases = [
        ((object(), k, v, q), TypeError, "q is no array"), ((q.astype(np.float64), k, v, q), TypeError, "element type"), ((q, k, v, frozen), ValueError, "read-only"),
        ((q[:, :2], k, v, q), ValueError, "tensors.q"), ((q, k[:4], v, q), ValueError, "tensors.k"), ((q, k, v, None), ValueError, "tensors.o"),
        ((q[..., ::2], k, v, q), ValueError, "tensors.q"), ((q[None, None, None], k, v, q), ValueError, "axes"),
        ((q, foveal.Tensor(k, "f16"), v, q), ValueError, "32 bits")]
    for args, kind, match in cases:
        with pytest.raises(kind, match=match):
            ragged_run(context, *args)
    with pytest.raises(ValueError, match="element type"):
        foveal.Tensor(k, "f12")
    with pytest.raises(TypeError, match="int32 or int64"):
        foveal.Batch(lengths=np.array([1.5], np.float32))
    with pytest.raises(ValueError, match="axes"):
        foveal.Batch(lengths=np.zeros((2, 2), np.int32))
    with pytest.raises(ValueError, match="backwards"):
        foveal.Batch(lengths=np.array([1, 2], np.int32)[::-1])


# ------------------------------------------------------------------------------------------------------------- errors


def test_errors(context):
    plan = foveal.Plan(context, problem(), max_requests=2, max_rows=2, max_kv_tokens=100, max_pages=8)
    table = dict(page_size=16, num_pages=4, page_indptr=[0, 1, 2], page_ids=[0, 1])
    with pytest.raises(foveal.InvalidError) as caught:
        plan.update(foveal.Batch(lengths=[3, 40], **table))
    e = caught.value
    assert isinstance(e, ValueError) and (e.status, e.field, e.value, e.limit, e.request) == ("FV_E_INVALID", "batch.lengths[1]", 40, 16, 1)
    with pytest.raises(foveal.Error, match="no step"):
        plan.run(np.zeros((2, HEADS, DIM), np.float32), None, None, np.zeros((2, HEADS, DIM), np.float32))
    with pytest.raises(foveal.CapacityError) as caught:
        plan.update(foveal.Batch(lengths=[1, 1, 1], page_size=16, num_pages=4, page_indptr=[0, 1, 2, 3], page_ids=[0, 1, 2]))
    assert caught.value.limit == 2
    with pytest.raises(NotImplementedError):
        raise foveal.UnsupportedError("x")
    with pytest.raises(foveal.Error):
        foveal.Plan(context, foveal.Problem("f32", num_q_heads=4, num_kv_heads=3, dim_qk=64), max_requests=1, max_rows=1, max_kv_tokens=1)
    with pytest.raises(ValueError, match="nothing"):
        foveal.Plan(context, problem(variants=["nothing"]), max_requests=1, max_rows=1, max_kv_tokens=1)
    with pytest.raises(foveal.InvalidError, match="tpu"):
        foveal.Context("tpu")
    with pytest.raises(foveal.DeviceError):         # no driver, or not so many GPUs
        foveal.Context("cuda:99")
    for builtin, kind in ((MemoryError, foveal.NoMemoryError), (RuntimeError, foveal.NotReadyError), (OSError, foveal.FileError)):
        assert issubclass(kind, builtin) and issubclass(kind, foveal.Error)


def test_call_errors(context):
    plan = foveal.Plan(context, problem(), max_requests=1, max_rows=1, max_kv_tokens=1)
    for call, match in ((lambda: plan.run(), "needs 'q'"), (lambda: plan.run(1, 2, 3, 4, 5, 6), "positional"), (lambda: plan.update(batch=1, colour=2), "colour"),
                        (lambda: plan.update(1), "Batch"), (lambda: foveal.Problem("f32", num_q_heads=1), "dim_qk"), (lambda: foveal.Plan(plan, 1), "needs"),
                        (lambda: foveal.Problem("f32", num_q_heads=1.5, dim_qk=8), "integer"), (lambda: foveal.Problem("f32", "f32", q="f32", num_q_heads=1, dim_qk=8), "twice"),
                        (lambda: foveal.Pages(), "Pages")):
        with pytest.raises(TypeError, match=match):
            call()
    with pytest.raises(ValueError, match="32 bits"):
        foveal.Problem("f32", num_q_heads=1 << 40, dim_qk=8)
    name = "".join(["b", "atch"])          # a keyword that is not interned
    with pytest.raises(TypeError, match="Batch"):
        plan.update(**{name: 3})


def test_fault_word(context, numpy_lib, rng):
    context.errors(clear=True)
    pages = Pages(rng, [16], KV_HEADS, DIM, 8, lib=numpy_lib)
    ids = pages.ids.copy()
    ids[1] = 999
    plan = foveal.Plan(context, problem(), max_requests=1, max_rows=1, max_kv_tokens=64, max_pages=8)
    plan.update(foveal.Batch(lengths=[16], page_size=8, num_pages=pages.pool, page_indptr=[0, 2], page_ids=ids))
    q, o = rng.standard_normal((1, HEADS, DIM)).astype(np.float32), np.empty((1, HEADS, DIM), np.float32)
    plan.run(q, pages.cache[:, 0], pages.cache[:, 1], o)
    close(o, attend(q, pages.k[0][:8], pages.v[0][:8])[0])
    word = context.errors(clear=True)
    assert word["what"] == "page_id" and word["value"] == 999 and word["count"] >= 1
    assert context.errors() is None


# ---------------------------------------------------------------------------------------------------- lifetimes, threads


class Watched(np.ndarray):
    """An array that can be watched."""


def watched(x):
    x = np.array(x).view(Watched)
    return x, weakref.ref(x)


def test_lifetimes(numpy_lib, rng):
    """A plan keeps its step's arrays until the next update, and its context until it is gone."""
    context = foveal.Context("cpu", num_threads=1)
    pages = Pages(rng, [16, 3], KV_HEADS, DIM, 8, lib=numpy_lib)
    plan = foveal.Plan(context, problem(), max_requests=2, max_rows=2, max_kv_tokens=64, max_pages=8)
    ids, kept = watched(pages.ids)
    plan.update(foveal.Batch(lengths=[16, 3], page_size=8, num_pages=pages.pool, page_indptr=pages.indptr, page_ids=ids))
    q, o = rng.standard_normal((2, HEADS, DIM)).astype(np.float32), np.empty((2, HEADS, DIM), np.float32)
    del ids
    gc.collect()
    assert kept() is not None
    plan.run(q, pages.cache[:, 0], pages.cache[:, 1], o)
    close(o, decode_reference(q, pages)[0])
    plan.update(foveal.Batch(lengths=[0, 0], page_size=8, num_pages=pages.pool, page_indptr=[0, 0, 0], page_ids=[]))
    gc.collect()
    assert kept() is None
    with pytest.raises(foveal.BusyError):
        context.close()
    del plan
    context.close()
    assert context.closed
    with pytest.raises(ValueError, match="closed"):
        context.errors()
    with foveal.Context("cpu") as another:
        assert another.device == "cpu"
    assert another.closed


def test_plan_close(context):
    plan = foveal.Plan(context, problem(), max_requests=1, max_rows=1, max_kv_tokens=1)
    plan.close()
    plan.close()
    with pytest.raises(ValueError, match="closed"):
        plan.stats()


def test_no_leaks(context, numpy_lib, rng):
    """Ten thousand steps hold no more references than ten."""
    pages = Pages(rng, [16, 3], KV_HEADS, DIM, 8, lib=numpy_lib)
    plan = foveal.Plan(context, problem(variants=["softcap"]), max_requests=2, max_rows=2, max_kv_tokens=64, max_pages=8)
    q, o = rng.standard_normal((2, HEADS, DIM)).astype(np.float32), np.empty((2, HEADS, DIM), np.float32)
    objects = (pages.ids, pages.cache, q, o, "cap", context, plan)

    def steps(n):
        for _ in range(n):
            plan.update(foveal.Batch(lengths=[16, 3], page_size=8, num_pages=pages.pool, page_indptr=pages.indptr, page_ids=pages.ids))
            plan.run(q, pages.cache[:, 0], pages.cache[:, 1], o, args={"cap": 3.0})
            for bad in ({}, {"cap": o}):
                try:
                    plan.run(q, pages.cache[:, 0], pages.cache[:, 1], o, args=bad)
                except ValueError:
                    pass
        return [sys.getrefcount(x) for x in objects]

    assert steps(10) == steps(2000)


def test_threads(context, numpy_lib, rng):
    """Threads with a plan each, on one context; one plan in two threads is refused, never corrupted."""
    lengths = [700, 33]
    pages = Pages(rng, lengths, KV_HEADS, DIM, 16, lib=numpy_lib)
    q = rng.standard_normal((2, HEADS, DIM)).astype(np.float32)
    wanted, failures = decode_reference(q, pages)[0], []

    def work():
        try:
            plan = decode_plan(context, problem(), lengths, pages)
            for _ in range(50):
                o = np.empty((2, HEADS, DIM), np.float32)
                plan.run(q, pages.cache[:, 0], pages.cache[:, 1], o)
                close(o, wanted)
        except BaseException as e:      # noqa: BLE001
            failures.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures

    plan, refused = decode_plan(context, problem(), lengths, pages), []

    def share():
        for _ in range(200):
            o = np.empty((2, HEADS, DIM), np.float32)
            try:
                plan.run(q, pages.cache[:, 0], pages.cache[:, 1], o)
                close(o, wanted)
            except foveal.BusyError as e:
                refused.append(e)

    threads = [threading.Thread(target=share) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(e.field == "plan" for e in refused)


def test_log():
    lines = []
    context = foveal.Context("cpu", log=lambda level, line: lines.append((level, line)))
    del context
    with pytest.raises(TypeError, match="callable"):
        foveal.Context("cpu", log=3)


# ----------------------------------------------------------------------------------------------------- stubs and package


def stub_parameters(node):
    """[(name, kind)] of a function in the stub, self and cls left out."""
    a = node.args
    names = [(x.arg, "positional") for x in a.args if x.arg not in ("self", "cls")]
    return names + [(x.arg, "keyword") for x in a.kwonlyargs]


def real_parameters(call):
    kinds = {inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional", inspect.Parameter.KEYWORD_ONLY: "keyword"}
    return [(p.name, kinds[p.kind]) for p in inspect.signature(call).parameters.values() if p.name not in ("self", "$self")]


def test_stubs_match():
    """The stub file has every name, method and parameter of the module, and no other."""
    from foveal import _foveal

    tree = ast.parse((Path(foveal.__file__).parent / "_foveal.pyi").read_text())
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    for name, value in vars(_foveal).items():
        if name.startswith("_"):
            continue
        if isinstance(value, type):
            assert name in classes, name
            if issubclass(value, Exception):
                assert [ast.unparse(b) for b in classes[name].bases][1:] == [b.__name__ for b in value.__bases__[1:]]
                continue
            members = {n.name: n for n in classes[name].body if isinstance(n, ast.FunctionDef)}
            real = {n for n in vars(value) if not n.startswith("_") or n in ("__enter__", "__exit__", "__new__")}
            assert set(members) == real, name
            if "__new__" in members:
                assert stub_parameters(members["__new__"]) == real_parameters(value), name
            for method in real - {"__new__", "__enter__", "__exit__"}:
                if callable(vars(value)[method]):
                    assert vars(value)[method].__doc__, method
                    assert stub_parameters(members[method]) == real_parameters(vars(value)[method]), f"{name}.{method}"
        elif callable(value):
            assert stub_parameters(functions[name]) == real_parameters(value), name
            assert value.__doc__
    for name in list(functions) + [n for n in classes if n != "_Rope"]:
        assert hasattr(foveal, name), name
    assert set(foveal.__all__) <= set(dir(foveal))


def test_package():
    assert (Path(foveal.__file__).parent / "py.typed").exists()
    assert foveal.__version__.count(".") == 2 and foveal.ABI_VERSION >= 1
    header = Path(foveal.get_include()) / "foveal" / "foveal.h"
    if not os.environ.get("FOVEAL_BUILD_TREE"):
        assert "fv_plan_create" in header.read_text()


def test_module_needs_nothing():
    """import foveal brings in no other package."""
    code = "import sys; before = set(sys.modules); import foveal; new = {m.split('.')[0] for m in set(sys.modules) - before}; assert new <= {'foveal'}, new"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_integers_are_named_plainly():
    with pytest.raises(TypeError, match="^max_requests must be an integer"):
        foveal.Plan(foveal.Context("cpu"), foveal.Problem("f32", num_q_heads=1, dim_qk=16), max_requests=1.5, max_rows=1, max_kv_tokens=16)


def test_words_for_devices_and_variants():
    for word, error in (("", ValueError), ("cpu\0x", ValueError), ("cpu:0", foveal.InvalidError), ("cuda:", foveal.InvalidError), (3, TypeError)):
        with pytest.raises(error, match="device"):
            foveal.Context(word)
    options = dict(num_q_heads=2, dim_qk=16)
    plan = foveal.Plan(foveal.Context("cpu"), foveal.Problem("f32", variants="causal", **options), max_requests=1, max_rows=2, max_kv_tokens=8)
    assert plan is not None
    for variants in (3, {"window": {"left": 3}}):
        with pytest.raises(TypeError, match="variants is a name, or a list"):
            foveal.Problem("f32", variants=variants, **options)


def test_refused_tables_say_which():
    plan = foveal.Plan(foveal.Context("cpu"), foveal.Problem("f32", num_q_heads=2, dim_qk=16), max_requests=4, max_rows=4, max_kv_tokens=64, max_pages=16)
    good = dict(lengths=[3], page_size=4, num_pages=4, page_indptr=[0, 1], page_ids=[0])
    for change, error, text in ((dict(page_size=0), foveal.InvalidError, "page_size is 0, but batch.pages.indptr is given"), (dict(page_size=4.0), TypeError, "page_size"),
                                (dict(page_indptr=np.array([0, 1], np.int16)), TypeError, "page_indptr has elements of type int16"),
                                (dict(page_ids=[0.5]), TypeError, r"page_ids\[0\] is 0.5")):
        with pytest.raises(error, match=text):
            plan.update(foveal.Batch(**(good | change)))


def test_coverage_without_numpy():
    program = "import sys, runpy; sys.modules['numpy'] = None; sys.argv = ['foveal', 'coverage']; runpy.run_module('foveal', run_name='__main__')"
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "single_decode_with_kv_cache" in made.stdout


def test_signatures_of_bound_methods():
    """help() of a method shows its first argument, too."""
    assert list(inspect.signature(foveal.Context("cpu").errors).parameters) == ["clear"]
    assert list(inspect.signature(foveal.Plan.run).parameters)[:3] == ["self", "q", "k"]
