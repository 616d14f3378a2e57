"""Channels to engines on demand: a worker asks the zygote, which has the engines' listeners, over a socket of its own.

So a worker has no channel that it does not use, and reaches an engine that was started after it was forked. It gets channels to
engines and nothing else: the zygote makes the socket pair, and reads a number.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from cloister.engine.channel import wait_readable
from cloister.engine.kv_unit import CARRIED, CarriedSocket
from cloister.types.errors import EngineError

MAX_ASKS, MAX_CHANNELS = 2048, 64
"""How often one worker may ask at once, else its socket is closed; and how many channels it gets at once, then none for now. It
asks again and again while an engine does not run, and needs another channel for each one that is started again."""
ASKS_PER_S, CHANNELS_PER_S = 20.0, 0.2
"""What it may have besides, as time goes by: a worker that waits for its twelve engines asks twelve times a second at most."""
ANSWER_TIMEOUT_S: Final = 10.0
_NOT_RUNNING: Final = b"-"
_NUMBER_BYTES: Final = 4
NOT_RUNNING: Final = "the engine does not run at present"
GONE: Final = "this worker gets no channels any more"


class _Allowance:
    """A number of something that is used up, and grows again up to that number."""

    def __init__(self, most: int, per_s: float) -> None:
        self._most, self._per_s = most, per_s
        self._left, self._seen_s = float(most), time.monotonic()

    def take(self) -> bool:
        """Takes one; returns False if there is none."""
        if not self.has_one():
            return False
        self._left -= 1.0
        return True

    def has_one(self) -> bool:
        """Returns whether there is one to take."""
        now_s = time.monotonic()
        self._left = min(self._most, self._left + (now_s - self._seen_s) * self._per_s)
        self._seen_s = now_s
        return self._left >= 1.0


@dataclass(frozen=True, slots=True)
class _Allowances:
    """What one worker may have yet."""

    asks: _Allowance = field(default_factory=lambda: _Allowance(MAX_ASKS, ASKS_PER_S))
    channels: _Allowance = field(default_factory=lambda: _Allowance(MAX_CHANNELS, CHANNELS_PER_S))


class ChannelBroker:
    """The zygote's side: answers its workers. It has one thread, so nothing here waits.

    Args:
        open_channel: returns a channel to an engine, and how it came (`sealed_channels.CONNECT` or `CARRIED`); raises OSError
            or KeyError if it does not run.
        control: is watched too.
    """

    def __init__(self, open_channel: Callable[[int], tuple[socket.socket, bytes]], control: socket.socket) -> None:
        self._open_channel = open_channel
        self._control = control
        self._selector = selectors.PollSelector()  # no object of the kernel, which forks would share
        self._selector.register(control, selectors.EVENT_READ)
        self._workers: dict[socket.socket, _Allowances] = {}

    def admit(self) -> socket.socket:
        """Returns the end of another worker."""
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        near.setblocking(False)
        self._selector.register(near, selectors.EVENT_READ)
        self._workers[near] = _Allowances()
        return far

    def serve(self) -> None:
        """Answers workers until `control` can be read."""
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            for sock in ready:
                if isinstance(sock, socket.socket) and sock is not self._control:
                    self._answer(sock)
            if self._control in ready:
                return

    def close(self) -> None:
        """Closes all ends that are here, in a fork that is not to have them."""
        for sock in self._workers:
            sock.close()
        self._workers.clear()

    def _answer(self, sock: socket.socket) -> None:
        allowed = self._workers[sock]
        try:
            asked = sock.recv(_NUMBER_BYTES)
            if asked.isdigit() and allowed.asks.take():
                self._reply(sock, int(asked), allowed.channels)
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._selector.unregister(sock)  # it has ended, or sends what no worker sends
        del self._workers[sock]
        sock.close()

    def _reply(self, sock: socket.socket, index: int, channels: _Allowance) -> None:
        if not channels.has_one():  # before one is opened, which costs the engine and perhaps another machine something
            sock.send(_NOT_RUNNING)
            return
        try:
            opened, how = self._open_channel(index)
        except (OSError, KeyError):
            sock.send(_NOT_RUNNING)
            return
        channels.take()  # only now: an engine that does not run costs none
        with opened:
            socket.send_fds(sock, [how], [opened.fileno()])


class ChannelSource:
    """A worker's side.

    Args:
        sock: its socket to the broker.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._turn = asyncio.Lock()

    async def open(self, index: int) -> socket.socket:
        """Returns a channel to an engine.

        Raises:
            EngineError: it does not run, or there are no channels any more.
        """
        async with self._turn:
            try:
                self._sock.send(str(index).encode())
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await wait_readable(self._sock)
                answer, descriptors, _, _ = socket.recv_fds(self._sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
            except OSError:  # includes a time that has run out: a late answer would be taken for the next one
                self._sock.close()
                raise EngineError(GONE) from None
        if not answer:
            raise EngineError(GONE)
        if not descriptors:
            raise EngineError(NOT_RUNNING)
        return (CarriedSocket if answer == CARRIED else socket.socket)(fileno=descriptors[0])
