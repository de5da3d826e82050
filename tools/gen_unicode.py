"""Write lib/model/unicode_data.c: character classes and canonical composition for the tokenizer.

The tokenizer must agree with Hugging Face `tokenizers` on every code point, so its tables are measured there rather
than taken from a Unicode release: classes with the regular expressions the pre-tokenizers use (Oniguruma; \\p{L} and
the like; Unicode 16 in tokenizers 0.23), composition with its NFC and NFD normalizers (Unicode 12 there).

    pip install tokenizers && python tools/gen_unicode.py     # by hand, when `tokenizers` moves to a newer Unicode
"""

from __future__ import annotations

import bisect
import unicodedata
from pathlib import Path

import tokenizers
from tokenizers import Regex
from tokenizers.normalizers import NFC, NFD
from tokenizers.pre_tokenizers import Split

TARGET = Path(__file__).resolve().parent.parent / "lib" / "model" / "unicode_data.c"
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
BLOCK = 256  # code points in one block of the class table

# In the order of the COLI_CHAR_* enum of lib/model/unicode.h; what fits none is class 0 ("other").
CLASSES = {
    1: r"\p{Lu}",
    2: r"\p{Ll}",
    3: r"\p{Lt}",
    4: r"\p{Lm}",
    5: r"\p{Lo}",
    6: r"\p{M}",
    7: r"[\p{Nd}\p{Nl}]",
    8: r"\p{No}",
    9: r"\p{Pc}",
    10: r"[\p{P}&&[^\p{Pc}]]",
    11: r"[\p{S}&&\p{Alphabetic}]",
    12: r"[\p{S}&&[^\p{Alphabetic}]]",
    13: r"\s",
    14: r"\p{Join_Control}",
}


def members(pattern: str) -> set[int]:
    """Code points that the single-character `pattern` matches in `tokenizers`."""
    split = Split(Regex(pattern), behavior="removed", invert=True)
    return {ord(c) for piece, _ in split.pre_tokenize_str("".join(map(chr, CODE_POINTS))) for c in piece}


def class_table() -> list[int]:
    """The class of each of the 0x110000 code points."""
    table = [0] * 0x110000
    for number, pattern in CLASSES.items():
        for c in members(pattern):
            assert table[c] == 0, f"U+{c:04X} has two classes, {table[c]} and {number}"
            table[c] = number
    return table


def two_level(table: list[int]) -> tuple[list[int], list[int], int]:
    """(block number of each BLOCK code points, nibble-packed blocks, code points covered); the tail is class 0."""
    end = max(i for i, value in enumerate(table) if value) // BLOCK * BLOCK + BLOCK
    blocks: dict[tuple[int, ...], int] = {}
    index = [blocks.setdefault(tuple(table[i : i + BLOCK]), len(blocks)) for i in range(0, end, BLOCK)]
    packed = [block[i] | block[i + 1] << 4 for block in blocks for i in range(0, BLOCK, 2)]
    return index, packed, end


def combining_classes(nfd: NFD) -> dict[int, int]:
    """ccc of every non-starter, measured by which pairs the NFD normalizer swaps."""

    def swaps(a: int, b: int) -> bool:
        return a != b and nfd.normalize_str(chr(a) + chr(b)) == chr(b) + chr(a)

    low, high = 0x334, 0x345  # of the lowest class, 1, and of the highest, 240
    known = {1: low, 240: high}
    for c in CODE_POINTS:
        ccc = unicodedata.combining(chr(c))
        if ccc and ccc not in known and (swaps(c, low) and swaps(high, c)):
            known[ccc] = c
    ruler = sorted(known.items())
    result = {}
    for c in CODE_POINTS:
        if len(nfd.normalize_str(chr(c))) != 1 or 0xAC00 <= c <= 0xD7A3:
            continue
        if not (swaps(c, low) or swaps(high, c) or c in (low, high)):
            continue
        below = [ccc for ccc, r in ruler if swaps(c, r)]
        above = [ccc for ccc, r in ruler if swaps(r, c)]
        between = [ccc for ccc, _ in ruler if ccc not in below and ccc not in above]
        assert len(between) == 1, f"U+{c:04X}: {below} {above}"
        result[c] = between[0]
    return result


