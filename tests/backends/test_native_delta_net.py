"""Gated delta nets on the native kernels against the torch back end: the fields of its spec, and matrices in few bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from cloister.backends.native.backend import NativeBackend
from cloister.backends.native.limits import MOST_DELTA_DIM
from cloister.backends.spec import GatedDeltaNetSpec
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights
from cloister.types.errors import ConfigError
from tests.driving import RandomWeights, build
from tests.native import DELTA_NET, DELTA_NETS, in_turns

PLAIN = GatedDeltaNetSpec(2, 4, 24, 20, kernel_size=4)
VARIANTS: Mapping[str, GatedDeltaNetSpec] = {
    "plain": PLAIN,
    "a value head for each key head, of odd sizes": GatedDeltaNetSpec(3, 3, 7, 5, 4),
    "one key head, an odd number of rows": replace(PLAIN, num_key_heads=1, value_head_dim=21),
    "keys of one vector": replace(PLAIN, key_head_dim=16),
    "keys of four vectors": replace(PLAIN, key_head_dim=50),
    "keys as in real models": replace(PLAIN, key_head_dim=128, value_head_dim=32),
    "the longest keys": replace(PLAIN, key_head_dim=MOST_DELTA_DIM, value_head_dim=3),
    "another activation, a short convolution": replace(PLAIN, kernel_size=2, activation="gelu"),
    "a long convolution, squared ReLU": replace(PLAIN, kernel_size=9, activation="relu2"),
}
TOKENS = np.random.default_rng(3).integers(0, DELTA_NETS.vocab_size, 40).tolist()


@pytest.mark.parametrize(("name", "kernels"), in_turns(VARIANTS))
def test_logits_are_those_of_torch_and_have_the_same_bits_in_any_chunks(name: str, kernels: str) -> None:
    spec = replace(DELTA_NETS, layers=(replace(DELTA_NET, state=VARIANTS[name]), *DELTA_NETS.layers[1:]))
    weights = RandomWeights(spec)
    expected = build(spec, weights, backend="torch").run("a", TOKENS)
    driver = build(spec, weights, backend="native", kernels=kernels)
    found = driver.run("a", TOKENS, 7)
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    for chunk in (1, 16, 40):
        assert np.array_equal(driver.run(chunk, TOKENS, chunk), found)


@pytest.mark.parametrize(("name", "part"), [("int8", 0.8), ("int4", 0.3)])
def test_matrices_in_few_bits_differ_from_those_of_torch_by_a_part_of_what_they_lose(name: str, part: float) -> None:
    state = GatedDeltaNetSpec(2, 4, 32, 32, kernel_size=4)
    spec = replace(DELTA_NETS, layers=(replace(DELTA_NET, state=state), *DELTA_NETS.layers[1:]))
    weights = QuantizedWeights(RandomWeights(spec), FORMATS.get(name)(FormatOptions()))
    expected = build(spec, weights, backend="torch").run("a", TOKENS)
    found = build(spec, weights, backend="native").run("a", TOKENS)
    exact = build(spec, RandomWeights(spec), backend="native").run("a", TOKENS)
    assert (found - expected).std() <= part * (found - exact).std()


@pytest.mark.parametrize(
    ("state", "named"),
    [
        (replace(PLAIN, key_head_dim=MOST_DELTA_DIM + 1), "more than 256"),
        (replace(PLAIN, kernel_size=1), "one position"),
    ],
)
def test_what_no_kernel_computes_is_refused_by_name(state: GatedDeltaNetSpec, named: str) -> None:
    spec = replace(DELTA_NETS, layers=(replace(DELTA_NET, state=state), *DELTA_NETS.layers[1:]))
    with pytest.raises(ConfigError, match=named):
        NativeBackend(num_threads=1, device="cpu", dtype="float32").need(
            spec, RandomWeights(spec), block_size=16, max_batched_tokens=16
        )
