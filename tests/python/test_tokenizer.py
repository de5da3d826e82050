"""The tokenizer against Hugging Face `tokenizers`, id by id: small trained vocabularies in every spelling of
tokenizer.json, and the vocabularies of real models where they are at hand (../shared beside the repository).
"""

from __future__ import annotations

import copy
import json
import os
import random
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import colibri
import numpy as np
import pytest
import tiny
from colibri.convert.errors import ConversionError
from colibri.convert.tokenizer import build_tokenizer
from colibri.convert.tokenizer_steps import KNOWN_PATTERNS
from colibri.model import TextStream
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

tokenizers = pytest.importorskip("tokenizers", reason="the reference, `pip install tokenizers`")

SHARED = Path(__file__).resolve().parents[3] / "shared"
VOCABULARIES = ("mixtral", "qwen3", "deepseek_v3", "gpt_oss")
SPACE = "\u2581"

HARD = [
    "",
    "a",
    " ",
    "  ",
    "   Hello",
    "Hello",
    " Hello",
    "This is 🦙.cpp",
    "!\u0085",
    "a\u0085b",
    "\u2001\u2002 x\u2009\u3000y",
    "x\u3000\u3000y",
    "\r\n\r\n  \r\n x",
    "\n\n\n",
    "a\n \n b",
    " " * 20 + "x",
    " " * 20,
    "\t\tx\t",
    "  \n  \n\t x",
    "'S 'LL 'Re 'vE don'T I'M ſ 'ſ'ſx it's",
    "'s's'S'T't'",
    "'d'm'll 'llx",
    " 's 'S",
    "\n's",
    "\u2019s",
    "HELLO'LL",
    "½⅓²³ 123456789 ١٢٣٤٥ 12½",
    "١٢٣ ۱۲۳",
    "①②Ⓐ",
    "e\u0301\u0323 a\u0308\u0304",
    "\u1100\u1161\u11a8 \uac00\u11a8 ㄱ",
    "각한글 테스트",
    "हिन्दी में परीक्षण क्षत्रिय",
    "ภาษาไทยที่นี่",
    "👩‍👩‍👧‍👦 🏳️‍🌈 ❤️",
    "中文测试，你好。日本語テスト　です",
    "</s><s> <unk>",
    "<s>Hello</s> world",
    "<|im_start|>user\nhi<|im_end|>",
    "<|endoftext|> <|startoftext|>x<|return|>",
    "<｜begin▁of▁sentence｜>abc<｜User｜>",
    "<think>a</think>",
    "▁▁ a▁b ▁",
    "\x00\x01\x7f",
    "a\u200bb\u200dc\ufeff",
    "HELLOworld HelloWORLD hELLO XMLHttp",
    "ǅungla ʰʷ ªº",
    "AǅB ªA ªAB",
    "a/b//c /\n/\n",
    "...!!!\n\n??\r\n",
    "x" * 1000,
    "\u212b\u2126\ufb01\u0344\u0958",
    "\u0b95\u0bc6\u0bbe \u09c7\u09be",
    "\u05e9\u05bc\u05c1 \ufb2c",
    "C'est l'été d'où",
    "_foo_bar __init__",
    "$100.50€",
    "#hash @at",
    "<0x0A> <0xFF>",
    "\ue000\U000f0000\U0010ffff",
    "𝕳𝖊𝖑𝖑𝖔 𝟘𝟙",
    "אבג שלום",
    "العربية مُرَحَّب",
    "ﷺ",
    "\u1e9b\u0323",
    "\u0f71\u0f72\u0f74 \u0f73",
    "\U00011935\U00011930 \U00011938",
    "a" + "\u0300\u0323" * 50 + "b",
    "\u0301 leading mark",
    "\ufffd",
    "\U00011de0 \u0c04",
]
PIECES = [
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r",
    "\t",
    "a",
    "b",
    "B",
    "cat",
    "the",
    "The",
    "<s>",
    "</s>",
    "<a>",
    "<b>",
    "<c>",
    "<d>",
    "<a",
    "é",
    "e\u0301f",
    "f",
    "Ab",
    "Abc",
    "▁",
    "_",
    ".",
    "'s",
    "'LL",
    "1",
    "23",
    "½",
    "中",
    "한",
    "\u1161",
    "\u0301",
    "\u0323",
    "🦙",
    "\u3000",
    "\u0085",
    "x",
    "Ⓐ",
    "\u200d",
    "٣",
    "-",
    "!",
    "?",
    "/",
    "$",
    "+",
    "\x00",
    "ひ",
    "ǅ",
    "ʰ",
    "ª",
    "ſ",
    "\u0e31",
]

