"""Lookahead decoding (Fu et al. 2024): the model predicts many positions at once, and its n-grams are verified later.

A window of guesses runs ahead of the text, with columns by position and levels by age: level 0 is a chain after the last known
token, and newer guesses of a column are children of older ones. In every step the model adds a level to each column (a Jacobi
iteration), and full columns add n-grams to a pool. The n-grams that begin with the last known token are verified. Window and
n-grams are nodes of one token tree; the pool also holds n-grams of the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from cloister.executor.arrays import overwrite
from cloister.executor.drafters.base import DRAFTERS, Draft, Drafter, DrafterContext, DraftRequest, IntArray, VerifyFeedback
from cloister.executor.drafters.token_trees import Trie, fill_shape
from cloister.executor.state import SequenceState
from cloister.types.threat import Requirement, ThreatProfile

THREAT = ThreatProfile(
    row="context- or datastore-based speculation (REST, Token Recycling, LLMA)",
    threats=frozenset({Requirement.STATELESS}),
    residue="n-grams of the request and guesses of the model, until it departs",
    where=("memory of the engine process",),
    attack="another request's draft, or a memory dump, reveals the text",
    mitigations=("a window and a pool for each sequence, of its own tokens alone", "overwritten when the sequence departs"),
)
MAX_DRAFTS: Final = 32
NUM_FOLLOWING: Final = 4
"""Tokens of an n-gram after its first one."""
NUM_KEPT: Final = 4
"""Number of n-grams kept for each first token."""
NUM_SLOTS: Final = 2048
_STRIDE: Final = NUM_KEPT * NUM_FOLLOWING
NUM_BYTES: Final = NUM_SLOTS * (_STRIDE + 2) * 4
NUM_LEVELS: Final = NUM_FOLLOWING
"""Guesses in a column; with the one that the model adds they form an n-gram."""
MAX_COLUMNS: Final = 7
NUM_READ: Final = 2048
"""Tokens of a text whose n-grams are read, from its end."""
DECAY: Final = (0.5, 0.7)
"""Assumed probability of each older n-gram relative to the next newer one, and of each token given the previous one."""


class NgramPool:
    """The n-grams of one sequence by first token, latest first, in constant memory (section 3.2).

    The lower bits of the first token select the slot; a newer token replaces an older one.
    """

    __slots__ = ("_counts", "_following", "_owners")

    def __init__(self) -> None:
        self._owners = array("i", bytes(4 * NUM_SLOTS))
        self._counts = array("i", bytes(4 * NUM_SLOTS))
        self._following = array("i", bytes(4 * NUM_SLOTS * _STRIDE))

    def put(self, first: int, following: Sequence[int]) -> None:
        """Adds an n-gram: a token, and the `NUM_FOLLOWING` after it. An existing one becomes the latest."""
        slot = first % NUM_SLOTS
        if self._owners[slot] != first:
            self._owners[slot], self._counts[slot] = first, 0
        start, count = slot * _STRIDE, self._counts[slot]
        kept = self._following[start : start + count * NUM_FOLLOWING]
        newest = array("i", following)
        for place in range(0, len(kept), NUM_FOLLOWING):
            if kept[place : place + NUM_FOLLOWING] == newest:
                del kept[place : place + NUM_FOLLOWING]
                break
        merged = (newest + kept)[:_STRIDE]
        self._following[start : start + len(merged)] = merged
        self._counts[slot] = len(merged) // NUM_FOLLOWING

    def find(self, first: int) -> list[list[int]]:
        """Returns the tokens that followed a token, [up to NUM_KEPT][NUM_FOLLOWING], latest first."""
        slot = first % NUM_SLOTS
        if self._owners[slot] != first:
            return []
        start = slot * _STRIDE
        ends = range(start, start + self._counts[slot] * NUM_FOLLOWING, NUM_FOLLOWING)
        return [self._following[end : end + NUM_FOLLOWING].tolist() for end in ends]

    def copy(self) -> NgramPool:
        """Returns an independent copy."""
        twin = NgramPool()
        twin._owners, twin._counts, twin._following = self._owners[:], self._counts[:], self._following[:]
        return twin

    def wipe(self) -> None:
        """Overwrites the content."""
        for values in (self._owners, self._counts, self._following):
            overwrite(values)


class _Window:
    """The guesses and pool of one sequence, and its last draft.

    Attributes:
        columns: one array each of 1 to NUM_LEVELS guesses, oldest first.
        places: for each column the index of its newest guess in the last draft.
        draft: the last draft.
        num_read: number of tokens whose n-grams are in the pool.
    """

    __slots__ = ("columns", "draft", "num_read", "places", "pool")

    def __init__(self, pool: NgramPool, num_read: int = 0) -> None:
        self.pool = pool
        self.num_read = num_read
        self.columns: list[array[int]] = []
        self.places: list[int] = []
        self.draft: Draft | None = None

    def read(self, tokens: array[int]) -> None:
        """Adds the n-grams of new tokens to the pool."""
        for end in range(max(self.num_read, NUM_FOLLOWING, len(tokens) - NUM_READ), len(tokens)):
            self.pool.put(tokens[end - NUM_FOLLOWING], tokens[end - NUM_FOLLOWING + 1 : end + 1])
        self.num_read = len(tokens)

    def advance(self, chosen: IntArray, num_accepted: int) -> None:
        """Adds the model's token after each column of the last draft, and advances with the text."""
        for column, place in zip(self.columns, self.places, strict=False):
            guess = int(chosen[place + 1])
            if guess < 0:
                continue
            column.append(guess)
            if len(column) > NUM_LEVELS:
                self.pool.put(column[0], column[1:])
                del column[0]
        for column in self.columns[:num_accepted]:  # their positions are known now
            overwrite(column)
        del self.columns[:num_accepted]
        self.places = []

    def wipe(self) -> None:
        """Overwrites the content."""
        self.pool.wipe()
        for column in self.columns:
            overwrite(column)
        self.columns, self.places, self.draft = [], [], None


