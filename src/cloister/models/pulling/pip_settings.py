"""Where pip is set to download from: its configuration files and variables (pip's documentation, "Configuration").

What is read here is enough for a plain index. Anything further, such as a keyring, is left to pip itself.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final

from cloister.types.errors import ModelError

_SECTIONS: Final = ("global", "download")
_BEYOND: Final = frozenset({"find-links", "no-index", "client-cert", "keyring-provider"})


@dataclass(frozen=True, slots=True)
class PipSettings:
    """What pip is set to.

    Attributes:
        index_urls: in the order in which they are asked; a login may be in them. None where pip is neither set to one nor
            installed, since it is pip that knows the public one.
        trusted_hosts: those that plain HTTP may be used with.
        cert: file of certificates that take the place of the system's.
        beyond: what only pip itself can do.
    """

    index_urls: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    cert: str | None = None
    proxy: str | None = None
    beyond: tuple[str, ...] = ()


def read_pip_settings(environ: Mapping[str, str] = os.environ) -> PipSettings:
    """Reads them; later files go over earlier ones, and variables over files.

    Raises:
        ModelError: a file cannot be understood.
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
    """Returns the index that pip asks where it is set to no other; None without pip."""
    try:
        return str(import_module("pip._internal.models.index").PyPI.simple_url)
    except (ImportError, AttributeError):
        return None


def _config_files(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yields those that pip would read, the weakest first."""
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
