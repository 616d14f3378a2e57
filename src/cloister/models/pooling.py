"""How a model pools hidden states into an embedding, from sentence-transformers files or GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from cloister.types.errors import ModelError
from cloister.types.gguf import read_gguf
from cloister.types.request import PoolingParams

Kind = Literal["last", "mean", "cls"]

DEFAULT: Final[Kind] = "mean"
"""For a model that says nothing: the states of a text's tokens together say more of it than what the last one predicts."""
_GGUF_KINDS: Final[Mapping[int, str]] = {1: "mean", 2: "cls", 3: "lasttoken", 4: "rank"}  # llama.cpp's `pooling_type`
_KINDS: Final[Mapping[str, Kind]] = {"mean": "mean", "mean_tokens": "mean", "lasttoken": "last", "last": "last"}
_OF_ENCODERS: Final[Mapping[str, Kind]] = {**_KINDS, "cls": "cls", "cls_token": "cls"}
_MODULES: Final = frozenset({"Transformer", "Pooling", "Normalize"})


def read_pooling(path: Path, kind: str | None = None, *, is_encoder: bool = False) -> PoolingParams:
    """Returns how the model at `path` pools.

    Vectors are normalised unless sentence-transformers' modules.json has no step that does it.

    Args:
        path: a model directory or a GGUF file.
        kind: "last", "mean" or "cls" in place of what the files say.
        is_encoder: the model reads in both directions; only then its first token knows of the others.

    Raises:
        ModelError: the files ask for a step that is not computed here, and no `kind` was given.
    """
    if path.is_file():
        found, normalize = _read_gguf(path), True
    else:
        found, normalize = _read_directory(path, strict=kind is None)
    kinds = _OF_ENCODERS if is_encoder else _KINDS
    chosen = kinds.get(kind) if kind else DEFAULT if found is None else kinds.get(found)
    if chosen is None:
        raise ModelError(
            f"the model pools by {kind or found!r}, which is not computed here; set pooling to last or mean", param="pooling"
        )
    return PoolingParams(kind=chosen, normalize=normalize)


def _read_gguf(path: Path) -> str | None:
    file = read_gguf(path)
    architecture = file.get("general.architecture", str)
    number = file.get(f"{architecture}.pooling_type", int)
    return _GGUF_KINDS.get(number) if number else None


def _read_directory(path: Path, *, strict: bool) -> tuple[str | None, bool]:
    """Returns what the pooling step does, None if there is no such step, and whether vectors are normalised."""
    modules = _read(path / "modules.json")
    steps = _steps(modules) if isinstance(modules, list) else {"Pooling": "1_Pooling", "Normalize": ""}
    unknown = sorted(steps.keys() - _MODULES)
    if strict and unknown:
        raise ModelError(
            f"modules.json asks for {unknown[0]}, which is not computed here; set pooling to last or mean to do without it",
            param="pooling",
        )
    config = _read(path / steps["Pooling"] / "config.json") if "Pooling" in steps else None
    return (_mode(config) if isinstance(config, dict) else None), "Normalize" in steps


def _steps(modules: Iterable[Any]) -> dict[str, str]:
    """Returns the class name of each step, and its folder."""
    steps = [module for module in modules if isinstance(module, dict)]
    return {str(step.get("type", "")).rpartition(".")[2]: Path(str(step.get("path", ""))).name for step in steps}


def _mode(config: Mapping[str, Any]) -> str | None:
    """Reads both forms of the file: `pooling_mode`, and a switch for each mode."""
    if isinstance(config.get("pooling_mode"), str):
        return str(config["pooling_mode"])
    on = [
        name.removeprefix("pooling_mode_")
        for name, value in config.items()
        if name.startswith("pooling_mode_") and value is True
    ]
    return "+".join(on) or None


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise ModelError(f"{file.name} of the model cannot be read as JSON; download the model again") from None
