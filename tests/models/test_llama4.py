"""Llama 4's text part against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cloister.backends.spec import MoeSpec
from cloister.models import load
from cloister.models.decoder import find_family, read_spec
from cloister.models.text_part import take_text_part
from cloister.types.errors import ModelError
from tests.driving import build_from
from tests.model_factory import make_model
from tests.reference import compare
from tests.thinning import every_second, thin

TOKENS = np.random.default_rng(1).integers(0, 320, 150).tolist()
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "beyond the chunk, dense and mixed layers": {"attention_chunk_size": 40},
    "Scout: experts in every layer, one chosen, one bound of the scaling": {
        "interleave_moe_layer_step": 1, "num_experts_per_tok": 1, "rope_parameters": LLAMA3,
    },
    "Maverick: no norms of q and k, tied": {"use_qk_norm": False, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "biases, no growth, other layers turned than see chunks": {
        "attention_bias": True, "attn_temperature_tuning": False, "no_rope_layers": [0, 1, 1, 0], "moe_layers": [0, 3],
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention", "full_attention"],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", thin(VARIANTS, every_second(VARIANTS)))
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    agreement = compare(make_model(tmp_path, "llama4_text", **VARIANTS[name]))
    assert agreement.difference <= 1e-4
    assert agreement.num_equal == agreement.num_tokens


TEXT: dict[str, Any] = {
    "_attn_implementation_autoset": True, "attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0,
    "attn_scale": 0.1, "attn_temperature_tuning": 4, "bos_token_id": 200000, "eos_token_id": [200001, 200007, 200008],
    "floor_scale": 8192, "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    "initializer_range": 0.02, "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "max_position_embeddings": 10485760, "model_type": "llama4_text", "no_rope_layers": [], "num_attention_heads": 40,
    "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16,
    "output_router_logits": False, "pad_token_id": 200018, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "torch_dtype": "bfloat16", "use_cache": True,
    "use_qk_norm": True, "vocab_size": 202048,
}  # fmt: skip
SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
    "image_token_index": 200092, "model_type": "llama4", "text_config": TEXT, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vision_config": {"model_type": "llama4_vision_model"},
}  # fmt: skip


def test_the_config_of_scout_on_the_hub_is_read_whole() -> None:
    unknown: list[str] = []
    config = take_text_part(SCOUT)
    spec = read_spec(find_family(config), config, None, unknown.extend)
    assert unknown == []
    assert spec.max_positions == 10485760
    assert [layer.attention.window for layer in spec.layers[:4]] == [8192, 8192, 8192, None]
    assert [layer.grouped_attention.query_growth is None for layer in spec.layers[:4]] == [True, True, True, False]
    assert all(isinstance(layer.mlp, MoeSpec) and layer.mlp.num_experts == 16 for layer in spec.layers)


def test_a_checkpoint_with_a_vision_tower_computes_its_text_part(tmp_path: Path) -> None:
    path = make_model(tmp_path, "llama4_text")
    before = build_from(path).run("a", TOKENS)
    stored = load_file(path / "model.safetensors")
    names = ("vision_model.layernorm_pre.weight", "multi_modal_projector.linear_1.weight")
    tower = {name: np.ones(3, np.float32) for name in names}
    save_file({f"language_model.{name}": tensor for name, tensor in stored.items()} | tower, path / "model.safetensors")
    text = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**SCOUT, "text_config": text}))
    assert build_from(path).run("a", TOKENS).tobytes() == before.tobytes()


def test_norms_of_q_and_k_go_with_no_attention_factor(tmp_path: Path) -> None:
    path = make_model(tmp_path, "llama4_text")
    config = json.loads((path / "config.json").read_text())
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
    (path / "config.json").write_text(json.dumps({**config, "rope_parameters": yarn}))
    with pytest.raises(ModelError, match="attention factor"):
        load(path)
