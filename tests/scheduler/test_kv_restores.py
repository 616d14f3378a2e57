"""What the device evicts comes back from a tier: the same answers, no other scope's, no wait for what is not worth it."""

from __future__ import annotations

import pytest

from cloister.kv import BlockGroup, BlockPool, PrefixKeys
from cloister.kv.tier_index import MAX_CREDIT_S, TRY_EVERY, KVTierIndex
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.scheduler.kv_load import KV_LOAD_TIMEOUT_S
from cloister.scheduler.kv_restores import TRIAL, TierRead
from cloister.types.events import Ended, Event, KVLoaded, Preempted, Scheduled
from cloister.types.request import FinishReason, Request, SamplingParams
from cloister.types.scope import Scope, ScopeKind
from tests.checked_runner import STATE, CheckedRunner
from tests.memory_tier import MemoryTier

BLOCK = 4
LOCAL = Scope(ScopeKind.LOCAL, b"a")
LAYOUTS = [(None,), (None, 6), (6,), (None, STATE), (STATE,), (None, 6, STATE)]


class Engine:
    """A scheduler with a tier, and a runner that checks every position that a sequence reads."""

    def __init__(
        self,
        windows=(None,),
        *,
        num_blocks=24,
        num_states=12,
        num_slots=500,
        num_below=0,
        max_tokens=24,
        num_seqs=4,
        scopes=0,
    ):
        groups = [
            BlockGroup.of_state(num_states) if window == STATE else BlockGroup(num_blocks, window, window and 12)
            for window in windows
        ]
        self.pool = BlockPool(groups, BLOCK)
        config = SchedulerConfig(
            max_model_len=200, max_num_seqs=num_seqs, budget=BudgetConfig(max_tokens=max_tokens), cache_scopes=scopes
        )
        self.scheduler = Scheduler(config, self.pool, PrefixKeys("model", BLOCK))
        self.runner = CheckedRunner(self.pool.num_total, BLOCK, windows=windows)
        self.tier = MemoryTier(self.scheduler, self.runner, num_slots, num_below) if num_slots else None
        self.now = 0.0
        self.events: list[Event] = []
        self.answers: dict[str, list[int]] = {}
        self.names: dict[int, str] = {}
        self.can_read = True

    def step(self) -> bool:
        plan = self.scheduler.plan(self.now)
        if self.tier is not None:
            self.tier.dispatch()
            self.tier.write(10**6)
            while self.can_read and self.tier.reads:
                self.tier.read(3, self.now)
        if plan is not None:
            self.names |= {new.seq_id: self.scheduler_name(new.seq_id) for new in plan.arrivals}
            self.names |= {fork.child_id: self.names[fork.parent_id] for fork in plan.forks}
            result = self.runner.run(plan)
            for sample in result.samples:
                self.answers.setdefault(self.names[sample.seq_id], []).extend(sample.token_ids)
            self.events += self.scheduler.commit(result, {}, self.now)
        self.events += self.scheduler.take_events()
        self.check()
        return plan is not None or bool(self.scheduler.requests)

    def scheduler_name(self, seq_id: int) -> str:
        return self.scheduler._requests.sequences[seq_id].request_state.request.request_id

    def check(self) -> None:
        self.pool.check()
        self.scheduler.prefix_cache.check()
        if self.tier is not None:
            self.tier.tiers.check()

    def run(self) -> None:
        for _ in range(1000):
            if not self.step():
                return
        raise AssertionError("it does not end")

    def serve(self, name: str, token_ids: list[int], **options) -> list[int]:
        self.scheduler.add(make_request(name, token_ids, **options), self.now)
        self.run()
        return self.answers[name]

    def keys_of(self, token_ids: list[int]) -> list[bytes]:
        return self.scheduler._requests.prefixes.chain_of(make_request("x", token_ids), token_ids)[0]

    def find(self, kind, name=None):
        return [event for event in self.events if isinstance(event, kind) and name in (None, event.request_id)]

    def num_cached(self, name: str) -> int:
        return self.find(Scheduled, name)[-1].num_cached_tokens


def make_request(name, token_ids, *, scope=LOCAL, adapter=None, n=1, max_tokens=6) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=n)
    return Request(request_id=name, token_ids=list(token_ids), sampling=sampling, scope=scope, adapter=adapter)


def prompt(number: int, length: int = 39) -> list[int]:
    return [(7 * number + i) % 50 for i in range(length)]


