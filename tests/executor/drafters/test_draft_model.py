"""Chains and trees of small models: the tokens that these models say, no more of them than asked for, and nothing stays."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from cloister.backends.base import LOGITS, FloatArray, ForwardBatch, KVLayout, StepOutput, Wants
from cloister.executor.acceptance import distribution
from cloister.executor.drafters.base import NOTHING, Draft, Drafter, DraftRequest, VerifyFeedback
from cloister.executor.drafters.draft_model import FEW, MAX_CAUGHT_UP, MAX_FOLLOWED, DraftModelDrafter, PagedDrafter
from cloister.executor.drafters.spec_infer import SpecInferDrafter
from cloister.executor.program_executor import ProgramExecutor
from cloister.executor.state import BatchState, SequenceState
from tests.executor.drafters.small_models import BLOCK, VOCAB, RandomModel, arrive, ask, make_batch, make_context

NUM_BLOCKS = 512
MODEL = RandomModel(0)
PROGRAM = RandomModel(0).build(KVLayout(NUM_BLOCKS, BLOCK))
EXECUTOR = ProgramExecutor(PROGRAM, VOCAB)
PROMPT = list(np.random.default_rng(3).integers(2, VOCAB, 21))


def open_drafter(batch: BatchState, kind: type[PagedDrafter] = DraftModelDrafter, models: int = 1) -> PagedDrafter:
    drafter = kind(make_context(batch), [RandomModel(seed) for seed in range(models)])
    drafter.allocate(KVLayout(NUM_BLOCKS, BLOCK))
    return drafter


def logits_after(tokens: list[int]) -> FloatArray:
    """What the small model says after these tokens if it is run alone."""
    count = len(tokens)
    return PROGRAM.step(
        ForwardBatch(
            token_ids=np.array(tokens, np.int32),
            positions=np.arange(count, dtype=np.int32),
            query_starts=np.array([0, count], np.int32),
            context_lens=np.array([count], np.int32),
            block_tables=np.arange(NUM_BLOCKS, dtype=np.int32)[None],
            logit_rows=np.array([count - 1], np.int32),
        ),
        LOGITS,
    ).logits


def continuation(batch: BatchState, state: SequenceState, count: int) -> list[int]:
    """What the small model says alone, with the noise of the sequence's own tokens."""
    tokens = state.tokens.tolist()
    for depth in range(count):
        draws = batch.sampling_metadata([state], [0])
        draws["position"] += depth
        tokens.append(int(EXECUTOR.sample(logits_after(tokens), draws)[0]))
    return tokens[-count:]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"seed": 5}, {"seed": 5, "temperature": 0.8, "top_p": 0.7}])
def test_a_chain_is_what_the_small_model_says_alone(sampling: dict[str, Any]) -> None:
    batch = make_batch()
    drafter = open_drafter(batch)
    states = [arrive(batch, number, PROMPT[number:], range(number * 20, number * 20 + 20), **sampling) for number in range(3)]
    drafts = drafter.draft([ask(state, count) for state, count in zip(states, (3, 6, 1), strict=True)])
    assert [draft.token_ids for draft in drafts] == [
        continuation(batch, state, count) for state, count in zip(states, (3, 6, 1), strict=True)
    ]
    assert all(draft.probs is None and draft.parents is None for draft in drafts)


def test_a_chain_drawn_apart_comes_with_its_distributions() -> None:
    batch = make_batch()
    drafter = open_drafter(batch)
    state = arrive(batch, 0, PROMPT, range(20), temperature=0.9, top_k=40)
    apart, coupled = arrive(batch, 1, PROMPT, range(20, 40)), arrive(batch, 2, PROMPT, range(40, 60), seed=5)
    draft, _, other = drafter.draft([ask(state, 5, coupled=False), ask(apart, 3, coupled=False), ask(coupled, 4)])
    assert draft.probs is not None
    for depth, (token, probs) in enumerate(zip(draft.token_ids, draft.probs, strict=True)):
        logits = logits_after(state.tokens.tolist() + draft.token_ids[:depth])
        assert np.array_equal(probs, distribution(logits, batch.sampling_metadata([state], [0]))[0])
        assert probs[token] > 0
    assert other.token_ids == continuation(batch, coupled, 4)
    assert other.probs is None


