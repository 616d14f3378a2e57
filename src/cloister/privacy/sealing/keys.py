"""Private keys with a birth and a death, and the ring that replaces them. No I/O; time is an argument.

A key object of OpenSSL holds the private bytes; they are never in a Python object, and OpenSSL overwrites them when the last
reference is dropped.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.privacy.sealing.configuration import KeyConfiguration, encode_keys
from cloister.privacy.sealing.hpke import SUITES, Suite
from cloister.privacy.sealing.kem import Kem, KemPrivateKey
from cloister.privacy.sealing.kems import KEMS
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
    private_key: KemPrivateKey
    created_s: float
    expires_s: float

    def __repr__(self) -> str:
        return f"SealingKey({self.configuration.key_id})"

    @classmethod
    def generate(
        cls, key_id: int, kem: Kem, *, created_s: float = 0.0, expires_s: float = math.inf, suites: tuple[Suite, ...] = SUITES
    ) -> SealingKey:
        """Draws a new key."""
        private_key = kem.generate()
        configuration = KeyConfiguration(key_id, private_key.public_bytes(), suites, kem.kem_id)
        return cls(configuration, private_key, created_s, expires_s)


class KeyRing:
    """The keys of one receiver: current ones, one for each KEM, and for `overlap_s` those before them, then destroyed.

    A key lives `life_s` in all: it is current for `life_s - overlap_s`, and goes on opening requests of clients that have not
    seen the next one yet for `overlap_s`.

    Args:
        now_s: any clock that never goes back; all other times are of the same clock.
        kems: what is offered, best first.
    """

    def __init__(
        self,
        now_s: float,
        *,
        life_s: float = NODE_KEY_LIFE_S,
        overlap_s: float = NODE_KEY_OVERLAP_S,
        kems: Sequence[Kem] = KEMS,
    ) -> None:
        if not 0 <= overlap_s < life_s:
            raise ConfigError("A key's overlap must be shorter than its life.")
        self.life_s = life_s
        self.overlap_s = overlap_s
        self._kems = tuple(kems)
        self._receipt_keys: dict[int, tuple[Ed25519PrivateKey, float]] = {}
        self._generations = [self._draw(secrets.randbelow(256), now_s)]

    @property
    def current(self) -> SealingKey:
        """The newest key of the best KEM, to which clients seal that have it."""
        return self._generations[-1][0]

    @property
    def configurations(self) -> tuple[KeyConfiguration, ...]:
        """The newest key of each KEM, best first."""
        return tuple(key.configuration for key in self._generations[-1])

    @property
    def num_keys(self) -> int:
        """How many keys of each KEM there are at this moment."""
        return len(self._generations)

    @property
    def next_change_s(self) -> float:
        """When `rotate` next has something to do."""
        ends_s = [end_s for _, end_s in self._receipt_keys.values()]
        return min(self._generations[0][0].expires_s, self.current.expires_s - self.overlap_s, *ends_s)

    def rotate(self, now_s: float) -> bool:
        """Replaces the current keys when their time has come and drops what has expired; says whether it drew new ones."""
        is_due = now_s >= self.current.expires_s - self.overlap_s
        if is_due:
            last_id = self._generations[-1][-1].configuration.key_id
            self._generations.append(self._draw(last_id + 1, now_s))
        self._generations = [keys for keys in self._generations if now_s < keys[0].expires_s]
        self._receipt_keys = {key_id: kept for key_id, kept in self._receipt_keys.items() if now_s < kept[1]}
        return is_due

    def find(self, key_id: int, now_s: float) -> SealingKey | None:
        """Returns the key of that number, unless it has expired."""
        keys = (key for keys in self._generations for key in keys)
        return next((key for key in keys if key.configuration.key_id == key_id and now_s < key.expires_s), None)

    def publish(self) -> bytes:
        """Returns the current keys as `application/ohttp-keys`, the best first; who does not know its KEM takes another."""
        return encode_keys(self.configurations)

    def find_receipt_key(self, key_id: int, now_s: float) -> Ed25519PrivateKey | None:
        """Returns the key that signs receipts of requests that the key of that number opened, unless it has ended too."""
        key, end_s = self._receipt_keys.get(key_id, (None, now_s))
        return key if now_s < end_s else None

    def publish_receipt_key(self) -> bytes:
        """Returns the public key that checks receipts of requests sealed to the current key, Ed25519, 32 bytes."""
        key, _ = self._receipt_keys[self.current.configuration.key_id]
        return key.public_key().public_bytes_raw()

    def _draw(self, first_id: int, now_s: float) -> tuple[SealingKey, ...]:
        ends_s = now_s + self.life_s
        keys = tuple(
            SealingKey.generate((first_id + place) % 256, kem, created_s=now_s, expires_s=ends_s)
            for place, kem in enumerate(self._kems)
        )
        receipt_key = Ed25519PrivateKey.generate(), ends_s + RECEIPT_GRACE_S
        self._receipt_keys.update({key.configuration.key_id: receipt_key for key in keys})
        return keys
