"""compressed-tensors checkpoints: packed int4 and int8, plain int8, FP8, and QoQ as `cloister quantize` adds it.

pack-quantized: `weight_packed [out, in * bits / 32]`, codes plus 2 ** (bits - 1); `weight_scale [out, groups]`; where
asymmetric, `weight_zero_point [out * bits / 32, groups]`, packed along outputs; with act-order `weight_g_idx [in]`.
int-quantized: `weight [out, in]` int8, `weight_scale [out, 1]` or of one number. float-quantized: `fp8`.
nvfp4-pack-quantized: `nvfp4`.
A config group with `rotation` has codes of the weight with blocks of that many inputs rotated
(`backends.tensors.rotate_blocks`).
QoQ: `qoq_codes [out, in / 2]`, the first code in the low half; `qoq_zeros`, `qoq_group_scales [out, groups]` uint8;
`qoq_channel_scales [out]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.backends.tensors import ROTATIONS, Activations, GroupedTensor, ProgressiveTensor
from cloister.models.config import ConfigFields
from cloister.models.quantized.base import (
    Codes,
    Parts,
    Stored,
    StoredMatrix,
    form_row,
    read_order,
    resolve_group_size,
    unless_symmetric,
    unpack_rows,
)
from cloister.models.quantized.fp8 import E4M3, read_block, take_float8
from cloister.models.quantized.nvfp4 import GROUP as NVFP4_GROUP
from cloister.models.quantized.nvfp4 import take_nvfp4
from cloister.models.safetensors import FLOATS, TensorEntry
from cloister.types.errors import ModelError

# The config groups of compressed-tensors: which modules are quantised, and how.


FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mixed-precision",
    "qoq",
)
_RECORDS = ("quantization_status", "global_compression_ratio", "version", "run_compressed", "sparsity_config", "calibration")
_NOT_OURS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


@dataclass(frozen=True, slots=True)
class WeightArguments:
    """How the matrices of one group are written.

    Attributes:
        group_size: -1 for one scale per output or per tensor.
        block: (outputs, inputs) that share a scale, for FP8.
        is_nvfp4: floats of 4 bits with two levels of scales; the rest says nothing then.
        rotation: as `backends.tensors.GroupedTensor` has it.
    """

    bits: int
    symmetric: bool
    group_size: int
    block: tuple[int, int] | None
    activations: Activations
    rotation: int
    is_nvfp4: bool = False


@dataclass(frozen=True, slots=True)
class Groups:
    """Arguments by target: a module's name, `re:` and a pattern of names, or the class "Linear"."""

    by_target: Mapping[str, WeightArguments]

    def find(self, module: str) -> WeightArguments | None:
        """Returns the arguments of a module; a target that names it wins over its class."""
        for target, arguments in self.by_target.items():
            if target == module or (target.startswith("re:") and re.match(target[3:], module)):
                return arguments
        return self.by_target.get("Linear")


def read_groups(fields: ConfigFields) -> Groups:
    """Reads a config of method "compressed-tensors" (ModelError says what is supported)."""
    stored = fields.take("format", str, "mixed-precision")
    if stored not in FORMATS:
        known = ", ".join(FORMATS)
        raise ModelError(f"the compressed-tensors format {stored!r} is not supported; supported are: {known}", param="format")
    if fields.take_any("kv_cache_scheme") is not None:
        raise ModelError("a kv_cache_scheme is not supported; export the model without one", param="kv_cache_scheme")
    for name in (*_RECORDS, "ignore"):  # what is ignored is plain in the file
        _refuse_sparsity(name, fields.take_any(name))
    found = fields.take_any("config_groups")
    if not isinstance(found, dict):
        raise ModelError("quantization_config has no config_groups", param="config_groups")
    return Groups({target: arguments for group in found.values() for target, arguments in _read_group(group)})


def _refuse_sparsity(name: str, value: object) -> None:
    if name == "sparsity_config" and isinstance(value, dict) and value.get("format", "dense") != "dense":
        raise ModelError("sparse compressed-tensors checkpoints are not supported; supported is: dense", param=name)


def _read_group(group: Any) -> list[tuple[str, WeightArguments]]:
    if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
        raise ModelError("a config group of quantization_config must be an object with targets", param="config_groups")
    fields = ConfigFields(group, "a config group of quantization_config")
    targets = fields.take_any("targets")
    fields.take_any("format")
    if fields.take_any("output_activations") is not None:
        raise ModelError("rounded output activations are not supported; only weights and inputs are", param="config_groups")
    weights, rotation = fields.take_any("weights"), fields.take("rotation", int, 0)
    if rotation not in (0, *ROTATIONS):
        known = ", ".join(map(str, ROTATIONS))
        raise ModelError(f"inputs rotated in blocks of {rotation} are not supported; supported are: {known}", param="rotation")
    activations = _read_activations(fields.take_any("input_activations"))
    arguments = _read_weights(weights, activations, rotation) if weights else None
    fields.finish()
    return [(str(target), arguments) for target in targets] if arguments is not None else []


