"""`--processor-time` counts what a test's processes took, whichever phase waits for them."""

from __future__ import annotations

import re

import pytest

from tests.processor_time import ProcessorTime

pytest_plugins = ["pytester"]

WORKING = """
import subprocess, sys, pytest

@pytest.fixture
def working():
    process = subprocess.Popen([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.3: pass"])
    yield
    process.wait()

def test_it(working):
    pass
"""


def test_a_process_that_a_fixture_waits_for_is_counted_in_its_file(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_working=WORKING, test_idle="def test_it(): pass")
    printed = pytester.runpytest_inprocess(plugins=[ProcessorTime()]).outlines
    taken_s = {name: float(time) for line in printed for time, name in re.findall(r"^ *(\d+\.\d\d) s  (.+)", line)}
    assert set(taken_s) == {"test_working.py", "test_idle.py", "together"}
    assert taken_s["test_working.py"] >= 0.2  # the system rounds what a process took otherwise than its own clock
    assert taken_s["together"] == pytest.approx(taken_s["test_working.py"] + taken_s["test_idle.py"], abs=0.02)
