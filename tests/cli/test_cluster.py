"""`cloister cluster up` and `fuzz` as a person runs them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from cloister.cli import main
from cloister.cli.cluster import describe_unfinished
from cloister.cluster.virtual.fuzz import SeedTally
from cloister.private.unit.pairing import SealedRecords

Captured = pytest.CaptureFixture[str]


def run(capsys: Captured, *args: str) -> tuple[object, str, str]:
    """Returns exit status, standard output and standard error."""
    with pytest.raises(SystemExit) as caught:
        main(["cluster", "fuzz", *args])
    assert logging.root.manager.disable == logging.NOTSET, "other tests of this process read logs"
    return caught.value.code or 0, *capsys.readouterr()


def test_up_is_serve(capsys: Captured) -> None:
    flags = ["--max-replicas", "3", "--min-replicas", "2", "--model", "cloister-5m", "--explain", "--json"]
    said = []
    for verb in (["serve"], ["cluster", "up"]):
        with pytest.raises(SystemExit) as caught:
            main([*verb, *flags])
        assert not caught.value.code
        said.append(json.loads(capsys.readouterr().out))
    assert said[0] == said[1]
    values = {each["setting"]: (each["value"], each["why"]) for each in said[1]}
    assert values["replicas"] == (3, "max_replicas")
    assert values["min_replicas"] == (2, "flag")


def test_seeds_are_run_counted_and_kept_to(tmp_path: Path, capsys: Captured) -> None:
    status, out, err = run(capsys, "--seeds", "0..20", "--output", str(tmp_path / "found"))
    assert status == 0, err
    assert out.startswith("20 seeds, ")
    assert "every promise was kept" in out
    assert not (tmp_path / "found").exists()


def test_a_scenario_is_run_from_its_file_and_wrong_arguments_are_one_line(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "one.json"
    path.write_text(
        json.dumps({"seed": 1, "jobs": [{"at_s": 0.1, "prompt": "hello"}], "faults": [{"at_s": 0.15, "kind": "crash"}]})
    )
    kept = f"1 requests, 8 tokens; faults: 1 crash\n{path} kept every promise\n"
    assert run(capsys, "--scenario", str(path))[:2] == (0, kept)
    lost = tmp_path / "lost.json"
    lost.write_text(json.dumps({"seed": 1, "faults": [{"at_s": 0.1, "kind": "network"}]}))
    for args in (
        ["--seeds", "7"],
        ["--seeds", "9..9"],
        ["--scenario", str(tmp_path / "none.json")],
        ["--on", "local"],
        ["--on", "local", "--scenario", str(lost)],
    ):
        status, _, err = run(capsys, *args)
        assert status != 0
        assert err.startswith("error: ")
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--scenario", "{}/wrong.json"], "`$.faults[0].kind`, which is one of clock_jump, crash, "),
        (["--scenario", "{}/wrong.json", "--seeds", "0..2"], "leave --seeds out"),
        (["--sealed", "--on", "local", "--seeds", "0..2"], "in virtual time only; leave --on out"),
        (["--seeds", "0..1", "--output", "{}/wrong.json/found"], "wrong.json is a file; name a folder"),
        (["--seeds", "0..1", "--output", "/proc/found"], "cannot write to the folder /proc/found"),
    ],
)
def test_arguments_that_cannot_be_are_refused_with_what_can(
    args: list[str], said: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong.json").write_text('{"seed": 1, "faults": [{"at_s": 0, "kind": "krash"}]}')
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "/proc" and access(path, mode))  # root may write there
    status, out, err = run(capsys, *(arg.format(tmp_path) for arg in args))
    assert status == 1
    assert said in err
    assert not out, "it ran"


def test_ctrl_c_leaves_what_was_found_so_far(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(*_: object) -> Iterator[SeedTally]:
        yield SeedTally(20, 100, 1000, Counter(crash=3), (7,))
        raise KeyboardInterrupt

    monkeypatch.setattr("cloister.cluster.virtual.fuzz.search", search)
    status, out, _ = run(capsys, "--seeds", "0..40")
    assert status == 130
    assert out == "so far 20 seeds, 100 requests, 1000 tokens; faults: 3 crash; seeds that broke a promise: 7\n"


def test_seeds_of_sealed_units_are_run_and_what_fails_is_made_small_and_runs_again(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(capsys, "--sealed", "--seeds", "7..9")[0] == 0
    monkeypatch.setattr(SealedRecords, "close", lambda records: None)  # keys of a pair that has ended are left
    status, out, err = run(capsys, "--sealed", "--seeds", "0..1", "--output", str(tmp_path))
    assert status == 1
    assert "1 seeds broke a promise" in err
    path = tmp_path / "0.json"
    assert f"keys; run it with --scenario {path}" in out
    small = json.loads(path.read_text())
    assert small["type"] == "unit"
    assert len(small["faults"]) == 1
    assert run(capsys, "--scenario", str(path))[0] == 1
    monkeypatch.undo()
    assert run(capsys, "--scenario", str(path))[0] == 0
    status, _, err = run(capsys, "--on", "local", "--scenario", str(path))
    assert status != 0
    assert "runs in virtual time only; leave --on out" in err
    for option in ("--sealed", "--skip-impossible"):
        status, _, err = run(capsys, option, "--scenario", str(path))
        assert status != 0
        assert f"leave {option} out" in err


@contextlib.contextmanager
def searching() -> Iterator[subprocess.Popen[bytes]]:
    """A search that two processes do, with a group of its own, as from a terminal: Ctrl-C there reaches all three."""
    command = [sys.executable, "-m", "cloister.cli", "cluster", "fuzz", "--seeds", "0..1000000", "--processes", "2"]
    pipe, heed = subprocess.PIPE, partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests may run where it is ignored
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, start_new_session=True, preexec_fn=heed) as process:
        try:
            wait_for_workers(process.pid, 2)
            yield process
        finally:
            process.kill()


def test_ctrl_c_ends_a_search_in_several_processes_quietly() -> None:
    with searching() as process:
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_a_search_that_is_killed_leaves_no_process() -> None:
    with searching() as process:
        process.kill()
        process.communicate(timeout=300)  # its standard output ends when the last process that has it ends


def wait_for_workers(pid: int, count: int) -> None:
    """Waits until so many processes that this one started have computed for half a second: by then they run seeds."""
    give_up_s = time.monotonic() + 300
    while time.monotonic() < give_up_s:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        times = [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split() for child in children]
        ticks = os.sysconf("SC_CLK_TCK")
        if sum((int(each[11]) + int(each[12])) / ticks > 0.5 for each in times) >= count:
            return
        time.sleep(0.05)
    pytest.fail("the processes of the search did not start")


@pytest.mark.parametrize(
    ("num_updated", "said"),
    [
        (0, "no replica has a new engine: it does not start"),
        (1, "1 of 2 replicas have a new engine, the others keep theirs: it does not start"),
    ],
)
def test_an_update_that_failed_says_how_far_it_came(num_updated: int, said: str) -> None:
    assert describe_unfinished({"num_updated": num_updated, "num_replicas": 2, "error": "it does not start"}) == said


def test_a_key_that_the_server_does_not_know_is_not_asked_for_once_more(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(capsys: Captured, *arguments: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as caught:
            main(["cluster", "status", *arguments])
        return caught.value.code, capsys.readouterr().err

    monkeypatch.setattr(httpx, "request", lambda *arguments, **options: httpx.Response(401, json={}))
    (tmp_path / "key").write_text("clo-wrong\n")
    status, err = fail(capsys, "--api-key-file", str(tmp_path / "key"))
    assert (status, "does not know the API key in" in err, "give --api-key-file" in err) == (1, True, False)
    status, err = fail(capsys)
    assert (status, "give --api-key-file" in err, "keys add NAME --operator" in err) == (1, True, True)
    assert "clo-wrong" not in err
