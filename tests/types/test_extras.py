"""Messages that tell people to install an extra."""

import re
import sys
from pathlib import Path

from cloister.types.extras import install_command

SOURCES = Path(__file__).parents[2] / "src"


def test_an_extra_is_installed_into_the_environment_that_asks_for_it():
    assert install_command("ray") == f"{sys.executable} -m pip install 'cloister[ray]'"


def test_a_path_with_a_blank_is_quoted(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/home/Jo Do/bin/python")
    assert install_command("ray") == "'/home/Jo Do/bin/python' -m pip install 'cloister[ray]'"


def test_no_message_names_a_pip_that_may_be_another_environments():
    """There `cloister` is not installed, and its name on the package index is another project's."""
    found = {
        str(path.relative_to(SOURCES)): re.findall(r"pip install '?cloister", path.read_text(encoding="utf-8"))
        for path in SOURCES.rglob("*.py")
    }
    assert {path: len(lines) for path, lines in found.items() if lines} == {"cloister/types/extras.py": 1}
