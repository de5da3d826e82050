"""Load balancing by expert capacity in whole models, against numpy: attention adds nothing here (its output weights are
zero), so that a forward pass is embedding, norms, routers and experts alone. Needs only numpy and the library.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import colibri
import numpy as np
import pytest
import tiny

CASES: dict[str, tiny.Config] = {
    "normalised": tiny.mixtral(num_local_experts=6, max_position_embeddings=256),
    "shared, as they are": tiny.qwen2_moe(num_hidden_layers=2, decoder_sparse_step=1, max_position_embeddings=256),
}
STRATEGIES = ["soft_capacity", "hard_capacity"]


def no_attention(config: tiny.Config) -> tiny.Tensors:
    """The case's weights without attention."""
    tensors = tiny.weights(config)
    for name in tensors:
        if name.endswith("o_proj.weight"):
            tensors[name] = np.zeros_like(tensors[name])
    return tensors


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("capacity")
    config = CASES[request.param]
    tiny.save(folder, config, no_attention(config))
    colibri.convert(folder, folder / "m.colibri", "f32")
    with colibri.Model(folder / "m.colibri") as model:
        yield Case(config, model, folder / "m.colibri")


@dataclass
class Case:
    config: tiny.Config
    model: colibri.Model
    path: Path

    def session(self, **options: object) -> colibri.Session:
        return colibri.Session(self.model, **{"max_seq_len": 64, "num_threads": 1, "outputs": "hidden", **options})

    def ids(self, length: int, seed: int = 0) -> list[int]:
        """Few words, again and again: their experts are asked for too often."""
        return [i % 7 for i in tiny.token_ids(self.config, length, seed)]


@dataclass
class Expected:
    """What a forward pass does with tokens computed together: colibri_load_balancing_t in words of numpy."""

    config: tiny.Config
    strategy: str
    factor: float
    tensors: tiny.Tensors | None = None
    moved: int = 0
    dropped: int = 0
    loads: dict[int, Counter[int]] = field(default_factory=dict)
    """Pairs by layer and expert."""

    def __post_init__(self) -> None:
        tensors = no_attention(self.config) if self.tensors is None else self.tensors
        self.weights = {n: t.astype(np.float64) for n, t in tensors.items()}
        self.experts, self.top_k = tiny.num_experts(self.config), self.config["num_experts_per_tok"]

    def limit(self, n: int) -> int:
        exact = Fraction(float(np.float32(self.factor))) * n * self.top_k / self.experts
        return max(1, math.ceil(exact))

    def route(self, layer: int, logits: np.ndarray) -> list[dict[int, float]]:
        """Experts and weights of each token."""
        room = dict.fromkeys(range(self.experts), self.limit(len(logits)))
        result = []
        for row in logits:
            likely = np.argsort(-row, kind="stable").tolist()
            softmax = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            open_ones = [e for e in likely if room[e]]
            first = likely[: self.top_k]
            own = [e for e in first if room[e]]
            if self.strategy == "soft_capacity":  # in the end, the likeliest of those that have room
                self.moved += len(set(open_ones[: self.top_k]) - set(first))
                own = open_ones[: self.top_k]
            self.dropped += self.top_k - len(own)
            for e in own:
                room[e] -= 1
            self.loads.setdefault(layer, Counter()).update(own)
            base = own if self.strategy == "soft_capacity" else first
            norm = self.config["model_type"] == "mixtral" or self.config["norm_topk_prob"]
            result.append({e: softmax[e] / (softmax[base].sum() if norm else 1) for e in own})
        return result

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * self.weights[name]

    def mlp(self, prefix: str, x: np.ndarray) -> np.ndarray:
        names = ("w1", "w3", "w2") if ".block_sparse_moe." in prefix else ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (self.weights[f"{prefix}{n}.weight"] for n in names)
        inner = x @ gate.T
        return (inner / (1 + np.exp(-inner)) * (x @ up.T)) @ down.T

    def moe(self, layer: int, x: np.ndarray) -> np.ndarray:
        """One layer's experts over normed rows."""
        mixtral = self.config["model_type"] == "mixtral"
        block = f"model.layers.{layer}." + ("block_sparse_moe." if mixtral else "mlp.")
        out = np.zeros_like(x)
        for t, experts in enumerate(self.route(layer, x @ self.weights[block + "gate.weight"].T)):
            for e, weight in experts.items():
                out[t] += weight * self.mlp(f"{block}experts.{e}.", x[t])
        if not mixtral:
            gate = 1 / (1 + np.exp(-(x @ self.weights[block + "shared_expert_gate.weight"].T)))
            out += gate * self.mlp(block + "shared_expert.", x)
        return out

    def forward(self, ids: list[int]) -> np.ndarray:
        """Final hidden states."""
        h = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            h = h + self.moe(layer, self.norm(f"model.layers.{layer}.post_attention_layernorm.weight", h))
        return self.norm("model.norm.weight", h)


