"""Where experts live: the same bits for any residency, cache, cutting and threads; silence after init, as strace sees
it; and models larger than the memory that a control group allows.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import colibri
import numpy as np
import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

IDS = [(7 * i + i * i) % 257 for i in range(40)]
_expected: dict[Path, np.ndarray] = {}


def expected(path: Path) -> np.ndarray:
    """Logits of all of IDS, from the page cache by one thread."""
    if path not in _expected:
        with colibri.Session(path, max_seq_len=len(IDS), num_threads=1, residency="map") as session:
            _expected[path] = session.forward(IDS).copy()
    return _expected[path]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(["f32", "q8"]),
    residency=st.sampled_from(["map", "lock", "huge", "stream", "stream", "stream"]),
    cache=st.integers(2, 20),
    threads=st.integers(1, 4),
    chunk=st.integers(1, 40),
    cuts=st.lists(st.integers(1, 39), max_size=12, unique=True),
    again=st.integers(0, 39),
)
def test_same_bits(
    tiny_models: dict[str, Path],
    dtype: str,
    residency: Any,
    cache: int,
    threads: int,
    chunk: int,
    cuts: list[int],
    again: int,
) -> None:
    """However it is cut and wherever it lives; and again from some position, with what the cache holds by then."""
    options = {"expert_cache_size": cache} if residency == "stream" else {}
    want = expected(tiny_models[dtype])
    with colibri.Session(
        tiny_models[dtype],
        max_seq_len=len(IDS),
        num_threads=threads,
        max_chunk_tokens=chunk,
        residency=residency,
        **options,  # type: ignore[arg-type]
    ) as session:
        for begin in (0, again):
            session.truncate(0, begin)
            places = [begin, *(c for c in sorted(cuts) if c > begin), len(IDS)]
            for first, end in itertools.pairwise(places):
                np.testing.assert_array_equal(session.forward(IDS[first:end]), want[first:end])
        stats = session.stats()
        assert stats["cache_experts"] == (min(cache, 16) if residency == "stream" else 0)
        assert (stats["expert_hits"] + stats["expert_misses"] == stats["expert_calls"]).all()


# ---- Silence

QUIET = """
import ctypes, gc, os, sys
from colibri import _ffi
lib = _ffi.lib()
config = _ffi.colibri_config_t.init(
    model_path=sys.argv[1].encode(), residency=int(sys.argv[2]), num_threads=2, max_seq_len=128)
context = lib.colibri_init(ctypes.byref(config))
assert context, lib.colibri_last_error()
token, length = ctypes.c_int32(1), ctypes.c_int32(1)
at, count = ctypes.byref(token), ctypes.byref(length)
set_input, infer, sample, reset = lib.colibri_set_input, lib.colibri_infer, lib.colibri_sample, lib.colibri_reset
def decode(n):
    for i in range(n):
        if i % 128 == 0:
            reset(context)
        if set_input(context, at, count, 1) or infer(context) or sample(context, 0, None, at):
            os._exit(3)
gc.disable()
decode(300)
os.write(1, b"begin")
decode(1000)
os.write(1, b"end")
lib.colibri_free(context)
"""


def traced(arguments: list[str], log: Path) -> list[str]:
    """Names of the system calls, of all threads, between the two words."""
    command = ["strace", "-f", "-qq", "-o", str(log), sys.executable, "-c", QUIET, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if "ptrace" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.returncode == 0 and done.stdout == "beginend", done.stderr
    lines = log.read_text(errors="replace").splitlines()
    begin, end = (next(i for i, line in enumerate(lines) if f'write(1, "{word}"' in line) for word in ("begin", "end"))
    calls = [line.split(None, 1)[1] for line in lines[begin + 1 : end]]
    return [call.removeprefix("<... ").split("(")[0].split()[0] for call in calls if "resumed>" not in call]


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("residency", ["map", "lock", "huge"])
def test_only_futex(tiny_model: Path, tmp_path: Path, residency: str) -> None:
    """1,000 decoded tokens: threads sleep and wake each other, nothing else."""
    code = {"map": 1, "lock": 2, "huge": 3}[residency]
    assert set(traced([str(tiny_model), str(code)], tmp_path / "log")) <= {"futex"}


# ---- Less memory than the model takes

LIMIT = 60 << 20
LIMITED = """
import hashlib, json, sys
import colibri
options = {"expert_cache_size": 5} if sys.argv[2] == "stream" else {}
options |= {"max_seq_len": 64, "num_threads": 2, "max_chunk_tokens": 16, "residency": sys.argv[2]}
with colibri.Session(sys.argv[1], **options) as s:
    parts = [s.forward(list(range(3, 40))), *(s.forward([token]) for token in range(50, 60))]
    digest = hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
    stats = s.stats()
    print(json.dumps({"digest": digest, "short": int(stats["memory_short"]), "residency": stats["residency"]}))
"""


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """77 MB, f32: 24 experts of 3 MB."""
    folder = tmp_path_factory.mktemp("large")
    config = tiny.mixtral(hidden_size=256, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8)
    tiny.save(folder / "checkpoint", config)
    colibri.convert(folder / "checkpoint", folder / "large.colibri", dtype="f32")
    shutil.rmtree(folder / "checkpoint")
    return folder / "large.colibri"


@contextmanager
def memory_group() -> Iterator[Path]:
    """A control group that may use LIMIT bytes; its file of processes."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"colibri-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(LIMIT))
            swap = group / "memory.swap.max"
            if swap.exists():
                swap.write_text("0")
        except OSError:
            group.rmdir()
            continue
        try:
            yield group / "cgroup.procs"
        finally:
            group.rmdir()
        return
    pytest.skip("no control group for memory can be made here")


def forget(path: Path) -> None:
    """Out of the page cache, where it counts as used by whoever read it first."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def run_limited(model: Path, residency: str, group: Path | None) -> dict[str, Any]:
    script = LIMITED
    if group is not None:
        forget(model)
        script = f"open({str(group)!r}, 'w').write('0')\n" + script
    done = subprocess.run([sys.executable, "-c", script, str(model), residency], capture_output=True, text=True)
    assert done.returncode == 0, (residency, done.returncode, done.stderr)
    return json.loads(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="control groups are Linux's")
def test_less_memory_than_model(large_model: Path) -> None:
    assert large_model.stat().st_size > LIMIT + (8 << 20)
    free = run_limited(large_model, "map", None)
    assert free["short"] == 0
    with memory_group() as group:
        for residency in ("map", "stream"):
            found = run_limited(large_model, residency, group)
            assert found["digest"] == free["digest"], residency
            assert found["residency"] == residency
            assert found["short"] == (residency == "map")
