"""Key configurations of OHTTP and the media type `application/ohttp-keys` (RFC 9458, section 3). Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cloister.privacy.sealing.errors import KeyConfigurationError
from cloister.privacy.sealing.hpke import SUITES, Suite
from cloister.privacy.sealing.kem import X25519, Kem
from cloister.privacy.sealing.kems import KEMS, find_kem

KEYS_MEDIA_TYPE: Final = "application/ohttp-keys"
_HEAD: Final = struct.Struct(">BH")
_LENGTH: Final = struct.Struct(">H")
_SUITE: Final = struct.Struct(">HH")
_NAMES: Final = " or ".join(kem.name for kem in KEMS)


@dataclass(frozen=True, slots=True)
class KeyConfiguration:
    """A public key and what it is used with.

    Attributes:
        key_id: number from 0 to 255 by which a request names it.
        public_key: of the KEM, in its length.
        suites: that its holder takes, best first; at least one.
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
            KeyConfigurationError: this program does not have it.
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
        """Returns the first of our suites that the holder takes; every client chooses alike, so the choice tells nothing.

        Raises:
            KeyConfigurationError: there is none.
        """
        for suite in SUITES:
            if suite in self.suites:
                return suite
        raise KeyConfigurationError("The key configuration offers no cipher that this program has.")


def choose_configuration(configurations: Iterable[KeyConfiguration]) -> KeyConfiguration:
    """Returns the configuration to seal to: the first of the best KEM; every client of this release chooses alike.

    Raises:
        KeyConfigurationError: there is none of a KEM that this program has.
    """
    by_kem = {one.kem_id: one for one in reversed(tuple(configurations))}
    for kem in KEMS:
        if kem.kem_id in by_kem:
            return by_kem[kem.kem_id]
    raise KeyConfigurationError(f"The key configurations offer no key of {_NAMES}.")


def encode_keys(configurations: Iterable[KeyConfiguration]) -> bytes:
    """Returns a list as `application/ohttp-keys`: each configuration behind its length in two bytes."""
    encoded = [configuration.encode() for configuration in configurations]
    return b"".join(_LENGTH.pack(len(one)) + one for one in encoded)


def parse_keys(data: bytes) -> tuple[KeyConfiguration, ...]:
    """Reads `application/ohttp-keys`. Configurations of other KEMs are passed over, as are other suites of a known one.

    Raises:
        KeyConfigurationError: it is malformed, or holds nothing that this program can seal to.
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
    """Reads one configuration without a length before it.

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
        return None  # how long its public key is, is not known here
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
