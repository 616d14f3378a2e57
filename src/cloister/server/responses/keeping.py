"""Stored responses that `previous_response_id` can continue: in memory, for a limited time, for their owner only."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
from pydantic import TypeAdapter

from cloister.server.errors import invalid
from cloister.server.kept_content import charge_kept
from cloister.server.parse import Refused, parse_body
from cloister.server.responses.schemas import REFUSED, Item, Items, ResponsesBody
from cloister.server.schemas import MAX_MESSAGES
from cloister.types.errors import NotFoundError

LIFETIME_S: Final = 3600.0
"""Lifetime of a response after it was created or last continued."""
SLACK_S: Final = 1.0
"""Maximum delay of its removal."""
MOST_BYTES: Final = 64 << 20
"""Memory limit for all owners. A single owner may use all of it, until newer responses of others replace its own."""

MOST_CONTINUED_BYTES: Final = 4 << 20
"""Longest conversation that can be continued: what a request may send by default (`--max-request-kb`)."""
ENTRY_BYTES: Final = 1024
"""Memory of an entry beside its content: names, keys, objects. Many short ones must not take more than a few long ones."""

_KEPT_FIELDS: Final = ("previous_response_id", "store")
_REFUSED_BESIDE: Final[Mapping[str, Refused]] = {name: why for name, why in REFUSED.items() if name not in _KEPT_FIELDS}
_items: Final = TypeAdapter(Items)


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response, and the conversation up to its end. Its repr omits content.

    Attributes:
        items, response: JSON.
    """

    owner: bytes = field(repr=False)
    items: bytes = field(repr=False)
    response: bytes = field(repr=False)
    expires_s: float

    @property
    def num_bytes(self) -> int:
        """Its memory, with that of the entry itself."""
        return len(self.items) + len(self.response) + ENTRY_BYTES


@dataclass(slots=True)
class _Share:
    """Everything that one owner keeps.

    Attributes:
        names: in order of expiry.
    """

    num_bytes: int = 0
    names: OrderedDict[str, None] = field(default_factory=OrderedDict)


