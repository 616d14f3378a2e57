"""Outputs that become one while nobody reads them are counted and shown as those that were read in time."""

from __future__ import annotations

from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest

from cloister.server.choices import _Reader
from cloister.server.route_table import RouteTable
from cloister.text.answer_parser import REASONINGS, AnswerForm
from cloister.text.parts import Reasoning, Text
from cloister.types.request import MOST_JOINED, SequenceOutput

WORDS = ["<think>", *["a "] * 10, "</think>", *["b "] * 10]
OUTPUTS = [SequenceOutput(request_id="r", index=0, text=word, token_ids=[7], num_output_tokens=1) for word in WORDS]


def join(outputs: list[SequenceOutput]) -> SequenceOutput:
    def add(first: SequenceOutput, later: SequenceOutput) -> SequenceOutput:
        joined = first.join(later)
        assert joined is not None
        return joined

    return reduce(add, outputs)


def read(pieces: list[SequenceOutput]) -> tuple[int, str, str]:
    """Returns the number of tokens of reasoning, the reasoning, and the text."""
    counts: list[int] = []
    job: Any = SimpleNamespace(form=AnswerForm(REASONINGS.get("think")))
    tally: Any = SimpleNamespace(add_reasoning=counts.append)
    reader = _Reader(job)
    parts = [part for piece in pieces for part in reader.read(piece, tally).parts]
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return sum(counts), reasoning, "".join(part.text for part in parts if isinstance(part, Text))


@pytest.mark.parametrize("size", [2, 8, len(OUTPUTS)])
def test_tokens_of_reasoning_are_counted_by_step_however_outputs_are_joined(size: int) -> None:
    alone = read(OUTPUTS)
    assert alone[0] == 11
    assert read([join(OUTPUTS[start : start + size]) for start in range(0, len(OUTPUTS), size)]) == alone


def test_what_is_joined_does_not_grow_without_a_bound() -> None:
    whole = join([OUTPUTS[0]] * MOST_JOINED)
    assert whole.join(OUTPUTS[0]) is None
    assert len(whole.pieces) == MOST_JOINED


def test_a_scope_names_the_route_that_was_found() -> None:
    table = RouteTable()

    @table.get("/things/{name}")
    async def show(name: str) -> Any:
        raise NotImplementedError

    (route,) = table.routes
    _, child = route.matches({"type": "http", "path": "/things/a", "method": "GET", "root_path": "", "headers": []})
    assert child["route"] is route
