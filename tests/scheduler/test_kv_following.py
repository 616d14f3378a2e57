"""A scheduler loads the KV of a prompt while another one computes it: the answer is the same, little is left to load behind the
first token, and when one leaves, nothing is left on either side."""

from __future__ import annotations

import pytest

from cloister.kv import NO_BLOCK, KVObject
from cloister.kv.objects import KVHeader
from cloister.scheduler.kv_exports import LAST_TOKENS, limit_followed_chunk
from cloister.scheduler.kv_load import FOLLOW_TIMEOUT_S, KV_LOAD_TIMEOUT_S
from cloister.types.events import Ended, KVLoaded, PrefillDone, Resumption, Scheduled
from cloister.types.request import FinishReason
from tests.scheduler.test_kv_loads import BLOCK, LAYOUTS, LOCAL, ONCE, Engine, alone, evict_all, make_request

PROMPT = list(range(40))  # ten whole blocks, all of which can be loaded once the first token is known
STEP = 16


class Pair:
    """An engine that computes a prompt, and one that follows it."""

    def __init__(self, windows=(None,), *, scope=LOCAL, **shape):
        self.source, self.target = Engine(windows, max_tokens=STEP), Engine(windows, **shape)
        self.request = make_request(token_ids=PROMPT, scope=scope)
        self.number = None
        self.arrived: list[int] = []
        self.num_after = 0

    def begin(self):
        """The source has begun the prompt, and the query of the target is there."""
        self.source.scheduler.add(self.request, 0.0, hold_kv_s=20.0, prefill_only=True)
        self.follow()
        self.ask()

    def follow(self):
        self.target.scheduler.kv_loads.follow(self.request, self.target.now)

    def ask(self):
        (self.query,) = self.target.scheduler.kv_loads.queries
        self.target.scheduler.kv_loads.queries.clear()
        assert self.query.follows
        self.number = self.source.scheduler.kv_exports.open(self.query, self.source.now)

    def move(self) -> bool:
        """Moves what the source has so far; returns whether that was the rest."""
        exports, loads = self.source.scheduler.kv_exports, self.target.scheduler.kv_loads
        exports.extend(self.number, self.source.now)
        taken = exports.take(self.number)
        for found in taken or ():
            assert exports.is_leased(self.number)
            contents = tuple(
                b"" if block == NO_BLOCK else self.source.runner.export_blocks([block])[0] for block in found.blocks
            )
            header = KVHeader(b"", self.query.root, found.key, found.entry, tuple(map(len, contents)))
            loads.arrive("r", [KVObject(header, contents, b"")])
            self.arrived.append(found.entry)
        is_over = taken is None or exports.is_done(self.number)
        if is_over:
            exports.close(self.number, is_complete=taken is not None)
            loads.finish("r", self.target.now, is_complete=taken is not None)
        return is_over

    def come(self):
        """The request comes to the target with its first token."""
        first = self.source.answer()[:1]
        self.target.scheduler.add(self.request, self.target.now, resumption=Resumption([first]), loads_kv=True)

    def run(self):
        """Runs all of it: the prompt, its KV behind each step, and the answer."""
        self.begin()
        is_over = False
        while not self.source.find(PrefillDone):
            self.source.step()
            if self.source.find(PrefillDone):
                self.num_after = -len(self.arrived)
                self.come()
            is_over = self.move()
            self.target.step()
        self.num_after += len(self.arrived)
        assert is_over
        self.target.run()
        self.source.run()

    def check_nothing_left(self):
        for engine in (self.source, self.target):
            assert not len(engine.scheduler.kv_loads)
            assert not len(engine.scheduler.kv_exports)
            assert not len(engine.scheduler.leases)
            assert engine.pool.num_used == 0


@pytest.mark.parametrize("windows", LAYOUTS, ids=str)
@pytest.mark.parametrize("scope", [LOCAL, ONCE], ids=["shared", "of one request"])
def test_an_answer_goes_on_with_kv_that_came_while_its_prompt_was_computed(windows, scope):
    pair = Pair(windows, scope=scope)
    pair.run()
    first = pair.source.answer()[:1]
    assert [*first, *pair.target.answer()] == alone(windows, make_request(token_ids=PROMPT, scope=scope))
    (scheduled,), loaded = pair.target.find(Scheduled), pair.target.find(KVLoaded)
    assert pair.target.runner.num_computed <= len(PROMPT) - len(PROMPT) // BLOCK * BLOCK + 6
    assert scheduled.resumed or scheduled.num_cached_tokens == len(PROMPT)
    assert [event.complete for event in loaded] == [True]
    pair.check_nothing_left()


