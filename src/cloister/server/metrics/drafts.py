"""Figures of speculation: what was drafted and accepted, and the time of it. Names end as those of vLLM do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from cloister.types.events import Stepped


class Drafts:
    """Sums over every request; none is kept apart."""

    def __init__(self) -> None:
        self._num_drafts: Counter[str] = Counter()
        self._drafted: Counter[tuple[str, int]] = Counter()
        self._accepted: Counter[tuple[str, int]] = Counter()
        self._draft_s: dict[str, float] = {}
        self._gained_s = 0.0
        self._spent_s = 0.0
        self._shown_s = 0.0
        """The most that was spent so far: a counter does not fall, and a step may be quicker than predicted."""

    def observe(self, event: Stepped) -> None:
        """Takes one step."""
        self._gained_s += event.gained_s
        self._spent_s += event.spent_s
        self._shown_s = max(self._shown_s, self._spent_s)
        for part in event.drafting:
            name = part.drafter
            self._num_drafts[name] += part.num_drafts
            self._draft_s[name] = self._draft_s.get(name, 0.0) + part.draft_s
            for place, count in enumerate(part.drafted):
                self._drafted[name, place] += count
            for place, count in enumerate(part.accepted):
                self._accepted[name, place] += count

    def collect(self) -> Iterator[Metric]:
        """Yields the counters; those by drafter are empty until one drafted."""
        names = sorted(self._num_drafts)
        drafted, accepted = ({n: _sum_of(counts, n) for n in names} for counts in (self._drafted, self._accepted))
        yield _by_drafter("num_drafts", "Drafts that were verified, one a sequence and step.", self._num_drafts)
        yield _by_drafter("num_draft_tokens", "Tokens that were drafted and verified.", drafted)
        yield _by_drafter("num_accepted_tokens", "Tokens that were drafted and accepted.", accepted)
        yield _by_place("num_draft_tokens_per_pos", "Tokens drafted, by their place in the draft.", self._drafted)
        yield _by_place("num_accepted_tokens_per_pos", "Tokens accepted, by their place in the draft.", {
            key: self._accepted[key] for key in self._drafted
        })  # fmt: skip
        yield _by_drafter("draft_seconds", "Time that drafters took.", self._draft_s)
        for name, text, value in (
            ("gained_seconds", "Predicted time of the steps that accepted drafts made needless.", self._gained_s),
            ("spent_seconds", "Time of steps beyond what is predicted of them without drafts.", self._shown_s),
        ):
            yield CounterMetricFamily(f"cloister_spec_decode_{name}", text, value=value)


def _sum_of(counts: Counter[tuple[str, int]], drafter: str) -> int:
    return sum(count for (name, _), count in counts.items() if name == drafter)


def _by_drafter(name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"cloister_spec_decode_{name}", text, labels=("drafter",))
    for drafter, value in sorted(values.items()):
        family.add_metric((drafter,), value)
    return family


def _by_place(name: str, text: str, values: Mapping[tuple[str, int], int]) -> Metric:
    family = CounterMetricFamily(f"cloister_spec_decode_{name}", text, labels=("drafter", "position"))
    for (drafter, place), value in sorted(values.items()):
        family.add_metric((drafter, str(place)), value)
    return family
