"""One scenario keeps every promise in virtual time, on engine processes and on Ray, and shows it if one is broken."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from cloister.cluster.virtual import fuzz
from cloister.cluster.virtual.scenario import InjectedFault, Job, OperatorAction, Scenario
from cloister.cluster.virtual.scenario_files import write_scenario
from cloister.engine.in_flight import InFlightRequest
from cloister.launch.scenario import Body, find_impossible, run_on_processes, without_impossible
from cloister.types.errors import ConfigError
from cloister.types.events import Submit
from tests.serving import MODEL, descendants, find_processes

pytestmark = pytest.mark.usefixtures("no_log")

START_S = 240.0
END_S = 60.0

JOBS = tuple(
    Job(
        at_s=round(0.05 * number, 2),
        prompt=f"Once upon a time {number}",
        max_tokens=200,
        n=2 if number == 2 else 1,
        tenant=number % 2,
        temperature=0.8 if number % 2 else 0.0,
        seed=number if number % 2 else 0,
        cancel_after_s=0.2 if number == 4 else None,
    )
    for number in range(6)
)
CRASH = InjectedFault(at_s=0.1, kind="crash")
SCENARIO = Scenario(
    seed=1,
    num_blocks=200,
    stall_timeout_s=0.5,
    moves_kv=1.0,
    jobs=JOBS,
    faults=(CRASH, InjectedFault(at_s=0.2, kind="hang", replica=1, lasts_s=1000.0)),
    operations=(
        OperatorAction(at_s=0.1, kind="migrate", replica=1),
        OperatorAction(at_s=0.25, kind="drain"),
        OperatorAction(at_s=0.4, kind="flip", replica=1, role="decode"),
    ),
)


on_processes = pytest.mark.parametrize(
    "on",
    [
        "local",
        pytest.param(
            "ray",
            marks=[
                pytest.mark.slow,  # Ray takes some ten seconds to start
                pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray"),
            ],
        ),
    ],
)


@on_processes
def test_a_scenario_keeps_every_promise_in_virtual_time_and_on_processes(on: Body) -> None:
    virtual, real = fuzz.replay(SCENARIO), run_on_processes(SCENARIO, on, MODEL)
    assert virtual.violations == real.violations == ()
    assert virtual.faults == real.faults
    assert virtual.num_requests == real.num_requests == len(JOBS)


@on_processes
def test_both_find_a_bug(on: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_over(found: InFlightRequest, now: float) -> Submit:
        return Submit(found.request, found.seed)

    killer = msgspec.structs.replace(JOBS[0], kills_after=6, ignores_eos=True)  # its engine dies with half of its answer given
    crash = msgspec.structs.replace(SCENARIO, moves_kv=0.0, jobs=(killer, JOBS[1]), faults=(), operations=())
    assert fuzz.replay(crash).violations == run_on_processes(crash, on, MODEL).violations == ()
    monkeypatch.setattr(InFlightRequest, "submission", start_over)
    assert fuzz.replay(crash).violations
    assert run_on_processes(crash, on, MODEL).violations


@on_processes
def test_a_scenario_that_is_told_to_end_leaves_no_process_and_no_folder(on: Body, tmp_path: Path) -> None:
    path = tmp_path / "scenario.json"
    hang = InjectedFault(at_s=0.1, kind="hang", lasts_s=1000.0)
    late = msgspec.structs.replace(JOBS[0], at_s=1000.0)
    write_scenario(msgspec.structs.replace(SCENARIO, jobs=(late,), faults=(hang,), operations=()), path)
    command = [sys.executable, "-m", "cloister.cli", "cluster", "fuzz", "--scenario", str(path), "--on", on]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as running:
        give_up_s = time.monotonic() + START_S
        while not any(is_stopped(pid) for pid in find_processes(running.pid, "engine")):
            assert running.poll() is None
            assert time.monotonic() < give_up_s
            time.sleep(0.1)
        started = {pid: started_at(pid) for pid in descendants(running.pid)}
        folders = {folder for pid in started for folder in folders_of(pid)}  # and none of other tests that run now
        assert all(folder.exists() for folder in folders)
        assert bool(folders) == (on == "ray")
        running.terminate()
        assert running.wait(END_S) == 128 + signal.SIGTERM, running.communicate()[0].decode()
    assert [pid for pid in started if started_at(pid) == started[pid]] == []
    assert not any(folder.exists() for folder in folders)


def folders_of(pid: int) -> set[Path]:
    """Folders of a Ray that a process was started with."""
    with contextlib.suppress(OSError):  # it has ended
        return {Path(found) for found in re.findall(r"/tmp/cl-ray-\w+", Path(f"/proc/{pid}/cmdline").read_text())}
    return set()


def is_stopped(pid: int) -> bool:
    return stat_of(pid)[0] == "T"


def started_at(pid: int) -> str:
    """When a process started, in ticks; empty if there is none (proc(5), /proc/PID/stat)."""
    return stat_of(pid)[19]


def stat_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return [""] * 20


def test_what_only_virtual_time_can_do_is_refused_by_name_or_left_out() -> None:
    lost = InjectedFault(at_s=0.0, kind="network", amount=0.3)
    worse = OperatorAction(at_s=0.0, kind="update", weights=1, trouble="step")
    loaded = OperatorAction(at_s=0.0, kind="load")
    scenario = msgspec.structs.replace(
        SCENARIO,
        jobs=tuple(msgspec.structs.replace(job, adapter=1) for job in JOBS),
        faults=(CRASH, lost),
        operations=(worse, loaded),
        damages_kv=0.5,
        clock_offsets_s=(1.0,),
        length_error="zero",
        drafts="tree",
        tiers=(8, 0),
        num_adapters=1,
    )
    named = ["faults: network", "operations: update with weights", "operations: update with trouble"]
    named += ["operations: load or unload", "jobs: adapter", "damages_kv", "clock_offsets_s", "length_error", "drafts", "tiers"]
    assert find_impossible(scenario, "local") == named
    with pytest.raises(ConfigError, match=r"faults: network, .*--skip-impossible"):
        run_on_processes(scenario, "local", MODEL)
    assert without_impossible(scenario, "local") == msgspec.structs.replace(SCENARIO, faults=(CRASH,), operations=())
