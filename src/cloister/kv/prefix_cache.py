"""The prefix tree: KV of full blocks kept for whoever shares scope and prefix (RadixAttention, Zheng et al. 2024, section 3).

Pure. A node is one full block under its chain key; the chain makes the dictionary a tree. Unused leaves go first, the least
recently used one before the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from cloister.kv.cache_quotas import RETRY_S, CacheQuotas, CacheTTL
from cloister.kv.pool import BlockPool
from cloister.types.threat import Requirement, ThreatProfile

PREFIX_CACHE_THREAT = ThreatProfile(
    row="prefix cache",
    threats=frozenset({Requirement.STATELESS, Requirement.ENFORCEABLE}),
    residue="token KV",
    where=("device memory", "host memory"),
    attack="data leak, inference by timing, access pattern",
    mitigations=("keys start from the scope, so no scope reads another's", "wipe on eviction", "a share for each scope"),
)


class _Node:
    __slots__ = ("block", "key", "last_used", "num_children", "offered", "owner", "parent", "root")

    def __init__(self, key: bytes, block: int, parent: _Node | None, root: bytes | None, owner: bytes | None) -> None:
        self.key = key
        self.owner = owner
        self.root = root
        self.block = block
        self.parent = parent
        self.num_children = 0
        self.last_used = 0
        self.offered = False


class PrefixCache:
    """Finds, keeps and evicts blocks by prefix key.

    Args:
        pool: whose blocks it keeps; the tree attaches itself to it.
        pinned: keys whose blocks are never evicted once they are there: everybody's, so that nobody can feel whether another
            one used them lately.
        quotas: what each owner may keep; None for one cache that all share, the least recently used block goes first.

    Attributes:
        ttl: when `expire` has something to do.
    """

    def __init__(self, pool: BlockPool, pinned: frozenset[bytes] = frozenset(), quotas: CacheQuotas | None = None) -> None:
        self._pool = pool
        self._pinned = pinned
        self.ttl = CacheTTL()
        self._nodes: dict[bytes, _Node] = {}
        self._by_block: dict[int, _Node] = {}
        self._evictable: dict[bytes | None, list[tuple[int, int, _Node]]] = {None: []}
        self._tick = 0
        self._quotas = quotas
        pool.attach(self.evict_one, self._note_unused)

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the blocks of the longest known prefix of `keys` and marks them as just used.

        The caller must `share` them with the pool before it allocates anything.
        """
        self._tick += 1
        blocks = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            node.last_used = self._tick
            blocks.append(node.block)
        return blocks

    def match_length(self, keys: Sequence[bytes]) -> int:
        """Returns how many blocks `match` would find; changes nothing."""
        for length, key in enumerate(keys):
            if key not in self._nodes:
                return length
        return len(keys)

    def insert(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        start: int,
        root: bytes | None = None,
        owner: bytes | None = None,
    ) -> None:
        """Keeps blocks[start:len(keys)], in use by the caller, under their keys.

        Args:
            root: start of the chain, where its blocks have a lifetime (`renew`).
            owner: whose share they come from, where there are quotas. What does not fit into it is not kept; None for what
                may go whenever anybody needs room.

        Where a key is known already (two equal prompts computed side by side) the block that is there stays, and the
        caller's remain its own from there on: nothing is kept below a block that its owner does not hold, so that
        whatever is unused has unused children only, and every cached block can be evicted.
        """
        self._tick += 1
        # Ancestors may be another's, or gone: its equal blocks were kept in place of the caller's, and then evicted.
        while start and not self._keeps(keys[start - 1], blocks[start - 1]):
            start -= 1
        parent = self._nodes[keys[start - 1]] if start else None
        for i in range(start, len(keys)):
            node = self._nodes.get(keys[i])
            if node is None:
                if keys[i] not in self._pinned and not self._find_room(owner):
                    return
                node = self._add(keys[i], blocks[i], parent, root, owner)
            node.last_used = self._tick
            if node.block != blocks[i]:
                return
            parent = node

    def renew(self, root: bytes, deadline_s: float) -> None:
        """Lets the blocks that were inserted with `root` stay until then, should nobody use them."""
        self.ttl.renew(root, deadline_s)

    def expire(self, now: float) -> None:
        """Drops the blocks whose scope's deadline has passed; those in use are looked at again a little later."""
        for root, keys in self.ttl.take_due(now):
            leaves = [self._nodes[key] for key in keys if self._is_evictable(self._nodes[key])]
            while leaves:
                node = leaves.pop()
                keys.discard(node.key)
                self._remove(node)
                if node.parent is not None and node.parent.key in keys and self._is_evictable(node.parent):
                    leaves.append(node.parent)
            if keys:
                self.ttl.renew(root, now + RETRY_S)

    def evict_one(self) -> int | None:
        """Drops the least recently used unused leaf that is nobody's; returns its block, or None if there is none."""
        return self._evict_from(None)

    def _evict_from(self, owner: bytes | None) -> int | None:
        evictable = self._evictable.get(owner, [])
        while evictable:
            last_used, _, node = heapq.heappop(evictable)
            node.offered = False
            if self._nodes.get(node.key) is not node or not self._is_evictable(node):
                continue
            if node.last_used != last_used:
                self._offer(node)
                continue
            self._remove(node)
            return node.block
        return None

    def _find_room(self, owner: bytes | None) -> bool:
        """Whether one more block of an owner can be kept; makes room among its own if need be."""
        if self._quotas is None or owner is None:
            return True
        if not self._quotas.has_share(owner) or not self._quotas.per_scope:
            return False
        return not self._quotas.is_full(owner) or self._evict_from(owner) is not None

    def discard(self, keys: Sequence[bytes]) -> None:
        """Drops the unused end of one chain: nobody can ask for these keys again."""
        for key in reversed(keys):
            node = self._nodes.get(key)
            if node is not None and self._is_evictable(node):
                self._remove(node)

    def check(self) -> None:
        """Raises AssertionError unless nodes, blocks and children agree."""
        assert len(self._nodes) == len(self._by_block), "two keys hold one block"
        children: dict[bytes, int] = {}
        for node in self._nodes.values():
            if node.parent is not None:
                assert self._nodes.get(node.parent.key) is node.parent, "a node outlived its parent"
                children[node.parent.key] = children.get(node.parent.key, 0) + 1
                is_used = self._pool.references(node.block) > 0
                assert not is_used or self._pool.references(node.parent.block), "a cached block cannot be evicted"
        if self._quotas is not None:
            self._quotas.check()
            assert set(self._evictable) - {None} <= {n.owner for n in self._nodes.values()}, "an owner that left is remembered"
        assert all(children.get(n.key, 0) == n.num_children for n in self._nodes.values()), "child counts are off"

    def _keeps(self, key: bytes, block: int) -> bool:
        node = self._nodes.get(key)
        return node is not None and node.block == block

    def _add(self, key: bytes, block: int, parent: _Node | None, root: bytes | None, owner: bytes | None) -> _Node:
        if key in self._pinned:
            self._pool.share([block])
            root = owner = None  # it is nobody's own
        if self._quotas is None:
            owner = None
        elif owner is not None:
            self._quotas.add(owner)
        if root is not None:
            self.ttl.keep(root, key)
        node = _Node(key, block, parent, root, owner)
        if parent is not None:
            parent.num_children += 1
        self._nodes[key] = node
        self._by_block[block] = node
        self._pool.keep(block, is_protected=owner is not None)
        return node

    def _remove(self, node: _Node) -> None:
        del self._nodes[node.key]
        del self._by_block[node.block]
        if node.root is not None:
            self.ttl.drop(node.root, node.key)
        if self._quotas is not None and node.owner is not None:
            self._quotas.drop(node.owner)
            if not self._quotas.keeps_any(node.owner):
                self._evictable.pop(node.owner, None)  # only stale entries are left in it
        if node.parent is not None:
            node.parent.num_children -= 1
            if self._is_evictable(node.parent):
                self._offer(node.parent)
        self._pool.drop(node.block)

    def _is_evictable(self, node: _Node) -> bool:
        return node.num_children == 0 and self._pool.references(node.block) == 0

    def _note_unused(self, block: int) -> None:
        node = self._by_block[block]
        if self._is_evictable(node):
            self._offer(node)

    def _offer(self, node: _Node) -> None:
        if node.offered:
            return  # one entry a node bounds the heap; a stale time is put right when the entry is popped
        node.offered = True
        heapq.heappush(self._evictable.setdefault(node.owner, []), (node.last_used, node.block, node))
