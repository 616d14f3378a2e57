"""Requests over layers with windows: whatever the sizes, each is refused at once or ends with its answer."""

from cloister.backends.base import KVGroup
from cloister.kv import BlockGroup, BlockPool, PrefixKeys
from cloister.launch.engine import build_scheduler
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.types.config import EngineConfig
from cloister.types.events import Ended
from cloister.types.request import FinishReason, ModelInfo, Request, SamplingParams
from tests.checked_runner import CheckedRunner

BLOCK = 4


class Served:
    """A scheduler over groups of layers, and a runner that checks what each query sees.

    Args:
        groups: (blocks, window, `max_held`) of each group.
    """

    def __init__(self, *groups, max_tokens=8, max_num_seqs=4, public=(), **config):
        self.pool = BlockPool([BlockGroup(*group) for group in groups], BLOCK)
        self.runner = CheckedRunner(self.pool.num_total, BLOCK, windows=[window for _, window, _ in groups])
        limits = SchedulerConfig(
            max_model_len=400, max_num_seqs=max_num_seqs, budget=BudgetConfig(max_tokens=max_tokens), **config
        )
        self.scheduler = Scheduler(limits, self.pool, PrefixKeys("model", BLOCK, public))
        self.reasons = {}

    def add(self, name, num_tokens, kind=1, **sampling):
        tokens = [(kind + i) % 50 for i in range(num_tokens)]
        self.scheduler.add(Request(request_id=name, token_ids=tokens, sampling=SamplingParams(**sampling)), 0.0)

    def serve(self):
        """Runs until nothing is left to do; returns how each request ended."""
        for step in range(1000):
            plan = self.scheduler.plan(step * 0.01)
            if plan is None:
                break
            self._note(self.scheduler.commit(self.runner.run(plan), {}, step * 0.01))
            self.pool.check()
        self._note(self.scheduler.take_events())
        return self.reasons

    def _note(self, events):
        self.reasons.update({event.request_id: event.reason for event in events if isinstance(event, Ended) and event.last})


def test_a_prompt_may_be_longer_than_all_blocks_where_every_layer_has_a_window():
    served = Served((12, 9, 6))
    served.add("long", 200, max_tokens=3)
    served.add("short", 5, max_tokens=3)
    assert served.serve() == {"long": FinishReason.LENGTH, "short": FinishReason.LENGTH}


def test_prefixes_are_looked_up_where_all_layers_have_windows_of_several_sizes():
    served = Served((10, 20, 8), (8, 7, 5))
    served.add("first", 60, max_tokens=2)
    served.serve()
    served.add("other", 60, kind=2, max_tokens=2)  # none of its blocks is known
    served.add("again", 60, max_tokens=2)
    assert served.serve() == dict.fromkeys(("first", "other", "again"), FinishReason.LENGTH)


def test_the_blocks_of_a_found_prefix_count_for_the_request_that_found_it():
    served = Served((60, None, None), (7, 9, 6))
    served.add("first", 60, max_tokens=1)
    served.serve()
    served.add("longer", 150, max_tokens=1)
    assert served.serve() == dict.fromkeys(("first", "longer"), FinishReason.LENGTH)


def test_public_prefixes_that_leave_too_few_blocks_of_a_window_refuse_what_cannot_run():
    served = Served((60, None, None), (10, 9, 6), public=[[7] * 12, [8] * 12])
    for token in (7, 8):
        request = Request(request_id=str(token), token_ids=[token] * 13, sampling=SamplingParams(max_tokens=1))
        served.scheduler.add(request, 0.0)
    served.serve()
    served.add("too long", 60, max_tokens=1)
    served.add("short", 12, max_tokens=1)
    served.serve()
    assert [served.reasons.pop(name) for name in ("too long", "short")] == [FinishReason.REJECTED, FinishReason.LENGTH]
    assert set(served.reasons.values()) == {FinishReason.LENGTH}


def test_no_sequence_holds_more_blocks_of_a_window_than_admission_and_shares_count_with():
    config = EngineConfig(block_size=BLOCK, max_batched_tokens=6, max_num_seqs=4, prefix_cache=True)
    groups = (KVGroup(200), KVGroup(60, frozenset({1}), window=6))
    model = ModelInfo(name="model", path="", max_model_len=200, vocab_size=50, eos_token_ids=())
    scheduler = build_scheduler(config, model, groups)
    runner = CheckedRunner(scheduler.pool.num_total, BLOCK, windows=(None, 6))
    for name, num_tokens in (("a", 2), ("b", 2), ("c", 2), ("long", 60)):
        # three decodes leave half of six steps to the prompt, whose steps then begin in the middle of a block
        sampling = SamplingParams(max_tokens=6)
        scheduler.add(Request(request_id=name, token_ids=list(range(num_tokens)), sampling=sampling), 0.0)
    most = 0
    while (plan := scheduler.plan(0.0)) is not None:
        tables = [sequence.table for state in scheduler.requests.values() for sequence in state.sequences]
        most = max([most, *(table.count_held(1) for table in tables if table is not None)])
        scheduler.commit(runner.run(plan), {}, 0.0)
    assert most == scheduler.pool.groups[1].max_held == 5


def test_a_prefix_cache_that_is_too_small_to_keep_anything_says_so(caplog):
    config = EngineConfig(block_size=BLOCK, max_num_seqs=4, prefix_cache=True, cache_scopes=3)
    model = ModelInfo(name="model", path="", max_model_len=200, vocab_size=50, eos_token_ids=())
    build_scheduler(config, model, (KVGroup(53),))
    assert not caplog.text
    build_scheduler(config, model, (KVGroup(52),))
    assert "the prefix cache keeps nothing: 52 KV blocks do not suffice" in caplog.text
    assert "a share for each of 3 tenants" in caplog.text


def test_forks_give_back_what_is_behind_a_window_as_soon_as_their_parent_does():
    served = Served((60, None, None), (40, 9, 21), max_tokens=70)
    served.add("forked", 62, n=4, max_tokens=9)
    plan = served.scheduler.plan(0.0)
    served.scheduler.commit(served.runner.run(plan), {}, 0.0)
    assert served.pool.count_available(1) == 40 - 3  # they share the last 3 of 16 entries
