"""`AsyncLLM`: a model and its engine in a thread, for a program with an event loop."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import numpy as np
import numpy.typing as npt

from cloister.api.completions import (
    Completion,
    CompletionOutput,
    Message,
    Progress,
    Prompt,
    as_prompts,
    check_end,
    check_grammars,
    one_for_each,
    reporting,
)
from cloister.engine import EngineClient, EngineCore, ThreadTransport
from cloister.launch import Settings, build_engine, resolve_settings
from cloister.policy import Gate
from cloister.types.clock import WallClock
from cloister.types.errors import EngineError, InvalidRequestError
from cloister.types.events import Event
from cloister.types.request import Embedding, EncoderInfo, ModelInfo, PoolingParams, Request, SamplingParams, SequenceOutput

if TYPE_CHECKING:
    from cloister.text import ChatTemplate, Tokenizer

T = TypeVar("T")
_NOTHING: Final = SamplingParams(max_tokens=0)


class AsyncLLM:
    """A model and its engine, for one event loop. Any number of tasks may call it; their prompts run together.

        async with AsyncLLM("cloister-5m") as llm:
            (completion,) = await llm.generate("The VACUUM command")

    Cancelling a task gives its request up; its blocks are free at the next step.

    Args:
        model: an embedded model's name, a directory, a GGUF file, or a hub name.
        settings: any setting of `EngineConfig`, such as scheduler="fair".

    Attributes:
        model, memory, tokenizer: what was loaded; there after `start`.

    Raises:
        CloisterError: a setting cannot be used; the message says what to do.
    """

    model: ModelInfo
    memory: list[tuple[str, int]]
    tokenizer: Tokenizer

    def __init__(self, model: str = "cloister-5m", **settings: Any) -> None:
        self._prepare(resolve_settings({"model": model, **settings}, listens=False))

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """Returns an LLM, not started yet, for settings that were resolved already."""
        llm = cls.__new__(cls)
        llm._prepare(settings)
        return llm

    def _prepare(self, settings: Settings) -> None:
        config = settings.engine.config
        self._config = config
        self.request_timeout_s = config.request_timeout_s
        self._gate = Gate(settings.policy, None, loopback=True)
        self._clock = WallClock()
        self._engine: EngineClient | None = None
        self._is_closed = False
        self._template: ChatTemplate | None = None
        # So many are never refused, and few enough start that a deadline does not pass while they only wait.
        self._room = asyncio.Semaphore(max(1, min(config.max_waiting, 2 * config.max_num_seqs)))

    async def start(self) -> None:
        """Loads the model, in a thread, and starts the engine, which belongs to this event loop. `async with` does it.

        Raises:
            CloisterError: the model cannot be used; the message says what to do.
        """
        await self.adopt(await asyncio.to_thread(build_engine, self._config))

    async def adopt(self, core: EngineCore) -> None:
        """`start` with an engine that was built for the same settings."""
        if self._config.kv_tier is not None:
            codec, admission = self._config.kv_tier_codec, self._config.kv_tier_admission
            core.open_kv_tiers(self._config.kv_tier, codec=codec, admission=admission)
        self.model, self.memory, self.tokenizer = core.model, core.memory, core.tokenizer
        self._engine = EngineClient(ThreadTransport(core), self._config)
        await self._engine.start()

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        on_progress: Progress | bool | None = None,
    ) -> list[Completion]:
        """Answers prompts, as many at once as the engine runs, and returns their completions in order, as `LLM.generate`."""
        batch = as_prompts(prompts)
        each = one_for_each(sampling, self.default_sampling, len(batch))
        requests = await asyncio.to_thread(self.make_requests, batch, each)
        return await self._each(requests, self._answer, on_progress)

    async def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Completion:
        """Answers one conversation: messages with `role` and `content`, as in the OpenAI API."""
        return (await self.generate([self.render(messages, tools)], sampling))[0]

    async def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> AsyncGenerator[SequenceOutput, None]:
        """Yields what each step adds to the answer: a token, or several where drafts were accepted (`speculate`) or
        what came before was not read in time.

        Closing the iterator early gives the request up.
        """
        (request,) = await asyncio.to_thread(self.make_requests, [prompt], [sampling or self.default_sampling])
        async with self._room, aclosing(self._running.generate(request)) as outputs:
            async for output in outputs:
                check_end(output)
                yield output

    def stream_chat(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None
    ) -> AsyncGenerator[SequenceOutput, None]:
        """As `stream`, for a conversation."""
        return self.stream(self.render(messages), sampling)

    async def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        on_progress: Progress | bool | None = None,
    ) -> npt.NDArray[np.float32]:
        """Makes a vector of each text and returns them, [num_texts, dimensions] float32, as `LLM.embed`."""
        own = self._loaded.pooling
        if self._loaded.encoder is not None and self._loaded.encoder.labels:
            raise InvalidRequestError("this model classifies texts and makes no vectors; call classify or score")
        if dimensions is not None and not 1 <= dimensions <= self.model.hidden_size:
            raise InvalidRequestError(f"dimensions must be from 1 to {self.model.hidden_size}", param="dimensions")
        chosen = own.normalize if normalize is None else normalize
        pooling = PoolingParams(kind=own.kind, normalize=chosen, dimensions=dimensions)
        batch = as_prompts(texts)
        requests = await asyncio.to_thread(self.make_requests, batch, [_NOTHING] * len(batch), pooling)
        found = await self._each(requests, self._pool, on_progress)
        data = b"".join(embedding.data for embedding in found)
        return np.frombuffer(data, "<f4").reshape(len(found), dimensions or self.model.hidden_size)

    async def score(self, text_1: Prompt | Sequence[Prompt], text_2: Prompt | Sequence[Prompt]) -> list[float]:
        """Returns a score of each pair of texts, as `LLM.score`."""
        first, second = as_prompts(text_1), as_prompts(text_2)
        if len(first) not in (1, len(second)):
            raise InvalidRequestError(f"text_1 has {len(first)} texts and text_2 has {len(second)}; give one, or as many")
        if self._loaded.encoder is not None and self._loaded.encoder.labels:
            return await self._judge(self._loaded.encoder, first * (len(second) if len(first) == 1 else 1), second)
        vectors = (await self.embed([*first, *second], normalize=True)).astype(np.float64)
        scores: list[float] = (vectors[: len(first)] * vectors[len(first) :]).sum(1).clip(-1, 1).tolist()
        return scores

    async def classify(self, texts: Prompt | Sequence[Prompt]) -> list[dict[str, float]]:
        """Returns for each text the probability of each of the model's classes by name, as `LLM.classify`."""
        encoder = self._loaded.encoder
        if encoder is None or not encoder.labels:
            raise InvalidRequestError("this model has no classes")
        batch = as_prompts(texts)
        pooling = PoolingParams(kind="classify", normalize=False)
        requests = await asyncio.to_thread(self.make_requests, batch, [_NOTHING] * len(batch), pooling)
        found = [np.frombuffer(scores.data, "<f4").tolist() for scores in await self._each(requests, self._pool, None)]
        return [dict(zip(encoder.labels, encoder.probabilities(scores), strict=True)) for scores in found]

    async def _judge(self, encoder: EncoderInfo, first: Sequence[Prompt], second: Sequence[Prompt]) -> list[float]:
        """Returns what a cross-encoder says of each pair."""
        if not encoder.is_cross_encoder:
            raise InvalidRequestError(f"this model has {len(encoder.labels)} classes and scores no pairs; call classify")
        requests = []
        for one, other in zip(first, second, strict=True):
            if not (isinstance(one, str) and isinstance(other, str)):
                raise InvalidRequestError("a cross-encoder reads both texts together; give texts, no token ids")
            token_ids, start = await asyncio.to_thread(self.tokenizer.encode_pair, one, other)
            pooling = PoolingParams(kind="classify", normalize=False, second_start=start)
            requests += self.make_requests([token_ids], [_NOTHING], pooling)
        found = await self._each(requests, self._pool, None)
        return [encoder.probabilities(np.frombuffer(scores.data, "<f4").tolist())[0] for scores in found]

    @property
    def default_sampling(self) -> SamplingParams:
        """What the model's generation_config.json asks for."""
        defaults: dict[str, Any] = {k: v for k, v in self._loaded.defaults.items() if k in SamplingParams.__struct_fields__}
        if "top_k" in defaults:
            defaults["top_k"] = int(defaults["top_k"])
        return SamplingParams(**defaults)

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """Calls `listener` with every event of the engine, on the event loop."""
        self._running.subscribe(listener)

    def make_requests(
        self, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams], pooling: PoolingParams | None = None
    ) -> list[Request]:
        """Returns a request for each prompt.

        Raises:
            CloisterError: a prompt has an unknown token, a grammar cannot be followed, or nothing is loaded.
        """
        pairs = zip(prompts, check_grammars(sampling), strict=True)
        return [self._make_request(prompt, params, pooling) for prompt, params in pairs]

    def _make_request(self, prompt: Prompt, sampling: SamplingParams, pooling: PoolingParams | None) -> Request:
        if pooling is None and self._loaded.encoder is not None:
            raise InvalidRequestError("this model is an encoder, which generates no text; call embed, score or classify")
        size = self._loaded.vocab_size
        token_ids = self.tokenizer.encode(prompt, True) if isinstance(prompt, str) else list(prompt)
        if not all(isinstance(token_id, int) and 0 <= token_id < size for token_id in token_ids):
            raise InvalidRequestError(f"a prompt has a token id that is not in [0, {size})")
        admission = self._gate.admit(None)
        return Request(
            request_id=uuid.uuid4().hex,
            token_ids=token_ids,
            sampling=self._loaded.bound(sampling, len(token_ids)),
            scope=admission.scope,
            tenant=admission.tenant,
            timeout_s=self.request_timeout_s,
            pooling=pooling,
        )

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Returns the prompt of a conversation, as the model's chat template writes it.

        Raises:
            InvalidRequestError: the template refuses it, or it has parts that are not text.
        """
        contents = [message.get("content") for message in messages]
        if any(part.get("type") != "text" for content in contents if isinstance(content, list) for part in content):
            raise InvalidRequestError("LLM takes messages of text only; send images to `cloister serve`", param="messages")
        if self._template is None:
            from cloister.text import ChatTemplate  # brings jinja2, which a program that renders nothing can do without

            self._template = ChatTemplate.load(Path(self._loaded.path), self.tokenizer.special)
        text = self._template.render([dict(message) for message in messages], [dict(tool) for tool in tools or ()] or None)
        return self.tokenizer.encode(text, False)

    async def follow(self, request: Request, sink: Callable[[SequenceOutput], None]) -> None:
        """Runs a request when there is room, and calls `sink` with every output; what `sink` raises ends it.

        Raises:
            CloisterError: the request ended without an answer.
        """

        def take(output: SequenceOutput) -> None:
            check_end(output)
            sink(output)

        async with self._room:
            await self._running.follow(request, take)

    async def close(self, timeout_s: float = 0.0) -> None:
        """Takes no more requests, gives up what still runs after `timeout_s`, and ends the engine. Twice does nothing more."""
        self._is_closed = True
        if self._engine is not None:
            await self._engine.drain(timeout_s)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _running(self) -> EngineClient:
        if self._is_closed:
            raise EngineError("this LLM was closed; open another one")
        if self._engine is None:
            raise EngineError("this LLM was not started; use `async with AsyncLLM(...) as llm`, or await llm.start()")
        return self._engine

    @property
    def _loaded(self) -> ModelInfo:
        return self._running.model

    async def _each(
        self, requests: Sequence[Request], work: Callable[[Request], Awaitable[T]], on_progress: Progress | bool | None
    ) -> list[T]:
        """Does `work` for all requests side by side; the first that fails gives the others up."""
        num_done = 0

        async def do(request: Request) -> T:
            nonlocal num_done
            result = await work(request)
            num_done += 1
            report(num_done, len(requests))
            return result

        with reporting(on_progress, len(requests)) as report:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(do(request)) for request in requests]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _answer(self, request: Request) -> Completion:
        answers = [CompletionOutput(index) for index in range(request.sampling.n)]
        async with self._room:
            completion = Completion(request.request_id, request.token_ids, answers, self._clock.now())
            await self._running.follow(request, lambda output: completion.take(output, self._clock.now()))
        return completion

    async def _pool(self, request: Request) -> Embedding:
        outputs: list[SequenceOutput] = []
        await self.follow(request, outputs.append)
        found = outputs[-1].embedding
        if found is None:
            raise EngineError("the engine ended without a vector; try again")
        return found
