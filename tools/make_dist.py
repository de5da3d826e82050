"""Release archives: builds everything for each target with zig and packs it, the same bytes from the same sources.

    python tools/make_dist.py [OUTDIR] [--targets NAME ...] [--zig ZIG]      also: zig build dist

One archive a target, colibri-VERSION-TARGET.tar.gz (.zip for Windows), with libraries, headers, pkg-config and CMake
files, tools and licence. SHA256SUMS lists them as `sha256sum -c` reads it. Needs nothing but Python and, without --zig,
the package ziglang.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The name in the archive's name, and what zig is told where that says more.
TARGETS = {
    "x86_64-linux-gnu.2.17": "x86_64-linux-gnu.2.17",
    "x86_64-linux-musl": "x86_64-linux-musl",
    "aarch64-linux-gnu.2.17": "aarch64-linux-gnu.2.17",
    "aarch64-linux-musl": "aarch64-linux-musl",
    "arm-linux-musleabihf": "arm-linux-musleabihf",
    "riscv64-linux-musl": "riscv64-linux-musl",
    "x86_64-windows-gnu": "x86_64-windows-gnu",
    "aarch64-macos": "aarch64-macos.11.0",
    "x86_64-macos": "x86_64-macos.11.0",
    "wasm32-wasi": "wasm32-wasi",
}
# Processors other than zig's baseline of the target: the oldest that the 32-bit archive is for. A fused multiply-add in
# software would cost half the speed there.
PROCESSORS = {"arm-linux-musleabihf": "cortex_a7"}
DOCUMENTS = ("LICENSE", "README.md", "CHANGELOG.md")
EPOCH = 315532800  # 1980-01-01, the oldest time that both kinds of archive can say


def version() -> str:
    text = (ROOT / "include" / "colibri.h").read_text(encoding="utf-8")
    match = re.search(r'#define COLIBRI_VERSION_STRING "(.*)"', text)
    assert match, "include/colibri.h names no version"
    return match[1]


def build(zig: list[str], target: str, prefix: Path) -> None:
    """Install everything for the target below `prefix`; the cache is the source folder's, or a temporary one."""
    processor = PROCESSORS.get(target, "baseline")
    command = [*zig, "build", f"-Dtarget={TARGETS[target]}", f"-Dcpu={processor}", "-Doptimize=ReleaseFast"]
    command += ["--prefix", str(prefix)]
    if not os.access(ROOT, os.W_OK):
        command += ["--cache-dir", str(prefix.parent / "cache")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"building for {target} failed (exit status {done.returncode})\n{' '.join(command)}\n{done.stdout}")


def plain_library(zig: list[str], file: Path) -> None:
    """Write a static library anew: zig names its objects by their paths in the cache, which differ between machines."""
    data, position, long_names = file.read_bytes(), 8, b""
    with tempfile.TemporaryDirectory(prefix="colibri-objects-") as folder:
        objects: list[str] = []
        while position < len(data):
            name, size = data[position : position + 16].rstrip(), int(data[position + 48 : position + 58])
            body = data[position + 60 : position + 60 + size]
            position += 60 + size + size % 2
            if name == b"//":
                long_names = body
            elif name.startswith(b"#1/"):  # BSD: the name stands before the object
                name, body = body[: int(name[3:])].rstrip(b"\0"), body[int(name[3:]) :]
            elif name[:1] == b"/" and name[1:].isdigit():  # GNU: a place among the long names
                name = re.split(rb"/?[\n\0]", long_names[int(name[1:]) :])[0]
            base = re.split(r"[/\\]", name.decode().rstrip("/"))[-1]
            if not base or base.startswith("__.SYMDEF"):
                continue  # tables, which `ar` makes again
            if base in objects:
                sys.exit(f"{file} holds two objects named {base}: name their sources differently")
            objects.append(base)
            (Path(folder) / base).write_bytes(body)
        fresh = Path(folder) / file.name
        kind = "darwin" if data[8:11] == b"#1/" else "coff" if file.suffix == ".lib" else "gnu"
        subprocess.run([*zig, "ar", f"--format={kind}", "rcsD", str(fresh), *objects], cwd=folder, check=True)
        file.write_bytes(fresh.read_bytes())


def members(folder: Path, top: str) -> list[tuple[str, Path]]:
    """Files and links below the folder, with their names in the archive, in the order of these."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return sorted((f"{top}/{path.relative_to(folder).as_posix()}", path) for path in paths)


def mode(folder: Path, path: Path) -> int:
    """Programs and DLLs may be executed, whatever the umask was."""
    return 0o755 if path.relative_to(folder).parts[0] == "bin" else 0o644


def write_tar(file: Path, folder: Path, top: str) -> None:
    """As gzip'ed tar, with links as links; no owner, no time, no name of the file itself."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, path in members(folder, top):
            entry = tarfile.TarInfo(name)
            entry.mtime, entry.mode = EPOCH, mode(folder, path)
            if path.is_symlink():
                entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, os.readlink(path), 0o777
                archive.addfile(entry)
            else:
                data = path.read_bytes()
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    with (
        file.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=9, mtime=EPOCH) as packed,
    ):
        packed.write(plain.getvalue())


def write_zip(file: Path, folder: Path, top: str) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, path in members(folder, top):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system, entry.external_attr = 3, (0o100000 | mode(folder, path)) << 16
            archive.writestr(entry, path.read_bytes())


def make_archive(zig: list[str], target: str, output: Path) -> Path:
    top = f"colibri-{version()}-{target}"
    with tempfile.TemporaryDirectory(prefix="colibri-dist-") as scratch:
        folder = Path(scratch) / "out"
        build(zig, target, folder)
        for library in [*folder.glob("lib/*.a"), *folder.glob("lib/colibri_static.lib")]:
            plain_library(zig, library)
        for document in DOCUMENTS:
            shutil.copyfile(ROOT / document, folder / document)
        for leftover in folder.rglob("*.pdb"):
            leftover.unlink()
        windows = "windows" in target
        file = output / (top + (".zip" if windows else ".tar.gz"))
        beside = file.with_name(f".{file.name}.part")
        (write_zip if windows else write_tar)(beside, folder, top)
        os.replace(beside, file)
    return file


def write_sums(output: Path) -> None:
    """Of all archives of this version that lie in the folder, so that a part of them can be made anew."""
    files = sorted(path for path in output.glob(f"colibri-{version()}-*") if path.name.endswith((".tar.gz", ".zip")))
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (output / "SHA256SUMS").write_text("".join(lines), encoding="ascii", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Build release archives for many targets with zig.")
    parser.add_argument("output", type=Path, nargs="?", default=ROOT / "dist", help="default: dist/")
    parser.add_argument(
        "--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="NAME", help="default: all"
    )
    parser.add_argument("--zig", help="the zig program; default: that of the package ziglang")
    arguments = parser.parse_args()
    zig = [arguments.zig] if arguments.zig else [sys.executable, "-m", "ziglang"]
    arguments.output.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # much of a build is one thread of zig's
        made = [pool.submit(make_archive, zig, target, arguments.output) for target in arguments.targets]
        try:
            for file in (each.result() for each in made):
                print(f"{file} ({file.stat().st_size} bytes)", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # those that run come to their end
            raise
    write_sums(arguments.output)


if __name__ == "__main__":
    main()
