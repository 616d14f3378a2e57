"""X-Wing beside X25519: the vectors of its drafts, another implementation, and who takes which of the two."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, MLKEM768X25519PrivateKey, MLKEM768X25519PublicKey
from cryptography.hazmat.primitives.hpke import Suite as OtherSuite

from cloister.trust.sealing import (
    CHUNKED,
    KEMS,
    SUITES,
    X25519,
    XWING,
    ChunkOpener,
    Header,
    Kem,
    KeyConfiguration,
    KeyConfigurationError,
    KeyRing,
    Receiver,
    ReplayCache,
    ResponseOpener,
    ResponseSealer,
    Suite,
    UnsealError,
    choose_configuration,
    encode_keys,
    header_bytes,
    parse_keys,
    seal_chunked_request,
)
from cloister.trust.sealing.hpke import set_up_receiver, set_up_sender
from cloister.trust.sealing.kem import XWingKey, is_supported

VECTORS = Path(__file__).parents[2] / "vectors/hpke"
XWING_VECTORS = json.loads((VECTORS / "xwing.json").read_text())
[HPKE_VECTOR] = json.loads((VECTORS / "hpke-pq-mlkem768-x25519.json").read_text())
OTHER_SUITES = {1: AEAD.AES_128_GCM, 2: AEAD.AES_256_GCM, 3: AEAD.CHACHA20_POLY1305}


def halves_of(seed: bytes) -> tuple[MLKEM768PrivateKey, X25519PrivateKey]:
    """expandDecapsulationKey of draft-connolly-cfrg-xwing-kem, section 5.2."""
    expanded = hashlib.shake_256(seed).digest(96)
    return MLKEM768PrivateKey.from_seed_bytes(expanded[:64]), X25519PrivateKey.from_private_bytes(expanded[64:])


def key_of(seed: str) -> XWingKey:
    return XWingKey(*halves_of(bytes.fromhex(seed)))


@pytest.mark.parametrize("vector", XWING_VECTORS, ids=lambda vector: vector["sk"][:8])
def test_vectors_of_x_wing_are_decapsulated(vector: dict[str, str]) -> None:
    key = key_of(vector["sk"])
    assert key.public_bytes().hex() == vector["pk"]
    assert key.decapsulate(bytes.fromhex(vector["ct"])).hex() == vector["ss"]


def test_the_vector_of_hpke_with_x_wing_holds_from_key_to_exported_secret() -> None:
    vector = HPKE_VECTOR
    assert vector["kem_id"] == XWING.kem_id
    suite = Suite(vector["kdf_id"], vector["aead_id"])
    assert suite in SUITES
    context = set_up_receiver(bytes.fromhex(vector["enc"]), key_of(vector["skRm"]), suite, bytes.fromhex(vector["info"]))
    secrets = context.secrets
    assert (secrets.key.hex(), secrets.base_nonce.hex()) == (vector["key"], vector["base_nonce"])
    assert secrets.exporter.hex() == vector["exporter_secret"]
    for one in vector["encryptions"]:
        assert context.open(bytes.fromhex(one["ct"]), bytes.fromhex(one["aad"])).hex() == one["pt"]
    for one in vector["exports"]:
        assert context.export(bytes.fromhex(one["exporter_context"]), one["L"]).hex() == one["exported_value"]


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: f"aead{suite.aead_id}")
def test_another_implementation_opens_what_is_sealed_here_and_the_other_way_round(suite: Suite) -> None:
    ml_kem, x25519 = MLKEM768PrivateKey.generate(), X25519PrivateKey.generate()
    key, other_key, info = XWingKey(ml_kem, x25519), MLKEM768X25519PrivateKey(ml_kem, x25519), b"a label"
    other = OtherSuite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, OTHER_SUITES[suite.aead_id])
    enc, context = set_up_sender(XWING, key.public_bytes(), suite, info)
    assert other.decrypt(enc + context.seal(b"from here"), other_key, info) == b"from here"
    other_public = MLKEM768X25519PublicKey(
        MLKEM768PublicKey.from_public_bytes(key.public_bytes()[:1184]),
        X25519PublicKey.from_public_bytes(key.public_bytes()[1184:]),
    )
    sealed = other.encrypt(b"from there", other_public, info)
    assert set_up_receiver(sealed[:1120], key, suite, info).open(sealed[1120:]) == b"from there"


def make_receiver(*kems: Kem) -> Receiver:
    return Receiver(KeyRing(0.0, kems=kems or KEMS), ReplayCache(3600.0))


def exchange_with(receiver: Receiver, configuration: KeyConfiguration) -> int:
    """A request and its response, through the encoding of both; returns the KEM that it was sealed with."""
    sealed, client = seal_chunked_request(configuration, b"a request")
    header = Header.parse(sealed)
    exchange = receiver.begin(header, CHUNKED, 0.0)
    opener = ChunkOpener(exchange.context)
    assert b"".join([*opener.feed(sealed[header_bytes(sealed) :]), opener.close()]) == b"a request"
    response, reading = ResponseSealer(exchange).finish(b"an answer"), ResponseOpener(client)
    assert b"".join([*reading.feed(response), reading.close()]) == b"an answer"
    return header.kem_id


def test_a_ring_publishes_both_and_a_client_takes_x_wing_whatever_the_order() -> None:
    receiver = make_receiver()
    published = parse_keys(receiver.ring.publish())
    assert [one.kem_id for one in published] == [0x647A, 0x0020]
    assert len({one.key_id for one in published}) == 2
    for configurations in (published, published[::-1]):
        assert exchange_with(receiver, choose_configuration(configurations)) == XWING.kem_id


def test_a_client_without_x_wing_passes_its_key_over_and_seals_to_the_other() -> None:
    """What such a client does with the list: RFC 9458, section 3.2."""
    receiver = make_receiver()
    data, found = receiver.ring.publish(), []
    while data:
        length = int.from_bytes(data[:2], "big")
        one, data = data[2 : 2 + length], data[2 + length :]
        if one[1:3] == b"\x00\x20":
            found.append(KeyConfiguration(one[0], one[3:35]))
    assert exchange_with(receiver, found[0]) == X25519.kem_id


def test_a_node_without_x_wing_is_sealed_to_with_x25519() -> None:
    receiver = make_receiver(X25519)
    [configuration] = parse_keys(receiver.ring.publish())
    assert exchange_with(receiver, choose_configuration([configuration])) == X25519.kem_id


def test_both_keys_are_replaced_together_and_no_two_share_a_number() -> None:
    ring = KeyRing(0.0, life_s=100, overlap_s=10)
    seen = [one.key_id for one in ring.configurations]
    for turn in range(1, 4):
        assert ring.rotate(90.0 * turn)
        fresh = [one.key_id for one in ring.configurations]
        assert not set(fresh) & set(seen[-2:])
        assert all(ring.find(key_id, 90.0 * turn) is not None for key_id in (*fresh, *seen[-2:]))
        seen += fresh
    assert [len(one.public_key) for one in ring.configurations] == [1216, 32]


def test_who_breaks_x25519_alone_derives_nothing() -> None:
    """The quantum computer of later: it has the X25519 key, and guesses at ML-KEM's."""
    ml_kem, x25519 = MLKEM768PrivateKey.generate(), X25519PrivateKey.generate()
    enc, sender = set_up_sender(XWING, XWingKey(ml_kem, x25519).public_bytes(), SUITES[0], b"")
    for guess in ((MLKEM768PrivateKey.generate(), x25519), (ml_kem, X25519PrivateKey.generate())):
        with pytest.raises(UnsealError):
            set_up_receiver(enc, XWingKey(*guess), SUITES[0], b"").open(sender.seal(b"a prompt"))
    assert set_up_receiver(enc, XWingKey(ml_kem, x25519), SUITES[0], b"").secrets == sender.secrets


