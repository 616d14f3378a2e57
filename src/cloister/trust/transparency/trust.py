"""The client's trust anchors: initial keys and limits, in a small file shipped with the client."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from cloister.trust.transparency.epoch import MAX_CLOCK_SKEW_S
from cloister.trust.transparency.issuer_keys import IssuerIdentity
from cloister.trust.transparency.note import Checkpoint, Kind, Note, PublicKey, cosigned_at, open_checkpoint
from cloister.trust.transparency.refusal import Reason, TransparencyError
from cloister.types.errors import ConfigError
from cloister.types.text_files import read_text_file

MAX_AGE_S = 24 * 3600
MIN_WITNESSES = 2


@dataclass(frozen=True)
class Trust:
    """Keys and limits.

    Attributes:
        log: the log's key; its name is the log's origin.
        witnesses: the witnesses, with unique keys.
        threshold: number of required cosignatures, at least `MIN_WITNESSES`.
        releases: keys that may sign releases.
        issuer: the only issuer that gets the API key, whatever the epoch names; None buys no tokens.
        profiles: privacy profiles under which a node may run.
        max_age_s: maximum age of the cosignatures, at most `MAX_AGE_S`.
    """

    log: PublicKey
    witnesses: tuple[PublicKey, ...]
    releases: tuple[PublicKey, ...]
    issuer: IssuerIdentity | None = None
    threshold: int = MIN_WITNESSES
    profiles: frozenset[str] = frozenset({"private", "paranoid"})
    max_age_s: float = MAX_AGE_S

    def __post_init__(self) -> None:
        if len({witness.key for witness in self.witnesses}) != len(self.witnesses):
            raise ConfigError("two witnesses have one key: they are one witness")
        if any(witness.kind is not Kind.COSIGNATURE for witness in self.witnesses) or self.log.kind is not Kind.NOTE:
            raise ConfigError("a witness's key is of kind 4 and the log's of kind 1; one of them is not")
        if self.log.key in {witness.key for witness in self.witnesses}:
            raise ConfigError("the log cannot be its own witness")
        if not MIN_WITNESSES <= self.threshold <= len(self.witnesses):
            raise ConfigError(
                f"between {MIN_WITNESSES} and all of the witnesses must cosign; the threshold is {self.threshold}"
            )
        if not self.releases:
            raise ConfigError("no key is trusted for releases, so no node could be; name one at least")
        if not 0 < self.max_age_s <= MAX_AGE_S:
            raise ConfigError(f"a checkpoint may be {MAX_AGE_S} seconds old at most")

    def open_checkpoint(self, text: str, now: float) -> tuple[Checkpoint, Note]:
        """Reads a checkpoint with enough recent cosignatures.

        Args:
            text: the signed note.
            now: Unix time in seconds.

        Raises:
            TransparencyError: it is not signed by the log, or cosigned by too few witnesses, or too long ago.
        """
        checkpoint, note = open_checkpoint(text, self.log)
        times = list(cosigned_at(note, self.witnesses).values())
        if len(times) < self.threshold:
            message = f"{len(times)} of {len(self.witnesses)} witnesses cosigned the checkpoint; {self.threshold} have to"
            raise TransparencyError(Reason.TOO_FEW_WITNESSES, message)
        if sum(time <= now + MAX_CLOCK_SKEW_S for time in times) < self.threshold:
            message = "the checkpoint was cosigned in the future; check this machine's clock"
            raise TransparencyError(Reason.FUTURE_CHECKPOINT, message)
        if sum(now - self.max_age_s <= time <= now + MAX_CLOCK_SKEW_S for time in times) < self.threshold:
            message = f"too few witnesses cosigned the checkpoint within the last {self.max_age_s / 3600:g} hours"
            raise TransparencyError(Reason.STALE_CHECKPOINT, message)
        return checkpoint, note


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    log: str
    witnesses: Annotated[list[str], Meta(max_length=16)]
    releases: Annotated[list[str], Meta(max_length=16)]
    issuer: str = ""
    issuer_key: str = ""
    threshold: int = MIN_WITNESSES
    profiles: tuple[str, ...] = ("private", "paranoid")


def encode_trust(trust: Trust) -> bytes:
    """The file's content, JSON."""
    file = _File(
        log=str(trust.log),
        witnesses=[str(witness) for witness in trust.witnesses],
        releases=[str(key) for key in trust.releases],
        issuer=trust.issuer.url if trust.issuer else "",
        issuer_key=str(trust.issuer.key) if trust.issuer else "",
        threshold=trust.threshold,
        profiles=tuple(sorted(trust.profiles)),
    )
    return msgspec.json.format(msgspec.json.encode(file)) + b"\n"


def identify_issuer(url: str, key: str) -> IssuerIdentity | None:
    """Returns the issuer with this URL and verifier key; None if both are empty.

    Raises:
        ConfigError: one is given without the other, or is invalid.
        TransparencyError: the key is malformed.
    """
    if bool(url) != bool(key):
        raise ConfigError("an issuer has a URL and a verifier key: cloister log trust --issuer URL --issuer-key KEY")
    return IssuerIdentity(url, PublicKey.parse(key)) if url else None


def parse_trust(data: bytes) -> Trust:
    """Reads the file's content.

    Raises:
        ConfigError: it cannot be read, or contradicts itself.
    """
    try:
        file = msgspec.json.decode(data, type=_File)
        return Trust(
            log=PublicKey.parse(file.log),
            witnesses=tuple(map(PublicKey.parse, file.witnesses)),
            releases=tuple(map(PublicKey.parse, file.releases)),
            issuer=identify_issuer(file.issuer, file.issuer_key),
            threshold=file.threshold,
            profiles=frozenset(file.profiles),
        )
    except (msgspec.DecodeError, UnicodeDecodeError, TransparencyError) as error:
        raise ConfigError(f"the trust file cannot be read: {error}") from None


def read_trust(path: Path) -> Trust:
    """Reads a trust file.

    Raises:
        ConfigError: it is missing, cannot be read, or contradicts itself.
    """
    return parse_trust(read_text_file(path).encode())
