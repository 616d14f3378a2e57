"""Reports the request fields that had no effect, in a header; refuses them with `--strict-fields`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Request fields without effect: refused with `--strict-fields`, else dropped and named in the reply.
#
# Generic clients send every setting that some server somewhere has (`typical_p`, `cache_salt`, `enable_thinking`). A request
# that carries one is answered without it, and the header `cloister-ignored-fields` says so.


IGNORED_HEADER: Final = "cloister-ignored-fields"
MAX_NAMED: Final = 16
"""Fields that a header names; of further ones it has the number."""
UNPRINTABLE: Final = "(unprintable)"
"""Stands for a name that a header does not repeat: it is long, or has characters that names of fields do not have."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


@dataclass(slots=True)
class IgnoredFields:
    """What one request asks for and does not get.

    Attributes:
        is_strict: nothing may be ignored.
        paths: of the fields that were, such as `messages[].cache_control`, each once, in the order of their coming.
    """

    is_strict: bool = True
    paths: dict[str, None] = field(default_factory=dict)

    def add(self, path: str) -> None:
        """Notes a field."""
        self.paths[path] = None

    def header(self) -> str:
        """Returns the value of the header."""
        named = list(self.paths)[:MAX_NAMED]
        rest = len(self.paths) - len(named)
        return ", ".join([*named, *([f"and {rest} more"] if rest else [])])


_current: ContextVar[IgnoredFields] = ContextVar("ignored_fields")


def ignored_fields() -> IgnoredFields:
    """Returns those of the request that is being read; outside of one nothing may be ignored."""
    return _current.get(None) or IgnoredFields()


@contextmanager
def noting(fields: IgnoredFields) -> Iterator[None]:
    """Notes in `fields` what is ignored while the block runs, in threads that it waits for as well."""
    token = _current.set(fields)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def renamed_fields(rename: Callable[[str], str]) -> Iterator[None]:
    """Changes the paths of fields that are noted while the block runs."""
    fields = ignored_fields()
    before = set(fields.paths)
    try:
        yield
    finally:
        fields.paths = {path if path in before else rename(path): None for path in fields.paths}


def shown_name(name: str) -> str:
    """Returns a field's name as replies repeat it: it is a name and no content, so it is short and of plain letters."""
    return name if _NAME.fullmatch(name) else UNPRINTABLE


class TellIgnored:
    """Puts the header `cloister-ignored-fields` on replies to requests of which something was ignored.

    Args:
        strict: nothing is ignored; a request with an unknown field is refused.
    """

    def __init__(self, app: ASGIApp, *, strict: bool) -> None:
        self._app = app
        self._is_strict = strict

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = IgnoredFields(self._is_strict)

        async def send_with_fields(message: Message) -> None:
            if message["type"] == "http.response.start" and fields.paths:
                header = (IGNORED_HEADER.encode(), fields.header().encode())
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        with noting(fields):
            await self._app(scope, receive, send_with_fields)
