"""KV between engines of a sealed node: who taps their links reads nothing, and who changes, repeats or asks gets nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cloister.engine import kv_unit
from cloister.engine.kv_frames import KVLinkError
from cloister.engine.kv_sealed_link import SealedKVTransport, SealedSocket
from cloister.engine.kv_sockets import KVSocketLinks
from cloister.engine.kv_transports import KV_TRANSPORTS
from cloister.engine.kv_unit import KVUnit, UnitListener, UnitPeers, UnitSeat
from cloister.engine.locked_keys import LockedKeys
from cloister.kv import KVQuery
from cloister.text import Tokenizer
from cloister.types.errors import ConfigError
from cloister.types.events import Ended, HoldKV, KVLoaded, KVSource, PrefetchKV, PrefillDone, Resumption, Scheduled, Submit
from tests.engine.test_kv_transfer import NUM_HIT, PROMPT, Peer, answer, make_request, run_until

pytestmark = pytest.mark.usefixtures("patience")

SECRET = b"s" * 32
OTHER = [token % 50 + 200 for token in range(len(PROMPT))]


class UnitPeer(Peer):
    """An engine of a sealed node, whose steps the test makes."""

    def __init__(self, tokenizer: Tokenizer, unit: KVUnit, index: int, secret: bytes | None = None) -> None:
        self.transport = SealedKVTransport(secret or unit.secret, UnitSeat(index), *unit.admit(index))
        super().__init__(tokenizer, setting="unix")
        self.links.close()
        make = lambda form: KVSocketLinks("sealed", form, secret or unit.secret, {"sealed": self.transport})  # noqa: E731
        self.core.exchange_kv(make, of_requests_only=True)
        self.links = self.core._transfer.links  # type: ignore[union-attr]
        self.links.on_news(self.core.input_queue.wake)


@pytest.fixture
def make_peer(tokenizer: Tokenizer) -> Iterator[Callable[..., UnitPeer]]:
    unit, made = KVUnit(), list[UnitPeer]()

    def make(index: int, **options: Any) -> UnitPeer:
        made.append(UnitPeer(tokenizer, options.pop("unit", unit), index, **options))
        return made[-1]

    yield make
    for peer in made:
        peer.links.close()
    unit.close()


def prefill(source: UnitPeer) -> list[int]:
    """Has an engine compute a prompt for another one; returns its first token."""
    source.core.input_queue.put(Submit(make_request(), 0, hold_kv_s=60.0, prefill_only=True))
    run_until(lambda: bool(source.find(PrefillDone)), source)
    return source.token_ids


def go_on(target: UnitPeer, source: UnitPeer, tokens: list[int], endpoint: str | None = None) -> list[int]:
    """Has another engine go on with it; returns all tokens."""
    where = KVSource(endpoint or str(source.core.kv_endpoint))
    resumption = Resumption(token_ids=[tokens], was_scheduled=True)
    target.core.input_queue.put(Submit(make_request(), 0, resumption, kv_source=where))
    run_until(lambda: bool(target.find(Ended)), target, source)
    return [*tokens, *target.token_ids]


def test_the_engine_that_goes_on_loads_the_prompt_over_a_sealed_link_and_says_the_same(
    make_peer: Callable[..., UnitPeer],
) -> None:
    expected = answer(make_peer(2))
    source, target = make_peer(0), make_peer(1)
    assert go_on(target, source, prefill(source)) == expected
    [loaded] = target.find(KVLoaded)
    assert (loaded.complete, loaded.num_tokens) == (True, NUM_HIT)
    run_until(lambda: not source.links._peers, source)
    source.step()
    source.check_empty()  # what was held for the other engine is gone with the transfer


def test_a_prompt_that_is_followed_arrives_while_it_is_computed(make_peer: Callable[..., UnitPeer]) -> None:
    source, target = make_peer(0), make_peer(1)
    where = KVSource(str(source.core.kv_endpoint))
    target.core.input_queue.put(PrefetchKV(make_request(), PROMPT, where, follows=True))
    source.core.input_queue.put(Submit(make_request(), 0, hold_kv_s=60.0, prefill_only=True))
    run_until(lambda: bool(target.find(KVLoaded)), target, source)
    assert target.find(KVLoaded)[0].complete
    assert target.find(KVLoaded)[0].num_tokens == NUM_HIT


class Tap:
    """An operator between engines: each engine that is introduced gets a listener of the operator's, who passes everything on.

    Attributes:
        heard: all bytes of both directions.
        change: what becomes of the bytes that the engine at the listener sends.
    """

    def __init__(self) -> None:
        self.heard = bytearray()
        self.change: Callable[[bytes], bytes] = lambda data: data
        self._opened: list[socket.socket] = []

    def close(self) -> None:
        for sock in self._opened:
            sock.close()

    def introduce(self, news: socket.socket, index: int, listener: socket.socket) -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        real = listener.dup()
        self._opened += [real]
        threading.Thread(target=self._run, args=(UnitListener.adopt(far), real), daemon=True).start()
        with near:
            socket.send_fds(news, [str(index).encode()], [near.fileno()])

    def _run(self, tapped: UnitListener, real: socket.socket) -> None:
        while True:
            try:
                asker, _ = tapped.accept()
            except OSError:
                tapped.close()
                return
            source, far = socket.socketpair()
            self._opened += [asker, source]
            with far:
                socket.send_fds(real, [b"+"], [far.fileno()])
            for pair in ((asker, source, lambda data: data), (source, asker, self.change)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, sender: socket.socket, receiver: socket.socket, change: Callable[[bytes], bytes]) -> None:
        try:
            while data := sender.recv(65536):
                self.heard += data
                receiver.sendall(change(data))
            receiver.shutdown(socket.SHUT_WR)
        except OSError:
            receiver.close()


@pytest.fixture
def tap(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tap]:
    tap = Tap()
    monkeypatch.setattr(kv_unit, "_introduce", tap.introduce)
    yield tap
    tap.close()


def record(source: UnitPeer) -> list[Any]:
    """Returns a list that gets every object that an engine gives away."""
    given: list[Any] = []
    seal = source.links._keys.sealer.seal
    source.links._keys.sealer.seal = lambda *what: given.append(seal(*what)) or given[-1]
    return given


def words_of(given: list[Any]) -> list[bytes]:
    """What a reader of a link would look for: scope, prefix keys, contents of blocks in pieces, and the request."""
    contents = [content for found in given for content in found.contents]
    pieces = [content[start : start + 16] for content in contents for start in range(0, len(content) - 15, 16)]
    return [b"r" * 8, *{found.header.root for found in given}, *(found.header.key for found in given), *set(pieces)]


def test_an_operator_who_taps_a_link_reads_no_kv_no_scope_and_no_prefix_key(
    make_peer: Callable[..., UnitPeer], tap: Tap
) -> None:
    source, target = make_peer(0), make_peer(1)
    given = record(source)
    go_on(target, source, prefill(source))
    assert target.find(KVLoaded)[0].num_tokens == NUM_HIT
    assert len(given) == NUM_HIT // 8
    assert len(tap.heard) > sum(found.num_bytes for found in given)  # it passed the tap
    assert [word for word in words_of(given) if word in tap.heard] == []


def test_the_tap_reads_a_link_that_is_not_sealed(
    make_peer: Callable[..., UnitPeer], tap: Tap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search itself works: the same tap finds everything where the handshake seals nothing."""

    def leave_open(sock: socket.socket, *_: object, **__: object) -> socket.socket:
        return sock

    monkeypatch.setattr(SealedSocket, "shake_hands", leave_open)
    source, target = make_peer(0), make_peer(1)
    given = record(source)
    go_on(target, source, prefill(source))
    found = [word for word in words_of(given) if word in tap.heard]
    assert len(found) >= len(given) + 1


