"""What X-Wing costs beside X25519: time of each side, and bytes of a request: `python -m benchmarks.key_exchange`.

In one process, without sockets; medians of wall time, both mechanisms in turn so that they have the same company.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from cloister.client.envelope import seal_for_node, strip_request
from cloister.trust.sealing import (
    CHUNKED,
    KEMS,
    ChunkOpener,
    Header,
    Kem,
    KeyRing,
    Receiver,
    ReplayCache,
    decode_request,
    header_bytes,
    seal_chunked_request,
)
from cloister.trust.transparency.epoch import Epoch, GatewayEntry, IssuerEntry, NodeEntry, encode_epoch

NUM_TIMED = 2000
MESSAGE = bytes(1024)
NOW_S = 1_800_000_000.0


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


def main() -> None:
    parties = [Party(kem) for kem in reversed(KEMS)]
    names = [party.kem.name for party in parties]
    print(f"| | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    print_times(parties)
    print_bytes(parties)


def print_times(parties: list[Party]) -> None:
    """Prints medians in microseconds."""
    works = [party.work() for party in parties]
    for what in works[0]:
        taken: list[list[float]] = [[] for _ in parties]
        for _ in range(NUM_TIMED):
            for place, work in enumerate(works):
                began_s = time.perf_counter()
                work[what]()
                taken[place].append(time.perf_counter() - began_s)
        print(f"| {what}, microseconds | {' | '.join(f'{1e6 * statistics.median(each):.0f}' for each in taken)} |")


def print_bytes(parties: list[Party]) -> None:
    """Prints lengths on the wire and in files."""
    rows = {
        "bytes of a request at the node": [len(inner_of(party)) for party in parties],
        "bytes of a request at the relay": [len(letter_of(party)) for party in parties],
        "bytes of key configurations": [len(party.receiver.ring.publish()) for party in parties],
        "bytes of a node in the epoch": [epoch_bytes(party, 2) - epoch_bytes(party, 1) for party in parties],
    }
    for what, values in rows.items():
        print(f"| {what} | {' | '.join(f'{value:,}' for value in values)} |")
    both = KeyRing(0.0).publish()
    print(f"\nA node publishes both: {len(both):,} bytes of key configurations.")


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
