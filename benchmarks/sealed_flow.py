"""What sealing costs, and whether the time of a refusal tells its reason: `python -m benchmarks.sealed_flow`.

Relay, gateway and node run on this machine at loopback sockets, in one process, around an application that computes nothing;
medians of wall time. What each of them sees of a request is a test (`tests/private/test_flow.py`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import httpx

from cloister.client.envelope import seal_for_node, strip_request
from cloister.trust.sealing import (
    CHUNKED,
    KEMS,
    ChunkOpener,
    Header,
    HttpRequest,
    Kem,
    KeyConfiguration,
    KeyRing,
    Receiver,
    ReplayCache,
    RequestHead,
    ResponseSealer,
    UnsealError,
    decode_request,
    header_bytes,
    seal_chunked_request,
)
from cloister.trust.transparency.epoch import Epoch, GatewayEntry, IssuerEntry, NodeEntry, encode_epoch
from tests.loopback import serve
from tests.private.inner import Inner
from tests.private.messages import Opening
from tests.sealed_cloud import RELAY_SECRET, LoopbackCloud, open_cloud

NUM_ASKED = 30
NUM_TIMED = 400
MESSAGE = bytes(1024)
NOW_S = 1_800_000_000.0


def main() -> None:
    with open_cloud(Inner()) as cloud, serve(Inner()) as direct:
        print_cost(cloud, direct)
        print_refusals(cloud)
    print_failures()
    print_speed()
    print_key_exchanges([Party(kem) for kem in reversed(KEMS)])


def ask(cloud: LoopbackCloud, request: HttpRequest) -> float:
    """Asks once; returns seconds to the first content of the opened answer."""
    sealed, outer, inner = cloud.seal(request)
    opening, first_s = Opening(outer, inner), 0.0
    headers = {"content-type": CHUNKED.request_type}
    with httpx.Client(verify=False, timeout=60) as client:
        began_s = time.perf_counter()
        with client.stream("POST", cloud.relay_url, content=sealed, headers=headers) as reply:
            for data in reply.iter_raw():
                opening.feed(data)
                if opening.content and not first_s:
                    first_s = time.perf_counter() - began_s
            opening.close()
    return first_s or time.perf_counter() - began_s


def print_cost(cloud: LoopbackCloud, direct: str) -> None:
    """Prints the time to the first content, sealed and not."""
    request = HttpRequest(RequestHead("POST", "https", "localhost", "/v1/echo"), b"hello")
    sealed = [ask(cloud, request) for _ in range(NUM_ASKED)]
    plain = [ask_directly(direct, request) for _ in range(NUM_ASKED)]
    print("\n| time to the first content, median of 30 | ms |\n|---|---|")
    print(f"| an application that echoes, asked directly | {1e3 * statistics.median(plain):.1f} |")
    print(f"| the same through relay, gateway and node | {1e3 * statistics.median(sealed):.1f} |")


def ask_directly(url: str, request: HttpRequest) -> float:
    """Seconds to the first byte of content without anything in between."""
    with httpx.Client(verify=False, timeout=60) as client:
        began_s = time.perf_counter()
        headers = {"content-type": "application/json"}
        with client.stream("POST", f"{url}{request.head.path}", content=request.content, headers=headers) as reply:
            arriving = reply.iter_raw()
            next(arriving)
            first_s = time.perf_counter() - began_s
            for _ in arriving:
                pass
    return first_s


def make_failures(configuration: KeyConfiguration, replayed: bytes) -> dict[str, Callable[[], bytes]]:
    """What makes a request of each kind that does not open."""
    other_key = configuration.kem.generate().public_bytes()
    stranger = KeyConfiguration(configuration.key_id, other_key, kem_id=configuration.kem_id)
    message = bytes(1024)

    def seal() -> bytes:
        return seal_chunked_request(configuration, message)[0]

    return {
        "unknown key": lambda: bytes([replayed[0] ^ 1]) + seal()[1:],
        "replay": lambda: (seal(), replayed)[1],  # the time between two requests counts too
        "changed tag": lambda: (sealed := seal())[:-1] + bytes([sealed[-1] ^ 1]),
        "sealed to another key": lambda: seal_chunked_request(stranger, message)[0],
        "key of low order": lambda: with_low_order(seal()),
    }


def with_low_order(sealed: bytes) -> bytes:
    """A request whose encapsulated key ends with an X25519 point of low order."""
    end = header_bytes(sealed)
    return sealed[: end - 32] + bytes(32) + sealed[end:]


def print_failures() -> None:
    """Prints how long each kind of failure takes: from the header to the error."""
    receiver = Receiver(KeyRing(0.0), ReplayCache(1e9, NUM_TIMED * 10))
    configuration = receiver.ring.current.configuration
    replayed, _ = seal_chunked_request(configuration, bytes(1024))
    receiver.accept(Header.parse(replayed), 0.0)
    print_times(
        "failure, from header to error", make_failures(configuration, replayed), lambda sealed: time_failure(receiver, sealed)
    )


def print_refusals(cloud: LoopbackCloud) -> None:
    """Prints how long the gateway takes to refuse each kind, over one connection."""
    configuration = cloud.gateway_ring.current.configuration
    replayed, _ = seal_chunked_request(configuration, bytes(1024))  # no request, which the gateway finds when it has opened it
    headers = {"content-type": CHUNKED.request_type, "authorization": f"Bearer {RELAY_SECRET}"}
    with httpx.Client(verify=False, headers=headers) as client:

        def refuse(sealed: bytes) -> float:
            began_s = time.perf_counter()
            reply = client.post(cloud.gateway_url, content=sealed)
            taken_s = time.perf_counter() - began_s
            assert reply.status_code == 400
            return taken_s

        assert client.post(cloud.gateway_url, content=replayed).status_code == 200
        print_times("refusal, over HTTP", make_failures(configuration, replayed), refuse)


def print_times(title: str, kinds: dict[str, Callable[[], bytes]], measure: Callable[[bytes], float]) -> None:
    """Measures kinds in turn, so that all have the same company, and says how well a time tells its kind.

    AUC is the share of pairs in which the kind took longer than a changed tag did: 0.5 tells nothing.
    """
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(NUM_TIMED):
        for name, make in kinds.items():
            times[name].append(measure(make()))
    print(f"\n| {title} | median of {NUM_TIMED}, microseconds | fastest tenth | AUC |\n|---|---|---|---|")
    for name, taken in times.items():
        tenth = statistics.quantiles(taken, n=10)[0]
        print(f"| {name} | {1e6 * statistics.median(taken):.0f} | {1e6 * tenth:.0f} | {auc(taken, times['changed tag']):.2f} |")


def auc(longer: list[float], shorter: list[float]) -> float:
    """The share of pairs in which the first is the longer one."""
    return sum((a > b) + 0.5 * (a == b) for a in longer for b in shorter) / (len(longer) * len(shorter))


def time_failure(receiver: Receiver, sealed: bytes) -> float:
    """Seconds until a message turns out not to open."""
    began_s = time.perf_counter()
    try:
        exchange = receiver.begin(Header.parse(sealed), CHUNKED, 0.0)
        opener = ChunkOpener(exchange.context)
        opener.feed(sealed[header_bytes(sealed) :])
        opener.close()
    except UnsealError:
        return time.perf_counter() - began_s
    raise AssertionError("it opened")


def print_speed() -> None:
    """Prints what sealing and opening take with the mechanism that clients use."""
    receiver = Receiver(KeyRing(0.0), ReplayCache(1e9))
    configuration = receiver.ring.current.configuration
    sealed, exchange = seal_chunked_request(configuration, MESSAGE)
    sealer = ResponseSealer(receiver.begin(Header.parse(sealed), CHUNKED, 0.0))
    large = bytes(16 * 2**20)
    print("\n| work | median |\n|---|---|")
    print(f"| context of a request | {1e6 * _median(lambda: receiver.begin(exchange.header, CHUNKED, 0.0)):.0f} us |")
    print(f"| sealing a flush of 200 bytes | {1e6 * _median(lambda: sealer.seal(bytes(200))):.1f} us |")
    print(f"| sealing 16 MiB | {16 / _median(lambda: seal_chunked_request(configuration, large), 5):.0f} MiB/s |")


def _median(work: Callable[[], object], times: int = NUM_TIMED) -> float:
    taken = []
    for _ in range(times):
        began_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


class Party:
    """A receiver with keys of one mechanism."""

    def __init__(self, kem: Kem) -> None:
        self.kem = kem
        self.receiver = Receiver(KeyRing(0.0, kems=(kem,)), ReplayCache(1e9))
        self.configuration = self.receiver.ring.current.configuration
        self.sealed, _ = seal_chunked_request(self.configuration, MESSAGE)

    def seal(self) -> None:
        seal_chunked_request(self.configuration, MESSAGE)

    def open(self) -> bytes:
        exchange = self.receiver.begin(Header.parse(self.sealed), CHUNKED, 0.0)
        opener = ChunkOpener(exchange.context)
        return b"".join([*opener.feed(self.sealed[header_bytes(self.sealed) :]), opener.close()])

    def work(self) -> dict[str, Callable[[], object]]:
        return {
            "drawing a key pair": self.kem.generate,
            "sealing a request of 1 KiB": self.seal,
            "opening it": self.open,
        }


def print_key_exchanges(parties: list[Party]) -> None:
    """Prints what each mechanism costs, both in turn so that they have the same company, and lengths on the wire."""
    print(f"\n| | {' | '.join(party.kem.name for party in parties)} |\n|---|{'---|' * len(parties)}")
    works = [party.work() for party in parties]
    for what in works[0]:
        taken: list[list[float]] = [[] for _ in parties]
        for _ in range(5 * NUM_TIMED):
            for place, work in enumerate(works):
                began_s = time.perf_counter()
                work[what]()
                taken[place].append(time.perf_counter() - began_s)
        print(f"| {what}, microseconds | {' | '.join(f'{1e6 * statistics.median(each):.0f}' for each in taken)} |")
    rows: dict[str, Callable[[Party], int]] = {
        "bytes of a request at the node": lambda party: len(inner_of(party)),
        "bytes of a request at the relay": lambda party: len(letter_of(party)),
        "bytes of key configurations": lambda party: len(party.receiver.ring.publish()),
        "bytes of a node in the epoch": lambda party: epoch_bytes(party, 2) - epoch_bytes(party, 1),
    }
    for what, count in rows.items():
        print(f"| {what} | {' | '.join(f'{count(party):,}' for party in parties)} |")
    print(f"\nA node publishes both: {len(KeyRing(0.0).publish()):,} bytes of key configurations.")


def letter_of(party: Party) -> bytes:
    """A chat request of the smallest bucket, sealed twice."""
    request = strip_request("POST", b"/v1/chat/completions", ((b"content-type", b"application/json"),), b"{}", NOW_S)
    token = f'PrivateToken token="{"A" * 472}"'
    return seal_for_node(request, node_of(party, 1), epoch_of(party, 1), token, NOW_S).sealed


def inner_of(party: Party) -> bytes:
    sealed = letter_of(party)
    exchange = party.receiver.begin(Header.parse(sealed), CHUNKED, 0.0)
    opener = ChunkOpener(exchange.context)
    return decode_request(b"".join([*opener.feed(sealed[header_bytes(sealed) :]), opener.close()])).content


def node_of(party: Party, number: int) -> NodeEntry:
    return NodeEntry(f"{number:064x}", 1, party.receiver.ring.publish(), "00" * 32)


def epoch_of(party: Party, num_nodes: int) -> Epoch:
    gateway = GatewayEntry("https://gateway.example", party.receiver.ring.publish())
    nodes = tuple(node_of(party, number) for number in range(num_nodes))
    issuers = (IssuerEntry("https://issuer.example", b"key", 0),)
    return Epoch(1, int(NOW_S), int(NOW_S) + 600, gateway, issuers, nodes, "00" * 32, "open", ())


def epoch_bytes(party: Party, num_nodes: int) -> int:
    return len(encode_epoch(epoch_of(party, num_nodes)))


if __name__ == "__main__":
    main()
