"""Mixtral: experts in every layer, weights of the chosen experts always divided by their sum, optional sliding
window.
"""

from __future__ import annotations

from .config import Config
from .spec import MlpNames, ModelSpec, Names, PackedNames, base_fields, router_fields, window

_LAYER = "model.layers.{layer}."
NAMES = Names(
    routers=(_LAYER + "block_sparse_moe.gate.weight", _LAYER + "mlp.gate.weight"),
    experts=tuple(
        names
        for block in (_LAYER + "block_sparse_moe.experts.", _LAYER + "mlp.experts.")
        for names in (
            MlpNames(block + "{expert}.w1.weight", block + "{expert}.w3.weight", block + "{expert}.w2.weight"),
            PackedNames(block + "gate_up_proj", block + "down_proj"),
        )
    ),
)


def describe(config: Config) -> ModelSpec:
    """config.json -> ModelSpec."""
    base = base_fields(config, default_eps=1e-5, default_theta=1e6)
    base["windows"] = [window(config)] * base["num_layers"]
    return ModelSpec(
        **base,
        **router_fields(config),
        names=NAMES,
        moe_intermediate=config.integer("intermediate_size"),
        norm_topk=True,
        bos_default=1,
        eos_default=2,
    )
