"""Every family against transformers, on models whose every tensor is random (rule 10)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model_factory import make_model
from tests.reference import compare

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 40, "num_hidden_layers": 3, "max_window_layers": 1}

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
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, config = VARIANTS[name]
    path = make_model(tmp_path, family, **config)
    prompt = np.random.default_rng(1).integers(0, 320, 150).tolist()
    agreement = compare(path, prompt)
    assert agreement.difference <= 1e-4
    assert agreement.num_equal == agreement.num_tokens
