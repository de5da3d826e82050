"""Tensor names that Qwen2-MoE, Qwen3-MoE, OLMoE and DeepSeek-MoE share."""

from __future__ import annotations

from .spec import MlpNames, PackedNames

MLP = "model.layers.{layer}.mlp."
ROUTERS = (MLP + "gate.weight",)
EXPERTS = (
    MlpNames(
        MLP + "experts.{expert}.gate_proj.weight",
        MLP + "experts.{expert}.up_proj.weight",
        MLP + "experts.{expert}.down_proj.weight",
    ),
    PackedNames(MLP + "experts.gate_up_proj", MLP + "experts.down_proj"),
)
DENSE = MlpNames(MLP + "gate_proj.weight", MLP + "up_proj.weight", MLP + "down_proj.weight")


def shared(block: str) -> MlpNames:
    """The shared expert under mlp.`block`."""
    return MlpNames(f"{MLP}{block}.gate_proj.weight", f"{MLP}{block}.up_proj.weight", f"{MLP}{block}.down_proj.weight")
