"""The protocols of attesters and verifiers, what a verifier found, and what a client accepts. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final, Protocol

import msgspec

from cloister.trust.attestation.evidence import Evidence
from cloister.types.errors import CloisterError

MAX_CLOCK_SKEW_S = 300
"""How far behind a client's clock may be when something begins; an end has no such room, for the keys are gone by then."""

STRICT_PROFILES = frozenset({"private", "paranoid"})
"""Profiles in which what cannot be checked is refused."""


class AttestationError(CloisterError):
    """Evidence cannot be made here, or a check cannot be run; the message says what is missing."""

    code = "attestation_failed"
    status = 503


class Outcome(StrEnum):
    """What became of one step."""

    PROVED = "proved"
    NOT_PROVED = "not proved"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One step of a verification.

    Attributes:
        slug: a stable name of the step, for tests and for `--json`.
        outcome: proved, not proved (nothing speaks against it, nothing proves it) or failed (refused).
        text: for a person, a whole sentence; free of what a user sent.
    """

    slug: str
    outcome: Outcome
    text: str


class Findings:
    """Steps in the order in which they were taken."""

    def __init__(self, steps: Iterable[Finding] = ()) -> None:
        self._steps = list(steps)

    def prove(self, slug: str, text: str) -> None:
        """Adds a step that was proved."""
        self._steps.append(Finding(slug, Outcome.PROVED, text))

    def leave_open(self, slug: str, text: str) -> None:
        """Adds a step that nothing proves and nothing speaks against."""
        self._steps.append(Finding(slug, Outcome.NOT_PROVED, text))

    def fail(self, slug: str, text: str) -> None:
        """Adds a step that speaks against the node: it is refused."""
        self._steps.append(Finding(slug, Outcome.FAILED, text))

    def check(self, slug: str, holds: bool, proved: str, failed: str) -> bool:
        """Adds a proved or a failed step, and returns whether it holds."""
        if holds:
            self.prove(slug, proved)
        else:
            self.fail(slug, failed)
        return holds

    def doubt(self, policy: AttestationPolicy, slug: str, text: str) -> None:
        """Adds a step that could not be checked: refused by a strict policy, left open by another."""
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
        """Whether something was checked and nothing failed."""
        return bool(self._steps) and not self.of(Outcome.FAILED)

    @property
    def proved(self) -> bool:
        """Whether every step was proved, none left open."""
        return bool(self._steps) and all(step.outcome is Outcome.PROVED for step in self._steps)


class SnpFloor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The least security versions of an AMD platform that a client accepts (AMD's bulletins name them for each processor)."""

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
    """What a client accepts of a node.

    Attributes:
        profile: the privacy profile that the client wants; another one is a downgrade, refused.
        kinds: the kinds of evidence accepted beside `software`; `nitro` only where it is named, for AWS both vouches and hosts.
        accept_software: whether evidence without hardware is let through, as not proved.
        releases: release digests that may run; empty: the release is reported as unchecked.
        models: model digests that may be served; empty: any, said so.
        profile_digests: digests of `profile` that are known; empty: reported as unchecked.
        configuration: what the node's configuration has to be, every entry; empty: any, said so.
        hardening: names of measures that must be in force in a process at least, and missing in none.
        measurements: by register (`REGISTERS`), the values that may run, hex; other registers are unchecked.
        snp_providers: cloud providers whose own key (VLEK) may sign for the chip, as AMD's certificate calls them.
        snp_floor: see `SnpFloor`; None: reported as unchecked.
        tdx_statuses: Intel's names of TCB states that are good enough.
        gpu: whether a GPU with proved identity must be there.
        gpu_floor: see `GpuFloor`; None: any that NVIDIA signed for.
        gpu_measurements: reference values by index of the measurement, hex; empty: those that NVIDIA signed (RIM files).
        revocation_max_age_s: how old the newest word on a GPU's certificates may be, seconds.
        post_quantum: whether X-Wing must be offered, by the gateway too; X25519 alone is refused then.

    What is unchecked is refused when `profile` is strict, and told as not proved otherwise.
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
        """Whether what cannot be checked is refused."""
        return self.profile in STRICT_PROFILES


class Attester(Protocol):
    """Makes evidence on the machine that it speaks for."""

    kind: str

    def attest(self, statement: bytes) -> Evidence:
        """Returns evidence whose report carries `report_data(statement)`.

        Raises:
            AttestationError: this machine cannot; the message says what it lacks.
        """


class Verifier(Protocol):
    """Checks the report of one kind of evidence; what the statement says is checked by `verify_evidence`."""

    kind: str

    def verify(self, evidence: Evidence, policy: AttestationPolicy, now: float) -> Findings:
        """Returns what the report proves.

        Args:
            now: Unix seconds at which certificates must hold.

        Raises:
            AttestationError: the check cannot be run at all, a library is missing.
        """


# Measurement registers by name, as releases (`--launch NAME=HEX`) and policies (`measurements`) name them.
#
# Every register that a processor signs is judged under its name, so none is passed over: a value that nobody named is a doubt,
# which a strict profile refuses. Registers that the host fills and most hosts leave empty may stay unnamed while they are
# zero.

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
