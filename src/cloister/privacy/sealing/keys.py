"""Private keys with a birth and a death, and the ring that replaces them. No I/O; time is an argument.

A key object of OpenSSL holds the private bytes; they are never in a Python object, and OpenSSL overwrites them when the last
reference is dropped.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from cloister.privacy.sealing.configuration import KeyConfiguration, encode_keys
from cloister.privacy.sealing.hpke import SUITES, Suite
from cloister.types.errors import ConfigError

NODE_KEY_LIFE_S: Final = 3600.0
NODE_KEY_OVERLAP_S: Final = 900.0
RECEIPT_GRACE_S: Final = 600.0
"""How long after a key the key of its receipts ends: an answer may outlast the key that opened its request by as much."""
GATEWAY_KEY_LIFE_S: Final = 24 * 3600.0
GATEWAY_KEY_OVERLAP_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class SealingKey:
    """A private key.

    Attributes:
        configuration: its public part.
        created_s, expires_s: the time from which and up to which it opens requests, on the ring's clock.
    """

    configuration: KeyConfiguration
    private_key: X25519PrivateKey
    created_s: float
    expires_s: float

    def __repr__(self) -> str:
        return f"SealingKey({self.configuration.key_id})"

    @classmethod
    def generate(
        cls, key_id: int, *, created_s: float = 0.0, expires_s: float = math.inf, suites: tuple[Suite, ...] = SUITES
    ) -> SealingKey:
        """Draws a new key."""
        private_key = X25519PrivateKey.generate()
        return cls(
            KeyConfiguration(key_id, private_key.public_key().public_bytes_raw(), suites), private_key, created_s, expires_s
        )


class KeyRing:
    """The keys of one receiver: a current one, and for `overlap_s` the one before it, which is then destroyed.

    A key lives `life_s` in all: it is current for `life_s - overlap_s`, and goes on opening requests of clients that have not
    seen the next one yet for `overlap_s`.

    Args:
        now_s: any clock that never goes back; all other times are of the same clock.
    """

    def __init__(self, now_s: float, *, life_s: float = NODE_KEY_LIFE_S, overlap_s: float = NODE_KEY_OVERLAP_S) -> None:
        if not 0 <= overlap_s < life_s:
            raise ConfigError("A key's overlap must be shorter than its life.")
        self.life_s = life_s
        self.overlap_s = overlap_s
        self._receipt_keys: dict[int, tuple[Ed25519PrivateKey, float]] = {}
        self._keys = [self._draw(secrets.randbelow(256), now_s)]

    @property
    def current(self) -> SealingKey:
        """The newest key; clients seal to it."""
        return self._keys[-1]

    @property
    def num_keys(self) -> int:
        """How many keys there are at this moment."""
        return len(self._keys)

    @property
    def next_change_s(self) -> float:
        """When `rotate` next has something to do."""
        ends_s = [end_s for _, end_s in self._receipt_keys.values()]
        return min(self._keys[0].expires_s, self.current.expires_s - self.overlap_s, *ends_s)

    def rotate(self, now_s: float) -> bool:
        """Replaces the current key when its time has come and drops what has expired; says whether it drew a new one."""
        is_due = now_s >= self.current.expires_s - self.overlap_s
        if is_due:
            self._keys.append(self._draw((self.current.configuration.key_id + 1) % 256, now_s))
        self._keys = [key for key in self._keys if now_s < key.expires_s]
        self._receipt_keys = {key_id: kept for key_id, kept in self._receipt_keys.items() if now_s < kept[1]}
        return is_due

    def find(self, key_id: int, now_s: float) -> SealingKey | None:
        """Returns the key of that number, unless it has expired."""
        return next((key for key in self._keys if key.configuration.key_id == key_id and now_s < key.expires_s), None)

    def publish(self) -> bytes:
        """Returns the current key as `application/ohttp-keys`."""
        return encode_keys([self.current.configuration])

    def find_receipt_key(self, key_id: int, now_s: float) -> Ed25519PrivateKey | None:
        """Returns the key that signs receipts of requests that the key of that number opened, unless it has ended too."""
        key, end_s = self._receipt_keys.get(key_id, (None, now_s))
        return key if now_s < end_s else None

    def publish_receipt_key(self) -> bytes:
        """Returns the public key that checks receipts of requests sealed to the current key, Ed25519, 32 bytes."""
        key, _ = self._receipt_keys[self.current.configuration.key_id]
        return key.public_key().public_bytes_raw()

    def destroy(self) -> None:
        """Drops every key: nothing is opened or signed any more."""
        self._keys.clear()
        self._receipt_keys.clear()

    def _draw(self, key_id: int, now_s: float) -> SealingKey:
        self._receipt_keys[key_id] = Ed25519PrivateKey.generate(), now_s + self.life_s + RECEIPT_GRACE_S
        return SealingKey.generate(key_id, created_s=now_s, expires_s=now_s + self.life_s)
