"""A gateway with 512 MB: the static colibri-infer with the demo model and with a q4 model of 300 MB, as a child with an
address space of 512 MiB (`ulimit -v 524288`) and in a control group of 512 MB that begins with a cold page cache.

The text is that of the unlimited run. With too little there is one line that says what was refused, never a crash.
Every residency maps the file, so the address space must hold it: with 2 threads `map` and `lock` need 8 MiB more,
`stream` 24 MiB and its cache of experts more, `huge` a second copy, so that the large model does not fit 512 MiB. What
`stream` saves is memory: the same model runs with 32 MB of it. The demo model (8 MB) runs in 11 MiB of addresses
(`map`) and 19 MiB (`stream`, `huge`).
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import colibri
import numpy as np
import pytest
import tiny
from colibri.convert import layout, pack
from conftest import tokenizer_json
from test_residency import forget

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
MEMORY = 512 * MIB
PROMPT = "Once upon a time"
LARGE = tiny.mixtral(
    vocab_size=270,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=9,
    num_attention_heads=12,
    num_key_value_heads=4,
    num_local_experts=12,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=None,
)

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS and control groups are Linux's"),
    pytest.mark.skipif(not (ROOT / "build.zig").is_file(), reason="needs the source tree"),
]


# ---- A model of 300 MB


def large_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of LARGE's tensors."""
    small = tiny.weights({**LARGE, "hidden_size": 24, "intermediate_size": 16, "vocab_size": 32})  # heads of 2
    sizes = {24: LARGE["hidden_size"], 16: LARGE["intermediate_size"], 32: LARGE["vocab_size"], 12: 12, 8: 256}
    for name, tensor in small.items():
        yield name, tuple(sizes[n] for n in tensor.shape)


def write_large(folder: Path) -> None:
    """The checkpoint, bf16: cuts of one pool of random numbers of 2^-6 to 2^-5 (embeddings: 0.5 to 1), either sign."""
    pool = np.random.default_rng(1).integers(0, 1 << 16, 16 << 20, dtype=np.uint16) & 0x80FF
    header, end = {}, 0
    for name, shape in large_shapes():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in large_shapes():
            start, count = zlib.crc32(name.encode()) % (8 << 20), int(np.prod(shape))
            values = pool[start : start + count] | (0x3F00 if "embed" in name else 0x3C80)
            file.write((np.full(count, 0x3F80, np.uint16) if "norm" in name else values).tobytes())
    (folder / "config.json").write_text(json.dumps({**LARGE, "torch_dtype": "bfloat16"}), encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()), encoding="utf-8")


