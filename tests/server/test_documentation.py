"""The page of the API names every field and every figure, as the code has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloister.server.metrics import EngineGauges, Metrics
from cloister.server.parse import REFUSED
from cloister.server.schemas import ChatBody, CompletionBody
from tests.server.running_server import ScriptedEngine, says

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
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
