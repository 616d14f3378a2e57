"""`LLM`: a model and its engine in a thread, for a program without an event loop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import numpy as np
import numpy.typing as npt

from cloister.api.asynchronous import AsyncLLM
from cloister.api.completions import Completion, Message, Progress, Prompt
from cloister.launch import Settings, build_engine, resolve_settings
from cloister.launch.default_model import fetch_model
from cloister.types.errors import EngineError
from cloister.types.events import Event
from cloister.types.request import Request, SamplingParams, SequenceOutput

T = TypeVar("T")
CLOSE_TIMEOUT_S: Final = 10.0
_START_TIMEOUT_S: Final = 600.0
_left_open: set[LLM] = set()


@atexit.register
def _close_all() -> None:
    """Closes what a program did not: threads that are in a kernel when the interpreter goes would abort it."""
    for llm in list(_left_open):
        with contextlib.suppress(Exception):
            llm.close()


class LLM:
    """A model and its engine, in threads of this program. Several threads may call it; their prompts run together.

    Args:
        model: an embedded model's name, a directory, a GGUF file, or a hub name.
        settings: any setting of `EngineConfig`, such as scheduler="fair".

    Attributes:
        model, memory, tokenizer: what was loaded.

    Raises:
        CloisterError: the model or a setting cannot be used; the message says what to do.
    """

    def __init__(self, model: str = "cloister-5m", **settings: Any) -> None:
        self._open(resolve_settings({"model": model, **settings}, listens=False))

    def _open(self, settings: Settings) -> None:
        core = build_engine(settings.engine.config)
        self._llm = AsyncLLM.open(settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cloister-llm", daemon=True)
        self._thread.start()
        self._call(self._llm.adopt(core), _START_TIMEOUT_S)
        self.model, self.memory = core.model, core.memory
        self.tokenizer = core.tokenizer  # one of 150,000 entries takes 30 MiB
        _left_open.add(self)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        on_progress: Progress | bool | None = None,
    ) -> list[Completion]:
        """Answers prompts, as many at once as the engine runs, and returns their completions in order.

        Args:
            prompts: texts, or lists of token ids.
            sampling: for all prompts, or one for each; None takes the model's defaults.
            on_progress: called after each prompt; True draws a bar on standard error.

        Raises:
            CloisterError: a prompt cannot be answered; those that run are given up.
        """
        return self._call(self._llm.generate(prompts, sampling, on_progress))

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Completion:
        """Answers one conversation: messages with `role` and `content`, as in the OpenAI API."""
        return self._call(self._llm.chat(messages, sampling, tools))

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[SequenceOutput]:
        """Yields what each step adds to the answer: a token, or several where drafts were accepted (`speculate`).

        Closing the iterator early gives the request up.
        """
        self._check_open()
        (request,) = self._llm.make_requests([prompt], [sampling or self.default_sampling])
        outputs: queue.SimpleQueue[SequenceOutput | Exception | None] = queue.SimpleQueue()
        future = self._start_work(self._pump(request, outputs))
        try:
            while (item := outputs.get(timeout=request.timeout_s + CLOSE_TIMEOUT_S)) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        except queue.Empty:
            raise EngineError("the request waited for others of this program past its deadline; send fewer at once") from None
        finally:
            future.cancel()

    def stream_chat(self, messages: Sequence[Message], sampling: SamplingParams | None = None) -> Iterator[SequenceOutput]:
        """As `stream`, for a conversation."""
        return self.stream(self.render(messages), sampling)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Returns the prompt of a conversation, as the model's chat template writes it: many of them are one `generate`."""
        return self._llm.render(messages, tools)

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        on_progress: Progress | bool | None = None,
    ) -> npt.NDArray[np.float32]:
        """Makes a vector of each text and returns them, [num_texts, dimensions] float32.

        Args:
            dimensions: only the first so many numbers (`PoolingParams.dimensions`).
            normalize: vectors of length 1; None does as the model's files say.

        Raises:
            CloisterError: a text cannot be computed; the others are given up.
        """
        return self._call(self._llm.embed(texts, dimensions=dimensions, normalize=normalize, on_progress=on_progress))

    def score(self, text_1: Prompt | Sequence[Prompt], text_2: Prompt | Sequence[Prompt]) -> list[float]:
        """Returns a score of each pair: one text with each of many, or two lists of one length.

        It is the score of a cross-encoder where the model is one, and the cosine of the two texts' vectors where it is none.

        Raises:
            CloisterError: the lists do not go together, or a text cannot be computed.
        """
        return self._call(self._llm.score(text_1, text_2))

    def classify(self, texts: Prompt | Sequence[Prompt]) -> list[dict[str, float]]:
        """Returns for each text the probability of each of the model's classes, by the names of the classes.

        Raises:
            CloisterError: the model has no classes, or a text cannot be computed.
        """
        return self._call(self._llm.classify(texts))

    @property
    def default_sampling(self) -> SamplingParams:
        """What the model's generation_config.json asks for."""
        return self._llm.default_sampling

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """Calls `listener` with every event of the engine, on a thread of the LLM's."""
        self._loop.call_soon_threadsafe(self._llm.subscribe, listener)

    def close(self) -> None:
        """Gives up what runs and ends the engine. Closing twice does nothing."""
        _left_open.discard(self)
        if self._thread.is_alive():
            self._call(self._llm.close(), CLOSE_TIMEOUT_S * 2)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_TIMEOUT_S)
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

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
        self._check_open()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _check_open(self) -> None:
        if not self._thread.is_alive():
            raise EngineError("this LLM was closed; open another one")

    async def _pump(self, request: Request, into: queue.SimpleQueue[SequenceOutput | Exception | None]) -> None:
        try:
            await self._llm.follow(request, into.put)
            into.put(None)
        except Exception as error:
            into.put(error)


def open_llm(flags: Mapping[str, object] | None = None, config_file: Path | None = None) -> LLM:
    """Returns an `LLM` for settings as the command line has them, with its default model; errors as in `LLM`,
    `resolve_settings` and `fetch_model`."""
    llm = LLM.__new__(LLM)
    llm._open(fetch_model(resolve_settings(flags, config_file, listens=False)))
    return llm
