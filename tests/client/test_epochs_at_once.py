"""Dates ahead and behind make room for more epochs at once than the burst: as many as security.md says, and not one more."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloister.client import EpochRefusedError
from cloister.client.routing import house as houses
from cloister.privacy.transparency.epoch import MAX_CLOCK_SKEW_S
from cloister.privacy.transparency.history import BURST, EPOCH_EVERY_S
from tests.client.test_membership import prepare
from tests.client.test_transport import NODES, World

MOST = 9
"""As security.md and transparency.md say."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(houses, "EPOCH_S", 3600)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        world = World(Path(name) / "house")
        asyncio.run(world.house.enter(NODES))
        yield world
        world.house.close()


@pytest.mark.parametrize("late_s", [60 * minutes for minutes in range(6)])
def test_no_more_epochs_than_the_documents_say_are_taken_in_one_second(world: World, late_s: int) -> None:
    house = world.house
    house.time += 700  # no epoch for a while, as every quiet hour has it
    taken = 0
    dates = [house.time - late_s] * BURST
    while dates[-1] + EPOCH_EVERY_S <= house.time + MAX_CLOCK_SKEW_S:
        dates.append(dates[-1] + EPOCH_EVERY_S)
    for date in dates:  # all of them at one moment, each shown to one client
        published = asyncio.run(house._publisher.publish(house._contents, date, 3600))
        house._epochs.bundle = published.bundle
        try:
            prepare(world, world.session())
        except EpochRefusedError as error:
            print(date - house.time, error.message)
        else:
            taken += 1
    assert taken <= MOST, f"{taken} epochs of {len(dates)} were taken within one second"
