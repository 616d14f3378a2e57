"""AWS Nitro Enclaves: a good document is proved in every step, and each thing that is wrong with one is refused for its reason.

Documents here are of a hypervisor of our own. `python -m benchmarks.mutated_evidence --nitro FILE` verifies real ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from cloister.trust.attestation import AttestationPolicy, Evidence, Findings, Outcome, Statement
from cloister.trust.attestation.cbor import encode_array, encode_bytes, encode_text
from cloister.trust.attestation.nitro import NitroVerifier
from cloister.trust.attestation.verify import VERIFIERS, verify_evidence
from tests.nitro_platform import MADE, NOW, PCRS, NitroPlatform, encode_map, encode_uint

STATEMENT = Statement(
    release="0a" * 32,
    model="0b" * 32,
    profile="private",
    profile_digest="0c" * 32,
    configuration={"setting quant": '"none"'},
    hardening={"front.seccomp": "applied: on"},
    keys=b"\x00\x04keys",
    capacity=1,
    not_before=int(NOW) - 600,
    not_after=int(NOW) + 3000,
    checkpoint="a checkpoint",
)
POLICY = AttestationPolicy(
    kinds=frozenset({"nitro"}),
    releases=frozenset({"0a" * 32}),
    models=frozenset({"0b" * 32}),
    profile_digests=frozenset({"0c" * 32}),
    configuration={"setting quant": '"none"'},
    measurements={f"nitro-pcr{number}": frozenset({PCRS[number].hex()}) for number in range(3)},
)
BOUND = {
    "user_data": encode_bytes(hashlib.sha512(STATEMENT.encode()).digest()),
    "public_key": encode_bytes(STATEMENT.keys),
    "nonce": encode_bytes(hashlib.sha256(b"a checkpoint").digest()),
}


@pytest.fixture(scope="module")
def platform() -> NitroPlatform:
    return NitroPlatform()


@pytest.fixture
def verify(platform: NitroPlatform) -> Callable[..., Findings]:
    def run(policy: AttestationPolicy = POLICY, now: float = NOW, document: bytes | None = None, **changes: object) -> Findings:
        report = platform.document(**(BOUND | changes)) if document is None else document
        evidence = Evidence("nitro", STATEMENT.encode(), report)
        return verify_evidence(evidence, policy, now, verifiers={**VERIFIERS, "nitro": NitroVerifier(platform.roots)})

    return run


def failures(findings: Findings) -> list[str]:
    return [step.slug for step in findings.of(Outcome.FAILED)]


def test_a_good_document_is_proved_in_every_step(verify: Callable[..., Findings]):
    findings = verify()
    assert failures(findings) == []
    assert findings.proved


def test_a_document_under_another_root_than_that_of_aws_is_refused(platform: NitroPlatform):
    evidence = Evidence("nitro", STATEMENT.encode(), platform.document(**BOUND))
    assert failures(verify_evidence(evidence, POLICY, NOW)) == ["chain-root"]


def test_a_policy_accepts_nitro_only_where_it_names_it(verify: Callable[..., Findings]):
    findings = verify(AttestationPolicy())
    (step,) = findings.of(Outcome.FAILED)
    assert step.slug == "kind"
    assert "kinds" in step.text


@pytest.mark.parametrize("where", [*range(12), *range(12, 2600, 41), -97, -96, -49, -48, -1])
def test_a_document_with_one_bit_changed_is_refused(verify: Callable[..., Findings], platform: NitroPlatform, where: int):
    document = bytearray(platform.document(**BOUND))
    document[where] ^= 0x08
    refused = failures(verify(document=bytes(document)))
    assert set(refused) <= {
        "report-form",
        "report-signature",
        "chain-root",
        "chain-signature",
        "chain-authority",
        "chain-expired",
    }
    assert len(refused) == 1, "nothing is read from a document that nobody signed"


BINDINGS = {"user_data": "report-data", "public_key": "public-key", "nonce": "document-nonce"}


@pytest.mark.parametrize("field", BINDINGS)
def test_a_document_for_another_statement_key_or_checkpoint_is_refused(verify: Callable[..., Findings], field: str):
    assert failures(verify(**{field: encode_bytes(b"another")})) == [BINDINGS[field]]
    assert failures(verify(**{field: None})) == [BINDINGS[field]], "it may not be left out either"
    assert failures(verify(**{field: b"\xf6"})) == [BINDINGS[field]]


def test_a_document_cannot_be_carried_to_another_statement(platform: NitroPlatform):
    other = msgspec.structs.replace(STATEMENT, capacity=2)
    evidence = Evidence("nitro", other.encode(), platform.document(**BOUND))
    assert failures(NitroVerifier(platform.roots).verify(evidence, POLICY, NOW)) == ["report-data"]


@pytest.mark.parametrize("number", range(3))
def test_another_image_is_refused_with_both_values(verify: Callable[..., Findings], number: int):
    findings = verify(pcrs=PCRS | {number: b"\x5a" * 48})
    (step,) = findings.of(Outcome.FAILED)
    assert step.slug == f"pcr-{number}"
    assert "5a" * 48 in step.text
    assert PCRS[number].hex() in step.text


@pytest.mark.parametrize("number", [5, 8, 15])
def test_a_register_in_use_that_nobody_named_is_refused(verify: Callable[..., Findings], number: int):
    pcrs = PCRS | {number: b"\x5a" * 48}
    assert failures(verify(pcrs=pcrs)) == [f"pcr-{number}"]
    named = {**POLICY.measurements, f"nitro-pcr{number}": frozenset({"5a" * 48})}
    assert failures(verify(replace(POLICY, measurements=named), pcrs=pcrs)) == []
    assert failures(verify(replace(POLICY, measurements=named))) == [f"pcr-{number}"], "and one that is named has to be in use"


def test_who_started_an_enclave_is_compared_where_it_is_named(verify: Callable[..., Findings]):
    named = {**POLICY.measurements, "nitro-pcr4": frozenset({"00" * 48})}
    assert failures(verify(replace(POLICY, measurements=named))) == ["pcr-4"]


def test_a_register_that_is_named_and_not_in_the_document_is_refused(verify: Callable[..., Findings]):
    named = {**POLICY.measurements, "nitro-pcr8": frozenset({"5a" * 48})}
    without = {number: value for number, value in PCRS.items() if number != 8}
    assert failures(verify(replace(POLICY, measurements=named), pcrs=without)) == ["pcr-8"]


def test_an_enclave_in_debug_mode_is_refused_even_if_its_zeros_were_published(verify: Callable[..., Findings]):
    zeros = {f"nitro-pcr{number}": frozenset({"00" * 48}) for number in range(3)}
    findings = verify(replace(POLICY, measurements=zeros), pcrs=PCRS | dict.fromkeys(range(3), bytes(48)))
    assert failures(findings) == ["debug"]


def test_an_old_document_is_refused_although_its_certificate_holds():
    platform = NitroPlatform(hours=100)
    document = platform.document(**BOUND)

    def age(seconds: float) -> list[str]:
        evidence = Evidence("nitro", STATEMENT.encode(), document)
        return failures(NitroVerifier(platform.roots).verify(evidence, POLICY, MADE.timestamp() + seconds))

    assert age(3900) == []
    assert age(3901) == ["document-age"]


def test_a_document_of_the_future_is_refused(verify: Callable[..., Findings]):
    ahead = encode_uint(int((NOW + 301) * 1000))
    assert failures(verify(timestamp=ahead)) == ["document-age"]


def test_an_expired_certificate_is_refused(verify: Callable[..., Findings]):
    assert failures(verify(now=MADE.timestamp() + 3 * 3600 + 1)) == ["chain-expired"]


def test_an_enclave_cannot_certify_another(platform: NitroPlatform, verify: Callable[..., Findings]):
    bundle = encode_array([encode_bytes(certificate) for certificate in platform.chain])
    assert failures(verify(cabundle=bundle)) == ["chain-authority"]


MALFORMED: dict[str, dict[str, object]] = {
    "no PCR0": {"pcrs": {number: value for number, value in PCRS.items() if number}},
    "a register 32": {"pcrs": {**PCRS, 32: bytes(48)}},
    "registers of SHA-256": {"pcrs": {**PCRS, 0: bytes(32)}},
    "another digest": {"digest": encode_text("SHA256")},
    "no certificate": {"certificate": None},
    "a certificate in PEM": {"certificate": encode_bytes(b"-----BEGIN CERTIFICATE-----")},
    "a timestamp that is true": {"timestamp": b"\xf5"},
    "a module that is a number": {"module_id": b"\x01"},
    "a field that there is none of": {"extra": b"\x01"},
    "user data that is a text": {"user_data": encode_text("text")},
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_signed_document_of_another_form_is_refused(verify: Callable[..., Findings], case: str):
    assert failures(verify(**MALFORMED[case])) == ["report-form"]


def test_headers_that_are_not_signed_or_name_another_algorithm_are_refused(
    platform: NitroPlatform, verify: Callable[..., Findings]
):
    payload = encode_map({encode_text(name): value for name, value in platform.payload(**BOUND).items()})
    assert verify(document=platform.sign(payload)).accepted
    assert failures(verify(document=platform.sign(payload, unprotected=bytes.fromhex("a10126")))) == ["report-form"]
    assert failures(verify(document=platform.sign(payload, bytes.fromhex("a10126")))) == ["report-form"]
    assert failures(verify(document=b"\xd2" + platform.sign(payload))) == ["report-form"], "documents have no tag"
