"""What must not be left in a cluster that has come to rest: requests, blocks, leases, adapters, engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from cloister.cluster.replica_set import ReplicaSet
from cloister.cluster.scaling import GONE
from cloister.cluster.virtual.checks import max_starts
from cloister.cluster.virtual.event_loop import VirtualEventLoop
from cloister.cluster.virtual.replica import Host
from cloister.cluster.virtual.scenario import Scenario
from cloister.engine.client import EngineClient
from cloister.engine.request_client import RequestClient


class RestingCluster(Protocol):
    """A cluster without requests.

    Attributes:
        hosts: those of the replicas, and those that updates brought.
        hosts_of: the same by replica.
        clients: of all engines.
        front: None after it was killed.
    """

    scenario: Scenario
    loop: VirtualEventLoop
    hosts: list[Host]
    hosts_of: list[list[Host]]
    clients: list[EngineClient]
    front: ReplicaSet | None


def find_leftovers(cluster: RestingCluster) -> list[str]:
    """Returns what must not be in a cluster that has come to rest."""
    left = [leftover for index, host in enumerate(cluster.hosts) for leftover in _leftovers_of_engine(cluster, index, host)]
    for index, client in enumerate(cluster.clients):
        if client.num_requests:
            left.append(f"the client of engine {index} still has {client.num_requests} requests")
        if client.num_leaving:
            left.append(f"the client of engine {index} still waits for {client.num_leaving} that left it")
    num_starts, most = sum(host.num_starts for host in cluster.hosts), max_starts(cluster.scenario)
    if most is not None and num_starts > most:
        left.append(f"engines were started {num_starts} times, where {most} were enough")
    return left if cluster.front is None else left + _leftovers_of_replicas(cluster, cluster.front)


def _leftovers_of_engine(cluster: RestingCluster, index: int, host: Host) -> Iterator[str]:
    if (process := host.process) is None or cluster.loop.time() < process.hangs_until_s:
        return  # one that hangs while nothing waits for it is noticed with the next request
    scheduler = process.engine.scheduler
    if scheduler.requests:
        yield f"engine {index} still has {sorted(scheduler.requests)}"
    if scheduler.pool.num_used:
        yield f"engine {index} still uses {scheduler.pool.num_used} blocks"
    left = len(scheduler.leases or ()), len(scheduler.kv_loads), len(scheduler.kv_exports), len(scheduler.prefix_leases)
    num_open = 0 if process.kv_links is None else process.kv_links.num_open
    if any(left) or num_open:
        yield f"engine {index} still has leases, loads or exports {left}, and {num_open} connections"
    if num_reads := process.engine.num_tier_reads():
        yield f"engine {index} still reads {num_reads} times from its tiers"
    scheduler.pool.check()
    if scheduler.kv_restores is not None:
        scheduler.kv_restores.tiers.check()
    check_copies(cluster.hosts)


def check_copies(hosts: Iterable[Host]) -> None:
    """Raises AssertionError if a copy of a prefix has outlived its lease, or the books of a cache are wrong."""
    for host in hosts:
        if host.process is not None:
            scheduler = host.process.engine.scheduler
            scheduler.prefix_leases.check()
            if scheduler.prefix_cache is not None:
                scheduler.prefix_cache.check()


def _leftovers_of_replicas(cluster: RestingCluster, front: ReplicaSet) -> list[str]:
    slowed = {fault.replica for fault in cluster.scenario.faults if fault.kind == "slow"}
    left = [
        f"replica {replica.index} counts as slow, and is not"
        for replica in front.snapshots()
        if replica.is_slow and replica.index not in slowed
    ]
    left += _leftovers_of_adapters(cluster, front)
    return [*left, *_leftovers_of_update(front), *_leftovers_of_scaling(cluster, front), *leftovers_of_front(front)]


def _leftovers_of_adapters(cluster: RestingCluster, front: ReplicaSet) -> Iterator[str]:
    """An engine has the adapters that the front offers, and no others."""
    for index, host in enumerate(cluster.hosts):
        process = host.process
        if process is not None and process.has_front and cluster.loop.time() >= process.hangs_until_s:
            names = sorted(adapter.name for adapter in process.engine.core.adapters.loaded)
            if names != sorted(front.adapters.loaded):
                yield f"engine {index} has the adapters {names}, and the front {sorted(front.adapters.loaded)}"


def _leftovers_of_scaling(cluster: RestingCluster, front: ReplicaSet) -> Iterator[str]:
    """Without requests no more replicas run than must, and those that are stopped have no engine."""
    if cluster.scenario.min_replicas is None:
        return
    replicas = front.snapshots()
    running = [r for r in replicas if not (r.is_stopped or r.is_standby or r.state in GONE)]
    most = max(1, cluster.scenario.min_replicas, len({r.role for r in running}))
    if len(running) > most:
        yield f"{len(running)} replicas run, where {most} are enough"
    for replica in replicas:
        has_engine = any(host.process is not None and host.process.has_front for host in cluster.hosts_of[replica.index])
        if replica.state == "stopped" and has_engine:
            yield f"replica {replica.index} is stopped, and its engine runs"


def _leftovers_of_update(front: ReplicaSet) -> Iterator[str]:
    if (progress := front.update_progress) is None:
        return
    weights = [client.fingerprint for client in front._replicas]
    if progress.is_running:
        yield "the update has not ended"
    elif len(set(weights)) > 1 and "keeps the new weights" not in progress.error:
        yield f"replicas have several weights: {', '.join(weights)}"
    elif not progress.error and progress.num_updated < progress.num_replicas:
        yield f"the update has ended with {progress.num_updated} replicas"


def leftovers_of_front(front: RequestClient) -> list[str]:
    """Returns what a front must not have when all requests have ended."""
    left = []
    for replica in front.snapshots():
        if replica.num_mismatches:
            left.append(f"replica {replica.index} computed something else than another one")
    if not isinstance(front, ReplicaSet):
        return left
    if front.num_forecasts:
        left.append(f"the front still predicts the lengths of {front.num_forecasts} requests")
    if front.num_followed:
        left.append(f"the front still has {front.num_followed} prompts that are followed")
    if front.num_hot_prefixes:
        left.append(f"the front still has leases of {front.num_hot_prefixes} prefixes")
    if front.num_shadows:
        left.append(f"the front still has {front.num_shadows} shadows of requests")
    if front.num_places:
        left.append(f"the front still knows the places of {front.num_places} requests")
    return left
