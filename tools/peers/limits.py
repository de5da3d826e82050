"""The machine's own limits, from colibri-bench --limits --json."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("colibri-bench", "cli_common", "limits", "limits_units")


class LimitsError(Exception):
    """Why there are none."""


def _compiler() -> list[str]:
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise LimitsError("no C compiler to build colibri-bench with; give one that is built by --bench")


def build_bench(folder: Path) -> Path:
    """Compile colibri-bench from tools/, linked with the package's shared library, unless it is there and newer."""
    from colibri import _lib

    program, library = folder / "colibri-bench", Path(_lib.library_path())
    sources = [ROOT / "tools" / f"{name}.c" for name in SOURCES]
    if program.is_file() and program.stat().st_mtime > max(path.stat().st_mtime for path in (*sources, library)):
        return program
    copy = folder / "libcolibri.so.0"  # the name that the program asks for
    shutil.copyfile(library, folder / "libcolibri.unfinished")
    (folder / "libcolibri.unfinished").replace(copy)
    flags = ["-std=gnu11", "-O2", "-pthread", "-I", str(ROOT / "include"), f"-Wl,-rpath,{folder}"]
    unfinished = folder / "colibri-bench.unfinished"
    command = [*_compiler(), *flags, *map(str, sources), str(copy), "-lm", "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LimitsError(f"colibri-bench does not compile: {done.stderr.strip().splitlines()[-1]}")
    unfinished.replace(program)
    return program


class Limits:
    """One measurement."""

    def __init__(self, program: Path, threads: int, buffer_mb: int | None) -> None:
        command = [str(program), "--limits", "--json", "--threads", str(threads)]
        if buffer_mb is not None:
            command += ["--buffer-mb", str(buffer_mb)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise LimitsError(f"cannot run {program}: {error.strerror}") from None
        if done.returncode:
            raise LimitsError(done.stderr.strip() or f"{program} ended with status {done.returncode}")
        try:
            self.values: dict[str, Any] = json.loads(done.stdout)
        except json.JSONDecodeError:
            raise LimitsError(f"{program} is not colibri-bench: it prints no JSON") from None

    def read(self, threads: int) -> float:
        """Bytes per second that so many threads read, whatever the pages; of fewer where so many were not measured."""
        rates = [(int(n), rate) for pages in self.values["read"] for n, rate in pages["gb_per_s"].items()]
        most = max(n for n, _ in rates if n <= threads)
        return 1e9 * max(rate for n, rate in rates if n == most)

    def int8(self, threads: int, isa: str = "") -> tuple[str, float]:
        """An instruction set, by default the best there is (they come in that order), and its operations per second."""
        rates = [rate for rate in self.values["int8_tops"] if isa in ("", rate["isa"])]
        best = (rates or self.values["int8_tops"])[0]
        whole = threads == self.values["num_threads"]
        return best["isa"], 1e12 * (best["all_threads"] if whole else threads * best["one_thread"])
