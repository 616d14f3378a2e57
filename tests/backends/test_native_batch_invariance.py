"""Batch invariance on the native kernels: the same bits in any batch, for every format, KV type and instruction set."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest

from cloister.backends.base import Weights
from cloister.backends.spec import DecoderSpec
from cloister.backends.tensors import GroupedTensor, Tensor
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights
from cloister.quant.weights import is_projection
from tests.batch_invariance import differing_arrangements
from tests.driving import Driver, RandomWeights, make_spec
from tests.native import KERNELS, NARROW, SPECS, WINDOWED, GivenWeights, build_native, in_turns
from tests.thinning import cover, thin

FORMS = {  # what weights, KV, and arithmetic beside them are
    "float32": ("none", "float32", None),
    "bfloat16": ("none", "bfloat16", None),
    "int8, KV int8": ("int8", "bfloat16", "int8"),
    "int4": ("int4", "bfloat16", None),
    "NVFP4": ("nvfp4", "bfloat16", None),
    "QoQ, KV int4": ("qoq", "bfloat16", "int4"),
    "Q4_1": ("Q4_1", "bfloat16", None),
    "Q8_0, KV int8": ("Q8_0", "bfloat16", "int8"),
}
FEW = {"chunks": (7, 90), "block_sizes": (5,), "companions": (3, 40)}
FEWEST = {"chunks": (90,), "block_sizes": (5,), "companions": (9,)}
WIDE = make_spec(hidden=1024, intermediate=1408, heads=(8, 2), head_dim=128, num_layers=1, vocab=1100)


random_weights = cache(RandomWeights)


def make(
    spec: DecoderSpec, weights: Weights, dtype: str, kv_dtype: str | None, kernels: str, block_size: int, num_threads: int
) -> Driver:
    settings = {"num_blocks": 8192 // block_size, "block_size": block_size, "num_threads": num_threads}
    return build_native(spec, weights, dtype=dtype, kv_dtype=kv_dtype, kernels=kernels, **settings)


def differing(spec: DecoderSpec, form: str, kernels: str, count: int, **arrangements: tuple[int, ...]) -> list[str]:
    quant, dtype, kv_dtype = FORMS[form]
    weights: Weights = random_weights(spec)
    if quant.startswith("Q"):
        weights = stored(spec, weights, bits=int(quant[1]), with_offsets=quant.endswith("1"))
    elif quant != "none":
        weights = QuantizedWeights(weights, FORMATS.get(quant)(FormatOptions()))
    tokens = np.random.default_rng(count).integers(0, spec.vocab_size, count).tolist()
    return differing_arrangements(
        partial(make, spec, weights, dtype, kv_dtype, kernels), tokens, vocab=spec.vocab_size, **arrangements
    )


def stored(spec: DecoderSpec, weights: Weights, *, bits: int, with_offsets: bool) -> Weights:
    """Returns weights as a GGUF file has them, where 32 divides: groups of 32, whose inputs have scales of their own."""
    rng = np.random.default_rng(9)

    def code(name: str, tensor: Tensor) -> Tensor:
        if not is_projection(name) or tensor.shape[1] % 32:
            return tensor
        shape = tensor.shape[0], tensor.shape[1] // 32
        scales = (rng.uniform(0.5, 1.5, shape) / (2**bits * tensor.shape[1] ** 0.5)).astype(np.float16).astype(np.float32)
        codes = rng.integers(0, 2**bits, tensor.shape).astype(np.uint8)
        offsets = -scales * np.float32(2 ** (bits - 1)) * rng.uniform(0.9, 1.1, shape).astype(np.float32)
        zeros = np.zeros(shape, np.uint8) if with_offsets else None
        return GroupedTensor(codes, scales, zeros, offsets if with_offsets else None, bits, 32, "int8_group")

    return GivenWeights({name: code(name, weights.read(name)) for name in weights.names()})


@pytest.mark.parametrize(("name", "form"), cover(SPECS, FORMS))
def test_no_arrangement_changes_a_bit_on_the_best_kernels(name: str, form: str) -> None:
    few = {} if name == "narrow" else FEW
    assert differing(SPECS[name], form, KERNELS[0], 301, **few) == []


@pytest.mark.parametrize(("form", "kernels"), in_turns(FORMS, best=False))
def test_no_arrangement_changes_a_bit_on_other_kernels(form: str, kernels: str) -> None:
    spec, count, arrangements = (WINDOWED, 270, FEWEST) if kernels == "scalar" else (NARROW, 301, FEW)
    assert differing(spec, form, kernels, count, **arrangements) == []


@pytest.mark.parametrize("form", thin(FORMS, ("bfloat16", "QoQ, KV int4")))
def test_no_arrangement_changes_a_bit_of_a_wide_model(form: str) -> None:
    assert differing(WIDE, form, KERNELS[0], 70, chunks=(33,), block_sizes=(3,), companions=(20, 63)) == []


def test_a_kernel_that_takes_rows_as_they_come_is_caught() -> None:
    """The oracle's rounding to bfloat16 on few rows only: the kind of difference that this file must see."""

    def make_inconstant(block_size: int, num_threads: int) -> Driver:
        driver = make(NARROW, RandomWeights(NARROW), "float32", None, KERNELS[0], block_size, num_threads)
        other = make(NARROW, RandomWeights(NARROW), "bfloat16", None, KERNELS[0], block_size, num_threads).program
        plain = driver.program.step
        driver.program.step = lambda batch, wants: (plain if len(batch.token_ids) > 40 else other.step)(batch, wants)  # type: ignore[method-assign]
        return driver

    found = differing_arrangements(make_inconstant, list(range(60)), vocab=320, chunks=(7,), block_sizes=(), companions=())
    assert "chunks of 7" in found
