"""The official vectors of RFC 9180 and the examples of both forms of OHTTP, byte for byte; and another implementation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM
from cryptography.hazmat.primitives.hpke import Suite as OtherSuite
from pyhpke import AEADId, CipherSuite, KDFId, KEMId, KEMKey, KEMKeyPair

from cloister.trust.sealing import (
    CHUNKED,
    SUITES,
    WHOLE,
    Form,
    Header,
    KeyConfiguration,
    OhttpContext,
    RequestSealer,
    ResponseOpener,
    ResponseSealer,
    Suite,
    encode_keys,
    open_response,
    parse_configuration,
    parse_keys,
    seal_request,
    seal_response,
)
from cloister.trust.sealing.hpke import set_up_receiver, set_up_sender
from cloister.trust.sealing.kem import X25519, X25519Key
from cloister.trust.sealing.ohttp import ChunkOpener

VECTORS = Path(__file__).parents[2] / "vectors"
HPKE = json.loads((VECTORS / "hpke/rfc9180-x25519.json").read_text())
WHOLE_EXAMPLE = json.loads((VECTORS / "ohttp/rfc9458-appendix-a.json").read_text())
CHUNKED_EXAMPLE = json.loads((VECTORS / "ohttp/chunked-draft-example.json").read_text())
OTHER_SUITES = {1: AEAD.AES_128_GCM, 2: AEAD.AES_256_GCM, 3: AEAD.CHACHA20_POLY1305}


def name_of(vector: dict[str, str]) -> str:
    return f"mode{vector['mode']}-kdf{vector['kdf_id']}-aead{vector['aead_id']}"


def private(vector: dict[str, str], name: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(vector[name]))


def exchange_of(example: dict[str, str], form: Form) -> tuple[OhttpContext, bytes]:
    """The gateway's side of an example, and the sealed request behind the header."""
    sealed = bytes.fromhex(example["encapsulated_request"])
    header = Header.parse(sealed)
    key = X25519PrivateKey.from_private_bytes(bytes.fromhex(example["gateway_sk"]))
    context = set_up_receiver(header.enc, X25519Key(key), header.suite, header.info(form))
    return OhttpContext(form, header, context), sealed[len(header.encode()) :]


def example_key(example: dict[str, str]) -> KeyConfiguration:
    return parse_configuration(bytes.fromhex(example["key_config"]))


# Of the 64 vectors those for P-256, P-521 and X448 are left out: keys here are X25519. Base mode, which is all that OHTTP
# uses, runs through this package; the other modes and the suite without a cipher run through the library below.
@pytest.mark.parametrize("vector", [v for v in HPKE if v["mode"] in ("0", 0) and v["encryptions"]], ids=name_of)
def test_base_mode_vectors_of_rfc_9180_hold_in_both_directions(vector: dict) -> None:
    suite = Suite(int(vector["kdf_id"]), int(vector["aead_id"]))
    info = bytes.fromhex(vector["info"])
    enc, sender = set_up_sender(X25519, bytes.fromhex(vector["pkRm"]), suite, info, bytes.fromhex(vector["skEm"]))
    receiver = set_up_receiver(enc, X25519Key(private(vector, "skRm")), suite, info)
    assert enc == bytes.fromhex(vector["enc"])
    assert sender.secrets == receiver.secrets
    assert sender.secrets.key == bytes.fromhex(vector["key"])
    by_place = {int(one["seq"]): one for one in vector["encryptions"]}
    plaintext = bytes.fromhex(vector["encryptions"][0]["pt"])
    for place in range(max(by_place) + 1):
        sealed = sender.seal(plaintext, f"Count-{place}".encode())
        if place in by_place:
            assert sealed == bytes.fromhex(by_place[place]["ct"])
        assert receiver.open(sealed, f"Count-{place}".encode()) == plaintext
    for export in vector["exports"]:
        label, length = bytes.fromhex(export["exporter_context"]), int(export["L"])
        assert receiver.export(label, length) == sender.export(label, length) == bytes.fromhex(export["exported_value"])


def test_every_suite_that_is_offered_has_a_vector() -> None:
    assert {(suite.kdf_id, suite.aead_id) for suite in SUITES} <= {(int(v["kdf_id"]), int(v["aead_id"])) for v in HPKE}


