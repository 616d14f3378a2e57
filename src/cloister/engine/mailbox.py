"""How outputs reach the tasks of the front that read them: a mailbox for each request, and the order of wakeups."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable
from typing import Final
from weakref import WeakKeyDictionary

import msgspec

from cloister.types.request import SequenceOutput, TokenLogprobs

BATCH: Final = 32
"""Outputs that a reader of whole answers gets at once. They occupy the event loop for half a millisecond."""
WAKEUPS_A_TURN: Final = 4
"""Streams that get a token in one turn of the event loop; the next turn looks for new requests and messages first."""


class Wakeups:
    """Wakes the readers of outputs on an event loop: readers of a first output at once, the others a few per turn.

    A step has tokens for every stream, and each task takes some 50 us to write its text. Woken together they would hold the
    loop for milliseconds, during which no new request is read and no first token of another engine is passed on.
    """

    __slots__ = ("_is_due", "_waiters")

    def __init__(self) -> None:  # it must not refer to its loop, whose end ends it (`_wakeups`)
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    def add(self, waiter: asyncio.Future[None], *, is_first: bool) -> None:
        """Wakes a task, after those that were added before unless it `is_first`."""
        if is_first:
            waiter.set_result(None)
            return
        self._waiters.append(waiter)
        if not self._is_due:
            self._is_due = True
            waiter.get_loop().call_soon(self._wake)

    def _wake(self) -> None:
        for _ in range(min(WAKEUPS_A_TURN, len(self._waiters))):
            waiter = self._waiters.popleft()
            if not waiter.done():  # its task was cancelled meanwhile
                waiter.set_result(None)
        self._is_due = bool(self._waiters)
        if self._is_due:
            self._waiters[0].get_loop().call_soon(self._wake)


class Mailbox:
    """Queue of outputs from event loop callbacks to the one task that reads them; cheaper than asyncio.Queue.

    Outputs of a sequence that its task has not read yet become one, so that a front that is slower than its engines writes
    fewer and longer pieces, and does not fall behind. Where many wait they are packed, so that a client may pause for as long
    as one that reads nothing is waited for.

    Args:
        batch: outputs for which the task is woken; the end of a sequence wakes it too.
        hold: called with the change of the bytes that outputs in the queue take.
    """

    __slots__ = (
        "_batch",
        "_hold",
        "_items",
        "_loop",
        "_num_bytes",
        "_num_held",
        "_num_kept",
        "_request_id",
        "_waiter",
        "_wakeups",
    )

    def __init__(self, wakeups: Wakeups, batch: int = 1, hold: Callable[[int], None] | None = None) -> None:
        self._batch = batch
        self._items: deque[SequenceOutput | bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._wakeups = wakeups
        self._loop = asyncio.get_running_loop()
        self._num_kept = 0
        self._hold = hold
        self._num_bytes: deque[int] = deque()  # of each output in the queue
        self._num_held = 0  # bytes of all of them
        self._request_id = ""

    def put(self, output: SequenceOutput) -> None:
        content = pack(output) if self._num_held >= PACKED_FROM_BYTES else None
        if content is not None:
            self._request_id = output.request_id  # a mailbox is of one request
            num_bytes = _PACKED_BYTES + len(content)
        else:
            num_bytes = measure(output) if self._hold is not None and self._items else 0  # what is taken at once takes none
        if num_bytes and self._hold is not None:
            self._num_held += num_bytes
            self._hold(num_bytes)
        # not with the first output, which is to come soon
        if content is None and self._batch == 1 and self._items and self._num_kept > 1:
            last = self._items[-1]
            if not isinstance(last, bytes) and (joined := last.join(output)) is not None:
                self._items[-1] = joined
                self._num_bytes[-1] += num_bytes
                return  # its task has been woken, and has not come to read yet
        self._items.append(output if content is None else content)
        self._num_bytes.append(num_bytes)
        self._num_kept += 1
        if len(self._items) < self._batch and output.finish_reason is None:
            return
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            self._wakeups.add(waiter, is_first=self._num_kept == 1)

    async def get(self) -> SequenceOutput:
        while not self._items:
            self._waiter = self._loop.create_future()
            await self._waiter
        if (num_bytes := self._num_bytes.popleft()) and self._hold is not None:
            self._num_held -= num_bytes
            self._hold(-num_bytes)
        found = self._items.popleft()
        return found if not isinstance(found, bytes) else self._join_packed(unpack(found, self._request_id))

    def _join_packed(self, output: SequenceOutput) -> SequenceOutput:
        """Returns an output with those behind it that are packed, as far as they may become one."""
        while self._items and isinstance(content := self._items[0], bytes) and output.logprobs is None:
            joined = output.join(unpack(content, self._request_id))
            if joined is None:
                break
            num_bytes = self._num_bytes.popleft()
            self._num_held -= num_bytes
            if self._hold is not None:
                self._hold(-num_bytes)
            self._items.popleft()
            output = joined
        return output

    def release(self) -> None:
        """Stops counting the outputs in the queue: nobody reads them."""
        if self._hold is not None and (num_bytes := sum(self._num_bytes)):
            self._hold(-num_bytes)
        self._items.clear()
        self._num_bytes.clear()
        self._num_held = 0


PACKED_FROM_BYTES: Final = 64 * 2**10
"""Outputs that come while so much waits are packed: for a short queue that is not worth its time."""
_PACKED_BYTES: Final = 80
"""Of a packed output, beside its content: an object, and two entries of the queue."""


class _PackedLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`TokenLogprobs` with numbers of the most likely tokens side by side."""

    token_id: int
    logprob: float
    top_ids: bytes
    top_logprobs: bytes
    text: bytes
    top_texts: tuple[bytes, ...]


