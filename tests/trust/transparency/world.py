"""A log, three witnesses, a release key and a node, all real, in one directory."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from cloister.trust.attestation.evidence import Statement
from cloister.trust.attestation.software import SoftwareAttester
from cloister.trust.sealing import KeyRing
from cloister.trust.transparency.checks import VerifiedEpoch, View, believe, needed_paths
from cloister.trust.transparency.epoch import GatewayEntry, IssuerEntry
from cloister.trust.transparency.log import Log
from cloister.trust.transparency.membership import build_membership, membership_entry, sign_member
from cloister.trust.transparency.note import Kind, PrivateKey
from cloister.trust.transparency.publisher import Contents, Published, Publisher
from cloister.trust.transparency.release import Release, minimum_entry, release_entry
from cloister.trust.transparency.trust import Trust
from cloister.trust.transparency.witness import NearWitness, Witness

NOW = 1_790_000_000.0
MEMBERS = {"node": 1, "a": 1, "b": 1, "captured": 1}


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_release(number: int = 1, profile: str = "private") -> Release:
    names = ("wheel", "lock", "interpreter", "files", "model", "profile_digest")
    digests = {name: digest_of(f"{name} {number if name == 'wheel' else ''}") for name in names}
    launch, configuration = {"sev-snp": "ab" * 48}, {"setting quant": '"none"'}
    return Release(number=number, version="0.1.0", profile=profile, launch=launch, configuration=configuration, **digests)


@cache
def keys_of(name: str) -> bytes:
    """Key configurations of a node or gateway, always the same for one name."""
    return KeyRing(0.0).publish()


def member_key(name: str) -> PrivateKey:
    """The same key for the same name, so that evidence and memberships agree without passing keys around."""
    return PrivateKey(name, Kind.NOTE, hashlib.sha256(name.encode()).digest())


def make_evidence(
    release: Release, *, name: str = "node", now: float = NOW, life_s: int = 3600, capacity: int = 1, keys: bytes = b""
) -> bytes:
    statement = Statement(
        release=release.digest,
        model=release.model,
        profile=release.profile,
        profile_digest=release.profile_digest,
        configuration=release.configuration,
        hardening={},
        keys=keys or keys_of(name),
        capacity=capacity,
        not_before=int(now),
        not_after=int(now) + life_s,
    )
    return sign_member(member_key(name), SoftwareAttester().attest(statement.encode())).encode()


@dataclass
class World:
    """Everything that publishes; `now` is the one clock of all of it."""

    directory: Path
    now: float = NOW
    log_key: PrivateKey = field(default_factory=lambda: PrivateKey.generate("log.example", Kind.NOTE))
    release_key: PrivateKey = field(default_factory=lambda: PrivateKey.generate("release.example", Kind.NOTE))
    witness_keys: list[PrivateKey] = field(
        default_factory=lambda: [PrivateKey.generate(f"witness.example/{n}", Kind.COSIGNATURE) for n in range(3)]
    )

    members: dict[str, int] = field(default_factory=lambda: dict(MEMBERS))

    def __post_init__(self) -> None:
        self.log = Log.create(self.directory / "log", self.log_key)
        self.witnesses = [
            Witness(self.directory / f"witness{n}", key, [self.log.key]) for n, key in enumerate(self.witness_keys)
        ]
        self.trust = Trust(self.log.key, tuple(w.key for w in self.witnesses), (self.release_key.public,))
        self.publisher = self.make_publisher(self.log)
        self.release = make_release()
        self.log_release(self.release)
        if self.members:
            self.log_members(1, self.members)

    def make_publisher(self, log: Log, trust: Trust | None = None) -> Publisher:
        near = [NearWitness(witness, lambda: self.now) for witness in self.witnesses]
        return Publisher(log, trust or self.trust, near)

    def log_release(self, release: Release) -> None:
        source = {"repository": "https://example.com/cloister", "revision": "ab" * 20}
        self.log.append([release_entry(release, source=source, builder="urn:example:builder", keys=[self.release_key])])

    def log_minimum(self, number: int) -> None:
        self.log.append([minimum_entry(number, [self.release_key])])

    def log_members(self, number: int, capacities: dict[str, int], after_s: float = 0.0) -> None:
        keys = {member_key(name).public: capacity for name, capacity in capacities.items()}
        membership = build_membership(number, self.log.key.name, int(self.now + after_s), keys)
        self.log.append([membership_entry(membership, [self.release_key])])

    def contents(self, **changes: object) -> Contents:
        contents = Contents(
            gateway=GatewayEntry("https://gateway.example", keys_of("gateway")),
            issuers=(IssuerEntry("https://issuer.example", b"issuer key", 0),),
            evidence=(make_evidence(self.release, now=self.now),),
            release=self.release.digest,
            profile=self.release.profile,
        )
        return replace(contents, **changes)  # type: ignore[arg-type]

    def publish(self, **changes: object) -> Published:
        return asyncio.run(self.publisher.publish(self.contents(**changes), self.now))

    def fetch(self, bundle: bytes, view: View) -> dict[str, bytes]:
        found = {path: self.log.resource(path) for path in needed_paths(bundle, self.trust, view)}
        return {path: resource[0] for path, resource in found.items() if resource}

    def believe(self, bundle: bytes, view: View | None = None, trust: Trust | None = None) -> VerifiedEpoch:
        view = view or View()
        return believe(bundle, trust or self.trust, view, self.fetch(bundle, view), self.now)
