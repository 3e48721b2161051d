# SPDX-License-Identifier: Apache-2.0
"""Generators of attention modules: refused by name. The one variant that jit_args may name is attention with sinks."""

from . import variants


def __getattr__(name):
    from .. import __getattr__ as refuser

    return refuser(name)


__all__ = ["variants"]
