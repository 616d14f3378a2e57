"""Engines load KV from each other over sockets: answers are the same, and a peer that lies, hangs or dies costs a prefill."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from cloister.cluster.virtual.engine import VirtualEngine, make_engine
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.engine import kv_frames, kv_sockets
from cloister.engine.identity import Identity
from cloister.engine.kv_sockets import MAX_STRANGERS, NUM_PEERS, KVSocketLinks
from cloister.engine.kv_transfer import KVBlocks
from cloister.engine.kv_transports import KV_TRANSPORTS, fill_address, has_fixed_port, lacks_address, parse_places
from cloister.kv import NO_BLOCK, KVFormat, KVObject, KVQuery, KVSealer
from cloister.text import Tokenizer
from cloister.types.clock import WallClock
from cloister.types.errors import ConfigError
from cloister.types.events import (
    Abort,
    CancelPrefetch,
    Ended,
    Event,
    HoldKV,
    KVLoaded,
    KVSource,
    PrefetchKV,
    PrefillDone,
    Resumption,
    Scheduled,
    Submit,
)
from cloister.types.request import FinishReason, Request, SamplingParams, SequenceOutput

pytestmark = pytest.mark.usefixtures("patience")

SECRET = b"s" * 32
PROMPT = list(b"a prompt that is longer than some blocks of tokens, and so worth a transfer")
NUM_HIT = (len(PROMPT) - 1) // 8 * 8
SETTINGS = ("shm", "unix", "tls://127.0.0.1:0", "tls://[::1]:0", "unix,tls://127.0.0.1:0")


class Peer:
    """An engine with sockets, whose steps the test makes."""

    def __init__(self, tokenizer: Tokenizer, *, setting: str = "unix", secret: bytes = SECRET, **shape: int) -> None:
        self.engine: VirtualEngine = make_engine(EngineShape(step_s=0.0, token_s=0.0, **shape), tokenizer, WallClock())
        self.core = self.engine.core
        self.core.exchange_kv(lambda form: KVSocketLinks(setting, form, secret))
        self.links: Any = self.core._transfer.links  # type: ignore[union-attr]
        self.links.on_news(self.core.input_queue.wake)
        self.events: list[Event] = []
        self.outputs: list[SequenceOutput] = []

    def step(self) -> None:
        message = self.core.step()
        if message is not None:
            self.events += message.events
            self.outputs += message.outputs

    def find(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.token_ids]

    def check_empty(self) -> None:
        assert self.engine.scheduler.pool.num_used == 0
        assert not len(self.engine.scheduler.kv_loads)
        assert not len(self.engine.scheduler.kv_exports)
        assert not self.links._pulls
        assert not self.links._peers


@pytest.fixture
def make_peer(tokenizer: Tokenizer) -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def make(**options: Any) -> Peer:
        made.append(Peer(tokenizer, **options))
        return made[-1]

    yield make
    for peer in made:
        peer.links.close()


def make_request(name: str = "r", token_ids: list[int] = PROMPT) -> Request:
    return Request(
        request_id=name, token_ids=token_ids, sampling=SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    )


def run_until(is_done: Callable[[], bool], *peers: Peer) -> None:
    """Makes steps until something has happened; a busy machine has long for it."""
    deadline_s = time.monotonic() + 300
    while not is_done():
        assert time.monotonic() < deadline_s, "it never happened"
        for peer in peers:
            peer.step()
        time.sleep(0.0005)


def answer(peer: Peer, *others: Peer, source: str | None = None, request: Request | None = None) -> list[int]:
    """Has a peer answer a request, with KV from somewhere."""
    num_before = len(peer.token_ids)
    peer.core.input_queue.put(Submit(request or make_request(), kv_source=None if source is None else KVSource(source)))
    run_until(lambda: bool(peer.find(Ended)), peer, *others)
    return peer.token_ids[num_before:]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_prompt_that_another_engine_knows_is_loaded_and_the_answer_is_the_same(
    make_peer: Callable[..., Peer], setting: str
) -> None:
    source, target = make_peer(setting=setting), make_peer(setting=setting)
    expected = answer(source)
    assert answer(target, source, source=source.core.kv_endpoint) == expected
    (scheduled,), (loaded,) = target.find(Scheduled), target.find(KVLoaded)
    assert scheduled.num_cached_tokens == NUM_HIT == loaded.num_tokens
    assert loaded.complete
    assert loaded.num_bytes == NUM_HIT * 16
    run_until(lambda: not source.links._peers and not len(source.engine.scheduler.kv_exports), source)
    source.check_empty()
    target.check_empty()


def test_a_long_prompt_comes_in_many_parts(make_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.engine.kv_transfer.MAX_STEP_BYTES", 300)
    monkeypatch.setattr("cloister.scheduler.kv_loads.MAX_STEP_BYTES", 300)
    monkeypatch.setattr(kv_sockets, "MAX_STEP_BYTES", 300)
    source, target = make_peer(), make_peer()
    expected = answer(source)
    assert answer(target, source, source=source.core.kv_endpoint) == expected
    assert target.find(Scheduled)[0].num_cached_tokens == NUM_HIT


def test_a_prefetch_is_there_when_its_request_comes(make_peer: Callable[..., Peer]) -> None:
    source, target = make_peer(), make_peer()
    expected = answer(source)
    assert source.core.kv_endpoint is not None
    target.core.input_queue.put(PrefetchKV(make_request(), PROMPT, KVSource(source.core.kv_endpoint)))
    run_until(lambda: bool(target.find(KVLoaded)), source, target)
    assert answer(target) == expected
    assert target.find(Scheduled)[0].num_cached_tokens == NUM_HIT
    target.check_empty()


def test_the_kv_of_a_running_request_can_be_held_and_loaded(make_peer: Callable[..., Peer]) -> None:
    source, target = make_peer(), make_peer()
    source.core.input_queue.put(Submit(make_request()))
    run_until(lambda: bool(source.token_ids), source)
    source.core.input_queue.put(HoldKV("r", 60.0))
    source.step()
    assert len(source.engine.scheduler.leases) == 1  # type: ignore[arg-type]
    target.core.input_queue.put(PrefetchKV(make_request(), PROMPT, KVSource(str(source.core.kv_endpoint))))
    run_until(lambda: bool(target.find(KVLoaded)) and not len(source.engine.scheduler.leases), source, target)  # type: ignore[arg-type]
    assert target.find(KVLoaded)[0].num_tokens == NUM_HIT


# Prompts that are followed while they are computed


class Followed:
    """A source that computes a prompt in several steps, and a target that follows it."""

    def __init__(self, make_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch, setting: str = "unix") -> None:
        monkeypatch.setattr("cloister.scheduler.kv_exports.LAST_TOKENS", 16)
        alone = make_peer()
        self.expected = answer(alone)
        self.source, self.target = make_peer(setting=setting), make_peer(setting=setting)
        self.request = make_request()

    def begin(self) -> None:
        """The source has made one step of the prompt, whose KV is at the target."""
        self.source.core.input_queue.put(Submit(self.request, 0, hold_kv_s=60.0, prefill_only=True))
        self.source.step()
        source = KVSource(str(self.source.core.kv_endpoint))
        self.target.core.input_queue.put(PrefetchKV(self.request, PROMPT, source, follows=True))
        self.target.step()
        run_until(lambda: bool(self.source.links._demands), self.target)
        self.source.core._transfer.serve(self.source.engine.clock.now())  # type: ignore[union-attr]
        run_until(lambda: self.num_loaded > 0, self.target)
        assert not self.source.find(PrefillDone)

    @property
    def num_loaded(self) -> int:
        """Entries that the target has."""
        return sum(block != NO_BLOCK for load in self.target.engine.scheduler.kv_loads.loading.values() for block in load.table)

    def finish_prompt(self) -> None:
        run_until(lambda: bool(self.source.find(PrefillDone)), self.source)

    def go_on(self, *others: Peer) -> list[int]:
        """The request goes on at the target; returns its answer."""
        first = self.source.token_ids[:1]
        resumption, source = Resumption([first]), KVSource(str(self.source.core.kv_endpoint))
        self.target.core.input_queue.put(Submit(self.request, 0, resumption=resumption, kv_source=source))
        run_until(lambda: bool(self.target.find(Ended)), self.target, *others)
        return [*first, *self.target.token_ids]

    def check_empty(self, *peers: Peer) -> None:
        for peer in peers:
            run_until(lambda peer=peer: not (peer.links._peers or len(peer.engine.scheduler.kv_exports)), peer)  # type: ignore[misc]
            peer.check_empty()


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_prompt_is_loaded_while_it_is_computed(
    make_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    pair = Followed(make_peer, monkeypatch, setting)
    pair.begin()
    num_before = pair.num_loaded
    assert num_before >= 0.7 * len(PROMPT) // 8, "the first step computes three quarters"
    pair.finish_prompt()
    assert pair.go_on(pair.source) == pair.expected
    (loaded,) = pair.target.find(KVLoaded)
    assert (loaded.complete, loaded.num_tokens) == (True, len(PROMPT) // 8 * 8)
    pair.check_empty(pair.source, pair.target)


def test_a_copy_that_is_made_while_its_blocks_are_taken_away_is_not_sent(
    make_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source's thread is stopped in the middle of the copy, and the blocks are written anew meanwhile."""
    pair = Followed(make_peer, monkeypatch)
    transfer: Any = pair.source.core._transfer
    export, is_copying, may_go_on = transfer._blocks.export, threading.Event(), threading.Event()

    def copy_slowly(blocks: list[int]) -> list[bytes]:
        copies = export(blocks)
        is_copying.set()
        assert may_go_on.wait(300)
        return copies

    transfer._blocks = KVBlocks(transfer._blocks.form, copy_slowly)
    pair.source.core.input_queue.put(Submit(pair.request, 0, hold_kv_s=60.0, prefill_only=True))
    pair.source.step()
    source = KVSource(str(pair.source.core.kv_endpoint))
    pair.target.core.input_queue.put(PrefetchKV(pair.request, PROMPT, source, follows=True))
    run_until(is_copying.is_set, pair.source, pair.target)
    while pair.source.engine.scheduler.leases:
        assert pair.source.engine.scheduler.kv_loads.reclaim_one(0.0)
    may_go_on.set()
    run_until(lambda: bool(pair.target.find(KVLoaded)), pair.source, pair.target)
    assert [(event.complete, event.num_bytes) for event in pair.target.find(KVLoaded)] == [(False, 0)]
    pair.finish_prompt()
    assert pair.go_on(pair.source) == pair.expected


