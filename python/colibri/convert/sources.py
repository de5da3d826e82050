"""Views of checkpoint tensors as 2-D arrays of rows, read on demand: slices, heads padded to 16, several stacked.

A source has `rows`, `k`, `dtype` (layout.F32, F16 or BF16), read(start, stop) -> contiguous [stop - start][k] (bf16 as
uint16), and locate(row, column) for messages: the tensor's name, row and column there. Sources hold no data, and reads
are thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .layout import F32
from .numbers import NUMPY_TYPE, to_f32
from .safetensors_file import TensorInfo


class Source(Protocol):
    """See the module's text."""

    rows: int
    k: int
    dtype: int

    def read(self, start: int, stop: int) -> np.ndarray: ...

    def locate(self, row: int, column: int) -> tuple[str, int, int]: ...


class TensorRows:
    """A tensor as it lies in its file; all dimensions but the last are rows. A vector is one row."""

    def __init__(self, info: TensorInfo, dtype: int, first: int = 0, rows: int | None = None) -> None:
        self.info, self.dtype, self._first = info, dtype, first
        self.k = info.shape[-1] if info.shape else 1
        whole = int(np.prod(info.shape[:-1], dtype=object)) if len(info.shape) > 1 else 1
        self.rows = whole - first if rows is None else rows

    def slice(self, first: int, rows: int) -> TensorRows:
        """`rows` rows from row `first` on."""
        return TensorRows(self.info, self.dtype, self._first + first, rows)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start ... stop - 1."""
        out = np.empty((stop - start, self.k), NUMPY_TYPE[self.dtype])
        row_bytes = self.k * out.itemsize
        if out.size:
            self.info.file.read_into(
                out.reshape(-1).view(np.uint8), self.info.start + (self._first + start) * row_bytes
            )
        return out

    def locate(self, row: int, column: int) -> tuple[str, int, int]:
        """(tensor name, row and column in that tensor)."""
        return self.info.name, self._first + row, column


class PaddedHeadRows:
    """Rows grouped in heads, each head padded with zero rows: [heads * head_dim][k] seen as [heads * padded][k]."""

    def __init__(self, source: Source, head_dim: int, padded: int) -> None:
        self._source, self._head_dim, self._padded = source, head_dim, padded
        self.rows, self.k, self.dtype = source.rows // head_dim * padded, source.k, source.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start ... stop - 1, zeros where the source has none."""
        out = np.zeros((stop - start, self.k), NUMPY_TYPE[self.dtype])
        for head in range(start // self._padded, -(-stop // self._padded)):
            top = head * self._padded
            first, last = max(start - top, 0), min(stop - top, self._head_dim)
            if first < last:
                base = head * self._head_dim
                out[top + first - start : top + last - start] = self._source.read(base + first, base + last)
        return out

    def locate(self, row: int, column: int) -> tuple[str, int, int]:
        """(tensor name, row and column in that tensor)."""
        head, inner = divmod(row, self._padded)
        return self._source.locate(head * self._head_dim + min(inner, self._head_dim - 1), column)


class PaddedHeadColumns:
    """Columns grouped in heads, padded with zeros: [rows][heads * head_dim] seen as [rows][heads * padded]."""

    def __init__(self, source: Source, head_dim: int, padded: int) -> None:
        self._source, self._head_dim, self._padded = source, head_dim, padded
        self.rows, self.k, self.dtype = source.rows, source.k // head_dim * padded, source.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start ... stop - 1."""
        if self._padded == self._head_dim:
            return self._source.read(start, stop)
        heads = self._source.k // self._head_dim
        out = np.zeros((stop - start, heads, self._padded), NUMPY_TYPE[self.dtype])
        out[:, :, : self._head_dim] = self._source.read(start, stop).reshape(stop - start, heads, self._head_dim)
        return out.reshape(stop - start, self.k)

    def locate(self, row: int, column: int) -> tuple[str, int, int]:
        """(tensor name, row and column in that tensor)."""
        head, inner = divmod(column, self._padded)
        return self._source.locate(row, head * self._head_dim + min(inner, self._head_dim - 1))


class Stack:
    """Sources of the same k below each other; of different types they are read as f32."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self.rows, self.k = sum(s.rows for s in sources), sources[0].k
        self.dtype = sources[0].dtype if len({s.dtype for s in sources}) == 1 else F32

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start ... stop - 1."""
        out, top = np.empty((stop - start, self.k), NUMPY_TYPE[self.dtype]), 0
        for source in self._sources:
            first, last = max(start - top, 0), min(stop - top, source.rows)
            if first < last:
                part = source.read(first, last)
                out[top + first - start : top + last - start] = (
                    part if source.dtype == self.dtype else to_f32(part, source.dtype)
                )
            top += source.rows
        return out

    def locate(self, row: int, column: int) -> tuple[str, int, int]:
        """(tensor name, row and column in that tensor)."""
        for source in self._sources:
            if row < source.rows:
                return source.locate(row, column)
            row -= source.rows
        raise IndexError(row)
