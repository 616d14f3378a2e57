"""Blocks are conserved and every request ends exactly once, whatever comes in whatever order."""

import pickle
import random
from collections import Counter
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from cloister.kv import NO_BLOCK, BlockGroup, BlockPool, KVObject, KVQuery, PrefixKeys
from cloister.kv.objects import KVHeader
from cloister.kv.table import first_seen
from cloister.kv.tier_admission import TIER_ADMISSIONS
from cloister.scheduler import POLICIES, BudgetConfig, Scheduler, SchedulerConfig
from cloister.scheduler.kv_load import FOLLOW_TIMEOUT_S
from cloister.scheduler.kv_loads import PREFETCH_HOLD_S
from cloister.types.events import Arrived, Ended, KVLoaded, Resumption
from cloister.types.layerwise import CellLayout
from cloister.types.request import PoolingParams, Request, SamplingParams
from cloister.types.scope import Scope, ScopeKind
from cloister.types.step import Stop
from tests.checked_runner import EMPTY, STATE, CheckedRunner
from tests.memory_tier import BLOCK_BYTES, MemoryTier
from tests.thinning import examples
from tests.tree_history import Erratic

SCOPES = [Scope(kind, b"salt") for kind in (ScopeKind.TENANT, ScopeKind.LOCAL, ScopeKind.REQUEST)]
SCOPES.append(Scope(ScopeKind.SESSION, b"salt", lifetime_s=3.0))
PUBLIC = [0] * 6
"""How prompts of the first kind begin."""


