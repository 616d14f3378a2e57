"""The mechanisms that this program has, in order of preference: post-quantum first, where OpenSSL has ML-KEM."""

from __future__ import annotations

from typing import Final

from cloister.privacy.sealing.kem import X25519, Kem
from cloister.privacy.sealing.xwing import XWING, is_supported

KEMS: Final[tuple[Kem, ...]] = (XWING, X25519) if is_supported() else (X25519,)
"""What is offered, and taken from others, in order of preference. Every client chooses alike."""
_BY_ID: Final = {kem.kem_id: kem for kem in KEMS}


def find_kem(kem_id: int) -> Kem | None:
    """Returns the mechanism of that number; None if this program does not have it."""
    return _BY_ID.get(kem_id)
