"""Dates ahead and behind make room for more epochs at once than the burst: as many as security.md says, and not one more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloister.client import EpochRefusedError
from cloister.client.routing_audit.cloud import CloudConfig
from cloister.trust.transparency.epoch import MAX_CLOCK_SKEW_S
from cloister.trust.transparency.history import BURST, EPOCH_EVERY_S
from tests.client.test_membership import prepare
from tests.client.world import NODES, World
from tests.rsa_keys import shared_keys

MOST = 9
"""As security.md and transparency.md say."""


@pytest.fixture
def world(directory: Path) -> Iterator[World]:
    world = World(directory / "cloud", CloudConfig(epoch_s=3600, make_key=shared_keys()))
    asyncio.run(world.cloud.enter(NODES))
    yield world
    world.cloud.close()


@pytest.mark.parametrize("late_s", [60 * minutes for minutes in range(6)])
def test_no_more_epochs_than_the_documents_say_are_taken_in_one_second(world: World, late_s: int) -> None:
    cloud = world.cloud
    cloud.time += 700  # no epoch for a while, as every quiet hour has it
    taken = 0
    dates = [cloud.time - late_s] * BURST
    while dates[-1] + EPOCH_EVERY_S <= cloud.time + MAX_CLOCK_SKEW_S:
        dates.append(dates[-1] + EPOCH_EVERY_S)
    for date in dates:  # all of them at one moment, each shown to one client
        published = asyncio.run(cloud.publisher.publish(cloud._contents, date, 3600))
        cloud.epochs.bundle = published.bundle
        try:
            prepare(world, world.session())
        except EpochRefusedError as error:
            print(date - cloud.time, error.message)
        else:
            taken += 1
    assert taken <= MOST, f"{taken} epochs of {len(dates)} were taken within one second"
