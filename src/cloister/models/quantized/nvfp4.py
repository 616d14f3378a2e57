"""NVFP4 checkpoints: E2M1 numbers (OCP Microscaling Formats 1.0, section 5.3.3), 16 of which share an E4M3 scale, and one
float32 factor for a tensor (NVIDIA, "Introducing NVFP4", 2025).

ModelOpt: `weight [out, in / 2]` uint8, the even input of each pair in the low half of a byte; `weight_scale [out, in / 16]`;
`weight_scale_2 []`, to multiply by. compressed-tensors: `weight_packed`, `weight_scale` and `weight_global_scale [1]`, to
divide by; here it is inverted once, in float32, as servers do. A weight is `number * (scale * factor)`, both products rounded
to float32. No back end rounds inputs to four bits, so `input_scale` changes nothing.

ModelOpt leaves the experts of Llama 4 and gpt-oss in stacks whose matrices lie as [in, out]: `NAME [experts, in / 2, out]`, two
inputs in a byte as above, `NAME_weight_scale [experts, in / 16, out]`, and a factor `NAME_weight_scale_2` for all or each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cloister.backends.tensors import E2M1_CODES, GroupedTensor
from cloister.models.config import ConfigFields
from cloister.models.quantized.base import Parts, StackedMatrices, StackPlace, Stored, StoredMatrix, cut_stack, take_part
from cloister.models.quantized.fp8 import E4M3, take_float8, take_float8_stack
from cloister.models.safetensors import TensorEntry
from cloister.types.errors import ModelError

GROUP = 16
ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "MIXED_PRECISION")
"""Of ModelOpt; the last one has some of the others, by module."""
_ZERO = 128
_RECORDS = (
    "producer",
    "ignore",
    "exclude_modules",
    "has_zero_point",
    "pre_quant_scale",
    "kv_cache_scheme",
    "kv_cache_quant_algo",
)
"""Of modules that are plain, as the file shows, and of the cache, which `--kv-dtype` says."""
_NOT_OURS = ("input_scale", "k_scale", "v_scale", "output_scale")


@dataclass(frozen=True, slots=True)
class ModelOptScheme:
    """Protocol `quantized.base.StackScheme`; the type of the codes shows how they are stored."""

    def take(self, module: str, shape: tuple[int, int], found: dict[str, TensorEntry]) -> Stored | None:
        parts = Parts(module, found)
        parts.drop(*_NOT_OURS)
        if parts.dtype("weight") == "U8":
            return take_nvfp4(parts, shape, "weight", "weight_scale_2")
        return take_float8(parts, shape, None) if parts.dtype("weight") in E4M3 else None

    def take_stack(self, place: StackPlace, found: dict[str, TensorEntry]) -> StackedMatrices | None:
        dtype = found[place.name].dtype if place.name in found else ""
        if dtype == "U8":
            return take_nvfp4_stack(place, found)
        return take_float8_stack(place, found, None) if dtype in E4M3 else None


def read_modelopt(fields: ConfigFields) -> ModelOptScheme:
    """Reads a config of method "modelopt", of config.json or hf_quant_config.json (ModelError says what is supported)."""
    nested = fields.take_any("quantization")
    if nested is not None:
        fields.drop(("producer",))
        if not isinstance(nested, dict):
            raise ModelError(f"'quantization' in {fields.source} must be an object", param="quantization")
        fields = ConfigFields(nested, f"quantization in {fields.source}")
    _check_algorithm(fields.take("quant_algo", str))
    _check_groups({"group_size": fields.take_any("group_size")})
    groups = fields.take_any("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        _check_groups(group.get("weights") if isinstance(group, dict) else None)
    layers = fields.take_any("quantized_layers")
    for layer in layers.values() if isinstance(layers, dict) else ():
        _check_algorithm(layer.get("quant_algo") if isinstance(layer, dict) else None)
        _check_groups(layer)
    fields.drop(_RECORDS)
    fields.finish()
    return ModelOptScheme()


def take_nvfp4(parts: Parts, shape: tuple[int, int], packed: str, factor: str, *, divides: bool = False) -> StoredMatrix:
    """Takes an NVFP4 matrix.

    Args:
        packed: name of the part with the codes.
        factor: name of the part with the tensor's factor.
        divides: numbers are divided by the factor, not multiplied.
    """
    num_out, num_in = shape
    if num_in % GROUP:
        raise ModelError(f"{parts.module} has {num_in} inputs, which are no whole groups of {GROUP}, as NVFP4 has them")
    codes = parts.take(packed, ("U8",), (num_out, num_in // 2))
    scales = parts.take("weight_scale", E4M3, (num_out, num_in // GROUP))
    tensor_scale = parts.take(factor, ("F32",), (), (1,))

    def read() -> GroupedTensor:
        found = _read_factor(tensor_scale.read(), f"{parts.module}.{factor}", divides=divides)
        return _assemble(np.ascontiguousarray(codes.read()), scales.read(), found, f"{parts.module}.weight_scale")

    return StoredMatrix(shape, lambda: _form(num_in), read)


def take_nvfp4_stack(place: StackPlace, found: dict[str, TensorEntry]) -> StackedMatrices:
    """Takes the matrices of all experts."""
    (num_experts, num_out, num_in), name = place.shape, place.name
    if num_in % GROUP:
        raise ModelError(f"{name} has {num_in} inputs, which are no whole groups of {GROUP}, as NVFP4 has them")
    codes, transposed = place.take(found, ("U8",), num_in // 2)
    scales = take_part(found, f"{name}_weight_scale", E4M3, place.lay(num_out, num_in // GROUP, transposed))
    factors = take_part(found, f"{name}_weight_scale_2", ("F32",), *place.one_number_each())
    found.pop(f"{name}_input_scale", None)

    def read(expert: int, rows: slice) -> GroupedTensor:
        its_factor = np.broadcast_to(factors.read().reshape(-1), num_experts)[expert : expert + 1]
        factor = _read_factor(its_factor, f"{name}_weight_scale_2", divides=False)
        numbers = cut_stack(scales, expert, rows, transposed)
        return _assemble(cut_stack(codes, expert, rows, transposed), numbers, factor, f"{name}_weight_scale")

    return StackedMatrices(place.shape, lambda: _form(num_in), read)


def _assemble(codes: npt.NDArray[np.uint8], scales: npt.NDArray[Any], factor: np.float32, name: str) -> GroupedTensor:
    """Returns the matrix of codes [out, in / 2], scales [out, in / 16], whose part is called `name`, and a factor."""
    halves = np.stack([codes & 15, codes >> 4], axis=-1)
    numbers = decode_e4m3(scales.view(np.uint8))
    if np.isnan(numbers).any():
        raise ModelError(f"the checkpoint's tensor {name!r} has a scale that is no number; download or copy it again")
    numbers *= np.float32(0.5)
    return _grouped(E2M1_CODES[halves].reshape(len(codes), -1), numbers, np.full(len(codes), factor, np.float32))


def decode_e4m3(stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Returns the numbers that bytes are in E4M3 without infinities."""
    numbers: npt.NDArray[np.float32] = np.ascontiguousarray(stored).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return numbers


