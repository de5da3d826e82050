"""Logits of every family and odd shape against transformers in float32 with eager attention (DeepSeek-MoE V1: against
the plain torch reference beside this file). Needs torch and transformers; skipped without them.
"""

from __future__ import annotations

import numpy as np
import pytest
import tiny

pytest.importorskip("torch", reason="the live comparison needs torch")
pytest.importorskip("transformers", reason="the live comparison needs transformers")

import colibri
import live
from colibri.convert import convert
from colibri.convert.config import Config
from colibri.convert.rope import read_rope

pytestmark = pytest.mark.live
TOLERANCE = 1e-4  # of the largest logit
DYNAMIC = {"rope_scaling": {"type": "dynamic", "factor": 3.0}, "max_position_embeddings": 8}


def engine_logits(folder, ids, chunks=None, dtype="f32"):
    """float32 [len(ids)][vocab], fed in pieces of the given lengths."""
    target = folder / f"{dtype}.colibri"
    convert(folder, target, dtype)
    with (
        colibri.Model(target) as model,
        colibri.Session(model, max_seq_len=64, num_threads=2, outputs="all") as session,
    ):
        rows, at = [], 0
        for n in chunks or [len(ids)]:
            rows.append(np.array(session.forward(ids[at : at + n])))
            at += n
        return np.concatenate(rows)


def close(found, want):
    assert found.shape == want.shape and np.isfinite(found).all()
    assert np.abs(found - want).max() <= TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize("case", tiny.CASES)
def test_logits(tmp_path, case):
    config = tiny.CASES[case]
    packed = list(tiny.CASES).index(case) % 2 == 1  # test_convert shows that both give the same file
    tiny.save(tmp_path, config, packed=packed)
    ids = tiny.token_ids(config, 21)
    close(engine_logits(tmp_path, ids), live.reference_logits(tmp_path, config, ids))


@pytest.mark.parametrize("config", [tiny.mixtral(head_dim=16, **DYNAMIC), tiny.qwen3_moe(**DYNAMIC)])
def test_dynamic_rope(tmp_path, config):
    """Both sides are fed token by token: each key is rotated with the frequencies of its own time."""
    tiny.save(tmp_path, config)
    ids = tiny.token_ids(config, 20)
    want = live.reference_logits(tmp_path, config, ids, one_by_one=True)
    close(engine_logits(tmp_path, ids, [1] * len(ids)), want)
    np.testing.assert_array_equal(engine_logits(tmp_path, ids), engine_logits(tmp_path, ids, [1] * len(ids)))


@pytest.mark.parametrize("length", [2, 3, 4, 9])
def test_window_counts_the_current_token(tmp_path, length):
    config = tiny.CASES["mixtral_odd"]  # window 3
    tiny.save(tmp_path, config)
    ids = tiny.token_ids(config, length, seed=5)
    close(engine_logits(tmp_path, ids), live.reference_logits(tmp_path, config, ids))


ROPES = [
    {},
    {"rope_scaling": {"type": "linear", "factor": 2.5}},
    {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 0.7}},
    {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        }
    },
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5e5,
            "factor": 8.0,
            "original_max_position_embeddings": 8,
            "truncate": False,
            "beta_fast": 20,
            "beta_slow": 2,
        }
    },
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
]


@pytest.mark.parametrize("settings", ROPES, ids=lambda s: str(sorted(next(iter(s.values()), {}).items()))[:60])
@pytest.mark.parametrize("dim", [16, 20, 128])
def test_rope_frequencies(settings, dim):
    """float32 frequencies within two units in the last place of transformers', factors equal."""
    from transformers import MixtralConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding

    config = {k: v for k, v in tiny.mixtral(head_dim=dim).items() if k != "rope_theta" or "rope_scaling" in settings}
    theirs = MixtralConfig(**config, **settings)
    kind = theirs.rope_parameters["rope_type"]
    make = ROPE_INIT_FUNCTIONS.get(kind, MixtralRotaryEmbedding.compute_default_rope_parameters)
    inv_freq, factor = make(theirs)
    ours = read_rope(Config({**config, **settings}), dim, config["max_position_embeddings"], 1e6)
    np.testing.assert_allclose(ours.inv_freq, inv_freq.numpy(), rtol=3e-7)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12) and ours.kind == kind


@pytest.mark.parametrize("original", [True, False], ids=["original_names", "packed_names"])
@pytest.mark.parametrize("case", ["mixtral_llama3", "qwen2_moe_window", "qwen3_moe_odd", "olmoe_bias"])
def test_folders_that_transformers_writes(tmp_path, case, original):
    """Newest config spellings and tensor names give the same logits, bit for bit, as the older ones of tiny.py."""
    old = tiny.save(tmp_path / "old", tiny.CASES[case])
    live.load(old).save_pretrained(tmp_path / "new", save_original_format=original, max_shard_size="100KB")
    assert (tmp_path / "new" / "model.safetensors.index.json").is_file()
    ids = tiny.token_ids(tiny.CASES[case], 12)
    np.testing.assert_array_equal(engine_logits(tmp_path / "new", ids), engine_logits(old, ids))
