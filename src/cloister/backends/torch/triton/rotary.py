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
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LANES: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """One program takes one head of one token: a query, a key or a value."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, LANES)
    inside = lanes < HALF
    source = projected + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM
    first = tl.load(source + lanes, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + lanes, mask=inside, other=0.0).to(tl.float32)
    if head < NUM_HEADS + NUM_KV_HEADS:
        if HAS_NORM:
            weights = norms + tl.where(head < NUM_HEADS, 0, HEAD_DIM)
            root = tl.sqrt(tl.sum(first * first + second * second) / HEAD_DIM + eps)
            first = first / root * tl.load(weights + lanes, mask=inside, other=0.0)
            second = second / root * tl.load(weights + HALF + lanes, mask=inside, other=0.0)
        row = angles + tl.load(positions + token).to(tl.int64) * HEAD_DIM
        cos = tl.load(row + lanes, mask=inside, other=0.0)
        sin = tl.load(row + HALF + lanes, mask=inside, other=0.0)
        first, second = first * cos - second * sin, second * cos + first * sin
    if head < NUM_HEADS:
        place = queries + (token * NUM_HEADS + head) * HEAD_DIM
        tl.store(place + lanes, (first * scale).to(queries.dtype.element_ty), mask=inside)
        tl.store(place + HALF + lanes, (second * scale).to(queries.dtype.element_ty), mask=inside)
    else:
        target = tl.load(targets + token)
        if target >= 0:
            place = slots + (target.to(tl.int64) * 2 * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM
            tl.store(place + lanes, first.to(slots.dtype.element_ty), mask=inside)
            tl.store(place + HALF + lanes, second.to(slots.dtype.element_ty), mask=inside)


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
    rotate_kernel[(len(projected), heads.num_heads + 2 * heads.num_kv_heads)](
        projected, positions, targets, angles, angles if norms is None else norms, queries, slots,
        scale * math.log2(math.e), eps,
        NUM_HEADS=heads.num_heads, NUM_KV_HEADS=heads.num_kv_heads, HEAD_DIM=heads.head_dim,
        LANES=triton.next_power_of_2(heads.head_dim // 2), HAS_NORM=norms is not None, num_warps=1, **EXACT,
    )  # fmt: skip
