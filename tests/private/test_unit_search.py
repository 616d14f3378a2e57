"""Sealed units of several machines keep every promise under the faults and attacks of seeds, and the search finds bugs that are
planted on purpose."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cloister.cluster.sealed_unit import WorkerUnit
from cloister.cluster.virtual.scenario import Job
from cloister.engine.in_flight import InFlightRequest, InFlightRequests
from cloister.engine.request_client import RequestClient
from cloister.engine.sealed_channels import SealedChannels
from cloister.engine.supervision import LivenessProbe
from cloister.private.unit.carriers import MemberCarriers, _Carried, _Window
from cloister.private.unit.membership import UnitLeader, _Member
from cloister.private.unit.pairing import SealedRecords
from cloister.private.virtual import fuzz
from cloister.private.virtual.scenario import LONG_S, READY_S, UNIT_FAULT_KINDS, UnitFault, UnitScenario, draw_unit_scenario
from cloister.private.workers.channel_broker import ChannelBroker
from cloister.types.errors import ConfigError
from cloister.types.events import Submit
from cloister.types.request import Request

SCENARIOS = Path(__file__).parent / "scenarios"
MOST_SCENARIOS = 60
"""A planted bug must be found in so many scenarios that have what it is in."""
CHUNK = 50


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """The engines' deaths are the purpose, and no news."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


run_seed = cache(fuzz.run_unit_seed)


@pytest.mark.parametrize(
    "seeds",
    [range(CHUNK), *(pytest.param(range(first, first + CHUNK), marks=pytest.mark.slow) for first in range(CHUNK, 2000, CHUNK))],
    ids=str,
)
def test_every_seed_keeps_every_promise(seeds: range) -> None:
    found = {seed: run_seed(seed).violations for seed in seeds}
    assert {seed: violations for seed, violations in found.items() if violations} == {}


LIST_DIGESTS = """
import logging, sys
from cloister.private.virtual import fuzz
logging.disable(logging.CRITICAL)
for seed in sys.argv[1:]:
    print(fuzz.run_unit_seed(int(seed)).digest)
"""


