"""Issuing tokens: the vectors of RFC 9578 for type 2, batches, the directory, quotas and the turning of keys."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from cloister.trust.tokens import BlindSignatureError, KeyShelf, MalformedTokenError, decode_directory, request_tokens
from cloister.trust.tokens.blind_rsa import (
    RsaPrivateKey,
    blind,
    blind_sign,
    decode_public,
    encode_public,
    finalize,
    generate,
    key_id,
)
from cloister.trust.tokens.challenge import Token, TokenChallenge
from cloister.trust.tokens.issuance import TokenRequest, decode_batch, encode_answers, evaluate
from cloister.trust.tokens.issuer import MOST_TIMES
from cloister.trust.tokens.issuer_keys import AHEAD_S, EPOCH_S, GRACE_S
from cloister.types.errors import AuthenticationError, ConfigError, InvalidRequestError, RateLimitError
from tests.token_service import CHALLENGE, START, TokenService

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "tokens" / "rfc9578-type2-issuance.json").read_text())


@pytest.fixture
def service(tmp_path: Path) -> Iterator[TokenService]:
    service = TokenService(tmp_path)
    yield service
    service.close()


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_issuance_has_the_bytes_of_rfc_9578(vector: dict[str, str]) -> None:
    fields = {name: bytes.fromhex(text) for name, text in vector.items()}
    loaded = load_pem_private_key(fields["skS"], None)
    assert isinstance(loaded, RSAPrivateKey)
    numbers = loaded.private_numbers()
    private = RsaPrivateKey(numbers.p, numbers.q)
    assert encode_public(private.public) == fields["pkS"]
    assert decode_public(fields["pkS"]) == private.public
    challenge = TokenChallenge.decode(fields["token_challenge"])
    token = Token(fields["nonce"], challenge.digest(), key_id(fields["pkS"]))
    factor = int.from_bytes(fields["blind"], "big")
    blinded, kept = blind(private.public, token.signed, salt=fields["salt"], factor=factor)
    request = TokenRequest(token.key_id[-1], blinded)
    assert request.encode() == fields["token_request"]
    assert TokenRequest.decode(fields["token_request"]) == request
    assert evaluate(private, request) == fields["token_response"]
    authenticator = finalize(private.public, fields["token_response"], kept)
    assert Token(token.nonce, token.challenge_digest, token.key_id, authenticator).encode() == fields["token"]


def test_a_batch_is_bought_with_an_api_key_and_taken(service: TokenService) -> None:
    tokens = service.buy(5)
    assert len({token.nonce for token in tokens}) == 5
    for token in tokens:
        assert decode_public(service.signing_key()).verify(token.signed, token.authenticator)


def test_a_batch_goes_over_the_wire_and_back(service: TokenService) -> None:
    pending = request_tokens(service.signing_key(), CHALLENGE, 3)
    requests = decode_batch(pending.encode())
    assert requests == list(pending.requests)
    answer = encode_answers(service.issuer.issue(service.api_key, requests))
    assert len(pending.finish(answer)) == 3
    for broken in (b"", answer[:-1], answer[1:], answer + b"\0"):
        with pytest.raises(MalformedTokenError):
            pending.finish(broken)
    swapped = encode_answers([answer[5:261], answer[264:520], answer[5:261]])
    with pytest.raises((BlindSignatureError, MalformedTokenError)):
        pending.finish(swapped)


def test_an_issuer_that_signs_with_a_key_of_its_own_for_one_client_is_found_out(service: TokenService) -> None:
    """Such a key would mark the tokens of that client (key consistency, RFC 9576)."""
    pending = request_tokens(service.signing_key(), CHALLENGE, 2)
    marked = generate()
    answer = encode_answers([blind_sign(marked, bytes([0]) + request.blinded[1:]) for request in pending.requests])
    with pytest.raises(BlindSignatureError):
        pending.finish(answer)


def test_broken_batches_are_refused(service: TokenService) -> None:
    body = request_tokens(service.signing_key(), CHALLENGE, 2).encode()
    for broken in (b"", b"\0", body[:-1], body + b"\0", body[2:], bytes([body[0], body[1], 0, 1]) + body[4:]):
        with pytest.raises(MalformedTokenError):
            decode_batch(broken)


def test_who_has_no_key_gets_nothing(service: TokenService) -> None:
    requests = list(request_tokens(service.signing_key(), CHALLENGE, 1).requests)
    for key in (None, "", "clo-wrong"):
        with pytest.raises(AuthenticationError):
            service.issuer.issue(key, requests)
    service.credentials = service.credentials.remove("ann")
    with pytest.raises(AuthenticationError):
        service.issuer.issue(service.api_key, requests)


def test_a_key_gets_its_quota_in_an_epoch_and_no_more(tmp_path: Path) -> None:
    service = TokenService(tmp_path, tokens_per_epoch=10)
    service.credentials, other = service.credentials.add("bob")
    service.buy(8)
    with pytest.raises(RateLimitError) as caught:
        service.buy(3)
    assert caught.value.retry_after_s == EPOCH_S - 3600
    service.buy(2)  # what was refused was not counted
    service.buy(10, api_key=other)
    with pytest.raises(RateLimitError):
        service.buy(1)
    service.close()
    again = TokenService(tmp_path, tokens_per_epoch=10)  # a restart forgets no quota
    again.credentials = service.credentials
    with pytest.raises(RateLimitError):
        again.buy(1, api_key=service.api_key)
    again.clock.now = service.clock.now + EPOCH_S
    again.buy(10, api_key=service.api_key)
    again.close()


def test_a_batch_that_comes_again_brings_the_same_tokens_costs_nothing_and_is_not_signed_for_ever(tmp_path: Path) -> None:
    service = TokenService(tmp_path, tokens_per_epoch=5)
    service.credentials, other = service.credentials.add("bob")
    requests = list(request_tokens(service.signing_key(), CHALLENGE, 3).requests)
    first = service.issuer.issue(service.api_key, requests)
    assert [service.issuer.issue(service.api_key, requests) for _ in range(MOST_TIMES - 1)] == [first] * (MOST_TIMES - 1)
    with pytest.raises(RateLimitError, match="draw another batch"):
        service.issuer.issue(service.api_key, requests)
    service.buy(2)
    with pytest.raises(RateLimitError):
        service.buy(1)  # the first batch was counted once, and once it was
    service.issuer.issue(other, requests)
    with pytest.raises(RateLimitError):
        service.buy(3, api_key=other)  # a copy of another's batch is another batch
    service.clock.now += EPOCH_S
    service.issuer.current_keys()
    assert service.book._database.execute("SELECT count(*) FROM batches").fetchone() == (0,)
    service.close()


def test_a_request_larger_than_the_quota_takes_nothing(tmp_path: Path) -> None:
    service = TokenService(tmp_path, tokens_per_epoch=2)
    with pytest.raises(RateLimitError):
        service.buy(3)
    service.buy(2)
    service.close()


def test_a_request_for_another_key_is_refused_before_it_counts(tmp_path: Path) -> None:
    service = TokenService(tmp_path, tokens_per_epoch=1)
    (request,) = request_tokens(service.signing_key(), CHALLENGE, 1).requests
    for wrong in (
        TokenRequest(request.truncated_key_id ^ 1, request.blinded),
        TokenRequest(request.truncated_key_id, b"\xff" * 256),
    ):
        with pytest.raises(InvalidRequestError):
            service.issuer.issue(service.api_key, [wrong])
    service.buy(1)
    service.close()


def test_keys_turn_every_seven_days_and_the_old_secret_is_gone(service: TokenService, tmp_path: Path) -> None:
    (first,) = service.issuer.current_keys()
    assert first.private is not None
    secret = hex(first.private.p)
    service.clock.now = START + EPOCH_S - 2 * 3600 - 80000  # in the last day
    old, coming = service.issuer.current_keys()
    assert old.encoded == first.encoded
    assert old.private is not None
    assert coming.issues_from == old.issues_until
    assert service.signing_key() == first.encoded
    service.clock.now = old.issues_until
    old, current = service.issuer.current_keys()
    assert (old.private, current.encoded) == (None, coming.encoded)
    assert service.signing_key() == coming.encoded
    files = "".join(path.read_text() for path in (tmp_path / "keys").iterdir())
    assert secret not in files
    service.clock.now = old.issues_until + GRACE_S
    assert [key.epoch for key in service.issuer.current_keys()] == [current.epoch]


def test_keys_survive_a_restart_and_keep_their_budget(service: TokenService, tmp_path: Path) -> None:
    (before,) = service.issuer.current_keys()
    (after,) = KeyShelf(tmp_path / "keys", budget=9).turn(START)
    assert (after.encoded, after.budget) == (before.encoded, 512)


def test_key_files_are_closed_to_others_and_a_broken_one_is_named(service: TokenService, tmp_path: Path) -> None:
    (key,) = service.issuer.current_keys()
    path = tmp_path / "keys" / f"{key.epoch}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text(path.read_text().replace("0x", "0x1", 1))
    with pytest.raises(ConfigError, match=r"broken; restore it\. Remove it only if its week has ended"):
        KeyShelf(tmp_path / "keys", budget=1).turn(START)


WEEK = int(START) // EPOCH_S
LAST_DAY = (WEEK + 1) * EPOCH_S - AHEAD_S


def test_an_older_copy_of_the_directory_makes_no_second_key_for_a_week(tmp_path: Path) -> None:
    """Two keys for one week have all clients wait until both have ended."""
    shelf = KeyShelf(tmp_path / "keys", budget=1)
    assert not shelf.check_current(START)  # a new issuer
    shelf.turn(START)
    shelf.check_current(START)
    old = KeyShelf(shutil.copytree(tmp_path / "keys", tmp_path / "old"), budget=1)
    old.check_current(LAST_DAY - 1)
    shelf.turn(LAST_DAY + 3600)
    shelf.check_current(START + EPOCH_S)
    for now, missing, newest in (
        (LAST_DAY, f"{WEEK + 1}", WEEK + 1),
        (START + EPOCH_S, f"{WEEK + 1}", WEEK + 1),
        (LAST_DAY + EPOCH_S, f"{WEEK + 1} and {WEEK + 2}", WEEK + 2),
        (START + 5 * EPOCH_S, f"{WEEK + 5}", WEEK + 5),
    ):
        for accepted in (None, newest - 1, newest + 1):
            words = rf"no key of week {missing}, shown from .*--accept-keys {newest} makes"
            with pytest.raises(ConfigError, match=words) as refused:
                old.check_current(now, accepted)
            assert refused.value.param == "accept_keys"
        assert old.check_current(now, newest)
        assert not shelf.check_current(START + EPOCH_S, newest)  # nothing is missing there


def test_a_copy_with_two_keys_is_too_old_when_the_third_is_shown(tmp_path: Path) -> None:
    """A weekly copy has the next week's key, and is a week old when it is needed."""
    shelf = KeyShelf(tmp_path / "keys", budget=1)
    assert [key.epoch for key in shelf.turn(LAST_DAY)] == [WEEK, WEEK + 1]
    copy = KeyShelf(shutil.copytree(tmp_path / "keys", tmp_path / "copy"), budget=1)
    shelf.turn(LAST_DAY + EPOCH_S)
    copy.check_current(LAST_DAY + EPOCH_S - 1)
    with pytest.raises(ConfigError, match=f"no key of week {WEEK + 2}"):
        copy.check_current(LAST_DAY + EPOCH_S)


