"""One engine of each way to draft, and what they do with the same prompts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from scipy import stats

from benchmarks.speculation_workloads import Workload
from cloister.backends.native.model import PackedModel
from cloister.backends.native.store import PackedStore
from cloister.engine import EngineCore
from cloister.engine.core import Runner
from cloister.launch import build_engine, resolve_settings
from cloister.policy import Gate, Policy
from cloister.types.errors import CloisterError
from cloister.types.events import Submit
from cloister.types.request import Request
from cloister.types.step import StepPlan, StepResult

PLAIN: Final = "none"
AUTO: Final = "auto"
KV_MB: Final = 192.0
DRAFTERS: Final = (
    "draft_model", "spec_infer", "medusa", "blockwise", "ngram", "lookahead", "recycling", "rest", "long_spec",
)  # fmt: skip
USES: Final = {
    "draft_tokens": (*DRAFTERS, AUTO),
    "datastore": ("rest", AUTO),
    "draft_model": ("draft_model", "spec_infer", "long_spec", AUTO),
}
"""Setting -> the ways to draft that take it; others are for all."""


@dataclass(slots=True)
class Run:
    """What one engine did with some prompts.

    Attributes:
        tokens: of all answers, after the step in which the last one of a batch began.
        decode_s, processor_s: what those took, by the clock and of all cores.
        full_tokens, full_s: of these, before the step in which the first answer of a batch ended: all sequences run.
        samples: how often a sequence was at its turn; accepted drafts and one more token each time.
        drafted, accepted: drafts that were verified, and kept.
        paths: (drafts verified, places of those accepted) of each sample.
        draft_s: what the drafter took of each step, where it drafted.
        answers: token ids of each.
    """

    tokens: int = 0
    decode_s: float = 0.0
    processor_s: float = 0.0
    full_tokens: int = 0
    full_s: float = 0.0
    samples: int = 0
    drafted: int = 0
    accepted: int = 0
    paths: tuple[tuple[int, tuple[int, ...]], ...] = ()
    draft_s: tuple[float, ...] = ()
    answers: tuple[tuple[int, ...], ...] = ()

    def add(self, other: Run) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Watch:
    """Passes plans on to a runner and keeps the last result (protocol `engine.core.Runner`)."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.result: StepResult | None = None

    def run(self, plan: StepPlan) -> StepResult:
        self.result = self._runner.run(plan)
        return self.result


class Arm:
    """An engine with one way to draft, stepped by hand.

    Args:
        core: of an engine that nobody else steps.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._watch = Watch(core._runner)
        core._runner = self._watch
        self._gate = Gate(Policy("open"), None, loopback=True)
        self._num_requests = 0

    def answer(self, workload: Workload, numbers: Iterable[int], batch: int) -> Run:
        """Answers the prompts of these numbers, `batch` at once, the next ones when all of those ended."""
        total = Run()
        waiting = list(numbers)
        while waiting:
            total.add(self._together(workload, waiting[:batch]))
            waiting = waiting[batch:]
        return total

    def _together(self, workload: Workload, numbers: list[int]) -> Run:
        for number in numbers:
            self.core.input_queue.put(Submit(self._request(workload, number)))
        first = self._num_requests - len(numbers) + 1
        answers: dict[int, list[int]] = {first + place: [] for place in range(len(numbers))}
        run, num_left = Run(), len(numbers)
        while num_left:
            all_began = all(answers.values())
            since_s, processor_s = time.perf_counter(), time.process_time()
            outputs = self.core.step()
            took_s, processor_s = time.perf_counter() - since_s, time.process_time() - processor_s
            result, self._watch.result = self._watch.result, None
            if outputs is None or result is None:
                raise RuntimeError("the engine has nothing to do, and answers are missing")
            for output in outputs.outputs:
                if output.error is not None:
                    raise RuntimeError(output.error)
                num_left -= output.finish_reason is not None
                answers[int(output.request_id)] += output.token_ids
            num_tokens = sum(len(output.token_ids) for output in outputs.outputs)
            if all_began:
                run.tokens += num_tokens
                run.decode_s += took_s
                run.processor_s += processor_s
                if num_left == len(numbers):
                    run.full_tokens += num_tokens
                    run.full_s += took_s
                run.samples += len(result.samples)
                run.drafted += sum(sample.num_drafted for sample in result.samples)
                run.accepted += sum(len(sample.accepted) for sample in result.samples)
                run.paths += tuple((sample.num_drafted, sample.accepted) for sample in result.samples)
                run.draft_s += tuple(result.draft_s.values())
        while self.core.step() is not None:  # what the end leaves to do
            pass
        run.answers = tuple(map(tuple, answers.values()))
        return run

    def _request(self, workload: Workload, number: int) -> Request:
        admission = self._gate.admit(None)
        self._num_requests += 1
        return Request(
            request_id=str(self._num_requests),
            token_ids=list(workload.prompts[number]),
            sampling=workload.sampling(number),
            scope=admission.scope,
            tenant=admission.tenant,
        )


def open_arms(
    names: Iterable[str], model: Path, quant: str, settings: Mapping[str, object]
) -> tuple[dict[str, Arm], dict[str, str]]:
    """Returns an engine for each way to draft, and why there is none for the others."""
    arms, missing = {}, {}
    for name in names:
        flags = {
            "model": str(model), "quant": quant, "kv_memory_mb": KV_MB, "prefix_cache": False, "max_model_len": 1024,
            "max_num_seqs": 16, "profile": "open", "speculate": name,
        }  # fmt: skip
        flags |= {key: value for key, value in settings.items() if name in USES.get(key, (name,))}
        try:
            arms[name] = Arm(build_engine(resolve_settings(flags).engine.config))
        except CloisterError as error:
            missing[name] = str(error)
    return arms, missing


def share_weights() -> None:
    """From now on engines of this program share packed weights, which kernels only read: one model in memory, not eleven."""
    load, held = PackedStore.load, dict[str, PackedModel]()

    def load_once(store: PackedStore, identity: str) -> PackedModel | None:
        if identity not in held:
            model = load(store, identity)
            if model is None:
                return None
            held[identity] = model
        return held[identity]

    PackedStore.load = load_once  # type: ignore[assignment, method-assign]


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Returns the geometric mean and its 95% interval (t on the logarithms); one ratio has the interval of itself."""
    logs = np.log(ratios)
    middle = float(logs.mean())
    margin = float(stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5) if len(logs) > 1 else 0.0
    return tuple(float(np.exp(end)) for end in (middle, middle - margin, middle + margin))  # type: ignore[return-value]
