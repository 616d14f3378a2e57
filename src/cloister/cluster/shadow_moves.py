"""Live migration: the target computes a request beside its source until it can take over (decisions/0028)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from cloister.engine.client import EngineClient
from cloister.engine.shadow import Shadow, ShadowState

SHADOW_PATIENCE: Final = 3
"""Steps that a target which is behind gets to catch up."""
LEAD_PATIENCE: Final = 32
"""Steps that a target which is level with the source gets to get ahead; at equal speed that is chance, most likely while the
source computes a prompt. The client waits for nothing meanwhile; if the source stops before, it waits for the target."""
SHADOW_TIMEOUT_S: Final = 5.0
"""Longest wait for a target to catch up. A target that is level by then takes over."""


class ShadowEnd(Enum):
    """The outcome of a shadow."""

    TOOK_OVER = auto()
    LATE = auto()
    """It stayed a few tokens behind the source."""
    FAR = auto()
    """It was more than a block behind."""
    FAILED = auto()


@dataclass(slots=True)
class _Move:
    """One move.

    Attributes:
        num_late: messages of the target after which it was behind, since its first token.
        num_level: messages of the target after which it was level with the source.
        on_end: called once, when the shadow ends.
    """

    request_id: str
    source: int
    target: int
    shadow: Shadow
    on_end: Callable[[ShadowEnd], None]
    num_late: int = 0
    num_level: int = 0


class ShadowMoves:
    """Moves in progress of a replica set.

    Args:
        block_size: tokens of a KV block.
        is_accepting: whether the replica of an index accepts requests.
        on_move: called with (request id, source, target) when a request goes over.
    """

    def __init__(
        self,
        replicas: Sequence[EngineClient],
        block_size: int,
        is_accepting: Callable[[int], bool],
        on_move: Callable[[str, int, int], None],
    ) -> None:
        self._replicas, self._block_size = replicas, block_size
        self._is_accepting, self._on_move = is_accepting, on_move
        self._moves: dict[str, _Move] = {}

    def __len__(self) -> int:
        return len(self._moves)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._moves

    async def run(self, request_id: str, source: int, target: int) -> ShadowEnd:
        """Has the target compute a request beside the source, and go on with it if it catches up in time."""
        ended: asyncio.Future[ShadowEnd] = asyncio.get_running_loop().create_future()
        if not self.begin(request_id, source, target, ended.set_result):
            return ShadowEnd.FAILED
        try:
            async with asyncio.timeout(SHADOW_TIMEOUT_S):
                return await asyncio.shield(ended)
        except TimeoutError:
            self._go_over_if_level(request_id)
            return ended.result() if ended.done() else ShadowEnd.FAILED
        finally:
            if not ended.done():
                self.stop(request_id)

    def begin(self, request_id: str, source: int, target: int, on_end: Callable[[ShadowEnd], None]) -> bool:
        """Has the target compute a request beside the source, from where that is now.

        Returns False if it cannot, or would go on with other weights: it may have got some while the move waited for a step.
        """
        found = self._replicas[source].find(request_id)
        if found is None or request_id in self._moves or not self._is_accepting(target):
            return False
        if self._replicas[source].fingerprint != self._replicas[target].fingerprint:
            return False
        shadow = self._replicas[target].add_shadow(found)
        if shadow is None:
            return False
        self._moves[request_id] = _Move(request_id, source, target, shadow, on_end)
        return True

    def advance(self, index: int) -> None:
        """Advances the moves of a replica after one of its messages."""
        for move in list(self._moves.values()):
            if index in (move.source, move.target):
                self._advance(move, is_target=index == move.target)

    def stop(self, request_id: str) -> None:
        """Ends the shadow of a request, if there is one; the request stays where it is."""
        if (move := self._moves.get(request_id)) is not None:
            self._end(move, ShadowEnd.FAILED)

    def lose(self, target: int) -> None:
        """Ends the shadows at a replica whose engine has ended."""
        for move in [move for move in self._moves.values() if move.target == target]:
            self._end(move, ShadowEnd.FAILED)

    def _advance(self, move: _Move, *, is_target: bool) -> None:
        """Switches to the target once it is ahead of the source; ends its shadow if it does not catch up.

        While both are level the source continues: its next token may be on its way, or be the first one.
        """
        found = self._replicas[move.source].find(move.request_id)
        if found is None:
            self._end(move, ShadowEnd.FAILED)
            return
        match move.shadow.compare(found.token_ids, found.open):
            case ShadowState.AHEAD:
                self._go_over(move)
            case ShadowState.LEVEL:
                move.num_level += is_target
                if move.num_level > LEAD_PATIENCE:
                    self._go_over(move)
            case ShadowState.WRONG:
                self._end(move, ShadowEnd.FAILED)
            case ShadowState.BEHIND:
                move.num_late += is_target and move.shadow.has_begun
                if move.num_late > SHADOW_PATIENCE:
                    is_near = move.shadow.count_missing(found.token_ids) <= self._block_size
                    self._end(move, ShadowEnd.LATE if is_near else ShadowEnd.FAR)

    def _go_over_if_level(self, request_id: str) -> None:
        """Switches a request to its target if that is level with the source."""
        move = self._moves.get(request_id)
        found = None if move is None else self._replicas[move.source].find(request_id)
        if move is not None and found is not None and move.shadow.compare(found.token_ids, found.open) is ShadowState.LEVEL:
            self._go_over(move)

    def _go_over(self, move: _Move) -> None:
        """Switches a request to its target."""
        source = self._replicas[move.source]
        if not self._is_accepting(move.target) or source.detach_request(move.request_id, keeps_kv=False) is None:
            self._end(move, ShadowEnd.FAILED)
            return
        del self._moves[move.request_id]
        self._on_move(move.request_id, move.source, move.target)
        self._replicas[move.target].take_over(move.request_id)
        move.on_end(ShadowEnd.TOOK_OVER)

    def _end(self, move: _Move, end: ShadowEnd) -> None:
        if self._moves.pop(move.request_id, None) is not None:
            self._replicas[move.target].drop_shadow(move.request_id)
            move.on_end(end)
