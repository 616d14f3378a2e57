from __future__ import annotations

import pytest

from cloister.client.routing_audit.hypotheses import HONEST_ABOVE, examine, judge, subsets
from cloister.client.routing_audit.records import Sent, Spell, TrialLog
from cloister.client.routing_audit.tails import losses_needed, power, requests_needed
from tests.client.routing_audit.simulation import against, chance, nothing, simulate

REQUESTS = 600


@pytest.mark.parametrize("seed", range(3))
def test_honest_routing_passes(seed: int) -> None:
    verdict = judge(simulate(seed, nothing))
    assert verdict.honest
    assert verdict.p_value > HONEST_ABOVE


def test_a_network_that_loses_requests_of_all_alike_passes() -> None:
    assert judge(simulate(1, chance(0.03))).honest


@pytest.mark.parametrize("seed", range(3))
def test_withholding_a_twentieth_of_one_user_s_requests_is_found(seed: int) -> None:
    verdict = judge(simulate(seed, against("user 3", 0.05)))
    assert verdict.p_value < 1e-6
    assert {finding.user for finding, p in verdict.worst if p < 1e-6} == {"user 3"}


def test_withholding_is_found_behind_honest_losses() -> None:
    def both(*given: object) -> bool:
        return chance(0.01)(*given) or against("user 3", 0.3)(*given)  # type: ignore[arg-type]

    assert judge(simulate(2, both)).p_value < 1e-6


def test_the_same_loss_for_every_user_is_found_by_the_node_it_spares() -> None:
    verdict = judge(simulate(4, lambda source, user, node: node != "c" and source.random() < 0.05))
    assert verdict.p_value < 1e-6
    assert all(finding.user == "everybody" and finding.family == "loss" for finding, _ in verdict.worst[:1])


def test_a_client_that_prefers_a_node_is_found_by_its_draws() -> None:
    spell = Spell({"a": 1, "b": 1})
    sent = [Sent("u", 0, (node,), True, (node,)) for node in ["a"] * 380 + ["b"] * 220]
    verdict = judge(TrialLog((spell,), tuple(sent)))
    assert not verdict.honest
    assert "draw" in {finding.family for finding, _ in verdict.worst}


def test_requests_that_captured_nodes_open_again_are_found_where_they_land() -> None:
    # the answer of b is suppressed after b opened it, and the client's second draw goes to a: drawn honestly, landed twice
    spell = Spell({"a": 1, "b": 1})
    plain = [Sent(f"user {n % 10}", 0, (node,), True, (node,)) for n in range(200) for node in "ab"]
    twice = [Sent("user 1", 0, ("b", "a"), True, ("b", "a")) for _ in range(60)]
    findings = {(f.family, f.user, f.captured): f for f in examine(TrialLog((spell,), tuple(plain + twice)))}
    assert findings["land", "user 1", ("a",)].observed == findings["draw", "user 1", ("a",)].observed + 60


def test_a_node_that_says_it_was_away_accuses_nobody() -> None:
    spell = Spell({"a": 1, "b": 1}, frozenset({"b"}))
    sent = [Sent(f"user {n % 5}", 0, ("b", "a") if n % 2 else ("a",), True, ("a",)) for n in range(500)]
    assert judge(TrialLog((spell,), tuple(sent))).honest
    assert not judge(TrialLog((Spell({"a": 1, "b": 1}),), tuple(sent))).honest


def test_a_set_and_its_complement_are_tested_once() -> None:
    assert subsets(["a", "b"]) == [("a",)]
    assert subsets(["a", "b", "c", "d"]) == [("a",), ("b",), ("c",), ("d",), ("a", "b"), ("a", "c"), ("a", "d")]
    assert len(subsets([str(n) for n in range(6)])) == 2**5 - 1
    assert subsets([str(n) for n in range(9)]) == [(str(n),) for n in range(9)]


def test_the_number_of_requests_comes_from_the_power_computation() -> None:
    tests = len(examine(simulate(0, nothing, requests=10)))
    needed = requests_needed(users=10, rate=0.05, captured=0.25, tests=tests)
    assert needed <= REQUESTS
    assert power(needed, users=10, rate=0.05, captured=0.25, tests=tests) ** 20 >= 0.99
    assert power(needed - 1, users=10, rate=0.05, captured=0.25, tests=tests) ** 20 < 0.99
    assert 10.0 ** -losses_needed(10, tests) * tests < 1e-6


def test_a_trial_without_requests_shows_nothing_and_accuses_nobody() -> None:
    assert judge(TrialLog((Spell({"a": 1, "b": 1}),), ())).p_value == 1.0
