"""The port of an engine's host: nobody but its front gets past the TLS handshake, and nobody can keep the front out."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.cluster.link import LinkError, LinkFrame, encode_frame
from cloister.cluster.remote import host as host_module
from cloister.cluster.remote import wire
from cloister.cluster.remote.host import MAX_HANDSHAKES, EngineHost
from cloister.cluster.remote.placement import Place
from cloister.cluster.remote.session import ANOTHER, NOBODY_LISTENS, HostSession
from cloister.cluster.remote.wire import CHUNK_BYTES, MAX_FRAME_BYTES, Assembler, ChunkKind, split
from cloister.engine.child_process import ProcessHandle
from cloister.engine.identity import Identity
from cloister.types.errors import ConfigError, EngineError
from tests.cluster.remote_hosts import make_remote, serving
from tests.cluster.test_remote import answer, check
from tests.engine.replica import make_request

FRONT, HOST, STRANGER = Identity.make(), Identity.make(), Identity.make()


def run(main: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 600.0))


def never(far: socket.socket) -> ProcessHandle:
    raise AssertionError("an engine was started")


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[EngineHost, int]]:
    """A host that must not start an engine."""
    host = EngineHost(HOST, FRONT.certificate, spawn=never)
    port = host.listen("127.0.0.1")
    serving = asyncio.create_task(host.run())
    try:
        yield host, port
    finally:
        serving.cancel()
        await asyncio.wait({serving})


async def talk(port: int, tls: ssl.SSLContext | None, data: bytes) -> bytes:
    """Connects, sends, and returns what comes back until the host closes the connection."""
    received = b""
    with suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname="" if tls else None)
        try:
            writer.write(data)
            received = await reader.read()
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
    return received


def on_stream(frame: bytes) -> bytes:
    return wire._HEAD.pack(len(frame), 0.0) + frame


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes_get_no_further_than_the_handshake(seed: int) -> None:
    draw = random.Random(seed)
    data = draw.randbytes(draw.choice((1, 5, 300, 70_000)))
    record = b"\x16\x03\x01" + len(data[:1000]).to_bytes(2, "big") + data[:1000]  # as of a handshake
    data = record if seed % 2 else b"\xff" + data

    async def main() -> None:
        async with listening() as (host, port):
            received = await talk(port, None, data + b"\0" * 70_000)
            assert len(received) <= 7  # at most an alert
            assert host._server.link is None

    run(main())


def wrong_contexts() -> dict[str, ssl.SSLContext]:
    none = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    none.check_hostname = False
    none.verify_mode = ssl.CERT_NONE
    old = FRONT.client_context(HOST.certificate)
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    return {
        "no certificate": none,
        "a stranger's certificate": STRANGER.client_context(HOST.certificate),
        "the host's own certificate": HOST.client_context(HOST.certificate),
        "TLS 1.2": old,
    }


@pytest.mark.parametrize("kind", list(wrong_contexts()))
def test_frames_of_anybody_else_are_not_read(kind: str) -> None:
    async def main() -> None:
        async with listening() as (host, port):
            assert await talk(port, wrong_contexts()[kind], on_stream(encode_frame(LinkFrame(7, 0)))) == b""
            assert host._server.link is None
            assert host._stream is None

    run(main())


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 100,
        wire._HEAD.pack(MAX_FRAME_BYTES + 1, 0.0),
        on_stream(b""),
        on_stream(b"\x95\x01"),
        on_stream(encode_frame(LinkFrame(7, 99, 1, 0, b"\0boot"))) + on_stream(b"x"),  # of a session that nobody knows
    ],
)
def test_even_the_front_is_cut_off_if_it_sends_what_no_link_sends(data: bytes) -> None:
    async def main() -> None:
        async with listening() as (host, port):
            await talk(port, FRONT.client_context(HOST.certificate), data)
            assert host._session is None

    run(main())


def test_a_host_with_another_certificate_is_not_spoken_to() -> None:
    async def main() -> None:
        async with listening() as (_, port):
            session = HostSession(Place("127.0.0.1", port, STRANGER.certificate), FRONT)
            assert await session.receive() is None
            assert session.how == ANOTHER
            await session.close()

    run(main())


def test_a_port_without_a_host_ends_the_session_at_once() -> None:
    async def main() -> None:
        with socket.socket() as taken:  # nobody else gets its port, and nothing listens there
            taken.bind(("127.0.0.1", 0))
            session = HostSession(Place("127.0.0.1", taken.getsockname()[1], HOST.certificate), FRONT)
            assert await session.receive() is None
            assert session.how == NOBODY_LISTENS
            await session.close()

    run(main())


def test_the_front_gets_in_past_a_crowd_of_half_open_connections(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path) as remote:
            assert remote.placement.process is not None
            crowd = [
                await asyncio.open_connection("127.0.0.1", remote.placement.process.report.port)
                for _ in range(MAX_HANDSHAKES + 40)
            ]
            remote.network.break_connections()
            check(request := make_request("let me in", max_tokens=5), await answer(remote, request))
            assert remote.placement.num_starts == 1
            assert await crowd[0][0].read() == b""  # the oldest made room
            for _, writer in crowd:
                writer.transport.abort()

    run(main())


def test_a_silent_connection_is_closed_when_the_handshake_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "HANDSHAKE_S", 0.2)

    async def main() -> None:
        async with listening() as (host, port):
            assert await talk(port, None, b"\x16") == b""
            assert not host._handshakes

    run(main())


def test_bytes_of_an_earlier_connection_do_nothing_when_they_are_sent_again(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path) as remote:
            check(request := make_request("remember me", max_tokens=5), await answer(remote, request))
            (recorded,) = remote.network.connections
            assert b"remember me" not in recorded
            assert len(recorded) > 1000
            assert remote.placement.process is not None
            received = await talk(remote.placement.process.report.port, None, bytes(recorded))
            assert b"remember me" not in received
            check(request := make_request("and on", max_tokens=5), await answer(remote, request))
            assert remote.placement.num_starts == 1
            assert len(remote.network.connections) == 1

    run(main())


def test_frames_of_an_earlier_session_start_no_second_engine(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path) as remote:
            assert remote.transport._session is not None
            link = remote.transport._session._link
            tls = remote.transport._identity.client_context((await remote.placement.start()).certificate)
            again = [LinkFrame(link._session, 0), LinkFrame(link._session, link._token, 1, 0, b"\1boot")]
            reader, writer = await asyncio.open_connection("127.0.0.1", remote.network.port, ssl=tls, server_hostname="")
            for frame in again:
                writer.write(on_stream(encode_frame(frame)))
            await reader.readexactly(1)
            check(request := make_request("and on", max_tokens=5), await answer(remote, request))
            assert remote.placement.num_starts == 1
            writer.close()

    run(main())


def test_an_engine_that_nobody_can_reach_is_an_error_that_says_what_to_do(model_path: Path) -> None:
    async def main() -> None:
        remote = make_remote(model_path)
        remote.placement.shown = STRANGER.certificate
        try:
            with pytest.raises(EngineError, match="must reach each other on all TCP ports"):
                await remote.client.start()
        finally:
            await remote.placement.close()

    run(main())


def test_a_certificate_that_is_none_is_an_error_and_a_key_shows_itself_nowhere() -> None:
    with pytest.raises(ConfigError, match="not in PEM"):
        FRONT.client_context("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    assert "PRIVATE" not in repr(FRONT)
    assert "PRIVATE" not in FRONT.certificate


@given(sizes=st.lists(st.sampled_from((0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES)), max_size=4))
def test_messages_come_out_of_their_chunks_as_they_went_in(sizes: list[int]) -> None:
    assembler = Assembler()
    messages = [bytes([number]) * size for number, size in enumerate(sizes)]
    completed = [assembler.add(chunk) for message in messages for chunk in split(message)]
    assert [message for message in completed if message is not None] == [(ChunkKind.LAST, message) for message in messages]


def test_a_message_over_the_limit_is_neither_sent_nor_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 3 * CHUNK_BYTES)
    with pytest.raises(LinkError, match="over the link's limit"):
        list(split(b"x" * (3 * CHUNK_BYTES + 1)))
    assembler = Assembler()
    for _ in range(3):
        assembler.add(b"\0" + b"x" * CHUNK_BYTES)
    with pytest.raises(LinkError, match="over the limit"):
        assembler.add(b"\0x")
    for chunk in (b"", b"\x09x"):
        with pytest.raises(LinkError, match="unknown kind"):
            Assembler().add(chunk)
