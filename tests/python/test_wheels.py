"""Wheels for other machines: what tools/build_wheels.py makes. Each is read; the one for this machine is installed, and
others' libraries are loaded by a C host: under a musl loader, and by qemu with ARM64's C library.

COLIBRI_WHEELS names a folder that tools/build_wheels.py has filled; without it two of the wheels are built here.
COLIBRI_MUSL_PYTHON names a Python on musl, as tests/target/musl_python.sh makes one (pip gets NumPy for it). Also read:
COLIBRI_MUSL_LOADER (default: /lib/ld-musl-x86_64.so.1; Debian: musl) and COLIBRI_ARM64_ROOT, a folder with
lib/ld-linux-aarch64.so.1 (default: /usr/aarch64-linux-gnu; Debian: libc6-arm64-cross)."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import colibri
import pytest
from binaries import read_binary

ROOT = Path(__file__).resolve().parents[2]
RUNS_HERE = sys.platform == "linux" and platform.machine() == "x86_64"
BUILT_HERE = ("x86_64-linux-gnu.2.17", "x86_64-linux-musl")
TAGS = {  # and the library in them
    "manylinux_2_17_x86_64": "libcolibri.so",
    "manylinux_2_17_aarch64": "libcolibri.so",
    "musllinux_1_2_x86_64": "libcolibri.so",
    "musllinux_1_2_aarch64": "libcolibri.so",
    "macosx_11_0_x86_64": "libcolibri.dylib",
    "macosx_11_0_arm64": "libcolibri.dylib",
    "win_amd64": "colibri.dll",
}
HERE = ("manylinux_2_17_x86_64", "musllinux_1_2_x86_64")
MUSL_LOADER = Path(os.environ.get("COLIBRI_MUSL_LOADER", "/lib/ld-musl-x86_64.so.1"))
ARM64_ROOT = Path(os.environ.get("COLIBRI_ARM64_ROOT", "/usr/aarch64-linux-gnu"))
MUSL_PYTHON = os.environ.get("COLIBRI_MUSL_PYTHON", "")
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
PROMPT = "Once upon a time"

every_tag = pytest.mark.parametrize("tag", TAGS)


def build(folder: Path, *targets: str, sources: Path = ROOT) -> None:
    missing = [name for name in ("hatchling", "ziglang") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: pip install hatchling ziglang==0.16.0")
    if not os.access(sources, os.W_OK):
        pytest.skip("the source folder cannot be written to")
    command = [sys.executable, str(sources / "tools/build_wheels.py"), str(folder), "--targets", *targets]
    subprocess.run(command, check=True)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "COLIBRI_WHEELS" in os.environ:
        return Path(os.environ["COLIBRI_WHEELS"])
    folder = tmp_path_factory.mktemp("wheels")
    build(folder, *BUILT_HERE)
    return folder


def wheel(folder: Path, tag: str) -> Path:
    name = f"libcolibri-{colibri.version()}-py3-none-{tag}.whl"
    if not (folder / name).exists() and tag not in HERE:
        pytest.skip(f"{name} is not in the folder: COLIBRI_WHEELS names one that tools/build_wheels.py has filled")
    return folder / name


def library(folder: Path, tag: str, destination: Path) -> Path:
    """The wheel's library, unpacked."""
    with zipfile.ZipFile(wheel(folder, tag)) as packed:
        return Path(packed.extract(f"colibri/{TAGS[tag]}", destination))


@every_tag
def test_contents(wheels: Path, tag: str) -> None:
    """The package, its one library, metadata that names the tag, and a record of every file."""
    with zipfile.ZipFile(wheel(wheels, tag)) as packed:
        names = packed.namelist()
        libraries = [name for name in names if name.endswith((".so", ".dylib", ".dll", ".pyd", ".a"))]
        assert libraries == [f"colibri/{TAGS[tag]}"]
        assert {"colibri/__init__.py", "colibri/_ffi.py"} <= set(names)
        assert all(name.startswith(("colibri/", "libcolibri-")) for name in names)
        info = next(name for name in names if name.endswith(".dist-info/WHEEL"))
        metadata = packed.read(info).decode()
        assert f"\nTag: py3-none-{tag}\n" in metadata and "\nRoot-Is-Purelib: false\n" in metadata
        record = csv.reader(io.StringIO(packed.read(info.replace("WHEEL", "RECORD")).decode()))
        for name, digest, size in record:
            if digest:
                data = packed.read(name)
                expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                assert digest == f"sha256={expected}" and len(data) == int(size)
        assert str(ROOT).encode() not in packed.read(libraries[0])


