"""DeepSeek-MoE (V1): dense layers first, then experts with ungated shared experts stored as one, softmax routing."""

from __future__ import annotations

from . import qwen_names
from .config import Config
from .errors import ConversionError
from .spec import ModelSpec, Names, base_fields, router_fields

NAMES = Names(
    routers=qwen_names.ROUTERS,
    experts=qwen_names.EXPERTS,
    shared=qwen_names.shared("shared_experts"),
    dense=qwen_names.DENSE,
)


def describe(config: Config) -> ModelSpec:
    """config.json -> ModelSpec."""
    scoring = config.text("scoring_func", default="softmax")
    if scoring != "softmax":
        raise ConversionError(f"{config.where}: scoring_func {scoring!r} is not supported, only 'softmax'")
    for name in ("q_lora_rank", "kv_lora_rank"):
        if config.get(name) is not None:
            raise ConversionError(f"{config.where}: {name}: multi-head latent attention is not supported")
    for name in ("n_group", "topk_group"):
        if config.get(name, default=1) not in (0, 1):
            raise ConversionError(f"{config.where}: {name}: grouped routing is not supported")
    base, router = base_fields(config, default_eps=1e-6), _router(config)
    first = config.integer("first_k_dense_replace", default=0, minimum=0)
    step = config.integer("moe_layer_freq", default=1)
    sparse = [router["num_experts"] > 0 and i >= first and i % step == 0 for i in range(base["num_layers"])]
    base["sparse"] = sparse
    width = config.integer("moe_intermediate_size") if any(sparse) else 0
    bias = config.flag("attention_bias", False)
    return ModelSpec(
        **base,
        **router,
        names=NAMES,
        moe_intermediate=width,
        shared_intermediate=config.integer("n_shared_experts", default=0, minimum=0) * width,
        dense_intermediate=0 if all(sparse) else config.integer("intermediate_size"),
        # A single expert's weight is not divided by itself.
        norm_topk=config.flag("norm_topk_prob", False) and router["top_k"] > 1,
        routed_scale=config.number("routed_scaling_factor", default=1.0),
        qkv_bias=bias,
        out_bias=bias,
        bos_default=100000,
        eos_default=100001,
    )


def _router(config: Config) -> dict:
    """Without a number of routed experts the model is dense."""
    if config.get("num_experts", "num_local_experts", "n_routed_experts") is None:
        return {"num_experts": 0, "top_k": 0}
    return router_fields(config, minimum=0)
