"""Detects replicas that are slower than the others, and decides which of them get requests. Pure: no clock, no I/O.

Each replica has a cost model of its own steps (`scheduler.step_cost.StepCost`). A step is compared with what the models of the
others predict for its size, so a replica is not slow because it has more to do. Compared is the time that does not depend on
what clients ask of sampling (`Stepped.plain_s`), else one client could make a replica seem slow, or hide one that is. A
replica whose sampling alone is slow has a thread that waits for a processor; how long it does, for each second that it has
one, is compared too. A slowdown that the others have at the same time is subtracted, since replicas may share cores. The
median of the last steps counts, so that a single late step changes nothing. Between SLOW and WELL the state does not change
(hysteresis).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Final

from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.scheduler.step_cost import StepCost, StepSize
from cloister.types.events import Stepped

SLOW: Final = 2.0
"""A replica is slow if its steps take this many times as long as those of the others."""
WELL: Final = 1.3
"""It is well again below this."""
NUM_STEPS: Final = 32
"""Steps whose median counts."""
SLOW_FOR_S: Final = 5.0
"""Minimum duration of slowness: when the load changes, one replica knows the new step times before the others do."""
MIN_MEASURED: Final = 3
"""Minimum number of measured steps of a size before the cost model predicts it."""
PROBE_S: Final = 10.0
"""A slow replica gets a probe request after this time, then after twice that time, and so on."""
MAX_PROBE_S: Final = 300.0
STARVATION_S: Final = 0.2
"""Half-life, in processor time of an engine's thread, of what is known of its waits for a processor."""
FADE_S: Final = 5.0
"""Half-life of a replica's measured slowness while it makes no steps: the cause may be gone."""


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """A replica became slow, or well again.

    Attributes:
        slowness: ratio of its step times to those of the others.
    """

    index: int
    is_slow: bool
    slowness: float


class _ReplicaSpeed:
    """The steps of one replica, and what they were compared with."""

    def __init__(self) -> None:
        self.is_slow = False
        self.slow_since_s = inf
        self.probe_at_s = self.probe_every_s = 0.0
        self._cost = StepCost()
        self._sizes: Counter[tuple[int, int, int]] = Counter()
        self._ratios: deque[tuple[float, float]] = deque(maxlen=NUM_STEPS)
        self._processor_s = self._starved_s = 0.0

    @property
    def stretch(self) -> float | None:
        """How many times as long as its processor time the engine's thread was ready to run; None until enough is known."""
        return 1.0 + self._starved_s / self._processor_s if self._processor_s >= STARVATION_S / 2 else None

    @property
    def is_known(self) -> bool:
        return len(self._ratios) == NUM_STEPS

    @property
    def last_s(self) -> float | None:
        """When the last step that counts was."""
        return self._ratios[-1][0] if self._ratios else None

    @property
    def since_s(self) -> float:
        """When the oldest step that counts was."""
        return self._ratios[0][0]

    def ratio(self, since_s: float = -inf) -> float | None:
        """Returns how many times as long as others predict the steps since then took; None if there were none."""
        ratios = [ratio for at_s, ratio in self._ratios if at_s >= since_s]
        return median(ratios) if ratios else None

    def predict(self, size: StepSize) -> float | None:
        """Returns the seconds of a step of this size here; None if no such step was measured."""
        return self._cost.predict(size) if self._sizes[_bucket(size)] >= MIN_MEASURED else None

    def learn(self, size: StepSize, elapsed_s: float) -> None:
        self._cost.learn(size, elapsed_s)
        self._sizes[_bucket(size)] += 1

    def note_thread(self, processor_s: float, starved_s: float) -> None:
        """Adds the times of the engine's thread since its step before."""
        keep = 0.5 ** (processor_s / STARVATION_S)
        self._processor_s = keep * self._processor_s + processor_s
        self._starved_s = keep * self._starved_s + starved_s

    def compare(self, ratio: float, now: float) -> None:
        """Adds a step that took `ratio` times as long as the others predict."""
        self._ratios.append((now, ratio))


def _bucket(size: StepSize) -> tuple[int, int, int]:
    """Sizes within a factor of two."""
    return int(size.num_tokens).bit_length(), int(size.num_attended).bit_length(), int(size.num_read).bit_length()


