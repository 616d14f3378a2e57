"""The front's side: starts key service and zygote, requests workers, and forwards sealed bytes to them and back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from cloister.engine.child_process import ProcessHandle
from cloister.engine.sealed_channels import CONNECT
from cloister.private.http_io import Body, GoneError, Outgoing
from cloister.private.problems import ProblemError, problem_of
from cloister.private.workers.key_service import KeyServiceBoot, KeyServiceReady
from cloister.private.workers.key_service_client import RemoteUnsealer
from cloister.private.workers.metrics import Figures
from cloister.private.workers.wire import BodyPiece, Gone, Head, SealedPart, Start, frame, receive_for_front, to_asgi
from cloister.private.workers.zygote import KEY_SERVICE_LISTENER, MESSAGE_BYTES, WORK, ZygoteBoot, ZygoteReady, engine_listener
from cloister.server.load_shedding import BODY_CEILING_BYTES, BodyBudget
from cloister.trust.tokens.redeem import BUDGET_FIELD
from cloister.types.errors import CloisterError, EngineError
from cloister.types.processes import OVERWRITING

ZYGOTE_MODULE: Final = "cloister.private.workers.zygote"
KEY_SERVICE_MODULE: Final = "cloister.private.workers.key_service"
START_TIMEOUT_S: Final = 600.0
FORK_TIMEOUT_S: Final = 10.0
_LIMIT_BYTES: Final = 2**20
_BUFFER_BYTES: Final = 1 << 20
_BUSY: Final = "This node has as many requests as it takes; try again in a moment."
_FAILED: Final = "The request could not be answered; send it again."

Start_ = Callable[[str, socket.socket], ProcessHandle]
"""Starts a module in a separate process, which inherits the socket."""
R = TypeVar("R")
WORKER_COPIES: Final = 12
"""Largest number of copies of its body that a worker holds: 46 MiB with 4 MB (sealed, opened, parsed, text, tokens)."""
WORKER_CEILING_BYTES: Final = 2**30
"""Ceiling for the bodies of all workers."""
SEAL_BYTES: Final = 4096
"""Upper bound of what sealing adds to a bucket; 1,204 bytes were measured with X-Wing."""
WORKER_FREE_BYTES: Final = 64 * 2**10 + SEAL_BYTES
"""A body of at most this size is not charged to the ceiling: a hundred of them take 80 MiB with their copies."""
LARGE_BUCKETS_BYTES: Final = tuple(4**n * 2**10 + SEAL_BYTES for n in (4, 5, 6))
"""256 KiB, 1 MiB and 4 MiB; a twelfth of the ceiling is reserved at each step for bodies that are not longer."""
_PARTS: Final = 12


def start_module(module: str, sock: socket.socket) -> ProcessHandle:
    """Re-executes the interpreter with an allocator that overwrites freed memory."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(sock.fileno())],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **OVERWRITING, "OPENBLAS_NUM_THREADS": "1"},
        pass_fds=(sock.fileno(),),
        process_group=0,
    )


