# SPDX-License-Identifier: Apache-2.0
"""Times of functions, and the work and bytes of attention. Times are in milliseconds, lengths one a request."""

import random
import time as _time

import numpy as np

from .. import _arrays as arrays


def set_seed(random_seed=42):
    """Seeds Python, NumPy and torch."""
    import torch

    random.seed(random_seed)
    np.random.seed(random_seed)
    torch.manual_seed(random_seed)


def bench_gpu_time(fn, dry_run_iters=None, repeat_iters=None, dry_run_time_ms=25, repeat_time_ms=100, l2_flush=None, l2_flush_size_mb=None, l2_flush_device=None,
                   sleep_after_run=False, enable_cupti=False, use_cuda_graph=False, num_iters_within_graph=10, input_args=(), input_kwargs=None, cold_l2_cache=True,
                   **options):
    """Milliseconds of each of repeat_iters calls of fn(*input_args, **input_kwargs) after dry_run_iters: between two events of the current CUDA stream, by the
    clock where there is no GPU. Counts that are None follow from the times asked for. Other options (how upstream clears caches, uses CUPTI or graphs) change nothing."""
    import torch

    kwargs, gpu = input_kwargs or {}, torch.cuda.is_available()

    def once():
        if not gpu:
            started = _time.perf_counter()
            fn(*input_args, **kwargs)
            return (_time.perf_counter() - started) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        fn(*input_args, **kwargs)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    once()
    each = max(min(once() for _ in range(3)), 1e-3)
    for _ in range(max(1, int(dry_run_time_ms / each)) if dry_run_iters is None else dry_run_iters):
        once()
    return [once() for _ in range(max(1, int(repeat_time_ms / each)) if repeat_iters is None else repeat_iters)]


def bench_gpu_time_with_cuda_event(fn, dry_run_iters=None, repeat_iters=None, dry_run_time_ms=25, repeat_time_ms=100, *args, input_args=(), input_kwargs=None, **options):
    """bench_gpu_time."""
    return bench_gpu_time(fn, dry_run_iters, repeat_iters, dry_run_time_ms, repeat_time_ms, input_args=input_args, input_kwargs=input_kwargs)


bench_gpu_time_with_cupti = bench_gpu_time_with_cudagraph = bench_gpu_time_with_cuda_event


def _lengths(x):
    return np.asarray(arrays.to_numpy(x), np.int64).reshape(-1)


def attention_flops_with_actual_seq_lens(actual_seq_lens_q, actual_seq_lens_kv, head_dim_qk, head_dim_vo, num_qo_heads, causal):
    """Floating-point operations of both products over the (row, key) pairs that are visible."""
    rows, keys = _lengths(actual_seq_lens_q), _lengths(actual_seq_lens_kv)
    pairs = rows * keys
    if causal:          # row i of a request sees keys - rows + i + 1 keys, where that is more than none
        seen = np.minimum(rows, keys)
        pairs = seen * np.maximum(keys - rows, 0) + seen * (seen + 1) // 2
    return int(pairs.sum()) * num_qo_heads * 2 * (head_dim_qk + head_dim_vo)


def attention_flops(batch_size, qo_seqlen, kv_seqlen, head_dim_qk, head_dim_vo, num_qo_heads, causal):
    """The same for a batch of equal requests."""
    return attention_flops_with_actual_seq_lens([qo_seqlen] * batch_size, [kv_seqlen] * batch_size, head_dim_qk, head_dim_vo, num_qo_heads, causal)


def attention_tflops_per_sec_with_actual_seq_lens(actual_seq_lens_q, actual_seq_lens_kv, head_dim_qk, head_dim_vo, num_qo_heads, causal, ms):
    """Of a call that took so many milliseconds."""
    return attention_flops_with_actual_seq_lens(actual_seq_lens_q, actual_seq_lens_kv, head_dim_qk, head_dim_vo, num_qo_heads, causal) / ms / 1e9


def attention_tflops_per_sec(batch_size, qo_seqlen, kv_seqlen, head_dim_qk, head_dim_vo, num_qo_heads, causal, time):
    return attention_flops(batch_size, qo_seqlen, kv_seqlen, head_dim_qk, head_dim_vo, num_qo_heads, causal) / time / 1e9


def _bytes(dtype):
    return {"f32": 4, "f16": 2, "bf16": 2}.get(arrays.dtype_name(dtype), 1)


def attention_tb_per_sec_with_actual_seq_lens(actual_seq_lens_q, actual_seq_lens_kv, head_dim_qk, head_dim_vo, num_qo_heads, num_kv_heads, time, q_dtype="bfloat16",
                                              kv_dtype="bfloat16", o_dtype="bfloat16"):
    """Terabytes a second: queries, keys, values and outputs once each."""
    rows, keys = int(_lengths(actual_seq_lens_q).sum()), int(_lengths(actual_seq_lens_kv).sum())
    total = rows * num_qo_heads * (head_dim_qk * _bytes(q_dtype) + head_dim_vo * _bytes(o_dtype)) + keys * num_kv_heads * (head_dim_qk + head_dim_vo) * _bytes(kv_dtype)
    return total / time / 1e9


def attention_tb_per_sec(batch_size, qo_seqlen, kv_seqlen, head_dim_qk, head_dim_vo, num_qo_heads, num_kv_heads, time, q_dtype="bfloat16", kv_dtype="bfloat16",
                         o_dtype="bfloat16"):
    return attention_tb_per_sec_with_actual_seq_lens([qo_seqlen] * batch_size, [kv_seqlen] * batch_size, head_dim_qk, head_dim_vo, num_qo_heads, num_kv_heads, time,
                                                     q_dtype, kv_dtype, o_dtype)
