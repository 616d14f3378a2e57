"""How a leader and a member of a sealed unit prove to each other that they hold the keys of their statements, and agree on a
secret. Pure: bytes in, bytes out; whose evidence is good enough is judged elsewhere (`peer_verification`).

    leader -> member   hello: an ephemeral X25519 key, and an ephemeral key of the best KEM
    member -> leader   offer: an ephemeral X25519 key, a secret encapsulated to the leader's KEM key, a proof, its evidence
    leader -> member   claim: which member this is, a proof (MAC), the leader's evidence
    member -> leader   a proof, or a refusal with its reason

A unit key is an X25519 key (RFC 7748) that a node draws at its start and that its statement names. All secrets come (HKDF, RFC
5869) from four agreements, of ephemeral and static keys with each other, as in the Noise Protocol Framework's KK pattern, and
from the KEM's secret, so that a quantum computer that opens X25519 opens no recorded pairing. Salted with the digest of what
either side said, evidence included: if one byte of it was changed on the way, neither proof holds. A side proves only with its
own label, so a proof that is sent back proves nothing. The offer's proof depends on the leader's ephemeral key: so a leader
lists a member only after that one has answered it, and not for an attacker who shows the member's evidence.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import struct
from dataclasses import dataclass, field
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cloister.engine.locked_keys import KEY_BYTES, LockedKeys, lock_keys
from cloister.trust.attestation.evidence import MAX_EVIDENCE_BYTES, UNIT_KEY_BYTES
from cloister.trust.sealing import KEMS, Kem, KemPrivateKey, UnsealError
from cloister.types.config import MAX_UNIT_MEMBERS
from cloister.types.errors import CloisterError

JOIN: Final = b"j"
"""First byte of a connection to a member's unit port that pairs."""
CARRY: Final = b"c"
"""First byte of a connection that carries a channel or a link to an engine."""
MAX_HELLO_BYTES: Final = 4096
MAX_FRAME_BYTES: Final = MAX_EVIDENCE_BYTES + MAX_HELLO_BYTES

REFUSED: Final = "refused"
"""The reason of `UnitRefusedError` where the other side refuses; its message says why."""

_MAGIC: Final = b"cloister unit v1"
_LABEL: Final = b"cloister/unit-pairing/1"
_MAC_BYTES: Final = 32
_ID_BYTES: Final = 16
_KEM_ID: Final = struct.Struct(">H")
_NONCE: Final = struct.Struct(">IQ")
_ACCEPTED: Final = b"+"
_REFUSED: Final = b"-"
_MAX_REASON: Final = 600
_NO_PROOF: Final = (
    "the {} does not prove that it holds the key of its evidence: somebody shows old evidence, or changes what is sent between "
    "the two"
)


class UnitRefusedError(CloisterError):
    """A node that wanted to be, or was named as, part of a unit is none.

    Attributes:
        reason: a stable name of what was wrong: a slug of a verification step, or `handshake`, `not-listed`, `has-leader`,
            `refused`.
    """

    code = "unit_refused"
    status = 502

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Pair:
    """A leader and a member that have verified each other.

    Attributes:
        id: names the pair on connections, 16 bytes; public.
        secret: what the two fronts know and nobody else, 32 bytes.
        address: the member's unit port, on the leader's side; None on the member's.
        index: which member it is, from 1.
        num_engines: engines of each of the two machines.
    """

    id: bytes
    secret: bytes = field(repr=False)
    address: tuple[str, int] | None
    index: int
    num_engines: int


class UnitKey:
    """The key with which a node authenticates itself inside its unit. It is drawn at the node's start, lies in locked memory,
    and ends with the process: who can use it is this process, so evidence that names it cannot be shown by anybody else.

    Attributes:
        public: X25519 public key, 32 bytes.
        memory: for keys that are derived with it.

    Raises:
        ConfigError: no memory may be locked here.
    """

    def __init__(self, setting: str = "unit_port") -> None:
        self.memory: LockedKeys = lock_keys(setting)
        self._number = self.memory.draw()
        public = self.memory.use(self._number, lambda key: _private(key).public_key().public_bytes_raw())
        assert public is not None, "it was drawn just now"
        self.public: bytes = public
        _load_ciphers()

    @property
    def digest(self) -> str:
        """SHA-256 of the public key, hex: how a leader's statement names a member."""
        return digest_of(self.public)

    def agree(self, public: bytes) -> bytes:
        """Returns what this key and another one agree on. Raises UnitRefusedError if the other one is of low order."""
        private = self.memory.use(self._number, _private)
        if private is None:
            raise UnitRefusedError("handshake", "this node ends")
        return _exchange(private, public)

    def close(self) -> None:
        """Wipes the key, and all that was derived with it."""
        self.memory.clear()


