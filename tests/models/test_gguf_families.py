"""GGUF files of every family say what the directories say that they were made from, field by field and bit by bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloister.backends.tensors import GroupedTensor, dequantized
from cloister.models import load
from cloister.models.gguf.architecture import ARCHITECTURES
from cloister.types.errors import ModelError
from tests.driving import build
from tests.gguf_converter import ARCHITECTURES as CONVERTED
from tests.gguf_families import ARCHITECTURES as NAMES
from tests.gguf_families import make_family_gguf

WHOLE = {"intermediate_size": 96}  # whole blocks of 32
FACTORS = {"short_factor": [1.5 + 0.1 * i for i in range(6)], "long_factor": [3.5 + i for i in range(6)]}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "attention_factor": 1.25, **FACTORS}
GEMMA = {**WHOLE, "head_dim": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True, "sliding_window": 40}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
EXPERTS = {**WHOLE, "moe_intermediate_size": 32}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**WHOLE, "head_dim": 16}),
    "qwen2moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "gemma2": ("gemma2", {**GEMMA, "num_hidden_layers": 3}),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 7, "rope_parameters": GEMMA3_ROPE}),
    "phi3": ("phi3", {**WHOLE, "sliding_window": 40}),
    "phi3, longrope, partly turned": (
        "phi3", {**WHOLE, "rope_parameters": LONG, "original_max_position_embeddings": 64, "max_position_embeddings": 256},
    ),
    "gpt2": ("gpt2", {}),
    "gpt2, a head of its own": ("gpt2", {"n_inner": 96, "tie_word_embeddings": False, "layer_norm_epsilon": 0.01}),
    "gptneox": ("gpt_neox", {**WHOLE, "layer_norm_eps": 0.01}),
    "gptneox, in sequence": ("gpt_neox", {**WHOLE, "use_parallel_residual": False}),
    "smollm3": ("smollm3", {**WHOLE, "tie_word_embeddings": True}),
    "granite": ("granite", WHOLE),
    "olmo2": ("olmo2", {**WHOLE, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "olmo2, linear scaling": (
        "olmo2", {**WHOLE, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    ),
}  # fmt: skip


def test_every_architecture_is_tested() -> None:
    tested = {NAMES.get(family, family) for family, _ in VARIANTS.values()}
    elsewhere = {
        "qwen2",
        "qwen3",
        "gpt-oss",
        "nemotron_h",
        "bert",
        "modern-bert",
    }  # the other files beside this one
    assert set(ARCHITECTURES) - tested - set(CONVERTED.values()) == elsewhere


@pytest.mark.parametrize("name", VARIANTS)
def test_a_file_describes_the_decoder_that_its_directory_describes(name: str, tmp_path: Path) -> None:
    family, config = VARIANTS[name]
    file = make_family_gguf(tmp_path / "tiny", family, "F32", **config)
    for length in (None, 64):
        ours, expected = (load(path, max_model_len=length).spec for path in (file, tmp_path / "tiny"))
        assert len(ours.layers) == len(expected.layers)
        for found, wanted in zip(ours.layers, expected.layers, strict=True):
            assert _rounded(found) == _rounded(wanted)
        assert _rounded(ours) == _rounded(expected)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("name", VARIANTS)
def test_tensors_have_the_bits_of_the_reference(name: str, kind: str, tmp_path: Path) -> None:
    family, config = VARIANTS[name]
    file = make_family_gguf(tmp_path / "tiny", family, kind, **config)
    expected, weights = load(tmp_path / "tiny").weights, load(file).weights
    assert set(weights.names()) == set(expected.names())
    for tensor in weights.names():
        ours, theirs = (dequantized(source.read(tensor)).astype(np.float32) for source in (weights, expected))
        assert ours.shape == theirs.shape == weights.shape(tensor)
        tolerance = 1e-6 if family.startswith("gemma") and ours.ndim == 1 else 0.0  # one was added and taken away
        assert np.abs(ours - theirs).max() <= tolerance, tensor


@pytest.mark.parametrize("name", ["mixtral", "qwen2moe", "phi3"])
def test_codes_of_experts_and_of_fused_matrices_stay_codes(name: str, tmp_path: Path) -> None:
    family, config = VARIANTS[name]
    weights = load(make_family_gguf(tmp_path / "tiny", family, "Q8_0", **config)).weights
    matrix = weights.read("layers.1.experts.3.down.weight" if name != "phi3" else "layers.1.up.weight")
    assert isinstance(matrix, GroupedTensor)


def test_a_file_that_claims_more_experts_than_it_holds_is_refused_at_once(tmp_path: Path) -> None:
    file = make_family_gguf(tmp_path / "tiny", "mixtral", "F16", **VARIANTS["mixtral"][1])
    content = file.read_bytes()
    place = content.index(b"llama.expert_count") + len(b"llama.expert_count") + 4
    for count, message in ((50000, "many more tensors"), (6, "no matrix for each expert|lacks|has the shape")):
        file.write_bytes(content[:place] + count.to_bytes(4, "little") + content[place + 4 :])
        with pytest.raises(ModelError, match=message):
            load(file)


def test_a_file_answers_as_its_directory(tmp_path: Path) -> None:
    file = make_family_gguf(tmp_path / "tiny", "mixtral", "F16", **VARIANTS["mixtral"][1])
    tokens = np.random.default_rng(1).integers(0, 320, 50).tolist()
    first, second = (build(model.spec, model.weights).run("a", tokens) for model in (load(file), load(tmp_path / "tiny")))
    assert np.abs(first - second).max() <= 1e-5


def _rounded(value: Any) -> Any:
    """The text of a spec, its numbers rounded to what a float32 keeps of them."""
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda match: f"{float(match.group()):.5g}", repr(value))
