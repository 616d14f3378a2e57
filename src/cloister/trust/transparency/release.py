"""Releases: digests logged with signed provenance, the lock file of dependencies, and revocations. No I/O, no clock."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from cloister.trust.transparency.dsse import (
    IN_TOTO,
    PROVENANCE,
    Envelope,
    make_provenance,
    open_envelope,
    read_statement,
    seal_envelope,
)
from cloister.trust.transparency.epoch import Count, Hex, Name
from cloister.trust.transparency.note import PrivateKey, PublicKey
from cloister.trust.transparency.refusal import Reason, TransparencyError
from cloister.types.errors import ConfigError

RELEASE_PREFIX = b"cloister release v1\n"
MINIMUM_PREFIX = b"cloister minimum release v1\n"
MINIMUM_TYPE = "application/vnd.cloister.minimum-release+json"
RELEASE_SUBJECT = "release.json"
BUILD_TYPE = "urn:cloister:build:wheel:v1"

_T = TypeVar("_T")
Entry = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]{1,512}\Z")]
Measurement = Annotated[str, Meta(pattern=r"^[0-9a-f]{64,128}\Z")]


class Release(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parts of a node; every digest is SHA-256 in hex.

    Attributes:
        number: increasing; a minimum release revokes all lower ones.
        version: the package's version.
        wheel: the wheel that the build reproduces.
        lock: the lock file, which names every dependency with its digests.
        interpreter: the Python executable.
        files: the manifest of every file that a node maps, stored with the log under this digest.
        model: the model's digest, as in a node's statement.
        profile: the privacy profile's name.
        profile_digest: digest of that profile's rules, as in a node's statement.
        configuration: every file that affects answers and every setting, as in a node's statement.
        launch: measurements of the machine image by register (`sev-snp`, `tdx`, `tdx-rtmr0`, `nitro-pcr0`, ...), in hex; empty
            without such hardware.
    """

    number: Annotated[int, Meta(ge=1, lt=2**53)]
    version: Name
    wheel: Hex
    lock: Hex
    interpreter: Hex
    files: Hex
    model: Hex
    profile: Name
    profile_digest: Hex
    configuration: Annotated[dict[Entry, Entry], Meta(max_length=1024)] = {}
    launch: dict[Name, Measurement] = {}

    def encode(self) -> bytes:
        """Canonical JSON."""
        return msgspec.json.encode(self, order="sorted")

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hex: identifies this release in epochs and statements."""
        return hashlib.sha256(self.encode()).hexdigest()


class ReleaseEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """The log's entry for a release.

    Attributes:
        release: the document.
        provenance: DSSE envelope of an in-toto statement, one of whose subjects is the document's digest.
    """

    release: Release
    provenance: Envelope


class MinimumRelease(Struct, frozen=True, forbid_unknown_fields=True):
    """Revokes every release with a smaller number."""

    minimum: Count


def check_release(release: Release) -> None:
    """Checks that every field is in range, which the constructor does not.

    Raises:
        TransparencyError: one is not, such as a digest that is not 64 hex digits.
    """
    _decode(release.encode(), b"", Release)


def release_entry(release: Release, *, source: Mapping[str, Any], builder: str, keys: Iterable[PrivateKey]) -> bytes:
    """The log's entry for a release, with provenance signed by the release keys.

    Args:
        release: the document.
        source: source of the code, for `externalParameters` of SLSA provenance: repository, revision.
        builder: URI of the builder.
        keys: release keys.

    Raises:
        TransparencyError: a field of the document is out of range.
    """
    check_release(release)
    subjects = {
        RELEASE_SUBJECT: release.digest,
        "wheel": release.wheel,
        "manifest": release.files,
        "model": release.model,
        "profile": release.profile_digest,
    }
    dependencies = [
        {"name": name, "digest": {"sha256": digest}}
        for name, digest in (("lock", release.lock), ("python", release.interpreter))
    ]
    definition = {"buildType": BUILD_TYPE, "externalParameters": dict(source), "resolvedDependencies": dependencies}
    envelope = seal_envelope(IN_TOTO, make_provenance(subjects, definition, builder), keys)
    return RELEASE_PREFIX + msgspec.json.encode(ReleaseEntry(release, envelope), order="sorted")


def minimum_entry(minimum: int, keys: Iterable[PrivateKey]) -> bytes:
    """The log's entry that revokes every release below `minimum`."""
    payload = msgspec.json.encode(MinimumRelease(minimum), order="sorted")
    return MINIMUM_PREFIX + msgspec.json.encode(seal_envelope(MINIMUM_TYPE, payload, keys), order="sorted")


