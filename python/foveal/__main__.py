# SPDX-License-Identifier: Apache-2.0
"""python -m foveal info [--format text|markdown|json] [--device cpu|cuda:N]
python -m foveal coverage      what foveal.flashinfer covers, as a table
python -m foveal env           version and folders of the package
"""

import argparse
import importlib.util
import os
import sys


def load_coverage():
    """The module foveal.flashinfer.coverage by itself: its package needs NumPy, the table does not."""
    path = os.path.join(os.path.dirname(__file__), "flashinfer", "coverage.py")
    spec = importlib.util.spec_from_file_location("foveal_flashinfer_coverage", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m foveal", description="What there is.")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="devices, CPU levels, kernels, element types, variants, environment variables")
    info.add_argument("--format", choices=("text", "markdown", "json"), default="text")
    info.add_argument("--device", help="open this device, too: cpu, cuda:0")
    commands.add_parser("coverage", help="what foveal.flashinfer covers of FlashInfer, as a markdown table")
    commands.add_parser("env", help="the folders of the package")
    given = parser.parse_args(argv)

    import foveal

    if given.command == "coverage":
        print(load_coverage().table(), end="")
    elif given.command == "env":
        print(f"version {foveal.__version__}\nmodule  {foveal.__file__}\ninclude {foveal.get_include()}")
    elif given.device:
        with foveal.Context(given.device) as context:
            print(foveal.info(given.format, context), end="")
    else:
        print(foveal.info(given.format), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
