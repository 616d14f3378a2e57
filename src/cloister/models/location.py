"""Resolves a model name to a place: embedded, pulled, a directory, a GGUF file, or a hub repository."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Final

from cloister.models.pulling import CATALOGUE, Store
from cloister.types.errors import ModelError
from cloister.types.gguf import is_gguf

# Directories of models: those inside the package, and what in a directory holds the model (itself, or one GGUF file in it).


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


# SHA-256 of model files, cached between starts while a file is unchanged.


_WORTH_REMEMBERING_BYTES: Final = 64 << 20
_MOST_REMEMBERED: Final = 64


class Digests:
    """Hashes files (hex; about 1 s per 1.5 GB), and large ones only once.

    A file counts as unchanged while its device, inode and size, and the times of its last change of data and of inode are the
    same; the last of these cannot be set back by a user.

    Args:
        path: JSON file of what was hashed before; None remembers nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known = _read(path)

    def of(self, file: Path) -> str:
        """Returns a file's SHA-256 (OSError if it cannot be read)."""
        with file.open("rb") as stream:
            state = os.fstat(stream.fileno())
            key = " ".join(str(n) for n in (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns))
            if (known := self._known.get(key)) is not None:
                return known
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if state.st_size >= _WORTH_REMEMBERING_BYTES:
            self._remember(key, digest)
        return digest

    def _remember(self, key: str, digest: str) -> None:
        kept = list(self._known.items())[-_MOST_REMEMBERED + 1 :]
        self._known = {**dict(kept), key: digest}
        if self._path is None:
            return
        scratch = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                json.dump(self._known, file, indent=0)  # which models somebody has is nobody else's business
            scratch.replace(self._path)
        except OSError:  # no room or no right to write: it is hashed again next time
            pass
        finally:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)


def _read(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(digest) for key, digest in known.items()} if isinstance(known, dict) else {}
