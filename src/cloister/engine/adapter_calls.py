"""The front's side of adapters: which ones the engine has, and calls to load and unload them. Used from one thread only."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Final

from cloister.types import errors
from cloister.types.errors import CloisterError, DeadlineError, EngineError, InvalidRequestError
from cloister.types.events import AdapterReply, FrontMessage, LoadAdapter, UnloadAdapter
from cloister.types.request import AdapterInfo

CALL_TIMEOUT_S: Final = 30.0
"""How long an adapter may take to come or to go."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


class AdapterCalls:
    """Adapters of one engine, as its front knows them.

    Args:
        send: passes a message to the engine.

    Attributes:
        loaded: name -> adapter, of those that a request may ask for.
    """

    def __init__(self, send: Callable[[FrontMessage], None]) -> None:
        self.loaded: dict[str, AdapterInfo] = {}
        self._send = send
        self._num_loading = 0
        self._is_overdue = False
        self._has_started = False
        self._calls: dict[str, asyncio.Future[AdapterReply]] = {}

    def start(self, loaded: Sequence[AdapterInfo]) -> None:
        """An engine is there, with these adapters."""
        self._has_started = True
        self._is_overdue = False
        self.loaded.clear()
        self.loaded.update((adapter.name, adapter) for adapter in loaded)

    @property
    def is_loading(self) -> bool:
        """Whether the engine reads an adapter and so makes no step; one that has let a call time out has no such excuse."""
        return self._num_loading > 0 and not self._is_overdue

    def as_setting(self, at_first: str | None) -> str | None:
        """Returns the setting `lora` with which another engine has the same adapters; `at_first` before there was one."""
        if not self._has_started:
            return at_first
        return ",".join(f"{adapter.name}={adapter.path}" for adapter in self.loaded.values()) or None

    async def load(self, name: str, path: str, timeout_s: float = CALL_TIMEOUT_S) -> AdapterInfo:
        """Loads an adapter's directory.

        Raises:
            InvalidRequestError: the name or the adapter cannot be used, or there is no room; the message says why.
            DeadlineError: the engine did not answer in time; it may still load it.
            EngineError: the engine went away.
        """
        check_adapter(name, path)
        self._num_loading += 1
        try:
            reply = await self._call(lambda call_id: LoadAdapter(call_id, name, path), timeout_s)
        except DeadlineError:
            self._is_overdue = True
            raise
        finally:
            self._num_loading -= 1
        if reply.adapter is None:
            raise EngineError("the engine gave no adapter back; load it again")
        self.loaded[name] = reply.adapter
        return reply.adapter

    async def unload(self, name: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Unloads an adapter: from now on no request can ask for it; returns when those that use it have ended.

        Raises:
            NotFoundError: there is none of that name.
            InvalidRequestError: adapters stay as they are here.
            DeadlineError: requests still use it; it goes when they have ended.
            EngineError: the engine went away.
        """
        adapter = self.loaded.pop(name, None)
        try:
            await self._call(lambda call_id: UnloadAdapter(call_id, name), timeout_s)
        except InvalidRequestError:
            if adapter is not None:
                self.loaded[name] = adapter
            raise

    def deliver(self, replies: Sequence[AdapterReply]) -> None:
        """Passes on what the engine answered."""
        for reply in replies:
            self._is_overdue = False
            call = self._calls.pop(reply.call_id, None)
            if call is not None and not call.done():
                call.set_result(reply)

    def fail_all(self, message: str) -> None:
        """The engine is gone."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(EngineError(message))

    async def _call(self, make: Callable[[str], FrontMessage], timeout_s: float) -> AdapterReply:
        call_id = secrets.token_hex(8)
        call = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(make(call_id))
            reply: AdapterReply = await asyncio.wait_for(call, timeout_s)
        except TimeoutError:
            raise DeadlineError(
                "the adapter was not ready in time: an unloaded one goes when the requests that use it have ended"
            ) from None
        finally:
            self._calls.pop(call_id, None)
        if reply.error is not None:
            raise _as_error(reply.error, reply.code)
        return reply


def check_adapter(name: str, path: str) -> None:
    """Raises InvalidRequestError where a name or a path could not stand in the setting `lora`."""
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            "an adapter's name begins with a letter or digit and goes on with letters, digits, '.', '_', ':', '/' or '-', 128 "
            "characters at most",
            param="lora_name",
        )
    if not path or "," in path or "\0" in path:
        raise InvalidRequestError("an adapter's path is that of a directory, without commas", param="lora_path")


def _as_error(message: str, code: str) -> CloisterError:
    if code == errors.NotFoundError.code:
        return errors.NotFoundError(message, param="lora_name")
    is_wish = code in (InvalidRequestError.code, errors.ConfigError.code)  # there is no room for what was asked
    return (InvalidRequestError if is_wish else EngineError)(message)
