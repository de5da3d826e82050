"""Tiny random checkpoints of every family, written by numpy alone and equal on every machine.

A case is a config.json as a dictionary. `weights` makes its tensors under the names that the public models use
(experts one by one, or packed), `save` writes a folder. Values come from a hash of tensor name and index, so nothing
but this file defines them: golden data need not hold weights.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]

_BASE = {
    "vocab_size": 101,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "attention_dropout": 0.0,
}


def _case(model_type: str, architecture: str, **changes: Any) -> Config:
    config = {"architectures": [architecture], "model_type": model_type, **_BASE, **changes}
    return {n: v for n, v in config.items() if n != "num_experts" or v is not None}


def mixtral(**changes: Any) -> Config:
    """8 experts, 2 per token."""
    base = {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    return _case("mixtral", "MixtralForCausalLM", **{**base, **changes})


def qwen2_moe(**changes: Any) -> Config:
    """6 experts, 4 per token, gated shared expert, layers 1 and 3 of 4 sparse."""
    base = {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": 4,
        "max_window_layers": 3,
        "rms_norm_eps": 1e-6,
    }
    return _case("qwen2_moe", "Qwen2MoeForCausalLM", **{**base, **changes})


def qwen3_moe(**changes: Any) -> Config:
    """9 experts, 3 per token, head_dim 32 where hidden / heads is 16."""
    base = {
        "head_dim": 32,
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_experts": 9,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "rms_norm_eps": 1e-6,
    }
    return _case("qwen3_moe", "Qwen3MoeForCausalLM", **{**base, **changes})


def olmoe(**changes: Any) -> Config:
    """7 experts, 3 per token, head_dim 12, q and k norms over the whole width, clipped."""
    base = {
        "hidden_size": 48,
        "intermediate_size": 20,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "attention_bias": False,
        "clip_qkv": 0.6,
    }
    return _case("olmoe", "OlmoeForCausalLM", **{**base, **changes})


def deepseek(**changes: Any) -> Config:
    """6 routed experts, 3 per token, two shared ones, first layer dense."""
    base = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "intermediate_size": 56,
        "moe_intermediate_size": 20,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
    }
    return _case("deepseek", "DeepseekForCausalLM", **{**base, **changes})


def _rope(**settings: Any) -> Config:
    """The new spelling."""
    return {"rope_theta": None, "rope_parameters": {"rope_theta": 10000.0, **settings}}


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 16}

CASES: dict[str, Config] = {
    "mixtral": mixtral(),
    "mixtral_odd": mixtral(
        hidden_size=72,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=20,
        num_local_experts=5,
        num_experts_per_tok=3,
        intermediate_size=40,
        sliding_window=3,
    ),
    "mixtral_60": mixtral(num_local_experts=60, num_experts_per_tok=8, intermediate_size=17, num_hidden_layers=1),
    "mixtral_tied": mixtral(tie_word_embeddings=True, head_dim=None, num_local_experts=6, num_experts_per_tok=5),
    "mixtral_linear": mixtral(rope_scaling={"type": "linear", "factor": 2.0}, num_experts_per_tok=4),
    "mixtral_llama3": mixtral(**_rope(rope_type="llama3", **_LLAMA3), num_experts_per_tok=6),
    "qwen2_moe": qwen2_moe(),
    "qwen2_moe_window": qwen2_moe(
        use_sliding_window=True, decoder_sparse_step=1, mlp_only_layers=[3], num_experts_per_tok=1, norm_topk_prob=True
    ),
    "qwen2_moe_types": qwen2_moe(
        use_sliding_window=True,
        num_hidden_layers=2,
        decoder_sparse_step=1,
        num_experts_per_tok=6,
        layer_types=["full_attention", "sliding_attention"],
        shared_expert_intermediate_size=19,
    ),
    "qwen2_moe_yarn": qwen2_moe(
        num_hidden_layers=2, rope_scaling={"type": "yarn", "mscale": 0.8, "mscale_all_dim": 0.5, **_YARN}
    ),
    "qwen3_moe": qwen3_moe(),
    "qwen3_moe_odd": qwen3_moe(
        hidden_size=60,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=14,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=33,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=5,
        mlp_only_layers=[0],
        norm_topk_prob=False,
    ),
    "qwen3_moe_local": qwen3_moe(
        num_experts=None, num_local_experts=4, num_experts_per_tok=1, tie_word_embeddings=True
    ),
    "qwen3_moe_yarn": qwen3_moe(
        **_rope(rope_type="yarn", truncate=False, beta_fast=16, **_YARN), num_experts_per_tok=7
    ),
    "olmoe": olmoe(),
    "olmoe_bias": olmoe(
        attention_bias=True,
        num_experts=9,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        clip_qkv=None,
        hidden_size=80,
        num_attention_heads=5,
        num_key_value_heads=5,
        rope_scaling={"rope_type": "llama3", **_LLAMA3},
    ),
    "deepseek": deepseek(),
    "deepseek_odd": deepseek(
        hidden_size=56,
        num_attention_heads=4,
        num_key_value_heads=2,
        n_routed_experts=7,
        n_shared_experts=1,
        num_experts_per_tok=4,
        moe_layer_freq=2,
        norm_topk_prob=True,
        attention_bias=True,
        rope_scaling={"type": "linear", "factor": 4.0},
    ),
    "deepseek_top1": deepseek(
        n_shared_experts=None, num_experts_per_tok=1, norm_topk_prob=True, first_k_dense_replace=0
    ),
}
"""Shapes and features of every family; head_dim, widths and expert counts that are no multiples of anything."""


def head_dim(config: Config) -> int:
    """Of one attention head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def num_experts(config: Config) -> int:
    """In whatever spelling."""
    return next(
        config[n] for n in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(n) is not None
    )


