"""The engine of a virtual cluster: scheduler, runner and output processing around a program without weights."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Final

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cloister.cluster.virtual.adapters import list_adapters, open_adapters
from cloister.cluster.virtual.byte_tokenizer import EOS, VOCAB_SIZE
from cloister.cluster.virtual.drafts import DRAFTER, ForesightDrafter, RandomSpeculation
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.cluster.virtual.history_program import HistoryProgram
from cloister.cluster.virtual.kv_links import FREE_LINKS, LinkCosts
from cloister.cluster.virtual.threads import VirtualThread, at_once
from cloister.cluster.virtual.tier_threads import VirtualPool, VirtualTierThreads
from cloister.engine.core import EngineCore
from cloister.engine.kv_pool import PoolSeat
from cloister.engine.kv_tier_files import TierFile
from cloister.engine.kv_tiers import TierMachine
from cloister.engine.kv_transfer import KVBlocks
from cloister.engine.output_processor import OutputProcessor
from cloister.executor import Grammars, ModelRunner
from cloister.executor.adapters import AdapterSlots
from cloister.executor.drafters import Drafter
from cloister.executor.grammar_memory import LEAST_BYTES, GrammarMemory, NoMeter
from cloister.kv import BlockPool, KVFormat, PrefixKeys
from cloister.kv.tier_slots import TierBlock
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.scheduler.speculation import Speculation
from cloister.text import Tokenizer
from cloister.text.grammar import GrammarCompiler
from cloister.types.clock import Clock
from cloister.types.request import ModelInfo, SamplingParams
from cloister.types.step import StepPlan, StepResult

_GRAMMARS_BYTES: Final = 2 * LEAST_BYTES
"""Of compiled grammars: one of each tenant, so that others wait for memory."""
SLOT_KIB: Final = 4
"""Size of a slot of a tier: whole pages (`kv.tier_slots.TierLayout.slot_bytes`)."""


class EngineDeath(BaseException):
    """A request kills the engine's process; nothing in the engine may catch this."""


class EngineClock:
    """The clock of an engine's machine: the event loop's time plus an offset and the time of steps that the loop has yet to
    spend."""

    def __init__(self, clock: Clock, offset_s: float = 0.0) -> None:
        self.ahead_s = 0.0
        self._clock = clock
        self._offset_s = offset_s

    def now(self) -> float:
        return self._clock.now() + self.ahead_s + self._offset_s


class TimedRunner:
    """Runs plans, and lets virtual time pass.

    Attributes:
        slowness: factor on the time of steps.
        num_failing: number of next steps that fail.
        kills_after: prompts that kill the engine -> the step of theirs in which they do.
    """

    def __init__(self, runner: ModelRunner, clock: EngineClock, shape: EngineShape) -> None:
        self.slowness = 1.0
        self.num_failing = 0
        self.kills_after: dict[bytes, int] = {}
        self._steps_left: dict[int, int] = {}
        self._processed: set[int] = set()
        self._runner, self._clock, self._shape = runner, clock, shape

    def run(self, plan: StepPlan) -> StepResult:
        """Runs a plan (`engine.core.Runner`). Raises OSError if the step is to fail, EngineDeath if it kills."""
        sampling_s = self.slowness * self._shape.process_s * self._count_processed(plan) if self._shape.process_s else 0.0
        elapsed_s = self.slowness * self._shape.step_time_s(plan) + sampling_s
        self._clock.ahead_s += elapsed_s
        if self.kills_after:
            self._count_down(plan)
        if self.num_failing:
            self.num_failing -= 1
            raise OSError("a step that was to fail")
        result = self._runner.run(plan)
        result.elapsed_s, result.sampling_s = elapsed_s, sampling_s
        return result

    def _count_processed(self, plan: StepPlan) -> int:
        """Returns the samples of a step whose logits are processed on the host."""
        self._processed -= set(plan.departures)
        self._processed |= {new.seq_id for new in plan.arrivals if _is_processed(new.sampling)}
        self._processed |= {fork.child_id for fork in plan.forks if fork.parent_id in self._processed}
        parts = sum(part.num_samples for part in plan.sequences if part.seq_id in self._processed)
        return parts + sum(fork.child_id in self._processed for fork in plan.forks)

    def _count_down(self, plan: StepPlan) -> None:
        for new in plan.arrivals:
            prompt = bytes(token_id for token_id in new.token_ids[: new.num_prompt_tokens] if token_id != EOS)
            if prompt in self.kills_after:
                self._steps_left[new.seq_id] = self.kills_after[prompt]
        for part in plan.sequences:
            if part.seq_id in self._steps_left:
                self._steps_left[part.seq_id] -= 1
                if not self._steps_left[part.seq_id]:
                    raise EngineDeath


def _is_processed(sampling: SamplingParams) -> bool:
    """Whether a request needs logits on the host (`executor.generation`)."""
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return sampling.logprobs is not None or bool(sampling.logit_bias) or penalties != (1.0, 0.0, 0.0)


@dataclass
class VirtualEngine:
    """One engine and its parts."""

    core: EngineCore
    scheduler: Scheduler
    runner: TimedRunner
    clock: EngineClock
    links: LinkCosts = FREE_LINKS
    tier_threads: VirtualTierThreads | None = None
    leave_pool: Callable[[], None] = lambda: None

    def num_tier_reads(self) -> int:
        """Reads from its tiers that have not ended."""
        return 0 if self.tier_threads is None else self.tier_threads.num_open


