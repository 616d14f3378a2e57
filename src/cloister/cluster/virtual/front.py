"""The front of a virtual cluster, made of production clients, links and routers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from cloister.cluster.replica_set import MakeHotPrefixes, MakePredictor, ReplicaSet, make_length_curves
from cloister.cluster.replica_states import ClusterConfig
from cloister.cluster.rolling_update import EngineRelease
from cloister.cluster.routers import ROUTERS
from cloister.cluster.routers.base import RouterContext
from cloister.cluster.virtual.adapters import list_adapters
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.cluster.virtual.processors import FrontThread
from cloister.cluster.virtual.replica import Host
from cloister.cluster.virtual.transport import LinkTransport
from cloister.engine.client import EngineClient
from cloister.engine.supervision import Supervision
from cloister.kv import PrefixKeys
from cloister.types.clock import Clock
from cloister.types.config import EngineConfig
from cloister.types.events import FrontMessage

LONGEST_REQUEST_S: Final = 300.0
OLD_WEIGHTS: Final = "0"
"""The name of the weights with which a cluster starts (`EngineShape.weights`)."""


@dataclass(frozen=True, slots=True)
class VirtualFront:
    """A front and what it is made of.

    Attributes:
        replicas: the client of all engines.
        transports, clients: of each replica, and of those that updates bring.
    """

    replicas: ReplicaSet
    transports: list[LinkTransport]
    clients: list[EngineClient]


def _send_as_it_is(_: int, message: FrontMessage) -> list[FrontMessage]:
    return [message]


def make_front(
    hosts: Sequence[Host],
    shape: EngineShape,
    router: str,
    config: ClusterConfig,
    *,
    draw: random.Random,
    clock: Clock,
    stall_timeout_s: float = EngineConfig().stall_timeout_s,
    verify_replay: float = 0.0,
    supervise: Callable[[], Supervision] = Supervision,
    amend: Callable[[int, FrontMessage], list[FrontMessage]] = _send_as_it_is,
    make_predictor: MakePredictor = make_length_curves,
    make_host: Callable[[int, str], Host] | None = None,
    make_hot_prefixes: MakeHotPrefixes | None = None,
    thread: FrontThread | None = None,
) -> VirtualFront:
    """Returns a front, which has not been started.

    Args:
        shape: of the engines on `hosts`.
        router: its name.
        supervise: makes the supervision of an engine.
        amend: returns what is sent in place of a message to a replica.
        make_predictor: makes what predicts lengths of answers, for routers that use it.
        make_hot_prefixes: makes what decides which prefixes replicas copy; None: they copy none.
        make_host: makes a machine for a replica with these weights, for updates; None: there are none.
        thread: its thread, which takes time; None: it takes none.
    """
    engine = EngineConfig(
        model="history",
        max_waiting=shape.max_waiting,
        max_num_seqs=shape.max_num_seqs,
        stall_timeout_s=stall_timeout_s,
        lora=list_adapters(shape.num_adapters) or None,
        runtime_adapters=True,
    )
    transports: list[LinkTransport] = []
    clients: list[EngineClient] = []

    def make_client(host: Host, lora: str | None = engine.lora) -> EngineClient:
        owns = make_host is not None
        own_amend = partial(amend, host.index)
        transports.append(LinkTransport(host, draw, supervise(), own_amend, owns_engine=owns, thread=thread))
        clients.append(EngineClient(transports[-1], dataclasses.replace(engine, lora=lora), clock=clock))
        return clients[-1]

    def make_release(model: str) -> EngineRelease:
        assert make_host is not None
        return EngineRelease(model, lambda index, lora: make_client(make_host(index, model), lora), LONGEST_REQUEST_S)

    make_router = ROUTERS.get(router)
    replicas = ReplicaSet(
        [make_client(host) for host in hosts],
        lambda model: make_router(RouterContext(PrefixKeys(model.fingerprint, shape.block_size), draw)),
        config,
        shape.block_size,
        verify_replay=verify_replay,
        draw=draw,
        make_predictor=make_predictor,
        make_hot_prefixes=make_hot_prefixes,
        clock=clock,
        release=None if make_host is None else make_release(OLD_WEIGHTS),
        make_release=make_release,
    )
    return VirtualFront(replicas, transports, clients)
