"""Searches for scenarios in which a sealed unit of several machines breaks a promise, and makes what it finds small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from cloister.cluster.virtual.byte_tokenizer import open_tokenizer
from cloister.cluster.virtual.scenario_files import describe_mistake
from cloister.cluster.virtual.shrinking import shrink_by, simplify_job
from cloister.cluster.virtual.simulation import RunOutcome
from cloister.private.virtual.scenario import MOST_CLOCK_S, UnitScenario, draw_unit_scenario
from cloister.private.virtual.simulation import run_unit_scenario
from cloister.types.config import MAX_UNIT_MEMBERS
from cloister.types.errors import ConfigError

_PLAIN: Final = UnitScenario(seed=0)


class _AnyScenario(msgspec.Struct):
    """What a file has of whatever kind of scenario."""

    type: str = ""


def run_unit_seed(seed: int) -> RunOutcome:
    """Draws the scenario of a seed and runs it."""
    return replay_unit(draw_unit_scenario(seed))


def replay_unit(scenario: UnitScenario) -> RunOutcome:
    """Runs a scenario; an exception that reaches its end counts as a broken promise."""
    try:
        return run_unit_scenario(scenario, open_tokenizer())
    except Exception as error:
        return RunOutcome((f"{type(error).__name__}: {error}",), "", Counter(), 0, 0)


def has_unit_scenario(path: Path) -> bool:
    """Whether a file holds a scenario of a sealed unit, and none of a cluster."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_AnyScenario).type == "unit"
    except (OSError, msgspec.MsgspecError):
        return False


def read_unit_scenario(path: Path) -> UnitScenario:
    """Reads a scenario. Raises ConfigError if the file holds none, or one that cannot be."""
    try:
        scenario = msgspec.json.decode(path.read_bytes(), type=UnitScenario)
    except (OSError, msgspec.MsgspecError) as error:
        told = str(error) if isinstance(error, OSError) else describe_mistake(error, UnitScenario)
        raise ConfigError(
            f"{path} does not hold a scenario of a sealed unit: {told}; `cloister cluster fuzz --sealed` writes "
            "those that fail",
            param="scenario",
        ) from error
    if wrong := _find_mistake(scenario):
        raise ConfigError(f"the scenario {path} is invalid: {wrong}", param="scenario")
    return scenario


def _find_mistake(scenario: UnitScenario) -> str | None:
    if not (1 <= scenario.num_members <= MAX_UNIT_MEMBERS and scenario.num_engines >= 1):
        return f"num_members is 1 to {MAX_UNIT_MEMBERS}, and num_engines 1 or more"
    for fault in scenario.faults:
        is_between = fault.kind in ("cut_path", "reset", "hold", "change", "repeat", "stranger")
        if not is_between <= fault.machine <= scenario.num_members or not 0 <= fault.engine < scenario.num_engines:
            return f"a fault of kind {fault.kind} names a machine or an engine that is not there"
    if any(abs(offset_s) > MOST_CLOCK_S for offset_s in _list_offsets(scenario)):
        return f"clocks are wrong by {MOST_CLOCK_S:g} s at most"
    return None


def _list_offsets(scenario: UnitScenario) -> list[float]:
    return [*scenario.clock_offsets_s, *(fault.amount for fault in scenario.faults if fault.kind == "clock")]


def shrink_unit(scenario: UnitScenario, fails: Callable[[UnitScenario], bool]) -> UnitScenario:
    """Returns a smaller scenario that still fails, without the requests, faults and machines that do not matter.

    Args:
        fails: runs a scenario.
    """
    return shrink_by(_simplify, scenario, fails)


def _simplify(scenario: UnitScenario) -> Iterator[UnitScenario]:
    """Yields scenarios that are simpler by one thing."""
    replace = msgspec.structs.replace
    for name in ("faults", "jobs"):
        items = getattr(scenario, name)
        for size in sorted({len(items) // 2, 1} - {0}, reverse=True):
            for start in range(0, len(items), size):
                yield replace(scenario, **{name: items[:start] + items[start + size :]})
    if scenario.num_members > 1:
        last = scenario.num_members - 1
        faults = tuple(replace(fault, machine=min(fault.machine, last)) for fault in scenario.faults)
        yield replace(scenario, num_members=last, faults=faults)
    if scenario.num_engines > 1:
        faults = tuple(replace(fault, engine=0) for fault in scenario.faults)
        yield replace(scenario, num_engines=1, faults=faults)
    if any(scenario.clock_offsets_s):
        yield replace(scenario, clock_offsets_s=())
    for name in ("num_blocks", "max_num_seqs", "max_waiting", "stall_timeout_s", "delay_s", "judging_s"):
        if getattr(scenario, name) != getattr(_PLAIN, name):
            yield replace(scenario, **{name: getattr(_PLAIN, name)})
    for index, job in enumerate(scenario.jobs):
        for simpler in simplify_job(job):
            yield replace(scenario, jobs=(*scenario.jobs[:index], simpler, *scenario.jobs[index + 1 :]))