def test_a_key_is_on_disk_for_a_day_before_it_is_shown(tmp_path: Path) -> None:
    """An issuer that is restarted, or asked for its keys, at the moment at which the next one is shown has it."""
    shelf = KeyShelf(tmp_path / "keys", budget=1)
    assert [key.epoch for key in shelf.turn(LAST_DAY - AHEAD_S - 1)] == [WEEK]
    assert [path.stem for path in (tmp_path / "keys").iterdir()] == [f"{WEEK}"]
    assert [key.epoch for key in shelf.turn(LAST_DAY - AHEAD_S)] == [WEEK]
    made = (tmp_path / "keys" / f"{WEEK + 1}.json").read_bytes()
    assert [key.epoch for key in shelf.turn(LAST_DAY - 1)] == [WEEK]
    assert not KeyShelf(tmp_path / "keys", budget=1).check_current(LAST_DAY)
    assert [key.epoch for key in shelf.turn(LAST_DAY)] == [WEEK, WEEK + 1]
    assert (tmp_path / "keys" / f"{WEEK + 1}.json").read_bytes() == made


def test_an_issuer_that_stood_still_keeps_the_key_whose_tokens_are_still_accepted(tmp_path: Path) -> None:
    shelf = KeyShelf(tmp_path / "keys", budget=1)
    (sold,) = shelf.turn(START)
    now = (WEEK + 1) * EPOCH_S + 3600
    assert shelf.check_current(now, WEEK + 1)
    kept, current = shelf.turn(now)
    assert (kept.key_id, kept.private, current.epoch) == (sold.key_id, None, WEEK + 1)
    assert not shelf.check_current(now)


