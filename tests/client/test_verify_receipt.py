"""`cloister verify receipt`: an honest receipt is proved long after, and each way to make a false one is refused."""

from __future__ import annotations

import hashlib
import json
from base64 import urlsafe_b64decode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from cloister.cli import app
from cloister.client.verify_receipt import Proof, Shown, verify_receipt
from cloister.trust.attestation import AttestationPolicy, Outcome
from cloister.trust.receipts import Receipt, ReceiptError, Transcript, encode64, read_receipt
from cloister.trust.sealing import CHUNKED, HttpRequest, KeyRing, RequestHead, parse_keys
from cloister.trust.sealing.ohttp import begin_request
from cloister.trust.transparency.epoch import encode_bundle, epoch_leaf, parse_bundle
from cloister.trust.transparency.merkle import hash_leaf
from cloister.trust.transparency.note import Note, cosign, parse_note
from cloister.trust.transparency.trust import encode_trust
from tests.client.test_verify_node import ServedCloud
from tests.trust.transparency.world import make_release

SOFTWARE = AttestationPolicy(accept_software=True)
ASKED, ANSWERED = b'{"prompt":"who is it?"}', b'{"text":"nobody"}'
SHOWN = Shown(ASKED, ANSWERED, "POST", "/v1/completions")


def receipt_key_of(ring: KeyRing) -> Ed25519PrivateKey:
    key = ring.find_receipt_key(ring.current.configuration.key_id, 0.0)
    assert key is not None
    return key


@dataclass
class SigningNode:
    """A node in a logged epoch, and receipts that it, or somebody with its key, signs."""

    served: ServedCloud
    ring: KeyRing

    def __post_init__(self) -> None:
        self.evidence = self.attest()
        self.served.serve(self.evidence)

    def attest(self, **changes: object) -> bytes:
        keys = {"keys": self.ring.publish(), "receipt_key": self.ring.publish_receipt_key()}
        return self.served.state(**{**keys, **changes})

    @property
    def bundle(self) -> bytes:
        return self.served.files["epoch"]

    def sign(self, *, key: Ed25519PrivateKey | None = None, answer: bytes = ANSWERED, **claimed: object) -> Receipt:
        """A receipt; `claimed` are claims that are signed in place of the true ones."""
        exchange = begin_request(parse_keys(self.ring.publish())[0], CHUNKED)
        transcript = Transcript(exchange, HttpRequest(RequestHead("POST", "https", "localhost", "/v1/completions"), ASKED))
        transcript.add(answer)
        claims = transcript.claim(
            200,
            epoch=hash_leaf(epoch_leaf(parse_bundle(self.bundle).epoch)).hex(),
            evidence=hashlib.sha256(self.evidence).hexdigest(),
            profile="private",
        )
        claims = msgspec.structs.replace(claims, **claimed)
        signature = (key or receipt_key_of(self.ring)).sign(claims.signing_input)
        return Receipt(jws=claims.to_jws(signature), salt=transcript.salt, evidence=self.evidence, bundle=self.bundle)

    def check(self, receipt: Receipt, shown: Shown = SHOWN, policy: AttestationPolicy = SOFTWARE) -> Proof:
        return verify_receipt(receipt, shown, self.served.trust, policy)


@pytest.fixture
def node(tmp_path: Path) -> SigningNode:
    return SigningNode(ServedCloud(tmp_path), KeyRing(0.0))


def slugs(proof: Proof, outcome: Outcome = Outcome.FAILED) -> list[str]:
    return [step.slug for step in proof.findings.of(outcome)]


def changed(receipt: Receipt, **changes: object) -> Receipt:
    return msgspec.structs.replace(receipt, **changes)


def test_an_honest_receipt_says_which_release_answered_what_under_which_profile(node: SigningNode) -> None:
    proof = node.check(node.sign())
    assert slugs(proof) == []
    assert slugs(proof, Outcome.NOT_PROVED) == ["hardware"]  # of evidence without hardware nothing is proved
    assert {"signature", "evidence", "profile", "epoch", "listed", "release", "model", "request", "answer"} <= set(
        slugs(proof, Outcome.PROVED)
    )
    assert proof.release.startswith("1 (version 0.1.0")


def test_it_is_proved_long_after_the_epoch_and_the_key_have_ended(node: SigningNode) -> None:
    receipt = node.sign()
    node.served.now += 400 * 86_400
    assert slugs(node.check(receipt)) == []


