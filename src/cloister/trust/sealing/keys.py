"""Private keys with a lifetime, their rotation, and OHTTP key configurations (RFC 9458, section 3). Time is an argument.

OpenSSL key objects hold the private bytes. These are never in a Python object, and OpenSSL overwrites them when the last
reference is dropped.
"""

from __future__ import annotations

import math
import secrets
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.trust.sealing.errors import KeyConfigurationError
from cloister.trust.sealing.hpke import SUITES, Suite
from cloister.trust.sealing.kem import KEMS, X25519, Kem, KemPrivateKey, find_kem
from cloister.types.errors import ConfigError

# Key configurations of OHTTP and the media type `application/ohttp-keys` (RFC 9458, section 3). Pure.


KEYS_MEDIA_TYPE: Final = "application/ohttp-keys"
_HEAD: Final = struct.Struct(">BH")
_LENGTH: Final = struct.Struct(">H")
_SUITE: Final = struct.Struct(">HH")
_NAMES: Final = " or ".join(kem.name for kem in KEMS)


@dataclass(frozen=True, slots=True)
class KeyConfiguration:
    """A public key with its algorithms.

    Attributes:
        key_id: number from 0 to 255 that identifies it in requests.
        public_key: public key of the KEM, with its length.
        suites: suites that its holder accepts, best first; at least one.
        kem_id: number of the KEM; one of `KEMS`.
    """

    key_id: int
    public_key: bytes
    suites: tuple[Suite, ...] = SUITES
    kem_id: int = X25519.kem_id

    @property
    def kem(self) -> Kem:
        """The mechanism that the key belongs to.

        Raises:
            KeyConfigurationError: the mechanism is unsupported.
        """
        kem = find_kem(self.kem_id)
        if kem is None:
            raise KeyConfigurationError(f"This program does not have the KEM {self.kem_id:#06x} of the key configuration.")
        return kem

    def encode(self) -> bytes:
        """Returns the configuration without the length that precedes it in a list."""
        suites = b"".join(_SUITE.pack(suite.kdf_id, suite.aead_id) for suite in self.suites)
        return _HEAD.pack(self.key_id, self.kem_id) + self.public_key + _LENGTH.pack(len(suites)) + suites

    def choose_suite(self) -> Suite:
        """Returns the first of our suites that the holder accepts; every client makes the same choice, so it reveals nothing.

        Raises:
            KeyConfigurationError: there is none.
        """
        for suite in SUITES:
            if suite in self.suites:
                return suite
        raise KeyConfigurationError("The key configuration offers no cipher that this program has.")


def choose_configuration(configurations: Iterable[KeyConfiguration]) -> KeyConfiguration:
    """Returns the configuration to seal to: the first of the best KEM; every client of this release makes the same choice.

    Raises:
        KeyConfigurationError: there is none with a supported KEM.
    """
    by_kem = {one.kem_id: one for one in reversed(tuple(configurations))}
    for kem in KEMS:
        if kem.kem_id in by_kem:
            return by_kem[kem.kem_id]
    raise KeyConfigurationError(f"The key configurations offer no key of {_NAMES}.")


def encode_keys(configurations: Iterable[KeyConfiguration]) -> bytes:
    """Returns a list as `application/ohttp-keys`: each configuration preceded by its length in two bytes."""
    encoded = [configuration.encode() for configuration in configurations]
    return b"".join(_LENGTH.pack(len(one)) + one for one in encoded)


def parse_keys(data: bytes) -> tuple[KeyConfiguration, ...]:
    """Reads `application/ohttp-keys`. Configurations of other KEMs are skipped, as are other suites of a known one.

    Raises:
        KeyConfigurationError: it is malformed, or has no supported key.
    """
    found, rest = [], data
    while rest:
        length, rest = _take_length(rest)
        if len(rest) < length:
            raise _malformed()
        configuration = _parse(rest[:length])
        rest = rest[length:]
        if configuration is not None:
            found.append(configuration)
    if not found:
        raise KeyConfigurationError(f"The key configurations offer no key of {_NAMES}.")
    return tuple(found)


def parse_configuration(data: bytes) -> KeyConfiguration:
    """Reads one configuration without a preceding length.

    Raises:
        KeyConfigurationError: it is malformed, or of another KEM.
    """
    configuration = _parse(data)
    if configuration is None:
        raise KeyConfigurationError(f"The key configuration is not one of {_NAMES}.")
    return configuration


