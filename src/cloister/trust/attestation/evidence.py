"""A node's statement about itself, and the hardware report that binds it. Pure: no I/O, no clock.

`Statement` is canonical JSON (sorted keys, no white space). REPORT_DATA, the 64 bytes that a processor signs for its guest, is
SHA-512 of those bytes, and the nonce of a GPU's report is SHA-256 of REPORT_DATA. So one signature of the processor covers
everything: code, model, profile, hardening, keys, expiry and the state of the log.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from cloister.types.config import MAX_UNIT_MEMBERS
from cloister.types.errors import CloisterError

MAX_EVIDENCE_BYTES = 512 * 1024
MAX_STATEMENT_BYTES = 64 * 1024
MAX_CONFIGURATION_BYTES = 32 * 1024
MAX_EXTRAS = 32
MAX_LIFE_S = 3600
"""Maximum validity of a statement: that of the node's key, one hour."""
UNIT_KEY_BYTES = 32

_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}\Z"

Hex = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Name = Annotated[str, Meta(pattern=_PATTERN)]
Capacity = Annotated[int, Meta(gt=0, le=1_000_000)]
Seconds = Annotated[int, Meta(ge=0, lt=2**53)]
KeyConfigs = Annotated[bytes, Meta(min_length=1, max_length=8192)]
Measured = Annotated[str, Meta(pattern=r"^(applied|missing): [^\x00-\x1f]{0,500}\Z")]
Note = Annotated[str, Meta(max_length=16_384)]
Entry = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]{1,512}\Z")]
ReceiptKey = Annotated[bytes, Meta(max_length=32)]
UnitPublicKey = Annotated[bytes, Meta(max_length=UNIT_KEY_BYTES)]
UnitMembers = Annotated[tuple[Hex, ...], Meta(max_length=MAX_UNIT_MEMBERS)]

_T = TypeVar("_T", bound=msgspec.Struct)


class EvidenceError(CloisterError):
    """Malformed evidence: too long, not canonical, or a field is missing or out of range."""

    code = "broken_evidence"
    status = 502


class Statement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The data that a node binds to its hardware.

    Attributes:
        release: SHA-256 digest of the running code, hex.
        model: SHA-256 digest of the model's fingerprint, hex.
        profile: name of the active privacy profile.
        profile_digest: SHA-256 digest of that profile's rules (`measure_profile`), hex.
        hardening: each measure as `process.measure`, `applied: ...` or `missing: ...` (`trust.hardening`), and `host`.
        configuration: every file that shapes answers, as a digest, and every setting (`configuration`).
        keys: the node's HPKE key configuration, `application/ohttp-keys` (RFC 9458 section 3).
        capacity: the node's weight when clients draw, at least 1.
        not_before, not_after: validity period of the statement, Unix seconds, at most an hour.
        checkpoint: the latest witnessed log checkpoint known to the node, a signed note; empty if none.
        receipt_key: Ed25519 public key that verifies receipts of requests sealed to `keys`; empty if the node signs none.
        unit_key: X25519 public key with which the node authenticates itself to the other machines of its unit; empty if it has
            none.
        unit_members: SHA-256 (hex) of the `unit_key` of each other machine whose engines may work on requests sealed to `keys`,
            sorted. A node that has a key and no members is a member of another node's unit, or a leader alone.

    The last two are left out where they are empty, so a statement without them has the bytes that it always had.
    """

    type: Annotated[str, Meta(pattern=r"^cloister statement v1\Z")] = "cloister statement v1"
    release: Hex
    model: Hex
    profile: Name
    profile_digest: Hex
    hardening: Annotated[dict[Name, Measured], Meta(max_length=256)]
    configuration: Annotated[dict[Entry, Entry], Meta(max_length=1024)] = {}
    keys: KeyConfigs
    capacity: Capacity
    not_before: Seconds
    not_after: Seconds
    checkpoint: Note = ""
    receipt_key: ReceiptKey = b""
    unit_key: UnitPublicKey = b""
    unit_members: UnitMembers = ()

    @property
    def node_id(self) -> str:
        """The node's name in the epoch file: SHA-256 of its key configuration, hex."""
        return hashlib.sha256(self.keys).hexdigest()

    def encode(self) -> bytes:
        """Returns the canonical JSON.

        Raises:
            EvidenceError: a field is out of range.
        """
        encoded = _canonical(self)
        read_statement(encoded)
        return encoded


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A statement and what vouches for it.

    Attributes:
        kind: `software`, `sev-snp`, `tdx` or `nitro`.
        statement: canonical JSON of a `Statement`.
        report: the hardware's signed report, in its maker's format; it carries `report_data(statement)`.
        extra: what a verifier needs beside: certificates, collateral, reports of GPUs.
    """

    kind: Name
    statement: bytes
    report: bytes
    extra: Annotated[dict[Name, bytes], Meta(max_length=MAX_EXTRAS)] = {}

    @property
    def report_data(self) -> bytes:
        """The 64 bytes that the report must carry."""
        return report_data(self.statement)

    def encode(self) -> bytes:
        """Returns the canonical JSON, byte strings in base64.

        Raises:
            EvidenceError: it is longer than clients read, or has a name that is none.
        """
        encoded = _canonical(self)
        read_evidence(encoded)
        return encoded


def report_data(statement: bytes) -> bytes:
    """Returns what the processor's report must carry for a statement, 64 bytes."""
    return hashlib.sha512(statement).digest()


