"""How fast the disk gives experts: reads of their places in a .colibri file, in random order, by several threads."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import colibri
import numpy as np

ALIGNMENT = 4096  # of O_DIRECT: offsets, sizes, addresses
HUGE_PAGE = 2 << 20


@dataclass(frozen=True)
class Extent:
    """An expert's place in the file."""

    offset: int
    size: int

    def aligned(self, alignment: int) -> Extent:
        """The least place with such bounds that holds it."""
        first = self.offset // alignment * alignment
        return Extent(first, -(-(self.offset + self.size) // alignment) * alignment - first)


def extents(model: colibri.Model) -> list[Extent]:
    """Of all routed experts."""
    found = []
    for tensor in model.tensors():
        if tensor["role"] == "experts":
            stride = tensor["size"] // tensor["count"]
            found += [Extent(tensor["offset"] + i * stride, stride) for i in range(tensor["count"])]
    return found


def drop(path: Path) -> None:
    """Ask the system to forget what it holds of a file. What processes have mapped stays."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


class Disk:
    """A file whose experts are read. `direct` says whether past the page cache."""

    def __init__(self, path: Path, places: list[Extent]) -> None:
        self.path, self.places = path, places
        self.random = random.Random(1)
        self.direct = self._try_direct()

    def _try_direct(self) -> bool:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            return False
        try:
            with mmap.mmap(-1, ALIGNMENT) as buffer:
                return os.preadv(fd, [buffer], 0) == ALIGNMENT
        except OSError:
            return False
        finally:
            os.close(fd)

    def _orders(self, forever: bool) -> Iterator[Extent]:
        """All experts in random order, again and again, or once."""
        for _ in itertools.count() if forever else range(1):
            yield from self.random.sample(self.places, len(self.places))

    def rate(self, depth: int, seconds: float, direct: bool | None = None) -> float:
        """Bytes of experts per second with so many reads at a time, for so long; past the page cache if that can be,
        else each expert once, from a page cache that holds nothing of the file.
        """
        direct = self.direct if direct is None else direct
        if not direct:
            drop(self.path)
        fd = os.open(self.path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            return _Reading(fd, self._orders(direct), max(place.size for place in self.places), depth, seconds).rate()
        finally:
            os.close(fd)


def _buffer(size: int) -> mmap.mmap:
    """Memory for a read, on huge pages where the system gives them: ordinary ones may halve the rate, as the disk then
    gets many small pieces. Its pages are there.
    """
    whole = -(-size // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE
    buffer = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            buffer.madvise(mmap.MADV_HUGEPAGE)
    buffer[:] = bytes(whole)
    return buffer


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


class _Reading:
    """Threads that read one place after another."""

    def __init__(self, fd: int, places: Iterator[Extent], largest: int, depth: int, seconds: float) -> None:
        self.fd, self.places, self.largest, self.seconds = fd, places, largest, seconds
        self.lock, self.barrier = threading.Lock(), threading.Barrier(depth, action=self._begin)
        self.bytes, self.start, self.end = 0, 0.0, 0.0
        self.errors: list[BaseException] = []
        self.threads = [threading.Thread(target=self._run) for _ in range(depth)]

    def rate(self) -> float:
        """Run them."""
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        return self.bytes / (self.end - self.start)

    def _begin(self) -> None:
        self.start = time.perf_counter()

    def _run(self) -> None:
        try:
            with (
                _buffer(self.largest + 2 * ALIGNMENT) as buffer,
                memoryview(buffer) as view,
                view[-_address(view) % HUGE_PAGE :] as aligned,
            ):
                self.barrier.wait()
                while self._one(aligned):
                    pass
        except BaseException as error:
            self.errors.append(error)  # before the others hear of it
            self.barrier.abort()

    def _one(self, view: memoryview) -> bool:
        """Read the next place; False at the end."""
        with self.lock:
            if self.bytes and time.perf_counter() >= self.start + self.seconds:
                return False
            place = next(self.places, None)
        if place is None:
            return False
        whole, got = place.aligned(ALIGNMENT), 0
        while got < place.offset + place.size - whole.offset:  # the file may end within the last block
            with view[got : whole.size] as rest:
                count = os.preadv(self.fd, [rest], whole.offset + got)
            if count == 0:
                raise OSError("the model file has become shorter")
            got += count
        with self.lock:
            self.bytes += place.size
            self.end = time.perf_counter()
        return True
