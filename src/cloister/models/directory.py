"""Directories of models: those inside the package, and what in a directory holds the model (itself, or one GGUF file in it)."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from cloister.types.errors import ModelError
from cloister.types.gguf import is_gguf

_NOT_A_MODEL = "mmproj"  # how the names of files for images and sound begin


def embedded_root() -> Path:
    """Returns the directory of the models that are inside the package."""
    return Path(str(resources.files("cloister") / "models" / "embedded"))


def embedded_names() -> tuple[str, ...]:
    """Names of the models that are inside the package."""
    root = embedded_root()
    if not root.is_dir():
        return ()
    return tuple(sorted(entry.name for entry in root.iterdir() if (entry / "config.json").is_file()))


def find_model(path: Path) -> Path:
    """Returns what holds the model at a path: the directory itself, or the GGUF file in it if it has no safetensors.

    Raises:
        ModelError: the path is a file of another kind, or there are several GGUF files to choose from.
    """
    if path.is_file() and not is_gguf(path):
        raise ModelError(
            f"{path.name} is no GGUF file; give a GGUF file or the directory of a Hugging Face model", param="model"
        )
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return path
    chosen = choose_gguf((file.name for file in path.glob("*.gguf")), str(path))
    return path / chosen if chosen is not None else path


def choose_gguf(names: Iterable[str], place: str) -> str | None:
    """Returns the one GGUF file among file names, None if there is none.

    Args:
        place: where the files are, for the message.

    Raises:
        ModelError: there are several.
    """
    found = sorted(name for name in names if name.endswith(".gguf") and not Path(name).name.startswith(_NOT_A_MODEL))
    if len(found) > 1:
        raise ModelError(
            f"{place} holds several GGUF files; give one: {', '.join(f'{place}/{name}' for name in found)}", param="model"
        )
    return found[0] if found else None


def require_tokenizer(path: Path) -> None:
    """Raises ModelError for a model directory without a tokenizer."""
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        raise ModelError(f"{path} has neither tokenizer.json nor tokenizer.model; download one of them and put it there")
