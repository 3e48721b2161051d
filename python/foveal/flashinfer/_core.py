# SPDX-License-Identifier: Apache-2.0
"""What the wrappers stand on: a Problem made from FlashInfer's words, and a Plan that is reused from step to step.

Nouns
  kind       what selects code: element types, heads, dims, names of variants, granularity of scales. A plan is made for one kind
  problem    a kind with its numbers (scale, window, cap). A plan takes another problem of its kind at an update
  need       what a step asks of a plan's maxima. A plan that is too small is replaced by one twice as large, so that replacing gets rare
  extras     what only run() knows (scales, sinks): they change the kind, so the first run that brings them makes the plan again

A wrapper has one Attention; in CUDA-graph mode its maxima are frozen, so that the addresses which a graph has captured stay right."""

import collections
import functools
import math
import operator
import sys
import threading

import numpy as np

from .. import Batch, Context, Plan, Problem, Tensor, Variant, _foveal
from . import _arrays as arrays
from .utils import check_arrays, check_shape_dtype_device, get_alibi_slopes, log2e, next_positive_power_of_2

# ---- contexts: one a device, for the process ----

_contexts = {}
_contexts_lock = threading.Lock()


def context_for(device):
    context = _contexts.get(device)
    if context is None:
        with _contexts_lock:
            context = _contexts.get(device)
            if context is None:
                context = _contexts[device] = Context(device)
    return context


def errors(device=None, clear=False):
    """The error word of the context that these functions use on a device: None, or a dict of the first bad thing that a kernel met in page tables, lengths or slots
    (foveal.Context.errors). device: "cpu", "cuda:N" or a torch device; None: every device used so far, the first that has one. Never blocks."""
    if device is None:
        found = [context.errors(clear) for context in list(_contexts.values())]
        return next((x for x in found if x is not None), None)
    return context_for(arrays.device_name(device)).errors(clear)


# ---- problems ----

Need = collections.namedtuple("Need", "requests rows tokens pages segments segment_rows levels", defaults=(0, 0, 0))
Mode = collections.namedtuple("Mode", "decode invariant chunk", defaults=(False, False, 0))
Extras = collections.namedtuple("Extras", "k_scale v_scale sinks", defaults=(None, None, False))
# alibi: None, or what a row's distances count from: "positions", as the engine's, or "rows", its index in the request, as FlashInfer's
Spec = collections.namedtuple(
    "Spec", "q k v o num_q_heads num_kv_heads dim_qk dim_v scale variants qk_tail v_in_k alibi", defaults=(0, False, None))

# What FlashInfer makes of ALiBi under a cap: the bias counts from a row's index, which no softmax makes up for here, and all of it is scaled once more.
_CAPPED_ALIBI = """
FV_META("cap * tanh((s + slopes[head] * (key - row)) * factor / cap)")
FV_PARAMS(
    FV_NUMBER(cap, problem, required, 5)
    FV_NUMBER(factor, problem, required, 0.125)
    FV_FLOATS(slopes, run, heads, required)
)
FV_REQUIRE(cap > 0)
FV_SCORE { return a->cap * v_tanh(v_fma(v_read(a->slopes, at.head), v_float(at.key - at.row), s) * (a->factor / a->cap)); }
"""


@functools.lru_cache(maxsize=32)
def _capped_alibi(device):
    return Variant(context_for(device), "capped_alibi", _CAPPED_ALIBI)


@functools.lru_cache(maxsize=256)
def _problem(spec, extras, device):
    variants = [name if not args else (name, dict(args)) for name, args in spec.variants]
    if spec.alibi == "rows":
        variants = [(_capped_alibi(device), {**use[1], "factor": spec.scale}) if use[0] == "capped_alibi" else use for use in variants]
    if extras.sinks:
        variants.append("sink")
    return Problem(spec.q, spec.k, spec.v, spec.o, num_q_heads=spec.num_q_heads, num_kv_heads=spec.num_kv_heads, dim_qk=spec.dim_qk,
                   dim_v=spec.dim_v, scale=spec.scale, variants=variants, k_scale=extras.k_scale, v_scale=None if spec.v_in_k else extras.v_scale,
                   qk_tail=spec.qk_tail, v_in_k=spec.v_in_k, lse_base2=True)


def _kind(spec, extras):
    """What a problem must have in common with the one a plan was made for."""
    return (spec._replace(scale=0, variants=tuple(name for name, _ in spec.variants)), extras)


_WORDS = (type(None), bool, int, float, str)