@pytest.mark.parametrize(
    ("shown", "failed"),
    [
        (Shown(b'{"prompt":"who else?"}', ANSWERED, "POST", "/v1/completions"), ["request"]),
        (Shown(ASKED, ANSWERED, "POST", "/v1/chat/completions"), ["request"]),
        (Shown(ASKED, ANSWERED + b" ", "POST", "/v1/completions"), ["answer"]),
        (Shown(ASKED, ANSWERED[:-1], "POST", "/v1/completions"), ["answer"]),
        (Shown(ANSWERED, ASKED, "POST", "/v1/completions"), ["request", "answer"]),
    ],
    ids=["another request", "another target", "a longer answer", "a cut answer", "swapped"],
)
def test_a_receipt_for_other_texts_is_refused(node: SigningNode, shown: Shown, failed: list[str]) -> None:
    assert slugs(node.check(node.sign(), shown)) == failed


def test_a_receipt_of_an_equal_exchange_has_another_salt_and_cannot_be_swapped(node: SigningNode) -> None:
    first, second = node.sign(), node.sign()
    assert slugs(node.check(changed(first, jws=second.jws))) == ["request", "answer"]


def test_a_key_that_was_not_attested_is_refused(node: SigningNode) -> None:
    assert slugs(node.check(node.sign(key=Ed25519PrivateKey.generate()))) == ["signature"]


def test_a_swapped_model_is_refused(node: SigningNode) -> None:
    """Evidence of another model, of the same node, under the receipt of the one that answered."""
    other = node.attest(model="ab" * 32)
    assert slugs(node.check(changed(node.sign(), evidence=other))) == ["evidence", "listed"]


def test_a_model_that_is_not_the_one_asked_for_is_refused(node: SigningNode) -> None:
    wanted = AttestationPolicy(accept_software=True, models=frozenset({"ab" * 32}))
    assert "model" in slugs(node.check(node.sign(), policy=wanted))


def test_a_node_that_signs_for_a_policy_that_it_did_not_run_is_refused(node: SigningNode) -> None:
    assert slugs(node.check(node.sign(profile="paranoid"))) == ["profile"]


def test_an_epoch_that_the_log_does_not_hold_is_refused(node: SigningNode) -> None:
    """The node's own list, with its own capacity, signed for by it and by nobody else."""
    bundle = parse_bundle(node.bundle)
    epoch = msgspec.structs.replace(bundle.epoch, epoch=bundle.epoch.epoch + 1)
    invented = encode_bundle(msgspec.structs.replace(bundle, epoch=epoch))
    receipt = changed(node.sign(epoch=hash_leaf(epoch_leaf(epoch)).hex()), bundle=invented)
    assert slugs(node.check(receipt)) == ["epoch"]


def test_another_epoch_of_the_log_than_the_one_that_was_drawn_from_is_refused(node: SigningNode) -> None:
    receipt = node.sign()
    node.served.now += 60
    node.served.serve(node.evidence)
    assert slugs(node.check(changed(receipt, bundle=node.bundle))) == ["epoch"]


def test_a_checkpoint_without_enough_witnesses_is_refused(node: SigningNode) -> None:
    bundle = parse_bundle(node.bundle)
    lines = bundle.checkpoint.splitlines(keepends=True)
    bare = msgspec.structs.replace(bundle, checkpoint="".join(line for line in lines if "witness" not in line))
    proof = node.check(changed(node.sign(), bundle=encode_bundle(bare)))
    assert slugs(proof) == ["epoch"]
    assert any("0 of 3 witnesses" in step.text for step in proof.findings)


def test_an_epoch_that_was_cosigned_when_it_was_over_is_refused(node: SigningNode) -> None:
    bundle = parse_bundle(node.bundle)
    note = parse_note(bundle.checkpoint)
    late = [cosign(note.text, key, bundle.epoch.not_after) for key in node.served.witness_keys]
    by_log = Note(note.text, tuple(one for one in note.signatures if one.is_by(node.served.log_key.public)))
    recosigned = msgspec.structs.replace(bundle, checkpoint=str(by_log.add(*late)))
    proof = node.check(changed(node.sign(), bundle=encode_bundle(recosigned)))
    assert slugs(proof) == ["epoch"]
    assert any("was over before" in step.text for step in proof.findings)


def test_a_release_that_nobody_trusted_signed_is_refused(node: SigningNode) -> None:
    stranger = ServedCloud(node.served.directory / "stranger")
    proof = verify_receipt(node.sign(), SHOWN, stranger.trust, SOFTWARE)
    assert slugs(proof) == ["epoch"]


def test_evidence_without_hardware_is_refused_unless_it_is_let_through(node: SigningNode) -> None:
    assert "hardware" in slugs(node.check(node.sign(), policy=AttestationPolicy()))