def list_digests(seeds: list[str], hash_seed: int) -> list[str]:
    """Returns what happened in the runs of seeds, one after the other in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-c", LIST_DIGESTS, *seeds],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        check=True,
        capture_output=True,
        timeout=600,
    )
    return done.stdout.decode().split()


def test_seeds_run_the_same_in_every_order_and_process() -> None:
    """Keys are drawn anew in each run, and nothing follows from them."""
    seeds = ["1", "7", "16", "29"]
    digests = list_digests(seeds, 1)
    assert digests == list_digests(seeds[::-1], 2)[::-1]
    assert len({*digests}) == len(seeds)


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.json")), ids=lambda path: path.stem)
def test_a_scenario_that_broke_a_promise_once_keeps_all(path: Path) -> None:
    assert fuzz.replay_unit(fuzz.read_unit_scenario(path)).violations == ()


# Bugs that are planted, each in place of a method. What they call is the real one.

submission, keep_resumable, reply = InFlightRequest.submission, InFlightRequests.keep_resumable, ChannelBroker._reply


def know_the_last_statement_only(leader: UnitLeader, member: _Member) -> bool:
    return bool(leader._stated) and member.digest in leader._stated[-1].members


def go_on_anywhere(unit: WorkerUnit) -> None:
    pass


def admit_everything(window: _Window, number: int) -> bool:
    return True


def forget_what_was_said(found: InFlightRequest, now: float) -> Submit:
    return msgspec.structs.replace(submission(found, now), resumption=None)


def drop_and_abort_nothing(channels: SealedChannels, worker: Any) -> None:
    channels._selector.unregister(worker.sock)
    channels._stuck.discard(worker)
    worker.close()


def keep_connections(carried: _Carried) -> None:
    carried.has_ended = True
    carried.keys.close()


def keep_keys(records: SealedRecords) -> None:
    pass


def serve_on(carriers: MemberCarriers, pair_id: bytes) -> None:
    """A leader that is lost keeps its connections until the next one comes."""


def accuse_for_lost_connections(
    requests: InFlightRequests, error: str, *, is_dead: bool = True, is_shared: bool = False
) -> int:
    return keep_resumable(requests, error, is_shared=is_shared)


def never_ping(probe: LivenessProbe, now: float) -> bool:
    return False


@contextlib.contextmanager
def watch_no_deadline(client: RequestClient, request: Request) -> Iterator[None]:
    try:
        yield
    finally:
        client.abort(request.request_id)


def answer_once(broker: Any, sock: Any, *asked: Any) -> None:
    """A worker gets one channel, and another one never."""
    answered = vars(broker).setdefault("answered", set())
    if sock in answered:
        sock.send(b"-")
    else:
        answered.add(sock)
        reply(broker, sock, *asked)


def has(*kinds: str) -> Callable[[UnitScenario], bool]:
    return lambda scenario: any(fault.kind in kinds for fault in scenario.faults)


def restarts_a_member(scenario: UnitScenario) -> bool:
    return any(fault.kind in ("end_machine", "lose_machine") and fault.machine for fault in scenario.faults)


def has_clients_that_leave(scenario: UnitScenario) -> bool:
    return any(job.cancel_after_s is not None for job in scenario.jobs)


def cuts_between_many(scenario: UnitScenario) -> bool:
    return scenario.num_members > 1 and has("reset", "cut_path", "crash", "change")(scenario)


PLANTED: dict[str, tuple[Any, str, Any, Callable[[UnitScenario], bool]]] = {
    "a member with a new key is used at once": (UnitLeader, "_may_use", know_the_last_statement_only, restarts_a_member),
    "a cut brings a request to another member": (WorkerUnit, "_stay_home", go_on_anywhere, cuts_between_many),
    "a connection is admitted twice": (_Window, "admit", admit_everything, has("repeat")),
    "a request goes on without what was said": (InFlightRequest, "submission", forget_what_was_said, has("reset", "crash")),
    "a channel ends and its requests do not": (SealedChannels, "_drop", drop_and_abort_nothing, has_clients_that_leave),
    "a pair ends and its connections do not": (_Carried, "close", keep_connections, has("end_machine", "lose_machine")),
    "a pair ends and its keys do not": (SealedRecords, "close", keep_keys, has("reset")),
    "a worker gets one channel only": (ChannelBroker, "_reply", answer_once, has("crash")),
    "a front pings no engine": (LivenessProbe, "look", never_ping, has("hang")),
    "nobody watches a deadline": (RequestClient, "_watch_deadline", watch_no_deadline, has("hang")),
}  # fmt: skip
FIRST_SEEDS = {
    "a connection is admitted twice": 95,
    "a channel ends and its requests do not": 62,
    "a worker gets one channel only": 29,
    "a front pings no engine": 560,
    "nobody watches a deadline": 569,
}
"""Where the search for a bug begins, so that the test is quick: as long as scenarios stay as they are, this seed shows it."""


def scenarios_with(has: Callable[[UnitScenario], bool], count: int, first: int = 0) -> Iterator[UnitScenario]:
    drawn = (scenario for seed in itertools.count(first) if has(scenario := draw_unit_scenario(seed)))
    return itertools.islice(drawn, count)


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, shows = PLANTED[bug]
    monkeypatch.setattr(where, name, wrong)
    scenarios = scenarios_with(shows, MOST_SCENARIOS, FIRST_SEEDS.get(bug, 0))
    assert any(fuzz.replay_unit(scenario).violations for scenario in scenarios)


def lose_one_connection_and_two_engines(seed: int) -> UnitScenario:
    """The request is drawn for the member in half of the seeds; its connection is cut, and then its leader's engine dies twice,
    each time before it has computed enough to be cleared."""
    return UnitScenario(
        seed=seed,
        num_engines=1,
        jobs=(Job(at_s=READY_S, prompt="a question", max_tokens=150),),
        faults=(
            UnitFault(at_s=READY_S + 0.3, kind="reset", machine=1),
            UnitFault(at_s=READY_S + 0.32, kind="crash"),
            UnitFault(at_s=READY_S + 1.09, kind="crash"),
        ),
    )


def test_a_lost_connection_that_accuses_a_request_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.engine.client.TRIAL_SPREAD_S", 0.0)  # so that the second death comes while it is tried
    scenarios = [lose_one_connection_and_two_engines(seed) for seed in range(8)]
    assert [fuzz.replay_unit(each).violations for each in scenarios] == [()] * 8
    monkeypatch.setattr(InFlightRequests, "keep_resumable", accuse_for_lost_connections)
    found = [violation for each in scenarios for violation in fuzz.replay_unit(each).violations]
    assert found
    assert set(found) == {"r0[0] failed, though its engines died at most 2 times"}


def test_what_is_drawn_happens() -> None:
    """So what the search finds, or does not find, is of some worth."""
    faults, num_requests, num_tokens = Counter[str](), 0, 0
    for seed in range(CHUNK):
        outcome = run_seed(seed)
        faults += outcome.faults
        num_requests, num_tokens = num_requests + outcome.num_requests, num_tokens + outcome.num_tokens
    assert faults.keys() == {*UNIT_FAULT_KINDS}
    assert num_requests > 2 * CHUNK
    assert num_tokens > 10 * num_requests
    assert any(job.at_s > LONG_S / 2 for seed in range(CHUNK) for job in draw_unit_scenario(seed).jobs)


def test_a_file_that_cannot_be_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "scenario.json"
    for wrong, told in (
        ({"num_members": 9}, "num_members is 1 to 7"),
        ({"faults": [{"at_s": 1.0, "kind": "reset"}]}, "not there"),
        ({"clock_offsets_s": [200.0]}, "clocks are wrong by 45 s at most"),
        ({"routers": 1}, "does not hold a scenario of a sealed unit"),
    ):
        path.write_bytes(msgspec.json.encode({"type": "unit", "seed": 1, **wrong}))
        assert fuzz.has_unit_scenario(path)
        with pytest.raises(ConfigError, match=told):
            fuzz.read_unit_scenario(path)