def crowd_out(engine: Engine, first: int = 1, last: int = 6) -> None:
    """Other prompts take all blocks of the device."""
    for number in range(first, last):
        engine.serve(f"other {number}", prompt(number))


@pytest.mark.parametrize("windows", LAYOUTS, ids=str)
def test_a_prompt_whose_blocks_were_evicted_is_loaded_and_the_answer_is_the_same(windows):
    engine = Engine(windows, num_states=8)
    first = engine.serve("first", prompt(0))
    crowd_out(engine)
    assert engine.scheduler.prefix_cache.match_length(engine.keys_of(prompt(0))) < 9
    assert engine.serve("again", prompt(0)) == first
    (loaded,) = engine.find(KVLoaded, "again")
    assert (loaded.tier, loaded.complete) == ("memory", True)
    assert loaded.num_tokens == engine.num_cached("again") == 36
    assert engine.pool.num_used == 0


@pytest.mark.parametrize("windows", LAYOUTS, ids=str)
def test_conversations_ten_times_as_large_as_the_device_have_the_answers_of_an_engine_without_a_tier(windows):
    with_tier, without = (Engine(windows, num_slots=num_slots, num_blocks=30) for num_slots in (500, 0))
    histories = {number: prompt(number, 20) for number in range(8)}
    for turn in range(3):
        for number, history in histories.items():
            name = f"{number} {turn}"
            answer = with_tier.serve(name, history)
            assert answer == without.serve(name, history)
            if turn:
                assert with_tier.num_cached(name) >= without.num_cached(name)
            histories[number] = [*history, *answer, 7, turn, number]
    assert sum(e.num_cached_tokens for e in with_tier.find(Scheduled)) > sum(
        e.num_cached_tokens for e in without.find(Scheduled)
    )


def test_what_the_device_has_is_not_loaded():
    engine = Engine()
    engine.serve("first", prompt(0))
    engine.serve("again", prompt(0))
    assert not engine.find(KVLoaded)
    assert engine.tier.num_loaded == 0
    assert not engine.tier.contents, "something was stored though nothing was evicted"


def test_only_the_part_that_the_device_lacks_is_loaded():
    engine = Engine(num_blocks=24)
    engine.serve("first", prompt(0))
    engine.serve("other", prompt(1, 60))  # evicts the end
    num_here = engine.scheduler.prefix_cache.match_length(engine.keys_of(prompt(0)))
    assert 0 < num_here < 9
    engine.serve("again", prompt(0))
    assert engine.num_cached("again") == 36
    assert engine.tier.num_loaded == 9 - num_here


def test_a_block_is_stored_once_however_often_it_is_evicted():
    engine = Engine()
    engine.serve("first", prompt(0))
    for turn in range(3):
        crowd_out(engine)
        engine.serve(f"again {turn}", prompt(0))
    numbers = [number for number, _ in engine.tier.contents.values()]
    assert len(numbers) == len(engine.tier.index) == 6 * 11


@pytest.mark.parametrize("damaged", [0, 4])
def test_a_block_that_cannot_be_read_ends_the_load_and_the_rest_is_computed(damaged):
    engine = Engine()
    first = engine.serve("first", prompt(0))
    crowd_out(engine)
    keys = engine.keys_of(prompt(0))
    stored = engine.tier.index.find(keys[damaged], 0)
    engine.tier.contents[0, stored.slot] = -1, b""
    assert engine.serve("again", prompt(0)) == first
    assert engine.num_cached("again") == damaged * BLOCK
    assert not engine.find(KVLoaded, "again")[0].complete
    assert engine.tier.index.find(keys[damaged], 0) is not stored, "it is tried again and again"


def test_no_scope_and_no_adapter_gets_the_blocks_of_another():
    engine = Engine()
    scopes = [LOCAL, Scope(ScopeKind.TENANT, b"a"), Scope(ScopeKind.TENANT, b"b"), Scope(ScopeKind.SESSION, b"a", 100.0)]
    for number, scope in enumerate(scopes):
        engine.serve(f"first {number}", prompt(0), scope=scope)
        assert engine.num_cached(f"first {number}") == 0
    engine.serve("adapter", prompt(0), adapter="adapter")
    assert engine.num_cached("adapter") == 0
    assert not engine.find(KVLoaded)
    crowd_out(engine)
    for number, scope in enumerate(scopes):
        engine.serve(f"again {number}", prompt(0), scope=scope)
        assert engine.num_cached(f"again {number}") == 36


