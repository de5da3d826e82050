#!/usr/bin/env python3
"""What q8 and q4 cost in quality: a model's answers in them against its answers in float32, beside common schemes.

    python tools/quality.py MODEL_DIR TEXT [--dtype q8|q4|both] [--tokens 4096] [--context 512]
        [--f32 FILE --q8 FILE --q4 FILE] [--json]

MODEL_DIR is the Hugging Face folder of a MoE model, TEXT a text file it has not seen in training. The text's first
tokens are cut into contexts; each is computed in these ways:

    torch f32       transformers, the oracle
    colibri f32     the library, f32 file and f32 KV cache: must equal the oracle
    colibri q8      the library, q8 file, default settings (f16 KV cache; 8-bit activations in routed experts, else 16)
    scheme of Q8_0  transformers with weights and activations of the same layers rounded to int8 with one scale, the
                    largest absolute value / 127, for each 32 values: the arithmetic of the well-known type Q8_0
    colibri q4      the library, q4 file, default settings
    scheme of Q4_0  transformers with weights of the same layers rounded to -8 ... 7 with one scale, the value of
                    largest magnitude / -8, for each 32 values, activations as for Q8_0: 4.5 bits a weight (q4: 4.25)
    ..., head f32   the same, but for the output head

Quantised, on both sides: q, k, v and output projections, all MLPs (routed, shared, dense), the output head. Left alone
on both sides: routers, gates of shared experts, norms, biases. The schemes of 32 values are favoured in small things:
their scales are float32 (stored in 16 bits by Q8_0 and Q4_0), their embedding and KV cache stay float32 (colibri: 16
bits).

For each: the mean over tokens of KL(f32 || it) in nats, the 99th percentile, how often the likeliest token is the same,
and the perplexity. KL of colibri is taken against colibri f32, of the schemes against torch f32. The answer is the
ratio of the two mean KLs and the change of perplexity; the exit status is 1 if a ratio is above --max-ratio-q8 or
--max-ratio-q4, or q8 changes the perplexity by more than --max-perplexity-change (per cent).

Needs: torch, transformers, and the colibri package with its library.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[Any]
LogitsOf = Callable[[Array], Array]  # int32 [tokens] -> float32 [tokens][vocab]
GROUP = 32
ROUTERS = ("gate.weight", "router.weight", "shared_expert_gate.weight")  # ends of names of matrices that stay f32


# ---- Figures


def log_softmax(logits: Array) -> Array:
    """float64 [tokens][vocab]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def divergence(reference: Array, other: Array) -> Array:
    """KL(reference || other) in nats for each token, of log probabilities [tokens][vocab]."""
    return (np.exp(reference) * (reference - other)).sum(axis=-1)


def ratio_of_means(a: Array, b: Array) -> tuple[float, float]:
    """mean(a) / mean(b) of paired values and its standard error (delta method; tokens taken as independent)."""
    if not b.mean() > 0:
        return math.nan, math.nan
    ratio = a.mean() / b.mean()
    return float(ratio), float((a - ratio * b).std(ddof=1) / (b.mean() * math.sqrt(len(a))))


def perplexity_change(losses: Array, reference: Array) -> tuple[float, float]:
    """Of the perplexity, in per cent, from losses in nats for each predicted token, and its standard error."""
    difference = losses - reference
    change = math.exp(difference.mean())
    return 100 * (change - 1), 100 * change * float(difference.std(ddof=1)) / math.sqrt(len(difference))


