"""The page of the API names every field and every figure, as the code has them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloister.server.metrics import EngineGauges, Metrics
from cloister.server.parse import REFUSED
from cloister.server.schemas import ChatBody, CompletionBody
from cloister.types.logs import FIELDS
from cloister.types.request import FinishReason
from tests.server.running_server import ScriptedEngine, says

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src" / "cloister"
ANSWERING = ("server", "text", "policy")
ONLY_AT_START = {"config_error", "model_error", "out_of_memory_budget"}
"""A server that runs answers with other codes where one of these is at fault."""
ACCEPTED = {*ChatBody.model_fields, *CompletionBody.model_fields}


@pytest.mark.parametrize("name", sorted(ACCEPTED | set(REFUSED)))
def test_every_field_is_on_the_page(name):
    assert f"`{name}`" in PAGE


def test_no_field_is_both_accepted_and_refused():
    assert not ACCEPTED & set(REFUSED)


def test_every_figure_is_on_the_page():
    engine = ScriptedEngine(says("x"))
    families = [*Metrics(EngineGauges(engine, "m")).collect()]
    assert len(families) > 20
    for family in families:
        assert f"{family.name.removeprefix('cloister_')}" in PAGE


def test_every_reason_of_an_end_is_on_the_page_and_no_other():
    (line,) = [line for line in PAGE.splitlines() if line.startswith("| `request_success_total{finished_reason}`")]
    assert set(re.findall(r"`(\w+)`", line.split("|")[2])) == {str(reason) for reason in FinishReason}


def test_every_field_of_the_log_is_on_its_page_and_no_other():
    section = OPERATIONS.split("\n## Logs\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {"replica", *FIELDS}


def test_every_error_code_is_on_the_page_and_no_other():
    section = PAGE.split("\n### Codes\n")[1].split("\n## ")[0]
    documented = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert len(documented) == len(set(documented))
    assert set(documented) == find_codes() - ONLY_AT_START


def find_codes() -> set[str]:
    """Returns all codes of errors in the packages that answer requests, as they stand in the code."""
    found: set[str] = set()
    for path in [SOURCE / "types" / "errors.py", *(each for name in ANSWERING for each in (SOURCE / name).rglob("*.py"))]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            node.target.id: node.value
            for node in tree.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
        }
        for value in find_code_values(tree):
            known = constants.get(value.id, value) if isinstance(value, ast.Name) else value
            chosen = [known.body, known.orelse] if isinstance(known, ast.IfExp) else [known]
            found |= {each.value for each in chosen if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return found


def find_code_values(tree: ast.Module) -> Iterator[ast.expr]:
    """Yields what is given as `code`: of error classes, of variables in functions, in calls, and third of `invalid`."""
    for node in ast.walk(tree):
        is_error = isinstance(node, ast.ClassDef) and node.name.endswith("Error")
        if is_error or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assigned = (each for each in ast.walk(node) if isinstance(each, ast.Assign))
            yield from (each.value for each in assigned if ast.unparse(each.targets[0]) == "code")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield from (each.value for each in node.keywords if each.arg == "code")
            yield from node.args[2:3] if node.func.id == "invalid" else []
