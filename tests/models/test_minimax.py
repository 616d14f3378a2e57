"""MiniMax-M2 against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cloister.models import load
from tests.model_factory import make_model
from tests.reference import compare
from tests.thinning import every_second, thin

PARTLY = {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5}
VARIANTS: dict[str, dict[str, Any]] = {
    "half of each head turned": {"rope_parameters": PARTLY},
    "one KV head, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "beyond the original context": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.5,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", thin(VARIANTS, every_second(VARIANTS)))
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, "minimax_m2", **VARIANTS[name])
    agreement = compare(path)
    assert agreement.difference <= 1e-4
    assert agreement.num_equal == agreement.num_tokens


def test_rope_fields_of_the_hub_mean_rope_parameters(tmp_path: Path) -> None:
    path = make_model(tmp_path, "minimax_m2", rope_parameters=PARTLY)
    before = load(path).spec
    config = json.loads((path / "config.json").read_text())
    del config["rope_parameters"]
    hub = {"rotary_dim": 12, "rope_theta": 5000000, "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}
    (path / "config.json").write_text(json.dumps({**config, **hub}))
    assert load(path).spec == before
    (path / "config.json").write_text(json.dumps({**config, **hub, "rotary_dim": 24}))
    assert load(path).spec != before
