"""Attesters: what the kernel and the driver give becomes evidence that the verifiers prove; a machine without them says so."""

from __future__ import annotations

import ctypes
import struct
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cloister.trust.attestation import (
    AttestationError,
    AttestationPolicy,
    Evidence,
    Findings,
    Outcome,
    gpu_nonce,
    report_data,
)
from cloister.trust.attestation.certificates import digest_key
from cloister.trust.attestation.gpu_report import read_gpu_report
from cloister.trust.attestation.nvidia import GpuVerifier, chain_extra, report_extra
from cloister.trust.attestation.nvml import GpuAttester, Nvml
from cloister.trust.attestation.sev_snp import SnpVerifier
from cloister.trust.attestation.software import SoftwareAttester
from cloister.trust.attestation.tdx import COLLATERAL
from cloister.trust.attestation.tsm import SnpAttester, TdxAttester, fetch_report, read_table
from tests import attestation_vectors as real
from tests.fake_configfs import FakeConfigfs
from tests.gpu_platform import MAKER
from tests.snp_platform import NOW, SnpPlatform, make_report

STATEMENT = b"a statement"
GUIDS = {
    "vcek": "63da758d-e664-4564-adc5-f4b93be8accd",
    "ask": "4ab7b379-bbac-4fe4-a02f-05aef327c782",
    "vlek": "a8074bc2-a25a-483e-aae6-39c045a0b8a1",
    "ark": "c0b406a4-a803-4952-9743-3fb6014cd0ae",
}


def make_table(certificates: dict[str, bytes]) -> bytes:
    """The host's table: entries, one of zeros, then what they point to."""
    head, body = b"", b""
    start = 24 * (len(certificates) + 1)
    for name, encoded in certificates.items():
        guid = uuid.UUID(GUIDS[name]) if name in GUIDS else uuid.UUID(int=99)
        head += guid.bytes + struct.pack("<II", start + len(body), len(encoded))
        body += encoded
    return head + bytes(24) + body


@pytest.fixture(scope="module")
def platform() -> SnpPlatform:
    return SnpPlatform()


def check(evidence: Evidence, platform: SnpPlatform) -> Findings:
    return SnpVerifier(platform.roots).verify(evidence, AttestationPolicy(profile="team"), NOW)


def test_a_report_of_the_kernel_becomes_evidence_that_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: SnpPlatform
):
    chain = {name: platform.extra[name] for name in GUIDS if name in platform.extra}
    configfs = FakeConfigfs(tmp_path / "report", "sev_guest", lambda data: platform.sign(make_report(data)), make_table(chain))
    configfs.install(monkeypatch)
    evidence = SnpAttester(folder=configfs.folder).attest(STATEMENT)
    findings = check(evidence, platform)
    assert findings.accepted
    assert "report-data" in [step.slug for step in findings.of(Outcome.PROVED)]
    assert list(configfs.folder.iterdir()) == [], "the request is taken away again"


def test_certificates_that_the_host_does_not_give_come_from_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: SnpPlatform
):
    configfs = FakeConfigfs(tmp_path / "report", "sev_guest", lambda data: platform.sign(make_report(data)))
    (tmp_path / "certificates").mkdir()
    for name, encoded in platform.extra.items():
        (tmp_path / "certificates" / name).write_bytes(encoded)
    configfs.install(monkeypatch)
    with pytest.raises(AttestationError, match=r"vcek, ask, ark.*--amd-certificates"):
        SnpAttester(folder=configfs.folder).attest(STATEMENT)
    evidence = SnpAttester(tmp_path / "certificates", configfs.folder).attest(STATEMENT)
    assert evidence.extra == platform.extra
    assert check(evidence, platform).accepted


def test_a_host_that_gives_a_provider_key_lacks_its_intermediate_until_the_folder_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cloud = SnpPlatform(provider="Example Cloud")
    table = make_table({name: cloud.extra[name] for name in ("vlek", "ark")})
    signed = FakeConfigfs(tmp_path / "report", "sev_guest", lambda data: cloud.sign(make_report(data, flags=1 << 2)), table)
    signed.install(monkeypatch)
    with pytest.raises(AttestationError, match=r"asvk.*--amd-certificates"):
        SnpAttester(folder=signed.folder).attest(STATEMENT)
    (tmp_path / "asvk").write_bytes(cloud.extra["asvk"])
    evidence = SnpAttester(tmp_path, signed.folder).attest(STATEMENT)
    policy = AttestationPolicy(profile="team", snp_providers=frozenset({"Example Cloud"}))
    assert SnpVerifier(cloud.roots).verify(evidence, policy, NOW).accepted


@pytest.mark.parametrize(
    "report", [b"short", SnpPlatform().sign(make_report(bytes(64), flags=7 << 2))], ids=["broken", "not signed"]
)
def test_a_report_that_no_client_would_read_stops_the_attester(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: SnpPlatform, report: bytes
):
    table = make_table({name: platform.extra[name] for name in GUIDS if name in platform.extra})
    configfs = FakeConfigfs(tmp_path / "report", "sev_guest", lambda data: report, table)
    configfs.install(monkeypatch)
    with pytest.raises(AttestationError, match="report"):
        SnpAttester(folder=configfs.folder).attest(STATEMENT)


def test_a_quote_of_the_kernel_becomes_evidence_with_its_collateral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[bytes] = []
    configfs = FakeConfigfs(tmp_path / "report", "tdx_guest", lambda data: (asked.append(data), real.td_quote())[1])
    configfs.install(monkeypatch)
    evidence = TdxAttester(lambda quote: b"collateral of " + quote[:2], configfs.folder).attest(STATEMENT)
    assert asked == [report_data(STATEMENT)]
    assert evidence == Evidence("tdx", STATEMENT, real.td_quote(), {COLLATERAL: b"collateral of " + real.td_quote()[:2]})