def test_what_nobody_can_ask_for_again_is_not_stored():
    engine = Engine()
    for number in range(6):
        engine.serve(f"r{number}", prompt(number), scope=Scope(ScopeKind.REQUEST, bytes([number])))
    assert not engine.tier.contents


def test_a_session_ends_in_the_tier_when_it_ends():
    engine = Engine()
    session = Scope(ScopeKind.SESSION, b"s", lifetime_s=10.0)
    engine.serve("first", prompt(0), scope=session)
    crowd_out(engine)
    root = engine.scheduler._requests.prefixes.chain_of(make_request("x", prompt(0), scope=session), prompt(0))[1]
    assert root in engine.tier.index.kept
    num_before = len(engine.tier.index)
    engine.now = 11.0
    engine.scheduler.plan(engine.now)
    assert engine.tier.index.ended_roots == [root]
    assert len(engine.tier.index) < num_before
    engine.run()
    engine.serve("again", prompt(0), scope=session)
    assert engine.num_cached("again") == 0


def test_a_load_that_takes_longer_than_computing_is_not_made():
    engine = Engine()
    engine.serve("first", prompt(0))
    crowd_out(engine)
    engine.tier.index.learn(1000, 10.0)
    engine.serve("again", prompt(0))
    assert engine.num_cached("again") == 0
    assert not engine.find(KVLoaded)
    engine.tier.index._byte_s = 1e-9
    crowd_out(engine, 1, 6)
    engine.serve("and again", prompt(0))
    assert engine.num_cached("and again") == 36


def test_a_slow_tier_is_tried_again_from_time_to_time_and_no_request_waits_for_it():
    engine = Engine()
    first = engine.serve("first", prompt(0))
    engine.tier.index.learn(1000, 10.0)
    engine.can_read = False
    for number in range(3 * TRY_EVERY):
        crowd_out(engine, 1 + number % 2, 3 + number % 2)
        assert engine.serve(f"again {number}", prompt(0)) == first
    assert not engine.find(KVLoaded)
    (trial,) = engine.tier.reads
    assert trial.request_id == TRIAL
    assert len(trial.entries) == len(prompt(0)) // BLOCK
    assert engine.scheduler.kv_restores.is_trying, "a second one while the first one runs"
    engine.scheduler.kv_restores.is_trying = False
    for number in range(TRY_EVERY):
        crowd_out(engine, 1 + number % 2, 3 + number % 2)
        engine.serve(f"once more {number}", prompt(0))
    assert len(engine.tier.reads) == 2


def test_a_tier_that_was_measured_beside_other_work_is_used_again_after_one_quick_read():
    engine = Engine()
    engine.serve("first", prompt(0))
    engine.tier.index.learn(1000, 10.0)
    engine.tier.index.learn(1000, 1e-6)
    crowd_out(engine)
    engine.serve("again", prompt(0))
    assert engine.num_cached("again") == 36
    engine.tier.index.learn(1000, 1.0)
    assert engine.tier.index.predict_s(1000) == pytest.approx(0.25, rel=1e-3), "a slow read among quick ones counts a quarter"


def test_a_trial_reads_a_little(monkeypatch):
    monkeypatch.setattr("cloister.scheduler.kv_restores.MAX_TRIAL_BYTES", 2500)
    engine = Engine()
    engine.serve("first", prompt(0))
    engine.tier.index.learn(1000, 10.0)
    engine.tier.index._num_declined = TRY_EVERY - 1
    crowd_out(engine)
    engine.can_read = False
    engine.serve("again", prompt(0))
    (trial,) = engine.tier.reads
    assert (len(trial.entries), trial.num_bytes) == (2, 2000)


def test_a_load_past_its_deadline_becomes_computing_and_late_blocks_do_nothing():
    engine = Engine()
    first = engine.serve("first", prompt(0))
    crowd_out(engine)
    engine.can_read = False
    engine.scheduler.add(make_request("again", prompt(0)), engine.now)
    for _ in range(3):
        engine.step()
    assert not engine.find(Scheduled, "again"), "it did not wait"
    due_s = engine.scheduler.next_deadline_s
    assert engine.now < due_s <= engine.now + KV_LOAD_TIMEOUT_S
    engine.now = due_s
    engine.run()
    assert engine.answers["again"] == first
    assert engine.num_cached("again") == 0
    assert not engine.tier.reads