def test_tokens_drawn_apart_follow_their_distribution() -> None:
    batch = make_batch()
    drafter = open_drafter(batch, SpecInferDrafter)
    count, tokens = 600, []
    state = arrive(batch, 0, PROMPT, range(20), temperature=0.5, top_k=4)
    for seed in range(count):
        batch._columns["seed"][state.slot] = seed
        draft = drafter.draft([DraftRequest(state, 2, (-1, -1), is_coupled=False)])[0]
        tokens.append(draft.token_ids)
    assert draft.probs is not None
    first = draft.probs[0]
    found = np.bincount([each[0] for each in tokens], minlength=VOCAB)
    kept = first > 0
    assert found[~kept].sum() == 0
    assert (np.square(found - count * first)[kept] / (count * first[kept])).sum() < 22  # 3 degrees of freedom, p < 1e-4


@pytest.mark.parametrize("make", [DraftModelDrafter, SpecInferDrafter])
def test_what_was_drawn_behind_a_rejected_draft_is_drawn_anew(make: type[PagedDrafter]) -> None:
    batch = make_batch()
    drafter = open_drafter(batch, make)
    num_same = 0
    for seed in range(40):
        state = arrive(batch, seed, PROMPT, range(20))
        batch._columns["seed"][state.slot] = seed
        first, second = drafter.draft([DraftRequest(state, 2, (-1, 0), is_coupled=False)])[0].token_ids
        state.tokens.append(first)
        num_same += drafter.draft([DraftRequest(state, 1, (-1,), is_coupled=False)])[0].token_ids[0] == second
    assert num_same < 20


def test_a_chain_ends_where_the_text_does() -> None:
    batch = make_batch()
    drafter = open_drafter(batch)
    chain = continuation(batch, arrive(batch, 0, PROMPT, range(20), temperature=0.0), 6)
    stop = next(token for place, token in enumerate(chain) if place and token not in chain[:place])
    state = arrive(batch, 1, PROMPT, range(20), stops=(stop,), temperature=0.0)
    assert drafter.draft([ask(state, 6)])[0].token_ids == chain[: chain.index(stop) + 1]


@pytest.mark.parametrize("coupled", [True, False])
def test_children_of_a_node_are_the_first_ones_of_its_race(coupled: bool) -> None:
    batch = make_batch()
    drafter = open_drafter(batch, SpecInferDrafter)
    state = arrive(batch, 0, PROMPT, range(20), temperature=0.9, seed=5 if coupled else None)
    (draft,) = drafter.draft([ask(state, 16, coupled=coupled)])
    assert draft.parents == list(drafter.shape or ())
    for place, token in enumerate(draft.token_ids):
        parent = draft.parents[place]
        path: list[int] = []
        while parent >= 0:
            path, parent = [draft.token_ids[parent], *path], draft.parents[parent]
        elder = [draft.token_ids[each] for each in range(place) if draft.parents[each] == draft.parents[place]]
        logits, draws = logits_after(state.tokens.tolist() + path), batch.sampling_metadata([state], [0])
        draws["position"] += len(path)
        assert token not in elder
        if coupled:
            logits[0, elder] = -np.inf
            assert token == EXECUTOR.sample(logits, draws)[0]
            assert draft.probs is None
        else:
            left = distribution(logits, draws)[0]
            left[elder] = 0
            assert draft.probs is not None
            assert np.allclose(draft.probs[place], left / left.sum(dtype=np.float64), rtol=1e-6, atol=0)


def test_several_models_take_turns_at_the_children_of_a_node() -> None:
    batch = make_batch()
    merged = open_drafter(batch, SpecInferDrafter, models=2)
    state = arrive(batch, 0, PROMPT, range(20), temperature=0.0)
    alone = []
    for seed in range(2):
        drafter = DraftModelDrafter(make_context(batch), [RandomModel(seed)])
        drafter.allocate(KVLayout(NUM_BLOCKS, BLOCK))
        alone.append(drafter.draft([ask(state, 1)])[0].token_ids[0])
    assert alone[0] != alone[1]
    (draft,) = merged.draft([DraftRequest(state, 3, (-1, -1, 1))])
    assert draft.token_ids[:2] == alone


