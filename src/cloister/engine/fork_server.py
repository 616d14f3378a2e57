"""Starts engines as forks of a template process (`engine.template`): in milliseconds, and in memory that they share.

Several replicas share a fork server, and so a template. It is made when the first engine is needed, and again as soon as it has
died, or when an engine needs other settings. It ends when no engine runs, unless it is to stay.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Final

import msgspec

from cloister.engine import channel, child_process
from cloister.engine.child_process import ForkedProcess, ProcessHandle
from cloister.engine.spawning import spawn_program, start_template, take_early_template
from cloister.engine.supervision import Restarts
from cloister.types.errors import CloisterError, EngineError, recreate
from cloister.types.events import Failed
from cloister.types.processes import adopting_orphans

FORK_TIMEOUT_S: Final = 10.0
"""A fork takes milliseconds; a template that is silent for longer hangs."""
MAX_CRASHES: Final = 3
"""A template with this many crashed forks is replaced. Its forks share their addresses, which an attacker who crashes one after
another must not learn bit by bit; and a broken state must not be forked forever."""
_NUM_ATTEMPTS: Final = 2

MESSAGE_BYTES: Final = 1 << 20
FORK: Final = b"f"
"""The request for an engine; its socket comes along."""
PID_BYTES: Final = 8
"""The reply to it: a process id, little-endian."""
MYSELF: Final = 0
"""Reply in place of a process id: the template is that engine now."""

_logger = logging.getLogger(__name__)


class TemplateReady(msgspec.Struct, frozen=True, tag=True):
    """A template's first message, unless the engine cannot be built (`Failed`).

    Attributes:
        refusal: why it cannot be forked; empty if it can.
    """

    refusal: str = ""


_STARTED: Final = msgspec.msgpack.Decoder(TemplateReady | Failed)


class ForkServer:
    """Starts the engines of one or several transports. For one event loop.

    Args:
        keeps_template: whether the template stays when no engine runs, so that the next one starts in milliseconds.
        start_timeout_s: timeout for loading the model.

    Attributes:
        num_users: transports that may start engines; the template ends with the last one.
    """

    def __init__(self, *, keeps_template: bool = False, start_timeout_s: float = 600.0) -> None:
        self.num_users = 0
        self._keeps_template = keeps_template
        self._start_timeout_s = start_timeout_s
        self._template: _Template | None = None
        self._forks = True
        self._engines: list[ProcessHandle] = []
        self._num_crashes = 0
        self._lock = asyncio.Lock()
        self._num_failures = 0
        self._failure: tuple[channel.Boot, CloisterError] | None = None
        self._restarts = Restarts()
        self._replacing: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the template, if there is one."""
        return None if self._template is None else self._template.process.pid

    async def start(self, far: socket.socket, boot: channel.Boot) -> ProcessHandle:
        """Starts an engine at the other end of `far`, which will get `boot`.

        Raises:
            CloisterError: it cannot be built.
        """
        # only an engine gets these, not the template, which all replicas share
        boot = msgspec.structs.replace(boot, kv_secret=None, kv_pool=None, is_restart=False, replica=None)
        num_failures = self._num_failures
        async with self._lock:
            if not self._forks:
                return spawn_program(far)
            if self._failure is not None and self._num_failures > num_failures and self._failure[0] == boot:
                # while this one waited: of many replicas that do not fit, each would load a template of its own
                error = self._failure[1]
                raise recreate(error.message, error.code, getattr(error, "fit", None))
            await self._check(boot)
            for _ in range(_NUM_ATTEMPTS):
                try:
                    engine = await self._fork(far, boot)
                except OSError:
                    _logger.warning("the template of engines does not answer; it is replaced")
                else:
                    self._engines.append(engine)
                    return engine
            return spawn_program(far)

    async def discard_template(self) -> None:
        """Ends the template if it has no user, or no engine runs and it is not to stay."""
        async with self._lock:
            self._count_crashes()
            if not self.num_users or not (self._engines or self._keeps_template):
                await self._end_template()

    async def _check(self, boot: channel.Boot) -> None:
        """Ends a template that cannot be forked for `boot`."""
        self._count_crashes()
        if self._num_crashes >= MAX_CRASHES or (self._template is not None and self._template.boot != boot):
            await self._end_template()

    def _count_crashes(self) -> None:
        statuses = [engine.poll() for engine in self._engines]
        self._num_crashes += sum(status not in (None, 0) for status in statuses)
        self._engines = [engine for engine, status in zip(self._engines, statuses, strict=True) if status is None]

    async def _fork(self, far: socket.socket, boot: channel.Boot) -> ProcessHandle:
        if self._template is None:
            try:
                self._template = await self._make(boot)
            except CloisterError as error:
                self._num_failures, self._failure = self._num_failures + 1, (boot, error)
                raise
        made = self._template
        try:
            engine = await made.fork(far)
        except BaseException:  # whatever it still replies belongs to this call
            await self._end_template()
            raise
        if made.refusal:
            _logger.warning("each engine of this model starts by itself, not as a fork: %s", made.refusal)
            self._forks, self._template = False, None
            made.let_go()
        return engine

    async def _make(self, boot: channel.Boot) -> _Template:
        try:
            with adopting_orphans():
                pass
        except OSError:
            raise EngineError("this system does not let a process adopt forked engines; set fork_server to off") from None
        self._num_crashes = 0
        made = _Template(boot)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await made.wait()
        except BaseException as error:
            await made.end()
            if isinstance(error, TimeoutError):
                raise EngineError(
                    f"the model was not loaded after {self._start_timeout_s:.0f} s; the log may say why"
                ) from None
            raise
        made.watch(lambda: self._begin_replacing(made))
        return made

    def _begin_replacing(self, dead: _Template) -> None:
        self._replacing = asyncio.get_running_loop().create_task(self._replace(dead), name="replacement of a template")

    async def _replace(self, dead: _Template) -> None:
        """Replaces a template that has died, so that no engine has to wait for it. After too many deaths, the next engine makes
        one."""
        delay_s = self._restarts.next_delay_s(time.monotonic())
        if delay_s is None:
            return
        await asyncio.sleep(delay_s)
        async with self._lock:
            self._count_crashes()
            if self._template is not dead:
                return  # an engine has needed another one, or none is needed any longer
            _logger.warning("the template of engines has died; it is replaced")
            await self._end_template()
            if not self.num_users or not (self._engines or self._keeps_template):
                return
            try:
                self._template = await self._make(dead.boot)
            except CloisterError as error:
                _logger.error("the template of engines was not replaced: %s; the next engine tries again", error.message)

    async def _end_template(self) -> None:
        ended, self._template = self._template, None
        if ended is not None:
            await ended.end()