def digest_of(unit_key: bytes) -> str:
    """Returns how a leader's statement names the member with this unit key: SHA-256, hex."""
    return hashlib.sha256(unit_key).hexdigest()


@dataclass(frozen=True)
class _Said:
    """What both sides said, which all secrets depend on."""

    hello: bytes
    offer: bytes
    index: int
    leader_evidence: bytes
    leader_key: bytes
    member_key: bytes

    def digest(self) -> bytes:
        whole = hashlib.sha256(_LABEL)
        for part in (self.hello, self.offer, bytes([self.index]), self.leader_evidence, self.leader_key, self.member_key):
            whole.update(hashlib.sha256(part).digest())
        return whole.digest()


@dataclass(frozen=True)
class Agreed:
    """What two nodes have in common after a pairing.

    Attributes:
        id, secret: see `Pair`.
        of_leader, of_member: keys of the records of each side.
    """

    id: bytes
    secret: bytes = field(repr=False)
    of_leader: bytes = field(repr=False)
    of_member: bytes = field(repr=False)


class _Secrets:
    """Everything that follows from the agreements and from what was said."""

    def __init__(self, agreements: bytes, said: _Said) -> None:
        digest = said.digest()
        length = 3 * KEY_BYTES + _ID_BYTES + 2 * _MAC_BYTES
        derived = HKDF(hashes.SHA256(), length, digest, _LABEL).derive(agreements)
        parts = struct.unpack(f"{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}s{_ID_BYTES}s{_MAC_BYTES}s{_MAC_BYTES}s", derived)
        secret, of_leader, of_member, pair_id, leader_proves, member_proves = parts
        self.agreed = Agreed(pair_id, secret, of_leader, of_member)
        self.leader_proof = hmac.digest(leader_proves, b"leader" + digest, "sha256")
        self.member_proof = hmac.digest(member_proves, b"member" + digest, "sha256")


class LeaderHandshake:
    """The leader's side of one pairing.

    Args:
        kems: mechanisms, best first; a member without the best one refuses.
    """

    def __init__(self, key: UnitKey, kems: tuple[Kem, ...] = KEMS) -> None:
        self._key = key
        self._ephemeral = X25519PrivateKey.generate()
        self._kem = kems[0]
        self._kem_key: KemPrivateKey = self._kem.generate()
        public = self._ephemeral.public_key().public_bytes_raw()
        self.hello = _MAGIC + public + _KEM_ID.pack(self._kem.kem_id) + self._kem_key.public_bytes()
        self._offer = b""
        self._secrets: _Secrets | None = None

    def read_offer(self, offer: bytes) -> bytes:
        """Takes the member's offer; returns its evidence document, unverified.

        Raises:
            UnitRefusedError: the offer is a refusal, or none.
        """
        if offer[:1] == _REFUSED:
            raise UnitRefusedError(REFUSED, f"the member refuses: {_read_reason(offer)}")
        if offer[:1] != _ACCEPTED or len(offer) <= self._proof_at + _MAC_BYTES:
            raise UnitRefusedError("handshake", "what answers there is no member of a unit; name the --unit-port of one")
        self._offer = offer
        return offer[self._proof_at + _MAC_BYTES :]

    def check_offer(self, member_key: bytes) -> None:
        """Checks that who made the offer holds the key of the evidence in it, now.

        Args:
            member_key: as the member's verified statement says.

        Raises:
            UnitRefusedError: it does not.
        """
        head, evidence = self._offer[: self._proof_at], self._offer[self._proof_at + _MAC_BYTES :]
        proof = _prove_offer(_exchange(self._ephemeral, member_key), self.hello, head, evidence)
        if not hmac.compare_digest(proof, self._offer[self._proof_at : self._proof_at + _MAC_BYTES]):
            raise UnitRefusedError("handshake", _NO_PROOF.format("member"))

    @property
    def _proof_at(self) -> int:
        return 1 + UNIT_KEY_BYTES + self._kem.enc_bytes

    def claim(self, member_key: bytes, index: int, evidence: bytes) -> bytes:
        """Returns the claim to be the leader of the member with this unit key.

        Args:
            member_key: as the member's verified statement says.
            index: which member it is, from 1.
            evidence: the leader's document.

        Raises:
            UnitRefusedError: a key is none that anybody can have drawn.
        """
        theirs = self._offer[1 : 1 + UNIT_KEY_BYTES]
        enc = self._offer[1 + UNIT_KEY_BYTES : self._proof_at]
        if hmac.compare_digest(member_key, self._key.public):
            raise UnitRefusedError("handshake", "the member shows this node's own key; name another node")
        try:
            encapsulated = self._kem_key.decapsulate(enc)
        except UnsealError:
            raise _bad_key() from None
        agreements = (
            _exchange(self._ephemeral, theirs)
            + _exchange(self._ephemeral, member_key)
            + self._key.agree(theirs)
            + self._key.agree(member_key)
            + encapsulated
        )
        said = _Said(self.hello, self._offer, index, evidence, self._key.public, member_key)
        self._secrets = _Secrets(agreements, said)
        return bytes([index]) + self._secrets.leader_proof + evidence

    def finish(self, answer: bytes) -> Agreed:
        """Takes the member's answer to the claim.

        Raises:
            UnitRefusedError: it refuses, or does not prove that it holds its key.
        """
        assert self._secrets is not None, "the claim comes first"
        if answer[:1] == _REFUSED:
            raise UnitRefusedError(REFUSED, f"the member refuses: {_read_reason(answer)}")
        if not hmac.compare_digest(answer, _ACCEPTED + self._secrets.member_proof):
            raise UnitRefusedError("handshake", _NO_PROOF.format("member"))
        return self._secrets.agreed


