"""The starter: makes the roles of a node and nothing else, and is missed in order."""

from __future__ import annotations

import signal

from tests.trust.hardening.launching import needs_measures, run_launched

pytestmark = needs_measures


def test_a_starter_makes_the_roles_of_its_node_and_nothing_else() -> None:
    told = run_launched("starting.py", options=("--with-engine",))
    assert told == {
        "shell": "no such role or process",
        "module": "no such role or process",
        "measures": True,
        "runs": None,
        "ended": 0,
        "killed": -signal.SIGKILL,
        "stranger": None,
        "without starter": -signal.SIGKILL,
        "no starter": told["no starter"],
    }
    assert "restart the node" in told["no starter"]
