"""The lock file of a release: every dependency with its version and the digest of the one file that is installed. No I/O.

It is a requirements file with hashes, made from pip's own report of what it would install. Every pip (and uv) can install from
it and refuses any other bytes (`--require-hashes`), where `pylock.toml` (PEP 751) is still read by few and written by pip as an
experiment. `pip freeze` alone has no digests: the installed files do not tell of which archive they came.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Struct

from cloister.types.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\Z")
_VERSION = re.compile(r"[A-Za-z0-9.!+_-]+\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


class _Archive(Struct):
    hashes: dict[str, str] = {}


class _Download(Struct):
    archive_info: _Archive | None = None


class _Metadata(Struct):
    name: str
    version: str


class _Item(Struct):
    download_info: _Download
    metadata: _Metadata


class _Report(Struct):
    install: list[_Item]


def make_lock(report: bytes, own: str = "cloister") -> str:
    """The lock file's text.

    Args:
        report: what `pip install --dry-run --ignore-installed --report - WHEEL` printed.
        own: the package that is left out: its wheel has a digest of its own in the release.

    Raises:
        ConfigError: the report cannot be read, or something in it has no SHA-256, such as a directory or a repository.
    """
    try:
        items = msgspec.json.decode(report, type=_Report).install
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"pip's report cannot be read ({error}); a newer pip writes one: pip install --upgrade pip") from None
    lines: list[str] = []
    for item in items:
        name, version = re.sub(r"[-_.]+", "-", item.metadata.name).lower(), item.metadata.version
        if name == own:
            continue
        digest = (item.download_info.archive_info or _Archive()).hashes.get("sha256", "")
        if not (_NAME.match(name) and _VERSION.match(version) and _SHA256.match(digest)):
            raise ConfigError(
                f"{name} {version} has no SHA-256 of one file, so nobody could check it; install it from an index"
            )
        lines.append(f"{name}=={version} --hash=sha256:{digest}\n")
    return "".join(sorted(lines))
