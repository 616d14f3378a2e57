"""Lists the models on this machine: embedded, pulled, in the hub's cache, and in given directories.

Reads heads of files only: no weights, no network.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import CacheNotFound

from cloister.models.config import read_json
from cloister.models.decoder import choose_family, find_family, read_spec
from cloister.models.gguf.architecture import find_architecture
from cloister.models.gguf.architecture import read_spec as read_gguf_spec
from cloister.models.gguf.tensors import TYPES
from cloister.models.location import choose_gguf, embedded_names, locate, require_tokenizer
from cloister.models.pulling import Store
from cloister.models.quantized import split_config
from cloister.models.safetensors import read_header
from cloister.models.transformers_fallback import open_foreign
from cloister.types.errors import CloisterError
from cloister.types.gguf import is_gguf, read_gguf


@dataclass(frozen=True, slots=True)
class LocalModel:
    """One model on this machine.

    Attributes:
        name: what `--model` takes.
        source: embedded, pulled, hub or directory.
        architecture: as config.json or the GGUF file names it, "?" where neither can be read.
        format: how most of its weights are stored, such as BF16, Q4_K or gptq.
        size_bytes: of its files of weights.
        obstacle: why it cannot be served here, or not as others are, or None.
    """

    name: str
    source: str
    architecture: str
    format: str
    size_bytes: int
    path: Path
    obstacle: str | None = None


def list_models(
    directories: Iterable[Path] = (), hub_cache: Path | None = None, store: Store | None = None
) -> Iterator[LocalModel]:
    """Yields what is embedded, what was pulled, what the hub's cache holds, and what lies in `directories` and under them.

    Args:
        hub_cache: None is where the hub's library keeps it.
        store: of pulled models; None is this user's.
    """
    for name in embedded_names():
        yield describe(locate(name), name, "embedded")
    store = store or Store()
    for pulled in store.list():
        yield describe(store.path(pulled), pulled.name, "pulled")
    for name, snapshot in _cached_snapshots(hub_cache):
        yield from _describe_all(snapshot, name, "hub")
    for directory in directories:
        for place in (directory, *sorted(child for child in directory.iterdir() if child.is_dir())):
            yield from _describe_all(place, str(place), "directory")


def describe(path: Path, name: str, source: str) -> LocalModel:
    """Returns what the heads of a model's files say of it; what is wrong with them becomes its `obstacle`."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    size_bytes = sum(file.stat().st_size for file in files)
    try:
        head = _read_gguf_head(path) if path.is_file() else _read_directory_head(path, files)
    except CloisterError as error:
        head = ("?", "?", error.message)
    architecture, form, obstacle = head
    return LocalModel(name, source, architecture, form, size_bytes, path, obstacle)


def _describe_all(place: Path, name: str, source: str) -> Iterator[LocalModel]:
    """Yields the model of a directory, or each GGUF file in it."""
    if any(place.glob("*.safetensors")):
        yield describe(place, name, source)
        return
    for file in sorted(place.glob("*.gguf")):
        if is_gguf(file) and choose_gguf([file.name], name) is not None:
            yield describe(file, f"{name}/{file.name}", source)


def _cached_snapshots(hub_cache: Path | None) -> Iterator[tuple[str, Path]]:
    """Yields (name, newest snapshot) of the models in the hub's cache."""
    try:
        cache = huggingface_hub.scan_cache_dir(hub_cache)
    except CacheNotFound:
        return
    for repository in sorted(cache.repos, key=lambda found: found.repo_id):
        if repository.repo_type == "model" and repository.revisions:
            newest = max(repository.revisions, key=lambda revision: revision.last_modified)
            yield repository.repo_id, newest.snapshot_path


def _read_gguf_head(path: Path) -> tuple[str, str, None]:
    file = read_gguf(path)
    architecture, _ = find_architecture(file)
    sizes = Counter[str]()
    for tensor in file.tensors.values():
        sizes[TYPES[tensor.kind].name if tensor.kind in TYPES else f"type {tensor.kind}"] += math.prod(tensor.shape)
    read_gguf_spec(file)
    return architecture, _most(sizes), None


def _read_directory_head(path: Path, files: list[Path]) -> tuple[str, str, str | None]:
    config = read_json(path / "config.json")
    method = (config.get("quantization_config") or {}).get("quant_method")
    sizes = Counter[str]()
    for file in files:
        for entry in read_header(file).values():
            sizes[entry.dtype] += math.prod(entry.shape)
    plain, _ = split_config(path, config)
    require_tokenizer(path)
    form = str(method or _most(sizes))
    if choose_family(plain) is None:
        open_foreign(path, plain)
        names = ", ".join(map(str, plain.get("architectures") or [])) or "?"
        return names, form, "no architecture of Cloister's own; transformers runs it, slowly, if it knows it"
    family = find_family(plain)
    read_spec(family, plain)
    return family.architecture, form, None


def _most(sizes: Counter[str]) -> str:
    return sizes.most_common(1)[0][0] if sizes else "?"
