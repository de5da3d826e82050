"""Pre-tokenizer rules of tokenizer.json -> the steps of a tokenizer payload.

Every regular expression is one the C library has a hand-written matcher for, found by its exact text, or of the simple
form "a run of characters of a set, perhaps with a space before". Anything else is an error that shows the expression.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .errors import ConversionError

METASPACE = "\u2581"

# COLI_TOK_STEP_* of lib/model/tokenizer_format.h
GPT2, WORDS, O200K, DEEPSEEK3, RUN, SPACE_END, METASPACE_STEP = range(1, 8)
PREFIX_NONE, PREFIX_ANY_SPACE, PREFIX_BLANK = range(3)

# 1 << COLI_CHAR_* of lib/model/unicode.h
LU, LL, LT, LM, LO, M, PC, SPACE = (1 << i for i in (1, 2, 3, 4, 5, 6, 9, 13))
L = LU | LL | LT | LM | LO
N = 1 << 7 | 1 << 8
P = PC | 1 << 10
S = 1 << 11 | 1 << 12
PROPERTIES = {"Lu": LU, "Ll": LL, "Lt": LT, "Lm": LM, "Lo": LO, "L": L, "M": M, "N": N, "P": P, "Pc": PC, "S": S}

# Digits asks Rust's char::is_numeric, of a newer Unicode than the regular expressions'.
NEW_DIGITS = ((0x11DE0, 0x11DE9), (0x16FF4, 0x16FF6))


@dataclass(frozen=True)
class Step:
    """One coli_tok_step. `max` 0: unlimited. `ranges`: sorted (first, last) code points."""

    kind: int
    max: int = 0
    prefix: int = PREFIX_NONE
    class_mask: int = 0
    negate: bool = False
    ranges: tuple[tuple[int, int], ...] = ()


def _known_patterns() -> dict[str, Step]:
    r"""The expressions with a matcher of their own, line breaks spelled \r and \n. Each covers every text: no character
    is left over, except by DeepSeek's."""
    known = {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": Step(GPT2),
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": Step(O200K),
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+".replace('\\"', '"'): Step(DEEPSEEK3),
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
        r"|\s+(?!\S)|\s+": Step(WORDS, max=3, class_mask=L),
    }
    for letters, not_letters, mask in ((r"\p{L}", r"\p{L}", L), (r"[\p{L}\p{M}]", r"\p{L}\p{M}", L | M)):
        for digits, most in ((r"\p{N}", 1), (r"\p{N}{1,3}", 3), (r"\p{N}+", 0)):
            pattern = (
                rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}"
                rf"| ?[^\s{not_letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            )
            known[pattern] = Step(WORDS, max=most, class_mask=mask)
    return known


KNOWN_PATTERNS = _known_patterns()


def _class_items(body: str) -> tuple[int, list[tuple[int, int]]] | None:
    """(mask, ranges) of what stands between [ and ], None if it is more than properties, characters and ranges."""
    mask, ranges = 0, []
    token = re.compile(r"\\p\{(\w+)\}|\\([srn\-\[\]\\^./$(){}|*+?])|([^\\\[\]&])", re.DOTALL)
    characters: list[int | None] = []  # None: something that cannot be an end of a range
    at = 0
    while at < len(body):
        match = token.match(body, at)
        if not match or (match[1] and match[1] not in PROPERTIES):
            return None
        at = match.end()
        if match[1] or match[2] == "s":
            mask |= PROPERTIES[match[1]] if match[1] else SPACE
            characters.append(None)
        elif match[3] == "-" and characters and at < len(body):
            last = token.match(body, at)
            first = characters[-1]
            if first is None or not last or last[1] or last[2] == "s":
                return None
            end = ord({"r": "\r", "n": "\n"}.get(last[2], last[2]) if last[2] else last[3])
            if end < first:
                return None
            ranges[-1] = (first, end)
            characters.append(None)
            at = last.end()
        else:
            characters.append(ord({"r": "\r", "n": "\n"}.get(match[2], match[2]) if match[2] else match[3]))
            ranges.append((characters[-1], characters[-1]))
    merged: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return mask, merged


