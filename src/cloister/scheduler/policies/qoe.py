"""Scheduling by quality of experience (Andes, Liu et al. 2024). Pure; it takes `now`.

A reader expects a first token soon and then tokens at reading speed. The quality of experience of an answer is the area under
the curve of tokens read over time, divided by the area under the expected curve (section 3). Tokens that come before they can
be read gain nothing, so a sequence that is ahead of its reader can pause. A few times a second the policy chooses which
sequences run: those whose quality gains most over the next seconds per KV position (section 4: greedy packing by gain over
context length). A sequence is preempted a bounded number of times, and the one that waited longest starts after a bounded
number of others.
"""

from __future__ import annotations

from collections.abc import Iterable

from cloister.scheduler.policies.base import POLICIES, OrderedQueue
from cloister.scheduler.policies.preemptive import PreemptionRecord, PreemptivePolicy
from cloister.scheduler.sequence import SequenceRecord, Status
from cloister.scheduler.step_cost import StepSize
from cloister.types.threat import Requirement, ThreatProfile

QOE_THREAT = ThreatProfile(
    row="priority scheduling",
    threats=frozenset({Requirement.NON_TARGETABLE}),
    attack="send short prompts, which gain most for their KV; tell from pauses that others wait",
    mitigations=(
        "the order follows from lengths and from times of tokens, never from content, identity or cache hits",
        "all readers are expected to read at one speed: a request cannot ask for more",
        "a sequence is preempted a bounded number of times, and a bounded number of others start before the oldest",
        "`fair` divides between tenants",
    ),
)

EXPECTED_TTFT_S = 1.0
"""When readers expect the first token (Andes, section 6.1)."""
READING_SPEED = 4.8
"""Tokens per second that readers take (Andes, section 6.1: English text)."""
HORIZON_S = 5.0
"""How far ahead gains are estimated."""
INTERVAL_S = 0.2
"""Time between two choices."""
MAX_PREEMPTIONS = 1
"""Maximum number of preemptions of a sequence for more urgent ones (Andes, section 4.3, caps the average at 1)."""
MAX_PASSES = 64
"""Maximum number of others that start before the longest waiting sequence."""
KV_SHARE = 0.9
"""Part of the KV memory that a choice fills; the rest is for growth until the next choice."""


class DeliveryTimeline:
    """Progress of the reader of one answer.

    Attributes:
        num_read: tokens that were read, in fractions.
        read_area: area under the curve of tokens read over time, since arrival.
    """

    __slots__ = ("_arrival_s", "_now", "_num_delivered", "num_read", "read_area")

    def __init__(self, arrival_s: float) -> None:
        self._arrival_s = self._now = arrival_s
        self._num_delivered = 0
        self.num_read = self.read_area = 0.0

    def advance(self, now: float, num_delivered: int) -> None:
        """Lets the reader read tokens delivered before until `now`, then sets the number of delivered tokens."""
        if now > self._now:
            self.read_area, self.num_read = self._read(now - self._now, self._num_delivered)
            self._now = now
        self._num_delivered = num_delivered

    def _read(self, seconds: float, num_delivered: int) -> tuple[float, float]:
        """Returns (area, tokens read) after `seconds` without deliveries."""
        reading_s = min(seconds, (num_delivered - self.num_read) / READING_SPEED)
        end = self.num_read + READING_SPEED * reading_s
        area = self.read_area + (self.num_read + end) / 2 * reading_s + end * (seconds - reading_s)
        return area, end

    def expected_area(self, now: float, num_tokens: float = float("inf")) -> float:
        """Returns the area under the expected curve until `now`, which ends at `num_tokens`."""
        reading_s = max(0.0, now - self._arrival_s - EXPECTED_TTFT_S)
        rising_s = min(reading_s, num_tokens / READING_SPEED)
        area = READING_SPEED * rising_s * rising_s / 2
        return area + num_tokens * (reading_s - rising_s) if reading_s > rising_s else area

    def predict_area(self, delay_s: float, rate: float, horizon_s: float) -> float:
        """Returns the area at `horizon_s` from now if tokens come at `rate` per second after `delay_s`."""
        area, num_read = self._read(min(delay_s, horizon_s), self._num_delivered)
        left_s = max(0.0, horizon_s - delay_s)
        buffered = self._num_delivered - num_read
        # With a buffer the reader reads at full speed until it is empty; `rate` refills it meanwhile.
        fast_s = left_s if rate >= READING_SPEED else min(left_s, buffered / (READING_SPEED - rate))
        slow_s, end = left_s - fast_s, num_read + READING_SPEED * fast_s
        return area + (num_read + end) / 2 * fast_s + (end + rate * slow_s / 2) * slow_s


def measure_qoe(arrival_s: float, deliveries: Iterable[tuple[float, int]]) -> float:
    """Returns the quality of experience of a whole answer, from 0 to 1 (Andes, section 3): areas until its last token is read.

    Args:
        deliveries: (time, tokens), in order.
    """
    timeline, num_tokens, now = DeliveryTimeline(arrival_s), 0, arrival_s
    for now, count in deliveries:
        num_tokens += count
        timeline.advance(now, num_tokens)
    end_s = now + (num_tokens - timeline.num_read) / READING_SPEED
    timeline.advance(end_s, num_tokens)
    expected = timeline.expected_area(end_s, num_tokens)
    return min(1.0, timeline.read_area / expected) if expected > 0.0 else float(num_tokens > 0)


