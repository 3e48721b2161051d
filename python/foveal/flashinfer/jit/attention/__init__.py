# SPDX-License-Identifier: Apache-2.0
"""Generators of attention modules, as in flashinfer.jit. The one variant that jit_args may name is attention with sinks."""

from . import variants


def __getattr__(name):
    from .. import generator

    return generator(__name__, name)


__all__ = ["variants"]
