# SPDX-License-Identifier: Apache-2.0
"""foveal.transformers against the library's own attention: random models made from a configuration, no download.

    pytest python/tests/test_transformers.py                    on the CPU
    pytest python/tests/test_transformers.py --device cuda      the same on a GPU"""

import importlib.util
import inspect

import numpy as np
import pytest

from reference import attend

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

import foveal.transformers as ft  # noqa: E402

ft.register()


class Module(torch.nn.Module):
    """What an attention layer tells its attention function."""

    def __init__(self, is_causal=True):
        super().__init__()
        self.is_causal = is_causal
        self.eval()


def draw(device, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def tolerance(x):
    return 2e-5 if x.device.type == "cpu" else 1e-4         # a GPU makes f32 products of three narrower ones


def check(out, q, k, v, masks, **options):
    """out [batch, rows, heads, dim] against the definition in float64, request by request. Rows that see nothing are what they are."""
    q, k, v = (x.double().cpu().numpy().transpose(0, 2, 1, 3) for x in (q, k, v))
    for b, mask in enumerate(masks):
        want, _ = attend(q[b], k[b], v[b], mask=mask, **options)
        np.testing.assert_allclose(out[b].double().cpu().numpy(), want, atol=tolerance(out))


# ---- the function itself ----


@pytest.mark.parametrize("rows,keys", [(7, 7), (3, 11), (1, 9)])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("cap,sinks", [(None, False), (20.0, False), (None, True)])
def test_causal(device, rows, keys, window, cap, sinks):
    """Grouped heads, scaling, window, soft cap and sinks without a mask: rows are the last of the keys."""
    q, k, v = draw(device, 2, 4, rows, 16), draw(device, 2, 2, keys, 16), draw(device, 2, 2, keys, 16)
    s = torch.tensor([0.5, -1, 2, 0], device=device) if sinks else None
    out, weights = ft.foveal_attention(Module(), q, k, v, None, scaling=0.3, sliding_window=window, softcap=cap, s_aux=s)
    assert weights is None and out.shape == (2, rows, 4, 16)
    check(out, q, k, v, [None] * 2, causal=True, window_left=-1 if window is None else window - 1, cap=cap or 0, sinks=None if s is None else s.cpu(), scale=0.3)


def test_bidirectional(device):
    q, k, v = draw(device, 2, 4, 5, 16), draw(device, 2, 4, 9, 16), draw(device, 2, 4, 9, 8)
    out, _ = ft.foveal_attention(Module(is_causal=False), q, k, v, None)
    check(out, q, k, v, [None] * 2)
    out, _ = ft.foveal_attention(Module(is_causal=True), q, k, v, None, is_causal=False)
    check(out, q, k, v, [None] * 2)


@pytest.mark.parametrize("form", ["bool", "float", "heads"])
def test_dense_masks(device, form):
    q, k, v = draw(device, 2, 4, 6, 16), draw(device, 2, 2, 10, 16), draw(device, 2, 2, 10, 16)
    mask = torch.rand((2, 1, 6, 10), generator=torch.Generator().manual_seed(1)) < 0.6
    mask[0, 0, 2] = False                       # a row that sees nothing
    given = mask.to(device)
    if form == "float":
        given = torch.zeros(mask.shape, device=device).masked_fill(~given, torch.finfo(torch.float32).min)
    elif form == "heads":
        given = given.expand(2, 4, 6, 10)
    out, _ = ft.foveal_attention(Module(), q, k, v, given)
    check(out, q, k, v, mask[:, 0].numpy())
    other, _ = ft.foveal_attention(Module(), q, k, v, ~given if form == "bool" else given)        # another object, the same shape
    check(other, q, k, v, (~mask if form == "bool" else mask)[:, 0].numpy())


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_padding_masks(device, rows):
    """Keys that do not count: left, right, in between, and not at all."""
    keys = 9
    padding = torch.ones((4, keys), dtype=torch.bool)
    padding[0, :3] = False
    padding[1, 7:] = False
    padding[2, [0, 4, 5]] = False
    q, k, v = draw(device, 4, 2, rows, 16), draw(device, 4, 2, keys, 16), draw(device, 4, 2, keys, 16)
    out, _ = ft.foveal_attention(Module(), q, k, v, padding.to(device))
    causal = np.tril(np.ones((rows, keys), bool), keys - rows)
    check(out, q, k, v, [causal & p.numpy() for p in padding])


def test_a_mask_that_changes_in_place(device):
    q, k, v = draw(device, 1, 2, 3, 16), draw(device, 1, 2, 3, 16), draw(device, 1, 2, 3, 16)
    mask = torch.ones((1, 1, 3, 3), dtype=torch.bool, device=device)
    ft.foveal_attention(Module(), q, k, v, mask)
    mask[0, 0, :, 1] = False
    out, _ = ft.foveal_attention(Module(), q, k, v, mask)
    check(out, q, k, v, mask[:, 0].cpu().numpy())


def test_refusals(device):
    q = draw(device, 1, 2, 3, 16)
    with pytest.raises(NotImplementedError, match="biases"):
        ft.foveal_attention(Module(), q, q, q, torch.full((1, 1, 3, 3), 0.5, device=device))
    with pytest.raises(NotImplementedError, match="head to head"):
        ft.foveal_attention(Module(), q, q, q, torch.eye(3, dtype=torch.bool, device=device)[:2, None].expand(2, 3, 3)[None])
    with pytest.raises(NotImplementedError, match="dropout"):
        ft.foveal_attention(Module().train(), q, q, q, dropout=0.1)
    with pytest.raises(ValueError, match="generate_batch"):
        ft.foveal_paged_attention(Module(), q, q, q)
    with pytest.raises(ValueError, match="flash"):
        ft.register("flash-foveal")
    leaf = q.clone().requires_grad_()
    out, _ = ft.foveal_attention(Module(), leaf, q, q)
    with pytest.raises(NotImplementedError, match="backward"):
        out.sum().backward()


# ---- models ----

SIZES = dict(vocab_size=199, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
             max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=8),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, sliding_window=8, query_pre_attn_scalar=16, attn_logit_softcapping=5.0,
                                               tie_word_embeddings=False),
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, sliding_window=8, num_local_experts=2, num_experts_per_tok=1),
}
PEERS = {"llama": ("sdpa", "eager"), "mistral": ("sdpa", "eager"), "gemma2": ("eager",), "gpt_oss": ("eager",)}


