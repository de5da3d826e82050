"""The figures of tools/quality.py, on numbers whose answers are known."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module")
def quality() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "quality.py"
    spec = importlib.util.spec_from_file_location("quality", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quality"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_divergence(quality: Any) -> None:
    p, q = np.array([[0.5, 0.25, 0.25]]), np.array([[0.25, 0.25, 0.5]])
    logits_p, logits_q = np.log(p) + 1000, np.log(q) - 3
    found = quality.divergence(quality.log_softmax(logits_p), quality.log_softmax(logits_q))
    assert found == pytest.approx([0.25 * math.log(2)])


def test_tally(quality: Any) -> None:
    """Two contexts; the loss is of the next token, and no token predicts the next context's first."""
    tally = quality.Tally()
    log_p = np.log(np.array([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]]))
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.75, 0.125, 0.125]]))
    for next_token in (1, 0):
        tally.add(np.array([2, next_token], np.int32), reference, log_p)
    report = tally.report()
    assert report["perplexity"] == pytest.approx(math.sqrt(8))
    assert report["same_top1"] == 0.5
    assert report["mean_kl"] == pytest.approx(0.5 * 0.625 * math.log(6))


def test_ratio_and_change(quality: Any) -> None:
    b = np.array([1.0, 2.0, 3.0, 2.0])
    assert quality.ratio_of_means(3 * b, b) == pytest.approx((3.0, 0.0))
    assert math.isnan(quality.ratio_of_means(b, 0 * b)[0])
    assert quality.perplexity_change(b + math.log(1.1), b) == pytest.approx((10.0, 0.0))


def test_contexts(quality: Any) -> None:
    found = quality.contexts(list(range(10)), 9, 4)
    assert [list(piece) for piece in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="3 tokens"):
        quality.contexts([1, 2, 3], 100, 4)


def test_round_int8(quality: Any) -> None:
    """A scale for each 32 values, the last group shorter; zeros stay zeros."""
    torch = pytest.importorskip("torch")
    x = torch.zeros(2, 40)
    x[0, 0], x[0, 1], x[0, 32] = 127.0, 3.4, 0.5
    found = quality.round_int8(x)
    assert found.shape == x.shape
    assert [found[0, i].item() for i in (0, 1, 32)] == pytest.approx([127.0, 3.0, 0.5])
    assert not found[1].any()


def test_round_4_bits(quality: Any) -> None:
    """The value of largest magnitude is -8 of the scale, whatever its sign; its opposite saturates."""
    torch = pytest.importorskip("torch")
    x = torch.zeros(2, 40)
    x[0, :4] = torch.tensor([16.0, -16.0, 4.9, -5.1])
    x[0, 32:35] = torch.tensor([-4.0, 3.9, 0.7])
    found = quality.round_4_bits(x)
    assert found.shape == x.shape
    assert found[0, :4].tolist() == [16.0, -14.0, 4.0, -6.0]
    assert found[0, 32:35].tolist() == [-4.0, 3.5, 0.5]
    assert not found[1].any() and not found[0, 4:32].any()


def test_what_is_rounded(quality: Any) -> None:
    """Linear layers and every expert of a stack, the head if asked; neither the router nor the embedding."""
    torch = pytest.importorskip("torch")
    names = ("embed", "head", "q_proj", "mlp.gate", "norm")
    weights = {f"{name}.weight": torch.randn(32, 32) for name in names}
    weights |= {"norm.weight": torch.randn(32), "experts": torch.randn(3, 32, 32)}
    model = SimpleNamespace(
        named_parameters=lambda: weights.items(),
        get_input_embeddings=lambda: SimpleNamespace(weight=weights["embed.weight"]),
        get_output_embeddings=lambda: SimpleNamespace(weight=weights["head.weight"]),
    )
    wanted = {part.data_ptr() for part in (weights["q_proj.weight"], *weights["experts"])}
    assert quality.matrices(model, head=False) == wanted
    assert quality.matrices(model, head=True) == wanted | {weights["head.weight"].data_ptr()}

    x = torch.randn(5, 32)
    with quality.quantised(wanted, {}, quality.round_4_bits):
        router = torch.nn.functional.linear(x, weights["mlp.gate.weight"])
        expert = torch.nn.functional.linear(x, weights["experts"][1])
    torch.testing.assert_close(router, x @ weights["mlp.gate.weight"].T)
    torch.testing.assert_close(expert, quality.round_int8(x) @ quality.round_4_bits(weights["experts"][1]).T)
