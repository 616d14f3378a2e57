"""Every family on the native back end against transformers, on models whose every tensor is random."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.driving import build_from
from tests.model_factory import make_model
from tests.models import (
    test_cohere2,
    test_deepseek,
    test_families,
    test_gemma3n,
    test_glm,
    test_gpt_oss,
    test_llama4,
    test_minimax,
    test_ministral,
)
from tests.models.test_config_fields import BASES, HONOURED, TOKENS, change
from tests.native import KERNELS
from tests.reference import compare
from tests.thinning import every_second, thin

OF_ONE_FAMILY = {
    "cohere2": test_cohere2,
    "gemma3n_text": test_gemma3n,
    "glm4_moe": test_glm,
    "minimax_m2": test_minimax,
    "gpt_oss": test_gpt_oss,
    "llama4_text": test_llama4,
}
VARIANTS = {
    **test_families.VARIANTS,
    **{name: variant for name, variant in test_deepseek.VARIANTS.items() if variant[0] != "deepseek_v32"},  # torch only
    **test_ministral.VARIANTS,
    **{
        f"{family}, {name}": (family, config)
        for family, tests in OF_ONE_FAMILY.items()
        for name, config in tests.VARIANTS.items()
    },
}


QUICK = [
    *every_second(test_families.VARIANTS, 1),
    *every_second((name for name in test_deepseek.VARIANTS if name in VARIANTS), 1),
    *every_second(test_ministral.VARIANTS, 1),
    *(f"{family}, {name}" for family, tests in OF_ONE_FAMILY.items() for name in every_second(tests.VARIANTS, 1)),
]
"""Variants that `tests/models` leaves out of `make test` on the other back end: each is computed on one of them."""


@pytest.mark.parametrize("name", thin(VARIANTS, QUICK))
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, config = VARIANTS[name]
    path = make_model(tmp_path, family, **config)
    for kernels in (KERNELS[0], "scalar"):
        agreement = compare(path, backend="native", kernels=kernels)
        assert agreement.difference <= 1e-4
        assert agreement.num_equal == agreement.num_tokens


FAMILIES = (*OF_ONE_FAMILY, "deepseek_v2", "deepseek_v3", "ministral", "ministral3")


@pytest.mark.parametrize(("family", "field"), thin(((family, field) for family in FAMILIES for field in HONOURED[family]), 15))
def test_a_field_of_the_config_changes_what_it_changes_in_the_oracle(family: str, field: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, family, **BASES[family])
    before = build_from(path, backend="native").run("a", TOKENS)
    change(path, field, HONOURED[family][field])
    found, expected = (build_from(path, backend=name).run("a", TOKENS) for name in ("native", "torch"))
    assert np.abs(found - before).max() > 1e-2
    assert np.abs(found - expected).max() < 3e-5 * np.abs(expected).max()
