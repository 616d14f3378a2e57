"""LoRA adapters of an engine: the registry in the engine, and the client's calls to load and unload them."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

from cloister.engine.calls import EngineCalls
from cloister.types.clock import Clock, WallClock
from cloister.types.errors import (
    CloisterError,
    ConfigError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    ModelError,
    NotFoundError,
)
from cloister.types.events import AdapterReply, FrontMessage, LoadAdapter, UnloadAdapter
from cloister.types.request import AdapterInfo

_LATE: Final = (
    "the adapter was not ready in time; an adapter that is being unloaded goes when the requests that use it have ended"
)
_STILL_LOADING: Final = (
    "the engine is still loading this adapter for an earlier call that gave up, and will then unload it; try again later"
)
CHANGING: Final = "an adapter of this name is being loaded or unloaded by another call; try again when that has ended"
GONE = "the adapter was unloaded; ask for another model"
_UNREADABLE = "the adapter cannot be read ({}); check that its path is right and may be read"


class AdapterHost(Protocol):
    """Holds loaded adapters for the executor."""

    def load(self, name: str, path: str, note_progress: Callable[[], None]) -> AdapterInfo:
        """Reads and loads an adapter; identical weights are loaded only once.

        Args:
            note_progress: called from time to time during the load.

        Raises:
            ModelError: the adapter cannot be used.
            ConfigError: there is no free slot for it.
        """
        ...

    def unload(self, digest: str) -> None:
        """Frees its place."""
        ...


class AdapterRegister:
    """Adapters of one engine.

    Args:
        host: None if the set of adapters is fixed at start.
        loaded: adapters that were loaded at start.

    Attributes:
        leaving: digest -> pending unload calls, for adapters that open requests still use.
        replies: replies ready to be sent; the sender clears the list.
    """

    def __init__(self, host: AdapterHost | None = None, loaded: Sequence[AdapterInfo] = ()) -> None:
        self._host = host
        self._loaded = {adapter.name: adapter for adapter in loaded}
        self.leaving: dict[str, list[str]] = {}
        self.replies: list[AdapterReply] = []

    @property
    def loaded(self) -> list[AdapterInfo]:
        """Adapters that requests can use."""
        return list(self._loaded.values())

    def read(
        self,
        message: LoadAdapter | UnloadAdapter,
        used: Collection[str | None],
        note_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Handles a call of the front between two steps; the reply is added to `replies`, now or later.

        Args:
            used: digests of the adapters of open requests.
            note_progress: called from time to time while an adapter is loaded.
        """
        try:
            if self._host is None:
                raise ConfigError(
                    "this server's adapters are fixed; start it with --runtime-adapters", param="runtime_adapters"
                )
            if isinstance(message, LoadAdapter):
                self.replies.append(AdapterReply(message.call_id, self._load(message, self._host, note_progress)))
            else:
                self._unload(message, used)
        except Exception as error:  # a bad adapter in this call must not end other requests
            shown = error if isinstance(error, CloisterError) else InvalidRequestError(_UNREADABLE.format(type(error).__name__))
            self.replies.append(AdapterReply(message.call_id, error=shown.message, code=shown.code))

    def find_refusal(self, digest: str) -> str | None:
        """Returns why a request cannot use its adapter, or None if it can."""
        return None if self._is_loaded(digest) else GONE

    def free_unused(self, used: Collection[str | None]) -> None:
        """Frees the slots of unloaded adapters that no open request still uses, and replies to those calls.

        Args:
            used: digests of the adapters of open requests.
        """
        for digest in [digest for digest in self.leaving if digest not in used]:
            calls = self.leaving.pop(digest)
            if self._host is not None and not self._is_loaded(digest):
                self._host.unload(digest)
            self.replies += [AdapterReply(call_id) for call_id in calls]

    def _is_loaded(self, digest: str) -> bool:
        return any(adapter.digest == digest for adapter in self._loaded.values())

    def _load(self, message: LoadAdapter, host: AdapterHost, note_progress: Callable[[], None]) -> AdapterInfo:
        if message.name in self._loaded:
            raise InvalidRequestError(
                "there is an adapter of this name already; unload it first, or choose another name", param="lora_name"
            )
        try:
            adapter = host.load(message.name, message.path, note_progress)
        except ModelError as error:  # caused by the request's adapter, not by the server's configuration
            raise InvalidRequestError(error.message, param="lora_path") from None
        self._loaded[adapter.name] = adapter
        return adapter

    def _unload(self, message: UnloadAdapter, used: Collection[str | None]) -> None:
        adapter = self._loaded.pop(message.name, None)
        if adapter is None:
            raise NotFoundError(
                "there is no adapter of this name; GET /v1/models lists those that are loaded", param="lora_name"
            )
        if self._is_loaded(adapter.digest):
            self.replies.append(AdapterReply(message.call_id))  # the same weights are still loaded under another name
            return
        self.leaving.setdefault(adapter.digest, []).append(message.call_id)
        self.free_unused(used)


