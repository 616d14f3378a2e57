"""Searches for scenarios in which a cluster breaks a promise, and makes what it finds small."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing import active_children, get_context
from pathlib import Path
from signal import SIG_BLOCK, SIG_SETMASK, SIGINT, pthread_sigmask
from typing import Any, Final, TypeVar

import msgspec
import msgspec.inspect

from cloister.cluster.routers import ROUTERS
from cloister.cluster.virtual.drawing import draw_scenario
from cloister.cluster.virtual.engine import write_byte_tokenizer
from cloister.cluster.virtual.grammars import GRAMMARS
from cloister.cluster.virtual.scenario import NUM_ADAPTERS, Job, Scenario
from cloister.cluster.virtual.simulation import RunOutcome, run_scenario
from cloister.scheduler import POLICIES
from cloister.text import Tokenizer
from cloister.types.errors import ConfigError
from cloister.types.processes import end_with_parent

S = TypeVar("S")

EXAMPLE: Final = '{"seed": 1, "jobs": [{"at_s": 0, "prompt": "hello"}]}'
_NO_CHOICE: Final = re.compile(r"Invalid enum value .* - at `\$\.([^`]*)`")
LEAST_POOLED: Final = 2
"""Slots of which one can be lent."""
MOST_BEAMS: Final = 8
CHUNK: Final = 20
"""Seeds that a process runs before it reports."""
_PLAIN_JOB: Final = Job(at_s=0.0, prompt="")
_PLAIN: Final = Scenario(seed=0)
_PLAIN_FIELDS: Final = sorted({*Job.__struct_fields__} - {"at_s", "prompt", "max_tokens", "temperature", "seed"})


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


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Returns a smaller scenario that still fails, without the requests, faults and replicas that do not matter.

    Args:
        fails: runs a scenario.
    """
    return shrink_by(_simpler, scenario, fails)


def shrink_by(simplify: Callable[[S], Iterator[S]], scenario: S, fails: Callable[[S], bool]) -> S:
    """As `shrink`, for any kind of scenario.

    Args:
        simplify: yields scenarios that are simpler by one thing.
    """
    while (smaller := next(filter(fails, simplify(scenario)), None)) is not None:
        scenario = smaller
    return scenario


