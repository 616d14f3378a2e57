"""API keys, each with a tenant and a priority class. Pure; `keyfile` reads and writes them.

Only digests are stored. A key is 256 random bits, so a brute-force search is infeasible even with a fast hash. Slow password
hashes are meant for secrets of perhaps 40 bits and would only slow down every request. HMAC-SHA256 with a salt per file (RFC
2104) prevents comparing the digests of two files.
"""

from __future__ import annotations

import base64
import hmac
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from cloister.policy.quotas import NO_LIMITS, KeyQuota
from cloister.types.errors import ConfigError

RandomBytes = Callable[[int], bytes]

MIN_PRIORITY, MAX_PRIORITY = -10, 10
"""Classes are few and public: a class with one user would identify that user."""

_NUM_BYTES = 32
_PREFIX = "clo-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Credential:
    """The rights of one API key.

    Attributes:
        name: display name of the key, as in `cloister keys list`.
        tenant: whose scope and fair share it uses.
        priority: its class; smaller is more urgent.
        digest: HMAC-SHA256 of the key.
        limits: its quotas.
        is_operator: its holder may change what the server runs, such as its adapters.
    """

    name: str
    tenant: str
    priority: int
    digest: bytes = field(repr=False)
    limits: KeyQuota = NO_LIMITS
    is_operator: bool = False


@dataclass(frozen=True, slots=True)
class Credentials:
    """All keys of a server.

    Attributes:
        salt: key of the HMAC, random, one per file.
        tenants: tenant -> secret salt of its scope. Drawn with the tenant's first key and deleted with its last one: it cannot
            be derived from the name, and a tenant that is created again shares nothing with the former one.
    """

    salt: bytes = field(repr=False)
    keys: tuple[Credential, ...] = ()
    tenants: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    version: int = 1

    def __post_init__(self) -> None:
        if self.version != 1:
            raise ValueError("its version is not 1")
        if any(len(secret) != _NUM_BYTES for secret in (self.salt, *self.tenants.values(), *_digests(self.keys))):
            raise ValueError("a salt or digest does not have 32 bytes")
        if len({key.name for key in self.keys}) != len(self.keys):
            raise ValueError("two keys have one name")
        if {key.tenant for key in self.keys} != set(self.tenants):
            raise ValueError("keys and tenants do not belong together")

    @classmethod
    def empty(cls, random: RandomBytes = os.urandom) -> Credentials:
        return cls(random(_NUM_BYTES))

    def find(self, api_key: str) -> Credential | None:
        """Returns the credential of a key, or None. Compares with every digest, each in constant time."""
        digest = self._digest(api_key)
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def add(
        self,
        name: str,
        *,
        tenant: str | None = None,
        priority: int = 0,
        limits: KeyQuota = NO_LIMITS,
        is_operator: bool = False,
        random: RandomBytes = os.urandom,
    ) -> tuple[Credentials, str]:
        """Returns credentials with one more key, and the key itself, which is not stored.

        Args:
            tenant: None: a tenant named like the key.

        Raises:
            ConfigError: the name is taken, or a value is out of range.
        """
        tenant = name if tenant is None else tenant
        _check_names(name, tenant)
        if any(key.name == name for key in self.keys):
            raise ConfigError(f"there is a key named {name!r} already; remove it first or choose another name")
        if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            raise ConfigError(f"priority must be a whole number from {MIN_PRIORITY} to {MAX_PRIORITY}", param="priority")
        api_key = _PREFIX + base64.urlsafe_b64encode(random(_NUM_BYTES)).decode().rstrip("=")
        added = Credential(name, tenant, priority, self._digest(api_key), limits, is_operator)
        salt = self.tenants.get(tenant) or random(_NUM_BYTES)
        return replace(self, keys=(*self.keys, added), tenants={**self.tenants, tenant: salt}), api_key

    def limit(self, name: str, limits: KeyQuota) -> Credentials:
        """Returns credentials with new limits for the key `name` (ConfigError if it does not exist)."""
        self._check_exists(name)
        return replace(self, keys=tuple(replace(key, limits=limits) if key.name == name else key for key in self.keys))

    def remove(self, name: str) -> Credentials:
        """Returns credentials without the key `name` (ConfigError if it does not exist)."""
        self._check_exists(name)
        keys = tuple(key for key in self.keys if key.name != name)
        left = {key.tenant for key in keys}
        return replace(self, keys=keys, tenants={t: salt for t, salt in self.tenants.items() if t in left})

    def _check_exists(self, name: str) -> None:
        if not any(key.name == name for key in self.keys):
            raise ConfigError(f"there is no key named {name!r}; `cloister keys list` shows those that exist")

    def _digest(self, api_key: str) -> bytes:
        return hmac.digest(self.salt, b"cloister/api-key/1\0" + api_key.encode("utf-8", "surrogatepass"), "sha256")


def _digests(keys: tuple[Credential, ...]) -> tuple[bytes, ...]:
    return tuple(key.digest for key in keys)


def _check_names(*names: str) -> None:
    if not all(_NAME.fullmatch(name) for name in names):
        raise ConfigError(
            "names of keys and tenants start with a letter or digit, followed by letters, digits, '.', '_' or '-', "
            "64 characters at most"
        )
