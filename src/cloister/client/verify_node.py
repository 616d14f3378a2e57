"""Runs every check that a client makes before it sends, and reports it: for a relay or gateway, or for a single node.

From a relay or gateway it fetches the epoch, the log and the evidence of all nodes. A node has no epoch: only its evidence is
checked, without what the log would prove.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import httpx

from cloister.client.errors import NoTokensError, RelayUnreachableError
from cloister.client.issuer_record import IssuerRecord
from cloister.client.limits import Limits, hold_to_limits
from cloister.client.node_verification import fill_policy, judge_keys, judge_node, know_profile, refuse_shared_chips
from cloister.client.token_purchase import signing_key
from cloister.trust.attestation import AttestationPolicy, EvidenceError, Findings, Outcome, read_evidence, read_statement
from cloister.trust.attestation.evidence import MAX_EVIDENCE_BYTES
from cloister.trust.attestation.verify import verify_evidence
from cloister.trust.transparency.checks import VerifiedEpoch, View, believe, needed_paths
from cloister.trust.transparency.epoch import MAX_BUNDLE_BYTES
from cloister.trust.transparency.refusal import TransparencyError
from cloister.trust.transparency.trust import Trust
from cloister.types.addresses import check_scheme
from cloister.types.errors import ConfigError

WELL_KNOWN: Final = "/.well-known/cloister"
DEADLINE_S: Final = 30.0
MAX_LOG_BYTES: Final = 1 << 25
_NOT_FOUND: Final = 404

Fetch = Callable[[str, int], bytes | None]
"""Maps path and maximum size to content; None if there is none."""


@dataclass(frozen=True)
class Checked:
    """The result of the checks.

    Attributes:
        epoch: steps about the list of nodes.
        nodes: steps about each node, by its name in the epoch.
        view: the new view of the log; None if it was not verified.
    """

    epoch: Findings
    nodes: dict[str, Findings] = field(default_factory=dict)
    view: View | None = None

    @property
    def accepted(self) -> bool:
        """Whether a client would send: no step failed, and there is a node."""
        return self.epoch.accepted and bool(self.nodes) and all(findings.accepted for findings in self.nodes.values())

    @property
    def proved(self) -> bool:
        """Whether every step was proved."""
        return self.accepted and self.epoch.proved and all(findings.proved for findings in self.nodes.values())


def fetch_from(url: str, client: httpx.Client) -> Fetch:
    """Returns a function that fetches public files of a program at `url`.

    The function raises `RelayUnreachableError` if there is no valid answer.

    Raises:
        ConfigError: the address lacks its scheme.
    """
    check_scheme(url, "url")
    base = url.rstrip("/")

    def fetch(path: str, most_bytes: int) -> bytes | None:
        try:
            with client.stream("GET", f"{base}{WELL_KNOWN}/{path}", timeout=DEADLINE_S) as answer:
                if answer.status_code == _NOT_FOUND:
                    return None
                if answer.status_code != httpx.codes.OK:
                    raise RelayUnreachableError(f"{base} answers {answer.status_code} for {path}")
                content = bytearray()
                for piece in answer.iter_bytes():
                    content += piece
                    if len(content) > most_bytes:
                        raise RelayUnreachableError(f"{base} sends more than {most_bytes:,} bytes for {path}")
                return bytes(content)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RelayUnreachableError(
                f"{base} cannot be reached ({type(error).__name__}); check the address and that it runs"
            ) from None

    return fetch


def check_url(
    fetch: Fetch, trust: Trust | None, policy: AttestationPolicy, view: View, now: float, limits: Limits | None = None
) -> Checked:
    """Runs every check.

    Args:
        trust: trusted keys; None suffices for a single node.
        policy: requirements; unset ones are filled from the log.
        view: the stored view of the log.
        now: Unix seconds.
        limits: limits on the membership.

    Raises:
        RelayUnreachableError: files could not be fetched.
        ConfigError: there is an epoch, but no `trust`.
    """
    bundle = fetch("epoch", MAX_BUNDLE_BYTES)
    if bundle is None:
        return _check_node(fetch, trust, policy, now)
    if trust is None:
        raise ConfigError("there is an epoch, but no trust file to verify it; give --trust FILE", param="trust")
    findings = Findings()
    try:
        record = IssuerRecord(trust.issuer, None)
        begin = view if trust.issuer is None else record.begin(view)
        fetched = _fetch_log(fetch, bundle, trust, begin)
        believed = believe(bundle, trust, view, fetched, now)
        if begin != view:  # the issuer's earlier keys are read again, so their entries are verified again
            believe(bundle, trust, begin, fetched, now)
        record.read_log(begin, believed, fetched, now)
        after = hold_to_limits(limits or Limits(), believed, trust)
    except TransparencyError as error:
        findings.fail(error.reason, error.message)
        return Checked(findings)
    _tell_epoch(findings, believed, trust, view)
    judge_keys(findings, "the gateway", believed.epoch.gateway.keys, policy)
    _tell_issuer(findings, believed, trust, record)
    policy = fill_policy(policy, believed)
    documents = {node.node_id: fetch(f"evidence/{node.evidence_sha256}", MAX_EVIDENCE_BYTES) for node in believed.epoch.nodes}
    nodes = {
        node.node_id: judge_node(node, documents[node.node_id], believed, trust, policy, now) for node in believed.epoch.nodes
    }
    served = {node_id: document for node_id, document in documents.items() if document is not None}
    refuse_shared_chips(nodes, served, limits or Limits())
    return Checked(findings, nodes, after)


def cannot_check(checked: Checked) -> bool:
    """Returns whether the only problem is a check that cannot run on this machine."""
    failed = [step for findings in (checked.epoch, *checked.nodes.values()) for step in findings.of(Outcome.FAILED)]
    return bool(failed) and all(step.slug == "verifier" for step in failed)


def _fetch_log(fetch: Fetch, bundle: bytes, trust: Trust, view: View) -> dict[str, bytes]:
    fetched = {path: fetch(f"log/{path}", MAX_LOG_BYTES) for path in needed_paths(bundle, trust, view)}
    return {path: content for path, content in fetched.items() if content is not None}


def _tell_epoch(findings: Findings, believed: VerifiedEpoch, trust: Trust, view: View) -> None:
    epoch, size = believed.epoch, believed.checkpoint.size
    findings.prove(
        "epoch",
        f"epoch {epoch.epoch} is entry {size} of the log {trust.log.name}, so everybody is given this list of "
        f"{len(epoch.nodes)} nodes",
    )
    findings.prove("witnesses", f"at least {trust.threshold} of {len(trust.witnesses)} witnesses saw that log within a day")
    since = f"since entry {view.size}, where we left it" if view.size else "from its beginning; it was never seen before"
    findings.prove("history", f"nothing in the log was changed or hidden {since}")
    membership = believed.membership
    findings.prove(
        "membership",
        f"membership {membership.number} says who is in the cloud, signed by a release key and logged before it held: "
        f"{len(membership.members)} nodes; the epoch names {epoch.capacity} of their capacity of {membership.capacity}",
    )
    release = believed.release
    findings.prove(
        "release",
        f"the nodes have to run release {release.number} (version {release.version}, {release.digest[:16]}), which is signed, "
        "logged, and not revoked",
    )


def _tell_issuer(findings: Findings, believed: VerifiedEpoch, trust: Trust, record: IssuerRecord) -> None:
    if trust.issuer is None:
        return
    try:
        record.check()
        signing_key(believed.epoch, trust.issuer)
    except NoTokensError as error:
        findings.fail("issuer", error.message)
        return
    findings.prove(
        "issuer",
        f"everybody buys tokens under one key of the issuer at {trust.issuer.url}, which it signed for at least a week",
    )


def _check_node(fetch: Fetch, trust: Trust | None, policy: AttestationPolicy, now: float) -> Checked:
    encoded = fetch("evidence", MAX_EVIDENCE_BYTES)
    if encoded is None:
        raise RelayUnreachableError("there is neither an epoch nor evidence; is this a relay, a gateway or a sealed node?")
    findings = Findings()
    findings.leave_open(
        "epoch", "this is a node by itself: nothing shows that it is in the list that everybody is given; ask its relay"
    )
    try:
        evidence = read_evidence(encoded)
        statement = read_statement(evidence.statement)
    except EvidenceError as error:
        findings.fail("evidence", error.message)
        return Checked(findings)
    node = Findings()
    if trust is not None and statement.checkpoint:
        try:
            trust.open_checkpoint(statement.checkpoint, now)
            node.prove("nonce", "the evidence was made for a checkpoint that witnesses cosigned within a day")
        except TransparencyError as error:
            node.fail("nonce", f"the checkpoint that the evidence was made for is refused: {error.message}")
    else:
        node.leave_open("nonce", "nothing shows when the evidence was made: no checkpoint of a log that is trusted is in it")
    judge_keys(node, "the node", statement.keys, policy)
    node.extend(verify_evidence(evidence, know_profile(policy), now))
    return Checked(findings, {statement.node_id: node})
