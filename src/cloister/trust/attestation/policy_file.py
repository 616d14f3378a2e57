"""A client's policy as a small JSON file: the fields of `AttestationPolicy`, each optional."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

import msgspec

from cloister.trust.attestation.base import REGISTERS, AttestationPolicy
from cloister.trust.attestation.verify import VERIFIERS
from cloister.types.errors import ConfigError

_HEX = re.compile(r"[0-9a-f]+\Z")


def read_policy(path: Path) -> AttestationPolicy:
    """Reads a policy.

    Raises:
        ConfigError: it cannot be read, or has an unknown field or an invalid digest.
    """
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the policy {path}: {error.strerror}", param="policy") from None
    return parse_policy(data)


def parse_policy(data: bytes) -> AttestationPolicy:
    """Reads the file's content.

    Raises:
        ConfigError: see `read_policy`.
    """
    known = {field.name for field in fields(AttestationPolicy)}
    try:
        unknown = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).keys() - known
        if unknown:  # a requirement with a misspelled name must not be ignored
            raise ConfigError(f"the policy has no field {min(unknown)}; it has {', '.join(sorted(known))}", param="policy")
        policy = msgspec.json.decode(data, type=AttestationPolicy)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the policy cannot be read: {error}", param="policy") from None
    if not all(map(_HEX.match, _digests(policy))):
        raise ConfigError("a digest or measurement of the policy is not in lower-case hex", param="policy")
    strange = policy.kinds - VERIFIERS.keys()
    if strange:
        raise ConfigError(
            f"the policy accepts the kind {min(strange)}; there are {', '.join(sorted(VERIFIERS))}", param="policy"
        )
    foreign = policy.measurements.keys() - REGISTERS
    if foreign:
        raise ConfigError(
            f"the policy's measurements name {min(foreign)}, which is no register; there are {', '.join(sorted(REGISTERS))}",
            param="policy",
        )
    return policy


def with_demands(policy: AttestationPolicy, *, profile: str | None = None, accept_software: bool = False) -> AttestationPolicy:
    """Returns the policy with the command line's options applied."""
    return replace(policy, profile=profile or policy.profile, accept_software=accept_software or policy.accept_software)


def _digests(policy: AttestationPolicy) -> Iterable[str]:
    for listed in (policy.releases, policy.models, policy.profile_digests):
        yield from listed
    for by_name in (policy.measurements, policy.gpu_measurements):
        for values in by_name.values():
            yield from values
