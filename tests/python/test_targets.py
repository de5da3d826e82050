"""The library on other processors and systems, cross-built and run under emulators: the committed SHA-256 of logits
(and of the packed files), the demo model's greedy text, which must be the native one, and the kernels that x86-64
processors choose. test_arm64.py does the last for ARM64.

Needs the Python package ziglang and, for each target, its emulator: Debian's qemu-user-static and wine64 (without
recommended packages; it needs no display), and the Python package wasmtime. What is missing is skipped."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import colibri
import pytest

pytestmark = pytest.mark.emulated

ROOT = Path(__file__).resolve().parents[2]
PROMPT, TOKENS = "Once upon a time", 32

# Runs a WASI program with the current folder and the model's.
WASMTIME = """
import sys, wasmtime
program, folder = sys.argv[1], sys.argv[2]
engine, wasi = wasmtime.Engine(), wasmtime.WasiConfig()
linker, store = wasmtime.Linker(engine), wasmtime.Store(engine)
wasi.argv = [program, *sys.argv[3:]]
wasi.preopen_dir(".", ".")
wasi.preopen_dir(folder, "model")
wasi.inherit_stdout()
wasi.inherit_stderr()
linker.define_wasi()
store.set_wasi(wasi)
try:
    linker.instantiate(store, wasmtime.Module.from_file(engine, program)).exports(store)["_start"](store)
except wasmtime.ExitTrap as end:
    sys.exit(end.code)
"""


class Target:
    """What is built, its programs' suffix, and how one is run; `missing` says why not."""

    def __init__(self, triple: str, options: tuple[str, ...] = (), suffix: str = "") -> None:
        self.triple, self.options, self.suffix = triple, options, suffix
        self.command: list[str] = []
        self.missing = ""
        self.files = "-Dfile_io=false" not in options

    def by(self, program: str, *arguments: str, package: str) -> Target:
        found = shutil.which(program)
        self.command = [found or program, *arguments]
        if found is None:
            self.missing = f"{program} is not installed (Debian: {package})"
        return self


def qemu(processor: str, triple: str, *arguments: str, options: tuple[str, ...] = ()) -> Target:
    return Target(triple, options).by(f"qemu-{processor}-static", *arguments, package="qemu-user-static")


def wasm() -> Target:
    target = Target("wasm32-wasi", suffix=".wasm")
    if importlib.util.find_spec("wasmtime") is None:
        target.missing = "wasmtime is not installed: pip install wasmtime"
    return target


ARM64, X86, BARE = "aarch64-linux-musl", "x86_64-linux-musl", ("-Dthreads=false", "-Dfile_io=false")
WINE = "wine64" if shutil.which("wine64") or not os.path.exists("/usr/lib/wine/wine64") else "/usr/lib/wine/wine64"
TARGETS = {
    "cortex-a53": qemu("aarch64", ARM64, "-cpu", "cortex-a53"),
    "cortex-a72": qemu("aarch64", ARM64, "-cpu", "cortex-a72"),
    "arm64-max": qemu("aarch64", ARM64, "-cpu", "max"),
    "nehalem": qemu("x86_64", X86, "-cpu", "Nehalem"),
    "haswell": qemu("x86_64", X86, "-cpu", "Haswell"),
    "zen2": qemu("x86_64", X86, "-cpu", "EPYC-Rome"),
    "arm": qemu("arm", "arm-linux-musleabihf", "-cpu", "cortex-a7"),
    "riscv64": qemu("riscv64", "riscv64-linux-musl"),
    "windows": Target("x86_64-windows-gnu", suffix=".exe").by(WINE, package="wine64"),
    "wasm": wasm(),
    "arm-bare": qemu("arm", "arm-linux-musleabihf", "-cpu", "cortex-a7", options=BARE),
}

# The kernels each must choose. qemu emulates no AVX-512 (and says on stderr what else it leaves out).
KERNELS = {"nehalem": "ref", "haswell": "avx2", "zen2": "avx2", "arm": "ref", "riscv64": "ref"}

