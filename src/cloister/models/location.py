"""Where a model is: inside the package, in a directory, in a GGUF file, or on the Hugging Face hub."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from cloister.models.directory import find_model
from cloister.types.errors import ModelError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:/[\w./-]+\.gguf)?")


def embedded_names() -> tuple[str, ...]:
    """Names of the models that are inside the package."""
    root = _embedded_root()
    if not root.is_dir():
        return ()
    return tuple(sorted(entry.name for entry in root.iterdir() if (entry / "config.json").is_file()))


def locate(name: str, progress: bool = False) -> Path:
    """Returns the directory or GGUF file of a model, downloading it if it is one of the hub's.

    Args:
        name: an embedded model's name, a directory, a GGUF file, or a hub name: "owner/model", or
            "owner/model/FILE.gguf" for one of several GGUF files.
        progress: draw a progress bar on standard error while downloading.

    Raises:
        ModelError: there is no such model, or the hub cannot be reached; the message says what to do.
    """
    if name in embedded_names():
        return _embedded_root() / name
    path = Path(name).expanduser()
    if path.exists():
        return find_model(path.resolve() if path.is_dir() else path.parent.resolve() / path.name)
    if path.is_absolute() or name.startswith((".", "~")) or not _HUB_NAME.fullmatch(name):
        embedded = ", ".join(embedded_names()) or "none"
        raise ModelError(
            f"there is no model {name!r}; give an embedded model ({embedded}), a directory, a GGUF file, or a hub name "
            "'owner/model'",
            param="model",
        )
    from cloister.models.hub import download  # reaches for the network libraries only when they are needed

    return download(name, progress)


def _embedded_root() -> Path:
    return Path(str(resources.files("cloister") / "models" / "embedded"))
