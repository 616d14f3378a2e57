"""Runner and scheduler together: a prompt's vector is what its hidden states say, in any batch (batch invariance)."""

from collections import deque

import numpy as np
import pytest

from cloister.backends.base import Capability
from cloister.executor import ModelRunner
from cloister.kv import BlockPool, PrefixKeys
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.types.events import Ended, Preempted, Scheduled
from cloister.types.request import FinishReason, PoolingParams, Request, SamplingParams
from tests.history_program import HistoryProgram, history_logits

VOCAB, HIDDEN, BLOCK = 211, 24, 4
NOTHING = SamplingParams(max_tokens=0)
WAYS = [
    PoolingParams(kind="mean", normalize=False),
    PoolingParams(kind="last", normalize=False),
    PoolingParams(kind="mean"),
    PoolingParams(kind="last", dimensions=7),
    PoolingParams(kind="mean", dimensions=5, normalize=False),
]


class HiddenHistoryProgram(HistoryProgram):
    """Its hidden state is a hash of the whole history, as its logits are."""

    capabilities = Capability.HIDDEN

    def step(self, batch, wants):
        output = super().step(batch, wants)
        output.hidden = output.logits[:, :HIDDEN] - np.float32(4)
        return output


def make_request(number, num_tokens, pooling=None, sampling=NOTHING):
    token_ids = np.random.default_rng(number).integers(0, VOCAB, num_tokens).tolist()
    return Request(request_id=str(number), token_ids=token_ids, sampling=sampling, pooling=pooling)


def requests():
    for number in range(20):
        if number % 4 == 3:
            sampling = SamplingParams(temperature=0.7, seed=number, max_tokens=9, n=1 + number % 2)
            yield make_request(number, 5 + number, sampling=sampling)
        else:
            yield make_request(number, 1 + 7 * number, WAYS[number % len(WAYS)])


def serve(asked, *, num_blocks=400, max_tokens=512, depth=1, program_type=HiddenHistoryProgram, poison=None):
    """Serves all requests at once; returns request id -> vector, and every event."""
    pool = BlockPool(num_blocks, BLOCK)
    config = SchedulerConfig(max_model_len=256, max_num_seqs=16, budget=BudgetConfig(max_tokens=max_tokens))
    scheduler = Scheduler(config, pool, PrefixKeys("model", BLOCK))
    program = program_type(vocab_size=VOCAB, num_blocks=num_blocks, block_size=BLOCK, poison=poison)
    runner = ModelRunner(program, vocab_size=VOCAB, max_model_len=256, block_size=BLOCK)
    for request in asked:
        scheduler.add(request, 0.0)
    vectors, events, plans = {}, scheduler.take_events(), deque()
    for step in range(5000):
        while len(plans) < depth and (plan := scheduler.plan(step * 0.01)) is not None:
            plans.append(plan)
        if not plans:
            break
        result = runner.run(plans.popleft())
        vectors |= {seq_id: np.frombuffer(vector.data, "<f4") for seq_id, vector in result.embeddings.items()}
        events += scheduler.commit(result, {}, step * 0.01)
        pool.check()
    assert not scheduler.requests
    assert not runner.num_sequences
    names = {event.seq_id: event.request_id for event in events if isinstance(event, Ended)}
    return {names[seq_id]: vector for seq_id, vector in vectors.items()}, events


def ends(events):
    return {event.request_id: event for event in events if isinstance(event, Ended)}


def hidden_states(token_ids):
    return np.stack([history_logits(token_ids[: end + 1], VOCAB)[:HIDDEN] - np.float32(4) for end in range(len(token_ids))])


@pytest.fixture(scope="module")
def alone():
    found = {}
    for request in requests():
        found |= serve([request])[0]
    return found


def test_the_vector_is_what_the_parameters_say(alone):
    for request in requests():
        if request.pooling is None:
            continue
        states = hidden_states(request.token_ids).astype(np.float64)
        vector = states.mean(0) if request.pooling.kind == "mean" else states[-1]
        vector = vector[: request.pooling.dimensions]
        if request.pooling.normalize:
            vector = vector / np.linalg.norm(vector)
        assert alone[request.request_id] == pytest.approx(vector, abs=1e-6)


