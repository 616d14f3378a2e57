"""A model that computes nothing: what a step of it costs is our own cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from cloister.backends.base import (
    Capability,
    FloatArray,
    ForwardBatch,
    IntArray,
    Program,
    SamplingMetadata,
    StepOutput,
    Wants,
)
from cloister.engine.core import EngineCore
from cloister.engine.output_processor import OutputProcessor
from cloister.engine.step_ahead import StepAhead
from cloister.executor import ModelRunner
from cloister.kv import BlockPool, PrefixKeys
from cloister.models import locate
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.text import Tokenizer
from cloister.types.clock import Clock
from cloister.types.request import ModelInfo

EAGER = 1e6
"""A `max_stall` that lets every prompt in at once: decode steps are what is looked at."""
_MODEL = "cloister-5m"
_FIRST_TOKEN = 100
_MAX_TOKENS = 4096
_BLOCK_SIZE = 16


class IdleProgram(Program):
    """Gives every row the same logits that it gave it before; row i's most likely token is 100 + i % 100.

    Args:
        max_rows: rows of logits of a step at most.
        step_s: how long a step takes, asleep.

    Attributes:
        num_calls: how often it was called, for whatever.
    """

    def __init__(self, vocab_size: int, max_rows: int, step_s: float = 0.0) -> None:
        self._best = (_FIRST_TOKEN + np.arange(max_rows) % 100).astype(np.int32)
        self._logits = np.random.default_rng(0).standard_normal((max_rows, vocab_size), np.float32)
        self._logits[np.arange(max_rows), self._best] = 50.0
        self._step_s = step_s
        self.num_calls = 0

    def step(self, batch: ForwardBatch, wants: Wants) -> StepOutput:
        self.num_calls += 1
        if self._step_s:
            time.sleep(self._step_s)
        if wants.sampling is not None:
            return StepOutput(tokens=self._best[wants.sampling["row"]])
        num_rows = batch.logit_rows.size
        return StepOutput(tokens=self._best[:num_rows]) if wants.greedy else StepOutput(logits=self._logits[:num_rows])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.num_calls += 1

    def wipe_blocks(self, block_ids: Sequence[int]) -> None:
        self.num_calls += 1


class IdleGreedyProgram(IdleProgram):
    """An idle program that knows its most likely tokens itself, as a native one does."""

    capabilities = Capability.GREEDY


class IdleDrawingProgram(IdleGreedyProgram):
    """An idle program that samples tokens itself, as a native one does; always the same ones."""

    capabilities = Capability.GREEDY | Capability.SAMPLING

    def sample(self, logits: FloatArray, sampling: SamplingMetadata) -> IntArray:
        tokens: IntArray = self._best[sampling["row"]]
        return tokens


class IdleDeviceProgram(IdleGreedyProgram):
    """An idle program on another device, which is done `step_s` after a step was launched, whatever the host does meanwhile."""

    capabilities = Capability.GREEDY | Capability.ASYNCHRONOUS

    def launch(self, batch: ForwardBatch, wants: Wants) -> Callable[[], StepOutput]:
        self.num_calls += 1
        done_s = time.perf_counter() + self._step_s
        return partial(self._wait, done_s, batch.logit_rows.size)

    def _wait(self, done_s: float, num_rows: int) -> StepOutput:
        while (left_s := done_s - time.perf_counter()) > 0:
            if left_s > 2e-4:  # a sleep ends late by as much on a busy machine
                time.sleep(left_s - 2e-4)
        return StepOutput(tokens=self._best[:num_rows])


@dataclass(frozen=True, slots=True)
class IdleEngine:
    """A whole engine around a program, and its parts."""

    core: EngineCore
    scheduler: Scheduler
    runner: ModelRunner
    output: OutputProcessor


def make_idle_engine(
    program: Program, *, vocab_size: int, num_seqs: int, overlaps: bool = False, clock: Clock | None = None
) -> IdleEngine:
    """Returns an engine with the embedded model's tokenizer, and room for 4,096 tokens in each of `num_seqs` sequences."""
    path = locate(_MODEL)
    info = ModelInfo(name="idle", path=str(path), max_model_len=_MAX_TOKENS, vocab_size=vocab_size, eos_token_ids=(0,))
    config = SchedulerConfig(
        _MAX_TOKENS, max_num_seqs=num_seqs, eos_token_ids=info.eos_token_ids, budget=BudgetConfig(max_stall=EAGER)
    )
    pool = BlockPool(num_seqs * _MAX_TOKENS // _BLOCK_SIZE, _BLOCK_SIZE)
    scheduler = Scheduler(config, pool, PrefixKeys("idle", _BLOCK_SIZE))
    runner = ModelRunner(program, vocab_size=vocab_size, max_model_len=_MAX_TOKENS, block_size=_BLOCK_SIZE, clock=clock)
    output = OutputProcessor(Tokenizer(path), info)
    ahead = StepAhead(runner) if overlaps else None
    core = EngineCore(scheduler, runner, output, model=info, memory=[], clock=clock, ahead=ahead)
    return IdleEngine(core, scheduler, runner, output)
