"""Envelopes, provenance, releases and their revocation."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.hashes import SHA256

from cloister.trust.transparency.dsse import IN_TOTO, Envelope, open_envelope, pae, read_statement, seal_envelope
from cloister.trust.transparency.note import Kind, PrivateKey
from cloister.trust.transparency.refusal import Reason, TransparencyError
from cloister.trust.transparency.release import (
    MINIMUM_PREFIX,
    RELEASE_PREFIX,
    minimum_entry,
    read_minimum,
    read_release,
    release_entry,
)
from tests.trust.transparency.world import make_release

VECTOR = json.loads((Path(__file__).parents[2] / "vectors" / "transparency" / "dsse.json").read_text())
KEY = PrivateKey.generate("release.example", Kind.NOTE)
SOURCE = {"repository": "https://example.com/cloister", "revision": "ab" * 20}


def refuse(act: object, *arguments: object) -> Reason:
    with pytest.raises(TransparencyError) as caught:
        act(*arguments)  # type: ignore[operator]
    return caught.value.reason


def make_entry(number: int = 1) -> bytes:
    return release_entry(make_release(number), source=SOURCE, builder="urn:example:builder", keys=[KEY])


def test_the_published_envelope_is_read_and_its_signature_is_over_our_encoding() -> None:
    envelope = msgspec.json.decode(json.dumps(VECTOR["envelope"]), type=Envelope)
    assert json.loads(msgspec.json.encode(envelope)) == VECTOR["envelope"]
    assert envelope.payload.decode() == VECTOR["payload"]
    message = pae(envelope.payload_type, envelope.payload)
    assert message.decode() == VECTOR["pae"]
    half = len(envelope.signatures[0].sig) // 2
    r, s = (int.from_bytes(part) for part in (envelope.signatures[0].sig[:half], envelope.signatures[0].sig[half:]))
    key = ec.EllipticCurvePublicNumbers(int(VECTOR["x"]), int(VECTOR["y"]), ec.SECP256R1()).public_key()
    key.verify(utils.encode_dss_signature(r, s), message, ec.ECDSA(SHA256()))


def test_an_envelope_opens_for_its_own_type_and_key_only() -> None:
    envelope = seal_envelope("a", b"payload", [KEY])
    other = PrivateKey.generate("release.example", Kind.NOTE)
    assert open_envelope(envelope, "a", [other.public, KEY.public]) == b"payload"
    assert refuse(open_envelope, envelope, "b", [KEY.public]) == Reason.BAD_SIGNATURE
    assert refuse(open_envelope, envelope, "a", [other.public]) == Reason.BAD_SIGNATURE
    assert (
        refuse(open_envelope, msgspec.structs.replace(envelope, payload=b"Payload"), "a", [KEY.public]) == Reason.BAD_SIGNATURE
    )
    shifted = msgspec.structs.replace(envelope, payload_type="a 7", payload=b"payload")
    assert refuse(open_envelope, shifted, "a 7", [KEY.public]) == Reason.BAD_SIGNATURE


def test_a_release_is_logged_with_provenance_that_others_can_read() -> None:
    entry = make_entry()
    assert read_release(entry, [KEY.public]) == make_release()
    logged = json.loads(entry.removeprefix(RELEASE_PREFIX))
    assert logged["provenance"]["payloadType"] == IN_TOTO
    statement = json.loads(base64.b64decode(logged["provenance"]["payload"]))
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert {"name": "release.json", "digest": {"sha256": make_release().digest}} in statement["subject"]
    definition = statement["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == SOURCE
    assert [dependency["name"] for dependency in definition["resolvedDependencies"]] == ["lock", "python"]
    assert read_statement(base64.b64decode(logged["provenance"]["payload"])).predicate == statement["predicate"]


def test_provenance_of_one_release_does_not_vouch_for_another() -> None:
    one, other = (json.loads(make_entry(number).removeprefix(RELEASE_PREFIX)) for number in (1, 2))
    mixed = RELEASE_PREFIX + json.dumps({"release": other["release"], "provenance": one["provenance"]}).encode()
    assert refuse(read_release, mixed, [KEY.public]) == Reason.WRONG_RELEASE


def test_only_a_release_key_revokes() -> None:
    entry = minimum_entry(3, [KEY])
    assert entry.startswith(MINIMUM_PREFIX)
    assert read_minimum(entry, [KEY.public]) == 3
    other = PrivateKey.generate("release.example", Kind.NOTE)
    assert refuse(read_minimum, minimum_entry(3, [other]), [KEY.public]) == Reason.BAD_SIGNATURE
    assert refuse(read_minimum, make_entry(), [KEY.public]) == Reason.MALFORMED
    assert refuse(read_release, entry, [KEY.public]) == Reason.MALFORMED
    assert refuse(read_release, RELEASE_PREFIX + b"{}", [KEY.public]) == Reason.MALFORMED


def test_the_digest_of_a_release_depends_on_every_digest_in_it() -> None:
    release = make_release()
    digests = {release.digest}
    for name in ("wheel", "lock", "interpreter", "files", "model", "profile_digest"):
        digests.add(msgspec.structs.replace(release, **{name: "00" * 32}).digest)
    digests.add(msgspec.structs.replace(release, launch={}).digest)
    digests.add(msgspec.structs.replace(release, number=2).digest)
    assert len(digests) == 9
