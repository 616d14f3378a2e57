"""Gemma 3n's text part against transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cloister.backends import BACKENDS
from cloister.backends.base import LOGITS, KVLayout
from cloister.backends.spec import group_layers
from cloister.models import load
from cloister.models.adapters import read_adapter
from cloister.models.decoder import find_family, read_spec
from cloister.models.text_part import take_text_part
from cloister.quant import FORMATS, FormatOptions, quantize_on_read
from cloister.types.errors import ModelError
from tests.adapter_factory import MergedWeights, write_adapter
from tests.driving import build, build_from
from tests.model_factory import make_model
from tests.reference import compare
from tests.thinning import every_second, thin

TOKENS = np.random.default_rng(1).integers(0, 320, 150).tolist()
KINDS = ["sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "shared KV, sparse gates, widths by layer, tokens past the table": {},
    "no shared KV, one width, a head of its own": {
        "num_kv_shared_layers": 0, "intermediate_size": 70, "tie_word_embeddings": False, "vocab_size_per_layer_input": 320,
    },
    "the last stream active, not scaled, biases": {
        "altup_active_idx": 2, "altup_correct_scale": False, "attention_bias": True, "num_key_value_heads": 1,
    },
    "one stream, all layers but two share": {
        "altup_num_inputs": 1, "num_hidden_layers": 5, "intermediate_size": 70, "activation_sparsity_pattern": [0.0] * 5,
        "layer_types": ["full_attention", "sliding_attention", *KINDS, "full_attention"],
    },
    "eleven layers of the default kinds, ten of them sparse, each kind with its own rotation": {
        "num_hidden_layers": 11, "intermediate_size": 400, "activation_sparsity_pattern": None, "layer_types": None,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", thin(VARIANTS, every_second(VARIANTS)))
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    agreement = compare(make_model(tmp_path, "gemma3n_text", **VARIANTS[name]), TOKENS)
    assert agreement.difference <= 1e-4
    assert agreement.num_equal == agreement.num_tokens


TEXT: dict[str, Any] = {
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "altup_active_idx": 0, "altup_coef_clip": 120.0,
    "altup_correct_scale": True, "altup_lr_multiplier": 1.0, "altup_num_inputs": 4, "attention_bias": False,
    "attention_dropout": 0.0, "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2048, "hidden_size_per_layer_input": 256, "initializer_range": 0.02, "intermediate_size": [8192] * 30,
    "laurel_rank": 64, "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 6, "max_position_embeddings": 32768,
    "model_type": "gemma3n_text", "num_attention_heads": 8, "num_hidden_layers": 30, "num_key_value_heads": 2,
    "num_kv_shared_layers": 10, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0,
    "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 262400, "vocab_size_per_layer_input": 262144,
}  # fmt: skip
WHOLE: dict[str, Any] = {
    "architectures": ["Gemma3nForConditionalGeneration"], "audio_config": {"model_type": "gemma3n_audio"},
    "audio_token_id": 262273, "eos_token_id": [1, 106], "model_type": "gemma3n", "text_config": TEXT,
    "vision_config": {"model_type": "gemma3n_vision"},
}  # fmt: skip


def test_the_config_of_e2b_on_the_hub_is_read_whole() -> None:
    unknown: list[str] = []
    config = take_text_part(WHOLE)
    spec = read_spec(find_family(config), config, None, unknown.extend)
    assert unknown == []
    attentions = [layer.grouped_attention for layer in spec.layers]
    assert [attention.shared_kv for attention in attentions] == [None] * 20 + [18, 18, 18, 18, 19] * 2
    assert attentions[18].window == 512
    assert attentions[19].window is None
    assert attentions[18].rope != attentions[19].rope
    assert [group.layers for group in group_layers(spec, 4096)] == [
        frozenset(range(4, 30, 5)),
        frozenset(range(30)) - frozenset(range(4, 30, 5)),
    ]


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_checkpoint_with_towers_and_keys_of_layers_that_share_computes_its_text_part(backend: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, "gemma3n_text")
    before = build_from(path, backend=backend).run("a", TOKENS)
    stored = load_file(path / "model.safetensors")
    unused = ("vision_tower.stem.weight", "audio_tower.conv.weight", "embed_vision.embedding.weight", "embed_audio.norm.weight")
    others = {f"model.{name}": np.ones(3, np.float32) for name in unused}
    names = ("k_proj", "v_proj", "k_norm")
    shared = {f"model.layers.{layer}.self_attn.{name}.weight": np.ones(3, np.float32) for layer in (3, 5) for name in names}
    found = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in {**stored, **shared}.items()}
    save_file(found | others, path / "model.safetensors")
    text = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**WHOLE, "text_config": text, "tie_word_embeddings": True}))
    assert build_from(path, backend=backend).run("a", TOKENS).tobytes() == before.tobytes()


@pytest.mark.parametrize("field", ["intermediate_size", "activation_sparsity_pattern"])
@pytest.mark.parametrize("value", [[0.5] * 5, ["wide"] * 6, [1.5] * 6, "wide", [-1] * 6])
def test_lists_of_another_length_or_kind_are_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    path = make_model(tmp_path, "gemma3n_text")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ModelError, match=field):
        load(path)


def test_layers_that_share_take_no_memory_and_tables_by_token_stay_on_disk(tmp_path: Path) -> None:
    model = load(make_model(tmp_path, "gemma3n_text"))
    backend = BACKENDS.get("torch")(num_threads=1, device="cpu", dtype="float32")
    need = backend.need(model.spec, model.weights, block_size=16, max_batched_tokens=64)
    assert need.kv_layer_bytes == (2 * 2 * 24 * 16 * 4,) * 3 + (0,) * 3
    program: Any = backend.build(model.spec, model.weights, KVLayout(10, 16))
    assert sum(layer[:-1].nbytes for layer in program._cache.layers) == 10 * need.kv_block_bytes
    held = {name for name in model.weights.names() if name != "layer_inputs.embed.weight"}
    assert need.weights_bytes == 4 * sum(model.weights.read(name).size for name in held)


@pytest.mark.parametrize("number_format", ["int8", "int4"])
def test_matrices_are_written_in_few_bits(number_format: str, tmp_path: Path) -> None:
    model = load(make_model(tmp_path, "gemma3n_text"))
    weights = quantize_on_read(model.spec, model.weights, FORMATS.get(number_format)(FormatOptions()))
    assert weights.form("layers.4.q.weight") is not None
    exact = build(model.spec, model.weights).run("a", TOKENS[:60])
    difference = build(model.spec, weights).run("a", TOKENS[:60]) - exact
    assert 0 < difference.std() < 0.5 * exact.std()


def test_an_adapter_changes_what_merged_weights_change(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", "gemma3n_text")
    model = load(path)
    adapter = read_adapter(write_adapter(tmp_path / "adapter", path, size=0.1), model.spec, max_rank=16)
    assert "layers.2.k" in adapter.weights.updates
    assert "layers.3.k" not in adapter.weights.updates
    driver = build(model.spec, model.weights)
    driver.program.load_adapter(0, adapter.weights)
    batch = replace(driver.plan({"a": TOKENS[:60]}), adapters=np.zeros(1, np.int32))
    found = driver.program.step(batch, LOGITS).logits
    expected = build(model.spec, MergedWeights(model.weights, adapter.weights)).run("a", TOKENS[:60])
    assert np.abs(found - expected).max() <= 1e-3
    assert np.abs(found - build(model.spec, model.weights).run("a", TOKENS[:60])).max() > 0.01
