"""Sessions: sequences with KV caches, forward passes, sampling and generation."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import _ffi
from ._handle import Handle
from .errors import CancelledError, ColibriError, InvalidArgumentError, NotFiniteError, NoTokenizerError, SlotFullError
from .model import Model, TextStream, token_array
from .sampling import as_float, as_int, sampling

FloatArray = NDArray[np.float32]

_INT32_MAX = 2**31 - 1
_UINT64_MAX = 2**64 - 1
_OUTPUTS = {"last": _ffi.COLIBRI_OUTPUT_LAST, "all": _ffi.COLIBRI_OUTPUT_ALL, "hidden": _ffi.COLIBRI_OUTPUT_HIDDEN}
_RESIDENCIES = {
    "map": _ffi.COLIBRI_RESIDENCY_MAP,
    "lock": _ffi.COLIBRI_RESIDENCY_LOCK,
    "huge": _ffi.COLIBRI_RESIDENCY_HUGE,
    "stream": _ffi.COLIBRI_RESIDENCY_STREAM,
}
_RESIDENCY_NAMES = {code: name for name, code in _RESIDENCIES.items()}
_STRATEGIES = {
    "none": _ffi.COLIBRI_BALANCE_NONE,
    "soft_capacity": _ffi.COLIBRI_BALANCE_SOFT_CAPACITY,
    "hard_capacity": _ffi.COLIBRI_BALANCE_HARD_CAPACITY,
}
PLACES: dict[int, str] = {
    -1: "",
    _ffi.COLIBRI_PLACE_DISK: "disk",
    _ffi.COLIBRI_PLACE_MAPPED: "mapped",
    _ffi.COLIBRI_PLACE_LOCKED: "locked",
    _ffi.COLIBRI_PLACE_MEMORY: "memory",
    _ffi.COLIBRI_PLACE_CACHED: "cached",
    _ffi.COLIBRI_PLACE_PINNED: "pinned",
}
"""What the numbers of ``stats()["expert_place"]`` mean; -1 stands in the rows of dense layers."""
_PREFILL_TOKENS = 512  # tokens a prompt is cut into, so that Ctrl-C is heard between them
_DEFAULT_SEQ_LEN = 4096  # at most this many if the caller does not say
_EXPERT_ROW = np.dtype(_ffi.colibri_expert_stats_t)


def aligned_empty(shape: tuple[int, ...]) -> FloatArray:
    """An uninitialised float32 array whose first element is 64-byte aligned, as the library asks for."""
    size = int(np.prod(shape))
    raw = np.empty(size + 16, np.float32)
    skip = (-raw.ctypes.data % 64) // 4
    return raw[skip : skip + size].reshape(shape)


def _choice(name: str, value: Any, choices: dict[str, int]) -> int:
    if isinstance(value, str) and value in choices:
        return choices[value]
    raise InvalidArgumentError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")


def _isa_code(isa: str | None) -> int:
    if isa is None:
        return _ffi.COLIBRI_ISA_AUTO
    code = _ffi.lib().colibri_isa_from_name(isa.encode("utf-8", "replace")) if isinstance(isa, str) else -1
    if code < 0:
        names = [_ffi.lib().colibri_isa_name(i) for i in range(_ffi.COLIBRI_ISA_COUNT_)]
        known = ", ".join(repr(name.decode()) for name in names if name)
        raise InvalidArgumentError(f"isa is {isa!r}; it must be None or one of {known}")
    return int(code)


@dataclass(frozen=True)
class Generation:
    """How the latest ``generate`` went. Times are wall seconds; ``tokens`` are the new ones, without the end token."""

    prompt_tokens: int
    prompt_seconds: float
    tokens: tuple[int, ...]
    seconds: float
    finish_reason: str
    """"eos": the model ended the text; "length": ``max_new_tokens`` was reached; "stopped": the caller stopped
    early.
    """


def _text(name: str, value: str | None, example: str) -> bytes | None:
    """The C library's text, or InvalidArgumentError."""
    if value is None:
        return None
    if not isinstance(value, str) or "\0" in value or not value.isascii():
        raise InvalidArgumentError(f"{name} is {value!r}; it must be {example}")
    return value.encode()


def _path(name: str, value: str | os.PathLike[str]) -> bytes:
    """A path for the C library, or InvalidArgumentError."""
    try:
        path = os.fsencode(value)
    except (TypeError, UnicodeError):
        path = b""
    if not path or b"\0" in path:
        raise InvalidArgumentError(f"{name} is {value!r}; it must be the path of a file")
    return path