# The front's side of adapters: those that the engine has loaded, and calls to load and unload. Used from one thread only.


LATE_S: Final = 600.0
"""How long to wait for an adapter that was not loaded in time, to unload it again."""
CALL_TIMEOUT_S: Final = 30.0
"""Timeout for loading or unloading an adapter."""
LOOK_EVERY_S: Final = 0.05
"""How often to check whether requests still use an adapter that is being unloaded."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


class AdapterManager(Protocol):
    """Loaded adapters, and calls to load and unload them."""

    @property
    def loaded(self) -> Mapping[str, AdapterInfo]:
        """Name -> adapter, for all adapters that a request may use."""
        ...

    async def load(self, name: str, path: str) -> AdapterInfo:
        """Loads an adapter's directory. Raises as `AdapterCalls.load`."""
        ...

    async def unload(self, name: str) -> None:
        """Unloads an adapter. Raises as `AdapterCalls.unload`."""
        ...


class AdapterCalls:
    """Adapters of one engine, as known to its front.

    An adapter stays in the engine, and in one that takes its place, until no request uses it: such a request may move or be
    resumed.

    Args:
        send: passes a message to the engine.
        is_used: whether an open request uses the adapter of this digest.
        are_fixed: the engine will refuse to unload any.
        clock: measures how long the engine has not answered.

    Attributes:
        loaded: name -> adapter, for all adapters that a request may use.
        is_used: as above; with several replicas it asks all of them, because requests move.
    """

    def __init__(
        self,
        send: Callable[[FrontMessage], None],
        is_used: Callable[[str], bool],
        *,
        are_fixed: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.loaded: dict[str, AdapterInfo] = {}
        self.is_used = is_used
        self._are_fixed = are_fixed
        self._leaving: dict[str, AdapterInfo] = {}
        self._unloading: set[asyncio.Task[None]] = set()
        self._late: set[str] = set()
        self._loading: set[str] = set()
        self._calls: EngineCalls[AdapterReply] = EngineCalls(send)
        self._clock = clock or WallClock()
        self._heard_s = self._clock.now()
        self._is_overdue = False
        self._has_started = False

    def start(self, loaded: Sequence[AdapterInfo]) -> None:
        """Called when an engine has started with these adapters, or when the front has reached one again that ran on without
        it. The latter unloads what it loaded for a call that has failed since."""
        self._note_answer()
        known = {adapter.name for adapter in loaded}
        if self._has_started:
            known = {*self.loaded, *self._leaving}
            for adapter in loaded:
                if adapter.name not in known and adapter.name not in self._late:
                    self._take_back(adapter.name)
        self.expect([adapter for adapter in loaded if adapter.name in known and adapter.name not in self._leaving])

    def expect(self, loaded: Sequence[AdapterInfo]) -> None:
        """Sets the adapters with which the next engine starts."""
        self._has_started = True
        self.loaded.clear()
        self.loaded.update((adapter.name, adapter) for adapter in loaded)

    @property
    def is_changing(self) -> bool:
        """Whether an adapter is being loaded or unloaded."""
        return bool(self._loading) or bool(self._unloading)

    @property
    def is_loading(self) -> bool:
        """Whether the engine is loading an adapter and therefore makes no step; a load that a cancelled call asked for counts
        too. False once a call has timed out, or the engine has answered none for that long."""
        is_overdue = self._is_overdue or self._clock.now() - self._heard_s >= CALL_TIMEOUT_S
        return bool(self._loading or self._late) and not is_overdue

    def as_setting(self, at_first: str | None) -> str | None:
        """Returns the setting `lora` that gives another engine the same adapters; `at_first` before the first engine has
        started."""
        if not self._has_started:
            return at_first
        kept = {**self.loaded, **self._leaving}
        return ",".join(f"{adapter.name}={adapter.path}" for adapter in kept.values()) or None

    async def load(self, name: str, path: str) -> AdapterInfo:
        """Loads an adapter's directory.

        Raises:
            InvalidRequestError: the name or the adapter cannot be used, or no slot is free; the message says why.
            DeadlineError: the engine did not answer in time; once loaded, the adapter is unloaded again, as after a cancelled
                call.
            EngineError: the engine ended.
        """
        check_adapter(name, path)
        if name in self._loading or name in self._leaving:
            raise InvalidRequestError(CHANGING, param="lora_name")
        if name in self._late:  # otherwise loads would pile up in the engine, and it would make no step
            raise InvalidRequestError(_STILL_LOADING, param="lora_name")
        is_new = name not in self.loaded
        if not self._loading and not self._late:
            self._heard_s = self._clock.now()  # it had nothing to answer before
        self._loading.add(name)
        try:
            reply = await self._call(lambda call_id: LoadAdapter(call_id, name, path))
        except (DeadlineError, asyncio.CancelledError) as error:
            self._is_overdue |= isinstance(error, DeadlineError)
            if is_new:
                self._take_back(name)
            raise
        finally:
            self._loading.discard(name)
        if reply.adapter is None:
            raise EngineError("the engine gave no adapter back; load it again")
        self.loaded[name] = reply.adapter
        return reply.adapter

    def _take_back(self, name: str) -> None:
        """Has the engine unload an adapter that arrives too late, or whose call was cancelled: nobody knows of it, and its name
        could not be loaded again."""
        self._late.add(name)
        task = asyncio.create_task(self._unload_late(name), name="unloading of a late adapter")
        self._unloading.add(task)
        task.add_done_callback(self._end_unload)

    async def _unload_late(self, name: str) -> None:
        try:
            with contextlib.suppress(CloisterError):  # the engine has ended, or did not load it
                await self._calls.call(lambda call_id: UnloadAdapter(call_id, name), LATE_S)
        except TimeoutError:
            self._is_overdue = True
        finally:
            self._late.discard(name)

    async def unload(self, name: str) -> None:
        """Unloads an adapter. New requests cannot use it from now on; returns when the requests that use it have ended.

        Raises:
            NotFoundError: there is no adapter of this name.
            InvalidRequestError: the set of adapters is fixed, or one of this name is being loaded.
            DeadlineError: requests still use it; it is unloaded when they have ended.
            EngineError: the engine ended.
        """
        if name in self._loading:  # both replies would come together, and the later one would count first
            raise InvalidRequestError(CHANGING, param="lora_name")
        if name in self._leaving:
            raise NotFoundError(
                "the adapter of this name is being unloaded already; it goes when its requests have ended", param="lora_name"
            )
        adapter = self.loaded.pop(name, None)
        if adapter is not None:
            self._leaving[name] = adapter
        task = asyncio.create_task(self._unload(name, adapter), name="unloading of an adapter")
        self._unloading.add(task)
        task.add_done_callback(self._end_unload)
        await asyncio.wait({task}, timeout=CALL_TIMEOUT_S)
        if not task.done():
            raise DeadlineError(_LATE)
        await task

    async def _unload(self, name: str, adapter: AdapterInfo | None) -> None:
        while adapter is not None and not self._are_fixed and self._is_needed(adapter.digest):
            await asyncio.sleep(LOOK_EVERY_S)
        try:
            await self._tell_to_unload(name)
        except InvalidRequestError:
            if adapter is not None:
                self.loaded[name] = adapter
            raise
        finally:
            self._leaving.pop(name, None)

    async def _tell_to_unload(self, name: str) -> None:
        """Has the engine unload an adapter; if it ends meanwhile, the one that takes its place, which may have it too."""
        deadline_s = asyncio.get_running_loop().time() + CALL_TIMEOUT_S
        while True:
            try:
                await self._call(lambda call_id: UnloadAdapter(call_id, name))
                return
            except EngineError:
                if asyncio.get_running_loop().time() >= deadline_s:
                    raise
                await asyncio.sleep(LOOK_EVERY_S)

    def _is_needed(self, digest: str) -> bool:
        """Whether requests use an adapter that is not loaded under another name too."""
        return self.is_used(digest) and digest not in {adapter.digest for adapter in self.loaded.values()}

    def _end_unload(self, task: asyncio.Task[None]) -> None:
        self._unloading.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may already have been told that it takes longer

    def deliver(self, reply: AdapterReply) -> None:
        """Dispatches a reply of the engine."""
        self._note_answer()
        self._calls.deliver(reply.call_id, reply)

    def fail_all(self, message: str) -> None:
        """Called when the engine has ended."""
        self._calls.fail_all(message)

    def _note_answer(self) -> None:
        self._is_overdue = False
        self._heard_s = self._clock.now()

    async def _call(self, make: Callable[[str], FrontMessage]) -> AdapterReply:
        try:
            reply = await self._calls.call(make, CALL_TIMEOUT_S)
        except TimeoutError:
            raise DeadlineError(_LATE) from None
        if reply.error is not None:
            raise _as_error(reply.error, reply.code)
        return reply


def check_adapter(name: str, path: str) -> None:
    """Raises InvalidRequestError if a name or a path would be invalid in the setting `lora`."""
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            "an adapter's name begins with a letter or digit, followed by letters, digits, '.', '_', ':', '/' or '-', 128 "
            "characters at most",
            param="lora_name",
        )
    if not path or "," in path or "\0" in path:
        raise InvalidRequestError("an adapter's path is that of a directory, without commas", param="lora_path")


def _as_error(message: str, code: str) -> CloisterError:
    if code == NotFoundError.code:
        return NotFoundError(message, param="lora_name")
    is_wish = code in (InvalidRequestError.code, ConfigError.code)  # ConfigError: no free slot
    return (InvalidRequestError if is_wish else EngineError)(message)