@every_tag
def test_library(wheels: Path, tag: str, tmp_path: Path) -> None:
    """It exports colibri_* alone, is for the tag's processor, and needs no more than the tag promises."""
    path = library(wheels, tag, tmp_path)
    data = path.read_bytes()
    read = read_binary(data)
    assert "colibri_init" in read.exported
    exported = set(read.exported) - ({"_mh_dylib_header", "__dso_handle"} if "macosx" in tag else set())  # its linker's
    assert [name for name in exported if not name.startswith("colibri_")] == []
    if "linux" in tag:
        assert data[18:20] == (b"\x3e\0" if "x86_64" in tag else b"\xb7\0")
        allowed = r"libc\.so" if "musl" in tag else r"(libc|libm|libpthread|ld-linux[\w.-]*)\.so\.\d"
        assert [name for name in read.needed if not re.fullmatch(allowed, name)] == []
        assert all(tuple(map(int, v[6:].split("."))) <= (2, 17) for v in read.versions if v.startswith("GLIBC_"))
    elif "macosx" in tag:
        assert data[4:8] == (b"\x07\0\0\x01" if "x86_64" in tag else b"\x0c\0\0\x01")
        assert minimum_macos(data) == (11, 0)
        assert read.needed == ["/usr/lib/libSystem.B.dylib"]
    else:
        assert all(re.fullmatch(r"(kernel32|ntdll|api-ms-win-[\w-]+)\.dll", n, re.IGNORECASE) for n in read.needed)


def minimum_macos(data: bytes) -> tuple[int, int]:
    """From LC_BUILD_VERSION or LC_VERSION_MIN_MACOSX."""
    position = 32
    for _ in range(int.from_bytes(data[16:20], "little")):
        command, size = (int.from_bytes(data[position + i : position + i + 4], "little") for i in (0, 4))
        if command in (0x32, 0x24):
            where = position + (12 if command == 0x32 else 8)
            version = int.from_bytes(data[where : where + 4], "little")
            return version >> 16, version >> 8 & 255
        position += size
    raise AssertionError("names no oldest macOS")


