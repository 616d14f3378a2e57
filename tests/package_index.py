"""A package index (PEP 503) on loopback, with wheels that a test makes, and what of it was asked."""

from __future__ import annotations

import hashlib
import io
import os
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


def make_wheel(package: str, version: str, members: Mapping[str, bytes], licence: str = "Apache-2.0") -> bytes:
    """Returns a wheel that pip takes, with a licence file in it."""
    info = f"{package.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nLicense: {licence}\n"
    whole = {
        **members,
        f"{info}/LICENSE": b"You may.\n",
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in whole.items():
            archive.writestr(name, content)
    return file.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Index:
    """What the server holds, by path, and which paths were asked for.

    Attributes:
        cut: bytes of each file after which the connection ends.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    cut: int | None = None

    def add(self, package: str, version: str, members: Mapping[str, bytes]) -> bytes:
        """Publishes a wheel and returns it."""
        wheel = make_wheel(package, version, members)
        name = f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
        self.files[f"/files/{name}"] = wheel
        page = self.files.get(f"/simple/{package}/", b"")
        self.files[f"/simple/{package}/"] = page + f'<a href="/files/{name}">{name}</a>\n'.encode()
        return wheel


@contextmanager
def package_index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """Yields an empty index that pip is set to, and to no other."""
    index = Index()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            index.asked.append(path)
            content = index.files.get(path)
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Type", "text/html" if path.startswith("/simple") else "application/octet-stream")
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write((content or b"")[: index.cut])

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    index.url = f"http://127.0.0.1:{server.server_port}"
    set_pip(monkeypatch, f"{index.url}/simple")
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def set_pip(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Sets pip to one index, whatever the machine's configuration is."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", url)
