# SPDX-License-Identifier: Apache-2.0
"""Names of flashinfer.jit that scripts call before attention. There is nothing to build ahead: kernels are compiled when a plan is made and kept in a cache
(foveal.warm does it earlier). Generators of CUDA C++ modules raise NotImplementedError; a variant is a foveal.Variant."""

from . import attention, utils


def build_jit_specs(specs=(), verbose=False, **kwargs):
    """Does nothing: see above."""


def __getattr__(name):
    """gen_batch_prefill_module and the like can be imported, and refuse when called."""
    if not name.startswith("gen_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def refuse(*args, **kwargs):
        raise NotImplementedError(f"flashinfer.jit.{name}: CUDA C++ modules are not generated; see foveal.Variant")

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


__all__ = ["attention", "build_jit_specs", "utils"]
