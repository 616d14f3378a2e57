"""Latent attention and the routing that goes with it: batch invariance, memory, adapters, and who refuses it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cloister.backends import BACKENDS
from cloister.backends.base import LOGITS, FloatArray, KVLayout
from cloister.backends.spec import DecoderSpec, IndexSpec, LatentAttentionSpec, LayerSpec, MlpSpec, MoeSpec, RopeSpec
from cloister.backends.torch.cuda import limits
from cloister.backends.torch.routing import choose_experts
from cloister.backends.torch.schedule import KeySlots, Team
from cloister.backends.torch.sparse_index import choose_positions
from cloister.bench.roofline_operators import Numbers, Work, list_operators
from cloister.models import load
from cloister.models.adapters import read_adapter
from cloister.quant import FORMATS, FormatOptions, quantize_on_read
from cloister.quant.forward import check_forward
from cloister.types.errors import ConfigError, ModelError
from tests.adapter_factory import MergedWeights, write_adapter
from tests.batch_invariance import differing_arrangements
from tests.driving import Driver, RandomWeights, build, make_spec
from tests.model_factory import make_model
from tests.thinning import thin
from tests.token_trees import path_to, plan_trees, run_path

ROPE = RopeSpec(tuple(float(10000.0 ** (-i / 8)) for i in range(8)), interleaved=True)
ATTENTION = LatentAttentionSpec(6, 40, 48, 24, 16, 20, 40**-0.5, ROPE)
MIXTURE = MoeSpec(
    8, 3, MlpSpec(50), shared=MlpSpec(60), scoring="sigmoid", correction_bias=True, num_groups=4, num_chosen_groups=2,
    num_group_scores=2, routed_scale=2.5,
)  # fmt: skip
SPEC = DecoderSpec(
    "random", 320, 100, (LayerSpec(ATTENTION, MlpSpec(90)), LayerSpec(ATTENTION, MIXTURE)), 1e-5, 4096
)  # fmt: skip
LITE = replace(
    SPEC,
    layers=(
        LayerSpec(replace(ATTENTION, q_lora_rank=None, kv_lora_rank=10), MlpSpec(90)),
        LayerSpec(
            replace(ATTENTION, q_lora_rank=None, kv_lora_rank=10), replace(MIXTURE, scoring="softmax", num_group_scores=1)
        ),
    ),
)
INDEXED = replace(
    SPEC,
    layers=tuple(
        replace(layer, attention=replace(ATTENTION, index=IndexSpec(num_heads=3, head_dim=20, num_chosen=40)))
        for layer in SPEC.layers
    ),
)
FEW: dict[str, Any] = {"chunks": (7, 90), "block_sizes": (5,), "companions": (3, 40)}
TOKENS = torch.randint(320, (301,), generator=torch.Generator().manual_seed(1)).tolist()


def make(spec: DecoderSpec, weights: RandomWeights, block_size: int, num_threads: int, **settings: Any) -> Driver:
    return build(spec, weights, num_blocks=8192 // block_size, block_size=block_size, num_threads=num_threads, **settings)


@pytest.mark.parametrize("arrangements", [FEW, pytest.param({}, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize(
    "spec", thin([SPEC, LITE, INDEXED], [SPEC, INDEXED]), ids=["queries with a latent", "queries without", "a sparse index"]
)
def test_company_chunks_blocks_threads_and_hits_change_no_bit(spec: DecoderSpec, arrangements: dict[str, Any]) -> None:
    check = partial(make, spec, RandomWeights(spec))
    assert differing_arrangements(check, TOKENS, vocab=spec.vocab_size, **arrangements) == []


@pytest.mark.parametrize("spec", thin([SPEC, INDEXED], [INDEXED]), ids=["all positions", "a sparse index"])
def test_nor_do_they_in_bfloat16(spec: DecoderSpec) -> None:
    check = partial(make, spec, RandomWeights(spec), dtype="bfloat16")
    assert differing_arrangements(check, TOKENS[:270], vocab=320, **FEW) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("backend", "spec"), [("torch", SPEC), ("native", SPEC), ("torch", INDEXED)])
def test_a_node_of_a_tree_has_the_bits_of_its_path(backend: str, spec: DecoderSpec, dtype: str) -> None:
    tokens, parents = (11, 12, 13, 14, 15, 16, 17), (-1, -1, 0, 0, 1, 2, 5)
    driver = build(spec, RandomWeights(spec), num_blocks=800, block_size=5, backend=backend, dtype=dtype)
    driver.run("base", TOKENS[:253])
    driver.share("base", "tree", 253)
    logits = driver.program.step(plan_trees(driver, {"tree": tokens}, {"tree": parents}), LOGITS).logits
    for node in range(len(tokens)):
        alone = run_path(driver, "base", node, [tokens[place] for place in path_to(parents, node)])[-1]
        assert logits[node].tobytes() == alone.tobytes()


@pytest.mark.parametrize("name", ["torch", "native"])
@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_a_block_is_counted_as_the_latents_and_rotated_keys_that_it_holds(dtype: str, width: int, name: str) -> None:
    backend = BACKENDS.get(name)(num_threads=1, device="cpu", dtype=dtype)
    weights = RandomWeights(SPEC)
    need = backend.need(SPEC, weights, block_size=16, max_batched_tokens=64)
    assert need.kv_block_bytes == 2 * 16 * (48 + 16) * width
    program: Any = backend.build(SPEC, weights, KVLayout(10, 16))
    if name == "native":
        assert sum(each.cache.nbytes for each in program._caches) == 10 * need.kv_block_bytes
        return
    assert sum(layer[:-1].nbytes for layer in program._cache.layers) == 10 * need.kv_block_bytes
    assert need.weights_bytes == width * sum(weights.read(name).size for name in weights.names() if name != "embed.weight")


def test_a_block_holds_the_keys_of_the_index_too() -> None:
    backend = BACKENDS.get("torch")(num_threads=1, device="cpu", dtype="float32")
    weights = RandomWeights(INDEXED)
    need = backend.need(INDEXED, weights, block_size=16, max_batched_tokens=64)
    assert need.kv_block_bytes == 2 * 16 * (48 + 16 + 20) * 4
    program: Any = backend.build(INDEXED, weights, KVLayout(10, 16))
    assert sum(layer[:-1].nbytes for layer in program._cache.layers) == 10 * need.kv_block_bytes


def test_an_index_that_may_choose_every_position_changes_no_bit() -> None:
    layers = tuple(
        replace(layer, attention=replace(ATTENTION, index=IndexSpec(3, 20, num_chosen=301))) for layer in SPEC.layers
    )
    weights, wide = RandomWeights(INDEXED), replace(SPEC, layers=layers)
    whole = build(SPEC, weights).run("a", TOKENS, 100)
    assert build(wide, weights).run("a", TOKENS, 100).tobytes() == whole.tobytes()
    found = build(INDEXED, weights).run("a", TOKENS, 100)
    assert found[:40].tobytes() == whole[:40].tobytes()
    assert np.abs(found[40:] - whole[40:]).max() > 1e-2


def test_a_choice_among_many_splits_of_keys_is_the_same_in_any_chunk() -> None:
    driver = build(INDEXED, RandomWeights(INDEXED), num_blocks=300, block_size=16)
    tokens = TOKENS * 3
    whole = driver.run("whole", tokens)
    for chunk in (100, 370):
        assert driver.run(chunk, tokens, chunk).tobytes() == whole.tobytes()


def test_of_equal_scores_the_earlier_position_is_chosen() -> None:
    spec, batch = IndexSpec(num_heads=2, head_dim=16, num_chosen=5), build(SPEC, RandomWeights(SPEC)).plan({"a": TOKENS})
    features, keys = torch.zeros(304, spec.num_features), torch.randn(257 * 16 + 1, 16)
    features[:, -2:] = 1.0
    slots = KeySlots(batch, 16, 256 * 16)
    chosen = choose_positions(spec, features, keys, batch, slots, Team(1))
    assert chosen is not None
    assert chosen.tolist() == [list(range(5))] * 304
    features[:, :16] = 1.0  # now one head prefers some keys
    scores = keys[torch.from_numpy(slots.slots.reshape(-1))[:301]].sum(1).relu()
    chosen = choose_positions(spec, features, keys, batch, slots, Team(1))
    assert chosen is not None
    assert set(chosen[300].tolist()) == set(scores.topk(5).indices.tolist())


class Unread(RandomWeights):
    """Weights that nobody may read."""

    def read(self, name: str) -> Any:
        raise AssertionError(f"{name} was read")


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_the_native_back_end_refuses_latents_in_few_bits_before_it_reads_weights(kv_dtype: str) -> None:
    backend = BACKENDS.get("native")(num_threads=1, device="cpu", dtype="bfloat16", kv_dtype=kv_dtype)
    for call in (
        lambda: backend.need(SPEC, Unread(SPEC), block_size=16, max_batched_tokens=64),
        lambda: backend.build(SPEC, Unread(SPEC), KVLayout(10, 16)),
    ):
        with pytest.raises(ConfigError, match=f"float32 or bfloat16, not in {kv_dtype}.*--kv-dtype") as error:
            call()
        assert error.value.param == "kv_dtype"


def test_the_native_back_end_refuses_a_sparse_index_before_it_reads_weights() -> None:
    backend = BACKENDS.get("native")(num_threads=1, device="cpu")
    with pytest.raises(ConfigError, match=r"sparse attention.*--backend torch"):
        backend.need(INDEXED, Unread(INDEXED), block_size=16, max_batched_tokens=64)


def test_interleaved_rotation_of_plain_heads_is_that_of_sorted_rows_and_cuda_refuses_it() -> None:
    plain = make_spec(hidden=64, intermediate=80, heads=(4, 2), head_dim=16)
    attention = plain.layers[0].grouped_attention
    assert attention.rope is not None
    turned = replace(attention, rope=replace(attention.rope, interleaved=True))
    spec = replace(plain, layers=(replace(plain.layers[0], attention=turned),) * 2)
    with pytest.raises(ConfigError, match="interleaved rotation"):
        limits.check_computable(spec)
    weights, found = RandomWeights(spec), [build(each, RandomWeights(spec)).run("a", TOKENS[:60]) for each in (plain, spec)]
    assert np.abs(found[0] - found[1]).max() > 1e-2
    for layer in range(2):  # rows of neighbours sorted into halves are what half-split rotation wants
        for name, heads in (("q", 4), ("k", 2)):
            matrix = weights.read(f"layers.{layer}.{name}.weight")
            matrix[:] = matrix.reshape(heads, 8, 2, 64).swapaxes(1, 2).reshape(matrix.shape)
    assert build(plain, weights).run("a", TOKENS[:60]).tobytes() == found[1].tobytes()


def test_what_counts_or_runs_plain_heads_only_refuses_latent_attention() -> None:
    dense = replace(SPEC, layers=(LayerSpec(ATTENTION, MlpSpec(90)),))
    for refuse in (
        limits.check_computable,
        check_forward,
        lambda spec: list_operators(spec, Work.decode(100, 1), Numbers()),
    ):
        with pytest.raises(ConfigError, match="latent attention"):
            refuse(dense)


def reference_choice(scores: FloatArray, bias: FloatArray, spec: MoeSpec) -> tuple[list[int], list[float]]:
    """Equations 12 to 16 of DeepSeek-V3, expert by expert."""
    size = spec.num_experts // spec.num_groups
    ranked = scores + bias
    groups = [sorted(ranked[g * size : (g + 1) * size])[::-1][: spec.num_group_scores] for g in range(spec.num_groups)]
    best = sorted(range(spec.num_groups), key=lambda g: -sum(groups[g]))[: spec.num_chosen_groups]
    allowed = [expert for expert in range(spec.num_experts) if expert // size in best]
    chosen = sorted(allowed, key=lambda expert: -ranked[expert])[: spec.num_chosen]
    total = sum(float(scores[expert]) for expert in chosen)
    return chosen, [spec.routed_scale * float(scores[expert]) / total for expert in chosen]


def test_experts_are_chosen_by_biased_scores_in_the_best_groups_and_weighted_by_plain_ones() -> None:
    rng = np.random.default_rng(4)
    logits, bias = rng.standard_normal((32, 8), np.float32), rng.standard_normal(8).astype(np.float32) * np.float32(0.1)
    weights, numbers = choose_experts(MIXTURE, torch.from_numpy(logits), torch.from_numpy(bias))
    scores = 1 / (1 + np.exp(-logits))
    expected = [reference_choice(row, bias, MIXTURE) for row in scores]
    assert numbers.tolist() == [chosen for chosen, _ in expected]
    assert np.allclose(weights, [row for _, row in expected], rtol=1e-5)
    unlimited = choose_experts(replace(MIXTURE, num_groups=1), torch.from_numpy(logits), torch.from_numpy(bias))[1]
    assert unlimited.tolist() != numbers.tolist()


def test_scores_that_are_all_nought_give_no_expert_a_weight() -> None:
    weights, _ = choose_experts(MIXTURE, torch.full((8, 8), -200.0), torch.zeros(8))
    assert weights.abs().max() == 0


NAMES = ("q", "q_a", "q_b", "kv_a", "o", "gate", "up", "down")


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("q_lora_rank", [24, None])
def test_an_adapter_changes_what_merged_weights_change(q_lora_rank: int | None, backend: str, tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", "deepseek_v3", q_lora_rank=q_lora_rank)
    model = load(path)
    adapter = read_adapter(write_adapter(tmp_path / "adapter", path, names=NAMES), model.spec, max_rank=16)
    changed = {name.rpartition(".")[2] for name in adapter.weights.updates}
    assert changed == set(NAMES) - ({"q"} if q_lora_rank else {"q_a", "q_b"})
    driver = build(model.spec, model.weights, backend=backend)
    driver.program.load_adapter(0, adapter.weights)
    batch = replace(driver.plan({"a": TOKENS[:90]}), adapters=np.zeros(1, np.int32))
    found = driver.program.step(batch, LOGITS).logits
    expected = build(model.spec, MergedWeights(model.weights, adapter.weights)).run("a", TOKENS[:90])
    plain = build(model.spec, model.weights).run("a", TOKENS[:90])
    assert np.abs(found - expected).max() < 3e-4 * np.abs(expected).max()
    assert np.abs(found - plain).max() > 1e-2


def test_an_adapter_of_kv_b_is_refused_by_name(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", "deepseek_v3")
    adapter = write_adapter(tmp_path / "adapter", path, names=("kv_a",))
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"kv_a_proj_with_mqa", b"kv_b_proj_with_mqa"))
    with pytest.raises(ModelError, match="kv_b_proj"):
        read_adapter(adapter, load(path).spec, max_rank=16)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_its_weights_in_few_bits_give_about_the_same_logits(name: str, backend: str) -> None:
    attention = replace(ATTENTION, num_heads=4, q_lora_rank=64, kv_lora_rank=64, v_head_dim=32)
    spec = replace(
        SPEC, hidden_size=128, layers=(LayerSpec(attention, MlpSpec(128)), LayerSpec(attention, replace(
            MIXTURE, num_experts=2, num_chosen=2, num_groups=1, expert=MlpSpec(128), shared=MlpSpec(128)))),
    )  # fmt: skip
    weights = RandomWeights(spec)
    few = quantize_on_read(spec, weights, FORMATS.get(name)(FormatOptions()))
    kinds = {each.split(".")[-2] for each in few.names() if few.form(each) is not None}
    assert kinds >= {"q_a", "q_b", "kv_a", "o", "gate", "up", "down"}
    assert not kinds & {"kv_b", "router"}
    exact, rounded = (build(spec, each, backend=backend).run("a", TOKENS[:60]) for each in (weights, few))
    assert 1e-4 < np.abs(exact - rounded).mean() < (0.1 if name == "int8" else 0.6)