# ---- Models ---------------------------------------------------------------------------------------------------------


def make_model(folder: Path, tokenizer: dict[str, Any] | Path, vocab_size: int) -> colibri.Model:
    """A model of one small layer, converted from a checkpoint with this tokenizer.json."""
    config = tiny.mixtral(
        vocab_size=8,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=1,
        num_local_experts=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    tensors = tiny.weights(config)
    tensors["model.embed_tokens.weight"] = np.zeros((vocab_size, 32), np.float32)
    source = tiny.save(folder / "checkpoint", {**config, "vocab_size": vocab_size}, tensors, dtype="BF16")
    text = tokenizer.read_text("utf-8") if isinstance(tokenizer, Path) else json.dumps(tokenizer)
    (source / "tokenizer.json").write_text(text, encoding="utf-8")
    colibri.convert(source, folder / "model.colibri", dtype="q8")
    return colibri.Model(folder / "model.colibri")


class Pair:
    """A model and the reference for the same tokenizer.json."""

    def __init__(self, folder: Path, tokenizer: dict[str, Any] | Path, vocab_size: int = 1500) -> None:
        self.model = make_model(folder, tokenizer, vocab_size)
        text = tokenizer.read_text("utf-8") if isinstance(tokenizer, Path) else json.dumps(tokenizer)
        self.reference = tokenizers.Tokenizer.from_str(text)
        self.byte_level = '"ByteLevel"' in text

    def ids(self, text: str, special: bool) -> list[int]:
        self.reference.encode_special_tokens = not special
        return self.reference.encode(text, add_special_tokens=special).ids

    def compare(self, text: str) -> None:
        for special in (True, False):
            ids = self.ids(text, special)
            assert self.model.tokenize(text, special=special) == ids, (text[:80], special)
            self.compare_decoding(ids)

    def compare_decoding(self, ids: list[int]) -> None:
        for special in (True, False):
            decoded = self.model.detokenize(ids, special=special)
            expected = self.reference.decode(ids, skip_special_tokens=not special)
            # Byte pieces that form no character give one U+FFFD each; the reference gives up on valid neighbours, too.
            if self.byte_level or "\ufffd" not in expected:
                assert decoded == expected, ids[:40]
            if len(ids) < 1000:
                stream = TextStream(self.model, special=special)
                assert "".join([stream.feed(id) for id in ids] + [stream.end()]) == decoded, ids[:40]


def trained(kind: str) -> dict[str, Any]:
    """tokenizer.json of a small vocabulary whose merges run across words, so that every cut shows in the ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    rnd = random.Random(3)
    lines = [" ".join(rnd.choices(["the cat", "It's", "one\n", "3 dogs", "don't", "x1"], k=5)) for _ in range(60)]
    texts = HARD * 2 + lines + ["".join(rnd.choices(PIECES, k=12)) for _ in range(400)]
    if kind == "byte":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet, special = pre_tokenizers.ByteLevel.alphabet(), []
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
        alphabet, special = [], ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=1400, initial_alphabet=alphabet, special_tokens=special, limit_alphabet=400, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    result = json.loads(tokenizer.to_str())
    result["added_tokens"] = []
    return result


def byte_level_rule(use_regex: bool, prefix: bool = False) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": use_regex}


def split_rule(pattern: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def added(*entries: tuple[str, str]) -> list[dict[str, Any]]:
    """Added tokens by (text, letters): s special, n normalized, l lstrip, r rstrip, w single_word."""
    names = {"single_word": "w", "lstrip": "l", "rstrip": "r", "normalized": "n", "special": "s"}
    return [{"id": 0, "content": text, **{n: c in letters for n, c in names.items()}} for text, letters in entries]


ADDED = {
    "none": added(),
    "special": added(("<s>", "s"), ("</s>", "s")),
    "attributes": added(
        ("<a>", "sl"),
        ("<b>", "sr"),
        ("<c>", "slr"),
        ("<d>", "w"),
        ("cat", "w"),
        ("the", "n"),
        ("  ", "n"),
        ("   ", ""),
        ("\n\n", ""),
        (" x", "r"),
        ("é", "n"),
        ("e\u0301f", "n"),
        ("Ab", "nw"),
        ("Abc", ""),
        ("<a", "n"),
    ),
    "spaces": added(("<s>", "sn"), ("▁▁", "n"), ("a b", "nlr"), ("  ", "rl"), (" ", "r"), ("\t", "s")),
}

# The first two steps of the first DeepSeek models' pre-tokenizer (a part of the letters is enough here).
DEEPSEEK_LLM = [
    split_rule("[\r\n]"),
    split_rule("\\s?[A-Za-zµÀ-ÖØ-öø-ƺᲐ-Ჺℊ-ℓＡ-Ｚ\U00010400-\U0001044f]+"),
    split_rule("\\s?[!-/:-~！-／：-～‘-‟　-。]+"),
    split_rule("\\s+$"),
    split_rule("[一-龥ࠀ-一가-퟿]+"),
    {"type": "Digits", "individual_digits": True},
]
DEEPSEEK_CODER = [
    split_rule("[\r\n]"),
    split_rule("\\s?\\p{L}+"),
    split_rule("\\s?\\p{P}+"),
    split_rule("[一-龥ࠀ-一가-퟿]+"),
    {"type": "Digits", "individual_digits": False},
]
DEEPSEEK_V3 = [
    split_rule("\\p{N}{1,3}"),
    split_rule("[一-龥\u3040-ゟ゠-ヿ]+"),
    split_rule(
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    ),
]
PRE_TOKENIZERS = {
    "gpt2": [byte_level_rule(True)],
    "gpt2_prefix": [byte_level_rule(True, True)],
    "none": [byte_level_rule(False)],
    "deepseek_llm": [*DEEPSEEK_LLM, byte_level_rule(False)],
    "deepseek_coder": [*DEEPSEEK_CODER, byte_level_rule(False)],
    "deepseek_v3": [*DEEPSEEK_V3, byte_level_rule(False)],
    "sets": [split_rule("[^\\s\\p{L}a-c]{1,3}"), split_rule(" ?[\\p{N}\\-]+"), byte_level_rule(False)],
    "space_end": [split_rule("\\s+$"), byte_level_rule(False)],
    "digits_gpt2": [{"type": "Digits", "individual_digits": True}, byte_level_rule(True)],
    **{f"pattern{i}": [split_rule(p), byte_level_rule(False)] for i, p in enumerate(KNOWN_PATTERNS)},
    "removed": [split_rule(next(iter(KNOWN_PATTERNS)), "Removed", True), byte_level_rule(False)],
}

REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
PREPEND = {"type": "Prepend", "prepend": SPACE}
DECODERS = [
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]
STRIP = {"type": "Sequence", "decoders": DECODERS}
NO_STRIP = {"type": "Sequence", "decoders": DECODERS[:3]}
BOTH_SIDES = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "</s>", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]} for t, i in (("<s>", 1), ("</s>", 2))},
}


def metaspace(scheme: str, split: bool) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": split}


@pytest.fixture(scope="session")
def bases() -> dict[str, dict[str, Any]]:
    return {kind: trained(kind) for kind in ("byte", "characters")}


def variant(base: dict[str, Any], model: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    result = {**copy.deepcopy(base), **changes}
    result["model"].update(model or {})
    return result


def compare_all(pair: Pair, seed: int, count: int = 150) -> None:
    rnd = random.Random(seed)
    for text in HARD + ["".join(rnd.choices(PIECES, k=rnd.randint(1, 16))) for _ in range(count)]:
        pair.compare(text)
    for _ in range(30):
        pair.compare_decoding(rnd.choices(range(1500), k=6))


# ---- Every spelling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_byte_level(name: str, bases: dict[str, Any], tmp_path: Path) -> None:
    number = list(PRE_TOKENIZERS).index(name)
    tokenizer = variant(
        bases["byte"],
        {"ignore_merges": name == "removed", "merges": bases["byte"]["model"]["merges"]},
        normalizer=[None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []}][number % 3],
        pre_tokenizer={"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[name]},
        decoder=byte_level_rule(True),
        added_tokens=list(ADDED.values())[number % 4],
    )
    compare_all(Pair(tmp_path, tokenizer), number)


SENTENCEPIECE = {
    "llama": {"normalizer": {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}, "decoder": STRIP},
    "no_prefix": {"normalizer": REPLACE, "decoder": NO_STRIP},
    "nfc": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, PREPEND, REPLACE]}, "decoder": STRIP},
    "always": {"pre_tokenizer": metaspace("always", False), "decoder": STRIP},
    "first": {"pre_tokenizer": metaspace("first", False), "decoder": STRIP},
    "never": {"pre_tokenizer": metaspace("never", False), "decoder": NO_STRIP},
    "always_split": {"pre_tokenizer": metaspace("always", True), "decoder": metaspace("always", True)},
    "first_split": {"pre_tokenizer": metaspace("first", True), "decoder": metaspace("first", True)},
    "never_split": {"pre_tokenizer": metaspace("never", True), "decoder": metaspace("never", True)},
}


@pytest.mark.parametrize("tokens", ADDED)
@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece(name: str, tokens: str, bases: dict[str, Any], tmp_path: Path) -> None:
    changes = {"normalizer": None, "pre_tokenizer": None, "post_processor": BOTH_SIDES, **SENTENCEPIECE[name]}
    number = list(ADDED).index(tokens)
    tokenizer = variant(bases["characters"], {"ignore_merges": number == 2}, added_tokens=ADDED[tokens], **changes)
    compare_all(Pair(tmp_path, tokenizer), number, 60)


@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("unk", ["<unk>", None])
def test_unknown_characters(fallback: bool, fuse: bool, unk: str | None, bases: dict[str, Any], tmp_path: Path) -> None:
    """Two byte pieces are missing, so that characters with these bytes have no fallback."""
    model = {"byte_fallback": fallback, "fuse_unk": fuse, "unk_token": unk}
    tokenizer = variant(bases["characters"], model, normalizer=REPLACE, pre_tokenizer=None, decoder=NO_STRIP)
    vocab = tokenizer["model"]["vocab"]
    for piece in ("<0xE4>", "<0xF0>"):
        vocab["gone " + piece] = vocab.pop(piece)
    compare_all(Pair(tmp_path, tokenizer), 5, 60)


def test_merges_with_spaces(tmp_path: Path) -> None:
    """As pairs, where a piece may hold a space, and as strings: the same ids."""
    words = ["a", "b", " ", "c", "a ", "a b", "bc"]
    model = {
        "type": "BPE",
        "vocab": {w: i for i, w in enumerate(words)},
        "merges": [["a", " "], ["a ", "b"], ["b", "c"]],
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": NO_STRIP,
        "model": model,
    }
    pair = Pair(tmp_path / "pairs", tokenizer, 8)
    assert pair.model.tokenize("a bca") == pair.ids("a bca", True) == [5, 3, 0]
    pair.compare("bcb a")
    tokenizer["model"]["merges"] = ["b c"]
    strings = Pair(tmp_path / "strings", tokenizer, 8)
    assert strings.model.tokenize("a bc") == strings.ids("a bc", True) == [0, 2, 6]


def test_llama_ids(tmp_path: Path) -> None:
    """The pieces of Llama 2 that a few texts need, under its ids."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    vocab |= {SPACE + SPACE: 259, SPACE * 3: 1678, SPACE + "This": 910, SPACE + "is": 338, SPACE + "Hello": 15043}
    vocab |= {SPACE: 29871, ".": 29889, "cpp": 8223}
    merges: list[tuple[str, str]] = []
    for piece in (SPACE + "This", SPACE + "is", SPACE + "Hello", "cpp", SPACE * 3):
        merges += [(piece[:end], piece[end]) for end in range(1, len(piece)) if (piece[:end], piece[end]) not in merges]
    for left, right in merges:
        for part in (left, right, left + right):
            vocab.setdefault(part, 1000 + len(vocab))
    model = {
        "type": "BPE",
        "vocab": vocab,
        "merges": [list(pair) for pair in merges],
        "unk_token": "<unk>",
        "byte_fallback": True,
        "fuse_unk": True,
    }
    start = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    rest = {"pre_tokenizer": None, "post_processor": template, **SENTENCEPIECE["llama"]}
    m = make_model(tmp_path, {"version": "1.0", "added_tokens": added(("<s>", "s")), "model": model, **rest}, 32000)
    assert m.tokenize("This is 🦙.cpp") == [1, 910, 338, 29871, 243, 162, 169, 156, 29889, 8223]
    for text, ids in (("Hello", [15043]), (" Hello", [29871, 15043]), ("   Hello", [1678, 15043])):
        assert m.tokenize(text, special=False) == ids
        assert m.detokenize(ids) == text


@pytest.fixture(scope="session")
def small_pairs(bases: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Pair]]:
    gpt2 = variant(
        bases["byte"],
        pre_tokenizer=byte_level_rule(True),
        decoder=byte_level_rule(True),
        added_tokens=ADDED["attributes"],
    )
    o200k = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS["pattern1"]}
    nfc = variant(bases["byte"], normalizer={"type": "NFC"}, pre_tokenizer=o200k, decoder=byte_level_rule(True))
    llama = variant(
        bases["characters"],
        pre_tokenizer=None,
        post_processor=BOTH_SIDES,
        added_tokens=ADDED["special"],
        **SENTENCEPIECE["llama"],
    )
    folder = tmp_path_factory.mktemp("pairs")
    yield [Pair(folder / str(i), tokenizer) for i, tokenizer in enumerate((gpt2, nfc, llama))]


