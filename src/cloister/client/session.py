"""A client's state between requests: the verified epoch, findings about nodes, tokens. No I/O of its own.

`prepare` returns `FetchSteps`: they define what to fetch, and transports do the I/O. One session may serve several transports.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec

from cloister.client.envelope import SealedEnvelope, seal_for_node
from cloister.client.errors import EpochRefusedError, EvidenceRefusedError
from cloister.client.images import find_size_class
from cloister.client.issuer_record import IssuerRecord, beside
from cloister.client.limits import Limits, hold_to_limits
from cloister.client.node_selection import Below, draw
from cloister.client.node_verification import check_gateway, fill_policy, judge_node, refuse_shared_chips
from cloister.client.protocol import Ask, FetchSteps, Reply
from cloister.client.receipts import Keep, ReceiptOrder, order_receipt
from cloister.client.restocking import PurchasePlan
from cloister.client.shared_view import MOST_TRIES, SharedView, state_file
from cloister.client.token_purchase import Buyer, Wallet, signed_budget, signing_key
from cloister.trust.attestation import AttestationPolicy, Findings, Outcome
from cloister.trust.attestation.evidence import MAX_EVIDENCE_BYTES, read_evidence, read_statement
from cloister.trust.sealing import HttpRequest
from cloister.trust.shape import SizeClass
from cloister.trust.tokens import Token, authorization
from cloister.trust.tokens.blind_rsa import key_id
from cloister.trust.tokens.challenge import challenge_between
from cloister.trust.transparency.checks import Memory, VerifiedEpoch, believe, needed_paths
from cloister.trust.transparency.epoch import MAX_BUNDLE_BYTES, Epoch, NodeEntry
from cloister.trust.transparency.issuer_keys import OVERLAP_S
from cloister.trust.transparency.membership import Member
from cloister.trust.transparency.refusal import TransparencyError
from cloister.trust.transparency.trust import Trust, read_trust
from cloister.types.addresses import check_scheme
from cloister.types.errors import ConfigError

WELL_KNOWN = "/.well-known/cloister"
MOST_LOG_BYTES = 1 << 25
"""Maximum size of one log file: 256 entries of 64 KiB, and their lengths."""
DOUBT_AFTER_S = 5.0
"""After a failed attempt the client fetches the epoch again, unless it is fresher than this: a node may have left."""


@dataclass(frozen=True)
class PreparedRequest:
    """One draw: a member of the cloud, its node, the findings about it, and the token for it.

    Attributes:
        node: None if the epoch has no node of this member; then a step of `findings` failed.
        token: None if the node is refused; nothing is spent on it.
        order: for a receipt; None for none.
        budget: output tokens that the blind token pays for, as signed by the issuer; None without a token.
        size_class: what the session's requests are padded to; None for the smallest size that holds them.
    """

    epoch: Epoch
    member: Member
    node: NodeEntry | None
    findings: Findings
    token: Token | None
    order: ReceiptOrder | None = None
    budget: int | None = None
    size_class: SizeClass | None = None

    def seal(self, request: HttpRequest, now: float) -> SealedEnvelope:
        """Seals a request to the node, and around that to the gateway."""
        assert self.token is not None, "nothing is sealed to a node that was refused"
        assert self.node is not None, "nothing is sealed to a node that is not there"
        least_bytes = 0 if self.size_class is None else self.size_class.request_bytes
        spent = authorization(self.token)
        return seal_for_node(request, self.node, self.epoch, spent, now, self.order, self.budget, least_bytes)


class Session:
    """The client's settings and state.

    Args:
        relay: URL of the relay, the only program that this client connects to.
        trust: keys of log, witnesses and releases, or the path of a file with them.
        api_key: sent to the issuer only, sealed, to buy tokens; never to relay, gateway or node.
        policy: requirements for nodes; unset ones are filled from the log.
        receipts: called with a receipt of every answer (docs/receipts.md); None requests none.
        buys_directly: buys tokens from the issuer directly, which then sees this machine's address together with the API key.
        limits: limits on the membership and on its rate of change.
        state: file with the client's view of the log, mode 0600, which persists over restarts; None uses one in the user's
            state folder (`client.shared_view`).
        remember: False keeps it in memory only, so that each start sees the cloud as if for the first time.
        size_class: name of the size class of all requests, with images or without (`trust.shape.SIZE_CLASSES`, docs/vision.md);
            None pads each to the smallest size that holds it, and refuses images under `private`.
        below: random source of the draw; default: the system's.
        now: returns Unix seconds.

    Raises:
        ConfigError: the relay's address lacks its scheme.
    """

    def __init__(
        self,
        relay: str,
        *,
        trust: Trust | Path | str,
        api_key: str,
        policy: AttestationPolicy | None = None,
        limits: Limits | None = None,
        state: Path | None = None,
        receipts: Keep | None = None,
        buys_directly: bool = False,
        remember: bool = True,
        size_class: str | None = None,
        below: Below = secrets.randbelow,
        now: Callable[[], float] = time.time,
    ) -> None:
        check_scheme(relay, "relay")
        self.relay = relay.rstrip("/") + "/"
        self.now = now
        self.trust = trust if isinstance(trust, Trust) else read_trust(Path(trust))
        self._policy = policy or AttestationPolicy()
        self._limits = limits or Limits()
        self._memory = Memory(state or state_file(self.trust.log)) if remember else None
        self._below = below
        self._seen = SharedView(self._memory)
        self._believed: VerifiedEpoch | None = None
        self._believed_at = 0.0
        self._is_doubted = False
        self._findings: dict[str, Findings] = {}
        self._keys: dict[str, bytes] = {}
        self._receipts = receipts
        self.size_class = find_size_class(size_class)
        self._bundle = b""
        self._evidence: dict[str, bytes] = {}
        self._wallet = Wallet()
        self._plan = PurchasePlan()
        issuer = self.trust.issuer
        self._record = IssuerRecord(issuer, None if self._memory is None else beside(self._memory.path))
        self._buyer = Buyer(
            issuer,
            self.relay,
            api_key,
            is_direct=buys_directly,
            see=lambda keys: self._record.see(keys, self.now()),
            needs_post_quantum=self._policy.post_quantum,
        )

    @property
    def believed(self) -> VerifiedEpoch | None:
        """The verified epoch; None before the first request."""
        return self._believed

    @property
    def findings(self) -> Mapping[str, Findings]:
        """The findings about each node of the epoch, by node_id."""
        return MappingProxyType(self._findings)

    def doubt(self) -> None:
        """Records a failed attempt: the next one first checks for a newer epoch."""
        self._is_doubted = True

    def give_back(self, ready: PreparedRequest) -> None:
        """Returns an unsent token to the wallet."""
        if ready.token is not None:
            self._wallet.add([ready.token])
            if self._believed is not None:
                self._drop_tokens(self._believed.epoch)

    @property
    def restock_in_s(self) -> float | None:
        """Seconds until the time drawn for the next purchase; None while there are enough tokens."""
        return self._plan.wait_s(self.now())

    def restock(self) -> FetchSteps[None]:
        """Buys a batch ahead of need. On failure another time is drawn; a request that needs a token reports the error."""
        believed, now = self._believed, self.now()
        self._plan.postpone(now)
        if believed is None or now >= believed.epoch.not_after:
            return
        self._record.check()
        self._wallet.add((yield from self._buyer.buy(believed.epoch, now)))
        self._drop_tokens((self._believed or believed).epoch)  # another batch may have arrived meanwhile
        self._plan.see(len(self._wallet), now)

    def prepare(self) -> FetchSteps[PreparedRequest]:
        """Verifies the epoch and every node's evidence, gets a token, and draws one node.

        The draw is over the whole membership, including nodes that the epoch omits: otherwise a gateway could steer requests by
        omitting nodes. Evidence of all nodes is fetched, whichever is drawn: fetching one would reveal it to the relay.

        Raises:
            EpochRefusedError, EvidenceRefusedError, NoTokensError, RelayUnreachableError: nothing was sent.
        """
        believed = yield from self._believe()
        member = draw(believed.membership.members, self._below)
        node = next((node for node in believed.epoch.nodes if node.member == member.name), None)
        if node is None:
            return PreparedRequest(believed.epoch, member, None, _absent(member), None)
        node = msgspec.structs.replace(node, keys=node.keys or self._keys.get(node.node_id, b""))
        findings = self._findings[node.node_id]
        if not findings.accepted:
            return PreparedRequest(believed.epoch, member, node, findings, None)
        order = None
        if self._receipts is not None:
            order = order_receipt(believed.epoch, self._bundle, self._evidence[node.node_id], self._receipts)
        token, budget = yield from self._take_token(believed.epoch)
        return PreparedRequest(believed.epoch, member, node, findings, token, order, budget, self.size_class)

    def _believe(self) -> FetchSteps[VerifiedEpoch]:
        now = self.now()
        if self._believed is not None and now < self._believed.epoch.not_after and not self._is_doubtful(now):
            return self._believed
        try:
            believed, bundle = yield from self._fetch_epoch(now)
        except TransparencyError as error:
            kept = self._seen.keep_proof(error)
            raise EpochRefusedError(
                f"The epoch file was refused, and nothing was sent: {error.message}.{kept}", error.reason
            ) from None
        check_gateway(believed.epoch, self._policy)
        if self._believed is None or believed.epoch != self._believed.epoch:
            self._findings = yield from self._judge_nodes(believed, now)
            self._bundle = bundle
            self._drop_tokens(believed.epoch)
        self._believed, self._believed_at, self._is_doubted = believed, now, False
        return believed

    def _drop_tokens(self, epoch: Epoch) -> None:
        issuer = self.trust.issuer
        if issuer is not None:
            taken = [
                entry for entry in epoch.issuers if entry.url == issuer.url and epoch.not_before < entry.not_after + OVERLAP_S
            ]
            keys = {key_id(entry.token_key) for entry in taken}
            self._wallet.keep(keys, challenge_between(issuer.url, epoch.gateway.url).digest())

    def _is_doubtful(self, now: float) -> bool:
        return self._is_doubted and now - self._believed_at >= DOUBT_AFTER_S

    def _fetch_epoch(self, now: float) -> FetchSteps[tuple[VerifiedEpoch, bytes]]:
        for _ in range(MOST_TRIES):
            bundle = yield from self._fetch("epoch", MAX_BUNDLE_BYTES)
            seen, fetched = self._seen.begin(), {}
            begin = self._record.begin(seen.own)
            earliest = min(begin, seen.own, seen.filed, key=lambda view: view.size)
            for path in needed_paths(bundle, self.trust, earliest):
                fetched[path] = yield from self._fetch(f"log/{path}", MOST_LOG_BYTES)
            believed = believe(bundle, self.trust, seen.newest, fetched, now)
            for view in (seen.own, seen.filed, begin):  # each must lead to the same tree
                if view != seen.newest:
                    believe(bundle, self.trust, view, fetched, now)
            self._record.read_log(begin, believed, fetched, now)
            if self._seen.save(hold_to_limits(self._limits, believed, self.trust), seen):
                return believed, bundle
        raise ConfigError("other programs keep changing the file that remembers the log; give this one its own (state)")

    def _judge_nodes(self, believed: VerifiedEpoch, now: float) -> FetchSteps[dict[str, Findings]]:
        policy = fill_policy(self._policy, believed)
        findings, keys, documents = dict[str, Findings](), dict[str, bytes](), dict[str, bytes]()
        for node in believed.epoch.nodes:
            reply = yield self._ask(f"evidence/{node.evidence_sha256}", MAX_EVIDENCE_BYTES)
            evidence = reply.body if reply.status == 200 else None
            found = judge_node(node, evidence, believed, self.trust, policy, now)
            if evidence is None or hashlib.sha256(evidence).hexdigest() != node.evidence_sha256:
                # otherwise a carrier of files could exclude nodes that it does not own for one client, one draw each
                failed = found.of(Outcome.FAILED)
                raise EvidenceRefusedError(
                    f"Nothing was sent: of node {node.node_id[:8]} {failed[0].text}. Each node's has to come, or who carries "
                    "it could choose among them.",
                    [step.slug for step in failed],
                )
            findings[node.node_id], documents[node.node_id] = found, evidence
            if found.accepted:
                keys[node.node_id] = read_statement(read_evidence(evidence).statement).keys
        refuse_shared_chips(findings, documents, self._limits)
        self._keys = keys
        self._evidence = documents if self._receipts is not None else {}
        return findings

    def _take_token(self, epoch: Epoch) -> FetchSteps[tuple[Token, int]]:
        issuer = self.trust.issuer
        if issuer is not None:  # spend no token in an epoch whose keys mark tokens, however many are left
            self._record.check()
            signing_key(epoch, issuer)
        if not len(self._wallet):
            self._plan.run_out()
            self._wallet.add((yield from self._buyer.buy(epoch, self.now())))
        token = self._wallet.pop()
        assert token is not None, "a batch has tokens"
        assert issuer is not None, "without an issuer none is bought"
        self._plan.see(len(self._wallet), self.now())
        return token, signed_budget(epoch, issuer, token)

    def _fetch(self, path: str, most_bytes: int) -> FetchSteps[bytes]:
        reply: Reply = yield self._ask(path, most_bytes)
        if reply.status != 200:
            raise EpochRefusedError(
                f"The relay answered {reply.status} for {path} of the gateway's; nothing was sent. Check that the gateway runs."
            )
        return reply.body

    def _ask(self, path: str, most_bytes: int) -> Ask:
        return Ask("the relay", f"{self.relay.rstrip('/')}{WELL_KNOWN}/{path}", most_bytes=most_bytes)


def _absent(member: Member) -> Findings:
    findings = Findings()
    findings.fail("absent", f"{member.name} is a member, and the epoch names no node of it")
    return findings
