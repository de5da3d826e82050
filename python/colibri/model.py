"""Models: mapped .colibri files, their description, and text to tokens and back."""

from __future__ import annotations

import ctypes
import json
import operator
import os
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

from . import _ffi
from ._handle import Handle
from .errors import InvalidArgumentError, TokenError

_INT32_MAX = 2**31 - 1


def _path_bytes(path: str | os.PathLike[str]) -> bytes:
    """A path as the C library takes it. Raises InvalidArgumentError for what cannot be one."""
    try:
        name = os.fsencode(path)
    except (TypeError, UnicodeError):
        raise InvalidArgumentError(f"a model is opened by its path, not by {path!r}") from None
    if not name or b"\0" in name:
        raise InvalidArgumentError(f"{path!r} is not the path of a file")
    return name


def _utf8(text: str) -> bytes:
    """UTF-8 bytes; lone surrogates give the bytes they stand for (PEP 383), or bytes that are read as U+FFFD."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def token_array(tokens: Iterable[int]) -> ctypes.Array[ctypes.c_int32]:
    """Token ids as a C array. Raises TokenError for what is not a 32-bit integer; the library checks the vocabulary."""
    if isinstance(tokens, (str, bytes)):
        raise InvalidArgumentError("token ids are expected, not text; Model.tokenize makes ids from text")
    try:
        ids = [operator.index(token) for token in tokens]
    except TypeError:
        raise InvalidArgumentError(f"token ids must be a sequence of integers, not {type(tokens).__name__}") from None
    for token in ids:
        if not 0 <= token <= _INT32_MAX:
            raise TokenError(f"token id {token} is outside the vocabulary")
    return (ctypes.c_int32 * len(ids))(*ids)


class Model:
    """A mapped model file: immutable, shareable by any number of sessions and threads.

    Args:
        path: a ``.colibri`` file. Its header and directory are checked here; weights are read when they are used.

    Raises:
        NotFoundError, IoError, FormatError, VersionError, UnsupportedError: what is wrong with the file.

    Close it with :meth:`close` or as a context manager, or leave that to the garbage collector. Sessions keep what they
    need, so closing a model does not disturb them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        library = _ffi.lib()
        pointer = ctypes.c_void_p()
        _ffi.check(library.colibri_model_open(_path_bytes(path), ctypes.byref(pointer)))
        assert pointer.value is not None
        self.path: str = os.fsdecode(path)
        self._handle = Handle(pointer.value, library.colibri_model_close, "model")
        self._finalizer = weakref.finalize(self, self._handle.close)
        self._config = self._read_config()

    # ---- Description ----

    def _read_config(self) -> dict[str, Any]:
        info = _ffi.colibri_model_info_t.init()
        with self._handle.use() as model:
            _ffi.check(_ffi.lib().colibri_model_info(model, ctypes.byref(info)))
        return {
            "model_type": info.model_type.decode("utf-8", "replace"),
            "dtype": _ffi.DTYPE_NAMES.get(info.dtype, str(info.dtype)),
            "vocab_size": info.vocab_size,
            "hidden_size": info.hidden_size,
            "num_layers": info.num_layers,
            "num_heads": info.num_heads,
            "num_kv_heads": info.num_kv_heads,
            "head_dim": info.head_dim,
            "num_experts": info.num_experts,
            "top_k": info.top_k,
            "moe_intermediate_size": info.moe_intermediate_size,
            "shared_intermediate_size": info.shared_intermediate_size,
            "dense_intermediate_size": info.dense_intermediate_size,
            "max_position": info.max_position,
            "bos_token": info.bos_token if info.bos_token >= 0 else None,
            "eos_tokens": list(info.eos_token[: info.num_eos]),
            "has_tokenizer": bool(info.has_tokenizer),
            "has_chat_template": bool(info.has_chat_template),
            "file_size": info.file_size,
            "num_parameters": info.num_parameters,
            "active_bytes": info.active_bytes,
        }

    @property
    def config(self) -> dict[str, Any]:
        """What the file says of its model: a new dict of integers, strings and lists. Sizes count elements, ``*_bytes``
        and ``file_size`` bytes; ``dtype`` is the experts' ("f32", "f16", "bf16", "q8", "q4"); ``bos_token`` is None if
        the model has none; ``active_bytes`` are the weight bytes one decoded token reads."""
        return {**self._config, "eos_tokens": list(self._config["eos_tokens"])}

    def _text(self, function: str) -> str | None:
        """One of the file's texts, by the name of the C function that gives it; None if the file has none."""
        pointer, size = ctypes.c_void_p(), ctypes.c_size_t()
        with self._handle.use() as model:
            _ffi.check(getattr(_ffi.lib(), function)(model, ctypes.byref(pointer), ctypes.byref(size)))
            if not pointer.value:
                return None
            return ctypes.string_at(pointer.value, size.value).decode("utf-8", "replace")

    @property
    def chat_template(self) -> str | None:
        """The file's chat template (Jinja), or None."""
        return self._text("colibri_model_chat_template")

    @property
    def metadata(self) -> dict[str, Any]:
        """Where the file came from, as its converter wrote it; empty if the file does not say."""
        text = self._text("colibri_model_metadata")
        try:
            value = json.loads(text) if text else {}
        except (ValueError, RecursionError):
            value = {}
        return value if isinstance(value, dict) else {}

    def tensors(self) -> Iterator[dict[str, Any]]:
        """The file's directory: one dict per payload with ``role``, ``layer`` (None: not of a layer), ``rows``, ``k``,
        ``count``, ``dtype`` ("bytes" for text), ``offset`` and ``size`` in bytes."""
        info = _ffi.colibri_tensor_info_t.init()
        index = 0
        while True:
            with self._handle.use() as model:
                status = _ffi.lib().colibri_model_tensor(model, index, ctypes.byref(info))
                if status == _ffi.COLIBRI_ERR_INVALID_ARGUMENT:
                    return
                _ffi.check(status)
            yield {
                "role": info.role.decode("utf-8", "replace"),
                "layer": info.layer if info.layer >= 0 else None,
                "rows": info.rows,
                "k": info.k,
                "count": info.count,
                "dtype": _ffi.DTYPE_NAMES.get(info.dtype, "bytes"),
                "offset": info.offset,
                "size": info.size,
            }
            index += 1

    def verify(self) -> None:
        """Read every payload and compare its checksum. Raises ChecksumError naming the first bad one."""
        with self._handle.use() as model:
            _ffi.check(_ffi.lib().colibri_model_verify(model))

    # ---- Text ----

    def tokenize(self, text: str | bytes, special: bool = True) -> list[int]:
        """Text to token ids.

        Args:
            text: any string; bytes are read as UTF-8, and invalid ones as U+FFFD.
            special: add what the tokenizer adds by default (a begin-of-sequence token and the like), and read special
                tokens written in the text (``</s>``) as such. False: neither, such text is plain text.

        Raises:
            NoTokenizerError: the file holds no tokenizer.
        """
        flags = _ffi.COLIBRI_TOKENIZE_ADD_SPECIAL | _ffi.COLIBRI_TOKENIZE_PARSE_SPECIAL if special else 0
        return self._tokenize(text, flags)

    def _tokenize(self, text: str | bytes, flags: int) -> list[int]:
        """Text to ids, `flags` COLIBRI_TOKENIZE_*."""
        if not isinstance(text, (str, bytes)):
            raise InvalidArgumentError(f"text must be str or bytes, not {type(text).__name__}")
        data = _utf8(text) if isinstance(text, str) else text
        capacity = len(data) + 16
        count = ctypes.c_size_t()
        while True:
            ids = (ctypes.c_int32 * capacity)()
            with self._handle.use() as model:
                status = _ffi.lib().colibri_tokenize(model, data, len(data), flags, ids, capacity, ctypes.byref(count))
                if status != _ffi.COLIBRI_ERR_BUFFER_TOO_SMALL or count.value <= capacity:
                    _ffi.check(status)
                    return ids[: count.value]
            capacity = count.value

    def detokenize(self, ids: Iterable[int], special: bool = False) -> str:
        """Token ids to text; `special`: special tokens are written out, else they give nothing. Bytes that form no
        character give U+FFFD. Raises TokenError for an id outside the vocabulary, NoTokenizerError."""
        tokens = token_array(ids)
        capacity = 8 * len(tokens) + 64
        flags = _ffi.COLIBRI_DETOKENIZE_SPECIAL if special else 0
        size = ctypes.c_size_t()
        while True:
            text = ctypes.create_string_buffer(capacity)
            with self._handle.use() as model:
                status = _ffi.lib().colibri_detokenize(
                    model, tokens, len(tokens), flags, text, capacity, ctypes.byref(size)
                )
                if status != _ffi.COLIBRI_ERR_BUFFER_TOO_SMALL or size.value <= capacity:
                    _ffi.check(status)
                    return text.raw[: size.value].decode("utf-8", "replace")
            capacity = size.value

    # ---- Lifetime ----

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._handle.closed

    def close(self) -> None:
        """Drop the file. Sessions that use it go on; calls on this object raise StateError. Closing twice is
        harmless.
        """
        self._finalizer()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return f"<colibri.Model {self.path!r}, closed>"
        c = self._config
        return (
            f"<colibri.Model {self.path!r}: {c['model_type']} {c['dtype']}, {c['num_layers']} layers, "
            f"{c['num_experts']} experts, top {c['top_k']}>"
        )


