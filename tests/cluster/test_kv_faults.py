"""The search for faults finds bugs that are planted where KV moves between engines."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from cloister.cluster.link import LinkTimes
from cloister.cluster.prefix_copies import PrefixCopies
from cloister.cluster.prompt_followers import PromptFollowers
from cloister.cluster.virtual import fuzz
from cloister.cluster.virtual.byte_tokenizer import open_tokenizer
from cloister.cluster.virtual.engine import make_engine
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.cluster.virtual.event_loop import VirtualEventLoop, run_virtually
from cloister.cluster.virtual.kv_links import KVSwitch, endpoint_of
from cloister.cluster.virtual.network import VirtualNetwork
from cloister.cluster.virtual.replica import Host
from cloister.cluster.virtual.scenario import Scenario
from cloister.cluster.virtual.transport import LinkTransport
from cloister.engine.supervision import Supervision
from cloister.kv import KVObject, KVSealer, Leases
from cloister.kv.leases import _Lease
from cloister.kv.prefix_cache import PrefixCache
from cloister.scheduler.kv_exports import KVExports
from cloister.scheduler.kv_load import KVLoad
from cloister.scheduler.kv_loads import KVLoads
from cloister.scheduler.prefix_leases import PrefixLeases
from cloister.scheduler.sequence import RequestState
from cloister.types.config import EngineConfig
from cloister.types.events import Event, KVSource, Outputs, PrefetchKV, PrefixLeased
from cloister.types.request import Request, SamplingParams

pytestmark = pytest.mark.usefixtures("no_log")

MOST_SCENARIOS = 40
take = Leases.take


def believe_anything(sealer: KVSealer, found: KVObject, root: bytes, keys: list[bytes]) -> bool:
    return True


def lease_nothing_to_exports(
    leases: Leases, name: str, keys: Sequence[bytes], until_s: float, *, of_one_request: bool = False
) -> list[int]:
    """Blocks that are being copied may be evicted and written."""
    if not name.startswith("export"):
        return take(leases, name, keys, until_s, of_one_request=of_one_request)
    leases.by_name[name] = _Lease(until_s)
    return leases._cache.match(keys)


def forget_blocks(leases: Leases, name: str) -> None:
    leases.by_name.pop(name, None)


def keep_blocks(loads: KVLoads, load: KVLoad) -> None:
    pass


def close_nothing(exports: KVExports, number: int, *, is_complete: bool) -> None:
    pass


def lease_everything(exports: KVExports, number: int) -> bool:
    """What is copied may be written meanwhile."""
    return True


def forget_nothing(followers: PromptFollowers, request_id: str, place: int | None = None) -> None:
    pass


def leave_requests_alone(loads: KVLoads, state: RequestState) -> None:
    """A request that ends while it waits for KV keeps its load."""


PLANTED: dict[str, tuple[Any, str, Any, int]] = {  # and the seed to begin with
    "KV that nobody has authenticated is accepted": (KVSealer, "is_genuine", believe_anything, 80),
    "a block is free while it is copied": (Leases, "take", lease_nothing_to_exports, 500),
    "a lease ends and its blocks stay": (Leases, "drop", forget_blocks, 0),
    "a load ends and its blocks stay": (KVLoads, "_release", keep_blocks, 0),
    "an export never ends": (KVExports, "close", close_nothing, 0),
    "a copy is sent though its lease has ended": (KVExports, "is_leased", lease_everything, 404),
    "a prompt is followed for ever": (PromptFollowers, "end", forget_nothing, 0),
    "a load outlives its request": (KVLoads, "_note_ended", leave_requests_alone, 0),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, first = PLANTED[bug]
    monkeypatch.setattr(where, name, wrong)
    scenarios = [scenario for seed in range(first, first + 150) if (scenario := fuzz.scenario_of(seed)).moves_kv]
    assert any(fuzz.replay(scenario).violations for scenario in scenarios[:MOST_SCENARIOS])


def revoke_nothing(cache: PrefixCache, keys: Collection[bytes]) -> None:
    pass


def renew_for_ever(leases: PrefixLeases, name: str, lease_s: float, now: float) -> None:
    if name in leases._by_name and leases._by_name[name].is_held:
        leases._requests.leases.renew(f"prefix {name}", now + 1000.0)  # type: ignore[union-attr]


PLANTED_IN_COPIES: dict[str, tuple[type, str, Any]] = {
    "a copy outlives its lease": (PrefixCache, "revoke", revoke_nothing),
    "a lease of a prefix is never ended and lasts": (PrefixLeases, "renew", renew_for_ever),
}


def scenarios_with_copies(count: int) -> list[Scenario]:
    drawn = (scenario for seed in range(10_000) if (scenario := fuzz.scenario_of(seed)).copies_prefixes)
    return list(itertools.islice(drawn, count))


@pytest.mark.parametrize("bug", PLANTED_IN_COPIES)
def test_a_bug_that_is_planted_in_copies_of_prefixes_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTED_IN_COPIES[bug])
    assert any(fuzz.replay(scenario).violations for scenario in scenarios_with_copies(MOST_SCENARIOS))


def test_prefixes_are_copied_in_the_scenarios() -> None:
    copies: Counter[str] = Counter()
    take_reply = PrefixCopies.take_reply

    def count(own: PrefixCopies, index: int, reply: PrefixLeased) -> None:
        before = sum(own.num_copies)
        take_reply(own, index, reply)
        copies["made"] += sum(own.num_copies) - before
        copies["ended early"] += not reply.num_tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixCopies, "take_reply", count)
        for scenario in scenarios_with_copies(30)[10:]:
            assert not fuzz.replay(scenario).violations
    assert copies["made"] >= 3
    assert copies["ended early"] >= 1


def test_prompts_are_followed_in_the_scenarios() -> None:
    """Loads that wait for a prompt get their request before the prompt is done, behind it, and never."""
    fates: Counter[str] = Counter()
    begin, cancel = KVLoads.begin, KVLoads.cancel_prefetch

    def count_begin(loads: KVLoads, state: RequestState, now: float) -> None:
        load = loads.loading.get(state.request.request_id)
        begin(loads, state, now)
        fates["joined"] += load is not None and load.follows and load.state is state

    def count_cancel(loads: KVLoads, request_id: str, now: float) -> None:
        fates["cancelled"] += request_id in loads.loading
        cancel(loads, request_id, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVLoads, "begin", count_begin)
        patch.setattr(KVLoads, "cancel_prefetch", count_cancel)
        for seed in range(100):
            if (scenario := fuzz.scenario_of(seed)).moves_kv and scenario.roles:
                assert not fuzz.replay(scenario).violations
    assert fates["joined"] >= 5
    assert fates["cancelled"] >= 5


def test_kv_moves_in_the_scenarios() -> None:
    """So what the search finds, or does not find, is of some worth."""
    arrived = 0
    insert = KVLoads.arrive

    def count(loads: KVLoads, request_id: str, objects: list[KVObject]) -> None:
        nonlocal arrived
        arrived += len(objects)
        insert(loads, request_id, objects)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVLoads, "arrive", count)
        for seed in range(60):
            if (scenario := fuzz.scenario_of(seed)).moves_kv:
                assert not fuzz.replay(scenario).violations
    assert arrived >= 10


@pytest.mark.parametrize("follows", [False, True])
def test_a_front_hears_nothing_of_what_the_one_before_it_had_loaded(follows: bool) -> None:
    """Its predecessor was killed after a `PrefetchKV`, before the request came: seed 125115 of an earlier version."""
    heard: list[Event] = []
    num_loads: list[int] = []

    def hear(message: Outputs) -> None:
        heard.extend(message.events)

    async def restart_front() -> None:
        loop, draw = asyncio.get_running_loop(), random.Random(1)
        assert isinstance(loop, VirtualEventLoop)
        network = VirtualNetwork(draw, 0.0002)
        tokenizer, switch = open_tokenizer(), KVSwitch(network, draw)
        engine = make_engine(EngineShape(), tokenizer, loop.clock)
        host = Host(0, lambda: engine, network, draw, start_s=0.5, times=LinkTimes(), switch=switch)
        before, after = (LinkTransport(host, draw, Supervision()) for _ in range(2))
        await before.open(EngineConfig())
        nowhere = KVSource(endpoint_of(7))
        request = Request(request_id="r", token_ids=list(range(40)), sampling=SamplingParams())
        before.send(PrefetchKV(request, request.token_ids, nowhere, follows))
        await asyncio.sleep(0.01)
        num_loads.append(len(engine.scheduler.kv_loads))
        before.crash()
        await after.open(EngineConfig())
        num_loads.append(len(engine.scheduler.kv_loads))
        serving = asyncio.create_task(after.run(hear))
        await asyncio.sleep(40.0)
        serving.cancel()
        host.kill()

    run_virtually(restart_front())
    assert num_loads == [1, 0]
    assert not heard
