"""What root without six capabilities tries from outside: on a hardened process it fails, on another one it works."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloister.trust.hardening import HOST, Needs, Results, Sealed
from cloister.trust.hardening.interpreter import QUIET_SIGNALS
from tests.trust.hardening.attacks import READING
from tests.trust.hardening.launching import DEADLINE_S, DROPPED, HERE, drop, launcher, living, needs_measures, why_not_root
from tests.trust.hardening.victim import SIZE

pytestmark = [needs_measures, pytest.mark.skipif(why_not_root() is not None, reason=str(why_not_root()))]
Outcomes = dict[str, dict[str, Any]]

OTHERWISE_REFUSED = ("load_bpf", "probe_user_space", "read_physical_memory")
"""They need the dropped capabilities whatever the target: no control can be had without them."""


def attack(profile: str, *, stripped: bool) -> Outcomes:
    """Attacks a victim that the launcher started under the profile; it never has more rights than the attacker."""
    with living(launcher("victim.py", profile=profile), stripped=True) as (_, told):
        where = [str(told["pid"]), str(told["address"]), str(SIZE), str(told["descriptor"]), told["secret"]]
        command = [sys.executable, "-P", str(HERE / "attacks.py"), *where]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=True, preexec_fn=drop if stripped else None
        )
    outcomes: Outcomes = json.loads(done.stdout)
    return outcomes


@pytest.fixture(scope="module")
def on_hardened() -> Outcomes:
    return attack("private", stripped=True)


@pytest.fixture(scope="module")
def on_ordinary() -> Outcomes:
    return attack("open", stripped=True)


@pytest.fixture(scope="module")
def by_host() -> Outcomes:
    if (why := why_not_root(*DROPPED)) is not None:
        pytest.skip(why)
    return attack("private", stripped=False)


def skip_if_not_there(outcome: dict[str, Any]) -> None:
    if outcome["outcome"] == "not there":
        pytest.skip(outcome["why"])


@pytest.mark.parametrize("name", [name for name in READING if name not in OTHERWISE_REFUSED])
def test_an_attack_works_on_a_process_without_measures(name: str, on_ordinary: Outcomes) -> None:
    skip_if_not_there(on_ordinary[name])
    assert on_ordinary[name]["outcome"] == "succeeded", on_ordinary[name]["why"]


@pytest.mark.parametrize("name", READING)
def test_an_attack_by_root_without_capabilities_fails_on_a_hardened_process(name: str, on_hardened: Outcomes) -> None:
    skip_if_not_there(on_hardened[name])
    assert on_hardened[name]["outcome"] == "failed"


@pytest.mark.parametrize("name", READING)
def test_the_host_is_not_excluded(name: str, by_host: Outcomes) -> None:
    skip_if_not_there(by_host[name])
    assert by_host[name]["outcome"] == "succeeded", by_host[name]["why"]


def test_the_secret_itself_is_what_is_read_where_an_attack_works(on_ordinary: Outcomes, by_host: Outcomes) -> None:
    readers = ("attach_with_ptrace", "read_proc_mem", "read_with_process_vm", "open_descriptor", "take_descriptor")
    for outcomes in (on_ordinary, by_host):
        assert all(outcomes[name]["has_secret"] for name in readers)


def test_evidence_says_that_the_host_is_not_excluded() -> None:
    statement = Sealed("private", Needs("front"), Results("front")).statement()
    assert statement[HOST].startswith("missing: host not excluded")


def test_at_least_twelve_attacks_were_tried(on_hardened: Outcomes) -> None:
    assert sum(outcome["outcome"] == "failed" for outcome in on_hardened.values()) >= 12


def crash(profile: str, directory: Path) -> tuple[int, int]:
    """Lets a victim die of a bad access after its limit was raised, as far as it can be; returns code and status of its end."""
    with living(launcher("victim.py", profile=profile), stripped=True, cwd=directory) as (process, _):
        Path(f"/proc/{process.pid}/coredump_filter").write_text("0x7f")  # root may; it says what a core would hold
        with contextlib.suppress(PermissionError):  # above the hard limit it takes SYS_RESOURCE
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        process.send_signal(signal.SIGSEGV)
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_code, ended.si_status


def test_a_crash_writes_no_core(tmp_path: Path) -> None:
    assert crash("private", tmp_path) == (os.CLD_KILLED, signal.SIGSEGV)
    assert list(tmp_path.iterdir()) == []


def test_a_crash_without_measures_writes_one(tmp_path: Path) -> None:
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        pytest.skip("this machine lets nobody write core files")
    assert crash("open", tmp_path) == (os.CLD_DUMPED, signal.SIGSEGV)


def test_no_signal_ends_a_process_or_makes_it_talk() -> None:
    with living(launcher("victim.py"), stripped=True) as (process, _):
        for name in QUIET_SIGNALS:
            process.send_signal(getattr(signal, name))
        _, errors = process.communicate("\n", timeout=DEADLINE_S)
    assert (process.returncode, errors) == (0, "")