def test_a_source_that_dies_before_the_prompt_is_done_leaves_nothing_and_the_answer_is_computed(
    make_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Followed(make_peer, monkeypatch)
    pair.begin()
    pair.source.links.close()
    run_until(lambda: bool(pair.target.find(KVLoaded)), pair.target)
    assert not pair.target.find(KVLoaded)[0].complete
    assert answer(pair.target, request=pair.request) == pair.expected
    pair.check_empty(pair.target)


def test_a_target_that_dies_before_the_prompt_is_done_costs_the_source_nothing(
    make_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Followed(make_peer, monkeypatch)
    pair.begin()
    pair.target.links.close()
    pair.finish_prompt()
    assert pair.source.token_ids == pair.expected[:1]
    run_until(lambda: not pair.source.links._peers and not len(pair.source.engine.scheduler.kv_exports), pair.source)
    assert len(pair.source.engine.scheduler.leases or ()) == 1, "the hold for the engine that goes on with it"


def test_a_target_whose_request_does_not_come_ends_the_transfer(
    make_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Followed(make_peer, monkeypatch)
    pair.begin()
    pair.target.core.input_queue.put(CancelPrefetch("r"))
    pair.source.core.input_queue.put(Abort("r"))
    run_until(lambda: not pair.target.links._pulls, pair.target)
    pair.check_empty(pair.target)
    run_until(lambda: not pair.source.links._peers and not len(pair.source.engine.scheduler.kv_exports), pair.source)
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


def test_a_load_that_is_replaced_before_it_was_asked_for_asks_for_nothing(make_peer: Callable[..., Peer]) -> None:
    source, target = make_peer(), make_peer()
    answer(source)
    for _ in range(2):
        target.core.input_queue.put(PrefetchKV(make_request(), PROMPT, KVSource(str(source.core.kv_endpoint))))
    run_until(lambda: len(target.find(KVLoaded)) == 2, source, target)
    assert source.links._num_peers == 1


def test_an_engine_without_links_computes_and_says_so(tokenizer: Tokenizer) -> None:
    engine = make_engine(EngineShape(), tokenizer, WallClock())
    engine.core.input_queue.put(Submit(make_request(), kv_source=KVSource("unix:x")))
    engine.core.input_queue.put(PrefetchKV(make_request("p"), PROMPT, KVSource("unix:x")))
    events: list[Event] = []
    while (message := engine.core.step()) is not None:
        events += message.events
    assert [(e.request_id, e.complete) for e in events if isinstance(e, KVLoaded)] == [("r", False), ("p", False)]
    assert [e.reason for e in events if isinstance(e, Ended)] == [FinishReason.LENGTH]


# Peers that lie, hang or die


@pytest.mark.parametrize(
    "endpoint", ["unix:nobody", "tls://127.0.0.1:1", "tls://nowhere", "unix:nobody,tls://127.0.0.1:1", "pigeon:x", ""]
)
def test_a_source_that_is_not_there_costs_a_prefill(make_peer: Callable[..., Peer], endpoint: str) -> None:
    alone, target = make_peer(), make_peer()
    expected = answer(alone)
    assert answer(target, source=endpoint) == expected
    assert target.find(KVLoaded)[0].complete is False
    target.check_empty()


def test_a_source_with_another_secret_neither_gives_nor_is_believed(make_peer: Callable[..., Peer]) -> None:
    source, target = make_peer(secret=b"t" * 32), make_peer()
    expected = answer(source)
    assert answer(target, source, source=source.core.kv_endpoint) == expected
    assert target.find(Scheduled)[0].num_cached_tokens == 0
    assert not target.find(KVLoaded)[0].complete


class Impostor:
    """Listens as an engine does, with its key, and says what it is told."""

    def __init__(
        self, speak: Callable[[socket.socket], None], secret: bytes = SECRET, setting: str = "tls://127.0.0.1:0"
    ) -> None:
        ((name, where),) = parse_places(setting)
        self._transport = KV_TRANSPORTS.get(name)(secret)
        self._sock, self.endpoint = self._transport.listen(where)
        self._speak = speak
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        sock, _ = self._sock.accept()
        with self._sock, contextlib.suppress(OSError), self._transport.accept(sock, 20.0) as known:
            self._speak(known)


def connect(peer: Peer, secret: bytes = SECRET) -> socket.socket:
    """Connects to a peer as an engine does."""
    ((name, where),) = parse_places(str(peer.core.kv_endpoint))
    return KV_TRANSPORTS.get(name)(secret).connect(where, 20.0)


def make_sealer(secret: bytes) -> KVSealer:
    """Returns what engines with a secret seal objects with."""
    return KVSealer(KVFormat(EngineShape().fingerprint, 8, "one group", (128,)), hmac.digest(secret, b"objects", "sha256"))


def forge(
    change: Callable[[KVObject], KVObject], *, secret: bytes = SECRET, setting: str = "tls"
) -> Callable[[socket.socket], None]:
    """Answers any query with one object, which is changed."""

    def speak(sock: socket.socket) -> None:
        deadline_s = time.monotonic() + 300
        kv_frames.send_frame(sock, kv_sockets._Hello(b"n" * 32), deadline_s)
        ask = kv_frames.receive_frame(sock, kv_sockets._ASK, 2**20, deadline_s)
        query = msgspec.msgpack.decode(ask.query, type=KVQuery)
        found = make_sealer(secret).seal(query.root, query.keys[0], 0, (b"\x07" * 128,))
        changed = change(found)
        frame = kv_frames.pack(kv_sockets._Part([kv_sockets._Label(changed.header, changed.mac)], True))
        outbox = KV_TRANSPORTS.get(setting)(secret).open_outbox(sock, deadline_s)
        with contextlib.closing(outbox):
            outbox.send(sock, frame, changed.contents, deadline_s)

    return speak


LIES: dict[str, Callable[[socket.socket], None]] = {
    "an object of somebody who does not know the secret": forge(lambda found: found, secret=b"t" * 32),
    "changed contents": forge(lambda found: msgspec.structs.replace(found, contents=(b"\x08" * 128,))),
    "an object without a MAC": forge(lambda found: msgspec.structs.replace(found, mac=b"")),
    "no message at all": lambda sock: sock.sendall(b"GET / HTTP/1.1\r\n\r\n"),
    "a message without an end": lambda sock: sock.sendall(b"\xff\xff\xff\xff" + bytes(100)),
    "half a message": lambda sock: sock.sendall(b"\x00\x00\x00\x22" + bytes(10)),
    "nothing": lambda sock: None,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_source_that_lies_costs_a_prefill(make_peer: Callable[..., Peer], lie: str) -> None:
    alone, target = make_peer(), make_peer()
    expected = answer(alone)
    assert answer(target, source=Impostor(LIES[lie]).endpoint) == expected
    assert target.find(Scheduled)[0].num_cached_tokens == 0
    assert not target.find(KVLoaded)[0].complete
    target.check_empty()


@pytest.mark.parametrize(
    "lie", ["changed contents", "an object without a MAC", "more than there is room for", "half a message"]
)
def test_a_source_that_lies_in_shared_memory_costs_a_prefill(make_peer: Callable[..., Peer], lie: str) -> None:
    lies = {
        "changed contents": forge(lambda found: msgspec.structs.replace(found, contents=(b"\x08" * 128,)), setting="shm"),
        "an object without a MAC": forge(lambda found: msgspec.structs.replace(found, mac=b""), setting="shm"),
        "more than there is room for": claim_many,
        "half a message": LIES["half a message"],
    }
    alone, target = make_peer(), make_peer()
    expected = answer(alone)
    assert answer(target, source=Impostor(lies[lie], setting="shm").endpoint) == expected
    assert not target.find(KVLoaded)[0].complete
    target.check_empty()
    assert not target.links._transport("shm")._memories._idle, "the source may still write it"


def claim_many(sock: socket.socket) -> None:
    """Says that much more has been written than one part has."""
    deadline_s = time.monotonic() + 300
    kv_frames.send_frame(sock, kv_sockets._Hello(b"n" * 32), deadline_s)
    query = msgspec.msgpack.decode(kv_frames.receive_frame(sock, kv_sockets._ASK, 2**20, deadline_s).query, type=KVQuery)
    header = msgspec.structs.replace(make_sealer(SECRET).seal(query.root, query.keys[0], 0, (b"",)).header, sizes=(128,))
    labels = [kv_sockets._Label(header, b"")] * (2**20 // 128 + 1)
    sock.sendall(kv_frames.pack(kv_sockets._Part(labels)))


@pytest.mark.parametrize("setting", ["tls://127.0.0.1:0", "shm", "unix"])
def test_a_genuine_object_would_have_been_taken(make_peer: Callable[..., Peer], setting: str) -> None:
    """So the lies above fail for what they are."""
    target = make_peer()
    source = Impostor(forge(lambda found: found, setting=setting.partition(":")[0]), setting=setting)
    target.core.input_queue.put(Submit(make_request(), kv_source=KVSource(source.endpoint)))
    run_until(lambda: bool(target.find(KVLoaded)), target)
    assert target.find(KVLoaded)[0].num_tokens == 8


def test_a_source_that_says_nothing_is_given_up_at_the_deadline(
    make_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("scheduler.kv_load", "engine.kv_transfer"):
        monkeypatch.setattr(f"cloister.{module}.KV_LOAD_TIMEOUT_S", 0.2)
    is_over = threading.Event()
    alone, target = make_peer(), make_peer()
    expected = answer(alone)
    assert answer(target, source=Impostor(lambda sock: is_over.wait(300) and None).endpoint) == expected  # type: ignore[func-returns-value]
    assert not target.find(KVLoaded)[0].complete
    is_over.set()
    run_until(lambda: not target.links._pulls, target)
    target.check_empty()


def test_a_client_that_leaves_ends_the_transfer_and_is_no_line_in_the_log(
    make_peer: Callable[..., Peer], caplog: pytest.LogCaptureFixture
) -> None:
    source, target = make_peer(), make_peer()
    answer(source)
    target.core.input_queue.put(Submit(make_request(), kv_source=KVSource(str(source.core.kv_endpoint))))
    run_until(lambda: bool(source.links._demands), target)  # the source makes no step: it holds the transfer
    target.core.input_queue.put(Abort("r"))
    run_until(lambda: bool(target.find(Ended)), target)
    target.check_empty()
    run_until(lambda: not source.links._peers and not len(source.engine.scheduler.kv_exports), source)
    source.step()
    source.check_empty()
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


@pytest.mark.parametrize("words", [b"", b"\x00\x00\x00\x05hello", b"\xff" * 64, bytes(4), b"\x00\x00\x00\x22\x92\xc4"])
def test_who_does_not_know_the_secret_gets_nothing_and_no_line_in_the_log(
    make_peer: Callable[..., Peer], words: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_peer(setting="unix")
    answer(source)
    with connect(source) as sock:
        hello = kv_frames.receive_frame(sock, kv_sockets._HELLO, 4096, time.monotonic() + 20.0)
        assert len(hello.nonce) == 32
        sock.sendall(words)
        with contextlib.suppress(OSError):  # the engine was quicker
            sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    run_until(lambda: not source.links._peers, source)
    source.step()
    source.check_empty()
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


def test_a_query_cannot_be_repeated(make_peer: Callable[..., Peer]) -> None:
    source, target = make_peer(setting="tls://127.0.0.1:0"), make_peer()
    answer(source)
    heard: list[Any] = []

    def listen(sock: socket.socket) -> None:
        kv_frames.send_frame(sock, kv_sockets._Hello(b"n" * 32), time.monotonic() + 20.0)
        heard.append(kv_frames.receive_frame(sock, kv_sockets._ASK, 2**20, time.monotonic() + 20.0))

    answer(target, source=Impostor(listen).endpoint)
    with connect(source) as sock:
        kv_frames.receive_frame(sock, kv_sockets._HELLO, 4096, time.monotonic() + 20.0)
        kv_frames.send_frame(sock, heard[0], time.monotonic() + 20.0)
        assert sock.recv(1) == b""


# Between machines


class Tap:
    """Passes on what an engine on TLS and those that connect to it say, and keeps a copy."""

    def __init__(self, endpoint: str) -> None:
        self.heard = bytearray()
        self._port = int(endpoint.rpartition(":")[2])
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tls://127.0.0.1:{self._sock.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with self._sock, contextlib.suppress(ConnectionAbortedError):
            near, _ = self._sock.accept()
            far = socket.create_connection(("127.0.0.1", self._port))
            back = threading.Thread(target=self._pass_on, args=(far, near), daemon=True)
            with near, far:
                back.start()
                self._pass_on(near, far)
                back.join()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.heard += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


def test_nobody_between_two_machines_reads_a_key_or_kv(make_peer: Callable[..., Peer]) -> None:
    source, target = make_peer(setting="tls://127.0.0.1:0"), make_peer(setting="tls://127.0.0.1:0")
    expected = answer(source)
    tap, sealed = Tap(str(source.core.kv_endpoint)), []
    seal = source.links._keys.sealer.seal
    source.links._keys.sealer.seal = lambda *given: sealed.append(seal(*given)) or sealed[-1]
    assert answer(target, source, source=tap.endpoint) == expected
    assert target.find(Scheduled)[0].num_cached_tokens == NUM_HIT
    assert len(sealed) == NUM_HIT // 8
    assert len(tap.heard) > sum(found.num_bytes for found in sealed)
    assert not any(secret in tap.heard for found in sealed for secret in (found.header.key, found.mac, *found.contents))


@pytest.mark.parametrize("words", [b"", b"\x00\x00\x00\x05hello", b"\x16\x03\x01\x00\x05hello", b"\xff" * 300])
def test_a_port_says_nothing_before_it_knows_an_engine_and_logs_nothing(
    make_peer: Callable[..., Peer], words: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_peer(setting="tls://127.0.0.1:0")
    port = int(str(source.core.kv_endpoint).rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), 20.0) as sock:
        sock.sendall(words)
        with contextlib.suppress(OSError):  # the engine was quicker
            sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert len(sock.recv(4096)) <= 7  # an alert at most
    run_until(lambda: not source.links._peers, source)
    source.step()
    source.check_empty()
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


@pytest.mark.parametrize("says", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "half a handshake"])
def test_strangers_who_keep_connections_keep_no_engine_out(
    make_peer: Callable[..., Peer], says: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloister.engine.kv_sockets.KV_LOAD_TIMEOUT_S", 300.0)  # none gives way because its time is over
    source, target = make_peer(setting="tls://127.0.0.1:0"), make_peer()
    expected = answer(source)
    port = int(str(source.core.kv_endpoint).rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_STRANGERS + NUM_PEERS):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20.0))
            stranger.sendall(says)
        assert answer(target, source, source=source.core.kv_endpoint) == expected
        assert target.find(KVLoaded)[0].complete
        assert len(source.links._strangers) <= MAX_STRANGERS
    run_until(lambda: not source.links._strangers, source)
    source.check_empty()


def test_a_port_does_not_speak_to_the_engines_of_another_front(make_peer: Callable[..., Peer]) -> None:
    source = make_peer(setting="tls://127.0.0.1:0")
    with contextlib.suppress(OSError), connect(source, b"t" * 32) as sock:
        assert sock.recv(1) == b""
    run_until(lambda: not source.links._peers, source)


def test_an_engine_asks_nobody_who_has_another_key(make_peer: Callable[..., Peer]) -> None:
    alone, target = make_peer(), make_peer()
    expected, asked = answer(alone), []
    assert answer(target, source=Impostor(asked.append, b"t" * 32).endpoint) == expected
    assert not target.find(KVLoaded)[0].complete
    assert asked == []


def test_those_who_know_the_secret_have_one_key_and_others_another() -> None:
    first, same, other = (Identity.derive(secret) for secret in (SECRET, SECRET, b"t" * 32))
    assert first == same
    assert first.certificate != other.certificate
    assert "PRIVATE" not in first.certificate


def test_an_engine_that_two_networks_reach_is_asked_over_the_first(make_peer: Callable[..., Peer]) -> None:
    source, target = make_peer(setting="unix,tls://127.0.0.1:0"), make_peer()
    expected = answer(source)
    near, far = str(source.core.kv_endpoint).split(",")
    tap = Tap(far)
    assert answer(target, source, source=f"{near},{tap.endpoint}") == expected
    assert not tap.heard
    elsewhere = make_peer()
    assert answer(elsewhere, source, source=f"unix:on-another-machine,{tap.endpoint}") == expected
    assert elsewhere.find(Scheduled)[0].num_cached_tokens == NUM_HIT
    assert tap.heard


def test_a_connection_that_is_cancelled_says_no_word_without_its_keys() -> None:
    transport = KV_TRANSPORTS.get("tls")(SECRET)
    listener, endpoint = transport.listen("//127.0.0.1:0")
    ends: list[socket.socket] = []
    waiting = threading.Thread(target=lambda: ends.append(transport.accept(listener.accept()[0], 20.0)))
    waiting.start()
    with listener, transport.connect(endpoint.partition(":")[2], 20.0) as near:
        waiting.join()
        with ends[0]:
            kv_sockets._shut(near)
            with pytest.raises(OSError, match=r"(?i)broken pipe|EOF|reset"):
                near.sendall(b"KV")
            assert near.version() == "TLSv1.3"  # type: ignore[attr-defined]


# Where engines listen


def test_every_transport_says_what_it_endangers() -> None:
    assert [name for name, _ in KV_TRANSPORTS] == ["shm", "unix", "tls", "mooncake", "sealed"]
    assert all(threat.mitigations for _, threat in KV_TRANSPORTS)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("unix:name", "takes no address"),
        ("shm:/dev/shm", "shm takes no address"),
        ("tls", "write tls://HOST:0"),
        ("tls://0.0.0.0:9", "names no address"),
        ("tls://[::]:9", "names no address"),
        ("tls:127.0.0.1", "write tls://HOST:0"),
        ("tls://127.0.0.1:99999", "write tls://HOST:0"),
        ("unix,tls://192.0.2.1:0", "cannot listen"),
        ("tcp://127.0.0.1:0", "choose one of: shm, unix, tls, mooncake"),
        ("unix,", "choose one of: shm, unix, tls, mooncake"),
    ],
)
def test_an_address_that_cannot_be_is_one_error(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVSocketLinks(setting, KVFormat("f", 8, "", (1,)), SECRET)


def test_a_setting_without_an_address_gets_that_of_its_machine() -> None:
    assert fill_address("unix,tls", "10.0.0.7") == "unix,tls://10.0.0.7:0"
    assert fill_address("tls", "fe80::7") == "tls://[fe80::7]:0"
    assert fill_address("unix,tls://10.0.0.1:0", "10.0.0.7") == "unix,tls://10.0.0.1:0"
    assert [lacks_address(setting) for setting in ("unix,tls", "unix", "tls://10.0.0.1:0")] == [True, False, False]
    assert [has_fixed_port(setting) for setting in ("unix,tls", "tls://10.0.0.1:0", "unix,tls://10.0.0.1:9")] == [
        False,
        False,
        True,
    ]
