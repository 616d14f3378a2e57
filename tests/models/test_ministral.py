"""Ministral, Ministral 3 and the text part of Mistral 3 against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

from cloister.models import load
from cloister.models.decoder import find_family, read_spec
from cloister.types.errors import ModelError
from tests.driving import build_from
from tests.model_factory import make_model, randomise, small_fields, write_tokenizer
from tests.reference import compare, greedy
from tests.thinning import every_second, thin

TOKENS = np.random.default_rng(1).integers(0, 320, 150).tolist()
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.2,
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Ministral, every layer local": ("ministral", {"sliding_window": 40}),
    "Ministral, some layers local, tied": (
        "ministral",
        {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True},
    ),
    "Ministral 3, beyond the original context": ("ministral3", {"rope_parameters": YARN}),
    "Ministral 3, beyond the window": ("ministral3", {"rope_parameters": YARN, "sliding_window": 40}),
}  # fmt: skip


@pytest.mark.parametrize("name", thin(VARIANTS, every_second(VARIANTS)))
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, config = VARIANTS[name]
    agreement = compare(make_model(tmp_path, family, **config))
    assert agreement.difference <= 1e-4
    assert agreement.num_equal == agreement.num_tokens


def test_rotation_of_ministral3_defaults_to_that_of_its_published_configs(tmp_path: Path) -> None:
    path = make_model(tmp_path, "ministral3")
    before = load(path).spec
    config = json.loads((path / "config.json").read_text())
    del config["rope_parameters"]
    (path / "config.json").write_text(json.dumps(config))
    assert load(path).spec == before
    growth = before.layers[0].grouped_attention.query_growth
    assert growth is not None
    assert (growth.beta, growth.period) == (0.1, 16384)


VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
          "patch_size": 14, "head_dim": 16}  # fmt: skip


def make_mistral3(directory: Path, kind: str, *, tied: bool, **config: Any) -> Any:
    """Writes a model with a vision tower, and returns it."""
    text = {"model_type": kind, **small_fields(kind), "pad_token_id": None, **config}
    settings = Mistral3Config(
        text_config=text, vision_config={"model_type": "pixtral", **VISION}, tie_word_embeddings=tied, bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = Mistral3ForConditionalGeneration(settings).eval()
        randomise(model, tied)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return model


@pytest.mark.parametrize(
    ("kind", "tied", "config"),
    [("mistral", False, {"sliding_window": None, "head_dim": 24}), ("ministral3", True, {"rope_parameters": YARN})],
)
def test_the_text_part_of_a_model_with_a_vision_tower_is_that_of_transformers(
    kind: str, tied: bool, config: dict[str, Any], tmp_path: Path
) -> None:
    model = make_mistral3(tmp_path, kind, tied=tied, **config)
    tokens, ours = greedy(build_from(tmp_path), TOKENS, 60)
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor([tokens[:-1]])).logits[0].numpy()
    assert np.abs(ours - theirs).max() <= 1e-4
    assert (theirs[len(TOKENS) - 1 :].argmax(1) == np.array(tokens[len(TOKENS) :])).all()


def test_the_names_of_newer_exports_and_of_older_ones_are_read(tmp_path: Path) -> None:
    make_mistral3(tmp_path, "mistral", tied=False, sliding_window=None, head_dim=24)
    before = build_from(tmp_path).run("a", TOKENS)
    stored = load_file(tmp_path / "model.safetensors")
    assert all(not name.startswith("language_model.") for name in stored) or all(
        not name.startswith("model.language_model.") for name in stored
    )
    for old, new in (("language_model.model.", "model.language_model."), ("model.language_model.", "language_model.model.")):
        moved = {name.replace(old, new, 1) if name.startswith(old) else name: tensor for name, tensor in stored.items()}
        head = "language_model.lm_head.weight" if new.startswith("language_model.") else "lm_head.weight"
        moved = {head if name.endswith("lm_head.weight") else name: tensor for name, tensor in moved.items()}
        save_file(moved, tmp_path / "model.safetensors")
        assert build_from(tmp_path).run("a", TOKENS).tobytes() == before.tobytes()
    save_file({**moved, "other_tower.weight": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"other_tower\.weight"):
        load(tmp_path)


def test_a_text_part_of_another_family_is_refused(tmp_path: Path) -> None:
    make_mistral3(tmp_path, "mistral", tied=False, sliding_window=None, head_dim=24)
    config = json.loads((tmp_path / "config.json").read_text())
    for text in ({**config["text_config"], "model_type": "llama"}, None, "mistral"):
        (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": text}))
        with pytest.raises(ModelError, match="must have a model_type of: mistral, ministral3"):
            load(tmp_path)


HUB: dict[str, Any] = {
    "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "attention_dropout": 0.0, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 262144, "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "sliding_window": None, "use_cache": True, "vocab_size": 131072, "tie_word_embeddings": False,
    "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384, "rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn",
    },
}  # fmt: skip


def test_a_config_of_the_hub_is_read_whole() -> None:
    unknown: list[str] = []
    spec = read_spec(find_family(HUB), HUB, None, unknown.extend)
    assert unknown == []
    assert spec.max_positions == 262144


@pytest.mark.parametrize("period", [2**31, 2**40, 0])
def test_a_period_that_kernels_cannot_count_is_refused(period: int) -> None:
    config = {**HUB, "rope_parameters": {**HUB["rope_parameters"], "original_max_position_embeddings": period}}
    with pytest.raises(ModelError, match="original_max_position_embeddings"):
        read_spec(find_family(config), config, None, [].extend)
