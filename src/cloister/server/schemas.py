"""Request schemas of the OpenAI API: no coercion, no unknown fields, explicit limits."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, PlainValidator

from cloister.server.errors import invalid
from cloister.server.rules import CHAT, CHAT_MESSAGE, COMPLETION, RESPONSE_FORMAT
from cloister.text.grammar.checking import MAX_CHOICES

Extra = dict[str, JsonValue]

MAX_STOP: Final = 16
"""Stop strings in one request (OpenAI allows 4)."""
MAX_STOP_CHARS: Final = 1024
MAX_LOGPROBS: Final = 20
MAX_LOGIT_BIAS: Final = 1024
MAX_STOP_TOKENS: Final = 256
MAX_PROMPTS: Final = 256
"""Prompts in one request to /v1/completions."""
MAX_METADATA: Final = 16
MAX_TOOLS: Final = 128
MAX_CACHE_SALT: Final = 256
"""Characters of `cache_salt`."""
MAX_DOCUMENTS: Final = 64
"""Documents in one request."""
MAX_MESSAGES: Final = 16_384
"""Messages in a conversation, and parts in a message."""
INT64: Final = 2**63
INT32: Final = 2**31
BELOW_WINDOW: Final[Extra] = {"x-below": "max_model_len"}
TOKEN_KEYS: Final[Extra] = {"propertyNames": {"pattern": "^[0-9]{1,9}$"}}
CHOICES: Final[Extra] = {"minItems": 1, "maxItems": MAX_CHOICES, "items": {"type": "string", "minLength": 1}}


class Strict(BaseModel):
    """Base of every request object: no type conversion, unknown fields are refused, inputs never appear in errors."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True, frozen=True)


class StreamOptions(Strict):
    """Additional content of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[StopString], Field(max_length=MAX_STOP)]
Stop = Annotated[Stops, BeforeValidator(_as_list, json_schema_input_type=StopString | Stops)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=INT32)]
MinP = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=-INT64, lt=INT64)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=10)]
TokenId = Annotated[int, Field(ge=0, lt=INT32, json_schema_extra={"x-below": "vocab_size"})]
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)]
PromptCacheKey = Annotated[str, Field(max_length=MAX_CACHE_SALT)]
MetadataText = Annotated[str, Field(max_length=512)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class JsonSchemaSpec(Strict):
    """A schema that the answer must match, regardless of `strict`."""

    name: FunctionName | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Strict):
    """The form of an answer, in OpenAI's format."""

    model_config = RESPONSE_FORMAT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaSpec | None = None


class StructuredOutputs(Strict):
    """The form of an answer, in the format of newer versions of vLLM."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = Field(None, max_length=MAX_CHOICES, json_schema_extra=CHOICES)
    grammar: str | None = None


class GenerationBody(Strict):
    """Common fields of chat and text completions. None means unset."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, json_schema_extra={"x-most": "max_n"})
    stop: Stop | None = None
    max_tokens: int | None = Field(None, ge=0, lt=INT32, json_schema_extra=BELOW_WINDOW)
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIAS, json_schema_extra=TOKEN_KEYS)] | None = None

    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: int | None = Field(None, ge=0, lt=INT32, json_schema_extra=BELOW_WINDOW)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    priority: int | None = Field(None, ge=-INT32, lt=INT32)
    cache_salt: CacheSalt | None = None
    prompt_cache_key: PromptCacheKey | None = None

    use_beam_search: bool | None = None
    best_of: int | None = Field(None, ge=1, json_schema_extra={"x-most": "max_n"})
    length_penalty: float | None = Field(None, ge=-10, le=10)
    early_stopping: bool | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, max_length=MAX_CHOICES, json_schema_extra=CHOICES)
    guided_grammar: str | None = None
    grammar: str | None = None

    # Known fields without effect here: type-checked and ignored.
    user: str | None = None
    metadata: Annotated[dict[str, MetadataText], Field(max_length=MAX_METADATA)] | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of the stream has the counts so far."""
        return bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats)


class TextPart(Strict):
    """A part of a message's content that is text."""

    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    """Where an image is: in a data URL. `detail` is of no effect: the model's own processor decides."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(Strict):
    """A part of a user's message that is an image, for a model that sees."""

    type: Literal["image_url"]
    image_url: ImageUrl


class FunctionCall(Strict):
    """An earlier function call, with its arguments (JSON as a string)."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call in the history of a conversation."""

    id: str
    type: Literal["function"]
    function: FunctionCall
    index: int | None = None


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(max_length=MAX_MESSAGES)]
Content = Annotated[Parts, BeforeValidator(_as_parts, json_schema_input_type=str | Parts)]


