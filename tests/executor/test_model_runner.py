"""The runner against a program whose logits are a hash of everything that its block tables lead to."""

import itertools
from pkgutil import resolve_name

import numpy as np
import pytest

from cloister.backends.base import Capability, StepOutput
from cloister.executor import ModelRunner
from cloister.types.clock import VirtualClock
from cloister.types.errors import EngineError
from cloister.types.request import SamplingParams
from cloister.types.step import MAX_SCORED_ROWS, Fork, NewSequence, SequencePlan, StepPlan
from tests.history_program import HistoryProgram, greedy_continuation, history_logits
from tests.samplers import KERNELS, DrawingHistoryProgram

VOCAB, BLOCK = 101, 4
GREEDY = SamplingParams(temperature=0)
_plan_ids = itertools.count()


def make(poison=None, num_blocks=64, clock=None):
    program = HistoryProgram(vocab_size=VOCAB, num_blocks=num_blocks, block_size=BLOCK, poison=poison)
    return program, ModelRunner(program, vocab_size=VOCAB, max_model_len=256, block_size=BLOCK, clock=clock)


def step(runner, *sequences, **fields):
    result = runner.run(StepPlan(plan_id=next(_plan_ids), sequences=list(sequences), **fields))
    return {sample.seq_id: sample.token_ids for sample in result.samples}, result


def new(seq_id, tokens, sampling=GREEDY, *, num_prompt=None, seed=0, stop=(), index=0):
    return NewSequence(
        seq_id=seq_id,
        token_ids=list(tokens),
        num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
        sampling=sampling,
        seed=seed,
        stop_token_ids=stop,
        index=index,
    )


def part(seq_id, start, count, *, samples=1, table=0, blocks=()):
    return SequencePlan(
        seq_id=seq_id, start=start, num_tokens=count, table_start=table, new_block_ids=list(blocks), num_samples=samples
    )


def decode(runner, seq_id, length, count, blocks, sent):
    """Decodes `count` tokens one step each; `blocks` is the whole table, `sent` entries of it are known already."""
    tokens = []
    for position in range(length, length + count):
        needed = position // BLOCK + 1
        chosen, _ = step(runner, part(seq_id, position, 1, table=sent, blocks=blocks[sent:needed]))
        sent = max(sent, needed)
        tokens += chosen[seq_id]
    return tokens


def test_prefill_then_decode_continues_the_history():
    _, runner = make()
    prompt = [3, 1, 4, 1, 5, 9]
    chosen, _ = step(runner, part(1, 0, 6, blocks=[7, 3]), arrivals=[new(1, prompt)])
    tokens = chosen[1] + decode(runner, 1, 6, 9, [7, 3, 50, 2], sent=2)
    assert tokens == greedy_continuation(prompt, 10, VOCAB)