def test_only_what_the_last_step_computed_is_left_behind_the_first_token():
    pair = Pair()
    pair.run()
    assert pair.arrived == list(range(len(PROMPT) // BLOCK))
    assert pair.num_after <= STEP // BLOCK


def test_how_long_a_request_waited_is_what_counts_as_the_duration_of_its_load():
    pair = Pair()
    pair.begin()
    while not pair.source.find(PrefillDone):
        pair.source.step()
        pair.target.now += 1.0
        if not pair.source.find(PrefillDone):
            pair.move()
            pair.target.step()
    pair.come()
    pair.target.now += 0.25
    assert pair.move()
    pair.target.run()
    assert pair.target.find(KVLoaded)[0].elapsed_s == 0.25


def test_a_query_that_comes_before_its_request_waits_for_it():
    pair = Pair()
    pair.follow()
    pair.ask()
    assert not pair.move()
    pair.source.scheduler.add(pair.request, 0.0, hold_kv_s=20.0, prefill_only=True)
    pair.source.step()
    assert not pair.move()
    assert pair.arrived == [0, 1, 2, 3]


def test_a_query_that_comes_when_the_request_has_left_gets_all_at_once():
    pair = Pair()
    pair.source.serve(pair.request, hold_kv_s=20.0, prefill_only=True)
    pair.follow()
    pair.ask()
    assert pair.move()
    assert len(pair.arrived) == len(PROMPT) // BLOCK


def test_a_request_that_ends_at_the_source_ends_what_follows_it():
    pair = Pair()
    pair.begin()
    pair.source.step()
    assert not pair.move()
    pair.source.scheduler.abort("r", 0.0)
    pair.source.run()
    assert pair.move()
    pair.target.run()
    pair.target.scheduler.kv_loads.cancel_prefetch("r", 0.0)
    pair.check_nothing_left()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
@pytest.mark.parametrize("scope", [LOCAL, ONCE], ids=["shared", "of one request"])
def test_a_request_that_does_not_come_leaves_nothing(scope, num_steps):
    pair = Pair(scope=scope)
    pair.begin()
    for _ in range(num_steps):
        pair.source.step()
        pair.move()
        pair.target.step()
    pair.target.scheduler.kv_loads.cancel_prefetch("r", 0.0)
    pair.target.run()
    assert pair.target.scheduler.kv_loads.cancelled == ["r"]
    assert pair.target.pool.num_used == 0
    assert pair.target.pool.num_cached == (0 if scope is ONCE else pair.target.pool.num_cached)
    assert [event.complete for event in pair.target.find(KVLoaded)] == [False]


def test_a_client_that_leaves_while_its_request_waits_for_the_rest_leaves_nothing():
    pair = Pair()
    pair.begin()
    while not pair.source.find(PrefillDone):
        pair.source.step()
    pair.come()
    pair.target.scheduler.abort("r", 0.0)
    pair.target.run()
    assert pair.target.scheduler.kv_loads.cancelled == ["r"]
    assert [event.reason for event in pair.target.find(Ended)] == [FinishReason.ABORT]
    assert pair.target.pool.num_used == 0
    pair.source.scheduler.kv_exports.close(pair.number, is_complete=False)
    pair.source.now = 20.0
    pair.source.run()
    pair.check_nothing_left()


def test_what_does_not_come_after_the_first_token_is_computed():
    pair = Pair()
    pair.begin()
    pair.source.step()
    pair.move()
    pair.target.step()
    while not pair.source.find(PrefillDone):
        pair.source.step()
    pair.come()
    pair.target.run()
    assert not pair.target.find(Scheduled), "it waits for the rest"
    pair.target.now = KV_LOAD_TIMEOUT_S
    pair.target.run()
    (loaded,) = pair.target.find(KVLoaded)
    assert (loaded.num_tokens, loaded.complete) == (STEP, False)
    assert [*pair.source.answer()[:1], *pair.target.answer()] == alone((None,), make_request(token_ids=PROMPT))


def test_a_source_that_computes_nothing_more_is_given_up_and_one_that_is_slow_is_not():
    pair = Pair()
    pair.begin()
    for _ in range(2):
        pair.source.step()
        pair.target.now += FOLLOW_TIMEOUT_S - 1.0
        pair.move()
        pair.target.step()
    assert len(pair.target.scheduler.kv_loads) == 1
    pair.target.now += FOLLOW_TIMEOUT_S
    pair.target.step()
    assert not len(pair.target.scheduler.kv_loads)
    assert not pair.target.find(KVLoaded)[0].complete


def test_blocks_that_the_source_needs_end_the_export_and_are_never_sent():
    pair = Pair()
    pair.begin()
    pair.source.step()
    pair.source.scheduler.kv_exports.extend(pair.number, 0.0)
    assert pair.source.scheduler.kv_exports.is_leased(pair.number)
    assert pair.source.scheduler.kv_loads.reclaim_one(0.0)
    assert not pair.source.scheduler.kv_exports.is_leased(pair.number), "a copy that was being made is dropped"
    pair.source.step()
    pair.source.scheduler.kv_exports.extend(pair.number, 0.0)
    assert not pair.source.scheduler.kv_exports.is_leased(pair.number), "a new lease would hide that the first one ended"
    assert pair.source.scheduler.kv_exports.take(pair.number) is None


# Room


def test_a_prompt_for_which_there_is_no_room_is_not_followed():
    pair = Pair(num_blocks=14)
    pair.target.scheduler.add(make_request("other", range(100, 120), max_tokens=30), 0.0)
    pair.target.step()
    pair.follow()
    assert not pair.target.scheduler.kv_loads.queries
    pair.target.step()
    assert [(event.request_id, event.complete) for event in pair.target.find(KVLoaded)] == [("r", False)]


def test_room_that_is_promised_to_a_prompt_is_not_given_to_requests_that_come_later():
    def names_running(*, follows: bool) -> set[str]:
        pair = Pair(num_blocks=20)
        pair.target.scheduler.add(make_request("runs", range(100, 108), max_tokens=12), 0.0)
        pair.target.step()
        if follows:
            pair.follow()
        pair.target.scheduler.add(make_request("later", range(200, 230), max_tokens=4), 0.0)
        pair.target.step()
        return {event.request_id for event in pair.target.find(Scheduled)}

    assert names_running(follows=False) == {"runs", "later"}
    assert names_running(follows=True) == {"runs"}


def test_a_request_that_waits_alone_gets_the_room_of_a_prompt_that_may_come():
    pair = Pair(num_blocks=14)
    pair.follow()
    pair.target.serve(make_request("alone", range(100, 130), max_tokens=6))
    assert [event.reason for event in pair.target.find(Ended)] == [FinishReason.LENGTH]
    assert [event.complete for event in pair.target.find(KVLoaded)] == [False]


def test_running_sequences_get_the_blocks_of_a_prompt_that_is_followed():
    pair = Pair(num_blocks=16)
    pair.target.scheduler.add(make_request("other", range(100, 108), max_tokens=50), 0.0)
    pair.target.step()
    pair.begin()
    pair.source.step()
    pair.move()
    pair.target.run()
    assert [event.reason for event in pair.target.find(Ended)] == [FinishReason.LENGTH]
    assert not any(event.resumed for event in pair.target.find(Scheduled)), "it was never preempted"


def test_a_flood_at_the_source_does_not_change_what_is_sent():
    pair = Pair()
    pair.begin()
    pair.source.step()
    pair.move()
    pair.source.run()
    pair.come()
    evict_all(pair.source)
    assert pair.move()
    pair.target.run()
    assert [*pair.source.tokens[0][:1], *pair.target.answer()] == alone((None,), make_request(token_ids=PROMPT))


# The steps of a prompt that is followed


@pytest.mark.parametrize("block_size", [1, 8, 16, 128])
@pytest.mark.parametrize("num_tokens", [1, 15, 64, 65, 100, 1000, 4097])
def test_a_prompt_is_cut_into_steps_that_end_with_a_block_and_the_last_one_is_short(block_size, num_tokens):
    steps, start = [], 0
    while start < num_tokens:
        steps.append(limit_followed_chunk(start, num_tokens - start, block_size))
        start += steps[-1]
        assert start == num_tokens or start % block_size == 0
    assert sum(steps) == num_tokens
    assert steps[-1] <= max(LAST_TOKENS, block_size)
    assert len(steps) <= 1 + num_tokens.bit_length()
