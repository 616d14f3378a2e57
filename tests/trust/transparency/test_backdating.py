"""Epochs that say they began long ago: they stand in the log between real ones, and must not make anything look slower."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from cloister.client.limits import Limits, hold_to_limits
from cloister.trust.transparency.checks import View
from cloister.trust.transparency.epoch import parse_bundle
from cloister.trust.transparency.history import BURST
from cloister.trust.transparency.membership import NOTICE_S
from cloister.trust.transparency.refusal import Reason, TransparencyError
from cloister.trust.transparency.replay import Remark, Replay
from tests.trust.transparency.test_membership import log_alone
from tests.trust.transparency.world import World

LIMITS = Limits(least_present=0)
LONG_AGO = {"not_before": 1, "not_after": 2}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def take(world: World, bundle: bytes, view: View) -> View | Reason:
    """What a client does with the newest epoch: its view afterwards, or why it sends nothing."""
    try:
        return hold_to_limits(LIMITS, world.believe(bundle, view), world.trust)
    except TransparencyError as error:
        return error.reason


def replay(world: World) -> list[Remark]:
    """What a monitor says of the whole log."""
    course = Replay(world.log.key.name, world.trust.releases)
    size = world.log.checkpoint()[0].size
    return list(itertools.chain(*(course.take(index, entry) for index, entry in enumerate(world.log.entries(0, size, size)))))


@pytest.mark.parametrize("has_own_keys", [False, True])
def test_a_gateway_that_logs_old_epochs_between_real_ones_is_as_fast_as_it_is(world: World, has_own_keys: bool) -> None:
    """Each real epoch has keys of its own, so that it tells apart those it is handed to."""
    bundle = world.publish().bundle
    gateway = parse_bundle(bundle).epoch.gateway
    view = take(world, bundle, View())
    assert isinstance(view, View)
    outcomes: list[Reason | None] = []
    for number in range(8):
        keys = {"gateway": msgspec.structs.replace(gateway, keys=b"separator")} if has_own_keys else {}
        bundle = log_alone(world, bundle, **LONG_AGO, **keys)
        world.now += 2
        times = {"not_before": int(world.now), "not_after": int(world.now) + 600}
        bundle = log_alone(world, bundle, gateway=msgspec.structs.replace(gateway, keys=b"keys %d" % number), **times)
        seen = take(world, bundle, view)
        view = seen if isinstance(seen, View) else view
        outcomes.append(None if isinstance(seen, View) else seen)
    assert outcomes.count(None) < BURST
    assert outcomes[-1] is Reason.TOO_FAST
    assert take(world, bundle, View()) is Reason.TOO_FAST, "who reads all of it comes to the same"


def test_a_membership_that_was_announced_in_the_past_does_not_hold(world: World) -> None:
    bundle = world.publish().bundle
    view = world.believe(bundle).view
    world.log_members(2, {"captured": 1, "node": 1})
    bundle = log_alone(world, bundle, **LONG_AGO)
    world.now += 60
    bundle = world.publish().bundle
    for seen in (view, View()):
        assert world.believe(bundle, seen).membership.number == 1
    assert "membership 2 never holds" in " ".join(remark.text for remark in replay(world))


def test_a_membership_that_was_announced_in_time_holds_though_an_old_epoch_follows(world: World) -> None:
    bundle = world.publish().bundle
    world.log_members(2, {"captured": 1, "node": 1}, after_s=NOTICE_S)
    bundle = world.publish().bundle
    world.now += NOTICE_S
    log_alone(world, bundle, **LONG_AGO)
    assert world.believe(world.publish().bundle).membership.number == 2


def test_an_issuer_with_two_keys_in_ten_minutes_is_told_though_old_epochs_date_them_days_apart(world: World) -> None:
    bundle = world.publish().bundle
    issuer = parse_bundle(bundle).epoch.issuers[0]
    for number in range(2):
        issuers = (msgspec.structs.replace(issuer, token_key=b"key %d" % number),)
        days = (number + 1) * 2 * 86400
        log_alone(world, bundle, issuers=issuers, not_before=days, not_after=days + 1)
        world.now += 600
        bundle = world.publish(issuers=issuers).bundle
    assert sum("has another new key within a day" in remark.text for remark in replay(world)) == 1