@dataclass
class Tally:
    """What one way of computing gave: one element a token, `losses` one a predicted token."""

    kl: list[Array] = field(default_factory=list)
    same: list[Array] = field(default_factory=list)
    losses: list[Array] = field(default_factory=list)

    def add(self, tokens: Array, reference: Array, log_p: Array) -> None:
        """A context: its tokens [n] and log probabilities [n][vocab] of the reference and of this way."""
        self.kl.append(divergence(reference, log_p))
        self.same.append(reference.argmax(axis=-1) == log_p.argmax(axis=-1))
        self.losses.append(-log_p[np.arange(len(tokens) - 1), tokens[1:]])

    @property
    def perplexity(self) -> float:
        return float(np.exp(np.concatenate(self.losses).mean()))

    def report(self) -> dict[str, float]:
        kl = np.concatenate(self.kl)
        return {
            "mean_kl": float(kl.mean()),
            "mean_kl_error": float(kl.std(ddof=1) / math.sqrt(len(kl))),
            "kl_99": float(np.quantile(kl, 0.99)),
            "same_top1": float(np.concatenate(self.same).mean()),
            "perplexity": self.perplexity,
        }


def contexts(ids: list[int], tokens: int, context: int) -> list[Array]:
    """The first `tokens` ids, rounded down to whole contexts."""
    count = min(tokens, len(ids)) // context
    if not count:
        raise ValueError(f"the text has {len(ids)} tokens, {tokens} were asked for; one context takes {context}")
    return list(np.asarray(ids[: count * context], np.int32).reshape(count, context))


# ---- Groups of 32, in torch


def in_groups(x: Tensor) -> Tensor:
    """x [...][k] as [...][groups][32], zeros at the end."""
    import torch

    return torch.nn.functional.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))


def round_int8(x: Tensor) -> Tensor:
    """x [...][k], each 32 values rounded to int8 times their largest absolute value / 127."""
    groups = in_groups(x)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    rounded = (groups / scale.clamp_min(1e-30)).round().clamp(-127, 127) * scale
    return rounded.flatten(-2)[..., : x.shape[-1]]


def round_4_bits(x: Tensor) -> Tensor:
    """x [...][k], each 32 values rounded to -8 ... 7 times their value of largest magnitude / -8."""
    groups = in_groups(x)
    scale = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    safe = scale.masked_fill(scale == 0, 1)
    rounded = ((groups / safe + 0.5).floor().clamp(-8, 7)) * scale
    return rounded.flatten(-2)[..., : x.shape[-1]]


WEIGHTS = {"q8": round_int8, "q4": round_4_bits}  # by the type of this library that the scheme stands beside
SCHEMES = {"q8": "scheme of Q8_0", "q4": "scheme of Q4_0"}


def matrices(model: Any, head: bool) -> set[int]:
    """Addresses of the matrices to quantise: every 2-D weight of a linear layer, every expert of a stack, no router."""
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    skip = {embedding.data_ptr(), output.data_ptr()}
    found = {output.data_ptr()} if head else set()
    for name, weight in model.named_parameters():
        if name.endswith(ROUTERS) or weight.data_ptr() in skip:
            continue
        found |= {part.data_ptr() for part in (weight if weight.dim() == 3 else [weight]) if part.dim() == 2}
    return found


