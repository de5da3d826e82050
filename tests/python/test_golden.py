"""Logits of every family against stored ones of transformers (tests/golden/make_golden.py): the live comparison,
without torch.
"""

from __future__ import annotations

from pathlib import Path

import colibri
import numpy as np
import pytest
import tiny
from colibri.convert import convert

GOLDEN = np.load(Path(__file__).resolve().parent.parent / "golden" / "golden.npz")


def logits(path: Path, ids: list[int], **options) -> np.ndarray:
    with colibri.Model(path) as model, colibri.Session(model, max_seq_len=64, outputs="all", **options) as session:
        return np.array(session.forward(ids))


@pytest.mark.parametrize("case", tiny.CASES)
def test_f32_logits(tmp_path, case):
    config = tiny.CASES[case]
    assert tiny.checksum(config) == GOLDEN[f"{case}/checksum"], "tiny.py changed: run tests/golden/make_golden.py"
    tiny.save(tmp_path, config, packed=True)
    convert(tmp_path, tmp_path / "m.colibri", "f32")
    want = GOLDEN[f"{case}/logits"]
    found = logits(tmp_path / "m.colibri", GOLDEN[f"{case}/ids"].tolist(), num_threads=2)
    assert found.shape == want.shape and np.abs(found - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek"])
@pytest.mark.parametrize("dtype, tolerance", [("f16", 0.002), ("bf16", 0.01), ("q8", 0.06), ("q4", 0.3)])
def test_other_types_are_near(tmp_path, case, dtype, tolerance):
    """Random weights amplify rounding, and a token may change its expert: root mean square, not maximum."""
    tiny.save(tmp_path, tiny.CASES[case])
    convert(tmp_path, tmp_path / "m.colibri", dtype)
    want = GOLDEN[f"{case}/logits"]
    found = logits(tmp_path / "m.colibri", GOLDEN[f"{case}/ids"].tolist(), num_threads=2)
    assert np.linalg.norm(found - want) <= tolerance * np.linalg.norm(want)
