"""Packs a matrix by the format's specification, in plain numpy and float64: an oracle for tile layouts, and a stand-in
for the C packer in tests that only care where bytes go. Only the "max" scale rule, whatever rule is asked for.
"""

from __future__ import annotations

import ctypes

import numpy as np
from reference_reader import BF16, F16, F32, LEVELS, Q4, Q8, hadamard, pad


def widen(x: np.ndarray, dtype: int) -> np.ndarray:
    """float32 of f32, f16 or bf16 (uint16) values."""
    return (x.astype(np.uint32) << 16).view(np.float32) if dtype == BF16 else x.astype(np.float32)


def narrow(x: np.ndarray, dtype: int) -> np.ndarray:
    """float32 to f32, f16 or bf16 (uint16), to nearest even."""
    if dtype == BF16:
        bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return x.astype("<f4" if dtype == F32 else "<f2")


def tiles(w: np.ndarray, dtype: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 [rows][k] -> (uint8 [blocks][block bytes], f32 scales [blocks][16])."""
    rows, k = pad(w.shape[0], 16), pad(w.shape[1], 128)
    whole = np.zeros((rows, k), np.float64)
    whole[: w.shape[0], : w.shape[1]] = w
    scale = np.zeros(rows, "<f4")
    if dtype in (Q8, Q4):
        block = min(k & -k, 4096)
        rotated = (whole.reshape(rows, -1, block) @ hadamard(block) / block).reshape(rows, k)
        scale = (np.abs(rotated).max(axis=1) / (127 if dtype == Q8 else 7 * 18)).astype("<f4")
        safe = np.where(scale > 0, scale, 1).astype(np.float64)
        whole = np.clip(np.rint(rotated / safe[:, None]), -127, 127)
        if dtype == Q4:
            return tiles_q4(rotated / safe[:, None]), scale.reshape(-1, 16)
    step = {F32: 1, F16: 2, BF16: 2, Q8: 4}[dtype]
    stored = whole.astype(np.int8) if dtype == Q8 else narrow(whole.astype(np.float32), dtype)
    tiled = stored.reshape(rows // 16, 16, k // step, step).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(tiled).reshape(rows // 16, -1).view(np.uint8), scale.reshape(-1, 16)


def tiles_q4(x: np.ndarray) -> np.ndarray:
    """x [rows][k] in units of the row scales -> uint8 [blocks][block bytes]."""
    rows, k = x.shape
    groups = x.reshape(rows, k // 16, 16)
    best, scales = (groups**2).sum(axis=2), np.zeros((rows, k // 16), np.uint32)
    nibbles = np.zeros(groups.shape, np.uint8)
    for s in range(1, 8):
        found = np.abs(groups[..., None] - s * LEVELS).argmin(axis=-1)
        error = ((groups - s * LEVELS[found]) ** 2).sum(axis=2)
        better = error < best
        best, scales = np.where(better, error, best), np.where(better, s, scales)
        nibbles = np.where(better[..., None], found, nibbles)
    words = (scales.reshape(-1, 8).astype("<u4") << (4 * np.arange(8, dtype=np.uint32))).sum(axis=1).astype("<u4")
    words = words.reshape(rows // 16, 16, k // 128).transpose(0, 2, 1)
    eights = nibbles.reshape(rows // 16, 16, k // 128, 16, 2, 4)
    steps = (eights[..., 0, :] | eights[..., 1, :] << 4).astype(np.uint8).transpose(0, 2, 3, 1, 4)
    pieces = [np.ascontiguousarray(part).view(np.uint8).reshape(rows // 16, k // 128, -1) for part in (words, steps)]
    return np.concatenate(pieces, axis=2).reshape(rows // 16, -1)


def pack_matrix(src, src_dtype, dst, dst_dtype, scale_rule, *, block_stride=0, scale=None, scale_stride=0):
    """The same contract as colibri.convert.pack.pack_matrix."""
    blocks, scales = tiles(widen(src, src_dtype), dst_dtype)
    stride = block_stride or blocks.shape[1]
    for i, block in enumerate(blocks):
        dst[i * stride : i * stride + blocks.shape[1]] = block
        if scale is not None:
            ctypes.memmove(scale.ctypes.data + 4 * i * (scale_stride or 16), scales[i].ctypes.data, 64)
    return 0.0, float(np.sum(widen(src, src_dtype).astype(np.float64) ** 2))
