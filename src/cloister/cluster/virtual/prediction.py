"""A virtual cluster without faults, whose steps and transfers take as long as measured ones: what it does is a prediction."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

from cloister.cluster.hot_prefixes import HotPrefixes
from cloister.cluster.link import LinkTimes
from cloister.cluster.replica_set import ReplicaSet
from cloister.cluster.replica_states import ClusterConfig, ScalingConfig
from cloister.cluster.virtual.engine import make_engine
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.cluster.virtual.event_loop import VirtualEventLoop
from cloister.cluster.virtual.front import make_front
from cloister.cluster.virtual.kv_links import PART_ENTRIES, KVSwitch
from cloister.cluster.virtual.network import VirtualNetwork
from cloister.cluster.virtual.processors import FREE, FrontCosts, FrontThread, Processors
from cloister.cluster.virtual.replica import Host
from cloister.engine.replica_snapshot import Role
from cloister.kv import PrefixKeys
from cloister.text import Tokenizer
from cloister.types.request import ModelInfo

DRAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """A cluster, and the times of its messages.

    Attributes:
        engine: of each replica.
        router: its name.
        roles: of each replica.
        delay_s: of a message between front and engine, one way.
        moves_kv: engines load KV from each other.
        entry_s: time that an entry of KV takes from one engine to another.
        copies_prefixes: hot prefixes are copied to other replicas.
        part_entries: entries that an engine copies between two steps.
        num_cores: that engines, front and clients share; None: each has one of its own.
        company: slowdown of steps while others run on these cores too, as caches are shared.
        front: what front and clients take of them.
        scaling: when replicas are added and removed; None: all run.
    """

    engine: EngineShape
    router: str
    roles: tuple[Role, ...] = ("mixed", "mixed")
    delay_s: float = 0.001
    moves_kv: bool = False
    entry_s: float = 0.0
    part_entries: int = PART_ENTRIES
    copies_prefixes: bool = False
    num_cores: int | None = None
    company: float = 1.0
    front: FrontCosts = FREE
    scaling: ScalingConfig | None = None


@contextlib.asynccontextmanager
async def running_cluster(shape: ClusterShape, tokenizer: Tokenizer, seed: int) -> AsyncIterator[ReplicaSet]:
    """Runs a cluster in the virtual event loop of the caller (`run_virtually`). Every token of a prompt is below 256.

    Args:
        tokenizer: of `write_byte_tokenizer`.
        seed: of what routers draw.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualEventLoop)
    draw = random.Random(seed)
    network = VirtualNetwork(draw, shape.delay_s)
    switch = KVSwitch(network, draw, part_entries=shape.part_entries, entry_s=shape.entry_s) if shape.moves_kv else None
    processors = None if shape.num_cores is None else Processors(shape.num_cores, loop.clock, shape.company)
    hosts = [
        Host(
            index,
            lambda: make_engine(shape.engine, tokenizer, loop.clock),
            network,
            draw,
            start_s=shape.engine.start_s,
            times=LinkTimes(),
            switch=switch,
            processors=processors,
        )
        for index in range(len(shape.roles))
    ]

    def make_hot_prefixes(model: ModelInfo) -> HotPrefixes:
        return HotPrefixes(PrefixKeys(model.fingerprint, shape.engine.block_size), draw)

    thread = None if processors is None else FrontThread(processors, shape.front)
    front = make_front(
        hosts,
        shape.engine,
        shape.router,
        ClusterConfig(shape.roles, scaling=shape.scaling),
        draw=draw,
        clock=loop.clock,
        make_hot_prefixes=make_hot_prefixes if shape.copies_prefixes else None,
        thread=thread,
    )
    await front.replicas.start()
    try:
        yield front.replicas
    finally:
        await front.replicas.drain(DRAIN_S)
