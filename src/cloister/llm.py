"""The engine in your own program: `LLM` answers prompts, chats and streams, with no server."""

from __future__ import annotations

import asyncio
import queue
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast

from cloister.app import Settings, build_engine, resolve_settings
from cloister.engine import ThreadEngine
from cloister.privacy import Gate
from cloister.types.clock import WallClock
from cloister.types.errors import EngineError, InvalidRequestError
from cloister.types.events import Event
from cloister.types.request import FinishReason, ModelInfo, Request, SamplingParams, SequenceOutput, TokenLogprobs

if TYPE_CHECKING:
    from cloister.text import ChatTemplate

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Progress = Callable[[int, int], None]
"""Called with (prompts answered, prompts in all)."""

T = TypeVar("T")
_CLOSE_TIMEOUT_S: Final = 10.0
_START_TIMEOUT_S: Final = 600.0


@dataclass(slots=True)
class CompletionOutput:
    """One of a prompt's n answers.

    Attributes:
        finish_reason: "stop" or "length"; anything else raises instead.
        stop_reason: the stop string or token id that ended it, None for EOS and length.
        logprobs: one entry a token, if they were asked for.
    """

    index: int
    text: str = field(default="", repr=False)
    token_ids: list[int] = field(default_factory=list, repr=False)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = field(default=None, repr=False)
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class Completion:
    """What became of one prompt.

    Attributes:
        outputs: n answers, by index.
        prompt_logprobs: one entry a prompt token, the first None, if they were asked for.
        arrival_s, first_token_s, last_token_s: on the machine's monotonic clock.
        num_cached_tokens: prompt tokens read from the prefix cache.
    """

    request_id: str
    prompt_token_ids: list[int] = field(repr=False)
    outputs: list[CompletionOutput]
    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.outputs[0].text

    def take(self, output: SequenceOutput, now: float) -> None:
        """Adds what one step brought.

        Raises:
            CloisterError: the sequence ended without an answer; the message says why.
        """
        if output.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
            kind = InvalidRequestError if output.finish_reason is FinishReason.REJECTED else EngineError
            raise kind(output.error or f"the request ended early: {output.finish_reason}")
        answer = self.outputs[output.index]
        answer.text += output.text
        answer.token_ids.extend(output.token_ids)
        answer.finish_reason, answer.stop_reason = output.finish_reason, output.stop_reason
        if output.logprobs is not None:
            answer.logprobs = (answer.logprobs or []) + output.logprobs
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.token_ids:
            self.first_token_s = self.first_token_s or now
            self.last_token_s = now


