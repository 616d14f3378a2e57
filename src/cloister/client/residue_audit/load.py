"""Sends marked requests of every kind concurrently, and collects their answers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from cloister.trust.residue.needles import Mark

NUM_TOKENS: Final = 24
LONG_ANSWER: Final = 400
_WIDE: Final = " \u2192 and"  # CPython stores a text with such a letter in two bytes per character
_WIDEST: Final = " \U0001f512 and"  # and a text with this in four


@dataclass(frozen=True, slots=True)
class MarkedRequest:
    """One request.

    Attributes:
        body: the request body.
        cancels: the client disconnects after the first bytes of the answer.
        is_refused: the server is expected to answer with an error.
    """

    shape: str
    path: str
    body: bytes
    cancels: bool = False
    is_refused: bool = False


Make = Callable[[Mark], MarkedRequest]


def _call(shape: str, path: str, body: Mapping[str, Any], *, cancels: bool = False, is_refused: bool = False) -> MarkedRequest:
    return MarkedRequest(shape, path, json.dumps(body).encode(), cancels, is_refused)


def _chat(
    mark: Mark, shape: str, *, around: str = "", cancels: bool = False, is_refused: bool = False, **more: Any
) -> MarkedRequest:
    messages = [{"role": "system", "content": "Answer in words."}, {"role": "user", "content": f"Explain{around}{mark.text}."}]
    body = {"messages": messages, "max_tokens": NUM_TOKENS, "temperature": 1.2, "ignore_eos": True, **more}
    return _call(shape, "/v1/chat/completions", body, cancels=cancels, is_refused=is_refused)


def _completion(mark: Mark, shape: str, *, cancels: bool = False, is_refused: bool = False, **more: Any) -> MarkedRequest:
    body = {"prompt": f"Notes on{mark.text}:", "max_tokens": NUM_TOKENS, "temperature": 1.2, "ignore_eos": True, **more}
    return _call(shape, "/v1/completions", body, cancels=cancels, is_refused=is_refused)


def prompt_ids(mark: Mark) -> list[int]:
    """The prompt of the shape "token ids"."""
    return [token_id for run in mark.runs for token_id in run]


def _structured(mark: Mark) -> MarkedRequest:
    words = mark.text.strip()
    schema = {"type": "object", "properties": {"said": {"enum": [words, "no" + mark.text]}}, "required": ["said"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": True, "schema": {**schema, "additionalProperties": False}},
    }
    return _chat(mark, "structured output", response_format=form, max_tokens=160)


def _tool(mark: Mark) -> MarkedRequest:
    parameters = {"type": "object", "properties": {"what": {"type": "string", "description": mark.text}}}
    tool = {"type": "function", "function": {"name": "look_up", "description": mark.text, "parameters": parameters}}
    return _chat(mark, "tool", tools=[tool])


def _broken(mark: Mark) -> MarkedRequest:
    body = f'{{"messages": [{{"role": "user", "content": "{mark.text}'
    return MarkedRequest("broken JSON", "/v1/chat/completions", body.encode(), is_refused=True)


SHAPES: Final[tuple[Make, ...]] = (
    lambda mark: _chat(mark, "chat"),
    lambda mark: _chat(mark, "chat stream", stream=True),
    lambda mark: _completion(mark, "completion"),
    lambda mark: _call(
        "token ids", "/v1/completions", {"prompt": prompt_ids(mark), "max_tokens": NUM_TOKENS, "temperature": 0}
    ),
    lambda mark: _chat(mark, "cancelled stream", stream=True, max_tokens=LONG_ANSWER, cancels=True),
    lambda mark: _call("embedding", "/v1/embeddings", {"input": f"On{mark.text}."}),
    lambda mark: _chat(mark, "wide text", around=_WIDE, stream=True),
    lambda mark: _chat(mark, "widest text", around=_WIDEST),
    _structured,
    lambda mark: _chat(mark, "log-probabilities", logprobs=True, top_logprobs=3),
    lambda mark: _completion(mark, "echo with prompt's log-probabilities", echo=True, logprobs=2),
    lambda mark: _completion(mark, "two answers", n=2, stop=[mark.text]),
    lambda mark: _completion(mark, "cancelled completion", stream=True, max_tokens=LONG_ANSWER, cancels=True),
    lambda mark: _chat(mark, "refused value", temperature=f"as{mark.text}", is_refused=True),
    lambda mark: _chat(mark, "unknown model", model=f"m{mark.text}", is_refused=True),
    _broken,
    lambda mark: _completion(mark, "too long", prompt=mark.text * 1500, is_refused=True),
    lambda mark: _call("responses", "/v1/responses", {"input": f"Explain{mark.text}.", "max_output_tokens": NUM_TOKENS}),
    _tool,
    lambda mark: _completion(mark, "seeded, penalised", seed=7, presence_penalty=0.5, frequency_penalty=0.5, top_p=0.9),
)  # fmt: skip
"""Request i has shape i modulo their number."""


def long_stream(mark: Mark) -> MarkedRequest:
    """A stream that is long enough to be searched while it runs."""
    return _chat(mark, "watched stream", stream=True, max_tokens=LONG_ANSWER, temperature=0)


def long_ids(mark: Mark) -> MarkedRequest:
    """Like `long_stream`, with a prompt of token ids, so that the model's computed values are known."""
    body = {"prompt": prompt_ids(mark), "max_tokens": LONG_ANSWER, "temperature": 0, "ignore_eos": True, "stream": True}
    return _call("watched stream", "/v1/completions", body)


NUM_AT_ONCE: Final = 8
_TEXT_KEYS: Final = frozenset({"content", "text", "reasoning_content"})


@dataclass(slots=True)
class LoadResult:
    """The outcomes of the requests.

    Attributes:
        answers: (owner, text) of the model's answers.
        by_shape: number of each shape that ended as expected.
        failures: number of each shape that did not, with the status.
    """

    answers: list[tuple[int, str]] = field(default_factory=list)
    by_shape: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)


async def send_all(client: httpx.AsyncClient, calls: Sequence[tuple[int, MarkedRequest]]) -> LoadResult:
    """Sends every (owner, call) and waits for the last answer."""
    sent = LoadResult()
    waiting = iter(calls)

    async def work() -> None:
        for owner, call in waiting:
            try:
                await _send(client, owner, call, sent)
            except httpx.HTTPError as error:
                sent.failures[f"{call.shape}: {type(error).__name__}"] += 1

    await asyncio.gather(*(work() for _ in range(NUM_AT_ONCE)))
    return sent


async def _send(client: httpx.AsyncClient, owner: int, call: MarkedRequest, sent: LoadResult) -> None:
    headers = {"content-type": "application/json"}
    async with client.stream("POST", call.path, content=call.body, headers=headers) as reply:
        pieces: list[bytes] = []
        async for piece in reply.aiter_bytes():
            pieces.append(piece)
            if call.cancels and len(pieces) > 1:
                break
    if (reply.status_code >= 400) != call.is_refused:
        sent.failures[f"{call.shape}: status {reply.status_code}"] += 1
        return
    sent.by_shape[call.shape] += 1
    if not call.is_refused:
        sent.answers.append((owner, "".join(_texts(b"".join(pieces)))))


def _texts(raw: bytes) -> Iterator[str]:
    """Yields the model's text, from a whole answer or the events of a stream."""
    lines = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")] or [raw]
    for line in lines:
        try:
            yield from _written(json.loads(line).get("choices", []))
        except (ValueError, AttributeError):
            continue


def _written(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _written(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in _TEXT_KEYS and isinstance(item, str):
                yield item
            elif key in ("message", "delta"):
                yield from _written(item)