class ResponseStore:
    """The responses of all owners. May be used from any thread; no call walks the entries of others.

    Args:
        most_continued_bytes: longest conversation that can be continued, as JSON.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], float] = time.monotonic,
        *,
        most_continued_bytes: int = MOST_CONTINUED_BYTES,
    ) -> None:
        self._most_bytes = most_bytes
        self._clock = clock
        self.most_continued_bytes = most_continued_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()  # in order of expiry
        self._shares: dict[bytes, _Share] = {}
        self._num_bytes = 0
        self._timer: threading.Timer | None = None

    def keep(self, owner: bytes, body: ResponsesBody, response: Mapping[str, Any]) -> None:
        """Stores a response with its conversation. If memory is full, evicts the oldest response of the owner with the most.

        Stores only the parts of the conversation that prompts have. Takes time in proportion to its length: call it outside the
        event loop.
        """
        said = [item.model_dump(by_alias=True, exclude_none=True) for item in body.input]
        items = msgspec.json.encode([*said, *(_without_logprobs(item) for item in response["output"])])
        kept = KeptResponse(owner, items, msgspec.json.encode(response), self._clock() + LIFETIME_S)
        self._add(response["id"], kept)

    def put(self, name: str, owner: bytes, content: bytes) -> bool:
        """Stores another entry of an owner, as `items`, in place of the one with this name; False if it is too long."""
        return self._add(name, KeptResponse(owner, content, b"", self._clock() + LIFETIME_S))

    def _add(self, name: str, kept: KeptResponse) -> bool:
        if kept.num_bytes > self._most_bytes:
            return False
        with self._lock:
            self._drop(name)
            self._kept[name] = kept
            share = self._shares.setdefault(kept.owner, _Share())
            share.names[name] = None
            share.num_bytes += kept.num_bytes
            self._num_bytes += kept.num_bytes
            self._make_room()
            self._watch()
        return True

    def find(self, owner: bytes, response_id: str) -> KeptResponse:
        """Returns a response of an owner, without extending its lifetime.

        Raises:
            NotFoundError: it was never stored, belongs to another owner, or has expired.
        """
        return self._find(owner, response_id, None, renews=False)

    def go_on(self, owner: bytes, response_id: str, param: str) -> KeptResponse:
        """Returns a response of an owner to continue it, and renews its lifetime.

        Args:
            param: the field that names it, for the error, which is as in `find`.
        """
        return self._find(owner, response_id, param, renews=True)

    def _find(self, owner: bytes, response_id: str, param: str | None, *, renews: bool) -> KeptResponse:
        with self._lock:
            kept = self._kept.get(response_id)
            if kept is None or kept.owner != owner or kept.expires_s <= self._clock():
                raise NotFoundError(
                    "There is no such response, or it is no longer kept; send the whole conversation in `input`.",
                    param=param,
                    code="previous_response_not_found" if param is not None else "not_found",
                )
            if renews:
                self._kept[response_id] = replace(kept, expires_s=self._clock() + LIFETIME_S)
                self._kept.move_to_end(response_id)
                self._shares[owner].names.move_to_end(response_id)
            return kept

    def remove(self, owner: bytes, response_id: str) -> None:
        """Deletes a response; errors as in `find`."""
        self.find(owner, response_id)
        with self._lock:
            self._drop(response_id)

    def forget(self, owner: bytes, prefix: str) -> None:
        """Forgets all entries of an owner whose names have this prefix."""
        with self._lock:
            share = self._shares.get(owner, _Share())
            for name in [name for name in share.names if name.startswith(prefix)]:
                self._drop(name)

    def _watch(self) -> None:
        """Removes expired responses even without requests."""
        if self._timer is None and self._kept:
            first = next(iter(self._kept.values()))
            self._timer = threading.Timer(max(0.0, first.expires_s - self._clock()) + SLACK_S, self._sweep)
            self._timer.daemon = True
            self._timer.start()

    def _sweep(self) -> None:
        with self._lock:
            self._timer = None
            self._forget_expired()
            self._watch()

    def _forget_expired(self) -> None:
        now_s = self._clock()
        while self._kept and (first := next(iter(self._kept.items())))[1].expires_s <= now_s:
            self._drop(first[0])

    def _make_room(self) -> None:
        self._forget_expired()
        while self._num_bytes > self._most_bytes:
            greediest = max(self._shares.values(), key=lambda share: share.num_bytes)
            self._drop(next(iter(greediest.names)))

    def _drop(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        if kept is None:
            return
        share = self._shares[kept.owner]
        del share.names[name]
        share.num_bytes -= kept.num_bytes
        self._num_bytes -= kept.num_bytes
        if not share.names:
            del self._shares[kept.owner]


def _without_logprobs(item: Mapping[str, Any]) -> Mapping[str, Any]:
    if not item.get("content"):
        return item
    return {**item, "content": [{name: part[name] for name in part if name != "logprobs"} for part in item["content"]]}


def read_body(raw: bytes, store: ResponseStore | None, owner: bytes | None) -> ResponsesBody:
    """Reads a body of /v1/responses, with the conversation that it continues.

    Returns:
        The body with the whole conversation as `input`, and with `store` settled.

    Raises:
        InvalidRequestError: it is invalid, or requests data that is not stored here.
        NotFoundError: there is no such previous response.
    """
    if store is None or owner is None:
        return parse_body(raw, ResponsesBody, REFUSED)
    body = parse_body(raw, ResponsesBody, _REFUSED_BESIDE)
    items: list[Item] = list(body.input)
    if body.previous_response_id is not None:
        kept = store.go_on(owner, body.previous_response_id, "previous_response_id")
        if len(kept.items) > store.most_continued_bytes:
            limit = store.most_continued_bytes // 1024
            raise invalid(f"The conversation is longer than {limit} KiB; begin a new one.", "previous_response_id", "too_long")
        charge_kept(len(kept.items))
        items = [*_items.validate_json(kept.items), *items]
        if len(items) > MAX_MESSAGES:
            raise invalid(f"The conversation has more than {MAX_MESSAGES} items; begin a new one.", "previous_response_id")
    return body.model_copy(update={"input": items, "store": body.store is not False})
