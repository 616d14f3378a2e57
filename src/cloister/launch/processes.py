"""Creates the client of one engine or of replicas, here or on other machines; and starts a sealed node's processes."""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from cloister.engine.spawning import discard_early_template
from cloister.launch.backend_choice import chosen_backend
from cloister.trust import hardening
from cloister.trust.attestation.unit import engine_name
from cloister.types.config import EngineConfig, ServerConfig
from cloister.types.errors import ConfigError

if TYPE_CHECKING:
    from cloister.cluster import ReplicaSet
    from cloister.cluster.replica_set import MakeHotPrefixes
    from cloister.cluster.replica_states import ClusterConfig
    from cloister.cluster.request_routing import MakeRouter
    from cloister.cluster.rolling_update import EngineRelease
    from cloister.cluster.routers import Router
    from cloister.engine import EngineClient, RequestClient
    from cloister.engine.child_process import ProcessHandle
    from cloister.engine.fork_server import ForkServer
    from cloister.engine.kv_pool import KVPool
    from cloister.engine.kv_unit import KVUnit
    from cloister.engine.replica_snapshot import Role
    from cloister.engine.transports import LoadGuard
    from cloister.types.request import ModelInfo


NUM_SPARE_PARTS: Final = 2
"""Spare parts of a shared KV tier, beyond one for each replica: a rolling update starts an engine beside the others while the
part of the previous one may still be wiped. Parts take no memory until they are written."""
KeepListener = Callable[[int, socket.socket], None]
ENGINE_ENTRY: Final = "cloister.launch:build_engine"
SEALED_ENGINE_ENTRY: Final = "cloister.launch:build_sealed_engine"


def make_engine(
    config: EngineConfig,
    front: ServerConfig,
    keep_listener: KeepListener | None = None,
    guard_load: LoadGuard = contextlib.nullcontext,
) -> RequestClient:
    """Returns a client of an engine in a separate process, or of `replicas` engines on this machine or placed by Ray. Engines
    of a sealed front are sealed.

    Args:
        keep_listener: called with the index and the listener of each engine process of a sealed node; takes ownership of it.
        guard_load: see `ProcessTransport`.
    """
    if front.on == "ray":
        discard_early_template()
        return _make_placed_replicas(config, front)
    fork_server = _make_fork_server(config, front)
    if front.replicas > 1:
        return _make_replicas(config, front, fork_server, keep_listener, guard_load)
    return _make_client(config, front, fork_server, keep_listener, guard_load)


def _make_fork_server(config: EngineConfig, front: ServerConfig) -> ForkServer | None:
    """Returns the server that forks engines from a template; None if each engine is started as a program of its own."""
    if not front.fork_server or sys.platform != "linux" or chosen_backend(config) != "native":  # `describe_start` says so
        discard_early_template()
        return None
    from cloister.engine.fork_server import ForkServer

    return ForkServer(keeps_template=front.idle_keeps == "weights")


def _make_client(
    config: EngineConfig,
    front: ServerConfig,
    fork_server: ForkServer | None,
    keep_listener: KeepListener | None = None,
    guard_load: LoadGuard = contextlib.nullcontext,
    kv_secret: bytes | None = None,
    kv_pool: KVPool | None = None,
    replica: int | None = None,
    kv_unit: KVUnit | None = None,
) -> EngineClient:
    from cloister.engine import EngineClient, ProcessTransport, Supervision
    from cloister.engine.supervision import PING_AFTER_S

    is_sealed = hardening.sealed() is not None
    transport = ProcessTransport(
        SEALED_ENGINE_ENTRY if is_sealed else ENGINE_ENTRY,
        supervision=Supervision(
            idle_timeout_s=front.idle_timeout_s, ping_after_s=None if keep_listener is None else PING_AFTER_S
        ),
        log_format=front.log_format,
        spawn=partial(_start_sealed_engine, replica or 0) if is_sealed else None,
        fork_server=fork_server,
        keep_listener=None if keep_listener is None else partial(keep_listener, replica or 0),
        guard_load=guard_load,
        kv_secret=kv_secret,
        kv_pool=kv_pool,
        kv_unit=kv_unit,
        replica=replica,
    )
    return EngineClient(transport, config)


