"""OLMoE: RMSNorm over the whole width of q and of k, then clip_qkv, then RoPE; experts in every layer."""

from __future__ import annotations

from . import layout, qwen_names
from .config import Config
from .spec import ModelSpec, Names, base_fields, router_fields

NAMES = Names(routers=qwen_names.ROUTERS, experts=qwen_names.EXPERTS)


def describe(config: Config) -> ModelSpec:
    """config.json -> ModelSpec."""
    bias = config.flag("attention_bias", False)
    return ModelSpec(
        **base_fields(config, default_eps=1e-5),
        **router_fields(config),
        names=NAMES,
        moe_intermediate=config.integer("intermediate_size"),
        norm_topk=config.flag("norm_topk_prob", False),
        qk_norm=layout.QK_NORM_WIDTH,
        clip_qkv=config.number("clip_qkv", default=0.0),
        qkv_bias=bias,
        out_bias=bias,
        eos_default=50279,
        pad_default=1,
    )
