"""Transport to an engine on another machine, which a placement puts there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from cloister.cluster.remote.placement import Place, Placement
from cloister.cluster.remote.session import LOST_LINK, NOBODY_LISTENS, HostSession
from cloister.engine import channel
from cloister.engine.identity import Identity
from cloister.engine.kv_transports import fill_address
from cloister.engine.supervision import Supervision
from cloister.engine.transports import LOST, Deliver
from cloister.types.config import EngineConfig
from cloister.types.errors import EngineError, recreate
from cloister.types.events import EngineMessage, Failed, FrontMessage, Outputs, Ready

UNREACHABLE = (
    "the engine's host cannot be reached ({how}); the machines must reach each other on all TCP ports, and run the same version"
)


class RemoteTransport:
    """Transport to an engine on another machine (protocol `engine.transports.Transport`).

    Args:
        placement: starts the engine's host, and says when it ends.
        identity: this side's key; its certificate is what the host expects.
        entry: "module:function" that takes the configuration there and returns its EngineCore.
        log_format: log format there.
        replica: which of several replicas it is (`Boot.replica`).
        kv_secret: what engines that exchange KV have in common (`Boot.kv_secret`).
        import_path: folders that are searched for `entry` there, after those of the interpreter.
    """

    lost = LOST
    pid = None

    def __init__(
        self,
        placement: Placement,
        identity: Identity,
        entry: str,
        *,
        log_format: str = "text",
        supervision: Supervision | None = None,
        import_path: Sequence[str] = (),
        replica: int | None = None,
        kv_secret: bytes | None = None,
    ) -> None:
        self.ready: Ready | None = None
        self._supervision = supervision or Supervision()
        self.supervision: Supervision | None = self._supervision
        self._placement, self._identity = placement, identity
        self._entry, self._log_format, self._import_path = entry, log_format, list(import_path)
        self._replica = replica
        self._kv_secret = kv_secret
        self._session: HostSession | None = None
        self._watch: asyncio.Task[None] | None = None

    async def open(self, config: EngineConfig) -> None:
        begun_s, timeout_s = time.monotonic(), self._supervision.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                place = await self._placement.start()
                self._session = self._begin(place, config)
                self._watch = asyncio.create_task(self._watch_host(self._session), name="engine host's end")
                said = await self._await_ready(self._session)
        except TimeoutError as error:
            self._placement.kill()
            await self.close()
            raise EngineError(f"the engine was not ready after {timeout_s:.0f} s; its log may say why") from error
        except BaseException:
            await self.close()
            raise
        whole_s = time.monotonic() - begun_s
        place_s = whole_s - sum(duration_s for _, duration_s in said.startup)
        self.ready = msgspec.structs.replace(said, startup=[("place and import", place_s), *said.startup])

    def _begin(self, place: Place, config: EngineConfig) -> HostSession:
        config = replace(
            config,
            num_threads=config.num_threads if place.num_threads is None else place.num_threads,
            memory_share=config.memory_share * place.memory_share,
            kv_transfer=None if config.kv_transfer is None else fill_address(config.kv_transfer, place.address),
        )
        session = HostSession(place, self._identity)
        boot = channel.Boot(self._entry, config, self._import_path, self._log_format, self._kv_secret, replica=self._replica)
        session.send(channel.encode(boot))
        return session

    async def _watch_host(self, session: HostSession) -> None:
        """Ends a session at once when its host has ended, wherever that is seen first."""
        session.lose(f"its host has ended: {await self._placement.wait_ended()}")

    async def _await_ready(self, session: HostSession) -> Ready:
        match await _receive(session):
            case Ready() as ready:
                return ready
            case Failed(message, code, fit):
                session.lose(message)
                raise recreate(message, code, fit)
            case _:
                how = session.how or "it sent something else before it described itself"
                session.lose(how)
                if not how.startswith("the process ended"):
                    self._placement.kill()  # it hangs or is out of reach; a host that has ended is not there to be killed
                    raise EngineError(UNREACHABLE.format(how=how))
                raise EngineError(f"the engine died while it started ({how}); its log may say why")

    def send(self, message: FrontMessage) -> None:
        """Sends a message without blocking. Raises LinkError if it is too long."""
        if self._session is not None:
            self._session.send(channel.encode(message))

    async def run(self, deliver: Deliver) -> None:
        """Dispatches the engine's messages until the session is lost."""
        session = self._session
        while session is not None and isinstance(message := await _receive(session), Outputs):
            shifted = [session.clock.shift(event) for event in message.events]
            deliver(Outputs(message.outputs, shifted, message.replies))

    def kill(self) -> None:
        """Has the host kill the engine; one that cannot be reached kills it when it has missed this front for 5 seconds."""
        if self._session is not None:
            self._session.lose("it was killed")

    async def close(self) -> str | None:
        """Ends the session, and with it the engine; a host that still runs stays for the next one."""
        session, self._session = self._session, None
        if self._watch is not None:
            self._watch.cancel()
        if session is None:
            return None
        await session.close()
        if session.how == NOBODY_LISTENS:  # before whatever placed the host has said that it ended
            self._placement.kill()
        return session.how or LOST_LINK

    async def discard_template(self, *, is_final: bool = False) -> None:
        """Ends the host: no engine will follow, or none for now. One whose engine died is kept for the next one."""
        self._placement.kill()


async def _receive(session: HostSession) -> EngineMessage | None:
    """Returns the engine's next message; None if the session was lost, or brought something else."""
    payload = await session.receive()
    try:
        return None if payload is None else channel.decode_engine(payload)
    except msgspec.MsgspecError:
        return None
