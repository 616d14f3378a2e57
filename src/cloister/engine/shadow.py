"""A running request that a second engine computes beside its own, until the front switches to that engine. Pure.

The front holds back the second engine's output. Both compute the same tokens, so the front can switch as soon as the second
engine has produced as much as the first, and the client sees no gap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from enum import Enum, auto

from cloister.types.events import Arrived, Ended, Event, Progressed
from cloister.types.request import FinishReason, SequenceOutput

_GOOD_ENDS = (FinishReason.LENGTH, FinishReason.STOP)


class ShadowState(Enum):
    """How a shadow compares with its request; with several sequences, the first of these that holds for any of them."""

    WRONG = auto()
    """Its output differs, or it ended early: it is not a copy."""
    BEHIND = auto()
    """The request's own engine is ahead, or the other one has produced nothing yet."""
    LEVEL = auto()
    """Both are level: the front can switch."""
    AHEAD = auto()
    """It is ahead: the front can switch, and the client gets its next token at once."""


class Shadow:
    """A second engine's output for a request.

    Args:
        token_ids: output of each sequence with which that engine began.
        is_open: indexes of the sequences that had not ended.

    Attributes:
        seq_ids: that engine's, by index.
        is_over: the engine has ended it.
    """

    __slots__ = (
        "_bounds",
        "_end_starts",
        "_has_failed",
        "_news",
        "_open",
        "_progress",
        "_starts",
        "_token_ids",
        "is_over",
        "seq_ids",
    )

    def __init__(self, token_ids: Sequence[Sequence[int]], is_open: Collection[int]) -> None:
        self._token_ids = [list(ids) for ids in token_ids]
        self._starts = [len(ids) for ids in token_ids]
        self._progress = [len(ids) for ids in token_ids]
        self._bounds = [{start} for start in self._starts]
        self._open = sorted(is_open)
        self._end_starts: dict[int, int] = {}
        self._news: list[tuple[int, Event | SequenceOutput]] = []
        self._has_failed = False
        self.seq_ids: dict[int, int] = {}
        self.is_over = False

    def note(self, event: Event) -> None:
        """Records an event of the second engine."""
        start = 0
        match event:
            case Arrived():
                return
            case Progressed(index=index):
                self.seq_ids[index] = event.seq_id
                start = self._progress[index]
                self._progress[index] += event.num_tokens
            case Ended():
                self.is_over |= event.last
                self._has_failed |= event.reason not in _GOOD_ENDS
            case _:
                pass
        self._news.append((start, event))

    def take(self, output: SequenceOutput) -> None:
        """Records an output of the second engine."""
        said = self._token_ids[output.index]
        self._news.append((len(said), output))
        if output.finish_reason is not None:
            self._end_starts[output.index] = len(said)
        said += output.token_ids
        self._bounds[output.index].add(len(said))

    @property
    def has_begun(self) -> bool:
        """Whether it has a token, or an end, of each sequence."""
        return all(i in self._end_starts or len(self._token_ids[i]) > self._starts[i] for i in self._open)

    def count_missing(self, token_ids: Sequence[Sequence[int]]) -> int:
        """Returns by how many tokens it lags behind its request, at most."""
        return max((len(token_ids[i]) - len(self._token_ids[i]) for i in self._open), default=0)

    def compare(self, token_ids: Sequence[Sequence[int]], is_open: Collection[int]) -> ShadowState:
        """Compares it with its request.

        Args:
            token_ids: output of each sequence that the front has passed on.
            is_open: indexes of the sequences that have not ended.
        """
        if self._has_failed:
            return ShadowState.WRONG
        states = {ShadowState.AHEAD if self.has_begun else ShadowState.BEHIND}
        for index in self._open:
            said, own = self._token_ids[index], token_ids[index]
            common = slice(self._starts[index], min(len(said), len(own)))
            if said[common] != own[common]:
                return ShadowState.WRONG
            states.add(self._compare_ends(index, len(said), len(own), is_open=index in is_open))
        return next(state for state in ShadowState if state in states)

    def _compare_ends(self, index: int, num_said: int, num_own: int, *, is_open: bool) -> ShadowState:
        end_start = self._end_starts.get(index)
        if not is_open:
            if end_start is None:
                return ShadowState.BEHIND
            return ShadowState.AHEAD if num_said == num_own else ShadowState.WRONG
        if end_start is not None and end_start < num_own:
            return ShadowState.WRONG
        if num_own not in self._bounds[index]:  # in the middle of one step's output, which can only be passed on as a whole
            return ShadowState.BEHIND
        return ShadowState.AHEAD if end_start is not None or num_said > num_own else ShadowState.LEVEL

    def news(self, token_ids: Sequence[Sequence[int]], is_open: Collection[int]) -> Iterator[Event | SequenceOutput]:
        """Yields what the request's own engine has not produced, in order of arrival. Arguments as of `compare`."""
        for start, item in self._news:
            match item:
                case Ended(index=index):
                    is_news = index in is_open
                case SequenceOutput(index=index) | Progressed(index=index):
                    is_news = index in is_open and start >= len(token_ids[index])
                case _:
                    is_news = True
            if is_news:
                yield item