def is_sparse(config: Config, layer: int) -> bool:
    """Whether a layer has experts."""
    if config["model_type"] == "deepseek":
        return layer >= config["first_k_dense_replace"] and layer % config["moe_layer_freq"] == 0
    if config["model_type"] in ("qwen2_moe", "qwen3_moe"):
        return layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0
    return True


# ---- Weights


def values(name: str, shape: tuple[int, ...], amplitude: float, seed: int = 0) -> np.ndarray:
    """float32 in [-amplitude, amplitude): a hash (splitmix64's finaliser) of name, seed and index."""
    base = np.uint64((zlib.crc32(name.encode()) << 20) + seed)
    with np.errstate(over="ignore"):
        x = np.arange(int(np.prod(shape)), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + base
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    unit = (x >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)
    return (unit * np.float32(amplitude)).reshape(shape)


class _Maker:
    def __init__(self, config: Config, seed: int) -> None:
        self.config, self.seed, self.tensors = config, seed, {}

    def matrix(self, name: str, rows: int, k: int, gain: float = 1.0) -> None:
        self.tensors[name] = values(name, (rows, k), gain * (3.0 / k) ** 0.5, self.seed)

    def norm(self, name: str, n: int) -> None:
        self.tensors[name] = np.float32(1) + values(name, (n,), 0.3, self.seed)

    def bias(self, name: str, n: int) -> None:
        self.tensors[name] = values(name, (n,), 0.3, self.seed)

    def mlp(self, prefix: str, width: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> None:
        hidden = self.config["hidden_size"]
        self.matrix(f"{prefix}{names[0]}.weight", width, hidden)
        self.matrix(f"{prefix}{names[1]}.weight", width, hidden)
        self.matrix(f"{prefix}{names[2]}.weight", hidden, width)


def weights(config: Config, *, packed: bool = False, seed: int = 0) -> Tensors:
    """All tensors of a case, float32."""
    make, hidden = _Maker(config, seed), config["hidden_size"]
    make.tensors["model.embed_tokens.weight"] = values("embed", (config["vocab_size"], hidden), 1.7, seed)
    make.norm("model.norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        make.matrix("lm_head.weight", config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        _attention(make, f"model.layers.{layer}.")
        _mlp(make, f"model.layers.{layer}.", is_sparse(config, layer))
    return _pack(config, make.tensors) if packed else make.tensors


def _attention(make: _Maker, prefix: str) -> None:
    config, hidden, dim = make.config, make.config["hidden_size"], head_dim(make.config)
    family, heads, kv = config["model_type"], config["num_attention_heads"], config["num_key_value_heads"]
    make.norm(prefix + "input_layernorm.weight", hidden)
    make.norm(prefix + "post_attention_layernorm.weight", hidden)
    prefix += "self_attn."
    for x, n in (("q", heads), ("k", kv), ("v", kv)):
        make.matrix(f"{prefix}{x}_proj.weight", n * dim, hidden)
        if family == "qwen2_moe" or config.get("attention_bias"):
            make.bias(f"{prefix}{x}_proj.bias", n * dim)
    make.matrix(prefix + "o_proj.weight", hidden, heads * dim)
    if config.get("attention_bias"):
        make.bias(prefix + "o_proj.bias", hidden)
    if family in ("qwen3_moe", "olmoe"):
        make.norm(prefix + "q_norm.weight", dim if family == "qwen3_moe" else heads * dim)
        make.norm(prefix + "k_norm.weight", dim if family == "qwen3_moe" else kv * dim)


def _mlp(make: _Maker, prefix: str, sparse: bool) -> None:
    config, family = make.config, make.config["model_type"]
    block = prefix + ("block_sparse_moe." if family == "mixtral" else "mlp.")
    if not sparse:
        make.mlp(block, config["intermediate_size"])
        return
    width = config["intermediate_size"] if family in ("mixtral", "olmoe") else config["moe_intermediate_size"]
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    make.matrix(block + "gate.weight", num_experts(config), config["hidden_size"], 3.0)
    for expert in range(num_experts(config)):
        make.mlp(f"{block}experts.{expert}.", width, names)
    if family == "qwen2_moe":
        make.mlp(block + "shared_expert.", config["shared_expert_intermediate_size"])
        make.matrix(block + "shared_expert_gate.weight", 1, config["hidden_size"])
    if family == "deepseek" and config["n_shared_experts"]:
        make.mlp(block + "shared_experts.", config["n_shared_experts"] * width)


def _pack(config: Config, tensors: Tensors) -> Tensors:
    """Experts one by one -> experts.gate_up_proj [E][2 I][H] and experts.down_proj [E][H][I], under mlp. as newer files
    do.
    """
    names = ("w1", "w3", "w2") if config["model_type"] == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    result = {n.replace(".block_sparse_moe.", ".mlp."): t for n, t in tensors.items() if ".experts." not in n}
    for layer in range(config["num_hidden_layers"]):
        old = (
            f"model.layers.{layer}."
            + ("block_sparse_moe" if config["model_type"] == "mixtral" else "mlp")
            + ".experts."
        )
        new = f"model.layers.{layer}.mlp.experts."
        if is_sparse(config, layer):
            parts = [[tensors[f"{old}{e}.{n}.weight"] for n in names] for e in range(num_experts(config))]
            result[new + "gate_up_proj"] = np.stack([np.concatenate([gate, up]) for gate, up, _ in parts])
            result[new + "down_proj"] = np.stack([down for _, _, down in parts])
    return result


# ---- Files


def encode(tensor: np.ndarray, dtype: str) -> bytes:
    """Little-endian bytes as F32, F16 or BF16 (bf16 by truncation: these weights are test data)."""
    if dtype == "BF16":
        return (tensor.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return tensor.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def write_safetensors(path: Path, tensors: Tensors, dtype: str = "F32") -> None:
    """A safetensors file."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        blob = encode(tensor, dtype)
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(blob)]}
        data += blob
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def save(
    folder: Path,
    config: Config,
    tensors: Tensors | None = None,
    *,
    packed: bool = False,
    shards: int = 1,
    dtype: str = "F32",
) -> Path:
    """Write config.json and the tensors (default: the case's own), in one file or several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = weights(config, packed=packed) if tensors is None else tensors
    torch_dtype = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": torch_dtype}))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
        return folder
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        write_safetensors(folder / file, {n: tensors[n] for n in part}, dtype)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def token_ids(config: Config, length: int = 12, seed: int = 0) -> list[int]:
    """A text of `length` ids, equal everywhere."""
    return [int(v) for v in (values("ids", (length,), 1.0, seed) + 1) / 2 * (config["vocab_size"] - 1)]


def checksum(config: Config) -> int:
    """CRC-32 of config and weights: golden data belong to exactly these."""
    crc = zlib.crc32(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(weights(config).items()):
        crc = zlib.crc32(tensor.tobytes(), zlib.crc32(name.encode(), crc))
    return crc
