"""Sampling settings: checked values on their way to ``colibri_sampling_t``."""

from __future__ import annotations

import math
import operator
from typing import Any

from . import _ffi
from .errors import InvalidArgumentError


def as_int(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an integer in low … high, else InvalidArgumentError naming `name`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{name} must be an integer, not {value!r}") from None
    if not low <= number <= high:
        raise InvalidArgumentError(f"{name} is {number}; it must be between {low} and {high}")
    return number


def as_float(name: str, value: Any, low: float, high: float) -> float:
    """`value` as a finite float in low … high, else InvalidArgumentError naming `name`."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"{name} must be a number, not {value!r}") from None
    if not (math.isfinite(number) and low <= number <= high):
        limit = f"between {low:g} and {high:g}" if math.isfinite(high) else f"a finite number, {low:g} or more"
        raise InvalidArgumentError(f"{name} is {number:g}; it must be {limit}")
    return number


def sampling(
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
) -> Any:
    """A ``colibri_sampling_t``. Order of the steps: penalty, temperature, top-k, top-p, min-p, draw.

    Args:
        temperature: 0 is greedy (ties to the lowest id), else logits are divided by it.
        top_k: keep the k most likely tokens; 0: all.
        top_p: keep the smallest set of tokens with at least this probability; 0 or 1: all.
        min_p: drop tokens less likely than this share of the most likely one; 0: none.
        repetition_penalty: of tokens already in the sequence; 0 or 1: none.
        seed: draws depend on it and the position alone.

    Raises:
        InvalidArgumentError: a value out of range.
    """
    return _ffi.colibri_sampling_t.init(
        temperature=as_float("temperature", temperature, 0.0, math.inf),
        top_k=as_int("top_k", top_k, 0, 2**31 - 1),
        top_p=as_float("top_p", top_p, 0.0, 1.0),
        min_p=as_float("min_p", min_p, 0.0, 1.0),
        repetition_penalty=as_float("repetition_penalty", repetition_penalty, 0.0, math.inf),
        seed=as_int("seed", seed, 0, 2**64 - 1),
    )
