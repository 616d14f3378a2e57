"""Writes quantized tensors in the compressed-tensors format, with the config that describes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cloister.backends.tensors import E2M1_BITS, Activations, GroupedTensor, ProgressiveTensor, Tensor
from cloister.models.checkpoint import source_of, stored_name
from cloister.models.config import read_json
from cloister.models.decoder import find_family
from cloister.models.quantized.base import pack_rows
from cloister.models.safetensors import write_tensors
from cloister.models.sources import Source
from cloister.types.errors import ModelError

Array = npt.NDArray[Any]
_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@dataclass(frozen=True, slots=True)
class _Kind:
    """What one config group says of its modules."""

    stored: str
    bits: int
    symmetric: bool
    group_size: int | None
    activations: Activations
    rotation: int

    @property
    def is_nvfp4(self) -> bool:
        return self.stored == "nvfp4-pack-quantized"

    def describe(self, targets: list[str]) -> dict[str, Any]:
        strategy = "channel" if self.group_size is None else "tensor_group" if self.is_nvfp4 else "group"
        kind = "float" if self.is_nvfp4 else "int"
        weights = {"num_bits": self.bits, "type": kind, "symmetric": self.symmetric, "strategy": strategy}
        described = {
            "targets": targets,
            "format": self.stored,
            "weights": {**weights, "group_size": self.group_size, "dynamic": False},
            "input_activations": _TOKEN if self.activations == "int8" else None,
            "output_activations": None,
        }
        return {**described, "rotation": self.rotation} if self.rotation else described


@dataclass(slots=True)
class Encoder:
    """Collects parts and groups of a checkpoint, tensor by tensor.

    Attributes:
        parts: by the names that they have in the file.
    """

    parts: dict[str, Array] = field(default_factory=dict)
    _modules: dict[_Kind, list[str]] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes in one tensor under its name in the checkpoint.

        Raises:
            ValueError: a kind of tensor that no number format of ours makes.
        """
        module = name.removesuffix(".weight")
        if isinstance(tensor, ProgressiveTensor):
            self._add(module, _Kind("qoq", 4, False, tensor.group_size, "int8", tensor.rotation), _progressive_parts(tensor))
        elif isinstance(tensor, GroupedTensor):
            self._add(module, *_grouped_parts(tensor))
        else:
            self.parts[name] = narrow(tensor)

    def describe(self, calibration: str) -> dict[str, Any]:
        """Returns `quantization_config`; the kind that most modules have is that of every "Linear".

        What compressed-tensors does not know, QoQ and rotated inputs, makes it a method of our own: readers that would compute
        something else refuse it.
        """
        common = max(self._modules, key=lambda kind: len(self._modules[kind]))
        groups = [kind.describe(["Linear"] if kind is common else names) for kind, names in self._modules.items()]
        formats = {kind.stored for kind in self._modules}
        is_ours = "qoq" in formats or any(kind.rotation for kind in self._modules)
        return {
            "quant_method": "cloister" if is_ours else "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
            "ignore": [],
            "kv_cache_scheme": None,
            "calibration": calibration,
        }

    def _add(self, module: str, kind: _Kind, parts: Mapping[str, Array]) -> None:
        self._modules.setdefault(kind, []).append(module)
        self.parts.update({f"{module}.{name}": array for name, array in parts.items()})


def narrow(tensor: Array) -> Array:
    """Returns a tensor in bfloat16 if that loses nothing."""
    if tensor.dtype != np.float32:
        return tensor
    half = tensor.astype(ml_dtypes.bfloat16)
    return half if np.array_equal(half.astype(np.float32), tensor) else tensor


def _grouped_parts(tensor: GroupedTensor) -> tuple[_Kind, dict[str, Array]]:
    is_known = tensor.order is None and tensor.offsets is None and tensor.zeros is None
    if not is_known or tensor.activations == "int8_group":
        raise ValueError("only symmetric tensors can be written, inputs in order and rounded token by token or not at all")
    if tensor.output_scales is not None:
        return _Kind("nvfp4-pack-quantized", 4, True, tensor.group_size, tensor.activations, 0), _nvfp4_parts(tensor)
    whole_rows = tensor.group_size == tensor.shape[1]
    group_size = None if whole_rows else tensor.group_size
    if tensor.bits == 8 and whole_rows and tensor.activations == "int8":
        values = (tensor.codes ^ np.uint8(128)).view(np.int8)
        return _Kind("int-quantized", 8, True, None, "int8", tensor.rotation), {"weight": values, "weight_scale": tensor.scales}
    halves = tensor.scales.astype(np.float16)
    parts = {
        "weight_packed": pack_rows(tensor.codes, tensor.bits),
        "weight_scale": halves if np.array_equal(halves.astype(np.float32), tensor.scales) else tensor.scales,
        "weight_shape": np.array(tensor.shape, np.int64),
    }
    return _Kind("pack-quantized", tensor.bits, True, group_size, tensor.activations, tensor.rotation), parts


