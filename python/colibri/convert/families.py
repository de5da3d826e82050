"""The model types that can be converted."""

from __future__ import annotations

from collections.abc import Callable

from . import deepseek, mixtral, olmoe, qwen2_moe, qwen3_moe
from .config import Config
from .errors import ConversionError
from .spec import ModelSpec, check_limits

FAMILIES: dict[str, Callable[[Config], ModelSpec]] = {
    "mixtral": mixtral.describe,
    "qwen2_moe": qwen2_moe.describe,
    "qwen3_moe": qwen3_moe.describe,
    "olmoe": olmoe.describe,
    "deepseek": deepseek.describe,
}


def describe(config: Config) -> ModelSpec:
    """The ModelSpec of a config; an unknown model_type is an error that lists the known ones."""
    model_type = config.text("model_type")
    if model_type not in FAMILIES:
        raise ConversionError(
            f"{config.where}: model_type {model_type!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    spec = FAMILIES[model_type](config)
    check_limits(spec)
    return spec
