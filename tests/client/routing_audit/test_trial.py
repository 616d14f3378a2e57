"""The whole path, without sockets: real clients, relay, gateway, issuer, nodes, log and witnesses."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cloister.client.node_selection import MAX_DRAWS
from cloister.client.routing_audit.adversary import make_adversary
from cloister.client.routing_audit.hypotheses import judge
from cloister.client.routing_audit.records import Attack, Spell, TrialLog
from cloister.client.routing_audit.trial import CAPTURED, PLAN, Size, run_trial

SMALL = (PLAN[0], PLAN[3])


def run(directory: Path, attack: Attack, size: Size, *, rate: float = 1.0, plan: tuple[Spell, ...] = PLAN) -> TrialLog:
    book = make_adversary(attack, rate=rate, captured=CAPTURED, victim="user-1", seed=1)
    return asyncio.run(run_trial(directory, size, seed=1, make_book=book, plan=plan))


def test_an_honest_gateway_passes_while_nodes_join_leave_and_fail(tmp_path: Path) -> None:
    log = run(tmp_path, Attack.NONE, Size(users=4, requests=25))
    verdict = judge(log)
    assert verdict.honest
    assert log.strays == 0
    assert {node for sent in log.sent for node in sent.opened} == {"a", "b", "c", "d", "e"}
    for sent in log.sent:
        assert sent.opened == (sent.draws[-1:] if sent.answered else ())
        assert set(sent.draws[:-1]) <= log.spells[sent.spell].down


def test_requests_that_are_delivered_to_another_node_are_not_opened_there_and_are_found(tmp_path: Path) -> None:
    log = run(tmp_path, Attack.STEER, Size(users=4, requests=30), plan=SMALL)
    assert log.strays > 20
    assert all(sent.opened == sent.draws[-1:] for sent in log.sent if sent.answered)
    assert judge(log).p_value < 1e-6
    steered = [sent for sent in log.sent if len(sent.draws) == MAX_DRAWS]
    assert {sent.user for sent in steered} >= {"user-1"}


def test_requests_that_are_held_back_are_found(tmp_path: Path) -> None:
    log = run(tmp_path, Attack.DROP, Size(users=4, requests=30), plan=SMALL)
    verdict = judge(log)
    assert log.strays == 0
    assert verdict.p_value < 1e-6
    assert verdict.worst[0][0].user == "user-1"


def test_who_holds_everything_back_gets_no_more_than_the_bound(tmp_path: Path) -> None:
    log = run(tmp_path, Attack.DROP, Size(users=2, requests=60), plan=SMALL[:1])
    victims = [sent for sent in log.sent if sent.user == "user-1"]
    assert all(set(sent.opened) <= {CAPTURED} for sent in victims)
    # 1 - (1 - 1/4)^3 = 0.578 of 60 is 34.7 on average, with a standard deviation of 3.8
    assert 18 <= sum(sent.answered for sent in victims) <= 51
