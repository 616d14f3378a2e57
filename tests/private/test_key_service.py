"""The key service gives what opens one request, takes each once, and forgets its keys."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from cloister.engine.sealed_channels import CONNECT
from cloister.private.workers.key_service import KeyService, KeyServiceBoot, KeyServiceReady, Question
from cloister.private.workers.key_service_client import RemoteUnsealer
from cloister.trust.sealing import (
    CHUNKED,
    ChunkOpener,
    Header,
    UnsealError,
    header_bytes,
    parse_keys,
    seal_chunked_request,
)
from cloister.types.errors import EngineError


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def sealed_to(service: KeyService, message: bytes = b"secret") -> bytes:
    keys = parse_keys(service.answer(Question("publish")).keys)[0]
    return seal_chunked_request(keys, message)[0]


def test_a_request_is_begun_and_taken_once() -> None:
    service = KeyService(KeyServiceBoot(), Clock())
    header = Header.parse(sealed_to(service)).encode()
    assert service.answer(Question("begin", header, CHUNKED.request_type)).key
    assert service.answer(Question("accept", header)).error == ""
    assert service.answer(Question("accept", header)).error == "unseal"


def test_a_key_opens_nothing_when_its_time_is_over() -> None:
    clock = Clock()
    service = KeyService(KeyServiceBoot(life_s=100.0, overlap_s=10.0), clock)
    header = Header.parse(sealed_to(service)).encode()
    secrets = service.answer(Question("begin", header, CHUNKED.request_type))
    clock.now_s = 99.0
    assert service.answer(Question("begin", header, CHUNKED.request_type)) == secrets
    clock.now_s = 101.0
    assert service.answer(Question("begin", header, CHUNKED.request_type)) != secrets


NO_QUESTIONS = [Question("begin", b"short", CHUNKED.request_type), Question("begin", bytes(39), "?"), Question("open")]


@pytest.mark.parametrize("question", NO_QUESTIONS, ids=["short", "another form", "another verb"])
def test_what_is_no_question_gets_no_secrets(question: Question) -> None:
    answer = KeyService(KeyServiceBoot(), Clock()).answer(question)
    assert answer.error
    assert not answer.key


class Running:
    """A key service as a process."""

    def __init__(self) -> None:
        self.control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "cloister.private.workers.key_service", str(far.fileno())]
        with far:
            self.process = subprocess.Popen(command, pass_fds=(far.fileno(),))
        self.control.send(msgspec.msgpack.encode(KeyServiceBoot(must_lock=False)))
        self.ready = msgspec.msgpack.decode(self.control.recv(65536), type=KeyServiceReady)
        self.listener = self.connect(self.control)
        self.channels: list[socket.socket] = []

    def connect(self, way: socket.socket) -> socket.socket:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            socket.send_fds(way, [CONNECT], [far.fileno()])
        return near

    def channel(self, way: socket.socket | None = None) -> RemoteUnsealer:
        near = self.connect(way or self.listener)
        unsealer = RemoteUnsealer()
        unsealer.attach(near)
        self.channels.append(near)
        return unsealer

    def close(self) -> None:
        for sock in (self.control, self.listener, *self.channels):
            sock.close()
        self.process.wait(300)


def test_a_worker_opens_a_request_with_what_the_key_service_gives() -> None:
    async def run() -> None:
        running = Running()
        try:
            unsealer = running.channel()
            keys = parse_keys(await unsealer.publish())[0]
            sealed, _ = seal_chunked_request(keys, b"secret")
            exchange = await unsealer.begin(Header.parse(sealed), CHUNKED)
            opener = ChunkOpener(exchange.context)
            opener.feed(sealed[header_bytes(sealed) :])
            assert opener.close() == b"secret"
            await unsealer.accept(exchange.header)
            with pytest.raises(UnsealError):
                await unsealer.accept(exchange.header)
        finally:
            running.close()
        assert running.process.returncode == 0  # it ends with the process that started it

    asyncio.run(run())


def test_a_front_that_is_captured_gets_public_keys_of_a_key_service_and_no_secrets() -> None:
    async def run() -> None:
        running = Running()
        try:
            front = RemoteUnsealer()
            front.attach(running.control)
            keys = parse_keys(await front.publish())[0]
            header = Header.parse(seal_chunked_request(keys, b"secret")[0])
            with pytest.raises(UnsealError):
                await front.begin(header, CHUNKED)
            with pytest.raises(EngineError):  # it gave its listener away when it started, and gets no other
                await running.channel(running.control).begin(header, CHUNKED)
            assert (await running.channel().begin(header, CHUNKED)).header == header
        finally:
            running.close()

    asyncio.run(run())


def test_a_worker_gets_a_receipt_signed_for_the_request_that_it_opened_and_a_front_for_none() -> None:
    async def run() -> None:
        running = Running()
        try:
            front, worker = RemoteUnsealer(), running.channel()
            front.attach(running.control)
            keys, receipt_key = await front.publish_all()
            sealed, _ = seal_chunked_request(parse_keys(keys)[0], b"secret")
            header = Header.parse(sealed[: header_bytes(sealed)])
            with pytest.raises(UnsealError):  # it was not opened yet
                await worker.sign(header, b"receipt")
            await worker.accept(header)
            with pytest.raises(UnsealError):
                await front.sign(header, b"receipt")
            Ed25519PublicKey.from_public_bytes(receipt_key).verify(await worker.sign(header, b"receipt"), b"receipt")
            with pytest.raises(UnsealError):  # a request has one
                await worker.sign(header, b"another receipt")
        finally:
            running.close()

    asyncio.run(run())


def test_who_asks_a_key_service_that_is_gone_is_told() -> None:
    async def run() -> None:
        running = Running()
        unsealer = running.channel()
        await unsealer.publish()
        os.kill(running.process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="restart"):
            await unsealer.publish()
        running.close()

    asyncio.run(run())


def test_an_answer_that_comes_late_is_not_taken_for_that_of_the_next_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.private.workers.key_service_client.ANSWER_TIMEOUT_S", 2.0)

    async def run() -> None:
        running = Running()
        try:
            worker = running.channel()
            keys, _ = await worker.publish_all()
            header = Header.parse(seal_chunked_request(parse_keys(keys)[0], b"secret")[0])
            os.kill(running.process.pid, signal.SIGSTOP)
            with pytest.raises(EngineError, match="did not answer"):
                await worker.publish()
            assert worker.is_silent
            os.kill(running.process.pid, signal.SIGCONT)
            assert (await worker.begin(header, CHUNKED)).header == header
            assert await worker.publish() == keys
            assert not worker.is_silent
        finally:
            running.close()

    asyncio.run(run())
