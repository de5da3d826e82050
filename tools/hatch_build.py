"""Build hook of the Python package: compile the shared library with zig and put it beside the package's modules, and
colibri.wasm beside the page of `colibri web`.

Environment:
    COLIBRI_TARGET  a zig target to build the wheel for, one of TARGETS; default: this machine
    COLIBRI_CPU     a zig CPU name; default: baseline (faster kernels are chosen when the library runs)
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Target(NamedTuple):
    """What a wheel for one zig target is called and holds."""

    platform_tag: str
    built: str  # where `zig build so` installs the library, below its prefix
    name: str  # the library's name inside the package


WASM = "web/colibri.wasm"  # below zig's prefix, and in the package

TARGETS = {
    "x86_64-linux-gnu.2.17": Target("manylinux_2_17_x86_64", "lib/libcolibri.so", "libcolibri.so"),
    "aarch64-linux-gnu.2.17": Target("manylinux_2_17_aarch64", "lib/libcolibri.so", "libcolibri.so"),
    "x86_64-linux-musl": Target("musllinux_1_2_x86_64", "lib/libcolibri.so", "libcolibri.so"),
    "aarch64-linux-musl": Target("musllinux_1_2_aarch64", "lib/libcolibri.so", "libcolibri.so"),
    "x86_64-macos.11.0": Target("macosx_11_0_x86_64", "lib/libcolibri.dylib", "libcolibri.dylib"),
    "aarch64-macos.11.0": Target("macosx_11_0_arm64", "lib/libcolibri.dylib", "libcolibri.dylib"),
    "x86_64-windows-gnu": Target("win_amd64", "bin/colibri.dll", "colibri.dll"),
}


def host_target() -> str:
    """The zig target of the running Python; it need not be one of TARGETS."""
    machine = platform.machine().lower()
    arch = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    if arch == "x86_64" and sys.maxsize < 2**32:
        arch = "x86"  # a 32-bit Python on a 64-bit system
    if sys.platform == "darwin":
        return f"{arch}-macos.11.0"
    if sys.platform == "win32":
        return f"{arch}-windows-gnu"
    return f"{arch}-linux-gnu.2.17" if platform.libc_ver()[0] == "glibc" else f"{arch}-linux-musl"


def build_library(root: Path, target: str, prefix: Path, cache: Path) -> None:
    """Run `zig build so web`; on failure raise RuntimeError with what zig said."""
    command = [sys.executable, "-m", "ziglang", "build", "so", "web", f"-Dtarget={target}"]
    command += [f"-Dcpu={os.environ.get('COLIBRI_CPU') or 'baseline'}", "-Doptimize=ReleaseFast"]
    command += ["--prefix", str(prefix), "--cache-dir", str(cache)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    result = subprocess.run(command, cwd=root, **output)
    if result.returncode != 0:
        missing = "No module named" in result.stdout
        hint = ": install the Python package ziglang (0.16.0)" if missing else ""
        raise RuntimeError(
            f"building the C library for {target} failed (exit status {result.returncode}){hint}\n"
            f"command: {' '.join(command)}\n{result.stdout}"
        )


class ColibriBuildHook(BuildHookInterface):
    """Adds the compiled library to a wheel, or to the source folder for `pip install -e .`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        name = os.environ.get("COLIBRI_TARGET") or host_target()
        if name not in TARGETS:
            raise RuntimeError(
                f"no wheel is defined for target '{name}'; COLIBRI_TARGET can name one of {', '.join(TARGETS)}"
            )
        target = TARGETS[name]
        root = Path(self.root)
        self.scratch = None
        if os.access(root, os.W_OK):
            work, cache = root / "build" / name, root / ".zig-cache"
        else:  # a read-only source folder
            self.scratch = tempfile.TemporaryDirectory(prefix="colibri-build-")
            work, cache = Path(self.scratch.name) / "out", Path(self.scratch.name) / "cache"
        build_library(root, name, work, cache)
        if version == "editable":  # the package is used where it lies
            self.replace(work / target.built, root / "python" / "colibri" / target.name)
            self.replace(work / WASM, root / "python" / "colibri" / WASM)
        else:
            build_data["force_include"][str(work / target.built)] = f"colibri/{target.name}"
            build_data["force_include"][str(work / WASM)] = f"colibri/{WASM}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{target.platform_tag}"  # py3-none: ctypes needs no Python ABI

    @staticmethod
    def replace(source: Path, destination: Path) -> None:
        """Copy beside the destination, then rename: a program that has the old library loaded keeps it."""
        beside = destination.with_name(f".{destination.name}.{os.getpid()}")
        shutil.copy2(source, beside)
        os.replace(beside, destination)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.scratch:
            self.scratch.cleanup()
