"""What a model is, independent of its family's spellings: sizes, flags and tensor names. Families fill it in from
config.json.

A family is a function from a Config to a ModelSpec, in a module of its own, registered in `families.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import layout
from .config import Config
from .errors import ConversionError
from .rope import Rope, read_rope

MAX_POSITION = 1 << 30  # of the file format


@dataclass(frozen=True)
class MlpNames:
    """One gated MLP as three matrices: gate and up [I][H], down [H][I]. "{layer}" and "{expert}" are filled in."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class PackedNames:
    """All experts of a layer in two tensors: gate_up [E][2 I][H], gate rows first, and down [E][H][I]."""

    gate_up: str
    down: str


@dataclass(frozen=True)
class Names:
    """Tensor names of a family. Where a tuple stands, checkpoints differ: the first spelling that is there is taken."""

    routers: tuple[str, ...]
    experts: tuple[MlpNames | PackedNames, ...]
    shared: MlpNames | None = None
    shared_gate: str = ""
    dense: MlpNames | None = None
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    attn_norm: str = "model.layers.{layer}.input_layernorm.weight"
    mlp_norm: str = "model.layers.{layer}.post_attention_layernorm.weight"
    attention: str = "model.layers.{layer}.self_attn."  # then q_proj.weight, q_proj.bias, q_norm.weight and the like


@dataclass(frozen=True)
class ModelSpec:
    """A model, unpadded sizes. `windows` and `sparse` have one element a layer; window 0 is full attention."""

    model_type: str
    names: Names
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: Rope
    tied: bool
    windows: list[int]
    sparse: list[bool]
    num_experts: int
    top_k: int
    moe_intermediate: int
    norm_topk: bool
    dense_intermediate: int = 0
    shared_intermediate: int = 0
    shared_gate: bool = False
    routed_scale: float = 1.0
    qk_norm: int = layout.QK_NORM_NONE
    qkv_bias: bool = False
    out_bias: bool = False
    clip_qkv: float = 0.0
    bos_default: int | None = None  # of the family, where config.json does not say
    eos_default: int | None = None
    pad_default: int | None = None


def base_fields(config: Config, default_eps: float, default_theta: float = 10000.0) -> dict:
    """The fields that every family reads alike."""
    _refuse_unsupported(config)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", default=None)
    if head_dim is None:
        if hidden % heads:
            raise ConversionError(f"{config.where}: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
        head_dim = hidden // heads
    if head_dim % 2:
        raise ConversionError(f"{config.where}: head_dim {head_dim} is odd; RoPE needs an even one")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConversionError(
            f"{config.where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    layers, max_position = config.integer("num_hidden_layers", maximum=65535), config.integer("max_position_embeddings")
    return {
        "model_type": config.text("model_type"),
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_position": max_position,
        "rms_norm_eps": config.number("rms_norm_eps", default=default_eps),
        "rope": read_rope(config, head_dim, max_position, default_theta),
        "tied": config.flag("tie_word_embeddings", False),
        "windows": [0] * layers,
        "sparse": [True] * layers,
    }


def router_fields(config: Config, minimum: int = 1) -> dict:
    """Number of experts in its three spellings, and experts per token. minimum 0: the family has dense layers too."""
    experts = config.integer("num_experts", "num_local_experts", "n_routed_experts", minimum=minimum)
    if experts == 0:
        return {"num_experts": 0, "top_k": 0}
    top_k = config.integer("num_experts_per_tok")
    if top_k > experts:
        raise ConversionError(f"{config.where}: num_experts_per_tok {top_k} is more than the {experts} experts")
    return {"num_experts": experts, "top_k": top_k}


def sparse_by_step(config: Config, layers: int, experts: int) -> list[bool]:
    """Qwen's rule: layer i has experts unless it is in mlp_only_layers or (i + 1) is no multiple of
    decoder_sparse_step.
    """
    dense = set(config.integers("mlp_only_layers") or [])
    step = config.integer("decoder_sparse_step", default=1)
    return [experts > 0 and i not in dense and (i + 1) % step == 0 for i in range(layers)]


def window(config: Config) -> int:
    """sliding_window as a size, 0 if null; no text is longer than MAX_POSITION."""
    return min(config.integer("sliding_window", default=0), MAX_POSITION)


def _refuse_unsupported(config: Config) -> None:
    activation = config.text("hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        raise ConversionError(f"{config.where}: hidden_act {activation!r} is not supported, only 'silu'")
    if config.get("quantization_config") is not None:
        raise ConversionError(
            f"{config.where}: quantization_config: an already quantised checkpoint; give the f32, f16 or bf16 one"
        )


def check_limits(spec: ModelSpec) -> None:
    """Sizes that the file format can hold."""
    heads = spec.num_heads * layout.pad(spec.head_dim, layout.TILE_ROWS)
    limits = [
        ("vocab_size", spec.vocab_size, 1 << 24),
        ("hidden_size", spec.hidden_size, 65535),
        ("the number of experts", spec.num_experts, 65535),
        ("the intermediate size of an expert", spec.moe_intermediate, 65535),
        ("the intermediate size of the shared expert", spec.shared_intermediate, 131072),
        ("intermediate_size", spec.dense_intermediate, 131072),
        ("head_dim", spec.head_dim, 1024),
        ("the width of all heads", heads, 131072),
        ("max_position_embeddings", spec.max_position, MAX_POSITION),
    ]
    for name, value, limit in limits:
        if value > limit:
            raise ConversionError(f"config.json: {name} is {value}; the file format holds at most {limit}")
    if spec.rope.kind == "dynamic" and spec.head_dim <= 2:
        raise ConversionError("config.json: dynamic RoPE needs a head_dim of more than 2")
