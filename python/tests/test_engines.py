# SPDX-License-Identifier: Apache-2.0
"""The plug-ins for vLLM and SGLang on stubs of the interfaces that they are written against: registration, steps of prefill and decode over a block table and a
token table, options, refusals. What is checked is the result against the definition in float64."""

import importlib
import sys
import types

import numpy as np
import pytest

from reference import attend, numbers

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("by_default")


def stub(monkeypatch, name, **members):
    """A module under this name, and packages above it."""
    for i in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:i])
        if part not in sys.modules:
            monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    for key, value in members.items():
        setattr(sys.modules[name], key, value)
    return sys.modules[name]


class Base:
    def __init__(self, *args, **kwargs):
        pass


def near(made, wanted):
    np.testing.assert_allclose(numbers(made), wanted, atol=2e-5)


def draw(*shape):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), device="cpu")
    return made.to(torch.get_default_device())


# ---- vLLM ----


@pytest.fixture
def vllm(monkeypatch):
    stub(monkeypatch, "vllm.v1.attention.backend", AttentionBackend=Base, AttentionImpl=Base, AttentionMetadataBuilder=Base,
         AttentionCGSupport=types.SimpleNamespace(NEVER=0))
    monkeypatch.delitem(sys.modules, "foveal.vllm", raising=False)
    return importlib.import_module("foveal.vllm")


def common(rows, lengths, table, slots, pad=0):
    """What vLLM hands to a builder; `pad` requests and tokens more than there are."""
    n, total = len(lengths), rows[-1]
    return types.SimpleNamespace(
        num_reqs=n, num_actual_tokens=total + pad, causal=True, query_start_loc_cpu=torch.tensor(rows + [total] * pad, dtype=torch.int32, device="cpu"),
        query_start_loc=torch.tensor(rows + [total] * pad, dtype=torch.int32), seq_lens=torch.tensor(lengths + [0] * pad, dtype=torch.int32),
        block_table_tensor=torch.tensor(table + [[0] * len(table[0])] * pad, dtype=torch.int32), slot_mapping=torch.tensor(slots + [-1] * pad))


def test_vllm_registration(monkeypatch, vllm):
    seen = {}
    backends = types.SimpleNamespace(CUSTOM="CUSTOM", CPU_ATTN="CPU_ATTN")
    stub(monkeypatch, "vllm.v1.attention.backends.registry", AttentionBackendEnum=backends, register_backend=lambda name, path: seen.update({name: path}))
    vllm.register()
    assert seen == {"CUSTOM": "foveal.vllm.FovealBackend"}
    monkeypatch.setenv("FOVEAL_VLLM_CPU", "1")
    vllm.register()
    assert seen["CPU_ATTN"] == "foveal.vllm.FovealCpuBackend"
    for path in seen.values():
        module, name = path.rsplit(".", 1)
        assert getattr(importlib.import_module(module), name).get_name() in seen
    backend = vllm.FovealBackend
    assert backend.supports_sliding_window() and not backend.supports_device_cpu_query_lens_mismatch()
    assert backend.get_kv_cache_shape(7, 4, 2, 16) == (2, 7, 4, 2, 16) and backend.supports_sink()
    assert (backend.get_impl_cls(), backend.get_builder_cls()) == (vllm.FovealImpl, vllm.FovealMetadataBuilder)
    assert vllm.FovealMetadataBuilder.get_cudagraph_support(None, None) == 0


def test_vllm_without_a_registry(monkeypatch, vllm, caplog):
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends", None)
    vllm.register()
    assert "no registry" in caplog.text


def cache_of(order):
    """A cache as vLLM gives it to a layer: of before it had orders, or [blocks, heads, block_size, k | v] over a memory of its own order."""
    if order is None:
        return torch.zeros(2, 8, 4, 2, 16)
    sizes = (8, 2, 4, 32)
    return torch.zeros([sizes[i] for i in order]).permute([order.index(i) for i in range(4)])


