"""Qwen2-MoE (Qwen1.5-MoE): qkv biases, one shared expert behind a sigmoid gate, dense layers, windows by layer type."""

from __future__ import annotations

from . import qwen_names
from .config import Config
from .errors import ConversionError
from .spec import ModelSpec, Names, base_fields, router_fields, sparse_by_step, window

NAMES = Names(
    routers=qwen_names.ROUTERS,
    experts=qwen_names.EXPERTS,
    shared=qwen_names.shared("shared_expert"),
    shared_gate=qwen_names.MLP + "shared_expert_gate.weight",
    dense=qwen_names.DENSE,
)


def describe(config: Config) -> ModelSpec:
    """config.json -> ModelSpec."""
    base, router = base_fields(config, default_eps=1e-6), router_fields(config, minimum=0)
    base["sparse"] = sparse_by_step(config, base["num_layers"], router["num_experts"])
    base["windows"] = _windows(config, base["num_layers"])
    any_sparse, all_sparse = any(base["sparse"]), all(base["sparse"])
    return ModelSpec(
        **base,
        **router,
        names=NAMES,
        moe_intermediate=config.integer("moe_intermediate_size") if any_sparse else 0,
        shared_intermediate=config.integer("shared_expert_intermediate_size") if any_sparse else 0,
        shared_gate=any_sparse,
        dense_intermediate=0 if all_sparse else config.integer("intermediate_size"),
        norm_topk=config.flag("norm_topk_prob", False),
        qkv_bias=config.flag("qkv_bias", True),
    )


def _windows(config: Config, layers: int) -> list[int]:
    """layer_types decides; without it every other layer below max_window_layers has the window, if windows are used
    at all.
    """
    used = config.flag("use_sliding_window", False)
    size = (window(config) or 4096) if used else 0
    types = config.get("layer_types")
    if types is None:
        limit = config.integer("max_window_layers", default=28, minimum=0)
        return [size if used and i % 2 == 0 and i < limit else 0 for i in range(layers)]
    if not isinstance(types, list) or len(types) < layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise ConversionError(
            f"{config.where}: layer_types must name full_attention or sliding_attention for each of {layers} layers"
        )
    if "sliding_attention" in types[:layers] and not used:
        raise ConversionError(f"{config.where}: layer_types has sliding_attention, but use_sliding_window is false")
    return [size if kind == "sliding_attention" else 0 for kind in types[:layers]]