def gpu_nonce(data: bytes) -> bytes:
    """Returns the nonce that a GPU's report must carry beside a processor's REPORT_DATA, 32 bytes."""
    return hashlib.sha256(data).digest()


def read_evidence(encoded: bytes) -> Evidence:
    """Reads evidence, and nothing but what `Evidence.encode` writes.

    Raises:
        EvidenceError: too long, not canonical, or not evidence; the message never repeats the bytes.
    """
    if len(encoded) > MAX_EVIDENCE_BYTES:
        raise EvidenceError(f"the evidence is {len(encoded)} bytes; at most {MAX_EVIDENCE_BYTES} are read")
    evidence = _decode(encoded, Evidence, "evidence")
    if _canonical(evidence) != encoded:
        raise EvidenceError("the evidence is not in its one canonical form")
    return evidence


def read_statement(encoded: bytes) -> Statement:
    """Reads a statement, and nothing but what `Statement.encode` writes.

    Raises:
        EvidenceError: too long, not canonical, or a field out of range.
    """
    if len(encoded) > MAX_STATEMENT_BYTES:
        raise EvidenceError(f"the statement is {len(encoded)} bytes; at most {MAX_STATEMENT_BYTES} are read")
    statement = _decode(encoded, Statement, "statement")
    life_s = statement.not_after - statement.not_before
    if not 0 < life_s <= MAX_LIFE_S:
        raise EvidenceError(f"the statement lives {life_s} s; more than 0 and at most {MAX_LIFE_S} are possible")
    _check_unit_fields(statement)
    if _canonical(statement) != encoded:
        raise EvidenceError("the statement is not in its one canonical form")
    return statement


def _check_unit_fields(statement: Statement) -> None:
    key, members = statement.unit_key, statement.unit_members
    if len(key) not in (0, UNIT_KEY_BYTES) or (members and not key):
        raise EvidenceError(f"the statement's unit_key has {len(key)} bytes; it has {UNIT_KEY_BYTES}, or none without members")
    if list(members) != sorted(set(members)) or hashlib.sha256(key).hexdigest() in members:
        raise EvidenceError("the statement's unit_members are not sorted, name one twice, or name the node itself")


def _canonical(value: msgspec.Struct) -> bytes:
    if not isinstance(value, Statement):
        return msgspec.json.encode(value, order="sorted")
    stated = msgspec.structs.asdict(value)
    for name in ("unit_key", "unit_members"):
        if not stated[name]:
            del stated[name]
    return msgspec.json.encode(stated, order="sorted")


def _decode(encoded: bytes, kind: type[_T], what: str) -> _T:
    try:
        return msgspec.json.decode(encoded, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = str(error)  # positions and types only, never content
    raise EvidenceError(f"the {what} cannot be read ({why})")
