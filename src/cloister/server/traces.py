"""A call as spans: the request, and inside it the queue, the prefill and the decode of every prompt. Pure.

Attributes come from one list, named after OpenTelemetry's conventions for HTTP and generative AI; none of them is content. Of
what a client sends, its trace and span ids are taken (W3C Trace Context, section 3.2) and nothing else: `tracestate` and
`baggage` may hold anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from cloister.engine.in_flight import EngineStats
from cloister.server.calls import HttpCall
from cloister.server.logs import QUIET_ROUTES, method_of

AttributeValue = str | int | float | tuple[str, ...]

ALLOWED: Final = frozenset(
    {
        "cloister.num_preemptions",
        "cloister.num_prompts",
        "cloister.request_id",
        "error.type",
        "gen_ai.operation.name",
        "gen_ai.provider.name",
        "gen_ai.request.model",
        "gen_ai.response.finish_reasons",
        "gen_ai.response.model",
        "gen_ai.response.time_to_first_chunk",
        "gen_ai.usage.cache_read.input_tokens",
        "gen_ai.usage.input_tokens",
        "gen_ai.usage.output_tokens",
        "http.request.method",
        "http.response.status_code",
        "http.route",
    }
)
_OPERATIONS: Final[Mapping[str, str]] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
_TRACEPARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class Parent:
    """The span of a client that a request belongs to."""

    trace_id: int
    span_id: int
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class Span:
    """One span; times are of the monotonic clock.

    Attributes:
        is_request: it is the request as a whole, which the others are parts of.
        failed: the server is at fault.
        moments: (name, time) of what happened on the way.
    """

    name: str
    start_s: float
    end_s: float
    is_request: bool = False
    failed: bool = False
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    moments: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        assert self.attributes.keys() <= ALLOWED


def parse_traceparent(header: bytes | None) -> Parent | None:
    """Returns the parent that a `traceparent` header names, None when there is none or it is not well-formed."""
    found = _TRACEPARENT.fullmatch(header) if header is not None else None
    if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5] is not None):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    return Parent(trace_id, span_id, bool(int(found[4], 16) & 1)) if trace_id and span_id else None


def spans_of(call: HttpCall, model_name: str) -> list[Span]:
    """Returns the spans of a call that is over, the request first; none for what machines ask every few seconds.

    Args:
        model_name: as clients know it.
    """
    if call.ended_s is None or call.route in QUIET_ROUTES:
        return []
    # A client that left is not waited for, but what the engine still did for it belongs to it.
    end_s = max([call.ended_s, *(stats.ended_s for stats in call.engine_stats.values() if stats.ended_s is not None)])
    whole = Span(
        name=f"{method_of(call)} {call.route}",
        start_s=call.began_s,
        end_s=end_s,
        is_request=True,
        failed=call.status >= 500,
        attributes=_attributes(call, model_name),
    )
    return [whole, *(span for stats in call.engine_stats.values() for span in _phases(stats))]


def _attributes(call: HttpCall, model_name: str) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        "cloister.request_id": call.call_id,
        "http.request.method": method_of(call),
        "http.response.status_code": call.status,
        "http.route": call.route,
    }
    if call.status >= 400:
        found["error.type"] = str(call.status)
    if not call.engine_stats:
        return found
    found |= {
        "cloister.num_preemptions": call.sum(lambda stats: len(stats.preempted_s)),
        "cloister.num_prompts": len(call.engine_stats),
        "gen_ai.provider.name": "cloister",
        "gen_ai.request.model": model_name,
        "gen_ai.response.finish_reasons": tuple(reason for stats in call.engine_stats.values() for reason in stats.reasons),
        "gen_ai.response.model": model_name,
        "gen_ai.usage.cache_read.input_tokens": call.sum(lambda stats: stats.num_cached_tokens),
        "gen_ai.usage.input_tokens": call.sum(lambda stats: stats.num_prompt_tokens),
        "gen_ai.usage.output_tokens": call.sum(lambda stats: stats.num_output_tokens),
    }
    if (operation := _OPERATIONS.get(call.route)) is not None:
        found["gen_ai.operation.name"] = operation
    first = [stats.first_token_s for stats in call.engine_stats.values() if stats.first_token_s is not None]
    if first:
        found["gen_ai.response.time_to_first_chunk"] = min(first) - call.began_s
    return found


def _phases(stats: EngineStats) -> Iterator[Span]:
    """Yields what a prompt went through, as far as it came."""
    if stats.arrival_s is None or stats.ended_s is None:
        return
    borders = (stats.arrival_s, stats.scheduled_s, stats.first_token_s, stats.ended_s)
    for name, start_s, next_s in zip(("queue", "prefill", "decode"), borders, borders[1:], strict=False):
        if start_s is not None:
            end_s = stats.ended_s if next_s is None else next_s
            moments = tuple(("preempted", moment) for moment in stats.preempted_s if start_s <= moment < end_s)
            yield Span(name, start_s, end_s, moments=moments)
