"""Sends a workload over HTTP at its arrival times, however slow the server is (open loop)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import httpx

from cloister.bench.recorder import RequestRecord
from cloister.bench.workloads import WorkItem
from cloister.types.clock import Clock, WallClock
from cloister.types.errors import ConfigError
from cloister.types.tls_failures import describe_tls_failure

OnProgress = Callable[[RequestRecord], None]

DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Target:
    """A server that speaks the OpenAI API.

    Attributes:
        url: such as http://127.0.0.1:8000, without `/v1`.
        timeout_s: deadline of one request, after which it counts as failed.
    """

    url: str
    model: str
    api_key: str | None = None
    timeout_s: float = 600.0

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(slots=True)
class _Answer:
    """The response of one request so far."""

    deliveries: list[tuple[float, int]] = field(default_factory=list)
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    failure: str | None = None

    def take(self, chunk: dict[str, object], now_s: float) -> None:
        """Reads one streamed chunk of `/v1/completions`."""
        if "error" in chunk:
            error = chunk["error"]
            self.failure = str(error.get("code") or error.get("type")) if isinstance(error, dict) else "error"
            return
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.num_input_tokens = int(usage.get("prompt_tokens", 0))
            self.num_output_tokens = int(usage.get("completion_tokens", 0))
            self.num_cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            if choice.get("text"):
                self.deliveries.append((now_s, 1))
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


async def find_model(url: str, api_key: str | None = None) -> str:
    """Returns the name of the first model that the server lists.

    Raises:
        ConfigError: no server answers, its certificate is not trusted, or its reply does not follow the OpenAI API.
    """
    try:
        async with httpx.AsyncClient(timeout=10) as client:
            headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
            reply = await client.get(f"{url}/v1/models", headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        nobody = f"no server answers at {url}; start one with `cloister serve`, or give --url"
        raise ConfigError(describe_tls_failure(url, error) or nobody) from None
    if reply.status_code == 401:
        raise ConfigError(f"the server at {url} asks for an API key; give --api-key-file", param="api_key")
    try:
        return str(reply.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{url}/v1/models did not answer as the OpenAI API does; check --url") from None


async def send_all(
    items: Sequence[WorkItem],
    target: Target,
    *,
    max_concurrency: int | None = None,
    on_progress: OnProgress | None = None,
    clock: Clock | None = None,
) -> list[RequestRecord]:
    """Sends every item at its arrival time and waits for all answers.

    Args:
        max_concurrency: maximum number of requests in flight; None keeps the loop open. With 1 they run one after another, and
            latencies count from sending.

    Returns:
        One record per item, in order; failures are records too.
    """
    clock = clock or WallClock()
    gate = asyncio.Semaphore(max_concurrency or len(items) or 1)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=target.timeout_s, limits=limits, headers=target.headers) as client:
        start_s = clock.now()

        async def send_one(number: int, item: WorkItem) -> RequestRecord:
            await asyncio.sleep(max(0.0, item.arrival_s - (clock.now() - start_s)))
            async with gate:
                due_s = item.arrival_s if max_concurrency is None else clock.now() - start_s
                record = await _send(client, target, number, item, due_s, lambda: clock.now() - start_s)
            if on_progress is not None:
                on_progress(record)
            return record

        return list(await asyncio.gather(*(send_one(number, item) for number, item in enumerate(items))))


async def _send(
    client: httpx.AsyncClient, target: Target, number: int, item: WorkItem, due_s: float, now: Callable[[], float]
) -> RequestRecord:
    answer = _Answer()
    try:
        async with asyncio.timeout(target.timeout_s):
            async for chunk in _stream(client, target, item, answer):
                answer.take(chunk, now())
    except (TimeoutError, httpx.TimeoutException):
        answer.failure = "timeout"
    except httpx.HTTPError:
        answer.failure = "connection"
    except ValueError:
        answer.failure = "malformed_reply"
    if answer.failure is None and answer.finish_reason not in ("stop", "length"):
        answer.failure = answer.finish_reason or "cut_off"
    return RequestRecord(
        number=number,
        due_s=due_s,
        end_s=now(),
        num_input_tokens=answer.num_input_tokens or item.num_input_tokens,
        num_output_tokens=answer.num_output_tokens or len(answer.deliveries),
        deliveries=tuple(answer.deliveries),
        num_cached_tokens=answer.num_cached_tokens,
        failure=answer.failure,
    )


async def _stream(
    client: httpx.AsyncClient, target: Target, item: WorkItem, answer: _Answer
) -> AsyncIterator[dict[str, object]]:
    async with client.stream("POST", f"{target.url}/v1/completions", json=make_body(item, target.model)) as reply:
        if reply.status_code != 200:
            answer.failure = f"http_{reply.status_code}"
            return
        async for line in reply.aiter_lines():
            data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
            if data == DONE:
                return
            if data:
                yield json.loads(data)


def make_body(item: WorkItem, model: str) -> dict[str, object]:
    """Returns the body of `/v1/completions` for one item: an answer of exactly the length in the trace."""
    return {
        "model": model,
        "prompt": item.prompt,
        "max_tokens": item.num_output_tokens,
        "min_tokens": item.num_output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