def _nvfp4_parts(tensor: GroupedTensor) -> dict[str, Array]:
    """The even input of a pair in the low half of a byte; a factor, which is a power of two, to divide by."""
    assert tensor.output_scales is not None
    codes = E2M1_BITS[tensor.codes]
    return {
        "weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4,
        "weight_scale": (2 * tensor.scales).astype(ml_dtypes.float8_e4m3fn),
        "weight_global_scale": 1 / tensor.output_scales[:1],
    }


def _progressive_parts(tensor: ProgressiveTensor) -> dict[str, Array]:
    return {
        "qoq_codes": tensor.codes[:, 0::2] | (tensor.codes[:, 1::2] << 4),
        "qoq_channel_scales": tensor.channel_scales,
        "qoq_group_scales": tensor.group_scales,
        "qoq_zeros": tensor.zeros,
    }


# Writes a quantized model as a directory that `load` opens.


_COPIED = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json", "preprocessor_config.json", "processor_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip


def check_place(source: Path, out: Path) -> None:
    """Says whether a model can be written from `source` to `out`, before any work is done.

    Raises:
        ModelError: the source is no directory of a Hugging Face model, its family's matrices are stored in another order, or
            there is something in `out` already, or its disk has no room.
    """
    if not (source / "config.json").is_file():
        raise ModelError(f"{source} is not a model directory with a config.json; a GGUF file has its few bits already")
    family = find_family(read_json(source / "config.json"))
    if not all(_is_writable(place) for place in family.tensors.values()):
        raise ModelError(
            f"models of the family {family.name!r} store matrices fused or turned round, and are not written in few bits; give "
            "the unquantised model to `serve --quant` instead, which writes its weights in few bits while it loads them"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists already; name a directory that does not, or an empty one")
    there = next(place for place in (out.absolute(), *out.absolute().parents) if place.exists())
    free_bytes, least_bytes = shutil.disk_usage(there).free, _least_bytes(source)
    if free_bytes < least_bytes:
        raise ModelError(
            f"the disk of {out} has {free_bytes / 1e6:.0f} MB free, and the model takes more than {least_bytes / 1e6:.0f} MB; "
            "free some, or name a directory of another disk"
        )


def _least_bytes(source: Path) -> int:
    """Returns less than a model in few bits takes: as if all of its weights were of 32 bits before and of 4 afterwards."""
    return sum(file.stat().st_size for file in source.glob("*.safetensors")) // 8


def write_model(source: Path, out: Path, tensors: Iterable[tuple[str, Tensor]], calibration: str) -> None:
    """Writes a model directory: tensors in compressed-tensors' layout, QoQ's in ours, and everything else from the source.

    Args:
        source: the directory that the tensors came from.
        tensors: (canonical name, tensor); taken one after another, and packed before the next is asked for.
        calibration: how the codes were found, for people who read the config.

    Raises:
        ModelError: as `check_place`.
    """
    check_place(source, out)
    config = read_json(source / "config.json")
    family, encoder = find_family(config), Encoder()
    for name, tensor in tensors:
        encoder.add(stored_name(family, name), _as_stored(tensor, source_of(family, name).added))
    config.pop("compression_config", None)
    config["quantization_config"] = encoder.describe(calibration)
    out.mkdir(parents=True, exist_ok=True)
    for pattern in _COPIED:
        for file in source.glob(pattern):
            shutil.copyfile(file, out / file.name)
    write_tensors(out / "model.safetensors", encoder.parts)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")  # last: now it is a model


def _is_writable(place: Source) -> bool:
    return place == Source(place.name, added=place.added, is_tensor=place.is_tensor)


def _as_stored(tensor: Tensor, added: float) -> Tensor:
    """Takes away what reading adds."""
    return tensor.astype(np.float32) - np.float32(added) if added and isinstance(tensor, np.ndarray) else tensor
