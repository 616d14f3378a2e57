"""Families whose layers have a state, against transformers, and cut into steps of any size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from cloister.backends.base import LOGITS
from cloister.backends.torch.cuda import limits
from cloister.bench.roofline_operators import Numbers, Work, list_operators
from cloister.models import load
from cloister.models.adapters import read_adapter
from cloister.quant import FORMATS, FormatOptions, quantize_on_read
from cloister.quant.forward import check_forward
from cloister.types.errors import ConfigError, ModelError
from tests.adapter_factory import MergedWeights, write_adapter
from tests.driving import build, build_from
from tests.model_factory import centre_norms, make_model, randomise, small_fields, write_tokenizer
from tests.native import in_turns
from tests.reference import compare, reference_logits
from tests.thinning import thin

TOKENS = np.random.default_rng(1).integers(0, 320, 150).tolist()
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("mamba2", {}),
    "mamba2, biases, one group, tied": (
        "mamba2", {"use_bias": True, "n_groups": 1, "tie_word_embeddings": True, "conv_kernel": 3},
    ),
    "mamba2, no bias of the convolution, limited time steps": (
        "mamba2", {"use_conv_bias": False, "time_step_limit": [0.2, 1.5]},
    ),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next, dense layers, biases, tied, one key head": (
        "qwen3_next",
        {"mlp_only_layers": [0, 1], "attention_bias": True, "tie_word_embeddings": True, "linear_num_key_heads": 1,
         "norm_topk_prob": False},
    ),
    "qwen3_next, beyond the original context, all of a head turned": (
        "qwen3_next",
        {"rope_parameters": {**YARN, "partial_rotary_factor": 1.0},
         "layer_types": ["full_attention", "full_attention", "linear_attention"]},
    ),
    "lfm2": ("lfm2", {}),
    "lfm2, biases, a long filter, tied": (
        "lfm2", {"conv_bias": True, "conv_L_cache": 6, "tie_word_embeddings": True, "block_auto_adjust_ff_dim": False},
    ),
    "lfm2_moe": ("lfm2_moe", {}),
    "lfm2_moe, no bias of experts, scores as they are, tied": (
        "lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False, "tie_word_embeddings": True, "num_dense_layers": 0},
    ),
    "granite 4, experts": ("granitemoehybrid", {}),
    "granite 4, no experts, turned, biases": (
        "granitemoehybrid",
        {"num_local_experts": 0, "position_embedding_type": "rope", "attention_bias": True, "mamba_proj_bias": True},
    ),
    "falcon_h1": ("falcon_h1", {}),
    "falcon_h1, norm before the gate, biases": (
        "falcon_h1",
        {"mamba_rms_norm": True, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True},
    ),
    "falcon_h1, norm after the gate, size from the hidden one": (
        "falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_ssm": None, "mamba_d_head": "auto"},
    ),
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3.5, tied, positions of images": (
        "qwen3_5_text",
        {"tie_word_embeddings": True, "attention_bias": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5,
                             "mrope_section": [3, 3, 2], "mrope_interleaved": True}},
    ),
    "qwen3.5, experts": ("qwen3_5_moe_text", {}),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h, biases, one group of experts": (
        "nemotron_h",
        {"use_bias": True, "mlp_bias": True, "n_group": 1, "topk_group": 1, "use_conv_bias": False,
         "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "moe"]},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def recurrent(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes prompts of gated delta nets in chunks, whose float32 sums are as far from its own token by token
    form as from ours."""
    for module in (modeling_qwen3_next, modeling_qwen3_5, modeling_qwen3_5_moe):
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", torch_recurrent_gated_delta_rule)


@pytest.mark.parametrize("name", thin(VARIANTS, 10))
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, config = VARIANTS[name]
    agreement = compare(make_model(tmp_path, family, **config))
    assert agreement.difference <= 1e-4
    assert agreement.num_equal == agreement.num_tokens


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_decoder_of_a_model_that_sees_images_is_read_for_text(family: str, tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    text = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1, **small_fields(f"{family}_text")}
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(family, text_config=text, vision_config=vision, tie_word_embeddings=False)
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        randomise(model, tied=False)
    centre_norms(model)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with torch.no_grad():
        theirs = model(torch.tensor([TOKENS])).logits[0].numpy()
    loaded = load(tmp_path, strict=True)
    assert loaded.spec.vision is None
    assert loaded.info.eos_token_ids == (1,)
    assert np.abs(build(loaded.spec, loaded.weights).run("a", TOKENS) - theirs).max() <= 1e-4


