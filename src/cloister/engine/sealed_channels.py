"""Channels from worker processes to an engine: each process that handles one request has its own, without passing the front.

The listener, an unnamed socket, receives descriptors of new channels. Channels use the frames of `engine.channel` and may send
only `Submit`, `Abort`, and the messages that move the KV of their own requests from one engine of the node to another. When a
channel closes, its requests are aborted, and nothing of theirs is kept for other engines. A channel that uses the id of another
one's request is closed: otherwise it could receive that one's outputs. If that one's channel has closed, it waits until the
engine has ended the request: the worker comes back over another connection as soon as one is lost, perhaps during a long step.
A channel that comes from another machine is sealed (`engine.carried_channel` is its other end), and ends if nothing comes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from cloister.engine import channel
from cloister.engine.channel import InputQueue
from cloister.engine.heartbeats import LOOK_S, Silence
from cloister.engine.kv_frames import KVLinkError
from cloister.engine.kv_unit import CARRIED, SECRET_BYTES
from cloister.types.errors import ConfigError
from cloister.types.events import (
    Abort,
    CancelPrefetch,
    Ended,
    Event,
    FrontMessage,
    HoldKV,
    Outputs,
    PrefetchKV,
    PrefillDone,
    Stepped,
    Submit,
)
from cloister.types.request import Request

if TYPE_CHECKING:
    from cloister.engine.kv_sealed_link import LinkRecords
    from cloister.engine.locked_keys import LockedKeys

CONNECT: Final = b"+"
"""The message that accompanies a descriptor, of a channel from this machine; `CARRIED`: from another one."""
MAX_TOKEN_ID: Final = 2**31
_READ_BYTES: Final = 65536

_logger = logging.getLogger(__name__)


def open_listener() -> tuple[socket.socket, socket.socket]:
    """Returns both ends of a listener: one for the creator of channels, one for the engine."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class _Channel:
    """One worker's channel, with its receive buffer and its unsent output.

    Args:
        records: seal its content; None for a channel of this machine.
    """

    def __init__(self, sock: socket.socket, records: LinkRecords | None = None) -> None:
        self.sock = sock
        self.records = records
        self.sealed = bytearray()
        self.received = bytearray()
        self.unsent = bytearray(b"" if records is None else records.public)
        self.lock = threading.Lock()
        self.silence = Silence()
        self.owes_answer = False  # to a heartbeat
        self.expected: set[str] = set()  # requests that come later: their KV is loaded before
        self.left: set[str] = set()  # requests that go on in another engine, which loads their KV from here

    @property
    def is_closed(self) -> bool:
        return self.sock.fileno() < 0

    def receive(self, data: bytes) -> None:
        """Opens what came.

        Raises:
            KVLinkError: the other end has not sealed it.
        """
        if self.records is None:
            self.received += data
            return
        self.sealed += data
        if not self.records.is_agreed:
            head_bytes = SECRET_BYTES + len(self.records.public)
            if len(self.sealed) < head_bytes:
                return
            self.records.agree(bytes(self.sealed[SECRET_BYTES:head_bytes]), bytes(self.sealed[:SECRET_BYTES]))
            self.sealed = self.sealed[head_bytes:]
        while (opened := self.records.open_next(self.sealed)) is not None:
            self.received += opened
            self.owes_answer |= not opened
            self.silence.note_record()

    def queue(self, frame: bytes) -> None:
        """Adds to the output."""
        self.unsent += frame if self.records is None else self.records.seal_all(frame)

    def queue_answer(self) -> None:
        """Adds the answer to a heartbeat to the output."""
        assert self.records is not None, "others send none"
        self.owes_answer = False
        self.unsent += self.records.seal(b"")

    def close(self) -> None:
        """Closes the channel; its keys are wiped."""
        with self.lock:
            self.sock.close()
            if self.records is not None:
                self.records.close()

    def take(self) -> Iterable[bytes]:
        """Yields whole frames.

        Raises:
            ChannelError: a frame is too long.
        """
        while len(self.received) >= channel.HEAD_BYTES:
            end = channel.HEAD_BYTES + channel.payload_size(self.received[: channel.HEAD_BYTES])
            if len(self.received) < end:
                return
            frame = bytes(self.received[channel.HEAD_BYTES : end])
            self.received = self.received[end:]
            yield frame

    def push(self) -> bool:
        """Sends pending output without blocking; returns True if some is left. Output for a worker that has ended is lost."""
        while self.unsent:
            try:
                num_bytes = self.sock.send(self.unsent)
                self.unsent = self.unsent[num_bytes:]
                self.silence.note_sent(num_bytes)
            except BlockingIOError:
                return True
            except OSError:  # the reader will notice
                self.unsent = bytearray()
        return False


