"""Slow replicas are found by their steps alone, get no requests, and come back when they are well."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from cloister.cluster.health import FADE_S, MAX_PROBE_S, NUM_STEPS, PROBE_S, SLOW_FOR_S, ReplicaSpeeds, SpeedChange
from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.types.events import Drafting, Stepped

FIXED_S, TOKEN_S, KEY_S = 0.01, 0.0002, 1e-6
STEP_EVERY_S = 0.25


class Fleet:
    """Replicas that take steps of random sizes.

    Attributes:
        factors: the steps of each take so many times as long as they should.
        sizes: the most tokens of a step of each.
        asked_s: what clients ask of sampling takes so long in each step of each; then its tokens are scored too, for so long
            each, if `scored_s` is not 0.
        starved: the engine's thread of each waits so many seconds for a processor for each that it has one.
    """

    def __init__(self, num: int, sizes: tuple[int, ...] = ()) -> None:
        self.speeds = ReplicaSpeeds(num)
        self.factors = [1.0] * num
        self.sizes = sizes or (64,) * num
        self.asked_s, self.scored_s = [0.0] * num, 0.0
        self.starved = [0.0] * num
        self.draw = random.Random(1)
        self.changes: list[SpeedChange] = []
        self.now = self.changed_s = 0.0

    def step(self, num_steps: int = NUM_STEPS, indexes: tuple[int, ...] | None = None) -> None:
        for _ in range(num_steps):
            self.now += STEP_EVERY_S
            for index in range(len(self.factors)) if indexes is None else indexes:
                num_tokens = self.draw.randint(1, self.sizes[index])
                num_attended = num_tokens * self.draw.randint(1, 500)
                noise = self.draw.choice((1.0, 1.0, 1.05, 1.1, 4.0))  # now and then something else has the processor
                took_s = (FIXED_S + TOKEN_S * num_tokens + KEY_S * num_attended) * noise * self.factors[index]
                asked_s, is_scored = self.asked_s[index] * self.factors[index], bool(self.asked_s[index] and self.scored_s)
                took_s += asked_s + self.scored_s * num_tokens * is_scored * self.factors[index]
                event = Stepped(
                    self.now, took_s, num_tokens, 1, 1, 0, 1, 0, 8, num_attended=float(num_attended), sampling_s=asked_s,
                    num_scored=num_tokens * is_scored, processor_s=0.005, starved_s=0.005 * self.starved[index],
                )  # fmt: skip
                if (change := self.speeds.note(index, event, self.now)) is not None:
                    self.changes.append(change)
                    self.changed_s = self.now

    def choose(self, *busy: int) -> list[int]:
        snapshots = [ReplicaSnapshot(index, num_requests=int(index in busy)) for index in range(len(self.factors))]
        return [replica.index for replica in self.speeds.choose(snapshots, self.now)]


def test_steps_that_compute_nothing_make_no_replica_look_slow() -> None:
    speeds = ReplicaSpeeds(2)
    for now in range(200):
        for index, sizes in enumerate((((40, 800), (1, 41)), ((1, 60), (1, 61), (1, 62)))):  # one has the prompts
            for num_tokens, num_attended in sizes:
                took_s = FIXED_S + TOKEN_S * num_tokens + KEY_S * num_attended
                speeds.note(index, Stepped(now, took_s, num_tokens, 1, 1, 0, 1, 0, 8, num_attended=num_attended), now)
            speeds.note(index, Stepped(now, 0.0003, 0, 0, 0, 0, 1, 0, 8), now)
            assert speeds.slowness(index) < 1.2


@pytest.mark.parametrize("num", [2, 3, 5])
def test_a_slow_replica_is_left_out_and_comes_back_when_it_is_well(num: int) -> None:
    fleet = Fleet(num)
    fleet.step(100)
    assert fleet.choose() == list(range(num))
    fleet.factors[1] = 3.0
    fleet.step(2 * NUM_STEPS)
    assert fleet.choose() == [index for index in range(num) if index != 1]
    fleet.factors[1] = 1.0
    fleet.step(2 * NUM_STEPS)
    assert fleet.choose() == list(range(num))
    assert [(change.index, change.is_slow) for change in fleet.changes] == [(1, True), (1, False)]
    assert 2.0 <= fleet.changes[0].slowness < 4.0


@pytest.mark.parametrize(("factors", "quickest"), [((1.0, 5.0), 1 / 5), ((1.0, 1.0, 5.0), 1 / 3)])
def test_the_slowness_of_others_is_counted_once_in_a_quick_replica(factors: tuple[float, ...], quickest: float) -> None:
    fleet = Fleet(len(factors))
    fleet.factors = [*factors]
    fleet.step(300)
    assert fleet.speeds.slowness(0) == pytest.approx(quickest, rel=0.3)
    assert fleet.speeds.slowness(len(factors) - 1) == pytest.approx(5.0, rel=0.3)


@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("scored_s", [0.0, 0.002], ids=["sampling", "scored prompts"])
def test_what_one_client_asks_of_sampling_makes_no_replica_slow(num: int, scored_s: float) -> None:
    fleet = Fleet(num)
    fleet.step(100)
    fleet.scored_s = scored_s
    fleet.asked_s[1] = 0.1  # several times as long as a step without it
    fleet.step(300)
    assert fleet.changes == []
    assert fleet.speeds.slowness(1) < 1.3


@pytest.mark.parametrize("asked_of", [0, 1], ids=["of the other one", "of itself"])
def test_what_one_client_asks_of_sampling_hides_no_slow_replica(asked_of: int) -> None:
    fleet = Fleet(2)
    fleet.asked_s[asked_of] = 0.3
    fleet.step(100)
    fleet.factors[1] = 3.0
    fleet.step(2 * NUM_STEPS)
    assert [(change.index, change.is_slow) for change in fleet.changes] == [(1, True)]


def test_drafts_make_no_replica_slow() -> None:
    speeds = ReplicaSpeeds(2)
    drafting = (Drafting("ngram", 1, (1,), (0,), 0.05),)
    for now in range(200):
        speeds.note(0, Stepped(now, 0.01, 2, 1, 1, 0, 1, 0, 8, num_attended=60.0), now)
        speeds.note(1, Stepped(now, 0.06, 2, 1, 1, 0, 1, 0, 8, num_attended=60.0, drafting=drafting), now)
    assert speeds.slowness(1) == pytest.approx(1.0, abs=0.1)


def test_a_replica_is_slow_whose_thread_waits_for_a_processor_and_comes_back() -> None:
    fleet = Fleet(2)
    fleet.starved = [0.3, 0.4]
    fleet.step(100)
    assert fleet.changes == []
    fleet.starved[1] = 4.0  # the forward pass, on other threads or another device, takes no longer
    fleet.step(4 * NUM_STEPS)
    assert [(change.index, change.is_slow) for change in fleet.changes] == [(1, True)]
    fleet.starved[1] = 0.4
    fleet.step(10 * NUM_STEPS)
    assert [(change.index, change.is_slow) for change in fleet.changes] == [(1, True), (1, False)]


def test_threads_that_all_wait_for_a_processor_make_no_replica_slow() -> None:
    fleet = Fleet(3)
    fleet.starved = [3.0, 3.5, 4.0]
    fleet.step(400)
    assert fleet.changes == []


def test_a_replica_with_more_to_do_is_not_slow() -> None:
    fleet = Fleet(3, sizes=(4, 64, 2000))
    fleet.step(300)
    assert fleet.changes == []


def test_between_slow_and_well_nothing_changes() -> None:
    fleet = Fleet(3)
    fleet.step(100)
    fleet.factors[0] = 1.6
    fleet.step(100)
    assert fleet.changes == []
    fleet.factors[0] = 3.0
    fleet.step(100)
    fleet.factors[0] = 1.6
    fleet.step(100)
    assert [change.is_slow for change in fleet.changes] == [True]


def test_at_most_half_are_left_out() -> None:
    fleet = Fleet(4)
    fleet.step(100)
    for index in (2, 3):
        fleet.factors[index] = 9.0
        fleet.step(40)
    assert [fleet.speeds.is_slow(index) for index in range(4)] == [False, False, True, True]
    fleet.factors[1] = 9.0
    for _ in range(100):
        fleet.step(1)
        assert sum(fleet.speeds.is_slow(index) for index in range(4)) <= 2


def test_a_replica_is_not_slow_at_once() -> None:
    fleet = Fleet(2)
    fleet.step(100)
    fleet.factors[1] = 5.0
    begun_s = fleet.now
    fleet.step(2 * NUM_STEPS)
    assert fleet.changed_s - begun_s >= SLOW_FOR_S + NUM_STEPS / 2 * STEP_EVERY_S


def test_time_without_a_step_is_no_evidence() -> None:
    fleet = Fleet(2)
    fleet.step(100)
    fleet.factors[1] = 5.0
    fleet.step(NUM_STEPS)  # not yet for long enough
    assert fleet.changes == []
    fleet.now += 2 * SLOW_FOR_S  # an operator has drained it, say
    fleet.step(1)
    assert fleet.changes == []
    begun_s = fleet.now
    fleet.step(NUM_STEPS)
    assert [change.is_slow for change in fleet.changes] == [True]
    assert fleet.changed_s - begun_s >= SLOW_FOR_S - STEP_EVERY_S


@pytest.mark.parametrize("num", [2, 3, 5])
def test_what_slows_all_replicas_alike_makes_none_slow(num: int) -> None:
    fleet = Fleet(num)
    fleet.step(100)
    fleet.factors = [4.0] * num  # another program takes the cores that they share
    fleet.step(200)
    assert fleet.changes == []
    fleet.factors[1] *= 3.0
    fleet.step(2 * NUM_STEPS)
    assert [(change.index, change.is_slow) for change in fleet.changes] == [(1, True)], "one is still found among them"


def test_a_slow_replica_gets_one_request_now_and_then_while_it_has_none() -> None:
    fleet = Fleet(2)
    fleet.step(100)
    fleet.factors[0] = 5.0
    fleet.step(2 * NUM_STEPS)
    given_s = [fleet.changed_s]
    fleet.now = fleet.changed_s
    while fleet.now < 4000.0:
        if fleet.choose() == [0]:
            given_s.append(fleet.now)
            assert fleet.choose() == [1]
        fleet.now += 1.0
    assert [b - a for a, b in pairwise(given_s[:5])] == [PROBE_S, 2 * PROBE_S, 4 * PROBE_S, 8 * PROBE_S]
    assert max(b - a for a, b in pairwise(given_s)) == MAX_PROBE_S
    fleet.now += MAX_PROBE_S
    assert fleet.choose(0) == [1], "it has one"


def test_if_only_slow_replicas_accept_requests_they_get_them() -> None:
    fleet = Fleet(2)
    fleet.step(100)
    fleet.factors[0] = 5.0
    fleet.step(2 * NUM_STEPS)
    assert [replica.index for replica in fleet.speeds.choose([ReplicaSnapshot(0)], 0.0)] == [0]


def test_a_new_engine_starts_without_a_reputation() -> None:
    fleet = Fleet(2)
    fleet.step(100)
    fleet.factors[0] = 5.0
    fleet.step(2 * NUM_STEPS)
    fleet.speeds.forget(0)
    assert fleet.choose() == [0, 1]
    assert fleet.speeds.slowness(0) == 1.0


def test_the_times_of_a_replica_are_corrected_only_if_it_is_clearly_slower_and_that_fades() -> None:
    fleet = Fleet(3)
    fleet.step(100)
    assert [fleet.speeds.correction(index, fleet.now) for index in range(3)] == [1.0] * 3
    fleet.factors[1] = 3.0
    fleet.step(2 * NUM_STEPS)
    others, corrected = [fleet.speeds.correction(index, fleet.now) for index in (0, 2)], fleet.speeds.correction(1, fleet.now)
    assert others == [1.0, 1.0]
    assert 1.7 < corrected < 3.0
    later = fleet.speeds.correction(1, fleet.now + FADE_S)
    assert later - 1.0 == pytest.approx((corrected - 1.0) / 2)
    assert fleet.speeds.correction(1) == corrected, "what its steps are compared with does not fade"
