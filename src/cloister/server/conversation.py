"""Chat format of a model: renders messages as its prompt, and defines what its answers may contain besides text.

Chat completions, responses and messages are all converted to a `ChatBody` first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import msgspec

from cloister.server.documents import read_chat_documents
from cloister.server.errors import invalid
from cloister.server.images import CutImage, ImageReader
from cloister.server.parse import ignored_fields
from cloister.server.sampling import check_text
from cloister.server.schemas import AllowedChoice, ChatBody, FunctionSpec, ImagePart, Message, NamedChoice, TextPart
from cloister.text import ChatTemplate, Tokenizer
from cloister.text import grammar as grammars
from cloister.text.answer_parser import REASONINGS, AnswerForm, ChannelMarks, Marks, detect_reasoning
from cloister.text.tools import FAMILIES, Tool, ToolCallFormat, detect_family
from cloister.text.tools.base import json_value, literal
from cloister.text.tools.harmony import FINAL
from cloister.types.config import ServerConfig
from cloister.types.documents import Documents
from cloister.types.images import ImageTile
from cloister.types.request import Grammar, GrammarKind, ModelInfo, SamplingParams

# The tools of a request: the offered ones, those that may be called, and whether a call is required.


_NO_PARAMETERS: Final = {"properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        offered: tools in the prompt.
        callable: tools that the model may call, by name; empty if it may not call.
        is_forced: a call is required.
        is_one: at most one call.
        places: path of each tool's parameters in the request, for errors.
    """

    offered: tuple[Tool, ...] = ()
    callable: Mapping[str, Tool] = field(default_factory=dict)
    is_forced: bool = False
    is_one: bool = False
    places: Mapping[str, str] = field(default_factory=dict)

    def to_template(self) -> list[dict[str, Any]] | None:
        """Returns the tools in the format of chat templates."""
        return [tool.to_template() for tool in self.offered] or None

    def grammar(self, family: ToolCallFormat, spell: Callable[[str], str], answer: Grammar | None) -> Grammar | None:
        """Returns the grammar of an answer that must call, or that may call or else has a form; otherwise the requested one.

        Args:
            spell: writes a marker in Lark's notation.
            answer: the form that the client requests.

        Raises:
            InvalidRequestError: the answer's form cannot be combined with calls.
        """
        if not self.callable or (answer is None and not self.is_forced):
            return answer
        tools = [_checked(tool, self.places[name]) for name, tool in self.callable.items()]
        source = family.grammar(tools, spell, is_one=self.is_one)
        if answer is not None and not self.is_forced:
            source = source.replace("start: ", "calls: ", 1) + f"\nstart: calls | answer\nanswer: {_json_rule(answer)}"
        return Grammar(GrammarKind.LARK, source)


def read_tools(body: ChatBody) -> ToolUse:
    """Reads `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        InvalidRequestError: they contradict each other, or a tool's parameters are not the schema of an object.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice is not None and choice.type not in ("none", "auto"):
            raise invalid("`tool_choice` asks for a call and there are no `tools`; send some.", "tool_choice")
        return ToolUse()
    tools = {spec.function.name: _tool(spec.function, f"tools[{i}].function") for i, spec in enumerate(body.tools)}
    if len(tools) < len(body.tools):
        raise invalid("Two of `tools` have the same name; give each its own.", "tools", "invalid_value")
    if choice is not None and choice.type == "none":
        return ToolUse()
    may, must = tools, choice is not None and choice.type == "required"
    if isinstance(choice, NamedChoice):
        may, must = _some(tools, [choice]), True
    elif isinstance(choice, AllowedChoice):
        may, must = _some(tools, choice.allowed_tools.tools), choice.allowed_tools.mode == "required"
    is_one = body.parallel_tool_calls is False or isinstance(choice, NamedChoice)
    places = {spec.function.name: f"tools[{i}].function.parameters" for i, spec in enumerate(body.tools)}
    return ToolUse(tuple(tools.values()), may, must, is_one, places)


def _tool(function: FunctionSpec, path: str) -> Tool:
    parameters = function.parameters or _NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise invalid(f"`{path}.parameters` must be a JSON schema of type object.", f"{path}.parameters", "invalid_value")
    if not isinstance(parameters.get("properties", {}), dict):
        raise invalid(f"`{path}.parameters` must have an object of `properties`.", f"{path}.parameters", "invalid_value")
    return Tool(function.name, {"type": "object"} | parameters, function.description)


def _json_rule(answer: Grammar) -> str:
    if answer.kind not in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT):
        raise invalid(
            "An answer in a form other than JSON cannot call tools; set `tool_choice` to none or required.", "tool_choice"
        )
    return json_value(json.loads(answer.source or '{"type": "object"}'))


def _checked(tool: Tool, param: str) -> Tool:
    """Returns a tool whose parameters a grammar can enforce."""
    grammars.check_schema_size(tool.parameters, param)
    schema = grammars.check_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(tool.parameters)), param)
    return replace(tool, parameters=json.loads(schema.source))


def _some(tools: Mapping[str, Tool], choices: Sequence[NamedChoice]) -> dict[str, Tool]:
    names = [choice.function.name for choice in choices]
    if not all(name in tools for name in names):
        raise invalid("`tool_choice` names a tool that is not among `tools`.", "tool_choice", "invalid_value")
    return {name: tools[name] for name in names}


FALLBACK_FAMILY: Final = "hermes"
"""Instruction for the call format if the model's template defines none."""
NO_REASONING: Final = "none"


