"""Experts in stacks of quantised matrices; and alone where their family has stacks, or the other way round."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from cloister.backends.tensors import GroupedTensor, dequantized
from cloister.models import load
from cloister.models.safetensors import read_header, write_tensors
from cloister.types.errors import ModelError
from tests.driving import build_from
from tests.model_factory import make_model
from tests.qwen_vl_factory import make_qwen_vl
from tests.reference import compare

Array = npt.NDArray[Any]
Parts = dict[str, Array]
Coding = Callable[[np.random.Generator, tuple[int, int, int]], tuple[Parts, Array]]
"""Draws a stack [experts, in, out]: its parts by what follows its name, and the numbers that they stand for."""
TOKENS = np.random.default_rng(2).integers(0, 320, 60).tolist()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt", "version": "0.39.0"}}


def nvfp4(rng: np.random.Generator, shape: tuple[int, int, int], factor: float = 3e-4) -> tuple[Parts, Array]:
    """What ModelOpt leaves of the experts of Llama 4 and gpt-oss."""
    num_experts, num_in, num_out = shape
    codes = rng.integers(0, 16, shape).astype(np.uint8)
    scales = rng.integers(40, 100, (num_experts, num_in // 16, num_out)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    parts = {
        "": codes[:, 0::2] | codes[:, 1::2] << 4,
        "_weight_scale": scales,
        "_weight_scale_2": np.array(factor, np.float32),
        "_input_scale": np.array(0.01, np.float32),
    }
    return parts, E2M1[codes] * (scales.astype(np.float32) * np.float32(factor)).repeat(16, 1)


def nvfp4_by_expert(rng: np.random.Generator, shape: tuple[int, int, int]) -> tuple[Parts, Array]:
    parts, numbers = nvfp4(rng, shape, 1)
    factors = rng.uniform(1e-4, 1e-3, (shape[0], 1, 1)).astype(np.float32)
    scales = parts["_weight_scale"].astype(np.float32)
    numbers = np.where(scales.repeat(16, 1) == 0, 0, numbers / scales.repeat(16, 1)) * (scales * factors).repeat(16, 1)
    return {**parts, "_weight_scale_2": factors[:, 0, 0]}, numbers


def float8(name: str, scale_shape: Callable[[int, int, int], tuple[int, ...]], block: int = 0) -> Coding:
    def code(rng: np.random.Generator, shape: tuple[int, int, int]) -> tuple[Parts, Array]:
        num_experts, num_in, num_out = shape
        values = (rng.standard_normal(shape) * 50).astype(ml_dtypes.float8_e4m3fn)
        scales = rng.uniform(1e-4, 1e-3, scale_shape(*shape)).astype(np.float32)
        if block:
            spread = scales.repeat(block, 1).repeat(block, 2)[:, :num_in, :num_out]
        else:
            spread = scales.reshape(num_experts if scales.size > 1 else 1, 1, -1)
        parts = {"": values, name: scales, "_input_scale": np.array(0.01, np.float32)}
        return parts, (values.astype(np.float32) * spread).astype(ml_dtypes.bfloat16)

    return code


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FORMS: dict[str, tuple[str, Coding, dict[str, Any]]] = {
    "NVFP4 of Llama 4": ("llama4_text", nvfp4, MODELOPT),
    "NVFP4 of gpt-oss": ("gpt_oss", nvfp4, MODELOPT),
    "NVFP4, a factor for each expert": ("llama4_text", nvfp4_by_expert, MODELOPT),
    "FP8 of ModelOpt": ("llama4_text", float8("_weight_scale", lambda e, i, o: ()), {**MODELOPT, "quant_algo": "FP8"}),
    "FP8 of FBGEMM, by output": ("llama4_text", float8("_scale", lambda e, i, o: (e, 1, o)), {"quant_method": "fbgemm_fp8"}),
    "FP8 of FBGEMM, by output, the other way": ("llama4_text", float8("_scale", lambda e, i, o: (e, o, 1)), FP8),
    "FP8, a scale for each expert": ("gpt_oss", float8("_scale_inv", lambda e, i, o: (e, 1, 1)), FP8),
    "FP8 in blocks": (
        "llama4_text", float8("_scale_inv", lambda e, i, o: (e, -(-i // 20), -(-o // 20)), 20),
        {**FP8, "weight_block_size": [20, 20]},
    ),
}  # fmt: skip


def is_stack(name: str) -> bool:
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def change_config(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))


def write_both(tmp_path: Path, family: str, code: Coding, config: dict[str, Any], **fields: Any) -> tuple[Path, Path]:
    """Writes a model with coded experts, and one with the numbers that they stand for."""
    coded, plain = (make_model(tmp_path / name, family, **fields) for name in ("coded", "plain"))
    rng, tensors = np.random.default_rng(3), load_file(plain / "model.safetensors")
    stored: Parts = {}
    for name in tensors:
        if not is_stack(name):
            stored[name] = tensors[name]
            continue
        parts, numbers = code(rng, tensors[name].shape)
        stored |= {name + end: part for end, part in parts.items()}
        tensors[name] = numbers.astype(np.float32)
    assert any(is_stack(name) for name in tensors)
    write_tensors(coded / "model.safetensors", stored)
    write_tensors(plain / "model.safetensors", tensors)
    change_config(coded, quantization_config=config)
    return coded, plain


@pytest.mark.parametrize("form", FORMS)
def test_stacks_in_few_bits_compute_what_their_numbers_do(form: str, tmp_path: Path) -> None:
    coded, plain = write_both(tmp_path, *FORMS[form])
    assert build_from(coded).run("a", TOKENS).tobytes() == build_from(plain).run("a", TOKENS).tobytes()


def test_their_numbers_are_those_that_transformers_computes_with(tmp_path: Path) -> None:
    agreement = compare(write_both(tmp_path, "llama4_text", nvfp4, MODELOPT, attention_chunk_size=64)[1], TOKENS, 40)
    assert agreement.difference <= 1e-4
    assert agreement.num_equal == agreement.num_tokens


@pytest.mark.parametrize("family", ["llama4_text", "gpt_oss"])
def test_the_native_back_end_multiplies_nvfp4_in_four_bits_with_the_bits_of_bfloat16(family: str, tmp_path: Path) -> None:
    """With a power of two as factor: then a number times its scales is exact in bfloat16."""
    paths = write_both(tmp_path, family, lambda rng, shape: nvfp4(rng, shape, 2.0**-12), MODELOPT)
    found, expected = (build_from(path, backend="native", dtype="bfloat16") for path in paths)
    assert found.run("a", TOKENS).tobytes() == expected.run("a", TOKENS).tobytes()
    weights = load(paths[0]).weights
    names = [name for name in weights.names() if ".experts." in name and name.endswith(".weight")]
    assert names
    for name in names:
        tensor, form = weights.read(name), weights.form(name)
        assert isinstance(tensor, GroupedTensor)
        assert isinstance(form, GroupedTensor)
        assert tensor.is_nvfp4
        assert form.is_nvfp4
        assert tensor.shape == weights.shape(name)


@pytest.mark.parametrize("is_turned", [False, True], ids=["as published", "as transformers 5 writes them"])
def test_fp8_stacks_of_qwen3_vl_are_read_either_way(is_turned: bool, tmp_path: Path) -> None:
    """The scales of blocks lie as the stack does."""
    path = make_qwen_vl(tmp_path, "qwen3_vl_moe")
    stored: Parts = {name: np.array(entry.read()) for name, entry in read_header(path / "model.safetensors").items()}
    rng, expected = np.random.default_rng(5), {}
    code = float8("_scale_inv", lambda e, i, o: (e, -(-i // 32), -(-o // 32)), 32)
    for name in [name for name in stored if is_stack(name)]:
        num_in, num_out = (64, 96) if "gate_up" in name else (48, 64)
        parts, expected[name] = code(rng, (6, num_in, num_out))
        del parts["_input_scale"]
        stored |= {name + end: np.ascontiguousarray(part.swapaxes(1, 2)) if is_turned else part for end, part in parts.items()}
    write_tensors(path / "model.safetensors", stored)
    change_config(path, quantization_config={**FP8, "weight_block_size": [32, 32]})
    weights = load(path).weights
    for expert in range(6):
        gate_up, down = (
            expected[f"model.language_model.layers.1.mlp.experts.{name}"][expert].T for name in ("gate_up_proj", "down_proj")
        )
        for name, matrix in (("gate", gate_up[:48]), ("up", gate_up[48:]), ("down", down)):
            assert np.array_equal(dequantized(weights.read(f"layers.1.experts.{expert}.{name}.weight")), matrix)


DAMAGE: dict[str, tuple[str, Callable[[Parts], Array | None]]] = {
    "lacks the tensor .*_weight_scale'": ("_weight_scale", lambda parts: None),
    "lacks the tensor .*_weight_scale_2'": ("_weight_scale_2", lambda parts: None),
    "_weight_scale' has the type F32": ("_weight_scale", lambda parts: parts["_weight_scale"].astype(np.float32)),
    "_weight_scale' has the shape": ("_weight_scale", lambda parts: parts["_weight_scale"][:, :1].copy()),
    "down_proj' has the shape": ("", lambda parts: parts[""][:, :, :32].copy()),
    "_weight_scale' has a scale that is no number": (
        "_weight_scale", lambda parts: np.full_like(parts["_weight_scale"].view(np.uint8), 127).view(ml_dtypes.float8_e4m3fn),
    ),
    "_weight_scale_2' is no factor": ("_weight_scale_2", lambda parts: np.array(np.inf, np.float32)),
}  # fmt: skip


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_stacks_end_in_an_error_that_names_the_part(message: str, tmp_path: Path) -> None:
    path = write_both(tmp_path, "gpt_oss", nvfp4, MODELOPT, num_hidden_layers=1)[0]
    stored, name = load_file_with_codes(path), "model.layers.0.mlp.experts.down_proj"
    end, damage = DAMAGE[message]
    found = damage({key.removeprefix(name): part for key, part in stored.items() if key.startswith(name)})
    del stored[name + end]
    if found is not None:
        stored[name + end] = found
    write_tensors(path / "model.safetensors", stored)
    with pytest.raises(ModelError, match=message):
        load(path).weights.read("layers.0.experts.1.down.weight")


def load_file_with_codes(path: Path) -> Parts:
    return {name: np.array(entry.read()) for name, entry in read_header(path / "model.safetensors").items()}


def test_blocks_of_a_turned_stack_must_be_square(tmp_path: Path) -> None:
    path = write_both(tmp_path, *FORMS["FP8 in blocks"])[0]
    change_config(path, quantization_config={**FP8, "weight_block_size": [20, 40]})
    with pytest.raises(ModelError, match="must be square"):
        load(path)


# Stacks in some checkpoints, experts alone in others.


def part_stacks(tensors: Parts) -> Parts:
    """Returns tensors with each expert's matrices alone, [out, in]."""
    parted: Parts = {}
    for name, tensor in tensors.items():
        if not is_stack(name):
            parted[name] = tensor
            continue
        before = name.rpartition(".")[0]
        for expert, matrix in enumerate(tensor.swapaxes(1, 2)):
            halves = np.split(matrix, 2) if "gate_up" in name else [matrix]
            names = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            parted |= {
                f"{before}.{expert}.{module}.weight": np.ascontiguousarray(half)
                for module, half in zip(names, halves, strict=True)
            }
    return parted


