"""`cloister verify traces` as a person runs it: a sealed node keeps nothing of what it was sent, a plain server does."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.thinning import thin
from tests.trust.residue.test_planted_leaks import can_trace

pytestmark = pytest.mark.skipif(not can_trace(), reason="memory of other processes may not be read here")


def verify(*flags: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "cloister.cli", "verify", "traces", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.stdout, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, told


def roles_with_finds(looked: list[dict[str, Any]]) -> set[str]:
    return {one["role"] for one in looked if one["finds"]}


@pytest.mark.parametrize("num_requests", thin([4, 20], 1))  # of 20 shapes
def test_a_sealed_node_keeps_nothing(num_requests: int) -> None:
    status, told = verify("--profile", "private", "--direct", "--requests", str(num_requests))
    assert told["obstacles"] == []
    assert roles_with_finds(told["during"]) == {"worker", "engine"}
    assert roles_with_finds(told["after"]) == set()
    assert status == 0
    assert any("worker" in process for process in told["ended_processes"])


@pytest.mark.slow  # that traces are found, tests/trust/residue/test_planted_leaks.py shows
def test_a_server_that_trusts_its_one_user_keeps_what_it_was_sent() -> None:
    status, told = verify("--profile", "open", "--requests", "2")
    assert told["obstacles"] == []
    assert roles_with_finds(told["after"]) == {"front", "engine"}
    assert status == 1
