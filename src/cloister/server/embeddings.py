"""/v1/embeddings: request bodies, replies, and jobs with pooled requests."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from pydantic import Field, PlainValidator

from cloister.policy.gate import Admission
from cloister.server.errors import invalid
from cloister.server.jobs import Generate, GenerationJob, make_job, run_job
from cloister.server.parse import parse_body
from cloister.server.prompts import PromptReader
from cloister.server.schemas import INT32, Strict, TokenId
from cloister.types.errors import ContextLengthError, EngineError
from cloister.types.request import Embedding, PoolingParams, SamplingParams

MAX_INPUTS: Final = 2048
"""Maximum texts in one request, as in the OpenAI API."""
NOTHING: Final = SamplingParams(max_tokens=0)
NO_VECTORS: Final = "This model classifies texts and makes no vectors; ask /classify, or /v1/rerank if it has one class."

Text = str | list[int]
Tokens = Annotated[list[TokenId], Field(min_length=1)]
_Several = Field(min_length=1, max_length=MAX_INPUTS)
Words = Annotated[str, Field(min_length=1)]
TextInput = Words | Tokens | Annotated[list[Words], _Several] | Annotated[list[Tokens], _Several]
"""The four forms of an input, for the reference of the API."""


def text_list(field: str) -> Callable[[object], list[Text]]:
    """Returns a validator of the four forms (text, texts, token ids, lists of token ids), which converts any to a list.

    Args:
        field: name of the field, for the InvalidRequestError about anything else.
    """

    def check(value: object) -> list[Text]:
        if isinstance(value, list) and len(value) > MAX_INPUTS and type(value[0]) is not int:  # before each is looked at
            raise invalid(f"`{field}` may be a list of at most {MAX_INPUTS} texts; send several requests.", field)
        if isinstance(value, str) or _is_token_list(value):
            value = [value]
        if not isinstance(value, list) or not _are_texts(value):
            raise invalid(
                f"`{field}` must be a string, a list of strings, token ids, or a list of lists of token ids, and not empty.",
                field,
            )
        return value

    return check


def _are_texts(values: list[object]) -> bool:
    return bool(values) and (all(isinstance(item, str) and item for item in values) or all(map(_is_token_list, values)))


def _is_token_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


class PooledBody(Strict):
    """Common fields of all requests for vectors."""

    model: str | None = None
    priority: int | None = Field(None, ge=-INT32, lt=INT32)
    user: str | None = None


class EmbeddingBody(PooledBody):
    """Body of /v1/embeddings. `normalize` is an extension: None uses the default in the model's files."""

    input: Annotated[list[Text], PlainValidator(text_list("input"), json_schema_input_type=TextInput)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=INT32, json_schema_extra={"x-most": "hidden_size"})] | None = None
    normalize: bool | None = None


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Token counts of a reply without an answer."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(msgspec.Struct, frozen=True):
    """One vector: numbers, or float32 little-endian in base64."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True):
    """Reply of /v1/embeddings."""

    model: str
    data: list[EmbeddingItem]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True)
class EmbeddingJob:
    """A parsed request of /v1/embeddings."""

    job: GenerationJob
    is_base64: bool


def read_embeddings(reader: PromptReader, raw: bytes, admission: Admission) -> EmbeddingJob:
    """Reads a body of /v1/embeddings.

    Raises:
        InvalidRequestError, ContextLengthError, NotFoundError: the request cannot be answered; the message says why.
        PolicyError: the profile refuses a requested feature.
    """
    body = parse_body(raw, EmbeddingBody)
    size, own = reader.model.hidden_size, reader.model.pooling
    if body.dimensions is not None and body.dimensions > size:
        raise invalid(f"`dimensions` may be at most {size} with this model.", "dimensions", "invalid_value")
    normalize = own.normalize if body.normalize is None else body.normalize
    pooling = PoolingParams(kind=own.kind, normalize=normalize, dimensions=body.dimensions)
    job = pooled_job(reader, body, [("input", text) for text in body.input], pooling, admission, prefix="embd")
    return EmbeddingJob(job, body.encoding_format == "base64")


def pooled_job(
    reader: PromptReader,
    body: PooledBody,
    texts: Sequence[tuple[str, Text]],
    pooling: PoolingParams,
    admission: Admission,
    *,
    prefix: str,
) -> GenerationJob:
    """Returns a job with a pooled request for each (name of its field, text); errors as in `read_embeddings`."""
    encoder = reader.model.encoder
    if encoder is not None and encoder.labels and pooling.kind != "classify":
        raise invalid(NO_VECTORS, "model", "no_embeddings")
    prompts = [_tokenize(reader, text, field) for field, text in texts]
    return make_pooled_job(reader, body, prompts, pooling, admission, prefix=prefix)


def make_pooled_job(
    reader: PromptReader,
    body: PooledBody,
    prompts: Sequence[list[int]],
    pooling: PoolingParams | Sequence[PoolingParams],
    admission: Admission,
    *,
    prefix: str,
) -> GenerationJob:
    """Like `pooled_job`, for tokenized prompts that fit into the context window."""
    adapter = reader.find_adapter(body.model)
    return make_job(
        prompts,
        NOTHING,
        reader.gate.with_request_options(admission, priority=body.priority),
        reader.model,
        prefix=prefix,
        model_name=body.model or reader.model_name,
        adapter=adapter,
        timeout_s=reader.request_timeout_s,
        stream=False,
        include_usage=False,
        pooling=pooling,
    )


def _tokenize(reader: PromptReader, text: Text, field: str) -> list[int]:
    """Returns the tokens of a text, including those that the tokenizer adds."""
    if isinstance(text, str):
        check_fits(reader, reader.tokenizer.least_tokens(text), field, counts="at least ")
    else:
        check_fits(reader, len(text), field)
    token_ids = reader.tokenizer.encode(text, add_special_tokens=True) if isinstance(text, str) else text
    if not all(0 <= token_id < reader.vocab_size for token_id in token_ids):
        raise invalid(f"`{field}` has a token id that is not in [0, {reader.vocab_size}).", field, "token_id_out_of_range")
    if not token_ids:
        raise invalid(f"`{field}` has an empty text; send at least one token.", field, "empty_prompt")
    check_fits(reader, len(token_ids), field)
    return token_ids


def check_fits(reader: PromptReader, num_tokens: int, field: str, counts: str = "") -> None:
    """Raises ContextLengthError for a text of a field that the context window does not hold.

    Args:
        counts: stands before the number in the message, where it is not exact.
    """
    window = reader.model.longest_prompt
    if num_tokens > window:
        raise ContextLengthError(
            f"The context window holds {window} tokens; a text of `{field}` has {counts}{num_tokens}. Cut it in pieces.",
            param=field,
        )


async def run_pooled(generate: Generate, job: GenerationJob) -> list[Embedding]:
    """Waits for every vector of a job and returns them in order; errors as in `run_job`."""
    found: dict[int, Embedding] = {}
    async with aclosing(run_job(generate, job)) as outputs:
        async for number, output in outputs:
            if output.embedding is not None:
                found[number] = output.embedding
    if len(found) < len(job.requests):
        raise EngineError("The engine ended without a vector; it is safe to send the request again.")
    return [found[number] for number in range(len(found))]


def vector_of(embedding: Embedding) -> npt.NDArray[np.float32]:
    """Returns the numbers, [num_dimensions] float32."""
    return np.frombuffer(embedding.data, "<f4")


def usage_of(job: GenerationJob) -> EmbeddingUsage:
    """Returns the counts of a job without output tokens."""
    return EmbeddingUsage(job.num_prompt_tokens, job.num_prompt_tokens)


def write_embeddings(asked: EmbeddingJob, embeddings: Sequence[Embedding]) -> bytes:
    """Returns the reply as JSON; slow for many vectors."""
    write = _as_base64 if asked.is_base64 else _as_numbers
    data = [EmbeddingItem(index, write(embedding)) for index, embedding in enumerate(embeddings)]
    return msgspec.json.encode(EmbeddingList(asked.job.model_name, data, usage_of(asked.job)))


def _as_base64(embedding: Embedding) -> str:
    return base64.b64encode(embedding.data).decode()


def _as_numbers(embedding: Embedding) -> list[float]:
    numbers: list[float] = vector_of(embedding).tolist()
    return numbers
