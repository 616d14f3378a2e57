"""Floods: sockets, heads, bodies and handshakes that never end, prompts that are too long, and what honest clients notice.

Relay, gateway and sealed node run as programs of their own, a plain server with TLS, and one with the keys of two tenants. An
honest client asks through relay and gateway, with a token each, and opens a new connection beside it each time; or it asks a
server, where one tenant floods it is the other one. Each flood comes
from a program of its own and replaces sockets that are closed. All share the cores of one machine, the flood included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from benchmarks.harness import Bench, make_parser, make_progress
from cloister.client.residue_audit.cloud import Cloud
from cloister.client.residue_audit.node import ServeProgram
from cloister.policy import Credentials
from cloister.policy.keyfile import write_credentials

BODY = {"prompt": "Once", "max_tokens": 2, "temperature": 0}
ASK_TIMEOUT_S = 5.0
SETTLE_S = 5.0
"""How long a flood runs before anything is measured."""
SLOWDOWN = 3.0
CEILING_MIB = 256.0
"""What a program may grow by: 64 MiB of bodies, more of one while it is opened, and the state and buffers of 2,048 sockets."""


@dataclass(frozen=True)
class Case:
    """One flood.

    Attributes:
        target: "relay", "server" or "tenants".
        arguments: of `benchmarks.flooder`.
    """

    title: str
    target: str
    kind: str
    arguments: tuple[str, ...] = ()


LONG_PROMPTS = ("--num-sockets", "30", "--body-bytes", "4000000", "--bytes-per-s", "200000000")
CASES = (
    Case("4,000 idle sockets, one network", "relay", "idle"),
    Case("4,000 idle sockets, 400 networks", "relay", "idle", ("--num-networks", "400")),
    Case("4,000 slow heads, one network", "relay", "heads"),
    Case("2,000 slow bodies, one network", "relay", "slow_bodies", ("--num-sockets", "2000")),
    Case("40 unfinished bodies of 16 MiB", "relay", "large_bodies", ("--num-sockets", "40")),
    Case("4,000 idle sockets, one network", "server", "idle"),
    Case("200 unfinished bodies of 4 MiB", "server", "large_bodies", ("--num-sockets", "200", "--body-bytes", "4194304")),
    Case("4,000 unfinished handshakes", "server", "handshakes"),
    Case("30 prompts of 4 MB at a time, refused", "tenants", "long_prompts", LONG_PROMPTS),
    Case("30 texts of 4 MB at a time to /tokenize", "tenants", "long_prompts", (*LONG_PROMPTS, "--path", "/tokenize")),
)


class Memory:
    """The most resident memory that processes had while it watched, in MiB each."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.peaks = dict.fromkeys(pids, 0.0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            for name, pid in self._pids.items():
                self.peaks[name] = max(self.peaks[name], read_memory(pid))


def read_memory(pid: int) -> float:
    """Returns the resident memory of a process in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


@dataclass
class Target:
    """What is flooded, and how an honest client uses it.

    Attributes:
        ask: one honest request; raises for a refusal.
        pids: of the programs whose memory is watched.
        flood: more arguments of `benchmarks.flooder`.
    """

    host: str
    port: int
    ask: Callable[[], float]
    pids: dict[str, int]
    flood: tuple[str, ...] = ()


@contextlib.contextmanager
def open_relay() -> Iterator[Target]:
    cloud = Cloud("open", num_tokens=100_000)
    loop = asyncio.new_event_loop()
    client = cloud.client()
    relay = httpx.URL(cloud._relay)
    newcomer = httpx.Client(timeout=ASK_TIMEOUT_S, limits=httpx.Limits(max_keepalive_connections=0))

    async def ask_sealed() -> httpx.Response:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            return await client.post("/v1/completions", json=BODY)

    def ask() -> float:
        began_s = time.monotonic()
        newcomer.get(f"{cloud._relay}/health").raise_for_status()
        loop.run_until_complete(ask_sealed()).raise_for_status()
        return time.monotonic() - began_s

    pids = {name: program.process.pid for name, program in cloud._programs if name in ("relay", "gateway")}
    try:
        yield Target(relay.host, relay.port or 80, ask, pids)
    finally:
        loop.run_until_complete(client.aclose())
        newcomer.close()
        loop.close()
        cloud.stop()


@contextlib.contextmanager
def open_server() -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        certificate = write_certificate(Path(folder))
        server = ServeProgram("open", ["--model", "cloister-5m", "--certfile", str(certificate)])
        stack.callback(server.stop)
        url = httpx.URL(server._program.address)
        trust = ssl._create_unverified_context()
        limits = httpx.Limits(max_keepalive_connections=0)
        client = stack.enter_context(httpx.Client(base_url=url, verify=trust, timeout=ASK_TIMEOUT_S, limits=limits))

        def ask() -> float:
            began_s = time.monotonic()
            client.post("/v1/completions", json=BODY).raise_for_status()
            return time.monotonic() - began_s

        yield Target(url.host, url.port or 443, ask, {"server": server._program.process.pid})


@contextlib.contextmanager
def open_tenants() -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        credentials, flooding_key = Credentials.empty().add("flooding")
        credentials, key = credentials.add("honest")
        write_credentials(Path(folder) / "keys.json", credentials)
        server = ServeProgram("team", ["--model", "cloister-5m", "--api-keys", f"{folder}/keys.json"])
        stack.callback(server.stop)
        url = httpx.URL(server._program.address)
        headers = {"authorization": f"Bearer {key}"}
        client = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=ASK_TIMEOUT_S))

        def ask() -> float:
            began_s = time.monotonic()
            client.post("/v1/completions", json=BODY).raise_for_status()
            return time.monotonic() - began_s

        pids = {"server": server._program.process.pid}
        yield Target(url.host, url.port or 80, ask, pids, ("--key", flooding_key))


def write_certificate(folder: Path) -> Path:
    """Writes a certificate for localhost and its key into one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(minutes=5))
    certificate = builder.not_valid_after(now + datetime.timedelta(days=1)).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = folder / "server.pem"
    path.write_bytes(certificate.public_bytes(pem) + private)
    return path


