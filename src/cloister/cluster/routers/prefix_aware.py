"""Requests go where their prefix is cached, unless that replica is too busy (Preble, Srivatsa et al. 2024,
arXiv:2407.00023, section 3.2: exploitation and exploration). Pure."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Final

from cloister.cluster.routers.base import ROUTER_THREAT, ROUTERS, RouterContext, least_loaded
from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.types.request import Request
from cloister.types.scope import ScopeKind

DEFAULT_BLOCKS: Final = 65_536
"""Blocks that a replica is assumed to have before its first step."""
MAX_IMBALANCE: Final = 2.0
SLACK: Final = 4
"""A replica is too busy for its cache if it has more than MAX_IMBALANCE times the requests of the least busy one, and SLACK
more. So one prompt that everybody shares is computed on other replicas too, once its own is busy."""


class _CachedKeys:
    """The keys that a replica has probably cached, least recently used first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def match(self, keys: Sequence[bytes]) -> int:
        """Returns how many leading keys are known."""
        return next((place for place, key in enumerate(keys) if key not in self._keys), len(keys))

    def add(self, keys: Sequence[bytes], limit: int) -> None:
        """Adds the keys of a prompt, the last one as the least recently used of them: a chain is evicted from its end."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > limit:
            self._keys.popitem(last=False)


@ROUTERS.register("prefix_aware", ROUTER_THREAT)
class PrefixAware:
    """Of the replicas that are not too busy, exploits a cache that holds more of the prompt than it lacks. Else it explores:
    it chooses the replica that has the fewest prompt tokens to compute, those of this request included.

    It knows prompts by their prefix keys, which are seeded by the scope, and remembers as many as the replica has blocks. It
    does not know answers, nor what a replica evicted earlier, so a hit is a guess.
    """

    def __init__(self, context: RouterContext) -> None:
        self._chain = context.keys
        self._cached: defaultdict[int, _CachedKeys] = defaultdict(_CachedKeys)

    def pick(self, request: Request, replicas: Sequence[ReplicaSnapshot]) -> int:
        if request.scope.kind is ScopeKind.REQUEST:
            return least_loaded(replicas).index  # nobody can ask for its blocks again
        keys = self._keys(request)
        hits = {replica.index: self._cached[replica.index].match(keys) * self._chain.block_size for replica in replicas}
        chosen = self._choose(len(request.token_ids), hits, replicas)
        self._cached[chosen.index].add(keys, chosen.num_total_blocks or DEFAULT_BLOCKS)
        return chosen.index

    def forget(self, index: int) -> None:
        self._cached.pop(index, None)

    def _choose(self, num_tokens: int, hits: dict[int, int], replicas: Sequence[ReplicaSnapshot]) -> ReplicaSnapshot:
        idlest = least_loaded(replicas)
        most = MAX_IMBALANCE * idlest.num_requests / idlest.capacity + SLACK
        free = [replica for replica in replicas if replica.num_requests / replica.capacity <= most]
        longest = max(hits[replica.index] for replica in free)
        if 2 * longest > num_tokens:
            return least_loaded([replica for replica in free if hits[replica.index] == longest])

        def cost(replica: ReplicaSnapshot) -> tuple[float, float, int]:
            num_to_compute = replica.num_pending_tokens + num_tokens - hits[replica.index]
            return num_to_compute / replica.capacity, replica.num_requests / replica.capacity, replica.index

        return min(free, key=cost)

    def _keys(self, request: Request) -> list[bytes]:
        keys: list[bytes] = []
        num_blocks = (len(request.token_ids) - 1) // self._chain.block_size
        root = self._chain.root(request.scope, request.adapter)
        self._chain.extend(
            keys, root, request.token_ids, num_blocks, reads_public=request.adapter is None, images=request.images
        )
        return keys
