"""Authentication between programs of the private cloud: a shared secret in a file, sent as a bearer token (RFC 6750)."""

from __future__ import annotations

import hmac
import os
import stat
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from starlette.types import Scope

from cloister.private.http_io import find_header
from cloister.private.problems import ProblemError
from cloister.server.middleware.auth import read_bearer
from cloister.types.errors import ConfigError


def check_peer(scope: Scope, secrets: Iterable[str], refusal: str) -> None:
    """Checks that a request presents one of several secrets, in constant time.

    Raises:
        ProblemError: 401 with the text of `refusal`, if it presents none of them.
    """
    given = (read_bearer(find_header(scope, b"authorization") or "") or "").encode("latin-1")
    known = [hmac.compare_digest(given, secret.encode()) for secret in secrets]
    if not any(known):
        raise ProblemError(401, refusal, fields=((b"www-authenticate", b"Bearer"),))


def check_gateway(scope: Scope, secret: str | None) -> None:
    """Checks that a request to a node comes from its gateway; without a configured secret every request passes.

    Raises:
        ProblemError: 401, if it does not.
    """
    if secret is not None:
        check_peer(scope, [secret], "This node takes requests of its gateway only.")


MIN_CHARACTERS: Final = 32
_ALLOWED: Final = frozenset(string.ascii_letters + string.digits + "-._~+/=")
"""Characters of a bearer token (RFC 6750, section 2.1)."""


def read_secrets(path: Path) -> tuple[str, ...]:
    """Returns the secrets in a file, one a line; lines that begin with # are comments.

    Raises:
        ConfigError: the file cannot be read, is open to other users, has no secret, or one that is too short or has other
            characters.
    """
    path = path.expanduser()
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = [line.strip() for line in file]
    except OSError as error:
        making = f"make it with: (umask 077; openssl rand -hex 32 > {path})"
        raise ConfigError(f"cannot read {path}: {error.strerror}; {making}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not valid UTF-8; name the file with the secret") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"other users can open {path}, which has a secret; close it with: chmod 600 {path}")
    secrets = tuple(line for line in lines if line and not line.startswith("#"))
    if not secrets or any(len(one) < MIN_CHARACTERS or not _ALLOWED.issuperset(one) for one in secrets):
        raise ConfigError(
            f"{path} must have a secret a line, of {MIN_CHARACTERS} characters or more; make one with: openssl rand -hex 32"
        )
    return secrets


def read_secret(path: Path) -> str:
    """Returns the only secret in a file.

    Raises:
        ConfigError: as `read_secrets`, or there are several.
    """
    secret, *others = read_secrets(path)
    if others:
        raise ConfigError(f"{path} must have one secret, and has {1 + len(others)}")
    return secret
