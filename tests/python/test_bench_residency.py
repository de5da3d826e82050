"""tools/bench_residency.py: the arithmetic of the bar, memory cgroups made of plain files, reads of places in a file,
and a whole run on the tiny shape. No time is looked at.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from colibri import _ffi

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "bench_residency.py"

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the tool measures Linux"),
    pytest.mark.skipif(not TOOL.is_file(), reason="needs the source tree"),
    pytest.mark.skipif(importlib.util.find_spec("click") is None, reason="needs click"),
]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool as a module."""
    monkeypatch.syspath_prepend(str(TOOL.parent))
    return importlib.import_module("bench_residency")


# ---- The bar


def answer(seconds: list[float], **figures: Any) -> dict[str, Any]:
    return {"times": seconds, "disk_bytes": 600, "minor_faults": 0, "major_faults": 0, "figures": figures}


STREAM = {"residency": _ffi.COLIBRI_RESIDENCY_STREAM, "cache_hits": 50, "read_wait_ns": 2 * 10**9}


def test_bar_of_stream(tool: ModuleType) -> None:
    """4 tokens in 2 s, 12 misses and 8 hits ahead of 100 bytes, 2,500 bytes read, a disk of 1,250 bytes/s."""
    figures = STREAM | {"cache_misses": 12, "cache_hits_ahead": 8, "read_bytes": 2500}
    result = tool.bar(answer([0.25, 0.75, 0.5, 0.5], **figures), 100, 1250.0, 2)
    assert result["tokens_per_s"] == pytest.approx(2)
    assert result["needed"] == 5 and result["needed_bytes"] == 500 and result["read_bytes"] == 625
    assert result["disk_allows"] == pytest.approx(2.5)  # 500 bytes take 0.4 s
    assert result["of_disk"] == pytest.approx(0.8)  # of the 0.5 s that a token took
    assert result["disk_busy"] == pytest.approx(1.0)  # 625 bytes take 0.5 s
    assert result["vain"] == pytest.approx(0.2) and result["waiting"] == pytest.approx(0.5)


def test_bar_of_stream_that_needs_nothing(tool: ModuleType) -> None:
    figures = STREAM | {"cache_misses": 0, "cache_hits_ahead": 0, "read_bytes": 0}
    result = tool.bar(answer([0.5]), 100, 1000.0, 1) | tool.bar(answer([0.5], **figures), 100, 1000.0, 1)
    assert result["of_disk"] == 0 and result["disk_allows"] is None and result["vain"] == 0


def test_bar_of_others(tool: ModuleType) -> None:
    """Who does not count misses has no floor, but what the system counted; or nothing where it does not."""
    for figures in ({}, STREAM | {"residency": _ffi.COLIBRI_RESIDENCY_MAP, "cache_misses": 0}):
        result = tool.bar(answer([0.5, 0.5, 0.5], **figures), 100, 500.0, 2)
        assert result["read_bytes"] == 200 and result["disk_busy"] == pytest.approx(0.8)
        assert all(result[name] is None for name in ("needed", "of_disk", "disk_allows", "vain", "waiting"))
    silent = answer([1.0])
    del silent["disk_bytes"]
    assert tool.bar(silent, 100, 500.0, 2)["disk_busy"] is None


