"""RoPE: the rotation frequencies of a model from its config, in the old spelling (rope_theta, rope_scaling) and the
new (rope_parameters).

Kinds: default, linear, llama3 and yarn become a table of inverse frequencies; dynamic ("NTK") is recomputed by the
engine as the text grows, so only its constants are stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .config import Config
from .errors import ConversionError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """What the file stores. inv_freq is float32 [rotary_dim / 2], None for dynamic."""

    kind: str
    theta: float
    inv_freq: np.ndarray | None
    factor: float = 1.0
    original_max: int = 0
    attention_factor: float = 1.0


def read_rope(config: Config, head_dim: int, max_position: int, default_theta: float) -> Rope:
    """The Rope of a model whose whole heads are rotated."""
    settings = _settings(config)
    if settings.number("partial_rotary_factor", default=None) not in (None, 1.0):
        raise ConversionError(f"{settings.where}: partial_rotary_factor other than 1 is not supported")
    if config.number("partial_rotary_factor", default=None) not in (None, 1.0):
        raise ConversionError(f"{config.where}: partial_rotary_factor other than 1 is not supported")
    kind = settings.get("rope_type")
    kind = settings.get("type", default="default") if kind is None else kind
    if kind not in KINDS:
        raise ConversionError(f"{settings.where}: RoPE type {kind!r} is not supported (only {', '.join(KINDS)})")
    theta = settings.number("rope_theta", default=None)
    theta = config.number("rope_theta", default=default_theta) if theta is None else theta
    if kind == "dynamic":
        return Rope(kind, theta, None, settings.number("factor"), max_position)
    if theta <= 1:
        raise ConversionError(f"{config.where}: rope_theta must be greater than 1, not {theta:g}")
    frequencies = _powers(theta, head_dim)
    inv_freq = np.float32(1.0) / frequencies
    if kind == "linear":
        factor = settings.number("factor")
        return Rope(kind, theta, inv_freq / np.float32(factor), factor)
    if kind == "llama3":
        return _llama3(settings, theta, inv_freq, _original_max(config, settings, max_position))
    if kind == "yarn":
        return _yarn(
            settings, theta, frequencies, head_dim, max_position, _original_max(config, settings, max_position)
        )
    return Rope(kind, theta, inv_freq)


def _settings(config: Config) -> Config:
    """The one RoPE dictionary of the model; dictionaries by layer type must agree."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    value = config.get(name, default={})
    where = f"{config.where}: {name}"
    if not isinstance(value, dict):
        raise ConversionError(f"{where} must be an object, not {value!r}")
    layer_types = config.get("layer_types", default=[])
    nested = {key: v for key, v in value.items() if isinstance(v, dict)}
    if not nested:
        return Config(value, where)
    used = {key: v for key, v in nested.items() if not layer_types or key in layer_types} or nested
    (first, settings), *rest = used.items()
    for key, other in rest:
        if other != settings:
            raise ConversionError(f"{where}: {first} and {key} layers differ; one RoPE for all layers is supported")
    return Config(settings, f"{where}.{first}")


def _original_max(config: Config, settings: Config, max_position: int) -> int:
    """A value beside the RoPE dictionary goes before the one in it."""
    outer = config.integer("original_max_position_embeddings", default=None)
    return outer if outer else settings.integer("original_max_position_embeddings", default=max_position)


def _powers(theta: float, dim: int) -> np.ndarray:
    """theta ** (2 i / dim) in float32. Through float64, so that every machine rounds to the same bits."""
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(np.float32(theta)), exponent.astype(np.float64)).astype(np.float32)


def _llama3(settings: Config, theta: float, inv_freq: np.ndarray, original_max: int) -> Rope:
    """Long wavelengths are divided by the factor, short ones stay, those between are blended."""
    factor = settings.number("factor")
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    if high <= low:
        raise ConversionError(f"{settings.where}: high_freq_factor must be greater than low_freq_factor")
    wavelength = np.float32(2 * math.pi) / inv_freq
    scaled = np.where(wavelength > np.float32(original_max / low), inv_freq / np.float32(factor), inv_freq)
    smooth = (np.float32(original_max) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * scaled / np.float32(factor) + smooth * scaled
    short, long = wavelength < np.float32(original_max / high), wavelength > np.float32(original_max / low)
    return Rope("llama3", theta, np.where(~short & ~long, blended, scaled).astype(np.float32), factor, original_max)


def _yarn(
    settings: Config, theta: float, frequencies: np.ndarray, dim: int, max_position: int, original_max: int
) -> Rope:
    """YaRN (arXiv 2309.00071): a ramp from unscaled to interpolated frequencies, and a factor on cos and sin."""
    factor = settings.number("factor", default=None) or max_position / original_max
    fast, slow = settings.number("beta_fast", default=32.0), settings.number("beta_slow", default=1.0)

    def dimension(rotations: float) -> float:
        return dim * math.log(original_max / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if settings.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    position = np.arange(dim // 2, dtype=np.float32)
    ramp = np.clip((position - np.float32(low)) / np.float32(high - low), np.float32(0), np.float32(1))
    kept = np.float32(1) - ramp
    extrapolated = np.float32(1) / frequencies
    interpolated = np.float32(1) / (np.float32(factor) * frequencies)
    inv_freq = interpolated * (np.float32(1) - kept) + extrapolated * kept
    return Rope("yarn", theta, inv_freq.astype(np.float32), factor, original_max, _yarn_attention(settings, factor))


def _yarn_attention(settings: Config, factor: float) -> float:
    given = settings.number("attention_factor", default=None)
    if given is not None:
        return given

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    # Zero switches these two off, as absence does.
    above, below = settings.get("mscale"), settings.get("mscale_all_dim")
    if above and below:
        return scale(settings.number("mscale")) / scale(settings.number("mscale_all_dim"))
    return scale(1.0)
