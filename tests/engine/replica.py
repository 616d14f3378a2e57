"""Real engines for tests: scheduler, runner, tokenizer and output processing as in production, around a tiny program.

The `build*` functions are entry points of engine processes; `EngineConfig.model` is the directory of a tokenizer.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from cloister.engine.adapters import AdapterRegister
from cloister.engine.core import EngineCore, Runner
from cloister.engine.output_processor import OutputProcessor
from cloister.engine.step_ahead import StepAhead
from cloister.executor import ModelRunner
from cloister.kv import BlockPool, PrefixKeys
from cloister.scheduler import Scheduler, SchedulerConfig
from cloister.text import Tokenizer
from cloister.types.clock import Clock
from cloister.types.config import EngineConfig
from cloister.types.errors import MemoryBudgetError
from cloister.types.events import Ended, Event, Outputs
from cloister.types.request import AdapterInfo, FinishReason, ModelInfo, Request, SamplingParams, SequenceOutput
from cloister.types.step import Sample, StepPlan, StepResult
from tests.history_program import HistoryProgram

EOS = 256
TRIGGER = 255
"""A prompt that begins with this token makes the special replicas do what they are for."""
VOCAB_SIZE = 257
MAX_MODEL_LEN = 256
NUM_BLOCKS = 64
BLOCK_SIZE = 8

_ids = itertools.count()


def make_config(path: Path, **changes: object) -> EngineConfig:
    return dataclasses.replace(EngineConfig(model=str(path), max_num_seqs=16, block_size=BLOCK_SIZE), **changes)


def make_request(prompt: str | Sequence[int] = "once upon a time", *, timeout_s: float = 600.0, **sampling: object) -> Request:
    token_ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **sampling})
    return Request(request_id=f"r{next(_ids)}", token_ids=token_ids, sampling=params, timeout_s=timeout_s)


class SpeakingRunner:
    """Says what it is told: sequence after sequence gets the same tokens, one a step."""

    def __init__(self, speech: str | Sequence[int]) -> None:
        self.token_ids = list(speech.encode()) if isinstance(speech, str) else list(speech)
        self._held: dict[int, int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for new in plan.arrivals:
            self._held[new.seq_id] = len(new.token_ids) - new.num_prompt_tokens
        for fork in plan.forks:
            self._held[fork.child_id] = 0
        speakers = [p.seq_id for p in plan.sequences if p.num_samples] + [fork.child_id for fork in plan.forks]
        return StepResult(plan_id=plan.plan_id, samples=[self._speak(seq_id) for seq_id in speakers])

    def _speak(self, seq_id: int) -> Sample:
        place = self._held[seq_id]
        self._held[seq_id] += 1
        return Sample(seq_id, [self.token_ids[place % len(self.token_ids)]])


class SteppedRunner:
    """A real runner that does `before` each step and takes at least `step_s`."""

    def __init__(self, runner: Runner, *, step_s: float = 0.0, before: Callable[[StepPlan], None] | None = None) -> None:
        self._runner = runner
        self._step_s = step_s
        self._before = before

    def run(self, plan: StepPlan) -> StepResult:
        if self._before is not None:
            self._before(plan)
        time.sleep(self._step_s)
        return self._runner.run(plan)


@dataclasses.dataclass
class Replica:
    """An engine core and what it is made of."""

    core: EngineCore
    scheduler: Scheduler
    program: HistoryProgram

    def drive(self, *, max_steps: int = 2000) -> tuple[list[SequenceOutput], list[Event]]:
        """Steps until nothing is left to do."""
        outputs: list[SequenceOutput] = []
        events: list[Event] = []
        for _ in range(max_steps):
            brought = self.core.step()
            if brought is None:
                return outputs, events
            outputs += brought.outputs
            events += brought.events
        raise AssertionError("the engine does not come to rest")


def make_replica(
    path: Path,
    runner: Runner | None = None,
    *,
    wrap: Callable[[Runner], Runner] = lambda runner: runner,
    clock: Clock | None = None,
    max_num_seqs: int = 16,
    num_blocks: int = NUM_BLOCKS,
    overlaps: bool = False,
    adapters: AdapterRegister | None = None,
    weights: int = 0,
) -> Replica:
    info = ModelInfo(
        name="history",
        path=str(path),
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        fingerprint=f"weights {weights}" if weights else "",
    )
    program = HistoryProgram(vocab_size=VOCAB_SIZE, num_blocks=num_blocks, block_size=BLOCK_SIZE, salt=weights)
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=max_num_seqs, eos_token_ids=(EOS,)),
        BlockPool(num_blocks, BLOCK_SIZE),
        PrefixKeys(f"history {weights}", BLOCK_SIZE),
    )
    real = ModelRunner(program, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE)
    runner = wrap(runner or real)
    core = EngineCore(
        scheduler,
        runner,
        OutputProcessor(Tokenizer(path), info),
        model=info,
        memory=[("KV cache", num_blocks * BLOCK_SIZE)],
        clock=clock,
        ahead=StepAhead(runner) if overlaps else None,
        adapters=adapters,
    )
    return Replica(core, scheduler, program)


def build(config: EngineConfig) -> EngineCore:
    """A replica that works, and takes a millisecond per step."""
    return make_replica(
        Path(config.model), wrap=lambda r: SteppedRunner(r, step_s=0.001), max_num_seqs=config.max_num_seqs
    ).core


def build_slow(config: EngineConfig) -> EngineCore:
    """A replica that takes 50 ms per step."""
    return make_replica(Path(config.model), wrap=lambda r: SteppedRunner(r, step_s=0.05)).core


def build_wrong(config: EngineConfig) -> EngineCore:
    """A replica that computes other tokens than the others."""
    return make_replica(Path(config.model), SpeakingRunner("wrong")).core


def build_hanging(config: EngineConfig) -> EngineCore:
    """A replica that hangs for good when the trigger arrives."""
    return make_replica(
        Path(config.model), wrap=lambda r: SteppedRunner(r, before=lambda plan: _on_trigger(plan, lambda: time.sleep(600)))
    ).core


def build_poisoned(config: EngineConfig) -> EngineCore:
    """A replica that dies as soon as it computes the trigger."""
    return make_replica(
        Path(config.model), wrap=lambda r: SteppedRunner(r, step_s=0.01, before=lambda plan: _on_trigger(plan, _die))
    ).core


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def build_hanging_elsewhere(config: EngineConfig) -> EngineCore:
    """A replica that hangs for good at another place."""

    def hang_here() -> None:
        while True:
            time.sleep(600)

    return make_replica(
        Path(config.model), wrap=lambda r: SteppedRunner(r, before=lambda plan: _on_trigger(plan, hang_here))
    ).core


@dataclasses.dataclass
class SlowHost:
    """Takes `load_s` to load an adapter (protocol `AdapterHost`)."""

    load_s: float

    def load(self, name: str, path: str, note_progress: Callable[[], None]) -> AdapterInfo:
        time.sleep(self.load_s)
        return AdapterInfo(name=name, digest=name, path=path, rank=1)

    def unload(self, digest: str) -> None:
        """Nothing is kept."""


class SteadyHost(SlowHost):
    """Takes five times the patience of a watchdog for an adapter, and goes on all the time."""

    def load(self, name: str, path: str, note_progress: Callable[[], None]) -> AdapterInfo:
        for _ in range(100):
            time.sleep(0.05)
            note_progress()
        return AdapterInfo(name=name, digest="d" * 64, path=path, rank=8, created_s=0)


def build_loading_steadily(config: EngineConfig) -> EngineCore:
    """A replica that takes long to load an adapter, and goes on all the time."""
    core = build(config)
    core.adapters = AdapterRegister(SteadyHost(0.0))
    return core


def build_loading(config: EngineConfig) -> EngineCore:
    """A replica that takes three seconds to load an adapter."""
    core = build(config)
    core.adapters = AdapterRegister(SlowHost(3.0))
    return core


def build_adapting(config: EngineConfig) -> EngineCore:
    """A replica that loads an adapter at once."""
    core = build(config)
    core.adapters = AdapterRegister(SlowHost(0.0))
    return core


def build_failing(config: EngineConfig) -> EngineCore:
    """A replica whose every step fails, with the prompt in the exception's text."""

    def fail(plan: StepPlan) -> None:
        raise ValueError(f"cannot compute {[bytes(i for i in new.token_ids if i < 256) for new in plan.arrivals]}")

    return make_replica(Path(config.model), wrap=lambda r: SteppedRunner(r, before=fail)).core


