"""Writes a planned file: payload by payload to a temporary name beside the target, header and directory last, then
renames.

Pieces are made by a pool of threads (reading, packing and checksums release the GIL) and written in order, a bounded
number ahead, so memory stays at a few pieces a thread. Whatever goes wrong, the temporary file is removed and the
target is as before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from . import layout
from .errors import ConversionError
from .layout import pad
from .pieces import Made, Piece
from .plan import Payload

Progress = Callable[[int, int], None]


@dataclass
class Written:
    """What was written: bytes of the file, and (squared error, squared norm) by role name."""

    file_bytes: int = 0
    errors: dict[str, list[float]] = field(default_factory=dict)


def find_target(dst: str | os.PathLike[str]) -> Path:
    """The file to write, links followed; what cannot be one is refused before the work."""
    try:
        target = Path(os.path.realpath(dst))
    except ValueError as error:
        raise ConversionError(f"{dst!r} is no name of a file: {error}") from error
    if os.path.isdir(target):
        raise ConversionError(f"{target} is a folder; give the name of a file")
    if not os.path.isdir(target.parent):
        raise ConversionError(f"{target.parent}: no such folder")
    if os.path.exists(target) and not os.path.isfile(target):
        raise ConversionError(f"{target} is a device or a pipe; give the name of a file")
    return target


def write_file(
    target: Path, params: np.ndarray, layers: np.ndarray, header: dict[str, int], payloads: list[Payload], threads: int,
    progress: Progress | None,
) -> Written:  # fmt: skip
    """Write `target`, as find_target gave it. header: the sizes that its fixed header repeats. progress(done, total)
    counts payload bytes.
    """
    name = target.name.encode("utf-8", "replace")[:100].decode("utf-8", "ignore")
    temporary = target.parent / f".{name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"  # two may write one target
    entries, file_size = _lay_out(payloads, len(layers))
    try:
        with open(temporary, "xb", buffering=0) as file:
            _reserve(file.fileno(), file_size)
            written = _write_payloads(file, payloads, entries, threads, progress)
            _write_directory(file, params, layers, header, entries, file_size)
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        _remove(temporary)
        reason = "no space is left on the device" if error.errno == errno.ENOSPC else error.strerror or error
        raise ConversionError(f"{target}: cannot be written ({file_size} bytes): {reason}") from error
    except BaseException:
        _remove(temporary)
        raise
    written.file_bytes = file_size
    return written


def _lay_out(payloads: list[Payload], num_layers: int) -> tuple[np.ndarray, int]:
    """Directory entries with their offsets, and the size of the file."""
    entries = np.zeros(len(payloads), layout.ENTRY)
    at = layout.HEADER.itemsize + layout.PARAMS.itemsize + num_layers * layout.LAYER.itemsize + entries.nbytes
    for entry, payload in zip(entries, payloads, strict=True):
        at = pad(at, payload.alignment)
        for name in ("role", "dtype", "layer", "rows", "k", "count", "size", "stride"):
            entry[name] = getattr(payload, name)
        entry["offset"] = at
        at += payload.size
    return entries, pad(at, layout.ALIGNMENT)


def _write_payloads(
    file, payloads: list[Payload], entries: np.ndarray, threads: int, progress: Progress | None
) -> Written:
    written, done, total = Written(), 0, sum(p.size for p in payloads)
    executor = ThreadPoolExecutor(threads, thread_name_prefix="colibri-convert")
    try:
        stream = _made_in_order(executor, payloads, 2 * threads)
        for index, payload in enumerate(payloads):
            file.seek(int(entries[index]["offset"]))
            checksum, left = 0, payload.size
            sums = written.errors.setdefault(layout.ROLE_NAMES[payload.role], [0.0, 0.0])
            while left:
                made = next(stream)
                checksum = zlib.crc32(made.data, checksum)
                _write_all(file, made.data)
                left -= made.data.nbytes
                sums[0] += made.squared_error
                sums[1] += made.squared_norm
                done += made.data.nbytes
                if progress:
                    progress(done, total)
            assert left == 0, f"{layout.ROLE_NAMES[payload.role]}: the pieces do not add up to the payload"
            entries[index]["checksum"] = checksum
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
    return written


def _made_in_order(executor: ThreadPoolExecutor, payloads: list[Payload], ahead: int) -> Iterator[Made]:
    """The made pieces of all payloads, with up to `ahead` of them in the making."""
    waiting: deque[tuple[Piece, Future | None]] = deque()
    working = 0
    for piece in (piece for payload in payloads for piece in payload.pieces()):
        waiting.append((piece, None if piece.late else executor.submit(piece.make)))
        working += not piece.late
        while working > ahead or len(waiting) > 64 * ahead:
            first, future = waiting.popleft()
            working -= future is not None
            yield first.make() if future is None else future.result()
    while waiting:
        first, future = waiting.popleft()
        yield first.make() if future is None else future.result()


def _write_directory(
    file, params: np.ndarray, layers: np.ndarray, sizes: dict[str, int], entries: np.ndarray, file_size: int
) -> None:
    """Directory and header, with their checksum."""
    directory = params.tobytes() + layers.tobytes() + entries.tobytes()
    header = np.zeros((), layout.HEADER)
    for name, value in sizes.items():
        header[name] = value
    header["magic"], header["version"] = b"COLI", layout.VERSION_FULL
    header["file_size"], header["directory_offset"], header["directory_size"] = (
        file_size,
        header.itemsize,
        len(directory),
    )
    header["num_entries"] = len(entries)
    header["checksum"] = zlib.crc32(directory, zlib.crc32(header.tobytes()))
    file.seek(0)
    _write_all(file, np.frombuffer(header.tobytes() + directory, np.uint8))


def _write_all(file, data: np.ndarray) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += file.write(view[done:])


def _reserve(fd: int, size: int) -> None:
    """Claim the space, so that a full disk is known before the work; where that is not possible, only set the size."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(fd, size)


def _sync_folder(folder: Path) -> None:
    """Make the new name durable; systems that cannot sync folders are left alone."""
    if os.name != "posix":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # it was never made, or the file system is read-only
        path.unlink()
