"""Profiles calls from outside: a method is replaced by one that measures its time, and put back afterwards.

Other calls cost nothing more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class OperatorSpan:
    """Time that one thread spent on one operator; nothing of what was computed.

    Attributes:
        name: the operator, whichever layer it belongs to: embed, norm, qkv, rope, attention, output, mlp_norm, gate_up, down,
            head, quantize; joined by `+` where a program computes several as one (`norm+qkv`). Other work has other names.
        thread: 0 is the thread that called `step`; helpers count from 1.
        start_s: on the clock of `time.perf_counter`.
    """

    name: str
    thread: int
    start_s: float
    duration_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True)
class Watched:
    """A method of an object, or a function of a module, and what its spans are called."""

    owner: object
    method: str
    name: str


@contextmanager
def watch(calls: Iterable[Watched]) -> Iterator[list[OperatorSpan]]:
    """Records a span for every call of the methods given, made on any thread inside the context; yields the spans.

    The owner must look its method up anew at every call, and take new attributes.
    """
    spans: list[OperatorSpan] = []
    threads = {threading.get_ident(): 0}
    restores: list[Callable[[], None]] = []
    try:
        for call in calls:
            restores.append(_replace(call, spans, threads))
        yield spans
    finally:
        for restore in reversed(restores):
            restore()


def _replace(call: Watched, spans: list[OperatorSpan], threads: dict[int, int]) -> Callable[[], None]:
    """Puts a timed method in place; returns what undoes it."""
    owner, method = call.owner, call.method
    original = getattr(owner, method)
    is_own = method in vars(owner)
    setattr(owner, method, _timed(original, call.name, spans, threads))
    return (lambda: setattr(owner, method, original)) if is_own else (lambda: delattr(owner, method))


def _timed(run: Callable[..., Any], name: str, spans: list[OperatorSpan], threads: dict[int, int]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return run(*args, **kwargs)
        finally:
            end_s = time.perf_counter()
            thread = threads.setdefault(threading.get_ident(), len(threads))
            spans.append(OperatorSpan(name, thread, start_s, end_s - start_s))

    return timed
