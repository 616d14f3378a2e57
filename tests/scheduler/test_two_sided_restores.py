"""The front of a prefix is computed while its end is loaded: the same answers, whatever happens to the load or the request."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.kv.tier_index import KVTierIndex
from cloister.scheduler.kv_load import KV_LOAD_TIMEOUT_S
from cloister.types.events import Ended, KVLoaded, Preempted, Scheduled
from cloister.types.request import BeamSearch, FinishReason, Request, SamplingParams
from cloister.types.scope import Scope, ScopeKind
from tests.checked_runner import STATE
from tests.scheduler.test_kv_restores import BLOCK, LOCAL, Engine, crowd_out, make_request, prompt
from tests.thinning import examples

TOKEN_S = 0.01
LOAD_S = BLOCK * TOKEN_S
"""What loading a block takes here: as long as computing it."""


class SlowTier(Engine):
    """An engine whose steps take time for each token, and whose tier takes `load_s` for a block. Its first prompt, of
    `num_tokens`, is in the tier.

    Args:
        per_step: blocks that arrive with a step.
    """

    def __init__(self, windows=(None,), *, load_s=LOAD_S, per_step=3, num_tokens=59, **options):
        self.num_tokens = num_tokens
        super().__init__(windows, **{"max_tokens": 8, "num_blocks": 40} | options)
        self.runner.step_s, self.runner.token_s = 1e-4, TOKEN_S
        self.per_step = 10**6
        self.first = self.serve("first", prompt(0, num_tokens))
        crowd_out(self, last=9)
        self.set_speed(load_s)
        self.per_step = per_step
        self.events.clear()

    def set_speed(self, load_s: float) -> None:
        for index in self.tier.tiers.indexes:
            index._byte_s = load_s / 1000
        self.tier.byte_s = load_s / 1000

    def step(self) -> bool:
        self.can_read = False
        num_read = self.per_step if self.tier.reads else 0
        is_open = super().step()
        if num_read:
            self.tier.read(num_read, self.now)
        return is_open

    @property
    def load(self):
        return next((load for load in self.scheduler.kv_loads.loading.values() if load.restore is not None), None)

    def begin(self, name="again", **options) -> None:
        """A request whose front is being computed."""
        self.scheduler.add(make_request(name, prompt(0, self.num_tokens), **options), self.now)
        self.step()
        assert self.load is not None, "it is not restored from both sides"

    def run_until_met(self) -> None:
        for _ in range(100):
            if self.load is None:
                return
            self.step()
        raise AssertionError("both sides do not meet")


def test_the_front_is_computed_while_the_end_loads_and_the_answer_is_the_same():
    engine = SlowTier(per_step=2)  # as many tokens as a step computes
    num_before = engine.runner.num_computed
    assert engine.serve("again", prompt(0, 59)) == engine.first
    (loaded,) = engine.find(KVLoaded, "again")
    (ended,) = engine.find(Ended, "again")
    num_loaded = ended.num_cached_tokens
    assert 24 <= num_loaded <= 32, "about half of 56 tokens"
    assert loaded.tier == "memory"
    assert not loaded.complete
    assert loaded.num_tokens == 56, "all that was restored can be found again"
    assert engine.runner.num_computed - num_before == 59 + 5 - num_loaded
    assert engine.pool.num_used == 0
    assert not engine.tier.reads, "what is not needed any more is read"


def test_a_load_that_is_slower_than_it_was_is_left_where_computing_comes_first_and_a_faster_one_saves_more():
    cached = []
    for per_step in (1, 2, 6):
        engine = SlowTier(per_step=per_step)
        engine.tier.byte_s *= 2 / per_step
        assert engine.serve("again", prompt(0, 59)) == engine.first
        cached.append(engine.find(Ended, "again")[0].num_cached_tokens)
    assert cached[0] < cached[1] < cached[2]


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), num_below=st.sampled_from([0, 0, 60]))
def test_whatever_the_tier_does_answers_and_blocks_are_right(data, num_below):
    engine = SlowTier(num_below=num_below, num_slots=52 if num_below else 500)
    engine.begin()
    for number in range(200):
        what = data.draw(
            st.sampled_from(["nothing", "damage", "others", "pressure", "preempt", "late", "fail", "cancel", "end"])
        )
        engine.per_step = data.draw(st.integers(0, 4))
        if what == "damage":
            engine.tier.damage()
        elif what == "others" and number < 5:
            engine.scheduler.add(make_request(f"beside {number}", prompt(number, 9)), engine.now)
        elif what == "pressure":
            engine.scheduler.kv_loads.reclaim_one(engine.now)
        elif what == "preempt":
            for sequence in list(engine.scheduler._requests.running.values()):
                engine.scheduler._requests.preempt(sequence, engine.now)
        elif what == "late":
            engine.now += 0.3
        elif what == "fail":
            engine.scheduler.plan(engine.now)
            engine.tier.dispatch()
            engine.scheduler.fail("the step failed", engine.now)
        elif what == "cancel":
            engine.scheduler.abort("again", engine.now)
        elif what == "end":
            break
        engine.step()
    engine.per_step = 4
    engine.run()
    ends = engine.find(Ended, "again")
    assert len(ends) == 1
    if ends[0].reason is FinishReason.LENGTH:
        assert engine.answers["again"] == engine.first
    assert engine.pool.num_used == 0
    assert not engine.scheduler.kv_loads.loading


@pytest.mark.parametrize("num_steps", range(9))
@pytest.mark.parametrize("per_step", [0, 2])
def test_a_request_that_is_cancelled_in_any_window_leaves_nothing(num_steps, per_step):
    engine = SlowTier(per_step=per_step)
    engine.begin()
    for _ in range(num_steps):
        engine.step()
    engine.scheduler.abort("again", engine.now)
    engine.run()
    assert engine.pool.num_used == 0
    assert not engine.scheduler.kv_loads.loading
    assert not engine.tier.reads
    assert engine.find(Ended, "again")[0].reason is FinishReason.ABORT


def test_a_request_that_is_cancelled_before_its_read_begins_has_none():
    engine = SlowTier(per_step=0)
    engine.scheduler.add(make_request("again", prompt(0, 59)), engine.now)
    plan = engine.scheduler.plan(engine.now)
    assert engine.load is not None
    engine.scheduler.abort("again", engine.now)
    engine.tier.dispatch()
    assert not engine.tier.reads
    engine.scheduler.commit(engine.runner.run(plan), {}, engine.now)
    engine.run()
    assert engine.pool.num_used == 0


def test_a_request_that_is_cancelled_while_a_step_puts_its_blocks_in_place_gives_them_back_then():
    engine = SlowTier(per_step=3)
    engine.begin()
    engine.tier.read(3, engine.now)
    plan = engine.scheduler.plan(engine.now)
    assert plan.loads
    engine.tier.dispatch()
    engine.scheduler.abort("again", engine.now)
    engine.scheduler.commit(engine.runner.run(plan), {}, engine.now)
    engine.check()
    engine.run()
    assert engine.pool.num_used == 0


@pytest.mark.parametrize("damaged", [12, 9])
def test_a_block_that_cannot_be_read_ends_the_load_and_what_came_before_it_is_used(damaged):
    engine = SlowTier(per_step=3, load_s=LOAD_S / 2)
    stored = engine.tier.index.find(engine.keys_of(prompt(0, 59))[damaged], 0)
    engine.tier.contents[0, stored.slot] = -1, b""
    assert engine.serve("again", prompt(0, 59)) == engine.first
    (ended,) = engine.find(Ended, "again")
    assert ended.num_cached_tokens == (13 - damaged) * BLOCK
    assert engine.tier.index.find(stored.key, 0) is not stored, "it is tried again and again"


def test_a_load_ends_with_the_prompt_whose_last_block_has_one_token():
    engine = SlowTier(per_step=0, num_tokens=57)
    engine.begin()
    while engine.load is not None:
        assert not engine.find(Ended, "again"), "it is open for as long as its request"
        engine.step()
    assert not engine.find(Ended, "again")
    while engine.step():
        pass
    assert engine.answers["again"] == engine.first


def test_nobody_waits_for_a_tier_that_hangs():
    engine = SlowTier(per_step=0)
    assert engine.serve("again", prompt(0, 59)) == engine.first
    (loaded,) = engine.find(KVLoaded, "again")
    assert (loaded.num_bytes, loaded.complete) == (0, False)
    assert engine.find(Ended, "again")[0].num_cached_tokens == 0


def test_after_its_deadline_a_load_brings_nothing_more_and_what_came_is_used():
    engine = SlowTier(per_step=2)
    engine.begin()
    engine.step()
    engine.per_step = 0
    engine.now += KV_LOAD_TIMEOUT_S
    engine.step()
    assert not engine.tier.reads
    engine.run()
    assert engine.answers["again"] == engine.first
    assert engine.find(Ended, "again")[0].num_cached_tokens == 2 * BLOCK


def test_while_others_run_a_load_that_is_faster_delays_nobody():
    engine = SlowTier(per_step=0, load_s=LOAD_S / 2)
    engine.begin()
    engine.scheduler.add(make_request("other", prompt(11), max_tokens=30), engine.now)
    sequence = next(iter(engine.scheduler._requests.running.values()))
    engine.step()
    num_planned = sequence.num_planned
    for _ in range(6):
        engine.step()
    assert engine.scheduler.num_running == 2
    assert sequence.num_planned == num_planned < 56
    engine.per_step = 4
    engine.run()
    assert engine.answers["again"] == engine.first
    assert engine.find(Ended, "again")[0].num_cached_tokens == 56 - num_planned


def test_while_others_run_a_load_that_is_slower_is_not_waited_for():
    engine = SlowTier(per_step=0, load_s=2 * LOAD_S)
    engine.begin()
    engine.scheduler.add(make_request("other", prompt(11), max_tokens=30), engine.now)
    for _ in range(12):
        engine.step()
    assert engine.scheduler.num_running == 2
    assert engine.answers.get("again"), "it waits for a tier that takes longer than computing"


def test_a_preempted_sequence_gives_back_what_was_loaded_and_starts_again():
    engine = SlowTier(per_step=2)
    engine.begin()
    engine.step()
    assert engine.pool.num_used
    (sequence,) = engine.scheduler._requests.running.values()
    engine.scheduler._requests.preempt(sequence, engine.now)
    assert engine.load is None
    assert engine.pool.num_used == 0
    engine.check()
    engine.run()
    assert engine.answers["again"] == engine.first
    assert engine.find(Preempted, "again")


def test_other_sequences_that_need_blocks_get_those_that_this_one_has_not_come_to():
    engine = SlowTier(per_step=3)
    engine.begin()
    engine.step()
    engine.step()
    num_used = engine.pool.num_used
    assert engine.scheduler.kv_loads.reclaim_one(engine.now)
    assert engine.load is None
    assert engine.pool.num_used < num_used
    engine.run()
    assert engine.answers["again"] == engine.first


def test_blocks_that_wait_for_a_sequence_are_not_counted_twice():
    engine = SlowTier(per_step=2)
    engine.begin()
    engine.step()
    engine.step()
    (sequence,) = engine.scheduler._requests.running.values()
    num_held = sum(block >= 0 for block in engine.load.table)
    assert num_held
    assert engine.scheduler.kv_loads.count_missing(sequence) == 15 - sequence.table.num_entries - num_held


def test_a_scope_that_is_dropped_meanwhile_gets_nothing_more():
    engine = SlowTier(per_step=2)
    engine.begin()
    engine.step()
    engine.scheduler.forget(LOCAL, engine.now)
    assert engine.load is None
    engine.run()
    assert engine.answers["again"] == engine.first
    assert engine.find(Ended, "again")[0].num_cached_tokens == 0
    assert engine.scheduler.prefix_cache.match_length(engine.keys_of(prompt(0, 59))) == 0


def test_small_parts_beside_steps_do_not_make_a_tier_seem_slow():
    engine = SlowTier(per_step=2)
    byte_s = engine.tier.index.predict_s(1)
    engine.tier.byte_s = 2 * byte_s
    engine.serve("again", prompt(0, 59))
    assert engine.tier.index.predict_s(1) == byte_s


def test_a_load_that_was_left_teaches_that_its_tier_is_faster_and_pays_for_storing():
    engine = SlowTier(per_step=2)
    account = next(iter(engine.tier.index._accounts.values()))
    account.credit_s, byte_s = 0.0, engine.tier.index.predict_s(1)
    engine.tier.byte_s = byte_s / 2
    engine.serve("again", prompt(0, 59))
    assert byte_s / 2 < engine.tier.index.predict_s(1) < byte_s
    assert account.credit_s > 20 * TOKEN_S, "what was loaded need not be computed"


@pytest.mark.parametrize("windows", [(None, 6), (6,), (None, STATE), (STATE,)], ids=str)
def test_layers_that_cannot_leave_out_a_block_are_restored_from_one_side(windows):
    engine = SlowTier(windows, per_step=100, load_s=0.6 * LOAD_S)
    engine.scheduler.add(make_request("again", prompt(0, 59)), engine.now)
    engine.step()
    assert engine.load is None
    assert len(engine.scheduler.kv_loads) == 1, "it is not loaded at all"
    engine.run()
    assert engine.answers["again"] == engine.first


@pytest.mark.parametrize(
    "options",
    [{"sampling": SamplingParams(beams=BeamSearch(width=2), max_tokens=4)}, {"prefill_only": True}],
    ids=["beams", "prefill"],
)
def test_requests_of_other_kinds_are_restored_from_one_side(options):
    engine = SlowTier(per_step=100)
    sampling = options.pop("sampling", SamplingParams(max_tokens=4, ignore_eos=True))
    request = Request(request_id="again", token_ids=prompt(0, 59), sampling=sampling, scope=LOCAL)
    engine.scheduler.add(request, engine.now, **options)
    engine.step()
    assert engine.load is None
    assert len(engine.scheduler.kv_loads) == 1 or engine.scheduler.num_running, "it has not begun"


def test_with_others_at_work_a_prefix_is_restored_from_one_side():
    engine = SlowTier(per_step=0, load_s=LOAD_S / 2)
    engine.scheduler.add(make_request("other", prompt(11), max_tokens=30), engine.now)
    engine.step()
    engine.scheduler.add(make_request("again", prompt(0, 59)), engine.now)
    for _ in range(8):
        engine.step()
    assert engine.load is None
    assert len(engine.scheduler.kv_loads) == 1


@pytest.mark.parametrize("share", [0.02, 50.0])
def test_where_one_side_is_much_faster_the_other_one_rests(share):
    engine = SlowTier(per_step=100, load_s=share * LOAD_S)
    engine.scheduler.add(make_request("again", prompt(0, 59)), engine.now)
    engine.step()
    assert engine.load is None
    engine.run()
    assert engine.answers["again"] == engine.first


def test_a_failed_step_fails_its_requests_and_leaves_nothing():
    engine = SlowTier(per_step=3)
    engine.begin()
    engine.tier.read(3, engine.now)
    plan = engine.scheduler.plan(engine.now)
    assert plan.loads
    assert plan.sequences
    engine.tier.dispatch()
    engine.scheduler.fail("the step failed", engine.now)
    engine.run()
    assert engine.find(Ended, "again")[0].reason is FinishReason.ERROR
    assert engine.pool.num_used == 0
    assert not engine.scheduler.kv_loads.loading


def test_blocks_are_not_taken_before_the_step_that_fills_them_is_committed():
    engine = SlowTier(per_step=0)
    engine.begin()
    engine.tier.read(100, engine.now)
    plan = engine.scheduler.plan(engine.now)
    assert len(plan.loads) == 12, "all but what was computed"
    assert engine.scheduler.plan(engine.now) is None
    engine.scheduler.fail("the step failed", engine.now)  # no request computed anything in it
    engine.run()
    assert engine.answers["again"] == engine.first
    assert engine.find(Ended, "again")[0].num_cached_tokens == 0


def test_what_was_restored_is_found_by_the_next_request_and_not_read_again():
    engine = SlowTier(per_step=2)
    engine.serve("again", prompt(0, 59))
    num_loaded = engine.tier.num_loaded
    engine.serve("and again", prompt(0, 59))
    assert engine.find(Scheduled, "and again")[0].num_cached_tokens == 56
    assert engine.tier.num_loaded == num_loaded


def test_no_scope_gets_the_end_of_anothers_prefix():
    engine = SlowTier(per_step=2)
    engine.serve("again", prompt(0, 59), scope=Scope(ScopeKind.TENANT, b"b"))
    assert not engine.find(KVLoaded)
    assert engine.find(Ended, "again")[0].num_cached_tokens == 0


def test_the_speed_of_each_tier_counts():
    engine = SlowTier(num_slots=52, num_below=200)
    first, second = engine.tier.tiers.indexes
    assert isinstance(first, KVTierIndex)
    first._byte_s, second._byte_s = LOAD_S / 4000, LOAD_S / 1000
    engine.begin()
    restore = engine.load.restore
    in_first = [first.find(key, 0) is not None for key in engine.keys_of(prompt(0, 59))[restore.first :]]
    assert 0 < sum(in_first) < len(in_first)
    taken_s = [LOAD_S / 4 if is_first else LOAD_S for is_first in in_first]
    assert restore.predict_load_s(restore.first, restore.end) == pytest.approx(sum(taken_s))
    engine.run()
    assert engine.answers["again"] == engine.first