def plain_words(words):
    """FlashInfer's words with Python's numbers; they may be of any library."""
    return {name: x if type(x) in _WORDS else float(x) for name, x in words.items()}


def make_spec(*types_and_sizes, **words):
    """FlashInfer's words as a Spec, made once for each choice of them: the arguments of _spec."""
    return _spec(*types_and_sizes, **plain_words(words))


@functools.lru_cache(maxsize=256)
def _spec(q_dtype, kv_dtype, o_dtype, num_q_heads, num_kv_heads, dim_qk, dim_v, *, sm_scale=None, causal=False, window_left=-1,
              logits_soft_cap=None, pos_encoding_mode="NONE", rope_scale=None, rope_theta=None, custom_mask=False, items=False,
              ranges=False):
    """A custom mask replaces the causal one. ranges: of the keys that count (padding is what lies outside)."""
    if window_left != int(window_left):
        raise ValueError(f"window_left is {window_left}; it must be an integer, -1 for no window")
    if logits_soft_cap is not None and not math.isfinite(logits_soft_cap):
        raise ValueError(f"logits_soft_cap is {logits_soft_cap}; it must be a number, None or 0 for none")
    variants = []
    alibi = "positions" if pos_encoding_mode == "ALIBI" else None
    if pos_encoding_mode == "ROPE_LLAMA":
        variants.append(("rope", (("rotary_dim", dim_qk), ("base", 1e4 if rope_theta is None else float(rope_theta)),
                                  ("factor", 1.0 if rope_scale is None else float(rope_scale)))))
    if logits_soft_cap is not None and logits_soft_cap > 0:
        alibi = alibi and "rows"
        variants.append(("capped_alibi" if alibi else "softcap", (("cap", float(logits_soft_cap)),)))
    elif alibi:
        variants.append(("alibi", ()))
    if custom_mask:
        variants.append(("mask", ()))
    elif causal or items:
        variants.append(("causal", ()))
    if items:
        variants.append(("items", ()))
    if ranges:
        variants.append(("ranges", ()))
    if window_left >= 0:
        variants.append(("window", (("left", int(window_left)),)))
    return Spec(q_dtype, kv_dtype, kv_dtype, o_dtype, num_q_heads, num_kv_heads, dim_qk, dim_v, scale_of(sm_scale, dim_qk), tuple(variants), alibi=alibi)


def scale_of(sm_scale, dim):
    """None: 1/sqrt(dim). That is what 0 means to the library; the smallest normal 32-bit number makes every score 0 as well."""
    return 1 / math.sqrt(dim) if sm_scale is None else float(sm_scale) or 2.0**-126


def same_scale(a, b):
    """Equal as 32-bit floats, give or take the last bits: 1/sqrt(d) is written in several ways."""
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b))


# ---- plans ----


def _grown(need, old):
    grown = [max(next_positive_power_of_2(n) if n else 0, o) for n, o in zip(need[:6], old[:6])]
    return Need(*grown, max(need.levels, old.levels))


def _fits(need, limits):
    return not any(map(operator.gt, need, limits))


_FLOOR = Need(8, 8, 1024, 64)


class _Entry:
    """A plan and the step it holds. handle: by which torch operators name the plan, where foveal.torch is imported."""

    __slots__ = ("plan", "limits", "batch", "problem", "handle")

    def __init__(self, plan, limits):
        self.plan, self.limits, self.batch, self.problem = plan, limits, None, None
        self.handle = _foveal._torch_handle(plan) if "foveal.torch" in sys.modules else None

    def __del__(self):
        if getattr(self, "handle", None) is not None:
            _foveal._torch_forget(self.handle)


_MAX_ENTRIES = 4