class Session:
    """One caller's state on a model: ``max_batch_size`` slots, each a sequence with its own KV cache.

    Args:
        model: a Model, shared with other sessions, or the path of a file.
        max_batch_size: slots.
        max_seq_len: tokens per slot; None: what the model was made for, at most 4096.
        num_threads: including the caller's; None or 0: one per physical core.
        isa: "ref", "avx2", "avx512", …; None: the best this machine has. Results do not depend on it.
        outputs: what forward returns. "all": logits of every token; "last": of the last one; "hidden": final hidden
            states.
        top_k: experts per token; None or 0: the model's.
        dtype: "f32", "f16", "bf16", "q8" or "q4", which the file must have; None: any.
        kv_dtype: "f32", "f16" or "q8" of the KV cache; None: f32 for f32 files, else f16. q8 has one scale per key and
            value of a head: half the memory of f16.
        activation_bits: 8 or 16 in q8 and q4 files; None: 8 in routed experts, 16 elsewhere.
        cpu_affinity: where threads stay: "none", "auto" (one physical core each) or a list of CPUs such as "0,2,4-7";
            thread 0 is the caller's own and is left alone. None: none.
        max_chunk_tokens: tokens computed together; sets memory and speed, never results but with load balancing. None:
            512.
        residency: where weights live. "map": in the page cache; "lock": there, and locked; "huge": copied onto huge
            pages; "stream": routed experts in the file, some of them in a cache. None: "stream" with expert_cache_size,
            "huge" with hugepage_size, else "map". Results do not depend on it.
        expert_cache_size: of "stream": experts if below 1,048,576, else bytes; None: a quarter of the model's.
        hugepage_size: of "huge": 2 << 20 or 1 << 30; None: 2 << 20.
        numa_policy: where weights lie on machines with several memory nodes: "none", "interleave", or layers and their
            nodes such as "0-15:0,16-31:1". None: none.
        load_balancing_strategy: "soft_capacity" moves and "hard_capacity" drops what exceeds an expert's share of the
            tokens computed together. Changes results. None: none.
        capacity_factor: of load_balancing_strategy; None: 1.25.
        expert_profile: a file of :meth:`save_profile`; "stream" begins with its most used experts.
        guard_mapping: of "map" and "lock": a file cut short under the mapping is an IoError, not the process's end.
        log: called as ``log(level, message)`` while the session is made; level is "info" or "warning".

    Raises:
        InvalidArgumentError: a value out of range or an unknown option.
        IsaError: an instruction set that is not there. UnsupportedError, OutOfMemoryError, ThreadError.

    Results are the same bits whatever the threads, the batch, the cutting of the input, the residency and the
    instruction set; load_balancing_strategy alone makes them depend on what is computed together. A session
    runs one call at a time; calls from several threads wait for each other. Different sessions run at the same time.
    """

    def __init__(
        self,
        model: Model | str | os.PathLike[str],
        max_batch_size: int = 1,
        max_seq_len: int | None = None,
        num_threads: int | None = None,
        isa: str | None = None,
        outputs: Literal["all", "last", "hidden"] = "all",
        *,
        top_k: int | None = None,
        dtype: str | None = None,
        kv_dtype: Literal["f32", "f16", "q8"] | None = None,
        activation_bits: int | None = None,
        cpu_affinity: str | None = None,
        max_chunk_tokens: int | None = None,
        residency: Literal["map", "lock", "huge", "stream"] | None = None,
        expert_cache_size: int | None = None,
        hugepage_size: int | None = None,
        numa_policy: str | None = None,
        load_balancing_strategy: Literal["none", "soft_capacity", "hard_capacity"] | None = None,
        capacity_factor: float | None = None,
        expert_profile: str | os.PathLike[str] | None = None,
        guard_mapping: bool = False,
        log: Callable[[str, str], None] | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise InvalidArgumentError(f"Session has no option {next(iter(unknown))!r}")
        self.model: Model = model if isinstance(model, Model) else Model(model)
        info = self.model.config
        if max_seq_len is None:
            max_seq_len = min(info["max_position"], _DEFAULT_SEQ_LEN) or _DEFAULT_SEQ_LEN
        kv_dtypes = {name: _ffi.DTYPES[name] for name in ("f32", "f16", "q8")}
        self.max_batch_size: int = as_int("max_batch_size", max_batch_size, 1, 4096)
        self.max_seq_len: int = as_int("max_seq_len", max_seq_len, 1, _INT32_MAX)
        self.outputs: str = outputs
        config = _ffi.colibri_config_t.init(
            max_batch_size=self.max_batch_size,
            max_seq_len=self.max_seq_len,
            dtype=_choice("dtype", dtype, _ffi.DTYPES) if dtype is not None else 0,
            top_k=as_int("top_k", top_k or 0, 0, _INT32_MAX),
            num_threads=as_int("num_threads", num_threads or 0, 0, 256),
            isa=_isa_code(isa),
            outputs=_choice("outputs", outputs, _OUTPUTS),
            kv_dtype=_choice("kv_dtype", kv_dtype, kv_dtypes) if kv_dtype is not None else 0,
            activation_bits=as_int("activation_bits", activation_bits or 0, 0, _INT32_MAX),
            max_chunk_tokens=as_int("max_chunk_tokens", max_chunk_tokens or 0, 0, _INT32_MAX),
            cpu_affinity=_text("cpu_affinity", cpu_affinity, '"none", "auto" or a list such as "0,2,4-7"'),
            residency=_choice("residency", residency, _RESIDENCIES) if residency is not None else 0,
            expert_cache_size=as_int("expert_cache_size", expert_cache_size or 0, 0, _UINT64_MAX),
            hugepage_size=as_int("hugepage_size", hugepage_size or 0, 0, _UINT64_MAX),
            numa_policy=_text("numa_policy", numa_policy, '"none", "interleave" or a list such as "0-15:0,16-31:1"'),
            load_balancing_strategy=_choice("load_balancing_strategy", load_balancing_strategy or "none", _STRATEGIES),
            capacity_factor=as_float("capacity_factor", capacity_factor or 0.0, 0, 1024),
            expert_profile=_path("expert_profile", expert_profile) if expert_profile is not None else None,
            guard_mapping=as_int("guard_mapping", guard_mapping, 0, 1),
        )
        self.top_k: int = config.top_k or info["top_k"]
        self._row_width: int = info["hidden_size"] if outputs == "hidden" else info["vocab_size"]
        self._eos = frozenset(info["eos_tokens"])
        self._num_layers: int = info["num_layers"]
        self._exclusive = threading.RLock()
        self._ids: list[list[int]] = [[] for _ in range(self.max_batch_size)]  # what each slot's cache holds
        self.last_generation: Generation | None = None
        self._handle = Handle(self._create(config, log), _ffi.lib().colibri_free, "session")
        self._finalizer = weakref.finalize(self, self._handle.close)

    def _create(self, config: Any, log: Callable[[str, str], None] | None) -> int:
        """Make the C session. An exception raised by `log` is raised again here, as C cannot carry it."""
        raised: list[BaseException] = []

        def forward_message(level: int, message: bytes, _data: int | None) -> None:
            try:
                if log is not None:
                    name = "warning" if level == _ffi.COLIBRI_LOG_WARNING else "info"
                    log(name, message.decode("utf-8", "replace"))
            except BaseException as exc:
                raised.append(exc)

        if log is not None:
            config.log = _ffi.colibri_log_fn(forward_message)
        with self.model._handle.use() as model:
            config.model = model
            pointer = _ffi.lib().colibri_init(ctypes.byref(config))
            if not pointer:
                raise _ffi.last_error()
        if raised:
            _ffi.lib().colibri_free(pointer)
            raise raised[0]
        return int(pointer)

    @contextmanager
    def _use(self) -> Iterator[int]:
        """The C session, for this thread alone."""
        with self._exclusive, self._handle.use() as ctx:
            yield ctx

    def _check_slot(self, slot: int) -> int:
        return as_int("slot", slot, 0, self.max_batch_size - 1)

    # ---- Forward passes ----

    def _infer(self, ctx: int, batch: Sequence[Any]) -> ColibriError | None:
        """Run a batch of C token arrays, one per slot. Returns the error of slots that became not finite; raises
        others.
        """
        library = _ffi.lib()
        lengths = (ctypes.c_int32 * len(batch))(*map(len, batch))
        packed = (ctypes.c_int32 * sum(lengths))()
        position = 0
        for tokens in batch:
            packed[position : position + len(tokens)] = tokens[:]
            position += len(tokens)
        _ffi.check(library.colibri_set_input(ctx, packed, lengths, len(batch)))
        status = library.colibri_infer(ctx)
        failure = _ffi.last_error(status) if status != _ffi.COLIBRI_OK else None
        if failure is not None and not isinstance(failure, NotFiniteError):
            raise failure
        failed = [i for i in range(len(batch)) if library.colibri_slot_status(ctx, i)] if failure is not None else []
        for slot, tokens in enumerate(batch):
            if slot not in failed:
                self._ids[slot].extend(tokens)
        if isinstance(failure, NotFiniteError):
            failure.slots = failed
        return failure

    def _output(self, ctx: int) -> FloatArray:
        """The latest infer's output, [rows][width]."""
        size = ctypes.c_size_t()
        _ffi.check(_ffi.lib().colibri_output_size(ctx, ctypes.byref(size)))
        output = aligned_empty((size.value // (4 * self._row_width), self._row_width))
        _ffi.check(_ffi.lib().colibri_get_output(ctx, output.ctypes.data, size.value))
        return output

    def forward_batch(self, batch: Sequence[Iterable[int]]) -> list[FloatArray]:
        """Append tokens to slots and run them.

        Args:
            batch: new token ids for slot 0, 1, …; an empty list leaves its slot idle. At most ``max_batch_size`` lists.

        Returns:
            One float32 array per slot: [tokens, vocab] for "all", [1, vocab] for "last", [tokens, hidden] for "hidden",
            and 0 rows for an idle slot.

        Raises:
            TokenError, SlotFullError, InvalidArgumentError: nothing has changed. CancelledError: likewise.
            NotFiniteError: its ``slots`` have not changed, the others have; its ``results`` is the list.
        """
        if isinstance(batch, (str, bytes)):
            raise InvalidArgumentError("a batch is a list of lists of token ids, not text")
        if not isinstance(batch, Iterable):
            raise InvalidArgumentError(f"a batch is a list of lists of token ids, not {type(batch).__name__}")
        arrays = [token_array(tokens) for tokens in batch]
        with self._use() as ctx:
            lengths = [len(ids) for ids in self._ids]
            failure = self._infer(ctx, arrays)
            try:
                output = self._output(ctx)
            except CancelledError:  # the tokens are in their slots already
                for slot, length in enumerate(lengths):
                    self.truncate(slot, length)
                raise
        results: list[FloatArray] = []
        first = 0
        for slot, tokens in enumerate(arrays):
            if self.outputs == "last":
                results.append(output[slot : slot + 1] if len(tokens) else output[:0])
            else:
                results.append(output[first : first + len(tokens)])
                first += len(tokens)
        if failure is not None:
            failure.results = results
            raise failure
        return results

    def forward(self, tokens: Iterable[int]) -> FloatArray:
        """Append tokens to slot 0 and run them: float32 [tokens, vocab], "last": [1, vocab], "hidden": [tokens, width].

        Errors as :meth:`forward_batch`; an empty list is an InvalidArgumentError.
        """
        return self.forward_batch([tokens])[0]

    # ---- Slots ----

    def length(self, slot: int = 0) -> int:
        """Tokens in the slot's cache."""
        slot = self._check_slot(slot)
        with self._use() as ctx:
            return int(_ffi.lib().colibri_slot_length(ctx, slot))

    def tokens(self, slot: int = 0) -> list[int]:
        """The ids of the tokens in the slot's cache."""
        slot = self._check_slot(slot)
        with self._use():
            return list(self._ids[slot])

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the slot's first `length` tokens. InvalidArgumentError if it has fewer."""
        slot = self._check_slot(slot)
        length = as_int("length", length, 0, _INT32_MAX)
        with self._use() as ctx:
            _ffi.check(_ffi.lib().colibri_truncate(ctx, slot, length))
            del self._ids[slot][length:]

    def reset(self) -> None:
        """Empty every slot and drop pending input and output."""
        with self._use() as ctx:
            _ffi.check(_ffi.lib().colibri_reset(ctx))
            for ids in self._ids:
                ids.clear()

    def cancel(self) -> None:
        """From any thread: a running call ends soon with CancelledError; without one, the next one does."""
        with self._handle.use() as ctx:
            _ffi.lib().colibri_cancel(ctx)

    # ---- Sampling and generation ----

    def sample(
        self,
        slot: int = 0,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
    ) -> int:
        """The slot's next token, chosen from its latest logits; it is not appended. Settings:
        :func:`colibri.sampling.sampling`.
        """
        slot = self._check_slot(slot)
        settings = sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        with self._use() as ctx:
            return self._sample(ctx, slot, settings)

    def _sample(self, ctx: int, slot: int, settings: Any) -> int:
        token = ctypes.c_int32()
        _ffi.check(_ffi.lib().colibri_sample(ctx, slot, ctypes.byref(settings), ctypes.byref(token)))
        return token.value

    def _feed(self, slot: int, tokens: list[int]) -> None:
        """Append `tokens` to one slot in pieces, without reading the output."""
        for first in range(0, len(tokens), _PREFILL_TOKENS):
            batch = [token_array([]) for _ in range(slot)] + [token_array(tokens[first : first + _PREFILL_TOKENS])]
            with self._use() as ctx:
                failure = self._infer(ctx, batch)
            if failure is not None:
                raise failure

    def generate(
        self,
        prompt: str | Iterable[int],
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        *,
        stream: bool = False,
        slot: int = 0,
        keep: Literal["nothing", "prefix", "all"] = "nothing",
        stop_at_eos: bool = True,
        special: bool = False,
    ) -> Any:
        """Continue a prompt.

        Args:
            prompt: text, or a list of token ids.
            max_new_tokens: at most so many; None: 128, or what the slot has room for.
            temperature, top_k, top_p, min_p, repetition_penalty, seed: see :func:`colibri.sampling.sampling`; greedy
                by default.
            stream: return an iterator of pieces of the text, each as soon as its characters are whole.
            slot: which slot.
            keep: of the slot's tokens. "nothing": it is emptied first; "prefix": what they share with the prompt is not
                computed again; "all": the prompt is appended, without a begin-of-sequence token.
            stop_at_eos: end at an end token of the model.
            special: write special tokens out.

        Returns:
            The new text alone, str; an iterator of str with `stream`. ``last_generation`` then has figures.

        Raises:
            SlotFullError: prompt and new tokens exceed ``max_seq_len``. InvalidArgumentError: empty prompt, bad
                setting.
            NoTokenizerError: the file holds no tokenizer; use forward and sample with ids.
        """
        slot = self._check_slot(slot)
        settings = sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        _choice("keep", keep, {"nothing": 0, "prefix": 1, "all": 2})
        if not self.model.config["has_tokenizer"]:
            raise NoTokenizerError(f"{self.model.path} holds no tokenizer; use forward and sample with token ids")
        ids = self._prompt_ids(prompt, append=keep == "all" and self.length(slot) > 0)
        kept = {"nothing": 0, "prefix": self._shared_prefix(slot, ids), "all": self.length(slot)}[keep]
        fresh = ids if keep == "all" else ids[kept:]
        room = self.max_seq_len - kept - len(fresh) + 1  # the last new token need not enter the cache
        limit = (
            max(0, min(128, room))
            if max_new_tokens is None
            else as_int("max_new_tokens", max_new_tokens, 0, _INT32_MAX)
        )
        if room < max(limit, 1):
            raise SlotFullError(
                f"slot {slot} has room for {self.max_seq_len} tokens; {kept + len(fresh)} of prompt and {limit} new do "
                f"not fit; make the session with max_seq_len {kept + len(fresh) + max(limit, 1) - 1} or more"
            )
        pieces = self._run(slot, kept, fresh, limit, settings, self._eos if stop_at_eos else frozenset(), special)
        return pieces if stream else "".join(pieces)

    def _prompt_ids(self, prompt: str | Iterable[int], append: bool) -> list[int]:
        if isinstance(prompt, str):
            flags = _ffi.COLIBRI_TOKENIZE_PARSE_SPECIAL | (0 if append else _ffi.COLIBRI_TOKENIZE_ADD_SPECIAL)
            ids = self.model._tokenize(prompt, flags)
        else:
            ids = token_array(prompt)[:]
        if not ids:
            raise InvalidArgumentError("the prompt is empty: it gives no token")
        vocab = self.model.config["vocab_size"]
        for token in ids:
            as_int("a token id of the prompt", token, 0, vocab - 1)
        return ids

    def _shared_prefix(self, slot: int, ids: list[int]) -> int:
        """How many of the prompt's tokens the slot already holds. The last one is always run again, to have its
        logits.
        """
        held = self._ids[slot][: self.length(slot)]
        shared = 0
        while shared < min(len(held), len(ids) - 1) and held[shared] == ids[shared]:
            shared += 1
        return shared

    def _run(
        self, slot: int, kept: int, fresh: list[int], limit: int, settings: Any, stops: frozenset[int], special: bool
    ) -> Iterator[str]:
        """Prefill `fresh` after the slot's first `kept` tokens, then sample up to `limit` tokens; yields pieces of
        text.
        """
        text = TextStream(self.model, special)
        made: list[int] = []
        reason = "stopped"
        begin = first = time.perf_counter()
        try:
            self.truncate(slot, kept)
            self._feed(slot, fresh)
            first = time.perf_counter()
            while True:
                if len(made) >= limit:
                    reason = "length"
                    break
                if made:
                    self._feed(slot, made[-1:])
                with self._use() as ctx:
                    token = self._sample(ctx, slot, settings)
                if token in stops:
                    reason = "eos"
                    break
                made.append(token)
                if piece := text.feed(token):
                    yield piece
            if piece := text.end():
                yield piece
        finally:
            self.last_generation = Generation(
                len(fresh), first - begin, tuple(made), time.perf_counter() - first, reason
            )

    # ---- Routing, statistics ----

    def route_tokens(self, layer: int, hidden: Any) -> tuple[NDArray[np.int32], FloatArray]:
        """One layer's router alone.

        Args:
            layer: from 0; it must have experts.
            hidden: float32 [n, hidden_size], what the router sees (already normed).

        Returns:
            expert ids int32 [n, top_k], most likely first, and their weights float32 [n, top_k].

        Raises:
            NotFiniteError: a row is not finite: its ids are -1 and its weights 0; ``results`` holds both arrays.
        """
        source = self._hidden_rows(hidden)
        weights = aligned_empty((len(source), self.top_k))
        ids = aligned_empty((len(source), self.top_k)).view(np.int32)
        layer = as_int("layer", layer, 0, self._num_layers - 1)
        with self._use() as ctx:
            status = _ffi.lib().colibri_route_tokens(
                ctx, layer, source.ctypes.data, len(source), ids.ctypes.data, weights.ctypes.data
            )
            if status != _ffi.COLIBRI_OK:
                failure = _ffi.last_error(status)
                failure.results = (ids, weights)
                raise failure
        return ids, weights

    def moe_forward(self, layer: int, hidden: Any) -> FloatArray:
        """One layer's experts alone, router and shared expert included; of a dense layer its MLP.

        Args:
            layer: from 0.
            hidden: float32 [n, hidden_size], already normed.

        Returns:
            float32 [n, hidden_size]; no residual is added.

        Raises:
            NotFiniteError: a row's result is not finite and became zeros; ``results`` holds the array.
        """
        rows = self._hidden_rows(hidden)  # becomes the output
        layer = as_int("layer", layer, 0, self._num_layers - 1)
        with self._use() as ctx:
            status = _ffi.lib().colibri_moe_forward(ctx, layer, rows.ctypes.data, len(rows), rows.ctypes.data)
            if status != _ffi.COLIBRI_OK:
                failure = _ffi.last_error(status)
                failure.results = rows
                raise failure
        return rows

    def _hidden_rows(self, hidden: Any) -> FloatArray:
        """A copy of a host's rows [n, hidden_size], aligned."""
        width = self.model.config["hidden_size"]
        try:
            rows = np.asarray(hidden, np.float32)
        except (TypeError, ValueError):
            raise InvalidArgumentError("hidden must be an array of numbers") from None
        if rows.ndim != 2 or rows.shape[1] != width or rows.shape[0] < 1:
            raise InvalidArgumentError(f"hidden has shape {rows.shape}; it must be [n, {width}] with n at least 1")
        copy = aligned_empty(rows.shape)
        copy[...] = rows
        return copy

    def stats(self) -> dict[str, Any]:
        """Figures since the session was made or :meth:`stats_reset`. colibri.h says what exactly each of them counts.

        Settings: ``num_threads``, ``isa``, ``num_layers``, ``num_experts``, ``workspace_bytes``, ``kv_bytes``;
        ``residency`` in effect ("map" where "lock" was refused), ``guarded``, ``hugepage_size``, ``hugepage_bytes``,
        ``hugepage_pool``, ``direct_io``, ``numa_nodes``, ``memory_short``.

        Counts: ``infer_calls``, ``prompt_tokens``, ``decode_tokens``, ``weight_bytes``, ``capacity_moved``,
        ``capacity_dropped``; of "stream" ``cache_experts``, ``cache_pinned`` (these two as they are now),
        ``cache_hits``, ``cache_misses``, ``cache_hits_ahead``, ``read_bytes``, ``read_bytes_ahead``,
        ``ahead_predicted``, ``ahead_correct``, ``repeat_correct``.

        Times in nanoseconds: ``infer_ns``, ``last_infer_ns``, ``attention_ns``, ``router_ns``, ``experts_ns``,
        ``head_ns``, ``read_wait_ns``. ``infer_histogram`` and ``read_histogram`` are uint64 arrays: element i counts
        calls, or reads of an expert, that took at most 2**i microseconds and more than half of that; the last one
        longer ones too.

        Per expert, arrays [layers, experts], uint64 (zeros for dense layers): ``expert_tokens``, ``expert_calls``,
        ``expert_hits``, ``expert_misses``, ``expert_bytes_read``, ``expert_load_ns``, ``expert_compute_ns``,
        ``expert_merge_ns``; int32 (-1 for dense layers): ``expert_place``, to be looked up in ``colibri.PLACES``,
        and ``expert_node``, the memory node (-1: no numa_policy).
        """
        stats = _ffi.colibri_stats_t.init()
        with self._use() as ctx:
            _ffi.check(_ffi.lib().colibri_stats(ctx, ctypes.byref(stats)))
            result = {
                name: getattr(stats, name) for name, *_ in stats._fields_ if name not in ("struct_size", "reserved0")
            }
            result["isa"] = (_ffi.lib().colibri_isa_name(stats.isa) or b"").decode()
            result["residency"] = _RESIDENCY_NAMES[stats.residency]
            for name in ("guarded", "hugepage_pool", "direct_io", "memory_short"):
                result[name] = bool(result[name])
            for name in ("infer_histogram", "read_histogram"):
                result[name] = np.array(result[name], np.uint64)
            result.update(self._expert_stats(ctx, stats.num_layers, stats.num_experts))
        return result

    def _expert_stats(self, ctx: int, layers: int, experts: int) -> dict[str, NDArray[Any]]:
        """One array [layers, experts] per member of colibri_expert_stats_t."""
        table = np.zeros((layers, experts), _EXPERT_ROW)
        table["place"] = table["node"] = -1  # what dense layers keep
        rows = (_ffi.colibri_expert_stats_t * max(experts, 1))()
        for layer in range(layers if experts else 0):
            status = _ffi.lib().colibri_expert_stats(ctx, layer, rows, experts)
            if status == _ffi.COLIBRI_ERR_INVALID_ARGUMENT:  # a dense layer
                continue
            _ffi.check(status)
            table[layer] = np.frombuffer(rows, _EXPERT_ROW, experts)
        return {f"expert_{name}": np.ascontiguousarray(table[name]) for name in _EXPERT_ROW.names or ()}

    def stats_reset(self) -> None:
        """Begin the figures of :meth:`stats` anew."""
        with self._use() as ctx:
            _ffi.lib().colibri_stats_reset(ctx)

    def metrics(self) -> str:
        """The figures of :meth:`stats` in the Prometheus text format (0.0.4); experts have labels layer and expert."""
        size = ctypes.c_size_t()
        with self._use() as ctx:
            capacity = 0
            while True:
                buffer = ctypes.create_string_buffer(capacity) if capacity else None
                status = _ffi.lib().colibri_metrics(ctx, buffer, capacity, ctypes.byref(size))
                if status != _ffi.COLIBRI_ERR_BUFFER_TOO_SMALL:
                    _ffi.check(status)
                    return buffer.raw[: size.value].decode() if buffer is not None else ""
                capacity = size.value + 4096  # figures may still grow by a digit

    def save_profile(self, path: str | os.PathLike[str]) -> None:
        """Write how often each expert was used to a small file, for ``expert_profile`` of later sessions on this model.

        Raises:
            IoError: it cannot be written; an old file of that name stays as it was.
        """
        data = _path("path", path)
        with self._use() as ctx:
            _ffi.check(_ffi.lib().colibri_save_profile(ctx, data))

    # ---- Lifetime ----

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._handle.closed

    def close(self) -> None:
        """Stop the threads and free the memory, when a running call has ended. Closing twice is harmless."""
        self._finalizer()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.max_batch_size} slots of {self.max_seq_len} tokens"
        return f"<colibri.Session on {self.model.path!r}, {state}>"
