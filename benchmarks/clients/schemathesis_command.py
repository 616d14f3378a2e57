"""schemathesis: requests made from `/openapi.json`, valid and invalid ones, and how many of the valid ones are answered."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from checks import PROGRAMS, run_checks, server_url

URL = server_url()
MODEL_LOADING = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
NEEDS_MORE = ("/infill", "/v1/batches", "/v1/files")
"""Routes that this model, or a server without --files, cannot answer."""


def run(folder: Path, time_s: int, *flags: str) -> tuple[int, str, Counter[int]]:
    """Returns the exit status, what was said, and how often each status came."""
    report = folder / "report.ndjson"
    command = [
        str(PROGRAMS / "schemathesis"),
        "run",
        f"{URL}/openapi.json",
        "--max-time",
        str(time_s),
        "--seed",
        "1",
        "--no-color",
    ]
    command += ["--request-timeout", "60", "--generation-database", "none", "--continue-on-failure", "--report", "ndjson"]
    command += ["--report-ndjson-path", str(report)]
    for path in MODEL_LOADING:
        command += ["--exclude-path", path]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=time_s + 120, check=False, cwd=folder)
    statuses: Counter[int] = Counter()
    for line in report.read_text(encoding="utf-8").splitlines():
        recorder = json.loads(line).get("ScenarioFinished", {}).get("recorder") or {}
        replies = (entry.get("response") for entry in (recorder.get("interactions") or {}).values())
        statuses.update(reply["status_code"] for reply in replies if reply)
    return done.returncode, done.stdout, statuses


def reference() -> str:
    """Every check but that valid requests are taken: a schema cannot say that a prompt fits into the window."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--phases", "examples,coverage,fuzzing", "--exclude-checks", "positive_data_acceptance")
        status, said, statuses = run(Path(folder), 150, *flags)
    assert status == 0, " ".join(said.partition("= FAILURES =")[2].split())[:280]
    assert not any(code >= 500 for code in statuses), statuses
    return f"{sum(statuses.values())} requests, no 5xx, no reply outside its schema"


def answered() -> str:
    with tempfile.TemporaryDirectory() as folder:
        left_out = [flag for path in NEEDS_MORE for flag in ("--exclude-path-regex", f"^{path}")]
        flags = ("--phases", "fuzzing", "--mode", "positive", "--max-examples", "40", "--include-method", "POST", *left_out)
        _, _, statuses = run(Path(folder), 80, *flags)
    num_refused = statuses[400]
    total = sum(statuses.values())
    assert num_refused <= 0.05 * total, statuses
    return f"{statuses[200]} of {total} valid requests answered, {statuses[404]} named another model, {num_refused} refused"


run_checks("schemathesis", {"own reference": reference, "valid requests are answered": answered})
