"""A tiny model of which every probability is known, and drafts verified for it by the real scheduler, runner and program.

Its twelve tokens are small enough for the oracle to enumerate what an answer may be, so that what is drawn is compared with the
distribution itself and not with other draws.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy.special import chdtrc  # `scipy.stats` takes half a second to import

from cloister.backends import BACKENDS
from cloister.backends.base import Capability, KVLayout, Program
from cloister.executor import Grammars, ModelRunner
from cloister.executor.drafters import Drafter, DrafterContext
from cloister.executor.drafters.head_runner import make_head_runner
from cloister.kv import BlockPool, PrefixKeys
from cloister.launch.drafters import MtpLayer
from cloister.models import LoadedModel, load
from cloister.models.safetensors import read_header, write_tensors
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.scheduler.sequence import SequenceRecord
from cloister.scheduler.speculation import DraftDecision
from cloister.scheduler.step_cost import StepCost, StepSize
from cloister.text import Tokenizer
from cloister.text.grammar import GrammarCompiler
from cloister.types.clock import Clock
from cloister.types.events import Ended, Preempted
from cloister.types.request import Grammar, GrammarKind, Request, SamplingParams
from cloister.types.step import Sample, Stop
from tests.driving import Driver, build_from
from tests.model_factory import make_model

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

LETTERS: Final = "abcdefghij"
VOCAB: Final = 2 + len(LETTERS)
"""Two tokens end a text, then a token for each letter."""
EOS: Final = (0, 1)
PROMPT: Final = (3, 7, 5, 3, 7, 5, 3, 7)
STRING: Final = 3
MAX_MODEL_LEN: Final = 256
BLOCK_SIZE: Final = 4
_FEWEST_EXPECTED: Final = 5.0
"""Cells that expect fewer counts are joined: the usual condition of the chi-square test."""


# The model


def make_tiny(directory: Path, seed: int = 0) -> Path:
    """Writes a random model of `VOCAB` tokens that spells letters."""
    make_model(directory, "llama", seed=seed, vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    spelling = {"<|endoftext|>": 0, "<|end|>": 1, **{letter: 2 + i for i, letter in enumerate(LETTERS)}}
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"] |= {"vocab": spelling, "merges": []}
    tokenizer["added_tokens"] = [entry for entry in tokenizer["added_tokens"] if entry["id"] in EOS]
    path.write_text(json.dumps(tokenizer))
    return directory


def make_like(directory: Path, source: Path, distance: float, seed: int = 0) -> Path:
    """Writes a model whose weights differ from another one's by noise of `distance` times their size: a draft of it."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        (directory / path.name).write_bytes(path.read_bytes())
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, entry in read_header(source / "model.safetensors").items():
        values = np.array(entry.read(), np.float32)
        tensors[name] = values + rng.standard_normal(values.shape, np.float32) * np.float32(distance * values.std())
    write_tensors(directory / "model.safetensors", tensors)
    return directory


# What requests want


@dataclass(frozen=True)
class Recipe:
    """Sampling parameters under which drafts are verified.

    Attributes:
        sampling: as `SamplingParams` takes them.
        allowed: what a grammar lets follow an output, [VOCAB], as this module knows without asking the grammar.
    """

    name: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    allowed: Callable[[Sequence[int]], npt.NDArray[np.bool_]] | None = None


def _may_follow(output: Sequence[int]) -> npt.NDArray[np.bool_]:
    """What `([a-f][d-j]){9,40}` lets follow while it is short: one of six letters, then one of seven."""
    allowed = np.zeros(VOCAB, np.bool_)
    if len(output) % 2:
        allowed[5:] = True
    else:
        allowed[2:8] = True
    return allowed


RECIPES: Final = (
    Recipe("plain", {"temperature": 1.0}),
    Recipe("truncated", {"temperature": 0.7, "top_p": 0.9, "top_k": 8, "min_p": 0.02}),
    Recipe(
        "adjusted",
        {
            "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7,
            "logit_bias": {0: -100.0, 4: 1.5, 9: -2.0},
        },
    ),
    Recipe("grammar", {"grammar": Grammar(GrammarKind.REGEX, "([a-f][d-j]){9,40}"), "temperature": 1.2}, _may_follow),
    Recipe(
        "everything",
        {
            "temperature": 0.8, "top_p": 0.95, "top_k": 9, "frequency_penalty": 0.5, "logit_bias": {6: 0.7},
            "grammar": Grammar(GrammarKind.REGEX, "([a-f][d-j]){9,40}"),
        },
        _may_follow,
    ),
)  # fmt: skip


