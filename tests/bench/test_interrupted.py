"""Ctrl-C ends a measurement as it ends any command."""

from __future__ import annotations

import subprocess
import sys


def test_ctrl_c_ends_a_benchmark_with_130_and_one_line() -> None:
    code = "import benchmarks; raise KeyboardInterrupt"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
