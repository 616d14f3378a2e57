"""How long a job took, by the engine's events (rule 7), for APIs that tell their clients."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cloister.server.calls import HttpCall
from cloister.server.generation import GenerationJob


@dataclass(frozen=True, slots=True)
class Timings:
    """Times in seconds, None where they are not known. What is left of `total_s` was waited.

    Attributes:
        total_s: since the request's head arrived.
        load_s: from there until the engine had the prompt: body, model (where others had its place), template, tokens.
        prompt_s: from the first slot to the first token.
        answer_s: from the first token to the end.
    """

    total_s: float | None = None
    load_s: float | None = None
    prompt_s: float | None = None
    answer_s: float | None = None


def read_timings(call: HttpCall | None, job: GenerationJob) -> Timings:
    """Returns the times of a job whose outputs have all come; of several prompts, only the first two."""
    if call is None:
        return Timings()
    engine_stats = [stats for request in job.requests if (stats := call.engine_stats.get(request.request_id)) is not None]
    arrivals = [stats.arrival_s for stats in engine_stats if stats.arrival_s is not None]
    total_s, load_s = time.monotonic() - call.began_s, _between(call.began_s, min(arrivals, default=None))
    if len(engine_stats) != 1:
        return Timings(total_s, load_s)
    (stats,) = engine_stats
    return Timings(
        total_s, load_s, _between(stats.scheduled_s, stats.first_token_s), _between(stats.first_token_s, stats.ended_s)
    )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
