"""Lifetime of C objects: safe against use after close, and against close while another thread is inside a call.

A :class:`Handle` holds the pointer of a ``colibri_model_t`` or ``colibri_t``. Its owner frees it by ``close`` or, if it
never does, by ``weakref.finalize(owner, handle.close)``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .errors import StateError


class Handle:
    """A C pointer with a count of the calls that are inside it; the last one out frees it once it is closed."""

    def __init__(self, pointer: int, destroy: Callable[[int], None], noun: str) -> None:
        self._pointer = pointer
        self._destroy = destroy
        self._noun = noun
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False
        self._process = os.getpid()

    @property
    def closed(self) -> bool:
        """True once closed, though calls that began before may still be running."""
        return self._closed

    @contextmanager
    def use(self) -> Iterator[int]:
        """The pointer, valid inside the ``with`` block. Raises StateError if closed."""
        with self._lock:
            if self._closed:
                raise StateError(f"the {self._noun} is closed")
            self._users += 1
        try:
            yield self._pointer
        finally:
            with self._lock:
                self._users -= 1
                last = self._closed and self._users == 0
            if last:
                self._free()

    def close(self) -> None:
        """Free the object, now or when the last running call returns. Further calls do nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            free_now = self._users == 0
        if free_now:
            self._free()

    def _free(self) -> None:
        # A forked child has none of its parent's threads, so nothing there can be stopped; its memory goes at its exit.
        if self._process == os.getpid():
            self._destroy(self._pointer)
