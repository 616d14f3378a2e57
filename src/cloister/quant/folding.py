"""Folds scaling factors from a layer's inputs into its weights, leaving its outputs unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.backends.spec import AttentionSpec, LayerSpec
from cloister.quant.base import FloatArray

FloatTensors = dict[str, FloatArray]
"""One layer's tensors in float32, under their canonical names less `layers.L.`."""


@dataclass(frozen=True, slots=True)
class Folding:
    """A place where inputs can be divided by a factor per channel.

    Attributes:
        inputs: what the inputs are called (`forward.LayerForward.steps`).
        source: the module whose outputs they are; its rows are divided.
        consumers: the projections that read them; their columns are multiplied.
    """

    inputs: str
    source: str
    consumers: tuple[str, ...]


AFTER_NORMS = (Folding("qkv", "attention_norm", ("q", "k", "v")), Folding("gate_up", "mlp_norm", ("gate", "up")))
INSIDE = (Folding("o", "v", ("o",)), Folding("down", "up", ("down",)))
"""Attention mixes values and the feed-forward gates `up` channel by channel, so factors pass through both."""


def fold(tensors: Mapping[str, FloatArray], folding: Folding, factors: FloatArray, spec: AttentionSpec) -> FloatTensors:
    """Returns the tensors with inputs divided and columns multiplied by `factors` [in]; the layer computes the same.

    Factors of the inputs of `o` must be alike in the query heads that share a value head (`share_among_groups`).
    """
    changed = dict(tensors)
    rows = reduce_to_kv_heads(factors, spec) if folding.source == "v" else factors
    for part in ("weight", "bias"):
        name = f"{folding.source}.{part}"
        if name in tensors:
            changed[name] = tensors[name] / (rows if tensors[name].ndim == 1 else rows[:, None])
    for consumer in folding.consumers:
        changed[f"{consumer}.weight"] = tensors[f"{consumer}.weight"] * factors
    return changed


def share_among_groups(factors: FloatArray, spec: AttentionSpec) -> FloatArray:
    """Returns factors [num_heads * head_dim] made alike, by their geometric mean, in heads that share a value head."""
    groups = np.log(factors).reshape(spec.num_kv_heads, -1, spec.head_dim)
    means = np.broadcast_to(groups.mean(1, keepdims=True), groups.shape)
    shared: FloatArray = np.exp(means).astype(np.float32).reshape(-1)
    return shared


def reduce_to_kv_heads(factors: FloatArray, spec: AttentionSpec) -> FloatArray:
    """Returns [num_kv_heads * head_dim] of factors that are alike in the heads of a group."""
    return factors.reshape(spec.num_kv_heads, -1, spec.head_dim)[:, 0].reshape(-1)


def key_factors(factors: FloatArray, layer: LayerSpec) -> FloatTensors:
    """Returns what to multiply a layer's tensors by, name by name, so that keys are divided and queries multiplied.

    Where heads are normalised the norms take the factors, which must then be alike in all heads if those share a norm.

    Args:
        factors: [num_kv_heads, head_dim], alike in both numbers of a pair that is turned, so that they pass through rotation.
    """
    spec = layer.grouped_attention
    if spec.qk_norm and spec.qk_norm_over == "head":
        return {"q_norm.weight": factors[0], "k_norm.weight": 1 / factors[0]}
    queries = np.repeat(factors, spec.num_heads // spec.num_kv_heads, axis=0).reshape(-1)
    keys = np.float32(1) / factors.reshape(-1)
    if spec.qk_norm:
        return {"q_norm.weight": queries, "k_norm.weight": keys}
    return {"q.weight": queries[:, None], "q.bias": queries, "k.weight": keys[:, None], "k.bias": keys}