# What must come out


class Oracle:
    """The exact distribution of answers: softmax of the torch back end's logits after all that a recipe asks for."""

    def __init__(self, path: Path, prompt: Sequence[int] = PROMPT) -> None:
        self._prompt = list(prompt)
        self._driver: Driver = build_from(path, num_blocks=20_000, block_size=BLOCK_SIZE)
        self._logits: dict[tuple[int, ...], FloatArray] = {}

    def strings(self, recipe: Recipe, length: int = 1 + STRING) -> FloatArray:
        """Returns the probability of each answer's first tokens, [VOCAB] * length."""
        probs: FloatArray = np.ones((), np.float64)
        for size in range(length):
            after = np.zeros((VOCAB,) * (size + 1))
            for output in product(range(VOCAB), repeat=size):
                if probs[output] > 0:
                    after[output] = probs[output] * self._next(recipe, output)
            probs = after
        return probs

    def _next(self, recipe: Recipe, output: tuple[int, ...]) -> FloatArray:
        if output not in self._logits:
            self._compute(len(output))
        return exact_probs(self._logits[output], recipe, self._prompt, output)

    def _compute(self, size: int) -> None:
        """Computes the logits after every output of a size, a few hundred in a step."""
        outputs = list(product(range(VOCAB), repeat=size))
        for start in range(0, len(outputs), 256):
            some = outputs[start : start + 256]
            for output, logits in self._driver.step({output: [*self._prompt, *output] for output in some}).items():
                self._logits[output] = logits[-1].astype(np.float64)
            for output in some:
                self._driver.free(output)


def exact_probs(logits: FloatArray, recipe: Recipe, prompt: Sequence[int], output: Sequence[int]) -> FloatArray:
    """Returns the distribution of the token after an output, [VOCAB]: written from the definitions, apart from the product."""
    sampling = SamplingParams(**recipe.sampling)
    scores = logits.copy()
    for token in set(prompt) | set(output):
        scores[token] *= 1 / sampling.repetition_penalty if scores[token] > 0 else sampling.repetition_penalty
    for token in set(output):
        scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * list(output).count(token)
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    if recipe.allowed is not None:
        scores[~recipe.allowed(output)] = -np.inf
    probs = np.exp((scores - scores.max()) / sampling.temperature)
    order = np.argsort(-probs, kind="stable")
    kept = order[: sampling.top_k or VOCAB]
    mass = np.cumsum(probs[kept]) / probs[kept].sum()
    kept = kept[: np.searchsorted(mass, sampling.top_p) + 1]
    kept = kept[probs[kept] >= sampling.min_p * probs[order[0]]]
    truncated = np.zeros(VOCAB)
    truncated[kept] = probs[kept] / probs[kept].sum()
    return truncated


# What comes out


@dataclass
class AlwaysDrafts:
    """Wants as many drafts of one drafter in every step as it was told (protocol `Speculation`); counts what became of them."""

    drafter: str
    num_drafts: int
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0

    def choose(self, sequences: Sequence[SequenceRecord], cost: StepCost, size: StepSize, num_left: int) -> list[DraftDecision]:
        return [DraftDecision(self.drafter, self.num_drafts, None, True)] * len(sequences)

    def learn(self, sequence: SequenceRecord, choice: DraftDecision, sample: Sample) -> None:
        self.num_steps += 1
        self.num_drafted += sample.num_drafted
        self.num_accepted += len(sample.accepted)

    def learn_cost(self, num_drafted: Mapping[str, tuple[int, int]], draft_s: Mapping[str, float]) -> None:
        pass

    def learn_step(self, size: StepSize, num_drafted: int, elapsed_s: float) -> None:
        pass


