"""A small model in a larger one's shape says what the small one says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.inflated import Inflation, write_inflated
from benchmarks.inflated_drafters import widen, write_drafters
from cloister.executor.drafters import blockwise, medusa
from cloister.executor.drafters.head_runner import guess_hidden
from cloister.models import locate

UNTYPED: Any = AutoModelForCausalLM  # its constructors carry no types
LARGE = {
    "hidden_size": 2048, "intermediate_size": 704, "num_hidden_layers": 7, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 64,
}  # fmt: skip
IDS = torch.tensor([[4, 300, 17, 1200, 45, 45, 2048, 5, *range(100, 140)]])


@torch.no_grad()
def logits_of(path: Path) -> torch.Tensor:
    found: torch.Tensor = UNTYPED.from_pretrained(path, dtype=torch.float32)(IDS).logits
    return found


def test_an_inflated_model_has_the_logits_of_the_small_one(tmp_path: Path) -> None:
    small, large = logits_of(locate("cloister-5m")), logits_of(write_inflated(tmp_path / "large", large=LARGE))
    assert float((small - large).abs().max()) < 1e-3 < float(small.std())


def test_rotation_at_other_frequencies_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inflation, "rotated", Inflation.straight)
    small, large = logits_of(locate("cloister-5m")), logits_of(write_inflated(tmp_path / "large", large=LARGE))
    assert float((small - large).abs().max()) > 0.1


def test_inflated_heads_guess_what_the_small_ones_guess() -> None:
    random = np.random.default_rng(0)
    hidden = random.standard_normal((3, 8), np.float32)
    wide = np.concatenate([hidden, np.zeros((3, 24), np.float32)], axis=1)
    up, up_bias = random.standard_normal((16, 8), np.float32), random.standard_normal(16, np.float32)
    down, down_bias = random.standard_normal((2, 8, 16), np.float32), random.standard_normal((2, 8), np.float32)
    shared = {"up.weight": up, "up.bias": up_bias, "down.weight": down, "down.bias": down_bias}
    separate = {
        "blocks.0.up.weight": np.stack([up, -up]),
        "blocks.0.up.bias": np.stack([up_bias, -up_bias]),
        "blocks.0.down.weight": down,
    }
    for kind, tensors in ((blockwise, shared), (medusa, separate)):
        small = guess_hidden(kind.read_heads(tensors, 2, 8), hidden, 2)
        large = guess_hidden(kind.read_heads(widen(tensors, 4), 2, 32), wide, 2)
        np.testing.assert_allclose(large[..., :8], small, rtol=1e-5, atol=1e-5)
        assert not large[..., 8:].any()


def test_drafters_of_a_model_that_was_not_inflated_are_left_alone(tmp_path: Path) -> None:
    kept = tmp_path / "drafters" / "medusa"
    kept.mkdir(parents=True)
    with pytest.raises(ValueError, match="not inflated"):
        write_drafters(tmp_path)
    assert kept.is_dir()
