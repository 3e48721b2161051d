# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of attention import: times on a device, and counts of work."""

from .utils import (
    attention_flops,
    attention_flops_with_actual_seq_lens,
    attention_tb_per_sec,
    attention_tb_per_sec_with_actual_seq_lens,
    attention_tflops_per_sec,
    attention_tflops_per_sec_with_actual_seq_lens,
    bench_gpu_time,
    bench_gpu_time_with_cuda_event,
    bench_gpu_time_with_cudagraph,
    bench_gpu_time_with_cupti,
    set_seed,
)

__all__ = ["attention_flops", "attention_flops_with_actual_seq_lens", "attention_tb_per_sec", "attention_tb_per_sec_with_actual_seq_lens",
           "attention_tflops_per_sec", "attention_tflops_per_sec_with_actual_seq_lens", "bench_gpu_time", "bench_gpu_time_with_cuda_event", "bench_gpu_time_with_cudagraph",
           "bench_gpu_time_with_cupti", "set_seed"]
