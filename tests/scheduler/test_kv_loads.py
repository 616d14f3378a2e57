"""KV goes from one scheduler to another: what arrives is found, what does not is computed, and nothing is left anywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cloister.kv import NO_BLOCK, BlockGroup, BlockPool, KVObject, PrefixKeys
from cloister.kv.objects import KVHeader
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.scheduler.kv_load import KV_LOAD_TIMEOUT_S
from cloister.scheduler.kv_loads import PREFETCH_HOLD_S
from cloister.types.events import Ended, Event, KVLoaded, PrefillDone, Scheduled
from cloister.types.request import FinishReason, Request, SamplingParams
from cloister.types.scope import Scope, ScopeKind
from tests.checked_runner import STATE, CheckedRunner

BLOCK = 4
PROMPT = list(range(39))
LOCAL, SESSION, ONCE = (
    Scope(ScopeKind.LOCAL, b"a"),
    Scope(ScopeKind.SESSION, b"a", lifetime_s=100.0),
    Scope(ScopeKind.REQUEST, b"a"),
)
LAYOUTS = [(None,), (None, 6), (6,), (None, STATE), (STATE,), (None, 6, STATE)]


class Engine:
    """A scheduler and a runner that checks every position that a sequence reads."""

    def __init__(self, windows=(None,), *, num_blocks=60, scopes=0, max_tokens=24, num_seqs=4):
        groups = [
            BlockGroup.of_state(24) if window == STATE else BlockGroup(num_blocks, window, window and 12) for window in windows
        ]
        self.pool = BlockPool(groups, BLOCK)
        config = SchedulerConfig(
            max_model_len=200, max_num_seqs=num_seqs, budget=BudgetConfig(max_tokens=max_tokens), cache_scopes=scopes
        )
        self.scheduler = Scheduler(config, self.pool, PrefixKeys("model", BLOCK))
        self.runner = CheckedRunner(self.pool.num_total, BLOCK, windows=windows)
        self.now = 0.0
        self.events: list[Event] = []
        self.tokens: dict[int, list[int]] = {}

    def step(self) -> bool:
        plan = self.scheduler.plan(self.now)
        if plan is None:
            self.events += self.scheduler.take_events()
            return False
        result = self.runner.run(plan)
        for sample in result.samples:
            self.tokens.setdefault(sample.seq_id, []).extend(sample.token_ids)
        self.events += self.scheduler.commit(result, {}, self.now)
        self.check()
        return True

    def check(self) -> None:
        self.pool.check()
        self.scheduler.prefix_cache.check()

    def run(self) -> None:
        while self.step():
            pass

    def serve(self, request: Request, **options) -> None:
        self.scheduler.add(request, self.now, **options)
        self.run()

    def find(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def answer(self) -> list[int]:
        return self.tokens[max(self.tokens)]


def make_request(name="r", token_ids=PROMPT, scope=LOCAL, **options) -> Request:
    sampling = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **options})
    return Request(request_id=name, token_ids=list(token_ids), sampling=sampling, scope=scope)


def carry(
    source: Engine,
    target: Engine,
    *,
    num_at_once: int = 2,
    most: int = 10**6,
    between: Callable[[], object] = lambda: None,
) -> None:
    """Moves what the target asks for, some entries at a time, with steps of both in between."""
    loads, exports = target.scheduler.kv_loads, source.scheduler.kv_exports
    for query in loads.queries:
        number, num_sent, is_whole = exports.open(query, source.now), 0, True
        while taken := exports.take(number, num_at_once):
            if num_sent >= most:
                is_whole = False
                break
            for found in taken:
                contents = tuple(
                    b"" if block == NO_BLOCK else source.runner.export_blocks([block])[0] for block in found.blocks
                )
                header = KVHeader(b"", query.root, found.key, found.entry, tuple(map(len, contents)))
                loads.arrive(query.request_id, [KVObject(header, contents, b"")])
                num_sent += 1
            between()
            source.step()
            target.step()
        is_whole = is_whole and taken is not None
        exports.close(number, is_complete=is_whole)
        loads.finish(query.request_id, target.now, is_complete=is_whole)
    loads.queries.clear()


def alone(windows, request: Request) -> list[int]:
    engine = Engine(windows)
    engine.serve(request)
    return engine.answer()


@pytest.mark.parametrize("windows", LAYOUTS, ids=str)
def test_a_loaded_prompt_is_a_hit_and_gives_the_same_answer(windows):
    source, target = Engine(windows), Engine(windows)
    source.serve(make_request("first"))
    target.scheduler.add(make_request(), 0.0, loads_kv=True)
    assert not target.step(), "it runs before its KV is here"
    carry(source, target)
    target.run()
    assert target.find(Scheduled)[0].num_cached_tokens == 36
    assert target.answer() == alone(windows, make_request())
    (loaded,) = target.find(KVLoaded)
    assert (loaded.request_id, loaded.num_tokens, loaded.complete) == ("r", 36, True)
    assert loaded.num_bytes > 0
    assert source.pool.num_used == target.pool.num_used == 0
    assert not len(source.scheduler.leases)


@pytest.mark.parametrize("windows", LAYOUTS, ids=str)
def test_only_what_is_not_known_is_sent(windows):
    source, target = Engine(windows), Engine(windows)
    source.serve(make_request("first"))
    target.serve(make_request("short", PROMPT[:18]))
    target.scheduler.add(make_request(), 0.0, loads_kv=True)
    carry(source, target)
    target.run()
    assert target.find(Scheduled)[1].num_cached_tokens == 36
    assert target.answer() == alone(windows, make_request())
    empty = Engine(windows)
    empty.scheduler.add(make_request(), 0.0, loads_kv=True)
    carry(source, empty)
    empty.run()
    if windows[0] is None:
        assert target.find(KVLoaded)[0].num_bytes < empty.find(KVLoaded)[0].num_bytes


@pytest.mark.parametrize("windows", LAYOUTS, ids=str)
@pytest.mark.parametrize("most", [0, 1, 4])
def test_a_broken_transfer_leaves_a_shorter_hit_or_none(windows, most):
    source, target = Engine(windows), Engine(windows)
    source.serve(make_request("first"))
    target.scheduler.add(make_request(), 0.0, loads_kv=True)
    carry(source, target, num_at_once=1, most=most)
    target.run()
    (loaded,) = target.find(KVLoaded)
    assert target.find(Scheduled)[0].num_cached_tokens == loaded.num_tokens
    if windows == (None,):
        assert (loaded.num_tokens, loaded.complete) == (most * BLOCK, False)
    assert target.answer() == alone(windows, make_request())
    assert source.pool.num_used == target.pool.num_used == 0


def test_a_gap_ends_a_load():
    source, target = Engine(), Engine()
    source.serve(make_request("first"))
    target.scheduler.add(make_request(), 0.0, loads_kv=True)
    loads = target.scheduler.kv_loads
    (query,) = loads.queries
    header = KVHeader(b"", query.root, query.keys[1], 1, (1,))
    loads.arrive("r", [KVObject(header, (b"x",), b"")])
    assert loads.cancelled == ["r"]
    target.now = KV_LOAD_TIMEOUT_S
    target.run()
    assert target.find(Scheduled)[0].num_cached_tokens == 0
    assert target.answer() == alone((None,), make_request())


def test_what_comes_late_for_a_load_that_another_one_has_replaced_is_dropped():
    """A request moves with the tokens of one of its sequences while what was asked for with those of another is on its way."""
    source, target = Engine(), Engine()
    other = [token + 1 for token in PROMPT]
    source.serve(make_request("first"))
    source.serve(make_request("second", other))
    loads, exports = target.scheduler.kv_loads, source.scheduler.kv_exports
    loads.prefetch(make_request("r", other), other, 0.0)
    (before,) = loads.queries
    target.scheduler.add(make_request(), 0.0, loads_kv=True)
    loads.queries.remove(before)
    for found in exports.take(exports.open(before, source.now), 100):
        contents = tuple(source.runner.export_blocks(list(found.blocks)))
        header = KVHeader(b"", before.root, found.key, found.entry, tuple(map(len, contents)))
        loads.arrive("r", [KVObject(header, contents, b"")])
    carry(source, target)
    target.run()
    assert target.answer() == alone((None,), make_request())
    assert target.find(Scheduled)[0].num_cached_tokens == 36


def test_a_load_that_brings_nothing_ends_at_its_deadline_and_late_objects_do_nothing():
    source, target = Engine(), Engine()
    source.serve(make_request("first"))
    target.scheduler.add(make_request(), 0.0, loads_kv=True)
    assert target.scheduler.next_deadline_s == KV_LOAD_TIMEOUT_S
    target.now = KV_LOAD_TIMEOUT_S
    target.run()
    assert target.scheduler.kv_loads.cancelled == ["r"]
    assert not target.find(KVLoaded)[0].complete
    assert target.find(Ended)[0].reason is FinishReason.LENGTH
    carry(source, target)
    target.run()
    assert len(target.find(KVLoaded)) == 1
    assert target.pool.num_used == 0


@pytest.mark.parametrize("windows", [(None,), (None, 6, STATE)], ids=str)
def test_an_abort_while_loading_leaves_nothing(windows):
    source, target = Engine(windows), Engine(windows)
    source.serve(make_request("first", scope=ONCE), hold_kv_s=9.0)
    target.scheduler.add(make_request(scope=ONCE), 0.0, loads_kv=True)
    carry(source, target, between=lambda: target.scheduler.abort("r", 0.0))
    target.run()
    assert target.scheduler.kv_loads.cancelled == ["r"]
    assert [ended.reason for ended in target.find(Ended)] == [FinishReason.ABORT]
    assert not target.find(KVLoaded), "a request that ended has no further events"
    assert target.pool.num_used == 0
    assert not any(slot for block in target.runner.slots for slot in block) or target.pool.num_cached


def test_a_step_that_fails_with_kv_of_a_load_ends_the_load():
    source, target = Engine(), Engine()
    source.serve(make_request("first"))
    target.scheduler.add(make_request(), 0.0, loads_kv=True)

    def fail():
        if not target.events and target.scheduler.plan(0.0) is not None:
            target.scheduler.fail("the step failed", 0.0)
            target.events += target.scheduler.take_events()

    carry(source, target, between=fail)
    target.run()
    assert not target.find(KVLoaded)[0].complete
    assert target.find(Scheduled)[0].num_cached_tokens == 0
    assert target.answer() == alone((None,), make_request())
    assert target.pool.num_used == 0


def test_running_sequences_get_the_blocks_of_a_load():
    source, target = Engine(), Engine(num_blocks=14)
    source.serve(make_request("first"))
    target.scheduler.add(make_request("other", range(100, 118), max_tokens=38), 0.0)
    target.step()
    target.scheduler.add(make_request(), 0.0, loads_kv=True)
    carry(source, target)
    target.run()
    assert [ended.reason for ended in target.find(Ended)] == [FinishReason.LENGTH] * 2
    assert target.answer() == alone((None,), make_request())
    assert not any(event.request_id == "other" and event.resumed for event in target.find(Scheduled))


@pytest.mark.parametrize("scopes", [1, 2])
def test_what_arrives_is_charged_to_its_scope(scopes):
    source, target = Engine(), Engine(scopes=scopes, num_blocks=120)
    source.serve(make_request("first"))
    target.serve(make_request("stranger", range(50, 80), scope=Scope(ScopeKind.TENANT, b"b")))
    target.scheduler.add(make_request(), 0.0, loads_kv=True)
    carry(source, target)
    target.run()
    assert target.find(Scheduled)[1].num_cached_tokens == (0 if scopes == 1 else 36)
    assert target.pool.num_used == 0


def test_another_scope_finds_nothing_at_the_source():
    source, target = Engine(), Engine()
    source.serve(make_request("first"))
    target.scheduler.add(make_request(scope=SESSION), 0.0, loads_kv=True)
    carry(source, target)
    target.run()
    (loaded,) = target.find(KVLoaded)
    assert (loaded.num_tokens, loaded.num_bytes) == (0, 0)


def test_a_loaded_session_expires_like_a_computed_one():
    source, target = Engine(), Engine()
    source.serve(make_request("first", scope=SESSION))
    target.scheduler.kv_loads.prefetch(make_request(scope=SESSION), PROMPT, 0.0)
    carry(source, target)
    target.run()
    assert target.pool.num_cached + target.pool.num_used == 9
    target.now = 101.0
    target.run()
    assert target.pool.num_cached + target.pool.num_used == 0


# Holds


def evict_all(engine: Engine) -> None:
    """Runs requests that take every block that can be had."""
    num_tokens = engine.pool.num_available * BLOCK - 6
    engine.serve(make_request("flood", range(1000, 1000 + num_tokens)))


def test_held_kv_outlives_a_flood_until_its_time_is_over():
    engine = Engine(num_blocks=40)
    engine.serve(make_request(), hold_kv_s=3.0)
    assert engine.pool.num_used > 0
    evict_all(engine)
    engine.serve(make_request("again"))
    assert engine.find(Scheduled)[-1].num_cached_tokens == 36
    assert engine.scheduler.next_deadline_s == 3.0
    engine.now = 3.0
    engine.run()
    assert engine.pool.num_used == 0
    evict_all(engine)
    engine.serve(make_request("later"))
    assert engine.find(Scheduled)[-1].num_cached_tokens == 0


def test_a_hold_ends_when_another_engine_has_loaded_it():
    source, target = Engine(), Engine()
    source.serve(make_request(), hold_kv_s=100.0)
    assert len(source.scheduler.leases) == 1
    target.scheduler.add(make_request(), 0.0, loads_kv=True)
    carry(source, target)
    assert len(source.scheduler.leases) == 0
    assert source.pool.num_used == 0


def test_holds_take_half_of_the_pool_at_most():
    engine = Engine(num_blocks=40)
    for number in range(4):
        engine.serve(make_request(f"r{number}", range(50 * number, 50 * number + 39)), hold_kv_s=9.0)
    assert engine.pool.num_used == 20


def test_a_running_request_gets_held_blocks_that_it_needs():
    engine = Engine(num_blocks=20)
    engine.serve(make_request(), hold_kv_s=1e6)
    engine.serve(make_request("large", range(100, 170)))
    assert [ended.reason for ended in engine.find(Ended)] == [FinishReason.LENGTH] * 2
    assert not len(engine.scheduler.leases)


def test_a_running_request_is_held_so_far():
    engine = Engine()
    engine.scheduler.add(make_request(scope=ONCE, max_tokens=100), 0.0)
    for _ in range(10):
        engine.step()
    engine.scheduler.hold("r", 5.0, 0.0)
    engine.scheduler.abort("r", 0.0)
    engine.run()
    held = engine.pool.num_used
    assert held >= 9
    engine.now = 5.0
    engine.run()
    assert engine.pool.num_used == engine.pool.num_cached == 0, "the scope of a request has ended with it"


def test_a_hold_of_a_request_that_is_not_there_does_nothing():
    engine = Engine()
    engine.scheduler.hold("nobody", 5.0, 0.0)
    assert engine.pool.num_used == 0


# Prefetches


@pytest.mark.parametrize("windows", LAYOUTS, ids=str)
def test_a_prefetch_waits_for_its_request(windows):
    source, target = Engine(windows), Engine(windows)
    source.serve(make_request("first", scope=ONCE, max_tokens=1), hold_kv_s=9.0)
    target.scheduler.kv_loads.prefetch(make_request(scope=ONCE), PROMPT, 0.0)
    carry(source, target)
    target.run()
    assert target.find(KVLoaded)[0].num_tokens == 36
    target.serve(make_request(scope=ONCE))
    assert target.find(Scheduled)[0].num_cached_tokens == 36
    assert target.answer() == alone(windows, make_request(scope=ONCE))
    assert target.pool.num_used == target.pool.num_cached == 0


def test_a_prefetch_for_nobody_is_gone_after_its_time():
    source, target = Engine(), Engine()
    source.serve(make_request("first", scope=ONCE), hold_kv_s=9.0)
    target.scheduler.kv_loads.prefetch(make_request(scope=ONCE), PROMPT, 0.0)
    carry(source, target)
    target.run()
    assert target.pool.num_used == 9
    target.now = PREFETCH_HOLD_S
    target.run()
    assert target.pool.num_used == target.pool.num_cached == 0


def test_a_prefetch_ends_with_a_request_that_is_refused():
    source, target = Engine(), Engine()
    source.serve(make_request("first"))
    target.scheduler.kv_loads.prefetch(make_request(), PROMPT, 0.0)
    target.scheduler.add(make_request(), 0.0, refusal="its adapter is gone", loads_kv=True)
    assert not target.scheduler.kv_loads.loading
    kinds = [type(event).__name__ for event in target.scheduler.take_events()]
    assert kinds.index("KVLoaded") < kinds.index("Ended")  # nobody hears of a request after its end


def test_a_request_whose_grammar_is_ready_does_not_wait_for_a_prefetch():
    engine = Engine()
    engine.scheduler.kv_loads.prefetch(make_request(), PROMPT, 0.0)
    engine.serve(make_request(), grammar_deadline_s=9.0)
    assert not engine.find(Ended)
    engine.scheduler.release(engine.scheduler.requests["r"])  # the prefetch goes on: it began before the request came
    engine.run()
    assert engine.find(Ended)
    assert engine.answer() == alone((None,), make_request())


def test_a_second_prefetch_of_one_request_replaces_the_first():
    source, target = Engine(), Engine()
    source.serve(make_request("first"))
    for _ in range(2):
        target.scheduler.kv_loads.prefetch(make_request(), PROMPT, 0.0)
    assert [query.request_id for query in target.scheduler.kv_loads.queries] == ["r", "r"]
    del target.scheduler.kv_loads.queries[0]
    carry(source, target)
    target.run()
    assert [loaded.complete for loaded in target.find(KVLoaded)] == [False, True]


# Exports


def test_an_export_keeps_its_blocks_until_they_are_copied():
    source = Engine(num_blocks=24)
    source.serve(make_request("first"))
    target = Engine()
    target.scheduler.add(make_request(), 0.0, loads_kv=True)
    (query,) = target.scheduler.kv_loads.queries
    number = source.scheduler.kv_exports.open(query, 0.0)
    first = source.scheduler.kv_exports.take(number, 1)
    evict_all(source)
    rest = source.scheduler.kv_exports.take(number, 100)
    assert [found.entry for found in [*first, *rest]] == list(range(9))
    assert source.scheduler.kv_exports.take(number, 100) == []
    source.scheduler.kv_exports.close(number, is_complete=True)
    assert source.pool.num_used == 0


def test_an_export_whose_blocks_were_needed_says_so():
    source, target = Engine(num_blocks=20), Engine()
    source.serve(make_request("first"))
    target.scheduler.add(make_request(), 0.0, loads_kv=True)
    (query,) = target.scheduler.kv_loads.queries
    number = source.scheduler.kv_exports.open(query, 0.0)
    source.serve(make_request("large", range(100, 170)))
    assert source.scheduler.kv_exports.take(number, 1) is None


# Prefill only


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_is_here_for_its_prefill_leaves_after_its_first_token(n):
    source, target = Engine(), Engine()
    source.serve(make_request(n=n), prefill_only=True, hold_kv_s=9.0)
    (done,) = source.find(PrefillDone)
    assert (done.request_id, len(done.seq_ids)) == ("r", n)
    assert not source.find(Ended)
    assert not source.scheduler.requests
    assert [len(tokens) for tokens in source.tokens.values()] == [1] * n
    target.scheduler.add(make_request(n=n), 0.0, loads_kv=True)
    carry(source, target)
    assert source.pool.num_used == 0
    target.run()
    assert target.find(Scheduled)[0].num_cached_tokens == 36


def test_a_request_that_its_first_token_completes_ends_as_always():
    engine = Engine()
    engine.serve(make_request(max_tokens=1), prefill_only=True)
    assert [ended.reason for ended in engine.find(Ended)] == [FinishReason.LENGTH]
    assert not engine.find(PrefillDone)
