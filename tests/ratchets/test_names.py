"""A public class has a name of its own, so that who reads it in a message or searches for it finds one."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections import defaultdict
from pathlib import Path

import cloister

SOURCE = Path(__file__).parents[2] / "src" / "cloister"


def test_no_two_public_classes_have_one_name():
    homes = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text("utf-8"), re.MULTILINE):
            homes[name].append(str(path.relative_to(SOURCE)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_every_name_that_a_package_exports_can_be_imported():
    """Packages export by name of module, which no import statement checks."""
    missing = []
    for found in pkgutil.walk_packages(cloister.__path__, "cloister."):
        if not found.ispkg:
            continue
        try:
            package = importlib.import_module(found.name)
        except ModuleNotFoundError as error:  # of an extra that is not installed
            if str(error.name).startswith("cloister"):
                missing.append(str(error.name))
            continue
        for name in getattr(package, "__all__", ()):
            try:
                getattr(package, name)
            except (ImportError, AttributeError):
                missing.append(f"{found.name}.{name}")
    assert not missing
