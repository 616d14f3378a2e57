"""The sealed cloud of tests and benchmarks: every program of it, at loopback sockets.

`SealedCloud` wires the programs; here they get sockets, a record of what each saw, and a customer. Tests that only ask share a
`cloud` fixture. The same programs as processes of their own are `cloister.client.residue_audit.cloud.Cloud`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from cloister.client import Session
from cloister.client.routing_audit.cloud import CloudConfig, Node, SealedCloud
from cloister.client.routing_audit.records import Spell
from cloister.private.relay import ISSUER_TIMEOUT_S
from cloister.private.upstream import ANSWER_TIMEOUT_S
from cloister.trust.attestation import AttestationPolicy
from cloister.trust.sealing import (
    CHUNKED,
    HttpRequest,
    OhttpContext,
    RequestHead,
    bucket_bytes,
    encode_request,
    seal_chunked_request,
)
from cloister.trust.shape import TrafficShape
from cloister.trust.tokens import Token, authorization, request_tokens
from cloister.trust.tokens.issuance import encode_answers
from tests.loopback import LoopbackNetwork, Recorder
from tests.memory import memory_directory
from tests.rsa_keys import shared_keys
from tests.token_service import START

RELAY, GATEWAY, ISSUER = "http://relay.test", "http://gateway.test", "https://issuer.test"
GATEWAY_NAME, ISSUER_NAME = "https://gateway.example", "https://issuer.example"
"""By which clients know them, wherever they are."""
RELAY_SECRET = "relay-" + "0" * 40
NODE_SECRET = "gateway-" + "1" * 40
EPOCH_S = 3600


class LoopbackCloud(SealedCloud):
    """A cloud at loopback sockets with one customer.

    Attributes:
        api_key: of the customer.
    """

    network: LoopbackNetwork

    def __init__(self, directory: Path, config: CloudConfig, network: LoopbackNetwork, time: float | None) -> None:
        super().__init__(directory, config=config, network=network, time=time)
        self.credentials, self.api_key = self.credentials.add("ann")

    @property
    def relay(self) -> Recorder:
        return self.network.records[RELAY]

    @property
    def gateway(self) -> Recorder:
        return self.network.records[GATEWAY]

    @property
    def issuing(self) -> Recorder:
        return self.network.records[ISSUER]

    @property
    def node(self) -> Recorder:
        """The first node's record."""
        return self.record_of("a")

    def record_of(self, name: str) -> Recorder:
        return self.network.records[self.nodes[name].url]

    @property
    def num_asked(self) -> int:
        """Requests that were sent to nodes so far."""
        return sum(len(self.record_of(name).posts()) for name in self.nodes)

    @property
    def num_open(self) -> int:
        """Requests that nodes work on."""
        return sum(self.record_of(name).num_open for name in self.nodes)

    def session(self, **changes: object) -> Session:
        """A client that remembers nothing and lets software attest."""
        settings: dict[str, object] = {"trust": self.trust, "api_key": self.api_key, "now": self.now}
        settings["policy"], settings["remember"] = AttestationPolicy(accept_software=True), False
        return Session(self.relay_url, **{**settings, **changes})  # type: ignore[arg-type]

    def buy(self, count: int) -> list[Token]:
        """Tokens, straight from the issuer."""
        now = self.now()
        key = next(k for k in self.issuer.current_keys() if k.issues_from <= now < k.issues_until)
        pending = request_tokens(key.encoded, self.challenge, count)
        return pending.finish(encode_answers(self.issuer.issue(self.api_key, list(pending.requests))))

    def seal(
        self,
        request: HttpRequest,
        *,
        node: Node | None = None,
        token: str | None = None,
        date_s: float | None = None,
        change_inner: Callable[[bytes], bytes] = lambda sealed: sealed,
        change_head: Callable[[RequestHead], RequestHead] = lambda head: head,
    ) -> tuple[bytes, OhttpContext, OhttpContext]:
        """Seals a request twice as clients do it; returns it and what opens the answer, the gateway's part first."""
        node = node or self.nodes["a"]
        message = encode_request(request)
        keys = node.ring.current.configuration
        inner, inner_exchange = seal_chunked_request(keys, message.ljust(bucket_bytes(len(message)), b"\0"))
        token = authorization(self.buy(1)[0]) if token is None else token
        date = formatdate(self.now() if date_s is None else date_s, usegmt=True)
        fields = (
            (b"authorization", token.encode()),
            (b"content-type", CHUNKED.request_type.encode()),
            (b"date", date.encode()),
        )
        head = change_head(RequestHead("POST", "https", self.challenge.origin_info[0], f"/nodes/{node.node_id}", fields))
        gateway_keys = self.gateway_ring.current.configuration
        outer, outer_exchange = seal_chunked_request(gateway_keys, encode_request(HttpRequest(head, change_inner(inner))))
        return outer, outer_exchange, inner_exchange


@contextlib.contextmanager
def open_cloud(
    inner: ASGIApp,
    *,
    num_nodes: int = 1,
    profile: str = "private",
    shape: TrafficShape | None = None,
    budget: int = 512,
    answer_timeout_s: float = ANSWER_TIMEOUT_S,
    issuer_timeout_s: float = ISSUER_TIMEOUT_S,
    certificate: tuple[Path, Path] | None = None,
    is_live: bool = False,
    **gateway: Any,
) -> Iterator[LoopbackCloud]:
    """Starts everything around `inner`, the server inside the nodes `a`, `b` and so on.

    Args:
        certificate: of the gateway and its key, for TLS.
        is_live: whether the clock is the machine's; otherwise it stands still, and tests may set `cloud.time`.
        gateway: fields of `GatewayConfig`.
    """
    config = CloudConfig(
        profile=profile,
        shape=shape,
        hardening={"test.none": "applied: for a test"},
        inner=inner,
        gateway_url=GATEWAY_NAME,
        issuer_url=ISSUER_NAME,
        budget=budget,
        tokens_per_epoch=1000,
        epoch_s=EPOCH_S,
        answer_timeout_s=answer_timeout_s,
        issuer_timeout_s=issuer_timeout_s,
        gateway=gateway,
        make_key=shared_keys(),
        relay_secret=RELAY_SECRET,
        node_secret=NODE_SECRET,
    )
    network = LoopbackNetwork({GATEWAY: certificate} if certificate else None)
    with memory_directory() as directory, contextlib.closing(network):
        cloud = LoopbackCloud(directory, config, network, None if is_live else START)
        with contextlib.closing(cloud):
            network.run(cloud.enter(Spell(dict.fromkeys("abc"[:num_nodes], 1))))
            yield cloud