class MemberHandshake:
    """The member's side of one pairing.

    Args:
        evidence: the member's document.
    """

    def __init__(self, key: UnitKey, evidence: bytes, kems: tuple[Kem, ...] = KEMS) -> None:
        self._key = key
        self._evidence = evidence
        self._kems = {kem.kem_id: kem for kem in kems}
        self._ephemeral = X25519PrivateKey.generate()
        self._hello = self._offer = self._proof = b""
        self._encapsulated = b""
        self._index = 0
        self._leader_evidence = b""

    def offer(self, hello: bytes) -> bytes:
        """Returns the offer that answers a leader's hello.

        Raises:
            UnitRefusedError: it is none, or of a program that differs.
        """
        head = len(_MAGIC) + UNIT_KEY_BYTES + _KEM_ID.size
        if len(hello) <= head or not hello.startswith(_MAGIC):
            raise UnitRefusedError("handshake", "what was sent is no hello of a leader")
        (kem_id,) = _KEM_ID.unpack(hello[head - _KEM_ID.size : head])
        kem = self._kems.get(kem_id)
        if kem is None or len(hello) != head + kem.public_key_bytes:
            raise UnitRefusedError(
                "handshake", "the two nodes have different key exchanges; install the same `cryptography` on both"
            )
        try:
            self._encapsulated, enc = kem.encapsulate(hello[head:])
        except ValueError:
            raise _bad_key() from None
        self._hello = hello
        theirs = hello[len(_MAGIC) : len(_MAGIC) + UNIT_KEY_BYTES]
        offered = _ACCEPTED + self._ephemeral.public_key().public_bytes_raw() + enc
        self._offer = offered + _prove_offer(self._key.agree(theirs), hello, offered, self._evidence) + self._evidence
        return self._offer

    def read_claim(self, claim: bytes) -> tuple[int, bytes]:
        """Takes a claim; returns which member this is, and the leader's evidence document, unverified.

        Raises:
            UnitRefusedError: it is none.
        """
        if len(claim) <= 1 + _MAC_BYTES or not 0 < claim[0] <= MAX_UNIT_MEMBERS:
            raise UnitRefusedError("handshake", "what was sent is no claim of a leader")
        self._index, self._proof, self._leader_evidence = claim[0], claim[1 : 1 + _MAC_BYTES], claim[1 + _MAC_BYTES :]
        return self._index, self._leader_evidence

    def accept(self, leader_key: bytes) -> tuple[bytes, Agreed]:
        """Returns the answer that accepts the claim, and what both have in common.

        Args:
            leader_key: as the leader's verified statement says.

        Raises:
            UnitRefusedError: the leader does not prove that it holds this key.
        """
        head = len(_MAGIC)
        theirs = self._hello[head : head + UNIT_KEY_BYTES]
        if hmac.compare_digest(leader_key, self._key.public):
            raise UnitRefusedError("handshake", "the leader shows this node's own key")
        agreements = (
            _exchange(self._ephemeral, theirs)
            + self._key.agree(theirs)
            + _exchange(self._ephemeral, leader_key)
            + self._key.agree(leader_key)
            + self._encapsulated
        )
        said = _Said(self._hello, self._offer, self._index, self._leader_evidence, leader_key, self._key.public)
        secrets = _Secrets(agreements, said)
        if not hmac.compare_digest(self._proof, secrets.leader_proof):
            raise UnitRefusedError("handshake", _NO_PROOF.format("leader"))
        return _ACCEPTED + secrets.member_proof, secrets.agreed