class Attention:
    """Plans by kind, made again only when a step outgrows them."""

    def __init__(self, device):
        self.device = device
        self.context = context_for(device)
        self.entries = {}
        self.plan = None            # the one that a run uses
        self.handle = None          # and its handle
        self.frozen = None          # Need: maxima of a captured graph
        self.spec = None            # what the plan is ready for
        self.planned = None         # what a run without options of its own has
        self.extras = Extras()
        self.batch = None
        self.need = None
        self.mode = None
        self.stream = None
        self.single = None          # what prefill._single has planned
        self.told = self.key = self.problem = None      # spec, extras and mode of the step, and what they come to
        self.plain = False          # a run without scales and sinks brings no arguments

    def update(self, spec, batch, need, mode=Mode(), stream=None):
        """Plans a step."""
        self.planned = spec
        self.spec, self.batch, self.need, self.mode, self.stream = spec, batch, need, mode, stream
        self._apply()

    def with_extras(self, extras):
        """Plans the step again where a run brings something new. What a run brought once is expected of the next ones."""
        self.extras = extras
        self._apply()

    def with_spec(self, spec):
        """Plans the step again where the next run has another spec than the one before. What is refused is asked for again by the next run."""
        old, self.spec = self.spec, spec
        if spec == old:
            return
        try:
            self._apply()
        except BaseException:
            self.spec = None
            raise

    def _apply(self):
        told = self.spec, self.extras, self.mode
        if told != self.told:
            self.key, self.problem = (_kind(self.spec, self.extras), self.mode), _problem(self.spec, self.extras, self.device)
            self.plain = self.extras == Extras() and self.spec.k not in _NARROW and not self.spec.alibi
            self.told = told
        key, problem = self.key, self.problem
        entry = self.entries.get(key)
        if entry is None or not _fits(self.need, entry.limits):
            entry = self._make(key, problem, entry.limits if entry else _FLOOR)
        if entry.batch is not self.batch or entry.problem is not problem:
            told, entry.batch, entry.problem = entry.problem, None, None
            entry.plan.update(self.batch, problem=None if told is problem else problem, stream=self.stream)
            entry.batch, entry.problem = self.batch, problem
        self.plan, self.handle = entry.plan, entry.handle

    def _make(self, key, problem, old):
        mode = self.mode
        limits = self.frozen or _grown(self.need, old)
        requests, rows = limits.requests, limits.rows
        if mode.decode:
            requests = rows = max(requests, rows)
        elif requests == rows:
            rows = max(2 * rows, 2)         # equal maxima would promise one row a request
        self.entries.pop(key, None)         # frees before it allocates
        self.plan = None
        while len(self.entries) >= _MAX_ENTRIES and not self.frozen:
            self.entries.pop(next(iter(self.entries)))
        plan = Plan(self.context, problem, max_requests=requests, max_rows=rows, max_kv_tokens=limits.tokens, max_pages=limits.pages,
                    max_segments=limits.segments, max_segment_rows=limits.segment_rows, max_levels=limits.levels,
                    invariant=mode.invariant, chunk=mode.chunk)
        entry = self.entries[key] = _Entry(plan, limits._replace(requests=requests, rows=rows))
        return entry


# ---- running ----

_slopes = {}


def slopes_for(num_heads, like):
    key = (num_heads, arrays.device_of(like), arrays.torch_of(like) is not None)
    slopes = _slopes.get(key)
    if slopes is None:
        slopes = _slopes[key] = arrays.f32_vector(arrays.to_numpy(get_alibi_slopes(num_heads)), like)
    return slopes


class PerToken:
    """A float32 scale for each token and head of K or V: [pages, page, heads] or [tokens, heads]."""

    def __init__(self, scales):
        self.scales = scales

    def __mul__(self, number):
        """Times a number, where one is given."""
        return self if number is None or _plain(number) else PerToken(self.scales * number)

    __rmul__ = __mul__


def _scale_kind(scale, narrow):
    """Granularity and value of a scale of K or V. 8-bit caches always have one, so that a run with a scale does not change the plan."""
    if scale is None:
        return ("tensor", 1.0) if narrow else (None, None)
    if isinstance(scale, (float, int)):
        return ("tensor", float(scale)) if narrow or scale != 1 else (None, None)
    if isinstance(scale, PerToken):
        return "token_head", scale.scales
    return "tensor" if arrays.size_of(scale) == 1 else "head", scale


def _product(a, b):
    if a is None or b is None:
        return b if a is None else a
    return a * b


_NARROW = ("fp8_e4m3", "fp8_e5m2", "int8", "fp4_e2m1")


def _plain(scale):
    return scale is None or (type(scale) is float and scale == 1)


