"""The config groups of compressed-tensors: which modules are quantised, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloister.backends.tensors import ROTATIONS, Activations
from cloister.models.config import ConfigFields
from cloister.models.quantized.fp8 import read_block
from cloister.types.errors import ModelError

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "qoq")
_RECORDS = ("quantization_status", "global_compression_ratio", "version", "run_compressed", "sparsity_config", "calibration")
_NOT_OURS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True)
class WeightArguments:
    """How the matrices of one group are written.

    Attributes:
        group_size: -1 for one scale per output or per tensor.
        block: (outputs, inputs) that share a scale, for FP8.
        rotation: as `backends.tensors.GroupedTensor` has it.
    """

    bits: int
    symmetric: bool
    group_size: int
    block: tuple[int, int] | None
    activations: Activations
    rotation: int


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
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise ModelError(
            f"weights of type {kind} with {bits} bits are not supported; supported are: int 4, int 8, float 8", param="num_bits"
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
    return WeightArguments(bits, symmetric, group_size if strategy == "group" else -1, block, activations, rotation)


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
