"""Large bodies that are whole: their memory is free once a worker has them, and they keep no small body out meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.types import Message, Scope

from cloister.private.http_io import BODY_TIMEOUT_S, MAX_REQUEST_BYTES
from cloister.private.workers.metrics import Figures
from cloister.private.workers.wire import BodyPiece, SealedPart, Start, frame, receive_for_worker
from cloister.private.workers.worker_pool import (
    SEAL_BYTES,
    WORKER_CEILING_BYTES,
    WORKER_COPIES,
    WORKER_FREE_BYTES,
    WorkerFront,
    WorkerPool,
)
from cloister.server.load_shedding import SMALL_BODY_BYTES, BodyBudget
from cloister.trust.sealing import bucket_bytes, seal_chunked_request
from cloister.trust.sealing.kem import KEMS, Kem
from cloister.trust.sealing.keys import SealingKey

SCOPE: Scope = {"type": "http", "method": "POST", "path": "/ohttp", "headers": [], "client": ("192.0.2.1", 1)}
MIB = 2**20
LARGE = 16 * MIB


class HeldAnswers(WorkerPool):
    """Workers of this process, behind real sockets, that answer when they are told to."""

    def __init__(self, *, read: bool) -> None:
        super().__init__()
        self._read = read
        self.workers: list[asyncio.Task[None]] = []
        self.bodies: list[int] = []
        self.go = asyncio.Event()

    async def fork(self) -> socket.socket:
        near, far = socket.socketpair()
        self.workers.append(asyncio.create_task(self._work(far)))
        return near

    async def _work(self, far: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=far)
        try:
            await self._answer(reader, writer)
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._read:
            await self.go.wait()
        await receive_for_worker(reader)
        num_bytes, more = 0, True
        while more:
            piece = await receive_for_worker(reader)
            assert isinstance(piece, BodyPiece)
            num_bytes, more = num_bytes + len(piece.body), piece.more
        self.bodies.append(num_bytes)
        await self.go.wait()
        writer.write(frame(Start(200, [])) + frame(SealedPart(b"answer", False)))
        await writer.drain()
        await reader.read()  # until the front has all of it


class Front:
    """A front whose requests are there as soon as they are sent."""

    def __init__(self, *, read: bool) -> None:
        self.pool = HeldAnswers(read=read)
        self._front = WorkerFront(
            self.pool,
            lambda _: None,
            Figures(),
            max_request_bytes=MAX_REQUEST_BYTES,
            body_timeout_s=BODY_TIMEOUT_S,
            max_workers=100,
        )

    async def post(self, num_bytes: int) -> int:
        """Returns the status of the reply."""
        left, statuses = num_bytes, []

        async def receive() -> Message:
            nonlocal left
            if left < 0:
                await asyncio.Event().wait()
            piece = min(left, MIB)
            left = left - piece or -1
            return {"type": "http.request", "body": bytes(piece), "more_body": left > 0}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await self._front(SCOPE, receive, send)
        return statuses[0]


@asynccontextmanager
async def open_front(*, read: bool) -> AsyncIterator[Front]:
    """A front and four requests of 16 MiB, which wait for their answers and have all memory that there is for bodies."""
    front = Front(read=read)
    held = [asyncio.create_task(front.post(LARGE)) for _ in range(4)]
    async with asyncio.timeout(300):
        while len(front.pool.bodies) < 4 if read else len(front.pool.workers) < 4:
            await asyncio.sleep(0.01)
        try:
            yield front
        finally:
            front.pool.go.set()
        assert await asyncio.gather(*held) == [200] * 4
        assert sorted(front.pool.bodies)[-4:] == [LARGE] * 4


def test_large_requests_whose_answers_last_take_no_memory_from_others() -> None:
    async def live() -> None:
        async with open_front(read=True) as front:
            others = [asyncio.create_task(front.post(num_bytes)) for num_bytes in (4 * MIB, 4000)]
            await asyncio.sleep(0.2)
            front.pool.go.set()
            assert await asyncio.gather(*others) == [200, 200]

    asyncio.run(live())


def test_copies_of_bodies_in_workers_have_a_ceiling_that_short_requests_pass() -> None:
    async def live() -> None:
        async with open_front(read=True) as front:  # four of 16 MiB, of which each worker makes several copies
            more = [asyncio.create_task(front.post(LARGE)) for _ in range(8)]
            short = asyncio.create_task(front.post(WORKER_FREE_BYTES))
            async with asyncio.timeout(300):
                while len(front.pool.bodies) + sum(task.done() for task in more) < 4 + 8 + 1:
                    await asyncio.sleep(0.01)
            refused = [task.result() for task in more if task.done()]
            assert refused == [503] * len(refused)
            assert (4 + 8 - len(refused)) * LARGE * WORKER_COPIES <= WORKER_CEILING_BYTES
            assert not short.done()  # it has a worker
            front.pool.go.set()
            assert await short == 200
            await asyncio.gather(*more)
        assert await front.post(LARGE) == 200  # what ended is given back

    asyncio.run(live())


async def fill(front: Front, num_bytes: int) -> list[asyncio.Task[int]]:
    """Sends bodies of one length until one is refused; returns those that have a worker."""
    held: list[asyncio.Task[int]] = []
    while True:
        begun, body = len(front.pool.bodies), asyncio.create_task(front.post(num_bytes))
        while not body.done() and len(front.pool.bodies) == begun:
            await asyncio.sleep(0.002)
        if body.done():
            assert body.result() == 503
            return held
        held.append(body)


def test_large_bodies_leave_room_for_every_smaller_bucket() -> None:
    async def live() -> list[int]:
        front = Front(read=True)
        async with asyncio.timeout(300):
            held = [await fill(front, bucket_bytes(size) + SEAL_BYTES) for size in (16 * MIB, 4 * MIB, MIB, 256 * 1024)]
            short = asyncio.create_task(front.post(bucket_bytes(64 * 1024) + SEAL_BYTES))
            await asyncio.sleep(0.05)
            assert not short.done()  # it has a worker
            front.pool.go.set()
            assert await asyncio.gather(short, *itertools.chain(*held)) == [200] * len(front.pool.bodies)
        return [len(bodies) for bodies in held]

    counts = asyncio.run(live())
    assert all(counts), counts
    assert sum(counts) >= 40, "so many bodies at once it takes to keep others of 256 KiB out"


@pytest.mark.parametrize("kem", KEMS, ids=lambda kem: type(kem).__name__)
def test_a_sealed_bucket_is_no_longer_than_it_is_taken_for(kem: Kem) -> None:
    sealed, _ = seal_chunked_request(SealingKey.generate(1, kem).configuration, bytes(bucket_bytes(20_000)))
    assert bucket_bytes(20_000) < len(sealed) <= min(bucket_bytes(20_000) + SEAL_BYTES, WORKER_FREE_BYTES)


def test_a_small_request_gets_in_where_whole_bodies_reach_the_ceiling() -> None:
    async def live() -> None:
        async with open_front(read=False) as front:
            assert await front.post(LARGE) == 503
            small = asyncio.create_task(front.post(4000))
            await asyncio.sleep(0.2)
            front.pool.go.set()
            assert await small == 200

    asyncio.run(live())


def test_a_request_without_a_body_reaches_its_worker() -> None:
    async def live() -> None:
        front = Front(read=True)
        front.pool.go.set()
        assert await front.post(0) == 200
        assert front.pool.bodies == [0]

    asyncio.run(live())


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "growing"])
def test_small_bodies_have_a_bound_of_their_own(is_whole: bool) -> None:
    budget = BodyBudget(10 * SMALL_BODY_BYTES, reserve_bytes=3 * SMALL_BODY_BYTES)
    large = budget.open("flood")
    large.is_whole = True
    large.add(10 * SMALL_BODY_BYTES)
    small = [budget.open("honest") for _ in range(5)]
    for charge in small:
        charge.is_whole = is_whole
        charge.add(SMALL_BODY_BYTES)
    assert budget.num_bytes == 13 * SMALL_BODY_BYTES
    assert sum(charge.is_shed for charge in small) == 2
    assert not large.is_shed


def test_large_bodies_on_their_way_give_way_before_the_reserve_is_used() -> None:
    budget = BodyBudget(10 * SMALL_BODY_BYTES)
    large, small = budget.open("flood"), budget.open("honest")
    large.add(10 * SMALL_BODY_BYTES)
    small.add(100)
    assert (large.is_shed, small.is_shed, budget.num_bytes) == (True, False, 100)


def test_a_large_body_takes_nothing_of_the_reserve_from_small_ones() -> None:
    budget = BodyBudget(10 * SMALL_BODY_BYTES)
    whole, small, large = (budget.open("same") for _ in range(3))
    whole.is_whole = True
    whole.add(10 * SMALL_BODY_BYTES)
    small.add(100)
    large.is_whole = True
    large.add(8 * SMALL_BODY_BYTES)
    assert (whole.is_shed, small.is_shed, large.is_shed) == (False, False, True)
