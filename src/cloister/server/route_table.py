"""The routes of one module, declared at the functions that answer them; Starlette finds and calls these."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

Answer = TypeVar("Answer", bound=Callable[..., Awaitable[Response]])


class _ShortInteger(IntegerConvertor):
    """Starlette's `int` for numbers of a sensible length: Python refuses to read more than 4,300 digits, which answered 500."""

    regex = "[0-9]{1,18}"


register_url_convertor("int", _ShortInteger())


class RouteTable:
    """Routes in the order of their declaration.

    A function takes the request, unless it needs none, and the parameters of its path by name.

    Attributes:
        routes: for `Starlette(routes=...)`.
    """

    def __init__(self) -> None:
        self.routes: list[Route] = []

    def get(self, path: str) -> Callable[[Answer], Answer]:
        """Declares what answers GET; HEAD gets 405."""
        return self.route(path, ["GET"])

    def post(self, path: str) -> Callable[[Answer], Answer]:
        """Declares what answers POST."""
        return self.route(path, ["POST"])

    def delete(self, path: str) -> Callable[[Answer], Answer]:
        """Declares what answers DELETE."""
        return self.route(path, ["DELETE"])

    def route(self, path: str, methods: Sequence[str]) -> Callable[[Answer], Answer]:
        """Declares what answers these methods of a path, which may have parameters: `{name}`, `{name:int}`, `{name:path}`."""

        def declare(answer: Answer) -> Answer:
            route = _KnownRoute(path, _endpoint(answer), methods=list(methods), name=answer.__name__)
            route.methods = set(methods)  # Starlette adds HEAD to GET
            self.routes.append(route)
            return answer

        return declare


class _KnownRoute(Route):
    """A route that a request's scope names once it was found, for metrics and the log; not all versions of Starlette do so."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return match, child if match is Match.NONE else {**child, "route": self}


def _endpoint(answer: Callable[..., Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    takes_request = bool(inspect.signature(answer).parameters)

    async def endpoint(request: Request) -> Response:
        parameters: dict[str, Any] = request.path_params
        return await (answer(request, **parameters) if takes_request else answer())

    return endpoint