@pytest.mark.parametrize(("num_blocks", "max_tokens", "depth"), [(400, 512, 1), (400, 7, 2), (45, 64, 1), (45, 7, 2)])
def test_vectors_have_the_same_bits_in_any_company(alone, num_blocks, max_tokens, depth):
    together, _ = serve(requests(), num_blocks=num_blocks, max_tokens=max_tokens, depth=depth)
    assert together.keys() == alone.keys()
    assert all((together[name] == alone[name]).all() for name in alone)


def test_a_vector_has_the_same_bits_after_preemption():
    asked = make_request(9, 120, PoolingParams(kind="mean"))
    answers = [make_request(number, 4, sampling=SamplingParams(max_tokens=100, seed=1)) for number in range(3)]
    vectors, events = serve([*answers, asked], num_blocks=45, max_tokens=4)
    assert "9" in {event.request_id for event in events if isinstance(event, Preempted)}, "it must be tight enough"
    assert (vectors["9"] == serve([asked])[0]["9"]).all()


def test_it_ends_once_with_stop_and_no_token():
    _, events = serve([make_request(0, 30, PoolingParams())], max_tokens=8)
    (end,) = [event for event in events if isinstance(event, Ended)]
    assert (end.reason, end.num_output_tokens, end.last, end.first_token_s) == (FinishReason.STOP, 0, True, None)


def test_a_whole_context_window_may_be_pooled():
    assert ends(serve([make_request(0, 256, PoolingParams())])[1])["0"].reason is FinishReason.STOP
    assert "256" in ends(serve([make_request(0, 257, PoolingParams())])[1])["0"].error


def test_it_reads_no_prefix_hits_and_leaves_none():
    once, answer = make_request(0, 60, PoolingParams(kind="mean")), SamplingParams(max_tokens=1)
    twice = make_request(1, 60, PoolingParams(kind="mean"))
    same = Request(request_id="2", token_ids=once.token_ids, sampling=answer)
    again = Request(request_id="3", token_ids=once.token_ids, sampling=NOTHING, pooling=PoolingParams())
    for order in ([once, twice, same], [same, again]):
        _, events = serve(order, max_tokens=60)
        assert [event.num_cached_tokens for event in events if isinstance(event, Scheduled)] == [0] * len(order)


def test_a_program_without_hidden_states_fails_the_request_alone():
    vectors, events = serve(
        [make_request(0, 9, PoolingParams()), next(r for r in requests() if not r.pooling)], program_type=HistoryProgram
    )
    assert not vectors
    assert "no embeddings" in ends(events)["0"].error
    assert ends(events)["3"].reason is FinishReason.LENGTH


def test_a_number_that_is_not_finite_fails_the_request_alone():
    bad, good = make_request(0, 9, PoolingParams(kind="mean")), make_request(1, 9, PoolingParams(kind="mean"))
    poison = next(token for token in bad.token_ids if token not in good.token_ids)
    vectors, events = serve([bad, good], poison=poison)
    assert list(vectors) == ["1"]
    assert "not a finite number" in ends(events)["0"].error


@pytest.mark.parametrize(
    ("sampling", "pooling", "words"),
    [
        (SamplingParams(), PoolingParams(), "max_tokens to 0"),
        (SamplingParams(max_tokens=0, n=2), PoolingParams(), "n to 1"),
        (SamplingParams(max_tokens=0, prompt_logprobs=1), PoolingParams(), "prompt_logprobs"),
        (NOTHING, PoolingParams(dimensions=0), "dimensions must be 1 or more"),
    ],
)
def test_what_has_no_meaning_is_refused(sampling, pooling, words):
    end = ends(serve([make_request(0, 9, pooling, sampling)])[1])["0"]
    assert end.reason is FinishReason.REJECTED
    assert words in end.error
