"""Rows in place of embeddings, which is how images stand in a prompt: both back ends agree, and no company changes a bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from cloister.backends.base import GREEDY, HIDDEN, KV_ONLY, LOGITS, FloatArray, ForwardBatch, Weights
from cloister.backends.spec import DecoderSpec
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights
from tests.batch_invariance import differing_arrangements
from tests.driving import Driver, RandomWeights, build
from tests.native import KERNELS, MANY_HEADS, NARROW, WINDOWED, build_native
from tests.thinning import cover

FIRST_IMAGE_TOKEN = 256
"""Tokens from this one on stand for rows that are given."""
SPECS = {
    "narrow": NARROW,
    "a width between two vectors": MANY_HEADS,
    "scaled embeddings": replace(WINDOWED, embedding_scale=9.8),
    "learned positions": replace(NARROW, position_embeddings=True),
}


class RowsDriver(Driver):
    """Gives a row for every token from `FIRST_IMAGE_TOKEN` on, always the same one for a token."""

    def __init__(self, driver: Driver, rows: FloatArray) -> None:
        self.__dict__ = driver.__dict__
        self._rows = rows

    def plan(self, parts: Mapping[Any, Sequence[int]], logit_rows: Sequence[int] | None = None) -> ForwardBatch:
        batch = super().plan(parts, logit_rows)
        places = np.flatnonzero(batch.token_ids >= FIRST_IMAGE_TOKEN).astype(np.int32)
        if not len(places):
            return batch
        return replace(batch, embeddings=self._rows[batch.token_ids[places]], embedding_rows=places)


def rows_of(spec: DecoderSpec) -> FloatArray:
    return np.random.default_rng(4).standard_normal((spec.vocab_size, spec.hidden_size), dtype=np.float32)


def tokens_of(spec: DecoderSpec, count: int = 90) -> list[int]:
    tokens: list[int] = np.random.default_rng(5).integers(0, spec.vocab_size, count).tolist()
    return tokens


@pytest.mark.parametrize(("kernels", "name"), cover(KERNELS, SPECS))
def test_given_rows_stand_where_the_reference_puts_them(name: str, kernels: str) -> None:
    spec = SPECS[name]
    weights, tokens = RandomWeights(spec), tokens_of(spec)
    plain = build_native(spec, weights, kernels=kernels).run("a", tokens)
    found = RowsDriver(build_native(spec, weights, kernels=kernels), rows_of(spec)).run("a", tokens)
    expected = RowsDriver(build(spec, weights), rows_of(spec)).run("a", tokens)
    assert np.abs(found - expected).max() < 2e-4
    first = next(i for i, token in enumerate(tokens) if token >= FIRST_IMAGE_TOKEN)
    assert np.array_equal(found[:first], plain[:first])
    assert np.abs(found[first] - plain[first]).max() > 0.1


@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_that_are_the_embeddings_change_no_bit(kernels: str) -> None:
    weights, tokens = RandomWeights(NARROW), tokens_of(NARROW)
    embeddings = np.array(weights.read("embed.weight"), np.float32)
    found = RowsDriver(build_native(NARROW, weights, kernels=kernels), embeddings).run("a", tokens)
    assert found.tobytes() == build_native(NARROW, weights, kernels=kernels).run("a", tokens).tobytes()


def make(spec: DecoderSpec, weights: Weights, options: Mapping[str, Any], block_size: int, num_threads: int) -> Driver:
    sizes = {"num_blocks": 4096 // block_size, "block_size": block_size, "num_threads": num_threads}
    return RowsDriver(build_native(spec, weights, **sizes, **options), rows_of(spec))


@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", ["narrow", "scaled embeddings"])
def test_no_arrangement_changes_a_bit_of_a_sequence_with_given_rows(name: str, quant: str) -> None:
    spec = SPECS[name]
    weights: Weights = RandomWeights(spec)
    if quant != "none":
        weights = QuantizedWeights(weights, FORMATS.get(quant)(FormatOptions()))
    options = {"dtype": "float32" if quant == "none" else "bfloat16"}
    made = partial(make, spec, weights, options)
    arrangements = {"chunks": (1, 7), "block_sizes": (5,), "companions": (3, 20)}
    assert differing_arrangements(made, tokens_of(spec, 150), vocab=spec.vocab_size, **arrangements) == []


@pytest.mark.parametrize("wants", [LOGITS, GREEDY, HIDDEN, KV_ONLY])
def test_what_does_not_fit_is_refused_before_anything_is_written(wants: Any) -> None:
    driver = build_native(NARROW, RandomWeights(NARROW), num_blocks=1)
    batch = driver.plan({"a": [1, 2, 3]})
    rows, places = np.ones((2, NARROW.hidden_size), np.float32), np.array([0, 2], np.int32)
    for embeddings, embedding_rows in (
        (rows, np.array([0, 3], np.int32)),
        (rows, np.array([-1, 0], np.int32)),
        (rows, places[:1]),
        (rows[:, :-1].copy(), places),
        (rows.astype(np.float64), places),
        (rows, places.astype(np.int64)),
        (rows.T.copy().T, places),
    ):
        with pytest.raises(ValueError, match="embedding"):
            driver.program.step(replace(batch, embeddings=embeddings, embedding_rows=embedding_rows), wants)
    assert not any(driver.program.read_block(0, 0))  # type: ignore[attr-defined]
    driver.program.step(replace(batch, embeddings=rows, embedding_rows=places), wants)
    assert any(driver.program.read_block(0, 0))  # type: ignore[attr-defined]