class _Reader(PreemptionRecord):
    """A sequence's record.

    Attributes:
        gain: last estimate of its gain in quality per position of KV.
        urgency: 1 if it was chosen to run, else 2; 0 if it is next whatever its gain.
        is_preempted: it waits after it ran.
    """

    __slots__ = ("gain", "is_preempted", "num_preempted", "timeline", "urgency")

    def __init__(self, arrival_s: float) -> None:
        super().__init__()
        self.timeline = DeliveryTimeline(arrival_s)
        self.gain = 0.0
        self.urgency = 1
        self.num_preempted = 0
        self.is_preempted = False


@POLICIES.register("qoe", QOE_THREAT)
class QualityOfExperience(PreemptivePolicy):
    """Runs the sequences whose readers gain most."""

    def __init__(self) -> None:
        super().__init__()
        self.push, self.peek, self.pop = self._push, self._peek, self._pop
        self._waiting: dict[int, SequenceRecord] = {}
        self._queue = self._new_queue()
        self._now = 0.0
        self._chosen_s = float("-inf")
        self._num_passes = 0

    def begin_step(self, now: float) -> bool:
        self._now = now
        for sequence in self._view.running.values():
            self._of(sequence).timeline.advance(now, sequence.num_output)
        if now - self._chosen_s >= INTERVAL_S:
            self._chosen_s = now
            self._choose()
        return super().begin_step(now)

    def urgency(self, sequence: SequenceRecord) -> int:
        return self._of(sequence).urgency

    def new_record(self, sequence: SequenceRecord) -> PreemptionRecord:
        return _Reader(sequence.request_state.arrival_s)

    def is_preemptible(self, sequence: SequenceRecord) -> bool:
        return self._of(sequence).num_preempted < MAX_PREEMPTIONS and super().is_preemptible(sequence)

    def rank(self, sequence: SequenceRecord) -> tuple[float, int]:
        return -self._of(sequence).gain, sequence.request_state.order

    def join(self, sequence: SequenceRecord) -> None:
        super().join(sequence)
        self._of(sequence).is_preempted = False

    def leave(self, sequence: SequenceRecord) -> None:
        self._of(sequence).is_preempted = True

    def _choose(self) -> None:
        """Chooses which sequences run: fills slots and KV memory in order of gain."""
        self._waiting = {number: s for number, s in self._waiting.items() if s.status is Status.WAITING}
        running, waiting = list(self._view.running.values()), list(self._waiting.values())
        rate = self._predict_rate(running)
        for sequence in (*running, *waiting):
            self._estimate(sequence, rate)
        num_slots, num_tokens = self._view.max_num_seqs, KV_SHARE * self._view.num_kv_tokens
        fixed = [s for s in running if not self.is_preemptible(s)]
        free = sorted((*(s for s in running if self.is_preemptible(s)), *waiting), key=self.rank)
        if waiting and self._num_passes >= MAX_PASSES:
            oldest = self._oldest()
            free.remove(oldest)
            free.insert(0, oldest)
        for sequence in (*fixed, *free):
            num_held = len(sequence.token_ids)
            fits = sequence.num_slots <= num_slots and num_held <= num_tokens
            self._of(sequence).urgency = 1 + int(not fits)
            if fits:
                num_slots, num_tokens = num_slots - sequence.num_slots, num_tokens - num_held
        if waiting and self._num_passes >= MAX_PASSES:
            self._of(self._oldest()).urgency = 0
        self._queue = self._new_queue()
        for sequence in waiting:
            self._queue.push(sequence)

    def _predict_rate(self, running: list[SequenceRecord]) -> float:
        """Returns the predicted tokens per second of a running sequence; the reading speed before the first measurement."""
        step_s = self._view.cost.predict(StepSize().plus_decodes([s.num_planned for s in running] or [0]))
        return 1.0 / step_s if step_s > 0.0 else READING_SPEED

    def _estimate(self, sequence: SequenceRecord, rate: float) -> None:
        """Estimates a sequence's gain from running, per position of KV."""
        reader, length = self._of(sequence), len(sequence.token_ids)
        num_missing = length - sequence.num_planned if sequence.status is Status.RUNNING else length
        delay_s = self._view.cost.predict(StepSize().plus(length - num_missing, num_missing)) if num_missing > 1 else 0.0
        timeline = reader.timeline
        now = max(self._now, sequence.request_state.arrival_s)  # the last step may be long ago
        timeline.advance(now, sequence.num_output)
        served = timeline.predict_area(delay_s, rate, HORIZON_S)
        waited = timeline.predict_area(HORIZON_S, rate, HORIZON_S)
        reader.gain = (served - waited) / timeline.expected_area(now + HORIZON_S) / length

    def _oldest(self) -> SequenceRecord:
        return min(self._waiting.values(), key=lambda s: s.request_state.order)

    def _new_queue(self) -> OrderedQueue:
        return OrderedQueue(lambda s: (self._of(s).urgency, *self.rank(s)))

    def _push(self, sequence: SequenceRecord) -> None:
        reader = self._of(sequence)
        reader.num_preempted += reader.is_preempted
        reader.is_preempted = False
        self._estimate(sequence, self._predict_rate(list(self._view.running.values())))
        reader.urgency = 2  # it preempts none before it was chosen
        self._waiting[sequence.seq_id] = sequence
        self._queue.push(sequence)

    def _peek(self) -> SequenceRecord | None:
        return self._queue.peek()

    def _pop(self) -> SequenceRecord:
        sequence = self._queue.pop()
        is_oldest = sequence is self._oldest()
        self._num_passes = 0 if is_oldest else self._num_passes + 1
        del self._waiting[sequence.seq_id]
        return sequence

    def _of(self, sequence: SequenceRecord) -> _Reader:
        reader = self.record_of(sequence)
        assert isinstance(reader, _Reader)
        return reader