def _read_weights(values: Any, activations: Activations, rotation: int) -> WeightArguments:
    fields = ConfigFields(values, "weights of quantization_config")
    bits, kind = fields.take("num_bits", int, 8), fields.take("type", str, "int")
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 4), ("float", 8)):
        raise ModelError(
            f"weights of type {kind} with {bits} bits are not supported; supported are: int 4, int 8, float 4, float 8",
            param="num_bits",
        )
    group_size = fields.take("group_size", int, -1)
    strategy = fields.take("strategy", str, "group" if group_size > 0 else "channel")
    if strategy not in _STRATEGIES:
        known = ", ".join(_STRATEGIES)
        raise ModelError(f"the strategy {strategy!r} is not supported; supported are: {known}", param="strategy")
    block = read_block(fields.take_any("block_structure"))
    symmetric = fields.take("symmetric", bool, True)
    for name in (*_NOT_OURS, "actorder", "dynamic"):  # act-order shows in the file, as weight_g_idx
        fields.take_any(name)
    fields.finish()
    is_nvfp4 = (kind, bits) == ("float", 4)
    if is_nvfp4 != (strategy == "tensor_group") or (is_nvfp4 and group_size != NVFP4_GROUP):
        raise ModelError(
            f"floats of 4 bits are supported as NVFP4, of the strategy 'tensor_group' and in groups of {NVFP4_GROUP}, and "
            "nothing else of that strategy is",
            param="group_size",
        )
    group_size = group_size if strategy == "group" else -1
    return WeightArguments(bits, symmetric, group_size, block, activations, rotation, is_nvfp4)


def _read_activations(values: Any) -> Activations:
    """Inputs in int8 must be rounded token by token; FP8 ones are not rounded at all."""
    if values is None:
        return "bfloat16"
    fields = ConfigFields(values, "input_activations of quantization_config")
    bits, kind = fields.take("num_bits", int, 8), fields.take("type", str, "int")
    if kind == "float":
        return "bfloat16"
    dynamic, symmetric = fields.take_any("dynamic"), fields.take("symmetric", bool, True)
    if bits != 8 or fields.take("strategy", str, "token") != "token" or dynamic is not True or not symmetric:
        raise ModelError(
            "input activations are supported in int8, symmetric, dynamic, with one scale per token",
            param="input_activations",
        )
    for name in (*_NOT_OURS, "actorder", "block_structure", "group_size"):
        fields.take_any(name)
    fields.finish()
    return "int8"


@dataclass(frozen=True, slots=True)
class CompressedScheme:
    """Protocol `quantized.base.Scheme`; `groups` says which modules have which arguments."""

    groups: Groups

    def take(self, module: str, shape: tuple[int, int], found: dict[str, TensorEntry]) -> Stored | None:
        parts = Parts(module, found)
        parts.drop("input_scale", "input_zero_point", "input_global_scale", "output_scale")
        if parts.has("qoq_codes"):
            return take_progressive(parts, shape, self._arguments(module, shape).rotation)
        if parts.has("weight_packed"):
            arguments = self._arguments(module, shape)
            if arguments.is_nvfp4:
                return take_nvfp4(parts, shape, "weight_packed", "weight_global_scale", divides=True)
            return take_packed(parts, shape, arguments)
        if parts.dtype("weight") == "I8":
            return take_int8(parts, shape, self._arguments(module, shape))
        return take_float8(parts, shape, self._arguments(module, shape).block) if parts.dtype("weight") in E4M3 else None

    def _arguments(self, module: str, shape: tuple[int, int]) -> WeightArguments:
        found = self.groups.find(module)
        if found is None:
            raise ModelError(f"{module} is quantised, but no config group of quantization_config names it")
        if found.rotation and shape[1] % found.rotation:
            raise ModelError(f"{module} has {shape[1]} inputs, which are no whole blocks of {found.rotation}", param="rotation")
        return found


def read_compressed(fields: ConfigFields) -> CompressedScheme:
    """Reads a config of method "compressed-tensors", or of "cloister", which adds QoQ to it."""
    return CompressedScheme(read_groups(fields))


