"""Random Mixtral checkpoints of known shapes, written tensor by tensor as bfloat16 safetensors, the same everywhere."""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Shape:
    """A Mixtral model's sizes."""

    name: str
    hidden: int
    inter: int
    experts: int
    top_k: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int

    @property
    def head_dim(self) -> int:
        """Of one attention head."""
        return self.hidden // self.heads

    @property
    def expert_weights(self) -> int:
        """Of one expert: gate, up and down."""
        return 3 * self.hidden * self.inter

    @property
    def layer_weights(self) -> int:
        """That one token meets in a layer, without the router: attention and top_k experts."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * self.head_dim
        return attention + self.top_k * self.expert_weights

    @property
    def router_weights(self) -> int:
        """Of one layer."""
        return self.experts * self.hidden

    @property
    def head_weights(self) -> int:
        """Of the last matrix, hidden state to logits."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All of them, norms left out."""
        others = self.experts - self.top_k
        layer = self.layer_weights + others * self.expert_weights + self.router_weights
        return self.layers * layer + 2 * self.head_weights

    def operations(self, tokens: int) -> int:
        """Multiplications and additions with weights for a prompt whose last token alone meets the head."""
        return 2 * (tokens * self.layers * self.layer_weights + self.head_weights)

    def bytes_per_token(self, bits: float) -> float:
        """Weight bytes that decoding one token reads, at so many bits per weight and a router of 32 bits."""
        weights = self.layers * self.layer_weights + self.head_weights
        return weights * bits / 8 + 4 * self.layers * self.router_weights

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_size": self.hidden,
            "intermediate_size": self.inter,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "vocab_size": self.vocab,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "max_position_embeddings": 32768,
            "hidden_act": "silu",
            "sliding_window": None,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
            "attention_dropout": 0.0,
        }


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("fine", 2048, 1024, experts=64, top_k=8, layers=8, heads=16, kv_heads=16, vocab=32000),
        Shape("coarse", 4096, 14336, experts=8, top_k=2, layers=2, heads=32, kv_heads=8, vocab=32000),
        Shape("tiny", 128, 96, experts=8, top_k=2, layers=2, heads=4, kv_heads=2, vocab=320),
        Shape("router", 2048, 32, experts=64, top_k=8, layers=1, heads=16, kv_heads=16, vocab=256),
    )
}

Part = tuple[str, tuple[int, ...], float]  # name, shape, standard deviation (0: all ones)


def parts(shape: Shape, layer: int) -> list[Part]:
    """The tensors of a layer, or with `layer` == layers what stands around them."""
    hidden, inter = shape.hidden, shape.inter
    if layer == shape.layers:
        return [
            ("model.embed_tokens.weight", (shape.vocab, hidden), 1.0),
            ("model.norm.weight", (hidden,), 0.0),
            ("lm_head.weight", (shape.vocab, hidden), _spread(hidden)),
        ]
    prefix, kv = f"model.layers.{layer}.", shape.kv_heads * shape.head_dim
    result: list[Part] = [
        (f"{prefix}{norm}.weight", (hidden,), 0.0) for norm in ("input_layernorm", "post_attention_layernorm")
    ]
    result += [
        (f"{prefix}self_attn.{name}_proj.weight", (rows, hidden), _spread(hidden))
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden))
    ]
    prefix += "block_sparse_moe."
    result.append((f"{prefix}gate.weight", (shape.experts, hidden), _spread(hidden)))
    for expert in range(shape.experts):
        for name, rows, k in (("w1", inter, hidden), ("w2", hidden, inter), ("w3", inter, hidden)):
            result.append((f"{prefix}experts.{expert}.{name}.weight", (rows, k), _spread(k)))
    return result


def _spread(k: int) -> float:
    """Standard deviation that keeps the length of vectors of k numbers."""
    return 1 / math.sqrt(k)


def _values(part: Part) -> bytes:
    """A tensor's bfloat16 numbers, drawn by its name."""
    name, dims, deviation = part
    if deviation == 0:
        floats = np.ones(dims, np.float32)
    else:
        floats = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode()))).standard_normal(dims, np.float32)
        floats *= np.float32(deviation)
    bits = floats.view(np.uint32)
    bits += 0x7FFF + ((bits >> 16) & 1)  # round to nearest even
    return (bits >> 16).astype("<u2").tobytes()


def _write_shard(path: Path, tensors: list[Part]) -> None:
    header, offset = {}, 0
    for name, dims, _ in tensors:
        size = 2 * math.prod(dims)
        header[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in tensors:
            file.write(_values(part))


def write_checkpoint(folder: Path, shape: Shape) -> None:
    """Write the shape's checkpoint: a shard for every layer and one for the rest. The folder appears when complete."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    weight_map = {}
    for layer in range(shape.layers + 1):
        name = f"model-{layer + 1:05d}-of-{shape.layers + 1:05d}.safetensors"
        _write_shard(unfinished / name, parts(shape, layer))
        weight_map.update({part[0]: name for part in parts(shape, layer)})
    index = {"metadata": {"total_size": 2 * shape.parameters}, "weight_map": weight_map}
    (unfinished / "model.safetensors.index.json").write_text(json.dumps(index))
    (unfinished / "config.json").write_text(json.dumps(shape.config()))
    unfinished.rename(folder)


class Checkpoint:
    """Tensors of a checkpoint written here, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.where: dict[str, tuple[Path, int, int, tuple[int, ...]]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            for name, entry in header.items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    self.where[name] = (path, 8 + size + begin, end - begin, tuple(entry["shape"]))

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        path, offset, size, dims = self.where[name]
        bits = np.fromfile(path, "<u2", size // 2, offset=offset).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32).reshape(dims)

    def experts(self, layer: int, name: str, count: int) -> Iterator[NDArray[np.float32]]:
        """One matrix of every expert, in order."""
        for expert in range(count):
            yield self[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}.weight"]