def test_without_texts_only_signature_evidence_and_epoch_are_checked_and_it_says_so(node: SigningNode) -> None:
    proof = node.check(changed(node.sign(), salt=b""), Shown())
    assert slugs(proof) == []
    assert "texts" in slugs(proof, Outcome.NOT_PROVED)


def test_without_its_salt_no_text_can_be_held_against_a_receipt(node: SigningNode) -> None:
    assert slugs(node.check(changed(node.sign(), salt=b""))) == ["salt"]


def test_without_keys_of_a_log_the_epoch_is_left_open(node: SigningNode) -> None:
    proof = verify_receipt(changed(node.sign(), bundle=b""), SHOWN, None, SOFTWARE)
    assert slugs(proof) == []
    assert {"epoch", "release-log"} <= set(slugs(proof, Outcome.NOT_PROVED))


def test_a_jws_in_any_other_form_is_refused(node: SigningNode) -> None:
    """Header, order, padding and algorithm are fixed: there is one string for one receipt."""
    receipt = node.sign()
    header, payload, signature = receipt.jws.split(".")
    none = encode64(b'{"alg":"none","typ":"cloister-receipt+jws"}').decode()
    spaced = encode64(b" " + json.dumps(json.loads(_decode(payload))).encode()).decode()
    for jws in (
        f"{none}.{payload}.{signature}",
        f"{header}.{spaced}.{signature}",
        f"{receipt.jws}=",
        f"{header}.{payload}",
        "ü",
    ):
        assert slugs(node.check(changed(receipt, jws=jws))) == ["receipt"]


def _decode(part: str) -> bytes:
    return urlsafe_b64decode(part + "=" * (-len(part) % 4))


def test_the_signature_is_one_of_rfc_8037_that_any_library_checks(node: SigningNode) -> None:
    receipt = node.sign()
    signed, _, signature = receipt.jws.rpartition(".")
    assert json.loads(_decode(signed.partition(".")[0])) == {"alg": "EdDSA", "typ": "cloister-receipt+jws"}
    key = receipt_key_of(node.ring).public_key()
    key.verify(_decode(signature), signed.encode())


class Files:
    def __init__(self, node: SigningNode, directory: Path) -> None:
        self._directory = directory
        self.receipt = self.write("receipt.json", node.sign().encode())
        self.trust = self.write("trust.json", encode_trust(node.served.trust))
        self.request, self.answer = self.write("request", ASKED), self.write("answer", ANSWERED)

    def write(self, name: str, content: bytes) -> str:
        (self._directory / name).write_bytes(content)
        return str(self._directory / name)

    def run(self, *arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["verify", "receipt", *arguments])
        return done.exit_code, done.output


@pytest.fixture
def files(node: SigningNode, tmp_path: Path) -> Files:
    return Files(node, tmp_path)


def test_the_command_says_what_is_proved_and_what_is_not(files: Files) -> None:
    texts = ("--request", files.request, "--answer", files.answer, "--target", "/v1/completions")
    status, output = files.run(files.receipt, "--trust", files.trust, "--accept-software", *texts)
    assert status == 0, output
    assert "  not proved  no hardware vouches" in output
    assert "the request is the one that was shown (POST /v1/completions)" in output
    assert f"model   {make_release().model}" in output
    assert "who is it" not in output
    assert 'nobody"' not in output


def test_the_command_refuses_with_status_1_and_cannot_check_with_2(files: Files) -> None:
    assert files.run(files.receipt, "--trust", files.trust)[0] == 1
    assert files.run(files.receipt, "--accept-software")[0] == 0
    assert files.run(files.receipt, "--accept-software", "--answer", files.request)[0] == 1
    assert files.run(files.request)[0] == 2
    assert files.run(files.receipt, "--request", "/nowhere")[0] == 2


def test_json_has_every_step(files: Files) -> None:
    _, output = files.run(files.receipt, "--trust", files.trust, "--accept-software", "--json")
    told = json.loads(output)
    assert told["accepted"]
    assert not told["proved"]
    assert {"signature", "epoch", "texts"} <= {step["step"] for step in told["steps"]}


@pytest.mark.parametrize("edit", [lambda data: data[:-20], lambda data: b"{}", lambda data: data + bytes(4_000_000)])
def test_a_file_that_is_no_receipt_is_said_to_be_none_without_repeating_it(
    node: SigningNode, edit: Callable[[bytes], bytes]
) -> None:
    with pytest.raises(ReceiptError) as caught:
        read_receipt(edit(node.sign().encode()))
    assert node.sign().jws[:20] not in str(caught.value)
