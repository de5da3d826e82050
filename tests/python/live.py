"""Logits of the public implementations: transformers in float32 with eager attention, and deepseek_reference.py."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import tiny


def reference_logits(folder: Path, config: dict[str, Any], ids: list[int], *, one_by_one: bool = False) -> np.ndarray:
    """float32 [len(ids)][vocab]. one_by_one: fed token by token through a cache (dynamic RoPE depends on that)."""
    import torch

    torch.manual_seed(0)
    if config["model_type"] == "deepseek":
        import deepseek_reference

        tensors = {n: torch.from_numpy(t) for n, t in tiny.weights(config).items()}
        return deepseek_reference.logits(config, tensors, ids).numpy()
    model = load(folder)
    with torch.no_grad():
        if not one_by_one:
            return model(torch.tensor([ids])).logits[0].numpy()
        from transformers import DynamicCache

        argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        cache = {argument: DynamicCache(config=model.config)}  # filled in place
        rows = [model(torch.tensor([[token]]), use_cache=True, **cache).logits[0] for token in ids]
        return torch.cat(rows).numpy()


def load(folder: Path) -> Any:
    """The transformers model; every tensor of the folder must have found its place."""
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[problem], f"{problem}: {info[problem]}"
    return model.eval()