def test_another_platform_than_asked_for_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    configfs = FakeConfigfs(tmp_path / "report", "tdx_guest", lambda data: b"quote")
    configfs.install(monkeypatch)
    with pytest.raises(AttestationError, match="tdx_guest"):
        SnpAttester(folder=configfs.folder).attest(STATEMENT)


def test_a_report_that_another_program_asked_for_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    configfs = FakeConfigfs(tmp_path / "report", "sev_guest", lambda data: b"report", jumps=1)
    configfs.install(monkeypatch)
    with pytest.raises(AttestationError, match="another program"):
        fetch_report(bytes(64), configfs.folder)
    assert list(configfs.folder.iterdir()) == []


def test_a_machine_that_is_no_confidential_guest_says_what_is_missing(tmp_path: Path):
    with pytest.raises(AttestationError, match="no confidential guest"):
        fetch_report(bytes(64), tmp_path / "absent")


def test_entries_of_the_table_that_are_not_known_are_left_out():
    table = make_table({"vcek": b"one", "provider's": b"two", "ark": b"three"})
    assert read_table(table) == {"vcek": b"one", "ark": b"three"}
    assert read_table(b"") == {}


def test_a_broken_table_is_an_error():
    with pytest.raises(AttestationError, match="broken"):
        read_table(make_table({"vcek": b"one"})[:-1])


class FakeNvml:
    """NVML of a machine with one GPU, which answers with the report and the certificates of a real one."""

    def __init__(self, status: int = 0) -> None:
        self.asked: list[bytes] = []
        self.open = 0
        self._status = status

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: Any, device: Any) -> int:
        device._obj.value = 17
        return 0

    def nvmlDeviceGetConfComputeGpuCertificate(self, device: Any, certificates: Any) -> int:
        _, chain, _ = real.gpu_evidence()
        certificates._obj.attestation_size = len(chain)
        ctypes.memmove(certificates._obj.attestation, chain, len(chain))
        return self._status

    def nvmlDeviceGetConfComputeGpuAttestationReport(self, device: Any, given: Any) -> int:
        report, _, _ = real.gpu_evidence()
        self.asked.append(bytes(given._obj.nonce))
        given._obj.size = len(report)
        ctypes.memmove(given._obj.report, report, len(report))
        return 0


def test_a_gpu_is_asked_with_the_hash_of_the_processors_report_data():
    library = FakeNvml()
    evidence = GpuAttester(SoftwareAttester(), Nvml(library)).attest(STATEMENT)
    report, chain, nonce = real.gpu_evidence()
    assert library.asked == [gpu_nonce(report_data(STATEMENT))]
    assert library.open == 0
    assert evidence.extra == {report_extra(0): report, chain_extra(0): chain}
    checked = GpuVerifier().verify_report(
        evidence.extra[report_extra(0)], evidence.extra[chain_extra(0)], nonce, AttestationPolicy(profile="team"), real.NOW
    )
    assert checked.accepted


class OurGpus:
    """One GPU of our own maker."""

    def fetch(self, nonce: bytes) -> list[tuple[bytes, bytes]]:
        return [(MAKER.report(nonce), MAKER.signer.pem)]


def test_what_nvidia_signed_is_stapled_from_a_folder_and_proves_the_gpu(tmp_path: Path):
    report = read_gpu_report(MAKER.report(bytes(32)))
    for name, version, indexes in (("driver.xml", report.driver, range(14, 65)), ("vbios.swidtag", report.vbios, range(1, 14))):
        (tmp_path / name).write_bytes(MAKER.rim(version, {index: [report.measurements[index]] for index in indexes}))
    for chain in (MAKER.gpu.chain, MAKER.rim_signer.chain):
        for number, (one, issuer) in enumerate(pairwise(chain)):
            name = f"{digest_key(issuer.key.public_key())[:8]}-{number}"
            if number:
                (tmp_path / f"{name}.crl").write_bytes(issuer.list_revoked(real.NOW))
            else:
                (tmp_path / f"{name}.ocsp").write_bytes(issuer.answer(one.certificate, real.NOW))
    (tmp_path / "notes.txt").write_text("not read")
    evidence = GpuAttester(SoftwareAttester(), OurGpus(), tmp_path).attest(STATEMENT)
    findings = GpuVerifier(MAKER.root.roots, MAKER.rim_root.roots).verify(evidence, AttestationPolicy(gpu=True), real.NOW)
    assert findings.proved, [step.text for step in findings.of(Outcome.FAILED)]
    assert len(evidence.encode()) < 100_000


def test_a_folder_of_collateral_that_is_not_there_or_too_full_says_so(tmp_path: Path):
    with pytest.raises(AttestationError, match="cannot read"):
        GpuAttester(SoftwareAttester(), OurGpus(), tmp_path / "absent").attest(STATEMENT)
    for number in range(9):
        (tmp_path / f"{number}.xml").write_bytes(b"")
    with pytest.raises(AttestationError, match="9 RIM files"):
        GpuAttester(SoftwareAttester(), OurGpus(), tmp_path).attest(STATEMENT)


def test_a_gpu_that_is_not_in_confidential_mode_says_so():
    library = FakeNvml(status=3)
    with pytest.raises(AttestationError, match="confidential mode"):
        Nvml(library).fetch(bytes(32))
    assert library.open == 0


def test_a_driver_without_confidential_computing_says_so():
    class Old(FakeNvml):
        nvmlDeviceGetConfComputeGpuCertificate = property()

    with pytest.raises(AttestationError, match="too old"):
        Nvml(Old()).fetch(bytes(32))
