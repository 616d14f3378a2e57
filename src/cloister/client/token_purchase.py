"""Buys tokens with an API key: the issuer learns the account and the number, but cannot recognise the tokens later. No I/O;
time is an argument.

A purchase goes through the relay, sealed to a key that the issuer signed: the issuer learns the account but not the address,
the relay the address but not the account, and the gateway nothing. With `is_direct` the issuer learns both.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from http import HTTPStatus

from msgspec import UNSET

from cloister.client.envelope import read_message, write_date
from cloister.client.errors import NoTokensError
from cloister.client.protocol import Ask, FetchSteps, Reply
from cloister.trust.sealing import (
    KeyConfiguration,
    KeyConfigurationError,
    MessageError,
    UnsealError,
    choose_configuration,
    parse_keys,
)
from cloister.trust.tokens import BlindSignatureError, MalformedTokenError, Token, request_tokens
from cloister.trust.tokens.blind_rsa import key_id
from cloister.trust.tokens.challenge import challenge_between
from cloister.trust.tokens.issuance import BATCH_REQUEST_TYPE, Pending
from cloister.trust.tokens.purchase import (
    PURCHASE_BYTES,
    REQUEST_PATH,
    REQUEST_TYPE,
    RESPONSE_TYPE,
    STATEMENT_PATH,
    open_purchase_answer,
    seal_purchase,
)
from cloister.trust.transparency.epoch import MAX_CLOCK_SKEW_S, Epoch, IssuerEntry
from cloister.trust.transparency.issuer_keys import (
    MAX_STATEMENT_BYTES,
    IssuerIdentity,
    IssuerStatement,
    read_statement,
)
from cloister.trust.transparency.refusal import TransparencyError

BATCH = 20
"""Tokens in a batch, the same for every client."""
LOW = 10
"""Low-water mark: more are bought, at a random time (`restocking`), once no more than this are left."""


class Wallet:
    """Tokens by the issuer key that signed them; tokens of a key or challenge that is no longer in the epoch are dropped."""

    def __init__(self) -> None:
        self._tokens: dict[bytes, list[Token]] = {}

    def keep(self, key_ids: set[bytes], challenge_digest: bytes) -> None:
        """Drops tokens of all other keys, and those for another challenge: they would reveal when they were bought."""
        self._tokens = {
            key_id: [token for token in tokens if token.challenge_digest == challenge_digest]
            for key_id, tokens in self._tokens.items()
            if key_id in key_ids
        }

    def add(self, tokens: list[Token]) -> None:
        """Adds a batch."""
        for token in tokens:
            self._tokens.setdefault(token.key_id, []).append(token)

    def __len__(self) -> int:
        return sum(len(tokens) for tokens in self._tokens.values())

    def pop(self) -> Token | None:
        """Removes and returns a random token of the key with most tokens; None if there is none."""
        tokens = max(self._tokens.values(), key=len, default=[])
        return tokens.pop(secrets.randbelow(len(tokens))) if tokens else None


WHO = "the issuer"
WHO_CARRIES = "the relay"
MOST_ANSWER_BYTES = 2 * PURCHASE_BYTES


class Buyer:
    """Buys tokens of the one issuer that the trust file names, whatever others the epoch lists.

    Args:
        issuer: None buys nothing.
        relay: URL for purchases, with a trailing slash.
        is_direct: buys from the issuer directly, which then sees this machine's address together with the API key.
        see: called with the keys that the issuer publishes; raises if they contradict earlier ones.
        needs_post_quantum: refuses any key but X-Wing.
    """

    def __init__(
        self,
        issuer: IssuerIdentity | None,
        relay: str,
        api_key: str,
        *,
        is_direct: bool = False,
        see: Callable[[tuple[IssuerEntry, ...]], None] = lambda entries: None,
        needs_post_quantum: bool = False,
    ) -> None:
        self._issuer = issuer
        self._relay = relay
        self._api_key = api_key
        self._is_direct = is_direct
        self._see = see
        self._statement: IssuerStatement | None = None
        self._pending: Pending | None = None
        self._needs_post_quantum = needs_post_quantum

    def buy(self, epoch: Epoch, now: float, count: int = BATCH) -> FetchSteps[list[Token]]:
        """Fetches a batch under this epoch's common key.

        A batch whose reply was lost is requested again unchanged, and the issuer counts it once.

        Args:
            now: Unix seconds.

        Raises:
            NoTokensError: no batch was sold; the message says why.
        """
        if self._issuer is None:
            raise NoTokensError(
                "The trust file names no issuer to buy tokens of: write it with "
                "`cloister log trust --issuer URL --issuer-key KEY`."
            )
        pending = self._begin(signing_key(epoch, self._issuer), epoch, self._issuer, count)
        ask = self._ask_directly(self._issuer, pending) if self._is_direct else self._ask_sealed(self._issuer, pending, now)
        try:
            status, body = yield from ask
        except BaseException:  # also if the transport gave up: the issuer may have counted it
            self._pending = pending
            raise
        if status != 200:
            self._pending = None if 400 <= status < 500 else pending
            if status == HTTPStatus.UNAUTHORIZED:
                raise NoTokensError(
                    "There is no token left, and the issuer does not know the API key (401): check the key in the file of "
                    "--api-key-file (`api_key` of a Session), or ask the issuer's operator for one."
                )
            message = read_message(body) or "it gave no reason"
            raise NoTokensError(f"There is no token left, and the issuer gave none ({status}): {message}")
        try:
            return pending.finish(body)
        except (MalformedTokenError, BlindSignatureError) as error:
            raise NoTokensError(f"The issuer's tokens are none: {error}; do not use this issuer.") from None

    def _begin(self, key: bytes, epoch: Epoch, issuer: IssuerIdentity, count: int) -> Pending:
        challenge = challenge_between(issuer.url, epoch.gateway.url)
        kept, wanted = self._pending, (key, challenge.digest(), count)
        self._pending = None  # it belongs to this purchase now; another may begin meanwhile
        if kept is None or (kept.encoded_key, kept.tokens[0].challenge_digest, len(kept.tokens)) != wanted:
            try:
                kept = request_tokens(key, challenge, count)
            except ValueError as error:
                raise NoTokensError(f"The key of the issuer at {issuer.url} in the epoch cannot be used: {error}.") from None
        return kept

    def _ask_directly(self, issuer: IssuerIdentity, pending: Pending) -> FetchSteps[tuple[int, bytes]]:
        headers = {"authorization": f"Bearer {self._api_key}", "content-type": BATCH_REQUEST_TYPE}
        reply: Reply = yield Ask(WHO, issuer.url + REQUEST_PATH, "POST", headers, pending.encode())
        return reply.status, reply.body

    def _ask_sealed(self, issuer: IssuerIdentity, pending: Pending, now: float) -> FetchSteps[tuple[int, bytes]]:
        for has_more in (True, False):
            statement = yield from self._fetch_statement(issuer, now)
            try:
                keys = choose_configuration(parse_keys(statement.sealing_keys))
                self._check_kem(keys)
                sealed, exchange = seal_purchase(keys, issuer.url, self._api_key, pending.encode(), write_date(now))
            except (KeyConfigurationError, MessageError, ValueError) as error:
                raise NoTokensError(f"No purchase can be sealed to the issuer: {error}.") from None
            headers = {"content-type": REQUEST_TYPE}
            reply: Reply = yield Ask(WHO_CARRIES, f"{self._relay}issuer", "POST", headers, sealed, most_bytes=MOST_ANSWER_BYTES)
            if reply.status == 200 and reply.media_type == RESPONSE_TYPE:
                try:
                    status, _, body = open_purchase_answer(exchange, reply.body)
                except (UnsealError, MessageError):
                    raise NoTokensError("The answer to the purchase was changed on the way; nothing of it is used.") from None
                return status, body
            self._statement = None  # a restarted issuer has another key
            if reply.status != 400 or not has_more:
                break
        message = read_message(reply.body) or "it gave no reason"
        raise NoTokensError(f"The relay did not carry the purchase of tokens to the issuer ({reply.status}): {message}")

    def _check_kem(self, keys: KeyConfiguration) -> None:
        if self._needs_post_quantum and not keys.kem.is_post_quantum:
            raise NoTokensError(
                f"No token is bought: the issuer offers {keys.kem.name} only, and the policy asks for post-quantum encryption; "
                "have the issuer updated."
            )

    def _fetch_statement(self, issuer: IssuerIdentity, now: float) -> FetchSteps[IssuerStatement]:
        if self._statement is not None and now < self._statement.not_after:
            return self._statement
        reply: Reply = yield Ask(WHO_CARRIES, self._relay.rstrip("/") + STATEMENT_PATH, most_bytes=MAX_STATEMENT_BYTES)
        if reply.status != 200:
            raise NoTokensError(
                f"The relay brings no statement of the issuer ({reply.status}), so no token can be bought through it: its "
                "operator starts it with --issuer. To show the issuer your address instead, buy directly "
                "(Session(buys_directly=True), cloister proxy --buy-directly)."
            )
        try:
            statement = read_statement(reply.body, issuer, now, MAX_CLOCK_SKEW_S)
        except TransparencyError as error:
            raise NoTokensError(f"What the relay brought as the issuer's keys is refused: {error.message}.") from None
        self._see(statement.token_keys)
        self._statement = statement
        return statement


def signing_key(epoch: Epoch, issuer: IssuerIdentity) -> bytes:
    """Returns this epoch's common key: the one that was signing when the epoch began.

    Raises:
        NoTokensError: the epoch does not name this issuer, names a key that it did not sign, or does not determine the signing
            key.
    """
    keys = [entry for entry in epoch.issuers if entry.url == issuer.url]
    if not keys:
        raise NoTokensError(
            f"The epoch does not name the issuer of the trust file, {issuer.url}; ask who runs the gateway why."
        )
    if not all(map(issuer.has_signed, keys)):
        raise NoTokensError(
            f"The epoch names a key of the issuer at {issuer.url} that it did not sign, or that signs for less than a week or "
            "more than a month. It would mark tokens, so none is bought."
        )
    if any(entry.budget is UNSET for entry in keys):
        raise NoTokensError(
            f"The epoch names a key of the issuer at {issuer.url} without the output tokens that its tokens pay for, so the "
            "gateway could tell each node another number, and none is bought. Have the issuer updated."
        )
    signing = [entry.token_key for entry in keys if entry.not_before <= epoch.not_before < entry.not_after]
    if len(signing) > 1:
        raise NoTokensError(
            f"The epoch names {len(signing)} keys of the issuer at {issuer.url} that sign at once. They would mark tokens."
        )
    if not signing:
        raise NoTokensError(f"No key of the issuer at {issuer.url} signs in this epoch; wait for the next one.")
    return signing[0]


def signed_budget(epoch: Epoch, issuer: IssuerIdentity, token: Token) -> int:
    """Returns how many output tokens a token pays for, as its issuer signed it; `signing_key` refuses entries without.

    Raises:
        NoTokensError: the epoch does not name the token's key.
    """
    for entry in epoch.issuers:
        if entry.url == issuer.url and key_id(entry.token_key) == token.key_id and entry.budget is not UNSET:
            return entry.budget
    raise NoTokensError("The epoch does not name the key of a token at hand; it is not spent. Try again.")
