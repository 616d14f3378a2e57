"""Placements of replicas are found for a load: prompts that delay answers are moved away from them, and nothing else is."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path

import msgspec
import pytest

from cloister.bench.placement import predict, rank
from cloister.bench.report import LatencyObjective, Summary
from cloister.bench.workloads import WorkItem, make_tokens
from cloister.cli import main
from cloister.cluster.virtual.placement import ReplicaPlacement, StepProfile, list_placements
from cloister.types.errors import ConfigError

PROFILE = StepProfile(
    num_threads=1, num_blocks=4000, block_size=16, max_model_len=4096, max_num_seqs=64, step_s=0.002, token_s=0.00005,
    sample_s=0.0001, key_s=0.0, read_s=0.0, delay_s=0.001, entry_s=0.00005, entry_bytes=4096.0,
)  # fmt: skip
LONG = {"num_input": 1500, "num_output": 120, "rate": 8.0, "num": 12}
SHORT = {"num_input": 40, "num_output": 20, "rate": 150.0, "num": 30}


def make_work(num_input: int, num_output: int, rate: float, num: int) -> list[WorkItem]:
    draw, at_s, items = random.Random(0), 0.0, []
    for number in range(num):
        at_s += draw.expovariate(rate)
        items.append(WorkItem(at_s, make_tokens((number,), num_input, 256), num_input, num_output))
    return items


@pytest.mark.parametrize(
    ("load", "limits", "best"),
    [
        (LONG, LatencyObjective(1.0, 0.02), "1 prefill, 1 decode"),
        (SHORT, LatencyObjective(0.1, 0.02), "2 mixed"),
    ],
    ids=["long prompts, short gaps", "short prompts"],
)
def test_prompts_are_computed_elsewhere_only_where_they_would_delay_answers(
    load: dict[str, float], limits: LatencyObjective, best: str
) -> None:
    work = make_work(**load)  # type: ignore[arg-type]
    placements = [each for each in list_placements([PROFILE], 2) if each.words in ("1 prefill, 1 decode", "2 mixed")]
    ranked = rank([(each, predict(each, work, limits, "least_load")) for each in placements])
    assert len(ranked) == 2
    assert ranked[0][0].words == best


def test_every_division_of_the_threads_and_every_choice_of_roles_is_a_candidate() -> None:
    wide = msgspec.structs.replace(PROFILE, num_threads=2, step_s=0.001)
    found = list_placements([PROFILE, wide], 3)
    assert sorted((each.profile.num_threads, each.words) for each in found) == [
        (1, "1 decode, 2 mixed"), (1, "1 prefill, 1 decode, 1 mixed"), (1, "1 prefill, 2 decode"), (1, "1 prefill, 2 mixed"),
        (1, "2 decode, 1 mixed"), (1, "2 prefill, 1 decode"), (1, "2 prefill, 1 mixed"), (1, "3 mixed"), (2, "1 mixed"),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="no replica fits on 1 threads; raise --threads"):
        list_placements([wide], 1)


def test_all_times_of_a_profile_count() -> None:
    work, limits = make_work(**LONG), LatencyObjective(1.0, 0.02)  # type: ignore[arg-type]

    def p99_s(**times: object) -> float:
        placement = ReplicaPlacement(msgspec.structs.replace(PROFILE, **times), ("prefill", "decode"))
        spread = predict(placement, work, limits, "least_load").e2e
        assert spread is not None
        return spread.p99

    without_s = p99_s()
    for times in ({"curve": ((0, 0.0), (1, 0.005))}, {"arrival_s": 0.05}, {"load_s": 0.002}):
        assert p99_s(**times) > 1.05 * without_s, times
    for times in ({"export_s": 0.002}, {"receive_s": 0.002}, {"serve_s": 0.2}, {"pull_s": 0.2}):
        assert p99_s(**times) > 1.05 * without_s, times


def test_a_curve_whose_tokens_do_not_rise_is_refused() -> None:
    given = msgspec.to_builtins(PROFILE) | {"curve": [[1, 0.002], [1, 0.003]]}
    with pytest.raises(msgspec.ValidationError, match="tokens of `curve` must rise"):
        msgspec.convert(given, StepProfile)


def test_the_best_placement_is_a_command_that_can_be_run() -> None:
    assert ReplicaPlacement(PROFILE, ("mixed",)).flags("least_load") == "--replicas 1 --num-threads 1"
    assert ReplicaPlacement(PROFILE, ("mixed", "mixed")).flags("conductor") == "--replicas 2 --num-threads 1 --router conductor"
    split = ReplicaPlacement(PROFILE, ("prefill", "decode", "decode"))
    flags = "--replicas 3 --num-threads 1 --prefill 1 --decode 2 --kv-transfer shm --router least_load"
    assert split.flags("least_load") == flags
    of_model = ReplicaPlacement(msgspec.structs.replace(PROFILE, model="smollm2-135m:int8"), ("mixed",))
    assert of_model.flags("least_load") == "smollm2-135m --quant int8 --replicas 1 --num-threads 1"


def summary(placement: ReplicaPlacement, goodput_rps: float, share: float) -> Summary:
    found = predict(placement, make_work(**SHORT | {"num": 1}), LatencyObjective(1.0, None), "least_load")  # type: ignore[arg-type]
    return dataclasses.replace(found, goodput_rps=goodput_rps, slo_share=share)


def test_placements_are_ranked_by_the_goodput_that_is_shown() -> None:
    first, second, third = list_placements([PROFILE], 2)[:3]
    pairs = [(first, summary(first, 1.2, 1.0)), (second, summary(second, 1.4, 0.9)), (third, summary(third, 0.0, 0.0))]
    assert [each for each, _ in rank(pairs)] == [second, first, third]


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "placement", *args])
    return caught.value.code or 0, *capsys.readouterr()


def test_the_command_ranks_placements_and_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(PROFILE))
    load = ["--input-tokens", "40", "--output-tokens", "4", "--num-requests", "6", "--rate", "50"]
    given = ["--profile", str(path), "--threads", "2", *load]
    status, out, err = run(capsys, *given, "--slo-ttft-ms", "100", "--json")
    assert status == 0, err
    ranked = json.loads(out)
    assert len(ranked) == 4
    assert {each["num_ok"] for each in ranked} == {6}
    status, out, err = run(capsys, *given, "--slo-ttft-ms", "100")
    assert status == 0, err
    assert out.splitlines()[-1] == f"cloister serve {ranked[0]['flags']}"
    assert "give it yourself: cloister serve MODEL" in err
    status, out, err = run(capsys, *given, "--slo-ttft-ms", "0.001")
    assert status == 1
    assert "cloister serve" not in out
    assert "no placement keeps the limits for any request" in err
    wrong = run(capsys, "--profile", "/nowhere.json", "--threads", "2", "--trace", "/nowhere.jsonl")[2]
    for part in ("3 settings are wrong", "goodput needs a limit", "cannot read /nowhere.json", "/nowhere.jsonl"):
        assert part in wrong
    assert "goodput needs a limit; give --slo-ttft-ms" in run(capsys, *given)[2]
    assert "unknown router" in run(capsys, *given, "--slo-ttft-ms", "9", "--router", "nearest")[2]
    trace = tmp_path / "texts.jsonl"
    trace.write_text('{"prompt": "hello", "output_length": 4}\n')
    assert "give one with lengths" in run(capsys, *given, "--slo-ttft-ms", "9", "--trace", str(trace))[2]
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(PROFILE, model="cloister-5m")))
    _, out, err = run(capsys, *given, "--slo-ttft-ms", "100")
    assert out.splitlines()[-1].startswith("cloister serve cloister-5m --replicas ")
    assert err == ""
    path.write_text('{"num_threads": 1}')
    assert "is not a profile of a replica" in run(capsys, *given, "--slo-ttft-ms", "9")[2]


def test_a_long_search_says_how_long_it_will_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(PROFILE))
    monkeypatch.setattr("cloister.cli.plan.ESTIMATE_AFTER_S", 0.0)
    load = ["--input-tokens", "40", "--output-tokens", "4", "--num-requests", "2", "--rate", "50", "--slo-ttft-ms", "100"]
    assert "placements" not in run(capsys, "--profile", str(path), "--threads", "2", *load)[2]
    monkeypatch.setattr("cloister.cli.plan.LONG_S", 0.0)
    err = run(capsys, "--profile", str(path), "--threads", "2", *load)[2]
    assert re.search(r"^4 placements; some \d+ s more", err, re.MULTILINE)
    assert err.count("placements") == 1
