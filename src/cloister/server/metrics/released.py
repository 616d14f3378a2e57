"""The few sums that a strict profile lets out, and those only after a threshold of requests."""

from __future__ import annotations

from cloister.privacy.counts import ALLOWED_COUNTS, CountRelease
from cloister.types.events import Ended, Event, Preempted, Stepped


class ReleasedCounts:
    """Counts everything and shows what its release lets out."""

    def __init__(self, release: CountRelease) -> None:
        self._release = release
        self._num_ended = 0
        self._counts = dict.fromkeys(sorted(ALLOWED_COUNTS), 0)

    def observe(self, event: Event) -> None:
        """Takes one event of the engine."""
        match event:
            case Ended(last=last):
                self._counts["prompt_tokens"] += event.num_prompt_tokens if last else 0
                self._counts["generation_tokens"] += event.num_output_tokens
                self._counts["requests"] += last
                self._num_ended += last
            case Preempted():
                self._counts["num_preemptions"] += 1
            case Stepped():
                self._counts["steps"] += 1
            case _:
                pass

    def count_reply(self, route: str, status: int) -> None:
        """Keeps nothing: refusals are not among the counts that may leave."""

    def render(self) -> bytes:
        """Returns the sums as they were last released."""
        shown = self._release.publish(self._num_ended, self._counts)
        lines = [f"# TYPE cloister_{name}_total counter\ncloister_{name}_total {value}" for name, value in shown.items()]
        return "".join(f"{line}\n" for line in lines).encode()