class Message(Strict):
    """One message of a conversation, of any role. The last six fields occur in answers that are sent back."""

    model_config = CHAT_MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_MESSAGES)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str | None:
        """The content's text parts, joined."""
        return None if self.content is None else "".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def has_images(self) -> bool:
        """Whether a part of the content is an image."""
        return self.content is not None and any(isinstance(part, ImagePart) for part in self.content)

    @property
    def reasoned(self) -> str | None:
        """The reasoning of an answer, under either of its names."""
        return self.reasoning_content or self.reasoning


class FunctionSpec(Strict):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionSpec


class FunctionChoice(Strict):
    """The name of one function."""

    name: FunctionName


class PlainChoice(Strict):
    """Whether the model may or must call, as a single word."""

    type: Literal["none", "auto", "required"]


class NamedChoice(Strict):
    """The model must call this tool."""

    type: Literal["function"]
    function: FunctionChoice


class AllowedTools(Strict):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Strict):
    """The model may or must call some of the tools only."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _as_choice(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


AnyChoice = Annotated[PlainChoice | NamedChoice | AllowedChoice, Field(discriminator="type")]
ToolChoice = Annotated[
    AnyChoice, BeforeValidator(_as_choice, json_schema_input_type=Literal["none", "auto", "required"] | AnyChoice)
]


class TemplateSettings(Strict):
    """The variables of a chat template that a client may set."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


DocumentWeight = Annotated[float, Field(ge=0.1, le=10)]


class DocumentInput(Strict):
    """A document that is encoded separately."""

    text: Annotated[str, Field(min_length=1)]


class ChatDocument(DocumentInput):
    """A document of a conversation, with the names that chat templates read."""

    title: Annotated[str, Field(min_length=1)] | None = None


class ChatBody(GenerationBody):
    """Body of /v1/chat/completions, to which the other conversation routes convert theirs."""

    model_config = CHAT

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: TemplateSettings | None = None
    documents: Annotated[list[ChatDocument], Field(max_length=MAX_DOCUMENTS)] | None = None
    documents_temperature: DocumentWeight | None = None
    documents_scale: DocumentWeight | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1, lt=INT32, json_schema_extra=BELOW_WINDOW)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


def check_prompt(value: object) -> list[str] | list[list[int]]:
    """Returns any of the four forms of a prompt (text, texts, token ids, lists of token ids) as a list of prompts.

    Raises:
        InvalidRequestError: it is none of them, or empty.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise invalid("`prompt` must be a string, a list of strings, token ids, or a list of lists of token ids.", "prompt")
    if not value:
        raise invalid("`prompt` is empty; send at least one token.", "prompt", "empty_prompt")
    if len(value) > MAX_PROMPTS and type(value[0]) is not int:  # before each is looked at
        raise invalid(f"`prompt` may be a list of at most {MAX_PROMPTS} prompts; send several requests.", "prompt")
    if _is_token_list(value):
        return [value]
    if all(isinstance(item, str) for item in value) or all(_is_token_list(item) for item in value):
        return value
    raise invalid("`prompt` must be a list of strings, of token ids (whole numbers), or of lists of token ids.", "prompt")


def _is_token_list(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


_Tokens = Annotated[list[TokenId], Field(min_length=1)]
PromptText = Annotated[str, Field(min_length=1)]
_Several = Field(min_length=1, max_length=MAX_PROMPTS)
PromptInput = PromptText | _Tokens | Annotated[list[PromptText], _Several] | Annotated[list[_Tokens], _Several]
"""The four forms of a prompt, for the reference of the API."""


SchemaName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class ModuleChoice(Strict):
    """A module of a schema, with an argument for each of its parameters."""

    name: SchemaName
    arguments: Annotated[dict[SchemaName, str], Field(max_length=16)] | None = None


def _as_module(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


AnyModule = Annotated[ModuleChoice, BeforeValidator(_as_module, json_schema_input_type=SchemaName | ModuleChoice)]


class SchemaChoice(Strict):
    """Modules of a schema that was sent to /v1/prompt_schemas."""

    name: SchemaName
    modules: Annotated[list[AnyModule], Field(min_length=1, max_length=MAX_DOCUMENTS)]


class CompletionBody(GenerationBody):
    """Body of /v1/completions."""

    model_config = COMPLETION

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(check_prompt, json_schema_input_type=PromptInput)]
    documents: Annotated[list[DocumentInput], Field(min_length=1, max_length=MAX_DOCUMENTS)] | None = None
    documents_prefix: str | None = None
    prompt_schema: SchemaChoice | None = None
    documents_temperature: DocumentWeight | None = None
    documents_scale: DocumentWeight | None = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