FAMILIES = sorted({family for family, _ in VARIANTS.values()})


@pytest.mark.parametrize("family", thin(FAMILIES, 4))
def test_a_prompt_has_the_same_bits_in_steps_of_any_size(family: str, tmp_path: Path) -> None:
    driver = build_from(make_model(tmp_path, family))
    whole = driver.run("whole", TOKENS[:60])
    for chunk in (1, 7, 40):
        assert np.array_equal(driver.run(chunk, TOKENS[:60], chunk), whole)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a variant."""
    family, config = VARIANTS[request.param]
    return make_model(tmp_path_factory.mktemp(family), family, **config)


@pytest.mark.parametrize(("model", "kernels"), in_turns(VARIANTS), indirect=["model"])
def test_native_logits_are_those_of_transformers_in_steps_of_any_size(model: Path, kernels: str) -> None:
    agreement = compare(model, backend="native", kernels=kernels)
    assert agreement.difference <= 1e-4
    assert agreement.num_equal == agreement.num_tokens
    driver = build_from(model, backend="native", kernels=kernels)
    whole = driver.run("whole", TOKENS[:60])
    for chunk in (1, 2, 7, 40):
        assert np.array_equal(driver.run(chunk, TOKENS[:60], chunk), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_computes_no_states_refuses_them_before_weights_are_read(family: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, family)
    spec = load(path).spec
    with pytest.raises(ConfigError, match="layers with a state"):
        limits.check_computable(spec)
    with pytest.raises(ConfigError, match="with a state"):
        list_operators(spec, Work.decode(4, 2), Numbers())
    with pytest.raises(ConfigError, match="text runs through decoders of"):
        check_forward(spec)


def configure(path: Path, *without: str, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in without}
    (path / "config.json").write_text(json.dumps({**kept, **fields}))


@pytest.mark.parametrize(("family", "field"), [("mamba2", "chunk_size"), ("granitemoehybrid", "mamba_chunk_size")])
def test_the_chunks_that_transformers_computes_prompts_in_change_no_answer(family: str, field: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, family)
    spec, logits = load(path).spec, reference_logits(path, TOKENS)
    configure(path, **{field: 16})
    assert load(path).spec == spec
    assert np.abs(reference_logits(path, TOKENS) - logits).max() <= 1e-4


def test_the_older_names_of_lfm2_mean_the_same(tmp_path: Path) -> None:
    path = make_model(tmp_path, "lfm2")
    spec = load(path).spec
    configure(path, "layer_types", "intermediate_size", "tie_word_embeddings",
              full_attn_idxs=[1], block_ff_dim=100, tie_embedding=False)  # fmt: skip
    assert load(path, strict=True).spec == spec


def test_the_older_kinds_of_layers_of_granite_mean_the_same(tmp_path: Path) -> None:
    path = make_model(tmp_path, "granitemoehybrid")
    spec = load(path).spec
    configure(path, "layer_types", layers_block_type=["mamba", "attention", "mamba"])
    assert load(path, strict=True).spec == spec


def test_the_letters_of_nemotron_mean_the_same(tmp_path: Path) -> None:
    path = make_model(tmp_path, "nemotron_h")
    spec = load(path).spec
    configure(path, "layers_block_type", hybrid_override_pattern="ME*-M", num_hidden_layers=5)
    assert load(path, strict=True).spec == spec
    configure(path, hybrid_override_pattern="ME*-M", num_hidden_layers=4)
    with pytest.raises(ModelError, match="num_hidden_layers"):
        load(path)


@pytest.mark.parametrize("kind", ["attends", ["moe"], {}])
def test_a_kind_of_layer_that_nemotron_does_not_have_is_refused(kind: object, tmp_path: Path) -> None:
    path = make_model(tmp_path, "nemotron_h")
    configure(path, layers_block_type=["linear_attention", kind, "full_attention", "mlp", "linear_attention"])
    with pytest.raises(ModelError, match="layers_block_type"):
        load(path)


@pytest.mark.parametrize("kind", ["attends", ["full_attention"], {}])
def test_a_kind_of_layer_that_granite_does_not_have_is_refused(kind: object, tmp_path: Path) -> None:
    path = make_model(tmp_path, "granitemoehybrid")
    configure(path, layer_types=["linear_attention", kind, "full_attention"])
    with pytest.raises(ModelError, match="layer_types"):
        load(path)


def test_qwen3_next_without_a_list_of_layers_attends_in_every_fourth(tmp_path: Path) -> None:
    path = make_model(tmp_path, "qwen3_next", num_hidden_layers=4, layer_types=None)
    configure(path, "layer_types")
    assert [layer.attention is not None for layer in load(path).spec.layers] == [False, False, False, True]
    assert np.abs(build_from(path).run("a", TOKENS) - reference_logits(path, TOKENS)).max() <= 1e-4


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    path = make_model(tmp_path, "qwen3_next")
    names = load(path).weights.names()
    file = path / "model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": np.zeros((3, 4), np.float32)}, file, {"format": "pt"})
    assert load(path).weights.names() == names


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_of_mixers_are_written_in_few_bits(family: str, tmp_path: Path) -> None:
    model = load(make_model(tmp_path, family))
    weights = quantize_on_read(model.spec, model.weights, FORMATS.get("int8")(FormatOptions()))
    written = {name.split(".")[-2] for name in weights.names() if ".mixer." in name and weights.form(name) is not None}
    assert written == ({"q", "k", "v", "z", "out"} if family.startswith("qwen") else {"in", "out"})
    exact = build(model.spec, model.weights).run("a", TOKENS[:30])
    difference = build(model.spec, weights).run("a", TOKENS[:30]) - exact
    assert 0 < difference.std() < 0.1 * exact.std()


@pytest.mark.parametrize(
    ("family", "backend"),
    [("falcon_h1", "torch"), ("falcon_h1", "native"), ("lfm2", "torch"), ("lfm2", "native")],
)
def test_an_adapter_changes_what_merged_weights_change(family: str, backend: str, tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", family)
    model, adapter = load(path), read_adapter(write_adapter(tmp_path / "adapter", path), load(path).spec, max_rank=16)
    driver = build(model.spec, model.weights, backend=backend)
    driver.program.load_adapter(0, adapter.weights)
    found = driver.program.step(replace(driver.plan({"a": TOKENS[:60]}), adapters=np.zeros(1, np.int32)), LOGITS).logits
    expected = build(model.spec, MergedWeights(model.weights, adapter.weights), backend=backend).run("a", TOKENS[:60])
    assert np.abs(found - expected).max() <= 1e-3
    assert np.abs(found - build(model.spec, model.weights, backend=backend).run("a", TOKENS[:60])).max() > 0.1


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_an_adapter_of_queries_changes_their_gates_too(backend: str, tmp_path: Path) -> None:
    path, rng = make_model(tmp_path / "model", "qwen3_next"), np.random.default_rng(4)
    a, b = (rng.standard_normal(shape, dtype=np.float32) * np.float32(0.2) for shape in ((8, 64), (256, 8)))
    module = "model.layers.1.self_attn.q_proj"
    write_adapter(tmp_path / "adapter", path, names=())
    sides = {f"base_model.model.{module}.lora_{side}.weight": matrix for side, matrix in (("A", a), ("B", b))}
    save_file(sides, tmp_path / "adapter" / "adapter_model.safetensors")
    model = load(path)
    adapter = read_adapter(tmp_path / "adapter", model.spec, max_rank=16)
    assert set(adapter.weights.updates) == {"layers.1.q", "layers.1.q_gate"}
    driver = build(model.spec, model.weights, backend=backend)
    driver.program.load_adapter(0, adapter.weights)
    found = driver.program.step(replace(driver.plan({"a": TOKENS[:60]}), adapters=np.zeros(1, np.int32)), LOGITS).logits
    plain, file = build(model.spec, model.weights, backend=backend).run("a", TOKENS[:60]), path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, f"{module}.weight": tensors[f"{module}.weight"] + 2 * (b @ a)}, file, {"format": "pt"})
    assert np.abs(found - build_from(path, backend=backend).run("a", TOKENS[:60])).max() <= 1e-4
    assert np.abs(found - plain).max() > 1e-2