CHARACTERS = st.characters(exclude_categories=["Cs"])  # text that UTF-8 can hold: no lone surrogates


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.one_of(st.text(CHARACTERS), st.lists(st.one_of(st.sampled_from(PIECES), CHARACTERS)).map("".join)))
def test_any_text(text: str, small_pairs: list[Pair]) -> None:
    for pair in small_pairs:
        pair.compare(text)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.one_of(st.binary(), st.text(CHARACTERS).map(lambda t: t.encode()[1:-1])))
def test_any_bytes(data: bytes, small_pairs: list[Pair]) -> None:
    for pair in small_pairs:
        assert pair.model.tokenize(data) == pair.ids(data.decode("utf-8", "replace"), True)


def test_all_code_points(small_pairs: list[Pair]) -> None:
    """Classes and NFC of every code point, at strides in a small run of the reference."""
    points = [c for c in range(0x3400) if not 0xD800 <= c < 0xE000] + list(range(0x3400, 0x20000, 7))
    points = [c for c in points if not 0xD800 <= c < 0xE000]
    for pair in small_pairs:
        for begin in range(0, len(points), 2000):
            pair.compare("".join("a" + chr(c) + "b " for c in points[begin : begin + 2000]))


# ---- Decoding -------------------------------------------------------------------------------------------------------


