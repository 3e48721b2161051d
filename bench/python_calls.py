#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""python_calls.py -- what Python adds to a call, and an engine's step, as rows of bench/results.csv.

    PYTHONPATH=build/python python bench/python_calls.py [--device cpu|cuda] [--what run,plan,step] [--goal N]

  run    Plan.run with four torch tensors of one tiny step, and the same call made in C (through the module's __tvm_ffi_fv_run with arguments made before, less the
         cost of ctypes, which is that of a call that does nothing): the difference is Python's
  plan   a decode step of 256 requests from host tensors: foveal.Batch and Plan.update; foveal.flashinfer's plan() and run(); FlashInfer's on a GPU where its package
         is installed: it compiles at its first use (FLASHINFER_WORKSPACE_BASE names where), and a reason is printed where it cannot
  step   transformers' continuous batching of a Llama-shaped model with random weights (bf16 layers of an 8B model on a GPU) under paged|foveal and paged|sdpa:
         generated tokens a second, a step, and the part of it that is attention

Times are the host's: the best of many short rounds, the ways taking turns. Wants an idle machine: the load is printed on standard error."""

import argparse
import ctypes
import datetime
import importlib.util
import os
import platform
import subprocess
import sys
import time

import torch

import foveal


def best(call, count, seconds=0.3):
    """Seconds of one call on the host: the least mean of `count` at once. So few that a GPU's queue takes them without a wait; what they started is done before the next."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    call()
    least, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        wait()
        started = time.perf_counter()
        for _ in range(count):
            call()
        least = min(least, (time.perf_counter() - started) / count)
    wait()
    return least


def in_turn(ways, count):
    """{name: best} of several calls, taking turns."""
    times = dict.fromkeys(ways, float("inf"))
    for _ in range(3):
        for name, call in ways.items():
            times[name] = min(times[name], best(call, count))
    return times


class Rows:
    def __init__(self, device, goal):
        self.name = torch.cuda.get_device_name(0) if device == "cuda" else cpu_name()
        self.goal = goal
        self.commit = os.environ.get("COMMIT", "")
        try:
            self.commit = self.commit or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            pass

    def add(self, case, unit, ours, peer="", peer_value="", bound=""):
        peer_value = f"{peer_value:.3f}" if isinstance(peer_value, float) else peer_value
        print(f"{datetime.date.today()},{self.commit},{self.name},{self.goal},{case} (bench/python_calls.py),{unit},{ours:.3f},{peer},{peer_value},{bound}", flush=True)


def cpu_name():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


# ---- a call in C ----


class Any(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("small", ctypes.c_uint32), ("value", ctypes.c_int64)]


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


class Library:
    """The module's functions for tvm-ffi, called with ctypes. Keeps what arguments point to."""

    def __init__(self):
        self.library = ctypes.CDLL(foveal.get_library())
        self.keep = []

    def argument(self, x):
        if x is None:
            return Any(0, 0, 0)
        if isinstance(x, int):
            return Any(1, 0, x)
        if isinstance(x, float):
            return Any(3, 0, int.from_bytes(bytes(ctypes.c_double(x)), sys.byteorder, signed=True))
        if isinstance(x, str):
            text = ctypes.create_string_buffer(x.encode())
            self.keep.append(text)
            return Any(8, 0, ctypes.addressof(text))
        code, bits = {torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16), torch.int32: (0, 32), torch.int64: (0, 64)}[x.dtype]
        shape, strides = ((ctypes.c_int64 * x.dim())(*axes) for axes in (x.shape, x.stride()))
        tensor = DLTensor(x.data_ptr(), 2 if x.is_cuda else 1, x.get_device() if x.is_cuda else 0, x.dim(), code, bits, 1, shape, strides, 0)
        self.keep += [x, shape, strides, tensor]
        return Any(7, 0, ctypes.addressof(tensor))

    def prepare(self, name, *given):
        """A call of no arguments that returns the function's integer."""
        function = getattr(self.library, "__tvm_ffi_" + name)
        function.restype = ctypes.c_int
        args, result = (Any * len(given))(*map(self.argument, given)), Any(0, 0, 0)
        self.keep.append(args)
        at, to, count = ctypes.addressof(args), ctypes.addressof(result), len(given)
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p]

        def call():
            return function(None, at, count, to)

        call.result = result
        return call

    def call(self, name, *given):
        made = self.prepare(name, *given)
        if made() != 0:
            raise RuntimeError(f"{name} failed")
        return made.result.value


