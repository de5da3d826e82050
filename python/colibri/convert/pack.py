"""Calls the C library's packer: one place where numpy arrays become pointers."""

from __future__ import annotations

import ctypes

import numpy as np

from .. import _ffi
from ..errors import error_for
from .errors import ConversionError
from .layout import ALIGNMENT

SCALE_RULES = {
    "least_squares": _ffi.COLIBRI_SCALE_LEAST_SQUARES,
    "percentile": _ffi.COLIBRI_SCALE_PERCENTILE,
    "max": _ffi.COLIBRI_SCALE_MAX,
}


def aligned_bytes(size: int) -> np.ndarray:
    """uint8 [size], uninitialised, at a 64-byte boundary."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def pack_matrix(
    src: np.ndarray, src_dtype: int, dst: np.ndarray, dst_dtype: int, scale_rule: str, *, block_stride: int = 0,
    scale: np.ndarray | None = None, scale_stride: int = 0,
) -> tuple[float, float]:  # fmt: skip
    """Pack src [rows][k] into the tiles that begin at dst. Types are layout codes.

    block_stride: bytes from one 16-row block to the next, 0 = contiguous. scale: where the row scales of q8 and q4 go,
    scale_stride floats from one block's 16 to the next block's (0 = 16). Returns (squared error, squared norm).
    Releases the GIL.
    """
    rows, k = src.shape
    pack = _ffi.colibri_pack_t.init(
        src_dtype=src_dtype + 1,
        dst_dtype=dst_dtype + 1,
        scale_rule=SCALE_RULES[scale_rule],
        src=src.ctypes.data,
        rows=rows,
        k=k,
        dst=dst.ctypes.data,
        dst_block_stride=block_stride,
        dst_scale=None if scale is None else scale.ctypes.data,
        dst_scale_stride=scale_stride,
    )
    library = _ffi.lib()
    status = library.colibri_pack_matrix(ctypes.byref(pack))
    if status != _ffi.COLIBRI_OK:
        cause = error_for(status, (library.colibri_last_error() or b"").decode("utf-8", "replace"))
        raise ConversionError(str(cause)) from cause
    return pack.squared_error, pack.squared_norm
