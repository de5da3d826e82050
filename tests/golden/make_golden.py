"""Writes golden.npz: for every case of tests/python/tiny.py the token ids, and the logits that transformers (float32,
eager attention; for DeepSeek-MoE V1 the plain torch reference) gives for them.

usage: python tests/golden/make_golden.py        (needs torch and transformers)

The weights are not stored: tiny.py makes them from a hash, equal on every machine; their checksum is.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))

import live  # noqa: E402
import tiny  # noqa: E402

LENGTH = 18  # tokens; longer than every window


def main() -> None:
    """Compute and write."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    data = {"versions": np.array([f"torch {torch.__version__}", f"transformers {transformers.__version__}"])}
    for case, config in tiny.CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            tiny.save(Path(folder), config)
            ids = tiny.token_ids(config, LENGTH)
            data[f"{case}/ids"] = np.array(ids, np.int32)
            data[f"{case}/logits"] = live.reference_logits(Path(folder), config, ids)
            data[f"{case}/checksum"] = np.uint32(tiny.checksum(config))
        print(case, data[f"{case}/logits"].shape)
    np.savez_compressed(HERE / "golden.npz", **data)


if __name__ == "__main__":
    main()
