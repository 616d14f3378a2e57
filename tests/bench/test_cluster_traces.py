"""What `benchmarks.cluster_traces` makes of traces and of measured steps."""

from __future__ import annotations

import pytest

from benchmarks.cluster_costs import StepTimes
from benchmarks.cluster_traces import sample_conversations
from cloister.bench.traces import TraceRow
from cloister.types.events import Stepped


def row(*hash_ids: int) -> TraceRow:
    return TraceRow(0.0, 512 * len(hash_ids), 10, hash_ids=hash_ids)


def step(num_tokens: int, num_samples: int, num_attended: float) -> Stepped:
    return Stepped(
        now_s=0.0, elapsed_s=0.0, num_tokens=num_tokens, num_samples=num_samples, num_running=1, num_waiting=0,
        num_used_blocks=0, num_cached_blocks=0, num_total_blocks=0, num_attended=num_attended,
    )  # fmt: skip


def test_a_conversation_is_taken_whole_or_not_at_all() -> None:
    rows = [row(0, 10), row(0, 20), row(0, 10, 11), row(0, 30), row(0, 10, 11, 12), row(0, 20, 21)]
    for seed in range(6):
        sampled = sample_conversations(rows, 2, seed)
        names = {each.hash_ids[1] for each in sampled}
        assert sampled == [each for each in rows if each.hash_ids[1] in names]
        assert 2 <= len(sampled) <= 4


def test_times_of_steps_are_found_again() -> None:
    times = StepTimes(1e-3, 5e-5, 2e-4, 2e-8, 9e-8)
    steps = []
    for num in (1, 3, 8, 20):
        for context in (10, 300, 900):
            answers, prompts = step(num, num, num * context), step(40 * num, 1, 40 * num * context / 2)
            elapsed_s = times.step_s + (times.token_s + times.sample_s) * num + times.read_s * answers.num_attended
            steps.append((answers, elapsed_s))
            elapsed_s = times.step_s + times.token_s * 40 * num + times.sample_s + times.key_s * prompts.num_attended
            steps.append((prompts, elapsed_s))
    fitted = StepTimes.fit(steps)
    assert [fitted.step_s, fitted.token_s, fitted.sample_s, fitted.key_s, fitted.read_s] == pytest.approx(
        [times.step_s, times.token_s, times.sample_s, times.key_s, times.read_s]
    )


def test_times_that_vary_by_chance_are_predicted_by_their_mean() -> None:
    steps = [(step(num, num, 0), 1e-3 * num * factor) for num in (1, 4, 16) for factor in (0.5, 1.0, 3.0)]
    fitted = StepTimes.fit(steps)
    for num in (1, 4, 16):
        assert fitted.step_s + (fitted.token_s + fitted.sample_s) * num == pytest.approx(1.5e-3 * num)