Builder = Callable[[Target], Path]
Done = subprocess.CompletedProcess[bytes]
Runner = Callable[..., Done]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Builds a target once: library, colibri-infer, and the tests of golden sums and of kernels."""
    done: dict[tuple[str, ...], Path] = {}

    def prefix(target: Target) -> Path:
        if target.missing:
            pytest.skip(target.missing)
        if importlib.util.find_spec("ziglang") is None:
            pytest.skip("ziglang is not installed: pip install ziglang==0.16.0")
        key = (target.triple, *target.options)
        if key not in done:
            done[key] = tmp_path_factory.mktemp("target")
            command = [sys.executable, "-m", "ziglang", "build", "install", "test-programs"]
            command += ["-Donly=test_golden", "-Donly=test_kernels", f"-Dtarget={target.triple}", *target.options]
            command += ["--prefix", str(done[key])]
            if not os.access(ROOT, os.W_OK):
                command += ["--cache-dir", str(tmp_path_factory.mktemp("cache"))]
            subprocess.run(command, cwd=ROOT, check=True)
        return done[key]

    return prefix


@pytest.fixture(scope="session")
def wine_prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wine's own folder, which its first program fills."""
    return tmp_path_factory.mktemp("wine")


@pytest.fixture
def run(wine_prefix: Path) -> Runner:
    # Wine is told to keep its remarks for itself.
    environment = {**os.environ, "WINEPREFIX": str(wine_prefix), "WINEDEBUG": "-all", "DISPLAY": ""}

    def start(target: Target, program: Path, model_folder: Path, *arguments: str, cwd: Path) -> Done:
        if target.suffix == ".wasm":
            command = [sys.executable, "-c", WASMTIME, str(program), str(model_folder)]
        else:
            command = [*target.command, str(program)]
        return subprocess.run([*command, *arguments], cwd=cwd, env=environment, capture_output=True, check=False)

    return start


# The others run the same code as one of these, or as test_arm64.py.
QUICK = ("cortex-a53", "haswell", "arm", "riscv64", "windows", "wasm")


def marked(names: Iterable[str]) -> list[object]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", marked(TARGETS))
def test_golden(build: Builder, run: Runner, name: str, tmp_path: Path) -> None:
    """All types of weights, all instruction sets of that processor, threads and pieces: the committed sums."""
    target = TARGETS[name]
    program = build(target) / "tests" / f"test_golden{target.suffix}"
    done = run(target, program, tmp_path, cwd=tmp_path)
    assert done.returncode == 0 and b", 0 failed" in done.stderr, f"{done.returncode}\n{done.stderr.decode()}"


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(build: Builder, run: Runner, name: str, tmp_path: Path) -> None:
    """All entries of the table against the reference, on guarded pages. Another table being chosen is an error."""
    target = TARGETS[name]
    done = run(target, build(target) / "tests" / "test_kernels", tmp_path, KERNELS[name], cwd=tmp_path)
    shown = done.stderr.decode()
    assert done.returncode == 0 and ", 0 failed" in shown, f"{done.returncode}\n{shown}"
    assert f"compared with the reference: {KERNELS[name]}\n" in shown


@pytest.fixture(scope="module")
def native_text() -> str:
    with colibri.Model(colibri.demo_path()) as model, colibri.Session(model, num_threads=1) as session:
        return session.generate(PROMPT, TOKENS)


@pytest.mark.parametrize("name", marked(name for name, target in TARGETS.items() if target.files))
def test_demo(build: Builder, run: Runner, name: str, native_text: str, tmp_path: Path) -> None:
    target, demo = TARGETS[name], Path(colibri.demo_path())
    program = build(target) / "bin" / f"colibri-infer{target.suffix}"
    path = f"model/{demo.name}" if target.suffix == ".wasm" else str(demo)
    arguments = ["--model", path, "--prompt", PROMPT, "--max-tokens", str(TOKENS)]
    done = run(target, program, demo.parent, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip() == native_text.strip() != ""


def test_bare_build_needs_little(build: Builder) -> None:
    """Without threads and files the library calls nothing but memory, text and the clock of the C library."""
    nm = shutil.which("llvm-nm") or shutil.which("nm")
    if nm is None:
        pytest.skip("no nm is installed (Debian: binutils)")
    target = Target("x86_64-linux-musl", BARE)
    archive = build(target) / "lib" / "libcolibri.a"
    listing = subprocess.run([nm, "-A", str(archive)], capture_output=True, text=True, check=True).stdout.splitlines()
    defined = {line.split()[-1] for line in listing if " T " in line or " R " in line or " D " in line or " B " in line}
    needed = {line.split()[-1] for line in listing if " U " in line} - defined
    text = ["snprintf", "strchr", "strcmp", "strcspn", "strlen", "strncmp", "strspn", "vsnprintf"]
    memory = ["bcmp", "calloc", "free", "malloc", "memchr", "memcmp", "memcpy", "memmove", "memset", "realloc"]
    assert needed <= {*text, *memory, "clock_gettime", "qsort"}