def test_a_tree_leaves_out_what_cannot_be_drawn_and_what_follows_an_end() -> None:
    batch = make_batch()
    drafter = open_drafter(batch, SpecInferDrafter)
    state = arrive(batch, 0, PROMPT, range(20), temperature=1.0, top_k=2)
    shape = (-1, -1, -1, 2, 0, 1, 5)
    draft = drafter.draft([DraftRequest(state, 7, shape, is_coupled=False)])[0]
    assert draft.parents == [-1, -1, 0, 1, 3]
    assert draft.probs is not None
    assert draft.probs.shape == (5, VOCAB)
    assert all(draft.probs[place, token] > 0 for place, token in enumerate(draft.token_ids))
    ending = arrive(batch, 1, PROMPT, range(20, 40), temperature=1.0, top_k=2, stops=(draft.token_ids[0],))
    cut = drafter.draft([DraftRequest(ending, 7, shape, is_coupled=False)])[0]
    assert (cut.token_ids, cut.parents) == ([*draft.token_ids[:2], *draft.token_ids[3:]], [-1, -1, 1, 2])


def accept_all(drafter: Drafter, state: SequenceState, draft: Draft) -> None:
    start = len(state.tokens) - 1
    state.tokens.extend([*draft.token_ids, 9])
    path = tuple(range(len(draft.token_ids)))
    drafter.observe([VerifyFeedback(state, start, draft, path, np.zeros(1 + len(path), np.int32))])


def test_accepted_drafts_are_not_computed_again() -> None:
    batch = make_batch()
    drafter = open_drafter(batch)
    state = arrive(batch, 0, PROMPT, range(40), temperature=0.0)
    accept_all(drafter, state, drafter.draft([ask(state, 5)])[0])
    assert drafter._kv.reach(0, state.blocks) == len(state.tokens) - 2  # the last draft is known, but was never fed
    assert state.seq_id not in drafter._drafted


