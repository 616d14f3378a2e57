"""Batch invariance: logits are bit-identical whatever else runs, however a prompt is cut, on any number of threads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cloister.backends.spec import DecoderSpec, LayerSpec, MlpSpec, MoeSpec
from cloister.backends.torch.linear import Linear
from tests.batch_invariance import differing_arrangements
from tests.driving import Driver, RandomWeights, build, make_spec
from tests.thinning import thin

NARROW = make_spec(hidden=256, intermediate=172, heads=(8, 2), head_dim=32)
WINDOWED = make_spec(hidden=96, intermediate=100, heads=(3, 1), head_dim=24, window=50, qk_norm=True)
MANY_HEADS = make_spec(hidden=100, intermediate=50, heads=(6, 6), head_dim=10)
GPT = replace(
    NARROW,
    layers=tuple(
        LayerSpec(replace(layer.attention, rope=None), MlpSpec(98, "gelu", bias=True, gated=False), parallel=True)
        for layer in NARROW.layers
    ),
    norm="layer", norm_bias=True, position_embeddings=True, head_bias=True,
)  # fmt: skip
CAPPED = replace(
    WINDOWED,
    layers=tuple(
        replace(layer, attention=replace(layer.attention, softcap=5.0, qk_norm_over="projection"), post_norm=True)
        for layer in WINDOWED.layers
    ),
    vocab_size=321, embedding_scale=9.8, logit_scale=0.5, logit_softcap=3.0,
)  # fmt: skip
EXPERTS = replace(
    NARROW,
    layers=tuple(
        LayerSpec(layer.attention, MoeSpec(7, 3, MlpSpec(50), shared=MlpSpec(60), shared_gate=True)) for layer in NARROW.layers
    ),
)
WIDE = make_spec(hidden=1600, intermediate=1600, heads=(16, 4), head_dim=128, num_layers=1, vocab=1600)
"""Of several panels in every matrix but K and V."""
FEW = {"chunks": (7, 90), "block_sizes": (5,), "companions": (3, 40)}


def make(spec: DecoderSpec, weights: RandomWeights, block_size: int, num_threads: int, **settings: Any) -> Driver:
    return build(spec, weights, num_blocks=8192 // block_size, block_size=block_size, num_threads=num_threads, **settings)


def tokens_of(spec: DecoderSpec, count: int) -> list[int]:
    return torch.randint(spec.vocab_size, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def test_company_chunks_blocks_threads_and_hits_change_no_bit() -> None:
    check = partial(make, NARROW, RandomWeights(NARROW))
    assert differing_arrangements(check, tokens_of(NARROW, 301), vocab=NARROW.vocab_size) == []


@pytest.mark.parametrize("arrangements", [FEW, pytest.param({}, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize(
    "spec",
    thin([WINDOWED, MANY_HEADS, GPT, CAPPED, EXPERTS], [WINDOWED, GPT, EXPERTS]),
    ids=["windowed", "many heads", "layer norms and learned positions", "soft caps and post norms", "experts"],
)
def test_nor_do_they_in_other_decoders(spec: DecoderSpec, arrangements: dict[str, tuple[int, ...]]) -> None:
    check = partial(make, spec, RandomWeights(spec))
    assert differing_arrangements(check, tokens_of(spec, 301), vocab=spec.vocab_size, **arrangements) == []


def test_company_changes_no_bit_in_bfloat16() -> None:
    check = partial(make, NARROW, RandomWeights(NARROW), dtype="bfloat16")
    assert differing_arrangements(check, tokens_of(NARROW, 270), vocab=320, **FEW) == []


def test_company_changes_no_bit_of_a_wide_model() -> None:
    check = partial(make, WIDE, RandomWeights(WIDE))
    found = differing_arrangements(
        check, tokens_of(WIDE, 40), vocab=WIDE.vocab_size, chunks=(33,), block_sizes=(3,), companions=(20,)
    )
    assert found == []


def test_a_product_that_takes_rows_as_they_come_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain_product(self: Linear, rows: Tensor) -> Tensor:
        weight = torch.cat([panel.t() for panel in self._panels])
        return torch.cat([torch.nn.functional.linear(part, weight) for part in (rows[:1], rows[1:])])

    monkeypatch.setattr(Linear, "__call__", plain_product)
    check = partial(make, NARROW, RandomWeights(NARROW))
    assert differing_arrangements(check, tokens_of(NARROW, 60), vocab=320, chunks=(7,), block_sizes=(), companions=(2,))


def test_of_equal_scores_the_expert_with_the_lower_number_is_taken() -> None:
    weights = RandomWeights(EXPERTS)
    weights.read("layers.0.router.weight")[:] = 0
    program = make(EXPERTS, weights, 16, 1).program
    scores, chosen = program._layers[0]._mlp.choose(torch.randn(8, 256))  # type: ignore[attr-defined]
    assert chosen.tolist() == [[0, 1, 2]] * 8
    assert torch.allclose(scores, torch.full((8, 3), 1 / 3))
