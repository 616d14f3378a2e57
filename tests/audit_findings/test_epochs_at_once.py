"""security.md: "A gateway may publish five within seconds ...; a sixth is refused". Dates ahead and behind make room for more."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloister.client import EpochRefusedError
from cloister.client.limits import LATE_S
from cloister.client.routing import house as houses
from cloister.privacy.transparency.epoch import MAX_CLOCK_SKEW_S
from cloister.privacy.transparency.pace import BURST, EPOCH_EVERY_S
from tests.client.test_membership import prepare
from tests.client.test_transport import NODES, World


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(houses, "EPOCH_S", 3600)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        world = World(Path(name) / "house")
        asyncio.run(world.house.enter(NODES))
        yield world
        world.house.close()


def test_no_more_epochs_than_five_are_taken_in_one_second(world: World) -> None:
    house = world.house
    house.time += 700  # no epoch for a while, as every quiet hour has it
    taken = 0
    dates = [house.time - LATE_S] * BURST
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
    assert taken <= BURST, f"{taken} epochs of {len(dates)} were taken within one second"