class _PackedOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an output in the middle of a sequence has."""

    index: int
    text: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    logprobs: list[_PackedLogprobs] | None


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_PackedOutput)


def pack(output: SequenceOutput) -> bytes | None:
    """Returns an output in a tenth of the bytes that its objects take; None if it has more than tokens and their
    log-probabilities, as the first and the last one of a sequence may."""
    if output.finish_reason is not None or output.prompt_logprobs is not None or output.embedding is not None:
        return None
    return _ENCODER.encode(
        _PackedOutput(  # without the request, which is the same for all that wait
            output.index,
            output.text,
            output.token_ids,
            output.num_prompt_tokens,
            output.num_output_tokens,
            output.num_cached_tokens,
            None if output.logprobs is None else [_pack_logprobs(found) for found in output.logprobs],
        )
    )


def unpack(content: bytes, request_id: str) -> SequenceOutput:
    """Returns the output of a request that was packed."""
    found = _DECODER.decode(content)
    return SequenceOutput(
        request_id=request_id,
        index=found.index,
        text=found.text,
        token_ids=found.token_ids,
        num_prompt_tokens=found.num_prompt_tokens,
        num_output_tokens=found.num_output_tokens,
        num_cached_tokens=found.num_cached_tokens,
        logprobs=None if found.logprobs is None else [_unpack_logprobs(one) for one in found.logprobs],
    )


def _pack_logprobs(found: TokenLogprobs) -> _PackedLogprobs:
    logprobs = [logprob for _, logprob in found.top]
    numbers = array("f", logprobs)
    if numbers.tolist() != logprobs:  # other than engines make, which compute them in float32
        numbers = array("d", logprobs)
    ids = array("i", [token_id for token_id, _ in found.top])
    return _PackedLogprobs(found.token_id, found.logprob, ids.tobytes(), numbers.tobytes(), found.text, found.top_texts)


def _unpack_logprobs(found: _PackedLogprobs) -> TokenLogprobs:
    ids = array("i", found.top_ids)
    numbers = array("f" if len(found.top_logprobs) == len(found.top_ids) else "d", found.top_logprobs)
    top = tuple(zip(ids, numbers, strict=True))
    return TokenLogprobs(found.token_id, found.logprob, top, found.text, found.top_texts)


_OUTPUT_BYTES: Final = 340
_TOKEN_BYTES: Final = 40
_LOGPROBS_BYTES: Final = 240
_TOP_BYTES: Final = 170


def measure(output: SequenceOutput) -> int:
    """Returns about how many bytes an output takes in memory (Python 3.11: objects, lists, numbers and texts)."""
    num_bytes = _OUTPUT_BYTES + len(output.text) + _TOKEN_BYTES * len(output.token_ids)
    if output.logprobs is not None:
        num_bytes += sum(map(_measure_logprobs, output.logprobs))
    if output.prompt_logprobs is not None:
        num_bytes += sum(_measure_logprobs(found) for found in output.prompt_logprobs if found is not None)
    return num_bytes if output.embedding is None else num_bytes + len(output.embedding.data)


def _measure_logprobs(found: TokenLogprobs) -> int:
    return _LOGPROBS_BYTES + _TOP_BYTES * len(found.top)


_wakeups: WeakKeyDictionary[asyncio.AbstractEventLoop, Wakeups] = WeakKeyDictionary()


def wakeups_of(loop: asyncio.AbstractEventLoop) -> Wakeups:
    """Returns those of a loop: all clients of its engines share them."""
    return _wakeups.get(loop) or _wakeups.setdefault(loop, Wakeups())
