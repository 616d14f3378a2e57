"""Installs clients, drives each one against a server, and writes the table of docs/compatibility.md."""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx

from benchmarks.clients.catalogue import CLIENTS
from benchmarks.clients.environments import Environment
from benchmarks.clients.table import PAGE, fill_page, read_results, write_results
from benchmarks.harness import MODEL

START_LIMIT_S = 120.0


@contextmanager
def serve(model: str) -> Iterator[str]:
    """Yields the address of a `cloister serve` that ends with the context.

    Raises:
        SystemExit: it does not answer within START_LIMIT_S.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "cloister.cli", "serve", model, "--port", str(port), "--no-log-requests"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_healthy(url)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_until_healthy(url: str) -> None:
    """Returns when `/health` is good; SystemExit if that takes longer than START_LIMIT_S."""
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s:
        try:
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"no server at {url} after {START_LIMIT_S:g} s; start one yourself and give --url to see why")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; none, all of them")
    parser.add_argument("--url", help="a server that runs; unset, one is started")
    parser.add_argument("--model", default=MODEL, help="what that one serves")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "cloister-clients", help="for installations"
    )
    parser.add_argument("--keep", action="store_true", help="leave installations for the next run")
    parser.add_argument("--dry-run", action="store_true", help="print only: write neither results nor table")
    options = parser.parse_args()
    for name in options.names:
        if name not in CLIENTS:
            parser.error(f"no client {name!r}; there are {', '.join(CLIENTS)}")
    return options


def run(name: str, url: str, options: argparse.Namespace) -> dict[str, object]:
    """Installs and drives one client; returns its entry of the results."""
    environment = Environment(CLIENTS[name], options.folder / name)
    try:
        environment.install()
        checks = environment.run(url)
        version = environment.find_version()
    except subprocess.SubprocessError as error:
        checks, version = [{"check": "install", "result": "FAILED", "seen": str(error)[:300]}], ""
    finally:
        if not options.keep:
            environment.remove()
    for check in checks:
        print(f"{name}\t{check['check']}\t{check['result']}: {check['seen']}", flush=True)
    model = httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
    return {"version": version, "model": model, "date": f"{datetime.now(UTC):%Y-%m-%d}", "checks": checks}


def drive(url: str, options: argparse.Namespace) -> int:
    """Drives every client that was asked for; returns the exit status, 1 if a check failed."""
    num_failed = 0
    for name in options.names or CLIENTS:
        if CLIENTS[name].sees and not options.url:
            with tempfile.TemporaryDirectory() as folder:
                from tests.vision_factory import make_vision_model  # imports transformers, which other clients do not need

                with serve(str(make_vision_model(Path(folder) / "random-smolvlm"))) as seeing:
                    entry = run(name, seeing, options)
        else:
            entry = run(name, url, options)
        num_failed += sum(check["result"] != "ok" for check in entry["checks"])  # type: ignore[attr-defined]
        if not options.dry_run:
            results = {**read_results(), name: entry}
            write_results(results)
            PAGE.write_text(fill_page(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    return 1 if num_failed else 0


def main() -> int:
    """Runs the command line."""
    options = read_options()
    if options.url:
        return drive(options.url.rstrip("/"), options)
    with serve(options.model) as url:
        return drive(url, options)


if __name__ == "__main__":
    sys.exit(main())
