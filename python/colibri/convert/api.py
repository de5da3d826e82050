"""colibri.convert: the whole conversion, as a story."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .._ffi import COLIBRI_VERSION_STRING
from . import layout, texts
from .checkpoint import DTYPES as SOURCE_TYPES
from .checkpoint import Checkpoint
from .errors import ConversionError
from .families import describe
from .pack import SCALE_RULES
from .plan import Payload, Planner, text_payload
from .spec import ModelSpec
from .writer import Progress, find_target, write_file

DTYPES = ("f32", "f16", "bf16", "q8", "q4")


@dataclass
class ConversionSummary:
    """What a conversion did. `errors` holds, by role, |stored - weight| / |weight| (root mean square), 0 for exact
    copies.
    """

    source: str
    path: str
    model_type: str
    source_dtype: str
    dtype: str
    other_dtype: str
    tensors: int
    parameters: int
    source_bytes: int
    file_bytes: int
    seconds: float
    has_tokenizer: bool
    has_chat_template: bool
    errors: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def convert(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], dtype: str = "q8", *, other_dtype: str | None = None,
    scale_rule: str = "least_squares", num_threads: int | None = None, progress: Progress | None = None,
) -> ConversionSummary:  # fmt: skip
    """Convert the Hugging Face checkpoint in folder `src` (or a Hub name, if huggingface_hub is installed) to the
    file `dst`.

    dtype: "q8" (default), "q4", "f32", "f16", "bf16", or "source" for the checkpoint's own type. other_dtype: the same
    for everything but the routed experts (attention, shared experts, dense layers, head); None for dtype. The
    embedding has other_dtype too, but 16 bits instead of q8 and q4. scale_rule of q8 and q4: "least_squares",
    "percentile" or "max". num_threads: None for the processors this process may use. progress(done, total) is called
    with bytes of the new file. An existing `dst` is replaced only once the new file is complete; on any failure it is
    left alone and nothing else stays behind. Raises ConversionError with a sentence.
    """
    started = time.monotonic()
    _check_arguments(dtype, other_dtype, scale_rule, num_threads)
    folder, target = find_folder(src), find_target(dst)
    with Checkpoint(folder) as checkpoint:
        spec = describe(checkpoint.config)
        source_dtype = _source_dtype(checkpoint)
        dtype = source_dtype if dtype == "source" else dtype
        other = source_dtype if other_dtype == "source" else other_dtype or dtype
        code = layout.DTYPE_CODES[dtype]
        payloads = Planner(spec, checkpoint, code, layout.DTYPE_CODES[other], scale_rule).run()
        tokens = texts.special_tokens(checkpoint, spec)
        extra = _text_payloads(checkpoint, spec, (dtype, other), source_dtype, scale_rule)
        _refuse_source(checkpoint, target)
        written = write_file(
            target, _params(spec, tokens), _layers(spec), _header(spec, code), payloads + extra,
            num_threads or _processors(), progress,
        )  # fmt: skip
        roles = {p.role for p in extra}
        return ConversionSummary(
            source=str(folder),
            path=os.fspath(dst),
            model_type=spec.model_type,
            source_dtype=source_dtype,
            dtype=dtype,
            other_dtype=other,
            tensors=len(checkpoint.taken),
            parameters=sum(math.prod(t.shape) for t in checkpoint.taken),
            source_bytes=sum(t.end - t.start for t in checkpoint.taken),
            file_bytes=written.file_bytes,
            seconds=time.monotonic() - started,
            has_tokenizer=layout.TOKENIZER in roles,
            has_chat_template=layout.CHAT_TEMPLATE in roles,
            errors={role: math.sqrt(e / n) for role, (e, n) in written.errors.items() if n > 0},
            warnings=checkpoint.warnings,
        )


def find_folder(src: str | os.PathLike[str]) -> Path:
    """The folder of a checkpoint; a Hub name ("owner/model") is downloaded if huggingface_hub is installed."""
    path = Path(src)
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise ConversionError(f"{path} is a file; give the folder that holds config.json and the safetensors files")
    name = os.fspath(src)
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise ConversionError(f"{path}: no such folder")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConversionError(
            f"{name} is no folder here; to fetch it from the Hugging Face Hub, pip install huggingface_hub, "
            "or download it yourself and give the folder"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]))
    except Exception as error:
        raise ConversionError(
            f"{name} is no folder here and cannot be fetched from the Hugging Face Hub: {error}"
        ) from error


def format_summary(summary: ConversionSummary) -> str:
    """A few lines for people."""
    yes = {True: "yes", False: "no"}
    errors = "  ".join(f"{role} {error:.2%}" for role, error in summary.errors.items() if error > 0)
    dtype = summary.dtype + ("" if summary.other_dtype == summary.dtype else f" experts, else {summary.other_dtype}")
    lines = [
        f"{summary.path}: {summary.model_type}, {dtype}, {_size(summary.file_bytes)}",
        f"  from {summary.source} ({summary.source_dtype}, {_size(summary.source_bytes)})",
        f"  {summary.tensors} tensors, {summary.parameters / 1e6:,.1f} million parameters, {summary.seconds:.1f} s",
        f"  tokenizer: {yes[summary.has_tokenizer]}, chat template: {yes[summary.has_chat_template]}",
        f"  relative error of the stored weights: {errors or 'none'}",
    ]
    return "\n".join(lines + [f"  warning: {text}" for text in summary.warnings])


def _size(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


def _check_arguments(dtype: str, other_dtype: str | None, scale_rule: str, num_threads: int | None) -> None:
    for name, value in (("dtype", dtype), ("other_dtype", other_dtype)):
        if value not in (*DTYPES, "source") and (name == "dtype" or value is not None):
            raise ConversionError(f"{name} {value!r} is unknown; use one of {', '.join(DTYPES)}, or 'source'")
    if scale_rule not in SCALE_RULES:
        raise ConversionError(f"scale_rule {scale_rule!r} is unknown; use one of {', '.join(SCALE_RULES)}")
    if num_threads is not None and not 1 <= num_threads <= 256:
        raise ConversionError(f"num_threads must be 1 ... 256, not {num_threads}")


def _refuse_source(checkpoint: Checkpoint, target: Path) -> None:
    """Writing over the checkpoint's own files would destroy what is being read."""
    for path in checkpoint.parts():
        if os.path.exists(target) and os.path.exists(path) and os.path.samefile(path, target):
            raise ConversionError(f"{target} is part of the checkpoint; give another name")