def test_two_issuers_of_one_directory_make_one_key(tmp_path: Path) -> None:
    shelves = [KeyShelf(tmp_path / "keys", budget=1) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda shelf: shelf.turn(START)[0].encoded, shelves))
    assert len(set(made)) == 1


def test_the_directory_names_the_signing_key_first(service: TokenService) -> None:
    service.issuer.current_keys()
    for now in (START, START + EPOCH_S - 7200, START + EPOCH_S):
        service.clock.now = now
        uri, keys = decode_directory(service.issuer.directory("https://issuer.example/token-request"))
        assert uri == "https://issuer.example/token-request"
        assert next(key for key in keys if key.not_before <= now).encoded_key == service.signing_key()
        assert {(k.encoded_key, k.taken_until, k.budget) for k in keys} == {
            (k.encoded, k.until, k.budget) for k in service.accepted()
        }


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b'{"issuer-request-uri":"x","token-keys":[{"token-type":2,"token-key":"?"}]}']
)
def test_what_is_no_directory_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedTokenError):
        decode_directory(data)


def test_a_token_key_has_one_spelling_only() -> None:
    encoded = bytes.fromhex(VECTORS[0]["pkS"])
    plain = encoded.replace(bytes.fromhex("06092a864886f70d01010a3030"), b"")
    for broken in (b"", encoded[:-1], encoded + b"\0", plain, encoded.replace(b"\x02\x01\x30", b"\x02\x01\x20")):
        with pytest.raises(ValueError, match="token key"):
            decode_public(broken)
