# SPDX-License-Identifier: Apache-2.0
"""What engines import beside attention, against float64 references: norms, activations, softmax, filters, samples, drafts."""

import math

import numpy as np
import pytest

import foveal
import foveal.flashinfer as fi
from reference import close, numbers

WORDS = ["float32", "float16", "bfloat16"]


def ids(x):
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)


def make_probs(rng, rows, vocab, zeros=0.2):
    p = rng.random((rows, vocab)) ** 3 * (rng.random((rows, vocab)) > zeros)
    p[:, 0] += 1e-3
    return (p / p.sum(-1, keepdims=True)).astype(np.float32)


# --------------------------------------------------------------------------------------------------- norms, activations


def norm_of(x, w, eps, plus_one=False):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (np.asarray(w, np.float64) + plus_one)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 96), (3, 4, 128), (2, 1025), (5, 4096)], ids=str)
@pytest.mark.parametrize("name,plus_one", [("rmsnorm", False), ("gemma_rmsnorm", True)])
def test_rmsnorm(lib, rng, word, shape, name, plus_one):
    x, w = lib.array(rng.standard_normal(shape) * 3, word), lib.array(rng.standard_normal(shape[-1]), word)
    wanted = norm_of(numbers(x), numbers(w), 1e-5, plus_one)
    y = getattr(fi.norm, name)(x, w, eps=1e-5, enable_pdl=True)
    assert lib.is_mine(y) and y.dtype == x.dtype and y.shape == x.shape
    close(y, wanted, word)
    out = lib.array(np.zeros(shape), word)
    assert getattr(fi, name)(x, w, 1e-5, out) is out
    close(out, wanted, word)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name,plus_one", [("fused_add_rmsnorm", False), ("gemma_fused_add_rmsnorm", True)])
def test_fused_add_rmsnorm(lib, rng, word, name, plus_one):
    x, r, w = (lib.array(rng.standard_normal(s), word) for s in ((9, 520), (9, 520), (520,)))
    total = numbers(x) + numbers(r)
    assert getattr(fi, name)(x, r, w, eps=1e-6) is None
    close(r, total, word)
    close(x, norm_of(total, numbers(w), 1e-6, plus_one), word)


@pytest.mark.parametrize("word", WORDS)
def test_layernorm(lib, rng, word):
    x, w, b = lib.array(rng.standard_normal((6, 300)) + 2, word), lib.array(rng.standard_normal(300)), lib.array(rng.standard_normal(300))
    z = numbers(x)
    z = (z - z.mean(-1, keepdims=True)) / np.sqrt(z.var(-1, keepdims=True) + 1e-6)
    y = fi.layernorm(x, w, b)
    assert y.dtype == x.dtype
    close(y, z * numbers(w) + numbers(b), word)


def test_norm_refusals(lib):
    x, w = lib.array(np.ones((2, 4))), lib.array(np.ones(4))
    with pytest.raises(ValueError, match="weight"):
        fi.rmsnorm(x, lib.array(np.ones(5)))
    with pytest.raises(ValueError, match="out"):
        fi.rmsnorm(x, w, out=lib.array(np.ones((2, 5))))
    with pytest.raises(ValueError, match="eps"):
        fi.rmsnorm(x, w, eps=-1.0)
    with pytest.raises(ValueError, match="residual"):
        fi.fused_add_rmsnorm(x, lib.array(np.ones((3, 4))), w)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("shape", [(1, 2), (5, 250), (2, 3, 128), (4, 4098)], ids=str)
