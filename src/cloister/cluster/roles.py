"""Roles of replicas: prefill, decode, or both (DistServe, Zhong et al. 2024; Splitwise, Patel et al. 2024; two-level scheduling
and role flips: TetriInfer, Hu et al. 2024). Pure: no clock, no I/O; randomness is given.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cloister.cluster.routers import Router
from cloister.cluster.routers.base import draw_by_capacity
from cloister.engine.replica_snapshot import ReplicaSnapshot, Role
from cloister.types.errors import ConfigError
from cloister.types.request import Request
from cloister.types.threat import Requirement, ThreatProfile

DISAGGREGATION_THREAT: Final = ThreatProfile(
    row="disaggregated prefill/decode",
    threats=frozenset(),
    residue="KV in flight",
    where=("network",),
    attack="tap",
    mitigations=("where peers must be attested: inside one sealed node, over encrypted links",),
)
FLIP_THREAT: Final = ThreatProfile(
    row="instance flip",
    threats=frozenset({Requirement.NON_TARGETABLE}),
    attack="turn a captured node into a prefill node",
    mitigations=(
        "refused where the profile allows no choice by load",
        "drawn by capacity among the replicas that are idle; counted in the log and in the metrics",
    ),
)


def assign_roles(num_replicas: int, num_prefill: int, num_decode: int) -> list[Role]:
    """Returns the role of each replica: the first ones prefill, the next ones decode, the rest are mixed.

    Raises:
        ConfigError: there are too few replicas, or none would prefill or decode.
    """
    num_mixed = num_replicas - num_prefill - num_decode
    if num_mixed < 0:
        raise ConfigError(
            f"prefill {num_prefill} and decode {num_decode} are more than the {num_replicas} replicas; raise `replicas`",
            param="prefill",
        )
    if num_mixed == 0 and (num_prefill == 0) != (num_decode == 0):
        missing = "decode" if num_decode == 0 else "prefill"
        raise ConfigError(f"no replica is left to {missing}; set `{missing}` to 1 or more, or raise `replicas`", param=missing)
    roles: list[Role] = []
    roles += ["prefill"] * num_prefill
    roles += ["decode"] * num_decode
    roles += ["mixed"] * num_mixed
    return roles


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """Where a request starts.

    Attributes:
        index: of the replica.
        hands_off: another replica continues after the first token.
        source: index of a replica whose KV of the prompt is copied first; None for none.
    """

    index: int
    hands_off: bool = False
    source: int | None = None


class RoleRouter:
    """Routes requests to replicas with roles, by one router for prefill and another for decode, so that placements of answers
    do not affect those of prompts.

    Args:
        block_size: tokens of a KV block; shorter prompts have no KV that could move.
    """

    def __init__(self, prefill: Router, decode: Router, block_size: int) -> None:
        self._prefill, self._decode = prefill, decode
        self._block_size = block_size

    @property
    def predicts_lengths(self) -> bool:
        """Whether routing uses predicted answer lengths."""
        return self._prefill.predicts_lengths

    def place(self, request: Request, replicas: Sequence[ReplicaSnapshot]) -> RoutingDecision:
        """Returns where a request starts. `replicas` are those that accept requests, at least one.

        Raises:
            QueueFullError: the router refuses the request.
        """
        self._prefill.admit(request, replicas)
        whole = [replica for replica in replicas if replica.can_decode] or list(replicas)
        index = self._prefill.pick(request, self._choose_pool(request, replicas, whole))
        source = self._prefill.take_source()
        role = next(replica.role for replica in replicas if replica.index == index)
        return RoutingDecision(index, hands_off=role == "prefill" and request.pooling is None, source=source)

    def place_decode(self, request: Request, replicas: Sequence[ReplicaSnapshot]) -> int | None:
        """Returns the decode replica of a request with its first token; None if none of `replicas` decodes."""
        decoders = [replica for replica in replicas if replica.can_decode]
        return self._decode.pick_decoder(request, decoders) if decoders else None

    def note_copy(self, request: Request, replica: ReplicaSnapshot) -> None:
        """Called when a replica has loaded KV of a request's prompt from another one, and keeps it."""
        self._prefill.note_copy(request, replica)
        self._decode.note_copy(request, replica)

    def forget(self, index: int) -> None:
        """Called when a replica's engine has ended."""
        self._prefill.forget(index)
        self._decode.forget(index)

    def _choose_pool(
        self, request: Request, replicas: Sequence[ReplicaSnapshot], whole: Sequence[ReplicaSnapshot]
    ) -> Sequence[ReplicaSnapshot]:
        """Returns the replicas among which to choose for the prompt: all that prefill, or those that decode the answer too."""
        prefillers = [replica for replica in replicas if replica.can_prefill]
        if not prefillers:
            return whole
        if all(replica.role == "mixed" for replica in replicas):
            return replicas
        if request.pooling is not None:
            return prefillers
        if request.sampling.beams is not None or len(request.token_ids) < self._block_size:
            return whole
        if not self._prefill.is_blind and self._is_soon_done(request, whole, prefillers):
            return whole
        return prefillers

    def _is_soon_done(self, request: Request, whole: Sequence[ReplicaSnapshot], prefillers: Sequence[ReplicaSnapshot]) -> bool:
        """Whether less time is lost if a decoder computes the rest of the prompt, counted for this request and each answer that
        waits meanwhile, than elsewhere and on the way. Before costs are known, prompts go where prompts are computed.
        """
        num_tokens, router = len(request.token_ids), self._prefill
        elsewhere_s = min(r.prefill_s(num_tokens, router.count_cached(request, r.index)) for r in prefillers)

        def gains(replica: ReplicaSnapshot) -> bool:
            if not (any(replica.cost) and replica.transfer_token_s):
                return False
            num_cached = router.count_cached(request, replica.index)
            stall_s = replica.prefill_s(num_tokens, num_cached) * (1 + replica.num_requests)
            return stall_s < elsewhere_s + (num_tokens - num_cached) * replica.transfer_token_s

        return any(gains(replica) for replica in whole)