def test_spreads(tool: ModuleType) -> None:
    result = tool.spreads([{"a": 3.0, "b": None}, {"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 2.0}])
    assert result["b"] is None
    assert result["a"] == {"median": 2.0, "min": 1.0, "max": 3.0, "rounds": [3.0, 1.0, 2.0]}


def test_sizes(tool: ModuleType) -> None:
    convert = tool.Bytes().convert
    assert [convert(text, None, None) for text in ("1.5G", "64m", "4K", "1000")] == [3 << 29, 64 << 20, 4096, 1000]
    for text in ("", "G", "-1", "0", "nan", "inf", "1e99", "1.5X"):
        with pytest.raises(tool.click.BadParameter):
            convert(text, None, None)


def test_matching(tool: ModuleType) -> None:
    config = {"hidden_size": 128, "moe_intermediate_size": 96, "num_experts": 8, "top_k": 2, "num_layers": 2}
    config |= {"num_heads": 4, "num_kv_heads": 2, "vocab_size": 320}
    assert tool.matching(config).name == "tiny"
    assert all(tool.matching(config | {name: 1}) is None for name in config)


# ---- Memory cgroups

V1 = "35 31 0:32 / /cg/memory rw,relatime - cgroup cgroup rw,memory\n36 31 0:33 / /cg/cpu rw - cgroup cgroup rw,cpu\n"
V2 = "41 31 0:38 {} /cg/unified rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


def test_places(tool: ModuleType) -> None:
    def found(mounts: str, own: str) -> list[tuple[int, str]]:
        return [(place.version, str(place.path)) for place in tool.cgroup.places(mounts, own)]

    memory, cpu, unified = "4:memory:/a/b\n", "1:cpu,cpuacct:/c\n", "0::/d\n"
    assert found(V1, cpu + memory) == [(1, "/cg/memory/a/b"), (1, "/cg/memory")]
    assert found(V2.format("/") + V1, memory + unified) == [
        (1, "/cg/memory/a/b"),
        (1, "/cg/memory"),
        (2, "/cg/unified/d"),
        (2, "/cg/unified"),
    ]
    assert found(V2.format("/"), "0::/\n") == [(2, "/cg/unified")]
    assert found(V2.format("/d"), "0::/d/e\n") == [(2, "/cg/unified/e"), (2, "/cg/unified")]
    assert found(V2.format("/other"), unified) == [(2, "/cg/unified")]
    assert found("20 1 0:1 / /proc rw - proc proc rw\n", unified) == []


FILES = {
    1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max_usage_in_bytes"),
    2: ("memory.max", "memory.swap.max", "memory.peak"),
}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Folders get the files named in "files" as they are made, and can be removed with them, as in a cgroup tree. (Asks
    for tmp_path so that it is there before.)
    """
    state: dict[str, Any] = {"files": (), "busy": 0, "made": []}
    mkdir, rmdir = Path.mkdir, Path.rmdir

    def make(path: Path, *arguments: Any, **named: Any) -> None:
        mkdir(path, *arguments, **named)
        state["made"].append(path)
        for name in state["files"]:
            (path / name).write_text("7")

    def remove(path: Path) -> None:
        if state["busy"]:
            state["busy"] -= 1
            raise OSError(16, "Device or resource busy")
        for file in path.iterdir():
            file.unlink()
        rmdir(path)

    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(Path, "rmdir", remove)
    return state


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("swap", [True, False])
def test_group(tool: ModuleType, kernel: dict[str, Any], tmp_path: Path, version: int, swap: bool) -> None:
    hard, swap_file, peak = FILES[version]
    kernel["files"] = (hard, peak, *((swap_file,) if swap else ()))
    with tool.cgroup.Group(tool.cgroup.Place(version, tmp_path), "g", 12345) as group:
        assert group.path == tmp_path / "g" and group.procs == tmp_path / "g" / "cgroup.procs"
        assert (group.path / hard).read_text() == "12345" and group.peak() == 7
        assert (group.path / swap_file).exists() == swap
        if swap:
            assert (group.path / swap_file).read_text() == ("12345" if version == 1 else "0")
        (group.path / peak).unlink()
        assert group.peak() is None
        kernel["busy"] = 2  # the process has not quite ended
    assert not (tmp_path / "g").exists() and kernel["busy"] == 0
    group.remove()  # gone already


@pytest.mark.parametrize("version", [1, 2])
def test_group_without_controller(tool: ModuleType, kernel: dict[str, Any], tmp_path: Path, version: int) -> None:
    """Nothing is left behind; version 2 is asked for the controller first."""
    with pytest.raises(OSError):
        tool.cgroup.Group(tool.cgroup.Place(version, tmp_path), "g", 12345)
    assert kernel["made"] == [tmp_path / "g"] and not (tmp_path / "g").exists()
    assert (tmp_path / "cgroup.subtree_control").exists() == (version == 2)


def test_make_group(tool: ModuleType, kernel: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first place that works is taken; without one the error says why."""
    good, bad = tool.cgroup.Place(1, tmp_path), tool.cgroup.Place(1, tmp_path / "none")
    kernel["files"] = FILES[1]
    monkeypatch.setattr(tool.cgroup, "places", lambda *_: [bad, good])
    group = tool.cgroup.make_group(99, "g")
    assert group.path == tmp_path / "g" and group.limit == 99
    group.remove()
    monkeypatch.setattr(tool.cgroup, "places", lambda *_: [bad])
    with pytest.raises(tool.cgroup.GroupError, match="No such file"):
        tool.cgroup.make_group(99, "g")
    monkeypatch.setattr(tool.cgroup, "places", lambda *_: [])
    with pytest.raises(tool.cgroup.GroupError, match="mounted"):
        tool.cgroup.make_group(99, "g")


# ---- Disk


def test_places_of_experts(tool: ModuleType, tiny_model: Path) -> None:
    """Every expert once, within its payload, none overlapping."""
    with tool.colibri.Model(tiny_model) as model:
        found = tool.disk.extents(model)
        payloads = [tensor for tensor in model.tensors() if tensor["role"] == "experts"]
        config = model.config
    assert len(found) == config["num_layers"] * config["num_experts"]
    assert sum(place.size for place in found) == sum(tensor["size"] for tensor in payloads)
    ordered = sorted(found, key=lambda place: place.offset)
    assert all(a.offset + a.size <= b.offset for a, b in itertools.pairwise(ordered))


def test_aligned(tool: ModuleType) -> None:
    extent = tool.disk.Extent
    assert extent(8192, 4096).aligned(4096) == extent(8192, 4096)
    assert extent(8191, 2).aligned(4096) == extent(4096, 8192)
    assert extent(1, 1).aligned(4096) == extent(0, 4096)


@pytest.mark.parametrize("direct", [None, False])
def test_reading(tool: ModuleType, tmp_path: Path, direct: bool | None) -> None:
    """Places are read from a file that ends within a block; one that ends before a place is an error."""
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * 4096 + 100))
    places = [tool.disk.Extent(first, 50) for first in (0, 4090, 3 * 4096 + 50)]
    for depth in (1, 4):
        assert tool.disk.Disk(path, places).rate(depth, 0.01, direct) > 0
    with pytest.raises(OSError, match="shorter"):
        tool.disk.Disk(path, [tool.disk.Extent(3 * 4096, 101)]).rate(2, 0.01, direct)


# ---- The whole tool


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    quick = ["--shape", "tiny", "--rounds", "2", "--tokens", "6", "--warmup", "2", "--memory-tokens", "16"]
    quick += [
        "--ahead-tokens",
        "80",
        "--disk-seconds",
        "0.01",
        "--threads",
        "2",
        "--limit",
        "512M",
        "--buffer-mb",
        "16",
    ]
    command = [sys.executable, str(TOOL), str(folder), *quick, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def check_spread(value: dict[str, Any]) -> None:
    assert len(value["rounds"]) == 2 and 0 <= value["min"] <= value["median"] <= value["max"] < float("inf")


def check_limit(value: dict[str, Any], notes: list[str]) -> None:
    ours = [result for result in value["results"] if "llama" not in result["engine"]]
    skipped = any(note.startswith("decoding under a limit: skipped: ") for note in notes)
    names = ["map", "stream 25%", "stream 25%, profile", "stream 25%, no limit"]
    assert [result["engine"] for result in ours] == (names[-1:] if skipped else names)
    for result in ours:
        check_spread(result["tokens_per_s"])
        assert (result["limit"] is None) == result["engine"].endswith("no limit")
        if result["engine"].startswith("stream"):
            stats = result["last"]
            needed = (stats["cache_misses"] + stats["cache_hits_ahead"]) / 6
            assert result["needed"]["rounds"][1] == needed > 0 and stats["cache_experts"] == value["cache_experts"] == 4
            assert stats["cache_hits"] + stats["cache_misses"] == 6 * 2 * 2  # tokens, layers, top-2
            check_spread(result["of_disk"])
        else:
            assert result["needed"] is None and result["of_disk"] is None and result["peak"] <= 512 << 20


def test_whole_run(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    done = run(tmp_path, "--json", str(path))
    assert done.returncode == 0, done.stderr
    value = json.loads(path.read_text())
    assert value["model"]["experts"] == 16 and value["settings"]["limit"] == 512 << 20
    assert set(value["disk"]["rates"]) == set(value["disk"]["buffered"]) == {"1", "2", "4", "8"}
    for figures in value["disk"]["rates"].values():
        check_spread(figures)
    check_limit(value["limit"], value["notes"])
    memory = value["memory"]["results"]
    assert [result["engine"] for result in memory][:3] == ["map", "lock", "huge 2M"]
    assert all(result["same_logits"] for result in memory) and memory[0]["of_map"]["median"] == 1
    assert all(0 < result["p50_ms"] <= result["p99_ms"] for result in memory)
    ahead = value["ahead"]
    assert ahead["tokens"] == 80 and ahead["experts"] == 48
    assert [one["experts"] for one in ahead["results"]] == [6, 12, 24, 36]
    assert all(one["hits"] + one["misses"] == 80 * 6 * 2 for one in ahead["results"])
    assert ahead["ahead_predicted"] > 0 and 0 < ahead["repeat_accuracy"] < 1 and 0 < ahead["ahead_accuracy"] < 1
    for title in ("Disk", "Decoding from disk", "Decoding from memory", "Look-ahead"):
        assert f"## {title}" in done.stdout


def test_sections_model_and_text(tmp_path: Path, tiny_model: Path) -> None:
    """One section alone, with a file of one's own."""
    text, path = tmp_path / "text", tmp_path / "result.json"
    text.write_text("The cat sat on the mat, and the dog sat beside it.", encoding="utf-8")
    done = run(tmp_path, "--only", "ahead,disk", "--model", str(tiny_model), "--text", str(text), "--json", str(path))
    assert done.returncode == 0, done.stderr
    value = json.loads(path.read_text())
    assert value["model"]["path"] == str(tiny_model) and 5 < value["ahead"]["tokens"] < 80
    assert "--text" in done.stdout and "memory" not in value and "limit" not in value


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--only", "disk,tape"], "'tape'"),
        (["--limit", "much"], "'much'"),
        (["--model", "/none/model.colibri"], "/none/model.colibri"),
        (["--cache", "2"], "--cache"),
        (["--only", "limit", "--llama-python", "/none/python"], "/none/python"),
        (["--json", "/none/result.json"], "/none/result.json"),
    ],
)
def test_errors(tmp_path: Path, arguments: list[str], word: str) -> None:
    done = run(tmp_path, *arguments)
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert done.returncode != 0 and len(errors) == 1 and word in errors[0] and "Traceback" not in done.stderr
