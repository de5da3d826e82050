"""The ARM64 kernels, cross-built and run under qemu as three processors: with plain NEON, with dot products, and with
int8 matrix products too. Each must choose its own table and give the reference's bits, alone and in sessions; and the
objects that every 64-bit ARM runs must hold no newer instruction.

Needs the Python package ziglang and Debian's qemu-user-static and binutils-aarch64-linux-gnu (or an ARM64 objdump)."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
OBJDUMP = shutil.which("aarch64-linux-gnu-objdump") or (
    shutil.which("objdump") if platform.machine() == "aarch64" else None
)
CPUS = {"cortex-a53": "neon", "neoverse-n1": "neon dotprod", "max": "neon i8mm"}  # and the table each must choose

needs_qemu = pytest.mark.skipif(QEMU is None, reason="qemu-aarch64-static is not installed (Debian: qemu-user-static)")
needs_objdump = pytest.mark.skipif(
    OBJDUMP is None, reason="no objdump for ARM64 is installed (Debian: binutils-aarch64-linux-gnu)"
)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C tests as static programs for ARM64 Linux, and the library in them."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed: pip install ziglang==0.16.0")
    folder = tmp_path_factory.mktemp("arm64")
    command = [sys.executable, "-m", "ziglang", "build", "test-programs", "-Dtarget=aarch64-linux-musl"]
    command += ["--prefix", str(folder)]
    if not os.access(ROOT, os.W_OK):
        command += ["--cache-dir", str(tmp_path_factory.mktemp("cache"))]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


def emulate(cpu: str, program: Path, argument: str, folder: Path) -> str:
    command = [str(QEMU), "-cpu", cpu, str(program), argument]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and ", 0 failed" in result.stderr, f"{cpu}: {result.returncode}\n{result.stderr}"
    return result.stderr


@needs_qemu
@pytest.mark.parametrize("cpu", CPUS)
def test_kernels(prefix: Path, cpu: str, tmp_path: Path) -> None:
    """All entries of the table against the reference, on guarded pages. Another table being chosen is an error."""
    shown = emulate(cpu, prefix / "tests" / "test_kernels", CPUS[cpu], tmp_path)
    assert re.findall("compared with the reference: (.*)", shown) == [CPUS[cpu]]


@needs_qemu
@pytest.mark.parametrize("cpu", CPUS)
def test_sessions(prefix: Path, cpu: str, tmp_path: Path) -> None:
    """Logits with any threads and pieces, for every type of weights, against the reference's."""
    assert "neon is not usable" not in emulate(cpu, prefix / "tests" / "test_session", "quick", tmp_path)


@needs_objdump
def test_newer_instructions_only_behind_dispatch(prefix: Path) -> None:
    """Objects for every 64-bit ARM keep to ARMv8.0; the two others use what they are for."""
    command = [str(OBJDUMP), "-d", "--no-show-raw-insn", str(prefix / "lib" / "libcolibri.a")]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    products = r"[su]dot|usdot|sudot|[su]mmla|usmmla|bfdot|bfmmla|bfmlal[bt]|bfcvtn?2?|fmls?l2?"
    others = r"sqrdml[as]h|casp?(a?l?)[bh]?|swp(a?l?)[bh]?|(ld|st)(add|clr|eor|set|[su]max|[su]min)(a?l?)[bh]?"
    newer = re.compile(f"{products}|{others}")
    member, found = "", {}
    for line in listing.splitlines():
        if "file format" in line:
            member = re.split(r"[/:]", line.split()[0].rstrip(":"))[-1]
            found[member] = set()
        elif match := re.match(r"\s+[0-9a-f]+:\s+(\S+)\s*(.*)", line):
            if newer.fullmatch(match[1]):
                found[member].add(match[1])
            if re.search(r"\bv\d+\.[48]h\b", match[2]) and match[1] in ("fadd", "fsub", "fmul", "fmla", "fmls", "fdiv"):
                found[member].add(f"{match[1]} of halves")
            if re.search(r"\bz\d+\.[bhsd]\b", match[2]):
                found[member].add("SVE")
    assert {"neon.o", "neon_dotprod.o", "neon_i8mm.o"} <= set(found) and len(found) > 15
    used = {name: use for name, use in found.items() if use}
    assert used == {"neon_dotprod.o": {"sdot"}, "neon_i8mm.o": {"sdot", "smmla"}}
