"""Triton kernels around the products: norms, rounding of activations, gated activations, rotary embeddings with KV writes;
and the search of the most likely token."""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from cloister.backends.torch.triton import EXACT
from cloister.backends.torch.triton.attention import Heads


@triton.jit
def norm_kernel(hidden, added, weight, out, eps, WIDTH: tl.constexpr, LANES: tl.constexpr, HAS_ADDED: tl.constexpr):
    """One program takes one row; it sums in an order that the width alone decides."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    lanes = tl.arange(0, LANES)
    inside = lanes < WIDTH
    values = tl.load(hidden + row + lanes, mask=inside, other=0.0)
    if HAS_ADDED:
        values += tl.load(added + row + lanes, mask=inside, other=0.0).to(tl.float32)
        tl.store(hidden + row + lanes, values, mask=inside)
    root = tl.sqrt(tl.sum(values * values) / WIDTH + eps)
    normed = values / root * tl.load(weight + lanes, mask=inside, other=0.0)
    tl.store(out + row + lanes, normed.to(out.dtype.element_ty), mask=inside)


def add_and_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    """Adds `added` to the residual stream in place and writes its norm (Zhang and Sennrich 2019).

    Args:
        hidden: [num_rows, width] float32.
        added: the same shape, any type, or None.
        weight: [width] float32.
        out: the same shape, any type.
    """
    num_rows, width = hidden.shape
    lanes = triton.next_power_of_2(width)
    norm_kernel[(num_rows,)](
        hidden, hidden if added is None else added, weight, out, eps,
        WIDTH=width, LANES=lanes, HAS_ADDED=added is not None, num_warps=min(16, max(1, lanes // 512)), **EXACT,
    )  # fmt: skip


# Rounds activations to int8 or FP8, with one scale for each token.


_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@triton.jit
def round_kernel(
    inputs, rounded, scales, WIDTH: tl.constexpr, LANES: tl.constexpr, LARGEST: tl.constexpr, TO_INT: tl.constexpr
):
    """One program rounds one row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    values = tl.load(inputs + row * WIDTH + lanes, mask=lanes < WIDTH, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(values))
    factor = tl.where(peak > 0, tl.div_rn(LARGEST + tl.zeros_like(peak), tl.where(peak > 0, peak, 1.0)), 0.0)
    scaled = values * factor
    if TO_INT:
        scaled = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2^23: what is below one is rounded away, half to even
    tl.store(rounded + row * WIDTH + lanes, scaled.to(rounded.dtype.element_ty), mask=lanes < WIDTH)
    tl.store(scales + row, tl.div_rn(peak, LARGEST + tl.zeros_like(peak)))


def round_rows(inputs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the rows in `dtype` (int8 or float8_e4m3fn) and their scales, [num_rows] float32.

    `backends.tensors.Activations` says how int8 is rounded; e4m3 is rounded likewise, with 448 as the largest code.
    """
    num_rows, width = inputs.shape
    rounded = inputs.new_empty(num_rows, width, dtype=dtype)
    scales = inputs.new_empty(num_rows, dtype=torch.float32)
    lanes = triton.next_power_of_2(width)
    round_kernel[(num_rows,)](
        inputs, rounded, scales, WIDTH=width, LANES=lanes, LARGEST=_LARGEST[dtype], TO_INT=dtype == torch.int8,
        num_warps=min(16, max(1, lanes // 512)), **EXACT,
    )  # fmt: skip
    return rounded, scales


# The gate of a feed-forward: act(gate) * up.


_LANES: Final = 1024


@triton.jit
def gate_kernel(gate_up, out, WIDTH: tl.constexpr, LANES: tl.constexpr, ACTIVATION: tl.constexpr):
    FAR: tl.constexpr = 80.0  # where a gate is as good as shut, and exp is still finite
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lanes < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + lanes, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + lanes, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        active = gate / (1.0 + tl.exp(tl.minimum(-gate, FAR)))
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # x * (1 + tanh(y)) / 2 is x / (1 + exp(-2y))
        bent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp(tl.minimum(-bent, FAR)))
    tl.store(out + row * WIDTH + lanes, (active * up).to(out.dtype.element_ty), mask=inside)


def gate(gate_up: Tensor, out: Tensor, activation: str) -> None:
    """Writes act(gate) * up.

    Args:
        gate_up: [num_rows, 2 * width], gate before up.
        out: [num_rows, width].
        activation: as in `backends.spec.MlpSpec`.
    """
    num_rows, width = out.shape
    gate_kernel[(num_rows, triton.cdiv(width, _LANES))](
        gate_up, out, WIDTH=width, LANES=_LANES, ACTIVATION=activation, num_warps=4, **EXACT
    )


# Norms of q and k, rotation by position, and the write of K and V into the cache, in one launch.


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


# Chooses the most likely token on the device, so that a greedy step moves no logits.
#
# Draws stay with the runner: the bits of its counter-based noise could be had here, but the exponential and the logarithm that
# follow are rounded by numpy in its own way, and a seeded answer would change where two tokens all but tie.


_SEARCH_LANES: Final = 4096


@triton.jit
def largest_kernel(logits, tokens, VOCAB: tl.constexpr, LANES: tl.constexpr):
    """One program searches one row: each lane keeps its first largest, then the lanes are compared."""
    row = logits + tl.program_id(0).to(tl.int64) * VOCAB
    lanes = tl.arange(0, LANES)
    highest, winner = tl.full((LANES,), float("-inf"), tl.float32), tl.zeros((LANES,), tl.int32)
    num_broken = tl.zeros((LANES,), tl.int32)
    for start in range(0, VOCAB, LANES):
        inside = start + lanes < VOCAB
        values = tl.load(row + start + lanes, mask=inside, other=0.0).to(tl.float32)
        num_broken += (inside & ((tl.abs(values) < float("inf")) == 0)).to(tl.int32)  # also where it is not a number
        is_higher = inside & (values > highest)
        highest, winner = tl.where(is_higher, values, highest), tl.where(is_higher, start + lanes, winner)
    first = tl.min(tl.where(highest == tl.max(highest), winner, VOCAB))
    tl.store(tokens + tl.program_id(0), tl.where(tl.sum(num_broken) == 0, first, -1))


def find_largest(logits: Tensor) -> Tensor:
    """Returns the token of the largest logit of each row, [num_rows] int32, the lowest id among equals.

    -1 stands for a row that holds anything but finite numbers.

    Args:
        logits: [num_rows, vocab].
    """
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows:
        largest_kernel[(num_rows,)](logits, tokens, VOCAB=vocab, LANES=_SEARCH_LANES, num_warps=8)
    return tokens
