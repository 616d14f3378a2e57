"""`cloister cluster up` and `fuzz` as a person runs them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from cloister.cli import main
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
