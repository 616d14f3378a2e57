"""Norms of q and k, rotation by position, and the write of K and V into the cache, in one launch."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from cloister.backends.torch.triton import EXACT
from cloister.backends.torch.triton.attention import Heads


@triton.jit
def rotate_kernel(
    projected, positions, targets, angles, norms, queries, slots, scale, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """One program takes one token: its queries, then its keys, then its values, [HEADS, LANES] for each half of a head."""
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_TURNED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    NUM_ALL: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head, lanes = tl.arange(0, HEADS)[:, None], tl.arange(0, LANES)
    in_half = lanes < HALF
    inside = (head < NUM_ALL) & in_half[None, :]
    source = projected + (token * NUM_ALL + head) * HEAD_DIM + lanes[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    is_turned = head < NUM_TURNED
    turned_first, turned_second = first, second
    if HAS_NORM:
        weights = norms + tl.where(head < NUM_HEADS, 0, HEAD_DIM) + lanes[None, :]
        root = tl.sqrt(tl.sum(first * first + second * second, 1) / HEAD_DIM + eps)[:, None]
        turned_first = first / root * tl.load(weights, mask=inside, other=0.0)
        turned_second = second / root * tl.load(weights + HALF, mask=inside, other=0.0)
    row = angles + tl.load(positions + token).to(tl.int64) * HEAD_DIM + lanes
    cos, sin = tl.load(row, mask=in_half, other=0.0)[None, :], tl.load(row + HALF, mask=in_half, other=0.0)[None, :]
    turned_first, turned_second = turned_first * cos - turned_second * sin, turned_second * cos + turned_first * sin
    place = queries + (token * NUM_HEADS + head) * HEAD_DIM + lanes[None, :]
    is_query = inside & (head < NUM_HEADS)
    tl.store(place, (turned_first * scale).to(queries.dtype.element_ty), mask=is_query)
    tl.store(place + HALF, (turned_second * scale).to(queries.dtype.element_ty), mask=is_query)
    target = tl.load(targets + token)
    place = slots + (target.to(tl.int64) * 2 * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM + lanes[None, :]
    is_kept = inside & (head >= NUM_HEADS) & (target >= 0)
    tl.store(place, tl.where(is_turned, turned_first, first).to(slots.dtype.element_ty), mask=is_kept)
    tl.store(place + HALF, tl.where(is_turned, turned_second, second).to(slots.dtype.element_ty), mask=is_kept)


def rotate_and_write(
    projected: Tensor,
    positions: Tensor,
    targets: Tensor,
    angles: Tensor,
    norms: Tensor | None,
    queries: Tensor,
    slots: Tensor,
    *,
    heads: Heads,
    scale: float,
    eps: float,
) -> None:
    """Turns the projections of a step into queries and cached keys and values.

    Args:
        projected: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], q before k before v.
        positions: [num_tokens] int32.
        targets: [num_tokens] int32 slots of the cache; -1 writes nothing.
        angles: [num_positions, 2, head_dim / 2] float32, cosines then sines.
        norms: [2, head_dim] float32 weights of the norms of q and k, or None.
        queries: [num_tokens, num_heads, head_dim]; gets scale * log2(e) * q, so that attention may use powers of two.
        slots: [num_slots, 2 * num_kv_heads * head_dim], one layer of the cache.
    """
    num_heads, half = heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim // 2
    rotate_kernel[(len(projected),)](
        projected, positions, targets, angles, angles if norms is None else norms, queries, slots,
        scale * math.log2(math.e), eps, NUM_HEADS=heads.num_heads, NUM_KV_HEADS=heads.num_kv_heads, HEAD_DIM=heads.head_dim,
        HEADS=triton.next_power_of_2(num_heads), LANES=triton.next_power_of_2(half), HAS_NORM=norms is not None,
        num_warps=8 if num_heads * half > 2048 else 4, **EXACT,
    )  # fmt: skip