def decompositions(nfc: NFC, nfd: NFD) -> list[tuple[int, int, int, bool]]:
    """Sorted (code point, first, second or 0, whether the pair composes back); `first` may decompose. No Hangul."""
    full = {}
    for c in CODE_POINTS:
        text = nfd.normalize_str(chr(c))
        if text != chr(c) and not 0xAC00 <= c <= 0xD7A3:
            full[c] = text
    by_text: dict[str, int] = {}
    for c, text in full.items():
        if text not in by_text or nfc.normalize_str(text) == chr(c):
            by_text[text] = c
    rows = []
    for c, text in sorted(full.items()):
        if len(text) == 1:
            rows.append((c, ord(text), 0, False))
            continue
        head = text[:-1]
        first = ord(head) if len(head) == 1 else by_text[head]
        second = ord(text[-1])
        assert second not in full
        rows.append((c, first, second, nfc.normalize_str(chr(first) + chr(second)) == chr(c)))
    return rows


def unsafe_ranges(rows: list[tuple[int, int, int, bool]], ccc: dict[int, int], nfc: NFC) -> list[tuple[int, int, int]]:
    """Sorted (first, last, ccc) of code points that NFC may change or move or join to what stands before them. Hangul's
    V and T jamo are among them with ccc 0."""
    unsafe = dict(ccc)
    for c, _, second, composes in rows:
        if not composes or nfc.normalize_str(chr(c)) != chr(c):
            unsafe.setdefault(c, 0)
        if composes:
            unsafe.setdefault(second, 0)
    for c in [*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)]:
        unsafe.setdefault(c, 0)
    ranges: list[tuple[int, int, int]] = []
    for c, value in sorted(unsafe.items()):
        if ranges and ranges[-1][1] == c - 1 and ranges[-1][2] == value:
            ranges[-1] = (ranges[-1][0], c, value)
        else:
            ranges.append((c, c, value))
    return ranges


def render(kind: str, name: str, values: list[str]) -> str:
    """One C array, filled to the line width."""
    lines, line = [], "   "
    for value in values:
        if len(line) + len(value) + 2 > 126:
            lines.append(line)
            line = "   "
        line += f" {value},"
    return f"const {kind} {name}[{len(values)}] = {{\n" + "\n".join([*lines, line]) + "\n};\n"


def main() -> None:
    nfc, nfd = NFC(), NFD()
    index, packed, end = two_level(class_table())
    assert max(index) < 256
    rows = decompositions(nfc, nfd)
    ranges = unsafe_ranges(rows, combining_classes(nfd), nfc)
    starts = [row[0] for row in rows]
    composing = sorted(
        (first, second, bisect.bisect_left(starts, c)) for c, first, second, composes in rows if composes
    )
    size = len(index) + len(packed) + len(rows) * 8 + len(composing) * 2 + len(ranges) * 8
    text = f"""/* unicode_data.c: tables of lib/model/unicode.c. Written by tools/gen_unicode.py, do not edit.
 * Measured on `tokenizers` {tokenizers.__version__}: character classes of its regular expressions, and its NFC and NFD.
 * {size} bytes. */
#include "model/unicode_data.h"

const uint32_t coli_class_end = 0x{end:X};

/* Block of each {BLOCK} code points up to coli_class_end. */
"""
    text += render("uint8_t", "coli_class_index", [str(i) for i in index])
    text += "\n/* Blocks: a nibble per code point, the lower one first. */\n"
    text += render("uint8_t", "coli_class_blocks", [str(i) for i in packed])
    text += "\n/* Canonical decompositions, sorted: code point << 43 | first << 22 | second << 1 | composes back. */\n"
    text += render("uint64_t", "coli_decompositions", [f"0x{c << 43 | a << 22 | b << 1 | k:x}u" for c, a, b, k in rows])
    text += f"const uint32_t coli_num_decompositions = {len(rows)};\n"
    text += "\n/* Rows of coli_decompositions that compose, sorted by (first, second). */\n"
    text += render("uint16_t", "coli_compositions", [str(i) for _, _, i in composing])
    text += f"const uint32_t coli_num_compositions = {len(composing)};\n"
    text += (
        "\n/* What NFC may change, move or join to the character before: sorted {first, count, combining class}. */\n"
    )
    text += render("coli_unsafe_range", "coli_unsafe_ranges", [f"{{0x{a:X}, {b - a + 1}, {k}}}" for a, b, k in ranges])
    text += f"const uint32_t coli_num_unsafe_ranges = {len(ranges)};\n"
    TARGET.write_text(text, encoding="utf-8")
    print(f"{TARGET.name}: {size} bytes of tables")


if __name__ == "__main__":
    main()
