"""Real evidence of real machines, from `tests/vectors/attestation`."""

from __future__ import annotations

import base64
import json
from pathlib import Path

_FOLDER = Path(__file__).parent / "vectors" / "attestation"
_END = b"-----END CERTIFICATE-----\n"

LAUNCH = _FOLDER / "launch"
"""Ends of firmware files, and what guests with them measure."""

NOW = 1_752_000_000
"""A moment at which all of it holds, Unix seconds."""


def snp_report() -> bytes:
    """A report of version 2 of a Milan machine, whose guest allows DEBUG."""
    return (_FOLDER / "sev-snp" / "attestation.bin").read_bytes()


def snp_certificates() -> dict[str, bytes]:
    """Its VCEK, ASK and ARK as extras of evidence."""
    ask, ark, _ = (_FOLDER / "sev-snp" / "milan.testcer").read_bytes().replace(b"\r", b"").split(_END)
    return {"vcek": (_FOLDER / "sev-snp" / "vcek.testcer").read_bytes(), "ask": ask + _END, "ark": ark + _END}


def td_quote() -> bytes:
    """A quote that holds against `td_collateral` at `NOW`."""
    return (_FOLDER / "tdx" / "tdx_quote").read_bytes()


def td_quote_without_sept_ve() -> bytes:
    """A quote of another machine, without SEPT_VE_DISABLE and without collateral."""
    return (_FOLDER / "tdx" / "tdx_prod_quote_SPR_E4.dat").read_bytes()


def td_collateral() -> bytes:
    return (_FOLDER / "tdx" / "tdx_quote_collateral.json").read_bytes()


RIM_NOW = 1_704_067_200
"""A moment at which `vbios_rim` holds, Unix seconds: 2024."""


def vbios_rim() -> bytes:
    """NVIDIA's reference measurements of the VBIOS that `old_gpu_evidence` runs."""
    return (_FOLDER / "nvidia" / "1010_0200_882_96005E0001_PROD.swidtag").read_bytes()


def gpu_evidence() -> tuple[bytes, bytes, bytes]:
    """A report of an H100 with a new driver, its certificates, and the nonce that it was asked with."""
    (evidence,) = json.loads((_FOLDER / "nvidia" / "hopper_evidence.json").read_bytes())
    decode = base64.b64decode
    return decode(evidence["evidence"]), decode(evidence["certificate"]), bytes.fromhex(evidence["nonce"])


def old_gpu_evidence() -> tuple[bytes, bytes]:
    """A report of an H100 with a driver that says no FWID, and its certificates."""
    report = (_FOLDER / "nvidia" / "hopperAttestationReport.txt").read_text()
    return bytes.fromhex(report), (_FOLDER / "nvidia" / "hopperCertChain.txt").read_bytes()