def make_model(name, device, dtype=torch.float32):
    """Random weights, wide enough that tokens differ and ties do not happen."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.35)
            elif "sinks" in dict((id(q), n) for n, q in model.named_parameters()).get(id(p), ""):
                p.normal_(0, 1)
    return model.to(device)


def with_attention(model, name):
    model.set_attn_implementation(name)
    return model


def greedy(tokens):
    return dict(max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)


def prompts():
    g = torch.Generator().manual_seed(5)
    shared = torch.randint(3, 199, (37,), generator=g).tolist()
    own = [torch.randint(3, 199, (n,), generator=g).tolist() for n in (1, 5, 13, 30, 3)]
    return [shared + own[0], shared + own[1], own[2], own[3], shared + own[4], shared + own[1]]


@pytest.mark.parametrize("name", list(CONFIGS))
def test_logits(device, name):
    """The whole model, prefill and one step more over the cache, with a left-padded batch."""
    model = make_model(name, device)
    ids = torch.randint(3, 199, (3, 21), generator=torch.Generator().manual_seed(2)).to(device)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    nexts = ids[:, :1]

    def run(kind):
        with torch.no_grad():
            first = with_attention(model, kind)(ids, attention_mask=mask, use_cache=True)
            second = model(nexts, attention_mask=torch.cat([mask, mask[:, :1] * 0 + 1], 1), past_key_values=first.past_key_values)
        return torch.cat([first.logits, second.logits], 1)

    ours = run("foveal")
    real = torch.cat([mask, mask[:, :1] * 0 + 1], 1).bool()
    for peer in PEERS[name]:
        theirs = run(peer)
        assert (ours - theirs)[real].abs().max() <= 1e-3 * theirs[real].abs().max()


SMALL = dict(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
GROUPED = SMALL | dict(num_key_value_heads=2, head_dim=16)
OTHERS = {
    "bert": lambda t: (t.BertModel, t.BertConfig(**SMALL)),                                                         # bidirectional
    "bart": lambda t: (t.BartModel, t.BartConfig(vocab_size=99, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                                                 decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64)),     # cross attention
    "gpt2": lambda t: (t.GPT2LMHeadModel, t.GPT2Config(vocab_size=99, n_embd=64, n_layer=2, n_head=4)),
    "qwen3": lambda t: (t.Qwen3ForCausalLM, t.Qwen3Config(**GROUPED)),
    "gemma3": lambda t: (t.Gemma3ForCausalLM, t.Gemma3TextConfig(**GROUPED | dict(num_hidden_layers=6), sliding_window=5)),
    "llama4": lambda t: (t.Llama4ForCausalLM, t.Llama4TextConfig(**GROUPED | dict(num_hidden_layers=4), intermediate_size_mlp=64, num_local_experts=2,
                                                                 attention_chunk_size=5)),                          # chunks
    "deepseek": lambda t: (t.DeepseekV3ForCausalLM, t.DeepseekV3Config(
        **SMALL, num_key_value_heads=4, moe_intermediate_size=32, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, q_lora_rank=32,
        kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)),                                  # dims of K and V differ
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_other_models(device, name):
    """What other shapes of masks and heads ask of the function: the output of "eager" on a batch padded on either side."""
    try:
        kind, config = OTHERS[name](transformers)
    except AttributeError:
        pytest.skip("this transformers does not have the model")
    torch.manual_seed(1)
    model = kind(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(8)                       # so that attention is far from uniform
    model.to(device)
    ids, mask = torch.randint(5, 90, (3, 12)), torch.ones((3, 12), dtype=torch.long)
    mask[0, 8:], mask[1, :3] = 0, 0
    given = dict(input_ids=ids.to(device), attention_mask=mask.to(device)) | (dict(decoder_input_ids=ids[:, :7].to(device)) if name == "bart" else {})

    def run(attention):
        with torch.no_grad():
            return with_attention(model, attention)(**given)[0]

    wanted, made = run("eager"), run("foveal")
    real = torch.ones(wanted.shape[:2], dtype=torch.bool) if name == "bart" else mask.bool()
    assert (wanted - made)[real].abs().max() <= 1e-3 * wanted[real].abs().max()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generate(device, name, cache):
    """The same tokens from padded prompts; with a static cache, keys behind the last token do not count."""
    model = make_model(name, device)
    asked = prompts()
    width = max(map(len, asked))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in asked], device=device)
    mask = (torch.arange(width)[None] >= torch.tensor([[width - len(p)] for p in asked])).long().to(device)
    options = greedy(12) | (dict(cache_implementation="static", disable_compile=True) if cache == "static" else {})

    def run(kind):
        return with_attention(model, kind).generate(ids, attention_mask=mask, **options)[:, width:].tolist()

    wanted = run(PEERS[name][0])
    assert len(set(map(tuple, wanted))) > 3
    assert run("foveal") == wanted


# ---- continuous batching ----

HAVE_BATCHING = importlib.util.find_spec("transformers.generation.continuous_batching") is not None
batching = pytest.mark.skipif(not HAVE_BATCHING, reason="this transformers has no continuous batching")


def prefixed():
    """Whether continuous batching takes names of the form "paged|...", or "sdpa" alone."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    return "read_index" in inspect.signature(PagedAttentionCache.update).parameters


