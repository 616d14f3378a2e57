"""Requests, sampling parameters and outputs: the types that server and engine exchange."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from cloister.types.grammar import Grammar
from cloister.types.images import ImageTile
from cloister.types.scope import LOCAL_SCOPE, Scope


class BeamSearch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Searches for likely answers in place of drawing one: the `width` most likely beginnings are carried on.

    Attributes:
        width: beams; at least `n`, whose best are the answers.
        length_penalty: an answer's score is the sum of its log-probabilities over its length to the power of this.
        early_stopping: ends as soon as there are `width` complete answers; else when no beam can beat the worst of them.
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
        seed: makes the answer repeatable; None draws one.
        stop: strings that end the answer; not part of it unless `include_stop`.
        stop_token_ids: token ids that end the answer, beside the model's EOS ids.
        shown_token_ids: control tokens that are text of the answer, such as those around calls of tools; the others are not.
        min_tokens: EOS and stop tokens cannot be chosen, and stop strings do not count, before this many.
        max_tokens: output tokens at most; None means the model's `default_max_tokens` to a front, and all that the window
            holds to the engine.
        ignore_eos: the model's EOS ids do not end the answer.
        logprobs: None for none, k for the chosen token's and the k most likely ones'. They are log-probabilities of
            the model's distribution before temperature, penalties and truncation.
        prompt_logprobs: as `logprobs`, for every prompt token but the first; reads no prefix hits.
        grammar: the form that the answer must have; once it is complete and nothing can follow, the answer ends.
        beams: searches, and draws nothing; the answers come whole, the best one first.
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
        """Sequences that are computed at once: its answers, or the beams of a search."""
        return self.n if self.beams is None else max(self.n, self.beams.width)

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged): stop strings and biases are a user's words too."""
        return f"SamplingParams(n={self.n}, temperature={self.temperature}, max_tokens={self.max_tokens})"


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the hidden states of a prompt become one vector.

    Attributes:
        kind: "last" takes the last token's, "mean" the mean over all tokens.
        normalize: the vector is divided by its length (L2).
        dimensions: only the first so many numbers, for models trained so that these mean something on their own (Matryoshka
            representation learning, Kusupati et al. 2022, section 3); None takes all.
    """

    kind: Literal["last", "mean"] = "last"
    normalize: bool = True
    dimensions: int | None = None


class Embedding(msgspec.Struct, frozen=True):
    """A vector as float32, little-endian, number after number."""

    data: bytes

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged): texts can be guessed from their vectors."""
        return f"Embedding(num_dimensions={len(self.data) // 4})"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One admitted request, tokenized, on its way to an engine.

    Attributes:
        request_id: unique for the life of the engine; never derived from content.
        token_ids: the prompt, at least one token.
        scope: who may share its KV.
        tenant: whose fair share it uses; a name from the credential, never from content.
        priority: class from the credential; smaller is more urgent.
        timeout_s: from arrival at the engine until its last token; the deadline of every state it waits in.
        adapter: digest of a LoRA adapter (`AdapterInfo`), or None.
        pooling: the prompt becomes a vector and no token is sampled (`max_tokens` 0); reads no prefix hits.
        images: images in the prompt, in its order; their positions hold the placeholder token.
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    scope: Scope = LOCAL_SCOPE
    tenant: str = "local"
    priority: int = 0
    timeout_s: float = 600.0
    adapter: str | None = None
    pooling: PoolingParams | None = None
    images: tuple[ImageTile, ...] = ()

    @property
    def pixels_bytes(self) -> int:
        """What its images take in memory."""
        return sum(len(image.pixels) for image in self.images)

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"Request(num_prompt_tokens={len(self.token_ids)})"


class FinishReason(StrEnum):
    """Why a sequence ended. STOP and LENGTH are answers, the others are errors with a reply."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    REJECTED = "rejected"
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


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one sequence of a request, as the front receives it.

    Attributes:
        index: which of the request's n sequences.
        text: new text; always whole characters. Held back while it may be the start of a stop string.
        token_ids: new tokens (those of held-back text included).
        finish_reason: set exactly once per sequence, on its last output.
        stop_reason: the stop string or token id that matched, or None for EOS and length.
        error: for ERROR, REJECTED and TIMEOUT: what to tell the client, free of content.
        prompt_logprobs: on the first output of index 0, when asked for; entry 0 is None.
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


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front needs to know of the model that the engine holds.

    Attributes:
        max_model_len: prompt and answer together, in tokens.
        eos_token_ids: every id that ends an answer.
        defaults: sampling defaults of generation_config.json (temperature, top_p, top_k, repetition_penalty, ...).
        fingerprint: `system_fingerprint`: weights, format, instruction set, back end, layout.
        hidden_size: numbers in an embedding.
        pooling: how it makes one, unless a request says otherwise.
        drafters: what may draft tokens for it, by name.
        default_max_tokens: longest answer where a request does not say; None for as many tokens as the window has room for.
        family: of its architecture.
        num_parameters: its weights, 0 where they were not counted.
        number_format: of its weights in memory, where the settings chose one.
        is_on_device: its weights are not in the memory of the host.
    """

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: dict[str, float] = {}
    fingerprint: str = ""
    created_s: int = 0
    hidden_size: int = 0
    pooling: PoolingParams = PoolingParams()
    drafters: tuple[str, ...] = ()
    default_max_tokens: int | None = None
    family: str = ""
    num_parameters: int = 0
    number_format: str = ""
    is_on_device: bool = False

    def bound(self, sampling: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Returns how to sample with a `max_tokens`, where a request says none: the default, or the room after its prompt."""
        if sampling.max_tokens is not None or self.default_max_tokens is None:
            return sampling
        room = max(1, self.max_model_len - num_prompt_tokens)
        most = min(room, max(self.default_max_tokens, sampling.min_tokens))
        return msgspec.structs.replace(sampling, max_tokens=most)


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front needs to know of a LoRA adapter that the engine holds.

    Attributes:
        name: as clients know it.
        digest: SHA-256 of its weights (hex): what requests, plans and prefix keys know it by.
        path: its directory.
    """

    name: str
    digest: str
    path: str
    rank: int
    created_s: int = 0
