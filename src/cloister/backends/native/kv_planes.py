"""Where the numbers of a block lie in the native back end's caches (cpp/attention.hpp, `head_place`)."""

from __future__ import annotations

from cloister.backends.kv_planes import KVPlane


def list_head_planes(dim: int, block_size: int, number_bytes: int, *, has_values: bool, offset: int) -> list[KVPlane]:
    """Returns the planes of one KV head: its keys, and its values if it has any.

    Args:
        dim: dimensions of a head, with padding.
        offset: bytes before the head.
    """
    if number_bytes == 4:  # keys [dim][position], values [position][dim]
        keys = KVPlane(offset, 4, block_size, 1, dim, 1, 1, 0, block_size, 0)
        values = KVPlane(offset + keys.num_bytes, 4, block_size, 1, dim, 1, dim, 0, 1, 0)
    else:  # keys [dim / 2][position][2], values [position / 2][dim][2]
        even = (block_size + 1) // 2 * 2
        keys = KVPlane(offset, 2, block_size, 1, dim, 2, 2, 0, 2 * block_size, 1)
        values = KVPlane(offset + keys.num_bytes, 2, even, 2, dim, 1, 2 * dim, 1, 2, 0)
    return [keys, values] if has_values else [keys]
