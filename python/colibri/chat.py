"""Chat templates: a conversation to token ids, exactly as the model's own Jinja template says.

Templates come from untrusted files, so they run in a sandbox. What cannot be followed exactly is an error, never a
guess.
Needs jinja2 (``pip install 'libcolibri[chat]'``).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any

from . import _ffi
from .errors import ColibriError, InvalidArgumentError, UnsupportedError
from .model import Model


def _environment() -> Any:
    """A sandboxed Jinja environment with the names that Hugging Face templates rely on."""
    try:
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox
    except ImportError:
        raise ColibriError("chat templates need jinja2: pip install 'libcolibri[chat]'") from None

    class GenerationTag(jinja2.ext.Extension):
        """``{% generation %} … {% endgeneration %}`` marks the assistant's words for training; here it is its body."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own spelling

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    def strftime_now(pattern: str) -> str:
        return datetime.datetime.now().strftime(pattern)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment


class ChatTemplate:
    """A model's chat template, ready to use.

    Raises:
        UnsupportedError: the model has no template, or one that this Jinja does not understand.
        ColibriError: jinja2 is not installed.
    """

    def __init__(self, model: Model) -> None:
        text = model.chat_template
        if text is None:
            raise UnsupportedError(
                f"{model.path} has no chat template; it continues text: use 'run' or Session.generate"
            )
        environment = _environment()
        import jinja2

        try:
            self._template = environment.from_string(text)
        except (jinja2.TemplateError, RecursionError) as exc:
            raise UnsupportedError(f"the chat template of {model.path} cannot be read: {exc}") from None
        self._model = model
        config = model.config
        self._tokens = {
            "bos_token": self._token_text(config["bos_token"]),
            "eos_token": self._token_text(config["eos_tokens"][0] if config["eos_tokens"] else None),
        }
        spelled = model.metadata.get("template_tokens")  # by the tokenizer's settings, which need not agree
        if isinstance(spelled, dict):
            self._tokens.update((name, text) for name, text in spelled.items() if isinstance(text, str))

    def _token_text(self, token: int | None) -> str:
        return self._model.detokenize([token], special=True) if token is not None else ""

    def render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The conversation as text.

        Args:
            messages: dicts with ``role`` ("system", "user", "assistant") and ``content``.
            add_generation_prompt: end where the assistant's answer begins.
            variables: further names that the template reads (``tools``, ``enable_thinking``, …).

        Raises:
            InvalidArgumentError: the template refuses the conversation, for example a system message.
        """
        import jinja2

        names = {**self._tokens, "tools": None, "documents": None, **variables}
        try:
            return str(self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **names))
        except (jinja2.TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as exc:
            raise InvalidArgumentError(f"the chat template refuses this conversation: {exc}") from None

    def tokens(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The conversation as token ids. The template alone says which special tokens there are: none is added to
        them, so a template that writes the begin-of-sequence token gives exactly one."""
        text = self.render(messages, add_generation_prompt, **variables)
        return self._model._tokenize(text, _ffi.COLIBRI_TOKENIZE_PARSE_SPECIAL)