def test_experts_of_llama_4_may_be_alone_as_in_maverick(tmp_path: Path) -> None:
    path = make_model(tmp_path, "llama4_text")
    before = build_from(path).run("a", TOKENS)
    write_tensors(path / "model.safetensors", part_stacks(load_file(path / "model.safetensors")))
    assert build_from(path).run("a", TOKENS).tobytes() == before.tobytes()


def test_experts_alone_may_be_quantised_where_the_family_has_stacks(tmp_path: Path) -> None:
    """As Maverick is published: FP8 of compressed-tensors, a scale for each output."""
    path, plain = make_model(tmp_path / "coded", "llama4_text"), make_model(tmp_path / "plain", "llama4_text")
    rng, stored, numbers = np.random.default_rng(4), {}, {}
    for name, tensor in part_stacks(load_file(plain / "model.safetensors")).items():
        stored[name] = numbers[name] = tensor
        if ".experts." not in name:
            continue
        scales = rng.uniform(1e-3, 2e-3, (len(tensor), 1)).astype(np.float32)
        stored[name] = (tensor / scales).astype(ml_dtypes.float8_e4m3fn)
        stored[f"{name}_scale"] = scales
        numbers[name] = (stored[name].astype(np.float32) * scales).astype(ml_dtypes.bfloat16).astype(np.float32)
    write_tensors(path / "model.safetensors", stored)
    write_tensors(plain / "model.safetensors", numbers)
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    method = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": []}
    change_config(path, quantization_config={**method, "config_groups": {"group_0": group}})
    assert build_from(path).run("a", TOKENS).tobytes() == build_from(plain).run("a", TOKENS).tobytes()


def test_experts_of_qwen3_5_may_be_stacked_as_on_the_hub(tmp_path: Path) -> None:
    path = make_model(tmp_path, "qwen3_5_moe_text")
    before = build_from(path).run("a", TOKENS)
    stored = load_file(path / "model.safetensors")
    for layer in {name.partition(".experts.")[0] for name in stored if ".experts." in name}:
        matrices = {
            part: np.stack([stored.pop(f"{layer}.experts.{expert}.{part}_proj.weight") for expert in range(6)])
            for part in ("gate", "up", "down")
        }
        stored[f"{layer}.experts.gate_up_proj"] = np.concatenate([matrices["gate"], matrices["up"]], axis=1)
        stored[f"{layer}.experts.down_proj"] = matrices["down"]
    write_tensors(path / "model.safetensors", stored)
    assert build_from(path).run("a", TOKENS).tobytes() == before.tobytes()


def test_a_stack_of_a_method_that_has_none_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = write_both(tmp_path, *FORMS["FP8 of ModelOpt"])[0]
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    change_config(path, quantization_config={"quant_method": "compressed-tensors", "config_groups": groups})
    with pytest.raises(ModelError, match=r"experts.gate_up_proj.*--quant"):
        load(path)
