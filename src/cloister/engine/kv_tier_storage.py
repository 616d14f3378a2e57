"""Where the slots of a tier lie: a file without a name, in a directory or in memory.

Only the engine's memory has the keys, so nobody can read the file after the engine has ended. The file has no name, and its
space is free again when the engine ends, in whatever way. Engines that use one directory cannot reach each other's files.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from cloister.kv.lent_tier import PEER_TIER_THREAT
from cloister.kv.shared_tier import SHARED_TIER_THREAT
from cloister.kv.tier_index import tier_threat
from cloister.types.errors import ConfigError
from cloister.types.registry import Registry

_logger = logging.getLogger(__name__)

_UNITS: Final = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_EXAMPLES: Final = (
    "kv_tier is host:SIZE, shared:SIZE or peer:SIZE, disk:PATH[,SIZE], or one of the former and a disk with a + between them, "
    "such as host:4G+disk:/var/lib/cloister,200G"
)
FREE_SHARE: Final = 0.5
"""Default size of a disk tier: this share of the free space at the start."""


ONLY_REPLICAS: Final = (
    "replicas of one machine share a shared or a peer tier; set replicas to 2 or more without on, or give kv_tier host:SIZE"
)


class TierStorage(Protocol):
    """Where a tier's file is."""

    def open(self, where: TierSetting) -> int:
        """Returns a file descriptor that only this process has.

        Raises:
            ConfigError: the file cannot be made.
        """
        ...

    def measure(self, where: TierSetting) -> int:
        """Returns the bytes of a tier without a given size (ConfigError if it needs one)."""
        ...

    @property
    def is_memory(self) -> bool:
        """Whether its bytes are taken from the engine's memory."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether replicas share it, in a pool that the front makes (`engine.kv_pool`)."""
        ...

    @property
    def lends(self) -> bool:
        """Whether replicas lend each other the part of it that they do not need (`kv.lent_tier`)."""
        ...


@dataclass(frozen=True, slots=True)
class TierSetting:
    """One tier of the setting `kv_tier`.

    Attributes:
        name: which tier, a name of `KV_TIERS`.
        path: its directory; empty where it needs none.
        num_bytes: its size; None if it was not given.
    """

    name: str
    path: str
    num_bytes: int | None

    @classmethod
    def parse(cls, setting: str) -> TierSetting:
        """Raises ConfigError if the setting cannot be read."""
        name, _, rest = setting.partition(":")
        KV_TIERS.get(name)
        path, comma, size = rest.rpartition(",")
        if name != "disk":
            path, size = "", rest
        elif not comma:
            path, size = rest, ""
        if (name == "disk") != bool(path):
            raise ConfigError(_EXAMPLES, param="kv_tier")
        return cls(name, path, _parse_size(size) if size else None)

    @property
    def storage(self) -> TierStorage:
        return KV_TIERS.get(self.name)

    @property
    def is_shared(self) -> bool:
        return self.storage.is_shared

    @property
    def lends(self) -> bool:
        return self.storage.lends

    @property
    def limit_bytes(self) -> int:
        """Its size: the given one, or what `TierStorage.measure` says."""
        return self.storage.measure(self) if self.num_bytes is None else self.num_bytes


def parse_tiers(setting: str) -> list[TierSetting]:
    """Returns the tiers of `kv_tier`, those in memory first.

    Raises:
        ConfigError: the setting cannot be read, or names two tiers in memory or two disks.
    """
    names = "|".join(map(re.escape, KV_TIERS.names()))
    tiers = [TierSetting.parse(part) for part in re.split(rf"\+(?=(?:{names}):)", setting)]
    if len({tier.storage.is_memory for tier in tiers}) < len(tiers):
        raise ConfigError(f"{_EXAMPLES}; at most one in memory and one disk", param="kv_tier")
    return sorted(tiers, key=lambda tier: not tier.storage.is_memory)


def _parse_size(text: str) -> int:
    try:
        num_bytes = int(float(text[:-1]) * _UNITS[text[-1:].upper()])
    except (KeyError, ValueError, OverflowError):
        num_bytes = 0
    if num_bytes <= 0:
        raise ConfigError(f"{_EXAMPLES}; a size is a number above 0 with K, M, G or T", param="kv_tier")
    return num_bytes


KV_TIERS: Registry[TierStorage] = Registry("KV tier")


class DiskStorage:
    """A file in a directory, which is made if it does not exist; the file's name is removed at once."""

    is_memory = is_shared = lends = False

    def open(self, where: TierSetting) -> int:
        if where.num_bytes is not None and where.num_bytes > (free := self._count_free(where)):
            _logger.warning(
                "the KV tier may take %.0f MiB of %s, where %.0f MiB are free; KV that does not fit there is "
                "lost, and computed again when it is needed",
                where.num_bytes / 2**20,
                where.path,
                free / 2**20,
            )
        try:
            _make_folder(where)
            with tempfile.TemporaryFile(prefix="cloister-kv-", dir=where.path) as file:
                return os.dup(file.fileno())
        except OSError as error:
            raise _unusable(where, error) from error

    def measure(self, where: TierSetting) -> int:
        return int(self._count_free(where) * FREE_SHARE)

    def _count_free(self, where: TierSetting) -> int:
        try:
            _make_folder(where)
            return shutil.disk_usage(Path(where.path)).free
        except OSError as error:
            raise _unusable(where, error) from error


def _make_folder(where: TierSetting) -> None:
    """Makes the directory if it does not exist, for this user alone."""
    Path(where.path).mkdir(mode=0o700, parents=True, exist_ok=True)


class HostStorage:
    """A file in memory."""

    is_memory, is_shared, lends = True, False, False

    def open(self, where: TierSetting) -> int:
        return os.memfd_create("cloister-kv")

    def measure(self, where: TierSetting) -> int:
        raise ConfigError("a tier in memory needs its size, such as host:4G", param="kv_tier")


class SharedStorage(HostStorage):
    """An engine's part of the memory that replicas share. The front makes it, and gives each engine a seat."""

    is_shared = True

    def open(self, where: TierSetting) -> int:
        raise ConfigError(ONLY_REPLICAS, param="kv_tier")


class PeerStorage(SharedStorage):
    """The same, plus the slots that the next engine lends of its part."""

    lends = True


def _unusable(where: TierSetting, error: OSError) -> ConfigError:
    reason = os.strerror(error.errno) if error.errno else type(error).__name__
    return ConfigError(
        f"kv_tier cannot use the directory {where.path}: {reason}; name one that this user may write to",
        param="kv_tier",
    )


KV_TIERS.register("host", tier_threat("host memory"))(HostStorage())
KV_TIERS.register("shared", SHARED_TIER_THREAT)(SharedStorage())
KV_TIERS.register("peer", PEER_TIER_THREAT)(PeerStorage())
KV_TIERS.register("disk", tier_threat("SSD"))(DiskStorage())
