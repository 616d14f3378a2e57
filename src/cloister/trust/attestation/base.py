"""Protocols of attesters and verifiers, findings, and the client's policy. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final, Protocol

import msgspec

from cloister.trust.attestation.evidence import Evidence
from cloister.types.errors import CloisterError

MAX_CLOCK_SKEW_S = 300
"""Tolerance for a client's clock at the start of a validity period; there is none at its end, because the keys are destroyed by
then."""

STRICT_PROFILES = frozenset({"private", "paranoid"})
"""Profiles that refuse what cannot be checked."""


class AttestationError(CloisterError):
    """Evidence cannot be created here, or a check cannot run; the message says what is missing."""

    code = "attestation_failed"
    status = 503


class Outcome(StrEnum):
    """The outcome of one step."""

    PROVED = "proved"
    NOT_PROVED = "not proved"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One step of a verification.

    Attributes:
        slug: a stable name of the step, for tests and for `--json`.
        outcome: proved, not proved (neither proved nor disproved) or failed (refused).
        text: a full sentence for users, without user content.
    """

    slug: str
    outcome: Outcome
    text: str


class Findings:
    """The steps of a verification, in order."""

    def __init__(self, steps: Iterable[Finding] = ()) -> None:
        self._steps = list(steps)

    def prove(self, slug: str, text: str) -> None:
        """Adds a step that was proved."""
        self._steps.append(Finding(slug, Outcome.PROVED, text))

    def leave_open(self, slug: str, text: str) -> None:
        """Adds a step that is neither proved nor disproved."""
        self._steps.append(Finding(slug, Outcome.NOT_PROVED, text))

    def fail(self, slug: str, text: str) -> None:
        """Adds a failed step: the node is refused."""
        self._steps.append(Finding(slug, Outcome.FAILED, text))

    def check(self, slug: str, holds: bool, proved: str, failed: str) -> bool:
        """Adds a proved or a failed step, and returns whether it is proved."""
        if holds:
            self.prove(slug, proved)
        else:
            self.fail(slug, failed)
        return holds

    def doubt(self, policy: AttestationPolicy, slug: str, text: str) -> None:
        """Adds a step that could not be checked: failed under a strict policy, not proved otherwise."""
        if policy.strict:
            self.fail(slug, f"{text}; the profile {policy.profile} refuses what cannot be checked")
        else:
            self.leave_open(slug, text)

    def extend(self, others: Iterable[Finding]) -> None:
        """Adds the steps of another verification."""
        self._steps.extend(others)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def of(self, outcome: Outcome) -> list[Finding]:
        """Returns the steps with one outcome, in order."""
        return [step for step in self._steps if step.outcome is outcome]

    @property
    def accepted(self) -> bool:
        """Whether there are steps and none failed."""
        return bool(self._steps) and not self.of(Outcome.FAILED)

    @property
    def proved(self) -> bool:
        """Whether every step was proved."""
        return bool(self._steps) and all(step.outcome is Outcome.PROVED for step in self._steps)


class SnpFloor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The minimum security versions of an AMD platform that a client accepts (AMD's bulletins list them for each processor)."""

    boot_loader: int = 0
    tee: int = 0
    snp: int = 0
    microcode: int = 0


class GpuFloor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The oldest driver (such as 550.90.07) and VBIOS (such as 96.00.9F.00.01) of a GPU that a client accepts."""

    driver: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})*\Z")] = "0"
    vbios: Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Fa-f]{2}(\.[0-9A-Fa-f]{2})*\Z")] = "00"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestationPolicy:
    """A client's requirements for a node.

    Attributes:
        profile: the required privacy profile; any other is refused as a downgrade.
        kinds: accepted kinds of evidence besides `software`; `nitro` must be listed explicitly, because AWS is both attester
            and host.
        accept_software: whether evidence without hardware is accepted, as not proved.
        releases: accepted release digests; empty: the release is reported as unchecked.
        models: accepted model digests; empty: any, and reported.
        profile_digests: accepted digests of `profile`; empty: reported as unchecked.
        configuration: required configuration of the node, every entry; empty: any, and reported.
        hardening: names of measures that must be in force in at least one process, and missing in none.
        measurements: accepted values by register (`REGISTERS`), hex; other registers are unchecked.
        snp_providers: cloud providers whose key (VLEK) may sign for the chip, named as in AMD's certificate.
        snp_floor: see `SnpFloor`; None: reported as unchecked.
        tdx_statuses: Intel's names of TCB states that are good enough.
        gpu: whether a GPU with proved identity is required.
        gpu_floor: see `GpuFloor`; None: any that NVIDIA signed for.
        gpu_measurements: reference values by index of the measurement, hex; empty: those that NVIDIA signed (RIM files).
        revocation_max_age_s: maximum age of the newest revocation status of a GPU's certificates, seconds.
        post_quantum: whether X-Wing must be offered, by the gateway too; X25519 alone is refused then.

    Unchecked steps fail if `profile` is strict, and are reported as not proved otherwise.
    """

    profile: str = "private"
    kinds: frozenset[str] = frozenset({"sev-snp", "tdx"})
    accept_software: bool = False
    releases: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    profile_digests: frozenset[str] = frozenset()
    configuration: Mapping[str, str] = field(default_factory=dict)
    hardening: frozenset[str] = frozenset()
    measurements: Mapping[str, frozenset[str]] = field(default_factory=dict)
    snp_providers: frozenset[str] = frozenset()
    snp_floor: SnpFloor | None = None
    tdx_statuses: frozenset[str] = frozenset({"UpToDate"})
    gpu: bool = False
    gpu_floor: GpuFloor | None = None
    post_quantum: bool = False
    gpu_measurements: Mapping[int, frozenset[str]] = field(default_factory=dict)
    revocation_max_age_s: Annotated[int, msgspec.Meta(gt=0)] = 86_400

    @property
    def strict(self) -> bool:
        """Whether steps that cannot be checked fail."""
        return self.profile in STRICT_PROFILES


class Attester(Protocol):
    """Creates evidence on the attested machine."""

    kind: str

    def attest(self, statement: bytes) -> Evidence:
        """Returns evidence whose report carries `report_data(statement)`.

        Raises:
            AttestationError: this machine cannot attest; the message says what is missing.
        """


class Verifier(Protocol):
    """Checks the report of one kind of evidence; the statement's content is checked by `verify_evidence`."""

    kind: str

    def verify(self, evidence: Evidence, policy: AttestationPolicy, now: float) -> Findings:
        """Returns what the report proves.

        Args:
            now: Unix seconds at which certificates must be valid.

        Raises:
            AttestationError: the check cannot run, because a library is missing.
        """


# Measurement registers by name, as releases (`--launch NAME=HEX`) and policies (`measurements`) name them.
#
# Every register that a processor signs is checked by name, so none is skipped: a value without a reference is unchecked, which
# a strict profile refuses. Registers that the host sets, usually to zero, need no reference while they are zero.

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
"""Register names for which a release or a policy may give values."""


def check_register(
    findings: Findings, policy: AttestationPolicy, slug: str, name: str, value: bytes, label: str, *, may_be_zero: bool = False
) -> None:
    """Adds a step for whether a register has an accepted value.

    Args:
        findings: receives one step.
        policy: its `measurements` has the values.
        slug: slug of the step.
        name: name of the register, one of `REGISTERS`.
        value: as the processor signed it.
        label: the vendor's name of the register.
        may_be_zero: whether all zeros mean that it is unused and needs no reference.
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
            f"{label} is {value.hex()}, and there is no reference value; name it in the release "
            f"(cloister release make --launch {name}=HEX) or in the policy (measurements)",
        )