class _Template:
    """The front's end of a template process, which is started here."""

    def __init__(self, boot: channel.Boot) -> None:
        self.boot = boot
        self.refusal = ""
        self._pidfd: int | None = None
        process, self._control = take_early_template() or start_template()
        self.process: ProcessHandle = process
        try:
            self._control.send(channel.encode(boot))
            self._control.setblocking(False)
        except BaseException:
            self._control.close()
            raise

    async def wait(self) -> None:
        """Waits until the engine is built.

        Raises:
            CloisterError: it cannot be built.
        """
        said = await self._receive(MESSAGE_BYTES)
        match _STARTED.decode(said) if said else None:
            case TemplateReady(refusal):
                self.refusal = refusal
            case Failed(message, code, fit):
                raise recreate(message, code, fit)
            case _:
                raise EngineError(await child_process.explain_death(self.process))

    async def fork(self, far: socket.socket) -> ProcessHandle:
        """Returns an engine at the other end of `far`: a fork, or the template itself.

        Raises:
            OSError: the template has died, or hangs.
        """
        with adopting_orphans():
            socket.send_fds(self._control, [FORK], [far.fileno()])
            async with asyncio.timeout(FORK_TIMEOUT_S):
                said = await self._receive(PID_BYTES)
        if not said:
            raise OSError("the template has died")
        pid = int.from_bytes(said, "little")
        return self.process if pid == MYSELF else ForkedProcess(pid)

    def watch(self, on_death: Callable[[], None]) -> None:
        """Calls `on_death` once if it dies before it is ended here."""
        self._pidfd = os.pidfd_open(self.process.pid)

        def note() -> None:
            self._unwatch()
            on_death()

        asyncio.get_running_loop().add_reader(self._pidfd, note)

    def _unwatch(self) -> None:
        fd, self._pidfd = self._pidfd, None
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def let_go(self) -> None:
        """Lets go of it: it is an engine now."""
        self._unwatch()
        self._control.close()

    async def end(self) -> None:
        """Ends it; its forks live on."""
        self._unwatch()
        self._control.close()
        await child_process.end(self.process)

    async def _receive(self, num_bytes: int) -> bytes:
        try:
            return await asyncio.get_running_loop().sock_recv(self._control, num_bytes)
        except ConnectionError:
            return b""
