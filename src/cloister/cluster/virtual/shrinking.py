"""Shrinks a failing scenario to what matters. Pure but for the runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import msgspec

from cloister.cluster.virtual.scenario import Job, Scenario

S = TypeVar("S")

_PLAIN_JOB: Final = Job(at_s=0.0, prompt="")
_PLAIN: Final = Scenario(seed=0)
_PLAIN_FIELDS: Final = sorted({*Job.__struct_fields__} - {"at_s", "prompt", "max_tokens", "temperature", "seed"})


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


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    """Yields scenarios that are simpler by one thing."""
    replace = msgspec.structs.replace
    yield from _with_fewer_items(scenario)
    yield from _with_defaults(scenario, "moves_kv", "damages_kv")
    if scenario.num_replicas > 1:
        yield _without_last_replica(scenario)
    for number, operation in enumerate(scenario.operations):
        if operation.trouble != "none":
            plain = replace(operation, trouble="none")
            yield replace(scenario, operations=(*scenario.operations[:number], plain, *scenario.operations[number + 1 :]))
    yield from _with_defaults(
        scenario,
        "scheduler",
        "roles",
        "rebalance",
        "num_standby",
        "min_replicas",
        "copies_prefixes",
        "verify_replay",
        "length_error",
    )
    if scenario.drafts == "tree":
        yield replace(scenario, drafts="chain")
    yield from _with_defaults(scenario, "drafts", "helper_s", "damages_tiers", "pool", "tiers")
    if any(scenario.clock_offsets_s):
        yield replace(scenario, clock_offsets_s=())
    for name in ("max_num_seqs", "num_blocks", "max_waiting"):
        if getattr(scenario, name) < getattr(_PLAIN, name):
            yield replace(scenario, **{name: getattr(_PLAIN, name)})
    for index, job in enumerate(scenario.jobs):
        for simpler in simplify_job(job):
            yield replace(scenario, jobs=(*scenario.jobs[:index], simpler, *scenario.jobs[index + 1 :]))


def _with_fewer_items(scenario: Scenario) -> Iterator[Scenario]:
    """Yields scenarios without half of the faults, operations or jobs, and without a single one."""
    for name in ("faults", "operations", "jobs"):
        items = getattr(scenario, name)
        for size in sorted({len(items) // 2, 1} - {0}, reverse=True):
            for start in range(0, len(items), size):
                yield msgspec.structs.replace(scenario, **{name: items[:start] + items[start + size :]})


def _with_defaults(scenario: Scenario, *names: str) -> Iterator[Scenario]:
    """Yields scenarios with one of these fields reset to its default."""
    for name in names:
        if getattr(scenario, name) != getattr(_PLAIN, name):
            yield msgspec.structs.replace(scenario, **{name: getattr(_PLAIN, name)})


def _without_last_replica(scenario: Scenario) -> Scenario:
    """Returns a scenario of one replica less, whose faults and operations move to the one before it."""
    replace, last = msgspec.structs.replace, scenario.num_replicas - 1
    num_standby = min(scenario.num_standby, last - 1)
    return replace(
        scenario,
        num_replicas=last,
        faults=tuple(replace(fault, replica=min(fault.replica, last - 1)) for fault in scenario.faults),
        operations=tuple(replace(each, replica=min(each.replica, last - 1)) for each in scenario.operations),
        roles=scenario.roles[:last],
        num_standby=num_standby,
        min_replicas=None if scenario.min_replicas is None else min(scenario.min_replicas, last - num_standby),
    )


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