def bench_run(rows, device):
    where = "cuda:0" if device == "cuda" else "cpu"
    dtype, word = (torch.bfloat16, "bf16")
    q, k, v, o = (torch.zeros(1, 1, 16, dtype=dtype, device=where) for _ in range(4))
    context = foveal.Context(where)
    plan = foveal.Plan(context, foveal.Problem(word, num_q_heads=1, dim_qk=16), max_requests=1, max_rows=1, max_kv_tokens=16)
    plan.update(foveal.Batch(kv_indptr=[0, 1]), stream=q)
    library = Library()
    handle = library.call("fv_open", where)
    inner = library.call("fv_plan_create", handle, word, None, None, None, 1, 1, 16, 16, 0.0, None, 1, 1, 16)
    library.call("fv_plan_update", inner, None, None, torch.tensor([0, 1], dtype=torch.int32))
    in_c, nothing = library.prepare("fv_run", inner, q, k, v, o), library.prepare("fv_abi", inner, q, k, v, o)
    if in_c() != 0:
        raise RuntimeError("fv_run failed")
    times = in_turn({"python": lambda: plan.run(q, k, v, o), "c": in_c, "nothing": nothing}, 200)
    c = times["c"] - times["nothing"]
    rows.add("Plan.run over fv_run one row", "us", (times["python"] - c) * 1e6, "fv_run in C", c * 1e6, 2)


