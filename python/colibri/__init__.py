"""colibri: Mixture-of-Experts language models on CPUs.

    import colibri
    colibri.convert("path/to/checkpoint", "m.colibri", dtype="q8")
    model = colibri.Model("m.colibri")
    session = colibri.Session(model)
    print(session.generate("Once upon a time", max_new_tokens=64))

Every failure raises a subclass of ColibriError. The shared library is loaded at the first call that needs it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _ffi
from . import errors as errors
from ._ffi import COLIBRI_VERSION_STRING as __version__
from .errors import (
    AlignmentError,
    BufferTooSmallError,
    CancelledError,
    ChecksumError,
    ColibriError,
    ConversionError,
    FormatError,
    InvalidArgumentError,
    IoError,
    IsaError,
    NotFiniteError,
    NotFoundError,
    NoTokenizerError,
    OutOfMemoryError,
    SlotFullError,
    StateError,
    ThreadError,
    TokenError,
    UnsupportedError,
    VersionError,
    WorkspaceError,
)
from .model import Model, TextStream

if TYPE_CHECKING:
    from .convert import convert
    from .session import PLACES, Generation, Session

_LAZY = {"PLACES": "session", "convert": "convert", "Generation": "session", "Session": "session"}


def __getattr__(name: str) -> Any:
    """Import what needs numpy when it is first asked for: importing this package stays quick."""
    if name not in _LAZY:
        raise AttributeError(f"module 'colibri' has no attribute {name!r}")
    module = importlib.import_module(f".{_LAZY[name]}", __name__)
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)


def demo_path() -> Path:
    """The small story-telling model that is shipped with this package. Raises NotFoundError if it was left out."""
    path = Path(__file__).resolve().parent / "demo" / "demo.colibri"
    if not path.is_file():
        raise NotFoundError(f"this installation has no demo model: {path} is missing")
    return path


def version() -> str:
    """The version of the C library."""
    return _text("colibri_version")


def build_info() -> str:
    """Compiler, target and kernels of the C library, one line."""
    return _text("colibri_build_info")


def cpu_info() -> str:
    """What the C library detected on this machine, like "avx2 fma f16c"."""
    return _text("colibri_cpu_info")


def isa_supported(isa: str) -> bool:
    """True if an instruction set ("ref", "avx2", "avx512", …) is built in and usable here; False too if it is
    unknown.
    """
    code = _ffi.lib().colibri_isa_from_name(str(isa).encode("utf-8", "replace"))
    return code >= 0 and bool(_ffi.lib().colibri_isa_supported(code))


def _text(function: str) -> str:
    return (getattr(_ffi.lib(), function)() or b"").decode("utf-8", "replace")


__all__ = [
    "PLACES",
    "AlignmentError",
    "BufferTooSmallError",
    "CancelledError",
    "ChecksumError",
    "ColibriError",
    "ConversionError",
    "FormatError",
    "Generation",
    "InvalidArgumentError",
    "IoError",
    "IsaError",
    "Model",
    "NoTokenizerError",
    "NotFiniteError",
    "NotFoundError",
    "OutOfMemoryError",
    "Session",
    "SlotFullError",
    "StateError",
    "TextStream",
    "ThreadError",
    "TokenError",
    "UnsupportedError",
    "VersionError",
    "WorkspaceError",
    "__version__",
    "build_info",
    "convert",
    "cpu_info",
    "demo_path",
    "errors",
    "isa_supported",
    "version",
]
