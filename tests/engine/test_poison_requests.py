"""A request that kills its engines is found, and no other one ends because of it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from cloister.engine import EngineClient, ProcessTransport, Supervision
from cloister.engine.in_flight import POISONED
from cloister.engine.poison_requests import NUM_SAFE_LOSSES, PROBATION_STEPS, Standing, Suspect, choose_due, judge
from cloister.engine.supervision import Restarts
from cloister.types.clock import VirtualClock
from cloister.types.events import Lost
from cloister.types.request import FinishReason, Request, SequenceOutput
from tests.engine.fake_transport import FakeTransport, opened_client
from tests.engine.forked_engines import spawn_forked
from tests.engine.replica import TRIGGER, VOCAB_SIZE, make_config, make_replica, make_request
from tests.history_program import greedy_continuation


def running(num: int) -> list[Suspect]:
    return [Suspect(has_slot=True) for _ in range(num)]


def find_culprit(
    num: int, kills: set[int], kills_after: int = 0, num_slots: int = 1000, length: int = 400
) -> tuple[int, list[int]]:
    """Runs requests of which some kill their engine, until none is left to try; returns the deaths and the culprits."""
    everyone = [Suspect() for _ in range(num)]
    open_ = list(range(num))
    sent: list[int] = []
    deaths, culprits = 0, []
    for _ in range(10_000):
        held = [i for i in open_ if i not in sent]
        due = choose_due([everyone[i] for i in held], [everyone[i] for i in sent])
        sent += [i for i in held if everyone[i] in due]
        for i in sent[:num_slots]:
            everyone[i].has_slot = True
        if any(i in kills and everyone[i].num_steps >= kills_after for i in sent[:num_slots]):
            deaths += 1
            found = judge([everyone[i] for i in sent])
            for i in sent:
                if everyone[i] is found:
                    culprits.append(i)
                    open_.remove(i)
            sent = []
            continue
        for i in sent[:num_slots]:
            everyone[i].note_step()
        for i in [i for i in sent if everyone[i].num_all_steps >= length]:
            sent.remove(i)
            open_.remove(i)
        if not open_:
            return deaths, culprits
    raise AssertionError(f"{len(open_)} requests did not end")


@pytest.mark.parametrize("num", [1, 2, 3, 17, 64])
@pytest.mark.parametrize("num_slots", [4, 1000])
def test_few_deaths_find_the_one_that_kills(num: int, num_slots: int) -> None:
    for culprit in {0, num // 2, num - 1}:
        deaths, culprits = find_culprit(num, {culprit}, num_slots=num_slots)
        assert culprits == [culprit]
        assert deaths in (3, 4)


def test_several_that_kill_are_found_one_after_another() -> None:
    draw = random.Random(3)
    for _ in range(50):
        kills = set(draw.sample(range(20), 3))
        _, culprits = find_culprit(20, kills)
        assert set(culprits) == kills


@pytest.mark.parametrize("kills_after", [1, 3, 5, 20])
def test_one_that_kills_late_is_found_though_it_was_cleared(kills_after: int) -> None:
    deaths, culprits = find_culprit(9, {4}, kills_after)
    assert culprits == [4]
    assert deaths <= 7


def test_nobody_is_blamed_for_two_deaths() -> None:
    alone = Suspect()
    for _ in range(NUM_SAFE_LOSSES):
        alone.has_slot = True
        assert judge([alone]) is None
    alone.has_slot = True
    assert judge([alone]) is alone


def test_requests_that_were_not_computed_are_not_accused_while_others_were() -> None:
    begun, waiting, compiling = running(2), Suspect(), Suspect(prepares=True)
    judge([*begun, waiting, compiling])
    assert [s.standing for s in (*begun, waiting, compiling)] == [Standing.SUSPECT] * 2 + [Standing.CLEARED, Standing.SUSPECT]


def test_one_that_kills_its_engine_before_it_has_a_slot_is_suspected_the_second_time() -> None:
    waiting = Suspect()
    judge([*running(2), waiting])
    judge([*running(2), waiting])
    assert waiting.standing is Standing.SUSPECT


def test_one_that_was_cleared_is_accused_with_those_that_are_not_cleared_yet() -> None:
    first, second = running(2)
    judge([first, second])
    for _ in range(PROBATION_STEPS):
        first.note_step()
    second.has_slot = True  # it started later
    judge([first, second])
    assert (first.standing, second.standing) == (Standing.SUSPECT, Standing.CONFINED)


def test_one_that_was_cleared_is_no_shield_for_another() -> None:
    bystander, killer = running(2)
    judge([bystander])
    for _ in range(PROBATION_STEPS):
        bystander.note_step()
    bystander.has_slot = True
    judge([bystander, killer])
    assert (bystander.standing, killer.standing) == (Standing.SUSPECT, Standing.SUSPECT)


def test_nothing_runs_beside_a_confined_request() -> None:
    confined, other = Suspect(standing=Standing.CONFINED), Suspect()
    assert choose_due([other, confined], []) == [confined]
    assert choose_due([other], [confined]) == []
    for _ in range(4):
        confined.note_step()
    assert choose_due([other], [confined]) == [other]


def test_one_that_died_with_company_is_tried_first() -> None:
    first, again = Suspect(standing=Standing.CONFINED), Suspect(standing=Standing.CONFINED, has_slot=True)
    assert judge([again, *running(1)]) is None
    assert choose_due([first, again], []) == [again]


# Real engines


async def answer(client: EngineClient, request: Request) -> list[SequenceOutput]:
    return [output async for output in client.generate(request)]


def test_sixteen_requests_are_answered_beside_one_that_kills_its_engine(model_path: Path) -> None:
    lost: list[Lost] = []
    innocents = [make_request(f"innocent {number}", max_tokens=30) for number in range(16)]
    poison = make_request([TRIGGER, 1, 2], max_tokens=100)

    async def main() -> None:
        supervision = Supervision(restarts=Restarts(backoff_s=0.01))
        transport = ProcessTransport("tests.engine.replica:build_poisoned", supervision=supervision, spawn=spawn_forked)
        client = EngineClient(transport, make_config(model_path))
        client.subscribe(lambda event: lost.append(event) if isinstance(event, Lost) else None)
        await client.start()
        try:
            answers = [asyncio.create_task(answer(client, request)) for request in innocents]
            answers.insert(8, asyncio.create_task(answer(client, poison)))
            outputs = await asyncio.gather(*answers)
        finally:
            await client.drain(0.0)
        poisoned = outputs.pop(8)
        assert poisoned[-1].finish_reason is FinishReason.ERROR
        assert poisoned[-1].error == POISONED
        for request, said in zip(innocents, outputs, strict=True):
            assert said[-1].finish_reason is FinishReason.LENGTH
            assert [token for output in said for token in output.token_ids] == greedy_continuation(
                request.token_ids, 30, VOCAB_SIZE
            )

    asyncio.run(asyncio.wait_for(main(), 600.0))
    num_deaths = 1 + sum(event.request_id == poison.request_id for event in lost)  # at the last one it ended
    assert num_deaths in (3, 4)


def test_what_comes_while_one_is_tried_waits_until_it_is_cleared(model_path: Path) -> None:
    clock, transport = VirtualClock(10.0), FakeTransport()
    client = opened_client(transport, clock)
    client.submit(make_request(max_tokens=20), lambda output: None)
    for _ in range(NUM_SAFE_LOSSES):
        client._requests.keep_resumable("the engine died")
        transport.sent = list(client._requests.take_due())
        assert len(transport.sent) == 1
    client.submit(make_request(max_tokens=5), lambda output: None)
    left = make_request(max_tokens=5)
    client.submit(left, lambda output: None)
    client.abort(left.request_id)
    assert len(client._requests) == 2, "the engine never had it, so it has ended"
    assert not client.snapshot().is_accepting
    engine = make_replica(model_path, clock=clock)
    seen = []
    while len(client._requests):
        for message in transport.sent:
            engine.core.input_queue.put(message)
        seen.append(len(transport.sent))
        transport.sent.clear()
        clock.advance(0.1)
        if (brought := engine.core.step()) is not None:
            client.receive(brought)
    assert seen[:6] == [1, 0, 0, 0, 1, 0], "it goes to the engine after the fourth step of the first one"
    assert client.snapshot().is_accepting
