"""Interleaved rotation on kernels that turn halves: rows of q and k are put into another order when they are packed.

Pair i of a head is its values 2 i and 2 i + 1 in a checkpoint, and its values i and i + half for the kernels. Queries and keys
change places alike, so no product of the two changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from cloister.backends.base import Weights
from cloister.backends.spec import AnyAttentionSpec, DecoderSpec, LatentAttentionSpec
from cloister.backends.tensors import Tensor, take_rows

IntArray = npt.NDArray[np.int32]


def row_orders(spec: DecoderSpec) -> dict[str, IntArray]:
    """Returns tensor -> the stored row of each packed row, for every tensor whose rows are packed in another order."""
    return {
        f"layers.{number}.{name}": order
        for number, attention in enumerate(layer.attention for layer in spec.layers)
        if attention is not None and attention.rope is not None and attention.rope.interleaved
        for name, order in _orders(attention, 2 * len(attention.rope.inv_freq)).items()
    }


def read_rows(weights: Weights, name: str, orders: Mapping[str, IntArray]) -> Tensor:
    """Reads a tensor, its rows in the order that they are packed in."""
    tensor, order = weights.read(name), orders.get(name)
    if order is None:
        return tensor
    return tensor[order] if isinstance(tensor, np.ndarray) else take_rows(tensor, order)


def describe_orders(spec: DecoderSpec) -> str:
    """Returns text that differs where the same tensors are packed in different orders; empty where all keep theirs."""
    digest = hashlib.sha256()
    orders = row_orders(spec)
    for name, order in orders.items():
        digest.update(name.encode() + order.tobytes())
    return f" rows {digest.hexdigest()}" if orders else ""


def _orders(attention: AnyAttentionSpec, size: int) -> dict[str, IntArray]:
    """Returns the orders of one layer's tensors, of which `size` values of each head are turned."""
    if isinstance(attention, LatentAttentionSpec):
        queries = "q" if attention.q_lora_rank is None else "q_b"
        rows = {
            queries: _order(attention.num_heads, attention.qk_nope_head_dim, size, attention.qk_head_dim),
            "kv_a": _order(1, attention.kv_lora_rank, size, attention.head_dim),
        }
    else:
        rows = {
            "q": _order(attention.num_heads, 0, size, attention.head_dim),
            "k": _order(attention.num_kv_heads, 0, size, attention.head_dim),
        }
        per_head = attention.qk_norm_over == "head"
        rows |= {f"{name}_norm": order[: attention.head_dim] if per_head else order for name, order in rows.items()}
    return {f"{name}.{part}": order for name, order in rows.items() for part in ("weight", "bias")}


def _order(num_heads: int, first: int, size: int, head_dim: int) -> IntArray:
    """Returns the rows of heads whose `size` values from `first` on are pairs of neighbours, those pairs as halves."""
    turned = np.arange(first, first + size).reshape(-1, 2).T.reshape(-1)
    head = np.concatenate([np.arange(first), turned, np.arange(first + size, head_dim)])
    order: IntArray = (np.arange(num_heads)[:, None] * head_dim + head).reshape(-1).astype(np.int32)
    return order