def test_a_stuck_tier_makes_nobody_wait():
    engine = Engine()
    first = engine.serve("first", prompt(0))
    crowd_out(engine)
    engine.can_read, engine.tier.index.is_stuck = False, True
    assert engine.serve("again", prompt(0)) == first
    assert not engine.find(KVLoaded)


def test_others_run_while_one_loads():
    engine = Engine()
    engine.serve("first", prompt(0))
    crowd_out(engine)
    engine.can_read = False
    engine.scheduler.add(make_request("again", prompt(0)), engine.now)
    engine.scheduler.add(make_request("next", prompt(9, 20)), engine.now)
    for _ in range(10):
        engine.step()
    assert engine.find(Ended, "next")
    assert not engine.find(Scheduled, "again")
    engine.can_read = True
    engine.run()
    assert engine.num_cached("again") == 36


def test_many_that_load_at_once_do_not_take_each_others_blocks():
    engine = Engine(num_blocks=30)
    for number in range(6):
        engine.serve(f"first {number}", prompt(number))
    engine.can_read = False
    for number in range(6):
        engine.scheduler.add(make_request(f"again {number}", prompt(number)), engine.now)
    engine.step()
    num_loading = len(engine.scheduler.kv_loads)
    assert 0 < num_loading < 6, "all of them load, though there are blocks for two"
    engine.can_read = True
    engine.run()
    for number in range(6):
        assert engine.answers[f"again {number}"] == engine.answers[f"first {number}"]
    assert all(event.complete for event in engine.find(KVLoaded))
    assert sum(engine.num_cached(f"again {number}") == 36 for number in range(6)) >= 4


def test_a_request_that_leaves_while_it_loads_leaves_nothing():
    engine = Engine()
    engine.serve("first", prompt(0))
    crowd_out(engine)
    engine.can_read = False
    engine.scheduler.add(make_request("again", prompt(0)), engine.now)
    engine.step()
    engine.scheduler.abort("again", engine.now)
    engine.run()
    assert engine.find(Ended, "again")[0].reason is FinishReason.ABORT
    assert not engine.tier.reads
    assert engine.pool.num_used == 0
    assert not len(engine.scheduler.kv_loads)


def test_a_preempted_sequence_gets_its_blocks_back_from_the_tier():
    engine = Engine(num_blocks=20, max_tokens=64)
    names = ["a", "b"]
    for number, name in enumerate(names):
        engine.scheduler.add(make_request(name, prompt(number, 20), max_tokens=40), engine.now)
    engine.run()
    assert engine.find(Preempted)
    alone = Engine(num_blocks=60, num_slots=0)
    for number, name in enumerate(names):
        assert engine.answers[name] == alone.serve(name, prompt(number, 20), max_tokens=40)


def test_all_answers_of_a_request_use_what_was_loaded():
    engine = Engine(num_blocks=40)
    engine.serve("first", prompt(0), n=3)
    crowd_out(engine, 1, 9)
    engine.serve("again", prompt(0), n=3)
    assert engine.num_cached("again") == 36
    assert sorted(engine.answers["again"]) == sorted(engine.answers["first"])


def test_a_share_of_the_cache_bounds_what_is_loaded():
    engine = Engine(num_blocks=60, scopes=3)
    tenant = Scope(ScopeKind.TENANT, b"t")
    for number in range(4):
        engine.serve(f"first {number}", prompt(number, 80), scope=tenant)
    for number in range(4):
        engine.serve(f"again {number}", prompt(number, 80), scope=tenant)
        loads = engine.find(KVLoaded, f"again {number}")
        assert all(load.num_tokens == engine.num_cached(f"again {number}") for load in loads)


def test_a_tier_that_stopped_stores_nothing_and_still_loads():
    engine = Engine()
    engine.serve("first", prompt(0))
    crowd_out(engine)
    num_stored = len(engine.tier.contents)
    engine.tier.index.is_stopped = True
    crowd_out(engine, 10, 15)
    assert len(engine.tier.contents) == num_stored
    engine.serve("again", prompt(0))
    assert engine.num_cached("again") == 36


def spend(index: KVTierIndex, seconds: float) -> None:
    index.spend(seconds, [next(iter(index._slots[0].blocks.values()))])


