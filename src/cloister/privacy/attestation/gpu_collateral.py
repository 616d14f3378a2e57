"""What NVIDIA signed beside a GPU's report: reference measurements, and whether certificates were revoked. No I/O, no clock.

It travels in the extras `gpu-rim-N` and `gpu-revocation`, once for all GPUs of a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cloister.privacy.attestation.base import AttestationPolicy, Findings
from cloister.privacy.attestation.evidence import EvidenceError
from cloister.privacy.attestation.gpu_report import GpuReport
from cloister.privacy.attestation.revocation import NO_STATUSES, Statuses, check_revocation, read_statuses
from cloister.privacy.attestation.rim import RIM_ROOTS, Rim, verify_rim

MAX_RIMS: Final = 8
REVOCATION: Final = "gpu-revocation"
_NVDEC0_INDEX: Final = 36


def rim_extra(number: int) -> str:
    """Returns the name of the extra that holds reference measurements `number`, from 0."""
    return f"gpu-rim-{number}"


@dataclass(frozen=True, slots=True)
class GpuCollateral:
    """Collateral whose signatures were checked, but for the statuses, which are checked against a chain.

    Attributes:
        rims: reference measurements.
        statuses: OCSP responses and CRLs.
    """

    rims: tuple[Rim, ...] = ()
    statuses: Statuses = NO_STATUSES


NO_COLLATERAL: Final = GpuCollateral()


def verify_collateral(
    findings: Findings, extra: Mapping[str, bytes], policy: AttestationPolicy, now: float, roots: frozenset[str] = RIM_ROOTS
) -> GpuCollateral:
    """Returns what evidence has of NVIDIA, and adds whether NVIDIA signed it.

    Args:
        findings: gets the steps.
        extra: of the evidence.
        policy: one that names the values itself needs no reference measurements.
        now: Unix seconds.
        roots: SHA-256 of the root keys of reference measurements that are trusted, hex.

    Raises:
        AttestationError: there are reference measurements, and signxml is not installed.
    """
    statuses = NO_STATUSES
    try:
        statuses = read_statuses(extra.get(REVOCATION, b""))
    except EvidenceError as error:
        findings.fail("gpu-revocation", error.message)
    rims: list[Rim] = []
    for data in (extra[rim_extra(number)] for number in range(MAX_RIMS) if rim_extra(number) in extra):
        rim = None if policy.gpu_measurements else verify_rim(findings, data, roots, now)
        if rim is not None:
            check_revocation(findings, policy, rim.chain, statuses, now, "rim-revocation")
            rims.append(rim)
    return GpuCollateral(tuple(rims), statuses)


def check_measurements(findings: Findings, report: GpuReport, rims: tuple[Rim, ...], policy: AttestationPolicy) -> None:
    """Adds whether a GPU measures what the policy names, or else what NVIDIA signed for its driver and its VBIOS."""
    wanted = policy.gpu_measurements
    if not wanted:
        chosen = [_choose(rims, version) for version in (report.driver, report.vbios)]
        missing = [
            f"{what} {version}"
            for what, version, rim in zip(("driver", "VBIOS"), (report.driver, report.vbios), chosen, strict=True)
            if rim is None
        ]
        if missing:
            findings.doubt(
                policy,
                "gpu-measurement",
                "GPU measurement unchecked: the evidence has no reference measurements of NVIDIA for "
                f"{' and '.join(missing)}; have the node staple their RIM files (--nvidia-collateral)",
            )
            return
        driver, vbios = (rim.measurements for rim in chosen if rim is not None)
        if driver.keys() & vbios.keys():
            both = ", ".join(map(str, sorted(driver.keys() & vbios.keys())))
            findings.fail("gpu-measurement", f"the reference measurements of driver and VBIOS both name index {both}")
            return
        wanted = {**driver, **vbios}
        if not report.has_nvdec:
            wanted.pop(_NVDEC0_INDEX, None)
    wrong = [index for index, values in sorted(wanted.items()) if report.measurements.get(index, b"").hex() not in values]
    findings.check(
        "gpu-measurement",
        not wrong,
        f"the GPU measures what was published ({len(wanted)} of {len(report.measurements)} values)",
        f"the GPU measures something else than was published, at index {', '.join(map(str, wrong))}",
    )


def _choose(rims: tuple[Rim, ...], version: str) -> Rim | None:
    return next((rim for rim in rims if rim.version.upper() == version.upper()), None)
