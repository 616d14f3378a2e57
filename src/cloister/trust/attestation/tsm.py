"""Reports of the processor through Linux's configfs-tsm (`Documentation/ABI/testing/configfs-tsm`, since Linux 6.7).

One interface serves SEV-SNP and TDX: a directory is made, REPORT_DATA is written into `inblob`, the report is read from
`outblob`. `generation` counts writes, so two writers cannot mistake each other's reports.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cloister.trust.attestation.base import AttestationError
from cloister.trust.attestation.evidence import Evidence, EvidenceError, report_data
from cloister.trust.attestation.snp_report import ARK, ASK, ASVK, CRL, VCEK, VLEK, name_chain, read_report
from cloister.trust.attestation.tdx import COLLATERAL

TSM_REPORTS = Path("/sys/kernel/config/tsm/report")
_TRIES = 3
_ENTRY = struct.Struct("<16sII")
_CERTIFICATES: Mapping[uuid.UUID, str] = {
    uuid.UUID("63da758d-e664-4564-adc5-f4b93be8accd"): VCEK,
    uuid.UUID("a8074bc2-a25a-483e-aae6-39c045a0b8a1"): VLEK,
    uuid.UUID("4ab7b379-bbac-4fe4-a02f-05aef327c782"): ASK,
    uuid.UUID("c0b406a4-a803-4952-9743-3fb6014cd0ae"): ARK,
    uuid.UUID("92f81bc3-5811-4d3d-97ff-d19f88dc67ea"): CRL,
}
"""Entries of the host's certificate table (GHCB specification, document 56421, section 4.1.8.1)."""


@dataclass(frozen=True, slots=True)
class TsmReport:
    """The kernel's report.

    Attributes:
        provider: `sev_guest` or `tdx_guest`.
        report: the report or quote.
        auxiliary: on SEV-SNP the host's table of certificates, may be empty.
    """

    provider: str
    report: bytes
    auxiliary: bytes


def fetch_report(data: bytes, folder: Path = TSM_REPORTS) -> TsmReport:
    """Has the processor sign 64 bytes.

    Raises:
        AttestationError: this machine is not a confidential guest, or its kernel refuses.
    """
    if not folder.is_dir():
        raise AttestationError(
            f"there is no {folder}: this is no confidential guest, or configfs is not mounted; on SEV-SNP load the kernel "
            "module sev-guest, on TDX tdx-guest, and mount it with: mount -t configfs none /sys/kernel/config"
        )
    try:
        with _entry(folder) as entry:
            for _ in range(_TRIES):
                before = int((entry / "generation").read_text())
                (entry / "inblob").write_bytes(data)
                report = (entry / "outblob").read_bytes()
                auxiliary = _read_auxiliary(entry)
                if int((entry / "generation").read_text()) == before + 1:
                    return TsmReport((entry / "provider").read_text().strip(), report, auxiliary)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it answers with something else than a number"
        raise AttestationError(f"the kernel gives no report below {folder}: {why}") from None
    raise AttestationError(f"another program changes the request below {folder} all the time; no report could be had")


class SnpAttester:
    """Makes `sev-snp` evidence in a guest of AMD SEV-SNP.

    Args:
        certificates: folder with the files `vcek` and `ask` or `vlek` and `asvk`, `ark` and `crl` (DER or PEM), which
            supplement the host's table.
        folder: path of configfs-tsm.
    """

    kind = "sev-snp"

    def __init__(self, certificates: Path | None = None, folder: Path = TSM_REPORTS) -> None:
        self._certificates = certificates
        self._folder = folder

    def attest(self, statement: bytes) -> Evidence:
        """See `Attester.attest`."""
        given = _fetch_from(self._folder, "sev_guest", statement)
        extra = read_table(given.auxiliary) | self._read_certificates()
        missing = [name for name in _name_chain(given.report) if name not in extra]
        if missing:
            raise AttestationError(
                f"the host gives no certificates for {', '.join(missing)}; put them as files of these names into a folder and "
                "name it with --amd-certificates (AMD's key distribution service has them)"
            )
        return Evidence(self.kind, statement, given.report, extra)

    def _read_certificates(self) -> dict[str, bytes]:
        if self._certificates is None:
            return {}
        try:
            found = {name: self._certificates / name for name in (VCEK, ASK, VLEK, ASVK, ARK, CRL)}
            return {name: path.read_bytes() for name, path in found.items() if path.exists()}
        except OSError as error:
            raise AttestationError(f"cannot read the certificates in {self._certificates}: {error.strerror}") from None


class TdxAttester:
    """Makes `tdx` evidence in a trust domain of Intel TDX.

    Args:
        collateral: returns Intel's collateral for a quote, JSON; called for each report, because collateral expires.
        folder: path of configfs-tsm.
    """

    kind = "tdx"

    def __init__(self, collateral: Callable[[bytes], bytes], folder: Path = TSM_REPORTS) -> None:
        self._collateral = collateral
        self._folder = folder

    def attest(self, statement: bytes) -> Evidence:
        """See `Attester.attest`."""
        given = _fetch_from(self._folder, "tdx_guest", statement)
        return Evidence(self.kind, statement, given.report, {COLLATERAL: self._collateral(given.report)})


def read_table(table: bytes) -> dict[str, bytes]:
    """Returns the certificates in the host's table by the verifiers' names; unknown entries are omitted.

    Raises:
        AttestationError: the table is malformed.
    """
    found: dict[str, bytes] = {}
    for at in range(0, len(table) - _ENTRY.size + 1, _ENTRY.size):
        guid, offset, length = _ENTRY.unpack_from(table, at)
        if not any(guid):
            break
        if offset + length > len(table):
            raise AttestationError("the host's table of certificates is broken; give them with --amd-certificates")
        name = _CERTIFICATES.get(uuid.UUID(bytes=guid))
        if name is not None and length:
            found[name] = table[offset : offset + length]
    return found


def _fetch_from(folder: Path, provider: str, statement: bytes) -> TsmReport:
    given = fetch_report(report_data(statement), folder)
    if given.provider != provider:
        raise AttestationError(f"this machine's reports come from {given.provider!r}, not from {provider!r}")
    return given


def _name_chain(report: bytes) -> tuple[str, ...]:
    """Returns the certificates that a report needs."""
    try:
        return name_chain(read_report(report).signing_key)
    except EvidenceError as error:
        raise AttestationError(f"the kernel gives a report that no client would accept: {error.message}") from None


def _read_auxiliary(entry: Path) -> bytes:
    try:
        return (entry / "auxblob").read_bytes()
    except OSError:
        return b""  # TDX has none


@contextlib.contextmanager
def _entry(folder: Path) -> Iterator[Path]:
    entry = folder / f"cloister-{secrets.token_hex(8)}"
    entry.mkdir()
    try:
        yield entry
    finally:
        entry.rmdir()  # configfs removes its files too
