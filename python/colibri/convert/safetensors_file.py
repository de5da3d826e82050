"""One safetensors file: a strict check of its header, and reads of byte ranges.

Files are untrusted: every number of the header is checked against the file's size before anything is read, and reads
go through pread, so a file that shrinks meanwhile gives an error and not a crash.
"""

from __future__ import annotations

import math
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ConversionError
from .json_file import parse_json

MAX_HEADER = 100_000_000
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file: `start` and `end` are byte offsets from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    file: SafetensorsFile


class SafetensorsFile:
    """An open safetensors file with a checked header. `tensors` maps names to TensorInfo. Reads are thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise ConversionError(f"{path}: cannot be opened: {error.strerror or error}") from error
        try:
            self.tensors = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file; later reads fail."""
        self._file.close()

    def read_into(self, buffer: np.ndarray, offset: int) -> None:
        """Fill a contiguous uint8 array from a byte offset."""
        view, done = memoryview(buffer), 0
        try:
            while done < len(view):
                n = self._read_some(view[done:], offset + done)
                if n == 0:
                    raise ConversionError(
                        f"{self.path}: the file ended at byte {offset + done}; it changed while it was read"
                    )
                done += n
        except OSError as error:
            raise ConversionError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def _read_some(self, view: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [view], offset)
        with self._lock:
            self._file.seek(offset)
            return self._file.readinto(view) or 0

    def _read_header(self) -> dict[str, TensorInfo]:
        size = os.fstat(self._file.fileno()).st_size
        if size < 8:
            raise ConversionError(f"{self.path}: {size} bytes are too few for a safetensors file")
        prefix = np.empty(8, np.uint8)
        self.read_into(prefix, 0)
        length = int.from_bytes(prefix.tobytes(), "little")
        if length > MAX_HEADER or length > size - 8:
            raise ConversionError(f"{self.path}: the header claims {length} bytes, the file has {size}")
        text = np.empty(length, np.uint8)
        self.read_into(text, 8)
        header = parse_json(text.tobytes(), f"{self.path}: safetensors header", unique_keys=True)
        header.pop("__metadata__", None)
        tensors = {name: self._tensor(name, entry, 8 + length, size) for name, entry in header.items()}
        self._check_coverage(tensors, 8 + length, size)
        return tensors

    def _tensor(self, name: str, entry: Any, base: int, size: int) -> TensorInfo:
        where = f'{self.path}: tensor "{name}"'
        if not isinstance(entry, dict):
            raise ConversionError(f"{where} is not described by an object")
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise ConversionError(f"{where} has the unknown dtype {dtype!r}")
        if not isinstance(shape, list) or not all(_is_count(n) for n in shape):
            raise ConversionError(f"{where} has the bad shape {shape!r}")
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
            raise ConversionError(f"{where} has the bad data_offsets {offsets!r}")
        start, end = offsets
        if start > end or end > size - base:
            raise ConversionError(f"{where} lies at [{start}, {end}], outside the {size - base} bytes of data")
        if math.prod(shape) * ITEM_BYTES[dtype] != end - start:
            raise ConversionError(f"{where} of shape {shape} and type {dtype} does not fit its {end - start} bytes")
        return TensorInfo(name, dtype, tuple(shape), base + start, base + end, self)

    def _check_coverage(self, tensors: dict[str, TensorInfo], base: int, size: int) -> None:
        at = base
        for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.end)):
            if tensor.start != at:
                kind = "overlaps another" if tensor.start < at else f"leaves {tensor.start - at} bytes unused before it"
                raise ConversionError(f'{self.path}: tensor "{tensor.name}" {kind}')
            at = tensor.end
        if at != size:
            raise ConversionError(f"{self.path}: {size - at} bytes follow the last tensor")


def _is_count(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 63
