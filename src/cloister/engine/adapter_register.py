"""The engine's side of adapters: which ones it has by name, which requests use them, and which are on their way out.

An adapter is known to requests, plans and prefix keys by its digest: a name may stand for other weights tomorrow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from cloister.types.errors import CloisterError, ConfigError, InvalidRequestError, ModelError, NotFoundError
from cloister.types.events import AdapterReply, LoadAdapter, UnloadAdapter
from cloister.types.request import AdapterInfo, Request

GONE = "the adapter was unloaded; ask for another model"
_UNREADABLE = "the adapter cannot be read ({}); check that its path is right and may be read"


class AdapterHost(Protocol):
    """Where adapters are put, so that sequences can be computed with them."""

    def load(self, name: str, path: str) -> AdapterInfo:
        """Reads an adapter and makes it ready; one with the same weights is not loaded twice.

        Raises:
            ModelError: it cannot be used.
            ConfigError: there is no room for it.
        """
        ...

    def unload(self, digest: str) -> None:
        """Frees its place."""
        ...


class AdapterRegister:
    """Adapters of one engine.

    Args:
        host: None where they stay as they were at start.
        loaded: those that were loaded at start.

    Attributes:
        replies: answers that are ready; whoever sends them clears the list.
    """

    def __init__(self, host: AdapterHost | None = None, loaded: Sequence[AdapterInfo] = ()) -> None:
        self._host = host
        self._loaded = {adapter.name: adapter for adapter in loaded}
        self._used: Counter[str] = Counter()
        self._digest_of: dict[str, str] = {}
        self._leaving: dict[str, list[str]] = {}
        self.replies: list[AdapterReply] = []

    @property
    def loaded(self) -> list[AdapterInfo]:
        """Those that requests can ask for."""
        return list(self._loaded.values())

    def read(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Does what the front asks for, between two steps; `replies` has the answer, at once or later."""
        try:
            if self._host is None:
                raise ConfigError(
                    "this server's adapters are fixed; start it with --runtime-adapters", param="runtime_adapters"
                )
            if isinstance(message, LoadAdapter):
                self.replies.append(AdapterReply(message.call_id, self._load(message, self._host)))
            else:
                self._unload(message)
        except Exception as error:  # nobody else's request shall end for what this one names
            told = error if isinstance(error, CloisterError) else InvalidRequestError(_UNREADABLE.format(type(error).__name__))
            self.replies.append(AdapterReply(message.call_id, error=told.message, code=told.code))

    def enter(self, request: Request) -> str | None:
        """Counts a request as its adapter's; returns why it cannot have it, if so."""
        digest = request.adapter
        if digest is None:
            return None
        if all(adapter.digest != digest for adapter in self._loaded.values()):
            return GONE
        self._digest_of[request.request_id] = digest
        self._used[digest] += 1
        return None

    def leave(self, request_id: str) -> None:
        """A request has ended."""
        digest = self._digest_of.pop(request_id, None)
        if digest is not None:
            self._used[digest] -= 1
            self._free_unused(digest)

    def _load(self, message: LoadAdapter, host: AdapterHost) -> AdapterInfo:
        if message.name in self._loaded:
            raise InvalidRequestError(
                "there is an adapter of this name already; unload it first, or choose another name", param="lora_name"
            )
        try:
            adapter = host.load(message.name, message.path)
        except ModelError as error:  # of what the request names, not of what the server runs
            raise InvalidRequestError(error.message, param="lora_path") from None
        self._loaded[adapter.name] = adapter
        return adapter

    def _unload(self, message: UnloadAdapter) -> None:
        adapter = self._loaded.pop(message.name, None)
        if adapter is None:
            raise NotFoundError(
                "there is no adapter of this name; GET /v1/models lists those that are loaded", param="lora_name"
            )
        if any(other.digest == adapter.digest for other in self._loaded.values()):
            self.replies.append(AdapterReply(message.call_id))  # the same weights stay under another name
            return
        self._leaving.setdefault(adapter.digest, []).append(message.call_id)
        self._free_unused(adapter.digest)

    def _free_unused(self, digest: str) -> None:
        """Frees the place of an adapter that is on its way out and that no request uses any more."""
        if digest not in self._leaving or self._used[digest] > 0:
            return
        del self._used[digest]
        calls = self._leaving.pop(digest)
        is_back = any(adapter.digest == digest for adapter in self._loaded.values())
        if self._host is not None and not is_back:
            self._host.unload(digest)
        self.replies += [AdapterReply(call_id) for call_id in calls]
