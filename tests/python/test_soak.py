"""tools/soak.py, 5,000 calls each: memory stays flat, nothing is left behind, in every residency."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "soak.py"
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *map(str, arguments)], capture_output=True, text=True)


def test_flat(tiny_model: Path) -> None:
    done = run(tiny_model, "--calls", 5000, "--expert-cache", 5, "--threads", 2, "--json")
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)
    assert [result["residency"] for result in results] == ["map", "lock", "huge", "stream"]
    for result in results:
        assert result["most"]["resident"] - result["early"]["resident"] <= 24 * os.sysconf("SC_PAGESIZE"), result
        assert result["early"]["descriptors"] == result["late"]["descriptors"] == result["most"]["descriptors"]
        assert result["early"]["threads"] == result["late"]["threads"] == result["most"]["threads"]
        assert result["first_p50"] > 0 and result["last_p50"] > 0


def test_text(tiny_model: Path) -> None:
    done = run(tiny_model, "--calls", 1000, "--residency", "map")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("map: 1000 calls") and "last tenth:" in done.stdout
    assert "at least 1000" in run(tiny_model, "--calls", 10).stderr
