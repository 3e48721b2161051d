# SPDX-License-Identifier: Apache-2.0
"""Names of flashinfer.jit that scripts call before attention. There is nothing to build ahead: kernels are compiled when a plan is made and kept in a cache
(foveal.warm does it earlier). So gen_..._module returns a JitSpec that builds to nothing and cannot be loaded; gen_customize_..._module, which is given CUDA C++,
raises NotImplementedError: a variant is a foveal.Variant."""

from . import attention, env, utils


class MissingJITCacheError(RuntimeError):
    """Exists for `except` clauses; nothing here raises it."""


class JitSpec:
    """What a generator returns: a name."""

    is_compiled = is_aot = True

    def __init__(self, name):
        self.name = name

    def build(self, verbose=False, **kwargs):
        """Does nothing."""

    def build_and_load(self, *args, **kwargs):
        raise NotImplementedError(f"{self.name} cannot be loaded: there are no modules behind foveal.flashinfer; call its functions and wrappers")

    load = build_and_load


def build_jit_specs(specs=(), verbose=False, **kwargs):
    """Does nothing: see above."""


def parallel_load_modules(specs=(), *args, **kwargs):
    """Does nothing: see above."""


def generator(module, name):
    """A gen_..._module function; AttributeError for other names."""
    if not name.startswith("gen_"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def generate(*args, **kwargs):
        if name.startswith("gen_customize_"):
            raise NotImplementedError(f"flashinfer.jit.{name}: CUDA C++ modules are not generated; see foveal.Variant")
        return JitSpec(name[4:])

    generate.__name__ = generate.__qualname__ = name
    return generate


def __getattr__(name):
    return generator(__name__, name)


__all__ = ["JitSpec", "MissingJITCacheError", "attention", "build_jit_specs", "env", "parallel_load_modules", "utils"]
