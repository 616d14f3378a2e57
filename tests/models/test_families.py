"""Every family against transformers, on models whose every tensor is random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloister.models import load
from cloister.types.errors import ModelError
from tests.driving import build_from
from tests.model_factory import make_model
from tests.reference import compare, reference_logits
from tests.thinning import every_second, thin

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 40, "num_hidden_layers": 3, "max_window_layers": 1}
PATTERN = ["sliding_attention", "full_attention", "sliding_attention"]
LOCAL_AND_GLOBAL = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
DENSE_FIRST = {"mlp_only_layers": [0], "num_hidden_layers": 3}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, grouped heads": ("llama", {}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, a KV head for each head": ("llama", {"num_key_value_heads": 4}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, head_dim of its own": ("llama", {"head_dim": 24}),
    "llama, another base and gelu": ("llama", {"rope_parameters": {"rope_theta": 500.0}, "hidden_act": "gelu"}),
    "llama, tanh gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama, linear scaling": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "llama 3.1, beyond the original context": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, beyond the window": ("qwen2", WINDOW),
    "qwen2, layer types": ("qwen2", {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "qwen3": ("qwen3", {}),
    "qwen3, one KV head, tied, biases": (
        "qwen3",
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen3, beyond the window": ("qwen3", WINDOW),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn of DeepSeek": ("llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}),
    "mistral, beyond the window": ("mistral", {"sliding_window": 40}),
    "mistral, no window": ("mistral", {"sliding_window": None, "head_dim": 20}),
    "mixtral, beyond the window": ("mixtral", {"sliding_window": 40}),
    "mixtral, one expert": ("mixtral", {"num_experts_per_tok": 1}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe, every second layer, renormalised": (
        "qwen2_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 4, "norm_topk_prob": True},
    ),
    "qwen2_moe, a dense layer, beyond the window": (
        "qwen2_moe", {**DENSE_FIRST, "use_sliding_window": True, "sliding_window": 40, "qkv_bias": False},
    ),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe, a dense layer, beyond the window, tied": (
        "qwen3_moe", {**DENSE_FIRST, "use_sliding_window": True, "sliding_window": 40, "tie_word_embeddings": True},
    ),
    "gemma2, beyond the window": ("gemma2", {"sliding_window": 40, "num_hidden_layers": 3, "tie_word_embeddings": True}),
    "gemma2, no caps, biases": (
        "gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma3, beyond the window": (
        "gemma3_text",
        {"sliding_window": 40, "layer_types": PATTERN, "num_hidden_layers": 3, "rope_parameters": LOCAL_AND_GLOBAL},
    ),
    "gemma3, capped, tied": ("gemma3_text", {"final_logit_softcapping": 3.0, "tie_word_embeddings": True}),
    "phi3": ("phi3", {}),
    "phi3, partly turned, beyond the window": (
        "phi3", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.75}, "sliding_window": 40},
    ),
    "gpt2": ("gpt2", {}),
    "gpt2, scaled by layer, wide": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 100, "n_layer": 3}),
    "gpt2, not scaled, a head of its own": ("gpt2", {"scale_attn_weights": False, "tie_word_embeddings": False}),
    "opt": ("opt", {}),
    "opt, a head of its own and gelu": ("opt", {"tie_word_embeddings": False, "activation_function": "gelu"}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, in sequence": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox, all turned, no biases in attention": (
        "gpt_neox", {"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 1.0}, "attention_bias": False},
    ),
    "smollm3": ("smollm3", {}),
    "smollm3, other layers turned, beyond the window": (
        "smollm3", {"no_rope_layers": [0, 1, 1, 0], "use_sliding_window": True, "sliding_window": 40,
                    "layer_types": [*PATTERN, "full_attention"]},
    ),
    "granite": ("granite", {}),
    "granitemoe": ("granitemoe", {}),
    "granitemoe, tied, biases": ("granitemoe", {"tie_word_embeddings": True, "attention_bias": True}),
    "granite, tied, biases": ("granite", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "olmo2": ("olmo2", {}),
    "olmo2, one KV head, biases": ("olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "olmo3, beyond the window": ("olmo3", {"sliding_window": 40, "num_hidden_layers": 4}),
    "olmo3, beyond the original context, biases": (
        "olmo3",
        {"sliding_window": 40, "layer_types": PATTERN, "num_hidden_layers": 3, "attention_bias": True,
         "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", thin(VARIANTS, every_second(VARIANTS)))
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, config = VARIANTS[name]
    path = make_model(tmp_path, family, **config)
    agreement = compare(path)
    assert agreement.difference <= 1e-4
    assert agreement.num_equal == agreement.num_tokens


LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.7 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}
STRETCHED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, "max_position_embeddings": 64},
    ),
    "llama, longrope": ("llama", {"rope_parameters": LONG, "max_position_embeddings": 256}),
    "phi3, longrope": (
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 64, "max_position_embeddings": 256},
    ),
    "phi3, longrope, partly turned, with a factor of its own": (
        "phi3",
        {
            "rope_parameters": {
                **LONG,
                "short_factor": LONG["short_factor"][:6],
                "long_factor": LONG["long_factor"][:6],
                "partial_rotary_factor": 0.75,
                "attention_factor": 1.3,
            },
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 256,
        },
    ),
}


@pytest.mark.parametrize("name", STRETCHED)
@pytest.mark.parametrize("length", [64, 200], ids=["within the original context", "at the greatest length"])
def test_scaling_by_length_is_that_of_transformers_at_the_greatest_length(name: str, length: int, tmp_path: Path) -> None:
    family, config = STRETCHED[name]
    path = make_model(tmp_path, family, **config)
    tokens = np.random.default_rng(1).integers(0, 320, length).tolist()
    ours = build_from(path, max_model_len=length).run("a", tokens, 33)
    assert np.abs(ours - reference_logits(path, tokens)).max() <= 1e-4


@pytest.mark.parametrize("name", STRETCHED)
def test_scaling_by_length_depends_on_the_greatest_length_alone(name: str, tmp_path: Path) -> None:
    family, config = STRETCHED[name]
    path = make_model(tmp_path, family, **config)
    short, long = (load(path, max_model_len=length).spec.layers[0].attention.rope for length in (64, 200))
    assert short != long
    assert load(path).spec.layers[0].attention.rope == (short if name == "llama, dynamic" else long)


@pytest.mark.parametrize("low", [0.0, -1.0, 5.0])
def test_factors_of_frequencies_that_cut_no_range_are_refused(low: float, tmp_path: Path) -> None:
    path = make_model(tmp_path, "llama", rope_parameters=LLAMA3)
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"]["low_freq_factor"] = low
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="low_freq_factor"):
        load(path)


@pytest.mark.parametrize(("asked", "reached"), [(None, 64), (32, 64), (200, 200), (256, 256), (1000, 256)])
def test_dynamic_scaling_reaches_as_far_as_asked_and_its_factor_allow(asked: int | None, reached: int, tmp_path: Path) -> None:
    path = make_model(tmp_path, "llama", **STRETCHED["llama, dynamic"][1])
    assert load(path, max_model_len=asked).spec.max_positions == reached
