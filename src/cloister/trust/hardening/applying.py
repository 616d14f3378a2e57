"""Applies every hardening measure to this process in the required order, and locks it before the first request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from cloister.trust.hardening.code import Code, Imports
from cloister.trust.hardening.dumps import CoreLimit, Dumpable, Swap
from cloister.trust.hardening.interpreter import Faulthandler, Hooks, Signals, Tracebacks
from cloister.trust.hardening.landlock import Landlock
from cloister.trust.hardening.measure import Measure, Missing, Needs, Result, Results
from cloister.trust.hardening.privileges import Capabilities, Environment, NoNewPrivileges
from cloister.trust.hardening.seccomp import Closing, Seccomp
from cloister.types.errors import CloisterError

HARDENED_PROFILES: Final = ("private", "paranoid")
"""Profiles under which every measure is applied, and a missing one prevents the start."""

MEASURES: Final[tuple[Measure, ...]] = (
    Environment(),
    Hooks(),
    Tracebacks(),
    Faulthandler(),
    Signals(),
    CoreLimit(),
    Swap(),  # before capabilities: locking memory may need one
    Capabilities(),
    NoNewPrivileges(),
    Landlock(),
    Dumpable(),  # after capabilities: the kernel resets it when they change
    Seccomp(),
)
"""In the order of application."""

CLOSING: Final[tuple[Measure, ...]] = (Imports(), Code(), Closing())
"""Measures that lock down a process once everything is loaded."""


class HardeningError(CloisterError):
    """A measure that the profile requires is not available; the message says what to do."""

    code = "not_hardened"


def apply(profile: str, needs: Needs, measures: Sequence[Measure] = MEASURES) -> Results:
    """Irrevocably applies every measure to this process. Call it before libraries load and before there are threads.

    Under `open` and `team` nothing is applied, which the results state.

    Args:
        profile: name of the privacy profile.
        needs: what the process must still be able to do.

    Raises:
        HardeningError: under `private` or `paranoid` a measure is missing.
    """
    if profile not in HARDENED_PROFILES:
        why = f"not asked for by profile {profile}"
        return Results(needs.role, tuple(Result(measure.name, False, why) for measure in measures))
    return _demand(profile, Results(needs.role, tuple(_apply_one(measure, needs) for measure in measures)))


def close(profile: str, results: Results, needs: Needs) -> Results:
    """Locks down this process once everything is loaded: no new code, no new sockets, no file opened for writing.

    Returns:
        `results` with the outcome added.

    Raises:
        HardeningError: the measure is not available.
    """
    if profile not in HARDENED_PROFILES:
        return results
    return _demand(profile, replace(results, items=(*results.items, *(_apply_one(measure, needs) for measure in CLOSING))))


def probe(measures: Sequence[Measure] = MEASURES) -> Iterator[Result]:
    """Yields the expected result of each measure on this machine, without changing anything."""
    for measure in measures:
        try:
            yield Result(measure.name, True, measure.probe())
        except Missing as missing:
            yield Result(measure.name, False, missing.reason, missing.remedy)


def _apply_one(measure: Measure, needs: Needs) -> Result:
    try:
        return Result(measure.name, True, measure.apply(needs))
    except Missing as missing:
        return Result(measure.name, False, missing.reason, missing.remedy)
    except OSError as error:
        return Result(measure.name, False, f"the kernel refused it ({error.strerror})", "run `cloister doctor`")


def _demand(profile: str, results: Results) -> Results:
    if results.missing:
        list_of_missing = "; ".join(f"{item.measure}: {item.detail}. What to do: {item.remedy}" for item in results.missing)
        raise HardeningError(f"profile {profile} does not start without its measures ({results.role}). {list_of_missing}")
    return results