@cache
def _make_compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))


def _make_grammars(shape: EngineShape, tokenizer: Tokenizer, draw: random.Random | None) -> Grammars:
    memory = GrammarMemory(_GRAMMARS_BYTES, NoMeter())
    if draw is None or not shape.helper_s:
        return Grammars(_make_compiler(tokenizer), at_once, memory)
    takes_s = {"cloister-compile": shape.helper_s, "cloister-grammar": shape.helper_s / 10}
    return Grammars(_make_compiler(tokenizer), lambda name: VirtualThread(lambda: draw.random() * takes_s[name]), memory)


def _open_tiers(
    core: EngineCore, shape: EngineShape, draw: random.Random, clock: Clock, pool: VirtualPool | None, seat: PoolSeat | None
) -> VirtualTierThreads:
    made: list[VirtualTierThreads] = []

    def make_threads(
        files: Sequence[TierFile], form: KVFormat, find_cipher: Callable[[TierBlock], AESGCM | None], _: object
    ) -> VirtualTierThreads:
        damages = shape.damages_tiers
        made.append(VirtualTierThreads(files, form, find_cipher, lambda: core.input_queue.wake(), draw, damages, pool))
        return made[0]

    places = ("host:" if shape.pool == "none" else f"{shape.pool}:", f"disk:{tempfile.gettempdir()},")
    setting = "+".join(
        f"{place}{num_slots * SLOT_KIB}K" for place, num_slots in zip(places, shape.tiers, strict=True) if num_slots
    )
    place = None if pool is None or seat is None else (os.dup(pool.memory.fd), seat)
    core.open_kv_tiers(setting, place, machine=TierMachine(make_threads, clock.now, clock.now, draw.randbytes))
    return made[0]


def _make_model(shape: EngineShape) -> ModelInfo:
    return ModelInfo(
        name="history",
        path="",
        max_model_len=shape.max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        fingerprint=shape.fingerprint,
    )


def _make_scheduler(shape: EngineShape, speculation: Speculation | None) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_model_len=shape.max_model_len,
            max_num_seqs=shape.max_num_seqs,
            policy=shape.policy,
            budget=BudgetConfig(shape.max_batched_tokens, floor_s=shape.stall_floor_s),
            eos_token_ids=(EOS,),
        ),
        BlockPool(shape.num_blocks, shape.block_size),
        PrefixKeys(shape.fingerprint, shape.block_size),
        speculation,
    )


def _make_runner(
    shape: EngineShape,
    program: HistoryProgram,
    clock: EngineClock,
    adapters: AdapterSlots,
    grammars: Grammars,
    draw: random.Random | None,
) -> ModelRunner:
    """Returns a runner; with a drafter if `draw` and the shape say so."""
    drafters: dict[str, Drafter] = {}
    if draw is not None and shape.drafts != "none":
        drafters[DRAFTER] = ForesightDrafter(
            lambda state: program.look(state.tokens, state.adapter),
            lambda states, rows: runner.sampling_metadata(states, rows),
            VOCAB_SIZE,
            draw,
            has_trees=shape.drafts == "tree",
        )
    runner = ModelRunner(
        program,
        vocab_size=VOCAB_SIZE,
        max_model_len=shape.max_model_len,
        block_size=shape.block_size,
        clock=clock,
        adapters=adapters.slots,
        grammars=grammars,
        drafters=drafters,
    )
    return runner


def make_engine(
    shape: EngineShape,
    tokenizer: Tokenizer,
    clock: Clock,
    offset_s: float = 0.0,
    draw: random.Random | None = None,
    lora: str | None = None,
    pool: VirtualPool | None = None,
) -> VirtualEngine:
    """Returns an engine with a program without weights. Its clock is `offset_s` ahead of `clock`.

    Args:
        draw: decides what its helper threads and its drafter do; None: it has no drafter, and its threads take no time.
        lora: its adapters, as the setting of this name; None: those of its shape.
        pool: that it shares with other engines; None: it has none.
    """
    model = _make_model(shape)
    own = EngineClock(clock, offset_s)
    program = HistoryProgram(
        vocab_size=VOCAB_SIZE, num_blocks=shape.num_blocks, block_size=shape.block_size, salt=shape.weights
    )
    slots, adapters = open_adapters(program, list_adapters(shape.num_adapters) if lora is None else lora)
    grammars = _make_grammars(shape, tokenizer, draw)
    timed = TimedRunner(_make_runner(shape, program, own, slots, grammars, draw), own, shape)
    scheduler = _make_scheduler(shape, RandomSpeculation(draw) if draw is not None and shape.drafts != "none" else None)
    (empty,) = program.export_blocks([0])
    form = KVFormat(model.fingerprint, shape.block_size, "one group", (len(empty),))
    core = EngineCore(
        scheduler,
        timed,
        OutputProcessor(tokenizer, model),
        model=model,
        memory=[],
        clock=own,
        adapters=adapters,
        grammars=grammars,
        kv_blocks=KVBlocks(form, program.export_blocks),
    )
    engine = VirtualEngine(core, scheduler, timed, own, shape.links)
    if draw is not None and any(shape.tiers):
        seat = None if pool is None else pool.memory.take_seat()
        engine.tier_threads = _open_tiers(core, shape, draw, own, pool, seat)
        if pool is not None and seat is not None:
            engine.leave_pool = partial(pool.memory.free_seat, seat)
    return engine
