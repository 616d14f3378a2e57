"""Measures a node at its start, and creates the statement for each of its keys."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from cloister.trust.attestation.base import AttestationError
from cloister.trust.attestation.configuration import find_differences
from cloister.trust.attestation.evidence import Statement
from cloister.trust.attestation.measuring import (
    encode_manifest,
    find_foreign,
    measure_code,
    measure_configuration,
    measure_loaded,
    measure_package,
    measure_profile,
    read_manifest,
)
from cloister.trust.attestation.software import SoftwareAttester
from cloister.trust.attestation.verify import HOST
from cloister.trust.transparency.release import Release

RELEASE_FILE: Final = "release.json"
MANIFEST_FILE: Final = "manifest.json"
_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that are constant while a node runs; see `Statement`.

    Attributes:
        launch: the registers that its release names, with their values, hex; none without a release.
    """

    release: str
    model: str
    profile: str
    profile_digest: str
    configuration: Mapping[str, str]
    capacity: int
    launch: Mapping[str, str] = field(default_factory=dict)

    def state(
        self,
        keys: bytes,
        not_before: int,
        not_after: int,
        checkpoint: str,
        hardening: Mapping[str, str],
        receipt_key: bytes = b"",
        unit_key: bytes = b"",
        unit_members: tuple[str, ...] = (),
    ) -> bytes:
        """Returns the statement for a key configuration, canonical JSON.

        Raises:
            EvidenceError: a field is out of range.
        """
        return Statement(
            release=self.release,
            model=self.model,
            profile=self.profile,
            profile_digest=self.profile_digest,
            hardening=dict(hardening),
            configuration=dict(self.configuration),
            keys=keys,
            capacity=self.capacity,
            not_before=not_before,
            not_after=not_after,
            checkpoint=checkpoint,
            receipt_key=receipt_key,
            unit_key=unit_key,
            unit_members=unit_members,
        ).encode()


def gather_facts(
    profile: str,
    model: Path,
    capacity: int,
    release: Path | None = None,
    beside: Mapping[str, Path] = MappingProxyType({}),
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Facts:
    """Measures this process, the model, the profile and the configuration, and compares them with a release.

    Args:
        profile: name of the active profile.
        model: path of the model.
        capacity: the node's weight when clients draw.
        release: folder with `release.json` and `manifest.json` written by `cloister release`; None states the digest of what is
            running, which no log has.
        beside: what is loaded in addition to the model, with its path (`measure_loaded`).
        settings: of the engine and its front (`configuration.describe_settings`).

    Raises:
        AttestationError: the measurement differs from the release; the message lists the differences.
    """
    measured = measure_code() | measure_package()  # including the engine's part of the package, which is not loaded here
    model_digest, profile_digest = measure_loaded(model, beside), measure_profile(profile)
    configuration = measure_configuration(settings, model, beside)
    if release is None:
        digest, launch = hashlib.sha256(encode_manifest(measured)).hexdigest(), {}
    else:
        matched = _match_release(release, measured, model_digest, profile, profile_digest, configuration)
        digest, launch = matched.digest, dict(matched.launch)
    return Facts(digest, model_digest, profile, profile_digest, configuration, capacity, launch)


def _match_release(
    folder: Path, measured: Mapping[str, str], model: str, profile: str, profile_digest: str, configuration: Mapping[str, str]
) -> Release:
    release, manifest = _read_release(folder)
    foreign = find_foreign(measured, manifest)
    if foreign:
        raise AttestationError(
            f"this is not release {release.number}: {_list_some(foreign)} differ from its manifest; "
            "install the release, or log one of what is installed"
        )
    wanted = (("model", release.model, model), ("profile", release.profile, profile))
    for what, published, found in (*wanted, ("rules of the profile", release.profile_digest, profile_digest)):
        if published != found:
            raise AttestationError(f"this is not release {release.number}: its {what} is {published}, and here it is {found}")
    if differences := find_differences(configuration, release.configuration):
        raise AttestationError(
            f"this is not release {release.number}: {_list_some(differences)}; start the node as the release was made, or make "
            "a release of this"
        )
    return release


def _list_some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def _read_release(folder: Path) -> tuple[Release, dict[str, str]]:
    try:
        encoded, manifest = (folder / RELEASE_FILE).read_bytes(), (folder / MANIFEST_FILE).read_bytes()
    except OSError as error:
        raise AttestationError(
            f"cannot read the release in {folder}: {error.strerror}; it has two files, {RELEASE_FILE} and "
            f"{MANIFEST_FILE}, made by cloister release"
        ) from None
    try:
        release = msgspec.json.decode(encoded, type=Release)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise AttestationError(f"{RELEASE_FILE} in {folder} is no release; copy it from where it was made") from None
    if hashlib.sha256(manifest).hexdigest() != release.files:
        raise AttestationError(f"the manifest in {folder} is not the one of the release beside it")
    return release, read_manifest(manifest)


def with_host(hardening: Mapping[str, str], kind: str) -> dict[str, str]:
    """Returns the measures plus an entry for the host: no measure excludes the host, but the processor may.

    Args:
        kind: kind of the evidence for this.
    """
    if kind == SoftwareAttester.kind:
        return {HOST: "missing: host not excluded", **hardening}
    return {**hardening, HOST: f"applied: the processor keeps the host out of this machine's memory ({kind})"}
