"""aiperf: load with its synthetic prompts, streamed, through chat and text completions, and embeddings."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from checks import PROGRAMS, TOKENIZER, model_name, run_checks, server_url

URL = server_url()
MODEL = model_name(URL)
NUM_REQUESTS = 20
VARIABLES = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
"""Without a hub aiperf's tokenizer may be a folder, but where this is set it takes the folder for a name on the hub."""


def load(kind: str, *flags: str) -> str:
    """Sends NUM_REQUESTS, four at a time, and reads aiperf's own report."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(PROGRAMS / "aiperf"), "profile", "--model", MODEL, "--url", URL, "--endpoint-type", kind]
        command += ["--tokenizer", str(TOKENIZER), "--request-count", str(NUM_REQUESTS), "--concurrency", "4", "--ui", "none"]
        command += ["--synthetic-input-tokens-mean", "64", "--output-artifact-dir", folder, *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=VARIABLES, check=False)
        reports = sorted(Path(folder).rglob("profile_export_aiperf.json"))
        assert done.returncode == 0 and reports, (done.stderr or done.stdout)[-300:]
        found = json.loads(reports[0].read_text(encoding="utf-8"))
    num_good = found["request_count"]["avg"]
    assert num_good == NUM_REQUESTS and not found.get("error_summary"), found.get("error_summary")
    return f"{num_good:.0f} of {NUM_REQUESTS} answered"


LENGTH = ("--output-tokens-mean", "32", "--streaming")
run_checks(
    "aiperf",
    {
        "chat": lambda: load("chat", *LENGTH),
        "completions": lambda: load("completions", *LENGTH),
        "responses": lambda: load("responses", *LENGTH),
        "embeddings": lambda: load("embeddings"),
    },
)
