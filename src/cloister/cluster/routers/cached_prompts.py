"""Estimates what replicas have cached from the prompts that they were given. Pure."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.kv import PrefixKeys
from cloister.types.request import Request
from cloister.types.scope import ScopeKind

DEFAULT_BLOCKS: Final = 65_536
"""Blocks that a replica is assumed to have before its first step."""


class CachedPrompts:
    """Guesses how much of a prompt each replica has cached.

    It knows prompts by their prefix keys, which are seeded by the scope, and remembers as many as the replica has blocks. It
    does not know answers, nor what a replica evicted earlier, so a hit is a guess.

    Args:
        keys: computes the prefix keys of requests, as the replicas do.
    """

    def __init__(self, keys: PrefixKeys) -> None:
        self._prefix_keys = keys
        self._cached: defaultdict[int, _CachedKeys] = defaultdict(_CachedKeys)

    def match(self, request: Request, indexes: Iterable[int]) -> dict[int, int]:
        """Returns how many tokens of a prompt each of these replicas has cached."""
        keys = self._keys(request)
        return {index: self._cached[index].match(keys) * self._prefix_keys.block_size for index in indexes}

    def add(self, request: Request, replica: ReplicaSnapshot) -> None:
        """Records that a replica is given a prompt."""
        if keys := self._keys(request):
            self._cached[replica.index].add(keys, replica.num_total_blocks or DEFAULT_BLOCKS)

    def forget(self, index: int) -> None:
        """Records that a replica's cache is empty."""
        self._cached.pop(index, None)

    def _keys(self, request: Request) -> list[bytes]:
        """Returns the keys of a prompt; none if no later request can read its blocks."""
        if request.scope.kind is ScopeKind.REQUEST:
            return []
        return self._prefix_keys.chain(request.scope, request.adapter, request.token_ids, request.images, request.documents)


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
