"""Users' files, encrypted under a key of their owner and charged to the owner's quota."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

import msgspec

from cloister.server.files.vault import DamagedError, StorageFullError, Vault
from cloister.types.errors import NotFoundError

# The index of stored records of one kind: ids, owners, expiry.


MAX_OBJECTS: Final = 1_000
"""Most objects of each kind, for each owner."""

_META: Final = ".meta"


class Kept(msgspec.Struct, kw_only=True):
    """Common fields of all stored objects.

    Attributes:
        owner: owner's tag, derived from a secret, not from a name.
    """

    id: str
    owner: str
    created_at: int
    expires_at: int


K = TypeVar("K", bound=Kept)


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of stored objects.

    Attributes:
        tag: identifies the owner's objects.
        key: encryption key of their contents.
    """

    tag: str
    key: bytes

    @classmethod
    def of(cls, vault: Vault, secret: bytes) -> Owner:
        """Returns the owner with this secret (`Admission.owner`)."""
        return cls(vault.derive(b"tag\0" + secret).hex()[:32], vault.derive(b"content\0" + secret))


class Shelf(Generic[K]):
    """All records of one kind: in memory, and encrypted on disk.

    Args:
        prefix: of ids, such as "file-".
        clock: seconds since 1970.
    """

    def __init__(self, vault: Vault, kind: type[K], prefix: str, clock: Callable[[], float] = time.time) -> None:
        self._vault = vault
        self._kind = kind
        self._prefix = prefix
        self._clock = clock
        self._key = vault.derive(b"meta\0")
        self._lock = threading.Lock()
        self._kept: dict[str, K] = {}
        for name in vault.names():
            if name.startswith(prefix) and name.endswith(_META):
                for record in vault.read(name, self._key):
                    kept = msgspec.json.decode(record, type=kind)
                    self._kept[kept.id] = kept

    def new_id(self) -> str:
        """Returns a random id."""
        return f"{self._prefix}{secrets.token_hex(16)}"

    def now(self) -> int:
        return int(self._clock())

    def put(self, kept: K) -> None:
        """Stores a new or updated object.

        Raises:
            StorageFullError: there is no space.
        """
        with self._lock:
            if kept.id not in self._kept and sum(each.owner == kept.owner for each in self._kept.values()) >= MAX_OBJECTS:
                raise StorageFullError(f"An owner may keep at most {MAX_OBJECTS}; delete some, or wait until they expire.")
        self._vault.replace(kept.id + _META, self._key, msgspec.json.encode(kept), is_small=True)
        with self._lock:
            self._kept[kept.id] = kept

    def find(self, kept_id: str, owner: Owner) -> K:
        """Returns an owner's object by id.

        Raises:
            NotFoundError: it does not exist, or belongs to another owner.
        """
        kept = self._kept.get(kept_id)
        if kept is None or not self._is_there(kept) or not secrets.compare_digest(kept.owner, owner.tag):
            raise NotFoundError("There is no such file or batch, or it is gone: all expire.", code="not_found")
        return kept

    def of(self, owner: Owner) -> list[K]:
        """Returns all objects of an owner, newest first."""
        with self._lock:
            found = [kept for kept in self._kept.values() if kept.owner == owner.tag and self._is_there(kept)]
        return sorted(found, key=lambda kept: (-kept.created_at, kept.id))

    def all(self) -> list[K]:
        """Returns the objects of all owners."""
        with self._lock:
            return list(self._kept.values())

    def remove(self, kept_id: str) -> None:
        """Deletes an object."""
        with self._lock:
            self._kept.pop(kept_id, None)
        self._vault.remove(kept_id + _META)

    def expired(self) -> list[str]:
        """Returns the ids of expired objects."""
        with self._lock:
            return [kept.id for kept in self._kept.values() if not self._is_there(kept)]

    def _is_there(self, kept: Kept) -> bool:
        return kept.expires_at > self._clock()


def page(items: Sequence[K], limit: int, after: str | None) -> tuple[list[K], bool]:
    """Returns at most `limit` items after the one with id `after`, and whether there are more."""
    ids = [item.id for item in items]
    start = ids.index(after) + 1 if after in ids else 0
    return list(items[start : start + limit]), start + limit < len(items)


LIFETIME_S: Final = 30 * 24 * 3600
"""Lifetime of a file or batch; a client may request less."""

_DATA: Final = ".data"
_ID: Final = re.compile(r"[a-z]+[-_][0-9a-f]{32}")


def is_stored(name: str) -> bool:
    """Whether a file of this name is a stored object or its content, and not something else in the directory."""
    return name.endswith((_META, _DATA))


class StoredFile(Kept, kw_only=True):
    """Metadata of a file."""

    filename: str
    purpose: Literal["batch", "batch_output"]
    bytes: int


