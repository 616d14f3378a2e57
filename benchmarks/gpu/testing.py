"""Runs the tests of the GPU path and records each one as it ends: `python -m benchmarks.gpu.testing --records FILE`."""

from __future__ import annotations

import argparse
import os
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
"""Whole programs first: what they say counts most if time runs out."""


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
            reason = "" if report.outcome == "passed" else str(report.longrepr)[-1500:]
            self._records.add("test", name=report.nodeid, outcome=report.outcome, reason=reason)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when the tests ran, whatever they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, required=True)
    options = parser.parse_args(arguments)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # what else is installed there was made for another pytest
    paths = [str(ROOT / path) for path in TESTS]
    code = pytest.main(
        ["-q", "--no-header", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *paths],
        plugins=[Recorder(Records(options.records, "tests"))],
    )
    return 0 if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else 1


if __name__ == "__main__":
    sys.exit(main())
