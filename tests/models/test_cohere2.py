"""Cohere2 against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cloister.models import load
from tests.model_factory import make_model
from tests.reference import compare
from tests.thinning import every_second, thin

VARIANTS: dict[str, dict[str, Any]] = {
    "beyond the window": {"sliding_window": 40, "num_hidden_layers": 4},
    "every other layer local, biases, logits not scaled": {
        "sliding_window": 40, "layer_types": ["full_attention", "sliding_attention"], "attention_bias": True,
        "logit_scale": 1.0,
    },
    "a head of its own, one KV head": {"tie_word_embeddings": False, "num_key_value_heads": 1, "num_hidden_layers": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", thin(VARIANTS, every_second(VARIANTS)))
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, "cohere2", **VARIANTS[name])
    agreement = compare(path)
    assert agreement.difference <= 1e-4
    assert agreement.num_equal == agreement.num_tokens


def test_layers_are_local_by_the_pattern_of_configs_on_the_hub(tmp_path: Path) -> None:
    path = make_model(tmp_path, "cohere2", num_hidden_layers=4, sliding_window=40)
    before = load(path).spec
    assert [layer.attention.window for layer in before.layers] == [40, 40, 40, None]
    assert [layer.attention.rope is None for layer in before.layers] == [False, False, False, True]
    config = json.loads((path / "config.json").read_text())
    del config["layer_types"]
    hub = {
        "sliding_window_pattern": 4, "use_qk_norm": False, "use_parallel_block": True, "use_gated_activation": True,
        "position_embedding_type": "rope_gptj",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps({**config, **hub}))
    assert load(path).spec == before