@pytest.mark.parametrize("tag", [tag for tag in TAGS if "manylinux" in tag])  # on glibc auditwheel reads no others
def test_auditwheel(wheels: Path, tag: str) -> None:
    """What the tag promises, auditwheel finds too."""
    tool = shutil.which("auditwheel", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if tool is None:
        pytest.skip("auditwheel is not installed: pip install auditwheel")
    done = subprocess.run([tool, "show", str(wheel(wheels, tag))], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert f'"{tag}"' in shown.split("consistent with the following platform tag:")[1][:60], shown


@pytest.mark.skipif(not RUNS_HERE or platform.libc_ver()[0] != "glibc", reason="installs an x86-64 glibc wheel")
def test_installed_in_a_new_environment(wheels: Path, tmp_path: Path) -> None:
    """From the wheel alone; what it depends on is taken from this environment, so that no network is needed."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv" / "lib").glob("python3*/site-packages"))
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site)]
    pip = subprocess.run([*command, str(wheel(wheels, HERE[0]))], capture_output=True, text=True, check=False)
    if "No module named pip" in pip.stderr:
        pytest.skip("pip is not installed")
    assert pip.returncode == 0, pip.stderr
    dependencies = tmp_path / "dependencies"
    dependencies.mkdir()
    for name in ("numpy", "numpy.libs", "click", "safetensors"):
        for found in (Path(folder) / name for folder in sys.path if (Path(folder) / name).is_dir()):
            (dependencies / name).symlink_to(found)
            break
    environment = {"PYTHONPATH": str(dependencies), "PATH": os.environ.get("PATH", "")}
    code = "import colibri; print(colibri.__file__, colibri.version())"
    done = subprocess.run([str(python), "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(site / "colibri" / "__init__.py"), colibri.version()]
    run = [str(python), "-m", "colibri", "run", PROMPT, "--max-tokens", "12"]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5


GREEDY = """
import hashlib, sys
import colibri
opened = colibri.Model(sys.argv[1])
ids = opened.tokenize(sys.argv[2])
session = colibri.Session(opened, max_seq_len=128, num_threads=2)
sums = hashlib.sha256()
for _ in range(12):
    logits = session.forward(ids)
    sums.update(logits.tobytes())
    ids = [int(logits[-1].argmax())]
    print(ids[0])
print(sums.hexdigest(), colibri.version())
"""


@pytest.mark.skipif(not RUNS_HERE, reason="runs an x86-64 Linux Python")
@pytest.mark.skipif(
    not MUSL_PYTHON, reason="COLIBRI_MUSL_PYTHON names no Python: tests/target/musl_python.sh makes one"
)
def test_installed_in_a_musl_python(wheels: Path, tmp_path: Path) -> None:
    """With what it depends on, as pip does on Alpine; then tokens, logits and text are those of the library here."""
    assert b"/ld-musl-" in Path(MUSL_PYTHON).resolve().read_bytes()[:4096], f"{MUSL_PYTHON} does not run on musl"
    about = [MUSL_PYTHON, "-c", "import sys; print(*sys.version_info[:2], sep='.')"]
    version = subprocess.run(about, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    site = tmp_path / "site"
    platforms = [f"--platform=musllinux_1_{minor}_x86_64" for minor in (2, 1)]
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(site), "--only-binary=:all:", *platforms]
    command += ["--implementation=cp", f"--python-version={version}", str(wheel(wheels, HERE[1]))]
    loader_says = subprocess.run([str(MUSL_LOADER)], capture_output=True, text=True, check=False).stderr
    if re.search(r"Version 1\.2\.[0-3]\b", loader_says):
        command.append("numpy<2")  # later wheels hold packed relocations (DT_RELR), which musl knows since 1.2.4
    subprocess.run(command, check=True)
    there = {"PYTHONPATH": str(site), "PATH": os.environ.get("PATH", "")}
    model = demo()

    def both(*arguments: str) -> list[str]:
        runs = (([MUSL_PYTHON], there), ([sys.executable], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}))
        done = [subprocess.run([*p, *arguments], env=e, capture_output=True, text=True, check=False) for p, e in runs]
        assert [run.returncode for run in done] == [0, 0], [run.stderr for run in done]
        return [run.stdout for run in done]

    where = both("-c", "import colibri; print(colibri.__file__)")[0].strip()
    assert where == str(site / "colibri" / "__init__.py")
    for arguments in (["-c", GREEDY, str(model), PROMPT], ["-m", "colibri", "run", PROMPT, "--max-tokens", "12"]):
        musl_text, text = both(*arguments)
        assert len(text.split()) > 5 and musl_text == text


def expected_line(model: Path) -> str:
    """What load_library.c prints, by the library in use here."""
    opened = colibri.Model(model)
    ids = opened.tokenize(PROMPT)
    session = colibri.Session(opened, max_seq_len=128, num_threads=2)
    line = list(ids)
    for _ in range(8):
        line.append(int(session.forward(ids)[-1].argmax()))
        ids = line[-1:]
    return " ".join(map(str, [colibri.version(), *line]))


def loader(folder: Path, target: str) -> Path:
    """tests/target/load_library.c for the target, using its shared C library."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed: pip install ziglang==0.16.0")
    program = folder / "load_library"
    command = [sys.executable, "-m", "ziglang", "cc", f"--target={target}", "-dynamic", "-O1", f"-I{ROOT / 'include'}"]
    sources = [str(ROOT / "tests/target/load_library.c"), "-ldl", "-o", str(program)]
    subprocess.run([*command, *sources], check=True)
    assert read_binary(program.read_bytes()).interpreter
    return program


def demo() -> Path:
    try:
        return colibri.demo_path()
    except colibri.NotFoundError:
        pytest.skip("this checkout has no demo model")


def compare(command: list[str], model: Path) -> None:
    done = subprocess.run([*command, str(model), PROMPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected_line(model)


@pytest.mark.skipif(not RUNS_HERE, reason="runs an x86-64 Linux program")
@pytest.mark.skipif(not MUSL_LOADER.exists(), reason="no musl loader here (Debian: musl)")
def test_loaded_by_musl(wheels: Path, tmp_path: Path) -> None:
    """The musllinux library in a musl process gives the tokens that it gives here."""
    path = library(wheels, "musllinux_1_2_x86_64", tmp_path)
    compare([str(MUSL_LOADER), str(loader(tmp_path, "x86_64-linux-musl")), str(path)], demo())


@pytest.mark.skipif(QEMU is None, reason="qemu-aarch64-static is not installed (Debian: qemu-user-static)")
@pytest.mark.skipif(
    not (ARM64_ROOT / "lib/ld-linux-aarch64.so.1").exists(), reason="no C library for ARM64 (Debian: libc6-arm64-cross)"
)
@pytest.mark.parametrize("cpu", ["cortex-a53", "cortex-a72", "max"])
def test_loaded_on_arm64(wheels: Path, tmp_path: Path, cpu: str) -> None:
    """The manylinux library for ARM64 in a glibc process under qemu."""
    path = library(wheels, "manylinux_2_17_aarch64", tmp_path)
    program = loader(tmp_path, "aarch64-linux-gnu.2.17")
    compare([str(QEMU), "-cpu", cpu, "-L", str(ARM64_ROOT), str(program), str(path)], demo())


@pytest.mark.slow
def test_two_builds_are_equal(wheels: Path, tmp_path: Path) -> None:
    """The same sources in another folder, with an empty cache, give the same bytes."""
    sources = tmp_path / "elsewhere"
    sources.mkdir()
    for name in ("build.zig", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, sources / name)
    for name in ("include", "lib", "tools", "tests", "examples", "python"):
        ignored = shutil.ignore_patterns("__pycache__", "golden", *TAGS.values(), "colibri.wasm")
        shutil.copytree(ROOT / name, sources / name, ignore=ignored)
    tags = {BUILT_HERE[0]: HERE[0]}
    if "COLIBRI_WHEELS" in os.environ:  # other kinds of libraries
        tags |= {"aarch64-macos.11.0": "macosx_11_0_arm64", "x86_64-windows-gnu": "win_amd64"}
    for target, tag in tags.items():
        build(tmp_path, target, sources=sources)
        assert wheel(tmp_path, tag).read_bytes() == wheel(wheels, tag).read_bytes(), tag
