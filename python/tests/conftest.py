# SPDX-License-Identifier: Apache-2.0
import os
import sys

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))

from reference import libs, make_lib  # noqa: E402


@pytest.fixture(params=libs())
def lib(request):
    """NumPy, and torch on the CPU where it is installed."""
    return make_lib(request.param)


@pytest.fixture
def rng(request):
    """Another stream for each test, the same in every run."""
    return np.random.default_rng(sum(request.node.name.encode()))