def test_streaming_bytes(small_pairs: list[Pair]) -> None:
    """A four-byte character over several tokens, a lone F0 at the end, dead bytes between."""
    model = small_pairs[0].model
    ids = {b: model.tokenize(bytes([b]), special=False)[0] for b in range(128)}
    vocab = small_pairs[0].reference.get_vocab()
    shown = {**{b: chr(b) for b in (0xF0, 0xA6, 0xA9, 0xE4)}, 0x9F: "Ł", 0x99: "Ļ"}
    byte = {b: vocab[c] for b, c in shown.items()}
    stream = TextStream(model)
    llama = [byte[b] for b in "🦙".encode()]
    assert [stream.feed(i) for i in llama] == ["", "", "", "🦙"]
    assert [stream.feed(i) for i in (byte[0xF0], byte[0x9F], ids[ord("z")], byte[0xA9], byte[0xF0])] == [
        "",
        "",
        "\ufffdz",
        "\ufffd",
        "",
    ]
    assert stream.end() == "\ufffd"
    assert stream.end() == ""


def test_ids_beyond_the_tokenizer(small_pairs: list[Pair]) -> None:
    """Ids that only the embedding has decode to nothing; ids that nothing has are an error."""
    for pair in small_pairs:
        inside = pair.model.tokenize("a", special=False)
        assert pair.model.detokenize([1499, *inside, 1499]) == "a"
        for bad in (1500, -1):
            with pytest.raises(colibri.TokenError):
                pair.model.detokenize([bad])