class LLM:
    """A model and its engine, in threads of this program. Several threads may call it; their prompts run together.

    Args:
        model: an embedded model's name, a directory, a GGUF file, or a hub name.
        settings: any setting of `EngineConfig`, such as scheduler="fair".

    Raises:
        CloisterError: the model or a setting cannot be used; the message says what to do.
    """

    def __init__(self, model: str = "cloister-5m", **settings: Any) -> None:
        self._open(resolve_settings({"model": model, **settings}, listens=False))

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """Returns an LLM for settings that were resolved already."""
        llm = cls.__new__(cls)
        llm._open(settings)
        return llm

    def _open(self, settings: Settings) -> None:
        config = settings.engine.config
        self._timeout_s = config.request_timeout_s
        self._gate = Gate(settings.policy, None, loopback=True)
        self._clock = WallClock()
        core = build_engine(config)
        self._engine = ThreadEngine(core, config)
        # So many are never refused, and few enough start that a deadline does not pass while they only wait.
        self._max_open = max(1, min(config.max_waiting, 2 * config.max_num_seqs))
        self.model: ModelInfo = core.model
        self.memory = core.memory
        self.tokenizer = core.tokenizer  # one of 150,000 entries takes 30 MiB
        self._template: ChatTemplate | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cloister-llm", daemon=True)
        self._thread.start()
        self._call(self._start(), _START_TIMEOUT_S)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        on_progress: Progress | None = None,
    ) -> list[Completion]:
        """Answers prompts, as many at once as the engine runs, and returns their completions in order.

        Args:
            prompts: texts, or lists of token ids.
            sampling: for all prompts, or one for each; None takes the model's defaults.

        Raises:
            CloisterError: a prompt cannot be answered; those that run are given up.
        """
        batch = _as_prompts(prompts)
        if sampling is None or isinstance(sampling, SamplingParams):
            each = [sampling or self.default_sampling] * len(batch)
        else:
            each = list(sampling)
        if len(each) != len(batch):
            raise InvalidRequestError(f"there are {len(batch)} prompts and {len(each)} sampling parameters; give one for each")
        requests = [self._make_request(prompt, params) for prompt, params in zip(batch, each, strict=True)]
        return self._call(self._answer_all(requests, on_progress))

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Completion:
        """Answers one conversation: messages with `role` and `content`, as in the OpenAI API."""
        return self.generate([self._render(messages, tools)], sampling)[0]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[SequenceOutput]:
        """Yields what each step adds to the answer; closing the iterator early gives the request up."""
        request = self._make_request(prompt, sampling or self.default_sampling)
        outputs: queue.SimpleQueue[SequenceOutput | Exception | None] = queue.SimpleQueue()
        future = self._start_work(self._pump(request, outputs))
        try:
            while (item := outputs.get(timeout=request.timeout_s + _CLOSE_TIMEOUT_S)) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        except queue.Empty:
            raise EngineError("the request waited for others of this program past its deadline; send fewer at once") from None
        finally:
            future.cancel()

    def stream_chat(self, messages: Sequence[Message], sampling: SamplingParams | None = None) -> Iterator[SequenceOutput]:
        """As `stream`, for a conversation."""
        return self.stream(self._render(messages, None), sampling)

    @property
    def default_sampling(self) -> SamplingParams:
        """What the model's generation_config.json asks for."""
        defaults: dict[str, Any] = {k: v for k, v in self.model.defaults.items() if k in SamplingParams.__struct_fields__}
        if "top_k" in defaults:
            defaults["top_k"] = int(defaults["top_k"])
        return SamplingParams(**defaults)

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """Calls `listener` with every event of the engine, on a thread of the LLM's."""
        self._loop.call_soon_threadsafe(self._engine.subscribe, listener)

    def close(self) -> None:
        """Gives up what runs and ends the engine. Closing twice does nothing."""
        if self._thread.is_alive():
            self._call(self._engine.drain(0.0), _CLOSE_TIMEOUT_S * 2)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_TIMEOUT_S)
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def _start(self) -> None:
        await self._engine.start()
        self._room = asyncio.Semaphore(self._max_open)

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Runs a coroutine on the LLM's loop and waits; an interrupt gives it up. Requests bring deadlines of their own."""
        future = self._start_work(work)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def _start_work(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if not self._thread.is_alive():
            work.close()
            raise EngineError("this LLM was closed; open another one")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _answer_all(self, requests: Sequence[Request], on_progress: Progress | None) -> list[Completion]:
        num_done = 0

        async def answer(request: Request) -> Completion:
            nonlocal num_done
            async with self._room:
                completion = await self._answer(request)
            num_done += 1
            if on_progress is not None:
                on_progress(num_done, len(requests))
            return completion

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answer(request)) for request in requests]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first one that failed gave the others up
        return [task.result() for task in tasks]

    async def _answer(self, request: Request) -> Completion:
        answers = [CompletionOutput(index) for index in range(request.sampling.n)]
        completion = Completion(request.request_id, request.token_ids, answers, self._clock.now())
        await self._engine.follow(request, lambda output: completion.take(output, self._clock.now()))
        return completion

    async def _pump(self, request: Request, into: queue.SimpleQueue[SequenceOutput | Exception | None]) -> None:
        check = Completion(request.request_id, [], [CompletionOutput(i) for i in range(request.sampling.n)], 0.0)

        def take(output: SequenceOutput) -> None:
            check.take(output, 0.0)
            into.put(output)

        try:
            async with self._room:
                await self._engine.follow(request, take)
            into.put(None)
        except Exception as error:
            into.put(error)

    def _make_request(self, prompt: Prompt, sampling: SamplingParams) -> Request:
        token_ids = self.tokenizer.encode(prompt, True) if isinstance(prompt, str) else list(prompt)
        if not all(isinstance(token_id, int) and 0 <= token_id < self.model.vocab_size for token_id in token_ids):
            raise InvalidRequestError(f"a prompt has a token id that is not in [0, {self.model.vocab_size})")
        admission = self._gate.admit(None)
        return Request(
            request_id=uuid.uuid4().hex,
            token_ids=token_ids,
            sampling=sampling,
            scope=admission.scope,
            tenant=admission.tenant,
            timeout_s=self._timeout_s,
        )

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        if self._template is None:
            from cloister.text import ChatTemplate  # brings jinja2, which a program that renders nothing can do without

            self._template = ChatTemplate.load(Path(self.model.path))
        text = self._template.render([dict(message) for message in messages], [dict(tool) for tool in tools or ()] or None)
        return self.tokenizer.encode(text, False)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a text and a flat list of token ids are one."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def open_llm(flags: Mapping[str, object] | None = None, config_file: Path | None = None) -> LLM:
    """Returns an `LLM` for settings as the command line has them; errors as in `LLM` and `resolve_settings`."""
    return LLM.open(resolve_settings(flags, config_file, listens=False))
