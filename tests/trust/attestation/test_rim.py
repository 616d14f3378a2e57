"""NVIDIA's reference measurements: a real file is proved and fits a real report; altered and misused ones are refused."""

from __future__ import annotations

import sys

import pytest

from cloister.trust.attestation import AttestationError, Findings, Outcome
from cloister.trust.attestation.gpu_report import read_gpu_report
from cloister.trust.attestation.rim import RIM_ROOTS, Rim, verify_rim
from tests import attestation_vectors as real
from tests.authority import Authority
from tests.gpu_platform import MAKER, make_tag

VALUES = {3: [b"\x01" * 48, b"\x02" * 48], 7: [b"\x03" * 48]}


def verify(data: bytes, now: float = real.RIM_NOW, roots: frozenset[str] = RIM_ROOTS) -> tuple[Rim | None, list[str]]:
    findings = Findings()
    rim = verify_rim(findings, data, roots, now)
    assert (rim is None) == (not findings.accepted)
    return rim, [step.slug for step in findings.of(Outcome.FAILED)]


def verify_ours(data: bytes, now: float = real.NOW) -> tuple[Rim | None, list[str]]:
    return verify(data, now, MAKER.rim_root.roots)


def test_a_real_file_is_proved_and_a_real_gpu_measures_what_it_says():
    rim, _ = verify(real.vbios_rim())
    assert rim is not None
    report = read_gpu_report(real.old_gpu_evidence()[0])
    assert (rim.product, rim.version) == ("GH100", report.vbios)
    assert sorted(rim.measurements) == [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13]
    assert all(report.measurements[index].hex() in values for index, values in rim.measurements.items())


def test_a_real_file_is_refused_when_its_certificates_are_over():
    assert verify(real.vbios_rim(), now=real.NOW) == (None, ["chain-expired"])


def test_a_real_file_under_another_root_is_refused():
    assert verify_ours(real.vbios_rim()) == (None, ["chain-root"])


def test_a_real_file_with_one_bit_changed_is_refused_or_means_the_same():
    data = real.vbios_rim()
    whole, _ = verify(data)
    end = data.index(b"<ds:Signature")
    refused = 0
    for where in range(0, len(data), 109):
        changed = bytearray(data)
        changed[where] ^= 0x01
        rim, slugs = verify(bytes(changed))
        if rim is None:
            assert set(slugs) <= {
                "rim-signature",
                "rim-form",
                "chain-signature",
                "chain-root",
                "chain-authority",
                "chain-expired",
            }
            refused += 1
        else:
            # White space between attributes is no part of canonical XML, and of the certificates the signature needs one.
            assert where > end or data[where : where + 1].isspace(), where
            assert rim.measurements == (whole and whole.measurements)
    assert refused > 150


def test_values_of_our_own_are_read_with_their_alternatives():
    rim, _ = verify_ours(MAKER.rim("550.00", VALUES))
    assert rim is not None
    assert rim.measurements == {index: frozenset(value.hex() for value in values) for index, values in VALUES.items()}


def test_a_signer_without_the_chain_of_nvidia_is_refused():
    stranger = Authority("reference signer", Authority("reference root"), is_authority=False)
    assert verify_ours(MAKER.sign(make_tag("550.00", VALUES), stranger)) == (None, ["chain-root"])


def test_a_signature_of_another_key_than_the_first_certificate_is_refused():
    data = MAKER.rim("550.00", VALUES).decode()
    first, second = (part.split("</ds:X509Certificate>")[0] for part in data.split("<ds:X509Certificate>")[1:3])
    swapped = data.replace(first, "*").replace(second, first).replace("*", second)
    assert verify_ours(swapped.encode())[0] is None


def test_a_signed_part_inside_of_another_document_is_refused():
    """XML signature wrapping: what is signed is not what is read."""
    signed = MAKER.rim("550.00", VALUES)
    forged = make_tag("550.00", {3: [b"\x09" * 48]})
    for wrapped in (
        forged.replace(b"</SoftwareIdentity>", signed + b"</SoftwareIdentity>"),
        forged.replace(b"</SoftwareIdentity>", signed[signed.index(b"<ds:Signature") :]),
        signed.replace(b"</SoftwareIdentity>", forged + b"</SoftwareIdentity>"),
    ):
        assert verify_ours(wrapped)[0] is None


MALFORMED = {
    "nothing": b"",
    "no XML": b"{}",
    "no signature": make_tag("550.00", VALUES),
    "entities": b'<!DOCTYPE a [<!ENTITY b "c">]>' + MAKER.rim("550.00", VALUES),
    "too long": MAKER.rim("550.00", VALUES) + b" " * 70_000,
    "no active value": MAKER.rim("550.00", VALUES, active="False"),
    "a value that is neither": MAKER.rim("550.00", VALUES, active="true"),
    "no version": MAKER.rim("", VALUES),
    "another document": MAKER.sign(b"<a><b/></a>"),
    "an index twice": MAKER.sign(make_tag("550.00", VALUES).replace(b'index="6"', b'index="2"')),
    "a length that lies": MAKER.sign(make_tag("550.00", VALUES).replace(b'size="48"', b'size="32"')),
    "no alternatives": MAKER.sign(make_tag("550.00", VALUES).replace(b'alternatives="1"', b'alternatives="0"')),
    "an index that is no number": MAKER.sign(make_tag("550.00", VALUES).replace(b'index="6"', b'index="x"')),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_something_else_than_reference_measurements_is_refused(case: str):
    assert verify_ours(MALFORMED[case]) == (None, ["rim-form"])


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "signxml", None)
    with pytest.raises(AttestationError, match=r"pip install 'cloister\[attest\]'"):
        verify(real.vbios_rim())
