"""colibri heatmap: pictures of any number of experts; without matplotlib one line that says what to install."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import colibri
import numpy as np
import pytest
from colibri import heatmap
from test_cli import Runner, run  # noqa: F401 - a fixture


def fake(layers: int, experts: int, dense: int = 0, dead: int = 0) -> dict[str, Any]:
    """Statistics: `dense` first layers have no experts; the first `dead` experts of each layer got no token."""
    random = np.random.default_rng(layers * experts)
    tokens = random.integers(1, 900, (layers, experts)).astype(np.uint64)
    tokens[:, :dead] = 0
    place = np.full((layers, experts), 1, np.int32)
    tokens[:dense], place[:dense] = 0, -1
    return {
        "expert_place": place, "expert_tokens": tokens, "expert_compute_ns": tokens * np.uint64(70000),
        "prompt_tokens": 900, "decode_tokens": 100,
    }  # fmt: skip


def png_size(data: bytes) -> tuple[int, int]:
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def black_share(path: Path, data: bytes) -> float:
    import matplotlib.image

    path.write_bytes(data)
    return float((matplotlib.image.imread(path)[:, :, :3].max(axis=2) < 0.02).mean())


@pytest.mark.parametrize("shape", [(1, 2), (2, 8), (20, 8), (24, 60), (100, 512)])
def test_any_shape(shape: tuple[int, int]) -> None:
    pytest.importorskip("matplotlib")
    width, height = png_size(heatmap.draw(fake(*shape), "model"))
    assert 400 <= width <= 4500 and 400 <= height <= 4500
    assert shape[1] <= 60 or width >= 3 * shape[1]  # an expert is some pixels wide


def test_dead_experts_are_black(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    none, half = (black_share(tmp_path / "a.png", heatmap.draw(fake(12, 64, dead=n), "m")) for n in (0, 32))
    assert none < 0.03 and half > none + 0.25  # text and frames; and half of both panels


def test_dense_layers_are_left_out() -> None:
    pytest.importorskip("matplotlib")
    picture = heatmap.draw(fake(7, 16, dense=3), "m", "svg").decode()
    assert "4 layers with 16 experts" in picture and "never used: 0 of 64" in picture
    all_dense = fake(3, 4, dense=3)
    with pytest.raises(colibri.ColibriError, match="no experts"):
        heatmap.draw(all_dense, "m")
    with pytest.raises(colibri.ColibriError, match="no token"):
        heatmap.draw(fake(3, 4, dead=4), "m")


def test_odd_names() -> None:
    """Characters that no font has, formulas, line ends: no warning (they are errors here), no failure."""
    pytest.importorskip("matplotlib")
    for name in ("模 $x$ 100% \\frac", "a\nb\x00", "$", ""):
        png_size(heatmap.draw(fake(2, 8), name))


def test_command(run: Runner, tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("matplotlib")
    text = tmp_path / "prompt.txt"
    text.write_text("the inn on the hill\n" * 200, encoding="utf-8")  # longer than the model was made for
    out = tmp_path / "heat.png"
    assert run("heatmap", tiny_model, "--prompt-file", text, "-o", out) == ("", "")
    width, height = png_size(out.read_bytes())
    assert 400 <= width <= 4500 and 400 <= height <= 4500
    options = ["--prompt", "the inn", "--max-tokens", 5, "--threads", 1]
    for ending, begin in (("svg", b"<?xml"), ("pdf", b"%PDF")):
        run("heatmap", tiny_model, *options, "-o", tmp_path / f"x.{ending}")
        assert (tmp_path / f"x.{ending}").read_bytes().startswith(begin)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["heat.png", "prompt.txt", "x.pdf", "x.svg"]


def test_every_token_is_counted_once(run: Runner, tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    """Also those of a text that is run in pieces."""
    pytest.importorskip("matplotlib")
    text = "the inn on the hill\n" * 200
    count = len(colibri.Model(tiny_model).tokenize(text))
    run("heatmap", tiny_model, "--prompt", text, "-o", tmp_path / "x.svg")
    assert count > 512 and f"{count} tokens, 2 layers" in (tmp_path / "x.svg").read_text(encoding="utf-8")


def test_failures(run: Runner, tiny_model: Path, textless_model: Path, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("matplotlib")
    out = tmp_path / "x.png"
    assert "--prompt" in run.fails("heatmap", tiny_model, "-o", out, status=2)
    both = ["--prompt", "x", "--prompt-file", "y"]
    assert "--prompt" in run.fails("heatmap", tiny_model, *both, "-o", out, status=2)
    assert "--output" in run.fails("heatmap", tiny_model, "--prompt", "x", status=2)
    assert ".svg" in run.fails("heatmap", tiny_model, "--prompt", "x", "-o", tmp_path / "x.gif")
    assert "none" in run.fails("heatmap", tmp_path / "none", "--prompt", "x", "-o", out)
    assert "none" in run.fails("heatmap", tiny_model, "--prompt-file", tmp_path / "none", "-o", out)
    assert "tokenizer" in run.fails("heatmap", textless_model, "--prompt", "x", "-o", out)
    assert "no" in run.fails("heatmap", tiny_model, "--prompt", "x", "-o", tmp_path / "no" / "x.png")
    (tmp_path / "folder.png").mkdir()
    run.fails("heatmap", tiny_model, "--prompt", "x", "-o", tmp_path / "folder.png")
    assert [p.name for p in tmp_path.iterdir()] == ["folder.png"]


def test_without_matplotlib(
    run: Runner,  # noqa: F811
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = run.fails("heatmap", tiny_model, "--prompt", "x", "-o", tmp_path / "x.png")
    assert "pip install 'libcolibri[plot]'" in line and list(tmp_path.iterdir()) == []