@dataclass(frozen=True, slots=True)
class Opening:
    """A prepared conversation.

    Attributes:
        token_ids: the prompt.
        form: what the answer may contain besides text; None for nothing.
        grammar: grammar of the answer, including calls if allowed.
        shown_token_ids: control tokens that the answer's parser needs.
        images: images of the prompt.
        documents: parts of the prompt that are encoded separately.
    """

    token_ids: list[int]
    form: AnswerForm | None
    grammar: Grammar | None
    shown_token_ids: tuple[int, ...]
    images: tuple[ImageTile, ...] = ()
    documents: Documents | None = None

    def shape(self, sampling: SamplingParams) -> SamplingParams:
        """Returns the sampling parameters with those that the conversation requires."""
        return msgspec.structs.replace(sampling, grammar=self.grammar, shown_token_ids=self.shown_token_ids)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The chat format of one model.

    Attributes:
        family: family of its tool-call format.
        marks: markers around its reasoning, if it reasons.
        images: reads the images of a conversation; None if the model takes none.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    family: ToolCallFormat
    marks: Marks | None
    images: ImageReader | None = None

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, template: ChatTemplate, config: ServerConfig, images: ImageReader | None = None
    ) -> ChatFormat:
        """Determines it from the settings, else from the chat template."""
        family = config.tool_parser or detect_family(template.source) or FALLBACK_FAMILY
        reasoning = config.reasoning_parser or detect_reasoning(template.source) or NO_REASONING
        marks = None if reasoning == NO_REASONING else REASONINGS.get(reasoning)
        return cls(tokenizer, template, FAMILIES.get(family), marks, images)

    @property
    def takes_images(self) -> bool:
        """Whether a conversation may have images."""
        return self.images is not None and self.images.is_allowed

    def open(
        self, body: ChatBody, grammar: Grammar | None = None, model: ModelInfo | None = None, num_links: int = 0
    ) -> Opening:
        """Renders a conversation and tokenizes it.

        Args:
            grammar: grammar that the client requests for the answer.
            model: the model that will read it, and may encode documents separately; None to count tokens only.
            num_links: link tokens that its adapter has for each document.

        Raises:
            InvalidRequestError: the model does not support it; the message says why.
            ContextLengthError: it is too long to be worth tokenizing.
        """
        tools = read_tools(body)
        messages = template_messages(body.messages)
        images = self._read_images(body.messages)
        variables = {
            "tools": tools.to_template(),
            "add_generation_prompt": body.add_generation_prompt is not False,
            "continue_final_message": _continues(body),
            "call_example": self.family.example,
            **self._thinking(body),
        }
        render = partial(_render, self.template, variables)
        pieces = None
        if body.documents and model is not None:
            pieces, prompt = read_chat_documents(body, messages, self.template, render, self.tokenizer, model, num_links)
        else:
            prompt = render(messages)
        if grammar is not None and not tools.callable and isinstance(self.marks, ChannelMarks):
            prompt += FINAL
        grammar = tools.grammar(self.family, self._spell, grammar)
        # A grammar applies from the first token on, so there is no reasoning, for which the prompt may have opened a marker.
        form = self._form(tools, prompt, self.marks if grammar is None else None)
        if self.images is not None and images:
            prompt = self.images.processor.expand(prompt)
        if model is not None:
            check_text(prompt, self.tokenizer, model, "messages")
        token_ids = self.tokenizer.encode(prompt)
        if pieces is not None:
            token_ids = pieces.token_ids[: pieces.documents.links_end] + token_ids
        tiles: tuple[ImageTile, ...] = ()
        if self.images is not None and images:
            token_ids, tiles = self.images.place(token_ids, images)
        return Opening(
            token_ids=token_ids,
            form=form,
            grammar=grammar,
            shown_token_ids=self._shown(form),
            images=tiles,
            documents=None if pieces is None else pieces.documents,
        )

    def _read_images(self, messages: Sequence[Message]) -> list[CutImage]:
        """Decodes the images of a conversation.

        Raises:
            InvalidRequestError: the model takes no images, or one cannot be used.
        """
        urls = [
            part.image_url.url
            for message in messages
            if message.has_images
            for part in message.content or ()
            if isinstance(part, ImagePart)
        ]
        if not urls:
            return []
        if self.images is None:
            raise invalid(
                "`messages` has an image, but what is served here reads text only.", "messages", "unsupported_parameter"
            )
        return self.images.read(urls)

    def _form(self, tools: ToolUse, prompt: str, marks: Marks | None) -> AnswerForm | None:
        if marks is None and not tools.callable:
            return None
        return AnswerForm(
            marks=marks,
            is_open=marks is not None and marks.are_open(prompt),
            family=self.family if tools.callable else None,
            tools=tools.callable,
            parallel=not tools.is_one,
        )

    def _thinking(self, body: ChatBody) -> dict[str, Any]:
        """Returns the template's variables for reasoning. Options that it does not support are ignored, or refused."""
        told: dict[str, Any] = {}
        asked = body.chat_template_kwargs.model_dump(exclude_none=True) if body.chat_template_kwargs is not None else {}
        for name, value in asked.items():
            if self.template.knows(name):
                told[name] = value
            elif value:
                _ignore(f"chat_template_kwargs.{name}")
        effort = body.reasoning_effort
        if effort is None or told:
            return told
        if self.template.knows("reasoning_effort"):
            return {"reasoning_effort": effort}
        if self.template.knows("enable_thinking"):
            return {"enable_thinking": effort != "none"}
        if (effort == "none") == (self.marks is not None):  # otherwise the model behaves as requested, with or without a switch
            _ignore("reasoning_effort")
        return {}

    def _shown(self, form: AnswerForm | None) -> tuple[int, ...]:
        if form is None:
            return ()
        marks: tuple[str, ...] = () if form.marks is None else form.marks.all
        if form.family is not None:
            marks += (*form.family.marks, *form.family.inner_marks)
        return tuple(token_id for mark in marks if (token_id := self._control_id(mark)) is not None)

    def _spell(self, mark: str) -> str:
        token_id = self._control_id(mark)
        return literal(mark) if token_id is None else f"<[{token_id}]>"

    def _control_id(self, text: str) -> int | None:
        token_id = self.tokenizer.token_id(text)
        return token_id if token_id in self.tokenizer.special.control_ids else None