class ReplicaSpeeds:
    """The speeds of all replicas.

    At most half of them are slow at a time: if most are, something else is wrong than with these replicas.
    """

    def __init__(self, num_replicas: int) -> None:
        self._speeds = [_ReplicaSpeed() for _ in range(num_replicas)]

    def slowness(self, index: int) -> float:
        """Returns how many times as long as the others' the steps of a replica take; 1 until enough is known."""
        return self._relate(self._speeds[index])

    def correction(self, index: int, now: float | None = None) -> float:
        """Returns how many times as long as the steps of all replicas those of one are assumed to take: 1, unless they have
        taken more than WELL times as long, which no chance explains. `now` lets it fade since the last step.

        Step times of equal replicas differ by chance. One that seems slow for that gets few requests, and so few steps that
        would show better.
        """
        excess = max(1.0, self.slowness(index) / WELL) - 1.0
        last_s = self._speeds[index].last_s
        if excess and now is not None and last_s is not None:
            excess *= 0.5 ** (max(0.0, now - last_s) / FADE_S)
        return 1.0 + excess

    def is_slow(self, index: int) -> bool:
        """Whether a replica gets no requests but probes."""
        return self._speeds[index].is_slow

    def note(self, index: int, step: Stepped, now: float) -> SpeedChange | None:
        """Takes a step of a replica into account. Returns what has changed with it."""
        own = self._speeds[index]
        own.note_thread(step.processor_s, step.starved_s)
        if step.plain_s <= 0.0 or not step.num_tokens:  # a step that only ends requests says nothing about others
            return None
        # rows of logits take the place of keys that are read: a prompt whose tokens are scored has a row for each of them
        size = StepSize(step.num_tokens, step.num_attended, step.num_samples + step.num_scored)
        predicted = [speed.predict(size) for speed in self._speeds if speed is not own]
        known = [prediction_s for prediction_s in predicted if prediction_s]
        own.learn(size, step.plain_s)
        if not known:
            return None
        if own.last_s is not None and now - own.last_s > SLOW_FOR_S:
            own.slow_since_s = inf  # it was idle, which shows nothing
        own.compare(max(step.plain_s / median(known), self._starvation(own)), now)
        return self._judge(index, own, now)

    def forget(self, index: int) -> None:
        """Forgets a replica whose engine has ended."""
        self._speeds[index] = _ReplicaSpeed()

    def choose(self, replicas: Sequence[ReplicaSnapshot], now: float) -> list[ReplicaSnapshot]:
        """Returns which of the replicas that accept requests a router may choose from for one request.

        A slow one is among them only if its time to show whether it is well has come, and is the only one then, or if all are
        slow.
        """
        slow = [replica for replica in replicas if self._speeds[replica.index].is_slow]
        if len(slow) == len(replicas):
            return list(replicas)
        for replica in slow:
            speed = self._speeds[replica.index]
            if now >= speed.probe_at_s and not replica.num_requests:
                speed.probe_every_s = min(MAX_PROBE_S, 2 * speed.probe_every_s)
                speed.probe_at_s = now + speed.probe_every_s
                return [replica]
        return [replica for replica in replicas if not self._speeds[replica.index].is_slow]

    def _relate(self, speed: _ReplicaSpeed) -> float:
        """Returns how many times as long as those of the others the steps of a replica take, less what slows the others too.

        Only slowness above 1 is reduced by that of the others.
        """
        own = speed.ratio()
        if not speed.is_known or own is None:
            return 1.0
        others = [other.ratio(speed.since_s) for other in self._speeds if other is not speed]
        known = [ratio for ratio in others if ratio is not None]
        return max(min(1.0, own), own / max(1.0, median(known))) if known else own

    def _starvation(self, speed: _ReplicaSpeed) -> float:
        """Returns how many times as long as those of the others a replica's thread takes for its work, if that is more than
        chance explains; else 0."""
        own = speed.stretch
        known = [stretch for other in self._speeds if other is not speed and (stretch := other.stretch) is not None]
        ratio = own / median(known) if own is not None and known else 0.0
        return ratio if ratio > WELL else 0.0

    def _judge(self, index: int, speed: _ReplicaSpeed, now: float) -> SpeedChange | None:
        slowness = self._relate(speed)
        if slowness < SLOW or speed.is_slow:
            speed.slow_since_s = inf
        else:
            speed.slow_since_s = min(now, speed.slow_since_s)
        if speed.is_slow and slowness <= WELL:
            speed.is_slow = False
        elif now >= speed.slow_since_s + SLOW_FOR_S and self._may_be_slow():
            speed.is_slow = True
            speed.probe_every_s, speed.probe_at_s = PROBE_S, now + PROBE_S
        else:
            return None
        return SpeedChange(index, speed.is_slow, slowness)

    def _may_be_slow(self) -> bool:
        return sum(speed.is_slow for speed in self._speeds) + 1 <= len(self._speeds) // 2
