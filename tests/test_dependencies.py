"""What the package imports is what it declares: no module may live from what test extras happen to install."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEVELOPMENT = ("test", "check", "study")
"""Extras that no user installs."""
PROVIDERS = {"flashinfer": ["flashinfer-python"], "pydantic_core": ["pydantic"]}
"""What is not installed here, and what only ever comes with another library."""


def imported() -> Iterator[tuple[str, Path]]:
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            yield from ((name.partition(".")[0], path) for name in names)


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [group for name, group in project["optional-dependencies"].items() if name not in DEVELOPMENT]
    return {normal(re.split(r"[\[<>=!~;\s]", each)[0]) for group in (project["dependencies"], *extras) for each in group}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_library_that_the_package_imports_is_declared() -> None:
    providers, known = {**packages_distributions(), **PROVIDERS}, declared()
    missing = {
        name: str(path.relative_to(ROOT))
        for name, path in imported()
        if name not in sys.stdlib_module_names and name != "cloister"
        if not known & {normal(provider) for provider in providers.get(name, [name])}
    }
    assert missing == {}
