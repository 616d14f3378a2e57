"""Weights between a model and what tuning made of it: most of what was learned, and most of what was known before.

Robust fine-tuning by averaging weights (WiSE-FT, Wortsman et al. 2022): one straight line leads from the one to the other, and
points near its end lose little of the new task and regain much of the old ones.
"""

import torch

from cloister.train.decoder import Decoder


@torch.no_grad()
def average(before: Decoder, after: Decoder, share: float) -> Decoder:
    """Return ``after`` with its weights replaced by ``(1 - share) * before + share * after``; both are of one shape.

    Raises:
        ValueError: if the share is not from 0 to 1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"the share of the tuned weights is {share}; give one from 0 to 1")
    old = before.state_dict()
    for name, weight in after.state_dict().items():
        weight.copy_(torch.lerp(old[name].float(), weight.float(), share))
    return after
