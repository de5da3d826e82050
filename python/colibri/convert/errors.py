"""Errors and warnings of the converter."""

from __future__ import annotations

from ..errors import ConversionError

__all__ = ["ConversionError", "ConversionWarning"]


class ConversionWarning(UserWarning):
    """Something in the checkpoint was ignored on purpose; the conversion went on."""