@pytest.mark.parametrize("at", [40, 200, 2000])
def test_what_an_operator_changes_on_a_link_is_computed_instead(make_peer: Callable[..., UnitPeer], tap: Tap, at: int) -> None:
    expected = answer(make_peer(2))
    position = 0

    def flip(data: bytes) -> bytes:
        nonlocal position
        start, position = position, position + len(data)
        if start <= at < position:
            changed = bytearray(data)
            changed[at - start] ^= 1
            return bytes(changed)
        return data

    tap.change = flip
    source, target = make_peer(0), make_peer(1)
    assert go_on(target, source, prefill(source)) == expected
    assert not target.find(KVLoaded)[0].complete


def test_an_engine_that_was_not_given_the_secret_gets_nothing_and_is_not_believed(
    make_peer: Callable[..., UnitPeer],
) -> None:
    """An engine that was put into the place of one of the node's, or beside them, by somebody else than its front."""
    expected = answer(make_peer(3))
    source, stranger = make_peer(0), make_peer(1, secret=b"x" * 32)
    given = record(source)
    assert go_on(stranger, source, prefill(source)) == expected  # computed: it had the request anyway
    assert not stranger.find(KVLoaded)[0].complete
    assert given == []
    target = make_peer(2)
    stolen = record(stranger)
    assert go_on(target, stranger, source.token_ids) == expected
    assert not target.find(KVLoaded)[0].complete
    assert stolen == []


