"""The chat template and how a conversation becomes tokens with a loss on the assistant's words alone."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

Message = Mapping[str, Any]
"""``role``, ``content`` and, for an assistant that calls, ``tool_calls``, as the OpenAI API has them."""

# Every tag trims its own white space, so the text does not depend on an environment's trim_blocks or lstrip_blocks.
TEMPLATE = """\
{%- macro text(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content -%}
    {%- for part in content -%}{{- part.text -}}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set ahead = messages and messages[0].role in ['system', 'developer'] -%}
{%- if tools or ahead -%}
  {{- '<|system|>' -}}
  {%- if ahead -%}{{- text(messages[0].content) -}}{%- endif -%}
  {%- if tools -%}
    {%- if ahead -%}{{- '\\n' -}}{%- endif -%}
    {{- 'Tools: [' -}}
    {%- for tool in tools -%}
      {{- (tool.function or tool) | tojson -}}
      {%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
    {%- endfor -%}
    {{- ']' -}}
  {%- endif -%}
  {{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role in ['system', 'developer'] -%}
    {%- if not loop.first -%}{{- '<|system|>' -}}{{- text(message.content) -}}{{- '<|end|>' -}}{%- endif -%}
  {%- elif message.role == 'user' -%}
    {{- '<|user|>' -}}{{- text(message.content) -}}{{- '<|end|>' -}}
  {%- elif message.role == 'tool' -%}
    {{- '<|tool|>' -}}{{- text(message.content) -}}{{- '<|end|>' -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<|assistant|>' -}}{{- text(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {{- '<tool_call>{"name": ' -}}{{- function.name | tojson -}}{{- ', "arguments": ' -}}
      {%- if function.arguments is string -%}
        {{- function.arguments -}}
      {%- else -%}
        {{- function.arguments | tojson -}}
      {%- endif -%}
      {{- '}</tool_call>' -}}
    {%- endfor -%}
    {{- '<|end|>' -}}
  {%- else -%}
    {{- raise_exception('a message has a role other than system, developer, user, assistant or tool') -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


class TemplateError(ValueError):
    """The template refused a conversation."""


def _refuse(reason: str) -> None:
    raise TemplateError(reason)


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


@cache
def compiled_template() -> Template:
    """The template in a sandbox, with the two names Hugging Face promises to templates."""
    environment = ImmutableSandboxedEnvironment(autoescape=False)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(TEMPLATE)


def render(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, prompt: bool = False) -> str:
    """A conversation as text; with ``prompt`` it ends where the assistant is to speak."""
    return compiled_template().render(messages=messages, tools=tools or None, add_generation_prompt=prompt)


@dataclass(frozen=True)
class Chat:
    """A conversation to learn from; every assistant message counts."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, *turns: str, system: str | None = None) -> "Chat":
        """User and assistant in turn, perhaps after a system message."""
        ahead: list[Message] = [{"role": "system", "content": system}] if system else []
        roles = ("user", "assistant")
        return cls((*ahead, *({"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns))))


@dataclass(frozen=True)
class Encoded:
    """Token ids of a chat and, for each, whether the model is to learn to say it."""

    ids: list[int]
    learned: list[bool]


def encode_chat(tokenizer: Tokenizer, chat: Chat) -> Encoded:
    """Tokens of a chat; learned are the assistant's words and the end token that closes them."""
    ids: list[int] = []
    learned: list[bool] = []
    done = ""
    for index, message in enumerate(chat.messages):
        if message["role"] != "assistant":
            continue
        for text, learn in (
            (render(chat.messages[:index], chat.tools, prompt=True), False),
            (render(chat.messages[: index + 1], chat.tools), True),
        ):
            if not text.startswith(done):
                raise TemplateError("the template renders an earlier part of a chat anew")
            piece = tokenizer.encode(text[len(done) :], add_special_tokens=False).ids
            ids += piece
            learned += [learn] * len(piece)
            done = text
    return Encoded(ids, learned)
