"""Images by URL: fetched from public addresses only, bounded in bytes, redirects and time; nothing of a URL is shown."""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloister.policy import Policy
from cloister.policy.settings import apply_profile_to_front
from cloister.server import image_fetching
from cloister.server.image_fetching import ImageFetcher, is_public, resolve
from cloister.types.config import Resolved, ServerConfig
from cloister.types.config import resolve as resolve_settings
from cloister.types.errors import ConfigError, InvalidRequestError, PolicyError
from cloister.types.refusals import Refusals
from tests.server.running_server import RunningServer, serving
from tests.server.test_images import PNG, asks, complete, start
from tests.server.test_images import part as data_part
from tests.server.test_tls import trusting, write_pair
from tests.vision_factory import make_vision_model

Answer = Callable[[BaseHTTPRequestHandler], None]
SECRET = "zanzibar"


class Site:
    """A web server with TLS, for the name localhost.

    Attributes:
        pages: path -> what answers it.
        heard: (path, headers) of every request.
    """

    def __init__(self, folder: Path) -> None:
        certfile, keyfile = write_pair(folder)
        self.trust = trusting(certfile)
        self.pages: dict[str, Answer] = {}
        self.heard: list[tuple[str, dict[str, str]]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.heard.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                site.pages[self.path](self)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass  # clients that hang up

        self._server = Server(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certfile, keyfile)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def url(self, path: str, host: str = "localhost") -> str:
        return f"https://{host}:{self.port}{path}"

    def fetcher(self, **fields: Any) -> ImageFetcher:
        """A fetcher that trusts this site, and whose names all lead to this machine."""
        return ImageFetcher(**{"max_bytes": 100_000, "resolve": here, "permits": lambda _: True, "tls": self.trust, **fields})

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


async def here(_: str) -> list[str]:
    return ["127.0.0.1"]


def sends(body: bytes, status: int = 200, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"content_length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def leads_to(url: str) -> Answer:
    return sends(b"", 302, location=url, set_cookie="seen=1")


def sends_forever(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"x" * 10_000)


def trickles(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"x")
        time.sleep(0.1)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"))
    yield site
    site.close()


def fetch(fetcher: ImageFetcher, *urls: str) -> list[bytes]:
    files = asyncio.run(fetcher.fetch(dict(enumerate(urls, 1))))
    return [files[number] for number in range(1, len(urls) + 1)]


def test_a_file_is_fetched_as_it_is_over_redirects(site: Site) -> None:
    site.pages |= {
        "/cat": leads_to("/moved?a=b"),
        "/moved?a=b": leads_to(site.url("/cat.png")),
        "/cat.png": sends(PNG, content_type="text/plain"),
    }
    site.heard.clear()
    assert fetch(site.fetcher(), site.url("/cat#there"), site.url("/cat.png")) == [PNG, PNG]
    assert [path for path, _ in site.heard] == ["/cat", "/moved?a=b", "/cat.png", "/cat.png"]
    for _, headers in site.heard:
        assert headers.keys() == {"host", "user-agent", "accept", "accept-encoding"}
        assert headers["host"] == f"localhost:{site.port}"


PRIVATE = [
    "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "100.100.100.200", "192.0.2.1", "198.18.0.1", "198.51.100.7", "203.0.113.5", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "168.63.129.16", "192.0.0.9", "192.0.0.10", "192.88.99.1",
    "2606:4700::1111%eth0", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1", "2002:7f00:1::", "2001:db8::1", "2001::1", "3fff::1", "100::1", "5f00::1", "localhost",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_the_internets_are_no_targets(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "172.32.0.1", "2606:4700::1111", "2a00:1450:4001::200e"])
def test_addresses_of_the_internet_are_targets(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "0x7f.1", "2130706433", "127.1", "[::1]", "[::ffff:127.0.0.1]", "0", "[::]"]
)
def test_every_spelling_of_this_machine_is_refused_before_a_connection(host: str, site: Site) -> None:
    site.pages["/cat.png"] = sends(PNG)
    site.heard.clear()
    with pytest.raises(InvalidRequestError, match=r"Image 1 .* public"):
        fetch(site.fetcher(resolve=resolve, permits=is_public), site.url("/cat.png", host))
    assert not site.heard


def test_a_name_with_one_private_address_is_refused(site: Site) -> None:
    async def both(_: str) -> list[str]:
        return ["1.1.1.1", "127.0.0.1"]

    async def none(_: str) -> list[str]:
        return []

    for names in (both, none):
        with pytest.raises(InvalidRequestError, match="public"):
            fetch(site.fetcher(resolve=names, permits=is_public), site.url("/cat.png"))


def test_the_connection_goes_to_the_address_that_was_checked(site: Site) -> None:
    """The name is of this machine to everybody else; here it is resolved once, and what is checked is what is connected to."""
    site.pages["/cat.png"] = sends(PNG)
    asked, checked = [], []

    async def once(name: str) -> list[str]:
        asked.append(name)
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]

    def permits(address: str) -> bool:
        checked.append(address)
        return address == "127.0.0.1"

    assert fetch(site.fetcher(resolve=once, permits=permits), site.url("/cat.png")) == [PNG]
    assert (asked, checked) == (["localhost"], ["127.0.0.1"])
    with pytest.raises(InvalidRequestError, match="public"):
        fetch(site.fetcher(resolve=once, permits=permits), site.url("/cat.png"))


def test_a_certificate_of_another_name_is_refused(site: Site) -> None:
    site.pages["/cat.png"] = sends(PNG)
    site.heard.clear()
    for fetcher, host in ((site.fetcher(), "other.test"), (site.fetcher(tls=None), "localhost")):
        with pytest.raises(InvalidRequestError, match="cannot be fetched"):
            fetch(fetcher, site.url("/cat.png", host))
    assert not site.heard


def test_each_redirect_is_checked_and_they_are_few(site: Site) -> None:
    async def names(name: str) -> list[str]:
        return ["127.0.0.1" if name == "localhost" else "10.0.0.1"]

    site.pages |= {
        "/inside": leads_to(site.url("/cat.png", "inside.test")),
        "/plain": leads_to("http://localhost/cat.png"),
        "/file": leads_to("file:///etc/passwd"),
        "/round": leads_to("/round"),
        "/login": leads_to(f"https://user:pass@localhost:{site.port}/cat.png"),
        "/port": leads_to("//localhost:65536/cat.png"),
        "/cat.png": sends(PNG),
    }
    site.heard.clear()
    for path in ("/inside", "/plain", "/file", "/round", "/login", "/port"):
        with pytest.raises(InvalidRequestError, match="cannot be fetched"):
            fetch(site.fetcher(resolve=names, permits=lambda address: address == "127.0.0.1"), site.url(path))
    paths = [path for path, _ in site.heard]
    assert paths.count("/round") == image_fetching.MAX_REDIRECTS + 1
    assert "/cat.png" not in paths


@pytest.mark.parametrize("size", [{}, {"content_length": "99999999"}])
def test_bytes_are_bounded_whatever_the_header_says(size: dict[str, str], site: Site) -> None:
    site.pages |= {"/long": sends(PNG, **size) if size else sends_forever, "/cat.png": sends(PNG)}
    with pytest.raises(InvalidRequestError, match=r"Image 1 .*more than 97 KiB"):
        fetch(site.fetcher(), site.url("/long"))
    most = 2 * len(PNG)
    assert len(fetch(site.fetcher(max_bytes=most), *[site.url("/cat.png")] * 2)) == 2
    with pytest.raises(InvalidRequestError, match=r"Image 2 .*more than"):
        fetch(site.fetcher(max_bytes=most - 1), *[site.url("/cat.png")] * 2)


def test_time_is_bounded_for_all_images_together(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_fetching, "FETCH_TIMEOUT_S", 1.0)
    site.pages["/slow"] = trickles
    with pytest.raises(InvalidRequestError, match=r"Image 1 .*in time"):  # with no bound it would never end
        fetch(site.fetcher(), *[site.url("/slow")] * 4)


@pytest.mark.parametrize(
    "answer", [sends(b"no", 404), sends(b"", 500), sends(PNG, content_encoding="gzip"), sends(b"", 204), sends(b"", 302)]
)
def test_what_is_no_file_is_refused(answer: Answer, site: Site) -> None:
    site.pages["/odd"] = answer
    with pytest.raises(InvalidRequestError, match="cannot be fetched"):
        fetch(site.fetcher(), site.url("/odd"))


@pytest.mark.parametrize(
    "url", ["https://", "https://[", "https://user@localhost/", "https://a..b/", "https://\x00/", "https://ü\ud800/"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be fetched"):
        fetch(ImageFetcher(max_bytes=100), url)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, site: Site) -> Iterator[RunningServer]:
    path = make_vision_model(tmp_path_factory.mktemp("model"))
    config = ServerConfig(port=0, drain_timeout_s=1.0, remote_images=True, max_request_kb=50)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cloister.server.app.ImageFetcher", lambda max_bytes: replace(site.fetcher(), max_bytes=max_bytes))
        with serving(path, lambda: start(path), config=config) as server:
            yield server


def test_an_image_by_url_is_the_same_as_one_in_the_request(
    server: RunningServer, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.pages[f"/{SECRET}.png"] = sends(PNG)
    url = site.url(f"/{SECRET}.png")
    parts = [{"type": "image_url", "image_url": {"url": url}}, data_part(PNG)]
    with caplog.at_level(logging.INFO):
        caplog.set_level(logging.DEBUG, "cloister")
        expected = complete(server, asks(data_part(PNG), data_part(PNG))).choices[0].message.content
        for messages in (asks(*parts), asks(*parts[::-1])):
            assert complete(server, messages).choices[0].message.content == expected
        source = {"type": "image", "source": {"type": "url", "url": url}}
        body = {"model": server.engine.model.name, "max_tokens": 4, "messages": [{"role": "user", "content": [source]}]}
        assert httpx.post(f"{server.url}/v1/messages", json=body, timeout=300).status_code == 200
    assert SECRET not in caplog.text


def test_an_error_shows_nothing_of_a_url(server: RunningServer, site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.pages |= {f"/{SECRET}": sends(b"", 404), f"/{SECRET}2": sends(b"x" * 60_000)}
    with caplog.at_level(logging.INFO):
        caplog.set_level(logging.DEBUG, "cloister")
        for url in (site.url(f"/{SECRET}"), site.url(f"/{SECRET}2"), f"http://localhost/{SECRET}", f"HTTPS://{SECRET}:x/"):
            body = {"messages": asks({"type": "image_url", "image_url": {"url": url}}), "max_tokens": 2}
            reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_image")
            assert SECRET not in reply.text
    assert SECRET not in caplog.text


def resolve_front(profile: str, front: Resolved[ServerConfig]) -> Resolved[ServerConfig]:
    with Refusals() as refusals:
        return apply_profile_to_front(Policy(profile), front, refusals)


@pytest.mark.parametrize("profile", ["open", "team", "private", "paranoid"])
def test_the_profile_says_whether_it_may_be_switched_on(profile: str) -> None:
    wanted = resolve_settings(ServerConfig, [("flag", {"remote_images": True})])
    if profile in ("open", "team"):
        assert resolve_front(profile, wanted).config.remote_images
    else:
        with pytest.raises(PolicyError, match=r"remote-images.*leave the setting `remote_images` out"):
            resolve_front(profile, wanted)
    assert not resolve_front(profile, resolve_settings(ServerConfig, [])).config.remote_images


def test_a_sealed_node_fetches_nothing() -> None:
    wanted = resolve_settings(ServerConfig, [("flag", {"remote_images": True, "sealed": True})])
    with pytest.raises(ConfigError, match="sealed"):
        resolve_front("team", wanted)
