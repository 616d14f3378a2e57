"""Downloads from the Hugging Face hub, with a connection timeout and a progress bar."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import CacheNotFound, GatedRepoError, RepositoryNotFoundError
from rich.progress import Progress

from cloister.models.location import choose_gguf, find_model
from cloister.models.pulling.downloads import download_progress
from cloister.models.pulling.replies import call_within
from cloister.types.errors import ModelError

FILES = (
    "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
    "modules.json", "*_Pooling/config.json",
)  # fmt: skip
REACH_TIMEOUT_S = 8.0


def download(name: str, progress: bool) -> Path:
    """Returns the directory of a hub model's files, or its GGUF file, from the hub's cache on this machine where they are
    there already.

    Args:
        name: "owner/model", or "owner/model/FILE.gguf". A model without safetensors, but with one GGUF file, is that file.

    Raises:
        ModelError: the hub does not answer within `REACH_TIMEOUT_S` and the model is not in the cache, there is no such
            model, access to it must be asked for, or it has several GGUF files to choose from.
    """
    owner, model, *inner = name.split("/")
    repo, file = f"{owner}/{model}", "/".join(inner) or None
    stored = _ask_hub(repo)
    if stored is None:
        return _find(_cached(repo), file, name)
    if file is None and not any(path.endswith(".safetensors") for path in stored):
        file = choose_gguf(stored, repo)
    try:
        with _progress_class(progress) as bar:
            patterns = list(FILES) if file is None else [file]
            root = Path(huggingface_hub.snapshot_download(repo, allow_patterns=patterns, tqdm_class=bar))
    except (OSError, RuntimeError, ValueError) as error:
        kind = type(error).__name__
        raise ModelError(f"the download of {name} broke off ({kind}); run the command again to resume it") from None
    return _find(root, file, name)


def find_cached(name: str) -> Path:
    """Returns the directory or GGUF file of a model in the hub's cache; arguments and errors as in `download`."""
    owner, model, *inner = name.split("/")
    return _find(_cached(f"{owner}/{model}"), "/".join(inner) or None, name)


def remove_cached(name: str, hub_cache: Path | None = None) -> int:
    """Deletes a model from the hub's cache on this machine; returns the bytes that this frees.

    Args:
        hub_cache: None is where the hub's library keeps it.

    Raises:
        ModelError: it is not there.
    """
    try:
        cache = huggingface_hub.scan_cache_dir(hub_cache)
    except CacheNotFound:
        cache = None
    repositories = cache.repos if cache is not None else frozenset()
    found = next((repo for repo in repositories if repo.repo_id == name and repo.repo_type == "model"), None)
    if found is None:
        raise ModelError(f"there is no model {name} in the hub's cache; `cloister list` shows what there is", param="name")
    try:
        shutil.rmtree(found.repo_path)  # not by revision: two repositories may share a commit, and the library takes either
    except OSError as error:
        raise ModelError(f"{name} cannot be deleted from the hub's cache: {error.strerror}") from None
    return found.size_on_disk


def _find(root: Path, file: str | None, name: str) -> Path:
    """Returns the model in a snapshot of a repository."""
    if file is not None and not (root / file).is_file():
        raise ModelError(f"there is no file {name} on the hub or in its cache here; check the name", param="model")
    return find_model(root if file is None else root / file)


def _ask_hub(name: str) -> list[str] | None:
    """Returns the files of a repository, None if the hub does not answer.

    It is asked on a thread: a name look-up has no deadline of its own.
    """
    try:
        info = call_within(REACH_TIMEOUT_S, lambda: huggingface_hub.HfApi().model_info(name, timeout=REACH_TIMEOUT_S / 2))
    except GatedRepoError:
        raise ModelError(f"{name} is gated: ask for access on its page, then run `hf auth login`", param="model") from None
    except RepositoryNotFoundError:
        raise ModelError(f"the hub has no model {name}, or it is private: check the name or run `hf auth login`") from None
    except Exception:
        return None
    return [file.rfilename for file in info.siblings or ()]


def _cached(name: str) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=[*FILES, "*.gguf"], local_files_only=True))
    except Exception:
        raise ModelError(
            f"{name} is not on this machine and the Hugging Face hub cannot be reached; connect to the network, or copy "
            "the model's directory or GGUF file here and give its path",
            param="model",
        ) from None


@contextmanager
def _progress_class(shown: bool) -> Iterator[type[Any]]:
    """Yields a class that the hub's library takes for tqdm and that draws on one rich display."""
    with download_progress(shown) as display:
        yield type("HubBar", (_Bar,), {"display": display})


class _Bar:
    """As much of tqdm as the hub's library calls; only bars that count bytes of files are drawn."""

    display: Progress

    def __init__(self, *_: object, desc: str = "", total: float | None = None, unit: str = "it", **__: object) -> None:
        self.n = 0.0
        self._total = total or 0.0
        drawn = unit == "B" and not desc.startswith("Downloading")
        self._task = self.display.add_task("Downloading", total=total or None, visible=drawn)

    @property
    def total(self) -> float:
        return self._total

    @total.setter
    def total(self, value: float) -> None:
        self._total = value
        self.refresh()

    @property
    def format_dict(self) -> dict[str, Any]:
        return {"rate": None}

    def update(self, n: float | None = 1) -> None:
        self.n += n or 0
        self.refresh()

    def refresh(self) -> None:
        self.display.update(self._task, completed=self.n, total=self._total or None)

    def set_description(self, *_: object, **__: object) -> None:
        self.refresh()

    set_description_str = set_postfix_str = set_postfix = set_description

    def close(self) -> None:
        self.refresh()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
