"""Chooses a prefill and a decode replica by predicted time to first token (Mooncake, Qin et al. 2025, FAST, section 6:
Algorithm 1, and early rejection based on prediction). Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from cloister.cluster.routers.base import ROUTER_THREAT, ROUTERS, Router, RouterContext, leave_out_busy
from cloister.cluster.routers.cached_prompts import CachedPrompts
from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.types.errors import QueueFullError
from cloister.types.request import Request

MAX_RETRY_S: Final = 60.0
"""Longest time after which a refused client is told to come back: a prediction may be wrong."""
NEAR: Final = 1.05
"""Replicas are as good as the best one up to this multiple of its time; one of them is drawn."""


@ROUTERS.register("conductor", ROUTER_THREAT)
class Conductor(Router):
    """A prompt goes to the replica that has its first token soonest: wait for a slot, queue, transfer of cached KV from another
    replica, and prefill of the rest. The answer goes to the replica whose steps are shortest and whose KV has room.

    A request is refused if its first token would come too late, or if no replica will have room for its answer then: its
    prefill would be for nothing. How long a slot or KV is taken depends on predicted lengths of answers, which may be wrong by
    any factor. So while a slot is free, or KV that is free now would do, no prediction makes it refuse a request.
    """

    predicts_lengths = True

    def __init__(self, context: RouterContext) -> None:
        self._prompts = CachedPrompts(context.keys)
        self._block_size = context.keys.block_size
        self._draw = context.draw
        self._source: int | None = None
        self._max_ttft_s = math.inf if context.max_ttft_s is None else context.max_ttft_s

    def pick(self, request: Request, replicas: Sequence[ReplicaSnapshot]) -> int:
        replicas = leave_out_busy(replicas)
        hits = self._prompts.match(request, [replica.index for replica in replicas])
        best_hit = max(hits.values())
        times = {
            r.index: (self._ttft_s(request, r, hits[r.index], best_hit), r.num_pending_tokens / r.capacity) for r in replicas
        }
        chosen = self._draw_near(times, replicas)
        self._source = None
        if self._is_worth_copying(request, chosen, hits[chosen.index], best_hit):
            self._source = max(hits, key=lambda index: hits[index])
        self._prompts.add(request, chosen)
        return chosen.index

    def pick_decoder(self, request: Request, replicas: Sequence[ReplicaSnapshot]) -> int:
        num_blocks = len(request.token_ids) // self._block_size + 1
        roomy = [r for r in replicas if r.num_total_blocks == 0 or r.num_total_blocks - r.num_used_blocks >= num_blocks]
        times = {r.index: (_decode_s(r), r.num_requests / r.capacity) for r in roomy or replicas}
        return self._draw_near(times, roomy or replicas).index

    def admit(self, request: Request, replicas: Sequence[ReplicaSnapshot]) -> None:
        limit_s = min(self._max_ttft_s, request.timeout_s)
        prefillers = [replica for replica in replicas if replica.can_prefill] or replicas
        hits = self._prompts.match(request, [replica.index for replica in prefillers])
        best_hit = max(hits.values())
        soonest_s = min(self._ttft_s(request, replica, hits[replica.index], best_hit) for replica in prefillers)
        if soonest_s > limit_s:
            raise QueueFullError(
                f"the first token would come in {soonest_s:.1f} s, after {limit_s:.1f} s; send the request again later",
                retry_after_s=min(MAX_RETRY_S, soonest_s - limit_s),
            )
        if not self._has_room_for_answer(request, replicas, soonest_s):
            raise QueueFullError(
                "no replica will have memory for the answer when the prompt is computed; send the request again later",
                retry_after_s=min(MAX_RETRY_S, soonest_s),
            )

    def take_source(self) -> int | None:
        source, self._source = self._source, None
        return source

    def count_cached(self, request: Request, index: int) -> int:
        return self._prompts.match(request, [index])[index]

    def note_copy(self, request: Request, replica: ReplicaSnapshot) -> None:
        self._prompts.add(request, replica)

    def forget(self, index: int) -> None:
        self._prompts.forget(index)

    def _ttft_s(self, request: Request, replica: ReplicaSnapshot, hit: int, best_hit: int) -> float:
        """Returns the predicted time to the first token: until a slot is free, of what is queued, then of this prompt with the
        better hit."""
        num_tokens = len(request.token_ids)
        own_s = replica.prefill_s(num_tokens, hit)
        if self._is_worth_copying(request, replica, hit, best_hit):
            own_s = (best_hit - hit) * replica.transfer_token_s + replica.prefill_s(num_tokens, best_hit)
        return (replica.slot_wait_s + replica.prefill_s(replica.num_pending_tokens) + own_s) / replica.capacity

    def _is_worth_copying(self, request: Request, replica: ReplicaSnapshot, hit: int, best_hit: int) -> bool:
        """Whether KV of another replica comes sooner than it is computed. Unknown before the first transfer: then it is not."""
        if best_hit <= hit or not replica.transfer_token_s:
            return False
        saved_s = replica.prefill_s(len(request.token_ids), hit) - replica.prefill_s(len(request.token_ids), best_hit)
        return (best_hit - hit) * replica.transfer_token_s < saved_s

    def _has_room_for_answer(self, request: Request, replicas: Sequence[ReplicaSnapshot], in_s: float) -> bool:
        """Whether decoders will have blocks for this prompt beside those that are computed now and go to them next: free ones,
        and those of answers that are expected to end until then.

        Replicas that compute whole requests have a queue for that.
        """
        decoders = [replica for replica in replicas if replica.can_decode]
        if not decoders or any(r.role == "mixed" or r.num_total_blocks == 0 for r in decoders):
            return True
        num_coming = sum(replica.num_pending_tokens for replica in replicas) + len(request.token_ids)
        num_free = sum(r.num_total_blocks - r.num_used_blocks * (1.0 - _share_ended(r, in_s)) for r in decoders)
        return num_coming // self._block_size < num_free

    def _draw_near(self, times: dict[int, tuple[float, float]], replicas: Sequence[ReplicaSnapshot]) -> ReplicaSnapshot:
        """Draws one of the replicas that are about as good as the best one: routers that see the same must not all choose the
        same one. Their load decides between times that are not known yet."""
        best_s, _ = min(times.values())
        near = [replica for replica in replicas if times[replica.index][0] <= NEAR * best_s]
        least = min(times[replica.index][1] for replica in near)
        return self._draw.choice([replica for replica in near if times[replica.index][1] <= NEAR * least])


def _decode_s(replica: ReplicaSnapshot) -> float:
    """Returns the predicted time between tokens with one more request."""
    return replica.decode_s(replica.num_requests + 1) / replica.capacity


def _share_ended(replica: ReplicaSnapshot, in_s: float) -> float:
    """Returns which share of the answers of a replica is expected to end within a time, if they end at random after what is
    expected of them on average."""
    step_s = replica.decode_s(replica.num_sequences)
    if not (replica.num_sequences and step_s):
        return 0.0
    num_tokens = in_s / step_s * replica.num_sequences
    return 1.0 - math.exp(-num_tokens / max(1.0, replica.num_expected_tokens))