class Replica:
    """Scheduler, runner and a native program, stepped by the thread that asks.

    Args:
        make_drafter: makes the drafter from what it is told of the model; None drafts nothing.
        num_drafts: per sequence and step.
    """

    def __init__(
        self,
        path: Path,
        make_drafter: Callable[[DrafterContext], Drafter] | None = None,
        *,
        num_drafts: int = 4,
        num_blocks: int = 4096,
        max_num_seqs: int = 512,
        max_tokens: int = 4096,
        block_size: int = BLOCK_SIZE,
        backend: str = "native",
        prefix_cache: bool = False,
        grammars: Grammars | None = None,
        clock: Clock | None = None,
    ) -> None:
        model = load(path)
        self.pool = BlockPool(num_blocks, block_size)
        layout = KVLayout(num_blocks, block_size)
        self._maker = maker = BACKENDS.get(backend)(num_threads=1, device="cpu", dtype="float32")
        self.program = maker.build(model.spec, model.weights, layout)
        self.speculation = AlwaysDrafts("tested", num_drafts)
        self.num_preempted = 0
        vocab_size = model.spec.vocab_size
        compiler = GrammarCompiler(Tokenizer(path), vocab_size=vocab_size, eos_token_ids=model.info.eos_token_ids)
        drafters: dict[str, Drafter] = {}
        if make_drafter is not None:
            drafters["tested"] = make_drafter(self._make_context(model, max_num_seqs, block_size))
            drafters["tested"].allocate(layout)
        self.runner = ModelRunner(
            self.program,
            vocab_size=vocab_size,
            max_model_len=MAX_MODEL_LEN,
            block_size=block_size,
            grammars=grammars or Grammars(compiler),
            drafters=drafters,
            clock=clock,
        )
        config = SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            budget=BudgetConfig(max_tokens=max_tokens),
            eos_token_ids=model.info.eos_token_ids,
            prefix_cache=prefix_cache,
        )
        keys = PrefixKeys("tiny", block_size) if prefix_cache else None
        self.scheduler = Scheduler(config, self.pool, keys, self.speculation if drafters else None)

    def _make_context(self, model: LoadedModel, max_num_seqs: int, block_size: int) -> DrafterContext:
        program = self.program
        return DrafterContext(
            model_path=model.path,
            vocab_size=model.spec.vocab_size,
            hidden_size=model.spec.hidden_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            eos_token_ids=model.info.eos_token_ids,
            files=None,
            open_model=open_small,
            head_runner=partial(make_head_runner, program=program) if Capability.HEAD in program.capabilities else None,
            sampling_metadata=lambda states, rows: self.runner.sampling_metadata(states, rows),
            open_mtp=lambda: self._open_mtp(model, block_size),
        )

    def _open_mtp(self, model: LoadedModel, block_size: int) -> MtpLayer:
        assert model.mtp is not None
        return MtpLayer(*model.mtp.open(), self._maker, lambda: self.program, block_size=block_size, num_tokens=64)

    def serve(
        self,
        requests: Sequence[Request],
        seeds: Sequence[int],
        *,
        stop_after: int | None = None,
        advance: Callable[[int], None] = lambda _: None,
    ) -> dict[tuple[str, int], list[int]]:
        """Runs requests to their ends and returns each sequence's tokens by (request id, index).

        Args:
            seeds: what each request without a seed draws with.
            stop_after: ends a sequence once it has so many tokens, drafts planned beyond or not.
            advance: told how many sequences ended, now and then.
        """
        tokens: dict[int, list[int]] = {}
        found: dict[tuple[str, int], list[int]] = {}
        waiting = list(zip(requests, seeds, strict=True))[::-1]
        now = 0.0
        while waiting or self.scheduler.requests:
            while waiting and len(self.scheduler.requests) < self.scheduler.config.max_num_seqs:
                request, seed = waiting.pop()
                self.scheduler.add(request, now, seed=seed)
            plan = self.scheduler.plan(now)
            assert plan is not None, "the scheduler has nothing to do while requests wait"
            result = self.runner.run(plan)
            assert not result.failures, set(result.failures.values())
            result.elapsed_s = 0.01
            now += 0.01
            stops = {}
            for sample in result.samples:
                own = tokens.setdefault(sample.seq_id, [])
                own.extend(sample.token_ids)
                if stop_after is not None and len(own) >= stop_after:
                    stops[sample.seq_id] = Stop(len(sample.token_ids))
            for event in self.scheduler.commit(result, stops, now):
                if isinstance(event, Ended):
                    found[event.request_id, event.index] = tokens.pop(event.seq_id)[: event.num_output_tokens]
                    advance(1)
                self.num_preempted += isinstance(event, Preempted)
        assert self.runner.num_sequences == 0 or not self.scheduler.requests
        self.pool.check()
        return found


