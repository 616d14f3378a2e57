"""Where a model lies for each engine: in the folder of the peers, or beside a public model.

The folder holds `m/SHAPE` (checkpoints), `g/SHAPE-QUANT.gguf` and `ov/SHAPE-FORMAT`. Public models (`benchmarks.models`) have
everything beside the published file; `python -m benchmarks.quality --peers DIR` converts them for the peers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.models import MODELS, dequantize, find_model

STORED: Final = "gguf"
"""The number format of a file served as it was published."""
_GGUF: Final = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0", "q4_k_m": "q4_k_m"}
_OPENVINO: Final = {"bf16": "fp16", "int8": "int8", "int4": "int4"}
_PUBLIC_GGUF: Final = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0", "q4_k_m": "Q4_K_M"}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model; those of peers by number format, and not all need be there.

    Attributes:
        checkpoint: directory with config.json and safetensors.
        stored: the published GGUF file, for who serves it as it is.
        gguf: files of llama.cpp.
        openvino: directories of OpenVINO.
    """

    checkpoint: Path
    stored: Path | None
    gguf: Mapping[str, Path]
    openvino: Mapping[str, Path]


def find_files(folder: Path, shape: str) -> ModelFiles:
    """Returns where the files of a shape are, or belong.

    Raises:
        ModelUnavailable: it is a public model that cannot be fetched.
    """
    if shape not in MODELS or (folder / "m" / shape).exists():
        return ModelFiles(
            folder / "m" / shape,
            None,
            {name: folder / "g" / f"{shape}-{quant}.gguf" for name, quant in _GGUF.items()},
            {name: folder / "ov" / f"{shape}-{suffix}" for name, suffix in _OPENVINO.items()},
        )
    stored = find_model(shape)
    beside = stored.parent
    return ModelFiles(
        dequantize(stored, beside / "float32"),
        stored,
        {STORED: stored, **{name: beside / f"{shape}-{quant}.gguf" for name, quant in _PUBLIC_GGUF.items()}},
        {name: beside / f"openvino-{suffix}" for name, suffix in _OPENVINO.items()},
    )
