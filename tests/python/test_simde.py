"""The AVX-512 kernels against the reference on any x86-64, with their instructions emulated by SIMDe.

tests/c/test_avx512.c carries emulations of its own and runs with `zig build test`; here the same program is built with
an independent set, where SIMDe's headers (Debian: libsimde-dev) and a compiler (Python package ziglang) are installed.
"""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIMDE = Path("/usr/include/simde")
SOURCES = ["tests/c/test_avx512.c", "lib/base/math.c", "lib/kernels/ref.c"]
SOURCES += ["lib/kernels/ref_float.c", "lib/kernels/ref_integer.c"]


def test_avx512_kernels_with_simde(tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("emulates x86-64 instructions on x86-64")
    if not (SIMDE / "x86" / "avx512.h").exists():
        pytest.skip("the headers of SIMDe are not installed (Debian: libsimde-dev)")
    (tmp_path / "simde").symlink_to(SIMDE)  # alone, without the rest of /usr/include
    program = tmp_path / "test_avx512"
    command = [sys.executable, "-m", "ziglang", "cc", "-std=gnu11", "-O1", "-DNDEBUG", "-ffp-contract=off", "-w"]
    command += ["-fno-sanitize=all", "-DCOLI_SIMDE", f"-I{ROOT}/include", f"-I{ROOT}/lib", "-isystem", str(tmp_path)]
    command += [str(ROOT / source) for source in SOURCES]
    subprocess.run([*command, "-o", str(program)], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert ", 0 failed" in result.stderr
