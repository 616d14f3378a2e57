"""What a process cannot do from inside once it took its measures: with root, on every thread."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloister.trust.hardening import kernel
from cloister.trust.hardening.applying import CLOSING, MEASURES
from cloister.trust.hardening.privileges import CAP_NET_BIND_SERVICE
from tests.serving import free_port
from tests.trust.hardening.launching import DEADLINE_S, HERE, capabilities, launcher, needs_measures, run_launched

pytestmark = needs_measures

CLOSED = {
    "allowed: take its port": "EPERM",
    "allowed: write where it may": "EPERM",
    "allowed: map code": "EPERM",
    "allowed: load a library": "OSError",
    "allowed: import a module": "ModuleNotFoundError",
}
REFUSALS = {"EPERM", "EACCES", "ENOSYS", "RefusedHook", "ValueError"}
FREE_LOW_PORT = 1021
"""exp1, for experiments (RFC 4727)."""
Told = dict[str, Any]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    port = free_port()  # below those that the kernel gives away, so that nobody takes it or the next one meanwhile
    return tmp_path_factory.mktemp("writable"), tmp_path_factory.mktemp("forbidden"), port


def try_inside(places: tuple[Path, Path, int], mode: str, profile: str = "private") -> Told:
    writable, _, port = places
    options = ("--write", str(writable), "--listen", str(port))
    return run_launched("inside.py", *places, mode, profile=profile, options=options)


@pytest.fixture(scope="module")
def hardened(places: tuple[Path, Path, int]) -> Told:
    return try_inside(places, "open")


@pytest.fixture(scope="module")
def closed(places: tuple[Path, Path, int]) -> Told:
    return try_inside(places, "closed")


@pytest.mark.parametrize("thread", ["main", "thread"])
def test_everything_is_refused_but_what_the_process_needs(hardened: Told, thread: str) -> None:
    outcomes = hardened[thread]
    allowed = {name for name in outcomes if name.startswith("allowed: ")}
    assert {name: outcomes[name] for name in allowed} == dict.fromkeys(allowed, "worked")
    refused = {name: what for name, what in outcomes.items() if name not in allowed}
    assert [name for name, what in refused.items() if what not in REFUSALS] == []
    assert len(refused) > 80


@pytest.mark.parametrize("thread", ["main", "thread"])
def test_a_closed_process_takes_in_no_code_and_writes_nowhere(closed: Told, thread: str) -> None:
    assert {name: closed[thread][name] for name in CLOSED} == CLOSED
    assert closed[thread]["allowed: make a thread"] == "worked"


def test_the_same_works_in_a_process_that_takes_no_measures(places: tuple[Path, Path, int]) -> None:
    outcomes = try_inside(places, "harmless", profile="open")["main"]
    refused_by_nature = {"name a tracer": {"EINVAL", "worked"}, "call out": {"ECONNREFUSED"}}
    assert [name for name, what in outcomes.items() if what not in refused_by_nature.get(name, {"worked"})] == []


def test_the_statement_has_every_measure(hardened: Told, closed: Told) -> None:
    names = {f"front.{measure.name}" for measure in MEASURES}
    assert set(hardened["statement"]) == {*names, "host"}
    assert set(closed["statement"]) == {*names, *(f"front.{measure.name}" for measure in CLOSING), "host"}
    assert all(text.startswith("applied: ") for name, text in closed["statement"].items() if name != "host")


@pytest.mark.skipif(not capabilities() >> CAP_NET_BIND_SERVICE & 1, reason="nobody here may take a port below 1024")
def test_a_port_below_1024_costs_one_capability_and_no_other(places: tuple[Path, Path, int]) -> None:
    told = try_inside((*places[:2], FREE_LOW_PORT), "open")
    assert told["main"]["allowed: take its port"] == "worked"
    assert told["main"]["take another port"] == "EACCES"
    assert told["statement"]["front.capabilities"] == "applied: none but NET_BIND_SERVICE"


def run_with_thread(when: str) -> dict[str, str]:
    command = [sys.executable, "-P", "-s", "-B", str(HERE / "early_thread.py"), when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, str] = json.loads(done.stdout)
    return told


def test_closing_holds_on_threads_that_were_there_before() -> None:
    assert run_with_thread("before closing") == {"map code": "PermissionError"}


def test_measures_are_refused_to_a_process_that_has_threads_already() -> None:
    assert "threads already" in run_with_thread("before measures")["refused"]


@pytest.mark.skipif(kernel.machine() != "x86_64", reason="only x86_64 has these interfaces")
@pytest.mark.parametrize("interface", ["i386", "x32"])
def test_a_call_of_another_interface_ends_the_process(interface: str) -> None:
    ends = {}
    for profile in ("private", "open"):
        done = subprocess.run(
            launcher("foreign.py", interface, profile=profile), capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        ends[profile] = done.returncode
    assert ends == {"private": -signal.SIGSYS, "open": 0}