@contextmanager
def quantised(
    addresses: set[int], cache: dict[int, Tensor], round_weight: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Inside, linear() rounds weights at these addresses, and their inputs to int8. `cache` keeps rounded weights."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function is not torch.nn.functional.linear:
                return function(*args, **kwargs)
            x, weight, bias = (*args, kwargs.get("bias"))[:3]
            if weight.data_ptr() not in addresses:
                return function(*args, **kwargs)
            rounded = cache.get(weight.data_ptr())
            if rounded is None:
                rounded = cache[weight.data_ptr()] = round_weight(weight)
            return function(round_int8(x), rounded, bias)

    with Mode():
        yield


class Oracle:
    """The model in transformers, float32, plain or with rounded linear layers."""

    def __init__(self, folder: Path, threads: int | None) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        if threads:
            torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if hasattr(self._model, "set_experts_implementation"):
            self._model.set_experts_implementation("eager")  # one linear() an expert, which can be rounded
        self._caches: dict[str, dict[int, Any]] = {dtype: {} for dtype in WEIGHTS}

    def plain(self, tokens: Array) -> Array:
        import torch

        with torch.no_grad():
            return self._model(torch.from_numpy(tokens).long()[None]).logits[0].numpy()

    def groups(self, dtype: str, head: bool, tokens: Array) -> Array:
        """By the scheme that stands beside a type."""
        addresses, cache = matrices(self._model, head), self._caches[dtype]
        with quantised(addresses, cache, WEIGHTS[dtype]):
            logits = self.plain(tokens)
        if 2 * len(cache) < len(addresses):  # experts that no token chose are missing rightly
            raise ValueError(
                f"only {len(cache)} of {len(addresses)} matrices went through torch.nn.functional.linear, where "
                "they are rounded; this version of transformers computes this model in another way"
            )
        return logits


def encode(folder: Path, text: str) -> list[int]:
    """The tokenizer's ids, without special tokens."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids


# ---- The measurement


@contextmanager
def engine(path: Path, arguments: argparse.Namespace, **settings: Any) -> Iterator[LogitsOf]:
    """logits_of() of a .colibri file; `settings` are the session's."""
    import colibri

    with colibri.Session(
        str(path), max_seq_len=arguments.context, num_threads=arguments.threads, outputs="all", **settings
    ) as session:

        def logits_of(tokens: Array) -> Array:
            session.reset()
            return session.forward(tokens.tolist())

        yield logits_of


def convert(folder: Path, given: Path | None, dtype: str, scratch: Path) -> Path:
    """The given file, or a new one."""
    import colibri

    if given is not None:
        return given
    say(f"converting to {dtype}")
    target = scratch / f"{dtype}.colibri"
    colibri.convert(folder, target, dtype=dtype)
    return target


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def reference_of(way: str) -> str:
    """What a way of computing is compared with."""
    return "colibri f32" if way.startswith("colibri q") else "torch f32"


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one dictionary for --json."""
    oracle = Oracle(arguments.model, arguments.threads)
    ids = encode(arguments.model, arguments.text.read_text(encoding="utf-8")[: arguments.tokens * 16])
    pieces = contexts(ids, arguments.tokens, arguments.context)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quality-")))
        f32 = convert(arguments.model, arguments.f32, "f32", scratch)
        ways: dict[str, LogitsOf] = {
            "torch f32": oracle.plain,
            "colibri f32": stack.enter_context(engine(f32, arguments, kv_dtype="f32")),
        }
        for dtype in arguments.dtypes:
            path = convert(arguments.model, getattr(arguments, dtype), dtype, scratch)
            settings = {"activation_bits": arguments.activation_bits}
            ways[f"colibri {dtype}"] = stack.enter_context(engine(path, arguments, **settings))
            ways[SCHEMES[dtype]] = partial(oracle.groups, dtype, True)
            ways[f"{SCHEMES[dtype]}, head f32"] = partial(oracle.groups, dtype, False)
        tallies = {name: Tally() for name in ways}
        started = time.monotonic()
        for number, tokens in enumerate(pieces, 1):
            references: dict[str, Array] = {}
            for name, logits_of in ways.items():
                found = log_softmax(logits_of(tokens))
                if name in ("torch f32", "colibri f32"):
                    references[name] = found
                tallies[name].add(tokens, references[reference_of(name)], found)
            say(f"context {number} of {len(pieces)}, {time.monotonic() - started:.0f} s")
    return summary(tallies, len(pieces), arguments)


def compare(tallies: dict[str, Tally], dtype: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A type's two answers, and whether they are good enough."""
    ours, theirs = (np.concatenate(tallies[name].kl) for name in (f"colibri {dtype}", SCHEMES[dtype]))
    ratio, error = ratio_of_means(ours, theirs)
    losses = [np.concatenate(tallies[name].losses) for name in (f"colibri {dtype}", "colibri f32")]
    change, change_error = perplexity_change(*losses)
    passed = ratio <= getattr(arguments, f"max_ratio_{dtype}")
    return {
        "kl_ratio": ratio,
        "kl_ratio_error": error,
        "perplexity_change_percent": change,
        "perplexity_change_error": change_error,
        "passed": bool(passed and (dtype != "q8" or abs(change) <= arguments.max_perplexity_change)),
    }


def summary(tallies: dict[str, Tally], count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures and the questions' answers."""
    answers = {dtype: compare(tallies, dtype, arguments) for dtype in arguments.dtypes}
    return {
        "model": arguments.model.name,
        "text": arguments.text.name,
        "tokens": count * arguments.context,
        "context": arguments.context,
        "activation_bits": arguments.activation_bits or "default",
        "ways": {name: tally.report() for name, tally in tallies.items()},
        "answers": answers,
        "passed": all(answer["passed"] for answer in answers.values()),
    }


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"{result['model']}, {result['text']}: {result['tokens']} tokens in contexts of {result['context']}, "
        f"activation bits: {result['activation_bits']}",
        "",
        f"{'':26}{'mean KL':>10}{'+-':>10}{'99 %':>10}{'same top-1':>12}{'perplexity':>12}",
    ]
    for name, row in result["ways"].items():
        lines.append(
            f"{name:26}{row['mean_kl']:10.6f}{row['mean_kl_error']:10.6f}{row['kl_99']:10.5f}"
            f"{100 * row['same_top1']:10.2f} %{row['perplexity']:12.4f}"
        )
    lines += ["", "quantised on both sides: attention projections, all MLPs, the output head; routers stay f32"]
    for dtype, answer in result["answers"].items():
        lines += [
            f"mean KL, colibri {dtype} / {SCHEMES[dtype]}: {answer['kl_ratio']:.3f} +- {answer['kl_ratio_error']:.3f}",
            f"perplexity, colibri {dtype} against colibri f32: {answer['perplexity_change_percent']:+.3f} % "
            f"+- {answer['perplexity_change_error']:.3f}",
            f"{dtype}: {'passed' if answer['passed'] else 'not passed'}",
        ]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What q8 and q4 cost in quality, beside groups of 32.")
    parser.add_argument("model", type=Path, help="Hugging Face folder of a MoE model, with tokenizer.json")
    parser.add_argument("text", type=Path, help="text, UTF-8")
    parser.add_argument("--dtype", choices=("q8", "q4", "both"), default="both")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=512, help="tokens computed together; no memory goes further")
    parser.add_argument("--f32", type=Path, help="the model's f32 .colibri file, if it is there already")
    parser.add_argument("--q8", type=Path, help="the same of its q8 file")
    parser.add_argument("--q4", type=Path, help="the same of its q4 file")
    parser.add_argument("--activation-bits", type=int, choices=(8, 16), help="of q8 and q4; default: the library's")
    parser.add_argument("--threads", type=int, help="default: as many as the machine has")
    parser.add_argument("--max-ratio-q8", type=float, default=1.15)
    parser.add_argument("--max-ratio-q4", type=float, default=0.85)
    parser.add_argument("--max-perplexity-change", type=float, default=0.5, help="of q8, per cent, either way")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    arguments.dtypes = ("q8", "q4") if arguments.dtype == "both" else (arguments.dtype,)
    if arguments.context < 2 or arguments.tokens < arguments.context:
        parser.error("--context must be at least 2, and --tokens at least --context")
    try:
        import tokenizers  # noqa: F401
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        parser.error(f"{error}; pip install torch transformers")
    try:
        import colibri  # noqa: F401
    except (ImportError, OSError) as error:
        parser.error(f"{error}; pip install the package, or build the library and set PYTHONPATH to python/")
    return arguments


def main() -> int:
    arguments = parse()
    import colibri

    try:
        result = measure(arguments)
    except (OSError, ValueError, colibri.ColibriError) as error:
        say(f"error: {error}")
        return 2
    print(json.dumps(result, indent=2) if arguments.json else table(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
