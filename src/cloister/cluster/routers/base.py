"""The protocol of a router. Pure: no clock, no I/O; randomness is given."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.kv import PrefixKeys
from cloister.types.registry import Registry
from cloister.types.request import Request
from cloister.types.threat import Requirement, ThreatProfile

MAX_IMBALANCE: Final = 2.0
SLACK: Final = 4

ROUTER_THREAT = ThreatProfile(
    row="machine-level scheduler",
    threats=frozenset({Requirement.ENFORCEABLE, Requirement.NON_TARGETABLE}),
    residue="cache map",
    where=("router",),
    attack="content-specific routing",
    mitigations=(
        "prompts are remembered by prefix keys only, which are seeded by the scope",
        "strict profiles: only the one that draws by capacity",
    ),
)


@dataclass(frozen=True, slots=True)
class RouterContext:
    """What a router may use.

    Attributes:
        keys: computes the prefix keys of requests, as the replicas do.
        draw: source of randomness.
        max_ttft_s: longest time to the first token for which a request is accepted; None for its own deadline only.
    """

    keys: PrefixKeys
    draw: random.Random
    max_ttft_s: float | None = None


class Router(Protocol):
    """Chooses a replica for each request.

    Attributes:
        is_blind: load, text and length of a request decide nothing.
        predicts_lengths: it uses how many tokens answers are expected to get (`ReplicaSnapshot.num_expected_tokens`).
    """

    is_blind: ClassVar[bool] = False
    predicts_lengths: ClassVar[bool] = False

    def pick(self, request: Request, replicas: Sequence[ReplicaSnapshot]) -> int:
        """Returns the index of one of `replicas`, all of which accept requests; there is at least one."""
        ...

    def pick_decoder(self, request: Request, replicas: Sequence[ReplicaSnapshot]) -> int:
        """Returns the index of the replica that continues a request after its first token."""
        return self.pick(request, replicas)

    def admit(self, request: Request, replicas: Sequence[ReplicaSnapshot]) -> None:
        """Called with all replicas that accept requests, before one is picked.

        Raises:
            QueueFullError: the request would be answered too late; it says when to send it again.
        """

    def take_source(self) -> int | None:
        """Called after `pick`: returns the index of another replica whose KV of the prompt is worth copying; None for none."""
        return None

    def count_cached(self, request: Request, index: int) -> int:
        """Returns how many tokens of a prompt a replica has probably cached."""
        return 0

    def note_copy(self, request: Request, replica: ReplicaSnapshot) -> None:
        """Called when a replica has loaded KV of a request's prompt from another one, and keeps it."""

    def forget(self, index: int) -> None:
        """Called when a replica's engine has ended: its cache is empty."""


class RouterType(Protocol):
    """What is registered: a class of routers."""

    @property
    def predicts_lengths(self) -> bool:
        """As `Router.predicts_lengths`."""
        ...

    def __call__(self, context: RouterContext, /) -> Router:
        """Returns a router."""
        ...


ROUTERS: Registry[RouterType] = Registry("router")


def load_of(replica: ReplicaSnapshot) -> tuple[float, float]:
    """Returns requests and pending tokens of a replica for its capacity."""
    return replica.num_requests / replica.capacity, replica.num_pending_tokens / replica.capacity


def leave_out_busy(replicas: Sequence[ReplicaSnapshot]) -> list[ReplicaSnapshot]:
    """Returns the replicas without those that have more than MAX_IMBALANCE times the requests of the least busy one, and SLACK
    more. This bounds every queue: a prompt that all requests share is computed on other replicas too, and a wrong prediction
    overloads no replica."""
    idlest = least_loaded(replicas)
    most = MAX_IMBALANCE * idlest.num_requests / idlest.capacity + SLACK
    return [replica for replica in replicas if replica.num_requests / replica.capacity <= most]


def draw_by_capacity(replicas: Sequence[ReplicaSnapshot], draw: random.Random) -> ReplicaSnapshot:
    """Draws one replica; the probability of each is its share of the capacity."""
    [chosen] = draw.choices(replicas, [replica.capacity for replica in replicas])
    return chosen


def draw_least(
    replicas: Sequence[ReplicaSnapshot], key: Callable[[ReplicaSnapshot], tuple[float, ...]], draw: random.Random
) -> ReplicaSnapshot:
    """Draws one of the replicas whose key is least: routers that see the same would otherwise all choose the first one."""
    keys = [key(replica) for replica in replicas]
    least = min(keys)
    return draw.choice([replica for replica, own in zip(replicas, keys, strict=True) if own == least])


def least_loaded(replicas: Sequence[ReplicaSnapshot]) -> ReplicaSnapshot:
    """Returns the replica with the fewest requests for its capacity; of equal ones that with the fewest pending tokens."""
    return min(replicas, key=lambda replica: (*load_of(replica), replica.index))
