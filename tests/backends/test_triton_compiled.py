"""Every kernel compiles to machine code for a GPU that is not here, and fits it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import needs_triton

pytestmark = needs_triton
SHARED_BYTES = 227 << 10
"""Shared memory that a program may have on compute capability 9.0 (CUDA programming guide, technical specifications)."""


@pytest.mark.parametrize("variants", [["--few"], pytest.param([], marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler is for Linux")
def test_every_kernel_of_a_step_compiles_for_hopper(variants: list[str], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.compiling", "90", *variants]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    taken = json.loads(run.stdout)
    assert set(taken) == {
        "attend_kernel", "join_kernel", "rotate_kernel", "norm_kernel", "gate_kernel", "matmul_kernel", "grouped_kernel",
        "round_kernel", "float8_kernel", "largest_kernel",
    }  # fmt: skip
    assert taken["attend_kernel"]["variants"] >= 3  # prefill, decode, and both
    assert all(entry["shared"] <= SHARED_BYTES for entry in taken.values())
