"""Measurement registers by name, as releases (`--launch NAME=HEX`) and policies (`measurements`) name them. Pure.

Every register that a processor signs is judged under its name, so none is passed over: a value that nobody named is a doubt,
which a strict profile refuses. Registers that the host fills and most hosts leave empty may stay unnamed while they are zero.
"""

from __future__ import annotations

from typing import Final

from cloister.trust.attestation.base import AttestationPolicy, Findings

NUM_RTMRS: Final = 4
NUM_PCRS: Final = 32

REGISTERS: Final = frozenset(
    {
        "sev-snp",  # MEASUREMENT
        "sev-snp-host-data",
        "tdx",  # MRTD
        *(f"tdx-rtmr{number}" for number in range(NUM_RTMRS)),
        "tdx-mrconfigid",
        "tdx-mrowner",
        "tdx-mrownerconfig",
        *(f"nitro-pcr{number}" for number in range(NUM_PCRS)),
    }
)
"""Names that a release or a policy may give a value to."""


def check_register(
    findings: Findings, policy: AttestationPolicy, slug: str, name: str, value: bytes, label: str, *, may_be_zero: bool = False
) -> None:
    """Adds whether a register has a value that the release or the policy names.

    Args:
        findings: gets one step.
        policy: its `measurements` has the values.
        slug: of the step.
        name: of the register, one of `REGISTERS`.
        value: as the processor signed it.
        label: the register in its maker's words.
        may_be_zero: whether all zeros mean that nobody uses it, so that no name is needed.
    """
    allowed = policy.measurements.get(name, frozenset())
    if allowed:
        wanted = " or ".join(sorted(allowed))
        findings.check(
            slug,
            value.hex() in allowed,
            f"{label} is the published one",
            f"{label} is {value.hex() or 'not there'}, and the release or the policy names {wanted} ({name})",
        )
    elif may_be_zero and not any(value):
        findings.prove(slug, f"{label} is not used (zeros)")
    else:
        findings.doubt(
            policy,
            slug,
            f"{label} is {value.hex()}, and nobody named the right one; name it in the release "
            f"(cloister release make --launch {name}=HEX) or in the policy (measurements)",
        )