class QuickPacker:
    """Stands in for pack_matrix, which takes minutes for so large a model: it packs one matrix of each shape; the
    others get that one's blocks of rows, beginning with another block.
    """

    def __init__(self) -> None:
        self.pack, self.lock = pack.pack_matrix, threading.Lock()
        self.known: dict[Any, tuple[np.ndarray, np.ndarray]] = {}

    def blocks(self, src: np.ndarray, src_dtype: int, dtype: int, rule: str) -> tuple[np.ndarray, np.ndarray]:
        with self.lock:
            if (src.shape, dtype) not in self.known:
                count = layout.pad(src.shape[0], 16) // 16
                blocks = pack.aligned_bytes(count * layout.block_bytes(dtype, layout.pad(src.shape[1], 128)))
                scales = np.zeros((count, 16), np.float32)
                self.pack(src, src_dtype, blocks, dtype, rule, scale=scales)
                self.known[src.shape, dtype] = blocks.reshape(count, -1), scales
            return self.known[src.shape, dtype]

    def __call__(
        self, src: Any, src_dtype: int, dst: Any, dtype: int, rule: str, *, block_stride=0, scale=None, scale_stride=0
    ) -> tuple[float, float]:
        if scale is None:
            return self.pack(src, src_dtype, dst, dtype, rule, block_stride=block_stride)
        blocks, scales = self.blocks(src, src_dtype, dtype, rule)
        count, size = blocks.shape
        first = zlib.crc32(src[:1].tobytes()) % count
        for i in range(count):
            at, row = i * (block_stride or size), (first + i) % count
            dst[at : at + size] = blocks[row]
            ctypes.memmove(scale.ctypes.data + 4 * i * (scale_stride or 16), scales[row].ctypes.data, 64)
        return 0.0, 1.0


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("gateway")
    if shutil.disk_usage(folder).free < 2 << 30:
        pytest.skip("needs 2 GB of disk")
    write_large(folder / "checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "pack_matrix", QuickPacker())
        colibri.convert(folder / "checkpoint", folder / "large.colibri", dtype="q4")
    shutil.rmtree(folder / "checkpoint")
    assert 280e6 < (folder / "large.colibri").stat().st_size < 320e6
    yield folder / "large.colibri"
    (folder / "large.colibri").unlink()


@pytest.fixture(scope="module")
def infer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The static program of `zig build`; COLIBRI_PREFIX names an installation that is there already."""
    if "COLIBRI_PREFIX" in os.environ:
        return Path(os.environ["COLIBRI_PREFIX"], "bin", "colibri-infer")
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("needs ziglang from PyPI")
    folder, cache = tmp_path_factory.mktemp("prefix"), tmp_path_factory.mktemp("cache")
    command = [sys.executable, "-m", "ziglang", "build", "--prefix", str(folder), "--cache-dir", str(cache)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "bin" / "colibri-infer"


@pytest.fixture(params=["demo", "large"])
def model(request: pytest.FixtureRequest) -> Path:
    return Path(colibri.demo_path()) if request.param == "demo" else request.getfixturevalue("large")


# ---- Running it

# A small process between: a child's peak begins with that of the process that starts it (here 11 MB, not pytest's).
LAUNCH = """
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], capture_output=True)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps([done.returncode, done.stdout.decode(), done.stderr.decode(), peak << 10]))
"""
LIMITED = '[ -z "$0" ] || echo $$ >"$0" || exit 99; ulimit -v "$1" || exit 99; shift; exec "$@"'


@dataclass
class Result:
    status: int
    text: str
    errors: str
    peak: int


def run(infer: Path, model: Path, *options: str, space: int | None = None, procs: Path | None = None) -> Result:
    """24 greedy tokens by two threads, with `space` bytes of addresses, in the control group of `procs`."""
    kib = "unlimited" if space is None else str(space >> 10)
    command = [sys.executable, "-I", "-S", "-c", LAUNCH, "sh", "-c", LIMITED, str(procs or ""), kib]
    command += [str(infer), "--model", str(model), "--prompt", PROMPT, "--max-tokens", "24", "--threads", "2", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result = Result(*json.loads(done.stdout))
    print(f"{model.name} {' '.join(options)}: status {result.status}, peak RSS {result.peak / 1e6:.1f} MB")
    return result


_texts: dict[Path, str] = {}


def unlimited(infer: Path, model: Path) -> str:
    if model not in _texts:
        result = run(infer, model)
        assert result.status == 0 and len(result.text) > 12, result
        _texts[model] = result.text
    return _texts[model]


def check_refusal(result: Result, words: str) -> None:
    assert (result.status, result.text) == (1, ""), (result.status, result.errors)
    assert result.errors.startswith("colibri-infer: error: ") and result.errors.count("\n") == 1, result.errors
    assert re.search(words, result.errors), result.errors


@pytest.mark.parametrize("residency", ["map", "lock", "stream", "huge"])
def test_address_space(infer: Path, model: Path, residency: str) -> None:
    result = run(infer, model, "--residency", residency, space=MEMORY)
    if residency == "huge" and 2 * model.stat().st_size > MEMORY:
        check_refusal(result, "the system refused")
    else:
        assert (result.status, result.text) == (0, unlimited(infer, model)), result.errors


@pytest.mark.parametrize("residency", ["map", "lock", "stream", "huge"])
def test_too_little_address_space(infer: Path, large: Path, residency: str) -> None:
    """Less than the file takes: it cannot be mapped. A little more: the rest is refused."""
    check_refusal(run(infer, large, "--residency", residency, space=128 * MIB), "out of memory or address space")
    space = large.stat().st_size + MIB
    check_refusal(run(infer, large, "--residency", residency, space=space), "no memory|the system refused")


@pytest.mark.parametrize(("residency", "most"), [("map", 14), ("stream", 22)])
def test_any_address_space(infer: Path, residency: str, most: int) -> None:
    """MiB by MiB, from less than the demo model takes: one line, and from some size on the whole text."""
    demo = Path(colibri.demo_path())
    statuses = []
    for mib in range(7, most):
        result = run(infer, demo, "--residency", residency, space=mib * MIB)
        if result.status == 0:
            assert result.text == unlimited(infer, demo)
        else:
            check_refusal(result, "")
        statuses.append(result.status)
    assert statuses == sorted(statuses, reverse=True) and set(statuses) == {0, 1}, statuses


def make_group(limit: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from peers import cgroup

    try:
        return cgroup.make_group(limit, f"colibri-gateway-{os.getpid()}")
    except cgroup.GroupError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("residency", ["map", "stream"])
def test_memory(infer: Path, model: Path, residency: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 MB for the program and its page cache, and 512 MiB of addresses too."""
    expected = unlimited(infer, model)
    with make_group(MEMORY, monkeypatch) as group:
        forget(model)
        result = run(infer, model, "--residency", residency, space=MEMORY, procs=group.procs)
        peak = group.peak()
    assert (result.status, result.text) == (0, expected), (result.status, result.errors)
    most = model.stat().st_size // 2 if residency == "stream" and model.name == "large.colibri" else MEMORY
    assert 4 * MIB < result.peak < most
    if peak is not None:  # it was in the group, and read the file there
        assert 4 * MIB < peak <= MEMORY


def test_stream_in_a_tenth_of_the_model(infer: Path, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `stream` can do with: 32 MB of memory for 300 MB of model."""
    expected = unlimited(infer, large)
    with make_group(32 * MIB, monkeypatch) as group:
        forget(large)
        options = ["--residency", "stream", "--expert-cache-size", "8M"]
        result = run(infer, large, *options, procs=group.procs)
    assert (result.status, result.text) == (0, expected), (result.status, result.errors)
