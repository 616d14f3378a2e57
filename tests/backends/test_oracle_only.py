"""What only the torch back end computes, of families without latent attention: batch invariance, and who refuses it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from cloister.backends import BACKENDS
from cloister.backends.base import LOGITS
from cloister.backends.spec import ClippedSwiGLU, DecoderSpec, LayerSpec, MlpSpec, MoeSpec, QueryGrowth, StreamsSpec
from cloister.backends.torch.cuda import limits
from cloister.bench.roofline_operators import Numbers, Work, list_operators
from cloister.quant.forward import check_forward
from cloister.types.errors import ConfigError
from tests.batch_invariance import differing_arrangements
from tests.driving import Driver, RandomWeights, build, make_spec
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
NORMED = replace(ATTENTION, qk_norm=True, v_norm=True)
GEMMA3N = replace(
    make_layers(
        *(
            LayerSpec(attention, MlpSpec(inner, "gelu_tanh", sparsity=sparsity), post_norm=True)
            for attention, inner, sparsity in (
                (replace(NORMED, window=50), 90, 0.9),
                (NORMED, 70, 0.0),
                (replace(NORMED, window=50, shared_kv=0), 50, 0.0),
                (replace(NORMED, shared_kv=1), 90, 0.5),
            )
        )
    ),
    streams=StreamsSpec(3, 1, laurel_rank=20, input_size=12, input_vocab=300),
)
SPECS = {"gpt-oss": GPT_OSS, "Llama 4": LLAMA4, "Gemma 3n": GEMMA3N}
FEW: dict[str, Any] = {"chunks": (7, 90), "block_sizes": (5,), "companions": (3, 40)}
TOKENS = torch.randint(320, (301,), generator=torch.Generator().manual_seed(1)).tolist()


def make(spec: DecoderSpec, weights: RandomWeights, block_size: int, num_threads: int) -> Driver:
    return build(spec, weights, num_blocks=8192 // block_size, block_size=block_size, num_threads=num_threads)


@pytest.mark.parametrize("arrangements", [FEW, pytest.param({}, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize("name", SPECS)
def test_company_chunks_blocks_threads_and_hits_change_no_bit(name: str, arrangements: dict[str, Any]) -> None:
    check = partial(make, SPECS[name], RandomWeights(SPECS[name]))
    assert differing_arrangements(check, TOKENS, vocab=320, **arrangements) == []


@pytest.mark.parametrize("name", SPECS)
def test_a_node_of_a_tree_has_the_bits_of_its_path(name: str) -> None:
    tokens, parents = (11, 12, 13, 14, 15, 16, 17), (-1, -1, 0, 0, 1, 2, 5)
    driver = build(SPECS[name], RandomWeights(SPECS[name]), num_blocks=800, block_size=5)
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


REFUSED: dict[str, LayerSpec] = {
    "attention sinks": LayerSpec(replace(ATTENTION, sinks=True), MLP),
    "clipped SwiGLU": LayerSpec(ATTENTION, CLIPPED),
    "attention in chunks": LayerSpec(replace(ATTENTION, window=90, chunked=True), MLP),
    "queries that grow": LayerSpec(replace(ATTENTION, query_growth=QueryGrowth(0.4, 32)), MLP),
    "without weights": LayerSpec(replace(ATTENTION, qk_norm=True, qk_norm_weighted=False), MLP),
    "normalised values": LayerSpec(replace(ATTENTION, v_norm=True), MLP),
    "KV of an earlier layer": LayerSpec(replace(ATTENTION, shared_kv=0), MLP),
    "sparse gates": LayerSpec(ATTENTION, replace(MLP, sparsity=0.5)),
}
EXPERTS = {
    "biases of": MoeSpec(7, 3, MlpSpec(50), router_bias=True),
    "biases of experts": MoeSpec(7, 3, MlpSpec(50, bias=True)),
    "clipped SwiGLU": MoeSpec(7, 3, replace(CLIPPED, bias=False)),
    "weighted inputs": MoeSpec(7, 3, MlpSpec(50), weigh_inputs=True),
}


@pytest.mark.parametrize(
    ("missing", "layer"), [*REFUSED.items(), *((name, LayerSpec(ATTENTION, moe)) for name, moe in EXPERTS.items())]
)
def test_the_native_back_end_refuses_it_before_it_reads_weights(missing: str, layer: LayerSpec) -> None:
    spec = make_layers(layer)
    backend = BACKENDS.get("native")(num_threads=1, device="cpu")
    with pytest.raises(ConfigError, match=f"{missing}.*--backend torch") as error:
        backend.need(spec, Unread(spec), block_size=16, max_batched_tokens=64)
    assert error.value.param == "backend"


@pytest.mark.parametrize("missing", REFUSED)
def test_so_do_cuda_and_calibration(missing: str) -> None:
    spec = make_layers(REFUSED[missing])
    with pytest.raises(ConfigError, match=missing):
        limits.check_computable(spec)
    with pytest.raises(ConfigError, match="choose a method"):
        check_forward(spec)


def test_all_but_the_oracle_refuse_several_residual_streams() -> None:
    spec = replace(PLAIN, streams=GEMMA3N.streams)
    with pytest.raises(ConfigError, match=r"several residual streams.*--backend torch"):
        BACKENDS.get("native")(num_threads=1, device="cpu").need(spec, Unread(spec), block_size=16, max_batched_tokens=64)
    with pytest.raises(ConfigError, match="several residual streams"):
        limits.check_computable(spec)
    with pytest.raises(ConfigError, match="one residual stream"):
        list_operators(spec, Work.decode(100, 1), Numbers())
    with pytest.raises(ConfigError, match="choose a method"):
        check_forward(spec)
