"""Requests receipts, verifies each one against the client's own data, and stores it as a file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cloister.policy.policy import Policy, Use
from cloister.trust.attestation import EvidenceError, read_evidence, read_statement
from cloister.trust.receipts import Receipt, ReceiptError, Transcript, Wish, is_signed
from cloister.trust.sealing import HttpRequest, OhttpContext
from cloister.trust.transparency.epoch import Epoch, epoch_leaf
from cloister.trust.transparency.files import SECRET, write_whole
from cloister.trust.transparency.merkle import hash_leaf
from cloister.types.errors import ConfigError

Keep = Callable[[Receipt], None]
"""Called with each verified receipt when its answer is complete."""


@dataclass(frozen=True)
class ReceiptOrder:
    """The data to request a receipt from one node, and to verify it.

    Attributes:
        epoch: epoch from which the node was drawn.
        bundle: the same with its proofs, as received.
        evidence: the node's evidence document.
        key: receipt key that the evidence binds, Ed25519, 32 bytes.
        keep: called with the receipt.
    """

    epoch: Epoch
    bundle: bytes
    evidence: bytes
    key: bytes
    keep: Keep

    @property
    def wish(self) -> Wish:
        """The field of the sealed request."""
        return Wish(hash_leaf(epoch_leaf(self.epoch)).hex(), hashlib.sha256(self.evidence).hexdigest())


def order_receipt(epoch: Epoch, bundle: bytes, evidence: bytes, keep: Keep) -> ReceiptOrder:
    """Returns the order for a receipt.

    Raises:
        PolicyError: the epoch's profile forbids receipts.
        ReceiptError: the evidence binds no receipt key.
    """
    Policy(epoch.profile).check({"receipt": Use(True, "this client")})
    try:
        key = read_statement(read_evidence(evidence).statement).receipt_key
    except EvidenceError:
        key = b""
    if not key:
        raise ReceiptError("this node's evidence binds no key for receipts; ask for none, or wait for nodes of a newer release")
    return ReceiptOrder(epoch, bundle, evidence, key, keep)


class ReceiptReader:
    """Hashes one answer while it is received.

    Args:
        request: the request as sealed.
        exchange: the exchange with the node.

    Attributes:
        receipt: None until the answer is complete.
    """

    def __init__(self, order: ReceiptOrder, request: HttpRequest, exchange: OhttpContext) -> None:
        self.receipt: Receipt | None = None
        self._order = order
        self._transcript = Transcript(exchange, request)

    def add(self, content: bytes) -> None:
        """Hashes the next piece of the answer's content."""
        self._transcript.add(content)

    def finish(self, status: int, signature: bytes | None) -> None:
        """Marks the answer as complete, and passes on its receipt.

        Raises:
            ReceiptError: there is none, or the attested key did not sign exactly this answer.
        """
        order = self._order
        wish = order.wish
        claims = self._transcript.claim(status, epoch=wish.epoch, evidence=wish.evidence, profile=order.epoch.profile)
        if signature is None:
            raise ReceiptError("the answer came without the receipt that was asked for")
        if not is_signed(claims, signature, order.key):
            raise ReceiptError("the answer's receipt is not one of this node about this request and answer")
        self.receipt = Receipt(
            jws=claims.to_jws(signature), salt=self._transcript.salt, evidence=order.evidence, bundle=order.bundle
        )
        order.keep(self.receipt)


_PRIVATE = 0o700


class ReceiptFolder:
    """Stores receipts in a folder, one per file, named by the SHA-256 of the signed content. It is a `Keep`.

    Request and answer are not stored: to prove them later, keep their exact bytes.

    Raises:
        ConfigError: the folder cannot be created or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser()
        try:
            self.folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {folder} for receipts: {error.strerror}", param="receipts") from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise ConfigError(f"the folder {folder} for receipts cannot be written; choose another", param="receipts")

    def __call__(self, receipt: Receipt) -> None:
        name = hashlib.sha256(receipt.jws.encode()).hexdigest()[:32]
        write_whole(self.folder / f"{name}.receipt.json", receipt.encode(), SECRET)
