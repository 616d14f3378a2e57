"""The engine of a virtual cluster: scheduler, runner and output processing around a program without weights."""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final, Literal

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, pre_tokenizers

from cloister.cluster.virtual.drafts import DRAFTER, DraftKind, ErraticSpeculation, ForesightDrafter
from cloister.cluster.virtual.history_program import HistoryProgram, make_adapter
from cloister.cluster.virtual.kv_links import FREE_LINKS, LinkCosts
from cloister.cluster.virtual.threads import VirtualThread, at_once
from cloister.cluster.virtual.tier_threads import VirtualPool, VirtualTierThreads
from cloister.engine.adapters import AdapterRegister
from cloister.engine.core import EngineCore
from cloister.engine.kv_pool import PoolSeat
from cloister.engine.kv_tier_files import TierFile
from cloister.engine.kv_tiers import TierMachine
from cloister.engine.kv_transfer import KVBlocks
from cloister.engine.output_processor import OutputProcessor
from cloister.executor import Grammars, ModelRunner
from cloister.executor.adapters import AdapterSlots
from cloister.executor.drafters import Drafter
from cloister.kv import BlockPool, KVFormat, PrefixKeys
from cloister.kv.tier_slots import TierBlock
from cloister.models.adapters import Adapter
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.scheduler.speculation import Speculation
from cloister.text import Tokenizer
from cloister.text.grammar import GrammarCompiler
from cloister.types.clock import Clock
from cloister.types.config import parse_adapters
from cloister.types.request import ModelInfo
from cloister.types.step import StepPlan, StepResult

PoolKind = Literal["none", "shared", "peer"]
EOS: Final = 256
VOCAB_SIZE: Final = 257
"""A token for each byte, and one that ends an answer."""
SLOT_KIB: Final = 4
"""Size of a slot of a tier: whole pages (`kv.tier_slots.TierLayout.slot_bytes`)."""
NUM_SLOTS: Final = 3
"""Adapters that an engine can have at a time."""


def write_byte_tokenizer(folder: Path) -> Path:
    """Writes a tokenizer with a token for each byte, whose id is the byte, and `<eos>`; returns the folder."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Encoder(models.BPE({letter: _byte_of(letter) for letter in letters}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _byte_of(letter: str) -> int:
    """GPT-2's byte-level alphabet: printable bytes are themselves, the others follow from U+0100 on."""
    if ord(letter) < 0x100:
        return ord(letter)
    others = [b for b in range(256) if not (0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or 0xAE <= b <= 0xFF)]
    return others[ord(letter) - 0x100]


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The sizes of an engine, and the times of its steps.

    Attributes:
        stall_floor_s: a step up to this time is short enough for any stream (`scheduler.budget.BudgetConfig.floor_s`).
        step_s, token_s, sample_s, key_s, read_s: a step takes `step_s`, and that much more for each of its tokens and samples,
            for each key that a token of a prompt attends to, and for each key that an answer's next token reads.
        arrival_s, load_s: that much more for each sequence that comes, and for each block of KV that comes from another engine.
        links: what its links to other engines take, beside its steps.
        curve: points (tokens of a step, seconds), by rising tokens: that much more, on the line between two points; beyond the
            last one, on the line through the last two. Few tokens take as long as the weights take to be read, and kernels are
            faster with many, so time is not proportional to them.
        start_s: from the start of its process until it is ready.
        weights: 0, or others: an engine of them says something else.
        policy: in which order its scheduler computes requests.
        num_adapters: so many adapters are loaded when it starts.
        drafts: what its drafter makes, if it has one.
        helper_s: compiling a grammar takes up to this time beside its steps, and a mask a tenth of it.
        tiers: slots of its KV tiers in memory and on disk; 0 for none.
        damages_tiers: share of what goes wrong there (`virtual.tier_threads`).
        pool: the tier in memory is one that engines share, or in which they lend each other slots.
    """

    num_blocks: int = 64
    block_size: int = 8
    max_num_seqs: int = 8
    max_waiting: int = 16
    max_model_len: int = 256
    max_batched_tokens: int = 64
    stall_floor_s: float = 0.0
    step_s: float = 0.01
    token_s: float = 0.0002
    sample_s: float = 0.0
    key_s: float = 0.0
    read_s: float = 0.0
    arrival_s: float = 0.0
    load_s: float = 0.0
    links: LinkCosts = FREE_LINKS
    curve: tuple[tuple[int, float], ...] = ()
    start_s: float = 0.5
    weights: int = 0
    policy: str = "fcfs"
    num_adapters: int = 0
    drafts: DraftKind = "none"
    helper_s: float = 0.0
    tiers: tuple[int, int] = (0, 0)
    damages_tiers: float = 0.0
    pool: PoolKind = "none"

    @property
    def fingerprint(self) -> str:
        """Of the weights."""
        return f"history {self.weights}"

    def step_time_s(self, plan: StepPlan) -> float:
        """Returns the seconds that a step takes."""
        elapsed_s = self.step_s + self.token_s * plan.num_tokens + self.sample_s * len(plan.forks)
        elapsed_s += self.arrival_s * len(plan.arrivals) + self.load_s * len(plan.loads)
        elapsed_s += interpolate(self.curve, plan.num_tokens)
        for part in plan.sequences:
            num_attended = part.num_tokens * (part.start + (part.num_tokens + 1) / 2)
            is_prompt = part.num_tokens > 1 or not part.num_samples
            elapsed_s += self.sample_s * part.num_samples + (self.key_s if is_prompt else self.read_s) * num_attended
        return elapsed_s


def interpolate(curve: Sequence[tuple[int, float]], num_tokens: int) -> float:
    """Returns the seconds of so many tokens on a curve (`EngineShape.curve`); 0 without points."""
    if not curve:
        return 0.0
    if len(curve) == 1:
        return curve[0][1]
    end = min(max(1, bisect_left(curve, num_tokens, key=lambda point: point[0])), len(curve) - 1)
    (before, before_s), (after, after_s) = curve[end - 1 : end + 1]
    return max(0.0, before_s + (after_s - before_s) * (num_tokens - before) / (after - before))


class EngineDeath(BaseException):
    """The process of an engine dies of a request, so nothing in it may catch this."""


class EngineClock:
    """The clock of an engine's machine: that of the event loop and an offset, and what the steps since then have taken."""

    def __init__(self, clock: Clock, offset_s: float = 0.0) -> None:
        self.ahead_s = 0.0
        self._clock = clock
        self._offset_s = offset_s

    def now(self) -> float:
        return self._clock.now() + self.ahead_s + self._offset_s


