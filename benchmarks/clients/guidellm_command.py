"""guidellm: load with its synthetic prompts, four at a time through chat, and at a constant rate through text completions."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from checks import PROGRAMS, TOKENIZER, run_checks, server_url

URL = server_url()
NUM_REQUESTS = 20


def load(profile: str, request_format: str) -> str:
    """Sends NUM_REQUESTS and reads guidellm's own report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [str(PROGRAMS / "guidellm"), "run", "--disable-console"]
        command += ["--backend", f"kind=openai_http,target={URL},request_format={request_format}"]
        command += ["--profile", profile, "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}", "--output", f"kind=json,path={report}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, (done.stderr or done.stdout)[-300:]
        found = json.loads(report.read_text(encoding="utf-8"))
    totals = found["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0), totals
    return f"{totals['successful']} of {totals['total']} answered"


run_checks(
    "guidellm",
    {
        "chat, 4 at a time": lambda: load("kind=concurrent,streams=4", "/v1/chat/completions"),
        "completions, 10 a second": lambda: load("kind=constant,rate=10", "/v1/completions"),
    },
)