def test_chunks_of_any_size_give_the_same_token():
    prompt = list(range(20, 37))
    for size in (1, 2, 3, 5, 16):
        _, runner = make()
        arrivals = [new(1, prompt)]
        for start in range(0, 17, size):
            count = min(size, 17 - start)
            last = start + count == 17
            first = -(-start // BLOCK)
            blocks = list(range(40 + first, 40 + -(-(start + count) // BLOCK)))
            plan = part(1, start, count, samples=int(last), table=first, blocks=blocks)
            chosen, _ = step(runner, plan, arrivals=arrivals)
            arrivals = []
        assert chosen == {1: greedy_continuation(prompt, 1, VOCAB)}


def test_a_ragged_batch_gives_each_sequence_its_own_token():
    program, runner = make()
    step(runner, part(1, 0, 5, blocks=[1, 2]), arrivals=[new(1, [1, 2, 3, 4, 5])])
    chosen, _ = step(
        runner,
        part(1, 5, 1, table=2),
        part(2, 0, 3, blocks=[9]),
        part(3, 0, 4, samples=0, blocks=[4]),
        arrivals=[new(2, [7, 8, 9]), new(3, [5, 5, 5, 5, 6])],
    )
    first = greedy_continuation([1, 2, 3, 4, 5], 2, VOCAB)
    assert chosen == {1: first[1:], 2: greedy_continuation([7, 8, 9], 1, VOCAB)}
    batch = program.batches[-1]
    assert batch.positions.tolist() == [5, 0, 1, 2, 0, 1, 2, 3]
    assert batch.query_starts.tolist() == [0, 1, 4, 8]
    assert batch.context_lens.tolist() == [6, 3, 4]
    assert batch.logit_rows.tolist() == [0, 3]
    assert {a.dtype for a in (batch.token_ids, batch.positions, batch.query_starts, batch.context_lens)} == {np.dtype(np.int32)}


def test_a_prefix_that_others_computed_is_read_through_the_table():
    _, runner = make()
    shared = [11, 12, 13, 14]
    step(runner, part(1, 0, 4, blocks=[5]), arrivals=[new(1, shared)])
    chosen, _ = step(runner, part(2, 4, 2, blocks=[5, 6]), arrivals=[new(2, [*shared, 20, 21])])
    assert chosen == {2: greedy_continuation([*shared, 20, 21], 1, VOCAB)}


def test_a_preempted_sequence_resumes_where_it_was():
    _, runner = make()
    sampling = SamplingParams(temperature=1, repetition_penalty=1.3, frequency_penalty=0.5)
    prompt = [3, 1, 4, 1, 5]
    chosen, _ = step(runner, part(1, 0, 5, blocks=[1, 2]), arrivals=[new(1, prompt, sampling, seed=7)])
    tokens = chosen[1] + decode(runner, 1, 5, 6, [1, 2, 3], sent=2)
    step(runner, departures=[1], wipes=[1, 2, 3])
    resumed = new(1, prompt + tokens[:4], sampling, num_prompt=5, seed=7)
    chosen, _ = step(runner, part(1, 0, 9, blocks=[20, 21, 22]), arrivals=[resumed])
    assert chosen[1] + decode(runner, 1, 9, 2, [20, 21, 22], sent=3) == tokens[4:]


def test_departure_and_arrival_of_one_id_in_one_plan():
    _, runner = make()
    step(runner, part(1, 0, 2, blocks=[1]), arrivals=[new(1, [1, 2])])
    chosen, _ = step(runner, part(1, 0, 3, blocks=[2]), departures=[1], arrivals=[new(1, [9, 9, 8])])
    assert chosen == {1: greedy_continuation([9, 9, 8], 1, VOCAB)}
    assert runner.num_sequences == 1


def test_forks_share_the_prompt_and_draw_with_their_own_noise():
    _, runner = make()
    sampling = SamplingParams(n=3, temperature=1)
    forks = [Fork(1, 2, 1), Fork(1, 3, 2)]
    chosen, _ = step(runner, part(1, 0, 6, blocks=[1, 2]), arrivals=[new(1, [1, 2, 3, 4, 5, 6], sampling)], forks=forks)
    alone = {}
    for index in range(3):
        _, other = make()
        tokens, _ = step(other, part(9, 0, 6, blocks=[1, 2]), arrivals=[new(9, [1, 2, 3, 4, 5, 6], sampling, index=index)])
        alone[index + 1] = tokens[9]
    assert chosen == alone
    assert len({tuple(tokens) for tokens in chosen.values()}) > 1


def test_copy_on_write_keeps_siblings_apart():
    _, runner = make()
    prompt = [1, 2, 3, 4, 5, 6]
    first, _ = step(
        runner, part(1, 0, 6, blocks=[1, 2]), arrivals=[new(1, prompt, SamplingParams(n=2), seed=3)], forks=[Fork(1, 2, 1)]
    )
    assert first[1] != first[2]
    step(runner, part(1, 6, 1, table=1, blocks=[3]), part(2, 6, 1, table=2), copies=[(2, 3)])
    for seq_id in (1, 2):
        blocks = [1, 3] if seq_id == 1 else [1, 2]
        read = runner._program._read(np.array(blocks), 7)
        assert read.tolist() == prompt + first[seq_id]


def test_copies_happen_after_wipes_and_before_the_forward():
    program, runner = make()
    step(runner, part(1, 0, 5, blocks=[1, 2]), arrivals=[new(1, [1, 2, 3, 4, 5])])
    chosen, _ = step(runner, part(1, 5, 1, table=1, blocks=[9]), wipes=[9], copies=[(2, 9)])
    assert chosen == {1: greedy_continuation([1, 2, 3, 4, 5], 2, VOCAB)[1:]}
    assert program.slots[9, 0].tolist() == [6, 4]


def test_a_plan_of_wipes_only_wipes():
    program, runner = make()
    step(runner, part(1, 0, 5, blocks=[1, 2]), arrivals=[new(1, [1, 2, 3, 4, 5])])
    _, result = step(runner, departures=[1], wipes=[1, 2])
    assert not program.slots.any()
    assert result.samples == []
    assert result.failures == {}
    assert runner.num_sequences == 0


def test_reading_a_wiped_block_is_noticed_by_the_program():
    _, runner = make()
    step(runner, part(1, 0, 5, blocks=[1, 2]), arrivals=[new(1, [1, 2, 3, 4, 5])])
    with pytest.raises(AssertionError, match="wiped"):
        step(runner, part(1, 5, 1, table=2), wipes=[1])


def test_nan_logits_fail_their_sequence_alone():
    _, runner = make(poison=66)
    chosen, result = step(
        runner,
        part(1, 0, 3, blocks=[1]),
        part(2, 0, 3, blocks=[2]),
        arrivals=[new(1, [1, 66, 3]), new(2, [1, 2, 3])],
        forks=[Fork(1, 3, 1)],
    )
    assert chosen == {2: greedy_continuation([1, 2, 3], 1, VOCAB)}
    assert result.failures.keys() == {1, 3}
    assert "66" not in result.failures[1]
    chosen, result = step(runner, part(1, 3, 1, table=1), part(2, 3, 1, table=1), part(3, 3, 1, table=1))
    assert chosen.keys() == {2}
    assert result.failures.keys() == {1, 3}


@pytest.mark.parametrize(
    ("tokens", "sampling"),
    [
        ([1, VOCAB], GREEDY),
        ([-1], GREEDY),
        (range(257), GREEDY),
        ([1], SamplingParams(logit_bias={VOCAB: 1.0})),
    ],
)
def test_a_sequence_that_cannot_run_fails_alone(tokens, sampling):
    _, runner = make()
    chosen, result = step(
        runner,
        part(1, 0, 1, blocks=[1]),
        part(2, 0, 3, blocks=[2]),
        arrivals=[new(1, [t % 300 if t >= 0 else t for t in tokens], sampling), new(2, [1, 2, 3])],
    )
    assert chosen.keys() == {2}
    assert result.failures.keys() == {1}


def test_min_tokens_bars_stop_tokens_until_then():
    prompt = [3, 1, 4]
    barred = greedy_continuation(prompt, 1, VOCAB)[0]
    for min_tokens in (0, 2):
        _, runner = make()
        sampling = SamplingParams(temperature=0, min_tokens=min_tokens)
        arrival = new(1, prompt, sampling, stop=(barred, VOCAB + 5))
        chosen, _ = step(runner, part(1, 0, 3, blocks=[1, 2, 3]), arrivals=[arrival])
        tokens = chosen[1] + decode(runner, 1, 3, 5, [1, 2, 3], sent=3)
        assert (tokens[0] == barred) == (min_tokens == 0)
        known = list(prompt)
        for place, token in enumerate(tokens):
            logits = history_logits(known, VOCAB)
            if place < min_tokens:
                logits[barred] = -np.inf
            assert token == logits.argmax()
            known.append(token)


def test_the_bar_falls_exactly_at_min_tokens():
    prompt = [3, 1, 4]
    expected = greedy_continuation(prompt, 3, VOCAB)
    assert len(set(expected)) == 3
    _, runner = make()
    arrival = new(1, prompt, SamplingParams(temperature=0, min_tokens=2), stop=(expected[2],))
    chosen, _ = step(runner, part(1, 0, 3, blocks=[1, 2, 3]), arrivals=[arrival])
    assert chosen[1] + decode(runner, 1, 3, 2, [1, 2, 3], sent=3) == expected


def test_nothing_left_to_choose_is_a_failure():
    _, runner = make()
    sampling = SamplingParams(temperature=1, min_tokens=1)
    arrival = new(1, [1, 2], sampling, stop=tuple(range(VOCAB)))
    chosen, result = step(runner, part(1, 0, 2, blocks=[1]), part(2, 0, 2, blocks=[2]), arrivals=[arrival, new(2, [1, 2])])
    assert chosen.keys() == {2}
    assert "min_tokens" in result.failures[1]


def test_prompt_logprobs_come_chunk_by_chunk():
    _, runner = make()
    prompt = [5, 4, 3, 2, 1, 0]
    arrivals = [new(1, prompt, SamplingParams(temperature=0, prompt_logprobs=2, logprobs=1))]
    _, first = step(
        runner, part(1, 0, 4, samples=0, blocks=[1, 2]), part(2, 0, 1, blocks=[3]), arrivals=[*arrivals, new(2, [1])]
    )
    chosen, second = step(runner, part(1, 4, 2, table=2), part(2, 1, 1, table=1))
    found = first.prompt_logprobs[1] + second.prompt_logprobs[1]
    assert [entry.token_id for entry in found] == prompt[1:]
    for place, entry in enumerate(found, start=1):
        logits = history_logits(prompt[:place], VOCAB).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        assert entry.logprob == pytest.approx(expected[prompt[place]], abs=1e-5)
        assert [token for token, _ in entry.top] == np.argsort(-expected, kind="stable")[:2].tolist()
    assert chosen[1] == greedy_continuation(prompt, 1, VOCAB)
    assert second.prompt_logprobs.keys() == {1}
    (sample,) = [s for s in second.samples if s.seq_id == 1]
    assert sample.logprobs is not None
    assert sample.logprobs[0].token_id == sample.token_ids[0] == sample.logprobs[0].top[0][0]


class MeasuredHistoryProgram(HistoryProgram):
    """Keeps how many rows of logits each forward was asked for."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.num_rows = []

    def step(self, batch, wants):
        self.num_rows.append(len(batch.logit_rows))
        return super().step(batch, wants)


def test_many_scored_prompts_never_ask_for_more_logits_than_were_counted():
    program = MeasuredHistoryProgram(vocab_size=VOCAB, num_blocks=400, block_size=BLOCK)
    runner = ModelRunner(program, vocab_size=VOCAB, max_model_len=256, block_size=BLOCK)
    rng, count, sampling = np.random.default_rng(1), 200, SamplingParams(temperature=0, n=2, prompt_logprobs=0)
    prompts = {seq_id: rng.integers(0, VOCAB, count).tolist() for seq_id in (1, 2, 3)}
    parts = [part(seq_id, 0, count, blocks=range(60 * seq_id, 60 * seq_id + 50)) for seq_id in prompts]
    arrivals = [new(seq_id, prompt, sampling) for seq_id, prompt in prompts.items()]
    forks = [Fork(2, 12, 1), Fork(3, 13, 1)]
    chosen, result = step(runner, *parts, arrivals=arrivals, forks=forks)
    assert max(program.num_rows) <= MAX_SCORED_ROWS + len(prompts)
    assert {seq_id: len(found) for seq_id, found in result.prompt_logprobs.items()} == dict.fromkeys(prompts, count - 1)
    expected = {seq_id: greedy_continuation(prompt, 1, VOCAB) for seq_id, prompt in prompts.items()}
    assert chosen == {**expected, 12: expected[2], 13: expected[3]}


class GreedyHistoryProgram(HistoryProgram):
    """Finds the most likely tokens itself; counts how often it is asked for logits instead."""

    capabilities = Capability.GREEDY
    num_logits = 0

    def step(self, batch, wants):
        output = super().step(batch, wants)
        if not wants.greedy:
            self.num_logits += 1
            return output
        finite = np.isfinite(output.logits).all(axis=1)
        return StepOutput(tokens=np.where(finite, output.logits.argmax(axis=1), -1).astype(np.int32))


def test_a_program_that_finds_the_best_tokens_is_asked_for_logits_only_where_they_matter():
    program = GreedyHistoryProgram(vocab_size=VOCAB, num_blocks=64, block_size=BLOCK, poison=66)
    runner = ModelRunner(program, vocab_size=VOCAB, max_model_len=256, block_size=BLOCK)
    chosen, result = step(
        runner,
        part(1, 0, 3, blocks=[1]),
        part(2, 0, 2, samples=0, blocks=[2]),
        part(3, 0, 3, blocks=[3]),
        arrivals=[new(1, [1, 2, 3]), new(2, [1, 2, 3]), new(3, [66, 2, 3])],
    )
    assert chosen == {1: greedy_continuation([1, 2, 3], 1, VOCAB)}
    assert result.failures.keys() == {3}
    assert program.num_logits == 0
    drawing = new(4, [1, 2, 3], SamplingParams(temperature=1))
    chosen, _ = step(runner, part(1, 3, 1, table=1), part(4, 0, 3, blocks=[4]), arrivals=[drawing], departures=[3])
    assert chosen[1] == greedy_continuation([1, 2, 3], 2, VOCAB)[1:]
    assert program.num_logits == 1


def test_a_program_that_returns_too_few_tokens_is_an_engine_error():
    program = GreedyHistoryProgram(vocab_size=VOCAB, num_blocks=64, block_size=BLOCK)
    program.step = lambda batch, wants: StepOutput()
    runner = ModelRunner(program, vocab_size=VOCAB, max_model_len=256, block_size=BLOCK)
    with pytest.raises(EngineError, match="shape"):
        step(runner, part(1, 0, 3, blocks=[1]), arrivals=[new(1, [1, 2, 3])])


@pytest.fixture
def drawing():
    if not KERNELS:
        pytest.skip("the native kernels were not compiled")
    program = DrawingHistoryProgram(vocab_size=VOCAB, num_blocks=64, block_size=BLOCK, poison=66)
    return program, ModelRunner(program, vocab_size=VOCAB, max_model_len=256, block_size=BLOCK)


DRAWN = SamplingParams(temperature=1.3, top_p=0.9)


def test_a_program_that_draws_is_asked_for_logits_only_where_they_matter(drawing):
    program, runner = drawing
    _, specified = make()
    arrivals = [new(1, [1, 2, 3], DRAWN, seed=5), new(2, [1, 2, 3]), new(3, [4, 5, 6], DRAWN, seed=9)]
    parts = [part(1, 0, 3, blocks=[1]), part(2, 0, 2, samples=0, blocks=[2]), part(3, 0, 3, blocks=[3])]
    chosen, _ = step(runner, *parts, arrivals=arrivals)
    assert chosen == step(specified, *parts, arrivals=arrivals)[0]
    assert program.num_logits == 0
    wants = [new(4, [7, 8], SamplingParams(temperature=1, logprobs=2), seed=3)]
    parts = [part(1, 3, 1, table=1), part(4, 0, 2, blocks=[4]), part(3, 3, 1, table=1)]
    chosen, result = step(runner, *parts, arrivals=wants)
    assert chosen == step(specified, *parts, arrivals=wants)[0]
    assert program.num_logits == 1
    assert [len(sample.logprobs or ()) for sample in result.samples] == [0, 1, 0]


def test_a_program_draws_for_forked_children_from_the_row_of_their_parent(drawing):
    program, runner = drawing
    _, specified = make()
    plan = part(1, 0, 3, blocks=[1])
    fields = {"arrivals": [new(1, [9, 8, 7], DRAWN, seed=2)], "forks": [Fork(1, 10 + i, i) for i in range(1, 20)]}
    chosen, _ = step(runner, plan, **fields)
    assert chosen == step(specified, plan, **fields)[0]
    assert len(set(map(tuple, chosen.values()))) > 3
    assert program.num_logits == 0


def test_a_drawn_row_that_is_not_finite_fails_its_sequence_and_its_children_alone(drawing):
    _, runner = drawing
    arrivals = [new(1, [1, 2, 3], DRAWN), new(2, [66, 2, 3], DRAWN)]
    parts = [part(1, 0, 3, blocks=[1]), part(2, 0, 3, blocks=[2])]
    chosen, result = step(runner, *parts, arrivals=arrivals, forks=[Fork(2, 9, 1)])
    assert chosen.keys() == {1}
    assert result.failures.keys() == {2, 9}


def test_a_program_that_draws_too_few_tokens_is_an_engine_error(drawing):
    program, runner = drawing
    program.step = lambda batch, wants: StepOutput()
    with pytest.raises(EngineError, match="shape"):
        step(runner, part(1, 0, 3, blocks=[1]), arrivals=[new(1, [1, 2, 3], DRAWN)])


def test_the_end_of_a_block_table_can_be_replaced():
    _, runner = make()
    step(runner, part(1, 0, 5, blocks=[1, 2]), arrivals=[new(1, [1, 2, 3, 4, 5])])
    chosen, _ = step(runner, part(1, 5, 1, table=1, blocks=[7]), copies=[(2, 7)])
    more = decode(runner, 1, 6, 100, [1, 7, *range(8, 60)], sent=2)
    assert chosen[1] + more == greedy_continuation([1, 2, 3, 4, 5], 102, VOCAB)[1:]


def test_nothing_of_a_sequence_that_left_stays_in_memory():
    _, runner = make()
    step(runner, part(1, 0, 3, blocks=[1]), arrivals=[new(1, [9, 8, 7])])
    tokens = runner._batch[1].tokens
    step(runner, departures=[1], wipes=[1])
    assert set(tokens) == {0}


def test_forks_beside_prompt_rows_draw_from_the_right_row():
    _, runner = make()
    sampling = SamplingParams(n=2, temperature=1, seed=1, prompt_logprobs=0)
    chosen, result = step(runner, part(1, 0, 2, blocks=[1]), arrivals=[new(1, [8, 9], sampling)], forks=[Fork(1, 2, 1)])
    assert len(result.prompt_logprobs[1]) == 1
    for index, seq_id in enumerate((1, 2)):
        _, other = make()
        alone, _ = step(other, part(1, 0, 2, blocks=[1]), arrivals=[new(1, [8, 9], SamplingParams(temperature=1), index=index)])
        assert chosen[seq_id] == alone[1]


def test_penalties_see_prompt_and_output():
    _, runner = make()
    sampling = SamplingParams(temperature=0, repetition_penalty=1.01, presence_penalty=0.02, frequency_penalty=0.03)
    prompt = [3, 1, 4, 1, 5]
    chosen, _ = step(runner, part(1, 0, 5, blocks=range(1, 17)), arrivals=[new(1, prompt, sampling)])
    tokens = chosen[1] + decode(runner, 1, 5, 40, [], sent=16)
    known, output = list(prompt), []
    for token in tokens:
        logits = history_logits(known, VOCAB).astype(np.float64)
        for seen in set(known):
            logits[seen] = logits[seen] / 1.01 if logits[seen] > 0 else logits[seen] * 1.01
        for seen in set(output):
            logits[seen] -= 0.03 * output.count(seen) + 0.02
        assert token == logits.argmax()
        known.append(token)
        output.append(token)
    assert len(set(output)) < len(output)


def test_elapsed_time_comes_from_the_clock():
    clock = VirtualClock()
    program, runner = make(clock=clock)
    compute = program.step

    def slow(batch, wants):
        clock.advance(0.25)
        return compute(batch, wants)

    program.step = slow
    _, result = step(runner, part(1, 0, 1, blocks=[1]), arrivals=[new(1, [1])])
    assert result.elapsed_s == 0.25


@pytest.mark.parametrize(
    ("asks", "where", "takes_s"),
    [
        ({}, "process_logits", 0.0),
        ({"presence_penalty": 0.1, "logit_bias": {3: 1.0}}, "program_executor.process_logits", 0.5),
        ({"logprobs": 20}, "generation.sample_logprobs", 0.5),
        ({"prompt_logprobs": 20}, "generation.prompt_logprobs", 0.5),
        ({"temperature": 1.0, "top_p": 0.5}, "program_executor.Sampler.sample", 0.5),
    ],
    ids=["nothing", "penalties", "log-probabilities", "scored prompts", "top_p on the host"],
)
def test_the_time_of_what_a_request_asks_of_sampling_is_told_apart(asks, where, takes_s, monkeypatch):
    clock = VirtualClock()
    program, runner = make(clock=clock)
    compute = program.step

    def compute_slowly(batch, wants):
        clock.advance(0.25)
        return compute(batch, wants)

    program.step = compute_slowly
    if asks:
        choose = resolve_name(f"cloister.executor.{where}")

        def choose_slowly(*args):
            clock.advance(0.5)
            return choose(*args)

        monkeypatch.setattr(f"cloister.executor.{where}", choose_slowly)
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **asks})
    for start, count in ((0, 2), (2, 1)):  # no step has anything of another's time
        arrivals = [new(1, [1, 2], sampling)] if not start else []
        _, result = step(runner, part(1, start, count, table=min(start, 1), blocks=[] if start else [1]), arrivals=arrivals)
        assert (result.elapsed_s, result.sampling_s) == (0.25 + takes_s, takes_s)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (part(7, 0, 1, blocks=[1]), "does not hold"),
        (part(1, 0, 4, blocks=[1]), "no token yet"),
        (part(1, 0, 2, blocks=[1]), "before its last token"),
        (part(1, 0, 3), "ends before"),
        (part(1, 0, 3, table=3, blocks=[1]), "gap"),
        (part(1, 0, 3, samples=2, blocks=[1]), "more than once"),
    ],
)
def test_a_plan_that_contradicts_the_state_is_an_engine_error(plan, message):
    _, runner = make()
    with pytest.raises(EngineError, match=message):
        step(runner, plan, arrivals=[new(1, [1, 2, 3])])


def test_after_a_step_that_broke_off_its_sequences_can_depart_and_others_go_on():
    program, runner = make()
    step(runner, part(1, 0, 2, blocks=[1]), arrivals=[new(1, [1, 2])])
    compute = program.step
    program.step = None
    with pytest.raises(TypeError):
        step(runner, part(2, 0, 2, blocks=[2]), arrivals=[new(2, [1, 2])], forks=[Fork(2, 3, 1)])
    program.step = compute
    chosen, _ = step(runner, part(1, 2, 1, table=1), departures=[2, 3])
    assert chosen == {1: greedy_continuation([1, 2], 2, VOCAB)[1:]}
    assert runner.num_sequences == 1


def test_many_sequences_come_and_go():
    _, runner = make(num_blocks=200)
    for wave in range(3):
        ids = range(100 * wave, 100 * wave + 100)
        chosen, _ = step(
            runner,
            *(part(i, 0, 2, blocks=[i % 100]) for i in ids),
            arrivals=[new(i, [i % VOCAB, 5]) for i in ids],
            departures=list(range(100 * wave - 100, 100 * wave)) if wave else [],
        )
        assert chosen == {i: greedy_continuation([i % VOCAB, 5], 1, VOCAB) for i in ids}
        assert runner.num_sequences == 100
