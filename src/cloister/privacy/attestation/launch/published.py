"""Launch measurements as a release names them: one name per kind and register. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_REGISTER: Final = re.compile(r"tdx-rtmr-([0-3])\Z")


def name_register(number: int) -> str:
    """Returns what a release calls a run-time measurement of TDX."""
    return f"tdx-rtmr-{number}"


def find_measurements(launch: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Returns what may be measured at launch by kind of evidence, for `Policy.measurements`."""
    return {name: frozenset({value}) for name, value in launch.items() if not _REGISTER.match(name)}


def find_registers(launch: Mapping[str, str]) -> dict[int, frozenset[str]]:
    """Returns what run-time measurements of TDX may hold by number, for `Policy.rtmrs`."""
    found = ((_REGISTER.match(name), value) for name, value in launch.items())
    return {int(match[1]): frozenset({value}) for match, value in found if match}