def _form(num_in: int) -> GroupedTensor:
    scales = np.ones((1, num_in // GROUP), np.float32)
    return _grouped(np.full((1, num_in), _ZERO, np.uint8), scales, np.ones(1, np.float32))


def _grouped(
    codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32], output_scales: npt.NDArray[np.float32]
) -> GroupedTensor:
    return GroupedTensor(codes, scales, None, None, 8, GROUP, "bfloat16", output_scales=output_scales, is_nvfp4=True)


def _read_factor(stored: npt.NDArray[np.float32], name: str, *, divides: bool) -> np.float32:
    factor = np.float32(stored.reshape(-1)[0])
    with np.errstate(all="ignore"):  # what comes out is checked
        factor = np.float32(1) / factor if divides else factor
    if not np.isfinite(factor):
        raise ModelError(f"the checkpoint's tensor {name!r} is no factor that weights could have; download or copy it again")
    return factor


def _check_algorithm(name: object) -> None:
    if name not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise ModelError(f"ModelOpt's quant_algo {name!r} is not supported; supported are: {known}", param="quant_algo")


def _check_groups(weights: object) -> None:
    size = weights.get("group_size") if isinstance(weights, Mapping) else None
    if size not in (None, GROUP):
        raise ModelError(
            f"NVFP4 weights in groups of {size} are not supported; supported are groups of {GROUP}", param="group_size"
        )
