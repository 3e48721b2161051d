# SPDX-License-Identifier: Apache-2.0
"""The functions that tvm-ffi hosts load, called through apache-tvm-ffi."""

import ctypes

import numpy as np
import pytest

import foveal
from reference import attend

tvm_ffi = pytest.importorskip("tvm_ffi")


@pytest.fixture(scope="module")
def module():
    return tvm_ffi.load_module(foveal.get_library())


@pytest.fixture
def context(module):
    handle = module.fv_open("cpu")
    yield handle
    module.fv_close(handle)


def tensors(*arrays):
    return [tvm_ffi.from_dlpack(x) for x in arrays]


def draw(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def test_abi(module):
    assert module.fv_abi() == foveal.ABI_VERSION


@pytest.mark.parametrize("variants,cap,left", [("causal", 0, -1), ("causal, window(left=5) softcap(cap=20.5)", 20.5, 5)])
def test_paged_attention(module, context, rng, variants, cap, left):
    """Two requests over pages of 4, against the definition."""
    rows, lengths, indptr, ids = (np.array(x, np.int32) for x in ([0, 3, 4], [9, 6], [0, 3, 5], [4, 0, 6, 1, 5]))
    q, k, v = draw(rng, 4, 4, 16), draw(rng, 7, 4, 2, 16), draw(rng, 7, 4, 2, 16)
    o, lse = np.zeros((4, 4, 16), np.float32), np.zeros((4, 4), np.float32)
    plan = module.fv_plan_create(context, "f32", None, None, None, 4, 2, 16, 0, 0.0, variants, 2, 8, 64, 16)
    module.fv_plan_update(plan, *tensors(rows, lengths), None, 4, 7, *tensors(indptr, ids))
    module.fv_run(plan, *tensors(q, k, v, o, lse))
    for r in range(2):
        pages = ids[indptr[r]:indptr[r + 1]]
        keys, values = (x[pages].reshape(-1, 2, 16)[:lengths[r]] for x in (k, v))
        mine = slice(rows[r], rows[r + 1])
        want, want_lse = attend(q[mine], keys, values, causal=True, window_left=left, cap=cap)
        np.testing.assert_allclose(o[mine], want, atol=2e-5)
        np.testing.assert_allclose(lse[mine] * np.log2(np.e), want_lse, atol=2e-5)
    with pytest.raises(Exception, match="rows"):                          # whatever an update fails of, the plan holds no step
        module.fv_plan_update(plan, 7, *tensors(lengths), None, 4, 7, *tensors(indptr, ids))
    with pytest.raises(Exception, match="holds no step"):
        module.fv_run(plan, *tensors(q, k, v, o, lse))
    module.fv_plan_destroy(plan)


def test_run_arguments_and_merge(module, context, rng):
    """A number by name; two halves of the keys merge to the whole."""
    q, k, v = draw(rng, 2, 2, 8), draw(rng, 10, 2, 8), draw(rng, 10, 2, 8)
    plan = module.fv_plan_create(context, "f32", "f32", "f32", "f32", 2, 2, 8, 8, 0.5, "sink", 2, 2, 64)
    sinks = np.array([0.25, -1], np.float32)

    def run(first, last, s):
        o, lse = np.zeros((2, 2, 8), np.float32), np.zeros((2, 2), np.float32)
        indptr = np.array([0, last - first, last - first], np.int32)      # the second request has no keys
        module.fv_plan_update(plan, None, None, *tensors(indptr))
        module.fv_run(plan, *tensors(q, k[first:last], v[first:last], o, lse), "sinks", *tensors(s))
        return o, lse

    none = np.full(2, -np.inf, np.float32)
    whole, a, b = run(0, 10, sinks), run(0, 4, sinks), run(4, 10, none)
    o, lse = np.zeros_like(whole[0]), np.zeros_like(whole[1])
    module.fv_merge(context, *tensors(*a, *b, o, lse))
    np.testing.assert_allclose(o[0], whole[0][0], atol=1e-5)
    np.testing.assert_allclose(lse[0], whole[1][0], atol=1e-5)
    assert (whole[0][1] == 0).all() and np.allclose(whole[1][1], sinks)
    module.fv_plan_destroy(plan)


def test_append_and_rope(module, context, rng):
    new_k, new_v = draw(rng, 3, 2, 8), draw(rng, 3, 2, 8)
    k, v = np.zeros((4, 2, 2, 8), np.float32), np.zeros((4, 2, 2, 8), np.float32)
    slots = np.array([5, -1, 0], np.int64)
    module.fv_append(context, *tensors(new_k, new_v, k, v, slots))
    assert (k.reshape(8, 2, 8)[[5, 0]] == new_k[[0, 2]]).all() and (v.reshape(8, 2, 8)[[5, 0]] == new_v[[0, 2]]).all()
    assert np.count_nonzero(k.any((2, 3))) == 2
    y = np.zeros_like(new_k)
    module.fv_rope(context, *tensors(new_k, np.array([0, 3, 7], np.int32), y), 8, False, 1e4)
    angle = np.array([0, 3, 7])[:, None, None] * 1e4 ** (-np.arange(4) / 4)
    want = np.concatenate([new_k[..., :4] * np.cos(angle) - new_k[..., 4:] * np.sin(angle), new_k[..., 4:] * np.cos(angle) + new_k[..., :4] * np.sin(angle)], -1)
    np.testing.assert_allclose(y, want, atol=1e-5)


def test_refusals(module, context, rng):
    """Handles that are stale, of another kind or invented, and arguments of the wrong type."""
    other = module.fv_open("cpu")
    module.fv_close(other)
    for handle in (other, 0, -1, 1 << 60):
        with pytest.raises(ValueError, match="no handle of a context"):
            module.fv_close(handle)
    with pytest.raises(ValueError, match="no handle of a plan"):
        module.fv_run(context, None, None, None, None, None)
    with pytest.raises(ValueError, match="argument 0, context, must be a handle"):
        module.fv_close("cpu")
    with pytest.raises(ValueError, match="is not"):
        module.fv_plan_create(context, "f32", None, None, None, 1, 1, 8, 0, 0.0, "window(left=x)", 1, 1, 8)
    with pytest.raises(ValueError, match="f99"):
        module.fv_plan_create(context, "f99", None, None, None, 1, 1, 8, 0, 0.0, "", 1, 1, 8)
    plan = module.fv_plan_create(context, "f32", None, None, None, 1, 1, 8, 0, 0.0, "", 1, 1, 8)
    with pytest.raises(RuntimeError, match="plans"):
        module.fv_close(context)
    with pytest.raises(ValueError, match="rows"):
        module.fv_plan_update(plan, *tensors(draw(rng, 2)))
    module.fv_plan_destroy(plan)


def test_symbols_without_a_host():
    """The functions are there for dlsym whether tvm-ffi is loaded or not."""
    library = ctypes.CDLL(foveal.get_library())
    for name in ("abi", "open", "close", "plan_create", "plan_update", "run", "plan_destroy", "append", "merge", "rope"):
        assert hasattr(library, f"__tvm_ffi_fv_{name}")
