"""Evidence that says which member of the cloud a node is, by a key that outlives the node's hourly ones."""

from __future__ import annotations

from cloister.privacy.attestation import Attester
from cloister.privacy.attestation.evidence import Evidence
from cloister.privacy.transparency.membership import sign_member
from cloister.privacy.transparency.note import PrivateKey


class MemberAttester:
    """An attester whose evidence a member signs too.

    Args:
        attester: who vouches for the statement.
        key: the member's, which a membership names.
    """

    def __init__(self, attester: Attester, key: PrivateKey) -> None:
        self._attester = attester
        self._key = key
        self.kind = attester.kind

    def attest(self, statement: bytes) -> Evidence:
        """See `Attester.attest`."""
        return sign_member(self._key, self._attester.attest(statement))
