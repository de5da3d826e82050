"""Finding and loading the shared library that is shipped in this folder.

``COLIBRI_LIBRARY`` in the environment names another one, for developers. Only :mod:`colibri._ffi` uses this module.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from .errors import ColibriError


def library_name() -> str:
    """The file name of the shared library on this system."""
    if sys.platform == "win32":
        return "colibri.dll"
    return "libcolibri.dylib" if sys.platform == "darwin" else "libcolibri.so"


def library_path() -> Path:
    """Where the shared library is, or should be."""
    override = os.environ.get("COLIBRI_LIBRARY")
    return Path(override) if override else Path(__file__).resolve().parent / library_name()


def load() -> ctypes.CDLL:
    """Load the shared library. Raises ColibriError with the way to build it if it is absent or cannot be loaded."""
    path = library_path()
    if not path.is_file():
        raise ColibriError(
            f"the shared library {path} is missing; build it with 'pip install .' in the source folder, "
            f"or with 'python -m ziglang build' and a copy of zig-out/lib/{library_name()} to that place"
        )
    try:
        return ctypes.CDLL(str(path))
    except OSError as exc:
        raise ColibriError(f"the shared library {path} cannot be loaded: {exc}") from None