class TextStream:
    """Tokens in one at a time, whole characters out: the concatenation equals ``Model.detokenize``.

    Args:
        model: whose tokenizer is used.
        special: write special tokens out.
    """

    def __init__(self, model: Model, special: bool = False) -> None:
        self._model = model
        self._state = _ffi.colibri_stream_t.init(flags=_ffi.COLIBRI_DETOKENIZE_SPECIAL if special else 0)
        self._buffer = ctypes.create_string_buffer(256)

    def _step(self, token: int) -> str:
        size = ctypes.c_size_t()
        while True:
            with self._model._handle.use() as model:
                status = _ffi.lib().colibri_stream_token(
                    model, ctypes.byref(self._state), token, self._buffer, len(self._buffer), ctypes.byref(size)
                )
                if status != _ffi.COLIBRI_ERR_BUFFER_TOO_SMALL or size.value <= len(self._buffer):
                    _ffi.check(status)
                    return self._buffer.raw[: size.value].decode("utf-8", "replace")
            self._buffer = ctypes.create_string_buffer(size.value)

    def feed(self, token: int) -> str:
        """The characters that `token` completes, perhaps none."""
        return self._step(token_array([token])[0])

    def end(self) -> str:
        """What was waiting, as U+FFFD. The stream begins anew after it."""
        text = self._step(-1)
        self._state = _ffi.colibri_stream_t.init(flags=self._state.flags)
        return text


__all__ = ["Model", "TextStream", "token_array"]
