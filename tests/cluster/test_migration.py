"""Levelling moves requests from busy replicas to idle ones, and never to and fro."""

from __future__ import annotations

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
    balancer = LoadBalancer(hold_s=1.0)
    assert [balancer.decide([BUSY, IDLE], REQUESTS, now) for now in (0.0, 0.9)] == [[], []]
    assert balancer.decide([BUSY, IDLE], REQUESTS, 1.0) == [Move("short", 1)]


def test_less_urgent_requests_move_first() -> None:
    requests = {0: [*REQUESTS[0], RequestSnapshot("later", 500, 10, priority=1)]}
    assert LoadBalancer(hold_s=0.0).decide([BUSY, IDLE], requests, 0.0) == [Move("later", 1)]


def test_a_request_that_was_moved_stays_for_a_while() -> None:
    balancer = LoadBalancer(hold_s=0.0, rest_s=10.0)
    assert balancer.decide([BUSY, IDLE], {0: REQUESTS[0][1:]}, 0.0) == [Move("short", 1)]
    assert balancer.decide([BUSY, IDLE], {0: REQUESTS[0][1:]}, 9.0) == []
    assert balancer.decide([BUSY, IDLE], {0: REQUESTS[0][1:]}, 10.0) == [Move("short", 1)]


def test_a_move_that_would_only_turn_the_difference_round_is_not_made() -> None:
    one = ReplicaSnapshot(0, num_requests=1, num_used_blocks=90, num_total_blocks=100)
    none = ReplicaSnapshot(1, num_requests=0, num_used_blocks=0, num_total_blocks=100)
    assert LoadBalancer(hold_s=0.0).decide([one, none], REQUESTS, 0.0) == []


def test_equal_replicas_and_a_single_one_keep_what_they_have() -> None:
    for replicas in ([BUSY], [BUSY, ReplicaSnapshot(1, num_requests=6, num_used_blocks=90, num_total_blocks=100)]):
        assert LoadBalancer(hold_s=0.0).decide(replicas, REQUESTS, 0.0) == []


def test_a_replica_that_has_made_no_step_yet_takes_requests() -> None:
    assert LoadBalancer(hold_s=0.0).decide([BUSY, ReplicaSnapshot(1)], REQUESTS, 0.0) == [Move("short", 1)]


def test_requests_do_not_go_to_a_replica_that_queues_or_computes_prompts_only() -> None:
    queueing = ReplicaSnapshot(1, num_requests=1, num_queued=1, num_total_blocks=100)
    prefill = ReplicaSnapshot(1, role="prefill", num_total_blocks=100)
    for target in (queueing, prefill):
        assert LoadBalancer(hold_s=0.0).decide([BUSY, target], REQUESTS, 0.0) == []
