"""What `cloister quantize` writes is what it had: every format, through a directory and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cloister.backends.tensors import GroupedTensor, ProgressiveTensor, activations_of, dequantized
from cloister.models import LoadedModel, load
from cloister.models.quantized.encoding import Encoder, check_place, write_model
from cloister.quant import FORMATS, FormatOptions, quantize_on_read
from cloister.types.errors import ModelError
from tests.driving import build
from tests.model_factory import make_model

SIZES = {"hidden_size": 128, "intermediate_size": 208, "head_dim": 32}


def write(source: LoadedModel, out: Path, name: str) -> None:
    weights = quantize_on_read(source.spec, source.weights, FORMATS.get(name)(FormatOptions()))
    write_model(source.path, out, weights, "rtn")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("name", "activations"),
    [("int8", None), ("int8", "bfloat16"), ("int4", None), ("int4", "bfloat16"), ("nvfp4", None), ("qoq", None)],
)
def test_a_format_comes_back_as_it_was_written(name: str, activations: str | None, tied: bool, tmp_path: Path) -> None:
    source = load(make_model(tmp_path / "in", "qwen3", tie_word_embeddings=tied, **SIZES))
    number_format = FORMATS.get(name)(FormatOptions(activations=activations))
    weights = quantize_on_read(source.spec, source.weights, number_format)
    write_model(source.path, tmp_path / "out", weights, "rtn")
    found = load(tmp_path / "out")
    assert found.spec == source.spec
    for key, tensor in weights:
        again = found.weights.read(key)
        assert type(again) is type(tensor)
        assert np.array_equal(dequantized(again), dequantized(tensor)), key
        assert activations_of(again) == activations_of(tensor)
        assert (found.weights.form(key) is None) == isinstance(tensor, np.ndarray)
    tokens = list(range(40))
    assert build(found.spec, found.weights).run("a", tokens).tobytes() == build(source.spec, weights).run("a", tokens).tobytes()


@pytest.mark.parametrize("family", ["gemma3n_text", "deepseek_v32"])
def test_families_of_the_torch_back_end_come_back_as_they_were_written(family: str, tmp_path: Path) -> None:
    source = load(make_model(tmp_path / "in", family))
    write(source, tmp_path / "out", "int4")
    found = load(tmp_path / "out")
    assert found.spec == source.spec
    weights = quantize_on_read(source.spec, source.weights, FORMATS.get("int4")(FormatOptions()))
    tokens = list(range(40))
    assert build(found.spec, found.weights).run("a", tokens).tobytes() == build(source.spec, weights).run("a", tokens).tobytes()


def test_everything_else_is_copied(tmp_path: Path) -> None:
    source = load(make_model(tmp_path / "in", "llama", **SIZES))
    write_model(
        source.path,
        tmp_path / "out",
        quantize_on_read(source.spec, source.weights, FORMATS.get("int4")(FormatOptions())),
        "rtn",
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source.path / name).read_bytes()
    assert load(tmp_path / "out").info.defaults == source.info.defaults
    assert load(tmp_path / "out").info.fingerprint != source.info.fingerprint


def test_other_readers_find_plain_safetensors(tmp_path: Path) -> None:
    """Types and names as compressed-tensors documents them, read by the safetensors library."""
    source = load(make_model(tmp_path / "in", "llama", **SIZES))
    write_model(
        source.path,
        tmp_path / "out",
        quantize_on_read(source.spec, source.weights, FORMATS.get("int4")(FormatOptions(rotates=False))),
        "rtn",
    )
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    up = {name.rsplit(".", 1)[1]: tensor for name, tensor in tensors.items() if "layers.0.mlp.up_proj" in name}
    assert up["weight_packed"].dtype == torch.int32
    assert up["weight_packed"].shape == (208, 16)
    assert up["weight_scale"].dtype == torch.float16
    assert up["weight_shape"].tolist() == [208, 128]
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    linear = next(group for group in config["config_groups"].values() if group["targets"] == ["Linear"])
    assert linear["weights"] == {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False,
    }  # fmt: skip


def test_other_readers_find_nvfp4_in_the_layout_of_compressed_tensors(tmp_path: Path) -> None:
    source = load(make_model(tmp_path / "in", "llama", **SIZES))
    number_format = FORMATS.get("nvfp4")(FormatOptions(rotates=False))
    write_model(source.path, tmp_path / "out", quantize_on_read(source.spec, source.weights, number_format), "rtn")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    up = {name.rsplit(".", 1)[1]: tensor for name, tensor in tensors.items() if "layers.0.mlp.up_proj" in name}
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in up.items()} == {
        "weight_packed": (torch.uint8, (208, 64)),
        "weight_scale": (torch.float8_e4m3fn, (208, 8)),
        "weight_global_scale": (torch.float32, (1,)),
    }
    nibbles = torch.stack([up["weight_packed"] & 15, up["weight_packed"] >> 4], dim=-1).reshape(208, 128).long()
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])[nibbles]
    weight = numbers * (up["weight_scale"].float() / up["weight_global_scale"]).repeat_interleave(16, 1)
    written = number_format.quantize(np.asarray(source.weights.read("layers.0.up.weight")))
    assert np.array_equal(weight.numpy(), written.dequantize())
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    linear = next(group for group in config["config_groups"].values() if group["targets"] == ["Linear"])
    assert (config["quant_method"], linear["format"]) == ("compressed-tensors", "nvfp4-pack-quantized")
    assert linear["weights"] == {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16, "dynamic": False,
    }  # fmt: skip


def test_a_place_that_is_taken_is_refused(tmp_path: Path) -> None:
    source = make_model(tmp_path / "in", "llama", **SIZES)
    with pytest.raises(ModelError, match="exists already"):
        check_place(source, source)
    with pytest.raises(ModelError, match="GGUF file"):
        check_place(tmp_path / "model.gguf", tmp_path / "out")
    check_place(source, tmp_path / "out")


def test_a_disk_without_room_is_said_before_minutes_of_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_model(tmp_path / "in", "llama", **SIZES)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=1000))
    with pytest.raises(ModelError, match=r"the disk of .* has 0 MB free, .*; free some, or name a directory of another disk"):
        check_place(source, tmp_path / "new" / "out")


def test_a_tensor_that_no_format_of_ours_makes_is_not_written() -> None:
    zeros = np.full((4, 2), 3, np.uint8)
    tensor = GroupedTensor(np.zeros((4, 64), np.uint8), np.ones((4, 2), np.float32), zeros, None, 4, 32, "int8")
    with pytest.raises(ValueError, match="symmetric"):
        Encoder().add("a.weight", tensor)


def test_qoq_says_that_it_is_ours(tmp_path: Path) -> None:
    source = load(make_model(tmp_path / "in", "llama", **SIZES))
    write_model(
        source.path, tmp_path / "out", quantize_on_read(source.spec, source.weights, FORMATS.get("qoq")(FormatOptions())), "rtn"
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "cloister"
    assert isinstance(load(tmp_path / "out").weights.read("layers.0.q.weight"), ProgressiveTensor)


@pytest.mark.parametrize("family", ["mistral", "mixtral", "qwen2_moe", "gemma2", "gemma3_text", "smollm3", "granite", "olmo2"])
def test_what_is_written_of_other_families_comes_back(family: str, tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64} if family == "qwen2_moe" else {}
    source = load(make_model(tmp_path / "in", family, **SIZES, **sizes))
    write(source, tmp_path / "out", "int8")
    weights = quantize_on_read(source.spec, source.weights, FORMATS.get("int8")(FormatOptions()))
    found = load(tmp_path / "out")
    assert found.spec == source.spec
    tokens = list(range(40))
    assert np.array_equal(build(found.spec, found.weights).run("a", tokens), build(source.spec, weights).run("a", tokens))


@pytest.mark.parametrize("family", ["phi3", "gpt2", "opt", "gpt_neox"])
def test_families_that_store_matrices_otherwise_are_refused_before_any_work(family: str, tmp_path: Path) -> None:
    source = make_model(tmp_path / "in", family)
    with pytest.raises(ModelError, match="serve --quant"):
        check_place(source, tmp_path / "out")