def close(ours: np.ndarray, want: np.ndarray) -> bool:
    return bool(np.allclose(ours, want, rtol=0, atol=2e-5 * np.abs(want).max()))


def same_counts(s: colibri.Session, want: Expected) -> bool:
    stats = s.stats()
    loads = [[want.loads[layer][e] for e in range(want.experts)] for layer in sorted(want.loads)]
    ours = (stats["capacity_moved"], stats["capacity_dropped"], stats["expert_tokens"].tolist())
    return ours == (want.moved, want.dropped, loads)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("factor", [0.3, 0.7, 1.0, 1.25])
def test_forward(case: Case, strategy: str, factor: float) -> None:
    ids = case.ids(40)
    want = Expected(case.config, strategy, factor)
    with case.session(load_balancing_strategy=strategy, capacity_factor=factor) as s:
        assert close(s.forward(ids), want.forward(ids))
        assert same_counts(s, want) and want.dropped + want.moved > 0
        stats = s.stats()
        assert stats["expert_tokens"].max() == want.limit(len(ids))
        s.stats_reset()
        assert s.stats()["capacity_moved"] == s.stats()["capacity_dropped"] == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_default_factor(case: Case, strategy: str) -> None:
    with (
        case.session(load_balancing_strategy=strategy) as a,
        case.session(load_balancing_strategy=strategy, capacity_factor=1.25) as b,
    ):
        assert np.array_equal(a.forward(case.ids(40)), b.forward(case.ids(40)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups(case: Case, strategy: str) -> None:
    """Slots follow each other in groups of max_chunk_tokens; the last group is what is left."""
    texts = [case.ids(9, 1), [], case.ids(21, 2), case.ids(4, 3)]
    packed = [i for text in texts for i in text]
    options = {"load_balancing_strategy": strategy, "capacity_factor": 0.8}
    want = Expected(case.config, strategy, 0.8)
    rows = np.concatenate([want.forward(packed[i : i + 16]) for i in range(0, len(packed), 16)])
    with case.session(max_batch_size=4, max_chunk_tokens=16, **options) as s:
        assert close(np.concatenate(s.forward_batch(texts)), rows)
        assert same_counts(s, want)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_decode_of_several_slots(case: Case, strategy: str) -> None:
    """Slots with one token each are a group too: the later ones give way."""
    want = Expected(case.config, strategy, 0.5)
    rows = want.forward([3] * 8)
    with case.session(max_batch_size=8, load_balancing_strategy=strategy, capacity_factor=0.5) as s:
        assert close(np.concatenate(s.forward_batch([[3]] * 8)), rows)
        assert same_counts(s, want) and want.dropped + want.moved > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_token_is_not_changed(case: Case, strategy: str) -> None:
    ids = case.ids(20)
    with case.session() as plain:
        want = plain.forward(ids)
    options = {"load_balancing_strategy": strategy, "capacity_factor": 1e-6}
    with case.session(**options) as s:
        assert np.array_equal(np.concatenate([s.forward([i]) for i in ids]), want)
        assert s.stats()["capacity_moved"] == s.stats()["capacity_dropped"] == 0
    with case.session(max_chunk_tokens=1, **options) as s:
        assert np.array_equal(s.forward(ids), want)
    with case.session(load_balancing_strategy=strategy, capacity_factor=1024) as s:  # room for all
        assert np.array_equal(s.forward(ids), want)
        assert s.stats()["capacity_moved"] == s.stats()["capacity_dropped"] == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["f32", "q8"])
def test_same_bits(case: Case, tmp_path: Path, strategy: str, dtype: str) -> None:
    """Whatever the threads, the instruction set and the residency."""
    tiny.save(tmp_path, case.config)
    colibri.convert(tmp_path, tmp_path / "m.colibri", dtype)
    ids = case.ids(40)
    found = []
    choices: list[dict[str, object]] = [
        {"isa": "ref"}, {}, {"num_threads": 3}, {"isa": "ref", "num_threads": 2}, {"residency": "stream"},
        {"residency": "stream", "expert_cache_size": 2, "num_threads": 2},
    ]  # fmt: skip
    for choice in choices:
        with colibri.Session(
            tmp_path / "m.colibri", load_balancing_strategy=strategy, capacity_factor=0.8, max_chunk_tokens=24,
            **{"num_threads": 1, **choice},
        ) as s:  # fmt: skip
            found.append((s.forward(ids).tobytes(), s.stats()["capacity_moved"], s.stats()["capacity_dropped"]))
    assert len(set(found)) == 1 and sum(found[0][1:]) > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_moe_forward(case: Case, strategy: str) -> None:
    """A host's rows are balanced too, in groups; route_tokens tells what the router alone would do."""
    rows = np.random.default_rng(1).standard_normal((50, case.config["hidden_size"])).astype(np.float32)
    want = Expected(case.config, strategy, 0.75)
    expected = np.concatenate([want.moe(1, rows[i : i + 32].astype(np.float64)) for i in range(0, 50, 32)])
    with (
        case.session(load_balancing_strategy=strategy, capacity_factor=0.75, max_chunk_tokens=32) as s,
        case.session() as plain,
    ):
        assert close(s.moe_forward(1, rows), expected)
        stats = s.stats()
        assert (stats["capacity_moved"], stats["capacity_dropped"]) == (want.moved, want.dropped)
        for ours, theirs in zip(s.route_tokens(1, rows), plain.route_tokens(1, rows), strict=True):
            assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_not_finite(case: Case, tmp_path: Path, strategy: str) -> None:
    """A slot whose router overflows takes no other's place, and is found out although its experts are full."""
    tensors = no_attention(case.config)
    gate = next(
        n for n in tensors if n.startswith("model.layers.0.") and n.endswith(("mlp.gate.weight", "moe.gate.weight"))
    )
    tensors[gate][:, 0] = 3e38
    tensors["model.embed_tokens.weight"][:, 0] = 0
    tensors["model.embed_tokens.weight"][91, 0] = 50
    tiny.save(tmp_path, case.config, tensors)
    colibri.convert(tmp_path, tmp_path / "m.colibri", "f32")
    texts = [case.ids(12, 1), [91] * 6, case.ids(12, 2)]
    want = Expected(case.config, strategy, 0.5 * 30 / 24, tensors)  # as many places for fewer tokens
    rows = want.forward(texts[0] + texts[2])
    with colibri.Session(
        tmp_path / "m.colibri", 3, load_balancing_strategy=strategy, capacity_factor=0.5, outputs="hidden"
    ) as s:
        with pytest.raises(colibri.NotFiniteError) as caught:
            s.forward_batch(texts)
        assert (s.stats()["capacity_moved"], s.stats()["capacity_dropped"]) == (want.moved, want.dropped)
    assert list(caught.value.slots) == [1]
    first, bad, last = caught.value.results
    assert not bad.any() and close(np.concatenate([first, last]), rows)


def test_refused(case: Case) -> None:
    for options in (
        {"capacity_factor": 1.0},
        {"load_balancing_strategy": "soft"},
        {"load_balancing_strategy": "soft_capacity", "capacity_factor": -1.0},
        {"load_balancing_strategy": "soft_capacity", "capacity_factor": 1025.0},
        {"load_balancing_strategy": "hard_capacity", "capacity_factor": math.nan},
    ):
        with pytest.raises(colibri.InvalidArgumentError, match=r"capacity_factor|load_balancing_strategy"):
            case.session(**options)