def run(attention, q, k, v, *, out=None, lse=None, return_lse=False, q_scale=None, k_scale=None, v_scale=None, sinks=None, args=None,
        lse_offset=None, rows=None, **tails):
    """One layer. Returns out, or (out, lse) with return_lse; a given lse is filled, asked for or not. lse_offset: alibi_offset's, where q lies, or a
    number for all rows."""
    if attention.plan is None:
        raise ValueError("run() needs a plan(): the last one was refused")
    spec = attention.spec
    if not (attention.plain and sinks is None and _plain(k_scale) and _plain(v_scale) and _plain(q_scale)):
        args = _arguments(attention, q, q_scale, k_scale, v_scale, sinks, args)
    rows = q.shape[0] if rows is None else rows
    shape = (rows, spec.num_q_heads, spec.dim_v)
    if out is None:
        out = arrays.empty(shape, spec.o, q)
    else:
        _check_output(out, shape, spec.o, q, "out")
    if lse is not None:
        _check_output(lse, shape[:2], "f32", q, "lse")
    elif return_lse:
        lse = arrays.empty(shape[:2], "f32", q)
    if is_compiled(q):
        _run_traced(attention, q, k, v, out, lse, args or {}, **tails)
    else:
        attention.plan.run(q, k, v, out, lse, args=args, **tails)
    if lse is not None and spec.alibi == "positions" and lse_offset is not None:
        if not isinstance(lse_offset, float):
            lse_offset = lse_offset[:rows, None]
        lse += lse_offset * (args["slopes"] * log2e)[None, :]
    return (out, lse) if return_lse else out


def _arguments(attention, q, q_scale, k_scale, v_scale, sinks, args):
    """What a run brings by name. Plans the step again where that is more than before."""
    spec = attention.spec
    if spec.alibi and sinks is not None:        # the bias counts from a row's index: against a sink that shows, and differs from row to row
        raise NotImplementedError("ALIBI together with sinks")
    narrow = spec.k in _NARROW
    k_kind, k_value = _scale_kind(arrays.number_or_vector(_product(arrays.number_or_vector(q_scale), arrays.number_or_vector(k_scale))), narrow)
    v_kind, v_value = (None, None) if spec.v_in_k else _scale_kind(arrays.number_or_vector(v_scale), narrow)
    extras = Extras(k_kind, v_kind, sinks is not None)
    if extras != attention.extras:
        extras = _settle(attention.extras, extras)
        if extras != attention.extras:
            attention.with_extras(extras)
        k_kind, v_kind = extras.k_scale, extras.v_scale
    given = dict(args) if args else {}
    if k_kind:
        given["k_scale"] = _scale_argument(k_kind, 1.0 if k_value is None else k_value, spec.num_kv_heads, q)
    if v_kind:
        given["v_scale"] = _scale_argument(v_kind, 1.0 if v_value is None else v_value, spec.num_kv_heads, q)
    if sinks is not None:
        given["sinks"] = arrays.f32_vector(sinks, q)
    if spec.alibi:
        given["slopes"] = slopes_for(spec.num_q_heads, q)
    return given or None


def _check_output(x, shape, name, like, what):
    if x.shape != shape or arrays.dtype_of(x) != name or not arrays.together(x, like):
        check_shape_dtype_device(x, shape, name, arrays.device_of(like), what)


def _is_traced(x):
    """torch.compile is looking: where foveal.torch is there, a run is one operator of its graph."""
    torch = arrays.torch_of(x)
    return torch is not None and torch.compiler.is_compiling()


def is_compiled(q):
    """Is torch.compile looking, with foveal.torch's operators there to be called?"""
    return "foveal.torch" in sys.modules and _is_traced(q)


def as_tensor(x, like):
    """A number as a tensor for an operator; None stays."""
    return arrays.torch_of(like).full((), x, dtype=arrays.torch_of(like).float32, device=like.device) if isinstance(x, (float, int)) else x


def rows_differ(q, wrapper):
    """Are the rows of q other than planned? In compiled code the operator asks that itself, so that one graph serves any number of rows."""
    if is_compiled(q):
        return False
    try:
        return q.shape[0] != wrapper._rows_total
    except AttributeError:
        check_arrays(q=q)
        raise


def _run_traced(attention, q, k, v, out, lse, given, q_tail=None, k_tail=None):
    torch = arrays.torch_of(q)
    if attention.handle is None:
        raise RuntimeError("import foveal.torch before the wrapper's plan() to compile its run()")
    given = {name: torch.full((1,), x, dtype=torch.float32, device=q.device) if isinstance(x, float) else x for name, x in given.items()}
    torch.ops.foveal.attention.default(attention.handle, q, k, v, out, lse, q_tail, k_tail, given.pop("k_scale", None), given.pop("v_scale", None),
                                       given.pop("sinks", None), given.pop("slopes", None))
    if given:
        raise NotImplementedError(f"{', '.join(given)} inside of torch.compile")


