"""The engines of a node in its statement: a node is one trust unit, whose engines are as many, and as hardened, as it states.
Pure: no I/O, no clock."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from cloister.trust.attestation.base import Findings
from cloister.trust.attestation.evidence import Statement

ENGINE: Final = "engine"
DRAWN: Final = "capacity_random"
_SETTINGS: Final = ("replicas", "router", "prefill", "decode", "kv_transfer")


def engine_name(index: int) -> str:
    """Returns the name that the measures of an engine process have in a statement."""
    return f"{ENGINE}-{index}" if index else ENGINE


def check_unit(findings: Findings, statement: Statement) -> None:
    """Adds a step for the engines of a node that has several, or states that it has.

    Its settings say how many engines it has; its hardening has the measures of each engine process that was started when the
    statement was made. A node whose front and engines do not agree is refused, and so is one whose requests are not drawn.
    """
    settings = _read(statement.configuration)
    named = {name.rpartition(".")[0] for name in statement.hardening}
    engines = {name for name in named if name == ENGINE or name.startswith(f"{ENGINE}-")}
    num_engines = settings.get("replicas", 1)
    if type(num_engines) is int and num_engines == 1 and len(engines) <= 1:
        return
    is_number = type(num_engines) is int and num_engines == len(engines)
    if not is_number or engines != {engine_name(index) for index in range(len(engines))}:
        findings.fail(
            "unit",
            f"the node states {_show(num_engines)} engines, and its evidence has the measures of {len(engines)}: one was "
            "added, left out or exchanged; take another node",
        )
        return
    measures: dict[str, set[str]] = {}
    for process, _, measure in (name.rpartition(".") for name in statement.hardening):
        measures.setdefault(process, set()).add(measure)
    if any(measures[engine] != measures[ENGINE] for engine in engines):
        findings.fail(
            "unit", "the engines of the node do not have the same measures, so one may be less hardened; take another node"
        )
        return
    findings.check(
        "unit",
        settings.get("router") == DRAWN,
        f"the node is one unit of {num_engines} engines{_describe_roles(settings)}, each of them measured; an engine is drawn "
        "by capacity, and nothing that others send decides",
        f"inside the node, requests are divided by {_show(settings.get('router'))}, which can be steered",
    )


def _show(value: object) -> str:
    return str(value)[:16]


def _describe_roles(settings: Mapping[str, object]) -> str:
    if not settings.get("prefill"):
        return ""
    return (
        f" ({_show(settings['prefill'])} compute prompts, {_show(settings.get('decode'))} go on with answers; KV passes by the "
        f"transport {_show(settings.get('kv_transfer'))})"
    )


def _read(configuration: Mapping[str, str]) -> dict[str, object]:
    """Returns the settings that say what a unit is, as far as there are any. What is no JSON is None."""
    found: dict[str, object] = {}
    for name in _SETTINGS:
        if (written := configuration.get(f"setting {name}")) is not None:
            try:
                found[name] = json.loads(written)
            except (ValueError, RecursionError):
                found[name] = None
    return found
