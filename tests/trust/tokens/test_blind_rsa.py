"""RSA blind signatures: the vectors of RFC 9474, what a fault may not give away, and what a signer cannot know."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import gmpy2
import pytest

from cloister.trust.tokens import blind_rsa
from cloister.trust.tokens.blind_rsa import (
    BlindSignatureError,
    RsaPrivateKey,
    RsaPublicKey,
    blind,
    blind_sign,
    encode,
    finalize,
)

VECTORS = Path(__file__).parents[2] / "vectors" / "tokens" / "rfc9474.json"
KEY = blind_rsa.generate()


def vector_key(vector: dict[str, str]) -> RsaPrivateKey:
    return RsaPrivateKey(int(vector["p"], 16), int(vector["q"], 16), int(vector["e"], 16))


@pytest.mark.parametrize("vector", json.loads(VECTORS.read_text()), ids=lambda v: v["name"])
def test_every_step_gives_the_bytes_of_rfc_9474(vector: dict[str, Any]) -> None:
    key, salt = vector_key(vector), bytes.fromhex(vector["salt"])
    n = key.public.n
    assert n == int(vector["n"], 16)
    factor = int(gmpy2.invert(int(vector["inv"], 16), n))
    blinded, kept = blind(key.public, bytes.fromhex(vector["input_msg"]), salt=salt, factor=factor)
    assert blinded.hex() == vector["blinded_msg"]
    assert blind_sign(key, blinded).hex() == vector["blind_sig"]
    signature = finalize(key.public, bytes.fromhex(vector["blind_sig"]), kept, salt_bytes=len(salt))
    assert signature.hex() == vector["sig"]
    if "encoded_msg" in vector:
        assert encode(bytes.fromhex(vector["input_msg"]), n.bit_length() - 1, salt).hex() == vector["encoded_msg"]


def test_a_signature_verifies_and_changed_ones_do_not() -> None:
    blinded, kept = blind(KEY.public, b"message")
    signature = finalize(KEY.public, blind_sign(KEY, blinded), kept)
    assert KEY.public.verify(b"message", signature)
    assert not KEY.public.verify(b"massage", signature)
    assert not KEY.public.verify(b"message", signature[:-1])
    assert not KEY.public.verify(b"message", signature[:-1] + bytes([signature[-1] ^ 1]))
    assert not KEY.public.verify(b"message", b"\0" + signature)
    assert not blind_rsa.generate().public.verify(b"message", signature)


def test_a_signer_that_signs_something_else_is_found_out() -> None:
    _, kept = blind(KEY.public, b"message")
    other, _ = blind(KEY.public, b"message")
    with pytest.raises(BlindSignatureError):
        finalize(KEY.public, blind_sign(KEY, other), kept)
    with pytest.raises(BlindSignatureError):
        finalize(KEY.public, bytes(255), kept)


@pytest.mark.parametrize("blinded", [bytes(255), bytes(257), KEY.public.n.to_bytes(256, "big"), b"\xff" * 256])
def test_what_does_not_lie_below_the_modulus_is_not_signed(blinded: bytes) -> None:
    with pytest.raises(BlindSignatureError):
        blind_sign(KEY, blinded)


def test_a_faulty_half_of_the_computation_never_leaves_the_signer(monkeypatch: pytest.MonkeyPatch) -> None:
    blinded, _ = blind(KEY.public, b"message")
    n, message = KEY.public.n, int.from_bytes(blinded, "big")
    right = blind_sign(KEY, blinded)
    whole = blind_rsa._power

    def power(private: RsaPrivateKey, base: int) -> int:
        """The half of q computed wrong, as a flipped bit would."""
        good = whole(private, base)
        wrong_in_q = (good + 1) % private.q
        return (
            int(
                (good % private.p) * private.q * gmpy2.invert(private.q, private.p)
                + wrong_in_q * private.p * gmpy2.invert(private.p, private.q)
            )
            % n
        )

    damaged = power(KEY, message)
    assert damaged != int.from_bytes(right, "big")
    assert gmpy2.gcd(pow(damaged, KEY.e, n) - message, n) == KEY.p  # what a leak of it would have cost (Boneh et al. 1997)
    monkeypatch.setattr(blind_rsa, "_power", power)
    with pytest.raises(BlindSignatureError, match="kept back"):
        blind_sign(KEY, blinded)


def test_the_secret_exponent_meets_a_base_that_nobody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    bases: list[int] = []
    whole = blind_rsa._power

    def power(private: RsaPrivateKey, base: int) -> int:
        bases.append(base)
        return whole(private, base)

    monkeypatch.setattr(blind_rsa, "_power", power)
    blinded, _ = blind(KEY.public, b"message")
    assert blind_sign(KEY, blinded) == blind_sign(KEY, blinded)
    assert len({int.from_bytes(blinded, "big"), *bases}) == 3


def test_any_signature_given_out_fits_any_signed_message_by_some_factor() -> None:
    """Unlinkability, exactly: the issuer's view (blinded, blind signature) and a token (message, signature) always belong
    together under one blinding factor, whichever two are taken. So the view has no information on which they were."""
    n, e = KEY.public.n, KEY.e
    secret = int(gmpy2.invert(e, (KEY.p - 1) * (KEY.q - 1)))
    views, tokens = [], []
    for i in range(6):
        blinded, kept = blind(KEY.public, b"token %d" % i)
        signed = blind_sign(KEY, blinded)
        views.append((int.from_bytes(blinded, "big"), int.from_bytes(signed, "big")))
        tokens.append(int.from_bytes(finalize(KEY.public, signed, kept), "big"))
    factors = set()
    for blinded_number, signed_number in views:
        for signature in tokens:
            encoded = pow(signature, e, n)
            factor = pow(blinded_number * int(gmpy2.invert(encoded, n)), secret, n)
            assert encoded * pow(factor, e, n) % n == blinded_number
            assert signature * factor % n == signed_number
            factors.add(factor)
    assert len(factors) == 36


def test_blinded_messages_of_one_message_are_spread_evenly() -> None:
    small = RsaPublicKey(blind_rsa.generate(1024).public.n)  # 1,024 bits: the same arithmetic in a fifth of the time
    drawn = [int.from_bytes(blind(small, b"always the same", salt=bytes(48))[0], "big") for _ in range(1600)]
    cells = Counter(16 * value // small.n for value in drawn)
    assert len(set(drawn)) == 1600
    assert (
        sum((cells[i] - 100) ** 2 / 100 for i in range(16)) < 75
    )  # chi-square, 15 degrees: p = 5e-10, as the draws have no seed


def test_no_secret_shows_in_text() -> None:
    _, kept = blind(KEY.public, b"a message of a client")
    shown = repr(KEY) + repr(kept)
    assert str(KEY.p) not in shown
    assert "client" not in shown
    assert str(kept.inverse) not in shown
