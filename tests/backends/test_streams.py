"""What Gemma 3n asks for, several residual streams above all: batch invariance and trees on the torch back end, and who refuses
them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from cloister.backends import BACKENDS
from cloister.backends.base import LOGITS
from cloister.backends.spec import DecoderSpec, LayerSpec, MlpSpec, StreamsSpec
from cloister.backends.torch.cuda import limits
from cloister.bench.roofline_operators import Numbers, Work, list_operators
from cloister.quant.forward import check_forward
from cloister.types.errors import ConfigError
from tests.batch_invariance import differing_arrangements
from tests.driving import Driver, RandomWeights, build, make_spec
from tests.token_trees import path_to, plan_trees, run_path

PLAIN = make_spec(hidden=100, intermediate=90, heads=(6, 2), head_dim=16)
ATTENTION, MLP = PLAIN.layers[0].grouped_attention, MlpSpec(90)
NORMED = replace(ATTENTION, qk_norm=True, v_norm=True)
SPEC = replace(
    PLAIN,
    layers=tuple(
        LayerSpec(attention, MlpSpec(inner, "gelu_tanh", sparsity=sparsity), post_norm=True)
        for attention, inner, sparsity in (
            (replace(NORMED, window=50), 90, 0.9),
            (NORMED, 70, 0.0),
            (replace(NORMED, window=50, shared_kv=0), 50, 0.0),
            (replace(NORMED, shared_kv=1), 90, 0.5),
        )
    ),
    streams=StreamsSpec(3, 1, laurel_rank=20, input_size=12, input_vocab=300),
)
FEW: dict[str, Any] = {"chunks": (7, 90), "block_sizes": (5,), "companions": (3, 40)}
TOKENS = torch.randint(320, (301,), generator=torch.Generator().manual_seed(1)).tolist()


def make(weights: RandomWeights, dtype: str, block_size: int, num_threads: int) -> Driver:
    blocks: dict[str, int] = {"num_blocks": 8192 // block_size, "block_size": block_size}
    return build(SPEC, weights, num_threads=num_threads, dtype=dtype, **blocks)


@pytest.mark.parametrize("arrangements", [FEW, pytest.param({}, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_company_chunks_blocks_threads_and_hits_change_no_bit(dtype: str, arrangements: dict[str, Any]) -> None:
    check = partial(make, RandomWeights(SPEC), dtype)
    assert differing_arrangements(check, TOKENS, vocab=320, **arrangements) == []


def test_a_node_of_a_tree_has_the_bits_of_its_path() -> None:
    tokens, parents = (11, 12, 13, 14, 15, 16, 17), (-1, -1, 0, 0, 1, 2, 5)
    driver = build(SPEC, RandomWeights(SPEC), num_blocks=800, block_size=5)
    driver.run("base", TOKENS[:253])
    driver.share("base", "tree", 253)
    logits = driver.program.step(plan_trees(driver, {"tree": tokens}, {"tree": parents}), LOGITS).logits
    for node in range(len(tokens)):
        alone = run_path(driver, "base", node, [tokens[place] for place in path_to(parents, node)])[-1]
        assert logits[node].tobytes() == alone.tobytes()


class Unread(RandomWeights):
    """Weights that nobody may read."""

    def read(self, name: str) -> Any:
        raise AssertionError(f"{name} was read")


def check_native(spec: DecoderSpec) -> None:
    BACKENDS.get("native")(num_threads=1, device="cpu").need(spec, Unread(spec), block_size=16, max_batched_tokens=64)


REFUSED: dict[str, LayerSpec] = {
    "normalised values": LayerSpec(replace(ATTENTION, v_norm=True), MLP),
    "KV of an earlier layer": LayerSpec(replace(ATTENTION, shared_kv=0), MLP),
    "sparse gates": LayerSpec(ATTENTION, replace(MLP, sparsity=0.5)),
}


@pytest.mark.parametrize("missing", REFUSED)
def test_native_kernels_cuda_and_calibration_refuse_it_before_weights_are_read(missing: str) -> None:
    spec = replace(PLAIN, layers=(REFUSED[missing],))
    with pytest.raises(ConfigError, match=f"{missing}.*--backend torch"):
        check_native(spec)
    with pytest.raises(ConfigError, match=missing):
        limits.check_computable(spec)
    with pytest.raises(ConfigError, match="choose a method"):
        check_forward(spec)


def test_all_but_the_oracle_refuse_several_residual_streams() -> None:
    spec = replace(PLAIN, streams=SPEC.streams)
    with pytest.raises(ConfigError, match=r"several residual streams.*--backend torch"):
        check_native(spec)
    with pytest.raises(ConfigError, match="several residual streams"):
        limits.check_computable(spec)
    with pytest.raises(ConfigError, match="one residual stream"):
        list_operators(spec, Work.decode(100, 1), Numbers())
    with pytest.raises(ConfigError, match="choose a method"):
        check_forward(spec)
