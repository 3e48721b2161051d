# SPDX-License-Identifier: Apache-2.0
"""Torch operators: attention by a plan, append, merge and RoPE, which torch.compile traces without a break and CUDA graphs capture.

    import foveal.torch as ft
    plan = ft.Plan("cuda:0", foveal.Problem("bf16", num_q_heads=32, num_kv_heads=8, dim_qk=128, variants=["causal"]), max_requests=64, max_rows=4096,
                   max_kv_tokens=1 << 20, max_pages=1 << 16)
    plan.update(foveal.Batch(rows=..., lengths=..., page_size=16, ...))          once per step, outside of compiled code
    out = ft.attention(plan, q, k_cache, v_cache)                               once per layer, also inside of it

Operators: torch.ops.foveal.attention, append_kv, merge_state, rope. Each writes into tensors that it is given and returns nothing; the functions below make
those tensors. An operator names its plan by an integer, Plan.handle, so a compiled or captured graph stays right from step to step: plan.update changes what
the plan does, not its handle. Kernels are C functions behind torch's stable C shim, found at run time; schemas and fake kernels are defined here.

Inference only: there is no backward pass. Errors of an operator are torch's RuntimeError with the library's words."""

import threading

import torch as _torch

from . import Context
from . import Plan as _Plan
from . import _foveal

_TYPES = {"f32": _torch.float32, "f16": _torch.float16, "bf16": _torch.bfloat16}

# ---- contexts: one a device ----

_contexts = {}
_lock = threading.Lock()


def _context_of(kind, index):
    return context(kind if kind == "cpu" else f"{kind}:{index}")


def context(device):
    """The foveal.Context that operators use on a device: "cpu", "cuda:0", a torch.device."""
    device = _torch.device(device)
    name = "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"
    with _lock:
        found = _contexts.get(name)
        if found is None:
            found = _contexts[name] = Context(name)
        return found


# ---- operators ----

_library = _torch.library.Library("foveal", "DEF")
_tags = (_torch.Tag.pt2_compliant_tag, _torch.Tag.needs_fixed_stride_order)
for _schema in (
    "attention(int plan, Tensor q, Tensor k, Tensor? v, Tensor(a!) o, Tensor(b!)? lse=None, Tensor? q_tail=None, Tensor? k_tail=None, Tensor? k_scale=None, "
    "Tensor? v_scale=None, Tensor? sinks=None, Tensor? slopes=None) -> ()",
    "append_kv(Tensor new_k, Tensor new_v, Tensor(a!) k, Tensor(b!) v, Tensor slots) -> ()",
    "merge_state(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b, Tensor(a!) o, Tensor(b!)? lse, bool base2=False) -> ()",
    "rope(Tensor x, Tensor positions, Tensor(a!) y, int rotary_dim, bool interleaved=False, float base=10000.0) -> ()",
):
    _library.define(_schema, tags=_tags)
_foveal._torch_register(_context_of)


@_torch.library.register_fake("foveal::attention")
def _(plan, q, k, v, o, lse=None, q_tail=None, k_tail=None, k_scale=None, v_scale=None, sinks=None, slopes=None):
    _torch._check(q.dim() == 3 and o.dim() == 3, lambda: "foveal::attention: q and o are [rows, heads, dim]")
    _torch._check(q.shape[1] == o.shape[1], lambda: f"foveal::attention: q has {q.shape[1]} heads, o {o.shape[1]}")


@_torch.library.register_fake("foveal::append_kv")
def _(new_k, new_v, k, v, slots):
    _torch._check(slots.dim() == 1 and new_k.dim() == 3, lambda: "foveal::append_kv: slots are [rows], new_k [rows, kv_heads, dim]")


@_torch.library.register_fake("foveal::merge_state")
def _(o_a, lse_a, o_b, lse_b, o, lse, base2=False):
    _torch._check(o_a.shape == o_b.shape and o_a.shape == o.shape, lambda: "foveal::merge_state: the states and o have one shape")


