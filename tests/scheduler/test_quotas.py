"""What one scope keeps in the prefix cache is nobody else's to take, and nobody can feel what others do to it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.kv import BlockPool, PrefixKeys
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.types.events import Ended
from cloister.types.request import FinishReason, Request, SamplingParams
from cloister.types.scope import Scope, ScopeKind
from tests.checked_runner import CheckedRunner
from tests.thinning import examples

ANN, BOB, CY = (Scope(ScopeKind.TENANT, name) for name in (b"ann", b"bob", b"cy"))
BLOCK = 4
MAX_LEN = 32


class Bench:
    """A scheduler and a runner that does what it says; requests are sent one by one."""

    def __init__(self, *, cache_scopes: int, num_blocks: int = 40) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        config = SchedulerConfig(MAX_LEN, max_num_seqs=4, budget=BudgetConfig(max_tokens=64), cache_scopes=cache_scopes)
        self.scheduler = Scheduler(config, self.pool, PrefixKeys("model", BLOCK))
        self.runner = CheckedRunner(num_blocks, BLOCK, vocab_size=3)
        self.ids = itertools.count()

    def send(self, *asked: tuple[Scope, int, int], max_tokens: int = 2) -> list[Ended]:
        """Sends (scope, kind of prompt, its length) at once and returns how each ended."""
        for scope, kind, length in asked:
            tokens = [(kind * 7 + i * i + i // 5) % 50 for i in range(length)]
            request = Request(
                request_id=f"r{next(self.ids)}", token_ids=tokens, sampling=SamplingParams(max_tokens=max_tokens), scope=scope
            )
            self.scheduler.add(request, 0.0)
        ended: list[Ended] = []
        while (plan := self.scheduler.plan(0.0)) is not None:
            events = self.scheduler.commit(self.runner.run(plan), {}, 0.0)
            ended += [event for event in events if isinstance(event, Ended)]
        self.pool.check()
        assert self.scheduler.prefix_cache is not None
        self.scheduler.prefix_cache.check()
        return ended

    def num_cached(self, scope: Scope, kind: int, length: int) -> int:
        (end,) = self.send((scope, kind, length))
        return end.num_cached_tokens


@pytest.mark.parametrize(("cache_scopes", "is_felt"), [(0, True), (2, False)])
def test_a_flood_of_another_tenant_is_felt_in_a_shared_cache_only(cache_scopes: int, is_felt: bool) -> None:
    bench = Bench(cache_scopes=cache_scopes)
    assert bench.num_cached(ANN, 1, 24) == 0
    assert bench.num_cached(ANN, 1, 24) == 20
    for kind in range(10, 40):
        bench.send((BOB, kind, 24))
    assert bench.num_cached(ANN, 1, 24) == (0 if is_felt else 20)


EVENTS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 28)), max_size=8)


@settings(max_examples=examples(60), deadline=None)
@given(mine=EVENTS, others=st.lists(st.tuples(st.sampled_from([BOB, CY]), st.integers(0, 9), st.integers(1, 30)), max_size=24))
def test_hits_of_a_scope_are_the_same_whatever_others_do(
    mine: list[tuple[int, int]], others: list[tuple[Scope, int, int]]
) -> None:
    alone, beside = Bench(cache_scopes=3), Bench(cache_scopes=3)
    company = iter(others)
    for kind, length in mine:
        beside.send(*itertools.islice(company, 3))
        assert alone.num_cached(ANN, kind, length) == beside.num_cached(ANN, kind, length)


def test_a_scope_makes_room_among_its_own() -> None:
    bench = Bench(cache_scopes=2)  # 20 blocks in two shares of 10
    for kind in (1, 2, 3):
        bench.send((ANN, kind, 17))  # 4 blocks each
    assert bench.num_cached(ANN, 3, 17) == 16
    assert bench.num_cached(ANN, 1, 17) < 16
    assert bench.pool.num_cached <= 10


def test_who_finds_no_share_keeps_nothing_and_runs_all_the_same() -> None:
    bench = Bench(cache_scopes=1)
    bench.send((ANN, 1, 24))
    assert bench.num_cached(BOB, 1, 24) == 0
    assert bench.num_cached(BOB, 1, 24) == 0
    assert bench.num_cached(ANN, 1, 24) == 20


def test_the_longest_sequence_runs_beside_full_shares() -> None:
    bench = Bench(cache_scopes=2, num_blocks=-(-MAX_LEN // BLOCK) + 3)  # three blocks more than one sequence needs
    for kind in range(6):
        bench.send((ANN, kind, 20), (BOB, kind, 20))
    (end,) = bench.send((CY, 1, MAX_LEN - 2))
    assert end.reason is FinishReason.LENGTH


def test_a_pool_without_room_for_shares_keeps_nothing_across_requests() -> None:
    bench = Bench(cache_scopes=4, num_blocks=-(-MAX_LEN // BLOCK))
    bench.send((ANN, 1, 24))
    assert bench.num_cached(ANN, 1, 24) == 0
    assert bench.pool.num_cached == 0


def test_what_runs_for_one_request_needs_no_share() -> None:
    bench = Bench(cache_scopes=1)
    bench.send((ANN, 1, 24))
    private = Scope(ScopeKind.REQUEST, b"r")
    ends = bench.send((private, 5, 24), max_tokens=4)
    assert ends[0].reason is FinishReason.LENGTH
    assert bench.num_cached(ANN, 1, 24) == 20


def test_sessions_of_a_tenant_use_up_its_share_and_nobody_elses() -> None:
    bench = Bench(cache_scopes=2)
    bench.send((ANN, 1, 24))
    for number in range(12):
        session = Scope(ScopeKind.SESSION, bytes([number]), 300.0, BOB.seed)
        bench.send((session, 1, 24))
    assert bench.num_cached(session, 1, 24) == 20
    assert bench.pool.num_cached <= 20
    assert bench.num_cached(ANN, 1, 24) == 20
