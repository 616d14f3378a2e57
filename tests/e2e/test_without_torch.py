"""From disk to the first token on a CPU, no process imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch

from tests.serving import MODEL, ServeProcess

HEAVY = ("torch", "transformers", "triton", "matplotlib")


def holds_torch(pid: int) -> bool:
    """Tells whether a process has torch's library in memory, which importing it does."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="libraries of another process are seen in /proc")
def test_neither_process_of_a_server_holds_torch_after_the_first_token() -> None:
    assert torch.__version__
    assert holds_torch(os.getpid()), "this test cannot see torch"
    running = ServeProcess("--device", "cpu")
    try:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=300)
        assert answer.json()["usage"]["completion_tokens"] == 1
        assert not holds_torch(running.process.pid)
        assert not holds_torch(running.engine_pid)
    finally:
        status, _ = running.stop()
    assert status == 0


def test_an_llm_answers_without_any_heavy_library() -> None:
    code = (
        "import sys, cloister\n"
        "with cloister.LLM(device='cpu') as llm:\n"
        "    answer = llm.generate('The king', cloister.SamplingParams(max_tokens=1))[0]\n"
        "    assert len(answer.outputs[0].token_ids) == 1\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"
