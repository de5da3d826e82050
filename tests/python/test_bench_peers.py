"""tools/bench_peers.py on the tiny shape: what table and JSON hold, that engines agree, that errors are one line."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from colibri.convert.api import DTYPES

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "bench_peers.py"

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="links as on Linux"),
    pytest.mark.skipif(not TOOL.is_file(), reason="needs the source tree"),
    pytest.mark.skipif(
        not any(map(shutil.which, ("cc", "gcc", "clang"))) and importlib.util.find_spec("ziglang") is None,
        reason="needs a C compiler (cc, or ziglang from PyPI)",
    ),
]

QUICK = ["--shapes", "tiny", "--threads", "1,2", "--rounds", "2", "--decode-tokens", "8", "--buffer-mb", "16"]


def llama_python() -> str | None:
    """A Python that has llama-cpp-python: $COLIBRI_LLAMA_PYTHON or this one."""
    named = os.environ.get("COLIBRI_LLAMA_PYTHON")
    return named or (sys.executable if importlib.util.find_spec("llama_cpp") else None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are kept between the tests."""
    return tmp_path_factory.mktemp("peers")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def measure(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON and the printed tables of a run with two rounds."""
    path = folder / "result.json"
    path.unlink(missing_ok=True)
    done = run(folder, *QUICK, "--json", str(path), *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout


def check_spread(value: dict[str, Any]) -> None:
    assert len(value["rounds"]) == 2 and 0 < value["min"] <= value["median"] <= value["max"] < math.inf
    assert value["min"] == min(value["rounds"]) and value["max"] == max(value["rounds"])


def check_group(group: dict[str, Any], engines: list[str], text: str, threads: tuple[int, ...] = (1, 2)) -> None:
    """Everything of one table is there, and consistent."""
    assert list(group["engines"]) == engines and set(group["agreement"]) == set(engines[1:])
    assert [(r["threads"], r["engine"]) for r in group["results"]] == [(t, e) for t in threads for e in engines]
    for result in group["results"]:
        prefill, decode = result["prefill"]["512"], result["decode"]
        check_spread(prefill)
        check_spread(decode)
        assert prefill["int8_fraction"] == pytest.approx(prefill["t_op_per_s"] / result["int8_peak"]["t_op_per_s"])
        moved = decode["weight_bytes_per_token"] * decode["median"]
        assert decode["gb_per_s"] == pytest.approx(moved / 1e9)
        assert decode["read_fraction"] == pytest.approx(moved / 1e9 / result["read_gb_per_s"])
        assert decode["weight_bytes_counted"] == result["engine"].startswith("libcolibri")
        row = next(
            cells
            for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines())
            if cells[:2] == [result["engine"], str(result["threads"])]
        )
        assert row[2].split()[0] == shown(prefill["median"]) and row[5].split()[0] == shown(decode["median"])
        assert row[-1] == f"{decode['read_fraction']:.1%}"


def shown(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def test_alone(folder: Path) -> None:
    plot = folder / "plot.png"
    drawing = ["--plot", str(plot)] if importlib.util.find_spec("matplotlib") else []
    types = [dtype for dtype in ("q8", "q4") if dtype in DTYPES]
    value, text = measure(folder, "--peers", "none", "--isa", "auto,ref", "--types", ",".join(types), *drawing)
    assert [(group["shape"], group["type"]) for group in value["speed"]] == [("tiny", dtype) for dtype in types]
    for group in value["speed"]:
        start = text.index(f"## tiny, {group['type']}")
        check_group(group, ["libcolibri", "libcolibri ref"], text[start:])
        assert group["agreement"]["libcolibri ref"] == {"relative_difference": 0, "same_top_token": True}
        assert group["ratios"] == [] and group["limits"]["read"][0]["gb_per_s"].keys() == {"1", "2"}
        assert {r["int8_peak"]["isa"] for r in group["results"] if r["engine"].endswith("ref")} == {"portable"}
    assert value["machine"]["processors"] > 0 and value["machine"]["cpu"] and value["settings"]["rounds"] == 2
    assert not drawing or plot.read_bytes().startswith(b"\x89PNG")


def test_bytes_of_a_token(folder: Path) -> None:
    """What libcolibri counts in f32 is what the shape says, but for norms and embedding."""
    value, _ = measure(folder, "--peers", "none", "--types", "f32", "--threads", "1")
    counted = value["speed"][0]["results"][0]["decode"]["weight_bytes_per_token"]
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 2 * 3 * 128 * 96 + 8 * 128
    assert counted == pytest.approx(4 * (2 * layer + 320 * 128), rel=0.05)


def test_other_measurements(folder: Path) -> None:
    sections = ["--busy", "--tail", "--tail-tokens", "250", "--layer"]
    value, text = measure(folder, "--peers", "none", "--types", "q8", "--no-speed", *sections)
    assert value["speed"] == []
    for result in value["busy"][0]["results"]:
        check_spread(result["quiet"])
        check_spread(result["busy"])
        assert result["kept"] == pytest.approx(result["busy"]["median"] / result["quiet"]["median"])
    for result in value["tail"][0]["results"]:
        assert result["tokens"] == 250
        assert 0 < result["p50_ms"] <= result["p90_ms"] <= result["p99_ms"] <= result["max_ms"]
        assert f"{result['p99_over_p50']:.3f} |" in text
    layer = value["layer"][0]["results"]
    assert [(r["threads"], r["tokens"]) for r in layer] == [(t, n) for t in (1, 2) for n in (1, 32, 128, 512)]
    for result in layer:
        check_spread(result["ms"])


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_router(folder: Path) -> None:
    value, text = measure(folder, "--peers", "none", "--no-speed", "--router", "--threads", "1")
    results = value["router"][0]["results"]
    assert [(r["engine"], r["tokens"]) for r in results] == [
        (e, n) for e in ("libcolibri", "PyTorch") for n in (1, 1024)
    ]
    assert "top-8" in text and all(r["ms"]["min"] > 0 for r in results)


@pytest.mark.skipif(llama_python() is None, reason="needs llama-cpp-python here or in $COLIBRI_LLAMA_PYTHON")
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs gguf")
def test_llama(folder: Path) -> None:
    """llama.cpp computes the same model: in f32 the logits differ by its 16-bit cache alone."""
    options = ["--peers", "llama.cpp", "--llama-python", f"here={llama_python()}", "--types", "f32,q8"]
    value, text = measure(folder, *options, "--threads", "1")
    for group, difference in zip(value["speed"], (2e-3, 5e-2), strict=True):
        check_group(group, ["libcolibri", "llama.cpp here"], text[text.index(f"## tiny, {group['type']}") :], (1,))
        agreement = group["agreement"]["llama.cpp here"]
        assert agreement["same_top_token"] and agreement["relative_difference"] < difference
        assert [r["threads"] for r in group["ratios"]] == [1]
        for ratio in group["ratios"]:
            ours, peer = (
                next(r for r in group["results"] if (r["engine"], r["threads"]) == (ratio[who], ratio["threads"]))
                for who in ("ours", "peer")
            )
            assert ratio["decode"] == pytest.approx(ours["decode"]["median"] / peer["decode"]["median"])


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_transformers(folder: Path) -> None:
    value, text = measure(folder, "--peers", "transformers-f32", "--types", "f32", "--threads", "1")
    check_group(value["speed"][0], ["libcolibri", "transformers-f32"], text, threads=(1,))
    assert value["speed"][0]["agreement"]["transformers-f32"]["relative_difference"] < 1e-5


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--shapes", "huge"], "'huge'"),
        (["--types", "q8,q9"], "'q9'"),
        (["--threads", "0"], "'0'"),
        (["--no-such"], "--no-such"),
        (["--peers", "llama.cpp", "--llama-python", "/none/python"], "/none/python"),
        (["--peers", "kt-kernel", "--layer", "--no-speed", "--kt-python", "/none/python"], "/none/python"),
        (["--bench", "/none/colibri-bench"], "/none/colibri-bench"),
        (["--peers", "none", "--bench", "/bin/false"], "/bin/false"),
    ],
)
def test_errors(folder: Path, arguments: list[str], word: str) -> None:
    done = run(folder, *QUICK, *arguments)
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert done.returncode != 0 and done.stdout == "" and len(errors) == 1 and word in errors[0]
    assert "Traceback" not in done.stderr


def test_damaged_model(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "q8.colibri").write_bytes(b"COLI" + bytes(100))
    done = run(tmp_path, *QUICK, "--types", "q8", "--peers", "none")
    assert done.returncode == 1 and "q8.colibri" in done.stderr and "Traceback" not in done.stderr


def test_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that do not fit into memory together are measured in turn, each beside libcolibri."""
    monkeypatch.syspath_prepend(str(TOOL.parent))
    from peers.measuring import Subject, batches

    ours, second = (Subject(name, "libcolibri", "", {}, memory=4) for name in ("libcolibri", "libcolibri ref"))
    llama, torch, huge = (Subject(name, name, "", {}, memory=m) for name, m in (("a", 5), ("b", 6), ("c", 20)))
    teams, refused = batches([ours, second, llama, torch, huge], 12)
    assert teams == [[ours, second, llama], [ours, second, torch]]
    assert len(refused) == 1 and refused[0].startswith("c: skipped: ")
    assert batches([ours, llama, torch, huge], None) == ([[ours, llama, torch, huge]], [])
