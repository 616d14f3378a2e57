"""An OpenID issuer on loopback for tests: discovery, keys that rotate, tokens that are real or wrong in one way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from joserfc import jwt
from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey

AUDIENCE = "cloister-tests"
Key = RSAKey | ECKey | OKPKey | OctKey
RSA = RSAKey.generate_key(2048, {"kid": "first", "use": "sig"})
"""Made once: it takes the longest."""


@dataclass
class Issuer:
    """What the issuer says now; tests change it.

    Attributes:
        keys: that it publishes.
        asked: paths that were read of it.
        status: of every reply.
        described: fields of its description that are other than they should be.
    """

    url: str = ""
    keys: list[Key] = field(default_factory=lambda: [RSA])
    asked: list[str] = field(default_factory=list)
    status: int = 200
    described: dict[str, Any] = field(default_factory=dict)
    delay_s: float = 0.0

    def reply(self, path: str) -> dict[str, Any]:
        if path == "/.well-known/openid-configuration":
            return {"issuer": self.url, "jwks_uri": f"{self.url}/keys", **self.described}
        return {"keys": [key.as_dict(private=False) for key in self.keys]}

    def token(self, key: Key = RSA, *, header: dict[str, Any] | None = None, alg: str = "RS256", **claims: Any) -> str:
        """Signs claims; None leaves one out."""
        now_s = int(time.time())
        whole = {"iss": self.url, "aud": AUDIENCE, "sub": "ann@example.org", "iat": now_s, "exp": now_s + 300, **claims}
        head = {"alg": alg, "kid": key.kid, "typ": "at+jwt", **(header or {})}
        return jwt.encode(head, {name: value for name, value in whole.items() if value is not None}, key, algorithms=[alg])


@contextmanager
def issuing() -> Iterator[Issuer]:
    """Runs an issuer while the block does."""
    issuer = Issuer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            issuer.asked.append(self.path)
            time.sleep(issuer.delay_s)
            body = json.dumps(issuer.reply(self.path)).encode()
            self.send_response(issuer.status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    issuer.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield issuer
    finally:
        server.shutdown()
        server.server_close()
        thread.join(300)
