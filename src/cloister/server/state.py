"""State shared by the routes of one server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cloister.engine.request_client import RequestClient
from cloister.policy.gate import Admission
from cloister.server.calls import HttpCall, HttpCalls, call_of
from cloister.server.errors import OverloadedError
from cloister.server.files.service import FileService
from cloister.server.images import ImagesPending
from cloister.server.jobs import GenerationJob
from cloister.server.kept_content import KeptContentPending, charged
from cloister.server.load_shedding import BODY_CHARGE, BodyCharge, client_network
from cloister.server.metrics import Exposition
from cloister.server.pdf.reading import PdfReader
from cloister.server.plain_bodies import is_plain
from cloister.server.prompts import PromptReader
from cloister.server.reading_queue import NUM_BODY_BYTES, ReadingQueue, ReadingThreads
from cloister.types.request import Request as EngineRequest
from cloister.types.request import SequenceOutput

PREPARE_TIMEOUT_S: Final = 30.0
"""Timeout for parsing, templating and tokenizing, including the wait for a free thread."""

T = TypeVar("T")


def open_reading_threads(num_threads: int | None) -> ReadingThreads:
    """Returns threads for parsing, templating and tokenizing: as many as the kernels have, but at least 2 and at most 8."""
    return ReadingThreads(ReadingQueue(max(2, min(8, num_threads or 2))))


@dataclass(frozen=True, slots=True)
class ServerState:
    """The parts of a server, put together by `create_app`.

    Attributes:
        threads: for text work outside of the event loop, shared fairly between tenants.
        files: users' files; None if nothing is stored.
        pdf: reads PDF files; None on a sealed node.
        call: the current HTTP request; None if it is not tracked.
        tenant: shares the threads fairly with others; on a server without keys, the network of the client.
        num_body_bytes: size of the request's body.
        body_charge: its share of the memory for bodies.
    """

    engine: RequestClient
    reader: PromptReader
    metrics: Exposition
    calls: HttpCalls
    prepare_timeout_s: float = PREPARE_TIMEOUT_S
    threads: ReadingThreads = field(default_factory=lambda: open_reading_threads(None))
    files: FileService | None = None
    pdf: PdfReader | None = None
    call: HttpCall | None = None
    tenant: str = field(default="", repr=False)
    num_body_bytes: int = 0
    body_charge: BodyCharge | None = None

    def generate(self, request: EngineRequest, *, in_batches: bool = False) -> AsyncGenerator[SequenceOutput, None]:
        """Like `RequestClient.generate`, charged to the call."""
        if self.call is None:
            return self.engine.generate(request, in_batches=in_batches)
        return self.calls.generate(self.engine, self.call, request, in_batches=in_batches)

    async def answer_off_the_loop(self, work: Callable[..., Any], *args: Any) -> Response:
        """Returns a struct as the body of a reply; makes and writes it in a thread, as `off_the_loop` does."""
        return await self.off_the_loop(lambda: json_response(work(*args)))

    def follow(self, job: GenerationJob) -> GenerationJob:
        """Returns a job of the current call, whose replies name the weights that compute it."""
        return job if self.call is None else replace(job, engine_stats=self.call.engine_stats)

    async def off_the_loop(self, work: Callable[..., T], *args: Any) -> T:
        """Runs text work in a thread, with a deadline.

        It starts again if it needs images, which are decoded in between, or much kept content (`kept_content`).

        Raises:
            OverloadedError: it took too long, or there is no memory for it.
            QueueFullError: too much of this tenant waits already.
        """
        return await self._read(partial(work, *args), is_quick=False)

    async def read(self, work: Callable[[bytes, Admission], T], raw: bytes, admission: Admission) -> T:
        """As `off_the_loop`, for a body; a plain one may be read on the loop (`plain_bodies`)."""
        return await self._read(partial(work, raw, admission), is_quick=is_plain(raw))

    async def _read(self, call: Callable[[], T], *, is_quick: bool) -> T:
        try:
            async with asyncio.timeout(self.prepare_timeout_s):
                kept = _KeptContent()
                try:
                    return await self._read_kept(call, kept, is_quick=is_quick)
                except ImagesPending as pending:
                    images = await pending.load(self.tenant)
                with ImagesPending.loaded(images):
                    return await self._read_kept(call, kept)
        except TimeoutError:
            raise OverloadedError("The server is too busy to read the prompt; try again in a moment.") from None

    async def _read_kept(self, call: Callable[[], T], kept: _KeptContent, *, is_quick: bool = False) -> T:
        while True:
            try:
                with charged(kept.num_bytes):
                    num_bytes = self.num_body_bytes + kept.num_bytes
                    return await self.threads.run(self.tenant, num_bytes, call, is_quick=is_quick)
            except KeptContentPending as pending:
                self._charge(pending.num_bytes - kept.num_bytes)
                kept.num_bytes, is_quick = pending.num_bytes, False

    def _charge(self, num_bytes: int) -> None:
        """Charges kept content as bytes of a body that is still arriving: if there is no memory, this body is shed, not
        others.
        """
        if self.body_charge is not None:
            self.body_charge.is_whole = False
            self.body_charge.add(num_bytes)
            self.body_charge.is_whole = True
            if self.body_charge.is_shed:
                raise OverloadedError("There is no memory for the request now; try again in a moment.")


@dataclass(slots=True)
class _KeptContent:
    """The charge of a reading so far."""

    num_bytes: int = 0


def state_of(request: Request) -> ServerState:
    """Returns the state for a request; the engine's work is counted for its call."""
    state = request.app.state.server
    assert isinstance(state, ServerState)
    scope = request.scope
    shared = scope.get("state", {})
    admission = shared.get("admission")
    has_key = isinstance(admission, Admission) and state.reader.gate.asks_for_keys
    return replace(
        state,
        call=call_of(scope),
        tenant=admission.tenant if has_key else client_network(scope),
        num_body_bytes=shared.get(NUM_BODY_BYTES, 0),
        body_charge=shared.get(BODY_CHARGE),
    )


def admission_of(request: Request) -> Admission:
    """Returns the rights of a request's credential."""
    admission = request.scope["state"]["admission"]
    assert isinstance(admission, Admission)
    return admission


def json_response(answer: Any) -> Response:
    """Returns a struct as the body of a reply."""
    return Response(msgspec.json.encode(answer), media_type="application/json")
