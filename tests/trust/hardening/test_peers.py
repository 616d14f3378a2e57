"""A program with a peer, run by the launcher: it calls the peer's port and no other."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from cloister.trust.hardening import Missing
from cloister.trust.hardening.landlock import Landlock
from tests.trust.hardening.launching import needs_measures

pytestmark = needs_measures

KEYS_PATH = "/.well-known/ohttp-gateway"
KEYS = b"keys of a gateway"
TIMEOUT_S = 300.0


class Gateway(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(KEYS)))
        self.end_headers()
        self.wfile.write(KEYS)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def gateway() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@contextmanager
def hardened_relay(gateway: int, connect: int, secret: Path) -> Iterator[str]:
    """Runs `cloister relay` by the launcher; yields where it listens."""
    launcher = [sys.executable, "-P", "-m", "cloister.trust.hardening", "--read", str(secret), "--listen", "0"]
    relay = ["cloister.cli", "relay", "--gateway", f"http://127.0.0.1:{gateway}", "--secret-file", str(secret), "--port", "0"]
    process = subprocess.Popen(
        [*launcher, "--connect", str(connect), *relay], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"Relay at (\S+),", line)
        assert found is not None, process.communicate()[1][-2000:]
        yield found[1]
    finally:
        process.terminate()
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text("a-secret-that-a-relay-shows-to-its-gateway\n")
    path.chmod(0o600)
    return path


def has_port_rules() -> bool:
    try:
        return "TCP ports" in Landlock().probe().partition(";")[0]
    except Missing:
        return False


def test_a_hardened_relay_reaches_its_gateway(gateway: int, secret: Path) -> None:
    with hardened_relay(gateway, gateway, secret) as url:
        assert httpx.get(url + KEYS_PATH, timeout=TIMEOUT_S).content == KEYS


@pytest.mark.skipif(not has_port_rules(), reason="this kernel's Landlock has no rules for ports")
def test_a_hardened_relay_reaches_no_other_port(gateway: int, secret: Path) -> None:
    with hardened_relay(gateway, gateway + 1 if gateway < 65535 else 1, secret) as url:
        assert httpx.get(url + KEYS_PATH, timeout=TIMEOUT_S).status_code == 502