def bench_plan(rows, device):
    n, page = 256, 16
    where = "cuda:0" if device == "cuda" else "cpu"
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(128, 4096, (n,), generator=g)
    indptr = torch.nn.functional.pad(((lengths + page - 1) // page).cumsum(0), (1, 0)).int()
    ids = torch.randperm(int(indptr[-1]), generator=g).int()
    last = ((lengths - 1) % page + 1).int()
    lengths = lengths.int()
    pool = len(ids)
    context = foveal.Context(where)
    plan = foveal.Plan(context, foveal.Problem("bf16", num_q_heads=32, num_kv_heads=8, dim_qk=128), max_requests=n, max_rows=n, max_kv_tokens=n * 4096,
                       max_pages=pool)
    pages = ids if device == "cpu" else (ids, ids.to(where))
    stream = None if device == "cpu" else torch.zeros(1, device=where)

    def update():
        plan.update(foveal.Batch(lengths=lengths, page_size=page, num_pages=pool, page_indptr=indptr, page_ids=pages), stream=stream)

    import foveal.flashinfer as ours

    dtype = torch.bfloat16
    q, out = (torch.zeros(n, 32, 128, dtype=dtype, device=where) for _ in range(2))
    cache = torch.zeros(pool if device == "cuda" else 1, 2, page, 8, 128, dtype=dtype, device=where).expand(pool, 2, page, 8, 128)

    def ways_of(library):
        """(plan, run) of the wrapper, ready."""
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(128 << 20, dtype=torch.uint8, device=where), use_tensor_cores=True)
        table = indptr, ids.to(where), last

        def plan():
            wrapper.plan(*table, 32, 8, 128, page, q_data_type=dtype, kv_data_type=dtype)

        def run():
            wrapper.run(q, cache, out=out)

        for call in (plan, run, plan, run):         # the first run shows the cache's size
            call()
        return plan, run

    mine, theirs = ways_of(ours), None
    if device == "cuda" and importlib.util.find_spec("flashinfer"):
        try:
            import flashinfer
            theirs = ways_of(flashinfer)
        except Exception as e:      # noqa: BLE001  whatever stops its compiler
            print(f"flashinfer: {type(e).__name__}: {str(e)[-500:]}", file=sys.stderr)
    ways = {"foveal": update, "wrapper": mine[0]} | ({"flashinfer": theirs[0]} if theirs else {})
    times = in_turn(ways, 1)
    peer = ("flashinfer", times["flashinfer"] * 1e6) if theirs else ("", "")
    rows.add("Batch and Plan.update decode b256 page 16", "us", times["foveal"] * 1e6, *peer, 30)
    rows.add("BatchDecodeWithPagedKVCacheWrapper.plan decode b256 page 16", "us", times["wrapper"] * 1e6, *peer)
    if device == "cuda":        # on a CPU a run is the attention itself
        times = in_turn({"wrapper": mine[1]} | ({"flashinfer": theirs[1]} if theirs else {}), 20)
        peer = ("flashinfer", times["flashinfer"] * 1e6) if theirs else ("", "")
        rows.add("BatchDecodeWithPagedKVCacheWrapper.run host time decode b256 page 16", "us", times["wrapper"] * 1e6, *peer)


# ---- an engine's step ----

# hidden, intermediate, layers, heads, kv heads, dim, requests, prompt, tokens: a few layers of an 8B model, and something that a CPU does in seconds
SHAPES = {"cuda": (4096, 14336, 4, 32, 8, 128, 32, 512, 64), "cpu": (256, 512, 2, 8, 2, 32, 8, 96, 16)}


class Watch:
    """What an attention function takes, call by call: on a GPU between two events of its stream, so that nothing waits."""

    def __init__(self, function, device):
        self.function, self.device, self.calls = function, device, []

    def now(self):
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __call__(self, module, query, *args, **kwargs):
        started = self.now()
        made = self.function(module, query, *args, **kwargs)
        self.calls.append((query.shape[2], started, self.now()))
        return made

    def spent(self, layers, requests):
        """(milliseconds of attention a step, of a step that only decodes, steps)."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        calls = [(rows, (b - a) * 1e3 if self.device == "cpu" else a.elapsed_time(b)) for rows, a, b in self.calls]
        decode = [x for rows, x in calls if rows <= requests]
        return sum(x for _, x in calls) / len(calls) * layers, sum(decode) / max(len(decode), 1) * layers, len(calls) // layers


def bench_step(rows, device):
    import transformers
    from transformers import ContinuousBatchingConfig
    from transformers.integrations.sdpa_paged import sdpa_attention_paged_forward

    import foveal.transformers

    hidden, inner, layers, heads, kv_heads, dim, requests, prompt, tokens = SHAPES[device]
    foveal.transformers.register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=4096, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
                                      num_key_value_heads=kv_heads, head_dim=dim, max_position_embeddings=4096)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    prompts = torch.randint(3, 4096, (requests, prompt)).tolist()
    blocks = 2 * requests * -(-(prompt + tokens) // 32)
    options = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    names = {"paged|foveal": foveal.transformers.foveal_paged_attention, "paged|sdpa": sdpa_attention_paged_forward}

    def run(name, watch):
        """(seconds, attention a step, of a decode step, steps, tokens)."""
        transformers.AttentionInterface.register(name, watch)
        model.set_attn_implementation(name)
        started = time.perf_counter()
        made = model.generate_batch(prompts, generation_config=options, continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=blocks, block_size=32, max_batch_tokens=512, use_cuda_graph=False, use_async_batching=False), warmup=False)
        seconds = time.perf_counter() - started
        transformers.AttentionInterface.register(name, names[name])
        by_prompt = sorted(made.items(), key=lambda item: int(item[0].rsplit("_", 1)[-1]))
        return seconds, *watch.spent(layers, requests), [x.generated_tokens for _, x in by_prompt]

    runs = {name: [] for name in names}
    for _ in range(3):                          # the first of each compiles
        for name, function in names.items():
            runs[name].append(run(name, Watch(function, device)))
    seconds, every, decode = ({name: min(x[i] for x in made) for name, made in runs.items()} for i in range(3))
    steps = {name: made[0][3] for name, made in runs.items()}
    shape = f"{heads}/{kv_heads} d{dim} x {layers} layers b{requests} {prompt} + {tokens} tokens"

    def add(what, unit, values):
        rows.add(f"generate_batch Llama {shape}: {what}", unit, values["paged|foveal"], "paged|sdpa", values["paged|sdpa"])

    add("throughput", "tokens/s", {name: requests * tokens / x for name, x in seconds.items()})
    add("a step", "ms", {name: x / steps[name] * 1e3 for name, x in seconds.items()})
    add("attention of a step", "ms", every)
    add("attention of a decode step", "ms", decode)
    for what, values in (("a step's attention", every), ("a decode step's attention", decode)):
        rows.add(f"generate_batch Llama {shape}: {what} times faster than paged|sdpa", "x", values["paged|sdpa"] / values["paged|foveal"], bound=1.5)
    same = sum(a == b for a, b in zip(runs["paged|foveal"][-1][-1], runs["paged|sdpa"][-1][-1]))
    print(f"{same} of {requests} requests have the same tokens; {steps['paged|foveal']} steps, {steps['paged|sdpa']} with paged|sdpa", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--what", default="run,plan,step")
    parser.add_argument("--goal", default="0", help="the number of the goal that the rows belong to")
    given = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs", file=sys.stderr)
    rows = Rows(given.device, given.goal)
    print("date,commit,device,goal,case,unit,ours,peer,peer_value,bound")
    for what in given.what.split(","):
        {"run": bench_run, "plan": bench_plan, "step": bench_step}[what](rows, given.device)


if __name__ == "__main__":
    main()