class LookaheadDrafter(Drafter):
    """Drafts n-grams to verify, and a window of guesses in the remaining nodes.

    Args:
        max_num_seqs: maximum number of sequences, for the memory budget.
    """

    max_drafts = MAX_DRAFTS

    def __init__(self, max_num_seqs: int) -> None:
        self.fixed_bytes = max_num_seqs * (NUM_BYTES + 4 * MAX_COLUMNS * (NUM_LEVELS + 1))
        self._windows: dict[int, _Window] = {}

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def observe(self, seen: Sequence[VerifyFeedback]) -> None:
        for each in seen:
            window = self._of(each.state)
            window.read(each.state.tokens)
            if each.draft is window.draft:
                window.advance(each.chosen, len(each.path))
            window.draft = None

    def forget(self, seq_id: int) -> None:
        if (window := self._windows.pop(seq_id, None)) is not None:
            window.wipe()

    def fork(self, parent_id: int, child_id: int) -> None:
        if (window := self._windows.get(parent_id)) is not None:
            self.forget(child_id)
            self._windows[child_id] = _Window(window.pool.copy(), window.num_read)

    def _of(self, state: SequenceState) -> _Window:
        window = self._windows.get(state.seq_id)
        if window is None or window.num_read > len(state.tokens):  # another sequence with the same id
            self.forget(state.seq_id)
            window = self._windows[state.seq_id] = _Window(NgramPool())
        return window

    def _draft(self, request: DraftRequest) -> Draft:
        tokens, window = request.state.tokens, self._of(request.state)
        window.read(tokens)
        drafts = _find(window.pool, tokens[-1], request.num_drafts)
        if request.parents is not None:
            return fill_shape(drafts, request.parents[: request.num_drafts])
        tree = _Tree(drafts)
        num_columns = min(MAX_COLUMNS, (request.num_drafts - len(tree.token_ids)) // NUM_LEVELS)
        while len(window.columns) < num_columns:
            window.columns.append(array("i", (_guess(tokens, len(window.columns)),)))
        window.places = tree.add_window(window.columns[:num_columns])
        window.draft = Draft(tree.token_ids, tree.parents)
        return window.draft


class _Tree:
    """A draft under construction; existing nodes are not added again."""

    def __init__(self, draft: Draft) -> None:
        self.token_ids = list(draft.token_ids)
        self.parents = list(draft.parents or ())
        self._places = {key: place for place, key in enumerate(zip(self.parents, self.token_ids, strict=True))}

    def add_window(self, columns: Sequence[array[int]]) -> list[int]:
        """Adds columns level by level, so that parents come first; returns the index of each one's newest guess."""
        newest: list[int] = []
        parent = -1
        for column in columns:
            parent = self._add(parent, column[0])
            newest.append(parent)
        for level in range(1, NUM_LEVELS):
            for number, column in enumerate(columns):
                if level < len(column):
                    newest[number] = self._add(newest[number], column[level])
        return newest

    def _add(self, parent: int, token: int) -> int:
        place = self._places.setdefault((parent, token), len(self.token_ids))
        if place == len(self.token_ids):
            self.token_ids.append(token)
            self.parents.append(parent)
        return place


def _find(pool: NgramPool, last: int, num_drafts: int) -> Draft:
    """Returns the n-grams that begin with the last known token, as a tree."""
    trie = Trie()
    by_age, by_depth = DECAY
    for age, following in enumerate(pool.find(last)):
        trie.add(following, [by_age**age * by_depth**depth for depth in range(NUM_FOLLOWING)])
    return trie.best(num_drafts)


def _guess(tokens: array[int], column: int) -> int:
    """Returns a deterministic token of the text for a position without a guess."""
    number = (len(tokens) * MAX_COLUMNS + column + 1) * 0x9E3779B1 % (1 << 32)
    return tokens[number * len(tokens) >> 32]


@DRAFTERS.register("lookahead", THREAT)
def make_lookahead_drafter(context: DrafterContext) -> Drafter:
    """Creates the drafter (`DrafterFactory`); it needs no files."""
    return LookaheadDrafter(context.max_num_seqs)
