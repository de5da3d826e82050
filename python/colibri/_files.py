"""Small files that are written whole: beside their place first, then renamed."""

from __future__ import annotations

import contextlib
import os
import secrets

from .errors import IoError


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to a file; on failure an old one of that name stays. Devices and pipes are written to as they are.

    Raises:
        IoError: it cannot be written.
    """
    special = os.path.exists(path) and not os.path.isfile(path)
    target = os.fspath(path) if special else os.path.realpath(path)
    temporary = None
    try:
        if not special:
            folder, name = os.path.split(target)
            temporary = os.path.join(folder, f".{name[:100]}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
        with open(temporary or target, "wb") as file:
            file.write(data)
        if temporary:
            os.replace(temporary, target)
    except BaseException as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.remove(temporary)
        if isinstance(error, OSError):
            raise IoError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from None
        raise
