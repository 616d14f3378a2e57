"""GLM-4.5 against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.model_factory import make_model
from tests.reference import compare
from tests.thinning import every_second, thin

VARIANTS: dict[str, dict[str, Any]] = {
    "GLM-4.5 Air: biases, one group": {"attention_bias": True},
    "GLM-4.5: norms on q and k, biases": {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5},
    "groups, all of a head turned, beyond the original context": {
        "n_group": 4, "topk_group": 2,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
            "partial_rotary_factor": 1.0,
        },
    },
    "tied, not renormalised, dense layers only": {
        "tie_word_embeddings": True, "norm_topk_prob": False, "first_k_dense_replace": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", thin(VARIANTS, every_second(VARIANTS)))
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, "glm4_moe", **VARIANTS[name])
    agreement = compare(path)
    assert agreement.difference <= 1e-4
    assert agreement.num_equal == agreement.num_tokens