def _settle(old, new):
    """Keeps what earlier runs brought: a run without a scale has the scale 1 in a plan that takes one."""
    rank = {None: 0, "tensor": 1, "head": 2, "token_head": 3}
    if "token_head" in new[:2] or "token_head" in old[:2]:
        return new
    k = max((old.k_scale, new.k_scale), key=rank.get)
    v = max((old.v_scale, new.v_scale), key=rank.get)
    return Extras(k, v, new.sinks)


def _scale_argument(kind, value, heads, like):
    if kind == "token_head":
        return value
    if isinstance(value, (float, int)):
        if kind == "tensor":
            return value
        value = np.full(heads, value, np.float32)
    vector = arrays.f32_vector(value, like)
    if vector.shape[0] not in (1, heads):
        raise ValueError(f"a scale has {vector.shape[0]} entries; it is a number, or has one for each of the {heads} KV heads")
    return vector if kind == "tensor" or vector.shape[0] == heads else vector.expand(heads).contiguous()


def alibi_offset(spec, lengths, rows):
    """float32 [rows], or None: FlashInfer counts a row's distance from its index in the request, the engine from its position; the difference is the same
    for all keys of a row and only shows in the log-sum-exp. rows: offsets, or None for one a request."""
    if spec.alibi != "positions":
        return None
    lengths = np.asarray(lengths, np.int64)
    if rows is None:
        return (lengths - 1).astype(np.float32)
    counts = np.diff(rows)
    return np.repeat((lengths - counts).astype(np.float32), counts)


def running_sum(lengths, name):
    """Offsets on the host: int32 [batch + 1]."""
    return np.concatenate(([0], np.cumsum(arrays.host_ints(lengths, name).reshape(-1)))).astype(np.int32)


def paged_lengths(indptr, last_page_len, page_size):
    """Keys of each request: 0 without pages."""
    pages = indptr[1:] - indptr[:-1]
    lengths = (pages - 1) * page_size + last_page_len
    empty = pages <= 0
    if empty.any():
        lengths = np.where(empty, 0, lengths)
    return lengths


def split_mode(decode, fixed_split_size, disable_split_kv, page_size):
    """Callers that fix the split want the same bits in every batch: that is the invariant mode."""
    if fixed_split_size is not None and fixed_split_size > 0:
        chunk = -(-fixed_split_size * page_size // 64) * 64
        return Mode(decode, True, min(chunk, 1 << 20))
    return Mode(decode, bool(disable_split_kv), 0)


def check_workspace(x, name):
    """Workspaces are not needed here; what a caller gives must still be what the API asks for."""
    if x is None:
        return
    inner = x.array if isinstance(x, Tensor) else x
    address = inner.data_ptr() if arrays.torch_of(inner) is not None else inner.__array_interface__["data"][0]
    if address % 16:
        raise ValueError(f"{name} must be 16-byte aligned")


def stream_of(x):
    """What Plan.update takes to find the current stream: the tensor itself."""
    return x if getattr(x, "is_cuda", False) else None


def capture_of(x):
    """(what tells the current stream from others, whether it is being captured) where x lies. Between the graphs of torch.compile a stream is a torch.Stream,
    which has an id and no CUDA handle."""
    if stream_of(x) is None:
        return 0, False
    cuda = arrays.torch_of(x).cuda
    return cuda.current_stream(x.device).stream_id, cuda.is_current_stream_capturing()


class Pool:
    """How many pages the cache has. A plan wants to know, and only a run shows the cache: until then the table's largest id tells, later the cache of the
    last run. When the next one is another, the step is planned again, so that ids are compared with the true number."""

    __slots__ = ("seen", "planned", "guessed")

    def __init__(self):
        self.seen, self.planned, self.guessed = None, 0, True

    def plan(self, ids, used):
        """The number to plan with. From a GPU's table this waits, until a run has shown the cache."""
        self.guessed = self.seen is None
        if not self.guessed:
            self.planned = self.seen
        else:
            near = arrays.to_numpy(ids) if arrays.device_of(ids) == "cpu" else ids      # a torch reduction would start threads
            self.planned = min(max(int(near[:used].max()) + 1, 0), 2**31 - 1) if used else 0
        return self.planned

    def differs(self, pages):
        """A run's cache has so many pages: must the step be planned again?"""
        if pages == self.planned:
            self.seen = pages
            return False
        again = pages < self.planned or not self.guessed
        self.seen = pages
        if again:
            self.planned, self.guessed = pages, False
        return again


__all__ = ["Attention", "Batch", "Mode", "Need", "errors", "make_spec", "run"]
