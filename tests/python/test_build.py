"""What the build produces: the shared library in the package, and all that `zig build` installs (where ziglang is)."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from binaries import read_elf
from colibri import _lib

ROOT = Path(__file__).resolve().parents[2]
LINUX = sys.platform == "linux"
SYSTEM_LIBRARIES = re.compile(r"(libc|libm|libpthread|ld-linux[\w.-]*|libc\.musl-\w+)\.so(\.\d+)?")


def check_shared_library(path: Path) -> None:
    elf = read_elf(path.read_bytes())
    assert elf.soname == "libcolibri.so.0"
    assert "colibri_init" in elf.exported and len(elf.exported) > 30
    assert [name for name in elf.exported if not name.startswith("colibri_")] == []
    assert [name for name in elf.needed if not SYSTEM_LIBRARIES.fullmatch(name)] == []
    glibc = [tuple(map(int, v[6:].split("."))) for v in elf.versions if re.fullmatch(r"GLIBC_[\d.]+", v)]
    assert all(version <= (2, 17) for version in glibc), elf.versions
    assert ".symtab" not in elf.sections and ".debug_info" not in elf.sections, "not stripped"
    assert path.stat().st_size < 500_000
    libm = {"exp", "expf", "log", "logf", "pow", "powf", "sin", "cos", "sincos", "sqrt", "sqrtf", "fma", "fmaf", "tanh"}
    forbidden = {"printf", "puts", "fprintf", "abort", "exit", "_exit", "getenv", "__assert_fail", "perror"} | libm
    assert forbidden.intersection(elf.undefined) == set()


def library_in_package() -> Path:
    if "COLIBRI_LIBRARY" in os.environ:
        pytest.skip("COLIBRI_LIBRARY names a library of the developer's own")
    return _lib.library_path()


@pytest.mark.skipif(not LINUX, reason="reads ELF files")
def test_shared_library_in_package() -> None:
    check_shared_library(library_in_package())


def test_one_version_everywhere() -> None:
    header = (ROOT / "include/colibri.h").read_text(encoding="utf-8")
    version = re.search(r'#define COLIBRI_VERSION_STRING "(.*)"', header)
    parts = [re.search(rf"#define COLIBRI_VERSION_{part} (\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
    assert version and all(parts)
    numbers = [int(part[1]) for part in parts if part]
    assert version[1] == ".".join(map(str, numbers))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{version[1]}"\n' in project
    build = (ROOT / "build.zig").read_text(encoding="utf-8")
    assert ".major = {}, .minor = {}, .patch = {}".format(*numbers) in build


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete installation by `zig build`, with the cache of the source folder where there is one."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed: pip install ziglang==0.16.0")
    folder = tmp_path_factory.mktemp("prefix")
    command = [sys.executable, "-m", "ziglang", "build", "--prefix", str(folder)]
    if not os.access(ROOT, os.W_OK):
        command += ["--cache-dir", str(tmp_path_factory.mktemp("cache"))]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.mark.skipif(not LINUX, reason="reads ELF files")
def test_installed_shared_library(prefix: Path) -> None:
    check_shared_library(prefix / "lib/libcolibri.so")
    assert (prefix / "lib/libcolibri.so.0").resolve() == (prefix / "lib/libcolibri.so").resolve()


@pytest.mark.skipif(not LINUX, reason="the tools are static on Linux")
@pytest.mark.parametrize("tool", ["colibri-infer", "colibri-bench"])
def test_tools_are_small_and_static(prefix: Path, tool: str) -> None:
    path = prefix / "bin" / tool
    elf = read_elf(path.read_bytes())
    assert not elf.interpreter and elf.needed == [], f"{tool} is not static"
    assert path.stat().st_size < 1_000_000
    shown = subprocess.run([str(path), "--help"], capture_output=True, text=True, env={}, check=False)
    assert shown.returncode == 0 and "--model" in shown.stdout + shown.stderr


def test_headers_compile_alone(prefix: Path, tmp_path: Path) -> None:
    """A program that uses only what was installed, linked with the static library; the headers are C++ too."""
    source = tmp_path / "program.c"
    source.write_text(
        "#include <colibri.h>\n#include <colibri_format.h>\n"
        "int main(void) { return colibri_version()[0] == '0' && colibri_status_name(COLIBRI_OK)[0] == 'C' ? 0 : 1; }\n"
    )
    compiler = [sys.executable, "-m", "ziglang", "cc", "-Wall", "-Wextra", "-Werror", f"-I{prefix}/include"]
    program = tmp_path / "program"
    library = prefix / "lib/libcolibri.a"
    subprocess.run([*compiler, "-std=c11", str(source), str(library), "-o", str(program)], check=True)
    subprocess.run([str(program)], check=True)
    source.write_text(
        "#include <colibri.h>\n#include <colibri_format.h>\n"
        "int main() { colibri_config_t c = COLIBRI_CONFIG_INIT; colibri_stats_t s = COLIBRI_STATS_INIT;\n"
        "return c.struct_size == sizeof c && s.struct_size == sizeof s && !c.log && !s.weight_bytes ? 0 : 1; }\n"
    )
    for standard in ("c++98", "c++11", "c++20"):
        options = ["-x", "c++", f"-std={standard}", "-Wno-long-long", "-Wpedantic"]
        subprocess.run([*compiler, *options, str(source), "-o", str(program)], check=True)
        subprocess.run([str(program)], check=True)


@pytest.mark.skipif(not LINUX or shutil.which("pkg-config") is None, reason="needs pkg-config")
def test_pkg_config(prefix: Path) -> None:
    def ask(*options: str) -> str:
        environment = dict(os.environ, PKG_CONFIG_PATH=str(prefix / "lib/pkgconfig"))
        command = ["pkg-config", *options, "colibri"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    include = next(flag for flag in ask("--cflags").split() if flag.startswith("-I"))
    assert Path(include[2:]).samefile(prefix / "include")
    assert "-lcolibri" in ask("--libs") and "-lpthread" in ask("--static", "--libs")
    assert ask("--modversion") in (ROOT / "include/colibri.h").read_text(encoding="utf-8")


@pytest.mark.skipif(not LINUX or os.uname().machine != "x86_64", reason="reads x86-64 instructions")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_newer_instructions_only_behind_dispatch(prefix: Path) -> None:
    """Objects for the baseline CPU hold nothing that a 2003 x86-64 lacks; the others do use their instruction set."""
    command = ["objdump", "-d", "--no-show-raw-insn", str(prefix / "lib/libcolibri.a")]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    newer = re.compile(
        r"v[a-z]\w+|andn|bextr|bls\w+|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|popcnt|lzcnt|crc32\w?|pshufb"
    )
    member, found = "", {}
    for line in listing.splitlines():
        if "file format" in line:
            member = re.split(r"[/:]", line.split()[0].rstrip(":"))[-1]
            found[member] = set()
        elif match := re.match(r"\s+[0-9a-f]+:\s+(?:(?:lock|rep\w*|data16|cs|notrack)\s+)*(\w+)", line):
            instruction = match[1]
            if newer.fullmatch(instruction) and instruction not in ("verr", "verw"):
                found[member].add(instruction)
            if "%zmm" in line:
                found[member].add("zmm")
    special = {"avx2.o", "avx512.o", "amx.o"}
    assert special <= set(found) and len(found) > 15
    assert {name: use for name, use in found.items() if use and name not in special} == {}
    assert {"vfmadd231ps", "vpmaddwd"} <= found["avx2.o"] and "zmm" not in found["avx2.o"]
    assert "zmm" in found["avx512.o"]