@pytest.mark.parametrize("vector", HPKE, ids=name_of)
def test_the_library_derives_what_rfc_9180_says_in_every_mode(vector: dict) -> None:
    suite = CipherSuite.new(KEMId(32), KDFId(int(vector["kdf_id"])), AEADId(int(vector["aead_id"])))
    to_key = KEMKey.from_pyca_cryptography_key
    psk = {name: bytes.fromhex(vector[name]) for name in ("psk", "psk_id") if vector.get(name)}
    mode, info = int(vector["mode"]), bytes.fromhex(vector["info"])
    sender_key = private(vector, "skSm") if mode >= 2 else None
    public = to_key(sender_key.public_key()) if sender_key else None
    context = suite.create_recipient_context(
        bytes.fromhex(vector["enc"]), to_key(private(vector, "skRm")), info, pks=public, **psk
    )
    ephemeral = private(vector, "skEm")
    enc, sending = suite.create_sender_context(
        to_key(private(vector, "skRm").public_key()),
        info,
        sks=to_key(sender_key) if sender_key else None,
        eks=KEMKeyPair(to_key(ephemeral), to_key(ephemeral.public_key())),
        **psk,
    )
    assert enc == bytes.fromhex(vector["enc"])
    for export in vector["exports"]:
        for side in (context, sending):
            assert side.export(bytes.fromhex(export["exporter_context"]), int(export["L"])).hex() == export["exported_value"]
    for one in vector["encryptions"][:3]:
        assert sending.seal(bytes.fromhex(one["pt"]), bytes.fromhex(one["aad"])).hex() == one["ct"] or int(one["seq"]) > 2
        if int(one["seq"]) <= 2:
            assert context.open(bytes.fromhex(one["ct"]), bytes.fromhex(one["aad"])).hex() == one["pt"]


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: f"aead{suite.aead_id}")
def test_another_implementation_opens_what_is_sealed_here_and_the_other_way_round(suite: Suite) -> None:
    key, info = X25519PrivateKey.generate(), b"a label"
    other = OtherSuite(KEM.X25519, KDF.HKDF_SHA256, OTHER_SUITES[suite.aead_id])
    enc, context = set_up_sender(X25519, key.public_key().public_bytes_raw(), suite, info)
    assert other.decrypt(enc + context.seal(b"from here"), key, info) == b"from here"
    sealed = other.encrypt(b"from there", key.public_key(), info)
    assert set_up_receiver(sealed[:32], X25519Key(key), suite, info).open(sealed[32:]) == b"from there"


def test_another_implementation_opens_a_sealed_request() -> None:
    key = X25519PrivateKey.generate()
    configuration = KeyConfiguration(7, key.public_key().public_bytes_raw())
    sealed, exchange = seal_request(configuration, b"a binary HTTP request")
    other = OtherSuite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_128_GCM)
    assert other.decrypt(sealed[7:], key, exchange.header.info(WHOLE)) == b"a binary HTTP request"


def test_the_example_of_rfc_9458_is_made_byte_for_byte() -> None:
    example = WHOLE_EXAMPLE
    sealed, exchange = seal_request(
        example_key(example), bytes.fromhex(example["request_bhttp"]), ephemeral=bytes.fromhex(example["client_eph_sk"])
    )
    assert sealed.hex() == example["encapsulated_request"]
    assert exchange.header.info(WHOLE).hex() == example["info"]
    gateway, rest = exchange_of(example, WHOLE)
    assert gateway.context.open(rest).hex() == example["request_bhttp"]
    response = bytes.fromhex(example["encapsulated_response"])
    assert seal_response(gateway, bytes.fromhex(example["response_bhttp"]), nonce=response[:16]) == response
    assert open_response(exchange, response).hex() == example["response_bhttp"]


def test_the_example_of_the_chunked_draft_is_made_byte_for_byte() -> None:
    example = CHUNKED_EXAMPLE
    message = bytes.fromhex(example["request_bhttp"])
    sealer = RequestSealer(example_key(example), ephemeral=bytes.fromhex(example["client_eph_sk"]))
    pieces = [sealer.seal(message[:12]), sealer.seal(message[12:]), sealer.finish()]
    lines = example["encapsulated_request_lines"]
    assert [piece.hex() for piece in pieces] == [lines[0] + lines[1] + lines[2], lines[3], lines[4]]
    gateway, rest = exchange_of(example, CHUNKED)
    opener = ChunkOpener(gateway.context)
    assert opener.feed(rest) == [message[:12], message[12:]]
    assert opener.close() == b""
    answer, response = bytes.fromhex(example["response_bhttp"]), example["encapsulated_response_lines"]
    answering = ResponseSealer(gateway, nonce=bytes.fromhex(response[0]))
    pieces = [answering.seal(answer[:1]), answering.seal(answer[1:]), answering.finish()]
    assert [piece.hex() for piece in pieces] == [response[0] + response[1], response[2], response[3]]
    client = ResponseOpener(sealer.exchange)
    assert client.feed(bytes.fromhex(example["encapsulated_response"])) == [answer[:1], answer[1:]]
    assert client.close() == b""


@pytest.mark.parametrize("example", [WHOLE_EXAMPLE, CHUNKED_EXAMPLE], ids=["whole", "chunked"])
def test_the_key_configuration_of_an_example_is_read_and_written(example: dict[str, str]) -> None:
    configuration = example_key(example)
    assert configuration.key_id == 1
    assert X25519PublicKey.from_public_bytes(configuration.public_key) == private(example, "gateway_sk").public_key()
    assert [suite.aead_id for suite in configuration.suites] == [1, 3]
    assert configuration.encode().hex() == example["key_config"]
    assert parse_keys(encode_keys([configuration])) == (configuration,)