def take_packed(parts: Parts, shape: tuple[int, int], arguments: WeightArguments) -> StoredMatrix:
    """Takes a pack-quantized matrix."""
    (num_out, num_in), bits = shape, arguments.bits
    group_size = resolve_group_size(arguments.group_size, parts.module, num_in)
    num_groups, per_word = num_in // group_size, 32 // bits
    packed = parts.take("weight_packed", ("I32",), (num_out, -(-num_in // per_word)))
    scales = parts.take("weight_scale", FLOATS, (num_out, num_groups), *(((1,),) if num_groups == 1 else ()))
    zeros = None
    if not arguments.symmetric:
        zeros = parts.take("weight_zero_point", ("I32",), (-(-num_out // per_word), num_groups))
    indexes = parts.take("weight_g_idx", ("I32",), (num_in,)) if parts.has("weight_g_idx") else None
    parts.drop("weight_shape")

    def order_of() -> npt.NDArray[np.int32] | None:
        return None if indexes is None else read_order(indexes.read(), group_size, parts.module)

    def form() -> GroupedTensor:
        return form_row(
            num_in,
            bits,
            group_size,
            scales,
            arguments.activations,
            has_zeros=zeros is not None,
            order=order_of(),
            rotation=arguments.rotation,
        )

    def assemble() -> GroupedTensor:
        order = order_of()
        codes = np.ascontiguousarray(unpack_rows(packed.read(), bits)[:, :num_in])
        found = None if zeros is None else unless_symmetric(unpack_rows(zeros.read().T, bits).T[:num_out], bits)
        codes = codes if order is None else codes[:, order]
        return _grouped(codes, scales.read(), found, bits, group_size, arguments, order)

    return StoredMatrix(shape, form, assemble)


def take_int8(parts: Parts, shape: tuple[int, int], arguments: WeightArguments) -> StoredMatrix:
    """Takes an int-quantized matrix of 8 bits."""
    num_out, num_in = shape
    group_size = resolve_group_size(arguments.group_size, parts.module, num_in)
    num_groups = num_in // group_size
    weight = parts.take("weight", ("I8",), shape)
    scales = parts.take("weight_scale", FLOATS, (num_out, num_groups), *(((1,), (), (num_out,)) if num_groups == 1 else ()))
    zeros = None
    if not arguments.symmetric:
        zeros = parts.take("weight_zero_point", ("I8",), (num_out, num_groups), *(((1,), ()) if num_groups == 1 else ()))

    def form() -> GroupedTensor:
        activations, rotation = arguments.activations, arguments.rotation
        return form_row(num_in, 8, group_size, scales, activations, has_zeros=zeros is not None, rotation=rotation)

    def assemble() -> GroupedTensor:
        found = None
        if zeros is not None:
            found = np.broadcast_to(_unsigned(zeros.read()).reshape(-1, num_groups), (num_out, num_groups))
            found = unless_symmetric(found, 8)
        return _grouped(_unsigned(weight.read()), scales.read(), found, 8, group_size, arguments, None)

    return StoredMatrix(shape, form, assemble)


def take_progressive(parts: Parts, shape: tuple[int, int], rotation: int) -> StoredMatrix:
    """Takes a QoQ matrix; its group size follows from its shapes."""
    num_out, num_in = shape
    packed = parts.take("qoq_codes", ("U8",), (num_out, num_in // 2))
    channel_scales = parts.take("qoq_channel_scales", FLOATS, (num_out,))
    group_scales = parts.take("qoq_group_scales", ("U8",))
    zeros = parts.take("qoq_zeros", ("U8",), group_scales.shape)
    group_size = resolve_group_size(num_in // max(1, group_scales.shape[-1]), parts.module, num_in)

    def form() -> ProgressiveTensor:
        beside = np.zeros((1, num_in // group_size), np.uint8)
        return ProgressiveTensor(
            np.zeros((1, num_in), np.uint8), np.ones(1, np.float32), beside + np.uint8(1), beside, group_size, rotation
        )

    def assemble() -> ProgressiveTensor:
        codes = np.empty(shape, np.uint8)
        codes[:, 0::2], codes[:, 1::2] = packed.read() & 15, packed.read() >> 4
        scales = np.asarray(channel_scales.read(), np.float32)
        return ProgressiveTensor(codes, scales, group_scales.read(), zeros.read(), group_size, rotation)

    return StoredMatrix(shape, form, assemble)


def _grouped(
    codes: Codes,
    scales: npt.NDArray[Any],
    zeros: Codes | None,
    bits: int,
    group_size: int,
    arguments: WeightArguments,
    order: npt.NDArray[np.int32] | None,
) -> GroupedTensor:
    shape = len(codes), codes.shape[1] // group_size
    spread = np.ascontiguousarray(np.broadcast_to(np.asarray(scales, np.float32).reshape(-1, shape[1]), shape))
    activations, rotation = arguments.activations, arguments.rotation
    return GroupedTensor(codes, spread, zeros, None, bits, group_size, activations, order, rotation)


def _unsigned(values: npt.NDArray[Any]) -> Codes:
    """Returns int8 values plus 128."""
    return np.ascontiguousarray(values).view(np.uint8) ^ np.uint8(128)
