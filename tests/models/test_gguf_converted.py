"""GGUF files of families with experts, latent attention, windows or a state answer as the checkpoints that they come from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloister.backends import BACKENDS
from cloister.backends.base import KVLayout, Weights
from cloister.backends.native.program import NativeProgram
from cloister.backends.tensors import GroupedTensor, dequantized
from cloister.models import load
from cloister.types.errors import ModelError
from tests.driving import Driver, GivenWeights, build
from tests.gguf_converter import convert
from tests.thinning import thin

TOKENS = np.random.default_rng(1).integers(0, 320, 90).tolist()
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0}
LATENT_YARN = {**YARN, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 0.7}
FACTOR = {**YARN, "rope_theta": 500000.0, "beta_slow": 1.0, "attention_factor": 1.3}
LOCAL = {"rope_type": "default", "rope_theta": 400000.0}
DELTA = {"linear_value_head_dim": 12}
LOCAL_AND_GLOBAL = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
WHOLE_TABLE = {"altup_num_inputs": 4, "vocab_size_per_layer_input": 320}
UNREAD = {f"blk.4.attn_{name}.weight": np.ones((48, 64), np.float32) for name in "kv"} | {
    "blk.4.attn_k_norm.weight": np.ones(24, np.float32)
}
"""Keys and values of a layer that reads those of another."""
GREEDY = {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek2, V2": ("deepseek_v2", {"rope_parameters": LATENT_YARN}),
    "deepseek2, V2 Lite": ("deepseek_v2", {"q_lora_rank": None, **GREEDY}),
    "deepseek2, V2, before kv_b was cut": ("deepseek_v2", {"old": True, "rope_parameters": LATENT_YARN}),
    "deepseek2, V3": ("deepseek_v3", {"rope_parameters": LATENT_YARN, "norm_topk_prob": True}),
    "deepseek2, V3, with a layer that predicts further": ("deepseek_v3", {"mtp": True, "old": True}),
    "glm4moe": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "mtp": True}),
    "glm4moe, without norms of q and k": ("glm4_moe", {"use_qk_norm": False}),
    "glm4moe, with fused experts": ("glm4_moe", {"fused": True}),
    "minimax-m2": (
        "minimax_m2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "llama4": ("llama4_text", {"attention_chunk_size": 8192, "floor_scale": 8192}),
    "mistral3": (
        "ministral3",
        {"rope_parameters": {**YARN, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
    ),
    "cohere2": ("cohere2", {"num_hidden_layers": 4, "sliding_window": 40, "logit_scale": 0.3}),
    "olmo2, of OLMo 3": ("olmo3", {"num_hidden_layers": 4, "sliding_window": 40}),
    "olmo2, of OLMo 3, stretched": (
        "olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 40,
            "rope_parameters": {"full_attention": FACTOR, "sliding_attention": LOCAL},
        },
    ),
    "qwen3next": ("qwen3_next", DELTA),
    "qwen3next, before projections were cut": ("qwen3_next", {**DELTA, "old": True}),
    "qwen35": ("qwen3_5_text", DELTA),
    "qwen35moe": ("qwen3_5_moe_text", {**DELTA, "mtp": True}),
    "granitemoe, of Granite 3": ("granitemoe", {}),
    "lfm2moe": ("lfm2_moe", {"tie_word_embeddings": True}),
    "lfm2": ("lfm2", {"tie_word_embeddings": True}),
    "granitehybrid": ("granitemoehybrid", {"position_embedding_type": "rope"}),
    "granitehybrid, without experts": ("granitemoehybrid", {"num_local_experts": 0, "num_experts_per_tok": 0}),
    "granitemoe": (
        "granitemoehybrid",
        {
            "architecture": "granitemoe",
            "position_embedding_type": "rope",
            "layer_types": ["full_attention"] * 3,
        },
    ),
    "granite, of Granite 4": (
        "granitemoehybrid",
        {
            "architecture": "granite",
            "position_embedding_type": "rope",
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
        },
    ),
    "falcon-h1": ("falcon_h1", {}),
    "falcon-h1, with a norm": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "nemotron_h_moe": ("nemotron_h", {"n_group": 1, "topk_group": 1}),
    "nemotron_h": (
        "nemotron_h",
        {
            "architecture": "nemotron_h",
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
        },
    ),
    "mamba2": ("mamba2", {}),
    "gemma3n": ("gemma3n_text", {**WHOLE_TABLE, "rope_parameters": LOCAL_AND_GLOBAL, "more": UNREAD}),
    "gemma3n, eleven layers, the second stream active": (
        "gemma3n_text",
        {
            **WHOLE_TABLE,
            "altup_active_idx": 1,
            "num_hidden_layers": 11,
            "intermediate_size": 96,
            "activation_sparsity_pattern": [0.95] * 10 + [0.0],
            "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 2 + ["sliding_attention"],
        },
    ),
    "gemma3n, a table of fewer tokens": ("gemma3n_text", {}),
}
FOLDED = ("falcon_h1",)
"""Families whose multipliers are in the weights of a GGUF file."""


@pytest.mark.parametrize("name", thin(VARIANTS, 11))
def test_a_file_answers_as_the_checkpoint_that_it_was_made_of(name: str, tmp_path: Path) -> None:
    family, config = VARIANTS[name]
    file = convert(tmp_path / "tiny", family, **config)
    ours, expected = (load(path, max_model_len=2048) for path in (file, tmp_path / "tiny"))
    if family not in FOLDED:
        for found, wanted in zip(ours.spec.layers, expected.spec.layers, strict=True):
            assert _rounded(found) == _rounded(wanted)
    logits = build(expected.spec, expected.weights).run("a", TOKENS)
    assert np.abs(build(ours.spec, ours.weights).run("a", TOKENS) - logits).max() <= 1e-5 * max(1.0, logits.std())


@pytest.mark.parametrize("name", thin((name for name, (family, _) in VARIANTS.items() if family not in FOLDED), 11))
def test_quantised_tensors_stay_codes_in_the_order_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    family, config = VARIANTS[name]
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 32} if config.items() >= DELTA.items() else {}
    sizes |= {"hidden_size_per_layer_input": 32} if family == "gemma3n_text" else {}
    sizes |= {"qk_nope_head_dim": 32, "kv_lora_rank": 32} if family.startswith("deepseek") else {}
    file = convert(tmp_path / "tiny", family, "Q8_0", **config | sizes)
    ours, expected = load(file).weights, load(tmp_path / "tiny").weights
    assert set(ours.names()) == set(expected.names())
    num_codes = 0
    for tensor in ours.names():
        found, wanted = ours.read(tensor), dequantized(expected.read(tensor)).astype(np.float32)
        assert found.shape == wanted.shape == ours.shape(tensor)
        assert np.abs(dequantized(found) - wanted).max() <= np.abs(wanted).max() / 100, tensor
        assert isinstance(found, GroupedTensor) == (ours.form(tensor) is not None)
        num_codes += isinstance(found, GroupedTensor)
    assert num_codes > 4


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "sigmoids without a bias": ("deepseek_v2", {"expert_gating_func": 2}, r"lacks the tensor 'blk\.1\.exp_probs_b\.bias'"),
    "other scores": ("glm4_moe", {"expert_gating_func": 1}, "'expert_gating_func' .* is only supported as 2"),
    "other groups": ("deepseek_v3", {"expert_group_count": 3}, "n_group must cut 8 experts into equal groups"),
    "halves of other sizes": ("deepseek_v3", {"attention.value_length_mla": 12}, r"'blk\.0\.attn_k_b\.weight' .* contradicts"),
    "heads that are turned whole": ("deepseek_v3", {"attention.key_length_mla": 8}, "more numbers than the 8 that are turned"),
    "an odd rotation": ("deepseek_v3", {"rope.dimension_count": 7}, "'rope.dimension_count' .* must be even"),
    "too few numbers": ("lfm2", {"attention.head_count_kv": [0, 2]}, "'attention.head_count_kv' .* for each of 3 layers"),
    "numbers of another type": ("lfm2", {"attention.head_count_kv": ["a", "b", "c"]}, "must hold a whole number"),
    "more predicting layers than layers": ("qwen3_5_text", {"nextn_predict_layers": 3}, "must be less than its 3 layers"),
    "heads of no equal size": ("qwen3_next", {"ssm.time_step_rank": 5}, "'ssm.inner_size' .* must be a multiple of its heads"),
    "another hidden size": ("mamba2", {"ssm.inner_size": 100}, "'ssm.inner_size' .* must be a multiple of 'embedding_length'"),
    "experts with a latent": ("nemotron_h", {"moe_latent_size": 16}, "'moe_latent_size' .* is only supported as None"),
    "deviations of too few layers": (
        "gemma3n_text",
        {"activation_sparsity_scale": [0.5] * 5},
        "'activation_sparsity_scale' .* a number of deviations for each of 6 layers",
    ),
    "deviations of no number": (
        "gemma3n_text",
        {"activation_sparsity_scale": [float("nan")] * 6},
        "'activation_sparsity_scale' .* a number of deviations",
    ),
    "deviations in words": (
        "gemma3n_text",
        {"activation_sparsity_scale": ["a"] * 6},
        "'activation_sparsity_scale' .* a number",
    ),
    "another number of streams": ("gemma3n_text", {"altup.num_inputs": 9}, r"'blk\.0\.altup_router\.weight' has the shape"),
    "a layer whose keys nobody has": ("gemma3n_text", {"attention.shared_kv_layers": 2}, r"'blk\.3\.attn_k\.weight'"),
    "widths of too few layers": (
        "gemma3n_text",
        {"feed_forward_length": [96] * 5},
        "'feed_forward_length' .* each of 6 layers",
    ),
    "growing queries": ("deepseek_v3", {"attention.temperature_scale": 0.1}, "'attention.temperature_scale' that is not known"),
}


@pytest.mark.parametrize("name", WRONG)
def test_entries_that_do_not_fit_are_told(name: str, tmp_path: Path) -> None:
    family, changed, message = WRONG[name]
    config = {"n_group": 1, "topk_group": 1} if family == "nemotron_h" else DELTA if family.startswith("qwen3") else {}
    file = convert(tmp_path / "tiny", family, changed=changed, **config)
    with pytest.raises(ModelError, match=message):
        load(file)


@pytest.mark.parametrize("name", ["per_layer_token_embd.weight", "blk.0.laurel_l.weight"])
def test_a_tensor_whose_shape_says_a_size_must_be_there(name: str, tmp_path: Path) -> None:
    file = convert(tmp_path / "tiny", "gemma3n_text")
    content = file.read_bytes()
    assert content.count(name.encode()) == 1
    file.write_bytes(content.replace(name.encode(), name.upper().encode()))
    with pytest.raises(ModelError, match=f"lacks the tensor '{name}'"):
        load(file)


TABLE = "layer_inputs.embed.weight"


class TableOfNumbers(GivenWeights):
    """The same weights, the inputs of layers in numbers."""

    def __init__(self, weights: Weights) -> None:
        super().__init__({**dict(weights), TABLE: dequantized(weights.read(TABLE))})
        self._forms = {name: None if name == TABLE else weights.form(name) for name in weights.names()}

    def form(self, name: str) -> Any:
        return self._forms[name]


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_codes_of_layer_inputs_stand_for_their_numbers_and_take_what_was_named(backend: str, tmp_path: Path) -> None:
    model = load(convert(tmp_path / "tiny", "gemma3n_text", "Q8_0", **WHOLE_TABLE, hidden_size_per_layer_input=32))
    table = model.weights.read(TABLE)
    assert isinstance(table, GroupedTensor)
    maker = BACKENDS.get(backend)(num_threads=1, device="cpu", dtype="float32")
    both = (model.weights, TableOfNumbers(model.weights))
    programs = [maker.build(model.spec, weights, KVLayout(16, 16)) for weights in both]
    codes, numbers = (Driver(program, 16, 16).run("a", TOKENS) for program in programs)
    assert np.abs(codes - numbers).max() < 1e-5
    needs = [maker.need(model.spec, weights, block_size=16, max_batched_tokens=64).weights_bytes for weights in both]
    held = table.codes.nbytes + table.scales.nbytes
    if isinstance(programs[0], NativeProgram):
        held = sum(part.nbytes for part in programs[0]._table.packed.parts.values())  # type: ignore[union-attr]
    assert needs[0] - needs[1] == held


def test_a_decay_without_a_logarithm_is_refused_when_it_is_read(tmp_path: Path) -> None:
    file = convert(tmp_path / "tiny", "mamba2")
    decay = np.array(load(tmp_path / "tiny").weights.read("layers.1.mixer.A_log"))
    stored = (-np.exp(decay)).tobytes()
    content = file.read_bytes()
    assert content.count(stored) == 1
    file.write_bytes(content.replace(stored, np.exp(decay).tobytes()))
    with pytest.raises(ModelError, match=r"'blk\.1\.ssm_a' .* has numbers without a meaning"):
        load(file).weights.read("layers.1.mixer.A_log")


def test_heads_whose_blocks_would_be_parted_are_refused(tmp_path: Path) -> None:
    file = convert(tmp_path / "tiny", "qwen3_5_text", "Q8_0", linear_num_value_heads=4, linear_value_head_dim=16)
    with pytest.raises(ModelError, match="no multiple of 32 must not be quantised"):
        load(file).weights.read("layers.0.mixer.out.weight")


def _rounded(value: Any) -> Any:
    """The text of a spec, its numbers rounded to what a float32 keeps of them."""
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda match: f"{float(match.group()):.5g}", repr(value))
