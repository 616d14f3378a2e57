"""What `benchmarks.cluster_traces` makes of traces and of measured steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cluster_costs import MIXED, Costs, StepTimes, TimedStep
from benchmarks.cluster_traces import AZURE, MOONCAKE, Case, Record, Run, main, sample_conversations
from cloister.bench.recorder import RequestRecord
from cloister.bench.report import LatencyObjective, summarise
from cloister.bench.traces import TraceRow
from cloister.cluster.virtual.engine_shape import interpolate
from cloister.cluster.virtual.kv_links import LinkCosts
from cloister.cluster.virtual.processors import FrontCosts
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


def list_steps(times: StepTimes) -> list[TimedStep]:
    """Returns prompts, answers and steps without tokens, which take exactly these times."""
    steps = [TimedStep(step(0, 0, 0), times.curve[0][1])] * 3
    for num in (1, 2, 3, 6, 8, 12, 16):
        for context in (10, 300, 900):
            for is_answers in (True, False):
                num_samples, num_arrivals = (num, 0) if is_answers else (1, 2)
                num_tokens, key_s = (num, times.read_s) if is_answers else (num + 1, times.key_s)
                made = step(num_tokens, num_samples, num_tokens * context)
                elapsed_s = interpolate(times.curve, num_tokens) + times.sample_s * num_samples
                elapsed_s += key_s * made.num_attended + times.arrival_s * num_arrivals
                steps.append(TimedStep(made, elapsed_s, num_arrivals))
    return steps


def test_times_of_steps_are_found_again() -> None:
    curve = ((0, 1e-4), (1, 4e-3), (2, 4.5e-3), (4, 4.5e-3), (8, 8e-3), (16, 9e-3), (32, 13e-3))
    times = StepTimes(curve, sample_s=2e-4, key_s=2e-7, read_s=9e-7, arrival_s=5e-4)
    fitted = StepTimes.fit(list_steps(times))
    assert [num_tokens for num_tokens, _ in fitted.curve] == [num_tokens for num_tokens, _ in curve]
    assert [each_s for _, each_s in fitted.curve] == pytest.approx([each_s for _, each_s in curve], rel=1e-3)
    assert [fitted.sample_s, fitted.key_s, fitted.read_s, fitted.arrival_s] == pytest.approx([2e-4, 2e-7, 9e-7, 5e-4], rel=1e-3)


def test_times_that_vary_by_chance_are_predicted_by_their_mean() -> None:
    steps = [TimedStep(step(num, num, 0), 1e-3 * num * factor) for num in (1, 4, 16) for factor in (0.5, 1.0, 3.0)]
    fitted = StepTimes.fit(steps)
    for num in (1, 4, 16):
        assert interpolate(fitted.curve, num) + fitted.sample_s * num == pytest.approx(1.5e-3 * num)


def make_costs(sample_s: float = 1e-5) -> Costs:
    times = StepTimes(((0, 1e-4), (1, 2e-4)), sample_s, 2e-8, 3e-8, 4e-4)
    return Costs(times, 1.1, 1e-4, 6e-4, 5e-5, LinkCosts(6e-4, 2e-5, 3e-4, 1e-5), 24576.0, 100, FrontCosts(1e-4, 2e-4, 3e-6))


def test_what_was_measured_is_kept_for_the_next_sitting(tmp_path: Path) -> None:
    path, case = tmp_path / "kept.jsonl", Case("cloister-5m", "Azure", "least_load", MIXED)
    costs = make_costs()
    record = RequestRecord(0, 0.0, 1.0, 10, 3, ((0.5, 1), (0.7, 2)))
    runs = [Run(summarise("", [record], LatencyObjective(0.1, 0.05)), busiest=0.5 + number / 10) for number in range(2)]
    first = Record(path, "these options")
    first.add("cloister-5m", costs=costs)
    first.add("cloister-5m", case=case, run=runs[0])
    Record(path, "these options").add("cloister-5m", case=case, run=runs[1])
    again = Record(path, "these options")
    assert again.costs == {"cloister-5m": costs}
    assert again.runs == {case: runs}
    assert not Record(path, "other options").runs


def test_costs_that_are_measured_again_predict_the_same_workloads(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    old, new = (make_costs(sample_s) for sample_s in (1e-5, 2e-5))
    for costs in (old, new):
        Record(path, "these options").add("cloister-5m", costs=costs)
    again = Record(path, "these options")
    assert again.costs == {"cloister-5m": new}
    assert again.steps == {"cloister-5m": old.steps}


def test_a_kept_file_of_another_version_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kept.jsonl"
    path.write_text(
        '{"options":"a","model":"cloister-5m","case":null}\n'
        '{"options":"a","model":"cloister-5m","costs":{"company":1.1,"delay_s":1e-4,"export_s":3e-5}}\n'
    )
    for trace in (MOONCAKE, AZURE):
        (tmp_path / trace).touch()
    monkeypatch.setattr("sys.argv", ["cluster_traces", "--keep", str(path), "--sitting-s", "0", "--traces", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"--keep: line 2 of {path} was not written by this version of the benchmark" in said
    assert "name another file, into which all is measured anew, or delete this one" in said
    assert path.read_text().count("\n") == 2
