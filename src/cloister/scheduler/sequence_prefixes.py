"""Prefix keys of sequences, and what sequences read from the prefix cache and offer to it. Pure: no I/O, no clock."""

from __future__ import annotations

from cloister.kv import BlockPool, CacheQuotas, PrefixCache, PrefixKeys
from cloister.scheduler.sequence import SequenceRecord, table_of
from cloister.types.request import Request
from cloister.types.scope import Scope, ScopeKind


class SequencePrefixes:
    """The prefix cache as sequences use it.

    Args:
        pool: the KV blocks that sequences hold.
        keys: computes prefix keys; None switches the prefix cache off.
        quotas: for each group of the pool, the quota of a scope; None for one shared cache.

    Attributes:
        cache: the prefix cache; None if it is off.
    """

    def __init__(self, pool: BlockPool, keys: PrefixKeys | None, quotas: list[CacheQuotas] | None = None) -> None:
        self.cache = PrefixCache(pool, keys.public, quotas) if keys is not None else None
        self._pool = pool
        self._keys = keys
        self._adapters: set[str | None] = {None}  # digests of all adapters used so far: each has a chain in every scope

    def root_of(self, request: Request) -> tuple[bytes, bytes | None]:
        """Returns the root of a request's prefix-key chain, and the owner of its cached blocks."""
        self._adapters.add(request.adapter)
        root = self._keys.root(request.scope, request.adapter) if self._keys is not None else b""
        # No later request can find the blocks of a scope with a single request: they have no owner, and are evicted first.
        scope = request.scope
        return root, None if scope.kind is ScopeKind.REQUEST else scope.owner or scope.seed

    def roots_of(self, scope: Scope) -> set[bytes]:
        """Returns the roots of all chains of a scope."""
        return set() if self._keys is None else {self._keys.root(scope, adapter) for adapter in self._adapters}

    def chain_of(self, request: Request, token_ids: list[int], *, num_more: int = 0) -> tuple[list[bytes], bytes, bytes | None]:
        """Returns the keys whose blocks a future request with these tokens could read, with their root and owner.

        Args:
            num_more: number of tokens, not known yet, that will follow `token_ids` in that request.
        """
        root, owner = self.root_of(request)
        keys: list[bytes] = []
        if self._keys is not None and not wants_every_position(request):
            documents = request.documents  # of a prompt with documents only the prefix moves between engines
            num_tokens = len(token_ids) + num_more - 1 if documents is None else documents.starts[0]
            num_blocks = num_tokens // self._pool.block_size
            is_base = request.adapter is None
            self._keys.extend(keys, root, token_ids, num_blocks, reads_public=is_base, images=request.images)
        return keys, root, owner

    def forget(self, roots: set[bytes]) -> None:
        """Drops chains; blocks in use become free when they are released."""
        for root in roots:
            if self.cache is not None:
                self.cache.forget(root)

    def discard(self, sequence: SequenceRecord) -> None:
        """Drops the cached blocks of an ended sequence whose scope ends with its request."""
        if self.cache is not None and sequence.request_state.request.scope.kind is ScopeKind.REQUEST:
            self.cache.discard(sequence.keys)
            # forks may know only their own end of the chain
            self.cache.discard(sequence.request_state.sequences[0].keys if sequence.request_state.sequences else [])

    def renew(self, sequence: SequenceRecord, now: float) -> None:
        """Extends the deadline of a scope's cached blocks, because one of its requests uses them."""
        state = sequence.request_state
        if self.cache is not None and state.request.scope.lifetime_s is not None:
            self.cache.renew(state.root, now + state.request.scope.lifetime_s)

    def keep_blocks(self, sequence: SequenceRecord) -> None:
        """Offers a sequence's full blocks to the prefix cache."""
        if self.cache is None or self._keys is None or sequence.request_state.request.pooling is not None:
            return  # many texts for pooling would evict the prefixes of chats
        if sequence.request_state.is_forgotten:
            return
        num_full = min(sequence.num_committed, len(sequence.token_ids)) // self._pool.block_size
        if sequence.layerwise is not None:
            is_done = sequence.num_committed >= sequence.request_state.num_prompt_tokens
            num_full = sequence.layerwise.num_kept if is_done else 0
        if num_full > sequence.num_kept:
            state = sequence.request_state
            self.extend_keys(sequence, num_full)
            self.deduplicate(sequence, num_full, sequence.num_kept)
            if self._pool.state_group is not None and num_full * self._pool.block_size == sequence.num_committed:
                self._replace_snapshot(sequence, num_full)
            if self.cache.tiers is not None and state.kept_root:
                self.cache.tiers.note_accesses(sequence.keys[sequence.num_kept : num_full], state.owner)
            self.cache.insert(
                sequence.keys[:num_full],
                table_of(sequence).blocks,
                sequence.num_kept,
                state.kept_root,
                state.owner,
                expires=state.request.scope.lifetime_s is not None,
                documents=state.request.documents,
            )
            sequence.num_kept = num_full

    def deduplicate(self, sequence: SequenceRecord, num_entries: int, start: int = 0) -> None:
        """Replaces a sequence's blocks by equal cached ones, in models with states: a hit ends at a snapshot of the state, so
        positions behind it are computed again though their KV is cached.

        Args:
            start: entries before it were offered to the cache by this sequence itself.
        """
        if self.cache is not None and self._pool.state_group is not None:
            self.extend_keys(sequence, num_entries)
            self.cache.deduplicate(sequence.keys[:num_entries], table_of(sequence), start)

    def choose_snapshots(self, sequence: SequenceRecord) -> tuple[int, ...]:
        """Returns the numbers of leading entries behind which to keep the state of an admitted sequence: where the next request
        with this prompt can begin, and where this prompt diverges from the cached ones."""
        state = sequence.request_state
        if self._pool.state_group is None or self.cache is None or state.request.pooling is not None:
            return ()
        last = (state.num_prompt_tokens - 1) // self._pool.block_size
        known = self.cache.count_known(self.match_keys(sequence))
        return tuple(sorted({last, known} - {0}))

    def _replace_snapshot(self, sequence: SequenceRecord, num_entries: int) -> None:
        """Drops a sequence's previous snapshot unless `choose_snapshots` chose it: states are large, and of the others only the
        latest is likely to be found again."""
        assert self.cache is not None
        is_prompt = sequence.num_committed <= sequence.request_state.num_prompt_tokens
        if num_entries in sequence.snapshots or (is_prompt and not self.cache.is_tree):
            return  # without a tree it is unknown where prompts will diverge
        if sequence.last_snapshot:
            self.cache.drop_state(sequence.keys[sequence.last_snapshot - 1])
        sequence.last_snapshot = num_entries

    def reads_prefixes(self, request: Request) -> bool:
        """Whether a request looks up its prompt in the prefix cache."""
        return self.cache is not None and not wants_every_position(request)

    def match_keys(self, sequence: SequenceRecord) -> list[bytes]:
        """Returns the keys whose blocks a waiting sequence may read: those before the last token, which must be computed for
        its logits."""
        if (
            self.cache is None
            or self._keys is None
            or (sequence.index == 0 and wants_every_position(sequence.request_state.request))
        ):
            return []
        num_blocks = (len(sequence.token_ids) - 1) // self._pool.block_size
        self.extend_keys(sequence, num_blocks)
        return sequence.keys[:num_blocks]

    def find_known_document(self, sequence: SequenceRecord) -> list[int]:
        """Returns cached blocks of the document that begins at a running sequence's next position; none if no document begins
        there."""
        documents, start = sequence.request_state.request.documents, sequence.num_planned
        if documents is None or self.cache is None or start not in documents.starts:
            return []
        size, end = self._pool.block_size, documents.find_piece_end(start) or documents.end
        keys = self.match_keys(sequence)[: end // size]
        return self.cache.find_known(keys, table_of(sequence).blocks, start // size, documents)

    def count_cached(self, sequence: SequenceRecord) -> int:
        """Returns how many tokens of a waiting sequence are cached; changes nothing."""
        return 0 if self.cache is None else self.cache.match_length(self.match_keys(sequence)) * self._pool.block_size

    def extend_keys(self, sequence: SequenceRecord, num_blocks: int) -> None:
        """Computes the keys of a sequence's first `num_blocks` blocks."""
        if self._keys is not None:
            state = sequence.request_state
            request = state.request
            self._keys.extend(
                sequence.keys,
                state.root,
                sequence.token_ids,
                num_blocks,
                reads_public=request.adapter is None,
                images=request.images,
                documents=request.documents,
            )


def kept_root(scope: Scope, root: bytes) -> bytes:
    """Returns the root under which blocks of a scope may be kept below the device; empty if its only request ends with it."""
    return b"" if scope.kind is ScopeKind.REQUEST and scope.lifetime_s is None else root


def wants_every_position(request: Request) -> bool:
    """Whether its reply needs the outputs of every prompt position, so that its first sequence cannot use prefix hits."""
    return request.sampling.prompt_logprobs is not None or request.pooling is not None
