"""Published quantised checkpoints: tiny models written here in each method's layout, bit by bit, and read back.

Every exporter draws codes, scales and zeros, writes them as the method's documentation says, and works out the weight from its
own numbers; what the reader makes of the file must equal that exactly.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from cloister.backends.native.backend import NativeBackend
from cloister.backends.tensors import GroupedTensor, dequantized, stored_bits
from cloister.models import load
from cloister.models.quantized.fp8 import multiply
from cloister.types.errors import ModelError
from tests.driving import build
from tests.model_factory import make_model
from tests.native import build_native, relative_error

Array = npt.NDArray[Any]
Exporter = Callable[[np.random.Generator, int, int], tuple[dict[str, Array], Array]]
"""Draws a matrix [out, in]: its parts by name, and the weight that they stand for."""


def words(codes: Array, bits: int) -> Array:
    """Packs codes [rows, columns] into int32 words along columns, one code after another, the first in the lowest bits."""
    per_word = 32 // bits
    packed = np.zeros((codes.shape[0], -(-codes.shape[1] // per_word)), np.uint32)
    for column in range(codes.shape[1]):
        packed[:, column // per_word] |= codes[:, column].astype(np.uint32) << np.uint32(bits * (column % per_word))
    return packed.view(np.int32)


def draw(rng: np.random.Generator, num_out: int, num_groups: int, num_in: int, bits: int) -> tuple[Array, Array, Array]:
    """Draws codes [out, in], scales in float16 and zeros [out, groups]."""
    codes = rng.integers(0, 2**bits, (num_out, num_in))
    scales = (rng.random((num_out, num_groups)) * 0.02 + 0.001).astype(np.float16)
    return codes, scales, rng.integers(0, 2**bits, (num_out, num_groups))


def weight_of(codes: Array, zeros: Array, scales: Array, groups: Array) -> Array:
    """Works out a weight from the group of every input."""
    return (codes - zeros[:, groups]).astype(np.float32) * scales[:, groups].astype(np.float32)


def gptq(bits: int, *, group: int = 32, sym: bool = False, act_order: bool = False, offset: int = 1) -> Exporter:
    def export(rng: np.random.Generator, num_out: int, num_in: int) -> tuple[dict[str, Array], Array]:
        size = num_in if group == -1 else group
        codes, scales, zeros = draw(rng, num_out, num_in // size, num_in, bits)
        zeros = np.full_like(zeros, 2 ** (bits - 1)) if sym else zeros
        groups = np.arange(num_in) // size
        groups = rng.permutation(groups) if act_order else groups
        stored_zeros = (zeros - offset) % 2**bits
        parts = {
            "qweight": words(codes, bits).T.copy(),
            "qzeros": words(stored_zeros.T, bits),
            "scales": scales.T.copy(),
            "g_idx": groups.astype(np.int32),
        }
        return parts, weight_of(codes, zeros, scales, groups)

    return export


def awq(group: int = 32) -> Exporter:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def shuffle(rows: Array) -> Array:
        return rows.reshape(len(rows), -1, 8)[:, :, order].reshape(len(rows), -1)

    def export(rng: np.random.Generator, num_out: int, num_in: int) -> tuple[dict[str, Array], Array]:
        codes, scales, zeros = draw(rng, num_out, num_in // group, num_in, 4)
        parts = {
            "qweight": words(shuffle(codes.T), 4),
            "qzeros": words(shuffle(zeros.T), 4),
            "scales": scales.T.copy(),
        }
        return parts, weight_of(codes, zeros, scales, np.arange(num_in) // group)

    return export


def packed(bits: int, *, group: int = 32, symmetric: bool = True, act_order: bool = False) -> Exporter:
    def export(rng: np.random.Generator, num_out: int, num_in: int) -> tuple[dict[str, Array], Array]:
        size = num_in if group == -1 else group
        codes, scales, zeros = draw(rng, num_out, num_in // size, num_in, bits)
        zeros = np.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
        groups = np.arange(num_in) // size
        groups = rng.permutation(groups) if act_order else groups
        parts = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": np.array([num_out, num_in])}
        if not symmetric:
            parts["weight_zero_point"] = words(zeros.T, bits).T.copy()
        if act_order:
            parts["weight_g_idx"] = groups.astype(np.int32)
        return parts, weight_of(codes, zeros, scales, groups)

    return export


def int8(scale_shape: Callable[[int], tuple[int, ...]], symmetric: bool = True) -> Exporter:
    def export(rng: np.random.Generator, num_out: int, num_in: int) -> tuple[dict[str, Array], Array]:
        values = rng.integers(-127, 128, (num_out, num_in)).astype(np.int8)
        scales = (rng.random(scale_shape(num_out)) * 0.01 + 0.001).astype(np.float32)
        parts: dict[str, Array] = {"weight": values, "weight_scale": scales}
        zeros = np.zeros((num_out, 1), np.int8)
        if not symmetric:
            zeros = parts["weight_zero_point"] = rng.integers(-20, 20, (num_out, 1)).astype(np.int8)
        integers = values.astype(np.float32) - zeros.astype(np.float32)
        return parts, integers * (scales if scales.ndim else scales.reshape(1, 1))

    return export


def float8(name: str, block: tuple[int, int] | None, scale_shape: Callable[[int], tuple[int, ...]] = lambda n: ()) -> Exporter:
    def export(rng: np.random.Generator, num_out: int, num_in: int) -> tuple[dict[str, Array], Array]:
        values = (rng.standard_normal((num_out, num_in)) * 50).astype(ml_dtypes.float8_e4m3fn)
        if block is None:
            scales = (rng.random(scale_shape(num_out)) * 0.001 + 1e-4).astype(np.float32)
            spread = scales.reshape(-1, 1)
        else:
            scales = rng.random((-(-num_out // block[0]), -(-num_in // block[1])), np.float32) * np.float32(0.001)
            spread = np.kron(scales, np.ones(block, np.float32))[:num_out, :num_in]
        product = (values.astype(np.float32) * spread).astype(ml_dtypes.bfloat16)
        return {"weight": values, name: scales}, product.astype(np.float32)

    return export


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def nvfp4(*, divides: bool = False) -> Exporter:
    """Floats of 4 bits, the even input of a pair in the low half of a byte, scales in E4M3 and a factor for the tensor."""

    def export(rng: np.random.Generator, num_out: int, num_in: int) -> tuple[dict[str, Array], Array]:
        codes = rng.integers(0, 16, (num_out, num_in)).astype(np.uint8)
        scales = rng.integers(0, 127, (num_out, num_in // 16)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
        factor = np.float32(rng.uniform(1e-5, 1e-4))
        names = ("weight_packed", "weight_global_scale", "input_global_scale") if divides else (
            "weight", "weight_scale_2", "input_scale")  # fmt: skip
        stored = np.float32(1) / factor if divides else factor
        factor = np.float32(1) / stored if divides else factor
        shape = (1,) if divides else ()
        packed_codes = codes[:, 0::2] | codes[:, 1::2] << 4
        parts = {names[0]: packed_codes, "weight_scale": scales, names[1]: np.full(shape, stored, np.float32)}
        product = E2M1[codes] * (scales.astype(np.float32) * factor).repeat(16, 1)
        return {**parts, names[2]: np.full(shape, 0.5, np.float32)}, product

    return export


def modelopt(algorithm: str = "NVFP4", group_size: int = 16, **fields: Any) -> dict[str, Any]:
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": group_size}
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "config_groups": {"group_0": {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.39.0"},
        **fields,
    }


def to_torch(array: Array) -> torch.Tensor:
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(array.view(np.uint8).copy()).view(torch.float8_e4m3fn)
    return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))


def write(path: Path, export: Exporter, config: dict[str, Any], family: str = "llama", **fields: Any) -> dict[str, Array]:
    """Writes a model whose every projection is quantised; returns the weights they stand for by stored name."""
    make_model(path, family, **{"intermediate_size": 160, "hidden_size": 128, **fields})
    tensors, rng, weights = load_file(path / "model.safetensors"), np.random.default_rng(0), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        parts, weights[name] = export(rng, *tensors.pop(name).shape)
        module = name.removesuffix(".weight")
        tensors.update({f"{module}.{part}": to_torch(array) for part, array in parts.items()})
    save_file(tensors, path / "model.safetensors")
    change_config(path, quantization_config=config)
    return weights


def change_config(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))


def gptq_config(bits: int, **fields: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
        "damp_percent": 0.01,
        **fields,
    }


AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def compressed(stored: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    arguments = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": {**arguments, **weights},
        "input_activations": inputs,
        "output_activations": None,
    }
    return {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


UP = "model.layers.0.mlp.up_proj"
NVFP4 = {
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": "torch.float8_e4m3fn",
    "zp_dtype": None,
    "observer": "static_minmax",
}
FOUR_BITS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local", "group_size": 16}
CHANNEL = {"num_bits": 8, "strategy": "channel", "group_size": None}
CASES: dict[str, tuple[Exporter, dict[str, Any]]] = {
    "gptq 4 bits": (gptq(4), gptq_config(4)),
    "gptq 4 bits, symmetric": (gptq(4, sym=True), gptq_config(4)),
    "gptq 8 bits": (gptq(8), gptq_config(8, sym=False)),
    "gptq act-order": (gptq(4, act_order=True), gptq_config(4, desc_act=True)),
    "gptq 8 bits act-order": (gptq(8, act_order=True), gptq_config(8, desc_act=True)),
    "gptq whole rows": (gptq(4, group=-1), gptq_config(4, group_size=-1)),
    "gptq format 2": (gptq(4, offset=0), gptq_config(4, checkpoint_format="gptq_v2")),
    "awq": (awq(), AWQ),
    "packed 4 bits": (packed(4), compressed("pack-quantized")),
    "packed 4 bits, asymmetric": (packed(4, symmetric=False), compressed("pack-quantized", symmetric=False)),
    "packed 8 bits": (packed(8, symmetric=False), compressed("pack-quantized", num_bits=8, symmetric=False)),
    "packed act-order": (packed(4, act_order=True), compressed("pack-quantized", actorder="group")),
    "packed whole rows": (packed(4, group=-1), compressed("pack-quantized", strategy="channel", group_size=None)),
    "int8": (int8(lambda n: (n, 1)), compressed("int-quantized", TOKEN, **CHANNEL)),
    "int8, asymmetric": (int8(lambda n: (n, 1), False), compressed("int-quantized", TOKEN, **CHANNEL, symmetric=False)),
    "int8, one scale": (
        int8(lambda n: (1,)),
        compressed("int-quantized", TOKEN, num_bits=8, strategy="tensor", group_size=None),
    ),
    "compressed fp8": (float8("weight_scale", None, lambda n: (n, 1)), compressed("float-quantized", type="float", **CHANNEL)),
    "compressed fp8 blocks": (
        float8("weight_scale", (64, 128)),
        compressed("float-quantized", type="float", num_bits=8, strategy="block", group_size=None, block_structure=[64, 128]),
    ),
    "NVFP4 of ModelOpt": (nvfp4(), modelopt()),
    "NVFP4 of compressed-tensors": (nvfp4(divides=True), compressed("nvfp4-pack-quantized", FOUR_BITS, **NVFP4)),
    "fp8 of ModelOpt": (float8("weight_scale", None), modelopt("FP8")),
    "fp8 per tensor": (float8("weight_scale", None), {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8 per output": (
        float8("weight_scale", None, lambda n: (n, 1)),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    ),
    "fp8 blocks": (
        float8("weight_scale_inv", (128, 128)),
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
}


def canonical(stored: str) -> str:
    parts = stored.split(".")
    return f"layers.{parts[2]}.{parts[4].removesuffix('_proj')}.weight"


@pytest.mark.parametrize("case", CASES)
def test_every_weight_equals_its_reference_in_every_bit(case: str, tmp_path: Path) -> None:
    expected = write(tmp_path, *CASES[case])
    weights = load(tmp_path).weights
    assert len(expected) == 14
    for stored, weight in expected.items():
        found = dequantized(weights.read(canonical(stored)))
        assert found.dtype == (ml_dtypes.bfloat16 if "fp8" in case else np.float32)
        assert np.array_equal(found.astype(np.float32), weight), stored
        assert weights.shape(canonical(stored)) == weight.shape


@pytest.mark.parametrize("case", ["gptq act-order", "awq", "packed 4 bits, asymmetric", "fp8 blocks", "NVFP4 of ModelOpt"])
def test_logits_are_those_of_the_reference_weights(case: str, tmp_path: Path) -> None:
    expected = write(tmp_path / "few", *CASES[case])
    plain = make_model(tmp_path / "plain", "llama", intermediate_size=160, hidden_size=128)
    tensors = load_file(plain / "model.safetensors")
    tensors.update({name: torch.from_numpy(np.ascontiguousarray(weight)) for name, weight in expected.items()})
    save_file(tensors, plain / "model.safetensors")
    few, whole = (build(model.spec, model.weights).run("a", list(range(30))) for model in map(load, (tmp_path / "few", plain)))
    assert few.tobytes() == whole.tobytes()


@pytest.mark.parametrize("block", [None, (128, 128)])
def test_fp8_is_read_without_a_copy_of_more_bits(block: tuple[int, int] | None) -> None:
    codes = np.ones((2048, 1024), ml_dtypes.float8_e4m3fn)
    scale = np.full((16, 8) if block else (2048, 1), 0.5, np.float32)
    tracemalloc.start()
    weight = multiply(codes, scale, block)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (weight == 0.5).all()
    assert peak_bytes < weight.nbytes + (4 << 20)  # 8 MiB more where all of it goes through float32


@pytest.mark.parametrize(
    ("case", "bits", "activations"),
    [("gptq 8 bits", 8, "bfloat16"), ("awq", 4, "bfloat16"), ("int8", 8, "int8"), ("packed 4 bits", 4, "bfloat16")],
)
def test_a_matrix_says_what_meets_its_codes(case: str, bits: int, activations: str, tmp_path: Path) -> None:
    write(tmp_path, *CASES[case])
    found = load(tmp_path).weights.read("layers.0.up.weight")
    assert isinstance(found, GroupedTensor)
    assert (found.bits, found.activations) == (bits, activations)


def test_zeros_in_the_middle_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, *CASES["gptq 4 bits, symmetric"])
    found = load(tmp_path).weights.read("layers.0.up.weight")
    assert isinstance(found, GroupedTensor)
    assert found.zeros is None


def test_rounded_inputs_may_come_with_4_bit_weights(tmp_path: Path) -> None:
    write(tmp_path, packed(4), compressed("pack-quantized", TOKEN))
    found = load(tmp_path).weights.read("layers.0.up.weight")
    assert isinstance(found, GroupedTensor)
    assert found.activations == "int8"


def test_memory_is_counted_before_anything_is_read(tmp_path: Path) -> None:
    write(tmp_path, *CASES["gptq 4 bits"])
    weights = load(tmp_path).weights
    form = weights.form("layers.0.up.weight")
    assert form is not None
    assert stored_bits(form) == 4 + (16 + 8) / 32
    assert weights.form("embed.weight") is None


def test_a_group_may_name_its_modules(tmp_path: Path) -> None:
    config = compressed("mixed-precision")
    groups = config["config_groups"]
    groups["group_1"] = json.loads(json.dumps(groups["group_0"]))
    groups["group_1"]["targets"] = ["re:.*mlp.*"]
    groups["group_1"]["weights"]["group_size"] = 16

    def export(rng: np.random.Generator, num_out: int, num_in: int) -> tuple[dict[str, Array], Array]:
        return packed(4, group=16 if 160 in (num_out, num_in) else 32)(rng, num_out, num_in)

    for stored, weight in write(tmp_path, export, config).items():
        assert np.array_equal(dequantized(load(tmp_path).weights.read(canonical(stored))), weight)


def test_older_exporters_wrote_a_file_of_their_own(tmp_path: Path) -> None:
    expected = write(tmp_path, *CASES["awq"])
    change_config(tmp_path, quantization_config=None)
    (tmp_path / "quant_config.json").write_text(
        json.dumps({"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"})
    )
    name = next(iter(expected))
    assert np.array_equal(dequantized(load(tmp_path).weights.read(canonical(name))), expected[name])


def test_a_bias_of_zeros_that_an_exporter_added_is_let_be(tmp_path: Path) -> None:
    write(tmp_path, *CASES["gptq 4 bits"])
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(160)}))
    load(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors["model.layers.0.mlp.up_proj.bias"].add_(1))
    with pytest.raises(ModelError, match="no place for"):
        load(tmp_path)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "method": ("gptq 4 bits", {"quant_method": "hqq"}, "'hqq' is not supported; supported are: gptq, awq"),
    "gptq bits": ("gptq 4 bits", gptq_config(3), "3 bits is not supported; supported are: 4, 8"),
    "gptq format": ("gptq 4 bits", gptq_config(4, checkpoint_format="marlin"), "'marlin' is not supported"),
    "gptq groups": ("gptq 4 bits", gptq_config(4, group_size=24), "groups of 24"),
    "gptq per module": (
        "gptq 4 bits",
        gptq_config(4, dynamic={"-:up": {}}),
        "'dynamic' in quantization_config is only supported",
    ),
    "gptq unknown": ("gptq 4 bits", gptq_config(4, secret=1), "'secret'"),
    "awq bits": ("awq", {**AWQ, "bits": 8}, "8 bits is not supported"),
    "awq version": ("awq", {**AWQ, "version": "gemv"}, "supported is: gemm"),
    "format": ("packed 4 bits", compressed("marlin-24"), "'marlin-24' is not supported; supported are: pack-quantized"),
    "bits": ("packed 4 bits", compressed("pack-quantized", num_bits=3), "3 bits are not supported; supported are: int 4"),
    "fp4": ("packed 4 bits", compressed("pack-quantized", type="float"), "floats of 4 bits are supported as NVFP4"),
    "fp4 groups": (
        "NVFP4 of compressed-tensors",
        compressed("nvfp4-pack-quantized", **{**NVFP4, "group_size": 32}),
        "in groups of 16",
    ),
    "int4 with a tensor's factor": (
        "packed 4 bits",
        compressed("pack-quantized", strategy="tensor_group", group_size=16),
        "nothing else of that strategy",
    ),
    "ModelOpt's algorithm": ("NVFP4 of ModelOpt", modelopt("W4A8_AWQ"), "'W4A8_AWQ' is not supported; supported are: NVFP4"),
    "ModelOpt's groups": ("NVFP4 of ModelOpt", modelopt(group_size=32), "in groups of 32 are not supported"),
    "ModelOpt's layers": (
        "NVFP4 of ModelOpt",
        modelopt("MIXED_PRECISION", quantized_layers={UP: {"quant_algo": "MXFP8"}}),
        "'MXFP8' is not supported",
    ),
    "ModelOpt's files": ("NVFP4 of ModelOpt", {"quant_method": "modelopt"}, "has no 'quant_algo'"),
    "static inputs": ("int8", compressed("int-quantized", {**TOKEN, "dynamic": False}, **CHANNEL), "one scale per token"),
    "kv": ("packed 4 bits", {**compressed("pack-quantized"), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is not"),
    "fp8 kind": ("fp8 per tensor", {"quant_method": "fp8", "fmt": "e5m2"}, "supported is: e4m3"),
    "no group": ("packed 4 bits", {**compressed("pack-quantized"), "config_groups": {}}, "no config group"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_supported_is_named_with_what_is(wrong: str, tmp_path: Path) -> None:
    case, config, message = WRONG[wrong]
    write(tmp_path, CASES[case][0], config)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{UP}.scales"), "lacks the tensor"),
        (lambda tensors: tensors.update({f"{UP}.qzeros": torch.zeros(3, 3, dtype=torch.int32)}), r"shape \(3, 3\)"),
        (lambda tensors: tensors.update({f"{UP}.scales": torch.zeros(4, 160, dtype=torch.int8)}), "type I8"),
    ],
)
def test_a_broken_part_is_named(change: Callable[[Any], object], message: str, tmp_path: Path) -> None:
    write(tmp_path, *CASES["gptq 4 bits"])
    rewrite(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_unequal_groups_are_refused(tmp_path: Path) -> None:
    write(tmp_path, *CASES["gptq 4 bits"])
    rewrite(tmp_path, lambda tensors: tensors[f"{UP}.g_idx"].fill_(0))
    with pytest.raises(ModelError, match="unequal size"):
        load(tmp_path).weights.read("layers.0.up.weight")


def scales_of(stored: list[int]) -> torch.Tensor:
    """Bytes of E4M3, as many as the matrix that `BROKEN` changes has."""
    return torch.tensor(stored, dtype=torch.uint8).repeat(160, 8)[:, :8].contiguous().view(torch.float8_e4m3fn)


BROKEN: dict[str, tuple[Callable[[Any], object], str]] = {
    "no scales": (lambda tensors: tensors.pop(f"{UP}.weight_scale"), "lacks the tensor.*weight_scale"),
    "no factor": (lambda tensors: tensors.pop(f"{UP}.weight_scale_2"), "lacks the tensor.*weight_scale_2"),
    "groups of 32": (
        lambda tensors: tensors.update({f"{UP}.weight_scale": scales_of([56])[:, :4].contiguous()}),
        r"weight_scale' has the shape \(160, 4\), \(160, 8\) is expected",
    ),
    "codes cut off": (
        lambda tensors: tensors.update({f"{UP}.weight": torch.zeros(160, 32, dtype=torch.uint8)}),
        r"has the shape \(160, 32\), \(160, 64\) is expected",
    ),
    "scales of another type": (
        lambda tensors: tensors.update({f"{UP}.weight_scale": torch.zeros(160, 8)}),
        "weight_scale' has the type F32; supported are: F8_E4M3",
    ),
    "codes of another type": (
        lambda tensors: tensors.update({f"{UP}.weight": torch.zeros(160, 64, dtype=torch.int8)}),
        "weight' has the type I8",
    ),
    "a scale that is no number": (
        lambda tensors: tensors.update({f"{UP}.weight_scale": scales_of([56, 127, 56, 56, 56, 56, 56, 56])}),
        "weight_scale' has a scale that is no number",
    ),
    "a factor that is no number": (
        lambda tensors: tensors.update({f"{UP}.weight_scale_2": torch.tensor(torch.nan)}),
        "weight_scale_2' is no factor",
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_damaged_matrix_in_nvfp4_ends_in_an_error_that_names_the_part(broken: str, tmp_path: Path) -> None:
    change, message = BROKEN[broken]
    write(tmp_path, *CASES["NVFP4 of ModelOpt"])
    rewrite(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        load(tmp_path).weights.read("layers.0.up.weight")


def test_a_factor_to_divide_by_may_not_be_zero(tmp_path: Path) -> None:
    write(tmp_path, *CASES["NVFP4 of compressed-tensors"])
    rewrite(tmp_path, lambda tensors: tensors[f"{UP}.weight_global_scale"].zero_())
    with pytest.raises(ModelError, match="weight_global_scale' is no factor"):
        load(tmp_path).weights.read("layers.0.up.weight")


def test_scales_of_a_cache_and_of_inputs_change_nothing(tmp_path: Path) -> None:
    expected = write(tmp_path, *CASES["NVFP4 of ModelOpt"])
    scale = {f"model.layers.{layer}.self_attn.{name}_proj.{name}_scale": torch.tensor(0.1) for layer in (0, 1) for name in "kv"}
    rewrite(tmp_path, lambda tensors: tensors.update(scale))
    for stored, weight in expected.items():
        assert np.array_equal(dequantized(load(tmp_path).weights.read(canonical(stored))), weight)


def test_modelopt_may_say_its_format_in_a_file_of_its_own(tmp_path: Path) -> None:
    expected = write(tmp_path, *CASES["NVFP4 of ModelOpt"])
    change_config(tmp_path, quantization_config=None)
    said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    name = next(iter(expected))
    assert np.array_equal(dequantized(load(tmp_path).weights.read(canonical(name))), expected[name])


def test_modelopt_may_mix_numbers_of_8_and_4_bits(tmp_path: Path) -> None:
    layers = {UP: {"quant_algo": "NVFP4", "group_size": 16}, "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}

    def export(rng: np.random.Generator, num_out: int, num_in: int) -> tuple[dict[str, Array], Array]:
        return (nvfp4() if 160 in (num_out, num_in) else float8("weight_scale", None))(rng, num_out, num_in)

    for stored, weight in write(tmp_path, export, modelopt("MIXED_PRECISION", quantized_layers=layers)).items():
        found = dequantized(load(tmp_path).weights.read(canonical(stored)))
        assert np.array_equal(found.astype(np.float32), weight)


def test_nvfp4_takes_four_and_a_half_bits(tmp_path: Path) -> None:
    write(tmp_path, *CASES["NVFP4 of ModelOpt"])
    form = load(tmp_path).weights.form("layers.0.up.weight")
    assert form is not None
    assert stored_bits(form) == 4 + 8 / 16 + 32 / 128


def test_experts_in_nvfp4_compute_what_their_numbers_do_on_both_back_ends(tmp_path: Path) -> None:
    expected = write(tmp_path / "few", nvfp4(), modelopt(), "qwen3_moe")
    assert sum(".experts." in name for name in expected) == 2 * 6 * 3
    plain = make_model(tmp_path / "plain", "qwen3_moe", intermediate_size=160, hidden_size=128)
    tensors = load_file(plain / "model.safetensors")
    tensors.update({name: torch.from_numpy(np.ascontiguousarray(weight)) for name, weight in expected.items()})
    save_file(tensors, plain / "model.safetensors")
    few, whole = load(tmp_path / "few"), load(plain)
    tokens = list(range(60))
    exact = build(whole.spec, whole.weights).run("a", tokens)
    assert build(few.spec, few.weights).run("a", tokens).tobytes() == exact.tobytes()
    driver = build_native(few.spec, few.weights)
    assert relative_error(driver.run("a", tokens), exact) < 0.02
    need = NativeBackend(num_threads=1, device="cpu", dtype="bfloat16").need
    few_bytes, whole_bytes = (
        need(model.spec, model.weights, block_size=16, max_batched_tokens=16).weights_bytes for model in (few, whole)
    )
    assert few_bytes < 0.6 * whole_bytes
