"""The Merkle tree of RFC 6962 and RFC 9162: hashes, roots, inclusion and consistency proofs. No I/O, no clock.

A tree is read only through `Nodes`: the hash of one complete subtree, by level and index. So the same code computes proofs from
a list in memory and from tiles on disk.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Sequence

from cloister.trust.transparency.refusal import Reason, TransparencyError

HASH_BYTES = 32
EMPTY_ROOT = hashlib.sha256(b"").digest()

Nodes = Callable[[int, int], bytes]
"""(level, index) -> hash of the leaves [index * 2^level, (index + 1) * 2^level)."""


def hash_leaf(entry: bytes) -> bytes:
    """RFC 9162, section 2.1.1: SHA-256(0x00 || entry)."""
    return hashlib.sha256(b"\x00" + entry).digest()


def hash_children(left: bytes, right: bytes) -> bytes:
    """RFC 9162, section 2.1.1: SHA-256(0x01 || left || right)."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def nodes_of(leaves: Sequence[bytes]) -> Nodes:
    """The nodes over leaf hashes in memory; each is computed on demand."""

    def node(level: int, index: int) -> bytes:
        return leaves[index] if level == 0 else hash_children(node(level - 1, 2 * index), node(level - 1, 2 * index + 1))

    return node


def make_root(nodes: Nodes, size: int) -> bytes:
    """The root of the first `size` leaves."""
    return _hash_range(nodes, 0, size) if size else EMPTY_ROOT


def prove_inclusion(nodes: Nodes, index: int, size: int) -> tuple[bytes, ...]:
    """RFC 9162, section 2.1.3.1: PATH(index, D[0:size]), the lowest hash first.

    Raises:
        ValueError: there is no such leaf.
    """
    if not 0 <= index < size:
        raise ValueError(f"leaf {index} is not in a tree of {size}")
    proof: list[bytes] = []
    begin, end = 0, size
    while end - begin > 1:
        middle = begin + _split(end - begin)
        if index < middle:
            proof.append(_hash_range(nodes, middle, end))
            end = middle
        else:
            proof.append(_hash_range(nodes, begin, middle))
            begin = middle
    return tuple(reversed(proof))


def prove_consistency(nodes: Nodes, old: int, new: int) -> tuple[bytes, ...]:
    """RFC 9162, section 2.1.4.1: PROOF(old, D[0:new]), the lowest hash first; empty if old is 0 or new.

    Raises:
        ValueError: the old tree is larger than the new one.
    """
    if not 0 <= old <= new:
        raise ValueError(f"a tree of {new} leaves does not extend one of {old}")
    if old in (0, new):
        return ()
    proof: list[bytes] = []
    begin, end = 0, new
    whole = True  # whether the current subtree begins where the old tree begins, so that the verifier knows its hash
    while old != end:
        middle = begin + _split(end - begin)
        if old <= middle:
            proof.append(_hash_range(nodes, middle, end))
            end = middle
        else:
            proof.append(_hash_range(nodes, begin, middle))
            begin, whole = middle, False
    if not whole:
        proof.append(_hash_range(nodes, begin, end))
    return tuple(reversed(proof))


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> None:
    """RFC 9162, section 2.1.3.2.

    Raises:
        TransparencyError: the leaf hash is not at this index of the tree with this root.
    """
    if not 0 <= index < size or not _well_formed((leaf, root, *proof)):
        raise _not_included()
    place, last = index, size - 1
    computed = leaf
    for sibling in proof:
        if last == 0:
            raise _not_included()
        if place & 1 or place == last:
            computed = hash_children(sibling, computed)
            while place and not place & 1:
                place, last = place >> 1, last >> 1
        else:
            computed = hash_children(computed, sibling)
        place, last = place >> 1, last >> 1
    if last != 0 or not hmac.compare_digest(computed, root):
        raise _not_included()


def verify_consistency(old: int, new: int, old_root: bytes, new_root: bytes, proof: Sequence[bytes]) -> None:
    """RFC 9162, section 2.1.4.2. A tree of 0 leaves constrains nothing, so it is refused.

    Raises:
        TransparencyError: the new tree does not begin with the old one.
    """
    if not 0 < old <= new or not _well_formed((old_root, new_root, *proof)):
        raise _not_consistent()
    if old == new:
        if proof or not hmac.compare_digest(old_root, new_root):
            raise _not_consistent()
        return
    path = list(proof) if old & (old - 1) else [old_root, *proof]
    if not path:
        raise _not_consistent()
    place, last = old - 1, new - 1
    while place & 1:
        place, last = place >> 1, last >> 1
    from_old = from_new = path[0]
    for sibling in path[1:]:
        if last == 0:
            raise _not_consistent()
        if place & 1 or place == last:
            from_old, from_new = hash_children(sibling, from_old), hash_children(sibling, from_new)
            while place and not place & 1:
                place, last = place >> 1, last >> 1
        else:
            from_new = hash_children(from_new, sibling)
        place, last = place >> 1, last >> 1
    if last != 0 or not (hmac.compare_digest(from_old, old_root) and hmac.compare_digest(from_new, new_root)):
        raise _not_consistent()


def extend_frontier(frontier: Sequence[bytes], size: int, leaves: Iterable[bytes]) -> tuple[bytes, ...]:
    """Adds leaf hashes to a tree of which only the roots of complete subtrees are known, largest first.

    The frontier of an old tree and every new leaf determine the new root, which verifies that no old leaf was changed.

    Args:
        frontier: one hash for each bit of `size` that is set.
        size: leaves of the tree so far.
        leaves: hashes of the leaves that follow.
    """
    if len(frontier) != size.bit_count():
        raise ValueError("the frontier is not of a tree of this size")
    hashes = list(frontier)
    for leaf in leaves:
        merged, rest = leaf, size
        while rest & 1:
            merged, rest = hash_children(hashes.pop(), merged), rest >> 1
        hashes.append(merged)
        size += 1
    return tuple(hashes)


def frontier_root(frontier: Sequence[bytes]) -> bytes:
    """The root of the tree with this frontier."""
    if not frontier:
        return EMPTY_ROOT
    root = frontier[-1]
    for left in reversed(frontier[:-1]):
        root = hash_children(left, root)
    return root


def _hash_range(nodes: Nodes, begin: int, end: int) -> bytes:
    count = end - begin
    if count & (count - 1) == 0 and begin % count == 0:
        return nodes(count.bit_length() - 1, begin // count)
    middle = begin + _split(count)
    return hash_children(_hash_range(nodes, begin, middle), _hash_range(nodes, middle, end))


def _split(count: int) -> int:
    """The largest power of two below `count`."""
    return 1 << ((count - 1).bit_length() - 1)


def _well_formed(hashes: Sequence[bytes]) -> bool:
    return all(len(part) == HASH_BYTES for part in hashes)


def _not_included() -> TransparencyError:
    return TransparencyError(
        Reason.NOT_INCLUDED, "the inclusion proof does not lead to the checkpoint's root; the entry is not logged"
    )


def _not_consistent() -> TransparencyError:
    return TransparencyError(Reason.NOT_CONSISTENT, "the consistency proof fails; the log was rewritten, or shows two faces")
