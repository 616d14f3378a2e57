"""Runner and scheduler together: the tokens of a request are the same alone and in any company (batch invariance)."""

from collections import deque

import numpy as np
import pytest

from cloister.executor import ModelRunner
from cloister.kv import BlockPool, PrefixKeys
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.types.events import Ended, Preempted
from cloister.types.request import FinishReason, Request, SamplingParams
from tests.history_program import HistoryProgram
from tests.samplers import KERNELS, DrawingHistoryProgram
from tests.thinning import cover

VOCAB = 211
RECIPES = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "n": 3},
    {"temperature": 1.2, "top_k": 20, "frequency_penalty": 0.4},
    {"temperature": 1.0, "min_p": 0.02, "repetition_penalty": 1.1, "n": 2},
    {"temperature": 0.0, "logit_bias": {5: 1.0}, "presence_penalty": 0.2},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 50, "logprobs": 1},
]
PROGRAMS = [HistoryProgram, DrawingHistoryProgram][: 2 if KERNELS else 1]


def requests():
    rng = np.random.default_rng(11)
    shared = rng.integers(0, VOCAB, 37).tolist()
    for i in range(2 * len(RECIPES)):
        tail = rng.integers(0, VOCAB, int(rng.integers(1, 30))).tolist()
        sampling = SamplingParams(**RECIPES[i % len(RECIPES)], max_tokens=int(rng.integers(5, 40)), seed=i)
        yield Request(request_id=str(i), token_ids=(shared if i % 2 else []) + tail, sampling=sampling)


def answers(asked, make_program, *, num_blocks, max_tokens, depth, block_size=4, drafter=None, speculation=None):
    """Serves all requests at once; returns (request id, index) -> tokens, and how many preemptions it took."""
    drafters = {} if drafter is None else {"prophet": drafter}
    pool = BlockPool(num_blocks, block_size)
    config = SchedulerConfig(max_model_len=256, max_num_seqs=16, budget=BudgetConfig(max_tokens=max_tokens))
    scheduler = Scheduler(config, pool, PrefixKeys("model", block_size), speculation)
    program = make_program(vocab_size=VOCAB, num_blocks=num_blocks, block_size=block_size)
    runner = ModelRunner(program, vocab_size=VOCAB, max_model_len=256, block_size=block_size, drafters=drafters)
    for request in asked:
        scheduler.add(request, 0.0)
    tokens: dict[int, list[int]] = {}
    names: dict[int, tuple[str, int]] = {}
    num_preempted = 0
    plans = deque()
    for step in range(5000):
        while len(plans) < depth and (plan := scheduler.plan(step * 0.01)) is not None:
            plans.append(plan)
        if not plans:
            break
        result = runner.run(plans.popleft())
        result.elapsed_s = 0.01  # the plans, and so what is preempted, do not depend on how busy the machine is
        assert not result.failures
        for sample in result.samples:
            tokens.setdefault(sample.seq_id, []).extend(sample.token_ids)
        for event in scheduler.commit(result, {}, step * 0.01):
            if isinstance(event, Ended):
                assert event.reason is FinishReason.LENGTH
                names[event.seq_id] = (event.request_id, event.index)
                tokens[event.seq_id] = tokens[event.seq_id][: event.num_output_tokens]
            num_preempted += isinstance(event, Preempted)
        pool.check()
    assert not scheduler.requests
    assert runner.num_sequences == 0
    return {name: tokens[seq_id] for seq_id, name in names.items()}, num_preempted


@pytest.fixture(scope="module", params=PROGRAMS)
def make_program(request):
    return request.param


@pytest.fixture(scope="module")
def alone(make_program):
    found = {}
    for request in requests():
        found |= answers([request], make_program, num_blocks=400, max_tokens=512, depth=1)[0]
    return found


@pytest.mark.parametrize(
    ("sizes", "depth"), cover([(400, 512, 4), (45, 512, 4), (45, 7, 4), (200, 16, 1), (8, 64, 32)], [1, 2])
)
def test_tokens_are_the_same_in_any_company(alone, make_program, sizes, depth):
    num_blocks, max_tokens, block_size = sizes
    together, num_preempted = answers(
        requests(), make_program, num_blocks=num_blocks, max_tokens=max_tokens, block_size=block_size, depth=depth
    )
    assert together == alone
    assert (num_preempted > 0) == (num_blocks != 400)


def test_sequences_of_one_request_differ(alone):
    assert alone["2", 0] != alone["2", 1] != alone["2", 2]
