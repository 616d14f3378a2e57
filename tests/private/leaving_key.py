"""A program that holds one private key of X-Wing as a key service does: it reads it from stdin, opens a request, then destroys
it.

It says "held", waits for a byte, destroys, says "destroyed", and waits to be killed.
"""

from __future__ import annotations

import os
import time

from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from cloister.trust.sealing import (
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
from cloister.trust.sealing.kem import XWingKey

LIFE_S = 100.0


def read_key() -> XWingKey:
    """Reads the seed of ML-KEM (64 bytes) and the key of X25519 into memory that is overwritten at once."""
    data = bytearray(96)
    os.readv(0, [data])
    with memoryview(data) as halves:
        key = XWingKey(MLKEM768PrivateKey.from_seed_bytes(halves[:64]), X25519PrivateKey.from_private_bytes(halves[64:]))
    data[:] = bytes(96)
    return key


def main() -> None:
    ring = KeyRing(0.0, life_s=LIFE_S, overlap_s=10.0)
    key = read_key()
    configuration = KeyConfiguration(1, key.public_bytes(), SUITES, key.kem_id)
    ring._generations = [(SealingKey(configuration, key, 0.0, LIFE_S),)]
    del key
    receiver = Receiver(ring, ReplayCache(LIFE_S))
    sealed, _ = seal_chunked_request(configuration, b"secret")
    exchange = receiver.begin(Header.parse(sealed), CHUNKED, 1.0)
    assert exchange.context.secrets.key
    os.write(1, b"held\n")
    os.read(0, 1)
    ring.rotate(LIFE_S + 1)
    os.write(1, b"destroyed\n")
    time.sleep(600)


if __name__ == "__main__":
    main()
