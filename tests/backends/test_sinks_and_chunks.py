"""What gpt-oss and Llama 4 ask for: batch invariance and trees on both back ends, and who refuses them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from cloister.backends.base import LOGITS
from cloister.backends.spec import ClippedSwiGLU, DecoderSpec, LayerSpec, MlpSpec, MoeSpec, QueryGrowth
from cloister.backends.torch.cuda import limits
from cloister.quant.forward import check_forward
from cloister.types.errors import ConfigError
from tests.batch_invariance import differing_arrangements
from tests.driving import Driver, RandomWeights, build, make_spec
from tests.thinning import cover
from tests.token_trees import path_to, plan_trees, run_path

PLAIN = make_spec(hidden=100, intermediate=90, heads=(6, 2), head_dim=16)
ATTENTION, MLP = PLAIN.layers[0].grouped_attention, MlpSpec(90)
CLIPPED = MlpSpec(50, bias=True, clipped=ClippedSwiGLU(1.7, 0.8))


def make_layers(*layers: LayerSpec) -> DecoderSpec:
    return replace(PLAIN, layers=layers)


GPT_OSS = make_layers(
    *(
        LayerSpec(
            replace(ATTENTION, sinks=True, qkv_bias=True, output_bias=True, window=window),
            MoeSpec(7, 3, CLIPPED, router_bias=True),
        )
        for window in (50, None)
    )
)
LLAMA4 = make_layers(
    *(
        LayerSpec(attention, MoeSpec(7, 3, MlpSpec(50), False, MlpSpec(60), scoring="sigmoid", weigh_inputs=True))
        for attention in (
            replace(ATTENTION, window=90, chunked=True, qk_norm=True, qk_norm_weighted=False),
            replace(ATTENTION, rope=None, query_growth=QueryGrowth(0.4, 32, first=1)),
        )
    )
)
SPECS = {"gpt-oss": GPT_OSS, "Llama 4": LLAMA4}
FEW: dict[str, Any] = {"chunks": (7, 90), "block_sizes": (5,), "companions": (3, 40)}
TOKENS = torch.randint(320, (301,), generator=torch.Generator().manual_seed(1)).tolist()


BACKENDS = ("torch", "native")


def make(spec: DecoderSpec, weights: RandomWeights, backend: str, block_size: int, num_threads: int) -> Driver:
    settings: dict[str, Any] = {"backend": backend, "num_blocks": 8192 // block_size, "block_size": block_size}
    return build(spec, weights, num_threads=num_threads, **settings)


@pytest.mark.parametrize("arrangements", [FEW, pytest.param({}, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize(("name", "backend"), cover(SPECS, BACKENDS))
def test_company_chunks_blocks_threads_and_hits_change_no_bit(name: str, backend: str, arrangements: dict[str, Any]) -> None:
    check = partial(make, SPECS[name], RandomWeights(SPECS[name]), backend)
    assert differing_arrangements(check, TOKENS, vocab=320, **arrangements) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SPECS)
def test_a_node_of_a_tree_has_the_bits_of_its_path(name: str, backend: str) -> None:
    tokens, parents = (11, 12, 13, 14, 15, 16, 17), (-1, -1, 0, 0, 1, 2, 5)
    driver = build(SPECS[name], RandomWeights(SPECS[name]), num_blocks=800, block_size=5, backend=backend)
    driver.run("base", TOKENS[:253])
    driver.share("base", "tree", 253)
    logits = driver.program.step(plan_trees(driver, {"tree": tokens}, {"tree": parents}), LOGITS).logits
    for node in range(len(tokens)):
        alone = run_path(driver, "base", node, [tokens[place] for place in path_to(parents, node)])[-1]
        assert logits[node].tobytes() == alone.tobytes()


REFUSED: dict[str, LayerSpec] = {
    "attention sinks": LayerSpec(replace(ATTENTION, sinks=True), MLP),
    "clipped SwiGLU": LayerSpec(ATTENTION, CLIPPED),
    "attention in chunks": LayerSpec(replace(ATTENTION, window=90, chunked=True), MLP),
    "queries that grow": LayerSpec(replace(ATTENTION, query_growth=QueryGrowth(0.4, 32)), MLP),
    "without weights": LayerSpec(replace(ATTENTION, qk_norm=True, qk_norm_weighted=False), MLP),
}


@pytest.mark.parametrize("missing", REFUSED)
def test_cuda_and_calibration_refuse_it(missing: str) -> None:
    spec = make_layers(REFUSED[missing])
    with pytest.raises(ConfigError, match=missing):
        limits.check_computable(spec)
    with pytest.raises(ConfigError, match="choose a method"):
        check_forward(spec)
