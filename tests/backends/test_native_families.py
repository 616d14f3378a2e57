"""Every family on the native back end against transformers, on models whose every tensor is random."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.model_factory import make_model
from tests.models.test_families import VARIANTS
from tests.native import KERNELS
from tests.reference import compare


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, config = VARIANTS[name]
    path = make_model(tmp_path, family, **config)
    prompt = np.random.default_rng(1).integers(0, 320, 150).tolist()
    for kernels in (KERNELS[0], "scalar"):
        agreement = compare(path, prompt, 60, backend="native", kernels=kernels)
        assert agreement.difference <= 1e-4
        assert agreement.num_equal == agreement.num_tokens
