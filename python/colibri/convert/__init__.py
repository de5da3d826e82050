"""Converts a Hugging Face checkpoint into a .colibri file.

The way of the data: folder -> `checkpoint` (config, index, checked tensors) -> `families` (config.json becomes a
ModelSpec) -> `plan` (every tensor finds its payload, every byte its place) -> `pieces` (read, pad, pack on worker
threads) -> `writer` (in order, checksummed, atomic).
"""

from __future__ import annotations

import sys
import types
from typing import Any

from .api import DTYPES, ConversionSummary, convert, format_summary
from .errors import ConversionError, ConversionWarning

__all__ = ["DTYPES", "ConversionError", "ConversionSummary", "ConversionWarning", "convert", "format_summary"]


class _Package(types.ModuleType):
    """`colibri.convert` names this package and the function in it: calling the package calls the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> ConversionSummary:
        return convert(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
