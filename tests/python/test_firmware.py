"""The bare library (-Dthreads=false -Dfile_io=false) on a processor without an operating system: tests/target/firmware
runs on QEMU's board "virt", continues a prompt with a model in memory, and must print the text and the logits' sum that
the same model gives here. A system call, a null pointer or an instruction that the processor lacks ends it.

Needs the Python package ziglang and Debian's qemu-system-arm."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import colibri
import numpy as np
import pytest
from binaries import read_elf, text_at
from colibri import _ffi

ROOT = Path(__file__).resolve().parents[2]
QEMU = shutil.which("qemu-system-aarch64")
PROMPT = "Once upon a time"
TOKENS = 32
KERNELS = {"cortex-a53": "neon", "cortex-a72": "neon", "max": "neon dotprod i8mm"}  # by processor

needs_qemu = pytest.mark.skipif(QEMU is None, reason="qemu-system-aarch64 is not installed (Debian: qemu-system-arm)")


@pytest.fixture(scope="module")
def firmware(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed: pip install ziglang==0.16.0")
    folder = tmp_path_factory.mktemp("firmware")
    command = [sys.executable, "-m", "ziglang", "build", "firmware", "--prefix", str(folder)]
    if not os.access(ROOT, os.W_OK):
        command += ["--cache-dir", str(tmp_path_factory.mktemp("cache"))]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder / "tests" / "firmware.elf"


def boot(firmware: Path, model: Path, *arguments: str, cpu: str = "cortex-a53") -> tuple[int, str]:
    """Exit status and what came over the serial line."""
    path, program = (str(file).replace(",", ",,") for file in (model, firmware))
    words = ["firmware", f"size={model.stat().st_size}", *arguments]
    command = [str(QEMU), "-M", "virt", "-cpu", cpu, "-m", "128M"]
    command += ["-nodefaults", "-display", "none", "-serial", "stdio"]
    command += ["-kernel", program, "-device", f"loader,file={path},addr=0x44000000,force-raw=on"]
    command += ["-semihosting-config", ",".join(["enable=on", "target=native", *(f"arg={word}" for word in words)])]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=300, check=False)
    assert result.stderr == b"", result.stderr
    return result.returncode, result.stdout.decode()


def fnv1a(data: bytes, value: int) -> int:
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def expected(model: Path, prompt: str, tokens: int) -> tuple[str, str]:
    """The text and the line about the logits, computed here."""
    with colibri.Session(model, max_seq_len=96, num_threads=1, outputs="last") as session:
        text = session.generate(prompt, tokens)
        session.reset()
        ids, value, steps = session.model.tokenize(prompt), 0xCBF29CE484222325, 0
        while steps < tokens and (steps == 0 or ids[0] not in session.model.config["eos_tokens"]):
            value = fnv1a(session.forward(ids).tobytes(), value)
            ids, steps = [session.sample(0)], steps + 1
        return text, f"logits: {steps} x {session.model.config['vocab_size']}, FNV-1a {value:016x}"


@pytest.fixture(scope="module")
def story() -> tuple[str, str]:
    return expected(colibri.demo_path(), PROMPT, TOKENS)


def check_run(shown: str, text: str, logits: str, kernels: str) -> dict[str, int]:
    """Returns the figures of the line about memory."""
    match = re.fullmatch(r"libcolibri .*\n----\n(.*)\n----\n(.*)\n(.*)\n(.*)\nmemory: (.*)\n", shown, re.DOTALL)
    assert match, shown
    assert match[1] == text
    assert match[2] == logits
    assert match[3] == f"kernels: {kernels}"
    assert re.fullmatch(r"time: [1-9]\d* ns in infer", match[4])
    return {name: int(number) for name, number in (figure.split() for figure in match[5].split(", "))}


@needs_qemu
@pytest.mark.parametrize("cpu", KERNELS)
def test_story(firmware: Path, story: tuple[str, str], cpu: str) -> None:
    status, shown = boot(firmware, colibri.demo_path(), cpu=cpu)
    assert status == 0, shown
    memory = check_run(shown, *story, f"neon, {KERNELS[cpu]}")
    assert memory["model"] == colibri.demo_path().stat().st_size
    source = (ROOT / "tests/target/firmware/firmware.c").read_text(encoding="utf-8")
    said = {name: 1000 * int(most) for name, most in re.findall(r"(\w+) (\d+) KB", source)}
    assert said.keys() == memory.keys() - {"model"}
    assert [name for name in said if memory[name] > said[name]] == [], memory


@needs_qemu
def test_another_model_and_prompt(firmware: Path, tiny_models: dict[str, Path]) -> None:
    """Given to the same program: a model, a prompt, a number of tokens and an instruction set."""
    for model in tiny_models.values():
        status, shown = boot(firmware, model, "isa=ref", "tokens=8", "prompt=in the theory, ,on".replace(",", ",,"))
        assert status == 0, shown
        check_run(shown, *expected(model, "in the theory, ,on", 8), "ref, neon")


def negative_parameter(data: bytearray) -> None:
    """rope_theta becomes -0.00015, with a right checksum."""
    start, size = struct.unpack_from("<QQ", data, 32)
    params = data.index(struct.pack("<II", 512, 1), start, start + size)
    struct.pack_into("<f", data, params + 148, -0.00015)
    struct.pack_into("<I", data, 48, 0)
    struct.pack_into("<I", data, 48, zlib.crc32(data[start : start + size], zlib.crc32(data[:64])))


def flipped(position: int) -> Callable[[bytearray], None]:
    def damage(data: bytearray) -> None:
        data[position] ^= 0x10

    return damage


def truncated(data: bytearray) -> None:
    del data[1_000_000:]


def erased(data: bytearray) -> None:
    data[:] = b"\xff" * len(data)


DAMAGE = {
    "truncated": truncated, "erased": erased, "header": flipped(25), "directory": flipped(200),
    "weights": flipped(2_000_000), "parameter": negative_parameter,
}  # fmt: skip


def sentence_here(data: bytes) -> str:
    """What the library here says about these bytes."""
    room = np.zeros(len(data) + 64, np.uint8)
    at = -room.ctypes.data % 64
    room[at : at + len(data)] = np.frombuffer(data, np.uint8)
    model, lib = ctypes.c_void_p(), _ffi.lib()
    status = lib.colibri_model_open_memory(room.ctypes.data + at, len(data), ctypes.byref(model))
    status = status or lib.colibri_model_verify(model)
    line = f"{lib.colibri_status_name(status).decode()}: {lib.colibri_last_error().decode()}"
    lib.colibri_model_close(model)
    return line


@needs_qemu
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_model(firmware: Path, tmp_path: Path, damage: str) -> None:
    data = bytearray(colibri.demo_path().read_bytes())
    DAMAGE[damage](data)
    (tmp_path / "damaged.colibri").write_bytes(data)
    sentence = sentence_here(bytes(data))
    assert sentence.startswith("COLIBRI_ERR_")
    status, shown = boot(firmware, tmp_path / "damaged.colibri")
    assert (status, shown.splitlines()[1:]) == (1, [sentence])


FAULTS = {
    "svc": "a system call", "undefined": "an unknown instruction", "null": "access to a bad address",
    "deep": "access to a bad address",
}  # fmt: skip


@needs_qemu
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(firmware: Path, fault: str) -> None:
    """What the story's run would end with, if the library did it."""
    status, shown = boot(firmware, colibri.demo_path(), f"fault={fault}")
    assert status == 2, shown
    assert f"exception: {FAULTS[fault]} (vector 4, " in shown


def test_nothing_of_a_system_is_linked(firmware: Path) -> None:
    """No dynamic loader, no thread-local storage, no call to a system but the one that the program makes on purpose."""
    data = firmware.read_bytes()
    elf = read_elf(data)
    assert not elf.interpreter and elf.needed == []
    assert ".text" in elf.sections and not {".tdata", ".tbss", ".dynamic"} & set(elf.sections)
    (at,) = struct.unpack_from("<Q", data, 40)
    count, names = struct.unpack_from("<HH", data, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, at + 64 * i) for i in range(count)]
    code = next(h for h in headers if text_at(data[headers[names][4] :], h[0]) == ".text")
    words = np.frombuffer(data, "<u4", code[5] // 4, code[4])
    calls = words[np.isin(words & 0xFFE0001F, [0xD4000001, 0xD4000002, 0xD4000003])]  # svc, hvc, smc
    assert calls.tolist() == [0xD4000001]
