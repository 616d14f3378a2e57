"""KV of small models beside the model's: whatever happens to blocks, a draft is the one of who computes everything anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cloister.backends.base import KVLayout
from cloister.executor.drafters import draft_model
from cloister.executor.drafters.base import Drafter, DraftModel
from cloister.executor.drafters.draft_model import DraftKV, DraftModelDrafter
from cloister.executor.drafters.spec_infer import SpecInferDrafter
from cloister.executor.state import BatchState
from tests.executor.drafters.block_world import BlockWorld
from tests.executor.drafters.small_models import RandomModel, make_context
from tests.thinning import cover

MODELS: list[DraftModel] = [RandomModel(0), RandomModel(1)]
MAKERS: dict[str, Callable[[BatchState], Drafter]] = {
    "chain": lambda batch: DraftModelDrafter(make_context(batch), MODELS[:1]),
    "tree": lambda batch: SpecInferDrafter(make_context(batch), MODELS[:1]),
    "tree of two models": lambda batch: SpecInferDrafter(make_context(batch), MODELS),
}


def live(kind: str, seed: int, num_steps: int = 150) -> BlockWorld:
    world = BlockWorld(MAKERS[kind], seed)
    for _ in range(num_steps):
        world.step()
    return world


def live_long(kind: str) -> None:
    for seed in range(6):
        live(kind, seed)


@pytest.mark.parametrize(("kind", "seed"), cover(MAKERS, range(3)))
def test_drafts_are_those_of_a_drafter_that_saw_nothing_before(kind: str, seed: int) -> None:
    assert live(kind, seed).num_checked > 20


def _fill_one_more(kv: DraftKV, blocks: Sequence[int], start: int, end: int) -> None:
    FILL(kv, blocks, start, min(end + 1, len(blocks) * kv.block_size))


def _wipe_nothing(kv: DraftKV, block_ids: Sequence[int]) -> list[int]:
    return [block for block in block_ids if kv._is_written[block]]


def _copy_as_full(kv: DraftKV, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found = COPY(kv, pairs)
    for _, target in pairs:
        kv._filled[target] = kv.block_size
    return found


FILL, COPY = DraftKV.fill, DraftKV.copy


@pytest.mark.parametrize(("name", "broken"), [("fill", _fill_one_more), ("wipe", _wipe_nothing), ("copy", _copy_as_full)])
def test_broken_bookkeeping_is_seen(name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftKV, name, broken)
    with pytest.raises(AssertionError):
        live_long("chain")


def test_counting_drafts_that_were_not_accepted_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "common_length", lambda drafted, known: len(known))
    with pytest.raises(AssertionError):
        live_long("tree")


def test_a_copy_that_copies_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftModelDrafter, "copy_blocks", lambda drafter, pairs: drafter._kv.copy(pairs))
    with pytest.raises(AssertionError):
        live_long("chain")


def test_positions_are_counted_block_by_block() -> None:
    kv = DraftKV(KVLayout(8, 4))
    kv.fill([5, 2, 7], 0, 10)
    assert [kv.reach(seq_id, blocks) for seq_id, blocks in enumerate([[5, 2, 7], [5, 2], [5, 3], [3, 2], []])] == [
        10,
        8,
        4,
        0,
        0,
    ]
    assert kv.copy([(7, 1)]) == [(7, 1)]
    assert kv.reach(9, [5, 2, 1]) == 10
    assert kv.wipe([2, 6]) == [2]
    assert kv.reach(10, [5, 2, 7]) == 4


def test_what_was_never_written_is_neither_wiped_nor_copied() -> None:
    kv = DraftKV(KVLayout(8, 4))
    kv.touch([3, 4], 2, 6)
    assert kv.copy([(0, 1), (3, 2)]) == [(3, 2)]
    assert kv.wipe(range(8)) == [2, 3, 4]
    assert kv.wipe(range(8)) == []
