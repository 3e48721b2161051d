# SPDX-License-Identifier: Apache-2.0
"""Where upstream keeps what it builds. Nothing is kept there; kernels lie in foveal's own cache (FV_CACHE_DIR)."""

import os
import pathlib

FLASHINFER_BASE_DIR = pathlib.Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", str(pathlib.Path.home())))
FLASHINFER_CACHE_DIR = FLASHINFER_BASE_DIR / ".cache" / "flashinfer"
FLASHINFER_WORKSPACE_DIR = FLASHINFER_JIT_DIR = FLASHINFER_CACHE_DIR

__all__ = ["FLASHINFER_BASE_DIR", "FLASHINFER_CACHE_DIR", "FLASHINFER_JIT_DIR", "FLASHINFER_WORKSPACE_DIR"]
