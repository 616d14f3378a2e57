"""Builds a node's evidence from its settings (the attester, the measured facts, the source of the log checkpoint), and keeps it
current."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from cloister.private.unit.membership import UnitListing, UnitSide
from cloister.private.unit.peer_verification import PeerVerifier
from cloister.private.unsealing import Unsealer
from cloister.trust.attestation import AttestationError, AttestationPolicy, Attester
from cloister.trust.attestation.evidence import MAX_LIFE_S, Evidence
from cloister.trust.attestation.node import Facts, gather_facts, with_host
from cloister.trust.attestation.policy_file import read_policy
from cloister.trust.attestation.process import AttesterBoot, RemoteAttester, make_attester, open_pair
from cloister.trust.attestation.software import SoftwareAttester
from cloister.trust.attestation.tsm import TdxAttester
from cloister.trust.attestation.unit import member_extra
from cloister.trust.sealing import NODE_KEY_OVERLAP_S
from cloister.trust.transparency.files import read_key
from cloister.trust.transparency.membership import sign_member
from cloister.trust.transparency.note import PrivateKey
from cloister.types.config import ServerConfig, parse_unit_members
from cloister.types.errors import CloisterError, ConfigError
from cloister.types.logs import describe

LOOK_EVERY_S: Final = 5.0
BROKEN: Final = "the part of this node that renews its evidence has failed; start the node again"

_logger = logging.getLogger(__name__)


class MemberAttester:
    """An attester whose evidence is also signed with a member key.

    Args:
        attester: produces the evidence for the statement.
        key: the member key, which the membership lists.

    Attributes:
        public: its public part.
    """

    def __init__(self, attester: Attester, key: PrivateKey) -> None:
        self._attester = attester
        self._key = key
        self.kind = attester.kind
        self.public = key.public

    def attest(self, statement: bytes) -> Evidence:
        """See `Attester.attest`."""
        return sign_member(self._key, self._attester.attest(statement))


ATTESTER_MODULE: Final = "cloister.trust.attestation.process"
MAX_CHECKPOINT_BYTES: Final = 16_384

Spawn = Callable[[str, socket.socket], object]
"""Starts a module in a separate process, which inherits the socket."""


@dataclass(frozen=True, slots=True)
class Attesting:
    """The operator's settings for evidence; paths as given.

    Attributes:
        boot: which attester.
        release: release directory; None states what is running.
        log_checkpoint: file with the newest witnessed checkpoint; None omits it.
        capacity: the node's weight when clients draw a node.
        member_key: file with this node's member key; None: the node is not a member, and no client draws it.
        unit_policy: file with the operator's policy for other machines of the unit; None: none.
    """

    boot: AttesterBoot
    release: str | None = None
    log_checkpoint: str | None = None
    capacity: int = 1
    member_key: str | None = None
    unit_policy: str | None = None

    @property
    def uses_hardware(self) -> bool:
        """Whether an attester needs a process with write access to the kernel's report interface."""
        return self.boot.kind != SoftwareAttester.kind or self.boot.gpus

    @property
    def folders(self) -> tuple[Path, ...]:
        """Directories that the node reads."""
        named = (self.release, self.boot.certificates, self.boot.gpu_collateral)
        return tuple(Path(path).expanduser() for path in named if path is not None)

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that the node reads. It re-reads the first two periodically, so they may be replaced."""
        named = (self.log_checkpoint, self.boot.collateral, self.member_key, self.unit_policy)
        return tuple(Path(path).expanduser() for path in named if path is not None)


def read_attesting(front: ServerConfig) -> Attesting:
    """Builds the settings from command-line options.

    Raises:
        ConfigError: a setting is missing that another one needs.
    """
    if front.attester == TdxAttester.kind and front.intel_collateral is None:
        raise ConfigError("evidence of TDX needs Intel's collateral; name its file", param="intel_collateral")
    if front.nvidia_collateral is not None and not front.attest_gpus:
        raise ConfigError("NVIDIA's collateral is for evidence of GPUs; add --attest-gpus", param="nvidia_collateral")
    makers = front.amd_certificates, front.intel_collateral, front.nvidia_collateral
    boot = AttesterBoot(front.attester, front.attest_gpus, *makers)
    num_engines = front.replicas * (1 + len(parse_unit_members(front.unit_members)))
    capacity = front.node_capacity or num_engines
    return Attesting(boot, front.release, front.log_checkpoint, capacity, front.member_key, front.unit_policy)


def check_prefixes(release_prefixes: str | None, model: Path) -> None:
    """Refuses shared prompts that the model's digest does not cover.

    A party that could choose such prompts could guess other users' prompts from response times.

    Raises:
        ConfigError: their file is outside the model's directory.
    """
    if release_prefixes is None:
        return
    path = Path(release_prefixes).expanduser().absolute()
    if not model.is_dir() or path.is_symlink() or path.parent.resolve() != model.resolve():
        raise ConfigError(
            "a sealed node's release prefixes have to lie in the model's directory, whose digest binds them; put the file "
            "there, and make the release with it",
            param="release_prefixes",
        )


async def open_announcer(
    attesting: Attesting,
    profile: str,
    model: Path,
    unsealer: Unsealer,
    started_s: float,
    hardening: Callable[[], Mapping[str, str]],
    spawn: Spawn | None = None,
    beside: Mapping[str, Path] = MappingProxyType({}),
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Announcer:
    """Measures the node and requests one quote, to check that the hardware can attest it.

    Args:
        profile: name of the profile in force.
        model: path of the model.
        started_s: no key is older than this, Unix seconds.
        hardening: returns the outcome of each measure in each process.
        spawn: starts a process for the attester when this process has no write access; None: call it in this process.
        beside: what is loaded in addition to the model, with its path (`measure_loaded`).
        settings: of the engine and its HTTP front (`describe_settings`).

    Raises:
        AttestationError: the measurement differs from the release, or the hardware cannot attest; the message says why.
        ConfigError: the member's key cannot be read, or other users can; or the unit's policy cannot be read.
    """
    release = None if attesting.release is None else Path(attesting.release).expanduser()
    facts = await asyncio.to_thread(gather_facts, profile, model, attesting.capacity, release, beside, settings)
    key = None if attesting.member_key is None else await asyncio.to_thread(read_key, Path(attesting.member_key))
    attester = _open_attester(attesting, spawn)
    announcer = Announcer(
        unsealer,
        attester if key is None else MemberAttester(attester, key),
        facts,
        started_s,
        hardening,
        lambda: read_checkpoint(attesting.log_checkpoint),
        unit_policy=None if attesting.unit_policy is None else read_policy(Path(attesting.unit_policy)),
    )
    try:
        await announcer.rehearse()
    except BaseException:
        if isinstance(attester, RemoteAttester):
            attester.close()
        raise
    return announcer


def read_checkpoint(path: str | None) -> str:
    """Returns the checkpoint in a file; empty if no file is configured.

    Raises:
        AttestationError: the file cannot be read, or holds no checkpoint.
    """
    if path is None:
        return ""
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(MAX_CHECKPOINT_BYTES + 1)
        if len(content) <= MAX_CHECKPOINT_BYTES:
            return content.decode()
    except OSError as error:
        raise AttestationError(f"cannot read the log's checkpoint in {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        pass
    raise AttestationError(f"{path} is no checkpoint of a log")


def _open_attester(attesting: Attesting, spawn: Spawn | None) -> Attester:
    if spawn is None or not attesting.uses_hardware:
        return make_attester(attesting.boot)
    near, far = open_pair()
    with far:
        spawn(ATTESTER_MODULE, far)
    return RemoteAttester(near, attesting.boot)


# Keeps a node's evidence current: requests a new document for each new key.
# Evidence is bound to one key and expires with it, or earlier, with the evidence of a machine of the unit; it is made again
# when that machine has shown newer evidence. While a new document is being produced, the document of the previous key is
# served: that key still opens requests. Expired evidence is never served.
class Announcer:
    """Requests evidence from the attester and serves it.

    Args:
        unsealer: holds the node's keys.
        attester: requests a quote from the hardware; this may take seconds, so it runs in a thread.
        facts: fields of the statement in addition to the key and the hardening.
        hardening: returns the outcome of each measure; called for each statement, because some measures are applied late.
        started_s: earliest time at which the first key can have been created, Unix seconds.
        read_checkpoint: returns the latest witnessed checkpoint of the log, empty if there is none.
        now: returns Unix seconds.
        unit_policy: what the operator accepts of other machines of the unit (`PeerVerifier`).

    Attributes:
        fault: why the node has to end: its evidence is not renewed any more. None while it is.
    """

    fault: str | None = None

    def __init__(
        self,
        unsealer: Unsealer,
        attester: Attester,
        facts: Facts,
        started_s: float,
        hardening: Callable[[], Mapping[str, str]],
        read_checkpoint: Callable[[], str] = lambda: "",
        now: Callable[[], float] = time.time,
        unit_policy: AttestationPolicy | None = None,
    ) -> None:
        self._unsealer = unsealer
        self._unit_policy = unit_policy
        self._attester = attester
        self._facts = facts
        self._hardening = hardening
        self._read_checkpoint = read_checkpoint
        self._now = now
        self._seen_s = started_s
        self._keys = b""
        self._document: bytes | None = None
        self._born_s = self._ends_s = 0
        self._unit: UnitSide | None = None
        self._listed: tuple[str, ...] = ()
        self._rehearsed: Evidence | None = None
        self._last_word = ""

    def evidence(self) -> bytes | None:
        """Returns the current document; None while none is valid."""
        return self._document if self._now() < self._ends_s else None

    async def rehearse(self) -> None:
        """Requests a quote for an empty statement, so that a machine that cannot attest fails before it serves.

        Raises:
            AttestationError: the machine cannot attest; the message says what is missing.
        """
        self._rehearsed = await asyncio.to_thread(self._attester.attest, b"rehearsal")

    def make_verifier(self, *, gpu: bool) -> PeerVerifier:
        """Returns what verifies the other machines of this node's unit, after `rehearse`.

        Args:
            gpu: whether GPUs have to be attested.

        Raises:
            AttestationError: evidence of this kind cannot be verified here, as a library is missing.
        """
        assert self._rehearsed is not None, "the hardware is asked at the start"
        member_key = self._attester.public if isinstance(self._attester, MemberAttester) else None
        verifier = PeerVerifier(
            self._facts,
            self._rehearsed,
            self._hardening,
            gpu,
            member_key,
            self._unit_policy,
            names_checkpoint=bool(self._read_checkpoint()),
        )
        verifier.load_libraries(self._now())
        return verifier

    def join(self, unit: UnitSide) -> None:
        """Has statements say what the node's unit is, from the next one on."""
        self._unit = unit

    async def renew(self) -> bool:
        """Requests evidence if the key or the unit has changed; returns whether it did.

        Raises:
            CloisterError: the hardware produced none; the previous document is kept.
        """
        now = self._now()
        keys, receipt_key = await self._unsealer.publish_all()
        listing = self._unit.list_members() if self._unit is not None else UnitListing()
        is_new_key = keys != self._keys
        # The key is not older than the last check that saw the previous key, so this expiry is never later than the key's.
        born_s = int(min(self._seen_s, now)) if is_new_key else self._born_s
        ends_s = born_s + MAX_LIFE_S if listing.ends_s is None else min(born_s + MAX_LIFE_S, listing.ends_s)
        if not is_new_key:
            self._seen_s = now
            ends_soon = self._ends_s - now < NODE_KEY_OVERLAP_S and ends_s > self._ends_s
            if listing.members == self._listed and not ends_soon:
                return False
        checkpoint = await asyncio.to_thread(self._read_checkpoint)
        hardening = with_host(self._hardening(), self._attester.kind)
        unit_key = self._unit.key.public if self._unit is not None else b""
        statement = self._facts.state(
            keys, born_s, ends_s, checkpoint, hardening, receipt_key, unit_key=unit_key, unit_members=listing.members
        )
        evidence = await asyncio.to_thread(self._attester.attest, statement)
        members = {member_extra(number): document for number, document in enumerate(listing.documents, 1)}
        document = msgspec.structs.replace(evidence, extra={**evidence.extra, **members}).encode()
        if self._unit is not None:
            self._unit.take_evidence(document)
        self._document, self._born_s, self._ends_s = document, born_s, ends_s
        self._keys, self._seen_s, self._listed = keys, now, listing.members
        return True

    async def renew_forever(self) -> None:
        """Refreshes periodically until cancelled. The reason for a failure is logged once, not on every attempt."""
        try:
            while True:
                try:
                    if await self.renew():
                        self._last_word = ""
                except CloisterError as error:
                    self._say(error.message)
                except OSError as error:  # no descriptors are left
                    self._say(error.strerror or type(error).__name__)
                await asyncio.sleep(LOOK_EVERY_S)
        except Exception as error:
            _logger.critical("no evidence for new keys any more: %s", describe(error))
            self.fault = BROKEN

    def _say(self, why: str) -> None:
        if why != self._last_word:
            _logger.error("no evidence for the new key: %s", why)
        self._last_word = why
