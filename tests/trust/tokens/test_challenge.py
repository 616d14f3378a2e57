"""Challenges, tokens and their headers: the structures of RFC 9577."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.trust.tokens.challenge import (
    MalformedTokenError,
    Token,
    TokenChallenge,
    authenticate,
    authorization,
    read_authenticate,
    read_authorization,
)

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "tokens" / "rfc9577-token-structures.json").read_text())
TOKEN = Token(b"n" * 32, b"d" * 32, b"k" * 32, b"a" * 256)


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_structures_have_the_bytes_of_rfc_9577(vector: dict[str, str]) -> None:
    fields = {name: bytes.fromhex(text) for name, text in vector.items() if name != "comment"}
    origins = tuple(fields["origin_info"].decode().split(",")) if fields["origin_info"] else ()
    challenge = TokenChallenge(fields["issuer_name"].decode(), origins, fields["redemption_context"])
    token = Token(fields["nonce"], challenge.digest(), fields["token_key_id"])
    assert token.signed == fields["token_authenticator_input"]
    assert TokenChallenge.decode(challenge.encode()) == challenge


def test_a_token_goes_through_its_header_and_back() -> None:
    assert read_authorization(authorization(TOKEN)) == TOKEN
    assert len(TOKEN.encode()) == 354


@pytest.mark.parametrize("spelling", ["PrivateToken token={}", 'privatetoken  token="{}"', 'PrivateToken token="{}" '])
def test_quotes_case_and_space_are_free_as_in_rfc_9110(spelling: str) -> None:
    text = authorization(TOKEN).split('"')[1]
    assert read_authorization(spelling.format(text)) == TOKEN
    assert read_authorization(spelling.format(text.rstrip("="))) == TOKEN


@pytest.mark.parametrize(
    "value",
    [
        "",
        "PrivateToken",
        "Bearer abc",
        'PrivateToken token=""',
        'PrivateToken token="????"',
        'PrivateToken token="AAAA"',
        "PrivateToken token=A",
    ],
)
def test_what_is_no_token_is_refused_without_being_repeated(value: str) -> None:
    with pytest.raises(MalformedTokenError) as caught:
        read_authorization(value)
    assert "AAAA" not in str(caught.value)


@given(st.integers(0, 353))
def test_a_token_cut_short_or_of_another_type_is_none(length: int) -> None:
    with pytest.raises(MalformedTokenError):
        Token.decode(TOKEN.encode()[:length])
    with pytest.raises(MalformedTokenError):
        Token.decode(b"\0\1" + TOKEN.encode()[2:])


@given(st.binary(max_size=80))
def test_any_bytes_are_a_challenge_or_an_error_that_is_meant(data: bytes) -> None:
    try:
        challenge = TokenChallenge.decode(data)
    except MalformedTokenError:
        return
    assert challenge.encode() == data


def test_several_challenges_in_one_header_are_all_read() -> None:
    first, second = TokenChallenge("a.example", ("g.example",)), TokenChallenge("b.example")
    header = authenticate(first, b"key one", max_age_s=10) + ", " + authenticate(second, b"key two")
    assert read_authenticate(header) == [(first, b"key one"), (second, b"key two")]
    assert first.digest() == hashlib.sha256(first.encode()).digest()


def test_a_challenge_of_another_type_is_left_out() -> None:
    other = TokenChallenge("a.example", token_type=1)
    assert read_authenticate(authenticate(other, b"key")) == []
    assert read_authenticate('Bearer realm="x"') == []
