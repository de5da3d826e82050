"""Known numbers of router, RoPE and sliding window, read off whole models whose weights are made by hand. Needs only
numpy and the library.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import colibri
import numpy as np
import pytest
import tiny

FAMILIES: dict[str, Callable[..., tiny.Config]] = {
    "mixtral": tiny.mixtral,
    "qwen2_moe": tiny.qwen2_moe,
    "qwen3_moe": tiny.qwen3_moe,
    "olmoe": tiny.olmoe,
    "deepseek": tiny.deepseek,
}
RENORMALISED, AS_THEY_ARE = [0.731059, 0.268941], [0.643914, 0.236883]


def with_experts(family: str, experts: int, **changes: object) -> tiny.Config:
    """A family's case with so many experts, two per token."""
    name = {"mixtral": "num_local_experts", "deepseek": "n_routed_experts"}.get(family, "num_experts")
    return FAMILIES[family](**{name: experts, "num_experts_per_tok": 2, **changes})


def convert(folder: Path, config: tiny.Config, tensors: tiny.Tensors, dtype: str = "f32") -> colibri.Model:
    tiny.save(folder, config, tensors)
    colibri.convert(folder, folder / "m.colibri", dtype)
    return colibri.Model(folder / "m.colibri")


def route(folder: Path, config: tiny.Config, logits: list[float], dtype: str = "f32") -> tuple[list[int], list[float]]:
    """What the router of layer 1 chooses for a token with these logits."""
    tensors = tiny.weights(config)
    (gate,) = (
        n for n in tensors if n.startswith("model.layers.1.") and n.endswith((".mlp.gate.weight", "moe.gate.weight"))
    )
    tensors[gate] = np.zeros_like(tensors[gate])
    tensors[gate][:, 0] = logits
    hidden = np.eye(1, config["hidden_size"], dtype=np.float32)
    found = []
    with convert(folder, config, tensors, dtype) as model:
        for isa in ("ref", None):
            with colibri.Session(model, max_seq_len=8, num_threads=1, isa=isa) as session:
                ids, weights = session.route_tokens(1, hidden)
                found.append((ids[0].tolist(), weights[0].tolist()))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("dtype", ["f32", "q8", "q4"])
@pytest.mark.parametrize(
    "family, changes, want",
    [
        ("mixtral", {}, RENORMALISED),
        ("qwen3_moe", {"norm_topk_prob": True}, RENORMALISED),
        ("qwen3_moe", {"norm_topk_prob": False}, AS_THEY_ARE),
        ("qwen2_moe", {}, AS_THEY_ARE),
        ("qwen2_moe", {"norm_topk_prob": True}, RENORMALISED),
        ("olmoe", {}, AS_THEY_ARE),
        ("olmoe", {"norm_topk_prob": True}, RENORMALISED),
        ("deepseek", {}, AS_THEY_ARE),
        ("deepseek", {"norm_topk_prob": True}, RENORMALISED),
    ],
)
def test_router_weights(tmp_path, family, changes, want, dtype):  # case 14
    ids, weights = route(tmp_path, with_experts(family, 4, **changes), [1, 2, 3, 4], dtype)
    assert ids == [3, 2] and weights == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("experts", [6, 8, 60])
def test_router_ties(tmp_path, experts):  # case 15
    config = with_experts("mixtral", experts)
    assert route(tmp_path, config, [1.0] * experts) == ([0, 1], [0.5, 0.5])
    more = float(np.nextafter(np.float32(1), np.float32(2)))
    assert route(tmp_path, config, [1.0] * (experts - 1) + [more])[0] == [experts - 1, 0]
    assert route(tmp_path, config, [1.0, 1.0, more, 1.0, more, *[1.0] * (experts - 5)])[0] == [2, 4]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8", "q4"])
def test_large_expert_outputs(tmp_path, dtype):  # case 17
    """Weights that f16 holds, products that it does not."""
    config = tiny.mixtral()
    tensors = {n: t * np.float32(200 if ".experts." in n else 1) for n, t in tiny.weights(config).items()}
    with convert(tmp_path, config, tensors, dtype) as model, colibri.Session(model, max_seq_len=32) as session:
        assert np.isfinite(session.forward(tiny.token_ids(config))).all()


def test_window_counts_the_current_token(tmp_path):  # case 18
    """One layer, window 3: the last logits depend on the last three tokens and on no other, to the bit."""
    window, config = 3, tiny.mixtral(num_hidden_layers=1, sliding_window=3)
    with (
        convert(tmp_path, config, tiny.weights(config)) as model,
        colibri.Session(model, max_seq_len=16, outputs="last") as session,
    ):

        def last(ids: list[int]) -> bytes:
            session.reset()
            return session.forward(ids).tobytes()

        for length in (window - 1, window, window + 1, 3 * window):
            ids = tiny.token_ids(config, length)
            for position in range(length):
                changed = [*ids[:position], ids[position] + 1, *ids[position + 1 :]]
                assert (last(changed) != last(ids)) == (position >= length - window), (length, position)


