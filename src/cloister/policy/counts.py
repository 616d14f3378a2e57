"""What `/metrics` may show where the profile allows counts only: an allow-list, and a threshold of requests. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from cloister.types.threat import Requirement, ThreatProfile

PROFILING_THREAT = ThreatProfile(
    row="global profiling",
    threats=frozenset({Requirement.NO_PRIVILEGED_ACCESS}),
    residue="statistics",
    where=("host memory",),
    attack="operator view into content",
    mitigations=("counts only, from an allow-list, shown anew after a threshold of requests",),
)

ALLOWED_COUNTS = frozenset({"requests", "prompt_tokens", "generation_tokens", "steps", "num_preemptions"})
"""Sums over everybody. Cached tokens, times, finish reasons and queue lengths are not among them: each tells of a request."""

THRESHOLD = 20
"""Requests that must end between two publications; each figure then sums over that many at least."""


class CountRelease:
    """Publishes counts so seldom that none can be traced to one request (after k-anonymity, Sweeney 2002).

    What is shown stays as it was until `threshold` more requests have ended: the difference of two readings is never about
    fewer. Who sends `threshold - 1` of them knows the last one's figures, so this keeps an operator out, not a flood.

    Args:
        names: counts that may be shown; everything else stays inside.
        threshold: requests between two publications, at least 2.
    """

    def __init__(self, names: frozenset[str] = ALLOWED_COUNTS, threshold: int = THRESHOLD) -> None:
        if threshold < 2:
            raise ValueError("a threshold of fewer than two requests hides nobody")
        self._names = names
        self._threshold = threshold
        self._num_published = 0
        self._shown: dict[str, float] = {}

    def publish(self, num_ended: int, counts: Mapping[str, float]) -> dict[str, float]:
        """Returns what may be shown now.

        Args:
            num_ended: requests that ended since the server started.
            counts: running totals by name.
        """
        if num_ended - self._num_published >= self._threshold:
            self._num_published = num_ended
            self._shown = {name: value for name, value in counts.items() if name in self._names}
        return dict(self._shown)
