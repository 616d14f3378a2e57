"""What the routes of one server share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cloister.engine.client import EngineClient
from cloister.policy.gate import Admission
from cloister.server.calls import HttpCall, HttpCalls, call_of
from cloister.server.errors import OverloadedError
from cloister.server.files.service import FileService
from cloister.server.metrics import Exposition
from cloister.server.pdf.reading import PdfReader
from cloister.server.prompts import PromptReader
from cloister.types.request import Request as EngineRequest
from cloister.types.request import SequenceOutput

PREPARE_TIMEOUT_S: Final = 30.0
"""How long parsing, templating and tokenizing may take, waiting for a free thread included."""

T = TypeVar("T")


def limit_text_threads(num_threads: int | None) -> anyio.CapacityLimiter:
    """Returns how many threads may parse, template and tokenize: as many as the kernels have, but 2 to 8."""
    return anyio.CapacityLimiter(max(2, min(8, num_threads or 2)))


@dataclass(frozen=True, slots=True)
class ServerState:
    """The parts of a server, put together by `create_app`.

    Attributes:
        threads: for text work, beside the event loop.
        files: what users keep here; None where nothing is kept.
        pdf: reads PDF files; None on a sealed node.
        call: the HTTP request that is served; None where nobody watches.
    """

    engine: EngineClient
    reader: PromptReader
    metrics: Exposition
    calls: HttpCalls
    prepare_timeout_s: float = PREPARE_TIMEOUT_S
    threads: anyio.CapacityLimiter = field(default_factory=lambda: limit_text_threads(None))
    files: FileService | None = None
    pdf: PdfReader | None = None
    call: HttpCall | None = None

    def generate(self, request: EngineRequest) -> AsyncGenerator[SequenceOutput, None]:
        """As `EngineClient.generate`, on the account of the call."""
        if self.call is None:
            return self.engine.generate(request)
        return self.calls.generate(self.engine, self.call, request)

    async def off_the_loop(self, work: Callable[..., T], *args: Any) -> T:
        """Runs text work in a thread, with a deadline.

        Raises:
            OverloadedError: it took too long.
        """
        call = partial(work, *args)
        try:
            with anyio.fail_after(self.prepare_timeout_s):
                return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self.threads)
        except TimeoutError:
            raise OverloadedError("The server is too busy to read the prompt; try again in a moment.") from None


def state_of(request: Request) -> ServerState:
    """Returns the state that serves a request; what the engine does for it counts for its call."""
    state = request.app.state.server
    assert isinstance(state, ServerState)
    call = call_of(request.scope)
    return state if call is None else replace(state, call=call)


def admission_of(request: Request) -> Admission:
    """Returns what the credential of a request allows."""
    admission = request.scope["state"]["admission"]
    assert isinstance(admission, Admission)
    return admission


def json_response(answer: Any) -> Response:
    """Returns a struct as the body of a reply."""
    return Response(msgspec.json.encode(answer), media_type="application/json")
