"""Averaged weights lie on the straight line between two models."""

import pytest
import torch

from cloister.train.decoder import Decoder
from training.averaging import average
from training.scale import TINY


def model(seed: int) -> Decoder:
    return Decoder(TINY.model, torch.Generator().manual_seed(seed))


def largest_difference(first: Decoder, second: Decoder) -> float:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return max((a.float() - b.float()).abs().max().item() for a, b in pairs)


def test_a_share_of_nothing_is_the_model_before_and_a_share_of_all_the_model_after() -> None:
    assert largest_difference(average(model(1), model(2), 0), model(1)) < 1e-6
    assert largest_difference(average(model(1), model(2), 1), model(2)) < 1e-6


def test_half_of_each_is_as_far_from_the_one_as_from_the_other() -> None:
    half = average(model(1), model(2), 0.5)
    whole = largest_difference(model(1), model(2))
    assert largest_difference(half, model(1)) == pytest.approx(whole / 2, rel=1e-3)
    assert largest_difference(half, model(2)) == pytest.approx(whole / 2, rel=1e-3)


def test_the_model_before_stays_as_it_was() -> None:
    before = model(1)
    average(before, model(2), 0.5)
    assert largest_difference(before, model(1)) == 0


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_off_the_line_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        average(model(1), model(2), share)