@contextlib.contextmanager
def flooding(case: Case, target: Target) -> Iterator[None]:
    """Floods while the block runs."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.flooder",
        case.kind,
        "--port",
        str(target.port),
        *case.arguments,
        *target.flood,
    ]
    if case.target == "server" and case.kind != "handshakes":
        command.append("--tls")
    flood = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        flood.kill()
        flood.wait()


def ask_many(target: Target, count: int) -> tuple[list[float], int]:
    """Asks again and again; returns the seconds of those that were answered, and how many were not."""
    times: list[float] = []
    for _ in range(count):
        with contextlib.suppress(httpx.HTTPError, TimeoutError, OSError):
            times.append(target.ask())
    return times, count - len(times)


def percentile(times: Sequence[float], share: float) -> float:
    """Returns a percentile in milliseconds; infinite for no times."""
    return float(np.percentile(times, share)) * 1000 if times else float("inf")


TARGETS = {"relay": open_relay, "server": open_server, "tenants": open_tenants}


def measure(bench: Bench, options: argparse.Namespace) -> None:
    headers = ("flood", "of", "refused", "p50 (ms)", "p99 (ms)", "p99 / quiet", "peak (MiB)", "growth (MiB)")
    rows: list[tuple[object, ...]] = []
    for name in options.targets.split(","):
        with TARGETS[name]() as target, make_progress() as progress:
            cases = [case for case in CASES if case.target == name]
            task = progress.add_task(f"floods of the {name}", total=len(cases) + 1)
            ask_many(target, 20)
            times, refused = ask_many(target, options.num_requests)
            quiet, before = percentile(times, 99), {one: read_memory(pid) for one, pid in target.pids.items()}
            rows.append(("none", name, refused, percentile(times, 50), quiet, 1.0, sum(before.values()), 0.0))
            progress.advance(task)
            for case in cases:
                with Memory(target.pids) as memory, flooding(case, target):
                    times, refused = ask_many(target, options.num_requests)
                growth = max(memory.peaks[one] - before[one] for one in before)
                p99 = percentile(times, 99)
                row = (case.title, name, refused, percentile(times, 50), p99, p99 / quiet)
                rows.append((*row, sum(memory.peaks.values()), growth))
                label = f"{case.title} ({name})"
                bench.check(f"{label}: requests refused", refused, high=0)
                bench.check(f"{label}: p99 beside quiet", p99 / quiet, high=SLOWDOWN)
                bench.check(f"{label}: growth of a program (MiB)", growth, high=CEILING_MIB)
                progress.advance(task)
    bench.print_rows("Honest clients under floods", headers, rows)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-requests", type=int, default=200, help="honest requests in each flood")
    parser.add_argument("--targets", default="relay,server,tenants", help="which programs are flooded")
    options = parser.parse_args()
    bench = Bench(
        "floods",
        "Floods",
        f"no honest request is refused, P99 stays within {SLOWDOWN:g} times that of a quiet machine, and no program grows by "
        f"more than {CEILING_MIB:g} MiB",
    )
    measure(bench, options)
    return bench.finish(options)


if __name__ == "__main__":
    raise SystemExit(main())
