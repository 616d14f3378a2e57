"""A reply that its client does not read is given up, however it was handed over, takes no more memory than it may, and counts
for its key until it has left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import ssl
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import msgspec
import numpy as np
import pytest

from cloister.engine.mailbox import Mailbox, measure, pack, unpack, wakeups_of
from cloister.engine.request_client import RequestClient
from cloister.policy import Credentials, KeyQuota
from cloister.private.workers.worker import LEAST_UNREAD_BYTES
from cloister.server import unread_replies
from cloister.server.connection import Connection
from cloister.server.sampling import MAX_REPLY_LOGPROBS
from cloister.server.serve import ServerApp
from cloister.server.unread_replies import MIB, UnreadReplies, UnreadReply
from cloister.types.config import ServerConfig
from cloister.types.request import FinishReason, SequenceOutput, TokenLogprobs
from tests.engine.replica import make_request
from tests.server.running_server import MODEL, RunningServer, ScriptedEngine, make_gate, output, running, says, serving_script
from tests.server.test_tls import config_for, trusting, write_pair

LENGTH = 12 * 2**20  # more than the kernels at both ends take
TIMEOUT_S = 0.5


class LongReplies:
    """Answers every request with a long reply, and notes which of them have ended.

    Args:
        num_pieces: in which the reply is handed over.
    """

    def __init__(self, num_pieces: int) -> None:
        self.num_pieces = num_pieces
        self.num_ended = 0

    async def drain(self, timeout_s: float) -> None:
        pass

    async def __call__(self, scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LENGTH)]})
        piece = bytes(LENGTH // self.num_pieces)
        for index in range(self.num_pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": index + 1 < self.num_pieces})
        self.num_ended += 1

    @contextlib.contextmanager
    def served(self, config: ServerConfig | None = None) -> Iterator[RunningServer]:
        @asynccontextmanager
        async def open_app():
            yield ServerApp(self, self)

        with running(open_app, config or ServerConfig(port=0, drain_timeout_s=1.0)) as server:
            yield server


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(Connection, "unread_timeout_s", TIMEOUT_S)


def begin(server: RunningServer, head: bytes = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") -> socket.socket:
    """Sends a request and reads no more than the first bytes of its reply."""
    host, port = server.url.partition("://")[2].split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(300)
    connection.connect((host, int(port)))
    if server.url.startswith("https"):
        connection = server.trust.wrap_socket(connection, server_hostname="localhost")
    connection.sendall(head)
    assert b"200" in connection.recv(15)
    return connection


def read_rest(connection: socket.socket) -> int:
    """Returns the bytes of a whole reply, or those that come before a reset."""
    num_bytes = 0
    with contextlib.suppress(ConnectionResetError):
        while num_bytes < LENGTH:
            if not (piece := connection.recv(2**20)):
                assert isinstance(connection, ssl.SSLSocket), "a reply that was cut looks like a whole one"
                break  # OpenSSL takes a reset for an end
            num_bytes += len(piece)
    return num_bytes


def wait_for(condition) -> None:
    deadline_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)


@pytest.mark.parametrize("has_tls", [False, True])
@pytest.mark.parametrize("num_pieces", [1, 48])
def test_a_reply_that_nobody_reads_is_given_up(num_pieces, has_tls, tmp_path):
    app, config = LongReplies(num_pieces), None
    if has_tls:
        certfile, keyfile = write_pair(tmp_path)
        config = config_for(certfile, keyfile)
    with app.served(config) as server:
        if has_tls:
            server.trust = trusting(certfile)
        with begin(server) as connection:
            table = server.uvicorn.config.http_protocol_class.table
            wait_for(lambda: not table._networks)
            assert read_rest(connection) < LENGTH / 2
            wait_for(lambda: app.num_ended == 1)


@pytest.mark.parametrize("num_pieces", [1, 48])
def test_a_client_that_reads_slowly_gets_its_whole_reply(num_pieces, monkeypatch):
    timeout_s = 3.0  # a busy machine may stop this client, which would be one that does not read, for less than that
    monkeypatch.setattr(Connection, "unread_timeout_s", timeout_s)
    app = LongReplies(num_pieces)
    with app.served() as server, begin(server) as connection:
        num_bytes, until_s = 0, time.monotonic() + 1.5 * timeout_s
        while time.monotonic() < until_s:  # in steps far smaller than what the kernel waits for before it takes more
            num_bytes += len(connection.recv(4096))
            time.sleep(timeout_s / 60)
        assert app.num_ended == 0
        while num_bytes < LENGTH:
            piece = connection.recv(2**20)
            assert piece
            num_bytes += len(piece)
        wait_for(lambda: app.num_ended)


def test_a_connection_whose_client_reads_nothing_gives_way_to_a_new_one(monkeypatch):
    monkeypatch.setattr(Connection, "unread_timeout_s", 20.0)
    app = LongReplies(48)
    with (
        app.served(ServerConfig(port=0, max_connections=1, drain_timeout_s=1.0)) as server,
        begin(server) as first,
    ):
        table = server.uvicorn.config.http_protocol_class.table
        wait_for(lambda: table._waiting)
        with httpx.stream("GET", server.url) as reply:
            assert reply.status_code == 200
        assert read_rest(first) < LENGTH / 2


def test_an_unread_reply_counts_among_the_concurrent_requests_of_its_key(model_path, monkeypatch):
    monkeypatch.setattr(Connection, "unread_timeout_s", 60.0)
    credentials, key = Credentials.empty().add("ann", limits=KeyQuota(concurrent_requests=1))
    config = ServerConfig(port=0, api_keys="keys.json", drain_timeout_s=1.0)
    engine = ScriptedEngine(lambda request: says(["a" * LENGTH] if request.sampling.max_tokens == 9 else "a")(request))
    with serving_script(model_path, engine, gate=make_gate("team", credentials), config=config) as server:
        headers = {"authorization": f"Bearer {key}"}
        ask = lambda: httpx.post(f"{server.url}/v1/completions", headers=headers, json={"model": MODEL, "prompt": "x"})  # noqa: E731
        assert [ask().status_code for _ in range(3)] == [200] * 3
        body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 9}).encode()
        fields = (
            f"Host: localhost\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        with begin(server, f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body) as connection:
            time.sleep(0.2)
            assert ask().status_code == 429
            assert read_rest(connection) >= LENGTH
            assert ask().status_code == 200


class PushingEngine(ScriptedEngine):
    """An engine that makes outputs whether anybody reads them or not, as real ones do, until the request is left or has ended.

    Args:
        num_outputs: of each request; each takes some 4 KB.
    """

    def __init__(self, num_outputs: int) -> None:
        super().__init__(says(""))
        self.num_outputs = num_outputs
        self.running = {}

    def generate(self, request, observer=None, *, in_batches=False):
        return RequestClient.generate(self, request, observer, in_batches=in_batches)

    def submit(self, request, sink, observer=None):
        async def push():
            top = tuple((token_id, -1.0) for token_id in range(20))
            logprobs = [TokenLogprobs(97, -1.0, top, b"a", (b"a",) * 20)]
            for index in range(self.num_outputs):
                sink(output(request, "a", logprobs=logprobs))
                if index % 50 == 0:
                    await asyncio.sleep(0.001)
            sink(output(request, end=FinishReason.STOP))

        self.taken.append(request)
        self.pushing = asyncio.create_task(push())
        self.running[request.request_id] = self.pushing, observer

    def abort(self, request_id):
        pushing, observer = self.running.pop(request_id)
        if not pushing.done():
            self.left.append(request_id)
            pushing.cancel()
            observer.refuse()  # as an engine says that it has left


STREAMED = json.dumps({"model": MODEL, "prompt": "x", "stream": True, "logprobs": 5}).encode()
STREAM_HEAD = (
    f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(STREAMED)}\r\n"
    "\r\n"
).encode() + STREAMED


def read_events(connection: socket.socket) -> bytes:
    """Returns the rest of a stream, to the end of its last chunk."""
    content = b""
    while not content.endswith(b"0\r\n\r\n"):
        piece = connection.recv(2**20)
        assert piece, "the stream has no end"
        content += piece
    return content


def test_a_stream_that_nobody_reads_ends_with_an_error_before_it_takes_more_than_its_share(model_path, monkeypatch):
    monkeypatch.setattr(Connection, "unread_timeout_s", 60.0)
    engine = PushingEngine(100_000)
    config = ServerConfig(port=0, max_unread_mb=16, drain_timeout_s=1.0)
    with serving_script(model_path, engine, config=config) as server, begin(server, STREAM_HEAD) as connection:
        unread = server.uvicorn.config.http_protocol_class.unread
        most_bytes = 0

        def is_over() -> bool:
            nonlocal most_bytes
            most_bytes = max(most_bytes, unread.num_bytes)
            return bool(engine.left)

        wait_for(is_over)
        assert most_bytes <= 2.1 * MIB, "an eighth of the limit, and one output more"
        wait_for(lambda: not unread.num_bytes)
        content = read_events(connection)
        assert b'"code":"reply_not_read"' in content
        assert content.index(b'"code":"reply_not_read"') > len(content) - 1000, "the error is the last event"
        assert connection.recv(1) == b"", "further replies would not wait for their client"
        assert b"cloister_unread_replies_ended_total 1.0" in httpx.get(f"{server.url}/metrics").content


def test_a_stream_whose_client_pauses_is_whole(model_path, monkeypatch):
    monkeypatch.setattr(Connection, "unread_timeout_s", 60.0)
    engine = PushingEngine(2_000)
    with serving_script(model_path, engine) as server, begin(server, STREAM_HEAD) as connection:
        unread = server.uvicorn.config.http_protocol_class.unread
        wait_for(lambda: engine.pushing.done())
        assert unread.num_bytes > MIB // 4, "outputs wait for their client"
        content = read_events(connection)
        assert content.count(b'"top_logprobs"') >= 2_000
        assert b"[DONE]" in content
        assert b"error" not in content
        wait_for(lambda: not unread.num_bytes)


@pytest.mark.parametrize("in_batches", [False, True])
def test_outputs_count_for_a_reader_that_may_wait_for_its_client_and_for_no_other(in_batches):
    held = []

    async def main() -> None:
        observer = SimpleNamespace(hold=held.append, refuse=lambda: None)
        outputs = PushingEngine(200).generate(make_request(), observer, in_batches=in_batches)
        assert len([output async for output in outputs]) == 201

    asyncio.run(asyncio.wait_for(main(), 300))
    assert bool(held) is not in_batches


def test_an_answer_to_many_prompts_at_once_is_whole(model_path, monkeypatch):
    monkeypatch.setattr(Connection, "unread_timeout_s", 60.0)
    engine = PushingEngine(45)  # 4 KB each for 64 prompts: more than the share of one, before their readers have a turn
    with serving_script(model_path, engine, config=ServerConfig(port=0, max_unread_mb=16, drain_timeout_s=1.0)) as server:
        body = {"model": MODEL, "prompt": ["x"] * 64, "logprobs": 5, "max_tokens": 45}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
        assert [len(choice["logprobs"]["tokens"]) for choice in reply.json()["choices"]] == [45] * 64


class Unstarted(LongReplies):
    """Has outputs over its share before its reply starts, and goes on until it hears that its client has left."""

    async def __call__(self, scope, receive, send) -> None:
        unread_replies.reply_of(scope).queue(3 * MIB)
        while (await receive())["type"] != "http.disconnect":
            pass
        self.num_ended += 1


def test_a_reply_that_is_ended_before_it_starts_is_reset_and_its_request_hears_of_it():
    app = Unstarted(1)
    with app.served(ServerConfig(port=0, max_unread_mb=16, drain_timeout_s=1.0)) as server, socket.socket() as connection:
        host, port = server.url.partition("://")[2].split(":")
        connection.settimeout(300)
        connection.connect((host, int(port)))
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
        wait_for(lambda: app.num_ended == 1)


def test_replies_that_nobody_reads_take_no_more_than_the_limit_and_others_are_whole(monkeypatch, caplog):
    monkeypatch.setattr(Connection, "unread_timeout_s", 60.0)
    app = LongReplies(1)
    with app.served(ServerConfig(port=0, max_unread_mb=32, drain_timeout_s=1.0)) as server, contextlib.ExitStack() as clients:
        unread = server.uvicorn.config.http_protocol_class.unread
        for _ in range(6):
            clients.enter_context(begin(server))
            assert unread.num_bytes <= 32 * MIB
        wait_for(lambda: app.num_ended >= 4)
        assert len(httpx.get(server.url).content) == LENGTH
    assert not caplog.records, "neither uvicorn nor asyncio has anything to say"


def test_a_whole_body_that_is_read_too_slowly_is_cut_once_it_is_over_its_share(monkeypatch):
    monkeypatch.setattr(Connection, "unread_timeout_s", 2.0)
    monkeypatch.setattr(unread_replies, "GRACE_S", 0.5)
    app = LongReplies(1)
    with app.served(ServerConfig(port=0, max_unread_mb=16, drain_timeout_s=1.0)) as server, begin(server) as connection:
        num_bytes = 15
        with contextlib.suppress(ConnectionResetError):
            while not app.num_ended:  # its client never stops to read, as far as the time of unread replies is concerned
                num_bytes += len(connection.recv(100))
                time.sleep(0.1)
        assert num_bytes < LENGTH / 2
        wait_for(lambda: not server.uvicorn.config.http_protocol_class.table._networks)


def read_reply(connection: socket.socket, pause_s: float) -> int:
    """Returns the bytes of the body of a reply. Reads it in small steps with pauses for so long, and then at once."""
    content, num_bytes, until_s = b"", 0, time.monotonic() + pause_s
    while b"\r\n\r\n" not in content:
        content += connection.recv(1)
    while num_bytes < LENGTH:
        is_pausing = time.monotonic() < until_s
        piece = connection.recv(min(16 * 1024 if is_pausing else 2**20, LENGTH - num_bytes))
        assert piece
        num_bytes += len(piece)
        if is_pausing:
            time.sleep(0.1)
    return num_bytes


def test_a_client_that_reads_a_second_reply_on_its_connection_gets_it_whole(monkeypatch):
    monkeypatch.setattr(Connection, "unread_timeout_s", 20.0)  # it looks every second
    app = LongReplies(1)
    with app.served(ServerConfig(port=0, max_unread_mb=16, drain_timeout_s=1.0)) as server, begin(server) as connection:
        assert read_reply(connection, 0.0) == LENGTH
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")  # while the server is still to look at the first one
        assert read_reply(connection, 3.0) == LENGTH


# Which reply is ended.


def open_replies(limit_bytes: int, *networks: str) -> tuple[UnreadReplies, list[UnreadReply]]:
    replies = UnreadReplies(limit_bytes)
    return replies, [replies.open(network, lambda: None) for network in networks]


def test_the_largest_of_the_network_that_holds_most_is_ended():
    replies, (alone, first, second, third) = open_replies(10 * MIB, "a", "b", "b", "b")
    alone.hold(4 * MIB)
    first.hold(2 * MIB)
    second.hold(3 * MIB)
    third.hold(2 * MIB)
    assert [reply.is_ended for reply in (alone, first, second, third)] == [False, False, True, False]
    assert replies.num_bytes == 8 * MIB
    second.hold(-3 * MIB)
    replies.close(second)
    assert replies.num_bytes == 8 * MIB, "what an ended reply gives back was not counted any more"


def test_slow_clients_go_first_and_small_replies_stay():
    replies, (slow, large, small) = open_replies(10 * MIB, "a", "b", "c")
    slow.begin_waiting(0, 0.0)
    slow.note_read(1000, 10.0)
    slow.hold(MIB)
    small.hold(60_000)
    large.hold(9 * MIB)
    assert [reply.is_ended for reply in (slow, large, small)] == [True, False, False]
    large.hold(MIB)
    assert large.is_ended
    assert not small.is_ended
    assert replies.num_bytes == 60_000


def test_a_client_that_begins_to_read_is_slow_no_longer():
    _, (reply,) = open_replies(80 * MIB, "a")
    reply.hold(11 * MIB)
    reply.begin_waiting(0, 0.0)
    reply.note_read(100_000, 10.0)
    assert not reply.is_slow
    reply.note_read(100_001, 15.0)
    assert not reply.is_slow, "it has not had its time"
    reply.note_read(100_001, 20.0)
    assert reply.is_slow
    assert reply.is_ended, "it holds more than an eighth"


@pytest.mark.parametrize(
    "logprobs", [None, [TokenLogprobs(9000, -1.0, tuple((9000 + i, -i / 7) for i in range(20)), b"word", (b"another",) * 20)]]
)
def test_what_an_output_takes_in_memory_is_known_within_a_third(logprobs):
    decoder = msgspec.msgpack.Decoder(SequenceOutput)
    message = msgspec.msgpack.encode(
        SequenceOutput(request_id="r" * 32, index=0, text="word", token_ids=[9000], logprobs=logprobs)
    )
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = [decoder.decode(message) for _ in range(2000)]
        taken = (tracemalloc.get_traced_memory()[0] - before) / len(kept)
    finally:
        tracemalloc.stop()
    assert 0.67 * taken < measure(kept[0]) < 1.33 * taken


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_what_was_read_counts_no_longer_though_more_always_waits(has_logprobs):
    held = []

    async def main() -> None:
        mailbox = Mailbox(wakeups_of(asyncio.get_running_loop()), hold=held.append)
        logprobs = [TokenLogprobs(97, -1.0)] if has_logprobs else None
        make = lambda: SequenceOutput(request_id="r", index=0, text="a", token_ids=[97], logprobs=logprobs)  # noqa: E731
        for _ in range(3):
            mailbox.put(make())
        for _ in range(500):
            mailbox.put(make())
            await mailbox.get()
        assert sum(held) < 5 * 1000
        mailbox.put(make())
        mailbox.put(make())
        assert sum(held) > 0
        mailbox.release()
        assert sum(held) == 0

    asyncio.run(main())


def word(number, logprobs=None, index=0):
    return SequenceOutput(
        request_id="r" * 32, index=index, text=f" word{number}", token_ids=[100_000 + number], logprobs=logprobs,
        num_prompt_tokens=1000, num_output_tokens=number + 1, num_cached_tokens=500,
    )  # fmt: skip


def top_20(number):
    """As an engine makes them, in float32."""
    values = np.log(np.linspace(0.5, 0.01, 20), dtype=np.float32).tolist()
    tops = tuple((100_000 + number + place, value) for place, value in enumerate(values))
    return [TokenLogprobs(100_000 + number, values[0], tops, b" word", (b" another",) * 20)]


def test_the_largest_answer_with_log_probabilities_waits_whole_in_a_worker():
    num_tokens, held = MAX_REPLY_LOGPROBS // 21, []

    async def main():
        mailbox = Mailbox(wakeups_of(asyncio.get_running_loop()), hold=held.append)
        mailbox.put(word(0))
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1, num_tokens):
            mailbox.put(word(number, top_20(number)))
        taken = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert sum(held) <= LEAST_UNREAD_BYTES
        assert taken < 1.2 * sum(held)
        assert [await mailbox.get() for _ in range(num_tokens)] == [
            word(0), *(word(number, top_20(number)) for number in range(1, num_tokens))
        ]  # fmt: skip
        assert sum(held) == 0

    asyncio.run(main())


def test_words_that_wait_are_packed_and_come_as_they_were():
    held, num_words = [], 20_000

    async def main():
        mailbox = Mailbox(wakeups_of(asyncio.get_running_loop()), hold=held.append)
        for number in range(num_words):
            mailbox.put(word(number, index=number % 1000 // 500))
        mailbox.put(msgspec.structs.replace(word(num_words), finish_reason=FinishReason.LENGTH))
        assert sum(held) < 120 * num_words, "the objects take 400 bytes each"
        pieces, num_items = [], 0
        while len(pieces) <= num_words:
            pieces += (await mailbox.get()).pieces
            num_items += 1
        assert [piece.num_output_tokens for piece in pieces] == list(range(1, num_words + 2))
        assert pieces[:-1] == [word(number, index=number % 1000 // 500) for number in range(num_words)]
        assert num_items < num_words / 50
        assert sum(held) == 0

    asyncio.run(main())


def test_log_probabilities_that_float32_has_not_are_kept_too():
    odd = [TokenLogprobs(1, -0.1, ((1, -0.1), (2, -math.inf)), b"", ())]
    assert unpack(pack(word(1, odd)), "r" * 32) == word(1, odd)
