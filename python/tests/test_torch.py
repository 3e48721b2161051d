# SPDX-License-Identifier: Apache-2.0
"""foveal.torch: the operators in eager mode, under torch.compile, in CUDA graphs.

    pytest python/tests/test_torch.py [--device cuda] [--slow]"""

import shutil
import threading
import weakref

import numpy as np
import pytest

import foveal
from reference import attend, merged, rotate

torch = pytest.importorskip("torch")
pytest.importorskip("torch", minversion="2.10")

import foveal.torch as ft  # noqa: E402

LIMITS = dict(max_requests=4, max_rows=32, max_kv_tokens=256, max_pages=64)


def draw(device, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def ints(device, x, dtype=torch.int32):
    return torch.tensor(x, dtype=dtype, device=device)


def on(device, x):
    """Integers for a batch: (host, device) on a GPU."""
    host = np.array(x, np.int32)
    return host if device.type == "cpu" else (host, torch.from_numpy(host).to(device))


def paged_batch(device, rows=(0, 3, 4), lengths=(9, 6), ids=(4, 0, 6, 1, 5)):
    counts = [-(-n // 4) for n in lengths]
    return foveal.Batch(rows=list(rows), lengths=list(lengths), page_size=4, num_pages=7, page_indptr=np.cumsum([0] + counts).astype(np.int32),
                        page_ids=on(device, ids[:sum(counts)]))


@pytest.fixture
def plan(device):
    problem = foveal.Problem("f32", num_q_heads=4, num_kv_heads=2, dim_qk=16, variants=["causal"])
    made = ft.Plan(device, problem, **LIMITS)
    made.update(paged_batch(device))
    yield made
    made.close()


@pytest.fixture
def tensors(device):
    return draw(device, 4, 4, 16), draw(device, 7, 4, 2, 16), draw(device, 7, 4, 2, 16) + 1


def expected(q, k, v, rows=(0, 3, 4), lengths=(9, 6), ids=(4, 0, 6, 1, 5), **options):
    """(o, lse natural) of paged_batch, in float64."""
    q, k, v = (x.double().cpu().numpy() for x in (q, k, v))
    made, at = [], 0
    for r, n in enumerate(lengths):
        pages = list(ids[at:at + -(-n // 4)])
        at += len(pages)
        keys, values = (x[pages].reshape(-1, *x.shape[2:])[:n] for x in (k, v))
        made.append(attend(q[rows[r]:rows[r + 1]], keys, values, causal=True, **options))
    return np.concatenate([o for o, _ in made]), np.concatenate([s for _, s in made]) * np.log(2)


def near(made, wanted, tolerance=2e-5):
    """A GPU makes f32 products of three narrower ones."""
    tolerance = tolerance if made.device.type == "cpu" else max(tolerance, 1e-4)
    np.testing.assert_allclose(made.detach().double().cpu().numpy(), wanted, atol=tolerance)


# ---- eager ----


def test_attention(device, plan, tensors):
    out, lse = ft.attention(plan, *tensors, return_lse=True)
    want, want_lse = expected(*tensors)
    near(out, want)
    near(lse, want_lse)
    given = torch.empty_like(out)
    assert ft.attention(plan, *tensors, out=given) is given
    near(given, want)
    near(plan.plan.stats()["num_rows"] * torch.ones(1), 4)


def test_ragged_views(device):
    """q, k and v are slices of one packed tensor."""
    plan = ft.Plan(device, foveal.Problem("f32", num_q_heads=4, num_kv_heads=2, dim_qk=16), **LIMITS)
    plan.update(foveal.Batch(rows=[0, 3, 7], kv_indptr=[0, 3, 7]))
    q, k, v = draw(device, 7, 8, 16).split([4, 2, 2], 1)
    out = ft.attention(plan, q, k, v)
    for a, b in ((0, 3), (3, 7)):
        near(out[a:b], attend(*(x[a:b].double().cpu().numpy() for x in (q, k, v)))[0])


def test_run_arguments(device, tensors):
    """Sinks and scales as tensors; slopes of ALiBi, whose bias counts from the key's position here."""
    q, k, v = tensors
    sinks = draw(device, 4)
    plan = ft.Plan(device, foveal.Problem("f32", num_q_heads=4, num_kv_heads=2, dim_qk=16, variants=["causal", "sink"], k_scale="tensor", v_scale="head"), **LIMITS)
    plan.update(paged_batch(device))
    v_scale = torch.tensor([0.5, 2.0], device=device)
    out = ft.attention(plan, q, k, v, sinks=sinks, k_scale=torch.tensor([0.75], device=device), v_scale=v_scale)
    near(out, expected(q, 0.75 * k, v * v_scale[None, None, :, None], sinks=sinks.cpu())[0])


def test_latent(device):
    """Values inside of the keys and a tail in a tensor of its own: no v."""
    plan = ft.Plan(device, foveal.Problem("f32", num_q_heads=4, num_kv_heads=1, dim_qk=24, dim_v=16, qk_tail=8, v_in_k=True), **LIMITS)
    plan.update(foveal.Batch(rows=[0, 2], kv_indptr=[0, 5]))
    q, k, q_tail, k_tail = draw(device, 2, 4, 16), draw(device, 5, 1, 16), draw(device, 2, 4, 8), draw(device, 5, 1, 8)
    out = ft.attention(plan, q, k, q_tail=q_tail, k_tail=k_tail)
    whole = [torch.cat(x, -1).double().cpu().numpy() for x in ((q, q_tail), (k, k_tail))]
    near(out, attend(*whole, k.double().cpu().numpy())[0])


@pytest.mark.parametrize("width", [torch.int32, torch.int64])
def test_append_merge_rope(device, width):
    k, v, new_k, new_v = torch.zeros(3, 4, 2, 8, device=device), torch.zeros(3, 4, 2, 8, device=device), draw(device, 3, 2, 8), draw(device, 3, 2, 8) + 1
    ft.append_kv(new_k, new_v, k, v, ints(device, [7, -1, 0], width))
    assert (k.flatten(0, 1)[[7, 0]] == new_k[[0, 2]]).all() and (v.flatten(0, 1)[[7, 0]] == new_v[[0, 2]]).all()
    assert int((k != 0).any(-1).any(-1).sum()) == 2
    a, b, sa, sb = draw(device, 5, 2, 8), draw(device, 5, 2, 8) * 2, draw(device, 5, 2), draw(device, 5, 2) - 1
    for base2 in (False, True):
        o, lse = ft.merge_state(a, sa, b, sb, base2=base2)
        unit = 1 if base2 else np.log2(np.e)
        want, want_lse = merged([(x.double().cpu().numpy(), s.double().cpu().numpy() * unit) for x, s in ((a, sa), (b, sb))])
        near(o, want)
        near(lse, want_lse / unit)
    at = [0, 5, 2, 9, 1]
    near(ft.rope(a, ints(device, at, width), interleaved=True), rotate(a.cpu().numpy(), at, interleave=True))
    near(ft.rope(a, ints(device, at, width), rotary_dim=4, base=500.0), rotate(a.cpu().numpy(), at, theta=500.0, rotary_dim=4))
    in_place = a.clone()
    assert ft.rope(in_place, ints(device, at, width), out=in_place) is in_place


def test_refusals(device, plan, tensors):
    q, k, v = tensors
    op = torch.ops.foveal.attention
    with pytest.raises(RuntimeError, match="no handle of a plan"):
        op(plan.handle + (1 << 32), q, k, v, torch.empty_like(q))
    with pytest.raises(RuntimeError, match="element type"):
        ft.attention(plan, q.double(), k, v)
    with pytest.raises(RuntimeError, match="extent 3; expected 4"):
        ft.attention(plan, q[:, :3], k, v)
    with pytest.raises(RuntimeError, match="rope.*position"):
        ft.rope(q, ints(device, [1, 2]))
    with pytest.raises(RuntimeError, match="one axis"):
        ft.append_kv(q, q, k, v, ints(device, [[0]]))
    with pytest.raises(TypeError, match="foveal.Plan"):
        foveal._foveal._torch_handle("plan")
    empty = ft.Plan(device, plan.problem, **LIMITS)
    with pytest.raises(RuntimeError, match="step|update"):
        ft.attention(empty, q, k, v)
    empty.close()
    with pytest.raises(RuntimeError, match="no handle of a plan"):
        ft.attention(empty, q, k, v)


def test_nothing_is_kept(device, plan):
    """The kernels give back every tensor, optional ones and those of a call that failed included."""
    q, k, v = draw(device, 4, 4, 16), draw(device, 7, 4, 2, 16), draw(device, 7, 4, 2, 16)
    lse, sinks = torch.empty(4, 4, device=device), draw(device, 4)
    ft.attention(plan, q, k, v, lse=lse, return_lse=True)
    with pytest.raises(RuntimeError, match="sinks"):
        ft.attention(plan, q, k, v, sinks=sinks)
    ft.merge_state(q, lse, q, lse)
    seen = [weakref.ref(x) for x in (q, k, v, lse, sinks)]
    del q, k, v, lse, sinks
    assert [x() for x in seen] == [None] * 5


def test_handles_are_not_reused(device, plan, tensors):
    """A plan in the place of a closed one has another handle."""
    first = ft.Plan(device, plan.problem, **LIMITS)
    handle = first.handle
    del first
    second = ft.Plan(device, plan.problem, **LIMITS)
    second.update(paged_batch(device))
    assert second.handle != handle and second.handle & 0xFFFFFFFF == handle & 0xFFFFFFFF
    with pytest.raises(RuntimeError, match="no handle"):
        torch.ops.foveal.attention(handle, *tensors, torch.empty_like(tensors[0]))


def test_threads(device, plan, tensors):
    """A plan of its own in each thread, at once."""
    want, bad = expected(*tensors)[0], []

    def work():
        mine = ft.Plan(device, plan.problem, **LIMITS)
        mine.update(paged_batch(device))
        for _ in range(20):
            if not np.allclose(ft.attention(mine, *tensors).cpu().numpy(), want, atol=2e-5):
                bad.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert bad == []


# ---- compiled ----


def test_opcheck(device, plan, tensors):
    q, k, v = tensors
    ops, check = torch.ops.foveal, torch.library.opcheck
    check(ops.attention.default, (plan.handle, q, k, v, torch.zeros_like(q), torch.zeros(4, 4, device=device)))
    check(ops.attention.default, (plan.handle, q, k, v, torch.zeros_like(q)))
    check(ops.append_kv.default, (q[:, :2].contiguous(), q[:, 2:].contiguous(), k.clone(), v.clone(), ints(device, [3, 0, -1, 9])))
    check(ops.merge_state.default, (q, q[..., 0].contiguous(), q + 1, q[..., 1].contiguous(), torch.zeros_like(q), torch.zeros(4, 4, device=device), True))
    check(ops.rope.default, (q, ints(device, [0, 1, 2, 3]), torch.zeros_like(q), 16))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(request, device, plan, tensors, backend):
    """A layer in one graph: rotate, write, attend, with what surrounds it. The next step takes another plan update and no new compilation."""
    from torch._dynamo.testing import CompileCounterWithBackend

    if backend == "inductor" and not (request.config.getoption("--slow") and shutil.which("g++")):
        pytest.skip("needs --slow and a C++ compiler: half a minute")
    counter = CompileCounterWithBackend(backend)
    _, k, v = tensors

    def layer(plan, x, weight, k, v, positions, slots):
        q, new_k, new_v = (x @ weight).unflatten(-1, (8, 16)).split([4, 2, 2], 1)
        q, new_k = ft.rope(q.contiguous(), positions), ft.rope(new_k.contiguous(), positions)
        ft.append_kv(new_k, new_v.contiguous(), k, v, slots)
        out, lse = ft.attention(plan, q, k, v, return_lse=True)
        return torch.relu(out) + 1, lse * 2

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    weight = draw(device, 12, 128)
    for step, (rows, lengths, ids) in enumerate([((0, 3, 4), (9, 6), (4, 0, 6, 1, 5)), ((0, 1, 4), (5, 11), (2, 3, 6, 0, 1))]):
        plan.update(paged_batch(device, rows, lengths, ids))
        x, positions, slots = draw(device, 4, 12) + step, ints(device, [3, 4, 5, 6]), ints(device, [17, 1, 25, -1])
        caches = [x.clone() for x in (k, v)], [x.clone() for x in (k, v)]
        wanted, made = layer(plan, x, weight, *caches[0], positions, slots), compiled(plan, x, weight, *caches[1], positions, slots)
        for a, b in zip((*wanted, *caches[0]), (*made, *caches[1])):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        q = ft.rope((x @ weight).unflatten(-1, (8, 16))[:, :4].contiguous(), positions)
        near(made[0], np.maximum(expected(q, *caches[1], rows, lengths, ids)[0], 0) + 1, 1e-4)
    assert counter.frame_count == 1


def test_export(device, plan, tensors):
    """torch.export keeps the operator and the handle."""
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return ft.attention(plan, q * 2, k, v)

    program = torch.export.export(Layer(), tensors)
    assert any(node.target is torch.ops.foveal.attention.default or "foveal" in str(node.target) for node in program.graph.nodes)
    near(program.module()(*tensors), expected(tensors[0] * 2, *tensors[1:])[0])


# ---- graphs ----


def test_cuda_graph(device, plan, tensors):
    """Captured once, replayed for another step: the update is outside, the addresses stay."""
    if device.type != "cuda":
        pytest.skip("needs --device cuda")
    q, k, v = tensors
    out, slots = torch.empty_like(q), ints(device, [17, 1, 25, -1])
    new = draw(device, 4, 2, 16)

    def layer():
        ft.append_kv(new, new, k, v, slots)
        ft.attention(plan, q, k, v, out=out)

    layer()                                     # compiles what is missing
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    for rows, lengths, ids in [((0, 3, 4), (9, 6), (4, 0, 6, 1, 5)), ((0, 1, 4), (5, 11), (2, 3, 6, 0, 1))]:
        plan.update(paged_batch(device, rows, lengths, ids))
        q.add_(1)
        graph.replay()
        near(out, expected(q, k, v, rows, lengths, ids)[0])


# ---- FlashInfer's wrappers inside of compiled code ----


def wrapped(device, rng, kind):
    """(a function of one step that calls a wrapper's run, its tensors, a function that plans another step)."""
    import foveal.flashinfer as flashinfer
    from reference import Pages, make_lib

    place = torch.zeros(64, dtype=torch.uint8, device=device)
    rows = torch.tensor([0, 2, 5], dtype=torch.int32)
    if kind == "ragged":
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(place)
        plans = [lambda: wrapper.plan(rows, torch.tensor(x, dtype=torch.int32), 4, 2, 16, causal=True, q_data_type=torch.float32) for x in ([0, 4, 9], [0, 5, 9])]
        return lambda q, k, v: wrapper.run(q, k, v, return_lse=True), (draw(device, 5, 4, 16), draw(device, 9, 2, 16), draw(device, 9, 2, 16) + 1), plans
    pages = [Pages(np.random.default_rng(3), lengths, 2, 16, 4, lib=make_lib("torch")) for lengths in ([9, 6], [5, 7])]
    caches = [x.cache.to(device) for x in pages]
    table = [[torch.from_numpy(y).to(device) for y in (x.indptr, x.ids, x.last)] for x in pages]
    cache = caches[0].nan_to_num(0)
    if kind == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(place)
        plans = [lambda t=t: wrapper.plan(*t, 4, 2, 16, 4, q_data_type=torch.float32, window_left=5, logits_soft_cap=9.0) for t in table]
        return lambda q, c: wrapper.run(q, c, k_scale=0.5), (draw(device, 2, 4, 16), cache), plans
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(place)
    plans = [lambda t=t: wrapper.plan(rows, *t, 4, 2, 16, 4, causal=True, q_data_type=torch.float32) for t in table]
    return lambda q, c, s: wrapper.run(q, c, return_lse=True, sinks=s), (draw(device, 5, 4, 16), cache, draw(device, 4)), plans


@pytest.mark.parametrize("kind", ["decode", "prefill", "ragged"])
def test_wrappers_compile(device, rng, kind):
    """run() is one operator of the graph; a plan between its runs does not compile again."""
    from torch._dynamo.testing import CompileCounterWithBackend

    run, given, plans = wrapped(device, rng, kind)
    counter = CompileCounterWithBackend("aot_eager")

    def step(*x):
        made = run(*x)
        return [2 * y for y in (made if isinstance(made, tuple) else (made,))]

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    plans[0]()
    run(*given)                                 # what a run brings for the first time (scales, sinks) makes the plan again
    for plan_step in plans:
        plan_step()
        for a, b in zip(compiled(*given), step(*given)):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 1


def test_options_of_a_run_compile(device):
    """A run's own options, once it has run eagerly, and a run of what was planned after it."""
    import foveal.flashinfer as flashinfer

    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=device)
    place, cache, d, sink = torch.zeros(64, dtype=torch.uint8, device=device), draw(device, 8, 2, 4, 2, 16), draw(device, 2, 4, 16), draw(device, 4)
    k, table = draw(device, 9, 2, 16), (ints(0, 1, 3), ints(2, 0, 1), ints(3, 2), 4, 2, 16, 4)
    sinks, pod = flashinfer.BatchDecodeWithAttentionSinkWrapper(place), flashinfer.PODWithPagedKVCacheWrapper(place)
    for wrapper in (sinks, pod):
        wrapper.plan(*table, q_data_type=torch.float32)
    for run, plain in ((lambda d: sinks.run(d, cache, sink, 0.7), lambda d: sinks.run(d, cache, sink)),
                       (lambda d: pod.run(d, k, k, d, cache, sm_scale_d=0.7)[1], lambda d: pod.run(d, k, k, d, cache)[1])):
        before, want = plain(d), run(d)
        torch.testing.assert_close(torch.compile(run, backend="aot_eager", fullgraph=True)(d), want)
        assert torch.equal(plain(d), before) and not torch.equal(before, want)


def test_wrappers_compile_once_for_any_rows(device):
    """Steps of other sizes that fit the plan run in the graph of the second size; a wrong one is refused by the operator."""
    import foveal.flashinfer as flashinfer
    from torch._dynamo.testing import CompileCounter

    ints = lambda x: torch.as_tensor(x, dtype=torch.int32, device=device)
    cache = draw(device, 8, 2, 4, 2, 16)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(64, dtype=torch.uint8, device=device))
    counter = CompileCounter()
    compiled = torch.compile(lambda q: wrapper.run(q, cache) * 2, backend=counter, fullgraph=True)

    def plan(n):
        wrapper.plan(ints(range(n + 1)), ints(range(n)), ints([3] * n), 4, 2, 16, 4, q_data_type=torch.float32)
        return draw(device, n, 4, 16)

    wrapper.run(plan(8), cache)
    for n in (8, 3, 5, 7, 2, 8):
        q = plan(n)
        assert torch.equal(compiled(q), wrapper.run(q, cache) * 2)
    assert counter.frame_count == 2
    with pytest.raises(RuntimeError, match="3"):
        compiled(draw(device, 3, 4, 16))


def test_singles_and_pod_compile(device):
    """Functions of one request are one operator, of any length, with what they return as in eager mode; PODs are two."""
    import foveal.flashinfer as flashinfer
    from torch._dynamo.testing import CompileCounter

    k, v = draw(device, 9, 2, 16), draw(device, 9, 2, 16)
    mask = torch.ones(5, 9, dtype=torch.bool, device=device).tril(3)
    calls = [lambda q: flashinfer.single_prefill_with_kv_cache(q, k[:q.shape[0] + 1], v[:q.shape[0] + 1], causal=True, logits_soft_cap=9.0),
             lambda q: flashinfer.single_prefill_with_kv_cache_return_lse(q, k, v, k_scale=0.5, sm_scale=0.3)[1],
             lambda q: flashinfer.single_decode_with_kv_cache(q[0], k, v, window_left=3, v_scale=2.0)]
    for call in calls:
        counter = CompileCounter()
        compiled = torch.compile(lambda q: call(q) * 2, backend=counter, fullgraph=True)
        for rows in (5, 3, 7, 4, 5):
            q = draw(device, rows, 4, 16)
            torch.testing.assert_close(compiled(q), call(q) * 2)
        assert counter.frame_count <= 2
    masked = torch.compile(lambda q: flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask) * 2, backend="aot_eager", fullgraph=True)
    q = draw(device, 5, 4, 16)
    torch.testing.assert_close(masked(q), flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask) * 2)
    ints = lambda x: torch.as_tensor(x, dtype=torch.int32, device=device)
    cache, wrapper = draw(device, 8, 2, 4, 2, 16), flashinfer.PODWithPagedKVCacheWrapper(torch.zeros(64, dtype=torch.uint8, device=device))
    wrapper.plan(ints([0, 1, 3]), ints([2, 0, 1]), ints([3, 2]), 4, 2, 16, 4, q_data_type=torch.float32)
    d = draw(device, 2, 4, 16)
    wrapper.run(q, k, v, d, cache, causal_p=True)
    pod = torch.compile(lambda q, d: [2 * x for x in wrapper.run(q, k, v, d, cache, causal_p=True)], backend="aot_eager", fullgraph=True)
    for made, want in zip(pod(q, d), wrapper.run(q, k, v, d, cache, causal_p=True)):
        torch.testing.assert_close(made, 2 * want)


def test_functions_that_plan_in_each_call_break_graphs(device):
    """torch.compile calls them between its graphs; fullgraph=True refuses them."""
    import foveal.flashinfer as flashinfer

    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=device)
    q, k, rows, keys = draw(device, 5, 4, 16), draw(device, 9, 2, 16), ints(0, 2, 5), ints(0, 4, 9)
    step = lambda q: flashinfer.fmha_varlen(q * 2, k, k, rows, keys)[0] * 2
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(step, backend="aot_eager", fullgraph=True)(q)
    torch.testing.assert_close(torch.compile(step, backend="aot_eager")(q), step(q))


def test_companions_compile(device):
    import foveal.flashinfer as flashinfer

    weight, angles = draw(device, 32), draw(device, 8, 16)

    def layer(x, at):
        x = flashinfer.silu_and_mul(flashinfer.rmsnorm(x, weight).repeat(1, 2)) + flashinfer.gemma_rmsnorm(x, weight)
        residual = x.clone()
        flashinfer.fused_add_rmsnorm(x, residual, weight)
        q, k = flashinfer.apply_rope_with_cos_sin_cache(at, x, residual, 16, angles)
        narrow = torch.empty(2, *x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        flashinfer.rmsnorm_quant(narrow[0], x, weight, 0.5)
        flashinfer.fused_add_rmsnorm_quant(narrow[1], x, residual, weight, weight[:1].abs())
        return q * 2 + k + flashinfer.gelu_tanh_and_mul(torch.cat([x, residual], -1)) + narrow[0].float() + narrow[1].float()

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for rows in (3, 4, 5):
        x, at = draw(device, rows, 32), torch.arange(rows, device=device)
        torch.testing.assert_close(compiled(x, at), layer(x, at))


def test_functions_compile(device):
    """Norms, states, appends, positions, filters and samples are operators: the graph has no break, and gives what the functions give. Generators move as they do."""
    pytest.importorskip("numpy")
    import foveal.flashinfer as f

    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=device)
    q, k, s = draw(device, 5, 4, 64).half(), draw(device, 5, 2, 64).half(), draw(device, 5, 4)
    wide = torch.ones(64, device=device)
    probs, ks, ps = torch.softmax(draw(device, 3, 50), -1), ints(3, 4, 5), torch.tensor([0.2, 0.5, 0.9], device=device)
    keep = torch.tensor([1, 0, 1, 0, 1], dtype=torch.bool, device=device)
    seed, offset = torch.tensor([7], device=device), torch.tensor([9], device=device)

    def in_place(call, *tensors):
        copies = [x.clone() for x in tensors]
        call(*copies)
        return copies

    cases = [
        lambda: f.layernorm(draw_like(q), wide, wide), lambda: f.merge_state(q, s, q, s + 1), lambda: f.merge_states(torch.stack((q, q), 1), torch.stack((s, s), 1)),
        lambda: in_place(lambda v, t: f.merge_state_in_place(v, t, q, s), q, s), lambda: in_place(lambda v, t: f.merge_state_in_place(v, t, q, s, mask=keep), q, s),
        lambda: in_place(lambda cache: f.append_paged_kv_cache(k, k, ints(0, 0, 0, 1, -1), ints(6, 7, 8, 0, 0), cache, ints(2, 0, 3), ints(0, 2, 3), ints(1, 1)),
                         torch.zeros(4, 2, 8, 2, 64, dtype=torch.float16, device=device)),
        lambda: in_place(lambda a, b: f.append_paged_mla_kv_cache(k[:, 0], k[:, 1, :32], ints(0, 0, 0, 1, -1), ints(6, 7, 8, 0, 0), a, b, ints(2, 0, 3), ints(0, 2, 3),
                                                                  ints(1, 1)), torch.zeros(4, 8, 64, dtype=torch.float16, device=device),
                         torch.zeros(4, 8, 32, dtype=torch.float16, device=device)),
        lambda: f.apply_rope(q, k, ints(0, 2, 5), ints(3, 9), interleave=True), lambda: in_place(lambda a, b: f.apply_rope_pos_ids_inplace(a, b, ints(5, 1, 2, 3, 4)), q, k),
        lambda: f.apply_llama31_rope_pos_ids(q, k, ints(5, 1, 2, 3, 4), rotary_dim=32), lambda: f.softmax(probs, temperature=0.7), lambda: f.softmax(probs, ps),
        lambda: f.top_p_renorm_probs(probs, ps), lambda: f.top_k_renorm_probs(probs, 4), lambda: f.top_k_mask_logits(probs, ks),
        lambda: f.sampling_from_probs(probs), lambda: f.sampling_from_probs(probs, indices=ints(2, 0, 1, 1).long(), return_valid=True),
        lambda: f.sampling_from_logits(probs, seed=seed, offset=offset), lambda: f.top_p_sampling_from_probs(probs, ps), lambda: f.top_k_sampling_from_probs(probs, 7),
        lambda: f.min_p_sampling_from_probs(probs, 0.1, seed=3, offset=5), lambda: f.top_k_top_p_sampling_from_probs(probs, 5, 0.4),
        lambda: f.top_k_top_p_sampling_from_probs(probs, ks, ps, filter_apply_order="joint"), lambda: f.top_k_top_p_sampling_from_logits(probs, ks, 0.4),
        lambda: f.chain_speculative_sampling(probs[None, :2], ints(1, 2)[None], probs[None]),
        lambda: torch.stack([f.sampling_from_probs(probs) for _ in range(8)]),          # equal calls stay several
    ]
    for i, call in enumerate(cases):
        torch._dynamo.reset()
        made = []
        for run in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
            torch.manual_seed(11)
            made.append(torch.utils._pytree.tree_leaves(run()))
        for a, b in zip(*made, strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype, f"case {i}"
    assert len({tuple(row) for row in made[1][0].tolist()}) > 1


def draw_like(x):
    return x[:, 0].float()
