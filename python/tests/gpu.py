#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gpu.py -- all tests of the Python package with --device cuda, from a package built elsewhere; nothing is downloaded.

    python3 python/tests/gpu.py [PACKAGE] [--jobs N] [--limit SECONDS] [PYTEST ARGUMENT...]

PACKAGE: the folder that holds foveal/ (a build's python/ folder); default: what is installed. pytest must be importable (PYTHONPATH may name a folder with it). N processes
(default: a CPU each) run every N-th test: most of the time goes into compiling kernels, which they share through FV_CACHE_DIR. Test files among the arguments are run
instead of all. What failed is shown whole, skipped tests with their reasons. The last line is `N passed, N failed`; 77: not run, for the reason that is printed."""

import argparse
import collections
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def skip(reason):
    print(f"not run: {reason}")
    sys.exit(77)


class Part:
    """A pytest plugin: every n-th test, counted. One that is skipped neither passed nor failed."""

    def __init__(self, index, of):
        self.index, self.of, self.passed, self.failed, self.skipped = index, of, 0, 0, 0

    def pytest_collection_modifyitems(self, config, items):
        mine = items[self.index::self.of]
        config.hook.pytest_deselected(items=[x for i, x in enumerate(items) if i % self.of != self.index])
        items[:] = mine

    def pytest_runtest_logreport(self, report):
        self.failed += report.failed
        self.passed += report.when == "call" and report.passed
        self.skipped += report.skipped

    def pytest_collectreport(self, report):
        self.failed += report.failed


def run_part(part, arguments):
    import pytest

    code = pytest.main(["-q", "-rs", "-p", "no:cacheprovider", "--durations=3", "--durations-min=3", "--device", "cuda", *arguments], plugins=[part])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        part.failed = max(part.failed, 1)
    print(f"{part.passed} passed, {part.failed} failed, {part.skipped} skipped")
    return int(part.failed > 0)


def check_machine():
    for name in ("torch", "numpy", "pytest", "foveal"):
        if importlib.util.find_spec(name) is None:
            skip(f"there is no {name}")
    import torch

    if not torch.cuda.is_available():
        skip("torch sees no GPU")


def start(jobs, arguments, folder):
    """[(process, path of its output)]; each process has one thread beside the GPU."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    parts = []
    for i in range(jobs):
        path = os.path.join(folder, f"{i:03d}")
        with open(path, "w", encoding="utf-8") as out:
            parts.append((subprocess.Popen([sys.executable, __file__, "--part", f"{i}/{jobs}", *arguments], stdout=out, stderr=subprocess.STDOUT,
                                           env=environment), path))
    return parts


def finish(parts, limit):
    """[(output, (passed, failed, skipped))]; a part that died or took too long has failed once more than it says."""
    end, results = time.monotonic() + limit, []
    for process, path in parts:
        try:
            process.wait(max(end - time.monotonic(), 0))
            died = process.returncode not in (0, 1)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            died = True
        with open(path, encoding="utf-8", errors="replace") as x:
            text = x.read()
        counts = re.findall(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", text, re.M)
        passed, failed, skipped = map(int, counts[-1]) if counts else (0, 0, 0)
        if died or not counts:
            text += f"\nFAILED: a process ended with {process.returncode} before it had counted its tests\n"
            failed += 1
        results.append((text, (passed, failed, skipped)))
    return results


def show(results):
    skipped, slow = collections.Counter(), []
    for text, (_, failed, _) in results:
        if failed:
            print(text)
        for count, why in re.findall(r"^SKIPPED \[(\d+)\] \S+: (.*)$", text, re.M):
            skipped[why] += int(count)
        slow += [(float(seconds), what) for seconds, what in re.findall(r"^([\d.]+)s (.*)$", text, re.M)]
    for why, count in skipped.most_common():
        print(f"skipped {count}: {why}")
    for seconds, what in sorted(slow, reverse=True)[:8]:
        print(f"{seconds:.1f} s {what}")


def main(given):
    parser = argparse.ArgumentParser(usage=__doc__.split("\n")[2].strip(), add_help=False)
    parser.add_argument("--part")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=480)
    known, arguments = parser.parse_known_args(given)
    if known.part:
        index, of = map(int, known.part.split("/"))
        return run_part(Part(index, of), arguments)
    if arguments and os.path.isdir(os.path.join(arguments[0], "foveal")):
        package = os.path.abspath(arguments.pop(0))
        sys.path.insert(0, package)
        os.environ["PYTHONPATH"] = os.pathsep.join([package] + [x for x in [os.environ.get("PYTHONPATH")] if x])
    check_machine()
    if not any(x.split("::")[0].endswith(".py") for x in arguments):
        arguments = [*(arguments or ["--slow"]), HERE]
    with tempfile.TemporaryDirectory() as folder:
        results = finish(start(known.jobs, arguments, folder), known.limit)
    show(results)
    passed, failed, skipped = (sum(x[i] for _, x in results) for i in range(3))
    print(f"{skipped} skipped")
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0 or passed == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