def _group(num_blocks, window, block_size, max_tokens):
    if window == STATE:
        return BlockGroup.of_state(max(2, num_blocks // 3))
    if window is None:
        return BlockGroup(num_blocks)
    max_held = -(-(window + max_tokens + 8) // block_size) + 2
    return BlockGroup(min(num_blocks, 2 * max_held), window, max_held)


def _contents(tokens, query, entry, num_entries, windows, block_size):
    """What another engine sends of one entry, if it has so many of them."""
    start, end = entry * block_size, (entry + 1) * block_size
    kv = pickle.dumps(([(position, tokens[position]) for position in range(start, end)], ()))
    contents = []
    for window in windows:
        if window == STATE:
            state = pickle.dumps(([EMPTY] * block_size, tuple(tokens[:end])))
            contents.append(state if entry == num_entries - 1 else b"")
        elif window is None:
            contents.append(kv if entry >= query.num_known else b"")
        else:
            contents.append(kv if entry >= first_seen(num_entries * block_size, window) // block_size else b"")
    return tuple(contents)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go, stop, fail and time out around a scheduler with up to two plans in flight, and KV from and to other
    engines."""

    known = Bundle("known")

    @initialize(
        policy=st.sampled_from(POLICIES.names()),
        num_blocks=st.integers(4, 40),
        block_size=st.sampled_from([1, 3, 4, 16]),
        max_num_seqs=st.integers(1, 6),
        max_tokens=st.integers(1, 40),
        prefix_cache=st.sampled_from([True, True, True, False]),
        public=st.sampled_from([(), (PUBLIC,)]),
        cache_scopes=st.integers(0, 3),
        most_drafts=st.sampled_from([0, 1, 7]),
        num_slots=st.sampled_from([0, 0, 2, 30]),
        num_below=st.sampled_from([0, 4, 20]),
        tier_block_s=st.sampled_from([0.0, 0.03, 0.1]),
        admission=st.sampled_from(TIER_ADMISSIONS.names()),
        num_layers=st.sampled_from([0, 3, 12]),
        windows=st.sampled_from(
            [(None,), (None, 5), (None, 1, 16), (7,), (None, STATE), (STATE,), (None, 5, STATE), (5, STATE)]
        ),
        is_late=st.booleans(),
    )
    def start(
        self,
        policy,
        num_blocks,
        block_size,
        max_num_seqs,
        max_tokens,
        prefix_cache,
        public,
        cache_scopes,
        most_drafts,
        num_slots,
        num_below,
        tier_block_s,
        admission,
        num_layers,
        windows,
        is_late,
    ):
        self.pool = BlockPool([_group(num_blocks, window, block_size, max_tokens) for window in windows], block_size)
        config = SchedulerConfig(
            max_model_len=48,
            max_num_seqs=max_num_seqs,
            policy=policy,
            budget=BudgetConfig(max_tokens=max_tokens),
            prefix_cache=prefix_cache,
            cache_scopes=cache_scopes,
            max_prefill_only_len=60,
        )
        cells = CellLayout(num_layers, num_blocks, 1, 8) if num_layers and windows == (None,) else None
        keys = PrefixKeys("model", block_size, public)
        self.num_public = len(keys.public) if prefix_cache else 0
        self.scheduler = Scheduler(config, self.pool, keys, Erratic(most=most_drafts) if most_drafts else None, cells)
        self.windows = windows
        self.requests, self.tokens, self.sent, self.exports, self.loading = {}, {}, {}, {}, Counter()
        self.followed = []
        token_s = 0.02 if tier_block_s else 0.0
        # not with states: no back end that has them takes a plan before the result of the one before is known
        late = random.Random(1) if is_late and STATE not in windows else None
        self.runner = CheckedRunner(self.pool.num_total, block_size, vocab_size=3, token_s=token_s, windows=windows, late=late)
        make = partial(TIER_ADMISSIONS.get(admission), salt=b"salt")
        has_tier = num_slots and prefix_cache
        self.tier = MemoryTier(self.scheduler, self.runner, num_slots, num_below, make) if has_tier else None
        if self.tier is not None and tier_block_s:
            self.tier.tiers.indexes[-1].learn(BLOCK_BYTES, tier_block_s)
        self.now = 0.0
        self.flights = []
        self.count = 0
        self.arrived, self.last, self.ended = Counter(), Counter(), Counter()
        self.expected = {}

    def note(self, events):
        for event in events:
            if isinstance(event, Arrived):
                self.arrived[event.request_id] += 1
            if isinstance(event, Ended):
                self.ended[event.request_id, event.index] += 1
                self.last[event.request_id] += event.last
            if isinstance(event, KVLoaded) and not event.tier:
                self.loading[event.request_id] -= 1

    @rule(
        target=known,
        length=st.integers(1, 40),
        max_tokens=st.integers(0, 20),
        n=st.integers(1, 3),
        kind=st.integers(0, 2),
        scope=st.sampled_from(SCOPES),
        timeout_s=st.sampled_from([0.5, 5.0, 1e6]),
        is_pooled=st.booleans(),
        loads_kv=st.booleans(),
        hold_kv_s=st.sampled_from([0.0, 0.0, 3.0]),
    )
    def come(self, length, max_tokens, n, kind, scope, timeout_s, is_pooled, loads_kv, hold_kv_s):
        name = f"r{self.count}"
        if is_pooled:
            max_tokens, n = 0, 1
        self.count += 1
        self.expected[name] = n
        request = Request(
            request_id=name,
            token_ids=[(kind + i // 7) % 3 for i in range(length)],
            sampling=SamplingParams(n=n, max_tokens=max_tokens),
            scope=scope,
            tenant=str(kind),
            priority=kind,
            timeout_s=timeout_s,
            pooling=PoolingParams() if is_pooled else None,
        )
        self.tokens[name], self.requests[name] = request.token_ids, request
        self.scheduler.add(request, self.now, loads_kv=loads_kv, hold_kv_s=hold_kv_s)
        self.loading[name] += loads_kv and name in self.scheduler.requests
        self.note(self.scheduler.take_events())
        return name

    @rule(length=st.integers(1, 40), kind=st.integers(0, 2), scope=st.sampled_from(SCOPES), comes=st.booleans())
    def follow(self, length, kind, scope, comes):
        """A prompt that another engine computes is followed, and comes with its first token, or does not."""
        name = f"f{len(self.tokens)}"
        self.tokens[name] = [(kind + i // 7) % 3 for i in range(length)]
        request = Request(request_id=name, token_ids=self.tokens[name], sampling=SamplingParams(max_tokens=5), scope=scope)
        self.scheduler.kv_loads.follow(request, self.now)
        self.loading[name] += 1
        if comes:
            self.followed.append(request)

    @precondition(lambda self: getattr(self, "followed", None))
    @rule()
    def come_behind_a_prompt(self):
        request = self.followed.pop(0)
        name = request.request_id
        self.expected[name] = 1
        loading = self.scheduler.kv_loads.loading
        before = loading.get(name)
        self.scheduler.add(request, self.now, resumption=Resumption([[0]]), loads_kv=True)
        self.arrived[name] += 1  # which another engine has reported
        has_joined = before is not None and loading.get(name) is before
        self.loading[name] += not has_joined and name in self.scheduler.requests
        self.note(self.scheduler.take_events())

    @rule()
    def cancel_prefetch(self):
        for name in [name for name in self.tokens if name[0] in "fp"][-1:]:
            self.scheduler.kv_loads.cancel_prefetch(name, self.now)
            self.followed = [request for request in self.followed if request.request_id != name]

    @rule(length=st.integers(1, 40), kind=st.integers(0, 2), scope=st.sampled_from(SCOPES))
    def prefetch(self, length, kind, scope):
        name = f"p{len(self.tokens)}"
        self.tokens[name] = [(kind + i // 7) % 3 for i in range(length)]
        request = Request(request_id=name, token_ids=self.tokens[name], sampling=SamplingParams(max_tokens=1), scope=scope)
        self.scheduler.kv_loads.prefetch(request, request.token_ids, self.now)
        self.loading[name] += 1

    @rule(
        num_entries=st.sampled_from([1, 2, 40]),
        most=st.sampled_from([1, 5, 40]),
        skips=st.sampled_from([False] * 7 + [True]),
        place=st.integers(0, 2),
    )
    def arrive(self, num_entries, most, skips, place):
        """Some entries come of what was asked for, also when it is too late for them, or one is lost on the way."""
        loads = self.scheduler.kv_loads
        if not loads.queries:
            return
        query = loads.queries[place % len(loads.queries)]
        most = min(len(query.keys), most)
        start = self.sent.get(query.request_id, 0) + skips
        entries = range(start, min(most, start + num_entries))
        tokens, size = self.tokens[query.request_id], self.pool.block_size
        for entry in entries:
            contents = _contents(tokens, query, entry, most, self.windows, size)
            if any(contents):
                header = KVHeader(b"", query.root, query.keys[entry], entry, tuple(map(len, contents)))
                loads.arrive(query.request_id, [KVObject(header, contents, b"")])
        self.sent[query.request_id] = entries.stop

    @rule(is_complete=st.booleans())
    def end_transfer(self, is_complete):
        if self.scheduler.kv_loads.queries:
            query = self.scheduler.kv_loads.queries.pop(0)
            self.scheduler.kv_loads.finish(query.request_id, self.now, is_complete=is_complete)

    @rule(name=known, seconds=st.sampled_from([0.5, 3.0]))
    def hold(self, name, seconds):
        self.scheduler.hold(name, seconds, self.now)

    @rule(name=known, num_known=st.integers(0, 3), follows=st.booleans())
    def another_engine_asks(self, name, num_known, follows):
        if not self.scheduler.config.prefix_cache:
            return
        request = self.requests[name]
        keys, root, _ = self.scheduler._requests.prefixes.chain_of(request, request.token_ids)
        query = KVQuery(name, root, keys, min(num_known, len(keys)), follows)
        self.exports[self.scheduler.kv_exports.open(query, self.now)] = request.token_ids

    @rule(num_entries=st.integers(1, 4))
    def another_engine_copies(self, num_entries):
        for number, tokens in list(self.exports.items())[:1]:
            self.scheduler.kv_exports.extend(number, self.now)
            for found in self.scheduler.kv_exports.take(number, num_entries) or ():
                self.check_copy(found, tokens)

    def check_copy(self, found, tokens):
        size = self.pool.block_size
        for window, block in zip(self.windows, found.blocks, strict=True):
            if block == NO_BLOCK:
                continue
            slots, state = pickle.loads(self.runner.export_blocks([block])[0])
            if window == STATE:
                assert state == tuple(tokens[: (found.entry + 1) * size])
            else:
                assert slots == [(found.entry * size + i, tokens[found.entry * size + i]) for i in range(size)]

    @rule(is_complete=st.booleans())
    def another_engine_is_done(self, is_complete):
        if self.exports:
            number = next(iter(self.exports))
            del self.exports[number]
            self.scheduler.kv_exports.close(number, is_complete=is_complete)

    @rule(scope=st.sampled_from(SCOPES))
    def forget(self, scope):
        self.scheduler.forget(scope, self.now)
        assert not any(sum(kept.num_blocks) for _, kept in self.scheduler.report_kept(scope))

    @rule(name=known)
    def leave(self, name):
        self.scheduler.abort(name, self.now)

    @rule(seconds=st.sampled_from([0.01, 0.6, 6.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def plan(self):
        if len(self.flights) < 2 and (plan := self.make_plan()) is not None:
            self.flights.append(plan)

    @rule(stop=st.integers(0, 3))
    def commit(self, stop):
        if self.flights:
            result = self.runner.run(self.flights.pop(0))
            stops = {s.seq_id: Stop(1) for s in result.samples if stop == 0 and s.seq_id % 2}
            self.note(self.scheduler.commit(result, stops, self.now))

    @rule()
    def fail_a_sequence(self):
        if self.flights:
            result = self.runner.run(self.flights.pop(0))
            failed = [sample.seq_id for sample in result.samples[:1]]
            result.samples = result.samples[1:]
            result.failures = dict.fromkeys(failed, "no number")
            self.note(self.scheduler.commit(result, {}, self.now))

    @rule()
    def fail_a_step(self):
        if self.flights:
            self.flights.clear()
            self.scheduler.fail("the step failed", self.now)

    @invariant()
    def blocks_are_conserved(self):
        if hasattr(self, "pool"):
            self.pool.check()
            if self.scheduler.prefix_cache is not None:
                self.scheduler.prefix_cache.check()
            if self.tier is not None:
                self.tier.tiers.check()

    @rule(num_blocks=st.integers(1, 9), is_written=st.sampled_from([True, True, True, False]))
    def tier_writes(self, num_blocks, is_written):
        if self.tier is not None:
            self.tier.write(num_blocks, is_written=is_written)

    @rule(num_entries=st.integers(1, 9))
    def tier_reads(self, num_entries):
        if self.tier is not None:
            self.tier.read(num_entries, self.now)

    @rule()
    def a_block_of_the_tier_is_damaged(self):
        if self.tier is not None:
            self.tier.damage()

    def make_plan(self):
        plan = self.scheduler.plan(self.now)
        if self.tier is not None:
            self.tier.dispatch()
        return plan

    @invariant()
    def nothing_ends_twice(self):
        if hasattr(self, "ended"):
            self.note(self.scheduler.take_events())
            assert max(self.ended.values(), default=0) <= 1
            assert max(self.last.values(), default=0) <= 1

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for number in self.exports:
            self.scheduler.kv_exports.close(number, is_complete=False)
        self.run_out()
        self.now += FOLLOW_TIMEOUT_S
        self.run_out()
        self.now += PREFETCH_HOLD_S
        self.run_out()
        self.now += PREFETCH_HOLD_S  # what was loaded when the transfers ended
        self.run_out()
        assert not len(self.scheduler.kv_loads)
        assert not len(self.scheduler.leases or ()), "a lease outlived its time"
        ended = {name for name, num_last in self.last.items() if num_last}
        assert all(num == 0 or (num == 1 and name in ended) for name, num in self.loading.items()), "a load has no end"
        assert self.last == dict.fromkeys(self.expected, 1)
        assert self.ended == {(name, i): 1 for name, n in self.expected.items() for i in range(n)}
        assert self.arrived == Counter(self.expected.keys())
        assert self.pool.num_used <= self.num_public * self.pool.num_groups, "a block leaked"
        self.now += 4.0
        plan = self.scheduler.plan(self.now)
        assert plan is None or not plan.sequences
        if self.scheduler.prefix_cache is not None:
            assert not self.scheduler.prefix_cache.ttl.queue, "a session outlived its time"
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        self.pool.check()

    def run_out(self):
        for _ in range(20_000):
            if self.tier is not None:
                self.tier.write(100)
                self.tier.read(100, self.now)
            if not self.flights and (plan := self.make_plan()) is not None:
                self.flights.append(plan)
            if not self.flights and (self.tier is None or not self.tier.reads):
                break
            if not self.flights:
                continue
            self.note(self.scheduler.commit(self.runner.run(self.flights.pop(0)), {}, self.now))
        self.note(self.scheduler.take_events())


SchedulerMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=60, deadline=None)
TestScheduler = SchedulerMachine.TestCase
