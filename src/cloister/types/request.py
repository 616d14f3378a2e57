"""Requests, sampling parameters and outputs: the types that server and engine exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, Literal

import msgspec

from cloister.types.documents import Documents
from cloister.types.images import ImageTile
from cloister.types.scope import LOCAL_SCOPE, Scope

COMPILE_TIMEOUT_S: Final = 5.0
"""Processor time for compiling a grammar. After it, its requests fail with the reason, and its compiling thread is abandoned
and replaced."""
COMPILE_WALL_S: Final = 60.0
"""The same by the clock, for a thread that waits for something, or gets next to no processor time."""
COMPILE_LOOK_S: Final = 1.0
"""After as many seconds as `COMPILE_TIMEOUT_S`, how often it is looked whether a grammar has had its time."""


class GrammarKind(StrEnum):
    """The notation of a grammar."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


class Grammar(msgspec.Struct, frozen=True, weakref=True):
    """The grammar that the complete text of an answer must match.

    Attributes:
        kind: the notation of `source`.
        source: a JSON schema as JSON; nothing, for any JSON object; a regular expression (Rust's dialect: no look-around, no
            back references) that matches the whole answer; a JSON list of the strings to choose from; or a context-free
            grammar in Lark's notation, whose rule `start` is the answer.
    """

    kind: GrammarKind
    source: str = ""

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"Grammar({self.kind.value})"


class BeamSearch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Beam search instead of sampling: keeps the `width` most likely partial answers.

    Attributes:
        width: number of beams; at least `n`, the best of which are the answers.
        length_penalty: an answer's score is the sum of its log-probabilities over its length to the power of this.
        early_stopping: end as soon as there are `width` complete answers; otherwise when no beam can beat the worst of them.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen. Defaults are the OpenAI API's; 0 or None switches a filter off.

    Attributes:
        n: sequences to generate from one prompt.
        temperature: 0 is greedy.
        top_p, top_k, min_p: truncations of the distribution, applied in the order temperature, top_k, top_p, min_p.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and output
            (CTRL, Keskar et al. 2019, section 4.1).
        presence_penalty, frequency_penalty: subtracted once, or once per occurrence, for tokens of the output.
        logit_bias: token id -> added to its logit, after penalties.
        seed: makes the answer reproducible; None draws one.
        stop: strings that end the answer; excluded from it unless `include_stop`.
        stop_token_ids: token ids that end the answer, in addition to the model's EOS ids.
        shown_token_ids: control tokens to include in the text, such as those around tool calls; others are omitted.
        min_tokens: EOS and stop tokens are masked, and stop strings ignored, before this many tokens.
        max_tokens: maximum number of output tokens; None means the model's `default_max_tokens` in the front, and the rest of
            the context window in the engine.
        ignore_eos: the model's EOS ids do not end the answer.
        logprobs: None for none; k for those of the chosen token and the k most likely ones, under the model's distribution
            before temperature, penalties and truncation.
        prompt_logprobs: like `logprobs`, for every prompt token but the first; disables prefix hits.
        grammar: grammar that the answer must match; the answer ends once it is complete and nothing can follow.
        beams: beam search instead of sampling; answers are returned complete, best first.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    shown_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    beams: BeamSearch | None = None

    @property
    def num_sequences(self) -> int:
        """Number of concurrent sequences: its answers, or the beams of a search."""
        return self.n if self.beams is None else max(self.n, self.beams.width)

    @property
    def ends_with_prompt(self) -> bool:
        """Whether the answer is at most one token, so that computing the prompt is all (scores, choices, embeddings)."""
        return self.max_tokens is not None and self.max_tokens <= 1 and self.num_sequences == 1

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged): stop strings and biases are user content too."""
        return f"SamplingParams(n={self.n}, temperature={self.temperature}, max_tokens={self.max_tokens})"


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to pool the hidden states of a prompt into one vector.

    Attributes:
        kind: "last" for the last token's state, "mean" for the mean over all tokens; of encoders only, "cls" for the first
            token's and "classify" for the scores of classes, [num_labels], before any softmax or sigmoid.
        normalize: the vector is divided by its length (L2).
        dimensions: keep only this many leading components, for models trained for it (Matryoshka representation learning,
            Kusupati et al. 2022, section 3); None keeps all.
        second_start: where the tokens of type 1 begin, the second text of a pair (`backends.encoder_spec`); None for no pair.
    """

    kind: Literal["last", "mean", "cls", "classify"] = "last"
    normalize: bool = True
    dimensions: int | None = None
    second_start: int | None = None


