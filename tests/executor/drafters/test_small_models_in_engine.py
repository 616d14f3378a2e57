"""Small models that take turns in the steps of one engine, where each falls behind and catches up: answers are those without
drafts, also of sequences that share prefixes, fork, and are preempted."""

from __future__ import annotations

from typing import Any

import pytest

from cloister.engine import EngineCore
from tests.equality import Report, ask, differing
from tests.executor.drafters.test_taking_turns import Turns, make_requests, open_engine

NAMES = ("draft_model", "spec_infer", "long_spec")


def speculating(*names: str, most: int, **settings: Any) -> EngineCore:
    core: Any = open_engine(",".join(names), **settings)
    turns = Turns((), most)
    turns._names = names
    turns._limits = {name: core._runner._drafting._drafters[name] for name in names}
    core._scheduler._draft_allocator._speculation = turns
    made: EngineCore = core
    return made


@pytest.fixture(scope="module")
def plain() -> Report:
    return ask(open_engine("none", kv_memory_mb=64), make_requests())


def test_small_models_that_take_turns_leave_answers_as_they_are(plain: Report) -> None:
    found = ask(speculating(*NAMES, most=12, kv_memory_mb=64), make_requests())
    assert differing(found, plain) == []
    assert found.num_accepted > 100


def test_preempted_sequences_draft_as_if_nothing_had_been(plain: Report) -> None:
    found = ask(speculating(*NAMES, most=6, kv_memory_mb=1.0), make_requests())
    assert found.num_preempted > 0
    assert differing(found, plain) == []
    assert found.num_accepted > 30


def test_a_tree_is_accepted_more_than_a_chain_of_as_many_drafts() -> None:
    chain, tree = (ask(open_engine(name, kv_memory_mb=64, draft_tokens=16), make_requests()) for name in NAMES[:2])
    assert differing(tree, chain) == []
    assert tree.num_accepted > 1.1 * chain.num_accepted
