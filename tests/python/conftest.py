"""Fixtures: a tiny random model with a tokenizer and a chat template, converted once per test run; Ctrl-C."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('Unknown role') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    return [chr(b) if b in shown else chr(256 + sum(x not in shown for x in range(b))) for b in range(256)]


def tokenizer_json() -> dict:
    """Byte-level BPE: 0 <s>, 1 </s>, 2 … 257 the bytes, a few merges; <s> is put in front."""
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"), ("o", "n")]
    words = ["<s>", "</s>", *byte_alphabet(), *("".join(pair) for pair in merges)]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": words[i], **special} for i in (0, 1)],
        "normalizer": None, "pre_tokenizer": byte_level, "decoder": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {word: i for i, word in enumerate(words)}, "merges": [list(pair) for pair in merges],
        },
    }  # fmt: skip


def write_checkpoint(folder: Path, tokenizer: bool = True, eos: bool = True, positions: int = 512) -> Path:
    """A Mixtral of two layers, 8 experts, top 2, vocabulary 270 (six ids more than the tokenizer has), made for so
    many positions. Without `eos` its texts never end."""
    special = {"bos_token_id": 0, "eos_token_id": 1 if eos else None}
    tiny.save(folder, tiny.mixtral(vocab_size=270, max_position_embeddings=positions, **special))
    if tokenizer:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()), encoding="utf-8")
        config = {"bos_token": "<s>", "eos_token": "</s>" if eos else None, "chat_template": CHAT_TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint's folder."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="session")
def tiny_models(tiny_checkpoint: Path) -> dict[str, Path]:
    """It as .colibri files, by dtype: "f32" and "q8"."""
    import colibri

    paths = {dtype: tiny_checkpoint.parent / f"tiny-{dtype}.colibri" for dtype in ("f32", "q8")}
    for dtype, path in paths.items():
        colibri.convert(tiny_checkpoint, path, dtype=dtype)
    return paths


@pytest.fixture(scope="session")
def tiny_model(tiny_models: dict[str, Path]) -> Path:
    """The q8 file."""
    return tiny_models["q8"]


@pytest.fixture(scope="session")
def textless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The f32 file of a checkpoint without tokenizer and chat template."""
    import colibri

    folder = tmp_path_factory.mktemp("textless")
    path = folder / "textless.colibri"
    colibri.convert(write_checkpoint(folder / "checkpoint", tokenizer=False), path, dtype="f32")
    return path


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A job in the background may have been told to ignore SIGINT, and so would its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