def test_activations(lib, rng, word, shape):
    x = lib.array(rng.standard_normal(shape) * 3, word)
    z, by = np.split(numbers(x), 2, -1)
    erf = np.vectorize(math.erf)
    wanted = {"silu_and_mul": z / (1 + np.exp(-z)), "gelu_and_mul": z * (1 + erf(z / math.sqrt(2))) / 2,
              "gelu_tanh_and_mul": z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z ** 3))) / 2}
    for name, value in wanted.items():
        y = getattr(fi.activation, name)(x)
        assert lib.is_mine(y) and y.dtype == x.dtype and tuple(y.shape) == shape[:-1] + (shape[-1] // 2,)
        close(y, value * by, word)
        out = lib.array(np.zeros(y.shape), word)
        assert getattr(fi, name)(x, out) is out
        assert (numbers(out) == numbers(y)).all()
    with pytest.raises(ValueError, match="halves"):
        fi.silu_and_mul(lib.array(np.ones((2, 3))))
    with pytest.raises(ValueError, match="out"):
        fi.silu_and_mul(lib.array(np.ones((2, 4))), out=lib.array(np.ones((2, 3))))


# ------------------------------------------------------------------------------------------------------------- filters


def kept_by_k(p, k):
    """Fewer than k values are larger."""
    return (p[:, None, :] > p[:, :, None]).sum(-1) < np.reshape(k, (-1, 1))


def kept_by_p(p, share):
    larger = np.where(p[:, None, :] > p[:, :, None], p[:, None, :].astype(np.float64), 0).sum(-1)
    return (larger < np.reshape(share, (-1, 1)) * p.sum(-1, dtype=np.float64, keepdims=True)) | (p == p.max(-1, keepdims=True))


def renormed(p, kept):
    q = np.where(kept, p.astype(np.float64), 0)
    return q / q.sum(-1, keepdims=True)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("temperature", [None, 0.5, "each"])
def test_softmax(lib, rng, word, temperature):
    x = lib.array(rng.standard_normal((5, 777)) * 5, word)
    t = np.array([0.1, 1, 2, 0.7, 5]) if temperature == "each" else temperature
    p = fi.softmax(x, lib.array(t) if temperature == "each" else t)
    assert p.dtype == lib.dtype("float32") and lib.is_mine(p)
    z = numbers(x) / (1 if t is None else np.reshape(t, (-1, 1)).astype(np.float32).astype(np.float64))
    e = np.exp(z - z.max(-1, keepdims=True))
    np.testing.assert_allclose(numbers(p), e / e.sum(-1, keepdims=True), rtol=1e-5, atol=1e-30)


def test_softmax_edges(lib):
    x = lib.array([[1, 3, 3, -np.inf], [-np.inf] * 4, [0, 0, 0, 0]])
    assert numbers(fi.softmax(x, 0.0)).tolist() == [[0, 0.5, 0.5, 0], [0] * 4, [0.25] * 4]
    assert tuple(fi.softmax(lib.array(np.zeros((0, 4)))).shape) == (0, 4)
    with pytest.raises(TypeError, match="temperature"):
        fi.softmax(x, True)
    for bad, text in ((np.ones((3, 1)), "1D"), (np.ones(2), "length")):
        with pytest.raises(ValueError, match=text):
            fi.softmax(x, lib.array(bad))
    with pytest.raises(ValueError, match="temperature"):
        fi.softmax(x, -1.0)


@pytest.mark.parametrize("each", [False, True])
def test_renorms(lib, rng, each):
    p = make_probs(rng, 4, 301)
    p[1] = np.float32(1 / 301)                                  # all tie
    k, share = (np.array([1, 5, 301, 400]), np.array([0.0, 0.3, 0.9, 1.0], np.float32)) if each else (17, 0.6)
    ks, shares = (lib.ints(k), lib.array(share)) if each else (k, share)
    for name, wanted in (("top_k_renorm_probs", renormed(p, kept_by_k(p, k) & (p > 0))),
                         ("top_p_renorm_probs", renormed(p, kept_by_p(p, np.asarray(share, np.float32)) & (p > 0)))):
        y = numbers(getattr(fi.sampling, name)(lib.array(p), ks if "_k_" in name else shares))
        assert ((y > 0) == (wanted > 0)).all(), name
        np.testing.assert_allclose(y, wanted, rtol=1e-6)
    assert fi.sampling.top_k_renorm_prob is fi.top_k_renorm_probs and fi.sampling.top_p_renorm_prob is fi.top_p_renorm_probs


@pytest.mark.parametrize("word", WORDS)
def test_top_k_mask_logits(lib, rng, word):
    x = lib.array(np.round(rng.standard_normal((4, 200)) * 20), word)
    z = numbers(x)
    for k in (1, 13, 200, 1 << 30):
        y = fi.top_k_mask_logits(x, k)
        assert y.dtype == x.dtype
        assert (numbers(y) == np.where(kept_by_k(z, k), z, -np.inf)).all()
    p = fi.softmax(x)
    np.testing.assert_allclose(numbers(fi.softmax(fi.top_k_mask_logits(x, 13))), numbers(fi.top_k_renorm_probs(p, 13)), rtol=1e-5, atol=1e-12)


def test_filter_refusals(lib):
    p = lib.array(np.full((2, 4), 0.25))
    with pytest.raises(ValueError, match="k is 0"):
        fi.top_k_renorm_probs(p, 0)
    with pytest.raises(ValueError, match="3"):
        fi.top_p_renorm_probs(p, lib.array([0.5, 0.5, 0.5]))
    with pytest.raises(TypeError, match="k must be"):
        foveal.top_k_mask(fi._core.context_for(lib.device), p, None, p)


# ------------------------------------------------------------------------------------------------------------- samples


SAMPLERS = {
    "plain": (lambda x, **o: fi.sampling_from_probs(x, **o), lambda p: p > 0),
    "top_k": (lambda x, **o: fi.top_k_sampling_from_probs(x, 9, **o), lambda p: kept_by_k(p, 9)),
    "top_p": (lambda x, **o: fi.top_p_sampling_from_probs(x, 0.6, **o), lambda p: kept_by_p(p, np.float32(0.6))),
    "min_p": (lambda x, **o: fi.min_p_sampling_from_probs(x, 0.2, **o), lambda p: p >= np.float32(0.2) * p.max(-1, keepdims=True)),
    "joint": (lambda x, **o: fi.top_k_top_p_sampling_from_probs(x, 9, 0.6, filter_apply_order="joint", **o),
              lambda p: kept_by_k(p, 9) & kept_by_p(p, np.float32(0.6))),
    "first": (lambda x, **o: fi.top_k_top_p_sampling_from_probs(x, 9, 0.6, **o),
              lambda p: kept_by_k(p, 9) & kept_by_p(renormed(p, kept_by_k(p, 9)), np.float64(np.float32(0.6)))),
}


def follows(counts, probability):
    """Pearson's statistic within five deviations (Wilson and Hilferty)."""
    expected = probability * counts.sum()
    assert (counts[expected == 0] == 0).all()
    large = expected >= 5
    statistic = ((counts - expected)[large] ** 2 / expected[large]).sum()
    freedom = max(large.sum() - 1, 1)
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 5, (statistic, freedom)


@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_follow_the_distribution(lib, rng, name):
    call, keeps = SAMPLERS[name]
    p = make_probs(rng, 2, 40)
    n = 20000
    rows = np.arange(n, dtype=np.int32) % 2
    drawn = call(lib.array(p), indices=lib.ints(rows), seed=11, offset=5)
    assert drawn.dtype == lib.ints([0]).dtype and tuple(drawn.shape) == (n,)
    for r in range(2):
        follows(np.bincount(ids(drawn)[rows == r], minlength=40), renormed(p, keeps(p))[r])


@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_arguments(lib, rng, name):
    call, _ = SAMPLERS[name]
    p = lib.array(make_probs(rng, 6, 500))
    once, valid = call(p, seed=3, offset=8, return_valid=True, deterministic=False)
    assert lib.is_mine(once) and ids(valid).dtype == bool and ids(valid).all() and str(once.dtype).endswith("int32")
    vector = lib.ints([3]).astype("i8") if lib.name == "numpy" else lib.ints([3]).long()
    assert (ids(call(p, seed=vector, offset=vector + 5)) == ids(once)).all()
    many = np.concatenate([ids(call(p, seed=3, offset=i)) for i in range(12)]).reshape(12, 6)
    assert (many[8] == ids(once)).all() and len({tuple(x) for x in many}) > 1
    wide = lib.ints([4, 0, 4]).astype("i8") if lib.name == "numpy" else lib.ints([4, 0, 4]).long()
    assert call(p, indices=wide, seed=1, offset=1).dtype == wide.dtype
    with pytest.raises(ValueError, match="both"):
        call(p, seed=vector, offset=3)
    with pytest.raises(ValueError, match="int64"):
        call(p, seed=lib.ints([1]), offset=lib.ints([1]))
    with pytest.raises(ValueError, match="1 or 6"):
        call(p, seed=wide, offset=wide)
    bad = lib.array(np.full((2, 3), np.nan))
    with pytest.raises(ValueError, match="NaN"):
        call(bad, check_nan=True)
    drawn, valid = call(bad, return_valid=True)
    assert ids(drawn).tolist() == [0, 0] and not ids(valid).any()
    assert tuple(call(lib.array(np.zeros((0, 3)))).shape) == (0,)


def test_samples_with_a_filter_each(lib, rng):
    p = make_probs(rng, 5, 64)
    k, share = [1, 2, 64, 100, 7], [0.9, 0.0, 1.0, 0.4, 0.7]
    for order in ("top_k_first", "joint"):
        for offset in range(40):
            drawn = ids(fi.top_k_top_p_sampling_from_probs(lib.array(p), lib.ints(k), lib.array(share), filter_apply_order=order, seed=2, offset=offset))
            kept = kept_by_k(p, k) & (kept_by_p(p, np.array(share, np.float32)) if order == "joint" else
                                      kept_by_p(renormed(p, kept_by_k(p, k)), np.array(share, np.float32).astype(np.float64)))
            assert all(kept[i, drawn[i]] for i in range(5))
            assert drawn[0] == p[0].argmax() and drawn[1] == p[1].argmax()
    with pytest.raises(ValueError, match="Invalid filter_apply_order"):
        fi.top_k_top_p_sampling_from_probs(lib.array(p), 3, 0.5, filter_apply_order="sideways")


def test_samples_of_rows_that_are_not_there(lib):
    probs = lib.array([[0.1, 0.9], [0.5, 0.5]])
    for bad, text in (([0, 2], r"indices\[1\] is 2; there are 2 rows"), ([-1], r"indices\[0\] is -1")):
        if lib.device == "cpu":
            with pytest.raises(ValueError, match=text):
                fi.sampling_from_probs(probs, lib.ints(bad))
        else:
            ids, valid = fi.sampling_from_probs(probs, lib.ints(bad), return_valid=True)
            assert numbers(ids)[-1] == 0 and not numbers(valid)[-1]


def test_p_that_is_nan(lib):
    """As top_p the largest value alone, as min_p everything; in numbers and in tensors."""
    probs = lib.array([[0.2, 0.3, 0.5]] * 64)
    for nan in (float("nan"), lib.array([float("nan")] * 64)):
        assert (numbers(fi.top_p_sampling_from_probs(probs, nan, seed=1, offset=0)) == 2).all()
        assert (numbers(fi.top_p_renorm_probs(probs, nan)) == [0, 0, 1]).all()
        assert (numbers(fi.min_p_sampling_from_probs(probs, nan, seed=1, offset=0)) == numbers(fi.sampling_from_probs(probs, seed=1, offset=0))).all()


def test_samples_from_logits(lib, rng):
    x = rng.standard_normal((1, 30)) * 2
    p = np.exp(x - x.max()).astype(np.float32)
    rows = lib.ints(np.zeros(20000))
    follows(np.bincount(ids(fi.sampling_from_logits(lib.array(x), rows, seed=1, offset=1)), minlength=30), p[0] / p[0].sum(dtype=np.float64))
    for order in ("top_k_first", "joint"):
        kept = kept_by_k(p, 8) & (kept_by_p(p, 0.7) if order == "joint" else kept_by_p(renormed(p, kept_by_k(p, 8)), 0.7))
        drawn = fi.top_k_top_p_sampling_from_logits(lib.array(x), 8, 0.7, indices=rows, filter_apply_order=order, seed=4, offset=4)
        follows(np.bincount(ids(drawn), minlength=30), renormed(p, kept)[0])


def test_samples_move_the_generator(lib, rng):
    p = lib.array(make_probs(rng, 50, 1000))

    def three(start):
        start()
        return [tuple(ids(fi.sampling_from_probs(p))) for _ in range(3)]

    if lib.name == "torch":
        start = lambda: lib.torch.manual_seed(5)                                        # noqa: E731
        own = [tuple(ids(fi.sampling_from_probs(p, generator=lib.torch.Generator(lib.device).manual_seed(8)))) for _ in range(2)]
    else:
        start = lambda: np.random.seed(5)                                               # noqa: E731
        own = [tuple(ids(fi.sampling_from_probs(p, generator=np.random.default_rng(8)))) for _ in range(2)]
    assert three(start) == three(start) and len(set(three(start))) == 3
    assert own[0] == own[1]


def test_the_same_ids_on_every_level(rng):
    """And the same bytes of softmax: seeds are promises."""
    x = (rng.standard_normal((3, 5000)) * 4).astype(np.float32)
    made = set()
    for level in ("scalar", "avx2", "avx512", "neon"):
        try:
            context = foveal.Context("cpu", cpu_isa=level)
        except foveal.Error:
            continue
        p, drawn = np.empty_like(x), np.empty(3, np.int64)
        foveal.softmax(context, x, 0.8, p)
        foveal.sample(context, p, drawn, top_p=0.9, top_k=50, seed=2**64 - 1, offset=7)
        made.add((p.tobytes(), drawn.tobytes()))
    assert len(made) == 1


# -------------------------------------------------------------------------------------------------------------- drafts


def test_chain_speculative_sampling(lib):
    """The example of upstream's documentation: accepted, replaced by the only token left, padding."""
    draft = lib.array([[[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.1]]])
    target = lib.array([[[0.0, 0.1, 0.6, 0.3], [1.0, 0.0, 0.0, 0.0], [0.7, 0.1, 0.1, 0.1]]])
    tokens = lib.ints([[2, 1]])
    out, accepted, emitted = fi.chain_speculative_sampling(draft, tokens, target)
    assert ids(out).tolist() == [[2, 0, -1]] and ids(accepted).tolist() == [1] and ids(emitted).tolist() == [1]
    assert lib.is_mine(out) and out.dtype == tokens.dtype
    _, again, more = fi.chain_speculative_sampling(draft, tokens, target, accepted, emitted)
    assert again is accepted and more is emitted and ids(accepted).tolist() == [2] and ids(emitted).tolist() == [2]


def test_chain_follows_the_target(lib, rng):
    n, vocab, drafts = 20000, 12, 2
    q, p = make_probs(rng, drafts, vocab), make_probs(rng, drafts + 1, vocab)
    tokens = np.stack([rng.choice(vocab, n, p=q[s].astype(np.float64) / q[s].sum(dtype=np.float64)) for s in range(drafts)], 1)
    out, accepted, emitted = fi.chain_speculative_sampling(lib.array(np.broadcast_to(q, (n, drafts, vocab))), lib.ints(tokens),
                                                           lib.array(np.broadcast_to(p, (n, drafts + 1, vocab))), seed=6, offset=0)
    out, emitted = ids(out), ids(emitted)
    assert (ids(accepted) >= emitted).all()
    for s in range(drafts + 1):
        column = out[emitted >= s, s]
        assert (out[emitted < s, s] == -1).all()
        follows(np.bincount(column, minlength=vocab), p[s].astype(np.float64) / p[s].sum(dtype=np.float64))


def test_module_names():
    fi.install()
    import flashinfer
    import flashinfer.activation
    import flashinfer.norm
    import flashinfer.sampling

    assert flashinfer.norm.rmsnorm is flashinfer.rmsnorm is fi.rmsnorm
    assert flashinfer.activation.silu_and_mul is fi.silu_and_mul and flashinfer.sampling.top_k_renorm_prob is fi.top_k_renorm_prob


# ------------------------------------------------------------------------------------------------------------- devices


def on_device(device, rng):
    """The same torch tensors on the CPU and on the device (pytest --device cuda; the CPU once more without it)."""
    import torch

    def pair(x, dtype=torch.float32):
        x = torch.from_numpy(np.array(x)).to(dtype)
        return x, x.to(device)

    return torch, pair


def test_device_has_the_same_bytes(device, rng):
    """Softmax, filters, samples and drafts: what one device says, all say."""
    torch, pair = on_device(device, rng)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = pair(rng.standard_normal((5, 33000)) * 4, dtype)
        p = [fi.softmax(each, 0.7) for each in x]
        assert torch.equal(p[0], p[1].cpu()) and p[1].device == x[1].device
        for call in (lambda q, z: fi.top_k_renorm_probs(q, 40), lambda q, z: fi.top_p_renorm_probs(q, 0.8), lambda q, z: fi.top_k_mask_logits(z, 77),
                     lambda q, z: fi.sampling_from_probs(q, seed=1, offset=2), lambda q, z: fi.min_p_sampling_from_probs(q, 0.05, seed=1, offset=3),
                     lambda q, z: fi.sampling_from_logits(z, seed=5, offset=2),
                     lambda q, z: fi.top_k_top_p_sampling_from_probs(q, 40, 0.8, seed=7, offset=2),
                     lambda q, z: fi.top_k_top_p_sampling_from_logits(z, 40, 0.8, filter_apply_order="joint", seed=7, offset=2)):
            one, two = call(p[0], x[0]), call(p[1], x[1])
            assert torch.equal(one, two.cpu())
    q, t = pair(make_probs(rng, 12, 500).reshape(4, 3, 500)), pair(make_probs(rng, 16, 500).reshape(4, 4, 500))
    tokens = pair(rng.integers(0, 500, (4, 3)), torch.int32)
    one, two = (fi.chain_speculative_sampling(q[i], tokens[i], t[i], seed=3, offset=1) for i in range(2))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(one, two))


