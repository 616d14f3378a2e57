"""A step that is planned, and whose tokens are read, while a device computes another one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloister.backends.base import Capability, ForwardBatch, StepOutput, Wants
from cloister.engine.adapters import AdapterRegister
from cloister.engine.core import Runner
from cloister.engine.memory_scrubber import MemoryScrubber
from cloister.executor import ModelRunner
from cloister.launch.engine import may_overlap
from cloister.types.events import Abort, LoadAdapter, Submit
from cloister.types.request import AdapterInfo, FinishReason, Request, SamplingParams
from cloister.types.step import NewSequence, SequencePlan, StepPlan, StepResult, Stop
from tests.engine.replica import BLOCK_SIZE, EOS, VOCAB_SIZE, Replica, ended_events, ends, make_replica, make_request, texts
from tests.history_program import HistoryProgram, greedy_continuation


class Device:
    """A device that computes a step when it is waited for, and notes what happens in which order (protocol `Runner`)."""

    def __init__(self, runner: Runner, fault: Callable[[int], None] = lambda plan_id: None) -> None:
        self.log: list[str] = []
        self.is_busy = False
        self._runner, self._fault = runner, fault

    def run(self, plan: StepPlan) -> StepResult:
        return self.start(plan)()

    def start(self, plan: StepPlan) -> Callable[[], StepResult]:
        assert not self.is_busy
        self.log.append(f"start {plan.plan_id}")
        self.is_busy = True
        return partial(self._finish, plan)

    def _finish(self, plan: StepPlan) -> StepResult:
        assert self.is_busy
        self.is_busy = False
        self.log.append(f"done {plan.plan_id}")
        self._fault(plan.plan_id)
        return self._runner.run(plan)


def make_device(
    path: Path, fault: Callable[[int], None] = lambda plan_id: None, *, overlaps: bool = True, **settings: Any
) -> tuple[Replica, Device]:
    """A replica whose steps overlap on a device, which logs what the host does, too."""
    devices: list[Device] = []

    def wrap(runner: Runner) -> Runner:
        devices.append(Device(runner, fault))
        return devices[0]

    replica = make_replica(path, wrap=wrap, overlaps=overlaps, **settings)
    (device,) = devices
    make_plan, check = replica.scheduler.plan, replica.core._output.check

    def watched_plan(now: float) -> StepPlan | None:
        plan = make_plan(now)
        if plan is not None:
            device.log.append(f"plan {plan.plan_id}")
        return plan

    def watched_check(plan: StepPlan, result: StepResult) -> dict[int, Stop]:
        device.log.append(f"read {plan.plan_id}")
        return check(plan, result)

    replica.scheduler.plan, replica.core._output.check = watched_plan, watched_check  # type: ignore[method-assign]
    return replica, device


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


def test_the_next_step_is_planned_while_a_device_computes_and_starts_before_tokens_are_read(model_path: Path) -> None:
    replica, device = make_device(model_path)
    outcome(replica, [make_request(max_tokens=3)])
    assert device.log[:9] == [
        "plan 0", "start 0", "plan 1", "done 0", "start 1", "read 0", "plan 2", "done 1", "start 2",
    ]  # fmt: skip


def test_without_overlap_a_step_is_planned_when_the_one_before_was_read(model_path: Path) -> None:
    replica, device = make_device(model_path, overlaps=False)
    outcome(replica, [make_request(max_tokens=3)])
    assert device.log[:8] == ["plan 0", "start 0", "done 0", "read 0", "plan 1", "start 1", "done 1", "read 1"]


@pytest.mark.parametrize("num_blocks", [64, 40])
def test_answers_are_those_of_one_step_at_a_time(model_path: Path, num_blocks: int) -> None:
    requests = mixed_requests()
    wanted = outcome(make_replica(model_path, num_blocks=num_blocks), requests)
    assert outcome(make_device(model_path, num_blocks=num_blocks)[0], requests) == wanted
    assert {reason for _, reasons, _ in wanted for reason in reasons} == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("num_steps", range(4))
def test_a_request_that_is_aborted_while_its_step_runs_ends_once_and_leaves_nothing(model_path: Path, num_steps: int) -> None:
    replica, device = make_device(model_path)
    request, other = make_request("leaves", n=2, max_tokens=50, prompt_logprobs=0), make_request("stays", max_tokens=9)
    replica.core.input_queue.put(Submit(request))
    replica.core.input_queue.put(Submit(other))
    events = [event for _ in range(num_steps) if (brought := replica.core.step()) is not None for event in brought.events]
    replica.core.input_queue.put(Abort(request.request_id))
    outputs, more = replica.drive()
    assert [event.last for event in ended_events([*events, *more], request)] == [False, True]
    assert ends(outputs, other) == [FinishReason.LENGTH]
    assert replica.core._output._streams == {}
    assert device._runner.num_sequences == 0  # type: ignore[attr-defined]
    replica.scheduler.pool.check()
    assert replica.scheduler.pool.num_used == 0


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_step_that_fails_ends_its_requests_and_those_planned_behind_it_and_the_engine_goes_on(
    model_path: Path, failing: int
) -> None:
    def fail(plan_id: int) -> None:
        if plan_id == failing:
            raise RuntimeError("the device is lost")

    replica, _ = make_device(model_path, fail)
    lost, later = make_request("lost", max_tokens=20), make_request("later", max_tokens=4)
    assert outcome(replica, [lost])[0][1] == [FinishReason.ERROR]
    assert outcome(replica, [later])[0][1] == [FinishReason.LENGTH]
    assert not replica.scheduler._steps


def test_tokens_that_cannot_be_read_wait_for_the_device_before_blocks_are_given_back(model_path: Path) -> None:
    replica, device = make_device(model_path)
    fail, check = replica.scheduler.fail, replica.core._output.check

    def watched_fail(message: str, now: float) -> None:
        device.log.append("fail")
        fail(message, now)

    def break_off(plan: StepPlan, result: StepResult) -> dict[int, Stop]:
        raise ValueError("unreadable")

    replica.scheduler.fail, replica.core._output.check = watched_fail, break_off  # type: ignore[method-assign]
    request = make_request(max_tokens=20)
    replica.core.input_queue.put(Submit(request))
    brought = replica.core.step()
    assert device.log[-2:] == ["done 1", "fail"]
    assert brought is not None
    assert ends(brought.outputs, request) == [FinishReason.ERROR]
    replica.core._output.check = check  # type: ignore[method-assign]
    replica.drive()
    assert replica.scheduler.pool.num_used == 0


def test_answers_that_cannot_be_readied_end_and_the_engine_goes_on(model_path: Path) -> None:
    replica, _ = make_device(model_path)
    begin = replica.core._output.begin

    def break_off(plan: StepPlan) -> None:
        if any(new.num_prompt_tokens == 7 for new in plan.arrivals):
            raise ValueError("unreadable")
        begin(plan)

    replica.core._output.begin = break_off  # type: ignore[method-assign]
    assert outcome(replica, [make_request("seven..", max_tokens=3)])[0][1] == [FinishReason.ERROR]
    assert outcome(replica, [make_request("later", max_tokens=3)])[0][1] == [FinishReason.LENGTH]
    replica.core.input_queue.put(Submit(make_request("runs already", max_tokens=9)))
    replica.core.step()
    assert outcome(replica, [make_request("seven..", max_tokens=3)])[0][1] == [FinishReason.ERROR]
    assert replica.scheduler.pool.num_used == 0


class Host:
    """Notes whether a step ran while an adapter was loaded (protocol `AdapterHost`)."""

    def __init__(self, is_running: Callable[[], bool]) -> None:
        self.saw: list[bool] = []
        self._is_running = is_running

    def load(self, name: str, path: str, note_progress: Callable[[], None]) -> AdapterInfo:
        self.saw.append(self._is_running())
        return AdapterInfo(name=name, digest="digest", path=path, rank=1)

    def unload(self, digest: str) -> None: ...


def test_no_adapter_is_loaded_while_a_device_computes(model_path: Path) -> None:
    devices: list[Device] = []
    host = Host(lambda: devices[0].is_busy)
    replica, device = make_device(model_path, adapters=AdapterRegister(host, []))
    devices.append(device)
    request = make_request(max_tokens=20)
    replica.core.input_queue.put(Submit(request))
    for number in range(4):
        replica.core.step()
        assert device.is_busy
        replica.core.input_queue.put(LoadAdapter(f"key{number}", f"name{number}", "nowhere"))
    outputs, _ = replica.drive()
    assert host.saw == [False] * 4
    assert ends(outputs, request) == [FinishReason.LENGTH]


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


def test_an_engine_that_takes_turns_reads_every_step_before_the_next(model_path: Path) -> None:
    replica, device = make_device(model_path)
    replica.core.disable_overlap()
    outcome(replica, [make_request(max_tokens=3)])
    assert device.log[:6] == ["plan 0", "start 0", "done 0", "read 0", "plan 1", "start 1"]


class LaunchingProgram(HistoryProgram):
    """Computes when it is waited for; counts what is on its way."""

    capabilities = Capability.ASYNCHRONOUS
    num_launched = 0

    def launch(self, batch: ForwardBatch, wants: Wants) -> Callable[[], StepOutput]:
        self.num_launched += 1
        return partial(self._take, batch, wants)

    def _take(self, batch: ForwardBatch, wants: Wants) -> StepOutput:
        self.num_launched -= 1
        return self.step(batch, wants)


class GreedyLaunchingProgram(LaunchingProgram):
    """The same, and finds the most likely tokens itself."""

    capabilities = Capability.ASYNCHRONOUS | Capability.GREEDY

    def step(self, batch: ForwardBatch, wants: Wants) -> StepOutput:
        return StepOutput(tokens=self.compute(batch).argmax(1).astype(np.int32))


@pytest.mark.parametrize("program_type", [LaunchingProgram, GreedyLaunchingProgram])
def test_a_runner_returns_when_its_program_was_launched_and_takes_the_tokens_later(
    program_type: type[LaunchingProgram],
) -> None:
    program = program_type(vocab_size=VOCAB_SIZE, num_blocks=8, block_size=BLOCK_SIZE)
    runner = ModelRunner(program, vocab_size=VOCAB_SIZE, max_model_len=64, block_size=BLOCK_SIZE)
    arrival = NewSequence(seq_id=1, token_ids=[1, 2, 3], num_prompt_tokens=3, sampling=SamplingParams(temperature=0.0), seed=0)
    plan = SequencePlan(seq_id=1, start=0, num_tokens=3, table_start=0, new_block_ids=[1], num_samples=1)
    finish = runner.start(StepPlan(plan_id=0, sequences=[plan], arrivals=[arrival]))
    assert program.num_launched == 1
    (sample,) = finish().samples
    assert sample.token_ids == greedy_continuation([1, 2, 3], 1, VOCAB_SIZE)