def _load_ciphers() -> None:
    """Does once what pairings do: the libraries import parts of themselves at first use, and the front of a sealed node may
    import nothing once it is locked down."""
    private = X25519PrivateKey.generate()
    agreed = _exchange(private, private.public_key().public_bytes_raw())
    for kem in KEMS:
        key = kem.generate()
        _, enc = kem.encapsulate(key.public_bytes())
        agreed += key.decapsulate(enc)
    cipher = AESGCM(HKDF(hashes.SHA256(), KEY_BYTES, b"salt", _LABEL).derive(agreed))
    with contextlib.suppress(InvalidTag):
        cipher.decrypt(_NONCE.pack(0, 1), cipher.encrypt(_NONCE.pack(0, 0), b"", b""), b"")


def encode_refusal(message: str) -> bytes:
    """Returns the frame that refuses an offer or a claim, with its reason."""
    return _REFUSED + message.encode()[:_MAX_REASON]


class SealedRecords:
    """Messages between two paired nodes after the handshake, each sealed and numbered (AES-256-GCM): none can be read, changed,
    left out, repeated or sent back.

    Args:
        memory: where the keys lie.
    """

    def __init__(self, memory: LockedKeys, agreed: Agreed, *, is_leader: bool) -> None:
        own, theirs = (agreed.of_leader, agreed.of_member) if is_leader else (agreed.of_member, agreed.of_leader)
        self._memory = memory
        self._own, self._theirs = memory.put(own), memory.put(theirs)
        self._num_sent = self._num_received = 0

    def seal(self, message: bytes) -> bytes:
        """Returns the record of a message. Raises UnitRefusedError after `close`."""
        cipher = self._memory.cipher(self._own)
        if cipher is None:
            raise UnitRefusedError("handshake", "this node ends")
        sealed = cipher.encrypt(_NONCE.pack(0, self._num_sent), message, _LABEL)
        self._num_sent += 1
        return sealed

    def open(self, record: bytes) -> bytes:
        """Returns the message in the next record. Raises UnitRefusedError if the other node did not seal it as this one."""
        cipher = self._memory.cipher(self._theirs)
        if cipher is None:
            raise UnitRefusedError("handshake", "this node ends")
        try:
            message = cipher.decrypt(_NONCE.pack(0, self._num_received), record, _LABEL)
        except InvalidTag:
            raise UnitRefusedError("handshake", "a message was not sealed by the other node of the pair") from None
        self._num_received += 1
        return message

    def close(self) -> None:
        """Wipes the keys."""
        self._memory.forget(self._own)
        self._memory.forget(self._theirs)


def _prove_offer(agreed: bytes, hello: bytes, offered: bytes, evidence: bytes) -> bytes:
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in (hello, offered, evidence))).digest()
    key = HKDF(hashes.SHA256(), _MAC_BYTES, digest, _LABEL + b" offer").derive(agreed)
    return hmac.digest(key, b"offer" + digest, "sha256")


def _private(key: memoryview) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(key)


def _exchange(private: X25519PrivateKey, public: bytes) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise _bad_key() from None


def _bad_key() -> UnitRefusedError:
    return UnitRefusedError("handshake", "the other node sent a public key that nobody can have drawn")


def _read_reason(frame: bytes) -> str:
    """Returns the text of a refusal, which somebody else may have written: printable, and short."""
    text = frame[1 : 1 + _MAX_REASON].decode(errors="replace")
    return "".join(character if character.isprintable() else " " for character in text).strip() or "it does not say why"