def test_device_norms_and_activations(device, rng):
    torch, pair = on_device(device, rng)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for width in (128, 4096):
            x, r, w = pair(rng.standard_normal((9, width)), dtype), pair(rng.standard_normal((9, width)), dtype), pair(rng.standard_normal(width), dtype)
            word = str(dtype)[6:]
            for name in ("rmsnorm", "gemma_rmsnorm"):
                close(getattr(fi, name)(x[1], w[1]).cpu(), norm_of(numbers(x[0]), numbers(w[0]), 1e-6, name[0] == "g"), word)
            for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"):
                close(getattr(fi, name)(x[1]).cpu(), numbers(getattr(fi, name)(x[0])), word)
            total = numbers(x[0]) + numbers(r[0])
            fi.fused_add_rmsnorm(x[1], r[1], w[1])
            close(r[1].cpu(), total, word)
            close(x[1].cpu(), norm_of(total, numbers(w[0]), 1e-6), word)


def test_device_generators(device, rng):
    torch, pair = on_device(device, rng)
    _, p = pair(make_probs(rng, 64, 1000))

    def three():
        torch.manual_seed(17)
        return [tuple(fi.sampling_from_probs(p).tolist()) for _ in range(3)]

    assert three() == three() and len(set(three())) == 3
    own = torch.Generator(device)
    once = fi.sampling_from_probs(p, generator=own.manual_seed(4))
    assert torch.equal(once, fi.sampling_from_probs(p, generator=own.manual_seed(4)))
    assert not torch.equal(once, fi.sampling_from_probs(p, generator=own))


def test_device_graph(device, rng):
    """Seed and offset in tensors: a captured graph draws anew at every replay."""
    torch, pair = on_device(device, rng)
    if device.type != "cuda":
        pytest.skip("graphs are of a GPU")
    _, x = pair(rng.standard_normal((16, 5000)) * 3)
    _, seed = pair([9], torch.int64)
    _, offset = pair([0], torch.int64)
    foveal.warm_ops(fi._core.context_for(f"cuda:{device.index or torch.cuda.current_device()}"))

    def drawn():
        return fi.top_k_top_p_sampling_from_probs(fi.softmax(x), 50, 0.9, seed=seed, offset=offset)

    wanted = []
    for step in range(4):
        offset.fill_(step)
        wanted.append(drawn().tolist())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids_out = drawn()
    for step in range(4):
        offset.fill_(step)
        graph.replay()
        assert ids_out.tolist() == wanted[step]
    assert len({tuple(w) for w in wanted}) == 4