def read_release(entry: bytes, keys: Iterable[PublicKey]) -> Release:
    """Reads a release's entry.

    Raises:
        TransparencyError: it is not a release, not signed by one of the keys, or its provenance belongs to another release.
    """
    logged = _decode(entry, RELEASE_PREFIX, ReleaseEntry)
    statement = read_statement(open_envelope(logged.provenance, IN_TOTO, keys))
    digests = [subject.digest.get("sha256") for subject in statement.subject if subject.name == RELEASE_SUBJECT]
    if statement.predicate_type != PROVENANCE or digests != [logged.release.digest]:
        raise TransparencyError(Reason.WRONG_RELEASE, "the provenance is not of this release")
    return logged.release


def read_minimum(entry: bytes, keys: Iterable[PublicKey]) -> int:
    """Reads the number below which releases are revoked.

    Raises:
        TransparencyError: it is not such an entry, or not signed by one of the keys.
    """
    payload = open_envelope(_decode(entry, MINIMUM_PREFIX, Envelope), MINIMUM_TYPE, keys)
    return _decode(payload, b"", MinimumRelease).minimum


def _decode(entry: bytes, prefix: bytes, kind: type[_T]) -> _T:
    if not entry.startswith(prefix):
        raise TransparencyError(Reason.MALFORMED, f"the entry does not begin with {prefix.decode().strip()}")
    try:
        return msgspec.json.decode(entry.removeprefix(prefix), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransparencyError(Reason.MALFORMED, f"an entry of the log cannot be read: {error}") from None


# The lock file of a release: each dependency's version and the digest of its installed file. No I/O.
#
# It is a requirements file with hashes, created from pip's installation report. Every pip (and uv) can install from it and
# refuses other bytes (`--require-hashes`), while `pylock.toml` (PEP 751) is not widely supported and experimental in pip. `pip
# freeze` has no digests: installed files do not identify their archive.


_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\Z")
_VERSION = re.compile(r"[A-Za-z0-9.!+_-]+\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


class _Archive(Struct):
    hashes: dict[str, str] = {}


class _Download(Struct):
    archive_info: _Archive | None = None


class _Metadata(Struct):
    name: str
    version: str


class _Item(Struct):
    download_info: _Download
    metadata: _Metadata


class _Report(Struct):
    install: list[_Item]


def make_lock(report: bytes) -> str:
    """Returns the lock file's text, without this package: its wheel has its own digest in the release.

    Args:
        report: output of `pip install --dry-run --ignore-installed --report - WHEEL`.

    Raises:
        ConfigError: the report cannot be read, or an item in it has no SHA-256, such as a directory or a repository.
    """
    try:
        items = msgspec.json.decode(report, type=_Report).install
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"pip's report cannot be read ({error}); a newer pip writes one: pip install --upgrade pip") from None
    lines: list[str] = []
    for item in items:
        name, version = re.sub(r"[-_.]+", "-", item.metadata.name).lower(), item.metadata.version
        if name == "cloister":
            continue
        digest = (item.download_info.archive_info or _Archive()).hashes.get("sha256", "")
        if not (_NAME.match(name) and _VERSION.match(version) and _SHA256.match(digest)):
            raise ConfigError(
                f"{name} {version} has no SHA-256 of one file, so it cannot be verified; install it from an index"
            )
        lines.append(f"{name}=={version} --hash=sha256:{digest}\n")
    return "".join(sorted(lines))