# ---- Time -----------------------------------------------------------------------------------------------------------


def check_linear(model: colibri.Model, failures: list[str]) -> None:
    """Eight times the run takes far less than 64 times as long (times of this thread, the best of several): 24 leaves
    room for caches and noisy machines, and none for a quadratic loop."""
    for character, count in (
        ("A", 43_000),
        ("_", 50_000),
        ("Z", 131_072),
        (" ", 131_072),
        ("\n", 131_072),
        ("\u0301\u0323", 32_768),
    ):
        times = []
        for factor in (1, 8):
            data, best = (character * (count * factor)).encode(), float("inf")
            for _ in range(3):
                begin = time.thread_time()
                model.tokenize(data)
                best = min(best, time.thread_time() - begin)
            times.append(best)
        if times[1] > 24 * times[0] and times[1] > 0.1:
            failures.append(f"{character!r}: {times}")


def test_long_runs(small_pairs: list[Pair]) -> None:
    """On a stack of 128 KiB, too."""
    failures: list[str] = []
    before = threading.stack_size(128 * 1024)
    try:
        for pair in small_pairs:
            thread = threading.Thread(target=check_linear, args=(pair.model, failures))
            thread.start()
            thread.join()
    finally:
        threading.stack_size(before)
    assert not failures


# ---- Refusals -------------------------------------------------------------------------------------------------------


