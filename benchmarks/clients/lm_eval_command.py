"""lm-eval: the two small tasks of lm_eval/, with log-likelihoods from text completions and answers from those and from chat."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from checks import PROGRAMS, model_name, run_checks, server_url

FOLDER = Path(__file__).resolve().parent / "lm_eval"
URL = server_url()
MODEL = model_name(URL)


def evaluate(kind: str, path: str, tasks: str, *flags: str) -> dict[str, Any]:
    """Returns lm-eval's report on `tasks`, which name their data by paths relative to FOLDER."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(PROGRAMS / "lm_eval"), "run", "--model", kind, "--include_path", ".", "--tasks", tasks]
        command += ["--model_args", f"model={MODEL},base_url={URL}{path},max_length=2048", "--output_path", folder, *flags]
        variables = {**os.environ, "HF_HOME": folder, "HF_DATASETS_CACHE": f"{folder}/datasets"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=FOLDER, env=variables, check=False)
        reports = sorted(Path(folder).rglob("results_*.json"))
        assert done.returncode == 0 and reports, (done.stderr or done.stdout)[-300:]
        found: dict[str, Any] = json.loads(reports[-1].read_text(encoding="utf-8"))
    return found


def completions() -> str:
    found = evaluate("local-completions", "/v1/completions", "modules_choice,keywords_generate")["results"]
    choice, words = found["modules_choice"]["acc,none"], found["keywords_generate"]["exact_match,first-word"]
    assert choice > 0.4, f"accuracy of choice {choice:.2f}; chance is 0.25"
    return f"accuracy of choice {choice:.2f}, of generated words {words:.2f}"


def chat() -> str:
    found = evaluate("local-chat-completions", "/v1/chat/completions", "keywords_generate", "--apply_chat_template")
    return f"{found['n-samples']['keywords_generate']['effective']} answers, scored"


run_checks("lm-eval", {"completions: log-likelihoods, generation": completions, "chat: generation": chat})
