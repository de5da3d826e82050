"""A vocabulary -> the bytes of a tokenizer payload, as lib/model/tokenizer_format.h specifies them: tables that the
library uses where they lie, hash tables included."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np

from .tokenizer_steps import Step

MAX_PROBE = 4096
HEADER_BYTES = 192


class Kind(IntEnum):
    """COLI_TOK_SENTENCEPIECE, COLI_TOK_BYTE_LEVEL."""

    SENTENCEPIECE = 1
    BYTE_LEVEL = 2


class Flags(IntFlag):
    """COLI_TOK_NFC ... of the header."""

    NFC = 1 << 0
    PREPEND = 1 << 1
    REPLACE = 1 << 2
    METASPACE = 1 << 3
    METASPACE_ALWAYS = 1 << 4
    METASPACE_FIRST = 1 << 5
    PREFIX_SPACE = 1 << 6
    BYTE_FALLBACK = 1 << 7
    FUSE_UNK = 1 << 8
    IGNORE_MERGES = 1 << 9
    CUT_AT_SPACE = 1 << 10
    DECODE_REPLACE = 1 << 11
    DECODE_STRIP = 1 << 12
    DECODE_BYTES = 1 << 13
    DECODE_DROP_FIRST = 1 << 14


@dataclass(frozen=True)
class Token:
    """One id. `findable`: text can become it as a piece. `byte`: it is <0xXX>."""

    data: bytes
    findable: bool
    special: bool
    byte: bool


@dataclass(frozen=True)
class AddedToken:
    """A token that is looked for in the text itself."""

    id: int
    text: bytes
    normalized: bool
    special: bool
    lstrip: bool
    rstrip: bool
    single_word: bool


@dataclass(frozen=True)
class Vocabulary:
    """Everything a payload holds."""

    kind: Kind
    flags: Flags
    tokens: dict[int, Token]
    aliases: list[tuple[int, bytes]]  # (id, another piece under which it is found)
    merges: list[tuple[int, int, int]]  # (left, right, merged) by rank
    added: list[AddedToken]
    byte_ids: list[int]  # [256]
    unk_id: int
    prefix: list[int]
    suffix: list[int]
    steps: list[Step]


def hash_bytes(blob: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Hashes, uint32 [n], of the strings blob[starts[i] : starts[i] + lengths[i]]."""
    order = np.argsort(-lengths, kind="stable")
    starts, ordered = starts[order], lengths[order]
    state = np.full(len(order), 2166136261, np.uint32)
    for column in range(int(ordered[0]) if len(ordered) else 0):
        live = int(np.searchsorted(-ordered, -column, side="left"))  # strings longer than `column`
        state[:live] = (state[:live] ^ blob[starts[:live] + column]) * np.uint32(16777619)
    state ^= state >> np.uint32(15)
    state *= np.uint32(0x2C1B3C6D)
    state ^= state >> np.uint32(12)
    result = np.empty_like(state)
    result[order] = state
    return result


