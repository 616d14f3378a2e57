"""Quantized checkpoints: one file for each published method, selected by the name in config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cloister.models.config import ConfigFields, read_json
from cloister.models.quantized import awq, compressed, fp8, gptq, mxfp4, nvfp4
from cloister.models.quantized.base import Scheme, Stored
from cloister.types.errors import ModelError

__all__ = ["METHODS", "Scheme", "Stored", "split_config"]

METHODS: Mapping[str, Callable[[ConfigFields], Scheme]] = {
    "gptq": gptq.read_gptq,
    "awq": awq.read_awq,
    "compressed-tensors": compressed.read_compressed,
    "cloister": compressed.read_compressed,
    "fp8": fp8.read_fp8,
    "fbgemm_fp8": fp8.read_fp8,
    "mxfp4": mxfp4.read_mxfp4,
    "modelopt": nvfp4.read_modelopt,
    "modelopt_fp4": nvfp4.read_modelopt,
}
_OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Where older exporters wrote what config.json says today, and the method they mean."""


def split_config(path: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], Scheme | None]:
    """Returns a config without what it says of quantisation, and the scheme that this describes; None where weights are plain.

    Raises:
        ModelError: the method, or something about it, is not supported; the message says what is.
    """
    plain = dict(config)
    found = plain.pop("quantization_config", None) or plain.pop("compression_config", None) or _read_old(path)
    if found is None:
        return plain, None
    if not isinstance(found, dict):
        raise ModelError("quantization_config in config.json must be an object", param="quantization_config")
    fields = ConfigFields(found, "quantization_config")
    method = fields.take("quant_method", str)
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise ModelError(f"the quantisation method {method!r} is not supported; supported are: {known}", param="quant_method")
    scheme = METHODS[method](fields)
    _finish(fields)
    return plain, scheme


def _read_old(path: Path) -> dict[str, Any] | None:
    for name, method in _OLD_FILES.items():
        if (path / name).exists():
            return {"quant_method": method, **read_json(path / name)}
    return None


def _finish(fields: ConfigFields) -> None:
    """Refuses what nobody took, unless it has the only value that is supported."""
    for name, value in gptq.ONLY.items():
        if fields.take_any(name) not in (None, value):
            raise ModelError(f"{name!r} in {fields.source} is only supported as {value!r}", param=name)
    fields.finish()
