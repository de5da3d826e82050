"""Write first inputs for fuzz_tokenizer: small payloads of both kinds, one for every step and flag, each with a text.

python tests/fuzz/seed_tokenizer.py FOLDER
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

from colibri.convert.tokenizer import STAND_INS, build_tokenizer
from colibri.convert.tokenizer_steps import KNOWN_PATTERNS

TEXT = "It's  THE end\r\n\n 1234 e\u0301\u0323 \u1100\u1161 中文, </s><s> ▁ <x> \u3000y 🦙 HTMLParser//".encode()
TEXT += b"\xf0\x9f\x80"
SPACE = "\u2581"


def added(*texts: str) -> list[dict]:
    """Added tokens with every mixture of attributes."""
    names = ("special", "normalized", "lstrip", "rstrip", "single_word")
    return [
        {"id": 0, "content": text, **{name: bool(number >> bit & 1) for bit, name in enumerate(names)}}
        for number, text in enumerate(texts)
    ]


def model(words: list[str], merges: list[tuple[str, str]], **more: object) -> dict:
    pieces = [*words, *("".join(pair) for pair in merges)]
    return {"type": "BPE", "vocab": {w: i for i, w in enumerate(pieces)}, "merges": [list(m) for m in merges], **more}


def byte_level(steps: list[dict], **more: object) -> dict:
    """A byte-level tokenizer.json."""
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "Ġ"), ("ä", "¸"), ("E", "N")]
    rule = {"type": "ByteLevel", "add_prefix_space": not steps, "use_regex": not steps}
    return {
        "added_tokens": added("<s>", "</s>", "<x>", "x", "  ", "\n", "é", "the", "<", "<x"),
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, rule]},
        "decoder": rule,
        "model": model(list(STAND_INS), merges, **more),
    }


def sentencepiece(**more: object) -> dict:
    """A SentencePiece tokenizer.json."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), SPACE, *"thendIESH'12yc中"]
    merges = [(SPACE, "t"), ("h", "e"), (SPACE + "t", "he"), (SPACE, SPACE), ("e", "n")]
    chain = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    return {
        "added_tokens": added("<s>", "</s>", "<x>", "x", "  ", "the"),
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, replace]},
        "decoder": {"type": "Sequence", "decoders": chain},
        "model": model(words, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True),
        **more,
    }


def main(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    patterns = [*KNOWN_PATTERNS, "[\r\n]", r"\s?[A-Z\p{P}]+", r"\s+$", "[^a-z]{1,2}"]
    cases = [byte_level([])]
    cases += [byte_level([{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated"}]) for p in patterns]
    cases.append(byte_level([], ignore_merges=True))
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": True}
    cases += [sentencepiece(), sentencepiece(normalizer=None, pre_tokenizer=metaspace, decoder=metaspace)]
    for number, case in enumerate(cases):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "tokenizer.json").write_text(json.dumps(case), encoding="utf-8")
            payload = build_tokenizer(Path(folder), 4096)
        assert payload is not None
        (target / f"seed{number:02d}").write_bytes(struct.pack("<H", len(TEXT)) + TEXT + payload)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
