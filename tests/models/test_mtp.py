"""Layers that predict further tokens compute what the equations of DeepSeek-V3 say (arXiv:2412.19437, section 2.2), around a
block of transformers; checkpoints and configs that do not go together end in an error that says what to do."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cloister.backends import BACKENDS
from cloister.backends.availability import why_no_kernels
from cloister.backends.base import ForwardBatch, KVLayout, Program, Wants
from cloister.backends.tensors import dequantized
from cloister.models import load
from cloister.models.safetensors import write_tensors
from cloister.types.errors import ModelError
from tests.driving import build
from tests.model_factory import make_model
from tests.mtp_layers import add_layer, change_tensors, load_tensors, reference_predictions

BACKEND_NAMES = ["torch", *([] if why_no_kernels() else ["native"])]
FAMILIES = ["llama", "deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]
TOKENS = [5, 90, 17, 201, 33, 33, 8, 150, 77, 240, 19, 3, 60, 61, 62, 111, 7, 54, 99, 31]
BLOCK = 4
FloatArray = npt.NDArray[np.float32]


def make_path(directory: Path, family: str, **config: Any) -> tuple[Path, dict[str, FloatArray]]:
    if family.startswith("qwen3"):
        config = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], **config}
    path = make_model(directory, family, **config)
    return path, add_layer(path, seed=3)


def build_both(path: Path, backend: str, num_threads: int = 1) -> tuple[Program, Program]:
    """Returns the programs of a model and of its layer."""
    model = load(path)
    maker = BACKENDS.get(backend)(num_threads=num_threads, device="cpu", dtype="float32")
    layout = KVLayout(64, BLOCK)
    program = maker.build(model.spec, model.weights, layout)
    assert model.mtp is not None
    return program, maker.build(*model.mtp.open(), layout, beside=program)


def batch_of(tokens: Sequence[int], start: int, hidden: FloatArray | None = None) -> ForwardBatch:
    count = len(tokens)
    return ForwardBatch(
        token_ids=np.array(tokens, np.int32),
        positions=np.arange(start, start + count, dtype=np.int32),
        query_starts=np.array([0, count], np.int32),
        context_lens=np.array([start + count], np.int32),
        block_tables=np.arange(40, 56, dtype=np.int32)[None],
        logit_rows=np.arange(count, dtype=np.int32),
        hidden=hidden,
    )


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_computes_the_equations_and_repeats_on_its_own_hidden_states(
    family: str, backend: str, tmp_path: Path
) -> None:
    path, layer = make_path(tmp_path, family)
    expected, drafts = reference_predictions(path, layer, TOKENS, 4)
    program, module = build_both(path, backend)
    states = program.step(batch_of(TOKENS, 0), Wants(every_hidden=True)).hidden
    cut = 7  # in two chunks
    found = [
        module.step(batch_of(TOKENS[1 + start : 1 + end], start, states[start:end]), Wants(logits=True, hidden=True))
        for start, end in ((0, cut), (cut, len(TOKENS) - 1))
    ]
    assert np.abs(np.concatenate([each.logits for each in found]) - expected).max() <= 2e-4
    last, chain = found[-1], []
    for place in range(4):
        chain.append(last.logits[-1])
        token = int(chain[-1].argmax())
        last = module.step(batch_of([token], len(TOKENS) - 1 + place, last.hidden[-1:]), Wants(logits=True, hidden=True))
    assert np.abs(np.array(chain) - drafts).max() <= 2e-4
    assert np.abs(expected).max() > 1


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("family", ["llama", "qwen3_next", "gemma3n_text"])
def test_hidden_states_of_every_token_are_those_of_rows_and_bring_the_same_logits(
    family: str, backend: str, tmp_path: Path
) -> None:
    model = load(make_model(tmp_path, family))
    program = build(model.spec, model.weights, backend=backend).program
    whole = batch_of(TOKENS, 0)
    rows = program.step(whole, Wants(logits=True, hidden=True))
    every = program.step(replace(whole, logit_rows=np.array([3], np.int32)), Wants(logits=True, every_hidden=True))
    assert every.hidden.tobytes() == rows.hidden.tobytes()
    assert every.logits.tobytes() == rows.logits[3:4].tobytes()


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_positions_have_the_same_bits_one_by_one_and_on_two_threads(backend: str, tmp_path: Path) -> None:
    path, _ = make_path(tmp_path, "deepseek_v3")
    program, module = build_both(path, backend)
    states = program.step(batch_of(TOKENS, 0), Wants(every_hidden=True)).hidden
    count = len(TOKENS) - 1
    whole = build_both(path, backend, num_threads=2)[1].step(batch_of(TOKENS[1:], 0, states[:-1].copy()), Wants(logits=True))
    steps = [batch_of(TOKENS[i + 1 : i + 2], i, states[i : i + 1].copy()) for i in range(count)]
    alone = [module.step(step, Wants(logits=True)).logits for step in steps]
    assert np.concatenate(alone).tobytes() == whole.logits.tobytes()


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_a_layer_without_hidden_states_or_a_lender_is_refused(backend: str, tmp_path: Path) -> None:
    path, _ = make_path(tmp_path, "llama")
    _, module = build_both(path, backend)
    with pytest.raises(ValueError, match="hidden state"):
        module.step(batch_of(TOKENS, 0), Wants(logits=True))
    model = load(path)
    assert model.mtp is not None
    with pytest.raises(TypeError, match="lends"):
        BACKENDS.get(backend)(num_threads=1, device="cpu", dtype="float32").build(*model.mtp.open(), KVLayout(4, BLOCK))


def refuse(path: Path, pattern: str) -> None:
    model = load(path)  # which serves without it
    assert model.mtp is not None
    with pytest.raises(ModelError, match=pattern):
        model.mtp.open()


def test_the_experts_of_a_layer_may_be_stacked_as_those_of_the_hub(tmp_path: Path) -> None:
    path, added = make_path(tmp_path, "qwen3_5_moe_text")
    found = load_tensors(path)
    before = "mtp.layers.0.mlp.experts"
    parts = {
        part: np.stack([found.pop(f"{before}.{expert}.{part}_proj.weight") for expert in range(6)])
        for part in ("gate", "up", "down")
    }
    found[f"{before}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
    found[f"{before}.down_proj"] = parts["down"]
    write_tensors(path / "model.safetensors", found)
    stacked = load(path).mtp
    assert stacked is not None
    weights = stacked.open()[1]
    for expert, part in itertools.product(range(6), parts):
        matrix = added[f"{before}.{expert}.{part}_proj.weight"]
        assert np.array_equal(dequantized(weights.read(f"layers.0.experts.{expert}.{part}.weight")), matrix)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_a_checkpoint_without_such_a_layer_says_so(family: str, tmp_path: Path) -> None:
    refuse(make_model(tmp_path, family), "has no layer that predicts further tokens; download one that has it")


def test_a_layer_that_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    path, _ = make_path(tmp_path, "deepseek_v3")
    change_tensors(path, hnorm__weight=None)
    refuse(path, r"lacks the tensor 'model\.layers\.3\.hnorm\.weight'.*download the checkpoint again")


def test_a_layer_of_another_shape_is_named(tmp_path: Path) -> None:
    path, _ = make_path(tmp_path, "glm4_moe")
    change_tensors(path, eh_proj__weight=np.zeros((64, 64), np.float32))
    refuse(path, r"eh_proj.*has the shape \(64, 64\)")


@pytest.mark.parametrize("number", [0, 2])
def test_a_config_that_counts_others_than_the_checkpoint_has_is_refused(number: int, tmp_path: Path) -> None:
    path, _ = make_path(tmp_path, "deepseek_v3")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": number}))
    refuse(path, f"names {number} layers that predict further tokens, and the checkpoint has 1")


def test_an_embedding_of_the_layers_own_is_refused(tmp_path: Path) -> None:
    path, _ = make_path(tmp_path, "qwen3_5_text", mtp_use_dedicated_embeddings=True)
    refuse(path, "mtp_use_dedicated_embeddings is set")