def generate_batch(model, kind, tokens=10, **config):
    """kind: foveal, sdpa."""
    from transformers import AttentionInterface, ContinuousBatchingConfig
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if model.device.type == "cpu":
        pytest.importorskip("psutil", reason="psutil is not installed: transformers counts the CPU's memory with it")
    config = dict(num_blocks=24, block_size=16, max_batch_tokens=64, use_cuda_graph=False, use_async_batching=False) | config
    options = transformers.GenerationConfig(**greedy(tokens) | dict(eos_token_id=-1))
    try:
        if prefixed():
            with_attention(model, f"paged|{kind}")
        elif not model._supports_sdpa:
            pytest.skip("this transformers batches the model under flash or eager names only")
        else:
            ft.register(replace_sdpa=kind == "foveal")
            with_attention(model, "sdpa")
        made = model.generate_batch(prompts(), generation_config=options, continuous_batching_config=ContinuousBatchingConfig(**config))
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
    by_prompt = sorted(made.items(), key=lambda item: int(item[0].rsplit("_", 1)[-1]))
    assert all(x.error is None for _, x in by_prompt)
    return [x.generated_tokens for _, x in by_prompt]


@batching
@pytest.mark.parametrize("config", [{}, dict(max_batch_tokens=24), dict(num_blocks=14), dict(allow_block_sharing=False)],
                         ids=["shared prefixes", "chunked prefill", "few blocks", "nothing shared"])