class FileStore:
    """The files of all owners.

    Args:
        most_each_bytes: size limit for the files of one owner, including those being written, so that others find space; None
            for no limit.
    """

    def __init__(self, vault: Vault, clock: Callable[[], float] = time.time, *, most_each_bytes: int | None = None) -> None:
        self.vault = vault
        self._most_each_bytes = most_each_bytes
        self.shelf = Shelf(vault, StoredFile, "file-", clock)
        self._lock = threading.Lock()
        self._unfinished: dict[str, tuple[str, int]] = {}  # id of an unfinished file -> tag of its owner, bytes

    def create(self, owner: Owner, filename: str, content: bytes, lifetime_s: int = LIFETIME_S) -> StoredFile:
        """Stores a complete file.

        Raises:
            StorageFullError: there is no space; nothing is stored.
        """
        file_id, now = self.shelf.new_id(), self.shelf.now()
        with self._reserving(owner, file_id, len(content)):
            self.vault.replace(file_id + _DATA, owner.key, content)
        stored = StoredFile(
            id=file_id,
            owner=owner.tag,
            created_at=now,
            expires_at=now + min(lifetime_s, LIFETIME_S),
            filename=filename,
            purpose="batch",
            bytes=len(content),
        )
        return self._put(stored)

    def publish(self, owner: Owner, file_id: str, filename: str, num_bytes: int) -> StoredFile:
        """Creates a file from the data appended under an id."""
        now = self.shelf.now()
        stored = StoredFile(
            id=file_id,
            owner=owner.tag,
            created_at=now,
            expires_at=now + LIFETIME_S,
            filename=filename,
            purpose="batch_output",
            bytes=num_bytes,
        )
        return self._put(stored)

    def _put(self, stored: StoredFile) -> StoredFile:
        try:
            self.shelf.put(stored)
        except BaseException:
            if stored.purpose == "batch":
                self.vault.remove(stored.id + _DATA)
                self._finish(stored.id)
            raise
        self._finish(stored.id)  # from here on the store counts it
        return stored

    @contextmanager
    def _reserving(self, owner: Owner, file_id: str, num_bytes: int) -> Iterator[None]:
        """Charges bytes to their owner's share before they are written; reverted if the block fails.

        Raises:
            StorageFullError: the share is used up.
        """
        with self._lock:
            held = sum(stored.bytes for stored in self.shelf.of(owner) if stored.id not in self._unfinished)
            held += sum(size for tag, size in self._unfinished.values() if tag == owner.tag)
            if self._most_each_bytes is not None and held + num_bytes > self._most_each_bytes:
                raise StorageFullError(
                    "Your files take all the room that one may have; delete some, or wait until they expire."
                )
            self._count(owner, file_id, num_bytes)
        try:
            yield
        except BaseException:
            with self._lock:
                self._count(owner, file_id, -num_bytes)
            raise

    def _count(self, owner: Owner, file_id: str, num_bytes: int) -> None:
        total = self._unfinished.pop(file_id, ("", 0))[1] + num_bytes
        if total:
            self._unfinished[file_id] = (owner.tag, total)

    def _finish(self, file_id: str) -> None:
        with self._lock:
            self._unfinished.pop(file_id, None)

    def read(self, stored: StoredFile, owner: Owner) -> Iterator[bytes]:
        """Yields a file's content in pieces, each read when it is asked for: the answers of a batch may have gigabytes.

        Raises:
            DamagedError: the file was tampered with; before the first piece, if something at its end is missing.
        """
        name = stored.id + _DATA
        if self.vault.count_bytes(name) != stored.bytes:
            raise DamagedError
        yield from self.vault.read(name, owner.key)

    def content(self, stored: StoredFile, owner: Owner) -> bytes:
        """Returns the content of a file that a client sent. Raises DamagedError as `read`."""
        return b"".join(self.read(stored, owner))

    def lines(self, file_id: str, owner: Owner) -> Iterator[bytes]:
        """Yields the data appended under an id so far. At its end it counts against the owner's share, and more can follow."""
        num_bytes = 0
        for record in self.vault.mend(file_id + _DATA, owner.key):
            num_bytes += len(record)
            yield record
        with self._lock:
            self._unfinished.pop(file_id, None)
            self._count(owner, file_id, num_bytes)

    def append(self, file_id: str, owner: Owner, number: int, line: bytes) -> None:
        """Appends a line to an unfinished file; errors as in `create`, after which existing data is kept."""
        record = line + b"\n"
        with self._reserving(owner, file_id, len(record)):
            self.vault.append(file_id + _DATA, owner.key, number, record)

    def remove(self, file_id: str) -> None:
        """Removes a file with its content."""
        self.shelf.remove(file_id)
        self.vault.remove(file_id + _DATA)
        self._finish(file_id)

    def sweep(self) -> None:
        """Removes what has expired."""
        for file_id in self.shelf.expired():
            self.remove(file_id)

    def tidy(self, in_work: Iterable[str]) -> None:
        """Removes data that an interrupted server left behind; only while nothing is written.

        Args:
            in_work: ids of unfinished files.
        """
        known = {kept.id for kept in self.shelf.all()} | set(in_work)
        for name in self.vault.names():
            is_content = name.endswith(_DATA) and _ID.fullmatch(name.removesuffix(_DATA)) is not None
            if name.startswith(".") or (is_content and name.removesuffix(_DATA) not in known):
                self.vault.remove(name)
