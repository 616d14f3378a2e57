"""Profiles an engine's steps: Python and program, operator by operator, thread by thread.

It instruments an engine in this process while that answers synthetic prompts. Spans contain names and times only.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import cloister.executor.generation
from cloister.backends.base import Capability, Program
from cloister.backends.recording import OperatorSpan, Watched, watch
from cloister.types.errors import EngineError
from cloister.types.events import Ended, Outputs, Stepped, Submit
from cloister.types.request import FinishReason, Request

if TYPE_CHECKING:
    from cloister.engine import EngineCore

FORWARD = "forward"
_PARTS = (
    ("_scheduler", "plan", "plan"),
    ("_runner", "run", "run"),
    ("_runner._program", "step", FORWARD),
    ("_runner._generator", "_advance", "sample"),
    ("_runner._generator._executor", "_choose_on_host", "sample"),
    ("_output", "check", "check"),
    ("_scheduler", "commit", "commit"),
    ("_output", "collect", "collect"),
)
"""Calls of one step: path from the engine to the owner, its method, and the name of the part."""
_FUNCTIONS = (("forward_batch", "inputs"),)
"""Functions that `executor.generation` looks up in its module."""

MAX_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """One step of the engine.

    Attributes:
        kind: "prefill" if a prompt was computed, else "decode".
        python: spans of the engine's parts, the step itself first.
        program: spans of the program's operators.
    """

    kind: str
    num_tokens: int
    num_samples: int
    python: tuple[OperatorSpan, ...]
    program: tuple[OperatorSpan, ...]

    @property
    def whole(self) -> OperatorSpan:
        return self.python[0]


@dataclass(frozen=True, slots=True)
class ProfileNode:
    """A node in the call tree, over all steps of a kind.

    Attributes:
        path: names from the step down.
        in_program: whether it is the forward pass or an operator in it, not a Python part of the engine.
        num_calls, seconds: totals over all steps.
        own_s: seconds without its children.
    """

    path: tuple[str, ...]
    in_program: bool
    num_calls: int
    seconds: float
    own_s: float


def program_of(engine: object) -> Program:
    """Returns the program of an engine core."""
    program: Program = attrgetter("_runner._program")(engine)
    return program


def group_blocks_of(engine: object) -> list[int]:
    """Returns the KV blocks that an engine core holds, of each group of layers; the first has the most."""
    return [group.num_blocks for group in attrgetter("_scheduler.pool.groups")(engine)]


def profile_engine(engine: EngineCore, requests: Sequence[Request]) -> list[ProfiledStep]:
    """Answers all requests concurrently, and returns every step that computed something.

    Raises:
        EngineError: a request was not answered, or the engine does not finish.
    """
    engine.disable_overlap()
    for request in requests:
        engine.input_queue.put(Submit(request))
    steps: list[ProfiledStep] = []
    num_open = len(requests)
    for _ in range(MAX_STEPS):
        outputs, python, program = _step(engine)
        if outputs is None and not num_open:
            return steps
        for event in outputs.events if outputs is not None else ():
            if isinstance(event, Ended) and event.last:
                num_open -= 1
                _check_answer(event)
            elif isinstance(event, Stepped) and event.num_tokens:
                kind = "prefill" if event.num_tokens > event.num_samples else "decode"
                steps.append(ProfiledStep(kind, event.num_tokens, event.num_samples, python, program))
    raise EngineError(f"the engine was not done after {MAX_STEPS} steps; profile shorter answers")


def list_parts(steps: Sequence[ProfiledStep]) -> list[ProfileNode]:
    """Returns the tree of calls of the steps given, parents before children, in order of first appearance.

    Time in which several threads run an operator counts once, so that the times of a level add up.
    """
    found: dict[tuple[str, ...], list[Any]] = {}
    for step in steps:
        # time of `step` outside of its operators is the program's own: waiting for helpers, or listing work
        operators = _join_threads(step.program)
        in_program = {id(span) for span in operators} | {id(span) for span in step.python if span.name == FORWARD}
        for path, span, own_s in _nest((*step.python, *operators)):
            entry = found.setdefault(path, [id(span) in in_program, 0, 0.0, 0.0])
            entry[1] += 1
            entry[2] += span.duration_s
            entry[3] += own_s
    return [ProfileNode(path, *found[path]) for path in _by_parent(found)]


def list_threads(steps: Sequence[ProfiledStep]) -> dict[str, dict[int, float]]:
    """Returns operator -> thread -> seconds, over all steps given."""
    table: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for step in steps:
        for span in step.program:
            table[span.name][span.thread] += span.duration_s
    return {name: dict(row) for name, row in table.items()}


def to_trace(steps: Sequence[ProfiledStep], program: str) -> dict[str, object]:
    """Returns the steps in the Trace Event Format that chrome://tracing and Perfetto read; times in microseconds.

    Args:
        program: label of the program's spans, such as the back end's name.
    """
    origin_s = min((step.whole.start_s for step in steps), default=0.0)
    threads = {span.thread for step in steps for span in (*step.python, *step.program)}
    events: list[dict[str, object]] = [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": 1,
            "tid": thread,
            "args": {"name": "engine" if thread == 0 else f"helper {thread}"},
        }
        for thread in sorted(threads)
    ]
    for step in steps:
        counts = {"num_tokens": step.num_tokens, "num_samples": step.num_samples}
        events.append(_trace_event(step.whole, step.kind, origin_s, counts))
        events += [_trace_event(span, "python", origin_s) for span in step.python[1:]]
        events += [_trace_event(span, program, origin_s) for span in step.program]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _step(engine: EngineCore) -> tuple[Outputs | None, tuple[OperatorSpan, ...], tuple[OperatorSpan, ...]]:
    """Runs one step; returns its outputs, the spans of its parts with the step first, and those of the program."""
    program = program_of(engine)
    recording: AbstractContextManager[list[OperatorSpan]] = (
        program.record() if Capability.RECORDING in program.capabilities else nullcontext([])
    )
    with watch(_list_calls(engine)) as parts, recording as operators:
        start_s = time.perf_counter()
        outputs = engine.step()
        whole = OperatorSpan("step", 0, start_s, time.perf_counter() - start_s)
    return outputs, (whole, *parts), tuple(operators)


def _list_calls(engine: object) -> Iterator[Watched]:
    for place, method, name in _PARTS:
        owner = attrgetter(place)(engine)
        if hasattr(owner, method):
            yield Watched(owner, method, name)
    for function, name in _FUNCTIONS:
        if hasattr(cloister.executor.generation, function):
            yield Watched(cloister.executor.generation, function, name)


def _check_answer(event: Ended) -> None:
    if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise EngineError(f"a made-up request was not answered: {event.error or event.reason}")


def _join_threads(spans: Iterable[OperatorSpan]) -> list[OperatorSpan]:
    """Joins what several threads do of one operator at the same time."""
    joined: dict[str, list[OperatorSpan]] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        done = joined.setdefault(span.name, [])
        if done and span.start_s < done[-1].end_s:
            end_s = max(done[-1].end_s, span.end_s)
            done[-1] = OperatorSpan(span.name, 0, done[-1].start_s, end_s - done[-1].start_s)
        else:
            done.append(OperatorSpan(span.name, 0, span.start_s, span.duration_s))
    return [span for group in joined.values() for span in group]


def _nest(spans: Iterable[OperatorSpan]) -> Iterator[tuple[tuple[str, ...], OperatorSpan, float]]:
    """Yields (path, span, seconds without its children) for spans that nest as calls do."""
    stack: list[tuple[tuple[str, ...], OperatorSpan]] = []
    own: dict[int, float] = {}
    placed = []
    for span in sorted(spans, key=lambda span: (span.start_s, -span.duration_s)):
        while stack and stack[-1][1].end_s <= span.start_s:
            stack.pop()
        path = (*(stack[-1][0] if stack else ()), span.name)
        if stack:
            own[id(stack[-1][1])] -= span.duration_s
        own[id(span)] = span.duration_s
        stack.append((path, span))
        placed.append((path, span))
    return ((path, span, own[id(span)]) for path, span in placed)


def _by_parent(paths: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Orders paths so that children follow their parent, siblings as they first appeared."""
    order = {path: number for number, path in enumerate(paths)}
    return sorted(order, key=lambda path: [order[path[: depth + 1]] for depth in range(len(path))])


def _trace_event(span: OperatorSpan, category: str, origin_s: float, args: dict[str, int] | None = None) -> dict[str, object]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": category,
        "pid": 1,
        "tid": span.thread,
        "ts": round((span.start_s - origin_s) * 1e6, 3),
        "dur": round(span.duration_s * 1e6, 3),
        **({"args": args} if args else {}),
    }
