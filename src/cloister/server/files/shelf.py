"""Everything of one kind that owners keep: what each is called, whose it is, how long it stays."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import msgspec

from cloister.server.files.vault import StorageFullError, Vault
from cloister.types.errors import NotFoundError

MAX_OBJECTS: Final = 1_000
"""Of each kind, for each owner."""

_META: Final = ".meta"


class Kept(msgspec.Struct, kw_only=True):
    """What all things that are kept have in common.

    Attributes:
        owner: tag of whose it is, worked out from a secret that no name leads to.
    """

    id: str
    owner: str
    created_at: int
    expires_at: int


K = TypeVar("K", bound=Kept)


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose something is.

    Attributes:
        tag: says which things are the owner's.
        key: of their contents.
    """

    tag: str
    key: bytes

    @classmethod
    def of(cls, vault: Vault, secret: bytes) -> Owner:
        """Returns the owner who has a secret (`Admission.owner`)."""
        return cls(vault.derive(b"tag\0" + secret).hex()[:32], vault.derive(b"content\0" + secret))


class Shelf(Generic[K]):
    """Everything of one kind: held in memory, and sealed on disk.

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
        """Returns an id with nothing in it."""
        return f"{self._prefix}{secrets.token_hex(16)}"

    def now(self) -> int:
        return int(self._clock())

    def put(self, kept: K) -> None:
        """Keeps something, or what became of it.

        Raises:
            StorageFullError: there is no room.
        """
        with self._lock:
            if kept.id not in self._kept and sum(each.owner == kept.owner for each in self._kept.values()) >= MAX_OBJECTS:
                raise StorageFullError(f"Nobody may keep more than {MAX_OBJECTS}; delete some, or wait until they expire.")
        self._vault.replace(kept.id + _META, self._key, msgspec.json.encode(kept), is_small=True)
        with self._lock:
            self._kept[kept.id] = kept

    def find(self, kept_id: str, owner: Owner) -> K:
        """Returns what an owner keeps under an id.

        Raises:
            NotFoundError: there is no such thing, or it is another's.
        """
        kept = self._kept.get(kept_id)
        if kept is None or not self._is_there(kept) or not secrets.compare_digest(kept.owner, owner.tag):
            raise NotFoundError("There is no such file or batch, or it is gone: all expire.", code="not_found")
        return kept

    def of(self, owner: Owner) -> list[K]:
        """Returns all that an owner keeps, the newest first."""
        with self._lock:
            found = [kept for kept in self._kept.values() if kept.owner == owner.tag and self._is_there(kept)]
        return sorted(found, key=lambda kept: (-kept.created_at, kept.id))

    def all(self) -> list[K]:
        """Returns what everybody keeps."""
        with self._lock:
            return list(self._kept.values())

    def remove(self, kept_id: str) -> None:
        """Forgets something."""
        with self._lock:
            self._kept.pop(kept_id, None)
        self._vault.remove(kept_id + _META)

    def expired(self) -> list[str]:
        """Returns the ids of what has had its time."""
        with self._lock:
            return [kept.id for kept in self._kept.values() if not self._is_there(kept)]

    def _is_there(self, kept: Kept) -> bool:
        return kept.expires_at > self._clock()


def page(items: Sequence[K], limit: int, after: str | None) -> tuple[list[K], bool]:
    """Returns the items that follow the one called `after`, `limit` at most, and whether there are more."""
    ids = [item.id for item in items]
    start = ids.index(after) + 1 if after in ids else 0
    return list(items[start : start + limit]), start + limit < len(items)
