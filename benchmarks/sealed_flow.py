"""What relay, gateway and node see of one request, in a table, and what sealing costs: `python -m benchmarks.sealed_flow`.

Everything runs on this machine at loopback sockets, around the embedded model. The first table is searched out of the recorded
bytes, not written by hand; the others are medians of wall time.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator

import httpx

from cloister.trust.sealing import (
    CHUNKED,
    ChunkOpener,
    Header,
    HttpRequest,
    KeyConfiguration,
    KeyRing,
    Receiver,
    ReplayCache,
    RequestHead,
    ResponseSealer,
    UnsealError,
    header_bytes,
    seal_chunked_request,
)
from cloister.trust.tokens import authorization
from tests.loopback import Seen, serve
from tests.private.inner import Inner
from tests.private.messages import Opening, known_to
from tests.private.real_server import RealServer
from tests.sealed_cloud import RELAY_SECRET, LoopbackCloud, open_cloud

PROMPT = "Tell me what a cloister is."
NUM_TOKENS = 16
NUM_ASKED = 30
NUM_TIMED = 400


def main() -> None:
    server = RealServer()
    with open_cloud(server) as cloud:
        print_flow(cloud)
        server.close()
    # around an application that computes nothing: all programs share this process, and an engine would stand in their way
    with open_cloud(Inner()) as cloud, serve(Inner()) as direct:
        print_cost(cloud, direct)
        print_refusals(cloud)
    print_failures()
    print_speed()


def make_request(*, stream: bool) -> HttpRequest:
    """One question to the embedded model, always of the same length."""
    content = {
        "model": "cloister-5m",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": NUM_TOKENS,
        "seed": 1,
        "stream": stream,
    }
    fields = ((b"content-type", b"application/json"),)
    return HttpRequest(RequestHead("POST", "https", "localhost", "/v1/chat/completions", fields), json.dumps(content).encode())


def ask(cloud: LoopbackCloud, request: HttpRequest, token: str | None = None) -> tuple[Opening, float, tuple[str, int]]:
    """Asks once; returns the opened answer, seconds to its first content, and the client's address."""
    sealed, outer, inner = cloud.seal(request, token=token)
    opening, first_s = Opening(outer, inner), 0.0
    headers = {"content-type": CHUNKED.request_type}
    with httpx.Client(verify=False, timeout=60) as client:
        began_s = time.perf_counter()
        with client.stream("POST", cloud.relay_url, content=sealed, headers=headers) as reply:
            address = reply.extensions["network_stream"].get_extra_info("socket").getsockname()
            for data in reply.iter_raw():
                opening.feed(data)
                if opening.content and not first_s:
                    first_s = time.perf_counter() - began_s
            opening.close()
            first_s = first_s or time.perf_counter() - began_s
    return opening, first_s, address


def print_flow(cloud: LoopbackCloud) -> None:
    """Prints what each program saw of one streamed answer."""
    token = authorization(cloud.buy(1)[0])
    request = make_request(stream=True)
    opening, _, address = ask(cloud, request, token)
    words = [json.loads(line[6:]) for line in opening.content.decode().splitlines() if line.startswith("data: {")]
    answer = "".join(word["choices"][0]["delta"].get("content") or "" for word in words)
    secrets = {
        "client's address": str(address[1]).encode(),
        "name of the node": cloud.nodes["a"].node_id.encode(),
        "token": token.partition('"')[2].rstrip('"').encode(),
        "path": request.head.path.encode(),
        "prompt": PROMPT.encode(),
        "answer": answer.encode(),
    }
    programs: dict[str, Seen] = {
        "relay": cloud.relay.posts()[-1],
        "gateway": cloud.gateway.posts()[-1],
        "node": cloud.node.posts()[-1],
    }
    print(f"request of {len(request.content)} bytes, answer of {len(opening.content)} bytes in {opening.num_flushes} flushes\n")
    print("| on the wire of | " + " | ".join(programs) + " |\n|---|" + "---|" * len(programs))
    rows: list[tuple[str, Callable[[Seen], object]]] = [
        ("bytes in", lambda seen: f"{len(seen.request):,}"),
        ("bytes out", lambda seen: f"{len(seen.response):,}"),
        ("pieces out", lambda seen: sum(1 for _, piece in seen.pieces if piece)),
        ("header fields in", lambda seen: len(seen.headers)),
    ]
    for name, value in rows:
        print(f"| {name} | " + " | ".join(str(value(seen)) for seen in programs.values()) + " |")
    for name, secret in secrets.items():
        shown = ["yes" if secret in seen.everything else "no" for seen in programs.values()]
        print(f"| {name} | " + " | ".join(shown) + " |")
    known = known_to(cloud, answer.encode())
    print("\n| known to, opened with its own key | " + " | ".join(programs) + " |\n|---|" + "---|" * len(programs))
    for name, secret in secrets.items():
        print(f"| {name} | " + " | ".join("yes" if secret in seen else "no" for seen in known.values()) + " |")


def print_cost(cloud: LoopbackCloud, direct: str) -> None:
    """Prints the time to the first content, sealed and not."""
    request = HttpRequest(RequestHead("POST", "https", "localhost", "/v1/echo"), b"hello")
    sealed = [ask(cloud, request)[1] for _ in range(NUM_ASKED)]
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
    """Prints what sealing and opening take."""
    receiver = Receiver(KeyRing(0.0), ReplayCache(1e9))
    configuration = receiver.ring.current.configuration
    message = bytes(1024)
    sealed, exchange = seal_chunked_request(configuration, message)
    sealer = ResponseSealer(receiver.begin(Header.parse(sealed), CHUNKED, 0.0))
    large = bytes(16 * 2**20)
    rows: Iterator[tuple[str, str]] = iter(
        (
            ("sealing a request of 1 KiB", f"{1e6 * _median(lambda: seal_chunked_request(configuration, message)):.0f} us"),
            ("context of a request", f"{1e6 * _median(lambda: receiver.begin(exchange.header, CHUNKED, 0.0)):.0f} us"),
            ("sealing a flush of 200 bytes", f"{1e6 * _median(lambda: sealer.seal(bytes(200))):.1f} us"),
            ("sealing 16 MiB", f"{16 / _median(lambda: seal_chunked_request(configuration, large), 5):.0f} MiB/s"),
        )
    )
    print("\n| work | median |\n|---|---|")
    for name, value in rows:
        print(f"| {name} | {value} |")


def _median(work: Callable[[], object], times: int = NUM_TIMED) -> float:
    taken = []
    for _ in range(times):
        began_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
