"""The figures of tools/robustness.py, on small sizes and on numbers whose answers are known."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

TOOL = Path(__file__).parents[2] / "tools" / "robustness.py"


@pytest.fixture(scope="module")
def robustness() -> ModuleType:
    spec = importlib.util.spec_from_file_location("robustness", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["robustness"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_hadamard(robustness: Any) -> None:
    """Its own inverse; one element spreads over its block alone; products are kept."""
    random = np.random.default_rng(1)
    x, w = random.standard_normal((3, 384)), random.standard_normal((5, 384))
    turned = robustness.hadamard(x, 128)
    np.testing.assert_allclose(robustness.hadamard(turned, 128), x, atol=1e-12)
    np.testing.assert_allclose(turned @ robustness.hadamard(w, 128).T, x @ w.T, atol=1e-12)
    one = robustness.hadamard(np.eye(1, 384, 130), 128)[0]
    np.testing.assert_allclose(np.abs(one), np.repeat([0, 128**-0.5, 0], 128))


def test_rounded(robustness: Any) -> None:
    x = np.array([[127.0, 1.4, -0.6, 0.0], [0.0, 0.0, 0.0, 0.0]])
    np.testing.assert_allclose(robustness.rounded(x, 127), [[127, 1, -1, 0], [0, 0, 0, 0]])
    np.testing.assert_allclose(robustness.rounded(x, 127, 2)[0], [127, 1, -0.6, 0])


def test_what_rotation_is_for(robustness: Any) -> None:
    """One outlier: without rotation the rest is gone, with it most is there, the more the larger the block; 16 bits
    are 128 times as fine.
    """
    rows = robustness.measure(1024, 8, 32, "f32")
    error = {(row.case, row.bits, row.way): (row.of_y, row.of_rest) for row in rows}
    assert error["1 x1000", 8, "none"][1] > 0.7 > 0.1 > error["1 x1000", 8, "1024"][1]
    assert error["1 x1000", 8, "1024"][1] < 0.6 * error["1 x1000", 8, "128"][1]
    for (case, bits, way), (of_y, of_rest) in error.items():
        assert of_y <= of_rest * 1.001
        if way not in ("32", "none"):
            assert of_y < (0.012 if bits == 8 else 0.0002), (case, bits, way)
    assert {way for _, _, way in error} == {"32", "none", "128", "256", "512", "1024"}


def test_weights_cost_as_much(robustness: Any) -> None:
    rows = robustness.measure(256, 8, 32, "q8")
    found = {(row.case, row.bits, row.way): row.of_y for row in rows}
    assert 0.005 < found["plain", 16, "256"] < 0.8 * found["plain", 8, "256"] < 0.01


def test_command() -> None:
    command = [sys.executable, str(TOOL), "--k", "128", "384", "--tokens", "2", "--rows", "4"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert text.count("k = 384, error of y") == 1 and text.count("16 x1000    8 bits") == 4
    rows = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert len(rows) == 2 * 5 * 2 * 3
    wrong = subprocess.run([*command, "--k", "100"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "multiples of 128" in wrong.stderr
