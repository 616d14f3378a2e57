"""Chat templates: messages and tools to the one text that the model was tuned on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cloister.text.guard import MARK, Guard
from cloister.text.source import open_source
from cloister.text.special import SpecialTokens
from cloister.types.errors import InvalidRequestError, ModelError

MAX_RENDERED_CHARS = 32 * 2**20

_NO_TEMPLATE = "this model has no chat template; send a plain prompt to /v1/completions"
_REFUSED = "the model's chat template cannot take these messages; check their roles, their order and their fields"
_TOO_LONG = "the model's chat template renders these messages to too long a text; send fewer or shorter ones"


class ChatTemplate:
    """A model's chat templates, run in a sandbox: they come with the weights and are not ours.

    Args:
        sources: name -> Jinja source; "default", and "tool_use" where the model has one for tools.
        special: the model's added tokens; templates see the named ones, and users cannot write the control ones.

    Raises:
        ModelError: a template is not valid Jinja.
    """

    def __init__(self, sources: Mapping[str, str], special: SpecialTokens) -> None:
        self._special = special
        self._guard = Guard(special)
        self._sources = dict(sources)
        self._templates = {name: _compile(source) for name, source in sources.items()}

    @classmethod
    def load(cls, path: str | Path) -> ChatTemplate:
        """Reads chat_template.jinja or tokenizer_config.json's `chat_template`, or a GGUF file's. A model may have none.

        Raises:
            ModelError: the template is not valid Jinja, or the tokenizer is missing.
        """
        source = open_source(Path(path))
        return cls(source.templates(), SpecialTokens.parse(source.tokenizer(), source.config()))

    @property
    def exists(self) -> bool:
        """Whether the model has a template at all."""
        return "default" in self._templates

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Returns the text to tokenize with `Tokenizer.encode(text)`, which knows the marks in it (see `guard`).

        Where no content spells a control token, that is what transformers' `apply_chat_template` renders.

        Args:
            messages, tools: as in the OpenAI API, JSON values only.
            add_generation_prompt: end where the assistant speaks.
            variables: more for the template, such as `enable_thinking`.

        Raises:
            InvalidRequestError: no template, or it refuses the messages.
        """
        if not self.exists:
            raise InvalidRequestError(_NO_TEMPLATE, param="messages", code="no_chat_template")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        given = {
            **self._guard.mark(variables),
            **self._special.named,
            "messages": self._guard.mark(messages),
            "tools": self._guard.mark(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(name, given)
        return text if self._special.are_literal else text + MARK

    def _render(self, name: str, variables: dict[str, Any]) -> str:
        blocks, size = [], 0
        try:
            for block in self._templates[name].generate(variables):
                blocks.append(block)
                size += len(block)
                if size > MAX_RENDERED_CHARS:
                    raise InvalidRequestError(_TOO_LONG, param="messages")
        except InvalidRequestError:
            raise
        except _RefusalError as refusal:
            raise InvalidRequestError(self._reason(name, str(refusal)), param="messages") from None
        except Exception:  # a template may fail in any way, and what it says may hold content
            raise InvalidRequestError(_REFUSED, param="messages") from None
        return "".join(blocks)

    def _reason(self, name: str, message: str) -> str:
        """Returns what a template says if it is written in the template word for word, and so holds no content."""
        return message if message and MARK not in message and message in self._sources[name] else _REFUSED


class _RefusalError(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}`, which marks what the assistant says for training, changes no text."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"the model's chat template is not valid Jinja: line {error.lineno}: {error.message}") from None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training: no HTML escapes, letters as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise _RefusalError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
