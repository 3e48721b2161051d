# SPDX-License-Identifier: Apache-2.0
"""The Python of the manuals runs, as it stands there. A block is skipped where a package that it imports is not installed."""

import importlib.util
import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
NAMES = ("python.md", "torch.md", "transformers.md")


def blocks():
    for name in NAMES:
        text = (DOCS / name).read_text(encoding="utf-8") if (DOCS / name).exists() else ""
        for i, block in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)):
            yield pytest.param(block, id=f"{name}-{i}")


@pytest.mark.parametrize("block", list(blocks()))
def test_block(block):
    for names in re.findall(r"^(?:import|from) +([\w., ]+?)(?: import .*| as .*)?$", block, re.M):
        for name in names.split(","):
            top = name.strip().split(".")[0]
            if importlib.util.find_spec(top) is None:
                pytest.skip(f"{top} is not installed")
    if "generate_batch" in block:
        pytest.importorskip("psutil", reason="psutil is not installed: transformers counts the CPU's memory with it")
    exec(compile(block, "block", "exec"), {})


def test_there_are_blocks():
    assert len(list(blocks())) >= 4
