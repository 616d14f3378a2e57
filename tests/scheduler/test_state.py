"""Layers with a recurrent state: where hits find one, how many are kept, and that sequences get along with two blocks each."""

import random

import pytest

from cloister.kv import BlockGroup, BlockPool, PrefixKeys
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.types.events import Ended, Preempted, Scheduled
from cloister.types.request import BeamSearch, Request, SamplingParams
from cloister.types.scope import Scope, ScopeKind
from tests.checked_runner import STATE, CheckedRunner
from tests.tree_history import Erratic

BLOCK = 4


class Served:
    """A scheduler and a runner that checks every state that a sequence reads."""

    def __init__(self, *, num_blocks=200, num_states=40, num_seqs=4, max_tokens=24, drafts=0, hybrid=True, public=(), scopes=0,
                 late=None):  # fmt: skip
        groups = [BlockGroup(num_blocks)] if hybrid else []
        self.pool = BlockPool([*groups, BlockGroup.of_state(num_states)], BLOCK)
        config = SchedulerConfig(
            max_model_len=400, max_num_seqs=num_seqs, budget=BudgetConfig(max_tokens=max_tokens), cache_scopes=scopes
        )
        speculation = Erratic(most=drafts) if drafts else None
        self.scheduler = Scheduler(config, self.pool, PrefixKeys("model", BLOCK, public), speculation)
        self.runner = CheckedRunner(self.pool.num_total, BLOCK, windows=[*([None] if hybrid else []), STATE], late=late)
        self.num_cached = {}
        self.num_preempted = 0
        self.chunks = []
        self.answers = {}

    def serve(self, *requests):
        for request in requests:
            self.scheduler.add(request, 0.0)
        while (plan := self.scheduler.plan(0.0)) is not None:
            self.chunks += [part.num_tokens for part in plan.sequences]
            result = self.runner.run(plan)
            for sample in result.samples:
                self.answers.setdefault(sample.seq_id, []).extend(sample.token_ids)
            for event in self.scheduler.commit(result, {}, 0.0):
                if isinstance(event, Scheduled) and not event.resumed:
                    self.num_cached[event.request_id] = event.num_cached_tokens
                self.num_preempted += isinstance(event, Preempted)
                assert not isinstance(event, Ended) or event.error is None, event.error
            self.pool.check()
            self.scheduler.prefix_cache.check()
        assert not self.scheduler.requests

    def num_states(self):
        """Blocks of states that the prefix cache keeps."""
        group = self.pool.state_group
        return sum(self.pool.is_kept(block) for block in range(self.pool.num_total) if self.pool.group_of(block) == group)


def request(name, token_ids, max_tokens=6, **options):
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)
    return Request(request_id=name, token_ids=list(token_ids), sampling=sampling, scope=Scope(ScopeKind.LOCAL, b"a"))


@pytest.mark.parametrize("hybrid", [True, False])
def test_the_same_prompt_hits_up_to_its_last_whole_block(hybrid):
    served = Served(hybrid=hybrid)
    served.serve(request("first", range(39)))
    served.serve(request("again", range(39)))
    assert served.num_cached == {"first": 0, "again": 36}
    assert served.runner.num_snapshots == 1


def test_a_chunk_is_not_cut_for_a_snapshot():
    served = Served(max_tokens=64)
    served.serve(request("first", range(39), max_tokens=1))
    assert served.chunks == [39]


def test_a_prompt_that_ends_with_a_block_hits_too():
    served = Served()
    served.serve(request("first", range(40), max_tokens=1))
    served.serve(request("again", range(40), max_tokens=1))
    assert served.num_cached["again"] == 36


def test_the_next_turn_of_a_conversation_hits_the_answer():
    served = Served()
    served.serve(request("first", range(30), max_tokens=23))
    served.serve(request("next", [*range(30), *served.answers[0], 7, 8, 9]))
    assert served.num_cached["next"] == 52, "prompt and answer but for the last token, in whole blocks"


def test_a_prefix_that_prompts_share_is_kept_where_they_part():
    """The second prompt finds no state there, and leaves one for the third."""
    served = Served(max_tokens=64)
    shared = range(50)
    for name in ("first", "second", "third"):
        served.serve(request(name, [*shared, *random.Random(name).choices(range(100, 200), k=20)]))
    assert served.num_cached == {"first": 0, "second": 0, "third": 48}
    again = request("second again", [*shared, *random.Random("second").choices(range(100, 200), k=20)])
    served.serve(again)
    assert served.num_cached["second again"] == 68


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(39, 200), (300, 1)])
def test_a_long_prompt_or_answer_leaves_two_states(num_prompt_tokens, max_tokens):
    served = Served()
    served.serve(request("long", range(num_prompt_tokens), max_tokens=max_tokens))
    assert served.num_states() == 2


@pytest.mark.parametrize("hybrid", [True, False])
def test_two_blocks_are_enough_for_a_sequence(hybrid):
    served = Served(num_states=2, hybrid=hybrid)
    served.serve(*(request(str(i), range(i, 45 + i), max_tokens=30) for i in range(5)))
    assert len(served.num_cached) == 5


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("drafts", [0, 6])
@pytest.mark.parametrize("is_late", [False, True])
def test_preempted_forked_and_drafting_sequences_read_their_own_state(hybrid, drafts, is_late):
    late = random.Random(2) if is_late else None
    served = Served(num_blocks=48, num_states=7, num_seqs=6, drafts=drafts, hybrid=hybrid, late=late)
    rng = random.Random(1)
    wishes = [
        request(str(i), [*range(rng.choice([0, 21, 40])), *rng.choices(range(50), k=rng.randrange(1, 30))], 40, n=1 + i % 3)
        for i in range(30)
    ]
    served.serve(*wishes)
    assert any(served.num_cached.values()), "no prefix was found, so none was tried"
    assert served.num_preempted or not hybrid
    assert (served.runner.num_late > 200) is is_late


def test_more_beams_than_there_are_states_for_are_refused():
    scheduler = Served(num_states=5).scheduler
    scheduler.add(request("beams", [1, 2, 3], beams=BeamSearch(width=3)), 0.0)
    (ended,) = [event for event in scheduler.take_events() if isinstance(event, Ended) and event.last]
    assert "beam searches may hold 1 of the 2 sequences" in ended.error


def test_no_state_is_kept_under_public_keys():
    public = list(range(40))
    served = Served(public=(public,))
    served.serve(request("first", public[:33], max_tokens=1))
    served.serve(request("again", public[:33], max_tokens=1))
    assert served.num_cached["again"] == 0
    served.serve(request("longer", [*public, *range(50, 70)], max_tokens=1), request("other", [*public, *range(60, 80)]))
    served.serve(request("longer again", [*public, *range(50, 70)], max_tokens=1))
    assert served.num_cached["longer again"] == 56


def test_what_a_scope_keeps_leaves_the_others_two_states_each():
    served = Served(num_states=20, num_seqs=4, scopes=3)
    for i in range(12):
        served.serve(request(str(i), range(i, 40 + i)))
    assert served.num_states() == 3, "a third of what 4 sequences leave of 20 is 4, and of half of all"
