"""Shared by the routes of files and batches: the store, its owners, running batches, and multipart uploads (RFC 7578)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp

from cloister.policy.gate import Admission, Gate
from cloister.policy.policy import Use
from cloister.server.errors import invalid
from cloister.server.files.batches import Batch, BatchRunner
from cloister.server.files.store import FileStore, Owner, Shelf, is_stored
from cloister.server.files.vault import DamagedError, Vault, read_key
from cloister.server.load_shedding import BodyBudget
from cloister.types.config import ServerConfig
from cloister.types.errors import ConfigError, NotFoundError, PolicyError


class FileService:
    """The files and batches of one server."""

    def __init__(self, vault: Vault, gate: Gate, most_each_bytes: int | None) -> None:
        self.store = FileStore(vault, most_each_bytes=most_each_bytes)
        self.batches = Shelf(vault, Batch, "batch_")
        self._vault = vault
        self._gate = gate
        self._runner: BatchRunner | None = None

    @classmethod
    def open(cls, config: ServerConfig, gate: Gate) -> FileService | None:
        """Opens the directory from the settings; None if unset.

        Raises:
            ConfigError: it cannot be used, or owners cannot be distinguished.
            PolicyError: the profile refuses to keep anything.
        """
        if config.files is None:
            return None
        gate.policy.check({"files": Use(True, "setting `files`")})
        if config.sealed:
            raise ConfigError("a sealed node keeps nothing; leave `files` out", param="files")
        if not gate.tells_owners:
            raise ConfigError(
                "`files` needs API keys here, to distinguish users: make one with `cloister keys add NAME`,"
                " then --api-keys FILE",
                param="files",
            )
        path = Path(config.files).expanduser()
        key_path = path.with_name(f"{path.name}.key") if config.files_key is None else Path(config.files_key).expanduser()
        if not key_path.exists() and path.is_dir() and any(is_stored(entry.name) for entry in path.iterdir()):
            raise ConfigError(
                f"{path} has files, and the key file {key_path}, without which nobody can read them, is missing: restore it, or"
                " remove what is there",
                param="files_key",
            )
        most_bytes = config.files_mb << 20
        most_each_bytes = most_bytes // 2 if gate.asks_for_keys else None
        vault = Vault(path, read_key(key_path), most_bytes)
        try:
            service = cls(vault, gate, most_each_bytes)
        except DamagedError:
            vault.close()
            raise ConfigError(
                f"what is in {path} was changed, or the key file {key_path} was: restore them, or remove what is there",
                param="files",
            ) from None
        service.store.tidy(file_id for batch in service.batches.all() for file_id in (batch.output_id, batch.error_id))
        return service

    def owner(self, admission: Admission) -> Owner:
        """Returns the owner whose files a request may see.

        Raises:
            PolicyError: it came with an issuer's token, whose users cannot store files.
        """
        if admission.owner is None:
            raise PolicyError("Files are kept for API keys alone; a token of the issuer has none.")
        return Owner.of(self._vault, admission.owner)

    @property
    def runner(self) -> BatchRunner:
        """The batch runner."""
        assert self._runner is not None, "`begin` comes first"
        return self._runner

    def begin(self, app: ASGIApp, budget: BodyBudget) -> None:
        """Starts to run batches, those of an earlier server first. Needs the server's event loop.

        Args:
            app: application for requests that are already admitted.
            budget: memory for the bodies of all requests, those of batches included.
        """
        self._runner = BatchRunner(self.store, self.batches, self._gate, app, budget)
        self._runner.begin()

    def close(self) -> None:
        """Releases the directory to another server; call it when the tasks of this server's loop have ended."""
        self._vault.close()


def require(files: FileService | None, gate: Gate) -> FileService:
    """Returns the store.

    Raises:
        PolicyError: the profile refuses to keep anything.
        NotFoundError: there is no store.
    """
    gate.policy.check({"files": Use(True, "the request")})
    if files is None:
        raise NotFoundError(
            "This server keeps no files; its operator can name a directory for them with --files.", code="no_file_store"
        )
    return files


# Uploads as multipart/form-data (RFC 7578): a few small fields, and one file. Pure.


MAX_PARTS: Final = 16
MAX_HEAD_BYTES: Final = 4096
"""Size limit of one part's headers: parsing time grows with the square of their length."""
_MAX_BOUNDARY: Final = 70


@dataclass(frozen=True, slots=True)
class FormPart:
    """One part of a form. Its repr omits content."""

    data: bytes
    filename: str | None

    def __repr__(self) -> str:
        return f"FormPart(num_bytes={len(self.data)})"


def read_form(content_type: str, body: bytes) -> Mapping[str, FormPart]:
    """Returns the parts of a form by name; the last one of equal names.

    Raises:
        InvalidRequestError: the body is not a form.
    """
    boundary = _boundary(content_type)
    _, *pieces = (b"\r\n" + body).split(b"\r\n--" + boundary, MAX_PARTS + 1)
    if len(pieces) > MAX_PARTS:
        raise invalid(f"The form has more than {MAX_PARTS} parts.", code="invalid_form")
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise _broken()
    return dict(_read_part(piece) for piece in pieces[:-1])


def _boundary(content_type: str) -> bytes:
    header = Message()
    header["content-type"] = content_type
    found = header.get_boundary()
    if not found or len(found) > _MAX_BOUNDARY or not found.isascii():
        raise _broken()
    return found.encode()


def _read_part(piece: bytes) -> tuple[str, FormPart]:
    head, separator, data = piece.lstrip(b" \t").partition(b"\r\n\r\n")
    if len(head) > MAX_HEAD_BYTES:
        raise invalid(f"A part of the form has more than {MAX_HEAD_BYTES} bytes of headers.", code="invalid_form")
    # Names are plain UTF-8 (RFC 7578, 5.1).
    headers = HeaderParser().parsestr(head.removeprefix(b"\r\n").decode(errors="replace"))
    name = headers.get_param("name", header="content-disposition")
    if not separator or not isinstance(name, str):
        raise _broken()
    return name, FormPart(data, headers.get_filename())


def _broken() -> Exception:
    return invalid("The body must be multipart/form-data with the parts `file` and `purpose`.", code="invalid_form")