def build_refusing(config: EngineConfig) -> EngineCore:
    raise MemoryBudgetError("it does not fit; set --max-model-len 7 or less")


def build_too_large(config: EngineConfig) -> EngineCore:
    error = MemoryBudgetError("it needs 4 MiB, but 1 MiB are available; raise --memory-share")
    error.fit = 0.27
    raise error


def build_broken(config: EngineConfig) -> EngineCore:
    raise RuntimeError("this is a bug")


def build_killed(config: EngineConfig) -> EngineCore:
    """A replica whose process the system ends, as it does where memory has run out."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def build_exiting(config: EngineConfig) -> EngineCore:
    """A replica whose process ends without a word."""
    os._exit(3)


def build_without_memory(config: EngineConfig) -> EngineCore:
    raise MemoryError


def build_once(config: EngineConfig) -> EngineCore:
    """A replica that starts the first time only."""
    mark = Path(config.model) / "started"
    if mark.exists():
        raise MemoryBudgetError("it does not fit any more")
    mark.touch()
    return build(config)


def build_changed(config: EngineConfig) -> EngineCore:
    """A replica that has other weights from its second start on, and takes its time for an answer."""
    mark = Path(config.model) / "started"
    core = build_slow(config)
    if mark.exists():
        core.model = msgspec.structs.replace(core.model, fingerprint="other weights")
    mark.touch()
    return core


def _on_trigger(plan: StepPlan, act: Callable[[], None]) -> None:
    if any(new.token_ids[0] == TRIGGER for new in plan.arrivals):
        act()


def texts(outputs: Sequence[SequenceOutput], request: Request) -> list[str]:
    """Returns the text of each of a request's sequences."""
    mine = [o for o in outputs if o.request_id == request.request_id]
    return ["".join(o.text for o in mine if o.index == index) for index in range(request.sampling.n)]


def ends(outputs: Sequence[SequenceOutput], request: Request) -> list[FinishReason]:
    """Returns every finish reason that a request's sequences got, in the order of index."""
    mine = sorted((o for o in outputs if o.request_id == request.request_id), key=lambda o: o.index)
    return [o.finish_reason for o in mine if o.finish_reason is not None]


def ended_events(events: Sequence[Event], request: Request) -> list[Ended]:
    return [e for e in events if isinstance(e, Ended) and e.request_id == request.request_id]


def no_outputs(_: Outputs) -> None:
    """Takes an engine's outputs and drops them."""
