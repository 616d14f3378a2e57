"""`numerics = "fast"`: cuBLAS and FlashInfer compute the same thing, if not to the bit."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from cloister.backends import BACKENDS
from cloister.backends.base import KVLayout
from cloister.types.errors import ConfigError
from tests.driving import Driver, RandomWeights, build, make_spec

SPEC = make_spec(hidden=512, intermediate=512, heads=(8, 2), head_dim=64)
HAS_FLASHINFER = importlib.util.find_spec("flashinfer") is not None


@pytest.mark.skipif(HAS_FLASHINFER, reason="FlashInfer is installed")
def test_fast_without_flashinfer_is_refused() -> None:
    with pytest.raises(ConfigError, match="FlashInfer"):
        BACKENDS.get("torch")(num_threads=1, device="cuda", dtype="bfloat16", numerics="fast")


@pytest.mark.skipif(not HAS_FLASHINFER, reason="FlashInfer is not installed (pip install 'cloister[flashinfer]')")
def test_fast_differs_from_exact_only_as_rounding_does() -> None:
    weights = RandomWeights(SPEC)
    tokens = torch.randint(SPEC.vocab_size, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    oracle = build(SPEC, weights, num_blocks=64).run("a", tokens)
    errors = []
    for numerics in ("exact", "fast"):
        backend = BACKENDS.get("torch")(num_threads=1, device="cuda", dtype="bfloat16", numerics=numerics)
        driver = Driver(backend.build(SPEC, weights, KVLayout(64, 16)), 64, 16)
        logits = np.concatenate([driver.step({"a": tokens[:290]})["a"], *(driver.step({"a": [t]})["a"] for t in tokens[290:])])
        errors.append(np.abs(logits - oracle).mean())
    assert errors[1] < 1.5 * errors[0]


@pytest.mark.skipif(not HAS_FLASHINFER, reason="FlashInfer is not installed (pip install 'cloister[flashinfer]')")
def test_the_fingerprint_tells_exact_from_fast() -> None:
    make = BACKENDS.get("torch")
    names = {make(num_threads=1, device="cuda", dtype="bfloat16", numerics=name).fingerprint for name in ("exact", "fast")}
    assert len(names) == 2
