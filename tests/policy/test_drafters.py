"""No drafter tells one request of another one, and none keeps anything of a request that left."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloister.executor.drafters import NOTHING, Draft, Drafter, DraftRequest
from tests.policy.drafters import Watched, all_names, kept_by, make_home, tells

SECRET = [700 + 13 * place % 1200 for place in range(40)]
TEMPTING = [90, 91, 92, *SECRET[:6]]
"""A prompt that ends as the secret begins: who has seen the secret knows how it goes on."""
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("drafters"))


class Gossip(Drafter):
    """Drafts what anybody's text went on with: what no drafter may do."""

    def __init__(self) -> None:
        self.heard = array("i")

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for request in requests:
            last, heard = request.state.tokens[-1], self.heard.tolist()
            place = heard.index(last) if last in heard else -1
            drafts.append(Draft(heard[place + 1 :][: request.num_drafts]) if place >= 0 else NOTHING)
            self.heard.extend(request.state.tokens)
        return drafts


def drafts_with_a_secret(home: Path, name: str, *, gossips: bool = False) -> list[Any]:
    """What is drafted for a request alone; after and beside one with a secret."""
    found = []
    for has_secret in (False, True):
        watched = Watched(home, name)
        if gossips:
            watched.put(Gossip())
        if has_secret:
            watched.lab.ask("ann", SECRET * 2, max_tokens=NUM_TOKENS)
            watched.start("ann", SECRET * 2, max_tokens=2 * NUM_TOKENS, num_steps=4)
        watched.lab.ask("bob", TEMPTING, max_tokens=NUM_TOKENS)
        found.append(watched.drafts_for(TEMPTING))
    return found


@pytest.mark.parametrize("name", all_names())
def test_a_draft_is_the_same_after_any_request_before_it(home: Path, name: str) -> None:
    alone, beside = drafts_with_a_secret(home, name)
    assert alone == beside
    assert alone, "nothing was asked of the drafter"


def test_a_drafter_that_listens_to_others_is_found_out(home: Path) -> None:
    alone, beside = drafts_with_a_secret(home, "ngram", gossips=True)
    assert alone != beside


def what_is_left(watched: Watched, drafter: Drafter) -> tuple[int, list[Any]]:
    """How many things the drafter kept of a request while it ran, and which of them still tell of it when it is gone."""
    before = {id(one): one.copy() for one in kept_by(drafter) if isinstance(one, np.ndarray)}

    def is_residue(one: Any) -> bool:
        if isinstance(one, np.ndarray) and one.dtype.kind == "f":
            return bool(one.any()) and not np.array_equal(one, before.get(id(one), 0))
        return tells(one, SECRET)

    watched.start("ann", SECRET * 2, max_tokens=NUM_TOKENS, num_steps=4)
    held = kept_by(drafter)  # held here too, so that what is only let go of is found
    num_held = sum(map(is_residue, held))
    watched.lab.rest()
    watched.runner.wipe_buffers()
    return num_held, [one for one in [*held, *kept_by(drafter)] if is_residue(one)]


@pytest.mark.parametrize("name", all_names())
def test_nothing_of_a_request_is_left_when_it_ended(home: Path, name: str) -> None:
    watched = Watched(home, name)
    _, left = what_is_left(watched, watched.drafter)
    assert not left, f"{name} still holds tokens of a request that ended, in {[type(one).__name__ for one in left]}"


def test_a_drafter_that_keeps_something_is_found_out(home: Path) -> None:
    watched = Watched(home, "ngram")
    watched.put(Gossip())
    num_held, left = what_is_left(watched, watched.drafter)
    assert num_held
    assert left


class Forgetful(Drafter):
    """Keeps what heads read, and lets go of it without overwriting it."""

    wants_hidden = True

    def __init__(self) -> None:
        self.rows: dict[int, Any] = {}

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        for request in requests:
            self.rows[request.state.seq_id] = np.full(8, 0.5, np.float32)
        return [NOTHING for _ in requests]

    def forget(self, seq_id: int) -> None:
        self.rows.pop(seq_id, None)


def test_to_let_go_is_not_to_overwrite(home: Path) -> None:
    watched = Watched(home, "ngram")
    watched.put(Forgetful())
    num_held, left = what_is_left(watched, watched.drafter)
    assert num_held
    assert [type(one) for one in left] == [np.ndarray]