def test_storing_pauses_where_nothing_is_used_again_and_goes_on_when_loads_save_time():
    engine = Engine()
    index = engine.tier.index
    crowd_out(engine)
    num_stored = len(index)
    spend(index, 2 * MAX_CREDIT_S)
    crowd_out(engine, 10, 15)
    assert len(index) == num_stored, "it stores though it had no time left"
    index.earn(MAX_CREDIT_S * 1.1)
    crowd_out(engine, 20, 25)
    assert len(index) == num_stored, "it stores as soon as it has time for one block"
    index.earn(MAX_CREDIT_S)
    crowd_out(engine, 30, 35)
    assert len(index) > num_stored
    index.earn(1000.0)
    spend(index, 1.1 * MAX_CREDIT_S)
    num_stored = len(index)
    crowd_out(engine, 40, 45)
    assert len(index) == num_stored, "what was saved long ago pays for ever"


def test_a_full_tier_lets_the_least_recently_used_go():
    engine = Engine(num_slots=30)
    engine.serve("first", prompt(0))
    crowd_out(engine, 1, 20)
    assert len(engine.tier.index) == 30
    engine.serve("again", prompt(0))
    assert engine.num_cached("again") == 0
    assert max(place[1] for place in engine.tier.contents) < 30


@pytest.mark.parametrize("windows", LAYOUTS, ids=str)
def test_what_the_first_tier_lets_go_comes_back_from_the_second(windows):
    engine = Engine(windows, num_states=8, num_slots=12, num_below=500)
    first = engine.serve("first", prompt(0))
    crowd_out(engine, 1, 16)
    keys = engine.keys_of(prompt(0))
    upper, lower = engine.tier.tiers.indexes
    assert not any(upper.find(keys[entry], group) for entry in range(9) for group in range(len(windows)))
    assert lower.find(keys[8], 0) is not None
    assert engine.serve("again", prompt(0)) == first
    (loaded,) = engine.find(KVLoaded, "again")
    assert (loaded.tier, loaded.complete) == ("below", True)
    assert loaded.num_tokens == engine.num_cached("again") == 36


def test_a_prompt_comes_back_from_both_tiers_in_one_load():
    engine = Engine(num_slots=26, num_below=500)
    first = engine.serve("first", prompt(0))
    crowd_out(engine, 1, 5)
    held = [[index.find(key, 0) is not None for index in engine.tier.tiers.indexes] for key in engine.keys_of(prompt(0))]
    assert held[0] == [True, False]
    assert held[-1] == [False, True], "the end of a prefix goes first"
    assert engine.serve("again", prompt(0)) == first
    (loaded,) = engine.find(KVLoaded, "again")
    assert (loaded.tier, loaded.complete, engine.num_cached("again")) == ("memory+below", True, 36)


def test_what_only_a_slow_tier_has_is_computed_and_the_rest_is_loaded():
    engine = Engine(num_slots=26, num_below=500)
    first = engine.serve("first", prompt(0))
    crowd_out(engine, 1, 5)
    upper, lower = engine.tier.tiers.indexes
    num_upper = sum(upper.find(key, 0) is not None for key in engine.keys_of(prompt(0)))
    lower.learn(1000, 10.0)
    assert engine.serve("again", prompt(0)) == first
    (loaded,) = engine.find(KVLoaded, "again")
    assert loaded.tier == "memory"
    assert engine.num_cached("again") == num_upper * BLOCK


def test_a_second_tier_that_is_stuck_keeps_nobody_from_the_first():
    engine = Engine(num_slots=26, num_below=500)
    first = engine.serve("first", prompt(0))
    crowd_out(engine, 1, 5)
    engine.tier.tiers.indexes[1].is_stuck = True
    assert engine.serve("again", prompt(0)) == first
    assert engine.find(KVLoaded, "again")[0].tier == "memory"
    assert 0 < engine.num_cached("again") < 36


def test_what_is_used_again_soon_comes_back_to_the_first_tier():
    engine = Engine(num_slots=40, num_below=500)
    engine.serve("first", prompt(0))
    crowd_out(engine, 1, 8)
    upper, lower = engine.tier.tiers.indexes
    key = engine.keys_of(prompt(0))[0]
    for turn in range(2):
        below = lower.find(key, 0)
        assert (upper.find(key, 0), below is None) == (None, False), "it came back though its last use was long ago"
        engine.serve(f"again {turn}", prompt(0))
        crowd_out(engine, 20 + 10 * turn, 23 + 10 * turn)
    assert upper.find(key, 0) is not None
    assert lower.find(key, 0) is below
    crowd_out(engine, 40, 48)
    assert upper.find(key, 0) is None
    assert lower.find(key, 0) is below, "what it had already was copied again"


