"""Reports of NVIDIA GPUs through their driver's library, NVML (`nvml.h`, section "Confidential Computing")."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from cloister.trust.attestation.base import AttestationError, Attester
from cloister.trust.attestation.evidence import Evidence, gpu_nonce
from cloister.trust.attestation.nvidia import MAX_GPUS, chain_extra, report_extra
from cloister.trust.attestation.revocation import encode_statuses
from cloister.trust.attestation.rim import MAX_RIMS, REVOCATION, rim_extra

LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0


class _Report(ctypes.Structure):
    _fields_ = (
        ("has_second", ctypes.c_uint),
        ("size", ctypes.c_uint),
        ("second_size", ctypes.c_uint),
        ("nonce", ctypes.c_ubyte * 0x20),
        ("report", ctypes.c_ubyte * 0x2000),
        ("second", ctypes.c_ubyte * 0x1000),
    )


class _Certificates(ctypes.Structure):
    _fields_ = (
        ("chain_size", ctypes.c_uint),
        ("attestation_size", ctypes.c_uint),
        ("chain", ctypes.c_ubyte * 0x1000),
        ("attestation", ctypes.c_ubyte * 0x1400),
    )


class Gpus(Protocol):
    """A source of reports."""

    def fetch(self, nonce: bytes) -> Iterable[tuple[bytes, bytes]]:
        """Returns report and certificates (PEM) of every GPU for a nonce of 32 bytes."""


class Nvml:
    """The GPUs of this machine.

    Args:
        library: loaded NVML; None loads it on demand.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library

    def fetch(self, nonce: bytes) -> list[tuple[bytes, bytes]]:
        """See `Gpus.fetch`.

        Raises:
            AttestationError: no driver, no GPU, or none in confidential mode.
        """
        library = self._library or _load()
        self._call(library, "nvmlInit_v2")
        try:
            count = ctypes.c_uint()
            self._call(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
            if not 0 < count.value <= MAX_GPUS:
                raise AttestationError(f"this machine has {count.value} GPUs of NVIDIA; evidence holds 1 to {MAX_GPUS}")
            return [self._fetch_one(library, number, nonce) for number in range(count.value)]
        finally:
            self._call(library, "nvmlShutdown")

    def _fetch_one(self, library: Any, number: int, nonce: bytes) -> tuple[bytes, bytes]:
        device = ctypes.c_void_p()
        self._call(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(number), ctypes.byref(device))
        certificates, report = _Certificates(), _Report()
        self._call(library, "nvmlDeviceGetConfComputeGpuCertificate", device, ctypes.byref(certificates))
        ctypes.memmove(report.nonce, nonce, len(report.nonce))
        self._call(library, "nvmlDeviceGetConfComputeGpuAttestationReport", device, ctypes.byref(report))
        return bytes(report.report[: report.size]), bytes(certificates.attestation[: certificates.attestation_size])

    def _call(self, library: Any, name: str, *arguments: Any) -> None:
        try:
            status = getattr(library, name)(*arguments)
        except AttributeError:
            raise AttestationError(f"NVIDIA's driver is too old: it has no {name}") from None
        if status != _SUCCESS:
            raise AttestationError(
                f"NVIDIA's driver answers {name} with error {status}; a GPU can be attested in confidential mode only "
                "(Hopper or later, `nvidia-smi conf-compute -f` says ON)"
            )


class GpuAttester:
    """Adds the reports of GPUs to the evidence of a processor.

    Args:
        processor: creates the evidence to which the reports are bound.
        gpus: default: those of this machine.
        collateral: folder for `read_collateral`, read for each report; None staples nothing.
    """

    def __init__(self, processor: Attester, gpus: Gpus | None = None, collateral: Path | None = None) -> None:
        self._processor = processor
        self._gpus = gpus or Nvml()
        self._collateral = collateral
        self.kind = processor.kind

    def attest(self, statement: bytes) -> Evidence:
        """See `Attester.attest`."""
        evidence = self._processor.attest(statement)
        extra = dict(evidence.extra)
        if self._collateral is not None:
            extra |= read_collateral(self._collateral)
        for number, (report, chain) in enumerate(self._gpus.fetch(gpu_nonce(evidence.report_data))):
            extra |= {report_extra(number): report, chain_extra(number): chain}
        return msgspec.structs.replace(evidence, extra=extra)


def read_collateral(folder: Path) -> dict[str, bytes]:
    """Returns NVIDIA's collateral as extras of evidence: RIM files (`*.swidtag`, `*.xml`), OCSP responses and CRLs (`*.ocsp`,
    `*.crl`, DER).

    Raises:
        AttestationError: it cannot be read, or has too many RIM files.
    """
    try:
        found = {path: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    except OSError as error:
        raise AttestationError(f"cannot read NVIDIA's collateral in {folder}: {error.strerror}") from None
    rims = [data for path, data in found.items() if path.suffix in (".swidtag", ".xml")]
    if len(rims) > MAX_RIMS:
        raise AttestationError(f"there are {len(rims)} RIM files in {folder}; evidence holds {MAX_RIMS}: keep those in use")
    responses, lists = ([data for path, data in found.items() if path.suffix == suffix] for suffix in (".ocsp", ".crl"))
    return {rim_extra(number): rim for number, rim in enumerate(rims)} | {REVOCATION: encode_statuses(responses, lists)}


def _load() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        raise AttestationError(f"there is no {LIBRARY}: NVIDIA's driver is not installed on this machine") from None
