"""JSON from untrusted files: size limit, nesting, duplicate keys; every fault is a ConversionError naming the file."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from .errors import ConversionError

MAX_BYTES = 256 * 1024 * 1024


def parse_json(data: bytes, where: str, *, unique_keys: bool = False) -> dict[str, Any]:
    """Parse an object. `where` opens the error's sentence. With unique_keys a repeated key is an error."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            seen: set[str] = set()
            name = next(key for key, _ in items if key in seen or seen.add(key))
            raise ConversionError(f'{where}: the key "{name}" occurs twice')
        return result

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs if unique_keys else None)
    except RecursionError:
        raise ConversionError(f"{where}: the JSON is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ConversionError(f"{where}: not UTF-8 (byte {error.start})") from error
    except ValueError as error:
        raise ConversionError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConversionError(f"{where}: a JSON object is expected, this is {type(value).__name__}")
    return value


def read_bytes(path: Path) -> bytes:
    """A whole small file."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConversionError(f"{path}: cannot be read: it is not a regular file")
        if status.st_size > MAX_BYTES:
            raise ConversionError(f"{path}: {status.st_size} bytes are too many for a file of this kind")
        return path.read_bytes()
    except OSError as error:
        raise ConversionError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    return parse_json(read_bytes(path), str(path))
