"""Memory nodes for real: a Linux kernel with two of them, and with an odd set of four, booted in qemu. Its only program
is tests/target/numa/init.c, which asks the kernel where each page lies and where each thread may run.

Needs the Python package ziglang, Debian's qemu-system-x86 and an x86-64 kernel: the file that COLIBRI_TEST_KERNEL
names, or /boot/vmlinuz-* (one is in Debian's linux-image-cloud-amd64). With mkfs.ext4, a disk with files too."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QEMU = shutil.which("qemu-system-x86_64")
MKFS = shutil.which("mkfs.ext4", path=os.environ.get("PATH", "") + os.pathsep + "/sbin" + os.pathsep + "/usr/sbin")

# Two nodes; or four: node 2 has a CPU and no memory and lies near node 1, node 3 has memory and no CPU.
MACHINES = {
    "two": {"memory": {0: 512, 1: 512}, "cpus": {0: "0-1", 1: "2-3"}, "far": {}},
    "odd": {
        "memory": {0: 384, 1: 384, 3: 256},
        "cpus": {0: "0-1", 1: "2", 2: "3"},
        "far": {(0, 1): 20, (0, 2): 30, (0, 3): 30, (1, 2): 15, (1, 3): 30, (2, 3): 30},
    },
}


def is_kernel(path: Path) -> bool:
    """An x86 kernel that a boot loader can load, and that we may read."""
    try:
        with path.open("rb") as file:
            return file.read(0x206)[0x202:] == b"HdrS"
    except OSError:
        return False


@pytest.fixture(scope="module")
def kernel() -> Path:
    if QEMU is None:
        pytest.skip("qemu-system-x86_64 is not installed (Debian: qemu-system-x86)")
    named = os.environ.get("COLIBRI_TEST_KERNEL")
    candidates = [Path(named)] if named else sorted(Path("/boot").glob("vmlinuz-*"), reverse=True)
    for candidate in candidates:
        if is_kernel(candidate):
            return candidate
    pytest.skip("no x86-64 kernel: COLIBRI_TEST_KERNEL names none and /boot has none (Debian: linux-image-cloud-amd64)")


def archive(entries: list[tuple[str, int, bytes, tuple[int, int]]]) -> bytes:
    """What the kernel unpacks into its first file system: cpio, format newc. Entries: name, mode, content, device."""
    result = b""
    for number, (name, mode, content, device) in enumerate([*entries, ("TRAILER!!!", 0, b"", (0, 0))], 1):
        encoded = name.encode() + b"\0"
        fields = [number, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(encoded), 0]
        result += b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
        result += b"\0" * (-len(result) % 4) + content
        result += b"\0" * (-len(result) % 4)
    return result


@pytest.fixture(scope="module")
def first_files(kernel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive with init.c's program, linked with the library."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed: pip install ziglang==0.16.0")
    folder = tmp_path_factory.mktemp("numa")
    command = [sys.executable, "-m", "ziglang", "build", "numa-init", "-Dtarget=x86_64-linux-musl"]
    command += ["--prefix", str(folder)]
    if not os.access(ROOT, os.W_OK):
        command += ["--cache-dir", str(tmp_path_factory.mktemp("cache"))]
    subprocess.run(command, cwd=ROOT, check=True)
    init = (folder / "tests" / "numa-init").read_bytes()
    path = folder / "first-files"
    directory, console, program = stat.S_IFDIR | 0o755, stat.S_IFCHR | 0o600, stat.S_IFREG | 0o755
    entries = [("dev", directory, b"", (0, 0)), ("dev/console", console, b"", (5, 1)), ("init", program, init, (0, 0))]
    path.write_bytes(archive(entries))
    return path


def options(machine: str) -> list[str]:
    """qemu's, for CPUs and memory."""
    about = MACHINES[machine]
    result = ["-smp", "4", "-m", str(sum(about["memory"].values()))]
    for node in sorted({*about["memory"], *about["cpus"]}):
        text = f"node,nodeid={node}"
        if node in about["cpus"]:
            text += f",cpus={about['cpus'][node]}"
        if node in about["memory"]:
            result += ["-object", f"memory-backend-ram,id=memory{node},size={about['memory'][node]}M"]
            text += f",memdev=memory{node}"
        result += ["-numa", text]
    for (a, b), distance in about["far"].items():
        result += ["-numa", f"dist,src={a},dst={b},val={distance}"]
    return result


@pytest.mark.parametrize("machine", MACHINES)
def test_machine(kernel: Path, first_files: Path, machine: str, tmp_path: Path) -> None:
    command = [str(QEMU), "-machine", "q35", "-accel", "tcg", "-cpu", "max", *options(machine)]
    command += ["-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"]
    command += ["-kernel", str(kernel), "-initrd", str(first_files)]
    command += ["-append", f"console=ttyS0 quiet panic=-1 -- {machine}"]
    if MKFS is not None:
        disk = tmp_path / "disk"
        disk.write_bytes(b"")
        os.truncate(disk, 32 << 20)
        subprocess.run([MKFS, "-q", str(disk)], check=True)
        command += ["-drive", f"file={disk},if=none,id=disk,format=raw", "-device", "nvme,drive=disk,serial=1"]
    shown = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=600, check=False)
    text = shown.stdout.decode(errors="replace") + shown.stderr.decode(errors="replace")
    print(text)
    assert "numa: ok" in text, text
