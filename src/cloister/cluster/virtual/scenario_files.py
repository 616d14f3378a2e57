"""Files of scenarios: reads, checks and writes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import msgspec
import msgspec.inspect

from cloister.cluster.routers import ROUTERS
from cloister.cluster.virtual.grammars import GRAMMARS
from cloister.cluster.virtual.scenario import NUM_ADAPTERS, Scenario
from cloister.scheduler import POLICIES
from cloister.types.errors import ConfigError

EXAMPLE: Final = '{"seed": 1, "jobs": [{"at_s": 0, "prompt": "hello"}]}'
_NO_CHOICE: Final = re.compile(r"Invalid enum value .* - at `\$\.([^`]*)`")
MIN_POOLED: Final = 2
"""Minimum slots of a pool, so that one can be lent."""
MAX_BEAMS: Final = 8


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
    if scenario.pool != "none" and scenario.tiers[0] < MIN_POOLED:
        return f"a pool needs at least {MIN_POOLED} slots in memory"
    if any(not 0 <= job.beams <= MAX_BEAMS or 0 < job.beams < job.n for job in scenario.jobs):
        return f"beams must be n to {MAX_BEAMS}, or 0 for no search"
    return None


def write_scenario(scenario: msgspec.Struct, path: Path) -> None:
    """Writes a scenario as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(scenario), indent=1) + b"\n")
