"""Conversions between f32, f16 and bf16 in numpy. bf16 arrays are uint16 (the upper half of the f32 bits)."""

from __future__ import annotations

import numpy as np

from .layout import BF16, F16, F32

NUMPY_TYPE = {F32: np.dtype("<f4"), F16: np.dtype("<f2"), BF16: np.dtype("<u2")}


def bf16_to_f32(x: np.ndarray) -> np.ndarray:
    """uint16 -> float32, exact."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 -> uint16, nearest even, overflow to infinity; a NaN becomes quiet and keeps its sign."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = ((bits >> np.uint32(16)) & np.uint32(0x8000)) | np.uint32(0x7FC0)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, quiet, rounded).astype(np.uint16)


def f32_to_f16(x: np.ndarray) -> np.ndarray:
    """float32 -> float16, nearest even; overflow gives infinity (the caller checks)."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16)


def to_f32(x: np.ndarray, dtype: int) -> np.ndarray:
    """Any source array to float32, exact."""
    return bf16_to_f32(x) if dtype == BF16 else x.astype(np.float32, copy=False)


def convert(x: np.ndarray, src: int, dst: int) -> np.ndarray:
    """From one storage type to another; the same type is returned as it is, bit for bit."""
    if src == dst:
        return x
    wide = to_f32(x, src)
    return wide if dst == F32 else f32_to_f16(wide) if dst == F16 else f32_to_bf16(wide)


def first_not_finite(x: np.ndarray, dtype: int) -> tuple[int, int] | None:
    """(row, column) of the first NaN or infinity of a 2-D array, or None."""
    finite = (x & 0x7F80) != 0x7F80 if dtype == BF16 else np.isfinite(x)
    if finite.all():
        return None
    row, column = np.unravel_index(int(np.argmin(finite)), x.shape)
    return int(row), int(column)
