"""The table of API operations, with their inputs and outputs, from which the reference is generated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
from pydantic import BaseModel

from cloister.server.answers import ChatChunk, ChatCompletion, CompletionResponse, Model, ModelList
from cloister.server.embeddings import EmbeddingBody, EmbeddingList
from cloister.server.files.batches import BatchBody
from cloister.server.llamacpp import ApplyTemplateBody, LlamaCompletionBody, LlamaInfillBody
from cloister.server.messages import REFUSED as MESSAGES_REFUSED
from cloister.server.messages import CountBody, MessagesBody
from cloister.server.metrics import CONTENT_TYPE, MetricsReport, TenantsReport
from cloister.server.ollama.models import OllamaModels, OllamaRunningModels, OllamaShown
from cloister.server.ollama.schemas import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaPullBody,
    OllamaShowBody,
)
from cloister.server.ollama.writing import NDJSON, OllamaChatLine, OllamaError, OllamaGenerateLine
from cloister.server.parse import REFUSED, Refused
from cloister.server.prompt_schemas import DeletedPromptSchema, PromptSchema, PromptSchemaBody
from cloister.server.responses.schemas import REFUSED as RESPONSES_REFUSED
from cloister.server.responses.schemas import ResponsesBody
from cloister.server.routes.cache import CacheContent
from cloister.server.routes.embeddings import PooledList
from cloister.server.routes.files import DeletedFile, FileList, FileObject, UploadForm
from cloister.server.routes.health import Load, Version
from cloister.server.routes.llamacpp import TemplatedPrompt
from cloister.server.routes.models import LoadBody, UnloadBody, Unloaded
from cloister.server.routes.ollama import OllamaEmbedding, OllamaEmbeddings, OllamaStatus
from cloister.server.routes.pdf import PdfForm, PdfText
from cloister.server.routes.policy import PolicyReport
from cloister.server.routes.replicas import DrainedReplica, ReplicaList, ReturnedReplica, UpdateBody, UpdateReport
from cloister.server.routes.responses import DeletedResponse
from cloister.server.routes.tokens import DetokenizeBody, Detokenized, TokenizeBody, Tokenized, TokenizerInfo
from cloister.server.schemas import ChatBody, CompletionBody
from cloister.server.scoring import Classification, ClassifyBody, Ranking, RerankBody, ScoreBody, ScoreList
from cloister.server.stream import EVENTS

HTML: Final = "text/html"
FORM: Final = "multipart/form-data"
BYTES: Final = "application/octet-stream"
JSON: Final = "application/json"


class HealthResponse(msgspec.Struct, frozen=True):
    """Reply of /health."""

    status: Literal["ok", "idle", "starting", "unavailable"]


class ErrorFields(msgspec.Struct, frozen=True):
    """An error: message, type, the field at fault, and a machine-readable code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct, frozen=True):
    """Reply of every request that cannot be answered."""

    error: ErrorFields


class MessageErrorFields(msgspec.Struct, frozen=True):
    type: str
    message: str


class MessageErrorResponse(msgspec.Struct, frozen=True):
    """Reply of a Messages route that cannot answer."""

    error: MessageErrorFields
    type: Literal["error"] = "error"


class TokenCount(msgspec.Struct, frozen=True):
    """Reply of /v1/messages/count_tokens."""

    input_tokens: int


JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        group: its heading in the reference.
        body: request body; None for none.
        answer: reply with status 200, None for another media type than JSON.
        event: event of its stream.
        media_type: media type of the reply.
        errors: specific statuses besides 200.
        is_open: it is unauthenticated.
        failure: error reply.
        unavailable: reply with status 503.
        refused: fields of its API that this server does not support.
        stream_type: media type of a stream.
        body_type: media type of the body.
    """

    method: str
    path: str
    group: str
    summary: str
    body: type[BaseModel] | None = None
    answer: Any = None
    event: Any = None
    media_type: str = JSON
    errors: tuple[int, ...] = ()
    is_open: bool = False
    failure: Any = ErrorReply
    unavailable: Any = ErrorReply
    refused: Mapping[str, Refused] = field(default_factory=dict)
    stream_type: str = EVENTS
    body_type: str = JSON

    @property
    def name(self) -> str:
        """Its id in the reference."""
        words = [word for part in self.path.split("/") for word in part.strip("{}").split("_") if word]
        return "_".join([self.method.lower(), *words]) or self.method.lower()

    @property
    def statuses(self) -> tuple[int, ...]:
        """Every possible status except 200."""
        always = {403, 500}
        reading = {400, 404, 408, 413, 415, 503, 504} if self.body is not None else set()
        keyed = set() if self.is_open else {401, 429}
        return tuple(sorted(always | reading | keyed | set(self.errors)))


MEANINGS: Final = {
    200: "The answer.",
    400: "A field is missing, unknown or invalid; `param` names it.",
    401: "An API key is required, and it is missing or unknown.",
    403: "The privacy profile refuses the request, or the Host header is not allowed.",
    404: "There is no such model, file or batch, or this server does not offer it.",
    408: "The body did not arrive in time.",
    413: "The body is larger than the server accepts.",
    415: "The body is not declared as JSON.",
    429: "Too many requests wait, or the API key has used what it may; `Retry-After` says when to try again.",
    500: "The server made a mistake.",
    503: "The engine is unavailable, or the server is too busy; `Retry-After` says when to try again.",
    507: "There is no space for a file.",
    504: "The answer was not complete before its deadline.",
}

_GENERATE, _VECTORS, _TOKENS, _SERVER, _FILES = "Text", "Vectors", "Tokens", "Server", "Files"
_LLAMA, _VLLM = "llama.cpp", "vLLM"


def _health(method: str, path: str, group: str) -> Operation:
    """Returns an unauthenticated operation that replies 200 or 503 with the same schema."""
    return Operation(
        method,
        path,
        group,
        "Check that the engine makes progress",
        None,
        HealthResponse,
        errors=(503,),
        is_open=True,
        unavailable=HealthResponse,
    )


def _ollama(
    method: str,
    path: str,
    summary: str,
    body: type[BaseModel] | None = None,
    answer: Any = None,
    line: Any = None,
) -> Operation:
    """Returns an operation of Ollama's API, whose streams are lines and whose errors are one message."""
    return Operation(
        method,
        path,
        "Ollama",
        summary,
        body,
        answer,
        line,
        failure=OllamaError,
        unavailable=OllamaError,
        stream_type=NDJSON,
    )


OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        "POST", "/v1/chat/completions", _GENERATE, "Answer a conversation", ChatBody, ChatCompletion, ChatChunk, refused=REFUSED
    ),
    Operation(
        "POST",
        "/v1/completions",
        _GENERATE,
        "Continue a text",
        CompletionBody,
        CompletionResponse,
        CompletionResponse,
        refused=REFUSED,
    ),
    Operation(
        "POST",
        "/v1/responses",
        _GENERATE,
        "Answer a conversation in items",
        ResponsesBody,
        JsonObject,
        JsonObject,
        refused=RESPONSES_REFUSED,
    ),
    Operation("GET", "/v1/responses/{response_id}", _GENERATE, "Show a kept response", answer=JsonObject, errors=(404,)),
    Operation("DELETE", "/v1/responses/{response_id}", _GENERATE, "Forget a response", answer=DeletedResponse, errors=(404,)),
    Operation(
        "POST",
        "/v1/messages",
        _GENERATE,
        "Answer a conversation in blocks",
        MessagesBody,
        JsonObject,
        JsonObject,
        refused=MESSAGES_REFUSED,
        failure=MessageErrorResponse,
        unavailable=MessageErrorResponse,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        _GENERATE,
        "Count the tokens of a conversation",
        CountBody,
        TokenCount,
        failure=MessageErrorResponse,
        unavailable=MessageErrorResponse,
    ),
    Operation("POST", "/v1/embeddings", _VECTORS, "Make vectors of texts", EmbeddingBody, EmbeddingList),
    Operation("POST", "/v1/score", _VECTORS, "Score the similarity of texts", ScoreBody, ScoreList),
    Operation("POST", "/v1/rerank", _VECTORS, "Sort documents by relevance", RerankBody, Ranking),
    Operation("POST", "/v2/rerank", _VECTORS, "Sort documents by relevance (path of Cohere)", RerankBody, Ranking),
    Operation("POST", "/rerank", _VECTORS, "Sort documents by relevance (path of Jina)", RerankBody, Ranking),
    Operation("POST", "/v1/classify", _VECTORS, "Tell which class texts are of", ClassifyBody, Classification),
    Operation(
        "POST", "/v1/pdf/text", _TOKENS, "Extract the text of a PDF file", PdfForm, PdfText, errors=(404,), body_type=FORM
    ),
    Operation("POST", "/tokenize", _TOKENS, "Tokenize a text or a chat", TokenizeBody, Tokenized),
    Operation("POST", "/detokenize", _TOKENS, "Detokenize tokens to a text", DetokenizeBody, Detokenized),
    Operation("GET", "/tokenizer_info", _TOKENS, "Show the tokens that begin and end a text", answer=TokenizerInfo),
    Operation("GET", "/v1/models", _SERVER, "List the served models", answer=ModelList),
    Operation("GET", "/v1/models/{model_id}", _SERVER, "Describe one model", answer=Model, errors=(404,)),
    Operation("POST", "/v1/load_lora_adapter", _SERVER, "Load a LoRA adapter", LoadBody, Model),
    Operation("POST", "/v1/unload_lora_adapter", _SERVER, "Unload a LoRA adapter", UnloadBody, Unloaded),
    Operation("GET", "/v1/replicas", _SERVER, "List the replicas for an operator", answer=ReplicaList),
    Operation("POST", "/v1/replicas/{index}/drain", _SERVER, "Drain a replica", answer=DrainedReplica),
    Operation("POST", "/v1/replicas/{index}/return", _SERVER, "Give a replica requests again", answer=ReturnedReplica),
    Operation("POST", "/v1/replicas/update", _SERVER, "Give every replica a new engine", answer=UpdateReport),
    Operation("POST", "/v1/replicas/update_weights", _SERVER, "Give every replica other weights", UpdateBody, UpdateReport),
    Operation("GET", "/v1/cache", _SERVER, "Show what is cached of one's own", answer=CacheContent, errors=(400, 503)),
    Operation("DELETE", "/v1/cache", _SERVER, "Drop what is cached of one's own", answer=CacheContent, errors=(400, 503)),
    Operation("POST", "/v1/prompt_schemas", _SERVER, "Keep a schema of prompts", PromptSchemaBody, PromptSchema, errors=(404,)),
    Operation(
        "DELETE", "/v1/prompt_schemas/{name}", _SERVER, "Forget a schema of prompts", answer=DeletedPromptSchema, errors=(404,)
    ),
    Operation("GET", "/v1/policy", _SERVER, "Show the active privacy profile", answer=PolicyReport, is_open=True),
    Operation("GET", "/version", _SERVER, "Tell the version", answer=Version),
    _health("GET", "/health", _SERVER),
    Operation("GET", "/metrics", _SERVER, "Show metrics for Prometheus", media_type=CONTENT_TYPE.partition(";")[0]),
    Operation("GET", "/metrics/history", _SERVER, "Show metrics of the last day", answer=MetricsReport),
    Operation(
        "GET", "/metrics/tenants", _SERVER, "Show metrics of each tenant to an operator", answer=TenantsReport, errors=(404,)
    ),
    Operation("GET", "/openapi.json", _SERVER, "Describe the API", answer=JsonObject, is_open=True),
    Operation("GET", "/docs", _SERVER, "Show the reference of the API", media_type=HTML, is_open=True),
    Operation("POST", "/v1/files", _FILES, "Keep a file", UploadForm, FileObject, errors=(507,), body_type=FORM),
    Operation("GET", "/v1/files", _FILES, "List files", answer=FileList, errors=(400, 404)),
    Operation("GET", "/v1/files/{file_id}", _FILES, "Describe a file", answer=FileObject, errors=(404,)),
    Operation("DELETE", "/v1/files/{file_id}", _FILES, "Remove a file", answer=DeletedFile, errors=(404,)),
    Operation("GET", "/v1/files/{file_id}/content", _FILES, "Read a file", media_type=BYTES, errors=(404, 503)),
    Operation("POST", "/v1/batches", _FILES, "Answer the requests in a file", BatchBody, JsonObject, errors=(507,)),
    Operation("GET", "/v1/batches", _FILES, "List batches", answer=JsonObject, errors=(400, 404)),
    Operation("GET", "/v1/batches/{batch_id}", _FILES, "Show the status of a batch", answer=JsonObject, errors=(404,)),
    Operation("POST", "/v1/batches/{batch_id}/cancel", _FILES, "End a batch", answer=JsonObject, errors=(404,)),
    Operation("POST", "/completion", _LLAMA, "Continue a prompt", LlamaCompletionBody, JsonObject, JsonObject),
    Operation("POST", "/infill", _LLAMA, "Fill in the middle", LlamaInfillBody, JsonObject, JsonObject),
    Operation("POST", "/apply-template", _LLAMA, "Show the text of a conversation", ApplyTemplateBody, TemplatedPrompt),
    Operation("GET", "/props", _LLAMA, "Describe the served model", answer=JsonObject),
    _health("GET", "/ping", _VLLM),
    _health("POST", "/ping", _VLLM),
    Operation("GET", "/load", _VLLM, "Count running requests", answer=Load),
    Operation("POST", "/classify", _VLLM, "Classify texts", ClassifyBody, Classification),
    Operation("POST", "/pooling", _VLLM, "Make vectors of texts", EmbeddingBody, PooledList),
    _ollama("POST", "/api/chat", "Answer a conversation", OllamaChatBody, OllamaChatLine, OllamaChatLine),
    _ollama("POST", "/api/generate", "Answer a prompt", OllamaGenerateBody, OllamaGenerateLine, OllamaGenerateLine),
    _ollama("POST", "/api/embed", "Make vectors of texts", OllamaEmbedBody, OllamaEmbeddings),
    _ollama("POST", "/api/embeddings", "Make a vector of a text", OllamaEmbeddingsBody, OllamaEmbedding),
    _ollama("GET", "/api/tags", "List the served models", answer=OllamaModels),
    _ollama("GET", "/api/ps", "List the loaded models", answer=OllamaRunningModels),
    _ollama("POST", "/api/show", "Describe one model", OllamaShowBody, OllamaShown),
    _ollama("POST", "/api/pull", "Check that a model is available", OllamaPullBody, OllamaStatus, OllamaStatus),
    _ollama("GET", "/api/version", "Tell the version", answer=Version),
)
BODY_PATHS: Final = frozenset(op.path for op in OPERATIONS if op.body is not None)
"""Paths that read a body."""
FORM_PATHS: Final = frozenset(op.path for op in OPERATIONS if op.body_type == FORM)
"""Those of them that read a form."""
