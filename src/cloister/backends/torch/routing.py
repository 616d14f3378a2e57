"""Which experts a token takes, and with what weights (`backends.spec.MoeSpec`)."""

from __future__ import annotations

import torch
from torch import Tensor

from cloister.backends.spec import MoeSpec
from cloister.backends.torch.layers import on_whole_vectors


def choose_experts(spec: MoeSpec, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the weights and the numbers of each row's experts, both [num_rows, num_chosen], the first choice first.

    Args:
        logits: [num_rows, num_experts] of the router, float32.
        correction: [num_experts] float32, where the spec has one.
    """
    scores = torch.softmax(logits, dim=-1) if spec.scoring == "softmax" else on_whole_vectors(torch.sigmoid, logits)
    ranked = scores if correction is None else scores + correction
    if spec.scoring == "sigmoid" and correction is None and spec.num_groups == 1:
        ranked = logits  # large ones have equal sigmoids
    if spec.num_groups > 1:
        ranked = _limit_to_groups(spec, ranked)
    numbers = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : spec.num_chosen]
    weights = scores.gather(1, numbers)
    if spec.renormalize:
        total = weights[:, :1].clone()
        for rank in range(1, spec.num_chosen):  # a sum in one order, whatever the number of rows
            total += weights[:, rank : rank + 1]
        # 1e-20 as DeepSeek-V3 has it: sigmoids may all be 0. It changes no bit of a sum of softmax scores.
        weights = weights / total.add_(1e-20)
    return (weights if spec.routed_scale == 1.0 else weights * spec.routed_scale), numbers


def _limit_to_groups(spec: MoeSpec, ranked: Tensor) -> Tensor:
    """Returns minus infinity for the experts of all but each row's best groups; of equal groups the first ones are taken."""
    groups = ranked.view(len(ranked), spec.num_groups, -1)
    best = groups.sort(dim=-1, descending=True).values[..., : spec.num_group_scores].sum(-1)
    chosen = best.sort(dim=-1, descending=True, stable=True).indices[:, : spec.num_chosen_groups]
    hidden = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
    return groups.masked_fill(hidden.unsqueeze(-1), -torch.inf).flatten(1)
