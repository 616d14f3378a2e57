"""What the native KV cache holds, in every type of its.

One-hot embeddings and a rotation that turns nothing let keys and values be chosen exactly: whole numbers whose range fills the
codes have a scale of 1, and few bits then lose nothing, so that every type must give the very bits of bfloat16.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from cloister.backends.base import FloatArray
from cloister.backends.native import _native
from cloister.backends.native.program import KV_KINDS
from cloister.backends.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from tests.driving import Driver
from tests.native import KERNELS, GivenWeights, build_native, relative_error
from tests.thinning import cover

VOCAB = HIDDEN = 64
"""A one-hot row of 64 has a root mean square of 1/8, so its norm is 8 exactly."""
NUM_TOKENS = 300
HEADS = (4, 2)


def spec_of(head_dim: int) -> DecoderSpec:
    attention = AttentionSpec(*HEADS, head_dim, head_dim**-0.5 / 64, RopeSpec((0.0,) * (head_dim // 2)))
    return DecoderSpec("exact", VOCAB, HIDDEN, (LayerSpec(attention, MlpSpec(16)),), 0.0, 4096)


def exact_weights(head_dim: int, lowest: int, highest: int) -> GivenWeights:
    """Weights that make keys and values of whole numbers: every group of every head has the lowest and the highest.

    Keys go from -127 to 127, as they keep 8 bits; values from `lowest` to `highest`.
    """
    rng = np.random.default_rng(head_dim)
    width = HEADS[1] * head_dim

    def whole(low: int, high: int) -> npt.NDArray[np.float32]:
        heads = rng.integers(low, high + 1, (HEADS[1], head_dim, HIDDEN)).astype(np.float32)
        for first in range(0, head_dim, 64):
            heads[:, first], heads[:, min(first + 64, head_dim) - 1] = low, high
        return heads.reshape(width, HIDDEN) / 8

    def drawn(*shape: int) -> npt.NDArray[np.float32]:
        return rng.standard_normal(shape, dtype=np.float32)

    tensors = {
        "embed.weight": np.eye(VOCAB, HIDDEN, dtype=np.float32),
        "norm.weight": np.ones(HIDDEN, np.float32),
        "head.weight": drawn(VOCAB, HIDDEN),
        "layers.0.attention_norm.weight": np.ones(HIDDEN, np.float32),
        "layers.0.mlp_norm.weight": np.ones(HIDDEN, np.float32),
        "layers.0.q.weight": drawn(HEADS[0] * head_dim, HIDDEN),
        "layers.0.k.weight": whole(-127, 127),
        "layers.0.v.weight": whole(lowest, highest),
        "layers.0.o.weight": drawn(HIDDEN, HEADS[0] * head_dim),
        "layers.0.gate.weight": drawn(16, HIDDEN),
        "layers.0.up.weight": drawn(16, HIDDEN),
        "layers.0.down.weight": drawn(HIDDEN, 16),
    }
    return GivenWeights(tensors)


def run(weights: GivenWeights, head_dim: int, kernels: str, block_size: int = 16, **options: str) -> FloatArray:
    tokens = np.random.default_rng(1).integers(0, VOCAB, NUM_TOKENS).tolist()
    driver: Driver = build_native(
        spec_of(head_dim), weights, kernels=kernels, num_blocks=512, block_size=block_size, **{"dtype": "bfloat16", **options}
    )
    return driver.run("a", tokens, 70)


# heads that are not rotated: codes of a rotated one are no whole numbers
@pytest.mark.parametrize(
    ("codes", "head_dim", "kernels"), cover([("int8", -127, 127), ("int4", -7, 8), ("int4", 1, 16)], [8, 10, 24, 100], KERNELS)
)
def test_numbers_that_codes_can_hold_come_back_exactly(codes: tuple[str, int, int], head_dim: int, kernels: str) -> None:
    kv_dtype, lowest, highest = codes
    weights = exact_weights(head_dim, lowest, highest)
    wide = run(weights, head_dim, kernels)
    assert np.ptp(wide) > 1
    assert relative_error(wide, run(weights, head_dim, kernels, dtype="float32")) < 0.015  # bfloat16 itself
    for block_size in (1, 7, 16):
        assert run(weights, head_dim, kernels, block_size, kv_dtype=kv_dtype).tobytes() == wide.tobytes()


@pytest.mark.parametrize(
    ("codes", "head_dim", "kernels"), cover([("int8", 1e-4, 0.02), ("int4", 5e-3, 0.2)], [32, 64, 128], KERNELS)
)
def test_numbers_between_codes_are_rounded(codes: tuple[str, float, float], head_dim: int, kernels: str) -> None:
    kv_dtype, low, high = codes
    weights = exact_weights(head_dim, -127, 127)
    for name in ("k", "v"):
        tensor = weights.read(f"layers.0.{name}.weight")
        assert isinstance(tensor, np.ndarray)
        tensor *= np.random.default_rng(2).uniform(0.4, 1, tensor.shape)
    assert low < relative_error(run(weights, head_dim, kernels, kv_dtype=kv_dtype), run(weights, head_dim, kernels)) < high


def test_fewer_bits_take_fewer_bytes() -> None:
    sizes = [_native.kv_block_bytes(KV_KINDS[name], 8, 128, 0, 16) for name in ("float32", "bfloat16", "int8", "int4")]
    elements = 2 * 8 * 128 * 16
    assert sizes[:2] == [4 * elements, 2 * elements]
    assert elements < sizes[2] < 1.1 * elements
    assert 0.75 * elements < sizes[3] < 0.9 * elements  # keys in 8 bits, values in 4