def hash_pairs(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Hashes, uint32 [n], of pairs of ids."""
    x = left.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + right.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    x ^= x >> np.uint64(32)
    x *= np.uint64(0xD6E8FEB86659FD93)
    return (x >> np.uint64(32)).astype(np.uint32)


def hash_table(hashes: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, int]:
    """(slots uint32 [m] holding value + 1, longest search) with open addressing and linear probing."""
    if len(hashes) == 0:
        return np.zeros(0, np.uint32), 0
    slots = len(hashes) + len(hashes) // 2 + 8
    while True:
        table = np.zeros(slots, np.uint32)
        place = (hashes.astype(np.uint64) * np.uint64(slots) >> np.uint64(32)).astype(np.int64)
        waiting = np.arange(len(hashes))
        probe = 0
        while len(waiting) and probe < MAX_PROBE:
            # Of those that want the same free slot the first gets it; the others go on, as later insertions would.
            wanted = (place[waiting] + probe) % slots
            free = np.flatnonzero(table[wanted] == 0)
            _, first = np.unique(wanted[free], return_index=True)
            winners = free[first]
            table[wanted[winners]] = values[waiting[winners]] + 1
            waiting = np.delete(waiting, winners)
            probe += 1
        if not len(waiting):
            return table, probe + 1
        slots += slots // 2


def _pieces(vocabulary: Vocabulary, num_ids: int) -> tuple[list[bytes], np.ndarray]:
    pieces = [b""] * num_ids
    flags = np.zeros(num_ids, np.uint8)
    for id, token in vocabulary.tokens.items():
        pieces[id] = token.data
        flags[id] = 1 | token.special << 1 | token.byte << 2
    return pieces, flags


def _added(tokens: list[AddedToken], base: int) -> tuple[bytes, bytes]:
    """(coli_tok_added records sorted by text, their texts), to be stored at `base`. Of equal texts the first counts."""
    records, texts = b"", b""
    unique: dict[bytes, AddedToken] = {}
    for token in sorted(tokens, key=lambda token: not token.special):  # special ones are looked for first
        unique.setdefault(token.text, token)
    for text, token in sorted(unique.items()):
        bits = token.special | token.lstrip << 1 | token.rstrip << 2 | token.single_word << 3
        records += struct.pack("<4I", token.id, base + len(texts), len(text), bits)
        texts += text
    return records, texts


def _steps(steps: list[Step]) -> tuple[bytes, bytes]:
    records, ranges = b"", b""
    for step in steps:
        at = len(ranges) // 8
        records += struct.pack(
            "<8I", step.kind, step.max, step.prefix, step.class_mask, step.negate, at, len(step.ranges), 0
        )
        ranges += b"".join(struct.pack("<2I", first, last) for first, last in step.ranges)
    return records, ranges


def pack_payload(vocabulary: Vocabulary) -> bytes:
    """The payload. Equal vocabularies give equal bytes."""
    num_ids = max(vocabulary.tokens) + 1
    pieces, token_flags = _pieces(vocabulary, num_ids)
    pieces += [piece for _, piece in vocabulary.aliases]
    offsets = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
    blob = b"".join(pieces)
    found = sorted(id for id, token in vocabulary.tokens.items() if token.findable and token.data)
    findable = np.array([*found, *range(num_ids, len(pieces))], np.int64)
    hashes = hash_bytes(np.frombuffer(blob, np.uint8), offsets[findable], offsets[findable + 1] - offsets[findable])
    piece_slots, piece_probe = hash_table(hashes, findable)

    merges = np.array(vocabulary.merges, np.int64).reshape(-1, 3)
    last_rank = {
        (left, right): rank for rank, (left, right, _) in enumerate(vocabulary.merges)
    }  # of a repeated pair the last counts
    ranks = np.array(sorted(last_rank.values()), np.int64)
    merge_slots, merge_probe = hash_table(hash_pairs(merges[ranks, 0], merges[ranks, 1]), ranks)

    raw, raw_texts = _added([token for token in vocabulary.added if not token.normalized], len(blob))
    blob += raw_texts
    normalized, normalized_texts = _added([token for token in vocabulary.added if token.normalized], len(blob))
    blob += normalized_texts
    steps, ranges = _steps(vocabulary.steps)
    sections = [
        (offsets.astype("<u4").tobytes(), 4),
        (token_flags.tobytes(), 1),
        (blob, 1),
        (piece_slots.astype("<u4").tobytes(), 4),
        (merges.astype("<u4").tobytes(), 12),
        (merge_slots.astype("<u4").tobytes(), 4),
        (raw, 16),
        (normalized, 16),
        (np.array(vocabulary.prefix, "<u4").tobytes(), 4),
        (np.array(vocabulary.suffix, "<u4").tobytes(), 4),
        (steps, 32),
        (ranges, 8),
        (np.array(vocabulary.byte_ids, "<i4").tobytes(), 4),
        (np.array([id for id, _ in vocabulary.aliases], "<u4").tobytes(), 4),
    ]
    return _assemble(vocabulary, num_ids, max(piece_probe, merge_probe), sections)


def _assemble(vocabulary: Vocabulary, num_ids: int, max_probe: int, sections: list[tuple[bytes, int]]) -> bytes:
    at, table = HEADER_BYTES, b""
    parts = []
    for data, size in sections:
        table += struct.pack("<2I", at, len(data) // size)
        parts.append(data + bytes(-len(data) % 8))
        at += len(parts[-1])
    numbers = (1, at, vocabulary.kind, vocabulary.flags, num_ids, vocabulary.unk_id, max_probe)
    header = b"CTOK" + struct.pack("<5IiI", *numbers)
    return (header + table).ljust(HEADER_BYTES, b"\0") + b"".join(parts)
