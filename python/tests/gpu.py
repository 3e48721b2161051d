#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gpu.py -- the tests of torch and transformers on a GPU, from a package built elsewhere; nothing is downloaded.

    python3 python/tests/gpu.py [PACKAGE] [PYTEST ARGUMENT...]

PACKAGE: the folder that holds foveal/ (a build's python/ folder); default: what is installed. pytest must be importable (PYTHONPATH may name a folder with it). The last line
is `N passed, N failed`; 77: not run, for the reason that is printed."""

import importlib.util
import os
import sys


def skip(reason):
    print(f"not run: {reason}")
    sys.exit(77)


class Counter:
    """Counts tests; one that is skipped is neither."""

    def __init__(self):
        self.passed = self.failed = 0

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed += 1
        elif report.when == "call" and report.passed:
            self.passed += 1


def main(arguments):
    if arguments and os.path.isdir(os.path.join(arguments[0], "foveal")):
        sys.path.insert(0, os.path.abspath(arguments[0]))
        arguments = arguments[1:]
    for name in ("torch", "numpy", "pytest", "foveal"):
        if importlib.util.find_spec(name) is None:
            skip(f"there is no {name}")
    import pytest
    import torch

    if not torch.cuda.is_available():
        skip("torch sees no GPU")
    here, counter = os.path.dirname(os.path.abspath(__file__)), Counter()
    files = [os.path.join(here, f"test_{name}.py") for name in ("torch", "transformers")]
    code = pytest.main(["-q", "-p", "no:cacheprovider", "--device", "cuda", *(arguments or ["--slow"]), *files], plugins=[counter])
    print(f"{counter.passed} passed, {counter.failed} failed")
    return int(code != 0 or counter.passed == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
