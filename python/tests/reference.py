# SPDX-License-Identifier: Apache-2.0
"""Attention of one request in float64, written out row by row: what the tests compare with. And arrays of the libraries: NumPy, torch on the CPU, torch on a GPU."""

import importlib.util
import math

import numpy as np
import pytest

HAVE_TORCH = importlib.util.find_spec("torch") is not None
LN2 = math.log(2)


def rotate(x, positions, theta=1e4, scale=1.0, interleave=False, rotary_dim=None):
    """x [rows, heads, dim] turned by position * theta^(-2i/dim) / scale."""
    x = np.array(x, np.float64)
    dim = rotary_dim or x.shape[-1]
    angle = np.asarray(positions, np.float64)[:, None] * theta ** (-2 * np.arange(dim // 2) / dim) / scale
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = (x[..., 0:dim:2], x[..., 1:dim:2]) if interleave else (x[..., :dim // 2], x[..., dim // 2:dim])
    a, b = a * cos - b * sin, b * cos + a * sin
    if interleave:
        x[..., 0:dim:2], x[..., 1:dim:2] = a, b
    else:
        x[..., :dim // 2], x[..., dim // 2:dim] = a, b
    return x


def attend(q, k, v, *, causal=False, window_left=-1, mask=None, cap=0.0, slopes=None, rope=None, turned=None, sinks=None, scale=None):
    """(o [rows, heads, dim_v], lse [rows, heads] in base 2) in float64. slopes: FlashInfer's bias, slope * (key - row index). turned: what rounds turned queries and
    keys, where a kernel does (docs/numerics.md)."""
    q, k, v = (numbers(x) for x in (q, k, v))
    rows, heads, dim = q.shape
    keys, group = k.shape[0], heads // k.shape[1]
    scale = dim ** -0.5 if scale is None else scale
    if rope is not None:
        q, k = rotate(q, np.arange(rows) + keys - rows, *rope), rotate(k, np.arange(keys), *rope)
        q, k = (q, k) if turned is None else (turned(q), turned(k))
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    s = np.einsum("ihd,jhd->hij", q, k) * scale
    i, j = np.arange(rows)[:, None], np.arange(keys)[None, :]
    if cap > 0:
        s = cap * np.tanh(s / cap)
    if slopes is not None:
        s = s + np.asarray(slopes, np.float64)[:, None, None] * (j - i)
    visible = np.ones((rows, keys), bool) if mask is None else (numbers(mask) != 0).reshape(rows, keys)
    if causal and mask is None:
        visible &= j + rows <= keys + i
    if window_left >= 0:
        visible &= j + rows + window_left >= keys + i
    s = np.where(visible[None], s, -np.inf)
    m = s.max(-1, initial=-np.inf) if keys else np.full((heads, rows), -np.inf)
    if sinks is not None:
        sinks = numbers(sinks)
        m = np.maximum(m, sinks[:, None])
    with np.errstate(invalid="ignore", divide="ignore"):
        p = np.where(np.isneginf(s), 0, np.exp(s - np.where(np.isneginf(m), 0, m)[..., None]))
        total = p.sum(-1)
        if sinks is not None:
            total = total + np.exp(sinks[:, None] - m)
        o = np.einsum("hij,jhd->ihd", p, v) / np.where(total == 0, 1, total).T[..., None]
        lse = np.where(total == 0, -np.inf, np.where(np.isneginf(m), 0, m) + np.log(total)) / LN2
    return o, lse.T


def rows_of(indptr, x):
    return [x[a:b] for a, b in zip(indptr[:-1], indptr[1:])]


def attend_batch(q, qo, k, v, **options):
    """Per-request references one after another; options that are lists are per request."""
    parts = []
    for r, mine in enumerate(rows_of(qo, numbers(q))):
        parts.append(attend(mine, k[r], v[r], **{n: x[r] if isinstance(x, list) else x for n, x in options.items()}))
    return np.concatenate([o for o, _ in parts]), np.concatenate([s for _, s in parts])


def merged(states):
    """The merge of (o, lse base 2) in float64."""
    lse = np.stack([s for _, s in states]).astype(np.float64) * LN2
    m = lse.max(0)
    with np.errstate(invalid="ignore"):
        w = np.where(np.isneginf(lse), 0, np.exp(lse - np.where(np.isneginf(m), 0, m)))
    total = w.sum(0)
    o = sum(wi[..., None] * np.asarray(o, np.float64) for wi, (o, _) in zip(w, states)) / np.where(total == 0, 1, total)[..., None]
    with np.errstate(divide="ignore"):
        return o, np.where(total == 0, -np.inf, m + np.log(total)) / LN2


# ---- arrays ----


class NumpyLib:
    name, device = "numpy", "cpu"

    def dtype(self, word):
        if word in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            return getattr(pytest.importorskip("ml_dtypes"), word)
        return np.dtype(word)

    def array(self, x, word="float32"):
        return np.asarray(x).astype(self.dtype(word))

    def ints(self, x):
        return np.asarray(x, np.int32)

    host_ints = ints

    def bools(self, x):
        return np.asarray(x, bool)

    def same(self, x):
        """A NumPy array as it is."""
        return x

    def workspace(self):
        return np.zeros(1 << 16, np.uint8)

    def is_mine(self, x):
        return isinstance(x, np.ndarray)


class TorchLib:
    name = "torch"

    def __init__(self, device="cpu"):
        import torch

        self.torch, self.device = torch, "cuda:0" if device == "cuda" else device

    def dtype(self, word):
        return getattr(self.torch, word)

    def same(self, x):
        """A NumPy array as a tensor of its type."""
        return self.torch.from_numpy(np.array(x)).to(self.device)

    def array(self, x, word="float32"):
        return self.same(np.array(x, np.float32)).to(self.dtype(word))

    def ints(self, x):
        return self.same(np.asarray(x, np.int32))

    def host_ints(self, x):
        return self.torch.from_numpy(np.array(x, np.int32))

    def bools(self, x):
        return self.same(np.asarray(x, bool))

    def workspace(self):
        return self.torch.zeros(1 << 16, dtype=self.torch.uint8, device=self.device)

    def is_mine(self, x):
        return isinstance(x, self.torch.Tensor) and x.device == self.torch.device(self.device)


def numbers(x):
    """float64 NumPy of any array."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().double().numpy()
    return np.asarray(x).astype(np.float64)


TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def close(made, wanted, word="float32"):
    """Outputs within what the element type rounds to; exact zeros and infinities stay."""
    made, wanted = numbers(made), np.asarray(wanted, np.float64)
    assert made.shape == wanted.shape
    assert not np.isnan(made).any()
    assert (np.isneginf(made) == np.isneginf(wanted)).all()
    with np.errstate(invalid="ignore"):
        error = np.where(np.isneginf(wanted), 0, np.abs(made - wanted) / (1 + np.abs(wanted)))
    assert error.max(initial=0) <= TOLERANCE[word], error.max()


def lse_close(made, wanted):
    close(made, wanted, "float32")


# ---- pages ----


class Pages:
    """Keys and values of a batch in shuffled pages with NaN wherever no key lies, page 0 owned by nobody."""

    def __init__(self, rng, lengths, heads, dim, page_size, *, dim_v=None, layout="NHD", combined=True, word="float32", lib=None, spare=3, amp=1.0):
        self.lengths, self.page_size, self.layout = list(lengths), page_size, layout
        dim_v = dim_v or dim
        counts = [-(-n // page_size) for n in lengths]
        self.indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        self.pool = int(self.indptr[-1]) + spare
        self.ids = (rng.permutation(self.pool - 1)[:self.indptr[-1]] + 1).astype(np.int32)
        self.last = np.array([0 if n == 0 else (n - 1) % page_size + 1 for n in lengths], np.int32)
        self.k = [rng.standard_normal((n, heads, dim)) * amp for n in lengths]
        self.v = [rng.standard_normal((n, heads, dim_v)) * amp for n in lengths]
        k, v = np.full((self.pool, page_size, heads, dim), np.nan), np.full((self.pool, page_size, heads, dim_v), np.nan)
        for r, n in enumerate(lengths):
            for t in range(n):
                page = self.ids[self.indptr[r] + t // page_size]
                k[page, t % page_size], v[page, t % page_size] = self.k[r][t], self.v[r][t]
        if layout == "HND":
            k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        if combined and dim == dim_v:
            self.cache = lib.array(np.stack((k, v), 1), word)
        else:
            self.cache = (lib.array(k, word), lib.array(v, word))
        self.k = [numbers(lib.array(x, word)) for x in self.k]
        self.v = [numbers(lib.array(x, word)) for x in self.v]


def libs(device):
    """Names of what the fixture `lib` goes through: on a GPU its tensors alone, the rest does not change there."""
    if device.startswith("cuda"):
        return [device]
    return ["numpy", pytest.param("torch", marks=pytest.mark.skipif(not HAVE_TORCH, reason="torch is not installed"))]


def make_lib(name):
    return NumpyLib() if name == "numpy" else TorchLib("cpu" if name == "torch" else name)
