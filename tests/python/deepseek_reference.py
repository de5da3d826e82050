"""DeepSeek-MoE V1 in plain torch, from the architecture's published definition (arXiv 2401.06066 and the public model's
configuration): the oracle for a family that transformers has no class for.

Llama-style attention (half-split RoPE). A sparse layer adds the shared experts (one MLP of n_shared_experts times the
width) to the routed ones, whose weights are the softmax over all experts at the chosen ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def logits(config: dict[str, Any], tensors: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """float32 [len(ids)][vocab]."""
    x = tensors["model.embed_tokens.weight"][ids]
    cos, sin = _rope(config, len(ids))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        get = {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}
        x = x + _attention(config, get, _norm(config, x, get["input_layernorm.weight"]), cos, sin)
        normed = _norm(config, x, get["post_attention_layernorm.weight"])
        sparse = layer >= config["first_k_dense_replace"] and layer % config["moe_layer_freq"] == 0
        x = x + (_moe(config, get, normed) if sparse else _mlp(get, "mlp.", normed))
    x = _norm(config, x, tensors["model.norm.weight"])
    return x @ tensors["lm_head.weight"].T


def _norm(config: dict[str, Any], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]))


def _rope(config: dict[str, Any], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    dim = config["hidden_size"] // config["num_attention_heads"]
    inv_freq = 1.0 / (config["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim))
    scaling = config.get("rope_scaling") or {"type": "default"}
    assert scaling["type"] in ("default", "linear")
    positions = torch.arange(length).float() / scaling.get("factor", 1.0)
    angles = torch.outer(positions, inv_freq)
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


def _attention(
    config: dict[str, Any], get: dict, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    dim, n = config["hidden_size"] // heads, len(x)

    def project(name: str, count: int) -> torch.Tensor:
        y = F.linear(x, get[f"self_attn.{name}.weight"], get.get(f"self_attn.{name}.bias"))
        return y.view(n, count, dim).transpose(0, 1)

    def rotate(y: torch.Tensor) -> torch.Tensor:
        first, second = y.chunk(2, -1)
        return y * cos + torch.cat([-second, first], -1) * sin

    q, k, v = rotate(project("q_proj", heads)), rotate(project("k_proj", kv)), project("v_proj", kv)
    k, v = k.repeat_interleave(heads // kv, 0), v.repeat_interleave(heads // kv, 0)
    scores = q @ k.transpose(1, 2) / dim**0.5 + torch.full((n, n), float("-inf")).triu(1)
    out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, heads * dim)
    return F.linear(out, get["self_attn.o_proj.weight"], get.get("self_attn.o_proj.bias"))


def _mlp(get: dict, prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (get[f"{prefix}{n}_proj.weight"] for n in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _moe(config: dict[str, Any], get: dict, x: torch.Tensor) -> torch.Tensor:
    probabilities = (x @ get["mlp.gate.weight"].T).softmax(-1)
    weights, chosen = probabilities.topk(config["num_experts_per_tok"], -1)
    if config["num_experts_per_tok"] > 1 and config["norm_topk_prob"]:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    out = _mlp(get, "mlp.shared_experts.", x) if config["n_shared_experts"] else torch.zeros_like(x)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            out[token] += weight * _mlp(get, f"mlp.experts.{expert}.", x[token])
    return out
