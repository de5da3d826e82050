"""Qwen3-MoE: RMSNorm of each q and k head, no shared expert, optional attention biases, dense layers, one window for
all.
"""

from __future__ import annotations

from . import layout, qwen_names
from .config import Config
from .spec import ModelSpec, Names, base_fields, router_fields, sparse_by_step, window

NAMES = Names(routers=qwen_names.ROUTERS, experts=qwen_names.EXPERTS, dense=qwen_names.DENSE)


def describe(config: Config) -> ModelSpec:
    """config.json -> ModelSpec."""
    base, router = base_fields(config, default_eps=1e-6), router_fields(config, minimum=0)
    base["sparse"] = sparse_by_step(config, base["num_layers"], router["num_experts"])
    if config.flag("use_sliding_window", False):
        size = window(config) if "sliding_window" in config.values else 4096  # null is none
        base["windows"] = [size] * base["num_layers"]
    bias = config.flag("attention_bias", False)
    return ModelSpec(
        **base,
        **router,
        names=NAMES,
        moe_intermediate=config.integer("moe_intermediate_size") if any(base["sparse"]) else 0,
        dense_intermediate=0 if all(base["sparse"]) else config.integer("intermediate_size"),
        norm_topk=config.flag("norm_topk_prob", False),
        qk_norm=layout.QK_NORM_HEAD,
        qkv_bias=bias,
        out_bias=bias,
    )