@pytest.mark.parametrize("order", [None, (0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
@pytest.mark.parametrize("options", [{}, dict(sliding_window=3), dict(logits_soft_cap=5.0), dict(alibi_slopes=[0.5, 0.25, 0.1, 0.05]), dict(sinks=True)])
def test_vllm_steps(device, vllm, options, order):
    """A prefill, a step that mixes, a step of decodes; two layers share a plan; padding at the end."""
    if "sinks" in options:
        options = dict(sinks=torch.tensor([0.5, -1, 2, 0]))
    builder = vllm.FovealMetadataBuilder(types.SimpleNamespace(), ["layer"], None, device)
    impls = [vllm.FovealImpl(4, 16, 0.3, 2, options.get("alibi_slopes"), options.get("sliding_window"), "auto", options.get("logits_soft_cap"), "decoder", None,
                             **({"sinks": options["sinks"]} if "sinks" in options else {})) for _ in range(2)]
    caches = [cache_of(order) for _ in impls]
    table, have = [[5, 2, 7], [1, 6, 0]], [[], []]
    for counts in ([6, 0], [1, 5], [1, 1]):
        active = [r for r in range(2) if counts[r]]
        past = [len(have[r]) for r in active]
        rows = [0] + np.cumsum([counts[r] for r in active]).tolist()
        k, v, q = draw(rows[-1] + 2, 2, 16), draw(rows[-1] + 2, 2, 16) + 1, draw(rows[-1] + 2, 4, 16)
        slots = []
        for i, r in enumerate(active):
            places = range(past[i], past[i] + counts[r])
            slots += [table[r][p // 4] * 4 + p % 4 for p in places]
            have[r] += [(k[rows[i] + j], v[rows[i] + j]) for j in range(counts[r])]
        metadata = builder.build(0, common(rows, [len(have[r]) for r in active], [table[r] for r in active], slots, pad=2))
        for impl, cache in zip(impls, caches):
            out = torch.full((rows[-1] + 2, 64), 9.0)
            assert impl.forward(None, q, k, v, cache, metadata, out) is out
            for i, r in enumerate(active):
                keys, values = (torch.stack(x) for x in zip(*have[r]))
                mine = slice(rows[i], rows[i + 1])
                slopes = options.get("alibi_slopes")
                want, _ = attend(q[mine], keys, values, causal=True, window_left=options.get("sliding_window", 0) - 1, scale=0.3,
                                 cap=options.get("logits_soft_cap", 0), slopes=slopes, sinks=options.get("sinks"))
                near(out[mine].view(-1, 4, 16), want)
            assert (out[rows[-1]:] == 9).all()
        assert len(metadata.step.planned) == 1


def test_vllm_refusals(vllm):
    with pytest.raises(NotImplementedError, match="encoder_only"):
        vllm.FovealImpl(4, 16, 1.0, attn_type="encoder_only")
    with pytest.raises(NotImplementedError, match="fp8"):
        vllm.FovealImpl(4, 16, 1.0, kv_cache_dtype="fp8")
    impl, out = vllm.FovealImpl(4, 16, 1.0), torch.zeros(2, 64)
    assert impl.forward(None, out, out, out, None, None, out) is out           # profiling
    with pytest.raises(NotImplementedError, match="quantised"):
        impl.forward(None, out, out, out, None, None, out, output_scale=torch.ones(1))


# ---- SGLang ----


@pytest.fixture
def sglang(monkeypatch):
    stub(monkeypatch, "sglang.srt.layers.attention.base_attn_backend", AttentionBackend=Base)
    monkeypatch.delitem(sys.modules, "foveal.sglang", raising=False)
    return importlib.import_module("foveal.sglang")


class Pool:
    """Token slots of one layer."""

    def __init__(self, slots):
        self.k, self.v = torch.zeros(slots, 2, 16), torch.zeros(slots, 2, 8)

    def set_kv_buffer(self, layer, where, k, v):
        self.k[where], self.v[where] = k.view(-1, 2, 16), v.view(-1, 2, 8)

    def get_key_buffer(self, layer):
        return self.k

    def get_value_buffer(self, layer):
        return self.v


def layer(**changes):
    return types.SimpleNamespace(**dict(layer_id=0, tp_q_head_num=4, tp_k_head_num=2, qk_head_dim=16, v_head_dim=8, scaling=0.25, logit_cap=0.0,
                                        sliding_window_size=-1, is_cross_attention=False, attn_type="decoder") | changes)


def mode(decode):
    return types.SimpleNamespace(is_decode=lambda: decode, is_idle=lambda: False)


def test_sglang_registration(monkeypatch, sglang):
    seen, choices = {}, []

    def decorator(name):
        return lambda factory: seen.setdefault(name, factory)

    stub(monkeypatch, "sglang.srt.layers.attention.attention_registry", register_attention_backend=decorator)
    stub(monkeypatch, "sglang.srt.server_args", add_attention_backend_choices=choices.extend)
    sglang.register()
    assert seen == {"foveal": sglang.FovealAttnBackend} and choices == ["foveal"]


@pytest.mark.parametrize("of_runner", [True, False])
@pytest.mark.parametrize("changes,sinks", [({}, None), (dict(sliding_window_size=2), None), (dict(logit_cap=5.0), None), ({}, [0.5, -1.0, 2.0, 0.0])])
def test_sglang_steps(sglang, changes, sinks, of_runner):
    """An extend with a prefix, then decodes, read through req_to_token. The pool is the runner's, or, as it was, a batch's."""
    table, runner = torch.zeros((5, 12), dtype=torch.int32), types.SimpleNamespace()
    runner.req_to_token_pool, pool = types.SimpleNamespace(req_to_token=table), Pool(40)
    if of_runner:
        runner.token_to_kv_pool = pool
    backend = sglang.FovealAttnBackend(runner)
    free, requests, have = list(np.random.default_rng(0).permutation(40)), [3, 1], [[], []]
    mine, extra = layer(**changes), {} if sinks is None else dict(sinks=torch.tensor(sinks))
    for counts in ([4, 1], [2, 3], [1, 1]):
        rows = [0] + np.cumsum(counts).tolist()
        q, k, v = draw(rows[-1], 64), draw(rows[-1], 32), draw(rows[-1], 16)
        where = []
        for i, r in enumerate(requests):
            for j in range(counts[i]):
                slot = int(free.pop())
                table[r, len(have[i])] = slot
                where.append(slot)
                have[i].append((k[rows[i] + j].view(2, 16), v[rows[i] + j].view(2, 8)))
        lengths = torch.tensor([len(x) for x in have])
        decode = counts == [1, 1]
        batch = types.SimpleNamespace(forward_mode=mode(decode), seq_lens=lengths, seq_lens_cpu=lengths.cpu(), req_pool_indices=torch.tensor(requests),
                                      extend_seq_lens=None if decode else torch.tensor(counts), extend_seq_lens_cpu=None if decode else counts,
                                      out_cache_loc=torch.tensor(where), spec_info=None, **({} if of_runner else {"token_to_kv_pool": pool}))
        backend.init_forward_metadata(batch)
        out = (backend.forward_decode if decode else backend.forward_extend)(q, k, v, mine, batch, **extra)
        assert out.shape == (rows[-1], 32)
        for i in range(2):
            keys, values = (torch.stack(x) for x in zip(*have[i]))
            want, _ = attend(q[rows[i]:rows[i + 1]].view(-1, 4, 16), keys, values, causal=True, scale=0.25, cap=changes.get("logit_cap", 0),
                             window_left=changes.get("sliding_window_size", -1), sinks=sinks)
            near(out[rows[i]:rows[i + 1]].view(-1, 4, 8), want)


def test_sglang_refusals(sglang):
    backend = sglang.FovealAttnBackend(types.SimpleNamespace(req_to_token_pool=types.SimpleNamespace(req_to_token=torch.zeros((1, 1), dtype=torch.int32))))
    hybrid = types.SimpleNamespace(req_to_token_pool=types.SimpleNamespace(req_to_token=None), token_to_kv_pool=types.SimpleNamespace(swa_layer_nums=4))
    with pytest.raises(NotImplementedError, match="--disable-hybrid-swa-memory"):
        sglang.FovealAttnBackend(hybrid)
    with pytest.raises(NotImplementedError, match="--disable-cuda-graph"):
        backend.init_cuda_graph_state(4, 4)
    with pytest.raises(NotImplementedError, match="decoder attention only"):
        backend.forward_extend(None, None, None, layer(is_cross_attention=True), None)


# ---- the engines themselves, where they are installed ----


def installed(name):
    """The module, or a skip: a package may be there without what it needs."""
    try:
        return importlib.import_module(name)
    except Exception as e:      # noqa: BLE001
        pytest.skip(f"{name}: {type(e).__name__}: {e}")


def test_installed_vllm(monkeypatch):
    registry, real = installed("vllm.v1.attention.backends.registry"), installed("vllm.v1.attention.backend")
    monkeypatch.delitem(sys.modules, "foveal.vllm", raising=False)
    plug = importlib.import_module("foveal.vllm")
    plug.register()
    backend = registry.AttentionBackendEnum.CUSTOM.get_class()
    assert backend is plug.FovealBackend and issubclass(backend, real.AttentionBackend)
    assert not any(x.__abstractmethods__ for x in (backend, backend.get_impl_cls(), backend.get_builder_cls()))
    capability = installed("vllm.platforms.interface").DeviceCapability(9, 0)
    options = dict(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, use_mla=False, has_sink=True, use_sparse=False, use_mm_prefix=False,
                   use_per_head_quant_scales=False, device_capability=capability, attn_type="decoder")
    assert backend.validate_configuration(**options, has_sliding_window=True) == []
    assert any("MLA" in x for x in backend.validate_configuration(**options | {"use_mla": True}))


def test_installed_sglang(monkeypatch):
    registry = installed("sglang.srt.layers.attention.attention_registry")
    base = installed("sglang.srt.layers.attention.base_attn_backend").AttentionBackend
    monkeypatch.delitem(sys.modules, "foveal.sglang", raising=False)
    plug = importlib.import_module("foveal.sglang")
    plug.register()
    made = registry.ATTENTION_BACKENDS["foveal"](types.SimpleNamespace(req_to_token_pool=types.SimpleNamespace(req_to_token=None)))
    assert isinstance(made, base) and not made.support_triton()
