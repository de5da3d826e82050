"""tokenizer.json -> the tokenizer payload of a .colibri file.

Reads what Hugging Face `tokenizers` writes, for the two kinds of vocabulary that MoE models use (byte-level BPE, and
BPE over characters with U+2581 for a space, as SentencePiece makes it), and refuses by name whatever it cannot
reproduce exactly: a tokenizer that is almost right is worse than none. `lib/model/tokenizer_format.h` specifies the
payload, `tokenizer_payload.py` lays it out.
"""

from __future__ import annotations

import os
import re
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import ConversionError
from .json_file import read_json
from .tokenizer_payload import AddedToken, Flags, Kind, Token, Vocabulary, pack_payload
from .tokenizer_steps import METASPACE, Step, character_steps, metaspace_scheme, word_steps

MAX_ADDED_BYTES = 1024


def build_tokenizer(folder: Path, vocab_size: int) -> bytes | None:
    """The payload for a checkpoint folder, None if it has no tokenizer.

    Args:
        folder: holds tokenizer.json.
        vocab_size: rows of the model's embedding; no token may have an id beyond.

    Raises:
        ConversionError: the tokenizer is damaged, of another kind, or uses something that is not supported; the
            sentence names it.
    """
    path = Path(folder) / "tokenizer.json"
    if not os.path.lexists(path):  # a link that leads nowhere is an error
        for name in ("tokenizer.model", "vocab.json", "tiktoken.model"):
            if (Path(folder) / name).is_file():
                raise ConversionError(
                    f"{folder} has {name} but no tokenizer.json; write one with transformers: "
                    f"AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
                )
        return None
    reader = _Reader(read_json(path), str(path), vocab_size)
    try:
        return reader.payload()
    except UnicodeEncodeError as error:
        raise ConversionError(f"{path}: a string is not Unicode text: {error.object[:40]!r}") from None


# The stand-ins of byte-level vocabularies: printable Latin-1 stands for itself, the rest for U+0100, U+0101, ...
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
STAND_INS = {chr(b): b for b in _PRINTABLE}
STAND_INS.update({chr(0x100 + i): b for i, b in enumerate(b for b in range(256) if b not in _PRINTABLE)})
_TO_LATIN1 = {ord(c): chr(b) for c, b in STAND_INS.items()}
_TO_LATIN1.update({c: "\uffff" for c in range(256) if chr(c) not in STAND_INS})  # cannot be encoded: not a stand-in


def byte_level(text: str) -> bytes | None:
    """The bytes that a byte-level piece stands for, None if a character is no stand-in for a byte."""
    try:
        return text.translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        return None