@dataclass(frozen=True, slots=True)
class _Later:
    """What a worker has sent of a request that came back before the engine has ended it."""

    worker: _Channel
    messages: list[FrontMessage] = field(default_factory=list)


class SealedChannels:
    """The engine's end of the listener and its channels.

    Args:
        sock: the engine's end of the listener.
        input_queue: receives the messages of channels, as it does those of the front.
        max_num_seqs: most sequences that a request may ask for.
    """

    def __init__(self, sock: socket.socket, input_queue: InputQueue, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._sock = sock
        self._sock.setblocking(False)
        self._input_queue = input_queue
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for end in (self._wake_receiver, self._wake_sender):
            end.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._keys: LockedKeys | None = None
        self._by_request: dict[str, _Channel] = {}
        self._later: dict[str, _Later] = {}  # of the thread that reads; each waits for the end of a request with its id
        self._stuck: set[_Channel] = set()
        self._carried: set[_Channel] = set()
        self._looked_s = 0.0

    def run(self) -> None:
        """Reads and writes until the listener is closed from outside; run it in its own thread."""
        while True:
            for key, _ in self._selector.select(LOOK_S if self._carried else None):
                if key.fileobj is self._sock:
                    if not self._admit():
                        return
                elif key.fileobj is self._wake_receiver:
                    self._wake_receiver.recv(_READ_BYTES)
                    self._read_later()
                else:
                    self._serve(key.data)
            for worker in list(self._stuck):
                self._push(worker)
            if self._carried and time.monotonic() - self._looked_s >= LOOK_S:
                self._looked_s = time.monotonic()
                self._end_silent()

    def _end_silent(self) -> None:
        """Drops workers of other machines of which nothing has come for long."""
        for worker in list(self._carried):
            worker.silence.look()
            if worker.silence.is_long:
                self._drop(worker)

    def deliver(self, message: Outputs) -> Outputs:
        """Sends each channel the outputs of its requests; returns the rest for the front, with all counts and no content.

        Called from the engine's thread.
        """
        if not self._by_request:
            return message
        by_worker: dict[_Channel, Outputs] = {}
        rest = Outputs([], [], message.replies)
        for output in message.outputs:
            worker = self._by_request.get(output.request_id)
            (rest if worker is None else by_worker.setdefault(worker, Outputs([], []))).outputs.append(output)
        for event in message.events:
            worker = None if isinstance(event, Stepped) else self._by_request.get(event.request_id)
            if worker is not None:
                by_worker.setdefault(worker, Outputs([], [])).events.append(event)
            rest.events.append(event if worker is None else _without_content(event))
        for event in message.events:  # before it is sent: a worker may come back at once with the same request
            if isinstance(event, PrefillDone) or (isinstance(event, Ended) and event.last):
                worker = self._by_request.pop(event.request_id, None)
                if worker is not None and worker.is_closed:  # it may have come back: see `_read`
                    self._wake()
        for worker, outputs in by_worker.items():
            self._send(worker, outputs)
        return rest

    def _send(self, worker: _Channel, outputs: Outputs | None) -> None:
        """Sends outputs, or the answer to a heartbeat."""
        with worker.lock:
            if worker.is_closed:
                return  # it was dropped meanwhile
            if outputs is None:
                worker.queue_answer()
            else:
                worker.queue(channel.frame(outputs))
            is_stuck = worker.push()
        if is_stuck:
            self._stuck.add(worker)
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the wake-up pipe is full, so a wake-up is already pending
            self._wake_sender.send(b".")

    def _push(self, worker: _Channel) -> None:
        with worker.lock:
            is_stuck = worker.push()
        if not is_stuck:
            self._stuck.discard(worker)
        if not worker.is_closed:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_stuck else 0)
            self._selector.modify(worker.sock, wanted, worker)

    def _admit(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self._sock, len(CONNECT), 1)
        if not message:
            return False
        for descriptor in descriptors:
            sock = socket.socket(fileno=descriptor)
            sock.setblocking(False)
            try:
                worker = _Channel(sock, self._make_records() if message == CARRIED else None)
            except ConfigError as error:  # the worker goes on elsewhere
                _logger.error("%s", error.message)
                sock.close()
                continue
            self._selector.register(sock, selectors.EVENT_READ, worker)
            if worker.records is not None:
                self._carried.add(worker)
            worker.push()
        return True

    def _make_records(self) -> LinkRecords:
        # only where other machines are: it imports cryptography
        from cloister.engine.kv_sealed_link import LinkRecords
        from cloister.engine.locked_keys import lock_keys

        if self._keys is None:
            self._keys = lock_keys("unit_port")
        return LinkRecords(self._keys, is_source=True)

    def _serve(self, worker: _Channel) -> None:
        if worker.is_closed:
            return  # dropped since it was found ready
        try:
            data = worker.sock.recv(_READ_BYTES)
            if data:
                worker.receive(data)
                for frame in worker.take():
                    self._read(worker, channel.decode_front(frame))
                if worker.owes_answer:
                    self._send(worker, None)
                return
        except BlockingIOError:
            return
        except (OSError, channel.ChannelError, KVLinkError, msgspec.MsgspecError, RecursionError):
            pass
        self._drop(worker)

    def _read_later(self) -> None:
        """Reads what waited for the end of a request, if that has ended."""
        for request_id in [each for each in self._later if each not in self._by_request]:
            later = self._later.pop(request_id, None)
            if later is None:
                continue  # its worker has been dropped because of another one
            try:
                for message in later.messages:
                    self._read(later.worker, message)
            except channel.ChannelError:
                self._drop(later.worker)

    def _waits(self, worker: _Channel, message: FrontMessage) -> bool:
        """Keeps a message of a request whose last channel has closed, if the engine has not ended that one yet.

        The engine's thread looks for closed channels after it has removed a request, so none waits for an end that has passed.
        """
        if isinstance(message, Submit | PrefetchKV):
            request_id = message.request.request_id
            owner = self._by_request.get(request_id)
            if owner is not None and owner.is_closed:
                self._later.setdefault(request_id, _Later(worker))
        elif isinstance(message, Abort | HoldKV | CancelPrefetch):
            request_id = message.request_id
        else:
            return False
        later = self._later.get(request_id)
        if later is None or later.worker is not worker:
            return False
        later.messages.append(message)
        return True

    def _read(self, worker: _Channel, message: FrontMessage) -> None:
        if self._waits(worker, message):
            return
        match message:
            case Submit(request, resumption=resumption):
                self._claim(request, worker, *(resumption.token_ids if resumption is not None else ()))
                worker.expected.discard(request.request_id)
                if not math.isfinite(message.hold_kv_s):
                    raise channel.ChannelError("KV cannot be kept for a time that is not a number")
                if message.hold_kv_s > 0.0:
                    worker.left.add(request.request_id)
                self._input_queue.put(message)
            case PrefetchKV(request, token_ids):
                self._claim(request, worker, token_ids)
                worker.expected.add(request.request_id)
                self._input_queue.put(message)
            case CancelPrefetch(request_id) if request_id in worker.expected:
                worker.expected.discard(request_id)
                self._by_request.pop(request_id, None)
                self._input_queue.put(message)
            case HoldKV(hold_s=hold_s) if not math.isfinite(hold_s):
                pass
            case Abort(request_id) | HoldKV(request_id) if self._by_request.get(request_id) is worker:
                if isinstance(message, HoldKV):
                    worker.left.add(request_id)
                self._input_queue.put(message)
            case _:
                pass  # what a worker may not send has no effect

    def _claim(self, request: Request, worker: _Channel, *more_tokens: Sequence[int]) -> None:
        """Gives a channel the outputs of a request. Messages that no healthy worker sends must not end the engine that all
        others use.
        """
        for token_ids in (request.token_ids, *more_tokens):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < MAX_TOKEN_ID:
                raise channel.ChannelError("a token id is out of range")
        is_known = request.request_id in self._by_request and request.request_id not in worker.expected
        is_known |= request.request_id in self._later
        if is_known or not 1 <= request.sampling.n <= self._max_num_seqs:
            raise channel.ChannelError("no request of this channel can have this name, or ask for so many sequences")
        self._by_request[request.request_id] = worker

    def _drop(self, worker: _Channel) -> None:
        self._selector.unregister(worker.sock)
        self._stuck.discard(worker)
        self._carried.discard(worker)
        worker.close()
        self._later = {request_id: later for request_id, later in self._later.items() if later.worker is not worker}
        for request_id, owner in list(self._by_request.items()):  # copy it: the engine's thread removes entries
            if owner is worker and request_id in worker.expected:
                del self._by_request[request_id]
                self._input_queue.put(CancelPrefetch(request_id))
            elif owner is worker:
                self._input_queue.put(Abort(request_id))
        for request_id in worker.left:
            self._input_queue.put(HoldKV(request_id, 0.0))


def _without_content(event: Event) -> Event:
    """Removes the stop string: it is the client's content."""
    if isinstance(event, Ended) and isinstance(event.stop_reason, str):
        return msgspec.structs.replace(event, stop_reason=None)
    return event
