# SPDX-License-Identifier: Apache-2.0
import os
import sys

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))

from reference import libs, make_lib  # noqa: E402


def pytest_generate_tests(metafunc):
    if "lib" in metafunc.fixturenames:
        metafunc.parametrize("lib", libs(metafunc.config.getoption("--device")), indirect=True)


@pytest.fixture
def lib(request):
    """NumPy, and torch on the CPU where it is installed; with --device cuda torch on the GPU."""
    return make_lib(request.param)


@pytest.fixture
def rng(request):
    """Another stream for each test, the same in every run."""
    return np.random.default_rng(sum(request.node.name.encode()))


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where tests run that have a device or a lib: cpu, cuda")
    parser.addoption("--slow", action="store_true", help="also what takes minutes: compilers of frameworks, many model steps")


@pytest.fixture(scope="session")
def device(request):
    """A torch device; tests that use it are skipped where it is not there."""
    torch = pytest.importorskip("torch")
    name = request.config.getoption("--device")
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip(f"{name} is not there")
    if name == "cpu":
        torch.set_num_threads(1)        # the models are tiny: threads would only wait for each other
    return torch.device(name)


@pytest.fixture
def by_default(device):
    """What torch makes without a device lies there."""
    import torch

    torch.set_default_device(device)
    yield device
    torch.set_default_device(None)
