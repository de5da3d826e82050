"""The small files of a checkpoint: special tokens, chat template, tokenizer, and the metadata that says where a file
came from.
"""

from __future__ import annotations

import json
import os
from typing import Any

from .checkpoint import Checkpoint
from .config import Config
from .errors import ConversionError
from .json_file import read_bytes, read_json
from .layout import MAX_EOS
from .spec import ModelSpec

TEMPLATE_TOKENS = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]


def special_tokens(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, Any]:
    """{"bos": id or -1, "pad": id or -1, "eos": [ids]}: generation_config.json first, then config.json."""
    path = checkpoint.folder / "generation_config.json"
    sources = [Config(read_json(path), str(path))] if os.path.lexists(path) else []
    sources.append(checkpoint.config)
    known = [("bos", spec.bos_default), ("eos", spec.eos_default), ("pad", spec.pad_default)]
    found: dict[str, list[int]] = {}
    for name, default in known:
        ids = [i for source in sources for i in _ids(source, f"{name}_token_id")]
        absent = all(f"{name}_token_id" not in source.values for source in sources)
        ids = [default] if absent and default is not None and default < spec.vocab_size else ids
        for i in ids:
            if i >= spec.vocab_size:
                checkpoint.warn(f"{name}_token_id {i} was ignored: vocab_size is {spec.vocab_size}")
        found[name] = list(dict.fromkeys(i for i in ids if i < spec.vocab_size))
    if len(found["eos"]) > MAX_EOS:
        checkpoint.warn(f"of {len(found['eos'])} eos_token_id values only the first {MAX_EOS} are kept")
    return {"bos": (found["bos"] or [-1])[0], "pad": (found["pad"] or [-1])[0], "eos": found["eos"][:MAX_EOS]}


def _ids(source: Config, name: str) -> list[int]:
    value = source.get(name)
    values = value if isinstance(value, list) else [] if value is None or value == -1 else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in values):
        raise ConversionError(f"{source.where}: {name} must be a token id or a list of them, not {value!r}")
    return values


def chat_template(checkpoint: Checkpoint) -> bytes | None:
    """chat_template.jinja, else tokenizer_config.json's chat_template (of several, the one named "default")."""
    path = checkpoint.folder / "chat_template.jinja"
    if os.path.lexists(path):
        return _utf8(read_bytes(path), str(path))
    path = checkpoint.folder / "tokenizer_config.json"
    template = read_json(path).get("chat_template") if os.path.lexists(path) else None
    if isinstance(template, list):
        named = [t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"]
        if not named:
            checkpoint.warn(f"{path.name}: chat_template was ignored: none of its templates is named default")
        template = named[0] if named else None
    if template is None:
        return None
    if not isinstance(template, str):
        raise ConversionError(f"{path}: chat_template must be a string")
    return _utf8(template.encode("utf-8", "surrogatepass"), str(path)) or None


def template_tokens(checkpoint: Checkpoint) -> dict[str, str]:
    """The special tokens that a chat template names (bos_token and the like), as the tokenizer's own settings spell
    them: config.json's ids need not be the same. Null is the empty text, as it is in a template.
    """
    found = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        path = checkpoint.folder / file
        for name, value in read_json(path).items() if os.path.lexists(path) else ():
            if name not in TEMPLATE_TOKENS:
                continue
            text = value.get("content") if isinstance(value, dict) else "" if value is None else value
            if not isinstance(text, str):
                raise ConversionError(f"{path}: {name} must be a string, not {value!r}")
            found[name] = text
    return found


def _utf8(data: bytes, where: str) -> bytes:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConversionError(f"{where}: the chat template is not UTF-8") from None
    return data


def metadata(**values: Any) -> bytes:
    """A JSON object, keys sorted: equal input gives equal bytes."""
    return json.dumps(values, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode("utf-8", "replace")