def _make_replicas(
    config: EngineConfig,
    front: ServerConfig,
    fork_server: ForkServer | None,
    keep_listener: KeepListener | None,
    guard_load: LoadGuard,
) -> ReplicaSet:
    """Returns a client of several engines, each of which budgets an equal share of the memory."""
    from cloister.cluster import ReplicaSet
    from cloister.cluster.rolling_update import EngineRelease
    from cloister.cluster.sealed_unit import SealedUnit
    from cloister.engine.kv_unit import KVUnit

    each = replace(config, memory_share=config.memory_share / front.replicas)
    is_unit = keep_listener is not None and config.kv_transfer is not None
    kv_unit = KVUnit() if is_unit else None
    kv_secret = None if is_unit else _draw_kv_secret(config)
    kv_pool = _make_kv_pool(config, front.replicas + NUM_SPARE_PARTS)

    def make_release(model: str) -> EngineRelease:
        """Returns a release with a template of its own, which loads the version that is installed now."""
        own = _release_config(each, model, replicas.model)
        return release_of(own, _make_fork_server(own, front))

    def release_of(own: EngineConfig, server: ForkServer | None) -> EngineRelease:
        return EngineRelease(own.model, partial(make, own, server), config.request_timeout_s)

    def make(own: EngineConfig, server: ForkServer | None, index: int, lora: str | None) -> EngineClient:
        return _make_client(
            replace(own, lora=lora), front, server, keep_listener, guard_load, kv_secret, kv_pool, index, kv_unit
        )

    release = release_of(each, fork_server)
    clients = [release.make(index, config.lora) for index in range(front.replicas)]
    replicas = (ReplicaSet if keep_listener is None else SealedUnit)(
        clients,
        _router_maker(config, front),
        _cluster_config(front),
        config.block_size,
        avoids_slow=front.slow_replicas == "avoid",
        verify_replay=front.verify_replay,
        make_hot_prefixes=_hot_prefixes_maker(config, front),
        release=release,
        make_release=make_release,
    )
    if isinstance(replicas, SealedUnit):
        replicas.kv_unit = kv_unit
    return replicas


def _cluster_config(front: ServerConfig) -> ClusterConfig:
    from cloister.cluster.replica_states import ClusterConfig, ScalingConfig

    scaling = None
    if front.max_replicas is not None:
        num_min = 1 if front.min_replicas is None else front.min_replicas
        scaling = ScalingConfig(num_min, front.upscale_delay_s, front.downscale_delay_s)
    return ClusterConfig(_roles_of(front), front.rebalance, front.standby, scaling)


def _roles_of(front: ServerConfig) -> tuple[Role, ...]:
    """Returns the role of each replica; a standby replica gets its role when it takes another's place."""
    from cloister.cluster.roles import assign_roles

    waiting: list[Role] = ["mixed"] * front.standby
    return (*assign_roles(front.replicas - front.standby, front.prefill, front.decode), *waiting)


def _release_config(config: EngineConfig, model: str, served: ModelInfo) -> EngineConfig:
    """Returns the settings of new engines. Other weights keep the context window under which requests were read and accepted,
    even if their own is longer."""
    if model == config.model:
        return config
    return replace(config, model=model, max_model_len=served.max_model_len)


def _draw_kv_secret(config: EngineConfig) -> bytes | None:
    """Returns the shared secret of engines that exchange KV, drawn at each start and never written; None if they do not."""
    return None if config.kv_transfer is None else secrets.token_bytes(32)


def _make_kv_pool(config: EngineConfig, num_parts: int) -> KVPool | None:
    """Returns the shared memory of the KV tier; None if the engines have no shared tier.

    Raises:
        ConfigError: the memory cannot be created.
    """
    if config.kv_tier is None:
        return None
    from cloister.engine.kv_pool import KVPool
    from cloister.engine.kv_tier_storage import parse_tiers

    sizes = [tier.limit_bytes for tier in parse_tiers(config.kv_tier) if tier.is_shared]
    try:
        return KVPool(sizes[0], num_parts) if sizes else None
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError("there is no memory for kv_tier; give it a smaller size", param="kv_tier") from error