def test_prompts_in_turns_that_only_the_second_tier_can_hold_are_not_copied_to_and_fro():
    engine = Engine(num_slots=26, num_below=500)
    for turn in range(4):
        for number in range(8):
            engine.serve(f"{turn} {number}", prompt(number))
        if turn == 1:
            num_stored = engine.tier.index.num_stored_blocks
    assert engine.tier.index.num_stored_blocks <= num_stored + 44, "176 if each comes back each time"
    assert all(engine.num_cached(f"3 {number}") == 36 for number in range(8))


def test_a_session_ends_in_both_tiers():
    engine = Engine(num_slots=12, num_below=500)
    session = Scope(ScopeKind.SESSION, b"s", lifetime_s=10.0)
    engine.serve("first", prompt(0), scope=session)
    crowd_out(engine)
    root = engine.scheduler._requests.prefixes.chain_of(make_request("x", prompt(0), scope=session), prompt(0))[1]
    tiers = engine.tier.tiers
    assert root in tiers.indexes[1].kept
    assert root not in tiers.indexes[0].kept
    assert root not in tiers.take_ended_roots(), "its key is needed below"
    engine.now = 11.0
    engine.scheduler.plan(engine.now)
    assert tiers.take_ended_roots() == [root]
    assert not any(root in index.kept for index in tiers.indexes)


def begin_load(engine: Engine) -> TierRead:
    """Begins a load of nine entries, which computing is predicted to take 9 s."""
    engine.serve("first", prompt(0))
    crowd_out(engine)
    engine.scheduler.kv_restores._predict_s = lambda start, end: float(end - start)
    engine.can_read = False
    engine.scheduler.add(make_request("again", prompt(0)), engine.now)
    engine.step()
    (read,) = engine.tier.reads
    return read


@pytest.mark.parametrize(
    ("num_arrived", "elapsed_s", "is_overtaken"),
    [(0, 100.0, False), (1, 0.9, False), (1, 1.1, True), (8, 7.9, False), (8, 8.1, True), (9, 100.0, False)],
)
def test_a_load_is_overtaken_when_computing_what_is_left_takes_less_time(num_arrived, elapsed_s, is_overtaken):
    engine = Engine()
    read = begin_load(engine)
    assert len(read.entries) == 9
    measured = [(1000 * num_arrived, elapsed_s)]
    assert engine.scheduler.kv_restores.is_overtaken(read, num_arrived, measured) == is_overtaken


def test_a_load_of_layers_with_windows_is_not_cut_short_since_a_hit_could_not_end_there():
    engine = Engine((None, 6))
    read = begin_load(engine)
    assert not engine.scheduler.kv_restores.is_overtaken(read, 1, [(1000, 100.0)])


def test_what_loads_take_besides_reading_counts_in_the_choice():
    engine = Engine()
    engine.serve("first", prompt(0))
    crowd_out(engine)
    restores, loads = engine.scheduler.kv_restores, engine.scheduler.kv_loads
    restores._predict_s = lambda start, end: float(end - start)
    engine.tier.index._byte_s = 1e-6  # 9 ms for all, which computing takes 9 s
    engine.can_read = False
    engine.scheduler.add(make_request("again", prompt(0)), engine.now)
    engine.step()
    engine.can_read, engine.now = True, 4.0
    engine.tier.transfer_s = 1.0
    engine.run()
    assert loads.overhead_s == pytest.approx(3.0 / 4)
    loads.overhead_s = 12.0
    engine.tier.transfer_s = None
    for number in range(10):
        crowd_out(engine, 10 * (number + 1), 10 * (number + 1) + 6)
        engine.serve(f"and again {number}", prompt(0))
        if engine.find(KVLoaded, f"and again {number}"):
            assert number
            assert loads.overhead_s < 9.0
            return
    raise AssertionError("a wrong figure forbids loads for ever")


def test_while_others_run_a_load_is_chosen_by_its_reading_alone():
    engine = Engine(num_blocks=40)
    engine.serve("first", prompt(0))
    crowd_out(engine, 1, 9)
    engine.scheduler.kv_loads.overhead_s = 1e6
    engine.scheduler.kv_restores._predict_s = lambda start, end: float(end - start)
    engine.scheduler.add(make_request("runs", prompt(20, 12), max_tokens=60), engine.now)
    for _ in range(3):
        engine.step()
    engine.scheduler.add(make_request("again", prompt(0)), engine.now)
    engine.run()
    assert engine.find(KVLoaded, "again")[0].complete
    assert engine.scheduler.kv_loads.overhead_s == 1e6, "a load beside others was measured"
