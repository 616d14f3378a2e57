"""Runs the scenarios of many seeds, and finds those in which a cluster breaks a promise."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import active_children, get_context
from signal import SIG_BLOCK, SIG_SETMASK, SIGINT, pthread_sigmask
from typing import Final

from cloister.cluster.routers import ROUTERS
from cloister.cluster.virtual.byte_tokenizer import open_tokenizer
from cloister.cluster.virtual.drawing import draw_scenario
from cloister.cluster.virtual.scenario import Scenario
from cloister.cluster.virtual.simulation import RunOutcome, run_scenario
from cloister.scheduler import POLICIES
from cloister.types.processes import end_with_parent

CHUNK: Final = 20
"""Seeds that a process runs before it reports."""


@dataclass(slots=True)
class SeedTally:
    """What seeds brought.

    Attributes:
        failing: seeds whose run broke a promise, in order.
    """

    num_seeds: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failing: tuple[int, ...] = ()

    def add(self, other: SeedTally) -> None:
        """Adds those of other seeds."""
        self.num_seeds += other.num_seeds
        self.num_requests += other.num_requests
        self.num_tokens += other.num_tokens
        self.faults += other.faults
        self.failing = tuple(sorted({*self.failing, *other.failing}))


def run_seed(seed: int) -> RunOutcome:
    """Draws the scenario of a seed and runs it."""
    return replay(scenario_of(seed))


def scenario_of(seed: int) -> Scenario:
    """Returns the scenario of a seed."""
    return draw_scenario(seed, tuple(ROUTERS.names()), tuple(POLICIES.names()))


def replay(scenario: Scenario) -> RunOutcome:
    """Runs a scenario; an exception that reaches its end counts as a broken promise."""
    try:
        return run_scenario(scenario, open_tokenizer())
    except Exception as error:
        return RunOutcome((f"{type(error).__name__}: {error}",), "", Counter(), 0, 0)


def search(seeds: Sequence[int], num_processes: int = 1, run: Callable[[int], RunOutcome] = run_seed) -> Iterator[SeedTally]:
    """Runs seeds, and yields what some of them brought as soon as they have run.

    Args:
        run: runs the scenario of a seed.
    """
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    if num_processes == 1:
        yield from map(partial(_run_chunk, run), chunks)
        return
    begin, others = partial(_begin_process, os.getpid()), {*active_children()}
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"), initializer=begin) as pool:
        try:
            mask = pthread_sigmask(SIG_BLOCK, (SIGINT,))  # Ctrl-C is for this process, which ends the others
            try:
                running: list[Future[SeedTally]] = [pool.submit(_run_chunk, run, chunk) for chunk in chunks]
            finally:
                pthread_sigmask(SIG_SETMASK, mask)
            for future in running:
                yield future.result()
        except BaseException:  # a chunk may take seconds, and each process has some before it
            for process in {*active_children()} - others:
                process.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _begin_process(parent: int) -> None:
    end_with_parent(parent)
    logging.disable(logging.CRITICAL)  # engines die by the thousand


def _run_chunk(run: Callable[[int], RunOutcome], seeds: Sequence[int]) -> SeedTally:
    tally = SeedTally()
    for seed in seeds:
        outcome = run(seed)
        tally.add(SeedTally(1, outcome.num_requests, outcome.num_tokens, outcome.faults, (seed,) if outcome.violations else ()))
    return tally
