"""A machine that speculates, made of a cost curve, drafters that are right so and so often, and noise; no model, no clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloister.scheduler import StepCost, StepSize
from cloister.scheduler.sequence import RequestState, SequenceRecord
from cloister.scheduler.speculation import AdaptiveSpeculation, DraftDecision, DrafterLimits, Speculation, SpeculationConfig
from cloister.types.request import Request, SamplingParams
from cloister.types.step import Sample

Curve = Callable[[float], float]


def memory_bound(rows: float) -> float:
    """30 ms for weights, and little for each row: a model of a billion parameters on a processor with a matrix unit."""
    return 0.03 + 0.0004 * rows


def staircase(rows: float) -> float:
    """As measured of a 0.5B model in int8 on one core with AMX: flat by 16 rows, with a hump at 4 where kernels change."""
    steps = 0.0385 if rows <= 2 else 0.052 if 4 <= rows < 5 else 0.044 + 0.011 * ((rows - 1) // 16)
    return steps + 0.0003 * rows


def compute_bound(rows: float) -> float:
    """A row costs nearly as much as the first one: no matrix unit."""
    return 0.004 + 0.01 * rows


def tiny(rows: float) -> float:
    """As measured of the embedded model, with 0.1 ms of overhead for verification."""
    return (0.00043 + 0.00001 * rows) if rows <= 32 else 0.00075 + 0.00002 * (rows - 32)


SEARCH_S = (0.0, 0.0, 0.0, 1e-5)
"""What a search in the text takes, for each sequence."""
CURVES: Mapping[str, Curve] = {
    "memory": memory_bound,
    "staircase": staircase,
    "compute": compute_bound,
    "tiny": tiny,
}


@dataclass(frozen=True)
class Pattern:
    """How often drafts are right.

    Attributes:
        rates: for each phase: how often a draft is accepted where the one before it was.
        found: for each phase: how often the drafter has an idea.
        phase_tokens: after so many tokens of an answer the next phase begins.
    """

    rates: tuple[float, ...]
    found: tuple[float, ...] = (1.0,)
    phase_tokens: int = 10**9

    def phase(self, num_output: int) -> int:
        return num_output // self.phase_tokens % len(self.rates)


@dataclass(frozen=True)
class Drafting:
    """A drafter: what it is worth, and what asking takes: (a call, each draft in a row, each draft, each sequence)."""

    pattern: Pattern
    costs: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 1e-5)
    max_drafts: int = 8
    watches: bool = False

    def seconds(self, num_sequences: int, sizes: list[int]) -> float:
        call, in_row, each, sequence = self.costs
        return call + in_row * max(sizes) + each * sum(sizes) + sequence * num_sequences if sizes else 0.0


@dataclass
class Machine:
    """Runs a batch of endless requests under a `Speculation`.

    Attributes:
        noise: spread of step times; one in a hundred takes four times as long.
        held_up: part of steps that take far longer, as on a machine with more programs than cores.
        verify_s: what verification costs beside rows, once a step.
        cold_s: what the first step with drafts takes besides.
        prompt, answer: tokens of each request.
    """

    curve: Curve
    drafters: Mapping[str, Drafting]
    speculation: Speculation | None
    batch: int
    noise: float = 0.05
    held_up: float = 0.0
    verify_s: float = 0.0
    cold_s: float = 0.0
    key_s: float = 0.0
    prompt: int = 100
    answer: int = 300
    seed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cost: StepCost = field(default_factory=StepCost)
    num_asked: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.numbers = iter(range(10**9))
        self.running = [self._arrive(first=True) for _ in range(self.batch)]

    def limits(self) -> dict[str, DrafterLimits]:
        return {name: DrafterLimits(d.max_drafts, None, d.watches) for name, d in self.drafters.items()}

    def run(self, num_steps: int) -> float:
        """Returns tokens per second."""
        for _ in range(num_steps):
            self.step()
        return self.tokens / self.seconds

    def step(self) -> None:
        size = StepSize()
        for sequence in self.running:
            size = size.plus(sequence.num_planned, 1)
        choices = [DraftDecision()] * self.batch
        if self.speculation is not None:
            choices = self.speculation.choose(self.running, self.cost, size, 2048 - self.batch)
        assert len(choices) == self.batch
        samples: list[Sample] = []
        asked: dict[str, list[int]] = {}
        for sequence, choice in zip(self.running, choices, strict=True):
            num = min(choice.num_drafts, sequence.max_drafts)
            samples.append(self._draft(sequence, choice.drafter, num, choice.is_watched))
            if num:
                asked.setdefault(choice.drafter, []).append(num)
        num_drafted = sum(sample.num_drafted for sample in samples)
        size = StepSize()
        for sequence, sample in zip(self.running, samples, strict=True):
            size = size.plus(sequence.num_planned, 1 + sample.num_drafted)
        elapsed_s = self.curve(size.num_tokens) + self.key_s * size.num_read + (self.verify_s if num_drafted else 0.0)
        true_draft_s = {name: self.drafters[name].seconds(len(sizes), sizes) for name, sizes in asked.items()}
        if num_drafted:
            elapsed_s, self.cold_s = elapsed_s + self.cold_s, 0.0
        self.seconds += elapsed_s + sum(true_draft_s.values())  # noise misleads who learns, not who judges
        elapsed_s *= self._noise()
        draft_s = {name: seconds * self._noise() for name, seconds in true_draft_s.items()}
        self.num_asked += sum(map(sum, asked.values()))
        self.cost.learn(size, elapsed_s)
        if self.speculation is not None:
            for sequence, choice, sample in zip(self.running, choices, samples, strict=True):
                if choice.num_drafts:
                    self.speculation.learn(
                        sequence, choice._replace(num_drafts=min(choice.num_drafts, sequence.max_drafts)), sample
                    )
            calls = {name: (len(sizes), sum(sizes)) for name, sizes in asked.items()}
            self.speculation.learn_step(size, num_drafted, elapsed_s, calls, draft_s)
        for place, (sequence, sample) in enumerate(zip(self.running, samples, strict=True)):
            self.tokens += len(sample.token_ids)
            sequence.token_ids += sample.token_ids
            sequence.num_planned += len(sample.token_ids)
            if sequence.num_output >= sequence.max_output:
                self.running[place] = self._arrive()
        self.watched = {s.seq_id for s, c in zip(self.running, choices, strict=True) if c.is_watched}

    watched: set[int] = field(default_factory=set)

    def _noise(self) -> float:
        spike = 4.0 if self.noise and self.chance.random() < 0.01 else 1.0
        if self.chance.random() < self.held_up:
            spike = self.chance.uniform(5.0, 40.0)
        return spike * self.chance.lognormvariate(0.0, self.noise)

    def _draft(self, sequence: SequenceRecord, name: str, num: int, is_watched: bool) -> Sample:
        if not num:
            return Sample(sequence.seq_id, [0])
        drafting = self.drafters[name]
        phase = drafting.pattern.phase(sequence.num_output)
        found = drafting.pattern.found[phase % len(drafting.pattern.found)]
        if drafting.watches and sequence.seq_id not in self.watched and sequence.num_output > 1:
            found = 0.0
        if self.chance.random() >= found:
            return Sample(sequence.seq_id, [0])
        accepted = 0
        while accepted < num and self.chance.random() < drafting.pattern.rates[phase]:
            accepted += 1
        return Sample(sequence.seq_id, [0] * (accepted + 1), None, num, tuple(range(accepted)))

    def _arrive(self, first: bool = False) -> SequenceRecord:
        """A new request, whose prompt was computed (and timed, as an engine does)."""
        number = next(self.numbers)
        answer = self.chance.randint(1, self.answer) if first else self.answer
        params = SamplingParams(max_tokens=answer)
        request = Request(request_id=str(number), token_ids=[0] * self.prompt, sampling=params)
        state = RequestState(request, now=0.0, order=number, seed=0, root=b"")
        sequence = SequenceRecord(number, state, 0, [0] * (self.prompt + 1), answer)
        sequence.num_planned = self.prompt
        size = StepSize().plus(0, self.prompt)
        self.cost.learn(size, self.curve(self.prompt) + self.key_s * self.prompt)
        return sequence


def expected_rate(machine: Machine, name: str, num_drafts: int, phase: int) -> float:
    """Returns the tokens per second of a fixed choice while a phase lasts, as they are on average."""
    batch = machine.batch
    keys_s = machine.key_s * batch * (machine.prompt + machine.answer / 2)
    plain_s = machine.curve(batch) + keys_s
    if not num_drafts:
        return batch / plain_s
    drafting = machine.drafters[name]
    rate = drafting.pattern.rates[phase % len(drafting.pattern.rates)]
    found = drafting.pattern.found[phase % len(drafting.pattern.found)]
    tokens = batch * (1 + found * sum(rate ** (place + 1) for place in range(num_drafts)))
    seconds = drafting.seconds(batch, [num_drafts] * batch) + keys_s
    chances = [1.0]
    for _ in range(batch):  # how many sequences find drafts
        chances = [
            (chances[i] if i < len(chances) else 0.0) * (1 - found) + (chances[i - 1] * found if i else 0.0)
            for i in range(len(chances) + 1)
        ]
    for num, chance in enumerate(chances):
        seconds += chance * (machine.curve(batch + num * num_drafts) + (machine.verify_s if num else 0.0))
    return tokens / seconds


def model_costs(curve: str) -> tuple[float, float, float, float]:
    """A draft model: an eighth of the model's own step for each draft in a row."""
    step_s = CURVES[curve](1)
    return (0.02 * step_s, 0.12 * step_s, 0.0, 0.0)


def machine(curve: str, batch: int, drafters: dict[str, Drafting], *, shares_rates: bool = False, **more: Any) -> Machine:
    """Returns a machine whose speculation adapts."""
    limits = {name: DrafterLimits(d.max_drafts, None, d.watches) for name, d in drafters.items()}
    speculation = AdaptiveSpeculation(SpeculationConfig(shares_rates=shares_rates), limits)
    return Machine(CURVES[curve], drafters, speculation, batch, verify_s=1e-4, **more)


def speed_up(made: Machine, num_steps: int) -> float:
    """Tokens per second over those of the same machine without drafts."""
    plain = Machine(made.curve, made.drafters, None, made.batch, key_s=made.key_s, answer=made.answer, seed=made.seed)
    return made.run(num_steps) / plain.run(num_steps)


def best_fixed(made: Machine) -> float:
    """The most that any drafter with any fixed length brings, for drafters that do not change."""
    choices = [expected_rate(made, name, num, 0) for name, d in made.drafters.items() for num in range(d.max_drafts + 1)]
    return max(choices) / expected_rate(made, next(iter(made.drafters)), 0, 0)