def test_an_engine_gives_kv_of_requests_that_went_on_elsewhere_and_of_no_other(make_peer: Callable[..., UnitPeer]) -> None:
    """What is cached besides, such as a session's, cannot be pulled by who knows its keys."""
    source, target = make_peer(0), make_peer(1)
    expected, given = answer(source), record(source)  # it is in the cache of the source now, and its request has ended
    assert answer(target, source, source=source.core.kv_endpoint) == expected
    assert target.find(Scheduled)[0].num_cached_tokens == 0
    assert given == []
    source.engine.scheduler.kv_exports.of_requests_only = False
    other = make_peer(2)
    assert answer(other, source, source=source.core.kv_endpoint) == expected
    assert other.find(Scheduled)[0].num_cached_tokens == NUM_HIT


@pytest.mark.parametrize("is_held", [False, True], ids=["here", "handed on"])
def test_who_names_a_request_that_was_handed_to_it_gets_no_kv_of_another_one(
    make_peer: Callable[..., UnitPeer], *, is_held: bool
) -> None:
    """A captured engine that knows the keys of a session asks for them in the name of a request that it was given."""
    source, captured = make_peer(0), make_peer(1)
    answer(source, request=make_request("session", OTHER))
    given = record(source)
    own = make_request("r")
    source.core.input_queue.put(Submit(own, 0, hold_kv_s=60.0, prefill_only=is_held))
    run_until(lambda: bool(source.find(PrefillDone) if is_held else source.find(Scheduled)[1:]), source)
    exports, table = source.engine.scheduler.kv_exports, source.engine.scheduler._requests.prefixes
    others, root, _ = table.chain_of(make_request("session", OTHER), OTHER)
    for follows in (False, True):
        number = exports.open(KVQuery("r", root, others, follows=follows), 1.0)
        assert exports.take(number) == []
        exports.close(number, is_complete=False)
    mixed = table.chain_of(own, PROMPT)[0][:1] + others[1:]
    number = exports.open(KVQuery("r", root, mixed), 1.0)
    assert [entry.key for entry in exports.take(number) or ()] == mixed[:1]
    exports.close(number, is_complete=False)
    if is_held:
        assert go_on(captured, source, source.token_ids[6:]) == answer(make_peer(2))
        assert captured.find(KVLoaded)[0].num_tokens == NUM_HIT  # its own comes
        assert {found.header.key for found in given}.isdisjoint(others)


def test_no_endpoint_leads_out_of_the_node(make_peer: Callable[..., UnitPeer], tokenizer: Tokenizer) -> None:
    """A worker names the source; one that was taken over may name any."""
    outside, target = Peer(tokenizer, secret=SECRET), make_peer(1)
    expected = answer(outside)
    assert answer(target, outside, source=outside.core.kv_endpoint) == expected
    assert not target.find(KVLoaded)[0].complete
    assert target.find(Scheduled)[0].num_cached_tokens == 0
    outside.links.close()


def test_a_hold_ends_when_its_worker_is_gone(make_peer: Callable[..., UnitPeer]) -> None:
    source = make_peer(0)
    prefill(source)
    assert len(source.engine.scheduler.kv_exports._leases or ()) == 1
    source.core.input_queue.put(HoldKV("r", 0.0))
    source.step()
    source.check_empty()


def test_engines_find_one_that_started_again_and_none_that_is_gone(make_peer: Callable[..., UnitPeer]) -> None:
    expected = answer(make_peer(3))
    gone, target = make_peer(0), make_peer(1)
    tokens = prefill(gone)
    gone.links.close()
    assert go_on(target, gone, tokens) == expected
    assert not target.find(KVLoaded)[0].complete
    successor, other = make_peer(0), make_peer(2)
    prefill(successor)
    assert go_on(other, successor, tokens) == expected
    assert other.find(KVLoaded)[0].num_tokens == NUM_HIT