def _render(template: ChatTemplate, variables: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
    return template.render(messages, **variables, **more)


def _continues(body: ChatBody) -> bool:
    if not body.continue_final_message:
        return False
    last = body.messages[-1]
    if body.add_generation_prompt or last.role != "assistant" or last.tool_calls:
        raise invalid(
            "`continue_final_message` needs a last message of the assistant without calls, and no `add_generation_prompt`.",
            "continue_final_message",
        )
    return True


def _ignore(param: str) -> None:
    """Records an option that the model's template does not support.

    Raises:
        InvalidRequestError: no field may be ignored.
    """
    fields = ignored_fields()
    if fields.is_strict:
        message = f"`{param}` is refused: this model's chat template has no switch for its reasoning. Leave it out."
        raise invalid(message, param, "unsupported_parameter")
    fields.add(param)


def _with_images(message: Message, path: str) -> list[dict[str, Any]]:
    """Returns the parts of a content that has images; a template writes the model's placeholder for each of them."""
    if message.role != "user":
        raise invalid(f"`{path}.content` has an image; these belong to the role user.", f"{path}.content")
    return [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
        for part in message.content or ()
    ]


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns messages in the format of chat templates.

    Raises:
        InvalidRequestError: a message lacks a field that its role requires, or has one that is not allowed.
    """
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: Message, path: str) -> dict[str, Any]:
    if message.text is None and not (message.role == "assistant" and (message.tool_calls or message.reasoned)):
        raise invalid(f"`{path}.content` is missing; it is required.", f"{path}.content", "missing_required_parameter")
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"`{path}.tool_calls` is only for the role assistant.", f"{path}.tool_calls")
    if (message.tool_call_id is None) == (message.role == "tool"):
        raise invalid(f"`{path}.tool_call_id` is required for the role tool, and only there.", f"{path}.tool_call_id")
    # Templates use the role's older name.
    rendered: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    rendered["content"] = _with_images(message, path) if message.has_images else message.text
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_calls:
        rendered["tool_calls"] = [call.model_dump(exclude={"index"}) for call in message.tool_calls]
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if message.reasoned:
        rendered["reasoning_content"] = message.reasoned
    return rendered
