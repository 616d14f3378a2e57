"""What the package imports is what it declares: no module may live from what test extras happen to install."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEVELOPMENT = ("test", "check", "chart", "study")
"""Extras that no user installs."""
PROVIDERS = {
    "flashinfer": ["flashinfer-python"],
    "mooncake": ["mooncake-transfer-engine-non-cuda"],
    "pydantic_core": ["pydantic"],
}
"""What is not installed here, and what only ever comes with another library."""


@cache
def imported() -> Sequence[tuple[str, Path]]:
    return tuple(_find_imports())


@cache
def providers() -> Mapping[str, Sequence[str]]:
    return {**packages_distributions(), **PROVIDERS}


def _find_imports() -> Iterator[tuple[str, Path]]:
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
    known = declared()
    missing = {
        name: str(path.relative_to(ROOT))
        for name, path in imported()
        if name not in sys.stdlib_module_names and name != "cloister"
        if not known & {normal(provider) for provider in providers().get(name, [name])}
    }
    assert missing == {}


def test_every_library_that_is_declared_for_all_users_is_imported() -> None:
    used = {normal(provider) for name, _ in imported() for provider in providers().get(name, [name])}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {normal(re.split(r"[\[<>=!~;\s]", each)[0]) for each in project["dependencies"]} <= used


def test_the_classifiers_name_the_versions_of_python_that_wheels_are_made_for() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = {each.rpartition(" ")[2] for each in settings["project"]["classifiers"] if re.search(r":: 3\.\d+$", each)}
    made = {f"3.{tag.removeprefix('cp3').partition('-')[0]}" for tag in settings["tool"]["cibuildwheel"]["build"].split()}
    assert named == made
    assert settings["project"]["requires-python"] == f">={min(named)}"