def _make_placed_replicas(config: EngineConfig, front: ServerConfig) -> ReplicaSet:
    """Returns a client of engines that Ray places. Each budgets a share of the memory of its machine."""
    from cloister.cluster.backend.placed_replicas import PlacedReplicas
    from cloister.cluster.backend.placer import RayPlacer
    from cloister.cluster.backend.ray_messages import RaySettings
    from cloister.cluster.remote.transport import RemoteTransport
    from cloister.cluster.rolling_update import EngineRelease
    from cloister.engine import EngineClient
    from cloister.engine.identity import Identity

    identity = Identity.make()
    kv_secret = _draw_kv_secret(config)
    placer = RayPlacer(
        RaySettings(
            num_replicas=front.replicas,
            address=front.ray_address,
            folder="",
            num_cpus=config.num_threads,
            num_gpus=1 if config.device == "cuda" else 0,
            front=identity.certificate,
        )
    )

    def make(own: EngineConfig, index: int, lora: str | None) -> EngineClient:
        placement = placer.placement(index)
        transport = RemoteTransport(
            placement, identity, ENGINE_ENTRY, log_format=front.log_format, replica=index, kv_secret=kv_secret
        )
        return EngineClient(transport, replace(own, lora=lora))

    def make_release(model: str) -> EngineRelease:
        return release_of(_release_config(config, model, replicas.model))

    def release_of(own: EngineConfig) -> EngineRelease:
        return EngineRelease(own.model, partial(make, own), config.request_timeout_s)

    release = release_of(config)
    replicas = PlacedReplicas(
        [release.make(index, config.lora) for index in range(front.replicas)],
        _router_maker(config, front),
        _cluster_config(front),
        config.block_size,
        avoids_slow=front.slow_replicas == "avoid",
        verify_replay=front.verify_replay,
        make_hot_prefixes=_hot_prefixes_maker(config, front),
        release=release,
        make_release=make_release,
    )
    replicas.placer = placer
    return replicas


def _router_maker(config: EngineConfig, front: ServerConfig) -> MakeRouter:
    from cloister.cluster import ROUTERS
    from cloister.cluster.routers import RouterContext
    from cloister.kv import PrefixKeys

    assert front.router is not None  # settings are resolved
    make = ROUTERS.get(front.router)

    def make_router(model: ModelInfo) -> Router:
        keys = PrefixKeys(model.fingerprint, config.block_size)
        return make(RouterContext(keys, random.SystemRandom(), front.max_ttft_s))

    return make_router


def _hot_prefixes_maker(config: EngineConfig, front: ServerConfig) -> MakeHotPrefixes | None:
    """Returns the factory of the controller that copies hot prefixes; None if it is off."""
    if not front.replicate_hot_prefixes:
        return None
    from cloister.cluster.hot_prefixes import HotPrefixes
    from cloister.kv import PrefixKeys

    return lambda model: HotPrefixes(PrefixKeys(model.fingerprint, config.block_size), random.SystemRandom())


def _start_sealed_engine(index: int, far: socket.socket) -> ProcessHandle:
    """Has the starter create an engine process, because a sealed node executes no program. Evidence names each process."""
    state = hardening.sealed()
    assert state is not None
    assert state.starter is not None
    return state.starter.start("engine", [], far.fileno(), engine_name(index))


def start_sealed_module(module: str, sock: socket.socket) -> ProcessHandle:
    """Has the starter create a process with the role of a module."""
    from cloister.trust.hardening.launching import ROLE_OF

    state = hardening.sealed()
    assert state is not None
    assert state.starter is not None
    return state.starter.start(ROLE_OF[module], [], sock.fileno())


# Locks down the processes of a sealed node that hold plaintext: no module is imported afterwards.


FRONT_PACKAGES: Final = tuple(
    f"cloister.{name}" for name in ("server", "private", "trust", "policy", "engine", "text", "types")
)
ENGINE_PACKAGES: Final = tuple(f"cloister.{name}" for name in ("engine", "scheduler", "kv", "executor", "text", "types"))
LATE_MODULES: Final = ("uvicorn.lifespan.off", "anyio._backends._asyncio", "pydantic._internal._dataclasses", "llguidance")
"""Modules imported before a sealed node is locked down: a request that needs one later would fail."""


def close_front() -> None:
    """Locks down this process if it is the front of a sealed node.

    Raises:
        HardeningError: the process cannot be locked down.
    """
    if hardening.sealed() is not None:
        hardening.preload(FRONT_PACKAGES, LATE_MODULES)
        hardening.close_this()


def close_engine() -> None:
    """Locks down this process, a sealed node's engine.

    Raises:
        HardeningError: the process cannot be locked down.
    """
    hardening.preload(ENGINE_PACKAGES, LATE_MODULES)
    hardening.close_this()