def shake_both(keys: LockedKeys, secrets: tuple[bytes, bytes] = (SECRET, SECRET)) -> tuple[SealedSocket, SealedSocket]:
    near, far = socket.socketpair()
    made: dict[bool, SealedSocket] = {}

    def shake(sock: socket.socket, secret: bytes, is_source: bool) -> None:
        made[is_source] = SealedSocket.shake_hands(sock, keys, keys.put(secret), 10.0, is_source=is_source)

    both = [threading.Thread(target=shake, args=given) for given in ((near, secrets[0], False), (far, secrets[1], True))]
    for each in both:
        each.start()
    for each in both:
        each.join()
    return made[False], made[True]


def receive(sock: SealedSocket, num_bytes: int) -> bytes:
    got = bytearray()
    sock.settimeout(10.0)
    while len(got) < num_bytes:
        buffer = bytearray(num_bytes - len(got))
        if not (size := sock.recv_into(buffer)):
            break
        got += buffer[:size]
    return bytes(got)


@pytest.mark.parametrize("size", [1, 2**18 - 1, 2**18, 2**18 + 1, 2**20])
def test_contents_of_every_length_arrive(size: int) -> None:
    asker, source = shake_both(LockedKeys())
    content = bytes(range(256)) * (size // 256) + bytes(size % 256)
    with asker, source:
        sending = threading.Thread(target=source.sendall, args=(content,))
        sending.start()
        assert receive(asker, size) == content
        sending.join()


def test_keys_are_of_one_connection_and_gone_with_it() -> None:
    keys = LockedKeys()
    first, second = shake_both(keys), shake_both(keys)
    drawn = [keys.copy(number) for link in (*first, *second) for number in (link._agreed()._own, link._agreed()._peers)]
    assert len(set(drawn)) == 4  # two of each connection, which both sides have
    for link in (*first, *second):
        link.close()
    assert [number for number in keys._keys if keys.copy(number) != SECRET] == []
    page = bytes(keys._pages[0])
    assert not any(key in page for key in drawn if key is not None)


def test_a_repeated_record_is_refused() -> None:
    asker, source = shake_both(LockedKeys())
    with asker, source:
        source.sendall(b"once")
        asker.settimeout(10.0)
        raw = bytearray(4 + 4 + 16)
        socket.socket.recv_into(asker, raw)
        socket.socket.sendall(source, raw + raw)
        assert receive(asker, 4) == b"once"
        with pytest.raises(KVLinkError, match="not sealed by the engine"):
            receive(asker, 4)


def test_a_connection_without_the_secret_opens_nothing() -> None:
    asker, source = shake_both(LockedKeys(), (SECRET, b"t" * 32))
    with asker, source:
        source.sendall(b"kv")
        with pytest.raises(KVLinkError, match="not sealed by the engine"):
            receive(asker, 2)


LOCKED = """
import sys, socket, threading
from cloister.engine import kv_sealed_link, locked_keys

class Closed:
    def find_spec(self, name, *_):
        raise ModuleNotFoundError(name)

near, far = socket.socketpair()
keys = locked_keys.LockedKeys()
sys.meta_path.insert(0, Closed())
shake = kv_sealed_link.SealedSocket.shake_hands
secret = keys.put(b"s" * 32)
threading.Thread(target=lambda: shake(far, keys, secret, 60.0, is_source=True).sendall(b"kv")).start()
link = shake(near, keys, secret, 60.0, is_source=False)
got = bytearray(2)
link.recv_into(got)
print(got.decode())
"""


def test_an_engine_that_may_import_nothing_more_has_all_that_a_link_needs() -> None:
    """Engines of a sealed node are locked down before their first connection."""
    done = subprocess.run([sys.executable, "-c", LOCKED], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "kv\n", done.stderr


def test_an_engine_knows_only_those_to_whom_its_front_has_introduced_it() -> None:
    unit = KVUnit()
    listener, news = unit.admit(0)
    peers = UnitPeers(news)
    with listener, pytest.raises(ConnectionRefusedError):
        peers.connect(1)
    peers.close()
    unit.close()


def test_outside_a_sealed_node_there_are_no_such_links() -> None:
    with pytest.raises(ConfigError, match="set it to shm"):
        KV_TRANSPORTS.get("sealed")(SECRET)
