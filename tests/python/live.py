"""Logits of the public implementations: transformers in float32 with eager attention, and deepseek_reference.py."""

from __future__ import annotations

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
        rows, past = [], None
        for token in ids:
            result = model(torch.tensor([[token]]), past_key_values=past, use_cache=True)
            past = result.past_key_values
            rows.append(result.logits[0])
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
