"""A draft cache of constant size: first and newest tokens only, positions that the small model learned, nothing left behind."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from cloister.backends.base import LOGITS, FloatArray, ForwardBatch, KVLayout, StepOutput, Wants
from cloister.executor.acceptance import distribution
from cloister.executor.drafters import DRAFTERS
from cloister.executor.drafters.base import NOTHING, Draft, VerifyFeedback
from cloister.executor.drafters.draft_model import MAX_FOLLOWED
from cloister.executor.drafters.long_spec import NUM_SINKS, LongSpecDrafter
from cloister.executor.state import BatchState, SequenceState
from cloister.types.errors import ConfigError
from tests.executor.drafters.small_models import BLOCK, VOCAB, RandomModel, arrive, ask, make_batch, make_context

CAPACITY = 64
KEPT = (CAPACITY - NUM_SINKS) // 2


class WatchedModel(RandomModel):
    """A small model that remembers its layout and the positions that it was given."""

    def build(self, kv: KVLayout) -> Any:
        program: Any = super().build(kv)
        self.layout, self.positions = kv, set[int]()

        compute = program.step

        def step(batch: ForwardBatch, wants: Wants) -> StepOutput:
            self.positions |= set(batch.positions.tolist())
            output: StepOutput = compute(batch, wants)
            return output

        program.step = step
        return program


def open_drafter(batch: BatchState, **fields: Any) -> tuple[LongSpecDrafter, WatchedModel]:
    model = WatchedModel(0, max_positions=CAPACITY)
    drafter = LongSpecDrafter(make_context(batch, **fields), model)
    drafter.allocate(KVLayout(10_000, BLOCK))
    return drafter, model


def logits_of(program: Any, tokens: list[int]) -> FloatArray:
    count = len(tokens)
    found: FloatArray = program.step(
        ForwardBatch(
            token_ids=np.array(tokens, np.int32),
            positions=np.arange(count, dtype=np.int32),
            query_starts=np.array([0, count], np.int32),
            context_lens=np.array([count], np.int32),
            block_tables=np.arange(32, dtype=np.int32)[None],
            logit_rows=np.array([count - 1], np.int32),
        ),
        LOGITS,
    ).logits
    return found


def observe(drafter: LongSpecDrafter, state: SequenceState, draft: Draft, num_accepted: int, last: int) -> None:
    start = len(state.tokens) - 1
    state.tokens.extend([*draft.token_ids[:num_accepted], last])
    path = tuple(range(num_accepted))
    drafter.observe([VerifyFeedback(state, start, draft, path, np.zeros(1 + len(draft.token_ids), np.int32))])


@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_what_the_small_model_says_of_the_first_and_the_newest_tokens(seed: int) -> None:
    random, batch = Random(seed), make_batch()
    drafter, model = open_drafter(batch)
    alone = RandomModel(0).build(KVLayout(32, BLOCK))
    states = [
        arrive(batch, number, [random.randrange(2, VOCAB) for _ in range(length)], ())
        for number, length in enumerate((3, 50, 300))
    ]
    firsts: list[set[int]] = [set() for _ in states]
    for _ in range(40):
        requests = [ask(state, random.randrange(1, 9), coupled=random.random() < 0.3) for state in states]
        for each, draft in zip(requests, drafter.draft(requests), strict=True):
            tokens = each.state.tokens.tolist()
            first = drafter._caches[each.state.seq_id].first
            firsts[each.state.seq_id].add(first)
            assert len(tokens) - first >= min(KEPT, len(tokens) - NUM_SINKS)
            if draft.probs is not None:
                logits = logits_of(alone, tokens[:NUM_SINKS] + tokens[first:] + draft.token_ids[:-1])
                draws = batch.sampling_metadata([each.state], [0])
                assert np.array_equal(draft.probs[-1], distribution(logits, draws)[0])
            observe(drafter, each.state, draft, random.randrange(len(draft.token_ids) + 1), random.randrange(2, VOCAB))
    assert min(len(found) for found in firsts) > 2, "each of them was based anew"
    assert max(model.positions) < CAPACITY


def test_memory_does_not_grow_with_the_context() -> None:
    batch = make_batch()
    drafter, model = open_drafter(batch, max_num_seqs=2, max_model_len=1 << 20)
    other, _ = open_drafter(batch, max_num_seqs=2, max_model_len=64)
    assert drafter.kv_block_bytes == 0
    assert drafter.fixed_bytes == other.fixed_bytes == 1000 + 2 * CAPACITY // BLOCK * model.kv_block_bytes(BLOCK)
    assert model.layout.num_blocks == 2 * CAPACITY // BLOCK


def test_a_long_prompt_is_computed_by_its_end_alone() -> None:
    batch = make_batch()
    drafter, _ = open_drafter(batch)
    state = arrive(batch, 0, [5] * 3000, (), temperature=0.0)
    drafter.follow([(state, 3000)])
    assert not drafter._caches
    assert len(drafter.draft([ask(state, 4)])[0].token_ids) == 4
    assert drafter._caches[0].num_filled == NUM_SINKS + KEPT


def test_caches_are_filled_a_few_at_a_time() -> None:
    batch = make_batch()
    drafter, _ = open_drafter(batch, max_num_seqs=40)
    states = [arrive(batch, number, [5] * 500, (), temperature=0.0) for number in range(40)]
    counts = []
    for _ in range(2):
        counts.append(sum(bool(draft.token_ids) for draft in drafter.draft([ask(state, 2) for state in states])))
    assert counts == [MAX_FOLLOWED // (NUM_SINKS + KEPT), 40]


def test_who_runs_beyond_the_number_of_caches_gets_no_drafts() -> None:
    batch = make_batch()
    drafter, _ = open_drafter(batch, max_num_seqs=2)
    states = [arrive(batch, number, [5, 6, 7], (), temperature=0.0) for number in range(3)]
    drafts = drafter.draft([ask(state, 2) for state in states])
    assert [len(draft.token_ids) for draft in drafts] == [2, 2, 0]
    assert drafts[2] is NOTHING
    drafter.forget(0)
    assert len(drafter.draft([ask(states[2], 2)])[0].token_ids) == 2


def test_what_a_sequence_leaves_is_overwritten() -> None:
    batch = make_batch()
    drafter, model = open_drafter(batch)
    program: Any = drafter._program
    if not hasattr(program, "read_block"):
        pytest.skip("this back end shows no blocks")
    state = arrive(batch, 0, list(range(2, 40)), (), temperature=0.0)
    drafter.draft([ask(state, 6)])
    drafted = drafter._caches[0].drafted
    held = [any(program.read_block(layer, block)) for layer in (0, 1) for block in range(model.layout.num_blocks)]
    assert any(held)
    assert drafted.any()
    drafter.forget(0)
    assert not drafted.any()
    assert not any(any(program.read_block(layer, block)) for layer in (0, 1) for block in range(model.layout.num_blocks))
    assert len(drafter._free) == model.layout.num_blocks
    drafter.forget(0)


def test_a_small_model_of_few_positions_is_an_error() -> None:
    with pytest.raises(ConfigError, match="30 positions"):
        LongSpecDrafter(make_context(make_batch()), RandomModel(0, max_positions=30))
    with pytest.raises(ConfigError, match="cloister train draft"):
        DRAFTERS.get("long_spec")(make_context(make_batch()))