def draw_answers(
    replica: Replica,
    recipe: Recipe,
    num_answers: int,
    *,
    seed: int,
    is_seeded: bool,
    per_request: int = 16,
    advance: Callable[[int], None] = lambda _: None,
) -> IntArray:
    """Returns the beginnings of answers to one prompt, [num_answers, 1 + STRING].

    Args:
        seed: of the seeds of requests.
        is_seeded: requests bring them, so that drafts are verified by coupling.
        per_request: sequences of one request.
    """
    rng = np.random.default_rng(seed)
    num_requests = -(-num_answers // per_request)
    seeds = rng.integers(0, 2**62, num_requests).tolist()
    requests = [
        Request(
            request_id=str(number),
            token_ids=list(PROMPT),
            sampling=SamplingParams(
                **{"max_tokens": 60, "ignore_eos": True, "n": per_request, **recipe.sampling},
                seed=own if is_seeded else None,
            ),
        )
        for number, own in enumerate(seeds)
    ]
    found = replica.serve(requests, seeds, stop_after=1 + STRING, advance=advance)
    return np.array([found[name][: 1 + STRING] for name in sorted(found)], np.int64)[:num_answers]


# Whether both are the same


def chi_square_p(counts: FloatArray, expected: FloatArray) -> float:
    """Returns the p-value of Pearson's test; 0 if something came that cannot.

    Args:
        counts, expected: of any shape; cells that expect few are joined.
    """
    counts, expected = counts.ravel(), expected.ravel()
    if counts[expected <= 0].any():
        return 0.0
    few = (expected > 0) & (expected < _FEWEST_EXPECTED)
    many = expected >= _FEWEST_EXPECTED
    cells = np.append(counts[many], counts[few].sum())
    wanted = np.append(expected[many], expected[few].sum())
    if wanted[-1] < _FEWEST_EXPECTED:
        smallest = int(wanted[:-1].argmin())
        cells[smallest] += cells[-1]
        wanted[smallest] += wanted[-1]
        cells, wanted = cells[:-1], wanted[:-1]
    return float(chdtrc(len(cells) - 1, ((cells - wanted) ** 2 / wanted).sum()))


def p_values(answers: IntArray, probs: FloatArray) -> dict[str, float]:
    """Tests answers [num_answers, 1 + STRING] against the exact distribution [VOCAB] * (1 + STRING).

    Drafts stand behind the first token, so the next token is the second, given the first; strings begin with either.
    """
    places = {"next token": (0, 1), "first three": (0, 1, 2), "drafted three": (1, 2, 3)}
    found = {}
    for name, axes in places.items():
        shape = (VOCAB,) * len(axes)
        cells = np.ravel_multi_index(tuple(answers[:, axis] for axis in axes), shape)
        counts = np.bincount(cells, minlength=VOCAB ** len(axes)).astype(np.float64)
        others = tuple(axis for axis in range(1 + STRING) if axis not in axes)
        found[name] = chi_square_p(counts, probs.sum(axis=others).ravel() * len(answers))
    return found


def holm(values: Sequence[float], level: float) -> list[bool]:
    """Says which hypotheses are rejected at a level for all of them together (Holm 1979)."""
    order = np.argsort(values)
    rejected = [False] * len(values)
    for rank, place in enumerate(order.tolist()):
        if values[place] > level / (len(values) - rank):
            break
        rejected[place] = True
    return rejected


# Parts of models for drafters


class SmallModel:
    """A draft model (protocol `executor.drafters.base.DraftModel`)."""

    def __init__(self, path: Path) -> None:
        self._model = load(path)
        self._maker = BACKENDS.get("native")(num_threads=1, device="cpu", dtype="float32")
        self.vocab_size = self._model.spec.vocab_size
        self.max_positions = self._model.spec.max_positions
        self.weights_bytes = 0

    def kv_block_bytes(self, block_size: int) -> int:
        need = self._maker.need(self._model.spec, self._model.weights, block_size=block_size, max_batched_tokens=64)
        return need.kv_block_bytes

    def build(self, kv: KVLayout) -> Program:
        return self._maker.build(self._model.spec, self._model.weights, kv)


def open_small(name: str) -> SmallModel:
    return SmallModel(Path(name))
