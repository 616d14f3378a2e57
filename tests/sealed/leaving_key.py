"""A program that holds one private key as a sealer does: it reads the key from stdin, opens a request, then destroys the key.

It says "held", waits for a byte, destroys, says "destroyed", and waits to be killed.
"""

from __future__ import annotations

import os
import time

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from cloister.privacy.sealing import (
    CHUNKED,
    SUITES,
    Header,
    KeyConfiguration,
    KeyRing,
    Receiver,
    ReplayCache,
    SealingKey,
    seal_chunked_request,
)
from cloister.privacy.sealing.ohttp import HEADER_BYTES

LIFE_S = 100.0


def read_key() -> X25519PrivateKey:
    """Reads 32 bytes into memory that is overwritten at once."""
    data = bytearray(32)
    os.readv(0, [data])
    key = X25519PrivateKey.from_private_bytes(data)
    data[:] = bytes(32)
    return key


def main() -> None:
    ring = KeyRing(0.0, life_s=LIFE_S, overlap_s=10.0)
    key = read_key()
    configuration = KeyConfiguration(1, key.public_key().public_bytes_raw(), SUITES)
    ring._keys = [SealingKey(configuration, key, 0.0, LIFE_S)]
    del key
    receiver = Receiver(ring, ReplayCache(LIFE_S))
    sealed, _ = seal_chunked_request(configuration, b"secret")
    exchange = receiver.begin(Header.parse(sealed[:HEADER_BYTES]), CHUNKED, 1.0)
    assert exchange.context.secrets.key
    os.write(1, b"held\n")
    os.read(0, 1)
    ring.rotate(LIFE_S + 1)
    os.write(1, b"destroyed\n")
    time.sleep(600)


if __name__ == "__main__":
    main()
