"""Low-rank adapters in the directories that PEFT writes, written here or by PEFT itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.backends.adapters import target_shapes
from cloister.backends.base import AdapterWeights
from cloister.backends.spec import DecoderSpec
from cloister.models import load
from cloister.models.adapters import find_targets
from cloister.models.safetensors import write_tensors

ALL = ("q", "k", "v", "o", "gate", "up", "down")


def random_adapter(
    spec: DecoderSpec, rank: int, *, seed: int = 0, names: Iterable[str] = ALL, size: float = 1.0
) -> AdapterWeights:
    """An adapter that changes the named products of every layer about as much as they are large, times `size`."""
    rng, chosen = np.random.default_rng(seed), set(names)
    updates = {}
    for product, (outputs, inputs) in target_shapes(spec).items():
        if product.rpartition(".")[2] in chosen:
            a = rng.standard_normal((rank, inputs), dtype=np.float32) * np.float32(inputs**-0.5)
            b = rng.standard_normal((outputs, rank), dtype=np.float32) * np.float32(size * rank**-0.5)
            updates[product] = (a, b)
    return AdapterWeights(updates)


def write_adapter(
    path: Path, model: Path, *, rank: int = 8, seed: int = 1, alpha: float = 16.0, names: Iterable[str] = ALL,
    size: float = 1.0, dtype: npt.DTypeLike = np.float32, **config: Any,
) -> Path:  # fmt: skip
    """Writes an adapter for a model directory as PEFT would."""
    spec = load(model).spec
    adapter = random_adapter(spec, rank, seed=seed, names=names, size=size * rank / alpha)
    modules = {target.product: module for module, targets in find_targets(spec).items() for target in targets}
    tensors: dict[str, npt.NDArray[Any]] = {}
    for product, pair in adapter.updates.items():
        for side, matrix in zip("AB", pair, strict=True):
            tensors[f"base_model.model.{modules[product]}.lora_{side}.weight"] = matrix.astype(dtype)
    path.mkdir(parents=True, exist_ok=True)
    write_tensors(path / "adapter_model.safetensors", tensors)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none", **config}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


class MergedWeights:
    """Weights with an adapter merged into them: W + B A in float32 (protocol `backends.base.Weights`)."""

    def __init__(self, weights: Any, adapter: AdapterWeights) -> None:
        self._weights = weights
        self._updates: Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = adapter.updates

    def names(self) -> Any:
        return self._weights.names()

    def shape(self, name: str) -> Any:
        return self._weights.shape(name)

    def form(self, name: str) -> Any:
        return self._weights.form(name)

    def read(self, name: str) -> Any:
        tensor, product = self._weights.read(name), name.removesuffix(".weight")
        if product not in self._updates:
            return tensor
        a, b = self._updates[product]
        return np.asarray(tensor, np.float32) + b @ a

    def __iter__(self) -> Any:
        return ((name, self.read(name)) for name in self.names())
