"""Payloads as sequences of pieces: runs of bytes that can be made independently, a few MiB each, in file order.

A piece is made on a worker thread, then checksummed and written in order. Row scales of q8 and q4 stand after all
blocks of their matrix: their piece is `late`, made once everything before it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from . import layout, numbers, pack
from .errors import ConversionError
from .layout import F16, QUANTISED, TILE_ROWS, pad
from .sources import Source

PIECE_BYTES = 8 * 1024 * 1024


@dataclass
class Made:
    """A finished piece: its bytes, and squared error and norm of the weights in it."""

    data: np.ndarray
    squared_error: float = 0.0
    squared_norm: float = 0.0


@dataclass(frozen=True)
class Piece:
    """`size` bytes that make() gives."""

    size: int
    make: Callable[[], Made]
    late: bool = False


def constant(data: bytes) -> Iterator[Piece]:
    """Bytes as they are."""
    yield Piece(len(data), lambda: Made(np.frombuffer(data, np.uint8)), late=True)


def vector(values: np.ndarray) -> Iterator[Piece]:
    """An f32 vector, padded."""
    out = np.zeros(pad(values.size, layout.TILE_K), "<f4")
    out[: values.size] = values.reshape(-1)
    return constant(out.tobytes())


def vector_of(source: Source) -> Iterator[Piece]:
    """A small tensor, flattened, as an f32 vector."""
    size = layout.vector_bytes(source.rows * source.k)

    def make() -> Made:
        values = source.read(0, source.rows)
        _check_finite(source, 0, values)
        out = np.zeros(size // 4, "<f4")
        out[: values.size] = numbers.to_f32(values, source.dtype).reshape(-1)
        return Made(out.view(np.uint8))

    yield Piece(size, make)


def rows_of(source: Source, dtype: int, stride: int) -> Iterator[Piece]:
    """Row-major rows, `stride` bytes apart (the embedding)."""
    step = max(1, PIECE_BYTES // stride)

    def make(start: int, stop: int) -> Made:
        values = source.read(start, stop)
        _check_finite(source, start, values)
        stored = numbers.convert(values, source.dtype, dtype)
        _check_finite(source, start, stored, dtype)
        out = np.zeros((stop - start, stride), np.uint8)
        row_bytes = stored.shape[1] * stored.itemsize
        out[:, :row_bytes] = np.ascontiguousarray(stored).view(np.uint8).reshape(stop - start, row_bytes)
        return Made(out.reshape(-1))

    for start in range(0, source.rows, step):
        stop = min(start + step, source.rows)
        yield Piece((stop - start) * stride, lambda a=start, b=stop: make(a, b))


def matrix(sources: list[Source], dtype: int, rule: str) -> Iterator[Piece]:
    """A tiled matrix. Several sources of one shape alternate block by block (gate and up)."""
    ways, rows, k = len(sources), sources[0].rows, sources[0].k
    blocks, block = pad(rows, TILE_ROWS) // TILE_ROWS, layout.block_bytes(dtype, k)
    scales = np.zeros((blocks, ways, TILE_ROWS), "<f4")
    step = max(1, PIECE_BYTES // max(ways * block, 2 * TILE_ROWS * k))

    def make(first: int, last: int) -> Made:
        made = Made(pack.aligned_bytes((last - first) * ways * block))
        start, stop = first * TILE_ROWS, min(last * TILE_ROWS, rows)
        for way, source in enumerate(sources):
            values = source.read(start, stop)
            try:
                error, norm = pack.pack_matrix(
                    values, source.dtype, made.data[way * block :], dtype, rule, block_stride=ways * block,
                    scale=scales[first:, way] if dtype in QUANTISED else None, scale_stride=ways * TILE_ROWS,
                )  # fmt: skip
            except ConversionError as cause:
                _check_finite(source, start, values)
                if dtype == F16:
                    _check_finite(source, start, numbers.convert(values, source.dtype, F16), F16)
                name, row, _ = source.locate(start, 0)
                raise ConversionError(f'tensor "{name}", rows from {row} on: {cause}') from cause
            made.squared_error += error
            made.squared_norm += norm
        return made

    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        yield Piece((last - first) * ways * block, lambda a=first, b=last: make(a, b))
    if dtype in QUANTISED:
        yield Piece(scales.nbytes, lambda: Made(scales.reshape(-1).view(np.uint8)), late=True)


def mlp(gate: Source, up: Source, down: Source, dtype: int, rule: str) -> Iterator[Piece]:
    """A gated MLP: gate and up in alternating blocks, then down."""
    yield from matrix([gate, up], dtype, rule)
    yield from matrix([down], dtype, rule)


def experts(parts: list[tuple[Source, Source, Source]], dtype: int, rule: str, stride: int) -> Iterator[Piece]:
    """A layer's experts, `stride` bytes apart."""
    for gate, up, down in parts:
        yield from mlp(gate, up, down, dtype, rule)
        gap = stride - layout.mlp_bytes(dtype, gate.rows, gate.k)
        if gap:
            yield from constant(bytes(gap))


def _check_finite(source: Source, start: int, values: np.ndarray, stored: int | None = None) -> None:
    """NaN or infinity in a source's values, or in what they became when stored, is an error naming the place."""
    found = numbers.first_not_finite(values, source.dtype if stored is None else stored)
    if found:
        name, row, column = source.locate(start + found[0], found[1])
        what = "is NaN or infinite" if stored is None else f"does not fit {layout.DTYPE_NAMES[stored]}"
        raise ConversionError(f'tensor "{name}": the value at row {row}, column {column} {what}')
