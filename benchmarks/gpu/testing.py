"""Runs the tests of the GPU path and records each one as it ends: `python -m benchmarks.gpu.testing --records FILE`.

Most of their time kernels are compiled, so each file of tests has a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from benchmarks.gpu.records import Records

ROOT: Final = Path(__file__).parents[2]
TESTS: Final = (
    "tests/gpu",
    "tests/backends/test_triton_rows.py",
    "tests/backends/test_triton_products.py",
    "tests/backends/test_triton_attention.py",
    "tests/backends/test_triton_program.py",
)
"""What runs at once."""


class Recorder:
    """A plugin of pytest that records outcomes.

    Args:
        records: where they go.
    """

    def __init__(self, records: Records) -> None:
        self._records = records

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Records a test when its call ends, or when it is skipped or fails before or after that."""
        if report.when == "call" or report.outcome != "passed":
            reason = "" if report.outcome == "passed" else str(report.longrepr)[-4000:]
            self._records.add("test", name=report.nodeid, outcome=report.outcome, reason=reason)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when the tests ran, whatever they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--only", help="one of the paths, in this process")
    options = parser.parse_args(arguments)
    if options.only is not None:
        return run_tests(options.only, options.records)
    command = [sys.executable, "-m", "benchmarks.gpu.testing", "--records", str(options.records), "--only"]
    processes = [subprocess.Popen([*command, path], cwd=ROOT) for path in TESTS]
    return max([process.wait() for process in processes])  # the stage's limit ends them


def run_tests(path: str, records: Path) -> int:
    """Runs the tests of one path, the slow ones last; returns 0 unless pytest itself failed."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # what else is installed there was made for another pytest
    recorder = Recorder(Records(records, "tests"))
    options = ["-q", "--no-header", "-p", "no:cacheprovider", f"--rootdir={ROOT}", str(ROOT / path)]
    codes = [pytest.main([*options, "-m", marks], plugins=[recorder]) for marks in ("not slow", "slow")]
    return 0 if set(codes) <= {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED} else 1


if __name__ == "__main__":
    sys.exit(main())
