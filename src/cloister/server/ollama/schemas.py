"""Request schemas of Ollama's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from cloister.server.embeddings import MAX_INPUTS
from cloister.server.parse import Refused, refuse_unsupported
from cloister.server.rules import OLLAMA_GENERATION
from cloister.server.schemas import (
    INT32,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_TOOLS,
    FunctionName,
    FunctionSpec,
    MinP,
    Penalty,
    RepetitionPenalty,
    Seed,
    Stop,
    Strict,
    Temperature,
    TopK,
    TopP,
)

_TEXT: Final = "models here read and write text only"
_CUT: Final = "a prompt that is too long is refused, not cut"

REFUSED: Final[Mapping[str, Refused]] = {
    "template": Refused("the template is the model's own; a client's would run here as a program", ("",)),
    "context": Refused("nothing is kept here; send the whole conversation to /api/chat", ([],)),
    "images": Refused("send images to /api/chat", ([],)),
    "width": Refused(_TEXT, (0,)),
    "height": Refused(_TEXT, (0,)),
    "steps": Refused(_TEXT, (0,)),
    "truncate": Refused(_CUT, (False,)),
    "shift": Refused("an answer ends with the window", (False,)),
}
"""Fields of /api/chat and /api/generate."""
REFUSED_OPTIONS: Final[Mapping[str, Refused]] = {
    "mirostat": Refused("this sampler is not available", (0,)),
    "tfs_z": Refused("this sampler is not available", (1, 1.0)),
    "typical_p": Refused("this sampler is not available", (1, 1.0)),
}
NO_FIELDS: Final[Mapping[str, Refused]] = {}


def _check_options(value: object) -> object:
    return refuse_unsupported(value, REFUSED_OPTIONS) if isinstance(value, dict) else value


class Options(Strict):
    """Sampling parameters. Unset ones are taken from the model's generation_config.json."""

    num_predict: int | None = Field(None, gt=-INT32, lt=INT32)
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None

    # Load options, which are the operator's: type-checked and ignored.
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_thread: int | None = None
    main_gpu: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None
    penalize_newline: bool | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None


CheckedOptions = Annotated[Options, BeforeValidator(_check_options, json_schema_input_type=Options)]
KeepAlive = int | float | Annotated[str, Field(max_length=32)]


class _Body(Strict):
    """Common fields of inference requests; `keep_alive` has no effect, because the operator controls loading."""

    model: str | None = None
    options: CheckedOptions | None = None
    keep_alive: KeepAlive | None = None


class _GenerationBody(_Body):
    model_config = OLLAMA_GENERATION

    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class OllamaFunction(Strict):
    """An earlier function call with its arguments."""

    name: FunctionName
    arguments: dict[str, Any]
    index: int | None = None


class OllamaCall(Strict):
    """A call in the history of a conversation."""

    function: OllamaFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Strict):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[str], Field(max_length=MAX_MESSAGES)] | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaTool(Strict):
    """A function that the model may call."""

    function: FunctionSpec
    type: Literal["function"] = "function"


class OllamaChatBody(_GenerationBody):
    """Body of /api/chat. Without messages it only checks that the model is available."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateBody(_GenerationBody):
    """Body of /api/generate. Without a prompt it only checks that the model is available."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) and value else [] if value == "" else value


Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_INPUTS)]


class OllamaEmbedBody(_Body):
    """Body of /api/embed. `truncate` false refuses a text that is longer than the window; else it is truncated."""

    input: Annotated[Texts, BeforeValidator(_as_list, json_schema_input_type=str | Texts)]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1, lt=INT32, json_schema_extra={"x-most": "hidden_size"})] | None = None


class OllamaEmbeddingsBody(_Body):
    """Body of /api/embeddings, the older form of /api/embed."""

    prompt: str | None = None


class OllamaShowBody(Strict):
    """Body of /api/show; `name` is the older name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class OllamaPullBody(Strict):
    """Body of /api/pull; `name` is the older name of `model`."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    insecure: bool | None = None
