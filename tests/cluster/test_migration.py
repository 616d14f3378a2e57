"""Levelling moves requests from busy replicas to idle ones, and never to and fro."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

from cloister.cluster import ReplicaSnapshot
from cloister.cluster.migration import LoadBalancer, Move
from cloister.engine.replica_snapshot import RequestSnapshot

BUSY = ReplicaSnapshot(0, num_requests=6, num_used_blocks=90, num_total_blocks=100)
IDLE = ReplicaSnapshot(1, num_requests=1, num_used_blocks=10, num_total_blocks=100)
REQUESTS = {
    0: [
        RequestSnapshot("long", num_prompt_tokens=900, num_output_tokens=10),
        RequestSnapshot("short", num_prompt_tokens=40, num_output_tokens=10),
        RequestSnapshot("waits", num_prompt_tokens=4, num_output_tokens=0),
    ]
}


def test_the_shortest_running_request_moves_once_the_difference_lasts() -> None:
    balancer = LoadBalancer(random.Random(0), hold_s=1.0)
    assert [balancer.decide([BUSY, IDLE], REQUESTS, now) for now in (0.0, 0.9)] == [[], []]
    assert balancer.decide([BUSY, IDLE], REQUESTS, 1.0) == [Move("short", 1)]


def test_less_urgent_requests_move_first() -> None:
    requests = {0: [*REQUESTS[0], RequestSnapshot("later", 500, 10, priority=1)]}
    assert LoadBalancer(random.Random(0), hold_s=0.0).decide([BUSY, IDLE], requests, 0.0) == [Move("later", 1)]


def test_a_request_that_was_moved_stays_for_a_while() -> None:
    balancer = LoadBalancer(random.Random(0), hold_s=0.0, rest_s=10.0)
    assert balancer.decide([BUSY, IDLE], {0: REQUESTS[0][1:]}, 0.0) == [Move("short", 1)]
    assert balancer.decide([BUSY, IDLE], {0: REQUESTS[0][1:]}, 9.0) == []
    assert balancer.decide([BUSY, IDLE], {0: REQUESTS[0][1:]}, 10.0) == [Move("short", 1)]


def test_a_move_that_would_only_turn_the_difference_round_is_not_made() -> None:
    one = ReplicaSnapshot(0, num_requests=1, num_used_blocks=90, num_total_blocks=100)
    none = ReplicaSnapshot(1, num_requests=0, num_used_blocks=0, num_total_blocks=100)
    assert LoadBalancer(random.Random(0), hold_s=0.0).decide([one, none], REQUESTS, 0.0) == []


def test_equal_replicas_and_a_single_one_keep_what_they_have() -> None:
    for replicas in ([BUSY], [BUSY, ReplicaSnapshot(1, num_requests=6, num_used_blocks=90, num_total_blocks=100)]):
        assert LoadBalancer(random.Random(0), hold_s=0.0).decide(replicas, REQUESTS, 0.0) == []


def test_a_replica_that_has_made_no_step_yet_takes_requests() -> None:
    assert LoadBalancer(random.Random(0), hold_s=0.0).decide([BUSY, ReplicaSnapshot(1)], REQUESTS, 0.0) == [Move("short", 1)]


def test_requests_do_not_go_to_a_replica_that_queues_or_computes_prompts_only() -> None:
    queueing = ReplicaSnapshot(1, num_requests=1, num_queued=1, num_total_blocks=100)
    prefill = ReplicaSnapshot(1, role="prefill", num_total_blocks=100)
    for target in (queueing, prefill):
        assert LoadBalancer(random.Random(0), hold_s=0.0).decide([BUSY, target], REQUESTS, 0.0) == []


def test_the_target_is_drawn_by_capacity_among_all_that_qualify() -> None:
    fast = ReplicaSnapshot(2, num_requests=1, num_used_blocks=10, num_total_blocks=100, capacity=3.0)
    full = ReplicaSnapshot(3, num_requests=1, num_used_blocks=97, num_total_blocks=100)
    draw, targets = random.Random(1), Counter[int]()
    for _ in range(400):
        [move] = LoadBalancer(draw, hold_s=0.0).decide([BUSY, IDLE, fast, full], REQUESTS, 0.0)
        targets[move.target] += 1
    assert targets[1] + targets[2] == 400
    assert 2.2 < targets[2] / targets[1] < 4.0


def halves(*, queued: int) -> list[ReplicaSnapshot]:
    """Two replicas of which a third is free, one of them with a queue."""
    return [
        ReplicaSnapshot(0, num_requests=3, num_queued=queued, num_used_blocks=67, num_total_blocks=100),
        ReplicaSnapshot(1, num_requests=2, num_used_blocks=67, num_total_blocks=100),
    ]


def running(*tokens: int, name: str, priority: int = 0) -> list[RequestSnapshot]:
    return [RequestSnapshot(f"{name}{i}", num - 1, 1, priority=priority) for i, num in enumerate(tokens)]


WAITING = RequestSnapshot("waits", 450, 0, has_slot=False)
APART = {0: [*running(470, 200, name="a"), WAITING], 1: running(470, 200, name="b")}


def decide(
    requests: dict[int, list[RequestSnapshot]], replicas: list[ReplicaSnapshot] | None = None, **settings: float
) -> object:
    balancer = LoadBalancer(random.Random(0), queue_s=0.0, hold_s=0.0, **settings)
    return balancer.decide(halves(queued=1) if replicas is None else replicas, requests, 0.0)


def test_a_request_leaves_so_that_one_which_fits_nowhere_fits_there() -> None:
    assert decide(APART) == [Move("a1", 1, "room")]


def test_no_request_leaves_if_that_makes_not_enough_room_or_no_other_replica_has_room_for_it() -> None:
    assert decide({**APART, 0: [*APART[0][:2], RequestSnapshot("waits", 800, 0, has_slot=False)]}) == []
    full = [halves(queued=1)[0], ReplicaSnapshot(1, num_requests=2, num_used_blocks=90, num_total_blocks=100)]
    assert decide(APART, full) == []


def test_a_waiting_request_goes_itself_where_it_fits_and_only_if_memory_is_what_it_lacks() -> None:
    roomy = [halves(queued=1)[0], ReplicaSnapshot(1, num_requests=1, num_used_blocks=10, num_total_blocks=100)]
    assert decide({**APART, 1: running(100, name="b")}, roomy) == [Move("waits", 1, "room")]
    small = RequestSnapshot("waits", 50, 0, has_slot=False)
    even = [halves(queued=1)[0], dataclasses.replace(roomy[1], num_requests=3)]
    assert decide({**APART, 0: [*APART[0][:2], small], 1: running(100, name="b")}, even) == []


def test_a_search_that_waits_for_other_searches_hides_no_request_that_waits_for_memory() -> None:
    search = RequestSnapshot("search", 4, 0, has_slot=False, is_held=True)
    assert decide({**APART, 0: [search, *APART[0]]}) == decide(APART)


def test_room_is_not_made_at_the_cost_of_more_urgent_requests() -> None:
    urgent = running(470, 200, name="a", priority=-1)
    assert decide({**APART, 0: [*urgent, WAITING]}, headroom=0.0) == []


def test_a_request_must_have_waited_for_a_while() -> None:
    balancer = LoadBalancer(random.Random(0), queue_s=0.5)
    assert [balancer.decide(halves(queued=1), APART, now) for now in (0.0, 0.4)] == [[], []]
    assert balancer.decide(halves(queued=1), APART, 0.5) == [Move("a1", 1, "room")]


def test_less_urgent_requests_leave_where_urgent_ones_lack_room_to_grow() -> None:
    shared = {0: [*running(470, 200, name="a"), *running(100, name="u", priority=-1)], 1: running(470, name="b")}
    replicas = [
        ReplicaSnapshot(0, num_requests=3, num_used_blocks=77, num_total_blocks=100),
        ReplicaSnapshot(1, num_requests=3, num_used_blocks=47, num_total_blocks=100),
    ]
    assert decide(shared, replicas) == [Move("a1", 1, "headroom")]
    assert decide(shared, replicas, headroom=0.2) == []
    everywhere = {**shared, 1: running(470, name="b", priority=-1)}
    assert decide(everywhere, replicas) == []


def test_headroom_counts_as_taken_when_load_is_levelled() -> None:
    replicas = [BUSY, ReplicaSnapshot(1, num_requests=1, num_used_blocks=74, num_total_blocks=100)]
    assert decide(REQUESTS, replicas) == [Move("short", 1)]
    assert decide({**REQUESTS, 1: running(740, name="u", priority=-1)}, replicas) == []
