"""colibri: Mixture-of-Experts language models on CPUs."""

from __future__ import annotations

from .errors import ColibriError

__version__ = "0.1.0"
__all__ = ["ColibriError", "__version__"]
