"""A step that is planned, and whose tokens are read, while another one runs on a device that leaves the host free."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cloister.app.engine import may_overlap
from cloister.backends.base import Capability
from cloister.engine.adapter_register import AdapterRegister
from cloister.engine.memory_scrubber import MemoryScrubber
from cloister.types.events import Abort, LoadAdapter, Submit
from cloister.types.request import AdapterInfo, FinishReason, Request
from cloister.types.step import StepPlan, StepResult
from tests.engine.replica import EOS, Replica, SteppedRunner, ended_events, ends, make_replica, make_request, texts
from tests.history_program import HistoryProgram

LONG_S = 5.0


def outcome(replica: Replica, requests: list[Request]) -> list[tuple[list[str], list[FinishReason], int]]:
    for request in requests:
        replica.core.input_queue.put(Submit(request))
    outputs, _ = replica.drive()
    replica.scheduler.pool.check()
    return [
        (
            sorted(texts(outputs, request)),
            sorted(ends(outputs, request)),
            sum(len(each.token_ids) for each in outputs if each.request_id == request.request_id),
        )
        for request in requests
    ]


def mixed_requests() -> list[Request]:
    return [
        make_request("drawn", temperature=1.0, seed=5, max_tokens=30),
        make_request("with an end", temperature=1.0, seed=2, max_tokens=60, ignore_eos=False, logit_bias={EOS: 4.0}),
        make_request("with a stop", temperature=1.0, seed=3, max_tokens=60, stop=("a", "b", "c", "d", "e")),
        make_request("three of them", temperature=0.8, seed=4, n=3, max_tokens=12),
        make_request("scored", max_tokens=5, logprobs=2, prompt_logprobs=1),
        make_request("a long prompt " * 10, max_tokens=40, frequency_penalty=0.5),
        make_request("only its prompt", max_tokens=1),
    ]


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_next_step_is_planned_while_a_slow_device_computes(model_path: Path, overlaps: bool) -> None:
    """The device is not done with a step before the host planned the next one, or 50 ms later where it never does."""
    num_planned, has_planned = 0, threading.Condition()
    met: list[bool] = []

    def compute(plan: StepPlan) -> None:
        with has_planned:
            met.append(has_planned.wait_for(lambda: num_planned > plan.plan_id + 1, LONG_S if overlaps else 0.05))

    replica = make_replica(model_path, overlaps=overlaps, wrap=lambda r: SteppedRunner(r, before=compute))
    make_plan = replica.scheduler.plan

    def watched_plan(now: float) -> StepPlan | None:
        nonlocal num_planned
        plan = make_plan(now)
        with has_planned:
            num_planned += 1
            has_planned.notify_all()
        return plan

    replica.scheduler.plan = watched_plan  # type: ignore[method-assign]
    outcome(replica, [make_request(max_tokens=3)])
    assert met == [overlaps] * len(met)
    assert len(met) >= 3


def test_the_tokens_of_a_step_are_read_while_the_next_one_runs(model_path: Path) -> None:
    replica = make_replica(model_path, overlaps=True)
    run, check = replica.core._runner.run, replica.core._output.check
    has_started = threading.Event()

    def watched_run(plan: StepPlan) -> StepResult:
        if plan.plan_id == 1:
            has_started.set()
        return run(plan)

    waited: list[bool] = []

    def watched_check(plan: StepPlan, result: StepResult) -> object:
        if plan.plan_id == 0:
            waited.append(has_started.wait(LONG_S))
        return check(plan, result)

    replica.core._runner.run, replica.core._output.check = watched_run, watched_check  # type: ignore[method-assign, assignment]
    replica.core.input_queue.put(Submit(make_request(max_tokens=3)))
    replica.drive()
    assert waited == [True]


@pytest.mark.parametrize("num_blocks", [64, 40])
def test_answers_are_those_of_one_step_at_a_time(model_path: Path, num_blocks: int) -> None:
    requests = mixed_requests()
    wanted = outcome(make_replica(model_path, num_blocks=num_blocks), requests)
    assert outcome(make_replica(model_path, num_blocks=num_blocks, overlaps=True), requests) == wanted
    assert {reason for _, reasons, _ in wanted for reason in reasons} == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("num_steps", range(4))
def test_a_request_that_is_aborted_while_its_step_runs_ends_once_and_leaves_nothing(model_path: Path, num_steps: int) -> None:
    replica = make_replica(model_path, overlaps=True)
    request, other = make_request("leaves", n=2, max_tokens=50, prompt_logprobs=0), make_request("stays", max_tokens=9)
    replica.core.input_queue.put(Submit(request))
    replica.core.input_queue.put(Submit(other))
    events = [event for _ in range(num_steps) if (brought := replica.core.step()) is not None for event in brought.events]
    replica.core.input_queue.put(Abort(request.request_id))
    outputs, more = replica.drive()
    assert [event.last for event in ended_events([*events, *more], request)] == [False, True]
    assert ends(outputs, other) == [FinishReason.LENGTH]
    assert replica.core._output._streams == {}
    assert replica.core._runner.num_sequences == 0  # type: ignore[attr-defined]
    replica.scheduler.pool.check()
    assert replica.scheduler.pool.num_used == 0


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_step_that_fails_ends_its_requests_and_those_planned_behind_it_and_the_engine_goes_on(
    model_path: Path, failing: int
) -> None:
    def fail(plan: StepPlan) -> None:
        if plan.plan_id == failing:
            raise RuntimeError("the device is lost")

    replica = make_replica(model_path, overlaps=True, wrap=lambda r: SteppedRunner(r, before=fail))
    lost, later = make_request("lost", max_tokens=20), make_request("later", max_tokens=4)
    assert outcome(replica, [lost])[0][1] == [FinishReason.ERROR]
    assert outcome(replica, [later])[0][1] == [FinishReason.LENGTH]
    assert replica.scheduler.num_in_flight == 0


def test_tokens_that_cannot_be_read_wait_for_the_step_that_runs_before_its_blocks_are_given_back(model_path: Path) -> None:
    ends_of: list[str] = []

    def slow(plan: StepPlan) -> None:
        if plan.plan_id == 1:
            threading.Event().wait(0.05)
            ends_of.append("step")

    replica = make_replica(model_path, overlaps=True, wrap=lambda r: SteppedRunner(r, before=slow))
    fail = replica.scheduler.fail

    def watched_fail(*args: object) -> None:
        ends_of.append("fail")
        fail(*args)  # type: ignore[arg-type]

    def break_off(plan: StepPlan, result: StepResult) -> object:
        raise ValueError("unreadable")

    replica.scheduler.fail = watched_fail  # type: ignore[method-assign]
    check, replica.core._output.check = replica.core._output.check, break_off  # type: ignore[method-assign, assignment]
    request = make_request(max_tokens=20)
    replica.core.input_queue.put(Submit(request))
    brought = replica.core.step()
    assert ends_of == ["step", "fail"]
    assert brought is not None
    assert ends(brought.outputs, request) == [FinishReason.ERROR]
    replica.core._output.check = check  # type: ignore[method-assign]
    replica.drive()
    assert replica.scheduler.pool.num_used == 0


class Host:
    """Notes whether a step ran while an adapter was loaded (protocol `AdapterHost`)."""

    def __init__(self, is_running: Callable[[], bool]) -> None:
        self.saw: list[bool] = []
        self._is_running = is_running

    def load(self, name: str, path: str) -> AdapterInfo:
        self.saw.append(self._is_running())
        return AdapterInfo(name=name, digest="digest", path=path, rank=1)

    def unload(self, digest: str) -> None: ...


def test_no_adapter_is_loaded_while_a_step_runs(model_path: Path) -> None:
    running = threading.Event()

    def slow(plan: StepPlan) -> None:
        running.set()
        threading.Event().wait(0.03)
        running.clear()

    host = Host(running.is_set)
    replica = make_replica(
        model_path, overlaps=True, wrap=lambda r: SteppedRunner(r, before=slow), adapters=AdapterRegister(host, [])
    )
    replica.core.input_queue.put(Submit(make_request(max_tokens=20)))
    for number in range(4):
        replica.core.step()
        assert running.wait(LONG_S)
        replica.core.input_queue.put(LoadAdapter(f"key{number}", f"name{number}", "nowhere"))
    replica.drive()
    assert host.saw == [False] * 4


class DeviceProgram(HistoryProgram):
    """Says that it computes elsewhere."""

    capabilities = Capability.ASYNCHRONOUS


class Drafters:
    def __init__(self, *names: str) -> None:
        self.names = names


def test_steps_overlap_on_another_device_and_where_nothing_needs_them_apart() -> None:
    device, host = (make(vocab_size=9, num_blocks=1, block_size=1) for make in (DeviceProgram, HistoryProgram))
    assert may_overlap(device, None, Drafters())  # type: ignore[arg-type]
    assert not may_overlap(host, None, Drafters())  # type: ignore[arg-type]
    assert not may_overlap(device, MemoryScrubber(device.wipe_buffers), Drafters())  # type: ignore[arg-type]
    assert not may_overlap(device, None, Drafters("ngram"))  # type: ignore[arg-type]


def test_an_engine_that_takes_turns_runs_its_steps_on_its_own_thread(model_path: Path) -> None:
    threads: set[int] = set()
    replica = make_replica(
        model_path, overlaps=True, wrap=lambda r: SteppedRunner(r, before=lambda plan: threads.add(threading.get_ident()))
    )
    outcome(replica, [make_request(max_tokens=3)])
    assert threads.isdisjoint({threading.get_ident()})
    threads.clear()
    replica.core.take_turns()
    outcome(replica, [make_request(max_tokens=3)])
    assert threads == {threading.get_ident()}
