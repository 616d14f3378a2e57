"""Answers to one prompt after another with a fixed number of drafts a step: what drafters bring, whatever it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from cloister.backends import BACKENDS, native
from cloister.backends.base import KVLayout, Program, SamplingMetadata
from cloister.executor import ModelRunner
from cloister.executor.drafters import Drafter, DraftingPlace
from cloister.executor.state import SequenceState
from cloister.models import LoadedModel, load, locate
from cloister.types.request import SamplingParams
from cloister.types.step import NewSequence, Sample, SequencePlan, StepPlan, StepResult

BLOCK_SIZE = 32
CHUNK = 512


class OpenedModel:
    """A model and the back end that builds it (protocol `executor.drafters.base.DraftModel`)."""

    def __init__(self, path: Path, num_threads: int, max_positions: int | None = None) -> None:
        self.model: LoadedModel = load(path)
        name = "native" if native.available() is None else "torch"
        self._backend = BACKENDS.get(name)(num_threads=num_threads, device="cpu")
        self.vocab_size = self.model.spec.vocab_size
        self.max_positions = max_positions or self.model.spec.max_positions
        self.weights_bytes = self._need(BLOCK_SIZE).weights_bytes

    def _need(self, block_size: int) -> Any:
        return self._backend.need(self.model.spec, self.model.weights, block_size=block_size, max_batched_tokens=CHUNK)

    def kv_block_bytes(self, block_size: int) -> int:
        return int(self._need(block_size).kv_block_bytes)

    def build(self, kv: KVLayout) -> Program:
        return self._backend.build(self.model.spec, self.model.weights, kv)


@dataclass(slots=True)
class Answer:
    """One answer and how it came about.

    Attributes:
        samples: one for each step behind the prompt.
        prompt_draft_s, draft_s: what drafters took while the prompt was computed, and behind it.
    """

    tokens: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    prompt_draft_s: float = 0.0
    draft_s: float = 0.0


class Answering:
    """A model, a drafter beside it, and one sequence at a time in blocks of its own.

    Args:
        make: the drafter; None decodes without.
        max_len: of prompt, answer and drafts.
    """

    def __init__(
        self, opened: OpenedModel, make: Callable[[DraftingPlace], Drafter] | None, max_len: int, **fields: Any
    ) -> None:
        model, num_blocks = opened.model, -(-max_len // BLOCK_SIZE)
        layout = KVLayout(num_blocks, BLOCK_SIZE)
        self.stops = model.info.eos_token_ids
        self.drafter: Drafter | None = None
        if make is not None:
            self.drafter = make(
                DraftingPlace(
                    model_path=model.path,
                    vocab_size=model.spec.vocab_size,
                    hidden_size=model.spec.hidden_size,
                    max_model_len=max_len,
                    max_num_seqs=1,
                    block_size=BLOCK_SIZE,
                    eos_token_ids=self.stops,
                    **{"files": None, "open_model": lambda name: OpenedModel(locate(name), 1), **fields},
                    guesser=None,
                    draws=self._draws,
                )
            )
            self.drafter.allocate(layout)
        drafters = {} if self.drafter is None else {"drafter": self.drafter}
        self._runner = ModelRunner(
            opened.build(layout),
            vocab_size=model.spec.vocab_size,
            max_model_len=max_len,
            block_size=BLOCK_SIZE,
            drafters=drafters,
        )
        self._blocks = list(range(num_blocks))
        self._ids = count()

    def _draws(self, states: list[SequenceState], rows: list[int]) -> SamplingMetadata:
        return self._runner.sampling_metadata(states, rows)

    def answer(
        self, prompt: Sequence[int], sampling: SamplingParams, num_drafts: int, seed: int, *, to_the_end: bool
    ) -> Answer:
        """Answers one prompt.

        Args:
            num_drafts: asked for in each step.
            seed: of the noise, also of requests without a seed of their own.
            to_the_end: an end of the text does not end the answer.
        """
        seq_id, found, num_known = next(self._ids), Answer(), len(prompt)
        num_wanted, stops = sampling.max_tokens or 1, () if to_the_end else self.stops
        arrival = NewSequence(
            seq_id=seq_id,
            token_ids=list(prompt),
            num_prompt_tokens=num_known,
            sampling=sampling,
            seed=seed,
            stop_token_ids=stops,
        )
        for start in range(0, num_known, CHUNK):
            size = min(CHUNK, num_known - start)
            part = self._part(seq_id, start, size, num_samples=int(start + size == num_known))
            result = self._run(found, part, [] if start else [arrival])
        found.prompt_draft_s, found.draft_s = found.draft_s, 0.0
        found.tokens += result.samples[0].token_ids
        while len(found.tokens) < num_wanted and found.tokens[-1] not in stops:
            part = self._part(seq_id, num_known + len(found.tokens) - 1, 1 + num_drafts, num_drafts=num_drafts)
            sample = self._run(found, part, []).samples[0]
            found.samples.append(sample)
            found.tokens += sample.token_ids
        self._runner.run(StepPlan(plan_id=0, departures=[seq_id], wipes=self._blocks))
        found.tokens = found.tokens[:num_wanted]
        return found

    def _part(self, seq_id: int, start: int, num_tokens: int, *, num_samples: int = 1, num_drafts: int = 0) -> SequencePlan:
        shape = self.drafter.shape if self.drafter is not None else None
        return SequencePlan(
            seq_id=seq_id,
            start=start,
            num_tokens=num_tokens,
            table_start=0,
            new_block_ids=self._blocks,
            num_samples=num_samples,
            num_drafts=num_drafts,
            drafter="drafter" if num_drafts else "",
            parents=shape[:num_drafts] if shape is not None and num_drafts else None,
            is_watched=num_samples > 0,
        )

    def _run(self, found: Answer, part: SequencePlan, arrivals: list[NewSequence]) -> StepResult:
        result = self._runner.run(StepPlan(plan_id=0, sequences=[part], arrivals=arrivals))
        if result.failures:
            raise RuntimeError(next(iter(result.failures.values())))
        found.draft_s += sum(result.draft_s.values())
        return result


def tokens_per_step(answers: Sequence[Answer]) -> float:
    """Returns how many tokens a step behind the prompt brought on average."""
    return float(np.mean([len(sample.token_ids) for answer in answers for sample in answer.samples]))
