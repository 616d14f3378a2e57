"""The profile of an engine's steps: its tree adds up, its trace holds no content, and nothing stays behind."""

import json
import threading

import numpy as np
import pytest

from cloister.backends import BACKENDS
from cloister.backends.base import LOGITS
from cloister.backends.factories import FOREIGN_FAMILY
from cloister.backends.recording import OperatorSpan, Watched, watch
from cloister.bench.kernels import make_batch
from cloister.bench.profile import ProfiledStep, list_parts, list_threads, profile_engine, program_of, to_trace
from cloister.bench.roofline_operators import Work
from cloister.cli import main
from cloister.executor import generation
from cloister.launch import build_engine, resolve_settings
from cloister.types.errors import EngineError
from cloister.types.request import Request, SamplingParams


@pytest.fixture(scope="module", params=[name for name in BACKENDS.names() if name != FOREIGN_FAMILY])
def engine(request):
    """An engine of the smaller embedded model, on two threads, for every back end that computes models of ours."""
    flags = {"model": "cloister-draft", "backend": request.param, "num_threads": 2, "kv_memory_mb": 64.0}
    return build_engine(resolve_settings(flags, listens=False).engine.config)


def make_requests(prefix, num=2, length=300, new=4):
    sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    tokens = np.random.default_rng(1).integers(2, 4000, size=(num, length)).tolist()
    return [Request(request_id=f"{prefix}-{n}", token_ids=ids, sampling=sampling) for n, ids in enumerate(tokens)]


def test_a_watched_method_is_timed_on_every_thread_and_put_back():
    class Owner:
        def work(self, value):
            if value < 0:
                raise ValueError("negative")
            return value + 1

    owner, other = Owner(), Owner()
    with watch([Watched(owner, "work", "w")]) as spans:
        assert owner.work(1) == 2
        other.work(1)
        with pytest.raises(ValueError, match="negative"):
            owner.work(-1)
        thread = threading.Thread(target=owner.work, args=(1,))
        thread.start()
        thread.join()
    owner.work(1)
    assert [(span.name, span.thread) for span in spans] == [("w", 0), ("w", 0), ("w", 1)]
    assert vars(owner) == {}


def test_parts_of_every_step_are_found_and_add_up(engine):
    steps = profile_engine(engine, make_requests("parts"))
    assert {step.kind for step in steps} == {"prefill", "decode"}
    assert sum(step.num_samples for step in steps) == 2 * 4
    for kind in ("prefill", "decode"):
        chosen = [step for step in steps if step.kind == kind]
        parts = list_parts(chosen)
        names = {part.path[-1] for part in parts if not part.in_program}
        assert names - {"sample"} == {"step", "plan", "run", "inputs", "check", "commit", "collect"}
        assert "sample" in {part.path[-1] for part in parts}  # in Python, or by the program itself
        assert sum(part.own_s for part in parts) == pytest.approx(parts[0].seconds)
        assert all(part.own_s >= 0 for part in parts)
        assert all(part.path[:3] == ("step", "run", "forward") for part in parts if part.in_program)
        assert {"attention", "head"} <= {part.path[-1] for part in parts if part.in_program}


def test_work_is_told_apart_by_thread():
    spans = (OperatorSpan("attention", 0, 1.0, 2.0), OperatorSpan("attention", 1, 1.0, 1.5), OperatorSpan("head", 0, 4.0, 1.0))
    steps = [ProfiledStep("decode", 1, 1, (OperatorSpan("step", 0, 0.0, 9.0),), spans)] * 2
    assert list_threads(steps) == {"attention": {0: 4.0, 1: 3.0}, "head": {0: 2.0}}


def test_nothing_stays_behind_and_recording_changes_no_bit(engine):
    program = program_of(engine)
    before, function = dict(vars(program)), generation.forward_batch
    batch = make_batch(Work.prefill(20, 1), 4096, 16)
    plain = program.step(batch, LOGITS).logits
    with program.record() as spans:
        recorded = program.step(batch, LOGITS).logits
    profile_engine(engine, make_requests("after", 1, 20, 2))
    assert np.array_equal(plain, recorded)
    assert spans
    assert vars(program) == before
    assert generation.forward_batch is function
    assert all("run" not in vars(owner) and "plan" not in vars(owner) for owner in (engine._runner, engine._scheduler))


def test_a_request_that_is_not_answered_is_an_error_and_not_a_profile(engine):
    with pytest.raises(EngineError, match="was not answered"):
        profile_engine(engine, make_requests("long", 1, 9000, 2))


def test_threads_at_one_operator_count_once_calls_nest_and_times_of_a_level_add_up():
    python = (
        OperatorSpan("step", 0, 0.0, 10.0),
        OperatorSpan("plan", 0, 0.0, 2.0),
        OperatorSpan("run", 0, 2.0, 7.0),
        OperatorSpan("forward", 0, 2.25, 5.75),
    )
    program = (
        OperatorSpan("head", 0, 6.0, 1.0),
        OperatorSpan("attention", 0, 3.0, 3.0),
        OperatorSpan("attention", 1, 2.5, 3.0),
    )
    parts = list_parts([ProfiledStep("decode", 1, 1, python, program)] * 2)
    assert [(part.path[-1], part.in_program, part.num_calls, part.seconds, part.own_s) for part in parts] == [
        ("step", False, 2, 20.0, 2.0),
        ("plan", False, 2, 4.0, 4.0),
        ("run", False, 2, 14.0, 2.5),
        ("forward", True, 2, 11.5, 2.5),
        ("attention", True, 2, 7.0, 7.0),
        ("head", True, 2, 2.0, 2.0),
    ]


def test_a_trace_is_what_perfetto_reads_and_holds_names_counts_and_times_only(engine):
    steps = profile_engine(engine, make_requests("trace", 1, 30, 3))
    trace = json.loads(json.dumps(to_trace(steps, "torch")))
    names = {"step", "plan", "run", "inputs", "forward", "sample", "check", "commit", "collect", "embed", "schedule"}
    names |= {"norm+qkv+rope", "attention", "output+mlp_norm+gate_up+down", "head", "thread_name"}
    names |= {"norm", "qkv", "rope", "rope table", "output", "mlp_norm", "gate_up", "down", "round"}
    for event in trace["traceEvents"]:
        assert event["name"] in names
        assert set(event) <= {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert all(isinstance(count, int) for count in event.get("args", {}).values())
            assert set(event.get("args", {})) <= {"num_tokens", "num_samples"}


def test_the_command_prints_both_kinds_of_step_and_writes_the_trace(capsys, tmp_path):
    trace = tmp_path / "out" / "trace.json"
    with pytest.raises(SystemExit) as caught:
        main(
            [
                "bench",
                "profile",
                "cloister-draft",
                "--prompt",
                "20",
                "--new",
                "3",
                "--batch",
                "2",
                "--kv-memory-mb",
                "64",
                "--trace",
                str(trace),
            ]
        )
    out = capsys.readouterr().out
    assert not caught.value.code
    assert "prefill steps" in out
    assert "2 decode steps" in out
    assert "Python" in out
    assert json.loads(trace.read_text())["traceEvents"]


def test_the_help_says_that_a_running_server_is_not_profiled(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "profile", "--help"])
    assert "A running server cannot be profiled" in " ".join(capsys.readouterr().out.split())
