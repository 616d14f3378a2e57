"""State of each replica: client, role, speed, and whether it accepts requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from cloister.cluster.health import ReplicaSpeeds
from cloister.cluster.lengths import LengthForecasts
from cloister.cluster.prefix_copies import PrefixCopies
from cloister.cluster.replay import ReplayVerifier
from cloister.engine.client import EngineClient
from cloister.engine.in_flight import InFlightRequest
from cloister.engine.replica_snapshot import ReplicaSnapshot, ReplicaState, Role, StepCoefficients
from cloister.scheduler.step_cost import StepCost, StepSize
from cloister.types.clock import Clock
from cloister.types.events import KVLoaded, KVStored, Stepped
from cloister.types.request import ModelInfo

TRANSFER_WEIGHT: Final = 0.1
"""Weight of the last transfer in the mean time for a token."""
TRANSFER_LIFETIME_S: Final = 30.0
"""A transfer time that is older counts as unknown: a slow one, as during a fault, would otherwise prevent the transfers that
could show that they are fast again."""


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """When replicas are added and removed (`cluster.scaling.ScalingController`).

    Attributes:
        num_min: replicas that stay.
        up_after_s, down_after_s: how long they must be busy until one is added, and fewer be enough until one is removed.
        look_every_s: time between two looks.
    """

    num_min: int = 1
    up_after_s: float = 1.0
    down_after_s: float = 60.0
    look_every_s: float = 0.25


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """How replicas share the work.

    Attributes:
        roles: of each replica; empty if all are mixed.
        rebalance: running requests are moved from busy replicas to idle ones, and roles are flipped, as the load changes.
        num_standby: number of standby replicas: the last ones, without requests until another one is lost.
        scaling: when replicas are added and removed; None: all run.
    """

    roles: tuple[Role, ...] = ()
    rebalance: bool = False
    num_standby: int = 0
    scaling: ScalingConfig | None = None


class ReplicaStates:
    """The replicas of a set.

    Args:
        clients: one for each replica; an update replaces them in place.
        verifier: knows which of them compute wrongly.
        avoids_slow: slow replicas get no requests; False: they are only reported.

    Attributes:
        clients: as above.
        model: that of new requests, once engines have started.
        roles: of each replica.
        draining: replicas that are drained or being drained.
        given_up: replicas excluded because others have failed (`cluster.sealed_unit`).
        standby: replicas that get no requests until another one is lost.
        stopped: replicas without an engine, because fewer are enough.
        adding, removing: replicas whose engine is being started or ended by scaling.
        preferred_weights: fingerprint of the weights for new requests, once replicas have different ones; None before.
        speeds: speed of each replica relative to the others.
        avoids_slow: as above.
        num_routed_before: requests that each replica got through its earlier clients.
        num_restarts_before: engine restarts of each replica under its earlier clients.
        num_migrated: running requests that were moved to each replica.
        lengths: length forecasts; None if the router uses none.
        copies: copies of hot prefixes; None if there are none.
    """

    model: ModelInfo

    def __init__(
        self,
        clients: list[EngineClient],
        config: ClusterConfig,
        verifier: ReplayVerifier,
        clock: Clock,
        *,
        avoids_slow: bool = True,
    ) -> None:
        num_replicas = len(clients)
        self.clients = clients
        self.roles: list[Role] = list(config.roles) or ["mixed"] * num_replicas
        self.draining: set[int] = set()
        self.given_up: set[int] = set()
        self.standby = set(range(num_replicas - config.num_standby, num_replicas))
        self.stopped: set[int] = set()
        self.adding: set[int] = set()
        self.removing: set[int] = set()
        self.preferred_weights: str | None = None
        self.speeds = ReplicaSpeeds(num_replicas)
        self.avoids_slow = avoids_slow
        self.num_routed_before = [0] * num_replicas
        self.num_restarts_before = [0] * num_replicas
        self.num_migrated = [0] * num_replicas
        self.lengths: LengthForecasts | None = None
        self.copies: PrefixCopies | None = None
        self._verifier, self._clock = verifier, clock
        verifier.list_inactive = lambda: self.inactive
        self._cost = StepCost()
        self._stored: dict[tuple[int, str], KVStored] = {}  # what each tier of each replica last said
        self._transfer_token_s = [0.0] * num_replicas
        self._transferred_s = [0.0] * num_replicas
        self._num_kv_loads = [0] * num_replicas
        self._num_promotions = [0] * num_replicas

    # Snapshots

    def snapshots(self) -> list[ReplicaSnapshot]:
        """Returns the load of each replica."""
        return [self.snapshot(index) for index in range(len(self.clients))]

    def snapshot(self, index: int) -> ReplicaSnapshot:
        """Returns the load of a replica."""
        own = self.clients[index].snapshot(index)
        requests = [] if self.lengths is None else self.clients[index].request_snapshots()
        requests = [request for request in requests if not request.is_held]  # who comes waits for none of them
        return replace(
            own,
            num_sequences=sum(request.num_sequences for request in requests),
            num_expected_tokens=0.0 if self.lengths is None else sum(map(self.lengths.remaining, requests)),
            state=self._state(index, own.state),
            is_accepting=own.is_accepting and index not in self.unavailable,
            is_standby=index in self.standby,
            is_stopped=index in self.stopped | self.removing,
            slowness=self.speeds.slowness(index),
            is_slow=self.speeds.is_slow(index),
            num_mismatches=self._verifier.num_mismatches[index],
            num_routed=self.num_routed_before[index] + own.num_routed,
            num_restarts=self.num_restarts_before[index] + own.num_restarts,
            num_migrated=self.num_migrated[index],
            num_kv_loads=self._num_kv_loads[index],
            num_prefix_copies=0 if self.copies is None else self.copies.num_copies[index],
            num_promotions=self._num_promotions[index],
            role=self.roles[index],
            cost=self._cost_of(index),
            transfer_token_s=self._transfer_time(index),
        )

    def _state(self, index: int, own: ReplicaState) -> ReplicaState:
        """Returns the state of a replica whose engine is in the state `own`."""
        if own in ("lost", "starting"):
            return own
        if index in self.draining:
            return "draining" if self.clients[index].num_requests else "drained"
        if index in self.stopped | self.removing:
            return "stopped" if index in self.stopped else "stopping"
        if own in ("draining", "stalled"):
            return own
        if index in self._verifier.suspicious:
            return "suspicious"
        if self.speeds.is_slow(index):
            return "slow"
        return "standby" if index in self.standby and own == "running" else own

    def _transfer_time(self, index: int) -> float:
        """Returns the mean transfer seconds for KV of a token to a replica; 0 if unknown or too old."""
        is_known = self._clock.now() - self._transferred_s[index] < TRANSFER_LIFETIME_S
        return self._transfer_token_s[index] if is_known else 0.0

    def _cost_of(self, index: int) -> StepCoefficients:
        """Returns the step-time coefficients of a replica: those of all replicas, scaled if it is clearly slower."""
        factor = self.speeds.correction(index, self._clock.now())
        per_step, per_token, per_attended, per_read = self._cost.coefficients
        return per_step * factor, per_token * factor, per_attended * factor, per_read * factor

    # Which of them requests may go to

    @property
    def unavailable(self) -> set[int]:
        """Replicas excluded from routing, whatever the state of their engines."""
        return self.draining | self._verifier.suspicious | self.standby | self.inactive | self.given_up

    @property
    def inactive(self) -> set[int]:
        """Replicas whose engine is stopped, or being started or ended by scaling."""
        return self.stopped | self.adding | self.removing

    def with_engines(self) -> list[EngineClient]:
        """Returns the clients of replicas that are not stopped."""
        return [client for index, client in enumerate(self.clients) if index not in self.stopped]

    @property
    def moves_kv(self) -> bool:
        """Whether engines load KV from each other."""
        return all(client.exchanges_kv for index, client in enumerate(self.clients) if index not in self.stopped | self.adding)

    def is_accepting(self, index: int) -> bool:
        """Whether requests may go to a replica."""
        return self.snapshot(index).is_accepting

    def candidates(self, found: InFlightRequest | None = None, excluding: int | None = None) -> list[ReplicaSnapshot]:
        """Returns the replicas that a request may be routed to. If its answer has begun: those with the same weights. Else:
        those with the preferred weights, or all if none of these accepts requests.

        Args:
            found: a request that was accepted; None for a new one.
            excluding: index of a replica that is left out.
        """
        if found is not None and found.is_begun:
            return self.accepting(excluding, found.stats.fingerprint)
        return (
            self.accepting(excluding, self.preferred_weights) if self.preferred_weights is not None else []
        ) or self.accepting(excluding)

    def accepting(self, excluding: int | None = None, weights: str | None = None) -> list[ReplicaSnapshot]:
        """Returns the accepting replicas, without slow ones, and without idle ones that need not be started because another
        one of the same role runs without a request.

        Args:
            weights: their fingerprint; None for any.
        """
        accepting = [
            snapshot
            for snapshot in self.snapshots()
            if snapshot.is_accepting
            and snapshot.index != excluding
            and weights in (None, self.clients[snapshot.index].fingerprint)
        ]
        if accepting and self.avoids_slow:
            accepting = self.speeds.choose(accepting, self._clock.now())
        unused = {snapshot.role for snapshot in accepting if not (snapshot.is_idle or snapshot.num_requests)}
        return [snapshot for snapshot in accepting if not (snapshot.is_idle and snapshot.role in unused)]

    def with_preferred_weights(self) -> list[ReplicaSnapshot]:
        """Returns the replicas that have the weights of new requests."""
        preferred = self.preferred_weights or self.clients[0].fingerprint
        return [each for each in self.snapshots() if self.clients[each.index].fingerprint == preferred]

    def promote(self, index: int, instead_of: int) -> None:
        """Makes a standby replica take the place and the role of another one, which becomes the standby."""
        self.standby.discard(index)
        self.standby.add(instead_of)
        self.roles[index], self.roles[instead_of] = self.roles[instead_of], self.roles[index]
        self._num_promotions[index] += 1

    # What engines report

    def note_step(self, index: int, event: Stepped) -> Stepped:
        """Learns from a step; returns it with the load of all replicas, and with what the tiers of all of them hold."""
        if event.num_tokens and not event.drafting and not event.num_scored:
            plain_s = event.plain_s / self.speeds.correction(index)
            self._cost.learn(StepSize(event.num_tokens, event.num_attended), plain_s)
        return self._total(event, index)

    def note_load(self, index: int, event: KVLoaded) -> None:
        """Learns how long KV took to come to a replica."""
        if not (event.num_bytes and event.num_tokens):
            return
        self._num_kv_loads[index] += 1
        token_s = event.elapsed_s / event.num_tokens
        before_s = self._transfer_time(index) or token_s
        self._transfer_token_s[index] = before_s + TRANSFER_WEIGHT * (token_s - before_s)
        self._transferred_s[index] = self._clock.now()

    def forget(self, index: int) -> None:
        """Called when the engine of a replica has ended: forgets what it stored, and how fast it was."""
        self._stored = {place: stored for place, stored in self._stored.items() if place[0] != index}
        self.speeds.forget(index)

    def _total(self, event: Stepped, index: int) -> Stepped:
        if event.stored:
            self._stored |= {(index, stored.tier): stored for stored in event.stored}
            event = msgspec.structs.replace(event, stored=tuple(map(self._total_stored, event.stored)))
        steps: Sequence[Stepped] = [client.last_step for client in self.clients if client.last_step is not None]
        return msgspec.structs.replace(
            event,
            num_running=sum(step.num_running for step in steps),
            num_waiting=sum(step.num_waiting for step in steps),
            num_held=sum(step.num_held for step in steps),
            num_used_blocks=sum(step.num_used_blocks for step in steps),
            num_cached_blocks=sum(step.num_cached_blocks for step in steps),
            num_total_blocks=sum(step.num_total_blocks for step in steps),
        )

    def _total_stored(self, stored: KVStored) -> KVStored:
        same = [other for other in self._stored.values() if other.tier == stored.tier]
        ages = [other.oldest_s for other in same if other.oldest_s is not None]
        used_bytes = sum(other.used_bytes for other in same)
        return msgspec.structs.replace(stored, used_bytes=used_bytes, oldest_s=max(ages, default=None))