class Embedding(msgspec.Struct, frozen=True):
    """A vector as packed little-endian float32."""

    data: bytes

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged): texts can be inferred from their vectors."""
        return f"Embedding(num_dimensions={len(self.data) // 4})"


KEYLESS_TENANT: Final = "local"
"""Tenant of everybody on a server that asks for no keys."""
TENANT_RATIO: Final = 3
"""A tenant may have this many times what is still free: places in a queue, memory for bodies, memory for compiled grammars.
So a flood never takes the last of them, however long it lasts (dynamic thresholds: Choudhury and Hahne 1998, IEEE/ACM
Transactions on Networking 6(2))."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One admitted, tokenized request for an engine.

    Attributes:
        request_id: unique for the lifetime of the engine; never derived from content.
        token_ids: the prompt, at least one token.
        scope: which requests may share its KV.
        tenant: tenant for fair scheduling; a name from the credential, never from content.
        priority: class from the credential; smaller is more urgent.
        timeout_s: time limit from arrival at the engine to the last token; applies in every waiting state.
        adapter: digest of a LoRA adapter (`AdapterInfo`), or None.
        pooling: return a vector for the prompt and sample no token (`max_tokens` 0); disables prefix hits.
        images: images in the prompt, in its order; their positions hold the placeholder token.
        cache_key: stands for its `prompt_cache_key` (`Scope.blind`): a router may give requests with the same one to the same
            replica. Empty for none.
        documents: parts of the prompt that are encoded separately; None for none.
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    scope: Scope = LOCAL_SCOPE
    tenant: str = KEYLESS_TENANT
    priority: int = 0
    timeout_s: float = 600.0
    adapter: str | None = None
    pooling: PoolingParams | None = None
    images: tuple[ImageTile, ...] = ()
    cache_key: bytes = b""
    documents: Documents | None = None

    @property
    def pixels_bytes(self) -> int:
        """Memory of its images in bytes."""
        return sum(len(image.pixels) for image in self.images)

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"Request(num_prompt_tokens={len(self.token_ids)})"