@pytest.mark.parametrize("kind", [DraftModelDrafter, SpecInferDrafter])
def test_a_block_that_becomes_free_holds_nothing(kind: type[PagedDrafter]) -> None:
    batch = make_batch()
    drafter = open_drafter(batch, kind)
    program = drafter._programs[0]
    if not hasattr(program, "read_block"):
        pytest.skip("this back end shows no blocks")
    state = arrive(batch, 0, PROMPT, range(3, 23), temperature=0.0)
    drafter.draft([ask(state, 8)])
    drafted = drafter._drafted[0][1]
    written = [block for block in range(NUM_BLOCKS) if any(any(program.read_block(layer, block)) for layer in (0, 1))]
    assert written == list(range(3, 3 + -(-(len(PROMPT) + drafted.size) // BLOCK)))
    drafter.forget(0)
    drafter.wipe_blocks(range(NUM_BLOCKS))
    assert not drafted.any()
    assert not any(any(program.read_block(layer, block)) for layer in (0, 1) for block in range(NUM_BLOCKS))
    drafter.forget(0)


def test_drafts_of_a_step_that_broke_off_are_overwritten_by_the_next() -> None:
    batch = make_batch()
    drafter = open_drafter(batch)
    state = arrive(batch, 0, PROMPT, range(20), temperature=0.0)
    drafter.draft([ask(state, 4)])
    drafted = drafter._drafted[0][1]
    assert drafted.any()
    drafter.draft([])
    assert not drafted.any()
    assert not drafter._drafted


def test_a_sequence_far_behind_catches_up_some_positions_a_step() -> None:
    batch = make_batch()
    drafter = open_drafter(batch)
    state = arrive(batch, 0, [5] * (2 * MAX_CAUGHT_UP + 50), range(150), temperature=0.0)
    near = arrive(batch, 1, PROMPT, range(200, 220), temperature=0.0)
    for step in range(2):
        drafts = drafter.draft([ask(state, 2), ask(near, 2)])
        assert drafts[0] is NOTHING
        assert len(drafts[1].token_ids) == 2
        assert drafter._kv.reach(0, state.blocks) == (step + 1) * MAX_CAUGHT_UP
    assert drafter.draft([ask(state, 2)])[0].token_ids == continuation(batch, state, 2)


def test_many_that_are_far_behind_do_not_catch_up_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch()
    drafter = open_drafter(batch)
    sizes: list[int] = []
    compute = drafter._programs[0].step

    def watched(form: ForwardBatch, wants: Wants) -> StepOutput:
        sizes.append(len(form.token_ids))
        return compute(form, wants)

    monkeypatch.setattr(drafter._programs[0], "step", watched)
    states = [arrive(batch, number, [5] * 250, range(number * 64, number * 64 + 64)) for number in range(8)]
    counts = []
    for _ in range(2):
        counts.append(sum(bool(draft.token_ids) for draft in drafter.draft([ask(state, 2, coupled=False) for state in states])))
    assert counts == [4, 8]
    assert max(sizes) <= MAX_FOLLOWED + len(states) * FEW


def test_prompts_are_followed_up_to_a_bound() -> None:
    batch = make_batch()
    drafter = open_drafter(batch)
    states = [arrive(batch, number, [5] * 600, range(number * 150, number * 150 + 150)) for number in range(3)]
    drafter.follow([(state, 600) for state in states])
    assert [drafter._kv.reach(number, state.blocks) for number, state in enumerate(states)] == [600, MAX_FOLLOWED - 600, 0]


def test_nothing_is_drafted_beyond_the_positions_that_the_small_model_learned() -> None:
    batch = make_batch()
    drafter = DraftModelDrafter(make_context(batch), [RandomModel(0, max_positions=24)])
    drafter.allocate(KVLayout(NUM_BLOCKS, BLOCK))
    state = arrive(batch, 0, PROMPT, range(20), temperature=0.0)
    assert len(drafter.draft([ask(state, 8)])[0].token_ids) == 24 - len(PROMPT) + 1
    state.tokens.extend([7] * 4)
    assert drafter.draft([ask(state, 8)]) == [NOTHING]
    drafter.follow([(state, 25)])
    assert drafter._kv.reach(0, state.blocks) == 24


def test_a_model_that_computes_no_number_ends_the_draft() -> None:
    batch = make_batch()
    drafter = open_drafter(batch)
    weights = RandomModel(0)
    weights._weights.read("norm.weight")[:] = np.nan
    broken = [DraftModelDrafter(make_context(batch), [weights]), SpecInferDrafter(make_context(batch), [weights])]
    state = arrive(batch, 0, PROMPT, range(20), seed=4)
    assert drafter.draft([ask(state, 3)])[0].token_ids
    for each in broken:
        each.allocate(KVLayout(NUM_BLOCKS, BLOCK))
        assert [draft.token_ids for draft in each.draft([ask(state, 3), ask(state, 3, coupled=False)])] == [[], []]


def test_what_is_printed_of_drafting_has_no_tokens() -> None:
    batch = make_batch()
    drafter = SpecInferDrafter(make_context(batch), [RandomModel(0)])
    drafter.allocate(KVLayout(NUM_BLOCKS, BLOCK))
    state = arrive(batch, 0, [271] * 8, range(20), temperature=0.0)
    ((_, stretch),) = drafter._begin([ask(state, 3)])
    assert drafter._grower is not None
    tree = drafter._grower.grow([stretch], [(-1, -1, 0)])[0]
    shown = repr([stretch, tree, drafter, drafter._kv, drafter.draft([ask(state, 3)])])
    printed = re.sub("0x[0-9a-f]+", "", shown)  # addresses
    assert not any(str(token) in printed for token in (271, *tree.token_ids) if token > 99)


def test_memory_is_said_beforehand() -> None:
    batch = make_batch()
    one, two = open_drafter(batch, SpecInferDrafter), open_drafter(batch, SpecInferDrafter, models=2)
    assert one.kv_block_bytes == MODEL.kv_block_bytes(BLOCK)
    assert (two.kv_block_bytes, two.fixed_bytes) == (2 * one.kv_block_bytes, 2 * one.fixed_bytes)