@pytest.mark.parametrize("length", [0, 31, 32, 1088, 1119, 1121])
def test_an_encapsulated_key_of_another_length_is_none(length: int) -> None:
    with pytest.raises(UnsealError):
        XWING.generate().decapsulate(bytes([9]) * length)


def test_a_public_key_that_is_none_is_refused_before_anything_is_sealed() -> None:
    good = XWING.generate().public_bytes()
    bad = {"ML-KEM": b"\xff" * 1184 + good[1184:], "shared key": good[:1184] + bytes(32), "32 bytes": good[:-1]}
    for why, public_key in bad.items():
        with pytest.raises(ValueError, match=why):
            XWING.encapsulate(public_key)
    with pytest.raises(KeyConfigurationError):
        parse_keys(encode_keys([KeyConfiguration(1, good[:-1], kem_id=XWING.kem_id)]))


def test_a_gateway_key_of_low_order_is_refused_as_a_key_configuration() -> None:
    xwing = XWING.generate().public_bytes()[:1184] + bytes(32)
    for key in (KeyConfiguration(1, bytes(32)), KeyConfiguration(1, xwing, kem_id=XWING.kem_id)):
        (parsed,) = parse_keys(encode_keys([key]))
        with pytest.raises(KeyConfigurationError, match="key 1 cannot be sealed to"):
            seal_chunked_request(parsed, b"a prompt")


def test_an_openssl_without_ml_kem_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise UnsupportedAlgorithm("ML-KEM-768 is not supported by this backend.")

    assert is_supported()
    monkeypatch.setattr(MLKEM768PrivateKey, "generate", refuse)
    assert not is_supported()


def test_a_list_without_a_kem_of_ours_names_those_that_are() -> None:
    with pytest.raises(KeyConfigurationError, match=r"X-Wing .* or DHKEM"):
        choose_configuration([])