class WorkerPool:
    """Key service and zygote of one node.

    Args:
        start: starts their processes.

    Attributes:
        unsealer: the front's own channel to the key service, which publishes keys.
        memory: how the key service keeps its keys from swap.
    """

    def __init__(self, start: Start_ = start_module) -> None:
        self._start = start
        self._key_service: socket.socket | None = None
        self._zygote: socket.socket | None = None
        self._processes: list[ProcessHandle] = []
        self._turn = asyncio.Lock()
        self._engine_listeners: dict[bytes, socket.socket] = {}  # that the zygote does not have yet
        self.unsealer = RemoteUnsealer()
        self.memory = ""

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    @property
    def fault(self) -> str | None:
        """Why requests can no longer be answered; None while key service and zygote run."""
        if any(process.poll() is not None for process in self._processes):
            return "the key service or the zygote of this node has ended; start the node again"
        return None

    def keep_listener(self, index: int, listener: socket.socket, *, is_carried: bool = False) -> None:
        """Passes on the listener of a new engine; this process keeps no access to the engine's content.

        Args:
            index: which of the unit's engines it is.
            is_carried: it is on another machine (`unit.carriers`).
        """
        command = engine_listener(index, is_carried=is_carried)
        if (old := self._engine_listeners.pop(command, None)) is not None:
            old.close()
        self._engine_listeners[command] = listener
        if self._zygote is not None:
            self._pass_listeners(self._zygote)

    async def open(self, key_service: KeyServiceBoot, zygote: ZygoteBoot) -> None:
        """Starts both; the engine must have been started.

        Raises:
            EngineError: one of them cannot start; the message says why.
        """
        self._key_service, said = await self._boot(KEY_SERVICE_MODULE, msgspec.msgpack.encode(key_service), KeyServiceReady)
        if said.error:
            raise EngineError(f"the key service does not start: {said.error}")
        self.memory = said.memory
        self.unsealer.attach(self._key_service)
        self._zygote, told = await self._boot(ZYGOTE_MODULE, msgspec.msgpack.encode(zygote), ZygoteReady)
        if told.error:
            raise EngineError(f"the zygote does not start: {told.error}")
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with near, far:  # the key service accepts no other, so from here on this process cannot get a request's secrets
            socket.send_fds(self._key_service, [CONNECT], [far.fileno()])
            socket.send_fds(self._zygote, [KEY_SERVICE_LISTENER], [near.fileno()])
        self._pass_listeners(self._zygote)

    async def fork(self) -> socket.socket:
        """Requests a worker and returns the socket to it.

        Raises:
            EngineError: the zygote has ended.
        """
        if self._zygote is None:
            raise EngineError("there is no zygote")
        near, far = socket.socketpair()
        with far:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            try:
                async with self._turn, asyncio.timeout(FORK_TIMEOUT_S):
                    socket.send_fds(self._zygote, [WORK], [far.fileno()])
                    await self._hear(self._zygote)
            except BaseException as error:
                near.close()
                if isinstance(error, OSError):  # includes timeouts
                    raise EngineError("the zygote makes no workers any more; the node has to be restarted") from None
                raise
        return near

    def close(self) -> None:
        """Stops both, which ends every worker and destroys every key."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            while process.poll() is None:
                pass
        for sock in (self._key_service, self._zygote, *self._engine_listeners.values()):
            if sock is not None:
                sock.close()

    def _pass_listeners(self, zygote: socket.socket) -> None:
        while self._engine_listeners:
            command, listener = self._engine_listeners.popitem()
            with listener:
                socket.send_fds(zygote, [command], [listener.fileno()])

    async def _boot(self, module: str, boot: bytes, kind: type[R]) -> tuple[socket.socket, R]:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as on_failure:
            on_failure.enter_context(near)
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
            with far:
                self._processes.append(self._start(module, far))
            said = b""
            with contextlib.suppress(OSError):  # includes timeouts
                near.send(boot)
                near.setblocking(False)
                async with asyncio.timeout(START_TIMEOUT_S):
                    said = await asyncio.get_running_loop().sock_recv(near, MESSAGE_BYTES)
            if not said:
                raise EngineError(f"{module} did not start; the log may say why")
            answer = msgspec.msgpack.decode(said, type=kind)
            on_failure.pop_all()
        return near, answer

    async def _hear(self, sock: socket.socket) -> None:
        if not await asyncio.get_running_loop().sock_recv(sock, 16):
            raise OSError("it is gone")


class WorkerFront:
    """ASGI application of `POST /ohttp` in the front: reads the whole sealed body, requests a worker, and forwards in both
    directions.

    Args:
        check: raises `ProblemError` for an unauthorized request.
        figures: counts requests passed to a worker.
        max_workers: maximum number of concurrent workers; further requests are refused with a request to retry.
    """

    def __init__(
        self,
        pool: WorkerPool,
        check: Callable[[Scope], None],
        figures: Figures,
        *,
        max_request_bytes: int,
        body_timeout_s: float,
        max_workers: int,
    ) -> None:
        self._pool = pool
        self._figures = figures
        self._check = check
        self._max_request_bytes = max_request_bytes
        self._body_timeout_s = body_timeout_s
        self._max_workers = max_workers
        self._budget = BodyBudget(max(BODY_CEILING_BYTES, max_request_bytes))
        self._memory = WorkerMemory(max_request_bytes)
        self.num_workers = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        out = Outgoing(send)
        body = Body(scope, receive, self._max_request_bytes, self._body_timeout_s, self._budget)
        try:
            body.check_size()
            self._check(scope)
            self._check_room()
            pieces = [piece async for piece in body.pieces(keeps=True)]
            num_bytes = sum(map(len, pieces))
            self._check_room(num_bytes)  # take a slot only for a complete request: slow clients hold none
            self.num_workers += 1
            self._memory.reserve(num_bytes)
            try:
                begun_s, is_whole = time.monotonic(), False
                try:
                    near = await self._pool.fork()
                    is_whole = await self._carry(scope, body, pieces, near, receive, send)
                finally:
                    self._figures.count(time.monotonic() - begun_s, answered=is_whole)
            finally:
                self.num_workers -= 1
                self._memory.give_back(num_bytes)
        except GoneError:
            return
        except CloisterError as error:
            await out.refuse(problem_of(error))
        finally:
            body.close()

    def _check_room(self, num_bytes: int = 0) -> None:
        """Raises `ProblemError` if there is no slot, or no memory for the copies of a body of this length."""
        if self.num_workers >= self._max_workers or not self._memory.has_room(num_bytes):
            raise ProblemError(503, _BUSY, fields=((b"retry-after", b"1"),))

    async def _carry(
        self, scope: Scope, body: Body, pieces: list[bytes], near: socket.socket, receive: Receive, send: Send
    ) -> bool:
        """Returns whether the whole response was sent.

        Args:
            pieces: of the body; they are released as soon as the worker has them, because a response may take minutes.
        """
        reader, writer = await asyncio.open_unix_connection(sock=near, limit=_LIMIT_BYTES)
        watching = asyncio.create_task(_tell_when_gone(receive, writer))
        wanted = (b"content-type", BUDGET_FIELD.encode())
        headers = [(name, value) for name, value in scope["headers"] if name in wanted]
        writer.write(frame(Head(scope["method"], scope["path"], headers)))
        handing = asyncio.create_task(_hand_over(pieces, body, writer))
        has_begun = False
        try:
            while (message := await receive_for_front(reader)) is not None:
                has_begun = has_begun or isinstance(message, Start)
                await send(to_asgi(message))
                if isinstance(message, SealedPart) and not message.more:
                    return True
            if not has_begun and not watching.done():
                raise ProblemError(503, _FAILED)
            return False
        finally:
            watching.cancel()
            handing.cancel()
            writer.transport.abort()  # the worker needs nothing that it has not read by now
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _hand_over(pieces: list[bytes], body: Body, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # the worker has ended; the reader of its response will notice
        more = True
        while more:
            piece = pieces.pop(0) if pieces else b""
            more = bool(pieces)
            writer.write(frame(BodyPiece(piece, more)))
            await writer.drain()
        body.close()


async def _tell_when_gone(receive: Receive, writer: asyncio.StreamWriter) -> None:
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()
    if not writer.is_closing():
        writer.write(frame(Gone()))


# Memory budget for the bodies of workers: one ceiling, part of which is reserved for smaller bodies.
# A node must not distinguish clients. It sees only the length of a body, which honest clients pad to a few lengths
# (`trust.sealing.messages`). So each length has a share that longer bodies cannot use: a few large bodies cannot block shorter
# ones, and an attacker would need as many short bodies as fit.
class WorkerMemory:
    """Tracks the memory of all workers of one node for their bodies.

    Args:
        max_request_bytes: longest body; it always fits an idle node.
    """

    def __init__(self, max_request_bytes: int) -> None:
        self._ceiling_bytes = max(WORKER_CEILING_BYTES, 2 * WORKER_COPIES * max_request_bytes)
        self._held_bytes = 0

    def has_room(self, body_bytes: int) -> bool:
        """Whether another body of this length fits."""
        if body_bytes <= WORKER_FREE_BYTES:
            return True
        num_smaller = sum(body_bytes > bucket for bucket in LARGE_BUCKETS_BYTES)
        most_bytes = self._ceiling_bytes * (_PARTS - num_smaller) // _PARTS
        return self._held_bytes + WORKER_COPIES * body_bytes <= most_bytes

    def reserve(self, body_bytes: int) -> None:
        """Charges a body for the lifetime of its worker."""
        self._held_bytes += WORKER_COPIES * body_bytes

    def give_back(self, body_bytes: int) -> None:
        """Releases a charge."""
        self._held_bytes -= WORKER_COPIES * body_bytes