@_torch.library.register_fake("foveal::rope")
def _(x, positions, y, rotary_dim, interleaved=False, base=10000.0):
    _torch._check(x.shape == y.shape, lambda: "foveal::rope: x and y have one shape")


from . import _torch_flashinfer  # noqa: E402, F401  operators that foveal.flashinfer calls where torch.compile looks

# ---- what users call ----


class Plan:
    """A foveal.Plan that operators can name.

    handle     the integer that torch.ops.foveal.attention takes; refused after close()
    update     as foveal.Plan.update; on a GPU on the current stream unless stream= says another. Not inside of compiled or captured code
    plan       the foveal.Plan: run, stats, describe"""

    def __init__(self, device, problem, **limits):
        """device: of the tensors. problem: a foveal.Problem. limits: as for foveal.Plan."""
        self.device = _torch.device(device)
        self.problem = problem
        self.plan = _Plan(context(self.device), problem, **limits)
        self.num_q_heads, self.dim_v, self.o_dtype = problem.num_q_heads, problem.dim_v, _TYPES[problem.o]
        self.handle = _foveal._torch_handle(self.plan)

    def update(self, batch, *, problem=None, stream=None):
        if stream is None and self.device.type == "cuda":
            stream = _torch.cuda.current_stream(self.device).cuda_stream
        self.plan.update(batch, problem=problem, stream=stream)

    def close(self):
        """Frees the plan. Graphs that name its handle fail from now on."""
        _foveal._torch_forget(self.handle)
        self.plan.close()

    def __del__(self):
        if hasattr(self, "handle"):
            _foveal._torch_forget(self.handle)


def attention(plan, q, k, v=None, *, out=None, lse=None, return_lse=False, q_tail=None, k_tail=None, k_scale=None, v_scale=None, sinks=None, slopes=None):
    """One layer of the plan's step: q [rows, heads, dim]; k and v [pages, page_size, kv_heads, dim], or [tokens, kv_heads, dim] where the batch is ragged; v None
    where the problem has v_in_k. Returns out [rows, heads, dim_v], and lse [rows, heads] float32 with return_lse. k_scale .. slopes: float32 tensors on the
    device, of the granularity or variant that the problem names ([1] for "tensor")."""
    if out is None:
        out = _torch.empty((q.shape[0], plan.num_q_heads, plan.dim_v), dtype=plan.o_dtype, device=q.device)
    if return_lse and lse is None:
        lse = _torch.empty((q.shape[0], plan.num_q_heads), dtype=_torch.float32, device=q.device)
    _torch.ops.foveal.attention.default(plan.handle, q, k, v, out, lse, q_tail, k_tail, k_scale, v_scale, sinks, slopes)
    return (out, lse) if return_lse else out


def append_kv(new_k, new_v, k, v, slots):
    """Writes rows new_k, new_v [rows, kv_heads, dim] into k, v ([pages, page_size, kv_heads, dim] or [tokens, kv_heads, dim]) at slots [rows] int32 or int64: page *
    page_size + offset. -1 skips a row."""
    _torch.ops.foveal.append_kv.default(new_k, new_v, k, v, slots)


def merge_state(o_a, lse_a, o_b, lse_b, *, base2=False):
    """The state over both sets of keys: o [rows, heads, dim], lse [rows, heads] float32, natural or (base2) in base 2. Returns (o, lse)."""
    o, lse = _torch.empty_like(o_a), _torch.empty_like(lse_a)
    _torch.ops.foveal.merge_state.default(o_a, lse_a, o_b, lse_b, o, lse, base2)
    return o, lse


def rope(x, positions, *, rotary_dim=None, interleaved=False, base=10000.0, out=None):
    """x [rows, heads, dim] turned at positions [rows] int32 or int64. out: where to, x itself included."""
    out = _torch.empty_like(x) if out is None else out
    _torch.ops.foveal.rope.default(x, positions, out, x.shape[-1] if rotary_dim is None else rotary_dim, interleaved, base)
    return out


__all__ = ["Plan", "append_kv", "attention", "context", "merge_state", "rope"]