def test_rope_pairs_halves(tmp_path):  # case 19
    """x = [1, 2, 3, 4] at position 1, inv_freq [1, 0.01]. Token i is the key e_i at position 0 with value 1, token 4
    the query x with key and value 0: attention to the key is sigmoid(rotated x[i] / sqrt(4)), and stands in logit 5
    beside the query's own 1 in logit 4.
    """
    config = tiny.mixtral(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=4,
        rms_norm_eps=1e-12,
    )  # fmt: skip
    tensors = {n: np.zeros_like(t) for n, t in tiny.weights(config).items()}
    attention, size = "model.layers.0.self_attn.", np.float32(8**0.5)  # a unit vector's length after RMSNorm
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] += 1
    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"] = np.eye(8, dtype=np.float32)
    tensors[attention + "q_proj.weight"][:, 4] = np.arange(1, 5) / size
    tensors[attention + "k_proj.weight"][:, :4] = np.eye(4) / size
    tensors[attention + "v_proj.weight"][0, :4] = 1 / size
    tensors[attention + "o_proj.weight"][5, 0] = 1
    with convert(tmp_path, config, tensors) as model, colibri.Session(model, max_seq_len=4) as session:
        rotated = []
        for i in range(4):
            session.reset()
            logits = session.forward([i, 4])[1].astype(np.float64)
            share = logits[5] / logits[4]
            rotated.append(2 * np.log(share / (1 - share)))
    np.testing.assert_allclose(rotated, [-1.984111, 1.959901, 2.462378, 4.0198], atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_prefill_then_decode(tmp_path, window):  # case 20
    """Nine tokens and one more are ten at once, also when the nine are kept from a longer text."""
    config = tiny.mixtral(sliding_window=window)
    ids = tiny.token_ids(config, 20)
    with convert(tmp_path, config, tiny.weights(config)) as model, colibri.Session(model, max_seq_len=32) as session:
        want = session.forward(ids)
        session.reset()
        session.forward(ids[:9])
        np.testing.assert_array_equal(session.forward(ids[9:10]), want[9:10])
        session.forward([(i + 1) % 101 for i in ids])  # 30 tokens: the window wrapped
        session.truncate(0, 9)
        np.testing.assert_array_equal(session.forward(ids[9:]), want[9:])


def silu_mlp(tensors: tiny.Tensors, prefix: str, x: np.ndarray) -> np.ndarray:
    """A gated MLP [n, hidden] in float64; w1, w3, w2 or gate_proj, up_proj, down_proj."""
    names = ("w1", "w3", "w2") if f"{prefix}.w1.weight" in tensors else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (tensors[f"{prefix}.{name}.weight"].astype(np.float64) for name in names)
    g = x @ gate.T
    return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T


@pytest.mark.parametrize(
    ("family", "layer", "block"),
    [("mixtral", 1, "block_sparse_moe"), ("qwen2_moe", 1, "mlp"), ("qwen2_moe", 0, "mlp")],  # routed; shared; dense
)
def test_moe_forward_is_the_formula(tmp_path, family, layer, block):
    config = getattr(tiny, family)()
    tensors = tiny.weights(config)
    prefix = f"model.layers.{layer}.{block}"
    hidden = np.random.default_rng(5).standard_normal((7, 64)).astype(np.float32)
    with colibri.Session(convert(tmp_path, config, tensors)) as session:
        got = session.moe_forward(layer, hidden)
        x = hidden.astype(np.float64)
        if tiny.is_sparse(config, layer):
            ids, weights = session.route_tokens(layer, hidden)
            want = np.zeros_like(x)
            for t, i in np.ndindex(*ids.shape):
                want[t] += weights[t, i] * silu_mlp(tensors, f"{prefix}.experts.{ids[t, i]}", x[t])
            if f"{prefix}.shared_expert_gate.weight" in tensors:
                gate = x @ tensors[f"{prefix}.shared_expert_gate.weight"].astype(np.float64).T
                want += silu_mlp(tensors, f"{prefix}.shared_expert", x) / (1 + np.exp(-gate))
        else:
            want = silu_mlp(tensors, prefix, x)
        assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
        assert np.array_equal(session.moe_forward(layer, hidden[3:4]), got[3:4])
        hidden[2, 5] = np.inf
        with pytest.raises(colibri.NotFiniteError, match="row 2") as caught:
            session.moe_forward(layer, hidden)
        assert not caught.value.results[2].any() and np.array_equal(caught.value.results[3:], got[3:])
