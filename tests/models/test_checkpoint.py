"""Checkpoints: single, sharded and tied files under canonical names, and what is wrong with a broken one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cloister.models import load
from cloister.types.errors import ModelError
from tests.driving import build
from tests.model_factory import make_model

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_model(tmp_path, "llama", attention_bias=True)


def rewrite(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_tensors_come_back_under_canonical_names(path: Path) -> None:
    stored, weights = load_file(path / "model.safetensors"), load(path).weights
    assert len(weights.names()) == len(stored)
    assert np.array_equal(weights.read("layers.1.q.bias"), stored["model.layers.1.self_attn.q_proj.bias"].numpy())
    assert np.array_equal(weights.read("head.weight"), stored["lm_head.weight"].numpy())
    assert all(weights.shape(name) == tensor.shape for name, tensor in weights)


@pytest.mark.parametrize(("stored", "read"), [(torch.bfloat16, ml_dtypes.bfloat16), (torch.float16, np.float16)])
def test_half_precision_is_read_as_it_is_stored(path: Path, stored: torch.dtype, read: type) -> None:
    rewrite(path, lambda tensors: tensors.update({name: value.to(stored) for name, value in tensors.items()}))
    embedding = load(path).weights.read("embed.weight")
    assert embedding.dtype == read
    expected = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    assert np.array_equal(embedding.astype(np.float32), expected.float().numpy())


def test_a_tensor_is_mapped_and_cannot_be_written(path: Path) -> None:
    tensor = load(path).weights.read("norm.weight")
    with pytest.raises(ValueError, match="read-only"):
        tensor[0] = 1


def test_a_sharded_checkpoint_is_the_same_model(path: Path, tmp_path: Path) -> None:
    sharded = make_model(tmp_path / "sharded", "llama", attention_bias=True, shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    whole = dict(load(path).weights)
    assert all(np.array_equal(tensor, whole[name]) for name, tensor in load(sharded).weights)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    sharded = make_model(tmp_path, "llama", shard_size="60KB")
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        load(sharded)


def test_an_index_cannot_reach_outside_the_directory(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../other/model.safetensors"}}))
    with pytest.raises(ModelError, match="outside"):
        load(path)


def test_a_missing_tensor_is_named(path: Path) -> None:
    rewrite(path, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"))
    with pytest.raises(ModelError, match=r"lacks the tensor 'model\.layers\.1\.self_attn\.k_proj\.bias'"):
        load(path)


def test_an_extra_tensor_is_named(path: Path) -> None:
    rewrite(path, lambda tensors: tensors.update(adapter=torch.ones(3)))
    with pytest.raises(ModelError, match="'adapter'"):
        load(path)


def test_a_tensor_of_another_shape_is_named(path: Path) -> None:
    rewrite(path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' has the shape \(65,\)"):
        load(path)


def test_a_tensor_of_an_unsupported_type_is_named(path: Path) -> None:
    rewrite(path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' has the type I8"):
        load(path)


@pytest.mark.parametrize("num_bytes", [0, 5, 200, 100_000])
def test_a_file_cut_short_is_called_damaged(path: Path, num_bytes: int) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(ModelError, match="damaged or cut short"):
        load(path)


def test_a_file_that_the_system_does_not_let_read_is_not_called_damaged(path: Path) -> None:
    file = path / "model.safetensors"
    file.unlink()
    file.mkdir()
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read: Is a directory"):
        load(path)


def test_a_header_that_reaches_past_the_file_is_called_damaged(path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [4, 20]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ModelError, match="damaged or cut short"):
        load(path)


@pytest.mark.parametrize("header", ['{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,4]}}', 100_000 * "["])
def test_a_header_that_cannot_be_meant_is_called_damaged(path: Path, header: str) -> None:
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(16))
    with pytest.raises(ModelError, match="damaged or cut short"):
        load(path)


@pytest.mark.parametrize(
    "change",
    [{"rms_norm_eps": 10**400}, {"head_dim": 10**11}, {"hidden_size": 10**11, "head_dim": None}, {"vocab_size": 10**30},
     {"architectures": [{}]}, {"architectures": 5}],
)  # fmt: skip
def test_a_config_that_cannot_be_meant_is_refused_before_anything_is_made_of_it(path: Path, change: dict[str, object]) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError):
        load(path)


def test_a_window_wider_than_any_context_sees_everything(tmp_path: Path) -> None:
    path = make_model(tmp_path, "mistral")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "sliding_window": 2**40}))
    model = load(path)
    logits = build(model.spec, model.weights, backend="native").run("a", [1, 2, 3])
    (path / "config.json").write_text(json.dumps({**config, "sliding_window": None}))
    assert logits.tobytes() == build(load(path).spec, model.weights, backend="native").run("a", [1, 2, 3]).tobytes()


def test_nested_brackets_are_no_readable_json(path: Path) -> None:
    (path / "config.json").write_text(100_000 * "[")
    with pytest.raises(ModelError, match="not readable JSON"):
        load(path)


def test_a_number_beyond_all_numbers_is_no_sampling_default(path: Path) -> None:
    (path / "generation_config.json").write_text('{"temperature": 1' + 400 * "0" + "}")
    with pytest.raises(ModelError, match="temperature"):
        load(path)


def test_rotary_buffers_of_old_exports_are_let_be(path: Path) -> None:
    rewrite(path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert "inv_freq" not in " ".join(load(path).weights.names())


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path: Path) -> None:
    path = make_model(tmp_path, "llama", tie_word_embeddings=True)
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert "head.weight" not in load(path).weights.names()
    rewrite(path, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        load(path)


def test_one_changed_bit_changes_the_fingerprint(path: Path) -> None:
    before = load(path).info.fingerprint
    assert load(path).info.fingerprint == before
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert load(path).info.fingerprint != before
