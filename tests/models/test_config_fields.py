"""Ignoring any field of config.json fails here: whatever a field does in transformers, it does here, or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cloister.models import load
from cloister.models.config import HARMLESS
from cloister.types.errors import ModelError
from tests.driving import build_from
from tests.model_factory import make_model
from tests.reference import reference_logits

TOKENS = np.random.default_rng(2).integers(0, 320, 90).tolist()
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
BASES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3},
    "qwen2": WINDOW,
    "qwen3": {**WINDOW, "attention_bias": True},
}
# family -> field (a dot goes into rope parameters) -> another value that transformers computes with the same tensors
HONOURED: dict[str, dict[str, Any]] = {
    "llama": {
        "rms_norm_eps": 0.5,
        "hidden_act": "gelu",
        "rope_parameters.rope_theta": 300.0,
        "rope_parameters.factor": 2.0,
        "rope_parameters.low_freq_factor": 2.0,
        "rope_parameters.high_freq_factor": 8.0,
        "rope_parameters.original_max_position_embeddings": 256,
    },
    "qwen2": {
        "rms_norm_eps": 0.5,
        "hidden_act": "gelu",
        "rope_parameters.rope_theta": 300.0,
        "sliding_window": 10,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3": {
        "rms_norm_eps": 0.5,
        "hidden_act": "gelu",
        "rope_parameters.rope_theta": 300.0,
        "sliding_window": 10,
        "layer_types": ["full_attention", "full_attention"],
    },
}
# fields that no tensor of the checkpoint would fit any more
REFUSED: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 48,
    "attention_bias": {"llama": True, "qwen2": True, "qwen3": False},
    "mlp_bias": True,
    "tie_word_embeddings": True,
    "use_sliding_window": {"llama": True, "qwen2": False, "qwen3": False},
    "rope_parameters.rope_type": "yarn",
    "rope_parameters.beta_fast": 32,
    "rope_parameters.partial_rotary_factor": 0.5,
    "partial_rotary_factor": 0.5,
    "quantization_config": {"quant_method": "gptq"},
    "attention_chunk_size": 64,
    "is_encoder_decoder": True,
    "rope_interleaved": True,
}
UNHEARD = {"max_position_embeddings", "max_window_layers"}  # see the tests of their own below


def change(path: Path, field: str, value: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    place, *inner = field.split(".")
    if inner:
        config[place][inner[0]] = value
    else:
        config[place] = value
    (path / "config.json").write_text(json.dumps(config))


def ours(path: Path) -> npt.NDArray[np.float32]:
    return build_from(path).run("a", TOKENS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made = {family: make_model(tmp_path_factory.mktemp(family), family, **BASES[family]) for family in BASES}
    return made.__getitem__


@pytest.fixture
def copy(base: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    def link(family: str) -> Path:
        for file in base(family).iterdir():
            if file.name == "config.json":
                (tmp_path / file.name).write_bytes(file.read_bytes())
            else:
                (tmp_path / file.name).symlink_to(file)
        return tmp_path

    return link


@pytest.mark.parametrize(("family", "field"), [(family, field) for family in HONOURED for field in HONOURED[family]])
def test_a_field_changes_the_logits_as_it_does_in_transformers(
    family: str, field: str, base: Callable[[str], Path], copy: Callable[[str], Path]
) -> None:
    path = copy(family)
    change(path, field, HONOURED[family][field])
    changed = ours(path)
    assert np.abs(changed - ours(base(family))).max() > 1e-2
    assert np.abs(changed - reference_logits(path, TOKENS)).max() <= 1e-4


@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_cannot_be_honoured_is_refused(family: str, field: str, copy: Callable[[str], Path]) -> None:
    path, value = copy(family), REFUSED[field]
    if field in ("attention_bias", "use_sliding_window"):
        value = value[family]
    change(path, field, value)
    with pytest.raises(ModelError):
        load(path)


@pytest.mark.parametrize("family", BASES)
def test_every_field_that_transformers_writes_is_honoured_refused_or_known_as_harmless(
    family: str, base: Callable[[str], Path]
) -> None:
    config = json.loads((base(family) / "config.json").read_text())
    tested = {field.split(".")[0] for field in (*HONOURED[family], *REFUSED)} | UNHEARD
    assert set(config) - tested - HARMLESS == set()


@pytest.mark.parametrize("field", sorted(HARMLESS - {"architectures", "model_type"}))
def test_a_harmless_field_may_hold_anything(field: str, copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    before = load(path).spec
    change(path, field, 3)
    assert load(path).spec == before


def test_an_unknown_field_is_refused_by_name(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    change(path, "logit_softcapping", 30.0)
    with pytest.raises(ModelError, match="'logit_softcapping'"):
        load(path)


def test_a_field_of_null_counts_as_absent(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    before = load(path).spec
    change(path, "logit_softcapping", None)
    change(path, "num_key_value_heads", 2)
    assert load(path).spec == before


def test_an_unknown_architecture_gets_the_list_of_those_known(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    change(path, "architectures", ["MambaForCausalLM"])
    with pytest.raises(ModelError, match="LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"):
        load(path)


def test_the_old_rope_keys_mean_the_same(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    before = load(path).spec
    config = json.loads((path / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = {"type": parameters.pop("rope_type"), **parameters}
    (path / "config.json").write_text(json.dumps(config))
    assert load(path).spec == before
    change(path, "rope_theta", 300.0)
    assert load(path).spec != before


def test_the_original_context_of_llama3_scaling_defaults_to_the_positions(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    config = json.loads((path / "config.json").read_text())
    del config["rope_parameters"]["original_max_position_embeddings"]
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32}))
    assert np.abs(ours(path) - reference_logits(path, TOKENS)).max() <= 1e-4
    change(path, "max_position_embeddings", 128)
    assert np.abs(ours(path) - reference_logits(path, TOKENS)).max() <= 1e-4


def test_positions_bound_the_model_length(copy: Callable[[str], Path]) -> None:
    path = copy("qwen2")
    change(path, "max_position_embeddings", 777)
    assert load(path).info.max_model_len == 777


def test_windows_begin_at_max_window_layers(copy: Callable[[str], Path]) -> None:
    path = copy("qwen2")
    config = json.loads((path / "config.json").read_text())
    del config["layer_types"]
    for first, windows in ((0, [40, 40]), (1, [None, 40]), (2, [None, None])):
        (path / "config.json").write_text(json.dumps({**config, "max_window_layers": first}))
        assert [layer.attention.window for layer in load(path).spec.layers] == windows


def test_a_window_counts_only_where_it_is_switched_on(copy: Callable[[str], Path]) -> None:
    path = copy("qwen2")
    config = json.loads((path / "config.json").read_text())
    del config["layer_types"]
    (path / "config.json").write_text(json.dumps({**config, "use_sliding_window": False}))
    assert {layer.attention.window for layer in load(path).spec.layers} == {None}