@dataclass
class _Reader:
    """One tokenizer.json on its way into a payload."""

    json: dict[str, Any]
    where: str
    vocab_size: int
    flags: Flags = field(default_factory=lambda: Flags(0))
    kind: Kind = Kind.SENTENCEPIECE
    steps: list[Step] = field(default_factory=list)

    def fail(self, sentence: str) -> ConversionError:
        return ConversionError(f"{self.where}: {sentence}")

    def payload(self) -> bytes:
        model = self.json.get("model")
        if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
            kind = model.get("type") if isinstance(model, dict) else None
            raise self.fail(f"the model is of type {kind!r}; BPE with a vocabulary is supported")
        self._pre_tokenizer()
        self._normalizer()
        self._decoder()
        self._model_flags(model)
        pieces = self._pieces(model["vocab"])
        added = self._added_tokens(pieces)
        merges = self._merges(model, pieces)
        byte_ids = self._byte_ids(pieces)
        prefix, suffix = self._post_processor()
        tokens, aliases = self._tokens(pieces, added)
        vocabulary = Vocabulary(
            kind=self.kind,
            flags=self.flags,
            tokens=tokens,
            aliases=aliases,
            merges=merges,
            added=[self._matcher(token, id) for id, token in added],
            byte_ids=byte_ids,
            unk_id=self._unk(model, pieces, byte_ids),
            prefix=prefix,
            suffix=suffix,
            steps=self.steps,
        )
        return pack_payload(vocabulary)

    # ---- Rules ------------------------------------------------------------------------------------------------------

    def _parts(self, name: str, list_name: str) -> list[dict[str, Any]]:
        """A rule and what is nested in it, as a flat list; each has a "type"."""
        flat: list[dict[str, Any]] = []
        waiting = [self.json.get(name)]
        while waiting:
            rule = waiting.pop(0)
            if rule is None:
                continue
            if not isinstance(rule, dict) or not isinstance(rule.get("type"), str):
                raise self.fail(f"{name} is not understood: {str(rule)[:80]}")
            if rule["type"] == "Sequence":
                inner = rule.get(list_name)
                if not isinstance(inner, list):
                    raise self.fail(f"the Sequence in {name} has no list {list_name}")
                waiting = [*inner, *waiting]
            else:
                flat.append(rule)
        return flat

    def _pre_tokenizer(self) -> None:
        rules = self._parts("pre_tokenizer", "pretokenizers")
        if any(rule["type"] == "ByteLevel" for rule in rules):
            self.kind = Kind.BYTE_LEVEL
            self.steps, prefix_space = word_steps(rules, self.where)
            if prefix_space:
                self.flags |= Flags.PREFIX_SPACE
            return
        self.steps, scheme = character_steps(rules, self.where)
        if scheme is not None:
            self.flags |= Flags.METASPACE
        if scheme == "always":
            self.flags |= Flags.METASPACE_ALWAYS
        elif scheme == "first":
            self.flags |= Flags.METASPACE_FIRST

    def _normalizer(self) -> None:
        done = Flags(0)
        for rule in self._parts("normalizer", "normalizers"):
            if rule["type"] == "NFC":
                flag = Flags.NFC
            elif rule["type"] == "Prepend" and rule.get("prepend") == METASPACE:
                flag = Flags.PREPEND
            elif (
                rule["type"] == "Replace"
                and rule.get("pattern") == {"String": " "}
                and rule.get("content") == METASPACE
            ):
                flag = Flags.REPLACE
            else:
                raise self.fail(f"the normalizer {str(rule)[:120]} is not supported")
            if flag <= done:  # flags are numbered in the order in which the reader applies them
                raise self.fail(f"the normalizer {rule['type']} stands in an order that is not supported")
            if self.kind == Kind.BYTE_LEVEL and flag != Flags.NFC:
                raise self.fail(f"the normalizer {rule['type']} with a byte-level vocabulary is not supported")
            done |= flag
        self.flags |= done

    def _decoder(self) -> None:
        rules = self._parts("decoder", "decoders")
        names = [rule["type"] for rule in rules]
        if self.kind == Kind.BYTE_LEVEL:
            if names != ["ByteLevel"]:
                raise self.fail(f"the decoder {names} with a byte-level vocabulary is not supported; ByteLevel is")
            return
        if names == ["Metaspace"]:
            self.flags |= Flags.DECODE_REPLACE
            if metaspace_scheme(rules[0], self.where) != "never":
                self.flags |= Flags.DECODE_DROP_FIRST
            return
        if not re.fullmatch(r"Replace(,ByteFallback)?(,Fuse(,Strip)?)?", ",".join(names)):
            raise self.fail(
                f"the decoder {names} is not supported; Replace, ByteFallback, Fuse, Strip in this order are"
            )
        replace, strip = rules[0], rules[-1]
        if replace.get("pattern") != {"String": METASPACE} or replace.get("content") != " ":
            raise self.fail(f"the decoder {str(replace)[:120]} is not supported; Replace of U+2581 by a space is")
        self.flags |= Flags.DECODE_REPLACE
        if "ByteFallback" in names:
            self.flags |= Flags.DECODE_BYTES
        if "Strip" in names:
            if (strip.get("content"), strip.get("start"), strip.get("stop")) != (" ", 1, 0):
                raise self.fail(f"the decoder {str(strip)[:120]} is not supported; Strip of one space at the start is")
            self.flags |= Flags.DECODE_STRIP

    def _post_processor(self) -> tuple[list[int], list[int]]:
        """Ids added before and after the text."""
        prefix: list[int] = []
        suffix: list[int] = []
        for rule in self._parts("post_processor", "processors"):
            if rule["type"] == "ByteLevel":
                continue  # moves offsets only
            if rule["type"] in ("BertProcessing", "RobertaProcessing"):
                before, after = [self._pair_id(rule.get("cls"))], [self._pair_id(rule.get("sep"))]
            elif rule["type"] == "TemplateProcessing":
                before, after = self._template(rule)
            else:
                raise self.fail(f"the post-processor {rule['type']} is not supported; TemplateProcessing is")
            prefix, suffix = before + prefix, suffix + after
        return prefix, suffix

    def _pair_id(self, pair: Any) -> int:
        if isinstance(pair, list) and len(pair) == 2:
            return self._id(pair[1], f"the post-processor's {pair[0]!r}")
        raise self.fail(f"the post-processor's {pair!r} is not a pair of token and id")

    def _template(self, rule: dict[str, Any]) -> tuple[list[int], list[int]]:
        sides: list[list[int]] = [[]]
        known = rule.get("special_tokens")
        items = rule.get("single")
        if not isinstance(items, list) or not isinstance(known, dict):
            raise self.fail("the post-processor's template has no list `single` or no special_tokens")
        for item in items:
            if isinstance(item, dict) and "Sequence" in item:
                sides.append([])
                continue
            part = item.get("SpecialToken") if isinstance(item, dict) else None
            name = part.get("id") if isinstance(part, dict) else None
            entry = known.get(name) if isinstance(name, str) else None
            ids = entry.get("ids") if isinstance(entry, dict) else None
            if not isinstance(ids, list):
                raise self.fail(f"the post-processor's template has an unknown part {str(item)[:80]}")
            sides[-1] += [self._id(i, f"the post-processor's {name!r}") for i in ids]
        if len(sides) != 2:
            raise self.fail(f"the post-processor's template holds the text {len(sides) - 1} times, 1 is supported")
        return sides[0], sides[1]

    # ---- Vocabulary -------------------------------------------------------------------------------------------------

    def _id(self, value: Any, name: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.fail(f"the id of {name} is {value!r}")
        if value >= self.vocab_size:
            raise self.fail(f"the id of {name} is {value}, but the model has vocab_size {self.vocab_size}")
        return value

    def _model_flags(self, model: dict[str, Any]) -> None:
        if model.get("type", "BPE") != "BPE":
            raise self.fail(f"the model is of type {model['type']!r}; BPE is supported")
        for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(name):
                raise self.fail(f"the model's {name} {model[name]!r} is not supported")
        names = {"byte_fallback": Flags.BYTE_FALLBACK, "fuse_unk": Flags.FUSE_UNK, "ignore_merges": Flags.IGNORE_MERGES}
        for name, flag in names.items():
            if model.get(name):
                self.flags |= flag

    def _pieces(self, vocab: dict[str, Any]) -> dict[str, int]:
        """The model's own vocabulary: piece -> id, ids checked."""
        pieces = {}
        used: dict[int, str] = {}
        for text, value in vocab.items():
            id = self._id(value, f"the token {text!r}")
            if used.setdefault(id, text) != text:
                raise self.fail(f"the tokens {used[id]!r} and {text!r} have the same id {id}")
            pieces[text] = id
        if not pieces:
            raise self.fail("the vocabulary is empty")
        return pieces

    def _added_tokens(self, pieces: dict[str, int]) -> list[tuple[int, dict[str, Any]]]:
        """(id, entry) of the added tokens. An id is the vocabulary's if the token stands there, else the next free one:
        what `tokenizers` does, whatever the entry says."""
        entries = self.json.get("added_tokens") or []
        if not isinstance(entries, list):
            raise self.fail("added_tokens is not a list")
        result: dict[str, tuple[int, dict[str, Any]]] = {}
        owners: dict[int, str] = {}
        for entry in entries:
            text = entry.get("content") if isinstance(entry, dict) else None
            if not isinstance(text, str):
                raise self.fail(f"an added token has no content: {str(entry)[:80]}")
            if not text:
                continue
            id = result[text][0] if text in result else pieces.get(text)
            if id is None:
                id = max(len(pieces), max(owners, default=-1) + 1)
            self._id(id, f"the added token {text!r}")
            if owners.setdefault(id, text) != text:
                raise self.fail(f"the added tokens {owners[id]!r} and {text!r} have the same id {id}")
            result[text] = (id, entry)
        by_id = {id: text for text, id in pieces.items()}
        for id, text in owners.items():
            if by_id.get(id, text) != text:
                raise self.fail(f"the added token {text!r} and the token {by_id[id]!r} have the same id {id}")
        return list(result.values())

    def _added_text(self, entry: dict[str, Any]) -> str:
        """What an added token is looked for as, and decoded to: normalised if it says so."""
        text = entry["content"]
        if entry.get("normalized"):
            text = unicodedata.normalize("NFC", text) if Flags.NFC in self.flags else text
            text = METASPACE + text if Flags.PREPEND in self.flags else text
            text = text.replace(" ", METASPACE) if Flags.REPLACE in self.flags else text
        return text

    def _matcher(self, entry: dict[str, Any], id: int) -> AddedToken:
        text = self._added_text(entry)
        data = text.encode("utf-8")
        if len(data) > MAX_ADDED_BYTES:
            raise self.fail(
                f"the added token {text[:40]!r}... has {len(data)} bytes, at most {MAX_ADDED_BYTES} are supported"
            )
        return AddedToken(
            id=id,
            text=data,
            normalized=bool(entry.get("normalized")),
            special=bool(entry.get("special")),
            lstrip=bool(entry.get("lstrip")),
            rstrip=bool(entry.get("rstrip")),
            single_word=bool(entry.get("single_word")),
        )

    def _tokens(
        self, pieces: dict[str, int], added: list[tuple[int, dict[str, Any]]]
    ) -> tuple[dict[int, Token], list[tuple[int, bytes]]]:
        """(what each id decodes to, (id, piece) of those found under another piece than that). An added token decodes
        to what it is looked for as, and counts as special if that is the text of a special token."""
        special = {entry["content"] for _, entry in added if entry.get("special")}
        texts = {id: text for text, id in pieces.items()}
        aliases = []
        for id, entry in added:
            text = self._added_text(entry)
            piece = self._piece(texts[id]) if texts.get(id, text) != text else None
            if piece is not None:
                aliases.append((id, piece))
            texts[id] = text
        own = set(pieces.values()) - {id for id, _ in aliases}
        tokens = {}
        for id, text in texts.items():
            piece = self._piece(text)
            tokens[id] = Token(
                data=text.encode("utf-8") if piece is None else piece,
                findable=piece is not None and id in own,
                special=text in special,
                byte=self.kind == Kind.SENTENCEPIECE and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", text) is not None,
            )
        return tokens, aliases

    def _piece(self, text: str) -> bytes | None:
        """The bytes under which a piece is found, None if no text can become it."""
        return byte_level(text) if self.kind == Kind.BYTE_LEVEL else text.encode("utf-8")

    def _merges(self, model: dict[str, Any], pieces: dict[str, int]) -> list[tuple[int, int, int]]:
        """(left, right, merged) by rank. Sets CUT_AT_SPACE if no merge puts U+2581 behind another character."""
        merges: list[tuple[int, int, int]] = []
        crosses = METASPACE not in pieces
        entries = model.get("merges")
        if not isinstance(entries, list):
            raise self.fail("the model has no list of merges")
        for entry in entries:
            pair = entry.split(" ") if isinstance(entry, str) else entry
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
                raise self.fail(f"merge {len(merges)} is not a pair of tokens: {str(entry)[:80]!r}")
            left, right = pair
            try:
                merges.append((pieces[left], pieces[right], pieces[left + right]))
            except KeyError as error:
                raise self.fail(
                    f"merge {len(merges)} needs the token {error.args[0]!r}, which is not in the vocabulary"
                ) from None
            if right[:1] == METASPACE and left[-1:] != METASPACE:
                crosses = True
        if (
            not crosses
            and self.kind == Kind.SENTENCEPIECE
            and not any(re.search(f"[^{METASPACE}]{METASPACE}", p) for p in pieces)
        ):
            self.flags |= Flags.CUT_AT_SPACE
        return merges

    def _byte_ids(self, pieces: dict[str, int]) -> list[int]:
        """Id of each byte: of its stand-in (byte level) or its fallback piece <0xXX>; -1: none."""
        if self.kind == Kind.SENTENCEPIECE:
            return [pieces.get(f"<0x{b:02X}>", -1) for b in range(256)]
        ids = [-1] * 256
        for character, b in STAND_INS.items():
            ids[b] = pieces.get(character, -1)
        if -1 in ids and Flags.BYTE_FALLBACK in self.flags:
            raise self.fail(
                f"byte_fallback with a byte-level vocabulary that lacks the byte {ids.index(-1)} is not supported"
            )
        self.flags &= ~Flags.BYTE_FALLBACK
        return ids

    def _unk(self, model: dict[str, Any], pieces: dict[str, int], byte_ids: list[int]) -> int:
        unk = model.get("unk_token")
        if unk is not None and not isinstance(unk, str):
            raise self.fail(f"unk_token must be a string, not {unk!r}")
        if unk is None or unk in pieces:
            return -1 if unk is None else pieces[unk]
        if -1 in byte_ids or (self.kind == Kind.SENTENCEPIECE and Flags.BYTE_FALLBACK not in self.flags):
            raise self.fail(f"unk_token {unk!r} is not in the vocabulary")
        return -1  # never needed: every byte has an id
