"""The exceptions of the package: one class per status of the C library.

Everything that can go wrong raises a :class:`ColibriError`. Its text is one sentence that names the thing, the number
and the remedy; ``status`` is the number of the ``COLIBRI_ERR_*`` constant of ``colibri.h``.
"""

from __future__ import annotations

from typing import Any


class ColibriError(Exception):
    """Base of all errors of this package.

    Attributes:
        status: the ``COLIBRI_ERR_*`` number of the failed call, 0 where no library call was involved.
        results: what is still valid after a partial failure (see :class:`NotFiniteError`), else None.
    """

    status: int = 0

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        if status is not None:
            self.status = status
        self.results: Any = None


class InvalidArgumentError(ColibriError):
    """A value out of range, an unknown option, a wrong type."""

    status = 1


class AlignmentError(ColibriError):
    """A buffer is not 64-byte aligned."""

    status = 2


class OutOfMemoryError(ColibriError):
    """The system refused memory."""

    status = 3


class WorkspaceError(ColibriError):
    """The given workspace is too small."""

    status = 4


class BufferTooSmallError(ColibriError):
    """An output buffer is too small."""

    status = 5


class NotFoundError(ColibriError):
    """No such file."""

    status = 6


class IoError(ColibriError):
    """The system reported an error on a file."""

    status = 7


class FormatError(ColibriError):
    """Not a .colibri file, or a truncated or damaged one."""

    status = 8


class VersionError(ColibriError):
    """A file of a newer version than this library reads."""

    status = 9


class ChecksumError(ColibriError):
    """Stored and computed checksum differ."""

    status = 10


class UnsupportedError(ColibriError):
    """Well-formed, but not something this build or machine can do."""

    status = 11


class TokenError(ColibriError):
    """A token id outside the vocabulary."""

    status = 12


class SlotFullError(ColibriError):
    """A sequence would exceed ``max_seq_len``."""

    status = 13


class StateError(ColibriError):
    """Called out of order, or on an object that was closed."""

    status = 14


class NotFiniteError(ColibriError):
    """Numbers became NaN or infinite: damaged weights or overflow.

    Attributes:
        slots: the slots that failed and did not change (empty if not of a slot).
        results: what the call would have returned; rows of failed slots are zero, the others are right.
    """

    status = 15

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message, status)
        self.slots: list[int] = []


class CancelledError(ColibriError):
    """``Session.cancel`` was called."""

    status = 16


class NoTokenizerError(ColibriError):
    """The file holds no tokenizer."""

    status = 17


class IsaError(ColibriError):
    """The forced instruction set is not there."""

    status = 18


class ThreadError(ColibriError):
    """Threads could not be started, or the session belongs to a parent process."""

    status = 19


class ConversionError(ColibriError):
    """A checkpoint could not be converted: a tensor missing or left over, an unknown family or setting, damaged
    input.
    """

    def __init__(self, message: str) -> None:
        # It quotes untrusted files: no line breaks, nothing that a terminal obeys or cannot show.
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))


ERROR_CLASSES: dict[int, type[ColibriError]] = {
    cls.status: cls
    for cls in (
        InvalidArgumentError,
        AlignmentError,
        OutOfMemoryError,
        WorkspaceError,
        BufferTooSmallError,
        NotFoundError,
        IoError,
        FormatError,
        VersionError,
        ChecksumError,
        UnsupportedError,
        TokenError,
        SlotFullError,
        StateError,
        NotFiniteError,
        CancelledError,
        NoTokenizerError,
        IsaError,
        ThreadError,
    )
}
"""From a ``COLIBRI_ERR_*`` number to its class."""


def error_for(status: int, message: str) -> ColibriError:
    """The exception of a failed call: `status` as the library returned it, `message` from ``colibri_last_error``."""
    return ERROR_CLASSES.get(status, ColibriError)(message or f"the library reported status {status}", status)
