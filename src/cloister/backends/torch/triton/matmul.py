"""Matrix products whose rows have the same bits in any company: K is summed in one order, 64 inputs at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cloister.backends.torch.cuda.work import JOIN_FIELDS, JOIN_ROWS
from cloister.backends.torch.triton import EXACT
from cloister.backends.torch.triton.attention import Heads, Pages, Partials, join_states, padded_dims


@dataclass(frozen=True, slots=True)
class TileConfig:
    """What one program of a product computes. Only `rows` and `columns` differ among the tiles that a program may use."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["num_rows"])
def matmul_kernel(
    inputs, weight, bias, out, num_rows, num_outputs, num_inputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program computes [ROWS, COLUMNS] of the product; programs that share columns of the weight run side by side."""
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    rows = (tl.program_id(0) % num_row_tiles) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) // num_row_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    has_row, has_column = rows < num_rows, columns < num_outputs
    sources = inputs + rows.to(tl.int64)[:, None] * num_inputs
    factors = weight + columns.to(tl.int64)[None, :] * num_inputs
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, num_inputs, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        in_depth = depth < num_inputs
        left = tl.load(sources + depth[None, :], mask=has_row[:, None] & in_depth[None, :], other=0.0)
        right = tl.load(factors + depth[:, None], mask=in_depth[:, None] & has_column[None, :], other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=has_column, other=0.0)[None, :]
    places = out + rows.to(tl.int64)[:, None] * num_outputs + columns[None, :]
    tl.store(places, sums.to(out.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


def matmul(inputs: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, tile: TileConfig) -> Tensor:
    """Returns inputs W^T + bias, [num_rows, outputs].

    Args:
        inputs: [num_rows, inputs] of the weight's type.
        weight: [outputs, inputs] float32, float16 or bfloat16.
        bias: [outputs] float32 or None.
    """
    num_rows, num_inputs = inputs.shape
    out = inputs.new_empty(num_rows, len(weight), dtype=out_dtype)
    matmul_kernel[(triton.cdiv(num_rows, tile.rows) * triton.cdiv(len(weight), tile.columns),)](
        inputs, weight, out if bias is None else bias, out, num_rows, len(weight), num_inputs,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=64 if weight.itemsize == 2 else 32, HAS_BIAS=bias is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **EXACT,
    )  # fmt: skip
    return out


# Combines split-KV partial results in the order of the keys (flash-decoding's second step).


@triton.jit
def join_kernel(
    joins, query_starts, out, mixes, stats,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    FIELDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program joins up to ROWS rows of one KV head."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    item, kv_head = joins + tl.program_id(0) * FIELDS, tl.program_id(1)
    seq, row, partial = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    stride, num_splits = tl.load(item + 3), tl.load(item + 4)
    if num_splits > 0:
        begin = tl.load(query_starts + seq)
        rows = row + tl.arange(0, ROWS)
        inside = rows < (tl.load(query_starts + seq + 1) - begin) * GROUP
        dims = tl.arange(0, DIMS)
        kept = inside[:, None] & (dims < HEAD_DIM)[None, :]
        highest = tl.full((ROWS,), -1e30, tl.float32)
        total = tl.zeros((ROWS, 1), tl.float32)
        mixed = tl.zeros((ROWS, DIMS), tl.float32)
        for split in range(num_splits):
            found = (partial + split * stride + tl.arange(0, ROWS)).to(tl.int64) * NUM_KV_HEADS + kv_head
            next_highest = tl.load(stats + found * 2, mask=inside, other=-1e30)
            next_total = tl.load(stats + found * 2 + 1, mask=inside, other=0.0)
            next_mixed = tl.load(mixes + found[:, None] * HEAD_DIM + dims[None, :], mask=kept, other=0.0)
            highest, total, mixed = join_states(highest, total, mixed, next_highest, next_total[:, None], next_mixed)
        places = ((begin + rows // GROUP).to(tl.int64) * NUM_HEADS + kv_head * GROUP + rows % GROUP) * HEAD_DIM
        divisor = tl.where(total > 0, total, 1.0)
        tl.store(out + places[:, None] + dims[None, :], (mixed / divisor).to(out.dtype.element_ty), mask=kept)


def join_splits(joins: Tensor, pages: Pages, out: Tensor, partials: Partials, heads: Heads) -> None:
    """Writes the rows of `out` whose splits `attention.attend` left in `partials`.

    Args:
        joins: [num_joins, JOIN_FIELDS] int32.
        out: [num_tokens, num_heads, head_dim].
    """
    if len(joins) == 0:
        return
    join_kernel[(len(joins), heads.num_kv_heads)](
        joins, pages.query_starts, out, partials.mixed, partials.stats,
        NUM_HEADS=heads.num_heads, NUM_KV_HEADS=heads.num_kv_heads, HEAD_DIM=heads.head_dim, DIMS=padded_dims(heads.head_dim),
        FIELDS=JOIN_FIELDS, ROWS=JOIN_ROWS, num_warps=4, **EXACT,
    )  # fmt: skip
