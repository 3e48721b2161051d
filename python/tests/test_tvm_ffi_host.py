# SPDX-License-Identifier: Apache-2.0
"""The functions that tvm-ffi hosts load, beside a host that comes later."""

import shutil
import subprocess
import sys

import pytest

import foveal

HOST = """
#include <string.h>
char raised[256];
void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message) { strcat(strcat(strcpy(raised, kind), ": "), message); }
"""

CALLS = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
call = library.__tvm_ffi_fv_run
result = (ctypes.c_int64 * 2)()
refused = lambda: call(None, None, 0, result)
assert refused() == -1 and refused() == -1
host = ctypes.CDLL(sys.argv[2], mode=ctypes.RTLD_GLOBAL)
raised = (ctypes.c_char * 256).in_dll(host, "raised")
assert raised.value == b""
assert refused() == -1
print(raised.value.decode())
"""


@pytest.mark.skipif(not shutil.which("cc") or not sys.platform.startswith("linux"), reason="a host is compiled")
def test_host_that_comes_later(tmp_path):
    """What was looked for in vain is looked for again when another library has been loaded."""
    (tmp_path / "host.c").write_text(HOST)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "host.so", tmp_path / "host.c"], check=True)
    done = subprocess.run([sys.executable, "-c", CALLS, foveal.get_library(), tmp_path / "host.so"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ValueError: ")