def build(folder: Path, tokenizer: dict[str, Any] | str, vocab_size: int = 1500) -> bytes | None:
    folder.mkdir(exist_ok=True)
    text = tokenizer if isinstance(tokenizer, str) else json.dumps(tokenizer)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    return build_tokenizer(folder, vocab_size)


def refusals(base: dict[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
    rule, ok = byte_level_rule(False), {"pre_tokenizer": byte_level_rule(True), "decoder": byte_level_rule(True)}
    strange = {"type": "Sequence", "pretokenizers": [split_rule("a(b|c)"), rule]}
    cases = {
        "pattern": ({"pre_tokenizer": strange}, r"a\(b\|c\)"),
        "behavior": (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split_rule("[a]", "MergedWithNext"), rule]}},
            "MergedWithNext",
        ),
        "pre_tokenizer": ({"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
        "normalizer": ({"normalizer": {"type": "NFKC"}}, "NFKC"),
        "decoder": ({"decoder": {"type": "WordPiece"}}, "WordPiece"),
        "post_processor": ({"post_processor": {"type": "Mystery"}}, "Mystery"),
        "dropout": ({"model": {**base["model"], "dropout": 0.1}}, "dropout"),
        "suffix": ({"model": {**base["model"], "end_of_word_suffix": "</w>"}}, "end_of_word_suffix"),
        "unigram": ({"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}, "Unigram"),
        "merge": ({"model": {**base["model"], "merges": [["a", "zzz"]]}}, "zzz"),
        "three": ({"model": {**base["model"], "merges": ["a b c"]}}, "merge 0"),
        "negative": ({"model": {**base["model"], "vocab": {"a": -1}}}, "-1"),
        "twice": ({"model": {**base["model"], "vocab": {"a": 0, "b": 0}, "merges": []}}, "same id"),
        "large": ({"model": {**base["model"], "vocab": {"a": 1500}, "merges": []}}, "vocab_size 1500"),
        "surrogate": ({"model": {**base["model"], "vocab": {"\ud800": 0}, "merges": []}}, "not Unicode"),
        "long": ({"added_tokens": added(("x" * 2000, ""))}, "2000 bytes"),
    }
    return {name: ({**base, **ok, **changes}, words) for name, (changes, words) in cases.items()}


def test_refusals(bases: dict[str, Any], tmp_path: Path) -> None:
    for name, (tokenizer, words) in refusals(bases["byte"]).items():
        with pytest.raises(ConversionError, match=words):
            build(tmp_path / name, tokenizer)


STRANGE = [None, -1, 2**40, 1.5, "x", "\ud800", "\x1b", True, [1], [[]], {"a": 1}]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths into a JSON value; of long lists and of the vocabulary only the first entries."""
    if path:
        yield path
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys[:2] if path[-1:] in (("vocab",), ("merges",), ("added_tokens",)) else keys:
        yield from places(value[key], (*path, key))


@pytest.mark.parametrize("kind", ["byte", "characters"])
def test_any_value_anywhere(kind: str, bases: dict[str, Any], tmp_path: Path) -> None:
    """A payload, or one sentence that can be printed."""
    base = {"byte": {"pre_tokenizer": byte_level_rule(True), "decoder": byte_level_rule(True)}}
    changes = base.get(kind, {"pre_tokenizer": None, **SENTENCEPIECE["llama"]})
    tokenizer = variant(bases[kind], added_tokens=ADDED["attributes"], post_processor=BOTH_SIDES, **changes)
    vocab = dict(list(tokenizer["model"]["vocab"].items())[:20])
    tokenizer["model"] |= {"vocab": vocab, "merges": [], "unk_token": None}
    for path in places(tokenizer):
        for value in STRANGE:
            changed = copy.deepcopy(tokenizer)
            place = changed
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            try:
                build(tmp_path, changed)
            except ConversionError as error:
                assert str(error).isprintable(), path


def test_damaged_json(tmp_path: Path) -> None:
    for name, text in {
        "deep": '{"a":' + "[" * 10_000,
        "cut": '{"model"',
        "list": "[]",
        "empty": "",
        "null": '{"model": null}',
    }.items():
        with pytest.raises(ConversionError, match=r"tokenizer\.json"):
            build(tmp_path / name, text)


def test_no_tokenizer(tmp_path: Path) -> None:
    assert build_tokenizer(tmp_path, 10) is None
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ConversionError, match="save_pretrained"):
        build_tokenizer(tmp_path, 10)


# ---- Real vocabularies ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", params=VOCABULARIES)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = SHARED / "tokenizers" / request.param / "tokenizer.json"
    if not path.is_file():
        pytest.skip(f"no {path}")
    size = {"mixtral": 32000, "qwen3": 151936, "deepseek_v3": 129280, "gpt_oss": 201088}[request.param]
    pair = Pair(tmp_path_factory.mktemp(request.param), path, size)
    pair.name = request.param
    return pair


def test_real_hard_strings(real: Pair) -> None:
    compare_all(real, 1, 400)
    rnd = random.Random(9)
    for _ in range(300):
        limit = rnd.choice((0x80, 0x3000, 0x20000, 0x110000))
        points = [rnd.randrange(limit) for _ in range(12)]
        real.compare("".join(chr(c) for c in points if not 0xD800 <= c < 0xE000))


def test_real_known_ids(real: Pair) -> None:
    if real.name == "qwen3":
        assert real.model.tokenize("!\u0085") == [0, 126, 227]
    if real.name == "mixtral":
        assert real.model.tokenize("This is 🦙.cpp") == [1, 851, 349, 28705, 243, 162, 169, 156, 28723, 5222]
        for text, ids in (("Hello", [22557]), (" Hello", [28705, 22557]), ("   Hello", [2287, 22557])):
            assert real.model.tokenize(text, special=False) == ids


def test_real_books(real: Pair) -> None:
    """Whole texts: the same ids, and the text back. Two of the books; COLIBRI_ALL_BOOKS=1: all of them."""
    texts = [p.read_text("utf-8") for p in sorted((SHARED / "text").glob("*.txt"))]
    archive = SHARED / "text" / "childrens_books.tar.gz"
    if archive.is_file():
        with tarfile.open(archive) as tar:
            members = [m for m in tar if m.isfile() and m.size > 1000]
            members = members if os.environ.get("COLIBRI_ALL_BOOKS") else members[:2]
            texts += [tar.extractfile(m).read().decode("utf-8") for m in members]
    if not texts:
        pytest.skip(f"no texts in {SHARED / 'text'}")
    for text in texts:
        ids = real.model.tokenize(text, special=False)
        assert ids == real.ids(text, False)
        assert real.model.detokenize(ids, special=True) == text
