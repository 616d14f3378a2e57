"""`cloister cluster fuzz` as a person runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cloister.cli", "cluster", "fuzz", *args], capture_output=True, text=True, timeout=300
    )


def test_seeds_are_run_counted_and_kept_to(tmp_path: Path) -> None:
    done = run("--seeds", "0..20", "--output", str(tmp_path / "found"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("20 seeds, ")
    assert "every promise was kept" in done.stdout
    assert not (tmp_path / "found").exists()


def test_a_scenario_is_run_from_its_file_and_wrong_arguments_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(
        json.dumps({"seed": 1, "jobs": [{"at_s": 0.1, "prompt": "hello"}], "faults": [{"at_s": 0.15, "kind": "crash"}]})
    )
    done = run("--scenario", str(path))
    assert (done.returncode, done.stdout) == (0, f"{path} kept every promise\n")
    for args in (["--seeds", "7"], ["--seeds", "9..9"], ["--scenario", str(tmp_path / "none.json")]):
        done = run(*args)
        assert done.returncode != 0
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