def _text_payloads(
    checkpoint: Checkpoint, spec: ModelSpec, dtypes: tuple[str, str], source_dtype: str, scale_rule: str
) -> list[Payload]:
    from .tokenizer import build_tokenizer

    about: dict[str, object] = {
        "source": os.path.basename(os.path.abspath(checkpoint.folder)),
        "model_type": spec.model_type,
        "source_dtype": source_dtype,
        "dtype": dtypes[0],
        "converter": f"colibri {COLIBRI_VERSION_STRING}",
    }
    if dtypes[1] != dtypes[0]:
        about["other_dtype"] = dtypes[1]
    if any(layout.DTYPE_CODES[name] in layout.QUANTISED for name in dtypes):
        about["scale_rule"] = scale_rule
    template = texts.chat_template(checkpoint)
    if template:
        about["template_tokens"] = texts.template_tokens(checkpoint)
    found = {
        layout.TOKENIZER: build_tokenizer(checkpoint.folder, spec.vocab_size),
        layout.CHAT_TEMPLATE: template,
        layout.METADATA: texts.metadata(**about),
    }
    return [text_payload(role, data) for role, data in found.items() if data]


def _source_dtype(checkpoint: Checkpoint) -> str:
    """The type that holds most of the checkpoint's bytes."""
    sums = dict.fromkeys(SOURCE_TYPES, 0)
    for tensor in checkpoint.tensors.values():
        if tensor.dtype in sums:
            sums[tensor.dtype] += tensor.end - tensor.start
    return layout.DTYPE_NAMES[SOURCE_TYPES[max(sums, key=lambda name: sums[name])]]


def _processors() -> int:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, 32)


def _header(spec: ModelSpec, dtype: int) -> dict[str, int]:
    return {
        "num_layers": spec.num_layers,
        "num_experts": _experts(spec),
        "top_k": spec.top_k if _experts(spec) else 0,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.moe_intermediate if _experts(spec) else 0,
        "dtype": dtype,
    }


def _experts(spec: ModelSpec) -> int:
    """A model whose layers are all dense has no experts, whatever its config says."""
    return spec.num_experts if any(spec.sparse) else 0


def _layers(spec: ModelSpec) -> np.ndarray:
    layers = np.zeros(spec.num_layers, layout.LAYER)
    layers["kind"] = [layout.LAYER_MOE if sparse else layout.LAYER_DENSE for sparse in spec.sparse]
    layers["window"] = spec.windows
    return layers


def _params(spec: ModelSpec, tokens: dict) -> np.ndarray:
    params = np.zeros((), layout.PARAMS)
    rope, has_experts = spec.rope, _experts(spec) > 0
    values = {
        "params_size": params.itemsize,
        "params_version": layout.PARAMS_VERSION,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_layers": spec.num_layers,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rotary_dim": spec.head_dim,
        "max_position": spec.max_position,
        "qk_norm": spec.qk_norm,
        "rope_kind": layout.ROPE_DYNAMIC if rope.kind == "dynamic" else layout.ROPE_TABLE,
        "rope_original_max": rope.original_max if rope.kind == "dynamic" else 0,
        "router_kind": layout.ROUTER_SOFTMAX,
        "norm_topk": spec.norm_topk and has_experts,
        "num_experts": _experts(spec),
        "top_k": spec.top_k if has_experts else 0,
        "moe_intermediate": spec.moe_intermediate if has_experts else 0,
        "shared_intermediate": spec.shared_intermediate,
        "shared_gate": spec.shared_gate,
        "dense_intermediate": spec.dense_intermediate,
        "tied_embeddings": spec.tied,
        "bos_token": tokens["bos"],
        "num_eos": len(tokens["eos"]),
        "pad_token": tokens["pad"],
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": rope.theta,
        "rope_factor": rope.factor,
        "rope_attention_factor": rope.attention_factor,
        "clip_qkv": spec.clip_qkv,
        "attention_scale": spec.head_dim**-0.5,
        "routed_scale": spec.routed_scale,
        "embedding_scale": 1.0,
        "residual_scale": 1.0,
        "logit_scale": 1.0,
        "model_type": spec.model_type.encode()[:31],
    }
    for name, value in values.items():
        params[name] = value
    params["eos_token"][: len(tokens["eos"])] = tokens["eos"]
    return params
