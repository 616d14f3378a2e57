"""lm-eval: the two small tasks beside this file, log-likelihoods through text completions and answers through both APIs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from checks import PROGRAMS, model_name, run_checks, server_url

FOLDER = Path(__file__).resolve().parent
URL = server_url()
MODEL = model_name(URL)


def evaluate(kind: str, path: str, tasks: str, *flags: str) -> dict[str, Any]:
    """Runs the tasks and returns lm-eval's results; the tasks name their data by relative paths."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(PROGRAMS / "lm_eval"), "run", "--model", kind, "--include_path", ".", "--tasks", tasks]
        command += ["--model_args", f"model={MODEL},base_url={URL}{path},max_length=2048", "--output_path", folder, *flags]
        variables = {**os.environ, "HF_HOME": folder, "HF_DATASETS_CACHE": f"{folder}/datasets"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=FOLDER, env=variables, check=False)
        reports = sorted(Path(folder).rglob("results_*.json"))
        assert done.returncode == 0 and reports, (done.stderr or done.stdout)[-300:]
        found: dict[str, Any] = json.loads(reports[-1].read_text(encoding="utf-8"))["results"]
    return found


def completions() -> str:
    found = evaluate("local-completions", "/v1/completions", "modules_choice,keywords_generate")
    choice, words = found["modules_choice"]["acc,none"], found["keywords_generate"]["exact_match,first-word"]
    assert 0 < choice <= 1 and 0 <= words <= 1
    return f"accuracy of choice {choice:.2f}, of generated words {words:.2f}"


def chat() -> str:
    found = evaluate("local-chat-completions", "/v1/chat/completions", "keywords_generate", "--apply_chat_template")
    return f"accuracy of generated words {found['keywords_generate']['exact_match,first-word']:.2f}"


run_checks("lm-eval", {"local-completions: log-likelihoods, generation": completions, "local-chat-completions": chat})
