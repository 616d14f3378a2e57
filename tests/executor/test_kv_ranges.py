"""Requests served from address ranges have the answers of a paged cache, and leave no mapping behind (decisions/0042)."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from cloister.backends import BACKENDS, ranges
from cloister.backends.base import KVLayout
from cloister.backends.ranges import RangeLayout
from cloister.executor import ModelRunner
from cloister.kv import BlockGroup, BlockPool, PrefixKeys
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.types.documents import Documents
from cloister.types.events import Ended, Preempted, Scheduled
from cloister.types.request import Request, SamplingParams
from tests.driving import RandomWeights, make_spec
from tests.thinning import thin
from tests.tree_history import Erratic, Prophet

VOCAB, BLOCK, MAX_MODEL_LEN, NUM_SEQS, MOST_DRAFTS = 64, 4, 400, 6, 5
SPEC = make_spec(hidden=32, intermediate=48, heads=(4, 2), head_dim=8, num_layers=2, vocab=VOCAB)
WEIGHTS = RandomWeights(SPEC, 5)
KINDS = [
    ("torch", {"dtype": "float32"}),
    ("native", {"dtype": "float32"}),
    *(("native", {"dtype": "bfloat16", "kv_dtype": kind}) for kind in ("bfloat16", "int8")),
]


def wishes(seed: int) -> Iterator[Request]:
    """Requests, half of which begin alike, and half of those with documents; one has two answers."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(290)]
    for i in range(14):
        tail = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))]
        sampling = SamplingParams(
            temperature=0.0 if i % 3 else 0.9, seed=i, n=2 if i == 4 else 1, max_tokens=rng.randrange(4, 50), ignore_eos=True
        )
        token_ids, documents = (shared if i % 2 else []) + tail, None
        if i % 4 == 1:  # 40 positions of prefix, then two documents in either order
            texts = (shared[40:160], shared[160:280])[:: 1 if i % 8 == 1 else -1]
            token_ids, documents = [*shared[:40], *texts[0], *texts[1], *tail], Documents((40, 160), 280)
        yield Request(request_id=str(i), token_ids=token_ids, sampling=sampling, documents=documents)


class Served:
    """What came of some requests on one program."""

    def __init__(self, backend: str, options: Mapping[str, Any], *, ranged: bool, num_blocks: int, answers: Any = ()) -> None:
        layout = KVLayout(num_blocks, BLOCK)
        if ranged:
            layout = replace(layout, ranges=RangeLayout(NUM_SEQS, -(-(MAX_MODEL_LEN + MOST_DRAFTS) // BLOCK)))
        maker = BACKENDS.get(backend)(num_threads=1, device="cpu", **options)
        self.program = maker.build(SPEC, WEIGHTS, layout)
        self.pool = BlockPool([BlockGroup(num_blocks)], BLOCK)
        self.speculation = Erratic(most=MOST_DRAFTS) if answers else None
        config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=NUM_SEQS, budget=BudgetConfig(max_tokens=64))
        self.scheduler = Scheduler(config, self.pool, PrefixKeys("model", BLOCK), self.speculation)
        self.runner = ModelRunner(
            self.program,
            vocab_size=VOCAB,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK,
            drafters={"prophet": Prophet(answers, VOCAB)} if answers else {},
        )
        self.num_preempted = self.num_hit = self.most_mappings = self.num_shared = 0
        self.failures: list[str] = []

    def serve(self, requests: Iterator[Request] | list[Request], aborts: Mapping[int, str] = {}) -> dict[Any, list[int]]:
        """Returns the tokens of each answer that ended by itself.

        Args:
            aborts: by step, the request that is aborted before it.
        """
        for request in requests:
            self.scheduler.add(request, 0.0)
        tokens: dict[int, list[int]] = {}
        names = {}
        for step in range(4000):
            if step in aborts:
                self.scheduler.abort(aborts[step], step * 0.01)
            plan = self.scheduler.plan(step * 0.01)
            if plan is None:
                break
            result = self.runner.run(plan)
            result.elapsed_s = 0.01
            self.failures += result.failures.values()
            if self.program.ranges is not None:
                self.most_mappings = max(self.most_mappings, self.program.ranges.num_mappings)
            for sample in result.samples:
                tokens.setdefault(sample.seq_id, []).extend(sample.token_ids)
            for event in self.scheduler.commit(result, {}, step * 0.01):
                if isinstance(event, Ended):
                    if event.request_id not in aborts.values() and event.seq_id not in result.failures:
                        names[event.seq_id] = (event.request_id, event.index)
                    tokens[event.seq_id] = tokens.get(event.seq_id, [])[: event.num_output_tokens]
                self.num_preempted += isinstance(event, Preempted)
                self.num_hit += event.num_cached_tokens if isinstance(event, Scheduled) else 0
            self.pool.check()
        assert not self.scheduler.requests
        return {name: tokens[seq_id] for seq_id, name in names.items()}


@pytest.mark.parametrize("seed", thin(range(4), 1))
@pytest.mark.parametrize(("backend", "options"), thin(KINDS, KINDS[1:]))  # torch takes ten times as long
def test_answers_are_those_of_a_paged_cache(backend: str, options: Mapping[str, Any], seed: int) -> None:
    expected = Served(backend, options, ranged=False, num_blocks=700).serve(wishes(seed))
    for num_blocks in (700, 104):
        served = Served(backend, options, ranged=True, num_blocks=num_blocks)
        assert served.serve(wishes(seed)) == expected
        assert served.num_hit, "no prefix was found, so none was tried"
        assert bool(served.num_preempted) == (num_blocks == 104)
        assert served.most_mappings > 4, "nothing was computed from a range"
        assert served.program.ranges.num_mappings == 0
    answers = [[*wish.token_ids, *expected[wish.request_id, 0]] for wish in wishes(seed)]
    drafting = Served(backend, options, ranged=True, num_blocks=700, answers=answers)
    assert drafting.serve(wishes(seed)) == expected
    assert drafting.speculation.num_accepted > 50
    assert drafting.program.ranges.num_mappings == 0


@pytest.mark.parametrize("seed", thin(range(6), 2))
def test_aborted_requests_leave_no_mapping(seed: int) -> None:
    rng, (backend, options) = random.Random(seed), KINDS[1 + seed % 3]
    expected = Served(backend, options, ranged=False, num_blocks=700).serve(wishes(seed))
    aborts = {rng.randrange(60): str(i) for i in rng.sample(range(14), 6)}
    served = Served(backend, options, ranged=True, num_blocks=160)
    found = served.serve(wishes(seed), aborts)
    assert found == {name: expected[name] for name in found}
    assert len({name for name, _ in found}) == 14 - len(set(aborts.values()))
    assert served.program.ranges.num_mappings == 0
    for block in range(160):
        served.program.wipe_blocks([block])
    assert not served.program.ranges.memory[:160].any()


def test_a_request_that_cannot_be_mapped_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, options = KINDS[1]
    expected = Served(backend, options, ranged=False, num_blocks=700).serve(wishes(0))
    served, system, calls = Served(backend, options, ranged=True, num_blocks=700), ranges._map, []

    def refuse_some(*given: Any) -> int:
        calls.append(given)
        if len(calls) in (9, 60):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return system(*given)

    monkeypatch.setattr(ranges, "_map", refuse_some)
    found = served.serve(wishes(0))
    assert len(served.failures) == 2
    assert all("refuses to map the KV" in message for message in served.failures)
    assert len(expected) - 3 <= len(found) < len(expected)
    assert found == {name: expected[name] for name in found}
    assert served.program.ranges.num_mappings == 0