class FinishReason(StrEnum):
    """Why a sequence ended. STOP and LENGTH are normal ends, the others are errors with a reply.

    REJECTED: the request does not fit this engine. UNSUPPORTED: its grammar cannot be followed, or takes too much work.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    REJECTED = "rejected"
    UNSUPPORTED = "unsupported"
    ERROR = "error"


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities (natural) at one position.

    Attributes:
        token_id, logprob: the chosen token.
        top: (token id, logprob) of the most likely ones, best first.
        text, top_texts: the tokens as bytes; filled by output processing, not by the runner.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text: bytes = b""
    top_texts: tuple[bytes, ...] = ()

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"TokenLogprobs(num_top={len(self.top)})"


MOST_JOINED: Final = 256
"""Tokens up to which unread outputs are joined: each time all of them are copied."""


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The output of one step for one sequence, as sent to the front.

    Attributes:
        index: which of the request's n sequences.
        text: new text, always whole characters; held back while it may be the start of a stop string.
        token_ids: new tokens, including those of held-back text.
        finish_reason: set exactly once per sequence, on its last output.
        stop_reason: the stop string or token id that matched, or None for EOS and length.
        error: for ERROR, REJECTED and TIMEOUT: message for the client, without user content.
        prompt_logprobs: on the first output of index 0, if requested; entry 0 is None.
        num_cached_tokens: prompt tokens read from the prefix cache.
        embedding: on the only output of a request with `pooling`.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    embedding: Embedding | None = None

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"SequenceOutput(index={self.index}, num_tokens={len(self.token_ids)}, finish_reason={self.finish_reason})"

    @property
    def pieces(self) -> tuple[SequenceOutput, ...]:
        """The outputs that became this one, each of one step."""
        return (self,)

    def join(self, later: SequenceOutput) -> SequenceOutput | None:
        """Returns this output and the next one of its request as one; None if they must stay two: they are of two sequences, or
        have more than text, or one is the end of its sequence, or this one is long already."""
        if self.index != later.index or self.finish_reason is not None or later.finish_reason is not None:
            return None
        if any(part is not None for part in (self.logprobs, self.prompt_logprobs, later.logprobs, later.prompt_logprobs)):
            return None
        if len(self.token_ids) >= MOST_JOINED:
            return None
        return JoinedOutput(
            parts_of=(*self.pieces, later),
            request_id=self.request_id,
            index=self.index,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            num_prompt_tokens=max(self.num_prompt_tokens, later.num_prompt_tokens),
            num_output_tokens=later.num_output_tokens,
            num_cached_tokens=max(self.num_cached_tokens, later.num_cached_tokens),
        )


class JoinedOutput(SequenceOutput, frozen=True, kw_only=True):
    """Outputs of one sequence that became one. It is not sent.

    Attributes:
        parts_of: them, in their order.
    """

    parts_of: tuple[SequenceOutput, ...]

    @property
    def pieces(self) -> tuple[SequenceOutput, ...]:
        return self.parts_of


class EncoderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's description of an encoder model, which generates no text, for the front.

    Attributes:
        labels: names of its classes; empty for a model that makes vectors only.
        activation: what makes probabilities of the scores of classes.
    """

    labels: tuple[str, ...] = ()
    activation: Literal["softmax", "sigmoid", "none"] = "none"

    @property
    def is_cross_encoder(self) -> bool:
        """Whether it scores pairs of texts: it has one class."""
        return len(self.labels) == 1

    def probabilities(self, scores: Sequence[float]) -> list[float]:
        """Returns what the activation makes of the scores of all classes."""
        if self.activation == "softmax":
            highest = max(scores)
            powers = [math.exp(score - highest) for score in scores]
            return [power / math.fsum(powers) for power in powers]
        if self.activation == "sigmoid":  # in the form that cannot overflow
            return [1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x)) for x in scores]
        return list(scores)


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's description of its model for the front.

    Attributes:
        max_model_len: prompt and answer together, in tokens.
        eos_token_ids: every id that ends an answer.
        defaults: sampling defaults of generation_config.json (temperature, top_p, top_k, repetition_penalty, ...).
        fingerprint: `system_fingerprint`: weights, format, instruction set, back end, layout.
        backend: name of what computes it.
        hidden_size: dimensions of an embedding.
        pooling: default pooling of embeddings.
        drafters: names of its drafters.
        default_max_tokens: longest answer if a request sets no limit; None: the rest of the context window.
        family: family of its architecture.
        num_parameters: number of weights; 0 if they were not counted.
        number_format: quantization of its weights in memory, if the settings chose one.
        is_on_device: its weights are in device memory, not in the host's.
        encoder: None for a model that generates text.
        document_block_size: `Request.documents` begin and end at multiples of it; 0 if the engine takes none.
        weighs_documents: it can weigh them by a temperature and a scale.
        places_documents: it can place them as modules of a schema.
        max_prefill_only_len: longest prompt of a request that ends with it, if that may be longer; 0 if not.
    """

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: dict[str, float] = {}
    fingerprint: str = ""
    created_s: int = 0
    backend: str = ""
    hidden_size: int = 0
    pooling: PoolingParams = PoolingParams()
    drafters: tuple[str, ...] = ()
    default_max_tokens: int | None = None
    family: str = ""
    num_parameters: int = 0
    number_format: str = ""
    is_on_device: bool = False
    encoder: EncoderInfo | None = None
    document_block_size: int = 0
    weighs_documents: bool = True
    places_documents: bool = True
    max_prefill_only_len: int = 0

    @property
    def longest_prompt(self) -> int:
        """The longest prompt of a request that ends with it, in tokens."""
        return max(self.max_model_len, self.max_prefill_only_len)

    def bound(self, sampling: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Returns the sampling parameters with `max_tokens` set: if unset, the default or the rest of the context window."""
        if sampling.max_tokens is not None or self.default_max_tokens is None:
            return sampling
        room = max(1, self.max_model_len - num_prompt_tokens)
        most = min(room, max(self.default_max_tokens, sampling.min_tokens))
        return msgspec.structs.replace(sampling, max_tokens=most)


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's description of a LoRA adapter for the front.

    Attributes:
        name: its name for clients.
        digest: SHA-256 of its weights (hex); identifies it in requests, plans and prefix keys.
        path: its directory.
        num_links: link tokens that it has for each document that is encoded separately (`Documents.num_links`).
    """

    name: str
    digest: str
    path: str
    rank: int
    created_s: int = 0
    num_links: int = 0