def read_scenario(path: Path) -> Scenario:
    """Reads a scenario. Raises ConfigError if the file holds none, or one that cannot be."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; check the path", param="scenario") from error
    try:
        scenario = msgspec.json.decode(text, type=Scenario)
    except msgspec.MsgspecError as error:
        told = describe_mistake(error, Scenario)
        raise ConfigError(
            f"{path} does not hold a scenario: {told}; a short one is {EXAMPLE}, and `cloister cluster fuzz` writes those that "
            "fail",
            param="scenario",
        ) from error
    if wrong := _find_mistake(scenario):
        raise ConfigError(f"the scenario {path} is invalid: {wrong}", param="scenario")
    return scenario


def describe_mistake(error: msgspec.MsgspecError, kind: type[msgspec.Struct]) -> str:
    """Returns what is wrong with the text of a scenario, and where only some words are possible, which.

    Args:
        kind: what it was read as.
    """
    text = str(error)
    found = _NO_CHOICE.search(text)
    if found is None:
        return text
    info: Any = msgspec.inspect.type_info(kind)
    for name in re.sub(r"\[[^]]*\]", "", found[1]).split("."):
        while hasattr(info, "item_type"):
            info = info.item_type
        info = next(field.type for field in info.fields if field.encode_name == name)
    while hasattr(info, "item_type"):
        info = info.item_type
    values = getattr(info, "values", ())
    return f"{text}, which is one of {', '.join(map(str, values))}" if values else text


def _find_mistake(scenario: Scenario) -> str | None:
    num_replicas, roles = scenario.num_replicas, scenario.roles
    named = [fault.replica for fault in scenario.faults] + [operation.replica for operation in scenario.operations]
    if num_replicas < 1 or (roles and len(roles) != num_replicas):
        return "num_replicas must be 1 or more, with as many roles, or none"
    if any(not 0 <= replica < num_replicas for replica in named):
        return f"faults and operations must name replicas 0 to {num_replicas - 1}"
    if not 0 <= scenario.num_standby < num_replicas:
        return "num_standby must be less than num_replicas"
    if scenario.min_replicas is not None and not 0 <= scenario.min_replicas <= num_replicas - scenario.num_standby:
        return "min_replicas must be at most num_replicas minus num_standby"
    if scenario.router not in ROUTERS.names() or scenario.scheduler not in POLICIES.names():
        return f"routers are {', '.join(ROUTERS.names())}; schedulers {', '.join(POLICIES.names())}"
    if any(job.grammar and job.grammar not in GRAMMARS for job in scenario.jobs):
        return f"grammars are {', '.join(GRAMMARS)}"
    numbers = [scenario.num_adapters, *(job.adapter for job in scenario.jobs), *(each.adapter for each in scenario.operations)]
    if any(not 0 <= number <= NUM_ADAPTERS for number in numbers):
        return f"adapters must be 1 to {NUM_ADAPTERS}, or 0 for none"
    if min(scenario.tiers) < 0:
        return "tiers must be two numbers of slots, 0 for none"
    if scenario.pool != "none" and scenario.tiers[0] < LEAST_POOLED:
        return f"a pool needs at least {LEAST_POOLED} slots in memory"
    if any(not 0 <= job.beams <= MOST_BEAMS or 0 < job.beams < job.n for job in scenario.jobs):
        return f"beams must be n to {MOST_BEAMS}, or 0 for no search"
    return None


def write_scenario(scenario: msgspec.Struct, path: Path) -> None:
    """Writes a scenario as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(scenario), indent=1) + b"\n")


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    """Yields scenarios that are simpler by one thing."""
    replace = msgspec.structs.replace
    for name in ("faults", "operations", "jobs"):
        items = getattr(scenario, name)
        for size in sorted({len(items) // 2, 1} - {0}, reverse=True):
            for start in range(0, len(items), size):
                yield replace(scenario, **{name: items[:start] + items[start + size :]})
    for name in ("moves_kv", "damages_kv"):
        if getattr(scenario, name):
            yield replace(scenario, **{name: 0.0})
    if scenario.num_replicas > 1:
        last = scenario.num_replicas - 1
        faults = tuple(replace(fault, replica=min(fault.replica, last - 1)) for fault in scenario.faults)
        operations = tuple(replace(each, replica=min(each.replica, last - 1)) for each in scenario.operations)
        roles = scenario.roles[:last]
        num_standby = min(scenario.num_standby, last - 1)
        min_replicas = None if scenario.min_replicas is None else min(scenario.min_replicas, last - num_standby)
        yield replace(
            scenario,
            num_replicas=last,
            faults=faults,
            operations=operations,
            roles=roles,
            num_standby=num_standby,
            min_replicas=min_replicas,
        )
    for number, operation in enumerate(scenario.operations):
        if operation.trouble != "none":
            plain = replace(operation, trouble="none")
            yield replace(scenario, operations=(*scenario.operations[:number], plain, *scenario.operations[number + 1 :]))
    if scenario.scheduler != "fcfs":
        yield replace(scenario, scheduler="fcfs")
    if scenario.roles:
        yield replace(scenario, roles=())
    if scenario.rebalance:
        yield replace(scenario, rebalance=False)
    if scenario.num_standby:
        yield replace(scenario, num_standby=0)
    if scenario.min_replicas is not None:
        yield replace(scenario, min_replicas=None)
    if scenario.copies_prefixes:
        yield replace(scenario, copies_prefixes=False)
    if scenario.verify_replay:
        yield replace(scenario, verify_replay=0.0)
    if scenario.length_error != "none":
        yield replace(scenario, length_error="none")
    if scenario.drafts == "tree":
        yield replace(scenario, drafts="chain")
    for name in ("drafts", "helper_s", "damages_tiers", "pool", "tiers"):
        if getattr(scenario, name) != getattr(_PLAIN, name):
            yield replace(scenario, **{name: getattr(_PLAIN, name)})
    if any(scenario.clock_offsets_s):
        yield replace(scenario, clock_offsets_s=())
    for name in ("max_num_seqs", "num_blocks", "max_waiting"):
        if getattr(scenario, name) < getattr(_PLAIN, name):
            yield replace(scenario, **{name: getattr(_PLAIN, name)})
    for index, job in enumerate(scenario.jobs):
        for simpler in simplify_job(job):
            yield replace(scenario, jobs=(*scenario.jobs[:index], simpler, *scenario.jobs[index + 1 :]))


def simplify_job(job: Job) -> Iterator[Job]:
    """Yields jobs that are simpler by one thing."""
    replace = msgspec.structs.replace
    for name in _PLAIN_FIELDS:
        if getattr(job, name) != getattr(_PLAIN_JOB, name):
            yield replace(job, **{name: getattr(_PLAIN_JOB, name)})
    if job.temperature:
        yield replace(job, temperature=0.0, seed=0)
    if len(job.prompt) > 1:
        yield replace(job, prompt=job.prompt[: len(job.prompt) // 2])
    if job.max_tokens > 1:
        yield replace(job, max_tokens=job.max_tokens // 2)


def _run_chunk(run: Callable[[int], RunOutcome], seeds: Sequence[int]) -> SeedTally:
    tally = SeedTally()
    for seed in seeds:
        outcome = run(seed)
        tally.add(SeedTally(1, outcome.num_requests, outcome.num_tokens, outcome.faults, (seed,) if outcome.violations else ()))
    return tally


@cache
def open_tokenizer() -> Tokenizer:
    """Returns the tokenizer of all scenarios."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer(write_byte_tokenizer(Path(folder)))
        tokenizer.encode("", parse_special=False)  # it reads its file for the first text, and grammars have it read some
        return tokenizer
