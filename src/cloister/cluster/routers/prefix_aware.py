"""Requests go where their prefix is cached, unless that replica is too busy (Preble, Srivatsa et al. 2024,
arXiv:2407.00023, section 3.2: exploitation and exploration). Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from cloister.cluster.routers.base import ROUTER_THREAT, ROUTERS, Router, RouterContext, draw_least, leave_out_busy, load_of
from cloister.cluster.routers.cached_prompts import CachedPrompts
from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.types.request import Request
from cloister.types.scope import ScopeKind

MAX_CACHE_KEYS: Final = 65_536
"""Values of `prompt_cache_key` that are remembered; beyond it, the least recently used one is forgotten."""


@ROUTERS.register("prefix_aware", ROUTER_THREAT)
class PrefixAware(Router):
    """Of the replicas that are not too busy, exploits a cache that holds more of the prompt than it lacks. Else it explores:
    it chooses the replica that has the fewest prompt tokens to compute, those of this request included. Of replicas that are
    equal one is drawn.

    It knows prompts by their prefix keys, which are seeded by the scope, and remembers as many as the replica has blocks. It
    does not know answers, nor what a replica evicted earlier, so a hit is a guess.

    Where hits leave the choice open, a request goes to the replica that had the last one with its `prompt_cache_key`, if that
    is not too busy: the client knows that they have a beginning in common, also while its first one is still computed.
    """

    def __init__(self, context: RouterContext) -> None:
        self._prompts = CachedPrompts(context.keys)
        self._last_of: OrderedDict[bytes, int] = OrderedDict()  # by `Request.cache_key`, the least recently used first
        self._draw = context.draw

    def pick(self, request: Request, replicas: Sequence[ReplicaSnapshot]) -> int:
        if request.scope.kind is ScopeKind.REQUEST:
            return draw_least(replicas, load_of, self._draw).index  # nobody can ask for its blocks again
        hits = self._prompts.match(request, [replica.index for replica in replicas])
        chosen = self._choose(request, hits, replicas)
        self._prompts.add(request, chosen)
        if request.cache_key:
            self._last_of[request.cache_key] = chosen.index
            self._last_of.move_to_end(request.cache_key)
            if len(self._last_of) > MAX_CACHE_KEYS:
                self._last_of.popitem(last=False)
        return chosen.index

    def count_cached(self, request: Request, index: int) -> int:
        return self._prompts.match(request, [index])[index]

    def note_copy(self, request: Request, replica: ReplicaSnapshot) -> None:
        self._prompts.add(request, replica)

    def forget(self, index: int) -> None:
        self._prompts.forget(index)
        for key in [key for key, last in self._last_of.items() if last == index]:
            del self._last_of[key]

    def _choose(self, request: Request, hits: dict[int, int], replicas: Sequence[ReplicaSnapshot]) -> ReplicaSnapshot:
        num_tokens, free = len(request.token_ids), leave_out_busy(replicas)
        longest = max(hits[replica.index] for replica in free)
        is_hit = 2 * longest > num_tokens
        candidates = [replica for replica in free if hits[replica.index] == longest] if is_hit else free
        last = self._last_of.get(request.cache_key)
        if (same := next((replica for replica in candidates if replica.index == last), None)) is not None:
            return same
        if is_hit:
            return draw_least(candidates, load_of, self._draw)

        def cost(replica: ReplicaSnapshot) -> tuple[float, float]:
            num_to_compute = replica.num_pending_tokens + num_tokens - hits[replica.index]
            return num_to_compute / replica.capacity, replica.num_requests / replica.capacity

        return draw_least(free, cost, self._draw)
