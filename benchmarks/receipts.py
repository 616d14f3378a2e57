"""What receipts cost a node and its clients: `python -m benchmarks.receipts`. Medians of wall time on this machine.

A node signs every answer, asked or not, so its cost falls on every request: one question to the key service's process.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.engine.sealed_channels import CONNECT
from cloister.private.workers.key_service import MESSAGE_BYTES, KeyServiceBoot
from cloister.private.workers.key_service_client import RemoteUnsealer
from cloister.trust.receipts import Claims, Transcript, is_signed
from cloister.trust.sealing import (
    Header,
    HttpRequest,
    KeyRing,
    RequestHead,
    header_bytes,
    parse_keys,
    seal_chunked_request,
)

NUM_TIMES = 400
DIGEST = "00" * 32
CLAIMS = Claims(epoch=DIGEST, evidence=DIGEST, profile="private", request=DIGEST, status=200, answer=DIGEST)


def median_us(work: Callable[[], object]) -> float:
    """Returns the median of `NUM_TIMES` runs in microseconds."""
    times = []
    for _ in range(NUM_TIMES):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


async def median_of(work: Callable[[Header], Awaitable[object]], headers: list[Header]) -> float:
    """Returns the median over requests, in microseconds."""
    times = []
    for header in headers:
        begun = time.perf_counter()
        await work(header)
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


async def ask_key_service() -> float:
    """Returns how long a worker waits for the signature of a key service in a process of its own, in microseconds."""
    control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with far:
        command = [sys.executable, "-m", "cloister.private.workers.key_service", str(far.fileno())]
        process = subprocess.Popen(command, pass_fds=(far.fileno(),))
    try:
        control.send(msgspec.msgpack.encode(KeyServiceBoot(must_lock=False)))
        control.recv(MESSAGE_BYTES)
        listener = _connect(control)
        worker = RemoteUnsealer()
        worker.attach(_connect(listener))
        keys = parse_keys(await worker.publish())[0]
        sealed = [seal_chunked_request(keys, b"")[0] for _ in range(NUM_TIMES)]
        headers = [Header.parse(one[: header_bytes(one)]) for one in sealed]
        for header in headers:
            await worker.accept(header)
        return await median_of(lambda header: worker.sign(header, CLAIMS.signing_input), headers)
    finally:
        control.close()
        process.wait(20)


def _connect(way: socket.socket) -> socket.socket:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with far:
        socket.send_fds(way, [CONNECT], [far.fileno()])
    return near


def main() -> None:
    """Prints a table."""
    key = Ed25519PrivateKey.generate()
    signature, public = key.sign(CLAIMS.signing_input), key.public_key().public_bytes_raw()
    configuration = parse_keys(KeyRing(0.0).publish())[0]
    _, exchange = seal_chunked_request(configuration, b"")
    request = HttpRequest(RequestHead("POST", "https", "localhost", "/v1/chat/completions"), bytes(1000))
    content = bytes(1 << 20)
    print("| work | median, microseconds |\n|---|---|")
    print(f"| signature, in the process | {median_us(lambda: key.sign(CLAIMS.signing_input)):.0f} |")
    print(f"| signature of the key service's process, from a worker | {asyncio.run(ask_key_service()):.0f} |")
    print(f"| salt and digest of a request of 1 kB | {median_us(lambda: Transcript(exchange, request)):.0f} |")
    print(f"| digest of 1 MiB of answer | {median_us(lambda: Transcript(exchange, request).add(content)):.0f} |")
    print(f"| check of a signature, at the client | {median_us(lambda: is_signed(CLAIMS, signature, public)):.0f} |")


if __name__ == "__main__":
    main()
