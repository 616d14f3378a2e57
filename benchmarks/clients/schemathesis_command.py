"""schemathesis: requests made from `/openapi.json`, valid and invalid ones, and how many of the valid ones are answered."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from checks import PROGRAMS, run_checks, server_url

URL = server_url()
LOADING = r"^/v1/(un)?load_lora_adapter"
"""Routes that change what the next request meets."""
NOT_MADE = r"^(/infill|/v1/batches|/v1/files|/v1/pdf/text|/v1/(un)?load_lora_adapter)"
"""Routes whose valid requests need what this model or server lacks (`--files`, tokens to fill in), or a PDF."""
MAX_REFUSED = 0.05
"""Part of the valid requests that may be refused for what a schema cannot say, such as that two lists are of one length."""


def run(time_s: int, left_out: str, *flags: str) -> tuple[int, str, Counter[int]]:
    """Returns the exit status, what schemathesis said, and how often the server answered with each status."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.ndjson"
        command = [str(PROGRAMS / "schemathesis"), "run", f"{URL}/openapi.json", "--exclude-path-regex", left_out]
        command += ["--max-time", str(time_s), "--request-timeout", "60", "--seed", "1", "--continue-on-failure", "--no-color"]
        command += ["--generation-database", "none", "--report", "ndjson", "--report-ndjson-path", str(report), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=time_s + 120, check=False, cwd=folder)
        statuses: Counter[int] = Counter()
        for line in report.read_text(encoding="utf-8").splitlines():
            recorder = json.loads(line).get("ScenarioFinished", {}).get("recorder") or {}
            replies = (entry.get("response") for entry in (recorder.get("interactions") or {}).values())
            statuses.update(reply["status_code"] for reply in replies if reply)
    return done.returncode, done.stdout, statuses


def reference() -> str:
    """Every check but that valid requests are taken: a schema cannot say that a prompt fits into the window."""
    flags = ("--phases", "examples,coverage,fuzzing", "--exclude-checks", "positive_data_acceptance")
    status, said, statuses = run(150, LOADING, *flags)
    assert status == 0, " ".join(said.partition("= FAILURES =")[2].split())[:280]
    assert statuses and not any(code >= 500 for code in statuses), statuses
    return f"{statuses.total():,} requests, no 5xx, no reply outside its schema"


def answered() -> str:
    flags = ("--phases", "fuzzing", "--mode", "positive", "--max-examples", "40", "--include-method", "POST")
    _, said, statuses = run(80, NOT_MADE, *flags)
    assert statuses, said[-280:]
    num_others = statuses[404]
    num_refused = statuses.total() - statuses[200] - num_others
    assert num_refused <= MAX_REFUSED * statuses.total(), statuses
    return f"{statuses[200]} of {statuses.total()} answered, {num_others} named another model, {num_refused} refused"


run_checks("schemathesis", {"valid and invalid requests": reference, "valid requests": answered})
