"""Blocks are conserved and every request ends exactly once, whatever comes in whatever order."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from cloister.kv import BlockGroup, BlockPool, PrefixKeys
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.types.events import Arrived, Ended
from cloister.types.request import PoolingParams, Request, SamplingParams
from cloister.types.scope import Scope, ScopeKind
from cloister.types.step import Stop
from tests.checked_runner import STATE, CheckedRunner
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


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go, stop, fail and time out around a scheduler with up to two plans in flight."""

    requests = Bundle("requests")

    @initialize(
        policy=st.sampled_from(["fcfs", "static", "priority", "fair", "lpm"]),
        num_blocks=st.integers(4, 40),
        block_size=st.sampled_from([1, 3, 4, 16]),
        max_num_seqs=st.integers(1, 6),
        max_tokens=st.integers(1, 40),
        prefix_cache=st.booleans(),
        public=st.sampled_from([(), (PUBLIC,)]),
        cache_scopes=st.integers(0, 3),
        most_drafts=st.sampled_from([0, 1, 7]),
        windows=st.sampled_from(
            [(None,), (None, 5), (None, 1, 16), (7,), (None, STATE), (STATE,), (None, 5, STATE), (5, STATE)]
        ),
    )
    def start(
        self, policy, num_blocks, block_size, max_num_seqs, max_tokens, prefix_cache, public, cache_scopes, most_drafts, windows
    ):
        self.pool = BlockPool([_group(num_blocks, window, block_size, max_tokens) for window in windows], block_size)
        config = SchedulerConfig(
            max_model_len=48,
            max_num_seqs=max_num_seqs,
            policy=policy,
            budget=BudgetConfig(max_tokens=max_tokens),
            prefix_cache=prefix_cache,
            cache_scopes=cache_scopes,
        )
        keys = PrefixKeys("model", block_size, public)
        self.num_public = len(keys.public) if prefix_cache else 0
        self.scheduler = Scheduler(config, self.pool, keys, Erratic(most=most_drafts) if most_drafts else None)
        self.runner = CheckedRunner(self.pool.num_total, block_size, vocab_size=3, windows=windows)
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

    @rule(
        target=requests,
        length=st.integers(1, 40),
        max_tokens=st.integers(0, 20),
        n=st.integers(1, 3),
        kind=st.integers(0, 2),
        scope=st.sampled_from(SCOPES),
        timeout_s=st.sampled_from([0.5, 5.0, 1e6]),
        is_pooled=st.booleans(),
    )
    def come(self, length, max_tokens, n, kind, scope, timeout_s, is_pooled):
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
        self.scheduler.add(request, self.now)
        return name

    @rule(name=requests)
    def leave(self, name):
        self.scheduler.abort(name, self.now)

    @rule(seconds=st.sampled_from([0.01, 0.6, 6.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def plan(self):
        if len(self.flights) < 2 and (plan := self.scheduler.plan(self.now)) is not None:
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

    @invariant()
    def nothing_ends_twice(self):
        if hasattr(self, "ended"):
            self.note(self.scheduler.take_events())
            assert max(self.ended.values(), default=0) <= 1
            assert max(self.last.values(), default=0) <= 1

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20_000):
            if not self.flights and (plan := self.scheduler.plan(self.now)) is not None:
                self.flights.append(plan)
            if not self.flights:
                break
            self.note(self.scheduler.commit(self.runner.run(self.flights.pop(0)), {}, self.now))
        self.note(self.scheduler.take_events())
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


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