def run_step(pattern: str) -> Step | None:
    r"""The step for `(\s?| ?)SET(+|{1,n})?` with SET = \p{X} or [...], None if the expression is not of this form."""
    match = re.fullmatch(
        r"(\\s\?| \?)?(?:\[(\^?)((?:[^\\\[\]]|\\.)+)\]|(\\p\{\w+\}))(\+|\{1,(\d{1,4})\})?", pattern, re.DOTALL
    )
    items = _class_items(match[4] or match[3]) if match else None
    if match is None or items is None:
        return None
    mask, ranges = items
    prefix = {None: PREFIX_NONE, r"\s?": PREFIX_ANY_SPACE, " ?": PREFIX_BLANK}[match[1]]
    most = int(match[6]) if match[6] else 0 if match[5] else 1
    if match[6] and most == 0:
        return None
    return Step(RUN, max=most, prefix=prefix, class_mask=mask, negate=bool(match[2]), ranges=tuple(ranges))


def split_step(rule: dict[str, Any], where: str) -> Step:
    """The step of a Split rule."""
    pattern = (rule.get("pattern") or {}).get("Regex") if isinstance(rule.get("pattern"), dict) else None
    if not isinstance(pattern, str):
        raise ConversionError(
            f"{where}: the pre-tokenizer Split with the pattern {rule.get('pattern')!r} is not supported"
        )
    known = KNOWN_PATTERNS.get(pattern.replace("\r", r"\r").replace("\n", r"\n"))
    keep_matches = (rule.get("behavior"), bool(rule.get("invert"))) == ("Removed", True)
    if keep_matches and (known is None or known.kind == DEEPSEEK3):
        known = None
    elif (rule.get("behavior"), bool(rule.get("invert"))) != ("Isolated", False) and not keep_matches:
        behavior = f"{rule.get('behavior')!r}, invert {rule.get('invert')!r}"
        raise ConversionError(
            f"{where}: the pre-tokenizer Split with the behavior {behavior} is not supported; 'Isolated' is"
        )
    elif known is None:
        known = Step(SPACE_END) if pattern == r"\s+$" else run_step(pattern)
    if known is None:
        raise ConversionError(f"{where}: the pre-tokenizer's pattern is not supported: {pattern[:400]}")
    return known


def word_steps(rules: list[dict[str, Any]], where: str) -> tuple[list[Step], bool]:
    """(steps, whether a space is put before every part) of a byte-level vocabulary's pre-tokenizer rules."""
    steps: list[Step] = []
    prefix_space = False
    for number, rule in enumerate(rules):
        if rule["type"] == "Split":
            steps.append(split_step(rule, where))
        elif rule["type"] == "Digits":
            steps.append(Step(RUN, max=1 if rule.get("individual_digits") else 0, class_mask=N, ranges=NEW_DIGITS))
        elif rule["type"] == "ByteLevel" and number == len(rules) - 1:
            if rule.get("add_prefix_space", True):
                if steps:
                    raise ConversionError(
                        f"{where}: the pre-tokenizer ByteLevel with add_prefix_space after others is not supported"
                    )
                prefix_space = True
            if rule.get("use_regex", True):
                steps.append(Step(GPT2))
        else:
            raise ConversionError(f"{where}: the pre-tokenizer {rule['type']} at place {number} is not supported")
    if len(steps) > 8:
        raise ConversionError(f"{where}: the pre-tokenizer has {len(steps)} steps, at most 8 are supported")
    return steps, prefix_space


def metaspace_scheme(rule: dict[str, Any], where: str) -> str:
    """prepend_scheme of a Metaspace rule, also in its older spelling."""
    if rule.get("replacement") != METASPACE:
        raise ConversionError(
            f"{where}: Metaspace with the replacement {rule.get('replacement')!r} is not supported; U+2581 is"
        )
    scheme = rule.get("prepend_scheme") or "always"
    if scheme not in ("always", "first", "never") or (rule.get("add_prefix_space") is False and scheme != "never"):
        raise ConversionError(f"{where}: Metaspace with the prepend_scheme {scheme!r} is not supported")
    return scheme


def character_steps(rules: list[dict[str, Any]], where: str) -> tuple[list[Step], str | None]:
    """(steps, Metaspace's prepend_scheme or None) of a SentencePiece vocabulary's pre-tokenizer rules."""
    if not rules:
        return [], None
    if [rule["type"] for rule in rules] != ["Metaspace"]:
        names = ", ".join(rule["type"] for rule in rules)
        raise ConversionError(f"{where}: the pre-tokenizer {names} is not supported; ByteLevel and Metaspace are")
    return [Step(METASPACE_STEP)] if rules[0].get("split", True) else [], metaspace_scheme(rules[0], where)
