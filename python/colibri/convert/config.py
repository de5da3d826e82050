"""config.json with its old and new spellings, read through typed getters that fail with a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import ConversionError

REQUIRED: Any = object()
_ABSENT: Any = object()
FLOAT32_RANGE = (1.2e-38, 3.4e38)


class Config:
    """A JSON object of settings. A setting that is null counts as absent, as it does in the libraries that write
    these files.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def get(self, *names: str, default: Any = None) -> Any:
        """The value under the first of several spellings; spellings that disagree are an error."""
        found = [(name, self.values[name]) for name in names if self.values.get(name) is not None]
        for name, value in found[1:]:
            if value != found[0][1]:
                raise ConversionError(f"{self.where}: {found[0][0]} is {found[0][1]!r} but {name} is {value!r}")
        if found:
            return found[0][1]
        return self._default(names, default)

    def integer(self, *names: str, default: Any = REQUIRED, minimum: int = 1, maximum: int = 2**31 - 1) -> Any:
        """An integer in [minimum, maximum]; the default is returned as it is."""
        value = self.get(*names, default=_ABSENT)
        if value is _ABSENT:
            return self._default(names, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self._bad(names, value, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, *names: str, default: Any = REQUIRED) -> Any:
        """A positive number that float32 can hold; the default is returned as it is."""
        value = self.get(*names, default=_ABSENT)
        if value is _ABSENT:
            return self._default(names, default)
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not FLOAT32_RANGE[0] < value < FLOAT32_RANGE[1]:
            raise self._bad(names, value, "a positive number that float32 can hold")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.get(name, default=default)
        if not isinstance(value, bool):
            raise self._bad((name,), value, "true or false")
        return value

    def text(self, *names: str, default: Any = REQUIRED) -> Any:
        """A string."""
        value = self.get(*names, default=_ABSENT)
        if value is _ABSENT:
            return self._default(names, default)
        if not isinstance(value, str):
            raise self._bad(names, value, "a string")
        return value

    def integers(self, name: str) -> list[int] | None:
        """A list of non-negative integers, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(
            isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value
        ):
            raise self._bad((name,), value, "a list of non-negative integers")
        return value

    def _default(self, names: tuple[str, ...], default: Any) -> Any:
        if default is REQUIRED:
            raise ConversionError(f"{self.where}: {' or '.join(names)} is missing")
        return default

    def _bad(self, names: tuple[str, ...], value: Any, expected: str) -> ConversionError:
        name = next((n for n in names if self.values.get(n) is not None), names[0])
        shown = repr(value)
        return ConversionError(
            f"{self.where}: {name} must be {expected}, not {shown if len(shown) < 80 else shown[:77] + '...'}"
        )
