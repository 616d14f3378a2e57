"""Renders messages and tools with a model's chat template; system prompts that a release ships, as tokens."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cloister.text.history import EXAMPLE, Habits, Message, completed, with_objects
from cloister.text.source import open_source
from cloister.text.spelling import SpecialTokens
from cloister.text.tokenizer import MARK, Guard, Tokenizer
from cloister.types.errors import CloisterError, ConfigError, InvalidRequestError, ModelError

MAX_RENDERED_CHARS = 32 * 2**20

_NO_TEMPLATE = "this model has no chat template; send a plain prompt to /v1/completions, or with `cloister run --raw`"
_REFUSED = "the model's chat template cannot take these messages; check their roles, their order and their fields"
_NO_CONTINUING = "the model's chat template cannot end inside a message; end the conversation with one of the user"
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
        self._habits = {name: Habits.of(source) for name, source in sources.items()}

    @classmethod
    def load(cls, path: str | Path, special: SpecialTokens | None = None) -> ChatTemplate:
        """Reads chat_template.jinja or tokenizer_config.json's `chat_template`, or a GGUF file's. A model may have none.

        Args:
            special: those of the model's tokenizer; None reads them anew, which takes seconds for a large vocabulary.

        Raises:
            ModelError: the template is not valid Jinja, or the tokenizer is missing.
        """
        source = open_source(Path(path))
        return cls(source.templates(), special or SpecialTokens.parse(source.tokenizer(), source.config()))

    @property
    def exists(self) -> bool:
        """Whether the model has a template at all."""
        return "default" in self._templates

    @property
    def source(self) -> str:
        """The templates as they were written, the one for tools first; nothing for a model without one."""
        return "\n".join(self._sources[name] for name in sorted(self._sources, reverse=True))

    @property
    def mark(self) -> str:
        """What may stand between a text of the template and one of a user, so that no control token is made of both."""
        return "" if self._special.are_literal else MARK

    def knows(self, variable: str) -> bool:
        """Whether the templates read a variable, such as `enable_thinking`."""
        return re.search(rf"\b{re.escape(variable)}\b", self.source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        call_example: str = EXAMPLE,
        **variables: Any,
    ) -> str:
        """Returns the text to tokenize with `Tokenizer.encode(text)`, which knows the marks in it (see `Guard`).

        Where no content spells a control token, that is what transformers' `apply_chat_template` renders.

        Args:
            messages, tools: as in the OpenAI API, JSON values only. A template without a place for tools gets them as
                text of the system message, and calls and their results as text of their messages.
            add_generation_prompt: end where the assistant speaks.
            continue_final_message: end inside the last message instead, at the end of its content.
            call_example: how a call looks, for a template without a place for tools.
            variables: more for the template, such as `enable_thinking`.

        Raises:
            InvalidRequestError: no template, or it refuses the messages.
        """
        if not self.exists:
            raise InvalidRequestError(_NO_TEMPLATE, param="messages", code="no_chat_template")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if continue_final_message:
            place, add_generation_prompt = secrets.token_hex(16), False
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": (last.get("content") or "") + place}]
        given = {
            **self._guard.mark(variables),
            **self._special.named,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render_somehow(name, given, self._ways(name, messages, tools, call_example))
        if continue_final_message:
            text, found, _ = text.rpartition(place)
            if not found:
                raise InvalidRequestError(_NO_CONTINUING, param="messages")
        return text + self.mark

    def _ways(
        self, name: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, example: str
    ) -> Iterator[dict[str, Any]]:
        """Yields messages and tools as transformers has them, then in other ways that templates ask for."""
        habits = self._habits[name]
        fitted = habits.fit(messages, tools, example)
        # A few templates take tools that are none for a list, and descriptions for granted.
        for listed in ({"tools": tools or None}, {"tools": completed(tools)} if tools else {}):
            yield {"messages": with_objects(fitted), **listed}
            yield {"messages": fitted, **listed}  # a few add arguments to text as they stand
        if tools and not habits.takes_tools:  # and a few refuse system messages
            in_user = habits.fit(messages, tools, example, in_system=False)
            yield {"messages": with_objects(in_user), "tools": None}

    def _render_somehow(self, name: str, given: Mapping[str, Any], ways: Iterable[Mapping[str, Any]]) -> str:
        """Renders in the first way that the template takes; raises what it said of the first."""
        first: _FailedError | None = None
        for way in ways:
            try:
                return self._render(name, {**given, **self._guard.mark(way)})
            except _FailedError as failure:
                first = first or failure
        assert first is not None
        raise first

    def _render(self, name: str, variables: dict[str, Any]) -> str:
        """Renders one template.

        Raises:
            InvalidRequestError: the text is too long; a `_FailedError` if the template does not take what it is given.
        """
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
            raise _FailedError(self._reason(name, str(refusal)), param="messages") from None
        except Exception:  # a template may fail in any way, and what it says may hold content
            raise _FailedError(_REFUSED, param="messages") from None
        return "".join(blocks)

    def _reason(self, name: str, message: str) -> str:
        """Returns what a template says if it is written in the template word for word, and so holds no content."""
        return message if message and MARK not in message and message in self._sources[name] else _REFUSED


class _RefusalError(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _FailedError(InvalidRequestError):
    """The template made no text of what it was given."""


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


MAX_BYTES: Final = 1 << 20
_WHERE: Final = {"param": "release_prefixes"}


def read_release_prefixes(path: Path, tokenizer: Tokenizer, template: ChatTemplate) -> list[list[int]]:
    """Returns the token ids with which conversations begin that open with these system prompts.

    They are shipped with a release: the only content whose KV every scope may share.

    Args:
        path: a JSON list of texts.

    Raises:
        ConfigError: the file is no such list, or the model's template takes no system message by itself.
    """
    prompts = _read(path)
    found = []
    for prompt in prompts:
        try:
            text = template.render([{"role": "system", "content": prompt}], add_generation_prompt=False)
        except CloisterError as error:
            raise ConfigError(
                f"a release prefix cannot be written by the model's chat template: {error.message}", **_WHERE
            ) from None
        found.append(tokenizer.encode(text))
    return found


def _read(path: Path) -> list[str]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} has more than {MAX_BYTES} bytes; keep release prefixes short", **_WHERE)
        prompts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the release prefixes {path} cannot be read: {error.strerror}", **_WHERE) from None
    except ValueError:
        raise ConfigError(f"{path} is not JSON; write a list of system prompts", **_WHERE) from None
    if not isinstance(prompts, list) or not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
        raise ConfigError(f"{path} is not a list of texts; write a JSON list of system prompts", **_WHERE)
    return prompts
