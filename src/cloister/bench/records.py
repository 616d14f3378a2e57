"""What one request of a run saw, and the figures that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as its sender saw it. Times in seconds from the start of the run.

    Attributes:
        number: place in the workload.
        due_s: when it was to be sent; all latencies count from here, so that a late sender hides nothing.
        deliveries: (time, tokens) of everything that came back; tokens is 1 where the sender cannot know more.
        failure: None for an answer, else what kind of failure (`http_429`, `timeout`, `connection`, `abort`, ...).
    """

    number: int
    due_s: float
    end_s: float
    num_input_tokens: int
    num_output_tokens: int
    deliveries: tuple[tuple[float, int], ...] = ()
    num_cached_tokens: int = 0
    failure: str | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return (self.deliveries[0][0] if self.deliveries else self.end_s) - self.due_s

    @property
    def e2e_s(self) -> float:
        """Time to the last token."""
        return (self.deliveries[-1][0] if self.deliveries else self.end_s) - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None with fewer than two."""
        if self.num_output_tokens < 2 or len(self.deliveries) < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between deliveries (TBT): what a reader waits between one piece of text and the next."""
        times = [time_s for time_s, _ in self.deliveries]
        return [after - before for before, after in pairwise(times)]