def _parse(data: bytes) -> KeyConfiguration | None:
    if len(data) < _HEAD.size:
        raise _malformed()
    key_id, kem_id = _HEAD.unpack_from(data)
    kem = find_kem(kem_id)
    if kem is None:
        return None  # the length of its public key is unknown here
    end = _HEAD.size + kem.public_key_bytes
    public_key, rest = data[_HEAD.size : end], data[end:]
    length, suites = _take_length(rest)
    if len(public_key) != kem.public_key_bytes or length != len(suites) or length % _SUITE.size or not length:
        raise _malformed()
    known = tuple(suite for pair in _SUITE.iter_unpack(suites) if (suite := Suite(*pair)) in SUITES)
    return KeyConfiguration(key_id, public_key, known, kem_id) if known else None


def _take_length(data: bytes) -> tuple[int, bytes]:
    if len(data) < _LENGTH.size:
        raise _malformed()
    return _LENGTH.unpack_from(data)[0], data[_LENGTH.size :]


def _malformed() -> KeyConfigurationError:
    return KeyConfigurationError("The key configurations are malformed; fetch them again from their origin.")


NODE_KEY_LIFE_S: Final = 3600.0
NODE_KEY_OVERLAP_S: Final = 900.0
RECEIPT_GRACE_S: Final = 600.0
"""How much longer a receipt key lives than its key: a response may outlast the key of its request by as much."""
GATEWAY_KEY_LIFE_S: Final = 24 * 3600.0
GATEWAY_KEY_OVERLAP_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class SealingKey:
    """A private key.

    Attributes:
        configuration: its public part.
        created_s, expires_s: period in which it opens requests, on the ring's clock.
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
    """The keys of one receiver: a current one for each KEM, and for `overlap_s` the previous ones, which are then destroyed.

    A key lives for `life_s`: it is current for `life_s - overlap_s`, and for `overlap_s` it still opens requests of clients
    that do not have the next one yet.

    Args:
        now_s: time of a monotonic clock; all other times are of the same clock.
        kems: offered mechanisms, best first.
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
        """The newest key of the best KEM, used by clients that support it."""
        return self._generations[-1][0]

    @property
    def configurations(self) -> tuple[KeyConfiguration, ...]:
        """The newest key of each KEM, best first."""
        return tuple(key.configuration for key in self._generations[-1])

    @property
    def num_keys(self) -> int:
        """Number of current keys of each KEM."""
        return len(self._generations)

    @property
    def next_change_s(self) -> float:
        """When `rotate` is next due."""
        ends_s = [end_s for _, end_s in self._receipt_keys.values()]
        return min(self._generations[0][0].expires_s, self.current.expires_s - self.overlap_s, *ends_s)

    def rotate(self, now_s: float) -> bool:
        """Replaces the current keys when due and drops expired ones; returns whether it drew new ones."""
        is_due = now_s >= self.current.expires_s - self.overlap_s
        if is_due:
            last_id = self._generations[-1][-1].configuration.key_id
            self._generations.append(self._draw(last_id + 1, now_s))
        self._generations = [keys for keys in self._generations if now_s < keys[0].expires_s]
        self._receipt_keys = {key_id: kept for key_id, kept in self._receipt_keys.items() if now_s < kept[1]}
        return is_due

    def find(self, key_id: int, now_s: float) -> SealingKey | None:
        """Returns the key with this number, unless it has expired."""
        keys = (key for keys in self._generations for key in keys)
        return next((key for key in keys if key.configuration.key_id == key_id and now_s < key.expires_s), None)

    def publish(self) -> bytes:
        """Returns the current keys as `application/ohttp-keys`, best first; clients that do not support its KEM use another."""
        return encode_keys(self.configurations)

    def find_receipt_key(self, key_id: int, now_s: float) -> Ed25519PrivateKey | None:
        """Returns the receipt key for requests opened by the key with this number, unless it has expired too."""
        key, end_s = self._receipt_keys.get(key_id, (None, now_s))
        return key if now_s < end_s else None

    def publish_receipt_key(self) -> bytes:
        """Returns the public key that verifies receipts of requests sealed to the current key, Ed25519, 32 bytes."""
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
