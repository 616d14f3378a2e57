"""A second way to an engine: each process that handles one request has a channel of its own, and the front carries none of it.

Through the listener, a socket without a name, come descriptors of new channels; they speak the frames of `engine.channel`, and
only `Submit` and `Abort` are taken from them. A channel that closes takes its requests with it; one that gives a request the
name of one that runs, or says what no worker says, is closed: it would get what is another's.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterable
from typing import Final

import msgspec

from cloister.engine import channel
from cloister.engine.input_queue import InputQueue
from cloister.types.events import Abort, Ended, Event, Outputs, Stepped, Submit

CONNECT: Final = b"+"
"""What comes with a descriptor."""
_READ_BYTES: Final = 65536


def open_listener() -> tuple[socket.socket, socket.socket]:
    """Returns both ends of a listener: one for whoever makes channels, one for the engine."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class _Channel:
    """One worker's channel: what has come of a frame, and what could not be sent yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.coming = bytearray()
        self.going = bytearray()
        self.lock = threading.Lock()

    def take(self) -> Iterable[bytes]:
        """Yields whole frames.

        Raises:
            ChannelError: one is too long.
        """
        while len(self.coming) >= channel.HEAD_BYTES:
            end = channel.HEAD_BYTES + channel.payload_size(self.coming[: channel.HEAD_BYTES])
            if len(self.coming) < end:
                return
            frame = bytes(self.coming[channel.HEAD_BYTES : end])
            self.coming = self.coming[end:]
            yield frame

    def push(self) -> bool:
        """Sends what there is to send without waiting; True if something is left.

        Raises:
            OSError: nobody is there.
        """
        while self.going:
            try:
                sent = self.sock.send(self.going)
            except BlockingIOError:
                return True
            self.going = self.going[sent:]
        return False


class WorkerChannels:
    """The engine's end.

    Args:
        sock: of the listener.
        input_queue: gets what comes through channels, as it gets what the front says.
        max_num_seqs: most sequences that a request may ask for.
    """

    def __init__(self, sock: socket.socket, input_queue: InputQueue, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._sock = sock
        self._sock.setblocking(False)
        self._input_queue = input_queue
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._near, self._far = socket.socketpair()
        for end in (self._near, self._far):
            end.setblocking(False)
        self._selector.register(self._near, selectors.EVENT_READ)
        self._by_request: dict[str, _Channel] = {}
        self._stuck: set[_Channel] = set()

    def run(self) -> None:
        """Reads and writes until the listener is closed from outside; for a thread of its own."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._sock:
                    if not self._admit():
                        return
                elif key.fileobj is self._near:
                    self._near.recv(_READ_BYTES)
                else:
                    self._serve(key.data)
            for one in list(self._stuck):
                self._push(one)

    def deliver(self, message: Outputs) -> Outputs:
        """Sends to each channel what a step brought its requests; returns the rest, with counts of everything and no content.

        Called by the engine's thread.
        """
        if not self._by_request:
            return message
        theirs: dict[_Channel, Outputs] = {}
        rest = Outputs([], [], message.replies)
        for output in message.outputs:
            one = self._by_request.get(output.request_id)
            (rest if one is None else theirs.setdefault(one, Outputs([], []))).outputs.append(output)
        for event in message.events:
            one = None if isinstance(event, Stepped) else self._by_request.get(event.request_id)
            if one is not None:
                theirs.setdefault(one, Outputs([], [])).events.append(event)
            rest.events.append(event if one is None else _without_content(event))
        for one, outputs in theirs.items():
            self._send(one, outputs)
        for event in message.events:
            if isinstance(event, Ended) and event.last:
                self._by_request.pop(event.request_id, None)
        return rest

    def _send(self, one: _Channel, outputs: Outputs) -> None:
        with one.lock:
            one.going += channel.frame(outputs)
            try:
                is_stuck = one.push()
            except OSError:  # it is gone, as the reader will see
                one.going = bytearray()
                return
        if is_stuck:
            self._stuck.add(one)
            with contextlib.suppress(BlockingIOError):  # so many wakings are under way that one more is not missed
                self._far.send(b".")

    def _push(self, one: _Channel) -> None:
        with one.lock:
            try:
                is_stuck = one.push()
            except OSError:
                one.going = bytearray()
                is_stuck = False
        if not is_stuck:
            self._stuck.discard(one)
        if one.sock.fileno() >= 0:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_stuck else 0)
            self._selector.modify(one.sock, wanted, one)

    def _admit(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self._sock, len(CONNECT), 1)
        if not message:
            return False
        for descriptor in descriptors:
            sock = socket.socket(fileno=descriptor)
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, _Channel(sock))
        return True

    def _serve(self, one: _Channel) -> None:
        try:
            data = one.sock.recv(_READ_BYTES)
            if data:
                one.coming += data
                for frame in one.take():
                    self._read(one, frame)
                return
        except BlockingIOError:
            return
        except (OSError, channel.ChannelError, msgspec.MsgspecError, RecursionError):
            pass
        self._drop(one)

    def _read(self, one: _Channel, frame: bytes) -> None:
        message = channel.decode_front(frame)
        if isinstance(message, Submit):
            request_id = message.request.request_id
            if request_id in self._by_request or not 1 <= message.request.sampling.n <= self._max_num_seqs:
                raise channel.ChannelError("no request of this channel can have this name, or ask for so many sequences")
            self._by_request[request_id] = one
            self._input_queue.put(message)
        elif isinstance(message, Abort) and self._by_request.get(message.request_id) is one:
            self._input_queue.put(message)

    def _drop(self, one: _Channel) -> None:
        self._selector.unregister(one.sock)
        self._stuck.discard(one)
        one.sock.close()
        for request_id, channel_of_it in list(self._by_request.items()):  # a copy: the engine's thread takes from it
            if channel_of_it is one:
                self._input_queue.put(Abort(request_id))


def _without_content(event: Event) -> Event:
    """The text that ended an answer is the client's own."""
    if isinstance(event, Ended) and isinstance(event.stop_reason, str):
        return msgspec.structs.replace(event, stop_reason=None)
    return event
