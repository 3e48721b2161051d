# SPDX-License-Identifier: Apache-2.0
"""foveal.flashinfer in CUDA graphs: what run() does is captured once and replayed after the tensors changed in place and, where there is a plan(), after another one.

    pytest python/tests/test_graphs.py --device cuda

A case is (run, steps): run() gives the outputs; each step changes the inputs (and plans) and returns what the outputs must be, in float64. Every step runs eagerly
first, which compiles and makes the plans large enough; then the first one is captured. Without a GPU a replay is a call that may not plan, so that the cases are
checked everywhere."""

import contextlib

import numpy as np
import pytest

import foveal
import foveal.flashinfer as fi
from reference import Pages, TorchLib, attend, attend_batch, close, merged, numbers, rotate, rows_of

torch = pytest.importorskip("torch")

HEADS, KV, DIM, PAGE, POOL = 4, 2, 64, 8, 64
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


class Bench:
    """Tensors that lie still, and what is put into them."""

    def __init__(self, device, rng, word="float16", dim=DIM):
        self.lib, self.rng, self.word, self.dim = TorchLib(device.type), rng, word, dim
        self.on_gpu = device.type == "cuda"
        self.type = self.lib.dtype(word)

    def empty(self, *shape, word=None):
        return torch.zeros(shape, dtype=self.lib.dtype(word or self.word), device=self.lib.device)

    def draw(self, x, amp=1.0):
        """Fills a tensor; its numbers."""
        return self.put(x, self.rng.standard_normal(x.shape) * amp)

    def put(self, x, numpy):
        x.copy_(self.lib.same(np.asarray(numpy)))
        return numbers(x)

    def ints(self, *lists):
        return [self.lib.ints(x) for x in lists]

    def cache(self, heads=KV, dim=None, word=None):
        return self.empty(POOL, 2, PAGE, heads, dim or self.dim, word=word)

    def fill(self, cache, lengths):
        """Pages of a step, copied into the cache whose address stays."""
        word = str(cache.dtype)[6:]
        used = sum(-(-n // PAGE) for n in lengths)
        pages = Pages(self.rng, lengths, cache.shape[3], cache.shape[4], PAGE, lib=self.lib, word=word, spare=POOL - used)
        cache.copy_(pages.cache)
        return pages

    def table(self, pages):
        return self.ints(pages.indptr, pages.ids, pages.last)


def paged(b, wrapper, steps, plan, run=None, cache_word=None, **reference):
    """Wrappers over pages. steps: (row offsets, lengths), None: the queries alone change. plan(rows, pages, lengths)."""
    cache, q = b.cache(word=cache_word), b.empty(steps[0][0][-1], HEADS, b.dim)
    now = {}

    def step(given):
        def prepare():
            if given is not None:
                now["rows"], lengths = np.array(given[0]), given[1]
                now["pages"] = b.fill(cache, lengths)
                plan(now["rows"], now["pages"], lengths)
            x, pages = b.draw(q)[:now["rows"][-1]], now["pages"]
            options = {name: y(now["rows"], pages.lengths) if callable(y) and name != "turned" else y for name, y in reference.items()}
            return attend_batch(x, now["rows"], pages.k, pages.v, **options)
        return prepare

    run = run or (lambda q, cache: wrapper.run(q, cache, return_lse=True))
    return lambda: run(q[:now["rows"][-1]], cache), [step(x) for x in steps]


DECODE = [(range(4), [33, 1, 70]), None, (range(4), [100, 0, 9]), (range(4), [2, 150, 40])]
PREFILL = [([0, 11, 13, 31], [54, 2, 18]), None, ([0, 1, 20, 31], [90, 33, 11]), ([0, 4, 4, 9], [10, 3, 120])]


# ---- one wrapper after another ----


@case
def decode(b):
    w = fi.BatchDecodeWithPagedKVCacheWrapper(b.lib.workspace())
    return paged(b, w, DECODE, lambda rows, pages, lengths: w.plan(*b.table(pages), HEADS, KV, b.dim, PAGE, q_data_type=b.type))


@case
def decode_graph_mode(b):
    """Buffers of the caller's, filled by plan() and by fast_decode_plan in turn."""
    buffers = b.ints(np.zeros(4), np.zeros(POOL), np.zeros(3))
    w = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(b.lib.workspace(), *buffers, use_tensor_cores=True)
    planned = []

    def plan(rows, pages, lengths):
        table = b.table(pages)
        if len(planned) % 2:
            for buffer, x in zip(buffers, table):
                buffer[:len(x)] = x
            fi.fast_decode_plan(w, table[0], buffers[1], table[2], HEADS, KV, b.dim, PAGE, q_data_type=b.type, global_override_indptr_cpu=b.lib.host_ints(pages.indptr))
        else:
            w.plan(*table, HEADS, KV, b.dim, PAGE, q_data_type=b.type)
        planned.append(1)

    return paged(b, w, DECODE, plan)


@case
def decode_alibi(b):
    """The log-sum-exp has an offset of the step's."""
    w = fi.BatchDecodeWithPagedKVCacheWrapper(b.lib.workspace())
    return paged(b, w, DECODE, lambda rows, pages, lengths: w.plan(*b.table(pages), HEADS, KV, b.dim, PAGE, pos_encoding_mode="ALIBI", q_data_type=b.type),
                 slopes=numbers(fi.utils.get_alibi_slopes(HEADS)))


@case
def decode_window_cap(b):
    w = fi.BatchDecodeWithPagedKVCacheWrapper(b.lib.workspace())
    return paged(b, w, DECODE, lambda rows, pages, lengths: w.plan(*b.table(pages), HEADS, KV, b.dim, PAGE, window_left=20, logits_soft_cap=9.0, q_data_type=b.type),
                 window_left=20, cap=9.0)


@case
def decode_fp8(b):
    """Scales in tensors of one entry: the graph reads them."""
    w, scales = fi.BatchDecodeWithPagedKVCacheWrapper(b.lib.workspace(), use_tensor_cores=True), [b.empty(1, word="float32") for _ in range(2)]

    def plan(rows, pages, lengths):
        w.plan(*b.table(pages), HEADS, KV, b.dim, PAGE, q_data_type=b.type, kv_data_type=b.lib.dtype("float8_e4m3fn"))
        k, v = (b.put(x, b.rng.random(1) + 0.5)[0] for x in scales)
        pages.k, pages.v = [x * k for x in pages.k], [x * v for x in pages.v]

    return paged(b, w, DECODE, plan, lambda q, cache: w.run(q, cache, return_lse=True, k_scale=scales[0], v_scale=scales[1]), cache_word="float8_e4m3fn")


@case
def prefill(b):
    w = fi.BatchPrefillWithPagedKVCacheWrapper(b.lib.workspace())
    return paged(b, w, PREFILL, lambda rows, pages, lengths: w.plan(*b.ints(rows), *b.table(pages), HEADS, KV, b.dim, PAGE, causal=True, q_data_type=b.type), causal=True)


@case
def prefill_rope(b):
    w = fi.BatchPrefillWithPagedKVCacheWrapper(b.lib.workspace())
    turned = (lambda x: numbers(b.lib.array(x, b.word))) if b.on_gpu else None
    return paged(b, w, PREFILL, lambda rows, pages, lengths: w.plan(*b.ints(rows), *b.table(pages), HEADS, KV, b.dim, PAGE, causal=True, pos_encoding_mode="ROPE_LLAMA",
                                                                    q_data_type=b.type), causal=True, rope=(1e4, 1.0), turned=turned)


@case
def prefill_invariant(b):
    w = fi.BatchPrefillWithPagedKVCacheWrapper(b.lib.workspace())
    return paged(b, w, PREFILL, lambda rows, pages, lengths: w.plan(*b.ints(rows), *b.table(pages), HEADS, KV, b.dim, PAGE, causal=True, q_data_type=b.type,
                                                                    fixed_split_size=8), causal=True)


@case
def prefill_graph_mode(b):
    """All buffers, the mask's included."""
    buffers = b.ints(np.zeros(4), np.zeros(4), np.zeros(POOL), np.zeros(3))
    w = fi.BatchPrefillWithPagedKVCacheWrapper(b.lib.workspace(), "NHD", True, *buffers, b.lib.workspace(), b.lib.ints(np.zeros(4)))
    masks = []

    def plan(rows, pages, lengths):
        masks[:] = [b.rng.random((rows[r + 1] - rows[r], n)) < 0.6 for r, n in enumerate(lengths)]
        flat = b.lib.bools(np.concatenate([x.reshape(-1) for x in masks]))
        w.plan(*b.ints(rows), *b.table(pages), HEADS, KV, b.dim, PAGE, custom_mask=flat, q_data_type=b.type)

    return paged(b, w, PREFILL, plan, mask=lambda rows, lengths: list(masks))


@case
def attention(b):
    w = fi.BatchAttention(device=b.lib.device)
    return paged(b, w, PREFILL, lambda rows, pages, lengths: w.plan(*b.ints(rows, pages.indptr, pages.ids, lengths), HEADS, KV, b.dim, b.dim, PAGE, causal=True,
                                                                    q_data_type=b.type, kv_data_type=b.type), lambda q, cache: w.run(q, cache), causal=True)


@case
def attention_sinks(b):
    w = fi.BatchAttentionWithAttentionSinkWrapper(b.lib.workspace(), q_data_type=b.type, kv_data_type=b.type, head_dim_qk=b.dim, head_dim_vo=b.dim, window_left=20)
    sinks = b.empty(HEADS, word="float32")

    def plan(rows, pages, lengths):
        b.draw(sinks)
        w.plan(*b.ints(rows), *b.table(pages), HEADS, KV, b.dim, PAGE, causal=True, window_left=20, q_data_type=b.type, kv_data_type=b.type)

    return paged(b, w, PREFILL, plan, lambda q, cache: w.run(q, cache, sinks, b.dim ** -0.5, return_lse=True), causal=True, window_left=20,
                 sinks=lambda rows, lengths: numbers(sinks))


def ragged_steps(b, w, plan, **reference):
    steps = PREFILL
    most = max(sum(x[1]) for x in steps if x)
    q, k, v = b.empty(31, HEADS, b.dim), b.empty(most, KV, b.dim), b.empty(most, KV, b.dim)
    now = {}

    def step(given):
        def prepare():
            if given is not None:
                now["rows"], now["kv"] = np.array(given[0]), np.concatenate(([0], np.cumsum(given[1])))
                plan(now["rows"], now["kv"])
            x, y, z = (b.draw(t) for t in (q, k, v))
            return attend_batch(x[:now["rows"][-1]], now["rows"], rows_of(now["kv"], y), rows_of(now["kv"], z), **reference)
        return prepare

    return lambda: w.run(q[:now["rows"][-1]], k, v, return_lse=True), [step(x) for x in steps]


@case
def ragged(b):
    w = fi.BatchPrefillWithRaggedKVCacheWrapper(b.lib.workspace())
    return ragged_steps(b, w, lambda rows, kv: w.plan(*b.ints(rows, kv), HEADS, KV, b.dim, causal=True, q_data_type=b.type), causal=True)


@case
def ragged_graph_mode(b):
    w = fi.BatchPrefillWithRaggedKVCacheWrapper(b.lib.workspace(), "NHD", True, *b.ints(np.zeros(4), np.zeros(4)))
    return ragged_steps(b, w, lambda rows, kv: w.plan(*b.ints(rows, kv), HEADS, KV, b.dim, causal=True, q_data_type=b.type), causal=True)


def latent(b, w):
    heads, ckv, kpe = 6, b.empty(POOL, PAGE, 512), b.empty(POOL, PAGE, 64)
    steps = [([0, 2, 3, 8], [70, 3, 9]), None, ([0, 1, 2, 8], [5, 120, 40])]
    q_nope, q_pe, now = b.empty(8, heads, 512), b.empty(8, heads, 64), {}

    def step(given):
        def prepare():
            if given is not None:
                now["rows"], lengths = np.array(given[0]), given[1]
                pages = Pages(b.rng, lengths, 1, 576, PAGE, lib=b.lib, word=b.word, spare=POOL - sum(-(-n // PAGE) for n in lengths))
                both = pages.cache[:, 0, :, 0]
                ckv.copy_(both[..., :512])
                kpe.copy_(both[..., 512:])
                now["k"] = pages.k
                w.plan(*b.ints(now["rows"], pages.indptr, pages.ids, lengths), heads, 512, 64, PAGE, True, 0.05, b.type, b.type)
            q = np.concatenate([b.draw(x) for x in (q_nope, q_pe)], 2)
            return attend_batch(q, now["rows"], now["k"], [x[..., :512] for x in now["k"]], causal=True, scale=0.05)
        return prepare

    return lambda: w.run(q_nope, q_pe, ckv, kpe, return_lse=True), [step(x) for x in steps]


@case
def mla(b):
    return latent(b, fi.BatchMLAPagedAttentionWrapper(b.lib.workspace()))


@case
def mla_graph_mode(b):
    return latent(b, fi.BatchMLAPagedAttentionWrapper(b.lib.workspace(), True, *b.ints(np.zeros(4), np.zeros(4), np.zeros(POOL), np.zeros(3))))


@case
def pod(b):
    """A prefill request of one size beside decode requests that are planned."""
    w, q, k, v = fi.PODWithPagedKVCacheWrapper(b.lib.workspace()), b.empty(11, HEADS, b.dim), b.empty(25, KV, b.dim), b.empty(25, KV, b.dim)
    run, steps = paged(b, w, DECODE, lambda rows, pages, lengths: w.plan(*b.table(pages), HEADS, KV, b.dim, PAGE, q_data_type=b.type),
                       lambda q_d, cache: [y for x in w.run(q, k, v, q_d, cache, causal_p=True, return_lse_p=True, return_lse_d=True) for y in x])
    return run, [lambda step=step: (*attend(*(b.draw(x) for x in (q, k, v)), causal=True), *step()) for step in steps]


@case
def batch_pod(b):
    w = fi.BatchPODWithPagedKVCacheWrapper(b.lib.workspace())
    caches, q_p, q_d, now = [b.cache(), b.cache()], b.empty(31, HEADS, b.dim), b.empty(3, HEADS, b.dim), {}

    def step(one, two):
        def prepare():
            if one is not None:
                now["rows"], (first, second) = np.array(one[0]), [b.fill(cache, x[1]) for cache, x in zip(caches, (one, two))]
                now["pages"] = first, second
                w.plan(*b.ints(now["rows"]), *b.table(first), *b.ints(range(4)), *b.table(second), HEADS, KV, b.dim, PAGE, q_data_type=b.type)
            first, second = now["pages"]
            return (*attend_batch(b.draw(q_p)[:now["rows"][-1]], now["rows"], first.k, first.v, causal=True), *attend_batch(b.draw(q_d), range(4), second.k, second.v))
        return prepare

    return (lambda: [y for x in w.run(q_p[:now["rows"][-1]], caches[0], q_d, caches[1], causal_p=True, return_lse=True) for y in x],
            [step(*x) for x in zip(PREFILL, DECODE)])


def levels(b, w):
    """Two levels: one list for all rows, and one of each request."""
    steps, q, cache, now = [([30], [5, 11, 2]), None, ([60], [40, 1, 9])], b.empty(8, HEADS, b.dim), b.cache(), {}
    qo = [np.array([0, 8]), np.array([0, 3, 7, 8])]

    def step(lengths):
        def prepare():
            if lengths is not None:
                pages = now["pages"] = b.fill(cache, lengths[0] + lengths[1])
                cut = pages.indptr[1]
                w.plan([b.lib.ints(x) for x in qo], b.ints(pages.indptr[:2], pages.indptr[1:] - cut), b.ints(pages.ids[:cut], pages.ids[cut:]),
                       b.ints(pages.last[:1], pages.last[1:]), HEADS, KV, b.dim, PAGE, causal=True, q_data_type=b.type)
            x, pages = b.draw(q), now["pages"]
            return merged([attend_batch(x, qo[0], pages.k[:1], pages.v[:1]), attend_batch(x, qo[1], pages.k[1:], pages.v[1:], causal=True)])
        return prepare

    return lambda: w.run(q, cache, return_lse=True), [step(x) for x in steps]


@case
def cascade(b):
    return levels(b, fi.MultiLevelCascadeAttentionWrapper(2, b.lib.workspace()))


@case
def cascade_graph_mode(b):
    sizes = [(2, 2, POOL, 1), (4, 4, POOL, 3)]
    return levels(b, fi.MultiLevelCascadeAttentionWrapper(2, b.lib.workspace(), "NHD", True, *[b.ints(*[np.zeros(n) for n in x]) for x in zip(*sizes)]))


def behind_prefix(b, kind, steps, plan, **options):
    """The older wrappers: a prefix in tensors of its own."""
    w, k, v, now = kind(b.lib.workspace()), b.empty(30, KV, b.dim), b.empty(30, KV, b.dim), {}

    def planned(rows, pages, lengths):
        plan(w, rows, pages)
        now["k"], now["v"] = b.draw(k), b.draw(v)
        pages.k, pages.v = [np.concatenate((now["k"], x)) for x in pages.k], [np.concatenate((now["v"], x)) for x in pages.v]

    run, made = paged(b, w, steps, planned, lambda q, cache: [w.forward(q, k, v, cache, **options)], **options)
    return run, [lambda step=step: step()[:1] for step in made]


@case
def shared_prefix_decode(b):
    return behind_prefix(b, fi.BatchDecodeWithSharedPrefixPagedKVCacheWrapper, [(range(4), [33, 1, 70]), None, (range(4), [100, 0, 9])],
                         lambda w, rows, pages: w.begin_forward(*b.table(pages), HEADS, KV, b.dim, PAGE, data_type=b.type))


@case
def shared_prefix_prefill(b):
    return behind_prefix(b, fi.BatchPrefillWithSharedPrefixPagedKVCacheWrapper, [([0, 11, 13, 31], [54, 2, 18]), None, ([0, 1, 20, 31], [90, 33, 11])],
                         lambda w, rows, pages: w.begin_forward(*b.ints(rows), *b.table(pages), HEADS, KV, b.dim, PAGE, q_data_type=b.type), causal=True)


def sparse_blocks(b, R, C):
    w = fi.BlockSparseAttentionWrapper(b.lib.workspace())
    M, N = 8 * R, 12 * C
    q, k, v, now = b.empty(M, HEADS, b.dim), b.empty(N, KV, b.dim), b.empty(N, KV, b.dim), {}

    def step(share):
        def prepare():
            if share is not None:
                blocks = now["blocks"] = b.rng.random((8, 12)) < share
                blocks[3] = False
                indptr, indices = np.concatenate(([0], np.cumsum(blocks.sum(1)))), np.concatenate([np.flatnonzero(row) for row in blocks])
                w.plan(*b.ints(indptr, indices), M, N, R, C, HEADS, KV, b.dim, q_data_type=b.type, o_data_type=b.type)
            return attend(*(b.draw(x) for x in (q, k, v)), mask=np.kron(now["blocks"], np.ones((R, C), bool)))
        return prepare

    return lambda: w.run(q, k, v, return_lse=True), [step(x) for x in (0.5, None, 0.3)]


@case
def block_sparse(b):
    return sparse_blocks(b, 16, 4)


@case
def block_sparse_rows(b):
    return sparse_blocks(b, 1, 8)


@case
def variable_block_sparse(b):
    w = fi.VariableBlockSparseAttentionWrapper(b.lib.workspace())
    rows, keys = [[3, 5, 4], [1, 9, 2]], [[6, 10, 8, 0], [4, 4, 12, 4]]
    q, k, v, now = b.empty(HEADS, 12, b.dim), b.empty(2, 24, b.dim), b.empty(2, 24, b.dim), {}

    def step(plan):
        def prepare():
            if plan:
                kept = now["kept"] = b.rng.random((2, 3, 4)) < 0.5
                w.plan(b.lib.bools(kept), *b.ints(rows, keys), HEADS, 2, b.dim, q_data_type=b.type)
            x, y, z = (b.draw(t) for t in (q, k, v))
            made = [attend(x[n][:, None], y[n // 2][:, None], z[n // 2][:, None],
                           mask=np.repeat(np.repeat(now["kept"][n // 2], rows[n // 2], 0), keys[n // 2], 1)) for n in range(HEADS)]
            return np.stack([o[:, 0] for o, _ in made]), np.stack([s[:, 0] for _, s in made])
        return prepare

    return lambda: w.run(q, k, v, return_lse=True), [step(x) for x in (True, False, True)]


# ---- functions ----


@case
def single_decode(b):
    """Plans inside: the shapes are those of the call before the capture."""
    q, k, v = b.empty(HEADS, b.dim), b.empty(77, KV, b.dim), b.empty(77, KV, b.dim)

    def prepare():
        x, y, z = (b.draw(t) for t in (q, k, v))
        o, s = attend(x[None], y, z, slopes=numbers(fi.utils.get_alibi_slopes(HEADS)))
        return o[0], s[0]

    return lambda: fi.single_decode_with_kv_cache(q, k, v, pos_encoding_mode="ALIBI", return_lse=True), [prepare] * 3


@case
def single_prefill(b):
    """Two layers: a plan that a capture has taken serves the next call, too."""
    q, k, v = b.empty(19, HEADS, b.dim), b.empty(50, KV, b.dim), b.empty(50, KV, b.dim)

    def run():
        return [fi.single_prefill_with_kv_cache(q, x, y, causal=True, window_left=12) for x, y in ((k, v), (v, k))]

    def prepare():
        x, y, z = (b.draw(t) for t in (q, k, v))
        return [attend(x, *pair, causal=True, window_left=12)[0] for pair in ((y, z), (z, y))]

    return run, [prepare] * 3


@case
def append(b):
    """Rows behind requests: where they go is computed on the device."""
    cache, key, value = b.cache(), b.empty(10, KV, b.dim), b.empty(10, KV, b.dim)
    tensors = b.ints(np.zeros(4), np.zeros(4), np.zeros(12), np.zeros(3))           # rows, table

    def run():
        rows, indptr, ids, last = tensors
        batch, positions = fi.get_batch_indices_positions(rows, fi.get_seq_lens(indptr, last, PAGE), 10)
        fi.append_paged_kv_cache(key, value, batch, positions, cache, ids, indptr, last)
        return [cache]

    def step(new, lengths):
        def prepare():
            rows, pages = np.concatenate(([0], np.cumsum(new))), b.fill(cache, lengths)
            for x, y in zip(tensors, (rows, pages.indptr, np.pad(pages.ids, (0, 12))[:12], pages.last)):
                b.put(x, y)
            cache.zero_()
            wanted, values = np.zeros(cache.shape), [b.draw(x) for x in (key, value)]
            for r, n in enumerate(lengths):
                for i in range(new[r]):
                    p = n - new[r] + i
                    wanted[pages.ids[pages.indptr[r] + p // PAGE], :, p % PAGE] = np.stack([x[rows[r] + i] for x in values])
            return [wanted]
        return prepare

    return run, [step([3, 6, 1], [8, 6, 20]), step([1, 1, 8], [30, 1, 9])]


@case
def append_mla(b):
    ckv, kpe, new_ckv, new_kpe = b.empty(6, 4, 512), b.empty(6, 4, 64), b.empty(5, 512), b.empty(5, 64)
    ids, (indptr, last, batch, positions) = b.lib.ints(np.zeros(3)), b.ints([0, 2, 3], [3, 2], [0, 0, 0, 1, 1], [4, 5, 6, 0, 1])

    def run():
        fi.append_paged_mla_kv_cache(new_ckv, new_kpe, batch, positions, ckv, kpe, ids, indptr, last)
        return [ckv, kpe]

    def step(table):
        def prepare():
            b.put(ids, np.array(table, np.int32))
            wanted = []
            for x, new in ((ckv, new_ckv), (kpe, new_kpe)):
                x.zero_()
                wanted.append(np.zeros(x.shape))
                for row, slot in zip(b.draw(new), [(table[1], 0), (table[1], 1), (table[1], 2), (table[2], 0), (table[2], 1)]):
                    wanted[-1][slot] = row
            return wanted
        return prepare

    return run, [step([3, 1, 5]), step([0, 4, 2])]


@case
def merges(b):
    o, s, mask = [b.empty(6, HEADS, b.dim) for _ in range(3)], [b.empty(6, HEADS, word="float32") for _ in range(3)], b.empty(6, word="bool")
    o_all, s_all = b.empty(6, 3, HEADS, b.dim), b.empty(6, 3, HEADS, word="float32")

    def run():
        fi.merge_state_in_place(o[2], s[2], o[0], s[0], mask=mask)
        return [*fi.merge_state(o[0], s[0], o[1], s[1]), o[2], s[2], *fi.merge_states(o_all, s_all)]

    def prepare():
        states = [(b.draw(x), b.draw(y, 4)) for x, y in zip(o, s)]
        b.put(o_all, np.stack([x for x, _ in states], 1))
        b.put(s_all, np.stack([y for _, y in states], 1))
        keep = b.put(mask, b.rng.random(6) < 0.5).astype(bool)
        both = merged([states[2], states[0]])
        return [*merged(states[:2]), np.where(keep[:, None, None], both[0], states[2][0]), np.where(keep[:, None], both[1], states[2][1]), *merged(states)]

    return run, [prepare] * 3


@case
def rope(b):
    q, k, copies = b.empty(9, HEADS, b.dim), b.empty(9, KV, b.dim), [b.empty(9, HEADS, b.dim), b.empty(9, KV, b.dim)]
    positions, indptr, offsets = b.ints(np.zeros(9), np.zeros(4), np.zeros(3))
    angle = np.arange(128)[:, None] * 1e4 ** (-2 * np.arange(b.dim // 2) / b.dim)
    table = b.lib.array(np.concatenate((np.cos(angle), np.sin(angle)), 1))

    def run():
        for x, y in zip(copies, (q, k)):
            x.copy_(y)
        fi.apply_rope_pos_ids_inplace(*copies, positions, interleave=True)
        turned = fi.apply_rope_with_cos_sin_cache(positions, q.view(9, -1), k.view(9, -1), b.dim, table)
        return [*fi.apply_rope(q, k, indptr, offsets), *fi.apply_rope_pos_ids(q, k, positions, rotary_dim=32), *copies, *[x.view(9, -1, b.dim) for x in turned],
                *fi.apply_llama31_rope(q, k, indptr, offsets)]

    def step(lengths, first):
        def prepare():
            rows = np.concatenate(([0], np.cumsum(lengths)))
            at = np.concatenate([np.arange(n) + f for n, f in zip(lengths, first)] + [np.zeros(9 - rows[-1])]).astype(np.int32)
            for x, y in ((positions, at), (indptr, rows), (offsets, first)):
                b.put(x, np.array(y, np.int32))
            x = [b.draw(t) for t in (q, k)]
            base = 5e5 ** (-2 * np.arange(b.dim // 2) / b.dim)      # of Llama 3.1, of which positions this small turn the low ones by an eighth
            wave = 2 * np.pi / base
            smooth = np.clip((8192 / wave - 1) / 3, 0, 1)
            angles = at[:, None, None] * ((1 - smooth) / 8 + smooth) * base
            llama = [np.concatenate((y[..., :b.dim // 2] * np.cos(angles) - y[..., b.dim // 2:] * np.sin(angles),
                                     y[..., b.dim // 2:] * np.cos(angles) + y[..., :b.dim // 2] * np.sin(angles)), -1) for y in x]
            return [*[rotate(y, at) for y in x], *[rotate(y, at, rotary_dim=32) for y in x], *[rotate(y, at, interleave=True) for y in x],
                    *[rotate(y, at) for y in x], *llama]
        return prepare

    return run, [step([3, 4, 2], [7, 100, 0]), step([1, 0, 7], [50, 3, 90])]


@case
def norms(b):
    x, r, w, bias, gate = b.empty(9, 520), b.empty(9, 520), b.empty(520), b.empty(520, word="float32"), b.empty(520, word="float32")
    in_place = [b.empty(9, 520) for _ in range(4)]

    def run():
        for y, z in zip(in_place, (x, r, x, r)):
            y.copy_(z)
        fi.fused_add_rmsnorm(*in_place[:2], w, eps=1e-6)
        fi.gemma_fused_add_rmsnorm(*in_place[2:], w, eps=1e-6)
        return [fi.rmsnorm(x, w), fi.gemma_rmsnorm(x, w), *in_place, fi.layernorm(x, gate, bias), fi.silu_and_mul(x), fi.gelu_tanh_and_mul(x)]

    def prepare():
        y, z, u, t, g = (b.draw(each) for each in (x, r, w, bias, gate))

        def normed(v, weight):
            return v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-6) * weight

        centred = y - y.mean(-1, keepdims=True)
        a, c = y[:, :260], y[:, 260:]
        return [normed(y, u), normed(y, u + 1), normed(y + z, u), y + z, normed(y + z, u + 1), y + z, normed(centred, g) + t, a / (1 + np.exp(-a)) * c,
                a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a ** 3))) / 2 * c]

    return run, [prepare] * 2


@case
def samples(b):
    """Seed and offset in tensors; the ids are the CPU's, which test_companions.py compares with distributions."""
    x, draft, target = b.empty(16, 1000, word="float32"), b.empty(4, 2, 50, word="float32"), b.empty(4, 3, 50, word="float32")
    seed, offset, tokens = b.empty(1, word="int64"), b.empty(1, word="int64"), b.empty(4, 2, word="int32")

    def chain(x, seed, offset, tokens, draft, target):
        p = fi.softmax(x, 0.8)
        state = dict(seed=seed, offset=offset)
        return [p, fi.top_k_renorm_probs(p, 40), fi.top_p_renorm_probs(p, 0.7), fi.sampling_from_probs(p, **state), fi.sampling_from_logits(x, **state),
                fi.top_p_sampling_from_probs(p, 0.6, **state), fi.top_k_sampling_from_probs(p, 20, **state), fi.min_p_sampling_from_probs(p, 0.1, **state),
                fi.top_k_top_p_sampling_from_probs(p, 30, 0.8, **state), fi.top_k_top_p_sampling_from_logits(x, 30, 0.8, filter_apply_order="joint", **state),
                *fi.chain_speculative_sampling(draft, tokens, target, **state)]

    given = x, seed, offset, tokens, draft, target

    def prepare():
        b.draw(x, 3)
        for t in (draft, target):
            p = b.rng.random(t.shape) ** 3
            b.put(t, p / p.sum(-1, keepdims=True))
        b.put(tokens, b.rng.integers(0, 50, (4, 2)))
        for t in (seed, offset):
            b.put(t, b.rng.integers(0, 1000, 1))
        return [numbers(y) for y in chain(*(t.cpu() for t in given))]

    return lambda: chain(*given), [prepare] * 3


# ---- how they run ----


def compare(made, wanted, word):
    assert len(made) == len(wanted)
    for x, y in zip(made, wanted):
        if not x.is_floating_point():
            assert (numbers(x) == y).all()
        else:
            close(x[:len(y)], y, word)


@contextlib.contextmanager
def planned_before(monkeypatch):
    """What a graph would not do again must not happen in a run."""
    with monkeypatch.context() as patch:
        patch.setattr(fi._core.Attention, "_apply", lambda self: pytest.fail("a run plans"))
        yield


def replayed(device, monkeypatch, run, steps, word):
    for step in steps:
        wanted = step()
        compare(run(), wanted, word)
    steps[0]()
    with planned_before(monkeypatch):
        run()
        if device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                made = run()
    for step in steps + steps[:1]:
        wanted = step()
        if device.type == "cuda":
            graph.replay()
        else:
            with planned_before(monkeypatch):
                made = run()
        compare(made, wanted, word)


@pytest.mark.parametrize("name", CASES)
def test_replayed(device, monkeypatch, rng, name):
    replayed(device, monkeypatch, *CASES[name](Bench(device, rng)), "float16")


@pytest.mark.parametrize("name", ["decode_graph_mode", "prefill", "ragged"])
def test_replayed_bfloat16(device, monkeypatch, rng, name):
    replayed(device, monkeypatch, *CASES[name](Bench(device, rng, "bfloat16", 128)), "bfloat16")


# ---- what a capture must not do, and arrays in the wrong place ----


@pytest.fixture
def gpu(device):
    if device.type != "cuda":
        pytest.skip("needs --device cuda")
    return device


def refused_in_capture(call, match):
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            with pytest.raises(foveal.NotReadyError, match=match):
                call()
        finally:
            graph.capture_end()


def test_capture_refuses(gpu, rng):
    """A plan, a kernel that was not compiled and host arrays have no place in a graph: said, not half done."""
    b = Bench(gpu, rng)
    w, cache, q = fi.BatchDecodeWithPagedKVCacheWrapper(b.lib.workspace()), b.cache(), b.empty(3, HEADS, DIM)
    pages = b.fill(cache, [33, 1, 70])
    table = [b.lib.host_ints(pages.indptr), b.lib.ints(pages.ids), b.lib.host_ints(pages.last)]
    w.plan(*table, HEADS, KV, DIM, PAGE, q_data_type=b.type)
    x = b.draw(q)
    wanted = attend_batch(x, range(4), pages.k, pages.v)[0]
    close(w.run(q, cache), wanted, "float16")
    refused_in_capture(lambda: w.plan(*table, HEADS, KV, DIM, PAGE, q_data_type=b.type), "captured")
    close(w.run(q, cache), wanted, "float16")
    k, v = b.empty(21, KV, DIM), b.empty(21, KV, DIM)
    refused_in_capture(lambda: fi.single_decode_with_kv_cache(q[0], k, v), "before it")
    context = fi._core.context_for(b.lib.device)
    fi.apply_rope_pos_ids(q, q, b.lib.ints([0, 1, 2]))
    refused_in_capture(lambda: foveal.rope(context, q, [0, 1, 2], torch.empty_like(q), rotary_dim=DIM), "host")


def test_wrong_places(gpu, rng):
    """Arrays on the CPU among those of a GPU, and the other way round: the argument is named, and where it lies."""
    b = Bench(gpu, rng)
    w, cache, q = fi.BatchDecodeWithPagedKVCacheWrapper(b.lib.workspace()), b.cache(), b.empty(3, HEADS, DIM)
    pages = b.fill(cache, [33, 1, 70])
    w.plan(*b.table(pages), HEADS, KV, DIM, PAGE, q_data_type=b.type)
    out = torch.empty_like(q)
    with pytest.raises(ValueError, match="q lies on the CPU; the context is on a GPU"):
        w.run(q.cpu(), cache)
    with pytest.raises(ValueError, match="k lies on the CPU; the context is on a GPU"):
        w.run(q, cache.cpu())
    with pytest.raises(ValueError, match="Invalid device of out: expected cuda:0, got cpu"):
        w.run(q, cache, out=out.cpu())
    on_cpu = fi.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(64, dtype=torch.uint8))
    on_cpu.plan(*[x.cpu() for x in b.table(pages)], HEADS, KV, DIM, PAGE, q_data_type=b.type)
    with pytest.raises(ValueError, match="q lies on a GPU; the context is on the CPU"):
        on_cpu.run(q, cache)
    wide = b.empty(3, HEADS, 2 * DIM)[..., ::2]
    with pytest.raises(ValueError, match="tensors.q.*contiguous"):
        w.run(wide, cache)
    context = fi._core.context_for(b.lib.device)
    with pytest.raises(ValueError, match="lies on the CPU; the context is on a GPU"):
        foveal.append(context, q[:, :KV].cpu(), q[:, :KV], cache[:, 0], cache[:, 1], slots=[0, 1, 2])
    with pytest.raises(ValueError, match="lies on the CPU"):
        fi.rmsnorm(q[0], torch.ones(DIM, dtype=q.dtype))
    with pytest.raises(ValueError, match="sinks lies on the CPU"):
        plan = foveal.Plan(context, foveal.Problem("f16", num_q_heads=HEADS, num_kv_heads=KV, dim_qk=DIM, variants=["sink"]), max_requests=3, max_rows=3,
                           max_kv_tokens=1024, max_pages=POOL)
        plan.update(foveal.Batch(lengths=[33, 1, 70], page_size=PAGE, num_pages=POOL, page_indptr=pages.indptr, page_ids=pages.ids))
        plan.run(q, cache[:, 0], cache[:, 1], out, args={"sinks": torch.zeros(HEADS)})
    with pytest.raises(foveal.DeviceError, match="cuda:99"):
        foveal.Context("cuda:99")
    if torch.cuda.device_count() > 1:
        with pytest.raises(ValueError, match="q lies on cuda:1; the context is on cuda:0"):
            w.run(q.to("cuda:1"), cache)
    wanted = attend_batch(b.draw(q), range(4), pages.k, pages.v)[0]     # what was refused has left nothing behind
    close(w.run(q, cache), wanted, "float16")
