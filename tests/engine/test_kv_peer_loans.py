"""An engine keeps what has no room in memory that the next one does not need: the same answers, whatever the lender does."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from cloister.kv import lent_tier
from cloister.kv.lent_tier import LendingTierIndex, count_kept
from cloister.kv.tier_slots import TierLayout
from cloister.launch.settings import resolve_settings
from cloister.text import Tokenizer
from cloister.types.errors import ConfigError, PolicyError
from cloister.types.events import KVLoaded
from tests.engine.test_kv_pool import Machine, patience  # noqa: F401
from tests.engine.test_kv_tiers import NUM_HIT, PROMPT, Engine

OWN = list(b"what the engine that lends its memory is asked, of about the same length as the other prompt, or longer")
PART_BYTES = 300 * 2**10
"""About 53 slots; a prompt takes 11 or 12."""


@pytest.fixture(scope="module")
def expected(tokenizer: Tokenizer) -> list[int]:
    return Engine(tokenizer, None).answer("alone")


@pytest.fixture
def machine(tokenizer: Tokenizer) -> Iterator[Machine]:
    made = Machine(tokenizer, PART_BYTES, 3)
    yield made
    for engine in made.engines.values():
        engine.tier.tiers.check()
        engine.tier.close()


def num_borrowed(engine: Engine) -> int:
    """Blocks of the prompt that lie in borrowed memory."""
    request_blocks = [engine.tier.tiers.find(key, 0) for key in keys_of(engine)]
    return sum(block is not None and block.tier == 1 for block in request_blocks)


def keys_of(engine: Engine) -> list[bytes]:
    from cloister.types.request import Request, SamplingParams

    request = Request(request_id="x", token_ids=PROMPT, sampling=SamplingParams())
    return list(engine.engine.scheduler._requests.prefixes.chain_of(request, PROMPT)[0])[: NUM_HIT // 8]


def page_out(engine: Engine, first: int = 0) -> None:
    """Others' prompts push the prompt out of the device, and out of the engine's own part."""
    for number in range(first, first + 12):
        if num_borrowed(engine) == NUM_HIT // 8:
            return
        engine.crowd_out(number, 1)
    raise AssertionError("it never came to borrowed memory")


def start(machine: Machine) -> Engine:
    return machine.start("peer:1M", admission="always")


@pytest.fixture
def pair(machine: Machine) -> tuple[Engine, Engine]:
    """Two engines; the first one's prompt is in memory of the second one."""
    first, second = start(machine), start(machine)
    second.step()
    first.answer("first")
    page_out(first)
    return first, second


def test_what_has_no_room_is_kept_by_the_next_engine_and_comes_back(pair: tuple[Engine, Engine], expected: list[int]) -> None:
    first, second = pair
    assert first.answer("again") == expected
    assert first.num_cached("again") == NUM_HIT
    (loaded,) = first.find(KVLoaded, "again")
    assert (loaded.tier, loaded.complete) == ("peer", True)
    assert not len(second.index), "the lender knows of nothing"


def test_a_lender_that_needs_its_memory_takes_it_back_and_the_answer_is_computed(
    pair: tuple[Engine, Engine], expected: list[int]
) -> None:
    first, second = pair
    own = second.answer("own", OWN)
    second.crowd_out(50, 6)
    assert not second.index.is_lending
    assert len(second.index) > count_kept(second.index.layout)[0]
    assert first.answer("again") == expected
    assert (first.num_cached("again"), num_borrowed(first)) == (0, 0)
    assert second.answer("own again", OWN) == own
    for engine in pair:
        engine.tier.tiers.check()


def test_what_a_borrower_writes_too_late_spoils_no_answer_of_the_lender(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch, expected: list[int]
) -> None:
    first, second = pair
    own = second.answer("own", OWN)
    second.crowd_out(50, 3)
    monkeypatch.setattr(first.tier._loans, "follow", lambda now: None)  # it has not looked since
    second.crowd_out(60, 4)
    first.crowd_out(70, 6)
    assert second.answer("own again", OWN) == own
    assert first.answer("again") == expected


