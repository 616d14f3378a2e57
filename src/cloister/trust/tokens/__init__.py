"""Anonymous tokens: the issuer learns the account but not the request, the gateway the request's node but not the account (T4).

`blind_rsa` (RFC 9474), `challenge` (RFC 9577) and `issuance` (RFC 9578, type 2) are the formats; `Issuer` issues tokens to
holders of API keys, `Redeemer` accepts each once, with a spend store.
"""

from cloister.trust.tokens.blind_rsa import BlindSignatureError
from cloister.trust.tokens.challenge import (
    MalformedTokenError,
    Token,
    TokenChallenge,
    authorization,
    challenge_between,
    read_authenticate,
)
from cloister.trust.tokens.issuance import Pending, TokenRequest, decode_directory, request_tokens
from cloister.trust.tokens.issuer import Issuer, IssuerLimits, QuotaBook
from cloister.trust.tokens.issuer_keys import IssuerKey, KeyShelf
from cloister.trust.tokens.redeem import AcceptedKey, Redeemer, TokenError, TokenSpentError
from cloister.trust.tokens.spend import Expiry, SpendStore, SpendStoreError, check_epoch
from cloister.trust.tokens.stores import open_spend_store

__all__ = [
    "AcceptedKey",
    "BlindSignatureError",
    "Expiry",
    "Issuer",
    "IssuerKey",
    "IssuerLimits",
    "KeyShelf",
    "MalformedTokenError",
    "Pending",
    "QuotaBook",
    "Redeemer",
    "SpendStore",
    "SpendStoreError",
    "Token",
    "TokenChallenge",
    "TokenError",
    "TokenRequest",
    "TokenSpentError",
    "authorization",
    "challenge_between",
    "check_epoch",
    "decode_directory",
    "open_spend_store",
    "read_authenticate",
    "request_tokens",
]
