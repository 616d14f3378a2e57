"""`pytest --processor-time tests/kv`: the processor time of the tests of each file, set-up and started processes included.

A process is counted when it has been waited for, so what a fixture starts is in the last test of its module. What all files
share is not counted: pytest itself, and imports while tests are collected.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import pytest


def _used_s() -> float:
    return sum(os.times()[:4])


class ProcessorTime:
    """Measures each phase of each test where it runs, and sums them up by file where reports come together."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self._taken_s: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, Any, Any]:
        self._began_s = _used_s()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        self._began_s = _used_s()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, Any, Any]:
        self._began_s = _used_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        report.processor_s = _used_s() - self._began_s  # goes with the report from a worker to the controller
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._taken_s[report.nodeid.partition("::")[0]] += report.processor_s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("processor time")
        for name, taken_s in sorted(self._taken_s.items(), key=lambda entry: -entry[1]):
            terminalreporter.line(f"{taken_s:8.2f} s  {name}")
        terminalreporter.line(f"{sum(self._taken_s.values()):8.2f} s  together")