@dataclass(frozen=True, slots=True)
class Flip:
    """A replica changes its role."""

    index: int
    role: Role


class RoleFlipper:
    """Flips a replica of an idle pool where the other pool has queued for some time. Of several idle ones one is drawn by
    capacity, so that it cannot be predicted.

    Mixed replicas keep their role, and the last replica of a role keeps it.

    Args:
        draw: source of randomness.
        hold_s: minimum time that the other pool has queued and this one has been idle.
        rest_s: time between two flips.
    """

    def __init__(self, draw: random.Random, *, hold_s: float = 2.0, rest_s: float = 20.0) -> None:
        self._draw = draw
        self._hold_s, self._rest_s = hold_s, rest_s
        self._since_s: dict[Role, float] = {}
        self._next_s = 0.0

    def decide(self, replicas: Sequence[ReplicaSnapshot], now: float) -> Flip | None:
        """Returns the flip that is due. `replicas` are all, also those that accept nothing."""
        pools: dict[Role, list[ReplicaSnapshot]] = {
            role: [r for r in replicas if r.role == role and r.is_accepting] for role in ("prefill", "decode")
        }
        directions: tuple[tuple[Role, Role], ...] = (("prefill", "decode"), ("decode", "prefill"))
        for short, long in directions:
            idle = [replica for replica in pools[long] if _is_idle(replica)]
            if not (pools[short] and all(map(_is_queued, pools[short])) and idle and len(pools[long]) > 1):
                self._since_s.pop(short, None)
                continue
            since_s = self._since_s.setdefault(short, now)
            if now - since_s >= self._hold_s and now >= self._next_s:
                self._next_s = now + self._rest_s
                self._since_s.clear()
                return Flip(draw_by_capacity(idle, self._draw).index, short)
        return None


def _is_queued(replica: ReplicaSnapshot) -> bool:
    return max(replica.num_queued, replica.num_waiting) > 0


def _is_idle(replica: ReplicaSnapshot) -> bool:
    return replica.num_requests <= 1 and not _is_queued(replica)
