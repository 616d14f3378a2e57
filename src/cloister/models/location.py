"""Where a model is: inside the package, among those that were pulled, in a directory, in a GGUF file, or on a hub."""

from __future__ import annotations

import re
from pathlib import Path

from cloister.models.directory import embedded_names, embedded_root, find_model
from cloister.models.pulling import CATALOGUE, Store
from cloister.types.errors import ModelError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:/[\w./-]+\.gguf)?")


def locate(name: str, progress: bool = False) -> Path:
    """Returns the directory or GGUF file of a model, downloading it if it is one of the catalogue's or of the hub's.

    Args:
        name: the name of an embedded, a pulled or a catalogue model, a directory, a GGUF file, or a hub name: "owner/model",
            or "owner/model/FILE.gguf" for one of several GGUF files.
        progress: draw a progress bar on standard error while downloading.

    Raises:
        ModelError: there is no such model, it cannot be fetched, or its terms must be accepted; the message says what to do.
    """
    here = _find_here(name)
    if here is not None:
        return here
    if name in CATALOGUE:
        from cloister.models.pulling.pull import pull  # as below: network libraries only when they are needed

        store = Store()
        return store.path(pull(name, store, progress=progress))
    if not is_hub_name(name):
        raise _unknown(name)
    from cloister.models.hub import download  # reaches for the network libraries only when they are needed

    return download(name, progress)


def locate_here(name: str) -> Path:
    """As `locate`, for a model that is on this machine; asks no network.

    Raises:
        ModelError: it is not here.
    """
    here = _find_here(name)
    if here is not None:
        return here
    if not is_hub_name(name):
        raise _unknown(name)
    from cloister.models.hub import find_cached

    return find_cached(name)


def is_hub_name(name: str) -> bool:
    """Whether a name is one of the hub's, and not of something that is here."""
    return _HUB_NAME.fullmatch(name) is not None and not Path(name).expanduser().exists()


def find_named(name: str) -> Path | None:
    """Returns where a model lies that goes by a name of its own on this machine, embedded or pulled; None if there is none."""
    if name in embedded_names():
        return embedded_root() / name
    store = Store()
    pulled = store.find(name)
    return None if pulled is None else store.path(pulled)


def _find_here(name: str) -> Path | None:
    """Returns the directory or GGUF file of a model with a name of its own or at a path, None if there is none."""
    named = find_named(name)
    path = Path(name).expanduser()
    if named is not None or not path.exists():
        return named
    return find_model(path.resolve() if path.is_dir() else path.parent.resolve() / path.name)


def _unknown(name: str) -> ModelError:
    names = ", ".join(dict.fromkeys([*embedded_names(), *(model.name for model in Store().list()), *CATALOGUE]))
    return ModelError(
        f"there is no model {name!r}; give one by name ({names}), a directory, a GGUF file, or a hub name 'owner/model'",
        param="model",
    )
