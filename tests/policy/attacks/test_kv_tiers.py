"""Attacks on KV tiers with a real engine, the embedded model and real API keys: by what a tenant finds, and by the loads that
its requests cause. `benchmarks/attacks.py` measures times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attack_lab import Answer, Lab

LENGTH, NUM_HIT = 320, 304
TIERS = {"host": "host:64M", "disk": "disk:{},64M", "both": "host:4M+disk:{},64M"}


@pytest.fixture(params=TIERS)
def lab(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setattr("cloister.scheduler.kv_restores.MIN_READ_S", 60.0)  # a busy machine may take its time
    monkeypatch.setattr("cloister.scheduler.kv_loads.KVLoads.predict_overhead_s", lambda self: 0.0)
    made = Lab("team", kv_memory_mb=4, cache_scopes=2, max_model_len=600, tiers=TIERS[request.param].format(tmp_path))
    assert made.tiers is not None
    made.tiers.predict_s = lambda tier_bytes: 0.0  # type: ignore[method-assign]  # whatever is there is loaded
    yield made
    made.close()


def evict(lab: Lab, who: str) -> None:
    """A tenant's own prompts take its share of the device."""
    lab.flood(who, lab.num_kv_tokens)
    lab.wait_for_tiers()


def salted(lab: Lab, who: str, prompt: list[int], salt: str) -> Answer:
    return lab.answer(lab.request(who, prompt, salt=salt))


def test_no_other_key_and_no_other_salt_finds_or_loads_what_a_tenant_sent(lab: Lab) -> None:
    secret, salted_secret, other = lab.prompt(LENGTH), lab.prompt(LENGTH), lab.prompt(LENGTH)
    lab.ask("ann", secret)
    salted(lab, "ann", salted_secret, "first")
    evict(lab, "ann")
    for prompt in (secret, salted_secret, other):
        probe = lab.ask("bob", prompt)
        assert (probe.num_cached, probe.num_loads) == (0, 0)
        probe = salted(lab, "ann", prompt, "second")
        assert (probe.num_cached, probe.num_loads) == (0, 0)
    mine, mine_salted = lab.ask("ann", secret), salted(lab, "ann", salted_secret, "first")
    assert (mine.num_cached, mine.num_loads) == (NUM_HIT, 1), "the probe would show nothing"
    assert (mine_salted.num_cached, mine_salted.num_loads) == (NUM_HIT, 1)


def test_the_steps_of_others_give_a_tenant_no_time_to_store(lab: Lab) -> None:
    lab.ask("ann", lab.prompt(LENGTH))
    evict(lab, "ann")
    assert lab.tiers is not None
    accounts = [account for index in lab.tiers.indexes for account in index._accounts.values()]  # hers alone so far
    for account in accounts:
        account.spend(10.0)
    before_s = [account.credit_s for account in accounts]
    lab.flood("bob", lab.num_kv_tokens)
    assert [account.credit_s for account in accounts] == before_s
    lab.ask("ann", lab.prompt(LENGTH))
    assert all(account.credit_s > before for account, before in zip(accounts, before_s, strict=True))


def test_a_tenant_finds_as_much_of_its_own_whether_or_not_others_fill_the_tiers(lab: Lab) -> None:
    found = []
    for is_busy in (False, True):
        prompt = lab.prompt(LENGTH)
        lab.ask("ann", prompt)
        evict(lab, "ann")
        if is_busy:
            lab.flood("bob", 6 * lab.num_kv_tokens)
            lab.wait_for_tiers()
        answer = lab.ask("ann", prompt)
        found.append((answer.num_cached, answer.num_loads))
    assert found == [(NUM_HIT, 1), (NUM_HIT, 1)]
