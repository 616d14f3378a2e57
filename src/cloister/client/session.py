"""What a client knows and holds between requests: the epoch it believes, what nodes proved, tokens. No I/O of its own.

`prepare` returns `FetchSteps`: they say what to fetch, and transports carry it. One session may serve several transports.
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
from cloister.trust.tokens import Token, authorization
from cloister.trust.tokens.blind_rsa import key_id
from cloister.trust.tokens.challenge import challenge_between
from cloister.trust.transparency.checks import Memory, VerifiedEpoch, believe, needed_paths
from cloister.trust.transparency.epoch import MAX_BUNDLE_BYTES, Epoch, NodeEntry
from cloister.trust.transparency.issuer_keys import OVERLAP_S
from cloister.trust.transparency.membership import Member
from cloister.trust.transparency.refusal import TransparencyError
from cloister.trust.transparency.trust import Trust, read_trust
from cloister.types.errors import ConfigError

WELL_KNOWN = "/.well-known/cloister"
MOST_LOG_BYTES = 1 << 25
"""Of one file of the log: 256 entries of 64 KiB, and their lengths."""
DOUBT_AFTER_S = 5.0
"""A failed try makes the client fetch the epoch again, unless it is as fresh as this: a node may have left."""


@dataclass(frozen=True)
class PreparedRequest:
    """One draw: a member of the cloud, its node, what that proved, and the token for it.

    Attributes:
        node: None where the epoch has none of this member; then a step of `findings` failed.
        token: None where the node is refused; nothing is spent on it.
        order: for a receipt; None asks for none.
        budget: output tokens that the token pays for, by the issuer's signature; None without a token.
    """

    epoch: Epoch
    member: Member
    node: NodeEntry | None
    findings: Findings
    token: Token | None
    order: ReceiptOrder | None = None
    budget: int | None = None

    def seal(self, request: HttpRequest, now: float) -> SealedEnvelope:
        """Seals a request to the node, and around that to the gateway."""
        assert self.token is not None, "nothing is sealed to a node that was refused"
        assert self.node is not None, "nothing is sealed to a node that is not there"
        return seal_for_node(request, self.node, self.epoch, authorization(self.token), now, self.order, self.budget)


class Session:
    """Where to ask, whom to believe, and what with.

    Args:
        relay: URL of the relay, the only program that this client speaks with.
        trust: keys of log, witnesses and releases, or the path of the file that has them.
        api_key: shown to the issuer alone, for tokens, sealed on its way; nothing of it goes to relay, gateway or node.
        policy: what is asked of nodes; what it leaves open is filled from the log.
        receipts: takes a receipt of every answer (docs/receipts.md); None asks for none.
        buys_directly: asks the issuer itself for tokens, which then sees this machine's address beside the API key.
        limits: what is put up with of who is in the cloud, and how fast that changes.
        state: file in which the client remembers what it saw of the log, mode 0600, so that a restart does not forget it; None
            takes one in the user's state folder (`client.state`).
        remember: False keeps it in this process's memory only, and each start sees the cloud as if for the first time.
        below: random source of the draw; the system's.
        now: Unix seconds.
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
        below: Below = secrets.randbelow,
        now: Callable[[], float] = time.time,
    ) -> None:
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
        """The epoch that is believed; None before the first request."""
        return self._believed

    @property
    def findings(self) -> Mapping[str, Findings]:
        """What each node of the epoch proved, by node_id."""
        return MappingProxyType(self._findings)

    def doubt(self) -> None:
        """Says that a try failed: the next one looks for a newer epoch first."""
        self._is_doubted = True

    def give_back(self, ready: PreparedRequest) -> None:
        """Takes a token back that was never sent."""
        if ready.token is not None:
            self._wallet.add([ready.token])
            if self._believed is not None:
                self._drop_tokens(self._believed.epoch)

    @property
    def restock_in_s(self) -> float | None:
        """Seconds until the moment that was drawn for the next purchase; None while there are tokens enough."""
        return self._plan.wait_s(self.now())

    def restock(self) -> FetchSteps[None]:
        """Buys a batch ahead of need. Where none can be bought another moment is drawn: whoever needs one is told why."""
        believed, now = self._believed, self.now()
        self._plan.postpone(now)
        if believed is None or now >= believed.epoch.not_after:
            return
        self._record.check()
        self._wallet.add((yield from self._buyer.buy(believed.epoch, now)))
        self._drop_tokens((self._believed or believed).epoch)  # another one may have come meanwhile
        self._plan.see(len(self._wallet), now)

    def prepare(self) -> FetchSteps[PreparedRequest]:
        """Makes sure of the epoch, of every node's evidence and of a token, and draws one node.

        The draw is over the membership, nodes that the epoch leaves out included: a gateway that could have nodes drawn around
        by leaving them out could choose by exclusion. Evidence of all nodes is fetched, whichever is drawn: fetching one would
        show the relay which it is.

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
        return PreparedRequest(believed.epoch, member, node, findings, token, order, budget)

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
            for view in (seen.own, seen.filed, begin):  # each has to lead to the same tree
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
                # whoever carries files could else have the nodes left out that it does not own, a draw each, for one client
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
        if issuer is not None:  # an epoch whose keys mark tokens is not paid in, however many are left
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