def test_an_engine_whose_lender_is_killed_computes_and_borrows_of_the_next_one(
    pair: tuple[Engine, Engine], machine: Machine, expected: list[int]
) -> None:
    first, _ = pair
    machine.kill(1)
    assert first.answer("again") == expected
    assert first.num_cached("again") == 0
    start(machine)
    page_out(first, 100)
    assert first.answer("once more") == expected
    assert first.num_cached("once more") == NUM_HIT


def test_memory_of_a_borrower_that_is_killed_is_lent_to_its_successor(
    pair: tuple[Engine, Engine], machine: Machine, expected: list[int]
) -> None:
    machine.kill(0)
    successor = start(machine)
    assert successor.answer("again") == expected
    assert successor.num_cached("again") == 0, "it finds nothing of the one before"
    page_out(successor)
    assert successor.answer("once more") == expected
    assert successor.num_cached("once more") == NUM_HIT


def test_an_engine_that_is_quiet_again_lends_again_if_it_is_asked(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch, expected: list[int]
) -> None:
    first, second = pair
    second.crowd_out(50, 6)
    first.step()
    assert num_borrowed(first) == 0
    second.step()
    assert not second.index.is_lending, "it has just stored something"
    monkeypatch.setattr(lent_tier, "QUIET_S", 0.0)
    second.step()
    second.step()
    assert second.index.is_lending
    first.answer("once more")
    page_out(first, 100)
    assert first.answer("again") == expected
    assert first.num_cached("again") == NUM_HIT


def test_slots_are_conserved_whatever_is_stored_lent_and_taken_back() -> None:
    draw = random.Random(1)
    for num_shares in (1, 3):
        index = LendingTierIndex("shared", TierLayout((100, 100), (29, 13)), num_shares)
        unwritten, kinds = [], set()
        for step in range(3000):
            kept = [len(slots.blocks) for slots in index._slots]
            match draw.randrange(12):
                case 0 if not unwritten:
                    index.lend()
                case 1:
                    index.take_back()
                case 2 if any(kept):
                    group = draw.choice([group for group, num in enumerate(kept) if num])
                    index.lose(draw.choice(list(index._slots[group].blocks.values())))
                case 3:
                    index.forget(b"root of ann")
                case 4 | 5:
                    for stored in unwritten:
                        index.confirm(stored, is_written=draw.random() < 0.9)
                    unwritten.clear()
                case _:
                    number, owner = draw.randrange(80), draw.choice([b"ann", b"bob"])
                    group, key = draw.randrange(2), owner + bytes([number])
                    index.offer(b"root of " + owner, key, number, group, step, owner)
                    unwritten += [stored for _, stored in index.copies]
                    index.copies.clear()
                    index.earn(1.0)
            kinds.add(index.is_lending)
            index.check()
        assert kinds == {True, False}


def test_a_part_that_is_too_small_to_lend_is_refused(machine: Machine, tokenizer: Tokenizer) -> None:
    small = Machine(tokenizer, 80 * 2**10, 2)
    with pytest.raises(ConfigError, match="larger size"):
        small.start("peer:1M")


@pytest.mark.parametrize("profile", ["team", "private", "paranoid"])
def test_profiles_that_hide_tenants_from_each_other_refuse_borrowed_memory(profile: str) -> None:
    given = {"kv_tier": "peer:1G", "replicas": 2, "profile": profile, "prefix_cache": profile != "paranoid"}
    with pytest.raises(PolicyError, match=rf"T6\.offload\.peer-tier\.{profile}"):
        resolve_settings(given)
    assert resolve_settings(given | {"profile": "open", "prefix_cache": True}).engine.config.kv_tier == "peer:1G"


def test_borrowing_needs_replicas_of_one_machine_and_no_codec() -> None:
    with pytest.raises(ConfigError, match="replicas"):
        resolve_settings({"kv_tier": "peer:1G"})
    with pytest.raises(ConfigError, match="not compressed"):
        resolve_settings({"kv_tier": "peer:1G", "replicas": 2, "kv_tier_codec": "lossless"})
