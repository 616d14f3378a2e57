"""A sequence that fails in the middle of its drafts ends alone: the step's others gain what they would have gained."""

from itertools import chain

import pytest

from cloister.executor import ModelRunner
from cloister.executor.drafters import Draft, Drafter
from cloister.types.request import SamplingParams
from cloister.types.step import NewSequence, SequencePlan, StepPlan
from tests.history_program import history_logits
from tests.samplers import KERNELS
from tests.tree_history import DrawingTreeProgram, TreeHistoryProgram

VOCAB, BLOCK = 97, 4
PROMPTS = ([5, 9, 2, 7], [8, 1, 6, 3])
NUM_DRAFTS = 4


def greedy(tokens, count):
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(history_logits(tokens, VOCAB).argmax()))
    return tokens


class Knowing(Drafter):
    """Drafts what greedy decoding will say."""

    def draft(self, asks):
        return [Draft(greedy(ask.state.tokens, ask.num_drafts)[len(ask.state.tokens) :]) for ask in asks]


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("num_accepted", range(NUM_DRAFTS + 1))
@pytest.mark.parametrize("make_program", [TreeHistoryProgram, DrawingTreeProgram][: 2 if KERNELS else 1])
def test_a_sequence_that_fails_behind_accepted_drafts_fails_alone(make_program, num_accepted, logprobs):
    coming = [greedy(prompt, 1 + NUM_DRAFTS)[len(prompt) :] for prompt in PROMPTS]
    poison = coming[0][num_accepted]
    assert poison not in chain(*PROMPTS, coming[1], coming[0][:num_accepted])
    program = make_program(vocab_size=VOCAB, num_blocks=16, block_size=BLOCK, poison=poison)
    runner = ModelRunner(program, vocab_size=VOCAB, max_model_len=64, block_size=BLOCK, drafters={"knowing": Knowing()})
    sampling = SamplingParams(temperature=0.0, logprobs=logprobs)
    arrivals = [
        NewSequence(seq_id=i, token_ids=list(prompt), num_prompt_tokens=len(prompt), sampling=sampling, seed=0)
        for i, prompt in enumerate(PROMPTS)
    ]
    parts = [
        SequencePlan(
            seq_id=i,
            start=0,
            num_tokens=len(prompt) + NUM_DRAFTS,
            table_start=0,
            new_block_ids=[2 * i, 2 * i + 1],
            num_samples=1,
            num_drafts=NUM_DRAFTS,
            drafter="knowing",
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    result = runner.run(StepPlan(plan_id=0, arrivals=arrivals, sequences=parts))
    gained = {sample.seq_id: sample.token_ids for sample in result.samples}
    assert gained[1] == coming[1]
    if num_accepted < NUM_DRAFTS:
        assert set(result.failures) == {0}
        assert 0 not in gained
    else:
        assert gained[0] == coming[0]
