"""The prefix cache: a tree of full blocks shared by scope and prefix (RadixAttention, Zheng et al. 2024, section 3).

Pure. A node has the blocks of one full entry of a block table, one for each group of layers, under its chain key; the chain
makes the dictionary a tree. For layers that see all positions, unused leaves are evicted, least recently used first. For layers
with a window any unused block may be evicted: a hit extends to an entry at which every group still has all blocks that the next
query sees.
A state is like a window of one entry: a node has one only where a sequence left a snapshot, and a hit ends at such a node.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from cloister.kv.cache_quotas import CacheQuotas
from cloister.kv.cache_ttl import RETRY_S, CacheTTL
from cloister.kv.kept_blocks import KeptBlocks
from cloister.kv.pool import NO_BLOCK, BlockPool
from cloister.kv.table import BlockTable, first_seen
from cloister.kv.tiers import KVTiers
from cloister.types.documents import Documents
from cloister.types.threat import Requirement, ThreatProfile

PREFIX_CACHE_THREAT = ThreatProfile(
    row="prefix cache",
    threats=frozenset({Requirement.STATELESS, Requirement.ENFORCEABLE}),
    residue="token KV",
    where=("device memory", "host memory"),
    attack="data leak, inference by timing, access pattern",
    mitigations=("keys are seeded by the scope, so no scope reads another's", "wipe on eviction", "a share for each scope"),
)


class _Node:
    __slots__ = (
        "blocks", "entry", "expires", "is_copy", "key", "last_used", "num_children", "offered", "owner", "parent", "root",
    )  # fmt: skip

    def __init__(
        self, key: bytes, entry: int, num_groups: int, parent: _Node | None, root: bytes, owner: bytes | None, expires: bool
    ) -> None:
        self.key = key
        self.entry = entry
        self.root, self.owner, self.expires = root, owner, expires
        self.is_copy = False  # of a prefix of another engine: it goes with its lease
        self.blocks = [NO_BLOCK] * num_groups
        self.parent = parent
        self.num_children = 0
        self.last_used = 0
        self.offered = 0  # bit mask of groups whose heap has an entry for it


class PrefixCache:
    """Finds, keeps and evicts blocks by prefix key.

    Args:
        pool: pool of the blocks; the cache attaches itself to it.
        pinned: keys whose blocks are never evicted once cached: they are public, so an eviction would reveal whether others
            used them recently. No states are kept under them.
        quotas: for each group the quota of an owner; None for one shared cache.

    Attributes:
        ttl: deadlines for `expire`.
        kept: the blocks of each chain that later requests can find.
        tiers: get the blocks that are evicted; None: they are dropped.
    """

    def __init__(
        self, pool: BlockPool, pinned: frozenset[bytes] = frozenset(), quotas: Sequence[CacheQuotas] | None = None
    ) -> None:
        self._pool = pool
        self._pinned = pinned
        self.ttl = CacheTTL()
        self.kept = KeptBlocks(pool.num_groups)
        self.tiers: KVTiers | None = None
        self._nodes: dict[bytes, _Node] = {}
        self._by_block: dict[int, _Node] = {}
        self._evictable: list[dict[bytes | None, list[tuple[int, int, _Node]]]] = [{None: []} for _ in pool.groups]
        self._tick = 0
        self._quotas = quotas
        self._windows = [group.window for group in pool.groups]
        # Without a block of such a group, no later block is usable; this makes the cache a tree.
        self._full = self._windows.index(None) if None in self._windows else None
        pool.attach(self.evict_one, self._note_unused)

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the block table of the longest known prefix of `keys` and marks its nodes as most recently used.

        The caller must `share` the blocks in the pool before it allocates anything.
        """
        self._tick += 1
        num_entries = self.match_length(keys)
        firsts = self.first_entries(num_entries)
        table = [NO_BLOCK] * (min(firsts) * len(firsts))
        for i in range(min(firsts), num_entries):
            node = self._nodes[keys[i]]
            node.last_used = self._tick
            if i == num_entries - 1:
                self.kept.note_use(node.root)
            table += [block if i >= first else NO_BLOCK for block, first in zip(node.blocks, firsts, strict=True)]
        return table

    def first_entries(self, num_entries: int) -> list[int]:
        """Returns for each group the first entry that a hit of `num_entries` entries needs."""
        return [self._first_entry(num_entries, window) for window in self._windows]

    def match_length(self, keys: Sequence[bytes], tiers: KVTiers | None = None, num_tiers: int | None = None) -> int:
        """Returns how many entries the table of `match` would have; changes nothing.

        Args:
            tiers: as if what the first `num_tiers` of them hold were here; None: all of them.
        """
        runs = [0] * len(self._windows)  # gapless entries of each group up to here
        longest = 0
        for i, key in enumerate(keys):
            node = self._nodes.get(key)
            blocks = node.blocks if node is not None else None
            if tiers is not None:
                blocks = self._blocks_with(tiers.holds(key, num_tiers), blocks)
            if blocks is None:
                if self._full is not None:
                    break
                runs = [0] * len(runs)
                continue
            if len(runs) == 1 and self._full is not None:
                longest = i + 1
                continue
            runs = [0 if block == NO_BLOCK else run + 1 for block, run in zip(blocks, runs, strict=True)]
            if all(run > i - self._first_entry(i + 1, window) for run, window in zip(runs, self._windows, strict=True)):
                longest = i + 1
        return longest

    def _blocks_with(self, held: list[bool], blocks: list[int] | None) -> list[int] | None:
        """Returns the blocks of a key, with any number in place of those that tiers hold; None if a prefix ends before."""
        if blocks is None:
            blocks = [NO_BLOCK] * len(held)
        found = [0 if is_held else block for block, is_held in zip(blocks, held, strict=True)]
        is_known = any(block != NO_BLOCK for block in found) if self._full is None else found[self._full] != NO_BLOCK
        return found if is_known else None

    @property
    def is_tree(self) -> bool:
        """Whether every prefix of a known key is known: some layers see all positions."""
        return self._full is not None

    def count_known(self, keys: Sequence[bytes]) -> int:
        """Returns how many leading keys are known, whether or not a hit can end there."""
        return next((i for i, key in enumerate(keys) if key not in self._nodes), len(keys)) if self._full is not None else 0

    def blocks_of(self, key: bytes) -> list[int]:
        """Returns the blocks that are cached under a key, one for each group; `NO_BLOCK` for those that are not."""
        node = self._nodes.get(key)
        return [NO_BLOCK] * len(self._windows) if node is None else list(node.blocks)

    def deduplicate(self, keys: Sequence[bytes], table: BlockTable, start: int) -> None:
        """Puts the kept blocks of layers that see all positions into a table that has equal ones of its own.

        Where a hit ended early for want of a state, the same positions were computed again. Only a table that holds all kept
        blocks before an entry may leave that entry to the cache (`insert`).

        Args:
            start: entries before it were offered to `insert` already.
        """
        full, num_groups = self._full, len(self._windows)
        if full is None:
            return
        while start and not self._keeps(keys[start - 1], table.blocks[(start - 1) * num_groups + full]):
            start -= 1
        for i in range(start, len(keys)):
            node = self._nodes.get(keys[i])
            if node is None:
                return
            if node.blocks[full] != table.blocks[i * num_groups + full]:
                table.adopt(i, full, node.blocks[full])

    def drop_state(self, key: bytes) -> None:
        """Drops a snapshot that a later one of the same sequence replaces, unless it is in use."""
        node, group = self._nodes.get(key), self._pool.state_group
        if node is not None and group is not None and self._is_evictable(node, group):
            self._drop_or_remove(node, group)

    def _first_entry(self, num_entries: int, window: int | None) -> int:
        """Returns the first entry that the query after `num_entries` entries sees."""
        size = self._pool.block_size
        return first_seen(num_entries * size, window) // size

    def insert(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        start: int,
        root: bytes = b"",
        owner: bytes | None = None,
        *,
        expires: bool = False,
        documents: Documents | None = None,
        is_copy: bool = False,
        end: int | None = None,
    ) -> None:
        """Caches the entries [start, end) of a block table in use by the caller under their keys.

        Args:
            end: None: all keys.
            blocks: the table (`BlockTable.blocks`).
            root: root of the chain; empty if no later request can find it, so that no tier keeps it.
            expires: its blocks have a deadline (`renew`).
            documents: parts of the prompt that are encoded separately, each a branch of its own behind the prefix.
            owner: owner whose share is charged, if there are quotas. Blocks beyond the share are not cached; None: the blocks
                may be evicted for any request.
            is_copy: until `revoke`.

        If a key is already cached (two equal prompts were computed concurrently), the cache keeps its own block, and none of
        the caller's blocks from that entry on. So a sequence that uses a kept block also uses all earlier blocks of the chain:
        the children of an unused block are unused, and every cached block can be evicted.
        """
        self._tick += 1
        num_groups, full = len(self._windows), self._full
        # Ancestors may belong to another sequence, or be missing: its equal blocks were kept in place of the caller's, then
        # evicted.
        while full is not None and start:
            before = start - 1 if documents is None else self._entry_before(start, documents)
            if self._keeps(keys[before], blocks[before * num_groups + full]):
                break
            start -= 1
        for i in range(start, len(keys) if end is None else end):
            entry = blocks[i * num_groups : (i + 1) * num_groups]
            node = self._nodes.get(keys[i])
            if node is None:
                before, number = i - 1, i
                if documents is not None:
                    before = self._entry_before(i, documents)
                    number -= documents.shift(i * self._pool.block_size) // self._pool.block_size
                parent = self._nodes[keys[before]] if i and full is not None else None
                node = self._add(keys[i], number, entry, parent, root, owner, expires)
                if node is None:
                    if full is not None:
                        return
                    continue
                node.is_copy = is_copy and keys[i] not in self._pinned
            elif (num_groups > 1 or full is None) and (not is_copy or node.is_copy):  # it is not charged to the node's owner
                self._complete(node, entry)
            node.last_used = self._tick
            if full is not None and node.blocks[full] != entry[full]:
                return

    def _entry_before(self, entry: int, documents: Documents) -> int:
        """Returns the entry before one in its chain: the prefix's last entry, for the first one of a document."""
        size = self._pool.block_size
        return (documents.starts[0] if entry * size in documents.starts else entry * size) // size - 1

    def find_known(self, keys: Sequence[bytes], blocks: Sequence[int], start: int, documents: Documents) -> list[int]:
        """Returns the cached blocks of the entries from `start` on, where a document begins, up to the first that is unknown or
        the last one of `keys`. Marks them as used, and the caller must share them.

        There are none if the cache keeps another block than the table's as the one before: a table that uses a kept block uses
        all kept blocks before it.

        Args:
            blocks: the table, up to `start` at least.
        """
        before = self._entry_before(start, documents)
        if len(self._windows) != 1 or self._full is None or not self._keeps(keys[before], blocks[before]):
            return []
        self._tick += 1
        found = []
        for key in keys[start:]:
            if (node := self._nodes.get(key)) is None:
                break
            node.last_used = self._tick
            found.append(node.blocks[0])
        return found

    def renew(self, root: bytes, deadline_s: float) -> None:
        """Sets the deadline of blocks inserted with `root`; it applies while they are unused."""
        self.ttl.renew(root, deadline_s)

    def expire(self, now: float) -> None:
        """Drops the blocks whose scope's deadline has passed; those in use are checked again later."""
        for root, keys in self.ttl.take_due(now):
            leaves = [self._nodes[key] for key in keys if self._is_unused(self._nodes[key])]
            while leaves:
                node = leaves.pop()
                keys.discard(node.key)
                self._remove(node)
                if node.parent is not None and node.parent.key in keys and self._is_unused(node.parent):
                    leaves.append(node.parent)
            if keys:
                self.ttl.renew(root, now + RETRY_S)
            elif self.tiers is not None:
                self.tiers.forget(root)

    def evict_one(self, group: int) -> int | None:
        """Evicts and returns the least recently used evictable block of a group that has no owner; None if there is none."""
        return self._evict_from(None, group)

    def _evict_from(self, owner: bytes | None, group: int) -> int | None:
        evictable = self._evictable[group].get(owner, [])
        while evictable:
            last_used, _, node = heapq.heappop(evictable)
            node.offered &= ~(1 << group)
            if self._nodes.get(node.key) is not node or not self._is_evictable(node, group):
                continue
            if node.last_used != last_used:
                self._offer(node, group)
                continue
            block = node.blocks[group]
            if self.tiers is not None:
                self._offer_to(self.tiers, node, group)
            self._drop_or_remove(node, group)
            return block
        return None

    def _offer_to(self, tiers: KVTiers, node: _Node, group: int) -> None:
        """Offers the tiers what an eviction takes: a block, and with one that all queries see those of the other groups."""
        for number, block in enumerate(node.blocks):
            if block != NO_BLOCK and (number == group or self._windows[group] is None):
                tiers.offer(node.root, node.key, node.entry, number, block, node.owner)

    def _find_room(self, owner: bytes | None, group: int) -> bool:
        """Whether another block of an owner can be kept; evicts the owner's own blocks if needed."""
        if self._quotas is None or owner is None:
            return True
        quotas = self._quotas[group]
        if not quotas.has_share(owner) or not quotas.per_scope:
            return False
        return not quotas.is_full(owner) or self._evict_from(owner, group) is not None

    def discard(self, keys: Sequence[bytes]) -> None:
        """Drops the unused end of one chain, whose keys can no longer be requested."""
        for key in reversed(keys):
            node = self._nodes.get(key)
            if node is not None and self._is_unused(node):
                self._remove(node)

    def forget(self, root: bytes) -> None:
        """Drops a chain, here and in the tiers. Blocks that are in use become free when they are released."""
        keys = dict.fromkeys(key for _, key in reversed(self.kept.blocks_of(root)))
        for key in keys:
            self._remove(self._nodes[key])
        if self.tiers is not None:
            self.tiers.forget(root)

    def revoke(self, keys: Collection[bytes]) -> None:
        """Drops the copies under these keys and everything that continues them. Blocks that are in use become free when they
        are released."""
        gone = {key for key in keys if (node := self._nodes.get(key)) is not None and node.is_copy}
        for root in {self._nodes[key].root for key in gone}:
            known = dict.fromkeys(key for _, key in self.kept.blocks_of(root))
            for key in known:
                self._note_gone(self._nodes[key], gone)
            for key in reversed(known):
                if key in gone:
                    self._remove(self._nodes[key])

    def _note_gone(self, node: _Node, gone: set[bytes]) -> None:
        """Adds a node to those that go, if it continues one of them."""
        path = []
        above: _Node | None = node
        while above is not None and above.key not in gone:
            path.append(above.key)
            above = above.parent
        if above is not None:
            gone.update(path)

    @property
    def copied_keys(self) -> set[bytes]:
        """The keys of all copies."""
        return {key for key, node in self._nodes.items() if node.is_copy}

    def check(self) -> None:
        """Raises AssertionError unless nodes, blocks and children agree."""
        kept = [block for node in self._nodes.values() for block in node.blocks if block != NO_BLOCK]
        assert len(kept) == len(set(kept)) == len(self._by_block), "two keys hold one block"
        rooted = [(n, g) for n in self._nodes.values() if n.root for g, block in enumerate(n.blocks) if block != NO_BLOCK]
        assert len(self.kept) == len(rooted), "a chain has blocks that are gone"
        assert all(self.kept.has(n.root, g, n.key) for n, g in rooted), "a block is not among those of its chain"
        children: dict[bytes, int] = {}
        for node in self._nodes.values():
            assert any(block != NO_BLOCK for block in node.blocks), "a node without blocks is kept"
            assert self._full is None or node.blocks[self._full] != NO_BLOCK, "a node lacks what all queries see"
            if node.parent is not None and self._full is not None:
                assert self._nodes.get(node.parent.key) is node.parent, "a node outlived its parent"
                children[node.parent.key] = children.get(node.parent.key, 0) + 1
                is_used = self._pool.references(node.blocks[self._full]) > 0
                assert not is_used or self._pool.references(node.parent.blocks[self._full]), "a cached block cannot be evicted"
        for quotas in self._quotas or ():
            quotas.check()
        if self._quotas is not None:
            owners = {n.owner for n in self._nodes.values()}
            assert all(set(heaps) - {None} <= owners for heaps in self._evictable), "an owner that left is remembered"
        assert all(children.get(n.key, 0) == n.num_children for n in self._nodes.values()), "child counts are off"

    def _keeps(self, key: bytes, block: int) -> bool:
        node = self._nodes.get(key)
        return node is not None and self._full is not None and node.blocks[self._full] == block

    def _add(
        self,
        key: bytes,
        number: int,
        entry: Sequence[int],
        parent: _Node | None,
        root: bytes,
        owner: bytes | None,
        expires: bool,
    ) -> _Node | None:
        """Caches an entry under a new key; None if the owner's share lacks space for the blocks that a node needs."""
        if key in self._pinned:
            root, owner, expires = b"", None, False  # it has no owner
        if self._quotas is None:
            owner = None
        if self._full is not None and owner is not None and not self._find_room(owner, self._full):
            return None
        node = _Node(key, number, len(entry), parent, root, owner, expires)
        self._complete(node, entry)
        if node.blocks.count(NO_BLOCK) == len(entry):
            return None
        if node.expires:
            self.ttl.keep(node.root, key)
        if parent is not None:
            parent.num_children += 1
        self._nodes[key] = node
        return node

    def _complete(self, node: _Node, entry: Sequence[int]) -> None:
        """Caches the blocks that a node lacks, if the owner's share has space for them."""
        if self._full is not None and node.blocks[self._full] not in (NO_BLOCK, entry[self._full]):
            return  # computed concurrently: the caller's blocks remain its own
        for group, block in enumerate(entry):
            if block == NO_BLOCK or node.blocks[group] != NO_BLOCK or self._pool.is_kept(block):
                continue
            if node.key in self._pinned and group == self._pool.state_group:
                continue  # a state is too large to pin, and its presence would reveal other requests
            if group != self._full and not self._find_room(node.owner, group):
                continue
            if node.key in self._pinned:
                self._pool.share([block])
            if self._quotas is not None and node.owner is not None:
                self._quotas[group].add(node.owner)
            node.blocks[group] = block
            self._by_block[block] = node
            if node.root:
                self.kept.add(node.root, group, node.key)
            self._pool.keep(block, is_protected=node.owner is not None)

    def _remove(self, node: _Node) -> None:
        del self._nodes[node.key]
        if node.expires:
            self.ttl.drop(node.root, node.key)
        for group, block in enumerate(node.blocks):
            if block != NO_BLOCK:
                self._drop(node, group)
        if node.parent is not None:
            node.parent.num_children -= 1
            self._offer_unused(node.parent)

    def _drop_or_remove(self, node: _Node, group: int) -> None:
        """Lets one block of a node go, and the node with it where nothing is left that a hit could use."""
        if self._windows[group] is None or node.blocks.count(NO_BLOCK) == len(node.blocks) - 1:
            self._remove(node)
        else:
            self._drop(node, group)

    def _drop(self, node: _Node, group: int) -> None:
        """Releases one block of a node."""
        block, node.blocks[group] = node.blocks[group], NO_BLOCK
        del self._by_block[block]
        if node.root:
            self.kept.remove(node.root, group, node.key)
        if self._quotas is not None and node.owner is not None:
            self._quotas[group].drop(node.owner)
            if not self._quotas[group].keeps_any(node.owner):
                self._evictable[group].pop(node.owner, None)  # it has only stale entries left
        self._pool.drop(block)

    def _is_unused(self, node: _Node) -> bool:
        references = self._pool.references
        return node.num_children == 0 and not any(references(block) for block in node.blocks if block != NO_BLOCK)

    def _is_evictable(self, node: _Node, group: int) -> bool:
        if self._windows[group] is None and node.num_children:
            return False
        block = node.blocks[group]
        return block != NO_BLOCK and self._pool.references(block) == 0

    def _note_unused(self, block: int) -> None:
        node, group = self._by_block[block], self._pool.group_of(block)
        if self._is_evictable(node, group):
            self._offer(node, group)

    def _offer_unused(self, node: _Node) -> None:
        for group in range(len(node.blocks)):
            if self._is_evictable(node, group):
                self._offer(node, group)

    def _offer(self, node: _Node, group: int) -> None:
        if node.offered & 1 << group:
            return  # one entry per node bounds the heap; a stale time is corrected when the entry is popped
        node.offered |= 1 << group
        heapq.heappush(self._evictable[group].setdefault(node.owner, []), (node.last_used, node.blocks[group], node))