class TimedRunner:
    """Runs plans, and lets virtual time pass.

    Attributes:
        slowness: steps take so many times as long.
        num_failing: so many of the next steps fail.
        kills_after: prompts that kill the engine, and in which of their steps.
    """

    def __init__(self, runner: ModelRunner, clock: EngineClock, shape: EngineShape) -> None:
        self.slowness = 1.0
        self.num_failing = 0
        self.kills_after: dict[bytes, int] = {}
        self._steps_left: dict[int, int] = {}
        self._runner, self._clock, self._shape = runner, clock, shape

    def run(self, plan: StepPlan) -> StepResult:
        """Runs a plan (`engine.core.Runner`). Raises OSError if the step is to fail, EngineDeath if it kills."""
        elapsed_s = self.slowness * self._shape.step_time_s(plan)
        self._clock.ahead_s += elapsed_s
        if self.kills_after:
            self._count_down(plan)
        if self.num_failing:
            self.num_failing -= 1
            raise OSError("a step that was to fail")
        result = self._runner.run(plan)
        result.elapsed_s = elapsed_s
        return result

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


@dataclass
class VirtualEngine:
    """One engine and what it is made of."""

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


def digest_of(number: int) -> str:
    """Returns the digest of an adapter."""
    return hashlib.sha256(b"adapter %d" % number).hexdigest()


def name_of(number: int) -> str:
    """Returns the name of an adapter."""
    return f"a{number}"


def list_adapters(count: int) -> str:
    """Returns the setting `lora` of the first adapters: the path of each is its number."""
    return ",".join(f"{name_of(number)}={number}" for number in range(1, count + 1))


def _read_adapter(path: Path, _: Callable[[], None]) -> Adapter:
    return Adapter(make_adapter(int(path.name)), digest_of(int(path.name)))


def _open_adapters(program: HistoryProgram, lora: str) -> tuple[AdapterSlots, AdapterRegister]:
    slots = AdapterSlots(program, _read_adapter, NUM_SLOTS)
    return slots, AdapterRegister(slots, [slots.load(name, path) for name, path in parse_adapters(lora)])


@cache
def _make_compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))


def _make_grammars(shape: EngineShape, tokenizer: Tokenizer, draw: random.Random | None) -> Grammars:
    if draw is None or not shape.helper_s:
        return Grammars(_make_compiler(tokenizer), at_once)
    takes_s = {"cloister-compile": shape.helper_s, "cloister-grammar": shape.helper_s / 10}
    return Grammars(_make_compiler(tokenizer), lambda name: VirtualThread(lambda: draw.random() * takes_s[name]))


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


def make_engine(
    shape: EngineShape,
    tokenizer: Tokenizer,
    clock: Clock,
    offset_s: float = 0.0,
    draw: random.Random | None = None,
    lora: str | None = None,
    pool: VirtualPool | None = None,
) -> VirtualEngine:
    """Returns an engine that computes nothing but which token follows. Its clock is `offset_s` ahead of `clock`.

    Args:
        draw: decides what its helper threads and its drafter do; None: it has no drafter, and its threads take no time.
        lora: its adapters, as the setting of this name; None: those of its shape.
        pool: that it shares with other engines; None: it has none.
    """
    model = ModelInfo(
        name="history",
        path="",
        max_model_len=shape.max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        fingerprint=shape.fingerprint,
    )
    own = EngineClock(clock, offset_s)
    program = HistoryProgram(
        vocab_size=VOCAB_SIZE, num_blocks=shape.num_blocks, block_size=shape.block_size, salt=shape.weights
    )
    slots, adapters = _open_adapters(program, list_adapters(shape.num_adapters) if lora is None else lora)
    grammars = _make_grammars(shape, tokenizer, draw)
    drafters: dict[str, Drafter] = {}
    speculation: Speculation | None = None
    if draw is not None and shape.drafts != "none":
        drafters[DRAFTER] = ForesightDrafter(
            lambda state: program.look(state.tokens, state.adapter),
            lambda states, rows: runner.sampling_metadata(states, rows),
            VOCAB_SIZE,
            draw,
            has_trees=shape.drafts == "tree",
        )
        speculation = ErraticSpeculation(draw)
    runner = ModelRunner(
        program,
        vocab_size=VOCAB_SIZE,
        max_model_len=shape.max_model_len,
        block_size=shape.block_size,
        clock=own,
        adapters=slots.slots,
        grammars=grammars,
        drafters=drafters,
    )
    timed = TimedRunner(runner, own, shape)
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=shape.max_model_len,
            max_num_seqs=shape.max_num_seqs,
            policy=shape.policy,
            budget=BudgetConfig(shape.max_batched_tokens, floor_s=shape.stall_floor_s),
            eos_token_ids=(EOS,),
        ),
        BlockPool(shape.num_blocks, shape.block_size),
        PrefixKeys(model.fingerprint, shape.block_size),
        speculation,
    )
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