def test_generate_batch(device, config):
    """Prompts with a common prefix through the paged cache: the tokens of paged|sdpa, and of generate() one by one."""
    model = make_model("llama", device)
    ours = generate_batch(model, "foveal", **config)
    assert ours == generate_batch(model, "sdpa", **config)
    alone = [with_attention(model, "foveal").generate(torch.tensor([p], device=device), **greedy(10))[0, len(p):].tolist() for p in prompts()]
    assert ours == alone


@batching
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("tokens", [64, 24])
def test_generate_batch_with_windows(device, name, tokens):
    """Sliding layers, alone and beside full ones, with chunks that are longer and shorter than the window."""
    model = make_model(name, device)
    ours = generate_batch(model, "foveal", max_batch_tokens=tokens)
    alone = [with_attention(model, "foveal").generate(torch.tensor([p], device=device), **greedy(10))[0, len(p):].tolist() for p in prompts()]
    assert ours == alone


@batching
def test_paged_function_reads_in_place(device):
    """One layer over a cache made here: nothing is gathered, and padding at the end of a step gives zeros."""
    import types

    rows, lengths, slots = [0, 1, 2, 2], [0, 6, 13, 13], 20
    cache = types.SimpleNamespace(layer_index_to_group_indices={0: (0, 0)}, sliding_windows={0: 1}, key_cache=[draw(device, slots, 2, 16)],
                                  value_cache=[draw(device, slots, 2, 16) + 1])
    cache = _weak(cache)
    module = Module()
    module.layer_idx = 0
    read = torch.randperm(18, generator=torch.Generator().manual_seed(4))[:13].to(device)
    write = torch.stack([read[5], read[12], torch.tensor(19, device=device)])
    q, k, v = draw(device, 1, 4, 3, 16), draw(device, 1, 2, 3, 16), draw(device, 1, 2, 3, 16)
    ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in (rows, lengths)]
    out, _ = ft.foveal_paged_attention(module, q, k, v, cache=cache, cu_seq_lens_q=ints[0], cu_seq_lens_k=ints[1], read_index=[read], write_index=[write])
    assert (cache.key_cache[0][write[:2]] == k[0].transpose(0, 1)[:2]).all()
    for r in range(2):
        mine = read[lengths[r]:lengths[r + 1]]
        want, _ = attend(q[0, :, r:r + 1].transpose(0, 1).cpu(), cache.key_cache[0][mine].cpu(), cache.value_cache[0][mine].cpu(), causal=True)
        np.testing.assert_allclose(out[0, r].cpu().numpy(), want[0], atol=tolerance(out))
    assert (out[0, 2] == 0).all()


def _weak(names):
    """An object that a weak dictionary takes as its key."""
    class Cache:
        pass

    cache = Cache()
    cache.__dict__.update(vars(names))
    return cache
